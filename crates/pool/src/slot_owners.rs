//! Which page is in which slot: a record beside the state words, by which the pool finds a word
//! that names a slot of another page, or none that there is.
//!
//! A state word is the only path to a page in a slot. If a fault of the machine or of other code in
//! the process damages the word, the page's bytes are still there, and the record says where.

use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::FromZeros;

use crate::error::PoolError;
use crate::page::PageId;

/// For each slot, the page that is in it: its number and one; 0 for none. The first entry is that
/// of the number 0, which is no slot.
///
/// Memory comes only for entries that were written. Only the thread that holds a page exclusively
/// writes the entry of its slot, and the lock of the page orders that for others.
#[derive(Debug)]
pub(crate) struct SlotOwners(Box<[AtomicU64]>);

impl SlotOwners {
    /// For slots with numbers from 1 to `last`.
    ///
    /// # Errors
    /// No memory.
    pub(crate) fn new(last: u64) -> Result<SlotOwners, PoolError> {
        let entries = <[AtomicU64]>::new_box_zeroed_with_elems(last as usize + 1);
        entries.map(SlotOwners).map_err(|_| PoolError::NoSlotRecord { slots: last })
    }

    /// Whether the page is in the slot. False of a slot that there is not.
    #[inline(always)]
    pub(crate) fn is_of(&self, slot: u64, page: PageId) -> bool {
        let entry = self.0.get(slot as usize);
        entry.is_some_and(|entry| entry.load(Ordering::Relaxed) == page.0 + 1)
    }

    /// The page is in the slot from now on.
    pub(crate) fn set(&self, slot: u64, page: PageId) {
        self.0[slot as usize].store(page.0 + 1, Ordering::Relaxed);
    }

    /// No page is in the slot any more.
    pub(crate) fn clear(&self, slot: u64) {
        if let Some(entry) = self.0.get(slot as usize) {
            entry.store(0, Ordering::Relaxed);
        }
    }

    /// The slot that a page is in, which the caller holds exclusively. Looks at all slots.
    pub(crate) fn find(&self, page: PageId) -> Option<u64> {
        (1..self.0.len() as u64).find(|slot| self.is_of(*slot, page))
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    #[test]
    fn a_record_without_memory_is_an_error_that_names_it() {
        // Beyond the address space, and beyond what any number of bytes can say.
        for slots in [1 << 45, 1 << 62] {
            let error = SlotOwners::new(slots).unwrap_err();
            assert!(matches!(error, PoolError::NoSlotRecord { .. }), "{error}");
            assert!(error.to_string().contains(&format!("record of {slots} slots")), "{error}");
        }
    }

    #[test]
    fn a_page_is_in_the_slot_that_it_was_put_into() {
        let owners = SlotOwners::new(8).unwrap();
        owners.set(8, PageId(0));
        assert!(owners.is_of(8, PageId(0)));
        for slot in [0, 1, 7, 9, u64::MAX] {
            assert!(!owners.is_of(slot, PageId(0)), "{slot}");
        }
        assert_eq!(owners.find(PageId(0)), Some(8));
        owners.clear(8);
        assert_eq!(owners.find(PageId(0)), None);
    }
}
