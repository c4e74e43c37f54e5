//! State words that a test damages, so that they name slots of other pages, or none that there is.
//! Whatever finds such a word says so, uses no slot that is not the page's, and loses nothing.

#![cfg(not(feature = "model"))]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::tasks::block_on;
use common::{generation, new_page, open, options, push_out, stamp, stamped};
use vellum_pool::device::MemoryDevice;
use vellum_pool::{
    Arrival, BackendKind, Clock, PAGE_SIZE, PageRef, Pool, PoolError, PoolOptions, RawPages,
    ReplacementPolicy, Residents, Space, StatePlace, Translation,
};

/// The slots of the pools here. Words have room for numbers up to 127.
const FRAMES: u64 = 64;

fn table(frames: u64) -> PoolOptions {
    let translation = Translation::Table;
    PoolOptions { translation, states: StatePlace::Pages, evictors: 0, ..options(frames) }
}

/// A pool with pages that all lie in slots, stamped with their number, and with room for some more.
fn pool() -> (Pool, Arc<MemoryDevice>, Vec<PageRef>) {
    let device = Arc::new(MemoryDevice::new());
    let pool = open(device.clone(), table(FRAMES));
    let pages = (0..FRAMES / 2).map(|value| new_page(&pool, 1, value)).collect();
    (pool, device, pages)
}

/// Numbers that the word of a page in a slot may have after damage: of another page's slot, of a
/// free slot, beyond the last one, and of none.
fn wrong_slots(pool: &Pool, other: PageRef) -> [u64; 5] {
    [pool.slot_of_page(other), FRAMES, FRAMES + 1, 127, 0]
}

/// The same for a page that is in no slot.
const ANY_SLOTS: [u64; 4] = [1, FRAMES, FRAMES + 1, 127];

/// Checks that the error names the page, the slot, and the cause.
fn assert_names<T>(result: Result<T, PoolError>, of: PageRef, named: u64) {
    let error = result.err().unwrap();
    let PoolError::DamagedWord { page, slot, slots } = error else { panic!("{error}") };
    assert_eq!((page, slot, slots), (of, named, FRAMES));
    let message = error.to_string();
    assert!(message.contains(&format!("{of} names slot {named},")), "{message}");
    assert!(message.contains("has 64 slots"), "{message}");
    assert!(message.contains("memory of this process is damaged"), "{message}");
}

/// Checks that all pages have their contents, also after they have left and come back.
fn assert_all(pool: &Pool, pages: &[PageRef]) {
    for _ in 0..2 {
        for (page, value) in pages.iter().zip(0..) {
            assert_eq!(generation(pool, *page), Some(value), "{page}");
        }
        pool.sync().unwrap();
        // More than the pool has frames.
        let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(pool, 1, 1)).collect();
        pages.iter().for_each(|page| push_out(pool, *page, &others));
        others.into_iter().for_each(|page| pool.free_page(page).unwrap());
    }
}

/// Checks what a new pool finds in the file.
fn assert_file(device: &Arc<MemoryDevice>, pages: &[PageRef]) {
    let space = Space::new(FRAMES);
    let again = Pool::open(device.clone(), Arc::new(RawPages), space, table(FRAMES)).unwrap();
    for (page, value) in pages.iter().zip(0..) {
        assert_eq!(generation(&again, *page), Some(value), "{page}");
    }
}

#[test]
fn a_get_of_a_damaged_word_is_an_error_and_the_next_one_finds_the_page() {
    let (pool, _, pages) = pool();
    for slot in wrong_slots(&pool, pages[1]) {
        pool.damage_word(pages[5], slot);
        assert_names(pool.fix_shared(pages[5]), pages[5], slot);
        assert_eq!(generation(&pool, pages[5]), Some(5));
        pool.damage_word(pages[5], slot);
        assert_names(pool.begin_fix_shared(pages[5]), pages[5], slot);
        pool.damage_word(pages[5], slot);
        assert!(pool.fix_shared_resident(pages[5]).is_none());
        pool.damage_word(pages[5], slot);
        assert_names(block_on(pool.fix_shared_async(pages[5])), pages[5], slot);
    }
    assert_eq!(pool.stats().damaged_words, 20);
    assert_all(&pool, &pages);
}

