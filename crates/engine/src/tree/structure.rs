//! Splits and merges: changes of a node, its sibling and their parent.
//!
//! They are rare, so a thread descends with locks (`exclusive_pair`) and needs no restarts. They
//! leave the root on its page. If it is full, its contents move to a new child. If it has only one
//! child left, the contents of that child move to the root.

use vellum_pool::ExclusiveGuard;

use super::TreeRef;
use super::group::init;
use super::lookup::{LockedPair, Target};
use crate::error::{Error, Result};
use crate::node::{Edit, Fences, Node, Part, Payload, Split, Torn, fits_merge, plan_split};
use crate::page::PageKind;
use crate::page::blob::BlobRef;
use crate::store::pages::Change;

/// Whether a node has enough room for a change.
type HasRoom<'f> = &'f dyn Fn(Node<&[u8]>) -> Result<bool, Torn>;

/// Where to split a node; `None` if it has enough room.
type PlanSplit<'f> = &'f dyn Fn(Node<&[u8]>) -> Result<Option<Split>, Torn>;

/// The result of one attempt to split.
enum SplitOutcome {
    /// The node was split, or has enough room already.
    Done,
    /// The contents of the root moved to a new child, which can be split now.
    RootGrew,
    /// The parent has no room for a separator of this length.
    ParentFull(usize),
}

/// The result of one attempt to merge.
enum MergeOutcome {
    Done,
    /// The parent has lost a separator and may be merged itself.
    ParentUnderfull,
}

/// The most leaves that a removal drops while it holds the lock on their parent.
const DROPPED_MAX: usize = 128;

/// A removal drops no more leaves once they have so many blobs: a record lists all of them.
const DROPPED_BLOBS_MAX: usize = 500;

/// The contents of the leaves that a removal has dropped.
#[derive(Debug)]
pub(crate) struct DroppedLeaves {
    pub entries: u64,
    /// Blobs to which nothing refers any more.
    pub blobs: Vec<BlobRef>,
    /// The upper fence of the last dropped leaf.
    pub upper: Vec<u8>,
}

impl<'a> TreeRef<'a> {
    /// Splits the node of `level` for `key`, and its ancestors if necessary, until it has room.
    pub(crate) fn make_room(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        has_room: HasRoom<'_>,
    ) -> Result<()> {
        self.split_as_planned(change, key, level, &|node| split_unless(has_room, node, key))
    }

    /// Splits the node of `level` for `key` as planned, and its ancestors if necessary.
    pub(crate) fn split_as_planned(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        plan: PlanSplit<'_>,
    ) -> Result<()> {
        let _turn = self.pages.structure_lock();
        self.make_room_in_turn(change, key, level, plan)
    }

    fn make_room_in_turn(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        plan: PlanSplit<'_>,
    ) -> Result<()> {
        loop {
            match self.split_once(change, key, level, plan)? {
                SplitOutcome::Done => return Ok(()),
                SplitOutcome::RootGrew => {}
                SplitOutcome::ParentFull(len) => {
                    let has_room: HasRoom<'_> = &|node| node.has_room(len, 0);
                    let plan: PlanSplit<'_> = &|node| split_unless(has_room, node, key);
                    self.make_room_in_turn(change, key, level + 1, plan)?;
                }
            }
        }
    }

    fn split_once(
        self,
        change: &Change<'_>,
        key: &[u8],
        level: u8,
        plan: PlanSplit<'_>,
    ) -> Result<SplitOutcome> {
        change.next_group()?;
        // Before this thread takes a lock: a thread that waits for a frame should hold no pages.
        let mut spare = self.pages.pool.allocate(self.pages.page_frames)?;
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        init(change, &mut spare, kind, level, self.state.id);
        let pair = match self.exclusive_pair(Target::Key(key), level) {
            Ok(Some(pair)) => pair,
            other => {
                self.free_page(change, spare);
                return other.map(|_| SplitOutcome::Done);
            }
        };
        match self.split_pair(change, plan, pair, &mut spare) {
            Ok((outcome, true)) => Ok(outcome),
            other => {
                self.free_page(change, spare);
                other.map(|(outcome, _)| outcome)
            }
        }
    }

