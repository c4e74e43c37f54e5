//! Group commit: one checkpoint serves all threads that asked for one before its cut.
//!
//! A thread that finds no checkpoint under way leads one. The others sleep until one that covers
//! their changes has ended. They do not queue for a lock: the leader would have it again, for its
//! next change, before they wake up, and they would wait for checkpoints that they do not need.
//!
//! `tests/gate_model.rs` checks this file on a scheduler that explores interleavings.

use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, lock, wait};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct GroupCommit {
    /// Cuts so far. Each covers all changes that ended before it.
    cuts: AtomicU64,
    progress: Mutex<CommitProgress>,
    /// A leader has ended.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct CommitProgress {
    /// The number of the last cut that is durable.
    saved: u64,
    has_leader: bool,
}

/// The right to lead a checkpoint. Dropping it lets another thread lead the next one.
#[derive(Debug)]
pub(crate) struct Leader<'a>(&'a GroupCommit);

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        lock(&self.0.progress).has_leader = false;
        self.0.ended.notify_all();
    }
}

impl GroupCommit {
    /// The first cut that covers what has changed until now.
    pub(crate) fn next_cut(&self) -> u64 {
        self.cuts.load(Ordering::Acquire) + 1
    }

    /// Waits until the cut `wanted` or a later one is durable: then there is nothing to do. If no
    /// thread leads before that, the caller does.
    pub(crate) fn lead(&self, wanted: u64) -> Option<Leader<'_>> {
        let mut progress = lock(&self.progress);
        while progress.saved < wanted {
            if !progress.has_leader {
                progress.has_leader = true;
                return Some(Leader(self));
            }
            progress = wait(&self.ended, progress);
        }
        None
    }

    /// Numbers a cut. No change is under way.
    pub(crate) fn cut(&self) -> u64 {
        self.cuts.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// A cut is durable.
    pub(crate) fn save(&self, cut: u64) {
        let mut progress = lock(&self.progress);
        progress.saved = progress.saved.max(cut);
    }
}
