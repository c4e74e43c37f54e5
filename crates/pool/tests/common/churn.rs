//! Threads that read and write the pages of a pool by every kind of access, against a model.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_pool::{PageRef, Pool, Restart};

use super::tasks::block_on;
use super::{Random, new_page, stamp, stamped};

/// Pages, and the generation that each must have. A generation changes only under the page's
/// exclusive lock.
pub struct Churn {
    pub pages: Vec<PageRef>,
    generations: Vec<AtomicU64>,
}

impl Churn {
    /// Allocates pages of the given lengths in turn.
    pub fn new(pool: &Pool, count: usize, frames: &[u32]) -> Churn {
        let frames = frames.iter().cycle().take(count);
        let pages = frames.map(|frames| new_page(pool, *frames, 0)).collect();
        Churn { pages, generations: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    fn expected(&self, index: usize) -> u64 {
        self.generations[index].load(Ordering::Acquire)
    }

    /// One random access to one random page.
    pub fn step(&self, pool: &Pool, random: &mut Random) {
        let index = random.index(self.pages.len());
        let page = self.pages[index];
        match random.index(7) {
            0 | 1 => self.read_optimistically(pool, index),
            2 => {
                let guard = pool.fix_shared(page).unwrap();
                assert_eq!(stamped(&*guard, page), Some(self.expected(index)), "{page}, shared");
            }
            3 => {
                let guard = block_on(pool.fix_shared_async(page)).unwrap();
                assert_eq!(stamped(&*guard, page), Some(self.expected(index)), "{page}, async");
            }
            4 => self.write(index, pool.fix_exclusive(page).unwrap()),
            5 => self.write(index, block_on(pool.fix_exclusive_async(page)).unwrap()),
            _ => {
                let few: [PageRef; 6] = std::array::from_fn(|_| random.pick(&self.pages));
                pool.prefetch(&few);
                if let Ok(guard) = pool.optimistic(page).unwrap().upgrade() {
                    self.write(index, guard);
                }
            }
        }
    }

    /// Such accesses by three threads. Each thread also allocates and frees pages of its own.
    pub fn crowd(&self, pool: &Pool) {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    let mut random = Random(thread);
                    for _ in 0..1_500 {
                        self.step(pool, &mut random);
                        let page = new_page(pool, 1 + random.index(3) as u32, 1);
                        pool.free_page(page).unwrap();
                    }
                });
            }
        });
    }

    fn read_optimistically(&self, pool: &Pool, index: usize) {
        let page = self.pages[index];
        let before = self.expected(index);
        let seen = pool.read(page, |bytes| stamped(bytes, page).ok_or(Restart)).unwrap();
        let after = self.expected(index);
        let seen = seen.unwrap_or_else(|_| panic!("{page} is not what was written"));
        assert!(before <= seen && seen <= after + 1, "{page}: {before} <= {seen} <= {after} + 1");
    }

    fn write(&self, index: usize, mut guard: vellum_pool::ExclusiveGuard<'_>) {
        let page = self.pages[index];
        let generation = self.expected(index);
        assert_eq!(stamped(&*guard, page), Some(generation), "{page}, exclusive");
        stamp(&mut guard, page, generation + 1);
        self.generations[index].store(generation + 1, Ordering::Release);
    }

    /// Checks every page.
    pub fn check(&self, pool: &Pool) {
        for (index, page) in self.pages.iter().enumerate() {
            let guard = pool.fix_shared(*page).unwrap();
            assert_eq!(stamped(&*guard, *page), Some(self.expected(index)), "{page} at the end");
        }
    }
}
