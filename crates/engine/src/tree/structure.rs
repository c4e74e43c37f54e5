//! Splits and merges: changes of a node, its neighbour and their parent.
//!
//! They are rare, so they go down with locks (`exclusive_pair`) and need no restarts. The root
//! keeps its page: when it is full its contents move to a new child, and when it has one child
//! left, that one's contents move up.

use vellum_pool::ExclusiveGuard;

use super::Access;
use super::apply::{Action, apply, init};
use super::lookup::{Pair, Target};
use crate::error::{Error, Result};
use crate::node::{Fences, Node, Payload, Torn, fits_merge, plan_split};
use crate::page::PageKind;
use crate::page::blob::BlobRef;
use crate::store::pages::Change;

/// Whether a node has the room that a change needs.
type HasRoom<'f> = &'f dyn Fn(Node<&[u8]>) -> Result<bool, Torn>;

/// What one attempt to split came to.
enum Outcome {
    /// The node was split, or has room already.
    Done,
    /// The root's contents moved down: now there is a parent to split with.
    Raised,
    /// The parent has no room for a separator of this length.
    ParentFull(usize),
}

/// What one attempt to merge came to.
enum Merged {
    Done,
    /// The parent lost a separator and may itself be merged.
    ParentUnderfull,
}

/// Leaves that one step of a removal drops at most: so long does it keep others from their parent.
const DROPPED_MAX: usize = 128;

/// What went with leaves that were dropped.
#[derive(Debug)]
pub(crate) struct Dropped {
    pub entries: u64,
    /// Nothing refers to them any more.
    pub blobs: Vec<BlobRef>,
    /// No key up to this one is left of them.
    pub upper: Vec<u8>,
}

impl<'a> Access<'a> {
    /// Splits the node of `level` for `key`, and its ancestors if need be, until it has room.
    pub(crate) fn make_room(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        has_room: HasRoom<'_>,
    ) -> Result<()> {
        let _alone = self.pages.structure_lock();
        self.make_room_alone(change, key, level, has_room)
    }

    fn make_room_alone(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        has_room: HasRoom<'_>,
    ) -> Result<()> {
        loop {
            match self.split_once(change, key, level, has_room)? {
                Outcome::Done => return Ok(()),
                Outcome::Raised => {}
                Outcome::ParentFull(len) => {
                    self.make_room_alone(change, key, level + 1, &|node| node.has_room(len, 0))?;
                }
            }
        }
    }

    fn split_once(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        has_room: HasRoom<'_>,
    ) -> Result<Outcome> {
        // Before anything is held: a thread that waits for a frame holds as little as possible.
        let mut spare = self.pages.pool.allocate(self.pages.page_frames)?;
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        init(change, &mut spare, kind, level, self.tree.id);
        let pair = match self.exclusive_pair(Target::Key(key), level) {
            Ok(Some(pair)) => pair,
            other => {
                self.free_page(change, spare);
                return other.map(|_| Outcome::Done);
            }
        };
        match self.split_pair(change, key, has_room, pair, &mut spare) {
            Ok((outcome, true)) => Ok(outcome),
            other => {
                self.free_page(change, spare);
                other.map(|(outcome, _)| outcome)
            }
        }
    }

    /// The outcome, and whether `spare` is in use now.
    fn split_pair(
        self,
        change: &Change<'_>,
        key: &[u8],
        has_room: HasRoom<'_>,
        mut pair: Pair<'a>,
        spare: &mut ExclusiveGuard<'a>,
    ) -> Result<(Outcome, bool)> {
        let place = pair.node.page();
        let torn = |torn| Error::torn(place, torn);
        let node = Node::new(&pair.node[..]);
        if has_room(node).map_err(torn)? {
            return Ok((Outcome::Done, false));
        }
        let Some((parent, index)) = &mut pair.parent else {
            let level = node.level().map_err(torn)?.checked_add(1).ok_or(torn(Torn))?;
            apply(change, spare, Action::Image { image: &pair.node })?;
            let child = spare.page().id.0;
            apply(change, &mut pair.node, Action::Raise { level, child })?;
            return Ok((Outcome::Raised, true));
        };
        let split = plan_split(node, key).map_err(torn)?;
        let parent_torn = |torn| Error::torn(parent.page(), torn);
        let len = split.separator.len();
        if !Node::new(&parent[..]).has_room(len, 0).map_err(parent_torn)? {
            return Ok((Outcome::ParentFull(len), false));
        }
        let child = Payload::Child(spare.page().id.0);
        apply(change, &mut pair.node, Action::SplitOff { left: &mut spare[..], split: &split })?;
        let insert = Action::Insert { index: *index, key: &split.separator, payload: child };
        apply(change, parent, insert)?;
        Ok((Outcome::Done, true))
    }

