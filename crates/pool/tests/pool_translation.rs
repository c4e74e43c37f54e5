//! Pools that find pages by the MMU, by a table, and by both.

#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::Arc;
use std::thread;

use common::churn::Churn;
use common::{Random, generation, new_page, open, options};
use vellum_pool::device::{Device, FileDevice, FileOptions, MemoryDevice};
use vellum_pool::{
    BackendKind, PageRef, Pool, PoolError, PoolOptions, PoolSize, RawPages, Space, StatePlace,
    Translation,
};

fn by(translation: Translation, frames: u64) -> PoolOptions {
    // States with the frames are for the MMU alone.
    PoolOptions { translation, states: StatePlace::Pages, evictors: 0, ..options(frames) }
}

fn pool_by(translation: Translation, frames: u64) -> Pool {
    open(Arc::new(MemoryDevice::new()), by(translation, frames))
}

/// Whether this process leaves the choice to the pool.
fn pool_chooses() -> bool {
    let has_choice = std::env::var_os("VELLUM_TRANSLATION").is_none();
    has_choice && pool_by(Translation::Auto, 64).backend() != BackendKind::Exmap
}

fn assert_all(pool: &Pool, pages: &[PageRef]) {
    for (page, value) in pages.iter().zip(0..) {
        assert_eq!(generation(pool, *page), Some(value), "{page}");
    }
}

#[test]
fn a_pool_changes_its_translation_when_the_file_outgrows_it() {
    if !pool_chooses() {
        return println!("skipped: the translation is given");
    }
    let pool = pool_by(Translation::Auto, 64);
    let mut pages: Vec<PageRef> = (0..30).map(|value| new_page(&pool, 1, value)).collect();
    assert_eq!(pool.translation(), Translation::Mmu);
    let at_home = pool.kernel_resident_pages().unwrap();
    assert_eq!(at_home, 30);
    for value in 30..300 {
        // Long pages are on the surface, and take their memory from slots.
        let long = (value % 7 == 0).then(|| new_page(&pool, 5, value));
        pages.push(new_page(&pool, 1, value));
        assert!(pool.kernel_resident_pages().unwrap() <= 64, "{value}");
        if let Some(long) = long {
            assert_eq!(generation(&pool, long), Some(value));
            pool.free_page(long).unwrap();
        }
    }
    assert_eq!(pool.translation(), Translation::Table);
    for _ in 0..3 {
        assert_all(&pool, &pages);
        assert!(pool.kernel_resident_pages().unwrap() <= 64);
    }
    pages.drain(30..).for_each(|page| pool.free_page(page).unwrap());
    pool.sync().unwrap();
    pool.trim().unwrap();
    assert_eq!(pool.translation(), Translation::Mmu);
    assert_all(&pool, &pages);
}

#[test]
fn a_page_may_lie_in_its_slot_while_others_lie_at_home() {
    if !pool_chooses() {
        return println!("skipped: the translation is given");
    }
    let pool = pool_by(Translation::Auto, 64);
    let pages: Vec<PageRef> = (0..200).map(|value| new_page(&pool, 1, value)).collect();
    pages[50..].iter().for_each(|page| pool.free_page(*page).unwrap());
    pool.sync().unwrap();
    pool.trim().unwrap();
    assert_all(&pool, &pages[..50]);
    assert_eq!(pool.translation(), Translation::Mmu);
    assert!(pool.kernel_resident_pages().unwrap() <= 64);
    for page in &pages[..50] {
        assert_eq!(pool.kernel_residency(page.range()).unwrap().resident(), 1, "{page}");
    }
}

#[test]
fn slots_of_large_pools_are_in_huge_pages_and_within_the_size() {
    const FRAMES: u64 = 40 << 8;
    let pool = pool_by(Translation::Table, FRAMES);
    let pages: Vec<PageRef> = (0..2 * FRAMES).map(|value| new_page(&pool, 1, value)).collect();
    if vellum_vm::probe::huge_pages().is_ok() {
        assert_eq!(pool.huge_page_stats().collapsed, FRAMES / 512);
    }
    assert!(pool.kernel_resident_pages().unwrap() <= FRAMES);
    // A long page takes memory from slots, which the kernel really gets.
    let long = new_page(&pool, 3000, 7);
    assert!(pool.kernel_resident_pages().unwrap() <= FRAMES);
    assert_eq!(generation(&pool, long), Some(7));
    assert_all(&pool, &pages);
    assert!(pool.kernel_resident_pages().unwrap() <= FRAMES);
}

