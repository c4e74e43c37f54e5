//! Helpers that several tests share.
#![allow(dead_code, unused_imports, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use vellum::{Options, Store, Tree};
use vellum_pool::device::{FaultyDevice, MemoryDevice};
pub use vellum_testing::patience::PATIENCE;
use vellum_testing::patience::eventually;
pub use vellum_testing::random::{Random, bytes};
pub use vellum_testing::rounds::{rounds, seed};

/// Fails if this does not end: then threads wait for each other.
pub fn ends(what: impl FnOnce() + Send + 'static) {
    let (ending, end) = channel();
    let thread = thread::spawn(move || {
        what();
        ending.send(()).unwrap();
    });
    if end.recv_timeout(PATIENCE).is_err() && !thread.is_finished() {
        panic!("not within {PATIENCE:?}");
    }
    thread.join().unwrap();
}

/// A value that depends on its length and on how often values were made.
pub fn value(len: usize, serial: usize) -> Vec<u8> {
    (0..len).map(|at| (at + serial) as u8).collect()
}

/// A store in memory with a pool of `pool_pages` tree pages.
pub fn memory_store(pool_pages: u64, page_frames: u32) -> (Arc<MemoryDevice>, Store) {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(pool_pages, page_frames)).unwrap();
    (device, store)
}

/// A tree of numbers on a device that can fail. Almost none of its pages are resident.
pub fn cold(entries: u64, pool_pages: u64) -> (Arc<FaultyDevice<MemoryDevice>>, Store, Tree) {
    let memory = Arc::new(MemoryDevice::new());
    let store = Store::create_on(memory.clone(), &options(4000, 1)).unwrap();
    let sorted = (0..entries).map(|number| (number.to_be_bytes(), [number as u8; 120]));
    store.create_tree("t").unwrap().bulk_load(sorted).unwrap();
    store.close().unwrap();
    let memory = MemoryDevice::from_snapshot(memory.snapshot());
    let device = Arc::new(FaultyDevice::new(memory, 5).unwrap());
    let store = Store::open_on(device.clone(), &options(pool_pages, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    (device, store, tree)
}

pub fn options(pool_pages: u64, page_frames: u32) -> Options {
    let bytes = pool_pages * u64::from(page_frames) * 4096;
    Options::new().pool_bytes(bytes).page_frames(page_frames)
}

/// Waits until the pages are free that were in use when they were freed: the evictor may have been
/// writing some of them back.
#[track_caller]
pub fn all_freed(store: &Store) {
    eventually("pages that were freed go", || store.pool().frames_to_free() == 0);
}

/// Asserts that every page of the store is sound and that none is lost.
pub fn assert_sound(store: &Store) {
    // Pages that were in use when they were freed become free only at a later call. A read-only
    // store has no such pages.
    let _ = store.sync();
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    assert_eq!(report.lost_pages, 0);
}

/// The value of a key, through a reader.
pub fn read(tree: &Tree, key: &[u8]) -> Vec<u8> {
    let mut value = Vec::new();
    tree.reader(key).unwrap().unwrap().read_to_end(&mut value).unwrap();
    value
}

/// Asserts that the tree has the entries of the map.
pub fn assert_same(tree: &Tree, model: &BTreeMap<Vec<u8>, Vec<u8>>) {
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
