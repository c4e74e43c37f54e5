//! Write-back: which pages go to the device, when, and what follows if the device refuses.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{faulty, faulty_with, filled, generation, new_page, open, options, push_out, stamp};
use vellum_pool::device::{Call, Fault, FaultyDevice, HookedDevice, MemoryDevice, Operation};
use vellum_pool::{
    PAGE_SIZE, PageDamage, PageFormat, PageReader, PageRef, PoolError, PoolOptions, StatePlace,
};
use vellum_testing::patience::{SetWhenDropped, eventually};
use vellum_vm::{BackendChoice, BackendKind, Errno};

/// Where a page of these tests has its log sequence number, and where sealing puts a mark.
const LSN: usize = 32;
const MARK: usize = 40;
const SEALED: u64 = 0x5ea1_ed00_5ea1_ed00;

/// A format with log sequence numbers, whose log can fail.
#[derive(Default)]
struct Logged {
    log_fails: AtomicBool,
    not_now: AtomicBool,
    /// Runs before the next answer of the log, and says whether a page is still dirty then.
    meanwhile: Mutex<Option<Meanwhile>>,
    sealed: Mutex<Vec<(PageRef, usize)>>,
    durable_up_to: Mutex<Vec<u64>>,
}

type Meanwhile = Box<dyn FnOnce() -> bool + Send>;

impl std::fmt::Debug for Logged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Logged")
    }
}

impl PageFormat for Logged {
    fn seal(&self, page: PageRef, head: &mut [u8], body: &[u8]) -> u64 {
        assert_eq!(head.len(), PAGE_SIZE);
        head[MARK..MARK + 8].copy_from_slice(&SEALED.to_le_bytes());
        self.sealed.lock().unwrap().push((page, head.len() + body.len()));
        (&*head).u64(LSN).unwrap()
    }

    fn verify(&self, page: PageRef, bytes: &[u8]) -> Result<(), PageDamage> {
        match bytes.u64(MARK) {
            Some(SEALED) => Ok(()),
            _ => Err(PageDamage { page, what: "it is not sealed".into() }),
        }
    }

    fn write_ahead(&self, lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        self.durable_up_to.lock().unwrap().push(lsn);
        // What runs may ask the log, too.
        let meanwhile = self.meanwhile.lock().unwrap().take();
        if let Some(meanwhile) = meanwhile {
            assert!(still_dirty());
            let expected = meanwhile();
            assert_eq!(still_dirty(), expected);
        }
        if self.log_fails.load(Ordering::SeqCst) {
            return Err(io::Error::other("the log is broken"));
        }
        if self.not_now.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }
}

fn set_lsn(pool: &vellum_pool::Pool, page: PageRef, lsn: u64) {
    pool.fix_exclusive(page).unwrap()[LSN..LSN + 8].copy_from_slice(&lsn.to_le_bytes());
}

#[test]
fn the_log_is_asked_for_the_greatest_number_before_each_batch() {
    let format = Arc::new(Logged::default());
    let options = PoolOptions { evictors: 0, eviction_batch: 4, ..options(64) };
    let (pool, plan) = faulty_with(format.clone(), options);
    let pages: Vec<_> = (0..8).map(|n| new_page(&pool, 1 + n % 3, 1)).collect();
    for (page, lsn) in pages.iter().zip([5, 70, 3, 9, 2, 1, 80, 4]) {
        set_lsn(&pool, *page, lsn);
    }
    // The log is asked for the number before the device gets a page.
    plan.hold(Operation::Write);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| pool.sync());
        assert!(plan.wait_until_held(Operation::Write, 1, common::PATIENCE));
        assert_eq!(*format.durable_up_to.lock().unwrap(), [70]);
        assert_eq!(plan.counts().writes, 0);
        plan.release(Operation::Write);
        sync.join().unwrap().unwrap();
    });
    assert_eq!(*format.durable_up_to.lock().unwrap(), [70, 80]);
    let sealed = format.sealed.lock().unwrap().clone();
    assert_eq!(sealed, pages.iter().map(|page| (*page, page.bytes())).collect::<Vec<_>>());
    assert_eq!(plan.counts().syncs, 1);
}

#[test]
fn a_log_that_fails_keeps_pages_dirty_and_in_memory() {
    let format = Arc::new(Logged::default());
    let options = PoolOptions { evictors: 0, patience: 20, ..options(16) };
    let (pool, plan) = faulty_with(format.clone(), options);
    format.log_fails.store(true, Ordering::SeqCst);
    let pages: Vec<_> = (0..16).map(|_| new_page(&pool, 1, 1)).collect();
    assert!(matches!(pool.allocate(1), Err(PoolError::Exhausted { because: Some(_), .. })));
    assert_eq!(plan.counts().writes, 0);
    pages.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
    let error = pool.sync().unwrap_err();
    assert!(matches!(error, PoolError::WriteAhead(_) | PoolError::Poisoned(_)), "{error}");
    assert_eq!(pool.stats().resident_frames, 16);
    assert_eq!(pool.stats().write_backs, 0);
}

