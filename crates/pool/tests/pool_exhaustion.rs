//! Too few frames, a full disk, and invalid references. Each is an error that changes nothing, and
//! operations succeed again once there is enough.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;
use std::time::Instant;

use common::{
    PATIENCE, Random, Storage, eventually, faulty, filled, generation, hostile_references,
    new_page, open, options, options_on, push_out, scratch_dir, stamp, stamped,
};
use vellum_pool::device::{
    Direct, Fault, FileDevice, FileOptions, IoEngineChoice, MemoryDevice, Operation,
};
use vellum_pool::{
    Arrival, BackendChoice, PageRef, Pool, PoolError, PoolOptions, PoolSize, RawPages, Space,
};
use vellum_testing::patience::SetWhenDropped;
use vellum_vm::{Errno, memory_limit};

#[test]
fn a_pool_of_held_pages_is_exhausted_until_guards_are_dropped() {
    for evictors in [0, 1] {
        // Long enough for a background thread that was preempted while it held the last page.
        let (pool, _) = faulty(PoolOptions { evictors, patience: 200, ..options(16) });
        let pages = filled(&pool, 64);
        let exclusive: Vec<_> =
            pages[..8].iter().map(|page| pool.fix_exclusive(*page).unwrap()).collect();
        let shared: Vec<_> =
            pages[8..16].iter().map(|page| pool.fix_shared(*page).unwrap()).collect();
        let allocations = pool.stats().allocations;
        for _ in 0..2 {
            let started = Instant::now();
            let error = pool.fix_shared(pages[20]).unwrap_err();
            assert!(
                matches!(error, PoolError::Exhausted { capacity: 16, wanted: 1, used: 16, .. }),
                "{error}"
            );
            assert!(started.elapsed() < PATIENCE);
            assert!(!pool.is_resident(pages[20]));
            assert!(matches!(pool.allocate(2), Err(PoolError::Exhausted { wanted: 2, .. })));
            assert!(pool.optimistic(pages[21]).is_err());
        }
        let stats = pool.stats();
        assert_eq!((stats.resident_frames, stats.allocations), (16, allocations));
        assert_eq!(pool.with_space(Space::allocated_pages), 64);
        drop(exclusive);
        drop(shared);
        // A background thread that was preempted may hold a page for longer than a fix waits.
        let mut all = None;
        eventually("all frames are free", || {
            all = pool.allocate(16).ok();
            all.is_some()
        });
        let mut all = all.unwrap();
        let page = all.page();
        stamp(&mut all, page, 2);
        drop(all);
        assert_eq!(generation(&pool, page), Some(2));
        pages.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
    }
}

