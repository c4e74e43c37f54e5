//! Several threads on one tree: histories, invariants, structure.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, RwLock};

use common::{Random, assert_sound, memory_store, options, rounds, seed};
use vellum::{Store, Tree};
use vellum_pool::device::MemoryDevice;
use vellum_testing::patience::SetWhenDropped;

/// One operation on one key: its beginning, its end, and its result.
#[derive(Clone, Copy, Debug)]
struct Event {
    begin: u64,
    end: u64,
    /// The state after a write (0: absent), or the state that a read saw.
    write: bool,
    state: u64,
    /// Whether a write replaced a value.
    had: Option<bool>,
}

/// Whether an order of the events exists that respects real time and explains all results,
/// beginning with an absent key (Wing and Gong, 1993). Each key has few enough events.
fn is_linearizable(events: &[Event]) -> bool {
    fn search(
        events: &[Event],
        done: u128,
        state: u64,
        failed: &mut std::collections::HashSet<(u128, u64)>,
    ) -> bool {
        if done.count_ones() as usize == events.len() {
            return true;
        }
        if failed.contains(&(done, state)) {
            return false;
        }
        let pending = |at: &usize| done & (1 << at) == 0;
        let open = (0..events.len()).filter(pending);
        let horizon = open.clone().map(|at| events[at].end).min().unwrap_or(u64::MAX);
        for at in open.filter(|at| events[*at].begin <= horizon) {
            let event = &events[at];
            let fits = match event.write {
                true => event.had.is_none_or(|had| had == (state != 0)),
                false => event.state == state,
            };
            let next = if event.write { event.state } else { state };
            if fits && search(events, done | (1 << at), next, failed) {
                return true;
            }
        }
        failed.insert((done, state));
        false
    }
    assert!(events.len() <= 128);
    search(events, 0, 0, &mut Default::default())
}

#[test]
fn the_checker_tells_good_histories_from_bad_ones() {
    let event = |begin, end, write, state, had| Event { begin, end, write, state, had };
    let good = [
        event(0, 3, true, 7, Some(false)),
        event(1, 2, false, 0, None),
        event(4, 5, false, 7, None),
        event(6, 7, true, 0, Some(true)),
    ];
    assert!(is_linearizable(&good));
    let stale = [event(0, 1, true, 7, Some(false)), event(2, 3, false, 0, None)];
    assert!(!is_linearizable(&stale));
    let lost = [event(0, 1, true, 7, Some(false)), event(2, 3, true, 8, Some(false))];
    assert!(!is_linearizable(&lost));
}

/// A value that repeats its number, with a length that depends on the number. So a mixture of two
/// values is noticed.
fn value_of(number: u64) -> Vec<u8> {
    let len = 8 * (1 + number % 40) as usize + if number.is_multiple_of(97) { 6000 } else { 0 };
    number.to_le_bytes().into_iter().cycle().take(len).collect()
}

fn number_of(value: &[u8]) -> u64 {
    let number = u64::from_le_bytes(value[..8].try_into().unwrap());
    assert!(value == value_of(number), "a torn value");
    number
}

fn key_of(number: u64) -> Vec<u8> {
    format!("{:04}/{}", number, "x".repeat((number % 60) as usize)).into_bytes()
}

fn one_thread(
    tree: &Tree,
    seed: u64,
    thread: u64,
    clock: &AtomicU64,
    keys: u64,
    steps: u64,
) -> Vec<(u64, Event)> {
    let mut random = Random(seed.wrapping_mul(97) + thread * 7919 + 1);
    let mut history = Vec::new();
    for step in 0..steps {
        let number = random.below(keys);
        let key = key_of(number);
        let begin = clock.fetch_add(1, Ordering::SeqCst);
        let (write, state, had) = match random.below(10) {
            0..=3 => {
                let state = (thread + 1) * 1_000_000 + step;
                let had = tree.upsert(&key, &value_of(state)).unwrap();
                (true, state, Some(had))
            }
            4..=5 => (true, 0, Some(tree.remove(&key).unwrap())),
            6..=7 => {
                let value = tree.get(&key).unwrap();
                (false, value.map_or(0, |value| number_of(&value)), None)
            }
            8 => {
                let mut buffer = Vec::new();
                let found = tree.get_into(&key, &mut buffer).unwrap();
                (false, if found { number_of(&buffer) } else { 0 }, None)
            }
            _ => {
                let seen = tree.with(&key, number_of).unwrap();
                (false, seen.unwrap_or(0), None)
            }
        };
        let end = clock.fetch_add(1, Ordering::SeqCst);
        history.push((number, Event { begin, end, write, state, had }));
    }
    history
}

