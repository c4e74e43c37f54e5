//! Removing many entries, a leaf at a time: `retain`, `remove_range`, [`ExtractIf`].
//!
//! What is to go is decided where it lies, under the leaf's lock, and goes in one pass over the
//! leaf. A long value is read without its leaf; then the leaf must still refer to it.

use std::borrow::Cow;
use std::fmt;
use std::ops::Bound;

use vellum_pool::{ExclusiveGuard, OptimisticGuard};

use super::Access;
use super::apply::{Action, apply};
use super::lookup::{Held, HeldLeaf};
use super::scan::is_before;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::BlobRef;
use crate::store::pages::Change;
use crate::value::Value;

/// Which entries of a range go.
pub(crate) enum Which<'f> {
    All,
    Unless(&'f mut dyn FnMut(&[u8], &[u8]) -> bool),
}

/// Where to go on.
enum Next {
    /// At the first entry whose key is not less than this.
    Key(Vec<u8>),
    /// At this key, whose value is a blob that has to be read.
    Blob(Vec<u8>),
    End,
}

/// The smallest key that a range can have.
fn first_key(start: Bound<Vec<u8>>) -> Vec<u8> {
    match start {
        Bound::Unbounded => Vec::new(),
        Bound::Included(key) => key,
        Bound::Excluded(key) => next_key(key),
    }
}

/// The smallest key above another one.
fn next_key(mut key: Vec<u8>) -> Vec<u8> {
    key.push(0);
    key
}

impl<'a> Access<'a> {
    /// Removes entries of a range; returns how many.
    pub(crate) fn remove_range(
        self,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
        mut which: Which<'_>,
    ) -> Result<u64> {
        let (mut from, mut removed) = (first_key(start), 0);
        loop {
            let change = self.pages.change()?;
            self.check_dropped()?;
            let next = self.drain_leaf(&change, &from, &end, &mut which, &mut removed)?;
            drop(change);
            from = match (next, &mut which) {
                (Next::Key(key), _) => key,
                (Next::Blob(key), Which::Unless(keep)) => {
                    let matches = |key: &[u8], value: &[u8]| !keep(key, value);
                    let taken = self.take_blob_if(&key, matches)?;
                    removed += u64::from(matches!(taken, Taken::Gone(_)));
                    // What became a short value meanwhile is looked at once more.
                    if let Taken::NoBlob = taken { key } else { next_key(key) }
                }
                (Next::End | Next::Blob(_), _) => return Ok(removed),
            };
        }
    }

    /// Removes what is to go of the leaf for `from`, as one step.
    fn drain_leaf(
        self,
        change: &Change<'_>,
        from: &[u8],
        end: &Bound<Vec<u8>>,
        which: &mut Which<'_>,
        removed: &mut u64,
    ) -> Result<Next> {
        let mut leaf = self.exclusive_leaf(from)?;
        let page = leaf.page();
        let torn = |torn| Error::torn(page, torn);
        let (held, node) = (HeldLeaf::from(&leaf), Node::new(&leaf[..]));
        let (mut indexes, mut blobs, mut key) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = None;
        for index in held.position(from)?.index..node.count().map_err(torn)? {
            node.key_into(index, &mut key).map_err(torn)?;
            if !is_before(&key, end) {
                next = Some(Next::End);
                break;
            }
            let goes = match (held.value(index)?, &mut *which) {
                (held, Which::All) => {
                    blobs.extend(held.blob());
                    true
                }
                (Held::Inline(value), Which::Unless(keep)) => {
                    !change.run_callback(|| keep(&key, value))
                }
                (Held::Blob(_), Which::Unless(_)) => {
                    next = Some(Next::Blob(key.clone()));
                    break;
                }
            };
            if goes {
                indexes.push(index);
            }
        }
        let mut next = match next {
            Some(next) => next,
            None if node.upper_into(&mut key).map_err(torn)? => Next::Key(next_key(key)),
            None => Next::End,
        };
        if !indexes.is_empty() {
            apply(change, &mut leaf, Action::RemoveAll { indexes: &indexes })?;
            *removed += indexes.len() as u64;
            let is_empty = Node::new(&leaf[..]).count() == Ok(0);
            if let (Which::All, Next::Key(next), true) = (which, &mut next, is_empty) {
                drop(leaf);
                self.drop_after(change, from, end, &mut blobs, next, removed);
                blobs.iter().for_each(|blob| self.free_blob(change, *blob));
                self.merge_or_warn(change, from);
            } else {
                self.after_removal(change, leaf, from, &blobs);
            }
        }
        Ok(next)
    }

