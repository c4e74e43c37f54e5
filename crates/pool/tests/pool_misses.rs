//! Misses that fail, and prefetches.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::io;
use std::sync::Arc;

use common::{
    PATIENCE, Storage, eventually, faulty, faulty_with, filled, generation, new_page, open,
    options, push_out, scratch_dir,
};
use vellum_pool::device::{Fault, Operation};
use vellum_pool::{
    PageDamage, PageFormat, PageReader, PageRef, PoolError, PoolOptions, Restart, Translation,
};
use vellum_vm::{Errno, PageRange};

/// A format in which a page is damaged if a frame does not have the stamp of its place.
#[derive(Debug)]
struct Stamped;

impl PageFormat for Stamped {
    fn seal(&self, _page: PageRef, _head: &mut [u8], _body: &[u8]) -> u64 {
        0
    }

    fn verify(&self, page: PageRef, bytes: &[u8]) -> Result<(), PageDamage> {
        match common::stamped(bytes, page) {
            Some(_) => Ok(()),
            None => Err(PageDamage { page, what: "its stamp is wrong".into() }),
        }
    }

    fn write_ahead(&self, _lsn: u64, _still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        Ok(())
    }
}

fn no_background() -> PoolOptions {
    PoolOptions { evictors: 0, ..options(32) }
}

#[test]
fn a_failed_read_is_an_error_and_leaves_nothing_in_memory() {
    let (pool, plan) = faulty(no_background());
    let large = new_page(&pool, 16, 4);
    let pages = filled(&pool, 64);
    push_out(&pool, large, &pages);
    drop(pages[..3].iter().map(|page| pool.fix_shared(*page).unwrap()).collect::<Vec<_>>());
    let before = pool.stats();

    plan.fail_always(Operation::Read, Fault::Torn { bytes: 9_000 });
    for _ in 0..50 {
        assert!(
            matches!(pool.fix_shared(large), Err(PoolError::Read { page, .. }) if page == large)
        );
        assert!(matches!(pool.fix_exclusive(large), Err(PoolError::Read { .. })));
        assert!(matches!(pool.optimistic(large), Err(PoolError::Read { .. })));
        assert!(matches!(pool.read(large, |_| Ok(())), Err(PoolError::Read { .. })));
    }
    assert!(!pool.is_resident(large));
    let after = pool.stats();
    assert!(after.resident_frames <= before.resident_frames, "{after:?}");
    assert_eq!(after.misses, before.misses);
    let range = large.range();
    assert_eq!(pool.kernel_residency(range).unwrap().resident(), 0, "memory was left behind");
    plan.clear();
    assert_eq!(generation(&pool, large), Some(4));
}

#[test]
fn damage_is_found_before_a_guard_shows_the_page() {
    let (pool, plan) = faulty_with(Arc::new(Stamped), no_background());
    let page = new_page(&pool, 2, 1);
    let others = filled(&pool, 64);
    push_out(&pool, page, &others);
    for fault in [Fault::Misdirected, Fault::Lost] {
        plan.fail_nth(Operation::Read, 1, fault);
        let error = pool.fix_shared(page).unwrap_err();
        assert!(matches!(&error, PoolError::Damaged(damage) if damage.page == page), "{error}");
        assert!(!pool.is_resident(page));
    }
    assert_eq!(generation(&pool, page), Some(1));
}

#[test]
fn a_file_that_became_shorter_is_an_error() {
    for storage in Storage::all() {
        let dir = scratch_dir();
        let device = storage.create(&dir);
        let pool = open(device.clone(), no_background());
        let pages = filled(&pool, 100);
        push_out(&pool, pages[90], &pages[..64]);
        device.resize(80).unwrap();
        for _ in 0..3 {
            let error = pool.fix_shared(pages[90]).unwrap_err();
            assert!(
                matches!(&error, PoolError::Read { source, .. }
                    if source.kind() == io::ErrorKind::UnexpectedEof),
                "{storage:?}: {error}"
            );
            pool.prefetch(&[pages[90]]);
        }
        push_out(&pool, pages[5], &pages[40..80]);
        assert_eq!(generation(&pool, pages[5]), Some(1));
    }
}

