//! Calls of a tree: bulk loads, reads in place, blobs, cursors.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::{all_freed, assert_same, assert_sound, memory_store, options, value};
use vellum::{Error, Store};

#[test]
fn bulk_loading_gives_the_same_tree_and_refuses_what_it_must() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let entries: Vec<(Vec<u8>, Vec<u8>)> = (0..30_000u32)
        .map(|n| (format!("{n:08}").into_bytes(), value((n % 50) as usize, n as usize)))
        .chain([(b"x-large".to_vec(), value(60_000, 0))])
        .collect();
    let used = store.stat().unwrap().used_pages;

    let swapped = [(b"b", b"1"), (b"a", b"2")];
    let error = tree.bulk_load(swapped).unwrap_err();
    assert!(matches!(&error, Error::NotSorted { entry: 1, key } if key == b"a"), "{error}");
    assert!(error.to_string().contains("entry 1, \"a\","), "{error}");
    let duplicate = entries.iter().cloned().chain([(b"x-large".to_vec(), vec![])]);
    let error = tree.bulk_load(duplicate).unwrap_err();
    assert!(matches!(error, Error::NotSorted { entry: 30_001, .. }), "{error}");
    assert_eq!(tree.stat().unwrap().entries, 0);
    all_freed(&store);
    assert_eq!(store.stat().unwrap().used_pages, used, "a failed load gives its pages back");

    assert_eq!(tree.bulk_load(entries.iter().cloned()).unwrap(), 30_001);
    assert_same(&tree, &entries.iter().cloned().collect());
    assert!(matches!(tree.bulk_load(entries.iter().cloned()), Err(Error::NotEmpty)));
    // The loaded tree takes changes as any other tree.
    let mut model: BTreeMap<_, _> = entries.into_iter().collect();
    for n in (0..30_000u32).step_by(7) {
        let key = format!("{n:08}x").into_bytes();
        tree.insert(&key, b"new").unwrap();
        model.insert(key, b"new".to_vec());
    }
    assert_same(&tree, &model);
    assert_sound(&store);
}

