//! What a transaction has read, in memory that is bounded.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};

/// A list of keys first has memory for so many keys of so many bytes.
const KEYS_AT_FIRST: usize = 48;
const BYTES_OF_KEY: usize = 16;

/// What a key or a range takes in the list, besides the bytes of its keys.
const ENTRY_BYTES: usize = 16;
const RANGE_BYTES: usize = 64;

/// The start and the end of a range of keys.
pub(crate) type KeyBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// The entries that a transaction has read, or must find unchanged for another reason, each with
/// the number of its tree.
///
/// If they are too many, one range of each tree stands for all of its entries. Then a change
/// between two of them conflicts, too.
#[derive(Debug)]
pub(crate) struct ReadSet {
    /// All keys, one after the other.
    key_bytes: Vec<u8>,
    /// The tree of each key, and where the key ends.
    key_ends: Vec<(u32, usize)>,
    ranges: Vec<(u32, KeyBounds)>,
    /// The trees of the iterators that have not noted what they have read.
    iterated: Vec<u32>,
    /// What the ranges take.
    range_bytes: usize,
    /// The bytes that all may take.
    most: usize,
}

impl ReadSet {
    /// A set that takes about so many bytes at most.
    pub(crate) fn new(most: u64) -> ReadSet {
        ReadSet {
            key_bytes: Vec::new(),
            key_ends: Vec::new(),
            ranges: Vec::new(),
            iterated: Vec::new(),
            range_bytes: 0,
            most: usize::try_from(most).unwrap_or(usize::MAX),
        }
    }

    pub(crate) fn note_key(&mut self, tree: u32, key: &[u8]) {
        if self.key_ends.capacity() == 0 {
            self.key_ends.reserve(KEYS_AT_FIRST);
            self.key_bytes.reserve(KEYS_AT_FIRST * BYTES_OF_KEY);
        }
        self.key_bytes.extend_from_slice(key);
        self.key_ends.push((tree, self.key_bytes.len()));
        if self.bytes() > self.most {
            self.coarsen();
        }
    }

    pub(crate) fn note_range(&mut self, tree: u32, bounds: KeyBounds) {
        self.range_bytes += range_bytes(&bounds);
        self.ranges.push((tree, bounds));
        if self.bytes() > self.most {
            self.coarsen();
        }
    }

    /// An iterator over entries of a tree begins. It notes what it has read when it ends.
    pub(crate) fn begin_iterator(&mut self, tree: u32) {
        self.iterated.push(tree);
    }

    pub(crate) fn end_iterator(&mut self, tree: u32) {
        let at = self.iterated.iter().rposition(|iterated| *iterated == tree);
        at.map(|at| self.iterated.swap_remove(at));
    }

    /// Notes that iterators which never ended may have read everything: a program can forget one
    /// (`mem::forget`). For a transaction of which no iterator can be left.
    pub(crate) fn note_forgotten_iterators(&mut self) {
        for tree in std::mem::take(&mut self.iterated) {
            self.note_range(tree, (Bound::Unbounded, Bound::Unbounded));
        }
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let mut begin = 0;
        self.key_ends.iter().map(move |&(tree, end)| {
            (tree, &self.key_bytes[std::mem::replace(&mut begin, end)..end])
        })
    }

    pub(crate) fn ranges(&self) -> &[(u32, KeyBounds)] {
        &self.ranges
    }

    fn bytes(&self) -> usize {
        self.key_bytes.len() + self.key_ends.len() * ENTRY_BYTES + self.range_bytes
    }

    /// Puts one range in the place of all entries of a tree.
    #[cold]
    fn coarsen(&mut self) {
        let mut hulls: BTreeMap<u32, KeyBounds> = BTreeMap::new();
        let keys =
            self.keys().map(|(tree, key)| (tree, Bound::Included(key), Bound::Included(key)));
        let ranges =
            self.ranges.iter().map(|(tree, (start, end))| (*tree, slice(start), slice(end)));
        for (tree, start, end) in keys.chain(ranges) {
            let owned = || (start.map(<[u8]>::to_vec), end.map(<[u8]>::to_vec));
            let hull = hulls.entry(tree).or_insert_with(owned);
            if is_lower(start, slice(&hull.0)) {
                hull.0 = owned().0;
            }
            if is_higher(end, slice(&hull.1)) {
                hull.1 = owned().1;
            }
        }
        (self.key_bytes, self.key_ends) = (Vec::new(), Vec::new());
        self.ranges = hulls.into_iter().collect();
        self.range_bytes = self.ranges.iter().map(|(_, bounds)| range_bytes(bounds)).sum();
        // With very many trees, or very long keys: not again for each entry.
        self.most = self.most.max(2 * self.range_bytes);
    }
}

