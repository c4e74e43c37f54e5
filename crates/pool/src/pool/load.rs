//! Misses: bringing pages in, one by one and waiting, or many at once and not waiting.

use std::sync::Arc;
use std::time::Instant;

use crate::core::Core;
use crate::device::ReadDone;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, PageState, State, Word};
use crate::pool::Pool;
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

impl Pool {
    /// Reads an evicted page, whose word was `seen`. Then the caller holds it exclusively. False if
    /// somebody else was first.
    #[cold]
    pub(crate) fn load(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<bool, PoolError> {
        let core = &*self.core;
        let early = core.claim_brings_memory().then(|| self.eviction.reserve(page)).transpose()?;
        let enclosed = match core.claim(page, state, seen)? {
            Coming::Ours(enclosed) => enclosed,
            Coming::Lost => return Ok(false),
            Coming::Blocked => {
                drop(early);
                return self.wait_for_inner(page);
            }
        };
        let reserved = match early.map_or_else(|| self.eviction.reserve(page), Ok) {
            Ok(reserved) => reserved,
            Err(error) => {
                core.abandon(page, enclosed);
                return Err(error);
            }
        };
        let started = Instant::now();
        let result = self.device.read(&core.surface, page.range());
        core.read_latency.record(started.elapsed(), 1);
        if let Err(error) = core.finish_read(page, result) {
            core.abandon(page, enclosed);
            return Err(error);
        }
        reserved.keep();
        core.counters.count(Event::Miss);
        Ok(true)
    }

    /// Waits a moment for somebody with an old reference to leave a frame of the page. False, or an
    /// error where that may take forever.
    fn wait_for_inner(&self, page: PageRef) -> Result<bool, PoolError> {
        for _ in 0..LOOKS {
            if !self.core.inner(page).any(|(_, word)| word.state() == State::Locked) {
                return Ok(false);
            }
            self.core.budget.wait_briefly();
        }
        Err(PoolError::WrongSize(page))
    }

    /// Prepares the asynchronous read of a page, if it is evicted and there are frames for it.
    pub(crate) fn prepare_load(
        &self,
        page: PageRef,
        event: Event,
        failure: Option<Arc<LoadFailure>>,
    ) -> Result<Option<Load>, PoolError> {
        let (state, seen) = self.core.look(page)?;
        if seen.state() != State::Evicted {
            return Ok(None);
        }
        let Some(reserved) = self.eviction.try_reserve(page) else { return Ok(None) };
        let enclosed = match self.core.claim(page, state, seen)? {
            Coming::Ours(enclosed) => enclosed,
            Coming::Lost => return Ok(None),
            // Nothing here waits.
            Coming::Blocked => return Err(PoolError::WrongSize(page)),
        };
        reserved.keep();
        let core = self.core.clone();
        let started = Instant::now();
        let done = ReadDone::new(move |result| {
            core.read_latency.record(started.elapsed(), 1);
            complete(&core, page, enclosed, result, event, failure);
        });
        Ok(Some(Load { page, done }))
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
    /// which no frame is free. A failed read is silent; whoever fixes the page meets the error.
    pub fn prefetch(&self, pages: &[PageRef]) {
        let prepare = |page: &PageRef| self.prepare_load(*page, Event::Prefetch, None);
        let loads = pages.iter().filter_map(|page| prepare(page).ok().flatten()).collect();
        self.start_loads(loads);
    }
}

/// Publishes a page that was read asynchronously, or gives back what was taken for it.
fn complete(
    core: &Core,
    page: PageRef,
    enclosed: Enclosed,
    result: std::io::Result<()>,
    event: Event,
    failure: Option<Arc<LoadFailure>>,
) {
    match core.finish_read(page, result) {
        Ok(()) => {
            core.counters.count(event);
            core.unlock(page, Leave::Unlocked, false);
        }
        Err(error) => {
            if let Some(failure) = failure {
                *lock(&failure.0) = Some(error);
            }
            core.abandon(page, enclosed);
            core.budget.put_back(u64::from(page.frames));
        }
    }
}
