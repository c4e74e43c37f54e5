//! Pools that change their size while they are in use.

#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::cmp::Ordering::{Equal, Greater, Less};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

use common::churn::Churn;
use common::{Random, faulty, generation, new_page, open, options};
use rustix::io::Errno;
use vellum_pool::device::{
    Device, DeviceInfo, Fault, FileDevice, FileOptions, MemoryDevice, Operation, ReadDone,
    ReadRange, Write,
};
use vellum_pool::{
    BackendKind, PAGE_SIZE, PageRef, Pool, PoolError, PoolOptions, RawPages, Space, StatePlace,
    Translation,
};
use vellum_testing::patience::SetWhenDropped;
use vellum_vm::Surface;

/// A pool that has `frames` frames and may have `most`.
fn resizable(translation: Translation, frames: u64, most: u64) -> PoolOptions {
    // Pages with states by frame lie on the surface alone.
    let states = match translation {
        Translation::Table => StatePlace::Pages,
        _ => options(frames).states,
    };
    let max_bytes = Some(bytes(most));
    PoolOptions { translation, states, max_bytes, evictors: 0, ..options(frames) }
}

fn bytes(frames: u64) -> u64 {
    frames * PAGE_SIZE as u64
}

fn pool_by(translation: Translation, frames: u64, most: u64) -> Pool {
    open(Arc::new(MemoryDevice::new()), resizable(translation, frames, most))
}

/// Those that this machine has.
fn translations() -> Vec<Translation> {
    let has_table = PoolOptions { states: StatePlace::Pages, ..options(64) };
    let table = PoolOptions { translation: Translation::Table, ..has_table };
    let device = Arc::new(MemoryDevice::new());
    let has_table = Pool::open(device, Arc::new(RawPages), Space::new(0), table).is_ok();
    let mut all = vec![Translation::Mmu, Translation::Auto];
    all.extend(has_table.then_some(Translation::Table));
    all
}

fn assert_all(pool: &Pool, pages: &[PageRef]) {
    for (page, value) in pages.iter().zip(0..) {
        assert_eq!(generation(pool, *page), Some(value), "{page}");
    }
}

#[test]
fn a_pool_shrinks_and_grows_and_keeps_its_pages() {
    for translation in translations() {
        let pool = pool_by(translation, 100, 400);
        let pages: Vec<PageRef> = (0..500).map(|value| new_page(&pool, 1, value)).collect();
        for frames in [30, 100, 400, 8, 399, 64, 64] {
            pool.resize(bytes(frames)).unwrap();
            assert_eq!(pool.capacity(), frames);
            assert_eq!(pool.stats().capacity_frames, frames);
            assert!(pool.stats().resident_frames <= frames);
            assert!(pool.kernel_resident_pages().unwrap() <= frames, "{translation:?}, {frames}");
            assert_all(&pool, &pages);
            // It uses what it has, but for what stays free ahead.
            assert!(pool.stats().resident_frames >= frames - frames / 4, "{translation:?}");
            assert!(pool.kernel_resident_pages().unwrap() <= frames, "{translation:?}, {frames}");
        }
    }
}

