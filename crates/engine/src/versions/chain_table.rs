//! Chains, found by the hashes of their entries.
//!
//! The hash finds a chain in one or two accesses to memory. That matters beside a snapshot that is
//! held for long, which leaves a chain for each entry that has changed since.

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::sync::prefetch_value;
use crate::versions::entry::{EntryHash, Old, OldValue, Replaced, Time, ValueRef, size_of};
use crate::versions::views::FoundViews;

/// When a chain is extended, so many of its newest versions are dropped if no view sees them any
/// more. Older ones were looked at when they were among the newest.
const LOOKED_AT: usize = 8;

/// Lists that are so many are in the cache of a processor. More of them give memory back when a
/// quarter of it would do.
const SMALL: usize = 8;

/// The versions of one entry.
#[derive(Debug)]
pub(crate) struct Chain {
    pub entry: EntryHash,
    /// The time of the newest change of the entry.
    pub newest: Time,
    /// The time of the change before that one, or a later time.
    before: Time,
    /// The next chain of the same list.
    next: Option<Box<Chain>>,
    /// Old values and the times of the changes that replaced them, oldest first. A value that no
    /// view can see is left out, or goes soon.
    pub old: SmallVec<[(Time, Old); 2]>,
    pub tree: u32,
    pub key: Key,
}

impl Chain {
    /// The chain of an entry before its first change.
    pub(crate) fn new(entry: EntryHash, of: &Replaced<'_>) -> Chain {
        let (tree, key) = (of.tree, Key::from(of.key));
        Chain { entry, newest: 0, before: 0, next: None, old: SmallVec::new(), tree, key }
    }

    /// What a view of `time` sees, if it is not what the page has.
    pub(crate) fn at(&self, time: Time) -> Option<(Time, &Old)> {
        let index = self.old.partition_point(|(replaced, _)| *replaced <= time);
        self.old.get(index).map(|(replaced, old)| (*replaced, old))
    }

    /// Whether the entry has changed after the time `since`, and before the time `until`, at which
    /// the caller may have changed it. May be wrong with the answer true.
    pub(crate) fn has_changed(&self, (since, until): (Time, Time)) -> bool {
        let newest = if self.newest < until { self.newest } else { self.before };
        newest > since
    }

    /// Whether one of these views sees an old value.
    pub(crate) fn is_seen(&self, index: usize, views: &FoundViews<'_>) -> bool {
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

    /// Drops all versions that none of these views sees, and that changes of the time `until` or
    /// earlier ones have replaced.
    pub(crate) fn drop_all_unseen(
        &mut self,
        until: Time,
        views: &FoundViews<'_>,
        mut dropped: impl FnMut(&Key, &Old),
    ) {
        let (key, mut since) = (&self.key, 0);
        self.old.retain(|(replaced, old)| {
            let stays = *replaced > until || views.any_in(since, *replaced);
            match stays {
                true => since = *replaced,
                false => dropped(key, old),
            }
            stays
        });
    }

    /// Keeps an old value, which a change of this time replaces, if one of the views sees it. `pin`
    /// keeps a blob's pages. Returns whether it was kept, and the time of the change before; 0 if
    /// there was none.
    pub(crate) fn put(
        &mut self,
        time: Time,
        replaced: &Replaced<'_>,
        views: &FoundViews<'_>,
        pin: impl FnOnce(BlobRef),
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) -> (bool, Time) {
        debug_assert_eq!((self.tree, &self.key[..]), (replaced.tree, replaced.key));
        self.drop_unseen(views, |key, old| tally.dropped(key, old, unpinned));
        // Only a view that is younger than the last change of the entry sees the old value.
        let is_kept = views.any_in(self.newest, time);
        if is_kept {
            let old = replaced.old.map(ValueRef::to_old);
            tally.kept(&self.key, &old);
            if let Some(OldValue::Blob(blob)) = &old {
                pin(*blob);
            }
            self.old.push((time, old));
        }
        self.before = std::mem::replace(&mut self.newest, time);
        (is_kept, self.before)
    }

    /// Takes back what a change of this time has put here: the change is not made. Returns whether
    /// no change is left.
    pub(crate) fn take_back(
        &mut self,
        time: Time,
        (tally, unpinned): (&mut Tally, &mut Vec<BlobRef>),
    ) -> bool {
        if self.old.last().is_some_and(|(replaced, _)| *replaced == time)
            && let Some((_, old)) = self.old.pop()
        {
            tally.dropped(&self.key, &old, unpinned);
        }
        self.newest = self.before;
        self.newest == 0
    }
}

/// Chains by the hashes of their entries: lists, which become more one by one as chains come, and
/// fewer as they go. So no change waits until all chains have been moved. If there are many, each
/// has two to four lists.
#[derive(Debug, Default)]
pub(crate) struct ChainTable {
    heads: SmallVec<[Option<Box<Chain>>; 2]>,
    /// The number of chains.
    count: usize,
}

impl ChainTable {
    /// Has what [`prefetch_chain`](Self::prefetch_chain) reads come from memory.
    pub(crate) fn prefetch_list(&self, entry: EntryHash) {
        if self.heads.len() > SMALL {
            prefetch_value(&self.heads[self.place(entry)]);
        }
    }

