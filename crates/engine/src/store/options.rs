//! The options for opening a store: [`Options`].

use std::path::PathBuf;
use std::sync::Arc;

use vellum_log::LogDevice;
use vellum_pool::device::Direct;
use vellum_pool::{
    BackendChoice, PAGE_SIZE, PoolOptions, PoolSize, Replacement, StatePlace, Translation,
};

use crate::error::{Error, Result};
use crate::redo::progress::{RecoveryListener, RecoveryProgress};

/// The longest tree pages, in units of 4 KiB.
pub(crate) const PAGE_FRAMES_MAX: u32 = 16;

/// How to open or create a store. `Options::new()` suits most programs.
#[derive(Clone, Debug)]
pub struct Options {
    pub(crate) pool: PoolSize,
    pub(crate) max_pool_bytes: Option<u64>,
    /// `None`: the page size of the file, or 1 for a new store.
    pub(crate) page_frames: Option<u32>,
    pub(crate) read_only: bool,
    pub(crate) salvage: bool,
    pub(crate) backend: BackendChoice,
    pub(crate) direct: Direct,
    pub(crate) evictors: u64,
    pub(crate) replacement: Replacement,
    pub(crate) translation: Translation,
    pub(crate) states: StatePlace,
    /// Whether the store has a log from now on. `None`: a store in a file has one, because a folder
    /// next to the file can have the log.
    pub(crate) has_log: Option<bool>,
    /// The folder of the log, if it is not beside the store's file.
    pub(crate) log_folder: Option<PathBuf>,
    /// A log in another place than a folder.
    pub(crate) log: Option<Arc<dyn LogDevice>>,
    /// The most bytes that the log takes. A checkpoint is due when half of them follow the last
    /// one.
    pub(crate) log_bytes: u64,
    /// Whether a thread writes the checkpoints of a store with a log. Otherwise the change that
    /// finds one due does.
    pub(crate) cut_in_background: bool,
    /// How often such a thread waits for changes before it writes more pages, if that is chosen.
    pub(crate) cut_pauses: Option<u32>,
    pub(crate) on_recovery: RecoveryListener,
    /// A recovery has so many bytes of pages in memory at once, if that is chosen.
    pub(crate) recovery_bytes: Option<usize>,
    /// A recovery makes a clean file, even of a store that could go on with its log.
    #[cfg(feature = "testing")]
    pub(crate) recovers_to_file: bool,
    /// The store has no threads of its own.
    #[cfg(feature = "testing")]
    pub(crate) is_single_threaded: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            pool: PoolSize::Auto,
            page_frames: None,
            read_only: false,
            salvage: false,
            max_pool_bytes: None,
            backend: BackendChoice::Auto,
            direct: Direct::default(),
            evictors: 1,
            replacement: Replacement::default(),
            translation: Translation::default(),
            states: StatePlace::default(),
            has_log: None,
            log_folder: None,
            log: None,
            log_bytes: 1 << 30,
            cut_in_background: true,
            cut_pauses: None,
            on_recovery: RecoveryListener::default(),
            // Most pages do not fit in the memory of the recoveries of tests.
            recovery_bytes: cfg!(test).then_some(64 << 10),
            #[cfg(feature = "testing")]
            recovers_to_file: false,
            #[cfg(feature = "testing")]
            is_single_threaded: false,
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

