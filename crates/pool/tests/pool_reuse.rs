//! Page ranges that are freed and used again with other sizes, while a thread still uses the old
//! reference: a sync, an eviction, a deferred free, or a wrong caller.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{PATIENCE, faulty, faulty_with, generation, new_page, options, stamp};
use rustix::io::Errno;
use vellum_pool::device::{Device, Fault, MemoryDevice, Operation};
use vellum_pool::{
    Arrival, Clock, PageDamage, PageFormat, PageRange, PageRef, Pool, PoolError, PoolOptions,
    RawPages, ReplacementPolicy, Residents, Space,
};

/// One page per batch and no background threads, so that the test decides on the order of events.
fn single_steps() -> PoolOptions {
    PoolOptions { eviction_batch: 1, evictors: 0, ..options(64) }
}

/// A format that records which pages the pool is about to write.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<PageRef>>);

impl PageFormat for Recorder {
    fn seal(&self, page: PageRef, _head: &mut [u8], _body: &[u8]) -> u64 {
        self.0.lock().unwrap().push(page);
        0
    }

    fn verify(&self, _page: PageRef, _bytes: &[u8]) -> Result<(), PageDamage> {
        Ok(())
    }

    fn write_ahead(&self, _lsn: u64, _still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_range_reused_as_a_longer_page_during_a_sync_is_written_whole() {
    let memory = Arc::new(MemoryDevice::new());
    let device = vellum_pool::device::FaultyDevice::new(memory.clone(), 1).unwrap();
    let plan = device.plan();
    let pool = common::open(Arc::new(device), single_steps());
    let pages: Vec<_> = (0..5).map(|_| new_page(&pool, 1, 1)).collect();

    plan.hold(Operation::Write);
    let long = std::thread::scope(|scope| {
        let sync = scope.spawn(|| pool.sync());
        // The sync has its list of pages, and is writing page 0.
        assert!(plan.wait_until_held(Operation::Write, 1, PATIENCE));
        pages[1..].iter().for_each(|page| pool.free_page(*page).unwrap());
        let long = new_page(&pool, 4, 2);
        assert_eq!(long, PageRef::new(1, 4));
        plan.release(Operation::Write);
        sync.join().unwrap().unwrap();
        long
    });

    pool.sync().unwrap();
    drop(pool);
    let pool = common::open(memory, options(64));
    assert_eq!(generation(&pool, long), Some(2));
}

#[test]
fn a_range_is_freed_whatever_pages_lie_in_it() {
    let pool = common::open(Arc::new(MemoryDevice::new()), single_steps());
    // The first ones are evicted, the last ones are resident, and a thread holds one.
    let long: Vec<_> = (0..40).map(|_| new_page(&pool, 4, 1)).collect();
    let short = new_page(&pool, 1, 1);
    let held = pool.fix_shared(long[38]).unwrap();
    let allocated = || pool.with_space(Space::allocated_pages);
    assert_eq!(allocated(), 161);

    assert_eq!(pool.free_range(PageRange::new(long[39].id.0, 2)), 0, "a part of a page");
    assert_eq!(pool.free_range(PageRange::new(long[39].id.0 + 1, 3)), 0, "a part of a page");
    assert_eq!(generation(&pool, long[39]), Some(1));
    assert_eq!(pool.free_range(PageRange::new(0, 161)), 161);
    assert_eq!((pool.frames_to_free(), allocated()), (4, 4));
    drop(held);
    assert_eq!((pool.frames_to_free(), allocated()), (0, 0));
    assert!(matches!(pool.fix_shared(short), Err(PoolError::PageFree(_))));

    let pages: Vec<_> = (0..100).map(|_| new_page(&pool, 1, 2)).collect();
    assert!(pages.iter().all(|page| page.id.0 < 161));
    assert!(pages.iter().all(|page| generation(&pool, *page) == Some(2)));
}

#[test]
fn a_range_reused_as_shorter_pages_during_a_sync_is_not_written_as_the_long_one() {
    let format = Arc::new(Recorder::default());
    let (pool, plan) = faulty_with(format.clone(), single_steps());
    new_page(&pool, 1, 1);
    let long = new_page(&pool, 4, 1);

    plan.hold(Operation::Write);
    std::thread::scope(|scope| {
        let sync = scope.spawn(|| pool.sync());
        assert!(plan.wait_until_held(Operation::Write, 1, PATIENCE));
        pool.free_page(long).unwrap();
        let short: Vec<_> = (0..4).map(|_| new_page(&pool, 1, 2)).collect();
        assert_eq!(short[0], PageRef::new(1, 1));
        let mut half_written = pool.fix_exclusive(short[2]).unwrap();
        half_written[0] = 0xff;
        plan.release(Operation::Write);
        sync.join().unwrap().unwrap();
        drop(half_written);
    });
    let written = format.0.lock().unwrap();
    assert!(!written.contains(&long), "pages with a writer were written: {written:?}");
}

/// A policy that proposes a stale reference. A thread that was preempted between asking the policy
/// and locking the page has such a reference.
#[derive(Debug)]
struct Late {
    clock: Clock,
    stale: Arc<Mutex<Option<PageRef>>>,
    /// How often a thread has visited all resident pages.
    visits: Arc<AtomicU64>,
}

impl ReplacementPolicy for Late {
    fn admit(&self, page: PageRef, arrival: Arrival) {
        self.clock.admit(page, arrival);
    }

    fn forget(&self, page: PageRef) {
        self.clock.forget(page);
    }

    fn contains(&self, page: PageRef) -> bool {
        self.clock.contains(page)
    }

    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        match *self.stale.lock().unwrap() {
            Some(stale) => {
                while residents.try_mark(stale) != vellum_pool::MarkOutcome::AlreadyMarked {}
                candidates.push(stale);
            }
            None => self.clock.candidates(residents, frames, pages, candidates),
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        self.visits.fetch_add(1, Ordering::Relaxed);
        self.clock.for_each(visit);
    }
}

fn evicts_by_a_stale_reference(dirty: bool) {
    let stale = Arc::new(Mutex::new(None));
    let visits = Arc::new(AtomicU64::new(0));
    let policy = Late { clock: Clock::new(8), stale: stale.clone(), visits: visits.clone() };
    let options = PoolOptions { policy: Some(Box::new(policy)), evictors: 0, ..options(8) };
    let memory = Arc::new(MemoryDevice::new());
    let pool = common::open(memory.clone(), PoolOptions { patience: 3, ..options });
    let page = new_page(&pool, 8, 1);
    if !dirty {
        pool.sync().unwrap();
    }
    *stale.lock().unwrap() = Some(PageRef::new(page.id.0, 1));
    assert!(matches!(pool.allocate(1), Err(PoolError::Exhausted { .. })));
    *stale.lock().unwrap() = None;
    assert_eq!(generation(&pool, page), Some(1));
    new_page(&pool, 8, 2); // evicts the first one
    assert_eq!(generation(&pool, page), Some(1), "dirty: {dirty}");
    pool.sync().unwrap();
    assert_eq!(visits.load(Ordering::Relaxed), 0, "a sync visits dirty pages only");
}

#[test]
fn a_late_eviction_does_not_evict_a_part_of_another_page() {
    evicts_by_a_stale_reference(false);
}

#[test]
fn a_late_eviction_does_not_write_a_part_of_another_page() {
    evicts_by_a_stale_reference(true);
}

#[test]
fn a_page_that_is_freed_twice_while_it_is_held_is_freed_once() {
    let (pool, _) = faulty(single_steps());
    let page = new_page(&pool, 1, 1);
    let held = pool.fix_shared(page).unwrap();
    pool.free_page(page).unwrap();
    assert!(matches!(pool.free_page(page), Err(PoolError::PageFree(_))));
    assert_eq!(pool.stats().frees, 0, "it is held");
    drop(held);

    let again = new_page(&pool, 1, 7);
    assert_eq!(again, page, "the place is free, and used again");
    for _ in 0..3 {
        new_page(&pool, 1, 1);
    }
    assert_eq!(generation(&pool, page), Some(7), "the new page was freed by the old call");
    assert_eq!(pool.stats().frees, 1);
}

#[test]
fn a_page_freed_with_a_wrong_length_is_an_error_and_stays() {
    let (pool, _) = faulty(single_steps());
    let pages = [new_page(&pool, 2, 1), new_page(&pool, 2, 1)];
    for wrong in [1, 3, 4] {
        let reference = PageRef::new(pages[0].id.0, wrong);
        let error = pool.free_page(reference).unwrap_err();
        assert!(matches!(error, PoolError::WrongSize(page) if page == reference), "{error}");
    }
    assert_eq!(generation(&pool, pages[0]), Some(1));
    pool.free_page(pages[0]).unwrap();
    assert_eq!(generation(&pool, pages[1]), Some(1));
}

#[test]
fn a_page_held_shared_is_freed_later() {
    let (pool, _) = faulty(single_steps());
    let page = new_page(&pool, 3, 1);
    let held = pool.fix_shared(page).unwrap();
    pool.free_page(page).unwrap();
    assert_eq!(common::stamped(&*held, page), Some(1), "the reader goes on");
    assert_eq!(pool.stats().frees, 0);
    assert_eq!(pool.with_space(Space::free_pages), 0);
    drop(held);
    pool.sync().unwrap();
    assert_eq!(pool.stats().frees, 1);
    assert_eq!(pool.with_space(Space::free_pages), 3);
    assert!(matches!(pool.fix_shared(page), Err(PoolError::PageFree(_))));
    assert_eq!(pool.stats().resident_frames, 0);
}

#[test]
fn the_range_of_a_freed_page_is_reused_zeroed_in_other_sizes() {
    let (pool, _) = faulty(single_steps());
    let mut random = common::Random(3);
    let mut live: Vec<(PageRef, u64)> = Vec::new();
    for round in 1..2_000 {
        if live.len() > 12 || (random.index(2) == 0 && !live.is_empty()) {
            let (page, generation) = live.swap_remove(random.index(live.len()));
            assert_eq!(common::generation(&pool, page), Some(generation));
            pool.free_page(page).unwrap();
            assert!(matches!(pool.optimistic(page), Err(PoolError::PageFree(_))));
            assert!(matches!(pool.free_page(page), Err(PoolError::PageFree(_))));
        } else {
            let frames = 1 + random.index(5) as u32;
            let mut guard = pool.allocate(frames).unwrap();
            assert!(guard.iter().all(|byte| *byte == 0), "{} is not zeroed", guard.page());
            let page = guard.page();
            stamp(&mut guard, page, round);
            live.push((page, round));
        }
    }
    let taken: u64 = live.iter().map(|(page, _)| u64::from(page.frames)).sum();
    assert_eq!(pool.with_space(Space::allocated_pages), taken);
    assert!(pool.end() < 150, "ranges are not reused: {}", pool.end());
    for (page, generation) in live {
        assert_eq!(common::generation(&pool, page), Some(generation));
    }
}

/// Threads allocate and free pages of changing sizes, so that ranges are split and merged all the
/// time, during evictions and syncs.
#[test]
fn reuse_in_other_sizes_during_evictions_and_syncs_keeps_pages_whole() {
    let memory = Arc::new(MemoryDevice::new());
    let pool = common::open(memory.clone(), PoolOptions { eviction_batch: 4, ..options(48) });
    let stop = AtomicBool::new(false);
    let live = std::thread::scope(|scope| {
        let (pool, stop) = (&pool, &stop);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                pool.sync().unwrap();
            }
        });
        let owners: Vec<_> = (0..3).map(|thread| scope.spawn(move || own(pool, thread))).collect();
        let live: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        stop.store(true, Ordering::Relaxed);
        live.into_iter().flat_map(Result::unwrap).collect::<Vec<_>>()
    });
    pool.sync().unwrap();
    let space = pool.with_space(Space::clone);
    drop(pool);
    let pool = Pool::open(memory, Arc::new(RawPages), space, options(48)).unwrap();
    for (page, expected) in live {
        assert_eq!(generation(&pool, page), Some(expected), "{page} in the file");
    }
}

