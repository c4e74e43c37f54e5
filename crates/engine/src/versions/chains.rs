//! Chains: the old values of each entry, in parts with a lock each.
//!
//! The keyed hash of an entry says in which part its chain is. A change locks all parts that it
//! needs, in one order, before it takes its time. So a thread that has taken a later time, and
//! locks a part after that, finds what the change has put there.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::sync::{AtomicU64, Ordering, RwLock, RwLockWriteGuard, read_soon, write_soon};
use crate::versions::entry::{EntryHash, Old, OldValue, Replaced, Time, size_of};
use crate::versions::views::FoundViews;

/// The number of parts.
const PARTS: usize = 16;

/// When a chain is extended, so many of its newest versions are dropped if no view sees them any
/// more. Older ones were looked at when they were among the newest.
const LOOKED_AT: usize = 8;

/// A change that puts something into a part drops the versions of so many entries there that no
/// view needs.
const RECLAIMED_PER_CHANGE: usize = 8;

/// So many are dropped at once when a view ends, before other threads have their turn.
const RECLAIMED_AT_ONCE: usize = 256;

/// A view that ends leaves so many chains, and so many bytes of old values, for changes to drop. It
/// is less than old values may take: a store that is full of them allows no change.
const LEFT: u64 = 1024;
const LEFT_BYTES: u64 = 1 << 20;

/// A part keeps the memory of a tree that has no chains, if it has so many trees at most.
const EMPTY_TREES: usize = 16;

/// The versions of one entry.
#[derive(Debug, Default)]
struct Chain {
    /// The time of the newest change of the entry.
    newest: Time,
    /// The time of the change before that one, or a later time.
    before: Time,
    /// Old values and the times of the changes that replaced them, oldest first. A value that no
    /// view can see is left out, or goes with the next change of the entry.
    old: SmallVec<[(Time, Old); 1]>,
}

impl Chain {
    /// What a view of `time` sees, if it is not what the page has.
    fn at(&self, time: Time) -> Option<(Time, &Old)> {
        let index = self.old.partition_point(|(replaced, _)| *replaced <= time);
        self.old.get(index).map(|(replaced, old)| (*replaced, old))
    }

    /// Whether the entry has changed after the time `since`, and before the time `until`, at which
    /// the caller may have changed it. May be wrong with the answer true.
    fn has_changed(&self, since: Time, until: Time) -> bool {
        let newest = if self.newest < until { self.newest } else { self.before };
        newest > since
    }

    /// Drops those of the newest versions that none of these views sees.
    fn drop_unseen(&mut self, views: &FoundViews<'_>, mut dropped: impl FnMut(Old)) {
        let mut index = self.old.len().saturating_sub(LOOKED_AT);
        while index < self.old.len() {
            let since = index.checked_sub(1).map_or(0, |before| self.old[before].0);
            match views.any_in(since, self.old[index].0) {
                true => index += 1,
                false => dropped(self.old.remove(index).1),
            }
        }
    }
}

/// A part of all chains.
#[derive(Debug, Default)]
struct Part {
    trees: BTreeMap<u32, BTreeMap<Key, Chain>>,
    /// Each chain once, with a time before which it need not be looked at, oldest first.
    queue: VecDeque<(Time, u32, Key)>,
}

impl Part {
    /// Drops the versions of up to `most` entries that no view needs. Returns whether there may be
    /// more. `count` is the number of chains.
    fn reclaim(
        &mut self,
        most: usize,
        oldest: Time,
        count: &AtomicU64,
        tally: &mut Tally,
        unpinned: &mut Vec<BlobRef>,
    ) -> bool {
        for _ in 0..most {
            match self.queue.front() {
                Some((time, ..)) if *time <= oldest => {}
                _ => return false,
            }
            let Some((_, id, key)) = self.queue.pop_front() else { return false };
            let Some(chains) = self.trees.get_mut(&id) else { continue };
            let Entry::Occupied(mut found) = chains.entry(key) else { continue };
            let oldest = oldest + Time::from(is_planted(StoreBug::LostVersion));
            let newest = found.get().newest;
            // As long as a view is older than the newest change, a validation needs the chain.
            if newest > oldest {
                let key = found.key().clone();
                let chain = found.get_mut();
                let needless = chain.old.partition_point(|(replaced, _)| *replaced <= oldest);
                for (_, old) in chain.old.drain(..needless) {
                    tally.dropped(&key, &old, unpinned);
                }
                let last = self.queue.back().map_or(newest, |(time, ..)| newest.max(*time));
                self.queue.push_back((last, id, key));
                continue;
            }
            let (key, chain) = found.remove_entry();
            chain.old.iter().for_each(|(_, old)| tally.dropped(&key, old, unpinned));
            if chains.is_empty() && self.trees.len() > EMPTY_TREES {
                self.trees.remove(&id);
            }
            count.fetch_sub(1, Ordering::SeqCst);
            tally.chains = tally.chains.wrapping_sub(1);
        }
        true
    }
}

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

