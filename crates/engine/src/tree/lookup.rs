//! Looks up one key: descends to its leaf and returns its value.
//!
//! Optimistic lock coupling (SIGMOD'23, section 3.3): the reader reads the child's number from the
//! parent, validates the parent, takes the child's guard, and validates the parent again. Only then
//! does the reader know that the child is the right one. It reports an error of the child only if
//! both validations succeed. A reader that starves takes locks.
//!
//! Threads take locks from the root downwards, and a thread that waits for a page holds no page
//! below it. So waits form no cycle.

use std::borrow::Cow;

use vellum_pool::{
    ExclusiveGuard, FixOutcome, OptimisticGuard, PAGE_SIZE, PageId, PageReader, PageRef, PoolError,
    RacyBytes, Restart, SharedGuard,
};

use super::TreeRef;
use crate::error::{Error, Result};
use crate::node::{HINTS_END, HINTS_FROM, LEAF_SLOT, Node, PayloadPlace, Position, Torn};
use crate::page as header;
use crate::page::blob::{self, BLOB_REF, BLOB_REST, BlobRef};
use crate::store::callback::CallbackScope;
use crate::store::pages::ValuePin;
use crate::value::{Blob, Value};

/// A long value. While this lives, the pages of the value are not freed: its guard keeps the page
/// of a blob, and the pin keeps the pages of a value in pieces.
#[derive(Debug)]
pub(crate) struct LongValue<'a> {
    pub value: Value<'a>,
    _pin: Option<ValuePin<'a>>,
}

impl<'a> TreeRef<'a> {
    /// The value of `key`.
    pub(crate) fn get(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        match self.attempt(|| self.try_get(key))? {
            Some(Some(found)) => Ok(found),
            _ => self.get_locked(key),
        }
    }

