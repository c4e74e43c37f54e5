//! Model checks of faults, eviction and write-back: the real cache on shuttle's scheduler.
//!
//! `cargo test -p vellum-aquila-core --features model --lib --test model`
//!
//! Every access to a word of the cache is a scheduling point here, and so is the middle of each
//! read, write and change of a page table. Shuttle runs each scenario under thousands of schedules,
//! random ones and ones with few preemptions (PCT). It fails on a broken rule of the test's
//! environment, on a lost store and on a deadlock. It prints a failing schedule; replay it with
//! `shuttle::replay`.
//! `VELLUM_MODEL_SCHEDULES` sets the number of schedules of each kind (2,000 by default).
#![cfg(feature = "model")]
#![allow(clippy::unwrap_used)] // in functions that tests share

mod environment;

use std::sync::Arc;

use environment::{Memory, TestEnvironment, all, key, load, store, try_access, words};
use shuttle::thread;
use vellum_aquila_core::{Access, Cache, Clock, Error, Policy};

fn schedules() -> usize {
    std::env::var("VELLUM_MODEL_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(2_000)
}

fn check(scenario: impl Fn() + Send + Sync + 'static) {
    let scenario = Arc::new(scenario);
    let (random, pct) = (scenario.clone(), scenario);
    shuttle::check_random(move || random(), schedules());
    shuttle::check_pct(move || pct(), schedules(), 3);
}

/// Runs a scenario on a cache of so many frames.
fn with_cache(frames: u32, scenario: impl Fn(&Cache<'_, TestEnvironment, Clock<'_>>)) {
    let memory = Memory::new(frames);
    let hand = words(Clock::WORDS);
    scenario(&memory.cache(Clock::new(&hand, frames), frames));
}

/// The same with dirty bits, so that no fault tells of stores.
fn with_bits(frames: u32, scenario: impl Fn(&Cache<'_, TestEnvironment, Clock<'_>>)) {
    let memory = Memory::new(frames);
    let hand = words(Clock::WORDS);
    scenario(&memory.cache_with_bits(Clock::new(&hand, frames), frames));
}

/// The value of an access that must not fail.
fn ok<T>(result: environment::TestResult<T>) -> T {
    result.unwrap()
}

#[test]
fn concurrent_faults_read_a_page_once() {
    check(|| {
        with_cache(4, |cache| {
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| assert_eq!(ok(load(cache, key(0), 0)), 0));
                }
            });
            assert_eq!(cache.environment().state().reads, 1);
            let statistics = cache.statistics();
            assert_eq!((statistics.misses, statistics.evictions), (1, 0));
        });
    });
}

#[test]
fn pages_share_few_frames() {
    check(|| {
        with_cache(2, |cache| {
            thread::scope(|scope| {
                for start in 0..3 {
                    scope.spawn(move || {
                        for page in 0..3 {
                            assert_eq!(ok(load(cache, key((start + page) % 4), 1)), 0);
                        }
                    });
                }
            });
        });
    });
}

/// Each thread stores to pages of its own, and all compete for frames.
fn stores_of_threads<P: Policy>(cache: &Cache<'_, TestEnvironment, P>, rounds: u64) {
    thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                for round in 1..=rounds {
                    for page in [key(thread), key(thread + 2)] {
                        assert_eq!(ok(load(cache, page, 0)), round - 1, "a store was lost");
                        ok(store(cache, page, round));
                    }
                }
            });
        }
    });
    cache.write_back(all()).unwrap();
    let state = cache.environment().state();
    for page in 0..4 {
        assert_eq!(state.storage[&key(page)], rounds, "a store is not in the file");
    }
}

#[test]
fn evicted_stores_come_back() {
    check(|| with_cache(2, |cache| stores_of_threads(cache, 2)));
}

#[test]
fn evicted_stores_that_only_bits_tell_come_back() {
    check(|| with_bits(2, |cache| stores_of_threads(cache, 2)));
}

#[test]
fn a_cache_of_one_frame_makes_progress() {
    check(|| with_cache(1, |cache| stores_of_threads(cache, 1)));
}

