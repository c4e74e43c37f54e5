//! Changes of one entry: insert, upsert, remove, update in place; changes that depend on what is
//! there (`take`, `compare_and_swap`, `fetch_and_update`); the ends of a tree (`first`, `last`,
//! `pop_first`, `pop_last`).
//!
//! Everything a change needs is there before the first byte changes: a blob is allocated and
//! filled first, a page for a split before the split. So a full pool or disk is an error and
//! nothing else.

use std::borrow::Cow;
use std::io;
use std::sync::atomic::Ordering;

use vellum_pool::{ExclusiveGuard, OptimisticGuard};

use super::Access;
use super::apply::{Action, apply, init};
use super::lookup::{Held, HeldLeaf, LongValue, Step, Stop, Target};
use crate::error::{Error, Result};
use crate::node::{Node, Payload, Torn};
use crate::page::PageKind;
use crate::page::blob::{self, BLOB_DATA, BLOB_REF, BlobRef};
use crate::store::pages::Change;
use crate::value::Value;

/// Entries, and bytes of keys and values, that are stored under one passage of the gate.
const BATCH: usize = 128;
const BATCH_BYTES: usize = 64 << 10;

/// What to do if the key is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    Refuse,
    Replace,
}

/// A value that is on its way in.
pub(crate) enum Incoming<'v> {
    Bytes(&'v [u8]),
    /// So many bytes, which the function writes.
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

/// A new page that is freed again if the value does not come, also when its writer panics.
struct Unwritten<'a, 'c> {
    access: Access<'a>,
    change: &'c Change<'c>,
    guard: Option<ExclusiveGuard<'a>>,
}

impl Drop for Unwritten<'_, '_> {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.access.free_page(self.change, guard);
        }
    }
}

impl<'a> Access<'a> {
    /// Stores a value; true if it replaced one.
    pub(crate) fn put(self, key: &[u8], value: Incoming<'_>, existing: Existing) -> Result<bool> {
        self.check_key(key)?;
        self.check_value(value.len() as u64)?;
        let change = self.pages.change()?;
        self.check_dropped()?;
        self.put_in(&change, key, value, existing)
    }