#[test]
fn a_file_may_outgrow_a_pool_that_shrinks() {
    let pool = pool_by(Translation::Auto, 256, 256);
    let is_given = std::env::var_os("VELLUM_TRANSLATION").is_some();
    if is_given || pool.backend() == BackendKind::Exmap {
        return println!("skipped: the pool has no choice");
    }
    let pages: Vec<PageRef> = (0..200).map(|value| new_page(&pool, 1, value)).collect();
    assert_eq!(pool.translation(), Translation::Mmu);
    pool.resize(bytes(100)).unwrap();
    assert_eq!(pool.translation(), Translation::Table);
    assert_all(&pool, &pages);
    assert!(pool.kernel_resident_pages().unwrap() <= 100);
    pool.resize(bytes(256)).unwrap();
    assert_eq!(pool.translation(), Translation::Mmu);
    assert_all(&pool, &pages);
    assert!(pool.kernel_resident_pages().unwrap() <= 256);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let pool = pool_by(Translation::Auto, 100, 200);
    let page = new_page(&pool, 1, 7);
    let text = |bytes| pool.resize(bytes).unwrap_err().to_string();
    assert!(matches!(pool.resize(bytes(201)), Err(PoolError::BeyondMaximum { max: 200 })));
    assert!(text(bytes(201)).contains("max_bytes"), "{}", text(bytes(201)));
    assert!(matches!(pool.resize(bytes(8) - 1), Err(PoolError::PoolTooSmall { frames: 7, .. })));
    assert!(matches!(pool.resize(0), Err(PoolError::PoolTooSmall { frames: 0, .. })));
    assert!(matches!(pool.resize(u64::MAX), Err(PoolError::PoolTooLarge { .. })));
    assert_eq!(pool.capacity(), 100);
    assert_eq!(generation(&pool, page), Some(7));
    // Without a maximum, it is the first size.
    let pool = open(Arc::new(MemoryDevice::new()), options(100));
    assert!(matches!(pool.resize(bytes(101)), Err(PoolError::BeyondMaximum { max: 100 })));
    pool.resize(bytes(50)).unwrap();
    pool.resize(bytes(100)).unwrap();
}

#[test]
fn guards_keep_a_pool_from_shrinking() {
    for translation in translations() {
        let options = PoolOptions { patience: 50, ..resizable(translation, 100, 100) };
        let pool = open(Arc::new(MemoryDevice::new()), options);
        let pages: Vec<PageRef> = (0..90).map(|value| new_page(&pool, 1, value)).collect();
        let guards: Vec<_> =
            pages[..50].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        let error = pool.resize(bytes(40)).unwrap_err();
        assert!(matches!(error, PoolError::CannotShrink { capacity: 40, .. }), "{error}");
        assert!(error.to_string().contains("drop guards"), "{error}");
        assert_eq!(pool.capacity(), 100);
        pool.resize(bytes(60)).unwrap();
        assert!(pool.kernel_resident_pages().unwrap() <= 60);
        for (guard, value) in guards.iter().zip(0..) {
            assert_eq!(common::stamped(&guard[..], guard.page()), Some(value));
        }
        drop(guards);
        pool.resize(bytes(40)).unwrap();
        assert_all(&pool, &pages);
    }
}

/// A device that counts the pages that each thread writes, and holds the writes of one thread.
#[derive(Debug, Default)]
struct HoldsWrites {
    memory: MemoryDevice,
    held: Mutex<Option<ThreadId>>,
    is_held: AtomicBool,
    let_go: Condvar,
    others_wrote: AtomicU64,
}

impl HoldsWrites {
    fn hold_this_thread(&self) {
        *self.held.lock().unwrap() = Some(thread::current().id());
    }

    fn let_go(&self) {
        *self.held.lock().unwrap() = None;
        self.let_go.notify_all();
    }
}

impl Device for HoldsWrites {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.memory.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.memory.start_reads(surface, reads);
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        let mut held = self.held.lock().unwrap();
        while *held == Some(thread::current().id()) {
            self.is_held.store(true, Ordering::SeqCst);
            held = self.let_go.wait(held).unwrap();
        }
        drop(held);
        self.others_wrote.fetch_add(writes.len() as u64, Ordering::SeqCst);
        self.memory.write(writes);
    }

    fn sync(&self) -> io::Result<()> {
        self.memory.sync()
    }

    fn pages(&self) -> io::Result<u64> {
        self.memory.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.memory.resize(pages)
    }

    fn info(&self) -> DeviceInfo {
        self.memory.info()
    }
}

