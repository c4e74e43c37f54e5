//! What all handles of a store share, and the two states of its file: clean and in use.
//!
//! A [`Change`] is the right to change pages. The first one after a checkpoint writes a header
//! that says "in use" and makes it durable before it returns, so that a file whose pages do not
//! fit together is never taken for a clean one. [`StoreCore::checkpoint`] goes back: all pages,
//! then the free map, then durably a clean header.

use std::cell::Cell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageRef, Pool, PoolError};

use crate::error::{Error, Result};
use crate::node::NodeLimits;
use crate::page::blob::BLOB_REST;
use crate::store::aside::Aside;
use crate::store::at_exit;
use crate::store::free_map;
use crate::store::gate::{Alone, Gate, Hold, Passage};
use crate::store::header::{Header, NEXT_TREE_MAX};
use crate::store::options::min_pool_frames;
use crate::tree::TreeState;

/// Below so many tree pages, a pool is too small for two changes of structure at a time.
const SMALL_POOL_PAGES: u64 = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct StoreCore {
    pub pool: Pool,
    pub device: Arc<dyn Device>,
    /// Length of tree pages in units of 4 KiB. All pages but headers are multiples of it.
    pub page_frames: u32,
    pub limits: NodeLimits,
    /// Greatest length of a value in bytes.
    pub max_blob: u64,
    pub salvage: bool,
    pub catalog: Arc<TreeState>,
    /// The trees that have handles, or had some lately.
    open_trees: Mutex<OpenTrees>,
    pub gate: Gate,
    /// Pages that are allocated though no tree has them.
    pub aside: Aside,
    file: Mutex<FileState>,
    /// Held during a checkpoint: two may hold the gate at a time.
    checkpointing: Mutex<()>,
    /// The header in the file says "in use"; changes may begin at once.
    in_use: AtomicBool,
    /// The pool's format of pages knows it, too: what is read later may be another process's.
    closed: Arc<AtomicBool>,
    /// The process that opened it.
    process: u32,
    /// The first failure to write a header or the free map.
    poison: OnceLock<Arc<str>>,
    small_pool: Option<Mutex<()>>,
}

/// Trees by name, as long as they have handles.
#[derive(Debug, Default)]
pub(crate) struct OpenTrees {
    by_name: HashMap<String, Weak<TreeState>>,
    /// So many entries were of use at the last look.
    live: usize,
}

impl OpenTrees {
    pub(crate) fn get(&self, name: &str) -> Option<Arc<TreeState>> {
        self.by_name.get(name)?.upgrade()
    }

    pub(crate) fn insert(&mut self, tree: &Arc<TreeState>) {
        // What has no handle any more goes when it could be half of all.
        if self.by_name.len() > 2 * self.live + 16 {
            self.by_name.retain(|_, tree| tree.strong_count() > 0);
            self.by_name.shrink_to(2 * self.by_name.len());
            self.live = self.by_name.len();
        }
        self.by_name.insert(tree.name().to_string(), Arc::downgrade(tree));
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.by_name.remove(name);
    }
}

/// What is known of the file beside its pages.
#[derive(Debug)]
struct FileState {
    header: Header,
    /// The pages of the free map that the last clean header refers to. They stay its pages while
    /// the store is in use, so that the next checkpoint needs no space of a full disk.
    free_map: Vec<PageRef>,
}

/// The right to change pages of a store.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    _passage: Option<Passage<'a>>,
    core: &'a StoreCore,
    /// It is a destructor's change, which the panic does not unwind.
    began_in_panic: bool,
    in_callers_code: Cell<bool>,
}

impl Change<'_> {
    /// Runs the caller's own code. It sees copies, or a page that nothing refers to yet, and that
    /// is freed if it panics: so its panics cut nothing.
    pub(crate) fn callers_code<T>(&self, run: impl FnOnce() -> T) -> T {
        self.in_callers_code.set(true);
        let result = run();
        self.in_callers_code.set(false);
        result
    }
}

