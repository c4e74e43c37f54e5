//! The hash table: from the number of a page to that of its frame.
//!
//! A bucket is a line of the cache, with eight entries. A page's entry lies where its hash says if
//! that place is free, or else in the next free place of the bucket, so most lookups find it with
//! one comparison. Readers take no latch: they check the frame that they find. Changes take that of
//! the bucket's stripe. Entries for which a bucket has no place are in its stripe; with a quarter
//! of the entries in use these are a few of ten thousand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Result;

use super::memory::Words;

/// Entries of a bucket.
const ENTRIES: usize = 8;
/// The bits of a frame's number in an entry; the page's number plus one is above.
const FRAME_BITS: u32 = 28;
/// Buckets that share a latch have the same remainder by this number.
const STRIPES: usize = 1 << 9;

/// Pages from this number on have no place in an entry.
pub const PAGES_MAX: u64 = (1 << (64 - FRAME_BITS)) - 1;
/// Frames from this number on have none either.
pub const FRAMES_MAX: u64 = 1 << FRAME_BITS;

/// Entries that their buckets have no place for, on lines of its own.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Stripe(Mutex<Vec<u64>>);

/// See the module's documentation.
#[derive(Debug)]
pub struct Table {
    words: Words,
    buckets: u64,
    stripes: Box<[Stripe]>,
}

fn entry(page: u64, frame: u32) -> u64 {
    ((page + 1) << FRAME_BITS) | u64::from(frame)
}

#[inline(always)]
fn is_of(entry: u64, page: u64) -> bool {
    entry >> FRAME_BITS == page + 1
}

#[inline(always)]
fn frame_of(entry: u64) -> u32 {
    (entry & (FRAMES_MAX - 1)) as u32
}

impl Table {
    /// A table for so many frames.
    ///
    /// # Errors
    /// No memory.
    pub fn new(frames: u64) -> Result<Table> {
        let buckets = (frames / 2).max(16);
        Ok(Table {
            words: Words::new(buckets * ENTRIES as u64)?,
            buckets,
            stripes: (0..STRIPES.min(buckets as usize)).map(|_| Stripe::default()).collect(),
        })
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> u64 {
        (size_of_val(self.words.all()) + size_of_val(&*self.stripes)) as u64
    }

    /// The number of a page's bucket, and the place in it that the page prefers.
    #[inline(always)]
    fn hash(&self, page: u64) -> (usize, usize) {
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The hash as a fraction, times the number of buckets: a bucket, and where within it.
        let scaled = u128::from(hash) * u128::from(self.buckets);
        ((scaled >> 64) as usize, (scaled as u64 >> (64 - ENTRIES.trailing_zeros())) as usize)
    }

    #[inline(always)]
    fn bucket(&self, number: usize) -> &[AtomicU64] {
        &self.words.all()[number * ENTRIES..][..ENTRIES]
    }

    /// The frame that has a page, or had it a moment ago. None also if the entry was being moved,
    /// or lies in the stripe: a caller looks again under the [latch](Table::latch).
    #[inline(always)]
    pub fn find(&self, page: u64) -> Option<u32> {
        let (number, preferred) = self.hash(page);
        let bucket = self.bucket(number);
        for step in 0..ENTRIES {
            let entry = bucket[(preferred + step) % ENTRIES].load(Ordering::Acquire);
            if is_of(entry, page) {
                return Some(frame_of(entry));
            }
        }
        None
    }

    /// Latches the bucket of a page.
    pub fn latch(&self, page: u64) -> Latched<'_> {
        let (number, preferred) = self.hash(page);
        let stripe = &self.stripes[number % self.stripes.len()];
        let beyond = stripe.0.lock().unwrap_or_else(PoisonError::into_inner);
        Latched { table: self, page, number, preferred, beyond }
    }
}

/// A page's bucket, which no other thread changes meanwhile.
#[derive(Debug)]
pub struct Latched<'a> {
    table: &'a Table,
    page: u64,
    number: usize,
    preferred: usize,
    beyond: MutexGuard<'a, Vec<u64>>,
}

