//! Reading nodes: the fields, keys, payloads and fences, and the search for a key.
//!
//! A search has three steps. A lookup can prefetch cache lines for the next step and do other work
//! between the steps. [`narrow`](Node::narrow) reads the header and the hints.
//! [`probe`](Node::probe) compares the heads in the slots, without branches that the CPU could
//! mispredict. [`resolve`](Node::resolve) compares the rest of the key with a cell if the heads are
//! equal.

use std::cmp::Ordering;
use std::hint::select_unpredictable;

use vellum_pool::PageReader;

use super::layout::*;
use crate::page::{KIND, PageKind, TREE, kind_and_level, tree_and_magic};

/// A view of a node's bytes, locked or not.
#[derive(Clone, Copy, Debug)]
pub struct Node<R> {
    pub(super) page: R,
}

/// The position of a key in a node, or the position at which to insert it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The first slot whose key is not less than the search key; the number of slots if there is
    /// none.
    pub index: usize,
    /// Whether the slot's key equals the search key.
    pub exact: bool,
}

/// The place of a payload in a leaf's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PayloadPlace {
    pub offset: usize,
    pub len: usize,
    pub blob: bool,
}

impl<R: PageReader> Node<R> {
    /// Reads `page` as a node.
    #[inline(always)]
    pub fn new(page: R) -> Node<R> {
        Node { page }
    }

    #[inline(always)]
    pub(crate) fn u16_at(self, offset: usize) -> Result<usize, Torn> {
        self.page.u16(offset).map(usize::from).ok_or(Torn)
    }

    /// Height above the leaves. `Torn` if the page is not a node.
    #[inline(always)]
    pub fn level(self) -> Result<u8, Torn> {
        // Kind, version and level, in one load.
        let [kind, _, level, _] = self.page.u32(KIND).ok_or(Torn)?.to_le_bytes();
        let expected = if level == 0 { PageKind::Leaf } else { PageKind::Inner };
        if kind == expected as u8 { Ok(level) } else { Err(Torn) }
    }

    /// Number of slots: entries in a leaf, separators in an inner node.
    #[inline(always)]
    pub fn count(self) -> Result<usize, Torn> {
        self.u16_at(COUNT)
    }

    /// Length of the prefix that all keys of the node share.
    #[inline(always)]
    pub fn prefix_len(self) -> Result<usize, Torn> {
        self.u16_at(PREFIX_LEN)
    }

    /// Bytes available for slots and cells after the heap is compacted.
    pub fn free_space(self) -> Result<usize, Torn> {
        let slots = SLOTS + self.count()? * slot_size(self.level()?);
        heap_end(self.page.len()).checked_sub(slots + self.u16_at(HEAP_USED)?).ok_or(Torn)
    }

    /// Begin and end of the gap between the slots and the heap.
    pub(crate) fn gap(self) -> Result<(usize, usize), Torn> {
        let begin = SLOTS + self.count()? * slot_size(self.level()?);
        let end = self.u16_at(HEAP_TOP)?;
        if begin <= end && end <= self.page.len() { Ok((begin, end)) } else { Err(Torn) }
    }

    /// Whether the node has room for an entry with a key of `key_len` bytes and `payload` bytes in
    /// the heap.
    pub fn has_room(self, key_len: usize, payload: usize) -> Result<bool, Torn> {
        let suffix = key_len.checked_sub(self.prefix_len()?).ok_or(Torn)?;
        Ok(slot_size(self.level()?) + suffix + payload <= self.free_space()?)
    }

    /// The child at `index`. At the number of slots, this is the upper child.
    #[inline(always)]
    pub fn child(self, index: usize) -> Result<u64, Torn> {
        let count = self.count()?;
        match index.cmp(&count) {
            Ordering::Less => self.page.u64(SLOTS + index * INNER_SLOT + SLOT_CHILD).ok_or(Torn),
            Ordering::Equal => self.page.u64(UPPER_CHILD).ok_or(Torn),
            Ordering::Greater => Err(Torn),
        }
    }

