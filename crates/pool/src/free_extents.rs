//! The free extents of a [`Space`](crate::Space) by address, in sublists that snapshots share.
//!
//! A sublist has the extents of a range of addresses, at most [`SUBLIST`] of them. A snapshot takes
//! a reference to each sublist, so it costs a 256th of a copy. A sublist that changes afterwards is
//! copied first (`Arc::make_mut`). The key of a sublist is not above its first extent, and it is
//! above all extents of the sublist before. The first sublist has key 0 and is always there. No
//! other sublist is empty.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The most extents of a sublist.
const SUBLIST: usize = 256;

type Sublist = Vec<(u64, u64)>;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct FreeExtents {
    sublists: BTreeMap<u64, Arc<Sublist>>,
    len: usize,
}

impl Default for FreeExtents {
    fn default() -> FreeExtents {
        FreeExtents { sublists: BTreeMap::from([(0, Arc::default())]), len: 0 }
    }
}

impl PartialEq for FreeExtents {
    fn eq(&self, other: &FreeExtents) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl Eq for FreeExtents {}

impl FreeExtents {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All extents as (start, count), by address.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, u64)> + '_ {
        self.sublists.values().flat_map(|sublist| sublist.iter().copied())
    }

    pub(crate) fn last(&self) -> Option<(u64, u64)> {
        self.before(u64::MAX)
    }

    /// The last extent that starts before `end`.
    pub(crate) fn before(&self, end: u64) -> Option<(u64, u64)> {
        // If the sublist of `end` has only later extents, the one before has it.
        self.sublists.range(..end.max(1)).rev().find_map(|(_, sublist)| {
            let at = sublist.partition_point(|extent| extent.0 < end);
            at.checked_sub(1).map(|at| sublist[at])
        })
    }

    /// The length of the extent that starts at `start`.
    pub(crate) fn get(&self, start: u64) -> Option<u64> {
        let (_, sublist) = self.sublists.range(..=start).next_back()?;
        sublist.binary_search_by_key(&start, |extent| extent.0).ok().map(|at| sublist[at].1)
    }

    /// Adds an extent that overlaps no other.
    pub(crate) fn insert(&mut self, start: u64, count: u64) {
        let Some((_, sublist)) = self.sublists.range_mut(..=start).next_back() else { return };
        let sublist = Arc::make_mut(sublist);
        let at = sublist.partition_point(|extent| extent.0 < start);
        sublist.insert(at, (start, count));
        self.len += 1;
        if sublist.len() > SUBLIST {
            let upper = sublist.split_off(SUBLIST / 2);
            self.sublists.insert(upper[0].0, Arc::new(upper));
        }
    }

    /// Removes the extent that starts at `start`.
    pub(crate) fn remove(&mut self, start: u64) {
        let Some((&key, sublist)) = self.sublists.range_mut(..=start).next_back() else { return };
        let Ok(at) = sublist.binary_search_by_key(&start, |extent| extent.0) else { return };
        let sublist = Arc::make_mut(sublist);
        sublist.remove(at);
        self.len -= 1;
        if sublist.len() < SUBLIST / 4 && key > 0 {
            self.merge_into_previous(key);
        }
    }

    /// Gives a small sublist's extents to the one before, if they fit there.
    fn merge_into_previous(&mut self, key: u64) {
        let Some(sublist) = self.sublists.get(&key).cloned() else { return };
        let Some((_, previous)) = self.sublists.range_mut(..key).next_back() else { return };
        if previous.len() + sublist.len() <= SUBLIST * 3 / 4 || sublist.is_empty() {
            Arc::make_mut(previous).extend_from_slice(&sublist);
            self.sublists.remove(&key);
        }
    }

    /// The sublists as they are now.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Sublist>> {
        self.sublists.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assert_invariants(extents: &FreeExtents) {
        let mut last = None;
        for (number, (key, sublist)) in extents.sublists.iter().enumerate() {
            assert!(number > 0 || *key == 0);
            assert!(sublist.len() <= SUBLIST && (number == 0 || !sublist.is_empty()));
            for extent in sublist.iter() {
                assert!(extent.0 >= *key && last.is_none_or(|last| last < extent.0));
                last = Some(extent.0);
            }
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(steps in prop::collection::vec((0u64..3000, 0u8..6), 1..4000)) {
            let (mut extents, mut model) = (FreeExtents::default(), BTreeMap::new());
            let mut snapshots = Vec::new();
            for (start, what) in steps {
                match what {
                    0 if model.contains_key(&start) => {
                        extents.remove(start);
                        model.remove(&start);
                    }
                    1 => prop_assert_eq!(extents.get(start), model.get(&start).copied()),
                    2 => {
                        let before = model.range(..start).next_back().map(|(s, c)| (*s, *c));
                        prop_assert_eq!(extents.before(start), before);
                    }
                    3 if start < 10 => snapshots.push((extents.snapshot(), model.clone())),
                    _ if !model.contains_key(&start) => {
                        extents.insert(start, start + 1);
                        model.insert(start, start + 1);
                    }
                    _ => {
                        extents.remove(start);
                        model.remove(&start);
                    }
                }
            }
            assert_invariants(&extents);
            prop_assert_eq!(extents.len(), model.len());
            prop_assert!(extents.iter().eq(model.iter().map(|(s, c)| (*s, *c))));
            // A snapshot does not have later changes.
            for (sublists, model) in snapshots {
                let found = sublists.iter().flat_map(|sublist| sublist.iter().copied());
                prop_assert!(found.eq(model.into_iter()));
            }
        }
    }

    /// A change after a snapshot copies one sublist, and the others are shared still.
    #[test]
    fn a_snapshot_shares_what_does_not_change() {
        let mut extents = FreeExtents::default();
        (0..100_000).for_each(|number| extents.insert(2 * number, 1));
        let snapshot = extents.snapshot();
        assert!(snapshot.len() <= 2 * 100_000 / SUBLIST + 1, "{} sublists", snapshot.len());
        extents.remove(50_000);
        let now = extents.snapshot();
        let shared = snapshot.iter().zip(&now).filter(|(one, two)| Arc::ptr_eq(one, two)).count();
        assert_eq!(shared, snapshot.len() - 1);
    }
}
