//! The default size of pools: its test has a process of its own, whose pools are all there are.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use vellum::{MemoryDevice, Options, Store};

#[test]
fn stores_with_the_default_pool_divide_the_memory() {
    let open = || Store::create_on(Arc::new(MemoryDevice::new()), &Options::new()).unwrap();
    let bytes = |store: &Store| store.stat().unwrap().pool_bytes;
    let first = open();
    let half = bytes(&first);
    let second = open();
    assert_eq!(bytes(&second).abs_diff(half / 2) >> 12, 0);
    // What has a size of its own counts, too.
    let own = Options::new().pool_bytes(half / 4);
    let third = Store::create_on(Arc::new(MemoryDevice::new()), &own).unwrap();
    assert_eq!(bytes(&open()).abs_diff(half / 8) >> 12, 0);
    // However many there are, each has enough to work with.
    let many: Vec<_> = (0..40).map(|_| open()).collect();
    assert!(many.iter().all(|store| bytes(store) >= 16 << 20));
    // Memory that comes back is divided again, also that of a store that was closed.
    drop(many);
    first.close().unwrap();
    drop((second, third));
    assert_eq!(bytes(&open()), half);
}