    /// The place of the payload of a leaf's slot, which is inside the page.
    #[inline(always)]
    pub(crate) fn payload_place(self, index: usize) -> Result<PayloadPlace, Torn> {
        match index < self.count()? {
            true => self.place_at(index),
            false => Err(Torn),
        }
    }

    /// The place of a leaf's slot in its page.
    pub(crate) fn slot_place(self, index: usize) -> usize {
        SLOTS + index * LEAF_SLOT
    }

    /// The length of a slot's whole key.
    pub(crate) fn key_len(self, index: usize) -> Result<usize, Torn> {
        let slot = SLOTS + index * slot_size(self.level()?);
        match index < self.count()? {
            true => Ok(self.prefix_len()? + self.u16_at(slot + SLOT_KEY_LEN)?),
            false => Err(Torn),
        }
    }

    /// Replaces `key` with a slot's whole key.
    pub fn key_into(self, index: usize, key: &mut Vec<u8>) -> Result<(), Torn> {
        let slot = SLOTS + index * slot_size(self.level()?);
        if index >= self.count()? {
            return Err(Torn);
        }
        let prefix = self.prefix_len()?;
        let (offset, len) = (self.u16_at(slot + SLOT_OFFSET)?, self.u16_at(slot + SLOT_KEY_LEN)?);
        key.clear();
        key.resize(prefix + len, 0);
        let (start, suffix) = key.split_at_mut(prefix);
        self.page.copy_to(self.u16_at(LOWER_OFFSET)?, start).ok_or(Torn)?;
        self.page.copy_to(offset, suffix).ok_or(Torn)
    }

    /// Replaces `value` with the payload at `place`.
    #[inline(always)]
    pub(crate) fn payload_into(self, place: PayloadPlace, value: &mut Vec<u8>) -> Result<(), Torn> {
        // The copy overwrites all bytes, so only new bytes need to be initialised.
        if value.len() > place.len {
            value.truncate(place.len);
        } else if value.len() < place.len {
            value.resize(place.len, 0);
        }
        self.payload_to(place, value)
    }

    /// Copies the payload at `place` to `value`, which has the payload's length.
    #[inline(always)]
    pub(crate) fn payload_to(self, place: PayloadPlace, value: &mut [u8]) -> Result<(), Torn> {
        self.page.copy_to(place.offset, value).ok_or(Torn)
    }

    /// Copies the lower fence to `key`. Returns false if the node is the leftmost of its level.
    pub fn lower_into(self, key: &mut Vec<u8>) -> Result<bool, Torn> {
        self.fence_into(HAS_LOWER, LOWER_OFFSET, LOWER_LEN, key)
    }

    /// Copies the upper fence to `key`. Returns false if the node is the rightmost of its level.
    pub fn upper_into(self, key: &mut Vec<u8>) -> Result<bool, Torn> {
        self.fence_into(HAS_UPPER, UPPER_OFFSET, UPPER_LEN, key)
    }

    fn fence_into(
        self,
        flag: u16,
        offset: usize,
        len: usize,
        key: &mut Vec<u8>,
    ) -> Result<bool, Torn> {
        key.clear();
        if self.u16_at(FENCE_FLAGS)? & usize::from(flag) == 0 {
            return Ok(false);
        }
        key.resize(self.u16_at(len)?, 0);
        self.page.copy_to(self.u16_at(offset)?, key).ok_or(Torn)?;
        Ok(true)
    }
}

