//! Asynchronous fixes: overlapping reads, errors, dropped futures, waits for locks and frames.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::tasks::{Wakes, block_on, poll_once, run_all};
use common::{
    PATIENCE, Random, Storage, eventually, faulty, filled, generation, new_page, open, options,
    push_out, scratch_dir, stamp, stamped, within,
};
use vellum_pool::device::{Fault, Operation};
use vellum_pool::{Pool, PoolError, PoolOptions};
use vellum_vm::Errno;

/// A pool without background threads. If such a thread freed a frame between two polls, the second
/// future might be the first to read.
fn undisturbed(frames: u64) -> PoolOptions {
    PoolOptions { evictors: 0, ..options(frames) }
}

#[test]
fn a_hit_is_ready_at_once() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 2, 5);
    let wakes = Arc::new(Wakes::default());
    let guard = poll_once(pin!(pool.fix_shared_async(page)), &wakes);
    assert!(
        matches!(guard, std::task::Poll::Ready(Ok(guard)) if stamped(&*guard, page) == Some(5))
    );
    let guard = poll_once(pin!(pool.fix_exclusive_async(page)), &wakes);
    assert!(matches!(guard, std::task::Poll::Ready(Ok(_))));
    assert_eq!(wakes.count(), 0);
}

#[test]
fn one_thread_has_many_reads_in_flight() {
    let (pool, plan) = faulty(undisturbed(64));
    let pages = filled(&pool, 200);
    pages[0..24].iter().for_each(|page| push_out(&pool, *page, &pages[100..]));

    plan.hold(Operation::Read);
    let wakes = Arc::new(Wakes::default());
    let mut fixes: Vec<_> =
        pages[..24].iter().map(|page| Box::pin(pool.fix_shared_async(*page))).collect();
    for fix in &mut fixes {
        assert!(poll_once(fix.as_mut(), &wakes).is_pending());
    }
    assert!(plan.wait_until_held(Operation::Read, 24, PATIENCE), "{}", plan.held(Operation::Read));
    assert_eq!(wakes.count(), 0);
    plan.release(Operation::Read);
    for (fix, page) in fixes.into_iter().zip(&pages) {
        assert_eq!(stamped(&*block_on(fix).unwrap(), *page), Some(1));
    }
    assert!(wakes.count() >= 24);
}

#[test]
fn a_failed_read_is_an_error_for_its_starter_and_others_retry() {
    let (pool, plan) = faulty(undisturbed(16));
    let pages = filled(&pool, 64);
    push_out(&pool, pages[0], &pages[8..]);
    let before = pool.stats().resident_frames;

    plan.hold(Operation::Read);
    plan.fail_nth(Operation::Read, 1, Fault::Error(Errno::IO));
    let wakes = Arc::new(Wakes::default());
    let (mut starter, mut waiter) =
        (pin!(pool.fix_shared_async(pages[0])), pin!(pool.fix_exclusive_async(pages[0])));
    assert!(poll_once(starter.as_mut(), &wakes).is_pending());
    assert!(poll_once(waiter.as_mut(), &wakes).is_pending());
    plan.release(Operation::Read);
    let error = block_on(starter).unwrap_err();
    assert!(matches!(error, PoolError::Read { page, .. } if page == pages[0]), "{error}");
    assert_eq!(stamped(&*block_on(waiter).unwrap(), pages[0]), Some(1));
    assert!(pool.stats().resident_frames <= before + 1);
}

#[test]
fn a_failed_read_leaves_nothing_behind() {
    let (pool, plan) = faulty(undisturbed(64));
    let pages = filled(&pool, 128);
    pages[..8].iter().for_each(|page| push_out(&pool, *page, &pages[64..]));
    let before = pool.stats().resident_frames;
    plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
    for page in &pages[..8] {
        assert!(matches!(block_on(pool.fix_shared_async(*page)), Err(PoolError::Read { .. })));
        assert!(!pool.is_resident(*page));
    }
    assert_eq!(pool.stats().resident_frames, before.min(pool.stats().resident_frames));
    plan.clear();
    assert_eq!(stamped(&*block_on(pool.fix_shared_async(pages[3])).unwrap(), pages[3]), Some(1));
}

#[test]
fn a_dropped_future_lets_its_read_complete() {
    let (pool, plan) = faulty(undisturbed(16));
    let pages = filled(&pool, 64);
    push_out(&pool, pages[0], &pages[8..]);
    plan.hold(Operation::Read);
    let wakes = Arc::new(Wakes::default());
    {
        let mut fix = pin!(pool.fix_exclusive_async(pages[0]));
        assert!(poll_once(fix.as_mut(), &wakes).is_pending());
    }
    plan.release(Operation::Read);
    assert_eq!(generation(&pool, pages[0]), Some(1), "it is unlocked when the read is done");
    let before = plan.counts().reads;
    drop(block_on(pool.fix_exclusive_async(pages[0])).unwrap());
    assert_eq!(plan.counts().reads, before, "and stays");
}

#[test]
fn a_task_waits_for_a_thread_s_locks() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 1, 1);
    let wakes = Arc::new(Wakes::default());

    let exclusive = pool.fix_exclusive(page).unwrap();
    let mut fix = pin!(pool.fix_shared_async(page));
    assert!(poll_once(fix.as_mut(), &wakes).is_pending());
    assert_eq!(wakes.count(), 0);
    drop(exclusive);
    assert_eq!(wakes.count(), 1);
    let shared = block_on(fix).unwrap();

    let mut fix = pin!(pool.fix_exclusive_async(page));
    assert!(poll_once(fix.as_mut(), &wakes).is_pending());
    drop(shared);
    assert_eq!(wakes.count(), 2);
    drop(block_on(fix).unwrap());
    assert!(pool.stats().lock_waits >= 2);
}

