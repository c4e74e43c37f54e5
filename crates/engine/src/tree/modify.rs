//! Changes of one entry: insert, upsert, remove, update in place; changes that depend on the old
//! value (`take`, `compare_and_swap`, `fetch_and_update`); the ends of a tree (`first`, `last`,
//! `pop_first`, `pop_last`).
//!
//! A change takes everything that it needs before it changes the first byte: it allocates and fills
//! a blob first, and allocates a page for a split before the split. So an error of a full pool or
//! disk leaves the tree unchanged.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::Ordering;

use vellum_pool::{ExclusiveGuard, OptimisticGuard, PageRef};

use super::TreeRef;
use super::group::{Group, init};
use super::lookup::{Attempt, AttemptError, LeafBytes, LeafValue, LongValue, Target};
use crate::error::{Error, Result};
use crate::node::{Edit, Node, Payload, Position, Torn};
use crate::page::PageKind;
use crate::page::blob::{self, BLOB_DATA, BLOB_REF, BlobRef};
use crate::store::pages::Change;
use crate::value::Value;

/// The most entries, and bytes of keys and values, that `extend` stores within one change of the
/// store.
const EXTEND_ENTRIES: usize = 128;
const EXTEND_BYTES: usize = 64 << 10;

/// What to do if the tree has the key already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    Refuse,
    Replace,
}

/// A value to be stored.
pub(crate) enum Incoming<'v> {
    Bytes(&'v [u8]),
    /// A value of this length, which the function writes.
    Fill(usize, &'v mut dyn FnMut(&mut [u8]) -> io::Result<()>),
}

impl Incoming<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Incoming::Bytes(bytes) => bytes.len(),
            Incoming::Fill(len, _) => *len,
        }
    }

    fn write(self, target: &mut [u8]) -> Result<()> {
        match self {
            Incoming::Bytes(bytes) => target.copy_from_slice(bytes),
            Incoming::Fill(_, fill) => fill(target).map_err(Error::Input)?,
        }
        Ok(())
    }
}

/// The result of an attempt to store one more entry in a leaf.
enum Extension {
    /// The entry was stored. It replaced this blob, if any.
    Stored(Option<BlobRef>),
    /// The key belongs to another leaf.
    OtherLeaf,
    Full,
}

/// The page of a new blob. It is freed if the value is not written, also when the callback panics.
struct UnwrittenBlob<'a, 'c> {
    tree: TreeRef<'a>,
    change: &'c Change<'c>,
    guard: Option<ExclusiveGuard<'a>>,
}

impl Drop for UnwrittenBlob<'_, '_> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.tree.free_page(self.change, guard);
        }
    }
}

impl<'a> TreeRef<'a> {
    /// Stores a value. Returns true if it replaced another value.
    pub(crate) fn put(self, key: &[u8], value: Incoming<'_>, existing: Existing) -> Result<bool> {
        self.check_key(key)?;
        self.check_value(value.len() as u64)?;
        let change = self.pages.change()?;
        self.check_dropped()?;
        self.put_in(&change, key, value, existing)
    }

    /// As [`put`](Self::put), within a change. The caller has checked key and value.
    pub(crate) fn put_in(
        self,
        change: &Change<'_>,
        key: &[u8],
        value: Incoming<'_>,
        existing: Existing,
    ) -> Result<bool> {
        let inline = value.len() <= self.pages.limits.max_inline_value(key.len());
        if let (true, Incoming::Bytes(bytes)) = (inline, &value) {
            return self.put_payload(change, key, Payload::Inline(bytes), existing);
        }
        if inline {
            let mut bytes = vec![0; value.len()];
            change.run_callback(|| value.write(&mut bytes))?;
            return self.put_payload(change, key, Payload::Inline(&bytes), existing);
        }
        if existing == Existing::Refuse && self.contains(key)? {
            return Err(Error::KeyExists);
        }
        let blob = self.store_blob(change, key, value)?;
        let stored = self.put_payload(change, key, Payload::Blob(&blob.encode()), existing);
        if stored.is_err() {
            self.free_blob(change, blob);
        }
        stored
    }

