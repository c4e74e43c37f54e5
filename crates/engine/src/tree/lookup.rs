//! Looking up one key: from the call to the leaf, and what is found there.
//!
//! Optimistic lock coupling (SIGMOD'23, section 3.3): the reader reads the child's number,
//! validates the node that it came from, takes the child's guard, and validates the node again.
//! Only then is the child known to be the right one, and only between the two validations does the
//! reader believe an error of the child. A reader that starves takes locks.
//!
//! Threads take locks from the root downwards, and a thread that waits for a page holds nothing
//! below it. So waits form no circle.

use std::borrow::Cow;

use vellum_pool::{
    Begun, ExclusiveGuard, OptimisticGuard, PAGE_SIZE, PageId, PageReader, PageRef, RacyBytes,
    Restart, SharedGuard,
};

use super::Access;
use crate::error::{Error, Result};
use crate::node::{HINTS_END, HINTS_FROM, LEAF_SLOT, Node, PayloadPlace, Position, Torn};
use crate::page as header;
use crate::page::blob::{self, BLOB_REF, BLOB_REST, BlobRef};
use crate::store::callback::CallbackScope;
use crate::store::pages::ValuePin;
use crate::value::{Blob, Value};

/// A value with pages of its own, which keep their place: that of a blob for its guard, others for
/// the pin.
#[derive(Debug)]
pub(crate) struct LongValue<'a> {
    pub value: Value<'a>,
    _pin: Option<ValuePin<'a>>,
}

impl<'a> Access<'a> {
    /// The value of `key`.
    pub(crate) fn get(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        match self.attempt(|| self.try_get(key))? {
            Some(Some(found)) => Ok(found),
            _ => self.get_locked(key),
        }
    }

    /// `None` if the value is in pieces.
    fn try_get(self, key: &[u8]) -> Step<Option<Option<Value<'a>>>> {
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

    /// The leaf for `key`, held shared; lock coupling all the way.
    fn leaf_locked(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        let leaf = self.shared_leaf(Target::Key(key))?;
        check_covers(&leaf, leaf.page(), key)?;
        Ok(leaf)
    }

