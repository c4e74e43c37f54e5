//! Huge pages of a pool: the pool collapses chunks by itself, no contents are lost, and resident
//! memory stays within the pool's size by the kernel's counts.

#![cfg(not(feature = "model"))]
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)] // helpers of tests may, as tests may

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::churn::Churn;
use common::{Random, Storage, eventually, options, options_on, scratch_dir};
use vellum_pool::device::Direct;
use vellum_pool::{
    BackendChoice, BackendKind, HugePageStats, HugePages, PAGE_SIZE, PageRef, Pool, PoolOptions,
    Translation,
};
use vellum_testing::memory_group::MemoryGroup;
use vellum_testing::patience::SetWhenDropped;

/// Pages of a chunk.
const CHUNK: u64 = 512;
/// Frames of the pools of these tests: 48 MiB.
const CAPACITY: u64 = 24 * CHUNK;
/// Free frames above which the pool collapses a chunk without waiting.
const ROOM: u64 = CAPACITY / 16 + CHUNK;
const BATCH: u64 = 64;
/// A pool that evicts collapses no chunk before it has stayed whole for this long.
const SHORTEST_STAY: Duration = Duration::from_secs(1);

/// Whether the kernel has the facilities that huge pages need. Prints a line if not.
fn works() -> bool {
    let works = vellum_vm::probe::huge_pages();
    if let Err(reason) = &works {
        eprintln!("skipped: no huge pages here: {reason}");
    }
    works.is_ok()
}

/// The backend that a pool with huge pages chooses. Exmap has no huge pages.
fn with_huge_pages() -> BackendChoice {
    BackendChoice::Only(vellum_vm::probe::choice_without_exmap().backend)
}

fn pool_options(backend: BackendChoice) -> PoolOptions {
    PoolOptions {
        eviction_batch: BATCH as usize,
        translation: Translation::Mmu,
        ..options_on(backend, CAPACITY)
    }
}

fn pool() -> Pool {
    common::open(Storage::Memory.create(&scratch_dir()), pool_options(with_huge_pages()))
}

fn stats(pool: &Pool) -> HugePageStats {
    pool.huge_page_stats()
}

/// Waits until so many chunks are collapsed.
#[track_caller]
fn collapsed(pool: &Pool, chunks: u64) {
    eventually("chunks are collapsed", || stats(pool).collapsed >= chunks);
    assert_eq!(stats(pool).collapsed, chunks, "{:?}", stats(pool));
}

/// A little less than `milliseconds`, because the pool's clock counts whole milliseconds.
fn almost(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds - 1)
}