/// A thread is about to write pages, and is delayed in the format. Meanwhile a checkpoint writes
/// copies of the same pages and ends. Then the thread writes nothing.
#[test]
fn pages_that_a_checkpoint_made_clean_are_not_written_again() {
    let format = Arc::new(Logged::default());
    let (pool, plan) = faulty_with(format.clone(), PoolOptions { evictors: 0, ..options(16) });
    let pool = Arc::new(pool);
    let pages = [new_page(&pool, 1, 1), new_page(&pool, 2, 1)];
    let (checkpointed, counts) = (pool.clone(), plan.clone());
    let writes = Arc::new(AtomicU64::new(0));
    let written = writes.clone();
    *format.meanwhile.lock().unwrap() = Some(Box::new(move || {
        let copies = checkpointed.copy_dirty(8, 64).unwrap().unwrap();
        checkpointed.write_copies(&copies).unwrap();
        checkpointed.clear_dirty_if_unchanged(&copies);
        written.store(counts.counts().writes, Ordering::SeqCst);
        false
    }));
    pool.write_dirty().unwrap();
    assert!(format.meanwhile.lock().unwrap().is_none());
    assert_eq!(plan.counts().writes, writes.load(Ordering::SeqCst));
    assert_eq!((plan.counts().writes, pool.dirty_pages()), (2, 0));
    pages.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
}

/// Of a batch, a checkpoint writes one page meanwhile: the thread writes only the other one.
#[test]
fn only_pages_that_are_still_dirty_are_written() {
    let format = Arc::new(Logged::default());
    let (pool, plan) = faulty_with(format.clone(), PoolOptions { evictors: 0, ..options(64) });
    let pool = Arc::new(pool);
    let pages = [new_page(&pool, 1, 1), new_page(&pool, 2, 1)];
    let other = pool.clone();
    *format.meanwhile.lock().unwrap() = Some(Box::new(move || {
        other.write_pages(&[pages[0].id]).unwrap();
        true
    }));
    pool.write_dirty().unwrap();
    assert!(format.meanwhile.lock().unwrap().is_none());
    assert_eq!((plan.counts().writes, pool.dirty_pages()), (2, 0));
    assert_eq!(pool.stats().write_backs, 2);
}

/// Two threads write the same page, as an evictor and a checkpoint may. The second one has written
/// it when the write of the first one fails: a sync must not succeed, because the failure may have
/// spoiled what the file had.
#[test]
fn a_sync_waits_for_earlier_writes_and_fails_as_they_do() {
    let device = FaultyDevice::new(MemoryDevice::new(), 1).unwrap();
    let plan = device.plan();
    let device = Arc::new(HookedDevice::new(device));
    let pool = open(device.clone(), PoolOptions { evictors: 0, ..options(16) });
    new_page(&pool, 1, 1);
    plan.fail_nth(Operation::Write, 1, Fault::Error(Errno::IO));
    let (writes, goes_on) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (held, may_go_on) = (writes.clone(), goes_on.clone());
    device.set_hook(move |call| {
        if matches!(call, Call::AfterWrite(_)) && held.fetch_add(1, Ordering::SeqCst) == 0 {
            while !may_go_on.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    });
    std::thread::scope(|scope| {
        let _goes_on = SetWhenDropped(&goes_on);
        let first = scope.spawn(|| pool.write_dirty());
        eventually("the first write is held", || writes.load(Ordering::SeqCst) == 1);
        let second = scope.spawn(|| pool.sync());
        eventually("the second write has ended", || pool.dirty_pages() == 0);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!second.is_finished(), "a write of the page is under way");
        goes_on.store(true, Ordering::SeqCst);
        assert!(matches!(first.join().unwrap(), Err(PoolError::Write { .. })));
        assert!(matches!(second.join().unwrap(), Err(PoolError::Poisoned(_))));
    });
}