    /// Splits a node whose parent is locked, too. Also returns whether it has used `spare`.
    fn split_pair(
        self,
        change: &Change<'_>,
        plan: PlanSplit<'_>,
        mut pair: LockedPair<'a>,
        spare: &mut ExclusiveGuard<'a>,
    ) -> Result<(SplitOutcome, bool)> {
        let place = pair.node.page();
        let torn = |torn| Error::torn(place, torn);
        let node = Node::new(&pair.node[..]);
        let Some(split) = plan(node).map_err(torn)? else {
            return Ok((SplitOutcome::Done, false));
        };
        let Some((parent, index)) = &mut pair.parent else {
            let level = node.level().map_err(torn)?.checked_add(1).ok_or(torn(Torn))?;
            let child = spare.page().id.0;
            let mut group = self.group(change);
            group.take(spare.page());
            group.copy(spare, &pair.node);
            group.format_root(&mut pair.node, level, child);
            group.end(&mut [spare, &mut pair.node])?;
            return Ok((SplitOutcome::RootGrew, true));
        };
        let kept = split.larger(node).map_err(torn)?;
        let parent_torn = |torn| Error::torn(parent.page(), torn);
        let len = split.separator.len();
        if !Node::new(&parent[..]).has_room(len, 0).map_err(parent_torn)? {
            return Ok((SplitOutcome::ParentFull(len), false));
        }
        let mut group = self.group(change);
        group.take(spare.page());
        // The record has an image of the new page. So that page gets the part with fewer slots.
        group.split_off(&mut pair.node, spare, &split, kept)?;
        let (old, new) = (Payload::Child(place.id.0), Payload::Child(spare.page().id.0));
        let left = if kept == Part::Left { old } else { new };
        let insert = Edit::Insert { index: *index, key: &split.separator, payload: left };
        if !group.edit(parent, insert) {
            return Err(Error::torn(parent.page(), Torn));
        }
        if kept == Part::Left {
            group.edit(parent, Edit::Replace { index: *index + 1, payload: new });
        }
        group.end(&mut [&mut pair.node, spare, parent])?;
        Ok((SplitOutcome::Done, true))
    }

    /// Whether less than a third of the node is used.
    pub(crate) fn is_underfull(self, node: Node<&[u8]>) -> bool {
        let capacity = self.pages.limits.capacity;
        node.free_space().is_ok_and(|free| 3 * (capacity - free.min(capacity)) < capacity)
    }

    /// Merges the leaf for `key` with a sibling if it is underfull, and then its ancestors.
    pub(crate) fn merge(self, change: &Change<'_>, key: &[u8]) -> Result<()> {
        let _turn = self.pages.structure_lock();
        let mut level = 0;
        while let MergeOutcome::ParentUnderfull = self.merge_once(change, key, level)? {
            level += 1;
        }
        Ok(())
    }

    fn merge_once(self, change: &Change<'_>, key: &[u8], level: u8) -> Result<MergeOutcome> {
        change.next_group()?;
        let Some(LockedPair { parent: Some((mut parent, index)), node }) =
            self.exclusive_pair(Target::Key(key), level)?
        else {
            return Ok(MergeOutcome::Done);
        };
        if !self.is_underfull(Node::new(&node[..])) {
            return Ok(MergeOutcome::Done);
        }
        let parent_page = parent.page();
        let parent_torn = |torn| Error::torn(parent_page, torn);
        let count = Node::new(&parent[..]).count().map_err(parent_torn)?;
        if count == 0 {
            return self.pull_up(change, parent, node);
        }
        // This thread holds the parent, so no other thread that holds one child waits for another
        // child.
        let mut node = Some(node);
        for left in [index, index.wrapping_sub(1)] {
            if left >= count {
                continue;
            }
            let other = if left == index { index + 1 } else { left };
            let other = self.page(Node::new(&parent[..]).child(other).map_err(parent_torn)?);
            let Some(held) = node.take() else { break };
            if other == held.page() || other == parent_page {
                // This thread holds that page, and would wait for itself.
                return Err(Error::damaged(other, "it is referred to twice"));
            }
            // If the sibling is busy, the tree only has one more page than it needs.
            let Some(other) = self.sibling(other, level)? else { return Ok(MergeOutcome::Done) };
            let (one, two) = if left == index { (held, other) } else { (other, held) };
            match self.merge_pair(change, &mut parent, left, one, two)? {
                Ok(right) if count == 1 => return self.pull_up(change, parent, right),
                Ok(_) => {
                    let underfull = self.is_underfull(Node::new(&parent[..]));
                    return Ok(if underfull {
                        MergeOutcome::ParentUnderfull
                    } else {
                        MergeOutcome::Done
                    });
                }
                Err((one, two)) => node = Some(if left == index { one } else { two }),
            }
        }
        Ok(MergeOutcome::Done)
    }

