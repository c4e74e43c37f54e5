//! Walking over a whole tree to check it and to count what it has.
//!
//! The walk knows which pages come next: the children of a node, and the blobs of a leaf. So it has
//! a part of them read while it looks at those before them.

use vellum_pool::{PageId, PageRef};

use super::Access;
use crate::error::{Error, Result};
use crate::node::{self, Node};
use crate::page;
use crate::page::blob::BlobRef;

/// What a tree has.
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
    /// Bytes of the file that these pages take.
    pub blob_page_bytes: u64,
    /// Bytes of all keys.
    pub key_bytes: u64,
    /// Bytes of all values, blobs included.
    pub value_bytes: u64,
    /// Bytes used in inner pages and leaves.
    pub used_bytes: u64,
    /// Bytes that inner pages and leaves have.
    pub page_bytes: u64,
}

/// Who is told of what the walk meets. An error ends the walk.
pub(crate) trait Visitor {
    /// A page that the tree refers to; false if it is not to be visited.
    fn page(&mut self, page: PageRef) -> Result<bool>;
    /// Whether blobs are to be read.
    fn reads_blobs(&self) -> bool {
        true
    }
    /// A page that is damaged or cannot be read; what is below it is not visited.
    fn damage(&mut self, error: Error) -> Result<()>;
}

/// Ends at the first damage.
pub(crate) struct Strict {
    reads_blobs: bool,
    /// Pages that may still come: more than the file has are a circle, or worse.
    pages_left: u64,
}

impl Strict {
    pub(crate) fn new(access: Access<'_>, reads_blobs: bool) -> Strict {
        Strict { reads_blobs, pages_left: access.core.pool.file_pages() }
    }
}

impl Visitor for Strict {
    fn page(&mut self, page: PageRef) -> Result<bool> {
        let left = self.pages_left.checked_sub(1);
        self.pages_left = left.ok_or_else(|| Error::damaged(page, "it is referred to twice"))?;
        Ok(true)
    }

    fn reads_blobs(&self) -> bool {
        self.reads_blobs
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        Err(error)
    }
}

type Fence = Option<Vec<u8>>;

/// Pages that are visited one after the other, and are read ahead.
struct Row {
    pages: Vec<PageRef>,
    /// The reads of so many of them were started.
    started: usize,
}

impl Row {
    /// The most frames that are on their way for a row: 4 MiB, or a sixteenth of the pool, since a
    /// walk has a row for each level.
    const FRAMES: u64 = 1024;

    fn new(pages: Vec<PageRef>) -> Row {
        Row { pages, started: 0 }
    }

    /// Is told that the page `index` comes next. What cannot be read is left to the visit.
    fn come_to(&mut self, index: usize, access: Access<'_>) {
        let pool = &access.core.pool;
        let mut left = (pool.capacity() / 16).min(Row::FRAMES);
        // Half of what may be ahead is: enough at a time to be worth a batch.
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
            pool.bring_in(&self.pages[self.started.max(index)..end]);
            self.started = end;
        }
    }
}

struct Walk<'a, 'v> {
    access: Access<'a>,
    visitor: &'v mut dyn Visitor,
    stat: TreeStat,
}

impl Access<'_> {
    /// Visits every page of the tree. Nothing may change meanwhile.
    pub(crate) fn check(self, visitor: &mut dyn Visitor) -> Result<TreeStat> {
        let mut walk = Walk { access: self, visitor, stat: TreeStat::default() };
        walk.node(self.tree.root, None, (None, None))?;
        Ok(walk.stat)
    }
}

