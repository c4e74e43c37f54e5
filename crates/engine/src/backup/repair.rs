//! Repair of damaged pages from a backup, while the store runs.
//!
//! The store knows which frames were written since its newest backup (`store/changes.rs`). A page
//! that was not is in the backup as it should be in the file. Each frame that is read from the
//! backup is compared with the sum of the state that the backup leads to. So the files need no
//! lock: what has changed in them repairs nothing.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vellum_pool::{PAGE_SIZE, PageRef};

use super::files::nameless_file;
use super::increment::{Increment, index_of, open_full};
use super::index::{Index, open_file, sum};
use super::progress::{BackupPace, BackupProgress};
use super::restore::follows;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::changes::{BackupPages, BackupState};

/// A full backup and the increments that follow it.
#[derive(Debug)]
struct RepairSource {
    full: File,
    increments: Vec<Increment>,
    /// The index of the full backup, if there are no increments.
    index: Option<Index>,
    /// The last file.
    path: PathBuf,
}

impl Store {
    /// Has damaged pages repaired from a backup and the increments that follow it, in their order,
    /// until the next backup of the store is complete. `progress` is told how far it is. If it
    /// returns [`Break`](ControlFlow::Break), the call ends with [`Cancelled`](Error::Cancelled).
    ///
    /// The last of these files must be the newest backup of the store, and the store must have had
    /// a log ever since. Then the store knows which pages were not written since that backup. If
    /// such a page cannot be read or is damaged, the store reads it from the backup, and the reader
    /// does not notice. The next checkpoint writes the page, a warning names it, and
    /// [`PoolStats::repairs`](vellum_pool::PoolStats::repairs) counts it. Pages that changed since
    /// the last checkpoint are made anew from the log, with this call or without. A page that was
    /// written between the backup and the last checkpoint stays damaged, and so does one that was
    /// repaired, written, and damaged again.
    ///
    /// [`check`](Store::check) reads all pages, and so has all repaired that can be. A
    /// [`sync`](Store::sync) makes no repair durable, since the log has none:
    /// [`close`](Store::close) does. A backup copies the file as it is: without a check before, it
    /// has, or finds, the damaged pages.
    ///
    /// A full backup without increments is read once as a whole for this, to make sure that it did
    /// not change. Its sums, 16 bytes for each page of 4 KiB, go to a file without a name in the
    /// folder for temporary files. The files stay open, and need to stay as they are: what has
    /// changed in them repairs nothing.
    ///
    /// # Errors
    /// [`BadBackup`](Error::BadBackup), with the file's name and the cause, if a file is damaged,
    /// does not follow the one before it, or is not the newest backup of this store;
    /// [`BackupIo`](Error::BackupIo) if a file cannot be read; [`BadOption`](Error::BadOption) for
    /// a store without a log; [`ReadOnly`](Error::ReadOnly); [`Cancelled`](Error::Cancelled).
    pub fn repair_from(
        &self,
        backup: impl AsRef<Path>,
        increments: &[PathBuf],
        progress: &mut dyn FnMut(BackupProgress) -> ControlFlow<()>,
    ) -> Result<()> {
        let (backup, pages) = (backup.as_ref(), &self.core.pages);
        pages.check_process()?;
        pages.check_open()?;
        pages.check_writable()?;
        if pages.redo_log.is_none() {
            let what = "a store without a log does not know what was written since a backup";
            return Err(Error::BadOption(what.into()));
        }
        let full = open_full(backup)?;
        let increments: Vec<_> =
            increments.iter().map(|path| Increment::open(path)).collect::<Result<_>>()?;
        let path = increments.last().map_or(backup, Increment::path).to_path_buf();
        // The state of the full backup, but for its digest. Increments check each frame anyway.
        let header = full.core.pages.header();
        let newest = pages.file.changes.base();
        let digest = increments.first().map(Increment::base).or(newest).map_or(0, |it| it.digest);
        let (mut state, mut before) = (BackupState::of(&header, digest), backup);
        for increment in &increments {
            follows(increment, state, before)?;
            (state, before) = (increment.state(), increment.path());
        }
        let bad = |what: &str| Error::BadBackup { path: path.clone(), what: what.into() };
        if newest != Some(state) {
            return Err(bad(
                "the store does not know what was written since: this is not its newest backup, or \
                 it was changed without a log; make another backup",
            ));
        }
        let mut index = None;
        if increments.is_empty() {
            let mut pace = BackupPace::new(progress, None);
            let temporary = nameless_file(&std::env::temp_dir().join("index"))?;
            let (read, sums) = index_of(&full, temporary, &mut pace)?;
            if read != state {
                return Err(bad("it has changed since it was made"));
            }
            index = Some(sums);
        }
        drop(full);
        let failed = Error::of_backup(format!("reading {}", backup.display()));
        let full = open_file(backup).map_err(failed)?;
        let source = RepairSource { full, increments, index, path: path.clone() };
        match pages.file.changes.repair_from(&state, Arc::new(source)) {
            true => Ok(()),
            false => Err(bad("another backup was made meanwhile")),
        }
    }
}

impl RepairSource {
    /// Reads a frame. Returns false if the state does not have it.
    fn read_frame(&self, frame: u64, bytes: &mut [u8]) -> Result<bool> {
        let index = self.increments.last().map(Increment::index).or(self.index.as_ref());
        let expected = index.map_or(Ok(None), |index| index.sum_of(frame));
        let failed = |source| Error::of_backup(format!("reading {}", self.path.display()))(source);
        let Some(expected) = expected.map_err(failed)? else { return Ok(false) };
        let mut is_read = false;
        for increment in self.increments.iter().rev() {
            is_read = increment.read_frame(frame, bytes)?;
            if is_read {
                break;
            }
        }
        if !is_read {
            self.full.read_exact_at(bytes, frame * PAGE_SIZE as u64).map_err(failed)?;
        }
        if sum(bytes) != expected {
            let what = format!("what it has of page {frame} is damaged");
            return Err(Error::BadBackup { path: self.path.clone(), what });
        }
        Ok(true)
    }
}

impl BackupPages for RepairSource {
    fn read(&self, page: PageRef, bytes: &mut [u8]) -> Result<bool> {
        for (frame, bytes) in (page.id.0..).zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            if !self.read_frame(frame, bytes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
