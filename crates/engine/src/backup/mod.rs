//! Backups: copies of a store that are stores ([`Store::backup`](crate::Store::backup)).

mod copy;
mod files;
mod progress;

use std::path::Path;
use std::time::{Duration, Instant};

use vellum_pool::PAGE_SIZE;

pub use progress::{BackupProgress, OnBackup};

use crate::backup::copy::Copying;
use crate::backup::files::{NewFile, nameless_file};
use crate::backup::progress::Pace;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::callback::refuse_in_callback;

/// How to back a store up. `BackupOptions::new()` suits most programs.
#[derive(Clone, Debug)]
pub struct BackupOptions {
    replace: bool,
    check: bool,
    bytes_per_second: Option<u64>,
}

impl Default for BackupOptions {
    fn default() -> BackupOptions {
        BackupOptions { replace: false, check: true, bytes_per_second: None }
    }
}

impl BackupOptions {
    /// The defaults: a new file, which is checked, as fast as possible.
    pub fn new() -> BackupOptions {
        BackupOptions::default()
    }

    /// Whether the backup replaces a file of its name. Until it is complete, that file stays as it
    /// is. The default is no.
    pub fn replace(mut self, yes: bool) -> BackupOptions {
        self.replace = yes;
        self
    }

    /// Whether every page of the backup is read again and checked, as
    /// [`Store::check`](crate::Store::check) does, before it gets its name. The default is yes.
    pub fn check(mut self, yes: bool) -> BackupOptions {
        self.check = yes;
        self
    }

    /// The most bytes of the store to read in a second, so that other users of the disk do not
    /// suffer. The default is no limit.
    pub fn bytes_per_second(mut self, bytes: u64) -> BackupOptions {
        self.bytes_per_second = Some(bytes);
        self
    }
}

/// What a backup did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupReport {
    /// The number of the store that tells it apart.
    pub store_id: u128,
    /// The backup has all changes of the store whose records in its log have numbers below this. 0
    /// if the store never had a log.
    pub lsn: u64,
    /// Length of the backup in bytes.
    pub file_bytes: u64,
    /// Bytes that the store uses in it.
    pub used_bytes: u64,
    /// Changes that came while the store was copied, and that the backup has.
    pub changes: u64,
    /// Time that it took.
    pub duration: Duration,
}

impl Store {
    /// Copies the store to a new file, which is a store itself: closed, with everything that had
    /// changed when this was called, and with the state of one moment. Other threads go on.
    /// `progress` is told how far it is, and may end it.
    ///
    /// With a log ([`Options::log`](crate::Options::log)), the state is that of the end of the
    /// copying. Changes wait only for a moment at the beginning, as for a checkpoint, and for one
    /// at the end. What the log gets meanwhile is copied, too, to a file without a name in the
    /// folder of `path`. It takes as much room there as the changes take in the log.
    ///
    /// Without a log, the state is that of the beginning. No changed page leaves memory while the
    /// store is copied, so changes and reads that need memory wait when the pool is full of changed
    /// pages; [`sync`](Store::sync) and [`close`](Store::close) wait until the backup has ended. A
    /// store that is open read-only is copied as it is.
    ///
    /// The backup gets its name when it is complete and durable. Before, it has the name
    /// `.NAME.*.new` in the same folder; a process that is killed leaves that file there. If the
    /// store is closed meanwhile, a backup of a store with a log ends with
    /// [`Closed`](Error::Closed).
    ///
    /// # Errors
    /// [`Exists`](Error::Exists) if there is a file of this name
    /// ([`BackupOptions::replace`]); [`BackupIo`](Error::BackupIo) if the backup cannot be written,
    /// as when its disk is full; [`BadBackup`](Error::BadBackup) if the store is damaged;
    /// [`InUse`](Error::InUse) if another backup of the store is under way;
    /// [`Cancelled`](Error::Cancelled). After an error there is no new file.
    pub fn backup<'f>(
        &self,
        path: impl AsRef<Path>,
        options: &BackupOptions,
        progress: &'f mut OnBackup<'f>,
    ) -> Result<BackupReport> {
        let (began, path, pages) = (Instant::now(), path.as_ref(), &self.core.pages);
        pages.check_process()?;
        pages.check_open()?;
        refuse_in_callback(&pages.gate)?;
        if self.core.salvage {
            let what = "a store that is open for salvage has no state to back up: dump it";
            return Err(Error::BadOption(what.into()));
        }
        let mut pace = Pace::new(progress, options.bytes_per_second);
        let used = pages.pool.with_space(|space| space.allocated_pages()) * PAGE_SIZE as u64;
        pace.expect(if options.check { 2 * used } else { used });
        let file = NewFile::create(path, options.replace)?;
        let records = nameless_file(path)?;
        let mut copying = Copying { core: &self.core, to: file.target(), pace: &mut pace };
        let copied = copying.run(records)?;
        if options.check {
            file.check(&mut pace)?;
        }
        let file_pages = file.device.pages().map_err(|source| file.target().failed_with(source))?;
        file.publish()?;
        Ok(BackupReport {
            store_id: copied.header.store_id,
            lsn: copied.header.log.lsn,
            file_bytes: file_pages * PAGE_SIZE as u64,
            used_bytes: copied.space.allocated_pages() * PAGE_SIZE as u64,
            changes: copied.report.records,
            duration: began.elapsed(),
        })
    }
}