/// The work of one such thread. Returns the pages that it has not freed.
fn own(pool: &Pool, thread: u64) -> Vec<(PageRef, u64)> {
    let mut random = common::Random(thread);
    let mut live: Vec<(PageRef, u64)> = Vec::new();
    for round in 1..3_000 {
        match random.index(4) {
            0 | 1 if live.len() < 25 => {
                let round = round << 8 | thread;
                live.push((new_page(pool, 1 + random.index(6) as u32, round), round));
            }
            0 | 1 => {
                let (page, expected) = live.swap_remove(random.index(live.len()));
                assert_eq!(generation(pool, page), Some(expected), "{page}");
                pool.free_page(page).unwrap();
            }
            _ if live.is_empty() => {}
            2 => {
                let index = random.index(live.len());
                let (page, expected) = live[index];
                let mut guard = pool.fix_exclusive(page).unwrap();
                assert_eq!(common::stamped(&*guard, page), Some(expected), "{page}");
                stamp(&mut guard, page, expected + (1 << 32));
                live[index].1 += 1 << 32;
            }
            _ => {
                let (page, expected) = random.pick(&live);
                assert_eq!(generation(pool, page), Some(expected), "{page}");
            }
        }
    }
    live
}

#[test]
fn the_map_of_free_pages_survives_a_reopening() {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new());
    let pool = common::open(device.clone(), single_steps());
    let pages: Vec<_> = (1..6).map(|frames| new_page(&pool, frames, u64::from(frames))).collect();
    pool.free_page(pages[1]).unwrap();
    pool.free_page(pages[3]).unwrap();
    pool.sync().unwrap();
    let map = pool.encode_space();
    drop(pool);

    let space = Space::decode(&map).unwrap();
    let pool = Pool::open(device, Arc::new(RawPages), space, single_steps()).unwrap();
    for index in [0, 2, 4] {
        assert_eq!(generation(&pool, pages[index]), Some(u64::from(pages[index].frames)));
    }
    assert_eq!(new_page(&pool, 4, 9).id, pages[3].id);
    assert_eq!(new_page(&pool, 2, 9).id, pages[1].id);
}

