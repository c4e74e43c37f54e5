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
//! The same lists tell a transaction at its commit which keys were changed since it began. A table
//! spares most looks into the lists (`changed.rs`): few entries change while a transaction runs.
//!
//! The view of a transaction ends in its commit: a transaction that is alone keeps nothing.
//!
//! An entry that was changed since the newest view began keeps nothing when it is changed again
//! (`noted.rs`). So a snapshot that is held for long costs little.
//!
//! While there is no view, changes keep nothing, and do not even count the time. The first view
//! makes changes keep old values: it freezes the change gate for a moment, so that no change is
//! under way that does not know.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::store::changed::{ChangeTimes, Time};
use crate::store::gate::Freeze;
use crate::store::noted::NotedEntries;

/// So many changes without a view are made before changes keep nothing any more. Then the next view
/// has to freeze the gate.
const IDLE_CHANGES: u32 = 1000;

/// A change that keeps old values drops those of so many entries that no view needs.
const RECLAIMED_PER_CHANGE: usize = 8;

/// So many when a view ends, before other threads have their turn.
const RECLAIMED_AT_ONCE: usize = 256;

/// A list of keys first has memory for so many keys of so many bytes.
const KEYS_AT_FIRST: usize = 48;
const BYTES_OF_KEY: usize = 16;

/// What a chain and its key take in memory beside the bytes of keys and values.
const CHAIN_BYTES: u64 = 160;

/// The start and the end of a range of keys.
pub(crate) type KeyBounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// The value of an entry that was changed, or `None` if there was no entry.
pub(crate) type Old = Option<OldValue>;

/// A value that was replaced or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OldValue {
    Inline(Arc<[u8]>),
    /// The pages of the value are pinned while the version is kept.
    Blob(BlobRef),
}

/// An entry that a change is about to change.
#[derive(Debug)]
pub(crate) struct Replaced {
    pub tree: u32,
    pub key: Key,
    pub old: Old,
}

/// The entries that a transaction has read, or must find unchanged for another reason, each with
/// the number of its tree.
#[derive(Debug, Default)]
pub(crate) struct ReadSet {
    pub keys: KeyList,
    pub ranges: Vec<(u32, KeyBounds)>,
}

/// What a commit must find unchanged since the time of the transaction's view. The view ends when
/// nothing has changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Validation<'v> {
    pub time: Time,
    pub reads: &'v ReadSet,
    /// Whether the view has ended.
    pub has_ended: &'v AtomicBool,
}

/// Keys, one after the other, each with the number of its tree.
#[derive(Debug, Default)]
pub(crate) struct KeyList {
    bytes: Vec<u8>,
    /// The tree of each key, and where the key ends.
    ends: Vec<(u32, usize)>,
}

