//! Changes of nodes: insert, replace, remove and compact; split a full node, merge two siblings.
//!
//! The caller holds an exclusive lock on the page, and its bounds were checked when it was read
//! from the file. So this code uses offsets without further checks. It refuses an entry that does
//! not fit before it changes a byte.

use std::ops::Range;

use super::layout::*;
use super::read::{Node, Position};
use crate::page::bytes::{get_u16, get_u32, get_u64, put_u16, put_u32, put_u64};
use crate::page::{LEVEL, PAGE_HEADER, PageKind, set_kind};

/// The keys that bound a node: all of its keys are greater than `lower` and at most `upper`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fences<'a> {
    /// `None` in the leftmost node of a level. The empty key is a fence like any other.
    pub lower: Option<&'a [u8]>,
    /// `None` in the rightmost node of a level.
    pub upper: Option<&'a [u8]>,
}

impl Fences<'_> {
    /// Length of the prefix that all keys between the fences share.
    pub fn prefix_len(&self) -> usize {
        match (self.lower, self.upper) {
            (Some(lower), Some(upper)) => common_prefix(lower, upper),
            _ => 0,
        }
    }

    /// The number of bytes that the fences take in a node's heap.
    pub(crate) fn size(&self) -> usize {
        self.lower.map_or(0, <[u8]>::len) + self.upper.map_or(0, <[u8]>::len)
    }
}

/// What a slot stores for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// In a leaf: the value itself.
    Inline(&'a [u8]),
    /// In a leaf: an encoded reference to a blob.
    Blob(&'a [u8]),
    /// In an inner node: the child page with the keys up to the separator.
    Child(u64),
}

impl Payload<'_> {
    /// The number of bytes that the payload takes in the heap.
    pub(crate) fn heap_len(&self) -> usize {
        match self {
            Payload::Inline(bytes) | Payload::Blob(bytes) => bytes.len(),
            Payload::Child(_) => 0,
        }
    }
}

