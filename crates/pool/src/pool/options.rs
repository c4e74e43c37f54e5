//! The options of a pool: [`PoolOptions`], [`PoolSize`].

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_vm::{BackendChoice, BackendKind, PAGE_SIZE, memory_limit};

use crate::error::PoolError;
use crate::huge::HugePages;
use crate::page::states::StatePlace;
use crate::replacement::{Replacement, ReplacementPolicy};
use crate::slots::UseSlots;

/// How much memory a pool may use for pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolSize {
    /// Half of the memory that the process may use and that its other pools leave: the memory
    /// cgroup's limit, or the machine's memory. At least 16 MiB, however many pools there are, or
    /// half of the limit if that is less.
    #[default]
    Auto,
    /// This many bytes, rounded down to whole frames of 4 KiB; at most what the process may use.
    Bytes(u64),
}

impl PoolSize {
    /// The size in frames of 4 KiB.
    ///
    /// # Errors
    /// [`PoolError::MemoryLimit`] with [`PoolSize::Auto`], if the limit cannot be read;
    /// [`PoolError::PoolTooLarge`] for more bytes than the process may use.
    pub fn frames(self) -> Result<u64, PoolError> {
        let bytes = match self {
            PoolSize::Auto => {
                let limit = memory_limit::effective().map_err(PoolError::MemoryLimit)?;
                default_bytes(limit.bytes)
            }
            PoolSize::Bytes(bytes) if bytes <= TINY => bytes,
            PoolSize::Bytes(bytes) => match memory_limit::effective() {
                Ok(limit) if bytes > limit.bytes => {
                    return Err(PoolError::PoolTooLarge { bytes, limit });
                }
                _ => bytes,
            },
        };
        Ok(bytes / PAGE_SIZE as u64)
    }
}

/// No process that runs has a limit of fewer bytes, so a pool of this size need not ask for the
/// limit: that means reading a dozen files, which takes longer than the opening of a small store.
const TINY: u64 = 1 << 20;

/// The smallest default size, in bytes.
const DEFAULT_MIN: u64 = 16 << 20;

/// Bytes of the pools that are open in this process.
static OPEN_BYTES: AtomicU64 = AtomicU64::new(0);

/// The default size in bytes of a process that may use `limit` bytes.
fn default_bytes(limit: u64) -> u64 {
    let left = limit.saturating_sub(OPEN_BYTES.load(Ordering::Relaxed));
    (left / 2).max(DEFAULT_MIN.min(limit / 2))
}

/// Counts the bytes of an open pool, so that the default size of other pools leaves them out.
#[derive(Debug)]
pub(crate) struct CountedBytes(u64);

impl CountedBytes {
    pub(crate) fn of_frames(frames: u64) -> CountedBytes {
        let bytes = frames * PAGE_SIZE as u64;
        OPEN_BYTES.fetch_add(bytes, Ordering::Relaxed);
        CountedBytes(bytes)
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        OPEN_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// How a pool finds the memory of a page (docs/translation.md).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Translation {
    /// By the MMU while the file is at most fifteen sixteenths as long as the pool, and by a table
    /// from then on. The environment variable `VELLUM_TRANSLATION` overrides this with `mmu` or
    /// `table`. By the MMU on exmap and with [`StatePlace::Frames`], whatever the variable says.
    #[default]
    Auto,
    /// By the MMU (vmcache; SIGMOD'23, section 3): a page's place on a surface as long as the file
    /// is its number. So the address of a page does not depend on its state word. Pages of all
    /// lengths are contiguous. A page that is faulted in or evicted takes the kernel's time.
    Mmu,
    /// By a table (Calico, arXiv 2604.00423): the pool's memory stays mapped, in huge pages where
    /// the kernel has them, and the state word of a page says in which slot of it the page is. So
    /// the kernel takes no part in a miss but the read. The address depends on the word. Pages of
    /// other lengths than [`slot_frames`](PoolOptions::slot_frames) are found by the MMU.
    ///
    /// Not on exmap, and not with [`StatePlace::Frames`].
    Table,
}

/// Says what [`Translation::Auto`] means.
const TRANSLATION_VARIABLE: &str = "VELLUM_TRANSLATION";

impl Translation {
    /// `auto`, `mmu` or `table`.
    pub fn name(self) -> &'static str {
        match self {
            Translation::Auto => "auto",
            Translation::Mmu => "mmu",
            Translation::Table => "table",
        }
    }

    /// The translation of this [`name`](Translation::name).
    pub fn named(name: &str) -> Option<Translation> {
        [Translation::Auto, Translation::Mmu, Translation::Table]
            .into_iter()
            .find(|translation| translation.name() == name)
    }

