//! Many lookups at once: the same results as single lookups, also while other threads change the
//! tree.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{PATIENCE, Random, assert_sound, cold, memory_store, options, rounds, seed};
use rustix::io::Errno;
use vellum::page::{self, PageKind};
use vellum::{Error, Store, Tree};
use vellum_pool::device::{Completion, Fault, MemoryDevice, Operation};
use vellum_testing::patience::SetWhenDropped;

/// Keys of many lengths. Half of them share a long prefix.
fn key_of(number: u64) -> Vec<u8> {
    let tail = "x".repeat((number % 23) as usize);
    match number % 2 {
        0 => [&number.to_be_bytes()[..], tail.as_bytes()].concat(),
        _ => format!("a beginning that many share/{number:08}/{tail}").into_bytes(),
    }
}

fn value_of(number: u64, version: u64) -> Vec<u8> {
    let mixed = number.wrapping_mul(31).wrapping_add(version);
    let len = match number % 50 {
        0 => 5000 + (mixed % 9000) as usize,
        1 => 0,
        _ => (mixed % 300) as usize,
    };
    mixed.to_le_bytes().into_iter().cycle().take(len).collect()
}

/// Looks up all keys at once and compares the values with the model.
fn assert_found(tree: &Tree, keys: &[Vec<u8>], model: &BTreeMap<Vec<u8>, Vec<u8>>) {
    let mut visits = vec![0; keys.len()];
    tree.multi_get_with(keys, |index, value| {
        visits[index] += 1;
        assert_eq!(value, model.get(&keys[index]).map(|value| &value[..]), "key {index}");
    })
    .unwrap();
    assert!(visits.iter().all(|&visits| visits == 1), "each key once");
}

fn against_the_model(seed: u64, pool_pages: u64, page_frames: u32, entries: u64) {
    let mut random = Random(seed);
    let device = Arc::new(MemoryDevice::new().completing(Completion::Thread).unwrap());
    let store = Store::create_on(device, &options(pool_pages, page_frames)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let mut model = BTreeMap::new();
    assert_found(&tree, &[], &model);
    assert_found(&tree, &[b"nothing there".to_vec()], &model);
    for number in 0..entries {
        let (key, value) = (key_of(number), value_of(number, 0));
        tree.upsert(&key, &value).unwrap();
        model.insert(key, value);
        if number % (entries / 8) == 0 {
            let keys: Vec<_> = (0..=number + 1).rev().map(key_of).collect();
            assert_found(&tree, &keys, &model);
        }
    }
    for count in [1, 2, 31, 32, 33, 64, 300, 1000] {
        let keys: Vec<_> = (0..count).map(|_| key_of(random.below(entries * 5 / 4))).collect();
        assert_found(&tree, &keys, &model);
        let references: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        // The lookup pins all blobs at once, and only a few of them fit into a small pool.
        let few = &references[..references.len().min(20)];
        for (key, value) in few.iter().zip(tree.multi_get(few).unwrap()) {
            assert_eq!(value.as_deref(), model.get(*key).map(|value| &value[..]));
        }
    }
    assert_sound(&store);
}

#[test]
fn finds_what_single_lookups_find() {
    for round in 0..u64::from(rounds(20)) {
        let seed = seed(11 + round);
        against_the_model(seed, 4000, 1, 4000);
        against_the_model(seed + 1000, 64, 1, 3000);
        against_the_model(seed + 2000, 24, 3, 2000);
    }
}

/// A value contains its key, so the test notices a value of another key, or a torn one. No thread
/// changes the upper half of the keys, so the lookups must find all of these.
fn with_writers(seed: u64, pool_pages: u64) {
    const KEYS: u64 = 3000;
    let (_, store) = memory_store(pool_pages, 1);
    let tree = store.create_tree("t").unwrap();
    let value = |number: u64, times: usize| number.to_le_bytes().repeat(times);
    for number in 0..KEYS {
        tree.upsert(&key_of(number), &value(number, 20)).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..2 {
            let (tree, stop) = (&tree, &stop);
            scope.spawn(move || {
                let mut random = Random(seed + thread);
                while !stop.load(Ordering::Relaxed) {
                    // Runs of removals and insertions, so that leaves merge and split.
                    let first = random.below(KEYS / 2);
                    let grows = random.below(2) == 0;
                    for number in first..(first + 100).min(KEYS / 2) {
                        match grows {
                            true => {
                                let times = random.below(100) as usize;
                                tree.upsert(&key_of(number), &value(number, times)).unwrap();
                            }
                            false => _ = tree.remove(&key_of(number)).unwrap(),
                        }
                    }
                }
            });
        }
        let mut random = Random(seed + 7);
        for _ in 0..if pool_pages > 100 { 400 } else { 80 } {
            let numbers: Vec<u64> =
                (0..1 + random.below(150)).map(|_| random.below(KEYS)).collect();
            let keys: Vec<_> = numbers.iter().map(|number| key_of(*number)).collect();
            let mut visits = 0;
            tree.multi_get_with(&keys, |index, found| {
                visits += 1;
                let number = numbers[index];
                assert!(found.is_some() || number < KEYS / 2, "key {number} was never removed");
                let words = found.unwrap_or_default().as_chunks::<8>().0;
                assert!(words.iter().all(|word| u64::from_le_bytes(*word) == number));
            })
            .unwrap();
            assert_eq!(visits, keys.len());
        }
    });
    assert_sound(&store);
}

