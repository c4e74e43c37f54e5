//! Misses: bringing pages in, one by one and waiting, or many at once and not waiting.

use std::sync::Arc;
use std::time::Instant;

use crate::core::{Core, Wanted};
use crate::device::ReadDone;
use crate::error::PoolError;
use crate::eviction::frame_budget::Reserved;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State, Word};
use crate::pool::Pool;
use crate::pool::guard::SharedGuard;
use crate::residence::{Coming, Enclosed, LOOKS};
use crate::statistics::counters::Event;
use crate::sync::{Mutex, lock};

/// How an asynchronous read ended, for the one who started it.
#[derive(Debug, Default)]
pub(crate) struct LoadFailure(Mutex<Option<PoolError>>);

impl LoadFailure {
    pub(crate) fn take(&self) -> Option<PoolError> {
        lock(&self.0).take()
    }
}

/// A read that is ready to be started: the page is locked, its frames are taken.
pub(crate) struct Load {
    page: PageRef,
    done: ReadDone,
}

/// What an asynchronous read needs before it can start.
pub(crate) enum Prepared {
    Load(Load),
    /// The page is not evicted any more, or no frame is free for it: look again.
    Nothing,
    /// One of its inner frames is on its way to or from another page, or back to this one.
    Blocked,
}

/// An evicted page that this thread has locked to read it. Dropping it gives the page up.
#[derive(Debug)]
struct Claimed<'a> {
    pool: &'a Pool,
    page: PageRef,
    /// What the frames behind the head were; taken when the read has ended well.
    enclosed: Option<Enclosed>,
    /// Its frames, which are put back after the page was given up.
    reserved: Option<Reserved<'a>>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        if let Some(enclosed) = self.enclosed.take() {
            self.pool.core.unclaim(self.page, enclosed);
        }
    }
}

impl Claimed<'_> {
    /// Reads the page. Then the caller holds it exclusively.
    fn read(mut self) -> Result<(), PoolError> {
        let (pool, page, core) = (self.pool, self.page, &*self.pool.core);
        if self.reserved.is_none() {
            self.reserved = Some(pool.eviction.reserve(page)?);
        }
        let started = Instant::now();
        let result = pool.device.read(&core.surface, page.range());
        core.read_latency.record(started.elapsed(), 1);
        core.finish_read(page, result)?;
        self.enclosed = None;
        self.reserved.take().into_iter().for_each(Reserved::keep);
        core.counters.count(Event::Miss);
        Ok(())
    }
}

/// How far [`Pool::begin_shared`] has come.
#[derive(Debug)]
pub enum Begun<'a> {
    /// The page was in memory.
    Held(SharedGuard<'a>),
    /// The page is reserved for this thread, which is to read it.
    Claimed(PendingRead<'a>),
    /// Another thread holds the page exclusively, or is reading it.
    Busy,
}

/// A page that is to be read by this thread; others wait for it. Dropping it gives the page up.
#[derive(Debug)]
#[must_use = "others wait for the page"]
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
        Ok(SharedGuard::new(core, core.held(page), page))
    }
}

impl Pool {
    /// Reads an evicted page, whose word was `seen`. Then the caller holds it exclusively. False if
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

