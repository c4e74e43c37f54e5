//! What a pool does for surfaces whose frames are handed on as they are, and when it is on one.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use common::{Storage, new_page, open, options, scratch_dir};
use vellum_pool::{BackendKind, PoolOptions, PoolSize};
use vellum_vm::probe;

/// On exmap a new page's frame holds what another page held before.
#[test]
fn new_pages_are_zeroed_whatever_their_frames_held() {
    for backend in common::backends() {
        let pool = open(
            Storage::Memory.create(&scratch_dir()),
            PoolOptions { backend, eviction_batch: 4, ..options(64) },
        );
        for round in 0..4 {
            let pages: Vec<_> = (0..200).map(|_| new_page(&pool, 1, u64::MAX)).collect();
            pool.sync().unwrap();
            for frames in [1, 3, 4, 16] {
                let guard = pool.allocate(frames).unwrap();
                assert!(guard.iter().all(|byte| *byte == 0), "{backend:?}, round {round}");
                pool.free(guard).unwrap();
            }
            for page in pages {
                assert_eq!(common::generation(&pool, page), Some(u64::MAX));
                pool.free_page(page).unwrap();
            }
        }
        assert_eq!(pool.kernel_resident_pages().unwrap(), 0);
    }
}

/// An exmap takes the pool's memory at once, which is for those who said how much that is.
#[test]
fn a_pool_that_follows_the_machines_memory_is_not_on_exmap_by_itself() {
    let given = open(Storage::Memory.create(&scratch_dir()), options(64));
    assert_eq!(given.backend(), probe::choice().backend);
    // So all the suites of pools and stores are on it there.
    if std::path::Path::new("/sys/module/vellum").exists() {
        assert_eq!(given.backend(), BackendKind::Exmap);
        println!("exmap is what pools of a fixed size are on");
    }
    let follows = PoolOptions { size: PoolSize::Auto, ..options(64) };
    let follows = open(Storage::Memory.create(&scratch_dir()), follows);
    assert_eq!(follows.backend(), probe::choice_without_exmap().backend);
    assert_ne!(follows.backend(), BackendKind::Exmap);
}