#[test]
fn finds_unchanged_keys_while_others_write() {
    for round in 0..u64::from(rounds(20)) {
        with_writers(seed(5 + round), 2000);
        with_writers(seed(105 + round), 40);
    }
}

#[test]
fn all_reads_of_a_call_are_in_flight_together() {
    let (device, _store, tree) = cold(3000, 500);
    // The root, which is the parent of all leaves, and one leaf.
    assert!(tree.contains(&0u64.to_be_bytes()).unwrap());
    let plan = device.plan();
    plan.hold(Operation::Read);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            // So far apart that no two leaves are siblings.
            let keys: Vec<_> = (1..48u64).map(|number| (number * 62).to_be_bytes()).collect();
            let mut found = 0;
            tree.multi_get_with(&keys, |index, value| {
                assert_eq!(value, Some(&[((index as u64 + 1) * 62) as u8; 120][..]));
                found += 1;
            })
            .unwrap();
            found
        });
        let all = plan.wait_until_held(Operation::Read, 47, PATIENCE);
        let held = plan.held(Operation::Read);
        plan.release(Operation::Read);
        assert!(all, "{} of 47 reads were in flight", held);
        assert_eq!(call.join().unwrap(), 47);
    });
}

#[test]
fn a_page_that_cannot_be_read_fails_the_call_with_its_error() {
    let (device, store, tree) = cold(20_000, 60);
    let plan = device.plan();
    let keys: Vec<_> = (0..20_000u64).step_by(97).map(u64::to_be_bytes).collect();
    let look = || {
        tree.multi_get_with(&keys, |index, value| {
            assert_eq!(value, Some(&[(index as u64 * 97) as u8; 120][..]));
        })
    };
    plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
    for _ in 0..3 {
        assert!(matches!(look(), Err(Error::Io(_))));
    }
    plan.clear();
    look().unwrap();
    let (mut failed, mut succeeded) = (0, 0);
    for round in 0..30 {
        plan.clear();
        plan.fail_randomly(Operation::Read, 0.02 * f64::from(round), Fault::Error(Errno::IO));
        match look() {
            Ok(()) => succeeded += 1,
            Err(Error::Io(_)) => failed += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0 && succeeded > 0, "{failed} failed, {succeeded} succeeded");
    plan.clear();
    plan.fail_always(Operation::Read, Fault::FlippedBit);
    assert!(matches!(look(), Err(Error::Damaged { .. })));
    plan.clear();
    look().unwrap();
    assert_sound(&store);
}

/// As if the device had acknowledged the writes of a page and lost them: the page in the file is
/// sound, but from a time when the place belonged to another tree.
#[test]
fn a_sound_page_of_another_tree_is_damage() {
    let memory = Arc::new(MemoryDevice::new());
    let store = Store::create_on(memory.clone(), &options(400, 1)).unwrap();
    for name in ["one", "two"] {
        let sorted = (0..200u64).map(|number| (number.to_be_bytes(), [1; 120]));
        store.create_tree(name).unwrap().bulk_load(sorted).unwrap();
    }
    store.close().unwrap();
    let mut bytes = memory.snapshot();
    let leaves = |tree: u32| -> Vec<usize> {
        let is_leaf = |at: &usize| {
            let page = &bytes[at * 4096..][..4096];
            page[36] == PageKind::Leaf as u8 && page::tree(page) == tree
        };
        (2..bytes.len() / 4096).filter(is_leaf).collect()
    };
    let (ours, theirs) = (leaves(2)[3], leaves(3)[3]);
    bytes.copy_within(theirs * 4096..(theirs + 1) * 4096, ours * 4096);
    let stale = &mut bytes[ours * 4096..(ours + 1) * 4096];
    stale[8..16].copy_from_slice(&(ours as u64).to_le_bytes());
    page::seal(stale, &[]);
    let device = Arc::new(MemoryDevice::from_snapshot(bytes));
    let store = Store::open_on(device, &options(400, 1)).unwrap();
    let tree = store.tree("one").unwrap();
    let keys: Vec<_> = (0..200u64).map(u64::to_be_bytes).collect();
    let mut found = 0;
    for key in &keys {
        match tree.get_into(key, &mut Vec::new()) {
            Ok(there) => found += usize::from(there),
            Err(error) => assert!(error.to_string().contains("belongs to tree 3"), "{error}"),
        }
    }
    assert!((150..200).contains(&found), "{found} are on other leaves");
    let error = tree.multi_get_with(&keys, |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}
