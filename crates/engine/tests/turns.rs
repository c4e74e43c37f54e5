//! Changes do not wait for reads of blobs, counts of a tree, or bulk loads of other threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, mpsc};

use common::{PATIENCE, assert_sound, options};
use vellum::Store;
use vellum_pool::device::{FaultPlan, FaultyDevice, MemoryDevice, Operation};
use vellum_testing::patience::SetWhenDropped;

/// A store with no resident pages, and the plan that stops the reads of its device.
fn stopping(fill: impl FnOnce(&Store)) -> (FaultPlan, Store) {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(2000, 1)).unwrap();
    fill(&store);
    store.close().unwrap();
    let memory = MemoryDevice::from_snapshot(device.snapshot());
    let device = FaultyDevice::new(memory, 1).unwrap();
    let plan = device.plan();
    let store = Store::open_on(Arc::new(device), &options(2000, 1)).unwrap();
    (plan, store)
}

/// Runs `body` in a thread of its own, and fails if it does not end.
fn ends(what: &str, body: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    assert!(ended.recv_timeout(PATIENCE).is_ok(), "it does not end: {what}");
    thread.join().unwrap();
}

#[test]
fn a_leaf_can_be_changed_while_a_blob_of_it_is_read() {
    let (plan, store) = stopping(|store| {
        let tree = store.create_tree("t").unwrap();
        tree.insert(b"blob", &[7; 20_000]).unwrap();
        tree.insert(b"counter", &[0; 8]).unwrap();
    });
    let tree = store.tree("t").unwrap();
    // The leaf is resident, the blob is not, and the file is in use.
    tree.update(b"counter", |value| value[0] = 1).unwrap();
    plan.hold(Operation::Read);
    let reading = tree.clone();
    let reader = std::thread::spawn(move || reading.get(b"blob").unwrap().unwrap().into_vec());
    assert!(plan.wait_until_held(Operation::Read, 1, PATIENCE));
    let writing = tree.clone();
    ends("a change in the leaf", move || {
        assert!(writing.update(b"counter", |value| value[0] = 2).unwrap());
        // This removes the blob while it is being read. The reader still gets it.
        assert!(writing.remove(b"blob").unwrap());
    });
    plan.release(Operation::Read);
    assert_eq!(reader.join().unwrap(), [7; 20_000]);
    assert!(tree.get(b"blob").unwrap().is_none());
    drop(tree);
    assert_sound(&store);
}

#[test]
fn changes_go_on_while_a_tree_is_counted() {
    let (plan, store) = stopping(|store| {
        let sorted = (0..2000u32).map(|number| (number.to_be_bytes(), [1; 100]));
        store.create_tree("counted").unwrap().bulk_load(sorted).unwrap();
        store.create_tree("other").unwrap().insert(b"key", b"value").unwrap();
    });
    let (counted, other) = (store.tree("counted").unwrap(), store.tree("other").unwrap());
    other.upsert(b"key", b"1").unwrap();
    plan.hold(Operation::Read);
    let counting = counted.clone();
    let counter = std::thread::spawn(move || counting.stat().unwrap());
    assert!(plan.wait_until_held(Operation::Read, 1, PATIENCE));
    let writing = other.clone();
    ends("a change of another tree", move || assert!(writing.upsert(b"key", b"2").unwrap()));
    plan.release(Operation::Read);
    let stat = counter.join().unwrap();
    assert_eq!(stat, counted.check().unwrap());
    assert_eq!((stat.entries, stat.height), (2000, 2));
    // Another thread changes the tree meanwhile. The count includes all entries that it does not
    // touch.
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                (0..500u32).for_each(|n| assert!(counted.remove(&(n * 4).to_be_bytes()).unwrap()));
                (0..500u32).for_each(|n| drop(counted.upsert(&(n * 4).to_be_bytes(), &[2; 100])));
            }
        });
        for _ in 0..100 {
            let entries = counted.stat().unwrap().entries;
            assert!((1500..=2000).contains(&entries), "{entries}");
        }
    });
    drop((counted, other));
    assert_sound(&store);
}

#[test]
fn a_bulk_load_lets_others_go_on_while_its_input_comes() {
    let (_, store) = common::memory_store(500, 1);
    let (loaded, other) = (store.create_tree("loaded").unwrap(), store.create_tree("o").unwrap());
    {
        let (store, loaded) = (store.clone(), loaded.clone());
        ends("a bulk load whose input changes the store", move || {
            let sorted = (0..3000u32).map(|number| {
                // The input of a load may call the store, as any other thread may.
                if number % 500 == 0 {
                    other.upsert(&number.to_be_bytes(), &[1; 5000]).unwrap();
                    store.sync().unwrap();
                    drop(store.snapshot().unwrap());
                }
                (number.to_be_bytes(), vec![2; if number % 700 == 0 { 9000 } else { 90 }])
            });
            assert_eq!(loaded.bulk_load(sorted).unwrap(), 3000);
        });
    }
    assert_eq!(loaded.check().unwrap().entries, 3000);
    assert_sound(&store);
    // A load that fails after a checkpoint frees its pages. So does a load whose tree is dropped.
    for drops in [false, true] {
        let tree = store.create_tree("fails").unwrap();
        let sorted = (0..3000u32).map(|number| {
            if number == 1500 {
                store.sync().unwrap();
                drops.then(|| store.drop_tree("fails").unwrap());
            }
            Ok((if number == 2999 && !drops { 0 } else { number }.to_be_bytes(), [3; 90]))
        });
        let error = tree.try_bulk_load(sorted).unwrap_err();
        match drops {
            true => assert!(matches!(error, vellum::Error::NoSuchTree(_)), "{error}"),
            false => {
                assert!(matches!(error, vellum::Error::NotSorted { entry: 2999, .. }), "{error}");
            }
        }
        drop(tree);
        if !drops {
            store.drop_tree("fails").unwrap();
        }
        assert_sound(&store);
    }
}
