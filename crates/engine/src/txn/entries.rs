//! Iterates over the entries of a range as a view sees them.
//!
//! The iterator copies one leaf at a time, and then replaces what the view does not see: entries
//! that other threads have changed since the view's time, by their old values; and entries that the
//! transaction of the view has changed itself, by its own values.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::node::{Node, Torn};
use crate::store::versions::{KeyBounds, OldValue, ReadSet, is_range};
use crate::sync::lock;
use crate::tree::{Access, Cursor, Direction, Target, is_after_start, is_before_end};
use crate::txn::view::View;
use crate::value::Value;

/// The changes of one tree that a transaction has made: the new values, or `None` for removed ones.
pub(crate) type Changes = BTreeMap<Arc<[u8]>, Option<Arc<[u8]>>>;

/// Iterates over the entries of a range in the order of their keys, from both ends, as a
/// [`Snapshot`](crate::Snapshot) or a [`Transaction`](crate::Transaction) sees them.
///
/// The iterator returns copies. It ends after an error.
#[derive(Debug)]
pub struct ViewEntries<'v> {
    view: &'v View,
    access: Access<'v>,
    changes: Option<&'v Changes>,
    /// Where the iterator notes what it has read.
    reads: Option<&'v Mutex<ReadSet>>,
    /// The range of the caller.
    bounds: KeyBounds,
    /// The part of the range that was not returned yet.
    left: KeyBounds,
    front: Batch<'v>,
    back: Batch<'v>,
    /// Whether the iterator returns empty values in the place of long ones.
    keys_only: bool,
    ended: bool,
}

/// The entries of a leaf that one end of the iterator has reached.
#[derive(Debug)]
struct Batch<'v> {
    cursor: Cursor<'v>,
    /// In the order of the keys.
    entries: VecDeque<(Vec<u8>, Seen)>,
    /// Where the next leaf begins, as seen from this end; `None` after the last leaf.
    next: Option<Bound<Vec<u8>>>,
    has_begun: bool,
}

/// A key and its value.
type Entry<'v> = (Vec<u8>, Value<'v>);

/// A value as the iterator has found it.
#[derive(Debug)]
enum Seen {
    Inline(Vec<u8>),
    /// To be looked up when the entry is returned.
    Long,
}

