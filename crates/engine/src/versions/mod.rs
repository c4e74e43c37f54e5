//! Versions: the old values of entries, in memory, for views of the store as it was.
//!
//! A *view* (a snapshot, or a transaction) sees the store as of a *time*. While there are views, a
//! change keeps the old value of each entry that it changes, with the time of the change. Pages
//! have only the newest values, so that recovery knows nothing of versions.
//!
//! A thread that changes a leaf keeps the old values while it holds the leaf's lock, before any
//! reader can see the new ones. A view reads the leaf first and looks for old values afterwards. If
//! it has read a new value, it finds the old one here. If it has read the old value, it may find
//! the same one here.
//!
//! A change holds the locks of its leaves, and then:
//!
//! 1. locks the register of its thread, and the buckets of the chains that it extends
//!    (`chains.rs`);
//! 2. notes in a table that its entries change now, or later (`change_times.rs`);
//! 3. takes its time;
//! 4. puts the old values into the chains, as far as a view sees them (`views.rs`), and unlocks
//!    these;
//! 5. validates, if it is the commit of a transaction: looks in the table, and then in the chains,
//!    for changes of what the transaction has read, after its view's time and before its own;
//! 6. changes the leaves, and unlocks them.
//!
//! A change that takes an earlier time than another one has noted its entries before, and has
//! locked their chains. So of two transactions that have read what the other one changes, the one
//! with the later time finds the other one's change, and fails. It takes its old values back.
//!
//! A table spares most looks into the chains: few entries change while a transaction runs. The
//! commit of a transaction that is alone keeps nothing, and takes no time.
//!
//! An entry that was changed since the newest view began keeps nothing when it is changed again
//! (`noted_entries.rs`). So a snapshot that is held for long costs little.
//!
//! While there is no view, changes keep nothing, and do not even count the time. The first view
//! makes changes keep old values: it freezes the change gate for a moment, so that no change is
//! under way that does not know.
//!
//! `tests/versions_model.rs` checks all of this on a scheduler that explores interleavings.

mod chain_table;
mod chains;
pub(crate) mod change_times;
pub(crate) mod entry;
pub(crate) mod noted_entries;
mod reads;
mod turns;
mod views;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Duration;

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::store::gate::Freeze;
use crate::sync::{AtomicBool, AtomicU64, Ordering, RwLock, fence, read, write};
use crate::versions::chains::Chains;
use crate::versions::change_times::ChangeTimes;
use crate::versions::entry::EntryHasher;
pub(crate) use crate::versions::entry::{
    EntryHash, Old, OldEntry, OldValue, Replaced, Time, ValueRef, size_of,
};
use crate::versions::noted_entries::NotedEntries;
pub(crate) use crate::versions::reads::{KeyBounds, ReadSet};
use crate::versions::turns::Turns;
use crate::versions::views::Views;

/// What a commit must find unchanged since the time of the transaction's view. The view ends when
/// nothing has changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Validation<'v> {
    pub time: Time,
    pub reads: &'v ReadSet,
    /// Whether the view has ended.
    pub has_ended: &'v AtomicBool,
}

/// A validation looks at so many of the entries that its commit changes. It asks the chains about
/// others.
const LOOKED_AT: usize = 16;

/// The entries that a commit changes, in the order of their trees and keys, and for each the time
/// of the change before.
#[derive(Debug, Default)]
struct OwnChanges<'e> {
    entries: &'e [Replaced<'e>],
    before: SmallVec<[Time; 8]>,
    /// The entry after the last one that was asked for: most transactions read what they change in
    /// the same order.
    next: usize,
}

impl OwnChanges<'_> {
    /// The time of the change before, of one of these entries.
    fn before(&mut self, tree: u32, key: &[u8]) -> Option<Time> {
        let count = self.entries.len();
        let is_this = |entry: &Replaced<'_>| entry.tree == tree && entry.key == key;
        let mut places = (0..count.min(LOOKED_AT)).map(|place| (self.next + place) % count);
        let place = places.find(|place| is_this(&self.entries[*place]))?;
        self.next = place + 1;
        Some(self.before[place])
    }
}

