//! The errors of the buffer manager.

use std::io;
use std::sync::Arc;

use vellum_vm::memory_limit::MemoryLimit;
use vellum_vm::{ReserveError, SurfaceError};

use crate::page::format::PageDamage;
use crate::page::{PageId, PageRef};

/// A page changed during an optimistic read: retry. Nothing is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page changed during an optimistic read")]
pub struct Restart;

/// Why an operation of the pool failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// The reference points past the end of the file: it belongs to another file, or is damaged.
    #[error("{page} lies beyond the end of the file, which has {pages} pages")]
    OutOfRange {
        /// The requested page.
        page: PageRef,
        /// The file's length in pages of 4 KiB.
        pages: u64,
    },
    /// The reference points to a page that was freed.
    #[error("page {0} is not allocated: the reference to it is stale")]
    PageFree(PageId),
    /// The device delivered a page, but its contents are wrong.
    #[error(transparent)]
    Damaged(#[from] PageDamage),
    /// The device did not deliver a page.
    #[error("reading {page} failed: {source}")]
    Read {
        /// The requested page.
        page: PageRef,
        /// The error of the device.
        source: io::Error,
    },
    /// The device failed to write a page. The page stays in memory and stays dirty.
    #[error("writing {page} failed: {source}")]
    Write {
        /// The page that was to be written.
        page: PageRef,
        /// The error of the device.
        source: io::Error,
    },
    /// The log did not become durable, which has to happen before pages are written. No dirty page
    /// may leave.
    #[error("pages cannot be written yet: {0}")]
    WriteAhead(#[source] io::Error),
    /// The device could not make durable what it had written.
    #[error("making the file durable failed: {0}")]
    Sync(#[source] io::Error),
    /// No space for more pages. Nothing was changed.
    #[error("no space left for {frames} more pages of 4 KiB: free some space on the disk")]
    DiskFull {
        /// How many were asked for.
        frames: u32,
        /// The error of the device.
        source: io::Error,
    },
    /// The file could not be made longer or shorter.
    #[error("changing the file's size failed: {0}")]
    Resize(#[source] io::Error),
    /// Guards hold all frames of the pool, or their pages cannot be written back.
    #[error(
        "the pool of {capacity} frames is exhausted: {wanted} more are needed, {used} are in use \
         and none could be evicted{}; drop guards, or open with a larger pool",
        .because.as_deref().map(|why| format!(" (writing back failed: {why})")).unwrap_or_default()
    )]
    Exhausted {
        /// The pool's size in frames.
        capacity: u64,
        /// Frames that were asked for.
        wanted: u32,
        /// Frames in use.
        used: u64,
        /// The last failed write-back, if that is what keeps pages in memory.
        because: Option<String>,
    },
    /// Guards hold more frames than the pool is to have, or their pages cannot be written back. The
    /// pool has the size that it had.
    #[error(
        "the pool cannot shrink to {}: {} are in use and could not be evicted{}; drop guards, or \
         choose a larger size",
        size(*capacity), size(*used),
        .because.as_deref().map(|why| format!(" (writing back failed: {why})")).unwrap_or_default()
    )]
    CannotShrink {
        /// The size that the caller asked for, in frames.
        capacity: u64,
        /// Frames in use.
        used: u64,
        /// The last failed write-back, if that is what keeps pages in memory.
        because: Option<String>,
    },
    /// The caller asked for a larger pool than it may become.
    #[error(
        "the pool can have {} at most: open it with a larger maximum (PoolOptions::max_bytes, \
         Options::max_pool_bytes)",
        size(*max)
    )]
    BeyondMaximum {
        /// The most frames that the pool can have.
        max: u64,
    },
    /// The page is larger than the pool.
    #[error(
        "a value, or another page, of {} does not fit the pool of {}: open with a pool of {} or \
         more",
        size(page.frames.into()), size(*capacity), size(page.frames.into())
    )]
    PageTooLarge {
        /// The requested page.
        page: PageRef,
        /// The pool's size in frames.
        capacity: u64,
    },
    /// The caller asked for a pool below the minimum.
    #[error("a pool of {frames} frames is below the minimum of {min}")]
    PoolTooSmall {
        /// The requested frames.
        frames: u64,
        /// The minimum, in frames.
        min: u64,
    },
    /// The caller asked for a pool larger than the memory that the process may use.
    #[error(
        "a pool of {} MiB is more than this process may use: {} has {} MiB; choose at most that",
        bytes.div_ceil(1 << 20), limit.source.display(), limit.bytes >> 20
    )]
    PoolTooLarge {
        /// The requested bytes.
        bytes: u64,
        /// The memory that the process may use, and the file with this limit.
        limit: MemoryLimit,
    },
    /// The pool could not find out how much memory there is.
    #[error("cannot find out how much memory there is: {0}; give the pool's size")]
    MemoryLimit(#[source] io::Error),
    /// The caller asked for a translation that this pool cannot have.
    #[error("the pool cannot translate pages that way: {0}")]
    NoTranslation(String),
    /// A pool that translates by table has more frames than state words can name.
    #[error(
        "a pool of {frames} frames cannot translate by table, which has room for {max}: translate \
         by the MMU, or open with a smaller pool"
    )]
    TooManySlots {
        /// The pool's size in frames.
        frames: u64,
        /// The most that a table has room for.
        max: u64,
    },
    /// The kernel does not take the memory of free slots from the process.
    #[error("the kernel does not take back the memory of the pool: is it locked (mlockall)?")]
    MemoryKept,
    /// The word that says in which slot of memory a page is names another page's slot, or none that
    /// there is: other code of this process has written to it, or the machine's memory is faulty.
    /// The pool has not used that slot. If it knows the right one, it has put the word right, and
    /// nothing is lost: the next attempt succeeds.
    #[error(
        "the state word of {page} names slot {slot}, which is not that of the page (the pool has \
         {slots} slots): the memory of this process is damaged; close the store, and check the \
         program and the machine's memory"
    )]
    DamagedWord {
        /// The page.
        page: PageRef,
        /// The slot that the word names; 0 for the page's place on the surface.
        slot: u64,
        /// The number of slots.
        slots: u64,
    },
    /// The kernel refused address space for the slots of a pool that translates by table.
    #[error(
        "the kernel has no addresses for the {slots} slots of the pool: {source}; translate by \
         the MMU, or open with a smaller pool"
    )]
    NoSlots {
        /// The number of slots.
        slots: u64,
        /// What the kernel said, and the limit that it names.
        source: SurfaceError,
    },
    /// There is no memory for the record of the pages in slots.
    #[error(
        "no memory for the record of {slots} slots (8 bytes for each): translate by the MMU, or \
         open with a smaller pool"
    )]
    NoSlotRecord {
        /// The number of slots.
        slots: u64,
    },
    /// A background thread could not be started.
    #[error("starting a background thread failed: {0}; ask for fewer, or raise the limit")]
    Thread(#[source] io::Error),
    /// An earlier write or sync failed; what the file holds is no longer known.
    #[error(
        "an earlier failure poisoned this handle: {0}; reads still work, changes are refused: \
         save what you need, close, and check the device"
    )]
    Poisoned(Arc<str>),
    /// The caller asked for a change of a file that is open read-only.
    #[error("the file is open read-only")]
    ReadOnly,
    /// The map of allocated pages contradicts the operation.
    #[error("the map of allocated pages is inconsistent: {0}")]
    Space(#[from] crate::space::SpaceError),
    /// The map of allocated pages calls a page free that is in use: the file is damaged.
    #[error("{0} is in use though it is not allocated: the file is damaged; dump it and reload it")]
    InUse(PageRef),
    /// The page in memory at this place has another size, or begins elsewhere.
    #[error("{0} is not a page of this size: the reference to it is stale or damaged")]
    WrongSize(PageRef),
    /// The kernel did not populate a page. Nothing was changed.
    #[error("the kernel cannot give {page} memory: {source}")]
    Populate {
        /// The page that needed memory.
        page: PageRef,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel did not release the memory of a page.
    #[error("releasing the memory of {page} failed: {source}")]
    Release {
        /// The range that was to be released.
        page: PageRef,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The kernel refused address space, or changes of page tables.
    #[error(transparent)]
    Surface(#[from] SurfaceError),
    /// The kernel refused address space for the page states.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
}

impl PoolError {
    /// Whether the caller asked for a size that the pool cannot have.
    pub fn is_bad_size(&self) -> bool {
        matches!(
            self,
            PoolError::PoolTooSmall { .. }
                | PoolError::PoolTooLarge { .. }
                | PoolError::BeyondMaximum { .. }
        )
    }

    /// Whether the format has put the write off: [`PageFormat::write_ahead`](crate::PageFormat)
    /// said "not now".
    pub(crate) fn is_put_off(&self) -> bool {
        matches!(self, PoolError::WriteAhead(said) if said.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Frames as bytes, rounded up.
fn size(frames: u64) -> String {
    match frames * 4 {
        kib @ ..1024 => format!("{kib} KiB"),
        kib => format!("{} MiB", kib.div_ceil(1024)),
    }
}
