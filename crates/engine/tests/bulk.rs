//! Pops, scans and removals of many entries: the remembered leaf of a pop, steps within a leaf,
//! leaves that are dropped as a whole.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Random, assert_sound, memory_store, options, rounds, seed};
use vellum::node::Node;
use vellum::page::seal;
use vellum::{Error, Store, Tree};
use vellum_pool::device::MemoryDevice;
use vellum_testing::patience::SetWhenDropped;

/// Every 97th value is a blob.
fn value(number: u64) -> Vec<u8> {
    let len = if number.is_multiple_of(97) { 5000 } else { 60 };
    number.to_be_bytes().into_iter().cycle().take(len).collect()
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

fn fill(tree: &Tree, count: u64) {
    for n in 0..count {
        tree.insert(&n.to_be_bytes(), &value(n)).unwrap();
    }
}

/// A page from which entries were popped may be freed and reused.
#[test]
fn nothing_is_popped_from_leaves_that_are_no_part_of_the_tree() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    for round in 0..4 {
        fill(&tree, 3000);
        for n in 0..100 {
            assert_eq!(number(&tree.pop_first().unwrap().unwrap().0), n);
            assert_eq!(number(&tree.pop_last().unwrap().unwrap().0), 2999 - n);
        }
        if round % 2 == 0 {
            tree.clear().unwrap();
        } else {
            assert_eq!(tree.remove_range(..).unwrap(), 2800);
        }
        // The loaded leaves take the places of the freed leaves.
        let sorted = (0..3000u64).map(|n| {
            assert!(tree.pop_first().unwrap().is_none() && tree.pop_last().unwrap().is_none());
            (n.to_be_bytes(), value(n))
        });
        assert_eq!(tree.bulk_load(sorted).unwrap(), 3000);
        assert_eq!(number(&tree.pop_first().unwrap().unwrap().0), 0);
        assert_eq!(number(&tree.pop_last().unwrap().unwrap().0), 2999);
        assert_eq!(tree.entries().count(), 2998);
        tree.clear().unwrap();
    }
    assert_sound(&store);
}

/// Entries are inserted before and after the leaf from which entries are popped.
#[test]
fn what_is_popped_is_the_end_of_the_tree_now() {
    let seed = seed(3);
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let (mut random, mut model) = (Random(seed), BTreeMap::new());
    for _ in 0..20_000 * rounds(20) {
        let n = random.below(5000);
        match random.below(4) {
            0 => {
                let popped =
                    tree.pop_first().unwrap().map(|(key, found)| (number(&key), found.to_vec()));
                assert_eq!(popped, model.pop_first());
            }
            1 => {
                let popped =
                    tree.pop_last().unwrap().map(|(key, found)| (number(&key), found.to_vec()));
                assert_eq!(popped, model.pop_last());
            }
            _ => {
                tree.upsert(&n.to_be_bytes(), &value(n)).unwrap();
                model.insert(n, value(n));
            }
        }
    }
    assert_sound(&store);
}

/// Threads pop from both ends while another thread inserts entries in the middle and at the ends.
#[test]
fn every_entry_that_comes_is_popped_once() {
    const COUNT: u64 = 20_000;
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let (ended, popped) = (AtomicBool::new(false), AtomicU64::new(0));
    let seen: Vec<AtomicBool> = (0..COUNT).map(|_| AtomicBool::new(false)).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ended = SetWhenDropped(&ended);
            // Each number once, in any order.
            for n in 0..COUNT {
                let n = n * 7919 % COUNT;
                tree.insert(&n.to_be_bytes(), &value(n)).unwrap();
            }
        });
        for thread in 0..4 {
            let (tree, ended, popped, seen) = (&tree, &ended, &popped, &seen);
            scope.spawn(move || {
                loop {
                    let was_ended = ended.load(Ordering::Acquire);
                    let entry = if thread % 2 == 0 { tree.pop_first() } else { tree.pop_last() };
                    match entry.unwrap() {
                        Some((key, found)) => {
                            let n = number(&key);
                            assert!(*found == value(n)[..]);
                            assert!(!seen[n as usize].swap(true, Ordering::Relaxed), "{n} twice");
                            popped.fetch_add(1, Ordering::Relaxed);
                        }
                        None if was_ended => break,
                        None => std::thread::yield_now(),
                    }
                }
            });
        }
    });
    assert_eq!(popped.into_inner(), COUNT);
    assert!(tree.first().unwrap().is_none() && tree.last().unwrap().is_none());
    assert_sound(&store);
}

#[test]
fn ranges_of_many_leaves_are_removed_exactly() {
    let seed = seed(5);
    let mut random = Random(seed);
    for round in 0..6 * rounds(20) {
        let (_, store) = memory_store(3000, 1);
        let tree = store.create_tree("t").unwrap();
        let count = 20_000;
        fill(&tree, count);
        let mut model: BTreeMap<u64, ()> = (0..count).map(|n| (n, ())).collect();
        for _ in 0..6 {
            let (one, two) = (random.below(count), random.below(count));
            let (from, to) = (one.min(two), one.max(two));
            let (first, last) = (from.to_be_bytes(), to.to_be_bytes());
            let (removed, to) = match round % 3 {
                0 => (tree.remove_range(first..last).unwrap(), to),
                _ => (tree.remove_range(first..=last).unwrap(), to + 1),
            };
            let before = model.len();
            model.retain(|n, ()| !(from..to).contains(n));
            assert_eq!(removed, (before - model.len()) as u64);
            let found = tree.entries().map(|entry| number(&entry.unwrap().0));
            assert!(found.eq(model.keys().copied()));
            assert_sound(&store);
        }
        tree.remove_range(..).unwrap();
        assert_eq!(tree.stat().unwrap().leaf_pages, 1, "leaves without entries are left");
        assert_sound(&store);
    }
}

