//! The pages of a store, and the right to change them: what trees work on.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageId, PageRef, Pool};

use crate::error::{Error, Result};
use crate::node::NodeLimits;
use crate::page::blob::BLOB_REST;
use crate::store::aside::Aside;
use crate::store::file::StoreFile;
use crate::store::gate::{Alone, Gate, Hold, Passage};
use crate::store::header::Header;
use crate::store::options::min_pool_frames;
use crate::store::within::{Within, refuse_within};

/// Below so many tree pages, a pool is too small for two changes of structure at a time.
const SMALL_POOL_PAGES: u64 = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct PageStore {
    pub pool: Pool,
    pub device: Arc<dyn Device>,
    /// Length of tree pages in units of 4 KiB. All pages but headers are multiples of it.
    pub page_frames: u32,
    pub limits: NodeLimits,
    /// Greatest length of a value in bytes.
    pub max_blob: u64,
    pub gate: Gate,
    /// Pages that are allocated though no tree has them.
    pub aside: Aside,
    /// Shared with the pool's format.
    pub file: Arc<StoreFile>,
    /// There were changes since the last cut.
    pub changed: AtomicBool,
    /// The process that opened it.
    process: u32,
    small_pool: Option<Mutex<()>>,
}

/// The right to change pages of a store.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    _passage: Option<Passage<'a>>,
    pages: &'a PageStore,
    /// It is a destructor's change, which the panic does not unwind.
    began_in_panic: bool,
    in_callers_code: Cell<bool>,
}

impl Change<'_> {
    /// Runs the caller's own code. It sees copies, or a page that nothing refers to yet, and that
    /// is freed if it panics: so its panics cut nothing.
    pub(crate) fn callers_code<T>(&self, run: impl FnOnce() -> T) -> T {
        self.in_callers_code.set(true);
        let within = Within::of(&self.pages.gate);
        let result = run();
        drop(within);
        self.in_callers_code.set(false);
        result
    }
}

impl Drop for Change<'_> {
    /// A change that a panic unwound may have changed one of two pages that belong together.
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.began_in_panic && !self.in_callers_code.get() {
            self.pages.file.poison_for("a panic ended a change in its midst");
        }
    }
}

/// A value that is being read: its pages stay, whatever becomes of its key.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    pages: &'a PageStore,
    first: PageId,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        if self.pages.aside.unpin(self.first) {
            self.pages.try_free_ended();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PageStore {
    pub(crate) fn new(
        pool: Pool,
        device: Arc<dyn Device>,
        file: Arc<StoreFile>,
        salvage: bool,
    ) -> PageStore {
        let header = file.header();
        let page_frames = header.page_frames;
        let capacity = pool.capacity();
        // Whole tree pages, so that every page of the file is a multiple of them.
        let blob_frames = (capacity / 4).min(u64::from(PageRef::MAX_FRAMES));
        let blob_frames = blob_frames / u64::from(page_frames) * u64::from(page_frames);
        let small = capacity < min_pool_frames(page_frames) / 8 * SMALL_POOL_PAGES;
        PageStore {
            page_frames,
            limits: NodeLimits::for_page_size(page_frames as usize * PAGE_SIZE),
            max_blob: blob_frames * PAGE_SIZE as u64 - BLOB_REST as u64,
            gate: Gate::default(),
            aside: Aside::default(),
            changed: AtomicBool::new(!header.clean && !salvage),
            process: std::process::id(),
            file,
            pool,
            device,
            small_pool: small.then(Mutex::default),
        }
    }

    /// Frames of the page for a value of `len` bytes: whole tree pages.
    pub(crate) fn blob_frames(&self, len: u64) -> u32 {
        let frames = (len + BLOB_REST as u64).div_ceil(PAGE_SIZE as u64);
        frames.next_multiple_of(u64::from(self.page_frames)) as u32
    }

    /// In a small pool changes of structure take turns, so that together they do not hold it all.
    pub(crate) fn structure_lock(&self) -> Option<MutexGuard<'_, ()>> {
        self.small_pool.as_ref().map(lock)
    }

    pub(crate) fn header(&self) -> Header {
        self.file.header()
    }

    /// Keeps the pages of the value that begins with this page. The leaf that refers to it is held.
    pub(crate) fn pin(&self, first: PageId) -> Pin<'_> {
        self.aside.pin(first);
        Pin { pages: self, first }
    }

    /// The store has something that only this version of the format knows.
    pub(crate) fn need_version(&self, _change: &Change<'_>, version: u32) {
        self.file.update(|header| header.version = header.version.max(version));
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.file.is_closed() {
            false => Ok(()),
            true => Err(Error::Closed),
        }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        self.pool.check_writable()?;
        self.file.check_poison()
    }

    /// Begins a change. Waits while a snapshot lives.
    #[inline]
    pub(crate) fn change(&self) -> Result<Change<'_>> {
        refuse_within(&self.gate)?;
        let passage = self.gate.pass();
        // Inside the gate: the store may have been closed while this waited.
        self.check_writable()?;
        Ok(self.begin(Some(passage)))
    }

    /// The right to change, for the one who has the store alone.
    pub(crate) fn change_alone<'a>(&'a self, _alone: &'a Alone<'_>) -> Result<Change<'a>> {
        self.check_writable()?;
        Ok(self.begin(None))
    }

    #[inline]
    fn begin<'a>(&'a self, passage: Option<Passage<'a>>) -> Change<'a> {
        // A cut clears it while no change is under way.
        if !self.changed.load(Ordering::Relaxed) {
            self.changed.store(true, Ordering::Relaxed);
        }
        Change {
            _passage: passage,
            pages: self,
            began_in_panic: std::thread::panicking(),
            in_callers_code: Cell::new(false),
        }
    }

    /// No change is under way while the result lives.
    pub(crate) fn hold(&self) -> Result<Hold<'_>> {
        refuse_within(&self.gate)?;
        Ok(self.gate.hold())
    }

    /// Neither changes nor snapshots nor checkpoints are there while the result lives.
    pub(crate) fn alone(&self) -> Result<Alone<'_>> {
        refuse_within(&self.gate)?;
        Ok(self.gate.alone())
    }

    /// The child of a `fork` has neither the memory of the pool nor its threads.
    pub(crate) fn check_process(&self) -> Result<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(Error::InUse(format!(
                "process {} opened the store: after fork, let that one use it",
                self.process
            ))),
        }
    }

    /// There were changes that no checkpoint covers.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed.load(Ordering::Acquire) || self.file.is_in_use()
    }
}
