//! The default size of pools. The test runs in a process of its own, which has no other pools.
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
    // A pool with a given size counts, too.
    let own = Options::new().pool_bytes(half / 4);
    let third = Store::create_on(Arc::new(MemoryDevice::new()), &own).unwrap();
    assert_eq!(bytes(&open()).abs_diff(half / 8) >> 12, 0);
    // However many pools there are, each has the minimum.
    let many: Vec<_> = (0..40).map(|_| open()).collect();
    assert!(many.iter().all(|store| bytes(store) >= 16 << 20));
    // The next pool gets a share of the memory that was given back, also by a closed store.
    drop(many);
    first.close().unwrap();
    drop((second, third));
    assert_eq!(bytes(&open()), half);
}