/// One thread stores, one writes back and evicts.
fn stores_during_write_back(cache: &Cache<'_, TestEnvironment, Clock<'_>>) {
    thread::scope(|scope| {
        scope.spawn(|| {
            for value in 1..4 {
                ok(store(cache, key(0), value));
                ok(store(cache, key(2), value));
            }
        });
        scope.spawn(|| {
            cache.write_back(all()).unwrap();
            ok(load(cache, key(1), 0));
            ok(load(cache, key(3), 0));
        });
    });
    cache.write_back(all()).unwrap();
    let state = cache.environment().state();
    assert_eq!((state.storage[&key(0)], state.storage[&key(2)]), (3, 3));
}

#[test]
fn write_back_loses_no_store() {
    check(|| with_cache(3, stores_during_write_back));
}

#[test]
fn write_back_loses_no_store_that_only_bits_tell() {
    check(|| with_bits(3, stores_during_write_back));
}

/// Threads sync what they have stored, and another one evicts.
fn syncs_of_threads(cache: &Cache<'_, TestEnvironment, Clock<'_>>) {
    thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let page = key(thread);
                for value in 1..3 {
                    ok(store(cache, page, value));
                    cache.write_back(page..=page).unwrap();
                    let found = cache.environment().state().storage[&page];
                    assert_eq!(found, value, "sync has returned, and the file has not");
                }
            });
        }
        // It evicts what the others are writing.
        scope.spawn(|| (4..6).for_each(|page| _ = ok(load(cache, key(page), 0))));
    });
}

#[test]
fn a_sync_covers_what_was_stored_before_it() {
    check(|| with_cache(2, syncs_of_threads));
}

#[test]
fn a_sync_covers_stores_that_only_bits_tell() {
    check(|| with_bits(2, syncs_of_threads));
}

#[test]
fn two_threads_that_share_a_page_and_one_that_syncs() {
    check(|| {
        with_cache(2, |cache| {
            thread::scope(|scope| {
                scope.spawn(|| ok(store(cache, key(0), 1)));
                scope.spawn(|| {
                    // The store needs no fault if the other thread's fault has mapped the page for
                    // writing. It must be in the file all the same.
                    ok(load(cache, key(0), 0));
                    ok(store(cache, key(0), 2));
                    cache.write_back(all()).unwrap();
                    assert_ne!(cache.environment().state().storage[&key(0)], 0);
                });
                scope.spawn(|| _ = cache.write_back(all()).unwrap());
            });
        });
    });
}

#[test]
fn ranges_leave_while_others_use_them() {
    check(|| {
        with_cache(3, |cache| {
            thread::scope(|scope| {
                scope.spawn(|| (0..4).for_each(|page| ok(store(cache, key(page), 7))));
                scope.spawn(|| assert_eq!(cache.evict_range(all(), false).1, Ok(())));
                scope.spawn(|| assert_eq!(cache.evict_range(key(2)..=key(2), false).1, Ok(())));
            });
            (0..4).for_each(|page| assert_eq!(ok(load(cache, key(page), 0)), 7));
            let (evicted, result) = cache.evict_range(all(), false);
            assert_eq!((evicted.stay, result), (0, Ok(())));
            let state = cache.environment().state();
            (0..4).for_each(|page| assert_eq!(state.storage[&key(page)], 7));
        });
    });
}

#[test]
fn ranges_that_leave_in_different_orders_do_not_wait_for_each_other() {
    // A range of few pages leaves in the order of its pages, all pages in that of the frames.
    for pages in [[0, 2, 4], [4, 2, 0]] {
        check(move || {
            with_cache(3, |cache| {
                pages.iter().for_each(|page| ok(store(cache, key(*page), 1)));
                thread::scope(|scope| {
                    scope.spawn(|| assert_eq!(cache.evict_range(all(), false).1, Ok(())));
                    scope.spawn(|| {
                        assert_eq!(cache.evict_range(key(0)..=key(4), false).1, Ok(()));
                    });
                });
                let state = cache.environment().state();
                pages.iter().for_each(|page| assert_eq!(state.storage[&key(*page)], 1));
            });
        });
    }
}

