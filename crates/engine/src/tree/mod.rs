//! B+trees on the buffer manager: [`Tree`].
//!
//! Nodes have fence keys and no pointers to their siblings. Readers take no locks (optimistic lock
//! coupling). A change locks the leaf. A split or a merge also locks the parent and the sibling.
//! The root always stays on the same page, so one page number identifies a tree for all of its
//! life.

mod bulk_load;
mod check;
mod commit;
mod drop_tree;
mod group;
mod handle;
mod lookup;
mod modify;
mod multi_get;
mod owned_streams;
mod remove_many;
mod salvage;
mod scan;
pub(crate) mod streams;
mod structure;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_pool::PageRef;

pub use bulk_load::BulkLoader;
pub use check::TreeStat;
pub(crate) use check::Visitor;
pub(crate) use commit::{Write, commit};
pub(crate) use group::init;
pub use handle::Tree;
pub(crate) use lookup::Target;
pub use owned_streams::{OwnedValueReader, OwnedValueWriter};
pub use remove_many::ExtractIf;
pub use salvage::{Visit, VisitReaders};
pub use scan::{Cursor, Entries, KeyRange};
pub(crate) use scan::{Direction, bounds_of, bounds_of_prefix, is_after_start, is_before_end};
pub use streams::{ValueReader, ValueWriter};

use crate::error::{Error, Result};
use crate::store::changed::Time;
use crate::store::pages::PageStore;
use crate::sync::lock;

/// A tree and the pages of its store. Every operation works on these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access<'a> {
    pub pages: &'a PageStore,
    pub tree: &'a TreeState,
}

impl Access<'_> {
    /// The tree as a view of this time sees it, if it was dropped since.
    pub(crate) fn at(self, time: Time) -> Self {
        match self.tree.before_drop.get() {
            Some((dropped, twin)) if time < *dropped => Access { tree: twin, ..self },
            _ => self,
        }
    }

    #[inline(always)]
    pub(crate) fn check_dropped(self) -> Result<()> {
        match self.tree.dropped.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::NoSuchTree(self.tree.name().to_string())),
        }
    }
}

/// The number of the catalog, the tree that lists the other trees.
pub(crate) const CATALOG: u32 = 1;

/// The state that all handles of a tree share.
#[derive(Debug)]
pub(crate) struct TreeState {
    pub id: u32,
    name: Mutex<Arc<str>>,
    pub root: PageRef,
    /// Set before the tree's pages are freed.
    pub dropped: AtomicBool,
    /// For views that began before the tree was dropped, until its pages are freed: the tree as
    /// they see it.
    pub before_drop: OnceLock<(Time, Box<TreeState>)>,
    /// The leaves from which the first and the last entry were popped last; 0 for none. A thread
    /// stores a page's number here, and removes it when it frees the page, only while it holds the
    /// page's exclusive lock. So a locked page whose number is here is a page of the tree.
    pub popped_leaves: [AtomicU64; 2],
}

impl TreeState {
    pub(crate) fn new(id: u32, name: &str, root: PageRef) -> TreeState {
        let name = Mutex::new(name.into());
        TreeState {
            id,
            name,
            root,
            dropped: AtomicBool::new(false),
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

    /// The tree is dropped at this time. Views of earlier times may still read it.
    pub(crate) fn drop_at(&self, time: Time) {
        let twin = TreeState::new(self.id, &self.name(), self.root);
        let _ = self.before_drop.set((time, Box::new(twin)));
        self.dropped.store(true, Ordering::Release);
    }

    pub(crate) fn catalog(root: PageRef) -> TreeState {
        TreeState::new(CATALOG, "(catalog)", root)
    }
}
