//! Compactions of the stores of a quarter of the seeds, of which each workload has as many. Their
//! random numbers are their own. So the other seeds do what they did before there were compactions,
//! and find the planted bugs that they found.

use std::ops::ControlFlow;

use vellum::{CompactReport, Store};
use vellum_testing::random::Random;

/// When a store is compacted, and how far.
#[derive(Debug)]
pub(crate) struct Compactions {
    random: Random,
    /// Once in so many steps, if at all.
    once_in: Option<u64>,
}

impl Compactions {
    /// Those of a seed.
    pub(crate) fn random(seed: u64) -> Compactions {
        let mut random = Random(seed.rotate_left(32));
        let once_in = matches!(seed % 8, 3 | 4).then(|| random.pick(&[8, 60]));
        Compactions { random, once_in }
    }

    /// Whether the next step is a compaction.
    pub(crate) fn is_due(&mut self) -> bool {
        self.once_in.is_some_and(|times| self.random.once_in(times))
    }

    /// Compacts the store, sometimes in part.
    pub(crate) fn run(&mut self, store: &Store) -> vellum::Result<CompactReport> {
        let mut left = self.random.pick(&[1, 10, 100, u64::MAX, u64::MAX]);
        store.compact(&mut |_| {
            left -= 1;
            match left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })
    }
}
