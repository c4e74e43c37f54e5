//! The guarantees of the cache, checked against a map from pages to values, by one thread that does
//! anything in any order; and by many threads at once.
#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // in functions that tests share

mod environment;

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};

use environment::{Memory, TestEnvironment, all, key, load, store, words};
use proptest::prelude::*;
use vellum_aquila_core::{
    Access, Cache, Clock, Error, Evictor, Frame, Key, Layout, Lru, Policy, S3Fifo,
};

#[derive(Clone, Debug)]
enum Step {
    Load(u64, u32),
    Store(u64),
    Sync(u64, u64),
    Evict(u64, u64),
    Discard(u64),
    Resize(u32),
    Pin(u64, bool),
    Unpin(u64),
    Fail(bool, bool),
}

const PAGES: u64 = 24;
const FRAMES: u32 = 12;

fn step() -> impl Strategy<Value = Step> {
    let page = 0..PAGES;
    prop_oneof![
        6 => (page.clone(), 0..5_u32).prop_map(|(page, ahead)| Step::Load(page, ahead)),
        6 => page.clone().prop_map(Step::Store),
        1 => (page.clone(), page.clone()).prop_map(|(one, other)| Step::Sync(one, other)),
        1 => (page.clone(), page.clone()).prop_map(|(one, other)| Step::Evict(one, other)),
        1 => page.clone().prop_map(Step::Discard),
        1 => (0..=FRAMES).prop_map(Step::Resize),
        2 => (page.clone(), any::<bool>()).prop_map(|(page, writes)| Step::Pin(page, writes)),
        2 => page.prop_map(Step::Unpin),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(reads, writes)| Step::Fail(reads, writes)),
    ]
}

/// What the program and the files should have.
#[derive(Default)]
struct Expected {
    /// What a load gives.
    values: HashMap<u64, u64>,
    pins: BTreeMap<u64, Vec<(Frame, Access)>>,
    fails_reads: bool,
    fails_writes: bool,
}

fn run<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    steps: &[Step],
) -> Result<(), TestCaseError> {
    let mut expected = Expected::default();
    let mut next_value = 1;
    for step in steps {
        apply(cache, step, &mut expected, &mut next_value)?;
        let used = cache.environment().state().most_in_use;
        prop_assert!(used <= FRAMES as usize);
    }
    cache.environment().state().fail_reads = false;
    cache.environment().state().fail_writes = false;
    for (_, pins) in std::mem::take(&mut expected.pins) {
        pins.iter().for_each(|(frame, access)| cache.unpin(*frame, *access));
    }
    cache.environment().state().held.clear();
    cache.write_back(all()).unwrap();
    prop_assert_eq!(cache.statistics().dirty, 0);
    for (page, value) in &expected.values {
        let stored = cache.environment().state().storage.get(&key(*page)).copied().unwrap_or(0);
        prop_assert_eq!(stored, *value, "page {}", page);
    }
    let (evicted, result) = cache.evict_range(all(), false);
    prop_assert_eq!((evicted.stay, result), (0, Ok(())));
    Ok(())
}

/// The pages between two, in the order of keys.
fn between(one: u64, other: u64) -> RangeInclusive<Key> {
    key(one).min(key(other))..=key(one).max(key(other))
}

