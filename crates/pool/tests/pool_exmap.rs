//! Pools on exmap, whose frames keep the bytes of the page before, and when a pool chooses exmap.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use common::churn::Churn;
use common::{Storage, new_page, open, options, options_on, scratch_dir};
use vellum_pool::{BackendChoice, BackendKind, PoolOptions, PoolSize, StatePlace, Translation};
use vellum_vm::probe;

/// On exmap the frame of a new page has the bytes of the page before.
#[test]
fn new_pages_are_zero_whatever_their_frames_held() {
    for backend in common::backends() {
        let pool = open(
            Storage::Memory.create(&scratch_dir()),
            PoolOptions {
                eviction_batch: 4,
                translation: Translation::Mmu,
                ..options_on(backend, 64)
            },
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
        common::eventually("all is free", || pool.frames_to_free() == 0);
        assert_eq!(pool.kernel_resident_pages().unwrap(), 0);
    }
}

/// An exmap takes the pool's memory at once. So the pool chooses it only if the caller has set the
/// size.
#[test]
fn a_pool_of_default_size_does_not_choose_exmap() {
    let given = open(Storage::Memory.create(&scratch_dir()), options(64));
    assert_eq!(given.backend(), probe::choice().backend);
    // So all suites of pools and stores run on exmap there.
    if std::path::Path::new("/sys/module/vellum").exists() {
        assert_eq!(given.backend(), BackendKind::Exmap);
        println!("a pool of a fixed size chooses exmap");
    }
    let follows = PoolOptions { size: PoolSize::Auto, states: StatePlace::Pages, ..options(64) };
    let follows = open(Storage::Memory.create(&scratch_dir()), follows);
    assert_eq!(follows.backend(), probe::choice_without_exmap().backend);
    assert_ne!(follows.backend(), BackendKind::Exmap);
}

/// The states are where the options say. In either place, threads see the same pages.
#[test]
fn states_may_be_in_an_array_or_with_the_frames() {
    let exmap = BackendChoice::Only(BackendKind::Exmap);
    if !common::backends().contains(&exmap) {
        return println!("skipped: there is no exmap here");
    }
    for states in [StatePlace::Pages, StatePlace::Frames] {
        let options = PoolOptions { states, ..options_on(exmap, 64) };
        let pool = open(Storage::Memory.create(&scratch_dir()), options);
        assert_eq!(pool.state_place(), states);
        let churn = Churn::new(&pool, 60, &[1, 1, 2, 5]);
        churn.crowd(&pool);
        churn.check(&pool);
    }
}

#[test]
fn states_are_with_the_frames_only_where_page_tables_are_visible() {
    let other = BackendChoice::Only(probe::choice_without_exmap().backend);
    let options = PoolOptions { states: StatePlace::Frames, ..options_on(other, 64) };
    let space = vellum_pool::Space::new(0);
    let format = std::sync::Arc::new(vellum_pool::RawPages);
    let device = Storage::Memory.create(&scratch_dir());
    let error = vellum_pool::Pool::open(device, format, space, options).unwrap_err();
    assert!(error.to_string().contains("page tables"), "{error}");
}
