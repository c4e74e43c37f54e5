//! The catalog: a tree that maps the name of each tree to its number and root.

use std::sync::Arc;

use vellum_pool::PageRef;

use crate::error::{Error, Result};
use crate::key::Key;
use crate::page::PageKind;
use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::store::core::StoreCore;
use crate::store::pages::{Change, ExclusiveUse};
use crate::sync::lock;
use crate::tree::{Entries, TreeRef, TreeState, Write, commit, init};

/// Length in bytes of a tree's entry: number u32, 0 u32, root page u64.
const ENTRY: usize = 16;

fn encode(id: u32, root: u64) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    put_u32(&mut entry, 0, id);
    put_u64(&mut entry, 8, root);
    entry
}

impl StoreCore {
    pub(crate) fn catalog(&self) -> TreeRef<'_> {
        TreeRef { pages: &self.pages, state: &self.catalog }
    }

    /// Decodes a catalog entry.
    pub(crate) fn decode_tree(&self, name: &[u8], entry: &[u8]) -> Result<TreeState> {
        let name = std::str::from_utf8(name);
        match (name, entry.len()) {
            (Ok(name), ENTRY) => {
                let root = PageRef::new(get_u64(entry, 8), self.pages.page_frames);
                Ok(TreeState::new(get_u32(entry, 0), name, root))
            }
            _ => {
                Err(Error::damaged(self.catalog().root_page(), "the catalog has an invalid entry"))
            }
        }
    }

    /// The tree of this name.
    pub(crate) fn open_tree(&self, name: &str) -> Result<Arc<TreeState>> {
        self.pages.check_open()?;
        let mut trees = self.trees();
        if let Some(tree) = trees.get(name) {
            return Ok(tree);
        }
        let mut entry = Vec::new();
        if !self.catalog().get_into(name.as_bytes(), &mut entry)? {
            return Err(Error::NoSuchTree(name.into()));
        }
        let tree = Arc::new(self.decode_tree(name.as_bytes(), &entry)?);
        trees.insert(&tree);
        Ok(tree)
    }

    /// Creates a tree.
    pub(crate) fn create_tree(&self, name: &str) -> Result<Arc<TreeState>> {
        self.catalog().check_key(name.as_bytes())?;
        let change = self.pages.change()?;
        let mut trees = self.trees();
        if self.catalog().contains(name.as_bytes())? {
            return Err(Error::TreeExists(name.into()));
        }
        let id = self.next_tree_id()?;
        let mut root = self.pages.pool.allocate(self.pages.page_frames)?;
        let page = init(&change, &mut root, PageKind::Leaf, 0, id);
        let entry = encode(id, page.id.0);
        if let Err(error) = self.catalog().insert_tree(&change, name.as_bytes(), &entry, &mut root)
        {
            self.catalog().free_page(&change, root);
            return Err(error);
        }
        drop(root);
        let tree = Arc::new(TreeState::new(id, name, page));
        trees.insert(&tree);
        Ok(tree)
    }

    /// Renames a tree. Other threads see one of the two names, because they lock the open trees
    /// before they read the catalog. A checkpoint has one of the two names, because no cut happens
    /// during a change.
    pub(crate) fn rename_tree(&self, old: &str, new: &str) -> Result<()> {
        let catalog = self.catalog();
        catalog.check_key(new.as_bytes())?;
        let change = self.pages.change()?;
        let mut trees = self.trees();
        let mut entry = Vec::new();
        if !catalog.get_into(old.as_bytes(), &mut entry)? {
            return Err(Error::NoSuchTree(old.into()));
        }
        if old == new {
            return Ok(());
        }
        if catalog.contains(new.as_bytes())? {
            return Err(Error::TreeExists(new.into()));
        }
        // One group, so that neither a view nor a crash finds two names.
        let mut writes = [(old, None), (new, Some(&entry[..]))];
        writes.sort_unstable();
        let writes = writes.map(|(name, value)| (Key::from(name.as_bytes()), value));
        let writes = writes.iter().map(|(key, value)| Write { tree: catalog, key, value: *value });
        commit(&self.pages, &change, None, (writes.len(), writes))?;
        let open = trees.get(old);
        trees.remove(old);
        if let Some(tree) = open {
            tree.rename(new);
            trees.insert(&tree);
        }
        Ok(())
    }

    /// Moves the root of a tree below the page `bound`. Returns false if there is no room, or if
    /// another thread holds the root. A thread that opens or renames the tree waits meanwhile.
    pub(crate) fn move_root(&self, tree: &TreeState, bound: u64) -> Result<bool> {
        let tree = TreeRef { pages: &self.pages, state: tree };
        let change = self.pages.change_to_free(0)?;
        tree.check_dropped()?;
        let new = self.pages.pool.allocate_below(self.pages.page_frames, bound)?;
        let Some(mut new) = new else { return Ok(false) };
        let page = init(&change, &mut new, PageKind::Leaf, 0, tree.state.id);
        let trees = self.trees();
        let (name, entry) = (tree.state.name(), encode(tree.state.id, page.id.0));
        let entry = (name.as_bytes(), &entry[..]);
        let moved = tree.move_root(&change, self.catalog(), entry, &mut new);
        drop(trees);
        if !matches!(moved, Ok(true)) {
            tree.free_page(&change, new);
        }
        moved
    }

    /// Removes a tree and frees its pages. The caller has exclusive use of the store.
    pub(crate) fn drop_tree(&self, exclusive: &ExclusiveUse<'_>, name: &str) -> Result<()> {
        let change = self.pages.change_exclusively(exclusive)?;
        let tree = self.open_tree(name)?;
        let mut trees = self.trees();
        // A view that ends from here on finds the tree in the list, and frees it.
        let mut dropped = lock(&self.dropped_trees);
        // Without views none begins before this change has ended: it would have to freeze the gate.
        let are_views = self.pages.versions.are_needed();
        self.catalog().remove_in(&change, name.as_bytes())?;
        trees.remove(name);
        if are_views {
            // A view may begin just now. Before this time it still sees the tree; from this time on
            // it finds the tree dropped.
            let time = self.pages.versions.now() + 1;
            tree.drop_at(time, self.pages.page_frames);
            self.pages.versions.take_time();
            dropped.push(tree);
            drop((trees, dropped));
            self.free_dropped_trees_in(&change, false);
            return Ok(());
        }
        drop(dropped);
        tree.mark_dropped();
        TreeRef { pages: &self.pages, state: &tree }.free_all(&change);
        Ok(())
    }

    /// Frees the pages of dropped trees that no view sees any more. If that is not possible now, a
    /// later call does it.
    pub(crate) fn free_dropped_trees(&self) {
        if lock(&self.dropped_trees).is_empty() {
            return;
        }
        match self.pages.change_to_free(0) {
            Ok(change) => self.free_dropped_trees_in(&change, false),
            Err(error) => tracing::debug!("dropped trees are freed later: {error}"),
        }
    }

    /// Whether views still see trees that were dropped.
    pub(crate) fn has_dropped_trees(&self) -> bool {
        !lock(&self.dropped_trees).is_empty()
    }

    /// As [`free_dropped_trees`](Self::free_dropped_trees), within a change; `all` of them when the
    /// store closes.
    pub(crate) fn free_dropped_trees_in(&self, change: &Change<'_>, all: bool) {
        let is_unseen = |tree: &mut Arc<TreeState>| {
            let time = tree.before_drop.get().map_or(0, |(time, _)| *time);
            all || !self.pages.versions.has_view_before(time)
        };
        let unseen: Vec<_> = lock(&self.dropped_trees).extract_if(.., is_unseen).collect();
        for tree in unseen {
            let Some((_, twin)) = tree.before_drop.get() else { continue };
            twin.mark_dropped();
            TreeRef { pages: &self.pages, state: twin }.free_all(change);
        }
    }

    /// The tree of this number: open, in the catalog, or dropped while a view sees it.
    pub(crate) fn tree_of_number(&self, number: u32) -> Result<Option<Arc<TreeState>>> {
        let found = self.trees().live().find(|tree| tree.id == number);
        if let Some(tree) = found {
            return Ok(Some(tree));
        }
        for entry in Entries::all(self.catalog()) {
            let (name, value) = entry?;
            let tree = self.decode_tree(&name, &value)?;
            if tree.id == number {
                match self.open_tree(&tree.name()) {
                    // It may have been renamed or dropped meanwhile.
                    Ok(tree) if tree.id == number => return Ok(Some(tree)),
                    Ok(_) | Err(Error::NoSuchTree(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        let dropped = lock(&self.dropped_trees);
        Ok(dropped.iter().find(|tree| tree.id == number).cloned())
    }
}
