//! Fills an empty tree with sorted entries.

use std::io::{self, Read};

use vellum_pool::{PAGE_SIZE, PageId, PageRef};

use super::group::init;
use super::load_pace::LoadPace;
use super::modify::Incoming;
use super::streams::ValueWriter;
use super::{Cursor, TreeRef};
use crate::error::{Error, Result};
use crate::node::bulk::{BulkBuilder, PageSink};
use crate::node::{Node, Payload};
use crate::page::runs::PageRuns;
use crate::page::{LEVEL, PAGE_HEADER, PageKind};
use crate::store::pages::{Change, record_ranges};

/// How full the loader makes inner nodes, in percent. They are few, and have room for the
/// separators of leaves that are split later. It fills leaves wholly: a few percent of room would
/// hold one entry or none, make the file longer, and save few splits.
const INNER_FILL: u8 = 90;

/// The most merges to try on a tree that has no entries but several pages. Each merge removes a
/// leaf.
const COLLAPSE_TRIES: u32 = 1000;

/// Stores the builder's nodes in new pages, which are unlinked until the tree has them, as those of
/// a value in pieces. The log gets no image of them.
#[derive(Debug)]
struct NewPages<'a> {
    tree: TreeRef<'a>,
    /// The number of the load in the list of unlinked pages.
    unlinked: u64,
    pace: LoadPace,
}

impl<'a> NewPages<'a> {
    fn new(tree: TreeRef<'a>) -> NewPages<'a> {
        let pages = tree.pages;
        NewPages { tree, unlinked: pages.unlinked.begin(), pace: LoadPace::new(&pages.pool) }
    }

    fn add(&self, page: PageRef) {
        self.tree.pages.unlinked.add_page(self.unlinked, page);
    }

    /// Before the load stores so many bytes. The caller has begun no change.
    fn rest_if_others_wait(&mut self, bytes: usize) {
        let pool = &self.tree.pages.pool;
        self.pace.step(pool, bytes.div_ceil(PAGE_SIZE) as u64);
    }

    fn all(&self) -> PageRuns {
        self.tree.pages.unlinked.pages(self.unlinked)
    }
}

impl PageSink for NewPages<'_> {
    type Error = Error;

    fn store(&mut self, image: &[u8]) -> Result<PageId> {
        let level = image[LEVEL];
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        let pages = self.tree.pages;
        self.rest_if_others_wait(image.len());
        let change = pages.change()?;
        let mut guard = pages.pool.allocate(pages.page_frames)?;
        let page = init(&change, &mut guard, kind, level, self.tree.state.id);
        self.add(page);
        guard[PAGE_HEADER..].copy_from_slice(&image[PAGE_HEADER..]);
        Ok(page.id)
    }
}

impl Drop for NewPages<'_> {
    /// Frees the pages if the load has failed, or if its input panicked. A load that succeeds has
    /// linked them.
    fn drop(&mut self) {
        self.tree.pages.abandon(self.unlinked);
    }
}

/// A bulk load. The caller pushes one entry after the other, with values of any length as streams.
/// Created by [`Tree::bulk_loader`](crate::Tree::bulk_loader).
///
/// [`finish`](BulkLoader::finish) adds all entries to the tree atomically. A loader that is dropped
/// before frees its pages. Between two calls no change is under way. A checkpoint that comes
/// between treats the pages as free, so a crash loses none of them.
#[derive(Debug)]
pub struct BulkLoader<'a> {
    tree: TreeRef<'a>,
    builder: BulkBuilder<NewPages<'a>>,
    /// The values in pieces. Their pages are unlinked until the tree has them.
    values: Vec<ValueWriter<'a>>,
    failed: bool,
}

