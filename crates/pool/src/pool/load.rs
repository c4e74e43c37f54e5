//! Misses: faulting pages in, one at a time while the caller waits, or many at once while it goes
//! on.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::core::{Core, ReservedPage, Unreserved, Wanted};
use crate::device::{ReadDone, ReadRange, Surface};
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State, Word};
use crate::pool::Pool;
use crate::pool::fix::SharedGuard;
use crate::replacement::Arrival;
use crate::residence::{ClaimOutcome, RETRIES, Undo};
use crate::statistics::counters::Event;
use crate::sync::{Mutex, lock};

/// The error of an asynchronous read, for the task that started the read.
#[derive(Debug, Default)]
pub(crate) struct LoadFailure(Mutex<Option<PoolError>>);

impl LoadFailure {
    pub(crate) fn take(&self) -> Option<PoolError> {
        lock(&self.0).take()
    }
}

/// A read that is ready to start: the page is locked, its frames are out of the budget.
pub(crate) struct Load {
    page: PageRef,
    in_slot: bool,
    /// The place for its bytes: of its slot, or its own.
    place: u64,
    done: ReadDone,
}

/// The outcome of [`Pool::prepare_load`].
pub(crate) enum PrepareOutcome {
    Ready(Load),
    /// The page is not evicted, or no frame is free for it.
    NotNow,
    /// The kernel does not take memory for it from free slots at this moment.
    NoMemory,
    /// One of the inner frames is in transit: another page, or this one, is taking or releasing it.
    Blocked,
}

/// An evicted page that this thread has locked to read it. Dropping it undoes the claim.
#[derive(Debug)]
struct Claimed<'a> {
    pool: &'a Pool,
    page: PageRef,
    /// None once the read has succeeded.
    undo: Option<Undo>,
    /// The page's frames, which go back to the budget after the claim was undone.
    reserved: Option<ReservedPage<'a>>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        if let Some(undo) = self.undo.take() {
            self.pool.core.unclaim(self.page, undo);
        }
    }
}

impl Claimed<'_> {
    /// Reads the page. Then the caller holds it exclusively.
    fn read(mut self) -> Result<(), PoolError> {
        let (pool, page, core) = (self.pool, self.page, &*self.pool.core);
        let reserved = match self.reserved.take() {
            Some(reserved) => reserved,
            None => pool.eviction.reserve(page)?,
        };
        let undo = self.undo.as_mut().expect("the claim stands until the read has ended");
        let (surface, place) = core.place_claimed(page, self.reserved.insert(reserved), undo);
        let result = match core.format.is_pending(page) && core.needs_no_read(page) {
            true => Err(io::Error::other("the file does not have it")),
            false => {
                let started = Instant::now();
                let range = ReadRange { pages: page.range(), place };
                let result = pool.device.read(surface, range);
                core.read_latency.record(started.elapsed(), 1);
                result
            }
        };
        core.finish_read(page, undo, result, Arrival::Needed)?;
        self.undo = None;
        self.reserved.take().into_iter().for_each(ReservedPage::keep);
        core.counters.count(Event::Miss);
        Ok(())
    }
}

/// The outcome of [`Pool::begin_fix_shared`].
#[derive(Debug)]
pub enum FixOutcome<'a> {
    /// The page was in memory. The caller holds it shared.
    Resident(SharedGuard<'a>),
    /// This thread has claimed the page and must read it.
    Claimed(PendingRead<'a>),
    /// Another thread holds the page exclusively, or is reading it.
    Busy,
}

/// The read of a page that this thread has claimed. Other threads wait for the page until the read
/// has ended, or until this is dropped, which undoes the claim.
#[derive(Debug)]
#[must_use = "other threads wait for the page"]
pub struct PendingRead<'a>(Claimed<'a>);

impl<'a> PendingRead<'a> {
    /// Reads the page and keeps it shared.
    ///
    /// # Errors
    /// As [`Pool::fix_shared`].
    pub fn read(self) -> Result<SharedGuard<'a>, PoolError> {
        let (core, page) = (&*self.0.pool.core, self.0.page);
        self.0.read()?;
        core.unlock(page, Leave::Shared, false);
        SharedGuard::new(core, core.held(page), page)
    }
}