    pub(crate) fn put_payload(
        self,
        change: &Change<'_>,
        key: &[u8],
        payload: Payload<'_>,
        existing: Existing,
    ) -> Result<bool> {
        self.put_payload_of(change, key, payload, existing, &[])
    }

    /// As [`put_payload`](Self::put_payload), of a value that has these ranges of new pages besides
    /// those that the group finds itself.
    pub(crate) fn put_payload_of(
        self,
        change: &Change<'_>,
        key: &[u8],
        payload: Payload<'_>,
        existing: Existing,
        taken: &[PageRef],
    ) -> Result<bool> {
        let expected = self.expect_change(key);
        loop {
            change.next_group()?;
            let mut leaf = self.exclusive_leaf(key)?;
            let held = LeafBytes::from(&leaf);
            let position = held.position(key)?;
            if position.exact && existing == Existing::Refuse {
                return Err(Error::KeyExists);
            }
            let (index, mut old_blob) = (position.index, None);
            if position.exact {
                old_blob = held.value(index)?.blob();
            }
            let edit = match position.exact {
                true => Edit::Replace { index, payload },
                false => Edit::Insert { index, key, payload },
            };
            if self.edit_taking(change, &mut leaf, expected, edit, taken)? {
                drop(leaf);
                if let Some(blob) = old_blob {
                    self.free_blob(change, blob);
                }
                return Ok(position.exact);
            }
            drop(leaf);
            self.make_room_for(change, key, payload)?;
        }
    }

    /// Adds the entry of a new tree to the catalog, and makes its root an empty leaf. The two are
    /// one group.
    pub(crate) fn insert_tree(
        self,
        change: &Change<'_>,
        name: &[u8],
        entry: &[u8],
        root: &mut ExclusiveGuard<'a>,
    ) -> Result<()> {
        let payload = Payload::Inline(entry);
        loop {
            change.next_group()?;
            let mut leaf = self.exclusive_leaf(name)?;
            let Position { index, exact } = LeafBytes::from(&leaf).position(name)?;
            if exact {
                return Err(Error::KeyExists);
            }
            let mut group = self.group(change);
            if group.edit(&mut leaf, Edit::Insert { index, key: name, payload }) {
                group.take(root.page());
                group.format_root(root, 0, 0);
                return group.end(&mut [root, &mut leaf]).map(drop);
            }
            drop((group, leaf));
            self.make_room_for(change, name, payload)?;
        }
    }

    /// Splits the leaf for `key` until the entry, new or replacing an old one, fits.
    pub(crate) fn make_room_for(
        self,
        change: &Change<'_>,
        key: &[u8],
        payload: Payload<'_>,
    ) -> Result<()> {
        self.make_room(change, key, 0, &|leaf| leaf_has_room(leaf, key, payload))
    }

