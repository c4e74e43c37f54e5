//! `Tree::update` reads, changes and writes a value atomically.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, Ordering};

use vellum::{Options, Store};
use vellum_testing::patience::SetWhenDropped;

fn store(directory: &tempfile::TempDir) -> Store {
    let options = Options::new().pool_bytes(4 << 20);
    Store::create(directory.path().join("update.vellum"), &options).unwrap()
}

fn add_one(value: &mut [u8]) {
    let number = u64::from_le_bytes(value[..8].try_into().unwrap()) + 1;
    value[..8].copy_from_slice(&number.to_le_bytes());
}

fn count(value: &[u8]) -> u64 {
    u64::from_le_bytes(value[..8].try_into().unwrap())
}

/// Two threads add to a value. A third one only moves the value to another place.
fn no_addition_is_lost(len: usize, rounds: u64) {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"sum", &vec![0; len]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _done = SetWhenDropped(&done);
        let adders: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        assert!(tree.update(b"sum", add_one).unwrap());
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            // Splits and merges move the entry meanwhile.
            while !done.load(Ordering::Relaxed) {
                for number in 0..200u32 {
                    tree.upsert(format!("sum{number}").as_bytes(), &[7; 60]).unwrap();
                }
                for number in 0..200u32 {
                    assert!(tree.remove(format!("sum{number}").as_bytes()).unwrap());
                }
            }
        });
        for adder in adders {
            adder.join().unwrap();
        }
    });
    let value = tree.get(b"sum").unwrap().unwrap();
    assert_eq!((count(&value), value.len()), (2 * rounds, len));
    drop(value);
    store.close().unwrap();
}

#[test]
fn no_addition_to_a_short_value_is_lost() {
    no_addition_is_lost(8, 20_000);
}

#[test]
fn no_addition_to_a_blob_is_lost() {
    no_addition_is_lost(50_000, 300);
}

#[test]
fn a_missing_key_is_not_changed() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"a", b"1").unwrap();
    assert!(!tree.update(b"b", |_| panic!("there is no value")).unwrap());
}

#[test]
fn a_guard_keeps_the_old_value() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"blob", &vec![1; 40_000]).unwrap();
    let held = tree.get(b"blob").unwrap().unwrap();
    assert!(tree.update(b"blob", |value| value.fill(2)).unwrap());
    assert!(held.iter().all(|byte| *byte == 1));
    assert!(tree.get(b"blob").unwrap().unwrap().iter().all(|byte| *byte == 2));
}

#[test]
fn a_panic_in_the_change_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory);
    let tree = store.create_tree("t").unwrap();
    for (key, len) in [(&b"short"[..], 10), (b"blob", 40_000)] {
        tree.upsert(key, &vec![1; len]).unwrap();
        let change = std::panic::AssertUnwindSafe(|| {
            tree.update(key, |value| {
                value.fill(2);
                panic!("half way");
            })
        });
        assert!(std::panic::catch_unwind(change).is_err());
        assert!(tree.get(key).unwrap().unwrap().iter().all(|byte| *byte == 1));
    }
    drop(tree);
    store.close().unwrap();
    let path = directory.path().join("update.vellum");
    let store = Store::open(path, &Options::new().pool_bytes(4 << 20)).unwrap();
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
}
