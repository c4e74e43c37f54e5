//! Filling an empty tree with sorted entries.

use vellum_pool::PageId;

use super::apply::{Action, apply, init};
use super::modify::Incoming;
use super::page_runs::PageRuns;
use super::{Access, Cursor};
use crate::error::{Error, Result};
use crate::node::bulk::{BulkBuilder, PageSink};
use crate::node::{Node, Payload};
use crate::page::{LEVEL, PageKind};
use crate::store::core::Change;

/// How full leaves and inner pages become, in percent: room for a few later inserts.
const FILL: u8 = 95;

/// Merges that are tried on an empty tree of several pages; each takes away a leaf.
const COLLAPSE_TRIES: u32 = 1000;

/// Stores the builder's nodes in new pages, and remembers them.
struct Pages<'a> {
    access: Access<'a>,
    pages: PageRuns,
}

impl PageSink for Pages<'_> {
    type Error = Error;

    fn store(&mut self, image: &[u8]) -> Result<PageId> {
        let level = image[LEVEL];
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        let core = self.access.core;
        let change = core.change()?;
        let mut guard = core.pool.allocate(core.page_frames)?;
        let page = init(&change, &mut guard, kind, level, self.access.tree.id);
        self.pages.push(page);
        apply(&change, &mut guard, Action::Image { image })?;
        Ok(page.id)
    }
}

impl Drop for Pages<'_> {
    /// Frees everything again, unless it was installed: the load has failed, or its input panics.
    fn drop(&mut self) {
        if self.pages.is_empty() {
            return;
        }
        let Ok(_change) = self.access.core.change() else {
            tracing::warn!("the pages of a bulk load that failed stay unused");
            return;
        };
        for page in self.pages.iter() {
            if let Err(error) = self.access.core.pool.free_page(page) {
                tracing::warn!("{page} could not be freed and stays unused: {error}");
            }
        }
    }
}

impl Access<'_> {
    /// Loads sorted entries into an empty tree; returns how many. No change is under way while
    /// `sorted` runs: a checkpoint that comes between finds pages that nothing refers to yet.
    pub(crate) fn bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        sorted: impl Iterator<Item = Result<(K, V)>>,
    ) -> Result<u64> {
        let change = self.core.change()?;
        self.check_dropped()?;
        self.collapse(&change)?;
        drop(change);
        let pages = Pages { access: self, pages: PageRuns::default() };
        let page_len = self.page(0).bytes();
        let mut builder = BulkBuilder::new(pages, page_len, FILL);
        for entry in sorted {
            let (key, value) = entry?;
            self.load_entry(&mut builder, key.as_ref(), value.as_ref())?;
        }
        let entries = builder.entries();
        let (image, mut pages) = builder.finish().map_err(|(error, _)| error)?;
        let change = self.core.change()?;
        self.check_dropped()?;
        self.install(&change, &image)?;
        pages.pages.clear();
        Ok(entries)
    }

    fn load_entry(
        self,
        builder: &mut BulkBuilder<Pages<'_>>,
        key: &[u8],
        value: &[u8],
    ) -> Result<()> {
        if builder.last_key().is_some_and(|last| key <= last) {
            return Err(Error::NotSorted { entry: builder.entries() });
        }
        if !self.check_entry(key, value)? {
            return builder.push(key, Payload::Inline(value));
        }
        let change = self.core.change()?;
        let blob = self.store_blob(&change, key, Incoming::Bytes(value))?;
        drop(change);
        builder.sink().pages.push(blob.page);
        builder.push(key, Payload::Blob(&blob.encode()))
    }

    /// Makes a tree without entries a tree of one page, if it is not: a merge that found no frame
    /// leaves more.
    fn collapse(self, change: &Change<'_>) -> Result<()> {
        let mut tries = 0..COLLAPSE_TRIES;
        while !is_empty(&self.core.pool.fix_shared(self.tree.root)?) {
            if tries.next().is_none() || Cursor::new(self).first()? {
                return Err(Error::NotEmpty);
            }
            self.merge(change, &[])?;
        }
        Ok(())
    }

    /// Makes `image` the root, if the tree is still empty.
    fn install(self, change: &Change<'_>, image: &[u8]) -> Result<()> {
        let mut root = self.core.pool.fix_exclusive(self.tree.root)?;
        if !is_empty(&root) {
            return Err(Error::NotEmpty);
        }
        apply(change, &mut root, Action::Image { image }).map(drop)
    }
}

fn is_empty(root: &[u8]) -> bool {
    let node = Node::new(root);
    node.level() == Ok(0) && node.count() == Ok(0)
}