    /// Stores entries, and returns their number. Stores consecutive entries of one leaf under one
    /// lock. While `entries` runs, this thread holds no lock and no change is under way.
    pub(crate) fn extend<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        entries: impl Iterator<Item = (K, V)>,
    ) -> Result<u64> {
        let (mut stored, mut collected, mut bytes) = (0, Vec::with_capacity(EXTEND_ENTRIES), 0);
        let mut entries = entries.fuse();
        loop {
            let next = entries.next();
            let ended = next.is_none();
            if let Some((key, value)) = next {
                bytes += key.as_ref().len() + value.as_ref().len();
                collected.push((key, value));
            }
            if ended || collected.len() == EXTEND_ENTRIES || bytes >= EXTEND_BYTES {
                let mut change = self.pages.change()?;
                self.check_dropped()?;
                let mut rest = &collected[..];
                while let [(key, value), ..] = rest {
                    if !change.has_room() {
                        // Only between changes can a full log wait for a checkpoint.
                        drop(change);
                        change = self.pages.change()?;
                        self.check_dropped()?;
                    }
                    let (key, value) = (key.as_ref(), value.as_ref());
                    if self.check_entry(key, value)? {
                        self.put_in(&change, key, Incoming::Bytes(value), Existing::Replace)?;
                        rest = &rest[1..];
                    } else {
                        rest = &rest[self.extend_leaf(&change, rest)?..];
                    }
                }
                stored += collected.len() as u64;
                // Keys and values may do anything when they are dropped.
                drop(change);
                collected.clear();
                bytes = 0;
            }
            if ended {
                return Ok(stored);
            }
        }
    }

    /// Stores the first entries that belong to one leaf and fit into it, and returns their number.
    /// If the first one does not fit, makes room for it.
    fn extend_leaf<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        change: &Change<'_>,
        entries: &[(K, V)],
    ) -> Result<usize> {
        let Some((first, _)) = entries.first() else { return Ok(0) };
        change.next_group()?;
        let mut leaf = self.exclusive_leaf(first.as_ref())?;
        let (mut stored, mut old_blobs, mut full) = (0, Vec::new(), None);
        let mut group = self.group(change);
        let mut outcome = Ok(());
        for (key, value) in entries {
            let (key, value) = (key.as_ref(), value.as_ref());
            if self.check_entry(key, value).unwrap_or(true) {
                break;
            }
            match self.extend_by(&mut group, &mut leaf, key, value) {
                Ok(Extension::Stored(old)) => old_blobs.extend(old),
                Ok(Extension::OtherLeaf) => break,
                Ok(Extension::Full) => {
                    full = Some((key, Payload::Inline(value)));
                    break;
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
            stored += 1;
        }
        group.end(&mut [&mut leaf])?;
        drop(leaf);
        for blob in old_blobs {
            self.free_blob(change, blob);
        }
        outcome?;
        if let (0, Some((key, payload))) = (stored, full) {
            self.make_room_for(change, key, payload)?;
        }
        Ok(stored)
    }

    /// Stores an entry in `leaf`, if it belongs there and fits.
    fn extend_by(
        self,
        group: &mut Group<'_, 'a>,
        leaf: &mut ExclusiveGuard<'a>,
        key: &[u8],
        value: &[u8],
    ) -> Result<Extension> {
        let covers = Node::new(&leaf[..]).covers(key);
        if !covers.map_err(|torn| Error::torn(leaf.page(), torn))? {
            return Ok(Extension::OtherLeaf);
        }
        let held = LeafBytes::from(&*leaf);
        let position = held.position(key)?;
        let (index, payload) = (position.index, Payload::Inline(value));
        let (edit, old) = match position.exact {
            true => (Edit::Replace { index, payload }, held.value(index)?.blob()),
            false => (Edit::Insert { index, key, payload }, None),
        };
        Ok(match group.edit(leaf, edit) {
            true => Extension::Stored(old),
            false => Extension::Full,
        })
    }

    /// Removes an entry. Returns true if the tree had it.
    pub(crate) fn remove(self, key: &[u8]) -> Result<bool> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        self.remove_in(&change, key)
    }

    /// As [`remove`](Self::remove), within a change.
    pub(crate) fn remove_in(self, change: &Change<'_>, key: &[u8]) -> Result<bool> {
        let expected = self.expect_change(key);
        let mut leaf = self.exclusive_leaf(key)?;
        let Some((index, held)) = LeafBytes::from(&leaf).find(key)? else { return Ok(false) };
        let old_blob = held.blob();
        self.edit(change, &mut leaf, expected, Edit::Remove { index })?;
        self.after_removal(change, leaf, key, old_blob.as_slice());
        Ok(true)
    }

    /// Allocates a blob for the value of `key` and writes the value to it.
    pub(crate) fn store_blob(
        self,
        change: &Change<'_>,
        key: &[u8],
        value: Incoming<'_>,
    ) -> Result<BlobRef> {
        let guard = self.pages.pool.allocate(self.pages.blob_frames(value.len() as u64))?;
        self.fill_blob(change, guard, key, value)
    }

    /// Makes a new page a blob with the value of `key`. Frees the page if that fails.
    pub(crate) fn fill_blob(
        self,
        change: &Change<'_>,
        mut guard: ExclusiveGuard<'a>,
        key: &[u8],
        value: Incoming<'_>,
    ) -> Result<BlobRef> {
        let len = value.len();
        let page = init(change, &mut guard, PageKind::Blob, 0, self.state.id);
        blob::put_len(&mut guard, len as u64);
        blob::put_key(&mut guard, key);
        let mut unwritten = UnwrittenBlob { tree: self, change, guard: Some(guard) };
        if let Some(guard) = &mut unwritten.guard {
            change.run_callback(|| value.write(&mut guard[BLOB_DATA..BLOB_DATA + len]))?;
        }
        unwritten.guard = None;
        let blob = BlobRef::whole(page, len as u64);
        if let Err(error) = self.pages.write_unlogged([page].into_iter()) {
            self.free_blob(change, blob);
            return Err(error);
        }
        Ok(blob)
    }

    /// Frees a blob that nothing refers to any more. Readers that hold it keep it until they end.
    pub(crate) fn free_blob(self, _change: &Change<'_>, blob: BlobRef) {
        self.pages.free_value(self.state.id, blob);
    }

    /// Frees a page that nothing refers to any more.
    pub(crate) fn free_page(self, _change: &Change<'_>, guard: ExclusiveGuard<'a>) {
        let page = guard.page();
        self.forget_popped(page);
        if let Err(error) = self.pages.pool.free(guard) {
            tracing::warn!("{page} could not be freed and stays unused: {error}");
        }
    }

    /// The page is no leaf of the tree any more. The caller holds its exclusive lock, or has
    /// exclusive use of the store.
    pub(crate) fn forget_popped(self, page: PageRef) {
        for popped in &self.state.popped_leaves {
            if popped.load(Ordering::Relaxed) == page.id.0 {
                popped.store(0, Ordering::Relaxed);
            }
        }
    }

    pub(crate) fn check_key(self, key: &[u8]) -> Result<()> {
        let max = self.pages.limits.max_key;
        match key.len() <= max {
            true => Ok(()),
            false => Err(Error::KeyTooLong { len: key.len(), max }),
        }
    }

    fn check_value(self, len: u64) -> Result<()> {
        let max = self.pages.max_blob();
        match len <= max {
            true => Ok(()),
            false => Err(Error::ValueTooLong { len, max }),
        }
    }

    /// Checks an entry against the limits. Returns true if its value becomes a blob.
    pub(crate) fn check_entry(self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.check_key(key)?;
        self.check_value(value.len() as u64)?;
        Ok(value.len() > self.pages.limits.max_inline_value(key.len()))
    }
}