#[test]
fn pages_larger_than_the_pool_and_pools_below_the_minimum_are_refused() {
    let (pool, _) = faulty(options(16));
    filled(&pool, 64);
    for frames in [17, 64] {
        let page = PageRef::new(0, frames);
        assert!(matches!(pool.fix_shared(page), Err(PoolError::PageTooLarge { .. })));
        assert!(matches!(pool.allocate(frames), Err(PoolError::PageTooLarge { .. })));
    }
    for frames in [0, PageRef::MAX_FRAMES, PageRef::MAX_FRAMES + 1, u32::MAX] {
        assert!(pool.allocate(frames).is_err(), "{frames}");
    }
    assert_eq!(pool.with_space(Space::allocated_pages), 64);

    for bytes in [0, 4095, 7 * 4096, 8 * 4096 - 1] {
        let options = PoolOptions { size: PoolSize::Bytes(bytes), ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let refused = Pool::open(device, Arc::new(RawPages), Space::new(0), options);
        assert!(matches!(refused, Err(PoolError::PoolTooSmall { min: 8, .. })));
    }
}

#[test]
fn a_pool_beyond_the_machine_is_refused() {
    let limit = memory_limit::effective().unwrap();
    for bytes in [limit.bytes + 1, 10 << 40, u64::MAX] {
        let options = PoolOptions { size: PoolSize::Bytes(bytes), ..PoolOptions::default() };
        let device = Arc::new(MemoryDevice::new());
        let refused = Pool::open(device, Arc::new(RawPages), Space::new(0), options);
        let Err(error @ PoolError::PoolTooLarge { .. }) = refused else { panic!("{bytes}") };
        let most = format!("has {} MiB; choose at most that", limit.bytes >> 20);
        assert!(error.to_string().ends_with(&most), "{error}");
    }
    assert_eq!(PoolSize::Bytes(limit.bytes).frames().unwrap(), limit.bytes / 4096);
}

#[test]
fn invalid_references_are_errors_of_every_operation() {
    let (pool, plan) = faulty(options(16));
    let page = new_page(&pool, 1, 1);
    let before = (pool.stats().resident_frames, plan.counts().reads, pool.encode_space());
    for bad in hostile_references(&pool) {
        assert!(pool.fix_shared(bad).is_err(), "{bad}");
        assert!(pool.fix_exclusive(bad).is_err(), "{bad}");
        assert!(pool.optimistic(bad).is_err(), "{bad}");
        assert!(pool.read(bad, |_| Ok(())).is_err(), "{bad}");
        assert!(pool.free_page(bad).is_err(), "{bad}");
        assert!(!pool.is_resident(bad), "{bad}");
        pool.prefetch(&[bad]);
    }
    assert_eq!(before, (pool.stats().resident_frames, plan.counts().reads, pool.encode_space()));
    assert_eq!(generation(&pool, page), Some(1));
}

#[test]
fn a_reference_longer_than_any_page_is_an_error_even_in_a_huge_pool() {
    /// A policy that keeps no pages, so that the pool may have any size.
    #[derive(Debug)]
    struct Nothing;
    impl vellum_pool::ReplacementPolicy for Nothing {
        fn admit(&self, _: PageRef, _: Arrival) {}
        fn forget(&self, _: PageRef) {}
        fn contains(&self, _: PageRef) -> bool {
            true
        }
        fn candidates(
            &self,
            _: &dyn vellum_pool::Residents,
            _: u64,
            _: usize,
            _: &mut Vec<PageRef>,
        ) {
        }
        fn for_each(&self, _: &mut dyn FnMut(PageRef)) {}
    }
    let policy: Option<Box<dyn vellum_pool::ReplacementPolicy>> = Some(Box::new(Nothing));
    // No machine has so many free frames.
    let backend = BackendChoice::Only(vellum_vm::probe::choice_without_exmap().backend);
    let options = PoolOptions { policy, evictors: 0, ..options_on(backend, 1 << 25) };
    let device = Arc::new(MemoryDevice::new());
    let pool = match Pool::open(device, Arc::new(RawPages), Space::new(1 << 25), options) {
        Err(PoolError::PoolTooLarge { .. }) => {
            println!("not tested: this machine, and so every pool, has less than 128 GiB");
            return;
        }
        pool => pool.unwrap(),
    };
    for frames in [PageRef::MAX_FRAMES + 1, 1 << 25] {
        let page = PageRef::new(0, frames);
        assert!(matches!(pool.fix_shared(page), Err(PoolError::PageTooLarge { .. })));
    }
    assert_eq!(pool.stats().resident_frames, 0);
}

#[test]
fn a_full_disk_at_allocation_changes_nothing() {
    let limited = Arc::new(MemoryDevice::new().limited_to(40));
    let pool = open(limited, options(64));
    let pages: Vec<_> = (0..40).map(|_| new_page(&pool, 1, 1)).collect();
    let before = (pool.encode_space(), pool.end(), pool.file_pages());
    for frames in [1, 3, 16] {
        let error = pool.allocate(frames).unwrap_err();
        assert!(
            matches!(error, PoolError::DiskFull { frames: wanted, .. } if wanted == frames),
            "{error}"
        );
    }
    assert_eq!(before, (pool.encode_space(), pool.end(), pool.file_pages()));
    assert_eq!(pool.stats().resident_frames, 40);
    pool.sync().unwrap();
    pool.free_page(pages[7]).unwrap();
    assert_eq!(new_page(&pool, 1, 2).id, pages[7].id);
}

#[test]
fn other_failures_to_grow_change_nothing() {
    let (pool, plan) = faulty(options(32));
    new_page(&pool, 1, 1);
    let before = (pool.encode_space(), pool.file_pages());
    plan.fail_always(Operation::Resize, Fault::Error(Errno::IO));
    assert!(matches!(pool.allocate(30), Err(PoolError::Resize(_))));
    assert_eq!(before, (pool.encode_space(), pool.file_pages()));
    assert!(pool.stats().resident_frames <= 1);
    plan.clear();
    new_page(&pool, 30, 1);
}

/// Waits until the pages that were freed during their write-back are free.
fn all_freed(pool: &Pool) {
    eventually("all is free", || pool.frames_to_free() == 0);
}

#[test]
fn trimming_frees_the_tail_and_the_file_grows_again() {
    for storage in Storage::all() {
        let dir = scratch_dir();
        let device = storage.create(&dir);
        let pool = open(device.clone(), options(32));
        let pages = filled(&pool, 100);
        pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
        pool.free_page(pages[10]).unwrap();
        all_freed(&pool);
        assert_eq!(pool.trim().unwrap(), 50);
        assert_eq!((device.pages().unwrap(), pool.file_pages(), pool.end()), (50, 50, 50));
        assert!(matches!(pool.fix_shared(pages[70]), Err(PoolError::PageFree(_))));
        let again: Vec<_> = (0..30).map(|n| new_page(&pool, 1 + n % 4, 2)).collect();
        for page in &again {
            assert_eq!(generation(&pool, *page), Some(2), "{storage:?}");
        }
        for page in pages[..50].iter().filter(|page| **page != pages[10] && !again.contains(page)) {
            assert_eq!(generation(&pool, *page), Some(1), "{storage:?}");
        }
    }
}

#[test]
fn a_page_below_a_bound_never_makes_the_file_longer() {
    for storage in Storage::all() {
        let dir = scratch_dir();
        let device = storage.create(&dir);
        let pool = open(device.clone(), options(32));
        let pages = filled(&pool, 100);
        for index in [10, 20, 21, 30, 60] {
            pool.free_page(pages[index]).unwrap();
        }
        all_freed(&pool);
        let long = pool.file_pages();
        let below =
            |frames, end| pool.allocate_below(frames, end).unwrap().map(|it| it.page().id.0);
        assert_eq!(below(2, 22), Some(20));
        assert_eq!([below(2, 100), below(1, 10), below(1, 11)], [None, None, Some(10)]);
        assert!(pool.allocate_below(0, 100).is_err());
        let place = pool.allocate_place_below(1, 100).unwrap();
        assert_eq!(place, Some(PageRef::new(30, 1)));
        pool.prefer_below(60);
        pool.free_place(place.unwrap()).unwrap();
        assert_eq!([(); 3].map(|()| new_page(&pool, 1, 3).id.0), [30, 60, 100]);
        pool.prefer_below(0);
        assert_eq!(pool.file_pages(), long, "the file was long enough");
        // As long as a caller wants the file at least, or as it is used.
        assert_eq!((pool.trim_to(105).unwrap(), pool.trim_to(7).unwrap()), (105, 101));
        assert_eq!((device.pages().unwrap(), pool.file_pages(), pool.end()), (101, 101, 101));
        assert_eq!(generation(&pool, new_page(&pool, 4, 5)), Some(5));
    }
}

#[test]
fn trimming_during_allocations_removes_no_page() {
    let dir = scratch_dir();
    let pool = open(Storage::all().last().unwrap().create(&dir), options(64));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let pool = &pool;
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut mine: Vec<(PageRef, u64)> = Vec::new();
                for round in 0..300 {
                    mine.push((new_page(pool, 1 + random.index(4) as u32, round), round));
                    if mine.len() > 10 {
                        let (page, expected) = mine.swap_remove(random.index(mine.len()));
                        assert_eq!(generation(pool, page), Some(expected));
                        pool.free_page(page).unwrap();
                    }
                }
                for (page, expected) in mine {
                    assert_eq!(generation(pool, page), Some(expected));
                    pool.free_page(page).unwrap();
                }
            });
        }
        for _ in 0..100 {
            assert!(pool.trim().unwrap() <= pool.file_pages().max(pool.end()));
        }
    });
    all_freed(&pool);
    pool.trim().unwrap();
    assert_eq!((pool.end(), pool.file_pages()), (0, 0));
    // The background thread gives frames back a moment after it has evicted their pages.
    eventually("no frame is in use", || pool.stats().resident_frames == 0);
}