impl Drop for Change<'_> {
    /// A change that a panic unwound may have changed one of two pages that belong together.
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.began_in_panic && !self.in_callers_code.get() {
            self.core.poison_for("a panic ended a change in its midst");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StoreCore {
    pub(crate) fn new(
        pool: Pool,
        device: Arc<dyn Device>,
        header: Header,
        free_map: Vec<PageRef>,
        salvage: bool,
        closed: Arc<AtomicBool>,
    ) -> StoreCore {
        let page_frames = header.page_frames;
        let capacity = pool.capacity();
        // Whole tree pages, so that every page of the file is a multiple of them.
        let blob_frames = (capacity / 4).min(u64::from(PageRef::MAX_FRAMES));
        let blob_frames = blob_frames / u64::from(page_frames) * u64::from(page_frames);
        let small = capacity < min_pool_frames(page_frames) / 8 * SMALL_POOL_PAGES;
        StoreCore {
            pool,
            device,
            page_frames,
            limits: NodeLimits::for_page_size(page_frames as usize * PAGE_SIZE),
            max_blob: blob_frames * PAGE_SIZE as u64 - BLOB_REST as u64,
            salvage,
            catalog: Arc::new(TreeState::catalog(PageRef::new(header.catalog, page_frames))),
            open_trees: Mutex::default(),
            gate: Gate::default(),
            aside: Aside::default(),
            in_use: AtomicBool::new(!header.clean),
            file: Mutex::new(FileState { header, free_map }),
            checkpointing: Mutex::default(),
            closed,
            process: std::process::id(),
            poison: OnceLock::new(),
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

    pub(crate) fn trees(&self) -> MutexGuard<'_, OpenTrees> {
        lock(&self.open_trees)
    }

    pub(crate) fn header(&self) -> Header {
        lock(&self.file).header
    }

    /// The pages of the free map in the file.
    pub(crate) fn free_map_pages(&self) -> Vec<PageRef> {
        lock(&self.file).free_map.clone()
    }

    /// The store has something that only this version of the format knows.
    pub(crate) fn need_version(&self, _change: &Change<'_>, version: u32) {
        let mut file = lock(&self.file);
        file.header.version = file.header.version.max(version);
    }

    /// The number for a tree that is created.
    pub(crate) fn next_tree_id(&self) -> Result<u32> {
        let mut file = lock(&self.file);
        let id = file.header.next_tree;
        if id >= NEXT_TREE_MAX {
            return Err(Error::NoTreeNumbers);
        }
        file.header.next_tree += 1;
        Ok(id)
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::Closed),
        }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        self.pool.check_writable()?;
        self.poison.get().map_or(Ok(()), |first| Err(Error::Poisoned(first.clone())))
    }

    fn poison(&self, error: PoolError) -> Error {
        self.poison_for(&error.to_string());
        error.into()
    }

    #[cold]
    pub(crate) fn poison_for(&self, what: &str) {
        if self.poison.set(what.into()).is_ok() {
            tracing::error!("{what}; changes are refused from now on");
        }
    }

    /// Begins a change. Waits while a snapshot lives.
    #[inline]
    pub(crate) fn change(&self) -> Result<Change<'_>> {
        let passage = self.gate.pass();
        // Behind the gate: the checkpoint that was waited for may have failed half way, and then
        // the file may be a clean one that no change must reach.
        self.check_writable()?;
        self.begin(Some(passage))
    }

    /// The right to change, for the one who has the store alone.
    pub(crate) fn change_alone<'a>(&'a self, _alone: &'a Alone<'_>) -> Result<Change<'a>> {
        self.check_writable()?;
        self.begin(None)
    }

    #[inline]
    fn begin<'a>(&'a self, passage: Option<Passage<'a>>) -> Result<Change<'a>> {
        if !self.in_use.load(Ordering::Acquire) {
            self.mark_in_use()?;
        }
        Ok(Change {
            _passage: passage,
            core: self,
            began_in_panic: std::thread::panicking(),
            in_callers_code: Cell::new(false),
        })
    }

    /// No change is under way while the result lives.
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.gate.hold()
    }

    /// Neither changes nor snapshots nor checkpoints are there while the result lives.
    pub(crate) fn alone(&self) -> Alone<'_> {
        self.gate.alone()
    }

    /// No checkpoint is under way while the result lives.
    pub(crate) fn checkpoint_lock(&self) -> MutexGuard<'_, ()> {
        lock(&self.checkpointing)
    }

    #[cold]
    fn mark_in_use(&self) -> Result<()> {
        let mut file = lock(&self.file);
        if self.in_use.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut header = file.header;
        header.sequence += 1;
        header.clean = false;
        header.free_map = 0;
        self.write_header(&header)?;
        file.header = header;
        self.in_use.store(true, Ordering::Release);
        Ok(())
    }

    fn write_header(&self, header: &Header) -> Result<()> {
        let page = header.page();
        header
            .write(&*self.device)
            .map_err(|source| self.poison(PoolError::Write { page, source }))?;
        self.device.sync().map_err(|source| self.poison(PoolError::Sync(source)))
    }

    /// Writes everything and makes it durable; afterwards the file is clean. `trim` gives the
    /// file's unused tail back.
    pub(crate) fn checkpoint(&self, _hold: &Hold<'_>, trim: bool) -> Result<()> {
        self.check_writable()?;
        let _one_at_a_time = self.checkpoint_lock();
        self.free_ended();
        let settled = !self.in_use.load(Ordering::Acquire);
        if settled && !(trim && self.has_free_tail()) {
            return Ok(());
        }
        // A change of the file, but not of what the store has: snapshots do not mind.
        let change = self.begin(None)?;
        let mut free_map = std::mem::take(&mut lock(&self.file).free_map);
        let written = self.write_checkpoint(&change, &mut free_map, trim);
        let mut file = lock(&self.file);
        file.free_map = free_map;
        file.header = written?;
        self.in_use.store(false, Ordering::Release);
        Ok(())
    }

    /// The file ends with pages that are not in use.
    fn has_free_tail(&self) -> bool {
        let file_pages = self.pool.file_pages();
        self.pool.with_space(|space| {
            let last = space.free_extents().last();
            file_pages > space.end()
                || last.is_some_and(|(start, count)| start + count == space.end())
        })
    }

    fn write_checkpoint(
        &self,
        change: &Change<'_>,
        free_map: &mut Vec<PageRef>,
        trim: bool,
    ) -> Result<Header> {
        if trim {
            // Pages that were being written back when they were freed are free after this.
            self.pool.sync()?;
            // The map may be in the way of the file's new end.
            while let Some(page) = free_map.pop() {
                self.pool.free_page(page)?;
            }
            free_map::allocate(self, change, free_map)?;
            self.pool.trim()?;
        }
        // After the trimming: that may free pages which a reader held until now.
        free_map::allocate(self, change, free_map)?;
        free_map::write(self, change, free_map)?;
        self.pool.sync()?;
        let mut header = lock(&self.file).header;
        header.sequence += 1;
        header.clean = true;
        header.free_map = free_map.first().map_or(0, |page| page.id.0);
        header.file_pages = self.pool.file_pages();
        self.write_header(&header)?;
        Ok(header)
    }

    /// Checkpoints, refuses everything afterwards, and lets others have the file.
    pub(crate) fn close(&self) -> Result<()> {
        self.check_process()?;
        self.close_held(&self.hold())
    }

    /// The child of a `fork` has neither the memory of the pool nor its threads.
    fn check_process(&self) -> Result<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => Err(Error::InUse(format!(
                "process {} opened the store: after fork, let that one use it",
                self.process
            ))),
        }
    }

    /// As [`close`](Self::close), by a holder of the gate.
    pub(crate) fn close_held(&self, hold: &Hold<'_>) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let outcome = match self.check_writable() {
            Err(Error::ReadOnly) => Ok(()),
            _ => self.checkpoint(hold, true),
        };
        // What could not be saved for want of space or memory can be saved yet: the store stays
        // open, unless it is poisoned.
        let over = outcome.is_ok() || self.check_writable().is_err();
        self.closed.store(over, Ordering::Release);
        if outcome.is_ok() {
            // All pages are as the file has them, no change comes any more, and what is read from
            // the file after this is refused: the mark is set, and looked at after each read.
            self.device.unlock();
        }
        outcome
    }

    /// Nothing has to be written before the store can go.
    pub(crate) fn is_settled(&self) -> bool {
        self.closed.load(Ordering::Relaxed) || !self.in_use.load(Ordering::Relaxed)
    }
}

