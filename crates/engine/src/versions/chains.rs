//! Chains: the old values of each entry, in parts with a lock each.
//!
//! The keyed hash of an entry says in which part its chain is. A change locks all parts that it
//! needs, in one order, before it takes its time. So a thread that has taken a later time, and
//! locks a part after that, finds what the change has put there.

use std::ops::Bound;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::sync::{AtomicU64, Ordering, RwLock, RwLockWriteGuard, read_soon, write_soon};
use crate::versions::entry::{EntryHash, Old, Replaced, Time};
use crate::versions::part::{Part, Tally};
use crate::versions::views::FoundViews;

/// The number of parts.
const PARTS: usize = 16;

/// A change that puts something into a part drops the versions of so many entries there that no
/// view needs.
const RECLAIMED_PER_CHANGE: usize = 8;

/// So many are dropped at once when a view ends, before other threads have their turn.
const RECLAIMED_AT_ONCE: usize = 256;

/// A view that ends leaves so many chains, and so many bytes of old values, for changes to drop. It
/// is less than old values may take: a store that is full of them allows no change.
const LEFT: u64 = 1024;
const LEFT_BYTES: u64 = 1 << 20;

/// A part with its lock, in memory that it shares with no other part.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LockedPart {
    /// At least the number of chains. It grows before a change takes its time.
    chains: AtomicU64,
    part: RwLock<Part>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Chains {
    parts: [LockedPart; PARTS],
    /// What all chains take, in bytes.
    bytes: AtomicU64,
    /// The number of old values that are blobs.
    blobs: AtomicU64,
    /// The number of chains.
    count: AtomicU64,
}

/// The parts that a change has locked.
pub(crate) struct LockedParts<'c> {
    chains: &'c Chains,
    tally: Tally,
    parts: [Option<RwLockWriteGuard<'c, Part>>; PARTS],
}

impl Chains {
    /// The memory that old values take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The number of chains, by two counts, which are the same when no change is under way.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (u64, u64) {
        let counted = self.parts.iter().map(|part| part.chains.load(Ordering::SeqCst)).sum();
        let queued = self.parts.iter().map(|part| read_soon(&part.part).queued()).sum();
        (counted, queued)
    }

    /// Locks the parts of these entries.
    pub(crate) fn lock(&self, entries: &[EntryHash]) -> LockedParts<'_> {
        let mut needed = [false; PARTS];
        entries.iter().for_each(|entry| needed[entry.other_place(PARTS)] = true);
        let mut parts = [const { None }; PARTS];
        for ((place, part), is_needed) in parts.iter_mut().zip(&self.parts).zip(needed) {
            *place = is_needed.then(|| write_soon(&part.part));
        }
        LockedParts { chains: self, tally: Tally::default(), parts }
    }

    /// What a view of `time` sees of an entry, if that is not what the page has, and the time of
    /// the change that replaced it.
    pub(crate) fn at(&self, entry: EntryHash, time: Time) -> Option<(Time, Old)> {
        let part = read_soon(&self.parts[entry.other_place(PARTS)].part);
        part.at(entry, time).map(|(replaced, old)| (replaced, old.clone()))
    }

    /// The same, of all entries of a range, in the order of their keys.
    pub(crate) fn range_at(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        time: Time,
    ) -> Vec<(Key, Time, Old)> {
        let mut found = Vec::new();
        for LockedPart { part, .. } in self.filled() {
            let part = read_soon(part);
            let of_part = part.range_at(tree, bounds, time);
            found.extend(of_part.map(|(key, replaced, old)| (key.clone(), replaced, old.clone())));
        }
        found.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
        found
    }

    /// Whether an entry has changed between two times. May be wrong with the answer true.
    pub(crate) fn has_changed(&self, entry: EntryHash, times: (Time, Time)) -> bool {
        read_soon(&self.parts[entry.other_place(PARTS)].part).has_changed(entry, times)
    }

    /// The same, of any entry of a range.
    pub(crate) fn has_range_changed(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        times: (Time, Time),
    ) -> bool {
        self.filled().any(|part| read_soon(&part.part).has_range_changed(tree, bounds, times))
    }

    /// The parts that have chains.
    fn filled(&self) -> impl Iterator<Item = &LockedPart> {
        self.parts.iter().filter(|part| part.chains.load(Ordering::SeqCst) > 0)
    }

    /// Whether the old values are so few that changes may drop them.
    pub(crate) fn are_few(&self) -> bool {
        self.bytes() <= LEFT_BYTES
            && self.count.load(Ordering::Relaxed) <= LEFT
            && self.blobs.load(Ordering::Relaxed) == 0
    }

    /// Drops the versions that no view needs: none is older than `oldest`. Adds the blobs that no
    /// version needs any more to `unpinned`.
    pub(crate) fn reclaim(&self, oldest: Time, unpinned: &mut Vec<BlobRef>) {
        for part in self.filled() {
            // In portions, so that changes do not wait for all of it.
            let mut is_more = true;
            while is_more {
                let (mut locked, mut tally) = (write_soon(&part.part), Tally::default());
                is_more =
                    part.reclaim(&mut locked, RECLAIMED_AT_ONCE, oldest, (&mut tally, unpinned));
                self.add(&tally);
            }
        }
    }

    fn add(&self, tally: &Tally) {
        if tally.bytes != 0 {
            self.bytes.fetch_add(tally.bytes, Ordering::Relaxed);
        }
        if tally.blobs != 0 {
            self.blobs.fetch_add(tally.blobs, Ordering::Relaxed);
        }
        if tally.chains != 0 {
            self.count.fetch_add(tally.chains, Ordering::Relaxed);
        }
    }
}

