//! Cursors: walking over entries while others change the tree.
//!
//! A cursor has a private copy of its leaf and remembers the version that it copied. A step within
//! an unchanged leaf is a step within the copy. If the leaf changed, or ended, the cursor descends
//! again: by its key, or by the leaf's fence, which is where the neighbour begins. So it holds no
//! lock, needs no pointers between leaves, and every entry that it returns was there at that
//! moment.

use std::borrow::Cow;
use std::ops::Bound;

use vellum_pool::{OptimisticGuard, PageReader, PageRef};

use super::Access;
use super::descend::{Reached, Step, Target};
use super::range::is_before;
use super::read_ahead::{Direction, ReadAhead};
use crate::error::{Error, Result};
use crate::node::{Node, PayloadPlace, Torn};
use crate::page::blob::BlobRef;
use crate::value::Value;

/// Where a cursor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nowhere yet.
    Fresh,
    /// On the entry `index` of the copied leaf.
    On(usize),
    /// Behind the last entry.
    AtEnd,
    /// Before the first entry.
    AtStart,
}

/// A place in a tree that can move forward and backward. It stays valid whatever others do.
///
/// Each entry was in the tree when the method that moved to it returned. After an error the cursor
/// stands nowhere, as a fresh one.
#[derive(Debug)]
pub struct Cursor<'a> {
    access: Access<'a>,
    state: State,
    /// A copy of the leaf, and the guard of the version it was copied from.
    leaf: Vec<u8>,
    guard: Option<OptimisticGuard<'a>>,
    /// The key of the entry that the cursor stands on.
    key: Vec<u8>,
    /// A buffer for the keys of descents.
    scratch: Vec<u8>,
    /// The key's beginning is the leaf's prefix.
    has_prefix: bool,
    /// So many of the leaf's entries lie in the range that is walked over; 0 if that is not known.
    within: usize,
    ahead: ReadAhead<'a>,
    /// Blobs are read ahead, too; those of the entries before this one are on their way.
    reads_blobs: bool,
    blobs_until: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(access: Access<'a>) -> Cursor<'a> {
        Cursor {
            access,
            state: State::Fresh,
            leaf: Vec::new(),
            guard: None,
            key: Vec::new(),
            scratch: Vec::new(),
            has_prefix: false,
            within: 0,
            ahead: ReadAhead::new(access),
            reads_blobs: false,
            blobs_until: 0,
        }
    }

    /// Reads at most so many leaves ahead, 0 for none, and at most an eighth of the pool; and,
    /// unless it is 0, the blobs of the next entries, another eighth.
    ///
    /// Without this call it is as many leaves as suits the pool, up to 1,024, and no blobs. Either
    /// way reading ahead begins at the second leaf in a row, with a few.
    pub fn read_ahead(mut self, leaves: usize) -> Cursor<'a> {
        self.ahead.limit(self.access, leaves);
        self.reads_blobs = leaves > 0;
        self
    }

    /// Moves to the first entry whose key is not less than `key`; false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn seek(&mut self, key: &[u8]) -> Result<bool> {
        self.load(Target::Key(key), None)?;
        let index = self.find(key)?.0;
        self.settle_forward(index)
    }

    /// Moves to the last entry whose key is not greater than `key`; false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn seek_back(&mut self, key: &[u8]) -> Result<bool> {
        self.load(Target::Key(key), None)?;
        let (index, exact) = self.find(key)?;
        self.settle_backward(index + usize::from(exact))
    }

    /// Moves to the first entry; false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn first(&mut self) -> Result<bool> {
        self.seek(&[])
    }

    /// A copy of the next leaf and its page, from a fresh cursor the first; none at the end.
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

    /// Moves to the last entry; false if there is none.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn last(&mut self) -> Result<bool> {
        self.load(Target::Last, None)?;
        let count = self.node().count().map_err(|torn| self.torn(torn))?;
        self.settle_backward(count)
    }

    /// Moves to the next entry, from a fresh cursor to the first; false at the end.
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

    /// Finds out how many entries of the leaf lie before `end`, for [`step`](Self::step).
    #[inline]
    pub(crate) fn learn_end(&mut self, end: &Bound<Vec<u8>>) -> Result<()> {
        if self.within == 0 {
            let count = self.node().count().map_err(|torn| self.torn(torn))?;
            // The upper fence is the greatest key that the leaf can have.
            let upper = self.node().upper().ok().flatten();
            self.within = match end {
                Bound::Unbounded => count,
                _ if upper.is_some_and(|upper| is_before(upper, end)) => count,
                Bound::Included(key) => {
                    self.find(key).map(|(at, exact)| at + usize::from(exact))?
                }
                Bound::Excluded(key) => self.find(key)?.0,
            };
        }
        Ok(())
    }

    /// Forgets where the range ends.
    pub(crate) fn forget_end(&mut self) {
        self.within = 0;
    }

    /// Moves to the next entry, if that lies in the same leaf, which has not changed, and in the
    /// range, and its value is no blob; returns where the value lies. Otherwise nothing changes.
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

    /// The entry that [`step`](Self::step) moved to.
    #[inline(always)]
    pub(crate) fn stepped(&self, value: PayloadPlace) -> (&[u8], &[u8]) {
        (&self.key, &self.leaf[value.offset..value.offset + value.len])
    }

    /// Moves to the previous entry, from a fresh cursor to the last; false at the start.
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

    /// The cursor stands on an entry.
    pub fn is_on_entry(&self) -> bool {
        matches!(self.state, State::On(_))
    }

    /// The key of the entry that the cursor stands on; empty if it stands on none.
    pub fn key(&self) -> &[u8] {
        match self.state {
            State::On(_) => &self.key,
            _ => &[],
        }
    }

    /// Length of the entry's value in bytes, known without reading a blob; 0 if on none.
    pub fn value_len(&self) -> u64 {
        match self.payload() {
            Some((bytes, true)) => BlobRef::decode(bytes).map_or(0, |blob| blob.len),
            Some((bytes, false)) => bytes.len() as u64,
            None => 0,
        }
    }

    /// The value has pages of its own.
    pub fn is_blob(&self) -> bool {
        self.payload().is_some_and(|(_, blob)| blob)
    }

    /// The value of the entry that the cursor stands on. A short one is as it was when the cursor
    /// moved here, a blob as it is now; `None` if that was removed meanwhile, or if the cursor
    /// stands on no entry.
    ///
    /// # Errors
    /// Damage, a failed read, a pool that is full of guards.
    pub fn value(&self) -> Result<Option<Value<'_>>> {
        match self.payload() {
            Some((bytes, false)) => Ok(Some(Value::Inline(Cow::Borrowed(bytes)))),
            Some((_, true)) => self.access.get(&self.key),
            None => Ok(None),
        }
    }

    /// The value of the entry that the cursor stands on, which is no blob.
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
        self.guard.map_or(self.access.tree.root, |guard| guard.page())
    }

    fn find(&self, key: &[u8]) -> Result<(usize, bool)> {
        let position = self.node().find(key).map_err(|torn| self.torn(torn))?;
        Ok((position.index, position.exact))
    }

    /// The leaf is still what was copied. If the store is closed, copying it again says so.
    fn is_current(&self) -> bool {
        self.guard.is_some_and(|guard| guard.validate().is_ok())
            && self.access.core.check_open().is_ok()
    }

    /// Copies the leaf of the current key, which has changed, and finds the key's place in it.
    fn seek_key(&mut self) -> Result<(usize, bool)> {
        let key = std::mem::take(&mut self.key);
        let found = self.reload(&key).and_then(|()| self.find(&key));
        self.key = key;
        found
    }

    /// Copies the leaf for `key` again; reading ahead goes on.
    fn reload(&mut self, key: &[u8]) -> Result<()> {
        self.load_with(Target::Key(key), |_, _| ())
    }

    /// Copies the leaf for `target`. `direction` is that of a scan from a neighbour of the leaf;
    /// none begins anew.
    fn load(&mut self, target: Target<'_>, direction: Option<Direction>) -> Result<()> {
        self.load_with(target, |cursor, reached| match direction {
            Some(direction) => cursor.ahead.step(cursor.access, direction, reached),
            None => cursor.ahead.restart(),
        })
    }

    /// Copies the leaf for `target`, and calls `look_ahead` with it. After an error the cursor
    /// stands nowhere.
    fn load_with(
        &mut self,
        target: Target<'_>,
        mut look_ahead: impl FnMut(&mut Cursor<'a>, Reached<'a>),
    ) -> Result<()> {
        self.state = State::Fresh;
        self.blobs_until = 0;
        self.has_prefix = false;
        self.within = 0;
        self.access.core.check_open()?;
        let access = self.access;
        let copied = access.attempt(|| {
            let reached = access.leaf(target)?;
            self.copy(reached)?;
            look_ahead(self, reached);
            Ok(())
        })?;
        if copied.is_none() {
            let leaf = access.shared_leaf(target)?;
            self.leaf.clear();
            self.leaf.extend_from_slice(&leaf);
            // Taken while the leaf is held, so it is of the version that was copied.
            self.guard = Some(access.core.pool.optimistic(leaf.page())?);
        }
        // Always true of a sound tree; without it a damaged one could lead in a circle, or past
        // entries.
        match target {
            Target::Key(key) if !self.node().covers(key).map_err(|torn| self.torn(torn))? => {
                Err(Error::fences(self.page()))
            }
            _ => Ok(()),
        }
    }

    fn copy(&mut self, reached: Reached<'a>) -> Step<()> {
        let bytes = reached.node.bytes();
        self.leaf.resize(bytes.len(), 0);
        bytes.copy_to(0, &mut self.leaf);
        reached.node.validate()?;
        self.guard = Some(reached.node);
        Ok(())
    }

    /// Keeps the blobs of the next entries on their way, as far as they are in this leaf.
    fn prefetch_blobs(&mut self, index: usize, count: usize) {
        let pool = &self.access.core.pool;
        if !self.reads_blobs || index < self.blobs_until {
            return;
        }
        self.blobs_until = count;
        // A reference is good as long as its leaf is held, and this is the leaf that was copied.
        let Some(Ok(_leaf)) = self.guard.map(OptimisticGuard::upgrade_shared) else { return };
        let mut frames_left = pool.capacity() / 8;
        let mut pages = Vec::new();
        for next in (index..count).filter(|next| self.node().is_blob(*next)) {
            let Some(blob) = self.blob_at(next) else { continue };
            let frames = u64::from(blob.page.frames);
            if frames > frames_left {
                // One that is too large is left to the next caller that wants it.
                self.blobs_until = next.max(index + 1);
                break;
            }
            frames_left -= frames;
            if !pool.is_resident(blob.page) {
                pages.push(blob.page);
            }
        }
        pool.bring_in(&pages);
    }

    /// Stands on the entry `index` of the leaf, or on the first one behind the leaf.
    fn settle_forward(&mut self, mut index: usize) -> Result<bool> {
        loop {
            let count = self.node().count().map_err(|torn| self.torn(torn))?;
            if index < count {
                self.prefetch_blobs(index, count);
                return self.stand_on(index);
            }
            // The next leaf has the smallest key above this one's upper fence.
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

    /// Stands on the entry before `index` of the leaf, or on the last one before the leaf.
    fn settle_backward(&mut self, mut index: usize) -> Result<bool> {
        loop {
            if index > 0 {
                return self.stand_on(index - 1);
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
    fn stand_on(&mut self, index: usize) -> Result<bool> {
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
