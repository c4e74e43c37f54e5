//! The log of a store.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_log::{Log, LogError, Lsn, Scan};

use crate::page;

/// The log of a store, with the place of its newest cut.
#[derive(Debug)]
pub(crate) struct RedoLog {
    log: Log,
    /// The records that recovery needs begin here. It moves while no change is under way.
    cut: AtomicU64,
}

impl RedoLog {
    /// A log of which recovery needs the records after its end.
    pub(crate) fn new(log: Log) -> RedoLog {
        let cut = AtomicU64::new(log.end().0);
        RedoLog { log, cut }
    }

    /// Whether the record of a group must have the image of this page, because no record after the
    /// newest cut has it. The caller has begun a change, and holds the page as it was before the
    /// group.
    pub(crate) fn needs_image(&self, page: &[u8]) -> bool {
        page::lsn(page) < self.cut.load(Ordering::Relaxed)
    }

    /// Appends a record and returns its number.
    ///
    /// # Errors
    /// If the log has no room, or has failed.
    pub(crate) fn append(&self, record: &[u8]) -> Result<u64, LogError> {
        self.log.append(record).map(|lsn| lsn.0)
    }

    /// Waits until the record of this number, and all before it, are durable.
    ///
    /// # Errors
    /// If it is unknown whether they are.
    pub(crate) fn wait_durable(&self, lsn: u64) -> Result<(), LogError> {
        self.log.wait_durable(Lsn(lsn))
    }

    /// The end of the log: the next record begins here or later.
    pub(crate) fn end(&self) -> Lsn {
        self.log.end()
    }

    /// Makes the end of the log the newest cut, while no change is under way.
    pub(crate) fn cut_at_end(&self) -> Lsn {
        let end = self.log.end();
        self.cut.store(end.0, Ordering::Relaxed);
        end
    }

    /// Reads the durable records from `from` on.
    ///
    /// # Errors
    /// If the log begins later.
    pub(crate) fn scan(&self, from: Lsn) -> Result<Scan<'_>, LogError> {
        self.log.scan(Some(from))
    }
}
