//! Chains: the old values of each entry, in buckets, and registers of them.
//!
//! The keyed hash of an entry says in which *bucket* its chain is. Each bucket has a lock. A change
//! locks all buckets that it needs, in one order, before it takes its time. So a thread that has
//! taken a later time, and locks a bucket after that, finds what the change has put there.
//!
//! The *register* of a thread has the entries whose chains its changes have made: in the order of
//! their keys, for ranges, and in the order of time, for those that no view needs any more. Most
//! chains go soon after they have come, so the newest are not in the order of their keys yet. A
//! change locks the register of its thread before its buckets. There are many buckets, so two
//! threads rarely want the same one, and each thread mostly works in its own register: threads on
//! processors that are far from each other do not wait for each other's memory.
//!
//! A chain stays in one register until it is removed, also if other threads extend it. It is not
//! removed while a view is older than its newest change. So a thread that looks through all
//! registers after it has taken its time, one after the other, misses no change of an earlier time:
//! either the chain was there before that change, and stays where it is, or the change has locked
//! its own register.

use std::collections::{BTreeMap, VecDeque};
use std::ops::{Bound, RangeBounds};

use smallvec::SmallVec;

use crate::key::Key;
use crate::page::blob::BlobRef;
use crate::planted::{StoreBug, is_planted};
use crate::sync::{
    AtomicBool, AtomicU64, Ordering, RwLock, RwLockWriteGuard, prefetch_value, read_soon,
    thread_number, write_soon,
};
use crate::versions::chain_table::{Chain, ChainTable, Tally};
use crate::versions::entry::{EntryHash, Old, Replaced, Time};
use crate::versions::views::{Apart, FoundViews};

/// The number of buckets. In this crate's own tests it is so small that entries share some.
const BUCKETS: usize = if cfg!(test) { 8 } else { 512 };

/// The number of registers.
const REGISTERS: usize = if cfg!(test) { 3 } else { 16 };

/// A change drops the versions of so many entries that no view needs, or of twice as many as it
/// changes itself.
const RECLAIMED_PER_CHANGE: usize = 8;

/// So many are dropped at once when a view ends, before other threads have their turn.
const RECLAIMED_AT_ONCE: usize = 256;

/// So many old values may wait for the views that see them to end, while a processor has them in
/// its cache.
const FRESH: usize = 256;

/// A view that ends leaves so many chains, and so many bytes of old values, for changes to drop. It
/// is less than old values may take: a store that is full of them allows no change.
const LEFT: u64 = 1024;
const LEFT_BYTES: u64 = 1 << 20;

/// A register has so many entries at most that are not in the order of their keys.
const UNORDERED: usize = if cfg!(test) { 4 } else { 64 };

/// A register keeps the memory of so many chains that were removed.
const SPARE: usize = 64;

/// A register has the times of changes of so many trees; several trees share one. They take two
/// cache lines.
const TREE_TIMES: usize = 16;

/// A register keeps the memory of a tree that has no chains, if it has so many trees at most.
const EMPTY_TREES: usize = 16;

/// A queue with more memory than for so many gives some back when a quarter of it would do.
const SHORT_QUEUE: usize = 64;

/// A register counts so much for itself, before it adds that to what threads share.
const COUNTED_BYTES: u64 = 16 << 10;
const COUNTED_CHAINS: u64 = 64;

/// Some chains, with their lock.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket(RwLock<ChainTable>);

/// Entries that have chains.
#[derive(Debug, Default)]
struct Register {
    /// By their trees.
    order: BTreeMap<u32, BTreeMap<Key, EntryHash>>,
    /// The newest entries, oldest first, which are not in `order`.
    unordered: VecDeque<(u32, Key, EntryHash)>,
    /// Each once, with a time before which its chain need not be looked at, oldest first.
    queue: VecDeque<(Time, EntryHash)>,
    /// The newest old values, by the changes that have replaced them.
    fresh: VecDeque<(Time, EntryHash)>,
    /// Chains that were removed, whose memory new ones take: the allocator has a lock, which other
    /// threads want, too.
    #[allow(clippy::vec_box)] // lists take the boxes as they are
    spare: Vec<Box<Chain>>,
    /// What the threads of this register have kept and dropped, and have not added to the counts
    /// that all threads share.
    tally: Tally,
}

