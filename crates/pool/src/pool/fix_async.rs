//! Fixing pages from asynchronous code, on any executor.
//!
//! A hit is ready at the first poll. A miss starts a read and returns; the device's thread that
//! completes the read wakes the task. No future blocks its thread, with two exceptions: in a pool
//! without background eviction the poll that finds no frame evicts; and the poll of a long page
//! waits for a millisecond if the kernel does not take memory for it from free slots.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::core::Wanted;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{State, Word};
use crate::pool::Pool;
use crate::pool::fix::{ExclusiveGuard, SharedGuard};
use crate::pool::load::{LoadFailure, PrepareOutcome};
use crate::statistics::counters::Event;

/// Waits for the shared lock of a page; see [`Pool::fix_shared_async`].
///
/// Dropping it before it is ready is fine: a read that it started completes, and the page stays.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct FixShared<'a>(Fix<'a>);

/// Waits for the exclusive lock of a page; see [`Pool::fix_exclusive_async`].
///
/// Dropping it before it is ready is fine: a read that it started completes, and the page stays.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct FixExclusive<'a>(Fix<'a>);

impl Pool {
    /// As [`fix_shared`](Pool::fix_shared), without blocking.
    pub fn fix_shared_async(&self, page: PageRef) -> FixShared<'_> {
        FixShared(Fix::new(self, page, Wanted::SharedPlace))
    }

    /// As [`fix_exclusive`](Pool::fix_exclusive), without blocking.
    pub fn fix_exclusive_async(&self, page: PageRef) -> FixExclusive<'_> {
        FixExclusive(Fix::new(self, page, Wanted::Alone))
    }
}

impl<'a> Future for FixShared<'a> {
    type Output = Result<SharedGuard<'a>, PoolError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Fix { pool, page, .. } = self.0;
        self.0.poll(cx).map(|locked| {
            locked?;
            let guard = SharedGuard::new(&pool.core, pool.core.held(page), page)?;
            pool.check_whole(page).map(|()| guard)
        })
    }
}

impl<'a> Future for FixExclusive<'a> {
    type Output = Result<ExclusiveGuard<'a>, PoolError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Fix { pool, page, .. } = self.0;
        if pool.is_read_only() {
            return Poll::Ready(Err(PoolError::ReadOnly));
        }
        self.0.poll(cx).map(|locked| {
            locked?;
            let guard = ExclusiveGuard::new(&pool.core, pool.core.held(page), page, false)?;
            pool.check_whole(page).map(|()| guard)
        })
    }
}

/// The part that both kinds share. Ready means that the task has the lock.
#[derive(Debug)]
struct Fix<'a> {
    pool: &'a Pool,
    page: PageRef,
    wanted: Wanted,
    /// The read that this task started, if it did.
    read: Option<Arc<LoadFailure>>,
    /// Consecutive waits for frames in which no frame came back, and the budget's progress at the
    /// last one.
    frame_waits: u32,
    progress: u64,
}

enum Step {
    Locked,
    Again,
    Pending,
}

impl<'a> Fix<'a> {
    fn new(pool: &'a Pool, page: PageRef, wanted: Wanted) -> Fix<'a> {
        Fix { pool, page, wanted, read: None, frame_waits: 0, progress: 0 }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), PoolError>> {
        loop {
            match self.step(cx) {
                Err(error) => return Poll::Ready(Err(error)),
                Ok(Step::Locked) => return Poll::Ready(Ok(())),
                Ok(Step::Pending) => return Poll::Pending,
                Ok(Step::Again) => {}
            }
        }
    }

    fn step(&mut self, cx: &mut Context<'_>) -> Result<Step, PoolError> {
        let core = &*self.pool.core;
        let (state, seen) = core.look(self.page)?;
        if self.wanted.is_blocked(seen) {
            let waits = core.wait_task(self.page, state, seen, self.wanted, cx.waker());
            return Ok(if waits { Step::Pending } else { Step::Again });
        }
        // Not before the read has unlocked the page: the error ends the claim.
        if let Some(error) = self.read.as_ref().and_then(|read| read.take()) {
            return Err(error);
        }
        match seen.state() {
            State::Free => return Err(PoolError::PageFree(self.page.id)),
            State::Inner => return Err(PoolError::WrongSize(self.page)),
            State::Evicted => return self.start_read(seen, cx),
            _ => {}
        }
        let locked = match self.wanted {
            Wanted::Alone => state.try_lock(seen),
            // A task does not wait for an urgent writer's turn, as a thread does.
            _ => state.try_join(seen),
        };
        if locked && self.read.is_none() {
            core.counters.count(Event::Hit);
        }
        Ok(if locked { Step::Locked } else { Step::Again })
    }

    fn start_read(&mut self, seen: Word, cx: &mut Context<'_>) -> Result<Step, PoolError> {
        let core = &*self.pool.core;
        let failure = Arc::new(LoadFailure::default());
        match self.pool.prepare_load(self.page, Event::Miss, Some(failure.clone()))? {
            PrepareOutcome::Ready(load) => {
                self.read = Some(failure);
                self.pool.start_loads(vec![load]);
                return Ok(Step::Again);
            }
            PrepareOutcome::Blocked => return Ok(self.wait_for_inner(cx)),
            PrepareOutcome::NoMemory => {
                self.frame_waits += 1;
                if self.frame_waits > self.pool.eviction.patience() {
                    return Err(self.pool.eviction.exhausted(self.page));
                }
                // For the end of other reads, which hold huge pages. No event tells of it.
                core.budget.wait_briefly();
                return Ok(Step::Again);
            }
            PrepareOutcome::NotNow => {}
        }
        let still_evicted = core.look(self.page)?.1 == seen;
        if !still_evicted || core.budget.available() >= u64::from(self.page.frames) {
            return Ok(Step::Again);
        }
        self.wait_for_frames(cx)
    }

    /// Waits for an inner frame that another thread is releasing, or that it has locked through a
    /// stale reference.
    fn wait_for_inner(&self, cx: &mut Context<'_>) -> Step {
        let core = &*self.pool.core;
        let waits = core.inner_in_transit(self.page).is_some_and(|(inner, state, seen)| {
            core.wait_task(inner, state, seen, Wanted::NotLocked, cx.waker())
        });
        if waits { Step::Pending } else { Step::Again }
    }

    fn wait_for_frames(&mut self, cx: &mut Context<'_>) -> Result<Step, PoolError> {
        let eviction = &self.pool.eviction;
        let core = &*self.pool.core;
        let progress = eviction.progress();
        self.frame_waits = if progress == self.progress { self.frame_waits + 1 } else { 0 };
        self.progress = progress;
        if self.frame_waits > eviction.patience() {
            return Err(eviction.exhausted(self.page));
        }
        if !eviction.has_background() {
            // Fails once the patience is used up; otherwise the next attempt gets the frames.
            drop(eviction.reserve(self.page)?);
            return Ok(Step::Again);
        }
        core.counters.count(Event::FrameWait);
        if !core.budget.await_release(self.page.frames, cx.waker()) {
            return Ok(Step::Again);
        }
        eviction.evict_for_task(u64::from(self.page.frames));
        Ok(Step::Pending)
    }
}
