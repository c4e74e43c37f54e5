//! One state word for every page of the file, lazily backed.
//!
//! The array is as long as the file has pages, but memory comes only for words that were written:
//! 8 bytes for each page that was ever resident (in whole pages of 512 neighbours), none for the
//! rest of the file. It grows with the file and never moves.
//!
//! Random accesses to a large file miss the TLB for the state as well as for the page. So in pools
//! with huge pages the first part of the array, up to a 64th of the pool's size, comes 2 MiB at a
//! time: states of 1 GiB of the file. That holds all states of a file up to eight times as large
//! as its pool, and costs at most 1.6 % of the pool where few of them are used. The array's last
//! 2 MiB count only once half of them are in use, so a file below 512 MiB has none. It brings
//! nothing at 2 GiB of pages, where the TLB holds the states' 1,000 small pages as well; 2 to 6 %
//! of a random read at 8 GiB and 5 to 10 % at 32 GiB (the more if the pages are huge too).

#![allow(unsafe_code)]

use std::mem::size_of;

use vellum_vm::ReserveError;
#[cfg(not(feature = "model"))]
use vellum_vm::{HUGE_PAGE_SIZE, Reservation};

use crate::page::PageId;
use crate::page::state::PageState;
use crate::sync::{AtomicU64, Ordering};

/// The state words of all pages.
#[derive(Debug)]
pub(crate) struct StateArray {
    words: Words,
    pages: AtomicU64,
    /// As many bytes of the array may come in huge pages.
    huge: AtomicU64,
}

#[cfg(not(feature = "model"))]
type Words = Reservation;

/// Shuttle's atomics are no plain words, so the model has a small array of them.
#[cfg(feature = "model")]
type Words = Vec<PageState>;

const _: () = assert!(cfg!(feature = "model") || size_of::<PageState>() == size_of::<u64>());

impl StateArray {
    /// One part in so many of a pool's bytes is what its states may take in huge pages.
    pub(crate) const HUGE_SHARE: u64 = 64;

    #[cfg(not(feature = "model"))]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = Reservation::new(Self::bytes(pages), "page states")?;
        Ok(StateArray { words, pages: AtomicU64::new(pages), huge: AtomicU64::new(0) })
    }

    #[cfg(feature = "model")]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = (0..256).map(|_| PageState::evicted()).collect();
        Ok(StateArray { words, pages: AtomicU64::new(pages), huge: AtomicU64::new(0) })
    }

    #[cfg(not(feature = "model"))]
    fn bytes(pages: u64) -> usize {
        usize::try_from(pages.max(1)).unwrap_or(usize::MAX).saturating_mul(size_of::<PageState>())
    }

    /// Makes room for `pages` words; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        #[cfg(not(feature = "model"))]
        self.words.grow(Self::bytes(pages))?;
        self.pages.fetch_max(pages, Ordering::AcqRel);
        self.apply_huge_pages();
        Ok(())
    }

    /// Lets huge pages fill the array from now on, as far as it is in use and up to `limit` bytes.
    pub(crate) fn use_huge_pages(&self, limit: u64) {
        self.huge.store(limit, Ordering::Relaxed);
        self.apply_huge_pages();
    }

    fn apply_huge_pages(&self) {
        #[cfg(not(feature = "model"))]
        {
            let limit = usize::try_from(self.huge.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            let used = Self::bytes(self.pages()).saturating_add(HUGE_PAGE_SIZE / 2);
            // Rounded down to whole huge pages, and nothing where it was asked for before.
            self.words.use_huge_pages(used.min(limit));
        }
    }

    /// How many pages have a word.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// The word of `page`, if the file is that long.
    #[inline(always)]
    pub(crate) fn get(&self, page: PageId) -> Option<&PageState> {
        if page.0 >= self.pages.load(Ordering::Acquire) {
            return None;
        }
        #[cfg(not(feature = "model"))]
        // SAFETY: the reservation holds at least `pages` words (it grows before the count does),
        // it is aligned to 4 KiB, lives as long as `self`, and any bit pattern is a valid word.
        unsafe {
            Some(&*self.words.base().as_ptr().cast::<PageState>().add(page.0 as usize))
        }
        #[cfg(feature = "model")]
        self.words.get(page.0 as usize)
    }
}

#[cfg(all(test, not(feature = "model")))]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use super::*;

    const GIB: u64 = (1 << 30) / 4096;

    /// Writes every word, and returns the KiB of the array that are in huge pages.
    fn filled(states: &StateArray) -> u64 {
        (0..states.pages()).for_each(|page| {
            let state = states.get(PageId(page)).unwrap();
            let seen = state.load();
            assert!(state.try_lock(seen), "the word of page {page} was changed: {seen:?}");
            let _ = state.unlock(crate::page::state::Leave::Evicted, false);
        });
        let start = format!("{:x}-", states.words.base().addr().get());
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let first = text.lines().skip_while(|line| !line.starts_with(&start));
        let huge = first.into_iter().find_map(|line| line.strip_prefix("AnonHugePages:"));
        huge.unwrap().trim().trim_end_matches(" kB").trim().parse().unwrap()
    }

    /// Nothing can be said where the kernel does not give huge pages.
    fn found(kib: u64) -> Option<u64> {
        vellum_vm::probe::huge_pages().is_ok().then_some(kib)
    }

    #[test]
    fn states_of_a_small_file_or_a_small_pool_are_small() {
        let half = StateArray::new(GIB / 2 - 1).unwrap();
        half.use_huge_pages(u64::MAX);
        assert_eq!(filled(&half), 0);
        let large = StateArray::new(2 * GIB).unwrap();
        large.use_huge_pages((2 << 20) - 1);
        assert_eq!(filled(&large), 0);
        large.use_huge_pages(2 << 20);
        assert_eq!(found(filled(&large)), found(2 << 10));
    }

    #[test]
    fn states_become_huge_as_the_file_grows() {
        let states = StateArray::new(1).unwrap();
        states.use_huge_pages(4 << 20);
        for pages in [GIB / 4, GIB / 2 - 1] {
            states.grow(pages).unwrap();
            assert_eq!(filled(&states), 0);
        }
        for (pages, huge) in [(GIB / 2, 2), (GIB, 2), (GIB * 3 / 2, 4), (3 * GIB, 4)] {
            states.grow(pages).unwrap();
            assert_eq!(found(filled(&states)), found(huge << 10), "{pages}");
        }
        let first = states.get(PageId(7)).unwrap().load();
        assert_eq!(first.version(), 6, "the words were kept");
    }
}
