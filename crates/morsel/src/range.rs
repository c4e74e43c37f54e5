//! Ranges of bytes within a Morsel.

use std::ops::Range;

use crate::PAGE_SIZE;
use crate::error::{Error, Result};

/// Whether a range lies within `length` bytes; an empty one may lie at the end.
pub(crate) fn within(range: &Range<u64>, length: u64) -> Result<()> {
    let Range { start, end } = *range;
    if start <= end && end <= length {
        return Ok(());
    }
    Err(Error::OutOfRange { start, end, length })
}

/// Whether a range consists of whole pages of `length` bytes, whose last page may be incomplete.
pub(crate) fn whole_pages(range: &Range<u64>, length: u64) -> Result<()> {
    within(range, length)?;
    let Range { start, end } = *range;
    if start.is_multiple_of(PAGE_SIZE) && (end.is_multiple_of(PAGE_SIZE) || end == length) {
        return Ok(());
    }
    Err(Error::Unaligned { start, end })
}

/// The range that begins at `start`, or the error in it.
pub(crate) fn from(start: u64, bytes: u64, length: u64) -> Result<Range<u64>> {
    let end = start.saturating_add(bytes);
    within(&(start..end), length).map(|()| start..end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_taken_where_all_its_bytes_are_there(
            length in 0..40_000_u64,
            start in prop_oneof![0..50_000_u64, Just(u64::MAX)],
            bytes in prop_oneof![0..50_000_u64, Just(u64::MAX)],
        ) {
            let fits = start.checked_add(bytes).is_some_and(|end| end <= length);
            prop_assert_eq!(from(start, bytes, length).is_ok(), fits);
            let end = start.saturating_add(bytes);
            let cut = |byte: u64| !byte.is_multiple_of(PAGE_SIZE);
            let whole = fits && !cut(start) && (!cut(end) || end == length);
            prop_assert_eq!(whole_pages(&(start..end), length).is_ok(), whole);
        }
    }

    #[test]
    #[allow(clippy::reversed_empty_ranges)]
    fn a_range_that_ends_before_it_begins_is_refused() {
        assert!(within(&(2..1), 10).is_err());
    }
}
