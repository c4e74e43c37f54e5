//! Stores that open before all of their pages are redone: everything sees the redone pages, through
//! crashes, too.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;

use rustix::io::Errno;
use tempfile::tempdir;
use vellum_log::{Log, LogError, LogOptions, Lsn, RecordRef, SimulatedDevice, SimulatedOptions};
use vellum_pool::device::{Completion, Device, Fault, FaultyDevice, MemoryDevice, Operation};
use vellum_testing::patience::{SetWhenDropped, eventually};

use super::record::{RecordWriter, push_edit};
use super::record_places::PlaceIndex;
use crate::node::Edit;
use crate::{BackupOptions, Error, Options, Store, Tree};

const ENTRIES: u32 = 6000;

type Model = BTreeMap<u32, Vec<u8>>;

/// What a process has left that was killed.
struct Crashed {
    file: Vec<u8>,
    log: SimulatedDevice,
    model: Model,
}

impl Crashed {
    fn of(memory: &MemoryDevice, log: &SimulatedDevice, model: &Model) -> Crashed {
        Crashed { file: memory.snapshot(), log: log.kill(), model: model.clone() }
    }

    /// The same again.
    fn again(&self) -> Crashed {
        Crashed { file: self.file.clone(), log: self.log.kill(), model: self.model.clone() }
    }

    fn open(self, change: impl FnOnce(Options) -> Options) -> Opened {
        self.open_on(change, |memory| memory)
    }

    fn open_on<D: Device>(
        self,
        change: impl FnOnce(Options) -> Options,
        wrap: impl FnOnce(Arc<MemoryDevice>) -> Arc<D>,
    ) -> Opened {
        let memory = MemoryDevice::from_snapshot(self.file);
        let memory = Arc::new(memory.completing(Completion::Thread).unwrap());
        let log = Arc::new(self.log);
        let device: Arc<D> = wrap(memory.clone());
        let store = Store::open_on(device, &change(options(&log))).unwrap();
        Opened { store, memory, log, model: self.model }
    }
}

/// A store, the memory that its file and log lie in, and what its tree has.
struct Opened {
    store: Store,
    memory: Arc<MemoryDevice>,
    log: Arc<SimulatedDevice>,
    model: Model,
}

impl Opened {
    fn tree(&self) -> Tree {
        self.store.tree("tree").unwrap()
    }

    fn pending(&self) -> usize {
        self.store.core.pages.redo_log.as_ref().unwrap().pending.left()
    }

    fn put(&mut self, number: u32, value: Vec<u8>) {
        self.tree().upsert(&number.to_be_bytes(), &value).unwrap();
        self.model.insert(number, value);
    }

    fn cut(&self) {
        let pages = &self.store.core.pages;
        pages.cut_log_if(pages.redo_log.as_ref().unwrap(), |_| true).unwrap();
    }

    fn crash(self) -> Crashed {
        self.store.sync().unwrap();
        Crashed::of(&self.memory, &self.log, &self.model)
    }

    #[track_caller]
    fn expect(&self) {
        let tree = self.tree();
        let found = tree.entries().map(|entry| {
            let (key, value) = entry.unwrap();
            (u32::from_be_bytes(*key.first_chunk().unwrap()), value.to_vec())
        });
        let found: Model = found.collect();
        let wrong = self.model.iter().find(|(key, value)| found.get(key) != Some(value));
        assert_eq!(wrong.map(|(key, _)| key), None);
        assert_eq!(found.len(), self.model.len());
        let report = self.store.check(&mut |_| ()).unwrap();
        assert!(report.is_sound(), "{:?}", report.damage.first());
        assert_eq!(report.lost_pages, 0);
    }
}

fn options(log: &Arc<SimulatedDevice>) -> Options {
    Options {
        log: Some(log.clone()),
        log_bytes: 256 << 20,
        evictors: 0,
        cut_in_background: false,
        ..Options::new().pool_bytes(1 << 20)
    }
}

fn value(number: u32, round: u32) -> Vec<u8> {
    let len = if number % 100 == 7 { 9000 } else { 150 + number as usize % 60 };
    vec![(number + round) as u8; len]
}

fn with_few_records() -> Crashed {
    static FEW: LazyLock<Crashed> = LazyLock::new(|| make(1));
    FEW.again()
}

