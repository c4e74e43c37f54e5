//! Atomic changes of many entries, in any trees: the commit of a transaction.
//!
//! The thread writes long values to pages of their own. It finds all leaves that the transaction
//! changes. Then it locks them, in the order of trees and keys; if one has too little room, it
//! lets go of all, splits that leaf, and begins again. While it holds the leaves, it compares what
//! the transaction has read with the changes since, and keeps the old values for other views; both
//! in one step that no other commit interrupts. Last it changes the leaves, as one group with one
//! record in the log.
//!
//! Commits wait for leaves in one order, and for no other page while they hold leaves: a commit
//! that starves releases all of them, and waits with empty hands. So waits form no cycle. In a
//! small pool commits take turns with splits and merges, because together they might hold all of
//! its pages.

use std::ops::Range;

use vellum_log::BLOCK_BYTES;
use vellum_pool::{ExclusiveGuard, OptimisticGuard};

use super::TreeRef;
use super::lookup::{LeafBytes, Target, check_covers};
use super::modify::Incoming;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::{Edit, Node, NodeMut, Payload, Position, Torn, plan_split_for};
use crate::page::blob::{BLOB_REF, BlobRef};
use crate::store::pages::{Change, PageStore};
use crate::versions::{Conflicting, Replaced, Validation};

/// A record of the log has room for so many pages and values.
const PAGES_MAX: usize = u16::MAX as usize;

/// What a page takes in a record, beside its image or its edits.
const PAGE_BYTES: usize = 32;

/// What an edit takes in a record, beside its key and its payload.
const EDIT_BYTES: usize = 16;

/// A record that has only the images of leaves has so many.
const IMAGES_PER_RECORD: usize = 16;

/// A change of one entry.
pub(crate) struct Write<'w> {
    pub tree: TreeRef<'w>,
    pub key: &'w Key,
    /// The new value; `None` removes the entry.
    pub value: Option<&'w [u8]>,
}

/// The new value of a key, as a leaf stores it.
enum New<'w> {
    Removed,
    Inline(&'w [u8]),
    Blob([u8; BLOB_REF]),
}

impl New<'_> {
    fn payload(&self) -> Option<Payload<'_>> {
        match self {
            New::Removed => None,
            New::Inline(value) => Some(Payload::Inline(value)),
            New::Blob(reference) => Some(Payload::Blob(reference)),
        }
    }

    /// The length of the payload.
    fn len(&self) -> Option<usize> {
        match self {
            New::Removed => None,
            New::Inline(value) => Some(value.len()),
            New::Blob(reference) => Some(reference.len()),
        }
    }
}

/// A change of one entry of a leaf.
struct LeafWrite<'w> {
    tree: TreeRef<'w>,
    key: &'w Key,
    new: New<'w>,
}

impl LeafWrite<'_> {
    /// The edit that makes this change in a leaf in which the key has this position, if the leaf
    /// needs one.
    fn edit(&self, Position { index, exact }: Position) -> Option<Edit<'_>> {
        match (self.new.payload(), exact) {
            (None, false) => None,
            (None, true) => Some(Edit::Remove { index }),
            (Some(payload), true) => Some(Edit::Replace { index, payload }),
            (Some(payload), false) => Some(Edit::Insert { index, key: self.key, payload }),
        }
    }

    /// The most bytes that the entry takes in a leaf or in a record.
    fn bytes(&self) -> usize {
        EDIT_BYTES + self.key.len() + self.new.len().unwrap_or(0)
    }
}

/// A leaf that the transaction changes, and the numbers of its writes there.
struct LockedLeaf<'w> {
    guard: ExclusiveGuard<'w>,
    writes: Range<usize>,
}