    /// As [`leaf_locked`](Self::leaf_locked), without locks on the way there unless that starves.
    pub(super) fn leaf_for_reading(self, key: &[u8]) -> Result<SharedGuard<'a>> {
        match self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade_shared()?))? {
            Some(leaf) => check_covers(&leaf, leaf.page(), key).map(|()| leaf),
            None => self.leaf_locked(key),
        }
    }

    pub(crate) fn get_locked(self, key: &[u8]) -> Result<Option<Value<'a>>> {
        let leaf = self.leaf_locked(key)?;
        let position = HeldLeaf::from(&leaf).position(key)?;
        position.exact.then(|| self.value_at(leaf, position.index, key)).transpose()
    }

    /// The value of an entry, whose leaf is held until the value is.
    fn value_at(self, leaf: SharedGuard<'a>, index: usize, key: &[u8]) -> Result<Value<'a>> {
        match HeldLeaf::from(&leaf).value(index)? {
            Held::Inline(value) => Ok(Value::Inline(Cow::Owned(value.to_vec()))),
            Held::Blob(blob) if blob.is_whole() => self.open_blob(blob, key).map(Value::Blob),
            Held::Blob(blob) => {
                let pin = self.pages.pin(blob.page.id);
                drop(leaf);
                self.copy_of(self.open_reader(blob, key, pin)?)
            }
        }
    }

    /// The value of `key` and its reference, if it has pages of its own. As long as the result
    /// lives, no other value gets the same reference.
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
        let Some((_, Held::Blob(blob))) = HeldLeaf::from(&leaf).find(key)? else {
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

    /// Holds the blob of `key`, which an entry of `leaf` refers to, without holding the leaf while
    /// the blob is read: its other entries can be changed meanwhile. None if it is in pieces.
    fn try_blob(
        self,
        leaf: OptimisticGuard<'a>,
        place: PayloadPlace,
        key: &[u8],
    ) -> Step<Option<(BlobRef, Blob<'a>)>> {
        let mut reference = Vec::with_capacity(BLOB_REF);
        self.read(leaf, |node| node.payload_into(place, &mut reference))?;
        leaf.validate()?;
        let blob = HeldLeaf { page: leaf.page(), bytes: &[] }.blob(&reference)?;
        if !blob.is_whole() {
            return Ok(None);
        }
        self.check_fits(blob)?;
        let pool = &self.pages.pool;
        if let Some(guard) = pool.fix_shared_resident(blob.page) {
            // The reference was there when the page was held already: it is the blob.
            leaf.validate()?;
            return Ok(Some((blob, self.blob_in(guard, blob, key)?)));
        }
        // A blob's page is as large as its reference says only as long as the reference is there:
        // the leaf is held until the page is locked for the read.
        let held = leaf.upgrade_shared()?;
        let begun = pool.begin_shared(blob.page).map_err(Error::from)?;
        drop(held);
        let guard = match begun {
            Begun::Held(guard) => guard,
            Begun::Claimed(pending) => pending.read().map_err(Error::from)?,
            Begun::Busy => return Err(Stop::Restart),
        };
        Ok(Some((blob, self.blob_in(guard, blob, key)?)))
    }

    /// A whole value can be held in the pool.
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
        blob::check(&guard, self.tree.id, key, blob.len)
            .map_err(|what| Error::damaged(blob.page, what))?;
        Ok(Blob::new(guard, blob.len as usize))
    }

    /// Holds the blob of `key`, which is whole and whose reference is held.
    pub(crate) fn open_blob(self, blob: BlobRef, key: &[u8]) -> Result<Blob<'a>> {
        self.check_fits(blob)?;
        self.blob_in(self.pages.pool.fix_shared(blob.page)?, blob, key)
    }

    /// Copies the value of `key` to `value`; false, and `value` empty, if there is none. Allocates
    /// nothing unless `value` is too small.
    #[inline]
    pub(crate) fn get_into(self, key: &[u8], value: &mut Vec<u8>) -> Result<bool> {
        let found = self.attempt(|| self.try_get_into(key, value))?;
        if let Some(Some(found)) = found {
            if !found {
                // An attempt that was restarted may have copied a value that went since.
                value.clear();
            }
            return Ok(found);
        }
        // A blob, or starved.
        value.clear();
        if let Some(Some(found)) = self.attempt(|| self.try_get_whole(key))? {
            value.extend_from_slice(&found);
            return Ok(true);
        }
        let Some(mut reader) = self.reader(key)? else { return Ok(false) };
        reader.read_rest(value).inspect_err(|_| value.clear())?;
        Ok(true)
    }

    /// The value of `key` if it is whole and fits the pool.
    fn try_get_whole(self, key: &[u8]) -> Step<Option<Value<'a>>> {
        match self.try_get(key) {
            Err(Stop::Fail(Error::NeedsReader { .. })) => Ok(None),
            found => found.map(Option::flatten),
        }
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
            let position = self.read(leaf, |node| node.find_reached(key))?;
            leaf.validate()?;
            Ok(position.exact)
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        let leaf = self.leaf_locked(key)?;
        Ok(HeldLeaf::from(&leaf).position(key)?.exact)
    }

    /// Runs `read` on the value of `key` in place.
    pub(crate) fn with<T>(self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let leaf = self.leaf_for_reading(key)?;
        match HeldLeaf::from(&leaf).find(key)? {
            None => Ok(None),
            Some((_, Held::Inline(value))) => {
                let _scope = CallbackScope::of(&self.pages.gate);
                Ok(Some(read(value)))
            }
            Some((_, Held::Blob(_))) => {
                drop(leaf);
                let value = self.get(key)?;
                let _scope = CallbackScope::of(&self.pages.gate);
                Ok(value.map(|value| read(&value)))
            }
        }
    }
}

/// Optimistic attempts before locks are taken.
pub(crate) const ATTEMPTS: u32 = 64;

/// Why an optimistic attempt ended.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A page changed meanwhile: try again.
    Restart,
    /// Something is wrong.
    Fail(Error),
}

impl From<Restart> for Stop {
    fn from(_: Restart) -> Stop {
        Stop::Restart
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Fail(error)
    }
}

/// What an optimistic attempt returns.
pub(crate) type Step<T> = Result<T, Stop>;

/// Where a descent goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target<'k> {
    /// To the leaf that has, or would have, this key.
    Key(&'k [u8]),
    /// To the last leaf.
    Last,
}