/// KiB of huge pages in the mapping that a page lies in, by the kernel's count.
fn huge_kib(pool: &Pool, page: PageRef) -> u64 {
    let address = pool.fix_shared(page).unwrap().as_ptr().addr();
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    let mut sum = 0;
    for line in text.lines() {
        let first = line.split(' ').next().unwrap_or("");
        if let Some((start, end)) = first.split_once('-')
            && let (Some(start), Some(end)) = (hex(start), hex(end))
        {
            inside = (start..end).contains(&address);
        } else if inside && first == "AnonHugePages:" {
            sum += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

fn new_pages(pool: &Pool, count: u64, generation: u64) -> Vec<PageRef> {
    (0..count).map(|_| common::new_page(pool, 1, generation)).collect()
}

#[track_caller]
fn all_have(pool: &Pool, pages: &[PageRef], generation: u64) {
    for page in pages {
        assert_eq!(common::generation(pool, *page), Some(generation), "{page}");
    }
}

#[test]
fn whole_chunks_are_collapsed_and_split_when_a_page_is_freed() {
    if !works() {
        return;
    }
    let pool = pool();
    let pages = new_pages(&pool, 5 * CHUNK + 100, 1);
    collapsed(&pool, 5);
    eventually("the kernel has them", || huge_kib(&pool, pages[0]) == 5 * 2048);
    all_have(&pool, &pages, 1);
    assert!(pool.kernel_resident_pages().unwrap() <= pool.stats().resident_frames);

    let freed = pages[3 * CHUNK as usize + 7];
    let start = Instant::now();
    pool.free_page(freed).unwrap();
    assert_eq!((stats(&pool).collapsed, stats(&pool).splits), (4, 1));
    assert_eq!(huge_kib(&pool, pages[0]), 4 * 2048);
    let guard = pool.allocate(1).unwrap();
    assert_eq!(guard.page(), freed, "the hole is filled first");
    assert!(guard.iter().all(|byte| *byte == 0), "a reused page is not zeroed");
    drop(guard);

    // The chunk is whole again, but it was split before, so the collapse comes after a delay.
    collapsed(&pool, 5);
    assert!(start.elapsed() >= almost(500), "{:?}", start.elapsed());
    let others: Vec<_> = pages.into_iter().filter(|page| *page != freed).collect();
    all_have(&pool, &others, 1);
}

#[test]
fn a_chunk_that_is_split_soon_waits_longer_each_time() {
    if !works() {
        return;
    }
    let pool = pool();
    let pages = new_pages(&pool, CHUNK, 1);
    collapsed(&pool, 1);
    for wait in [500, 1_000] {
        let start = Instant::now();
        pool.free_page(pages[9]).unwrap();
        assert_eq!(pool.allocate(1).unwrap().page(), pages[9]);
        collapsed(&pool, 1);
        assert!(start.elapsed() >= almost(wait), "{:?}", start.elapsed());
    }
}

#[test]
fn pools_that_cannot_have_huge_pages() {
    let mut without = vec![
        PoolOptions { huge_pages: HugePages::Off, ..pool_options(with_huge_pages()) },
        PoolOptions { evictors: 0, ..pool_options(with_huge_pages()) },
        options(15 * CHUNK),
    ];
    let exmap = BackendChoice::Only(BackendKind::Exmap);
    if common::backends().contains(&exmap) {
        without.push(pool_options(exmap));
    }
    for options in without {
        let pool = common::open(Storage::Memory.create(&scratch_dir()), options);
        let pages = new_pages(&pool, 3 * CHUNK, 1);
        thread::sleep(Duration::from_millis(50));
        assert_eq!((stats(&pool), huge_kib(&pool, pages[0])), (HugePageStats::default(), 0));
    }
}

/// Pages of several frames that lie across chunks, fill them, and contain them.
#[test]
fn pages_of_all_lengths_come_and_go() {
    if !works() {
        return;
    }
    let pool = pool();
    let mut random = Random(7);
    let mut living: Vec<PageRef> = Vec::new();
    let mut frames = 0;
    for round in 0..400 {
        if frames < CAPACITY - ROOM - 3 * CHUNK && (random.index(5) > 1 || living.is_empty()) {
            let count = random.pick(&[1, 2, 3, 100, 511, 512, 513, 1024, 1500]);
            let guard = pool.allocate(count).unwrap();
            assert!(guard.iter().step_by(64).all(|byte| *byte == 0), "not zeroed");
            let page = guard.page();
            drop(guard);
            common::stamp(&mut pool.fix_exclusive(page).unwrap(), page, page.id.0);
            frames += u64::from(count);
            living.push(page);
        } else {
            let page = living.swap_remove(random.index(living.len()));
            assert_eq!(common::generation(&pool, page), Some(page.id.0));
            pool.free_page(page).unwrap();
            frames -= u64::from(page.frames);
        }
        if round % 16 == 0 {
            thread::sleep(Duration::from_millis(5));
        }
    }
    eventually("something is collapsed", || stats(&pool).collapsed > 0);
    living.iter().for_each(|page| {
        assert_eq!(common::generation(&pool, *page), Some(page.id.0));
    });
    living.iter().for_each(|page| pool.free_page(*page).unwrap());
    eventually("nothing is held", || pool.frames_to_free() == 0);
    eventually("nothing is left", || pool.stats().resident_frames == 0);
    assert_eq!((pool.kernel_resident_pages().unwrap(), stats(&pool).collapsed), (0, 0));
}

/// How fast a thread makes accesses.
#[derive(Clone, Copy)]
enum Pace {
    Full,
    /// One access for each page that leaves. So no policy can keep all of the thread's pages.
    Evictions,
}

/// Has a thread for each churn make accesses of all kinds, until `done`.
fn churn_until(pool: &Pool, churns: &[(&Churn, Pace)], done: impl Fn() -> bool) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for (seed, (churn, pace)) in churns.iter().enumerate() {
            let stop = &stop;
            scope.spawn(move || {
                let mut random = Random(seed as u64);
                let mut evictions = pool.stats().evictions;
                while !stop.load(Ordering::Relaxed) {
                    let accesses = match pace {
                        Pace::Full => 64,
                        Pace::Evictions => (pool.stats().evictions - evictions).min(64),
                    };
                    (0..accesses).for_each(|_| churn.step(pool, &mut random));
                    evictions += accesses;
                    if accesses == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        let deadline = Instant::now() + common::PATIENCE;
        while !done() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Two threads use these pages until so many chunks are collapsed.
fn churn_until_collapsed(pool: &Pool, churn: &Churn, chunks: u64) {
    churn_until(pool, &[(churn, Pace::Full); 2], || stats(pool).collapsed >= chunks);
}

/// A thread makes and uses as many new pages as the pool has room for, which splits chunks of the
/// others: so many, and for so long at least. Returns the new pages.
#[track_caller]
fn churn_until_split(pool: &Pool, others: &Churn, chunks: u64, time: Duration) -> Churn {
    let before = stats(pool).splits;
    let new = Churn::new(pool, CAPACITY as usize, &[1]);
    let deadline = Instant::now() + time;
    let has_split = || stats(pool).splits >= before + chunks;
    let churns = [(&new, Pace::Full), (others, Pace::Evictions)];
    churn_until(pool, &churns, || has_split() && Instant::now() > deadline);
    assert!(has_split(), "{:?}", stats(pool));
    new
}

/// The threads use a set of pages that fits the pool, which collapses it, and, in turn, a larger
/// set, which splits it. Meanwhile pages are read, written and written back.
fn contents_survive(storage: Storage, backend: BackendChoice, rounds: u32) {
    let dir = scratch_dir();
    let pool = common::open(storage.create(&dir), pool_options(backend));
    let fits = Churn::new(&pool, 10 * CHUNK as usize, &[1]);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        scope.spawn(|| watch(&pool, &stop));
        for round in 0..rounds {
            churn_until_collapsed(&pool, &fits, 10);
            assert!(stats(&pool).collapsed >= 10, "round {round}: {:?}", stats(&pool));
            let other = churn_until_split(&pool, &fits, 8, Duration::from_millis(400));
            other.check(&pool);
            other.pages.iter().for_each(|page| pool.free_page(*page).unwrap());
            pool.sync().unwrap();
        }
    });
    fits.check(&pool);
    let stats = pool.stats();
    assert!(stats.resident_frames_peak <= CAPACITY, "{stats:?}");
}

/// Checks the page tables while pages come and go, as in `pool_memory_contract`.
fn watch(pool: &Pool, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let gone = || pool.stats().evictions + pool.stats().frees;
        let before = gone();
        let resident = pool.kernel_resident_pages().unwrap();
        let meanwhile = gone() - before + 4 * BATCH;
        assert!(resident <= CAPACITY + meanwhile, "{resident} resident, {meanwhile} gone");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn contents_survive_in_memory() {
    if works() {
        let exmap = BackendChoice::Only(BackendKind::Exmap);
        let backends = common::backends().into_iter().filter(|backend| *backend != exmap);
        backends.for_each(|it| contents_survive(Storage::Memory, it, 2));
    }
}

#[test]
fn contents_survive_on_files() {
    if works() {
        let direct = |storage: &Storage| matches!(storage, Storage::File(_, Direct::Auto));
        let storages = Storage::all().into_iter().filter(direct);
        storages.for_each(|it| contents_survive(it, with_huge_pages(), 1));
    }
}

/// Scans and random reads of twice the pool's size. Chunks become whole, but do not stay so, and
/// the pool does not collapse them.
#[test]
fn a_pool_under_steady_pressure_does_not_thrash() {
    if !works() {
        return;
    }
    let pool = pool();
    let mut start = Instant::now();
    let pages = new_pages(&pool, 2 * CAPACITY, 1);
    let mut random = Random(3);
    let before = (stats(&pool), pool.stats().evictions);
    // A chunk stays whole from some moment of a round to the same moment of the next one at most.
    let is_slow = |time: &Duration| *time >= SHORTEST_STAY / 2;
    let mut slow = Some(start.elapsed()).filter(is_slow).unwrap_or_default();
    for _ in 0..4 {
        start = Instant::now();
        all_have(&pool, &pages, 1);
        for _ in 0..CAPACITY {
            assert_eq!(common::generation(&pool, random.pick(&pages)), Some(1));
        }
        slow += Some(start.elapsed()).filter(is_slow).unwrap_or_default();
    }
    let chunks = (pool.stats().evictions - before.1) / CHUNK;
    let collapses = stats(&pool).collapses - before.0.collapses;
    // On a slow machine chunks do stay whole, each of them once for the shortest time, then for
    // twice as long, and so on.
    let stays = (slow.div_duration_f64(SHORTEST_STAY) + 1.0).log2().ceil() as u64;
    let most = chunks / 10 + stays * 2 * CAPACITY / CHUNK;
    assert!(chunks > 100 && collapses <= most, "{collapses} collapses, {chunks} evicted, {slow:?}");
}

/// The kernel does I/O from one page of a huge page. Other pages of it cannot be evicted, so the
/// pool evicts pages of other chunks, and freeing a page does not wait for long.
#[test]
fn pages_in_a_huge_page_under_io_stay() {
    if !works() {
        return;
    }
    let pool = pool();
    let pages = new_pages(&pool, 12 * CHUNK, 1);
    collapsed(&pool, 12);
    let held = pages[4 * CHUNK as usize + 3];
    let guard = pool.fix_shared(held).unwrap();
    let mut ends = [-1; 2];
    // SAFETY: two descriptors are written.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let part = libc::iovec { iov_base: guard.as_ptr().cast_mut().cast(), iov_len: PAGE_SIZE };
    // SAFETY: the page is held, and not changed until the pipe is closed.
    let spliced = unsafe { libc::vmsplice(ends[1], &raw const part, 1, 0) };
    assert_eq!(spliced, PAGE_SIZE as isize);

    let more = new_pages(&pool, 2 * CAPACITY, 2);
    all_have(&pool, &more, 2);
    let beside = pages[4 * CHUNK as usize + 100];
    assert!(stats(&pool).declined > 0 && pool.is_resident(beside), "{:?}", stats(&pool));
    let start = Instant::now();
    pool.free_page(beside).unwrap();
    // The page does not leave before the I/O ends, which is after this.
    assert!(start.elapsed() < common::PATIENCE, "{:?}", start.elapsed());
    assert!(!pool.is_resident(beside));
    for end in ends {
        // SAFETY: the descriptors are the test's own.
        assert_eq!(unsafe { libc::close(end) }, 0);
    }
    drop(guard);
    let others: Vec<_> = pages.into_iter().filter(|page| *page != beside).collect();
    common::push_out(&pool, held, &more);
    all_have(&pool, &others, 1);
    all_have(&pool, &more, 2);
}

#[test]
fn the_memory_contract_holds_by_the_count_of_the_group() {
    let test = "the_memory_contract_holds_by_the_count_of_the_group";
    let Some(group) = works().then(|| MemoryGroup::entered(test)).flatten() else { return };
    let frames = |file| group.bytes(file) / PAGE_SIZE as u64;
    let dir = scratch_dir();
    let direct = |storage: &Storage| matches!(storage, Storage::File(_, Direct::Auto));
    let Some(storage) = Storage::all().into_iter().find(direct) else { return };
    let device = storage.create(&dir);
    let pool = common::open(device, pool_options(with_huge_pages()));
    let before = frames("memory.usage_in_bytes");
    let fits = Churn::new(&pool, 10 * CHUNK as usize, &[1]);
    collapsed(&pool, 10);
    // Other memory of the group: threads, page tables, states, and what the kernel charges in
    // advance.
    let slack = 4 * CHUNK;
    for _ in 0..2 {
        let other = churn_until_split(&pool, &fits, 5, Duration::from_millis(500));
        let most = frames("memory.max_usage_in_bytes") - before;
        assert!(most <= CAPACITY + slack, "{most} frames of {CAPACITY}: {:?}", stats(&pool));
        other.pages.iter().for_each(|page| pool.free_page(*page).unwrap());
        let used = frames("memory.usage_in_bytes").saturating_sub(before);
        let resident = pool.stats().resident_frames;
        assert!(used <= resident + slack, "{used} frames for {resident}: {:?}", stats(&pool));
        churn_until_collapsed(&pool, &fits, 10);
    }
    assert!(stats(&pool).splits > 8, "{:?}", stats(&pool));
}