impl<'a> BulkLoader<'a> {
    pub(crate) fn new(tree: TreeRef<'a>) -> Result<BulkLoader<'a>> {
        let change = tree.pages.change()?;
        tree.check_dropped()?;
        tree.collapse(&change)?;
        drop(change);
        let builder = BulkBuilder::new(NewPages::new(tree), tree.page(0).bytes(), INNER_FILL);
        Ok(BulkLoader { tree, builder, values: Vec::new(), failed: false })
    }

    /// The key of the last entry.
    pub fn last_key(&self) -> Option<&[u8]> {
        self.builder.last_key()
    }

    /// Adds the next entry, whose key must be greater than the last one.
    ///
    /// # Errors
    /// [`NotSorted`](Error::NotSorted), limits: then the loader skips the entry. A full disk or
    /// pool: then [`finish`](BulkLoader::finish) may fail, too.
    pub fn push(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.check_order(key)?;
        if !self.tree.check_entry(key, value)? {
            return self.add(key, Payload::Inline(value));
        }
        self.builder.sink().rest_if_others_wait(value.len());
        let change = self.tree.pages.change()?;
        let blob = self.tree.store_blob(&change, key, Incoming::Bytes(value))?;
        self.builder.sink().add(blob.page);
        // A new page of the tree is a change of its own.
        drop(change);
        self.add(key, Payload::Blob(&blob.encode()))
    }

    /// Adds the next entry, whose value is the rest of a stream, of any length. The loader keeps
    /// some pieces of a long value in memory at a time, as a [`ValueWriter`] does.
    ///
    /// # Errors
    /// As [`push`](BulkLoader::push); [`Input`](Error::Input) if the stream fails: then the loader
    /// skips the entry, too.
    pub fn push_from(&mut self, key: &[u8], mut value: impl Read) -> Result<()> {
        self.check_order(key)?;
        let mut writer = ValueWriter::new(self.tree, key)?;
        let copied = io::copy(&mut value, &mut writer);
        copied.map_err(|error| error.downcast().unwrap_or_else(Error::Input))?;
        let change = self.tree.pages.change()?;
        self.tree.check_dropped()?;
        let blob = writer.store_rest(&change)?;
        drop(change);
        let Some(blob) = blob else { return self.push(key, writer.buffered()) };
        self.builder.sink().rest_if_others_wait(writer.len() as usize);
        self.add(key, Payload::Blob(&blob.encode()))?;
        self.values.push(writer);
        Ok(())
    }

    fn check_order(&self, key: &[u8]) -> Result<()> {
        match self.last_key().is_some_and(|last| key <= last) {
            true => Err(Error::NotSorted { entry: self.builder.entries(), key: key.to_vec() }),
            false => Ok(()),
        }
    }

    fn add(&mut self, key: &[u8], payload: Payload<'_>) -> Result<()> {
        let added = self.builder.push(key, payload);
        self.failed |= added.is_err();
        added
    }

    /// Adds the entries to the tree. Returns their number.
    ///
    /// # Errors
    /// [`NotEmpty`](Error::NotEmpty) if another thread has put entries into the tree meanwhile; a
    /// full disk or pool, now or at an earlier call. Then the tree has none of the entries.
    pub fn finish(self) -> Result<u64> {
        if self.failed {
            return Err(Error::Input(io::Error::other("an earlier entry could not be stored")));
        }
        let entries = self.builder.entries();
        let (image, new) = self.builder.finish().map_err(|(error, _)| error)?;
        let (pages, runs) = (self.tree.pages, new.all());
        pages.write_unlogged(runs.iter())?;
        let change = pages.change()?;
        self.tree.check_dropped()?;
        let mut taken: Vec<_> = self.values.iter().flat_map(ValueWriter::ranges).collect();
        taken.extend(record_ranges(runs.ranges()));
        self.tree.install(&change, &image, &taken)?;
        self.values.iter().for_each(|value| value.link(&change));
        pages.unlinked.link(new.unlinked);
        pages.note_load(&change);
        Ok(entries)
    }
}

impl TreeRef<'_> {
    /// Loads sorted entries into an empty tree. Returns their number.
    pub(crate) fn bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        sorted: impl Iterator<Item = Result<(K, V)>>,
    ) -> Result<u64> {
        let mut loader = BulkLoader::new(self)?;
        for entry in sorted {
            let (key, value) = entry?;
            loader.push(key.as_ref(), value.as_ref())?;
        }
        loader.finish()
    }

    /// Reduces a tree without entries to one page. It may have more pages if an earlier merge
    /// failed.
    fn collapse(self, change: &Change<'_>) -> Result<()> {
        let mut tries = 0..COLLAPSE_TRIES;
        while !is_empty(&self.shared_root()?) {
            if tries.next().is_none() || Cursor::new(self).first()? {
                return Err(Error::NotEmpty);
            }
            self.merge(change, &[])?;
        }
        Ok(())
    }

    /// Makes `image` the root if the tree is still empty. It leads to these ranges of new pages.
    fn install(self, change: &Change<'_>, image: &[u8], new: &[PageRef]) -> Result<()> {
        let with = self.pages.log_most_taken(change, new)?;
        let mut root = self.exclusive_root()?;
        if !is_empty(&root) {
            return Err(Error::NotEmpty);
        }
        if self.pages.versions.are_kept() {
            self.pages.versions.keep_load(self.state.id);
        }
        let mut group = self.group(change);
        with.iter().for_each(|range| group.take(*range));
        group.copy(&mut root, image);
        group.end(&mut [&mut root]).map(drop)
    }
}

fn is_empty(root: &[u8]) -> bool {
    let node = Node::new(root);
    node.level() == Ok(0) && node.count() == Ok(0)
}