fn with_many_records() -> Crashed {
    static MANY: LazyLock<Crashed> = LazyLock::new(|| make(4));
    MANY.again()
}

/// A store with a pool far smaller than what its log has changed: the log has everything.
fn make(rounds: u32) -> Crashed {
    let segments = SimulatedOptions { segments: 4096, segment_blocks: 16, ..Default::default() };
    let (log, memory) = (Arc::new(SimulatedDevice::new(segments)), Arc::new(MemoryDevice::new()));
    let store = Store::create_on(memory.clone(), &options(&log)).unwrap();
    store.create_tree("tree").unwrap();
    let mut opened = Opened { store, memory, log, model: Model::new() };
    for round in 0..rounds {
        for number in 0..ENTRIES {
            let number = number.wrapping_mul(7919 + round) % ENTRIES;
            opened.put(number, value(number, round));
        }
    }
    let other = opened.store.create_tree("other").unwrap();
    (0..3000_u32).for_each(|number| _ = other.upsert(&number.to_be_bytes(), &[1; 100]).unwrap());
    opened.crash()
}

#[test]
fn an_opening_ends_after_one_reading_of_the_log() {
    let crashed = with_many_records();
    let (told, before) = (Arc::new(AtomicU64::new(0)), crashed.file.clone());
    let progress = told.clone();
    let opened = crashed.open(|options| {
        options.on_recovery(move |now| progress.store(now.bytes_done, Ordering::SeqCst))
    });
    let report = opened.store.recovery().unwrap();
    assert_eq!(told.load(Ordering::SeqCst), report.log_bytes);
    assert!(report.pages > 400 && opened.pending() as u64 > report.pages - 20, "{report:?}");
    // The header was written again.
    assert!(opened.memory.snapshot() == before);
    opened.expect();
    assert_eq!(opened.pending(), 0);
    let memory = opened.memory.clone();
    opened.store.close().unwrap();
    let plain = Options::new().pool_bytes(1 << 20);
    let store = Store::open_on(memory, &plain).unwrap();
    assert!(store.recovery().is_none());
    assert!(store.check(&mut |_| ()).unwrap().is_sound());
}