/// The values that were written to pages of their own. They are freed unless the commit succeeds.
struct NewBlobs<'w, 'c> {
    change: &'c Change<'c>,
    blobs: Vec<(TreeRef<'w>, BlobRef)>,
}

impl Drop for NewBlobs<'_, '_> {
    fn drop(&mut self) {
        for (tree, blob) in self.blobs.drain(..) {
            tree.free_blob(self.change, blob);
        }
    }
}

/// Makes all of `count` changes, or none. They are sorted by the numbers of their trees, and by
/// their keys. If a validation is given, makes them only if what it names is unchanged. Returns the
/// number of the log's record; 0 without a log.
///
/// # Errors
/// [`Error::Conflict`], and all that a change can meet. Then nothing has changed.
pub(crate) fn commit<'w>(
    pages: &'w PageStore,
    change: &Change<'_>,
    validation: Option<Validation<'_>>,
    (count, writes): (usize, impl IntoIterator<Item = Write<'w>>),
) -> Result<u64> {
    let mut new_blobs = NewBlobs { change, blobs: Vec::new() };
    let mut leaf_writes = Vec::with_capacity(count);
    for Write { tree, key, value } in writes {
        let new = match value {
            None => New::Removed,
            Some(value) if tree.check_entry(key, value)? => {
                tree.check_dropped()?;
                let blob = tree.store_blob(change, key, Incoming::Bytes(value))?;
                new_blobs.blobs.push((tree, blob));
                New::Blob(blob.encode())
            }
            Some(value) => New::Inline(value),
        };
        leaf_writes.push(LeafWrite { tree, key, new });
    }
    if new_blobs.blobs.len() > PAGES_MAX {
        return Err(Error::TransactionTooLarge(format!(
            "it has more than {PAGES_MAX} long values"
        )));
    }
    let locked = lock_leaves(pages, change, &leaf_writes)?;
    let applied = apply(pages, change, validation, &leaf_writes, locked);
    pages.reclaim_versions(leaf_writes.len());
    let (lsn, old_blobs, underfull) = applied?;
    new_blobs.blobs.clear();
    for (tree, blob) in old_blobs {
        tree.free_blob(change, blob);
    }
    for (tree, key) in underfull {
        tree.merge_or_warn(change, key);
    }
    Ok(lsn)
}

/// Locks the leaves that the writes change, and finds the positions of the writes there. Each leaf
/// has room for its writes.
fn lock_leaves<'w>(
    pages: &'w PageStore,
    change: &Change<'_>,
    writes: &[LeafWrite<'w>],
) -> Result<(Vec<LockedLeaf<'w>>, Vec<Position>)> {
    // Other threads need frames, too.
    let most = (pages.pool.capacity() / u64::from(pages.page_frames) / 8).max(1);
    let most = usize::try_from(most).unwrap_or(usize::MAX).min(PAGES_MAX);
    'again: loop {
        let turn = pages.structure_lock();
        // Before this thread holds a leaf: it faults leaves in, and waits for other threads.
        let found = find_leaves(writes)?;
        let mut leaves: Vec<LockedLeaf<'w>> = Vec::with_capacity(found.len());
        let mut found = found.into_iter().peekable();
        for (number, write) in writes.iter().enumerate() {
            let found = found.next_if(|leaf| leaf.first == number);
            if let Some(leaf) = leaves.last_mut()
                && writes[leaf.writes.start].tree.state.id == write.tree.state.id
                && covers(&leaf.guard, write.key)?
            {
                leaf.writes.end = number + 1;
                continue;
            }
            if leaves.len() == most {
                return Err(Error::TransactionTooLarge(format!(
                    "it changes more than {most} leaves, an eighth of the pool"
                )));
            }
            write.tree.check_dropped()?;
            let page = found.as_ref().map(|leaf| leaf.guard.page());
            let guard = match found.map(|leaf| leaf.guard.upgrade()) {
                Some(Ok(guard)) => {
                    check_covers(&guard, guard.page(), write.key)?;
                    Some(guard)
                }
                // In a damaged tree this thread may hold the leaf, and would wait for itself.
                Some(Err(_)) if leaves.iter().any(|leaf| Some(leaf.guard.page()) == page) => None,
                // Another thread has changed the leaf, or evicted it.
                _ => write.tree.try_exclusive_leaf(write.key)?,
            };
            let Some(guard) = guard else {
                // Others go first: this thread waits for the leaf while it holds no other.
                drop((leaves, turn));
                drop(write.tree.exclusive_leaf(write.key)?);
                continue 'again;
            };
            leaves.push(LockedLeaf { guard, writes: number..number + 1 });
        }
        let mut positions = Vec::with_capacity(writes.len());
        for leaf in &leaves {
            let (held, writes) = (LeafBytes::from(&leaf.guard), &writes[leaf.writes.clone()]);
            if !find_positions(held, writes, &mut positions)? {
                drop((leaves, turn));
                make_room(change, writes)?;
                continue 'again;
            }
        }
        return Ok((leaves, positions));
    }
}

/// A leaf as it was before this thread has locked it.
struct FoundLeaf<'w> {
    guard: OptimisticGuard<'w>,
    /// The number of the first write in it.
    first: usize,
}

/// Finds the leaves that the writes change. Some may be missing.
fn find_leaves<'w>(writes: &[LeafWrite<'w>]) -> Result<Vec<FoundLeaf<'w>>> {
    let mut found = Vec::with_capacity(writes.len());
    let mut first = 0;
    while let Some(write) = writes.get(first) {
        let tree = write.tree;
        let leaf = tree.attempt(|| {
            let leaf = tree.leaf(Target::Key(write.key))?.node;
            let rest = writes[first + 1..].iter();
            let mut end = first + 1;
            for other in rest.take_while(|other| other.tree.state.id == tree.state.id) {
                if !tree.read(leaf, |node| node.covers(other.key))? {
                    break;
                }
                end += 1;
            }
            leaf.validate()?;
            Ok((leaf, end))
        })?;
        found.extend(leaf.map(|(guard, _)| FoundLeaf { guard, first }));
        first = leaf.map_or(first + 1, |(_, end)| end);
    }
    Ok(found)
}

