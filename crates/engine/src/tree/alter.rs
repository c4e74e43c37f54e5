//! Changes that depend on what is there: `take`, `compare_and_swap`, `fetch_and_update`, and the
//! ends of a tree: `first`, `last`, `pop_first`, `pop_last`.

use std::borrow::Cow;
use std::sync::atomic::Ordering;

use vellum_pool::{ExclusiveGuard, OptimisticGuard};

use super::Access;
use super::apply::{Action, apply};
use super::descend::{Step, Stop, Target};
use super::held_leaf::{Held, HeldLeaf};
use super::modify::Incoming;
use super::read::LongValue;
use crate::error::{Error, Result};
use crate::node::{Node, Payload};
use crate::page::blob::BlobRef;
use crate::store::core::Change;
use crate::value::Value;

/// What becomes of a value.
pub(crate) enum Verdict<'v> {
    Keep,
    Remove,
    Put(Cow<'v, [u8]>),
}

/// Decides about the value of a key, or about there being none.
type Decide<'f, 'v> = &'f mut dyn FnMut(Option<&[u8]>) -> Verdict<'v>;

/// A value as it was when it was decided about. A blob is held, so no other one has its place: the
/// same reference is the same value.
enum Old<'a> {
    Nothing,
    Inline(Vec<u8>),
    Blob(BlobRef, LongValue<'a>),
}

impl<'a> Old<'a> {
    fn is(&self, found: Option<Held<'_>>) -> bool {
        match (self, found) {
            (Old::Nothing, None) => true,
            (Old::Inline(old), Some(Held::Inline(value))) => old == value,
            (Old::Blob(old, _), Some(Held::Blob(blob))) => *old == blob,
            _ => false,
        }
    }

    fn blob(&self) -> Option<BlobRef> {
        match self {
            Old::Blob(blob, _) => Some(*blob),
            _ => None,
        }
    }

    fn bytes(&self) -> Option<&[u8]> {
        match self {
            Old::Nothing => None,
            Old::Inline(value) => Some(value),
            Old::Blob(_, long) => Some(&long.value),
        }
    }

    fn into_value(self) -> Option<Value<'a>> {
        match self {
            Old::Nothing => None,
            Old::Inline(value) => Some(Value::Inline(Cow::Owned(value))),
            Old::Blob(_, long) => Some(long.value),
        }
    }
}

/// An end of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    First,
    Last,
}

impl Edge {
    fn target(self) -> Target<'static> {
        match self {
            Edge::First => Target::Key(&[]),
            Edge::Last => Target::Last,
        }
    }

    /// The number of the entry at this end of a leaf that has some.
    fn index(self, count: usize) -> usize {
        match self {
            Edge::First => 0,
            Edge::Last => count - 1,
        }
    }
}

