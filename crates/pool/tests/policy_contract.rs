//! The contract of every replacement policy with the pool: it loses no page, proposes no page
//! twice, proposes no page that is in use, and its search ends.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};

use proptest::prelude::*;
use vellum_pool::{Arrival, Clock, MarkOutcome, PageRef, ReplacementPolicy, Residents, S3Fifo};

fn policies(frames: u64) -> Vec<Box<dyn ReplacementPolicy>> {
    vec![Box::new(Clock::new(frames)), Box::new(S3Fifo::new(frames))]
}

/// Every page in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Unlocked,
    Marked,
    InUse,
}

/// The resident pages. Those of one frame lie in slots if the policy looks into these.
#[derive(Debug)]
struct Model {
    pages: RefCell<BTreeMap<PageRef, Mark>>,
    slots: RefCell<Vec<Option<PageRef>>>,
}

impl Residents for Model {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        match self.pages.borrow_mut().get_mut(&page) {
            Some(Mark::Marked) => MarkOutcome::AlreadyMarked,
            Some(mark @ Mark::Unlocked) => {
                *mark = Mark::Marked;
                MarkOutcome::Marked
            }
            Some(Mark::InUse) => MarkOutcome::InUse,
            None => panic!("{page} is not resident, but the policy looks at it"),
        }
    }

    fn slot_positions(&self) -> usize {
        self.slots.borrow().len()
    }

    fn page_in_slot_at(&self, position: usize) -> Option<PageRef> {
        self.slots.borrow()[position]
    }

    fn empty_slots_from(&self, position: usize) -> usize {
        self.slots.borrow()[position..].iter().take_while(|slot| slot.is_none()).count()
    }
}

impl Model {
    fn new(policy: &dyn ReplacementPolicy, frames: usize) -> Model {
        let slots = if policy.looks_into_slots() { frames } else { 0 };
        Model { pages: RefCell::default(), slots: RefCell::new(vec![None; slots]) }
    }

    /// Admits a page that is not resident; one of a single frame to this slot, or one after it.
    fn admit(&self, policy: &dyn ReplacementPolicy, page: PageRef, slot: usize, arrival: Arrival) {
        let mut slots = self.slots.borrow_mut();
        let count = slots.len();
        if page.frames == 1 && count > 0 {
            let free = (slot..slot + count).find(|slot| slots[slot % count].is_none());
            let free = free.expect("as many slots as frames") % count;
            slots[free] = Some(page);
            policy.admit_in_slot(free, arrival);
        } else {
            policy.admit(page, arrival);
        }
        drop(slots);
        self.set(page, Mark::Unlocked);
    }

    fn is_in_slot(&self, page: PageRef) -> bool {
        self.slots.borrow().contains(&Some(page))
    }

    fn frames(&self) -> u64 {
        self.pages.borrow().keys().map(|page| u64::from(page.frames)).sum()
    }

    /// The pages that the policy has in its own set.
    fn pages_of_policy(&self) -> BTreeSet<PageRef> {
        let pages = self.pages.borrow();
        pages.keys().copied().filter(|page| !self.is_in_slot(*page)).collect()
    }

    fn with_id(&self, id: u64) -> Option<PageRef> {
        self.pages.borrow().keys().find(|page| page.id.0 == id).copied()
    }

    fn set(&self, page: PageRef, mark: Mark) {
        self.pages.borrow_mut().insert(page, mark);
    }

    fn forget(&self, policy: &dyn ReplacementPolicy, page: PageRef) {
        match self.slots.borrow_mut().iter_mut().find(|slot| **slot == Some(page)) {
            Some(slot) => *slot = None,
            None => policy.forget(page),
        }
        self.pages.borrow_mut().remove(&page);
    }