#[test]
fn many_keys_are_found_together() {
    let (device, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.bulk_load((0..20_000u32).map(|n| (n.to_be_bytes(), value((n % 60) as usize, 1)))).unwrap();
    tree.upsert(b"blob", &value(20_000, 3)).unwrap();
    drop(tree);
    store.close().unwrap();

    let store = Store::open_on(device, &options(64, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    let numbers: Vec<[u8; 4]> = (0..25_000u32).step_by(111).map(u32::to_be_bytes).collect();
    let mut keys: Vec<&[u8]> = numbers.iter().map(|key| &key[..]).collect();
    keys.push(b"blob");
    keys.push(b"missing");
    let found = tree.multi_get(&keys).unwrap();
    assert_eq!(found.len(), keys.len());
    for (key, value) in keys.iter().zip(found) {
        let expected = tree.get(key).unwrap();
        assert_eq!(value.as_deref(), expected.as_deref());
    }
    assert!(store.pool_stats().prefetches > 0);
}

#[test]
fn reads_in_place_and_into_a_buffer() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let large = value(50_000, 9);
    tree.upsert(b"small", b"12345").unwrap();
    assert!(
        !tree
            .upsert_with(b"large", large.len(), |slice| {
                slice.copy_from_slice(&large);
                Ok(())
            })
            .unwrap()
    );
    assert_eq!(tree.with(b"small", <[u8]>::len).unwrap(), Some(5));
    assert_eq!(tree.with(b"large", <[u8]>::to_vec).unwrap(), Some(large.clone()));
    assert_eq!(tree.with(b"none", <[u8]>::len).unwrap(), None);
    let mut buffer = Vec::new();
    assert!(tree.get_into(b"large", &mut buffer).unwrap() && buffer == large);
    assert!(tree.get_into(b"small", &mut buffer).unwrap() && buffer == b"12345");
    assert!(!tree.get_into(b"none", &mut buffer).unwrap());

    let failed = tree.upsert_with(b"large", 30_000, |_| Err(std::io::Error::other("no input")));
    assert!(matches!(failed, Err(Error::Input(_))));
    assert_eq!(tree.get(b"large").unwrap().as_deref(), Some(&large[..]));
    assert_sound(&store);
}

#[test]
fn a_blob_that_is_held_keeps_its_value_when_it_is_replaced() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let (old, new) = (value(20_000, 1), value(30_000, 2));
    tree.upsert(b"key", &old).unwrap();
    let held = tree.get(b"key").unwrap().unwrap();
    assert!(tree.upsert(b"key", &new).unwrap());
    assert!(*held == old[..]);
    assert!(*tree.get(b"key").unwrap().unwrap() == new[..]);
    assert!(tree.remove(b"key").unwrap());
    drop(held);
    // The page that could not be freed while the guard held it is free now.
    store.sync().unwrap();
    assert_sound(&store);
}

#[test]
fn a_cursor_goes_both_ways_and_survives_changes() {
    let (_, store) = memory_store(32, 1);
    let tree = store.create_tree("t").unwrap();
    for n in 0..3000u32 {
        tree.insert(&n.to_be_bytes(), &[7; 50]).unwrap();
    }
    let mut cursor = tree.cursor();
    assert!(cursor.key().is_empty() && cursor.value().unwrap().is_none());
    assert!(cursor.seek(&1500u32.to_be_bytes()).unwrap());
    // The cursor's leaf is emptied, merged away and filled again.
    for n in 1000..2000u32 {
        assert!(tree.remove(&n.to_be_bytes()).unwrap());
    }
    assert!(cursor.forward().unwrap());
    assert_eq!(cursor.key(), 2000u32.to_be_bytes());
    assert!(cursor.backward().unwrap());
    assert_eq!(cursor.key(), 999u32.to_be_bytes());
    for n in 1000..2000u32 {
        tree.insert(&n.to_be_bytes(), b"").unwrap();
    }
    assert!(cursor.forward().unwrap());
    assert_eq!(cursor.key(), 1000u32.to_be_bytes());
    assert!(cursor.last().unwrap() && !cursor.forward().unwrap());
    assert!(cursor.backward().unwrap());
    assert_eq!(cursor.key(), 2999u32.to_be_bytes());
    assert!(cursor.first().unwrap() && !cursor.backward().unwrap());
    assert!(cursor.forward().unwrap());
    assert_eq!(cursor.key(), 0u32.to_be_bytes());
}

#[test]
fn a_range_reads_its_blobs_ahead() {
    let (device, store) = memory_store(256, 1);
    let tree = store.create_tree("t").unwrap();
    for n in 0..300usize {
        tree.insert(format!("{n:04}").as_bytes(), &value(2000 + 37 * n, n)).unwrap();
    }
    drop(tree);
    store.close().unwrap();
    let store = Store::open_on(device, &options(256, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    for (n, entry) in tree.entries().enumerate() {
        let (key, found) = entry.unwrap();
        assert_eq!(key, format!("{n:04}").as_bytes());
        assert!(*found == value(2000 + 37 * n, n));
    }
    let stats = store.pool_stats();
    assert!(stats.prefetches > 200, "{stats:?}");
}

/// YCSB's records are inline values. As blobs, each with a page of its own, they took four times
/// the memory.
#[test]
fn records_of_a_thousand_bytes_lie_in_leaves() {
    let (_, store) = memory_store(600, 1);
    let tree = store.create_tree("t").unwrap();
    let entries = (0..900u64).map(|key| (key.to_be_bytes(), value(1000, key as usize)));
    tree.bulk_load(entries).unwrap();
    let stat = tree.stat().unwrap();
    assert_eq!((stat.blobs, stat.leaf_pages), (0, 300));
    for key in (0..900u64).rev() {
        tree.upsert(&key.to_be_bytes(), &value(1001, key as usize)).unwrap();
    }
    assert_eq!(tree.stat().unwrap().blobs, 0);
    assert_sound(&store);
}
