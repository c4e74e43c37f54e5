//! The public face of a tree.

use std::io;
use std::sync::Arc;

use super::check::Strict;
use super::modify::{Existing, Incoming};
use super::multi_get::Found;
use super::range::{self, KeyRange};
use super::salvage::Visit;
use super::{Access, Cursor, Entries, TreeStat, TreeState};
use crate::error::Result;
use crate::store::core::StoreCore;
use crate::value::Value;

/// An ordered map from keys to values, both strings of bytes. A cheap handle; clone it, send it,
/// share it.
///
/// Keys have up to [`max_key`](crate::Limits::max_key) bytes; the empty key is a key. Every single
/// operation is atomic, and sees all operations that returned before it began.
///
/// Values that are too long for a leaf come as guards ([`Value::Blob`]) that keep memory of the
/// pool. A thread may change what it holds: the guard keeps the old value.
#[derive(Clone, Debug)]
pub struct Tree {
    core: Arc<StoreCore>,
    state: Arc<TreeState>,
}

impl Tree {
    pub(crate) fn new(core: Arc<StoreCore>, state: Arc<TreeState>) -> Tree {
        Tree { core, state }
    }

    #[inline(always)]
    pub(crate) fn access(&self) -> Access<'_> {
        Access { core: &self.core, tree: &self.state }
    }

    #[inline(always)]
    fn open_access(&self) -> Result<Access<'_>> {
        self.core.check_open()?;
        Ok(self.access())
    }

    /// The tree's name.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value<'_>>> {
        self.open_access()?.get(key)
    }

    /// Copies the value of `key` to `value`; false, and `value` empty, if there is none. Allocates
    /// nothing if `value` has the capacity.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    #[inline]
    pub fn get_into(&self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        self.open_access()?.get_into(key, value)
    }

    /// Runs `read` on the value of `key`, in place and under a lock: it must not call the store.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn with<T>(&self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        self.open_access()?.with(key, read)
    }

    /// Whether `key` has a value. Reads no blob.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn contains(&self, key: &[u8]) -> Result<bool> {
        self.open_access()?.contains(key)
    }

    /// The values of many keys, in their order. Pages that are missing are read together, level by
    /// level, instead of one after the other.
    ///
    /// All blobs among the values are held at once, so they must fit the pool.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn multi_get(&self, keys: &[&[u8]]) -> Result<Vec<Option<Value<'_>>>> {
        self.open_access()?.multi_get(keys)
    }

    /// Calls `visit` for each key, in any order: with the key's number and its value, or none if
    /// there is none. Nothing is allocated for a key whose value lies in a leaf of 4 KiB.
    ///
    /// The lookups are interleaved: while one waits for memory or the device the others go on. A
    /// change that comes between restarts the one lookup that it concerns. `visit` must not change
    /// the key that it was called for, whose value it may hold.
    ///
    /// # Errors
    /// As [`get`](Tree::get); then `visit` was called for some keys only.
    #[inline]
    pub fn multi_get_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        mut visit: impl FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        self.open_access()?.multi_get_with(keys, |index, found| match found {
            Found::Nothing => visit(index, None),
            Found::Inline(bytes) => visit(index, Some(bytes)),
            Found::Held(value) => visit(index, Some(&value)),
        })
    }

    /// Stores a value for a new key.
    ///
    /// # Errors
    /// [`KeyExists`](crate::Error::KeyExists); limits; a full disk or pool. Then nothing changed.
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.access().put(key, Incoming::Bytes(value), Existing::Refuse).map(drop)
    }

    /// Stores a value; true if it replaced another one.
    ///
    /// # Errors
    /// Limits; a full disk or pool. Then nothing changed.
    pub fn upsert(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.access().put(key, Incoming::Bytes(value), Existing::Replace)
    }

    /// Stores a value of `len` bytes that `fill` writes, a long one right in its place in the pool.
    /// True if it replaced another one.
    ///
    /// `fill` gets a slice of zeros. It must not call the store.
    ///
    /// # Errors
    /// [`Input`](crate::Error::Input) if `fill` fails; otherwise as [`upsert`](Tree::upsert).
    pub fn upsert_with(
        &self,
        key: &[u8],
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> Result<bool> {
        let mut fill = Some(fill);
        let mut once = |target: &mut [u8]| match fill.take() {
            Some(fill) => fill(target),
            None => Err(io::Error::other("a value was asked for twice")),
        };
        self.access().put(key, Incoming::Fill(len, &mut once), Existing::Replace)
    }

    /// Changes the value of `key`, keeping its length, as one step: no other change comes between
    /// what `change` reads and what it writes. False if there is no value.
    ///
    /// `change` gets a copy and may get another one, if a change of a long value was overtaken. It
    /// must not call the store.
    ///
    /// # Errors
    /// Damage or a failed read; of long values also a full disk or pool. Then nothing changed.
    pub fn update(&self, key: &[u8], mut change: impl FnMut(&mut [u8])) -> Result<bool> {
        self.access().update(key, &mut change)
    }

    /// Removes an entry; true if it was there.
    ///
    /// # Errors
    /// Damage or a failed read. Then nothing changed.
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        self.access().remove(key)
    }

    /// A cursor that stands on no entry yet.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor::new(self.access())
    }

    /// All entries, in the order of their keys.
    pub fn entries(&self) -> Entries<'_> {
        self.range(..)
    }

    /// The entries of a range of keys, in the order of their keys: `"a".."f"`, `key..`, `..=key`.
    pub fn range(&self, range: impl KeyRange) -> Entries<'_> {
        Entries::new(self.access(), range::owned(&range))
    }

    /// The entries whose keys begin with `prefix`, in the order of their keys.
    pub fn prefix(&self, prefix: &[u8]) -> Entries<'_> {
        Entries::new(self.access(), range::of_prefix(prefix))
    }

    /// Fills an empty tree with sorted entries, bottom-up: every page is written once, and full.
    /// Returns the number of entries. Other changes of the tree make this fail. `sorted` may
    /// use the store. Of a process that dies during a load, after a [`sync`](crate::Store::sync) in
    /// its midst, the pages that were loaded until then stay unused space.
    ///
    /// # Errors
    /// [`NotEmpty`](crate::Error::NotEmpty), [`NotSorted`](crate::Error::NotSorted); limits; a
    /// full disk or pool. Then the tree is still empty.
    pub fn bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        sorted: impl IntoIterator<Item = (K, V)>,
    ) -> Result<u64> {
        self.access().bulk_load(sorted.into_iter().map(Ok))
    }

    /// As [`bulk_load`](Tree::bulk_load), of entries that may fail to come.
    ///
    /// # Errors
    /// As `bulk_load`, and the first error of an entry.
    pub fn try_bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        sorted: impl IntoIterator<Item = Result<(K, V)>>,
    ) -> Result<u64> {
        self.access().bulk_load(sorted.into_iter())
    }

    /// Counts what the tree has. Reads all of its pages but the blobs. Changes go on meanwhile, and
    /// each page counts as it is when it is read.
    ///
    /// # Errors
    /// The first damage, or a failed read.
    pub fn stat(&self) -> Result<TreeStat> {
        self.open_access()?.count()
    }

    /// Checks every page of the tree, blobs included, and counts. Changes wait meanwhile.
    ///
    /// # Errors
    /// The first damage, or a failed read.
    pub fn check(&self) -> Result<TreeStat> {
        let _still = self.core.hold();
        let access = self.open_access()?;
        access.check_dropped()?;
        access.check(&mut Strict::new(access))
    }

    /// Visits whatever can be read of the tree, in order, and the damage that was met between.
    /// For stores that were opened for salvage; `visit` returns false to end.
    pub fn salvage(&self, visit: Visit<'_>) {
        self.access().salvage(visit);
    }
}
