//! What can go wrong in a store: one enum, each message with its cause and what to do.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;
use vellum_pool::device::DeviceError;
use vellum_pool::{PageDamage, PageRef, PoolError};

use crate::node::Torn;

/// What is said of pages that are read when the store is closed.
pub(crate) const CLOSED: &str = "the store is closed";

/// What operations of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a store could not do what it was asked.
///
/// After an error of a change nothing of that change is in the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is something else.
    #[error("this is not a Vellum store: {0}")]
    NotAStore(String),
    /// The file was written by a program that knows another format.
    #[error("the store has format version {found}; this program reads {known}: use a matching one")]
    UnknownFormat {
        /// The version that the file records.
        found: u32,
        /// The version that this program reads.
        known: u32,
    },
    /// A part of the file is missing.
    #[error(
        "the file was cut off: it has {found} pages of 4 KiB, but its header says {expected}; \
         restore it from a copy, or save what is left of it (open it for salvage, or vellum dump \
         --salvage)"
    )]
    Truncated {
        /// Length of the file in pages of 4 KiB.
        found: u64,
        /// Length that the header records.
        expected: u64,
    },
    /// A page does not hold what it should.
    #[error(
        "{page} is damaged: {what}; restore the store from a copy, or save the rest of it (open \
         it for salvage, or vellum dump --salvage)"
    )]
    Damaged {
        /// The page.
        page: PageRef,
        /// What is wrong with it.
        what: String,
    },
    /// The program that used the store last did not close it.
    #[error(
        "the store was not closed cleanly, so its pages may not fit together: load a dump into a \
         new store, or save what can be read (open it for salvage, or vellum dump --salvage). That \
         brings back the entries of each tree: those in pages that were not changed after the last \
         sync or close as they were then, the others as they were then, or later, or not at all"
    )]
    UncleanShutdown,
    /// Another handle or process has the file open.
    #[error("{0}")]
    InUse(String),
    /// A change was asked of a store that is open read-only.
    #[error("the store is open read-only: open it for writing to change it")]
    ReadOnly,
    /// The key is too long for a page of this store.
    #[error(
        "the key has {len} bytes, the limit of this store is {max}: use shorter keys, or create \
         the store with larger pages"
    )]
    KeyTooLong {
        /// Length of the key in bytes.
        len: usize,
        /// Greatest length of a key in bytes.
        max: usize,
    },
    /// The value is too long for the pool, to be stored in one call.
    #[error(
        "the value has {len} bytes, the limit is {max} (a quarter of the pool): write it with \
         Tree::writer, or open the store with a larger pool"
    )]
    ValueTooLong {
        /// Length of the value in bytes.
        len: u64,
        /// Greatest length of a value in bytes.
        max: u64,
    },
    /// The value is longer than any can be.
    #[error("the value has more than {max} bytes, the greatest length of a value: divide it")]
    TooLongForAny {
        /// Greatest length of a value in bytes.
        max: u64,
    },
    /// The value is too long to be had as a whole with this pool.
    #[error(
        "the value has {len} bytes, with this pool up to {max} are handed out as a whole: read it \
         with Tree::reader or Tree::get_into, or open the store with a larger pool"
    )]
    NeedsReader {
        /// Length of the value in bytes.
        len: u64,
        /// Greatest length, in bytes, that is handed out as a whole.
        max: u64,
    },
    /// The pool is below the minimum.
    #[error(
        "a pool of {bytes} bytes is too small for this store: it needs at least {min} ({} KiB)",
        min / 1024
    )]
    PoolTooSmall {
        /// Size that was asked for, in bytes.
        bytes: u64,
        /// The minimum in bytes.
        min: u64,
    },
    /// All of the pool is held.
    #[error("{0}")]
    PoolExhausted(#[source] Box<PoolError>),
    /// There is no space for more pages.
    #[error("{0}")]
    DiskFull(#[source] Box<PoolError>),
    /// The file or the device failed.
    #[error("{0}")]
    Io(#[source] Box<PoolError>),
    /// Reading the input of a change failed. The store is unchanged.
    #[error("the value could not be read: {0}")]
    Input(#[source] io::Error),
    /// A function of the caller that the store runs has called the store: one that
    /// [`Tree::update`](crate::Tree::update), `fetch_and_update`, `upsert_with`, `with`, `retain`,
    /// `extract_if` or [`Store::check`](crate::Store::check) was given. All calls that change the
    /// store, and `sync`, `close`, `snapshot` and `check`, would wait for that function to end.
    #[error(
        "the store was called by a function that it runs itself, under a lock (that of update, \
         retain, with or another call): it would wait for itself; call it when that function has \
         returned"
    )]
    CalledFromWithin,
    /// An earlier write or sync failed.
    #[error(
        "an earlier failure stopped all changes: {0}; reading goes on: save what you need, close \
         the store and check the device"
    )]
    Poisoned(Arc<str>),
    /// The file to create is there already.
    #[error("{} exists already: open it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// The file to open is not there.
    #[error("{} does not exist", .0.display())]
    NotFound(PathBuf),
    /// There is no tree of this name.
    #[error("the store has no tree named {0:?}: create it, or list the trees that there are")]
    NoSuchTree(String),
    /// There is a tree of this name already.
    #[error("the store has a tree named {0:?} already: open it, or choose another name")]
    TreeExists(String),
    /// So many trees were created that no number is left for another one.
    #[error(
        "the store has used up its numbers for trees: use the trees that there are, or dump it and \
         load the dump into a new store"
    )]
    NoTreeNumbers,
    /// The key to insert is there already.
    #[error("the key is in the tree already: use upsert to replace its value")]
    KeyExists,
    /// A bulk load into a tree that has entries.
    #[error("the tree has entries: bulk loading needs an empty tree")]
    NotEmpty,
    /// A bulk load of keys that do not ascend.
    #[error("entry {entry} is not above the one before it: sort the input and remove duplicates")]
    NotSorted {
        /// Number of the entry, from 0.
        entry: u64,
    },
    /// The store was closed, through this handle's store or another handle of it, or because the
    /// process exits.
    #[error("the store is closed: open it again to use it")]
    Closed,
    /// An option that makes no sense.
    #[error("{0}")]
    BadOption(String),
    /// Opening the file failed.
    #[error(transparent)]
    Open(Box<DeviceError>),
    /// Anything else that the pool reports.
    #[error(transparent)]
    Pool(Box<PoolError>),
}

