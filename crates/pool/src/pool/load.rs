//! Misses: bringing pages in, one by one and waiting, or many at once and not waiting.

use std::sync::Arc;
use std::time::Instant;

use crate::core::Core;
use crate::device::ReadDone;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, State};
use crate::pool::Pool;
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
    /// Reads an evicted page that the caller has locked. It stays locked; after an error it is
    /// evicted and unlocked again.
    #[cold]
    pub(crate) fn load(&self, page: PageRef) -> Result<(), PoolError> {
        let core = &*self.core;
        let enclosed = core.enclose(page).inspect_err(|_| {
            core.unlock(page, Leave::Evicted, false);
        })?;
        let outcome = self.eviction.reserve(page).and_then(|reserved| {
            let started = Instant::now();
            let result = self.device.read(&core.surface, page.range());
            core.read_latency.record(started.elapsed(), 1);
            core.finish_read(page, result)?;
            reserved.keep();
            core.counters.count(Event::Miss);
            Ok(())
        });
        if outcome.is_err() {
            core.unlock_unread(page, enclosed);
        }
        outcome
    }

    /// Prepares the asynchronous read of a page, if it is evicted and there are frames for it.
    pub(crate) fn prepare_load(
        &self,
        page: PageRef,
        event: Event,
        failure: Option<Arc<LoadFailure>>,
    ) -> Result<Option<Load>, PoolError> {
        let state = self.core.state(page)?;
        let seen = state.load();
        if seen.state() != State::Evicted {
            return Ok(None);
        }
        let Some(reserved) = self.eviction.try_reserve(page) else { return Ok(None) };
        if !state.try_lock(seen) {
            return Ok(None);
        }
        let enclosed = self.core.enclose(page).inspect_err(|_| {
            self.core.unlock(page, Leave::Evicted, false);
        })?;
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
    enclosed: Vec<Leave>,
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
            core.budget.put_back(u64::from(page.frames));
            core.unlock_unread(page, enclosed);
        }
    }
}