/// What a test does with a store of which most pages are pending.
type Work = (&'static str, fn(&mut Opened));

const WORKS: &[Work] = &[
    ("get", |opened| {
        let tree = opened.tree();
        for number in (0..ENTRIES).rev().step_by(97) {
            let found = tree.get(&number.to_be_bytes()).unwrap();
            assert_eq!(found.as_deref(), Some(&opened.model[&number][..]));
        }
    }),
    ("multi_get", |opened| {
        let keys: Vec<_> = (0..ENTRIES).step_by(13).map(u32::to_be_bytes).collect();
        let tree = opened.tree();
        let mut found = 0;
        let visit = |index: usize, value: Option<&[u8]>| {
            assert_eq!(value, Some(&opened.model[&(index as u32 * 13)][..]));
            found += 1;
        };
        tree.multi_get_with(&keys, visit).unwrap();
        assert_eq!(found, keys.len());
    }),
    ("scan", |opened| assert_eq!(opened.tree().entries().count(), ENTRIES as usize)),
    ("scan backwards", |opened| {
        assert_eq!(opened.tree().entries().rev().count(), ENTRIES as usize);
    }),
    ("upsert", |opened| {
        (0..ENTRIES).step_by(31).for_each(|number| opened.put(number, value(number, 9)));
    }),
    ("insert", |opened| {
        (ENTRIES..ENTRIES + 2000).for_each(|number| opened.put(number, value(number, 9)));
    }),
    ("remove", |opened| {
        for number in (0..ENTRIES).filter(|number| number % 40 != 3) {
            assert!(opened.tree().remove(&number.to_be_bytes()).unwrap());
            opened.model.remove(&number);
        }
    }),
    ("remove a range", |opened| {
        let bounds = [1000_u32, 4000].map(u32::to_be_bytes);
        assert_eq!(opened.tree().remove_range(bounds[0]..bounds[1]).unwrap(), 3000);
        opened.model.retain(|number, _| !(1000..4000).contains(number));
    }),
    ("transaction", |opened| {
        let tree = opened.tree();
        let changed = opened.store.transact(|transaction| {
            (0..ENTRIES)
                .step_by(400)
                .try_for_each(|number| transaction.put(&tree, &number.to_be_bytes(), b"new"))
        });
        changed.unwrap();
        let numbers = (0..ENTRIES).step_by(400);
        numbers.for_each(|number| _ = opened.model.insert(number, b"new".to_vec()));
    }),
    ("clear", |opened| {
        opened.tree().clear().unwrap();
        opened.model.clear();
        (0..3000).for_each(|number| opened.put(number, value(number, 9)));
    }),
    ("drop", |opened| {
        opened.store.drop_tree("other").unwrap();
        opened.store.drop_tree("tree").unwrap();
        opened.store.create_tree("tree").unwrap();
        opened.model.clear();
        (0..3000).for_each(|number| opened.put(number, value(number, 9)));
    }),
    ("load", |opened| {
        opened.store.drop_tree("other").unwrap();
        let tree = opened.store.create_tree("other").unwrap();
        let sorted = (0..20_000_u32).map(|number| (number.to_be_bytes(), [3; 80]));
        tree.bulk_load(sorted).unwrap();
        assert_eq!(tree.entries().count(), 20_000);
    }),
    ("checkpoint", |opened| {
        opened.cut();
        assert_eq!(opened.pending(), 0);
    }),
    ("checkpoints amid changes", |opened| {
        for round in 0..5 {
            (0..200).for_each(|number| opened.put(number * 7, value(number, round)));
            opened.cut();
        }
    }),
    ("compaction", |opened| {
        opened.store.drop_tree("other").unwrap();
        opened.tree().remove_range(..4000_u32.to_be_bytes()).unwrap();
        opened.model.retain(|number, _| *number >= 4000);
        opened.store.compact(&mut |_| ControlFlow::Continue(())).unwrap();
    }),
    ("backup", |opened| {
        let folder = tempdir().unwrap();
        let (backup, restored) = (folder.path().join("backup"), folder.path().join("restored"));
        let goes_on = &mut |_| ControlFlow::Continue(());
        opened.store.backup(&backup, &BackupOptions::new(), goes_on).unwrap();
        crate::restore(&restored, &backup, &[], &crate::RestoreOptions::new(), goes_on).unwrap();
        let store = Store::open(&restored, &Options::new().pool_bytes(1 << 20)).unwrap();
        let found = store.tree("tree").unwrap();
        for (number, value) in &opened.model {
            assert_eq!(found.get(&number.to_be_bytes()).unwrap().as_deref(), Some(&value[..]));
        }
    }),
    ("check", |opened| {
        let report = opened.store.check(&mut |_| ()).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0);
    }),
    ("resize of the pool", |opened| {
        opened.store.resize_pool(512 << 10).unwrap();
        assert_eq!(opened.tree().entries().count(), ENTRIES as usize);
    }),
];

/// Each of them alone, right after the opening; then a crash, and a close.
#[test]
fn everything_sees_the_redone_pages() {
    for (name, work) in WORKS {
        println!("{name}");
        let mut opened = with_few_records().open(|options| options);
        assert!(opened.pending() > 300, "{name}");
        work(&mut opened);
        let crashed = opened.crash();
        let again = crashed.again().open(|options| options);
        again.expect();
        drop(again);
        let Opened { store, memory, log, model } = crashed.open(|options| options);
        store.close().unwrap();
        let plain = Options::new().pool_bytes(1 << 20);
        let store = Store::open_on(memory.clone(), &plain).unwrap();
        Opened { store, memory, log, model }.expect();
    }
}

/// The same, one after the other, while a thread redoes pages.
#[test]
fn everything_goes_on_while_a_thread_redoes_pages() {
    for (name, work) in WORKS.iter().filter(|(name, _)| !name.starts_with("resize")) {
        println!("{name}");
        let in_background = |options| Options { cut_in_background: true, evictors: 1, ..options };
        let mut opened = with_few_records().open(in_background);
        work(&mut opened);
        opened.expect();
        eventually("all pages are redone", || opened.pending() == 0);
        opened.crash().open(|options| options).expect();
    }
}

#[test]
fn a_thread_redoes_what_nobody_reads() {
    let in_background = |options| Options { cut_in_background: true, ..options };
    let opened = with_many_records().open(in_background);
    eventually("all pages are redone", || opened.pending() == 0);
    opened.expect();
}