    /// The largest size, in bytes, that [`Store::resize_pool`](crate::Store::resize_pool) may give
    /// the pool; the pool's first size by default. A larger maximum takes address space, and no
    /// memory before the pool grows.
    pub fn max_pool_bytes(mut self, bytes: u64) -> Options {
        self.max_pool_bytes = Some(bytes);
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

    /// How the pool finds the memory of tree pages: by the MMU, or by a table.
    pub fn translation(mut self, translation: Translation) -> Options {
        self.translation = translation;
        self
    }

    /// The place of the pages' state words: 8 bytes for each page of the file, or 8 bytes for each
    /// frame of the pool. The latter needs exmap and permission to see page tables.
    pub fn states(mut self, place: StatePlace) -> Options {
        self.states = place;
        self
    }

    /// Whether the store has a log while it is open; by default, a store in a file has one. Then a
    /// crash loses nothing that was synced: the next opening for writing recovers the store from
    /// its log, with this option or without. [`Store::sync`](crate::Store::sync) makes the log
    /// durable and not the store's file.
    ///
    /// Without a log single changes in memory are faster: of YCSB A's operations a log that none of
    /// them waits for leaves 0.55 to 0.61 (docs/benchmarks.md). But a crash after the first changed
    /// page was written leaves a file that opening refuses, until a sync or a close has made all
    /// changes durable: choose that for data that can be made again.
    ///
    /// The log lies in a folder beside the store's file, with the file's name and `.log` behind
    /// it, or in [`log_folder`](Options::log_folder). Closing the store removes it. A store that
    /// was not closed needs it: file and folder must be moved and copied together.
    ///
    /// A store on a block device has no log by default, because the folder beside it is on no disk:
    /// name one. A store that is opened read-only has none.
    pub fn log(mut self, yes: bool) -> Options {
        self.has_log = Some(yes);
        self
    }

    /// The folder of the store's log, which is created if it is not there and its parent is.
    /// Implies [`log`](Options::log). A store that has its log there and was not closed has to be
    /// opened with this option again. Each store needs a folder of its own.
    pub fn log_folder(mut self, folder: impl Into<PathBuf>) -> Options {
        self.log_folder = Some(folder.into());
        self.log(true)
    }

    /// The most bytes that the log takes: at least 1 MiB, or 5 MiB with tree pages of 64 KiB; by
    /// default 1 GiB. The files grow as they are needed. A thread begins a checkpoint when half of
    /// the bytes are used, and changes wait for it only if the log becomes full.
    ///
    /// After each checkpoint the first change of a page logs the whole page. So more bytes mean
    /// fewer checkpoints and less to log, but a longer recovery.
    pub fn log_bytes(mut self, bytes: u64) -> Options {
        self.log_bytes = bytes;
        self
    }

    /// A function that is told the progress of a recovery, should one be needed. It runs on the
    /// thread that opens the store, for every 256 KiB of the log that are read.
    pub fn on_recovery(
        mut self,
        listener: impl Fn(RecoveryProgress) + Send + Sync + 'static,
    ) -> Options {
        self.on_recovery = RecoveryListener::new(Arc::new(listener));
        self
    }

    /// Whether a recovery makes a clean file of a store that could go on with its log.
    pub(crate) fn recovers_to_file(&self) -> bool {
        #[cfg(feature = "testing")]
        if self.recovers_to_file {
            return true;
        }
        false
    }

    /// The most threads that redo pages in a recovery.
    pub(crate) fn recovery_threads(&self) -> usize {
        #[cfg(feature = "testing")]
        if self.is_single_threaded {
            return 1;
        }
        usize::MAX
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
            max_bytes: self.max_pool_bytes,
            replacement: self.replacement,
            translation: self.translation,
            slot_frames: page_frames,
            states: self.states,
            read_only: self.is_read_only(),
            ..PoolOptions::default()
        })
    }
}

/// What a simulation needs.
#[cfg(feature = "testing")]
impl Options {
    /// A log on a device of the caller's, of any size.
    pub fn log_device(mut self, device: Arc<dyn LogDevice>) -> Options {
        self.log = Some(device);
        self
    }

    /// Whether a thread writes the checkpoints, or the change that finds one due.
    pub fn cut_in_background(mut self, yes: bool) -> Options {
        self.cut_in_background = yes;
        self
    }

    /// The bytes of pages that a recovery has in memory at once.
    pub fn recovery_bytes(mut self, bytes: usize) -> Options {
        self.recovery_bytes = Some(bytes);
        self
    }

    /// Whether a recovery makes a clean file of a store that could go on with its log.
    pub fn recovers_to_clean_file(mut self, yes: bool) -> Options {
        self.recovers_to_file = yes;
        self
    }

    /// The store has no threads of its own, so that a program with one thread does the same each
    /// time.
    pub fn single_threaded(mut self) -> Options {
        self.is_single_threaded = true;
        self.evictors(0).cut_in_background(false)
    }
}

/// The smallest pool in frames: the minimum of the pool crate, counted in tree pages.
pub(crate) fn min_pool_frames(page_frames: u32) -> u64 {
    PoolOptions::MIN_FRAMES * u64::from(page_frames)
}
