//! What a recovery tells the caller: its progress, and what it did.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use vellum_log::Lsn;

/// So many bytes of the log are read between two calls of the progress function.
const PROGRESS_BYTES: u64 = 256 << 10;

/// The progress of a recovery ([`Options::on_recovery`](crate::Options::on_recovery)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryProgress {
    /// Bytes of the log that were read. Each byte is read once. For a store that gets no log, it is
    /// read more often if the changed pages do not fit in half of the pool's memory.
    pub bytes_done: u64,
    /// Bytes of the log to read in all. An estimate until the log was read once.
    pub bytes_total: u64,
}

/// What a recovery did ([`Store::recovery`](crate::Store::recovery)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// Records that were read from the log. Each is one atomic change of a tree.
    pub records: u64,
    /// Pages that have changed since the last checkpoint. Those that do not fit in half of the
    /// pool's memory are redone after the opening, when they are first read or by a thread.
    pub pages: u64,
    /// Bytes of the log from the last checkpoint to its end.
    pub log_bytes: u64,
    /// Time that it took.
    pub duration: Duration,
}

/// A function that is told the progress of a recovery.
#[derive(Clone, Default)]
pub(crate) struct RecoveryListener(Option<Arc<dyn Fn(RecoveryProgress) + Send + Sync>>);

impl RecoveryListener {
    pub(crate) fn new(listener: Arc<dyn Fn(RecoveryProgress) + Send + Sync>) -> RecoveryListener {
        RecoveryListener(Some(listener))
    }

    pub(crate) fn tell(&self, progress: RecoveryProgress) {
        if let Some(listener) = &self.0 {
            listener(progress);
        }
    }
}

impl fmt::Debug for RecoveryListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "a function" } else { "none" })
    }
}

/// Tells the caller how far the recovery is.
pub(crate) struct Progress<'a> {
    listener: &'a RecoveryListener,
    from: Lsn,
    /// Bytes that were read before the log was begun anew.
    before: u64,
    total: u64,
    told: u64,
}

impl<'a> Progress<'a> {
    /// Before the log is read from `from` on. `total` estimates the bytes to read.
    pub(crate) fn new(listener: &'a RecoveryListener, from: Lsn, total: u64) -> Progress<'a> {
        Progress { listener, from, before: 0, total, told: 0 }
    }

    /// Where the reading begins.
    pub(crate) fn from(&self) -> Lsn {
        self.from
    }

    /// A record was read.
    pub(crate) fn is_at(&mut self, lsn: Lsn) {
        let done = self.before + (lsn.0 - self.from.0);
        if done >= self.told + PROGRESS_BYTES {
            self.tell(done);
        }
    }

    fn tell(&mut self, done: u64) {
        self.told = done;
        self.total = self.total.max(done);
        self.listener.tell(RecoveryProgress { bytes_done: done, bytes_total: self.total });
    }

    /// The log was read to its end, and will be read `more` times.
    pub(crate) fn ends_at(&mut self, end: Lsn, more: u64) {
        let bytes = end.0.saturating_sub(self.from.0);
        self.before += bytes;
        self.total = self.before + more * bytes;
        self.tell(self.before);
    }
}
