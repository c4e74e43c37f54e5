//! Trees against `BTreeMap`, with random page sizes and tiny pools.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::ops::Bound;

use common::{Random, assert_same, assert_sound, memory_store, options, value};
use proptest::prelude::*;
use vellum::{Error, Store, Tree, Value};

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
    /// Scan a range, from its two ends in this order.
    Range(Bound<Vec<u8>>, Bound<Vec<u8>>, Vec<bool>),
    Take(Vec<u8>),
    /// Compare and swap, with the current value as the expected one, or with another value.
    Swap(Vec<u8>, bool, Option<usize>),
    FetchAndUpdate(Vec<u8>, Option<usize>),
    Pop(bool, usize),
    /// Remove the entries of a range that [`keeps`] rejects with this modulus.
    RetainIn(Bound<Vec<u8>>, Bound<Vec<u8>>, usize),
    /// The same with an iterator, and at most as many entries as the last number says.
    ExtractIf(Bound<Vec<u8>>, Bound<Vec<u8>>, usize, usize),
    RemoveKeyRange(Bound<Vec<u8>>, Bound<Vec<u8>>),
    Extend(Vec<(Vec<u8>, usize)>, bool),
    Clear,
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
    // Rarely, so that trees grow.
    prop_oneof![200 => other_action(), 1 => Just(Action::Clear)]
}

fn other_action() -> impl Strategy<Value = Action> {
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
        2 => key().prop_map(Action::Take),
        3 => (key(), any::<bool>(), prop::option::of(value_len()))
            .prop_map(|(key, right, new)| Action::Swap(key, right, new)),
        3 => (key(), prop::option::of(value_len()))
            .prop_map(|(key, new)| Action::FetchAndUpdate(key, new)),
        2 => (any::<bool>(), 1..20usize).prop_map(|(first, n)| Action::Pop(first, n)),
        1 => (bound(), bound(), 2..6usize)
            .prop_map(|(start, end, n)| Action::RetainIn(start, end, n)),
        1 => (bound(), bound(), 2..6usize, 0..40usize)
            .prop_map(|(start, end, n, most)| Action::ExtractIf(start, end, n, most)),
        1 => (bound(), bound()).prop_map(|(start, end)| Action::RemoveKeyRange(start, end)),
        2 => (prop::collection::vec((key(), value_len()), 0..150), any::<bool>())
            .prop_map(|(entries, sorted)| Action::Extend(entries, sorted)),
        1 => Just(Action::Reopen),
    ]
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
        other => apply_more(tree, model, serial, other),
    }
}

