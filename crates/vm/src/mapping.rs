//! A private anonymous mapping that grows in place.
//!
//! Invariants: the base never moves. Bytes `0..len` are always mapped readable and writable. Only
//! written pages use memory. A forked child does not have the mapping (a copy-on-write copy would
//! double the memory and hide writes), and a core dump does not contain it. Huge pages fill it only
//! where the owner asked for them. The mapping is only as long as the owner asked for, rounded up
//! to [`STEP`], so it needs no overcommit setting and takes no terabytes up front.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::process::Pid;

use crate::error::ReserveError;
use crate::lane::Lane;
use crate::limits;
use crate::range::PageRange;
use crate::residency;
use crate::{HUGE_PAGE_SIZE, PAGE_SIZE, sys};

/// What a surface's mapping is for, in error messages.
pub(crate) const PURPOSE: &str = "surface";

/// Mappings grow by multiples of this many bytes, so that growing page by page costs few calls.
pub const STEP: usize = 64 << 20;

/// A growable private anonymous mapping whose base never moves.
///
/// Fresh bytes are zero. The owner manages the memory (see `Surface`); dropping the reservation
/// unmaps everything. A forked child has no such mapping and must not touch it.
#[derive(Debug)]
pub struct Reservation {
    base: NonNull<u8>,
    /// Bytes that the owner may use; a multiple of the page size.
    len: AtomicUsize,
    /// Bytes that are mapped: `len <= mapped`. The lock makes growing one at a time.
    mapped: Mutex<usize>,
    /// Bytes from the base on that huge pages may fill.
    huge: AtomicUsize,
    purpose: &'static str,
    /// The process that made it; a forked child must not unmap what it does not have.
    owner: Pid,
    /// None where the kernel chose the address.
    lane: Option<Lane>,
}

