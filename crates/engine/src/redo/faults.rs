//! Logs and files that are full or fail: changes are refused with the cause, reads go on, and the
//! next opening finds what was acknowledged.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use vellum_log::{LogDevice as _, LogError, SimulatedDevice, SimulatedFault, SimulatedOptions};
use vellum_pool::device::{
    Call, Device, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation,
};
use vellum_testing::patience::{PATIENCE, eventually};

use crate::redo::log::{RedoLog, RoomPromise};
use crate::{Error, Options, Store, Tree};

fn log(segments: u64) -> Arc<SimulatedDevice> {
    let options = SimulatedOptions { segments, segment_blocks: 16, ..Default::default() };
    Arc::new(SimulatedDevice::new(options))
}

fn options(log: &Arc<SimulatedDevice>, log_bytes: u64) -> Options {
    let options = Options::new().pool_bytes(1 << 20);
    Options { log: Some(log.clone()), log_bytes, evictors: 0, ..options }
}

fn put(tree: &Tree, number: u32) -> Result<(), Error> {
    tree.upsert(&number.to_be_bytes(), &[number as u8; 200]).map(drop)
}

/// Asserts that the store is sound and has the first `count` entries. It may have more.
fn expect(store: &Store, count: u32) {
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    let tree = store.tree("tree").unwrap();
    let missing = (0..count).find(|number| !tree.contains(&number.to_be_bytes()).unwrap());
    assert_eq!(missing, None, "of {count}");
}

