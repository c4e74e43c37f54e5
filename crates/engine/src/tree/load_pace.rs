//! How a bulk load leaves the storage to threads that wait for pages.
//!
//! A thread that looks entries up asks for one page, and waits for it. A load has pages to write at
//! any time, and takes what it can get: of one reader on two processors it left 0.47 of the rate
//! (docs/benchmarks.md). So while other threads miss pages, the load stores few pages and rests.
//! While they find all pages in memory, or do nothing, it does not rest. Pages that scans read
//! ahead are no misses.

use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use vellum_pool::Pool;

/// After so many pages the load looks whether others wait.
const STRETCH: u64 = 64;
/// Others wait if they have read so many pages during a stretch.
const WAITING: u64 = 16;
/// Then the load rests until they have read so many pages for each that it has stored ...
const READS_PER_PAGE: u64 = 5;
/// ... and at most so many times as long as the stretch took.
const RESTS: u32 = 2;
/// A stretch that took longer waited for its input.
const LONGEST_STRETCH: Duration = Duration::from_millis(10);
/// How long the load sleeps before it looks again.
const NAP: Duration = Duration::from_micros(200);

/// The stretch of a load that is under way.
#[derive(Debug)]
pub(super) struct LoadPace {
    began: Instant,
    /// The thread that stores its pages. Others can go on with the load, in stretches of their own.
    thread: ThreadId,
    stored: u64,
    /// What [`Pool::misses_of_others`] was when the stretch began.
    misses: u64,
}

impl LoadPace {
    pub(super) fn new(pool: &Pool) -> LoadPace {
        let (began, misses) = (Instant::now(), pool.misses_of_others());
        LoadPace { began, thread: thread::current().id(), stored: 0, misses }
    }

    /// The load is about to store so many pages. The caller has begun no change, and holds no page.
    pub(super) fn step(&mut self, pool: &Pool, pages: u64) {
        self.stored += pages;
        if self.stored < STRETCH {
            return;
        }
        if thread::current().id() != self.thread {
            *self = LoadPace::new(pool);
            return;
        }
        let read = || pool.misses_of_others().wrapping_sub(self.misses);
        let end = Instant::now() + longest_rest(read(), self.began.elapsed());
        while read() < READS_PER_PAGE * self.stored && Instant::now() < end {
            thread::sleep(NAP);
        }
        *self = LoadPace::new(pool);
    }
}

/// How long the load rests after a stretch that took so long, and in which others read so many
/// pages.
fn longest_rest(read: u64, stretch: Duration) -> Duration {
    match read < WAITING {
        true => Duration::ZERO,
        false => stretch.min(LONGEST_STRETCH) * RESTS,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum_pool::device::MemoryDevice;

    use super::*;
    use crate::{Options, Store};

    #[test]
    fn a_load_rests_while_another_thread_misses_pages_and_not_for_its_own() {
        let options = Options::new().pool_bytes(1 << 18);
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap();
        let tree = store.create_tree("t").unwrap();
        tree.bulk_load((0..4000_u32).map(|n| (n.to_be_bytes(), [7; 300]))).unwrap();
        let pool = &tree.tree_ref().pages.pool;
        // The tree has four times the pool, and each of these keys a leaf of its own.
        let read_some = || {
            let before = store.pool_stats().misses;
            (0..4000_u32).step_by(40).for_each(|n| drop(tree.get(&n.to_be_bytes()).unwrap()));
            let misses = store.pool_stats().misses - before;
            assert!((WAITING..READS_PER_PAGE * STRETCH).contains(&misses), "{misses}");
        };
        let mut pace = LoadPace::new(pool);
        let before = pool.misses_of_others();
        read_some();
        assert_eq!(pool.misses_of_others(), before, "the misses are those of this thread");
        thread::scope(|scope| scope.spawn(read_some).join().unwrap());
        thread::sleep(LONGEST_STRETCH);
        (1..STRETCH).for_each(|_| pace.step(pool, 1));
        let start = Instant::now();
        pace.step(pool, 1);
        assert!(start.elapsed() >= LONGEST_STRETCH * RESTS, "{:?}", start.elapsed());
        assert!(pace.stored == 0 && pace.misses == pool.misses_of_others());
    }

    #[test]
    fn a_rest_is_as_long_as_the_stretch_allows() {
        let millisecond = Duration::from_millis(1);
        assert_eq!(longest_rest(WAITING - 1, millisecond), Duration::ZERO);
        assert_eq!(longest_rest(WAITING, millisecond), 2 * millisecond);
        assert_eq!(longest_rest(WAITING, 100 * millisecond), 20 * millisecond);
    }
}
