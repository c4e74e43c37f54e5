//! Scans: ranges of keys ([`KeyRange`]), iterators over a range ([`Entries`]), cursors
//! ([`Cursor`]), and read-ahead of leaves.
//!
//! A cursor has a private copy of its leaf, and the version of the leaf that it has copied. While
//! the leaf is unchanged, the cursor moves within the copy. If the leaf has changed, the cursor
//! descends again with its key. At the end of the leaf, it descends with the leaf's fence key,
//! where the sibling begins. So a cursor holds no lock and needs no pointers between leaves. The
//! tree had every entry at the moment when the cursor returned it.
//!
//! A scan that has moved from one leaf to the next is likely to go on. So the cursor reads ahead
//! from its second leaf on, as many leaves as it has visited. On storage that answers at once these
//! are half as many: there is no wait to be saved, and each leaf that is read in vain costs as much
//! as a call. A short scan reads on when it has used all of them, so that it makes few calls. Once
//! it has visited [`ReadAhead::LONG`] leaves, it reads on when it has used half, so that the device
//! is busy all the time. Read-ahead is limited by [`ReadAhead::LEAVES`], [`ReadAhead::FRAMES`] and
//! an eighth of the pool. It takes the numbers of the leaves from their parents, and reads the
//! parents ahead, too. Bulk-loaded leaves are adjacent in the file, and are read together.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::{
    Bound, Range, RangeBounds, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive,
};

use vellum_pool::{OptimisticGuard, PageReader, PageRef};

use super::TreeRef;
use super::lookup::{Attempt, OptimisticPair, ParentOfLeaves, Target};
use crate::error::{Error, Result};
use crate::node::{Node, PayloadPlace, Torn};
use crate::page::blob::BlobRef;
use crate::value::Value;

/// A range of keys: any range of the standard library over a type that dereferences to bytes.
///
/// `"a".."f"`, `key..`, `..=[1, 2]`, `..`, and pairs of [`Bound`]s. A range whose start is not
/// below its end has no entries. (With [`RangeBounds`] the caller would have to name a type for
/// `..`.)
pub trait KeyRange {
    /// The start and the end of the range.
    fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>);
}

macro_rules! key_range {
    ($($range:ty),+) => {
        $(impl<K: AsRef<[u8]>> KeyRange for $range {
            fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
                let (start, end) = (RangeBounds::<K>::start_bound(self), self.end_bound());
                (start.map(K::as_ref), end.map(K::as_ref))
            }
        })+
    };
}

key_range!(
    Range<K>,
    RangeFrom<K>,
    RangeTo<K>,
    RangeInclusive<K>,
    RangeToInclusive<K>,
    (Bound<K>, Bound<K>)
);

impl KeyRange for RangeFull {
    fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        (Bound::Unbounded, Bound::Unbounded)
    }
}

/// The bounds of a range.
pub(crate) fn bounds_of(range: &impl KeyRange) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    let (start, end) = range.key_bounds();
    (start.map(<[u8]>::to_vec), end.map(<[u8]>::to_vec))
}

/// The keys that begin with `prefix`.
pub(crate) fn bounds_of_prefix(prefix: &[u8]) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    // The end of the range is the prefix up to its last byte below 255, with that byte incremented.
    let end = prefix.iter().rposition(|byte| *byte != 255).map(|last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        end
    });
    (Bound::Included(prefix.to_vec()), end.map_or(Bound::Unbounded, Bound::Excluded))
}

/// Whether `key` is not before the start of a range.
pub(crate) fn is_after_start(key: &[u8], start: &Bound<Vec<u8>>) -> bool {
    match start {
        Bound::Unbounded => true,
        Bound::Included(start) => key >= &start[..],
        Bound::Excluded(start) => key > &start[..],
    }
}

/// Whether `key` is before the end of a range.
pub(crate) fn is_before_end(key: &[u8], end: &Bound<Vec<u8>>) -> bool {
    match end {
        Bound::Unbounded => true,
        Bound::Included(end) => key <= &end[..],
        Bound::Excluded(end) => key < &end[..],
    }
}

/// The most leaves that a range reads ahead.
const READ_AHEAD: usize = 32;