/// A change of the entries of one node. Two nodes with the same bytes, but for the gap between
/// their slots and their heaps, have the same bytes after the same edit, but for that gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edit<'a> {
    /// Insert an entry before the slot at `index`.
    Insert { index: usize, key: &'a [u8], payload: Payload<'a> },
    /// Replace the payload of the entry at `index`. At the number of slots of an inner node, this
    /// is the upper child.
    Replace { index: usize, payload: Payload<'a> },
    /// Overwrite bytes of the value of the entry at `index` of a leaf, from `offset` on.
    Overwrite { index: usize, offset: usize, bytes: &'a [u8] },
    /// Remove the entry at `index`.
    Remove { index: usize },
    /// Remove the entries at `indexes`, which must ascend.
    RemoveAll { indexes: &'a [usize] },
    /// Keep one part of a node that is split at the slot `at`, with `separator` as its new fence.
    Keep { part: Part, at: usize, separator: &'a [u8] },
}

/// A node under an exclusive lock.
#[derive(Debug)]
pub struct NodeMut<'a> {
    bytes: &'a mut [u8],
}

impl<'a> NodeMut<'a> {
    /// A node in `bytes`, a page whose bounds are known to be sound.
    pub fn new(bytes: &'a mut [u8]) -> NodeMut<'a> {
        NodeMut { bytes }
    }

    /// Makes the page an empty node. Of the page header, this sets only kind and level.
    ///
    /// `upper_child` is the child for keys above all separators, 0 in a leaf.
    pub fn format(
        bytes: &'a mut [u8],
        level: u8,
        fences: Fences<'_>,
        upper_child: u64,
    ) -> NodeMut<'a> {
        let kind = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        set_kind(bytes, kind, level);
        bytes[PAGE_HEADER..SLOTS].fill(0);
        put_u64(bytes, UPPER_CHILD, upper_child);
        put_u16(bytes, HEAP_TOP, heap_end(bytes.len()) as u16);
        let mut node = NodeMut { bytes };
        node.put_fence(fences.lower, HAS_LOWER, LOWER_OFFSET);
        node.put_fence(fences.upper, HAS_UPPER, UPPER_OFFSET);
        node.put(PREFIX_LEN, fences.prefix_len());
        node
    }

    /// Stores a fence key in the heap. The field of its length follows that of its offset.
    fn put_fence(&mut self, fence: Option<&[u8]>, flag: u16, offset_field: usize) {
        let Some(key) = fence else { return };
        let offset = self.take_heap(key.len());
        self.bytes[offset..offset + key.len()].copy_from_slice(key);
        self.put(offset_field, offset);
        self.put(offset_field + 2, key.len());
        self.put(FENCE_FLAGS, self.get(FENCE_FLAGS) | usize::from(flag));
    }

    /// A read-only view of the node.
    pub fn node(&self) -> Node<&[u8]> {
        Node::new(&*self.bytes)
    }

    #[inline(always)]
    fn get(&self, field: usize) -> usize {
        usize::from(get_u16(self.bytes, field))
    }

    #[inline(always)]
    fn put(&mut self, field: usize, value: usize) {
        debug_assert!(value <= usize::from(u16::MAX));
        put_u16(self.bytes, field, value as u16);
    }

    pub(crate) fn level(&self) -> u8 {
        self.bytes[LEVEL]
    }

    pub(crate) fn count(&self) -> usize {
        self.get(COUNT)
    }

    fn slot(&self, index: usize) -> usize {
        SLOTS + index * slot_size(self.level())
    }

    /// The number of bytes that an entry takes in this node.
    fn needed(&self, key_len: usize, payload: &Payload<'_>) -> usize {
        slot_size(self.level()) + key_len - self.get(PREFIX_LEN) + payload.heap_len()
    }

    /// The number of free bytes, including gaps between cells.
    fn free(&self) -> usize {
        heap_end(self.bytes.len()) - self.slot(self.count()) - self.get(HEAP_USED)
    }

    /// The number of free bytes between the slots and the heap.
    fn gap(&self) -> usize {
        self.get(HEAP_TOP) - self.slot(self.count())
    }

    /// Makes an edit. If the result does not fit, returns false and changes nothing.
    #[inline]
    pub(crate) fn edit(&mut self, edit: Edit<'_>) -> bool {
        match edit {
            Edit::Insert { index, key, payload } => return self.insert(index, key, payload),
            Edit::Replace { index, payload } => return self.replace(index, payload),
            Edit::Overwrite { index, offset, bytes } => self.overwrite(index, offset, bytes),
            Edit::Remove { index } => self.remove(index),
            Edit::RemoveAll { indexes } => self.remove_all(indexes),
            Edit::Keep { part, at, separator } => return self.keep(part, at, separator),
        }
        true
    }

    /// Inserts an entry before the slot at `index`. If it does not fit, returns false and changes
    /// nothing.
    pub fn insert(&mut self, index: usize, key: &[u8], payload: Payload<'_>) -> bool {
        let needed = self.needed(key.len(), &payload);
        if needed > self.free() {
            return false;
        }
        if needed > self.gap() {
            self.compact();
        }
        let (slot, count) = (self.slot(index), self.count());
        let size = slot_size(self.level());
        self.bytes.copy_within(slot..self.slot(count), slot + size);
        self.put(COUNT, count + 1);
        let prefix = self.get(PREFIX_LEN);
        let shared = self.shared_with(index, count, &key[prefix..]);
        if shared != self.get(SKIP) {
            // `make_heads` writes the head of this slot, too.
            self.put(SKIP, 0);
            self.put_cell(index, [&key[prefix..], &[]], payload);
            self.make_heads(shared);
            self.make_hints();
        } else {
            self.put_cell(index, [&key[prefix..], &[]], payload);
            self.make_hints_from(index, count);
        }
        true
    }

    /// The number of leading bytes to skip after `suffix` is inserted: the bytes that `suffix`
    /// shares with the skipped bytes, or with the only other suffix. The slot at `index` is still
    /// unused.
    fn shared_with(&self, index: usize, others: usize, suffix: &[u8]) -> usize {
        let skip = self.get(SKIP);
        if others == 0 || (others > 1 && skip == 0) {
            return 0;
        }
        let slot = self.slot(usize::from(index == 0));
        let (offset, len) = (self.get(slot + SLOT_OFFSET), self.get(slot + SLOT_KEY_LEN));
        let most = if others == 1 { len } else { skip };
        self.worth_skipping(common_prefix(&self.bytes[offset..offset + most], suffix))
    }

    /// The number of shared bytes that are worth skipping. A search must compare skipped bytes with
    /// a cell, and in a leaf that may cost a cache miss.
    fn worth_skipping(&self, shared: usize) -> usize {
        let least = if self.level() == 0 { HEAD_LEN } else { 2 };
        if shared < least { 0 } else { shared }
    }

    /// Writes the heads of all slots. A head begins after the first `skip` bytes, which all
    /// suffixes share.
    fn make_heads(&mut self, skip: usize) {
        self.put(SKIP, skip);
        for index in 0..self.count() {
            let slot = self.slot(index);
            let (offset, len) = (self.get(slot + SLOT_OFFSET), self.get(slot + SLOT_KEY_LEN));
            let head = head_of(&self.bytes[offset + skip..offset + len]);
            put_u32(self.bytes, slot, head);
        }
    }

    /// Finishes a node after its last [`push`](NodeMut::push): writes heads and hints.
    pub(crate) fn finish(&mut self) {
        let suffix = |index: usize| {
            let slot = self.slot(index);
            let offset = self.get(slot + SLOT_OFFSET);
            &self.bytes[offset..offset + self.get(slot + SLOT_KEY_LEN)]
        };
        let count = self.count();
        let shared = match count {
            0 | 1 => 0,
            // The suffixes are sorted, so all of them share what the first and the last share. On a
            // damaged page they may be unsorted. `min` keeps the skipped bytes inside every suffix.
            _ => {
                let shortest = (0..count).map(|index| suffix(index).len()).min().unwrap_or(0);
                common_prefix(suffix(0), suffix(count - 1)).min(shortest)
            }
        };
        let shared = self.worth_skipping(shared);
        self.make_heads(shared);
        self.make_hints();
    }

    /// Appends an entry whose suffix is given in two parts. The caller has checked that the entry
    /// fits, and calls [`finish`](NodeMut::finish) at the end.
    pub(crate) fn push(&mut self, suffix: [&[u8]; 2], payload: Payload<'_>) {
        let index = self.count();
        self.put(COUNT, index + 1);
        self.put_cell(index, suffix, payload);
    }

    /// Writes the slot at `index` and its cell.
    fn put_cell(&mut self, index: usize, suffix: [&[u8]; 2], payload: Payload<'_>) {
        let slot = self.slot(index);
        let key_len = suffix[0].len() + suffix[1].len();
        let offset = self.take_heap(key_len + payload.heap_len());
        let (middle, end) = (offset + suffix[0].len(), offset + key_len);
        self.bytes[offset..middle].copy_from_slice(suffix[0]);
        self.bytes[middle..end].copy_from_slice(suffix[1]);
        let head = head_of(&self.bytes[offset + self.get(SKIP)..end]);
        put_u32(self.bytes, slot, head);
        self.put(slot + SLOT_OFFSET, offset);
        self.put(slot + SLOT_KEY_LEN, key_len);
        match payload {
            Payload::Child(child) => put_u64(self.bytes, slot + SLOT_CHILD, child),
            Payload::Inline(bytes) | Payload::Blob(bytes) => {
                self.bytes[end..end + bytes.len()].copy_from_slice(bytes);
                self.put(slot + SLOT_PAYLOAD_LEN, bytes.len());
                let blob = matches!(payload, Payload::Blob(_));
                self.put(slot + SLOT_FLAGS, if blob { BLOB_FLAG.into() } else { 0 });
            }
        }
    }

    fn take_heap(&mut self, len: usize) -> usize {
        let top = self.get(HEAP_TOP) - len;
        self.put(HEAP_TOP, top);
        self.put(HEAP_USED, self.get(HEAP_USED) + len);
        top
    }

    /// Replaces the payload of the entry at `index`. At the number of slots of an inner node, this
    /// is the upper child. If the new payload does not fit, returns false and changes nothing.
    pub fn replace(&mut self, index: usize, payload: Payload<'_>) -> bool {
        if let Payload::Child(child) = payload {
            self.set_child(index, child);
            return true;
        }
        let slot = self.slot(index);
        let key_len = self.get(slot + SLOT_KEY_LEN);
        let (old, new) = (self.get(slot + SLOT_PAYLOAD_LEN), payload.heap_len());
        if let Payload::Inline(bytes) | Payload::Blob(bytes) = payload
            && new <= old
        {
            let start = self.get(slot + SLOT_OFFSET) + key_len;
            self.bytes[start..start + new].copy_from_slice(bytes);
            self.put(slot + SLOT_PAYLOAD_LEN, new);
            let blob = matches!(payload, Payload::Blob(_));
            self.put(slot + SLOT_FLAGS, if blob { BLOB_FLAG.into() } else { 0 });
            self.put(HEAP_USED, self.get(HEAP_USED) - (old - new));
            return true;
        }
        if new > old + self.free() {
            return false;
        }
        let mut key = Vec::with_capacity(self.get(PREFIX_LEN) + key_len);
        if self.node().key_into(index, &mut key).is_err() {
            return false;
        }
        self.remove(index);
        self.insert(index, &key, payload)
    }

    /// Overwrites bytes of the value at `index`, which is in the leaf and long enough.
    fn overwrite(&mut self, index: usize, offset: usize, bytes: &[u8]) {
        let slot = self.slot(index);
        let start = self.get(slot + SLOT_OFFSET) + self.get(slot + SLOT_KEY_LEN) + offset;
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Removes the entry at `index`.
    pub fn remove(&mut self, index: usize) {
        let (slot, count) = (self.slot(index), self.count());
        let size = slot_size(self.level());
        let payload = if self.level() == 0 { self.get(slot + SLOT_PAYLOAD_LEN) } else { 0 };
        let freed = self.get(slot + SLOT_KEY_LEN) + payload;
        if self.get(slot + SLOT_OFFSET) == self.get(HEAP_TOP) {
            self.put(HEAP_TOP, self.get(HEAP_TOP) + freed);
        }
        self.put(HEAP_USED, self.get(HEAP_USED) - freed);
        self.bytes.copy_within(slot + size..self.slot(count), slot);
        self.put(COUNT, count - 1);
        if count == 1 {
            self.put(SKIP, 0);
        }
        self.make_hints_from(index, count);
    }

    fn set_child(&mut self, index: usize, child: u64) {
        let field = match index < self.count() {
            true => self.slot(index) + SLOT_CHILD,
            false => UPPER_CHILD,
        };
        put_u64(self.bytes, field, child);
    }

    /// Removes the entries at `indexes`, which must ascend.
    pub fn remove_all(&mut self, indexes: &[usize]) {
        match indexes {
            [index] => self.remove(*index),
            _ => self.rebuild(indexes),
        }
    }

    /// Keeps one part of a node that is split at the slot `at`, with `separator` as its new fence.
    /// If that does not fit, or the node is damaged, returns false and changes nothing.
    pub fn keep(&mut self, part: Part, at: usize, separator: &[u8]) -> bool {
        let old = self.bytes.to_vec();
        let kept = fill_part(self.bytes, Node::new(&old[..]), part, (at, separator));
        if kept.is_err() {
            self.bytes.copy_from_slice(&old);
        }
        kept.is_ok()
    }

    /// Moves all cells to the end of the page, without gaps.
    pub(crate) fn compact(&mut self) {
        self.rebuild(&[]);
    }

    /// Rewrites the node without the slots at `left_out`, which must ascend.
    fn rebuild(&mut self, left_out: &[usize]) {
        let old = self.bytes.to_vec();
        let old = Node::new(&old[..]);
        let fences = Fences {
            lower: old.lower().unwrap_or_default(),
            upper: old.upper().unwrap_or_default(),
        };
        let upper_child = get_u64(old.bytes(), UPPER_CHILD);
        let level = self.level();
        let mut node = NodeMut::format(self.bytes, level, fences, upper_child);
        let mut left_out = left_out.iter().peekable();
        for index in 0..usize::from(get_u16(old.bytes(), COUNT)) {
            if left_out.next_if_eq(&&index).is_some() {
                continue;
            }
            let Ok((suffix, payload)) = cell(old, index) else { break };
            node.push([suffix, &[]], payload);
        }
        node.finish();
    }

    /// Writes all hints.
    fn make_hints(&mut self) {
        let count = self.count();
        if count <= HINTS_FROM {
            self.bytes[HINTS..SLOTS].fill(0);
            return;
        }
        let (distance, size) = (hint_distance(count), slot_size(self.level()));
        for hint in 0..HINT_COUNT {
            let head = get_u32(self.bytes, SLOTS + (hint + 1) * distance * size);
            put_u32(self.bytes, HINTS + 4 * hint, head);
        }
    }

    /// Corrects the hints after a slot was inserted or removed at `index`. Before that, the node
    /// had `before` slots.
    fn make_hints_from(&mut self, index: usize, before: usize) {
        let count = self.count();
        if count <= HINTS_FROM && before <= HINTS_FROM {
            return;
        }
        let distance = hint_distance(count);
        if distance != hint_distance(before) || count <= HINTS_FROM || before <= HINTS_FROM {
            return self.make_hints();
        }
        let size = slot_size(self.level());
        for hint in (index / distance).saturating_sub(1)..HINT_COUNT {
            let head = get_u32(self.bytes, SLOTS + (hint + 1) * distance * size);
            put_u32(self.bytes, HINTS + 4 * hint, head);
        }
    }
}

/// A slot's suffix and payload.
pub(crate) fn cell(node: Node<&[u8]>, index: usize) -> Result<(&[u8], Payload<'_>), Torn> {
    let suffix = node.suffix(index)?;
    if node.level()? != 0 {
        return Ok((suffix, Payload::Child(node.child(index)?)));
    }
    let place = node.payload_place(index)?;
    let bytes = node.payload(place)?;
    Ok((suffix, if place.blob { Payload::Blob(bytes) } else { Payload::Inline(bytes) }))
}

/// A plan for splitting a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The number of slots that move to the left node. In an inner node, the next slot becomes the
    /// separator.
    pub left: usize,
    /// The upper fence of the left node and the lower fence of the right node.
    pub separator: Vec<u8>,
}

/// A part of a node that is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The slots before the split.
    Left,
    /// The slots after the split.
    Right,
}

impl Part {
    /// The other part of the node.
    pub fn other(self) -> Part {
        match self {
            Part::Left => Part::Right,
            Part::Right => Part::Left,
        }
    }
}

impl Split {
    /// The part of `node` that has more slots.
    ///
    /// # Errors
    /// [`Torn`] if the node is damaged.
    pub fn larger(&self, node: Node<&[u8]>) -> Result<Part, Torn> {
        Ok(if 2 * self.left > node.count()? { Part::Left } else { Part::Right })
    }
}

/// The shortest key `s` with `low <= s < high`. The caller guarantees `low < high`.
pub fn separator<'a>(low: &'a [u8], high: &'a [u8]) -> &'a [u8] {
    let common = common_prefix(low, high);
    // The common prefix and one more byte of `high` are greater than `low`. They are less than
    // `high` if `high` has further bytes.
    if common + 1 < high.len() && common < low.len() { &high[..common + 1] } else { low }
}

/// The number of neighbouring entries that must have been inserted in order to count as a run: a
/// quarter of the leaf's entries, within these limits. With fewer entries, random inserts would
/// sometimes look like a run.
const RUN_LEN: std::ops::RangeInclusive<usize> = 4..=8;

/// A run: the order in which the entries next to an insertion point were inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Ascending,
    Descending,
}