fn slice(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(|key| &key[..])
}

/// Whether a range has this key.
pub(crate) fn contains((start, end): &KeyBounds, key: &[u8]) -> bool {
    RangeBounds::<[u8]>::contains(&(slice(start), slice(end)), key)
}

fn range_bytes((start, end): &KeyBounds) -> usize {
    let bytes = |bound| match bound {
        Bound::Included(key) | Bound::Excluded(key) => <[u8]>::len(key),
        Bound::Unbounded => 0,
    };
    RANGE_BYTES + bytes(slice(start)) + bytes(slice(end))
}

/// Whether a range that starts at `one` has keys before all of a range that starts at `other`.
fn is_lower(one: Bound<&[u8]>, other: Bound<&[u8]>) -> bool {
    match (one, other) {
        (_, Bound::Unbounded) => false,
        (Bound::Unbounded, _) => true,
        (Bound::Included(one), Bound::Excluded(other)) => one <= other,
        (
            Bound::Included(one) | Bound::Excluded(one),
            Bound::Included(other) | Bound::Excluded(other),
        ) => one < other,
    }
}

/// Whether a range that ends at `one` has keys after all of a range that ends at `other`.
fn is_higher(one: Bound<&[u8]>, other: Bound<&[u8]>) -> bool {
    match (one, other) {
        (_, Bound::Unbounded) => false,
        (Bound::Unbounded, _) => true,
        (Bound::Included(one), Bound::Excluded(other)) => one >= other,
        (
            Bound::Included(one) | Bound::Excluded(one),
            Bound::Included(other) | Bound::Excluded(other),
        ) => one > other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(set: &ReadSet, tree: u32, key: &[u8]) -> bool {
        let covers = |(of, bounds): &(u32, KeyBounds)| *of == tree && contains(bounds, key);
        set.keys().any(|entry| entry == (tree, key)) || set.ranges().iter().any(covers)
    }

    #[test]
    fn a_set_stays_within_its_bound_and_forgets_nothing() {
        let mut set = ReadSet::new(4096);
        let key = |number: u32| number.to_be_bytes();
        for number in (1000..2000).rev() {
            set.note_key(1, &key(number));
            set.note_key(2, &key(2 * number));
            let bounds = (Bound::Excluded(key(number).to_vec()), Bound::Included(vec![9]));
            set.note_range(3, bounds);
            assert!(set.bytes() <= 4096);
        }
        for number in 1000..2000 {
            assert!(covers(&set, 1, &key(number)) && covers(&set, 2, &key(2 * number)));
            assert!(covers(&set, 3, &key(number + 1)));
        }
        assert!(!covers(&set, 1, &key(999)) && !covers(&set, 1, &key(2000)));
        assert!(covers(&set, 3, &[9]) && !covers(&set, 3, &[9, 0]));
        assert!(!covers(&set, 3, &key(1000)) && !covers(&set, 4, &key(1500)));
    }

    #[test]
    fn few_entries_stay_as_they_are() {
        let mut set = ReadSet::new(4096);
        set.note_key(1, b"a");
        set.note_key(1, b"c");
        assert!(!covers(&set, 1, b"b"));
        set.note_range(1, (Bound::Unbounded, Bound::Excluded(b"a".to_vec())));
        assert!(covers(&set, 1, b"") && !covers(&set, 1, b"b"));
    }

    #[test]
    fn ranges_of_any_bounds_widen() {
        let bound = |bound: Bound<&[u8]>| bound.map(<[u8]>::to_vec);
        let starts = [Bound::Unbounded, Bound::Included(&b"b"[..]), Bound::Excluded(&b"b"[..])];
        let bytes = [&b"a"[..], b"b", b"ba", b"c"];
        for one in starts {
            for other in starts {
                let mut set = ReadSet::new(0);
                set.note_range(1, (bound(one), Bound::Included(b"bb".to_vec())));
                set.note_range(1, (bound(other), Bound::Excluded(b"bb".to_vec())));
                set.coarsen();
                assert_eq!(set.ranges().len(), 1);
                for key in bytes {
                    let is_in = |start: Bound<&[u8]>| match start {
                        Bound::Unbounded => true,
                        Bound::Included(start) => key >= start,
                        Bound::Excluded(start) => key > start,
                    };
                    let expected = (is_in(one) || is_in(other)) && key <= b"bb";
                    assert_eq!(covers(&set, 1, key), expected, "{one:?} {other:?} {key:?}");
                }
            }
        }
    }
}
