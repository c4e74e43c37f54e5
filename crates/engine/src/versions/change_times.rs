//! For each entry, a time that is not before its newest change: a table in memory that threads ask
//! without a lock.
//!
//! Several entries share a place, which has the time of the newest change of any of them. If that
//! is not after the time of a view, the entry has not changed since: the view sees what the page
//! has, and there is no conflict. Otherwise the thread asks the versions (`versions.rs`).

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};
use crate::versions::entry::{EntryHash, Time};

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
}

impl ChangeTimes {
    /// A table that takes at most about so many bytes, once it is used.
    pub(crate) fn new(bytes: u64) -> ChangeTimes {
        let count = (bytes / PLACE_BYTES).clamp(PLACES.0, PLACES.1);
        ChangeTimes { places: OnceLock::new(), count }
    }

    /// Whether the entry may have changed after this time. A thread that has read a new value from
    /// the page gets the answer true.
    pub(crate) fn may_be_after(&self, time: Time, entry: EntryHash) -> bool {
        let Some(places) = self.places.get() else { return false };
        places[entry.place(self.count)].load(Ordering::SeqCst) > time
    }

    /// Notes a change of the entry, before any other thread sees it.
    pub(crate) fn note(&self, time: Time, entry: EntryHash) {
        let places = self.places.get_or_init(|| (0..self.count).map(|_| 0.into()).collect());
        places[entry.place(self.count)].fetch_max(time, Ordering::SeqCst);
    }
}