    /// Asks for candidates and checks them. Evicts those with even indexes.
    fn evict(&self, policy: &dyn ReplacementPolicy, frames: u64, most: usize) {
        let mut found = Vec::new();
        let could_go = self.pages.borrow().values().any(|mark| *mark != Mark::InUse);
        policy.candidates(self, frames, most, &mut found);
        assert!(!found.is_empty() || !could_go, "something could go");
        assert!(found.len() <= most);
        let before_last: u64 = found.iter().rev().skip(1).map(|page| u64::from(page.frames)).sum();
        assert!(before_last < frames, "at most one page more than asked for");
        let distinct: BTreeSet<PageRef> = found.iter().copied().collect();
        assert_eq!(distinct.len(), found.len(), "no page twice");
        for page in found.iter().step_by(2) {
            assert_eq!(self.pages.borrow()[page], Mark::Marked, "{page} is no candidate");
            self.forget(policy, *page);
        }
    }
}

/// The page with an id. Its number of frames follows from the id. Half of the pages have one.
fn page(id: u64) -> PageRef {
    PageRef::new(id * 10, 1 + (id % 7).saturating_sub(3) as u32)
}

proptest! {
    #[test]
    fn behaves_like_a_set_that_proposes(
        steps in prop::collection::vec((0u8..6, 0u64..50, 1usize..9), 1..300),
    ) {
        for policy in policies(60) {
            let model = Model::new(&*policy, 60);
            for &(step, id, size) in &steps {
                match (step, model.with_id(page(id).id.0)) {
                    (0, _) => model.evict(&*policy, size as u64, size),
                    (1, Some(page)) => model.forget(&*policy, page),
                    (2, Some(page)) => model.set(page, Mark::InUse),
                    (_, Some(page)) => model.set(page, Mark::Unlocked),
                    (_, None) if model.frames() + u64::from(page(id).frames) <= 60 => {
                        let arrival = [Arrival::Needed, Arrival::Ahead][size % 2];
                        model.admit(&*policy, page(id), id as usize * size, arrival);
                    }
                    _ => {}
                }
                let (resident, shown) = (model.pages_of_policy(), RefCell::new(BTreeSet::new()));
                policy.for_each(&mut |page| assert!(shown.borrow_mut().insert(page)));
                prop_assert_eq!(shown.into_inner(), resident.clone());
                prop_assert_eq!(policy.contains(page(id)), resident.contains(&page(id)));
                let longer = PageRef::new(page(id).id.0, page(id).frames + 1);
                prop_assert!(!policy.contains(longer));
            }
        }
    }
}

/// A pool that consists of states alone, for several threads.
struct Shared<'a> {
    policy: &'a dyn ReplacementPolicy,
    pages: Vec<PageRef>,
    /// By page: one of the constants below.
    states: Vec<AtomicU8>,
    free: AtomicI64,
}

const EVICTED: u8 = 0;
const UNLOCKED: u8 = 1;
const MARKED: u8 = 2;
const LOCKED: u8 = 3;

impl Residents for Shared<'_> {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        let state = self.state(page);
        match state.load(Ordering::Acquire) {
            MARKED => MarkOutcome::AlreadyMarked,
            UNLOCKED if swap(state, UNLOCKED, MARKED) => MarkOutcome::Marked,
            _ => MarkOutcome::InUse,
        }
    }
}