/// While the pool must not write dirty pages, it evicts clean ones. If there are none, a thread
/// that needs a frame waits longer than it does in an exhausted pool.
#[test]
fn a_write_that_is_put_off_is_no_failure() {
    let format = Arc::new(Logged::default());
    // An exmap may have one frame less for pages, and this test needs all 16.
    let backend = BackendChoice::Only(BackendKind::Madvise);
    let states = StatePlace::Pages;
    let options = PoolOptions { evictors: 0, patience: 20, backend, states, ..options(16) };
    let (pool, plan) = faulty_with(format.clone(), options);
    let clean = new_page(&pool, 1, 1);
    pool.sync().unwrap();
    let writes = plan.counts().writes;
    format.not_now.store(true, Ordering::SeqCst);
    let dirty: Vec<_> = (0..16).map(|_| new_page(&pool, 1, 1)).collect();
    assert!(!pool.is_resident(clean), "the clean page was evicted");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.allocate(1).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(!waiting.is_finished());
        assert_eq!(plan.counts().writes, writes);
        format.not_now.store(false, Ordering::SeqCst);
        waiting.join().unwrap().unwrap();
    });
    pool.sync().unwrap();
    dirty.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
}

/// The checkpoint writes the pages as they were when it copied them. Afterwards the pages that have
/// not changed since are clean.
#[test]
fn copies_are_written_while_pages_change() {
    let (pool, plan) = faulty(PoolOptions { evictors: 0, ..options(64) });
    let pages = [new_page(&pool, 1, 1), new_page(&pool, 3, 1), new_page(&pool, 1, 1)];
    assert!(pool.copy_dirty(2, 64).unwrap().is_none() && pool.copy_dirty(9, 4).unwrap().is_none());
    let copies = pool.copy_dirty(3, 5).unwrap().unwrap();
    assert_eq!(pool.dirty_pages(), 3);
    stamp(&mut pool.fix_exclusive(pages[1]).unwrap(), pages[1], 2);
    // A freed page, whose place is used again by a page that begins there.
    pool.free_page(pages[2]).unwrap();
    let again = new_page(&pool, 1, 7);
    assert_eq!(again, pages[2]);
    pool.write_copies(&copies).unwrap();
    pool.clear_dirty_if_unchanged(&copies);
    assert_eq!((plan.counts().writes, pool.dirty_pages()), (3, 2));
    let rest = pool.copy_dirty(3, 5).unwrap().unwrap();
    assert_eq!(rest.iter().map(|copy| copy.page()).collect::<Vec<_>>(), pages[1..]);
    assert_eq!(common::stamped(rest[0].bytes(), pages[1]), Some(2));
    assert_eq!(common::stamped(copies[1].bytes(), pages[1]), Some(1));
}

#[test]
fn sealing_changes_the_file_and_not_the_memory() {
    let format = Arc::new(Logged::default());
    let memory = Arc::new(MemoryDevice::new());
    let space = vellum_pool::Space::new(0);
    let pool = vellum_pool::Pool::open(memory.clone(), format, space, options(64)).unwrap();
    let pages = [new_page(&pool, 1, 1), new_page(&pool, 3, 1)];
    pool.sync().unwrap();
    let file = memory.snapshot();
    for page in pages {
        assert_eq!((&*pool.fix_shared(page).unwrap()).u64(MARK), Some(0));
        let start = page.id.0 as usize * PAGE_SIZE;
        let stored = &file[start..start + page.bytes()];
        assert_eq!(stored.u64(MARK), Some(SEALED));
        assert_eq!(common::stamped(stored, page), Some(1));
    }
}

#[test]
fn clean_pages_are_not_written_again() {
    let (pool, plan) = faulty(PoolOptions { evictors: 0, ..options(32) });
    let pages = filled(&pool, 20);
    let writes = plan.counts().writes;
    for page in &pages {
        let guard = pool.fix_exclusive(*page).unwrap();
        assert_eq!(guard.len(), PAGE_SIZE); // looking is not writing
    }
    pool.sync().unwrap();
    assert_eq!(plan.counts().writes, writes);
    for page in &pages[..5] {
        stamp(&mut pool.fix_exclusive(*page).unwrap(), *page, 2);
    }
    pool.fix_exclusive(pages[7]).unwrap()[0] = 1;
    pool.sync().unwrap();
    assert_eq!(plan.counts().writes, writes + 6);
}

#[test]
fn downgrading_keeps_the_changes() {
    let (pool, _) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 64);
    let mut guard = pool.fix_exclusive(pages[0]).unwrap();
    stamp(&mut guard, pages[0], 2);
    let shared = guard.downgrade();
    assert!(shared.try_upgrade().is_ok());
    push_out(&pool, pages[0], &pages[1..]);
    assert_eq!(generation(&pool, pages[0]), Some(2));
}

