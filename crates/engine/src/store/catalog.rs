//! The catalog: a tree that maps the name of each tree to its number and root.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_pool::PageRef;

use crate::error::{Error, Result};
use crate::page::PageKind;
use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::store::core::StoreCore;
use crate::store::gate::Exclusive;
use crate::tree::{Access, Existing, Incoming, TreeState, init};

/// Length in bytes of a tree's entry: number u32, 0 u32, root page u64.
const ENTRY: usize = 16;

fn encode(id: u32, root: u64) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    put_u32(&mut entry, 0, id);
    put_u64(&mut entry, 8, root);
    entry
}

impl StoreCore {
    pub(crate) fn catalog(&self) -> Access<'_> {
        Access { pages: &self.pages, tree: &self.catalog }
    }

    /// Decodes a catalog entry.
    pub(crate) fn decode_tree(&self, name: &[u8], entry: &[u8]) -> Result<TreeState> {
        let name = std::str::from_utf8(name);
        match (name, entry.len()) {
            (Ok(name), ENTRY) => {
                let root = PageRef::new(get_u64(entry, 8), self.pages.page_frames);
                Ok(TreeState::new(get_u32(entry, 0), name, root))
            }
            _ => Err(Error::damaged(self.catalog.root, "the catalog has an invalid entry")),
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
        match catalog.put_in(&change, new.as_bytes(), Incoming::Bytes(&entry), Existing::Refuse) {
            Err(Error::KeyExists) => return Err(Error::TreeExists(new.into())),
            stored => stored?,
        };
        if let Err(error) = catalog.remove_in(&change, old.as_bytes()) {
            if catalog.remove_in(&change, new.as_bytes()).is_err() {
                self.pages.file.poison_for(&format!(
                    "renaming failed, and a tree has the names {old:?} and {new:?} now"
                ));
            }
            return Err(error);
        }
        let open = trees.get(old);
        trees.remove(old);
        if let Some(tree) = open {
            tree.rename(new);
            trees.insert(&tree);
        }
        Ok(())
    }

    /// Removes a tree and frees its pages. The caller has exclusive use of the store.
    pub(crate) fn drop_tree(&self, exclusive: &Exclusive<'_>, name: &str) -> Result<()> {
        let change = self.pages.change_exclusively(exclusive)?;
        let tree = self.open_tree(name)?;
        let mut trees = self.trees();
        self.catalog().remove_in(&change, name.as_bytes())?;
        trees.remove(name);
        tree.dropped.store(true, Ordering::Release);
        Access { pages: &self.pages, tree: &tree }.free_all(&change)
    }
}
