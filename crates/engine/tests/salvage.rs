//! Salvaging a file after a crash returns only entries of the tree itself.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::ControlFlow;
use std::sync::Arc;

use common::{Random, memory_store, options, rounds, seed};
use vellum::node::Node;
use vellum::page::{lsn, seal};
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
        tree.salvage_entries(&mut |found| {
            if let Ok(found) = found {
                numbers.push(u32::from_be_bytes(found.key.try_into().unwrap()));
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
                    2 => assert!(found.iter().copied().eq(0..5000)),
                    number => assert_eq!(found, [number]),
                }
            }
        }
    }
    // Each one with its leaf of the catalog, and none with the root.
    assert_eq!(lost, 2 * 297);
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
    found.trees[0].salvage_entries(&mut |found| {
        match found {
            Ok(found) => last = Some(u32::from_be_bytes(found.key.try_into().unwrap())),
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

/// The entries of a tree, and how many are orphans.
#[derive(Debug, Default)]
struct Found {
    entries: BTreeMap<Vec<u8>, Vec<u8>>,
    orphans: usize,
    damage: Vec<String>,
}

/// Salvages the tree `t`, and asserts that its entries come in order and once.
fn salvaged_entries(image: Vec<u8>) -> Found {
    let store = open(image.clone(), &options(200, 1).salvage(true));
    let trees = store.salvage_trees(&mut |_| ControlFlow::Continue(())).unwrap().trees;
    let tree = trees.iter().find(|tree| &*tree.name() == "t").unwrap();
    let (mut found, mut last) = (Found::default(), None);
    tree.salvage_entries(&mut |entry| {
        match entry {
            Ok(mut entry) => {
                assert!(last.replace(entry.key.to_vec()).is_none_or(|last| *last < *entry.key));
                let mut value = Vec::new();
                entry.value.read_to_end(&mut value).unwrap();
                found.entries.insert(entry.key.to_vec(), value);
                found.orphans += usize::from(entry.is_orphan);
            }
            Err(error) => found.damage.push(error.to_string()),
        }
        true
    });
    // Without a look at the catalog beforehand, the salvage itself has the file scanned.
    let (again, mut count) = (open(image, &options(200, 1).salvage(true)), 0);
    again.tree("t").unwrap().salvage_readers(&mut |entry| {
        count += usize::from(entry.is_ok());
        true
    });
    assert_eq!(count, found.entries.len());
    found
}

fn page_at(image: &[u8], number: usize) -> &[u8] {
    &image[number * 4096..][..4096]
}

fn damage(image: &mut [u8], number: usize) {
    image[number * 4096 + 200] ^= 1;
}

/// The nodes of the tree `t` that its root leads to, with their levels, and its entries by leaf.
fn nodes(image: &[u8]) -> Vec<(usize, u8)> {
    let level = |page: &usize| Node::new(page_at(image, *page)).level().unwrap();
    let fences = |page: usize| {
        let node = Node::new(page_at(image, page));
        (node.lower().unwrap().is_some(), node.upper().unwrap().is_some())
    };
    // Of nodes without fences, only the root is not free.
    let roots =
        pages_of(image, 2, INNER).into_iter().filter(|page| fences(*page) == (false, false));
    let root = roots.max_by_key(level).unwrap();
    let (mut nodes, mut next) = (Vec::new(), vec![root]);
    while let Some(page) = next.pop() {
        nodes.push((page, level(&page)));
        let node = Node::new(page_at(image, page));
        if level(&page) > 0 {
            next.extend((0..=node.count().unwrap()).map(|at| node.child(at).unwrap() as usize));
        }
    }
    nodes
}

fn keys_of(image: &[u8], leaf: usize) -> Vec<Vec<u8>> {
    let leaf = Node::new(page_at(image, leaf));
    let key = |index| {
        let mut key = Vec::new();
        leaf.key_into(index, &mut key).unwrap();
        key
    };
    (0..leaf.count().unwrap()).map(key).collect()
}

/// A tree of three levels whose entries were changed and removed many times, and its entries.
fn churned(random: &mut Random) -> (Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>) {
    let (device, store) = memory_store(1000, 1);
    let tree = store.create_tree("t").unwrap();
    let mut entries = BTreeMap::new();
    // Keys of which few fit into a node, so that the tree has three levels.
    let key = |number: u64| {
        let mut key = (number / 2).to_be_bytes().repeat(20);
        key.extend([b'k'; 200]);
        key.push((number % 2) as u8);
        key
    };
    for round in 0..6 {
        for _ in 0..1500 {
            let key = key(random.below(4000));
            let value = format!("{round} {}", "v".repeat(random.below(120) as usize)).into_bytes();
            tree.upsert(&key, &value).unwrap();
            entries.insert(key, value);
        }
        let first = random.below(3000);
        for number in first..first + random.below(1000) {
            tree.remove(&key(number)).unwrap();
            entries.remove(&key(number));
        }
    }
    drop(tree);
    store.close().unwrap();
    (device.snapshot(), entries)
}

/// A damaged inner node of any level costs no entry, nor do all of them together.
#[test]
fn damaged_inner_nodes_cost_no_entries() {
    let (whole, entries) = churned(&mut Random(seed(1)));
    let nodes = nodes(&whole);
    let inner: Vec<_> = nodes.iter().filter(|(_, level)| *level > 0).collect();
    assert!(inner[0].1 >= 2 && inner.len() > 10, "{inner:?}");
    let found = salvaged_entries(whole.clone());
    assert!(found.entries == entries && found.orphans == 0 && found.damage.is_empty());
    let mut all = whole.clone();
    for (page, level) in inner {
        let mut image = whole.clone();
        damage(&mut image, *page);
        damage(&mut all, *page);
        let found = salvaged_entries(image);
        assert!(found.entries == entries, "page {page} of level {level}: {:?}", found.damage);
        assert_eq!(found.damage.len(), 1, "{:?}", found.damage);
        assert!(found.orphans > 0 && (found.orphans == entries.len()) == (*level == nodes[0].1));
    }
    let found = salvaged_entries(all);
    assert!(found.entries == entries && found.orphans == entries.len());
    assert_eq!(found.damage.len(), 1, "only the root is known: {:?}", found.damage);
}

/// Damaged pages of any kind cost the entries of those that are leaves, and bring back no entry
/// that was removed.
#[test]
fn damaged_pages_cost_the_entries_of_their_leaves() {
    for round in 0..rounds(20) {
        let mut random = Random(seed(1) + u64::from(round));
        let (mut image, mut entries) = churned(&mut random);
        let (nodes, mut orphans) = (nodes(&image), 0);
        for _ in 0..10 {
            for _ in 0..1 + random.below(4) {
                let kind = random.below(2) == 0;
                let of_kind: Vec<_> = nodes.iter().filter(|node| (node.1 > 0) == kind).collect();
                let (page, level) = of_kind[random.below(of_kind.len() as u64) as usize];
                if level == &0 {
                    for key in keys_of(&image, *page) {
                        entries.remove(&key);
                    }
                }
                image[page * 4096 + 1000] ^= 1 << random.below(8);
                image[page * 4096 + 1001] = random.below(256) as u8;
            }
            let found = salvaged_entries(image.clone());
            assert!(found.entries == entries, "round {round}: {:?}", found.damage);
            orphans += found.orphans;
        }
        assert!(orphans > 0);
    }
}

/// An old copy of a leaf and a new one: that with the greater sequence number counts. What is in a
/// value is no node.
#[test]
fn of_two_nodes_the_newer_one_counts() {
    let (device, store) = memory_store(1000, 1);
    let tree = store.create_tree("t").unwrap();
    (0..3000_u32).for_each(|n| tree.insert(&n.to_be_bytes(), &value("t", n)).unwrap());
    store.create_tree("values").unwrap().insert(b"long", &[7; 3 * 4096]).unwrap();
    drop(tree);
    store.close().unwrap();
    let whole = device.snapshot();
    let nodes = nodes(&whole);
    let leaf = nodes.iter().find(|node| node.1 == 0).unwrap().0;
    let keys = keys_of(&whole, leaf);
    let is_copied = |found: &Found| {
        let changed = found.entries.values().filter(|value| value[0] == b'T').count();
        assert_eq!(found.entries.len(), 3000, "{:?}", found.damage);
        assert!(changed == 0 || changed == keys.len(), "{changed}");
        changed > 0
    };
    let copy = |place: usize, newer: u64| {
        let mut copy = page_at(&whole, leaf).to_vec();
        copy[8..16].copy_from_slice(&(place as u64).to_le_bytes());
        let number = (lsn(&copy) + newer).to_le_bytes();
        copy[16..24].copy_from_slice(&number);
        for at in 0..4090 {
            if copy[at..].starts_with(b"t ") && copy[at + 2].is_ascii_digit() {
                copy[at] = b'T';
            }
        }
        seal(&mut copy, &[]);
        copy
    };
    let last = whole.len() / 4096;
    for (newer, is_damaged) in [(0, true), (1, true), (1, false)] {
        let mut image = whole.clone();
        // The original has number 0 if the store had no log.
        let of_leaf = lsn(page_at(&whole, leaf)) + 1;
        image[leaf * 4096 + 16..][..8].copy_from_slice(&of_leaf.to_le_bytes());
        seal(&mut image[leaf * 4096..][..4096], &[]);
        image.extend(copy(last, 2 * newer));
        if is_damaged {
            damage(&mut image, nodes[0].0);
        }
        assert!(!is_copied(&salvaged_entries(image.clone())), "it is beyond the end");
        make_unsure(&mut image);
        assert_eq!(is_copied(&salvaged_entries(image)), newer > 0 && is_damaged);
    }
    let blob = (2..last).find(|page| page_at(&whole, *page)[36] == 4).unwrap();
    let mut image = whole.clone();
    image[(blob + 1) * 4096..][..4096].copy_from_slice(&copy(blob + 1, 9));
    damage(&mut image, nodes[0].0);
    // A node where the value was, as far as the checksum says.
    assert!(is_copied(&salvaged_entries(image.clone())));
    let frames = u32::from_le_bytes(*image[blob * 4096 + 24..].first_chunk().unwrap()) as usize;
    seal(&mut image[blob * 4096..][..frames * 4096], &[]);
    assert!(!is_copied(&salvaged_entries(image)));
}

/// One of the headers is damaged: what the other one says of free pages is perhaps not the newest.
fn make_unsure(image: &mut [u8]) {
    damage(image, 1);
}

/// Copies of inner nodes that were freed refer to the same children as the damaged originals.
#[test]
fn a_freed_copy_of_a_damaged_node_hides_no_node() {
    // A tree that only grew: no other node was freed.
    let (device, store) = memory_store(1000, 1);
    let tree = store.create_tree("t").unwrap();
    let mut entries = BTreeMap::new();
    for number in 0..4000_u64 {
        let mut key = (number / 2).to_be_bytes().repeat(20);
        key.extend([b'k'; 200]);
        key.push((number % 2) as u8);
        tree.insert(&key, &number.to_be_bytes()).unwrap();
        entries.insert(key, number.to_be_bytes().to_vec());
    }
    drop(tree);
    store.close().unwrap();
    let whole = device.snapshot();
    let inner: Vec<_> = nodes(&whole).into_iter().filter(|(_, level)| *level > 0).collect();
    assert!(inner[0].1 >= 2 && inner.len() > 3, "{inner:?}");
    let (mut all, mut place) = (whole.clone(), whole.len() / 4096);
    for (page, level) in inner {
        let mut image = whole.clone();
        let mut copy = page_at(&whole, page).to_vec();
        copy[8..16].copy_from_slice(&(whole.len() as u64 / 4096).to_le_bytes());
        copy[16..24].copy_from_slice(&1_u64.to_le_bytes());
        seal(&mut copy, &[]);
        image.extend(&copy);
        damage(&mut image, page);
        make_unsure(&mut image);
        let found = salvaged_entries(image);
        assert!(found.entries == entries, "page {page} of level {level}: {:?}", found.damage);
        copy[8..16].copy_from_slice(&(place as u64).to_le_bytes());
        seal(&mut copy, &[]);
        all.extend(copy);
        damage(&mut all, page);
        place += 1;
    }
    make_unsure(&mut all);
    let found = salvaged_entries(all);
    assert!(found.entries == entries, "{:?}", found.damage);
}