    /// Locks an evicted page, whose word was `seen`, to read it. None if another thread was first.
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
            Coming::Ours(enclosed) => {
                Ok(Some(Claimed { pool: self, page, enclosed: Some(enclosed), reserved }))
            }
            Coming::Lost => Ok(None),
            Coming::Blocked => {
                drop(reserved);
                self.wait_for_inner(page).map(|()| None)
            }
        }
    }

    /// The first half of [`fix_shared`](Pool::fix_shared), which does not wait for the page: for a
    /// caller whose reference to it is good only as long as it holds another page. When this
    /// returns, the caller may let go of that one.
    ///
    /// # Errors
    /// As [`fix_shared`](Pool::fix_shared).
    pub fn begin_shared(&self, page: PageRef) -> Result<Begun<'_>, PoolError> {
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Marked | State::Shared(_) => {
                    if Wanted::SharedPlace.is_blocked(seen) {
                        return Ok(Begun::Busy);
                    }
                    if state.try_join(seen) {
                        self.core.counters.count(Event::Hit);
                        let guard = SharedGuard::new(&self.core, self.core.held(page), page);
                        return self.check_whole(page).map(|()| Begun::Held(guard));
                    }
                }
                State::Locked => return Ok(Begun::Busy),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Evicted => {
                    if let Some(claimed) = self.claim(page, state, seen)? {
                        return Ok(Begun::Claimed(PendingRead(claimed)));
                    }
                }
            }
        }
    }

    /// As [`fix_shared`](Pool::fix_shared), if the page is in memory or on its way; never reads.
    /// None otherwise, and where there is no such page: the reference may be an old one.
    pub fn fix_shared_resident(&self, page: PageRef) -> Option<SharedGuard<'_>> {
        let mut rounds = 0;
        loop {
            let (state, seen) = self.core.look(page).ok()?;
            match seen.state() {
                State::Unlocked | State::Marked | State::Shared(_) => {
                    if self.core.join_in_turn(page, state, seen, &mut rounds) {
                        self.core.counters.count(Event::Hit);
                        let guard = SharedGuard::new(&self.core, self.core.held(page), page);
                        return self.check_whole(page).ok().map(|()| guard);
                    }
                }
                State::Locked => self.core.wait(page, state, seen, Wanted::NotLocked),
                State::Free | State::Inner | State::Evicted => return None,
            }
        }
    }

    /// Waits a moment for a thread with an old reference to leave a frame of the page. An error
    /// where that may take forever.
    fn wait_for_inner(&self, page: PageRef) -> Result<(), PoolError> {
        for _ in 0..LOOKS {
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
    ) -> Result<Prepared, PoolError> {
        let (state, seen) = self.core.look(page)?;
        if seen.state() != State::Evicted {
            return Ok(Prepared::Nothing);
        }
        let Some(reserved) = self.eviction.try_reserve(page) else { return Ok(Prepared::Nothing) };
        let enclosed = match self.core.claim(page, state, seen)? {
            Coming::Ours(enclosed) => enclosed,
            Coming::Lost => return Ok(Prepared::Nothing),
            Coming::Blocked => return Ok(Prepared::Blocked),
        };
        reserved.keep();
        let started = Instant::now();
        let arriving =
            Arriving { core: self.core.clone(), page, enclosed: Some(enclosed), failure };
        let done = ReadDone::new(move |result| {
            arriving.core.read_latency.record(started.elapsed(), 1);
            arriving.complete(result, event);
        });
        Ok(Prepared::Load(Load { page, done }))
    }

    /// Starts reads; each publishes its page when it is done.
    pub(crate) fn start_loads(&self, loads: Vec<Load>) {
        if !loads.is_empty() {
            let reads = loads.into_iter().map(|load| (load.page.range(), load.done)).collect();
            self.device.start_reads(&self.core.surface, reads);
        }
    }

    /// Starts reading pages that will be needed soon, all at once, and returns without waiting.
    ///
    /// A hint: pages that are resident or in transit already are skipped, and so are pages for
    /// which no frame is free. A failed read is silent; the next fix of the page meets the error.
    pub fn prefetch(&self, pages: &[PageRef]) {
        let prepare = |page: &PageRef| self.prepare_load(*page, Event::Prefetch, None);
        let loads = pages.iter().filter_map(|page| match prepare(page) {
            Ok(Prepared::Load(load)) => Some(load),
            _ => None,
        });
        self.start_loads(loads.collect());
    }
}

/// A page that is read asynchronously: locked, and its frames are taken. Dropping it gives both
/// back; unless the read has failed, a panic of the format has ended the check of the page then.
struct Arriving {
    core: Arc<Core>,
    page: PageRef,
    /// What the frames behind the head were; taken when the page was published.
    enclosed: Option<Enclosed>,
    failure: Option<Arc<LoadFailure>>,
}

impl Arriving {
    /// Publishes the page, or gives back what was taken for it.
    fn complete(mut self, result: std::io::Result<()>, event: Event) {
        match self.core.finish_read(self.page, result) {
            Ok(()) => {
                self.enclosed = None;
                self.core.counters.count(event);
                self.core.unlock(self.page, Leave::Unlocked, false);
            }
            Err(error) => self.fail(error),
        }
    }

    /// Says why the page does not come, to the one who started the read.
    fn fail(&mut self, error: PoolError) {
        if let Some(failure) = self.failure.take() {
            *lock(&failure.0) = Some(error);
        }
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        let Some(enclosed) = self.enclosed.take() else { return };
        let source = std::io::Error::other("the format of the pages panicked when it checked it");
        self.fail(PoolError::Read { page: self.page, source });
        self.core.unclaim(self.page, enclosed);
        self.core.budget.put_back(u64::from(self.page.frames));
    }
}
