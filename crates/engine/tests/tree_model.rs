//! Trees against `BTreeMap`, with random page sizes and tiny pools.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::ops::Bound;

use common::{Random, all_freed, assert_sound, memory_store, options};
use proptest::prelude::*;
use vellum::{Error, Store, Tree};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Clone, Debug)]
enum Action {
    Upsert(Vec<u8>, usize),
    Insert(Vec<u8>, usize),
    Remove(Vec<u8>),
    RemoveNth(prop::sample::Index),
    RemoveRange(prop::sample::Index, usize),
    Get(Vec<u8>),
    Forward(Vec<u8>, usize),
    Backward(Vec<u8>, usize),
    Prefix(Vec<u8>),
    /// A range, from its ends in this order.
    Range(Bound<Vec<u8>>, Bound<Vec<u8>>, Vec<bool>),
    Reopen,
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop::sample::select(&[0u8, b'a', b'b', 254, 255][..]);
    let short = prop::collection::vec(byte, 0..7);
    let long = (0..500usize, prop::collection::vec(any::<u8>(), 0..4)).prop_map(|(len, tail)| {
        let mut key = vec![b'k'; len];
        key.extend(tail);
        key
    });
    prop_oneof![3 => short, 2 => long, 2 => any::<u16>().prop_map(|n| n.to_be_bytes().to_vec())]
}

fn bound() -> impl Strategy<Value = Bound<Vec<u8>>> {
    prop_oneof![
        3 => key().prop_map(Bound::Included),
        3 => key().prop_map(Bound::Excluded),
        1 => Just(Bound::Unbounded),
    ]
}

fn value_len() -> impl Strategy<Value = usize> {
    prop_oneof![10 => 0..30usize, 5 => 0..900usize, 1 => 900..8000usize]
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        20 => (key(), value_len()).prop_map(|(k, v)| Action::Upsert(k, v)),
        8 => (key(), value_len()).prop_map(|(k, v)| Action::Insert(k, v)),
        3 => key().prop_map(Action::Remove),
        8 => any::<prop::sample::Index>().prop_map(Action::RemoveNth),
        1 => (any::<prop::sample::Index>(), 1..150usize)
            .prop_map(|(i, n)| Action::RemoveRange(i, n)),
        4 => key().prop_map(Action::Get),
        1 => (key(), 0..60usize).prop_map(|(k, n)| Action::Forward(k, n)),
        1 => (key(), 0..60usize).prop_map(|(k, n)| Action::Backward(k, n)),
        1 => prop::collection::vec(any::<u8>(), 0..2).prop_map(Action::Prefix),
        2 => (bound(), bound(), prop::collection::vec(any::<bool>(), 1..4))
            .prop_map(|(start, end, turns)| Action::Range(start, end, turns)),
        1 => Just(Action::Reopen),
    ]
}

/// A value that depends on its length and on how often values were made.
fn value(len: usize, serial: usize) -> Vec<u8> {
    (0..len).map(|at| (at + serial) as u8).collect()
}

fn apply(tree: &Tree, model: &mut Model, serial: usize, action: &Action) {
    match action {
        Action::Upsert(key, len) => {
            let value = value(*len, serial);
            let replaced = tree.upsert(key, &value).unwrap();
            assert_eq!(replaced, model.insert(key.clone(), value).is_some());
        }
        Action::Insert(key, len) => {
            let value = value(*len, serial);
            match tree.insert(key, &value) {
                Ok(()) => assert!(model.insert(key.clone(), value).is_none()),
                Err(Error::KeyExists) => assert!(model.contains_key(key)),
                Err(error) => panic!("{error}"),
            }
        }
        Action::Remove(key) => {
            assert_eq!(tree.remove(key).unwrap(), model.remove(key).is_some());
        }
        Action::RemoveNth(index) => remove_range(tree, model, index, 1),
        Action::RemoveRange(index, count) => remove_range(tree, model, index, *count),
        Action::Get(key) => {
            let found = tree.get(key).unwrap();
            assert_eq!(found.as_deref(), model.get(key).map(|value| &value[..]));
            assert_eq!(tree.contains(key).unwrap(), model.contains_key(key));
        }
        Action::Forward(key, count) => forward(tree, model, key, *count),
        Action::Backward(key, count) => backward(tree, model, key, *count),
        Action::Prefix(prefix) => {
            let found: Vec<_> = tree.prefix(prefix).map(|entry| entry.unwrap().0).collect();
            let expected = model.keys().filter(|key| key.starts_with(prefix)).cloned();
            assert_eq!(found, expected.collect::<Vec<_>>());
        }
        Action::Range(start, end, turns) => range(tree, model, start, end, turns),
        Action::Reopen => {}
    }
}

