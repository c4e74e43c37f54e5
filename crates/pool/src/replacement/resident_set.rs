//! The set of resident pages: its size follows memory, not storage (SIGMOD'23, section 3.4).
//!
//! An open-addressing table of one word per slot, insertions and removals by compare-and-exchange.
//! It is not consulted on hits; it exists to be iterated by the clock's hand, which a dense array
//! makes cheap. Removed entries leave a tombstone that the next insertion reuses, so entries never
//! move, and an entry that is there throughout an iteration is seen by it.
//!
//! The iteration visits lines that lie far apart one after the other (`scattered_lines.rs`). In
//! sequential order the hand would empty the slots that it has passed and leave those ahead full:
//! insertions there would search a good part of the set, in time that grows with the pool
//! (measured: 200 us in a set of 2^18 pages).
//!
//! The hand jumps over lines without entries. So a pool that is much smaller than it may become
//! ([`PoolOptions::max_bytes`](crate::PoolOptions::max_bytes)) has a short round.

use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::FromZeros;

use crate::page::PageRef;
use crate::scattered_lines::{LINE, ScatteredLines};

const EMPTY: u64 = 0;
const TOMBSTONE: u64 = u64::MAX;
const FRAMES_BITS: u32 = 24;
/// Looks at the whole set for a free slot before that counts as a broken promise.
const PASSES: u32 = 8;

/// A concurrent set of [`PageRef`]s with a fixed capacity.
#[derive(Debug)]
pub struct ResidentSet {
    slots: Box<[AtomicU64]>,
    lines: ScatteredLines,
}

impl ResidentSet {
    /// A set for up to `pages` pages, in 12 bytes each. The memory is zeroed by the kernel, so it
    /// is taken where a page is entered, not before.
    ///
    /// # Panics
    /// If there is no address space for it.
    pub fn new(pages: u64) -> ResidentSet {
        let slots = usize::try_from(pages + pages / 2 + 8).unwrap_or(usize::MAX);
        let lines = slots.div_ceil(LINE);
        const { assert!(EMPTY == 0, "zeroed memory is a set of empty slots") };
        let slots = <[AtomicU64]>::new_box_zeroed_with_elems(lines * LINE);
        let slots = slots.expect("address space for the resident set");
        let lines = ScatteredLines::new(lines).expect("address space for the resident set");
        ResidentSet { slots, lines }
    }

    /// How many slots there are, for the clock's hand to go round.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The number of the slot at a position of the iteration.
    pub(super) fn slot_at(&self, position: usize) -> usize {
        self.lines.entry_at(position)
    }

    /// How many slots without an entry there are from a position on, up to the end of the set at
    /// most, as far as whole lines tell: none for a position within a line.
    pub fn empty_from(&self, position: usize) -> usize {
        let entry = |slot: usize| Self::decode(self.slots[slot].load(Ordering::SeqCst));
        self.lines.empty_from(position, |slot| entry(slot).is_none())
    }

    fn encode(page: PageRef) -> u64 {
        debug_assert!(page.frames > 0 && page.frames <= PageRef::MAX_FRAMES);
        debug_assert!(page.id.0 + u64::from(page.frames) <= PageRef::MAX_ID);
        (page.id.0 << FRAMES_BITS) | u64::from(page.frames)
    }

    fn decode(entry: u64) -> Option<PageRef> {
        (entry != EMPTY && entry != TOMBSTONE).then(|| {
            let frames = entry & u64::from(PageRef::MAX_FRAMES);
            PageRef::new(entry >> FRAMES_BITS, frames as u32)
        })
    }