#[test]
fn an_update_of_a_damaged_word_is_an_error_and_changes_no_other_page() {
    let (pool, device, pages) = pool();
    for slot in wrong_slots(&pool, pages[1]) {
        pool.damage_word(pages[5], slot);
        assert_names(pool.fix_exclusive(pages[5]), pages[5], slot);
        pool.damage_word(pages[5], slot);
        assert_names(pool.fix_exclusive_briefly(pages[5]), pages[5], slot);
        pool.damage_word(pages[5], slot);
        assert_names(block_on(pool.fix_exclusive_async(pages[5])), pages[5], slot);
        stamp(&mut pool.fix_exclusive(pages[5]).unwrap(), pages[5], 5);
    }
    pool.sync().unwrap();
    assert_file(&device, &pages);
    assert_all(&pool, &pages);
}

/// An optimistic read does not look. It finds other bytes, and touches no memory that is not
/// mapped; its lock is refused.
#[test]
fn an_optimistic_read_of_a_damaged_word_touches_mapped_memory() {
    // More than the kernel gives in one step.
    const LARGE: u64 = 64 << 8;
    let pool = open(Arc::new(MemoryDevice::new()), table(LARGE));
    let pages: Vec<PageRef> = (0..8).map(|value| new_page(&pool, 1, value)).collect();
    let last = 2 * LARGE - 1;
    for slot in [pool.slot_of_page(pages[1]), LARGE, LARGE + 1, last - 1, last, 0] {
        pool.damage_word(pages[5], slot);
        let guard = pool.optimistic(pages[5]).unwrap();
        assert_ne!(stamped(guard.bytes(), pages[5]), Some(5), "{slot}");
        assert!(guard.upgrade_shared().is_err() && guard.upgrade().is_err());
        pool.prefetch_bytes(pages[5], 0, PAGE_SIZE);
        assert!(pool.try_optimistic(pages[5]).unwrap().upgrade().is_err());
        assert!(matches!(pool.fix_exclusive(pages[5]), Err(PoolError::DamagedWord { .. })));
        let guard = pool.optimistic(pages[5]).unwrap();
        assert_eq!(stamped(guard.bytes(), pages[5]), Some(5));
        drop(guard.upgrade().unwrap());
        // A reader that restarts takes the lock in the end.
        pool.damage_word(pages[5], slot);
        let read =
            pool.read(pages[5], |bytes| stamped(bytes, pages[5]).ok_or(vellum_pool::Restart));
        assert!(matches!(read, Err(PoolError::DamagedWord { .. })));
    }
}

/// A page that is not in memory is in no slot, whatever its word says.
#[test]
fn a_miss_of_a_damaged_word_is_an_error_and_the_next_one_reads_the_page() {
    let (pool, _, pages) = pool();
    pool.sync().unwrap();
    let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
    for slot in ANY_SLOTS {
        push_out(&pool, pages[5], &others);
        pool.damage_word(pages[5], slot);
        assert_names(pool.fix_shared(pages[5]), pages[5], slot);
        assert_eq!(generation(&pool, pages[5]), Some(5));
        push_out(&pool, pages[5], &others);
        pool.damage_word(pages[5], slot);
        assert_names(block_on(pool.fix_exclusive_async(pages[5])), pages[5], slot);
        assert_eq!(generation(&pool, pages[5]), Some(5));
        push_out(&pool, pages[5], &others);
        // A hint says nothing, and puts the word right.
        pool.damage_word(pages[5], slot);
        pool.evict_and_prefetch(&pages[5..6]);
        assert_eq!(generation(&pool, pages[5]), Some(5));
    }
    others.into_iter().for_each(|page| pool.free_page(page).unwrap());
    assert_all(&pool, &pages);
}