/// Whether an entry, new or replacing an old one, fits into a leaf.
fn leaf_has_room(leaf: Node<&[u8]>, key: &[u8], payload: Payload<'_>) -> Result<bool, Torn> {
    let new = match payload {
        Payload::Inline(bytes) | Payload::Blob(bytes) => bytes.len(),
        Payload::Child(_) => BLOB_REF,
    };
    let position = leaf.find(key)?;
    if position.exact {
        return Ok(new <= leaf.free_space()? + leaf.payload_place(position.index)?.len);
    }
    leaf.has_room(key.len(), new)
}

/// The result of an update under the leaf's lock.
enum UpdateOutcome {
    Absent,
    Changed,
    /// The value is a blob, which must not be written under the leaf's lock.
    Blob,
}

impl<'a> TreeRef<'a> {
    /// Changes the value of `key` in place. Returns false if there is none.
    pub(crate) fn update(self, key: &[u8], change: &mut dyn FnMut(&mut [u8])) -> Result<bool> {
        let begun = self.pages.change()?;
        self.check_dropped()?;
        match self.update_inline(&begun, key, change)? {
            UpdateOutcome::Absent => Ok(false),
            UpdateOutcome::Changed => Ok(true),
            UpdateOutcome::Blob => self.update_blob(&begun, key, change),
        }
    }