impl KeyList {
    pub(crate) fn push(&mut self, tree: u32, key: &[u8]) {
        if self.ends.capacity() == 0 {
            self.ends.reserve(KEYS_AT_FIRST);
            self.bytes.reserve(KEYS_AT_FIRST * BYTES_OF_KEY);
        }
        self.bytes.extend_from_slice(key);
        self.ends.push((tree, self.bytes.len()));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &[u8])> {
        let mut begin = 0;
        self.ends
            .iter()
            .map(move |&(tree, end)| (tree, &self.bytes[std::mem::replace(&mut begin, end)..end]))
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
    /// Whether changes keep old values. It becomes true only while no change is under way.
    are_kept: AtomicBool,
    /// The time of the newest change that kept old values.
    now: AtomicU64,
    /// What all chains take, in bytes.
    bytes: AtomicU64,
    bytes_max: u64,
    /// The number of views that have begun.
    views_begun: AtomicU64,
    /// The number of views.
    views_open: AtomicU64,
    noted: NotedEntries,
    changed: ChangeTimes,
    /// The time of the newest bulk load of an empty tree.
    newest_load: AtomicU64,
    lists: RwLock<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    views: BTreeMap<Time, Views>,
    trees: HashMap<u32, TreeVersions>,
    /// Each chain once, with a time before which it need not be looked at, oldest first.
    queue: VecDeque<(Time, u32, Key)>,
    /// The number of changes since there was a view.
    idle: u32,
}

/// The views of one time.
#[derive(Debug)]
struct Views {
    count: u64,
    since: Instant,
}

#[derive(Debug, Default)]
struct TreeVersions {
    chains: BTreeMap<Key, Chain>,
    /// The times at which a bulk load filled the tree, which was empty before. A load keeps no
    /// version for each entry.
    loads: Vec<Time>,
}

/// The versions of one entry.
#[derive(Debug, Default)]
struct Chain {
    /// The time of the newest change of the entry.
    newest: Time,
    /// Old values and the times of the changes that replaced them, oldest first. A value that no
    /// view can see is left out, or goes with the next change of the entry.
    old: SmallVec<[(Time, Old); 1]>,
}

/// When a chain is extended, so many of its newest versions are dropped if no view sees them any
/// more. Older ones were looked at when they were among the newest.
const LOOKED_AT: usize = 8;

impl Chain {
    /// What a view of `time` sees, if it is not what the page has.
    fn at(&self, time: Time) -> Option<(Time, &Old)> {
        let index = self.old.partition_point(|(replaced, _)| *replaced <= time);
        self.old.get(index).map(|(replaced, old)| (*replaced, old))
    }
}

impl Chain {
    /// Drops those of the newest versions that no view sees.
    fn drop_unseen(&mut self, views: &BTreeMap<Time, Views>, mut dropped: impl FnMut(Old)) {
        let mut index = self.old.len().saturating_sub(LOOKED_AT);
        while index < self.old.len() {
            let since = index.checked_sub(1).map_or(0, |before| self.old[before].0);
            match views.range(since..self.old[index].0).next() {
                Some(_) => index += 1,
                None => dropped(self.old.remove(index).1),
            }
        }
    }
}

/// What an old value takes in memory, in bytes.
pub(crate) fn size_of(key: &[u8], old: &Old) -> u64 {
    let value = match old {
        Some(OldValue::Inline(value)) => value.len(),
        Some(OldValue::Blob(_)) | None => 0,
    };
    (key.len() + value) as u64 + CHAIN_BYTES
}

impl Versions {
    /// Versions that take at most so many bytes.
    pub(crate) fn new(bytes_max: u64) -> Versions {
        Versions {
            are_kept: AtomicBool::new(false),
            now: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            bytes_max,
            views_begun: AtomicU64::new(0),
            views_open: AtomicU64::new(0),
            noted: NotedEntries::new(bytes_max / 8),
            changed: ChangeTimes::new(bytes_max / 64),
            newest_load: AtomicU64::new(0),
            lists: RwLock::default(),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Lists> {
        self.lists.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Lists> {
        self.lists.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a change must keep the old values of the entries that it changes. The caller has
    /// begun the change.
    #[inline]
    pub(crate) fn are_kept(&self) -> bool {
        self.are_kept.load(Ordering::Relaxed)
    }

    /// Whether there are views. If not, changes keep nothing from now on. The caller has exclusive
    /// use of the store: a view that begins now waits for it.
    pub(crate) fn are_needed(&self) -> bool {
        let lists = self.write();
        if lists.views.is_empty() {
            self.are_kept.store(false, Ordering::Relaxed);
        }
        self.are_kept()
    }

    /// The time of the newest change that kept old values. A view of this time, or a later one,
    /// sees what the pages have.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.now.load(Ordering::Acquire)
    }

    /// Begins a view of now, if changes keep old values already.
    pub(crate) fn try_begin_view(&self) -> Option<Time> {
        let mut lists = self.write();
        self.are_kept().then(|| self.add_view(&mut lists))
    }

    /// Begins a view of now.
    pub(crate) fn begin_view(&self, _no_change: &Freeze<'_>) -> Time {
        let mut lists = self.write();
        self.are_kept.store(true, Ordering::Relaxed);
        self.add_view(&mut lists)
    }

    fn add_view(&self, lists: &mut Lists) -> Time {
        lists.idle = 0;
        let now = self.now();
        let new = || Views { count: 0, since: Instant::now() };
        lists.views.entry(now).or_insert_with(new).count += 1;
        self.views_open.fetch_add(1, Ordering::Relaxed);
        // Before the view reads any page: see `is_noted`.
        self.views_begun.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        now
    }

    /// Whether a change of this entry has nothing to keep, because another one was kept since the
    /// newest view began. The caller holds the locks of all leaves that the change changes.
    ///
    /// A view that this thread does not know of yet begins after the leaves were locked. So it
    /// waits for them, and sees the change.
    pub(crate) fn is_noted(&self, tree: u32, key: &[u8]) -> bool {
        fence(Ordering::SeqCst);
        self.noted.has(tree, key, self.views_begun.load(Ordering::SeqCst))
    }

    fn remove_view(&self, lists: &mut Lists, time: Time) {
        if let Some(views) = lists.views.get_mut(&time) {
            self.views_open.fetch_sub(1, Ordering::Relaxed);
            views.count -= 1;
            if views.count == 0 {
                lists.views.remove(&time);
            }
        }
    }

    /// Ends a view, and drops what only that view needed. Adds the blobs that no version needs any
    /// more to `unpinned`. A view that `has_ended` in a commit has only left something to drop.
    ///
    /// The end of the oldest view drops in portions, so that changes do not wait for all of it.
    pub(crate) fn end_view(&self, time: Time, has_ended: bool, unpinned: &mut Vec<BlobRef>) {
        let mut lists = self.write();
        if !has_ended {
            self.remove_view(&mut lists, time);
        }
        if lists.views.is_empty() {
            // A thread that has to drop much does it after it has released the lock.
            let gone = (std::mem::take(&mut lists.trees), std::mem::take(&mut lists.queue));
            drop(lists);
            let mut bytes = 0;
            for (key, chain) in gone.0.values().flat_map(|tree| &tree.chains) {
                for (_, old) in &chain.old {
                    bytes += size_of(key, old);
                    if let Some(OldValue::Blob(blob)) = old {
                        unpinned.push(*blob);
                    }
                }
            }
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return;
        }
        let is_oldest = lists.views.keys().next().is_some_and(|oldest| *oldest > time);
        while self.reclaim(&mut lists, RECLAIMED_AT_ONCE, unpinned) && is_oldest {
            drop(lists);
            lists = self.write();
        }
    }

    /// Drops the versions of up to `most` entries that no view needs. Returns whether there may be
    /// more.
    fn reclaim(&self, lists: &mut Lists, most: usize, unpinned: &mut Vec<BlobRef>) -> bool {
        let Some(oldest) = lists.views.keys().next().copied() else { return false };
        for _ in 0..most {
            match lists.queue.front() {
                Some((time, ..)) if *time <= oldest => {}
                _ => return false,
            }
            let Some((_, id, key)) = lists.queue.pop_front() else { return false };
            let Some(tree) = lists.trees.get_mut(&id) else { continue };
            tree.loads.retain(|load| *load > oldest);
            let Some(chain) = tree.chains.get_mut(&key) else { continue };
            let oldest = oldest + Time::from(is_planted(StoreBug::LostVersion));
            let needless = chain.old.partition_point(|(replaced, _)| *replaced <= oldest);
            for (_, old) in chain.old.drain(..needless) {
                self.bytes.fetch_sub(size_of(&key, &old), Ordering::Relaxed);
                if let Some(OldValue::Blob(blob)) = old {
                    unpinned.push(blob);
                }
            }
            // As long as a view is older than the newest change, a validation needs the chain.
            match chain.newest <= oldest {
                true => drop(tree.chains.remove(&key)),
                false => lists.queue.push_back((self.now(), id, key)),
            }
        }
        true
    }

    /// Refuses a change if old values take more memory than they may, or would with `more` bytes.
    pub(crate) fn check_room(&self, more: u64) -> Result<(), VersionsFull> {
        match self.bytes() + more <= self.bytes_max {
            true => Ok(()),
            false => Err(VersionsFull),
        }
    }

    /// Keeps the old values of a change. The caller holds the locks of the leaves. `pin` keeps a
    /// blob's pages. Adds the blobs that no version needs any more to `unpinned`.
    pub(crate) fn keep(
        &self,
        replaced: Vec<Replaced>,
        pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) {
        let mut lists = self.write();
        if !lists.views.is_empty() {
            // No view begins while this thread holds the lists.
            let views = self.views_begun.load(Ordering::Relaxed);
            replaced.iter().for_each(|entry| self.noted.note(entry.tree, &entry.key, views));
        }
        self.keep_in(&mut lists, replaced, pin, unpinned);
    }

    /// Ends the view of a commit, unless another change since its time conflicts with what the
    /// transaction has read.
    fn validate(&self, lists: &mut Lists, validation: Validation<'_>) -> Result<(), Conflicting> {
        let Validation { time, reads, has_ended } = validation;
        if self.now() > time && self.conflicts(lists, time, reads) {
            return Err(Conflicting);
        }
        has_ended.store(true, Ordering::Relaxed);
        self.remove_view(lists, time);
        Ok(())
    }

    /// Validates a commit that keeps nothing, because there is no other view. Returns false if
    /// there is one. The caller holds the locks of the leaves: a view that begins now waits for
    /// them, and sees the changes.
    ///
    /// # Errors
    /// [`Conflicting`].
    pub(crate) fn validate_alone(&self, validation: Validation<'_>) -> Result<bool, Conflicting> {
        if self.views_open.load(Ordering::Relaxed) > 1 {
            return Ok(false);
        }
        let mut lists = self.write();
        if self.views_open.load(Ordering::Relaxed) > 1 {
            return Ok(false);
        }
        self.validate(&mut lists, validation).map(|()| true)
    }

    /// Validates a commit, and keeps the old values of its changes. The caller holds the locks of
    /// the leaves.
    ///
    /// # Errors
    /// [`Conflicting`]. Then nothing is kept.
    pub(crate) fn keep_unless_conflicting(
        &self,
        validation: Validation<'_>,
        replaced: Vec<Replaced>,
        pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Result<(), Conflicting> {
        let mut lists = self.write();
        self.validate(&mut lists, validation)?;
        self.keep_in(&mut lists, replaced, pin, unpinned);
        Ok(())
    }

    fn keep_in(
        &self,
        lists: &mut Lists,
        replaced: Vec<Replaced>,
        mut pin: impl FnMut(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) {
        if lists.views.is_empty() {
            lists.idle += 1;
            if lists.idle > IDLE_CHANGES {
                self.are_kept.store(false, Ordering::Relaxed);
            }
            return;
        }
        let now = self.now() + 1;
        let mut bytes = 0;
        for Replaced { tree, key, old } in replaced {
            self.changed.note(now, tree, &key);
            let chain = lists.trees.entry(tree).or_default().chains.entry(key.clone());
            let chain = chain.or_insert_with(|| {
                lists.queue.push_back((now, tree, key.clone()));
                Chain::default()
            });
            chain.drop_unseen(&lists.views, |old| {
                self.bytes.fetch_sub(size_of(&key, &old), Ordering::Relaxed);
                if let Some(OldValue::Blob(blob)) = old {
                    unpinned.push(blob);
                }
            });
            // Only a view that is younger than the last change of the entry sees the old value.
            if lists.views.range(chain.newest..now).next().is_some() {
                bytes += size_of(&key, &old);
                if let Some(OldValue::Blob(blob)) = &old {
                    pin(*blob);
                }
                chain.old.push((now, old));
            }
            chain.newest = now;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        // A view that begins now sees the change: it waits for the locks of the leaves.
        self.now.store(now, Ordering::Release);
        self.reclaim(lists, RECLAIMED_PER_CHANGE, unpinned);
    }

    /// A bulk load has filled an empty tree: views of earlier times see none of its entries. The
    /// caller holds the lock of the root.
    pub(crate) fn keep_load(&self, tree: u32) {
        let mut lists = self.write();
        if !lists.views.is_empty() {
            let now = self.now() + 1;
            lists.trees.entry(tree).or_default().loads.push(now);
            self.newest_load.store(now, Ordering::Release);
            self.now.store(now, Ordering::Release);
        }
    }

    /// Whether one of the entries that a transaction has read has changed since `time`.
    fn conflicts(&self, lists: &Lists, time: Time, reads: &ReadSet) -> bool {
        let changed = |chain: &Chain| chain.newest > time;
        let is_changed = |(tree, key): (u32, &[u8])| {
            self.may_have_changed(tree, key, time)
                && lists.trees.get(&tree).is_some_and(|tree| {
                    tree.load_after(time).is_some() || tree.chains.get(key).is_some_and(changed)
                })
        };
        let is_range_changed = |(tree, (start, end)): &(u32, KeyBounds)| {
            let Some(tree) = lists.trees.get(tree) else { return false };
            let bounds = (start.as_ref().map(|key| &key[..]), end.as_ref().map(|key| &key[..]));
            tree.load_after(time).is_some()
                || is_range(bounds)
                    && tree.chains.range::<[u8], _>(bounds).any(|(_, chain)| changed(chain))
        };
        (!is_planted(StoreBug::UncheckedKeys) && reads.keys.iter().any(is_changed))
            || (!is_planted(StoreBug::UncheckedRanges) && reads.ranges.iter().any(is_range_changed))
    }

    /// What a view sees of an entry. The caller has read the page before.
    pub(crate) fn at(&self, tree: u32, key: &[u8], time: Time) -> Seen {
        if self.now() <= time || !self.may_have_changed(tree, key, time) {
            return Seen::Page;
        }
        let lists = self.read();
        let Some(tree) = lists.trees.get(&tree) else { return Seen::Page };
        tree.at(tree.chains.get(key), time)
    }

    /// Whether the lists may have a change of the entry after this time.
    fn may_have_changed(&self, tree: u32, key: &[u8], time: Time) -> bool {
        self.changed.may_be_after(time, tree, key)
            || self.newest_load.load(Ordering::Acquire) > time
    }

    /// What a view sees of a range of keys. The caller has read the page before.
    pub(crate) fn range_at(
        &self,
        tree: u32,
        (start, end): (Bound<&[u8]>, Bound<&[u8]>),
        time: Time,
    ) -> SeenRange {
        if self.now() <= time {
            return SeenRange::default();
        }
        let lists = self.read();
        let Some(tree) = lists.trees.get(&tree).filter(|_| is_range((start, end))) else {
            return SeenRange::default();
        };
        let mut versions = Vec::new();
        for (key, chain) in tree.chains.range::<[u8], _>((start, end)) {
            if let Seen::Version(old) = tree.at(Some(chain), time) {
                versions.push((key.clone(), old));
            }
        }
        SeenRange { versions, is_hidden: tree.load_after(time).is_some() }
    }

    /// Whether there is a view of an earlier time.
    pub(crate) fn has_view_before(&self, time: Time) -> bool {
        self.read().views.keys().next().is_some_and(|oldest| *oldest < time)
    }

    /// The number of views and the age of the oldest.
    pub(crate) fn views(&self) -> (u64, Option<Duration>) {
        let lists = self.read();
        let count = lists.views.values().map(|views| views.count).sum();
        let oldest = lists.views.values().next();
        (count, oldest.map(|views| views.since.elapsed()))
    }

    /// The memory that old values take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl TreeVersions {
    /// The first bulk load after this time.
    fn load_after(&self, time: Time) -> Option<Time> {
        self.loads.iter().copied().find(|load| *load > time)
    }

    fn at(&self, chain: Option<&Chain>, time: Time) -> Seen {
        let old = chain.and_then(|chain| chain.at(time));
        // What came first after the view's time decides.
        match (old, self.load_after(time)) {
            (Some((replaced, _)), Some(load)) if load < replaced => Seen::Version(None),
            (Some((_, old)), _) => Seen::Version(old.clone()),
            (None, Some(_)) => Seen::Version(None),
            (None, None) => Seen::Page,
        }
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
