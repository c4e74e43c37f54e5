//! Where the blocks of a log are kept: a trait, and what implements it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use rustix::io::Errno;

use crate::block::Block;

mod discovery;
mod file;
mod folder;
mod inspect;
mod owner;
mod segment;
mod simulated;
#[cfg(all(test, not(feature = "model")))]
mod simulated_disk;
#[cfg(all(test, not(feature = "model")))]
mod simulated_folder;
mod sync_method;

pub use file::{FileLog, FileLogOptions};
pub use inspect::FileSeen;
pub(crate) use inspect::{Seen, look};
pub use simulated::{SimulatedDevice, SimulatedFault, SimulatedOptions};
#[cfg(all(test, not(feature = "model")))]
pub(crate) use simulated_disk::{Planted, SimulatedDisk};
pub use sync_method::SyncMethod;
#[cfg(feature = "testing")]
pub use sync_method::choose_sync_method;

/// The place of a log: an array of blocks that grows at its end and is given up at its front.
///
/// The log numbers its blocks from 0 on. It writes each block once, and again only if an opening
/// found that the first writing did not become a part of the log. A folder of files keeps
/// them, or memory, or several machines.
///
/// The log calls `append`, `sync`, `read` and `trim` from several threads at once; `prepare` and
/// `extend` from one at a time.
pub trait LogDevice: Send + Sync + fmt::Debug + 'static {
    /// The identity of the log, which stands in each of its blocks, so that a block of another log
    /// is never taken for one of this.
    fn identity(&self) -> u64;

    /// The blocks that there is room for: those written, and those that `extend` made.
    fn scan(&self) -> Range<u64>;

    /// Does a short step of what the next `extend` has to do, so that flushes go between two steps.
    /// Returns whether there are more. The log calls it ahead, and calls `extend` before the last
    /// step if a record needs the room.
    ///
    /// # Errors
    /// As `extend`.
    fn prepare(&self) -> io::Result<bool> {
        Ok(false)
    }

    /// Makes room for more blocks at the end, and returns the new end. The room is durable when
    /// this returns, and a block that is written there later changes no metadata. What the blocks
    /// hold until then is of no interest: the log tells it from its own.
    ///
    /// # Errors
    /// `StorageFull` and its like if there is none; then nothing has changed, and a later call may
    /// succeed. After a write or sync that failed for another reason the device fails for good.
    fn extend(&self) -> io::Result<u64>;

    /// Writes the blocks of both parts, one after the other, from block `first` on. Several appends
    /// of different blocks may be under way. Blocks are within `scan`.
    ///
    /// # Errors
    /// What was written is then unknown, and all later appends and syncs fail, too: the place of
    /// the log has to be opened anew, so that it is read from the storage itself.
    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written>;

    /// Makes all blocks durable whose `append` returned before this was called, by this process or
    /// by an earlier one.
    ///
    /// # Errors
    /// What is durable is then unknown, and all later syncs fail, too.
    fn sync(&self) -> io::Result<()>;

    /// Reads blocks, which are within `scan`.
    ///
    /// # Errors
    /// What the storage said.
    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()>;

    /// Lets the device reuse the room of blocks before `before`. It may keep some, and an opening
    /// may find them again.
    ///
    /// # Errors
    /// What the storage said.
    fn trim(&self, before: u64) -> io::Result<()>;

    /// Whether a [`Log`](crate::Log) has the device. The log sets it when it is opened, and clears
    /// it when it is gone; the device only keeps it. A second log is refused.
    fn taken(&self) -> &AtomicBool;

    /// How many appends at once are worth it.
    fn in_flight(&self) -> usize {
        1
    }
}

/// What became of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It is durable.
    Durable,
    /// It is durable after the next sync.
    Cached,
}

/// Whether there is no room, rather than a failure.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Whether the storage has lost what was asked for, rather than that the question was wrong.
pub(crate) fn is_unreadable(error: &io::Error) -> bool {
    let unreadable = [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::BADMSG];
    Errno::from_io_error(error).is_some_and(|error| unreadable.contains(&error))
}
