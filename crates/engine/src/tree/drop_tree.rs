//! Freeing all pages of a tree: to drop it, and to empty it.

use vellum_pool::{ExclusiveGuard, PageRef};

use super::Access;
use super::apply::{Action, apply};
use super::lookup::HeldLeaf;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::page::{self, PageKind};
use crate::store::pages::Change;

/// What a node refers to.
struct Referred {
    level: u8,
    children: Vec<u64>,
    blobs: Vec<BlobRef>,
}

impl<'a> Access<'a> {
    /// Frees every page of the tree, which is marked as dropped and no longer in the catalog. The
    /// caller holds the gate: readers may still be about, changes not.
    ///
    /// A page goes before its children, so no reader gets to a child any more that is not there
    /// already, and those find out by its version.
    ///
    /// # Errors
    /// The first damage or failed read; what was not freed then stays unused for good.
    pub(crate) fn free_all(self, change: &Change<'_>) -> Result<()> {
        self.free_from(change, self.tree.root, u8::MAX)
    }

    /// Removes every entry: the root becomes an empty leaf, which readers see as one step, and the
    /// pages below it are freed. The caller holds the gate alone.
    ///
    /// # Errors
    /// As [`free_all`](Self::free_all); the tree is empty then, too, unless its root is damaged.
    pub(crate) fn clear(self, change: &Change<'_>) -> Result<()> {
        let mut root = self.pages.pool.fix_exclusive(self.tree.root)?;
        let referred = self.referred(&root, u8::MAX)?;
        apply(change, &mut root, Action::Raise { level: 0, child: 0 })?;
        drop(root);
        self.free_below(change, referred)
    }

    /// A page that is to be a value of this tree is something else, as far as that is known without
    /// reading it.
    fn is_foreign(self, blob: BlobRef) -> bool {
        self.pages.pool.fix_shared_resident(blob.page).is_some_and(|guard| {
            let kind = if blob.is_whole() { PageKind::Blob } else { PageKind::PieceIndex };
            page::kind_number(&guard) != kind as u8 || page::tree(&guard) != self.tree.id
        })
    }

    fn free_from(self, change: &Change<'_>, page: PageRef, level_max: u8) -> Result<()> {
        let guard = self.pages.pool.fix_exclusive(page)?;
        let referred = self.referred(&guard, level_max)?;
        self.free_page(change, guard);
        self.free_below(change, referred)
    }

    /// What a node of this tree, up to a level, refers to.
    fn referred(self, guard: &ExclusiveGuard<'a>, level_max: u8) -> Result<Referred> {
        let page = guard.page();
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(&guard[..]);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max || !node.is_of(self.tree.id, level) {
            // The page may be in use elsewhere, so it stays.
            let what = format!("it is no node of tree {} up to level {level_max}", self.tree.id);
            return Err(Error::damaged(page, what));
        }
        let mut referred = Referred { level, children: Vec::new(), blobs: Vec::new() };
        if level > 0 {
            for index in 0..=count {
                referred.children.push(node.child(index).map_err(torn)?);
            }
        } else {
            for index in 0..count {
                referred.blobs.extend(HeldLeaf::from(guard).value(index)?.blob());
            }
        }
        Ok(referred)
    }

    fn free_below(self, change: &Change<'_>, referred: Referred) -> Result<()> {
        let mut outcome = Ok(());
        for blob in referred.blobs {
            match self.is_foreign(blob) {
                true => {
                    let what = format!("it is no value of tree {}", self.tree.id);
                    outcome = outcome.and(Err(Error::damaged(blob.page, what)));
                }
                false => self.free_blob(change, blob),
            }
        }
        for child in referred.children {
            let freed = self.free_from(change, self.page(child), referred.level - 1);
            outcome = outcome.and(freed);
        }
        outcome
    }
}
