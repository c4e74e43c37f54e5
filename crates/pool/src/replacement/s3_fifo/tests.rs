//! Each rule of the policy, in a cache that knows no more than page states.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashSet};

use super::*;
use crate::replacement::MarkOutcome;

/// A pool reduced to states: which pages are resident, and whether they are marked.
struct Cache {
    policy: S3Fifo,
    marked: RefCell<BTreeMap<PageRef, bool>>,
    in_use: RefCell<HashSet<PageRef>>,
    frames: u64,
    used: Cell<u64>,
    batch: usize,
}

impl Residents for Cache {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        match self.marked.borrow_mut().get_mut(&page) {
            _ if self.in_use.borrow().contains(&page) => MarkOutcome::InUse,
            Some(marked) if *marked => MarkOutcome::AlreadyMarked,
            Some(marked) => {
                *marked = true;
                MarkOutcome::Marked
            }
            None => MarkOutcome::InUse,
        }
    }
}

impl Cache {
    fn new(frames: u64) -> Cache {
        Cache::with_shards(frames, 1)
    }

    fn with_shards(frames: u64, shards: u64) -> Cache {
        Cache {
            policy: S3Fifo::with_shards(frames, shards),
            marked: RefCell::default(),
            in_use: RefCell::default(),
            frames,
            used: Cell::new(0),
            batch: 16,
        }
    }

    fn candidates(&self, frames: u64, pages: usize) -> Vec<PageRef> {
        let mut candidates = Vec::new();
        self.policy.candidates(self, frames, pages, &mut candidates);
        candidates
    }

    fn remove(&self, page: PageRef) {
        self.policy.forget(page);
        self.used.update(|used| used - u64::from(page.frames));
        self.marked.borrow_mut().remove(&page);
    }

    /// True for a hit.
    fn access_page(&self, page: PageRef) -> bool {
        if let Some(marked) = self.marked.borrow_mut().get_mut(&page) {
            *marked = false;
            return true;
        }
        self.load(page, Arrival::Needed);
        false
    }

    fn load(&self, page: PageRef, arrival: Arrival) {
        while self.used.get() + u64::from(page.frames) > self.frames {
            let found = self.candidates(u64::from(page.frames).max(16), self.batch);
            assert!(!found.is_empty());
            found.into_iter().for_each(|page| self.remove(page));
        }
        self.policy.admit(page, arrival);
        self.used.update(|used| used + u64::from(page.frames));
        self.marked.borrow_mut().insert(page, false);
    }

    fn read_ahead(&self, ids: impl IntoIterator<Item = u64>) {
        ids.into_iter()
            .filter(|id| !self.is_resident(*id))
            .for_each(|id| self.load(PageRef::new(id, 1), Arrival::Ahead));
    }

    fn access(&self, id: u64) -> bool {
        self.access_page(PageRef::new(id, 1))
    }

    fn hits(&self, ids: impl IntoIterator<Item = u64>) -> usize {
        ids.into_iter().filter(|id| self.access(*id)).count()
    }

    fn is_resident(&self, id: u64) -> bool {
        self.marked.borrow().contains_key(&PageRef::new(id, 1))
    }

    /// Fills the cache with `hot` pages that are in the main queue, and others.
    fn with_hot_pages(frames: u64, hot: u64) -> Cache {
        let cache = Cache::new(frames);
        cache.hits(0..hot);
        cache.hits(1_000_000..1_000_000 + frames);
        cache.hits(0..hot);
        cache
    }
}

const SCAN: std::ops::Range<u64> = 10_000..14_000;

#[test]
fn a_scan_leaves_the_main_queue_alone() {
    let cache = Cache::with_hot_pages(1_000, 500);
    assert_eq!(cache.hits(SCAN), 0);
    assert_eq!(cache.hits(0..500), 500);
}

/// An eighth of the cache ahead, as scans of a store read. Threads access the hot pages meanwhile.
#[test]
fn a_scan_that_reads_ahead_finds_its_pages_and_leaves_the_main_queue_alone() {
    let cache = Cache::with_hot_pages(1_000, 500);
    for id in SCAN.start..SCAN.start + 125 {
        cache.read_ahead([id]);
        cache.hits((0..500).filter(|hot| (hot + id) % 20 == 0));
    }
    for id in SCAN {
        if id % 20 == 0 {
            assert_eq!(cache.hits(0..500), 500);
        }
        cache.read_ahead(id + 125..id + 126);
        assert!(cache.access(id), "it is not gone before it was used");
    }
}

