//! Ranges from both ends, in place and as copies.
#![allow(clippy::unwrap_used)]

mod common;

use std::ops::Bound;

use common::{assert_sound, memory_store};
use vellum::{Result, Tree, Value};
use vellum_testing::allocations::{Counting, allocations};

#[global_allocator]
static COUNTING: Counting = Counting;

fn numbers(tree: &Tree, count: u32) {
    for n in 0..count {
        tree.insert(&n.to_be_bytes(), &[7; 30]).unwrap();
    }
}

fn number(entry: Option<Result<(Vec<u8>, Value<'_>)>>) -> Option<u32> {
    entry.map(|entry| u32::from_be_bytes(entry.unwrap().0.try_into().unwrap()))
}

#[test]
fn a_range_is_any_range_of_bytes() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    for key in ["a", "b", "bb", "c", "d"] {
        tree.insert(key.as_bytes(), b"").unwrap();
    }
    let found = |entries: vellum::Entries<'_>| {
        let keys: Vec<_> =
            entries.map(|entry| String::from_utf8(entry.unwrap().0).unwrap()).collect();
        keys.join(" ")
    };
    let owned = String::from("b");
    assert_eq!(found(tree.range("b".."d")), "b bb c");
    assert_eq!(found(tree.range(b"b"..=b"d")), "b bb c d");
    assert_eq!(found(tree.range(&owned..)), "b bb c d");
    assert_eq!(found(tree.range(..owned)), "a");
    assert_eq!(found(tree.range(..=vec![b'b'])), "a b");
    assert_eq!(found(tree.range(..)), "a b bb c d");
    assert_eq!(found(tree.range((Bound::Excluded("b"), Bound::Included("c")))), "bb c");
    assert_eq!(found(tree.range((Bound::Excluded("b"), Bound::Excluded("b")))), "");
    assert_eq!(found(tree.range("d".."b")), "");
    assert_eq!(tree.range("d".."b").next_back().map(drop), None);
}

#[test]
fn both_ends_of_a_range_meet() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    numbers(&tree, 1000);
    for turns in [&[true, false][..], &[true, true, true, false], &[false], &[true; 7]] {
        let mut entries = tree.range(100u32.to_be_bytes()..900u32.to_be_bytes());
        let (mut low, mut high) = (100, 900);
        for forward in turns.iter().cycle().take(800) {
            if *forward {
                assert_eq!(number(entries.next()), Some(low));
                low += 1;
            } else {
                high -= 1;
                assert_eq!(number(entries.next_back()), Some(high));
            }
        }
        assert_eq!(low, high);
        assert!(entries.next().is_none() && entries.next_back().is_none());
    }
    // No entry is returned from both ends, although the tree changes meanwhile.
    let mut entries = tree.entries();
    assert_eq!((number(entries.next()), number(entries.next_back())), (Some(0), Some(999)));
    for n in 1..999u32 {
        assert!(tree.remove(&n.to_be_bytes()).unwrap());
    }
    tree.insert(&[0, 0, 0, 0, 1], b"").unwrap();
    tree.insert(&[0, 0, 3, 0xe7, 1], b"").unwrap();
    assert_eq!(entries.next_back().unwrap().unwrap().0, [0, 0, 0, 0, 1]);
    assert!(entries.next().is_none() && entries.next_back().is_none());
    assert_sound(&store);
}

/// A leaf has about ninety of these entries.
#[test]
fn entries_in_place_are_not_allocated() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    numbers(&tree, 20_000);
    for back in [false, true] {
        let mut entries = tree.entries();
        let mut next = || {
            let entry = if back { entries.next_entry_back() } else { entries.next_entry() };
            entry.unwrap().map(|(key, value)| key.len() + value.len())
        };
        let before = allocations();
        let mut count = 0;
        while let Some(len) = next() {
            assert_eq!(len, 34);
            count += 1;
        }
        let made = allocations() - before;
        assert!(count == 20_000 && made < 100, "{count} entries, {made} allocations");
    }
}

/// Twelve blobs of half a megabyte and a pool of four megabytes: guards of all blobs would not fit.
#[test]
fn blobs_that_are_collected_may_exceed_the_pool() {
    let (_, store) = memory_store(1024, 1);
    let tree = store.create_tree("t").unwrap();
    for n in 0..12u8 {
        tree.insert(&[n], &vec![n; 500_000]).unwrap();
    }
    for back in [false, true] {
        let entries = tree.entries();
        let collected: Result<Vec<_>> =
            if back { entries.rev().collect() } else { entries.collect() };
        let collected = collected.unwrap();
        assert_eq!(collected.len(), 12);
        for (key, value) in &collected {
            assert!(value.len() == 500_000 && value.iter().all(|byte| *byte == key[0]));
        }
    }
}