/// The calls that depend on the old value.
fn apply_more(tree: &Tree, model: &mut Model, serial: usize, action: &Action) {
    match action {
        Action::Take(key) => {
            let taken = tree.take(key).unwrap().map(Value::into_vec);
            assert_eq!(taken, model.remove(key));
        }
        Action::Swap(key, right, new) => {
            let mut expected = model.get(key).cloned();
            if !right {
                expected = match expected {
                    Some(_) if serial.is_multiple_of(2) => None,
                    Some(value) => Some([&value[..], b"x"].concat()),
                    None => Some(Vec::new()),
                };
            }
            let new = new.map(|len| value(len, serial));
            let swapped = tree.compare_and_swap(key, expected.as_deref(), new.as_deref()).unwrap();
            assert_eq!(swapped, *right);
            if *right {
                put(model, key, new);
            }
        }
        Action::FetchAndUpdate(key, new) => {
            let mut seen = None;
            let new = new.map(|len| value(len, serial));
            let change = |old: Option<&[u8]>| {
                seen = old.map(<[u8]>::to_vec);
                new.clone()
            };
            let old = tree.fetch_and_update(key, change).unwrap().map(Value::into_vec);
            assert_eq!((&old, &seen), (&model.get(key).cloned(), &old));
            put(model, key, new);
        }
        Action::Pop(first, count) => {
            for _ in 0..*count {
                let (next, popped, expected) = match first {
                    true => (tree.first(), tree.pop_first(), model.pop_first()),
                    false => (tree.last(), tree.pop_last(), model.pop_last()),
                };
                let owned = |(key, value): (Vec<u8>, Value<'_>)| (key, value.into_vec());
                assert_eq!(next.unwrap().map(owned), expected);
                assert_eq!(popped.unwrap().map(owned), expected);
            }
        }
        other => apply_to_many(tree, model, serial, other),
    }
}

/// The calls that change many entries.
fn apply_to_many(tree: &Tree, model: &mut Model, serial: usize, action: &Action) {
    match action {
        Action::RetainIn(start, end, modulus) => {
            let mut kept = model.clone();
            let keys = keys_in(model, start, end);
            kept.retain(|key, value| !keys.contains(key) || keeps(key, value, *modulus));
            let mut seen = Vec::new();
            let keep = |key: &[u8], value: &[u8]| {
                seen.push(key.to_vec());
                keeps(key, value, *modulus)
            };
            let removed = tree.retain_in((start.as_ref(), end.as_ref()), keep).unwrap();
            assert_eq!((removed, seen), ((model.len() - kept.len()) as u64, keys));
            *model = kept;
        }
        Action::ExtractIf(start, end, modulus, most) => {
            let chosen = |key: &[u8], value: &[u8]| !keeps(key, value, *modulus);
            let extracted = tree.extract_if((start.as_ref(), end.as_ref()), chosen);
            let extracted: Vec<_> = extracted.take(*most).map(Result::unwrap).collect();
            let keys = keys_in(model, start, end);
            let expected = keys.into_iter().filter(|key| !keeps(key, &model[key], *modulus));
            let expected: Vec<_> = expected.take(*most).collect();
            assert_eq!(extracted.len(), expected.len());
            for ((key, value), expected) in extracted.into_iter().zip(expected) {
                assert_eq!(key, expected);
                assert_eq!(Some(value.into_vec()), model.remove(&key));
            }
        }
        Action::RemoveKeyRange(start, end) => {
            let removed = tree.remove_range((start.as_ref(), end.as_ref())).unwrap();
            let keys = keys_in(model, start, end);
            assert_eq!(removed, keys.len() as u64);
            keys.iter().for_each(|key| drop(model.remove(key)));
        }
        Action::Extend(entries, sorted) => {
            let mut entries: Vec<_> = entries.iter().collect();
            if *sorted {
                entries.sort();
            }
            let entries = entries.iter().map(|(key, len)| (key, value(*len, serial)));
            assert_eq!(tree.extend(entries.clone()).unwrap(), entries.len() as u64);
            model.extend(entries.map(|(key, value)| (key.clone(), value)));
        }
        Action::Clear => {
            tree.clear().unwrap();
            model.clear();
        }
        other => unreachable!("{other:?}"),
    }
}

fn put(model: &mut Model, key: &[u8], value: Option<Vec<u8>>) {
    match value {
        Some(value) => model.insert(key.to_vec(), value),
        None => model.remove(key),
    };
}

/// Whether an entry stays: an arbitrary choice that depends on its key and its length.
fn keeps(key: &[u8], value: &[u8], modulus: usize) -> bool {
    let sum: usize = key.iter().map(|byte| usize::from(*byte)).sum();
    !(sum + value.len()).is_multiple_of(modulus)
}

fn keys_in(model: &Model, start: &Bound<Vec<u8>>, end: &Bound<Vec<u8>>) -> Vec<Vec<u8>> {
    if !is_range(start, end) {
        return Vec::new();
    }
    let range = model.range::<Vec<u8>, _>((start.as_ref(), end.as_ref()));
    range.map(|(key, _)| key.clone()).collect()
}

/// Whether `BTreeMap` accepts these bounds. It panics for some bounds for which a tree's range is
/// empty.
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
        // After all entries were removed, only the root is left.
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