#[test]
fn prefetched_pages_are_hits() {
    for storage in Storage::all() {
        let dir = scratch_dir();
        let pool = open(storage.create(&dir), PoolOptions { evictors: 0, ..options(64) });
        let pages = filled(&pool, 200);
        let ahead = &pages[..8];
        ahead.iter().for_each(|page| push_out(&pool, *page, &pages[100..]));
        // A prefetch needs free frames, so the test frees some.
        pages[150..].iter().for_each(|page| pool.free_page(*page).unwrap());
        pages[100..150].iter().for_each(|page| pool.free_page(*page).unwrap());
        let before = pool.stats();

        pool.prefetch(ahead);
        pool.prefetch(ahead);
        eventually("the reads are done", || pool.stats().prefetches >= before.prefetches + 8);
        let misses = pool.stats().misses;
        for page in ahead {
            assert!(pool.is_resident(*page));
            assert_eq!(generation(&pool, *page), Some(1));
        }
        assert_eq!(pool.stats().misses, misses, "{storage:?}");
        assert_eq!(pool.stats().prefetches, before.prefetches + 8, "{storage:?}");
    }
}

#[test]
fn a_prefetch_that_fails_is_silent() {
    let (pool, plan) = faulty(no_background());
    let pages = filled(&pool, 100);
    pages[..8].iter().for_each(|page| push_out(&pool, *page, &pages[50..]));
    pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
    let before = pool.stats().resident_frames;
    plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
    let reads = plan.counts().reads;
    pool.prefetch(&pages[..8]);
    eventually("the reads are done", || plan.counts().reads == reads + 8);
    eventually("their frames are back", || pool.stats().resident_frames == before);
    plan.clear();
    pages[..8].iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
}

#[test]
fn a_prefetch_takes_no_frame_that_is_not_free_and_ignores_bad_references() {
    let (pool, plan) = faulty(no_background());
    let pages = filled(&pool, 100);
    let held: Vec<_> = pages[..32].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
    let reads = plan.counts().reads;
    pool.prefetch(&pages[40..]);
    pool.prefetch(&common::hostile_references(&pool));
    assert_eq!(plan.counts().reads, reads);
    drop(held);
    pool.free_page(pages[99]).unwrap();
    pool.prefetch(&[pages[99]]);
    assert!(!pool.is_resident(pages[99]));
    assert!(matches!(pool.fix_shared(pages[99]), Err(PoolError::PageFree(_))));
}

#[test]
fn a_page_in_transit_is_read_once_and_can_be_waited_for_and_freed() {
    let (pool, plan) = faulty(no_background());
    let pages = filled(&pool, 100);
    pages[..2].iter().for_each(|page| push_out(&pool, *page, &pages[50..]));
    pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
    plan.hold(Operation::Read);
    let reads = plan.counts().reads;
    pool.prefetch(&pages[..2]);
    pool.prefetch(&pages[..2]);
    assert!(plan.wait_until_held(Operation::Read, 2, PATIENCE));
    pool.free_page(pages[1]).unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..3).map(|_| scope.spawn(|| generation(&pool, pages[0]))).collect();
        eventually("they wait", || pool.stats().lock_waits >= 3);
        plan.release(Operation::Read);
        waiting.into_iter().for_each(|waiter| assert_eq!(waiter.join().unwrap(), Some(1)));
    });
    assert_eq!(plan.counts().reads, reads + 2);
    eventually("the freed page is free", || {
        pool.sync().unwrap();
        matches!(pool.fix_shared(pages[1]), Err(PoolError::PageFree(_)))
    });
}

#[test]
fn a_read_before_an_eviction_does_not_validate() {
    let (pool, plan) = faulty(no_background());
    let pages = filled(&pool, 100);
    drop(pool.fix_shared(pages[0]).unwrap());
    let guard = pool.optimistic(pages[0]).unwrap();
    assert_eq!(guard.bytes().u64(8), Some(1));
    guard.validate().unwrap();
    push_out(&pool, pages[0], &pages[50..]);
    if pool.translation() == Translation::Mmu {
        assert_eq!(guard.bytes().u64(8), Some(0), "a released page reads as zeros");
    }
    assert_eq!(guard.validate(), Err(Restart));
    assert!(guard.upgrade().is_err());

    // In transit, and resident again: the contents are the same, but the version is not.
    pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
    plan.hold(Operation::Read);
    pool.prefetch(&pages[..1]);
    assert!(plan.wait_until_held(Operation::Read, 1, PATIENCE));
    assert_eq!(guard.validate(), Err(Restart));
    plan.release(Operation::Read);
    assert_eq!(generation(&pool, pages[0]), Some(1));
    assert_eq!(guard.validate(), Err(Restart));
    assert!(guard.upgrade_shared().is_err());
    assert_eq!(pool.kernel_residency(PageRange::new(0, 1)).unwrap().resident(), 1);
}
