//! Frees all pages of a tree, to drop it or to clear it.

use vellum_pool::{ExclusiveGuard, PageRef};

use super::Access;
use super::lookup::LeafBytes;
use super::scan::Cursor;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::page::{self, PageKind};
use crate::store::pages::Change;
use crate::versions::{Replaced, size_of};

/// The most bytes of a record of one range.
const RANGE_RECORD: usize = 64;

/// The children and blobs to which a node refers.
struct References {
    level: u8,
    children: Vec<u64>,
    blobs: Vec<BlobRef>,
}

impl<'a> Access<'a> {
    /// Frees every page of the tree. The caller has marked the tree as dropped, has removed it from
    /// the catalog, and has exclusive use of the store: there may be readers, but no changes.
    ///
    /// This frees a page before its children. So no new reader reaches a child, and a reader that
    /// has reached one already finds its version changed.
    ///
    /// The tree is gone already. So this has no error: pages that cannot be read stay allocated and
    /// unused, with those below them.
    pub(crate) fn free_all(self, change: &Change<'_>) {
        self.warn_unless_freed(self.free_from(change, self.root_page(), u8::MAX));
    }

    /// Removes all entries: makes the root an empty leaf, which readers see as one step, and frees
    /// the pages below it. The caller has exclusive use of the store.
    ///
    /// # Errors
    /// Too many old values, damage, a failed read. Then nothing has changed.
    pub(crate) fn clear(self, change: &Change<'_>) -> Result<()> {
        let replaced = match self.pages.versions.are_needed() {
            true => self.all_entries()?,
            false => Vec::new(),
        };
        let mut root = self.exclusive_root()?;
        let references = self.references_of(&root, u8::MAX)?;
        let mut group = self.group(change);
        group.replace(replaced);
        group.format_root(&mut root, 0, 0);
        group.end(&mut [&mut root])?;
        drop(root);
        self.warn_unless_freed(self.free_below(change, references));
        Ok(())
    }

    fn warn_unless_freed(self, freed: Result<()>) {
        if let Err(error) = freed {
            tracing::warn!("pages of the tree {:?} stay unused: {error}", self.tree.name());
        }
    }

    /// All entries of the tree, which a clear is about to remove, for views that still see them.
    ///
    /// # Errors
    /// [`Error::VersionsFull`], damage, a failed read.
    fn all_entries(self) -> Result<Vec<Replaced>> {
        let (mut replaced, mut bytes) = (Vec::new(), 0);
        let mut cursor = Cursor::new(self);
        while let Some((page, leaf)) = cursor.next_leaf()? {
            let torn = |torn| Error::torn(page, torn);
            let (node, leaf) = (Node::new(leaf), LeafBytes { page, bytes: leaf });
            for index in 0..node.count().map_err(torn)? {
                let key = Key::from(&node.key(index).map_err(torn)?[..]);
                let old = Some(leaf.value(index)?.into());
                bytes += size_of(&key, &old);
                replaced.push(Replaced { tree: self.tree.id, key, old });
            }
            self.pages.check_versions(bytes)?;
        }
        Ok(replaced)
    }

    /// Whether the page of a blob is known to be something else than a value of this tree. Reads no
    /// page.
    fn is_foreign(self, blob: BlobRef) -> bool {
        self.pages.pool.fix_shared_resident(blob.page).is_some_and(|guard| {
            let kind = if blob.is_whole() { PageKind::Blob } else { PageKind::PieceIndex };
            page::kind_number(&guard) != kind as u8 || page::tree(&guard) != self.tree.id
        })
    }

    /// Logs that a range is free. The change has room for the record: without that, other changes
    /// might lack the room that is kept for them.
    fn log_free(self, change: &Change<'_>, page: PageRef) -> Result<()> {
        change.next_group()?;
        self.pages.log_ranges(&[page], true)?;
        change.note_record(RANGE_RECORD);
        Ok(())
    }

    fn free_from(self, change: &Change<'_>, page: PageRef, level_max: u8) -> Result<()> {
        let guard = self.pages.pool.fix_exclusive(page)?;
        let references = self.references_of(&guard, level_max)?;
        self.log_free(change, page)?;
        self.free_page(change, guard);
        self.free_below(change, references)
    }

    /// The references of a node, which must belong to this tree and have at most `level_max`.
    fn references_of(self, guard: &ExclusiveGuard<'a>, level_max: u8) -> Result<References> {
        let page = guard.page();
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(&guard[..]);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max || !node.is_of(self.tree.id, level) {
            // The page may be in use elsewhere, so this thread does not free it.
            let what = format!("it is not a node of tree {} up to level {level_max}", self.tree.id);
            return Err(Error::damaged(page, what));
        }
        let mut references = References { level, children: Vec::new(), blobs: Vec::new() };
        if level > 0 {
            for index in 0..=count {
                references.children.push(node.child(index).map_err(torn)?);
            }
        } else {
            for index in 0..count {
                references.blobs.extend(LeafBytes::from(guard).value(index)?.blob());
            }
        }
        Ok(references)
    }

    fn free_below(self, change: &Change<'_>, references: References) -> Result<()> {
        let mut outcome = Ok(());
        for blob in references.blobs {
            match self.is_foreign(blob) {
                true => {
                    let what = format!("it is not a value of tree {}", self.tree.id);
                    outcome = outcome.and(Err(Error::damaged(blob.page, what)));
                }
                false => {
                    if blob.is_whole() {
                        self.log_free(change, blob.page)?;
                    }
                    self.free_blob(change, blob);
                }
            }
        }
        for child in references.children {
            let freed = self.free_from(change, self.page(child), references.level - 1);
            outcome = outcome.and(freed);
        }
        outcome
    }
}