    /// Less than a third of the node is used.
    pub(crate) fn is_underfull(self, node: Node<&[u8]>) -> bool {
        let capacity = self.pages.limits.capacity;
        node.free_space().is_ok_and(|free| 3 * (capacity - free.min(capacity)) < capacity)
    }

    /// Merges the leaf for `key` with a neighbour if it is underfull, then its ancestors.
    pub(crate) fn merge(self, change: &Change<'_>, key: &[u8]) -> Result<()> {
        let _alone = self.pages.structure_lock();
        let mut level = 0;
        while let Merged::ParentUnderfull = self.merge_once(change, key, level)? {
            level += 1;
        }
        Ok(())
    }

    fn merge_once(self, change: &Change<'_>, key: &[u8], level: u8) -> Result<Merged> {
        let Some(Pair { parent: Some((mut parent, index)), node }) =
            self.exclusive_pair(Target::Key(key), level)?
        else {
            return Ok(Merged::Done);
        };
        if !self.is_underfull(Node::new(&node[..])) {
            return Ok(Merged::Done);
        }
        let parent_page = parent.page();
        let parent_torn = |torn| Error::torn(parent_page, torn);
        let count = Node::new(&parent[..]).count().map_err(parent_torn)?;
        if count == 0 {
            return self.pull_up(change, parent, node);
        }
        // The parent is held, so nobody who holds one of its children waits for another of them.
        let mut node = Some(node);
        for left in [index, index.wrapping_sub(1)] {
            if left >= count {
                continue;
            }
            let other = if left == index { index + 1 } else { left };
            let other = self.page(Node::new(&parent[..]).child(other).map_err(parent_torn)?);
            let Some(held) = node.take() else { break };
            if other == held.page() || other == parent_page {
                // To wait for it would be to wait for ever.
                return Err(Error::damaged(other, "it is referred to twice"));
            }
            // The tree only has one more page than it needs if others have that one now.
            let Some(other) = self.sibling(other, level)? else { return Ok(Merged::Done) };
            let (one, two) = if left == index { (held, other) } else { (other, held) };
            match self.merge_pair(change, &mut parent, left, one, two)? {
                Ok(right) if count == 1 => return self.pull_up(change, parent, right),
                Ok(_) => {
                    let underfull = self.is_underfull(Node::new(&parent[..]));
                    return Ok(if underfull { Merged::ParentUnderfull } else { Merged::Done });
                }
                Err((one, two)) => node = Some(if left == index { one } else { two }),
            }
        }
        Ok(Merged::Done)
    }

