//! Operations that run at the same time, and the state after an error. Each of these tests is for a
//! bug by which a store could be lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use vellum::{Error, Store};
use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};
use vellum_testing::patience::PATIENCE;

use crate::support::options;
use crate::world::assert_same;

fn fill(store: &Store, name: &str, entries: u32) {
    let tree = store.tree_or_create(name).unwrap();
    for n in 0..entries {
        tree.upsert(&n.to_be_bytes(), &[7; 100]).unwrap();
    }
}

/// Checkpoints, drops and checks exclude each other, and the state after each sync opens.
#[test]
fn checkpoints_drops_and_checks_take_turns() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(1500);
    let is_over = || std::time::Instant::now() > end;
    thread::scope(|scope| {
        for name in ["a", "b"] {
            let store = store.clone();
            scope.spawn(move || {
                while !is_over() {
                    fill(&store, name, 300);
                    store.drop_tree(name).unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_over() {
                    store.sync().unwrap();
                }
            });
        }
        scope.spawn(|| {
            while !is_over() {
                let report = store.check(&mut |_| {}).unwrap();
                assert!(report.is_sound(), "{:?}", report.damage);
                assert_eq!(report.lost_pages, 0);
            }
        });
    });
    store.close().unwrap();
    let store = Store::open_on(device, &options(64, 1)).unwrap();
    assert_same(&store, &BTreeMap::new());
}

/// Two threads drop a tree: one succeeds, and the other does not find the tree.
#[test]
fn a_tree_is_dropped_once() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device, &options(256, 1)).unwrap();
    for _ in 0..30 {
        fill(&store, "t", 200);
        let drop_it = || store.drop_tree("t");
        let (one, two) = thread::scope(|scope| {
            let other = scope.spawn(drop_it);
            (drop_it(), other.join().unwrap())
        });
        let gone = [one, two].into_iter().filter_map(Result::err).collect::<Vec<_>>();
        assert!(matches!(&gone[..], [Error::NoSuchTree(_)]), "{gone:?}");
    }
    assert_same(&store, &BTreeMap::new());
}

/// A change during a checkpoint that fails stays in memory, because the checkpoint's header may be
/// in the file and describes the state at the cut.
#[test]
fn a_change_during_a_failing_checkpoint_does_not_reach_the_file() {
    for failing in [1, 2] {
        let memory = Arc::new(MemoryDevice::new());
        let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
        let store = Store::create_on(device.clone(), &options(16, 1)).unwrap();
        fill(&store, "t", 1000);
        let tree = store.tree("t").unwrap();
        let plan = device.plan();
        plan.hold(Operation::Sync);
        plan.fail_nth(Operation::Sync, failing, Fault::Error(Errno::IO));
        thread::scope(|scope| {
            let sync = scope.spawn(|| store.sync());
            assert!(plan.wait_until_held(Operation::Sync, 1, PATIENCE));
            tree.upsert(&0u32.to_be_bytes(), b"after").unwrap();
            plan.release(Operation::Sync);
            assert!(matches!(sync.join().unwrap(), Err(Error::Io(_))));
        });
        let changed = tree.upsert(&0u32.to_be_bytes(), b"later");
        assert!(matches!(changed, Err(Error::Poisoned(_))), "{changed:?}");
        // Read everything again.
        assert_eq!(tree.entries().count(), 1000);
        let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
        if let Ok(store) = Store::open_on(copy, &options(16, 1)) {
            let tree = store.tree("t").unwrap();
            let value = tree.get(&0u32.to_be_bytes()).unwrap().unwrap().into_vec();
            assert_eq!(value, [7; 100]);
        }
    }
}

/// On a full disk, a store can still make all of its changes durable.
#[test]
fn a_full_disk_does_not_keep_a_store_from_closing() {
    for limit in [30, 64, 100] {
        let device = Arc::new(MemoryDevice::new().limited_to(limit));
        let store = Store::create_on(device.clone(), &options(16, 1)).unwrap();
        let tree = store.create_tree("t").unwrap();
        let mut stored = 0u32;
        loop {
            match tree.upsert(&stored.to_be_bytes(), &[7; 100]) {
                Ok(_) => stored += 1,
                Err(error) => {
                    assert!(matches!(error, Error::DiskFull(_)), "{error}");
                    break;
                }
            }
        }
        drop(tree);
        store.close().unwrap();
        let store = Store::open_on(device, &options(16, 1)).unwrap();
        assert_eq!(store.tree("t").unwrap().entries().count(), stored as usize);
        assert_eq!(store.check(&mut |_| {}).unwrap().lost_pages, 0);
    }
}

/// A bulk load whose input panics loses no pages. Neither does a value whose writer panics.
#[test]
fn a_panic_of_the_caller_loses_no_pages() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device, &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let panicking = (0..2000u32).map(|n| {
        if n == 1500 {
            std::panic::resume_unwind(Box::new("the input"));
        }
        (n.to_be_bytes(), vec![n as u8; if n % 500 == 0 { 5000 } else { 50 }])
    });
    let loaded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = tree.bulk_load(panicking);
    }));
    assert!(loaded.is_err());
    assert_eq!(tree.entries().count(), 0);
    let filled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = tree.upsert_with(b"key", 5000, |_| std::panic::resume_unwind(Box::new("a value")));
    }));
    assert!(filled.is_err());
    store.sync().unwrap();
    assert_eq!(store.check(&mut |_| {}).unwrap().lost_pages, 0);
    tree.upsert(b"key", b"value").unwrap();
}

/// Removing a value that is larger than the pool frees its space.
#[test]
fn a_value_that_a_smaller_pool_cannot_read_can_be_removed() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(256, 1)).unwrap();
    store.create_tree("t").unwrap().upsert(b"long", &vec![1; 60 * 4096]).unwrap();
    store.create_tree("u").unwrap().upsert(b"long", &vec![1; 60 * 4096]).unwrap();
    store.close().unwrap();
    let store = Store::open_on(device, &options(16, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    let error = tree.get(b"long").unwrap_err();
    assert!(matches!(error, Error::NeedsReader { .. }), "{error}");
    assert!(tree.remove(b"long").unwrap());
    store.drop_tree("u").unwrap();
    store.sync().unwrap();
    assert_eq!(store.check(&mut |_| {}).unwrap().lost_pages, 0);
    assert!(store.stat().unwrap().used_pages < 20);
}
