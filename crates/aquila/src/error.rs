//! Why an operation fails, and what to do.

use rustix::io::Errno;

/// The result of an operation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The backend that the caller asked for does not work here.
    #[error("the backend {backend} does not work here: {reason}")]
    NoBackend {
        /// The backend.
        backend: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// The backend cannot do this.
    #[error("{doing}: the kernel's page cache has no such control; use the backend userfaultfd")]
    Unsupported {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The cache would have fewer pages than a program needs, or more than it can have.
    #[error(
        "a cache of {bytes} bytes is not possible: it has at least 256 KiB, and at most its \
         capacity, which is at most 4 TiB"
    )]
    BadSize {
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// The range of the file is empty, does not begin at a page, is longer than a mapping can be,
    /// or ends beyond the last byte that can be mapped.
    #[error(
        "bytes {start}..{end} of the file cannot be mapped: begin at a multiple of 4096, map at \
         least one byte and at most 64 TiB, and end at 4 PiB of the file or before"
    )]
    BadRange {
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
    },
    /// The range is not within the mapping.
    #[error("bytes {start}..{end} are not within the mapping, which has {length}")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// The byte after the last one.
        end: u64,
        /// Bytes of the mapping.
        length: u64,
    },
    /// The file ends before the range does.
    #[error("{doing}: the file ends before that; make it longer first")]
    BeyondEnd {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The file is not open for reading, or not for writing although it should be mapped for that.
    #[error("{doing}: open the file for reading, and for writing too if it is mapped for that")]
    Access {
        /// The operation that failed.
        doing: &'static str,
    },
    /// It is not a regular file, or one of a file system whose files have no length (`/proc`).
    #[error("only regular files that have a length can be mapped through the cache")]
    NotAFile,
    /// The process has as many mappings as it can have, or the cache has as many files.
    #[error("{doing}: there are {most} already; drop some first")]
    TooMany {
        /// The operation that failed.
        doing: &'static str,
        /// The limit.
        most: usize,
    },
    /// Every page of the cache is pinned.
    #[error("{doing}: every page of the cache is pinned; drop pins, or make the cache larger")]
    Full {
        /// The operation that failed.
        doing: &'static str,
    },
    /// A page of the range is pinned as often as it can be.
    #[error("{doing}: a page has 32768 pins already; drop some first")]
    TooManyPins {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The process is a child that was forked after the cache was made.
    #[error("a forked process does not have its parent's mappings; make a cache of its own")]
    Forked,
    /// The storage is full. What is not written is still in the cache, and is still dirty.
    #[error("{doing}: no space left on the storage; remove files, and call it again")]
    NoSpace {
        /// The operation that failed.
        doing: &'static str,
    },
    /// An earlier sync of the file has failed. The pages were written, and the system may have
    /// dropped them, so no later sync can say that they are durable. The error ends with the file's
    /// last mapping.
    #[error(
        "{doing}: an earlier sync of the file failed, and what was written since the last one that \
         worked may be lost; drop the file's mappings, check the file, and write it once more"
    )]
    SyncFailed {
        /// The operation that failed.
        doing: &'static str,
    },
    /// The mapping ends beyond the process' limit of file sizes, which counts for the memory that
    /// the cache keeps pages in.
    #[error("{doing}: it ends beyond the limit of file sizes, {limit} bytes; raise RLIMIT_FSIZE")]
    FileSizeLimit {
        /// The operation that failed.
        doing: &'static str,
        /// The limit.
        limit: u64,
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
    /// The number of the error, for callers in C.
    pub fn errno(&self) -> Errno {
        match self {
            Self::NoBackend { .. } | Self::Unsupported { .. } => Errno::OPNOTSUPP,
            Self::BadSize { .. } | Self::BadRange { .. } | Self::OutOfRange { .. } => Errno::INVAL,
            Self::BeyondEnd { .. } => Errno::NXIO,
            Self::Access { .. } => Errno::ACCESS,
            Self::NotAFile => Errno::NODEV,
            Self::TooMany { .. } => Errno::MFILE,
            Self::Full { .. } => Errno::BUSY,
            Self::TooManyPins { .. } => Errno::OVERFLOW,
            Self::Forked => Errno::PERM,
            Self::NoSpace { .. } => Errno::NOSPC,
            Self::SyncFailed { .. } => Errno::IO,
            Self::FileSizeLimit { .. } => Errno::FBIG,
            Self::NoMemory { .. } => Errno::NOMEM,
            Self::System { errno, .. } => *errno,
        }
    }

    /// The meaning of an error number.
    pub(crate) fn of(doing: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace { doing },
            Errno::NOMEM => Self::NoMemory { doing },
            Errno::BADF | Errno::ACCESS => Self::Access { doing },
            errno => Self::System { doing, errno },
        }
    }
}