    /// Has what [`find`](Self::find) reads come from memory.
    pub(crate) fn prefetch_chain(&self, entry: EntryHash) {
        if let Some(Some(chain)) = self.heads.get(self.place(entry)) {
            prefetch_value(&chain.entry);
            prefetch_value(&chain.old);
        }
    }

    /// The list of this entry.
    fn place(&self, entry: EntryHash) -> usize {
        let (count, doubled) = (self.heads.len(), self.heads.len().next_power_of_two());
        let place = entry.list(doubled);
        // The last lists are not there yet. What belongs there is half of that number before.
        if place < count { place } else { place - doubled / 2 }
    }

    pub(crate) fn find(&self, entry: EntryHash) -> Option<&Chain> {
        let mut chain = self.heads.get(self.place(entry))?.as_deref()?;
        while chain.entry != entry {
            chain = chain.next.as_deref()?;
        }
        Some(chain)
    }

    pub(crate) fn find_mut(&mut self, entry: EntryHash) -> Option<&mut Chain> {
        let place = self.place(entry);
        let mut chain = self.heads.get_mut(place)?.as_deref_mut()?;
        while chain.entry != entry {
            chain = chain.next.as_deref_mut()?;
        }
        Some(chain)
    }

    /// Adds the chain of an entry that has none.
    pub(crate) fn insert(&mut self, chain: Box<Chain>) {
        self.count += 1;
        while self.heads.len() < 2 * self.count {
            self.heads.push(None);
            let list = self.origin(self.heads.len() - 1).and_then(|list| self.heads[list].take());
            self.distribute(list);
        }
        self.distribute(Some(chain));
    }

    pub(crate) fn remove(&mut self, entry: EntryHash) -> Option<Box<Chain>> {
        let place = self.place(entry);
        let mut at = self.heads.get_mut(place)?;
        while at.as_ref()?.entry != entry {
            at = &mut at.as_mut()?.next;
        }
        let mut removed = at.take()?;
        *at = removed.next.take();
        self.count -= 1;
        if self.heads.len() > 4 * self.count.max(SMALL / 4) {
            for _ in 0..4 {
                let list = self.heads.pop().flatten();
                self.distribute(list);
            }
            if self.heads.capacity() >= 4 * self.heads.len() {
                self.heads.shrink_to_fit();
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

    pub(crate) fn dropped(&mut self, key: &[u8], old: &Old, unpinned: &mut Vec<BlobRef>) {
        self.bytes = self.bytes.wrapping_sub(size_of(key, old));
        if let Some(OldValue::Blob(blob)) = old {
            self.blobs = self.blobs.wrapping_sub(1);
            unpinned.push(*blob);
        }
    }
}
