//! The classical way from a page's number to its memory: a hash table of cached pages.
//!
//! Open addressing with linear probing, half full, eight bytes an entry, no synchronisation: the
//! lowest cost of any buffer manager with a table (SIGMOD'23, section 5.4).

use super::Chain;

/// From page numbers below 2^32 - 1 to frame numbers.
#[derive(Debug)]
pub struct HashTable {
    /// Page plus one in the upper half, frame in the lower; 0 is empty.
    entries: Vec<u64>,
    shift: u32,
}

impl HashTable {
    /// A table for up to `pages` pages, a power of two.
    pub fn new(pages: u64) -> HashTable {
        let slots = (pages * 2).next_power_of_two();
        HashTable { entries: vec![0; slots as usize], shift: 64 - slots.trailing_zeros() }
    }

    /// A table of a chain's pages. Its frames are in the order of the pages, which the processor
    /// cannot know.
    pub fn of(chain: Chain) -> HashTable {
        let mut table = HashTable::new(chain.pages());
        chain.places().for_each(|place| table.insert(place as u32, place as u32));
        table
    }

    #[inline(always)]
    fn first(&self, page: u64) -> usize {
        (page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Enters a page that is not in the table yet.
    pub fn insert(&mut self, page: u32, frame: u32) {
        let mut slot = self.first(u64::from(page));
        while self.entries[slot] != 0 {
            slot = (slot + 1) & (self.entries.len() - 1);
        }
        self.entries[slot] = ((u64::from(page) + 1) << 32) | u64::from(frame);
    }

    /// The frame of a page.
    #[inline(always)]
    pub fn frame(&self, page: u64) -> Option<u64> {
        let mut slot = self.first(page);
        loop {
            let entry = *self.entries.get(slot)?;
            if entry >> 32 == page + 1 {
                return Some(entry & 0xffff_ffff);
            }
            if entry == 0 {
                return None;
            }
            slot = (slot + 1) & (self.entries.len() - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_entered_and_nothing_else() {
        let mut table = HashTable::new(1024);
        (0..1024).for_each(|page| table.insert(page * 8 + 3, page));
        for page in 0..1024 * 8 {
            let expected = (page % 8 == 3).then_some(page / 8);
            assert_eq!(table.frame(page), expected, "page {page}");
        }
    }
}