/// Each crash comes when some pages are redone, some are in the file, and some are not.
#[test]
fn a_crash_amid_it_is_one_more_crash() {
    let mut crashed = with_many_records();
    for round in 0..6 {
        let bytes = [64 << 10, 8 << 10, 300 << 10][round as usize % 3];
        let mut opened = crashed.open(|options| Options { recovery_bytes: Some(bytes), ..options });
        assert!(opened.pending() > 250);
        let tree = opened.tree();
        for number in (round * 400..ENTRIES).step_by(17).take(40) {
            let found = tree.get(&number.to_be_bytes()).unwrap();
            assert_eq!(found.as_deref(), Some(&opened.model[&number][..]));
        }
        (round * 50..round * 50 + 20).for_each(|number| opened.put(number, value(number, 99)));
        assert!(opened.pending() > 100);
        crashed = opened.crash();
    }
    crashed.open(|options| options).expect();
}

/// What was redone, and what was not, is in the file after that.
#[test]
fn a_close_or_a_drop_amid_it_writes_all_pages() {
    for closes in [true, false] {
        for cut_in_background in [true, false] {
            let change = |options| Options { cut_in_background, ..options };
            let mut opened = with_few_records().open(change);
            (0..50).for_each(|number| opened.put(number * 100, value(number, 77)));
            let (memory, log, model) = (opened.memory.clone(), opened.log.clone(), opened.model);
            match closes {
                true => opened.store.close().unwrap(),
                false => drop(opened.store),
            }
            let store = Store::open_on(memory.clone(), &options(&log)).unwrap();
            assert!(store.recovery().is_none());
            Opened { store, memory, log, model }.expect();
        }
    }
}

/// Pages that nothing refers to are freed unread.
#[test]
fn a_page_that_is_freed_unread_is_not_pending_any_more() {
    let opened = with_few_records().open(|options| options);
    let (pages, before) = (&opened.store.core.pages, opened.pending());
    let log = pages.redo_log.as_ref().unwrap();
    let page = opened.store.tree("other").unwrap().tree_ref().root_page();
    assert!(log.pending.has(page));
    pages.pool.free_page(page).unwrap();
    assert!(!log.pending.has(page) && opened.pending() == before - 1);
    pages.redo_pending(log).unwrap();
    assert!(pages.pool.fix_shared_resident(page).is_none());
    opened.cut();
}

/// A place that was freed has other pages later, also such that the pool never reads.
#[test]
fn a_freed_page_is_not_pending_any_more() {
    let mut opened = with_few_records().open(|options| options);
    let before = opened.pending();
    opened.tree().remove_range(..3000_u32.to_be_bytes()).unwrap();
    opened.model.retain(|number, _| *number >= 3000);
    opened.store.drop_tree("other").unwrap();
    opened.store.sync().unwrap();
    assert!(opened.pending() < before);
    // Long values in the places of nodes.
    for number in 0..200 {
        opened.put(number, vec![number as u8; 20_000]);
    }
    opened.store.sync().unwrap();
    let pages = &opened.store.core.pages;
    pages.redo_pending(pages.redo_log.as_ref().unwrap()).unwrap();
    assert_eq!(opened.pending(), 0);
    opened.expect();
    opened.crash().open(|options| options).expect();
}

#[test]
fn threads_read_pending_pages_together() {
    let in_background = |options| Options { cut_in_background: true, evictors: 1, ..options };
    let opened = with_many_records().open(in_background);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let (opened, ended) = (&opened, &ended);
        let end = SetWhenDropped(ended);
        for thread in 0..4_u32 {
            scope.spawn(move || {
                let tree = opened.tree();
                for number in 0..ENTRIES {
                    let number = number.wrapping_mul(7919 + 2 * thread) % ENTRIES;
                    let found = tree.get(&number.to_be_bytes()).unwrap();
                    assert_eq!(found.as_deref(), Some(&opened.model[&number][..]));
                    if ended.load(Ordering::Relaxed) && !number.is_multiple_of(16) {
                        break;
                    }
                }
            });
        }
        opened.cut();
        assert_eq!(opened.pending(), 0);
        drop(end);
    });
    opened.expect();
}

/// A store with few records, on a device that fails when it is told to.
fn opened_on_faulty_device() -> (Opened, Arc<FaultyDevice<Arc<MemoryDevice>>>) {
    let mut faulty = None;
    let opened = with_few_records().open_on(
        |options| options,
        |memory| {
            let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
            faulty = Some(device.clone());
            device
        },
    );
    let device = faulty.unwrap();
    (opened, device)
}