    /// Drops the leaves after that for `key`, which is empty, as far as they have the same parent
    /// and are in memory, and all of their keys are to go: `goes` tells for a key whether those up
    /// to it are. None if the leaf for `key` has entries or none of those after it can be dropped.
    ///
    /// The last of them stays as an empty leaf, with the keys of all of them. A leaf that is busy,
    /// or not what its parent says, ends the run: the caller comes to it by itself, and finds out.
    pub(crate) fn drop_leaves(
        self,
        change: &Change<'_>,
        key: &[u8],
        goes: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<Dropped>> {
        let _alone = self.pages.structure_lock();
        let Some(Pair { parent: Some((mut parent, first)), node: mut last }) =
            self.exclusive_pair(Target::Key(key), 0)?
        else {
            return Ok(None);
        };
        let parent_page = parent.page();
        let above = Node::new(&parent[..]);
        let torn = |torn| Error::torn(parent_page, torn);
        let count = above.count().map_err(torn)?;
        if first >= count {
            return Ok(None);
        }
        let upper = above.key(first).map_err(torn)?;
        let mut dropped = Dropped { entries: 0, blobs: Vec::new(), upper };
        let leaf = Node::new(&last[..]);
        if leaf.count() != Ok(0) || leaf.upper() != Ok(Some(&dropped.upper)) {
            return Ok(None);
        }
        let lower = leaf.lower().map(|key| key.map(<[u8]>::to_vec)).map_err(torn)?;
        let mut index = first;
        while index + 1 < count && index - first < DROPPED_MAX {
            // What was dropped before stays so, whatever comes now.
            let next = above.key(index + 1).and_then(|key| Ok((key, above.child(index + 1)?)));
            let Ok((upper, page)) = next.map(|(key, child)| (key, self.page(child))) else { break };
            let is_other = page != parent_page && page != last.page();
            if !goes(&upper) || !is_other || !self.pages.pool.is_resident(page) {
                break;
            }
            let Ok(Some(leaf)) = self.sibling(page, 0) else { break };
            let Ok(entries) =
                all_between(Node::new(&leaf[..]), &dropped.upper, &upper, &mut dropped.blobs)
            else {
                break;
            };
            dropped.entries += entries;
            dropped.upper = upper;
            self.free_page(change, std::mem::replace(&mut last, leaf));
            index += 1;
        }
        if index == first {
            return Ok(None);
        }
        let fences = Fences { lower: lower.as_deref(), upper: Some(&dropped.upper) };
        apply(change, &mut last, Action::Empty { fences })?;
        let indexes: Vec<usize> = (first..index).collect();
        apply(change, &mut parent, Action::RemoveAll { indexes: &indexes })?;
        Ok(Some(dropped))
    }

    /// Merges two neighbours if they fit one page; gives them back if they do not.
    #[allow(clippy::type_complexity)]
    fn merge_pair(
        self,
        change: &Change<'_>,
        parent: &mut ExclusiveGuard<'a>,
        index: usize,
        left: ExclusiveGuard<'a>,
        mut right: ExclusiveGuard<'a>,
    ) -> Result<Result<ExclusiveGuard<'a>, (ExclusiveGuard<'a>, ExclusiveGuard<'a>)>> {
        let mut separator = Vec::new();
        let torn = |torn| Error::torn(left.page(), torn);
        Node::new(&parent[..]).key_into(index, &mut separator).map_err(torn)?;
        // Keys are kept without what both fences begin with, so nodes with other fences than the
        // separator would come out with other keys. A device that lost a write leaves such nodes.
        let meet = Node::new(&left[..]).upper().map_err(torn)? == Some(&separator[..])
            && Node::new(&right[..]).lower().map_err(torn)? == Some(&separator[..]);
        if !meet {
            return Err(Error::fences(left.page()));
        }
        let fits = fits_merge(Node::new(&left[..]), Node::new(&right[..]), &separator);
        if !fits.map_err(torn)? {
            return Ok(Err((left, right)));
        }
        let merge = Action::MergeFrom { left: &left, separator: &separator };
        apply(change, &mut right, merge)?;
        apply(change, parent, Action::Remove { index })?;
        self.free_page(change, left);
        Ok(Ok(right))
    }

    /// A parent with one child left: if it is the root, the child's contents move up.
    fn pull_up(
        self,
        change: &Change<'_>,
        mut parent: ExclusiveGuard<'a>,
        child: ExclusiveGuard<'a>,
    ) -> Result<Merged> {
        if parent.page() != self.tree.root {
            return Ok(Merged::ParentUnderfull);
        }
        apply(change, &mut parent, Action::Image { image: &child })?;
        self.free_page(change, child);
        Ok(Merged::Done)
    }
}

/// The number of entries of a leaf between these fences. Their blobs come to `blobs`, unless the
/// leaf is damaged or another one.
fn all_between(
    leaf: Node<&[u8]>,
    lower: &[u8],
    upper: &[u8],
    blobs: &mut Vec<BlobRef>,
) -> Result<u64, Torn> {
    let count = leaf.count()?;
    if leaf.lower()? != Some(lower) || leaf.upper()? != Some(upper) {
        return Err(Torn);
    }
    for index in [0, count.saturating_sub(1)] {
        if index < count && !leaf.covers(&leaf.key(index)?)? {
            return Err(Torn);
        }
    }
    let before = blobs.len();
    let mut collect = |index| {
        let place = leaf.payload_place(index)?;
        if place.blob {
            blobs.push(BlobRef::decode(leaf.payload(place)?).ok_or(Torn)?);
        }
        Ok(())
    };
    let collected = (0..count).try_for_each(&mut collect);
    if collected.is_err() {
        blobs.truncate(before);
    }
    collected.map(|()| count as u64)
}