/// The outcome of a look for the version that a view sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// What the page has.
    Page,
    Version(Old),
}

/// The versions of a range of keys, as a view sees them.
#[derive(Debug, Default)]
pub(crate) struct SeenRange {
    pub versions: Vec<(Key, Old)>,
    /// The view sees none of the entries that the pages have and that are not in `versions`.
    pub is_hidden: bool,
}

/// Another transaction has changed what this one has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conflicting;

/// The old values take more memory than they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VersionsFull;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Versions {
    views: Views,
    chains: Chains,
    hasher: EntryHasher,
    changed: ChangeTimes,
    noted: NotedEntries,
    loads: Loads,
    /// The time of the oldest view when a view that ended dropped what no view needed.
    reclaimed: AtomicU64,
    /// How many views had ended when what no view sees was dropped, because old values had taken
    /// all of their memory.
    ended_before: AtomicU64,
    /// Who may commit first after several losses.
    pub turns: Turns,
    bytes_max: AtomicU64,
}

/// The times at which bulk loads filled trees that were empty before. A load keeps no version for
/// each entry.
#[derive(Debug, Default)]
struct Loads {
    /// Not before the time of the newest load.
    newest: AtomicU64,
    trees: RwLock<BTreeMap<u32, Vec<Time>>>,
}

impl Loads {
    /// The first load of a tree after this time.
    fn after(&self, tree: u32, time: Time) -> Option<Time> {
        if self.newest.load(Ordering::SeqCst) <= time {
            return None;
        }
        read(&self.trees).get(&tree)?.iter().copied().find(|load| *load > time)
    }
}

impl Versions {
    /// Versions that take at most so many bytes.
    pub(crate) fn new(bytes_max: u64) -> Versions {
        Versions {
            views: Views::new(),
            chains: Chains::new(),
            hasher: EntryHasher::new(),
            changed: ChangeTimes::new(bytes_max / 64),
            noted: NotedEntries::new(bytes_max / 16),
            loads: Loads::default(),
            reclaimed: AtomicU64::new(0),
            ended_before: AtomicU64::new(0),
            turns: Turns::default(),
            bytes_max: AtomicU64::new(bytes_max),
        }
    }

    /// Versions take at most so many bytes from now on.
    pub(crate) fn set_bytes_max(&self, bytes: u64) {
        self.bytes_max.store(bytes, Ordering::Relaxed);
    }

    /// Whether a change must keep the old values of the entries that it changes. The caller has
    /// begun the change.
    #[inline]
    pub(crate) fn are_kept(&self) -> bool {
        self.views.are_kept()
    }

    /// Whether changes keep old values still. Without a view they keep nothing from now on.
    pub(crate) fn are_needed(&self) -> bool {
        self.views.are_needed()
    }

