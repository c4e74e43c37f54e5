//! A bit for each page of the file, or for each group of pages, in lazily backed memory.
//!
//! Only bits that were set take memory: a byte for eight neighbours, in whole pages of 32,768 bits.

#![allow(unsafe_code)]

#[cfg(not(feature = "model"))]
use vellum_vm::Reservation;
use vellum_vm::{Errno, ReserveError};

use crate::sync::{AtomicU64, Ordering};

/// Bits in a word.
pub(crate) const WORD_BITS: u64 = 64;

/// See the module's documentation. All bits are clear at first.
#[derive(Debug)]
pub(crate) struct PageBits {
    words: Words,
}

#[cfg(not(feature = "model"))]
type Words = Reservation;
#[cfg(feature = "model")]
type Words = Vec<AtomicU64>;

impl PageBits {
    #[cfg(not(feature = "model"))]
    pub(crate) fn new(bits: u64, purpose: &'static str) -> Result<PageBits, ReserveError> {
        Ok(PageBits { words: Reservation::new(Self::bytes(bits), purpose)? })
    }

    #[cfg(feature = "model")]
    pub(crate) fn new(_bits: u64, _purpose: &'static str) -> Result<PageBits, ReserveError> {
        Ok(PageBits { words: (0..8).map(|_| AtomicU64::new(0)).collect() })
    }

    #[cfg(not(feature = "model"))]
    fn bytes(bits: u64) -> usize {
        usize::try_from(bits.div_ceil(WORD_BITS).max(1)).unwrap_or(usize::MAX).saturating_mul(8)
    }

    /// Makes room for so many bits; never shrinks.
    pub(crate) fn grow(&self, bits: u64) -> Result<(), ReserveError> {
        #[cfg(not(feature = "model"))]
        return self.words.grow(Self::bytes(bits));
        #[cfg(feature = "model")]
        {
            assert!(bits <= 8 * WORD_BITS);
            Ok(())
        }
    }

    /// Bytes of memory that the bits take at this moment.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Errno> {
        #[cfg(not(feature = "model"))]
        return self.words.resident_bytes();
        #[cfg(feature = "model")]
        Ok(0)
    }

    /// The word of this index, which [`grow`](Self::grow) has made room for.
    #[inline]
    fn word(&self, index: u64) -> &AtomicU64 {
        let index = index as usize;
        #[cfg(not(feature = "model"))]
        {
            assert!((index + 1) * 8 <= self.words.len());
            // SAFETY: within the reservation, aligned, and any bit pattern is a valid word.
            unsafe { &*self.words.base().as_ptr().cast::<AtomicU64>().add(index) }
        }
        #[cfg(feature = "model")]
        &self.words[index]
    }

    /// The word that has a bit, and the bit in it.
    #[inline]
    fn bit(&self, bit: u64) -> (&AtomicU64, u64) {
        (self.word(bit / WORD_BITS), 1 << (bit % WORD_BITS))
    }

    #[inline]
    pub(crate) fn contains(&self, bit: u64) -> bool {
        let (word, mask) = self.bit(bit);
        word.load(Ordering::SeqCst) & mask != 0
    }

    /// Sets a bit; true if it was clear.
    pub(crate) fn set(&self, bit: u64) -> bool {
        let (word, mask) = self.bit(bit);
        word.fetch_or(mask, Ordering::SeqCst) & mask == 0
    }

    /// Clears a bit.
    pub(crate) fn clear(&self, bit: u64) {
        let (word, mask) = self.bit(bit);
        word.fetch_and(!mask, Ordering::SeqCst);
    }

    /// Visits the bits that are set among those of some words, in ascending order. Each word is
    /// read once, when the visit comes to it.
    pub(crate) fn for_each_in(&self, words: std::ops::Range<u64>, mut visit: impl FnMut(u64)) {
        for index in words {
            let mut left = self.word(index).load(Ordering::SeqCst);
            while left != 0 {
                visit(index * WORD_BITS + u64::from(left.trailing_zeros()));
                left &= left - 1;
            }
        }
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_a_bit_of_its_own() {
        let bits = PageBits::new(1, "a test").unwrap();
        bits.grow(100_000).unwrap();
        for page in [0, 63, 64, 65, 32_768, 99_999] {
            assert!(!bits.contains(page));
            assert!(bits.set(page) && !bits.set(page) && bits.contains(page));
            assert!(!bits.contains(page ^ 2));
        }
        bits.clear(64);
        assert!(!bits.contains(64) && bits.contains(65));
        let mut found = Vec::new();
        bits.for_each_in(0..2, |page| found.push(page));
        bits.for_each_in(512..100_000 / WORD_BITS + 1, |page| found.push(page));
        assert_eq!(found, [0, 63, 65, 32_768, 99_999]);
    }
}