/// Whether the map takes these bounds: it panics where a tree's range is just empty.
fn is_range(start: &Bound<Vec<u8>>, end: &Bound<Vec<u8>>) -> bool {
    match (start, end) {
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => true,
        (Bound::Excluded(start), Bound::Excluded(end)) => start < end,
        (Bound::Included(start) | Bound::Excluded(start), Bound::Included(end))
        | (Bound::Included(start), Bound::Excluded(end)) => start <= end,
    }
}

fn range(tree: &Tree, model: &Model, start: &Bound<Vec<u8>>, end: &Bound<Vec<u8>>, turns: &[bool]) {
    let bounds = (start.as_ref(), end.as_ref());
    let mut expected = is_range(start, end).then(|| model.range::<Vec<u8>, _>(bounds));
    let (mut entries, mut in_place) = (tree.range(bounds), tree.range(bounds));
    for turn in turns.iter().cycle() {
        let expected = expected.as_mut();
        let (expected, found, same) = match turn {
            true => (expected.and_then(Iterator::next), entries.next(), in_place.next_entry()),
            false => (
                expected.and_then(DoubleEndedIterator::next_back),
                entries.next_back(),
                in_place.next_entry_back(),
            ),
        };
        let (found, same) = (found.transpose().unwrap(), same.unwrap());
        let Some((key, value)) = expected else {
            return assert!(found.is_none() && same.is_none());
        };
        let (found, same) = (found.unwrap(), same.unwrap());
        assert!(found.0 == *key && *found.1 == value[..]);
        assert!(same.0 == key && *same.1 == value[..]);
    }
}

fn remove_range(tree: &Tree, model: &mut Model, index: &prop::sample::Index, count: usize) {
    if model.is_empty() {
        return;
    }
    let first = index.index(model.len());
    let keys: Vec<_> = model.keys().skip(first).take(count).cloned().collect();
    for key in keys {
        assert!(tree.remove(&key).unwrap());
        model.remove(&key);
    }
}

fn forward(tree: &Tree, model: &Model, key: &[u8], count: usize) {
    let mut cursor = tree.cursor().read_ahead(2);
    let mut expected = model.range::<[u8], _>((Bound::Included(key), Bound::Unbounded));
    let mut more = cursor.seek(key).unwrap();
    for _ in 0..count {
        let Some((key, value)) = expected.next() else { break };
        assert!(more);
        assert_eq!(cursor.key(), &key[..]);
        assert_eq!(cursor.value_len(), value.len() as u64);
        assert_eq!(cursor.value().unwrap().as_deref(), Some(&value[..]));
        more = cursor.forward().unwrap();
    }
}

fn backward(tree: &Tree, model: &Model, key: &[u8], count: usize) {
    let mut cursor = tree.cursor();
    let mut expected = model.range::<[u8], _>((Bound::Unbounded, Bound::Included(key))).rev();
    let mut more = cursor.seek_back(key).unwrap();
    for _ in 0..count {
        let Some((key, value)) = expected.next() else { return assert!(!more) };
        assert!(more);
        assert_eq!(cursor.key(), &key[..]);
        assert_eq!(cursor.value().unwrap().as_deref(), Some(&value[..]));
        more = cursor.backward().unwrap();
    }
}

fn assert_same(tree: &Tree, model: &Model) {
    let mut expected = model.iter();
    for entry in tree.entries() {
        let (key, value) = entry.unwrap();
        let (model_key, model_value) = expected.next().expect("no more entries than in the model");
        assert!(key == *model_key && *value == model_value[..]);
    }
    assert!(expected.next().is_none());
    let stat = tree.check().unwrap();
    assert_eq!(stat.entries, model.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(
            proptest::test_runner::FileFailurePersistence::Direct("proptest-regressions/tree.txt"),
        )),
        ..ProptestConfig::with_cases(64 * common::rounds(100))
    })]

    #[test]
    fn a_tree_behaves_like_a_map(
        page_frames in 1..=4u32,
        pool_pages in 8..40u64,
        actions in prop::collection::vec(action(), 1..700),
    ) {
        let (device, mut store) = memory_store(pool_pages, page_frames);
        let mut tree = store.create_tree("model").unwrap();
        let mut model = Model::new();
        for (serial, action) in actions.iter().enumerate() {
            apply(&tree, &mut model, serial, action);
            if let Action::Reopen = action {
                drop(tree);
                store.close().unwrap();
                store = Store::open_on(device.clone(), &options(pool_pages, page_frames)).unwrap();
                tree = store.tree("model").unwrap();
            }
        }
        assert_same(&tree, &model);
        assert_sound(&store);
        // Empty again, nothing but the root is left.
        for key in model.keys() {
            assert!(tree.remove(key).unwrap());
        }
        assert_sound(&store);
        let stat = tree.stat().unwrap();
        prop_assert_eq!((stat.entries, stat.blobs), (0, 0));
        drop(tree);
        store.close().unwrap();
    }
}

