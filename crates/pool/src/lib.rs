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

mod allocation;
mod bytes;
mod core;
mod counters;
pub mod device;
mod error;
mod eviction;
mod fix_async;
mod format;
mod frame_budget;
mod guard;
mod histogram;
mod load;
mod options;
mod page;
mod page_state;
mod parking;
mod pool;
mod replacement;
mod space;
mod state_array;
mod stats;
mod sync;
mod write_back;

pub use bytes::{PageReader, RacyBytes};
pub use error::{PoolError, Restart};
pub use fix_async::{FixExclusive, FixShared};
pub use format::{PageDamage, PageFormat, RawPages};
pub use guard::{ExclusiveGuard, OptimisticGuard, SharedGuard};
pub use histogram::Latency;
pub use options::{PoolOptions, PoolSize};
pub use page::{PageId, PageRef};
pub use pool::Pool;
pub use replacement::{Chance, Clock, ReplacementPolicy, ResidentSet, Residents};
pub use space::{Space, SpaceError};
pub use stats::PoolStats;
pub use vellum_vm::{BackendChoice, BackendKind, PAGE_SIZE, PageRange, Residency};
