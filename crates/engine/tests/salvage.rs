//! Salvaging a file after a crash returns only entries of the tree itself.
#![allow(clippy::unwrap_used)]

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::{memory_store, options};
use vellum::page::seal;
use vellum::{Error, Options, Store};
use vellum_pool::device::MemoryDevice;

fn open(image: Vec<u8>, options: &Options) -> Store {
    Store::open_on(Arc::new(MemoryDevice::from_snapshot(image)), options).unwrap()
}

fn value(tree: &str, number: u32) -> Vec<u8> {
    format!("{tree} {number} {}", "x".repeat(80)).into_bytes()
}

/// Entries move from one tree to another, whose pages take the places of the first tree's pages.
#[test]
fn salvaging_gives_no_entry_of_another_tree() {
    // A pool that evicts: pages that stay in memory would not change the file.
    let (device, store) = memory_store(30, 1);
    let (old, new) = (store.create_tree("old").unwrap(), store.create_tree("new").unwrap());
    let (all, each) = (6000u32, 100);
    for number in 0..all {
        old.insert(&number.to_be_bytes(), &value("old", number)).unwrap();
    }
    store.sync().unwrap();
    let (mut salvaged, mut damaged) = (0, 0);
    for first in (0..all / 2).step_by(100) {
        for number in first..first + each {
            old.remove(&number.to_be_bytes()).unwrap();
        }
        for number in first..first + each {
            new.insert(&number.to_be_bytes(), &value("new", number)).unwrap();
        }
        let copy = open(device.snapshot(), &options(2000, 1).salvage(true));
        for name in ["old", "new"] {
            let Ok(tree) = copy.tree(name) else { continue };
            let mut last = None;
            tree.salvage(&mut |found| {
                match found {
                    Ok((key, found)) => {
                        let number = u32::from_be_bytes(key.try_into().unwrap());
                        assert_eq!(found, value(name, number), "salvaged of {name}");
                        assert!(last.replace(number).is_none_or(|last| last < number));
                        salvaged += 1;
                    }
                    Err(_) => damaged += 1,
                }
                true
            });
            // The iterator ends with an error where it would have to skip entries.
            for entry in tree.entries().map_while(Result::ok) {
                let number = u32::from_be_bytes(entry.0[..].try_into().unwrap());
                assert_eq!(&entry.1[..], value(name, number), "iterated of {name}");
            }
        }
    }
    assert!(salvaged > 10 * all && damaged > 0, "{salvaged} entries, {damaged} errors");
}

/// Values of one length move from key to key.
#[test]
fn salvaging_gives_no_value_of_another_key() {
    let (device, store) = memory_store(60, 1);
    let tree = store.create_tree("blobs").unwrap();
    let blob = |number: u32, round: u8| {
        let mut value = vec![round; 8000];
        value[..4].copy_from_slice(&number.to_be_bytes());
        value
    };
    let put = |number: u32, round: u8| {
        tree.upsert(&number.to_be_bytes(), &blob(number, round)).unwrap();
    };
    (0..200).for_each(|number| put(number, 0));
    store.sync().unwrap();
    let (mut salvaged, mut refused) = (0, 0);
    for round in 1..10 {
        for number in (0..200u32).rev() {
            put(number, round);
            if number % 50 > 0 {
                continue;
            }
            (number..number + 20).for_each(|number| {
                tree.remove(&number.to_be_bytes()).unwrap();
            });
            let copy = open(device.snapshot(), &options(2000, 1).salvage(true));
            copy.tree("blobs").unwrap().salvage(&mut |found| {
                match found {
                    Ok((key, value)) => {
                        assert_eq!(key, &value[..4], "a value of another key");
                        salvaged += 1;
                    }
                    Err(Error::Damaged { what, .. }) => {
                        refused += u32::from(what.contains("another key"));
                    }
                    Err(_) => {}
                }
                true
            });
        }
    }
    assert!(salvaged > 20 && refused > 0, "{salvaged} entries, {refused} refused");
}

/// Earlier versions recorded no checksum of the key in a blob's page.
#[test]
fn blobs_without_a_checksum_of_their_key_are_read() {
    let (device, store) = memory_store(60, 1);
    let tree = store.create_tree("t").unwrap();
    tree.insert(b"key", &[7; 5000]).unwrap();
    drop(tree);
    store.close().unwrap();
    let mut image = device.snapshot();
    let blob = (0..image.len() / 4096).find(|page| image[page * 4096 + 36] == 4).unwrap() * 4096;
    for (key, found) in [([0; 8], true), ([1; 8], false)] {
        image[blob + 8184..blob + 8192].copy_from_slice(&key);
        seal(&mut image[blob..blob + 8192], &[]);
        let store = open(image.clone(), &options(60, 1));
        let value = store.tree("t").unwrap().get(b"key").map(|value| value.unwrap().into_vec());
        match found {
            true => assert_eq!(value.unwrap(), [7; 5000]),
            false => assert!(value.unwrap_err().to_string().contains("another key")),
        }
    }
}

