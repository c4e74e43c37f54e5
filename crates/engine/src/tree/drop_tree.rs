//! Frees all pages of a tree, to drop it or to clear it.
//!
//! Many pages are freed together. One record of the log says that they are free, and then each of
//! them is freed. No page is locked while the thread reads the next ones or waits for a lock,
//! because a reader may hold one page of the tree and wait for another one.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::atomic::Ordering;

use vellum_pool::{PageId, PageRef};

use super::TreeRef;
use super::lookup::LeafBytes;
use super::scan::Cursor;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::page::runs::PageRuns;
use crate::page::{self, PageKind};
use crate::store::pages::{Change, RANGES_MAX, record_ranges};
use crate::versions::{OldEntry, ValueRef, size_of};

/// Pages that one record will say are free.
struct PagesToFree {
    /// Nodes and their levels, each before the nodes below it.
    nodes: Vec<(PageRef, u8)>,
    /// The values of these nodes, or of nodes that are free.
    blobs: Vec<BlobRef>,
    /// The nodes, and the values on a page of their own.
    pages: BTreeMap<PageId, PageRef>,
    /// Why some pages of the tree stay unused: the first reason.
    outcome: Result<()>,
}

impl PagesToFree {
    fn new() -> PagesToFree {
        PagesToFree { nodes: vec![], blobs: vec![], pages: BTreeMap::new(), outcome: Ok(()) }
    }

    /// Adds a page, unless a damaged tree refers to it twice.
    fn add(&mut self, page: PageRef) -> bool {
        let is_new = self.pages.insert(page.id, page).is_none();
        if !is_new {
            self.note(Error::damaged(page, "its tree refers to it twice"));
        }
        is_new
    }

    fn note(&mut self, error: Error) {
        if self.outcome.is_ok() {
            self.outcome = Err(error);
        }
    }
}

/// The children and blobs to which a node refers.
struct References {
    level: u8,
    children: Vec<u64>,
    blobs: Vec<BlobRef>,
}

impl<'a> TreeRef<'a> {
    /// Frees every page of the tree. The caller has marked the tree as dropped, has removed it from
    /// the catalog, and has exclusive use of the store: there may be readers, but no changes.
    ///
    /// This frees a page before its children. So no new reader reaches a child, and a reader that
    /// has reached one already finds its version changed.
    ///
    /// The tree is gone already. So this has no error: pages that cannot be read stay allocated and
    /// unused, with those below them.
    pub(crate) fn free_all(self, change: &Change<'_>) {
        let mut to_free = PagesToFree::new();
        self.free_from(change, &mut to_free, self.root_page(), u8::MAX);
        self.free_rest(change, to_free);
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
        let references = self.references_of(LeafBytes::from(&root), u8::MAX)?;
        let mut group = self.group(change);
        group.replace(replaced);
        group.format_root(&mut root, 0, 0);
        group.end(&mut [&mut root])?;
        // Of the leaves that cannot be read, none is freed here, but each may get another use, even
        // in this tree.
        for popped in &self.state.popped_leaves {
            popped.store(0, Ordering::Relaxed);
        }
        drop(root);
        let mut to_free = PagesToFree::new();
        self.free_below(change, &mut to_free, references);
        self.free_rest(change, to_free);
        Ok(())
    }

    /// All entries of the tree, which a clear is about to remove, for views that still see them.
    ///
    /// # Errors
    /// [`Error::VersionsFull`], damage, a failed read.
    fn all_entries(self) -> Result<Vec<OldEntry>> {
        let (mut replaced, mut bytes) = (Vec::new(), 0);
        let mut cursor = Cursor::new(self);
        while let Some((page, leaf)) = cursor.next_leaf()? {
            let torn = |torn| Error::torn(page, torn);
            let (node, leaf) = (Node::new(leaf), LeafBytes { page, bytes: leaf });
            for index in 0..node.count().map_err(torn)? {
                let key = Key::from(&node.key(index).map_err(torn)?[..]);
                let old = Some(ValueRef::from(leaf.value(index)?).to_old());
                bytes += size_of(&key, &old);
                replaced.push(OldEntry { tree: self.state.id, key, old });
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
            page::kind_number(&guard) != kind as u8 || page::tree(&guard) != self.state.id
        })
    }

