//! A new file that gets its name when it is complete.
//!
//! The file is made under a temporary name in the directory of its own name. A process that is
//! killed before it publishes the file leaves nothing under the file's own name.

use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use super::file_open::{FileLock, FileOptions, lock, open_failed, sync_directory_of};
use super::{DeviceError, FileDevice};

/// A file under a temporary name. Dropping it removes the file.
#[derive(Debug)]
#[must_use = "the file goes unless it is published"]
pub struct UnpublishedFile {
    /// None for a block device, which has its name already.
    temporary: Option<PathBuf>,
    path: PathBuf,
    /// The file that the new one replaces. It stays locked until then.
    replaced: Option<(Arc<File>, FileLock)>,
}

impl UnpublishedFile {
    /// A new, empty file, to be published at `path`, which is free or names an empty file. If
    /// `path` names a block device, this opens the device, and publishing does not replace it.
    ///
    /// # Errors
    /// [`DeviceError`]; among others if there is a file that is not empty, or one that another
    /// handle has locked.
    pub fn create(
        path: &Path,
        options: FileOptions,
    ) -> Result<(FileDevice, UnpublishedFile), DeviceError> {
        UnpublishedFile::create_with(path, options, false)
    }

    /// As [`create`](Self::create), but publishing replaces any file at `path`.
    ///
    /// # Errors
    /// [`DeviceError`]; among others if another handle has locked the file at `path`.
    pub fn replacing(
        path: &Path,
        options: FileOptions,
    ) -> Result<(FileDevice, UnpublishedFile), DeviceError> {
        UnpublishedFile::create_with(path, options, true)
    }

    fn create_with(
        path: &Path,
        options: FileOptions,
        replaces: bool,
    ) -> Result<(FileDevice, UnpublishedFile), DeviceError> {
        let found = match path.metadata() {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(open_failed(path, false, error)),
        };
        if found.as_ref().is_some_and(|found| !found.is_file()) {
            // A block device. For any other kind of file, `open` returns the error.
            let device = FileDevice::create(path, options)?;
            let path = path.to_path_buf();
            return Ok((device, UnpublishedFile { temporary: None, path, replaced: None }));
        }
        let mut target = path.to_path_buf();
        let mut replaced = None;
        if found.is_some() {
            // The new file replaces the target of a symbolic link, not the link.
            target = path.canonicalize().map_err(|error| open_failed(path, false, error))?;
            replaced = Some(lock_replaced(&target, replaces)?);
        }
        let temporary =
            temporary_name(&target).ok_or_else(|| open_failed(path, false, Errno::INVAL.into()))?;
        let device = FileDevice::create_as(&target, &temporary, options)?;
        let file = UnpublishedFile { temporary: Some(temporary), path: target, replaced };
        if let (Some(new), Some((old, _))) = (&file.temporary, &file.replaced) {
            keep_owner(new, old).map_err(|source| file.failed(source))?;
        }
        Ok((device, file))
    }

    /// Where the file is until it is published.
    pub fn place(&self) -> &Path {
        self.temporary.as_ref().unwrap_or(&self.path)
    }

    /// Gives the file its name, durably. The caller has made the contents durable before.
    ///
    /// # Errors
    /// [`DeviceError::AlreadyExists`] if another process has created a file of this name since;
    /// a failed rename or sync.
    pub fn publish(mut self) -> Result<(), DeviceError> {
        let Some(temporary) = &self.temporary else { return Ok(()) };
        let renamed = match &self.replaced {
            Some(_) => std::fs::rename(temporary, &self.path),
            None => rename_to_free_name(temporary, &self.path),
        };
        renamed.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => open_failed(&self.path, false, error),
            _ => self.failed(error),
        })?;
        self.temporary = None;
        sync_directory_of(&self.path).map_err(|error| self.failed(error))
    }

    fn failed(&self, source: io::Error) -> DeviceError {
        DeviceError::Io {
            doing: "giving its name to the new file",
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for UnpublishedFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary
            && let Err(error) = std::fs::remove_file(temporary)
        {
            tracing::warn!(path = %temporary.display(), %error, "a temporary file stays");
        }
    }
}

/// Renames a file unless there is one of the new name.
fn rename_to_free_name(from: &Path, to: &Path) -> io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system has no such rename. A hard link does not replace a file either.
        Err(Errno::INVAL | Errno::NOSYS) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        result => Ok(result?),
    }
}

/// Locks the file at `path`, which is empty unless it may have `contents`. The lock keeps other
/// creators out until the file is replaced.
fn lock_replaced(path: &Path, contents: bool) -> Result<(Arc<File>, FileLock), DeviceError> {
    let failed = |error| open_failed(path, false, error);
    let file = Arc::new(OpenOptions::new().read(true).write(true).open(path).map_err(failed)?);
    let opened = file.metadata().map_err(failed)?;
    let exists = || DeviceError::AlreadyExists { path: path.to_path_buf() };
    if opened.len() > 0 && !contents {
        return Err(exists());
    }
    let lock = lock(&file, path, false, &opened)?;
    // Another creator may have replaced the file before this thread locked it.
    let (locked, now) = (file.metadata().map_err(failed)?, path.metadata().map_err(failed)?);
    match (contents || locked.len() == 0) && (locked.dev(), locked.ino()) == (now.dev(), now.ino())
    {
        true => Ok((file, lock)),
        false => Err(exists()),
    }
}

/// Gives a new file the permissions and, where that is allowed, the owner of the one it replaces.
fn keep_owner(new: &Path, old: &File) -> io::Result<()> {
    let (old, new) = (old.metadata()?, File::open(new)?);
    new.set_permissions(old.permissions())?;
    let ours = new.metadata()?;
    if (ours.uid(), ours.gid()) != (old.uid(), old.gid())
        && let Err(error) = fchown(&new, Some(old.uid()), Some(old.gid()))
    {
        tracing::warn!(%error, "the new file belongs to the process that makes it");
    }
    Ok(())
}

/// A hidden name that no other file has, in the same directory.
fn temporary_name(path: &Path) -> Option<PathBuf> {
    // The standard library seeds it from the system's random numbers.
    let random = RandomState::new().hash_one(std::process::id());
    let name: String = path.file_name()?.to_string_lossy().chars().take(40).collect();
    Some(path.with_file_name(format!(".{name}.{random:016x}.new")))
}