/// Most leaves of a range are dropped as a whole, while other threads change entries before, after
/// and in the range.
#[test]
fn leaves_go_while_entries_come() {
    const COUNT: u64 = 8000;
    let (_, store) = memory_store(3000, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, COUNT);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _done = SetWhenDropped(&done);
            for _ in 0..20 {
                let range = 1000u64.to_be_bytes()..7000u64.to_be_bytes();
                tree.remove_range(range).unwrap();
                tree.extend((1000..7000u64).map(|n| (n.to_be_bytes(), value(n)))).unwrap();
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let mut entries = tree.range(..);
                let (mut last, mut outside) = (None, 0);
                while let Some((key, found)) = entries.next_entry().unwrap() {
                    let n = number(key);
                    assert!(last < Some(n) && *found == value(n)[..]);
                    last = Some(n);
                    outside += u64::from(!(1000..7000).contains(&n));
                }
                assert_eq!(outside, COUNT - 6000, "a scan missed entries that no thread removed");
            }
        });
        for thread in 0..2 {
            let (tree, done) = (&tree, &done);
            scope.spawn(move || {
                let mut random = Random(thread);
                while !done.load(Ordering::Relaxed) {
                    let n = random.below(COUNT);
                    tree.upsert(&n.to_be_bytes(), &value(n)).unwrap();
                    let n = random.below(1000);
                    assert!(*tree.get(&n.to_be_bytes()).unwrap().unwrap() == value(n)[..]);
                }
            });
        }
    });
    assert_eq!(tree.entries().count() as u64, COUNT);
    assert_sound(&store);
}

/// Two leaves are in each other's place in their parent. All leaves are resident.
#[test]
fn leaves_that_their_parent_mistakes_are_not_dropped() {
    let (device, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 3000);
    drop(tree);
    store.close().unwrap();
    let mut image = device.snapshot();
    let is_parent = |page: &[u8]| page[32..37] == *b"VLMP\x02" && page[38] == 1 && page[28] > 1;
    let pages = (0..image.len()).step_by(4096);
    let parent = pages.clone().find(|at| is_parent(&image[*at..*at + 4096])).unwrap();
    let child = |slot: usize| parent + 136 + 16 * slot + 8;
    for byte in 0..8 {
        image.swap(child(5) + byte, child(6) + byte);
    }
    seal(&mut image[parent..parent + 4096], &[]);
    let mut fence = Vec::new();
    Node::new(&image[parent..parent + 4096]).key_into(4, &mut fence).unwrap();
    let store =
        Store::open_on(Arc::new(MemoryDevice::from_snapshot(image)), &options(2000, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    let sound = |n: &u64| tree.get(&n.to_be_bytes()).is_ok_and(|found| found.is_some());
    let before: Vec<u64> = (0..3000).filter(sound).collect();
    let removed = tree.remove_range(10u64.to_be_bytes()..);
    assert!(matches!(removed, Err(Error::Damaged { .. })), "{removed:?}");
    // The entries before the damage are removed, the entries after it are not.
    let after: Vec<u64> = (0..3000).filter(sound).collect();
    let left = |n: &u64| *n < 10 || n.to_be_bytes()[..] > fence[..];
    assert!(after.iter().eq(before.iter().filter(|n| left(n))), "{after:?}");
}

#[test]
fn ranges_end_where_they_should_within_leaves_and_between() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 400);
    for from in (0..400).step_by(37) {
        for to in 0..=400u64 {
            let (first, last) = (u64::to_be_bytes(from), to.to_be_bytes());
            let mut found = Vec::new();
            let mut entries = tree.range(first..last);
            let mut next = |back: bool| {
                let entry = if back { entries.next_entry_back() } else { entries.next_entry() };
                let (key, read) = entry.unwrap()?;
                assert!(*read == value(number(key))[..]);
                Some(number(key))
            };
            // Sometimes from the other end, too.
            while let Some(n) = next(to % 5 == 0 && found.len() % 20 == 19) {
                found.push(n);
            }
            found.sort_unstable();
            assert!(found.into_iter().eq(from..to.max(from)), "{from}..{to}");
            let included = tree.range(first..=last).map(|entry| number(&entry.unwrap().0));
            assert!(included.eq(from..=to.min(399)), "{from}..={to}");
        }
    }
}

#[test]
fn a_step_finds_what_the_leaf_is_now() {
    let (_, store) = memory_store(100, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 20);
    let mut entries = tree.range(0u64.to_be_bytes()..18u64.to_be_bytes());
    let mut next = || entries.next_entry().unwrap().map(|(key, read)| (number(key), read.to_vec()));
    (0..5).for_each(|n| assert_eq!(next(), Some((n, value(n)))));
    tree.remove(&5u64.to_be_bytes()).unwrap();
    assert_eq!(next(), Some((6, value(6))));
    tree.upsert(&7u64.to_be_bytes(), b"another").unwrap();
    assert_eq!(next(), Some((7, b"another".to_vec())));
    tree.remove_range(8u64.to_be_bytes()..17u64.to_be_bytes()).unwrap();
    assert_eq!(next(), Some((17, value(17))));
    assert_eq!(next(), None);
}