#[test]
fn a_read_only_pool_refuses_changes() {
    let dir = scratch_dir();
    let path = dir.path().join("pages");
    let options_of = |read_only| FileOptions {
        read_only,
        direct: Direct::Auto,
        engine: IoEngineChoice::Threads,
        lock: true,
    };
    let device = FileDevice::create(&path, options_of(false)).unwrap();
    let pool = open(Arc::new(device), options(16));
    let pages = filled(&pool, 40);
    let space = pool.with_space(Space::clone);
    drop(pool);

    let device = Arc::new(FileDevice::open(&path, options_of(true)).unwrap());
    let options = PoolOptions { read_only: true, ..options(16) };
    let pool = Pool::open(device, Arc::new(RawPages), space, options).unwrap();
    pages.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
    assert!(matches!(pool.allocate(1), Err(PoolError::ReadOnly)));
    assert!(matches!(pool.free_page(pages[0]), Err(PoolError::ReadOnly)));
    assert!(matches!(pool.fix_exclusive(pages[0]), Err(PoolError::ReadOnly)));
    assert!(matches!(pool.trim(), Err(PoolError::ReadOnly)));
    assert!(matches!(pool.sync(), Err(PoolError::ReadOnly)));
    assert_eq!(generation(&pool, pages[0]), Some(1));
}

