//! Edge cases: damaged trees in which threads could wait for each other, numbers that run out,
//! buffers of lookups that find no entry.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use common::{PATIENCE, memory_store, options};
use vellum::node::Node;
use vellum::page::seal;
use vellum::{Durability, Error, Store, TransactionOptions};
use vellum_pool::device::MemoryDevice;
use vellum_testing::patience::SetWhenDropped;

fn open(image: Vec<u8>) -> Store {
    Store::open_on(Arc::new(MemoryDevice::from_snapshot(image)), &options(2000, 1)).unwrap()
}

#[test]
fn a_lookup_that_finds_nothing_leaves_nothing_in_the_buffer() {
    let (_, store) = memory_store(100, 1);
    let tree = store.create_tree("t").unwrap();
    for number in 0..20u32 {
        tree.insert(&number.to_be_bytes(), &[1; 40]).unwrap();
    }
    let (key, stop) = (5u32.to_be_bytes(), AtomicBool::new(false));
    let mut value = b"old".to_vec();
    assert!(!tree.get_into(b"nothing", &mut value).unwrap() && value.is_empty());
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                tree.remove(&key).unwrap();
                tree.insert(&key, &[9; 1000]).unwrap();
            }
        });
        let left = (0..1_000_000).find_map(|_| {
            let mut value = Vec::new();
            let found = tree.get_into(&key, &mut value).unwrap();
            (!found && !value.is_empty()).then_some(value.len())
        });
        assert_eq!(left, None, "bytes in the buffer");
    });
}