    /// `None` if the value is in pieces.
    fn try_get(self, key: &[u8]) -> Attempt<Option<Option<Value<'a>>>> {
        let leaf = self.leaf(Target::Key(key))?.node;
        let position = self.read(leaf, |node| node.find_reached(key))?;
        if !position.exact {
            leaf.validate()?;
            return Ok(Some(None));
        }
        let place = self.read(leaf, |node| node.payload_place(position.index))?;
        if place.blob {
            let blob = self.try_blob(leaf, place, key)?;
            return Ok(blob.map(|(_, blob)| Some(Value::Blob(blob))));
        }
        let mut value = Vec::new();
        self.read(leaf, |node| node.payload_into(place, &mut value))?;
        leaf.validate()?;
        Ok(Some(Some(Value::Inline(Cow::Owned(value)))))
    }

    /// The leaf for `key` under a shared lock. Descends with lock coupling.
    fn leaf_locked(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        check_covers(&leaf, leaf.page(), key)?;
        Ok(leaf)
    }

    /// As [`leaf_locked`](Self::leaf_locked), but descends optimistically unless that starves.
    pub(super) fn leaf_for_reading(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        match self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade_shared()?))? {
            Some(leaf) => check_covers(&leaf, leaf.page(), key).map(|()| leaf),
            None => self.leaf_locked(key),
        }
    }

    /// The number of the newest record that has changed the leaf for `key`.
    pub(crate) fn newest_change(self, key: &[u8]) -> Result<u64> {
        let leaf = header::lsn(&self.leaf_for_reading(key)?);
        // The record of a bulk load gives its number to the root alone.
        Ok(leaf.max(header::lsn(&self.shared_root()?)))
    }

    pub(crate) fn get_locked(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        let leaf = self.leaf_locked(key)?;
        let position = LeafBytes::from(&leaf).position(key)?;
        position.exact.then(|| self.value_at(leaf, position.index, key)).transpose()
    }

    /// The value of an entry. Keeps the leaf locked until the value is copied or pinned.
    fn value_at(self, leaf: SharedGuard<'a>, index: usize, key: &[u8]) -> Result<Value<'a>> {
        match LeafBytes::from(&leaf).value(index)? {
            LeafValue::Inline(value) => Ok(Value::Inline(Cow::Owned(value.to_vec()))),
            LeafValue::Blob(blob) if blob.is_whole() => self.open_blob(blob, key).map(Value::Blob),
            LeafValue::Blob(blob) => {
                let pin = self.pages.pin(blob.page.id);
                drop(leaf);
                self.copy_of(self.open_reader(blob, key, pin)?)
            }
        }
    }

    /// The value of `key` and its reference, if it is a blob. While the result lives, no other
    /// value gets the same reference.
    pub(crate) fn get_blob(self, key: &[u8]) -> Result<Option<(BlobRef, LongValue<'a>)>> {
        let found = self.attempt(|| {
            let leaf = self.leaf(Target::Key(key))?.node;
            let place = self.read(leaf, |node| node.payload_for(key))?;
            let Some(place) = place.filter(|place| place.blob) else {
                leaf.validate()?;
                return Ok(Some(None));
            };
            Ok(self.try_blob(leaf, place, key)?.map(Some))
        })?;
        if let Some(Some(found)) = found {
            let held = |(blob, value)| (blob, LongValue { value: Value::Blob(value), _pin: None });
            return Ok(found.map(held));
        }
        let leaf = self.leaf_locked(key)?;
        let Some((_, LeafValue::Blob(blob))) = LeafBytes::from(&leaf).find(key)? else {
            return Ok(None);
        };
        if blob.is_whole() {
            let value = Value::Blob(self.open_blob(blob, key)?);
            return Ok(Some((blob, LongValue { value, _pin: None })));
        }
        let (pin, reading) = (self.pages.pin(blob.page.id), self.pages.pin(blob.page.id));
        drop(leaf);
        let value = self.copy_of(self.open_reader(blob, key, reading)?)?;
        Ok(Some((blob, LongValue { value, _pin: Some(pin) })))
    }

    /// Fixes the blob of `key`, to which an entry of `leaf` refers. The reader does not keep the
    /// leaf locked while it reads the blob, so the leaf's other entries can change meanwhile.
    /// `None` if the value is in pieces.
    fn try_blob(
        self,
        leaf: OptimisticGuard<'a>,
        place: PayloadPlace,
        key: &[u8],
    ) -> Attempt<Option<(BlobRef, Blob<'a>)>> {
        let mut reference = Vec::with_capacity(BLOB_REF);
        self.read(leaf, |node| node.payload_into(place, &mut reference))?;
        leaf.validate()?;
        let blob = LeafBytes { page: leaf.page(), bytes: &[] }.blob(&reference)?;
        if !blob.is_whole() {
            return Ok(None);
        }
        self.check_fits(blob)?;
        let pool = &self.pages.pool;
        if let Some(guard) = pool.fix_shared_resident(blob.page) {
            // The leaf still had the reference after this thread had fixed the page. So the page is
            // the blob's.
            leaf.validate()?;
            return Ok(Some((blob, self.blob_in(guard, blob, key)?)));
        }
        // The size in the reference is right only while the leaf has the reference. So this thread
        // keeps the leaf locked until it has locked the blob's page for the read.
        let held = leaf.upgrade_shared()?;
        let begun = pool.begin_fix_shared(blob.page).map_err(Error::from)?;
        drop(held);
        let guard = match begun {
            FixOutcome::Resident(guard) => guard,
            FixOutcome::Claimed(pending) => pending.read().map_err(Error::from)?,
            FixOutcome::Busy => return Err(AttemptError::Restart),
        };
        Ok(Some((blob, self.blob_in(guard, blob, key)?)))
    }

    /// Checks that a whole value fits into the pool.
    fn check_fits(self, blob: BlobRef) -> Result<()> {
        let pool = self.pages.pool.capacity();
        match u64::from(blob.page.frames) <= pool {
            true => Ok(()),
            false => {
                let max = pool * PAGE_SIZE as u64 - BLOB_REST as u64;
                Err(Error::NeedsReader { len: blob.len, max })
            }
        }
    }

    fn blob_in(self, guard: SharedGuard<'a>, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        blob::check(&guard, self.state.id, key, blob.len)
            .map_err(|what| Error::damaged(blob.page, what))?;
        Ok(Blob::new(guard, blob.len as usize))
    }

    /// The value of a reference, which a version keeps.
    pub(crate) fn open_value(self, blob: BlobRef, key: &[u8]) -> Result<Value<'a>> {
        match blob.is_whole() {
            true => self.open_blob(blob, key).map(Value::Blob),
            false => {
                let pin = self.pages.pin(blob.page.id);
                self.copy_of(self.open_reader(blob, key, pin)?)
            }
        }
    }

    /// Fixes the blob of `key`, which must be whole. The caller keeps its reference valid.
    pub(crate) fn open_blob(self, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        self.check_fits(blob)?;
        self.blob_in(self.pages.pool.fix_shared(blob.page)?, blob, key)
    }

    /// Copies the value of `key` to `value`. If there is none, clears `value` and returns false.
    /// Allocates nothing unless `value` is too small.
    #[inline]
    pub(crate) fn get_into(self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let found = self.attempt(|| self.try_get_into(key, value))?;
        if let Some(Some(found)) = found {
            if !found {
                // An earlier attempt may have copied a value that was removed since.
                value.clear();
            }
            return Ok(found);
        }
        // The value is a blob, or the reader starved.
        value.clear();
        if let Some(Some(found)) = self.attempt(|| self.try_get_whole(key))? {
            value.extend_from_slice(&found);
            return Ok(true);
        }
        let Some(mut reader) = self.reader(key)? else { return Ok(false) };
        reader.read_rest(value).inspect_err(|_| value.clear())?;
        Ok(true)
    }

    /// The value of `key`, if it is whole and fits into the pool.
    fn try_get_whole(self, key: &[u8]) -> Attempt<Option<Value<'a>>> {
        match self.try_get(key) {
            Err(AttemptError::Failed(Error::NeedsReader { .. })) => Ok(None),
            found => found.map(Option::flatten),
        }
    }

    /// `None` if the value is a blob.
    #[inline(always)]
    fn try_get_into(self, key: &[u8], value: &mut Vec<u8>) -> Attempt<Option<bool>> {
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
        if let Some(found) = found {
            return Ok(found);
        }
        let leaf = self.leaf_locked(key)?;
        Ok(LeafBytes::from(&leaf).position(key)?.exact)
    }

    /// Runs `read` on the value of `key` in place.
    pub(crate) fn with<T>(self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let leaf = self.leaf_for_reading(key)?;
        match LeafBytes::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, LeafValue::Inline(value))) => {
                let _scope = CallbackScope::of(&self.pages.gate);
                Ok(Some(read(value)))
            }
            Some((_, LeafValue::Blob(_))) => {
                drop(leaf);
                let value = self.get(key)?;
                let _scope = CallbackScope::of(&self.pages.gate);
                Ok(value.map(|value| read(&value)))
            }
        }
    }
}

