//! The memory of a surface: for most backends a mapping that grows in place, for exmap a mapping of
//! its device.

use std::ptr::NonNull;

use crate::PAGE_SIZE;
use crate::backend::exmap::ExmapMemory;
use crate::error::ReserveError;
use crate::mapping::{PURPOSE, Reservation};

/// The addresses of a surface.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Private anonymous memory.
    Reserved(Reservation),
    /// The surface of an exmap.
    Exmap(ExmapMemory),
}

impl Memory {
    /// Private anonymous memory for `pages` pages.
    pub(crate) fn reserve(pages: u64) -> Result<Self, ReserveError> {
        Ok(Self::Reserved(Reservation::new(bytes_of(pages)?, PURPOSE)?))
    }

    /// The first byte; always the same.
    pub(crate) fn base(&self) -> NonNull<u8> {
        match self {
            Self::Reserved(reservation) => reservation.base(),
            Self::Exmap(exmap) => exmap.base(),
        }
    }

    /// Bytes that may be used.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Reserved(reservation) => reservation.len(),
            Self::Exmap(exmap) => exmap.len(),
        }
    }

    /// As [`Reservation::grow`].
    pub(crate) fn grow(&self, bytes: usize) -> Result<(), ReserveError> {
        match self {
            Self::Reserved(reservation) => reservation.grow(bytes),
            Self::Exmap(exmap) => exmap.grow(bytes),
        }
    }
}

/// Bytes of that many pages.
pub(crate) fn bytes_of(pages: u64) -> Result<usize, ReserveError> {
    usize::try_from(pages)
        .ok()
        .and_then(|pages| pages.checked_mul(PAGE_SIZE))
        .ok_or(ReserveError::TooLarge { purpose: PURPOSE, bytes: usize::MAX })
}
