//! Counts commits, so that a session may keep its read transaction while nothing changed.
//!
//! A single read is its own transaction. Engines that have to open one for it (LMDB, redb, SQLite)
//! would open the same snapshot again and again while no thread writes. A session reads the counter
//! before it opens a snapshot, and keeps the snapshot for as long as the counter does not change. A
//! commit increments the counter before the operation returns, so a read that begins after a write
//! ended never sees the state before that write.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of commits so far, on its own cache lines, because readers load it at every read.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Commits(AtomicU64);

impl Commits {
    /// The number of commits. A session reads it before it opens the snapshot.
    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Counts a commit. The caller calls this after the commit and before its operation returns.
    #[inline]
    pub(crate) fn made(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}
