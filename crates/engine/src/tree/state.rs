//! What all handles of a tree share.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};

use vellum_pool::PageRef;

/// Number of the catalog, the tree of the trees.
pub(crate) const CATALOG: u32 = 1;

/// What all handles of a tree share.
#[derive(Debug)]
pub(crate) struct TreeState {
    pub id: u32,
    name: Mutex<Arc<str>>,
    pub root: PageRef,
    /// Set before the tree's pages are freed.
    pub dropped: AtomicBool,
    /// The leaves that the first and the last entry were popped from; 0 for none. A page's number
    /// comes here, and goes from here when the page is freed, while the page is held exclusively:
    /// one that is held, and stands here, is a page of the tree.
    pub edges: [AtomicU64; 2],
}

impl TreeState {
    pub(crate) fn new(id: u32, name: &str, root: PageRef) -> TreeState {
        let name = Mutex::new(name.into());
        TreeState { id, name, root, dropped: AtomicBool::new(false), edges: Default::default() }
    }

    /// The name that the tree has now.
    pub(crate) fn name(&self) -> Arc<str> {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn rename(&self, name: &str) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = name.into();
    }

    pub(crate) fn catalog(root: PageRef) -> TreeState {
        TreeState::new(CATALOG, "(catalog)", root)
    }
}
