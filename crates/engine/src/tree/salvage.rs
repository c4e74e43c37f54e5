//! Reads the entries that are left of a damaged tree.
//!
//! A walk goes down from the root. Below a damaged inner node it goes on at the nodes of the tree
//! to which no sound node refers, and which have keys of the damaged one (`store/orphans.rs`).

use std::collections::HashSet;

use vellum_pool::{PageId, PageRef};

use super::lookup::LeafBytes;
use super::{TreeRef, ValueReader};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::store::orphans::{Damaged, KeyBounds, Orphans, Segment, children};

/// The walk calls this with every entry that it can read, and with every damage. Returning false
/// ends the walk.
pub type Visit<'v> = &'v mut dyn FnMut(Result<(&[u8], &[u8])>) -> bool;

/// As [`Visit`], with values of any length.
pub type VisitReaders<'v> = &'v mut dyn FnMut(Result<(&[u8], ValueReader<'_>)>) -> bool;

/// As [`VisitReaders`], with what is known of each entry.
pub type VisitSalvaged<'v> = &'v mut dyn FnMut(Result<SalvagedEntry<'_>>) -> bool;

/// An entry of a damaged tree.
#[derive(Debug)]
#[non_exhaustive]
pub struct SalvagedEntry<'e> {
    /// Its key.
    pub key: &'e [u8],
    /// A reader of its value.
    pub value: ValueReader<'e>,
    /// Whether it is below a node that is not the root and has no sound parent.
    pub is_orphan: bool,
}

/// A root may have any level.
const ANY: Damaged = Damaged { level: u8::MAX, has_copies: false };

/// The walk knows so many damaged pages, so that it tells of each once.
const TOLD_MAX: usize = 1 << 20;

/// A walk over what is left of a tree.
///
/// The pages of the file may be from different times. The walk uses a page if it belongs to this
/// tree, and those of its entries whose keys are between its ancestors' separators. It divides the
/// keys below a damaged node between the nodes that have them. So each visited entry was in the
/// tree at some time, and is visited once.
///
/// Methods return false to end the walk.
struct Walk<'a, 'v> {
    tree: TreeRef<'a>,
    orphans: Option<&'a Orphans>,
    visit: VisitSalvaged<'v>,
    /// A tree has no more pages than its file. If the walk visits more, references form a cycle.
    pages_left: u64,
    told: HashSet<PageId>,
    in_orphan: bool,
}

impl<'a> TreeRef<'a> {
    /// Visits the readable entries of the tree in order, and skips damaged pages. Without `orphans`
    /// it skips what is below them, too. If the tree `is_lost`, its root is not known.
    pub(crate) fn salvage_entries(
        self,
        orphans: Option<&'a Orphans>,
        is_lost: bool,
        visit: VisitSalvaged<'_>,
    ) {
        let pages_left = self.pages.pool.file_pages();
        let told = HashSet::new();
        let mut walk = Walk { tree: self, orphans, visit, pages_left, told, in_orphan: false };
        let all = KeyBounds(None, None);
        match is_lost {
            false => walk.node(self.root_page(), ANY, all, all),
            true => walk.fill(ANY, all, None),
        };
    }

    /// As [`salvage_entries`](Self::salvage_entries), with entries alone.
    pub(crate) fn salvage_readers(self, orphans: Option<&Orphans>, visit: VisitReaders<'_>) {
        self.salvage_entries(orphans, false, &mut |found| {
            visit(found.map(|SalvagedEntry { key, value, .. }| (key, value)))
        });
    }

    /// As [`salvage_readers`](Self::salvage_readers), with values as slices. A value that does not
    /// fit into the pool is an error.
    pub(crate) fn salvage(self, orphans: Option<&Orphans>, visit: Visit<'_>) {
        self.salvage_readers(orphans, &mut |found| {
            let (key, reader) = match found {
                Ok(found) => found,
                Err(error) => return visit(Err(error)),
            };
            if let Some(value) = reader.as_slice() {
                return visit(Ok((key, value)));
            }
            match self.copy_of(reader) {
                Ok(value) => visit(Ok((key, &value))),
                Err(error) => visit(Err(error)),
            }
        });
    }

    /// Whether a node above the leaves is damaged, so that a salvage will need orphans. Reads no
    /// leaf, unless that is the root.
    ///
    /// # Errors
    /// The error of `progress`, which is called for each node.
    pub(crate) fn has_damaged_inner(
        self,
        progress: &mut dyn FnMut() -> Result<()>,
    ) -> Result<bool> {
        let mut left = self.pages.pool.file_pages();
        self.is_damaged_below(self.root_page(), u8::MAX, &mut left, progress)
    }

    fn is_damaged_below(
        self,
        page: PageRef,
        level_max: u8,
        left: &mut u64,
        progress: &mut dyn FnMut() -> Result<()>,
    ) -> Result<bool> {
        progress()?;
        let Ok(guard) = self.pages.pool.fix_shared(page) else { return Ok(true) };
        let node = Node::new(&guard[..]);
        let level = node.level().ok().filter(|level| *level <= level_max);
        let (Some(level), Some(fewer)) = (level, left.checked_sub(1)) else { return Ok(true) };
        *left = fewer;
        if !node.is_of(self.state.id, level) {
            return Ok(true);
        }
        let below = if level > 0 { children(&guard) } else { Ok(Vec::new()) };
        drop(guard);
        let Ok(below) = below else { return Ok(true) };
        for child in if level > 1 { &below[..] } else { &[] } {
            if self.is_damaged_below(self.page(child.page), level - 1, left, progress)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Walk<'_, '_> {
    /// Visits what is within `keys` below a node whose fences should be these. It may be damaged as
    /// `below` says.
    fn node(
        &mut self,
        page: PageRef,
        below: Damaged,
        fences: KeyBounds<'_>,
        keys: KeyBounds<'_>,
    ) -> bool {
        let Some(left) = self.pages_left.checked_sub(1) else {
            (self.visit)(Err(Error::damaged(page, "it is referred to twice")));
            return false;
        };
        self.pages_left = left;
        let bytes = match self.tree.pages.pool.fix_shared(page) {
            Ok(guard) => guard.to_vec(),
            Err(error) => return self.damaged(page, below, keys, error.into()),
        };
        let torn = |torn| Error::torn(page, torn);
        let (node, tree) = (Node::new(&bytes[..]), self.tree.state.id);
        let level = match node.level() {
            Ok(level) if level <= below.level && node.is_of(tree, level) => level,
            Ok(_) => {
                let what = format!("it is not a node of tree {tree} up to level {}", below.level);
                return self.damaged(page, below, keys, Error::damaged(page, what));
            }
            Err(error) => return self.damaged(page, below, keys, torn(error)),
        };
        match (node.lower(), node.upper()) {
            (Ok(lower), Ok(upper)) if KeyBounds(lower, upper) == fences => {}
            _ if !self.tell(page, Error::fences(page)) => return false,
            _ => {}
        }
        if level == 0 {
            let entries = self.leaf(page, &bytes, keys);
            return entries.unwrap_or_else(|error| self.tell(page, error));
        }
        let children = match children(&bytes) {
            Ok(children) => children,
            // The node itself may be a top.
            Err(error) => {
                let below = Damaged { level, has_copies: false };
                return self.damaged(page, below, keys, torn(error));
            }
        };
        // The walk has visited all keys up to this one.
        let mut done = None;
        for child in &children {
            let inside = child.keys().and(keys).and(KeyBounds(done, None));
            let (page, below) =
                (self.tree.page(child.page), Damaged { level: level - 1, has_copies: true });
            if inside.is_possible() && !self.node(page, below, child.keys(), inside) {
                return false;
            }
            done = done.max(child.keys().1);
        }
        true
    }

    /// Tells of a damaged node, and visits what is within `keys` below it.
    fn damaged(
        &mut self,
        page: PageRef,
        below: Damaged,
        keys: KeyBounds<'_>,
        error: Error,
    ) -> bool {
        self.tell(page, error) && (below.level == 0 || self.fill(below, keys, Some(page)))
    }

    /// Tells of a damaged page, unless it has.
    fn tell(&mut self, page: PageRef, error: Error) -> bool {
        if self.told.len() >= TOLD_MAX {
            self.told.clear();
        }
        !self.told.insert(page.id) || (self.visit)(Err(error))
    }

    /// Visits the keys of a gap, from the nodes below a damaged one to which no sound node refers.
    /// `told` is the damaged node that leaves the gap.
    fn fill(&mut self, below: Damaged, gap: KeyBounds<'_>, told: Option<PageRef>) -> bool {
        let (tree, Some(orphans)) = (self.tree.state.id, self.orphans) else { return true };
        let mut from = gap.0.map(Key::from);
        loop {
            let window = match orphans.window(tree, from.as_deref()) {
                Ok(window) => window,
                Err(error) => return (self.visit)(Err(error)),
            };
            let end = window.end_in(tree);
            let part = KeyBounds(from.as_deref(), gap.1).and(KeyBounds(None, end));
            let go_on = window.divide(tree, below, part, &mut |segment| match segment {
                Segment::Top(top, keys) => {
                    // The walk visits the nodes at the segment's ends in other segments, too.
                    self.pages_left += 2 + u64::from(top.level);
                    let is_root = top.keys() == KeyBounds(None, None);
                    let in_orphan = std::mem::replace(&mut self.in_orphan, !is_root);
                    // Or the walk would come back to it.
                    let below = Damaged { level: top.level, has_copies: false };
                    let go_on = self.node(top.page, below, top.keys(), keys);
                    self.in_orphan = in_orphan;
                    go_on
                }
                Segment::Hole(_, keys) if told.is_some() && keys == gap => true,
                Segment::Hole(near, keys) => {
                    let side = if keys.1.is_some() { "before" } else { "after" };
                    let near = near.or(told).unwrap_or(self.tree.root_page());
                    let what = format!("no page has the keys {side} it");
                    (self.visit)(Err(Error::damaged(near, what)))
                }
            });
            let end = end.filter(|end| gap.1.is_none_or(|upper| *end < upper));
            match (go_on, end) {
                (false, _) => return false,
                (true, None) => return true,
                (true, Some(end)) => from = Some(end.into()),
            }
        }
    }

    /// Visits the entries of a leaf that are within `keys`.
    fn leaf(&mut self, page: PageRef, bytes: &[u8], keys: KeyBounds<'_>) -> Result<bool> {
        let torn = |torn| Error::torn(page, torn);
        let (tree, leaf, mut key) = (self.tree, Node::new(bytes), Vec::new());
        for index in 0..leaf.count().map_err(torn)? {
            leaf.key_into(index, &mut key).map_err(torn)?;
            if !keys.has(&key) {
                continue;
            }
            let place = leaf.payload_place(index).map_err(torn)?;
            let payload = leaf.payload(place).map_err(torn)?;
            let value = match place.blob {
                false => Ok(ValueReader::inline(tree, payload.into())),
                true => {
                    let blob = LeafBytes { page, bytes: leaf.bytes() }.blob(payload);
                    let pin = |blob: BlobRef| tree.pages.pin(blob.page.id);
                    blob.and_then(|blob| tree.open_reader(blob, &key, pin(blob)))
                }
            };
            let is_orphan = self.in_orphan;
            let entry = value.map(|value| SalvagedEntry { key: &key, value, is_orphan });
            if !(self.visit)(entry) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
