//! Looking up one key.

use std::borrow::Cow;

use vellum_pool::SharedGuard;

use super::Access;
use super::descend::{Step, Target};
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::{self, BlobRef};
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
        let position = self.read(leaf, |node| node.find(key))?;
        if !position.exact {
            leaf.validate()?;
            return Ok(None);
        }
        let place = self.read(leaf, |node| node.payload_place(position.index))?;
        if place.blob {
            // A blob's page is as large as its reference says only as long as the reference is
            // there: the leaf is held until the blob is.
            let leaf = leaf.upgrade_shared()?;
            return Ok(Some(self.value_at(&leaf, position.index)?));
        }
        let mut value = Vec::new();
        self.read(leaf, |node| node.payload_into(place, &mut value))?;
        leaf.validate()?;
        Ok(Some(Value::Inline(Cow::Owned(value))))
    }

    pub(crate) fn get_locked(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        let torn = |torn| Error::torn(leaf.page(), torn);
        let position = Node::new(&leaf[..]).find(key).map_err(torn)?;
        match position.exact {
            true => self.value_at(&leaf, position.index).map(Some),
            false => Ok(None),
        }
    }

    /// The value of an entry in a leaf that is held.
    fn value_at(self, leaf: &SharedGuard<'a>, index: usize) -> Result<Value<'a>> {
        let torn = |torn| Error::torn(leaf.page(), torn);
        let node = Node::new(&leaf[..]);
        let place = node.payload_place(index).map_err(torn)?;
        let payload = node.payload(place).map_err(torn)?;
        if !place.blob {
            return Ok(Value::Inline(Cow::Owned(payload.to_vec())));
        }
        let blob = BlobRef::decode(payload)
            .ok_or_else(|| Error::damaged(leaf.page(), "a reference to a blob makes no sense"))?;
        self.open_blob(blob).map(Value::Blob)
    }

    /// The blob of `key` and its reference; none if there is no value, or it lies in the leaf.
    pub(crate) fn get_blob(self, key: &[u8]) -> Result<Option<(BlobRef, Blob<'a>)>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        let torn = |torn| Error::torn(leaf.page(), torn);
        let node = Node::new(&leaf[..]);
        let position = node.find(key).map_err(torn)?;
        if !position.exact {
            return Ok(None);
        }
        let place = node.payload_place(position.index).map_err(torn)?;
        if !place.blob {
            return Ok(None);
        }
        let blob = BlobRef::decode(node.payload(place).map_err(torn)?)
            .ok_or_else(|| Error::damaged(leaf.page(), "a reference to a blob makes no sense"))?;
        Ok(Some((blob, self.open_blob(blob)?)))
    }

    /// Holds a blob whose reference is held.
    pub(crate) fn open_blob(self, blob: BlobRef) -> Result<Blob<'a>> {
        let guard = self.core.pool.fix_shared(blob.page)?;
        if blob::len(&guard) != blob.len {
            let what = format!("its value has {} bytes, not {}", blob::len(&guard), blob.len);
            return Err(Error::damaged(blob.page, what));
        }
        Ok(Blob::new(guard, blob.len as usize))
    }

    /// Copies the value of `key` to `value`; false if there is none. Allocates nothing unless
    /// `value` is too small.
    #[inline]
    pub(crate) fn get_into(self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let found = self.attempt(|| self.try_get_into(key, value))?;
        if let Some(Some(found)) = found {
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
            let position = self.read(leaf, |node| node.find(key))?;
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
        let torn = |torn| Error::torn(leaf.page(), torn);
        let node = Node::new(&leaf[..]);
        let position = node.find(key).map_err(torn)?;
        if !position.exact {
            return Ok(None);
        }
        let place = node.payload_place(position.index).map_err(torn)?;
        if place.blob {
            let value = self.value_at(&leaf, position.index)?;
            drop(leaf);
            return Ok(Some(read(&value)));
        }
        Ok(Some(read(node.payload(place).map_err(torn)?)))
    }
}
