//! Changes that depend on the old value, and removals of many entries, by many threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Random, assert_sound, memory_store};
use vellum::{Error, Tree};
use vellum_testing::patience::SetWhenDropped;

/// Every seventh value is a blob.
fn value(number: u64) -> Vec<u8> {
    let len = if number.is_multiple_of(7) { 5000 } else { 40 };
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

#[test]
fn every_entry_is_popped_once() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 3000);
    let popped = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (tree, popped) = (&tree, &popped);
            scope.spawn(move || {
                let mut last = None;
                while let Some((key, found)) = match thread {
                    0..=2 => tree.pop_first().unwrap(),
                    _ => tree.pop_last().unwrap(),
                } {
                    let n = number(&key);
                    assert!(*found == value(n)[..]);
                    // No thread inserts, so each end only moves inwards.
                    let inwards = last.is_none_or(|last| (last < n) == (thread < 3));
                    assert!(inwards, "{n} after {last:?}");
                    last = Some(n);
                    assert!(popped.lock().unwrap().insert(n), "{n} twice");
                }
            });
        }
    });
    assert_eq!(popped.into_inner().unwrap().len(), 3000);
    assert!(tree.first().unwrap().is_none() && tree.last().unwrap().is_none());
    // A thread whose sibling is busy merges nothing, and leaves an empty leaf.
    let leaves = tree.stat().unwrap().leaf_pages;
    assert!(leaves <= 4, "{leaves} leaves");
    assert_sound(&store);
}

#[test]
fn a_queue_is_emptied_while_it_is_filled() {
    let (_, store) = memory_store(200, 1);
    let tree = store.create_tree("t").unwrap();
    let popped = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| fill(&tree, 5000));
        scope.spawn(|| {
            let mut next = 0;
            while next < 5000 {
                let first = tree.first().unwrap().map(|(key, _)| number(&key));
                let Some((key, found)) = tree.pop_first().unwrap() else { continue };
                assert!(first.is_none_or(|first| first == next));
                assert_eq!(number(&key), next);
                assert!(*found == value(next)[..]);
                next += 1;
            }
            popped.store(next, Ordering::Relaxed);
        });
    });
    assert_eq!(popped.into_inner(), 5000);
    assert_sound(&store);
}

/// A number, followed by as many bytes as its last digits say. So the value is sometimes inline and
/// sometimes a blob, and leaves are split.
fn counter(n: u64) -> Vec<u8> {
    let len = if n % 10 == 3 { 5000 } else { 8 + n as usize % 1000 };
    let mut value = vec![7; len];
    value[..8].copy_from_slice(&n.to_be_bytes());
    value
}

#[test]
fn no_update_of_another_length_is_lost() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 50);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let tree = &tree;
            scope.spawn(move || {
                for _ in 0..400 {
                    if thread == 0 {
                        let add = |old: Option<&[u8]>| Some(counter(old.map_or(0, number) + 1));
                        tree.fetch_and_update(b"sum", add).unwrap();
                        continue;
                    }
                    loop {
                        let old = tree.get(b"sum").unwrap();
                        let new = counter(old.as_deref().map_or(0, number) + 1);
                        if tree.compare_and_swap(b"sum", old.as_deref(), Some(&new)).unwrap() {
                            break;
                        }
                    }
                }
            });
        }
    });
    assert_eq!(tree.take(b"sum").unwrap().as_deref(), Some(&counter(1200)[..]));
    assert!(tree.take(b"sum").unwrap().is_none());
    assert_sound(&store);
}

#[test]
fn every_entry_is_extracted_once() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 3000);
    let extracted = Mutex::new(BTreeSet::new());
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (tree, extracted) = (&tree, &extracted);
            scope.spawn(move || {
                let keys = (thread * 300).to_be_bytes()..(2400 + thread * 300).to_be_bytes();
                for entry in tree.extract_if(keys, |key, _| number(key) % 3 != 1) {
                    let (key, found) = entry.unwrap();
                    assert!(*found == value(number(&key))[..]);
                    assert!(extracted.lock().unwrap().insert(number(&key)));
                }
            });
        }
    });
    let expected: BTreeSet<_> = (0..3000).filter(|n| n % 3 != 1).collect();
    assert_eq!(extracted.into_inner().unwrap(), expected);
    assert_eq!(tree.entries().count(), 1000);
    assert_sound(&store);
}

