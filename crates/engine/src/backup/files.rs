//! The files that a backup or a restore makes.
//!
//! The result gets its name when it is complete and durable. What is needed meanwhile lies in files
//! without a name in the same folder, which are gone when the process ends, however it ends.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use vellum_pool::device::{Device, FileDevice, FileOptions, UnpublishedFile, Write};
use vellum_pool::{PAGE_SIZE, PoolError};

use super::progress::BackupPace;
use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::open;
use crate::store::options::Options;

/// The pool of a check.
const CHECK_POOL: u64 = 32 << 20;

/// A file that gets its name when it is complete. Dropping it before removes it.
pub(super) struct NewFile {
    pub device: Arc<dyn Device>,
    file: UnpublishedFile,
    path: PathBuf,
}

impl NewFile {
    /// # Errors
    /// [`Error::Exists`] if there is a file of this name and it must not be replaced;
    /// [`Error::InUse`] if a process has it open.
    pub(super) fn create(path: &Path, replace: bool) -> Result<NewFile> {
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            let what = format!("{} is not a regular file: name a new one", path.display());
            return Err(Error::BadOption(what));
        }
        let options = FileOptions::default();
        let (device, file) = match replace {
            false => UnpublishedFile::create(path, options)?,
            true => UnpublishedFile::replacing(path, options)?,
        };
        Ok(NewFile { device: Arc::new(device), file, path: path.into() })
    }

    pub(super) fn target(&self) -> Target<'_> {
        Target { device: &self.device, path: &self.path }
    }

    /// Where the file is until it has its name.
    pub(super) fn place(&self) -> &Path {
        self.file.place()
    }

    /// Gives the file its name, durably.
    ///
    /// # Errors
    /// What the system said; [`Error::Exists`].
    pub(super) fn publish(self) -> Result<()> {
        self.device.sync().map_err(|source| self.target().failed_with(source))?;
        Ok(self.file.publish()?)
    }

    /// Opens the store in the file and checks it.
    ///
    /// # Errors
    /// [`Error::BadBackup`] with the first damage.
    pub(super) fn check(&self, pace: &mut BackupPace<'_>) -> Result<()> {
        let options = Options::new().read_only(true).pool_bytes(CHECK_POOL);
        // Without `at_exit`: an exit of the process would wait for the end of the check.
        let store = Store { core: Arc::new(open::open(self.device.clone(), &options)?) };
        let (mut pages, mut cancelled) = (0, None);
        let report = store.check_while(&mut |state| {
            let more = (state.pages_done - pages) * PAGE_SIZE as u64;
            pages = state.pages_done;
            pace.advance(more).map_err(|error| {
                cancelled = Some(error);
                Error::Cancelled
            })
        });
        if let Some(error) = cancelled {
            return Err(error);
        }
        match report?.damage.into_iter().next() {
            None => Ok(()),
            Some(damage) => {
                let what = format!("the store that it would have is damaged: {damage}");
                Err(Error::BadBackup { path: self.path.clone(), what })
            }
        }
    }
}

/// The place that pages are copied to.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pub device: &'a Arc<dyn Device>,
    /// For errors.
    pub path: &'a Path,
}

impl Target<'_> {
    /// Makes the file at least so many frames long.
    ///
    /// # Errors
    /// A full disk; what the system said.
    pub(super) fn grow(&self, frames: u64) -> Result<()> {
        let grow = || match self.device.pages()? < frames {
            true => self.device.resize(frames),
            false => Ok(()),
        };
        grow().map_err(|source| self.failed_with(source))
    }

    /// Writes frames from the number `first` on. The bytes are aligned as for a device.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn write(&self, first: u64, bytes: &[u8]) -> Result<()> {
        let mut writes = [Write::new(first, [bytes, &[]])];
        self.device.write(&mut writes);
        let [Write { result, .. }] = writes;
        result.map_err(|source| self.failed_with(source))
    }

    /// Names the file in an error of recovery, which writes to it alone.
    pub(super) fn failed(&self, error: Error) -> Error {
        match error {
            Error::Io(error) | Error::DiskFull(error) => match *error {
                PoolError::Write { source, .. }
                | PoolError::Resize(source)
                | PoolError::Sync(source) => self.failed_with(source),
                error => self.failed_with(io::Error::other(error)),
            },
            error => error,
        }
    }

    pub(super) fn failed_with(&self, source: io::Error) -> Error {
        let doing = format!("writing {}", self.path.display());
        Error::BackupIo { doing, source }
    }
}

/// A file without a name in the folder of `path`.
///
/// # Errors
/// What the system said.
pub(super) fn nameless_file(path: &Path) -> Result<File> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match openat(CWD, folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file.into()),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
            named_and_removed(folder)
        }
        Err(error) => Err(error.into()),
    }
    .map_err(Error::of_backup(format!("making a temporary file in {}", folder.display())))
}

/// As [`nameless_file`], on a file system that has none.
fn named_and_removed(folder: &Path) -> io::Result<File> {
    let number = RandomState::new().hash_one(std::process::id());
    let name = folder.join(format!(".backup.{number:016x}.new"));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&name)?;
    std::fs::remove_file(&name)?;
    Ok(file)
}
/// Opens a store of a backup to read it, and locks it meanwhile.
///
/// # Errors
/// [`Error::BadBackup`], which names the file.
pub(super) fn open_backup(path: &Path) -> Result<Store> {
    let named = |error: Error| match error {
        Error::InUse(_) | Error::NotFound(_) | Error::Open(_) => error,
        error => Error::BadBackup { path: path.into(), what: error.to_string() },
    };
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let device = FileDevice::open(path, options)?;
    let options = Options::new().read_only(true).pool_bytes(CHECK_POOL);
    open::open(Arc::new(device), &options).map(Store::from_core).map_err(named)
}
