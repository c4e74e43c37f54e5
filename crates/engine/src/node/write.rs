//! Changing nodes: insert, replace, remove, compaction.
//!
//! The page is held exclusively and its bounds were checked when it was read, so offsets are used
//! as they are. Nothing here fails half way: what does not fit is refused before a byte changes.

use super::layout::*;
use super::read::Node;
use crate::page::bytes::{get_u16, get_u32, get_u64, put_u16, put_u32, put_u64};
use crate::page::{LEVEL, PAGE_HEADER, PageKind, set_kind};

/// The keys that bound a node: all of its keys are greater than `lower` and at most `upper`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fences<'a> {
    /// Absent in the leftmost node of a level. The empty key is a fence like any other.
    pub lower: Option<&'a [u8]>,
    /// Absent in the rightmost node of a level.
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

    /// Bytes that the fences take in a node's heap.
    pub(crate) fn size(&self) -> usize {
        self.lower.map_or(0, <[u8]>::len) + self.upper.map_or(0, <[u8]>::len)
    }
}

/// What a key leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// In a leaf: the value itself.
    Inline(&'a [u8]),
    /// In a leaf: an encoded reference to a blob.
    Blob(&'a [u8]),
    /// In an inner node: the page with the keys up to the separator.
    Child(u64),
}

impl Payload<'_> {
    /// Bytes that the payload takes in the heap.
    fn heap_len(&self) -> usize {
        match self {
            Payload::Inline(bytes) | Payload::Blob(bytes) => bytes.len(),
            Payload::Child(_) => 0,
        }
    }
}

/// A node that is held exclusively.
#[derive(Debug)]
pub struct NodeMut<'a> {
    bytes: &'a mut [u8],
}

impl<'a> NodeMut<'a> {
    /// Changes `bytes`, a page whose bounds are known to be sound.
    pub fn new(bytes: &'a mut [u8]) -> NodeMut<'a> {
        NodeMut { bytes }
    }

    /// Makes the page an empty node. The page header stays, but for kind and level.
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

    /// Stores a fence key in the heap; its length field follows the offset field.
    fn put_fence(&mut self, fence: Option<&[u8]>, flag: u16, offset_field: usize) {
        let Some(key) = fence else { return };
        let offset = self.take_heap(key.len());
        self.bytes[offset..offset + key.len()].copy_from_slice(key);
        self.put(offset_field, offset);
        self.put(offset_field + 2, key.len());
        self.put(FENCE_FLAGS, self.get(FENCE_FLAGS) | usize::from(flag));
    }

    /// The same node, to read.
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

    /// Bytes that an entry takes in this node.
    fn needed(&self, key_len: usize, payload: &Payload<'_>) -> usize {
        slot_size(self.level()) + key_len - self.get(PREFIX_LEN) + payload.heap_len()
    }

    /// Bytes free in all, part of them perhaps between cells.
    fn free(&self) -> usize {
        heap_end(self.bytes.len()) - self.slot(self.count()) - self.get(HEAP_USED)
    }

    /// Bytes free between the slots and the heap.
    fn gap(&self) -> usize {
        self.get(HEAP_TOP) - self.slot(self.count())
    }

    /// Inserts an entry before the slot at `index`. False, and nothing changed, if it does not fit.
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
            // Written with the others' heads below.
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

    /// What all suffixes share once `suffix` is among them: as much of what they shared as it has,
    /// and with a single other one all that both have. The slot at `index` is free.
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

    /// So many of the bytes that all suffixes share as pay: what is skipped has to be compared with
    /// a cell, which in a leaf may mean to wait for memory.
    fn worth_skipping(&self, shared: usize) -> usize {
        let least = if self.level() == 0 { HEAD_LEN } else { 2 };
        if shared < least { 0 } else { shared }
    }

    /// Takes the heads of all slots behind the first `skip` bytes, which their suffixes share.
    fn make_heads(&mut self, skip: usize) {
        self.put(SKIP, skip);
        for index in 0..self.count() {
            let slot = self.slot(index);
            let (offset, len) = (self.get(slot + SLOT_OFFSET), self.get(slot + SLOT_KEY_LEN));
            let head = head_of(&self.bytes[offset + skip..offset + len]);
            put_u32(self.bytes, slot, head);
        }
    }

    /// Ends the filling of a node: heads and hints.
    pub(crate) fn finish(&mut self) {
        let suffix = |index: usize| {
            let slot = self.slot(index);
            let offset = self.get(slot + SLOT_OFFSET);
            &self.bytes[offset..offset + self.get(slot + SLOT_KEY_LEN)]
        };
        let count = self.count();
        let shared = match count {
            0 | 1 => 0,
            // They are sorted: what these two share all of them do. On a damaged page they may
            // not be, but even there nothing is skipped that is not there.
            _ => {
                let shortest = (0..count).map(|index| suffix(index).len()).min().unwrap_or(0);
                common_prefix(suffix(0), suffix(count - 1)).min(shortest)
            }
        };
        let shared = self.worth_skipping(shared);
        self.make_heads(shared);
        self.make_hints();
    }

    /// Appends an entry whose suffix is given in two parts. The caller knows that it fits, and
    /// calls [`finish`](NodeMut::finish) at the end.
    pub(crate) fn push(&mut self, suffix: [&[u8]; 2], payload: Payload<'_>) {
        let index = self.count();
        self.put(COUNT, index + 1);
        self.put_cell(index, suffix, payload);
    }

    /// Fills the slot at `index` and its cell.
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

    /// Gives the entry at `index` of a leaf another payload. False, and nothing changed, if it does
    /// not fit.
    pub fn replace(&mut self, index: usize, payload: Payload<'_>) -> bool {
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

    /// Lets the child at `index` be another page; at the count, the upper child.
    pub fn set_child(&mut self, index: usize, child: u64) {
        let field = match index < self.count() {
            true => self.slot(index) + SLOT_CHILD,
            false => UPPER_CHILD,
        };
        put_u64(self.bytes, field, child);
    }

    /// Removes the entries at `indexes`, which ascend.
    pub fn remove_all(&mut self, indexes: &[usize]) {
        match indexes {
            [index] => self.remove(*index),
            _ => self.rebuild(indexes),
        }
    }

    /// Moves all cells together at the end of the page.
    pub(crate) fn compact(&mut self) {
        self.rebuild(&[]);
    }

    /// Writes the node anew, without the slots at `left_out`, which ascend.
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

    /// Corrects the hints after a slot came or went at `index`; there were `before` slots.
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