// SAFETY: the reservation only owns addresses; it never reads or writes the memory at them, and its
// own fields are atomic or locked.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Maps `bytes` (rounded up to whole pages; 0 is allowed and can grow later).
    ///
    /// Error messages say with `purpose` what the mapping is for, e.g. `"page states"`.
    ///
    /// # Errors
    /// [`ReserveError`], which names the limit. Nothing stays mapped.
    pub fn new(bytes: usize, purpose: &'static str) -> Result<Self, ReserveError> {
        let found = sys::page_size();
        if found != PAGE_SIZE {
            return Err(ReserveError::PageSize { found });
        }
        Self::placed(bytes, purpose, place)
    }

    /// Maps `bytes` where `place` puts them.
    fn placed(
        bytes: usize,
        purpose: &'static str,
        place: impl Fn(usize) -> Result<(NonNull<u8>, Option<Lane>), Errno>,
    ) -> Result<Self, ReserveError> {
        let len = whole_pages(bytes, purpose)?;
        let generous = len.checked_next_multiple_of(STEP).unwrap_or(len).max(STEP);
        let exact = len.max(PAGE_SIZE);
        // If a step does not fit into the address space, the exact size may.
        let placed = place(generous)
            .map(|placed| (placed, generous))
            .or_else(|_| place(exact).map(|placed| (placed, exact)));
        let ((base, lane), mapped) =
            placed.map_err(|errno| limits::explain(errno, purpose, bytes, exact))?;
        Ok(Self {
            base,
            len: AtomicUsize::new(len),
            mapped: Mutex::new(mapped),
            huge: AtomicUsize::new(0),
            purpose,
            owner: rustix::process::getpid(),
            lane,
        })
    }

    /// Bytes of it that hold memory, by the kernel's page tables. Slow: it reads an entry a page.
    ///
    /// # Errors
    /// If `/proc/self/pagemap` cannot be read.
    pub fn resident_bytes(&self) -> Result<u64, Errno> {
        let pages = PageRange::new(0, (self.len() / PAGE_SIZE) as u64);
        Ok(residency::count(self.base, pages)? * PAGE_SIZE as u64)
    }

    /// Makes the mapping at least `bytes` long in all (rounded up to whole pages), in place.
    ///
    /// Does nothing if it is that long already; never shrinks. Many threads may call it at once.
    ///
    /// # Errors
    /// [`ReserveError`]; the mapping then has the length it had.
    pub fn grow(&self, bytes: usize) -> Result<(), ReserveError> {
        let len = whole_pages(bytes, self.purpose)?;
        if len <= self.len() {
            return Ok(());
        }
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if len > *mapped {
            let generous = len.checked_next_multiple_of(STEP).unwrap_or(len);
            let end = self.base.as_ptr().wrapping_add(*mapped);
            let grown = map_at(end, generous - *mapped)
                .map(|()| generous)
                .or_else(|_| map_at(end, len - *mapped).map(|()| len));
            *mapped = grown.map_err(|errno| match errno {
                Errno::EXIST => {
                    ReserveError::AddressTaken { purpose: self.purpose, bytes, address: end.addr() }
                }
                errno => limits::explain(errno, self.purpose, bytes, len - *mapped),
            })?;
            if let Some(lane) = &self.lane {
                lane.grown_to(*mapped);
            }
        }
        self.len.fetch_max(len, Ordering::Release);
        Ok(())
    }

    /// Lets huge pages fill the first `bytes` (rounded down to whole huge pages), and collapses the
    /// pages that hold memory there now: from now on the first write to a huge page populates 2
    /// MiB.
    ///
    /// For arrays that are accessed at random: they then miss the TLB far less often. `bytes` may
    /// exceed [`len`](Self::len), as far as addresses are mapped. Contents are never altered, and
    /// other threads may use them meanwhile. This is a hint: it has no effect if the base is not
    /// aligned to 2 MiB, transparent huge pages are switched off, or the kernel has no huge pages.
    pub fn use_huge_pages(&self, bytes: usize) {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.min(*mapped) / HUGE_PAGE_SIZE * HUGE_PAGE_SIZE;
        let from = self.huge.load(Ordering::Relaxed);
        if bytes <= from || !self.base.addr().get().is_multiple_of(HUGE_PAGE_SIZE) {
            return;
        }
        let start = self.base.as_ptr().wrapping_add(from);
        // SAFETY: within the mapping; neither advice touches contents.
        let allowed = unsafe { sys::madvise(start, bytes - from, libc::MADV_HUGEPAGE) };
        if allowed.is_ok() {
            self.huge.store(bytes, Ordering::Relaxed);
            // Kernels before 6.1 do not know it. The result does not matter: small pages stay
            // small. SAFETY: as above.
            let _ = unsafe { sys::madvise(start, bytes - from, sys::MADV_COLLAPSE) };
        }
    }

    /// How many bytes at the beginning huge pages may fill, as
    /// [`use_huge_pages`](Self::use_huge_pages) has asked for.
    pub fn huge_bytes(&self) -> usize {
        self.huge.load(Ordering::Relaxed)
    }

    /// Returns the memory of some bytes, in whole pages, to the kernel. They are zero afterwards.
    ///
    /// # Errors
    /// The kernel's, for memory that is locked for example. Then nothing has changed.
    ///
    /// # Panics
    /// If the bytes are no whole pages of the reservation: a programming error.
    ///
    /// # Safety
    /// No code relies on what is there. Other threads may use the bytes meanwhile: until the call
    /// returns they find what was there, or zeros, and what they write may be lost.
    pub unsafe fn discard(&self, from: usize, bytes: usize) -> Result<(), Errno> {
        let whole = from.is_multiple_of(PAGE_SIZE) && bytes.is_multiple_of(PAGE_SIZE);
        assert!(whole && from <= self.len() && bytes <= self.len() - from, "whole pages of it");
        let start = self.base.as_ptr().wrapping_add(from);
        // SAFETY: within the mapping; the rest is the caller's promise.
        unsafe { sys::madvise(start, bytes, libc::MADV_DONTNEED) }
    }

    /// The first byte; the same for the whole life of the reservation, and page-aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes that the owner may use: the length that it asked for, rounded up to whole pages.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Whether there are no bytes to use yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if rustix::process::getpid() != self.owner {
            return;
        }
        let mapped = *self.mapped.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the range is ours, and the owner gives up every pointer into it with the value.
        // A failure would leak addresses, no memory; drop cannot report it.
        let _ = unsafe { sys::unmap(self.base.as_ptr(), mapped) };
    }
}