    /// When pages lie in slots.
    ///
    /// # Errors
    /// [`PoolError::NoTranslation`] for a table that the pool cannot have, and for a value of the
    /// environment variable that means nothing.
    pub(crate) fn use_slots(
        self,
        backend: BackendChoice,
        states: StatePlace,
    ) -> Result<Option<UseSlots>, PoolError> {
        let fits =
            states == StatePlace::Pages && backend != BackendChoice::Only(BackendKind::Exmap);
        match self {
            Translation::Mmu => Ok(None),
            Translation::Table if fits => Ok(Some(UseSlots::Always)),
            Translation::Table => {
                let what = "a table has ordinary memory, and the state of each page; not an exmap, \
                            nor states with the frames";
                Err(PoolError::NoTranslation(what.to_owned()))
            }
            Translation::Auto => Ok(match Translation::in_environment()? {
                Translation::Mmu => None,
                Translation::Table => fits.then_some(UseSlots::Always),
                Translation::Auto => fits.then_some(UseSlots::WhenOutgrown),
            }),
        }
    }

    /// What the environment variable says; `Auto` without one.
    fn in_environment() -> Result<Translation, PoolError> {
        let Some(value) = std::env::var_os(TRANSLATION_VARIABLE) else {
            return Ok(Translation::Auto);
        };
        let named = value.to_str().and_then(Translation::named);
        named.filter(|translation| *translation != Translation::Auto).ok_or_else(|| {
            let value = value.display();
            let what = format!("{TRANSLATION_VARIABLE} is {value}, not `mmu` or `table`");
            PoolError::NoTranslation(what)
        })
    }
}

/// The options of a pool. `PoolOptions::default()` suits most programs.
#[derive(Debug)]
pub struct PoolOptions {
    /// Memory for pages. Resident pages never exceed it. The pool takes more memory for the state
    /// words (8 bytes for each page of the file that was ever used, in groups of 512, which go back
    /// when all of their pages are evicted), the kernel's page tables (as much again), the record
    /// of the pages in slots (8 bytes for each slot that was ever used), the resident set (12 bytes
    /// for each frame that a page in no slot ever used, with S3-FIFO 26 for each frame that was
    /// ever used) and buffers for one batch of writes per evicting thread.
    pub size: PoolSize,
    /// The largest size, in bytes, that [`Pool::resize`](crate::Pool::resize) may give the pool;
    /// `size` by default, and no more than the process may use. A larger maximum takes address
    /// space, and bits of the version in each state word. It does not count as memory of the pool.
    /// The policies have room for the largest size. Clock's hand jumps over what is empty, and
    /// S3-FIFO divides the largest size.
    pub max_bytes: Option<u64>,
    /// How the pool populates and releases pages. On exmap the pool takes all its frames, and one
    /// batch more, from the machine at once, and they stay locked. [`BackendChoice::Auto`] chooses
    /// exmap only for a `size` in bytes.
    pub backend: BackendChoice,
    /// Background threads that keep frames free: they evict dirty pages, and those that lie in no
    /// slot. A thread that misses evicts clean pages in slots itself. With 0, a thread that needs a
    /// frame evicts a batch.
    pub evictors: u64,
    /// Pages that the evictor writes, and releases, together; at most a sixteenth of the pool. Out
    /// of memory 256 was the fastest of 16 to 1,024; 64 was about 5 % slower, 16 about 15 %.
    pub eviction_batch: usize,
    /// How long a fix waits while no frame comes back, in rounds of about a millisecond, before it
    /// fails with [`PoolError::Exhausted`](crate::PoolError::Exhausted).
    pub patience: u32,
    /// The policy that chooses the pages to evict, of those that the pool has.
    pub replacement: Replacement,
    /// A policy of the caller's, which is used instead. It has room for the largest pool.
    pub policy: Option<Box<dyn ReplacementPolicy>>,
    /// Whether the pool collapses pages that stay resident into huge pages, which makes random
    /// access cheaper. One more thread does that. It takes 512 free frames (2 MiB) of the pool for
    /// a moment, and skips its turn if fewer are free. The states of the file's first pages, up to
    /// a 64th of the pool's size, are populated 2 MiB at a time. On exmap only the states are.
    /// Slots are in huge pages from the beginning, also without background threads.
    pub huge_pages: HugePages,
    /// How the pool finds a page's memory.
    pub translation: Translation,
    /// The length, in frames, of the pages that lie in slots if the pool translates by table: that
    /// of most pages.
    pub slot_frames: u32,
    /// Where the state words of pages are.
    pub states: StatePlace,
    /// Refuse to allocate and to write.
    pub read_only: bool,
}

impl PoolOptions {
    /// The smallest pool, in frames: a split of a tree's node holds five pages.
    pub const MIN_FRAMES: u64 = 8;

    /// The most frames that a pool of `frames` frames may have: no more than the process may use.
    pub(crate) fn max_frames(&self, frames: u64) -> u64 {
        let Some(max_bytes) = self.max_bytes else { return frames };
        let usable = memory_limit::effective().map_or(u64::MAX, |limit| limit.bytes);
        frames.max(max_bytes.min(usable) / PAGE_SIZE as u64)
    }
}

impl Default for PoolOptions {
    fn default() -> PoolOptions {
        PoolOptions {
            size: PoolSize::Auto,
            max_bytes: None,
            backend: BackendChoice::Auto,
            evictors: 1,
            eviction_batch: 256,
            patience: 5_000,
            replacement: Replacement::default(),
            policy: None,
            huge_pages: HugePages::Auto,
            translation: Translation::Auto,
            slot_frames: 1,
            states: StatePlace::Pages,
            read_only: false,
        }
    }
}
