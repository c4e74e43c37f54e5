//! The public interface of a tree: all operations on it.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use super::check::Strict;
use super::modify::{Decision, TreeEnd};
use super::modify::{Existing, Incoming};
use super::multi_get::FoundValue;
use super::remove_many::Selection;
use super::salvage::{Visit, VisitReaders};
use super::scan::{KeyRange, bounds_of, bounds_of_prefix};
use super::streams::{ValueReader, ValueWriter};
use super::{BulkLoader, Cursor, Entries, ExtractIf, TreeRef, TreeStat, TreeState};
use crate::error::Result;
use crate::store::core::StoreCore;
use crate::value::Value;

/// An ordered map from keys to values, both strings of bytes. This is a cheap handle: clone it,
/// send it, share it.
///
/// Keys have up to [`max_key`](crate::Limits::max_key) bytes; the empty key is valid. Every
/// operation on one key is atomic, and sees all operations that returned before it began.
///
/// Lookups return a value that does not fit in a leaf as a guard ([`Value::Blob`]), which pins
/// memory of the pool. A thread may change the value while it holds the guard: the guard keeps the
/// old value.
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
    pub(crate) fn tree_ref(&self) -> TreeRef<'_> {
        TreeRef { pages: &self.core.pages, state: &self.state }
    }

    /// Whether this is a tree of this store.
    pub(crate) fn is_of(&self, core: &Arc<StoreCore>) -> bool {
        Arc::ptr_eq(&self.core, core)
    }

    #[inline(always)]
    pub(crate) fn open_access(&self) -> Result<TreeRef<'_>> {
        self.core.pages.check_open()?;
        Ok(self.tree_ref())
    }

    /// The tree's current name, which [`rename_tree`](crate::Store::rename_tree) can change.
    pub fn name(&self) -> Arc<str> {
        self.state.name()
    }

    /// The value of `key`. A value that was [written](Tree::writer) as a stream is copied.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards;
    /// [`NeedsReader`](crate::Error::NeedsReader) for a value that is too long for this pool.
    pub fn get(&self, key: &[u8]) -> Result<Option<Value<'_>>> {
        self.open_access()?.get(key)
    }

    /// Copies the value of `key`, of any length, to `value`. If there is none, clears `value` and
    /// returns false. Allocates nothing for a short value if `value` has the capacity.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards, too little memory for the copy.
    #[inline]
    pub fn get_into(&self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        self.open_access()?.get_into(key, value)
    }

    /// Runs `read` on the value of `key`, in place and under a lock. `read` must not call the
    /// store.
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

    /// The values of many keys, in their order. Reads the pages that are not resident together,
    /// level by level, instead of one after the other.
    ///
    /// Pins all blobs among the values at once, so they must fit into the pool.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn multi_get(&self, keys: &[&[u8]]) -> Result<Vec<Option<Value<'_>>>> {
        self.open_access()?.multi_get(keys)
    }

    /// Calls `visit` for each key, in any order, with the key's index and its value, or `None` if
    /// there is none. Allocates nothing for a key whose value is in a leaf of 4 KiB.
    ///
    /// The lookups are interleaved: while one waits for memory or the device, the others go on. A
    /// change of a page restarts only the lookups on that page. `visit` must not change the key for
    /// which it was called, because its value may be pinned.
    ///
    /// # Errors
    /// As [`get`](Tree::get). Then `visit` was called only for some keys.
    #[inline]
    pub fn multi_get_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        mut visit: impl FnMut(usize, Option<&[u8]>),
    ) -> Result<()> {
        self.open_access()?.multi_get_with(keys, |index, found| match found {
            FoundValue::Absent => visit(index, None),
            FoundValue::Inline(bytes) => visit(index, Some(bytes)),
            FoundValue::Guarded(value) => visit(index, Some(&value)),
        })
    }

    /// Stores a value for a new key.
    ///
    /// # Errors
    /// [`KeyExists`](crate::Error::KeyExists); limits; a full disk or pool. Then nothing has
    /// changed.
    pub fn insert(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.tree_ref().put(key, Incoming::Bytes(value), Existing::Refuse).map(drop)
    }

    /// Stores a value. Returns true if it replaced another value.
    ///
    /// # Errors
    /// Limits; a full disk or pool. Then nothing changed.
    pub fn upsert(&self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.tree_ref().put(key, Incoming::Bytes(value), Existing::Replace)
    }

    /// Stores a value of `len` bytes that `fill` writes. `fill` writes a long value directly to its
    /// page in the pool. Returns true if the value replaced another one.
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
            None => Err(io::Error::other("the store asked for a value twice")),
        };
        self.tree_ref().put(key, Incoming::Fill(len, &mut once), Existing::Replace)
    }

    /// Changes the value of `key` atomically, without changing its length: no other change comes
    /// between what `change` reads and what it writes. Returns false if there is no value.
    ///
    /// `change` gets a copy. If another change of a long value comes first, `change` is called
    /// again with a new copy. It must not call the store.
    ///
    /// # Errors
    /// Damage or a failed read; for long values also a full disk or pool. Then nothing has changed.
    pub fn update(&self, key: &[u8], mut change: impl FnMut(&mut [u8])) -> Result<bool> {
        self.tree_ref().update(key, &mut change)
    }

    /// Stores entries as [`upsert`](Tree::upsert) does, each atomically. Returns their number. If
    /// the entries are in the order of their keys, this stores many under one lock, anywhere in the
    /// tree. `entries` may use the store.
    ///
    /// # Errors
    /// As `upsert`. The entries before the one that failed are stored.
    pub fn extend<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<u64> {
        self.tree_ref().extend(entries.into_iter())
    }

    /// Changes, stores or removes the value of `key` atomically: no other change comes between what
    /// `change` sees and what it returns. `change` gets the value, or `None`, and returns the new
    /// one, of any length, or `None`. Returns the old value.
    ///
    /// `change` runs under a lock, and must not call the store. It is called again if another
    /// change of a long value comes first.
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
        self.tree_ref().alter(key, &mut |old| match change(old) {
            Some(new) => Decision::Put(Cow::Owned(new.into())),
            None => Decision::Remove,
        })
    }

    /// Atomically replaces the value of `key` by `new` if it is `expected`. Returns true if it was.
    /// `None` stands for no value.
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
        self.tree_ref().alter(key, &mut |old| {
            swapped = old == expected;
            match (swapped, new) {
                (false, _) => Decision::Keep,
                (true, Some(new)) => Decision::Put(Cow::Borrowed(new)),
                (true, None) => Decision::Remove,
            }
        })?;
        Ok(swapped)
    }

    /// Removes an entry and returns its value. [`remove`](Tree::remove) costs less: it does not
    /// read a long value.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards. Then nothing changed.
    pub fn take(&self, key: &[u8]) -> Result<Option<Value<'_>>> {
        self.tree_ref().alter(key, &mut |_| Decision::Remove)
    }

    /// The first entry, which has the smallest key.
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
        self.open_access()?.end_entry(TreeEnd::First)
    }

    /// The last entry, which has the greatest key.
    ///
    /// # Errors
    /// As [`get`](Tree::get).
    pub fn last(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.open_access()?.end_entry(TreeEnd::Last)
    }

    /// Atomically removes the first entry and returns it.
    ///
    /// # Errors
    /// As [`take`](Tree::take).
    pub fn pop_first(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.tree_ref().pop(TreeEnd::First)
    }

    /// Atomically removes the last entry and returns it.
    ///
    /// # Errors
    /// As [`take`](Tree::take).
    pub fn pop_last(&self) -> Result<Option<(Vec<u8>, Value<'_>)>> {
        self.tree_ref().pop(TreeEnd::Last)
    }

    /// Removes an entry. Returns true if the tree had it. [`take`](Tree::take) returns its value.
    ///
    /// # Errors
    /// Damage or a failed read. Then nothing changed.
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        self.tree_ref().remove(key)
    }

    /// Removes the entries of a range of keys. Returns their number. Reads no blob.
    ///
    /// Works on one leaf, or on some leaves, at a time, and each of these steps is atomic. Another
    /// thread may see that a part of the range is removed, and may insert entries into that part.
    ///
    /// # Errors
    /// Damage or a failed read. The entries of the range before it are removed.
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
        self.tree_ref().remove_range(bounds_of(&range), Selection::All)
    }

    /// Removes the entries for which `keep` returns false. Returns their number.
    ///
    /// As for [`remove_range`](Tree::remove_range), each leaf is one atomic step. `keep` is called
    /// with each key and its value, in the order of the keys; again if the value changes meanwhile.
    /// It runs under a lock, and must not call the store.
    ///
    /// # Errors
    /// As `remove_range`, and a pool that is full of guards.
    pub fn retain(&self, keep: impl FnMut(&[u8], &[u8]) -> bool) -> Result<u64> {
        self.retain_in(.., keep)
    }

    /// As [`retain`](Tree::retain), for a range of keys. Entries outside the range stay.
    ///
    /// # Errors
    /// As `retain`.
    pub fn retain_in(
        &self,
        range: impl KeyRange,
        mut keep: impl FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<u64> {
        self.tree_ref().remove_range(bounds_of(&range), Selection::Unless(&mut keep))
    }

    /// Removes and returns the entries of a range for which `chosen` returns true, as the iterator
    /// reaches them. `chosen` is called as the callback of [`retain`](Tree::retain).
    pub fn extract_if<F: FnMut(&[u8], &[u8]) -> bool>(
        &self,
        range: impl KeyRange,
        chosen: F,
    ) -> ExtractIf<'_, F> {
        ExtractIf::new(self.tree_ref(), bounds_of(&range), chosen)
    }

    /// Atomically removes all entries. Other changes wait until this returns. If there are
    /// snapshots or transactions, this first reads all entries, which they still see.
    ///
    /// # Errors
    /// [`VersionsFull`](crate::Error::VersionsFull). A damaged root, or one that cannot be read; if
    /// there are snapshots or transactions, also another page of the tree. After an error nothing
    /// has changed.
    ///
    /// Pages below the root that are damaged or cannot be read are no error: they stay allocated
    /// and unused, and [`Store::check`](crate::Store::check) counts them.
    pub fn clear(&self) -> Result<()> {
        let exclusive = self.core.pages.exclusive()?;
        let change = self.core.pages.change_exclusively(&exclusive)?;
        let tree = self.tree_ref();
        tree.check_dropped()?;
        tree.clear(&change)
    }

    /// A new cursor, which is at no entry yet.
    pub fn cursor(&self) -> Cursor<'_> {
        Cursor::new(self.tree_ref())
    }

    /// All entries, in the order of their keys. As with [`get`](Tree::get), a value that is too
    /// long for the pool is an error, which ends the iterator. A [`cursor`](Tree::cursor) can go on
    /// after such a value, and gives its key for a [`reader`](Tree::reader).
    pub fn entries(&self) -> Entries<'_> {
        self.range(..)
    }

    /// The entries of a range of keys, in the order of their keys: `"a".."f"`, `key..`, `..=key`.
    pub fn range(&self, range: impl KeyRange) -> Entries<'_> {
        Entries::new(self.tree_ref(), bounds_of(&range))
    }

    /// The entries whose keys begin with `prefix`, in the order of their keys.
    pub fn prefix(&self, prefix: &[u8]) -> Entries<'_> {
        Entries::new(self.tree_ref(), bounds_of_prefix(prefix))
    }

    /// Fills an empty tree with sorted entries, bottom-up: writes every page once, and full.
    /// Returns the number of entries. Fails if another thread changes the tree meanwhile. `sorted`
    /// may use the store. If the process is killed during a load, after a
    /// [`sync`](crate::Store::sync), the pages that were loaded before the sync stay allocated and
    /// unused.
    ///
    /// While lookups of other threads wait for pages of the file, the load rests again and again,
    /// for up to 20 ms, and works a third of its time (docs/benchmarks.md, `bulk-readers`).
    /// Scans that read ahead do not make it rest. It does not rest while it stores one value, nor
    /// when it writes at its end what is still in memory.
    ///
    /// # Errors
    /// [`NotEmpty`](crate::Error::NotEmpty), [`NotSorted`](crate::Error::NotSorted); limits; a
    /// full disk or pool. Then the tree is still empty.
    pub fn bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        sorted: impl IntoIterator<Item = (K, V)>,
    ) -> Result<u64> {
        self.tree_ref().bulk_load(sorted.into_iter().map(Ok))
    }

    /// As [`bulk_load`](Tree::bulk_load), for an input that may fail.
    ///
    /// # Errors
    /// As `bulk_load`, and the first error of the input.
    pub fn try_bulk_load<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        sorted: impl IntoIterator<Item = Result<(K, V)>>,
    ) -> Result<u64> {
        self.tree_ref().bulk_load(sorted.into_iter())
    }

    /// As [`bulk_load`](Tree::bulk_load), for a caller that adds entries one by one. Values can be
    /// streams of any length.
    ///
    /// # Errors
    /// [`NotEmpty`](crate::Error::NotEmpty), damage, a failed read.
    pub fn bulk_loader(&self) -> Result<BulkLoader<'_>> {
        BulkLoader::new(self.tree_ref())
    }

    /// Counts the entries and pages of the tree; the store keeps no count. Reads all pages of the
    /// tree but the blobs. A million entries of 100 bytes take about 30 ms if they are in memory.
    /// Changes go on meanwhile, and each page counts as it is when it is read.
    ///
    /// # Errors
    /// The first damage, or a failed read.
    pub fn stat(&self) -> Result<TreeStat> {
        self.open_access()?.count()
    }

    /// Checks every page of the tree, blobs included, and counts entries and pages. Changes wait
    /// until the check ends.
    ///
    /// # Errors
    /// The first damage, or a failed read.
    pub fn check(&self) -> Result<TreeStat> {
        let _freeze = self.core.pages.freeze()?;
        let tree = self.open_access()?;
        tree.check_dropped()?;
        tree.check(&mut Strict::new(tree))
    }

    /// Visits the readable entries of the tree in order, and the damage between them. For stores
    /// that were opened for salvage. `visit` returns false to end the walk. A value that is too
    /// long for the pool is visited as an error.
    ///
    /// Below a damaged inner node, this visits what is in nodes of the tree to which no sound node
    /// refers. To find them, the first salvage that needs them reads all pages of the file. It
    /// takes two bytes of memory for each page, and afterwards up to 64 MiB.
    pub fn salvage(&self, visit: Visit<'_>) {
        match self.open_access() {
            Ok(tree) => tree.salvage(self.core.orphans.as_ref(), visit),
            Err(error) => drop(visit(Err(error))),
        }
    }

    /// As [`salvage`](Tree::salvage), with values of any length.
    pub fn salvage_readers(&self, visit: VisitReaders<'_>) {
        match self.open_access() {
            Ok(tree) => tree.salvage_readers(self.core.orphans.as_ref(), visit),
            Err(error) => drop(visit(Err(error))),
        }
    }

    /// A reader of the value of `key`. It reads a value of any length piece by piece, with any
    /// pool, in memory that does not grow with the value.
    ///
    /// The reader reads the value that the key had at this call. A change or a removal of the key,
    /// or of the tree, does not affect the reader. The space of a removed value is freed when the
    /// reader is dropped.
    ///
    /// A value that was stored in one call has one checksum. If it is not in memory and longer than
    /// a sixteenth of the pool (or 256 KiB), this call reads it once to check it.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn reader(&self, key: &[u8]) -> Result<Option<ValueReader<'_>>> {
        self.open_access()?.reader(key)
    }

    /// A writer that stores a value of any length for `key`, piece by piece.
    /// [`finish`](ValueWriter::finish) stores the value atomically. Until then the key keeps its
    /// old value.
    ///
    /// # Errors
    /// Limits of the key.
    pub fn writer(&self, key: &[u8]) -> Result<ValueWriter<'_>> {
        ValueWriter::new(self.open_access()?, key)
    }
}
