//! B+trees on the buffer manager: [`Tree`].
//!
//! Nodes have fence keys and no pointers to their siblings. Readers take no locks (optimistic lock
//! coupling). A change locks the leaf. A split or a merge also locks the parent and the sibling.
//! Splits and merges leave the root on its page. Only a compaction of the store moves a root
//! (`move_pages.rs`).

mod bulk_load;
mod check;
mod commit;
mod drop_tree;
mod group;
mod handle;
mod load_pace;
mod lookup;
mod modify;
mod move_pages;
mod move_pieces;
mod multi_get;
mod owned_streams;
mod remove_many;
mod salvage;
mod scan;
pub(crate) mod streams;
mod structure;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_pool::PageRef;

pub use bulk_load::BulkLoader;
pub use check::TreeStat;
pub(crate) use check::Visitor;
pub(crate) use commit::{Write, commit};
pub(crate) use group::init;
pub use handle::Tree;
pub(crate) use lookup::Target;
pub(crate) use move_pages::{Limit, Moves};
pub use owned_streams::{OwnedBulkLoader, OwnedValueReader, OwnedValueWriter};
pub use remove_many::ExtractIf;
pub use salvage::{SalvagedEntry, Visit, VisitReaders, VisitSalvaged};
pub use scan::{Cursor, Entries, KeyRange};
pub(crate) use scan::{Direction, bounds_of, bounds_of_prefix, is_after_start, is_before_end};
pub use streams::{ValueReader, ValueWriter};

use crate::error::{Error, Result};
use crate::store::pages::PageStore;
use crate::sync::lock;
use crate::versions::Time;

/// A tree and the pages of its store. Every operation works on these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TreeRef<'a> {
    pub pages: &'a PageStore,
    pub state: &'a TreeState,
}

impl TreeRef<'_> {
    /// The tree as a view of this time sees it, if it was dropped since.
    pub(crate) fn at(self, time: Time) -> Self {
        match self.state.before_drop.get() {
            Some((dropped, twin)) if time < *dropped => TreeRef { state: twin, ..self },
            _ => self,
        }
    }

    #[inline(always)]
    pub(crate) fn check_dropped(self) -> Result<()> {
        match self.state.is_dropped() {
            false => Ok(()),
            true => Err(Error::NoSuchTree(self.state.name().to_string())),
        }
    }
}

/// The number of the catalog, the tree that lists the other trees.
pub(crate) const CATALOG: u32 = 1;

/// In the word of a tree's root: the tree was dropped.
const DROPPED: u64 = 1 << 63;

/// The state that all handles of a tree share.
#[derive(Debug)]
pub(crate) struct TreeState {
    pub id: u32,
    name: Mutex<Arc<str>>,
    /// The number of the root's page, with [`DROPPED`] once the tree was dropped, before its pages
    /// are freed. A thread changes the number while it holds the old and the new root exclusively,
    /// before it frees the old one.
    ///
    /// A thread loads the word, locks or reads the page, and loads the word again
    /// (`TreeRef::root`). If the word has changed, the page may have another use, even as another
    /// node of the same tree. Then the thread starts again. If the word is the same, the page is
    /// the root, and stays the root as long as the thread holds it, or finds its version unchanged.
    root: AtomicU64,
    /// For views that began before the tree was dropped, until its pages are freed: the tree as
    /// they see it.
    pub before_drop: OnceLock<(Time, Box<TreeState>)>,
    /// The leaves from which the first and the last entry were popped last; 0 for none. A thread
    /// stores a page's number here, and removes it before it frees the page, only while it holds
    /// the page's exclusive lock, or has exclusive use of the store. So a locked page whose number
    /// is here is a page of the tree.
    pub popped_leaves: [AtomicU64; 2],
}

impl TreeState {
    pub(crate) fn new(id: u32, name: &str, root: PageRef) -> TreeState {
        let name = Mutex::new(name.into());
        TreeState {
            id,
            name,
            root: AtomicU64::new(root.id.0),
            before_drop: OnceLock::new(),
            popped_leaves: Default::default(),
        }
    }

    /// The current name of the tree.
    pub(crate) fn name(&self) -> Arc<str> {
        lock(&self.name).clone()
    }

    pub(crate) fn rename(&self, name: &str) {
        *lock(&self.name) = name.into();
    }

    /// The root's word.
    #[inline(always)]
    fn root_word(&self) -> u64 {
        self.root.load(Ordering::Acquire)
    }

    /// The number of the root's page.
    pub(crate) fn root(&self) -> u64 {
        self.root_word() & !DROPPED
    }

    /// The root has moved to another page. The caller holds both pages exclusively.
    fn set_root(&self, root: u64) {
        self.root.store(root, Ordering::Release);
    }

    /// Whether the tree was dropped.
    #[inline(always)]
    pub(crate) fn is_dropped(&self) -> bool {
        self.root_word() & DROPPED != 0
    }

    /// The tree is dropped. The caller frees its pages afterwards.
    pub(crate) fn mark_dropped(&self) {
        self.root.fetch_or(DROPPED, Ordering::Release);
    }

    /// The tree, which has pages of so many frames, is dropped at this time. Views of earlier times
    /// may still read it.
    pub(crate) fn drop_at(&self, time: Time, page_frames: u32) {
        let root = PageRef::new(self.root(), page_frames);
        let twin = TreeState::new(self.id, &self.name(), root);
        let _ = self.before_drop.set((time, Box::new(twin)));
        self.mark_dropped();
    }

    pub(crate) fn catalog(root: PageRef) -> TreeState {
        TreeState::new(CATALOG, "(catalog)", root)
    }
}