#[test]
fn pages_that_were_read_ahead_for_nothing_leave() {
    let cache = Cache::with_hot_pages(1_000, 500);
    for id in 7_000..7_200 {
        cache.read_ahead([id]);
        cache.hits((0..500).filter(|hot| (hot + id) % 20 == 0));
    }
    // The pages have a quarter of the frames, and then pass the small queue.
    for id in SCAN.take(600) {
        if id % 20 == 0 {
            assert_eq!(cache.hits(0..500), 500);
        }
        cache.access(id);
    }
    assert_eq!((7_000..7_200).filter(|id| cache.is_resident(*id)).count(), 0);
}

#[test]
fn pages_that_were_read_ahead_have_a_part_of_the_cache_and_give_it_up() {
    let is_ahead = |cache: &Cache| lock(&cache.policy.shards[0].0).ahead_frames();
    let cache = Cache::with_hot_pages(1_000, 500);
    cache.read_ahead(7_000..9_000);
    assert!((240..=250).contains(&is_ahead(&cache)), "{}", is_ahead(&cache));
    // None of the main queue can leave.
    let is_main = |page: &PageRef| page.id.0 < 500;
    let main: HashSet<_> = cache.marked.borrow().keys().copied().filter(is_main).collect();
    let main_frames = main.len() as u64;
    cache.in_use.replace(main);
    for _ in 0..100 {
        cache.candidates(64, 64).into_iter().for_each(|page| cache.remove(page));
    }
    assert_eq!(is_ahead(&cache), 0);
    assert_eq!(cache.used.get(), main_frames);
}

/// A blob that is read ahead may be larger than their part.
#[test]
fn large_pages_that_were_read_ahead_leave_others_room() {
    let cache = Cache::with_hot_pages(1_000, 500);
    for at in 0..50 {
        cache.load(PageRef::new(100_000 + at * 100, 100), Arrival::Ahead);
        let ahead = lock(&cache.policy.shards[0].0).ahead_frames();
        assert!(ahead <= 250, "{ahead}");
    }
    cache.load(PageRef::new(200_000, 400), Arrival::Ahead);
    assert_eq!(lock(&cache.policy.shards[0].0).ahead_frames(), 0);
}

#[test]
fn what_was_hot_once_leaves_in_the_end() {
    let cache = Cache::with_hot_pages(500, 250);
    cache.hits(SCAN);
    let kept = (0..250).filter(|id| cache.is_resident(*id)).count();
    assert!(kept > 225, "{kept} of 250: a scan over eight times the cache is none of the end");
    cache.hits(100_000..200_000);
    assert_eq!((0..250).filter(|id| cache.is_resident(*id)).count(), 0);
}

#[test]
fn an_access_soon_after_the_load_is_part_of_it() {
    let cache = Cache::with_hot_pages(1_000, 500);
    for id in SCAN {
        cache.access(id);
        assert!(cache.access(id), "it is not gone before it was used");
    }
    assert_eq!(cache.hits(0..500), 500, "the scan passed by all the same");
}

#[test]
fn an_access_after_the_mark_moves_a_page_to_the_main_queue() {
    let cache = Cache::with_hot_pages(1_000, 500);
    cache.access(7_000);
    // More than 30 % and less than all of the small queue, of 62 pages.
    cache.hits(20_000..20_045);
    assert!(cache.access(7_000));
    cache.hits(SCAN);
    assert!(cache.is_resident(7_000));
}

#[test]
fn a_page_that_comes_back_soon_goes_to_the_main_queue() {
    let cache = Cache::with_hot_pages(1_000, 500);
    cache.access(7_000);
    cache.hits(20_000..20_500);
    assert!(!cache.access(7_000), "it had left");
    cache.hits(SCAN);
    assert!(cache.is_resident(7_000));
}

#[test]
fn a_page_that_comes_back_late_is_new() {
    let cache = Cache::with_hot_pages(1_000, 500);
    cache.access(7_000);
    cache.hits(20_000..22_000);
    assert!(!cache.access(7_000));
    cache.hits(SCAN);
    assert!(!cache.is_resident(7_000));
}

#[test]
fn freed_pages_leave_no_ghost() {
    let cache = Cache::with_hot_pages(1_000, 500);
    cache.access(7_000);
    cache.remove(PageRef::new(7_000, 1));
    cache.access(7_000);
    cache.hits(SCAN);
    assert!(!cache.is_resident(7_000));
}