/// A page that was freed while a thread held it is in the free map, or among the pages that wait to
/// be freed, even while another thread checks which of them can be freed.
#[test]
fn a_snapshot_of_the_space_has_all_freed_pages() {
    let options = PoolOptions { evictors: 0, ..options(256) };
    let pool = common::open(Arc::new(MemoryDevice::new()), options);
    for _ in 0..200 {
        let pages: Vec<_> = (0..65).map(|_| pool.allocate(1).unwrap().page()).collect();
        let held: Vec<_> = pages[..64].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        pages[..64].iter().for_each(|page| pool.free_page(*page).unwrap());
        std::thread::scope(|scope| {
            let frees = scope.spawn(|| {
                drop(held);
                while pool.frames_to_free() > 0 {}
            });
            while !frees.is_finished() {
                let (space, given_back) = pool.snapshot_space();
                let space = Space::decode(&space.encode(given_back)).unwrap();
                assert_eq!(space.allocated_pages(), 1);
            }
        });
        pool.free_page(pages[64]).unwrap();
        pool.trim().unwrap();
    }
}

/// A log whose records are durable up to a number. A write-ahead makes further records durable.
#[derive(Debug)]
struct SlowLog {
    newest: AtomicU64,
    durable: AtomicU64,
}

impl PageFormat for SlowLog {
    fn seal(&self, _page: PageRef, _head: &mut [u8], _body: &[u8]) -> u64 {
        0
    }