impl Walk<'_, '_> {
    /// Visits a node and what is below it; its level and fences are known but for the root's.
    fn node(&mut self, page: PageRef, level: Option<u8>, fences: (Fence, Fence)) -> Result<()> {
        if !self.visitor.page(page)? {
            return Ok(());
        }
        // A copy, so that the walk holds no page while it visits others.
        let bytes = match self.access.core.pool.fix_shared(page) {
            Ok(guard) => guard.to_vec(),
            Err(error) => return self.visitor.damage(error.into()),
        };
        if let Err(what) = self.check_node(&bytes, level, &fences) {
            return self.visitor.damage(Error::damaged(page, what));
        }
        let torn = |torn| Error::torn(page, torn);
        let node = Node::new(&bytes[..]);
        let level = node.level().map_err(torn)?;
        self.count_node(node, level, bytes.len()).map_err(torn)?;
        if level == 0 {
            return self.leaf(page, node);
        }
        let (mut lower, upper) = fences;
        let count = node.count().map_err(torn)?;
        let child = |index| Ok(PageRef { id: PageId(node.child(index).map_err(torn)?), ..page });
        let mut row = Row::new((0..=count).map(child).collect::<Result<_>>()?);
        for index in 0..=count {
            row.come_to(index, self.access);
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
        let (found, tree) = (bytes[page::LEVEL], self.access.tree.id);
        if page::tree(bytes) != tree {
            return Err(format!("it belongs to tree {}, not {tree}", page::tree(bytes)));
        }
        if let Some(level) = level.filter(|level| *level != found) {
            return Err(format!("its level is {found}, but {level} is due"));
        }
        let node = Node::new(bytes);
        let lower = node.lower().map_err(|torn| torn.to_string())?;
        let upper = node.upper().map_err(|torn| torn.to_string())?;
        if lower != fences.0.as_deref() || upper != fences.1.as_deref() {
            return Err("its fences are not the separators beside it in its parent".into());
        }
        Ok(())
    }

    fn count_node(&mut self, node: Node<&[u8]>, level: u8, len: usize) -> Result<(), node::Torn> {
        let stat = &mut self.stat;
        stat.height = stat.height.max(u32::from(level) + 1);
        stat.page_bytes += len as u64;
        stat.used_bytes += (len - node.free_space()?) as u64;
        match level {
            0 => stat.leaf_pages += 1,
            _ => stat.inner_pages += 1,
        }
        Ok(())
    }

    fn leaf(&mut self, page: PageRef, node: Node<&[u8]>) -> Result<()> {
        let torn = |torn| Error::torn(page, torn);
        let count = node.count().map_err(torn)?;
        let prefix = node.prefix_len().map_err(torn)?;
        let mut blobs = Vec::new();
        for index in 0..count {
            self.stat.entries += 1;
            self.stat.key_bytes += (prefix + node.suffix(index).map_err(torn)?.len()) as u64;
            let place = node.payload_place(index).map_err(torn)?;
            if !place.blob {
                self.stat.value_bytes += place.len as u64;
                continue;
            }
            let payload = node.payload(place).map_err(torn)?;
            match BlobRef::decode(payload) {
                Some(blob) => {
                    let mut key = Vec::new();
                    node.key_into(index, &mut key).map_err(torn)?;
                    blobs.push((blob, key));
                }
                None => {
                    let what = format!("the blob reference of entry {index} makes no sense");
                    self.visitor.damage(Error::damaged(page, what))?;
                }
            }
        }
        let mut row = Row::new(blobs.iter().map(|(blob, _)| blob.page).collect());
        for (index, (blob, key)) in blobs.into_iter().enumerate() {
            if self.visitor.reads_blobs() {
                row.come_to(index, self.access);
            }
            self.blob(blob, &key)?;
        }
        Ok(())
    }

    fn blob(&mut self, blob: BlobRef, key: &[u8]) -> Result<()> {
        self.stat.blobs += 1;
        self.stat.value_bytes += blob.len;
        self.stat.blob_page_bytes += blob.page.bytes() as u64;
        if !self.visitor.page(blob.page)? || !self.visitor.reads_blobs() {
            return Ok(());
        }
        let checked = self.access.open_blob(blob, key).map(drop);
        checked.or_else(|error| self.visitor.damage(error))
    }
}
