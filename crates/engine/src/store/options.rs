//! How a store is opened: [`Options`].

use vellum_pool::device::Direct;
use vellum_pool::{BackendChoice, PAGE_SIZE, PoolOptions, PoolSize, Replacement, StatePlace};

use crate::error::{Error, Result};

/// The longest tree pages, in units of 4 KiB.
pub(crate) const PAGE_FRAMES_MAX: u32 = 16;

/// How a store is opened. `Options::new()` suits most.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) pool: PoolSize,
    /// None was asked for: what the file has, or 1.
    pub(crate) page_frames: Option<u32>,
    pub(crate) read_only: bool,
    pub(crate) salvage: bool,
    pub(crate) backend: BackendChoice,
    pub(crate) direct: Direct,
    pub(crate) evictors: u64,
    pub(crate) replacement: Replacement,
    pub(crate) states: StatePlace,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            pool: PoolSize::Auto,
            page_frames: None,
            read_only: false,
            salvage: false,
            backend: BackendChoice::Auto,
            direct: Direct::default(),
            evictors: 1,
            replacement: Replacement::default(),
            states: StatePlace::default(),
        }
    }
}

impl Options {
    /// A pool that follows the process' memory limit and the pools that are open in the process
    /// ([`pool_bytes`](Options::pool_bytes)), pages of 4 KiB, reading and writing.
    pub fn new() -> Options {
        Options::default()
    }

    /// Memory for pages, in bytes. What is resident never exceeds it. More than the memory that
    /// the process may use is refused when the store is opened.
    ///
    /// Without this call it is half of what the other open pools of the process leave of the
    /// memory that it may use, and at least 16 MiB: half of it for the first store, a quarter for
    /// the second. A program that opens several large stores should divide the memory itself.
    pub fn pool_bytes(mut self, bytes: u64) -> Options {
        self.pool = PoolSize::Bytes(bytes);
        self
    }

    /// Size of the tree pages of a store that is created, in units of 4 KiB, 1 to 16; 1 without
    /// this call. To open a store whose pages have another size is refused then.
    pub fn page_frames(mut self, frames: u32) -> Options {
        self.page_frames = Some(frames);
        self
    }

    /// Opens without the right to change anything. Several may do so at once.
    pub fn read_only(mut self, yes: bool) -> Options {
        self.read_only = yes;
        self
    }

    /// Opens what would be refused, a store that was not closed or has lost pages, to read what
    /// is left. Implies [`read_only`](Options::read_only). Ranges and cursors end
    /// with an error at a damaged page; [`Tree::salvage`](crate::Tree::salvage) goes round it.
    pub fn salvage(mut self, yes: bool) -> Options {
        self.salvage = yes;
        self
    }

    /// Which way to populate and release pages.
    pub fn backend(mut self, backend: BackendChoice) -> Options {
        self.backend = backend;
        self
    }

    /// Whether to go past the kernel's page cache.
    pub fn direct(mut self, direct: Direct) -> Options {
        self.direct = direct;
        self
    }

    /// Threads that keep frames free ahead of need.
    pub fn evictors(mut self, threads: u64) -> Options {
        self.evictors = threads;
        self
    }

    /// Which page leaves memory when another one comes.
    pub fn replacement(mut self, replacement: Replacement) -> Options {
        self.replacement = replacement;
        self
    }

    /// Where the state words of pages are: 8 bytes for each page of the file, or for each frame of
    /// the pool, which needs exmap and the right to see page tables.
    pub fn states(mut self, place: StatePlace) -> Options {
        self.states = place;
        self
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only || self.salvage
    }

    /// Options for a pool whose tree pages have `page_frames` frames.
    pub(crate) fn pool_options(&self, page_frames: u32) -> Result<PoolOptions> {
        let frames = self.pool.frames()?;
        let min = min_pool_frames(page_frames);
        if frames < min {
            let page = PAGE_SIZE as u64;
            let bytes = match self.pool {
                PoolSize::Bytes(bytes) => bytes,
                _ => frames * page,
            };
            return Err(Error::PoolTooSmall { bytes, min: min * page });
        }
        Ok(PoolOptions {
            size: self.pool,
            backend: self.backend,
            evictors: self.evictors,
            policy: Some(self.replacement.policy(frames)),
            states: self.states,
            read_only: self.is_read_only(),
            ..PoolOptions::default()
        })
    }
}

/// The smallest pool: the pool's own minimum, in tree pages.
pub(crate) fn min_pool_frames(page_frames: u32) -> u64 {
    PoolOptions::MIN_FRAMES * u64::from(page_frames)
}