impl Latched<'_> {
    /// The place in the bucket with the first entry for which `wanted` is true.
    fn place(&self, wanted: impl Fn(u64) -> bool) -> Option<&AtomicU64> {
        let bucket = self.table.bucket(self.number);
        (0..ENTRIES)
            .map(|step| &bucket[(self.preferred + step) % ENTRIES])
            .find(|place| wanted(place.load(Ordering::Relaxed)))
    }

    /// The page's frame.
    pub fn find(&self) -> Option<u32> {
        let inside = self.place(|entry| is_of(entry, self.page));
        let inside = inside.map(|place| place.load(Ordering::Relaxed));
        let beyond = || self.beyond.iter().copied().find(|entry| is_of(*entry, self.page));
        inside.or_else(beyond).map(frame_of)
    }

    /// Enters the page, which is not there yet.
    pub fn insert(&mut self, frame: u32) {
        let entry = entry(self.page, frame);
        match self.place(|entry| entry == 0) {
            Some(place) => place.store(entry, Ordering::Release),
            None => self.beyond.push(entry),
        }
    }

    /// Removes the page, and moves an entry of its bucket to the free place.
    pub fn remove(&mut self) {
        let Some(place) = self.place(|entry| is_of(entry, self.page)) else {
            self.beyond.retain(|entry| !is_of(*entry, self.page));
            return;
        };
        let of_bucket = |entry: &u64| self.table.hash((entry >> FRAME_BITS) - 1).0 == self.number;
        let moved = self.beyond.iter().position(of_bucket);
        let entry = moved.map_or(0, |at| self.beyond[at]);
        place.store(entry, Ordering::Release);
        if let Some(at) = moved {
            self.beyond.swap_remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(table: &Table, page: u64) -> Option<u32> {
        table.find(page).or_else(|| table.latch(page).find())
    }

    #[test]
    fn finds_what_was_entered_and_nothing_else() {
        let table = Table::new(1024).unwrap();
        (0..1024_u32).for_each(|frame| table.latch(u64::from(frame) * 8 + 3).insert(frame));
        for page in 0..1024 * 8 {
            let expected = (page % 8 == 3).then_some((page / 8) as u32);
            assert_eq!(find(&table, page), expected, "page {page}");
        }
        (0..512).for_each(|frame| table.latch(frame * 8 + 3).remove());
        for page in 0..1024 * 8 {
            let expected = (page % 8 == 3 && page / 8 >= 512).then_some((page / 8) as u32);
            assert_eq!(find(&table, page), expected, "page {page}");
        }
    }

    #[test]
    fn full_buckets_lose_nothing() {
        // Ten times as many pages as the table was made for.
        let table = Table::new(32).unwrap();
        (0..320_u32).for_each(|frame| table.latch(u64::from(frame)).insert(frame));
        assert!(table.stripes.iter().any(|stripe| !stripe.0.lock().unwrap().is_empty()));
        for page in 0..320 {
            assert_eq!(find(&table, page), Some(page as u32));
        }
        (0..320).step_by(3).for_each(|page| table.latch(page).remove());
        for page in 0..320 {
            assert_eq!(find(&table, page), (page % 3 != 0).then_some(page as u32), "page {page}");
        }
        (0..320).for_each(|page| table.latch(page).remove());
        assert!(table.words.all().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        assert!(table.stripes.iter().all(|stripe| stripe.0.lock().unwrap().is_empty()));
    }

    #[test]
    fn most_pages_are_found_without_a_latch() {
        let table = Table::new(1 << 14).unwrap();
        (0..1_u64 << 14).for_each(|page| table.latch(page * 5).insert(page as u32));
        let missed = (0..1 << 14).filter(|page| table.find(page * 5).is_none()).count();
        assert!(missed < 20, "{missed} of 16384 pages lie beyond their buckets");
    }
}
