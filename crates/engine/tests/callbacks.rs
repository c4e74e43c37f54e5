//! Calls of a store from its own callbacks: a call that would wait for itself is an error.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::channel;

use common::{PATIENCE, options};
use vellum::{Error, Store, Tree};
use vellum_pool::device::MemoryDevice;

fn store() -> (Store, Tree) {
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options(256, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"a", b"short").unwrap();
    tree.upsert(b"b", &[7; 20_000]).unwrap();
    store.sync().unwrap();
    (store, tree)
}

type Call = fn(&Store, &Tree) -> Result<(), Error>;

/// All calls that change a store or wait for its changes.
const CALLS: [(&str, Call); 24] = [
    ("sync", |store, _| store.sync()),
    ("close", |store, _| store.clone().close()),
    ("snapshot", |store, _| store.snapshot().map(drop)),
    ("begin", |store, _| store.begin().map(drop)),
    ("transact", |store, tree| store.transact(|one| one.put(tree, b"c", b"c"))),
    ("check", |store, _| store.check(&mut |_| {}).map(drop)),
    ("compact", |store, _| store.compact(&mut |_| ControlFlow::Continue(())).map(drop)),
    ("create_tree", |store, _| store.create_tree("new").map(drop)),
    ("tree_or_create", |store, _| store.tree_or_create("new").map(drop)),
    ("rename_tree", |store, _| store.rename_tree("t", "u")),
    ("drop_tree", |store, _| store.drop_tree("t")),
    ("tree check", |_, tree| tree.check().map(drop)),
    ("clear", |_, tree| tree.clear()),
    ("upsert", |_, tree| tree.upsert(b"c", b"c").map(drop)),
    ("insert", |_, tree| tree.insert(b"c", b"c")),
    ("update", |_, tree| tree.update(b"b", |_| ()).map(drop)),
    ("remove", |_, tree| tree.remove(b"b").map(drop)),
    ("pop_first", |_, tree| tree.pop_first().map(drop)),
    ("take", |_, tree| tree.take(b"b").map(drop)),
    ("extend", |_, tree| tree.extend([(b"c", b"c")]).map(drop)),
    ("bulk_load", |_, tree| tree.bulk_load([(b"c", b"c")]).map(drop)),
    ("remove_range", |_, tree| tree.remove_range("b"..).map(drop)),
    ("extract_if", |_, tree| {
        tree.extract_if(.., |_, _| true).try_for_each(|entry| entry.map(drop))
    }),
    ("writer", |_, tree| {
        let mut writer = tree.writer(b"c")?;
        std::io::Write::write_all(&mut writer, &[1; 300_000]).map_err(Error::Input)?;
        writer.finish().map(drop)
    }),
];

type Around = fn(&Store, &Tree, &dyn Fn());

fn update(tree: &Tree, key: &[u8], call: &dyn Fn()) {
    assert!(tree.update(key, |_| call()).unwrap());
}

fn fetch_and_update(tree: &Tree, key: &[u8], call: &dyn Fn()) {
    let keep = |old: Option<&[u8]>| {
        call();
        old.map(<[u8]>::to_vec)
    };
    tree.fetch_and_update(key, keep).unwrap();
}

fn upsert_with(tree: &Tree, key: &[u8], len: usize, call: &dyn Fn()) {
    let fill = |target: &mut [u8]| {
        call();
        target.fill(1);
        Ok(())
    };
    assert!(tree.upsert_with(key, len, fill).unwrap());
}

/// The operations that run a callback under a lock, with short values (`a`) and blobs (`b`).
const AROUND: [(&str, Around); 11] = [
    ("update", |_, tree, call| update(tree, b"a", call)),
    ("update of a blob", |_, tree, call| update(tree, b"b", call)),
    ("fetch_and_update", |_, tree, call| fetch_and_update(tree, b"a", call)),
    ("fetch_and_update of a blob", |_, tree, call| fetch_and_update(tree, b"b", call)),
    ("upsert_with", |_, tree, call| upsert_with(tree, b"a", 5, call)),
    ("upsert_with of a blob", |_, tree, call| upsert_with(tree, b"b", 20_000, call)),
    ("with", |_, tree, call| assert!(tree.with(b"a", |_| call()).unwrap().is_some())),
    ("with of a blob", |_, tree, call| assert!(tree.with(b"b", |_| call()).unwrap().is_some())),
    ("retain", |_, tree, call| {
        let keep = |key: &[u8], _: &[u8]| {
            if key == b"a" {
                call();
            }
            true
        };
        assert_eq!(tree.retain(keep).unwrap(), 0);
    }),
    ("extract_if", |_, tree, call| {
        let chosen = |key: &[u8], _: &[u8]| {
            if key == b"a" {
                call();
            }
            false
        };
        assert!(tree.extract_if(.., chosen).next().is_none());
    }),
    ("check", |store, _, call| {
        assert!(store.check(&mut |_| call()).unwrap().is_sound());
    }),
];

fn within_patience(body: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    if wait.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("a call waits for itself");
    }
    thread.join().unwrap();
}

/// Each call, in the callback of each operation.
#[test]
fn a_call_that_would_wait_for_itself_is_an_error() {
    within_patience(|| {
        let (store, tree) = store();
        for (around, run) in AROUND {
            for (name, call) in CALLS {
                let called = Cell::new(0);
                run(&store, &tree, &|| {
                    let refused = call(&store, &tree).expect_err(name);
                    let is_clear = refused.to_string().contains("would wait for itself");
                    assert!(is_clear, "{name} in {around}: {refused}");
                    called.set(called.get() + 1);
                });
                assert!(called.get() > 0, "{around} calls nothing");
            }
        }
        tree.upsert(b"c", b"d").unwrap();
        assert_eq!(tree.entries().count(), 3);
        assert_eq!(store.trees().unwrap(), ["t"]);
        assert!(store.check(&mut |_| {}).unwrap().is_sound());
        drop(tree);
        store.close().unwrap();
    });
}

/// A callback that runs without a lock may call the store. Any callback may call another store, and
/// that store refuses calls from its own callbacks.
#[test]
fn a_call_that_waits_for_nothing_is_none() {
    within_patience(|| {
        let ((one, tree), (two, other)) = (store(), store());
        let update = |tree: &Tree, call: &dyn Fn()| tree.update(b"a", |_| call()).unwrap();
        let refused = |store: &Store| matches!(store.sync(), Err(Error::CalledFromWithin));
        update(&tree, &|| {
            other.upsert(b"n", b"n").unwrap();
            two.sync().unwrap();
            update(&other, &|| assert!(refused(&one) && refused(&two)));
            two.sync().unwrap();
            assert!(refused(&one));
        });
        one.sync().unwrap();
        // After a panic, too.
        let panics = || tree.update(b"a", |_| std::panic::resume_unwind(Box::new("expected")));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        one.sync().unwrap();
        let entries = (0..1000u32).map(|n| {
            one.sync().unwrap();
            (n.to_be_bytes(), n.to_be_bytes())
        });
        assert_eq!(tree.extend(entries.clone()).unwrap(), 1000);
        assert_eq!(one.create_tree("u").unwrap().bulk_load(entries).unwrap(), 1000);
        let visit = |_: usize, _: Option<&[u8]>| one.sync().unwrap();
        tree.multi_get_with(&[b"a", b"b"], visit).unwrap();
    });
}
