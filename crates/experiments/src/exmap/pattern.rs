//! Chooses the next pages to populate, in order or at random, and claims them.
//!
//! As in the second paper (IEEE Access 2023, IV-A) a thread claims a page before it populates the
//! page, and drops the claim after it has freed the page. Exported page tables replace the paper's
//! array of one byte a page: a load of the entry then tells whether the page is present.
//! Experiments that measure neither use one bit a page: after each flush of TLBs random accesses to
//! memory miss the TLB once for each page of it, and the byte array of a large surface has as many
//! pages as a batch.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::device::Tables;
use vellum_bench::workload::values::Random;

/// Pages of a batch.
pub const BATCH: usize = 512;

/// Pages that a thread of the sequential pattern goes through in circles, at most: 512 MiB.
const CIRCLE: u64 = 1 << 17;

/// The most pages that the random pattern tries for each page that it wants.
const TRIES: usize = 16;

/// The order in which a thread populates pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// One after the other in the thread's own part of the surface, in circles.
    Sequential,
    /// Any of the whole surface.
    Random,
}

impl Pattern {
    /// Both.
    pub const ALL: [Pattern; 2] = [Pattern::Sequential, Pattern::Random];

    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Sequential => "sequential",
            Pattern::Random => "random",
        }
    }
}

/// The claims to pages.
pub trait Claims: Sync {
    /// Claims a page; false if another thread has it.
    fn claim(&self, page: u64) -> bool;

    /// Drops the claim after the page was freed.
    fn release(&self, page: u64);
}

/// A byte a page: 1 while a thread has the page.
#[derive(Debug)]
pub struct StateArray(Box<[AtomicU8]>);

impl StateArray {
    /// An array for `pages` pages, none of them claimed.
    pub fn new(pages: u64) -> StateArray {
        StateArray((0..pages).map(|_| AtomicU8::new(0)).collect())
    }
}

impl Claims for StateArray {
    #[inline]
    fn claim(&self, page: u64) -> bool {
        let state = &self.0[page as usize];
        state.load(Ordering::Relaxed) == 0 && state.swap(1, Ordering::Acquire) == 0
    }

    #[inline]
    fn release(&self, page: u64) {
        self.0[page as usize].store(0, Ordering::Release);
    }
}

/// A bit a page: set while a thread has the page.
#[derive(Debug)]
pub struct Claimed(Box<[AtomicU64]>);

impl Claimed {
    /// An array for `pages` pages, none of them claimed.
    pub fn new(pages: u64) -> Claimed {
        Claimed((0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    /// The number of claimed pages.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    #[inline]
    fn word_and_bit(&self, page: u64) -> (&AtomicU64, u64) {
        (&self.0[(page / 64) as usize], 1 << (page % 64))
    }
}

impl Claims for Claimed {
    #[inline]
    fn claim(&self, page: u64) -> bool {
        let (word, bit) = self.word_and_bit(page);
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Acquire) & bit == 0
    }

    #[inline]
    fn release(&self, page: u64) {
        let (word, bit) = self.word_and_bit(page);
        word.fetch_and(!bit, Ordering::Release);
    }
}

/// A page may be populated if it is absent. If several threads want it, the kernel decides.
impl Claims for Tables {
    #[inline]
    fn claim(&self, page: u64) -> bool {
        !self.has(page)
    }

    #[inline]
    fn release(&self, _page: u64) {}
}

/// Chooses pages for a thread.
#[derive(Debug)]
pub struct Chooser {
    pattern: Pattern,
    random: Random,
    first: u64,
    length: u64,
    next: u64,
}

impl Chooser {
    /// For one of so many threads, on a surface of so many pages.
    pub fn new(pattern: Pattern, thread: usize, threads: usize, pages: u64) -> Chooser {
        let random = Random::new(thread as u64 + 1);
        let (first, length) = match pattern {
            Pattern::Sequential => {
                let share = pages / threads as u64;
                (share * thread as u64, share.min(CIRCLE))
            }
            Pattern::Random => (0, pages),
        };
        Chooser { pattern, random, first, length, next: 0 }
    }

    /// Claims up to this many of the next pages. It claims fewer if other threads have some: the
    /// sequential pattern skips those, and the random one tries a limited number of others.
    #[inline]
    pub fn choose(&mut self, claims: &impl Claims, most: usize, batch: &mut Vec<u64>) {
        batch.clear();
        match self.pattern {
            Pattern::Sequential => {
                for _ in 0..most.min(self.length as usize) {
                    let page = self.first + self.next;
                    self.next = if self.next + 1 == self.length { 0 } else { self.next + 1 };
                    if claims.claim(page) {
                        batch.push(page);
                    }
                }
            }
            Pattern::Random => {
                for _ in 0..most * TRIES {
                    let page = self.first + self.random.below(self.length);
                    if claims.claim(page) {
                        batch.push(page);
                        if batch.len() == most {
                            break;
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequential_pattern_goes_in_circles_and_leaves_holes() {
        let states = Claimed::new(4096);
        let mut chooser = Chooser::new(Pattern::Sequential, 1, 2, 2048);
        let mut batch = Vec::new();
        chooser.choose(&states, BATCH, &mut batch);
        assert_eq!(batch, (1024..1536).collect::<Vec<u64>>());
        chooser.choose(&states, BATCH, &mut batch);
        assert_eq!(batch, (1536..2048).collect::<Vec<u64>>());
        states.release(1030);
        states.release(1031);
        chooser.choose(&states, BATCH, &mut batch);
        assert_eq!(batch, [1030, 1031]);
        assert_eq!(states.count(), 1024);
    }

    #[test]
    fn the_random_pattern_never_has_a_page_twice() {
        let states = Claimed::new(1100);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        Chooser::new(Pattern::Random, 0, 2, 1100).choose(&states, BATCH, &mut a);
        Chooser::new(Pattern::Random, 1, 2, 1100).choose(&states, BATCH, &mut b);
        assert_eq!((a.len(), b.len()), (BATCH, BATCH));
        let mut all = [a.clone(), b].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2 * BATCH);
        assert!(all.iter().all(|page| *page < 1100) && !a.is_sorted());
    }

    #[test]
    fn a_full_surface_does_not_keep_a_thread_for_ever() {
        let states = Claimed::new(100);
        let mut batch = Vec::new();
        Chooser::new(Pattern::Random, 0, 1, 100).choose(&states, BATCH, &mut batch);
        assert!(batch.len() > 90 && batch.len() == states.count());
        Chooser::new(Pattern::Sequential, 0, 1, 100).choose(&states, BATCH, &mut batch);
        assert!(batch.len() <= 10);
    }

    #[test]
    fn a_page_is_claimed_once() {
        let both: [&dyn Claims; 2] = [&StateArray::new(70), &Claimed::new(70)];
        for states in both {
            assert!(states.claim(65) && !states.claim(65) && states.claim(64) && states.claim(1));
            states.release(65);
            assert!(!states.claim(64) && states.claim(65));
        }
    }
}