/// Chooses where to split `node` so that an entry with key `incoming` fits into one of the halves.
///
/// By default the halves have about the same size, and the shortest separator near the middle wins.
/// If entries are inserted in ascending or descending order, the node is split at the insertion
/// point, so that the inserts leave full nodes. This applies at the ends of a level, and in a leaf
/// wherever its newest entries form a run.
///
/// # Errors
/// [`Torn`] if the node is damaged.
pub fn plan_split(node: Node<&[u8]>, incoming: &[u8]) -> Result<Split, Torn> {
    let (count, leaf) = (node.count()?, node.level()? == 0);
    if count == 0 {
        return Err(Torn);
    }
    let Position { index: at, exact } = node.find_slot(incoming)?;
    let ascending = at == count && node.upper()?.is_none();
    // An existing entry that grows is not an insert.
    let descending = at == 0 && !exact && node.lower()?.is_none();
    if !leaf {
        let left = match (ascending, descending) {
            (true, _) => count - 1,
            (_, true) => 0,
            _ => balanced(node, leaf, count)?.0,
        };
        let mut separator = Vec::new();
        node.key_into(left, &mut separator)?;
        return Ok(Split { left, separator });
    }
    if !exact
        && let Some(run) = run_at(node, at, count)?
        && let split = split_at_run(node, at, count, incoming, run)?
        && halves_fit(node, &split)?
    {
        return Ok(split);
    }
    let candidates = match (ascending, descending) {
        _ if count < 2 && exact => return Err(Torn),
        _ if count < 2 => [at, at],
        (true, _) => [count, count - 1],
        (_, true) => [0, 1],
        _ => balanced(node, leaf, count)?.into(),
    };
    for left in candidates {
        let split = split_leaf_at(node, left, incoming)?;
        if halves_fit(node, &split)? {
            return Ok(split);
        }
    }
    // The new fence was too long for a half that is almost full. Halves of equal size always fit.
    split_leaf_at(node, balanced(node, leaf, count)?.1, incoming)
}

