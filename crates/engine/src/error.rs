//! The errors of a store: one enum. Each message names the cause and says what to do.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;
use vellum_log::LogError;
use vellum_pool::device::DeviceError;
use vellum_pool::{PageDamage, PageRef, PoolError};

use crate::node::Torn;

/// The damage that the page check reports for a page that is read after the store was closed.
pub(crate) const CLOSED: &str = "the store is closed";

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation on a store failed.
///
/// A change that returns an error has changed nothing in the store, but for [`Error::NotDurable`]:
/// that one is made, and a crash may take it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is not a Vellum store.
    #[error("this is not a Vellum store: {0}")]
    NotAStore(String),
    /// The file has a format version that this program cannot read.
    #[error(
        "the store has format version {found}, and this program reads versions up to {known}: use \
         a newer program, or bring the entries here with its vellum dump and this one's vellum load"
    )]
    UnknownFormat {
        /// The version that the file records.
        found: u32,
        /// The version that this program reads.
        known: u32,
    },
    /// A part of the file is missing.
    #[error(
        "the file was cut off: it has {found} pages of 4 KiB, but its header says {expected}; \
         restore it from a copy, or save what is left of it (open it for salvage, or vellum \
         salvage)"
    )]
    Truncated {
        /// Length of the file in pages of 4 KiB.
        found: u64,
        /// Length that the header records.
        expected: u64,
    },
    /// A page does not hold what the store expects there.
    #[error(
        "{page} is damaged: {what}; restore the store from a copy, or save the rest of it (open \
         it for salvage, or vellum salvage)"
    )]
    Damaged {
        /// The page.
        page: PageRef,
        /// What is wrong with it.
        what: String,
    },
    /// The last program that had the store open did not close it, and had opened it without a log.
    #[error(
        "the store had no log and was not closed cleanly, so its pages may not fit together: load \
         a dump into a new store, or save what can be read (open it for salvage, or vellum \
         salvage). That brings back the entries of each tree: those in pages that were not \
         changed after the last sync or close as they were then, the others as they were then, or \
         later, or not at all"
    )]
    UncleanShutdown,
    /// Another handle or process has the file open.
    #[error("{0}")]
    InUse(String),
    /// The store's log has no room, or has failed.
    #[error(transparent)]
    Log(LogError),
    /// The log of the store cannot be made where it belongs.
    #[error(
        "{0}; the store has its log there: see to the place, name another folder \
         (Options::log_folder, or --log-folder), or do without a log (Options::log(false), or \
         --no-log), and then a crash may leave a store that only salvage reads"
    )]
    NoPlaceForLog(#[source] LogError),
    /// The store was not closed, and needs its log to recover. The caller has opened it read-only.
    #[error(
        "the store was not closed, and has to recover from its log before it can be read: open it \
         for writing once"
    )]
    NeedsRecovery,
    /// The store needs its log to recover, and the log is not there.
    #[error(
        "the store was not closed, and needs its log {expected:016x} to recover, but {place}: \
         bring the log's folder back, or say where it is (Options::log_folder, or --log-folder); \
         if it is lost, save what can be read (open it for salvage, or vellum salvage)"
    )]
    NoLog {
        /// Where no log is, and that there is none.
        place: String,
        /// The identity of the log that the store's header names.
        expected: u64,
    },
    /// The store needs its log to recover, and was given another one.
    #[error(
        "the store was not closed, and needs its log {expected:016x} to recover, but the log in \
         {place} is {found:016x}: say where the log is that the store had when it was last open \
         (Options::log_folder, or --log-folder); if it is lost, save what can be read (open it \
         for salvage, or vellum salvage)"
    )]
    OtherLog {
        /// Where the other log is.
        place: String,
        /// The identity of the log that was found.
        found: u64,
        /// The identity of the log that the store's header names.
        expected: u64,
    },
    /// A record of the log is none that this program understands.
    #[error(
        "the record at {lsn} of the log cannot be understood: {what}; open the store with the \
         version of the program that wrote it"
    )]
    BadRecord {
        /// The record's number in the log.
        lsn: u64,
        /// What is wrong.
        what: String,
    },
    /// The caller tried to change a store that is open read-only.
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
    /// The value is too long to be stored in one call with this pool.
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
    /// The value is longer than the format allows.
    #[error("the value has more than {max} bytes, the greatest length of a value: split it")]
    TooLongForAny {
        /// Greatest length of a value in bytes.
        max: u64,
    },
    /// The value is too long for this pool to return it as one slice.
    #[error(
        "the value has {len} bytes, and this pool can return at most {max} as one slice: read it \
         with Tree::reader or Tree::get_into, or open the store with a larger pool"
    )]
    NeedsReader {
        /// Length of the value in bytes.
        len: u64,
        /// Greatest length, in bytes, of a value that is returned as one slice.
        max: u64,
    },
    /// The pool is below the minimum.
    #[error(
        "a pool of {bytes} bytes is too small for this store: it needs at least {min} ({} KiB)",
        min / 1024
    )]
    PoolTooSmall {
        /// The requested size in bytes.
        bytes: u64,
        /// The minimum in bytes.
        min: u64,
    },
    /// Guards hold all pages of the pool.
    #[error("{0}")]
    PoolExhausted(#[source] Box<PoolError>),
    /// The disk has no space for more pages.
    #[error("{0}")]
    DiskFull(#[source] Box<PoolError>),
    /// The file or the device failed.
    #[error("{0}")]
    Io(#[source] Box<PoolError>),
    /// The input of a change could not be read. The store is unchanged.
    #[error("the value could not be read: {0}")]
    Input(#[source] io::Error),
    /// A callback called the store that runs it. The callback was passed to
    /// [`Tree::update`](crate::Tree::update), `fetch_and_update`, `upsert_with`, `with`, `retain`,
    /// `extract_if` or [`Store::check`](crate::Store::check). A call from there that changes the
    /// store, and `sync`, `close`, `snapshot` and `check`, would wait for the callback to end.
    #[error(
        "a callback of update, retain, with or a similar call has called the store that runs it \
         under a lock, and would wait for itself: call the store after the callback has returned"
    )]
    CalledFromWithin,
    /// An earlier write or sync failed.
    #[error(
        "an earlier failure stopped all changes: {0}; reading goes on: save what you need, close \
         the store and check the device"
    )]
    Poisoned(Arc<str>),
    /// The file to create exists already.
    #[error("{} exists already: open it, or choose another name", .0.display())]
    Exists(PathBuf),
    /// The file to open does not exist.
    #[error("{} does not exist", .0.display())]
    NotFound(PathBuf),
    /// Another transaction has changed entries that this one has read or changed.
    #[error(
        "another transaction has changed what this one has read or changes: nothing was changed; \
         begin a new transaction and try again (Store::transact does)"
    )]
    Conflict,
    /// The transaction is committed, and could not be made durable.
    #[error("the transaction is committed, but it is unknown whether a crash takes it: {0}")]
    NotDurable(#[source] Box<Error>),
    /// The transaction changes more than this store can commit at once.
    #[error("the transaction is too large: {0}; commit it in parts")]
    TransactionTooLarge(String),
    /// The savepoint is of another transaction, or was undone.
    #[error("the transaction has no such savepoint: it was undone, or is of another transaction")]
    NoSuchSavepoint,
    /// The tree belongs to another store.
    #[error("the tree {0:?} belongs to another store than the transaction or the snapshot")]
    OtherStore(String),
    /// The old values that snapshots and transactions still see take too much memory.
    #[error(
        "the old values that {views} snapshots and transactions still see take {bytes} bytes of \
         memory, more than they may; the oldest is {} s old: end it, or open the store with a \
         larger pool",
        oldest.as_secs()
    )]
    VersionsFull {
        /// What the old values take.
        bytes: u64,
        /// The number of snapshots and transactions.
        views: u64,
        /// The age of the oldest of them.
        oldest: std::time::Duration,
    },
    /// The store has no tree of this name.
    #[error("the store has no tree named {0:?}: create it, or list the trees")]
    NoSuchTree(String),
    /// The store has a tree of this name already.
    #[error("the store has a tree named {0:?} already: open it, or choose another name")]
    TreeExists(String),
    /// The store has used all numbers for trees.
    #[error(
        "the store has used all numbers for trees: use the existing trees, or dump the store and \
         load the dump into a new one"
    )]
    NoTreeNumbers,
    /// The tree has the key to insert already.
    #[error("the key is in the tree already: use upsert to replace its value")]
    KeyExists,
    /// The caller tried to bulk load into a tree that has entries.
    #[error("the tree has entries: bulk loading needs an empty tree")]
    NotEmpty,
    /// The keys of a bulk load do not ascend.
    #[error(
        "the key of entry {entry}, \"{}\", is not greater than the key before it: sort the input \
         and remove duplicates",
        shown(key)
    )]
    NotSorted {
        /// Number of the entry, from 0.
        entry: u64,
        /// Its key.
        key: Vec<u8>,
    },
    /// A file that a backup or a restore makes, or needs, could not be read or written.
    #[error("{doing}: {source}")]
    BackupIo {
        /// What was being done, with the file's name.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// A file is no backup, is damaged, or does not belong to the other ones.
    #[error("{}: {what}", path.display())]
    BadBackup {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A control socket cannot be made, or the process that has a store open cannot be asked there.
    #[error("{doing}: {source}")]
    Control {
        /// What was being done, with the store's file.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
    /// The process that has the store open could not do what it was asked for.
    #[error("the process that has the store open says: {0}")]
    Owner(String),
    /// The caller's function has ended the work.
    #[error("it was cancelled, and has left nothing")]
    Cancelled,
    /// The store was closed through one of its handles, or because the process exits.
    #[error("the store is closed: open it again to use it")]
    Closed,
    /// An option has an invalid value.
    #[error("{0}")]
    BadOption(String),
    /// The file could not be opened.
    #[error(transparent)]
    Open(Box<DeviceError>),
    /// Any other error of the pool.
    #[error(transparent)]
    Pool(Box<PoolError>),
}

impl Error {
    /// The reader holds a lock on the page, and the bytes of its node are inconsistent.
    pub(crate) fn torn(page: PageRef, _: Torn) -> Error {
        Error::damaged(page, "its node is inconsistent")
    }

    /// The reader looked for a key and reached a node whose fences exclude that key.
    pub(crate) fn fences(page: PageRef) -> Error {
        Error::damaged(page, "its fences differ from the separators around it in its parent")
    }

    /// The number of `errno.h` that represents this error in C and Python.
    pub fn errno(&self) -> i32 {
        let errno = match self {
            Error::NotAStore(_) | Error::UnknownFormat { .. } => Errno::MEDIUMTYPE,
            Error::Truncated { .. } | Error::Damaged { .. } | Error::BadRecord { .. } => {
                Errno::BADMSG
            }
            Error::UncleanShutdown
            | Error::NeedsRecovery
            | Error::NoLog { .. }
            | Error::OtherLog { .. } => Errno::UCLEAN,
            Error::InUse(_) => Errno::BUSY,
            Error::ReadOnly => Errno::ROFS,
            Error::KeyTooLong { .. } => Errno::NAMETOOLONG,
            Error::ValueTooLong { .. }
            | Error::TooLongForAny { .. }
            | Error::NeedsReader { .. } => Errno::FBIG,
            Error::PoolTooSmall { .. } | Error::BadOption(_) | Error::NotSorted { .. } => {
                Errno::INVAL
            }
            Error::Pool(cause) if cause.is_bad_size() => Errno::INVAL,
            Error::NotDurable(cause) => return cause.errno(),
            Error::Conflict => Errno::AGAIN,
            Error::TransactionTooLarge(_) => Errno::TOOBIG,
            Error::NoSuchSavepoint | Error::OtherStore(_) => Errno::INVAL,
            Error::VersionsFull { .. } => Errno::NOMEM,
            Error::PoolExhausted(_) => Errno::NOBUFS,
            Error::DiskFull(_)
            | Error::Log(LogError::Full { .. })
            | Error::NoPlaceForLog(LogError::Full { .. }) => Errno::NOSPC,
            Error::Exists(_) | Error::TreeExists(_) | Error::KeyExists => Errno::EXIST,
            Error::NotFound(_) | Error::NoSuchTree(_) => Errno::NOENT,
            Error::NotEmpty => Errno::NOTEMPTY,
            Error::NoTreeNumbers => Errno::OVERFLOW,
            Error::Closed => Errno::SHUTDOWN,
            Error::BadBackup { .. } => Errno::BADMSG,
            Error::Cancelled => Errno::CANCELED,
            Error::Owner(_) => Errno::REMOTEIO,
            Error::CalledFromWithin => Errno::DEADLK,
            Error::Io(_)
            | Error::BackupIo { .. }
            | Error::Control { .. }
            | Error::Input(_)
            | Error::Poisoned(_)
            | Error::Open(_)
            | Error::Log(_)
            | Error::NoPlaceForLog(_)
            | Error::Pool(_) => return self.system_errno().unwrap_or(Errno::IO.raw_os_error()),
        };
        errno.raw_os_error()
    }

    /// The error number of the system call that failed, if one did.
    fn system_errno(&self) -> Option<i32> {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            let error_of_io = error.downcast_ref::<io::Error>();
            if let Some(number) = error_of_io.and_then(io::Error::raw_os_error) {
                return Some(number);
            }
            // `io::Error::source` skips the error inside it.
            let inner = error_of_io.and_then(io::Error::get_ref);
            cause = inner.map_or(error.source(), |inner| Some(inner));
        }
        None
    }

    /// The error of an operation on a file that a backup or a restore makes or needs.
    pub(crate) fn of_backup(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let doing = doing.into();
        move |source| Error::BackupIo { doing, source }
    }

    /// The page contradicts what the store knows about it.
    pub(crate) fn damaged(page: PageRef, what: impl Into<String>) -> Error {
        Error::Damaged { page, what: what.into() }
    }
}

/// The most bytes of a key that a message has.
const SHOWN: usize = 64;

/// The beginning of a key, for a message.
fn shown(key: &[u8]) -> String {
    match key.get(..SHOWN) {
        Some(beginning) if key.len() > SHOWN => format!("{}...", beginning.escape_ascii()),
        _ => key.escape_ascii().to_string(),
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
            PoolError::Exhausted { .. }
            | PoolError::PageTooLarge { .. }
            | PoolError::CannotShrink { .. } => Error::PoolExhausted(Box::new(error)),
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

impl From<LogError> for Error {
    /// What concerns the whole store has one name, whether the log or the file says it.
    fn from(error: LogError) -> Error {
        match error {
            LogError::Closed => Error::Closed,
            LogError::InUse { .. } => Error::InUse(error.to_string()),
            error => Error::Log(error),
        }
    }
}

impl From<Error> for io::Error {
    /// For the readers and writers of values. The store's error is inside.
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