/// Evictions find the damaged words first. No page is lost, whether it has changed or not, and no
/// slot has two pages afterwards.
#[test]
fn evictions_of_damaged_words_lose_no_page_and_no_slot() {
    for synced in [false, true] {
        let (pool, device, pages) = pool();
        if synced {
            pool.sync().unwrap();
        }
        let slots = wrong_slots(&pool, pages[9]);
        for (page, slot) in pages[1..].iter().zip(slots) {
            pool.damage_word(*page, slot);
        }
        let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
        pages.iter().for_each(|page| push_out(&pool, *page, &others));
        assert_eq!(pool.stats().damaged_words, 5, "{synced}");
        others.into_iter().for_each(|page| pool.free_page(page).unwrap());
        pool.sync().unwrap();
        assert_file(&device, &pages);
        assert_all(&pool, &pages);
        assert!(pool.kernel_resident_pages().unwrap() <= FRAMES);
    }
}

#[test]
fn a_sync_of_a_damaged_word_is_an_error_and_the_next_one_writes_the_page() {
    let (pool, device, pages) = pool();
    for slot in wrong_slots(&pool, pages[9]) {
        stamp(&mut pool.fix_exclusive(pages[4]).unwrap(), pages[4], 4);
        pool.damage_word(pages[4], slot);
        assert_names(pool.sync(), pages[4], slot);
        // Nothing is poisoned, and the page is still dirty.
        pool.check_writable().unwrap();
        assert!(pool.dirty_pages() >= 1);
        pool.sync().unwrap();
        assert_eq!(pool.dirty_pages(), 0);
        assert_file(&device, &pages);
    }
    assert_all(&pool, &pages);
}

/// A reader holds the page, so that nothing puts its word right: each write-back says so, and the
/// file keeps what it has.
#[test]
fn a_write_back_of_a_damaged_word_never_writes_another_page_in_its_place() {
    let (pool, device, pages) = pool();
    pool.sync().unwrap();
    for slot in wrong_slots(&pool, pages[9]) {
        stamp(&mut pool.fix_exclusive(pages[4]).unwrap(), pages[4], 77);
        let reader = pool.fix_shared(pages[4]).unwrap();
        pool.damage_word(pages[4], slot);
        for _ in 0..2 {
            assert_names(pool.write_pages(&[pages[4].id]), pages[4], slot);
            assert_names(pool.copy_dirty(10, 10), pages[4], slot);
            assert_file(&device, &pages);
        }
        assert_eq!(stamped(&*reader, pages[4]), Some(77));
        drop(reader);
        // The first one finds the word, the other one the page.
        assert_names(pool.fix_shared(pages[4]), pages[4], slot);
        let copies = pool.copy_dirty(10, 10).unwrap().unwrap();
        assert_eq!(stamped(copies[0].bytes(), pages[4]), Some(77));
        pool.damage_word(pages[4], slot);
        pool.clear_dirty_if_unchanged(&copies);
        assert_eq!(pool.dirty_pages(), 1);
        stamp(&mut pool.fix_exclusive(pages[4]).unwrap(), pages[4], 4);
        pool.sync().unwrap();
        assert_file(&device, &pages);
    }
}

