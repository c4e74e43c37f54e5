//! Slow logs of a quarter of the seeds, of which each workload has as many; half of them are
//! compacted. Their random numbers are their own, so the other seeds do what they did before there
//! were slow logs, and find the planted bugs that they found.

use std::sync::Arc;

use vellum::{Store, Transaction};
use vellum_testing::random::Random;

use crate::failure::{Outcome, ensure};
use crate::machine::Machine;
use crate::recovery::Sizes;

/// How slow the log is, and what a workload does while something of it is in flight.
#[derive(Debug)]
pub(crate) struct SlowLog {
    random: Random,
    is_slow: bool,
    /// For once in so many commits the caller does not wait, and is called.
    then_once_in: u64,
    /// So many changes are durable once all is that was to become durable soon.
    soon: usize,
}

impl SlowLog {
    /// That of a seed.
    pub(crate) fn random(seed: u64, sizes: &mut Sizes) -> SlowLog {
        let mut random = Random(seed.rotate_left(16));
        let is_slow = matches!(seed % 16, 5 | 6 | 11 | 12);
        if is_slow {
            sizes.in_flight = random.pick(&[1, 2, 3, 4, 8]);
        }
        let then_once_in = random.pick(&[1, 2, 4]);
        SlowLog { random, is_slow, then_once_in, soon: 0 }
    }

    /// A store begins to work on a machine.
    pub(crate) fn begin(&mut self, store: &Store, machine: &Machine) {
        self.soon = 0;
        if self.is_slow {
            let turn_once_in = self.random.pick(&[1, 1, 3, 10, 30]);
            machine.slow_down(store, turn_once_in, self.random.next());
        }
    }

    /// The store of a machine is gone: it has answered all that was asked.
    pub(crate) fn end(machine: &Machine) -> Outcome {
        let unanswered = machine.unanswered();
        ensure!(unanswered == 0, "{unanswered} callbacks were not called when the store had ended");
        Ok(())
    }

    /// A step of the workload begins: time passes. Returns how many changes must be durable, now
    /// and then.
    pub(crate) fn pass(&mut self, machine: &Machine) -> Outcome<usize> {
        if !self.is_slow {
            return Ok(0);
        }
        for _ in 0..self.random.below(4) {
            machine.pass();
        }
        let is_sound = match self.random.once_in(50) {
            true => machine.calm().transpose()?,
            false => None,
        };
        Ok(if is_sound == Some(true) { self.soon } else { 0 })
    }

    /// A commit becomes durable soon, or is: then so many changes are.
    pub(crate) fn commits_soon(&mut self, changes: usize) {
        self.soon = changes;
    }

    /// Commits a transaction, after which so many changes are durable; `None` if it changes
    /// nothing. Returns whether the commit is under way, and the machine hears when it is durable.
    pub(crate) fn commit(
        &mut self,
        transaction: Transaction,
        changes: Option<usize>,
        machine: &Arc<Machine>,
    ) -> (vellum::Result<()>, bool) {
        if !self.is_slow || !self.random.once_in(self.then_once_in) {
            return (transaction.commit(), false);
        }
        let acknowledgement = machine.acknowledgement(changes.unwrap_or(0));
        let outcome = transaction.commit_then(acknowledgement);
        if outcome.is_ok() {
            machine.asked();
        }
        (outcome, true)
    }
}
