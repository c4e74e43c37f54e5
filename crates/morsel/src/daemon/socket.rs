//! The socket that clients find the daemon by: at most one daemon listens at a path.
//!
//! A lock beside the socket says who does. It ends with its process, however that ends; so a socket
//! that is left over from a daemon that was killed is known as such, and replaced.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::daemon::DaemonError;

/// A socket that is listened at; its file goes with it.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, to leave one alone that somebody else put there.
    own: (u64, u64),
    lock: File,
}

impl Socket {
    /// Listens at a path, whose folder is made if only that is missing.
    pub(super) fn bind(path: &Path, mode: u32) -> Result<Self, DaemonError> {
        let failed = |source| DaemonError::Socket { path: path.display().to_string(), source };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty())
            && let Err(error) = fs::create_dir(folder)
            && error.kind() != ErrorKind::AlreadyExists
        {
            return Err(failed(error));
        }
        let lock = lock(path).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => DaemonError::Running { path: path.display().to_string() },
            _ => failed(error),
        })?;
        if is_left_over(path).map_err(failed)? {
            fs::remove_file(path).map_err(failed)?;
        }
        let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => DaemonError::Running { path: path.display().to_string() },
            _ => failed(error),
        })?;
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let own =
            fs::symlink_metadata(path).map(|data| (data.dev(), data.ino())).map_err(failed)?;
        Ok(Self { listener, path: path.into(), own, lock })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|data| (data.dev(), data.ino()) == self.own) {
            // A failure leaves a socket that the next daemon finds to be left over.
            let _ = fs::remove_file(&self.path);
        }
        // A process that this one is just starting has a copy of the descriptor for a moment.
        let _ = rustix::fs::flock(&self.lock, FlockOperation::Unlock);
    }
}

/// The lock of a path; `WouldBlock` if somebody has it.
fn lock(path: &Path) -> io::Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(name)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::INTR) => Err(ErrorKind::Interrupted.into()),
        result => result.map(|()| file).map_err(io::Error::from),
    }
}

/// Whether there is a socket at which nobody listens.
fn is_left_over(path: &Path) -> io::Result<bool> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        found => found?,
    };
    if !found.file_type().is_socket() {
        return Err(io::Error::new(ErrorKind::AlreadyExists, "a file that is no socket is there"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(error) => Err(error),
        Ok(_) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_listens_next_does_not_wait_for_copies_of_descriptors() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let first = Socket::bind(&path, 0o600).unwrap();
        assert!(matches!(Socket::bind(&path, 0o600), Err(DaemonError::Running { .. })));
        let copies = (first.lock.try_clone().unwrap(), first.listener.try_clone().unwrap());
        drop(first);
        assert!(Socket::bind(&path, 0o600).is_ok());
        drop(copies);
    }
}