impl Register {
    /// Adds an entry that has no chain. Returns its chain, which is empty.
    fn add(&mut self, time: Time, entry: EntryHash, of: &Replaced<'_>) -> Box<Chain> {
        let chain = Chain::new(entry, of);
        let chain = match self.spare.pop() {
            Some(mut spare) => {
                *spare = chain;
                spare
            }
            None => Box::new(chain),
        };
        if self.unordered.len() >= UNORDERED {
            (0..UNORDERED / 2).for_each(|_| self.order_first());
        }
        self.unordered.push_back((chain.tree, chain.key.clone(), chain.entry));
        self.queue.push_back((time, chain.entry));
        self.tally.chains = self.tally.chains.wrapping_add(1);
        chain
    }

    /// Moves the oldest entry of `unordered` to `order`.
    fn order_first(&mut self) {
        if let Some((tree, key, entry)) = self.unordered.pop_front() {
            self.order.entry(tree).or_default().insert(key, entry);
        }
    }

    /// Puts an entry at the end of the queue. Others are removed before it.
    fn requeue(&mut self, time: Time, entry: EntryHash) {
        if self.unordered.front().is_some_and(|(.., first)| *first == entry) {
            self.order_first();
        }
        self.queue.push_back((time, entry));
    }

    /// Removes an entry that is not in the queue any more.
    fn remove(&mut self, mut chain: Box<Chain>) {
        self.tally.chains = self.tally.chains.wrapping_sub(1);
        shrink(&mut self.queue);
        self.remove_from_order(&chain);
        if self.spare.len() < SPARE && !chain.old.spilled() {
            chain.key = Key::from(&[][..]);
            self.spare.push(chain);
        }
    }

    fn remove_from_order(&mut self, chain: &Chain) {
        let is_this = |(.., entry): &(u32, Key, EntryHash)| *entry == chain.entry;
        // Most are the oldest.
        if self.unordered.front().is_some_and(is_this) {
            self.unordered.pop_front();
            return;
        }
        let entries = self.order.get_mut(&chain.tree);
        if let Some(entries) = entries
            && entries.remove(&chain.key).is_some()
        {
            if entries.is_empty() && self.order.len() > EMPTY_TREES {
                self.order.remove(&chain.tree);
            }
        } else if let Some(place) = self.unordered.iter().rposition(is_this) {
            // Of a commit that is taken back.
            self.unordered.remove(place);
        }
    }

    /// Forgets the fresh values that no view sees: the queue comes to their chains.
    fn forget_fresh(&mut self, oldest: Time) {
        while self.fresh.front().is_some_and(|(time, _)| *time <= oldest) {
            self.fresh.pop_front();
        }
        shrink(&mut self.fresh);
    }

    /// The entries of a range.
    fn range(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
    ) -> impl Iterator<Item = (&Key, EntryHash)> {
        let ordered = self.order.get(&tree).into_iter();
        let ordered = ordered.flat_map(move |entries| entries.range::<[u8], _>(bounds));
        let is_in = move |of: u32, key: &[u8]| of == tree && bounds.contains(key);
        let unordered = self.unordered.iter().filter(move |(of, key, _)| is_in(*of, key));
        let unordered = unordered.map(|(_, key, entry)| (key, *entry));
        ordered.map(|(key, entry)| (key, *entry)).chain(unordered)
    }
}

/// Gives memory back that the queue does not need.
fn shrink(queue: &mut VecDeque<(Time, EntryHash)>) {
    if queue.capacity() > 4 * queue.len().max(SHORT_QUEUE) {
        queue.shrink_to(2 * queue.len().max(SHORT_QUEUE));
    }
}

/// A register with its lock, in memory that it shares with no other one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LockedRegister {
    /// The number of entries. It grows before a change takes its time.
    chains: AtomicU64,
    /// Whether there may be anything to drop: entries, or fresh values of entries that are in other
    /// registers. A thread that has the lock writes it.
    is_used: AtomicBool,
    register: RwLock<Register>,
    /// For each tree, a time that is not before the newest change that a thread of this register
    /// has kept there.
    tree_times: Apart<[AtomicU64; TREE_TIMES]>,
}

