//! Panics of the device and of the page format. The pool unlocks the pages that it held. If the
//! contents of the file are unknown then, the pool refuses changes.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::tasks::block_on;
use common::{PATIENCE, eventually, generation, new_page, options, push_out, stamp, within};
use vellum_pool::device::{Call, Completion, HookedDevice, MemoryDevice};
use vellum_pool::{PageDamage, PageFormat, PageRef, Pool, PoolError, PoolOptions, Space};

/// Which functions panic.
#[derive(Debug, Default)]
struct Panics {
    writes: AtomicBool,
    reads: AtomicBool,
    starts: AtomicBool,
    seals: AtomicBool,
    checks: AtomicBool,
}

fn panic_if(flag: &AtomicBool) {
    if flag.load(Ordering::SeqCst) {
        // `resume_unwind` prints no message.
        resume_unwind(Box::new("expected by the test"));
    }
}

/// A format that panics.
#[derive(Debug)]
struct Fragile(Arc<Panics>);

impl PageFormat for Fragile {
    fn seal(&self, _page: PageRef, _head: &mut [u8], _body: &[u8]) -> u64 {
        panic_if(&self.0.seals);
        0
    }

    fn verify(&self, _page: PageRef, _bytes: &[u8]) -> Result<(), PageDamage> {
        panic_if(&self.0.checks);
        Ok(())
    }

    fn write_ahead(&self, _lsn: u64, _still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        Ok(())
    }
}

/// A pool whose device and format panic.
fn fragile(options: PoolOptions) -> (Arc<Panics>, Arc<Pool>) {
    let memory = MemoryDevice::new().completing(Completion::Thread).unwrap();
    let device = Arc::new(HookedDevice::new(memory));
    let panics = Arc::<Panics>::default();
    let on_device = panics.clone();
    device.set_hook(move |call| match call {
        Call::Read => panic_if(&on_device.reads),
        Call::StartReads => panic_if(&on_device.starts),
        Call::Write(_) => panic_if(&on_device.writes),
        _ => {}
    });
    let format = Arc::new(Fragile(panics.clone()));
    let pool = Pool::open(device, format, Space::new(0), options).unwrap();
    (panics, Arc::new(pool))
}

fn no_background() -> PoolOptions {
    PoolOptions { evictors: 0, ..options(16) }
}

fn unwinds<T>(run: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(run)).is_err()
}

/// Checks that no thread holds one of these pages.
fn assert_free(pool: &Arc<Pool>, pages: &[PageRef]) {
    let (pool, pages) = (pool.clone(), pages.to_vec());
    within(PATIENCE, move || {
        for page in pages {
            stamp(&mut pool.fix_exclusive(page).unwrap(), page, 9);
        }
    });
}

