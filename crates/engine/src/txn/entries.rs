//! Iterates over the entries of a range as a view sees them.
//!
//! The iterator copies one leaf at a time, and returns the leaf's entries, with two exceptions. Of
//! entries that other threads have changed since the view's time, the view sees the old values. Of
//! entries that its transaction has changed itself, it sees the transaction's values.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Bound, Range};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::key::Key;
use crate::node::{Node, PayloadPlace, Torn};
use crate::sync::lock;
use crate::tree::{Cursor, Direction, Target, TreeRef, is_after_start, is_before_end};
use crate::txn::view::View;
use crate::value::Value;
use crate::versions::{KeyBounds, OldValue, ReadSet, is_range};

/// The changes of one tree that a transaction has made: the new values, or `None` for removed ones.
pub(crate) type Changes = BTreeMap<Key, Option<Arc<[u8]>>>;

/// Iterates over the entries of a range in the order of their keys, from both ends, as a
/// [`Snapshot`](crate::Snapshot) or a [`Transaction`](crate::Transaction) sees them.
///
/// The iterator returns copies; [`next_entry`](ViewEntries::next_entry) does not copy short values.
/// It ends after an error, with one exception: after [`NeedsReader`](Error::NeedsReader), which is
/// about one long value, it goes on with the next entry. [`key`](ViewEntries::key) is the key of
/// that value then, for [`Snapshot::reader`](crate::Snapshot::reader) or
/// [`Transaction::reader`](crate::Transaction::reader).
#[derive(Debug)]
pub struct ViewEntries<'v> {
    view: &'v View,
    tree: TreeRef<'v>,
    changes: Option<&'v Changes>,
    /// Where the iterator notes what it has read.
    reads: Option<&'v Mutex<ReadSet>>,
    /// The range of the caller.
    bounds: KeyBounds,
    /// The part of the range that was not returned yet.
    left: KeyBounds,
    front: UnreadEntries<'v>,
    back: UnreadEntries<'v>,
    /// The key that either end has reached last.
    key: Vec<u8>,
    /// Whether the iterator returns empty values in the place of long ones.
    keys_only: bool,
    /// Whether the iterator has found the end of the range, or has failed.
    ended: bool,
    /// Whether the iterator has failed.
    failed: bool,
}

/// What one end of the iterator has not returned yet of the leaf that it has reached.
#[derive(Debug)]
struct UnreadEntries<'v> {
    /// Has the copy of the leaf.
    cursor: Cursor<'v>,
    /// The entries of the leaf.
    slots: Range<usize>,
    /// The entries that the view does not see as the leaf has them, in the order of their keys.
    others: VecDeque<Other>,
    /// Where the next leaf begins, as seen from this end; `None` after the last leaf.
    next: Option<Bound<Vec<u8>>>,
    has_begun: bool,
}

/// An entry as the view sees it, or `None` if the view does not see it.
type Other = (Key, Option<VersionValue>);

/// The bounds of all keys.
const EVERYTHING: KeyBounds = (Bound::Unbounded, Bound::Unbounded);

/// A key and its value.
type Entry<'v> = (Vec<u8>, Value<'v>);

/// A value that the view sees.
#[derive(Debug)]
enum Found<'v> {
    /// In the copy of the leaf.
    InLeaf(PayloadPlace),
    Own(Value<'v>),
}

/// The value of a key that a step has reached.
#[derive(Debug)]
enum Reached<'v> {
    Found(Found<'v>),
    /// To be looked up.
    Long,
}

/// A value that the leaf does not have.
#[derive(Debug)]
enum VersionValue {
    Inline(Arc<[u8]>),
    /// To be looked up when the entry is returned.
    Long,
}

