//! What a residency protocol does: the trait, and what its two implementations share.

#![allow(unsafe_code)]

use std::sync::atomic::Ordering;

use vellum_vm::{Entry, Errno};

use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, Word};

/// The steps at which protocols differ. A page has one owner in each of them: the thread that holds
/// it exclusively, or that is about to.
pub(super) trait Protocol {
    /// Whether a claim brings the page's memory. If so, the caller takes the frames out of the
    /// budget before the claim, and otherwise after it.
    fn claim_brings_memory(&self) -> bool;

    /// Locks an evicted page whose word was `seen`, and its inner frames. Never waits.
    ///
    /// # Errors
    /// There is no memory for it. Nothing changed.
    fn claim(
        &self,
        core: &Core,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<ClaimOutcome, Errno>;

    /// As [`claim`](Self::claim), for a page that is being allocated, whose frames are free or
    /// evicted.
    ///
    /// # Errors
    /// As `claim`.
    fn claim_unallocated(&self, core: &Core, page: PageRef) -> Result<ClaimOutcome, Errno>;

    /// Gives a claimed page zeroed memory at its own place, or leaves that to the first write
    /// fault.
    ///
    /// # Errors
    /// [`PoolError::Populate`]. The caller undoes the claim.
    fn zero(&self, core: &Core, page: PageRef) -> Result<(), PoolError>;

    /// Undoes a claim: the page and its inner frames are as before, without memory and unlocked.
    fn unclaim(&self, core: &Core, page: PageRef, undo: Undo);

    /// Frees an evicted page whose word was `seen`. None if the word has changed; false if a thread
    /// is reading the page in.
    ///
    /// # Errors
    /// If it is free already.
    fn free_evicted(
        &self,
        core: &Core,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Option<bool>, PoolError>;

    /// Prepares the release of a page that the caller holds.
    fn begin_release(&self, core: &Core, page: PageRef, leave: Leave);

    /// The part of a page that one call releases. If the call fails, the whole page is still
    /// resident. The entry of a page too long for that is empty.
    fn entry(&self, core: &Core, page: PageRef) -> Entry;

    /// Takes note of entries that the kernel has just released, or not.
    fn note_released(&self, entries: &[Entry]);

    /// The kernel has not released the page, which stays resident. Does not unlock it.
    fn cancel_release(&self, core: &Core, page: PageRef, leave: Leave);

    /// The page's memory is gone: calls the page evicted or free, and its inner frames free.
    fn end_release(&self, core: &Core, placed: PlacedPage, leave: Leave);
}

/// The outcome of an attempt to claim a page.
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// The caller holds the page exclusively.
    Ours(Undo),
    /// Another thread was first: retry.
    Lost,
    /// Another page is taking or releasing one of the inner frames.
    Blocked,
}

/// What undoes the claim of a page.
#[derive(Debug)]
pub(crate) struct Undo {
    /// The state that the page had before: evicted or free.
    pub(super) head: Leave,
    /// Those of its inner frames.
    pub(super) inner: Vec<Leave>,
    /// The slot that the page was given since, 0 for its place on the surface; none before that.
    pub(super) slot: Option<u64>,
}

impl Undo {
    /// Where the page is that was claimed.
    pub(super) fn placed(&self, page: PageRef) -> PlacedPage {
        PlacedPage { page, slot: self.slot.unwrap_or(0) }
    }
}

/// A page that a thread holds, and where it is: the thread has claimed the page, or has read the
/// page's word once, and compared it with the record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedPage {
    pub(crate) page: PageRef,
    /// 0 on the surface.
    pub(super) slot: u64,
}

/// The inner frames of a page, each as if it were a page.
pub(super) fn inner_pages(page: PageRef) -> impl Iterator<Item = PageRef> {
    (page.id.0 + 1..page.id.0 + u64::from(page.frames)).map(|id| PageRef::new(id, 1))
}

impl Core {
    /// That of the pool, which a hit does not ask.
    pub(super) fn protocol(&self) -> &dyn Protocol {
        match self.states.with_frames() {
            Some(states) => states,
            None => self.states.in_array().expect("they are in the array"),
        }
    }

    /// Whether the kernel releases the page in pieces. If a call for it fails, the page may have
    /// holes.
    pub(super) fn is_long(&self, page: PageRef) -> bool {
        u64::from(page.frames) > self.surface.released_whole()
    }

    /// Releases pages that the caller holds. Each lies outside of huge pages, or the entries cover
    /// the whole huge page.
    pub(super) fn release_small(&self, entries: &mut [Entry]) {
        if entries.is_empty() {
            return;
        }
        self.release_batches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller holds the pages exclusively, so only optimistic readers look at them,
        // and those discard what they read.
        unsafe { self.surface.release(entries) };
        self.protocol().note_released(entries);
    }
}