/// Reading under a lock: returns slices instead of copies. The bounds of the page were checked when
/// it was read from the file.
impl<'a> Node<&'a [u8]> {
    pub(crate) fn bytes(self) -> &'a [u8] {
        self.page
    }

    #[inline(always)]
    fn slice(self, offset: usize, len: usize) -> Result<&'a [u8], Torn> {
        self.page.get(offset..).and_then(|rest| rest.get(..len)).ok_or(Torn)
    }

    /// Replaces the part of `key` after the node's prefix with a leaf slot's suffix, so that it
    /// becomes the slot's whole key.
    #[inline(always)]
    pub(crate) fn suffix_into(self, index: usize, key: &mut Vec<u8>) -> Result<(), Torn> {
        if index >= self.count()? {
            return Err(Torn);
        }
        let slot = self.page.u64(SLOTS + index * LEAF_SLOT).ok_or(Torn)?;
        let (offset, len) = (usize::from((slot >> 32) as u16), usize::from((slot >> 48) as u16));
        key.truncate(self.prefix_len()?);
        key.extend_from_slice(self.slice(offset, len)?);
        Ok(())
    }

    /// The part of a leaf slot's key after the prefix, and the place of its payload. The leaf has a
    /// slot at `index`.
    #[inline(always)]
    pub(crate) fn entry_at(self, index: usize) -> Option<(&'a [u8], PayloadPlace)> {
        let slot = SLOTS + index * LEAF_SLOT;
        let (key, value) = (self.page.u64(slot)?, self.page.u32(slot + SLOT_PAYLOAD_LEN)?);
        let (start, key_len) = (usize::from((key >> 32) as u16), usize::from((key >> 48) as u16));
        let (offset, len) = (start + key_len, usize::from(value as u16));
        let suffix = self.page.get(..offset + len)?.get(start..offset)?;
        Some((suffix, PayloadPlace { offset, len, blob: (value >> 16) as u16 & BLOB_FLAG != 0 }))
    }

    /// Whether the payload of a leaf's slot is a blob.
    #[inline(always)]
    pub(crate) fn is_blob(self, index: usize) -> bool {
        let flags = self.page.u16(SLOTS + index * LEAF_SLOT + SLOT_FLAGS);
        flags.is_some_and(|flags| flags & BLOB_FLAG != 0)
    }

    /// The part of a slot's key after the prefix.
    pub fn suffix(self, index: usize) -> Result<&'a [u8], Torn> {
        if index >= self.count()? {
            return Err(Torn);
        }
        let slot = SLOTS + index * slot_size(self.level()?);
        self.slice(self.u16_at(slot + SLOT_OFFSET)?, self.u16_at(slot + SLOT_KEY_LEN)?)
    }

    /// A slot's whole key.
    pub(crate) fn key(self, index: usize) -> Result<Vec<u8>, Torn> {
        let (prefix, suffix) = (self.prefix()?, self.suffix(index)?);
        let mut key = Vec::with_capacity(prefix.len() + suffix.len());
        key.extend_from_slice(prefix);
        key.extend_from_slice(suffix);
        Ok(key)
    }

    /// The prefix that all keys of the node share.
    pub fn prefix(self) -> Result<&'a [u8], Torn> {
        self.slice(self.u16_at(LOWER_OFFSET)?, self.prefix_len()?)
    }

    /// The payload at `place`.
    pub(crate) fn payload(self, place: PayloadPlace) -> Result<&'a [u8], Torn> {
        self.slice(place.offset, place.len)
    }

    /// The lower fence, which is below all keys, if there is one.
    pub fn lower(self) -> Result<Option<&'a [u8]>, Torn> {
        match self.u16_at(FENCE_FLAGS)? & usize::from(HAS_LOWER) {
            0 => Ok(None),
            _ => self.slice(self.u16_at(LOWER_OFFSET)?, self.u16_at(LOWER_LEN)?).map(Some),
        }
    }

    /// The upper fence, which no key exceeds, if there is one.
    pub fn upper(self) -> Result<Option<&'a [u8]>, Torn> {
        match self.u16_at(FENCE_FLAGS)? & usize::from(HAS_UPPER) {
            0 => Ok(None),
            _ => self.slice(self.u16_at(UPPER_OFFSET)?, self.u16_at(UPPER_LEN)?).map(Some),
        }
    }
}

/// The state of a search for a key.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Search {
    /// The first slot whose head is not less than the key's is one of `low..=low + len`.
    low: u32,
    len: u32,
    count: u32,
    /// The number of bytes of the key before its head: the node's prefix and the skipped bytes.
    lead: u32,
    /// The number of skipped bytes, which the cells contain.
    skip: u32,
    /// The head of the key, or [`NO_HEAD`].
    head: u64,
}