    /// As [`put`](Self::put), within a change; key and value were checked.
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
        loop {
            let mut leaf = self.exclusive_leaf(key)?;
            let held = HeldLeaf::from(&leaf);
            let position = held.position(key)?;
            if position.exact && existing == Existing::Refuse {
                return Err(Error::KeyExists);
            }
            let (index, mut old_blob) = (position.index, None);
            if position.exact {
                old_blob = held.value(index)?.blob();
            }
            let action = match position.exact {
                true => Action::Replace { index, payload },
                false => Action::Insert { index, key, payload },
            };
            if apply(change, &mut leaf, action)? {
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

    /// Splits the leaf for `key` until an entry, new or in place of an old one, fits.
    pub(super) fn make_room_for(
        self,
        change: &Change<'_>,
        key: &[u8],
        payload: Payload<'_>,
    ) -> Result<()> {
        self.make_room(change, key, 0, &|leaf| leaf_has_room(leaf, key, payload))
    }

    /// Stores entries, as many under one lock as come one after the other to a leaf; returns how
    /// many. No lock is held, and no change under way, while `entries` runs.
    pub(crate) fn extend<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        entries: impl Iterator<Item = (K, V)>,
    ) -> Result<u64> {
        let (mut stored, mut batch, mut bytes) = (0, Vec::with_capacity(BATCH), 0);
        let mut entries = entries.fuse();
        loop {
            let next = entries.next();
            let ended = next.is_none();
            if let Some((key, value)) = next {
                bytes += key.as_ref().len() + value.as_ref().len();
                batch.push((key, value));
            }
            if ended || batch.len() == BATCH || bytes >= BATCH_BYTES {
                let change = self.pages.change()?;
                self.check_dropped()?;
                let mut rest = &batch[..];
                while let [(key, value), ..] = rest {
                    let (key, value) = (key.as_ref(), value.as_ref());
                    if self.check_entry(key, value)? {
                        self.put_in(&change, key, Incoming::Bytes(value), Existing::Replace)?;
                        rest = &rest[1..];
                    } else {
                        rest = &rest[self.extend_leaf(&change, rest)?..];
                    }
                }
                stored += batch.len() as u64;
                batch.clear();
                bytes = 0;
            }
            if ended {
                return Ok(stored);
            }
        }
    }

    /// Stores the first entries, those that go to one leaf and fit there, or makes room for the
    /// first one; returns how many it stored.
    fn extend_leaf<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        self,
        change: &Change<'_>,
        entries: &[(K, V)],
    ) -> Result<usize> {
        let (mut stored, mut old_blobs, mut leaf) = (0, Vec::new(), None);
        let mut full = None;
        for (key, value) in entries {
            let (key, value) = (key.as_ref(), value.as_ref());
            if self.check_entry(key, value).unwrap_or(true) {
                break;
            }
            let leaf = match &mut leaf {
                None => leaf.insert(self.exclusive_leaf(key)?),
                Some(leaf) => {
                    let covers = Node::new(&leaf[..]).covers(key);
                    if !covers.map_err(|torn| Error::torn(leaf.page(), torn))? {
                        break;
                    }
                    leaf
                }
            };
            let held = HeldLeaf::from(&*leaf);
            let position = held.position(key)?;
            let (index, payload) = (position.index, Payload::Inline(value));
            let (action, blob) = match position.exact {
                true => (Action::Replace { index, payload }, held.value(index)?.blob()),
                false => (Action::Insert { index, key, payload }, None),
            };
            if !apply(change, leaf, action)? {
                full = Some((key, payload));
                break;
            }
            old_blobs.extend(blob);
            stored += 1;
        }
        drop(leaf);
        for blob in old_blobs {
            self.free_blob(change, blob);
        }
        if let (0, Some((key, payload))) = (stored, full) {
            self.make_room_for(change, key, payload)?;
        }
        Ok(stored)
    }

    /// Removes an entry; true if it was there.
    pub(crate) fn remove(self, key: &[u8]) -> Result<bool> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        self.remove_in(&change, key)
    }

    /// As [`remove`](Self::remove), within a change.
    pub(crate) fn remove_in(self, change: &Change<'_>, key: &[u8]) -> Result<bool> {
        let mut leaf = self.exclusive_leaf(key)?;
        let Some((index, held)) = HeldLeaf::from(&leaf).find(key)? else { return Ok(false) };
        let old_blob = held.blob();
        apply(change, &mut leaf, Action::Remove { index })?;
        self.after_removal(change, leaf, key, old_blob.as_slice());
        Ok(true)
    }

    /// Allocates a blob for the value of `key` and fills it.
    pub(crate) fn store_blob(
        self,
        change: &Change<'_>,
        key: &[u8],
        value: Incoming<'_>,
    ) -> Result<BlobRef> {
        let len = value.len();
        let mut guard = self.pages.pool.allocate(self.pages.blob_frames(len as u64))?;
        let page = init(change, &mut guard, PageKind::Blob, 0, self.tree.id);
        blob::put_len(&mut guard, len as u64);
        blob::put_key(&mut guard, key);
        let mut unwritten = Unwritten { access: self, change, guard: Some(guard) };
        if let Some(guard) = &mut unwritten.guard {
            change.run_callback(|| value.write(&mut guard[BLOB_DATA..BLOB_DATA + len]))?;
        }
        unwritten.guard = None;
        Ok(BlobRef::whole(page, len as u64))
    }

    /// Frees a blob that nothing refers to any more; readers that still have it keep it.
    pub(crate) fn free_blob(self, _change: &Change<'_>, blob: BlobRef) {
        self.pages.free_value(self.tree.id, blob);
    }

    /// Frees a page that nothing refers to any more.
    pub(crate) fn free_page(self, _change: &Change<'_>, guard: ExclusiveGuard<'a>) {
        let page = guard.page();
        for edge in &self.tree.edges {
            if edge.load(Ordering::Relaxed) == page.id.0 {
                edge.store(0, Ordering::Relaxed);
            }
        }
        if let Err(error) = self.pages.pool.free(guard) {
            tracing::warn!("{page} could not be freed and stays unused: {error}");
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
        let max = self.pages.max_blob;
        match len <= max {
            true => Ok(()),
            false => Err(Error::ValueTooLong { len, max }),
        }
    }

    /// Checks an entry against the limits; true if its value becomes a blob.
    pub(crate) fn check_entry(self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.check_key(key)?;
        self.check_value(value.len() as u64)?;
        Ok(value.len() > self.pages.limits.max_inline_value(key.len()))
    }
}