#[test]
fn a_miss_does_not_wait_until_the_pool_is_as_small_as_it_is_to_be() {
    for translation in translations() {
        let device = Arc::new(HoldsWrites::default());
        let pool = open(device.clone(), resizable(translation, 1024, 1024));
        let pages: Vec<PageRef> = (0..1200).map(|value| new_page(&pool, 1, value)).collect();
        let batch = 1024 / 16;
        let (wrote, had_miss) = thread::scope(|scope| {
            let shrink = scope.spawn(|| {
                device.hold_this_thread();
                pool.resize(bytes(64))
            });
            let is_held = || device.is_held.load(Ordering::SeqCst) || shrink.is_finished();
            common::eventually("a write is held", is_held);
            device.others_wrote.store(0, Ordering::SeqCst);
            // Some of the first pages have left.
            let misses = pool.stats().misses;
            let mut reads = pages.iter().map(|page| pool.fix_shared(*page).map(drop));
            let had_miss = reads.any(|read| read.is_err() || pool.stats().misses > misses);
            let wrote = device.others_wrote.load(Ordering::SeqCst);
            device.let_go();
            shrink.join().unwrap().unwrap();
            (wrote, had_miss)
        });
        assert!(had_miss && wrote <= 2 * batch, "{translation:?}: a miss wrote {wrote} pages");
        assert!(pool.kernel_resident_pages().unwrap() <= 64);
        assert_all(&pool, &pages);
    }
}

#[test]
fn pages_that_cannot_be_written_keep_a_pool_from_shrinking() {
    let (pool, plan) = faulty(PoolOptions { patience: 50, ..options(100) });
    let pages: Vec<PageRef> = (0..90).map(|value| new_page(&pool, 1, value)).collect();
    plan.fail_always(Operation::Write, Fault::Error(Errno::NOSPC));
    let error = pool.resize(bytes(20)).unwrap_err();
    assert!(error.to_string().contains("writing back failed"), "{error}");
    assert_eq!(pool.capacity(), 100);
    assert_all(&pool, &pages);
    plan.clear();
    pool.resize(bytes(20)).unwrap();
    assert_all(&pool, &pages);
}

/// A page that is longer than the pool has become cannot be read, and can again afterwards.
#[test]
fn a_page_may_be_longer_than_the_pool_becomes() {
    for translation in translations() {
        let pool = pool_by(translation, 100, 100);
        let long = new_page(&pool, 40, 7);
        let others: Vec<PageRef> = (0..60).map(|value| new_page(&pool, 1, value)).collect();
        pool.resize(bytes(20)).unwrap();
        let error = pool.fix_shared(long).unwrap_err();
        assert!(matches!(error, PoolError::PageTooLarge { capacity: 20, .. }), "{error}");
        assert_all(&pool, &others);
        pool.resize(bytes(100)).unwrap();
        assert_eq!(generation(&pool, long), Some(7));
    }
}

/// A thread waits for the frames of a page, and the pool becomes shorter than the page. The thread
/// gets an error soon, though others go on.
#[test]
fn a_fix_under_way_ends_when_the_pool_becomes_too_small_for_it() {
    for translation in translations() {
        let pool = pool_by(translation, 100, 100);
        let long = new_page(&pool, 40, 7);
        let pages: Vec<PageRef> = (0..90).map(|value| new_page(&pool, 1, value)).collect();
        let guards: Vec<_> =
            pages[..70].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        let (ended, others) = (AtomicBool::new(false), &pages[70..]);
        thread::scope(|scope| {
            let fix = scope.spawn(|| {
                let fixed = pool.fix_shared(long).map(drop);
                ended.store(true, Ordering::Relaxed);
                fixed
            });
            let waits = || pool.stats().frame_waits > 0;
            common::eventually("the fix waits", || waits() || ended.load(Ordering::Relaxed));
            let resize = scope.spawn(|| pool.resize(bytes(20)));
            drop(guards);
            let mut random = Random(3);
            common::eventually("the fix ends", || {
                (0..50).for_each(|_| drop(pool.fix_shared(random.pick(others)).unwrap()));
                ended.load(Ordering::Relaxed)
            });
            match fix.join().unwrap() {
                Ok(()) | Err(PoolError::PageTooLarge { capacity: 20, .. }) => {}
                Err(error) => panic!("{error}"),
            }
            resize.join().unwrap().unwrap();
        });
        assert_all(&pool, &pages);
    }
}

