//! Page states in other forms than the pool's: the paper's section 3.6, from a reader's view. Each
//! form only has the check of an optimistic read, as fast as possible.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering, fence};

use anyhow::{Context as _, Result};
use vellum_pool::device::{PageRange, Surface};
use vellum_pool::{BackendChoice, PAGE_SIZE};
use vellum_vm::Advice;

use super::Resident;
use super::pattern_device::HEADER;

/// The state in the upper byte: a page that can be read.
const UNLOCKED: u64 = HEADER >> 56;
/// Of the two bits: neither locked nor evicted.
const READABLE: u64 = 1;
/// Pages whose two bits share a word.
const PAIRS: u64 = 32;

/// Words in memory of chosen pages: of 4 KiB, or huge ones.
#[derive(Debug)]
struct Words {
    surface: Surface,
    count: u64,
}

impl Words {
    fn new(count: u64, value: u64, huge: bool) -> Result<Words> {
        // Room for one huge page more, so that all words can lie on whole ones.
        let pages = (count * 8).div_ceil(PAGE_SIZE as u64) + 512;
        let surface = Surface::reserve(pages, BackendChoice::Auto)?;
        if huge {
            let all = PageRange { start: 0, count: pages };
            surface.advise(all, Advice::HugePage).context("asking for huge pages")?;
        }
        let words = Words { surface, count };
        (0..count).for_each(|index| words.get(index).store(value, Ordering::Relaxed));
        Ok(words)
    }

    #[inline(always)]
    fn get(&self, index: u64) -> &AtomicU64 {
        assert!(index < self.count, "no word {index}");
        // SAFETY: within the surface by the check above, aligned, and any bits are a word.
        unsafe { &*self.surface.base().as_ptr().cast::<AtomicU64>().add(index as usize) }
    }
}

/// One word a page, as the pool has it.
#[derive(Debug)]
pub struct FullWords(Words);

impl FullWords {
    /// For so many pages, on pages of 4 KiB or on huge ones.
    ///
    /// # Errors
    /// No memory, or no huge pages.
    pub fn new(pages: u64, huge: bool) -> Result<FullWords> {
        Words::new(pages, HEADER, huge).map(FullWords)
    }

    /// Eight bytes of a page, if no thread changed it.
    ///
    /// # Safety
    /// As [`Resident::plain`].
    #[inline(always)]
    pub unsafe fn read(&self, pages: &Resident, page: u64, offset: usize) -> Option<u64> {
        let state = self.0.get(page);
        let seen = state.load(Ordering::Acquire);
        if seen >> 56 != UNLOCKED {
            return None;
        }
        // SAFETY: the caller's promise.
        let word = unsafe { pages.plain(page, offset) };
        fence(Ordering::Acquire);
        (state.load(Ordering::Relaxed) == seen).then_some(word)
    }
}

/// Two bits a page; the version is the page's first word.
#[derive(Debug)]
pub struct TwoBits(Words);

impl TwoBits {
    /// For so many pages.
    ///
    /// # Errors
    /// No memory.
    pub fn new(pages: u64) -> Result<TwoBits> {
        let readable = (0..PAIRS).fold(0, |word, pair| word | READABLE << (2 * pair));
        Words::new(pages.div_ceil(PAIRS), readable, false).map(TwoBits)
    }

    #[inline(always)]
    fn state(&self, page: u64) -> u64 {
        self.0.get(page / PAIRS).load(Ordering::Acquire) >> (page % PAIRS * 2) & 3
    }

    /// Eight bytes of a page, if no thread changed it.
    ///
    /// # Safety
    /// As [`Resident::plain`].
    #[inline(always)]
    pub unsafe fn read(&self, pages: &Resident, page: u64, offset: usize) -> Option<u64> {
        if self.state(page) != READABLE {
            return None;
        }
        // SAFETY: the caller's promise.
        let (version, word) = unsafe { (pages.plain(page, 0), pages.plain(page, offset)) };
        fence(Ordering::Acquire);
        // SAFETY: the caller's promise.
        let later = unsafe { pages.plain(page, 0) };
        (later == version && self.state(page) == READABLE).then_some(word)
    }
}

/// State and version are the page's first word.
///
/// # Safety
/// As [`Resident::plain`].
#[inline(always)]
pub unsafe fn read_in_page(pages: &Resident, page: u64, offset: usize) -> Option<u64> {
    // SAFETY: the caller's promise.
    let seen = unsafe { pages.plain(page, 0) };
    if seen >> 56 != UNLOCKED {
        return None;
    }
    // SAFETY: the caller's promise.
    let word = unsafe { pages.plain(page, offset) };
    fence(Ordering::Acquire);
    // SAFETY: the caller's promise.
    let later = unsafe { pages.plain(page, 0) };
    (later == seen).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::super::Chain;
    use super::*;

    #[test]
    fn all_forms_read_the_same_and_notice_what_is_locked() {
        let chain = Chain::new(6, 2);
        let pages = Resident::new(chain).unwrap();
        let words = FullWords::new(chain.range(), false).unwrap();
        let bits = TwoBits::new(chain.range()).unwrap();
        for place in chain.places() {
            let expected = Some(chain.next(place));
            // SAFETY: pages of the chain, an aligned offset within them.
            unsafe {
                assert_eq!(words.read(&pages, place, 8), expected);
                assert_eq!(bits.read(&pages, place, 4088), expected);
                assert_eq!(read_in_page(&pages, place, 64), expected);
            }
        }
        let place = chain.place(3);
        words.0.get(place).store(253 << 56, Ordering::Relaxed);
        bits.0.get(place / PAIRS).fetch_xor(3 << (place % PAIRS * 2), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe {
            assert_eq!(words.read(&pages, place, 8), None);
            assert_eq!(bits.read(&pages, place, 8), None);
        }
    }
}