    fn first_slot(&self, entry: u64) -> usize {
        let hash = (entry >> FRAMES_BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash) * self.slots.len() as u128) >> 64) as usize
    }

    fn probe(&self, entry: u64) -> impl Iterator<Item = (usize, &AtomicU64)> {
        let first = self.first_slot(entry);
        let (before, after) = self.slots.split_at(first);
        (first..).zip(after).chain(before.iter().enumerate())
    }

    /// Adds a page that is not in the set. Returns the slot in which it is.
    ///
    /// # Panics
    /// If there are more pages than the set was made for.
    pub fn insert(&self, page: PageRef) -> usize {
        let entry = Self::encode(page);
        // A third of the slots is free at any time, but not the same ones: look again.
        for (at, slot) in (0..PASSES).flat_map(|_| self.probe(entry)) {
            let seen = slot.load(Ordering::Relaxed);
            if (seen == EMPTY || seen == TOMBSTONE)
                && slot.compare_exchange(seen, entry, Ordering::SeqCst, Ordering::Relaxed).is_ok()
            {
                self.lines.note_entry(at);
                return at;
            }
        }
        panic!("more resident pages than the resident set has slots");
    }

    /// Takes out a page that is in the set.
    ///
    /// # Panics
    /// If it is not.
    pub fn remove(&self, page: PageRef) {
        let entry = Self::encode(page);
        let found = self.probe(entry).find(|(_, slot)| slot.load(Ordering::Relaxed) == entry);
        let (_, slot) = found.unwrap_or_else(|| panic!("{page} is not in the resident set"));
        slot.store(TOMBSTONE, Ordering::Release);
    }

    /// Whether a page is in the set, with this size. If it is, the first slots that are looked at
    /// hold it; only where it is not, all are.
    pub fn contains(&self, page: PageRef) -> bool {
        let entry = Self::encode(page);
        self.probe(entry).any(|(_, slot)| slot.load(Ordering::Acquire) == entry)
    }

    /// The page in a slot, if there is one.
    pub(super) fn in_slot(&self, slot: usize) -> Option<PageRef> {
        Self::decode(self.slots[slot].load(Ordering::Acquire))
    }

    /// The page at a position of the iteration, below [`slots`](ResidentSet::slots), if there is
    /// one.
    pub fn at(&self, position: usize) -> Option<PageRef> {
        self.in_slot(self.slot_at(position))
    }

    /// Visits what is in the set.
    pub fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        let entries = self.slots.iter().map(|slot| slot.load(Ordering::Acquire));
        entries.filter_map(Self::decode).for_each(visit);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::scattered_lines::LINES_PASSED;

    fn contents(set: &ResidentSet) -> BTreeSet<PageRef> {
        let mut pages = BTreeSet::new();
        set.for_each(&mut |page| assert!(pages.insert(page), "{page} is there twice"));
        pages
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec((0u64..40, 1u32..4), 1..400)) {
            let set = ResidentSet::new(40);
            let mut model = BTreeSet::new();
            for (id, frames) in steps {
                let resident = model.iter().find(|page: &&PageRef| page.id.0 == id).copied();
                match resident {
                    Some(page) => {
                        set.remove(page);
                        model.remove(&page);
                    }
                    None => {
                        set.insert(PageRef::new(id, frames));
                        model.insert(PageRef::new(id, frames));
                    }
                }
            }
            prop_assert_eq!(contents(&set), model);
        }
    }

    #[test]
    fn a_full_set_that_turned_over_many_times_still_finds_everything() {
        let set = ResidentSet::new(100);
        (0..100).for_each(|id| _ = set.insert(PageRef::new(id, 1)));
        for id in 0..100_000 {
            set.remove(PageRef::new(id, 1));
            set.insert(PageRef::new(id + 100, 1));
        }
        assert_eq!(contents(&set), (100_000..100_100).map(|id| PageRef::new(id, 1)).collect());
    }

    #[test]
    fn threads_share_it() {
        let set = ResidentSet::new(64);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let set = &set;
                scope.spawn(move || {
                    for round in 0..20_000 {
                        let page = PageRef::new(thread * 1_000_000 + round % 97, 1);
                        set.insert(page);
                        set.remove(page);
                    }
                    set.insert(PageRef::new(thread, 7));
                });
            }
        });
        assert_eq!(contents(&set), (0..4).map(|id| PageRef::new(id, 7)).collect());
    }

    /// A pool may be much smaller than the set, which has room for the largest that it may become.
    #[test]
    fn the_iteration_jumps_over_what_is_empty() {
        let set = ResidentSet::new(1_000_000);
        let round = || {
            let (mut position, mut looks, mut found) = (0, 0, 0);
            while position < set.slots() {
                looks += 1;
                match set.empty_from(position) {
                    0 => {
                        found += usize::from(set.at(position).is_some());
                        position += 1;
                    }
                    empty => position += empty,
                }
            }
            (looks, found)
        };
        let jumps = (set.slots() / LINE).div_ceil(LINES_PASSED);
        assert_eq!(round(), (jumps, 0));
        (0..300).for_each(|id| _ = set.insert(PageRef::new(id, 1)));
        let (looks, found) = round();
        assert!(found == 300 && looks <= 300 * (LINE + 1) + jumps, "{looks} looks found {found}");
        // What has left is jumped over, too, at first a few lines at a time.
        (0..290).for_each(|id| set.remove(PageRef::new(id, 1)));
        let (looks, found) = round();
        assert!(found == 10 && looks <= 10 * (LINE + 1) + jumps + 290 / 32 + 1, "{looks} looks");
        let (looks, found) = round();
        assert!(found == 10 && looks <= 10 * (LINE + 1) + jumps, "{looks} looks found {found}");
        (300..600).for_each(|id| _ = set.insert(PageRef::new(id, 1)));
        assert_eq!(round().1, 310);
    }

    /// One thread inserts, because a second one would set a bit that is lost.
    #[test]
    fn no_entry_is_jumped_over_while_others_look_at_it() {
        let set = ResidentSet::new(64);
        let rounds = if cfg!(miri) { 50 } else { 100_000 };
        let ended = AtomicU64::new(0);
        let is_noted = |page: PageRef| {
            let at = (0..set.slots()).find(|slot| set.in_slot(*slot) == Some(page));
            set.lines.is_noted(at.unwrap())
        };
        let lost = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while ended.load(Ordering::Relaxed) == 0 {
                        (0..set.slots()).step_by(LINE).for_each(|line| _ = set.empty_from(line));
                    }
                });
            }
            let lost = (0..rounds).find(|round| {
                let page = PageRef::new(round % 97, 1);
                set.insert(page);
                // A thread that has just cleared the bit sets it again.
                let is_lost = !is_noted(page)
                    && !(0..100_000).any(|_| {
                        std::thread::yield_now();
                        is_noted(page)
                    });
                set.remove(page);
                is_lost
            });
            ended.store(1, Ordering::Relaxed);
            lost
        });
        assert_eq!(lost, None);
    }

    #[test]
    fn an_empty_set_takes_no_memory() {
        let resident_bytes = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() << 12
        };
        let before = resident_bytes();
        // 768 MiB of slots; the other tests of this process take a few.
        let set = ResidentSet::new(1 << 26);
        set.insert(PageRef::new(7, 1));
        let taken = resident_bytes().saturating_sub(before);
        assert!(set.contains(PageRef::new(7, 1)) && taken < 128 << 20, "{taken} bytes");
    }

    /// Pages leave in the order of the iteration, as a clock's hand finds them.
    #[test]
    fn searches_stay_short_behind_the_hand_and_ahead_of_it() {
        let set = ResidentSet::new(20_000);
        (0..20_000).for_each(|id| _ = set.insert(PageRef::new(id, 1)));
        let mut hand = 0;
        let mut searched = 0;
        for id in 20_000..220_000 {
            let gone = (0..).find_map(|_| {
                hand = (hand + 1) % set.slots();
                set.at(hand)
            });
            set.remove(gone.unwrap());
            let entry = ResidentSet::encode(PageRef::new(id, 1));
            searched += set
                .probe(entry)
                .position(|(_, slot)| matches!(slot.load(Ordering::Relaxed), EMPTY | TOMBSTONE))
                .unwrap();
            set.insert(PageRef::new(id, 1));
        }
        assert!(searched < 200_000 * 5, "{} slots per insertion", searched / 200_000);
    }

    #[test]
    fn the_largest_reference_fits() {
        let set = ResidentSet::new(1);
        let frames = PageRef::MAX_FRAMES;
        let page = PageRef::new(PageRef::MAX_ID - u64::from(frames), frames);
        set.insert(PageRef::new(0, 1));
        set.insert(page);
        assert_eq!(contents(&set).last(), Some(&page));
    }
}
