//! How a pool is opened.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_vm::{BackendChoice, PAGE_SIZE, memory_limit};

use crate::error::PoolError;
use crate::huge::HugePages;
use crate::page::states::StatePlace;
use crate::replacement::ReplacementPolicy;

/// How much memory a pool may use for pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolSize {
    /// Half of what the other pools of the process leave of what it may use: the memory cgroup's
    /// limit, or the machine's memory. At least 16 MiB, however many pools there are, or half of
    /// the limit, if that is less.
    #[default]
    Auto,
    /// So many bytes, rounded down to whole frames of 4 KiB; at most what the process may use.
    Bytes(u64),
}

impl PoolSize {
    /// The size in frames of 4 KiB.
    ///
    /// # Errors
    /// [`PoolError::MemoryLimit`] with [`PoolSize::Auto`], if the limit cannot be read;
    /// [`PoolError::PoolTooLarge`] for more bytes than the process may use.
    pub fn frames(self) -> Result<u64, PoolError> {
        let bytes = match (self, memory_limit::effective()) {
            (PoolSize::Auto, limit) => share(limit.map_err(PoolError::MemoryLimit)?.bytes),
            (PoolSize::Bytes(bytes), Ok(limit)) if bytes > limit.bytes => {
                return Err(PoolError::PoolTooLarge { bytes, limit });
            }
            (PoolSize::Bytes(bytes), _) => bytes,
        };
        Ok(bytes / PAGE_SIZE as u64)
    }
}

/// The least that a pool gets by default, in bytes.
const LEAST: u64 = 16 << 20;

/// Bytes of the pools that are open in this process.
static TAKEN: AtomicU64 = AtomicU64::new(0);

/// The default size in bytes, where the process may use so many.
fn share(limit: u64) -> u64 {
    let left = limit.saturating_sub(TAKEN.load(Ordering::Relaxed));
    (left / 2).max(LEAST.min(limit / 2))
}

/// The memory of a pool that is open, of which others by default take none.
#[derive(Debug)]
pub(crate) struct Taken(u64);

impl Taken {
    pub(crate) fn frames(frames: u64) -> Taken {
        let bytes = frames * PAGE_SIZE as u64;
        TAKEN.fetch_add(bytes, Ordering::Relaxed);
        Taken(bytes)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// How a pool is opened. `PoolOptions::default()` suits most.
#[derive(Debug)]
pub struct PoolOptions {
    /// Memory for pages. What is resident never exceeds it. On top come the state words (8 bytes
    /// for each page of the file that was ever used), the kernel's page tables (as many), the
    /// resident set (12 bytes for each frame of the pool that was ever used, with S3-FIFO 26) and
    /// buffers for one batch of writes per evicting thread.
    pub size: PoolSize,
    /// Which way to populate and release pages. On exmap all frames of the pool, and one batch
    /// more, are taken from the machine at once and locked; that is only chosen by itself
    /// ([`BackendChoice::Auto`]) for a `size` in bytes.
    pub backend: BackendChoice,
    /// Threads that keep frames free ahead of need. With 0, a thread that needs a frame evicts.
    pub evictors: u64,
    /// Pages that are written, and released, together; at most a sixteenth of the pool. Of 16 to
    /// 1,024, 256 was the fastest out of memory, 64 about 5 % slower and 16 about 15 %.
    pub eviction_batch: usize,
    /// How long a fix waits for a frame while none is put back, in rounds of about a millisecond,
    /// before it fails with [`PoolError::Exhausted`](crate::PoolError::Exhausted).
    pub patience: u32,
    /// Which page leaves; `None` is [`Replacement::default`](crate::Replacement), and
    /// [`Replacement::policy`](crate::Replacement::policy) makes others.
    pub policy: Option<Box<dyn ReplacementPolicy>>,
    /// Whether pages that stay are put into huge pages, where random access costs less. One more
    /// thread does that; it takes 512 frames (2 MiB) of the pool for a moment, and none where so
    /// many are not free. The states of the file's first pages, up to a 64th of the pool's size,
    /// then come 2 MiB at a time. Only those do on exmap.
    pub huge_pages: HugePages,
    /// Where the state words of pages are.
    pub states: StatePlace,
    /// Refuse to allocate and to write.
    pub read_only: bool,
}

impl PoolOptions {
    /// The smallest pool, in frames: a split of a tree's node holds five pages.
    pub const MIN_FRAMES: u64 = 8;
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            size: PoolSize::Auto,
            backend: BackendChoice::Auto,
            evictors: 1,
            eviction_batch: 256,
            patience: 5_000,
            policy: None,
            huge_pages: HugePages::Auto,
            states: StatePlace::Pages,
            read_only: false,
        }
    }
}