impl Drop for StoreCore {
    /// Dropping the last handle closes the store, also while a panic unwinds the thread.
    ///
    /// That is sound: pages change within a [`Change`] alone, and each operation is one, or several
    /// that are whole for themselves. If the panic came from the engine's own code within a change,
    /// or from that of a pool or device below it, the store is poisoned, and stays as the file has
    /// it. If it came from the caller's code, that saw copies, and the change has undone itself. In
    /// any other case all changes that began have ended, so the pages fit together.
    fn drop(&mut self) {
        if !self.is_settled() && !self.salvage {
            // A panic within a panic would end the process if it left a destructor.
            match catch_unwind(AssertUnwindSafe(|| self.close())) {
                Ok(Ok(()) | Err(Error::ReadOnly)) => {}
                Ok(Err(error)) => tracing::error!("closing the store failed: {error}"),
                Err(_) => tracing::error!("closing the store panicked"),
            }
        }
        at_exit::leave(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_without_handles_are_forgotten() {
        let mut trees = OpenTrees::default();
        let tree = |id: u32| Arc::new(TreeState::new(id, &id.to_string(), PageRef::new(9, 1)));
        let kept: Vec<_> = (0..100).map(tree).collect();
        kept.iter().for_each(|tree| trees.insert(tree));
        (100..100_000).for_each(|id| trees.insert(&tree(id)));
        assert!(trees.by_name.len() < 300 && trees.by_name.capacity() < 2000);
        for tree in &kept {
            assert!(trees.get(&tree.name()).is_some_and(|found| Arc::ptr_eq(&found, tree)));
        }
    }
}
