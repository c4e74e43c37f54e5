//! Mapped files whose page faults, cache and write-back are the program's own.
//!
//! `mmap` makes hits free, and leaves everything else to the kernel: one page cache for the whole
//! machine, its policy, its read-ahead, its write-back. Aquila (Papagiannis et al., "Memory-Mapped
//! I/O on Steroids", EuroSys '21) keeps the loads and stores, and has a library in the program
//! handle the faults. A [`Cache`] has a budget, a replacement policy and statistics of its own; a
//! [`Mapping`] is a part of a file in memory, to which the program can say what it will need, what
//! it no longer needs, and what must be durable.
//!
//! ```
//! use vellum_aquila::{Access, Advice, Cache, PAGE_SIZE};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("data");
//! # std::fs::write(&path, vec![1; 100 * PAGE_SIZE])?;
//! let cache = Cache::new(256 << 10)?; // 64 pages
//! let file = std::fs::OpenOptions::new().read(true).write(true).open(&path)?;
//! let mapping = cache.map(&file, .., Access::ReadWrite)?;
//!
//! // Plain loads and stores: a page that is not in the cache is read when it is accessed.
//! let bytes = mapping.as_ptr();
//! let mut sum = 0;
//! for page in 0..100 {
//!     // SAFETY: the byte is within the mapping, and no other thread changes it.
//!     sum += unsafe { u64::from(bytes.add(page * PAGE_SIZE).read()) };
//! }
//! assert_eq!(sum, 100);
//! // SAFETY: as above.
//! unsafe { bytes.write(7) };
//!
//! mapping.advise(Advice::Random)?; // a fault reads one page from now on
//! mapping.prefetch(..8 * PAGE_SIZE)?; // these will be needed
//! mapping.evict(50 * PAGE_SIZE..)?; // these will not
//! mapping.sync()?; // the store is durable
//! assert_eq!(std::fs::read(&path)?[0], 7);
//!
//! if let Some(statistics) = cache.statistics() {
//!     assert!(statistics.misses > 0 && statistics.dirty == 0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! There are two backends, and [`doctor`] says which work here. *Userfaultfd* handles faults in a
//! handler of SIGBUS on the faulting thread; it needs Linux 5.14 and no privilege. Or threads of
//! the cache handle them ([`Faults::Monitor`]): then system calls can use mappings. *Kernel* is
//! `mmap` with `madvise`: it works everywhere, and has no budget and no policy. [`Cache::new`]
//! takes the best one that works, and [`Cache::why_not_better`] says why it is not another.
//!
//! What a program must know of the backend userfaultfd:
//!
//! - A system call that is given an address of a mapping fails with `EFAULT` unless the page is
//!   mapped: make the cache with [`Faults::Monitor`], pin the range first ([`Mapping::pin`]), or
//!   use [`Mapping::read_at`] and [`Mapping::write_at`].
//! - A kill may lose any change that was not synced. The file may then have some newer pages and
//!   some older ones.
//! - A forked child does not have the mappings.
//! - Without a monitor, a program that handles SIGBUS itself installs its handler before it makes
//!   the first cache. A thread that faults must not block SIGBUS. It needs 32 KiB of its stack. A
//!   handler of another signal that accesses mappings on an alternate stack (`sigaltstack`) needs
//!   one of 48 KiB, or the process ends with a message.

mod anonymous;
mod cache;
mod descriptor;
mod dirty_room;
mod doctor;
mod error;
mod fault;
mod generation;
mod host;
mod kernel;
mod live_counters;
mod mapped_places;
mod mapping;
mod monitor;
mod probe;
mod shared;
mod signal;
mod sys;
mod write_requests;
mod writers;

pub use cache::{Backend, BackendChoice, Cache, Options};
pub use doctor::{Check, doctor};
pub use error::{Error, Result};
pub use live_counters::{LiveCache, live_caches};
pub use mapping::{Access, Mapping, Pin};
pub use probe::{DirtyTracking, Faults, Frames};
pub use rustix::io::Errno;
pub use shared::PolicyChoice;
pub use vellum_aquila_core::{Advice, Evictor, Frame, Key, Policy, Statistics};

/// Bytes of a page.
pub const PAGE_SIZE: usize = 4096;
