//! State words by frame: a word for each frame of the pool, none for pages that have no frame.
//!
//! The array of `states.rs` has a word for each page of the file. If the pool can read the
//! page tables (refined exmap, "PtMap", section III-C), the PTEs say which page is in which frame,
//! and 8 bytes for each frame are enough. The paper puts the word into the page instead. That would
//! be wrong here: a thread locks a page by a write, and if the page has just been evicted, that
//! write kills the process; a read of the page from the file would overwrite its lock; a stale
//! reference into a page of several frames would take the page's data for a lock; and each page of
//! a file would have 8 bytes less than on other backends. A frame's word always exists.
//!
//! What holds:
//! - The word of a frame without a page is locked, or was never written. If several threads claim a
//!   page, one succeeds, and it holds the lock at the moment at which others see the page.
//! - A word's version never goes back, whatever page has the frame. A page that is seen in the same
//!   frame before and after its word was read had that word in between. So a thread that
//!   exchanges the word that it saw, or finds its version unchanged, still looks at the same page.
//! - A bit marks each freed page and each inner frame. A thread that frees a page that is not
//!   resident sets the bit and then looks for the page. A thread that claims a page looks at the
//!   bit afterwards. At least one of the two sees the other.
//! - Threads wait for a page, not for a frame: the thread that releases a page wakes all waiters of
//!   the page.

#![allow(unsafe_code)]

#[cfg(not(feature = "model"))]
use vellum_vm::Reservation;
use vellum_vm::{Entry, Errno, ReserveError, Surface};

use crate::error::PoolError;
use crate::page::frame_tables::FrameTables;
use crate::page::page_bits::PageBits;
use crate::page::parking::ParkingLot;
use crate::page::state::{Leave, PageState, SlotMask, State, Word};
use crate::page::{PageId, PageRef};
use crate::sync::{AtomicU64, Ordering, thread};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct FrameStates {
    tables: FrameTables,
    words: Words,
    /// Pages of the file that cannot be faulted in: they were freed, or are inner frames of a
    /// longer page.
    unfit: PageBits,
    /// The word that stands for pages without one.
    nowhere: PageState,
    pages: AtomicU64,
}

#[cfg(not(feature = "model"))]
type Words = Reservation;
#[cfg(feature = "model")]
type Words = Vec<PageState>;

/// The outcome of an attempt to claim a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The caller has locked all of its frames, which have memory with arbitrary contents.
    Ours,
    /// Another thread has it, or had it just now: retry.
    Lost,
    /// Another page has one of its inner frames.
    Blocked,
    /// There is no memory for it.
    Failed(Errno),
}

impl FrameStates {
    /// States of the pages of a surface that has so many frames.
    ///
    /// # Errors
    /// Where the surface's page tables cannot be seen.
    pub(crate) fn new(surface: &Surface, frames: u64, pages: u64) -> Result<Self, PoolError> {
        let tables = FrameTables::new(surface, frames)?;
        surface.claimed_by_owner();
        assert!(pages <= tables.pages(), "a surface is no longer than its tables");
        Ok(FrameStates {
            words: Self::words(tables.frames())?,
            tables,
            unfit: PageBits::new(pages, "free pages")?,
            nowhere: PageState::nowhere(),
            pages: AtomicU64::new(pages),
        })
    }

    #[cfg(not(feature = "model"))]
    fn words(frames: u64) -> Result<Words, ReserveError> {
        let bytes = usize::try_from(frames).unwrap_or(usize::MAX).saturating_mul(8);
        Reservation::new(bytes, "frame states")
    }

    #[cfg(feature = "model")]
    fn words(frames: u64) -> Result<Words, ReserveError> {
        Ok((0..frames).map(|_| PageState::evicted()).collect())
    }

