//! The folder of a store's log, and the sizes of what is in it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_log::{FileLog, FileLogOptions, LogDevice, LogError, LogOptions};

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
    /// Makes a new log for a store. What a log of the same store left in the folder goes.
    ///
    /// # Errors
    /// If another store may need what is in the folder; what the system said.
    pub(crate) fn create(
        folder: &Path,
        goes: bool,
        store: u128,
        log_bytes: u64,
    ) -> Result<LogFiles, LogError> {
        match FileLog::create(folder, store, &options(log_bytes)) {
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

    /// Removes what a process has left of the log of a store that needs none. Leaves it there if
    /// that fails.
    pub(crate) fn remove_left(folder: &Path, goes: bool, store: u128, log_bytes: u64) {
        if FileLog::is_left(folder, store)
            && let Ok(left) = LogFiles::create(folder, goes, store, log_bytes)
        {
            left.remove();
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
