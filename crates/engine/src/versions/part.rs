//! A part of the chains: the old values of some entries.
//!
//! A chain is found by the hash of its entry in one access to memory, or in two: a snapshot that is
//! held for long leaves a chain for each entry that has changed since. Ranges of keys are found in
//! an order that changes only when a chain comes or goes.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::sync::prefetch_value;
use crate::versions::entry::{EntryHash, Old, OldValue, Replaced, Time, ValueRef, size_of};
use crate::versions::views::FoundViews;

/// When a chain is extended, so many of its newest versions are dropped if no view sees them any
/// more. Older ones were looked at when they were among the newest.
const LOOKED_AT: usize = 8;

/// So many old values may wait for the views that see them to end, while a processor has them in
/// its cache. A change looks at a few of them.
const FRESH: usize = 32;
const FRESH_LOOKED_AT: usize = 8;

/// A part keeps the memory of a tree that has no chains, if it has so many trees at most.
const EMPTY_TREES: usize = 16;

/// A collection of so many is in the cache of a processor. A longer one gives memory back when it
/// needs a quarter of it.
const SMALL: usize = 128;

/// The versions of one entry.
#[derive(Debug)]
struct Chain {
    entry: EntryHash,
    /// The time of the newest change of the entry.
    newest: Time,
    /// The time of the change before that one, or a later time.
    before: Time,
    /// The next chain of the same list.
    next: Option<Box<Chain>>,
    /// Old values and the times of the changes that replaced them, oldest first. A value that no
    /// view can see is left out, or goes soon.
    old: SmallVec<[(Time, Old); 2]>,
    tree: u32,
    key: Key,
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

    /// Whether one of these views sees an old value.
    fn is_seen(&self, index: usize, views: &FoundViews<'_>) -> bool {
        let since = index.checked_sub(1).map_or(0, |before| self.old[before].0);
        views.any_in(since, self.old[index].0)
    }

    /// Drops those of the newest versions that none of these views sees.
    fn drop_unseen(&mut self, views: &FoundViews<'_>, mut dropped: impl FnMut(&Key, &Old)) {
        let mut index = self.old.len().saturating_sub(LOOKED_AT);
        while index < self.old.len() {
            match self.is_seen(index, views) {
                true => index += 1,
                false => dropped(&self.key, &self.old.remove(index).1),
            }
        }
    }
}

/// Chains by the hashes of their entries: lists, which become more one by one as chains come, and
/// fewer as they go. So no change waits until all chains have been moved. If there are many, each
/// has two to four lists.
#[derive(Debug, Default)]
struct Lists {
    heads: Vec<Option<Box<Chain>>>,
    /// The number of chains.
    count: usize,
}

impl Lists {
    /// The list of this entry.
    fn place(&self, entry: EntryHash) -> usize {
        let (count, doubled) = (self.heads.len(), self.heads.len().next_power_of_two());
        let place = entry.list(doubled);
        // The last lists are not there yet. What belongs there is half of that number before.
        if place < count { place } else { place - doubled / 2 }
    }

    fn find(&self, entry: EntryHash) -> Option<&Chain> {
        let mut chain = self.heads.get(self.place(entry))?.as_deref()?;
        while chain.entry != entry {
            chain = chain.next.as_deref()?;
        }
        Some(chain)
    }

    fn find_mut(&mut self, entry: EntryHash) -> Option<&mut Chain> {
        let place = self.place(entry);
        let mut chain = self.heads.get_mut(place)?.as_deref_mut()?;
        while chain.entry != entry {
            chain = chain.next.as_deref_mut()?;
        }
        Some(chain)
    }

    /// Adds the chain of an entry that has none.
    fn insert(&mut self, chain: Box<Chain>) {
        self.count += 1;
        while self.heads.len() < 2 * self.count {
            self.heads.push(None);
            let list = self.origin(self.heads.len() - 1).and_then(|list| self.heads[list].take());
            self.distribute(list);
        }
        self.distribute(Some(chain));
    }

    fn remove(&mut self, entry: EntryHash) -> Option<Box<Chain>> {
        let place = self.place(entry);
        let mut at = self.heads.get_mut(place)?;
        while at.as_ref()?.entry != entry {
            at = &mut at.as_mut()?.next;
        }
        let mut removed = at.take()?;
        *at = removed.next.take();
        self.count -= 1;
        if self.heads.len() > 4 * self.count.max(SMALL) {
            for _ in 0..2 {
                let list = self.heads.pop().flatten();
                self.distribute(list);
            }
            if self.heads.capacity() > 4 * self.heads.len() {
                self.heads.shrink_to(2 * self.heads.len());
            }
        }
        Some(removed)
    }