    fn update_inline(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<UpdateOutcome> {
        let expected = self.expect_change(key);
        let mut leaf = self.exclusive_leaf(key)?;
        // `change` gets a copy. If it panics, the page is unchanged.
        let (index, mut value) = match LeafBytes::from(&leaf).find(key)? {
            None => return Ok(UpdateOutcome::Absent),
            Some((_, LeafValue::Blob(_))) => return Ok(UpdateOutcome::Blob),
            Some((index, LeafValue::Inline(value))) => (index, value.to_vec()),
        };
        begun.run_callback(|| change(&mut value));
        let payload = Payload::Inline(&value);
        self.edit(begun, &mut leaf, expected, Edit::Replace { index, payload })?;
        Ok(UpdateOutcome::Changed)
    }

    /// Replaces a blob by a changed copy. Starts again if another change came first.
    fn update_blob(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        loop {
            // This thread holds the old blob to the end, so no other blob can get its place
            // meanwhile. If it finds the same reference again, nothing has changed.
            let Some((old, long)) = self.get_blob(key)? else {
                // The value was removed, or replaced by a short one.
                match self.update_inline(begun, key, change)? {
                    UpdateOutcome::Absent => return Ok(false),
                    UpdateOutcome::Changed => return Ok(true),
                    UpdateOutcome::Blob => continue,
                }
            };
            let mut fill = |target: &mut [u8]| {
                target.copy_from_slice(&long.value);
                change(target);
                Ok(())
            };
            let new = self.store_blob(begun, key, Incoming::Fill(long.value.len(), &mut fill))?;
            let mut leaf = match self.exclusive_leaf(key) {
                Ok(leaf) => leaf,
                Err(error) => {
                    self.free_blob(begun, new);
                    return Err(error);
                }
            };
            let found = LeafBytes::from(&leaf).find(key)?;
            if let Some((index, LeafValue::Blob(blob))) = found
                && blob == old
            {
                let payload = new.encode();
                let payload = Payload::Blob(&payload);
                let expected = self.expect_change(key);
                self.edit(begun, &mut leaf, expected, Edit::Replace { index, payload })?;
                drop((leaf, long));
                self.free_blob(begun, old);
                return Ok(true);
            }
            drop(leaf);
            self.free_blob(begun, new);
        }
    }
}

/// What to do with a value.
pub(crate) enum Decision<'v> {
    Keep,
    Remove,
    Put(Cow<'v, [u8]>),
}

/// Decides what to do with the value of a key, or with a missing value.
type Decide<'f, 'v> = &'f mut dyn FnMut(Option<&[u8]>) -> Decision<'v>;

/// The value about which a callback has decided. The thread holds a blob, so no other blob gets its
/// place: the same reference is the same value.
enum ExpectedValue<'a> {
    Absent,
    Inline(Vec<u8>),
    Blob(BlobRef, LongValue<'a>),
}

impl<'a> ExpectedValue<'a> {
    fn matches(&self, found: Option<LeafValue<'_>>) -> bool {
        match (self, found) {
            (ExpectedValue::Absent, None) => true,
            (ExpectedValue::Inline(old), Some(LeafValue::Inline(value))) => old == value,
            (ExpectedValue::Blob(old, _), Some(LeafValue::Blob(blob))) => *old == blob,
            _ => false,
        }
    }

    fn blob(&self) -> Option<BlobRef> {
        match self {
            ExpectedValue::Blob(blob, _) => Some(*blob),
            _ => None,
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            ExpectedValue::Absent => None,
            ExpectedValue::Inline(value) => Some(value),
            ExpectedValue::Blob(_, long) => Some(&long.value),
        }
    }

    fn into_value(self) -> Option<Value<'a>> {
        match self {
            ExpectedValue::Absent => None,
            ExpectedValue::Inline(value) => Some(Value::Inline(Cow::Owned(value))),
            ExpectedValue::Blob(_, long) => Some(long.value),
        }
    }
}

/// An end of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TreeEnd {
    First,
    Last,
}

impl TreeEnd {
    fn target(self) -> Target<'static> {
        match self {
            TreeEnd::First => Target::Key(&[]),
            TreeEnd::Last => Target::Last,
        }
    }

    /// The index of the entry at this end of a leaf that has `count` entries.
    fn index(self, count: usize) -> usize {
        match self {
            TreeEnd::First => 0,
            TreeEnd::Last => count - 1,
        }
    }
}

