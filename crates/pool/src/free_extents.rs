//! The free extents of a [`Space`](crate::Space) by address, in chunks that snapshots share.
//!
//! A chunk has the extents of a range of addresses, at most [`CHUNK`] of them. A snapshot takes a
//! reference to each chunk, so it costs a 256th of a copy, and a chunk that changes afterwards is
//! copied first (`Arc::make_mut`). What holds: the key of a chunk is not above its first extent and
//! above all extents of the chunk before; the first chunk has key 0 and is always there; no other
//! chunk is empty.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The most extents of a chunk.
const CHUNK: usize = 256;

type Chunk = Vec<(u64, u64)>;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct FreeExtents {
    chunks: BTreeMap<u64, Arc<Chunk>>,
    len: usize,
}

impl Default for FreeExtents {
    fn default() -> FreeExtents {
        FreeExtents { chunks: BTreeMap::from([(0, Arc::default())]), len: 0 }
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
        self.chunks.values().flat_map(|chunk| chunk.iter().copied())
    }

    pub(crate) fn last(&self) -> Option<(u64, u64)> {
        self.before(u64::MAX)
    }

    /// The last extent that starts before `end`.
    pub(crate) fn before(&self, end: u64) -> Option<(u64, u64)> {
        // The chunk that `end` falls into may have only later extents; then the one before has it.
        self.chunks.range(..end.max(1)).rev().find_map(|(_, chunk)| {
            let at = chunk.partition_point(|extent| extent.0 < end);
            at.checked_sub(1).map(|at| chunk[at])
        })
    }

    /// The length of the extent that starts at `start`.
    pub(crate) fn get(&self, start: u64) -> Option<u64> {
        let (_, chunk) = self.chunks.range(..=start).next_back()?;
        chunk.binary_search_by_key(&start, |extent| extent.0).ok().map(|at| chunk[at].1)
    }

    /// Adds an extent that overlaps no other.
    pub(crate) fn insert(&mut self, start: u64, count: u64) {
        let Some((_, chunk)) = self.chunks.range_mut(..=start).next_back() else { return };
        let chunk = Arc::make_mut(chunk);
        let at = chunk.partition_point(|extent| extent.0 < start);
        chunk.insert(at, (start, count));
        self.len += 1;
        if chunk.len() > CHUNK {
            let upper = chunk.split_off(CHUNK / 2);
            self.chunks.insert(upper[0].0, Arc::new(upper));
        }
    }

    /// Removes the extent that starts at `start`.
    pub(crate) fn remove(&mut self, start: u64) {
        let Some((&key, chunk)) = self.chunks.range_mut(..=start).next_back() else { return };
        let Ok(at) = chunk.binary_search_by_key(&start, |extent| extent.0) else { return };
        let chunk = Arc::make_mut(chunk);
        chunk.remove(at);
        self.len -= 1;
        if chunk.len() < CHUNK / 4 && key > 0 {
            self.merge_into_previous(key);
        }
    }

    /// Gives a small chunk's extents to the one before, if they fit there.
    fn merge_into_previous(&mut self, key: u64) {
        let Some(chunk) = self.chunks.get(&key).cloned() else { return };
        let Some((_, previous)) = self.chunks.range_mut(..key).next_back() else { return };
        if previous.len() + chunk.len() <= CHUNK * 3 / 4 || chunk.is_empty() {
            Arc::make_mut(previous).extend_from_slice(&chunk);
            self.chunks.remove(&key);
        }
    }

    /// The chunks as they are now.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Chunk>> {
        self.chunks.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn assert_invariants(extents: &FreeExtents) {
        let mut last = None;
        for (number, (key, chunk)) in extents.chunks.iter().enumerate() {
            assert!(number > 0 || *key == 0);
            assert!(chunk.len() <= CHUNK && (number == 0 || !chunk.is_empty()));
            for extent in chunk.iter() {
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
            for (chunks, model) in snapshots {
                let found = chunks.iter().flat_map(|chunk| chunk.iter().copied());
                prop_assert!(found.eq(model.into_iter()));
            }
        }
    }

    /// A change after a snapshot copies one chunk, and the others are shared still.
    #[test]
    fn a_snapshot_shares_what_does_not_change() {
        let mut extents = FreeExtents::default();
        (0..100_000).for_each(|number| extents.insert(2 * number, 1));
        let snapshot = extents.snapshot();
        assert!(snapshot.len() <= 2 * 100_000 / CHUNK + 1, "{} chunks", snapshot.len());
        extents.remove(50_000);
        let now = extents.snapshot();
        let shared = snapshot.iter().zip(&now).filter(|(one, two)| Arc::ptr_eq(one, two)).count();
        assert_eq!(shared, snapshot.len() - 1);
    }
}