#[test]
fn a_pool_changes_its_size_with_damaged_words() {
    // Large pools move pages from one slot to another, in order to return whole huge pages.
    for frames in [FRAMES, 64 << 8] {
        let pool = open(Arc::new(MemoryDevice::new()), table(frames));
        let pages: Vec<PageRef> = (0..frames).map(|value| new_page(&pool, 1, value)).collect();
        pool.sync().unwrap();
        let largest = (frames + 1).next_power_of_two() - 1;
        let damaged: Vec<PageRef> = pages.iter().rev().step_by(5).copied().collect();
        let others = pages.iter().rev().skip(2).step_by(5);
        for (page, other) in damaged.iter().zip(others) {
            let slot = [pool.slot_of_page(*other), largest, 0][page.id.0 as usize % 3];
            pool.damage_word(*page, slot);
        }
        pool.resize(frames / 2 * PAGE_SIZE as u64).unwrap();
        assert!(pool.kernel_resident_pages().unwrap() <= frames / 2);
        pool.resize(frames * PAGE_SIZE as u64).unwrap();
        let mut errors = 0;
        for (page, value) in pages.iter().zip(0..) {
            match pool.fix_shared(*page) {
                Ok(guard) => assert_eq!(stamped(&*guard, *page), Some(value), "{page}"),
                Err(PoolError::DamagedWord { .. }) => errors += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(errors < damaged.len());
        for (page, value) in pages.iter().zip(0..) {
            assert_eq!(generation(&pool, *page), Some(value), "{page}");
        }
    }
}

#[test]
fn a_page_of_a_damaged_word_is_freed_by_the_next_attempt() {
    let (pool, _, pages) = pool();
    let (freed, rest) = (&pages[1..6], &pages[6..]);
    for (page, slot) in freed.iter().zip(wrong_slots(&pool, pages[9])) {
        pool.damage_word(*page, slot);
        assert_names(pool.free_page(*page), *page, slot);
        pool.free_page(*page).unwrap();
    }
    for (page, value) in rest.iter().zip(6..) {
        assert_eq!(generation(&pool, *page), Some(value), "{page}");
    }
    (0..4 * FRAMES).for_each(|_| _ = new_page(&pool, 1, 1));
    for (page, value) in rest.iter().zip(6..) {
        assert_eq!(generation(&pool, *page), Some(value), "{page}");
    }
}

/// An allocation finds the damaged word of its page and fails. It gives the place back, and the
/// page is as free as it was.
#[test]
fn an_allocation_that_finds_a_damaged_word_keeps_no_place() {
    for frames in [1, 3] {
        let (pool, _, pages) = pool();
        let page = new_page(&pool, frames, 1);
        pool.free_page(page).unwrap();
        let end = pool.end();
        for slot in ANY_SLOTS {
            pool.damage_word(page, slot);
            assert_names(pool.allocate(frames), page, slot);
            assert!(matches!(pool.fix_shared(page), Err(PoolError::PageFree(_))), "{slot}");
            assert!(pool.end() <= end);
            assert_eq!(new_page(&pool, frames, 1), page);
            pool.free_page(page).unwrap();
        }
        assert_eq!(pool.stats().damaged_words, 4);
        assert_all(&pool, &pages);
    }
}

/// The page stays allocated, and in the file.
#[test]
fn an_insertion_that_finds_a_damaged_word_changes_nothing() {
    let (pool, _, pages) = pool();
    pool.sync().unwrap();
    let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
    for slot in ANY_SLOTS {
        push_out(&pool, pages[5], &others);
        pool.damage_word(pages[5], slot);
        assert_names(pool.insert(pages[5], &[7; PAGE_SIZE]), pages[5], slot);
        assert_eq!(generation(&pool, pages[5]), Some(5));
    }
}

/// Pages on the surface: long ones, and all while the file fits the pool. A word that says
/// otherwise is refused once, whatever finds it.
#[test]
fn words_of_pages_on_the_surface_are_put_right() {
    for (translation, frames) in [(Translation::Table, 4), (Translation::Auto, 1)] {
        if translation == Translation::Auto && std::env::var_os("VELLUM_TRANSLATION").is_some() {
            continue;
        }
        let device = Arc::new(MemoryDevice::new());
        let pool = open(device, PoolOptions { translation, ..table(FRAMES) });
        // A pool on an exmap never has slots, nor a record of them.
        if pool.backend() == BackendKind::Exmap {
            continue;
        }
        let page = new_page(&pool, frames, 3);
        let other = new_page(&pool, 1, 4);
        assert_eq!(pool.slot_of_page(page), 0);
        for slot in ANY_SLOTS {
            let before = pool.stats().damaged_words;
            let damage = || pool.damage_word(page, slot);
            damage();
            assert_names(pool.fix_shared(page), page, slot);
            assert_eq!(generation(&pool, page), Some(3));
            damage();
            assert_names(pool.fix_exclusive(page), page, slot);
            stamp(&mut pool.fix_exclusive(page).unwrap(), page, 3);
            damage();
            assert_names(pool.sync(), page, slot);
            pool.sync().unwrap();
            damage();
            assert_names(pool.free_page(page), page, slot);
            assert!(pool.stats().damaged_words >= before + 4);
            pool.free_page(page).unwrap();
            assert_eq!(new_page(&pool, frames, 3), page);
            assert_eq!(generation(&pool, other), Some(4));
        }
    }
}

/// The evictor puts a word of a page on the surface right, and so does a miss.
#[test]
fn a_long_page_of_a_damaged_word_leaves_and_comes_back() {
    let (pool, _, pages) = pool();
    let long = new_page(&pool, 4, 3);
    let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
    for slot in ANY_SLOTS {
        assert_eq!(generation(&pool, long), Some(3));
        let before = pool.stats().damaged_words;
        pool.damage_word(long, slot);
        push_out(&pool, long, &others);
        assert_eq!(pool.stats().damaged_words, before + 1);
        pool.damage_word(long, slot);
        assert_names(pool.fix_shared(long), long, slot);
        assert_eq!(generation(&pool, long), Some(3));
        // That of an inner frame is right when the page has left.
        pool.damage_word(PageRef::new(long.id.0 + 1, 1), slot);
        pool.free_page(long).unwrap();
        let parts: Vec<PageRef> = (0..4).map(|_| new_page(&pool, 1, 1)).collect();
        assert_eq!(parts[1].id.0, long.id.0 + 1);
        parts.into_iter().for_each(|part| pool.free_page(part).unwrap());
        assert_eq!(new_page(&pool, 4, 3), long);
    }
    others.into_iter().for_each(|page| pool.free_page(page).unwrap());
    assert_all(&pool, &pages);
}

/// All pages of a group have left, and one of their words is damaged. The words are given back, and
/// begin afresh: none of them is damaged then.
#[test]
fn words_that_are_given_back_are_sound() {
    const GROUP: usize = 512;
    let pool = open(Arc::new(MemoryDevice::new()), table(FRAMES));
    let pages: Vec<PageRef> = (0..8 * GROUP as u64).map(|at| new_page(&pool, 1, at)).collect();
    pool.sync().unwrap();
    let (group, others) = (&pages[GROUP..2 * GROUP], &pages[2 * GROUP..]);
    let mut given_back = 0;
    for slot in ANY_SLOTS {
        // The group's words are in use.
        assert_eq!(generation(&pool, group[9]), Some(GROUP as u64 + 9));
        push_out(&pool, group[9], &others[..2 * FRAMES as usize]);
        pool.damage_word(group[9], slot);
        for _ in 0..4 {
            others.iter().for_each(|page| drop(pool.fix_shared(*page).unwrap()));
        }
        given_back += u64::from(pool.slot_of_page(group[9]) == 0);
        for (page, value) in group.iter().zip(GROUP as u64..) {
            match pool.fix_shared(*page) {
                Ok(guard) => assert_eq!(stamped(&*guard, *page), Some(value), "{page}"),
                Err(error) => assert_eq!(*page, group[9], "{error}"),
            }
        }
    }
    assert!(given_back > 0);
}

/// A clock that calls a test whenever the pool asks it something.
struct Watched {
    clock: Clock,
    watch: Mutex<Option<Watch>>,
}

type Watch = Box<dyn FnMut(Asked, PageRef) + Send>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Admit,
    Contains,
    /// With any page.
    Candidates,
}

impl Watched {
    fn call(&self, asked: Asked, page: PageRef) {
        if let Some(watch) = &mut *self.watch.lock().unwrap() {
            watch(asked, page);
        }
    }
}

#[derive(Clone)]
struct Policy(Arc<Watched>);

impl Policy {
    fn new() -> Policy {
        Policy(Arc::new(Watched { clock: Clock::new(FRAMES), watch: Mutex::new(None) }))
    }

    fn watch(&self, watch: impl FnMut(Asked, PageRef) + Send + 'static) {
        *self.0.watch.lock().unwrap() = Some(Box::new(watch));
    }
}

impl std::fmt::Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.clock.fmt(f)
    }
}

