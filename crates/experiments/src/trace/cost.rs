//! The cost of a policy for a miss: `admit`, `forget`, `contains` and its share of `candidates`,
//! called as the pool calls them from several threads, on state words as the pool has them, but
//! without memory to release and files to read.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vellum_pool::{Arrival, MarkOutcome, PageRef, ReplacementPolicy, Residents};

use vellum_bench::workload::values::Random;

const EVICTED: u64 = 0;
const UNLOCKED: u64 = 1;
const MARKED: u64 = 2;
const LOCKED: u64 = 3;

/// A pool reduced to its page states and its budget.
struct States<'a> {
    words: Vec<AtomicU64>,
    /// Frames that are not taken.
    free: AtomicI64,
    batch: usize,
    policy: &'a dyn ReplacementPolicy,
}

impl Residents for States<'_> {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        let word = &self.words[page.id.0 as usize];
        match word.load(Ordering::Acquire) {
            MARKED => MarkOutcome::AlreadyMarked,
            UNLOCKED if swap(word, UNLOCKED, MARKED) => MarkOutcome::Marked,
            _ => MarkOutcome::InUse,
        }
    }
}

fn swap(word: &AtomicU64, from: u64, to: u64) -> bool {
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

impl States<'_> {
    /// Accesses a page; true if it was missed.
    fn access(&self, page: u64, candidates: &mut Vec<PageRef>) -> bool {
        let word = &self.words[page as usize];
        match word.load(Ordering::Acquire) {
            MARKED => _ = swap(word, MARKED, UNLOCKED),
            EVICTED if swap(word, EVICTED, LOCKED) => {
                while self.free.fetch_sub(1, Ordering::AcqRel) <= 0 {
                    self.free.fetch_add(1, Ordering::AcqRel);
                    self.evict(candidates);
                }
                self.policy.admit(PageRef::new(page, 1), Arrival::Needed);
                word.store(UNLOCKED, Ordering::Release);
                return true;
            }
            _ => {}
        }
        false
    }

    fn evict(&self, candidates: &mut Vec<PageRef>) {
        candidates.clear();
        self.policy.candidates(self, self.batch as u64, self.batch, candidates);
        candidates.retain(|page| {
            let word = &self.words[page.id.0 as usize];
            swap(word, MARKED, LOCKED) && self.policy.contains(*page)
        });
        for page in &*candidates {
            self.policy.forget(*page);
            self.words[page.id.0 as usize].store(EVICTED, Ordering::Release);
        }
        self.free.fetch_add(candidates.len() as i64, Ordering::AcqRel);
    }
}

/// How long one thread takes for a miss while `threads` of them miss, accessing `pages` pages
/// uniformly with `frames` frames and evicting in batches of `batch`; the mean over `misses` each.
pub fn per_miss(
    policy: &dyn ReplacementPolicy,
    frames: u64,
    pages: u64,
    batch: usize,
    threads: u64,
    misses: u64,
) -> Duration {
    let states = States {
        words: (0..pages).map(|_| AtomicU64::new(EVICTED)).collect(),
        free: AtomicI64::new(frames as i64),
        batch,
        policy,
    };
    let run = |seed: u64, misses: u64| {
        let (mut random, mut candidates) = (Random::new(seed), Vec::with_capacity(batch));
        let mut left = misses;
        while left > 0 {
            left -= u64::from(states.access(random.below(pages), &mut candidates));
        }
    };
    // Twice the frames: every page that is resident then was admitted into a full pool.
    run(0, 2 * frames);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for thread in 1..=threads {
            let run = &run;
            scope.spawn(move || run(thread, misses));
        }
    });
    start.elapsed() / u32::try_from(misses).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use vellum_pool::{Clock, S3Fifo};

    use super::*;

    #[test]
    fn threads_miss_and_evict_at_once_and_end() {
        let policies: [Box<dyn ReplacementPolicy>; 2] =
            [Box::new(Clock::new(512)), Box::new(S3Fifo::new(512))];
        for policy in policies {
            per_miss(&*policy, 512, 2_048, 32, 3, 20_000);
            let mut resident = 0;
            policy.for_each(&mut |_| resident += 1);
            assert!((400..=512).contains(&resident), "{policy:?}: {resident}");
        }
    }
}