/// Finds the positions of all writes in their leaf. Returns whether the leaf has room for them.
fn find_positions(
    leaf: LeafBytes<'_>,
    writes: &[LeafWrite<'_>],
    positions: &mut Vec<Position>,
) -> Result<bool> {
    let mut needed = 0;
    for write in writes {
        let position = leaf.position(write.key)?;
        positions.push(position);
        // A payload that is not longer takes the place of the old one.
        needed += match (write.new.len(), position.exact) {
            (None, _) => 0,
            (Some(len), true) if len <= leaf.payload_len(position.index)? => 0,
            _ => write.bytes(),
        };
    }
    let torn = |torn| Error::torn(leaf.page, torn);
    if needed <= Node::new(leaf.bytes).free_space().map_err(torn)? {
        return Ok(true);
    }
    has_room(leaf.bytes, writes).map_err(torn)
}

/// Splits leaves until each has room for the writes that belong there. The writes are of one tree.
/// Afterwards other threads may take the room.
fn make_room(change: &Change<'_>, mut writes: &[LeafWrite<'_>]) -> Result<()> {
    while let [first, ..] = writes {
        first.tree.split_as_planned(change, first.key, 0, &|node| {
            let here = covered(node, writes);
            if has_room(node.bytes(), here)? {
                return Ok(None);
            }
            let changes: Vec<_> =
                here.iter().map(|write| (&**write.key, write.new.len())).collect();
            plan_split_for(node, &changes).map(Some)
        })?;
        // A split takes a page before it looks at the leaf, so this thread looks before it splits.
        while let [first, ..] = writes {
            let leaf = first.tree.exclusive_leaf(first.key)?;
            let here = covered(Node::new(&leaf[..]), writes);
            if !has_room(&leaf, here).map_err(|torn| Error::torn(leaf.page(), torn))? {
                break;
            }
            writes = &writes[here.len()..];
        }
    }
    Ok(())
}

/// The first of the writes, of which there is one at least, and those after it that belong to the
/// same leaf.
fn covered<'s, 'w>(leaf: Node<&[u8]>, writes: &'s [LeafWrite<'w>]) -> &'s [LeafWrite<'w>] {
    let others = writes.iter().skip(1);
    &writes[..=others.take_while(|write| leaf.covers(write.key) == Ok(true)).count()]
}

fn covers(leaf: &ExclusiveGuard<'_>, key: &[u8]) -> Result<bool> {
    Node::new(&leaf[..]).covers(key).map_err(|torn| Error::torn(leaf.page(), torn))
}

