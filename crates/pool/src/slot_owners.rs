//! Which page is in which slot, and which pages lie on the surface: a record beside the state
//! words, by which the pool finds a word that names the wrong slot.
//!
//! A state word is the only path to a page in a slot. If a fault of the machine or of other code in
//! the process damages the word, the page's bytes are still there, and the record says where.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_vm::ReserveError;
use zerocopy::FromZeros;

use crate::error::PoolError;
use crate::page::PageId;
use crate::page::page_bits::PageBits;

/// See the module's documentation. The slot 0 stands for a page's own place on the surface.
///
/// Memory comes only for entries and bits that were written. Only the thread that holds a page
/// exclusively writes the entry of its slot and its bit, and the lock of the page orders that for
/// others.
#[derive(Debug)]
pub(crate) struct SlotOwners {
    /// For each slot, the page that is in it: its number and one; 0 for none. The first entry is
    /// that of the number 0, which is no slot.
    of_slots: Box<[AtomicU64]>,
    /// Whether a page was ever in a slot.
    are_used: AtomicBool,
    /// The pages that lie on the surface. Of a page of several frames the first one.
    on_surface: PageBits,
}

impl SlotOwners {
    /// For slots with numbers from 1 to `last`, and a file without pages.
    ///
    /// # Errors
    /// No memory, or no address space.
    pub(crate) fn new(last: u64) -> Result<SlotOwners, PoolError> {
        let entries = <[AtomicU64]>::new_box_zeroed_with_elems(last as usize + 1);
        let of_slots = entries.map_err(|_| PoolError::NoSlotRecord { slots: last })?;
        let on_surface = PageBits::new(0, "pages on the surface")?;
        Ok(SlotOwners { of_slots, are_used: AtomicBool::new(false), on_surface })
    }

    /// Makes room for a file of so many pages; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        self.on_surface.grow(pages)
    }

    /// Whether the page is in the slot. False of a slot that there is not.
    #[inline(always)]
    pub(crate) fn is_of(&self, slot: u64, page: PageId) -> bool {
        if slot == 0 {
            // Before, no page can be elsewhere. A pool whose pages all fit is as fast as without.
            return !self.are_used.load(Ordering::Relaxed) || self.on_surface.contains(page.0);
        }
        let entry = self.of_slots.get(slot as usize);
        entry.is_some_and(|entry| entry.load(Ordering::Relaxed) == page.0 + 1)
    }

    /// The page is in the slot from now on.
    pub(crate) fn set(&self, slot: u64, page: PageId) {
        if slot > 0 && !self.are_used.load(Ordering::Relaxed) {
            self.are_used.store(true, Ordering::Relaxed);
        }
        match slot {
            0 => _ = self.on_surface.set(page.0),
            _ => self.of_slots[slot as usize].store(page.0 + 1, Ordering::Relaxed),
        }
    }

    /// The page, which was in the slot, is not there any more.
    pub(crate) fn clear(&self, slot: u64, page: PageId) {
        match slot {
            0 => self.on_surface.clear(page.0),
            _ => self.of_slots[slot as usize].store(0, Ordering::Relaxed),
        }
    }

    /// The slot that a page is in, which the caller holds exclusively and which has a place. Looks
    /// at all slots: for a word that is damaged. None if the record is damaged, too.
    #[cold]
    pub(crate) fn find(&self, page: PageId) -> Option<u64> {
        (0..self.of_slots.len() as u64).find(|slot| self.is_of(*slot, page))
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
        owners.clear(8, PageId(0));
        assert_eq!(owners.find(PageId(0)), None);
    }

    #[test]
    fn a_page_on_the_surface_is_in_the_slot_0() {
        let owners = SlotOwners::new(8).unwrap();
        owners.grow(100_000).unwrap();
        assert!(owners.is_of(0, PageId(0)), "no slot was ever used");
        owners.set(1, PageId(0));
        assert!(!owners.is_of(0, PageId(0)));
        owners.set(0, PageId(99_999));
        assert!(owners.is_of(0, PageId(99_999)) && !owners.is_of(0, PageId(99_998)));
        assert_eq!(owners.find(PageId(99_999)), Some(0));
        owners.clear(0, PageId(99_999));
        assert_eq!(owners.find(PageId(99_999)), None);
    }
}