/// Chooses where to split a leaf that has no room for several changes: keys in ascending order,
/// each with the length of its new payload, or `None` if it is removed. The node covers them.
///
/// If the new entries go on with a run, or are at an end of the level, the leaf is split there, as
/// [`plan_split`] does. Otherwise what the leaf is to have afterwards is divided into two halves,
/// or into a full leaf and the rest.
///
/// # Errors
/// [`Torn`] if the node is damaged.
pub fn plan_split_for(
    node: Node<&[u8]>,
    changes: &[(&[u8], Option<usize>)],
) -> Result<Split, Torn> {
    if let Some(split) = plan_run_split(node, changes)? {
        return Ok(split);
    }
    // The keys of the entries, what they take, and whether the leaf has them already.
    let (mut entries, mut rest) = (Vec::new(), changes);
    let new =
        |key: &[u8], len: usize, is_there| (key.to_vec(), LEAF_SLOT + key.len() + len, is_there);
    for index in 0..node.count()? {
        let key = node.key(index)?;
        while let [(incoming, len), after @ ..] = rest
            && **incoming < *key
        {
            entries.extend(len.map(|len| new(incoming, len, false)));
            rest = after;
        }
        let mut len = Some(node.payload_place(index)?.len);
        if let [(incoming, changed), after @ ..] = rest
            && **incoming == *key
        {
            (len, rest) = (*changed, after);
        }
        // A slot that is removed moves with its neighbours.
        entries.push((
            key,
            len.map_or(0, |len| LEAF_SLOT + node.suffix(index).map_or(0, <[u8]>::len) + len),
            true,
        ));
    }
    entries.extend(rest.iter().filter_map(|(key, len)| len.map(|len| new(key, len, false))));
    let total: usize = entries.iter().map(|(_, size, _)| size).sum();
    let capacity = capacity(node.bytes().len());
    let target = if total <= 2 * capacity { total / 2 } else { capacity - capacity / 8 };
    let (mut size, mut left, mut slots) = (0, 0, 0);
    while left + 1 < entries.len() && (left == 0 || size + entries[left].1 <= target) {
        size += entries[left].1;
        slots += usize::from(entries[left].2);
        left += 1;
    }
    let (Some(low), Some(high)) =
        (left.checked_sub(1).and_then(|low| entries.get(low)), entries.get(left))
    else {
        return Err(Torn);
    };
    let split = Split { left: slots, separator: separator(&low.0, &high.0).to_vec() };
    match halves_fit(node, &split)? {
        true => Ok(split),
        // The new fence is too long for a half that is almost full.
        false => plan_split(node, &high.0),
    }
}

