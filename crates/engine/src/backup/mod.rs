//! Backups: copies of a store that are stores, and increments, which have what changed since
//! ([`Store::backup`](crate::Store::backup)). Restoring joins them ([`restore`]).

mod copy;
mod files;
mod increment;
mod index;
mod overlay;
mod progress;
mod repair;
mod restore;
mod summed;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, Space};

pub use progress::BackupProgress;
pub use restore::{RestoreOptions, RestoreReport, restore};

use crate::backup::copy::Copying;
use crate::backup::files::{NewFile, Target, nameless_file};
use crate::backup::increment::{Increment, read_base};
use crate::backup::overlay::Overlay;
use crate::backup::progress::BackupPace;
use crate::backup::summed::SummedFile;
use crate::error::{Error, Result};
use crate::redo::recover::Recovered;
use crate::store::Store;
use crate::store::callback::refuse_in_callback;
use crate::store::changes::{BackupState, BackupUnderWay};

/// How to back a store up. `BackupOptions::new()` suits most programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupOptions {
    pub(crate) since: Option<PathBuf>,
    pub(crate) replace: bool,
    pub(crate) check: bool,
    pub(crate) read_all: bool,
    pub(crate) bytes_per_second: Option<u64>,
}

impl Default for BackupOptions {
    fn default() -> BackupOptions {
        BackupOptions {
            since: None,
            replace: false,
            check: true,
            read_all: false,
            bytes_per_second: None,
        }
    }
}

impl BackupOptions {
    /// The defaults: a new file, which is checked, as fast as possible.
    pub fn new() -> BackupOptions {
        BackupOptions::default()
    }

    /// Makes an increment: a file that has what changed since `base`, a backup of the same store or
    /// an increment. [`restore`](crate::restore()) makes a store of a backup and its increments. A
    /// backup that is a base must stay as it is: opening it for writing makes it another one.
    ///
    /// A store with a log remembers what was written to its file since its newest backup or
    /// increment. If that is the base, only this is read of the store, and otherwise all pages
    /// ([`BackupReport::read_bytes`]). Of a base that is no increment all pages are read as well.
    /// Meanwhile a file without a name in the folder of the increment has what changed.
    pub fn since(mut self, base: impl Into<PathBuf>) -> BackupOptions {
        self.since = Some(base.into());
        self
    }

    /// Whether the backup replaces a file of its name. Until it is complete, that file stays as it
    /// is. The default is no.
    pub fn replace(mut self, yes: bool) -> BackupOptions {
        self.replace = yes;
        self
    }

    /// Whether every page of the backup is read again and checked, as
    /// [`Store::check`](crate::Store::check) does, before it gets its name. Of an increment only
    /// the checksums are compared: the pages of its base are not there. The default is yes.
    pub fn check(mut self, yes: bool) -> BackupOptions {
        self.check = yes;
        self
    }

    /// Whether an increment reads all pages of the store, although the store remembers which of
    /// them changed. Then the increment also has what something else than this library has changed,
    /// a damaged page, too, which the restore finds. The default is no.
    pub fn read_all(mut self, yes: bool) -> BackupOptions {
        self.read_all = yes;
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
    /// Length of the backup, or of the increment, in bytes.
    pub file_bytes: u64,
    /// Bytes of the store's file that were read: all that is in use, or what changed.
    pub read_bytes: u64,
    /// Bytes that the store uses in the backup, or in what the increment leads to.
    pub used_bytes: u64,
    /// Changes that came while the store was copied, and that the backup has.
    pub changes: u64,
    /// Time that it took.
    pub duration: Duration,
}

impl Store {
    /// Copies the store to a new file, which is a store itself: closed, with everything that had
    /// changed when this was called, and with the state of one moment. Other threads go on.
    /// `progress` is told how far it is. If it returns [`Break`](ControlFlow::Break), the backup
    /// ends with [`Cancelled`](Error::Cancelled).
    ///
    /// With a log ([`Options::log`](crate::Options::log)), the state is that of the end of the
    /// copying. Changes wait only for a moment at the beginning, as for a checkpoint, and for one
    /// at the end; longer if bulk loads end all the time. What the log gets meanwhile is copied,
    /// too, to a file without a name in the folder of `path`. It takes as much room there as the
    /// changes take in the log.
    ///
    /// Without a log, the state is that of the beginning. No changed page leaves memory while the
    /// store is copied, so changes and reads that need memory wait when the pool is full of changed
    /// pages; [`sync`](Store::sync) and [`close`](Store::close) wait until the backup has ended.
    /// `progress` must not change the store ([`CalledFromWithin`](Error::CalledFromWithin)). A
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
    /// [`BadOption`](Error::BadOption) if an increment would replace the file that it follows;
    /// [`Cancelled`](Error::Cancelled). After an error there is no new file.
    pub fn backup(
        &self,
        path: impl AsRef<Path>,
        options: &BackupOptions,
        progress: &mut dyn FnMut(BackupProgress) -> ControlFlow<()>,
    ) -> Result<BackupReport> {
        let (began, path, pages) = (Instant::now(), path.as_ref(), &self.core.pages);
        pages.check_process()?;
        pages.check_open()?;
        refuse_in_callback(&pages.gate)?;
        if self.core.salvage {
            let what = "a store that is open for salvage has no state to back up: dump it";
            return Err(Error::BadOption(what.into()));
        }
        let mut pace = BackupPace::new(progress, options.bytes_per_second);
        // After an error the store remembers what it did before.
        let Backup { copied, file_bytes, read_bytes, noted } = match &options.since {
            None => self.back_up_all(path, options, &mut pace),
            Some(base) => self.back_up_since(base, path, options, &mut pace),
        }?;
        if let Some((under_way, state)) = noted {
            under_way.complete(state);
            pages.save_changes();
        }
        Ok(BackupReport {
            store_id: copied.header.store_id,
            lsn: copied.header.log.lsn,
            file_bytes,
            read_bytes,
            used_bytes: copied.space.allocated_pages() * PAGE_SIZE as u64,
            changes: copied.report.records,
            duration: began.elapsed(),
        })
    }

