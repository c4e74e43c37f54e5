//! Which entries were changed since the newest view began: a table in memory that forgets.
//!
//! The first change of an entry after a view began keeps the old value. A later one, before the
//! next view begins, has nothing to keep: no view sees the value that it replaces. The table tells
//! a thread so without a lock and without a look into the versions. An entry that the table has
//! forgotten counts as not noted, which costs time and nothing else.
//!
//! A place has 128 bits of a keyed hash of the tree, the key and the number of views so far. So a
//! mistake would need two entries with the same 128 bits, and no caller can choose them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bounds of the number of places.
const PLACES: (u64, u64) = (1 << 12, 1 << 20);

/// Bytes of a place.
const PLACE_BYTES: u64 = 16;

/// See the module's documentation. A thread asks about an entry, and notes it, while it holds the
/// entry's leaf.
#[derive(Debug)]
pub(crate) struct NotedEntries {
    /// Made when the first entry is noted.
    places: OnceLock<Box<[[AtomicU64; 2]]>>,
    count: u64,
    hashers: [RandomState; 2],
}

impl NotedEntries {
    /// A table that takes at most about so many bytes, once it is used.
    pub(crate) fn new(bytes: u64) -> NotedEntries {
        let count = (bytes / PLACE_BYTES).clamp(PLACES.0, PLACES.1);
        let hashers = [RandomState::new(), RandomState::new()];
        NotedEntries { places: OnceLock::new(), count, hashers }
    }

    fn hashes(&self, tree: u32, key: &[u8], views: u64) -> [u64; 2] {
        [0, 1].map(|number| {
            let mut hasher = self.hashers[number].build_hasher();
            hasher.write_u32(tree);
            hasher.write_u64(views);
            hasher.write(key);
            hasher.finish()
        })
    }

    /// Whether the entry was noted when so many views had begun.
    pub(crate) fn has(&self, tree: u32, key: &[u8], views: u64) -> bool {
        let Some(places) = self.places.get() else { return false };
        let [one, two] = self.hashes(tree, key, views);
        let place = &places[(one % self.count) as usize];
        // Other entries share the place. If another thread writes one meanwhile, at most one half
        // is this entry's.
        place[0].load(Ordering::Relaxed) == one && place[1].load(Ordering::Relaxed) == two
    }

    /// Notes an entry.
    pub(crate) fn note(&self, tree: u32, key: &[u8], views: u64) {
        let places = self.places.get_or_init(|| {
            (0..self.count).map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect()
        });
        let [one, two] = self.hashes(tree, key, views);
        let place = &places[(one % self.count) as usize];
        place[0].store(one, Ordering::Relaxed);
        place[1].store(two, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_noted_for_its_tree_and_its_views() {
        let noted = NotedEntries::new(1 << 16);
        assert!(!noted.has(1, b"key", 7));
        noted.note(1, b"key", 7);
        assert!(noted.has(1, b"key", 7));
        assert!(!noted.has(2, b"key", 7) && !noted.has(1, b"kez", 7) && !noted.has(1, b"key", 8));
        for number in 0..100_000_u32 {
            noted.note(1, &number.to_be_bytes(), 7);
            assert!(noted.has(1, &number.to_be_bytes(), 7));
        }
        let left = (0..100_000_u32).filter(|number| noted.has(1, &number.to_be_bytes(), 7));
        assert!((2000..=4096).contains(&left.count()));
    }
}