/// A node that was reached optimistically.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached<'a> {
    pub node: OptimisticGuard<'a>,
    /// The parent, and the node's number among its children.
    pub parent: Option<(OptimisticGuard<'a>, usize)>,
}

/// The parent of some leaves. `above` is its own parent and its number among the children there.
#[derive(Debug)]
pub(crate) enum ParentOfLeaves<'a> {
    Resident {
        parent: OptimisticGuard<'a>,
        /// The number of its last child.
        last: usize,
        /// None if it is the root.
        above: Option<(OptimisticGuard<'a>, usize)>,
    },
    Missing {
        /// The page on the way there that is not in memory.
        page: PageRef,
        /// None if that is another page than the parent.
        above: Option<(OptimisticGuard<'a>, usize)>,
    },
}

/// A node and its parent, both held exclusively.
#[derive(Debug)]
pub(crate) struct Pair<'a> {
    /// The parent, and the node's number among its children; none for the root.
    pub parent: Option<(ExclusiveGuard<'a>, usize)>,
    pub node: ExclusiveGuard<'a>,
}

/// What an attempt to hold a node and its parent came to.
enum Tried<'a> {
    Pair(Pair<'a>),
    /// The tree has no such level.
    TooLow,
    /// The tree was lower when the attempt began.
    Grown,
    /// Others have this page.
    Busy(PageRef),
}

/// The number of the child that leads to the target, and its page.
#[inline(always)]
fn step<R: PageReader>(node: Node<R>, target: Target<'_>) -> Result<(usize, u64), Torn> {
    match target {
        Target::Key(key) => node.child_for(key),
        Target::Last => {
            let index = node.count()?;
            Ok((index, node.child(index)?))
        }
    }
}

/// What a search in a leaf without hints looks at: header and slots.
const LEAF_BEGIN: usize = HINTS_END + HINTS_FROM * LEAF_SLOT;

impl<'a> Access<'a> {
    /// The tree's page with this number.
    #[inline(always)]
    pub(crate) fn page(self, id: u64) -> PageRef {
        PageRef { id: PageId(id), frames: self.pages.page_frames }
    }

    /// Reads a node optimistically. What makes no sense is damage only if the page did not change.
    #[inline(always)]
    pub(crate) fn read<T>(
        self,
        guard: OptimisticGuard<'a>,
        read: impl FnOnce(Node<RacyBytes<'a>>) -> Result<T, Torn>,
    ) -> Step<T> {
        match read(Node::new(guard.bytes())) {
            Ok(value) => Ok(value),
            Err(Torn) => Err(torn_stop(guard.validate(), guard.page())),
        }
    }

    /// The root and its level.
    #[inline(always)]
    pub(crate) fn root(self) -> Step<(OptimisticGuard<'a>, u8)> {
        let root = self.pages.pool.optimistic(self.tree.root);
        // The tree is marked before its pages go: a guard that is older than the mark is the
        // tree's root, and the validations find out whether it still is.
        self.check_dropped()?;
        let root = root.map_err(Error::from)?;
        let level = self.read(root, Node::level)?;
        self.check_node(root, level)?;
        Ok((root, level))
    }

    /// A page that was reached is a node of this tree and level.
    #[inline(always)]
    pub(crate) fn check_node(self, guard: OptimisticGuard<'a>, level: u8) -> Step<()> {
        match Node::new(guard.bytes()).is_of(self.tree.id, level) {
            true => Ok(()),
            false => {
                Err(stranger(guard.validate(), guard.page(), guard.bytes(), self.tree.id, level))
            }
        }
    }

    /// Asks the processor for what a search in a node of this level begins with.
    #[inline(always)]
    pub(crate) fn touch_node(self, page: PageRef, level: u8) {
        match level {
            0 => self.pages.pool.touch(page, 0, LEAF_BEGIN),
            _ => self.pages.pool.touch(page, 0, HINTS_END),
        }
    }

    /// The child of `level` that `parent` named. The parent is as it was when this returns.
    #[inline(always)]
    fn below(self, parent: OptimisticGuard<'a>, id: u64, level: u8) -> Step<OptimisticGuard<'a>> {
        let page = self.page(id);
        self.touch_node(page, level);
        let child = match self.pages.pool.glance(page) {
            Some(child) => {
                parent.validate()?;
                child
            }
            None => self.child(parent, id)?,
        };
        self.check_node(child, level)?;
        Ok(child)
    }

    /// The guard of a child that `parent` named, brought in if need be. The parent is as it was
    /// when this returns.
    #[inline(always)]
    pub(crate) fn child(self, parent: OptimisticGuard<'a>, id: u64) -> Step<OptimisticGuard<'a>> {
        // Without this a number read from a page in motion could bring in any page of the file.
        parent.validate()?;
        let child = self.pages.pool.optimistic(self.page(id));
        parent.validate()?;
        Ok(child.map_err(Error::from)?)
    }

    /// Descends to the leaf for `target`.
    #[inline(always)]
    pub(crate) fn leaf(self, target: Target<'_>) -> Step<Reached<'a>> {
        let (mut node, top) = self.root()?;
        let (mut parent, mut level) = (None, top);
        while level > 0 {
            let (index, id) = self.read(node, |node| step(node, target))?;
            level -= 1;
            (parent, node) = (Some((node, index)), self.below(node, id, level)?);
        }
        self.pages.pool.count_optimistic(u64::from(top) + 1);
        Ok(Reached { node, parent })
    }

    /// The parent of the leaf for `key`, as far as that can be had without waiting.
    pub(crate) fn parent_of_leaves(self, key: &[u8]) -> Step<ParentOfLeaves<'a>> {
        let (mut node, mut level) = self.root()?;
        let mut above = None;
        while level > 1 {
            let (index, child) = self.read(node, |node| node.child_for(key))?;
            let page = self.page(child);
            let child = self.pages.pool.glance(page);
            node.validate()?;
            level -= 1;
            above = (level == 1).then_some((node, index));
            let Some(child) = child else { return Ok(ParentOfLeaves::Missing { page, above }) };
            self.check_node(child, level)?;
            node = child;
        }
        // The tree may have become a single leaf.
        let last =
            if level == 1 { self.read(node, Node::count)? } else { return Err(Stop::Restart) };
        node.validate()?;
        Ok(ParentOfLeaves::Resident { parent: node, last, above })
    }

    /// Repeats `attempt` until it is not restarted any more; `None` if it starves.
    #[inline(always)]
    pub(crate) fn attempt<T>(self, mut attempt: impl FnMut() -> Step<T>) -> Result<Option<T>> {
        for _ in 0..ATTEMPTS {
            match attempt() {
                Ok(value) => return Ok(Some(value)),
                Err(Stop::Restart) => {}
                Err(Stop::Fail(error)) => return Err(error),
            }
        }
        self.pages.pool.count_starvation();
        Ok(None)
    }

    /// The leaf for `target`, held shared; lock coupling all the way.
    pub(crate) fn shared_leaf(self, target: Target<'_>) -> Result<SharedGuard<'a>> {
        let leaf = self.shared_node(target, 0)?;
        leaf.ok_or_else(|| Error::damaged(self.tree.root, "its level is below that of leaves"))
    }

    /// As [`shared_leaf`](Self::shared_leaf), of a level; none if the tree is lower than that.
    pub(crate) fn shared_node(self, target: Target<'_>, to: u8) -> Result<Option<SharedGuard<'a>>> {
        let mut node = self.shared_root()?;
        let mut level = self.level_of(&node, node.page())?;
        if level < to {
            return Ok(None);
        }
        while level > to {
            let child = self.next(&node, node.page(), target)?.1;
            let child = self.pages.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != level - 1 {
                return Err(level_error(child.page(), below, level - 1));
            }
            (node, level) = (child, below);
        }
        Ok(Some(node))
    }

    fn shared_root(self) -> Result<SharedGuard<'a>> {
        let root = self.pages.pool.fix_shared(self.tree.root);
        self.check_dropped()?;
        Ok(root?)
    }

    /// The node of `level` for `target` and its parent, both held exclusively; `None` if the tree
    /// is lower than that.
    pub(crate) fn exclusive_pair(self, target: Target<'_>, level: u8) -> Result<Option<Pair<'a>>> {
        loop {
            match self.try_exclusive_pair(target, level)? {
                Tried::Pair(pair) => return Ok(Some(pair)),
                Tried::TooLow => return Ok(None),
                Tried::Grown => {}
                // Nothing is held now, so it can be waited for. By now it may be something else.
                Tried::Busy(page) => drop(self.pages.pool.fix_exclusive(page)),
            }
        }
    }

    /// Waits for the root alone, and only briefly for what is below: in a damaged tree, two nodes
    /// may be below each other, and their holders would wait for each other.
    fn try_exclusive_pair(self, target: Target<'_>, level: u8) -> Result<Tried<'a>> {
        let mut above = self.shared_root()?;
        let mut above_level = self.level_of(&above, above.page())?;
        if above_level <= level + 1 {
            drop(above);
            let root = self.pages.pool.fix_exclusive(self.tree.root)?;
            let root_level = self.level_of(&root, root.page())?;
            return match root_level {
                now if now < level => Ok(Tried::TooLow),
                now if now == level => Ok(Tried::Pair(Pair { parent: None, node: root })),
                now if now == level + 1 => self.pair_below(root, target),
                // The tree has grown while nothing was held.
                _ => Ok(Tried::Grown),
            };
        }
        while above_level > level + 2 {
            let child = self.next(&above, above.page(), target)?.1;
            let child = self.pages.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != above_level - 1 {
                return Err(level_error(child.page(), below, above_level - 1));
            }
            (above, above_level) = (child, below);
        }
        let page = self.page(self.next(&above, above.page(), target)?.1);
        let Some(parent) = self.pages.pool.fix_exclusive_briefly(page)? else {
            return Ok(Tried::Busy(page));
        };
        drop(above);
        let found = self.level_of(&parent, parent.page())?;
        if found != level + 1 {
            return Err(level_error(parent.page(), found, level + 1));
        }
        self.pair_below(parent, target)
    }

    /// Adds the child for `target` to its parent.
    fn pair_below(self, parent: ExclusiveGuard<'a>, target: Target<'_>) -> Result<Tried<'a>> {
        let (index, child) = self.next(&parent, parent.page(), target)?;
        let page = self.page(child);
        let Some(node) = self.pages.pool.fix_exclusive_briefly(page)? else {
            return Ok(Tried::Busy(page));
        };
        let (found, level) = (self.level_of(&node, node.page())?, parent[header::LEVEL]);
        if found != level - 1 {
            return Err(level_error(node.page(), found, level - 1));
        }
        Ok(Tried::Pair(Pair { parent: Some((parent, index)), node }))
    }

    /// The sibling of a node of `level`, whose common parent is held; none if it is busy.
    pub(crate) fn sibling(self, page: PageRef, level: u8) -> Result<Option<ExclusiveGuard<'a>>> {
        let Some(node) = self.pages.pool.fix_exclusive_briefly(page)? else { return Ok(None) };
        match self.level_of(&node, page)? {
            found if found != level => Err(level_error(page, found, level)),
            _ => Ok(Some(node)),
        }
    }

    /// The level of a node that is held; it is one of this tree.
    fn level_of(self, bytes: &[u8], page: PageRef) -> Result<u8> {
        let tree = header::tree(bytes);
        if tree != self.tree.id {
            return Err(tree_error(page, tree, self.tree.id));
        }
        Node::new(bytes).level().map_err(|torn| Error::torn(page, torn))
    }

    fn next(self, bytes: &[u8], page: PageRef, target: Target<'_>) -> Result<(usize, u64)> {
        let (index, child) =
            step(Node::new(bytes), target).map_err(|torn| Error::torn(page, torn))?;
        match child == page.id.0 {
            // A thread that holds it would wait for itself.
            true => Err(Error::damaged(page, "it is its own child")),
            false => Ok((index, child)),
        }
    }

    /// The leaf for `key`, held exclusively.
    #[inline]
    pub(crate) fn exclusive_leaf(self, key: &[u8]) -> Result<ExclusiveGuard<'a>> {
        let leaf = self.attempt(|| Ok(self.leaf(Target::Key(key))?.node.upgrade()?))?;
        let leaf = leaf.map_or_else(|| self.exclusive_leaf_locked(Target::Key(key)), Ok)?;
        check_covers(&leaf, leaf.page(), key)?;
        Ok(leaf)
    }

    #[cold]
    pub(crate) fn exclusive_leaf_locked(self, target: Target<'_>) -> Result<ExclusiveGuard<'a>> {
        let _alone = self.pages.structure_lock();
        loop {
            if let Some(pair) = self.exclusive_pair(target, 0)? {
                return Ok(pair.node);
            }
        }
    }
}

/// A leaf that is held is the one for `key`. Keys are kept without what both fences begin with, so
/// a key from elsewhere would become another one. A device that lost a write leads to such leaves.
pub(super) fn check_covers(leaf: &[u8], page: PageRef, key: &[u8]) -> Result<()> {
    match Node::new(leaf).covers(key).map_err(|torn| Error::torn(page, torn))? {
        true => Ok(()),
        false => Err(Error::fences(page)),
    }
}

// What follows takes no guards: one whose address is taken would have to be in memory always.

/// Why a read made no sense.
#[cold]
#[inline(never)]
fn torn_stop(unchanged: Result<(), Restart>, page: PageRef) -> Stop {
    match unchanged {
        Ok(()) => Stop::Fail(Error::torn(page, Torn)),
        Err(Restart) => Stop::Restart,
    }
}

/// Why a page is not the node of this tree and level that was to be found there.
#[cold]
#[inline(never)]
fn stranger(
    unchanged: Result<(), Restart>,
    page: PageRef,
    bytes: RacyBytes<'_>,
    tree: u32,
    level: u8,
) -> Stop {
    if unchanged.is_err() {
        return Stop::Restart;
    }
    Stop::Fail(match (bytes.u32(header::TREE), Node::new(bytes).level()) {
        (Some(found), Ok(_)) if found != tree => tree_error(page, found, tree),
        (_, Ok(found)) => level_error(page, found, level),
        (_, Err(torn)) => Error::torn(page, torn),
    })
}

/// A sound page of another tree, as when the device lost the write of this one.
#[cold]
fn tree_error(page: PageRef, found: u32, expected: u32) -> Error {
    Error::damaged(page, format!("it belongs to tree {found} where one of {expected} is due"))
}

#[cold]
fn level_error(page: PageRef, found: u8, expected: u8) -> Error {
    Error::damaged(page, format!("its level is {found} where {expected} is due"))
}

/// The bytes of a leaf under a lock, or of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldLeaf<'l> {
    pub page: PageRef,
    pub bytes: &'l [u8],
}

/// The value of an entry, as the leaf has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Held<'l> {
    Inline(&'l [u8]),
    Blob(BlobRef),
}

impl Held<'_> {
    pub(crate) fn blob(self) -> Option<BlobRef> {
        match self {
            Held::Inline(_) => None,
            Held::Blob(blob) => Some(blob),
        }
    }
}

impl<'l> From<&'l SharedGuard<'_>> for HeldLeaf<'l> {
    fn from(guard: &'l SharedGuard<'_>) -> HeldLeaf<'l> {
        HeldLeaf { page: guard.page(), bytes: guard }
    }
}

impl<'l> From<&'l ExclusiveGuard<'_>> for HeldLeaf<'l> {
    fn from(guard: &'l ExclusiveGuard<'_>) -> HeldLeaf<'l> {
        HeldLeaf { page: guard.page(), bytes: guard }
    }
}

impl<'l> HeldLeaf<'l> {
    /// Where `key` is, or where it would be.
    pub(crate) fn position(self, key: &[u8]) -> Result<Position> {
        Node::new(self.bytes).find(key).map_err(|torn| Error::torn(self.page, torn))
    }

    /// The number of the entry with `key` and its value; none if there is none.
    pub(crate) fn find(self, key: &[u8]) -> Result<Option<(usize, Held<'l>)>> {
        let position = self.position(key)?;
        match position.exact {
            true => Ok(Some((position.index, self.value(position.index)?))),
            false => Ok(None),
        }
    }

    /// The value of the entry `index`.
    pub(crate) fn value(self, index: usize) -> Result<Held<'l>> {
        let torn = |torn| Error::torn(self.page, torn);
        let node = Node::new(self.bytes);
        let place = node.payload_place(index).map_err(torn)?;
        let payload = node.payload(place).map_err(torn)?;
        match place.blob {
            true => self.blob(payload).map(Held::Blob),
            false => Ok(Held::Inline(payload)),
        }
    }

    /// The blob that a payload of the leaf refers to.
    pub(crate) fn blob(self, payload: &[u8]) -> Result<BlobRef> {
        let damaged = || Error::damaged(self.page, "a reference to a blob makes no sense");
        BlobRef::decode(payload).ok_or_else(damaged)
    }
}