impl<'v> ViewEntries<'v> {
    pub(crate) fn new(
        view: &'v View,
        tree: TreeRef<'v>,
        bounds: KeyBounds,
        changes: Option<&'v Changes>,
        reads: Option<&'v Mutex<ReadSet>>,
    ) -> ViewEntries<'v> {
        if let Some(reads) = reads {
            lock(reads).begin_iterator(tree.state.id);
        }
        let unread = |next: &Bound<Vec<u8>>| UnreadEntries {
            cursor: Cursor::new(tree),
            slots: 0..0,
            others: VecDeque::new(),
            next: Some(next.clone()),
            has_begun: false,
        };
        ViewEntries {
            view,
            tree,
            changes,
            reads,
            left: bounds.clone(),
            front: unread(&bounds.0),
            back: unread(&bounds.1),
            bounds,
            key: Vec::new(),
            keys_only: false,
            ended: false,
            failed: false,
        }
    }

    /// The keys alone. Reads no long values.
    pub(crate) fn keys(mut self) -> impl Iterator<Item = Result<Vec<u8>>> {
        self.keys_only = true;
        self.map(|entry| entry.map(|(key, _)| key))
    }

    /// The key of the entry that either end has reached last, or of the value whose length was the
    /// last error; empty before.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// The next entry from the start, valid until the next call: a short value is not copied. A
    /// long value pins memory of the pool, as a value from [`Tree::get`](crate::Tree::get) does.
    ///
    /// # Errors
    /// [`NeedsReader`](Error::NeedsReader) for a value that is too long for this pool: the next
    /// call goes on after it. Damage, a failed read, a pool that is full of guards.
    pub fn next_entry(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        self.lend(Direction::Forward)
    }

    /// As [`next_entry`](ViewEntries::next_entry), from the end.
    ///
    /// # Errors
    /// As `next_entry`.
    pub fn next_entry_back(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        self.lend(Direction::Backward)
    }

    fn lend(&mut self, direction: Direction) -> Result<Option<(&[u8], Value<'_>)>> {
        let Some(found) = self.advance(direction)? else { return Ok(None) };
        let value = match found {
            Found::InLeaf(place) => Value::Inline(Cow::Borrowed(self.in_leaf(direction, place)?)),
            Found::Own(value) => value,
        };
        Ok(Some((&self.key, value)))
    }

    fn copied(&mut self, direction: Direction) -> Result<Option<Entry<'v>>> {
        let Some(found) = self.advance(direction)? else { return Ok(None) };
        let value = match found {
            Found::InLeaf(place) => {
                Value::Inline(Cow::Owned(self.in_leaf(direction, place)?.to_vec()))
            }
            Found::Own(value) => value,
        };
        Ok(Some((self.key.clone(), value)))
    }

    /// A value of the leaf that this end has reached.
    fn in_leaf(&self, direction: Direction, place: PayloadPlace) -> Result<&[u8]> {
        let (page, bytes) = self.unread(direction).cursor.copied_leaf();
        Node::new(bytes).payload(place).map_err(|torn| Error::torn(page, torn))
    }

    fn unread(&self, direction: Direction) -> &UnreadEntries<'v> {
        match direction {
            Direction::Forward => &self.front,
            Direction::Backward => &self.back,
        }
    }

    /// Moves to the next entry. Its key is `key` then.
    fn advance(&mut self, direction: Direction) -> Result<Option<Found<'v>>> {
        if self.ended {
            return Ok(None);
        }
        let found = match direction {
            Direction::Forward => self.forward(),
            Direction::Backward => self.backward(),
        };
        self.failed =
            found.as_ref().is_err_and(|error| !matches!(error, Error::NeedsReader { .. }));
        self.ended = self.failed || matches!(found, Ok(None));
        found
    }

    fn forward(&mut self) -> Result<Option<Found<'v>>> {
        loop {
            while let Some(value) = self.step(Direction::Forward)? {
                if !is_before_end(&self.key, &self.left.1) {
                    return Ok(None);
                }
                exclude(&mut self.left.0, &self.key);
                if let Some(value) = self.look_up(value)? {
                    return Ok(Some(value));
                }
            }
            let Some(from) = self.front.next.take() else { return Ok(None) };
            self.front.next = self.load(Direction::Forward, from)?;
        }
    }

    fn backward(&mut self) -> Result<Option<Found<'v>>> {
        loop {
            while let Some(value) = self.step(Direction::Backward)? {
                if !is_after_start(&self.key, &self.left.0) {
                    return Ok(None);
                }
                exclude(&mut self.left.1, &self.key);
                if let Some(value) = self.look_up(value)? {
                    return Ok(Some(value));
                }
            }
            let Some(from) = self.back.next.take() else { return Ok(None) };
            self.back.next = self.load(Direction::Backward, from)?;
        }
    }

    /// Takes the next key of the leaf to `key`. Returns its value, or `None` within if the view
    /// sees none. `None` if the leaf has no more keys.
    fn step(&mut self, direction: Direction) -> Result<Option<Option<Reached<'v>>>> {
        let is_forward = direction == Direction::Forward;
        let unread = if is_forward { &mut self.front } else { &mut self.back };
        let (page, bytes) = unread.cursor.copied_leaf();
        let node = Node::new(bytes);
        let torn = |torn| Error::torn(page, torn);
        let slot = match is_forward {
            _ if unread.slots.is_empty() => None,
            true => Some(unread.slots.start),
            false => Some(unread.slots.end - 1),
        };
        if let Some(slot) = slot {
            node.key_into(slot, &mut self.key).map_err(torn)?;
        }
        let other = if is_forward { unread.others.front() } else { unread.others.back() };
        let order = match (slot, other) {
            (None, None) => return Ok(None),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(_), Some((other, _))) if is_forward => self.key[..].cmp(other),
            (Some(_), Some((other, _))) => other[..].cmp(&self.key),
        };
        // The leaf's entry comes first, or both have the same key.
        if order.is_le() {
            match is_forward {
                true => unread.slots.start += 1,
                false => unread.slots.end -= 1,
            }
        }
        if let (Ordering::Less, Some(slot)) = (order, slot) {
            let place = node.payload_place(slot).map_err(torn)?;
            return Ok(Some(Some(match place.blob || self.keys_only {
                true => Reached::Long,
                false => Reached::Found(Found::InLeaf(place)),
            })));
        }
        let other = if is_forward { unread.others.pop_front() } else { unread.others.pop_back() };
        let Some((key, seen)) = other else { return Ok(None) };
        self.key.clear();
        self.key.extend_from_slice(&key);
        Ok(Some(seen.map(|seen| match seen {
            VersionValue::Inline(value) => {
                Reached::Found(Found::Own(Value::Inline(Cow::Owned(value.to_vec()))))
            }
            VersionValue::Long => Reached::Long,
        })))
    }

    /// Looks a long value of `key` up, if values are wanted.
    fn look_up(&self, reached: Option<Reached<'v>>) -> Result<Option<Found<'v>>> {
        let value = match reached {
            None => None,
            Some(Reached::Found(found)) => return Ok(Some(found)),
            Some(Reached::Long) if self.keys_only => Some(Value::Inline(Cow::Borrowed(&[][..]))),
            Some(Reached::Long) => self.view.get(self.tree, &self.key)?,
        };
        Ok(value.map(Found::Own))
    }

    /// Loads the leaf where a scan of this direction goes on. Returns where the next one begins.
    fn load(
        &mut self,
        direction: Direction,
        from: Bound<Vec<u8>>,
    ) -> Result<Option<Bound<Vec<u8>>>> {
        let is_forward = direction == Direction::Forward;
        let unread = if is_forward { &mut self.front } else { &mut self.back };
        // The smallest key after the upper fence of a leaf belongs to the next leaf.
        let above = match &from {
            Bound::Excluded(key) if is_forward => [&key[..], &[0]].concat(),
            _ => Vec::new(),
        };
        let target = match &from {
            Bound::Excluded(_) if is_forward => Target::Key(&above),
            Bound::Included(key) | Bound::Excluded(key) => Target::Key(key),
            Bound::Unbounded if is_forward => Target::Key(&[]),
            Bound::Unbounded => Target::Last,
        };
        let came_from = std::mem::replace(&mut unread.has_begun, true).then_some(direction);
        let mut copied = unread.cursor.copy_leaf(target, came_from).map(drop);
        if matches!(copied, Err(Error::NoSuchTree(_))) {
            // The tree was dropped meanwhile. This view still sees it.
            self.tree = self.tree.at(self.view.time());
            unread.cursor = Cursor::new(self.tree);
            copied = unread.cursor.copy_leaf(target, came_from).map(drop);
        }
        copied?;
        let (page, bytes) = unread.cursor.copied_leaf();
        let node = Node::new(bytes);
        let torn = |torn| Error::torn(page, torn);
        let fence = if is_forward { node.upper() } else { node.lower() }.map_err(torn)?;

        // The part of the range that was not returned yet and that this leaf covers.
        let fence_or = |end: &Bound<Vec<u8>>, bound: fn(Vec<u8>) -> Bound<Vec<u8>>| {
            fence.map_or_else(|| end.clone(), |key| bound(key.to_vec()))
        };
        let covered = match is_forward {
            true => (from, fence_or(&self.left.1, Bound::Included)),
            false => (fence_or(&self.left.0, Bound::Excluded), from),
        };
        let next = fence.and_then(|key| match is_forward {
            true => is_before_end(key, &self.left.1).then(|| Bound::Excluded(key.to_vec())),
            false => is_after_start(key, &self.left.0).then(|| Bound::Included(key.to_vec())),
        });
        let slots = slots_in(node, &covered).map_err(torn)?;
        let (is_hidden, others) = self.others_in(&covered);
        let unread = if is_forward { &mut self.front } else { &mut self.back };
        unread.slots = if is_hidden { 0..0 } else { slots };
        unread.others = others;
        Ok(next)
    }

    /// What the view sees in the place of a leaf's entries, and whether it sees none of the others.
    /// The leaf was copied before: see `versions/mod.rs`.
    fn others_in(&self, (start, end): &KeyBounds) -> (bool, VecDeque<Other>) {
        let bounds = (start.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
        if !is_range(bounds) {
            return (false, VecDeque::new());
        }
        let tree = self.tree.state.id;
        let seen = self.view.versions().range_at(tree, bounds, self.view.time());
        let versions = seen.versions.into_iter().map(|(key, old)| {
            let old = old.map(|old| match old {
                OldValue::Inline(value) => VersionValue::Inline(value),
                OldValue::Blob(_) => VersionValue::Long,
            });
            (key, old)
        });
        let Some(own) = self.changes else { return (seen.is_hidden, versions.collect()) };
        let own = own.range::<[u8], _>(bounds);
        let own = own.map(|(key, value)| (key.clone(), value.clone().map(VersionValue::Inline)));
        // Of two with the same key, the transaction's own is later, so it stays.
        let merged: BTreeMap<Key, Option<VersionValue>> = versions.chain(own).collect();
        (seen.is_hidden, merged.into_iter().collect())
    }
}

/// Makes a bound exclude a key, in the memory of the key before.
fn exclude(bound: &mut Bound<Vec<u8>>, key: &[u8]) {
    match bound {
        Bound::Excluded(before) => {
            before.clear();
            before.extend_from_slice(key);
        }
        _ => *bound = Bound::Excluded(key.to_vec()),
    }
}

/// The entries of a leaf that are within the bounds.
fn slots_in(node: Node<&[u8]>, (start, end): &KeyBounds) -> Result<Range<usize>, Torn> {
    let count = node.count()?;
    // The number of the leaf's keys that come before `key`, or up to it.
    let before = |key: &[u8], with_it: bool| -> Result<usize, Torn> {
        let position = node.find(key)?;
        Ok(position.index + usize::from(with_it && position.exact))
    };
    let first = match start {
        Bound::Included(key) if node.covers(key)? => before(key, false)?,
        Bound::Excluded(key) if node.covers(key)? => before(key, true)?,
        // The leaf begins after the bound.
        _ => 0,
    };
    let end = match end {
        Bound::Included(key) if node.covers(key)? => before(key, true)?,
        Bound::Excluded(key) if node.covers(key)? => before(key, false)?,
        // The leaf ends before the bound.
        _ => count,
    };
    Ok(first..end.max(first))
}

impl<'v> Iterator for ViewEntries<'v> {
    type Item = Result<(Vec<u8>, Value<'v>)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.copied(Direction::Forward).transpose()
    }
}

impl DoubleEndedIterator for ViewEntries<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.copied(Direction::Backward).transpose()
    }
}

impl std::iter::FusedIterator for ViewEntries<'_> {}

impl Drop for ViewEntries<'_> {
    /// Notes the part of the range that the iterator has read.
    fn drop(&mut self) {
        let Some(reads) = self.reads else { return };
        let tree = self.tree.state.id;
        let mut reads = lock(reads);
        reads.end_iterator(tree);
        let (start, end) = std::mem::replace(&mut self.bounds, EVERYTHING);
        if self.ended && !self.failed {
            reads.note_range(tree, (start, end));
            return;
        }
        let (first, last) = std::mem::replace(&mut self.left, EVERYTHING);
        if let (true, Bound::Excluded(key)) = (self.front.has_begun, first) {
            reads.note_range(tree, (start, Bound::Included(key)));
        }
        if let (true, Bound::Excluded(key)) = (self.back.has_begun, last) {
            reads.note_range(tree, (Bound::Included(key), end));
        }
    }
}
