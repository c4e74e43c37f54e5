//! The layout of a node (docs/format.md, "Node"), and the limits of keys and values.

use crate::page::PAGE_HEADER;

/// The bytes of a node are inconsistent. An optimistic reader gets this when a writer changes the
/// page meanwhile. A reader that holds a lock gets it when the page is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the bytes of the node are inconsistent")]
pub struct Torn;

pub(crate) const COUNT: usize = PAGE_HEADER;
pub(crate) const HEAP_TOP: usize = PAGE_HEADER + 2;
pub(crate) const HEAP_USED: usize = PAGE_HEADER + 4;
pub(crate) const PREFIX_LEN: usize = PAGE_HEADER + 6;
pub(crate) const LOWER_OFFSET: usize = PAGE_HEADER + 8;
pub(crate) const LOWER_LEN: usize = PAGE_HEADER + 10;
pub(crate) const UPPER_OFFSET: usize = PAGE_HEADER + 12;
pub(crate) const UPPER_LEN: usize = PAGE_HEADER + 14;
pub(crate) const FENCE_FLAGS: usize = PAGE_HEADER + 16;
/// The number of bytes after the prefix that are the same in all slots. The heads begin after these
/// bytes.
pub(crate) const SKIP: usize = PAGE_HEADER + 18;
pub(crate) const RESERVED: usize = PAGE_HEADER + 20;
pub(crate) const UPPER_CHILD: usize = PAGE_HEADER + 24;
pub(crate) const HINTS: usize = PAGE_HEADER + 32;
pub(crate) const SLOTS: usize = HINTS + 4 * HINT_COUNT;
/// The end of the header and the hints, which every search reads first.
pub(crate) const HINTS_END: usize = SLOTS;

/// The lower fence exists (the node is not the leftmost of its level).
pub(crate) const HAS_LOWER: u16 = 1;
/// The upper fence exists (the node is not the rightmost of its level).
pub(crate) const HAS_UPPER: u16 = 2;

/// A leaf's slot: head u32, offset u16, key length u16, payload length u16, flags u16.
pub(crate) const LEAF_SLOT: usize = 12;
/// An inner node's slot: head u32, offset u16, key length u16, child u64.
pub(crate) const INNER_SLOT: usize = 16;
pub(crate) const SLOT_OFFSET: usize = 4;
pub(crate) const SLOT_KEY_LEN: usize = 6;
pub(crate) const SLOT_PAYLOAD_LEN: usize = 8;
pub(crate) const SLOT_FLAGS: usize = 10;
pub(crate) const SLOT_CHILD: usize = 8;
/// The number of bytes of a key in the head of its slot.
pub(crate) const HEAD_LEN: usize = 4;
/// In a leaf slot's flags: the payload is a reference to a blob.
pub(crate) const BLOB_FLAG: u16 = 1;

/// The highest level of a node. Every level at least doubles the number of pages, so no tree is
/// higher.
pub(crate) const LEVEL_MAX: u8 = 64;

pub(crate) const HINT_COUNT: usize = 16;
/// A node with at most this many slots has no hints, because a search without hints is short.
pub(crate) const HINTS_FROM: usize = 2 * HINT_COUNT;

/// The end of the heap. Offsets have 16 bits, so the last 8 bytes of the largest page are unused.
#[inline(always)]
pub(crate) const fn heap_end(page_len: usize) -> usize {
    if page_len > 65528 { 65528 } else { page_len }
}

/// The number of bytes for slots, cells and fences in a page of this length.
pub(crate) const fn capacity(page_len: usize) -> usize {
    heap_end(page_len) - SLOTS
}

/// The length in bytes of a slot on this level.
#[inline(always)]
pub(crate) const fn slot_size(level: u8) -> usize {
    if level == 0 { LEAF_SLOT } else { INNER_SLOT }
}

/// The first four bytes of a key suffix, as a number with the same order. A shorter suffix is
/// padded with zeros.
#[inline(always)]
pub(crate) fn head_of(suffix: &[u8]) -> u32 {
    match suffix.first_chunk() {
        Some(bytes) => u32::from_be_bytes(*bytes),
        None => suffix
            .iter()
            .enumerate()
            .fold(0, |head, (at, byte)| head | u32::from(*byte) << (24 - 8 * at)),
    }
}

/// The number of leading bytes that both keys share.
pub(crate) fn common_prefix(one: &[u8], two: &[u8]) -> usize {
    one.iter().zip(two).take_while(|(a, b)| a == b).count()
}

/// The distance in slots from one hint to the next.
#[inline(always)]
pub(crate) const fn hint_distance(count: usize) -> usize {
    count / (HINT_COUNT + 1)
}

/// The limits of keys and entries for a page size.
///
/// An inner node has room for at least two fences and three separators of the greatest length, so
/// it can always be split. A leaf has room for two fences and two of the largest entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    /// Bytes for slots, cells and fences.
    pub capacity: usize,
    /// Greatest length of a key in bytes.
    pub max_key: usize,
    /// Greatest size of an entry in a leaf: key, value and slot together. The value of a larger
    /// entry is a blob.
    pub max_cell: usize,
}

impl NodeLimits {
    /// The limits for pages of `page_len` bytes, a multiple of 4 KiB up to 64 KiB.
    pub const fn for_page_size(page_len: usize) -> NodeLimits {
        let capacity = capacity(page_len);
        let max_key = capacity / 6 - INNER_SLOT;
        NodeLimits { capacity, max_key, max_cell: capacity / 3 }
    }

    /// Greatest length of a value that is stored in the leaf with a key of this length.
    pub const fn max_inline_value(&self, key_len: usize) -> usize {
        self.max_cell.saturating_sub(LEAF_SLOT + key_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_room_for_what_the_limits_allow() {
        for frames in 1..=16 {
            let limits = NodeLimits::for_page_size(frames * 4096);
            let separator = limits.max_key + INNER_SLOT;
            assert!(2 * limits.max_key + 3 * separator <= limits.capacity);
            assert!(2 * limits.max_key + 2 * limits.max_cell <= limits.capacity);
            // An entry with the longest key and a blob's reference fits.
            assert!(limits.max_inline_value(limits.max_key) >= 24);
            assert!(limits.max_cell < 1 << 15);
        }
    }
}
