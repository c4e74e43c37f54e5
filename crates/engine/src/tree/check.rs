//! Walks over a whole tree, to check it and to count its entries and pages.
//!
//! The walk knows the pages that it will visit next: the children of a node, and the blobs of a
//! leaf. So it starts the reads of some of them in advance.

use vellum_pool::{PAGE_SIZE, PageId, PageRef};

use super::lookup::InnerNodes;
use super::{Cursor, TreeRef};
use crate::error::{Error, Result};
use crate::node::{self, Node, PayloadPlace, Torn};
use crate::page;
use crate::page::blob::BlobRef;

/// Statistics of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TreeStat {
    /// Number of entries.
    pub entries: u64,
    /// Number of levels; 1 if the root is a leaf.
    pub height: u32,
    /// Pages with children.
    pub inner_pages: u64,
    /// Pages with entries.
    pub leaf_pages: u64,
    /// Values with pages of their own.
    pub blobs: u64,
    /// Bytes of the file that the pages of these values take.
    pub blob_page_bytes: u64,
    /// Bytes of all keys.
    pub key_bytes: u64,
    /// Bytes of all values, blobs included.
    pub value_bytes: u64,
    /// Bytes used in inner pages and leaves.
    pub used_bytes: u64,
    /// Total bytes of inner pages and leaves.
    pub page_bytes: u64,
}

impl TreeStat {
    fn count_node(&mut self, node: Node<&[u8]>, level: u8, len: usize) -> Result<(), Torn> {
        self.height = self.height.max(u32::from(level) + 1);
        self.page_bytes += len as u64;
        self.used_bytes += (len - node.free_space()?) as u64;
        match level {
            0 => self.leaf_pages += 1,
            _ => self.inner_pages += 1,
        }
        Ok(())
    }

    /// Counts an entry. Does not count its value if that is a blob.
    fn count_entry(
        &mut self,
        leaf: Node<&[u8]>,
        prefix: usize,
        index: usize,
    ) -> Result<PayloadPlace, Torn> {
        self.entries += 1;
        self.key_bytes += (prefix + leaf.suffix(index)?.len()) as u64;
        let place = leaf.payload_place(index)?;
        if !place.blob {
            self.value_bytes += place.len as u64;
        }
        Ok(place)
    }

    fn count_blob(&mut self, blob: BlobRef) {
        self.blobs += 1;
        self.value_bytes += blob.len;
        self.blob_page_bytes += blob.frames() * PAGE_SIZE as u64;
    }

    fn count_leaf(&mut self, leaf: Node<&[u8]>) -> Result<(), Torn> {
        let prefix = leaf.prefix_len()?;
        for index in 0..leaf.count()? {
            let place = self.count_entry(leaf, prefix, index)?;
            if place.blob {
                self.count_blob(BlobRef::decode(leaf.payload(place)?).ok_or(Torn)?);
            }
        }
        Ok(())
    }
}

/// Receives the pages and the damage that the walk meets. An error ends the walk.
pub(crate) trait Visitor {
    /// The walk has found a page of the tree. Returns false if the walk must not visit it.
    fn page(&mut self, page: PageRef) -> Result<bool>;
    /// The walk has found a page that is damaged or cannot be read. It does not visit the pages
    /// below it.
    fn damage(&mut self, error: Error) -> Result<()>;
}

/// Ends the walk at the first damage.
pub(crate) struct Strict {
    /// The number of pages that the walk may still visit. If it visits more pages than the file
    /// has, a page is referred to twice.
    pages_left: u64,
}

impl Strict {
    pub(crate) fn new(tree: TreeRef<'_>) -> Strict {
        Strict { pages_left: tree.pages.pool.file_pages() }
    }
}

impl Visitor for Strict {
    fn page(&mut self, page: PageRef) -> Result<bool> {
        let left = self.pages_left.checked_sub(1);
        self.pages_left = left.ok_or_else(|| Error::damaged(page, "it is referred to twice"))?;
        Ok(true)
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        Err(error)
    }
}

type Fence = Option<Vec<u8>>;

/// Pages that the walk visits one after the other, with read-ahead.
struct Row {
    pages: Vec<PageRef>,
    /// The number of pages whose reads were started.
    started: usize,
}

impl Row {
    /// The most frames to read ahead for a row: 4 MiB. A walk has a row for each level, so a row
    /// also takes at most a sixteenth of the pool.
    const FRAMES: u64 = 1024;

    fn new(pages: Vec<PageRef>) -> Row {
        Row { pages, started: 0 }
    }

    /// Starts the reads of the pages from `index` on, which the walk visits next. The visit reports
    /// errors.
    fn read_ahead_from(&mut self, index: usize, tree: TreeRef<'_>) {
        let pool = &tree.pages.pool;
        let mut left = (pool.capacity() / 16).min(Row::FRAMES);
        // Start reads only when less than half of the pages are ahead, so that many are started
        // together.
        let ahead = self.pages.get(index..self.started).unwrap_or_default();
        if ahead.iter().map(|page| u64::from(page.frames)).sum::<u64>() > left / 2 {
            return;
        }
        let fits = self.pages[index..].iter().take_while(|page| {
            let fits = left.checked_sub(u64::from(page.frames));
            left = fits.unwrap_or(0);
            fits.is_some()
        });
        let end = index + fits.count();
        if end > self.started {
            pool.evict_and_prefetch(&self.pages[self.started.max(index)..end]);
            self.started = end;
        }
    }
}