/// Iterates over the entries of a range in the order of their keys, from both ends.
///
/// The iterator returns copies of keys and values, so a program can collect them, whatever the size
/// of the pool. [`next_entry`](Entries::next_entry) and
/// [`next_entry_back`](Entries::next_entry_back) return an entry in place instead, without an
/// allocation for each.
///
/// The tree had each entry when the iterator returned it. The iterator ends after an error.
///
/// ```
/// # use vellum::{Options, Store};
/// # let directory = tempfile::tempdir()?;
/// # let options = Options::new().pool_bytes(4 << 20);
/// # let store = Store::create(directory.path().join("store"), &options)?;
/// let tree = store.create_tree("letters")?;
/// for letter in "abcdef".chars() {
///     tree.upsert(letter.to_string().as_bytes(), b"")?;
/// }
/// let found: Vec<_> = tree.range("b".."e").rev().collect::<vellum::Result<_>>()?;
/// assert!(found.iter().map(|(key, _)| &key[..]).eq([b"d", b"c", b"b"]));
/// let mut entries = tree.range("c"..);
/// let (mut keys, mut bytes) = (0, 0);
/// while let Some((key, value)) = entries.next_entry()? {
///     keys += 1;
///     bytes += key.len() + value.len();
/// }
/// assert_eq!((keys, bytes), (4, 4));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Entries<'a> {
    tree: TreeRef<'a>,
    front: Cursor<'a>,
    /// `None` until the first step from the end.
    back: Option<Box<Cursor<'a>>>,
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
    begun: bool,
    ended: bool,
}

impl<'a> Entries<'a> {
    pub(crate) fn new(
        tree: TreeRef<'a>,
        (start, end): (Bound<Vec<u8>>, Bound<Vec<u8>>),
    ) -> Entries<'a> {
        let front = Cursor::new(tree).read_ahead(READ_AHEAD);
        Entries { tree, front, back: None, start, end, begun: false, ended: false }
    }

    /// All entries of a tree.
    pub(crate) fn all(tree: TreeRef<'a>) -> Entries<'a> {
        Entries::new(tree, (Bound::Unbounded, Bound::Unbounded))
    }

    /// The next entry from the start, valid until the next call. A long value pins memory of the
    /// pool, as a value from [`Tree::get`](crate::Tree::get) does.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    #[inline]
    pub fn next_entry(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        // Most steps stay within the leaf, and the cursor knows how many of its entries are in the
        // range.
        if !self.ended
            && let Some(value) = self.front.step()
        {
            let (key, value) = self.front.stepped(value);
            return Ok(Some((key, Value::Inline(Cow::Borrowed(value)))));
        }
        let found = self.step(Entries::forward, |entries| Some(&entries.front))?;
        Ok(found.map(|blob| lend(&self.front, blob)))
    }

    /// As [`next_entry`](Entries::next_entry), from the end.
    ///
    /// # Errors
    /// As `next_entry`.
    pub fn next_entry_back(&mut self) -> Result<Option<(&[u8], Value<'_>)>> {
        let found = self.step(Entries::backward, |entries| entries.back.as_deref())?;
        let back = self.back.as_deref();
        Ok(found.zip(back).map(|(blob, back)| lend(back, blob)))
    }

    /// Moves a cursor to its next entry. Returns the value of that entry if it is a blob.
    fn step(
        &mut self,
        advance: fn(&mut Entries<'a>) -> Result<bool>,
        cursor: for<'e> fn(&'e Entries<'a>) -> Option<&'e Cursor<'a>>,
    ) -> Result<Option<Option<Value<'a>>>> {
        if self.ended {
            return Ok(None);
        }
        // The iterator ends if it finds no entry, or fails.
        self.ended = true;
        while advance(self)? {
            let blob = match cursor(self) {
                Some(cursor) if cursor.is_blob() => match self.tree.get(cursor.key())? {
                    // The entry was removed since the step: go on.
                    None => continue,
                    blob => blob,
                },
                _ => None,
            };
            self.ended = false;
            return Ok(Some(blob));
        }
        Ok(None)
    }

    /// Moves the front cursor. Returns false at the end.
    fn forward(&mut self) -> Result<bool> {
        let front = &mut self.front;
        let moved = match (self.begun, &self.start) {
            (true, _) => front.forward()?,
            (_, Bound::Unbounded) => front.first()?,
            (_, Bound::Included(key)) => front.seek(key)?,
            (_, Bound::Excluded(key)) => {
                front.seek(key)? && (front.key() != key || front.forward()?)
            }
        };
        self.begun = true;
        let is_within = moved && is_before_end(front.key(), &self.end);
        match &self.back {
            Some(back) => Ok(is_within && front.key() < back.key()),
            None if is_within => front.learn_end(&self.end).map(|()| true),
            None => Ok(false),
        }
    }

    /// Moves the back cursor. Returns false at the end.
    fn backward(&mut self) -> Result<bool> {
        let moved = match &mut self.back {
            Some(back) => back.backward()?,
            none => {
                // From now on the front cursor ends at the back cursor, not at the end of the
                // range.
                self.front.forget_end();
                let back = none.insert(Box::new(Cursor::new(self.tree).read_ahead(READ_AHEAD)));
                match &self.end {
                    Bound::Unbounded => back.last()?,
                    Bound::Included(key) => back.seek_back(key)?,
                    Bound::Excluded(key) => {
                        back.seek_back(key)? && (back.key() != key || back.backward()?)
                    }
                }
            }
        };
        let key = self.back.as_deref().map_or(&[][..], Cursor::key);
        Ok(moved && is_after_start(key, &self.start) && (!self.begun || key > self.front.key()))
    }
}

