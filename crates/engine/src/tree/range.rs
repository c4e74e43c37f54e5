//! What a range of keys is given as: [`KeyRange`].

use std::ops::{
    Bound, Range, RangeBounds, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive,
};

/// A range of keys: any of the standard library's ranges, of anything that is bytes.
///
/// `"a".."f"`, `key..`, `..=[1, 2]`, `..`, and pairs of [`Bound`]s. A range whose start is not
/// below its end has no entries. ([`RangeBounds`] itself would leave the type of `..` to be spelt
/// out.)
pub trait KeyRange {
    /// Where the range starts and ends.
    fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>);
}

macro_rules! key_range {
    ($($range:ty),+) => {
        $(impl<K: AsRef<[u8]>> KeyRange for $range {
            fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
                let (start, end) = (RangeBounds::<K>::start_bound(self), self.end_bound());
                (start.map(K::as_ref), end.map(K::as_ref))
            }
        })+
    };
}

key_range!(
    Range<K>,
    RangeFrom<K>,
    RangeTo<K>,
    RangeInclusive<K>,
    RangeToInclusive<K>,
    (Bound<K>, Bound<K>)
);

impl KeyRange for RangeFull {
    fn key_bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        (Bound::Unbounded, Bound::Unbounded)
    }
}

/// The bounds of a range.
pub(crate) fn owned(range: &impl KeyRange) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    let (start, end) = range.key_bounds();
    (start.map(<[u8]>::to_vec), end.map(<[u8]>::to_vec))
}

/// The keys that begin with `prefix`.
pub(crate) fn of_prefix(prefix: &[u8]) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    // The first key behind the prefix ends where its last byte below 255 is one more.
    let end = prefix.iter().rposition(|byte| *byte != 255).map(|last| {
        let mut end = prefix[..=last].to_vec();
        end[last] += 1;
        end
    });
    (Bound::Included(prefix.to_vec()), end.map_or(Bound::Unbounded, Bound::Excluded))
}

/// Whether `key` lies behind the start of a range.
pub(crate) fn is_behind(key: &[u8], start: &Bound<Vec<u8>>) -> bool {
    match start {
        Bound::Unbounded => true,
        Bound::Included(start) => key >= &start[..],
        Bound::Excluded(start) => key > &start[..],
    }
}

/// Whether `key` lies before the end of a range.
pub(crate) fn is_before(key: &[u8], end: &Bound<Vec<u8>>) -> bool {
    match end {
        Bound::Unbounded => true,
        Bound::Included(end) => key <= &end[..],
        Bound::Excluded(end) => key < &end[..],
    }
}