#[test]
fn a_full_log_refuses_changes_and_leaves_the_store_as_it_was() {
    for cut_in_background in [false, true] {
        let (log, file) = (log(64), Arc::new(MemoryDevice::new()));
        let options = Options { cut_in_background, ..options(&log, 1 << 20) };
        let store = Store::create_on(file.clone(), &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let mut count = 0;
        for _ in 0..3 {
            log.set_full(true);
            let error = loop {
                match put(&tree, count) {
                    Ok(()) => count += 1,
                    Err(error) => break error,
                }
            };
            assert!(matches!(error, Error::Log(LogError::Full { .. })), "{error}");
            assert_eq!(error.errno(), Errno::NOSPC.raw_os_error());
            assert!(!tree.contains(&count.to_be_bytes()).unwrap());
            assert!(tree.remove(&0_u32.to_be_bytes()).is_err());
            assert!(tree.clear().is_err() && store.create_tree("other").is_err());
            expect(&store, count);
            store.sync().unwrap();
            log.set_full(false);
            (0..200).for_each(|_| {
                put(&tree, count).unwrap();
                count += 1;
            });
        }
        store.sync().unwrap();
        let crashed = Arc::new(log.crash());
        let found = MemoryDevice::from_snapshot(file.snapshot());
        let store = Store::open_on(Arc::new(found), &self::options(&crashed, 1 << 20)).unwrap();
        expect(&store, count);
    }
}

/// The log of a crashed store may have no room left. Recovery gives it back.
#[test]
fn a_store_that_crashed_with_a_full_log_takes_changes() {
    // A checkpoint is due when the log is full, and not before.
    let (log, file) = (log(10), Arc::new(MemoryDevice::new()));
    let store = Store::create_on(file.clone(), &options(&log, 8 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    for count in 1..200 {
        (0..10).for_each(|number| put(&tree, 10 * count + number).unwrap());
        store.sync().unwrap();
        let crashed = Arc::new(log.crash());
        let found = Arc::new(MemoryDevice::from_snapshot(file.snapshot()));
        let store = Store::open_on(found, &options(&crashed, 8 << 20)).unwrap();
        put(&store.tree("tree").unwrap(), 0).unwrap();
    }
}

/// Many threads want the room of a log that is always nearly full.
#[test]
fn threads_share_the_room_of_a_small_log() {
    let (log, file) = (log(40), Arc::new(MemoryDevice::new()));
    let store = Store::create_on(file, &options(&log, 2 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    thread::scope(|scope| {
        for thread in 0..6 {
            let tree = &tree;
            scope.spawn(move || {
                (0..3000).for_each(|number| put(tree, 6 * number + thread).unwrap());
            });
        }
    });
    expect(&store, 18_000);
    store.close().unwrap();
}

#[test]
fn a_log_that_fails_takes_no_changes_and_keeps_what_was_acknowledged() {
    for fault in [SimulatedFault::Append, SimulatedFault::Sync] {
        let (log, file) = (log(64), Arc::new(MemoryDevice::new()));
        let store = Store::create_on(file.clone(), &options(&log, 1 << 20)).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let (mut count, mut synced) = (0, 0);
        log.fail(fault, 20);
        let error = loop {
            put(&tree, count).unwrap();
            count += 1;
            match store.sync() {
                Ok(()) => synced = count,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Log(LogError::Poisoned { .. })), "{error}");
        assert!(synced > 5, "{synced}");
        let refused = put(&tree, count).unwrap_err();
        assert!(matches!(refused, Error::Log(LogError::Poisoned { .. })), "{refused}");
        assert!(tree.contains(&(count - 1).to_be_bytes()).unwrap(), "reads go on");
        assert!(store.close().is_err());
        let crashed = Arc::new(log.crash());
        drop(tree);
        let store = Store::open_on(file, &options(&crashed, 1 << 20)).unwrap();
        expect(&store, synced);
    }
}

/// A change that ended in its midst has left pages that no record describes. They must not get into
/// the file when reads evict them.
#[test]
fn pages_of_a_broken_change_stay_out_of_the_file() {
    let (log, file) = (log(64), Arc::new(MemoryDevice::new()));
    let store = Store::create_on(file, &options(&log, 1 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    put(&tree, 1).unwrap();
    store.sync().unwrap();
    let file = &store.core.pages.file;
    let durable = store.core.pages.redo_log.as_ref().unwrap().durable();
    file.before_pages(durable - 1, &|| true).unwrap();
    file.poison_for("a change ended in its midst");
    let refused = file.before_pages(durable - 1, &|| true).unwrap_err().to_string();
    assert!(refused.contains("a change ended in its midst"), "{refused}");
    assert!(tree.contains(&1_u32.to_be_bytes()).unwrap(), "reads go on");
}

/// The kernel tells one thread that it could not write a page, and the next sync succeeds. A
/// checkpoint and the log sync the file, the latter because a record refers to a value that is not
/// in the log. Both syncs must fail, in whichever order they come.
#[test]
fn a_failed_sync_is_one_for_all() {
    let (log, file) = (log(64), FaultyDevice::new(MemoryDevice::new(), 1).unwrap());
    let plan = file.plan();
    let store = Store::create_on(Arc::new(file), &options(&log, 1 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    store.sync().unwrap();
    let pages = &store.core.pages;
    let redo_log = pages.redo_log.as_ref().unwrap();
    plan.hold(Operation::Sync);
    plan.fail_nth(Operation::Sync, 1, Fault::Error(Errno::IO));
    tree.upsert(b"long", &[1; 20_000]).unwrap();
    thread::scope(|scope| {
        let checkpoint = scope.spawn(|| pages.pool.sync_device());
        let record = scope.spawn(|| redo_log.wait_durable(redo_log.newest()));
        assert!(plan.wait_until_held(Operation::Sync, 1, PATIENCE));
        thread::sleep(Duration::from_millis(20));
        plan.release(Operation::Sync);
        assert!(checkpoint.join().unwrap().is_err());
        assert!(record.join().unwrap().is_err());
    });
}

/// A change ends in its midst while a checkpoint waits for it: the checkpoint must not save what it
/// left.
#[test]
fn a_checkpoint_saves_nothing_that_a_broken_change_has_left() {
    for has_log in [true, false] {
        let (log, file) = (log(64), Arc::new(MemoryDevice::new()));
        let options = match has_log {
            true => options(&log, 1 << 20),
            false => Options { log: None, ..options(&log, 1 << 20) }.log(false),
        };
        let store = Store::create_on(file, &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        (0..10).for_each(|number| put(&tree, number).unwrap());
        let pages = &store.core.pages;
        let before = pages.file.header();
        let change = pages.change_for(0).unwrap();
        thread::scope(|scope| {
            let checkpoint = scope.spawn(|| match &pages.redo_log {
                Some(log) => pages.cut_log_if(log, |_| true),
                None => store.sync(),
            });
            thread::sleep(Duration::from_millis(50));
            assert!(!checkpoint.is_finished());
            pages.file.poison_for("a change ended in its midst");
            drop(change);
            let error = checkpoint.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::Poisoned(_)), "{error}");
        });
        let after = pages.file.header();
        assert!(after.sequence == before.sequence || !after.clean, "{after:?}");
        assert_eq!(after.log.identity, before.log.identity);
    }
}

/// The file is full, so checkpoints fail, until the log is full, too. Once the file has room, the
/// log has.
#[test]
fn a_log_has_room_again_after_checkpoints_that_failed() {
    let (log, file) = (log(64), FaultyDevice::new(MemoryDevice::new(), 1).unwrap());
    let plan = file.plan();
    let options = Options { log_bytes: 1 << 20, ..options(&log, 1 << 20) };
    let store = Store::create_on(Arc::new(file), &options).unwrap();
    let tree = store.create_tree("tree").unwrap();
    let mut count = 0;
    plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC));
    let mut refused = 0;
    while refused < 20 {
        match put(&tree, count % 100) {
            Ok(()) => count += 1,
            Err(error) => {
                assert!(!matches!(error, Error::Poisoned(_)), "{error}");
                refused += 1;
            }
        }
    }
    plan.clear();
    put(&tree, 1).unwrap();
    expect(&store, count.min(100));
    store.close().unwrap();
}

/// The header is clean before the file gets shorter. A store that went on after that would lose its
/// changes at a crash.
#[test]
fn a_file_that_cannot_be_shortened_is_closed_all_the_same() {
    let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
    let faulty = FaultyDevice::new(memory.clone(), 1).unwrap();
    let plan = faulty.plan();
    let store = Store::create_on(Arc::new(faulty), &options(&log, 64 << 10)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..2000).for_each(|number| put(&tree, number).unwrap());
    store.drop_tree("tree").unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..10).for_each(|number| put(&tree, number).unwrap());
    let before = memory.pages().unwrap();
    plan.fail_always(Operation::Resize, Fault::Error(Errno::IO));
    store.close().unwrap();
    assert_eq!(memory.pages().unwrap(), before, "the file was not shortened");
    assert!(matches!(put(&tree, 10), Err(Error::Closed)));
    let store = Store::open_on(memory.clone(), &options(&log, 64 << 10)).unwrap();
    assert!(store.recovery().is_none());
    expect(&store, 10);
    store.close().unwrap();
    assert!(memory.pages().unwrap() < before);
}

/// A thread holds the page of a removed value at the end of the file while the store is closed, as
/// an evictor that writes it does, and lets go of it just before the close notes how long the file
/// is. Then the place comes free after that.
#[test]
fn a_closed_file_is_as_long_as_its_header_says() {
    let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
    let device = Arc::new(HookedDevice::new(memory.clone()));
    let store = Store::create_on(device.clone(), &options(&log, 64 << 10)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..10).for_each(|number| put(&tree, number).unwrap());
    // A gap, for the free map.
    tree.upsert(b"gap", &[7; 50_000]).unwrap();
    tree.upsert(b"long", &[7; 100_000]).unwrap();
    tree.remove(b"gap").unwrap();
    let (let_go, asked) = mpsc::channel();
    let (held, waits) = mpsc::channel();
    thread::scope(|scope| {
        let tree = &tree;
        scope.spawn(move || {
            let value = tree.get(b"long").unwrap();
            held.send(()).unwrap();
            asked.recv().unwrap();
            drop(value);
            held.send(()).unwrap();
        });
        waits.recv().unwrap();
        tree.remove(b"long").unwrap();
        let once = Mutex::new(Some((let_go, waits)));
        device.set_hook(move |call| {
            // The changed pages come first.
            if matches!(call, Call::Write(_))
                && let Some((let_go, waits)) = once.lock().unwrap().take()
            {
                let_go.send(()).unwrap();
                waits.recv().unwrap();
            }
        });
        store.close().unwrap();
    });
    let store = Store::open_on(memory, &options(&log, 64 << 10)).unwrap();
    expect(&store, 10);
}

#[test]
fn a_file_that_fails_takes_no_changes_and_the_log_has_what_was_acknowledged() {
    for (operation, cut_in_background) in
        [(Operation::Write, false), (Operation::Sync, false), (Operation::Sync, true)]
    {
        let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
        let faulty = FaultyDevice::new(memory.clone(), 1).unwrap();
        let plan = faulty.plan();
        let file: Arc<dyn Device> = Arc::new(faulty);
        let options = Options { cut_in_background, ..options(&log, 64 << 10) };
        let store = Store::create_on(file, &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        plan.fail_always(operation, Fault::Error(Errno::IO));
        let (mut count, mut synced) = (0, 0);
        let error = loop {
            if let Err(error) = put(&tree, count) {
                break error;
            }
            count += 1;
            match store.sync() {
                Ok(()) => synced = count,
                Err(error) => break error,
            }
        };
        let cause = Errno::IO.to_string();
        assert!(error.to_string().contains(cause.split(" (").next().unwrap_or("")), "{error}");
        assert!(synced > 5, "{synced}: {error}");
        let found: BTreeMap<_, _> = tree
            .range(..)
            .map(|entry| entry.map(|(key, _)| (key, ())))
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(found.len() as u32, count, "reads go on");
        assert!(store.close().is_err());
        drop(tree);
        let crashed = Arc::new(log.crash());
        let store = Store::open_on(memory, &self::options(&crashed, 64 << 10)).unwrap();
        expect(&store, synced);
    }
}

/// Takes the room of a log, but for the records that one change is promised.
fn fill(redo_log: &RedoLog) -> Vec<RoomPromise<'_>> {
    let mut promises = Vec::new();
    while let Ok(promise) = redo_log.promise_room(0) {
        promises.push(promise);
    }
    while redo_log.append_unpromised(&[0; 100]).is_ok() {}
    drop(promises.pop().unwrap());
    promises
}

/// The pages for which a full log has no room come free after the next checkpoint. Until then no
/// thread finds what they hold.
#[test]
fn pages_that_a_full_log_does_not_free_come_free_later() {
    let (log, file) = (log(40), Arc::new(MemoryDevice::new()));
    let options = options(&log, 64 << 20);
    let store = Store::create_on(file.clone(), &options).unwrap();
    let (tree, dropped) = (store.create_tree("tree").unwrap(), store.create_tree("other").unwrap());
    let used = store.stat().unwrap().used_pages;
    (0..1000).for_each(|number| put(&tree, number).unwrap());
    (0..1000).for_each(|number| put(&dropped, number).unwrap());
    let in_pieces = |tree: &Tree, key: &[u8]| {
        let mut writer = tree.writer(key).unwrap();
        writer.write_all(&[7; 400_000]).unwrap();
        writer.finish().unwrap();
    };
    in_pieces(&tree, b"long");
    in_pieces(&dropped, b"long");
    in_pieces(&tree, b"read");
    let reader = tree.reader(b"read").unwrap().unwrap();
    assert_eq!(tree.pop_first().unwrap().unwrap().0, 0_u32.to_be_bytes());
    let redo_log = store.core.pages.redo_log.as_ref().unwrap();
    let promises = fill(redo_log);
    let unlinked = &store.core.pages.unlinked;
    let unused = [0, 1, 2].map(|step| {
        match step {
            0 => {}
            1 => tree.clear().unwrap(),
            _ => store.drop_tree("other").unwrap(),
        }
        unlinked.frames()
    });
    assert!(unused.is_sorted_by(|before, after| before + 100 < *after), "{unused:?}");
    assert!(tree.pop_first().unwrap().is_none());
    put(&tree, 5000).unwrap();
    assert_eq!(tree.pop_first().unwrap().unwrap().0, 5000_u32.to_be_bytes());
    let promise = redo_log.promise_room(0).unwrap();
    drop(reader);
    assert_eq!(unlinked.frames(), unused[2]);
    store.core.pages.cut_log_if(redo_log, |_| true).unwrap();
    assert_eq!(unlinked.frames(), 0);
    drop((promises, promise));
    put(&tree, 1).unwrap();
    store.sync().unwrap();
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    store.close().unwrap();
    let store = Store::open_on(file, &options).unwrap();
    assert!(store.stat().unwrap().used_pages <= used, "no page was lost");
}

/// A store whose log has room for one change, with a tree that has 1,000 entries.
fn store_with_full_log() -> (Store, Tree) {
    let store = Store::create_on(Arc::new(MemoryDevice::new()), &options(&log(40), 64 << 20));
    let store = store.unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..1000).for_each(|key| put(&tree, key).unwrap());
    (store, tree)
}

#[test]
fn no_thread_goes_on_in_a_tree_that_was_cleared_with_a_full_log() {
    let (store, tree) = store_with_full_log();
    let (mut cursor, mut entries) = (tree.cursor(), tree.entries());
    assert!(cursor.first().unwrap() && entries.next_entry().unwrap().is_some());
    let mut extracted = tree.extract_if(.., |_, _| true);
    assert!(extracted.next().unwrap().is_ok());
    let promises = fill(store.core.pages.redo_log.as_ref().unwrap());
    tree.clear().unwrap();
    let snapshot = store.snapshot().unwrap();
    assert_eq!(snapshot.entries(&tree).unwrap().count(), 0);
    assert!(extracted.next().is_none());
    assert!(!cursor.forward().unwrap());
    assert!(entries.next_entry().unwrap().is_none());
    assert_eq!(snapshot.entries(&tree).unwrap().count(), 0);
    drop(promises);
}

#[test]
fn views_and_readers_keep_the_values_of_a_tree_that_goes_with_a_full_log() {
    for drops in [false, true] {
        let (store, tree) = store_with_full_log();
        let keys: Vec<[u8; 4]> = (0..20_u32).map(u32::to_be_bytes).collect();
        keys.iter().for_each(|key| _ = tree.upsert(key, &[1; 6000]).unwrap());
        let snapshot = store.snapshot().unwrap();
        let mut reader = tree.reader(&keys[0]).unwrap().unwrap();
        let redo_log = store.core.pages.redo_log.as_ref().unwrap();
        let promises = fill(redo_log);
        match drops {
            true => store.drop_tree("tree").unwrap(),
            false => tree.clear().unwrap(),
        }
        drop(promises);
        store.core.pages.cut_log_if(redo_log, |_| true).unwrap();
        let other = store.create_tree("other").unwrap();
        keys.iter().for_each(|key| _ = other.upsert(key, &[2; 6000]).unwrap());
        if !drops {
            keys.iter().for_each(|key| _ = tree.upsert(key, &[2; 6000]).unwrap());
        }
        for key in &keys {
            let value = snapshot.get(&tree, key).unwrap().unwrap();
            assert!(value[..] == [1; 6000], "{key:?}");
        }
        let mut value = Vec::new();
        reader.read_to_end(&mut value).unwrap();
        assert!(value == [1; 6000]);
    }
}

/// The index of a removed value cannot be read, so its pages are not known, and a snapshot sees it.
#[test]
fn a_value_that_a_snapshot_sees_is_not_lost() {
    let device = Arc::new(FaultyDevice::new(Arc::new(MemoryDevice::new()), 1).unwrap());
    let plan = device.plan();
    let options = Options { evictors: 0, ..Options::new().pool_bytes(1 << 20) };
    let store = Store::create_on(device, &options).unwrap();
    let (tree, other) = (store.create_tree("tree").unwrap(), store.create_tree("other").unwrap());
    let mut writer = tree.writer(b"long").unwrap();
    writer.write_all(&[7; 400_000]).unwrap();
    writer.finish().unwrap();
    (0..600_u32).for_each(|key| _ = other.upsert(&key.to_be_bytes(), &[3; 6000]).unwrap());
    let snapshot = store.snapshot().unwrap();
    assert!(tree.contains(b"long").unwrap());
    plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
    assert!(tree.remove(b"long").unwrap());
    plan.clear();
    assert!(store.core.pages.unlinked.has_unreadable());
    let report = store.free_lost_pages(&mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(report.lost_pages, 0);
    (1000..1200_u32).for_each(|key| _ = other.upsert(&key.to_be_bytes(), &[4; 6000]).unwrap());
    let mut value = Vec::new();
    let mut reader = snapshot.reader(&tree, b"long").unwrap().unwrap();
    reader.read_to_end(&mut value).unwrap();
    assert!(value == [7; 400_000]);
}

/// What a synced transaction has read survives a crash, also if a bulk load has written it.
#[test]
fn a_read_of_a_bulk_load_is_durable() {
    let (log, file) = (log(200), Arc::new(MemoryDevice::new()));
    let store = Store::create_on(file.clone(), &options(&log, 64 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    store.sync().unwrap();
    tree.bulk_load((0..1000_u32).map(|key| (key.to_be_bytes(), [1; 200]))).unwrap();
    let transaction = store.begin().unwrap();
    assert!(transaction.get(&tree, &700_u32.to_be_bytes()).unwrap().is_some());
    transaction.commit().unwrap();
    let crashed = Arc::new(log.crash());
    let copy = Arc::new(MemoryDevice::from_snapshot(file.snapshot()));
    let store = Store::open_on(copy, &options(&crashed, 64 << 20)).unwrap();
    assert!(store.tree("tree").unwrap().contains(&700_u32.to_be_bytes()).unwrap());
}

/// A close that cannot write leaves the store open. Snapshots then still see what was dropped.
#[test]
fn a_snapshot_of_a_dropped_tree_survives_a_close_that_fails() {
    let device = FaultyDevice::new(MemoryDevice::new(), 1).unwrap();
    let (log, plan) = (log(40), device.plan());
    let store = Store::create_on(Arc::new(device), &options(&log, 64 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    (0..1000).for_each(|key| put(&tree, key).unwrap());
    let snapshot = store.snapshot().unwrap();
    store.drop_tree("tree").unwrap();
    plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC));
    assert!(store.clone().close().is_err());
    plan.clear();
    store.create_tree("other").unwrap();
    assert!(snapshot.contains(&tree, &9_u32.to_be_bytes()).unwrap());
    drop(snapshot);
    store.close().unwrap();
}

/// What the callbacks of commits were told.
#[derive(Debug, Default)]
struct Told {
    begun: AtomicUsize,
    are_durable: Mutex<Vec<bool>>,
}

/// Commits, with a callback that takes some time.
fn commit_then(store: &Store, tree: &Tree, number: u32, told: &Arc<Told>) {
    let mut transaction = store.begin().unwrap();
    transaction.put(tree, &number.to_be_bytes(), b"committed").unwrap();
    let told = told.clone();
    let slow = move |end: crate::Result<()>| {
        told.begun.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(50));
        told.are_durable.lock().unwrap().push(end.is_ok());
    };
    transaction.commit_then(slow).unwrap();
}

/// The store is poisoned, or has no room, or its log fails.
#[test]
fn no_callback_comes_after_a_close_that_fails() {
    for why in ["poison", "no room", "log"] {
        let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
        let device = FaultyDevice::new(memory.clone(), 1).unwrap();
        let plan = device.plan();
        let store = Store::create_on(Arc::new(device), &options(&log, 1 << 20)).unwrap();
        let tree = store.create_tree("tree").unwrap();
        // The close writes pages before it makes the log durable.
        let other = store.create_tree("other").unwrap();
        put(&other, 1).unwrap();
        let snapshot = store.snapshot().unwrap();
        store.drop_tree("other").unwrap();
        store.sync().unwrap();
        let told = Arc::new(Told::default());
        if why == "log" {
            log.fail(SimulatedFault::Append, 1);
        }
        let commits = if why == "poison" { 3 } else { 1 };
        (0..commits).for_each(|number| commit_then(&store, &tree, number, &told));
        if why == "poison" {
            store.core.pages.file.poison_for("a test");
        } else {
            plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC));
            // Or else the close would make the log durable.
            eventually("the callback runs", || told.begun.load(Ordering::Relaxed) > 0);
        }
        assert!(store.clone().close().is_err());
        let is_durable = why != "log";
        let were_told = told.are_durable.lock().unwrap().clone();
        assert_eq!(were_told, vec![is_durable; commits as usize], "{why}");
        // A poisoned store is closed now, with its log.
        assert_eq!(log.taken().load(Ordering::Relaxed), why != "poison", "{why}");
        let crashed = Arc::new(log.crash());
        let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
        let found = Store::open_on(copy, &options(&crashed, 1 << 20)).unwrap();
        let count = found.tree("tree").unwrap().entries().count() as u32;
        assert!(!is_durable || count == commits, "{why}: {count}");
        drop(snapshot);
        if why == "no room" {
            plan.clear();
            commit_then(&store, &tree, 9, &told);
            store.close().unwrap();
            assert_eq!(*told.are_durable.lock().unwrap(), [true, true]);
        }
    }
}

/// A close beside the callback's has the gate that the callback's commit waits for.
#[test]
fn a_callback_that_commits_closes_and_panics_keeps_no_thread_waiting() {
    let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
    let device = FaultyDevice::new(memory, 1).unwrap();
    let plan = device.plan();
    let store = Store::create_on(Arc::new(device), &options(&log, 1 << 20)).unwrap();
    let tree = store.create_tree("tree").unwrap();
    plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC));
    let told = Arc::new(Told::default());
    let mut transaction = store.begin().unwrap();
    transaction.put(&tree, b"first", b"committed").unwrap();
    let (within, its_tree, tells) = (store.clone(), tree.clone(), told.clone());
    let callback = move |end: crate::Result<()>| {
        tells.begun.fetch_add(1, Ordering::Relaxed);
        commit_then(&within, &its_tree, 2, &tells);
        assert!(within.close().is_err());
        tells.are_durable.lock().unwrap().push(end.is_ok());
        panic!("a test");
    };
    transaction.commit_then(callback).unwrap();
    assert!(store.clone().close().is_err());
    assert!(!told.are_durable.lock().unwrap().is_empty(), "the close has waited for it");
    eventually("the second one returns", || told.are_durable.lock().unwrap().len() == 2);
    assert_eq!(*told.are_durable.lock().unwrap(), [true, true]);
    plan.clear();
    drop(tree);
    store.close().unwrap();
}

/// A snapshot sees a value in pieces that a transaction, or a change by itself, removes, and the
/// process dies.
#[test]
fn pages_of_a_removed_value_that_a_view_sees_are_not_lost_in_a_crash() {
    for by_transaction in [false, true] {
        let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
        let store = Store::create_on(memory.clone(), &options(&log, 1 << 20)).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let mut writer = tree.writer(b"long").unwrap();
        writer.write_all(&[7; 400_000]).unwrap();
        writer.finish().unwrap();
        let snapshot = store.snapshot().unwrap();
        if by_transaction {
            let mut transaction = store.begin().unwrap();
            assert!(transaction.remove(&tree, b"long").unwrap());
            transaction.commit().unwrap();
        } else {
            assert!(tree.remove(b"long").unwrap());
        }
        let expect_none_lost = || {
            store.sync().unwrap();
            let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
            let found = Store::open_on(copy, &options(&Arc::new(log.crash()), 1 << 20)).unwrap();
            let report = found.check(&mut |_| ()).unwrap();
            assert!(report.is_sound() && report.lost_pages == 0, "{by_transaction}: {report:?}");
        };
        expect_none_lost();
        // Others do not get the places while the snapshot lives.
        (0..100_u32).for_each(|key| _ = tree.upsert(&key.to_be_bytes(), &[3; 6000]).unwrap());
        let mut value = Vec::new();
        let mut reader = snapshot.reader(&tree, b"long").unwrap().unwrap();
        reader.read_to_end(&mut value).unwrap();
        assert!(value == [7; 400_000]);
        drop(reader);
        drop(snapshot);
        (100..200_u32).for_each(|key| _ = tree.upsert(&key.to_be_bytes(), &[4; 6000]).unwrap());
        expect_none_lost();
    }
}

/// The process dies after the record that removes a value in pieces, and before those that free its
/// pages: their index cannot be read.
#[test]
fn pages_of_a_removed_value_are_not_lost_in_a_crash_before_they_are_free() {
    for what in ["remove", "replace"] {
        let (log, memory) = (log(64), Arc::new(MemoryDevice::new()));
        let store = Store::create_on(memory.clone(), &options(&log, 1 << 20)).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let before = store.stat().unwrap().used_pages;
        let mut writer = tree.writer(b"long").unwrap();
        writer.write_all(&[7; 400_000]).unwrap();
        writer.finish().unwrap();
        tree.upsert(b"short", b"").unwrap();
        drop(tree);
        store.close().unwrap();
        let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
        let plan = device.plan();
        let store = Store::open_on(device, &options(&log, 1 << 20)).unwrap();
        let tree = store.tree("tree").unwrap();
        // The leaf is in memory, and the index of the value is not.
        assert!(tree.contains(b"short").unwrap());
        plan.fail_always(Operation::Read, Fault::Error(Errno::IO));
        match what {
            "remove" => assert!(tree.remove(b"long").unwrap()),
            _ => assert!(tree.upsert(b"long", b"new").unwrap()),
        }
        store.sync().unwrap();
        let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
        let crashed = Arc::new(log.crash());
        // Others get the places, and the process dies again, perhaps before they are free.
        for writes in [0, 100, 0] {
            let found = Store::open_on(copy.clone(), &options(&crashed, 1 << 20)).unwrap();
            let tree = found.tree("tree").unwrap();
            (0..writes).for_each(|key: u32| {
                tree.upsert(&key.to_be_bytes(), &[3; 6000]).unwrap();
            });
            found.sync().unwrap();
            let report = found.check(&mut |_| ()).unwrap();
            assert!(report.is_sound() && report.lost_pages == 0, "{what}: {report:?}");
            assert_eq!(tree.get(b"long").unwrap().is_some(), what == "replace");
            (0..writes).for_each(|key| assert!(tree.remove(&key.to_be_bytes()).unwrap()));
            drop(tree);
            found.close().unwrap();
        }
        let found = Store::open_on(copy, &options(&crashed, 1 << 20)).unwrap();
        let report = found.check(&mut |_| ()).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0, "{what}: {report:?}");
        let used = found.stat().unwrap().used_pages;
        assert!(used < before + 50, "{what}: {used} pages are in use, and {before} before");
    }
}

/// A close writes a checkpoint before it frees what was dropped.
#[test]
fn a_snapshot_of_a_dropped_tree_survives_a_close_that_saves_nothing() {
    for (has_log, why) in [(true, "no room"), (false, "no room"), (true, "the log fails")] {
        let device = FaultyDevice::new(MemoryDevice::new(), 1).unwrap();
        let (log, plan) = (log(40), device.plan());
        let plain = Options { evictors: 0, ..Options::new().pool_bytes(64 << 20) };
        let options = if has_log { options(&log, 64 << 20) } else { plain };
        let store = Store::create_on(Arc::new(device), &options).unwrap();
        let tree = store.create_tree("tree").unwrap();
        let other = store.create_tree("other").unwrap();
        (0..1000).for_each(|key| put(&tree, key).unwrap());
        put(&other, 1).unwrap();
        let snapshot = store.snapshot().unwrap();
        store.drop_tree("tree").unwrap();
        store.core.pages.pool.write_dirty().unwrap();
        match why {
            "no room" => plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC)),
            _ => log.fail(SimulatedFault::Append, 1),
        }
        put(&other, 2).unwrap();
        assert!(store.clone().close().is_err());
        plan.clear();
        assert!(snapshot.contains(&tree, &9_u32.to_be_bytes()).unwrap(), "{has_log}: {why}");
        assert_eq!(put(&other, 3).is_ok(), why == "no room");
        assert!(snapshot.contains(&other, &1_u32.to_be_bytes()).unwrap());
        drop(snapshot);
        assert_eq!(store.close().is_ok(), why == "no room");
    }
}
