//! How pages become resident and how they leave: the order of the steps on state words, memory and
//! the replacement policy.
//!
//! The thread that faults a page in claims the page (it locks all of its frames), fills it, admits
//! it and unlocks it. The thread that evicts or frees a page locks it, releases its memory, and
//! then calls it evicted or free.
//!
//! Two protocols (`protocol.rs`) say how a page is claimed and how it leaves: with a word for each
//! page of the file (`by_page.rs`), or with one for each frame (`by_frame.rs`).
//!
//! In a pool with slots (`slots.rs`), which has a word for each page, a page may lie in a slot, and
//! no memory comes or goes. The thread that faults the page in takes the slot together with the
//! frames of the budget; the thread that evicts or frees the page changes the word first, and gives
//! the slot back afterwards.

#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::{io, slice};

use vellum_vm::{Entry, Errno, PAGE_SIZE, Surface};

use crate::core::{Core, ReservedPage};
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::format::PageDamage;
use crate::page::state::{Leave, PageState, State, Word};
use crate::replacement::Arrival;
use crate::slots::Slots;
use crate::statistics::counters::Event;
use crate::sync::interleave;

mod by_frame;
mod by_page;
mod protocol;
mod residents;
mod slot_check;

use protocol::inner_pages;
pub(crate) use protocol::{ClaimOutcome, PlacedPage, Undo};

/// Retries, a millisecond or so apart, for a frame that another thread has locked through a stale
/// reference. That thread unlocks the frame when its read has ended, if not before.
pub(crate) const RETRIES: u32 = 1_000;

impl Core {
    /// Whether a claim brings the page's memory. If so, the caller takes the frames out of the
    /// budget before the claim, and otherwise after it.
    pub(crate) fn claim_brings_memory(&self) -> bool {
        self.protocol().claim_brings_memory()
    }

