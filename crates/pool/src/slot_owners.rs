//! Which page is in which slot, and which pages lie on the surface: a record beside the state
//! words.
//!
//! By the record the pool finds a word that names the wrong slot. A state word is the only path to
//! a page in a slot. If a fault of the machine or of other code in the process damages the word,
//! the page's bytes are still there, and the record says where.
//!
//! The record is also the set of resident pages in slots, round which the clock's hand goes
//! (`residence/residents.rs`).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_vm::ReserveError;
use zerocopy::FromZeros;

use crate::error::PoolError;
use crate::page::PageId;
use crate::page::page_bits::PageBits;
use crate::scattered_lines::{LINE, ScatteredLines};

/// The page of this entry is resident.
const ADMITTED: u64 = 1 << 63;

/// See the module's documentation. The slot 0 stands for a page's own place on the surface.
///
/// Memory comes only for entries and bits that were written. Only the thread that holds a page
/// exclusively writes the entry of its slot and its bit, and the lock of the page orders that for
/// others.
#[derive(Debug)]
pub(crate) struct SlotOwners {
    /// For each slot, the page that is in it: its number and one, and [`ADMITTED`] if it is
    /// resident and not about to be; 0 for none. The first entry is that of the number 0, which is
    /// no slot.
    of_slots: Box<[AtomicU64]>,
    lines: ScatteredLines,
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
        let no_memory = || PoolError::NoSlotRecord { slots: last };
        let entries = (last as usize + 1).next_multiple_of(LINE);
        let of_slots = <[AtomicU64]>::new_box_zeroed_with_elems(entries);
        let of_slots = of_slots.map_err(|_| no_memory())?;
        let lines = ScatteredLines::new(entries / LINE).ok_or_else(no_memory)?;
        let on_surface = PageBits::new(0, "pages on the surface")?;
        Ok(SlotOwners { of_slots, lines, are_used: AtomicBool::new(false), on_surface })
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
        entry.is_some_and(|entry| entry.load(Ordering::Relaxed) & !ADMITTED == page.0 + 1)
    }

    /// The page is in the slot from now on. It is not resident yet.
    pub(crate) fn set(&self, slot: u64, page: PageId) {
        if slot > 0 && !self.are_used.load(Ordering::Relaxed) {
            self.are_used.store(true, Ordering::Relaxed);
        }
        match slot {
            0 => _ = self.on_surface.set(page.0),
            _ => {
                self.of_slots[slot as usize].store(page.0 + 1, Ordering::SeqCst);
                self.lines.note_entry(slot as usize);
            }
        }
    }

    /// The page, which is in this slot, is resident from now on.
    pub(crate) fn admit(&self, slot: u64, page: PageId) {
        self.of_slots[slot as usize].store((page.0 + 1) | ADMITTED, Ordering::Release);
    }

    /// Whether the page is in this slot and resident.
    pub(crate) fn is_admitted(&self, slot: u64, page: PageId) -> bool {
        let entry = self.of_slots.get(slot as usize);
        entry.is_some_and(|entry| entry.load(Ordering::Acquire) == (page.0 + 1) | ADMITTED)
    }

    /// The positions of an iteration over all slots; not each has a slot.
    pub(crate) fn positions(&self) -> usize {
        self.lines.entries()
    }

    /// The position of a slot.
    pub(crate) fn position_of(&self, slot: u64) -> usize {
        self.lines.position_of(slot as usize)
    }

    /// The resident page at a position, if there is one.
    pub(crate) fn resident_at(&self, position: usize) -> Option<PageId> {
        let entry = self.of_slots[self.lines.entry_at(position)].load(Ordering::Acquire);
        (entry & ADMITTED != 0).then(|| PageId((entry & !ADMITTED) - 1))
    }

    /// How many positions without a page there are from one on, as far as whole lines tell.
    pub(crate) fn empty_from(&self, position: usize) -> usize {
        let entry = |slot: usize| self.of_slots[slot].load(Ordering::SeqCst);
        self.lines.empty_from(position, |slot| entry(slot) == 0)
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
    use crate::scattered_lines::LINES_PASSED;

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

    /// The resident pages, as an iteration finds them, and how many positions it looks at.
    fn residents(owners: &SlotOwners) -> (Vec<PageId>, usize) {
        let (mut position, mut looks, mut found) = (0, 0, Vec::new());
        while position < owners.positions() {
            looks += 1;
            match owners.empty_from(position) {
                0 => {
                    found.extend(owners.resident_at(position));
                    position += 1;
                }
                empty => position += empty,
            }
        }
        found.sort_unstable();
        (found, looks)
    }

    #[test]
    fn a_page_is_resident_when_it_was_admitted_and_until_it_leaves() {
        let owners = SlotOwners::new(8).unwrap();
        owners.set(3, PageId(7));
        assert!(residents(&owners).0.is_empty() && !owners.is_admitted(3, PageId(7)));
        owners.admit(3, PageId(7));
        assert_eq!(residents(&owners).0, [PageId(7)]);
        assert!(owners.is_of(3, PageId(7)) && !owners.is_of(3, PageId(6)));
        assert!(owners.is_admitted(3, PageId(7)) && !owners.is_admitted(3, PageId(6)));
        assert!(!owners.is_admitted(99, PageId(7)), "there is no such slot");
        owners.clear(3, PageId(7));
        assert!(residents(&owners).0.is_empty());
    }

    #[test]
    fn slots_without_pages_are_jumped_over() {
        let owners = SlotOwners::new(100_000).unwrap();
        let jumps = (100_000 / LINE).div_ceil(LINES_PASSED);
        assert_eq!(residents(&owners), (vec![], jumps));
        for slot in [1, 70_000, 100_000] {
            owners.set(slot, PageId(slot));
            owners.admit(slot, PageId(slot));
        }
        let (found, looks) = residents(&owners);
        assert_eq!(found, [PageId(1), PageId(70_000), PageId(100_000)]);
        assert!(looks <= 3 * (LINE + 1) + jumps, "{looks} looks");
        assert_eq!(owners.resident_at(owners.position_of(70_000)), Some(PageId(70_000)));
        owners.clear(70_000, PageId(70_000));
        assert_eq!(residents(&owners).0.len(), 2);
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