/// The most bytes of slots that a lookup prefetches: all that the hints of a node of 4 KiB leave.
const PREFETCH_MAX: usize = 512;

/// The head of a search key that differs from the node's keys in the bytes before the heads. No
/// slot has this head.
const NO_HEAD: u64 = 1 << 32;

impl Search {
    /// Whether the node has hints, so that they narrowed the search.
    #[inline(always)]
    pub(crate) fn has_hints(self) -> bool {
        self.count as usize > HINTS_FROM
    }
}

/// The head of the part of `key` after its first `lead` bytes.
#[inline(always)]
fn head_after(key: &[u8], lead: usize) -> Result<u64, Torn> {
    let rest = key.get(lead..).ok_or(Torn)?;
    if let Some(bytes) = rest.first_chunk() {
        return Ok(u64::from(u32::from_be_bytes(*bytes)));
    }
    // The rest is shorter than a head, but the key is not. Load the key's last four bytes and shift
    // out the bytes before the rest.
    Ok(u64::from(match key.last_chunk() {
        Some(bytes) => (u64::from(u32::from_be_bytes(*bytes)) << (32 - 8 * rest.len())) as u32,
        None => head_of(rest),
    }))
}

/// The three parts of a slot's first eight bytes: head, offset, key length.
#[inline(always)]
fn parts(slot: u64) -> (u32, usize, usize) {
    (slot as u32, usize::from((slot >> 32) as u16), usize::from((slot >> 48) as u16))
}

impl<R: PageReader> Node<R> {
    /// Whether the page is a node of this tree and level, in two comparisons.
    #[inline(always)]
    pub(crate) fn is_of(self, tree: u32, level: u8) -> bool {
        self.page.u64(TREE) == Some(tree_and_magic(tree))
            && self.page.u32(KIND) == Some(kind_and_level(level))
    }

    /// Begins a search: reads the header, and the hints if there are any.
    #[inline(always)]
    pub(crate) fn narrow<const SLOT: usize>(self, key: &[u8]) -> Result<Search, Torn> {
        // Count and prefix length are the first and the last of four numbers.
        let header = self.page.u64(COUNT).ok_or(Torn)?;
        let (count, prefix_len) = ((header & 0xffff) as u32, (header >> 48) as u32);
        if SLOTS + count as usize * SLOT > self.page.len() {
            return Err(Torn);
        }
        let skip = self.u16_at(SKIP)? as u32;
        let lead = prefix_len + skip;
        let whole = Search { low: 0, len: count, count, lead, skip, head: NO_HEAD };
        if skip != 0 {
            match self.compare_skipped(key, whole)? {
                Ordering::Less => return Ok(Search { low: count, len: 0, ..whole }),
                Ordering::Equal => {}
                Ordering::Greater => return Ok(Search { len: 0, ..whole }),
            }
        }
        let head = head_after(key, lead as usize)?;
        if count as usize <= HINTS_FROM {
            return Ok(Search { head, ..whole });
        }
        // Comparing all hints is faster than branching to stop early.
        let mut below = 0;
        for pair in 0..HINT_COUNT / 2 {
            let hints = self.page.u64(HINTS + 8 * pair).ok_or(Torn)?;
            let (one, two) = (hints & 0xffff_ffff, hints >> 32);
            below += u32::from(one < head) + u32::from(two < head);
        }
        let distance = hint_distance(count as usize) as u32;
        let low = below * distance;
        let len = if below < HINT_COUNT as u32 { distance } else { count - low };
        Ok(Search { low, len, head, ..whole })
    }

    /// Prefetches the slots that the hints have not excluded, if these are few. Without that, the
    /// search would wait for one line after the other.
    #[inline(always)]
    fn prefetch_few<const SLOT: usize>(self, search: Search) {
        if search.has_hints() && search.len as usize * SLOT <= PREFETCH_MAX {
            self.prefetch_slots::<SLOT>(search);
        }
    }

