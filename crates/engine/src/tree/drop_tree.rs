//! Freeing all pages of a tree.

use vellum_pool::PageRef;

use super::Access;
use super::held_leaf::HeldLeaf;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::page::{self, PageKind};
use crate::store::core::Change;

impl Access<'_> {
    /// Frees every page of the tree, which is marked as dropped and no longer in the catalog. The
    /// caller holds the gate: readers may still be about, changes not.
    ///
    /// A page goes before its children, so no reader gets to a child any more that is not there
    /// already, and those find out by its version.
    ///
    /// # Errors
    /// The first damage or failed read; what was not freed then stays unused for good.
    pub(crate) fn free_all(self, change: &Change<'_>) -> Result<()> {
        self.free_below(change, self.tree.root, u8::MAX)
    }

    /// A page that is to be a value of this tree is something else, as far as that is known without
    /// reading it.
    fn is_foreign(self, blob: BlobRef) -> bool {
        self.core.pool.fix_shared_resident(blob.page).is_some_and(|guard| {
            let is_blob = page::kind_number(&guard) == PageKind::Blob as u8;
            !is_blob || page::tree(&guard) != self.tree.id
        })
    }

    fn free_below(self, change: &Change<'_>, page: PageRef, level_max: u8) -> Result<()> {
        let torn = |torn| Error::torn(page, torn);
        let guard = self.core.pool.fix_exclusive(page)?;
        let node = Node::new(&guard[..]);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max || !node.is_of(self.tree.id, level) {
            // The page may be in use elsewhere, so it stays.
            let what = format!("it is no node of tree {} up to level {level_max}", self.tree.id);
            return Err(Error::damaged(page, what));
        }
        let (mut children, mut blobs) = (Vec::new(), Vec::new());
        if level > 0 {
            for index in 0..=count {
                children.push(node.child(index).map_err(torn)?);
            }
        } else {
            for index in 0..count {
                blobs.extend(HeldLeaf::from(&guard).value(index)?.blob());
            }
        }
        self.free_page(change, guard);
        let mut outcome = Ok(());
        for blob in blobs {
            match self.is_foreign(blob) {
                true => {
                    let what = format!("it is no value of tree {}", self.tree.id);
                    outcome = outcome.and(Err(Error::damaged(blob.page, what)));
                }
                false => self.free_blob(change, blob),
            }
        }
        for child in children {
            let freed = self.free_below(change, self.page(child), level - 1);
            outcome = outcome.and(freed);
        }
        outcome
    }
}
