//! A bit for each page of the file that is not the head of a page that may be brought in: it was
//! freed, or lies behind the head of a page of several frames.
//!
//! Memory comes for bits that were set: a byte for eight neighbours, in whole pages of 32,768.

#![allow(unsafe_code)]

#[cfg(not(feature = "model"))]
use vellum_vm::Reservation;
use vellum_vm::{Errno, ReserveError};

use crate::page::PageId;
use crate::sync::{AtomicU64, Ordering};

/// See the module's documentation. All bits are clear at first.
#[derive(Debug)]
pub(crate) struct FreeBits {
    words: Words,
}

#[cfg(not(feature = "model"))]
type Words = Reservation;
#[cfg(feature = "model")]
type Words = Vec<AtomicU64>;

impl FreeBits {
    #[cfg(not(feature = "model"))]
    pub(crate) fn new(pages: u64) -> Result<FreeBits, ReserveError> {
        Ok(FreeBits { words: Reservation::new(Self::bytes(pages), "free pages")? })
    }

    #[cfg(feature = "model")]
    pub(crate) fn new(_pages: u64) -> Result<FreeBits, ReserveError> {
        Ok(FreeBits { words: (0..8).map(|_| AtomicU64::new(0)).collect() })
    }

    #[cfg(not(feature = "model"))]
    fn bytes(pages: u64) -> usize {
        usize::try_from(pages.div_ceil(64).max(1)).unwrap_or(usize::MAX).saturating_mul(8)
    }

    /// Makes room for so many pages; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        #[cfg(not(feature = "model"))]
        return self.words.grow(Self::bytes(pages));
        #[cfg(feature = "model")]
        {
            assert!(pages <= 8 * 64);
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

    /// The word that has a page's bit, and the bit.
    fn bit(&self, page: PageId) -> (&AtomicU64, u64) {
        let (word, bit) = (page.0 as usize / 64, 1 << (page.0 % 64));
        #[cfg(not(feature = "model"))]
        {
            assert!((word + 1) * 8 <= self.words.len());
            // SAFETY: within the reservation, aligned, and any bit pattern is a valid word.
            (unsafe { &*self.words.base().as_ptr().cast::<AtomicU64>().add(word) }, bit)
        }
        #[cfg(feature = "model")]
        (&self.words[word], bit)
    }

    pub(crate) fn contains(&self, page: PageId) -> bool {
        let (word, bit) = self.bit(page);
        word.load(Ordering::SeqCst) & bit != 0
    }

    /// Sets the bit; true if it was clear.
    pub(crate) fn set(&self, page: PageId) -> bool {
        let (word, bit) = self.bit(page);
        word.fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    /// Clears the bit.
    pub(crate) fn clear(&self, page: PageId) {
        let (word, bit) = self.bit(page);
        word.fetch_and(!bit, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_a_bit_of_its_own() {
        let bits = FreeBits::new(1).unwrap();
        bits.grow(100_000).unwrap();
        for page in [0, 63, 64, 65, 32_768, 99_999].map(PageId) {
            assert!(!bits.contains(page));
            assert!(bits.set(page) && !bits.set(page) && bits.contains(page));
            assert!(!bits.contains(PageId(page.0 ^ 2)));
        }
        bits.clear(PageId(64));
        assert!(!bits.contains(PageId(64)) && bits.contains(PageId(65)));
    }
}
