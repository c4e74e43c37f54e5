//! Restores a store from a backup and its increments ([`restore`]).

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vellum_pool::{PAGE_SIZE, Space};

use super::copy::read_frames;
use super::files::NewFile;
use super::increment::{Increment, open_full};
use super::index::{Index, IndexWriter, ranges_of, sum};
use super::progress::{BackupPace, BackupProgress};
use crate::error::{Error, Result};
use crate::store::changes::BackupState;

/// How to restore a store. `RestoreOptions::new()` suits most programs.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    replace: bool,
    check: bool,
}

impl Default for RestoreOptions {
    fn default() -> RestoreOptions {
        RestoreOptions { replace: false, check: true }
    }
}

impl RestoreOptions {
    /// The defaults: a new file, which is checked.
    pub fn new() -> RestoreOptions {
        RestoreOptions::default()
    }

    /// Whether the store replaces a file of its name. Until it is complete, that file stays as it
    /// is. The default is no.
    pub fn replace(mut self, yes: bool) -> RestoreOptions {
        self.replace = yes;
        self
    }

    /// Whether every page of the store is read again and checked, as
    /// [`Store::check`](crate::Store::check) does, before it gets its name. The default is yes.
    /// What is read from increments, and the backup that they follow, is compared with their
    /// checksums in any case.
    pub fn check(mut self, yes: bool) -> RestoreOptions {
        self.check = yes;
        self
    }
}

/// What a restore did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestoreReport {
    /// The number of the store that tells it apart.
    pub store_id: u128,
    /// As [`BackupReport::lsn`](crate::BackupReport::lsn), of the last increment.
    pub lsn: u64,
    /// Length of the store's file in bytes.
    pub file_bytes: u64,
    /// Time that it took.
    pub duration: Duration,
}

/// Restores a store to the new file `to`, from a backup and any number of increments that follow
/// it, in their order ([`Store::backup`](crate::Store::backup)). `progress` is told how far it is.
/// If it returns [`Break`](ControlFlow::Break), the restore ends with
/// [`Cancelled`](Error::Cancelled).
///
/// The file gets its name when it is complete and durable, as that of a backup does.
///
/// # Errors
/// [`BadBackup`](Error::BadBackup), with the file's name and the cause, if a file is damaged, or
/// does not follow the one before it; [`Exists`](Error::Exists) if there is a file `to`
/// ([`RestoreOptions::replace`]); [`BackupIo`](Error::BackupIo) if a file cannot be read or
/// written; [`Cancelled`](Error::Cancelled). After an error there is no new file.
pub fn restore(
    to: impl AsRef<Path>,
    backup: impl AsRef<Path>,
    increments: &[PathBuf],
    options: &RestoreOptions,
    progress: &mut dyn FnMut(BackupProgress) -> ControlFlow<()>,
) -> Result<RestoreReport> {
    let (began, to, backup) = (Instant::now(), to.as_ref(), backup.as_ref());
    let mut pace = BackupPace::new(progress, None);
    let source = open_full(backup)?;
    let increments: Vec<_> =
        increments.iter().map(|path| Increment::open(path)).collect::<Result<_>>()?;
    let space = source.core.pages.pool.with_space(Space::clone);
    let used = increments.last().map_or(space.allocated_pages(), |last| last.index().frames());
    pace.expect(space.allocated_pages() * PAGE_SIZE as u64);
    increments.iter().for_each(|increment| pace.expect(increment.bytes()));
    // The sums are compared, and the store is checked.
    pace.expect(if options.check { 2 * used * PAGE_SIZE as u64 } else { 0 });
    let file = NewFile::create(to, options.replace)?;
    let target = file.target();

    let header = source.core.pages.header();
    let mut frames = header.file_pages.max(space.end());
    target.grow(frames)?;
    let ranges = ranges_of(&space);
    let mut index = IndexWriter::new(std::io::sink(), &ranges).map_err(Error::Input)?;
    read_frames(&source.core.pages.device, &ranges, &mut |first, bytes| {
        for frame in bytes.chunks_exact(PAGE_SIZE) {
            index.add(&sum(frame)).map_err(Error::Input)?;
        }
        target.write(first, bytes)?;
        pace.advance(bytes.len() as u64)
    })?;
    let base = BackupState::of(&header, index.finish().0);
    drop(source);
    let (mut state, mut before) = (base, backup);
    for increment in &increments {
        follows(increment, state, before)?;
        frames = increment.file_frames();
        target.grow(frames)?;
        increment.each(&mut |first, bytes| {
            target.write(first, bytes)?;
            pace.advance(bytes.len() as u64)
        })?;
        (state, before) = (increment.state(), increment.path());
    }
    file.device.resize(frames).map_err(|source| target.failed_with(source))?;
    if options.check {
        compare(&file, &ranges, state, increments.last().map(Increment::index), &mut pace)?;
        file.check(&mut pace)?;
    }
    file.publish()?;
    Ok(RestoreReport {
        store_id: state.store,
        lsn: state.lsn,
        file_bytes: frames * PAGE_SIZE as u64,
        duration: began.elapsed(),
    })
}

/// Checks that an increment begins with a state, which the file `before` leads to.
pub(super) fn follows(increment: &Increment, state: BackupState, before: &Path) -> Result<()> {
    let base = increment.base();
    if base == state {
        return Ok(());
    }
    let before = before.display();
    let what = if base.store != state.store {
        format!("it is of another store than {before}")
    } else if (base.sequence, base.lsn) == (state.sequence, state.lsn) {
        format!("{before} has changed since this increment was made")
    } else {
        format!(
            "it does not follow {before}, which ends at {}.{}, but a backup or increment that \
             ends at {}.{}: give all of them, in their order",
            state.sequence, state.lsn, base.sequence, base.lsn
        )
    };
    Err(Error::BadBackup { path: increment.path().into(), what })
}

/// Reads what was written, and compares it with the index of the state; with the state itself if
/// that is the one of the backup.
fn compare(
    file: &NewFile,
    ranges: &[(u64, u64)],
    state: BackupState,
    index: Option<&Index>,
    pace: &mut BackupPace<'_>,
) -> Result<()> {
    let ranges = index.map_or_else(|| ranges.to_vec(), Index::ranges);
    let mut found = IndexWriter::new(std::io::sink(), &ranges).map_err(Error::Input)?;
    read_frames(&file.device, &ranges, &mut |_, bytes| {
        for frame in bytes.chunks_exact(PAGE_SIZE) {
            found.add(&sum(frame)).map_err(Error::Input)?;
        }
        pace.advance(bytes.len() as u64)
    })?;
    match found.finish().0 == state.digest {
        true => Ok(()),
        false => {
            let other = "the disk returns other bytes than were written, or a file has changed \
                         while it was read";
            Err(file.target().failed_with(std::io::Error::other(other)))
        }
    }
}