/// The numbers of the pages of a tree, of this kind.
fn pages_of(image: &[u8], tree: u32, kind: u8) -> Vec<usize> {
    let page = |number: &usize| &image[number * 4096..][..4096];
    let is_of = |number: &usize| page(number)[28..32] == tree.to_le_bytes();
    let numbers = (2..image.len() / 4096).filter(|number| page(number)[36] == kind);
    numbers.filter(is_of).collect()
}

/// The name of a tree, whether that was lost, and its keys.
type FoundTree = (String, bool, Vec<u32>);

/// The trees that are found, and how much damage the catalog has.
fn salvaged(image: Vec<u8>) -> (Vec<FoundTree>, usize) {
    let store = open(image, &options(2000, 1).salvage(true));
    let found = store.salvage_trees(&mut |_| ControlFlow::Continue(())).unwrap();
    let trees = found.trees.iter().map(|tree| {
        let mut numbers = Vec::new();
        tree.salvage_readers(&mut |found| {
            if let Ok((key, _)) = found {
                numbers.push(u32::from_be_bytes(key.try_into().unwrap()));
            }
            true
        });
        (tree.name().to_string(), tree.is_lost(), numbers)
    });
    (trees.collect(), found.damage.len())
}

const LEAF: u8 = 3;
const INNER: u8 = 2;

/// Trees in a catalog of several leaves, of which one is damaged, or the root. The tree `big` has
/// many leaves, and the others have one entry each. A tree that was dropped is not found.
#[test]
fn trees_whose_names_are_lost_are_found_by_their_pages() {
    let (device, store) = memory_store(2000, 1);
    let big = store.create_tree("big").unwrap();
    let dropped = store.create_tree("dropped").unwrap();
    (0..5000).for_each(|number: u32| {
        big.insert(&number.to_be_bytes(), &[1; 100]).unwrap();
        dropped.insert(&number.to_be_bytes(), &[1; 100]).unwrap();
    });
    for number in 4..300_u32 {
        let tree = store.create_tree(&format!("small {number}")).unwrap();
        tree.insert(&number.to_be_bytes(), b"").unwrap();
    }
    drop(dropped);
    store.drop_tree("dropped").unwrap();
    drop(big);
    store.close().unwrap();
    let whole = device.snapshot();
    let (catalog, root) = (pages_of(&whole, 1, LEAF), pages_of(&whole, 1, INNER));
    assert!(catalog.len() > 2 && root.len() == 1, "{catalog:?} {root:?}");
    let mut lost = 0;
    for damaged in catalog.iter().chain(&root) {
        let mut image = whole.clone();
        image[damaged * 4096 + 200] ^= 1;
        // The root of a tree whose name may be lost, too.
        let roots = pages_of(&whole, 2, INNER);
        assert_eq!(roots.len(), 1);
        for with_root in [true, false] {
            if !with_root {
                image[roots[0] * 4096 + 200] ^= 1;
            }
            let (trees, damage) = salvaged(image.clone());
            assert_eq!((trees.len(), damage), (297, 1));
            for (name, is_lost, found) in trees {
                let (kind, number) = name.rsplit_once(['-', ' ']).unwrap_or((&name, "2"));
                assert_eq!(is_lost, kind == "lost", "{name}");
                lost += usize::from(is_lost);
                match number.parse().unwrap() {
                    2 if is_lost || with_root => assert!(found.iter().copied().eq(0..5000)),
                    2 => assert_eq!(found, []),
                    number => assert_eq!(found, [number]),
                }
            }
        }
    }
    assert!(lost > 2 * 297, "{lost}");
    let (trees, damage) = salvaged(whole);
    assert!(trees.len() == 297 && damage == 0 && !trees.iter().any(|(_, is_lost, _)| *is_lost));
}

/// Pages of a lost tree that are missing are damage, in the place where their entries are missing.
#[test]
fn what_is_missing_of_a_lost_tree_is_named() {
    let (device, store) = memory_store(2000, 1);
    let tree = store.create_tree("tree").unwrap();
    (0..5000_u32).for_each(|number| tree.insert(&number.to_be_bytes(), &[1; 100]).unwrap());
    drop(tree);
    store.close().unwrap();
    let mut image = device.snapshot();
    let leaves = pages_of(&image, 2, LEAF);
    let damaged = [pages_of(&image, 1, LEAF), pages_of(&image, 2, INNER), vec![leaves[20]]];
    for page in damaged.concat() {
        image[page * 4096 + 200] ^= 1;
    }
    let store = open(image, &options(2000, 1).salvage(true));
    assert!(store.trees().is_err());
    assert_eq!(store.stat().unwrap().trees, 0);
    let found = store.salvage_trees(&mut |_| ControlFlow::Continue(())).unwrap();
    let (mut last, mut missing) = (None, Vec::new());
    found.trees[0].salvage_readers(&mut |found| {
        match found {
            Ok((key, _)) => last = Some(u32::from_be_bytes(key.try_into().unwrap())),
            Err(error) => missing.push((last, error.to_string())),
        }
        true
    });
    let [(Some(before), what)] = &missing[..] else { panic!("{missing:?}") };
    assert!((100..4900).contains(before) && what.contains("no page has the keys"), "{missing:?}");
    assert_eq!(last, Some(4999));
    let mut breaks = |_| ControlFlow::Break(());
    assert!(matches!(store.salvage_trees(&mut breaks), Err(Error::Cancelled)));
}