/// The number of optimistic attempts before a reader takes locks.
pub(crate) const ATTEMPTS: u32 = 64;

/// Why an optimistic attempt failed.
#[derive(Debug)]
pub(crate) enum AttemptError {
    /// A page has changed meanwhile. The reader tries again.
    Restart,
    /// The operation fails with this error.
    Failed(Error),
}

impl From<Restart> for AttemptError {
    fn from(_: Restart) -> AttemptError {
        AttemptError::Restart
    }
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> AttemptError {
        AttemptError::Failed(error)
    }
}

/// The result of an optimistic attempt.
pub(crate) type Attempt<T> = Result<T, AttemptError>;

/// The leaf to which a thread descends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'k> {
    /// The leaf that has, or would have, this key.
    Key(&'k [u8]),
    /// The last leaf.
    Last,
}

/// A node that an optimistic descent has reached, and its parent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptimisticPair<'a> {
    pub node: OptimisticGuard<'a>,
    /// The parent, and the index of the node among its children.
    pub parent: Option<(OptimisticGuard<'a>, usize)>,
}

/// The parent of some leaves. `above` is the parent's own parent, and the index of the parent
/// there.
#[derive(Debug)]
pub(crate) enum ParentOfLeaves<'a> {
    Resident {
        parent: OptimisticGuard<'a>,
        /// The index of its last child.
        last: usize,
        /// `None` if the parent is the root.
        above: Option<(OptimisticGuard<'a>, usize)>,
    },
    Missing {
        /// The page on the path to the parent, or the parent itself, that is not in memory.
        page: PageRef,
        /// `None` if `page` is not the parent itself.
        above: Option<(OptimisticGuard<'a>, usize)>,
    },
}

/// A node and its parent, both under exclusive locks.
#[derive(Debug)]
pub(crate) struct LockedPair<'a> {
    /// The parent, and the index of the node among its children; `None` for the root.
    pub parent: Option<(ExclusiveGuard<'a>, usize)>,
    pub node: ExclusiveGuard<'a>,
}

/// The result of an attempt to lock a node and its parent.
enum PairAttempt<'a> {
    Locked(LockedPair<'a>),
    /// The tree has no such level.
    TooLow,
    /// The tree has grown during the attempt.
    Grown,
    /// Another thread has locked this page.
    Busy(PageRef),
}

/// The index and the page of the child on the path to the target.
#[inline(always)]
fn child_for_target<R: PageReader>(
    node: Node<R>,
    target: Target<'_>,
) -> Result<(usize, u64), Torn> {
    match target {
        Target::Key(key) => node.child_for(key),
        Target::Last => {
            let index = node.count()?;
            Ok((index, node.child(index)?))
        }
    }
}

/// The inner nodes of a tree, each as it is when it is reached: level by level, from the parents of
/// leaves up, and from left to right, where the upper fence of a node leads to the next one.
pub(crate) struct InnerNodes<'a> {
    tree: TreeRef<'a>,
    level: u8,
    /// Belongs to the next node.
    key: Vec<u8>,
}

