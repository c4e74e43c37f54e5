//! Insert, upsert and remove: the change of one leaf.
//!
//! Everything a change needs is there before the first byte changes: a blob is allocated and
//! filled first, a page for a split before the split. So a full pool or disk is an error and
//! nothing else.

use std::io;
use std::sync::atomic::Ordering;

use vellum_pool::ExclusiveGuard;

use super::Access;
use super::apply::{Action, apply, init};
use super::held_leaf::HeldLeaf;
use crate::error::{Error, Result};
use crate::node::{Node, Payload, Torn};
use crate::page::PageKind;
use crate::page::blob::{self, BLOB_DATA, BLOB_REF, BlobRef};
use crate::store::core::Change;

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
        let change = self.core.change()?;
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
        let inline = value.len() <= self.core.limits.max_inline_value(key.len());
        if let (true, Incoming::Bytes(bytes)) = (inline, &value) {
            return self.put_payload(change, key, Payload::Inline(bytes), existing);
        }
        if inline {
            let mut bytes = vec![0; value.len()];
            change.callers_code(|| value.write(&mut bytes))?;
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
                let change = self.core.change()?;
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
        let change = self.core.change()?;
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
        let mut guard = self.core.pool.allocate(self.core.blob_frames(len as u64))?;
        let page = init(change, &mut guard, PageKind::Blob, 0, self.tree.id);
        blob::put_len(&mut guard, len as u64);
        blob::put_key(&mut guard, key);
        let mut unwritten = Unwritten { access: self, change, guard: Some(guard) };
        if let Some(guard) = &mut unwritten.guard {
            change.callers_code(|| value.write(&mut guard[BLOB_DATA..BLOB_DATA + len]))?;
        }
        unwritten.guard = None;
        Ok(BlobRef::whole(page, len as u64))
    }

    /// Frees a blob that nothing refers to any more; readers that still have it keep it.
    pub(crate) fn free_blob(self, _change: &Change<'_>, blob: BlobRef) {
        self.core.free_value(self.tree.id, blob);
    }

    /// Frees a page that nothing refers to any more.
    pub(crate) fn free_page(self, _change: &Change<'_>, guard: ExclusiveGuard<'a>) {
        let page = guard.page();
        for edge in &self.tree.edges {
            if edge.load(Ordering::Relaxed) == page.id.0 {
                edge.store(0, Ordering::Relaxed);
            }
        }
        if let Err(error) = self.core.pool.free(guard) {
            tracing::warn!("{page} could not be freed and stays unused: {error}");
        }
    }

    pub(crate) fn check_key(self, key: &[u8]) -> Result<()> {
        let max = self.core.limits.max_key;
        match key.len() <= max {
            true => Ok(()),
            false => Err(Error::KeyTooLong { len: key.len(), max }),
        }
    }

    fn check_value(self, len: u64) -> Result<()> {
        let max = self.core.max_blob;
        match len <= max {
            true => Ok(()),
            false => Err(Error::ValueTooLong { len, max }),
        }
    }

    /// Checks an entry against the limits; true if its value becomes a blob.
    pub(crate) fn check_entry(self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.check_key(key)?;
        self.check_value(value.len() as u64)?;
        Ok(value.len() > self.core.limits.max_inline_value(key.len()))
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