/// The entry of a cursor. The caller passes its value if that is a blob.
fn lend<'c>(cursor: &'c Cursor<'_>, blob: Option<Value<'c>>) -> (&'c [u8], Value<'c>) {
    let inline = || Value::Inline(Cow::Borrowed(cursor.inline_value()));
    (cursor.key(), blob.unwrap_or_else(inline))
}

/// A copy of an entry. A collection of blobs in place would pin all memory of the pool.
fn copied<'a>((key, value): (&[u8], Value<'_>)) -> (Vec<u8>, Value<'a>) {
    (key.to_vec(), Value::Inline(Cow::Owned(value.into_vec())))
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<(Vec<u8>, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_entry().map(|entry| entry.map(copied)).transpose()
    }
}

impl DoubleEndedIterator for Entries<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        self.next_entry_back().map(|entry| entry.map(copied)).transpose()
    }
}

impl std::iter::FusedIterator for Entries<'_> {}

/// The position of a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At no entry yet.
    Fresh,
    /// At the entry with this index in the copied leaf.
    On(usize),
    /// After the last entry.
    AtEnd,
    /// Before the first entry.
    AtStart,
}

/// A position in a tree that can move forward and backward. It stays valid when other threads
/// change the tree.
///
/// The tree had each entry when the method that moved to it returned. After an error the cursor is
/// at no entry, as a new one.
#[derive(Debug)]
pub struct Cursor<'a> {
    tree: TreeRef<'a>,
    state: State,
    /// A copy of the leaf, and a guard of the version that was copied.
    leaf: Vec<u8>,
    guard: Option<OptimisticGuard<'a>>,
    /// The key of the current entry.
    key: Vec<u8>,
    /// A buffer for the keys of descents.
    scratch: Vec<u8>,
    /// Whether `key` begins with the leaf's prefix.
    has_prefix: bool,
    /// The number of the leaf's entries before the end of the range; 0 if it is not known.
    within: usize,
    ahead: ReadAhead<'a>,
    /// Whether the cursor reads blobs ahead, too. The reads of the blobs before the entry
    /// `blobs_until` were started.
    reads_blobs: bool,
    blobs_until: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(tree: TreeRef<'a>) -> Cursor<'a> {
        Cursor {
            tree,
            state: State::Fresh,
            leaf: Vec::new(),
            guard: None,
            key: Vec::new(),
            scratch: Vec::new(),
            has_prefix: false,
            within: 0,
            ahead: ReadAhead::new(tree),
            reads_blobs: false,
            blobs_until: 0,
        }
    }

    /// Sets the most leaves to read ahead, 0 for none. They take at most an eighth of
    /// the pool. Unless it is 0, the cursor also reads the blobs of the next entries ahead, up to
    /// another eighth.
    ///
    /// By default, the cursor reads up to 1,024 leaves ahead, depending on the pool, and no blobs.
    /// Read-ahead begins at the second consecutive leaf, with a few leaves.
    pub fn read_ahead(mut self, leaves: usize) -> Cursor<'a> {
        self.ahead.limit(self.tree, leaves);
        self.reads_blobs = leaves > 0;
        self
    }

    /// Moves to the first entry whose key is not less than `key`. Returns false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn seek(&mut self, key: &[u8]) -> Result<bool> {
        self.load(Target::Key(key), None)?;
        let index = self.find(key)?.0;
        self.settle_forward(index)
    }

    /// Moves to the last entry whose key is not greater than `key`. Returns false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn seek_back(&mut self, key: &[u8]) -> Result<bool> {
        self.load(Target::Key(key), None)?;
        let (index, exact) = self.find(key)?;
        self.settle_backward(index + usize::from(exact))
    }

    /// Moves to the first entry. Returns false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn first(&mut self) -> Result<bool> {
        self.seek(&[])
    }

    /// A copy of the next leaf, and its page. A new cursor returns the first leaf. `None` at the
    /// end.
    pub(crate) fn next_leaf(&mut self) -> Result<Option<(PageRef, &[u8])>> {
        let mut above = Vec::new();
        let mut direction = None;
        if self.guard.is_some() {
            if !self.node().upper_into(&mut above).map_err(|torn| self.torn(torn))? {
                return Ok(None);
            }
            above.push(0);
            direction = Some(Direction::Forward);
        }
        self.load(Target::Key(&above), direction)?;
        Ok(Some((self.page(), &self.leaf)))
    }

    /// A copy of the leaf for `target`, and its page. `direction` is that of a scan that comes from
    /// the leaf's sibling.
    pub(crate) fn copy_leaf(
        &mut self,
        target: Target<'_>,
        direction: Option<Direction>,
    ) -> Result<(PageRef, &[u8])> {
        self.load(target, direction)?;
        Ok((self.page(), &self.leaf))
    }

    /// The leaf that was copied last, and its page.
    pub(crate) fn copied_leaf(&self) -> (PageRef, &[u8]) {
        (self.page(), &self.leaf)
    }

    /// Moves to the last entry. Returns false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn last(&mut self) -> Result<bool> {
        self.load(Target::Last, None)?;
        let count = self.node().count().map_err(|torn| self.torn(torn))?;
        self.settle_backward(count)
    }

    /// Moves to the next entry. A new cursor moves to the first. Returns false at the end.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn forward(&mut self) -> Result<bool> {
        match self.state {
            State::Fresh | State::AtStart => self.first(),
            State::AtEnd => Ok(false),
            State::On(index) if self.is_current() => self.settle_forward(index + 1),
            State::On(_) => {
                let (index, exact) = self.seek_key()?;
                self.settle_forward(index + usize::from(exact))
            }
        }
    }

    /// Finds the number of the leaf's entries before `end`, for [`step`](Self::step).
    #[inline]
    pub(crate) fn learn_end(&mut self, end: &Bound<Vec<u8>>) -> Result<()> {
        if self.within == 0 {
            let count = self.node().count().map_err(|torn| self.torn(torn))?;
            // The upper fence is the greatest key that the leaf can have.
            let upper = self.node().upper().ok().flatten();
            self.within = match end {
                Bound::Unbounded => count,
                _ if upper.is_some_and(|upper| is_before_end(upper, end)) => count,
                Bound::Included(key) => {
                    self.find(key).map(|(at, exact)| at + usize::from(exact))?
                }
                Bound::Excluded(key) => self.find(key)?.0,
            };
        }
        Ok(())
    }

    /// Forgets the end of the range.
    pub(crate) fn forget_end(&mut self) {
        self.within = 0;
    }

    /// The fast path of a step: moves to the next entry and returns the place of its value. Does
    /// nothing and returns `None` if the leaf has changed, if the next entry is not in this leaf or
    /// not in the range, or if its value is a blob.
    #[inline(always)]
    pub(crate) fn step(&mut self) -> Option<PayloadPlace> {
        let State::On(index) = self.state else { return None };
        if index + 1 >= self.within || !self.has_prefix || !self.is_current() {
            return None;
        }
        let node = Node::new(&self.leaf[..]);
        let (suffix, value) = node.entry_at(index + 1)?;
        if value.blob {
            return None;
        }
        self.key.truncate(node.prefix_len().ok()?);
        self.key.extend_from_slice(suffix);
        self.state = State::On(index + 1);
        Some(value)
    }

    /// The entry to which [`step`](Self::step) has moved.
    #[inline(always)]
    pub(crate) fn stepped(&self, value: PayloadPlace) -> (&[u8], &[u8]) {
        (&self.key, &self.leaf[value.offset..value.offset + value.len])
    }

    /// Moves to the previous entry. A new cursor moves to the last. Returns false at the start.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn backward(&mut self) -> Result<bool> {
        match self.state {
            State::Fresh | State::AtEnd => self.last(),
            State::AtStart => Ok(false),
            State::On(index) if self.is_current() => self.settle_backward(index),
            State::On(_) => {
                let index = self.seek_key()?.0;
                self.settle_backward(index)
            }
        }
    }

    /// Whether the cursor is at an entry.
    pub fn is_on_entry(&self) -> bool {
        matches!(self.state, State::On(_))
    }

    /// The key of the current entry; empty if the cursor is at none.
    pub fn key(&self) -> &[u8] {
        match self.state {
            State::On(_) => &self.key,
            _ => &[],
        }
    }

    /// Length of the current value in bytes; 0 if the cursor is at no entry. Reads no blob.
    pub fn value_len(&self) -> u64 {
        match self.payload() {
            Some((bytes, true)) => BlobRef::decode(bytes).map_or(0, |blob| blob.len),
            Some((bytes, false)) => bytes.len() as u64,
            None => 0,
        }
    }

    /// Whether the value has pages of its own.
    pub fn is_blob(&self) -> bool {
        self.payload().is_some_and(|(_, blob)| blob)
    }

    /// The value of the current entry. A short value is as it was when the cursor moved here. A
    /// blob is as it is now. `None` if a blob was removed meanwhile, or if the cursor is at no
    /// entry.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn value(&self) -> Result<Option<Value<'_>>> {
        match self.payload() {
            Some((bytes, false)) => Ok(Some(Value::Inline(Cow::Borrowed(bytes)))),
            Some((_, true)) => self.tree.get(&self.key),
            None => Ok(None),
        }
    }

    /// The value of the current entry, which must not be a blob.
    pub(crate) fn inline_value(&self) -> &[u8] {
        self.payload().map_or(&[], |(bytes, _)| bytes)
    }

    fn payload(&self) -> Option<(&[u8], bool)> {
        match self.state {
            State::On(index) => self.payload_at(index),
            _ => None,
        }
    }

    fn payload_at(&self, index: usize) -> Option<(&[u8], bool)> {
        let place = self.node().payload_place(index).ok()?;
        Some((self.node().payload(place).ok()?, place.blob))
    }

    fn blob_at(&self, index: usize) -> Option<BlobRef> {
        let (bytes, blob) = self.payload_at(index)?;
        if blob { BlobRef::decode(bytes) } else { None }
    }

    fn node(&self) -> Node<&[u8]> {
        Node::new(&self.leaf[..])
    }

    #[cold]
    fn torn(&self, torn: Torn) -> Error {
        Error::torn(self.page(), torn)
    }

    /// The page that the leaf was copied from.
    fn page(&self) -> PageRef {
        self.guard.map_or(self.tree.root_page(), |guard| guard.page())
    }

    fn find(&self, key: &[u8]) -> Result<(usize, bool)> {
        let position = self.node().find(key).map_err(|torn| self.torn(torn))?;
        Ok((position.index, position.exact))
    }

    /// Whether the leaf has not changed since it was copied. Also false if the store is closed: the
    /// next copy then returns that error.
    fn is_current(&self) -> bool {
        self.guard.is_some_and(|guard| guard.validate().is_ok())
            && self.tree.pages.check_open().is_ok()
    }

    /// Copies the leaf of the current key again, and finds the key in it.
    fn seek_key(&mut self) -> Result<(usize, bool)> {
        let key = std::mem::take(&mut self.key);
        let found = self.reload(&key).and_then(|()| self.find(&key));
        self.key = key;
        found
    }

    /// Copies the leaf for `key` again, and continues read-ahead.
    fn reload(&mut self, key: &[u8]) -> Result<()> {
        self.load_with(Target::Key(key), |_, _| ())
    }

    /// Copies the leaf for `target`. `direction` is the direction of a scan that comes from a
    /// sibling of the leaf. `None` restarts read-ahead.
    fn load(&mut self, target: Target<'_>, direction: Option<Direction>) -> Result<()> {
        self.load_with(target, |cursor, reached| match direction {
            Some(direction) => cursor.ahead.step(cursor.tree, direction, reached),
            None => cursor.ahead.restart(),
        })
    }

    /// Copies the leaf for `target`, and calls `look_ahead` with it. After an error the cursor is
    /// at no entry.
    fn load_with(
        &mut self,
        target: Target<'_>,
        mut look_ahead: impl FnMut(&mut Cursor<'a>, OptimisticPair<'a>),
    ) -> Result<()> {
        self.state = State::Fresh;
        self.blobs_until = 0;
        self.has_prefix = false;
        self.within = 0;
        self.tree.pages.check_open()?;
        let tree = self.tree;
        let copied = tree.attempt(|| {
            let reached = tree.leaf(target)?;
            self.copy(reached)?;
            look_ahead(self, reached);
            Ok(())
        })?;
        if copied.is_none() {
            let leaf = tree.shared_leaf(target)?;
            self.leaf.clear();
            self.leaf.extend_from_slice(&leaf);
            // This thread takes the optimistic guard while it holds the leaf, so the guard has the
            // version of the copy.
            self.guard = Some(tree.pages.pool.optimistic(leaf.page())?);
        }
        // Always true in a sound tree. Without this check, a damaged tree could lead the cursor in
        // a cycle, or past entries.
        match target {
            Target::Key(key) if !self.node().covers(key).map_err(|torn| self.torn(torn))? => {
                Err(Error::fences(self.page()))
            }
            _ => Ok(()),
        }
    }

    fn copy(&mut self, reached: OptimisticPair<'a>) -> Attempt<()> {
        let bytes = reached.node.bytes();
        self.leaf.resize(bytes.len(), 0);
        bytes.copy_to(0, &mut self.leaf);
        reached.node.validate()?;
        self.guard = Some(reached.node);
        Ok(())
    }

    /// Starts the reads of the blobs of the next entries in this leaf.
    fn prefetch_blobs(&mut self, index: usize, count: usize) {
        let pool = &self.tree.pages.pool;
        if !self.reads_blobs || index < self.blobs_until {
            return;
        }
        self.blobs_until = count;
        // A reference is valid while its leaf is locked. The upgrade fails if the leaf is no longer
        // the one that was copied.
        let Some(Ok(_leaf)) = self.guard.map(OptimisticGuard::upgrade_shared) else { return };
        let mut frames_left = pool.capacity() / 8;
        let mut pages = Vec::new();
        for next in (index..count).filter(|next| self.node().is_blob(*next)) {
            let Some(blob) = self.blob_at(next) else { continue };
            let frames = u64::from(blob.page.frames);
            if frames > frames_left {
                // Leave a blob that is too large to `value`.
                self.blobs_until = next.max(index + 1);
                break;
            }
            frames_left -= frames;
            if !pool.is_resident(blob.page) {
                pages.push(blob.page);
            }
        }
        pool.evict_and_prefetch(&pages);
    }

    /// Moves to the entry at `index` of the leaf, or to the first entry after the leaf.
    fn settle_forward(&mut self, mut index: usize) -> Result<bool> {
        loop {
            let count = self.node().count().map_err(|torn| self.torn(torn))?;
            if index < count {
                self.prefetch_blobs(index, count);
                return self.move_to(index);
            }
            // The smallest key that is greater than this leaf's upper fence belongs to the next
            // leaf.
            let mut above = std::mem::take(&mut self.scratch);
            if !self.node().upper_into(&mut above).map_err(|torn| self.torn(torn))? {
                self.scratch = above;
                self.state = State::AtEnd;
                return Ok(false);
            }
            above.push(0);
            self.load(Target::Key(&above), Some(Direction::Forward))?;
            index = self.find(&above)?.0;
            self.scratch = above;
        }
    }

    /// Moves to the entry before `index` of the leaf, or to the last entry before the leaf.
    fn settle_backward(&mut self, mut index: usize) -> Result<bool> {
        loop {
            if index > 0 {
                return self.move_to(index - 1);
            }
            // The previous leaf is the one whose upper fence is this one's lower fence.
            let mut below = std::mem::take(&mut self.scratch);
            if !self.node().lower_into(&mut below).map_err(|torn| self.torn(torn))? {
                self.scratch = below;
                self.state = State::AtStart;
                return Ok(false);
            }
            self.load(Target::Key(&below), Some(Direction::Backward))?;
            let (at, exact) = self.find(&below)?;
            index = at + usize::from(exact);
            self.scratch = below;
        }
    }

    #[inline(always)]
    fn move_to(&mut self, index: usize) -> Result<bool> {
        let node = Node::new(&self.leaf[..]);
        let read = match self.has_prefix {
            true => node.suffix_into(index, &mut self.key),
            false => node.key_into(index, &mut self.key),
        };
        self.has_prefix = read.is_ok();
        read.map_err(|torn| self.torn(torn))?;
        self.state = State::On(index);
        Ok(true)
    }
}