    fn verify(&self, _page: PageRef, _bytes: &[u8]) -> Result<(), PageDamage> {
        Ok(())
    }

    fn write_ahead(&self, lsn: u64, _still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        self.durable.fetch_max(lsn + 1, Ordering::SeqCst);
        Ok(())
    }

    fn free_lsn(&self, _page: PageRef) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }

    fn durable_lsn(&self) -> u64 {
        self.durable.load(Ordering::SeqCst)
    }
}

#[test]
fn a_freed_place_is_reused_when_the_log_is_durable() {
    let log = Arc::new(SlowLog { newest: AtomicU64::new(10), durable: AtomicU64::new(10) });
    let (pool, plan) = faulty_with(log.clone(), single_steps());
    let [one, two, three] = [(); 3].map(|()| new_page(&pool, 1, 1));
    pool.free_page(one).unwrap();
    log.newest.store(20, Ordering::SeqCst);
    pool.free_page(two).unwrap();
    assert_eq!(new_page(&pool, 1, 2), PageRef::new(3, 1));
    assert_eq!(pool.frames_to_free(), 2);
    // A cut that covers both records counts both places as free.
    assert_eq!(pool.snapshot_space().1, [(0, 1), (1, 1)]);

    log.durable.store(11, Ordering::SeqCst);
    assert_eq!(new_page(&pool, 1, 3), one);
    assert_eq!(pool.frames_to_free(), 1);
    assert_eq!(new_page(&pool, 1, 3), PageRef::new(4, 1));

    // The disk is full. The pool waits for the log, and the allocation succeeds.
    plan.fail_always(Operation::Resize, Fault::Error(Errno::NOSPC));
    while new_page(&pool, 1, 4) != two {}
    assert_eq!(log.durable.load(Ordering::SeqCst), 21);
    assert!(matches!(pool.allocate(1), Err(PoolError::DiskFull { .. })));
    assert_eq!(generation(&pool, three), Some(1));
}

#[test]
fn the_file_does_not_grow_for_ever_while_places_wait_for_the_log() {
    let log = Arc::new(SlowLog { newest: AtomicU64::new(10), durable: AtomicU64::new(10) });
    let (pool, _) = faulty_with(log.clone(), single_steps());
    for _ in 0..3000 {
        log.newest.fetch_add(1, Ordering::SeqCst);
        pool.free_page(new_page(&pool, 4, 1)).unwrap();
    }
    assert!(pool.file_pages() < 6000, "{}", pool.file_pages());
    assert!(log.durable.load(Ordering::SeqCst) > 1000);
}