/// The split where all new entries of a leaf go on with a run, or lie at an end of the level: the
/// leaf of the run becomes as full as it can be.
fn plan_run_split(
    node: Node<&[u8]>,
    changes: &[(&[u8], Option<usize>)],
) -> Result<Option<Split>, Torn> {
    let (count, capacity) = (node.count()?, capacity(node.bytes().len()));
    let Some((at, new, sizes)) = find_new(node, changes)? else { return Ok(None) };
    let of_groups = match new.len() < *RUN_LEN.start() {
        true => None,
        false => run_of_groups(node, at, count)?,
    };
    let run = match of_groups.map_or_else(|| run_at(node, at, count), |run| Ok(Some(run)))? {
        // A split before this one has made the leaf for the run.
        _ if count == 0 => Run::Ascending,
        // Whatever comes before or after, there are several full leaves of new entries.
        _ if new.last().is_some_and(|last| last.end > capacity) => Run::Ascending,
        Some(run) => run,
        None if at == count && node.upper()?.is_none() => Run::Ascending,
        None if at == 0 && node.lower()?.is_none() => Run::Descending,
        None => return Ok(None),
    };
    let (mut before, mut after) = (Vec::new(), Vec::new());
    if at > 0 {
        node.key_into(at - 1, &mut before)?;
    }
    if at < count {
        node.key_into(at, &mut after)?;
    }
    let (lower, upper, ascending) = (node.lower()?, node.upper()?, run == Run::Ascending);
    let end_of = |left: usize| left.checked_sub(1).map_or(0, |last| new[last].end);
    // What goes to the leaf of the run: slots that are there, and new entries.
    let (slots, size) = if ascending { (at, sizes[0]) } else { (count - at, sizes[1]) };
    let of_new = |left: usize| match ascending {
        true => (left, end_of(left)),
        false => (new.len() - left, end_of(new.len()) - end_of(left)),
    };
    // The most that this takes, if the prefix of all keys becomes `prefix` bytes long.
    let room = |left: usize, prefix: usize| {
        let longer = prefix.checked_sub(node.prefix_len()?).ok_or(Torn)?;
        Ok((capacity + slots * longer + of_new(left).0 * prefix).cast_signed())
    };
    let needed = |left: usize| size + of_new(left).1.cast_signed();
    // How many of the new entries go to the left leaf. A few entries beyond the run stay with some
    // of the new ones.
    let is_few = sizes[usize::from(ascending)] <= (capacity / 8).cast_signed();
    let least = usize::from(at == 0 || is_few && !ascending);
    let most = new.len() - usize::from(at == count || is_few && ascending);
    // No prefix is longer than the fence that stays.
    let longest = if ascending { lower } else { upper }.map_or(0, <[u8]>::len);
    for step in 0..(most + 1).saturating_sub(least) {
        let left = if ascending { most - step } else { least + step };
        if needed(left) > room(left, longest.max(node.prefix_len()?))? {
            continue;
        }
        let low = left.checked_sub(1).map_or(&before[..], |last| new[last].key);
        let high = new.get(left).map_or(&after[..], |new| new.key);
        if low >= high {
            return Ok(None);
        }
        let split = Split { left: at, separator: separator(low, high).to_vec() };
        let middle = Some(&split.separator[..]);
        let fences = match ascending {
            true => Fences { lower, upper: middle },
            false => Fences { lower: middle, upper },
        };
        let needed = needed(left) + fences.size().cast_signed();
        if needed <= room(left, fences.prefix_len())? && halves_fit(node, &split)? {
            return Ok(Some(split));
        }
    }
    Ok(None)
}