/// Pages that LRU would keep must not count as a scan forever.
#[test]
fn a_new_working_set_that_fits_replaces_the_old_one() {
    let cache = Cache::with_hot_pages(1_000, 1_000);
    cache.hits(50_000..50_900);
    cache.hits(50_000..50_900);
    cache.hits(50_000..50_900);
    let hits = cache.hits(50_000..50_900);
    assert!(hits > 850, "{hits} of 900 in the fourth round");
}

#[test]
fn a_loop_that_does_not_fit_still_hits() {
    let cache = Cache::new(1_000);
    for length in [1_100, 2_000, 5_000] {
        cache.hits(0..length);
        let hits = cache.hits(0..length);
        assert!(hits > 600, "{hits} hits of a loop over {length} pages, 1,000 at best");
    }
}

#[test]
fn hot_pages_outlive_warm_ones() {
    let cache = Cache::with_hot_pages(1_000, 1_000);
    // The hot half is accessed so often that every look finds it accessed. Pages that come back
    // from among the ghosts press on the main queue.
    let mut press = (0..20).flat_map(|round| {
        (0..2).flat_map(move |_| 100_000 + round * 100..100_000 + round * 100 + 100)
    });
    for _ in 0..20 {
        cache.hits(0..450);
        cache.hits(press.by_ref().take(200));
    }
    let kept = (0..450).filter(|id| cache.is_resident(*id)).count();
    assert!(kept > 430, "{kept} of the hot pages");
}

#[test]
fn frames_are_counted_not_pages() {
    let cache = Cache::new(1_000);
    for at in 0..100 {
        cache.access_page(PageRef::new(at * 10, 10));
    }
    let found = cache.candidates(25, 64);
    assert_eq!(found.len(), 3, "{found:?}");
    let found = cache.candidates(1_000, 4);
    assert_eq!(found.len(), 4, "{found:?}");
    // A page as large as the cache evicts everything else.
    cache.access_page(PageRef::new(5_000, 1_000));
    assert_eq!(cache.marked.borrow().len(), 1);
    assert!(!cache.access(1));
    assert_eq!(cache.marked.borrow().len(), 1);
}

#[test]
fn used_pages_stay_and_the_search_ends() {
    for shards in [1, 4] {
        let cache = Cache::with_shards(64, shards);
        cache.hits(0..64);
        cache.in_use.borrow_mut().extend((0..64).map(|id| PageRef::new(id, 1)));
        assert_eq!(cache.candidates(8, 8), []);
        for unused in [5, 60] {
            cache.in_use.borrow_mut().remove(&PageRef::new(unused, 1));
            assert_eq!(cache.candidates(8, 8), [PageRef::new(unused, 1)]);
            cache.in_use.borrow_mut().insert(PageRef::new(unused, 1));
        }
    }
}

#[test]
fn no_page_is_proposed_twice_in_a_batch() {
    let cache = Cache::with_shards(256, 4);
    cache.hits(0..256);
    for wanted in [1, 7, 64, 256, 1_000] {
        let found = cache.candidates(wanted, wanted as usize);
        let distinct: HashSet<PageRef> = found.iter().copied().collect();
        assert_eq!(distinct.len(), found.len());
    }
}

#[test]
fn proposed_pages_that_stay_are_proposed_again() {
    let cache = Cache::new(100);
    cache.hits(0..100);
    let mut proposed: BTreeMap<PageRef, u32> = BTreeMap::new();
    for _ in 0..100 {
        for page in cache.candidates(10, 10) {
            *proposed.entry(page).or_default() += 1;
        }
    }
    assert!(proposed.len() > 90, "{} of 100: few new pages are left in peace", proposed.len());
    assert!(proposed.values().all(|times| *times > 5), "{proposed:?}");
    let mut visited = HashSet::new();
    cache.policy.for_each(&mut |page| {
        assert!(cache.policy.contains(page) && visited.insert(page));
    });
    assert_eq!(visited.len(), 100);
}

#[test]
fn shards_keep_their_size() {
    let cache = Cache::with_shards(2_048, 8);
    cache.hits(0..20_000);
    for shard in &cache.policy.shards {
        let pages = lock(&shard.0).len();
        assert!((192..=320).contains(&pages), "{pages} pages, 256 on average");
    }
}

#[test]
fn a_pool_of_any_size_has_shards_of_a_good_size() {
    for (frames, shards) in [(8, 1), (8_191, 1), (8_192, 2), (1 << 18, 64), (1 << 22, 64)] {
        assert_eq!(S3Fifo::new(frames).shards.len(), shards);
    }
}
