//! Which entries were changed since the newest view began: a table in memory that forgets.
//!
//! The first change of an entry after a view began keeps the old value. A later one, before the
//! next view begins, has nothing to keep: no view sees the value that it replaces. The table tells
//! a thread so without a lock and without a look into the versions. An entry that the table has
//! forgotten counts as not noted, which costs time and nothing else.
//!
//! A mark has 64 bits of an entry's keyed hash, mixed with the number of views so far, and the
//! other bits say in which line it is. So a mistake would need two entries with the same 64 bits in
//! one of very many lines, and no caller can choose them. A mark has any of the places of its line,
//! which a processor fetches at once.

use std::sync::OnceLock;

use crate::sync::{AtomicU64, Ordering, prefetch_value};
use crate::versions::entry::EntryHash;

/// Bounds of the number of lines.
const LINES: (u64, u64) = (1 << 9, 1 << 18);

/// Places for marks in a line.
const PLACES: usize = 8;

/// An odd number, whose products with small numbers differ in most bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Places that share a line of the cache.
#[derive(Debug)]
#[repr(align(64))]
struct Line([AtomicU64; PLACES]);

/// See the module's documentation. A thread asks about an entry, and notes it, while it holds the
/// entry's leaf.
#[derive(Debug)]
pub(crate) struct NotedEntries {
    /// Made when the first entry is noted.
    lines: OnceLock<Box<[Line]>>,
    count: u64,
}

impl NotedEntries {
    /// A table that takes at most about so many bytes, once it is used.
    pub(crate) fn new(bytes: u64) -> NotedEntries {
        let count = (bytes / size_of::<Line>() as u64).clamp(LINES.0, LINES.1);
        NotedEntries { lines: OnceLock::new(), count }
    }

    /// Never 0, which a place has that was not used.
    fn mark(entry: EntryHash, views: u64) -> u64 {
        (entry.bits()[1] ^ views.wrapping_add(1).wrapping_mul(SPREAD)).max(1)
    }

    /// The thread will ask about the entry soon.
    pub(crate) fn prefetch(&self, entry: EntryHash) {
        if let Some(lines) = self.lines.get() {
            prefetch_value(&lines[entry.place(self.count)]);
        }
    }

    /// Whether the entry was noted when so many views had begun.
    pub(crate) fn has(&self, entry: EntryHash, views: u64) -> bool {
        let Some(lines) = self.lines.get() else { return false };
        let mark = NotedEntries::mark(entry, views);
        lines[entry.place(self.count)].0.iter().any(|place| place.load(Ordering::Relaxed) == mark)
    }

    /// Notes an entry.
    pub(crate) fn note(&self, entry: EntryHash, views: u64) {
        let new_line = |_| Line([const { AtomicU64::new(0) }; PLACES]);
        let lines = self.lines.get_or_init(|| (0..self.count).map(new_line).collect());
        let Line(places) = &lines[entry.place(self.count)];
        let known = places.each_ref().map(|place| place.load(Ordering::Relaxed));
        // What the line has says which place is taken. So two entries do not take each other's
        // place again and again.
        let mixed = known.iter().fold(0_u64, |mixed, mark| (mixed ^ mark).wrapping_mul(SPREAD));
        let free = known.iter().position(|mark| *mark == 0);
        let place = free.unwrap_or((mixed >> 32) as usize % PLACES);
        places[place].store(NotedEntries::mark(entry, views), Ordering::Relaxed);
    }
}
