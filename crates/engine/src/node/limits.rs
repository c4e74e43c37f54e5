//! How long keys and values in a node may be.

use super::layout::{INNER_SLOT, LEAF_SLOT, capacity};

/// The limits that follow from the size of a page.
///
/// An inner node takes at least two fences and three separators of the greatest length, so that it
/// can always be split; a leaf two fences and two of the largest entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLimits {
    /// Bytes for slots, cells and fences.
    pub capacity: usize,
    /// Greatest length of a key in bytes.
    pub max_key: usize,
    /// Greatest size of an entry in a leaf, key, value and slot together. Larger values are blobs.
    pub max_cell: usize,
}

impl NodeLimits {
    /// For pages of `page_len` bytes, a multiple of 4 KiB up to 64 KiB.
    pub const fn for_page_size(page_len: usize) -> NodeLimits {
        let capacity = capacity(page_len);
        let max_key = capacity / 6 - INNER_SLOT;
        NodeLimits { capacity, max_key, max_cell: capacity / 3 }
    }

    /// Greatest length of a value that is kept beside a key of this length.
    pub const fn max_inline_value(&self, key_len: usize) -> usize {
        self.max_cell.saturating_sub(LEAF_SLOT + key_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_take_what_the_limits_promise() {
        for frames in 1..=16 {
            let limits = NodeLimits::for_page_size(frames * 4096);
            let separator = limits.max_key + INNER_SLOT;
            assert!(2 * limits.max_key + 3 * separator <= limits.capacity);
            assert!(2 * limits.max_key + 2 * limits.max_cell <= limits.capacity);
            // A blob's reference fits beside the longest key.
            assert!(limits.max_inline_value(limits.max_key) >= 24);
            assert!(limits.max_cell < 1 << 15);
        }
    }
}