/// An entry that a leaf does not have yet.
struct NewEntry<'k> {
    key: &'k [u8],
    /// What this entry and those before it take, unless their keys share a prefix.
    end: usize,
}

/// The place of new entries, and what the slots before and after it will take.
type NewEntries<'k> = (usize, Vec<NewEntry<'k>>, [isize; 2]);

/// Finds the new entries among the changes of a leaf, if they all come to one place. Of more than
/// two leaves take, it finds only the first.
fn find_new<'k>(
    node: Node<&[u8]>,
    changes: &[(&'k [u8], Option<usize>)],
) -> Result<Option<NewEntries<'k>>, Torn> {
    let (capacity, mut end) = (capacity(node.bytes().len()), 0);
    let (mut at, mut new, mut grown) = (None, Vec::new(), Vec::new());
    for &(key, len) in changes {
        let position = node.find_slot(key)?;
        if position.exact {
            let index = position.index;
            let before = entry_bytes(node, index)?;
            let after = match len {
                Some(len) => LEAF_SLOT + node.suffix(index)?.len() + len,
                None => 0,
            };
            grown.push((index, after.cast_signed() - before.cast_signed()));
        } else if let Some(len) = len {
            if *at.get_or_insert(position.index) != position.index {
                return Ok(None);
            }
            end += LEAF_SLOT + key.len() + len;
            new.push(NewEntry { key, end });
            if end > 2 * capacity {
                break;
            }
        }
    }
    let Some(at) = at else { return Ok(None) };
    let mut sizes = [0; 2];
    for index in 0..node.count()? {
        sizes[usize::from(index >= at)] += entry_bytes(node, index)?.cast_signed();
    }
    for (index, more) in grown {
        sizes[usize::from(index >= at)] += more;
    }
    Ok(Some((at, new, sizes)))
}

/// What an entry of a leaf takes there.
fn entry_bytes(node: Node<&[u8]>, index: usize) -> Result<usize, Torn> {
    Ok(LEAF_SLOT + node.suffix(index)?.len() + node.payload_place(index)?.len)
}

/// Whether the entries next to `at` were inserted in order, and recently.
///
/// The heap grows downwards, so of two cells the one with the lower offset is newer. A split or a
/// compaction stores the cells in the order of their keys, whatever their age. But such cells are
/// in the upper part of the heap if newer entries have been inserted since.
fn run_at(node: Node<&[u8]>, at: usize, count: usize) -> Result<Option<Run>, Torn> {
    let offset = |index: usize| node.u16_at(SLOTS + index * LEAF_SLOT + SLOT_OFFSET);
    let (top, end) = (node.u16_at(HEAP_TOP)?, heap_end(node.bytes().len()));
    let middle = top + end.checked_sub(top).ok_or(Torn)? / 2;
    let needed = (count / 4).clamp(*RUN_LEN.start(), *RUN_LEN.end());
    if at >= needed {
        let first = offset(at - needed)?;
        let mut run = first < middle;
        for index in at - needed + 1..at {
            run &= offset(index)? < offset(index - 1)?;
        }
        if run {
            return Ok(Some(Run::Ascending));
        }
    }
    if at + needed <= count {
        let last = offset(at + needed - 1)?;
        let mut run = last < middle;
        for index in at + 1..at + needed {
            run &= offset(index - 1)? < offset(index)?;
        }
        if run {
            return Ok(Some(Run::Descending));
        }
    }
    Ok(None)
}

/// The run that a group of new entries goes on with, to judge by the entries next to `at`: groups
/// that come one before the other are each in ascending order, and [`run_at`] does not see them.
fn run_of_groups(node: Node<&[u8]>, at: usize, count: usize) -> Result<Option<Run>, Torn> {
    if at == count {
        return Ok(Some(Run::Ascending));
    }
    let (top, end) = (node.u16_at(HEAP_TOP)?, heap_end(node.bytes().len()));
    let middle = top + end.checked_sub(top).ok_or(Torn)? / 2;
    let offset = |index: usize| node.u16_at(SLOTS + index * LEAF_SLOT + SLOT_OFFSET);
    // As in `run_at`, the lower one is the newer one.
    let (before, after) = (if at > 0 { offset(at - 1)? } else { end }, offset(at)?);
    Ok(match before < after {
        _ if before.min(after) >= middle => None,
        true => Some(Run::Ascending),
        false => Some(Run::Descending),
    })
}