fn apply<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    step: &Step,
    expected: &mut Expected,
    next_value: &mut u64,
) -> Result<(), TestCaseError> {
    let held = expected.pins.values().filter(|pins| !pins.is_empty()).count();
    let may_fail = |error: Error<environment::Failure>| match error {
        Error::Full => held >= cache.size() as usize,
        Error::Environment(environment::Failure::Read) => expected.fails_reads,
        Error::Environment(environment::Failure::Write) => expected.fails_writes,
        _ => false,
    };
    match *step {
        Step::Load(page, ahead) => match load(cache, key(page), ahead) {
            Ok(value) => {
                prop_assert_eq!(value, expected.values.get(&page).copied().unwrap_or(0));
            }
            Err(error) => prop_assert!(may_fail(error), "{:?}", error),
        },
        Step::Store(page) => match store(cache, key(page), *next_value) {
            Ok(()) => {
                expected.values.insert(page, *next_value);
                *next_value += 1;
            }
            Err(error) => prop_assert!(may_fail(error), "{:?}", error),
        },
        Step::Sync(one, other) => sync(cache, between(one, other), expected)?,
        Step::Evict(one, other) => evict(cache, between(one, other), expected)?,
        Step::Discard(page) => {
            let (evicted, result) = cache.evict_range(key(page)..=key(page), true);
            prop_assert_eq!(result, Ok(()));
            if evicted.pages == 1 {
                let stored = cache.environment().state().storage.get(&key(page)).copied();
                expected.values.insert(page, stored.unwrap_or(0));
            }
        }
        Step::Resize(frames) => {
            let before = cache.size();
            let target = frames.clamp(1, FRAMES);
            cache.environment().state().limit = FRAMES as usize;
            match cache.resize(frames) {
                Ok(()) => prop_assert_eq!(cache.size(), target),
                Err(error) => {
                    prop_assert!(target < before && (may_fail(error) || held > target as usize));
                }
            }
            cache.environment().state().limit = cache.size() as usize;
        }
        Step::Pin(page, writes) => {
            let access = if writes { Access::Write } else { Access::Read };
            match cache.pin(key(page), access, &()) {
                Ok(frame) => {
                    expected.pins.entry(page).or_default().push((frame, access));
                    if writes {
                        cache.environment().state().held.insert(key(page));
                    }
                }
                Err(error) => prop_assert!(may_fail(error), "{:?}", error),
            }
        }
        Step::Unpin(page) => {
            let pins = expected.pins.entry(page).or_default();
            if let Some((frame, access)) = pins.pop() {
                cache.unpin(frame, access);
            }
            if !pins.iter().any(|(_, access)| *access == Access::Write) {
                cache.environment().state().held.remove(&key(page));
            }
        }
        Step::Fail(reads, writes) => {
            (expected.fails_reads, expected.fails_writes) = (reads, writes);
            let mut state = cache.environment().state();
            (state.fail_reads, state.fail_writes) = (reads, writes);
        }
    }
    Ok(())
}

fn sync<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    range: RangeInclusive<Key>,
    expected: &Expected,
) -> Result<(), TestCaseError> {
    let result = cache.write_back(range.clone());
    prop_assert!(result.is_ok() || expected.fails_writes);
    for page in (0..PAGES).filter(|page| range.contains(&key(*page))) {
        let stored = cache.environment().state().storage.get(&key(page)).copied().unwrap_or(0);
        let value = expected.values.get(&page).copied().unwrap_or(0);
        prop_assert!(stored == value || result.is_err(), "page {} is not in the file", page);
    }
    Ok(())
}

fn evict<P: Policy>(
    cache: &Cache<'_, TestEnvironment, P>,
    range: RangeInclusive<Key>,
    expected: &Expected,
) -> Result<(), TestCaseError> {
    let (evicted, result) = cache.evict_range(range.clone(), false);
    prop_assert!(result.is_ok() || expected.fails_writes);
    let is_pinned = |page: u64| expected.pins.get(&page).is_some_and(|pins| !pins.is_empty());
    let pinned = (0..PAGES).filter(|page| range.contains(&key(*page)) && is_pinned(*page)).count();
    prop_assert!(evicted.stay as usize == pinned || result.is_err());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_cache_is_transparent_with_clock(
        size in 1..=FRAMES,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let (memory, hand) = (Memory::new(FRAMES), words(Clock::WORDS));
        run(&memory.cache(Clock::new(&hand, FRAMES), size), &steps)?;
    }

    #[test]
    fn a_cache_is_transparent_with_lru(
        size in 1..=FRAMES,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let (memory, own) = (Memory::new(FRAMES), words(Lru::words(FRAMES)));
        run(&memory.cache(Lru::new(&own, FRAMES), size), &steps)?;
    }

    #[test]
    fn a_cache_is_transparent_with_s3_fifo(
        size in 1..=FRAMES,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let (memory, own) = (Memory::new(FRAMES), words(S3Fifo::words(FRAMES)));
        run(&memory.cache(S3Fifo::new(&own, FRAMES), size), &steps)?;
    }

    #[test]
    fn a_cache_is_transparent_with_dirty_bits(
        size in 1..=FRAMES,
        steps in prop::collection::vec(step(), 0..150),
    ) {
        let (memory, hand) = (Memory::new(FRAMES), words(Clock::WORDS));
        run(&memory.cache_with_bits(Clock::new(&hand, FRAMES), size), &steps)?;
    }
}