fn run_histories(seed: u64, pool_pages: u64, page_frames: u32, threads: u64, steps: u64) {
    let (_, store) = memory_store(pool_pages, page_frames);
    let tree = store.create_tree("t").unwrap();
    let clock = AtomicU64::new(1);
    let keys = threads * steps / 60;
    let barrier = Barrier::new(threads as usize);
    let histories: Vec<_> = std::thread::scope(|scope| {
        let run = |thread| {
            let (tree, clock, barrier) = (&tree, &clock, &barrier);
            scope.spawn(move || {
                barrier.wait();
                one_thread(tree, seed, thread, clock, keys, steps)
            })
        };
        let handles: Vec<_> = (0..threads).map(run).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    let mut by_key: HashMap<u64, Vec<Event>> = HashMap::new();
    for (key, event) in histories {
        by_key.entry(key).or_default().push(event);
    }
    for (key, mut events) in by_key {
        events.sort_by_key(|event| event.begin);
        events.truncate(120);
        let last = events.len() == 120;
        assert!(last || is_linearizable(&events), "key {key}: {events:#?}");
    }
    assert_sound(&store);
}

#[test]
fn histories_on_a_roomy_pool_are_linearizable() {
    for seed in (seed(1)..).take(rounds(300) as usize) {
        run_histories(seed, 4096, 1, 4, 6000);
    }
}

#[test]
fn histories_on_a_pool_that_always_evicts_are_linearizable() {
    for seed in (seed(1)..).take(rounds(300) as usize) {
        run_histories(seed, 24, 1, 3, 4000);
        run_histories(seed, 12, 4, 2, 3000);
        run_histories(seed, 8, 1, 4, 1500);
    }
}

#[test]
fn threads_that_insert_and_remove_everywhere_leave_a_sound_tree() {
    let (_, store) = memory_store(256, 1);
    let tree = store.create_tree("t").unwrap();
    let (threads, each) = (4u32, 4000u32);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let tree = &tree;
            scope.spawn(move || {
                let key = |n: u32| n.wrapping_mul(2_654_435_761).to_be_bytes();
                let mine = || (0..each).map(|n| n * threads + thread);
                for round in 0..2 {
                    for n in mine() {
                        tree.insert(&key(n), &n.to_be_bytes()).unwrap();
                    }
                    for n in mine().filter(|n| round == 0 || n % 16 >= 4) {
                        assert!(tree.remove(&key(n)).unwrap());
                    }
                }
            });
        }
    });
    assert_eq!(tree.check().unwrap().entries, u64::from(threads * each / 4));
    assert_sound(&store);
}

#[test]
fn cursors_see_every_entry_that_stays() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    // Even numbers stay; odd ones are inserted and removed.
    for n in (0..6000u32).step_by(2) {
        tree.insert(&n.to_be_bytes(), &n.to_be_bytes()).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..2u64 {
            let (tree, stop) = (&tree, &stop);
            scope.spawn(move || {
                let mut random = Random(thread);
                while !stop.load(Ordering::Relaxed) {
                    let n = (random.below(3000) * 2 + 1) as u32;
                    match random.below(2) {
                        0 => tree
                            .upsert(&n.to_be_bytes(), &vec![0; random.below(400) as usize])
                            .map(drop),
                        _ => tree.remove(&n.to_be_bytes()).map(drop),
                    }
                    .unwrap();
                }
            });
        }
        let number = |key: &[u8]| u32::from_be_bytes(key.try_into().unwrap());
        for _ in 0..15 * rounds(100) {
            let mut even = 0;
            let mut before = None;
            for entry in tree.entries() {
                let (key, value) = entry.unwrap();
                assert!(before.is_none_or(|before| before < key), "out of order");
                if number(&key) % 2 == 0 {
                    assert_eq!(number(&key), even);
                    assert_eq!(*value, *key);
                    even += 2;
                }
                before = Some(key);
            }
            assert_eq!(even, 6000);
            let mut cursor = tree.cursor();
            while cursor.backward().unwrap() {
                if number(cursor.key()) % 2 == 0 {
                    even -= 2;
                    assert_eq!(number(cursor.key()), even);
                }
            }
            assert_eq!(even, 0);
        }
    });
    assert_sound(&store);
}