#[test]
fn a_pinned_page_stays() {
    check(|| {
        with_cache(2, |cache| {
            let frame = ok(cache.pin(key(0), Access::Write, &()));
            cache.environment().state().held.insert(key(0));
            thread::scope(|scope| {
                scope.spawn(|| (1..4).for_each(|page| _ = ok(load(cache, key(page), 0))));
                scope.spawn(|| {
                    ok(store(cache, key(0), 1));
                    cache.write_back(all()).unwrap();
                });
            });
            cache.environment().state().storage.clear();
            ok(store(cache, key(0), 2));
            assert_eq!(cache.environment().state().reads, 4, "the pinned page was read once");
            cache.unpin(frame, Access::Write);
            cache.environment().state().held.clear();
            cache.write_back(all()).unwrap();
            assert_eq!(cache.environment().state().storage[&key(0)], 2);
        });
    });
}

#[test]
fn a_cache_full_of_pins_is_an_error_and_no_hang() {
    check(|| {
        with_cache(2, |cache| {
            let frames = [0, 1].map(|page| ok(cache.pin(key(page), Access::Read, &())));
            thread::scope(|scope| {
                for page in 2..4 {
                    scope.spawn(move || {
                        assert_eq!(load(cache, key(page), 0), Err(Error::Full));
                    });
                }
            });
            frames.iter().for_each(|frame| cache.unpin(*frame, Access::Read));
            assert_eq!(load(cache, key(2), 0), Ok(0));
        });
    });
}

#[test]
fn a_cache_becomes_smaller_and_larger_while_it_is_used() {
    check(|| {
        with_cache(4, |cache| {
            thread::scope(|scope| {
                scope.spawn(|| (0..4).for_each(|page| ok(store(cache, key(page), 1))));
                scope.spawn(|| cache.resize(1).unwrap());
                scope.spawn(|| cache.resize(3).unwrap());
            });
            cache.resize(2).unwrap();
            assert_eq!(cache.size(), 2);
            let mut state = cache.environment().state();
            (state.limit, state.most_in_use) = (2, 0);
            drop(state);
            (0..4).for_each(|page| assert_eq!(ok(load(cache, key(page), 0)), 1));
            assert_eq!(cache.environment().state().most_in_use, 2);
        });
    });
}

/// Storage fails while pages should leave, and works again.
fn failing_writes(cache: &Cache<'_, TestEnvironment, Clock<'_>>) {
    ok(store(cache, key(0), 5));
    cache.environment().state().fail_writes = true;
    thread::scope(|scope| {
        scope.spawn(|| (2..5).for_each(|page| _ = load(cache, key(page), 0)));
        scope.spawn(|| assert!(cache.write_back(all()).is_err()));
    });
    assert_eq!(ok(load(cache, key(0), 0)), 5);
    cache.environment().state().fail_writes = false;
    cache.write_back(all()).unwrap();
    assert_eq!(cache.environment().state().storage[&key(0)], 5);
}

#[test]
fn a_page_that_cannot_be_written_stays_dirty() {
    check(|| with_cache(2, failing_writes));
}

#[test]
fn a_page_that_only_bits_call_dirty_stays_if_it_cannot_be_written() {
    check(|| with_bits(2, failing_writes));
}

/// While a write waits (for a lock that the loading thread has), loads go on: one frame of three is
/// not dirty. Afterwards nothing is lost.
#[test]
fn loads_need_no_write_on_a_machine_that_writes_apart() {
    use std::sync::atomic::Ordering::SeqCst;
    check(|| {
        let memory = Memory::new(3);
        let hand = words(Clock::WORDS);
        let cache = &memory.cache_apart(Clock::new(&hand, 3), 3);
        for page in [0, 2] {
            assert_eq!(ok(try_access(cache, key(page), Some(5))), Some(5));
        }
        cache.environment().is_locked.store(true, SeqCst);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut next, mut written) = (Some(0), 0);
                while next.is_some() {
                    let (count, error) = cache.write_some(0, &mut next);
                    assert_eq!(error, None);
                    written += count;
                }
                assert!(written <= 2);
            });
            scope.spawn(|| cache.evict_range(key(0)..=key(2), false).1.unwrap());
            scope.spawn(|| {
                for page in [0, 1, 2, 3] {
                    let expected = if page % 2 == 0 { 5 } else { 0 };
                    assert_eq!(ok(try_access(cache, key(page), None)), Some(expected));
                }
                cache.environment().is_locked.store(false, SeqCst);
            });
        });
        assert_eq!(cache.taken().dirty, 0);
        let state = cache.environment().state();
        assert_eq!((state.storage[&key(0)], state.storage[&key(2)]), (5, 5));
    });
}