    /// The list that was divided when this one came, unless this one is the first.
    fn origin(&self, list: usize) -> Option<usize> {
        list.checked_sub((list + 1).next_power_of_two() / 2).filter(|_| list > 0)
    }

    /// Puts each chain of a list into the list to which it belongs.
    fn distribute(&mut self, mut list: Option<Box<Chain>>) {
        while let Some(mut chain) = list {
            list = chain.next.take();
            let place = self.place(chain.entry);
            chain.next = self.heads[place].take();
            self.heads[place] = Some(chain);
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Part {
    chains: Lists,
    /// The entries that have chains, by their trees.
    order: BTreeMap<u32, BTreeMap<Key, EntryHash>>,
    /// Each chain once, with a time before which it need not be looked at, oldest first.
    queue: VecDeque<(Time, EntryHash)>,
    /// The newest old values, by the changes that have replaced them.
    fresh: VecDeque<(Time, EntryHash)>,
}

impl Part {
    /// The number of chains.
    pub(crate) fn len(&self) -> u64 {
        self.chains.count as u64
    }

    /// The number of chains in the queue.
    #[cfg(test)]
    pub(crate) fn queued(&self) -> u64 {
        self.queue.len() as u64
    }

    /// What a view of `time` sees of an entry, if that is not what the page has, and the time of
    /// the change that replaced it.
    pub(crate) fn at(&self, entry: EntryHash, time: Time) -> Option<(Time, &Old)> {
        self.chains.find(entry)?.at(time)
    }

    /// The same, of all entries of a range, in the order of their keys.
    pub(crate) fn range_at(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        time: Time,
    ) -> impl Iterator<Item = (&Key, Time, &Old)> {
        let chains = self.chains_of(tree, bounds);
        chains.filter_map(move |chain| chain.at(time).map(|(at, old)| (&chain.key, at, old)))
    }

    /// Whether an entry has changed between two times. May be wrong with the answer true.
    pub(crate) fn has_changed(&self, entry: EntryHash, (since, until): (Time, Time)) -> bool {
        self.chains.find(entry).is_some_and(|chain| chain.has_changed(since, until))
    }

    /// The same, of any entry of a range.
    pub(crate) fn has_range_changed(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        (since, until): (Time, Time),
    ) -> bool {
        self.chains_of(tree, bounds).any(|chain| chain.has_changed(since, until))
    }

    fn chains_of(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
    ) -> impl Iterator<Item = &Chain> {
        let entries = self.order.get(&tree).into_iter();
        let entries = entries.flat_map(move |entries| entries.range::<[u8], _>(bounds));
        entries.filter_map(|(_, entry)| self.chains.find(*entry))
    }

    /// Has what [`prefetch_chain`](Self::prefetch_chain) reads come from memory.
    pub(crate) fn prefetch_list(&self, entry: EntryHash) {
        if self.chains.heads.len() > SMALL {
            prefetch_value(&self.chains.heads[self.chains.place(entry)]);
        }
    }

    /// Has what [`add_missing`](Self::add_missing) reads come from memory.
    pub(crate) fn prefetch_chain(&self, entry: EntryHash) {
        if self.chains.heads.len() > SMALL
            && let Some(chain) = &self.chains.heads[self.chains.place(entry)]
        {
            prefetch_value(&chain.entry);
            prefetch_value(&chain.old);
        }
    }

    /// Adds the chain of an entry, which a change of this time or a later one will
    /// [`put`](Self::put) something into, if it has none. Returns whether it had none.
    pub(crate) fn add_missing(&mut self, time: Time, entry: EntryHash, of: &Replaced<'_>) -> bool {
        if self.chains.find(entry).is_some() {
            return false;
        }
        let (tree, key) = (of.tree, Key::from(of.key));
        self.order.entry(tree).or_default().insert(key.clone(), entry);
        self.queue.push_back((time, entry));
        let (newest, before, next, old) = (0, 0, None, SmallVec::new());
        let chain = Chain { entry, newest, before, next, old, tree, key };
        self.chains.insert(Box::new(chain));
        true
    }

    /// Keeps an old value, which a change of this time replaces, in the entry's chain, if one of
    /// the views sees it. `pin` keeps a blob's pages. Returns the time of the change before, or 0
    /// if the entry has a new chain.
    pub(crate) fn put(
        &mut self,
        time: Time,
        entry: EntryHash,
        replaced: &Replaced<'_>,
        views: &FoundViews<'_>,
        pin: impl FnOnce(BlobRef),
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) -> Time {
        let Some(chain) = self.chains.find_mut(entry) else { return 0 };
        debug_assert_eq!((chain.tree, &chain.key[..]), (replaced.tree, replaced.key));
        chain.drop_unseen(views, |key, old| tally.dropped(key, old, unpinned));
        // Only a view that is younger than the last change of the entry sees the old value.
        if views.any_in(chain.newest, time) {
            let old = replaced.old.map(ValueRef::to_old);
            tally.kept(&chain.key, &old);
            if let Some(OldValue::Blob(blob)) = &old {
                pin(*blob);
            }
            chain.old.push((time, old));
            self.fresh.push_back((time, entry));
        }
        chain.before = std::mem::replace(&mut chain.newest, time);
        chain.before
    }

    /// Takes back what a change of this time has put into the entry's chain: the change is not
    /// made.
    pub(crate) fn take_back(
        &mut self,
        time: Time,
        entry: EntryHash,
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) {
        let Some(chain) = self.chains.find_mut(entry) else { return };
        if chain.old.last().is_some_and(|(replaced, _)| *replaced == time)
            && let Some((_, old)) = chain.old.pop()
        {
            tally.dropped(&chain.key, &old, unpinned);
        }
        chain.newest = chain.before;
        if chain.newest == 0 {
            // The change had made the chain. It is near the end of the queue.
            self.remove_chain(entry, tally);
            let place = self.queue.iter().rposition(|(_, other)| *other == entry);
            place.map(|place| self.queue.remove(place));
        }
    }

    fn remove_chain(&mut self, entry: EntryHash, tally: &mut Tally) -> Option<Box<Chain>> {
        let chain = self.chains.remove(entry)?;
        tally.chains = tally.chains.wrapping_sub(1);
        let entries = self.order.get_mut(&chain.tree)?;
        entries.remove(&chain.key);
        if entries.is_empty() && self.order.len() > EMPTY_TREES {
            self.order.remove(&chain.tree);
        }
        Some(chain)
    }

    /// Drops the oldest of the fresh old values if none of these views sees them: none is older
    /// than `oldest`. Most values were kept for the view of a transaction, which has ended since.
    /// They go while a processor still has them in its cache.
    pub(crate) fn drop_fresh(
        &mut self,
        views: &FoundViews<'_>,
        oldest: Time,
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) {
        for _ in 0..FRESH_LOOKED_AT {
            let Some((time, entry)) = self.fresh.front().copied() else { return };
            // Otherwise it goes with its chain.
            if time > oldest
                && let Some(chain) = self.chains.find_mut(entry)
                && let Some(index) = chain.old.iter().rposition(|(at, _)| *at == time)
            {
                match chain.is_seen(index, views) {
                    // The next change of the entry looks again, or the end of the oldest view.
                    true if self.fresh.len() > FRESH => {}
                    true => return,
                    false => tally.dropped(&chain.key, &chain.old.remove(index).1, unpinned),
                }
            }
            self.fresh.pop_front();
        }
    }

    /// Drops the versions of up to `most` entries that no view needs: none is older than `oldest`.
    /// Returns whether there may be more.
    pub(crate) fn reclaim(
        &mut self,
        most: usize,
        oldest: Time,
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) -> bool {
        for _ in 0..most {
            let entry = match self.queue.front() {
                Some((time, entry)) if *time <= oldest => *entry,
                _ => return false,
            };
            self.queue.pop_front();
            let Some(chain) = self.chains.find_mut(entry) else { continue };
            let oldest = oldest + Time::from(is_planted(StoreBug::LostVersion));
            let newest = chain.newest;
            // As long as a view is older than the newest change, a validation needs the chain.
            if newest > oldest {
                let needless = chain.old.partition_point(|(replaced, _)| *replaced <= oldest);
                for (_, old) in chain.old.drain(..needless) {
                    tally.dropped(&chain.key, &old, unpinned);
                }
                let last = self.queue.back().map_or(newest, |(time, _)| newest.max(*time));
                self.queue.push_back((last, entry));
                continue;
            }
            let Some(chain) = self.remove_chain(entry, tally) else { continue };
            chain.old.iter().for_each(|(_, old)| tally.dropped(&chain.key, old, unpinned));
            if self.queue.capacity() > 4 * self.queue.len().max(SMALL) {
                self.queue.shrink_to(2 * self.queue.len());
            }
        }
        true
    }
}

/// What a thread has kept and dropped: counted for itself, and then for all at once, because
/// threads share the counters.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Modulo 2 to the power of 64, as the others.
    pub bytes: u64,
    pub blobs: u64,
    pub chains: u64,
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