/// The direction of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Forward,
    Backward,
}

impl Direction {
    /// The index of the next child in this direction; `None` before the first child.
    fn next_index(self, index: usize) -> Option<usize> {
        match self {
            Direction::Forward => Some(index + 1),
            Direction::Backward => index.checked_sub(1),
        }
    }
}

/// The read-ahead of a scan: the module's documentation describes it.
#[derive(Debug)]
pub(crate) struct ReadAhead<'a> {
    /// The most leaves to read ahead; 0 turns read-ahead off.
    leaves_max: usize,
    /// The number of consecutive leaves that the scan has entered, without the first.
    steps: usize,
    /// The number of leaves to read ahead now.
    window: usize,
    direction: Direction,
    /// The leaves after the scan's leaf, the next one first.
    leaves: VecDeque<PageRef>,
    /// The number of `leaves` whose reads were started, or that were resident.
    started: usize,
    /// The parent whose children come after `leaves`, and the index of the next child.
    parent: Option<(OptimisticGuard<'a>, Option<usize>)>,
    /// A buffer for the keys of descents, and one for pages.
    key: Vec<u8>,
    missing: Vec<PageRef>,
}

impl<'a> ReadAhead<'a> {
    /// The most leaves to read ahead in any pool.
    pub(crate) const LEAVES: usize = 1024;
    /// After so many consecutive leaves a scan is long.
    const LONG: usize = 32;
    /// The most frames of all leaves that are read ahead: 4 MiB.
    const FRAMES: u32 = 1024;

