//! Moves pages of a tree towards the front of the file, for [`Store::compact`].
//!
//! A move is a change of its own, and one group. A node goes to a new page, and its parent refers
//! to that page. A value goes to a new page, and its leaf refers to that one. A root goes to a new
//! page, and the catalog's entry of the tree names that one. So a crash leaves the page in the old
//! place or in the new one.
//!
//! A move changes no entry: it keeps no versions, and no transaction conflicts with it. A view that
//! reads a leaf before or after a move finds the same values.
//!
//! This thread allocates the new page before it takes a lock, as a split does: a thread that waits
//! for a frame should hold no pages. It takes locks as splits and merges do, from the root
//! downwards. So moves add no new cycle of waits. A root is the exception: this thread holds the
//! leaf of the catalog while it waits for the root, and waits only briefly.
//!
//! What a reader does that meets a page that has moved: a node was freed, so its version has
//! changed, and the reader starts again. The root's word has changed, too (`TreeState`). A value
//! stays where it was until its last reader has ended.
//!
//! [`Store::compact`]: crate::Store::compact

use vellum_pool::{ExclusiveGuard, PageRef, Space};

use super::group::{Group, init};
use super::lookup::{InnerNodes, LeafBytes, LeafValue, LockedPair, Target};
use super::modify::Incoming;
use super::{Cursor, TreeRef};
use crate::error::{Error, Result};
use crate::node::{Edit, Node, Payload};
use crate::page::PageKind;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::store::pages::Change;

/// Which pages move, and where to. A page always moves to the lowest free place that has room.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    /// Pages that do not end at or below this page move below it.
    Below(u64),
    /// Pages that do not end at or below this page move before their own place.
    Forward(u64),
}

impl Limit {
    /// The page at or below which `page` must end after it has moved. `None` if it stays.
    pub(crate) fn bound(self, page: PageRef) -> Option<u64> {
        let (from, bound) = match self {
            Limit::Below(goal) => (goal, goal),
            Limit::Forward(from) => (from, page.id.0),
        };
        (page.id.0 + u64::from(page.frames) > from).then_some(bound)
    }
}

/// The moves of one pass over the store.
pub(crate) struct Moves<'m> {
    pub limit: Limit,
    /// The frames that have moved.
    pub moved: u64,
    /// Is told how many more frames the pass has seen, and how many have moved in all. The thread
    /// holds no lock then. An error ends the pass.
    pub on_seen: &'m mut dyn FnMut(u64, u64) -> Result<()>,
}

impl Moves<'_> {
    pub(super) fn see(&mut self, frames: u64) -> Result<()> {
        (self.on_seen)(frames, self.moved)
    }
}

impl<'a> TreeRef<'a> {
    /// Moves the values that have pages of their own.
    ///
    /// # Errors
    /// Damage, failed reads and writes, a full log. What has moved until then has moved.
    pub(crate) fn move_values(self, moves: &mut Moves<'_>) -> Result<()> {
        let mut leaves = Cursor::new(self);
        while let Some((page, leaf)) = leaves.next_leaf()? {
            let values = values_of(LeafBytes { page, bytes: leaf })?;
            moves.see(u64::from(self.pages.page_frames))?;
            for (key, value) in values {
                match (value.is_whole(), moves.limit.bound(value.page)) {
                    (false, _) => self.move_pieces(&key, value, moves)?,
                    (true, Some(bound)) => moves.moved += self.move_value(&key, value, bound)?,
                    (true, None) => {}
                }
                moves.see(value.frames())?;
            }
        }
        Ok(())
    }

