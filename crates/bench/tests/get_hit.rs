//! A lookup whose pages are in memory makes no system call and no allocation.
//!
//! crates/pool/tests/pool_hit_path.rs shows the same for single pages.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use vellum::{Options, Store, Tree};
use vellum_pool::device::MemoryDevice;
use vellum_testing::allocations::{Counting, allocations};
use vellum_testing::own_process;
use vellum_testing::system_calls::{SURVIVED, forbid_all, survive};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ENTRIES: u64 = 5_000;

/// A tree of three levels with all of its pages in memory.
fn resident() -> (Store, Tree) {
    let options = Options::new().pool_bytes(8 << 20).evictors(0);
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
    let tree = store.create_tree("data").unwrap();
    for key in 0..ENTRIES {
        tree.insert(&key.to_be_bytes(), &[key as u8; 120]).unwrap();
    }
    (store, tree)
}

/// Looks up every key, and a missing one.
fn look_up_all(tree: &Tree, value: &mut Vec<u8>) {
    for key in 0..ENTRIES {
        assert!(tree.get_into(&key.to_be_bytes(), value).unwrap());
        assert_eq!(value[119], key as u8);
    }
    assert!(!tree.get_into(b"none", value).unwrap());
}

#[test]
fn a_lookup_allocates_nothing() {
    let (_store, tree) = resident();
    let mut value = Vec::with_capacity(120);
    look_up_all(&tree, &mut value);
    let before = allocations();
    look_up_all(&tree, &mut value);
    assert_eq!(allocations() - before, 0);
    drop(vec![1]);
    assert_eq!(allocations() - before, 1, "the count counts");
}

#[test]
fn a_lookup_makes_no_system_call() {
    if let Some(output) = own_process::run("a_lookup_makes_no_system_call") {
        assert_eq!(output.status.code(), Some(SURVIVED), "{output:?}");
        return;
    }
    let (_store, tree) = resident();
    let mut value = Vec::with_capacity(120);
    look_up_all(&tree, &mut value);
    forbid_all();
    (0..20).for_each(|_| look_up_all(&tree, &mut value));
    survive();
}
