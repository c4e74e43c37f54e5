//! Locks and optimistic reads of many threads.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{
    PATIENCE, Storage, eventually, faulty, filled, generation, new_page, open, options,
    scratch_dir, stamp, stamped, within,
};
use vellum_pool::{PageReader, Pool, PoolOptions, Restart};
use vellum_testing::patience::SetWhenDropped;

fn word(bytes: impl PageReader) -> u64 {
    bytes.u64(64).unwrap()
}

fn add_one(bytes: &mut [u8]) {
    let next = word(&*bytes) + 1;
    bytes[64..72].copy_from_slice(&next.to_le_bytes());
}

#[test]
fn a_starving_optimistic_read_takes_the_lock() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 1, 0);
    let mut runs = 0;
    // A writer changes the page in the middle of each optimistic run. It cannot do so under the
    // lock.
    let seen = pool.read(page, |bytes| {
        runs += 1;
        if runs <= 16 {
            add_one(&mut pool.fix_exclusive(page).unwrap());
        }
        Ok(word(bytes))
    });
    assert_eq!((seen.unwrap(), runs), (Ok(16), 17));
    assert_eq!(pool.stats().starvations, 1);
    assert_eq!(pool.stats().restarts, 16);
    // A reader that never accepts what it has read gets an error.
    assert_eq!(pool.read(page, |_| Err::<(), _>(Restart)).unwrap(), Err(Restart));
}

#[test]
fn readers_succeed_while_a_writer_changes_the_page_all_the_time() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 4, 0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        scope.spawn(|| {
            let mut generation = 0;
            while !stop.load(Ordering::Relaxed) {
                generation += 1;
                stamp(&mut pool.fix_exclusive(page).unwrap(), page, generation);
            }
        });
        let mut newest = 0;
        for _ in 0..3_000 {
            let seen = pool.read(page, |bytes| stamped(bytes, page).ok_or(Restart));
            let seen = seen.unwrap().expect("torn");
            assert!(seen >= newest);
            newest = seen;
        }
    });
}

#[test]
fn many_concurrent_upgrades_lose_no_change() {
    const THREADS: u64 = 8;
    const EACH: u64 = 500;
    let (pool, _) = faulty(options(8));
    let page = new_page(&pool, 1, 0);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut done = 0;
                while done < EACH {
                    if done % 2 == 0 {
                        let Ok(mut guard) = pool.optimistic(page).unwrap().upgrade() else {
                            continue;
                        };
                        add_one(&mut guard);
                    } else {
                        let shared = pool.fix_shared(page).unwrap();
                        let Ok(mut guard) = shared.try_upgrade() else { continue };
                        add_one(&mut guard);
                        assert!(word(&*guard.downgrade()) > 0);
                    }
                    done += 1;
                }
            });
        }
    });
    assert_eq!(word(&*pool.fix_shared(page).unwrap()), THREADS * EACH);
}

#[test]
fn the_251st_shared_holder_waits() {
    within(PATIENCE, || {
        let (pool, _) = faulty(options(16));
        let page = new_page(&pool, 1, 3);
        let mut guards: Vec<_> = (0..250).map(|_| pool.fix_shared(page).unwrap()).collect();
        let got_it = AtomicU64::new(0);
        let optimistic = pool.optimistic(page).unwrap();
        optimistic.validate().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(generation(&pool, page), Some(3));
                got_it.fetch_add(1, Ordering::SeqCst);
            });
            scope.spawn(|| {
                drop(optimistic.upgrade_shared().unwrap());
                got_it.fetch_add(1, Ordering::SeqCst);
            });
            scope.spawn(|| {
                drop(common::tasks::block_on(pool.fix_shared_async(page)).unwrap());
                got_it.fetch_add(1, Ordering::SeqCst);
            });
            thread::sleep(Duration::from_millis(20));
            assert_eq!(got_it.load(Ordering::SeqCst), 0);
            guards.pop();
            eventually("all get the page in turn", || got_it.load(Ordering::SeqCst) == 3);
            // A writer waits until all readers have gone. A sync is a shared holder, too.
            let writer = scope.spawn(|| stamp(&mut pool.fix_exclusive(page).unwrap(), page, 4));
            guards.clear();
            writer.join().unwrap();
        });
        assert_eq!(generation(&pool, page), Some(4));
    });
}

#[test]
fn a_sync_waits_until_one_of_250_readers_has_gone() {
    within(PATIENCE, || {
        let (pool, plan) = faulty(options(16));
        let page = new_page(&pool, 1, 3);
        let guards: Vec<_> = (0..250).map(|_| pool.fix_shared(page).unwrap()).collect();
        thread::scope(|scope| {
            let sync = scope.spawn(|| pool.sync());
            eventually("the sync waits", || pool.stats().lock_waits > 0);
            assert_eq!(plan.counts().writes, 0);
            drop(guards);
            sync.join().unwrap().unwrap();
        });
        assert_eq!(plan.counts().writes, 1);
    });
}

