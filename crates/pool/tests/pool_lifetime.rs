//! Pools that come and go: with reads in flight, with eviction under way, many at a time.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use common::tasks::{Wakes, poll_once};
use common::{
    PATIENCE, Random, Storage, filled, generation, new_page, open, options, push_out, scratch_dir,
    stamp, within,
};
use vellum_pool::device::{Completion, Fault, FaultyDevice, MemoryDevice, Operation};
use vellum_pool::{Pool, PoolOptions};
use vellum_vm::Errno;

/// A pool with some pages that are not resident, and its device.
fn with_cold_pages() -> (Pool, Vec<vellum_pool::PageRef>, Arc<FaultyDevice<MemoryDevice>>) {
    let memory = MemoryDevice::new().completing(Completion::Thread).unwrap();
    let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
    let pool = open(device.clone(), PoolOptions { evictors: 0, ..options(32) });
    let pages = filled(&pool, 100);
    pages[..10].iter().for_each(|page| push_out(&pool, *page, &pages[50..]));
    pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
    (pool, pages, device)
}

#[test]
fn a_pool_may_end_before_its_reads() {
    within(PATIENCE, || {
        for fails in [false, true] {
            let (pool, pages, device) = with_cold_pages();
            let plan = device.plan();
            plan.hold(Operation::Read);
            if fails {
                plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
            }
            pool.prefetch(&pages[..8]);
            {
                let mut fix = pin!(pool.fix_shared_async(pages[9]));
                assert!(poll_once(fix.as_mut(), &Arc::new(Wakes::default())).is_pending());
            }
            assert!(plan.wait_until_held(Operation::Read, 9, PATIENCE));
            drop(pool);
            // The surface still exists for these reads.
            plan.release(Operation::Read);
            drop(device);
        }
    });
}

#[test]
fn a_device_dropped_with_its_pool_completes_its_reads_first() {
    within(PATIENCE, || {
        let (pool, pages, device) = with_cold_pages();
        let plan = device.plan();
        drop(device);
        plan.hold(Operation::Read);
        pool.prefetch(&pages[..8]);
        assert!(plan.wait_until_held(Operation::Read, 8, PATIENCE));
        drop(pool);
        assert_eq!(plan.held(Operation::Read), 0);
    });
}

#[test]
fn a_pool_may_end_during_reads_and_eviction() {
    within(PATIENCE, || {
        for storage in Storage::all() {
            let dir = scratch_dir();
            for round in 0..10 {
                let storage_dir = tempfile::tempdir_in(dir.path()).unwrap();
                let options = PoolOptions { evictors: 2, ..options(32) };
                let pool = open(storage.create(&storage_dir), options);
                let pages: Vec<_> = (0..80).map(|n| new_page(&pool, 1 + n % 2, 1)).collect();
                let mut random = Random(round);
                for _ in 0..30 {
                    let page = random.pick(&pages);
                    stamp(&mut pool.fix_exclusive(page).unwrap(), page, 2);
                    pool.prefetch(&[random.pick(&pages), random.pick(&pages)]);
                }
                drop(pool);
            }
        }
    });
}

#[test]
fn evictors_that_sleep_or_work_end_with_the_pool() {
    for evictors in [1, 4] {
        let pool = open(Arc::new(MemoryDevice::new()), PoolOptions { evictors, ..options(8) });
        drop(pool);
        let pool = open(Arc::new(MemoryDevice::new()), PoolOptions { evictors, ..options(8) });
        let pages = filled(&pool, 50);
        assert_eq!(generation(&pool, pages[0]), Some(1));
        drop(pool);
    }
    // An evictor that can evict no page, and is asked to again and again.
    let pool = open(Arc::new(MemoryDevice::new()), PoolOptions { patience: 10, ..options(8) });
    let guards: Vec<_> = (0..8).map(|_| pool.allocate(1).unwrap()).collect();
    assert!(pool.allocate(1).is_err());
    drop(guards);
}

#[test]
fn pools_in_one_process_are_independent() {
    let pools: Vec<_> = (0..24)
        .map(|n| {
            let pool = open(Storage::MemoryWithThread.create(&scratch_dir()), options(8 + n));
            let pages: Vec<_> = (0..60).map(|_| new_page(&pool, 1, n)).collect();
            (pool, pages)
        })
        .collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let pools = &pools;
            scope.spawn(move || {
                let mut random = Random(thread);
                for _ in 0..2_000 {
                    let n = random.index(pools.len());
                    let (pool, pages) = &pools[n];
                    assert_eq!(generation(pool, random.pick(pages)), Some(n as u64));
                }
            });
        }
    });
    for (n, (pool, _)) in pools.iter().enumerate() {
        assert!(pool.stats().resident_frames_peak <= 8 + n as u64);
    }
}

/// One thread may poll a future, another complete it, and a third drop it.
#[test]
fn futures_can_move_between_threads() {
    fn assert_send<F: Future + Send>(future: F) -> F {
        future
    }
    let (pool, pages, device) = with_cold_pages();
    let plan = device.plan();
    // No read completes before its future was polled, however long that takes.
    plan.hold(Operation::Read);
    plan.delay_reads(Duration::from_millis(5));
    std::thread::scope(|scope| {
        for page in &pages[..8] {
            let mut fix = Box::pin(assert_send(pool.fix_shared_async(*page)));
            assert!(poll_once(fix.as_mut(), &Arc::new(Wakes::default())).is_pending());
            scope.spawn(move || drop(common::tasks::block_on(fix).unwrap()));
        }
        plan.release(Operation::Read);
    });
}