#[test]
fn many_entries_go_in_and_out_through_a_pool_of_eight_pages() {
    let (_, store) = memory_store(8, 1);
    let tree = store.create_tree("t").unwrap();
    let mut random = Random(1);
    let mut model = Model::new();
    for round in 0..3 {
        for serial in 0..6000 {
            let key = random.below(20_000).to_string().into_bytes();
            let value = value(random.below(600) as usize, serial);
            tree.upsert(&key, &value).unwrap();
            model.insert(key, value);
        }
        assert_same(&tree, &model);
        let stat = tree.stat().unwrap();
        assert!(stat.height >= 3, "{stat:?}");
        let keep = if round == 2 { 0 } else { 500 };
        while model.len() > keep {
            let at = random.below(model.len().min(50) as u64) as usize;
            let key = model.keys().nth(at).unwrap().clone();
            assert!(tree.remove(&key).unwrap());
            model.remove(&key);
        }
        assert_same(&tree, &model);
        assert_sound(&store);
    }
    let stat = tree.stat().unwrap();
    assert_eq!((stat.height, stat.leaf_pages), (1, 1), "an empty tree is one leaf");
}

#[test]
fn ascending_inserts_fill_their_leaves() {
    for descending in [false, true] {
        let (_, store) = memory_store(64, 1);
        let tree = store.create_tree("t").unwrap();
        for n in 0..20_000u32 {
            let n = if descending { u32::MAX - n } else { n };
            tree.insert(&n.to_be_bytes(), b"12345678").unwrap();
        }
        let stat = tree.stat().unwrap();
        let fill = stat.used_bytes as f64 / stat.page_bytes as f64;
        assert!(fill > 0.9, "{fill}");
        assert_sound(&store);
    }
}

/// How full the leaves and inner pages of a tree are after these inserts, from 0 to 1.
fn fill_after(keys: impl Iterator<Item = Vec<u8>>, value: &[u8]) -> f64 {
    let (_, store) = memory_store(1500, 1);
    let tree = store.create_tree("t").unwrap();
    for key in keys {
        tree.insert(&key, value).unwrap();
    }
    let stat = tree.stat().unwrap();
    assert_sound(&store);
    stat.used_bytes as f64 / stat.page_bytes as f64
}

/// Keys of a tenant and a time: as many runs as there are tenants, which take turns at random.
/// Balanced splits leave these leaves 0.45 to 0.6 full.
#[test]
fn runs_that_take_turns_fill_their_leaves() {
    let (small, large) = (&[7; 20][..], &[7; 400][..]);
    let cases = [
        // Two or three leaves a tenant.
        (1000u32, 200, small, 0.7),
        (1000, 20, large, 0.65),
        (30, 4000, small, 0.84),
        (30, 400, large, 0.9),
        (3, 20_000, small, 0.85),
        (3, 2000, large, 0.9),
    ];
    for (tenants, each, value, least) in cases {
        for descending in [false, true] {
            let (mut random, mut times) = (Random(7), vec![0u32; tenants as usize]);
            let keys = (0..tenants * each).map(|_| {
                let tenant = random.below(tenants.into()) as u32;
                let time = &mut times[tenant as usize];
                *time += 1;
                let time = if descending { u32::MAX - *time } else { *time };
                [tenant.to_be_bytes(), time.to_be_bytes()].concat()
            });
            let fill = fill_after(keys, value);
            assert!(fill > least, "{tenants} tenants, {each} each, {descending}: {fill}");
        }
    }
}

/// Random keys leave leaves as full as balanced splits do.
#[test]
fn random_inserts_do_not_look_like_runs() {
    for (len, balanced) in [(20, 0.6945), (200, 0.6941), (400, 0.6809), (1000, 0.5386)] {
        let mut random = Random(3);
        let keys = (0..6_000_000 / (40 + len)).map(|_| random.next().to_be_bytes().to_vec());
        let fill = fill_after(keys, &vec![1; len]);
        assert!(fill > 0.996 * balanced, "values of {len} bytes: {fill}");
    }
}

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
    assert!(matches!(error, Error::NotSorted { entry: 1 }), "{error}");
    let duplicate = entries.iter().cloned().chain([(b"x-large".to_vec(), vec![])]);
    let error = tree.bulk_load(duplicate).unwrap_err();
    assert!(matches!(error, Error::NotSorted { entry: 30_001 }), "{error}");
    assert_eq!(tree.stat().unwrap().entries, 0);
    all_freed(&store);
    assert_eq!(store.stat().unwrap().used_pages, used, "a failed load gives its pages back");

    assert_eq!(tree.bulk_load(entries.iter().cloned()).unwrap(), 30_001);
    assert_same(&tree, &entries.iter().cloned().collect());
    assert!(matches!(tree.bulk_load(entries.iter().cloned()), Err(Error::NotEmpty)));
    // And it goes on as any tree.
    let mut model: Model = entries.into_iter().collect();
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
    // What could not be freed while it was held is free now.
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
    // The leaf under it is emptied, merged away and filled again.
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

/// YCSB's records: as blobs, each with a page of its own, they took four times the memory.
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
