//! Removes many entries, one leaf at a time: `retain`, `remove_range`, [`ExtractIf`].
//!
//! A callback decides in place, under the leaf's lock, which entries to remove. The thread then
//! removes them in one pass over the leaf. It reads a blob without a lock on the leaf. Before it
//! removes the entry, it checks that the leaf still refers to the blob.

use std::borrow::Cow;
use std::fmt;
use std::ops::Bound;

use vellum_pool::{ExclusiveGuard, OptimisticGuard};

use super::TreeRef;
use super::lookup::{LeafBytes, LeafValue};
use super::scan::is_before_end;
use crate::error::{Error, Result};
use crate::node::{Edit, Node};
use crate::page::blob::BlobRef;
use crate::store::pages::Change;
use crate::value::Value;

/// Which entries of a range to remove.
pub(crate) enum Selection<'f> {
    All,
    Unless(&'f mut dyn FnMut(&[u8], &[u8]) -> bool),
}

/// Where to resume after a leaf.
enum Resume {
    /// At the first entry whose key is not less than this key.
    Key(Vec<u8>),
    /// At this key, whose value is a blob that must be read for the decision.
    Blob(Vec<u8>),
    End,
}

/// The smallest possible key of a range.
fn first_key(start: Bound<Vec<u8>>) -> Vec<u8> {
    match start {
        Bound::Unbounded => Vec::new(),
        Bound::Included(key) => key,
        Bound::Excluded(key) => next_key(key),
    }
}

/// The smallest key that is greater than `key`.
fn next_key(mut key: Vec<u8>) -> Vec<u8> {
    key.push(0);
    key
}

impl<'a> TreeRef<'a> {
    /// Removes entries of a range. Returns their number.
    pub(crate) fn remove_range(
        self,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
        mut selection: Selection<'_>,
    ) -> Result<u64> {
        let (mut from, mut removed) = (first_key(start), 0);
        loop {
            let change = self.pages.change()?;
            self.check_dropped()?;
            let next = self.remove_from_leaf(&change, &from, &end, &mut selection, &mut removed)?;
            drop(change);
            from = match (next, &mut selection) {
                (Resume::Key(key), _) => key,
                (Resume::Blob(key), Selection::Unless(keep)) => {
                    let matches = |key: &[u8], value: &[u8]| !keep(key, value);
                    let outcome = self.remove_blob_if(&key, matches)?;
                    removed += u64::from(matches!(outcome, BlobOutcome::Removed(_)));
                    // If the value has become a short one meanwhile, decide again.
                    if let BlobOutcome::NoBlob = outcome { key } else { next_key(key) }
                }
                (Resume::End | Resume::Blob(_), _) => return Ok(removed),
            };
        }
    }

    /// Atomically removes the selected entries of the leaf for `from`.
    fn remove_from_leaf(
        self,
        change: &Change<'_>,
        from: &[u8],
        end: &Bound<Vec<u8>>,
        selection: &mut Selection<'_>,
        removed: &mut u64,
    ) -> Result<Resume> {
        let mut leaf = self.exclusive_leaf(from)?;
        let page = leaf.page();
        let torn = |torn| Error::torn(page, torn);
        let (held, node) = (LeafBytes::from(&leaf), Node::new(&leaf[..]));
        let (mut indexes, mut blobs, mut key) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = None;
        for index in held.position(from)?.index..node.count().map_err(torn)? {
            node.key_into(index, &mut key).map_err(torn)?;
            if !is_before_end(&key, end) {
                next = Some(Resume::End);
                break;
            }
            let goes = match (held.value(index)?, &mut *selection) {
                (held, Selection::All) => {
                    blobs.extend(held.blob());
                    true
                }
                (LeafValue::Inline(value), Selection::Unless(keep)) => {
                    !change.run_callback(|| keep(&key, value))
                }
                (LeafValue::Blob(_), Selection::Unless(_)) => {
                    next = Some(Resume::Blob(key.clone()));
                    break;
                }
            };
            if goes {
                indexes.push(index);
            }
        }
        let mut next = match next {
            Some(next) => next,
            None if node.upper_into(&mut key).map_err(torn)? => Resume::Key(next_key(key)),
            None => Resume::End,
        };
        if !indexes.is_empty() {
            self.remove_all(change, &mut leaf, &indexes)?;
            *removed += indexes.len() as u64;
            let is_empty = Node::new(&leaf[..]).count() == Ok(0);
            if let (Selection::All, Resume::Key(next), true) = (selection, &mut next, is_empty) {
                drop(leaf);
                self.drop_leaves_after(change, from, end, &mut blobs, next, removed);
                blobs.iter().for_each(|blob| self.free_blob(change, *blob));
                self.merge_or_warn(change, from);
            } else {
                self.after_removal(change, leaf, from, &blobs);
            }
        }
        Ok(next)
    }