    /// Read-ahead with the default limit for the pool.
    pub(crate) fn new(tree: TreeRef<'a>) -> ReadAhead<'a> {
        let mut ahead = ReadAhead {
            leaves_max: 0,
            steps: 0,
            window: 0,
            direction: Direction::Forward,
            leaves: VecDeque::new(),
            started: 0,
            parent: None,
            key: Vec::new(),
            missing: Vec::new(),
        };
        ahead.limit(tree, ReadAhead::LEAVES);
        ahead
    }

    /// Sets the most leaves to read ahead; 0 for none.
    pub(crate) fn limit(&mut self, tree: TreeRef<'a>, leaves: usize) {
        let frames = tree.pages.page_frames;
        let share = tree.pages.pool.capacity() / 8 / u64::from(frames);
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        self.leaves_max = leaves.min(share).min((ReadAhead::FRAMES / frames) as usize);
    }

    /// The scan begins at a new place.
    pub(crate) fn restart(&mut self) {
        (self.steps, self.window) = (0, 0);
        self.forget();
    }

    fn forget(&mut self) {
        self.leaves.clear();
        self.started = 0;
        self.parent = None;
    }

    /// The scan has moved to the next leaf, `reached`.
    pub(crate) fn step(
        &mut self,
        tree: TreeRef<'a>,
        direction: Direction,
        reached: OptimisticPair<'a>,
    ) {
        if self.leaves_max == 0 {
            return;
        }
        if direction != self.direction {
            self.direction = direction;
            self.restart();
        }
        if self.leaves.pop_front() == Some(reached.node.page()) {
            self.started = self.started.saturating_sub(1);
        } else {
            // The first step, or the tree has changed.
            self.forget();
            self.parent =
                reached.parent.map(|(parent, index)| (parent, direction.next_index(index)));
        }
        self.steps += 1;
        let is_long = self.steps >= ReadAhead::LONG;
        let low = if is_long { self.window / 2 } else { 0 };
        if self.started <= low {
            let few = !is_long && tree.pages.pool.device_answers_at_once();
            let wanted = if few { self.steps / 2 } else { self.steps };
            self.window = wanted.max(2).min(self.leaves_max);
            self.collect(tree);
            self.start(tree);
        }
    }

    /// Collects the next leaves, without waiting for pages. If the tree changes meanwhile, or a
    /// read fails, the scan finds out when it reaches the leaf.
    fn collect(&mut self, tree: TreeRef<'a>) {
        loop {
            if self.take_children(tree).is_err() {
                self.parent = None;
            }
            let is_enough = self.leaves.len() >= self.window;
            if is_enough || !matches!(self.next_parent(tree), Ok(true)) {
                return;
            }
        }
    }

    /// Adds the next children of the parent.
    fn take_children(&mut self, tree: TreeRef<'a>) -> Attempt<()> {
        let Some((parent, mut next)) = self.parent else { return Ok(()) };
        let before = self.leaves.len();
        let leaves = &mut self.leaves;
        let read = tree.read(parent, |node| {
            let count = node.count()?;
            while let Some(index) = next
                && leaves.len() < self.window
            {
                if index > count {
                    next = None;
                    break;
                }
                leaves.push_back(tree.page(node.child(index)?));
                next = self.direction.next_index(index);
            }
            Ok(())
        });
        let read = read.and_then(|()| Ok(parent.validate()?));
        if read.is_err() {
            leaves.truncate(before);
        }
        self.parent = Some((parent, next));
        read
    }

    /// Moves to the next parent. Returns false if there is none, or if it is not resident. In that
    /// case this starts its read, and a later call may find it.
    fn next_parent(&mut self, tree: TreeRef<'a>) -> Attempt<bool> {
        let Some((parent, None)) = self.parent else { return Ok(false) };
        let (direction, key) = (self.direction, &mut self.key);
        let is_last = tree.read(parent, |node| match direction {
            Direction::Forward => Ok(!node.upper_into(key)?),
            Direction::Backward => Ok(!node.lower_into(key)?),
        })?;
        parent.validate()?;
        if is_last {
            return Ok(false);
        }
        if direction == Direction::Forward {
            // The smallest key above the fence.
            key.push(0);
        }
        match tree.parent_of_leaves(key)? {
            ParentOfLeaves::Resident { parent, last, above } => {
                let first = if direction == Direction::Forward { 0 } else { last };
                self.parent = Some((parent, Some(first)));
                self.start_parents(tree, above, self.window / (last + 1))?;
                Ok(true)
            }
            ParentOfLeaves::Missing { page, above } => {
                tree.pages.pool.evict_and_prefetch(&[page]);
                self.start_parents(tree, above, 0)?;
                Ok(false)
            }
        }
    }

    /// Starts the reads of the next parents: one and `more`. If the scan read each one only when it
    /// needs it, the device would be idle in between.
    fn start_parents(
        &mut self,
        tree: TreeRef<'a>,
        above: Option<(OptimisticGuard<'a>, usize)>,
        more: usize,
    ) -> Attempt<()> {
        let Some((above, index)) = above else { return Ok(()) };
        let (direction, pool) = (self.direction, &tree.pages.pool);
        let mut missing = Vec::new();
        tree.read(above, |node| {
            let count = node.count()?;
            let next =
                std::iter::successors(direction.next_index(index), |at| direction.next_index(*at));
            for at in next.take_while(|at| *at <= count).take(1 + more) {
                missing.push(tree.page(node.child(at)?));
            }
            Ok(())
        })?;
        above.validate()?;
        missing.retain(|page| !pool.is_resident(*page));
        pool.evict_and_prefetch(&missing);
        Ok(())
    }

    /// Starts the reads of the leaves in the window that are not resident.
    fn start(&mut self, tree: TreeRef<'a>) {
        let pool = &tree.pages.pool;
        let ahead = self.window.min(self.leaves.len());
        let new = self.leaves.range(self.started.min(ahead)..ahead);
        self.missing.extend(new.filter(|page| !pool.is_resident(**page)));
        self.started = ahead;
        if !self.missing.is_empty() {
            pool.evict_and_prefetch(&self.missing);
            self.missing.clear();
        }
    }
}