/// Whether an entry, new or in place of an old one, fits a leaf.
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

/// What an attempt under the leaf's lock found.
enum Found {
    Nothing,
    Changed,
    /// The value is a blob, which cannot be replaced while the leaf is locked.
    Blob,
}

impl<'a> Access<'a> {
    /// Changes the value of `key` in place; false if there is none.
    pub(crate) fn update(self, key: &[u8], change: &mut dyn FnMut(&mut [u8])) -> Result<bool> {
        let begun = self.pages.change()?;
        self.check_dropped()?;
        match self.update_inline(&begun, key, change)? {
            Found::Nothing => Ok(false),
            Found::Changed => Ok(true),
            Found::Blob => self.update_blob(&begun, key, change),
        }
    }

    fn update_inline(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<Found> {
        let mut leaf = self.exclusive_leaf(key)?;
        // On a copy: should `change` panic, the page is as it was.
        let (index, mut value) = match HeldLeaf::from(&leaf).find(key)? {
            None => return Ok(Found::Nothing),
            Some((_, Held::Blob(_))) => return Ok(Found::Blob),
            Some((index, Held::Inline(value))) => (index, value.to_vec()),
        };
        begun.run_callback(|| change(&mut value));
        apply(begun, &mut leaf, Action::Replace { index, payload: Payload::Inline(&value) })?;
        Ok(Found::Changed)
    }

    /// Puts a changed copy in the place of a blob, unless another change came first.
    fn update_blob(
        self,
        begun: &Change<'_>,
        key: &[u8],
        change: &mut dyn FnMut(&mut [u8]),
    ) -> Result<bool> {
        loop {
            // The old blob is held to the end: its place cannot become another blob's meanwhile,
            // so finding the same reference again means that nothing changed.
            let Some((old, long)) = self.get_blob(key)? else {
                // It became a value in a leaf, or went.
                match self.update_inline(begun, key, change)? {
                    Found::Nothing => return Ok(false),
                    Found::Changed => return Ok(true),
                    Found::Blob => continue,
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
            let found = HeldLeaf::from(&leaf).find(key)?;
            if let Some((index, Held::Blob(blob))) = found
                && blob == old
            {
                let payload = new.encode();
                let payload = Payload::Blob(&payload);
                apply(begun, &mut leaf, Action::Replace { index, payload })?;
                drop((leaf, long));
                self.free_blob(begun, old);
                return Ok(true);
            }
            drop(leaf);
            self.free_blob(begun, new);
        }
    }
}

/// What becomes of a value.
pub(crate) enum Verdict<'v> {
    Keep,
    Remove,
    Put(Cow<'v, [u8]>),
}

/// Decides about the value of a key, or about there being none.
type Decide<'f, 'v> = &'f mut dyn FnMut(Option<&[u8]>) -> Verdict<'v>;

/// A value as it was when it was decided about. A blob is held, so no other one has its place: the
/// same reference is the same value.
enum Old<'a> {
    Nothing,
    Inline(Vec<u8>),
    Blob(BlobRef, LongValue<'a>),
}

impl<'a> Old<'a> {
    fn is(&self, found: Option<Held<'_>>) -> bool {
        match (self, found) {
            (Old::Nothing, None) => true,
            (Old::Inline(old), Some(Held::Inline(value))) => old == value,
            (Old::Blob(old, _), Some(Held::Blob(blob))) => *old == blob,
            _ => false,
        }
    }

    fn blob(&self) -> Option<BlobRef> {
        match self {
            Old::Blob(blob, _) => Some(*blob),
            _ => None,
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Old::Nothing => None,
            Old::Inline(value) => Some(value),
            Old::Blob(_, long) => Some(&long.value),
        }
    }

    fn into_value(self) -> Option<Value<'a>> {
        match self {
            Old::Nothing => None,
            Old::Inline(value) => Some(Value::Inline(Cow::Owned(value))),
            Old::Blob(_, long) => Some(long.value),
        }
    }
}

/// An end of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    First,
    Last,
}

impl Edge {
    fn target(self) -> Target<'static> {
        match self {
            Edge::First => Target::Key(&[]),
            Edge::Last => Target::Last,
        }
    }