impl<'a> InnerNodes<'a> {
    pub(crate) fn new(tree: TreeRef<'a>) -> InnerNodes<'a> {
        InnerNodes { tree, level: 1, key: Vec::new() }
    }

    /// The next node under a shared lock, and its level.
    pub(crate) fn next(&mut self) -> Result<Option<(SharedGuard<'a>, u8)>> {
        let (target, level) = (Target::Key(&self.key), self.level);
        let Some(guard) = self.tree.shared_node(target, level)? else { return Ok(None) };
        check_covers(&guard, guard.page(), &self.key)?;
        match Node::new(&guard[..]).upper().map_err(|torn| Error::torn(guard.page(), torn))? {
            Some(upper) => self.key = [upper, &[0]].concat(),
            None => (self.level, self.key) = (level + 1, Vec::new()),
        }
        Ok(Some((guard, level)))
    }
}

/// The length of the part of a leaf that a search without hints reads: header and slots.
const LEAF_HEAD_BYTES: usize = HINTS_END + HINTS_FROM * LEAF_SLOT;

impl<'a> TreeRef<'a> {
    /// The tree's page with this number.
    #[inline(always)]
    pub(crate) fn page(self, id: u64) -> PageRef {
        PageRef { id: PageId(id), frames: self.pages.page_frames }
    }

