//! Salvaging a file after a crash returns only entries of the tree itself.
#![allow(clippy::unwrap_used)]

mod common;

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