    /// Drops the leaves after the leaf for `from`, which is empty, as far as all of their entries
    /// are to be removed. Sets `next` to the first key after them.
    fn drop_leaves_after(
        self,
        change: &Change<'_>,
        from: &[u8],
        end: &Bound<Vec<u8>>,
        blobs: &mut Vec<BlobRef>,
        next: &mut Vec<u8>,
        removed: &mut u64,
    ) {
        match self.drop_leaves(change, from, |key| is_before_end(key, end)) {
            Ok(None) => {}
            Ok(Some(dropped)) => {
                *removed += dropped.entries;
                blobs.extend(dropped.blobs);
                *next = next_key(dropped.upper);
            }
            Err(error) => {
                tracing::warn!("dropping leaves of tree {:?} failed: {error}", self.state.name());
            }
        }
    }

    /// Unlocks a leaf from which entries were removed, frees their blobs, and merges the leaf if it
    /// is underfull. `key` belongs to the leaf.
    pub(crate) fn after_removal(
        self,
        change: &Change<'_>,
        leaf: ExclusiveGuard<'a>,
        key: &[u8],
        blobs: &[BlobRef],
    ) {
        let underfull = self.is_underfull(Node::new(&leaf[..]));
        drop(leaf);
        for blob in blobs {
            self.free_blob(change, *blob);
        }
        if underfull {
            self.merge_or_warn(change, key);
        }
    }

    /// Merges the leaf for `key`. If that fails, the tree only has one more page than it needs.
    pub(crate) fn merge_or_warn(self, change: &Change<'_>, key: &[u8]) {
        if let Err(error) = self.merge(change, key) {
            tracing::warn!("merging pages of tree {:?} failed: {error}", self.state.name());
        }
    }

    /// Removes the entry of `key` if its value is a blob that `matches`.
    fn remove_blob_if(
        self,
        key: &[u8],
        mut matches: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<BlobOutcome<'a>> {
        while let Some((old, value)) = self.get_blob(key)? {
            if !matches(key, &value.value) {
                return Ok(BlobOutcome::Kept);
            }
            let change = self.pages.change()?;
            self.check_dropped()?;
            // This thread holds the blob, so no other blob gets its place: the same reference is
            // the same value.
            let mut leaf = self.exclusive_leaf(key)?;
            if let Some((index, LeafValue::Blob(blob))) = LeafBytes::from(&leaf).find(key)?
                && blob == old
            {
                let expected = self.expect_change(key);
                self.edit(&change, &mut leaf, expected, Edit::Remove { index })?;
                self.after_removal(&change, leaf, key, &[old]);
                return Ok(BlobOutcome::Removed(value.value));
            }
        }
        Ok(BlobOutcome::NoBlob)
    }
}

/// What happened to an entry whose value was a blob.
enum BlobOutcome<'a> {
    Removed(Value<'a>),
    Kept,
    /// The entry was removed, or its value is no longer a blob.
    NoBlob,
}

/// Removes and returns the entries of a range that a callback chooses, in the order of their keys.
/// Each call of `next` removes one entry. Entries that the iterator has not reached stay.
///
/// Keys and values are copies. Each step is atomic, the whole is not: other changes can come
/// between two steps. The iterator ends after an error.
#[must_use = "the iterator removes nothing unless it is used"]
pub struct ExtractIf<'a, F: FnMut(&[u8], &[u8]) -> bool> {
    tree: TreeRef<'a>,
    chosen: F,
    /// The smallest key that the iterator has not checked.
    from: Vec<u8>,
    end: Bound<Vec<u8>>,
    /// The leaf that the iterator has reached, and the index of the next entry there.
    place: Option<(OptimisticGuard<'a>, usize)>,
    /// Whether the iterator has removed entries of that leaf.
    removed: bool,
    ended: bool,
}

impl<F: FnMut(&[u8], &[u8]) -> bool> fmt::Debug for ExtractIf<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExtractIf { tree, from, end, ended, .. } = self;
        let tree = &tree.state.name();
        f.debug_struct("ExtractIf")
            .field("tree", tree)
            .field("from", from)
            .field("end", end)
            .field("ended", ended)
            .finish_non_exhaustive()
    }
}

type Entry<'a> = (Vec<u8>, Value<'a>);

