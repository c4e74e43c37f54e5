//! A replacement policy of the caller.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use common::{Storage, filled, generation, new_page, open, options, scratch_dir};
use vellum_pool::{Arrival, MarkOutcome, PageRef, PoolOptions, ReplacementPolicy, Residents};

#[derive(Debug, Default)]
struct Log {
    resident: HashMap<u64, PageRef>,
    queue: VecDeque<PageRef>,
    calls: u64,
}

/// First in, first out. Checks the pool's promises to policies.
#[derive(Clone, Debug, Default)]
struct Fifo(Arc<Mutex<Log>>);

impl ReplacementPolicy for Fifo {
    fn admit(&self, page: PageRef, _arrival: Arrival) {
        let mut log = self.0.lock().unwrap();
        let before = log.resident.insert(page.id.0, page);
        assert_eq!(before, None, "admitted twice");
        log.queue.push_back(page);
    }

    fn forget(&self, page: PageRef) {
        let mut log = self.0.lock().unwrap();
        assert_eq!(log.resident.remove(&page.id.0), Some(page), "forgotten, but not admitted");
        log.queue.retain(|queued| *queued != page);
    }

    fn contains(&self, page: PageRef) -> bool {
        self.0.lock().unwrap().resident.get(&page.id.0) == Some(&page)
    }

    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        let mut log = self.0.lock().unwrap();
        log.calls += 1;
        let mut found = 0;
        for page in &log.queue {
            if candidates.len() >= pages || found >= frames {
                break;
            }
            // The first call marks a page that has no mark.
            residents.try_mark(*page);
            if residents.try_mark(*page) == MarkOutcome::AlreadyMarked {
                candidates.push(*page);
                found += u64::from(page.frames);
            }
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        let pages: Vec<_> = self.0.lock().unwrap().resident.values().copied().collect();
        pages.into_iter().for_each(visit);
    }
}

#[test]
fn the_policy_decides_which_page_is_evicted() {
    let policy = Fifo::default();
    let options = PoolOptions {
        policy: Some(Box::new(policy.clone())),
        evictors: 0,
        eviction_batch: 1,
        ..options(8)
    };
    let pool = open(Storage::Memory.create(&scratch_dir()), options);
    let pages = filled(&pool, 8);
    for _ in 0..100 {
        // The clock would keep this page.
        assert_eq!(generation(&pool, pages[0]), Some(1));
    }
    let ninth = new_page(&pool, 1, 1);
    assert!(!pool.is_resident(pages[0]), "first in, first out");
    assert!(pages[1..].iter().all(|page| pool.is_resident(*page)) && pool.is_resident(ninth));
    let held = pool.fix_shared(pages[1]).unwrap();
    new_page(&pool, 1, 1);
    assert!(pool.is_resident(pages[1]) && !pool.is_resident(pages[2]), "held pages stay");
    drop(held);
    pool.sync().unwrap();
    for page in pages {
        assert_eq!(generation(&pool, page), Some(1));
    }
}

#[test]
fn the_pool_keeps_its_promises_to_policies() {
    let policy = Fifo::default();
    let options =
        PoolOptions { policy: Some(Box::new(policy.clone())), evictors: 1, ..options(48) };
    let pool = open(Storage::MemoryWithThread.create(&scratch_dir()), options);
    let churn = common::churn::Churn::new(&pool, 100, &[1, 3, 1, 8]);
    churn.crowd(&pool);
    churn.check(&pool);
    let log = policy.0.lock().unwrap();
    assert!(log.calls > 100);
    assert_eq!(log.queue.len(), log.resident.len());
    let frames: u64 = log.resident.values().map(|page| u64::from(page.frames)).sum();
    assert!(frames <= 48);
}
