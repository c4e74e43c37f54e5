//! What can go wrong with a log.

use std::io;
use std::path::PathBuf;

use crate::block::{Lsn, Unsound};

/// What can go wrong with a log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// A write or a sync failed. What is durable is unknown from there on, and a second sync would
    /// not tell: this handle takes no more records. What was acknowledged before stays so.
    #[error(
        "the log takes no more records, since {cause}: what was not acknowledged may be lost; \
         see to the storage, then open the log again"
    )]
    Poisoned {
        /// What failed first.
        cause: String,
    },
    /// The log has no room for the record, which was not taken. The log goes on as soon as it has.
    #[error("no room in the log for {bytes} bytes more: {source}")]
    Full {
        /// Bytes of the record, with its length.
        bytes: u64,
        /// What the place of the log said.
        source: io::Error,
    },
    /// The ring has no room for the record now, and the caller does not want to wait.
    #[error("the log has {bytes} bytes in memory that are not durable yet: try again later")]
    Busy {
        /// Bytes of the ring.
        bytes: u64,
    },
    /// The record is longer than the log takes.
    #[error(
        "a record of {len} bytes; this log takes at most {most}: split the record, or open the \
         log with a larger ring"
    )]
    TooLong {
        /// Bytes of the record.
        len: usize,
        /// The longest that is taken.
        most: usize,
    },
    /// The ring is larger than the lengths of records allow.
    #[error("a ring of {bytes} bytes; a log has at most {most}: ask for less")]
    RingTooLarge {
        /// Bytes of the ring that was asked for.
        bytes: usize,
        /// The most.
        most: u64,
    },
    /// No record has the number.
    #[error("there is no record {lsn}; the log ends at {end}")]
    NotAppended {
        /// The number.
        lsn: Lsn,
        /// Where the next record would begin at the earliest.
        end: Lsn,
    },
    /// The log does not reach back that far.
    #[error("the log begins at {begin}: what was before, such as {lsn}, was trimmed or is lost")]
    Trimmed {
        /// What was asked for.
        lsn: Lsn,
        /// Where the log begins.
        begin: Lsn,
    },
    /// A part of the log was durable, and is not there any more: a block, or a whole file.
    #[error("the log is damaged: at {lsn} {what}, but {witness}: restore the log from a copy")]
    Damaged {
        /// Where the block begins, or the place inside that is wrong.
        lsn: Lsn,
        /// What is wrong.
        what: String,
        /// How it is known that this is not just the end.
        witness: String,
    },
    /// The log was closed, or dropped, before that.
    #[error("the log was closed before the record was durable")]
    Closed,
    /// Another [`Log`](crate::Log) of this process has the device.
    #[error("another log of this process has the device: drop that one first")]
    Taken,
    /// This process is the child of a `fork`: the log and its threads are its parent's.
    #[error("this process was forked from the one that opened the log: let that one use it")]
    Forked,
    /// Another handle has the log open.
    #[error("{} is in use by another handle or process: close it there first", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds something that does not fit.
    #[error("{}: {what}", path.display())]
    Unfit {
        /// The folder or file.
        path: PathBuf,
        /// What, and what to do.
        what: String,
    },
    /// Anything else that the system refused.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was tried.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
}

impl LogError {
    /// For `map_err`.
    pub(crate) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> LogError {
        let doing = doing.into();
        move |source| LogError::Io { doing, source }
    }

    pub(crate) fn damaged(block: u64, why: Unsound, witness: String) -> LogError {
        let (lsn, what) = (Lsn::of_block(block), format!("there is no sound block ({why})"));
        LogError::Damaged { lsn, what, witness }
    }
}
