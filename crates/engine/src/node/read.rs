//! Reading nodes: keys, payloads, fences.

use std::cmp::Ordering;

use vellum_pool::PageReader;

use super::layout::*;
use crate::page::{KIND, PageKind};

/// A view of a node's bytes, locked or not.
#[derive(Clone, Copy, Debug)]
pub struct Node<R> {
    pub(super) page: R,
}

/// Where a key is, or where it would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The first slot whose key is not less than the one searched for; the count if none is.
    pub index: usize,
    /// The slot's key is the one searched for.
    pub exact: bool,
}

/// A leaf's payload as it lies in the page.
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

    /// Height above the leaves. Of a page that is no node at all it makes no sense.
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

    /// Bytes left for slots and cells, once the heap is compacted.
    pub fn free_space(self) -> Result<usize, Torn> {
        let slots = SLOTS + self.count()? * slot_size(self.level()?);
        heap_end(self.page.len()).checked_sub(slots + self.u16_at(HEAP_USED)?).ok_or(Torn)
    }

    /// Whether an entry fits that has a key of `key_len` bytes and `payload` bytes in the heap.
    pub fn has_room(self, key_len: usize, payload: usize) -> Result<bool, Torn> {
        let suffix = key_len.checked_sub(self.prefix_len()?).ok_or(Torn)?;
        Ok(slot_size(self.level()?) + suffix + payload <= self.free_space()?)
    }

    /// The child at `index`; the one at `count` is the upper child.
    #[inline(always)]
    pub fn child(self, index: usize) -> Result<u64, Torn> {
        let count = self.count()?;
        match index.cmp(&count) {
            Ordering::Less => self.page.u64(SLOTS + index * INNER_SLOT + SLOT_CHILD).ok_or(Torn),
            Ordering::Equal => self.page.u64(UPPER_CHILD).ok_or(Torn),
            Ordering::Greater => Err(Torn),
        }
    }

    /// Where the payload of a leaf's slot lies; its bounds are inside the page.
    #[inline(always)]
    pub(crate) fn payload_place(self, index: usize) -> Result<PayloadPlace, Torn> {
        match index < self.count()? {
            true => self.place_at(index),
            false => Err(Torn),
        }
    }

    /// Appends a slot's whole key to `key`, after clearing it.
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

    /// Copies the payload at `place` to `value`, in place of what is there.
    #[inline(always)]
    pub(crate) fn payload_into(self, place: PayloadPlace, value: &mut Vec<u8>) -> Result<(), Torn> {
        // What is there is overwritten: only what is missing has to be filled up.
        if value.len() > place.len {
            value.truncate(place.len);
        } else if value.len() < place.len {
            value.resize(place.len, 0);
        }
        self.payload_to(place, value)
    }

    /// Copies the payload at `place` to `value`, which has its length.
    #[inline(always)]
    pub(crate) fn payload_to(self, place: PayloadPlace, value: &mut [u8]) -> Result<(), Torn> {
        self.page.copy_to(place.offset, value).ok_or(Torn)
    }

    /// Copies the lower fence to `key`; false if the node is the leftmost of its level.
    pub fn lower_into(self, key: &mut Vec<u8>) -> Result<bool, Torn> {
        self.fence_into(HAS_LOWER, LOWER_OFFSET, LOWER_LEN, key)
    }

    /// Copies the upper fence to `key`; false if the node is the rightmost of its level.
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

/// Reading under a lock: slices instead of copies. The page's bounds were checked when it was read.
impl<'a> Node<&'a [u8]> {
    pub(crate) fn bytes(self) -> &'a [u8] {
        self.page
    }

    #[inline(always)]
    fn slice(self, offset: usize, len: usize) -> Result<&'a [u8], Torn> {
        self.page.get(offset..).and_then(|rest| rest.get(..len)).ok_or(Torn)
    }

    /// Makes `key`, which begins with the node's prefix, a leaf's slot's whole key.
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

    /// The part of a leaf's slot's key behind the prefix, and where its payload lies. The slot is
    /// one of the leaf's.
    #[inline(always)]
    pub(crate) fn entry_at(self, index: usize) -> Option<(&'a [u8], PayloadPlace)> {
        let slot = SLOTS + index * LEAF_SLOT;
        let (key, value) = (self.page.u64(slot)?, self.page.u32(slot + SLOT_PAYLOAD_LEN)?);
        let (start, key_len) = (usize::from((key >> 32) as u16), usize::from((key >> 48) as u16));
        let (offset, len) = (start + key_len, usize::from(value as u16));
        let suffix = self.page.get(..offset + len)?.get(start..offset)?;
        Some((suffix, PayloadPlace { offset, len, blob: (value >> 16) as u16 & BLOB_FLAG != 0 }))
    }

    /// The payload of a leaf's slot is a blob.
    #[inline(always)]
    pub(crate) fn is_blob(self, index: usize) -> bool {
        let flags = self.page.u16(SLOTS + index * LEAF_SLOT + SLOT_FLAGS);
        flags.is_some_and(|flags| flags & BLOB_FLAG != 0)
    }

    /// The part of a slot's key behind the prefix.
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

    /// What all keys of the node begin with.
    pub fn prefix(self) -> Result<&'a [u8], Torn> {
        self.slice(self.u16_at(LOWER_OFFSET)?, self.prefix_len()?)
    }

    /// The payload at `place`.
    pub(crate) fn payload(self, place: PayloadPlace) -> Result<&'a [u8], Torn> {
        self.slice(place.offset, place.len)
    }

    /// The fence below all keys, if there is one.
    pub fn lower(self) -> Result<Option<&'a [u8]>, Torn> {
        match self.u16_at(FENCE_FLAGS)? & usize::from(HAS_LOWER) {
            0 => Ok(None),
            _ => self.slice(self.u16_at(LOWER_OFFSET)?, self.u16_at(LOWER_LEN)?).map(Some),
        }
    }

    /// The fence that no key exceeds, if there is one.
    pub fn upper(self) -> Result<Option<&'a [u8]>, Torn> {
        match self.u16_at(FENCE_FLAGS)? & usize::from(HAS_UPPER) {
            0 => Ok(None),
            _ => self.slice(self.u16_at(UPPER_OFFSET)?, self.u16_at(UPPER_LEN)?).map(Some),
        }
    }
}
