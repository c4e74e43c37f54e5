//! The protocol with a state word for each frame ([`FrameStates`]), on exmap.
//!
//! A page has a word only while it has a frame. So memory and lock come together, and the lock ends
//! when the memory goes; as soon as it does, another thread may bring new memory and hold a new
//! lock. The thread that releases a page therefore updates the replacement policy before. Each step
//! here is that of [`FrameStates`] with the same name, and what the pool does besides.

#![allow(unsafe_code)]

use vellum_vm::{Entry, Errno, PageRange};

use super::protocol::{ClaimOutcome, PlacedPage, Protocol, Undo};
use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::frame_states::{Claim, FrameStates};
use crate::page::state::{Leave, PageState, Word};
use crate::replacement::Arrival;

impl Protocol for FrameStates {
    fn claim_brings_memory(&self) -> bool {
        true
    }

    fn claim(
        &self,
        core: &Core,
        page: PageRef,
        _state: &PageState,
        _seen: Word,
    ) -> Result<ClaimOutcome, Errno> {
        outcome(self.claim(&core.surface, &core.parking, page))
    }

    fn claim_unallocated(&self, core: &Core, page: PageRef) -> Result<ClaimOutcome, Errno> {
        outcome(self.claim_free(&core.surface, &core.parking, page))
    }

    fn zero(&self, core: &Core, page: PageRef) -> Result<(), PoolError> {
        // SAFETY: the page lies on the surface, its claim has brought its memory and it is held
        // exclusively; what optimistic readers read of it is discarded.
        unsafe { core.own_address(page.id).write_bytes(0, page.bytes()) };
        Ok(())
    }

    fn unclaim(&self, core: &Core, page: PageRef, _undo: Undo) {
        self.unclaim(&core.surface, &core.parking, page);
    }

    fn free_evicted(
        &self,
        core: &Core,
        page: PageRef,
        _state: &PageState,
        _seen: Word,
    ) -> Result<Option<bool>, PoolError> {
        self.free_absent(&core.surface, &core.parking, page.id).map(Some)
    }

    fn begin_release(&self, core: &Core, page: PageRef, leave: Leave) {
        core.policy.forget(page);
        self.begin_release(page, leave);
    }

    fn entry(&self, core: &Core, page: PageRef) -> Entry {
        match core.is_long(page) {
            true => Entry::new(PageRange::new(page.id.0, 0)),
            false => Entry::new(page.range()),
        }
    }

    fn note_released(&self, entries: &[Entry]) {
        self.released(entries);
    }

    fn cancel_release(&self, core: &Core, page: PageRef, leave: Leave) {
        core.policy.admit(page, Arrival::Needed);
        self.cancel_release(&core.parking, page, leave);
    }

    fn end_release(&self, core: &Core, placed: PlacedPage, _leave: Leave) {
        let page = placed.page;
        match core.is_long(page) {
            // No call has released it yet.
            true => self.unclaim(&core.surface, &core.parking, page),
            false => self.end_release(&core.parking, page),
        }
    }
}

fn outcome(claim: Claim) -> Result<ClaimOutcome, Errno> {
    match claim {
        Claim::Ours => {
            let (head, inner) = (Leave::Evicted, Vec::new());
            Ok(ClaimOutcome::Ours(Undo { head, inner, slot: None }))
        }
        Claim::Lost => Ok(ClaimOutcome::Lost),
        Claim::Blocked => Ok(ClaimOutcome::Blocked),
        Claim::Failed(errno) => Err(errno),
    }
}