    /// Reads a node optimistically. Inconsistent bytes are damage only if the page has not changed.
    #[inline(always)]
    pub(crate) fn read<T>(
        self,
        guard: OptimisticGuard<'a>,
        read: impl FnOnce(Node<RacyBytes<'a>>) -> Result<T, Torn>,
    ) -> Attempt<T> {
        match read(Node::new(guard.bytes())) {
            Ok(value) => Ok(value),
            Err(Torn) => Err(torn_or_restart(guard.validate(), guard.page())),
        }
    }

    /// The root and its level.
    #[inline(always)]
    pub(crate) fn root(self) -> Attempt<(OptimisticGuard<'a>, u8)> {
        let word = self.state.root_word();
        let root = self.pages.pool.optimistic(self.page(word));
        // A thread that drops the tree, or that moves the root, changes the word before it frees
        // the page. So a guard that is taken before the change is a guard of the tree's root, and
        // validation finds out whether it still is.
        let root = match root {
            Ok(root) if self.state.root_word() == word => root,
            other => return Err(self.no_root(word, other.err())),
        };
        let level = self.read(root, Node::level)?;
        self.check_node(root, level)?;
        Ok((root, level))
    }

    /// Why a thread has no guard of the root. The root had this word before.
    #[cold]
    #[inline(never)]
    fn no_root(self, word: u64, error: Option<PoolError>) -> AttemptError {
        match (self.check_dropped(), error) {
            (Err(dropped), _) => AttemptError::Failed(dropped),
            (Ok(()), Some(error)) if self.state.root_word() == word => {
                AttemptError::Failed(error.into())
            }
            (Ok(()), _) => AttemptError::Restart,
        }
    }

    /// The page of the root, which may move.
    pub(crate) fn root_page(self) -> PageRef {
        self.page(self.state.root())
    }

    /// Checks that a page is a node of this tree and level.
    #[inline(always)]
    pub(crate) fn check_node(self, guard: OptimisticGuard<'a>, level: u8) -> Attempt<()> {
        match Node::new(guard.bytes()).is_of(self.state.id, level) {
            true => Ok(()),
            false => Err(wrong_node_or_restart(
                guard.validate(),
                guard.page(),
                guard.bytes(),
                self.state.id,
                level,
            )),
        }
    }

    /// Prefetches the bytes with which a search in a node of this level begins.
    #[inline(always)]
    pub(crate) fn touch_node(self, page: PageRef, level: u8) {
        match level {
            0 => self.pages.pool.prefetch_bytes(page, 0, LEAF_HEAD_BYTES),
            _ => self.pages.pool.prefetch_bytes(page, 0, HINTS_END),
        }
    }

    /// The child `id` of `parent`, which has this level. Validates the parent.
    #[inline(always)]
    fn enter_child(
        self,
        parent: OptimisticGuard<'a>,
        id: u64,
        level: u8,
    ) -> Attempt<OptimisticGuard<'a>> {
        let page = self.page(id);
        self.touch_node(page, level);
        let child = match self.pages.pool.try_optimistic(page) {
            Some(child) => {
                parent.validate()?;
                child
            }
            None => self.fault_in_child(parent, id)?,
        };
        self.check_node(child, level)?;
        Ok(child)
    }

    /// The guard of the child `id` of `parent`. Faults the child in if it is not resident.
    /// Validates the parent.
    #[inline(always)]
    pub(crate) fn fault_in_child(
        self,
        parent: OptimisticGuard<'a>,
        id: u64,
    ) -> Attempt<OptimisticGuard<'a>> {
        // Without this, a number read from a page that is being changed could fault in any page.
        parent.validate()?;
        let child = self.pages.pool.optimistic(self.page(id));
        parent.validate()?;
        Ok(child.map_err(Error::from)?)
    }

    /// Descends to the leaf for `target`.
    #[inline(always)]
    pub(crate) fn leaf(self, target: Target<'_>) -> Attempt<OptimisticPair<'a>> {
        let (mut node, top) = self.root()?;
        let (mut parent, mut level) = (None, top);
        while level > 0 {
            let (index, id) = self.read(node, |node| child_for_target(node, target))?;
            level -= 1;
            (parent, node) = (Some((node, index)), self.enter_child(node, id, level)?);
        }
        self.pages.pool.count_optimistic(u64::from(top) + 1);
        Ok(OptimisticPair { node, parent })
    }

    /// The parent of the leaf for `key`, or the first page on the path to it that is not resident.
    /// Does not wait.
    pub(crate) fn parent_of_leaves(self, key: &[u8]) -> Attempt<ParentOfLeaves<'a>> {
        let (mut node, mut level) = self.root()?;
        let mut above = None;
        while level > 1 {
            let (index, child) = self.read(node, |node| node.child_for(key))?;
            let page = self.page(child);
            let child = self.pages.pool.try_optimistic(page);
            node.validate()?;
            level -= 1;
            above = (level == 1).then_some((node, index));
            let Some(child) = child else { return Ok(ParentOfLeaves::Missing { page, above }) };
            self.check_node(child, level)?;
            node = child;
        }
        // The tree may have become a single leaf.
        let last = if level == 1 {
            self.read(node, Node::count)?
        } else {
            return Err(AttemptError::Restart);
        };
        node.validate()?;
        Ok(ParentOfLeaves::Resident { parent: node, last, above })
    }

