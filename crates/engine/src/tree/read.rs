//! Looking up one key.

use std::borrow::Cow;

use vellum_pool::{Begun, OptimisticGuard, SharedGuard};

use super::Access;
use super::descend::{Step, Stop, Target, check_covers};
use super::held_leaf::{Held, HeldLeaf};
use crate::error::{Error, Result};
use crate::node::PayloadPlace;
use crate::page::blob::{self, BLOB_REF, BlobRef};
use crate::value::{Blob, Value};

impl<'a> Access<'a> {
    /// The value of `key`.
    pub(crate) fn get(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        match self.attempt(|| self.try_get(key))? {
            Some(found) => Ok(found),
            None => self.get_locked(key),
        }
    }

    fn try_get(self, key: &[u8]) -> Step<Option<Value<'a>>> {
        let leaf = self.leaf(Target::Key(key))?.node;
        let position = self.read(leaf, |node| node.find_reached(key))?;
        if !position.exact {
            leaf.validate()?;
            return Ok(None);
        }
        let place = self.read(leaf, |node| node.payload_place(position.index))?;
        if place.blob {
            let (_, blob) = self.try_blob(leaf, place, key)?;
            return Ok(Some(Value::Blob(blob)));
        }
        let mut value = Vec::new();
        self.read(leaf, |node| node.payload_into(place, &mut value))?;
        leaf.validate()?;
        Ok(Some(Value::Inline(Cow::Owned(value))))
    }

    pub(crate) fn get_locked(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        check_covers(&leaf, leaf.page(), key)?;
        let found = HeldLeaf::from(&leaf).find(key)?;
        found.map(|(_, held)| self.value_of(key, held)).transpose()
    }

    /// The value of an entry whose leaf is held.
    pub(super) fn value_of(self, key: &[u8], held: Held<'_>) -> Result<Value<'a>> {
        match held {
            Held::Inline(value) => Ok(Value::Inline(Cow::Owned(value.to_vec()))),
            Held::Blob(blob) => self.open_blob(blob, key).map(Value::Blob),
        }
    }

    /// The blob of `key` and its reference; none if there is no value, or it lies in the leaf.
    pub(crate) fn get_blob(self, key: &[u8]) -> Result<Option<(BlobRef, Blob<'a>)>> {
        let found = self.attempt(|| {
            let leaf = self.leaf(Target::Key(key))?.node;
            let place = self.read(leaf, |node| node.payload_for(key))?;
            let Some(place) = place.filter(|place| place.blob) else {
                leaf.validate()?;
                return Ok(None);
            };
            self.try_blob(leaf, place, key).map(Some)
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        let leaf = self.shared_leaf(Target::Key(key))?;
        check_covers(&leaf, leaf.page(), key)?;
        match HeldLeaf::from(&leaf).find(key)? {
            Some((_, Held::Blob(blob))) => Ok(Some((blob, self.open_blob(blob, key)?))),
            _ => Ok(None),
        }
    }

    /// Holds the blob of `key`, which an entry of `leaf` refers to, without holding the leaf while
    /// the blob is read: its other entries can be changed meanwhile.
    pub(super) fn try_blob(
        self,
        leaf: OptimisticGuard<'a>,
        place: PayloadPlace,
        key: &[u8],
    ) -> Step<(BlobRef, Blob<'a>)> {
        let mut reference = Vec::with_capacity(BLOB_REF);
        self.read(leaf, |node| node.payload_into(place, &mut reference))?;
        leaf.validate()?;
        let blob = HeldLeaf { page: leaf.page(), bytes: &[] }.blob(&reference)?;
        let pool = &self.core.pool;
        if let Some(guard) = pool.fix_shared_resident(blob.page) {
            // The reference was there when the page was held already: it is the blob.
            leaf.validate()?;
            return Ok((blob, self.blob_in(guard, blob, key)?));
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
        Ok((blob, self.blob_in(guard, blob, key)?))
    }

    fn blob_in(self, guard: SharedGuard<'a>, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        blob::check(&guard, self.tree.id, key, blob.len)
            .map_err(|what| Error::damaged(blob.page, what))?;
        Ok(Blob::new(guard, blob.len as usize))
    }

    /// Holds the blob of `key`, whose reference is held.
    pub(crate) fn open_blob(self, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
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
        let found = self.get(key)?;
        value.clear();
        if let Some(found) = &found {
            value.extend_from_slice(found);
        }
        Ok(found.is_some())
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
        match found {
            Some(found) => Ok(found),
            None => Ok(self.get_locked(key)?.is_some()),
        }
    }

    /// Runs `read` on the value of `key` in place.
    pub(crate) fn with<T>(self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let leaf = self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade_shared()?))?;
        let leaf = match leaf {
            Some(leaf) => leaf,
            None => self.shared_leaf(Target::Key(key))?,
        };
        check_covers(&leaf, leaf.page(), key)?;
        match HeldLeaf::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, Held::Inline(value))) => Ok(Some(read(value))),
            Some((_, Held::Blob(_))) => {
                drop(leaf);
                Ok(self.get(key)?.map(|value| read(&value)))
            }
        }
    }
}