    /// Adds a node, which must belong to this tree and have at most `level_max`, and all that is
    /// below it.
    fn free_from(
        self,
        change: &Change<'_>,
        to_free: &mut PagesToFree,
        page: PageRef,
        level_max: u8,
    ) {
        let guard = self.pages.pool.fix_shared(page).map_err(Error::from);
        let read = guard.and_then(|guard| self.references_of(LeafBytes::from(&guard), level_max));
        let references = match read {
            Ok(references) => references,
            Err(error) => return to_free.note(error),
        };
        if !to_free.add(page) {
            return;
        }
        to_free.nodes.push((page, references.level));
        // The pool still has these nodes when they are freed.
        let in_pool = self.pages.pool.capacity() / u64::from(8 * page.frames);
        if to_free.nodes.len() as u64 >= in_pool.clamp(1, RANGES_MAX as u64 / 2) {
            self.free_now(change, to_free);
        }
        self.free_below(change, to_free, references);
    }

    /// The references of a node, which must belong to this tree and have at most `level_max`.
    fn references_of(self, bytes: LeafBytes<'_>, level_max: u8) -> Result<References> {
        let page = bytes.page;
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(bytes.bytes);
        let (level, count) = (node.level().map_err(torn)?, node.count().map_err(torn)?);
        if level > level_max || !node.is_of(self.state.id, level) {
            // The page may be in use elsewhere, so this thread does not free it.
            let what =
                format!("it is not a node of tree {} up to level {level_max}", self.state.id);
            return Err(Error::damaged(page, what));
        }
        let mut references = References { level, children: Vec::new(), blobs: Vec::new() };
        if level > 0 {
            for index in 0..=count {
                references.children.push(node.child(index).map_err(torn)?);
            }
        } else {
            for index in 0..count {
                references.blobs.extend(bytes.value(index)?.blob());
            }
        }
        Ok(references)
    }

    fn free_below(self, change: &Change<'_>, to_free: &mut PagesToFree, references: References) {
        for blob in references.blobs {
            if self.is_foreign(blob) {
                let what = format!("it is not a value of tree {}", self.state.id);
                to_free.note(Error::damaged(blob.page, what));
            } else if !blob.is_whole() || to_free.add(blob.page) {
                to_free.blobs.push(blob);
                if to_free.blobs.len() >= RANGES_MAX / 2 {
                    self.free_now(change, to_free);
                }
            }
        }
        for child in references.children {
            self.free_from(change, to_free, self.page(child), references.level - 1);
        }
    }

    /// Logs that these pages are free, frees them, and empties `to_free`. If the log has no room
    /// for the record, the pages are freed after the next checkpoint.
    fn free_now(self, change: &Change<'_>, to_free: &mut PagesToFree) {
        let (nodes, blobs) = (take(&mut to_free.nodes), take(&mut to_free.blobs));
        let mut runs = PageRuns::default();
        take(&mut to_free.pages).into_values().for_each(|page| runs.push(page));
        if let Err(error) = self.pages.log_freed(&record_ranges(runs.ranges())) {
            tracing::debug!("pages of the tree {:?} are freed later: {error}", self.state.name());
            return self.free_later(change, nodes, blobs);
        }
        for (page, level) in nodes {
            match self.pages.pool.fix_exclusive(page) {
                Ok(guard) if Node::new(&guard[..]).is_of(self.state.id, level) => {
                    self.free_page(change, guard);
                }
                Ok(_) => to_free.note(Error::damaged(page, "it has become a page of another tree")),
                Err(error) => to_free.note(error.into()),
            }
        }
        // Now no reader reaches a leaf that refers to them. The pages of values in pieces have
        // records of their own.
        blobs.into_iter().for_each(|blob| self.free_blob(change, blob));
    }

    /// Has these pages freed after the next checkpoint.
    fn free_later(self, change: &Change<'_>, nodes: Vec<(PageRef, u8)>, blobs: Vec<BlobRef>) {
        let mut unused = PageRuns::default();
        for (page, _) in nodes {
            self.forget_popped(page);
            // Its version changes, so that no thread goes on in it. A page that cannot be read was
            // not in memory, and no thread is in it.
            drop(self.pages.pool.fix_exclusive(page));
            unused.push(page);
        }
        self.pages.unlinked.add_reclaimable(unused);
        // A view or a reader may have a value.
        for blob in blobs {
            if blob.is_whole() {
                let unread = self.pages.unlinked.unlink(blob.page.id, blob.page.into());
                unread.into_iter().for_each(|page| self.pages.unlinked.add_reclaimable(page));
            } else {
                self.free_blob(change, blob);
            }
        }
    }

    /// Frees the last pages, and warns if not all pages of the tree could be freed.
    fn free_rest(self, change: &Change<'_>, mut to_free: PagesToFree) {
        self.free_now(change, &mut to_free);
        if let Err(error) = to_free.outcome {
            tracing::warn!("pages of the tree {:?} stay unused: {error}", self.state.name());
        }
    }
}
