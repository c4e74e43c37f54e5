//! Why a file could not be opened as a device.

use std::io;
use std::path::PathBuf;

/// Why a file could not be opened as a device. Later errors are plain [`io::Error`]s.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Another process, or another handle of this one, has the file open in a conflicting way.
    #[error(
        "{} is in use by {}: close it there first; one writer may have a file open, or several \
         readers", path.display(), holder_in_words(*holder)
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// The process that holds it, if that can be told.
        holder: Option<u32>,
    },
    /// The file to create exists already.
    #[error("{} exists already: open it, or choose another name", path.display())]
    AlreadyExists {
        /// The file.
        path: PathBuf,
    },
    /// The file to open does not exist.
    #[error("{} does not exist", path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// The folder for the new file does not exist.
    #[error("{} cannot be created: the folder {} does not exist", path.display(), folder.display())]
    NoFolder {
        /// The file.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// A directory, a pipe, a terminal, ...
    #[error("{} is a {kind}: only regular files and block devices hold pages", path.display())]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
    },
    /// The process has no right to open the file.
    #[error("no permission to open {} {}: {source}", path.display(),
        if *.read_only { "for reading" } else { "for reading and writing (try read-only)" })]
    Permission {
        /// The file.
        path: PathBuf,
        /// How it was to be opened.
        read_only: bool,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The file system has no locks.
    #[error(
        "{} cannot be locked ({source}): put it on a file system with locks", path.display()
    )]
    NoLocks {
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The engine that was asked for does not work here.
    #[error("the I/O engine {engine} does not work here ({source}): choose the engine auto")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Anything else.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// The operation that failed.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// The holder of the file's lock. It may be a forgotten handle of this process.
fn holder_in_words(holder: Option<u32>) -> String {
    match holder {
        Some(pid) if pid == std::process::id() => {
            "this process itself (a tree, or another handle of the store, keeps it open)".into()
        }
        Some(pid) => format!("process {pid}"),
        None => "another process".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_file_is_said() {
        let text = |holder| DeviceError::InUse { path: "a".into(), holder }.to_string();
        let rest = "close it there first; one writer may have a file open, or several readers";
        assert_eq!(text(Some(1)), format!("a is in use by process 1: {rest}"));
        assert_eq!(text(None), format!("a is in use by another process: {rest}"));
        let own = "this process itself (a tree, or another handle of the store, keeps it open)";
        assert_eq!(text(Some(std::process::id())), format!("a is in use by {own}: {rest}"));
    }
}
