//! Drives a replacement policy over a trace as the pool does: hits only clear a mark, and misses
//! take a batch of candidates if no frame is free.

use std::cell::{Cell, RefCell};

use vellum_pool::{Arrival, MarkOutcome, PageRef, ReplacementPolicy, Residents};

use super::Trace;

/// The result of a simulated run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Hits among the counted accesses.
    pub hits: usize,
    /// Misses among all accesses.
    pub misses: usize,
    /// Pages that were evicted.
    pub evicted: usize,
    /// State words that the policy has loaded, each a cache miss in a large pool.
    pub looks: usize,
    /// Hits on marked pages, which clear the mark by a compare-and-exchange each.
    pub unmarked: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Evicted,
    Unlocked,
    Marked,
}

/// The pool's side: a state for each page.
struct States {
    states: RefCell<Vec<State>>,
    looks: Cell<usize>,
}

impl Residents for States {
    fn try_mark(&self, page: PageRef) -> MarkOutcome {
        self.looks.set(self.looks.get() + 1);
        let state = &mut self.states.borrow_mut()[page.id.0 as usize];
        match *state {
            State::Unlocked => {
                *state = State::Marked;
                MarkOutcome::Marked
            }
            State::Marked => MarkOutcome::AlreadyMarked,
            State::Evicted => MarkOutcome::InUse,
        }
    }
}

/// Pages that the pool evicts together: its default, at most an eighth of the pool.
pub fn batch(frames: u32) -> usize {
    (frames as usize / 8).clamp(1, 64)
}

/// Runs the trace with `frames` frames.
///
/// # Panics
/// If the policy breaks its contract: finds nothing to evict although no page is in use, or
/// proposes a page that is not resident.
pub fn run(trace: &Trace, frames: u32, policy: &dyn ReplacementPolicy) -> Counts {
    let states = States {
        states: RefCell::new(vec![State::Evicted; trace.pages as usize]),
        looks: Cell::new(0),
    };
    let (batch, mut free) = (batch(frames), frames as usize);
    let mut counts = Counts::default();
    let mut candidates = Vec::with_capacity(batch);
    for (at, page) in trace.accesses.iter().enumerate() {
        let before = {
            let state = &mut states.states.borrow_mut()[*page as usize];
            std::mem::replace(state, State::Unlocked)
        };
        counts.unmarked += usize::from(before == State::Marked);
        if before != State::Evicted {
            counts.hits += usize::from(at >= trace.counted_from);
            continue;
        }
        counts.misses += 1;
        // The page is in transit while frames are found for it.
        states.states.borrow_mut()[*page as usize] = State::Evicted;
        while free == 0 {
            candidates.clear();
            policy.candidates(&states, batch as u64, batch, &mut candidates);
            assert!(!candidates.is_empty(), "nothing to evict, though nothing is in use");
            for page in &candidates {
                let state = &mut states.states.borrow_mut()[page.id.0 as usize];
                assert!(*state == State::Marked, "{page} is no candidate");
                *state = State::Evicted;
                policy.forget(*page);
            }
            free += candidates.len();
            counts.evicted += candidates.len();
        }
        policy.admit(PageRef::new(u64::from(*page), 1), Arrival::Needed);
        free -= 1;
        states.states.borrow_mut()[*page as usize] = State::Unlocked;
    }
    counts.looks = states.looks.get();
    counts
}

#[cfg(test)]
mod tests {
    use vellum_pool::Clock;

    use super::*;
    use crate::trace::{Kind, reference};

    #[test]
    fn every_miss_is_a_page_that_is_resident_or_was_evicted() {
        let trace = Kind::Zipf(0.8).make(2_000, 0, 20_000);
        let counts = run(&trace, 200, &Clock::new(200));
        assert!(counts.misses - counts.evicted <= 200);
        assert!(counts.misses - counts.evicted > 200 - batch(200));
        assert!(counts.hits > 0 && counts.looks >= counts.evicted);
    }

    #[test]
    fn what_fits_hits() {
        let trace = Kind::Uniform.make(100, 0, 10_000);
        let counts = run(&trace, 100, &Clock::new(100));
        assert_eq!((counts.hits, counts.evicted), (7_500, 0));
    }

    #[test]
    fn no_policy_beats_the_optimum() {
        for kind in Kind::ALL {
            let trace = kind.make(2_000, 200, 10_000);
            let optimum = reference::min(&trace, 200);
            assert!(run(&trace, 200, &Clock::new(200)).hits <= optimum, "{}", trace.name);
        }
    }
}