impl<'v> ViewEntries<'v> {
    pub(crate) fn new(
        view: &'v View,
        access: Access<'v>,
        bounds: KeyBounds,
        changes: Option<&'v Changes>,
        reads: Option<&'v Mutex<ReadSet>>,
    ) -> ViewEntries<'v> {
        let batch = |next: &Bound<Vec<u8>>| Batch {
            cursor: Cursor::new(access),
            entries: VecDeque::new(),
            next: Some(next.clone()),
            has_begun: false,
        };
        ViewEntries {
            view,
            access,
            changes,
            reads,
            left: bounds.clone(),
            front: batch(&bounds.0),
            back: batch(&bounds.1),
            bounds,
            keys_only: false,
            ended: false,
        }
    }

    /// The keys alone. Reads no long values.
    pub(crate) fn keys(mut self) -> impl Iterator<Item = Result<Vec<u8>>> {
        self.keys_only = true;
        self.map(|entry| entry.map(|(key, _)| key))
    }

    fn forward(&mut self) -> Result<Option<Entry<'v>>> {
        loop {
            while let Some((key, seen)) = self.front.entries.pop_front() {
                if !is_before_end(&key, &self.left.1) {
                    return Ok(None);
                }
                self.left.0 = Bound::Excluded(key.clone());
                if let Some(value) = self.value(&key, seen)? {
                    return Ok(Some((key, value)));
                }
            }
            let Some(from) = self.front.next.take() else { return Ok(None) };
            self.front.next = self.load(Direction::Forward, from)?;
        }
    }

    fn backward(&mut self) -> Result<Option<Entry<'v>>> {
        loop {
            while let Some((key, seen)) = self.back.entries.pop_back() {
                if !is_after_start(&key, &self.left.0) {
                    return Ok(None);
                }
                self.left.1 = Bound::Excluded(key.clone());
                if let Some(value) = self.value(&key, seen)? {
                    return Ok(Some((key, value)));
                }
            }
            let Some(from) = self.back.next.take() else { return Ok(None) };
            self.back.next = self.load(Direction::Backward, from)?;
        }
    }

    fn value(&self, key: &[u8], seen: Seen) -> Result<Option<Value<'v>>> {
        match seen {
            Seen::Inline(value) => Ok(Some(Value::Inline(Cow::Owned(value)))),
            Seen::Long if self.keys_only => Ok(Some(Value::Inline(Cow::Borrowed(&[])))),
            Seen::Long => self.view.get(self.access, key),
        }
    }

    /// Loads the leaf where a scan of this direction goes on. Returns where the next one begins.
    fn load(
        &mut self,
        direction: Direction,
        from: Bound<Vec<u8>>,
    ) -> Result<Option<Bound<Vec<u8>>>> {
        let is_forward = direction == Direction::Forward;
        let batch = if is_forward { &mut self.front } else { &mut self.back };
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
        let came_from = std::mem::replace(&mut batch.has_begun, true).then_some(direction);
        let (page, bytes) = batch.cursor.copy_leaf(target, came_from)?;
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
        let entries = entries_of(node, &covered).map_err(torn)?;
        let entries = self.as_seen(entries, &covered);
        let batch = if is_forward { &mut self.front } else { &mut self.back };
        batch.entries = entries;
        Ok(next)
    }

    /// Replaces the entries of a leaf by those that the view sees. The leaf was copied before: see
    /// `store/versions.rs`.
    fn as_seen(
        &self,
        mut entries: VecDeque<(Vec<u8>, Seen)>,
        (start, end): &KeyBounds,
    ) -> VecDeque<(Vec<u8>, Seen)> {
        let bounds = (start.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
        if !is_range(bounds) {
            return entries;
        }
        let tree = self.access.tree.id;
        let seen = self.view.versions().range_at(tree, bounds, self.view.time());
        let changes = self.changes.into_iter().flat_map(|own| own.range::<[u8], _>(bounds));
        let mut changes = changes.peekable();
        if seen.is_hidden {
            entries.clear();
        }
        if seen.versions.is_empty() && changes.peek().is_none() {
            return entries;
        }
        let mut merged: BTreeMap<Vec<u8>, Seen> = entries.into_iter().collect();
        let mut set = |key: &[u8], value: Option<Seen>| match value {
            Some(value) => drop(merged.insert(key.to_vec(), value)),
            None => drop(merged.remove(key)),
        };
        for (key, old) in seen.versions {
            set(
                &key,
                old.map(|old| match old {
                    OldValue::Inline(value) => Seen::Inline(value.to_vec()),
                    OldValue::Blob(_) => Seen::Long,
                }),
            );
        }
        for (key, value) in changes {
            set(key, value.as_ref().map(|value| Seen::Inline(value.to_vec())));
        }
        merged.into_iter().collect()
    }

    fn advance(
        &mut self,
        step: fn(&mut ViewEntries<'v>) -> Result<Option<Entry<'v>>>,
    ) -> Option<Result<Entry<'v>>> {
        if self.ended {
            return None;
        }
        // The iterator ends if it finds no entry, or fails.
        self.ended = true;
        let found = step(self);
        self.ended = !matches!(found, Ok(Some(_)));
        found.transpose()
    }
}

/// The entries of a leaf that are within the bounds.
fn entries_of(
    node: Node<&[u8]>,
    (start, end): &KeyBounds,
) -> Result<VecDeque<(Vec<u8>, Seen)>, Torn> {
    let first = match start {
        Bound::Unbounded => 0,
        Bound::Included(key) | Bound::Excluded(key) if node.covers(key)? => node.find(key)?.index,
        Bound::Included(_) | Bound::Excluded(_) => 0,
    };
    let mut entries = VecDeque::new();
    for index in first..node.count()? {
        let key = node.key(index)?;
        if !is_after_start(&key, start) {
            continue;
        }
        if !is_before_end(&key, end) {
            break;
        }
        let place = node.payload_place(index)?;
        let seen = match place.blob {
            true => Seen::Long,
            false => Seen::Inline(node.payload(place)?.to_vec()),
        };
        entries.push_back((key, seen));
    }
    Ok(entries)
}

impl<'v> Iterator for ViewEntries<'v> {
    type Item = Result<(Vec<u8>, Value<'v>)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance(ViewEntries::forward)
    }
}

impl DoubleEndedIterator for ViewEntries<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.advance(ViewEntries::backward)
    }
}

impl std::iter::FusedIterator for ViewEntries<'_> {}

impl Drop for ViewEntries<'_> {
    /// Notes the part of the range that the iterator has read.
    fn drop(&mut self) {
        let Some(reads) = self.reads else { return };
        let mut reads = lock(reads);
        let ranges = reads.ranges.entry(self.access.tree.id).or_default();
        if self.ended {
            ranges.push(self.bounds.clone());
            return;
        }
        if let (true, Bound::Excluded(key)) = (self.front.has_begun, &self.left.0) {
            ranges.push((self.bounds.0.clone(), Bound::Included(key.clone())));
        }
        if let (true, Bound::Excluded(key)) = (self.back.has_begun, &self.left.1) {
            ranges.push((Bound::Included(key.clone()), self.bounds.1.clone()));
        }
    }
}
