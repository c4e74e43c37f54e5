//! Renames of trees.
#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_sound, memory_store, options};
use rustix::io::Errno;
use vellum::{Error, Store};
use vellum_pool::device::{Fault, Operation};

#[test]
fn a_tree_gets_another_name() {
    let (device, store) = memory_store(64, 1);
    let tree = store.create_tree("a").unwrap();
    tree.insert(b"key", b"of a").unwrap();
    store.create_tree("b").unwrap().insert(b"key", b"of b").unwrap();
    // None of these calls changes anything.
    assert!(matches!(store.rename_tree("c", "d"), Err(Error::NoSuchTree(name)) if name == "c"));
    assert!(matches!(store.rename_tree("c", "c"), Err(Error::NoSuchTree(_))));
    assert!(matches!(store.rename_tree("a", "b"), Err(Error::TreeExists(name)) if name == "b"));
    let long = "x".repeat(9000);
    assert!(matches!(store.rename_tree("a", &long), Err(Error::KeyTooLong { .. })));
    store.rename_tree("a", "a").unwrap();
    assert_eq!((store.trees().unwrap(), &*tree.name()), (vec!["a".into(), "b".into()], "a"));

    store.rename_tree("a", "größe").unwrap();
    assert_eq!(store.trees().unwrap(), ["b", "größe"]);
    assert!(matches!(store.tree("a"), Err(Error::NoSuchTree(_))));
    // A handle from before the rename and one from after it belong to the same tree, which has the
    // new name.
    let found = store.tree("größe").unwrap();
    tree.insert(b"more", b"").unwrap();
    assert!(found.contains(b"more").unwrap());
    assert_eq!((&*tree.name(), &*found.name()), ("größe", "größe"));
    // The old name is free for another tree, which can be dropped.
    store.create_tree("a").unwrap().insert(b"new", b"").unwrap();
    store.drop_tree("a").unwrap();
    assert!(tree.contains(b"more").unwrap());
    drop((tree, found));
    store.rename_tree("größe", "").unwrap();
    let dropped = store.tree("b").unwrap();
    store.drop_tree("b").unwrap();
    store.rename_tree("", "b").unwrap();
    assert!(matches!(dropped.get(b"key"), Err(Error::NoSuchTree(_))));
    assert_sound(&store);
    store.close().unwrap();
    let store = Store::open_on(device, &options(64, 1)).unwrap();
    assert_eq!(store.trees().unwrap(), ["b"]);
    assert_eq!(&*store.tree("b").unwrap().get(b"key").unwrap().unwrap(), b"of a");
    let read_only = store.tree("b").unwrap();
    store.close().unwrap();
    assert!(matches!(read_only.get(b"key"), Err(Error::Closed)));
}

#[test]
fn a_rename_that_finds_no_space_leaves_the_name() {
    let (device, store, tree) = common::cold(10, 64);
    // Create so many trees that the next names need another page of the catalog.
    let names: Vec<_> = (0..200).map(|n| format!("{n:0100}")).collect();
    names.iter().for_each(|name| drop(store.create_tree(name).unwrap()));
    device.plan().fail_always(Operation::Resize, Fault::Error(Errno::NOSPC));
    while tree.upsert(&store.stat().unwrap().used_pages.to_be_bytes(), &[0; 4000]).is_ok() {}
    let mut refused = 0;
    for name in &names {
        let new = format!("{name}, and a name that is much longer than the old one: {name}{name}");
        match store.rename_tree(name, &new) {
            Ok(()) => assert!(store.tree(&new).is_ok() && store.tree(name).is_err()),
            Err(Error::DiskFull(_)) => {
                refused += 1;
                assert!(store.tree(&new).is_err() && store.tree(name).is_ok());
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(refused > 0);
    assert_eq!(store.trees().unwrap().len(), 201);
    device.plan().clear();
    assert_sound(&store);
}

/// A thread that lists the trees sees each of them under one name.
#[test]
fn a_rename_is_one_step_for_all_others() {
    let (_, store) = memory_store(64, 1);
    for n in 0..60 {
        store.create_tree(&format!("{n:0200}")).unwrap();
    }
    store.create_tree("from").unwrap();
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| {
            for _ in 0..5000 {
                assert_eq!(store.trees().unwrap().len(), 61);
            }
        });
        while !looking.is_finished() {
            // One name is before most others, the other after them.
            store.rename_tree("from", "!").unwrap();
            store.rename_tree("!", "from").unwrap();
        }
    });
    assert_sound(&store);
}