impl<'a> TreeRef<'a> {
    /// Atomically does with the value of `key` what `decide` says. Returns the old value. Calls
    /// `decide` under the leaf's lock, and calls it again if another change came between the
    /// decision and the replacement.
    pub(crate) fn alter(self, key: &[u8], decide: Decide<'_, '_>) -> Result<Option<Value<'a>>> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        let mut blob = None;
        loop {
            let mut leaf = self.exclusive_leaf(key)?;
            let found = LeafBytes::from(&leaf).find(key)?;
            let (index, old) = match (found, blob.take()) {
                (None, _) => (0, ExpectedValue::Absent),
                (Some((index, LeafValue::Inline(value))), _) => {
                    (index, ExpectedValue::Inline(value.to_vec()))
                }
                (Some((index, LeafValue::Blob(now))), Some((then, value))) if now == then => {
                    (index, ExpectedValue::Blob(now, value))
                }
                (Some((_, LeafValue::Blob(_))), _) => {
                    drop(leaf);
                    blob = self.get_blob(key)?;
                    continue;
                }
            };
            match (change.run_callback(|| decide(old.bytes())), &old) {
                (Decision::Keep, _) | (Decision::Remove, ExpectedValue::Absent) => {}
                (Decision::Remove, _) => {
                    let expected = self.expect_change(key);
                    self.edit(&change, &mut leaf, expected, Edit::Remove { index })?;
                    self.after_removal(&change, leaf, key, old.blob().as_slice());
                }
                (Decision::Put(value), _) => {
                    if !self.replace_if_unchanged(&change, leaf, key, &value, &old)? {
                        continue;
                    }
                }
            }
            return Ok(old.into_value());
        }
    }

    /// Replaces the value of `key` if it is still `old`, or else returns false. The caller has
    /// locked the leaf.
    fn replace_if_unchanged(
        self,
        change: &Change<'_>,
        leaf: ExclusiveGuard<'a>,
        key: &[u8],
        value: &[u8],
        old: &ExpectedValue<'a>,
    ) -> Result<bool> {
        if !self.check_entry(key, value)? {
            return self.replace_payload_if_unchanged(
                change,
                Some(leaf),
                key,
                Payload::Inline(value),
                old,
            );
        }
        drop(leaf);
        let blob = self.store_blob(change, key, Incoming::Bytes(value))?;
        let stored = self.replace_payload_if_unchanged(
            change,
            None,
            key,
            Payload::Blob(&blob.encode()),
            old,
        );
        if !matches!(stored, Ok(true)) {
            self.free_blob(change, blob);
        }
        stored
    }

    fn replace_payload_if_unchanged(
        self,
        change: &Change<'_>,
        mut held: Option<ExclusiveGuard<'a>>,
        key: &[u8],
        payload: Payload<'_>,
        old: &ExpectedValue<'a>,
    ) -> Result<bool> {
        loop {
            let mut leaf = match held.take() {
                Some(leaf) => leaf,
                None => self.exclusive_leaf(key)?,
            };
            let found = LeafBytes::from(&leaf);
            let position = found.position(key)?;
            let index = position.index;
            let now = position.exact.then(|| found.value(index)).transpose()?;
            if !old.matches(now) {
                return Ok(false);
            }
            let edit = match position.exact {
                true => Edit::Replace { index, payload },
                false => Edit::Insert { index, key, payload },
            };
            if self.edit(change, &mut leaf, self.expect_change(key), edit)? {
                drop(leaf);
                if let Some(blob) = old.blob() {
                    self.free_blob(change, blob);
                }
                return Ok(true);
            }
            drop(leaf);
            self.make_room_for(change, key, payload)?;
        }
    }

    /// The leaf with the first or last entry; `None` if there is no entry. Adds empty leaves
    /// between that leaf and the end to `empty`; a failed merge can leave such leaves. While none
    /// of them changes, the entry is the first or last one.
    fn end_leaf(
        self,
        end: TreeEnd,
        empty: &mut Vec<OptimisticGuard<'a>>,
    ) -> Attempt<Option<OptimisticGuard<'a>>> {
        empty.clear();
        let (mut fence, mut before) = (Vec::new(), Vec::new());
        loop {
            let target = if empty.is_empty() { end.target() } else { Target::Key(&fence) };
            let leaf = self.leaf(target)?.node;
            let count = self.read(leaf, Node::count)?;
            if count > 0 {
                leaf.validate()?;
                return Ok(Some(leaf));
            }
            std::mem::swap(&mut fence, &mut before);
            let more = self.read(leaf, |node| match end {
                TreeEnd::First => node.upper_into(&mut fence),
                TreeEnd::Last => node.lower_into(&mut fence),
            })?;
            leaf.validate()?;
            if more && end == TreeEnd::First {
                fence.push(0);
            }
            let goes_on = match end {
                TreeEnd::First => fence > before,
                TreeEnd::Last => fence < before,
            };
            if !more {
                empty.push(leaf);
                return Ok(None);
            }
            // Always true in a sound tree. A damaged tree could lead this thread in a cycle.
            if !empty.is_empty() && !goes_on {
                return Err(AttemptError::Failed(Error::fences(leaf.page())));
            }
            empty.push(leaf);
        }
    }

    /// Calls `take` with the leaf that has the first or last entry, and validates the leaves in
    /// `empty`. The inner `Option` is `None` if there is no entry, the outer one if the thread
    /// starves.
    fn at_end<T>(
        self,
        end: TreeEnd,
        empty: &mut Vec<OptimisticGuard<'a>>,
        take: impl Fn(OptimisticGuard<'a>) -> Attempt<T>,
    ) -> Result<Option<Option<T>>> {
        self.attempt(|| {
            let taken = self.end_leaf(end, empty)?.map(&take).transpose()?;
            empty.iter().try_for_each(OptimisticGuard::validate)?;
            Ok(taken)
        })
    }

    /// The first or last entry.
    pub(crate) fn end_entry(self, end: TreeEnd) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let mut empty = Vec::new();
        let entry = |leaf| Ok((leaf, self.key_and_value(leaf, end)?));
        loop {
            let found = self.at_end(end, &mut empty, entry)?;
            let found = match found {
                Some(found) => found,
                None => {
                    // This thread has starved. Unless this leaf is empty, it has the entry.
                    empty.clear();
                    let held = self.shared_leaf(end.target())?;
                    let leaf = self.pages.pool.optimistic(held.page())?;
                    let is_empty = Node::new(&held[..]).count() == Ok(0);
                    match self.key_and_value(leaf, end) {
                        _ if is_empty => continue,
                        Ok(found) => Some((leaf, found)),
                        Err(AttemptError::Failed(error)) => return Err(error),
                        Err(AttemptError::Restart) => continue,
                    }
                }
            };
            let (leaf, key) = match found {
                None => return Ok(None),
                Some((_, (key, Some(value)))) => return Ok(Some((key, value))),
                Some((leaf, (key, None))) => (leaf, key),
            };
            // The blob is read without a lock on its leaf. If the leaf is unchanged now, the entry
            // was there during the read.
            if let Some(value) = self.get(&key)?
                && [&leaf].into_iter().chain(&empty).all(|guard| guard.validate().is_ok())
            {
                return Ok(Some((key, value)));
            }
        }
    }

    /// The first or last entry of a leaf. The value is `None` if it is a blob.
    fn key_and_value(
        self,
        leaf: OptimisticGuard<'a>,
        end: TreeEnd,
    ) -> Attempt<(Vec<u8>, Option<Value<'a>>)> {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        let blob = self.read(leaf, |node| {
            let index = end.index(node.count()?.max(1));
            node.key_into(index, &mut key)?;
            let place = node.payload_place(index)?;
            node.payload_into(place, &mut value)?;
            Ok(place.blob)
        })?;
        leaf.validate()?;
        Ok((key, (!blob).then_some(Value::Inline(Cow::Owned(value)))))
    }

    /// Removes the first or last entry and returns it.
    pub(crate) fn pop(self, end: TreeEnd) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        let mut blob: Option<(BlobRef, LongValue<'a>)> = None;
        loop {
            let Some(mut leaf) = self.exclusive_end_leaf(&change, end)? else { return Ok(None) };
            let torn = |torn| Error::torn(leaf.page(), torn);
            let node = Node::new(&leaf[..]);
            let index = end.index(node.count().map_err(torn)?);
            let key = node.key(index).map_err(torn)?;
            let old = match (LeafBytes::from(&leaf).value(index)?, blob.take()) {
                (LeafValue::Inline(value), _) => ExpectedValue::Inline(value.to_vec()),
                (LeafValue::Blob(now), Some((then, value))) if now == then => {
                    ExpectedValue::Blob(now, value)
                }
                (LeafValue::Blob(_), _) => {
                    drop(leaf);
                    blob = self.get_blob(&key)?;
                    continue;
                }
            };
            let expected = self.expect_change(&key);
            self.edit(&change, &mut leaf, expected, Edit::Remove { index })?;
            let hint = &self.state.popped_leaves[end as usize];
            if hint.load(Ordering::Relaxed) != leaf.page().id.0 {
                hint.store(leaf.page().id.0, Ordering::Relaxed);
            }
            // While the leaf has entries, the next calls pop them. Trying a merge at each call
            // would be slow.
            let is_empty = Node::new(&leaf[..]).count() == Ok(0);
            drop(leaf);
            if let Some(blob) = old.blob() {
                self.free_blob(&change, blob);
            }
            if is_empty {
                self.merge_or_warn(&change, &key);
            }
            return Ok(old.into_value().map(|value| (key, value)));
        }
    }

    /// The leaf from which an entry was popped last, under an exclusive lock. `None` if it no
    /// longer has the first or last entry, or if another thread has locked it.
    #[inline]
    fn known_end_leaf(self, end: TreeEnd) -> Option<ExclusiveGuard<'a>> {
        let hint = &self.state.popped_leaves[end as usize];
        let id = hint.load(Ordering::Relaxed);
        if id == 0 {
            return None;
        }
        let leaf = self.pages.pool.try_optimistic(self.page(id))?.upgrade().ok()?;
        let node = Node::new(&leaf[..]);
        let fence = match end {
            TreeEnd::First => node.lower(),
            TreeEnd::Last => node.upper(),
        };
        // The page may have been freed and reused since this thread read the hint. Then the hint
        // has changed. Only one leaf has no fence on this side. If it has entries, it has the first
        // or last one.
        let is_end = hint.load(Ordering::Relaxed) == id
            && node.is_of(self.state.id, 0)
            && fence == Ok(None)
            && node.count().is_ok_and(|count| count > 0);
        is_end.then_some(leaf)
    }

    /// The leaf with the first or last entry, under an exclusive lock; `None` if there is no entry.
    fn exclusive_end_leaf(
        self,
        change: &Change<'_>,
        end: TreeEnd,
    ) -> Result<Option<ExclusiveGuard<'a>>> {
        if let Some(leaf) = self.known_end_leaf(end) {
            return Ok(Some(leaf));
        }
        let mut empty = Vec::new();
        loop {
            if let Some(found) = self.at_end(end, &mut empty, |leaf| Ok(leaf.upgrade()?))? {
                return Ok(found);
            }
            // This thread has starved. Unless this leaf is empty, it has the entry.
            let leaf = self.exclusive_leaf_locked(end.target())?;
            let (node, torn) = (Node::new(&leaf[..]), |torn| Error::torn(leaf.page(), torn));
            if node.count().map_err(torn)? > 0 {
                return Ok(Some(leaf));
            }
            let mut key = Vec::new();
            if end == TreeEnd::Last && node.lower_into(&mut key).map_err(torn)? {
                key.push(0);
            }
            drop(leaf);
            self.merge(change, &key)?;
        }
    }
}