    /// The time of the newest change that kept old values. A view of this time, or a later one,
    /// sees what the pages have.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.views.now()
    }

    /// Begins a view of now, if changes keep old values already.
    pub(crate) fn try_begin_view(&self) -> Option<Time> {
        self.views.try_begin()
    }

    /// Begins a view of now.
    pub(crate) fn begin_view(&self, _no_change: &Freeze<'_>) -> Time {
        self.views.begin()
    }

    /// Ends a view, and drops what no view needs any more, unless that is little. Adds the blobs
    /// that no version needs any more to `unpinned`. Of a view that `has_ended` in a commit, only
    /// the dropping is left.
    pub(crate) fn end_view(&self, time: Time, has_ended: bool, unpinned: &mut Vec<BlobRef>) {
        if !has_ended {
            self.views.end(time);
        }
        // If an older view is left, it needs what it needed before.
        let oldest = self.views.oldest();
        if !self.chains.are_few() && self.reclaimed.load(Ordering::Relaxed) < oldest {
            self.reclaimed.store(oldest, Ordering::Relaxed);
            self.reclaim(unpinned);
        }
    }

    /// Drops all that no view needs. Adds the blobs that no version needs any more to `unpinned`.
    pub(crate) fn reclaim(&self, unpinned: &mut Vec<BlobRef>) {
        self.chains.reclaim(self.views.oldest(), unpinned);
    }

    /// Drops all old values that no view sees, if a view has ended since the last time. Adds the
    /// blobs that no version needs any more to `unpinned`.
    ///
    /// A view that ends leaves what it alone has seen to later changes, unless it was the oldest.
    /// If old values have taken all of their memory, there are no later changes.
    pub(crate) fn drop_unseen(&self, unpinned: &mut Vec<BlobRef>) {
        let ended = self.views.ended();
        if self.ended_before.load(Ordering::Relaxed) != ended {
            let (views, until) = self.views.all();
            self.chains.drop_unseen(&views, until, unpinned);
            // Not before: another thread would be refused meanwhile.
            self.ended_before.store(ended, Ordering::Relaxed);
        }
    }

    /// Drops some of what no view needs any more, after a change of so many entries: at least as
    /// much as the change has kept. Adds the blobs that no version needs any more to `unpinned`.
    pub(crate) fn reclaim_some(&self, changed: usize, unpinned: &mut Vec<BlobRef>) {
        if self.chains.has_own() {
            self.chains.reclaim_own(
                changed,
                || self.views.find(None),
                self.views.oldest(),
                unpinned,
            );
        }
    }

    /// The entry of this key, if a change of it may have something to keep. The caller has begun
    /// the change, and asks [`has_nothing_to_keep`](Self::has_nothing_to_keep) later: what that
    /// looks at comes from memory while the thread looks for the leaf.
    #[inline]
    pub(crate) fn expect_change(&self, tree: u32, key: &[u8]) -> Option<EntryHash> {
        if !self.are_kept() {
            return None;
        }
        let entry = self.hasher.hash(tree, key);
        self.noted.prefetch(entry);
        Some(entry)
    }

    /// Whether a change of this entry has nothing to keep: there is no view, or another change was
    /// kept since the newest view began. The caller holds the locks of all leaves that the change
    /// changes.
    ///
    /// A view that this thread does not know of yet begins after the leaves were locked. So it
    /// waits for them, and sees the change.
    pub(crate) fn has_nothing_to_keep(&self, entry: EntryHash) -> bool {
        fence(Ordering::SeqCst);
        if self.views.open() == 0 {
            self.views.note_idle();
            return true;
        }
        self.views.begun().is_some_and(|views| self.noted.has(entry, views))
    }

    /// Refuses a change if old values take more memory than they may, or would with `more` bytes.
    pub(crate) fn check_room(&self, more: u64) -> Result<(), VersionsFull> {
        match self.bytes() + more <= self.bytes_max.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(VersionsFull),
        }
    }

    /// Keeps the old values of a change. The caller holds the locks of the leaves. `pin` keeps a
    /// blob's pages. Adds the blobs that no version needs any more to `unpinned`.
    pub(crate) fn keep(
        &self,
        replaced: &[Replaced<'_>],
        pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) {
        fence(Ordering::SeqCst);
        if self.views.open() == 0 {
            self.views.note_idle();
            return;
        }
        // Before the change takes its time. So the change is kept for the views that have begun by
        // then; the number grows with each later one.
        let views = self.views.begun();
        let entries = self.hashes(replaced);
        self.put(replaced, &entries, None, |_| {}, pin, unpinned);
        if let Some(views) = views {
            entries.iter().for_each(|entry| self.noted.note(*entry, views));
        }
        self.reclaim_some(entries.len(), unpinned);
    }

    /// Validates a commit that keeps nothing, because there is no other view. Ends its view.
    /// Returns false if there is another one. The caller holds the locks of the leaves: a view that
    /// begins now waits for them, and sees the changes.
    ///
    /// # Errors
    /// [`Conflicting`].
    pub(crate) fn validate_alone(&self, validation: Validation<'_>) -> Result<bool, Conflicting> {
        fence(Ordering::SeqCst);
        if self.views.open() > 1 {
            return Ok(false);
        }
        // The commit takes no time. It comes before all changes that take theirs from now on.
        self.validate(validation, Time::MAX, &mut OwnChanges::default()).map(|()| true)
    }

    /// Validates a commit, and keeps the old values of its changes. Ends its view. The caller holds
    /// the locks of the leaves. When it has released them, it calls
    /// [`reclaim_some`](Self::reclaim_some), also after a conflict.
    ///
    /// # Errors
    /// [`Conflicting`]. Then nothing is kept.
    pub(crate) fn keep_unless_conflicting(
        &self,
        validation: Validation<'_>,
        replaced: &[Replaced<'_>],
        pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Result<(), Conflicting> {
        let entries = self.hashes(replaced);
        let mut own = OwnChanges::default();
        let note = |before| own.before.push(before);
        let time = self.put(replaced, &entries, Some(validation.time), note, pin, unpinned);
        own.entries = replaced;
        self.validate(validation, time, &mut own).inspect_err(|Conflicting| {
            let mut locked = self.chains.lock(&entries);
            // Backwards: the newest chains are at the end of their queue.
            for entry in entries.iter().rev() {
                locked.take_back(time, *entry, unpinned);
            }
        })
    }

    fn hashes(&self, replaced: &[Replaced<'_>]) -> SmallVec<[EntryHash; 8]> {
        replaced.iter().map(|entry| self.hasher.hash(entry.tree, entry.key)).collect()
    }

    /// Takes the time of a change, and puts the old values of its entries into their chains. Takes
    /// no account of one view of the time `own`. Calls `note` for each entry with the time of the
    /// change before this one. Returns the change's time.
    fn put(
        &self,
        replaced: &[Replaced<'_>],
        entries: &[EntryHash],
        own: Option<Time>,
        mut note: impl FnMut(Time),
        mut pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Time {
        let mut locked = self.chains.lock(entries);
        // The time will not be before this one. A transaction whose view is younger has read the
        // entries after this change, because it waited for the leaves.
        let first = self.now() + 1;
        locked.add_missing(first, entries, replaced);
        let note_change = |time| {
            entries.iter().for_each(|entry| self.changed.note(time, *entry));
            locked.note_trees(time, replaced);
        };
        note_change(first);
        let time = self.views.next_time();
        if time > first {
            note_change(time);
        }
        let views = self.views.find(own);
        for (entry, replaced) in entries.iter().zip(replaced) {
            note(locked.put(time, *entry, replaced, &views, &mut pin, unpinned));
        }
        time
    }

    /// Ends the view of a commit, unless another change after the view's time and before `until`
    /// conflicts with what the transaction has read.
    fn validate(
        &self,
        validation: Validation<'_>,
        until: Time,
        own: &mut OwnChanges<'_>,
    ) -> Result<(), Conflicting> {
        let Validation { time, reads, has_ended } = validation;
        if self.now() > time && self.conflicts(reads, (time, until), own) {
            return Err(Conflicting);
        }
        has_ended.store(true, Ordering::Relaxed);
        self.views.end(time);
        Ok(())
    }

    /// Whether one of the entries that a transaction has read has changed between these times.
    fn conflicts(
        &self,
        reads: &ReadSet,
        (since, until): (Time, Time),
        own: &mut OwnChanges<'_>,
    ) -> bool {
        let is_changed = |(tree, key): (u32, &[u8])| {
            let has_changed = match own.before(tree, key) {
                Some(before) => before > since,
                None => {
                    let entry = self.hasher.hash(tree, key);
                    self.changed.may_be_after(since, entry)
                        && self.chains.has_changed(entry, (since, until))
                }
            };
            has_changed || self.loads.after(tree, since).is_some()
        };
        let is_range_changed = |(tree, (start, end)): &(u32, KeyBounds)| {
            let bounds = (start.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
            self.loads.after(*tree, since).is_some()
                || is_range(bounds)
                    && self.chains.may_have_changed(*tree, since)
                    && self.chains.has_range_changed(*tree, bounds, (since, until), |entry| {
                        self.changed.may_be_after(since, entry)
                    })
        };
        (!is_planted(StoreBug::UncheckedKeys) && reads.keys().any(is_changed))
            || (!is_planted(StoreBug::UncheckedRanges)
                && reads.ranges().iter().any(is_range_changed))
    }

    /// A bulk load has filled an empty tree: views of earlier times see none of its entries. The
    /// caller holds the lock of the root.
    pub(crate) fn keep_load(&self, tree: u32) {
        fence(Ordering::SeqCst);
        if self.views.open() == 0 {
            return;
        }
        let mut trees = write(&self.loads.trees);
        // A commit that takes a later time finds this, and waits for the lock.
        self.loads.newest.fetch_max(self.now() + 1, Ordering::SeqCst);
        let time = self.views.next_time();
        self.loads.newest.fetch_max(time, Ordering::SeqCst);
        let oldest = self.views.oldest();
        trees.retain(|_, loads| {
            loads.retain(|load| *load > oldest);
            !loads.is_empty()
        });
        trees.entry(tree).or_default().push(time);
    }

    /// What a view sees of an entry. The caller has read the page before.
    pub(crate) fn at(&self, tree: u32, key: &[u8], time: Time) -> Seen {
        if self.now() <= time {
            return Seen::Page;
        }
        let entry = self.hasher.hash(tree, key);
        // The load first: without one the caller has read a page from before any load, which holds
        // if there is no old value either.
        let load = self.loads.after(tree, time);
        let old = match self.changed.may_be_after(time, entry) {
            true => self.chains.at(entry, time),
            false => None,
        };
        match (old, load) {
            (None, None) => Seen::Page,
            (None, Some(_)) => Seen::Version(None),
            (Some(old), _) => Seen::Version(seen(old, self.loads.after(tree, time))),
        }
    }

    /// What a view sees of a range of keys. The caller has read the page before.
    pub(crate) fn range_at(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        time: Time,
    ) -> SeenRange {
        if self.now() <= time || !is_range(bounds) {
            return SeenRange::default();
        }
        // As in `at`.
        let is_hidden = self.loads.after(tree, time).is_some();
        let old = match self.chains.may_have_changed(tree, time) {
            true => self.chains.range_at(tree, bounds, time),
            false => Vec::new(),
        };
        let load = self.loads.after(tree, time);
        let versions =
            old.into_iter().map(|(key, replaced, old)| (key, seen((replaced, old), load)));
        SeenRange { versions: versions.collect(), is_hidden }
    }

    /// Takes the time of a change that is not of an entry.
    pub(crate) fn take_time(&self) -> Time {
        self.views.next_time()
    }

    /// Whether there is a view of an earlier time.
    pub(crate) fn has_view_before(&self, time: Time) -> bool {
        self.views.has_before(time)
    }

    /// The number of views and the age of the oldest.
    pub(crate) fn views(&self) -> (u64, Option<Duration>) {
        self.views.stat()
    }

    /// The number of old values that changes look at again.
    #[cfg(test)]
    pub(crate) fn fresh(&self) -> usize {
        self.chains.fresh()
    }

    /// The number of chains, by two counts.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (u64, u64) {
        self.chains.counts()
    }

    /// The memory that old values take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.chains.bytes()
    }
}

/// What a view sees of an entry that has an old value: of the first change and the first load after
/// its time, what came first decides. The load was looked for after the change was found, so a load
/// before the change was found, too.
fn seen((replaced, old): (Time, Old), load: Option<Time>) -> Old {
    match load {
        Some(load) if load < replaced => None,
        _ => old,
    }
}

/// Whether the bounds are in order, so that a map takes them.
pub(crate) fn is_range((start, end): (Bound<&[u8]>, Bound<&[u8]>)) -> bool {
    match (start, end) {
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => true,
        (Bound::Excluded(start), Bound::Excluded(end)) => start < end,
        (
            Bound::Included(start) | Bound::Excluded(start),
            Bound::Included(end) | Bound::Excluded(end),
        ) => start <= end,
    }
}