#[test]
fn stores_that_only_dirty_bits_tell_are_written() {
    let (memory, hand) = (Memory::new(8), words(Clock::WORDS));
    let cache = memory.cache_with_bits(Clock::new(&hand, 8), 8);
    let stored = |page| cache.environment().state().storage.get(&key(page)).copied();
    (0..8).for_each(|page| _ = load(&cache, key(page), 0).unwrap());
    let before = cache.statistics();
    [2, 4, 7].iter().for_each(|page| store(&cache, key(*page), page + 1).unwrap());
    assert_eq!((cache.statistics().faults, before.faults), (8, 8), "no store faults");
    assert_eq!(cache.write_back(all()), Ok(3));
    assert_eq!([2, 3, 4, 7].map(stored), [Some(3), None, Some(5), Some(8)]);
    // A page that was written is clean, until the next store.
    assert_eq!(cache.write_back(all()), Ok(0));
    store(&cache, key(4), 50).unwrap();
    let (evicted, result) = cache.evict_range(all(), false);
    assert_eq!((evicted.pages, result, stored(4)), (8, Ok(()), Some(50)));
    assert_eq!(cache.statistics().written_back, 4);
}

#[test]
fn neighbouring_pages_are_written_in_one_call_and_in_order() {
    let (memory, hand) = (Memory::new(64), words(Clock::WORDS));
    let cache = memory.cache(Clock::new(&hand, 64), 64);
    // Pages of one file have even numbers here.
    for page in [20, 6, 8, 4, 22, 2, 40] {
        store(&cache, key(page), 1).unwrap();
    }
    assert_eq!(cache.write_back(all()), Ok(7));
    let statistics = cache.statistics();
    assert_eq!((statistics.writes, statistics.written_back, statistics.shootdowns), (3, 7, 1));
}

#[test]
fn a_full_cache_evicts_a_batch_with_one_shootdown() {
    let (memory, hand) = (Memory::new(64), words(Clock::WORDS));
    let cache = memory.cache(Clock::new(&hand, 64), 64);
    (0..65).for_each(|page| _ = load(&cache, key(page), 0).unwrap());
    let statistics = cache.statistics();
    assert_eq!((statistics.evictions, statistics.shootdowns), (8, 1));
    assert_eq!((statistics.misses, statistics.faults), (65, 65));
}

#[test]
fn read_ahead_maps_what_it_reads() {
    let (memory, hand) = (Memory::new(64), words(Clock::WORDS));
    let cache = memory.cache(Clock::new(&hand, 64), 64);
    load(&cache, key(10), 3).unwrap();
    (0..4).for_each(|step| _ = load(&cache, key(10 + 2 * step), 0).unwrap());
    let statistics = cache.statistics();
    assert_eq!((statistics.faults, statistics.misses, statistics.read_ahead), (1, 1, 3));
}

#[test]
fn the_cache_tells_which_pages_it_has() {
    let (memory, hand) = (Memory::new(2), words(Clock::WORDS));
    let cache = memory.cache(Clock::new(&hand, 2), 2);
    load(&cache, key(1), 0).unwrap();
    assert_eq!([1, 2].map(|page| cache.has(key(page))), [true, false]);
    cache.evict_range(all(), false).1.unwrap();
    assert!(!cache.has(key(1)));
}