    fn back_up_all(
        &self,
        path: &Path,
        options: &BackupOptions,
        pace: &mut BackupPace<'_>,
    ) -> Result<Backup> {
        if options.check {
            let used = self.core.pages.pool.with_space(Space::allocated_pages);
            pace.expect(used * PAGE_SIZE as u64);
        }
        let file = NewFile::create(path, options.replace)?;
        let records = nameless_file(path)?;
        // A store without a log remembers no backup, and needs no digest of it.
        let summed = match self.core.pages.redo_log {
            Some(_) => Some(Arc::new(SummedFile::new(&file.device, nameless_file(path)?))),
            None => None,
        };
        let to_summed = summed.clone().map(|summed| summed as Arc<dyn Device>);
        let to = Target { device: to_summed.as_ref().unwrap_or(&file.device), path };
        let mut copying = Copying::new(&self.core, to, pace);
        let copied = copying.run(records)?;
        let (read_bytes, under_way) = copying.finish();
        if options.check {
            file.check(pace)?;
        }
        let noted = match under_way.zip(summed) {
            Some((under_way, summed)) => {
                let digest = summed.digest(&copied.space);
                let digest = digest.map_err(Error::of_backup("reading a temporary file"))?;
                Some((under_way, BackupState::of(&copied.header, digest)))
            }
            None => None,
        };
        pace.advance(0)?;
        file.publish()?;
        let file_bytes = copied.header.file_pages * PAGE_SIZE as u64;
        Ok(Backup { copied, file_bytes, read_bytes, noted })
    }

    fn back_up_since(
        &self,
        base: &Path,
        path: &Path,
        options: &BackupOptions,
        pace: &mut BackupPace<'_>,
    ) -> Result<Backup> {
        if is_same_file(base, path) {
            let what = format!("{} would replace the backup that it follows", path.display());
            return Err(Error::BadOption(what));
        }
        let file = NewFile::create(path, options.replace)?;
        let (state, index) = read_base(base, path, pace)?;
        if state.store != self.core.pages.header().store_id {
            let what = "it is a backup of another store".into();
            return Err(Error::BadBackup { path: base.into(), what });
        }
        let overlay = Arc::new(Overlay::new(index, nameless_file(path)?));
        let device: Arc<dyn Device> = overlay.clone();
        let records = nameless_file(path)?;
        let to = Target { device: &device, path };
        let mut copying = Copying::new(&self.core, to, pace);
        if !options.read_all {
            copying.read_since(state, overlay.base_ranges());
        }
        let copied = copying.run(records)?;
        let (read_bytes, under_way) = copying.finish();
        let (state, file_bytes) = increment::write(file.target(), state, &overlay, &copied, pace)?;
        if options.check {
            pace.expect(file_bytes);
            let written = Increment::open(file.place()).and_then(|increment| {
                increment.each(&mut |_, bytes| pace.advance(bytes.len() as u64))
            });
            written.map_err(|error| match error {
                Error::BadBackup { what, .. } => {
                    let what = format!("the disk returns other bytes than were written: {what}");
                    Error::BadBackup { path: path.into(), what }
                }
                error => error,
            })?;
        }
        pace.advance(0)?;
        file.publish()?;
        let noted = under_way.map(|under_way| (under_way, state));
        Ok(Backup { copied, file_bytes, read_bytes, noted })
    }
}

/// A backup or an increment that has its name.
struct Backup {
    copied: Recovered,
    file_bytes: u64,
    read_bytes: u64,
    /// What a store with a log has written since it began, and the state that it leads to.
    noted: Option<(BackupUnderWay, BackupState)>,
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().ok().map(|file| (file.dev(), file.ino()));
    identity(one).is_some_and(|one| identity(other) == Some(one))
}
