//! Looking up many keys at once: misses of one level are read together.

use super::Access;
use super::descend::{Stop, Target};
use crate::error::{Error, Result};
use crate::node::Node;
use crate::page::blob::{BLOB_REF, BlobRef};
use crate::value::Value;

impl<'a> Access<'a> {
    /// The values of `keys`, in their order.
    pub(crate) fn multi_get(self, keys: &[&[u8]]) -> Result<Vec<Option<Value<'a>>>> {
        let pages = (self.core.pool.capacity() / 4 / u64::from(self.core.page_frames)).max(1);
        let mut found = Vec::with_capacity(keys.len());
        for keys in keys.chunks(usize::try_from(pages).unwrap_or(usize::MAX)) {
            self.bring_in(keys)?;
            for key in keys {
                found.push(self.get(key)?);
            }
        }
        Ok(found)
    }

    /// Starts reading what is missing on the way to `keys`, level by level, then the blobs.
    fn bring_in(self, keys: &[&[u8]]) -> Result<()> {
        let mut pending: Vec<&[u8]> = keys.to_vec();
        let mut missing = Vec::new();
        // Every round brings all keys at least one level down; there are at most 256.
        for _ in 0..=u8::MAX {
            missing.clear();
            pending.retain(|key| match self.first_missing(key) {
                Ok(Some(page)) => {
                    missing.push(page);
                    true
                }
                Ok(None) => false,
                Err(Stop::Restart) => true,
                // The lookup itself meets the error again.
                Err(Stop::Fail(_)) => false,
            });
            if pending.is_empty() {
                break;
            }
            missing.sort_unstable();
            missing.dedup();
            self.core.pool.prefetch(&missing);
        }
        for key in keys {
            self.prefetch_blob(key)?;
        }
        Ok(())
    }

    /// Starts reading the blob of `key`, if its value is one that is not in memory.
    fn prefetch_blob(self, key: &[u8]) -> Result<()> {
        let leaf = self.attempt(|| {
            let leaf = self.leaf(Target::Key(key))?.node;
            let blob = self.read(leaf, |node| {
                let position = node.find(key)?;
                Ok(position.exact && node.payload_place(position.index)?.blob)
            })?;
            leaf.validate()?;
            // The reference stays valid as long as the leaf is held.
            Ok(if blob { Some(leaf.upgrade_shared()?) } else { None })
        })?;
        let Some(Some(leaf)) = leaf else { return Ok(()) };
        let torn = |torn| Error::torn(leaf.page(), torn);
        let node = Node::new(&leaf[..]);
        let place = node.payload_place(node.find(key).map_err(torn)?.index).map_err(torn)?;
        let payload = node.payload(place).map_err(torn)?;
        debug_assert_eq!(payload.len(), BLOB_REF);
        if let Some(blob) = BlobRef::decode(payload)
            && !self.core.pool.is_resident(blob.page)
        {
            self.core.pool.prefetch(&[blob.page]);
        }
        Ok(())
    }
}