/// More threads than the counters have stripes, and than this machine has processors.
#[test]
fn a_hundred_threads_count_on_the_same_pages() {
    const THREADS: u64 = 100;
    const EACH: u64 = 60;
    let dir = scratch_dir();
    let pool = open(Storage::Memory.create(&dir), options(16));
    let pages: Vec<_> = (0..40).map(|_| new_page(&pool, 1, 0)).collect();
    let before = pool.stats();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, pages) = (&pool, &pages);
            scope.spawn(move || {
                for round in 0..EACH {
                    let page = pages[((thread * 7 + round) % pages.len() as u64) as usize];
                    add_one(&mut pool.fix_exclusive(page).unwrap());
                }
            });
        }
    });
    let after = pool.stats();
    let accesses = after.hits + after.misses - before.hits - before.misses;
    assert_eq!(accesses, THREADS * EACH, "each fix is a hit or a miss");
    let total: u64 = pages.iter().map(|page| word(&*pool.fix_shared(*page).unwrap())).sum();
    assert_eq!(total, THREADS * EACH);
}

#[test]
fn statistics_add_up() {
    let (pool, plan) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 50);
    for page in &pages {
        drop(pool.fix_shared(*page).unwrap());
        drop(pool.fix_shared(*page).unwrap());
    }
    let stats = pool.stats();
    assert_eq!((stats.allocations, stats.frees), (50, 0));
    assert_eq!(stats.hits + stats.misses, 100);
    assert_eq!(stats.misses, plan.counts().reads);
    assert_eq!(stats.write_backs, plan.counts().writes);
    assert_eq!(stats.allocations + stats.misses - stats.evictions, stats.resident_frames);
    assert_eq!(stats.evictions, stats.evictions_inline);
    assert!(stats.release_batches <= stats.evictions);
    assert!(stats.hit_rate() >= 0.5 && stats.hit_rate() < 1.0);
}

/// A guard may be dropped by another thread than the one that took it.
#[test]
fn guards_can_move_between_threads() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 1, 1);
    thread::scope(|scope| {
        let mut guard = pool.fix_exclusive(page).unwrap();
        scope.spawn(move || stamp(&mut guard, page, 2)).join().unwrap();
        let guard = pool.fix_shared(page).unwrap();
        scope.spawn(move || assert_eq!(stamped(guard.bytes(), page), Some(2))).join().unwrap();
    });
    drop(pool.fix_exclusive(page).unwrap());
}

fn assert_send_and_sync<T: Send + Sync>() {}

#[test]
fn pools_and_guards_are_send_and_sync() {
    assert_send_and_sync::<Pool>();
    assert_send_and_sync::<vellum_pool::SharedGuard<'_>>();
    assert_send_and_sync::<vellum_pool::ExclusiveGuard<'_>>();
    assert_send_and_sync::<vellum_pool::FixShared<'_>>();
}

/// Two readers overlap: each drops its guard only once the other one has the page, or has waited
/// for some milliseconds. If writers had no priority, no writer would ever have the page alone.
#[test]
fn a_writer_gets_its_turn_though_there_is_always_a_reader() {
    let (pool, _) = faulty(options(16));
    let page = new_page(&pool, 1, 0);
    let rounds = 2000;
    for upgrades in [false, true] {
        let (reads, written) = (AtomicU64::new(0), AtomicBool::new(false));
        let first = pool.fix_shared(page).unwrap();
        let waits = pool.stats().lock_waits;
        thread::scope(|scope| {
            scope.spawn(|| {
                // Also if this thread fails: then the others end at once.
                let written = SetWhenDropped(&written);
                match upgrades {
                    true => drop(pool.optimistic(page).unwrap().upgrade().unwrap()),
                    false => drop(pool.fix_exclusive(page).unwrap()),
                }
                drop(written);
                assert!(
                    reads.load(Ordering::Relaxed) < rounds,
                    "the writer waited until the readers had ended"
                );
            });
            // However late it begins, the reads that count come afterwards.
            eventually("the writer waits", || pool.stats().lock_waits > waits);
            for _ in 0..2 {
                scope.spawn(|| {
                    while reads.load(Ordering::Relaxed) < rounds && !written.load(Ordering::Relaxed)
                    {
                        let guard = pool.fix_shared(page).unwrap();
                        let mine = reads.fetch_add(1, Ordering::Relaxed) + 1;
                        thread::sleep(Duration::from_micros(300));
                        let patience = std::time::Instant::now() + Duration::from_millis(3);
                        while reads.load(Ordering::Relaxed) == mine
                            && std::time::Instant::now() < patience
                        {
                            thread::yield_now();
                        }
                        drop(guard);
                    }
                });
            }
            eventually("readers come", || reads.load(Ordering::Relaxed) > 3);
            drop(first);
        });
    }
    // A thread that already has the page does not wait forever for a writer that waits for this
    // thread.
    let first = pool.fix_shared(page).unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| drop(pool.fix_exclusive(page).unwrap()));
        thread::sleep(Duration::from_millis(20));
        drop(pool.fix_shared(page).unwrap());
        assert!(!writer.is_finished());
        drop(first);
    });
}