fn swap(state: &AtomicU8, from: u8, to: u8) -> bool {
    state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

impl Shared<'_> {
    fn state(&self, page: PageRef) -> &AtomicU8 {
        &self.states[page.id.0 as usize / 10]
    }

    fn access(&self, page: PageRef) {
        let state = self.state(page);
        match state.load(Ordering::Acquire) {
            MARKED => _ = swap(state, MARKED, UNLOCKED),
            EVICTED if swap(state, EVICTED, LOCKED) => {
                let frames = i64::from(page.frames);
                while self.free.fetch_sub(frames, Ordering::AcqRel) < frames {
                    self.free.fetch_add(frames, Ordering::AcqRel);
                    self.evict();
                }
                self.policy.admit(page, Arrival::Needed);
                assert!(self.policy.contains(page), "{page} was just admitted, and is locked");
                state.store(UNLOCKED, Ordering::Release);
            }
            _ => {}
        }
    }

    /// Frees a resident page.
    fn free(&self, page: PageRef) {
        let state = self.state(page);
        if swap(state, UNLOCKED, LOCKED) {
            self.retire(page);
        }
    }

    fn retire(&self, page: PageRef) {
        self.policy.forget(page);
        assert!(!self.policy.contains(page), "{page} was just forgotten, and is locked");
        self.state(page).store(EVICTED, Ordering::Release);
        self.free.fetch_add(i64::from(page.frames), Ordering::AcqRel);
    }

    fn evict(&self) {
        let mut found = Vec::new();
        self.policy.candidates(self, 32, 16, &mut found);
        let distinct: BTreeSet<PageRef> = found.iter().copied().collect();
        assert_eq!(distinct.len(), found.len(), "no page twice in a batch");
        for page in found {
            if swap(self.state(page), MARKED, LOCKED) {
                assert!(self.policy.contains(page), "these pages never change their size");
                self.retire(page);
            }
        }
    }
}

#[test]
fn no_page_is_lost_while_threads_admit_evict_and_visit() {
    // Enough for two shards. A tenth of the pages is never evicted.
    const FRAMES: u64 = 8_192;
    for policy in policies(FRAMES) {
        let pages: Vec<PageRef> = (0..5_000).map(page).collect();
        let states = pages.iter().map(|_| AtomicU8::new(EVICTED)).collect();
        let free = AtomicI64::new(FRAMES as i64);
        let pool = Shared { policy: &*policy, pages, states, free };
        let kept: BTreeSet<PageRef> = pool.pages.iter().step_by(10).copied().collect();
        for page in &kept {
            pool.access(*page);
            pool.state(*page).store(LOCKED, Ordering::Release);
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (1..=3u64)
                .map(|seed| {
                    scope.spawn({
                        let pool = &pool;
                        move || churn(pool, seed)
                    })
                })
                .collect();
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let mut seen = BTreeSet::new();
                    policy.for_each(&mut |page| _ = seen.insert(page));
                    assert!(kept.is_subset(&seen), "resident throughout, but not visited");
                }
            });
            let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            done.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
        });
        let is_resident = |page: &&PageRef| pool.state(**page).load(Ordering::Relaxed) != EVICTED;
        let resident: BTreeSet<PageRef> = pool.pages.iter().filter(is_resident).copied().collect();
        let mut seen = BTreeSet::new();
        policy.for_each(&mut |page| assert!(seen.insert(page)));
        assert_eq!(seen, resident, "{policy:?}");
        let used: i64 = resident.iter().map(|page| i64::from(page.frames)).sum();
        assert_eq!(used + pool.free.load(Ordering::Relaxed), FRAMES as i64);
    }
}

fn churn(pool: &Shared<'_>, seed: u64) {
    let mut random = seed;
    for _ in 0..60_000 {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed | 1);
        let page = pool.pages[(random >> 33) as usize % pool.pages.len()];
        if random >> 60 == 0 { pool.free(page) } else { pool.access(page) }
    }
}

#[test]
fn the_search_ends_when_all_pages_are_in_use() {
    for policy in policies(20_000) {
        let model = Model::new(&*policy, 0);
        for id in 0..4_000 {
            policy.admit(page(id), Arrival::Needed);
            model.set(page(id), Mark::InUse);
        }
        let mut found = Vec::new();
        policy.candidates(&model, 64, 64, &mut found);
        assert_eq!(found, [], "{policy:?}");
        for unused in [0, 17, 3_999] {
            model.set(page(unused), Mark::Unlocked);
            found.clear();
            policy.candidates(&model, 64, 64, &mut found);
            assert_eq!(found, [page(unused)], "{policy:?}");
            model.set(page(unused), Mark::InUse);
        }
    }
}
