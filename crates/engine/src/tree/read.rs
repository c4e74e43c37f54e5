//! Looking up one key.

use std::borrow::Cow;

use vellum_pool::{Begun, OptimisticGuard, PAGE_SIZE, SharedGuard};

use super::Access;
use super::descend::{Step, Stop, Target, check_covers};
use super::held_leaf::{Held, HeldLeaf};
use crate::error::{Error, Result};
use crate::node::PayloadPlace;
use crate::page::blob::{self, BLOB_REF, BLOB_REST, BlobRef};
use crate::store::within::Within;
use crate::tree::streams::Pin;
use crate::value::{Blob, Value};

/// A value with pages of its own, which keep their place: that of a blob for its guard, others for
/// the pin.
#[derive(Debug)]
pub(crate) struct LongValue<'a> {
    pub value: Value<'a>,
    _pin: Option<Pin<'a>>,
}

impl<'a> Access<'a> {
    /// The value of `key`.
    pub(crate) fn get(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        match self.attempt(|| self.try_get(key))? {
            Some(Some(found)) => Ok(found),
            _ => self.get_locked(key),
        }
    }

    /// `None` if the value is in pieces.
    fn try_get(self, key: &[u8]) -> Step<Option<Option<Value<'a>>>> {
        let leaf = self.leaf(Target::Key(key))?.node;
        let position = self.read(leaf, |node| node.find_reached(key))?;
        if !position.exact {
            leaf.validate()?;
            return Ok(Some(None));
        }
        let place = self.read(leaf, |node| node.payload_place(position.index))?;
        if place.blob {
            let blob = self.try_blob(leaf, place, key)?;
            return Ok(blob.map(|(_, blob)| Some(Value::Blob(blob))));
        }
        let mut value = Vec::new();
        self.read(leaf, |node| node.payload_into(place, &mut value))?;
        leaf.validate()?;
        Ok(Some(Some(Value::Inline(Cow::Owned(value)))))
    }

    /// The leaf for `key`, held shared; lock coupling all the way.
    fn leaf_locked(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        check_covers(&leaf, leaf.page(), key)?;
        Ok(leaf)
    }

    /// As [`leaf_locked`](Self::leaf_locked), without locks on the way there unless that starves.
    pub(super) fn leaf_for_reading(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        match self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade_shared()?))? {
            Some(leaf) => check_covers(&leaf, leaf.page(), key).map(|()| leaf),
            None => self.leaf_locked(key),
        }
    }

    pub(crate) fn get_locked(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        let leaf = self.leaf_locked(key)?;
        let position = HeldLeaf::from(&leaf).position(key)?;
        position.exact.then(|| self.value_at(leaf, position.index, key)).transpose()
    }

    /// The value of an entry, whose leaf is held until the value is.
    fn value_at(self, leaf: SharedGuard<'a>, index: usize, key: &[u8]) -> Result<Value<'a>> {
        match HeldLeaf::from(&leaf).value(index)? {
            Held::Inline(value) => Ok(Value::Inline(Cow::Owned(value.to_vec()))),
            Held::Blob(blob) if blob.is_whole() => self.open_blob(blob, key).map(Value::Blob),
            Held::Blob(blob) => {
                let pin = self.core.pin(blob.page.id);
                drop(leaf);
                self.copy_of(self.open_reader(blob, key, pin)?)
            }
        }
    }

    /// The value of `key` and its reference, if it has pages of its own. As long as the result
    /// lives, no other value gets the same reference.
    pub(crate) fn get_blob(self, key: &[u8]) -> Result<Option<(BlobRef, LongValue<'a>)>> {
        let found = self.attempt(|| {
            let leaf = self.leaf(Target::Key(key))?.node;
            let place = self.read(leaf, |node| node.payload_for(key))?;
            let Some(place) = place.filter(|place| place.blob) else {
                leaf.validate()?;
                return Ok(Some(None));
            };
            Ok(self.try_blob(leaf, place, key)?.map(Some))
        })?;
        if let Some(Some(found)) = found {
            let held = |(blob, value)| (blob, LongValue { value: Value::Blob(value), _pin: None });
            return Ok(found.map(held));
        }
        let leaf = self.leaf_locked(key)?;
        let Some((_, Held::Blob(blob))) = HeldLeaf::from(&leaf).find(key)? else {
            return Ok(None);
        };
        if blob.is_whole() {
            let value = Value::Blob(self.open_blob(blob, key)?);
            return Ok(Some((blob, LongValue { value, _pin: None })));
        }
        let (pin, reading) = (self.core.pin(blob.page.id), self.core.pin(blob.page.id));
        drop(leaf);
        let value = self.copy_of(self.open_reader(blob, key, reading)?)?;
        Ok(Some((blob, LongValue { value, _pin: Some(pin) })))
    }

    /// Holds the blob of `key`, which an entry of `leaf` refers to, without holding the leaf while
    /// the blob is read: its other entries can be changed meanwhile. None if it is in pieces.
    fn try_blob(
        self,
        leaf: OptimisticGuard<'a>,
        place: PayloadPlace,
        key: &[u8],
    ) -> Step<Option<(BlobRef, Blob<'a>)>> {
        let mut reference = Vec::with_capacity(BLOB_REF);
        self.read(leaf, |node| node.payload_into(place, &mut reference))?;
        leaf.validate()?;
        let blob = HeldLeaf { page: leaf.page(), bytes: &[] }.blob(&reference)?;
        if !blob.is_whole() {
            return Ok(None);
        }
        self.check_fits(blob)?;
        let pool = &self.core.pool;
        if let Some(guard) = pool.fix_shared_resident(blob.page) {
            // The reference was there when the page was held already: it is the blob.
            leaf.validate()?;
            return Ok(Some((blob, self.blob_in(guard, blob, key)?)));
        }
        // A blob's page is as large as its reference says only as long as the reference is there:
        // the leaf is held until the page is locked for the read.
        let held = leaf.upgrade_shared()?;
        let begun = pool.begin_shared(blob.page).map_err(Error::from)?;
        drop(held);
        let guard = match begun {
            Begun::Held(guard) => guard,
            Begun::Claimed(pending) => pending.read().map_err(Error::from)?,
            Begun::Busy => return Err(Stop::Restart),
        };
        Ok(Some((blob, self.blob_in(guard, blob, key)?)))
    }

    /// A whole value can be held in the pool.
    fn check_fits(self, blob: BlobRef) -> Result<()> {
        let pool = self.core.pool.capacity();
        match u64::from(blob.page.frames) <= pool {
            true => Ok(()),
            false => {
                let max = pool * PAGE_SIZE as u64 - BLOB_REST as u64;
                Err(Error::NeedsReader { len: blob.len, max })
            }
        }
    }

    fn blob_in(self, guard: SharedGuard<'a>, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        blob::check(&guard, self.tree.id, key, blob.len)
            .map_err(|what| Error::damaged(blob.page, what))?;
        Ok(Blob::new(guard, blob.len as usize))
    }

    /// Holds the blob of `key`, which is whole and whose reference is held.
    pub(crate) fn open_blob(self, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        self.check_fits(blob)?;
        self.blob_in(self.core.pool.fix_shared(blob.page)?, blob, key)
    }

    /// Copies the value of `key` to `value`; false, and `value` empty, if there is none. Allocates
    /// nothing unless `value` is too small.
    #[inline]
    pub(crate) fn get_into(self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let found = self.attempt(|| self.try_get_into(key, value))?;
        if let Some(Some(found)) = found {
            if !found {
                // An attempt that was restarted may have copied a value that went since.
                value.clear();
            }
            return Ok(found);
        }
        // A blob, or starved.
        value.clear();
        if let Some(Some(found)) = self.attempt(|| self.try_get_whole(key))? {
            value.extend_from_slice(&found);
            return Ok(true);
        }
        let Some(mut reader) = self.reader(key)? else { return Ok(false) };
        reader.read_rest(value).inspect_err(|_| value.clear())?;
        Ok(true)
    }

    /// The value of `key` if it is whole and fits the pool.
    fn try_get_whole(self, key: &[u8]) -> Step<Option<Value<'a>>> {
        match self.try_get(key) {
            Err(Stop::Fail(Error::NeedsReader { .. })) => Ok(None),
            found => found.map(Option::flatten),
        }
    }

    /// `None` if the value is a blob.
    #[inline(always)]
    fn try_get_into(self, key: &[u8], value: &mut Vec<u8>) -> Step<Option<bool>> {
        let leaf = self.leaf(Target::Key(key))?.node;
        let place = self.read(leaf, |node| match node.payload_for(key)? {
            Some(place) if !place.blob => node.payload_into(place, value).map(|()| Some(place)),
            other => Ok(other),
        })?;
        leaf.validate()?;
        Ok(match place {
            Some(place) if place.blob => None,
            place => Some(place.is_some()),
        })
    }

    /// Whether `key` has a value.
    pub(crate) fn contains(self, key: &[u8]) -> Result<bool> {
        let found = self.attempt(|| {
            let leaf = self.leaf(Target::Key(key))?.node;
            let position = self.read(leaf, |node| node.find_reached(key))?;
            leaf.validate()?;
            Ok(position.exact)
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        let leaf = self.leaf_locked(key)?;
        Ok(HeldLeaf::from(&leaf).position(key)?.exact)
    }

    /// Runs `read` on the value of `key` in place.
    pub(crate) fn with<T>(self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let leaf = self.leaf_for_reading(key)?;
        match HeldLeaf::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, Held::Inline(value))) => {
                let _within = Within::of(&self.core.gate);
                Ok(Some(read(value)))
            }
            Some((_, Held::Blob(_))) => {
                drop(leaf);
                let value = self.get(key)?;
                let _within = Within::of(&self.core.gate);
                Ok(value.map(|value| read(&value)))
            }
        }
    }
}
