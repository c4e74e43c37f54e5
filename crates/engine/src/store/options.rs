//! The options for opening a store: [`Options`].

use std::sync::Arc;

use vellum_log::LogDevice;
use vellum_pool::device::Direct;
use vellum_pool::{BackendChoice, PAGE_SIZE, PoolOptions, PoolSize, Replacement, StatePlace};

use crate::error::{Error, Result};

/// The longest tree pages, in units of 4 KiB.
pub(crate) const PAGE_FRAMES_MAX: u32 = 16;

/// How to open or create a store. `Options::new()` suits most programs.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) pool: PoolSize,
    /// `None`: the page size of the file, or 1 for a new store.
    pub(crate) page_frames: Option<u32>,
    pub(crate) read_only: bool,
    pub(crate) salvage: bool,
    pub(crate) backend: BackendChoice,
    pub(crate) direct: Direct,
    pub(crate) evictors: u64,
    pub(crate) replacement: Replacement,
    pub(crate) states: StatePlace,
    /// The place of the store's log. Not public yet: values with pages of their own and bulk loads
    /// are not in the log.
    pub(crate) log: Option<Arc<dyn LogDevice>>,
    /// A checkpoint is due when the log has so many bytes after the last one.
    pub(crate) log_bytes: u64,
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
            log: None,
            log_bytes: 64 << 20,
        }
    }
}

impl Options {
    /// The defaults: pages of 4 KiB, open for reading and writing, and a pool whose size depends on
    /// the memory limit of the process and on its other open pools
    /// ([`pool_bytes`](Options::pool_bytes)).
    pub fn new() -> Options {
        Options::default()
    }

    /// Memory for pages, in bytes. Resident pages never take more. Opening the store refuses a pool
    /// that is larger than the memory that the process may use.
    ///
    /// By default, the pool takes half of the memory that the process may use and that its other
    /// open pools leave: half of it for the first store, a quarter for the second. The default is
    /// at least 16 MiB. A program that opens several large stores should divide the memory itself.
    pub fn pool_bytes(mut self, bytes: u64) -> Options {
        self.pool = PoolSize::Bytes(bytes);
        self
    }

    /// Size of the tree pages of a new store, in units of 4 KiB, from 1 to 16; the default is 1. If
    /// this is set, opening refuses a store whose pages have another size.
    pub fn page_frames(mut self, frames: u32) -> Options {
        self.page_frames = Some(frames);
        self
    }

    /// Opens the store read-only. Several processes may do so at the same time.
    pub fn read_only(mut self, yes: bool) -> Options {
        self.read_only = yes;
        self
    }

    /// Opens a store that would be refused because it was not closed or has lost pages, to read the
    /// entries that are left. Implies [`read_only`](Options::read_only). Ranges and cursors end
    /// with an error at a damaged page; [`Tree::salvage`](crate::Tree::salvage) skips it.
    pub fn salvage(mut self, yes: bool) -> Options {
        self.salvage = yes;
        self
    }

    /// The backend that populates and releases pages.
    pub fn backend(mut self, backend: BackendChoice) -> Options {
        self.backend = backend;
        self
    }

    /// Whether to bypass the kernel's page cache.
    pub fn direct(mut self, direct: Direct) -> Options {
        self.direct = direct;
        self
    }

    /// The number of threads that evict pages in the background to keep frames free.
    pub fn evictors(mut self, threads: u64) -> Options {
        self.evictors = threads;
        self
    }

    /// The replacement policy, which chooses the pages to evict.
    pub fn replacement(mut self, replacement: Replacement) -> Options {
        self.replacement = replacement;
        self
    }

    /// The place of the pages' state words: 8 bytes for each page of the file, or 8 bytes for each
    /// frame of the pool. The latter needs exmap and permission to see page tables.
    pub fn states(mut self, place: StatePlace) -> Options {
        self.states = place;
        self
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only || self.salvage
    }

    /// The options of a pool for tree pages of `page_frames` frames.
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

/// The smallest pool in frames: the minimum of the pool crate, counted in tree pages.
pub(crate) fn min_pool_frames(page_frames: u32) -> u64 {
    PoolOptions::MIN_FRAMES * u64::from(page_frames)
}
