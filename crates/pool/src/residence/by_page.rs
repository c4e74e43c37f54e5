//! The protocol with a state word for each page of the file ([`StateArray`]).
//!
//! A word exists whether or not its page is resident. So a thread locks the words of a page and of
//! its inner frames, by which it excludes all others, and only then does memory come or go. The
//! bytes lie at the page's own place on the surface, or in a slot.

#![allow(unsafe_code)]

use std::io;

use vellum_vm::{Entry, Errno};

use super::protocol::{ClaimOutcome, PlacedPage, Protocol, Undo, inner_pages};
use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State, Word};
use crate::page::states::StateArray;

/// From so many frames on, a new page's memory is populated by one call instead of by faults.
const POPULATE_FROM: u32 = 4;

impl Protocol for StateArray {
    fn claim_brings_memory(&self) -> bool {
        false
    }

    fn claim(
        &self,
        core: &Core,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<ClaimOutcome, Errno> {
        Ok(self.lock(core, page, state, seen, Leave::Evicted))
    }

    fn claim_unallocated(&self, core: &Core, page: PageRef) -> Result<ClaimOutcome, Errno> {
        let (state, seen) = core.look_at_known(page);
        Ok(match absent(seen) {
            Some(leave) => self.lock(core, page, state, seen, leave),
            None => ClaimOutcome::Lost,
        })
    }

    fn zero(&self, core: &Core, page: PageRef) -> Result<(), PoolError> {
        populate_zeroed(core, page).map_err(|source| PoolError::Populate { page, source })
    }

    /// If the kernel refuses to release the memory, the next claim of the page finds it there.
    fn unclaim(&self, core: &Core, page: PageRef, undo: Undo) {
        let in_slot = undo.slot.filter(|slot| *slot > 0);
        if in_slot.is_none() {
            core.release_small(&mut [Entry::new(page.range())]);
        }
        if let Some(slot) = undo.slot {
            core.vacate(page, slot);
        }
        unlock_inner(core, page, undo.inner);
        core.unlock(page, undo.head, false);
        if let (Some(slots), Some(slot)) = (&core.slots, in_slot) {
            slots.give_back(slot);
        }
    }

    fn free_evicted(
        &self,
        core: &Core,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Option<bool>, PoolError> {
        if !self.try_lock_absent(core, page, state, seen) {
            return Ok(None);
        }
        core.unlock(page, Leave::Free, false);
        Ok(Some(true))
    }

    fn begin_release(&self, _core: &Core, _page: PageRef, _leave: Leave) {}

    /// The whole page: if the kernel releases a part of a long one, the next claim finds the rest.
    fn entry(&self, _core: &Core, page: PageRef) -> Entry {
        Entry::new(page.range())
    }

    fn note_released(&self, _entries: &[Entry]) {}

    fn cancel_release(&self, _core: &Core, _page: PageRef, _leave: Leave) {}

    fn end_release(&self, core: &Core, placed: PlacedPage, leave: Leave) {
        let page = placed.page;
        core.forget(placed);
        inner_pages(page).for_each(|inner| core.free_inner(inner));
        core.unlock(page, leave, false);
    }
}

impl StateArray {
    /// Locks a page that is not resident, and whose word was `seen`, and its inner frames.
    /// Otherwise nothing changes, and the page's state is `leave`.
    fn lock(
        &self,
        core: &Core,
        page: PageRef,
        state: &PageState,
        seen: Word,
        leave: Leave,
    ) -> ClaimOutcome {
        if !self.try_lock_absent(core, page, state, seen) {
            return ClaimOutcome::Lost;
        }
        match self.lock_inner(core, page) {
            Some(inner) => ClaimOutcome::Ours(Undo { head: leave, inner, slot: None }),
            None => {
                core.unlock(page, leave, false);
                ClaimOutcome::Blocked
            }
        }
    }

    /// Locks a page that is not resident, and whose word was `seen`. A word that was zero gets the
    /// version with which it begins.
    fn try_lock_absent(&self, core: &Core, page: PageRef, state: &PageState, seen: Word) -> bool {
        let locked = state.try_lock(seen);
        if locked && seen.has_no_version(core.slot_mask) {
            self.begin_version(page.id, state);
        }
        locked
    }

    /// Locks the inner frames of a page, and returns their states; the caller holds the head. None
    /// if one of the inner frames is resident or in transit; then nothing changed.
    fn lock_inner(&self, core: &Core, page: PageRef) -> Option<Vec<Leave>> {
        let mut before = Vec::with_capacity(page.frames as usize - 1);
        for (inner, state, seen) in core.inner(page) {
            match absent(seen).filter(|_| self.try_lock_absent(core, inner, state, seen)) {
                Some(leave) => before.push(leave),
                None => {
                    unlock_inner(core, page, before);
                    return None;
                }
            }
        }
        Some(before)
    }
}

/// The state of a page that is not resident; none if it is, or is in transit.
fn absent(seen: Word) -> Option<Leave> {
    match seen.state() {
        State::Evicted => Some(Leave::Evicted),
        State::Free => Some(Leave::Free),
        _ => None,
    }
}

/// Unlocks inner frames, from the first on, one for each of `leaves`.
fn unlock_inner(core: &Core, page: PageRef, leaves: impl IntoIterator<Item = Leave>) {
    for (inner, leave) in inner_pages(page).zip(leaves) {
        core.unlock(inner, leave, false);
    }
}

/// Populates a page with zeroed memory, or leaves that to the first write fault. The caller holds
/// the page exclusively and has taken its frames out of the budget.
///
/// # Errors
/// What the kernel said; a part of the page may have memory.
fn populate_zeroed(core: &Core, page: PageRef) -> io::Result<()> {
    let by_writing = core.surface.fault_behaviour().writing_populates();
    if by_writing && page.frames < POPULATE_FROM {
        return Ok(());
    }
    let mut entry = [Entry::new(page.range())];
    core.surface.populate(&mut entry);
    if by_writing {
        // A failure to populate ahead is harmless: the first write populates.
        return Ok(());
    }
    entry[0].result?;
    if !core.surface.fresh_pages_are_zeroed() {
        // SAFETY: the page lies on the surface, its memory is resident and it is held exclusively;
        // what optimistic readers read of it is discarded.
        unsafe { core.own_address(page.id).write_bytes(0, page.bytes()) };
    }
    Ok(())
}