#[test]
fn readers_and_a_tree_that_is_dropped() {
    let (_, store) = memory_store(64, 1);
    for round in 0..10 * rounds(50) {
        let tree = store.create_tree("t").unwrap();
        tree.bulk_load((0..3000u32).map(|n| (n.to_be_bytes(), [round as u8; 100]))).unwrap();
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let tree = &tree;
                scope.spawn(move || {
                    let mut random = Random(seed);
                    loop {
                        match tree.get(&(random.below(3000) as u32).to_be_bytes()) {
                            Ok(value) => assert_eq!(*value.unwrap(), [round as u8; 100]),
                            Err(vellum::Error::NoSuchTree(_)) => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            store.drop_tree("t").unwrap();
            // Another tree uses the pages at once.
            let other = store.create_tree("other").unwrap();
            other.bulk_load((0..3000u32).map(|n| (n.to_be_bytes(), [0xee; 100]))).unwrap();
        });
        store.drop_tree("other").unwrap();
    }
    assert_sound(&store);
}

#[test]
fn every_checkpoint_between_changes_is_a_sound_store() {
    let (device, store) = memory_store(48, 1);
    let tree = store.create_tree("t").unwrap();
    let stop = AtomicBool::new(false);
    // The thread that locks it for writing has the store stand still.
    let changing = RwLock::new(());
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..2u64 {
            let (tree, stop, changing) = (&tree, &stop, &changing);
            scope.spawn(move || {
                let mut random = Random(thread + 40);
                while !stop.load(Ordering::Relaxed) {
                    let key = key_of(random.below(2000));
                    let _one = changing.read().unwrap();
                    match random.below(3) {
                        0 => tree.remove(&key).map(drop),
                        _ => tree.upsert(&key, &value_of(random.below(1000))).map(drop),
                    }
                    .unwrap();
                }
            });
        }
        for _ in 0..20 * rounds(50) {
            let still = changing.write().unwrap();
            let entries = tree.entries().count();
            store.sync().unwrap();
            let copy = MemoryDevice::from_snapshot(device.snapshot());
            drop(still);
            let copy = Store::open_on(Arc::new(copy), &options(48, 1)).unwrap();
            assert_sound(&copy);
            assert_eq!(copy.tree("t").unwrap().entries().count(), entries);
        }
    });
}

#[test]
fn a_file_that_many_threads_wrote_opens_with_all_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = Store::create(&path, &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let threads = 3u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let tree = &tree;
            scope.spawn(move || {
                for n in (0..6000).filter(|n| n % threads == thread) {
                    tree.insert(&key_of(n), &value_of(n)).unwrap();
                    assert_eq!(number_of(&tree.get(&key_of(n)).unwrap().unwrap()), n);
                }
            });
        }
    });
    drop(tree);
    store.close().unwrap();
    let store = Store::open(&path, &options(64, 1)).unwrap();
    assert_sound(&store);
    let tree = store.tree("t").unwrap();
    for n in 0..6000 {
        assert_eq!(number_of(&tree.get(&key_of(n)).unwrap().unwrap()), n);
    }
}

#[test]
fn no_thread_starves_when_all_write_to_one_leaf() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..3u64 {
            let (tree, stop) = (&tree, &stop);
            scope.spawn(move || {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    tree.upsert(b"hot", &value_of(thread * 97_000 + n % 90 + 1)).unwrap();
                }
            });
        }
        while !tree.contains(b"hot").unwrap() {}
        for _ in 0..20_000 * rounds(50) {
            let value = tree.get(b"hot").unwrap().unwrap();
            number_of(&value);
            let mut cursor = tree.cursor();
            assert!(cursor.forward().unwrap());
            number_of(&cursor.value().unwrap().unwrap());
        }
    });
    assert_sound(&store);
}
