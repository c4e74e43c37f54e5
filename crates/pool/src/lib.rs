//! A buffer manager that lets the MMU translate page identifiers.
//!
//! This is vmcache (Leis et al., "Virtual-Memory Assisted Buffer Management", SIGMOD'23, section 3)
//! as a library. A page's identifier is its position in the file *and* on a surface of virtual
//! memory, so a hit costs one look at the page's state word and nothing else: no hash table, no
//! pointers to swizzle, and pages may refer to each other in any way, cycles too. Which pages are
//! in memory is the pool's decision alone; it never has more of them than it was told.
//!
//! ```
//! use std::sync::Arc;
//! use vellum_pool::{Pool, PoolOptions, PoolSize, RawPages, Space, device::MemoryDevice};
//!
//! let device = Arc::new(MemoryDevice::new());
//! let options = PoolOptions { size: PoolSize::Bytes(1 << 20), ..PoolOptions::default() };
//! let pool = Pool::open(device, Arc::new(RawPages), Space::new(0), options)?;
//!
//! let mut page = pool.allocate(1)?; // exclusive, zeroed
//! page[..5].copy_from_slice(b"hello");
//! let place = page.page();
//! drop(page); // unlocked, dirty
//!
//! assert_eq!(&pool.fix_shared(place)?[..5], b"hello");
//! pool.sync()?;
//! # Ok::<(), vellum_pool::PoolError>(())
//! ```

mod at_exit;
mod core;
pub mod device;
mod error;
mod eviction;
mod huge;
mod page;
mod pool;
mod replacement;
mod residence;
mod space;
mod statistics;
mod sync;

pub use at_exit::{after_fork, at_exit};
pub use error::{PoolError, Restart};
pub use huge::{HugePageStats, HugePages};
pub use page::bytes::{PageReader, RacyBytes};
pub use page::format::{PageDamage, PageFormat, RawPages};
pub use page::states::StatePlace;
pub use page::{PageId, PageRef};
pub use pool::Pool;
pub use pool::fix_async::{FixExclusive, FixShared};
pub use pool::guard::{ExclusiveGuard, OptimisticGuard, SharedGuard};
pub use pool::load::{Begun, PendingRead};
pub use pool::options::{PoolOptions, PoolSize};
pub use replacement::{
    Chance, Clock, Replacement, ReplacementPolicy, ResidentSet, Residents, S3Fifo,
};
pub use space::{Space, SpaceError};
pub use statistics::PoolStats;
pub use statistics::histogram::Latency;
pub use vellum_vm::{BackendChoice, BackendKind, PAGE_SIZE, PageRange, Residency};