/// A shrink that waits, and fails in the end, does not keep others from the pages that are there.
#[test]
fn a_pool_has_its_size_while_a_shrink_may_fail() {
    for translation in translations() {
        let options = PoolOptions { patience: 200, ..resizable(translation, 100, 100) };
        let pool = open(Arc::new(MemoryDevice::new()), options);
        let long = new_page(&pool, 30, 7);
        let pages: Vec<PageRef> = (0..50).map(|value| new_page(&pool, 1, value)).collect();
        let held = pool.fix_shared(long).unwrap();
        let guards: Vec<_> = pages.iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        thread::scope(|scope| {
            let resize = scope.spawn(|| pool.resize(bytes(20)));
            while !resize.is_finished() {
                assert_eq!(generation(&pool, long), Some(7));
                assert_eq!(pool.capacity(), 100);
            }
            resize.join().unwrap().unwrap_err();
        });
        drop((guards, held));
        pool.resize(bytes(20)).unwrap();
        assert_eq!(pool.capacity(), 20);
    }
}

#[test]
fn the_maximum_is_at_most_what_the_process_may_use() {
    for max in [1 << 47, u64::MAX] {
        for translation in translations() {
            let options = PoolOptions { max_bytes: Some(max), ..resizable(translation, 100, 100) };
            let pool = open(Arc::new(MemoryDevice::new()), options);
            pool.resize(bytes(200)).unwrap();
            assert!(matches!(pool.resize(max), Err(PoolError::PoolTooLarge { .. })));
        }
    }
}

/// A pool that is small at first has huge pages when it has grown.
#[test]
fn a_pool_that_grows_gets_huge_pages() {
    if vellum_vm::probe::huge_pages().is_err() || !translations().contains(&Translation::Table) {
        return println!("skipped: no huge pages here");
    }
    const CHUNK: u64 = 512;
    let pool = pool_by(Translation::Table, 100, 32 * CHUNK);
    let count = 40 * CHUNK;
    let pages: Vec<PageRef> = (0..count).map(|value| new_page(&pool, 1, value)).collect();
    assert_eq!(pool.huge_page_stats().collapsed, 0);
    assert!(pool.kernel_resident_pages().unwrap() <= 100);
    pool.resize(bytes(32 * CHUNK)).unwrap();
    assert_all(&pool, &pages);
    // One chunk was taken apart while the pool was smaller.
    assert_eq!(pool.huge_page_stats().collapsed, 31);
}

/// Slots go chunk by chunk: those that stay are in huge pages, and those that come back, too.
#[test]
fn a_pool_that_shrinks_keeps_its_huge_pages() {
    if vellum_vm::probe::huge_pages().is_err() || !translations().contains(&Translation::Table) {
        return println!("skipped: no huge pages here");
    }
    const CHUNK: u64 = 512;
    let pool = pool_by(Translation::Table, 16 * CHUNK, 24 * CHUNK);
    let count = 32 * CHUNK;
    let pages: Vec<PageRef> = (0..count).map(|value| new_page(&pool, 1, value)).collect();
    assert_eq!(pool.huge_page_stats().collapsed, 16);
    let mut random = Random(3);
    for chunks in [24, 9, 5, 16, 3, 20] {
        pool.resize(bytes(chunks * CHUNK)).unwrap();
        assert!(pool.kernel_resident_pages().unwrap() <= chunks * CHUNK);
        // What was not evicted has moved, and reads need no device.
        (0..4 * count).for_each(|_| {
            let value = random.index(pages.len());
            assert_eq!(generation(&pool, pages[value]), Some(value as u64));
        });
        assert_eq!(pool.huge_page_stats().collapsed, chunks);
        assert!(pool.kernel_resident_pages().unwrap() <= chunks * CHUNK);
    }
    assert_all(&pool, &pages);
    // A part of a chunk costs one huge page, which comes back with a whole chunk.
    pool.resize(bytes(10 * CHUNK - 100)).unwrap();
    assert!(pool.kernel_resident_pages().unwrap() <= 10 * CHUNK - 100);
    assert_all(&pool, &pages);
    assert_eq!(pool.huge_page_stats().collapsed, 9);
    pool.resize(bytes(4 * CHUNK)).unwrap();
    pool.resize(bytes(20 * CHUNK)).unwrap();
    assert_all(&pool, &pages);
    assert_all(&pool, &pages);
    assert_eq!(pool.huge_page_stats().collapsed, 20);
}