/// A split at the end of a run. If the entries beyond the run are few, they stay with the run.
/// Otherwise they get a leaf of their own, so that the run's next leaves become full.
fn split_at_run(
    node: Node<&[u8]>,
    at: usize,
    count: usize,
    incoming: &[u8],
    run: Run,
) -> Result<Split, Torn> {
    let beyond = match run {
        Run::Ascending => at..count,
        Run::Descending => 0..at,
    };
    let mut size = 0;
    for index in beyond {
        size += entry_bytes(node, index)?;
    }
    let few = size <= capacity(node.bytes().len()) / 8;
    // In an ascending run, the incoming entry goes to the right together with few entries beyond
    // the run.
    let goes_right = few == (run == Run::Ascending);
    let mut neighbour = Vec::new();
    let key = match goes_right && at > 0 || at == count {
        true => {
            node.key_into(at - 1, &mut neighbour)?;
            separator(&neighbour, incoming)
        }
        false => {
            node.key_into(at, &mut neighbour)?;
            separator(incoming, &neighbour)
        }
    };
    Ok(Split { left: at, separator: key.to_vec() })
}

/// A split of a leaf between two of its slots, or between an outermost slot and `incoming`.
fn split_leaf_at(node: Node<&[u8]>, left: usize, incoming: &[u8]) -> Result<Split, Torn> {
    let (mut low, mut high) = (incoming.to_vec(), incoming.to_vec());
    if left > 0 {
        node.key_into(left - 1, &mut low)?;
    }
    if left < node.count()? {
        node.key_into(left, &mut high)?;
    }
    Ok(Split { left, separator: separator(&low, &high).to_vec() })
}

