//! Read-ahead: how many pages a fault reads, by the program's advice and by the pattern of its
//! faults (paper, section 3.2).
//!
//! A file has one word: the page that a sequential program would fault on next, and how many pages
//! the last fault read. A fault on that page doubles the number; a fault on another page makes it
//! one. Pages that were read ahead are mapped at once, so they cause no faults, and the next fault
//! of a sequential program is on the page after them.

use crate::sync::{AtomicU64, Ordering};

/// What a program says of its accesses (`madvise`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Advice {
    /// The pattern of the faults decides.
    #[default]
    Normal,
    /// A fault reads one page.
    Random,
    /// A fault reads as much as it can.
    Sequential,
}

/// Pages that a fault reads at most.
pub const MOST_PAGES: u32 = 64;

/// Pages that the second fault in a row reads.
const FIRST_WINDOW: u32 = 4;

/// Bits of the word for the number of pages; the page is above.
const WINDOW_BITS: u32 = 8;
const WINDOW: u64 = (1 << WINDOW_BITS) - 1;

/// What a fault should read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Pages after the one of the fault.
    pub ahead: u32,
    /// Pages of the last read-ahead that were used, as far as the pattern tells.
    pub used: u32,
}

/// The pattern of a file's faults.
#[derive(Debug, Default)]
pub struct Pattern(AtomicU64);

impl Pattern {
    /// What a fault on a page should read.
    #[inline]
    pub fn plan(&self, page: u64, advice: Advice) -> Plan {
        let word = self.0.load(Ordering::Relaxed);
        let (expected, window) = (word >> WINDOW_BITS, (word & WINDOW) as u32);
        let continues = window > 0 && page == expected;
        let used = if continues { window - 1 } else { 0 };
        let ahead = match advice {
            Advice::Random => 0,
            Advice::Sequential => MOST_PAGES - 1,
            Advice::Normal if continues => (2 * window).clamp(FIRST_WINDOW, MOST_PAGES) - 1,
            Advice::Normal => 0,
        };
        Plan { ahead, used }
    }

    /// A fault on a page has read so many pages, that one included.
    #[inline]
    pub fn advance(&self, page: u64, pages: u32) {
        let window = u64::from(pages.clamp(1, MOST_PAGES));
        let expected = page.wrapping_add(window);
        self.0.store((expected << WINDOW_BITS) | window, Ordering::Relaxed);
    }

    /// Forgets the pattern: the word is for another file from now on.
    pub fn forget(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
mod tests {
    use super::*;

    #[test]
    fn sequential_faults_read_more_and_more() {
        let pattern = Pattern::default();
        let (mut page, mut sizes, mut used) = (10, Vec::new(), 0);
        for _ in 0..8 {
            let plan = pattern.plan(page, Advice::Normal);
            sizes.push(plan.ahead + 1);
            used += plan.used;
            pattern.advance(page, plan.ahead + 1);
            page += u64::from(plan.ahead + 1);
        }
        assert_eq!(sizes, [1, 4, 8, 16, 32, 64, 64, 64]);
        assert_eq!(used, 3 + 7 + 15 + 31 + 63 + 63, "all but the last, which is not yet used");
    }

    #[test]
    fn a_jump_ends_the_window() {
        let pattern = Pattern::default();
        for page in [1, 2, 3] {
            pattern.advance(page, 1);
        }
        assert_eq!(pattern.plan(4, Advice::Normal), Plan { ahead: 3, used: 0 });
        pattern.advance(4, 4);
        assert_eq!(pattern.plan(9, Advice::Normal), Plan { ahead: 0, used: 0 });
        assert_eq!(pattern.plan(8, Advice::Normal), Plan { ahead: 7, used: 3 });
    }

    #[test]
    fn advice_is_followed() {
        let pattern = Pattern::default();
        pattern.advance(7, 1);
        assert_eq!(pattern.plan(8, Advice::Random).ahead, 0);
        assert_eq!(pattern.plan(1000, Advice::Sequential).ahead, MOST_PAGES - 1);
    }

    #[test]
    fn page_zero_of_a_fresh_file_is_not_a_continuation() {
        assert_eq!(Pattern::default().plan(0, Advice::Normal), Plan { ahead: 0, used: 0 });
    }
}
