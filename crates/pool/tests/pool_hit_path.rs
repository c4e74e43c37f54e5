//! A hit makes no system call and no allocation. Also tests which hits are counted.
//!
//! A seccomp filter has the kernel kill the process at its first system call. docs/hit-path.md has
//! instruction counts.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::os::unix::process::ExitStatusExt;

use common::{faulty, filled, options};
use vellum_pool::{PageReader, PageRef, Pool, PoolOptions};
use vellum_testing::allocations::{Counting, allocations};
use vellum_testing::own_process;
use vellum_testing::system_calls::{SURVIVED, forbid_all, survive};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A pool with some resident pages.
fn resident() -> (Pool, Vec<PageRef>) {
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(128) });
    let pages = filled(&pool, 64);
    (pool, pages)
}

/// Every kind of access to every page.
fn hit_all(pool: &Pool, pages: &[PageRef]) {
    for page in pages {
        let guard = pool.optimistic(*page).unwrap();
        assert_eq!(guard.bytes().u64(0), Some(page.id.0));
        guard.validate().unwrap();
        assert_eq!((&pool.fix_shared(*page).unwrap()[..]).u64(0), Some(page.id.0));
        assert_eq!((&pool.fix_exclusive(*page).unwrap()[..]).u64(0), Some(page.id.0));
        drop(guard.upgrade());
    }
    pool.count_optimistic(pages.len() as u64);
}

#[test]
fn a_hit_allocates_nothing() {
    let (pool, pages) = resident();
    hit_all(&pool, &pages); // the first count of a thread gives it a stripe of the counters
    let before = allocations();
    (0..100).for_each(|_| hit_all(&pool, &pages));
    assert_eq!(allocations() - before, 0);
    drop(vec![1]);
    assert_eq!(allocations() - before, 1, "the count counts");
}

#[test]
fn a_hit_makes_no_system_call() {
    if let Some(output) = own_process::run("a_hit_makes_no_system_call") {
        assert_eq!(output.status.code(), Some(SURVIVED), "{output:?}");
        return;
    }
    let (pool, pages) = resident();
    hit_all(&pool, &pages);
    forbid_all();
    (0..1000).for_each(|_| hit_all(&pool, &pages));
    survive();
}

/// The same with a page that is not resident. This shows that the filter works.
#[test]
fn a_miss_makes_system_calls() {
    if let Some(output) = own_process::run("a_miss_makes_system_calls") {
        let killed = output.status.signal() == Some(libc::SIGSYS);
        assert!(killed || output.status.code() == Some(SURVIVED), "{output:?}");
        return;
    }
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 64);
    hit_all(&pool, &pages);
    forbid_all();
    (0..1000).for_each(|_| hit_all(&pool, &pages));
    // Only reached without seccomp. With it, the filter has killed the process.
    std::process::exit(1);
}

#[test]
fn optimistic_reads_are_counted_when_they_are_reported() {
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 64);
    let before = pool.stats();
    for page in &pages {
        let guard = pool.optimistic(*page).unwrap();
        guard.validate().unwrap();
    }
    let silent = pool.stats();
    let misses = silent.misses - before.misses;
    assert!(misses >= 48, "{misses} of 64 pages were not among the 16 resident ones");
    assert_eq!(silent.hits, before.hits, "the thread has not reported the reads");
    pool.count_optimistic(64);
    let stats = pool.stats();
    assert_eq!(stats.hits - before.hits, 64 - misses);
    assert_eq!(stats.misses, silent.misses);
}

/// An optimistic guard stays valid when other readers come or leave, and when the clock's hand
/// passes.
#[test]
fn shared_locks_do_not_disturb_a_validation() {
    let (pool, pages) = resident();
    let locked = pool.fix_shared(pages[0]).unwrap();
    let guard = pool.optimistic(pages[0]).unwrap();
    guard.validate().unwrap();
    drop(locked);
    guard.validate().unwrap();
    let again = pool.fix_shared(pages[0]).unwrap();
    guard.validate().unwrap();
    drop(again);
    assert_eq!(pool.stats().restarts, 0);
    drop(pool.fix_exclusive(pages[0]).unwrap());
    assert!(guard.validate().is_err());
    assert_eq!(pool.stats().restarts, 1);
}
