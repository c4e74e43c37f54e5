//! One state word for every page of the file, lazily backed.
//!
//! The array is as long as the file has pages, but memory comes only for words that were written:
//! 8 bytes for each page that was ever resident (in whole pages of 512 neighbours), none for the
//! rest of the file. It grows with the file and never moves.

#![allow(unsafe_code)]

use std::mem::size_of;

#[cfg(not(feature = "model"))]
use vellum_vm::Reservation;
use vellum_vm::ReserveError;

use crate::page::PageId;
use crate::page::state::PageState;
use crate::sync::{AtomicU64, Ordering};

/// The state words of all pages.
#[derive(Debug)]
pub(crate) struct StateArray {
    words: Words,
    pages: AtomicU64,
}

#[cfg(not(feature = "model"))]
type Words = Reservation;

/// Shuttle's atomics are no plain words, so the model has a small array of them.
#[cfg(feature = "model")]
type Words = Vec<PageState>;

const _: () = assert!(cfg!(feature = "model") || size_of::<PageState>() == size_of::<u64>());

impl StateArray {
    #[cfg(not(feature = "model"))]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = Reservation::new(Self::bytes(pages), "page states")?;
        Ok(StateArray { words, pages: AtomicU64::new(pages) })
    }

    #[cfg(feature = "model")]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = (0..256).map(|_| PageState::evicted()).collect();
        Ok(StateArray { words, pages: AtomicU64::new(pages) })
    }

    #[cfg(not(feature = "model"))]
    fn bytes(pages: u64) -> usize {
        usize::try_from(pages.max(1)).unwrap_or(usize::MAX).saturating_mul(size_of::<PageState>())
    }

    /// Makes room for `pages` words; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        #[cfg(not(feature = "model"))]
        self.words.grow(Self::bytes(pages))?;
        self.pages.fetch_max(pages, Ordering::AcqRel);
        Ok(())
    }

    /// How many pages have a word.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// The word of `page`, if the file is that long.
    #[inline(always)]
    pub(crate) fn get(&self, page: PageId) -> Option<&PageState> {
        if page.0 >= self.pages.load(Ordering::Acquire) {
            return None;
        }
        #[cfg(not(feature = "model"))]
        // SAFETY: the reservation holds at least `pages` words (it grows before the count does),
        // it is aligned to 4 KiB, lives as long as `self`, and any bit pattern is a valid word.
        unsafe {
            Some(&*self.words.base().as_ptr().cast::<PageState>().add(page.0 as usize))
        }
        #[cfg(feature = "model")]
        self.words.get(page.0 as usize)
    }
}
