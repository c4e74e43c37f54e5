//! Pages on exmap that find no memory, or whose memory the kernel does not take back.

#![allow(unsafe_code, clippy::unwrap_used)] // helpers of tests may, as tests may

use std::future::Future;
use std::io::{PipeReader, PipeWriter};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vellum_vm::{BackendChoice, BackendKind, PageRange};

use super::*;
use crate::device::MemoryDevice;
use crate::{Pool, PoolOptions, PoolSize, RawPages, Space, StatePlace, Translation};

/// A pool on exmap with states in that place; none where that cannot be.
fn pool(states: StatePlace) -> Option<Pool> {
    let options = PoolOptions {
        size: PoolSize::Bytes(32 * 4096),
        backend: BackendChoice::Only(BackendKind::Exmap),
        states,
        evictors: 0,
        eviction_batch: 1,
        ..PoolOptions::default()
    };
    let device = Arc::new(MemoryDevice::new());
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options);
    pool.inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// Has the kernel hold a page's first frame until what is returned goes.
fn hold(pool: &Pool, page: PageRef) -> (PipeReader, PipeWriter) {
    let (reader, writer) = io::pipe().unwrap();
    let part = libc::iovec { iov_base: pool.core.own_address(page.id).cast(), iov_len: 4096 };
    // SAFETY: the page is only read.
    let held = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
    assert_eq!(held, 4096, "{}", io::Error::last_os_error());
    (reader, writer)
}

#[test]
fn a_page_that_the_kernel_holds_stays_whole() {
    for states in [StatePlace::Pages, StatePlace::Frames] {
        let Some(pool) = pool(states) else { continue };
        for frames in [1, 3] {
            let mut guard = pool.allocate(frames).unwrap();
            guard.fill(7);
            let page = guard.page();
            drop(guard);
            pool.sync().unwrap();
            let held = hold(&pool, page);
            let results = {
                let (state, seen) = pool.core.look_at_known(page);
                assert!(state.try_lock(seen));
                pool.core.evict(&[pool.core.placed(page).unwrap()])
            };
            assert_eq!(results, [Err(Errno::BUSY)]);
            assert!(pool.is_resident(page) && pool.core.policy.contains(page));
            assert!(pool.fix_shared(page).unwrap().iter().all(|byte| *byte == 7));
            drop(held);
            pool.free_page(page).unwrap();
            assert_eq!(pool.kernel_resident_pages().unwrap(), 0, "{states:?}");
        }
    }
}

#[test]
fn memory_that_could_not_be_taken_away_is_found_again() {
    for states in [StatePlace::Pages, StatePlace::Frames] {
        let Some(pool) = pool(states) else { continue };
        let mut guard = pool.allocate(1).unwrap();
        guard.fill(7);
        let page = guard.page();
        drop(guard);
        pool.sync().unwrap();
        // Comes, is held by the kernel, and is given up: once to be read, once to be freed.
        for read in [true, false] {
            while pool.is_resident(page) {
                pool.eviction.evict_batch(1);
            }
            let (state, seen) = pool.core.look_at_known(page);
            let ClaimOutcome::Ours(undo) = pool.core.claim(page, state, seen).unwrap() else {
                panic!("no other thread has the page");
            };
            pool.core.surface.populate(&mut [Entry::new(page.range())]);
            let held = hold(&pool, page);
            pool.core.unclaim(page, undo);
            assert_eq!(pool.kernel_resident_pages().unwrap(), 1);
            assert!(!pool.is_resident(page));
            if read {
                assert!(pool.fix_shared(page).unwrap().iter().all(|byte| *byte == 7));
                drop(held);
            } else {
                drop(held);
                pool.free_page(page).unwrap();
                assert_eq!(pool.frames_to_free(), 0);
                assert_eq!(pool.allocate(1).unwrap().page(), page);
            }
        }
    }
}

/// Takes frames of an exmap without the pool's knowledge, so that pages find none.
#[test]
fn a_page_without_memory_is_an_error_that_changes_nothing() {
    for states in [StatePlace::Pages, StatePlace::Frames] {
        pool(states).iter().for_each(no_memory_changes_nothing);
    }
}