impl ReplacementPolicy for Policy {
    fn admit(&self, page: PageRef, arrival: Arrival) {
        self.0.call(Asked::Admit, page);
        self.0.clock.admit(page, arrival);
    }

    fn forget(&self, page: PageRef) {
        self.0.clock.forget(page);
    }

    fn contains(&self, page: PageRef) -> bool {
        self.0.call(Asked::Contains, page);
        self.0.clock.contains(page)
    }

    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        self.0.call(Asked::Candidates, PageRef::new(0, 1));
        self.0.clock.candidates(residents, frames, pages, candidates);
    }

    fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        self.0.clock.for_each(visit);
    }
}

/// A pool as that of [`pool`], whose policy a test watches.
fn watched_pool() -> (Arc<Pool>, Policy, Vec<PageRef>) {
    let policy = Policy::new();
    let options = PoolOptions { policy: Some(Box::new(policy.clone())), ..table(FRAMES) };
    let pool = Arc::new(open(Arc::new(MemoryDevice::new()), options));
    let pages = (0..FRAMES / 2).map(|value| new_page(&pool, 1, value)).collect();
    (pool, policy, pages)
}

/// The evictor has checked the word of a page, and looks at the next page of its batch.
#[test]
fn a_word_that_is_damaged_after_the_evictor_checked_it_frees_no_other_slot() {
    let (pool, policy, pages) = watched_pool();
    let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
    // So that evictors lock pages that are clean, one after the other.
    pool.sync().unwrap();
    let kept = pages[0];
    let keeper = pool.fix_shared(kept).unwrap();
    let slot = pool.slot_of_page(kept);
    let (weak, mut last) = (Arc::downgrade(&pool), None);
    let damaged = Arc::new(AtomicU64::new(0));
    let count = damaged.clone();
    policy.watch(move |asked, page| match (asked, weak.upgrade()) {
        (Asked::Candidates, _) => last = None,
        (Asked::Contains, Some(pool)) => {
            if let Some(locked) = last.replace(page) {
                count.fetch_add(1, Ordering::Relaxed);
                pool.damage_word(locked, slot);
            }
        }
        _ => {}
    });
    for _ in 0..2 {
        others.iter().for_each(|page| assert_eq!(generation(&pool, *page), Some(1)));
    }
    policy.watch(|_, _| {});
    assert!(damaged.load(Ordering::Relaxed) > FRAMES);
    assert_eq!(stamped(&*keeper, kept), Some(0), "another page has its slot");
    drop(keeper);
    assert_eq!(generation(&pool, kept), Some(0));
    others.into_iter().for_each(|page| pool.free_page(page).unwrap());
    assert_all(&pool, &pages);
}

