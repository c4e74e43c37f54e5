//! The buffer manager: [`Pool`].

mod ahead;
mod allocation;
pub mod copies;
pub mod fix_async;
pub mod guard;
pub(crate) mod load;
pub mod options;

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use vellum_vm::{BackendChoice, BackendKind, PageRange, Residency, Surface, SurfaceError};

use crate::core::{Core, Wanted};
use crate::device::{Device, DeviceInfo};
use crate::error::{PoolError, Restart};
use crate::eviction::Eviction;
use crate::eviction::write_back::HeldPages;
use crate::huge::collapser;
use crate::page::bytes::RacyBytes;
use crate::page::dirty_pages::DirtyPages;
use crate::page::format::PageFormat;
use crate::page::state::{Leave, PageState, SHARED_HOLDERS_MAX, State, Word};
use crate::page::states::{StatePlace, States};
use crate::page::{PageId, PageRef};
use crate::pool::guard::{ExclusiveGuard, OptimisticGuard, SharedGuard};
use crate::pool::options::{CountedBytes, PoolOptions, PoolSize};
use crate::replacement::Replacement;
use crate::space::Space;
use crate::statistics::counters::Event;
use crate::sync::{Mutex, lock, thread};

/// Retries of one optimistic read before it takes the shared lock.
const RESTARTS_MAX: u32 = 16;

/// Waits of a brief attempt to lock a page, of about a millisecond each.
const BRIEF_ROUNDS: u32 = 3;

/// A buffer manager that lets the MMU translate page identifiers (vmcache; SIGMOD'23, section 3).
///
/// Every page of the file has its place on a surface of virtual memory. The pool decides which
/// pages are in memory. Any thread may call any method.
#[derive(Debug)]
pub struct Pool {
    pub(crate) eviction: Arc<Eviction>,
    background: Vec<thread::JoinHandle<()>>,
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) space: Mutex<Space>,
    pub(crate) deferred: Mutex<Vec<PageRef>>,
    pub(crate) file_pages: AtomicU64,
    pub(crate) growing: Mutex<()>,
    read_only: bool,
    _counted: CountedBytes,
}

impl Pool {
    /// Opens a pool over a device. `format` seals and checks the pages, `space` says which pages
    /// are allocated.
    ///
    /// # Errors
    /// A pool below [`PoolOptions::MIN_FRAMES`] or beyond the memory of the process, a device that
    /// does not tell its length, or no address space.
    pub fn open(
        device: Arc<dyn Device>,
        format: Arc<dyn PageFormat>,
        space: Space,
        options: PoolOptions,
    ) -> Result<Pool, PoolError> {
        let frames = options.size.frames()?;
        if frames < PoolOptions::MIN_FRAMES {
            return Err(PoolError::PoolTooSmall { frames, min: PoolOptions::MIN_FRAMES });
        }
        let file_pages = device.pages().map_err(PoolError::Resize)?;
        let pages = file_pages.max(space.end()).max(1);
        let policy = options.policy.unwrap_or_else(|| Replacement::default().policy(frames));
        let batch =
            options.eviction_batch.clamp(1, usize::try_from(frames / 16).unwrap_or(1).max(1));
        let surface = match (options.size, options.backend) {
            // The caller has not asked for a backend that takes its memory at once.
            (PoolSize::Auto, BackendChoice::Auto) => Surface::reserve(pages, options.backend)?,
            // One batch more, as the contract allows, because releases return frames late.
            _ => Surface::reserve_with_frames(pages, frames + batch as u64, options.backend)?,
        };
        let states = States::new(options.states, &surface, frames + batch as u64, pages)?;
        let dirty = DirtyPages::new(pages)?;
        let core = Core::new(surface, states, dirty, frames, policy, format)
            .with_huge_pages(options.huge_pages, options.evictors);
        let core = Arc::new(core);
        let eviction = Arc::new(Eviction::new(
            core.clone(),
            device.clone(),
            batch,
            options.evictors,
            options.patience.max(1),
        ));
        let mut pool = Pool {
            eviction,
            background: Vec::new(),
            core,
            device,
            space: Mutex::new(space),
            deferred: Mutex::new(Vec::new()),
            file_pages: AtomicU64::new(file_pages),
            growing: Mutex::new(()),
            read_only: options.read_only,
            _counted: CountedBytes::of_frames(frames),
        };
        for _ in 0..options.evictors {
            // If a thread does not start, dropping the pool ends the earlier ones.
            pool.background.push(spawn_evictor(&pool.eviction).map_err(PoolError::Thread)?);
        }
        pool.background.extend(collapser::spawn(&pool.core).map_err(PoolError::Thread)?);
        Ok(pool)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Refuses changes on a read-only or poisoned pool.
    pub fn check_writable(&self) -> Result<(), PoolError> {
        if self.read_only {
            return Err(PoolError::ReadOnly);
        }
        self.core.check_poison()
    }

    /// Reads a page without any lock. Faults it in if it is not in memory.
    ///
    /// A hit is a handful of instructions that write nothing (docs/hit-path.md). So it does not
    /// count itself either; see [`count_optimistic`](Pool::count_optimistic).
    #[inline(always)]
    pub fn optimistic(&self, page: PageRef) -> Result<OptimisticGuard<'_>, PoolError> {
        let core = &*self.core;
        let (mut state, mut seen) = core.look(page)?;
        if !(seen.is_readable_unmarked() && core.is_whole(page)) {
            (state, seen) = self.optimistic_slow(page)?;
        }
        Ok(OptimisticGuard::new(core, state, page, seen))
    }

