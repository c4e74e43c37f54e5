//! The state that all handles of a store share: its pages, its trees by name, and its checkpoints.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use vellum_pool::device::Device;
use vellum_pool::{PageRef, Pool};

use crate::error::{Error, Result};
use crate::redo::log::RedoLog;
use crate::redo::progress::RecoveryReport;
use crate::store::cutter::Cutter;
use crate::store::file::{Checkpoints, StoreFile};
use crate::store::group_commit::GroupCommit;
use crate::store::header::{Header, NEXT_TREE_MAX};
use crate::store::late_redo::LateRedo;
use crate::store::orphans::Orphans;
use crate::store::pages::PageStore;
use crate::sync::lock;
use crate::tree::TreeState;

/// The state that all handles of a store share.
#[derive(Debug)]
pub(crate) struct StoreCore {
    /// Shared with the thread that writes checkpoints, which ends before the store is dropped.
    pub pages: Arc<PageStore>,
    pub salvage: bool,
    /// Of a store that is open for salvage: the nodes that have lost their parents.
    pub orphans: Option<Orphans>,
    pub catalog: Arc<TreeState>,
    /// The trees that have handles, or had handles until recently.
    open_trees: Mutex<OpenTrees>,
    /// A checkpoint holds this lock. Freezing the gate does not exclude another checkpoint.
    pub checkpoints: Mutex<Checkpoints>,
    pub commits: GroupCommit,
    /// Trees that were dropped and whose pages views still see.
    pub dropped_trees: Mutex<Vec<Arc<TreeState>>>,
    /// The thread that writes the checkpoints of a store with a log.
    pub cutter: Option<Cutter>,
    /// The thread that redoes pages that recovery has left.
    pub late_redo: Option<LateRedo>,
    /// A compaction holds this lock.
    pub compacting: Mutex<()>,
    /// Requests of other processes that have a handle of the store.
    pub requests: Requests,
    /// A thread waits to close the store.
    pub closing: AtomicBool,
    /// A thread has closed the store, or is about to end a failed close, and waits for callbacks of
    /// commits alone.
    pub waits_for_callbacks: Arc<AtomicBool>,
    /// What the opening did to recover the store.
    pub recovery: Option<RecoveryReport>,
}

/// How many requests of other processes have a handle of the store, at all of its control sockets.
/// Each begins after it has its handle, and ends before it gives that back.
#[derive(Debug, Default)]
pub(crate) struct Requests(AtomicU64);

impl Requests {
    /// The upper half counts begins and ends, the lower half the requests that are under way.
    const EVENT: u64 = 1 << 32;

    /// A request begins. It ends when the caller drops what this returns.
    pub(crate) fn begin(&self) -> UnderWay<'_> {
        self.0.fetch_add(Self::EVENT + 1, Ordering::AcqRel);
        UnderWay(self)
    }

    /// Whether others than requests have handles of the store. It may say so although they have
    /// none, if a request begins or ends meanwhile.
    pub(crate) fn has_others(core: &Arc<StoreCore>) -> bool {
        let before = core.requests.0.load(Ordering::Acquire);
        let handles = Arc::strong_count(core) as u64;
        fence(Ordering::Acquire);
        let after = core.requests.0.load(Ordering::Acquire);
        before != after || handles > before % Self::EVENT
    }
}

/// A request that is under way.
pub(crate) struct UnderWay<'r>(&'r Requests);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_add(Requests::EVENT - 1, Ordering::AcqRel);
    }
}

/// The trees that have handles, by name.
#[derive(Debug, Default)]
pub(crate) struct OpenTrees {
    by_name: HashMap<String, Weak<TreeState>>,
    /// The number of trees that had handles when the map was last cleaned up.
    live: usize,
}

impl OpenTrees {
    pub(crate) fn get(&self, name: &str) -> Option<Arc<TreeState>> {
        self.by_name.get(name)?.upgrade()
    }

    pub(crate) fn insert(&mut self, tree: &Arc<TreeState>) {
        // Remove the trees without handles when they may be half of the map.
        if self.by_name.len() > 2 * self.live + 16 {
            self.by_name.retain(|_, tree| tree.strong_count() > 0);
            self.by_name.shrink_to(2 * self.by_name.len());
            self.live = self.by_name.len();
        }
        self.by_name.insert(tree.name().to_string(), Arc::downgrade(tree));
    }

    /// The trees that have handles.
    pub(crate) fn live(&self) -> impl Iterator<Item = Arc<TreeState>> {
        self.by_name.values().filter_map(Weak::upgrade)
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.by_name.remove(name);
    }
}

impl StoreCore {
    pub(crate) fn new(
        pool: Pool,
        device: Arc<dyn Device>,
        file: Arc<StoreFile>,
        free_map: Vec<PageRef>,
        salvage: bool,
    ) -> StoreCore {
        let Header { catalog, page_frames, .. } = file.header();
        StoreCore {
            catalog: Arc::new(TreeState::catalog(PageRef::new(catalog, page_frames))),
            open_trees: Mutex::default(),
            dropped_trees: Mutex::default(),
            checkpoints: Mutex::new(pool.with_space(|space| Checkpoints::of_file(free_map, space))),
            commits: GroupCommit::default(),
            compacting: Mutex::default(),
            requests: Requests::default(),
            closing: AtomicBool::new(false),
            waits_for_callbacks: Arc::default(),
            recovery: None,
            pages: Arc::new(PageStore::new(pool, device, file, salvage)),
            cutter: None,
            late_redo: None,
            salvage,
            orphans: None,
        }
    }

    /// Gives the store a log. Nothing has the store's pages yet but the store.
    pub(crate) fn set_log(&mut self, log: Arc<RedoLog>, in_background: bool) {
        let alone = Arc::get_mut(&mut self.pages);
        let pages = alone.unwrap_or_else(|| unreachable!("a thread has the pages of a new store"));
        pages.redo_log = Some(log.clone());
        if in_background && log.pending.left() > 0 {
            self.late_redo = LateRedo::start(self.pages.clone(), log.clone());
        }
        if in_background {
            self.cutter = Cutter::start(self.pages.clone(), log);
        }
    }

    pub(crate) fn trees(&self) -> MutexGuard<'_, OpenTrees> {
        lock(&self.open_trees)
    }

    /// The number for a new tree.
    pub(crate) fn next_tree_id(&self) -> Result<u32> {
        self.pages.file.update(|header| {
            let id = header.next_tree;
            if id >= NEXT_TREE_MAX {
                return Err(Error::NoTreeNumbers);
            }
            header.next_tree += 1;
            Ok(id)
        })
    }
}

/// Whether views of a store may be used after a close that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Views {
    GoOn,
    /// The process ends, or there is no view. The pages of dropped trees make room for the
    /// checkpoint.
    End,
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Wake, Waker};

    use vellum_pool::device::{FaultyDevice, MemoryDevice, Operation};

    use super::*;
    use crate::store::open;
    use crate::store::options::Options;

    /// A task drops the store when the device wakes it after a read. The device's thread still has
    /// what the read needed.
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
        let catalog = PageRef::new(core.pages.file.header().catalog, 1);
        let task = Arc::new(DroppedByTask {
            core: Mutex::new(Some(core)),
            device: Arc::downgrade(&device),
            devices_left: Mutex::default(),
        });
        plan.hold(Operation::Read);
        {
            let core = lock(&task.core);
            let fix = pin!(core.as_ref().unwrap().pages.pool.fix_shared_async(catalog));
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