impl Drop for LockedParts<'_> {
    fn drop(&mut self) {
        self.chains.add(&self.tally);
    }
}

impl LockedParts<'_> {
    /// Adds the chains of these entries that are not there. The change has not taken its time yet,
    /// which will be this one or a later one.
    pub(crate) fn add_missing(
        &mut self,
        time: Time,
        entries: &[EntryHash],
        replaced: &[Replaced<'_>],
    ) {
        // What is there comes from memory for all entries at the same time.
        let part = |entry: &EntryHash| self.parts[entry.other_place(PARTS)].as_deref();
        entries
            .iter()
            .for_each(|entry| part(entry).iter().for_each(|part| part.prefetch_list(*entry)));
        entries
            .iter()
            .for_each(|entry| part(entry).iter().for_each(|part| part.prefetch_chain(*entry)));
        for (entry, replaced) in entries.iter().zip(replaced) {
            let place = entry.other_place(PARTS);
            let Some(part) = &mut self.parts[place] else { continue };
            if part.add_missing(time, *entry, replaced) {
                self.tally.chains = self.tally.chains.wrapping_add(1);
                self.chains.parts[place].chains.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    /// As [`Part::put`].
    pub(crate) fn put(
        &mut self,
        time: Time,
        entry: EntryHash,
        replaced: &Replaced<'_>,
        views: &FoundViews<'_>,
        pin: impl FnOnce(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Time {
        let Some(part) = &mut self.parts[entry.other_place(PARTS)] else { return 0 };
        part.put(time, entry, replaced, views, pin, (&mut self.tally, unpinned))
    }

    /// As [`Part::take_back`].
    pub(crate) fn take_back(&mut self, time: Time, entry: EntryHash, unpinned: &mut Vec<BlobRef>) {
        let place = entry.other_place(PARTS);
        let Some(part) = &mut self.parts[place] else { return };
        let before = part.len();
        part.take_back(time, entry, (&mut self.tally, unpinned));
        self.chains.parts[place].chains.fetch_sub(before - part.len(), Ordering::SeqCst);
    }

    /// Drops some versions that no view needs, in the parts that are locked: none of these views,
    /// and none is older than `oldest`.
    pub(crate) fn reclaim(
        &mut self,
        views: &FoundViews<'_>,
        oldest: Time,
        unpinned: &mut Vec<BlobRef>,
    ) {
        for (locked, part) in self.chains.parts.iter().zip(&mut self.parts) {
            let Some(part) = part else { continue };
            part.drop_fresh(views, oldest, (&mut self.tally, unpinned));
            locked.reclaim(part, RECLAIMED_PER_CHANGE, oldest, (&mut self.tally, unpinned));
        }
    }
}

impl LockedPart {
    /// As [`Part::reclaim`]. The caller has locked the part.
    fn reclaim(
        &self,
        part: &mut Part,
        most: usize,
        oldest: Time,
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) -> bool {
        let before = part.len();
        let is_more = part.reclaim(most, oldest, (tally, unpinned));
        if part.len() < before {
            self.chains.fetch_sub(before - part.len(), Ordering::SeqCst);
        }
        is_more
    }
}
