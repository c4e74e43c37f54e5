//! State words that name the wrong slot: how the pool finds them, and what it does.
//!
//! Such a word is damaged: other code of the process has written to it, or the machine's memory is
//! faulty. A thread that locks a page, evicts it, writes it back, moves it or frees it compares the
//! word with the record of the slots (`slot_owners.rs`). A thread that reads optimistically does
//! not. It reads memory that is mapped in any case.
//!
//! The thread that finds a damaged word gets an error. It never reads or writes the slot that the
//! word names. It puts the word right by the record, if no other thread holds the page. So a page
//! that has changed is not lost, and the next write-back writes it.

use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State};
use crate::residence::protocol::PlacedPage;
use crate::statistics::counters::Event;

impl Core {
    /// Where a page is that the caller holds. None if its word is damaged.
    pub(crate) fn placed(&self, page: PageRef) -> Option<PlacedPage> {
        let slot = self.held_slot(page);
        let is_sound = self.slots.as_ref().is_none_or(|slots| slots.is_of(slot, page.id));
        is_sound.then_some(PlacedPage { page, slot })
    }

    /// The error for a page whose word is damaged, and which the caller holds.
    #[cold]
    #[inline(never)]
    pub(crate) fn damaged_word(&self, page: PageRef) -> PoolError {
        self.counters.count(Event::DamagedWord);
        let slots = self.slots.as_ref().map_or(0, |slots| slots.count());
        let error = PoolError::DamagedWord { page, slot: self.held_slot(page), slots };
        tracing::error!("{error}");
        error
    }

    /// Ends the shared hold of a page whose word is damaged, and puts the word right.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse_shared(&self, page: PageRef, state: &PageState) -> PoolError {
        let error = self.damaged_word(page);
        self.unlock_shared_state(page, state);
        self.repair_word(page);
        error
    }

    /// Ends the exclusive hold of a page whose word is damaged, and puts the word right.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse_exclusive(&self, page: PageRef, dirty: bool) -> PoolError {
        let error = self.damaged_word(page);
        self.repair_held_word(page);
        self.unlock(page, Leave::Unlocked, dirty);
        error
    }

    /// Checks the word of a page that the caller holds exclusively. A damaged word is put right.
    ///
    /// # Errors
    /// [`PoolError::DamagedWord`].
    pub(crate) fn check_word(&self, page: PageRef) -> Result<(), PoolError> {
        if self.placed(page).is_some() {
            return Ok(());
        }
        let error = self.damaged_word(page);
        self.repair_held_word(page);
        Err(error)
    }

    /// Puts the word of a resident page right if it is damaged and no thread holds the page.
    pub(crate) fn repair_word(&self, page: PageRef) {
        let (state, seen) = self.look_at_known(page);
        // The page may leave at any time: it is checked again under the lock.
        let Some(slots) = &self.slots else { return };
        if slots.is_of(seen.slot(slots.mask()), page.id) {
            return;
        }
        if matches!(seen.state(), State::Unlocked | State::Marked) && state.try_lock(seen) {
            self.repair_held_word(page);
            self.unlock(page, Leave::Unlocked, false);
        }
    }

    /// Has the word of a page that the caller holds exclusively name the slot that the page is in
    /// by the record, or none if it is on the surface.
    fn repair_held_word(&self, page: PageRef) {
        let damaged = self.slots.as_ref().filter(|_| self.placed(page).is_none());
        if let Some(slot) = damaged.and_then(|slots| slots.find(page.id)) {
            self.held(page).move_slot(self.held_slot(page), slot);
            tracing::warn!("the state word of {page} names slot {slot} again");
        }
    }
}

/// For tests, which damage words.
#[cfg(feature = "testing")]
impl crate::Pool {
    /// The slot that the state word of a page names; 0 for none.
    #[doc(hidden)]
    pub fn slot_of_page(&self, page: PageRef) -> u64 {
        self.core.slot_of(page.id)
    }

    /// Has the state word of a page name another slot, as much of its number as words have room
    /// for. No other thread uses the page meanwhile.
    #[doc(hidden)]
    pub fn damage_word(&self, page: PageRef, slot: u64) {
        let Some(slots) = &self.core.slots else { return };
        let (state, seen) = self.core.look_at_known(page);
        let mask = slots.mask();
        state.move_slot(seen.slot(mask), mask.cut(slot));
    }
}