/// Threads read and write pages of all lengths in a pool whose slots are in huge pages. The memory
/// goes to and fro between slots and the surface.
#[test]
fn slots_and_surface_share_the_memory_while_threads_work() {
    const FRAMES: u64 = 36 << 8;
    let folder = tempfile::tempdir().unwrap();
    let memory = || Arc::new(MemoryDevice::new()) as Arc<dyn Device>;
    let file = |name| {
        let file = FileDevice::create(folder.path().join(name), FileOptions::default()).unwrap();
        // The kernel knows the memory of slots: if it reads into memory that a slot has lost, the
        // page has other contents.
        Arc::new(file.with_prompt_storage()) as Arc<dyn Device>
    };
    for (translation, device) in [
        (Translation::Auto, memory()),
        (Translation::Table, memory()),
        (Translation::Auto, file("auto")),
        (Translation::Table, file("table")),
    ] {
        let options = PoolOptions { evictors: 1, ..by(translation, FRAMES) };
        let pool = open(device, options);
        let churn = Churn::new(&pool, 5_000, &[1, 1, 1, 2, 16]);
        let mut random = Random(7);
        for round in 0..4 {
            churn.crowd(&pool);
            // Many long pages at once, and then none.
            let many = 200 + random.index(200);
            let long: Vec<PageRef> = (0..many).map(|_| new_page(&pool, 16, round)).collect();
            long.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(round)));
            long.into_iter().for_each(|page| pool.free_page(page).unwrap());
            let evicting = pool.stats().evictions;
            let resident = pool.kernel_resident_pages().unwrap();
            // The count takes its time: a page may leave before it, and another one come after it.
            let meanwhile = pool.stats().evictions - evicting + 256;
            assert!(resident <= FRAMES + meanwhile, "{translation:?}, {round}: {resident}");
        }
        churn.check(&pool);
        assert!(pool.stats().resident_frames_peak <= FRAMES);
    }
}

/// When the file outgrows the pool, most slots get huge pages all the same: pages leave the surface
/// until there is room for whole ones.
#[test]
fn a_pool_that_changes_its_translation_has_huge_pages_afterwards() {
    if !pool_chooses() || vellum_vm::probe::huge_pages().is_err() {
        return println!("skipped: the translation is given, or there are no huge pages");
    }
    const FRAMES: u64 = 64 << 8;
    for evictors in [0, 1] {
        let options = PoolOptions { evictors, ..by(Translation::Auto, FRAMES) };
        let pool = open(Arc::new(MemoryDevice::new()), options);
        let new_pages = |count| (0..count).for_each(|_| _ = new_page(&pool, 1, 1));
        thread::scope(|scope| (0..2).for_each(|_| _ = scope.spawn(|| new_pages(2 * FRAMES))));
        let huge = pool.huge_page_stats().collapsed;
        assert!(huge >= FRAMES / 512 * 3 / 4, "{huge} of {}", FRAMES / 512);
    }
}

/// A few long values do not cost the slots all of their huge pages.
#[test]
fn some_long_pages_leave_most_huge_pages_alone() {
    if vellum_vm::probe::huge_pages().is_err() {
        return println!("skipped: no huge pages here");
    }
    const FRAMES: u64 = 128 << 8;
    let pool = pool_by(Translation::Table, FRAMES);
    let pages: Vec<PageRef> = (0..2 * FRAMES).map(|value| new_page(&pool, 1, value)).collect();
    let mut random = Random(5);
    let mut long: Vec<PageRef> = Vec::new();
    for value in 0..600 {
        long.push(new_page(&pool, 4, value));
        if long.len() > 20 {
            pool.free_page(long.remove(0)).unwrap();
        }
        (0..100).for_each(|_| drop(pool.fix_shared(random.pick(&pages)).unwrap()));
    }
    let huge = pool.huge_page_stats().collapsed;
    assert!(huge >= FRAMES / 512 / 2, "{huge} of {}", FRAMES / 512);
}

#[test]
fn pages_of_several_frames_may_lie_in_slots() {
    for frames in [2, 3, 4] {
        let options = PoolOptions { slot_frames: frames, ..by(Translation::Table, 64) };
        let pool = open(Arc::new(MemoryDevice::new()), options);
        let pages: Vec<PageRef> = (0..50).map(|value| new_page(&pool, frames, value)).collect();
        let others: Vec<PageRef> = (0..50).map(|value| new_page(&pool, 1, value)).collect();
        assert_all(&pool, &pages);
        assert_all(&pool, &others);
        assert!(pool.kernel_resident_pages().unwrap() <= 64);
    }
}

#[test]
fn a_table_needs_a_state_for_each_page() {
    let options = PoolOptions { states: StatePlace::Frames, ..by(Translation::Table, 64) };
    let device = Arc::new(MemoryDevice::new());
    let error = Pool::open(device, Arc::new(RawPages), Space::new(0), options).unwrap_err();
    assert!(matches!(error, PoolError::NoTranslation(_)), "{error}");
    assert!(error.to_string().contains("states with the frames"), "{error}");
    let largest = PoolOptions { size: PoolSize::Auto, ..by(Translation::Table, 64) };
    drop(open(Arc::new(MemoryDevice::new()), largest));
}

/// A file is read once, from one end to the other, and then a part of it. The words of what left
/// memory go back to the kernel, and the pages are what they were.
#[test]
fn words_of_pages_that_left_are_given_back() {
    for (translation, frames) in
        [(Translation::Mmu, 2_000), (Translation::Table, 2_000), (Translation::Table, 8_192)]
    {
        let pool = pool_by(translation, frames);
        const PAGES: u64 = 300_000;
        let pages: Vec<PageRef> = (0..PAGES).map(|value| new_page(&pool, 1, value)).collect();
        let in_use = pool.state_bytes().unwrap();
        assert!(in_use < PAGES * 8 / 2, "{translation:?}: {in_use} of {}", PAGES * 8);
        let mut random = Random(9);
        for _ in 0..100_000 {
            let value = 250_000 + random.index(10_000);
            assert_eq!(generation(&pool, pages[value]), Some(value as u64));
        }
        let in_use = pool.state_bytes().unwrap();
        assert!(in_use < 40_000 * 8, "{translation:?}: {in_use} of {}", PAGES * 8);
        assert_all(&pool, &pages);
    }
}