    /// Drops the leaves after that for `from`, which is empty, as far as they go as a whole; then
    /// `next` is the key behind them.
    fn drop_after(
        self,
        change: &Change<'_>,
        from: &[u8],
        end: &Bound<Vec<u8>>,
        blobs: &mut Vec<BlobRef>,
        next: &mut Vec<u8>,
        removed: &mut u64,
    ) {
        match self.drop_leaves(change, from, |key| is_before(key, end)) {
            Ok(None) => {}
            Ok(Some(dropped)) => {
                *removed += dropped.entries;
                blobs.extend(dropped.blobs);
                *next = next_key(dropped.upper);
            }
            Err(error) => {
                tracing::warn!("dropping leaves of tree {:?} failed: {error}", self.tree.name());
            }
        }
    }

    /// Lets a leaf go that entries were removed from; `key` lies in it.
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

    /// Merges the leaf for `key`. If that fails the tree only has one more page than it needs.
    pub(crate) fn merge_or_warn(self, change: &Change<'_>, key: &[u8]) {
        if let Err(error) = self.merge(change, key) {
            tracing::warn!("merging pages of tree {:?} failed: {error}", self.tree.name());
        }
    }

    /// Removes the entry of `key` if its value is a blob that `matches`.
    fn take_blob_if(
        self,
        key: &[u8],
        mut matches: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<Taken<'a>> {
        while let Some((old, value)) = self.get_blob(key)? {
            if !matches(key, &value.value) {
                return Ok(Taken::Kept);
            }
            let change = self.pages.change()?;
            self.check_dropped()?;
            // The blob is held, so no other one has its place: the same reference, the same value.
            let mut leaf = self.exclusive_leaf(key)?;
            if let Some((index, Held::Blob(blob))) = HeldLeaf::from(&leaf).find(key)?
                && blob == old
            {
                apply(&change, &mut leaf, Action::Remove { index })?;
                self.after_removal(&change, leaf, key, &[old]);
                return Ok(Taken::Gone(value.value));
            }
        }
        Ok(Taken::NoBlob)
    }
}

/// What became of an entry whose value is a blob.
enum Taken<'a> {
    Gone(Value<'a>),
    Kept,
    /// It has no blob any more.
    NoBlob,
}

/// Removes the entries of a range that a function chooses, one with each step of the iterator, and
/// gives them back, in the order of their keys. Those that it does not come to stay.
///
/// Keys and values are copies. Each step is atomic, the whole is not: other changes come between.
/// After an error the iterator has ended.
#[must_use = "it removes nothing unless it is iterated over"]
pub struct ExtractIf<'a, F: FnMut(&[u8], &[u8]) -> bool> {
    access: Access<'a>,
    chosen: F,
    /// The smallest key that was not looked at.
    from: Vec<u8>,
    end: Bound<Vec<u8>>,
    /// The leaf that it has come to, and the number of the next entry there.
    place: Option<(OptimisticGuard<'a>, usize)>,
    /// It has removed entries of that leaf.
    removed: bool,
    ended: bool,
}