    /// Makes room for `pages` pages; never shrinks. The surface has them already.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        self.unfit.grow(pages)?;
        assert!(pages <= self.tables.pages(), "a surface is no longer than its tables");
        self.pages.fetch_max(pages, Ordering::AcqRel);
        Ok(())
    }

    /// Bytes of memory that words and bits take at this moment.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Errno> {
        #[cfg(not(feature = "model"))]
        return Ok(self.words.resident_bytes()? + self.unfit.resident_bytes()?);
        #[cfg(feature = "model")]
        self.unfit.resident_bytes()
    }

    /// How many pages there is room for.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn word(&self, frame: u64) -> &PageState {
        #[cfg(not(feature = "model"))]
        {
            assert!(frame < self.tables.frames(), "a frame that this machine does not have");
            // SAFETY: within the reservation, aligned, and any bit pattern is a valid word.
            unsafe { &*self.words.base().as_ptr().cast::<PageState>().add(frame as usize) }
        }
        #[cfg(feature = "model")]
        &self.words[frame as usize]
    }

    /// The word of a page and its value, if the file is that long. A word that no thread has ever
    /// written says evicted for a moment; a thread that then claims the page finds that another one
    /// has.
    #[inline(always)]
    pub(crate) fn look(&self, page: PageId) -> Option<(&PageState, Word)> {
        if page.0 >= self.pages.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: all pages in view have an entry, as `new` and `grow` see to.
        let frame_now = || unsafe { self.tables.frame_unchecked(page.0) };
        if let Some(frame) = frame_now() {
            let state = self.word(frame);
            let seen = state.load();
            if frame_now() == Some(frame) {
                return Some((state, seen));
            }
        }
        Some(self.look_again(page))
    }

    #[cold]
    #[inline(never)]
    fn look_again(&self, page: PageId) -> (&PageState, Word) {
        loop {
            let Some(frame) = self.tables.frame(page.0) else {
                let unfit = self.unfit.contains(page.0);
                return (&self.nowhere, if unfit { Word::FREE } else { Word::EVICTED });
            };
            let state = self.word(frame);
            let seen = state.load();
            if self.tables.frame(page.0) != Some(frame) {
                continue;
            }
            if seen.is_untouched() {
                // The thread that has claimed the page is about to lock it.
                thread::yield_now();
                return (state, seen.as_locked());
            }
            return (state, seen);
        }
    }

    /// The word of a page that the caller holds.
    #[inline(always)]
    pub(crate) fn held(&self, page: PageId) -> &PageState {
        self.word(self.tables.frame(page.0).expect("a page that is held has a frame"))
    }

    /// The cache line to prefetch for the page's word.
    #[inline(always)]
    pub(crate) fn entry(&self, page: PageId) -> Option<*const u8> {
        let known = page.0 < self.pages.load(Ordering::Relaxed);
        #[cfg(not(feature = "model"))]
        return known.then(|| self.tables.entry(page.0).cast());
        #[cfg(feature = "model")]
        known.then(std::ptr::null)
    }

    /// Brings memory to an evicted page that no thread has locked, and locks the page. The caller
    /// has taken its frames out of the budget, and fills them.
    pub(crate) fn claim(&self, surface: &Surface, parking: &ParkingLot, page: PageRef) -> Claim {
        let claim = self.claim_any(surface, parking, page);
        if claim == Claim::Ours && self.unfit.contains(page.id.0) {
            // Freed since the caller saw it.
            self.unclaim(surface, parking, page);
            return Claim::Lost;
        }
        claim
    }

    /// As [`claim`](Self::claim), for a page that is just being allocated. Lost or blocked means
    /// that a thread that had an old reference is still looking at a part of it, or uses it.
    pub(crate) fn claim_free(
        &self,
        surface: &Surface,
        parking: &ParkingLot,
        page: PageRef,
    ) -> Claim {
        let were_fit: Vec<PageId> = ids(page).filter(|id| self.unfit.set(id.0)).collect();
        let claim = self.claim_any(surface, parking, page);
        if claim == Claim::Ours {
            self.unfit.clear(page.id.0);
        } else {
            were_fit.into_iter().for_each(|id| self.unfit.clear(id.0));
        }
        claim
    }

    /// The head first, so that one of several threads that claim the same page succeeds.
    fn claim_any(&self, surface: &Surface, parking: &ParkingLot, page: PageRef) -> Claim {
        match self.claim_each(surface, &mut [Entry::page(page.id.0)]) {
            Ok(()) => _ = self.held(page.id).take_over(false),
            Err(Errno::EXIST) => return Claim::Lost,
            Err(errno) => return Claim::Failed(errno),
        }
        if page.frames == 1 {
            return Claim::Ours;
        }
        let mut inner: Vec<Entry> = ids(page).skip(1).map(|id| Entry::page(id.0)).collect();
        let Err(errno) = self.claim_each(surface, &mut inner) else {
            ids(page).skip(1).for_each(|id| _ = self.held(id).take_over(false));
            return Claim::Ours;
        };
        inner.retain(|entry| entry.result.is_ok());
        inner.push(Entry::page(page.id.0));
        self.unclaim_each(surface, parking, &mut inner);
        if errno == Errno::EXIST { Claim::Blocked } else { Claim::Failed(errno) }
    }

    /// Brings memory to pages that have none, or takes what is left over there. Fails with the
    /// worst of what their entries say.
    fn claim_each(&self, surface: &Surface, entries: &mut [Entry]) -> Result<(), Errno> {
        self.tables.claim(surface, entries);
        let mut worst = Ok(());
        for entry in entries {
            if entry.result == Err(Errno::EXIST) && self.take_left_over(entry_id(entry)) {
                entry.result = Ok(());
            }
            if entry.result.is_err() && matches!(worst, Ok(()) | Err(Errno::EXIST)) {
                worst = entry.result;
            }
        }
        worst
    }

    /// Locks a page that still has memory because an earlier release failed.
    fn take_left_over(&self, page: PageId) -> bool {
        let (state, seen) = self.look_again(page);
        seen.state() == State::Evicted && state.try_lock(seen)
    }

    /// Releases the memory of a page whose claim is undone.
    pub(crate) fn unclaim(&self, surface: &Surface, parking: &ParkingLot, page: PageRef) {
        let mut entries: Vec<Entry> = ids(page).map(|id| Entry::page(id.0)).collect();
        self.unclaim_each(surface, parking, &mut entries);
    }

    /// Releases the memory of claimed pages, each by itself. Memory that the kernel does not
    /// release stays with them until they are claimed again.
    fn unclaim_each(&self, surface: &Surface, parking: &ParkingLot, entries: &mut [Entry]) {
        for entry in entries.iter() {
            let _ = self.held(entry_id(entry)).take_over(false);
        }
        // SAFETY: the pages are the caller's alone; what optimistic readers read is discarded.
        unsafe { surface.release(entries) };
        self.tables.released(entries);
        for entry in entries {
            if entry.result.is_err() {
                let _ = self.held(entry_id(entry)).unlock(Leave::Evicted, false, SlotMask::NONE);
            }
            parking.wake(entry_id(entry));
        }
    }

    /// Prepares the release of a page that the caller holds exclusively.
    pub(crate) fn begin_release(&self, page: PageRef, leave: Leave) {
        if leave == Leave::Free {
            self.unfit.set(page.id.0);
        }
        for id in ids(page).skip(1) {
            self.unfit.set(id.0);
            let _ = self.held(id).take_over(false);
        }
    }

    /// Undoes [`begin_release`](Self::begin_release): the kernel has not released the page.
    pub(crate) fn cancel_release(&self, parking: &ParkingLot, page: PageRef, leave: Leave) {
        for id in ids(page).skip(1) {
            if self.held(id).take_over(true) {
                parking.wake(id);
            }
        }
        if leave == Leave::Free {
            self.unfit.clear(page.id.0);
        }
    }

    /// Wakes the waiters of a page that has been released: they check it again.
    pub(crate) fn end_release(&self, parking: &ParkingLot, page: PageRef) {
        ids(page).for_each(|id| parking.wake(id));
    }

    /// Notes that pages have just been released.
    pub(crate) fn released(&self, entries: &[Entry]) {
        self.tables.released(entries);
    }

    /// Frees a page that was seen not to be resident. False if a thread reads it in just now; true
    /// if it is free.
    pub(crate) fn free_absent(
        &self,
        surface: &Surface,
        parking: &ParkingLot,
        page: PageId,
    ) -> Result<bool, PoolError> {
        if !self.unfit.set(page.0) {
            return Err(PoolError::PageFree(page));
        }
        if self.tables.frame(page.0).is_none() {
            return Ok(true);
        }
        if self.take_left_over(page) {
            self.unclaim_each(surface, parking, &mut [Entry::page(page.0)]);
            return Ok(true);
        }
        self.unfit.clear(page.0);
        Ok(false)
    }
}

/// The frames of a page, by their places.
fn ids(page: PageRef) -> impl Iterator<Item = PageId> {
    (page.id.0..page.id.0 + u64::from(page.frames)).map(PageId)
}

fn entry_id(entry: &Entry) -> PageId {
    PageId(entry.range.start)
}