    /// Moves a value in one page below the page `bound`. Returns the number of frames that have
    /// moved: 0 if there is no room, or if the key has another value by now.
    fn move_value(self, key: &[u8], old: BlobRef, bound: u64) -> Result<u64> {
        let frames = self.pages.blob_frames(old.len.min(self.pages.max_blob()));
        let has_room = |space: &Space| space.has_room_below(frames.into(), bound);
        // A larger pool may have stored the value.
        if old.len > self.pages.max_blob() || !self.pages.pool.with_space(has_room) {
            return Ok(0);
        }
        let change = self.pages.change_to_free(0)?;
        self.check_dropped()?;
        // This thread holds the value to the end, so no other value gets its place meanwhile. If it
        // finds the same reference again, the value is the same.
        let Some((found, long)) = self.get_blob(key)? else { return Ok(0) };
        if found != old {
            return Ok(0);
        }
        let Some(page) = self.pages.pool.allocate_below(frames, bound)? else { return Ok(0) };
        let new = self.fill_blob(&change, page, key, Incoming::Bytes(&long.value))?;
        let replaced = self.replace_value(&change, key, old, new);
        drop(long);
        let unused = if let Ok(true) = replaced { old } else { new };
        self.free_blob(&change, unused);
        replaced.map(|replaced| if replaced { u64::from(frames) } else { 0 })
    }