    /// Repeats `attempt` until it succeeds or fails. `None` if it starves.
    #[inline(always)]
    pub(crate) fn attempt<T>(self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<Option<T>> {
        for _ in 0..ATTEMPTS {
            match attempt() {
                Ok(value) => return Ok(Some(value)),
                Err(AttemptError::Restart) => {}
                Err(AttemptError::Failed(error)) => return Err(error),
            }
        }
        self.pages.pool.count_starvation();
        Ok(None)
    }

    /// The leaf for `target` under a shared lock. Descends with lock coupling.
    pub(crate) fn shared_leaf(self, target: Target<'_>) -> Result<SharedGuard<'a>> {
        let leaf = self.shared_node(target, 0)?;
        leaf.ok_or_else(|| Error::damaged(self.root_page(), "its level is below that of leaves"))
    }

    /// As [`shared_leaf`](Self::shared_leaf), for the node of level `to`. `None` if the tree is not
    /// that high.
    pub(crate) fn shared_node(self, target: Target<'_>, to: u8) -> Result<Option<SharedGuard<'a>>> {
        let mut node = self.shared_root()?;
        let mut level = self.level_of(&node, node.page())?;
        if level < to {
            return Ok(None);
        }
        while level > to {
            let child = self.next_child(&node, node.page(), target)?.1;
            let child = self.pages.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != level - 1 {
                return Err(level_error(child.page(), below, level - 1));
            }
            (node, level) = (child, below);
        }
        Ok(Some(node))
    }

    /// The root under a shared lock. While the caller holds it, it does not move.
    pub(crate) fn shared_root(self) -> Result<SharedGuard<'a>> {
        loop {
            let page = self.root_page();
            let root = self.pages.pool.fix_shared(page);
            self.check_dropped()?;
            if self.root_page() == page {
                return Ok(root?);
            }
        }
    }

    /// The root under an exclusive lock. The tree may be dropped.
    pub(crate) fn exclusive_root(self) -> Result<ExclusiveGuard<'a>> {
        loop {
            let page = self.root_page();
            let root = self.pages.pool.fix_exclusive(page);
            if self.root_page() == page {
                return Ok(root?);
            }
        }
    }

    /// The node of `level` for `target` and its parent, both under exclusive locks. `None` if the
    /// tree is not that high.
    pub(crate) fn exclusive_pair(
        self,
        target: Target<'_>,
        level: u8,
    ) -> Result<Option<LockedPair<'a>>> {
        loop {
            match self.try_exclusive_pair(target, level)? {
                PairAttempt::Locked(pair) => return Ok(Some(pair)),
                PairAttempt::TooLow => return Ok(None),
                PairAttempt::Grown => {}
                // This thread holds no lock here, so it can wait for the page, which may have
                // another use by then.
                PairAttempt::Busy(page) => drop(self.pages.pool.fix_exclusive(page)),
            }
        }
    }

    /// Waits without limit only for the root, and briefly for the pages below it. In a damaged
    /// tree, two nodes may be below each other, and two threads that hold them would wait for each
    /// other.
    fn try_exclusive_pair(self, target: Target<'_>, level: u8) -> Result<PairAttempt<'a>> {
        let mut above = self.shared_root()?;
        let mut above_level = self.level_of(&above, above.page())?;
        if above_level <= level + 1 {
            drop(above);
            let root = self.exclusive_root()?;
            let root_level = self.level_of(&root, root.page())?;
            return match root_level {
                now if now < level => Ok(PairAttempt::TooLow),
                now if now == level => {
                    Ok(PairAttempt::Locked(LockedPair { parent: None, node: root }))
                }
                now if now == level + 1 => self.pair_below(root, target),
                // The tree has grown while this thread held no lock.
                _ => Ok(PairAttempt::Grown),
            };
        }
        while above_level > level + 2 {
            let child = self.next_child(&above, above.page(), target)?.1;
            let child = self.pages.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != above_level - 1 {
                return Err(level_error(child.page(), below, above_level - 1));
            }
            (above, above_level) = (child, below);
        }
        let page = self.page(self.next_child(&above, above.page(), target)?.1);
        let Some(parent) = self.pages.pool.fix_exclusive_briefly(page)? else {
            return Ok(PairAttempt::Busy(page));
        };
        drop(above);
        let found = self.level_of(&parent, parent.page())?;
        if found != level + 1 {
            return Err(level_error(parent.page(), found, level + 1));
        }
        self.pair_below(parent, target)
    }

    /// Locks the child for `target` below its parent.
    fn pair_below(self, parent: ExclusiveGuard<'a>, target: Target<'_>) -> Result<PairAttempt<'a>> {
        let (index, child) = self.next_child(&parent, parent.page(), target)?;
        let page = self.page(child);
        let Some(node) = self.pages.pool.fix_exclusive_briefly(page)? else {
            return Ok(PairAttempt::Busy(page));
        };
        let (found, level) = (self.level_of(&node, node.page())?, parent[header::LEVEL]);
        if found != level - 1 {
            return Err(level_error(node.page(), found, level - 1));
        }
        Ok(PairAttempt::Locked(LockedPair { parent: Some((parent, index)), node }))
    }