impl Error {
    /// A page under a lock whose bytes make no sense.
    pub(crate) fn torn(page: PageRef, _: Torn) -> Error {
        Error::damaged(page, "its node makes no sense")
    }

    /// A node that was reached by a key which is outside of its fences.
    pub(crate) fn fences(page: PageRef) -> Error {
        Error::damaged(page, "its fences are not the separators beside it in its parent")
    }

    /// The number of `errno.h` that stands for it where errors are numbers, in C and Python.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Error::NotAStore(_) | Error::UnknownFormat { .. } => Errno::MEDIUMTYPE,
            Error::Truncated { .. } | Error::Damaged { .. } => Errno::BADMSG,
            Error::UncleanShutdown => Errno::UCLEAN,
            Error::InUse(_) => Errno::BUSY,
            Error::ReadOnly => Errno::ROFS,
            Error::KeyTooLong { .. } => Errno::NAMETOOLONG,
            Error::ValueTooLong { .. }
            | Error::TooLongForAny { .. }
            | Error::NeedsReader { .. } => Errno::FBIG,
            Error::PoolTooSmall { .. } | Error::BadOption(_) | Error::NotSorted { .. } => {
                Errno::INVAL
            }
            Error::PoolExhausted(_) => Errno::NOBUFS,
            Error::DiskFull(_) => Errno::NOSPC,
            Error::Exists(_) | Error::TreeExists(_) | Error::KeyExists => Errno::EXIST,
            Error::NotFound(_) | Error::NoSuchTree(_) => Errno::NOENT,
            Error::NotEmpty => Errno::NOTEMPTY,
            Error::NoTreeNumbers => Errno::OVERFLOW,
            Error::Closed => Errno::SHUTDOWN,
            Error::CalledFromWithin => Errno::DEADLK,
            Error::Io(_)
            | Error::Input(_)
            | Error::Poisoned(_)
            | Error::Open(_)
            | Error::Pool(_) => return self.system_errno().unwrap_or(Errno::IO.raw_os_error()),
        };
        errno.raw_os_error()
    }

    /// What the system said.
    fn system_errno(&self) -> Option<i32> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            let error_of_io = error.downcast_ref::<io::Error>();
            if let Some(number) = error_of_io.and_then(io::Error::raw_os_error) {
                return Some(number);
            }
            // That one passes over the error that it is made of.
            let inner = error_of_io.and_then(io::Error::get_ref);
            cause = inner.map_or(error.source(), |inner| Some(inner));
        }
        None
    }

    /// A page that contradicts what is known of it.
    pub(crate) fn damaged(page: PageRef, what: impl Into<String>) -> Error {
        Error::Damaged { page, what: what.into() }
    }
}

impl From<PageDamage> for Error {
    fn from(damage: PageDamage) -> Error {
        if damage.what == CLOSED {
            return Error::Closed;
        }
        Error::Damaged { page: damage.page, what: damage.what }
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Error {
        match error {
            PoolError::Damaged(damage) => damage.into(),
            PoolError::OutOfRange { page, pages } => {
                Error::damaged(page, format!("it lies beyond the end of the file ({pages} pages)"))
            }
            PoolError::PageFree(id) => {
                Error::damaged(PageRef { id, frames: 1 }, "it is not allocated")
            }
            PoolError::InUse(page) => Error::damaged(page, "it is in use without being allocated"),
            PoolError::Exhausted { .. } | PoolError::PageTooLarge { .. } => {
                Error::PoolExhausted(Box::new(error))
            }
            PoolError::DiskFull { .. } => Error::DiskFull(Box::new(error)),
            PoolError::Read { .. }
            | PoolError::Write { .. }
            | PoolError::WriteAhead(_)
            | PoolError::Sync(_)
            | PoolError::Resize(_) => Error::Io(Box::new(error)),
            PoolError::Poisoned(first) => Error::Poisoned(first),
            PoolError::ReadOnly => Error::ReadOnly,
            PoolError::PoolTooSmall { frames, min } => {
                Error::PoolTooSmall { bytes: frames * 4096, min: min * 4096 }
            }
            _ => Error::Pool(Box::new(error)),
        }
    }
}

impl From<Error> for io::Error {
    /// For readers and writers of values: the store's error is inside.
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Damaged { .. } => io::ErrorKind::InvalidData,
            Error::DiskFull(_) => io::ErrorKind::StorageFull,
            Error::PoolExhausted(_) => io::ErrorKind::OutOfMemory,
            Error::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            Error::TooLongForAny { .. } => io::ErrorKind::FileTooLarge,
            Error::Input(error) => error.kind(),
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Error {
        match error {
            DeviceError::InUse { .. } => Error::InUse(error.to_string()),
            DeviceError::AlreadyExists { path } => Error::Exists(path),
            DeviceError::NotFound { path } => Error::NotFound(path),
            other => Error::Open(Box::new(other)),
        }
    }
}
