//! Callbacks of commits, which use the store that calls them.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use common::ends;
use vellum::{Durability, Error, Options, Result, Store, TransactionOptions, Tree};
use vellum_testing::patience::{SetWhenDropped, eventually};

/// A pool of which a few values take all, and a log in which they make checkpoints due.
fn options() -> Options {
    Options::new().pool_bytes(1 << 20).log_bytes(2 << 20)
}

/// Commits some entries. Reads nothing, so there is no conflict.
fn commit(
    store: &Store,
    tree: &Tree,
    number: u64,
    commit: impl FnOnce(vellum::Transaction) -> Result<()>,
) -> Result<()> {
    let mut transaction = store.begin()?;
    for part in 0..4_u64 {
        let key = ((number * 7919 + part * 131) % 2000).to_be_bytes();
        transaction.put(tree, &key, &[number as u8; 900])?;
    }
    commit(transaction)
}

/// Reads, changes, looks at a snapshot, makes the log durable, and commits in each way.
fn use_store(store: &Store, tree: &Tree, number: u64, called: &Arc<AtomicU64>) -> Result<()> {
    let key = (number % 2000).to_be_bytes();
    tree.get(&key)?;
    tree.upsert(&key, &[1; 900])?;
    let snapshot = store.snapshot()?;
    assert_eq!(snapshot.entries(tree)?.take(20).filter(|entry| entry.is_err()).count(), 0);
    drop(snapshot);
    match number % 3 {
        0 => store.sync()?,
        1 => commit(store, tree, number, vellum::Transaction::commit)?,
        _ => {
            let called = called.clone();
            commit(store, tree, number, |transaction| {
                transaction.commit_then(move |end| {
                    end.unwrap();
                    called.fetch_add(1, Ordering::SeqCst);
                })
            })?;
        }
    }
    Ok(())
}

/// Changes the store in each way until a flag is set.
fn change(store: &Store, tree: &Tree, thread: u64, stop: &AtomicBool) {
    for number in 0.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let durability = [Durability::Synced, Durability::Buffered][number as usize % 2];
        let mut transaction =
            store.begin_with(TransactionOptions::new().durability(durability)).unwrap();
        for part in 0..8 {
            let key = ((number * 31 + thread * 977 + part * 251) % 2000).to_be_bytes();
            transaction.put(tree, &key, &[number as u8; 900]).unwrap();
        }
        transaction.commit().unwrap();
        // Its pages are freed, and others leave memory.
        tree.upsert(&(5000 + thread).to_be_bytes(), &vec![2; 60_000]).unwrap();
    }
}

#[test]
fn callbacks_use_the_store_while_others_commit_checkpoint_and_evict() {
    ends(|| {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path().join("store"), &options()).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let (stop, called, count) = (AtomicBool::new(false), Arc::new(AtomicU64::new(0)), 600);
        let mut expected = 0;
        thread::scope(|scope| {
            let _stops = SetWhenDropped(&stop);
            for thread in 0..2 {
                let (store, tree, stop) = (&store, &tree, &stop);
                scope.spawn(move || change(store, tree, thread, stop));
            }
            for number in 0..count {
                let (within, its_tree, calls) = (store.clone(), tree.clone(), called.clone());
                commit(&store, &tree, number, |transaction| {
                    transaction.commit_then(move |end| {
                        end.unwrap();
                        use_store(&within, &its_tree, number, &calls).unwrap();
                        calls.fetch_add(1, Ordering::SeqCst);
                    })
                })
                .unwrap();
                expected += 1 + u64::from(number % 3 == 2);
            }
            eventually("all are called", || called.load(Ordering::SeqCst) == expected);
        });
        common::assert_sound(&store);
        drop(tree);
        store.close().unwrap();
    });
}

/// The callback changes the store until the close refuses it, and the close waits for the callback.
#[test]
fn a_close_waits_for_a_callback_that_uses_the_store() {
    ends(|| {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create(folder.path().join("store"), &options()).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let refused = Arc::new(AtomicBool::new(false));
        let (its_tree, refuses) = (tree.clone(), refused.clone());
        let (begins, begun) = channel();
        let uses = move |end: Result<()>| {
            end.unwrap();
            begins.send(()).unwrap();
            let error = (0_u64..).find_map(|key| its_tree.upsert(&key.to_be_bytes(), b"").err());
            assert!(matches!(error, Some(Error::Closed)), "{error:?}");
            refuses.store(true, Ordering::SeqCst);
        };
        commit(&store, &tree, 1, |transaction| transaction.commit_then(uses)).unwrap();
        begun.recv().unwrap();
        store.close().unwrap();
        assert!(refused.load(Ordering::SeqCst), "the close has not waited");
    });
}

fn opens(path: &Path) -> bool {
    match Store::open(path, &options()) {
        Ok(store) => {
            assert!(store.recovery().is_none(), "the store was closed");
            true
        }
        Err(Error::InUse(_)) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_callback_closes_the_store_or_drops_its_last_handle() {
    for closes in [true, false] {
        ends(move || {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("store");
            let store = Store::create(&path, &options()).unwrap();
            let tree = store.create_tree("tree").unwrap();
            let (dropped, until) = channel::<()>();
            let its_store = store.clone();
            let last = move |end: Result<()>| {
                end.unwrap();
                let _ = until.recv();
                match closes {
                    true => its_store.close().unwrap(),
                    false => drop(its_store),
                }
            };
            commit(&store, &tree, 1, |transaction| transaction.commit_then(last)).unwrap();
            drop((tree, store));
            drop(dropped);
            eventually("the store is closed", || opens(&path));
        });
    }
}
