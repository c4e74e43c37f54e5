//! Stores whose pool changes its size.

#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use common::{Random, assert_sound, memory_store, value};
use vellum::{Error, Options, Store};
use vellum_testing::patience::SetWhenDropped;

const PAGE: u64 = 4096;

/// Threads change and read entries and long values, by single operations and by transactions,
/// while the pool changes its size. Then the store is opened anew, and has what was written.
#[test]
fn a_store_is_used_while_its_pool_changes_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let options = |pages: u64| Options::new().pool_bytes(pages * PAGE).log_bytes(8 << 20);
    let store = Store::create(&path, &options(2_000).max_pool_bytes(4_000 * PAGE)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let (ended, resized) = (AtomicBool::new(false), AtomicU64::new(0));
    let long = |thread: u64, number: u64| value(5_000 + (thread * 7 + number) as usize * 3, 1);
    let rounds = 3_000_u64;
    thread::scope(|scope| {
        let (store, tree, ended, resized) = (&store, &tree, &ended, &resized);
        let _ending = SetWhenDropped(ended);
        scope.spawn(move || {
            // If this thread fails, the others need not wait for it.
            let _ending = SetWhenDropped(ended);
            let mut random = Random(5);
            while !ended.load(Ordering::Relaxed) {
                let pages = 300 + random.index(3_700) as u64;
                store.resize_pool(pages * PAGE).unwrap();
                assert_eq!(store.stat().unwrap().pool_bytes, pages * PAGE);
                resized.fetch_add(1, Ordering::Relaxed);
            }
        });
        let workers: Vec<_> = (0..2_u64)
            .map(|thread| {
                scope.spawn(move || {
                    let work = |number: u64| {
                        let key = [thread.to_be_bytes(), number.to_be_bytes()].concat();
                        if number.is_multiple_of(10) {
                            tree.upsert(&key, &long(thread, number)).unwrap();
                        } else if number % 10 == 1 {
                            store.transact(|txn| txn.put(tree, &key, b"committed")).unwrap();
                        } else {
                            tree.upsert(&key, &[number as u8; 200]).unwrap();
                        }
                        let earlier = number / 2 / 10 * 10;
                        let key = [thread.to_be_bytes(), earlier.to_be_bytes()].concat();
                        let found = tree.get(&key).unwrap().unwrap();
                        assert!(*found == long(thread, earlier)[..], "{thread} {earlier}");
                    };
                    (0..rounds).for_each(work);
                    // The thread that resizes the pool may begin late.
                    let is_late = || resized.load(Ordering::Relaxed) == 0;
                    let again = (0..rounds).cycle();
                    again
                        .take_while(|_| is_late() && !ended.load(Ordering::Relaxed))
                        .for_each(work);
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
    assert!(resized.load(Ordering::Relaxed) > 0);
    store.resize_pool(300 * PAGE).unwrap();
    assert!(store.pool_stats().resident_frames <= 300);
    assert_sound(&store);
    drop(tree);
    store.close().unwrap();
    let store = Store::open(&path, &options(1_000)).unwrap();
    assert_eq!(store.tree("t").unwrap().stat().unwrap().entries, 2 * rounds);
    assert_sound(&store);
}

#[test]
fn sizes_that_a_store_cannot_have_are_refused() {
    let (_, store) = memory_store(100, 4);
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"a", b"1").unwrap();
    let refused = |bytes| store.resize_pool(bytes).unwrap_err();
    let error = refused(32 * PAGE - 1);
    assert!(matches!(error, Error::PoolTooSmall { min, .. } if min == 32 * PAGE), "{error}");
    let error = refused(401 * PAGE);
    assert!(error.to_string().contains("Options::max_pool_bytes"), "{error}");
    assert!(matches!(refused(u64::MAX), Error::Pool(_)));
    assert_eq!(store.stat().unwrap().pool_bytes, 400 * PAGE);
    store.resize_pool(32 * PAGE).unwrap();
    assert_eq!(tree.get(b"a").unwrap().as_deref(), Some(&b"1"[..]));
    let mut within = String::new();
    tree.update(b"a", |_| within = refused(64 * PAGE).to_string()).unwrap();
    assert!(within.contains("callback"), "{within}");
}

/// The bounds that follow the pool's size: the length of a value that is read as a whole.
#[test]
fn limits_follow_the_size_of_the_pool() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    let long = value(300_000, 3);
    tree.upsert(b"long", &long).unwrap();
    let most = store.limits().max_value;
    store.resize_pool(100 * PAGE).unwrap();
    assert!(store.limits().max_value < most / 3);
    assert!(matches!(tree.upsert(b"other", &long), Err(Error::ValueTooLong { .. })));
    // What is there can be read in pieces, and removed.
    let mut copy = Vec::new();
    let mut reader = tree.reader(b"long").unwrap().unwrap();
    std::io::copy(&mut reader, &mut copy).unwrap();
    assert_eq!(copy, long);
    drop(reader);
    store.resize_pool(400 * PAGE).unwrap();
    assert_eq!(tree.get(b"long").unwrap().as_deref(), Some(&long[..]));
    store.resize_pool(50 * PAGE).unwrap();
    tree.remove(b"long").unwrap();
    assert_sound(&store);
}

/// A reader of a long value holds its pages; the pool shrinks when it has ended.
#[test]
fn a_value_that_is_read_keeps_the_pool_from_shrinking() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    let long = value(350_000, 3);
    tree.upsert(b"long", &long).unwrap();
    let seen = tree.get(b"long").unwrap().unwrap();
    let error = store.resize_pool(40 * PAGE).unwrap_err();
    assert!(matches!(error, Error::PoolExhausted(_)), "{error}");
    assert_eq!(*seen, long[..]);
    drop(seen);
    store.resize_pool(40 * PAGE).unwrap();
}
