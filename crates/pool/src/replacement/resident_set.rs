//! The set of resident pages: its size follows memory, not storage (SIGMOD'23, section 3.4).
//!
//! An open-addressing table of one word per slot, insertions and removals by compare-and-exchange.
//! It is not consulted on hits; it exists to be iterated by the clock's hand, which a dense array
//! makes cheap. Removed entries leave a tombstone that the next insertion reuses, so entries never
//! move, and an entry that is there throughout an iteration is seen by it.
//!
//! The iteration jumps from one cache line of slots to another far away. In sequential order the
//! hand would empty the slots that it has passed and leave those ahead full: insertions there would
//! search a good part of the set, in time that grows with the pool (measured: 200 us in a set of
//! 2^18 pages).

use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::FromZeros;

use crate::page::PageRef;

const EMPTY: u64 = 0;
const TOMBSTONE: u64 = u64::MAX;
const FRAMES_BITS: u32 = 24;
/// Looks at the whole set for a free slot before that counts as a broken promise.
const PASSES: u32 = 8;

/// Slots in a cache line.
const LINE: usize = 8;

fn are_coprime(a: usize, b: usize) -> bool {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}

/// A concurrent set of [`PageRef`]s with a fixed capacity.
#[derive(Debug)]
pub struct ResidentSet {
    slots: Box<[AtomicU64]>,
    /// The step from one line to the next in the order of iteration. It has no common divisor with
    /// the number of lines, so that the iteration reaches all lines.
    stride: usize,
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
        // The golden section, so that the lines that follow each other lie evenly spread.
        let golden = (lines as f64 * 0.618_034) as usize;
        let stride = (golden.max(1)..).find(|stride| are_coprime(*stride, lines)).unwrap_or(1);
        const { assert!(EMPTY == 0, "zeroed memory is a set of empty slots") };
        let slots = <[AtomicU64]>::new_box_zeroed_with_elems(lines * LINE);
        let slots = slots.expect("address space for the resident set");
        ResidentSet { slots, stride }
    }

    /// How many slots there are, for the clock's hand to go round.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The slot at a position of the iteration.
    fn at_position(&self, position: usize) -> &AtomicU64 {
        let lines = self.slots.len() / LINE;
        // No overflow below 2^32 lines, which is a pool of 90 TiB.
        let line = (position / LINE).wrapping_mul(self.stride) % lines;
        &self.slots[line * LINE + position % LINE]
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

    fn probe(&self, entry: u64) -> impl Iterator<Item = &AtomicU64> {
        let (before, after) = self.slots.split_at(self.first_slot(entry));
        after.iter().chain(before)
    }

    /// Adds a page that is not in the set.
    ///
    /// # Panics
    /// If there are more pages than the set was made for.
    pub fn insert(&self, page: PageRef) {
        let entry = Self::encode(page);
        // A third of the slots is free at any time, but not the same ones: look again.
        for slot in (0..PASSES).flat_map(|_| self.probe(entry)) {
            let seen = slot.load(Ordering::Relaxed);
            if (seen == EMPTY || seen == TOMBSTONE)
                && slot.compare_exchange(seen, entry, Ordering::Release, Ordering::Relaxed).is_ok()
            {
                return;
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
        let slot = self.probe(entry).find(|slot| slot.load(Ordering::Relaxed) == entry);
        let slot = slot.unwrap_or_else(|| panic!("{page} is not in the resident set"));
        slot.store(TOMBSTONE, Ordering::Release);
    }

    /// Whether a page is in the set, with this size. If it is, the first slots that are looked at
    /// hold it; only where it is not, all are.
    pub fn contains(&self, page: PageRef) -> bool {
        let entry = Self::encode(page);
        self.probe(entry).any(|slot| slot.load(Ordering::Acquire) == entry)
    }

    /// The page at a position of the iteration, below [`slots`](ResidentSet::slots), if there is
    /// one.
    pub fn at(&self, position: usize) -> Option<PageRef> {
        Self::decode(self.at_position(position).load(Ordering::Acquire))
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
        (0..100).for_each(|id| set.insert(PageRef::new(id, 1)));
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

    #[test]
    fn the_iteration_comes_to_every_slot_once() {
        for pages in [0, 1, 7, 8, 9, 100, 1_000, 4_096, 10_007] {
            let set = ResidentSet::new(pages);
            let slots: BTreeSet<usize> = (0..set.slots())
                .map(|position| std::ptr::from_ref(set.at_position(position)).addr())
                .collect();
            assert_eq!(slots.len(), set.slots());
        }
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
        (0..20_000).for_each(|id| set.insert(PageRef::new(id, 1)));
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
                .position(|slot| matches!(slot.load(Ordering::Relaxed), EMPTY | TOMBSTONE))
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
