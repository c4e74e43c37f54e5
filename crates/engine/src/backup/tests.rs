//! Backups beside loads and transactions, and increments that name their own base.

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use rustix::io::Errno;
use tempfile::tempdir;
use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_pool::device::{Call, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation};

use crate::sync::lock;
use crate::{BackupOptions, BackupProgress, Error, Options, RestoreOptions, Store, Tree};

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// While a backup copies values, bulk loads end: one, or another one in each round. Once the backup
/// has its end, a transaction changes an entry of the last load and another one, and a checkpoint
/// writes both pages.
#[test]
fn a_backup_has_all_of_a_transaction_or_nothing() {
    for loads in [1, usize::MAX] {
        let segments =
            SimulatedOptions { segments: 1000, segment_blocks: 16, ..Default::default() };
        let options = Options {
            log: Some(Arc::new(SimulatedDevice::new(segments))),
            log_bytes: 1 << 20,
            evictors: 0,
            cut_in_background: false,
            ..Options::new().pool_bytes(32 << 20)
        };
        let folder = tempdir().unwrap();
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
        let redo_log = store.core.pages.redo_log.as_ref().unwrap();
        let other = store.create_tree("other").unwrap();
        other.upsert(b"key", b"old").unwrap();
        let last = 9_999_u32.to_be_bytes();
        let mut loaded = Vec::new();
        let (mut calls, mut copied, mut begun) = (0_u32, 0, None);
        let mut is_changed = false;
        let path = folder.path().join("backup");
        let backup = store.backup(&path, &BackupOptions::new(), &mut |progress| {
            let bytes = progress.bytes_done - copied;
            (calls, copied) = (calls + 1, progress.bytes_done);
            if is_changed {
                // The backup is checked.
            } else if redo_log.has_backup_ended() {
                is_changed = true;
                let tree: &Tree = loaded.last().unwrap();
                let changed = store.transact(|transaction| {
                    transaction.put(tree, &last, b"new")?;
                    transaction.put(&other, b"key", b"new")
                });
                changed.unwrap();
                store.core.pages.cut_log_if(redo_log, |_| true).unwrap();
            } else if calls == 1 {
                other.upsert(b"long", &[1; 100_000]).unwrap();
            } else if begun.is_some() || bytes == 25 << 12 {
                // The long value was copied. A load takes more than eight calls.
                let first = *begun.get_or_insert(calls);
                if (calls - first).is_multiple_of(8) && loaded.len() < loads {
                    let tree = store.create_tree(&calls.to_string()).unwrap();
                    let old = |key: u32| (key.to_be_bytes(), [b'o'; 200]);
                    tree.bulk_load((0..10_000).map(old)).unwrap();
                    loaded.push(tree);
                }
            }
            ControlFlow::Continue(())
        });
        backup.unwrap();
        assert!(is_changed && loaded.len() >= loads.min(3), "{} loads", loaded.len());
        let copy = Store::open(&path, &Options::new().log(false).pool_bytes(4 << 20)).unwrap();
        assert!(copy.check(&mut |_| ()).unwrap().is_sound());
        let first = |name: &str, key: &[u8]| {
            let tree = copy.tree(name).unwrap();
            tree.get(key).unwrap().map(|value| value[0])
        };
        let (one, two) = (first(&loaded.last().unwrap().name(), &last), first("other", b"key"));
        assert_eq!((one, two), (Some(b'o'), Some(b'o')), "{loads}");
    }
}