/// Rounds up to whole pages.
pub(crate) fn whole_pages(bytes: usize, purpose: &'static str) -> Result<usize, ReserveError> {
    bytes
        .checked_next_multiple_of(PAGE_SIZE)
        .filter(|len| *len <= isize::MAX as usize)
        .ok_or(ReserveError::TooLarge { purpose, bytes })
}

/// Maps `bytes` in a lane of its own, or where the kernel chooses if there is no lane (small
/// address spaces, tools that do not know `MAP_FIXED_NOREPLACE`).
fn place(bytes: usize) -> Result<(NonNull<u8>, Option<Lane>), Errno> {
    let in_lane = Lane::claim(bytes, |address| {
        let start = ptr::without_provenance_mut::<u8>(address);
        match map_at(start, bytes) {
            Ok(()) => Ok(NonNull::new(start)),
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(errno),
        }
    });
    if let Ok(Some((lane, base))) = in_lane {
        return Ok((base, Some(lane)));
    }
    place_anywhere(bytes)
}

/// Maps `bytes` where the kernel chooses.
fn place_anywhere(bytes: usize) -> Result<(NonNull<u8>, Option<Lane>), Errno> {
    // SAFETY: without MAP_FIXED the kernel takes addresses that no mapping uses.
    let base = unsafe { sys::map_anonymous(ptr::null_mut(), bytes, 0)? };
    prepare(base.as_ptr(), bytes)?;
    Ok((base, None))
}

/// Maps `bytes` exactly at `start`; EEXIST if another mapping is there.
fn map_at(start: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: NOREPLACE never replaces a mapping.
    let found = unsafe { sys::map_anonymous(start, bytes, libc::MAP_FIXED_NOREPLACE)? };
    if found.as_ptr() != start {
        // Kernels before 4.17 and some tools take the flag for a hint and put it elsewhere. SAFETY:
        // the mapping was made by the call above and no other code knows it.
        unsafe { sys::unmap(found.as_ptr(), bytes)? };
        return Err(Errno::EXIST);
    }
    prepare(start, bytes)
}

/// Sets the properties that every piece of a reservation has; unmaps the piece if that fails.
fn prepare(start: *mut u8, bytes: usize) -> Result<(), Errno> {
    for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
        // SAFETY: a fresh piece that no other code knows; none of the three touches contents.
        match unsafe { sys::madvise(start, bytes, advice) } {
            Ok(()) => {}
            // A kernel without transparent huge pages does not know the advice, nor needs it.
            Err(Errno::INVAL) if advice == libc::MADV_NOHUGEPAGE => {}
            Err(errno) => {
                // SAFETY: as above.
                let _ = unsafe { sys::unmap(start, bytes) };
                return Err(errno);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn works_where_the_kernel_chooses_the_address() {
        let reservation = Reservation::placed(PAGE_SIZE, "test", place_anywhere).unwrap();
        assert!(reservation.lane.is_none());
        reservation.grow(STEP).unwrap();
        // SAFETY: within the reservation, which no other thread uses.
        unsafe { reservation.base().add(STEP - 1).write(1) };
        match reservation.grow(STEP + 1) {
            Ok(()) => assert_eq!(reservation.len(), STEP + PAGE_SIZE),
            Err(error) => {
                assert!(matches!(error, ReserveError::AddressTaken { .. }), "{error:?}");
                assert_eq!(reservation.len(), STEP);
            }
        }
    }

    #[test]
    fn a_place_that_is_taken_is_never_replaced() {
        let first = Reservation::new(PAGE_SIZE, "test").unwrap();
        // SAFETY: within the reservation, which no other thread uses.
        unsafe { first.base().write(7) };
        assert_eq!(map_at(first.base().as_ptr(), STEP), Err(Errno::EXIST));
        // SAFETY: as above.
        assert_eq!(unsafe { first.base().read() }, 7);
    }
}
