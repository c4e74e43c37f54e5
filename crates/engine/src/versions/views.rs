//! The views that there are, and the clock that gives their times.
//!
//! A *view* sees the changes up to its time. Each change that keeps old values takes the next time.
//! A view takes the time of the newest such change, while it holds the lock of this list. So a
//! thread that takes a time for its change, and the lock after that, finds every view of an earlier
//! time: a view that comes later is of this time, or of a later one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, fence, lock_soon};
use crate::versions::entry::Time;

/// So many changes without a view are made before changes keep nothing any more. Then the next view
/// has to freeze the gate.
const IDLE_CHANGES: u64 = 1000;

/// A change copies the times of so many views. If there are more, it keeps the lock of the list.
const VIEWS_COPIED: usize = if cfg!(test) { 2 } else { 16 };

/// Memory that shares no cache line with its neighbours.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub T);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Views {
    /// Whether changes keep old values. It becomes true only while no change is under way.
    are_kept: AtomicBool,
    /// The time of the newest change that kept old values.
    now: Apart<AtomicU64>,
    /// Twice the number of views that have begun, and one more while a view takes its time.
    begun: AtomicU64,
    /// The number of views.
    open: AtomicU64,
    /// No view is of an earlier time, now or later.
    oldest: AtomicU64,
    /// The number of views that have ended.
    ended: AtomicU64,
    /// The number of changes since there was a view.
    idle: AtomicU64,
    times: Apart<Mutex<BTreeMap<Time, SameTime>>>,
}

/// The views of one time.
#[derive(Debug)]
pub(crate) struct SameTime {
    count: u64,
    since: Instant,
}

/// The times of the views that a change has found.
pub(crate) enum FoundViews<'v> {
    /// Oldest first.
    Few(SmallVec<[Time; VIEWS_COPIED]>),
    Many(MutexGuard<'v, BTreeMap<Time, SameTime>>),
}

impl FoundViews<'_> {
    /// Whether a view is of the time `since` or a later one, and of a time before `until`.
    pub(crate) fn any_in(&self, since: Time, until: Time) -> bool {
        match self {
            FoundViews::Few(times) => {
                let first = times.partition_point(|time| *time < since);
                times.get(first).is_some_and(|time| *time < until)
            }
            FoundViews::Many(times) => times.range(since..until).next().is_some(),
        }
    }
}

impl Views {
    pub(crate) fn new() -> Views {
        Views {
            are_kept: AtomicBool::new(false),
            now: Apart(AtomicU64::new(0)),
            begun: AtomicU64::new(0),
            open: AtomicU64::new(0),
            oldest: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            idle: AtomicU64::new(0),
            times: Apart(Mutex::new(BTreeMap::new())),
        }
    }

    /// Whether a change must keep the old values of the entries that it changes. The caller has
    /// begun the change.
    #[inline]
    pub(crate) fn are_kept(&self) -> bool {
        self.are_kept.load(Ordering::Relaxed)
    }

    /// The time of the newest change that kept old values. A view of this time, or a later one,
    /// sees what the pages have.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.now.0.load(Ordering::SeqCst)
    }

    /// The time of a change that keeps old values. A view of this time sees the change, because it
    /// waits for the locks of the leaves, which the caller holds.
    pub(crate) fn next_time(&self) -> Time {
        self.now.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The number of views.
    pub(crate) fn open(&self) -> u64 {
        self.open.load(Ordering::SeqCst)
    }

    /// A number that grows with each view that begins; `None` while one takes its time.
    pub(crate) fn begun(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        begun.is_multiple_of(2).then_some(begun)
    }

    /// No view is of an earlier time than this, now or later.
    pub(crate) fn oldest(&self) -> Time {
        self.oldest.load(Ordering::Acquire)
    }

    /// Begins a view of now, if changes keep old values already.
    pub(crate) fn try_begin(&self) -> Option<Time> {
        let mut times = lock_soon(&self.times.0);
        self.are_kept().then(|| self.add(&mut times))
    }

    /// Begins a view of now. No change is under way.
    pub(crate) fn begin(&self) -> Time {
        let mut times = lock_soon(&self.times.0);
        self.are_kept.store(true, Ordering::Relaxed);
        self.add(&mut times)
    }

    fn add(&self, times: &mut BTreeMap<Time, SameTime>) -> Time {
        if self.idle.load(Ordering::Relaxed) > 0 {
            self.idle.store(0, Ordering::Relaxed);
        }
        self.open.fetch_add(1, Ordering::SeqCst);
        // All of this before the view reads any page.
        self.begun.fetch_add(1, Ordering::SeqCst);
        let now = self.now();
        self.begun.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if times.is_empty() {
            self.oldest.store(now, Ordering::Release);
        }
        let new = || SameTime { count: 0, since: Instant::now() };
        times.entry(now).or_insert_with(new).count += 1;
        now
    }

    /// Ends a view.
    pub(crate) fn end(&self, time: Time) {
        let mut times = lock_soon(&self.times.0);
        let Some(same) = times.get_mut(&time) else { return };
        self.open.fetch_sub(1, Ordering::SeqCst);
        self.ended.fetch_add(1, Ordering::Relaxed);
        same.count -= 1;
        if same.count == 0 {
            times.remove(&time);
            let oldest = times.keys().next().copied().unwrap_or_else(|| self.now());
            self.oldest.store(oldest, Ordering::Release);
        }
    }

    /// The views, after the caller has taken a time for its change. Leaves out one view of the time
    /// `own`, if there are few. Those of later times are of no interest, and may be missing.
    pub(crate) fn find(&self, own: Option<Time>) -> FoundViews<'_> {
        let times = lock_soon(&self.times.0);
        if times.len() > VIEWS_COPIED {
            return FoundViews::Many(times);
        }
        let others = times.iter().filter(|(time, same)| same.count > 1 || own != Some(**time));
        FoundViews::Few(others.map(|(time, _)| *time).collect())
    }

    /// All views, and a time of which every later one is, or of a newer one.
    pub(crate) fn all(&self) -> (FoundViews<'static>, Time) {
        let times = lock_soon(&self.times.0);
        (FoundViews::Few(times.keys().copied().collect()), self.now())
    }

    /// The number of views that have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Whether changes keep old values still. If there is no view, they keep nothing from now on:
    /// the next view freezes the gate before it begins, and so waits for the changes under way.
    pub(crate) fn are_needed(&self) -> bool {
        let times = lock_soon(&self.times.0);
        if times.is_empty() {
            self.are_kept.store(false, Ordering::Relaxed);
        }
        self.are_kept()
    }

    /// Counts a change that found no view. After many of them changes keep nothing any more.
    pub(crate) fn note_idle(&self) {
        if self.idle.fetch_add(1, Ordering::Relaxed) > IDLE_CHANGES {
            self.are_needed();
        }
    }

    /// Whether there is a view of an earlier time.
    pub(crate) fn has_before(&self, time: Time) -> bool {
        lock_soon(&self.times.0).keys().next().is_some_and(|oldest| *oldest < time)
    }

    /// The number of views and the age of the oldest.
    pub(crate) fn stat(&self) -> (u64, Option<Duration>) {
        let times = lock_soon(&self.times.0);
        let count = times.values().map(|same| same.count).sum();
        (count, times.values().next().map(|same| same.since.elapsed()))
    }
}
