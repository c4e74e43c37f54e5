//! The set of resident pages, which eviction goes through: the replacement policy has the pages on
//! the surface, and the record of the slots (`slot_owners.rs`) those in slots.
//!
//! A policy may keep all of them itself instead, as one of the caller's does that knows no slots.

use crate::core::Core;
use crate::page::PageRef;
use crate::page::state::State;
use crate::replacement::{Arrival, MarkOutcome, Residents};
use crate::residence::protocol::PlacedPage;
use crate::slots::Slots;

impl Core {
    /// The slots, if their record has the resident pages in them and the policy does not.
    fn slots_of_residents(&self) -> Option<&Slots> {
        self.slots.as_ref().filter(|_| self.policy_looks_into_slots)
    }

    /// Notes that a page is resident, at the place that its claim gave it: it has its memory, or
    /// gets it by write faults. The caller holds the page exclusively and has taken its frames out
    /// of the budget.
    pub(crate) fn admit(&self, placed: PlacedPage, arrival: Arrival) {
        let PlacedPage { page, slot } = placed;
        match slot {
            0 => self.policy.admit(page, arrival),
            _ => self.admit_in_slot(page, slot, arrival),
        }
        if let (Some(huge), 0) = (&self.huge, slot) {
            huge.admit(page.range());
        }
    }

    fn admit_in_slot(&self, page: PageRef, slot: u64, arrival: Arrival) {
        match self.slots_of_residents() {
            Some(slots) => {
                slots.admit(slot, page.id);
                self.policy.admit_in_slot(slots.position_of(slot), arrival);
            }
            None => self.policy.admit(page, arrival),
        }
    }

    /// Notes that a resident page, which the caller holds exclusively, is in another slot now, as
    /// well as in its old one.
    pub(super) fn note_moved(&self, page: PageRef, to: u64) {
        // A policy that keeps the page itself need not know.
        if self.slots_of_residents().is_some() {
            self.admit_in_slot(page, to, Arrival::Needed);
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

    /// Whether a resident page that the caller holds has this length. The caller got the reference
    /// some time ago, and another page may have the place since. True of a page whose word is
    /// damaged, which [`placed`](Core::placed) finds.
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
        self.slots_of_residents().map_or(0, Slots::positions)
    }

    fn page_in_slot_at(&self, position: usize) -> Option<PageRef> {
        self.slots_of_residents()?.resident_at(position)
    }

    fn empty_slots_from(&self, position: usize) -> usize {
        self.slots_of_residents().map_or(0, |slots| slots.empty_from(position))
    }
}

#[cfg(all(test, not(feature = "model")))]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::device::MemoryDevice;
    use crate::page::state::Leave;
    use crate::replacement::{Clock, ReplacementPolicy, S3Fifo};
    use crate::residence::ClaimOutcome;
    use crate::{PAGE_SIZE, Pool, PoolOptions, PoolSize, RawPages, Space, Translation};

    const FRAMES: u64 = 2_048;

    /// Clock as a program of the caller may wrap it, which knows no slots.
    #[derive(Debug)]
    struct Wrapped(Clock);

    impl ReplacementPolicy for Wrapped {
        fn admit(&self, page: PageRef, arrival: Arrival) {
            self.0.admit(page, arrival);
        }

        fn forget(&self, page: PageRef) {
            self.0.forget(page);
        }

        fn contains(&self, page: PageRef) -> bool {
            self.0.contains(page)
        }

        fn candidates(
            &self,
            residents: &dyn Residents,
            frames: u64,
            pages: usize,
            candidates: &mut Vec<PageRef>,
        ) {
            self.0.candidates(residents, frames, pages, candidates);
        }

        fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
            self.0.for_each(visit);
        }
    }

    /// A pool of so many frames by a table, which may grow to [`FRAMES`].
    fn pool(frames: u64, policy: Box<dyn ReplacementPolicy>) -> Pool {
        let options = PoolOptions {
            size: PoolSize::Bytes(frames * PAGE_SIZE as u64),
            max_bytes: Some(FRAMES * PAGE_SIZE as u64),
            translation: Translation::Table,
            policy: Some(policy),
            evictors: 0,
            ..PoolOptions::default()
        };
        let device = Arc::new(MemoryDevice::new());
        Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap()
    }

    /// While no thread uses the pool: its set has each resident page once, in the slot that its
    /// word names, and the policy proposes no page twice.
    fn check_at_rest(pool: &Pool, pages: &[PageRef]) {
        let core = &*pool.core;
        let mut found = Vec::new();
        core.for_each_resident(&mut |page| found.push(page));
        let set: BTreeSet<PageRef> = found.iter().copied().collect();
        assert_eq!(set.len(), found.len(), "a page is there twice");
        let resident = pages.iter().copied().filter(|page| pool.is_resident(*page));
        assert!(set.iter().copied().eq(resident.collect::<BTreeSet<_>>()), "all, and no others");
        assert!(set.iter().all(|page| core.placed(*page).is_some()));
        let mut can_leave = BTreeSet::new();
        for _ in 0..20 {
            let mut candidates = Vec::new();
            core.policy.candidates(core, u64::MAX, FRAMES as usize, &mut candidates);
            let distinct: BTreeSet<PageRef> = candidates.iter().copied().collect();
            assert_eq!(distinct.len(), candidates.len(), "a page is proposed twice");
            can_leave.extend(distinct);
        }
        assert!(can_leave == set, "each can leave");
    }

    #[test]
    fn the_set_has_each_resident_page_once_while_threads_do_all_things_at_once() {
        let policies: [Box<dyn ReplacementPolicy>; 3] = [
            Box::new(Clock::new(FRAMES)),
            Box::new(Wrapped(Clock::new(FRAMES))),
            Box::new(S3Fifo::new(FRAMES)),
        ];
        for policy in policies {
            let pool = pool(FRAMES / 2, policy);
            let mut pages: Vec<PageRef> = (0..2 * FRAMES)
                .map(|number| pool.allocate(if number % 16 == 0 { 4 } else { 1 }).unwrap().page())
                .collect();
            for round in 0..8 {
                // So that misses evict, too.
                pool.eviction.pretend_a_thread_sleeps();
                let (pool, all) = (&pool, &pages);
                std::thread::scope(|scope| {
                    for thread in 0..2 {
                        scope.spawn(move || {
                            for number in 0..3_000_usize {
                                let at = (number * 7 + round * 131 + thread) * 2_654_435_761;
                                let page = all[at % (all.len() - 8)];
                                match number % 5 {
                                    0 => pool.fix_exclusive(page).unwrap()[0] = 1,
                                    _ => drop(pool.fix_shared(page).unwrap()),
                                }
                            }
                        });
                    }
                    scope.spawn(|| (0..40).for_each(|_| _ = pool.eviction.evict_batch(8)));
                    scope.spawn(move || {
                        for part in [8, 2, 4, 1, 2 + round as u64 % 3] {
                            pool.resize(FRAMES / part * PAGE_SIZE as u64).unwrap();
                        }
                    });
                    scope.spawn(|| {
                        for page in &all[all.len() - 8..] {
                            pool.free_page(*page).unwrap();
                        }
                    });
                });
                assert_eq!(pool.frames_to_free(), 0);
                let rest = pages.len() - 8;
                pages.truncate(rest);
                pages.extend((0..8).map(|_| pool.allocate(1).unwrap().page()));
                check_at_rest(pool, &pages);
                // As the end of a resize may do, with or without huge pages.
                let slots = pool.core.slots.as_ref().unwrap();
                pool.resize(FRAMES * PAGE_SIZE as u64).unwrap();
                let moved = pages.iter().filter(|page| pool.core.move_page(slots, **page));
                assert!(moved.count() > 0);
                check_at_rest(pool, &pages);
            }
        }
    }

    /// Between the claim and this call a thread may damage the word.
    #[test]
    fn a_page_is_admitted_to_the_slot_of_its_claim_whatever_its_word_says() {
        let pool = pool(64, Box::new(Clock::new(FRAMES)));
        let (page, other) = (pool.allocate(1).unwrap().page(), pool.allocate(1).unwrap().page());
        pool.sync().unwrap();
        while pool.is_resident(page) {
            pool.eviction.evict_batch(1);
        }
        drop(pool.fix_shared(other).unwrap());
        let core = &*pool.core;
        let (state, seen) = core.look_at_known(page);
        let ClaimOutcome::Ours(mut undo) = core.claim(page, state, seen).unwrap() else {
            panic!("no other thread has the page");
        };
        let mut reserved = pool.eviction.reserve(page).unwrap();
        core.place_claimed(page, &mut reserved, &mut undo);
        reserved.keep();
        let (own, of_other) = (core.held_slot(page), core.slot_of(other.id));
        state.move_slot(own, of_other);
        core.admit(undo.placed(page), Arrival::Needed);
        state.move_slot(of_other, own);
        core.unlock(page, Leave::Unlocked, false);
        check_at_rest(&pool, &[page, other]);
    }
}
