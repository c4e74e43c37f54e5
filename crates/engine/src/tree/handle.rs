//! The public face of a tree: the whole list of what a program can do with one.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use super::check::Strict;
use super::drain::Which;
use super::modify::{Edge, Verdict};
use super::modify::{Existing, Incoming};
use super::multi_get::Found;
use super::salvage::{Visit, VisitReaders};
use super::scan::{KeyRange, bounds_of, bounds_of_prefix};
use super::streams::{ValueReader, ValueWriter};
use super::{Access, BulkLoader, Cursor, Entries, ExtractIf, TreeStat, TreeState};
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
        Access { pages: &self.core.pages, tree: &self.state }
    }

    #[inline(always)]
    pub(super) fn open_access(&self) -> Result<Access<'_>> {
        self.core.pages.check_open()?;
        Ok(self.access())
    }

    /// The tree's name, as it is [now](crate::Store::rename_tree).
    pub fn name(&self) -> Arc<str> {
        self.state.name()
    }

    /// The value of `key`. One that was [written](Tree::writer) as a stream is copied.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards;
    /// [`NeedsReader`](crate::Error::NeedsReader) for a value that is too long for this pool.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value<'_>>> {
        self.open_access()?.get(key)
    }

    /// Copies the value of `key` to `value`, of any length; false, and `value` empty, if there is
    /// none. Allocates nothing for a short one if `value` has the capacity.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards, no memory for the copy.
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

    /// Stores entries as [`upsert`](Tree::upsert) does, each by itself; returns how many. If they
    /// come in the order of their keys, many are stored under one lock, wherever in the tree that
    /// is. `entries` may use the store.
    ///
    /// # Errors
    /// As `upsert`; the entries before the one that failed are stored then.
    pub fn extend<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<u64> {
        self.access().extend(entries.into_iter())
    }

    /// Changes, stores or removes the value of `key`, as one step: no other change comes between
    /// what `change` sees and what it returns. `change` gets the value, or none, and returns the
    /// new one, of any length, or none. The old value is returned.
    ///
    /// `change` is called under a lock, and again if a change of a long value was overtaken: it
    /// must not call the store.
    ///
    /// # Errors
    /// Limits; damage or a failed read; a full disk or pool. Then nothing changed.
    ///
    /// ```
    /// # use vellum::{Options, Store};
    /// # let directory = tempfile::tempdir()?;
    /// # let options = Options::new().pool_bytes(4 << 20);
    /// # let store = Store::create(directory.path().join("store"), &options)?;
    /// let tree = store.create_tree("logs")?;
    /// let append = |old: Option<&[u8]>| Some([old.unwrap_or_default(), b"line\n"].concat());
    /// assert!(tree.fetch_and_update(b"today", append)?.is_none());
    /// assert_eq!(tree.fetch_and_update(b"today", append)?.as_deref(), Some(&b"line\n"[..]));
    /// assert_eq!(tree.get(b"today")?.as_deref(), Some(&b"line\nline\n"[..]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fetch_and_update<V: Into<Vec<u8>>>(
        &self,
        key: &[u8],
        mut change: impl FnMut(Option<&[u8]>) -> Option<V>,
    ) -> Result<Option<Value<'_>>> {
        self.access().alter(key, &mut |old| match change(old) {
            Some(new) => Verdict::Put(Cow::Owned(new.into())),
            None => Verdict::Remove,
        })
    }

    /// Puts `new` in the place of `expected`, if that is the value of `key`, as one step; true if
    /// it was. `None` stands for no value.
    ///
    /// # Errors
    /// As [`fetch_and_update`](Tree::fetch_and_update).
    ///
    /// ```
    /// # use vellum::{Options, Store};
    /// # let directory = tempfile::tempdir()?;
    /// # let options = Options::new().pool_bytes(4 << 20);
    /// # let store = Store::create(directory.path().join("store"), &options)?;
    /// let tree = store.create_tree("locks")?;
    /// assert!(tree.compare_and_swap(b"door", None, Some(b"mine"))?);
    /// assert!(!tree.compare_and_swap(b"door", None, Some(b"yours"))?);
    /// assert!(tree.compare_and_swap(b"door", Some(b"mine"), None)?);
    /// assert!(!tree.contains(b"door")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool> {
        let mut swapped = false;
        self.access().alter(key, &mut |old| {
            swapped = old == expected;
            match (swapped, new) {
                (false, _) => Verdict::Keep,
                (true, Some(new)) => Verdict::Put(Cow::Borrowed(new)),
                (true, None) => Verdict::Remove,
            }
        })?;
        Ok(swapped)
    }

    /// Removes an entry and returns its value. [`remove`](Tree::remove) costs less, and does not
    /// read a long value.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards. Then nothing changed.
    pub fn take(&self, key: &[u8]) -> Result<Option<Value<'_>>> {
        self.access().alter(key, &mut |_| Verdict::Remove)
    }

    /// The first entry: that with the smallest key.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    ///
    /// ```
    /// # use vellum::{Options, Store};
    /// # let directory = tempfile::tempdir()?;
    /// # let options = Options::new().pool_bytes(4 << 20);
    /// # let store = Store::create(directory.path().join("store"), &options)?;
    /// let queue = store.create_tree("queue")?;
    /// queue.extend([("1", "write"), ("2", "read"), ("3", "rest")])?;
    /// assert_eq!(queue.first()?.expect("it is not empty").0, b"1");
    /// assert_eq!(&*queue.pop_first()?.expect("it is not empty").1, b"write");
    /// assert_eq!(&*queue.pop_last()?.expect("it is not empty").1, b"rest");
    /// assert_eq!(queue.last()?.expect("it is not empty").0, b"2");
    /// assert_eq!(queue.take(b"2")?.as_deref(), Some(&b"read"[..]));
    /// assert!(queue.pop_first()?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn first(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.open_access()?.edge_entry(Edge::First)
    }

    /// The last entry: that with the greatest key.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn last(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.open_access()?.edge_entry(Edge::Last)
    }

    /// Removes the first entry and returns it, as one step.
    ///
    /// # Errors
    /// As [`take`](Tree::take).
    pub fn pop_first(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.access().pop(Edge::First)
    }

    /// Removes the last entry and returns it, as one step.
    ///
    /// # Errors
    /// As [`take`](Tree::take).
    pub fn pop_last(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.access().pop(Edge::Last)
    }

    /// Removes an entry; true if it was there. [`take`](Tree::take) returns its value.
    ///
    /// # Errors
    /// Damage or a failed read. Then nothing changed.
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        self.access().remove(key)
    }

    /// Removes the entries of a range of keys; returns how many. Reads no blob.
    ///
    /// Works leaf by leaf, or by some leaves at a time, and each of these is one step: another
    /// thread may see that a part of the range is gone, and may put entries where this has been.
    ///
    /// # Errors
    /// Damage or a failed read. What lies before it in the range is gone then.
    ///
    /// ```
    /// # use vellum::{Options, Store};
    /// # let directory = tempfile::tempdir()?;
    /// # let options = Options::new().pool_bytes(4 << 20);
    /// # let store = Store::create(directory.path().join("store"), &options)?;
    /// let tree = store.create_tree("letters")?;
    /// tree.extend("abcdef".chars().map(|letter| (letter.to_string(), "")))?;
    /// assert_eq!(tree.remove_range("b".."d")?, 2);
    /// assert_eq!(tree.retain(|key, _| key != b"e")?, 1);
    /// let taken: Vec<_> = tree.extract_if(.., |_, value| value.is_empty()).take(2).collect();
    /// assert_eq!((taken.len(), tree.entries().count()), (2, 1));
    /// tree.clear()?;
    /// assert_eq!(tree.entries().count(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn remove_range(&self, range: impl KeyRange) -> Result<u64> {
        self.access().remove_range(bounds_of(&range), Which::All)
    }

    /// Removes the entries for which `keep` returns false; returns how many.
    ///
    /// As for [`remove_range`](Tree::remove_range), each leaf is one step. `keep` is called with
    /// each key and its value, in the order of the keys, once unless the value changes meanwhile,
    /// and under a lock: it must not call the store.
    ///
    /// # Errors
    /// As `remove_range`, and a pool that is full of guards.
    pub fn retain(&self, keep: impl FnMut(&[u8], &[u8]) -> bool) -> Result<u64> {
        self.retain_in(.., keep)
    }

    /// As [`retain`](Tree::retain), of a range of keys: what lies outside stays.
    ///
    /// # Errors
    /// As `retain`.
    pub fn retain_in(
        &self,
        range: impl KeyRange,
        mut keep: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<u64> {
        self.access().remove_range(bounds_of(&range), Which::Unless(&mut keep))
    }

    /// Removes the entries of a range for which `chosen` returns true, as the iterator comes to
    /// them, and returns them. `chosen` is called as that of [`retain`](Tree::retain).
    pub fn extract_if<F: FnMut(&[u8], &[u8]) -> bool>(
        &self,
        range: impl KeyRange,
        chosen: F,
    ) -> ExtractIf<'_, F> {
        ExtractIf::new(self.access(), bounds_of(&range), chosen)
    }

    /// Removes all entries, in one step. Waits until no snapshot is left, and other changes wait
    /// for it.
    ///
    /// # Errors
    /// Damage or a failed read. Unless the tree's root is damaged the tree is empty then, too, but
    /// what could not be read stays unused space.
    pub fn clear(&self) -> Result<()> {
        let exclusive = self.core.pages.exclusive()?;
        let change = self.core.pages.change_exclusively(&exclusive)?;
        let access = self.access();
        access.check_dropped()?;
        access.clear(&change)
    }

    /// A cursor that stands on no entry yet.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor::new(self.access())
    }

    /// All entries, in the order of their keys. As with [`get`](Tree::get), a value that is too
    /// long for the pool is an error, which ends the iterator; a [`cursor`](Tree::cursor) goes on,
    /// and gives the key for a [`reader`](Tree::reader).
    pub fn entries(&self) -> Entries<'_> {
        self.range(..)
    }

    /// The entries of a range of keys, in the order of their keys: `"a".."f"`, `key..`, `..=key`.
    pub fn range(&self, range: impl KeyRange) -> Entries<'_> {
        Entries::new(self.access(), bounds_of(&range))
    }

    /// The entries whose keys begin with `prefix`, in the order of their keys.
    pub fn prefix(&self, prefix: &[u8]) -> Entries<'_> {
        Entries::new(self.access(), bounds_of_prefix(prefix))
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

    /// As [`bulk_load`](Tree::bulk_load), for entries that come one by one, with values of any
    /// length as streams among them.
    ///
    /// # Errors
    /// [`NotEmpty`](crate::Error::NotEmpty), damage, a failed read.
    pub fn bulk_loader(&self) -> Result<BulkLoader<'_>> {
        BulkLoader::new(self.access())
    }

    /// Counts what the tree has, its entries among that: no count of them is kept. Reads all of the
    /// tree's pages but the blobs; a million entries of 100 bytes take some 30 ms if they are in
    /// memory. Changes go on meanwhile, and each page counts as it is when it is read.
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
        let _freeze = self.core.pages.freeze()?;
        let access = self.open_access()?;
        access.check_dropped()?;
        access.check(&mut Strict::new(access))
    }

    /// Visits whatever can be read of the tree, in order, and the damage that was met between.
    /// For stores that were opened for salvage; `visit` returns false to end. A value that is too
    /// long for the pool is met as an error.
    pub fn salvage(&self, visit: Visit<'_>) {
        match self.open_access() {
            Ok(access) => access.salvage(visit),
            Err(error) => drop(visit(Err(error))),
        }
    }

    /// As [`salvage`](Tree::salvage), with values of any length.
    pub fn salvage_readers(&self, visit: VisitReaders<'_>) {
        match self.open_access() {
            Ok(access) => access.salvage_readers(visit),
            Err(error) => drop(visit(Err(error))),
        }
    }

    /// The value of `key`, to be read piece by piece: of any length, with any pool, in memory that
    /// does not grow with it.
    ///
    /// The reader has the value that the key had at this call, to its end: a change or a removal of
    /// the key, or of the tree, takes none of it away. The space comes back when the reader is
    /// dropped.
    ///
    /// A value that was stored in one call has one checksum for all of it. If it is not in memory
    /// and longer than a sixteenth of the pool (or 256 KiB), this call reads it once to check it.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn reader(&self, key: &[u8]) -> Result<Option<ValueReader<'_>>> {
        self.open_access()?.reader(key)
    }

    /// Stores a value of any length for `key`, which comes piece by piece. The key has it, at once
    /// and as a whole, when [`finish`](ValueWriter::finish) returns; whatever the key had until
    /// then stays so long.
    ///
    /// # Errors
    /// Limits of the key.
    pub fn writer(&self, key: &[u8]) -> Result<ValueWriter<'_>> {
        ValueWriter::new(self.open_access()?, key)
    }
}