impl<'a> Access<'a> {
    /// Has `decide` say what becomes of the value of `key`, and does so, as one step; returns what
    /// the value was. `decide` is called under the leaf's lock, and again if another change came
    /// between that and the change.
    pub(crate) fn alter(self, key: &[u8], decide: Decide<'_, '_>) -> Result<Option<Value<'a>>> {
        let change = self.core.change()?;
        self.check_dropped()?;
        let mut blob = None;
        loop {
            let mut leaf = self.exclusive_leaf(key)?;
            let found = HeldLeaf::from(&leaf).find(key)?;
            let (index, old) = match (found, blob.take()) {
                (None, _) => (0, Old::Nothing),
                (Some((index, Held::Inline(value))), _) => (index, Old::Inline(value.to_vec())),
                (Some((index, Held::Blob(now))), Some((then, value))) if now == then => {
                    (index, Old::Blob(now, value))
                }
                (Some((_, Held::Blob(_))), _) => {
                    drop(leaf);
                    blob = self.get_blob(key)?;
                    continue;
                }
            };
            match (change.callers_code(|| decide(old.bytes())), &old) {
                (Verdict::Keep, _) | (Verdict::Remove, Old::Nothing) => {}
                (Verdict::Remove, _) => {
                    apply(&change, &mut leaf, Action::Remove { index })?;
                    self.after_removal(&change, leaf, key, old.blob().as_slice());
                }
                (Verdict::Put(value), _) => {
                    if !self.put_over(&change, leaf, key, &value, &old)? {
                        continue;
                    }
                }
            }
            return Ok(old.into_value());
        }
    }

    /// Stores a value if that of `key`, whose leaf is held, is still `old`; false if it is not.
    fn put_over(
        self,
        change: &Change<'_>,
        leaf: ExclusiveGuard<'a>,
        key: &[u8],
        value: &[u8],
        old: &Old<'a>,
    ) -> Result<bool> {
        if !self.check_entry(key, value)? {
            return self.put_payload_over(change, Some(leaf), key, Payload::Inline(value), old);
        }
        drop(leaf);
        let blob = self.store_blob(change, key, Incoming::Bytes(value))?;
        let stored = self.put_payload_over(change, None, key, Payload::Blob(&blob.encode()), old);
        if !matches!(stored, Ok(true)) {
            self.free_blob(change, blob);
        }
        stored
    }

    fn put_payload_over(
        self,
        change: &Change<'_>,
        mut held: Option<ExclusiveGuard<'a>>,
        key: &[u8],
        payload: Payload<'_>,
        old: &Old<'a>,
    ) -> Result<bool> {
        loop {
            let mut leaf = match held.take() {
                Some(leaf) => leaf,
                None => self.exclusive_leaf(key)?,
            };
            let found = HeldLeaf::from(&leaf);
            let position = found.position(key)?;
            let index = position.index;
            let now = position.exact.then(|| found.value(index)).transpose()?;
            if !old.is(now) {
                return Ok(false);
            }
            let action = match position.exact {
                true => Action::Replace { index, payload },
                false => Action::Insert { index, key, payload },
            };
            if apply(change, &mut leaf, action)? {
                drop(leaf);
                if let Some(blob) = old.blob() {
                    self.free_blob(change, blob);
                }
                return Ok(true);
            }
            drop(leaf);
            self.make_room_for(change, key, payload)?;
        }
    }

    /// The leaf with the first or last entry; none if there is no entry. Leaves that lie beyond it
    /// and are empty, which a merge that failed leaves, come to `empty`: as long as none of those
    /// changes, the entry is the first or last one.
    fn edge_leaf(
        self,
        edge: Edge,
        empty: &mut Vec<OptimisticGuard<'a>>,
    ) -> Step<Option<OptimisticGuard<'a>>> {
        empty.clear();
        let (mut fence, mut before) = (Vec::new(), Vec::new());
        loop {
            let target = if empty.is_empty() { edge.target() } else { Target::Key(&fence) };
            let leaf = self.leaf(target)?.node;
            let count = self.read(leaf, Node::count)?;
            if count > 0 {
                leaf.validate()?;
                return Ok(Some(leaf));
            }
            std::mem::swap(&mut fence, &mut before);
            let more = self.read(leaf, |node| match edge {
                Edge::First => node.upper_into(&mut fence),
                Edge::Last => node.lower_into(&mut fence),
            })?;
            leaf.validate()?;
            if more && edge == Edge::First {
                fence.push(0);
            }
            let goes_on = match edge {
                Edge::First => fence > before,
                Edge::Last => fence < before,
            };
            if !more {
                empty.push(leaf);
                return Ok(None);
            }
            // Always true of a sound tree; a damaged one could lead in a circle.
            if !empty.is_empty() && !goes_on {
                return Err(Stop::Fail(Error::fences(leaf.page())));
            }
            empty.push(leaf);
        }
    }

    /// What `take` makes of the leaf with the first or last entry, while the leaves in `empty` had
    /// none; none within if there is no entry, none if it starves.
    fn at_edge<T>(
        self,
        edge: Edge,
        empty: &mut Vec<OptimisticGuard<'a>>,
        take: impl Fn(OptimisticGuard<'a>) -> Step<T>,
    ) -> Result<Option<Option<T>>> {
        self.attempt(|| {
            let taken = self.edge_leaf(edge, empty)?.map(&take).transpose()?;
            empty.iter().try_for_each(OptimisticGuard::validate)?;
            Ok(taken)
        })
    }

    /// The first or last entry.
    pub(crate) fn edge_entry(self, edge: Edge) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let mut empty = Vec::new();
        let entry = |leaf| Ok((leaf, self.key_and_value(leaf, edge)?));
        loop {
            let found = self.at_edge(edge, &mut empty, entry)?;
            let found = match found {
                Some(found) => found,
                None => {
                    // Starved. Unless this leaf is empty it has the entry.
                    empty.clear();
                    let held = self.shared_leaf(edge.target())?;
                    let leaf = self.core.pool.optimistic(held.page())?;
                    let is_empty = Node::new(&held[..]).count() == Ok(0);
                    match self.key_and_value(leaf, edge) {
                        _ if is_empty => continue,
                        Ok(found) => Some((leaf, found)),
                        Err(Stop::Fail(error)) => return Err(error),
                        Err(Stop::Restart) => continue,
                    }
                }
            };
            let (leaf, key) = match found {
                None => return Ok(None),
                Some((_, (key, Some(value)))) => return Ok(Some((key, value))),
                Some((leaf, (key, None))) => (leaf, key),
            };
            // A blob is read without its leaf. If that is unchanged, the entry was there all along.
            if let Some(value) = self.get(&key)?
                && [&leaf].into_iter().chain(&empty).all(|guard| guard.validate().is_ok())
            {
                return Ok(Some((key, value)));
            }
        }
    }

    /// The first or last entry of a leaf; the value only if it is no blob.
    fn key_and_value(
        self,
        leaf: OptimisticGuard<'a>,
        edge: Edge,
    ) -> Step<(Vec<u8>, Option<Value<'a>>)> {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        let blob = self.read(leaf, |node| {
            let index = edge.index(node.count()?.max(1));
            node.key_into(index, &mut key)?;
            let place = node.payload_place(index)?;
            node.payload_into(place, &mut value)?;
            Ok(place.blob)
        })?;
        leaf.validate()?;
        Ok((key, (!blob).then_some(Value::Inline(Cow::Owned(value)))))
    }

    /// Removes the first or last entry and returns it.
    pub(crate) fn pop(self, edge: Edge) -> Result<Option<(Vec<u8>, Value<'a>)>> {
        let change = self.core.change()?;
        self.check_dropped()?;
        let mut blob: Option<(BlobRef, LongValue<'a>)> = None;
        loop {
            let Some(mut leaf) = self.exclusive_edge(&change, edge)? else { return Ok(None) };
            let torn = |torn| Error::torn(leaf.page(), torn);
            let node = Node::new(&leaf[..]);
            let index = edge.index(node.count().map_err(torn)?);
            let key = node.key(index).map_err(torn)?;
            let old = match (HeldLeaf::from(&leaf).value(index)?, blob.take()) {
                (Held::Inline(value), _) => Old::Inline(value.to_vec()),
                (Held::Blob(now), Some((then, value))) if now == then => Old::Blob(now, value),
                (Held::Blob(_), _) => {
                    drop(leaf);
                    blob = self.get_blob(&key)?;
                    continue;
                }
            };
            apply(&change, &mut leaf, Action::Remove { index })?;
            let hint = &self.tree.edges[edge as usize];
            if hint.load(Ordering::Relaxed) != leaf.page().id.0 {
                hint.store(leaf.page().id.0, Ordering::Relaxed);
            }
            // As long as it has entries, the next one pops those: a merge would have to be tried
            // for each.
            let is_empty = Node::new(&leaf[..]).count() == Ok(0);
            drop(leaf);
            if let Some(blob) = old.blob() {
                self.free_blob(&change, blob);
            }
            if is_empty {
                self.merge_or_warn(&change, &key);
            }
            return Ok(old.into_value().map(|value| (key, value)));
        }
    }

    /// The leaf that an entry was popped from before, held exclusively, if it still has the first
    /// or last entry and no other thread holds it.
    #[inline]
    fn known_edge(self, edge: Edge) -> Option<ExclusiveGuard<'a>> {
        let hint = &self.tree.edges[edge as usize];
        let id = hint.load(Ordering::Relaxed);
        if id == 0 {
            return None;
        }
        let leaf = self.core.pool.glance(self.page(id))?.upgrade().ok()?;
        let node = Node::new(&leaf[..]);
        let fence = match edge {
            Edge::First => node.lower(),
            Edge::Last => node.upper(),
        };
        // It may have been freed, and be something else, since the hint was read: then the hint has
        // gone. The only leaf that has no fence on this side has the entry, if it has any.
        let is_edge = hint.load(Ordering::Relaxed) == id
            && node.is_of(self.tree.id, 0)
            && fence == Ok(None)
            && node.count().is_ok_and(|count| count > 0);
        is_edge.then_some(leaf)
    }

    /// The leaf with the first or last entry, held exclusively; none if there is no entry.
    fn exclusive_edge(self, change: &Change<'_>, edge: Edge) -> Result<Option<ExclusiveGuard<'a>>> {
        if let Some(leaf) = self.known_edge(edge) {
            return Ok(Some(leaf));
        }
        let mut empty = Vec::new();
        loop {
            if let Some(found) = self.at_edge(edge, &mut empty, |leaf| Ok(leaf.upgrade()?))? {
                return Ok(found);
            }
            // Starved. Unless this leaf is empty it has the entry.
            let leaf = self.exclusive_leaf_locked(edge.target())?;
            let (node, torn) = (Node::new(&leaf[..]), |torn| Error::torn(leaf.page(), torn));
            if node.count().map_err(torn)? > 0 {
                return Ok(Some(leaf));
            }
            let mut key = Vec::new();
            if edge == Edge::Last && node.lower_into(&mut key).map_err(torn)? {
                key.push(0);
            }
            drop(leaf);
            self.merge(change, &key)?;
        }
    }
}