    /// The number of the entry at this end of a leaf that has some.
    fn index(self, count: usize) -> usize {
        match self {
            Edge::First => 0,
            Edge::Last => count - 1,
        }
    }
}

impl<'a> Access<'a> {
    /// Has `decide` say what becomes of the value of `key`, and does so, as one step; returns what
    /// the value was. `decide` is called under the leaf's lock, and again if another change came
    /// between that and the change.
    pub(crate) fn alter(self, key: &[u8], decide: Decide<'_, '_>) -> Result<Option<Value<'a>>> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        let mut blob = None;
        loop {
            let mut leaf = self.exclusive_leaf(key)?;
            let found = HeldLeaf::from(&leaf).find(key)?;
            let (index, old) = match (found, blob.take()) {
                (None, _) => (0, Old::Nothing),
                (Some((index, Held::Inline(value))), _) => (index, Old::Inline(value.to_vec())),
                (Some((index, Held::Blob(now))), Some((then, value))) if now == then => {
                    (index, Old::Blob(now, value))
                }
                (Some((_, Held::Blob(_))), _) => {
                    drop(leaf);
                    blob = self.get_blob(key)?;
                    continue;
                }
            };
            match (change.run_callback(|| decide(old.bytes())), &old) {
                (Verdict::Keep, _) | (Verdict::Remove, Old::Nothing) => {}
                (Verdict::Remove, _) => {
                    apply(&change, &mut leaf, Action::Remove { index })?;
                    self.after_removal(&change, leaf, key, old.blob().as_slice());
                }
                (Verdict::Put(value), _) => {
                    if !self.put_over(&change, leaf, key, &value, &old)? {
                        continue;
                    }
                }
            }
            return Ok(old.into_value());
        }
    }

    /// Stores a value if that of `key`, whose leaf is held, is still `old`; false if it is not.
    fn put_over(
        self,
        change: &Change<'_>,
        leaf: ExclusiveGuard<'a>,
        key: &[u8],
        value: &[u8],
        old: &Old<'a>,
    ) -> Result<bool> {
        if !self.check_entry(key, value)? {
            return self.put_payload_over(change, Some(leaf), key, Payload::Inline(value), old);
        }
        drop(leaf);
        let blob = self.store_blob(change, key, Incoming::Bytes(value))?;
        let stored = self.put_payload_over(change, None, key, Payload::Blob(&blob.encode()), old);
        if !matches!(stored, Ok(true)) {
            self.free_blob(change, blob);
        }
        stored
    }

    fn put_payload_over(
        self,
        change: &Change<'_>,
        mut held: Option<ExclusiveGuard<'a>>,
        key: &[u8],
        payload: Payload<'_>,
        old: &Old<'a>,
    ) -> Result<bool> {
        loop {
            let mut leaf = match held.take() {
                Some(leaf) => leaf,
                None => self.exclusive_leaf(key)?,
            };
            let found = HeldLeaf::from(&leaf);
            let position = found.position(key)?;
            let index = position.index;
            let now = position.exact.then(|| found.value(index)).transpose()?;
            if !old.is(now) {
                return Ok(false);
            }
            let action = match position.exact {
                true => Action::Replace { index, payload },
                false => Action::Insert { index, key, payload },
            };
            if apply(change, &mut leaf, action)? {
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

    /// The leaf with the first or last entry; none if there is no entry. Leaves that lie beyond it
    /// and are empty, which a merge that failed leaves, come to `empty`: as long as none of those
    /// changes, the entry is the first or last one.
    fn edge_leaf(
        self,
        edge: Edge,
        empty: &mut Vec<OptimisticGuard<'a>>,
    ) -> Step<Option<OptimisticGuard<'a>>> {
        empty.clear();
        let (mut fence, mut before) = (Vec::new(), Vec::new());
        loop {
            let target = if empty.is_empty() { edge.target() } else { Target::Key(&fence) };
            let leaf = self.leaf(target)?.node;
            let count = self.read(leaf, Node::count)?;
            if count > 0 {
                leaf.validate()?;
                return Ok(Some(leaf));
            }
            std::mem::swap(&mut fence, &mut before);
            let more = self.read(leaf, |node| match edge {
                Edge::First => node.upper_into(&mut fence),
                Edge::Last => node.lower_into(&mut fence),
            })?;
            leaf.validate()?;
            if more && edge == Edge::First {
                fence.push(0);
            }
            let goes_on = match edge {
                Edge::First => fence > before,
                Edge::Last => fence < before,
            };
            if !more {
                empty.push(leaf);
                return Ok(None);
            }
            // Always true of a sound tree; a damaged one could lead in a circle.
            if !empty.is_empty() && !goes_on {
                return Err(Stop::Fail(Error::fences(leaf.page())));
            }
            empty.push(leaf);
        }
    }

    /// What `take` makes of the leaf with the first or last entry, while the leaves in `empty` had
    /// none; none within if there is no entry, none if it starves.
    fn at_edge<T>(
        self,
        edge: Edge,
        empty: &mut Vec<OptimisticGuard<'a>>,
        take: impl Fn(OptimisticGuard<'a>) -> Step<T>,
    ) -> Result<Option<Option<T>>> {
        self.attempt(|| {
            let taken = self.edge_leaf(edge, empty)?.map(&take).transpose()?;
            empty.iter().try_for_each(OptimisticGuard::validate)?;
            Ok(taken)
        })
    }

    /// The first or last entry.
    pub(crate) fn edge_entry(self, edge: Edge) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let mut empty = Vec::new();
        let entry = |leaf| Ok((leaf, self.key_and_value(leaf, edge)?));
        loop {
            let found = self.at_edge(edge, &mut empty, entry)?;
            let found = match found {
                Some(found) => found,
                None => {
                    // Starved. Unless this leaf is empty it has the entry.
                    empty.clear();
                    let held = self.shared_leaf(edge.target())?;
                    let leaf = self.pages.pool.optimistic(held.page())?;
                    let is_empty = Node::new(&held[..]).count() == Ok(0);
                    match self.key_and_value(leaf, edge) {
                        _ if is_empty => continue,
                        Ok(found) => Some((leaf, found)),
                        Err(Stop::Fail(error)) => return Err(error),
                        Err(Stop::Restart) => continue,
                    }
                }
            };
            let (leaf, key) = match found {
                None => return Ok(None),
                Some((_, (key, Some(value)))) => return Ok(Some((key, value))),
                Some((leaf, (key, None))) => (leaf, key),
            };
            // A blob is read without its leaf. If that is unchanged, the entry was there all along.
            if let Some(value) = self.get(&key)?
                && [&leaf].into_iter().chain(&empty).all(|guard| guard.validate().is_ok())
            {
                return Ok(Some((key, value)));
            }
        }
    }

    /// The first or last entry of a leaf; the value only if it is no blob.
    fn key_and_value(
        self,
        leaf: OptimisticGuard<'a>,
        edge: Edge,
    ) -> Step<(Vec<u8>, Option<Value<'a>>)> {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        let blob = self.read(leaf, |node| {
            let index = edge.index(node.count()?.max(1));
            node.key_into(index, &mut key)?;
            let place = node.payload_place(index)?;
            node.payload_into(place, &mut value)?;
            Ok(place.blob)
        })?;
        leaf.validate()?;
        Ok((key, (!blob).then_some(Value::Inline(Cow::Owned(value)))))
    }

    /// Removes the first or last entry and returns it.
    pub(crate) fn pop(self, edge: Edge) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let change = self.pages.change()?;
        self.check_dropped()?;
        let mut blob: Option<(BlobRef, LongValue<'a>)> = None;
        loop {
            let Some(mut leaf) = self.exclusive_edge(&change, edge)? else { return Ok(None) };
            let torn = |torn| Error::torn(leaf.page(), torn);
            let node = Node::new(&leaf[..]);
            let index = edge.index(node.count().map_err(torn)?);
            let key = node.key(index).map_err(torn)?;
            let old = match (HeldLeaf::from(&leaf).value(index)?, blob.take()) {
                (Held::Inline(value), _) => Old::Inline(value.to_vec()),
                (Held::Blob(now), Some((then, value))) if now == then => Old::Blob(now, value),
                (Held::Blob(_), _) => {
                    drop(leaf);
                    blob = self.get_blob(&key)?;
                    continue;
                }
            };
            apply(&change, &mut leaf, Action::Remove { index })?;
            let hint = &self.tree.edges[edge as usize];
            if hint.load(Ordering::Relaxed) != leaf.page().id.0 {
                hint.store(leaf.page().id.0, Ordering::Relaxed);
            }
            // As long as it has entries, the next one pops those: a merge would have to be tried
            // for each.
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

    /// The leaf that an entry was popped from before, held exclusively, if it still has the first
    /// or last entry and no other thread holds it.
    #[inline]
    fn known_edge(self, edge: Edge) -> Option<ExclusiveGuard<'a>> {
        let hint = &self.tree.edges[edge as usize];
        let id = hint.load(Ordering::Relaxed);
        if id == 0 {
            return None;
        }
        let leaf = self.pages.pool.glance(self.page(id))?.upgrade().ok()?;
        let node = Node::new(&leaf[..]);
        let fence = match edge {
            Edge::First => node.lower(),
            Edge::Last => node.upper(),
        };
        // It may have been freed, and be something else, since the hint was read: then the hint has
        // gone. The only leaf that has no fence on this side has the entry, if it has any.
        let is_edge = hint.load(Ordering::Relaxed) == id
            && node.is_of(self.tree.id, 0)
            && fence == Ok(None)
            && node.count().is_ok_and(|count| count > 0);
        is_edge.then_some(leaf)
    }

    /// The leaf with the first or last entry, held exclusively; none if there is no entry.
    fn exclusive_edge(self, change: &Change<'_>, edge: Edge) -> Result<Option<ExclusiveGuard<'a>>> {
        if let Some(leaf) = self.known_edge(edge) {
            return Ok(Some(leaf));
        }
        let mut empty = Vec::new();
        loop {
            if let Some(found) = self.at_edge(edge, &mut empty, |leaf| Ok(leaf.upgrade()?))? {
                return Ok(found);
            }
            // Starved. Unless this leaf is empty it has the entry.
            let leaf = self.exclusive_leaf_locked(edge.target())?;
            let (node, torn) = (Node::new(&leaf[..]), |torn| Error::torn(leaf.page(), torn));
            if node.count().map_err(torn)? > 0 {
                return Ok(Some(leaf));
            }
            let mut key = Vec::new();
            if edge == Edge::Last && node.lower_into(&mut key).map_err(torn)? {
                key.push(0);
            }
            drop(leaf);
            self.merge(change, &key)?;
        }
    }
}
