//! The memory contract: frames are counted before they are populated and after they are released.
//!
//! A thread that makes a page resident first takes its frames out of the budget and puts them back
//! when the memory is released. So resident frames never exceed the pool's size.

use std::sync::atomic::{AtomicU64 as Statistic, AtomicU64 as Setting};
use std::task::Waker;

use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering, lock, wait_briefly};

/// How many frames there are, and how many are taken.
///
/// Every miss and every eviction writes here: the alignment keeps these words off the cache lines
/// that hits read.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct FrameBudget {
    /// While the pool shrinks, this goes down to the size that it is to have, and more frames may
    /// be in use.
    capacity: Setting,
    /// The size of the pool. While it shrinks, it is the old one.
    size: Setting,
    used: AtomicU64,
    /// The most that was ever in use.
    peak: Statistic,
    awaited: AtomicBool,
    /// How often frames were put back while a thread waited.
    progress: Statistic,
    tasks: Mutex<Vec<Waker>>,
    released: Condvar,
}

/// Frames taken out of the budget, put back when dropped unless [`kept`](Reserved::keep).
#[derive(Debug)]
#[must_use]
pub(crate) struct Reserved<'a> {
    budget: &'a FrameBudget,
    frames: u64,
}

impl FrameBudget {
    pub(crate) fn new(capacity: u64) -> FrameBudget {
        FrameBudget {
            capacity: Setting::new(capacity),
            size: Setting::new(capacity),
            used: AtomicU64::new(0),
            peak: Statistic::new(0),
            awaited: AtomicBool::new(false),
            progress: Statistic::new(0),
            tasks: Mutex::new(Vec::new()),
            released: Condvar::new(),
        }
    }

    /// How many frames there are. A pool that shrinks gives out no frame beyond its new size.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// The size of the pool, which it has as long as a shrink may fail.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Changes the size. The caller wakes those that wait for frames.
    pub(crate) fn set_size(&self, frames: u64) {
        self.size.store(frames, Ordering::SeqCst);
        self.capacity.store(frames, Ordering::SeqCst);
    }

    /// Gives out no frame beyond `frames` from now on, unless there are fewer already. Only one
    /// thread changes the size of a pool.
    pub(crate) fn lower_capacity(&self, frames: u64) {
        let frames = frames.min(self.capacity());
        self.capacity.store(frames, Ordering::SeqCst);
    }

    /// How many frames more are in use than there are, while the pool shrinks.
    pub(crate) fn excess(&self) -> u64 {
        self.used.load(Ordering::SeqCst).saturating_sub(self.capacity())
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn available(&self) -> u64 {
        self.capacity().saturating_sub(self.used())
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Takes `frames` if there are as many.
    pub(crate) fn try_reserve(&self, frames: u32) -> Option<Reserved<'_>> {
        let frames = u64::from(frames);
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let wanted = used + frames;
            if wanted > self.capacity() {
                return None;
            }
            match self.used.compare_exchange_weak(used, wanted, Ordering::SeqCst, Ordering::Relaxed)
            {
                // The pool has begun to shrink since this thread looked, and the thread that
                // shrinks it may have found these frames unused.
                Ok(_) if wanted > self.capacity.load(Ordering::SeqCst) => {
                    self.put_back_unused(frames);
                    return None;
                }
                Ok(_) => {
                    if wanted > self.peak.load(Ordering::Relaxed) {
                        self.peak.fetch_max(wanted, Ordering::Relaxed);
                    }
                    return Some(Reserved { budget: self, frames });
                }
                Err(now) => used = now,
            }
        }
    }

    /// Puts frames back whose memory was released, and wakes the threads and tasks that wait for
    /// some.
    pub(crate) fn put_back(&self, frames: u64) {
        if frames == 0 {
            return;
        }
        self.used.fetch_sub(frames, Ordering::SeqCst);
        if self.awaited.load(Ordering::SeqCst) {
            self.progress.fetch_add(1, Ordering::Relaxed);
            self.wake();
        }
    }

    /// Puts frames back that were never used. That is no progress, but others may have waited for
    /// these frames.
    fn put_back_unused(&self, frames: u64) {
        self.used.fetch_sub(frames, Ordering::SeqCst);
        if self.awaited.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes all threads and tasks that wait for frames, so that they retry.
    pub(crate) fn wake(&self) {
        let mut tasks = lock(&self.tasks);
        self.awaited.store(false, Ordering::SeqCst);
        self.released.notify_all();
        let woken = std::mem::take(&mut *tasks);
        drop(tasks);
        for task in woken {
            task.wake();
        }
    }

    /// Waits about a millisecond, less if frames are put back meanwhile. False if none were: then
    /// the pool may be exhausted; otherwise others were quicker, and it is not.
    pub(crate) fn wait_briefly(&self) -> bool {
        let tasks = lock(&self.tasks);
        self.awaited.store(true, Ordering::SeqCst);
        let before = self.progress();
        wait_briefly(&self.released, tasks);
        self.progress() != before
    }

    /// Rises whenever frames are put back while a thread waits for some.
    pub(crate) fn progress(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }

    /// Wakes `waker` when frames are put back. False if there are `frames` already.
    pub(crate) fn await_release(&self, frames: u32, waker: &Waker) -> bool {
        let mut tasks = lock(&self.tasks);
        self.awaited.store(true, Ordering::SeqCst);
        if self.used.load(Ordering::SeqCst) + u64::from(frames) <= self.capacity() {
            return false;
        }
        if !tasks.iter().any(|task| task.will_wake(waker)) {
            tasks.push(waker.clone());
        }
        true
    }
}

impl Reserved<'_> {
    /// Puts the frames back: there was something else missing.
    pub(crate) fn cancel(self) {
        self.budget.put_back_unused(self.frames);
        std::mem::forget(self);
    }

    /// The page is resident now: its frames are put back when it is evicted or freed.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.budget.put_back(self.frames);
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    #[test]
    fn never_more_than_the_capacity() {
        let budget = FrameBudget::new(10);
        let six = budget.try_reserve(6).unwrap();
        assert!(budget.try_reserve(5).is_none());
        let four = budget.try_reserve(4).unwrap();
        assert_eq!((budget.used(), budget.available()), (10, 0));
        drop(six);
        four.keep();
        assert_eq!((budget.used(), budget.peak()), (4, 10));
        budget.put_back(4);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_task_is_woken_by_the_release_it_waits_for() {
        let budget = FrameBudget::new(1);
        let held = budget.try_reserve(1).unwrap();
        assert!(budget.await_release(1, Waker::noop()));
        drop(held);
        assert!(lock(&budget.tasks).is_empty());
        assert!(!budget.await_release(1, Waker::noop()), "there is one already");
    }
}
