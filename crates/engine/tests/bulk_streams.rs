//! Bulk loads with values as streams.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::{all_freed, assert_sound, bytes, ends, memory_store, options, read};
use vellum::{Error, Store};
use vellum_pool::device::MemoryDevice;
use vellum_testing::patience::SetWhenDropped;

/// The data bytes of a piece of one frame, and of the longest piece.
const SMALL_PIECE: usize = 4096 - 56;
const PIECE: usize = 64 * 4096 - 56;

/// A sync freezes the gate. It must not come between two changes of the load, of which one is
/// within the other. A thread that misses pages has the load rest.
#[test]
fn a_load_of_long_values_holds_no_change_while_it_begins_another() {
    ends(|| {
        let (_device, store) = memory_store(256, 1);
        let (read, loaded) = (store.create_tree("r").unwrap(), store.create_tree("l").unwrap());
        read.bulk_load((0..4000_u32).map(|n| (n.to_be_bytes(), [1; 500]))).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _stopping = SetWhenDropped(&stop);
            scope.spawn(|| {
                for n in (0..).step_by(7).take_while(|_| !stop.load(Ordering::Relaxed)) {
                    assert!(read.contains(&(n % 4000_u32).to_be_bytes()).unwrap());
                }
            });
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    read.upsert(b"key", b"value").unwrap();
                    store.sync().unwrap();
                }
            });
            // Few entries fill a leaf.
            let key = |n: u32| [&n.to_be_bytes()[..], &[7; 600]].concat();
            loaded.bulk_load((0..2000).map(|n| (key(n), [2; 5000]))).unwrap();
        });
        assert_sound(&store);
    });
}

/// Loads values of all lengths as streams, between values that are passed as slices.
#[test]
fn a_bulk_load_takes_streams() {
    for (pool_pages, page_frames) in [(8, 1), (64, 1), (2048, 1), (64, 4)] {
        let (device, store) = memory_store(pool_pages, page_frames);
        let tree = store.create_tree("t").unwrap();
        let lens = [0, 1, 100, 5000, SMALL_PIECE, SMALL_PIECE + 1, PIECE, PIECE + 1, 3 << 20];
        let mut loader = tree.bulk_loader().unwrap();
        for n in 0..2000_u64 {
            let key = n.to_be_bytes();
            if n % 200 == 0 {
                let value = bytes(lens[n as usize / 200 % lens.len()], n);
                loader.push_from(&key, &value[..]).unwrap();
                assert_eq!(loader.last_key(), Some(&key[..]));
            } else {
                loader.push(&key, &bytes(60, n)).unwrap();
            }
            // The tree has none of the loaded entries until the end.
            if n % 500 == 0 {
                store.sync().unwrap();
                assert!(tree.cursor().key().is_empty() && tree.get(&key).unwrap().is_none());
            }
        }
        assert_eq!(loader.finish().unwrap(), 2000);
        let check = |store: &Store| {
            let tree = store.tree("t").unwrap();
            for n in 0..2000_u64 {
                let len = if n % 200 == 0 { lens[n as usize / 200 % lens.len()] } else { 60 };
                assert!(read(&tree, &n.to_be_bytes()) == bytes(len, n), "{n}");
            }
            assert_sound(store);
        };
        check(&store);
        drop(tree);
        store.close().unwrap();
        let snapshot = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
        check(&Store::open_on(snapshot, &options(pool_pages, page_frames)).unwrap());
    }
}

#[test]
fn a_bulk_load_skips_a_stream_that_fails_and_frees_its_pages_if_it_is_dropped() {
    struct Failing(u64);
    impl Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let count = (buffer.len() as u64).min(self.0);
            self.0 -= count;
            if count == 0 { Err(std::io::Error::other("no more")) } else { Ok(count as usize) }
        }
    }
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let before = store.stat().unwrap().used_pages;
    let value = bytes(1 << 20, 1);
    for finished in [false, true] {
        let mut loader = tree.bulk_loader().unwrap();
        loader.push_from(b"b", &value[..]).unwrap();
        let refused = loader.push_from(b"a", &value[..]);
        assert!(matches!(refused, Err(Error::NotSorted { entry: 1, .. })));
        let failed = loader.push_from(b"c", Failing(2 << 20));
        assert!(matches!(failed, Err(Error::Input(error)) if error.to_string() == "no more"));
        let long_key = vec![b'd'; store.limits().max_key + 1];
        let refused = loader.push_from(&long_key, &value[..]);
        assert!(matches!(refused, Err(Error::KeyTooLong { .. })));
        loader.push_from(b"c", &value[1..]).unwrap();
        if finished {
            assert_eq!(loader.finish().unwrap(), 2);
            assert!(read(&tree, b"b") == value && read(&tree, b"c") == value[1..]);
            assert!(matches!(tree.bulk_loader(), Err(Error::NotEmpty)));
        } else {
            drop(loader);
            all_freed(&store);
            assert_eq!(store.stat().unwrap().used_pages, before);
        }
        assert_sound(&store);
    }
}

/// Another thread inserts an entry into the tree during the load.
#[test]
fn a_bulk_load_that_comes_too_late_gives_its_streams_back() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let mut loader = tree.bulk_loader().unwrap();
    loader.push_from(b"a", &bytes(1 << 20, 1)[..]).unwrap();
    tree.insert(b"b", b"first").unwrap();
    assert!(matches!(loader.finish(), Err(Error::NotEmpty)));
    assert_eq!(tree.entries().count(), 1);
    all_freed(&store);
    assert_sound(&store);
}

/// The process is killed during a load, after a sync. The space of the streams is free again.
#[test]
fn a_crash_in_a_bulk_load_loses_no_space_of_streams() {
    let (device, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let mut loader = tree.bulk_loader().unwrap();
    for n in 0..3_u64 {
        loader.push_from(&n.to_be_bytes(), &bytes(1 << 20, n)[..]).unwrap();
    }
    store.sync().unwrap();
    let crashed = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
    let found = Store::open_on(crashed, &options(64, 1)).unwrap();
    assert_eq!(found.tree("t").unwrap().stat().unwrap().entries, 0);
    assert_sound(&found);
    assert_eq!(loader.finish().unwrap(), 3);
    store.sync().unwrap();
    let crashed = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
    let found = Store::open_on(crashed, &options(64, 1)).unwrap();
    let tree = found.tree("t").unwrap();
    assert!((0..3_u64).all(|n| read(&tree, &n.to_be_bytes()) == bytes(1 << 20, n)));
    assert_sound(&found);
}