    /// Locks an evicted page whose word was `seen`, and its inner frames. Never waits.
    ///
    /// # Errors
    /// If one of the frames is a page of its own, or there is no memory. Nothing changed.
    pub(crate) fn claim(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<ClaimOutcome, PoolError> {
        let outcome = self.protocol().claim(self, page, state, seen);
        let outcome = self.check_claim(page, outcome.map_err(|errno| no_memory(page, errno))?)?;
        let overlaps = || inner_pages(page).any(|inner| self.is_resident_head(inner));
        match outcome {
            ClaimOutcome::Blocked if overlaps() => Err(PoolError::WrongSize(page)),
            outcome => Ok(outcome),
        }
    }

    /// Undoes a claim if the word of the page, which was not resident, names a slot all the same.
    /// Then the word is as it should be.
    fn check_claim(&self, page: PageRef, outcome: ClaimOutcome) -> Result<ClaimOutcome, PoolError> {
        match outcome {
            ClaimOutcome::Ours(undo) if self.held_slot(page) > 0 => {
                let error = self.damaged_word(page);
                self.unclaim(page, undo);
                Err(error)
            }
            outcome => Ok(outcome),
        }
    }

    /// Locks a page that is being allocated, and returns where it is. It gives the page zeroed
    /// memory, or leaves that to the first write fault. The caller has taken the frames out of the
    /// budget.
    ///
    /// A thread with a stale reference may hold one of the frames; it soon finds the reference
    /// stale and unlocks the frame.
    ///
    /// # Errors
    /// [`PoolError::InUse`], [`PoolError::Populate`] or [`PoolError::DamagedWord`]. Nothing
    /// changed.
    pub(crate) fn claim_unallocated(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
    ) -> Result<PlacedPage, PoolError> {
        for _ in 0..RETRIES {
            let outcome = self.protocol().claim_unallocated(self, page);
            let outcome = outcome.map_err(|errno| no_memory(page, errno))?;
            if let ClaimOutcome::Ours(undo) = self.check_claim(page, outcome)? {
                return self.fill_unallocated(page, reserved, undo);
            }
            if is_settled(self.look_at_known(page))
                || self.inner(page).any(|(_, state, seen)| is_settled((state, seen)))
            {
                break;
            }
            self.budget.wait_briefly();
        }
        Err(PoolError::InUse(page))
    }

    /// Whether a resident page begins at a frame. A thread may hold that page, for as long as it
    /// likes: another page cannot wait for the frame.
    fn is_resident_head(&self, frame: PageRef) -> bool {
        let sight = self.look_at_known(frame);
        let is_held = sight.1.state() == State::Locked;
        is_settled(sight) || is_held && self.is_admitted(self.whole(frame.id))
    }

    /// Gives a claimed page the slot that was reserved for it, if it lies in one. Returns the
    /// surface and the place on it for the page's bytes.
    pub(crate) fn place_claimed(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
        undo: &mut Undo,
    ) -> (&Surface, u64) {
        let Some(slots) = &self.slots else { return (&self.surface, page.id.0) };
        let slot = reserved.take_slot().unwrap_or(0);
        undo.slot = Some(slot);
        slots.assign(slot, page.id);
        if slot == 0 {
            return (&self.surface, page.id.0);
        }
        self.held(page).set_slot(slot);
        (slots.surface(), slots.place(slot))
    }

    /// Gives a locked page that is being allocated its memory, and joins its frames. Undoes the
    /// claim if there is no memory.
    fn fill_unallocated(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
        mut undo: Undo,
    ) -> Result<PlacedPage, PoolError> {
        self.place_claimed(page, reserved, &mut undo);
        match (&self.slots, undo.slot) {
            (Some(slots), Some(slot @ 1..)) => {
                // SAFETY: the slot is mapped, and the page's, which is held exclusively; what
                // optimistic readers read of it is discarded.
                unsafe { slots.address(slot).write_bytes(0, page.bytes()) };
            }
            _ => {
                if let Err(error) = self.protocol().zero(self, page) {
                    self.unclaim(page, undo);
                    return Err(error);
                }
            }
        }
        self.join(page);
        Ok(undo.placed(page))
    }

    /// Makes the locked inner frames part of the page, whose contents are complete.
    fn join(&self, page: PageRef) {
        for inner in inner_pages(page) {
            if self.held(inner).take_over(true) {
                self.parking.wake(inner.id);
            }
        }
    }

    /// The inner frames of a page, with their state words.
    pub(crate) fn inner(&self, page: PageRef) -> impl Iterator<Item = (PageRef, &PageState, Word)> {
        inner_pages(page).filter_map(|inner| {
            let (state, seen) = self.states.look(inner.id)?;
            Some((inner, state, seen))
        })
    }

    /// An inner frame that is in transit: another page, or this one, is taking or releasing it.
    pub(crate) fn inner_in_transit(&self, page: PageRef) -> Option<(PageRef, &PageState, Word)> {
        self.inner(page).find(|(_, _, seen)| seen.state() == State::Locked)
    }

    /// Checks and admits a claimed page whose read has ended, or has it repaired or made, which may
    /// take long. After an error the caller must [`unclaim`](Core::unclaim) the page.
    pub(crate) fn finish_read(
        &self,
        page: PageRef,
        undo: &Undo,
        result: io::Result<()>,
        arrival: Arrival,
    ) -> Result<(), PoolError> {
        self.check_word(page)?;
        let is_pending = self.format.is_pending(page);
        let read = match (result, is_pending) {
            (result, true) if result.is_ok() || self.needs_no_read(page) => {
                Err(PageDamage { page, what: "only the log has its newest state".into() }.into())
            }
            (result, _) => self.check_read(page, result),
        };
        match read {
            Ok(()) => {}
            // A repair keeps other reads waiting. The fix of a page that is read ahead repairs it.
            Err(error) if arrival == Arrival::Needed => self.repair(page, error, is_pending)?,
            Err(error) => return Err(error),
        }
        self.join(page);
        self.admit(undo.placed(page), arrival);
        Ok(())
    }

    fn check_read(&self, page: PageRef, result: io::Result<()>) -> Result<(), PoolError> {
        result.map_err(|source| PoolError::Read { page, source })?;
        // SAFETY: the page was just read and is held exclusively.
        let bytes = unsafe { self.bytes(page) }?;
        Ok(self.format.verify(page, bytes)?)
    }

    /// Whether a claimed page has memory, or gets it when a thread writes to it, without a read.
    pub(crate) fn needs_no_read(&self, page: PageRef) -> bool {
        self.held_slot(page) > 0
            || self.surface.fault_behaviour().writing_populates()
            || self.claim_brings_memory()
    }

    /// Has a claimed page repaired that could not be read, that is damaged, or that is pending.
    ///
    /// # Errors
    /// The error of the read, if it is not repaired.
    #[cold]
    fn repair(&self, page: PageRef, error: PoolError, is_pending: bool) -> Result<(), PoolError> {
        // After a failed read the page may have no memory.
        if !matches!(error, PoolError::Damaged(_)) && !self.needs_no_read(page) {
            return Err(error);
        }
        let address = self.address(page)?;
        // SAFETY: the page has memory, or gets it by this write, and is held exclusively; what
        // optimistic readers read of it is discarded.
        let bytes = unsafe { slice::from_raw_parts_mut(address, page.bytes()) };
        // First, so that a checkpoint which begins during the repair waits for the page and writes
        // it. A poisoned pool writes nothing, and could never evict the page.
        let is_dirty = self.check_poison().is_ok();
        if is_dirty {
            self.held(page).set_dirty();
            self.note_dirty(page.id);
        }
        let repair = || self.format.repair(page, bytes) && self.format.verify(page, bytes).is_ok();
        let repaired = catch_unwind(AssertUnwindSafe(repair));
        if is_dirty && !matches!(repaired, Ok(true)) {
            self.clear_dirty(page);
        }
        match repaired {
            Ok(true) => {}
            Ok(false) => return Err(error),
            Err(panic) => resume_unwind(panic),
        }
        if !is_pending {
            tracing::warn!("repaired {page}: {error}");
            self.counters.count(Event::Repair);
        } else if is_dirty {
            // Otherwise the page is as it was: the file will not have it.
            self.format.note_made(page);
        }
        Ok(())
    }

    /// Undoes the claim of a page that was not admitted: the page is without memory and unlocked.
    /// It gets back its state, and so do its inner frames: the reference to it may be wrong.
    pub(crate) fn unclaim(&self, page: PageRef, undo: Undo) {
        self.protocol().unclaim(self, page, undo);
    }

    /// Gives the frames of a page back that has left: its slot, or those of the surface. The caller
    /// puts them back into the budget afterwards.
    fn give_back_frames(&self, page: PageRef, slot: u64) {
        match &self.slots {
            None => {}
            Some(slots) if slot == 0 => slots.end_loan(u64::from(page.frames)),
            Some(slots) => slots.give_back(slot),
        }
    }

    /// Releases the memory of admitted pages, with one call for all, and evicts the pages; one
    /// result for each. The caller holds the pages exclusively; no reference to their bytes is
    /// left.
    ///
    /// EBUSY is an ordinary answer: the page lies in a huge page that is pinned for I/O or that the
    /// collapser is building, or, on exmap, the page's own I/O still pins it. A page whose release
    /// fails stays resident, unlocked.
    pub(crate) fn evict(&self, pages: &[PlacedPage]) -> Vec<Result<(), Errno>> {
        let protocol = self.protocol();
        pages.iter().for_each(|placed| protocol.begin_release(self, placed.page, Leave::Evicted));
        let on_surface = pages.iter().filter(|placed| placed.slot == 0);
        let mut entries: Vec<Entry> =
            on_surface.map(|placed| protocol.entry(self, placed.page)).collect();
        match &self.huge {
            Some(huge) => {
                huge.release(&self.surface, &mut entries, |entries| self.release_small(entries));
            }
            None => self.release_small(&mut entries),
        }
        let mut released = entries.into_iter().map(|entry| entry.result);
        let results = pages.iter().map(|placed| {
            let result = match placed.slot {
                0 => released.next().expect("each page on the surface has an entry"),
                _ => Ok(()),
            };
            self.end_release(*placed, Leave::Evicted, result)
        });
        results.collect()
    }

    /// As [`evict`](Core::evict), for one page that is freed. Where `evict` would say EBUSY, this
    /// waits a little, because no later eviction retries. If the release fails all the same, the
    /// page stays resident, unlocked.
    pub(crate) fn release_freed(&self, placed: PlacedPage) -> io::Result<()> {
        let PlacedPage { page, slot } = placed;
        self.protocol().begin_release(self, page, Leave::Free);
        let mut entry = self.protocol().entry(self, page);
        match &self.huge {
            _ if slot > 0 => {}
            Some(huge) => {
                let release = |entries: &mut [Entry]| self.release_small(entries);
                huge.release_freed(&self.surface, &mut entry, release);
            }
            None => self.release_small(slice::from_mut(&mut entry)),
        }
        Ok(self.end_release(placed, Leave::Free, entry.result)?)
    }

    /// Frees an evicted page whose word was `seen`. None if the word has changed; false if a thread
    /// is reading the page in.
    ///
    /// # Errors
    /// If it is free already.
    pub(crate) fn free_evicted(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Option<bool>, PoolError> {
        self.protocol().free_evicted(self, page, state, seen)
    }

    /// Moves a page from its slot to one of a chunk that stays when the pool shrinks. False if it
    /// is in none, if a thread holds it, if its word is damaged, or if no slot is free.
    ///
    /// The thread holds the page exclusively while it copies the bytes. An optimistic reader with
    /// an older word reads the old slot, and finds that the version has changed.
    pub(crate) fn move_page(&self, slots: &Slots, page: PageRef) -> bool {
        let (state, seen) = self.look_at_known(page);
        if !matches!(seen.state(), State::Unlocked | State::Marked) {
            return false;
        }
        let Some(to) = slots.take_elsewhere() else { return false };
        if !state.try_lock(seen) {
            slots.give_back(to);
            return false;
        }
        let Some(PlacedPage { slot: from, .. }) = self.placed(page) else {
            self.refuse_exclusive(page, false);
            slots.give_back(to);
            return false;
        };
        // Another page may be in its place since. If that is in a slot, too, it has this length.
        if from == 0 {
            self.unlock(page, Leave::Unlocked, false);
            slots.give_back(to);
            return false;
        }
        slots.assign(to, page.id);
        state.move_slot(from, to);
        interleave();
        let bytes = slots.frames() as usize * PAGE_SIZE;
        // SAFETY: both slots are mapped. No thread writes to the page, which is held exclusively,
        // and the other slot is this thread's; what optimistic readers read of it is discarded.
        unsafe { slots.address(from).copy_to_nonoverlapping(slots.address(to), bytes) };
        interleave();
        self.note_moved(page, to);
        slots.vacate(from, page.id);
        self.unlock(page, Leave::Unlocked, false);
        slots.give_back(from);
        true
    }

    /// Ends the exclusive hold of a page after its release, which may have failed. If not, its slot
    /// or its frames of the surface go back.
    ///
    /// After a release the inner frames are free, even if the page itself is only evicted: none of
    /// them is a page, and a reader with a stale reference to one must not fault it in.
    fn end_release(
        &self,
        placed: PlacedPage,
        leave: Leave,
        released: Result<(), Errno>,
    ) -> Result<(), Errno> {
        let PlacedPage { page, slot } = placed;
        // A page that may have holes is no longer resident. The next claim finds what is left.
        if released.is_err() && !self.is_long(page) {
            self.protocol().cancel_release(self, page, leave);
            self.unlock(page, Leave::Unlocked, false);
            return released;
        }
        // Only a freed page may still be dirty, and no thread can fault that one in. An evicted
        // page may be resident again, and dirty, as soon as its memory was released.
        if leave == Leave::Free {
            self.dirty.remove(page.id);
        }
        self.protocol().end_release(self, placed, leave);
        self.give_back_frames(page, slot);
        Ok(())
    }
}

fn no_memory(page: PageRef, errno: Errno) -> PoolError {
    PoolError::Populate { page, source: errno.into() }
}

/// The word is that of a page's head, and the page is resident.
fn is_settled((_, word): (&PageState, Word)) -> bool {
    matches!(word.state(), State::Unlocked | State::Marked | State::Shared(_))
}

#[cfg(all(test, not(feature = "model")))]
mod tests;