    /// Waits until a page is readable, and returns its word. It returns no guard, because the
    /// compiler would then keep every guard in memory.
    #[cold]
    #[inline(never)]
    fn optimistic_slow(&self, page: PageRef) -> Result<(&PageState, Word), PoolError> {
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Shared(_) => {
                    if self.core.is_whole(page) {
                        return Ok((state, seen));
                    }
                    if seen.validates(state.load_after_reads()) {
                        return Err(PoolError::WrongSize(page));
                    }
                }
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Marked => _ = state.try_unmark(seen),
                State::Locked => self.core.wait(page, state, seen, Wanted::NotLocked),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Evicted => {
                    if self.load(page, state, seen)? {
                        self.core.counters.count(Event::OptimisticMiss);
                        self.core.unlock(page, Leave::Unlocked, false);
                    }
                }
            }
        }
    }

    /// Locks a page shared. Faults it in if it is not in memory. Waits for a writer that holds the
    /// page, and lets a writer go first that has waited for a millisecond. So a thread that already
    /// holds the page may wait for 100 ms.
    #[inline]
    pub fn fix_shared(&self, page: PageRef) -> Result<SharedGuard<'_>, PoolError> {
        let (state, seen) = self.core.look(page)?;
        if page.frames == 1 && seen.is_readable() && state.try_lock_shared(seen) {
            self.core.counters.count(Event::Hit);
            return Ok(SharedGuard::new(&self.core, state, page));
        }
        self.lock_shared(page)?;
        Ok(SharedGuard::new(&self.core, self.core.held(page), page))
    }

    /// As [`fix_shared`](Pool::fix_shared), whatever the page's state; returns with the lock.
    #[cold]
    fn lock_shared(&self, page: PageRef) -> Result<(), PoolError> {
        let mut rounds = 0;
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Marked | State::Shared(_) => {
                    if self.core.join_in_turn(page, state, seen, &mut rounds) {
                        self.core.counters.count(Event::Hit);
                        return self.check_whole(page).inspect_err(|_| {
                            self.core.unlock_shared(page);
                        });
                    }
                }
                State::Locked => self.core.wait(page, state, seen, Wanted::NotLocked),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Evicted => {
                    if self.load(page, state, seen)? {
                        self.core.unlock(page, Leave::Shared, false);
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Checks that the reference has the length of the page, which the caller holds.
    #[inline]
    pub(crate) fn check_whole(&self, page: PageRef) -> Result<(), PoolError> {
        if self.core.is_whole(page) { Ok(()) } else { Err(PoolError::WrongSize(page)) }
    }

    /// Locks a page exclusively. Faults it in if it is not in memory. Waits for all other holders.
    ///
    /// # Errors
    /// [`PoolError::ReadOnly`] among others.
    #[inline]
    pub fn fix_exclusive(&self, page: PageRef) -> Result<ExclusiveGuard<'_>, PoolError> {
        if self.read_only {
            return Err(PoolError::ReadOnly);
        }
        let (state, seen) = self.core.look(page)?;
        if page.frames == 1 && seen.is_resident_unheld() && state.try_lock(seen) {
            self.core.counters.count(Event::Hit);
            return Ok(ExclusiveGuard::new(&self.core, state, page, false));
        }
        self.lock_exclusive(page, None)?;
        Ok(ExclusiveGuard::new(&self.core, self.core.held(page), page, false))
    }

    /// As [`fix_exclusive`](Pool::fix_exclusive), but waits for other holders for a few
    /// milliseconds at most. None if they still hold the page. For a caller that holds another
    /// page, for which those holders may be waiting.
    pub fn fix_exclusive_briefly(
        &self,
        page: PageRef,
    ) -> Result<Option<ExclusiveGuard<'_>>, PoolError> {
        if self.read_only {
            return Err(PoolError::ReadOnly);
        }
        let locked = self.lock_exclusive(page, Some(BRIEF_ROUNDS))?;
        Ok(locked.then(|| ExclusiveGuard::new(&self.core, self.core.held(page), page, false)))
    }

    /// As [`fix_exclusive`](Pool::fix_exclusive), whatever the page's state; returns with the lock,
    /// or without it after so many `brief` waits.
    #[cold]
    fn lock_exclusive(&self, page: PageRef, mut brief: Option<u32>) -> Result<bool, PoolError> {
        let mut rounds = 0;
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Marked => {
                    if state.try_lock(seen) {
                        self.core.counters.count(Event::Hit);
                        let whole = self.check_whole(page).inspect_err(|_| {
                            self.core.unlock(page, Leave::Unlocked, false);
                        });
                        return whole.map(|()| true);
                    }
                }
                State::Locked | State::Shared(_) if brief == Some(0) => return Ok(false),
                State::Locked | State::Shared(_) if brief.is_some() => {
                    brief = brief.map(|rounds| rounds - 1);
                    // Without urgency, because the caller may give up.
                    self.core.wait_for_holders(page, state, seen, &mut 0);
                }
                State::Locked => self.core.wait(page, state, seen, Wanted::Alone),
                State::Shared(_) => self.core.wait_for_holders(page, state, seen, &mut rounds),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Evicted => {
                    if self.load(page, state, seen)? {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Runs `read` on a page until one run saw a consistent page (SIGMOD'23, listing 2).
    ///
    /// `read` may see bytes that do not fit together; it returns [`Restart`] to retry. After 16
    /// retries this locks the page shared, so that writers cannot starve the reader. Then `read`
    /// sees a consistent page, and the caller gets a [`Restart`] of `read` as it would get damage.
    pub fn read<R>(
        &self,
        page: PageRef,
        mut read: impl FnMut(RacyBytes<'_>) -> Result<R, Restart>,
    ) -> Result<Result<R, Restart>, PoolError> {
        for _ in 0..RESTARTS_MAX {
            let guard = self.optimistic(page)?;
            self.count_optimistic(1);
            let outcome = read(guard.bytes());
            if guard.validate().is_ok()
                && let Ok(value) = outcome
            {
                return Ok(Ok(value));
            }
        }
        self.count_starvation();
        let guard = self.fix_shared(page)?;
        Ok(read(guard.bytes()))
    }

    /// Counts optimistic reads, which do not count themselves. `reads` includes those whose page
    /// was not in memory. A caller that makes several reads in one operation counts them with one
    /// call, which is one addition to a counter of this thread. [`PoolStats`](crate::PoolStats)
    /// lacks the hits of reads that the caller does not count.
    #[inline(always)]
    pub fn count_optimistic(&self, reads: u64) {
        self.core.counters.add(Event::Optimistic, reads);
    }

    /// Counts an optimistic operation above the pool that took locks after too many retries.
    pub fn count_starvation(&self) {
        self.core.counters.count(Event::Starve);
    }

    /// Whether a page is in memory, or in transit, at this moment.
    pub fn is_resident(&self, page: PageRef) -> bool {
        let state = self.core.look(page).map(|(_, word)| word.state());
        !matches!(state, Ok(State::Evicted | State::Free | State::Inner) | Err(_))
    }

    /// Writes every dirty page and makes the file durable.
    ///
    /// # Errors
    /// As [`write_dirty`](Pool::write_dirty); and a failed sync poisons the pool.
    pub fn sync(&self) -> Result<(), PoolError> {
        self.write_dirty()?;
        self.sync_device()
    }

    /// Makes durable what the pool has written. Writes no page.
    ///
    /// # Errors
    /// A failed sync, which poisons the pool.
    pub fn sync_device(&self) -> Result<(), PoolError> {
        self.device.sync().map_err(|error| {
            let error = PoolError::Sync(error);
            self.core.poison(&error);
            error
        })
    }

    /// Writes every dirty page, in the order of the file. Does not make them durable. Looks at no
    /// clean page.
    ///
    /// Covers all changes whose exclusive guards were dropped before the call. Waits for pages
    /// that are held exclusively: a thread that holds one must not call this.
    ///
    /// # Errors
    /// A failed write poisons the pool, unless the disk is full. A page that was not written is
    /// still in memory and still dirty.
    pub fn write_dirty(&self) -> Result<(), PoolError> {
        self.check_writable()?;
        self.free_deferred();
        for batch in self.core.dirty.collect().chunks(self.eviction.writer.batch()) {
            let (mut held, mut busy) = (HeldPages::none(&self.core), Vec::new());
            for &id in batch {
                match self.try_hold_dirty(id) {
                    Hold::Held(page) => held.push(page),
                    Hold::Clean => {}
                    Hold::Busy(..) => busy.push(id),
                }
            }
            self.write_held(held)?;
            for id in busy {
                if let Some(page) = self.wait_to_hold_dirty(id) {
                    let mut held = HeldPages::none(&self.core);
                    held.push(page);
                    self.write_held(held)?;
                }
            }
        }
        Ok(())
    }

    /// Writes pages and unlocks them.
    fn write_held(&self, held: HeldPages<'_>) -> Result<(), PoolError> {
        self.eviction.writer.write(&*self.device, &held).into_iter().collect()
    }

    /// Holds the page that begins at `id` shared, if it is dirty and no thread writes to it.
    fn try_hold_dirty(&self, id: PageId) -> Hold<'_> {
        loop {
            let (state, seen) = self.core.look_at_known(PageRef { id, frames: 1 });
            match seen.state() {
                State::Locked => return Hold::Busy(state, seen),
                _ if !seen.is_dirty() => return Hold::Clean,
                State::Shared(SHARED_HOLDERS_MAX) => return Hold::Busy(state, seen),
                // Even before an urgent writer: this is one more holder, for one write.
                _ if state.try_join(seen) => return Hold::Held(self.core.whole(id)),
                _ => {}
            }
        }
    }

    /// As `try_hold_dirty`, but waits for writers. The caller holds no other page. None if the page
    /// is clean.
    fn wait_to_hold_dirty(&self, id: PageId) -> Option<PageRef> {
        loop {
            match self.try_hold_dirty(id) {
                Hold::Held(page) => return Some(page),
                Hold::Clean => return None,
                Hold::Busy(state, seen) => {
                    let page = PageRef { id, frames: 1 };
                    self.core.wait(page, state, seen, Wanted::SharedPlace);
                }
            }
        }
    }

    /// The pool's size in frames of 4 KiB.
    pub fn capacity(&self) -> u64 {
        self.core.budget.capacity()
    }

    /// The backend that populates and releases pages.
    pub fn backend(&self) -> BackendKind {
        self.core.surface.backend()
    }

    /// Where the state words of the pages are.
    pub fn state_place(&self) -> StatePlace {
        self.core.states.place()
    }

    /// Bytes of memory that the state words take, according to the kernel's page tables. Slow: it
    /// reads `/proc/self/pagemap`.
    pub fn state_bytes(&self) -> Result<u64, PoolError> {
        let bytes = self.core.states.resident_bytes();
        bytes.map_err(|errno| PoolError::Surface(SurfaceError::Pagemap { errno }))
    }

    /// Which of these pages of 4 KiB have memory, according to the kernel's page tables. It checks
    /// [`PoolStats::resident_frames`](crate::PoolStats::resident_frames) and shares no code with
    /// it. Slow: it reads `/proc/self/pagemap`.
    pub fn kernel_residency(&self, range: PageRange) -> Result<Residency, PoolError> {
        Ok(self.core.surface.residency(range)?)
    }

    /// How many pages of 4 KiB have memory, according to the kernel's page tables.
    pub fn kernel_resident_pages(&self) -> Result<u64, PoolError> {
        let surface = &self.core.surface;
        Ok(surface.resident_pages(PageRange { start: 0, count: surface.pages() })?)
    }

    /// What the device reports about itself.
    pub fn device_info(&self) -> DeviceInfo {
        self.device.info()
    }

    /// The file's length in pages of 4 KiB.
    pub fn file_pages(&self) -> u64 {
        self.file_pages.load(std::sync::atomic::Ordering::Acquire)
    }

    /// The end of the last allocated page, in pages of 4 KiB.
    pub fn end(&self) -> u64 {
        lock(&self.space).end()
    }
}

#[derive(Clone, Copy, Debug)]
enum Hold<'a> {
    Held(PageRef),
    Clean,
    Busy(&'a PageState, Word),
}

fn spawn_evictor(eviction: &Arc<Eviction>) -> io::Result<thread::JoinHandle<()>> {
    let eviction = eviction.clone();
    let builder = thread::Builder::new().name("vellum-evict".into());
    builder.spawn(move || eviction.run_background())
}

impl Drop for Pool {
    /// Ends the background threads. Writes no dirty page: call [`Pool::sync`] before.
    fn drop(&mut self) {
        self.eviction.end_background();
        self.core.end_huge_pages();
        for thread in self.background.drain(..) {
            // A background thread that panicked has printed the reason.
            let _ = thread.join();
        }
    }
}