/// A removal of a range and changes of other entries do not affect each other.
#[test]
fn ranges_go_while_others_change_the_rest() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _done = SetWhenDropped(&done);
            for round in 0..30u64 {
                let keys = 1000..1600;
                tree.extend(keys.clone().map(|n: u64| (n.to_be_bytes(), value(n)))).unwrap();
                let keys = keys.start.to_be_bytes()..keys.end.to_be_bytes();
                let removed = match round % 3 {
                    0 => tree.remove_range(keys).unwrap(),
                    1 => tree.retain_in(keys, |_, _| false).unwrap(),
                    _ => tree.extract_if(keys, |_, _| true).map(Result::unwrap).count() as u64,
                };
                assert_eq!(removed, 600);
            }
        });
        for thread in 0..2u64 {
            let (tree, done) = (&tree, &done);
            scope.spawn(move || {
                let mut random = Random(thread);
                while !done.load(Ordering::Relaxed) {
                    let n = 2 * random.below(500) + thread;
                    let key = if random.below(2) == 0 { n } else { 1600 + n };
                    tree.upsert(&key.to_be_bytes(), &value(key)).unwrap();
                    assert!(*tree.get(&key.to_be_bytes()).unwrap().unwrap() == value(key)[..]);
                    assert!(tree.remove(&key.to_be_bytes()).unwrap());
                }
            });
        }
    });
    assert_eq!(tree.entries().count(), 0);
    assert_sound(&store);
}

#[test]
fn a_tree_is_cleared_in_one_step() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    let (done, fills) = (AtomicBool::new(false), AtomicU64::new(0));
    let has = |n: u64| tree.contains(&n.to_be_bytes()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _done = SetWhenDropped(&done);
            for _ in 0..20 {
                fills.fetch_add(1, Ordering::SeqCst);
                tree.extend((0..2000u64).map(|n| (n.to_be_bytes(), value(n)))).unwrap();
                tree.clear().unwrap();
                assert!(tree.first().unwrap().is_none());
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if !has(0) {
                    continue;
                }
                let fill = fills.load(Ordering::SeqCst);
                while has(0) {
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                }
                // This entry is gone, so all of them are gone, because no thread inserts.
                let others = [1999, 1500, 700, 1].map(has);
                let none = others == [false; 4];
                assert!(none || fills.load(Ordering::SeqCst) != fill, "{others:?}");
            }
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                tree.entries().for_each(|entry| drop(entry.unwrap()));
            }
        });
    });
    tree.clear().unwrap();
    let stat = tree.stat().unwrap();
    assert_eq!((stat.entries, stat.leaf_pages, stat.height), (0, 1, 1));
    assert_sound(&store);
    store.drop_tree("t").unwrap();
    assert!(matches!(tree.clear(), Err(Error::NoSuchTree(_))));
}

/// A callback that panics changes nothing, and leaves no page locked.
#[test]
fn a_panic_leaves_what_was() {
    let (_, store) = memory_store(200, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 200);
    let fails =
        |n, other| move |key: &[u8], _: &[u8]| if number(key) == n { panic!() } else { other };
    for n in [5, 7] {
        let panics: [&dyn Fn(); 3] = [
            &|| drop(tree.retain(fails(n, true))),
            &|| tree.extract_if(.., fails(n, false)).for_each(drop),
            &|| {
                let update = |_: Option<&[u8]>| -> Option<Vec<u8>> { panic!() };
                drop(tree.fetch_and_update(&n.to_be_bytes(), update));
            },
        ];
        for run in panics {
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
    }
    for (n, entry) in (0..200).zip(tree.entries()) {
        assert!(*entry.unwrap().1 == value(n)[..]);
    }
    assert_eq!(tree.retain(|_, _| false).unwrap(), 200);
    assert_sound(&store);
}

#[test]
fn what_is_not_extracted_stays() {
    let (_, store) = memory_store(200, 1);
    let tree = store.create_tree("t").unwrap();
    fill(&tree, 1000);
    drop(tree.extract_if(.., |_, _| true).take(1));
    let taken: Vec<_> = tree.extract_if(.., |_, _| true).take(950).map(Result::unwrap).collect();
    assert_eq!((taken.len(), tree.entries().count()), (950, 50));
    assert_eq!(number(&tree.first().unwrap().unwrap().0), 950);
    // The iterator has merged the leaves that it has left.
    assert!(tree.stat().unwrap().leaf_pages < 4);
    assert_sound(&store);
}

#[test]
fn limits_hold_for_values_of_another_length() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let (max_key, max_value) = (store.limits().max_key, store.limits().max_value as usize);
    let long = vec![1; max_key + 1];
    let error = tree.compare_and_swap(&long, None, Some(b"")).unwrap_err();
    assert!(matches!(error, Error::KeyTooLong { .. }), "{error}");
    assert!(tree.take(&long).unwrap().is_none());
    tree.upsert(b"key", b"old").unwrap();
    let error = tree.fetch_and_update(b"key", |_| Some(vec![0; max_value + 1])).unwrap_err();
    assert!(matches!(error, Error::ValueTooLong { .. }), "{error}");
    assert_eq!(tree.get(b"key").unwrap().as_deref(), Some(&b"old"[..]));
    let error = tree.extend([(&b"a"[..], &b""[..]), (&long, b""), (b"b", b"")]).unwrap_err();
    assert!(matches!(error, Error::KeyTooLong { .. }), "{error}");
    assert!(tree.contains(b"a").unwrap() && !tree.contains(b"b").unwrap());
    assert_sound(&store);
}