fn assert_poisoned(pool: &Pool) {
    match pool.check_writable() {
        Err(PoolError::Poisoned(why)) => assert!(why.contains("panicked"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(pool.sync(), Err(PoolError::Poisoned(_))));
}

#[test]
fn a_device_that_panics_in_an_eviction_leaves_no_page_held() {
    let (panics, pool) = fragile(no_background());
    let pages: Vec<_> = (0..8).map(|_| new_page(&pool, 2, 1)).collect();
    panics.writes.store(true, Ordering::SeqCst);
    assert!(unwinds(|| pool.allocate(2).map(drop)));
    assert_poisoned(&pool);
    assert_free(&pool, &pages);
}

#[test]
fn a_device_that_panics_in_a_write_back_of_all_leaves_no_page_held() {
    let (panics, pool) = fragile(no_background());
    let pages: Vec<_> = (0..8).map(|_| new_page(&pool, 1, 1)).collect();
    panics.writes.store(true, Ordering::SeqCst);
    assert!(unwinds(|| pool.write_dirty()));
    assert_poisoned(&pool);
    pool.wait_for_writes();
    assert_free(&pool, &pages);
}

#[test]
fn a_device_that_panics_when_copies_are_written_poisons_the_pool() {
    let (panics, pool) = fragile(no_background());
    let pages: Vec<_> = (0..8).map(|_| new_page(&pool, 1, 1)).collect();
    let copies = pool.copy_dirty(8, 8).unwrap().unwrap();
    panics.writes.store(true, Ordering::SeqCst);
    assert!(unwinds(|| pool.write_copies(&copies)));
    assert_poisoned(&pool);
    assert_free(&pool, &pages);
}

/// The pool has written nothing. Once the format works again, the pool goes on.
#[test]
fn a_format_that_panics_when_it_seals_leaves_no_page_held() {
    let (panics, pool) = fragile(no_background());
    let pages: Vec<_> = (0..16).map(|_| new_page(&pool, 1, 1)).collect();
    panics.seals.store(true, Ordering::SeqCst);
    assert!(unwinds(|| pool.write_dirty()));
    assert!(unwinds(|| pool.allocate(1).map(drop)));
    assert!(unwinds(|| pool.copy_dirty(99, 99)));
    assert_free(&pool, &pages);
    panics.seals.store(false, Ordering::SeqCst);
    pool.sync().unwrap();
    drop(pool.allocate(1).unwrap());
    assert_eq!(generation(&pool, pages[0]), Some(9));
}

/// The evictor goes on. Once the format works again, it evicts for a task that waits for frames.
#[test]
fn the_evictor_outlives_a_panic() {
    let (panics, pool) = fragile(PoolOptions { evictors: 1, ..options(64) });
    let first = new_page(&pool, 1, 1);
    pool.sync().unwrap();
    panics.seals.store(true, Ordering::SeqCst);
    let allocate = |_| catch_unwind(AssertUnwindSafe(|| new_page(&pool, 1, 1))).ok();
    let pages: Vec<_> = (0..200).map_while(allocate).collect();
    assert!(!pages.is_empty() && pages.len() < 200, "the panics come when frames run out");
    panics.seals.store(false, Ordering::SeqCst);
    assert_free(&pool, &pages);
    let more: Vec<_> = (0..100).map(|_| new_page(&pool, 1, 1)).collect();
    push_out(&pool, first, &more);
    let task = pool.clone();
    within(PATIENCE, move || {
        for page in [first].into_iter().chain(more).cycle().take(1000) {
            drop(block_on(task.fix_shared_async(page)).unwrap());
        }
    });
}

#[test]
fn the_evictor_poisons_the_pool_when_the_device_panics() {
    let (panics, pool) = fragile(PoolOptions { evictors: 1, ..options(64) });
    let pages: Vec<_> = (0..40).map(|_| new_page(&pool, 1, 1)).collect();
    panics.writes.store(true, Ordering::SeqCst);
    let allocated = || unwinds(|| (0..30).try_for_each(|_| pool.allocate(1).map(drop)));
    eventually("the pool is poisoned", || {
        allocated();
        pool.check_writable().is_err()
    });
    assert_poisoned(&pool);
    assert_free(&pool, &pages);
    // Ends the thread.
    within(PATIENCE, move || drop(pool));
}

#[test]
fn a_panic_in_a_read_gives_the_page_and_its_frames_back() {
    let (panics, pool) = fragile(no_background());
    let page = new_page(&pool, 3, 1);
    let others: Vec<_> = (0..16).map(|_| new_page(&pool, 1, 1)).collect();
    pool.sync().unwrap();
    let async_fix = |pool: &Pool| block_on(pool.fix_shared_async(page)).map(drop);
    for (flag, unwinds_async) in [
        (&panics.reads, None),
        // The device's thread panics, and the task gets an error.
        (&panics.checks, Some(false)),
        (&panics.starts, Some(true)),
    ] {
        push_out(&pool, page, &others);
        let before = pool.stats().resident_frames;
        flag.store(true, Ordering::SeqCst);
        if unwinds_async != Some(true) {
            assert!(unwinds(|| pool.fix_shared(page).map(drop)));
            assert!(unwinds(|| pool.fix_exclusive(page).map(drop)));
            assert!(unwinds(|| pool.optimistic(page).map(|_| ())));
        }
        if let Some(unwinds_async) = unwinds_async {
            let fixed = catch_unwind(AssertUnwindSafe(|| async_fix(&pool)));
            assert_eq!(fixed.is_err(), unwinds_async);
            if let Ok(fixed) = fixed {
                let error = fixed.unwrap_err().to_string();
                assert!(error.contains("panicked"), "{error}");
            }
            let _ = catch_unwind(AssertUnwindSafe(|| pool.prefetch(&[page])));
        }
        eventually("the page is unclaimed", || !pool.is_resident(page));
        flag.store(false, Ordering::SeqCst);
        assert!(pool.stats().resident_frames <= before);
        let reading = pool.clone();
        within(PATIENCE, move || assert_eq!(generation(&reading, page), Some(1)));
        async_fix(&pool).unwrap();
        pool.check_writable().unwrap();
    }
}
