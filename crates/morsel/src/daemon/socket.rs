//! The socket that clients find the daemon by: at most one daemon listens at a path.
//!
//! The daemon holds the lock of a file next to the socket. The lock ends with its process, however
//! that ends. So the next daemon recognises the socket of a killed daemon, and replaces it. A
//! daemon that ends removes both files.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::daemon::error::DaemonError;
use crate::protocol::USUAL_SOCKET;

/// A socket on which the daemon listens; dropping it removes its file.
#[derive(Debug)]
pub(super) struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// The file, so that drop does not remove one that another process put there.
    own: FileId,
    /// Dropped after the socket's file is removed.
    _lock: Lock,
}

/// Device and inode of a file.
type FileId = (u64, u64);

impl Socket {
    /// Listens at a path. Its folder must exist, except that of the usual socket, which disappears
    /// at each boot.
    pub(super) fn bind(path: &Path, mode: u32) -> Result<Self, DaemonError> {
        let failed = |source| DaemonError::Socket { path: path.display().to_string(), source };
        if path == Path::new(USUAL_SOCKET)
            && let Some(folder) = path.parent()
            && let Err(error) = fs::create_dir(folder)
            && error.kind() != ErrorKind::AlreadyExists
        {
            return Err(failed(error));
        }
        let lock = Lock::take(path).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => DaemonError::Running { path: path.display().to_string() },
            ErrorKind::NotFound => failed(io::Error::new(error.kind(), "its folder is missing")),
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
        let own = file_at(path).map_err(failed)?;
        Ok(Self { listener, path: path.into(), own, _lock: lock })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // A failure leaves a socket that the next daemon recognises and replaces.
        let _ = remove_own(&self.path, self.own);
    }
}

/// The lock of a socket's path. Its file exists only as long as a daemon does.
#[derive(Debug)]
struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock; `WouldBlock` if another daemon has it.
    fn take(socket: &Path) -> io::Result<Self> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        loop {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::INTR) => return Err(ErrorKind::Interrupted.into()),
                result => result?,
            }
            let locked = id(&file.metadata()?);
            match file_at(&path) {
                Ok(found) if found == locked => return Ok(Self { file, path }),
                // A daemon that ended has removed the file since it was opened here.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // This removes the file while it holds the lock, so no other daemon has locked it. A
        // failure leaves a file that the next daemon locks.
        let _ = self.file.metadata().and_then(|data| remove_own(&self.path, id(&data)));
        // A child process that this process is starting has a copy of the descriptor for a moment.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

fn id(data: &Metadata) -> FileId {
    (data.dev(), data.ino())
}

/// The file at a path, which may be a symbolic link.
fn file_at(path: &Path) -> io::Result<FileId> {
    fs::symlink_metadata(path).map(|data| id(&data))
}

/// Removes a file, unless another one is at its path meanwhile.
fn remove_own(path: &Path, own: FileId) -> io::Result<()> {
    if file_at(path)? == own { fs::remove_file(path) } else { Ok(()) }
}

/// Whether there is a socket on which no process listens.
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
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn the_next_daemon_does_not_wait_for_copies_of_descriptors() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let first = Socket::bind(&path, 0o600).unwrap();
        assert!(matches!(Socket::bind(&path, 0o600), Err(DaemonError::Running { .. })));
        let copies = (first._lock.file.try_clone().unwrap(), first.listener.try_clone().unwrap());
        drop(first);
        assert!(Socket::bind(&path, 0o600).is_ok());
        drop(copies);
    }

    #[test]
    fn a_lock_of_a_removed_file_does_not_count() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        // At most one daemon has the lock, although each removes its file.
        let holders = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..4000 {
                        let Ok(lock) = Lock::take(&path) else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        (0..10).for_each(|_| thread::yield_now());
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(lock);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
