//! Entries, their changes, and the order of these.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use crate::key::Key;
use crate::page::blob::BlobRef;

/// A point in the order of the changes that kept old values. A view sees the changes up to its
/// time.
pub(crate) type Time = u64;

/// What a chain and its key take in memory beside the bytes of keys and values.
const CHAIN_BYTES: u64 = 160;

/// The value of an entry that was changed, or `None` if there was no entry.
pub(crate) type Old = Option<OldValue>;

/// A value that was replaced or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OldValue {
    Inline(Arc<[u8]>),
    /// The pages of the value are pinned while the version is kept.
    Blob(BlobRef),
}

/// An entry that a change is about to change.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub tree: u32,
    pub key: Key,
    pub old: Old,
}

/// The keyed hash of a tree's number and a key: 128 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHash([u64; 2]);

impl EntryHash {
    /// The whole hash.
    pub(crate) fn bits(self) -> [u64; 2] {
        self.0
    }

    /// One of `count` places.
    pub(crate) fn place(self, count: u64) -> usize {
        (self.0[0] % count) as usize
    }

    /// The same, by other bits.
    pub(crate) fn other_place(self, count: usize) -> usize {
        (self.0[0] >> 32) as usize % count
    }
}

/// The key of hashes: a secret of each store. In the simulator, which does the same for a seed each
/// time, all have the same.
#[cfg(not(feature = "testing"))]
type HashKey = std::hash::RandomState;
#[cfg(feature = "testing")]
type HashKey = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

/// Makes hashes of entries that no caller can foresee.
#[derive(Debug)]
pub(crate) struct EntryHasher(HashKey);

impl EntryHasher {
    pub(crate) fn new() -> EntryHasher {
        EntryHasher(HashKey::default())
    }

    pub(crate) fn hash(&self, tree: u32, key: &[u8]) -> EntryHash {
        let mut hasher = self.0.build_hasher();
        hasher.write_u32(tree);
        hasher.write(key);
        let one = hasher.finish();
        // The state has 256 bits: another word of it costs less than another hash.
        hasher.write_u64(one);
        EntryHash([one, hasher.finish()])
    }
}

/// What an old value takes in memory, in bytes.
pub(crate) fn size_of(key: &[u8], old: &Old) -> u64 {
    let value = match old {
        Some(OldValue::Inline(value)) => value.len(),
        Some(OldValue::Blob(_)) | None => 0,
    };
    (key.len() + value) as u64 + CHAIN_BYTES
}
