//! Calls of a store from its own callbacks: a call that would wait for itself is an error.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::channel;

use common::{PATIENCE, options};
use vellum::{BackupOptions, Error, Snapshot, Store, Transaction, Tree};
use vellum_pool::device::MemoryDevice;

fn store() -> (Store, Tree) {
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options(256, 1)).unwrap();
    let tree = filled(&store);
    (store, tree)
}

fn filled(store: &Store) -> Tree {
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"a", b"short").unwrap();
    tree.upsert(b"b", &[7; 20_000]).unwrap();
    store.sync().unwrap();
    tree
}

type Call = fn(&Store, &Tree) -> Result<(), Error>;

/// All calls that change a store or wait for its changes.
const CALLS: [(&str, Call); 32] = [
    ("sync", |store, _| store.sync()),
    ("close", |store, _| store.clone().close()),
    ("snapshot", |store, _| store.snapshot().map(drop)),
    ("begin", |store, _| store.begin().map(drop)),
    ("transact", |store, tree| store.transact(|one| one.put(tree, b"c", b"c"))),
    ("check", |store, _| store.check(&mut |_| {}).map(drop)),
    ("free_lost_pages", |store, _| {
        store.free_lost_pages(&mut |_| ControlFlow::Continue(())).map(drop)
    }),
    ("backup", |store, _| {
        let nowhere = std::env::temp_dir().join("no such folder").join("backup");
        store.backup(nowhere, &BackupOptions::new(), &mut |_| ControlFlow::Continue(())).map(drop)
    }),
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
    ("fetch_and_update", |_, tree| tree.fetch_and_update(b"b", |_| Some("c")).map(drop)),
    ("compare_and_swap", |_, tree| tree.compare_and_swap(b"c", None, Some(b"c")).map(drop)),
    ("remove", |_, tree| tree.remove(b"b").map(drop)),
    ("pop_first", |_, tree| tree.pop_first().map(drop)),
    ("take", |_, tree| tree.take(b"b").map(drop)),
    ("extend", |_, tree| tree.extend([(b"c", b"c")]).map(drop)),
    ("bulk_loader", |_, tree| tree.bulk_loader().map(drop)),
    ("bulk_load", |_, tree| tree.bulk_load([(b"c", b"c")]).map(drop)),
    ("remove_range", |_, tree| tree.remove_range("b"..).map(drop)),
    ("retain", |_, tree| tree.retain(|_, _| false).map(drop)),
    ("retain_in", |_, tree| tree.retain_in("b".., |_, _| false).map(drop)),
    ("extract_if", |_, tree| {
        tree.extract_if(.., |_, _| true).try_for_each(|entry| entry.map(drop))
    }),
    ("writer", |_, tree| {
        let mut writer = tree.writer(b"c")?;
        writer.write_all(&[1; 300_000]).map_err(Error::Input)?;
        writer.finish().map(drop)
    }),
    ("resize_pool", |store, _| store.resize_pool(4 << 20)),
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

type End<'s> = Box<dyn FnOnce() -> Result<(), Error> + 's>;
type Begin = for<'s> fn(&'s Store, &'s Tree, &'s Tree) -> End<'s>;

/// What was begun before the callback, and cannot end well in it.
const ENDS: [(&str, Begin); 5] = [
    ("commit", |store, tree, _| Box::new(change(store, tree, |txn| txn.commit()))),
    ("commit_then", |store, tree, _| {
        Box::new(change(store, tree, |txn| txn.commit_then(|end| end.unwrap())))
    }),
    ("finish of a writer", |_, tree, _| {
        let mut writer = tree.writer(b"c").unwrap();
        writer.write_all(&[1; 300_000]).unwrap();
        Box::new(|| writer.finish().map(drop))
    }),
    ("finish of a loader", |_, _, empty| {
        let mut loader = empty.bulk_loader().unwrap();
        loader.push(b"c", &[1; 20_000]).unwrap();
        Box::new(|| loader.finish().map(drop))
    }),
    ("extract_if", |_, tree, _| {
        let mut extracted = tree.extract_if("c".., |_, _| true);
        Box::new(move || extracted.try_for_each(|entry| entry.map(drop)))
    }),
];

fn change<'s>(
    store: &'s Store,
    tree: &'s Tree,
    end: fn(Transaction) -> Result<(), Error>,
) -> impl FnOnce() -> Result<(), Error> + 's {
    let mut txn = store.begin().unwrap();
    txn.put(tree, b"c", b"c").unwrap();
    move || end(txn)
}