/// Two parents of leaves are each other's children, and two threads merge below them.
#[test]
fn nodes_below_each_other_stop_no_thread() {
    let (device, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    for number in 0..40_000u32 {
        tree.insert(&number.to_be_bytes(), &[1; 60]).unwrap();
    }
    drop(tree);
    store.close().unwrap();
    let mut image = device.snapshot();
    let is_parent = |page: &[u8]| page[32..37] == *b"VLMP\x02" && page[38] == 1 && page[28] > 1;
    let parents: Vec<_> =
        (0..image.len()).step_by(4096).filter(|at| is_parent(&image[*at..*at + 4096])).collect();
    let (one, two) = (parents[1], parents[2]);
    let separator = |at: usize, slot: usize| {
        let mut key = Vec::new();
        Node::new(&image[at..at + 4096]).key_into(slot, &mut key).unwrap();
        key.resize(4, 0);
        u32::from_be_bytes(key[..4].try_into().unwrap())
    };
    // Slots 4 and 6 refer to the other parent. Slot 5 stays, and its entries change.
    let ranges = [one, two].map(|at| separator(at, 4) + 1..=separator(at, 5));
    for (at, other) in [(one, two), (two, one)] {
        for slot in [4, 6] {
            let child = at + 136 + 16 * slot + 8;
            image[child..child + 8].copy_from_slice(&(other as u64 / 4096).to_le_bytes());
        }
        seal(&mut image[at..at + 4096], &[]);
    }
    let tree = open(image).tree("t").unwrap();
    let (done, ended) = mpsc::channel();
    for range in ranges {
        let (tree, done) = (tree.clone(), done.clone());
        std::thread::spawn(move || {
            for round in 0..3000 {
                for number in range.clone() {
                    let key = number.to_be_bytes();
                    // The calls may fail here, but they must end.
                    if round % 2 == 0 {
                        let _ = tree.remove(&key);
                    } else {
                        let _ = tree.insert(&key, &[1; 5]);
                    }
                }
            }
            let _ = done.send(());
        });
    }
    for _ in 0..2 {
        assert!(ended.recv_timeout(PATIENCE).is_ok(), "they wait for each other");
    }
}

#[test]
fn a_store_whose_numbers_for_trees_are_used_up_opens_again() {
    let (device, store) = memory_store(100, 1);
    store.create_tree("first").unwrap();
    store.close().unwrap();
    let mut image = device.snapshot();
    for header in [0, 4096] {
        image[header + 112..header + 116].copy_from_slice(&(u32::MAX - 3).to_le_bytes());
        seal(&mut image[header..header + 4096], &[]);
    }
    let device = Arc::new(MemoryDevice::from_snapshot(image));
    for (name, error) in [("a", false), ("b", false), ("c", true), ("d", true)] {
        let store = Store::open_on(device.clone(), &options(100, 1)).unwrap();
        let created = store.create_tree(name).map(drop);
        match error {
            false => created.unwrap(),
            true => assert!(matches!(created, Err(Error::NoTreeNumbers)), "{created:?}"),
        }
        store.close().unwrap();
    }
    let store = Store::open_on(device, &options(100, 1)).unwrap();
    assert_eq!(store.trees().unwrap(), ["a", "b", "first"]);
}

/// In a damaged file, the root of a tree refers to pages of another tree. Dropping the first tree
/// frees no page of the other.
#[test]
fn dropping_a_tree_frees_no_pages_of_another_one() {
    let (device, store) = memory_store(2000, 1);
    for name in ["one", "two"] {
        let tree = store.create_tree(name).unwrap();
        for number in 0..3000u32 {
            tree.insert(&number.to_be_bytes(), &[1; 60]).unwrap();
        }
    }
    store.close().unwrap();
    let mut image = device.snapshot();
    let roots: Vec<_> = (0..image.len())
        .step_by(4096)
        .filter(|at| image[*at + 32..*at + 37] == *b"VLMP\x02" && image[*at + 38] == 1)
        .collect();
    let [one, two] = roots[..] else { panic!("{roots:?}") };
    // Both trees have the same first child.
    image.copy_within(two + 136 + 8..two + 136 + 16, one + 136 + 8);
    seal(&mut image[one..one + 4096], &[]);
    let store = open(image);
    store.drop_tree("one").unwrap();
    assert!(matches!(store.tree("one"), Err(Error::NoSuchTree(_))));
    assert_eq!(store.tree("two").unwrap().check().unwrap().entries, 3000);
}

/// Two leaves are in each other's place, as if a device had lost writes. Leaves store keys without
/// their prefix, so a key in the wrong leaf could become a different key.
#[test]
fn no_key_changes_in_a_leaf_of_other_keys() {
    let (device, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let entry = |number: u32| (number.to_be_bytes(), [number.to_be_bytes(); 15].concat());
    for (key, value) in (0..3000).map(entry) {
        tree.insert(&key, &value).unwrap();
    }
    drop(tree);
    store.close().unwrap();
    let mut image = device.snapshot();
    let is_root = |page: &[u8]| page[32..37] == *b"VLMP\x02" && page[38] == 1;
    let mut pages = (0..image.len()).step_by(4096);
    let root = pages.find(|at| is_root(&image[*at..*at + 4096])).unwrap();
    let [one, two] = [2, 30].map(|slot| root + 136 + 16 * slot + 8);
    (0..8).for_each(|byte| image.swap(one + byte, two + byte));
    seal(&mut image[root..root + 4096], &[]);
    let store = open(image);
    let tree = store.tree("t").unwrap();
    let unsynced = TransactionOptions::new().durability(Durability::None);
    let mut refused = [0; 9];
    for (key, value) in (0..3000).map(entry) {
        let mut buffer = Vec::new();
        let is_value = |found: &[u8]| assert_eq!(found, value);
        let outcomes = [
            tree.get(&key).map(|found| is_value(&found.unwrap())),
            tree.get_into(&key, &mut buffer).map(|found| assert!(found && buffer == value)),
            tree.with(&key, is_value).map(|found| assert!(found.is_some())),
            tree.contains(&key).map(|found| assert!(found)),
            tree.multi_get_with(&[key], |_, found| is_value(found.unwrap())),
            tree.update(&key, |found| assert_eq!(found, value)).map(drop),
            tree.upsert(&key, &value).map(drop),
            store.transact_with(unsynced, |transaction| transaction.put(&tree, &key, &value)),
            tree.remove(&key).map(drop),
        ];
        for (refused, outcome) in refused.iter_mut().zip(outcomes) {
            if let Err(error) = outcome {
                assert!(matches!(error, Error::Damaged { .. }), "{error}");
                *refused += 1;
            } else {
                tree.upsert(&key, &value).unwrap();
            }
        }
    }
    assert!(refused[0] > 20 && refused == [refused[0]; 9], "{refused:?}");
    let mut entries = 0;
    tree.salvage(&mut |found| {
        if let Ok((key, value)) = found {
            assert_eq!(value, [key; 15].concat());
            entries += 1;
        }
        true
    });
    assert_eq!(entries, 3000 - refused[0]);
}