struct Walk<'a, 'v> {
    tree: TreeRef<'a>,
    visitor: &'v mut dyn Visitor,
    stat: TreeStat,
}

impl TreeRef<'_> {
    /// Counts entries and pages. Changes go on meanwhile, and each node counts as it is when it is
    /// read.
    pub(crate) fn count(self) -> Result<TreeStat> {
        let mut stat = TreeStat::default();
        let mut leaves = Cursor::new(self);
        while let Some((page, leaf)) = leaves.next_leaf()? {
            let (node, torn) = (Node::new(leaf), |torn| Error::torn(page, torn));
            stat.count_node(node, 0, leaf.len()).map_err(torn)?;
            stat.count_leaf(node).map_err(torn)?;
        }
        let mut inner = InnerNodes::new(self);
        while let Some((guard, level)) = inner.next()? {
            let counted = stat.count_node(Node::new(&guard[..]), level, guard.len());
            counted.map_err(|torn| Error::torn(guard.page(), torn))?;
        }
        Ok(stat)
    }

    /// Visits every page of the tree. The caller makes sure that the store does not change.
    pub(crate) fn check(self, visitor: &mut dyn Visitor) -> Result<TreeStat> {
        let mut walk = Walk { tree: self, visitor, stat: TreeStat::default() };
        walk.node(self.root_page(), None, (None, None))?;
        Ok(walk.stat)
    }
}

impl Walk<'_, '_> {
    /// Visits a node and the pages below it. Checks its level, if known, and its fences.
    fn node(&mut self, page: PageRef, level: Option<u8>, fences: (Fence, Fence)) -> Result<()> {
        if !self.visitor.page(page)? {
            return Ok(());
        }
        // A copy, so that the walk holds no lock while it visits other pages.
        let bytes = match self.tree.pages.pool.fix_shared(page) {
            Ok(guard) => guard.to_vec(),
            Err(error) => return self.visitor.damage(error.into()),
        };
        if let Err(what) = self.check_node(&bytes, level, &fences) {
            return self.visitor.damage(Error::damaged(page, what));
        }
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(&bytes[..]);
        let level = node.level().map_err(torn)?;
        self.stat.count_node(node, level, bytes.len()).map_err(torn)?;
        if level == 0 {
            return self.leaf(page, node);
        }
        let (mut lower, upper) = fences;
        let count = node.count().map_err(torn)?;
        let child = |index| Ok(PageRef { id: PageId(node.child(index).map_err(torn)?), ..page });
        let mut row = Row::new((0..=count).map(child).collect::<Result<_>>()?);
        for index in 0..=count {
            row.read_ahead_from(index, self.tree);
            let mut bound = upper.clone();
            if index < count {
                let mut key = Vec::new();
                node.key_into(index, &mut key).map_err(torn)?;
                bound = Some(key);
            }
            self.node(row.pages[index], Some(level - 1), (lower, bound.clone()))?;
            lower = bound;
        }
        Ok(())
    }

    fn check_node(
        &self,
        bytes: &[u8],
        level: Option<u8>,
        fences: &(Fence, Fence),
    ) -> Result<(), String> {
        node::check(bytes).map_err(|damage| damage.to_string())?;
        let (found, tree) = (bytes[page::LEVEL], self.tree.state.id);
        if page::tree(bytes) != tree {
            return Err(format!("it belongs to tree {}, not {tree}", page::tree(bytes)));
        }
        if let Some(level) = level.filter(|level| *level != found) {
            return Err(format!("its level is {found}, but {level} is expected"));
        }
        let node = Node::new(bytes);
        let lower = node.lower().map_err(|torn| torn.to_string())?;
        let upper = node.upper().map_err(|torn| torn.to_string())?;
        if lower != fences.0.as_deref() || upper != fences.1.as_deref() {
            return Err("its fences differ from the separators around it in its parent".into());
        }
        Ok(())
    }

    fn leaf(&mut self, page: PageRef, node: Node<&[u8]>) -> Result<()> {
        let torn = |torn| Error::torn(page, torn);
        let count = node.count().map_err(torn)?;
        let prefix = node.prefix_len().map_err(torn)?;
        let mut blobs = Vec::new();
        for index in 0..count {
            let place = self.stat.count_entry(node, prefix, index).map_err(torn)?;
            if !place.blob {
                continue;
            }
            let payload = node.payload(place).map_err(torn)?;
            match BlobRef::decode(payload) {
                Some(blob) => {
                    self.stat.count_blob(blob);
                    let mut key = Vec::new();
                    node.key_into(index, &mut key).map_err(torn)?;
                    blobs.push((blob, key));
                }
                None => {
                    let what = format!("the blob reference of entry {index} is invalid");
                    self.visitor.damage(Error::damaged(page, what))?;
                }
            }
        }
        let mut row = Row::new(blobs.iter().map(|(blob, _)| blob.page).collect());
        for (index, (blob, key)) in blobs.into_iter().enumerate() {
            row.read_ahead_from(index, self.tree);
            self.blob(blob, &key)?;
        }
        Ok(())
    }

    fn blob(&mut self, blob: BlobRef, key: &[u8]) -> Result<()> {
        if !blob.is_whole() {
            return self.tree.check_pieces(blob, key, self.visitor);
        }
        if !self.visitor.page(blob.page)? {
            return Ok(());
        }
        let checked = self.tree.check_whole(blob, key);
        checked.or_else(|error| self.visitor.damage(error))
    }
}