/// What has pages to free when it is dropped.
const DROPS: [(&str, Begin); 7] = [
    ("snapshot", |store, tree, _| {
        let snapshot = seen(store, tree);
        dropped(snapshot)
    }),
    ("transaction", |store, tree, _| {
        let mut txn = store.begin().unwrap();
        txn.put(tree, b"c", b"c").unwrap();
        replace(tree);
        dropped(txn)
    }),
    ("reader", |_, tree, _| {
        let reader = tree.reader(b"b").unwrap().unwrap();
        replace(tree);
        dropped(reader)
    }),
    ("snapshot of a dropped tree", |store, _, _| {
        let gone = store.create_tree("gone").unwrap();
        (0..100_u8).for_each(|key| gone.insert(&[key], &[key; 5000]).unwrap());
        let snapshot = store.snapshot().unwrap();
        store.drop_tree("gone").unwrap();
        dropped((snapshot, gone))
    }),
    ("writer", |_, tree, _| {
        let mut writer = tree.writer(b"c").unwrap();
        writer.write_all(&[1; 300_000]).unwrap();
        dropped(writer)
    }),
    ("loader", |_, _, empty| {
        let mut loader = empty.bulk_loader().unwrap();
        (0..100_u8).for_each(|key| loader.push(&[key], &[key; 5000]).unwrap());
        dropped(loader)
    }),
    ("extract_if", |_, tree, _| {
        (0..20_u8).for_each(|key| _ = tree.upsert(&[b'c', key], &[key; 900]).unwrap());
        let mut extracted = tree.extract_if("c".., |_, _| true);
        // All but the last one.
        assert!((0..19).all(|_| extracted.next().unwrap().is_ok()));
        tree.remove(&[b'c', 19]).unwrap();
        dropped(extracted)
    }),
];

fn dropped<'s>(begun: impl Sized + 's) -> End<'s> {
    Box::new(|| {
        drop(begun);
        Ok(())
    })
}

/// Gives the long value other pages.
fn replace(tree: &Tree) {
    tree.upsert(b"b", &[7; 20_000]).unwrap();
}

/// A snapshot that sees many versions and some pages.
fn seen(store: &Store, tree: &Tree) -> Snapshot {
    (0..200_u8).for_each(|key| _ = tree.upsert(&[b'c', key], &[key; 5000]).unwrap());
    let snapshot = store.snapshot().unwrap();
    assert_eq!(tree.remove_range("c"..).unwrap(), 200);
    replace(tree);
    snapshot
}

/// Runs an operation, and what was begun before in its callback.
fn end_within(store: &Store, tree: &Tree, run: Around, end: End<'_>) -> Result<(), Error> {
    let (end, result) = (Cell::new(Some(end)), Cell::new(None));
    run(store, tree, &|| {
        if let Some(end) = end.take() {
            result.set(Some(end()));
        }
    });
    result.take().expect("the operation calls nothing")
}

/// The stores without a log and with one.
fn both(body: fn(&Store, &Tree)) {
    within_patience(move || {
        let (store, tree) = store();
        body(&store, &tree);
        drop(tree);
        store.close().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.vellum");
        let store = Store::create(path, &options(256, 1).log(true)).unwrap();
        let tree = filled(&store);
        body(&store, &tree);
        drop(tree);
        store.close().unwrap();
    });
}

/// What was begun before cannot end in the callback, changes nothing, and leaves no page.
#[test]
fn what_was_begun_before_does_not_end_within() {
    both(|store, tree| {
        let empty = store.create_tree("empty").unwrap();
        for (around, run) in AROUND {
            for (name, begin) in ENDS {
                let refused = end_within(store, tree, run, begin(store, tree, &empty));
                let refused = refused.expect_err(name).to_string();
                let is_clear = refused.contains("would wait for itself");
                assert!(is_clear, "{name} in {around}: {refused}");
            }
            is_as_before(store, tree);
            assert_eq!(empty.entries().count(), 0);
        }
    });
}

/// What is dropped in a callback waits for nothing, and leaves no page.
#[test]
fn what_is_dropped_within_waits_for_nothing() {
    both(|store, tree| {
        let empty = store.create_tree("empty").unwrap();
        for (_, run) in AROUND {
            for (_, begin) in DROPS {
                end_within(store, tree, run, begin(store, tree, &empty)).unwrap();
                is_as_before(store, tree);
                assert_eq!(empty.entries().count(), 0);
            }
        }
    });
}

fn is_as_before(store: &Store, tree: &Tree) {
    assert_eq!(tree.entries().count(), 2);
    assert_eq!(store.trees().unwrap(), ["empty", "t"]);
    // Pages that could not be freed in the callback are freed now.
    store.sync().unwrap();
    let stat = store.stat().unwrap();
    assert_eq!((stat.views, stat.version_bytes), (0, 0));
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
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

/// A store takes a backup to repair its pages from, although a change is under way: it changes
/// nothing by that.
#[test]
fn a_backup_to_repair_from_can_be_named_within() {
    within_patience(|| {
        let folder = tempfile::tempdir().unwrap();
        let (path, backup) = (folder.path().join("a.vellum"), folder.path().join("backup"));
        let store = Store::create(path, &options(256, 1).log(true)).unwrap();
        let tree = filled(&store);
        let goes_on = |_| ControlFlow::Continue(());
        store.backup(&backup, &BackupOptions::new(), &mut { goes_on }).unwrap();
        for (_, run) in AROUND {
            let called = Cell::new(false);
            run(&store, &tree, &|| {
                store.repair_from(&backup, &[], &mut { goes_on }).unwrap();
                called.set(true);
            });
            assert!(called.get());
        }
        drop(tree);
        store.close().unwrap();
    });
}