#[test]
fn an_increment_does_not_replace_its_base() {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let store = Store::create(at("store"), &Options::new().pool_bytes(4 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    store.backup(at("full"), &BackupOptions::new(), &mut goes_on).unwrap();
    tree.insert(b"a", b"1").unwrap();
    let increment = |base: &str, path: &str, replace: bool| {
        let options = BackupOptions::new().since(at(base)).replace(replace);
        store.backup(at(path), &options, &mut goes_on)
    };
    increment("full", "one", false).unwrap();
    tree.insert(b"b", b"2").unwrap();
    std::fs::hard_link(at("one"), at("same")).unwrap();
    for (base, path) in [("one", "one"), ("full", "full"), ("one", "same")] {
        let error = increment(base, path, true).unwrap_err();
        assert!(matches!(error, Error::BadOption(_)), "{error}");
        assert!(error.to_string().contains("would replace the backup"), "{error}");
    }
    let options = RestoreOptions::new();
    crate::restore(at("restored"), at("full"), &[at("one")], &options, &mut goes_on).unwrap();
    let restored = Store::open(at("restored"), &Options::new().pool_bytes(4 << 20)).unwrap();
    assert!(restored.tree("tree").unwrap().contains(b"a").unwrap());
}

fn new_log() -> SimulatedDevice {
    let segments = SimulatedOptions { segments: 1000, segment_blocks: 16, ..Default::default() };
    SimulatedDevice::new(segments)
}

fn with_log(log: &Arc<SimulatedDevice>) -> Options {
    Options {
        log: Some(log.clone()),
        log_bytes: 4 << 20,
        evictors: 0,
        cut_in_background: false,
        ..Options::new().pool_bytes(8 << 20)
    }
}

/// The value of the key `k` in the tree `tree` of a backup and an increment.
fn restored(folder: &Path, full: &Path, increment: &Path) -> Option<Vec<u8>> {
    let to = folder.join("restored");
    let options = RestoreOptions::new();
    crate::restore(&to, full, &[increment.into()], &options, &mut goes_on).unwrap();
    let store = Store::open(&to, &Options::new().log(false).pool_bytes(4 << 20)).unwrap();
    let tree = store.tree("tree").unwrap();
    let value = tree.get(b"k").unwrap();
    value.map(|value| value.to_vec())
}

/// A value is written to the file after the cut of a backup, and before the backup begins to copy.
/// Its record comes after the end of the backup, which may have its own free map in that place.
#[test]
fn an_increment_has_what_was_written_before_the_backup_copied() {
    for sync in 0..6 {
        written_before_the_backup_copied(sync);
    }
}

/// The value is written at this sync of the device during the backup, if there are so many.
fn written_before_the_backup_copied(sync: u32) {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
    let store = Store::create_on(device.clone(), &with_log(&Arc::new(new_log()))).unwrap();
    let tree = store.create_tree("tree").unwrap();
    tree.upsert(b"other", &[1; 100]).unwrap();
    let value: Vec<u8> = (0..300_000_u32).map(|at| (at / 500) as u8).collect();
    let (to_write, to_be_written) = mpsc::channel();
    let (written, is_written) = mpsc::channel();
    let (end, has_ended) = mpsc::channel();
    thread::scope(|scope| {
        let (tree, pages, value) = (&tree, &store.core.pages, &value);
        let writer = scope.spawn(move || {
            let mut writer = tree.writer(b"k").unwrap();
            to_be_written.recv().unwrap();
            writer.write_all(value).unwrap();
            pages.pool.write_dirty().unwrap();
            let _ = written.send(());
            has_ended.recv().unwrap();
            writer.finish().unwrap();
        });
        let (left, waits) = (AtomicU32::new(sync + 1), Mutex::new(is_written));
        let to_writer = to_write.clone();
        device.set_hook(move |call| {
            if call == Call::Sync && left.fetch_sub(1, Ordering::Relaxed) == 1 {
                to_writer.send(()).unwrap();
                lock(&waits).recv().unwrap();
            }
        });
        store.backup(at("full"), &BackupOptions::new(), &mut goes_on).unwrap();
        device.clear_hook();
        // In case that there were fewer.
        let _ = to_write.send(());
        end.send(()).unwrap();
        writer.join().unwrap();
    });
    let since = BackupOptions::new().since(at("full"));
    store.backup(at("one"), &since, &mut goes_on).unwrap();
    let found = restored(folder.path(), &at("full"), &at("one"));
    assert!(found.as_ref() == Some(&value), "{sync}");
}

/// A store that is recovered knows of the pages that its process wrote last, before it writes any.
#[test]
fn a_recovered_store_knows_what_was_written() {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let memory = Arc::new(MemoryDevice::new());
    let log = Arc::new(new_log());
    let store = Store::create_on(memory.clone(), &with_log(&log)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..5000_u32).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 100]).unwrap());
    tree.upsert(b"gone", &[2; 50_000]).unwrap();
    store.backup(at("full"), &BackupOptions::new(), &mut goes_on).unwrap();
    let base = store.core.pages.file.changes.base().unwrap();
    tree.upsert(&7_u32.to_be_bytes(), &[2; 100]).unwrap();
    tree.remove(b"gone").unwrap();
    let pages = &store.core.pages;
    let end = pages.pool.end();
    for _ in 0..2 {
        pages.cut_log_if(pages.redo_log.as_ref().unwrap(), |_| true).unwrap();
    }
    // It gets the place of the other one.
    tree.upsert(b"k", &[3; 50_000]).unwrap();
    assert_eq!(pages.pool.end(), end);
    store.sync().unwrap();
    let frames = |store: &Store| {
        let written = store.core.pages.file.changes.since(&base).unwrap();
        let end = store.core.pages.pool.end();
        (2..end).filter(|frame| written.has(*frame)).collect::<Vec<_>>()
    };
    pages.pool.write_dirty().unwrap();
    let expected = frames(&store);
    assert!(expected.len() > 13, "{expected:?}");
    let killed = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
    let again = Store::open_on(killed, &with_log(&Arc::new(log.kill()))).unwrap();
    let found = frames(&again);
    assert!(expected.iter().all(|frame| found.contains(frame)), "{expected:?}, {found:?}");
}

/// A disk that has no room for what was written since a backup is no reason for a checkpoint, or a
/// closing, to fail.
#[test]
fn a_checkpoint_needs_no_room_for_what_was_written() {
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let device = Arc::new(FaultyDevice::new(Arc::new(MemoryDevice::new()), 1).unwrap());
    let store = Store::create_on(device.clone(), &with_log(&Arc::new(new_log()))).unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..5000_u32).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 100]).unwrap());
    let pages = &store.core.pages;
    // The set of a file of this length does not fit in the page of the free map.
    pages.pool.free_place(pages.pool.allocate_place(40_000).unwrap()).unwrap();
    let cut = || pages.cut_log_if(pages.redo_log.as_ref().unwrap(), |_| true);
    cut().unwrap();
    cut().unwrap();
    let mut is_full = false;
    store
        .backup(at("full"), &BackupOptions::new(), &mut |progress| {
            if !std::mem::replace(&mut is_full, progress.bytes_done > 0) && is_full {
                device.plan().fail_always(Operation::Resize, Fault::Error(Errno::NOSPC));
                for frames in [1024, 1] {
                    while pages.pool.allocate_place(frames).is_ok() {}
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(!pages.file.header().changes);
    tree.upsert(&7_u32.to_be_bytes(), &[2; 100]).unwrap();
    cut().unwrap();
    assert!(!pages.file.header().changes);
    // What is in memory is still known.
    assert!(pages.file.changes.base().is_some());
    device.plan().clear();
    cut().unwrap();
    assert!(pages.file.header().changes);
}