    /// Locks the sibling of a node of `level`. The caller has locked their parent. `None` if the
    /// sibling is busy.
    pub(crate) fn sibling(self, page: PageRef, level: u8) -> Result<Option<ExclusiveGuard<'a>>> {
        let Some(node) = self.pages.pool.fix_exclusive_briefly(page)? else { return Ok(None) };
        match self.level_of(&node, page)? {
            found if found != level => Err(level_error(page, found, level)),
            _ => Ok(Some(node)),
        }
    }

    /// The level of a locked node. Checks that the node belongs to this tree.
    fn level_of(self, bytes: &[u8], page: PageRef) -> Result<u8> {
        let tree = header::tree(bytes);
        if tree != self.state.id {
            return Err(tree_error(page, tree, self.state.id));
        }
        Node::new(bytes).level().map_err(|torn| Error::torn(page, torn))
    }

    fn next_child(self, bytes: &[u8], page: PageRef, target: Target<'_>) -> Result<(usize, u64)> {
        let (index, child) =
            child_for_target(Node::new(bytes), target).map_err(|torn| Error::torn(page, torn))?;
        match child == page.id.0 {
            // This thread holds the page, and would wait for itself.
            true => Err(Error::damaged(page, "it is its own child")),
            false => Ok((index, child)),
        }
    }

    /// The leaf for `key` under an exclusive lock.
    #[inline]
    pub(crate) fn exclusive_leaf(self, key: &[u8]) -> Result<ExclusiveGuard<'a>> {
        let leaf = self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade()?))?;
        let leaf = leaf.map_or_else(|| self.exclusive_leaf_locked(Target::Key(key)), Ok)?;
        check_covers(&leaf, leaf.page(), key)?;
        Ok(leaf)
    }

    /// As [`exclusive_leaf`](Self::exclusive_leaf), for a thread that holds leaves that come before
    /// this one. It takes no other locks on the way, and returns `None` if it starves: a thread
    /// that holds an inner page may be waiting for one of these leaves.
    pub(crate) fn try_exclusive_leaf(self, key: &[u8]) -> Result<Option<ExclusiveGuard<'a>>> {
        let leaf = self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade()?))?;
        if let Some(leaf) = &leaf {
            check_covers(leaf, leaf.page(), key)?;
        }
        Ok(leaf)
    }

    #[cold]
    pub(crate) fn exclusive_leaf_locked(self, target: Target<'_>) -> Result<ExclusiveGuard<'a>> {
        let _turn = self.pages.structure_lock();
        loop {
            if let Some(pair) = self.exclusive_pair(target, 0)? {
                return Ok(pair.node);
            }
        }
    }
}

/// Checks that a locked leaf is the leaf for `key`. A leaf stores keys without their prefix, so a
/// key that belongs elsewhere would become a different one. A descent can reach a wrong leaf if the
/// device has lost a write.
pub(super) fn check_covers(leaf: &[u8], page: PageRef, key: &[u8]) -> Result<()> {
    match Node::new(leaf).covers(key).map_err(|torn| Error::torn(page, torn))? {
        true => Ok(()),
        false => Err(Error::fences(page)),
    }
}

// The next functions take no guards. A guard whose address is taken could not stay in registers.