impl LockedRegister {
    /// Notes whether there is anything left to drop.
    fn note_use(&self, register: &Register) {
        let is_used = !register.queue.is_empty() || !register.fresh.is_empty();
        self.is_used.store(is_used, Ordering::Relaxed);
    }

    fn tree_time(&self, tree: u32) -> &AtomicU64 {
        &self.tree_times.0[tree as usize % TREE_TIMES]
    }
}

/// A count of what threads share. One thread may have dropped what another one has kept and not
/// counted here yet.
fn at_least_none(count: &AtomicU64) -> u64 {
    let count = count.load(Ordering::Relaxed);
    if count.cast_signed() < 0 { 0 } else { count }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Chains {
    buckets: Box<[Bucket]>,
    registers: [LockedRegister; REGISTERS],
    /// What all chains take, in bytes. Registers add what they have counted from time to time.
    bytes: AtomicU64,
    /// The number of old values that are blobs.
    blobs: AtomicU64,
    /// The number of chains.
    count: AtomicU64,
}

/// What a change has locked: the register of its thread, and its buckets.
pub(crate) struct LockedChains<'c> {
    chains: &'c Chains,
    shared: &'c LockedRegister,
    register: RwLockWriteGuard<'c, Register>,
    buckets: LockedBuckets<'c>,
    /// The number of entries that the change changes.
    entries: usize,
}

impl Chains {
    pub(crate) fn new() -> Chains {
        Chains {
            buckets: (0..BUCKETS).map(|_| Bucket::default()).collect(),
            registers: Default::default(),
            bytes: AtomicU64::new(0),
            blobs: AtomicU64::new(0),
            count: AtomicU64::new(0),
        }
    }