/// What a thread has kept and dropped: counted for itself, and then for all at once, because
/// threads share the counters.
#[derive(Debug, Default)]
struct Tally {
    /// Modulo 2 to the power of 64, as the others.
    bytes: u64,
    blobs: u64,
    chains: u64,
}

impl Tally {
    fn kept(&mut self, key: &[u8], old: &Old) {
        self.bytes = self.bytes.wrapping_add(size_of(key, old));
        self.blobs = self.blobs.wrapping_add(u64::from(matches!(old, Some(OldValue::Blob(_)))));
    }

    fn dropped(&mut self, key: &[u8], old: &Old, unpinned: &mut Vec<BlobRef>) {
        self.bytes = self.bytes.wrapping_sub(size_of(key, old));
        if let Some(OldValue::Blob(blob)) = old {
            self.blobs = self.blobs.wrapping_sub(1);
            unpinned.push(*blob);
        }
    }
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
        let queued = self.parts.iter().map(|part| read_soon(&part.part).queue.len() as u64).sum();
        (counted, queued)
    }

    /// Locks the parts of these entries, of which each may get a chain.
    pub(crate) fn lock(&self, entries: &[EntryHash]) -> LockedParts<'_> {
        let mut counts = [0_u64; PARTS];
        entries.iter().for_each(|entry| counts[entry.other_place(PARTS)] += 1);
        let mut parts = [const { None }; PARTS];
        for ((place, part), count) in parts.iter_mut().zip(&self.parts).zip(counts) {
            if count > 0 {
                *place = Some(write_soon(&part.part));
                part.chains.fetch_add(count, Ordering::SeqCst);
            }
        }
        LockedParts { chains: self, tally: Tally::default(), parts }
    }

    /// What a view of `time` sees of an entry, if that is not what the page has, and the time of
    /// the change that replaced it.
    pub(crate) fn at(
        &self,
        entry: EntryHash,
        tree: u32,
        key: &[u8],
        time: Time,
    ) -> Option<(Time, Old)> {
        let part = read_soon(&self.parts[entry.other_place(PARTS)].part);
        let (replaced, old) = part.trees.get(&tree)?.get(key)?.at(time)?;
        Some((replaced, old.clone()))
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
            let Some(chains) = part.trees.get(&tree) else { continue };
            for (key, chain) in chains.range::<[u8], _>(bounds) {
                found.extend(
                    chain.at(time).map(|(replaced, old)| (key.clone(), replaced, old.clone())),
                );
            }
        }
        found.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
        found
    }

    /// Whether an entry has changed between two times. May be wrong with the answer true.
    pub(crate) fn has_changed(
        &self,
        entry: EntryHash,
        tree: u32,
        key: &[u8],
        (since, until): (Time, Time),
    ) -> bool {
        let part = read_soon(&self.parts[entry.other_place(PARTS)].part);
        let chain = part.trees.get(&tree).and_then(|chains| chains.get(key));
        chain.is_some_and(|chain| chain.has_changed(since, until))
    }

    /// The same, of any entry of a range.
    pub(crate) fn has_range_changed(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        (since, until): (Time, Time),
    ) -> bool {
        self.filled().any(|LockedPart { part, .. }| {
            let part = read_soon(part);
            part.trees.get(&tree).is_some_and(|chains| {
                let mut chains = chains.range::<[u8], _>(bounds);
                chains.any(|(_, chain)| chain.has_changed(since, until))
            })
        })
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
                    locked.reclaim(RECLAIMED_AT_ONCE, oldest, &part.chains, &mut tally, unpinned);
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
    /// Moves an old value, which a change of this time replaces, into the entry's chain, if one of
    /// the views sees it. `pin` keeps a blob's pages. Returns the time of the change before, or 0
    /// if the entry had no chain.
    pub(crate) fn put(
        &mut self,
        time: Time,
        entry: EntryHash,
        Replaced { tree, key, old }: &mut Replaced,
        views: &FoundViews<'_>,
        pin: impl FnOnce(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Time {
        let (tally, locked) = (&mut self.tally, &self.chains.parts[entry.other_place(PARTS)]);
        let Some(part) = &mut self.parts[entry.other_place(PARTS)] else { return 0 };
        let chains = part.trees.entry(*tree).or_default();
        let mut is_new = false;
        let chain = chains.entry(key.clone()).or_insert_with(|| {
            is_new = true;
            Chain::default()
        });
        chain.drop_unseen(views, |old| tally.dropped(key, &old, unpinned));
        // Only a view that is younger than the last change of the entry sees the old value.
        if views.any_in(chain.newest, time) {
            let old = old.take();
            tally.kept(key, &old);
            if let Some(OldValue::Blob(blob)) = &old {
                pin(*blob);
            }
            chain.old.push((time, old));
        }
        chain.before = std::mem::replace(&mut chain.newest, time);
        let before = chain.before;
        match is_new {
            true => {
                tally.chains = tally.chains.wrapping_add(1);
                part.queue.push_back((time, *tree, key.clone()));
            }
            false => drop(locked.chains.fetch_sub(1, Ordering::SeqCst)),
        }
        before
    }

    /// Takes back what a change of this time has put into the entry's chain: the change is not
    /// made.
    pub(crate) fn take_back(
        &mut self,
        time: Time,
        entry: EntryHash,
        Replaced { tree, key, .. }: &Replaced,
        unpinned: &mut Vec<BlobRef>,
    ) {
        let (tally, locked) = (&mut self.tally, &self.chains.parts[entry.other_place(PARTS)]);
        // The change had counted a chain when it locked the part.
        locked.chains.fetch_sub(1, Ordering::SeqCst);
        let Some(part) = &mut self.parts[entry.other_place(PARTS)] else { return };
        let chain = part.trees.get_mut(tree).and_then(|chains| chains.get_mut(key));
        let Some(chain) = chain else { return };
        if chain.old.last().is_some_and(|(replaced, _)| *replaced == time)
            && let Some((_, old)) = chain.old.pop()
        {
            tally.dropped(key, &old, unpinned);
        }
        chain.newest = chain.before;
        if chain.newest == 0 {
            // The change had made the chain. It is near the end of the queue, and may be many.
            self.remove_new_chain(time, entry, *tree, key);
        }
    }

    fn remove_new_chain(&mut self, time: Time, entry: EntryHash, tree: u32, key: &Key) {
        let Some(part) = &mut self.parts[entry.other_place(PARTS)] else { return };
        let Some(chains) = part.trees.get_mut(&tree) else { return };
        chains.remove(key);
        if chains.is_empty() && part.trees.len() > EMPTY_TREES {
            part.trees.remove(&tree);
        }
        let mut newest = part.queue.iter().rev().take_while(|(at, ..)| *at >= time);
        let back = newest.position(|(_, id, other)| *id == tree && other == key);
        if let Some(place) = back.map(|back| part.queue.len() - 1 - back) {
            part.queue.remove(place);
        }
        self.chains.parts[entry.other_place(PARTS)].chains.fetch_sub(1, Ordering::SeqCst);
        self.tally.chains = self.tally.chains.wrapping_sub(1);
    }

    /// Drops some versions that no view needs, in the parts that are locked.
    pub(crate) fn reclaim(&mut self, oldest: Time, unpinned: &mut Vec<BlobRef>) {
        for (locked, part) in self.chains.parts.iter().zip(&mut self.parts) {
            if let Some(part) = part {
                let (count, tally) = (&locked.chains, &mut self.tally);
                part.reclaim(RECLAIMED_PER_CHANGE, oldest, count, tally, unpinned);
            }
        }
    }
}
