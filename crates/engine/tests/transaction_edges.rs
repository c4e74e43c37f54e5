//! Transactions of programs that forget what they have, in trees that are damaged, and in a memory
//! for old values that is full.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::thread;

use common::{memory_store, options};
use vellum::page::{self, PageKind};
use vellum::{Error, MemoryDevice, Store};

/// One leaf stands in a damaged tree twice, and another leaf between its two places.
#[test]
fn a_commit_in_a_damaged_tree_does_not_wait_for_itself() {
    let memory = Arc::new(MemoryDevice::new());
    let store = Store::create_on(memory.clone(), &options(800, 1)).unwrap();
    let entries = |count: u64| (0..count).map(|number| (number.to_be_bytes(), [1; 120]));
    // So that numbers of pages have two bytes, which no key has.
    store.create_tree("first").unwrap().bulk_load(entries(10_000)).unwrap();
    store.create_tree("damaged").unwrap().bulk_load(entries(200)).unwrap();
    store.close().unwrap();
    let mut bytes = memory.snapshot();
    let nodes = |kind: PageKind, tree: u32| -> Vec<usize> {
        let is_node = |at: &usize| {
            let page = &bytes[at * 4096..][..4096];
            page[36] == kind as u8 && page::tree(page) == tree
        };
        (2..bytes.len() / 4096).filter(is_node).collect()
    };
    let (root, leaves) = (nodes(PageKind::Inner, 3)[0], nodes(PageKind::Leaf, 3));
    let (twice, third) = (leaves[0], leaves[2]);
    assert!(twice > 256, "page {twice}");
    let node = &mut bytes[root * 4096..(root + 1) * 4096];
    let child = (third as u64).to_le_bytes();
    let places = node.windows(8).enumerate().filter(|(_, window)| *window == child);
    let places: Vec<usize> = places.map(|(at, _)| at).collect();
    assert_eq!(places.len(), 1, "{places:?}");
    node[places[0]..places[0] + 8].copy_from_slice(&(twice as u64).to_le_bytes());
    page::seal(node, &[]);

    let device = Arc::new(MemoryDevice::from_snapshot(bytes));
    let store = Store::open_on(device, &options(800, 1)).unwrap();
    let tree = store.tree("damaged").unwrap();
    let mut damaged = 0;
    for first in 0..50u64 {
        let mut transaction = store.begin().unwrap();
        for number in [first, first + 28, first + 56] {
            transaction.put(&tree, &number.to_be_bytes(), b"new").unwrap();
        }
        match transaction.commit() {
            Ok(()) => {}
            Err(Error::Damaged { .. }) => damaged += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!((20..50).contains(&damaged), "{damaged} commits found the damage");
}

/// Serializable transactions conflict also by what an iterator read that the program never drops.
#[test]
fn an_iterator_that_is_forgotten_has_read_all() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("test").unwrap();
    tree.extend([("1", "10"), ("2", "20")]).unwrap();
    let mut one = store.begin().unwrap();
    let mut found = one.entries(&tree).unwrap();
    assert!(found.next().unwrap().is_ok());
    std::mem::forget(found);
    one.put(&tree, b"3", b"30").unwrap();
    tree.extend([("2", "21")]).unwrap();
    assert!(matches!(one.commit(), Err(Error::Conflict)));
    // One that is dropped has read what it returned.
    let mut two = store.begin().unwrap();
    assert!(two.entries(&tree).unwrap().next().unwrap().is_ok());
    two.put(&tree, b"3", b"30").unwrap();
    tree.extend([("2", "22")]).unwrap();
    two.commit().unwrap();
}

/// Few entries with long old values can fill the memory, too.
#[test]
fn a_view_that_has_ended_keeps_nothing_from_changing() {
    let (_, store) = memory_store(1000, 16);
    let tree = store.create_tree("t").unwrap();
    let put = |number: u32| tree.upsert(&number.to_be_bytes(), &[7; 15 << 10]);
    (0..700).for_each(|number| assert!(put(number).is_ok()));
    let one = store.snapshot().unwrap();
    (0..700).for_each(|number| assert!(put(number).is_ok()));
    let two = store.snapshot().unwrap();
    let refused = (0..700).find_map(|number| put(number).err());
    assert!(matches!(refused, Some(Error::VersionsFull { views: 2, .. })), "{refused:?}");
    let left = store.snapshot().unwrap();
    drop((one, two));
    put(0).unwrap();
    drop(left);
    assert_eq!(store.stat().unwrap().version_bytes, 0);
}

/// The same of a view that was not the oldest. Each thread drops old values of its own, so another
/// one finds the memory full.
#[test]
fn a_later_view_that_has_ended_keeps_nothing_from_changing() {
    let (_, store) = memory_store(1000, 16);
    let tree = store.create_tree("t").unwrap();
    let put = |number: u32| tree.upsert(&number.to_be_bytes(), &[7; 15 << 10]);
    (0..700).for_each(|number| assert!(put(number).is_ok()));
    let oldest = store.snapshot().unwrap();
    (0..700).for_each(|number| assert!(put(number).is_ok()));
    let later = store.snapshot().unwrap();
    let refused = (0..700).find_map(|number| put(number).err());
    assert!(matches!(refused, Some(Error::VersionsFull { views: 2, .. })), "{refused:?}");
    drop(later);
    thread::scope(|scope| {
        scope.spawn(|| (0..700).for_each(|number| assert!(put(number).is_ok())));
    });
    drop(oldest);
    assert_eq!(store.stat().unwrap().version_bytes, 0);
}