    /// Has the leaf refer to `new` in place of `old`, the same value of `key`. Returns false if the
    /// leaf does not refer to `old`.
    fn replace_value(
        self,
        change: &Change<'_>,
        key: &[u8],
        old: BlobRef,
        new: BlobRef,
    ) -> Result<bool> {
        change.next_group()?;
        let mut leaf = self.exclusive_leaf(key)?;
        match LeafBytes::from(&leaf).find(key)? {
            Some((index, LeafValue::Blob(found))) if found == old => {
                self.replace_reference(change, &mut leaf, index, new, |_| {})?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Replaces the reference at `index` of a locked leaf, as one group. `with` adds to the group.
    pub(super) fn replace_reference(
        self,
        change: &Change<'_>,
        leaf: &mut ExclusiveGuard<'a>,
        index: usize,
        new: BlobRef,
        with: impl FnOnce(&mut Group<'_, 'a>),
    ) -> Result<()> {
        let mut group = self.group_without_versions(change);
        with(&mut group);
        let payload = new.encode();
        // A reference takes the place of one of the same length.
        let fits = group.edit(leaf, Edit::Replace { index, payload: Payload::Blob(&payload) });
        group.end(&mut [&mut *leaf])?;
        match fits {
            true => Ok(()),
            false => Err(Error::damaged(leaf.page(), "a reference does not fit in its own place")),
        }
    }

    /// Moves all nodes but the root.
    ///
    /// # Errors
    /// As [`move_values`](Self::move_values).
    pub(crate) fn move_nodes(self, moves: &mut Moves<'_>) -> Result<()> {
        let mut inner = InnerNodes::new(self);
        while let Some((guard, level)) = inner.next()? {
            let (page, node) = (guard.page(), Node::new(&guard[..]));
            let torn = |torn| Error::torn(page, torn);
            let upper = node.upper().map_err(torn)?.map(<[u8]>::to_vec);
            let (count, mut children) = (node.count().map_err(torn)?, Vec::new());
            for index in 0..=count {
                let child = self.page(node.child(index).map_err(torn)?);
                let Some(bound) = moves.limit.bound(child) else { continue };
                // A key that belongs to the child; `None` for the last node.
                let key = match index < count {
                    true => Some(node.key(index).map_err(torn)?),
                    false => upper.clone(),
                };
                children.push((key, bound, child));
            }
            drop(guard);
            moves.see(u64::from(self.pages.page_frames))?;
            let at_once = self.pages.pool.capacity() / 16 / u64::from(self.pages.page_frames);
            for (number, (key, bound, _)) in children.iter().enumerate() {
                // The reads of the next nodes go on together.
                if number.is_multiple_of((at_once as usize).max(1)) {
                    let next = children[number..].iter().take(at_once as usize);
                    let next: Vec<_> = next.map(|(.., page)| *page).collect();
                    self.pages.pool.evict_and_prefetch(&next);
                }
                let target = key.as_deref().map_or(Target::Last, Target::Key);
                moves.moved += self.move_node(target, level - 1, *bound, moves.limit)?;
                moves.see(0)?;
            }
        }
        Ok(())
    }

    /// Moves the node of `level` for `target` below the page `bound`. Returns the number of frames
    /// that have moved: 0 if there is no room, or if the node need not move any more.
    fn move_node(self, target: Target<'_>, level: u8, bound: u64, limit: Limit) -> Result<u64> {
        let change = self.pages.change_to_free(0)?;
        self.check_dropped()?;
        change.next_group()?;
        let _turn = self.pages.structure_lock();
        let frames = self.pages.page_frames;
        // Before this thread takes a lock: a thread that waits for a frame should hold no pages.
        let Some(mut new) = self.pages.pool.allocate_below(frames, bound)? else { return Ok(0) };
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        init(&change, &mut new, kind, level, self.state.id);
        let pair = match self.exclusive_pair(target, level) {
            Ok(Some(pair)) => pair,
            other => {
                self.free_page(&change, new);
                return other.map(|_| 0);
            }
        };
        let LockedPair { parent: Some((mut parent, index)), node } = pair else {
            // The tree has shrunk.
            self.free_page(&change, new);
            return Ok(0);
        };
        // Another change may have put another node there.
        if limit.bound(node.page()).is_none() || node.page().id < new.page().id {
            drop((node, parent));
            self.free_page(&change, new);
            return Ok(0);
        }
        let mut group = self.group_without_versions(&change);
        group.take(new.page());
        group.copy(&mut new, &node);
        group.edit(&mut parent, Edit::Replace { index, payload: Payload::Child(new.page().id.0) });
        group.free(node);
        group.end(&mut [&mut new, &mut parent])?;
        Ok(u64::from(frames))
    }

    /// Moves the root to `new`, a new page, and its number to the catalog, where `entry` becomes
    /// the entry of the tree, which has this name. Returns false if another thread holds the root,
    /// or if the root lies before `new`. The caller keeps the tree's name as it is, and is the only
    /// one who moves roots.
    pub(crate) fn move_root(
        self,
        change: &Change<'_>,
        catalog: TreeRef<'a>,
        (name, entry): (&[u8], &[u8]),
        new: &mut ExclusiveGuard<'a>,
    ) -> Result<bool> {
        change.next_group()?;
        let mut leaf = catalog.exclusive_leaf(name)?;
        let Some((index, LeafValue::Inline(old))) = LeafBytes::from(&leaf).find(name)? else {
            return Ok(false);
        };
        let is_as_long = old.len() == entry.len();
        let place = self.root_page();
        if place.id < new.page().id || !is_as_long {
            return Ok(false);
        }
        let Some(root) = self.pages.pool.fix_exclusive_briefly(place)? else { return Ok(false) };
        let mut group = self.group_without_versions(change);
        group.take(new.page());
        group.copy(new, &root);
        if !is_planted(StoreBug::LostRoot) {
            let payload = Payload::Inline(entry);
            let fits = group.edit(&mut leaf, Edit::Replace { index, payload });
            debug_assert!(fits, "the entry is as long as before");
        }
        group.remove_page(place);
        group.end(&mut [&mut *new, &mut leaf])?;
        // Before the old page is free: a reader that finds it free looks for the root again.
        self.state.set_root(new.page().id.0);
        self.free_page(change, root);
        Ok(true)
    }
}

/// The values of a leaf that have pages of their own, with their keys.
fn values_of(leaf: LeafBytes<'_>) -> Result<Vec<(Vec<u8>, BlobRef)>> {
    let torn = |torn| Error::torn(leaf.page, torn);
    let (node, mut values) = (Node::new(leaf.bytes), Vec::new());
    for index in 0..node.count().map_err(torn)? {
        if let LeafValue::Blob(value) = leaf.value(index)? {
            values.push((node.key(index).map_err(torn)?.to_vec(), value));
        }
    }
    Ok(values)
}