    /// The memory that old values take, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        at_least_none(&self.bytes)
    }

    /// The number of chains, by two counts, which are the same when no change is under way.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (u64, u64) {
        let registers = self.registers.iter();
        let counted = registers.clone().map(|shared| shared.chains.load(Ordering::SeqCst)).sum();
        let queued = registers.map(|shared| read_soon(&shared.register).queue.len() as u64).sum();
        (counted, queued)
    }

    /// The number of fresh old values.
    #[cfg(test)]
    pub(crate) fn fresh(&self) -> usize {
        self.registers.iter().map(|shared| read_soon(&shared.register).fresh.len()).sum()
    }

    /// The register of this thread.
    fn own(&self) -> &LockedRegister {
        &self.registers[thread_number() % REGISTERS]
    }

    fn bucket(&self, entry: EntryHash) -> &RwLock<ChainTable> {
        &self.buckets[entry.bucket(BUCKETS)].0
    }

    /// Locks what a change of these entries needs.
    pub(crate) fn lock(&self, entries: &[EntryHash]) -> LockedChains<'_> {
        let mut places: SmallVec<[usize; 8]> =
            entries.iter().map(|entry| entry.bucket(BUCKETS)).collect();
        // They come from the memory of other processors at the same time.
        places.iter().for_each(|place| prefetch_value(&self.buckets[*place]));
        places.sort_unstable();
        places.dedup();
        let shared = self.own();
        let register = write_soon(&shared.register);
        shared.is_used.store(true, Ordering::Relaxed);
        let lock = |place: usize| (place, write_soon(&self.buckets[place].0));
        let buckets = places.into_iter().map(lock).collect();
        LockedChains { chains: self, shared, register, buckets, entries: entries.len() }
    }

    /// What a view of `time` sees of an entry, if that is not what the page has, and the time of
    /// the change that replaced it.
    pub(crate) fn at(&self, entry: EntryHash, time: Time) -> Option<(Time, Old)> {
        let lists = read_soon(self.bucket(entry));
        lists.find(entry)?.at(time).map(|(replaced, old)| (replaced, old.clone()))
    }

    /// The same, of all entries of a range, in the order of their keys.
    pub(crate) fn range_at(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        time: Time,
    ) -> Vec<(Key, Time, Old)> {
        let mut found = Vec::new();
        for LockedRegister { register, .. } in self.filled() {
            for (key, entry) in read_soon(register).range(tree, bounds) {
                found.extend(self.at(entry, time).map(|(at, old)| (key.clone(), at, old)));
            }
        }
        found.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
        found
    }

    /// Whether an entry of a tree may have changed after this time. Takes no lock, as the table of
    /// `change_times.rs` does for one entry.
    pub(crate) fn may_have_changed(&self, tree: u32, since: Time) -> bool {
        let time_of = |shared: &LockedRegister| shared.tree_time(tree).load(Ordering::SeqCst);
        self.registers.iter().any(|shared| time_of(shared) > since)
    }

    /// Whether an entry has changed between two times. May be wrong with the answer true.
    pub(crate) fn has_changed(&self, entry: EntryHash, times: (Time, Time)) -> bool {
        read_soon(self.bucket(entry)).find(entry).is_some_and(|chain| chain.has_changed(times))
    }

    /// The same, of any entry of a range. Looks only at those that `may_have_changed`.
    pub(crate) fn has_range_changed(
        &self,
        tree: u32,
        bounds: (Bound<&[u8]>, Bound<&[u8]>),
        times: (Time, Time),
        may_have_changed: impl Fn(EntryHash) -> bool,
    ) -> bool {
        self.filled().any(|LockedRegister { register, .. }| {
            let register = read_soon(register);
            register
                .range(tree, bounds)
                .any(|(_, entry)| may_have_changed(entry) && self.has_changed(entry, times))
        })
    }

    /// The registers that have entries.
    fn filled(&self) -> impl Iterator<Item = &LockedRegister> {
        self.registers.iter().filter(|shared| shared.chains.load(Ordering::SeqCst) > 0)
    }

    /// Whether the old values are so few that changes may drop them.
    pub(crate) fn are_few(&self) -> bool {
        self.bytes() <= LEFT_BYTES
            && at_least_none(&self.count) <= LEFT
            && at_least_none(&self.blobs) == 0
    }

    /// Drops the versions that no view needs: none is older than `oldest`. Adds the blobs that no
    /// version needs any more to `unpinned`. Afterwards [`bytes`](Self::bytes) is exact, unless
    /// changes are under way.
    pub(crate) fn reclaim(&self, oldest: Time, unpinned: &mut Vec<BlobRef>) {
        for shared in &self.registers {
            // In portions, so that changes do not wait for all of it.
            let mut is_more = shared.is_used.load(Ordering::Relaxed);
            while is_more {
                let mut register = write_soon(&shared.register);
                is_more =
                    self.reclaim_some(shared, &mut register, RECLAIMED_AT_ONCE, oldest, unpinned);
                register.forget_fresh(oldest);
                self.add(&mut register.tally);
                shared.note_use(&register);
            }
        }
    }

    /// Drops the old values that none of these views sees, and that changes of the time `until` or
    /// earlier ones have replaced. Views that are not among these are of that time or later ones.
    pub(crate) fn drop_unseen(
        &self,
        views: &FoundViews<'_>,
        until: Time,
        unpinned: &mut Vec<BlobRef>,
    ) {
        for shared in &self.registers {
            let (mut at, mut is_more) = (0, shared.is_used.load(Ordering::Relaxed));
            while is_more {
                // In portions, so that changes do not wait for all of it. What they remove from the
                // queue meanwhile makes this pass over as many entries.
                let register = &mut *write_soon(&shared.register);
                let entries = register.queue.iter().skip(at).take(RECLAIMED_AT_ONCE);
                let entries: Vec<EntryHash> = entries.map(|(_, entry)| *entry).collect();
                for entry in &entries {
                    if let Some(chain) = write_soon(self.bucket(*entry)).find_mut(*entry) {
                        chain.drop_all_unseen(until, views, |key, old| {
                            register.tally.dropped(key, old, unpinned);
                        });
                    }
                }
                self.add(&mut register.tally);
                at += entries.len();
                is_more = entries.len() == RECLAIMED_AT_ONCE;
            }
        }
    }

    /// Whether there may be anything to drop in the register of this thread.
    pub(crate) fn has_own(&self) -> bool {
        self.own().is_used.load(Ordering::Relaxed)
    }

    /// Drops some versions in the register of this thread that no view needs, after a change of so
    /// many entries: none of the views that `find_views` finds, and none is older than `oldest`.
    /// The caller has locked no bucket.
    pub(crate) fn reclaim_own<'v>(
        &self,
        changed: usize,
        find_views: impl FnOnce() -> FoundViews<'v>,
        oldest: Time,
        unpinned: &mut Vec<BlobRef>,
    ) {
        let shared = self.own();
        let mut register = write_soon(&shared.register);
        let most = RECLAIMED_PER_CHANGE.max(2 * changed);
        match find_views() {
            // The list of views is locked, and its lock comes after those of buckets.
            views @ FoundViews::Many(_) => {
                drop(views);
                register.forget_fresh(oldest);
                let more = register.fresh.len().saturating_sub(FRESH);
                register.fresh.drain(..more);
            }
            views @ FoundViews::Few(_) => {
                self.drop_fresh(&mut register, most, &views, oldest, unpinned);
            }
        }
        self.reclaim_some(shared, &mut register, most, oldest, unpinned);
        self.count_soon(&mut register);
        shared.note_use(&register);
    }

    /// Drops the versions of up to `most` entries of a register that no view needs. The caller has
    /// locked no bucket. Returns whether there may be more.
    fn reclaim_some(
        &self,
        shared: &LockedRegister,
        register: &mut Register,
        most: usize,
        oldest: Time,
        unpinned: &mut Vec<BlobRef>,
    ) -> bool {
        for _ in 0..most {
            let entry = match register.queue.front() {
                Some((time, entry)) if *time <= oldest => *entry,
                _ => return false,
            };
            register.queue.pop_front();
            let mut lists = write_soon(self.bucket(entry));
            let Some(chain) = lists.find_mut(entry) else { continue };
            let oldest = oldest + Time::from(is_planted(StoreBug::LostVersion));
            let newest = chain.newest;
            // As long as a view is older than the newest change, a validation needs the chain.
            let is_needed = newest > oldest;
            let needless = match is_needed {
                true => chain.old.partition_point(|(replaced, _)| *replaced <= oldest),
                false => chain.old.len(),
            };
            for (_, old) in chain.old.drain(..needless) {
                register.tally.dropped(&chain.key, &old, unpinned);
            }
            if is_needed {
                let last = register.queue.back().map_or(newest, |(time, _)| newest.max(*time));
                register.requeue(last, entry);
            } else if let Some(chain) = lists.remove(entry) {
                drop(lists);
                register.remove(chain);
                shared.chains.fetch_sub(1, Ordering::SeqCst);
            }
        }
        true
    }

    /// Drops the oldest of the fresh old values of a register if none of these views sees them:
    /// none is older than `oldest`. Most values were kept for the view of a transaction, which has
    /// ended since. They go while a processor still has them in its cache. The caller has locked no
    /// bucket.
    fn drop_fresh(
        &self,
        register: &mut Register,
        most: usize,
        views: &FoundViews<'_>,
        oldest: Time,
        unpinned: &mut Vec<BlobRef>,
    ) {
        register.forget_fresh(oldest);
        for _ in 0..most {
            let Some((time, entry)) = register.fresh.front().copied() else { return };
            let mut lists = write_soon(self.bucket(entry));
            if let Some(chain) = lists.find_mut(entry)
                && let Ok(index) = chain.old.binary_search_by_key(&time, |(at, _)| *at)
            {
                match chain.is_seen(index, views) {
                    // The next change of the entry looks again, or the end of the oldest view.
                    true if register.fresh.len() > FRESH => {}
                    true => return,
                    false => {
                        let (_, old) = chain.old.remove(index);
                        register.tally.dropped(&chain.key, &old, unpinned);
                    }
                }
            }
            drop(lists);
            register.fresh.pop_front();
        }
    }

    /// Adds what a register has counted to what threads share, if that is much.
    fn count_soon(&self, Register { queue, tally, .. }: &mut Register) {
        // Modulo 2 to the power of 64, so less than nothing is very much.
        let is_much = |of: u64, most: u64| of.wrapping_add(most) > 2 * most;
        if is_much(tally.bytes, COUNTED_BYTES)
            || is_much(tally.chains, COUNTED_CHAINS)
            || tally.blobs != 0
            || queue.is_empty()
        {
            self.add(tally);
        }
    }

    /// Adds what a register has counted to what threads share.
    fn add(&self, tally: &mut Tally) {
        let Tally { bytes, blobs, chains } = std::mem::take(tally);
        for (count, of) in [(&self.bytes, bytes), (&self.blobs, blobs), (&self.count, chains)] {
            if of != 0 {
                count.fetch_add(of, Ordering::Relaxed);
            }
        }
    }
}

