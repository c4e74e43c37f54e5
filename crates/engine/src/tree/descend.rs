//! From the root to a leaf: without locks, and with them when that starves.
//!
//! Optimistic lock coupling (SIGMOD'23, section 3.3): read the child's number, validate the node
//! it came from, take the child's guard, validate the node again. Only then is the child known to
//! be the right one, and only between the two validations may an error of the child be believed.
//!
//! Locks are taken from the root downwards, and a thread that waits for a page holds nothing below
//! it. So waits form no circle.

use vellum_pool::{ExclusiveGuard, OptimisticGuard, PageReader, PageRef, RacyBytes, Restart};
use vellum_pool::{PageId, SharedGuard};

use super::Access;
use crate::error::{Error, Result};
use crate::node::{HINTS_END, HINTS_FROM, LEAF_SLOT, Node, Torn};
use crate::page as header;

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
        PageRef { id: PageId(id), frames: self.core.page_frames }
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
        let root = self.core.pool.optimistic(self.tree.root);
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
            0 => self.core.pool.touch(page, 0, LEAF_BEGIN),
            _ => self.core.pool.touch(page, 0, HINTS_END),
        }
    }

    /// The child of `level` that `parent` named. The parent is as it was when this returns.
    #[inline(always)]
    fn below(self, parent: OptimisticGuard<'a>, id: u64, level: u8) -> Step<OptimisticGuard<'a>> {
        let page = self.page(id);
        self.touch_node(page, level);
        let child = match self.core.pool.glance(page) {
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
        let child = self.core.pool.optimistic(self.page(id));
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
        self.core.pool.count_optimistic(u64::from(top) + 1);
        Ok(Reached { node, parent })
    }

    /// The parent of the leaf for `key`, as far as that can be had without waiting.
    pub(crate) fn parent_of_leaves(self, key: &[u8]) -> Step<ParentOfLeaves<'a>> {
        let (mut node, mut level) = self.root()?;
        let mut above = None;
        while level > 1 {
            let (index, child) = self.read(node, |node| node.child_for(key))?;
            let page = self.page(child);
            let child = self.core.pool.glance(page);
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
        self.core.pool.count_starvation();
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
            let child = self.core.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != level - 1 {
                return Err(level_error(child.page(), below, level - 1));
            }
            (node, level) = (child, below);
        }
        Ok(Some(node))
    }

    fn shared_root(self) -> Result<SharedGuard<'a>> {
        let root = self.core.pool.fix_shared(self.tree.root);
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
                Tried::Busy(page) => drop(self.core.pool.fix_exclusive(page)),
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
            let root = self.core.pool.fix_exclusive(self.tree.root)?;
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
            let child = self.core.pool.fix_shared(self.page(child))?;
            let below = self.level_of(&child, child.page())?;
            if below != above_level - 1 {
                return Err(level_error(child.page(), below, above_level - 1));
            }
            (above, above_level) = (child, below);
        }
        let page = self.page(self.next(&above, above.page(), target)?.1);
        let Some(parent) = self.core.pool.fix_exclusive_briefly(page)? else {
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
        let Some(node) = self.core.pool.fix_exclusive_briefly(page)? else {
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
        let Some(node) = self.core.pool.fix_exclusive_briefly(page)? else { return Ok(None) };
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
        let _alone = self.core.structure_lock();
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