impl Pool {
    /// Reads an evicted page whose word was `seen`. Then the caller holds it exclusively. False if
    /// another thread was first.
    #[cold]
    pub(crate) fn load(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<bool, PoolError> {
        match self.claim(page, state, seen)? {
            Some(claimed) => claimed.read().map(|()| true),
            None => Ok(false),
        }
    }

    /// Claims an evicted page whose word was `seen`. None if another thread was first.
    fn claim(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Option<Claimed<'_>>, PoolError> {
        let core = &*self.core;
        let reserved =
            core.claim_brings_memory().then(|| self.eviction.reserve(page)).transpose()?;
        match core.claim(page, state, seen)? {
            ClaimOutcome::Ours(undo) => {
                Ok(Some(Claimed { pool: self, page, undo: Some(undo), reserved }))
            }
            ClaimOutcome::Lost => Ok(None),
            ClaimOutcome::Blocked => {
                drop(reserved);
                self.wait_for_inner(page).map(|()| None)
            }
        }
    }

    /// The first half of [`fix_shared`](Pool::fix_shared), which does not wait for the page. For a
    /// caller whose reference is valid only while it holds another page. When this returns, the
    /// caller may unlock that other page.
    ///
    /// # Errors
    /// As [`fix_shared`](Pool::fix_shared).
    pub fn begin_fix_shared(&self, page: PageRef) -> Result<FixOutcome<'_>, PoolError> {
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Marked | State::Shared(_) => {
                    if Wanted::SharedPlace.is_blocked(seen) {
                        return Ok(FixOutcome::Busy);
                    }
                    if state.try_join(seen) {
                        self.core.counters.count(Event::Hit);
                        let guard = SharedGuard::new(&self.core, self.core.held(page), page)?;
                        return self.check_whole(page).map(|()| FixOutcome::Resident(guard));
                    }
                }
                State::Locked => return Ok(FixOutcome::Busy),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Evicted => {
                    if let Some(claimed) = self.claim(page, state, seen)? {
                        return Ok(FixOutcome::Claimed(PendingRead(claimed)));
                    }
                }
            }
        }
    }

    /// As [`fix_shared`](Pool::fix_shared) if the page is in memory or in transit; never reads.
    /// None otherwise, and also if there is no such page: the reference may be stale.
    pub fn fix_shared_resident(&self, page: PageRef) -> Option<SharedGuard<'_>> {
        let mut rounds = 0;
        loop {
            let (state, seen) = self.core.look(page).ok()?;
            match seen.state() {
                State::Unlocked | State::Marked | State::Shared(_) => {
                    if self.core.join_in_turn(page, state, seen, &mut rounds) {
                        self.core.counters.count(Event::Hit);
                        let guard = SharedGuard::new(&self.core, self.core.held(page), page);
                        let guard = guard.ok()?;
                        return self.check_whole(page).ok().map(|()| guard);
                    }
                }
                State::Locked => self.core.wait(page, state, seen, Wanted::NotLocked),
                State::Free | State::Inner | State::Evicted => return None,
            }
        }
    }

    /// Waits a moment for a thread with a stale reference to unlock an inner frame of the page.
    ///
    /// # Errors
    /// If the frame is still locked after all retries.
    fn wait_for_inner(&self, page: PageRef) -> Result<(), PoolError> {
        for _ in 0..RETRIES {
            if self.core.inner_in_transit(page).is_none() {
                return Ok(());
            }
            self.core.budget.wait_briefly();
        }
        Err(PoolError::WrongSize(page))
    }

    /// Prepares the asynchronous read of a page, if it is evicted and there are frames for it.
    /// Never waits.
    pub(crate) fn prepare_load(
        &self,
        page: PageRef,
        event: Event,
        failure: Option<Arc<LoadFailure>>,
    ) -> Result<PrepareOutcome, PoolError> {
        let (state, seen) = self.core.look(page)?;
        if seen.state() != State::Evicted {
            return Ok(PrepareOutcome::NotNow);
        }
        // As a repair, the making of a page keeps other reads waiting.
        if event == Event::Prefetch && self.core.format.is_pending(page) {
            return Ok(PrepareOutcome::NotNow);
        }
        // A page that is only read ahead is not worth a huge page.
        let may_break = event == Event::Miss;
        let mut reserved = match self.eviction.try_reserve(page, may_break) {
            Ok(reserved) => reserved,
            Err(Unreserved::NoFrames) => return Ok(PrepareOutcome::NotNow),
            Err(Unreserved::NoMemory) => return Ok(PrepareOutcome::NoMemory),
        };
        let mut undo = match self.core.claim(page, state, seen)? {
            ClaimOutcome::Ours(undo) => undo,
            ClaimOutcome::Lost => return Ok(PrepareOutcome::NotNow),
            ClaimOutcome::Blocked => return Ok(PrepareOutcome::Blocked),
        };
        let in_slot = reserved.is_in_slot();
        let (_, place) = self.core.place_claimed(page, &mut reserved, &mut undo);
        reserved.keep();
        let started = Instant::now();
        let (core, undo) = (self.core.clone(), Some(undo));
        let read = AsyncRead { core, page, in_slot, undo, failure };
        let done = ReadDone::new(move |result| {
            read.core.read_latency.record(started.elapsed(), 1);
            read.complete(result, event);
        });
        Ok(PrepareOutcome::Ready(Load { page, in_slot, place, done }))
    }

    /// Starts reads. Each read publishes its page when it is done.
    pub(crate) fn start_loads(&self, loads: Vec<Load>) {
        let Some(slots) = &self.core.slots else {
            return self.start_loads_on(&self.core.surface, loads);
        };
        let (in_slots, others): (Vec<_>, Vec<_>) = loads.into_iter().partition(|load| load.in_slot);
        self.start_loads_on(slots.surface(), in_slots);
        self.start_loads_on(&self.core.surface, others);
    }

    fn start_loads_on(&self, surface: &Surface, loads: Vec<Load>) {
        if !loads.is_empty() {
            let reads = loads
                .into_iter()
                .map(|load| (ReadRange { pages: load.page.range(), place: load.place }, load.done));
            self.device.start_reads(surface, reads.collect());
        }
    }

    /// Starts reading pages that the caller will need soon, all at once, and does not wait.
    ///
    /// A hint: the pool skips pages that are resident or in transit, and pages for which no frame
    /// is free. A failed read is silent; the next fix of the page reports the error.
    /// [`prefetch_bytes`](Pool::prefetch_bytes) is for pages that are in memory.
    pub fn prefetch(&self, pages: &[PageRef]) {
        let prepare = |page: &PageRef| self.prepare_load(*page, Event::Prefetch, None);
        let loads = pages.iter().filter_map(|page| match prepare(page) {
            Ok(PrepareOutcome::Ready(load)) => Some(load),
            _ => None,
        });
        self.start_loads(loads.collect());
    }

    /// As [`prefetch`](Pool::prefetch), but evicts first to make room, which may wait for writes.
    pub fn evict_and_prefetch(&self, pages: &[PageRef]) {
        self.evict_for(pages.iter().map(|page| u64::from(page.frames)).sum());
        self.prefetch(pages);
    }

    /// Evicts until `frames` frames are free, or half of the pool, or a batch evicts nothing.
    fn evict_for(&self, frames: u64) {
        let wanted = || frames.min(self.core.budget.capacity() / 2);
        while self.core.budget.available() < wanted() {
            let missing = wanted().saturating_sub(self.core.budget.available()).max(1);
            let evicted = self.eviction.evict_batch(missing);
            self.core.counters.add(Event::EvictInline, evicted.pages);
            if evicted.frames == 0 {
                return;
            }
        }
    }
}

