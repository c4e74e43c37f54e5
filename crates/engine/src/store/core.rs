//! What all handles of a store share. A [`Change`] is the right to change pages.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageRef, Pool};

use crate::error::{Error, Result};
use crate::node::NodeLimits;
use crate::page::blob::BLOB_REST;
use crate::store::aside::Aside;
use crate::store::file::{Checkpoints, StoreFile};
use crate::store::gate::{Alone, Gate, Hold, Passage};
use crate::store::header::{Header, NEXT_TREE_MAX};
use crate::store::options::min_pool_frames;
use crate::store::within::{Within, refuse_within};
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
    /// Shared with the pool's format.
    pub file: Arc<StoreFile>,
    /// Held during a checkpoint: two may hold the gate at a time.
    pub checkpoints: Mutex<Checkpoints>,
    /// How many checkpoints have come to their cut, which covers all changes that ended before.
    pub cuts: AtomicU64,
    /// There were changes since the last cut.
    pub changed: AtomicBool,
    /// The process that opened it.
    process: u32,
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
        let within = Within::of(&self.core.gate);
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
            self.core.file.poison_for("a panic ended a change in its midst");
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
        file: Arc<StoreFile>,
        free_map: Vec<PageRef>,
        salvage: bool,
    ) -> StoreCore {
        let header = file.header();
        let page_frames = header.page_frames;
        let capacity = pool.capacity();
        // Whole tree pages, so that every page of the file is a multiple of them.
        let blob_frames = (capacity / 4).min(u64::from(PageRef::MAX_FRAMES));
        let blob_frames = blob_frames / u64::from(page_frames) * u64::from(page_frames);
        let small = capacity < min_pool_frames(page_frames) / 8 * SMALL_POOL_PAGES;
        StoreCore {
            page_frames,
            limits: NodeLimits::for_page_size(page_frames as usize * PAGE_SIZE),
            max_blob: blob_frames * PAGE_SIZE as u64 - BLOB_REST as u64,
            salvage,
            catalog: Arc::new(TreeState::catalog(PageRef::new(header.catalog, page_frames))),
            open_trees: Mutex::default(),
            gate: Gate::default(),
            aside: Aside::default(),
            checkpoints: Mutex::new(pool.with_space(|space| Checkpoints::of_file(free_map, space))),
            cuts: AtomicU64::new(0),
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

    pub(crate) fn trees(&self) -> MutexGuard<'_, OpenTrees> {
        lock(&self.open_trees)
    }

    pub(crate) fn header(&self) -> Header {
        self.file.header()
    }

    /// The store has something that only this version of the format knows.
    pub(crate) fn need_version(&self, _change: &Change<'_>, version: u32) {
        self.file.update(|header| header.version = header.version.max(version));
    }

    /// The number for a tree that is created.
    pub(crate) fn next_tree_id(&self) -> Result<u32> {
        self.file.update(|header| {
            let id = header.next_tree;
            if id >= NEXT_TREE_MAX {
                return Err(Error::NoTreeNumbers);
            }
            header.next_tree += 1;
            Ok(id)
        })
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
            core: self,
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

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Wake, Waker};

    use vellum_pool::device::{FaultyDevice, MemoryDevice, Operation};

    use super::*;
    use crate::store::open;
    use crate::store::options::Options;

    /// A store, which the task drops that is woken when its page has come: the thread of the device
    /// that wakes it still has what the read needed.
    struct DroppedByTask {
        core: Mutex<Option<StoreCore>>,
        device: Weak<FaultyDevice<Arc<MemoryDevice>>>,
        devices_left: Mutex<Option<usize>>,
    }

    impl Wake for DroppedByTask {
        fn wake(self: Arc<Self>) {
            drop(lock(&self.core).take());
            *lock(&self.devices_left) = Some(self.device.strong_count());
        }
    }

    #[test]
    fn a_thread_that_completes_a_read_keeps_no_device() {
        let memory = Arc::new(MemoryDevice::new());
        let options = Options::new().pool_bytes(1 << 20);
        drop(open::create(memory.clone(), &options).unwrap());
        let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
        let plan = device.plan();
        let core = open::open(device.clone(), &options).unwrap();
        let catalog = PageRef::new(core.file.header().catalog, 1);
        let task = Arc::new(DroppedByTask {
            core: Mutex::new(Some(core)),
            device: Arc::downgrade(&device),
            devices_left: Mutex::default(),
        });
        plan.hold(Operation::Read);
        {
            let core = lock(&task.core);
            let fix = pin!(core.as_ref().unwrap().pool.fix_shared_async(catalog));
            let waker = Waker::from(task.clone());
            assert!(fix.poll(&mut Context::from_waker(&waker)).is_pending());
        }
        plan.release(Operation::Read);
        assert_eq!(*lock(&task.devices_left), Some(1), "that of this test");
    }

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
