//! The set of resident pages, which eviction goes through: the replacement policy has the pages on
//! the surface, and the record of the slots (`slot_owners.rs`) those in slots.
//!
//! A policy may keep all of them itself instead, as one of the caller's does that knows no slots.

use crate::core::Core;
use crate::page::PageRef;
use crate::page::state::State;
use crate::replacement::{MarkOutcome, Residents};
use crate::residence::protocol::PlacedPage;
use crate::slots::Slots;

impl Core {
    /// The slots, if their record has the resident pages in them and the policy does not.
    fn slots_of_residents(&self) -> Option<&Slots> {
        self.slots.as_ref().filter(|_| self.policy.looks_into_slots())
    }

    /// Notes that a page is resident: it has its memory, or gets it by write faults. The caller
    /// holds the page exclusively and has taken its frames out of the budget.
    pub(crate) fn admit(&self, page: PageRef) {
        let slot = self.held_slot(page);
        match self.slots_of_residents() {
            Some(slots) if slot > 0 => slots.admit(slot, page.id),
            _ => self.policy.admit(page),
        }
        if let (Some(huge), 0) = (&self.huge, slot) {
            huge.admit(page.range());
        }
    }

    /// Notes that a resident page, which the caller holds exclusively, is not resident any more.
    pub(super) fn forget(&self, placed: PlacedPage) {
        let PlacedPage { page, slot } = placed;
        self.vacate(page, slot);
        if slot == 0 || self.slots_of_residents().is_none() {
            self.policy.forget(page);
        }
    }

    /// Notes that a page which the caller holds exclusively leaves its slot, or with 0 the surface.
    pub(super) fn vacate(&self, page: PageRef, slot: u64) {
        if let Some(slots) = &self.slots {
            slots.vacate(slot, page.id);
        }
    }

    /// Whether a page that the caller holds has this length. The caller got the reference some time
    /// ago, and another page may have the place since. True of a page whose word is damaged, which
    /// [`placed`](Core::placed) finds.
    pub(crate) fn is_of_this_length(&self, page: PageRef) -> bool {
        let Some(slots) = self.slots_of_residents() else { return self.policy.contains(page) };
        match self.placed(page) {
            Some(PlacedPage { slot: 0, .. }) => self.policy.contains(page),
            Some(_) => u64::from(page.frames) == slots.frames(),
            None => true,
        }
    }

    /// Whether a page that another thread holds is resident, and not about to be.
    pub(super) fn is_admitted(&self, page: PageRef) -> bool {
        match (self.slots_of_residents(), self.slot_of(page.id)) {
            (Some(slots), slot @ 1..) => {
                slots.is_admitted(slot, page.id) && u64::from(page.frames) == slots.frames()
            }
            _ => self.policy.contains(page),
        }
    }

    /// Visits every page that is resident during the whole call; others may or may not be visited.
    /// No page moves to another slot meanwhile.
    pub(crate) fn for_each_resident(&self, visit: &mut dyn FnMut(PageRef)) {
        self.policy.for_each(visit);
        if let Some(slots) = self.slots_of_residents() {
            let all = 0..slots.positions();
            all.filter_map(|position| slots.resident_at(position)).for_each(visit);
        }
    }
}

impl Residents for Core {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        let Some((state, seen)) = self.states.look(page.id) else { return MarkOutcome::InUse };
        match seen.state() {
            State::Marked => MarkOutcome::AlreadyMarked,
            State::Unlocked if state.try_mark(seen) => MarkOutcome::Marked,
            _ => MarkOutcome::InUse,
        }
    }

    fn slot_positions(&self) -> usize {
        self.slots.as_ref().map_or(0, Slots::positions)
    }

    fn page_in_slot_at(&self, position: usize) -> Option<PageRef> {
        self.slots.as_ref()?.resident_at(position)
    }

    fn empty_slots_from(&self, position: usize) -> usize {
        self.slots.as_ref().map_or(0, |slots| slots.empty_from(position))
    }
}
