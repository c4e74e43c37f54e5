//! Logs and files that are full or fail: changes are refused with the cause, reads go on, and the
//! next opening finds what was acknowledged.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use rustix::io::Errno;
use vellum_log::{LogError, SimulatedDevice, SimulatedFault, SimulatedOptions};
use vellum_pool::device::{
    Call, Device, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation,
};

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
