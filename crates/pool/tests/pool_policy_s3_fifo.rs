//! The pool with the scan-resistant policy.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use common::churn::Churn;
use common::{Storage, filled, generation, open, options, scratch_dir};
use vellum_pool::{Clock, PageRef, Pool, PoolOptions, ReplacementPolicy, S3Fifo};

const FRAMES: usize = 256;

fn pool(policy: Box<dyn ReplacementPolicy>, frames: u64, evictors: u64) -> Pool {
    let options = PoolOptions { policy: Some(policy), evictors, ..options(frames) };
    open(Storage::MemoryWithThread.create(&scratch_dir()), options)
}

fn resident(pool: &Pool, pages: &[PageRef]) -> usize {
    pages.iter().filter(|page| pool.is_resident(**page)).count()
}

fn read_all(pool: &Pool, pages: &[PageRef]) {
    for page in pages {
        assert_eq!(generation(pool, *page), Some(1));
    }
}

/// Half of the pool is hot. A scan reads eight times the pool's size. Returns how many hot pages
/// are resident before and after the scan.
fn hot_pages_around_a_scan(policy: Box<dyn ReplacementPolicy>) -> (usize, usize) {
    let pool = pool(policy, FRAMES as u64, 0);
    let hot = filled(&pool, FRAMES / 2);
    let cold = filled(&pool, 8 * FRAMES);
    for others in cold.chunks(FRAMES / 2).take(8) {
        read_all(&pool, &hot);
        read_all(&pool, others);
    }
    let before = resident(&pool, &hot);
    read_all(&pool, &cold);
    (before, resident(&pool, &hot))
}

#[test]
fn a_scan_does_not_evict_the_hot_pages() {
    let (before, after) = hot_pages_around_a_scan(Box::new(S3Fifo::new(FRAMES as u64)));
    assert!(before > FRAMES / 3, "{before} of {}", FRAMES / 2);
    assert!(after >= before * 9 / 10, "{after} of {before}");
    let (_, after) = hot_pages_around_a_scan(Box::new(Clock::new(FRAMES as u64)));
    assert!(after < FRAMES / 20, "the clock keeps {after}");
}

#[test]
fn every_kind_of_access_works_with_it() {
    let pool = pool(Box::new(S3Fifo::new(48)), 48, 1);
    let churn = Churn::new(&pool, 100, &[1, 3, 1, 8]);
    churn.crowd(&pool);
    churn.check(&pool);
    assert!(pool.stats().resident_frames_peak <= 48);
}

#[test]
fn a_pool_of_held_pages_is_exhausted_and_recovers() {
    let pool = pool(Box::new(S3Fifo::new(8)), 8, 1);
    let pages = filled(&pool, 12);
    let held: Vec<_> = pages[..8].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
    assert!(pool.fix_shared(pages[8]).is_err());
    drop(held);
    read_all(&pool, &pages);
}