/// Many threads in a tiny pool wait for frames all the time, but they get frames. None of them may
/// report exhaustion.
#[test]
fn many_threads_in_a_tiny_pool_are_not_exhaustion() {
    for evictors in [0, 1] {
        let pool = open(
            Storage::Memory.create(&scratch_dir()),
            PoolOptions { evictors, patience: 500, ..options(8) },
        );
        let pages = filled(&pool, 200);
        std::thread::scope(|scope| {
            for thread in 0..48 {
                let (pool, pages) = (&pool, &pages);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    for _ in 0..300 {
                        let page = random.pick(pages);
                        let guard = pool.fix_shared(page).unwrap_or_else(|error| panic!("{error}"));
                        assert_eq!(stamped(&*guard, page), Some(1));
                        std::thread::yield_now();
                    }
                });
            }
        });
        assert_eq!(pool.stats().resident_frames_peak, 8);
    }
}

/// A thread faults in a page of most of the pool while others keep taking single frames.
#[test]
fn a_large_page_gets_its_frames_among_small_ones() {
    let pool = open(Storage::Memory.create(&scratch_dir()), options(64));
    let large = new_page(&pool, 48, 7);
    let pages = filled(&pool, 500);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for thread in 0..2 {
            let (pool, pages, stop) = (&pool, &pages, &stop);
            scope.spawn(move || {
                let mut random = Random(thread);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(pool.fix_shared(random.pick(pages)).unwrap());
                }
            });
        }
        for _ in 0..20 {
            assert_eq!(generation(&pool, large), Some(7));
            let deadline = Instant::now() + PATIENCE;
            while pool.is_resident(large) && Instant::now() < deadline {
                std::thread::yield_now();
            }
        }
    });
    push_out(&pool, large, &pages);
}