    /// Prefetches the slots that a search has not excluded.
    #[inline(always)]
    pub(crate) fn prefetch_slots<const SLOT: usize>(self, search: Search) {
        self.page.prefetch(SLOTS + search.low as usize * SLOT, search.len as usize * SLOT);
    }

    /// Compares the skipped bytes, which all slots share, with the same bytes of the key.
    #[inline(always)]
    fn compare_skipped(self, key: &[u8], search: Search) -> Result<Ordering, Torn> {
        let (lead, skip) = (search.lead as usize, search.skip as usize);
        let ours = key.get(lead - skip..lead.min(key.len())).ok_or(Torn)?;
        let (_, first, _) = parts(self.page.u64(SLOTS).ok_or(Torn)?);
        self.compare_rest(first, skip, ours)
    }

    /// Finds the first slot whose head is not less than the key's.
    #[inline(always)]
    pub(crate) fn probe<const SLOT: usize>(self, search: &mut Search) -> Result<(), Torn> {
        let (mut low, mut len) = (search.low as usize, search.len as usize);
        let head_at = |index: usize| self.page.u32(SLOTS + index * SLOT).ok_or(Torn);
        while len > 1 {
            let half = len / 2;
            let is_less = u64::from(head_at(low + half - 1)?) < search.head;
            low = select_unpredictable(is_less, low + half, low);
            len -= half;
        }
        if len == 1 {
            low += usize::from(u64::from(head_at(low)?) < search.head);
        }
        (search.low, search.len) = (low as u32, 0);
        Ok(())
    }

    /// Finishes a search for `key`.
    #[inline(always)]
    pub(crate) fn resolve<const SLOT: usize>(
        self,
        search: Search,
        key: &[u8],
    ) -> Result<Position, Torn> {
        let index = search.low as usize;
        if search.low < search.count {
            let slot = parts(self.page.u64(SLOTS + index * SLOT).ok_or(Torn)?);
            if u64::from(slot.0) == search.head {
                match self.compare_cell(slot, search, key)? {
                    Ordering::Equal => return Ok(Position { index, exact: true }),
                    Ordering::Greater => {}
                    Ordering::Less => return self.resolve_equal_heads::<SLOT>(search, key),
                }
            }
        }
        Ok(Position { index, exact: false })
    }

    /// Finishes a search whose slot at `low` has the key's head, but a smaller key. The slots after
    /// it may have the same head.
    #[inline(never)]
    fn resolve_equal_heads<const SLOT: usize>(
        self,
        search: Search,
        key: &[u8],
    ) -> Result<Position, Torn> {
        let (mut low, mut high) = (search.low as usize + 1, search.count as usize);
        while low < high {
            let middle = (low + high) / 2;
            let slot = parts(self.page.u64(SLOTS + middle * SLOT).ok_or(Torn)?);
            let order = match u64::from(slot.0).cmp(&search.head) {
                Ordering::Equal => self.compare_cell(slot, search, key)?,
                differ => differ,
            };
            match order {
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
                Ordering::Equal => return Ok(Position { index: middle, exact: true }),
            }
        }
        Ok(Position { index: low, exact: false })
    }

    /// Compares the cell of a slot with a key. Both have the same head.
    #[inline(always)]
    fn compare_cell(
        self,
        (_, offset, len): (u32, usize, usize),
        search: Search,
        key: &[u8],
    ) -> Result<Ordering, Torn> {
        let skip = search.skip as usize;
        let (rest, len) = (key.get(search.lead as usize..).ok_or(Torn)?, len.wrapping_sub(skip));
        // If one of the suffixes ends within the head, the other begins with it.
        match rest.split_first_chunk::<4>() {
            Some((_, rest)) if len > 4 && !rest.is_empty() => {
                self.compare_rest(offset + skip + 4, len - 4, rest)
            }
            _ => Ok(len.cmp(&rest.len())),
        }
    }