#[test]
fn a_large_page_finds_frames_though_the_background_threads_have_enough() {
    within(PATIENCE, || {
        let (pool, _) = faulty(PoolOptions { eviction_batch: 16, ..options(256) });
        let large = new_page(&pool, 128, 3);
        let small: Vec<_> = (0..512).map(|_| new_page(&pool, 1, 1)).collect();
        push_out(&pool, large, &small);
        // Some frames are free: enough for the background threads to rest, but fewer than 128.
        let free = |pool: &Pool| {
            let stats = pool.stats();
            stats.capacity_frames - stats.resident_frames
        };
        // The thread starts below 16 free frames and goes on to 32; in between it may rest. If it
        // was slow, it may have just evicted the large page, or have found no page: then the test
        // fixes others again.
        eventually("background eviction rests", || {
            let rests = (16..128).contains(&free(&pool));
            if !rests {
                small.iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
            }
            rests
        });
        assert_eq!(stamped(&*block_on(pool.fix_shared_async(large)).unwrap(), large), Some(3));
    });
}

#[test]
fn without_frames_a_task_fails_after_its_patience_and_succeeds_later() {
    for evictors in [0, 1] {
        // Long enough for a background thread that was preempted while it held the last page.
        let (pool, _) = faulty(PoolOptions { evictors, patience: 200, ..options(16) });
        let pages = filled(&pool, 64);
        let held: Vec<_> = pages[..16].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        let error = block_on(pool.fix_shared_async(pages[40])).unwrap_err();
        assert!(matches!(error, PoolError::Exhausted { capacity: 16, wanted: 1, .. }), "{error}");
        assert_eq!(pool.stats().resident_frames, 16);
        drop(held);
        drop(block_on(pool.fix_shared_async(pages[40])).unwrap());
    }
}

#[test]
fn a_task_that_waits_for_frames_is_woken_when_guards_are_dropped() {
    let (pool, _) = faulty(PoolOptions { patience: 1_000_000, ..options(16) });
    let pages = filled(&pool, 64);
    let held: Vec<_> = pages[..16].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
    std::thread::scope(|scope| {
        let fix = scope
            .spawn(|| stamped(&*block_on(pool.fix_shared_async(pages[40])).unwrap(), pages[40]));
        eventually("it waits for frames", || pool.stats().frame_waits > 2);
        assert!(!fix.is_finished());
        drop(held);
        assert_eq!(fix.join().unwrap(), Some(1));
    });
}

/// Many tasks on a few threads read pages and add to them, in pools much smaller than the data.
fn many_tasks(storage: Storage, evictors: u64) {
    const TASKS: u64 = 200;
    const ROUNDS: u64 = 30;
    let dir = scratch_dir();
    let pool = Arc::new(open(storage.create(&dir), PoolOptions { evictors, ..options(32) }));
    let pages: Arc<Vec<_>> = Arc::new((0..100).map(|n| new_page(&pool, 1 + n % 3, 0)).collect());
    let seen = Arc::new(AtomicU64::new(0));
    let tasks = (0..TASKS).map(|task| {
        let (pool, pages, seen) = (pool.clone(), pages.clone(), seen.clone());
        let body = async move {
            let mut random = Random(task);
            for _ in 0..ROUNDS {
                let (read, write) = (random.pick(&pages), random.pick(&pages));
                let guard = pool.fix_shared_async(read).await.unwrap();
                seen.fetch_add(stamped(&*guard, read).unwrap(), Ordering::Relaxed);
                drop(guard);
                let mut guard = pool.fix_exclusive_async(write).await.unwrap();
                let generation = stamped(&*guard, write).unwrap();
                stamp(&mut guard, write, generation + 1);
            }
        };
        Box::pin(body) as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>
    });
    run_all(3, tasks.collect());
    let total: u64 = pages.iter().map(|page| generation(&pool, *page).unwrap()).sum();
    assert_eq!(total, TASKS * ROUNDS, "{storage:?}");
    assert!(pool.stats().resident_frames_peak <= 32);
}

#[test]
fn many_tasks_share_a_few_threads_and_a_small_pool() {
    for storage in Storage::all() {
        many_tasks(storage, 1);
    }
    many_tasks(Storage::MemoryWithThread, 0);
}

#[test]
fn bad_references_are_errors_at_the_first_poll() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 1, 1);
    for bad in common::hostile_references(&pool) {
        assert!(block_on(pool.fix_shared_async(bad)).is_err(), "{bad}");
        assert!(block_on(pool.fix_exclusive_async(bad)).is_err(), "{bad}");
    }
    pool.free_page(page).unwrap();
    assert!(matches!(block_on(pool.fix_shared_async(page)), Err(PoolError::PageFree(_))));
}

#[test]
fn delayed_reads_that_complete_out_of_order_wake_the_right_tasks() {
    let (pool, plan) = faulty(options(32));
    let pages = Arc::new(filled(&pool, 200));
    plan.delay_reads(Duration::from_millis(2));
    let pool = Arc::new(pool);
    let tasks = (0..40).map(|task| {
        let (pool, pages) = (pool.clone(), pages.clone());
        let body = async move {
            let mut random = Random(task);
            for _ in 0..10 {
                let page = random.pick(&pages);
                assert_eq!(stamped(&*pool.fix_shared_async(page).await.unwrap(), page), Some(1));
            }
        };
        Box::pin(body) as std::pin::Pin<Box<dyn Future<Output = ()> + Send>>
    });
    run_all(2, tasks.collect());
}