fn no_memory_changes_nothing(pool: &Pool) {
    let first = pool.allocate(2).unwrap().page();
    let surface = &pool.core.surface;
    surface.grow(10_000).unwrap();
    // One frame is left.
    let mut taken = [Entry::new(PageRange::new(9_000, 30))];
    assert_eq!(surface.populate(&mut taken), 0);
    let (used, end) = (pool.core.budget.used(), pool.end());
    for _ in 0..2 {
        let error = pool.allocate(2).unwrap_err();
        assert!(matches!(error, PoolError::Populate { .. }), "{error}");
        assert_eq!((pool.core.budget.used(), pool.end()), (used, end));
    }
    drop(pool.allocate(1).unwrap());
    // SAFETY: no page of the pool is there.
    assert_eq!(unsafe { surface.release(&mut taken) }, 0);
    assert!(pool.allocate(2).unwrap().iter().all(|byte| *byte == 0));
    assert!(pool.fix_shared(first).is_ok());
    assert_eq!(pool.kernel_resident_pages().unwrap(), 5);
}

/// The kernel does not take the memory of free slots, because the process has locked it. A thread
/// and a task that need the memory give up, and evict no page for nothing.
#[test]
fn slots_that_the_kernel_keeps_end_the_wait_for_their_memory() {
    let options = PoolOptions {
        size: PoolSize::Bytes(64 * 4096),
        translation: Translation::Table,
        backend: BackendChoice::Only(BackendKind::Madvise),
        evictors: 0,
        patience: 20,
        ..PoolOptions::default()
    };
    let device = Arc::new(MemoryDevice::new());
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
    let long = pool.allocate(16).unwrap().page();
    let pages: Vec<PageRef> = (0..200).map(|_| pool.allocate(1).unwrap().page()).collect();
    pool.sync().unwrap();
    while pool.is_resident(long) {
        pages.iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
    }
    // All memory is that of slots.
    pages.iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
    let slots = pool.core.slots.as_ref().unwrap().surface();
    let (base, len) = (slots.base().as_ptr().cast(), 64 * 4096);
    // SAFETY: locking changes no contents.
    assert_eq!(unsafe { libc::mlock(base, len) }, 0, "{}", io::Error::last_os_error());
    let resident: Vec<PageRef> = pages.into_iter().filter(|page| pool.is_resident(*page)).collect();
    resident[..40].iter().for_each(|page| pool.free_page(*page).unwrap());
    let evictions = pool.stats().evictions;
    let error = pool.allocate(16).unwrap_err();
    assert!(matches!(error, PoolError::Exhausted { .. }), "{error}");
    let error = pool.fix_shared(long).unwrap_err();
    assert!(matches!(error, PoolError::Exhausted { .. }), "{error}");
    let mut task = std::pin::pin!(pool.fix_shared_async(long));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = task.as_mut().poll(&mut context) else {
        panic!("the task waits");
    };
    assert!(matches!(error, PoolError::Exhausted { .. }), "{error}");
    assert_eq!(pool.stats().evictions, evictions, "an eviction does not help");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlock(base, len) }, 0);
    assert_eq!(pool.fix_shared(long).unwrap().len(), 16 * 4096);
}

/// The words of a group were given back, and one of them is damaged before its page comes back. Its
/// version goes on all the same.
#[test]
fn a_damaged_word_without_a_version_begins_with_that_of_its_group() {
    let options = PoolOptions {
        size: PoolSize::Bytes(64 * 4096),
        translation: Translation::Table,
        backend: BackendChoice::Only(BackendKind::Madvise),
        states: StatePlace::Pages,
        evictors: 0,
        ..PoolOptions::default()
    };
    let device = Arc::new(MemoryDevice::new());
    let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap();
    let pages: Vec<PageRef> = (0..600).map(|_| pool.allocate(1).unwrap().page()).collect();
    pool.sync().unwrap();
    let states = pool.core.states.in_array().expect("there is a word for each page");
    let mask = pool.core.slot_mask;
    let version = || pool.core.look_at_known(pages[9]).1.without_slot(mask).version();
    drop(pool.fix_exclusive(pages[9]).unwrap());
    let before = version();
    while pages[..512].iter().any(|page| pool.is_resident(*page)) {
        pages[512..].iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
    }
    assert!(states.give_back(0, mask, &pool.core.parking));
    assert_eq!(version(), 0);
    pool.damage_word(pages[9], 3);
    assert!(matches!(pool.fix_shared(pages[9]), Err(PoolError::DamagedWord { .. })));
    assert!(version() > before);
}