#[test]
fn after_a_failed_write_changes_are_refused_and_reads_go_on() {
    let (pool, plan) = faulty(PoolOptions { evictors: 0, ..options(16) });
    let pages = filled(&pool, 12);
    for page in &pages[..4] {
        stamp(&mut pool.fix_exclusive(*page).unwrap(), *page, 2);
    }
    plan.fail_nth(Operation::Write, 2, Fault::Error(Errno::IO));
    let error = pool.sync().unwrap_err();
    assert!(matches!(error, PoolError::Write { .. }), "{error}");
    assert!(matches!(pool.sync(), Err(PoolError::Poisoned(_))));
    assert!(matches!(pool.allocate(1), Err(PoolError::Poisoned(_))));
    assert!(matches!(pool.free_page(pages[9]), Err(PoolError::Poisoned(_))));
    assert!(matches!(pool.trim(), Err(PoolError::Poisoned(_))));
    let guard = pool.fix_exclusive(pages[9]).unwrap();
    assert!(matches!(pool.free(guard), Err(PoolError::Poisoned(_))));
    assert!(matches!(pool.check_writable(), Err(PoolError::Poisoned(_))));
    for (index, page) in pages.iter().enumerate() {
        assert_eq!(generation(&pool, *page), Some(if index < 4 { 2 } else { 1 }));
    }
}

#[test]
fn a_failed_write_in_the_background_is_found_out() {
    let (pool, plan) = faulty(PoolOptions { patience: 50, ..options(16) });
    let pages = filled(&pool, 64);
    plan.fail_always(Operation::Write, Fault::Error(Errno::IO));
    let mut dirtied = Vec::new();
    for page in &pages {
        let Ok(mut guard) = pool.fix_exclusive(*page) else { break };
        stamp(&mut guard, *page, 2);
        dirtied.push(*page);
    }
    assert!(dirtied.len() < pages.len(), "more dirty pages than frames, and none was evicted");
    assert!(matches!(pool.sync(), Err(PoolError::Poisoned(_))));
    dirtied.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(2)));
}

#[test]
fn a_full_disk_poisons_nothing_and_passes() {
    for errno in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
        let (pool, plan) = faulty(PoolOptions { evictors: 0, patience: 20, ..options(16) });
        let pages = filled(&pool, 64);
        plan.fail_always(Operation::Write, Fault::Error(errno));
        for page in &pages[..16] {
            stamp(&mut pool.fix_exclusive(*page).unwrap(), *page, 2);
        }
        let error = pool.sync().unwrap_err();
        assert!(matches!(error, PoolError::Write { .. }), "{error}");
        let error = pool.fix_shared(pages[40]).unwrap_err();
        let said = format!("{error}");
        assert!(matches!(error, PoolError::Exhausted { because: Some(_), .. }), "{said}");
        pool.check_writable().unwrap();
        plan.clear();
        assert_eq!(generation(&pool, pages[40]), Some(1));
        pool.sync().unwrap();
        pages[..16].iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(2)));
    }
}

#[test]
fn a_failed_sync_poisons() {
    let (pool, plan) = faulty(options(16));
    let page = new_page(&pool, 1, 1);
    plan.fail_nth(Operation::Sync, 1, Fault::Error(Errno::IO));
    assert!(matches!(pool.sync(), Err(PoolError::Sync(_))));
    let error = pool.sync().unwrap_err();
    assert!(matches!(error, PoolError::Poisoned(_)), "{error}");
    assert_eq!(generation(&pool, page), Some(1));
}

/// After every sync the file must have all changes that ended before it, while threads write and
/// the evictor writes back.
#[test]
fn a_sync_covers_what_was_finished_before_it() {
    let memory = Arc::new(MemoryDevice::new());
    let device = FaultyDevice::new(memory.clone(), 1).unwrap();
    let pool = open(Arc::new(device), PoolOptions { eviction_batch: 4, ..options(32) });
    let pages: Vec<_> = (0..60).map(|_| new_page(&pool, 1, 0)).collect();
    let finished: Vec<_> = pages.iter().map(|_| AtomicU64::new(0)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..2 {
            let (pool, pages, finished, stop) = (&pool, &pages, &finished, &stop);
            scope.spawn(move || {
                let mut random = common::Random(thread);
                while !stop.load(Ordering::Relaxed) {
                    // Each thread has half of the pages for itself.
                    let index = random.index(30) * 2 + thread as usize;
                    let next = finished[index].load(Ordering::SeqCst) + 1;
                    stamp(&mut pool.fix_exclusive(pages[index]).unwrap(), pages[index], next);
                    finished[index].store(next, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..100 {
            let before: Vec<_> =
                finished.iter().map(|generation| generation.load(Ordering::SeqCst)).collect();
            pool.sync().unwrap();
            let file = memory.snapshot();
            for (page, before) in pages.iter().zip(before) {
                let start = page.id.0 as usize * PAGE_SIZE;
                let stored = common::stamped(&file[start..start + PAGE_SIZE], *page);
                assert!(
                    stored >= Some(before),
                    "{page}: {stored:?} in the file, {before} finished"
                );
            }
        }
    });
}
