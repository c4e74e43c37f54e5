//! Why an operation on a file fails, and what to do.

use std::path::PathBuf;

use rustix::io::Errno;

/// The result of an operation on a file.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a file failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller asked for a file table, and the file cannot have one.
    #[error("the file can have no file table: {reason}")]
    NoTable {
        /// Why, and what to do.
        reason: String,
    },
    /// The path leads to something that is no regular file.
    #[error("it is {kind}, not a regular file")]
    NotAFile {
        /// What it is, with its article.
        kind: &'static str,
    },
    /// The range is not within what the mapping shows.
    #[error("bytes {start}..{end} are not within the mapping, which shows {length}")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
        /// Bytes that the mapping shows.
        length: u64,
    },
    /// The file, or the mapping, is for reading only.
    #[error("{doing}: this is for reading only; open the file and map it for writing")]
    ReadOnly {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The file is longer than a mapping can be.
    #[error("the file has {length} bytes, and a mapping shows at most {most}")]
    TooLong {
        /// Bytes.
        length: u64,
        /// Bytes.
        most: u64,
    },
    /// The folder cannot be a pool of zeroed files.
    #[error("{} cannot be a pool of zeroed files: {reason}", folder.display())]
    NotAPool {
        /// The folder.
        folder: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// The folder of stored tables is not root's alone.
    #[error("{} cannot have stored tables: {reason}", folder.display())]
    UnfitFolder {
        /// The folder.
        folder: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// A pool of zeroed files can make files on its own file system alone.
    #[error(
        "the pool {} is on another file system than the file; use a pool on that file system",
        folder.display()
    )]
    OtherFileSystem {
        /// The pool's folder.
        folder: PathBuf,
    },
    /// A thread in the background failed. It tries again.
    #[error("{doing}: {failure}")]
    Background {
        /// What the thread does.
        doing: &'static str,
        /// The error of its last attempt.
        failure: String,
    },
    /// The storage is full.
    #[error("{doing}: no space left on the storage; remove files, or use a larger device")]
    NoSpace {
        /// The operation that failed.
        doing: &'static str,
    },
    /// Memory or addresses ran out.
    #[error("{doing}: not enough memory; free some, or raise the limit of the memory cgroup")]
    NoMemory {
        /// The operation that failed.
        doing: &'static str,
    },
    /// Any other error of the system.
    #[error("{doing}: {errno}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the system.
        errno: Errno,
    },
}

impl Error {
    /// The error number for a caller that knows only these.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NoTable { .. } => Errno::OPNOTSUPP,
            Self::NotAFile { .. } | Self::OutOfRange { .. } | Self::NotAPool { .. } => Errno::INVAL,
            Self::ReadOnly { .. } => Errno::ACCESS,
            Self::TooLong { .. } => Errno::FBIG,
            Self::UnfitFolder { .. } => Errno::PERM,
            Self::OtherFileSystem { .. } => Errno::XDEV,
            Self::Background { .. } => Errno::IO,
            Self::NoSpace { .. } => Errno::NOSPC,
            Self::NoMemory { .. } => Errno::NOMEM,
            Self::System { errno, .. } => *errno,
        }
    }

    /// The meaning of an error number.
    pub(crate) fn of(doing: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace { doing },
            Errno::NOMEM => Self::NoMemory { doing },
            Errno::BADF | Errno::ACCESS => Self::ReadOnly { doing },
            errno => Self::System { doing, errno },
        }
    }

    pub(crate) fn of_io(doing: &'static str, error: &std::io::Error) -> Self {
        Self::of(doing, Errno::from_io_error(error).unwrap_or(Errno::IO))
    }
}