    /// Compares `len` bytes at `at` with `key`, eight bytes at a time.
    #[inline(always)]
    fn compare_rest(self, mut at: usize, len: usize, key: &[u8]) -> Result<Ordering, Torn> {
        let page = self.page;
        let common = &key[..len.min(key.len())];
        let (words, rest) = common.as_chunks::<8>();
        for word in words {
            let ours = page.u64(at).ok_or(Torn)?.swap_bytes();
            match ours.cmp(&u64::from_be_bytes(*word)) {
                Ordering::Equal => at += 8,
                differ => return Ok(differ),
            }
        }
        // Compare the last bytes, at most seven, as one number on each side.
        let (mut ours, mut theirs) = (0, 0);
        let mut rest = rest;
        if let Some((four, after)) = rest.split_first_chunk() {
            ours = u64::from(page.u32(at).ok_or(Torn)?.swap_bytes());
            (theirs, rest) = (u64::from(u32::from_be_bytes(*four)), after);
            at += 4;
        }
        if let Some((two, after)) = rest.split_first_chunk() {
            ours = ours << 16 | u64::from(page.u16(at).ok_or(Torn)?.swap_bytes());
            (theirs, rest) = (theirs << 16 | u64::from(u16::from_be_bytes(*two)), after);
            at += 2;
        }
        if let Some(one) = rest.first() {
            ours = ours << 8 | u64::from(page.u8(at).ok_or(Torn)?);
            theirs = theirs << 8 | u64::from(*one);
        }
        Ok(ours.cmp(&theirs).then(len.cmp(&key.len())))
    }

    #[inline(always)]
    fn find_in<const SLOT: usize>(self, key: &[u8]) -> Result<Position, Torn> {
        let mut search = self.narrow::<SLOT>(key)?;
        self.probe::<SLOT>(&mut search)?;
        self.resolve::<SLOT>(search, key)
    }

    /// Whether `key` is between the fences.
    #[inline]
    pub fn covers(self, key: &[u8]) -> Result<bool, Torn> {
        let flags = self.u16_at(FENCE_FLAGS)? as u16;
        let compare = |offset, len| self.compare_rest(self.u16_at(offset)?, self.u16_at(len)?, key);
        let above_lower = flags & HAS_LOWER == 0 || compare(LOWER_OFFSET, LOWER_LEN)?.is_lt();
        Ok(above_lower && (flags & HAS_UPPER == 0 || compare(UPPER_OFFSET, UPPER_LEN)?.is_ge()))
    }

    /// Checks that this is the leaf for `key`. A leaf stores keys without their prefix. If the
    /// device lost a write and the descent reached a wrong leaf, the search could find a different
    /// key there.
    #[inline(always)]
    fn check_is_leaf_for(self, is_found: bool, key: &[u8]) -> Result<(), Torn> {
        let is_owner = if is_found { self.has_prefix_of(key)? } else { self.covers(key)? };
        if is_owner { Ok(()) } else { Err(Torn) }
    }

    /// Whether `key` begins with the node's prefix.
    #[inline(always)]
    fn has_prefix_of(self, key: &[u8]) -> Result<bool, Torn> {
        let (prefix, at) = (self.prefix_len()?, self.u16_at(LOWER_OFFSET)?);
        if prefix == 0 {
            return Ok(true);
        }
        // A short prefix is the usual case: shift out the bytes after the prefix.
        if let (1..=8, Some(key), Some(ours)) = (prefix, key.first_chunk(), self.page.u64(at)) {
            return Ok((ours ^ u64::from_le_bytes(*key)) << (64 - 8 * prefix) == 0);
        }
        let key = key.get(..prefix).ok_or(Torn)?;
        Ok(self.compare_rest(at, prefix, key)?.is_eq())
    }

    /// Finds a key in the leaf that a descent for the key has reached, and checks that it is the
    /// leaf for the key.
    #[inline]
    pub(crate) fn find_reached(self, key: &[u8]) -> Result<Position, Torn> {
        let position = self.find(key)?;
        self.check_is_leaf_for(position.exact, key)?;
        Ok(position)
    }