/// The error for inconsistent bytes of a node: damage if the page is unchanged, or else a restart.
#[cold]
#[inline(never)]
fn torn_or_restart(unchanged: Result<(), Restart>, page: PageRef) -> AttemptError {
    match unchanged {
        Ok(()) => AttemptError::Failed(Error::torn(page, Torn)),
        Err(Restart) => AttemptError::Restart,
    }
}

/// The error for a page that is not a node of this tree and level: damage if the page is unchanged,
/// or else a restart.
#[cold]
#[inline(never)]
fn wrong_node_or_restart(
    unchanged: Result<(), Restart>,
    page: PageRef,
    bytes: RacyBytes<'_>,
    tree: u32,
    level: u8,
) -> AttemptError {
    if unchanged.is_err() {
        return AttemptError::Restart;
    }
    AttemptError::Failed(match (bytes.u32(header::TREE), Node::new(bytes).level()) {
        (Some(found), Ok(_)) if found != tree => tree_error(page, found, tree),
        (_, Ok(found)) => level_error(page, found, level),
        (_, Err(torn)) => Error::torn(page, torn),
    })
}

/// The page is a sound page of another tree. This happens if the device has lost a write.
#[cold]
fn tree_error(page: PageRef, found: u32, expected: u32) -> Error {
    Error::damaged(page, format!("it belongs to tree {found}, but {expected} is expected"))
}

#[cold]
fn level_error(page: PageRef, found: u8, expected: u8) -> Error {
    Error::damaged(page, format!("its level is {found}, but {expected} is expected"))
}

/// The bytes of a locked leaf, or of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafBytes<'l> {
    pub page: PageRef,
    pub bytes: &'l [u8],
}

/// The value of an entry as the leaf stores it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LeafValue<'l> {
    Inline(&'l [u8]),
    Blob(BlobRef),
}

impl LeafValue<'_> {
    pub(crate) fn blob(self) -> Option<BlobRef> {
        match self {
            LeafValue::Inline(_) => None,
            LeafValue::Blob(blob) => Some(blob),
        }
    }
}

impl<'l> From<&'l SharedGuard<'_>> for LeafBytes<'l> {
    fn from(guard: &'l SharedGuard<'_>) -> LeafBytes<'l> {
        LeafBytes { page: guard.page(), bytes: guard }
    }
}

impl<'l> From<&'l ExclusiveGuard<'_>> for LeafBytes<'l> {
    fn from(guard: &'l ExclusiveGuard<'_>) -> LeafBytes<'l> {
        LeafBytes { page: guard.page(), bytes: guard }
    }
}

impl<'l> LeafBytes<'l> {
    /// The position of `key`, or the position at which to insert it.
    pub(crate) fn position(self, key: &[u8]) -> Result<Position> {
        Node::new(self.bytes).find(key).map_err(|torn| Error::torn(self.page, torn))
    }

    /// The index and the value of the entry with `key`, if the leaf has one.
    pub(crate) fn find(self, key: &[u8]) -> Result<Option<(usize, LeafValue<'l>)>> {
        let position = self.position(key)?;
        match position.exact {
            true => Ok(Some((position.index, self.value(position.index)?))),
            false => Ok(None),
        }
    }

    /// The length of the payload of the entry at `index`.
    pub(crate) fn payload_len(self, index: usize) -> Result<usize> {
        let place = Node::new(self.bytes).payload_place(index);
        place.map(|place| place.len).map_err(|torn| Error::torn(self.page, torn))
    }

    /// The value of the entry at `index`.
    pub(crate) fn value(self, index: usize) -> Result<LeafValue<'l>> {
        let torn = |torn| Error::torn(self.page, torn);
        let node = Node::new(self.bytes);
        let place = node.payload_place(index).map_err(torn)?;
        let payload = node.payload(place).map_err(torn)?;
        match place.blob {
            true => self.blob(payload).map(LeafValue::Blob),
            false => Ok(LeafValue::Inline(payload)),
        }
    }

    /// The blob that a payload of the leaf refers to.
    pub(crate) fn blob(self, payload: &[u8]) -> Result<BlobRef> {
        let damaged = || Error::damaged(self.page, "a reference to a blob is invalid");
        BlobRef::decode(payload).ok_or_else(damaged)
    }
}
