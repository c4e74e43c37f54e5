//! Which pages are dirty, and their order for write-back (paper, section 3.2).
//!
//! The paper has a red-black tree for each processor, sorted by place on the device. This is a bit
//! for each frame, and an array in which the keys are sorted when pages are written back. A write
//! fault, which is frequent, sets one bit and takes no lock; a write-back, which waits for storage
//! in any case, reads one bit for each frame and sorts what it found. Trees without allocation
//! would need three links for each frame, and a lock in every first write to a page.

use core::ops::RangeInclusive;

use crate::frame::{Frame, Key};
use crate::sync::{AtomicU64, Ordering};

/// The dirty pages.
#[derive(Debug)]
pub(crate) struct DirtySet<'a> {
    /// A bit for each frame.
    bits: &'a [AtomicU64],
    /// Room for the key of each frame. The thread that has `gate` uses it.
    sorted: &'a [AtomicU64],
    gate: &'a AtomicU64,
    keys: &'a [AtomicU64],
}

impl<'a> DirtySet<'a> {
    /// Words for the bits of so many frames.
    pub(crate) const fn bit_words(frames: u32) -> usize {
        frames.div_ceil(u64::BITS) as usize
    }

    /// All words are zero: every page is clean.
    pub(crate) fn new(
        bits: &'a [AtomicU64],
        sorted: &'a [AtomicU64],
        gate: &'a AtomicU64,
        keys: &'a [AtomicU64],
    ) -> Self {
        assert_eq!(sorted.len(), keys.len(), "there is room for the key of each frame");
        Self { bits, sorted, gate, keys }
    }

    pub(crate) fn insert(&self, frame: Frame) {
        let (word, bit) = self.bit(frame);
        word.fetch_or(bit, Ordering::AcqRel);
    }

    pub(crate) fn remove(&self, frame: Frame) {
        let (word, bit) = self.bit(frame);
        word.fetch_and(!bit, Ordering::AcqRel);
    }

    fn bit(&self, frame: Frame) -> (&AtomicU64, u64) {
        (&self.bits[(frame / u64::BITS) as usize], 1 << (frame % u64::BITS))
    }

    /// How many pages are dirty.
    pub(crate) fn count(&self) -> u64 {
        self.bits.iter().map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// The first dirty frame from this one on.
    pub(crate) fn next(&self, from: Frame) -> Option<Frame> {
        let first = (from / u64::BITS) as usize;
        // Frames before this one are none of the first word's.
        let mut mask = u64::MAX << (from % u64::BITS);
        for (at, word) in self.bits.iter().enumerate().skip(first) {
            let bits = word.load(Ordering::Acquire) & mask;
            if bits != 0 {
                return Some(at as Frame * u64::BITS + bits.trailing_zeros());
            }
            mask = u64::MAX;
        }
        None
    }

    /// Sorts the keys of the dirty pages in a range, if no other thread uses the array.
    pub(crate) fn try_sort(&self, range: &RangeInclusive<Key>) -> Option<Sorted<'_>> {
        self.gate.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).ok()?;
        let mut sorted = Sorted { set: self, count: 0 };
        for (at, word) in self.bits.iter().enumerate() {
            let mut bits = word.load(Ordering::Acquire);
            while bits != 0 {
                let frame = at * u64::BITS as usize + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let key = self.keys[frame].load(Ordering::Acquire);
                if (range.start().word()..=range.end().word()).contains(&key) {
                    self.sorted[sorted.count].store(key, Ordering::Relaxed);
                    sorted.count += 1;
                }
            }
        }
        heap_sort(&self.sorted[..sorted.count]);
        Some(sorted)
    }
}

/// The keys of dirty pages, in order. No other thread sorts meanwhile.
#[derive(Debug)]
pub(crate) struct Sorted<'a> {
    set: &'a DirtySet<'a>,
    count: usize,
}

impl Sorted<'_> {
    /// The key at a position; `None` after the last one.
    pub(crate) fn get(&self, position: usize) -> Option<Key> {
        let words = &self.set.sorted[..self.count];
        Key::of_word(words.get(position)?.load(Ordering::Relaxed))
    }
}

impl Drop for Sorted<'_> {
    fn drop(&mut self) {
        self.set.gate.store(0, Ordering::Release);
    }
}

/// Sorts words in place, without memory. The caller alone uses them.
fn heap_sort(words: &[AtomicU64]) {
    for root in (0..words.len() / 2).rev() {
        sift_down(words, root);
    }
    for end in (1..words.len()).rev() {
        swap(words, 0, end);
        sift_down(&words[..end], 0);
    }
}

/// Restores the order of a heap, in which only the root may be too small.
fn sift_down(words: &[AtomicU64], mut root: usize) {
    let value = |at: usize| words[at].load(Ordering::Relaxed);
    loop {
        let mut child = 2 * root + 1;
        if child >= words.len() {
            return;
        }
        if child + 1 < words.len() && value(child + 1) > value(child) {
            child += 1;
        }
        if value(root) >= value(child) {
            return;
        }
        swap(words, root, child);
        root = child;
    }
}

fn swap(words: &[AtomicU64], one: usize, other: usize) {
    let value = words[one].load(Ordering::Relaxed);
    words[one].store(words[other].load(Ordering::Relaxed), Ordering::Relaxed);
    words[other].store(value, Ordering::Relaxed);
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sorted_array_has_the_same_words_in_order(words: Vec<u64>) {
            let atomics: Vec<AtomicU64> = words.iter().copied().map(AtomicU64::new).collect();
            heap_sort(&atomics);
            let mut expected = words;
            expected.sort_unstable();
            let found: Vec<u64> = atomics.iter().map(|word| word.load(Ordering::Relaxed)).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn dirty_pages_of_a_range_come_in_order() {
        let words = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let key = |file, page| Key::new(file, page).unwrap();
        let frames = 200;
        let (bits, sorted, gate) = (words(4), words(frames), AtomicU64::new(0));
        let keys: Vec<AtomicU64> = (0..frames as u64)
            .map(|frame| AtomicU64::new(key((frame % 3) as u32, 1000 - frame).word()))
            .collect();
        let set = DirtySet::new(&bits, &sorted, &gate, &keys);
        (0..frames as u32).filter(|frame| frame % 2 == 0).for_each(|frame| set.insert(frame));
        set.remove(0);
        assert_eq!(set.count(), 99);
        for (from, next) in [(0, Some(2)), (2, Some(2)), (63, Some(64)), (197, Some(198))] {
            assert_eq!(set.next(from), next);
        }
        assert_eq!((set.next(199), set.next(1000)), (None, None));

        let sorted = set.try_sort(&(key(0, 900)..=key(1, 899))).unwrap();
        let found: Vec<Key> = (0..).map_while(|position| sorted.get(position)).collect();
        let mut expected: Vec<Key> = (2..frames as u64)
            .step_by(2)
            .map(|frame| key((frame % 3) as u32, 1000 - frame))
            .filter(|found| *found >= key(0, 900) && *found <= key(1, 899))
            .collect();
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert!(!found.is_empty());

        assert!(set.try_sort(&(key(0, 0)..=key(2, 0))).is_none(), "one at a time");
        drop(sorted);
        assert!(set.try_sort(&(key(0, 0)..=key(2, 0))).is_some());
    }
}
