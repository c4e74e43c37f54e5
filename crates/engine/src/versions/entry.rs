//! Entries, their changes, and the order of these.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use crate::key::Key;
use crate::page::blob::BlobRef;

/// A point in the order of the changes that kept old values. A view sees the changes up to its
/// time.
pub(crate) type Time = u64;

/// What an old value takes in memory beside the bytes of its key and of itself: its chain, and the
/// places in lists and maps. It was measured.
const CHAIN_BYTES: u64 = 300;

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
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replaced<'e> {
    pub tree: u32,
    pub key: &'e [u8],
    /// `None` if there is no entry.
    pub old: Option<ValueRef<'e>>,
}

/// A value that a change is about to replace. It is copied only if a view sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ValueRef<'e> {
    Bytes(&'e [u8]),
    Shared(&'e Arc<[u8]>),
    Blob(BlobRef),
}

impl ValueRef<'_> {
    pub(crate) fn to_old(self) -> OldValue {
        match self {
            ValueRef::Bytes(bytes) => OldValue::Inline(bytes.into()),
            ValueRef::Shared(bytes) => OldValue::Inline(bytes.clone()),
            ValueRef::Blob(blob) => OldValue::Blob(blob),
        }
    }
}

/// An entry as it was before a change.
#[derive(Debug)]
pub(crate) struct OldEntry {
    pub tree: u32,
    pub key: Key,
    pub old: Old,
}

impl OldEntry {
    pub(crate) fn replaced(&self) -> Replaced<'_> {
        let old = self.old.as_ref().map(|old| match old {
            OldValue::Inline(bytes) => ValueRef::Shared(bytes),
            OldValue::Blob(blob) => ValueRef::Blob(*blob),
        });
        Replaced { tree: self.tree, key: &self.key, old }
    }
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

    /// One of `count` buckets, by other bits.
    pub(crate) fn bucket(self, count: usize) -> usize {
        (self.0[0] >> 32) as usize % count
    }

    /// One of the `count` lists of a bucket, a power of two, by other bits than both.
    pub(crate) fn list(self, count: usize) -> usize {
        self.0[1] as usize & (count - 1)
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
