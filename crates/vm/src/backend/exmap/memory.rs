//! Mappings of the device: an exmap's surface, and the vectors of its interfaces.
//!
//! **Room to grow.** The surface of an exmap is mapped once. It cannot move, and another piece
//! after it would be another exmap with frames of its own. So this module maps more than the caller
//! asked for. Address space is free, but the kernel module makes a page table of level 2 (4 KiB)
//! for each GiB of it. The room for growth is the largest of eight times the present length, 1,024
//! times the frames (the tables are then a 256th of the frames' memory), and 64 GiB (256 KiB), and
//! at most what the kernel module maps, 16 TiB. Powers of two keep the number of entries small that
//! mount it. If the kernel refuses (`RLIMIT_AS`), this module tries half, and so on down to the
//! length that the caller asked for.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use vellum_uapi::exmap::OFFSET_SURFACE;

use crate::error::ReserveError;
use crate::mapping::{PURPOSE, whole_pages};
use crate::sys::Rights;
use crate::{PAGE_SIZE, limits, sys};

/// Bytes of the longest surface that the module maps.
const LONGEST: usize = 16 << 40;
/// Bytes that every surface has, if address space is not limited.
const SHORTEST: usize = 64 << 30;
/// The length at which halving stops.
const GIB: usize = 1 << 30;

/// A part of the device that is mapped; unmapped when dropped. A forked child does not have it.
#[derive(Debug)]
pub(super) struct Mapped {
    base: NonNull<u8>,
    bytes: usize,
    owner: Pid,
}

// SAFETY: it only owns addresses; it never reads or writes the memory at them.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the part of the device at an offset.
    pub(super) fn new(
        device: BorrowedFd<'_>,
        bytes: usize,
        offset: u64,
        rights: Rights,
    ) -> Result<Self, Errno> {
        Ok(Self { base: sys::map_device(device, bytes, offset, rights)?, bytes, owner: getpid() })
    }

    /// Its first address.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if getpid() != self.owner {
            return;
        }
        // SAFETY: the range is ours, and the owner gives up every pointer into it with the value.
        // A failure would leak addresses, no memory; drop cannot report it.
        let _ = unsafe { sys::unmap(self.base.as_ptr(), self.bytes) };
    }
}

/// The surface of an exmap; as much of it is in use as the caller asked for.
#[derive(Debug)]
pub(crate) struct ExmapMemory {
    mapped: Mapped,
    len: AtomicUsize,
}

impl ExmapMemory {
    /// Maps the surface of a fresh exmap that has `frames` frames.
    pub(super) fn new(
        device: BorrowedFd<'_>,
        bytes: usize,
        frames: u64,
    ) -> Result<Self, ReserveError> {
        let len = whole_pages(bytes, PURPOSE)?;
        let mut refused = Errno::NOMEM;
        for length in
            lengths(len, frames).ok_or(ReserveError::TooLarge { purpose: PURPOSE, bytes })?
        {
            match Mapped::new(device, length, OFFSET_SURFACE, Rights::ReadAndWrite) {
                Ok(mapped) => return Ok(Self { mapped, len: AtomicUsize::new(len) }),
                Err(errno) => refused = errno,
            }
            if refused != Errno::NOMEM {
                break;
            }
        }
        Err(limits::explain(refused, PURPOSE, bytes, len))
    }

    /// The first byte.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.mapped.base
    }

    /// Bytes in use.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Bytes that are mapped: the length to which it may grow.
    pub(super) fn mapped_bytes(&self) -> usize {
        self.mapped.bytes
    }

    /// Takes more of the mapping into use.
    pub(crate) fn grow(&self, bytes: usize) -> Result<(), ReserveError> {
        let len = whole_pages(bytes, PURPOSE)?;
        let mapped = self.mapped.bytes;
        if len > mapped {
            return Err(ReserveError::RoomUsedUp { purpose: PURPOSE, bytes, mapped });
        }
        self.len.fetch_max(len, Ordering::Release);
        Ok(())
    }
}

/// The lengths to try for a surface of `len` bytes: the wished one, then smaller ones. None if
/// `len` is too long for the module.
fn lengths(len: usize, frames: u64) -> Option<impl Iterator<Item = usize>> {
    if len > LONGEST {
        return None;
    }
    let frames = usize::try_from(frames).unwrap_or(usize::MAX).saturating_mul(PAGE_SIZE);
    let wished = len.saturating_mul(8).max(frames.saturating_mul(1024)).clamp(SHORTEST, LONGEST);
    let wished = wished.checked_next_power_of_two().unwrap_or(LONGEST).min(LONGEST);
    let halved = std::iter::successors(Some(wished), |length| Some(length / 2));
    let halved = halved.take_while(move |length| *length >= len.max(GIB));
    Some(halved.chain([len.max(PAGE_SIZE)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wished(len: usize, frames: u64) -> usize {
        lengths(len, frames).unwrap().next().unwrap()
    }

    #[test]
    fn there_is_room_for_what_files_grow_by() {
        assert_eq!(wished(0, 1), SHORTEST);
        assert_eq!(wished(9 << 30, 1), 128 << 30);
        assert_eq!(wished(1 << 30, 1 << 18), 1 << 40);
        assert_eq!(wished(10 << 40, 1), LONGEST);
        assert_eq!(wished(1, u64::MAX), LONGEST);
        assert!(lengths(LONGEST + 1, 1).is_none());
    }

    #[test]
    fn less_and_less_is_tried_but_never_too_little() {
        let tried: Vec<usize> = lengths(5 << 30, 1).unwrap().collect();
        assert_eq!(tried, [64 << 30, 32 << 30, 16 << 30, 8 << 30, 5 << 30]);
        let tried: Vec<usize> = lengths(0, 1).unwrap().collect();
        assert_eq!((tried[tried.len() - 2], tried[tried.len() - 1]), (GIB, PAGE_SIZE));
    }
}