/// Whether both halves of a leaf fit into their pages with the separator as a new fence.
fn halves_fit(node: Node<&[u8]>, split: &Split) -> Result<bool, Torn> {
    let (lower, upper) = (node.lower()?, node.upper()?);
    let middle = Some(&split.separator[..]);
    let halves = [
        (0..split.left, Fences { lower, upper: middle }),
        (split.left..node.count()?, Fences { lower: middle, upper }),
    ];
    for (slots, fences) in halves {
        if !part_fits(node, slots, fences)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether these slots of a node fit into a page with these fences.
fn part_fits(node: Node<&[u8]>, slots: Range<usize>, fences: Fences<'_>) -> Result<bool, Torn> {
    let longer = fences.prefix_len().checked_sub(node.prefix_len()?).ok_or(Torn)?;
    let (level, mut size) = (node.level()?, fences.size());
    for index in slots {
        let suffix = node.suffix(index)?.len().checked_sub(longer).ok_or(Torn)?;
        let payload = if level == 0 { node.payload_place(index)?.len } else { 0 };
        size += slot_size(level) + suffix + payload;
    }
    Ok(size <= capacity(node.bytes().len()))
}

/// Two slots at which to split: the slot near the middle that gives the shortest separator, and the
/// slot in the middle, by bytes.
fn balanced(node: Node<&[u8]>, leaf: bool, count: usize) -> Result<(usize, usize), Torn> {
    let size = |index| -> Result<usize, Torn> {
        let payload = if leaf { node.payload_place(index)?.len } else { 0 };
        Ok(slot_size(u8::from(!leaf)) + node.suffix(index)?.len() + payload)
    };
    let mut total = 0;
    for index in 0..count {
        total += size(index)?;
    }
    let (mut middle, mut left) = (0, 0);
    while middle < count - 1 && left + size(middle)? <= total / 2 {
        left += size(middle)?;
        middle += 1;
    }
    let least = usize::from(leaf);
    let (from, to) = match leaf || count > 2 {
        true => (middle.saturating_sub(count / 16), middle + count / 16),
        false => (middle, middle),
    };
    let (mut best, mut shortest) = (middle.max(least), usize::MAX);
    for index in from.max(least)..=to.min(count - 1) {
        let suffix = node.suffix(index)?;
        let len = match leaf {
            true => separator(node.suffix(index - 1)?, suffix).len(),
            false => suffix.len(),
        };
        let nearer = index.abs_diff(middle) < best.abs_diff(middle);
        if len < shortest || (len == shortest && nearer) {
            (best, shortest) = (index, len);
        }
    }
    Ok((best, middle.max(least)))
}

/// Makes `target`, a new page, one part of a node that is split. [`NodeMut::keep`] leaves the other
/// part in the node's page. The page must have its page header. The rest of it is overwritten.
///
/// # Errors
/// [`Torn`] if the node is damaged.
pub fn copy_part(
    target: &mut [u8],
    node: Node<&[u8]>,
    part: Part,
    split: &Split,
) -> Result<(), Torn> {
    fill_part(target, node, part, (split.left, &split.separator))
}

/// Whether `separator` is a key between the fences of a node that divides its slots at `at`.
///
/// # Errors
/// [`Torn`] if the node is damaged.
pub(crate) fn splits_at(node: Node<&[u8]>, at: usize, separator: &[u8]) -> Result<bool, Torn> {
    if !node.covers(separator)? || node.upper()? == Some(separator) {
        return Ok(false);
    }
    let Position { index, exact } = node.find_slot(separator)?;
    Ok(match node.level()? {
        0 => at == index + usize::from(exact),
        _ => at == index && exact,
    })
}

/// Makes `target` one part of a node that is split at the slot `at`.
fn fill_part(
    target: &mut [u8],
    node: Node<&[u8]>,
    part: Part,
    (at, separator): (usize, &[u8]),
) -> Result<(), Torn> {
    if !splits_at(node, at, separator)? {
        return Err(Torn);
    }
    let (level, count, separator) = (node.level()?, node.count()?, Some(separator));
    let (fences, slots) = match part {
        Part::Left => (Fences { lower: node.lower()?, upper: separator }, 0..at),
        // The separator of an inner node goes to the parent.
        Part::Right => {
            let from = at + usize::from(level > 0);
            (Fences { lower: separator, upper: node.upper()? }, from..count)
        }
    };
    let upper_child = match (level, part) {
        (0, _) => 0,
        // The separator's own child.
        (_, Part::Left) => node.child(at)?,
        (_, Part::Right) => node.child(count)?,
    };
    if !part_fits(node, slots.clone(), fences)? {
        return Err(Torn);
    }
    fill(NodeMut::format(target, level, fences, upper_child), node, slots)
}

/// Appends slots of `source`, whose prefix is not longer than that of `target`.
fn fill(mut target: NodeMut<'_>, source: Node<&[u8]>, slots: Range<usize>) -> Result<(), Torn> {
    let longer = target.node().prefix_len()?.checked_sub(source.prefix_len()?).ok_or(Torn)?;
    for index in slots {
        let (suffix, payload) = cell(source, index)?;
        target.push([suffix.get(longer..).ok_or(Torn)?, &[]], payload);
    }
    target.finish();
    Ok(())
}

/// Whether `left` and its right sibling fit into one page. `separator` is the key between them in
/// their parent. A merged inner node takes it back.
///
/// # Errors
/// [`Torn`] if one of the nodes is damaged.
pub fn fits_merge(left: Node<&[u8]>, right: Node<&[u8]>, separator: &[u8]) -> Result<bool, Torn> {
    let fences = Fences { lower: left.lower()?, upper: right.upper()? };
    let prefix = fences.prefix_len();
    let mut size =
        fences.size() + size_with_prefix(left, prefix)? + size_with_prefix(right, prefix)?;
    if left.level()? != 0 {
        size += INNER_SLOT + separator.len().checked_sub(prefix).ok_or(Torn)?;
    }
    Ok(left.level()? == right.level()? && size <= capacity(left.bytes().len()))
}

/// The size of a node's slots and cells if its prefix becomes only `prefix` bytes long.
fn size_with_prefix(node: Node<&[u8]>, prefix: usize) -> Result<usize, Torn> {
    let count = node.count()?;
    let fences = Fences { lower: node.lower()?, upper: node.upper()? };
    let cells = node.u16_at(HEAP_USED)?.checked_sub(fences.size()).ok_or(Torn)?;
    let longer = node.prefix_len()?.checked_sub(prefix).ok_or(Torn)?;
    Ok(count * (slot_size(node.level()?) + longer) + cells)
}

/// Moves all entries from `left` to the front of `right`. The caller has checked that they fit. The
/// caller then frees `left`, and removes the separator from the parent.
///
/// # Errors
/// [`Torn`] if one of the nodes is damaged. Then nothing has changed.
pub fn merge_into_right(left: Node<&[u8]>, right: &mut [u8], separator: &[u8]) -> Result<(), Torn> {
    let old = right.to_vec();
    let old = Node::new(&old[..]);
    let (level, count) = (old.level()?, old.count()?);
    let fences = Fences { lower: left.lower()?, upper: old.upper()? };
    let upper_child = if level == 0 { 0 } else { old.child(count)? };
    let mut image = right.to_vec();
    let mut target = NodeMut::format(&mut image, level, fences, upper_child);
    let prefix = target.node().prefix_len()?;
    append(&mut target, left)?;
    if level != 0 {
        let middle = left.child(left.count()?)?;
        target.push([separator.get(prefix..).ok_or(Torn)?, &[]], Payload::Child(middle));
    }
    append(&mut target, old)?;
    target.finish();
    right.copy_from_slice(&image);
    Ok(())
}

/// Appends all slots of `source`, whose prefix is not shorter than that of `target`.
fn append(target: &mut NodeMut<'_>, source: Node<&[u8]>) -> Result<(), Torn> {
    let start = source.prefix()?.get(target.node().prefix_len()?..).ok_or(Torn)?;
    for index in 0..source.count()? {
        let (suffix, payload) = cell(source, index)?;
        target.push([start, suffix], payload);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_are_short_and_between() {
        let cases: [(&[u8], &[u8], &[u8]); 8] = [
            (b"", b"a", b""),
            (b"", b"abc", b""),
            (b"a", b"b", b"a"),
            (b"abc", b"abd", b"abc"),
            (b"abcxyz", b"abdef", b"abd"),
            (b"abc", b"abcdef", b"abc"),
            (b"abc\0", b"abc\x01\x02", b"abc\x01"),
            (b"a\0", b"a\0\0", b"a\0"),
        ];
        for (low, high, expected) in cases {
            let found = separator(low, high);
            assert_eq!(found, expected, "{low:?} {high:?}");
            assert!(low <= found && found < high);
        }
    }
}