/// Guards hold pages in most chunks, and chunks with such pages stay. Others give up parts.
#[test]
fn held_pages_do_not_move() {
    if vellum_vm::probe::huge_pages().is_err() || !translations().contains(&Translation::Table) {
        return println!("skipped: no huge pages here");
    }
    const FRAMES: u64 = 16 << 9;
    let pool = pool_by(Translation::Table, FRAMES, FRAMES);
    let pages: Vec<PageRef> = (0..FRAMES - 8).map(|value| new_page(&pool, 1, value)).collect();
    let held = pages.iter().step_by(200);
    let guards: Vec<_> = held.map(|page| pool.fix_shared(*page).unwrap()).collect();
    pool.resize(bytes(FRAMES / 4)).unwrap();
    assert!(pool.kernel_resident_pages().unwrap() <= FRAMES / 4);
    for (guard, value) in guards.iter().zip((0..).step_by(200)) {
        assert_eq!(common::stamped(&guard[..], guard.page()), Some(value));
    }
    drop(guards);
    assert_all(&pool, &pages);
}

/// Threads read and write pages of all lengths while the size of the pool changes.
#[test]
fn the_size_changes_while_threads_work() {
    const MOST: u64 = 20 << 8;
    let folder = tempfile::tempdir().unwrap();
    for translation in translations() {
        let file = folder.path().join(format!("{translation:?}"));
        let device = FileDevice::create(file, FileOptions::default()).unwrap();
        // Reads into slots go through memory that the device knows.
        let device = Arc::new(device.with_prompt_storage());
        let options = PoolOptions { evictors: 1, ..resizable(translation, MOST, MOST) };
        let pool = open(device, options);
        let churn = Churn::new(&pool, 3_000, &[1, 1, 1, 2, 16]);
        let ended = AtomicBool::new(false);
        let (shrunk, grown) = (AtomicU64::new(0), AtomicU64::new(0));
        let is_enough = || {
            let (shrunk, grown) = (shrunk.load(Ordering::Relaxed), grown.load(Ordering::Relaxed));
            shrunk.min(grown) > 0 && shrunk + grown >= 5
        };
        thread::scope(|scope| {
            let _ending = SetWhenDropped(&ended);
            let resizing = scope.spawn(|| {
                let (mut random, mut before) = (Random(11), MOST);
                while !ended.load(Ordering::Relaxed) {
                    let frames = MOST / 8 + random.index((MOST - MOST / 8) as usize) as u64;
                    pool.resize(bytes(frames)).unwrap();
                    match frames.cmp(&before) {
                        Less => _ = shrunk.fetch_add(1, Ordering::Relaxed),
                        Equal => {}
                        Greater => _ = grown.fetch_add(1, Ordering::Relaxed),
                    }
                    before = frames;
                }
            });
            // The thread may begin late, and resizes take a while beside the others.
            while !is_enough() && !resizing.is_finished() {
                churn.crowd(&pool);
            }
        });
        churn.check(&pool);
        assert!(is_enough(), "{shrunk:?} {grown:?}");
        pool.resize(bytes(MOST / 8)).unwrap();
        assert!(pool.kernel_resident_pages().unwrap() <= MOST / 8, "{translation:?}");
        churn.check(&pool);
    }
}
