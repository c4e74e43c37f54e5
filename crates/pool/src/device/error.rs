//! Why a file could not be opened as a device.

use std::io;
use std::path::PathBuf;

/// Why a file could not be opened as a device. Later errors are plain [`io::Error`]s.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Another process, or another handle of this one, has the file open in a conflicting way.
    #[error(
        "{} is in use{}: close it there, or open it read-only in both places", path.display(),
        .holder.map(|pid| format!(" by process {pid}")).unwrap_or_default()
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// The process that holds it, if that can be told.
        holder: Option<u32>,
    },
    /// The file to create is there already.
    #[error("{} exists already: open it, or choose another name", path.display())]
    AlreadyExists {
        /// The file.
        path: PathBuf,
    },
    /// The file to open is not there.
    #[error("{} does not exist: create it first", path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// A directory, a pipe, a terminal, ...
    #[error("{} is a {kind}: only regular files and block devices hold pages", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// Not allowed to open the file.
    #[error("no permission to open {} {}: {source}", path.display(),
        if *.read_only { "for reading" } else { "for reading and writing (try read-only)" })]
    Permission {
        /// The file.
        path: PathBuf,
        /// How it was to be opened.
        read_only: bool,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file system has no locks.
    #[error(
        "{} cannot be locked ({source}): put it on a file system with locks, or open it without \
         a lock and make sure yourself that nobody else uses it", path.display()
    )]
    NoLocks {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The engine that was asked for does not work here.
    #[error("the I/O engine {engine} does not work here ({source}): choose the engine auto")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// Anything else.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}