impl<F: FnMut(&[u8], &[u8]) -> bool> fmt::Debug for ExtractIf<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExtractIf { access, from, end, ended, .. } = self;
        let tree = &access.tree.name();
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
        access: Access<'a>,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
        chosen: F,
    ) -> ExtractIf<'a, F> {
        let from = first_key(start);
        ExtractIf { access, chosen, from, end, place: None, removed: false, ended: false }
    }

    fn next_entry(&mut self) -> Result<Option<Entry<'a>>> {
        loop {
            let access = self.access;
            let change = access.pages.change()?;
            access.check_dropped()?;
            let (found, next) = self.extract_from_leaf(&change)?;
            drop(change);
            if found.is_some() {
                return Ok(found);
            }
            match next {
                Next::End => return Ok(None),
                Next::Key(key) => self.from = key,
                Next::Blob(key) => {
                    let taken = access.take_blob_if(&key, &mut self.chosen)?;
                    if let Taken::NoBlob = taken {
                        self.from = key;
                        continue;
                    }
                    self.from = next_key(key.clone());
                    if let Taken::Gone(value) = taken {
                        return Ok(Some((key, Value::Inline(Cow::Owned(value.into_vec())))));
                    }
                }
            }
        }
    }

    /// The next entry of the leaf that it has come to, unless that has none; and where to go on.
    fn extract_from_leaf(&mut self, change: &Change<'_>) -> Result<(Option<Entry<'a>>, Next)> {
        let access = self.access;
        let unchanged = self.place.take().and_then(|(guard, index)| {
            let leaf = guard.upgrade().ok()?;
            Some((leaf, index))
        });
        let (mut leaf, first) = match unchanged {
            Some(place) => place,
            None => {
                let leaf = access.exclusive_leaf(&self.from)?;
                let index = HeldLeaf::from(&leaf).position(&self.from)?.index;
                (leaf, index)
            }
        };
        let page = leaf.page();
        let torn = |torn| Error::torn(page, torn);
        let (held, node) = (HeldLeaf::from(&leaf), Node::new(&leaf[..]));
        let mut key = Vec::new();
        for index in first..node.count().map_err(torn)? {
            node.key_into(index, &mut key).map_err(torn)?;
            if !is_before(&key, &self.end) {
                self.leave(change, leaf, &self.from.clone());
                return Ok((None, Next::End));
            }
            let Held::Inline(value) = held.value(index)? else {
                return Ok((None, Next::Blob(key)));
            };
            if !change.run_callback(|| (self.chosen)(&key, value)) {
                continue;
            }
            let value = Value::Inline(Cow::Owned(value.to_vec()));
            apply(change, &mut leaf, Action::Remove { index })?;
            self.from.clone_from(&key);
            self.from.push(0);
            // Taken while the leaf is held, so it is of the version that was left behind.
            let still = leaf.downgrade();
            self.place = access.pages.pool.optimistic(page).ok().map(|guard| (guard, index));
            self.removed = true;
            drop(still);
            return Ok((Some((key, value)), Next::End));
        }
        if !node.upper_into(&mut key).map_err(torn)? {
            self.leave(change, leaf, &self.from.clone());
            return Ok((None, Next::End));
        }
        // The upper fence of a leaf lies in the leaf.
        self.leave(change, leaf, &key);
        Ok((None, Next::Key(next_key(key))))
    }

    /// Comes to the end of the leaf for `key`.
    fn leave(&mut self, change: &Change<'_>, leaf: ExclusiveGuard<'a>, key: &[u8]) {
        if std::mem::take(&mut self.removed) {
            self.access.after_removal(change, leaf, key, &[]);
        }
    }
}

impl<'a, F: FnMut(&[u8], &[u8]) -> bool> Iterator for ExtractIf<'a, F> {
    type Item = Result<Entry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        // Unless it comes to an entry, also if `chosen` panics.
        self.ended = true;
        let next = self.next_entry();
        self.ended = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

impl<F: FnMut(&[u8], &[u8]) -> bool> std::iter::FusedIterator for ExtractIf<'_, F> {}

impl<F: FnMut(&[u8], &[u8]) -> bool> Drop for ExtractIf<'_, F> {
    /// The leaf that it was at may be worth merging.
    fn drop(&mut self) {
        if self.removed
            && let Ok(change) = self.access.pages.change()
            && self.access.check_dropped().is_ok()
        {
            self.access.merge_or_warn(&change, &self.from);
        }
    }
}