    /// Finds a key in a leaf.
    #[inline]
    pub fn find(self, key: &[u8]) -> Result<Position, Torn> {
        self.find_in::<LEAF_SLOT>(key)
    }

    /// Finds the position of a key in an inner node: the child for `key` is at the returned index.
    #[inline]
    pub fn find_child(self, key: &[u8]) -> Result<Position, Torn> {
        self.find_in::<INNER_SLOT>(key)
    }

    /// [`find`](Self::find) in a leaf, [`find_child`](Self::find_child) in an inner node.
    pub fn find_slot(self, key: &[u8]) -> Result<Position, Torn> {
        match self.level()? {
            0 => self.find(key),
            _ => self.find_child(key),
        }
    }

    /// Finishes a search in an inner node: returns the index and the page of the child for `key`.
    #[inline(always)]
    pub(crate) fn resolve_child(self, search: Search, key: &[u8]) -> Result<(usize, u64), Torn> {
        let index = self.resolve::<INNER_SLOT>(search, key)?.index;
        let place = match index < search.count as usize {
            true => SLOTS + index * INNER_SLOT + SLOT_CHILD,
            false => UPPER_CHILD,
        };
        Ok((index, self.page.u64(place).ok_or(Torn)?))
    }

    /// The index and the page of the child for `key`.
    #[inline(always)]
    pub(crate) fn child_for(self, key: &[u8]) -> Result<(usize, u64), Torn> {
        let mut search = self.narrow::<INNER_SLOT>(key)?;
        self.prefetch_few::<INNER_SLOT>(search);
        self.probe::<INNER_SLOT>(&mut search)?;
        self.resolve_child(search, key)
    }

    /// Finishes a search in the leaf that a descent for `key` has reached: returns the place of the
    /// payload, if the leaf has the key.
    #[inline(always)]
    pub(crate) fn resolve_payload(
        self,
        search: Search,
        key: &[u8],
    ) -> Result<Option<PayloadPlace>, Torn> {
        let position = self.resolve::<LEAF_SLOT>(search, key)?;
        self.check_is_leaf_for(position.exact, key)?;
        match position.exact {
            true => self.place_at(position.index).map(Some),
            false => Ok(None),
        }
    }

    /// The place of the payload of `key`, if the leaf has the key.
    #[inline(always)]
    pub(crate) fn payload_for(self, key: &[u8]) -> Result<Option<PayloadPlace>, Torn> {
        let mut search = self.narrow::<LEAF_SLOT>(key)?;
        self.prefetch_few::<LEAF_SLOT>(search);
        self.probe::<LEAF_SLOT>(&mut search)?;
        self.resolve_payload(search, key)
    }

    /// The place of the payload of a leaf's slot, which is inside the page. The leaf has a slot at
    /// `index`.
    #[inline(always)]
    pub(crate) fn place_at(self, index: usize) -> Result<PayloadPlace, Torn> {
        let slot = SLOTS + index * LEAF_SLOT;
        let (_, cell, key_len) = parts(self.page.u64(slot).ok_or(Torn)?);
        let payload = self.page.u32(slot + SLOT_PAYLOAD_LEN).ok_or(Torn)?;
        let (offset, len) = (cell + key_len, usize::from(payload as u16));
        if offset + len > self.page.len() {
            return Err(Torn);
        }
        Ok(PayloadPlace { offset, len, blob: (payload >> 16) as u16 & BLOB_FLAG != 0 })
    }

    /// The offset and length of the cell that a leaf's search has reached, if the slot has the
    /// key's head.
    #[inline(always)]
    pub(crate) fn cell_at(self, search: Search) -> Result<Option<(usize, usize)>, Torn> {
        let slot = SLOTS + search.low as usize * LEAF_SLOT;
        if search.low >= search.count {
            return Ok(None);
        }
        let (head, offset, key_len) = parts(self.page.u64(slot).ok_or(Torn)?);
        let payload_len = self.u16_at(slot + SLOT_PAYLOAD_LEN)?;
        Ok((u64::from(head) == search.head).then_some((offset, key_len + payload_len)))
    }
}