/// Its image is in the log, so nothing of the file is needed.
#[test]
fn a_pending_page_is_made_without_a_read_of_the_file() {
    let (opened, device) = opened_on_faulty_device();
    let reads = device.plan().counts().reads;
    let (tree, before) = (opened.tree(), opened.pending());
    for number in (0..ENTRIES).step_by(300).filter(|number| number % 100 != 7) {
        assert!(tree.get(&number.to_be_bytes()).unwrap().is_some());
    }
    assert!(opened.pending() + 15 < before);
    // Pages that were redone, and evicted since.
    assert!(device.plan().counts().reads - reads < 20);
}

/// A pool that writes nothing any more never writes what it redoes. So it redoes a page each time
/// that it reads it.
#[test]
fn a_pool_that_writes_nothing_redoes_pages_again() {
    let (opened, device) = opened_on_faulty_device();
    let log = opened.store.core.pages.redo_log.clone().unwrap();
    device.plan().fail_always(Operation::Write, Fault::Error(Errno::IO));
    assert!(opened.store.core.pages.pool.write_dirty().is_err());
    let pending = opened.pending();
    let tree = opened.tree();
    for _ in 0..2 {
        for number in (0..ENTRIES).step_by(5).filter(|number| number % 100 != 7) {
            let found = tree.get(&number.to_be_bytes()).unwrap();
            assert_eq!(found.as_deref(), Some(&opened.model[&number][..]));
        }
    }
    assert!(pending > 300 && opened.pending() == pending, "{pending}");
    let error = opened.store.core.pages.redo_pending(&log).unwrap_err();
    assert!(matches!(error, Error::Poisoned(_)), "{error}");
    Crashed::of(&opened.memory, &opened.log, &opened.model).open(|options| options).expect();
}

/// The rest of the store can be read, and no checkpoint gives up what the log has.
#[test]
fn a_record_that_does_not_fit_a_pending_page_is_found_when_the_page_is_read() {
    let crashed = with_few_records();
    let opened = crashed.again().open(|options| options);
    let page = opened.store.tree("other").unwrap().tree_ref().root_page();
    drop(opened);
    let (mut edit, mut record, log) = (Vec::new(), Vec::new(), Arc::new(crashed.log));
    push_edit(&mut edit, Edit::Remove { index: 9999 });
    RecordWriter::new(&mut record, &[], &[]).edits(page, &edit);
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (open_log, _) = Log::open(log.clone(), &LogOptions::default(), None, visit).unwrap();
    open_log.wait_durable(open_log.append(&record).unwrap()).unwrap();
    drop(open_log);
    let mut crashed = Crashed { log: log.kill(), ..crashed };
    for _ in 0..2 {
        let opened = crashed.open(|options| options);
        let other = opened.store.tree("other").unwrap();
        let error = other.get(b"key").map(drop).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        assert_eq!(opened.tree().entries().count(), ENTRIES as usize);
        let pages = &opened.store.core.pages;
        assert!(pages.cut_log_if(pages.redo_log.as_ref().unwrap(), |_| true).is_err());
        assert!(opened.pending() > 0);
        drop(other);
        crashed = opened.crash();
    }
}

/// The lists of records have a few numbers for each page when they may not take more.
#[test]
fn lists_of_records_take_no_more_memory_than_they_may() {
    for bytes in [0, 800, 8 << 10, 1 << 20] {
        let mut index = PlaceIndex::new(bytes);
        for lsn in 0..100_000_u64 {
            let page = lsn % 100;
            match lsn < 100 || lsn == 50_007 {
                true => index.begin(page, Lsn(lsn * 100)),
                false => index.add(page, Lsn(lsn * 100)),
            }
            assert!(index.numbers() <= (bytes / 8).max(800), "{bytes}: {}", index.numbers());
        }
        let few = index.numbers();
        assert!(few > 200 && few > bytes.min(100_000) / 32, "{bytes}: {few}");
        let first: BTreeMap<_, _> = index.into_places().map(|(id, at)| (id, at.image())).collect();
        assert_eq!((first[&7], first[&8], first.len()), (Lsn(5_000_700), Lsn(800), 100));
    }
}