/// Buckets that a change has locked, with their numbers, in the order of these.
type LockedBuckets<'c> = SmallVec<[(usize, RwLockWriteGuard<'c, ChainTable>); 8]>;

/// The locked bucket of an entry.
fn bucket_of<'b>(
    buckets: &'b mut LockedBuckets<'_>,
    entry: EntryHash,
) -> Option<&'b mut ChainTable> {
    let place = entry.bucket(BUCKETS);
    let at = buckets.binary_search_by_key(&place, |(place, _)| *place).ok()?;
    Some(&mut buckets[at].1)
}

impl LockedChains<'_> {
    /// Makes the chains of these entries that are not there. The change has not taken its time yet,
    /// which will be this one or a later one.
    pub(crate) fn add_missing(
        &mut self,
        time: Time,
        entries: &[EntryHash],
        replaced: &[Replaced<'_>],
    ) {
        // What is there comes from memory for all entries at the same time.
        let buckets = &mut self.buckets;
        for entry in entries {
            bucket_of(buckets, *entry).iter().for_each(|lists| lists.prefetch_list(*entry));
        }
        for entry in entries {
            bucket_of(buckets, *entry).iter().for_each(|lists| lists.prefetch_chain(*entry));
        }
        let mut added = 0;
        for (entry, replaced) in entries.iter().zip(replaced) {
            if let Some(lists) = bucket_of(buckets, *entry)
                && lists.find(*entry).is_none()
            {
                lists.insert(self.register.add(time, *entry, replaced));
                added += 1;
            }
        }
        if added > 0 {
            self.shared.chains.fetch_add(added, Ordering::SeqCst);
        }
    }

    /// Notes a change of the trees of these entries, before any other thread sees it.
    pub(crate) fn note_trees(&self, time: Time, replaced: &[Replaced<'_>]) {
        let mut last = None;
        for tree in replaced.iter().map(|replaced| replaced.tree) {
            if last.replace(tree) != Some(tree) {
                self.shared.tree_time(tree).fetch_max(time, Ordering::SeqCst);
            }
        }
    }

    /// As [`Chain::put`], of an entry that has a chain. Returns the time of the change before; 0 if
    /// there was none.
    pub(crate) fn put(
        &mut self,
        time: Time,
        entry: EntryHash,
        replaced: &Replaced<'_>,
        views: &FoundViews<'_>,
        pin: impl FnOnce(BlobRef),
        unpinned: &mut Vec<BlobRef>,
    ) -> Time {
        let register = &mut *self.register;
        let lists = bucket_of(&mut self.buckets, entry);
        let Some(chain) = lists.and_then(|lists| lists.find_mut(entry)) else { return 0 };
        let counted = (&mut register.tally, unpinned);
        let (is_kept, before) = chain.put(time, replaced, views, pin, counted);
        // What a very large change keeps is in no cache any more.
        if is_kept && self.entries <= FRESH {
            register.fresh.push_back((time, entry));
        }
        before
    }

    /// As [`Chain::take_back`]. If the change had made the chain, it goes.
    pub(crate) fn take_back(&mut self, time: Time, entry: EntryHash, unpinned: &mut Vec<BlobRef>) {
        let register = &mut *self.register;
        let Some(lists) = bucket_of(&mut self.buckets, entry) else { return };
        let Some(chain) = lists.find_mut(entry) else { return };
        if chain.take_back(time, (&mut register.tally, unpinned))
            && let Some(chain) = lists.remove(entry)
        {
            // It is near the end of the queue.
            let place = register.queue.iter().rposition(|(_, other)| *other == entry);
            place.map(|place| register.queue.remove(place));
            register.remove(chain);
            self.shared.chains.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for LockedChains<'_> {
    fn drop(&mut self) {
        self.chains.count_soon(&mut self.register);
    }
}