impl<'a, F: FnMut(&[u8], &[u8]) -> bool> ExtractIf<'a, F> {
    pub(crate) fn new(
        tree: TreeRef<'a>,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
        chosen: F,
    ) -> ExtractIf<'a, F> {
        let from = first_key(start);
        ExtractIf { tree, chosen, from, end, place: None, removed: false, ended: false }
    }

    fn next_entry(&mut self) -> Result<Option<Entry<'a>>> {
        loop {
            let tree = self.tree;
            let change = tree.pages.change()?;
            tree.check_dropped()?;
            let (found, next) = self.extract_from_leaf(&change)?;
            drop(change);
            if found.is_some() {
                return Ok(found);
            }
            match next {
                Resume::End => return Ok(None),
                Resume::Key(key) => self.from = key,
                Resume::Blob(key) => {
                    let outcome = tree.remove_blob_if(&key, &mut self.chosen)?;
                    if let BlobOutcome::NoBlob = outcome {
                        self.from = key;
                        continue;
                    }
                    self.from = next_key(key.clone());
                    if let BlobOutcome::Removed(value) = outcome {
                        return Ok(Some((key, Value::Inline(Cow::Owned(value.into_vec())))));
                    }
                }
            }
        }
    }

    /// Removes the next chosen entry of the current leaf, if it has one. Also returns where to
    /// resume.
    fn extract_from_leaf(&mut self, change: &Change<'_>) -> Result<(Option<Entry<'a>>, Resume)> {
        let tree = self.tree;
        let unchanged = self.place.take().and_then(|(guard, index)| {
            let leaf = guard.upgrade().ok()?;
            Some((leaf, index))
        });
        let (mut leaf, first) = match unchanged {
            Some(place) => place,
            None => {
                let leaf = tree.exclusive_leaf(&self.from)?;
                let index = LeafBytes::from(&leaf).position(&self.from)?.index;
                (leaf, index)
            }
        };
        let page = leaf.page();
        let torn = |torn| Error::torn(page, torn);
        let (held, node) = (LeafBytes::from(&leaf), Node::new(&leaf[..]));
        let mut key = Vec::new();
        for index in first..node.count().map_err(torn)? {
            node.key_into(index, &mut key).map_err(torn)?;
            if !is_before_end(&key, &self.end) {
                self.merge_left_leaf(change, leaf, &self.from.clone());
                return Ok((None, Resume::End));
            }
            let LeafValue::Inline(value) = held.value(index)? else {
                return Ok((None, Resume::Blob(key)));
            };
            if !change.run_callback(|| (self.chosen)(&key, value)) {
                continue;
            }
            let value = Value::Inline(Cow::Owned(value.to_vec()));
            let expected = tree.expect_change(&key);
            tree.edit(change, &mut leaf, expected, Edit::Remove { index })?;
            self.from.clone_from(&key);
            self.from.push(0);
            // This thread takes the optimistic guard while it holds the leaf, so the guard has the
            // version after this removal.
            let still = leaf.downgrade();
            self.place = tree.pages.pool.optimistic(page).ok().map(|guard| (guard, index));
            self.removed = true;
            drop(still);
            return Ok((Some((key, value)), Resume::End));
        }
        if !node.upper_into(&mut key).map_err(torn)? {
            self.merge_left_leaf(change, leaf, &self.from.clone());
            return Ok((None, Resume::End));
        }
        // The key of the upper fence belongs to the leaf.
        self.merge_left_leaf(change, leaf, &key);
        Ok((None, Resume::Key(next_key(key))))
    }

    /// Merges the leaf for `key` if entries were removed from it, before the iterator leaves it.
    fn merge_left_leaf(&mut self, change: &Change<'_>, leaf: ExclusiveGuard<'a>, key: &[u8]) {
        if std::mem::take(&mut self.removed) {
            self.tree.after_removal(change, leaf, key, &[]);
        }
    }
}

impl<'a, F: FnMut(&[u8], &[u8]) -> bool> Iterator for ExtractIf<'a, F> {
    type Item = Result<Entry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        // The iterator ends if it finds no entry, and if `chosen` panics.
        self.ended = true;
        let next = self.next_entry();
        self.ended = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

impl<F: FnMut(&[u8], &[u8]) -> bool> std::iter::FusedIterator for ExtractIf<'_, F> {}

impl<F: FnMut(&[u8], &[u8]) -> bool> Drop for ExtractIf<'_, F> {
    /// Merges the current leaf if it is underfull.
    fn drop(&mut self) {
        if self.removed
            && let Ok(change) = self.tree.pages.change()
            && self.tree.check_dropped().is_ok()
        {
            self.tree.merge_or_warn(&change, &self.from);
        }
    }
}
