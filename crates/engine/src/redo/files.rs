//! The folder of a store's log, and the sizes of what is in it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_log::{FileLog, FileLogOptions, LogDevice, LogError, LogOptions, LogView, Lsn, Shown};

use crate::store::header::{Header, LogPoint};

/// The least bytes of a log.
pub(crate) const LOG_BYTES_MIN: u64 = 1 << 20;

/// The log of a store in a folder.
#[derive(Debug)]
pub(crate) struct LogFiles {
    log: Arc<FileLog>,
    folder: PathBuf,
    /// The folder goes with its last file: the store chose its name.
    goes: bool,
}

impl LogFiles {
    /// Makes a new log for a clean store. The log that ended with the store's header goes, if a
    /// process left it in the folder.
    ///
    /// # Errors
    /// If another store, or another copy of this one, may need what is in the folder; what the
    /// system said.
    pub(crate) fn create(
        folder: &Path,
        goes: bool,
        header: &Header,
        log_bytes: u64,
    ) -> Result<LogFiles, LogError> {
        let is_over = || is_over(folder, header.log);
        match FileLog::create(folder, header.store_id, &options(log_bytes), is_over) {
            Ok(log) => Ok(LogFiles { log: Arc::new(log), folder: folder.into(), goes }),
            Err(error) => {
                if goes {
                    let _ = FileLog::remove_empty_folder(folder);
                }
                Err(error)
            }
        }
    }

    /// Opens the log in a folder. `None` if there is none.
    ///
    /// # Errors
    /// What the system said, and damage of the log.
    pub(crate) fn open(
        folder: &Path,
        goes: bool,
        log_bytes: u64,
    ) -> Result<Option<LogFiles>, LogError> {
        if !folder.is_dir() {
            return Ok(None);
        }
        let log = Arc::new(FileLog::open(folder, &options(log_bytes))?);
        let is_there = !log.scan().is_empty();
        Ok(is_there.then(|| LogFiles { log, folder: folder.into(), goes }))
    }

    /// Removes what a process has left of the log that ended with the header of a clean store.
    /// Leaves it there if that fails, or if another copy of the store may need it.
    pub(crate) fn remove_left(folder: &Path, goes: bool, header: &Header, log_bytes: u64) {
        if FileLog::is_left(folder, header.store_id) {
            match LogFiles::create(folder, goes, header, log_bytes) {
                Ok(left) => left.remove(),
                Err(error) => tracing::warn!("a log stays: {error}"),
            }
        } else if goes {
            let _ = FileLog::remove_empty_folder(folder);
        }
    }

    pub(crate) fn device(&self) -> Arc<dyn LogDevice> {
        self.log.clone()
    }

    /// Notes durably that the store may need the log to recover.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn own(&self, store: u128) -> Result<(), LogError> {
        self.log.own(store)
    }

    /// Removes the files, because the store needs no log any more. What cannot be removed does no
    /// harm: the next log of the store takes its place.
    pub(crate) fn remove(&self) {
        let folder = self.folder.display();
        if let Err(error) = self.log.remove() {
            tracing::warn!(%folder, "a part of the log stays: {error}");
            return;
        }
        if !self.goes {
            return;
        }
        if let Err(error) = FileLog::remove_empty_folder(&self.folder) {
            tracing::warn!(%folder, "the folder of the log stays: {error}");
        }
    }

    /// Gives the folder to the next handle, with the log in it.
    pub(crate) fn unlock(&self) {
        self.log.unlock();
    }
}

/// Whether no copy of a store needs the log in a folder, when the store is clean and its header has
/// this point. Another copy may need records that follow the point, or the records of a log that
/// this header does not name. A log that has none, and never had any, is that of a process which
/// ended before it had named the log in a header.
fn is_over(folder: &Path, ended: LogPoint) -> Result<bool, LogError> {
    let view = LogView::open(folder)?;
    let is_named = view.identity() == ended.identity;
    let end = if is_named { Lsn(ended.lsn.wrapping_sub(ended.begin)) } else { Lsn(0) };
    if !is_named && view.begin() > end {
        return Ok(false);
    }
    let is_needed = |shown: Shown| match shown {
        Shown::Record { record, .. } => record.lsn >= end,
        Shown::End(..) => false,
        _ => !is_named,
    };
    Ok(!view.records(None)?.any(is_needed))
}

/// The sizes of the files of a log with so many bytes in all.
fn options(log_bytes: u64) -> FileLogOptions {
    let mut options = FileLogOptions::default();
    options.segment_bytes = ((log_bytes / 16).clamp(64 << 10, 8 << 20)) & !4095;
    options.most_bytes = log_bytes.max(2 * options.segment_bytes);
    options
}

/// How a log with so many bytes in all is opened.
pub(crate) fn log_options(log_bytes: u64) -> LogOptions {
    let mut options = LogOptions::default();
    // A record has at most three images of pages of 64 KiB, and fits in half of the ring.
    options.ring_bytes = (log_bytes / 16).clamp(512 << 10, 4 << 20) as usize;
    options
}
