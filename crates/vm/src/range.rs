//! Ranges of pages, and the entries of a batch.

use rustix::io::Errno;

use crate::PAGE_SIZE;

/// A run of neighbouring pages of a surface, in pages of [`PAGE_SIZE`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRange {
    /// The first page.
    pub start: u64,
    /// How many pages; an empty range is allowed everywhere and does nothing.
    pub count: u64,
}

impl PageRange {
    /// The pages `start..start + count`.
    pub const fn new(start: u64, count: u64) -> Self {
        Self { start, count }
    }

    /// The first page after the range, or None if that overflows.
    pub const fn end(self) -> Option<u64> {
        self.start.checked_add(self.count)
    }

    /// Whether all pages lie below `pages`.
    pub const fn is_within(self, pages: u64) -> bool {
        matches!(self.end(), Some(end) if end <= pages)
    }

    /// Bytes of the range.
    ///
    /// Of use for ranges within a surface, where it cannot overflow; saturates otherwise.
    pub const fn bytes(self) -> usize {
        (self.count as usize).saturating_mul(PAGE_SIZE)
    }
}

/// One range of a batch and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The pages.
    pub range: PageRange,
    /// The operation sets it and ignores its previous value.
    ///
    /// `EINVAL` means that the range is not within the surface and that the operation did nothing
    /// for it. After any other error the operation may have done a part of the range. One entry's
    /// error never stops the others.
    pub result: Result<(), Errno>,
}

impl Entry {
    /// An entry without a result yet.
    pub const fn new(range: PageRange) -> Self {
        Self { range, result: Ok(()) }
    }

    /// An entry of one page.
    pub const fn page(page: u64) -> Self {
        Self::new(PageRange::new(page, 1))
    }
}

/// How many entries failed.
pub(crate) fn failures(entries: &[Entry]) -> usize {
    entries.iter().filter(|entry| entry.result.is_err()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_near_the_end_of_the_numbers_are_not_within() {
        assert!(PageRange::new(0, 8).is_within(8));
        assert!(PageRange::new(8, 0).is_within(8));
        assert!(!PageRange::new(1, 8).is_within(8));
        assert!(!PageRange::new(u64::MAX, 1).is_within(u64::MAX));
        assert!(!PageRange::new(u64::MAX, 2).is_within(8));
        assert_eq!(PageRange::new(u64::MAX, 2).end(), None);
    }
}
