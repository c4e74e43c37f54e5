//! For each entry, a time that is not before its newest change: a table in memory that threads ask
//! without a lock.
//!
//! Several entries share a place, which has the time of the newest change of any of them. If that
//! is not after the time of a view, the entry has not changed since: the view sees what the page
//! has, and there is no conflict. Otherwise the thread asks the versions (`versions.rs`).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A point in the order of the changes that kept old values. A view sees the changes up to its
/// time.
pub(crate) type Time = u64;

/// Bounds of the number of places: few entries change while a transaction runs, and a small table
/// stays in the cache of a processor.
const PLACES: (u64, u64) = (1 << 10, 1 << 16);

/// Bytes of a place.
const PLACE_BYTES: u64 = 8;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct ChangeTimes {
    /// Made when the first change is noted.
    places: OnceLock<Box<[AtomicU64]>>,
    count: u64,
    hasher: RandomState,
}

impl ChangeTimes {
    /// A table that takes at most about so many bytes, once it is used.
    pub(crate) fn new(bytes: u64) -> ChangeTimes {
        let count = (bytes / PLACE_BYTES).clamp(PLACES.0, PLACES.1);
        ChangeTimes { places: OnceLock::new(), count, hasher: RandomState::new() }
    }

    fn place<'p>(&self, places: &'p [AtomicU64], tree: u32, key: &[u8]) -> &'p AtomicU64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u32(tree);
        hasher.write(key);
        &places[(hasher.finish() % self.count) as usize]
    }

    /// Whether the entry may have changed after this time. A thread that has read a new value from
    /// the page gets the answer true.
    pub(crate) fn may_be_after(&self, time: Time, tree: u32, key: &[u8]) -> bool {
        let Some(places) = self.places.get() else { return false };
        self.place(places, tree, key).load(Ordering::Acquire) > time
    }

    /// Notes a change of the entry, before any other thread sees it. Times only grow: the caller
    /// has the lock of the versions.
    pub(crate) fn note(&self, time: Time, tree: u32, key: &[u8]) {
        let places = self.places.get_or_init(|| (0..self.count).map(|_| 0.into()).collect());
        self.place(places, tree, key).store(time, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_the_newest_time_of_its_entries() {
        let times = ChangeTimes::new(1 << 16);
        assert!(!times.may_be_after(0, 1, b"key"));
        let keys: Vec<_> = (0..20_000_u32).map(u32::to_be_bytes).collect();
        for (key, time) in keys.iter().zip(1..) {
            times.note(time, 1, key);
            assert!(times.may_be_after(time - 1, 1, key) && !times.may_be_after(time, 1, key));
        }
        // No change is forgotten.
        assert!(keys.iter().zip(1..).all(|(key, time)| times.may_be_after(time - 1, 1, key)));
        assert!(!times.may_be_after(20_000, 1, b"key"));
    }
}
