//! A buffer manager that lets the MMU translate page identifiers.
//!
//! This is vmcache (Leis et al., "Virtual-Memory Assisted Buffer Management", SIGMOD'23, section 3)
//! as a library. A page's identifier is its position in the file *and* on a surface of virtual
//! memory. So a hit reads the page's state word and nothing else: no hash table, no pointers to
//! swizzle, and pages may refer to each other in any way, cycles too. The pool alone decides which
//! pages are in memory, and never keeps more of them than its size. When the file has outgrown the
//! pool, the state word says where the page is instead ([`Translation`]), and misses are cheaper.
//!
//! It is for stores whose pages refer to one another and outgrow memory. Here a pool of 1 MiB keeps
//! 4 MiB of pages, which it writes back and faults in again as needed:
//!
//! ```
//! use std::sync::Arc;
//! use vellum_pool::{Pool, PoolOptions, PoolSize, RawPages, Space, device::MemoryDevice};
//!
//! let device = Arc::new(MemoryDevice::new());
//! let options = PoolOptions { size: PoolSize::Bytes(1 << 20), ..PoolOptions::default() };
//! let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options)?;
//!
//! let mut places = Vec::new();
//! for number in 0..1024_u32 {
//!     let mut page = pool.allocate(1)?; // exclusive, zeroed
//!     page[..4].copy_from_slice(&number.to_le_bytes());
//!     places.push(page.page());
//! } // unlocked, dirty: an evictor may write it back and take its memory
//!
//! for (place, number) in places.iter().zip(0..1024_u32) {
//!     let page = pool.fix_shared(*place)?; // a hit, or a read from the device
//!     assert_eq!(page[..4], number.to_le_bytes());
//! }
//! assert!(pool.stats().resident_frames <= 256);
//! pool.sync()?; // all changes are on the device
//! # Ok::<(), vellum_pool::PoolError>(())
//! ```
//!
//! Where to go next: [`Pool`] has the operations, [`OptimisticGuard`] the reads without a lock,
//! [`PoolOptions`] the options. A [`PageFormat`] checks pages after a read and seals them before a
//! write; a [`Device`](device::Device) stores them. The README of the crate has the rules for
//! locks.

mod at_exit;
mod core;
pub mod device;
mod error;
mod eviction;
mod free_extents;
mod huge;
mod page;
mod pool;
mod replacement;
mod residence;
mod scattered_lines;
mod slot_owners;
mod slots;
mod space;
mod statistics;
mod sync;

pub use at_exit::{after_fork, at_exit};
pub use error::{PoolError, Restart};
pub use huge::{HugePageStats, HugePages};
pub use page::bytes::{PageReader, RacyBytes};
pub use page::format::{PageDamage, PageFormat, RawPages};
#[cfg(feature = "model")]
#[doc(hidden)]
pub use page::state::VERSIONS_START_AFRESH;
pub use page::states::StatePlace;
#[cfg(feature = "model")]
#[doc(hidden)]
pub use page::states::WORDS_START_AFRESH;
pub use page::{PageId, PageRef};
pub use pool::Pool;
pub use pool::copies::PageCopy;
pub use pool::fix::{ExclusiveGuard, OptimisticGuard, SharedGuard, prefetch_value};
pub use pool::fix_async::{FixExclusive, FixShared};
pub use pool::load::{FixOutcome, PendingRead};
pub use pool::options::{PoolOptions, PoolSize, Translation};
pub use replacement::{
    Arrival, Clock, MarkOutcome, Replacement, ReplacementPolicy, ResidentSet, Residents, S3Fifo,
};
pub use space::{Space, SpaceError, SpaceSnapshot};
pub use statistics::PoolStats;
pub use statistics::histogram::Latency;
pub use vellum_vm::{BackendChoice, BackendKind, PAGE_SIZE, PageRange, Residency};