/// The word of a new page is damaged before the caller of the allocation gets the page.
#[test]
fn a_new_page_whose_word_is_damaged_is_not_lost() {
    let (pool, policy, pages) = watched_pool();
    let others: Vec<PageRef> = (0..2 * FRAMES).map(|_| new_page(&pool, 1, 1)).collect();
    pool.sync().unwrap();
    for slot in wrong_slots(&pool, others[9]) {
        let weak = Arc::downgrade(&pool);
        policy.watch(move |asked, page| {
            if let Some(pool) = weak.upgrade().filter(|_| asked == Asked::Admit) {
                pool.damage_word(page, slot);
            }
        });
        let page = new_page(&pool, 1, 77);
        policy.watch(|_, _| {});
        assert_eq!(generation(&pool, page), Some(77));
        pool.free_page(page).unwrap();
        push_out(&pool, pages[5], &others);
        let mut bytes = [0; PAGE_SIZE];
        stamp(&mut bytes, pages[5], 5);
        let weak = Arc::downgrade(&pool);
        policy.watch(move |asked, page| {
            if let Some(pool) = weak.upgrade().filter(|_| asked == Asked::Admit) {
                pool.damage_word(page, slot);
            }
        });
        pool.insert(pages[5], &bytes).unwrap();
        policy.watch(|_, _| {});
    }
    assert_eq!(pool.stats().damaged_words, 10);
    others.into_iter().for_each(|page| pool.free_page(page).unwrap());
    assert_all(&pool, &pages);
}