/// Whether a leaf has room for all of these writes.
fn has_room(leaf: &[u8], writes: &[LeafWrite<'_>]) -> Result<bool, Torn> {
    let free = Node::new(leaf).free_space()?;
    if writes.iter().map(LeafWrite::bytes).sum::<usize>() <= free {
        return Ok(true);
    }
    // The sum does not count what the old values give back.
    let mut copy = leaf.to_vec();
    for write in writes {
        let position = Node::new(&copy[..]).find(write.key)?;
        if let Some(edit) = write.edit(position)
            && !NodeMut::new(&mut copy).edit(edit)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What remains to be done when the leaves are unlocked: old values to free, and keys of leaves
/// that are underfull.
type Rest<'w> = (u64, Vec<(TreeRef<'w>, BlobRef)>, Vec<(TreeRef<'w>, &'w [u8])>);

/// Changes the leaves, unless there is a conflict.
fn apply<'w>(
    pages: &'w PageStore,
    change: &Change<'_>,
    validation: Option<Validation<'_>>,
    writes: &[LeafWrite<'w>],
    (mut leaves, positions): (Vec<LockedLeaf<'w>>, Vec<Position>),
) -> Result<Rest<'w>> {
    make_room_for_record(pages, change, writes, &mut leaves)?;
    let is_alone = match validation {
        Some(validation) => pages.versions.validate_alone(validation).map_err(conflict)?,
        None => !pages.versions.are_kept(),
    };
    let mut replaced = Vec::with_capacity(if is_alone { 0 } else { writes.len() });
    let mut old_blobs = Vec::new();
    for leaf in &leaves {
        let held = LeafBytes::from(&leaf.guard);
        for number in leaf.writes.clone() {
            let (write, Position { index, exact }) = (&writes[number], positions[number]);
            let old = exact.then(|| held.value(index)).transpose()?;
            if old.is_none() && matches!(write.new, New::Removed) {
                continue;
            }
            old_blobs.extend(old.and_then(|old| Some((write.tree, old.blob()?))));
            if !is_alone {
                let (tree, key) = (write.tree.state.id, &**write.key);
                replaced.push(Replaced { tree, key, old: old.map(Into::into) });
            }
        }
    }
    if old_blobs.len() > PAGES_MAX {
        let what = format!("it replaces or removes more than {PAGES_MAX} long values");
        return Err(Error::TransactionTooLarge(what));
    }
    match validation {
        _ if is_alone => {}
        Some(validation) => {
            pages.keep_versions_unless_conflicting(validation, &replaced).map_err(conflict)?;
        }
        None => pages.keep_versions(&replaced),
    }

    let Some(first) = writes.first() else { return Ok((0, old_blobs, Vec::new())) };
    // From here on an error has the store refuse changes.
    let mut group = first.tree.group_without_versions(change);
    group.expect_pages(leaves.len());
    for leaf in &mut leaves {
        // How many entries the edits before this one have added to the leaf, and removed from it.
        let (mut added, mut removed) = (0, 0);
        for number in leaf.writes.clone() {
            let Position { index, exact } = positions[number];
            let position = Position { index: index + added - removed, exact };
            let Some(edit) = writes[number].edit(position) else { continue };
            added += usize::from(matches!(edit, Edit::Insert { .. }));
            removed += usize::from(matches!(edit, Edit::Remove { .. }));
            if !group.edit(&mut leaf.guard, edit) {
                let what = "it has less room than a moment ago";
                return Err(Error::damaged(leaf.guard.page(), what));
            }
        }
    }
    let mut guards: Vec<_> = leaves.iter_mut().map(|leaf| &mut leaf.guard).collect();
    let lsn = group.end(&mut guards)?;
    let mut underfull = Vec::new();
    for leaf in &leaves {
        let write = &writes[leaf.writes.start];
        if write.tree.is_underfull(Node::new(&leaf.guard[..])) {
            underfull.push((write.tree, &**write.key));
        }
    }
    Ok((lsn, old_blobs, underfull))
}

fn conflict(_: Conflicting) -> Error {
    Error::Conflict
}

/// Has room in the log for the record of a commit. If the record would be too long, logs the images
/// of leaves before, in records that change nothing, so that the record has only the edits.
fn make_room_for_record<'w>(
    pages: &PageStore,
    change: &Change<'_>,
    writes: &[LeafWrite<'w>],
    leaves: &mut [LockedLeaf<'w>],
) -> Result<()> {
    let Some(log) = &pages.redo_log else { return Ok(()) };
    let (mut edits, mut images, mut record) = (0, 0, 0);
    for leaf in &*leaves {
        let bytes = writes[leaf.writes.clone()].iter().map(LeafWrite::bytes).sum();
        let (bytes, image) =
            (PAGE_BYTES + leaf.guard.len().min(bytes), PAGE_BYTES + leaf.guard.len());
        let needs_image = log.needs_image(&leaf.guard);
        edits += bytes;
        images += if needs_image { image } else { 0 };
        record += if needs_image { image } else { bytes };
    }
    // With the ranges of pages that are taken and freed.
    let ranges = 2 * PAGE_BYTES * (writes.len() + 1);
    let (edits, record, most) = (edits + ranges, record + ranges, log.longest_record());
    if edits > most {
        return Err(Error::TransactionTooLarge(format!(
            "its record in the log may take {edits} bytes, and the longest has {most}"
        )));
    }
    // In the log a record takes heads of blocks, too, and may leave the rest of a block empty.
    if record <= most {
        return change.room_for((record + record / 32) as u64 + 2 * BLOCK_BYTES as u64);
    }
    let bytes = edits + images;
    change.room_for((bytes + bytes / 8) as u64 + 2 * BLOCK_BYTES as u64)?;
    log_images(change, writes, leaves)
}

/// Logs the images of the leaves that need one.
fn log_images<'w>(
    change: &Change<'_>,
    writes: &[LeafWrite<'w>],
    leaves: &mut [LockedLeaf<'w>],
) -> Result<()> {
    let Some(LeafWrite { tree, .. }) = writes.first() else { return Ok(()) };
    let mut images: Vec<_> = leaves
        .iter_mut()
        .map(|leaf| &mut leaf.guard)
        .filter(|guard| tree.needs_image(guard))
        .collect();
    for some in images.chunks_mut(IMAGES_PER_RECORD) {
        let mut group = tree.group_without_versions(change);
        some.iter().for_each(|page| group.log_image(page));
        group.end(some)?;
    }
    Ok(())
}