    /// Drops the leaves after the leaf for `key`, which is empty. It drops leaves while they have
    /// the same parent and are resident, and while all of their keys are to be removed:
    /// `is_removed` says for a key whether all keys up to it are to be removed. `None` if the leaf
    /// for `key` has entries, or if no leaf after it can be dropped.
    ///
    /// The last of these leaves stays as an empty leaf with the fences of all of them. A busy or
    /// damaged leaf ends the run. The caller reaches that leaf later, and meets the error there.
    pub(crate) fn drop_leaves(
        self,
        change: &Change<'_>,
        key: &[u8],
        is_removed: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<DroppedLeaves>> {
        if self.pages.versions.are_kept() {
            // The caller removes the entries leaf by leaf, which keeps their values.
            return Ok(None);
        }
        change.next_group()?;
        let _turn = self.pages.structure_lock();
        let Some(LockedPair { parent: Some((mut parent, first)), node: mut last }) =
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
        let mut dropped = DroppedLeaves { entries: 0, blobs: Vec::new(), upper };
        let leaf = Node::new(&last[..]);
        if leaf.count() != Ok(0) || leaf.upper() != Ok(Some(&dropped.upper)) {
            return Ok(None);
        }
        let lower = leaf.lower().map(|key| key.map(<[u8]>::to_vec)).map_err(torn)?;
        let (mut group, mut index) = (self.group(change), first);
        while index + 1 < count
            && index - first < DROPPED_MAX
            && dropped.blobs.len() < DROPPED_BLOBS_MAX
        {
            // An error here must not lose the leaves that were dropped before. So it only ends the
            // loop.
            let next = above.key(index + 1).and_then(|key| Ok((key, above.child(index + 1)?)));
            let Ok((upper, page)) = next.map(|(key, child)| (key, self.page(child))) else { break };
            let is_other = page != parent_page && page != last.page();
            if !is_removed(&upper) || !is_other || !self.pages.pool.is_resident(page) {
                break;
            }
            let Ok(Some(leaf)) = self.sibling(page, 0) else { break };
            let Ok(entries) = count_and_collect_blobs(
                Node::new(&leaf[..]),
                &dropped.upper,
                &upper,
                &mut dropped.blobs,
            ) else {
                break;
            };
            dropped.entries += entries;
            dropped.upper = upper;
            group.free(std::mem::replace(&mut last, leaf));
            index += 1;
        }
        if index == first {
            return Ok(None);
        }
        group.remove_value(dropped.blobs.iter().copied());
        let fences = Fences { lower: lower.as_deref(), upper: Some(&dropped.upper) };
        group.format_leaf(&mut last, fences);
        let indexes: Vec<usize> = (first..index).collect();
        group.edit(&mut parent, Edit::RemoveAll { indexes: &indexes });
        group.end(&mut [&mut last, &mut parent])?;
        Ok(Some(dropped))
    }

    /// Merges two siblings if they fit into one page, and returns the merged node. Otherwise
    /// returns both nodes.
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
        // Nodes store keys without their prefix. If a fence differs from the separator, the merge
        // would change the keys. The fences can differ if the device has lost a write.
        let meet = Node::new(&left[..]).upper().map_err(torn)? == Some(&separator[..])
            && Node::new(&right[..]).lower().map_err(torn)? == Some(&separator[..]);
        if !meet {
            return Err(Error::fences(left.page()));
        }
        let fits = fits_merge(Node::new(&left[..]), Node::new(&right[..]), &separator);
        if !fits.map_err(torn)? {
            return Ok(Err((left, right)));
        }
        let mut group = self.group(change);
        group.merge(&left, &mut right, &separator)?;
        group.edit(parent, Edit::Remove { index });
        group.free(left);
        group.end(&mut [&mut right, parent])?;
        Ok(Ok(right))
    }

    /// Moves the contents of an only child to its parent, if the parent is the root.
    fn pull_up(
        self,
        change: &Change<'_>,
        mut parent: ExclusiveGuard<'a>,
        child: ExclusiveGuard<'a>,
    ) -> Result<MergeOutcome> {
        if parent.page() != self.root_page() {
            return Ok(MergeOutcome::ParentUnderfull);
        }
        let mut group = self.group(change);
        group.copy(&mut parent, &child);
        group.free(child);
        group.end(&mut [&mut parent])?;
        Ok(MergeOutcome::Done)
    }
}

/// The split that makes room for one more entry with this key.
fn split_unless(
    has_room: HasRoom<'_>,
    node: Node<&[u8]>,
    key: &[u8],
) -> Result<Option<Split>, Torn> {
    (!has_room(node)?).then(|| plan_split(node, key)).transpose()
}

/// Checks that a leaf has these fences. Returns the number of its entries and adds their blobs to
/// `blobs`. After an error `blobs` is unchanged.
fn count_and_collect_blobs(
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
