//! Which entries were changed since the newest view began: a table in memory that forgets.
//!
//! The first change of an entry after a view began keeps the old value. A later one, before the
//! next view begins, has nothing to keep: no view sees the value that it replaces. The table tells
//! a thread so without a lock and without a look into the versions. An entry that the table has
//! forgotten counts as not noted, which costs time and nothing else.
//!
//! A place has 128 bits of keyed hashes of the tree and the key, mixed with the number of views so
//! far. So a mistake would need two entries with the same 128 bits, and no caller can choose them.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering};
use crate::versions::entry::{EntryHash, EntryHasher};

/// Bounds of the number of places.
const PLACES: (u64, u64) = (1 << 12, 1 << 20);

/// Bytes of a place.
const PLACE_BYTES: u64 = 16;

/// An odd number, whose products with small numbers differ in most bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// See the module's documentation. A thread asks about an entry, and notes it, while it holds the
/// entry's leaf.
#[derive(Debug)]
pub(crate) struct NotedEntries {
    /// Made when the first entry is noted.
    places: OnceLock<Box<[[AtomicU64; 2]]>>,
    count: u64,
    hasher: EntryHasher,
}

impl NotedEntries {
    /// A table that takes at most about so many bytes, once it is used.
    pub(crate) fn new(bytes: u64) -> NotedEntries {
        let count = (bytes / PLACE_BYTES).clamp(PLACES.0, PLACES.1);
        NotedEntries { places: OnceLock::new(), count, hasher: EntryHasher::new() }
    }

    fn marks(&self, entry: EntryHash, tree: u32, key: &[u8], views: u64) -> [u64; 2] {
        let views = views.wrapping_add(1).wrapping_mul(SPREAD);
        [entry.bits() ^ views, self.hasher.hash(tree, key).bits() ^ views.rotate_left(32)]
    }

    /// Whether the entry was noted when so many views had begun.
    pub(crate) fn has(&self, entry: EntryHash, tree: u32, key: &[u8], views: u64) -> bool {
        let Some(places) = self.places.get() else { return false };
        let place = &places[entry.place(self.count)];
        let [one, two] = self.marks(entry, tree, key, views);
        // Other entries share the place. If another thread writes one meanwhile, at most one half
        // is this entry's.
        place[0].load(Ordering::Relaxed) == one && place[1].load(Ordering::Relaxed) == two
    }

    /// Notes an entry.
    pub(crate) fn note(&self, entry: EntryHash, tree: u32, key: &[u8], views: u64) {
        let places = self.places.get_or_init(|| {
            (0..self.count).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect()
        });
        let [one, two] = self.marks(entry, tree, key, views);
        let place = &places[entry.place(self.count)];
        place[0].store(one, Ordering::Relaxed);
        place[1].store(two, Ordering::Relaxed);
    }
}
