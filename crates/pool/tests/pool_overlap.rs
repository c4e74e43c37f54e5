//! Overlapping references: no two guards ever reach the same memory, whatever references callers
//! have.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;

use vellum_pool::device::MemoryDevice;
use vellum_pool::{PageRef, Pool, PoolError, PoolOptions, PoolSize, RawPages, Space};

/// A file of eight frames. All are allocated, none is resident.
fn pool() -> Pool {
    let device = Arc::new(MemoryDevice::new());
    let options = || PoolOptions { size: PoolSize::Bytes(16 << 12), ..PoolOptions::default() };
    let pool = Pool::open(device.clone(), Arc::new(RawPages), Space::new(0), options()).unwrap();
    assert_eq!(pool.allocate(8).unwrap().page(), PageRef::new(0, 8));
    pool.sync().unwrap();
    let space = Space::decode(&pool.encode_space()).unwrap();
    drop(pool);
    Pool::open(device, Arc::new(RawPages), space, options()).unwrap()
}

fn refused<T: std::fmt::Debug>(result: Result<T, PoolError>) {
    assert!(matches!(result, Err(PoolError::WrongSize(_))), "{result:?}");
}

#[test]
fn inner_frames_of_a_resident_page_are_no_pages() {
    let pool = pool();
    let outer = pool.fix_exclusive(PageRef::new(2, 4)).unwrap();
    for (id, frames) in [(3, 1), (5, 1), (4, 2), (5, 3), (1, 2), (0, 8), (0, 3)] {
        let page = PageRef::new(id, frames);
        refused(pool.fix_shared(page));
        refused(pool.fix_exclusive(page));
        refused(pool.optimistic(page));
        refused(common::tasks::block_on(pool.fix_shared_async(page)));
        refused(common::tasks::block_on(pool.fix_exclusive_async(page)));
        pool.prefetch(&[page]);
    }
    refused(pool.free_page(PageRef::new(3, 1)));
    drop(outer);
    assert_eq!(pool.stats().resident_frames, 4, "a refused fix takes no frames");

    // The pages next to it work as before.
    let before = pool.fix_exclusive(PageRef::new(0, 2)).unwrap();
    let behind = pool.fix_exclusive(PageRef::new(6, 2)).unwrap();
    let between = pool.fix_exclusive(PageRef::new(2, 4)).unwrap();
    drop((before, behind, between));
}

#[test]
fn a_longer_reference_to_a_resident_page_is_refused_on_hits() {
    let pool = pool();
    drop(pool.fix_shared(PageRef::new(2, 2)).unwrap());
    for frames in 3..=6 {
        let page = PageRef::new(2, frames);
        refused(pool.fix_shared(page));
        refused(pool.fix_exclusive(page));
        refused(pool.optimistic(page));
        refused(pool.free_page(page));
    }
    drop(pool.fix_exclusive(PageRef::new(2, 2)).unwrap());
}

#[test]
fn a_failed_fix_leaves_the_frames_as_they_were() {
    let pool = pool();
    drop(pool.fix_shared(PageRef::new(5, 1)).unwrap());
    refused(pool.fix_shared(PageRef::new(2, 4)));
    for id in [2, 3, 4] {
        drop(pool.fix_exclusive(PageRef::new(id, 1)).unwrap());
    }
    pool.free_page(PageRef::new(4, 1)).unwrap();
    refused(pool.fix_shared(PageRef::new(3, 2)));
    let stale = pool.optimistic(PageRef::new(4, 1));
    assert!(matches!(stale, Err(PoolError::PageFree(_))), "free is still free: {stale:?}");
}

#[test]
fn the_place_of_an_evicted_or_freed_page_takes_other_sizes() {
    let pool = pool();
    pool.fix_exclusive(PageRef::new(0, 8)).unwrap()[8 * 4096 - 1] = 7;
    pool.free_page(PageRef::new(0, 8)).unwrap();
    let halves = [pool.allocate(4).unwrap(), pool.allocate(4).unwrap()];
    assert!(halves.iter().all(|half| half.iter().all(|byte| *byte == 0)));
    let [one, two] = halves.map(|half| half.page());
    assert_eq!((one, two), (PageRef::new(0, 4), PageRef::new(4, 4)));
    pool.free_page(one).unwrap();
    pool.free_page(two).unwrap();
    assert_eq!(pool.allocate(8).unwrap().page(), PageRef::new(0, 8));
}

#[test]
fn exclusive_access_to_a_read_only_pool_is_refused() {
    let device = Arc::new(MemoryDevice::from_snapshot(vec![0; 16 << 12]));
    let options =
        PoolOptions { size: PoolSize::Bytes(16 << 12), read_only: true, ..PoolOptions::default() };
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
    let page = PageRef::new(1, 1);
    assert!(matches!(pool.fix_exclusive(page), Err(PoolError::ReadOnly)));
    let fix = common::tasks::block_on(pool.fix_exclusive_async(page));
    assert!(matches!(fix, Err(PoolError::ReadOnly)));
    assert_eq!(pool.fix_shared(page).unwrap()[0], 0);
}

/// A page whose place became an inner frame of another page, which was evicted and then freed
/// without a read. A stale reference must find it free, or else it would block the next allocation.
#[test]
fn a_former_inner_frame_of_an_evicted_page_is_no_page() {
    let device = Arc::new(MemoryDevice::new());
    let options = PoolOptions {
        size: PoolSize::Bytes(8 << 12),
        evictors: 0,
        eviction_batch: 1,
        ..PoolOptions::default()
    };
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
    let old: Vec<PageRef> = (0..4).map(|_| pool.allocate(1).unwrap().page()).collect();
    old.iter().for_each(|page| pool.free_page(*page).unwrap());
    let large = pool.allocate(4).unwrap().page();
    assert_eq!(large, PageRef::new(0, 4));
    let others: Vec<PageRef> = (0..16).map(|_| pool.allocate(1).unwrap().page()).collect();
    others.iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
    assert!(!pool.is_resident(large));
    for stale in &old[1..] {
        pool.prefetch(&[*stale]);
        assert!(matches!(pool.optimistic(*stale), Err(PoolError::PageFree(_))));
    }
    pool.free_page(large).unwrap();
    for stale in &old {
        assert!(matches!(pool.optimistic(*stale), Err(PoolError::PageFree(_))));
    }
    assert_eq!(pool.allocate(4).unwrap().page(), large);
}
