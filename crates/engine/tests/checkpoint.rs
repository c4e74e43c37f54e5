//! Checkpoints: which operations wait for them, and what they cost.
#![allow(clippy::unwrap_used)]

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use common::{PATIENCE, assert_sound, options};
use rustix::io::Errno;
use vellum::{Error, Store, Tree};
use vellum_pool::device::{
    Call, Device, DeviceInfo, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation, ReadDone,
    ReadRange, Surface, Write,
};
use vellum_testing::patience::{SetWhenDropped, eventually};

type Faulty = Arc<FaultyDevice<Arc<MemoryDevice>>>;

fn store(pool_pages: u64) -> (Arc<MemoryDevice>, Faulty, Store, Tree) {
    let memory = Arc::new(MemoryDevice::new());
    let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
    let store = Store::create_on(device.clone(), &options(pool_pages, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    store.sync().unwrap();
    (memory, device, store, tree)
}

fn put(tree: &Tree, from: u32, count: u32) {
    for number in from..from + count {
        tree.upsert(&number.to_be_bytes(), &[7; 100]).unwrap();
    }
}

/// The number of entries in the file if it is opened now.
fn found(memory: &MemoryDevice) -> Result<usize, Error> {
    let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
    let store = Store::open_on(copy, &options(64, 1))?;
    let count = store.tree("t").unwrap().entries().count();
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
    Ok(count)
}

/// The names of the trees in the file if it is opened now.
fn trees(memory: &MemoryDevice) -> Vec<String> {
    let copy = Arc::new(MemoryDevice::from_snapshot(memory.snapshot()));
    Store::open_on(copy, &options(64, 1)).unwrap().trees().unwrap()
}

/// A checkpoint of few pages writes the header with the list and then the pages: two syncs, and one
/// write of the page that the update has changed.
#[test]
fn a_small_commit_takes_two_syncs() {
    let (memory, device, store, tree) = store(64);
    put(&tree, 0, 1000);
    store.sync().unwrap();
    let before = device.plan().counts();
    put(&tree, 500, 1);
    tree.upsert(&500u32.to_be_bytes(), &[8; 100]).unwrap();
    store.sync().unwrap();
    let after = device.plan().counts();
    assert_eq!((after.syncs - before.syncs, after.writes - before.writes), (2, 2));
    // Nothing was changed since.
    store.sync().unwrap();
    assert_eq!(device.plan().counts().syncs, after.syncs);
    assert_eq!(found(&memory).unwrap(), 1000);
}

/// Changes go on after the cut of a checkpoint, whether it has copied few pages or written many.
/// The file has the state of the cut.
#[test]
fn changes_go_on_while_a_checkpoint_writes() {
    for count in [10, 20_000] {
        let (memory, device, store, tree) = store(4000);
        put(&tree, 0, count);
        let plan = device.plan();
        // Hold the first sync of the device, and then each later one in turn.
        for nth in 1..=3 {
            let (syncs, before) = (plan.counts().syncs, tree.entries().count());
            thread::scope(|scope| {
                plan.hold(Operation::Sync);
                let sync = scope.spawn(|| store.sync());
                // Or it ends without one more.
                let is_held_again = || loop {
                    if plan.wait_until_held(Operation::Sync, 1, Duration::from_millis(10)) {
                        break true;
                    }
                    if sync.is_finished() {
                        break false;
                    }
                };
                let mut reached = 0;
                for held in 1..=nth {
                    let last = held == nth;
                    if count > 10 && held == 1 {
                        // The sync of the "in use" mark, before the cut.
                        assert!(plan.wait_until_held(Operation::Sync, 1, PATIENCE));
                    } else if !is_held_again() {
                        break;
                    }
                    reached = held;
                    if last {
                        put(&tree, 1_000_000 + nth * 10, 5);
                        let other = store.create_tree(&format!("u{nth}")).unwrap();
                        put(&other, 0, 500);
                        store.drop_tree(&format!("u{nth}")).unwrap();
                        put(&store.create_tree("later").unwrap(), 0, 5);
                    }
                    plan.release_one(Operation::Sync);
                }
                plan.release(Operation::Sync);
                sync.join().unwrap().unwrap();
                // A checkpoint of few pages has two syncs, and one of many has three.
                assert_eq!(reached, if count == 10 { nth.min(2) } else { nth });
            });
            assert!(plan.counts().syncs >= syncs + 2);
            // The changes came after the cut, but for those during the sync before it.
            let is_before = count > 10 && nth == 1;
            let expected = if is_before { before + 5 } else { before };
            assert_eq!(found(&memory).unwrap(), expected, "{count}, sync {nth}");
            let expected = if is_before { &["later", "t"][..] } else { &["t"] };
            assert_eq!(trees(&memory), expected, "{count}, sync {nth}");
            if store.trees().unwrap().len() > 1 {
                store.drop_tree("later").unwrap();
            }
            store.sync().unwrap();
            put(&tree, 0, count);
        }
        store.sync().unwrap();
        assert_eq!(found(&memory).unwrap(), tree.entries().count());
        assert_sound(&store);
    }
}

/// One checkpoint serves all threads that wait for the checkpoint before it.
#[test]
fn one_checkpoint_serves_all_that_wait() {
    let (_, device, store, tree) = store(256);
    let plan = device.plan();
    put(&tree, 0, 1);
    let before = plan.counts().syncs;
    plan.hold(Operation::Sync);
    let ready = AtomicU32::new(0);
    thread::scope(|scope| {
        let first = scope.spawn(|| store.sync());
        assert!(plan.wait_until_held(Operation::Sync, 1, PATIENCE));
        let waiting: Vec<_> = (1..=16)
            .map(|number| {
                let (tree, store, ready) = (&tree, &store, &ready);
                scope.spawn(move || {
                    put(tree, number, 1);
                    ready.fetch_add(1, Ordering::SeqCst);
                    store.sync()
                })
            })
            .collect();
        eventually("all have changed something", || ready.load(Ordering::SeqCst) == 16);
        thread::sleep(Duration::from_millis(100));
        plan.release(Operation::Sync);
        first.join().unwrap().unwrap();
        waiting.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    });
    assert_eq!(plan.counts().syncs - before, 4, "two checkpoints of two syncs");
}

/// Every page of the pool is dirty, and writes are paused. A change that needs a frame waits for
/// the end of the checkpoint, and does not fail.
#[test]
fn a_pool_of_dirty_pages_waits_for_the_checkpoint() {
    let (memory, device, store, tree) = store(16);
    put(&tree, 0, 5);
    let plan = device.plan();
    thread::scope(|scope| {
        plan.hold(Operation::Sync);
        let sync = scope.spawn(|| store.sync());
        assert!(plan.wait_until_held(Operation::Sync, 1, PATIENCE));
        let (changes, done) = (scope.spawn(|| put(&tree, 0, 3000)), plan.counts().writes);
        thread::sleep(Duration::from_millis(500));
        assert!(!changes.is_finished() && plan.counts().writes == done);
        plan.release(Operation::Sync);
        sync.join().unwrap().unwrap();
        changes.join().unwrap();
    });
    store.sync().unwrap();
    assert_eq!(found(&memory).unwrap(), 3000);
}

/// The file has the header with the list, but lacks a listed page: it is not clean. It is not clean
/// either if the missing pages are written later, together with other pages.
#[test]
fn a_list_whose_pages_are_missing_is_refused() {
    let (memory, device, store, tree) = store(64);
    put(&tree, 0, 1000);
    store.sync().unwrap();
    put(&tree, 0, 2);
    tree.upsert(&900u32.to_be_bytes(), b"another").unwrap();
    tree.upsert(&5u32.to_be_bytes(), b"another").unwrap();
    // The header is the first write.
    device.plan().fail_nth(Operation::Write, 2, Fault::Error(Errno::NOSPC));
    let error = store.sync().unwrap_err();
    assert!(matches!(error, Error::DiskFull(_) | Error::Io(_)), "{error}");
    assert!(matches!(found(&memory), Err(Error::UncleanShutdown)));
    // The pool evicts pages, among them the missing ones. Other pages change.
    put(&tree, 1000, 20_000);
    assert!(matches!(found(&memory), Err(Error::UncleanShutdown)));
    store.sync().unwrap();
    assert_eq!(found(&memory).unwrap(), 21_000);
}

/// The headers of a closed file have no list, so older programs can read it.
#[test]
fn a_closed_file_lists_nothing() {
    let (memory, _, store, tree) = store(64);
    let versions = || {
        let bytes = memory.snapshot();
        [0, 1].map(|page| bytes[page * 4096 + 48])
    };
    let version = || {
        let bytes = memory.snapshot();
        let sequence = |page: &usize| {
            u64::from_le_bytes(bytes[page * 4096 + 72..page * 4096 + 80].try_into().unwrap())
        };
        bytes[(0..2).max_by_key(sequence).unwrap() * 4096 + 48]
    };
    put(&tree, 0, 10);
    store.sync().unwrap();
    assert_eq!(version(), 3);
    assert_eq!(store.stat().unwrap().format_version, 1);
    drop(tree);
    drop(store);
    assert_eq!(versions(), [1, 1]);
    assert_eq!(found(&memory).unwrap(), 10);
}

/// The device panics in a checkpoint, at each write of a header and at each sync. The store does
/// not consider the cut saved, and writes no page while the newest header may say "clean".
#[test]
fn a_panic_of_the_device_in_a_checkpoint_loses_nothing() {
    for (count, nth) in (1..=3).flat_map(|nth| [(10, nth), (20_000, nth), (20_000, nth + 3)]) {
        let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
        let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
        let tree = store.create_tree("t").unwrap();
        store.sync().unwrap();
        put(&tree, 0, count);
        let operations = AtomicU32::new(0);
        device.set_hook(move |call| {
            let counts = matches!(call, Call::Write([0 | 1, ..]) | Call::Sync);
            if counts && operations.fetch_add(1, Ordering::SeqCst) + 1 == nth {
                std::panic::resume_unwind(Box::new("a fault of the device"));
            }
        });
        let unwound = catch_unwind(AssertUnwindSafe(|| store.sync().unwrap()));
        device.clear_hook();
        if unwound.is_ok() {
            continue;
        }
        // The pool evicts changed pages.
        let removed = (0..count).step_by(2).filter(|n| tree.remove(&n.to_be_bytes()).unwrap());
        let left = count as usize - removed.count() + 10_000;
        put(&tree, 100_000, 10_000);
        if let Ok(found) = found(device.inner()) {
            assert!(found == 0 || found == count as usize, "{found} of {count}, at {nth}");
        }
        store.sync().unwrap();
        assert_eq!(found(device.inner()).unwrap(), left);
        // The same without a change after the panic.
        put(&tree, 1_000_000, 1);
        device.set_hook(|call| {
            if call == Call::Sync {
                std::panic::resume_unwind(Box::new("a fault of the device"));
            }
        });
        assert!(catch_unwind(AssertUnwindSafe(|| store.sync())).is_err());
        device.clear_hook();
        store.sync().unwrap();
        assert_eq!(found(device.inner()).unwrap(), left + 1);
    }
}

/// The device panics under the evictor. The store reports it, and closing the store ends.
#[test]
fn a_store_whose_device_panicked_in_an_eviction_can_be_closed() {
    let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
    let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    put(&tree, 0, 100);
    store.sync().unwrap();
    device.set_hook(|call| {
        let evicts = thread::current().name() == Some("vellum-evict");
        if evicts && matches!(call, Call::Write([2..=u64::MAX, ..])) {
            std::panic::resume_unwind(Box::new("a fault of the device"));
        }
    });
    let changes = (0..).map(|number: u32| tree.upsert(&number.to_be_bytes(), &[8; 100]));
    let refused = changes.take(10_000_000).find_map(Result::err).unwrap();
    assert!(matches!(&refused, Error::Poisoned(why) if why.contains("panicked")), "{refused}");
    device.clear_hook();
    // No page is locked: all of them can be read, and none keeps the store open.
    let (ended, ends) = std::sync::mpsc::channel();
    thread::spawn(move || {
        assert_eq!(&*tree.get(&5u32.to_be_bytes()).unwrap().unwrap(), [8; 100]);
        let closed = store.clone().close();
        drop((tree, store));
        ended.send(closed).unwrap();
    });
    let closed = ends.recv_timeout(PATIENCE).expect("closing does not end");
    assert!(matches!(closed, Err(Error::Poisoned(_))), "{closed:?}");
    assert!(matches!(found(device.inner()), Err(Error::UncleanShutdown)));
}

/// The evictor is writing a page while `close` writes the same page. The store unlocks the file
/// only after the evictor's write has ended.
#[test]
fn a_closed_file_is_unlocked_when_nothing_is_on_its_way_to_it() {
    let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
    let options = options(16, 1).evictors(0);
    let store = Store::create_on(device.clone(), &options).unwrap();
    let tree = store.create_tree("t").unwrap();
    put(&tree, 0, 5000);
    store.sync().unwrap();
    let [held, released, unlocked] = [(); 3].map(|()| Arc::new(AtomicBool::new(false)));
    let (holds, may_go, unlocks) = (held.clone(), released.clone(), unlocked.clone());
    device.set_hook(move |call| match call {
        Call::Write([2..=u64::MAX, ..]) if thread::current().name() == Some("late") => {
            holds.store(true, Ordering::SeqCst);
            while !may_go.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
        Call::Unlock => unlocks.store(true, Ordering::SeqCst),
        _ => {}
    });
    (0..5).for_each(|n| put(&tree, n * 1000, 1));
    thread::scope(|scope| {
        let late = thread::Builder::new().name("late".into());
        let reads = || (0..5000u32).try_for_each(|n| tree.get(&n.to_be_bytes()).map(drop));
        let let_go = SetWhenDropped(&released);
        let late = late.spawn_scoped(scope, reads).unwrap();
        let is_held = || held.load(Ordering::SeqCst) || late.is_finished();
        eventually("the thread writes a page", is_held);
        assert!(held.load(Ordering::SeqCst), "{:?}", late.join());
        let closing = scope.spawn(|| store.clone().close());
        thread::sleep(Duration::from_millis(300));
        let too_early = unlocked.load(Ordering::SeqCst);
        drop(let_go);
        closing.join().unwrap().unwrap();
        assert!(!too_early, "others may write to it while a page comes");
        assert!(unlocked.load(Ordering::SeqCst));
    });
}

/// If the header that says "in use" cannot be written, the error says so.
#[test]
fn an_error_names_the_mark_that_could_not_be_made() {
    let (_, device, store, tree) = store(16);
    put(&tree, 0, 5000);
    store.sync().unwrap();
    device.plan().fail_always(Operation::Sync, Fault::Error(Errno::IO));
    let error = (0..5000).find_map(|n: u32| tree.upsert(&n.to_be_bytes(), &[8; 100]).err());
    let error = error.unwrap().to_string();
    assert!(error.contains("the file could not be marked in use"), "{error}");
}

/// A file under a page cache. After a failed sync the cache keeps the written pages, considers them
/// clean and does not write them again.
#[derive(Debug, Default)]
struct Cached {
    cache: MemoryDevice,
    unwritten: Mutex<Vec<(usize, Vec<u8>)>>,
    durable: Mutex<Vec<u8>>,
    syncs_fail_from: AtomicU32,
    /// The contents after a power failure right after the file was truncated.
    cut_off: Mutex<Vec<Vec<u8>>>,
}

impl Device for Cached {
    fn read(&self, surface: &Surface, read: ReadRange) -> std::io::Result<()> {
        self.cache.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.cache.start_reads(surface, reads);
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        let bytes = writes.iter().map(|write| (write.page as usize * 4096, write.parts.concat()));
        self.unwritten.lock().unwrap().extend(bytes);
        self.cache.write(writes);
    }

    fn sync(&self) -> std::io::Result<()> {
        let unwritten = std::mem::take(&mut *self.unwritten.lock().unwrap());
        let nth = self.syncs_fail_from.load(Ordering::SeqCst);
        if nth == 1 {
            return Err(Errno::IO.into());
        }
        self.syncs_fail_from.store(nth.saturating_sub(1), Ordering::SeqCst);
        let mut durable = self.durable.lock().unwrap();
        durable.resize(self.cache.snapshot().len(), 0);
        for (at, bytes) in unwritten {
            durable[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn pages(&self) -> std::io::Result<u64> {
        self.cache.pages()
    }

    fn resize(&self, pages: u64) -> std::io::Result<()> {
        if pages < self.cache.pages()? {
            let mut durable = self.durable.lock().unwrap().clone();
            durable.truncate(pages as usize * 4096);
            self.cut_off.lock().unwrap().push(durable);
        }
        self.cache.resize(pages)
    }

    fn info(&self) -> DeviceInfo {
        self.cache.info()
    }
}

/// A sync of a checkpoint fails, and the process is killed. The next process finds pages in the
/// page cache that the device does not have: the listed pages, or the header. What that process
/// considers durable must survive a power failure.
#[test]
fn what_a_failed_sync_left_in_the_page_cache_is_written_again() {
    // The second sync makes the listed pages durable. After many changes, the last sync makes the
    // header durable.
    let mut opened_again = 0;
    for (count, nth) in [(10, 2), (2000, 2), (2000, 3)] {
        let device = Arc::new(Cached::default());
        let store = Store::create_on(device.clone(), &options(4000, 1)).unwrap();
        let tree = store.create_tree("t").unwrap();
        put(&tree, 0, 20_000);
        store.sync().unwrap();
        for number in 0..count {
            tree.upsert(&(number * 10 + 7_u32).to_be_bytes(), b"new").unwrap();
        }
        device.syncs_fail_from.store(nth, Ordering::SeqCst);
        assert!(store.sync().is_err());
        // The process is killed; the cache stays.
        std::mem::forget((tree, store));
        device.syncs_fail_from.store(0, Ordering::SeqCst);
        let read_only = options(4000, 1).read_only(true);
        let before = device.unwritten.lock().unwrap().len();
        let opened = Store::open_on(device.clone(), &read_only).map(drop);
        assert_eq!(device.unwritten.lock().unwrap().len(), before, "one that only reads writes");
        let store = match Store::open_on(device.clone(), &options(4000, 1)) {
            Ok(store) => store,
            Err(Error::UncleanShutdown) => {
                assert!(opened.is_err());
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let powerless = || {
            let bytes = device.durable.lock().unwrap().clone();
            let store = Store::open_on(Arc::new(MemoryDevice::from_snapshot(bytes)), &read_only)?;
            let tree = store.tree("t")?;
            let is_new =
                |n: u32| tree.get(&(n * 10 + 7).to_be_bytes()).unwrap().unwrap().len() == 3;
            assert!((0..count).all(is_new), "an old page came back");
            assert!(store.check(&mut |_| {})?.is_sound());
            Ok::<(), Error>(())
        };
        powerless().unwrap();
        let tree = store.tree("t").unwrap();
        for number in 0..3 {
            tree.upsert(&u32::MAX.to_be_bytes(), &[number]).unwrap();
            store.sync().unwrap();
            powerless().unwrap();
        }
        drop(tree);
        store.close().unwrap();
        powerless().unwrap();
        opened_again += 1;
    }
    assert!(opened_again > 0, "no store was opened after a failed sync");
}

/// The store truncates the file only while the durable header says "in use". With a header that
/// says "clean", opening would refuse the file as truncated.
#[test]
fn a_file_is_marked_in_use_before_it_is_trimmed() {
    let case = |synced: bool, reopened: bool, changed: bool| {
        let device = Arc::new(Cached::default());
        let open = || Store::open_on(device.clone(), &options(4000, 1)).unwrap();
        let mut store = Store::create_on(device.clone(), &options(4000, 1)).unwrap();
        store.create_tree("kept").unwrap().upsert(b"k", b"v").unwrap();
        let tree = store.create_tree("t").unwrap();
        put(&tree, 0, 20_000);
        store.sync().unwrap();
        tree.clear().unwrap();
        drop(tree);
        if synced {
            store.sync().unwrap();
        }
        if reopened {
            // The process is killed before it trims the file.
            std::mem::forget(store);
            store = open();
        }
        if changed {
            store.tree("t").unwrap().upsert(b"k", b"v").unwrap();
        }
        assert!(device.cut_off.lock().unwrap().is_empty());
        store.close().unwrap();
        let cut_off = std::mem::take(&mut *device.cut_off.lock().unwrap());
        assert!(!cut_off.is_empty(), "nothing was trimmed");
        for image in cut_off {
            let image = Arc::new(MemoryDevice::from_snapshot(image));
            let error = Store::open_on(image.clone(), &options(64, 1)).unwrap_err();
            assert!(matches!(error, Error::UncleanShutdown), "{error}");
            let salvaged = Store::open_on(image, &options(64, 1).salvage(true)).unwrap();
            assert_eq!(&*salvaged.tree("kept").unwrap().get(b"k").unwrap().unwrap(), b"v");
        }
        assert_eq!(&*open().tree("kept").unwrap().get(b"k").unwrap().unwrap(), b"v");
    };
    for changed in [false, true] {
        case(false, false, changed);
        case(true, false, changed);
        case(true, true, changed);
    }
}

/// A transaction whose sync fails is committed, and says so.
#[test]
fn a_commit_that_is_not_durable_says_so() {
    let (_, device, store, tree) = store(64);
    put(&tree, 0, 1000);
    store.sync().unwrap();
    // The first write is that of the header.
    device.plan().fail_nth(Operation::Write, 2, Fault::Error(Errno::NOSPC));
    let error = store.transact(|one| one.put(&tree, b"k", b"1")).unwrap_err();
    assert!(matches!(error, Error::NotDurable(_)), "{error}");
    assert!(tree.contains(b"k").unwrap());
    store.sync().unwrap();
}