/// An asynchronous read: the page is locked, and its frames are out of the budget. Dropping it
/// before the page is published undoes both. That happens after a failed read, and after a panic of
/// the format while it checked the page.
struct AsyncRead {
    core: Arc<Core>,
    page: PageRef,
    in_slot: bool,
    /// None once the page is published.
    undo: Option<Undo>,
    failure: Option<Arc<LoadFailure>>,
}

impl AsyncRead {
    /// Publishes the page, or undoes its claim.
    fn complete(mut self, result: io::Result<()>, event: Event) {
        let arrival = match event {
            Event::Prefetch => Arrival::Ahead,
            _ => Arrival::Needed,
        };
        let undo = self.undo.as_ref().expect("the claim stands until the read has ended");
        match self.core.finish_read(self.page, undo, result, arrival) {
            Ok(()) => {
                self.undo = None;
                self.core.counters.count(event);
                self.core.unlock(self.page, Leave::Unlocked, false);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Tells the task that started the read why the read failed.
    fn fail(&mut self, error: PoolError) {
        if let Some(failure) = self.failure.take() {
            *lock(&failure.0) = Some(error);
        }
    }
}

impl Drop for AsyncRead {
    fn drop(&mut self) {
        let Some(undo) = self.undo.take() else { return };
        let source = io::Error::other("the page format panicked while it checked the page");
        self.fail(PoolError::Read { page: self.page, source });
        self.core.unclaim(self.page, undo);
        self.core.put_reserved_back(self.page.frames, self.in_slot);
    }
}