#[test]
fn a_policy_of_the_users_own_can_be_used_and_cannot_do_harm() {
    /// Proposes nonsense: frames that do not exist in this order, many times.
    struct Stubborn;
    impl Policy for Stubborn {
        fn admit(&self, _: Frame, _: Key) {}
        fn touch(&self, _: Frame) {}
        fn remove(&self, _: Frame, _: Key) {}
        fn propose(&self, evictor: &mut dyn Evictor) {
            for frame in [3, 4, 3, 3, u32::MAX, 0, 1, 0, 2, 1000, 1, 3] {
                evictor.was_referenced(frame);
                evictor.take(frame);
            }
        }
    }
    let memory = Memory::new(4);
    let cache = memory.cache(&Stubborn as &dyn Policy, 4);
    for round in 0..3 {
        for page in 0..10 {
            assert_eq!(load(&cache, key(page), 0), Ok(round));
            store(&cache, key(page), round + 1).unwrap();
        }
    }
}

#[test]
fn a_policy_that_panics_leaves_the_pages_where_they_are() {
    struct Panicking(AtomicBool);
    impl Policy for Panicking {
        fn admit(&self, _: Frame, _: Key) {}
        fn touch(&self, _: Frame) {}
        fn remove(&self, _: Frame, _: Key) {}
        fn propose(&self, evictor: &mut dyn Evictor) {
            (0..4).for_each(|frame| _ = evictor.take(frame));
            assert!(self.0.load(Ordering::Relaxed), "planned");
        }
    }
    let memory = Memory::new(4);
    let cache = memory.cache(Panicking(AtomicBool::new(false)), 4);
    (0..4).for_each(|page| store(&cache, key(page), page + 1).unwrap());
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| load(&cache, key(4), 0)));
    assert!(caught.is_err());
    cache.policy().0.store(true, Ordering::Relaxed);
    assert_eq!(load(&cache, key(4), 0), Ok(0));
    (0..4).for_each(|page| assert_eq!(load(&cache, key(page), 0), Ok(page + 1)));
}

#[test]
fn a_policy_that_proposes_nothing_costs_time_only() {
    struct Silent;
    impl Policy for Silent {
        fn admit(&self, _: Frame, _: Key) {}
        fn touch(&self, _: Frame) {}
        fn remove(&self, _: Frame, _: Key) {}
        fn propose(&self, _: &mut dyn Evictor) {}
    }
    let memory = Memory::new(4);
    let cache = memory.cache(Silent, 4);
    let frame = cache.pin(key(0), Access::Read, &()).unwrap();
    (1..20).for_each(|page| store(&cache, key(page), page).unwrap());
    (1..20).for_each(|page| assert_eq!(load(&cache, key(page), 0), Ok(page)));
    cache.unpin(frame, Access::Read);
}

#[test]
fn threads_see_their_own_stores() {
    const THREADS: u64 = 4;
    let rounds = if cfg!(miri) { 3 } else { 400 };
    let (memory, own) = (Memory::new(8), words(S3Fifo::words(8)));
    let cache = memory.cache(S3Fifo::new(&own, 8), 8);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let cache = &cache;
            scope.spawn(move || {
                for round in 0..rounds {
                    for step in 0..6 {
                        let page = thread + THREADS * ((step * 5 + round) % 6);
                        let seen = load(cache, key(page), (round % 3) as u32).unwrap();
                        assert_eq!(seen, round, "a store was lost");
                        store(cache, key(page), round + 1).unwrap();
                    }
                    if round % 16 == thread {
                        cache.write_back(all()).unwrap();
                    }
                }
            });
        }
    });
    cache.write_back(all()).unwrap();
    let state = cache.environment().state();
    (0..6 * THREADS).for_each(|page| assert_eq!(state.storage[&key(page)], rounds));
    assert!(state.most_in_use <= 8);
}

#[test]
fn layouts_refuse_numbers_that_make_no_sense() {
    assert!(Layout::new(1, 1, 1).is_some());
    for (frames, processors, nodes) in
        [(0, 1, 1), (1, 0, 1), (1, 1, 0), (u32::MAX, 1, 1), (1, usize::MAX, 1), (1, 1, usize::MAX)]
    {
        assert_eq!(Layout::new(frames, processors, nodes), None);
    }
}
