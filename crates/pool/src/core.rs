//! The memory side of a pool: surface, page states, budget, and what every operation needs of them.
//!
//! Nothing here knows the device. So whoever completes a read on the device's own thread may hold
//! this part of the pool, and the device never waits for itself to end.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use vellum_vm::{Entry, PAGE_SIZE, Surface};

use crate::error::PoolError;
use crate::eviction::frame_budget::FrameBudget;
use crate::huge::{HugeChunks, HugePages};
use crate::page::format::PageFormat;
use crate::page::parking::ParkingLot;
use crate::page::state::{Leave, PageState, State, Word};
use crate::page::state_array::StateArray;
use crate::page::{PageId, PageRef};
use crate::replacement::{Chance, ReplacementPolicy, Residents};
use crate::statistics::counters::{Counters, Event};
use crate::statistics::histogram::Histogram;

/// From so many frames on, a new page's memory is populated by one call instead of by faults.
const POPULATE_FROM: u32 = 4;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) surface: Surface,
    pub(crate) states: StateArray,
    pub(crate) parking: ParkingLot,
    pub(crate) budget: FrameBudget,
    pub(crate) policy: Box<dyn ReplacementPolicy>,
    pub(crate) format: Arc<dyn PageFormat>,
    pub(crate) counters: Counters,
    /// None in a pool without huge pages.
    pub(crate) huge: Option<HugeChunks>,
    pub(crate) read_latency: Histogram,
    pub(crate) write_latency: Histogram,
    /// Release batches and the pages in them, for the mean batch size.
    pub(crate) release_batches: AtomicU64,
    /// Set once, by the first failed write or sync.
    poison: OnceLock<Arc<str>>,
}

/// What a waiter waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// Any access beside a writer.
    NotLocked,
    /// A place among the shared holders.
    SharedPlace,
    /// Nobody else.
    Alone,
}

impl Wanted {
    /// `word` makes the waiter wait.
    pub(crate) fn is_blocked(self, word: Word) -> bool {
        match (self, word.state()) {
            (_, State::Locked) => true,
            (Wanted::SharedPlace, State::Shared(holders)) => {
                holders == crate::page::state::SHARED_HOLDERS_MAX
            }
            (Wanted::Alone, State::Shared(_)) => true,
            _ => false,
        }
    }
}

impl Core {
    pub(crate) fn new(
        surface: Surface,
        states: StateArray,
        capacity: u64,
        policy: Box<dyn ReplacementPolicy>,
        format: Arc<dyn PageFormat>,
    ) -> Core {
        Core {
            surface,
            states,
            parking: ParkingLot::new(),
            budget: FrameBudget::new(capacity),
            policy,
            format,
            counters: Counters::new(),
            huge: None,
            read_latency: Histogram::new(),
            write_latency: Histogram::new(),
            release_batches: AtomicU64::new(0),
            poison: OnceLock::new(),
        }
    }

    /// Puts pages that stay, and the states of all, into huge pages where that is possible and
    /// wanted. `threads` are those that the pool may have in the background.
    pub(crate) fn with_huge_pages(mut self, wanted: HugePages, threads: u64) -> Core {
        let frames = self.budget.capacity();
        let large = !cfg!(feature = "model") && frames >= HugeChunks::MIN_FRAMES;
        if wanted == HugePages::Auto && large && vellum_vm::probe::huge_pages().is_ok() {
            self.states.use_huge_pages(frames * PAGE_SIZE as u64 / StateArray::HUGE_SHARE);
            self.huge = (threads > 0 && self.surface.can_collapse()).then(HugeChunks::new);
        }
        self
    }

    /// Ends the thread that collapses, if there is one; it returns soon after.
    pub(crate) fn end_huge_pages(&self) {
        if let Some(huge) = &self.huge {
            huge.candidates.end();
        }
    }

    /// The state word of a page that lies in the file and fits the pool.
    #[inline(always)]
    pub(crate) fn state(&self, page: PageRef) -> Result<&PageState, PoolError> {
        match self.states.get(page.id) {
            Some(state) if page.frames == 1 => Ok(state),
            state => self.state_of_large(page, state),
        }
    }

    #[cold]
    fn state_of_large<'a>(
        &self,
        page: PageRef,
        state: Option<&'a PageState>,
    ) -> Result<&'a PageState, PoolError> {
        let pages = self.states.pages();
        let end = page.id.0.checked_add(u64::from(page.frames));
        let state = state
            .filter(|_| page.frames > 0 && end.is_some_and(|end| end <= pages))
            .ok_or(PoolError::OutOfRange { page, pages })?;
        let capacity = self.budget.capacity();
        if u64::from(page.frames) > capacity || page.frames > PageRef::MAX_FRAMES {
            return Err(PoolError::PageTooLarge { page, capacity });
        }
        Ok(state)
    }

    /// The words of a page's frames behind its head.
    fn inner(&self, page: PageRef) -> impl Iterator<Item = &PageState> {
        let frames = page.id.0 + 1..page.id.0 + u64::from(page.frames);
        frames.filter_map(|id| self.states.get(PageId(id)))
    }

    /// Makes the frames behind the head part of the page, before it becomes resident. The caller
    /// has locked the head. Fails, and changes nothing, if one of them is a page of its own.
    ///
    /// Returns what they were, for [`unlock_unread`](Core::unlock_unread).
    pub(crate) fn enclose(&self, page: PageRef) -> Result<Vec<Leave>, PoolError> {
        let mut enclosed = Vec::with_capacity(page.frames as usize - 1);
        for inner in self.inner(page) {
            match inner.try_enclose() {
                Some(leave) => enclosed.push(leave),
                None => {
                    self.disclose(page, enclosed);
                    return Err(PoolError::WrongSize(page));
                }
            }
        }
        Ok(enclosed)
    }

    fn disclose(&self, page: PageRef, leaves: impl IntoIterator<Item = Leave>) {
        self.inner(page).zip(leaves).for_each(|(inner, leave)| inner.disclose(leave));
    }

    /// All of the page is resident, and of this page: a reference of the right length. True of
    /// any page of one frame. The caller holds the head, or validates it afterwards.
    #[inline]
    pub(crate) fn is_whole(&self, page: PageRef) -> bool {
        page.frames == 1 || self.inner(page).all(|inner| inner.load().state() == State::Inner)
    }

    /// The state word of a page that the caller holds.
    pub(crate) fn held(&self, page: PageRef) -> &PageState {
        self.states.get(page.id).expect("a page that is held lies in the file")
    }

    /// Where the page is, or would be, in memory.
    #[inline(always)]
    pub(crate) fn address(&self, page: PageRef) -> *mut u8 {
        // Within the surface, which is as long as the state array that `page` was found in.
        self.surface.base().as_ptr().wrapping_add(page.id.0 as usize * PAGE_SIZE)
    }

    /// The bytes of a page that the caller holds, shared or exclusively.
    ///
    /// # Safety
    /// The page is resident, and held for as long as `'a`.
    pub(crate) unsafe fn bytes<'a>(&self, page: PageRef) -> &'a [u8] {
        // SAFETY: `page` lies on the surface (it passed `state`), its memory is resident and, by
        // the lock that the caller holds, nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.address(page), page.bytes()) }
    }

    /// Waits until `wanted` may be possible. `seen` is the word that made the caller wait.
    #[cold]
    pub(crate) fn wait(&self, page: PageRef, state: &PageState, seen: Word, wanted: Wanted) {
        if state.try_announce_waiter(seen) {
            self.counters.count(Event::Wait);
            self.parking.park(page.id, || {
                let now = state.load();
                now.has_waiters() && wanted.is_blocked(now)
            });
        }
    }

    /// As [`wait`](Core::wait), for a task. False if there is nothing to wait for any more.
    pub(crate) fn wait_task(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
        wanted: Wanted,
        waker: &std::task::Waker,
    ) -> bool {
        if !state.try_announce_waiter(seen) {
            return false;
        }
        self.counters.count(Event::Wait);
        self.parking.park_task(page.id, waker, || {
            let now = state.load();
            now.has_waiters() && wanted.is_blocked(now)
        })
    }

    /// Ends an exclusive hold of a page whose memory is gone, and wakes who waited for it.
    ///
    /// The frames behind the head are free then, evicted page or not: none of them is a page, and
    /// a stale reader that knew one when it was must not bring it in.
    pub(crate) fn unlock_released(&self, page: PageRef, leave: Leave) {
        self.disclose(page, std::iter::repeat(Leave::Free));
        self.unlock(page, leave, false);
    }

    /// Ends an exclusive hold of a page that could not be read. The reference to it may be wrong,
    /// so the frames behind the head are again what they were before [`enclose`](Core::enclose).
    pub(crate) fn unlock_unread(&self, page: PageRef, enclosed: Vec<Leave>) {
        self.disclose(page, enclosed);
        self.unlock(page, Leave::Evicted, false);
    }

    /// Ends an exclusive hold and wakes who waited for it.
    pub(crate) fn unlock(&self, page: PageRef, leave: Leave, dirty: bool) {
        if self.held(page).unlock(leave, dirty) {
            self.parking.wake(page.id);
        }
    }

    /// Ends a shared hold and wakes who waited for it.
    pub(crate) fn unlock_shared(&self, page: PageRef) {
        if self.held(page).unlock_shared() {
            self.parking.wake(page.id);
        }
    }

    /// Puts zeroed memory behind a page that has none, or leaves that to whoever writes it first.
    /// The caller holds it exclusively and has taken its frames out of the budget.
    ///
    /// # Errors
    /// What the kernel said; a part of the page may have memory then.
    pub(crate) fn populate_zeroed(&self, page: PageRef) -> io::Result<()> {
        let by_writing = self.surface.fault_behaviour().writing_populates();
        if by_writing && page.frames < POPULATE_FROM {
            return Ok(());
        }
        let mut entry = [Entry::new(page.range())];
        self.surface.populate(&mut entry);
        if by_writing {
            // Failing to populate ahead is no failure: the first write populates.
            return Ok(());
        }
        entry[0].result?;
        if !self.surface.fresh_pages_are_zeroed() {
            // SAFETY: the page lies on the surface, its memory is resident and it is held
            // exclusively; what optimistic readers read of it is discarded.
            unsafe { self.address(page).write_bytes(0, page.bytes()) };
        }
        Ok(())
    }

    /// Takes the memory of a page away that was not admitted, as far as it has some. It lies in no
    /// huge page. Where the kernel refuses, it is found there when the page comes the next time.
    pub(crate) fn release_unadmitted(&self, page: PageRef) {
        self.release_small(&mut [Entry::new(page.range())]);
    }

    /// A page became resident: its memory is there, or comes as it is written. The caller holds it
    /// exclusively and has taken its frames out of the budget.
    pub(crate) fn admit(&self, page: PageRef) {
        self.policy.admit(page);
        if let Some(huge) = &self.huge {
            huge.come(page.range());
        }
    }

    /// Takes the memory of admitted pages away, with one call for all of them; a result for each.
    /// The caller holds them exclusively, and no reference to their bytes is left.
    ///
    /// EBUSY is an ordinary answer: the page lies in a huge page on which others have I/O under
    /// way, or which is just put together; or, on exmap, its own I/O has not let go of it yet.
    /// Like any page that fails to be released, it stays.
    pub(crate) fn release(&self, pages: impl Iterator<Item = PageRef>) -> Vec<Entry> {
        let mut entries: Vec<Entry> = pages.map(|page| Entry::new(page.range())).collect();
        match &self.huge {
            Some(huge) => {
                huge.release(&self.surface, &mut entries, |entries| self.release_small(entries));
            }
            None => self.release_small(&mut entries),
        }
        entries
    }

    /// As [`release`](Core::release), for a page that is freed, and cannot stay for another try:
    /// waits a little where that would say EBUSY.
    pub(crate) fn release_freed(&self, page: PageRef) -> io::Result<()> {
        let mut entry = Entry::new(page.range());
        match &self.huge {
            Some(huge) => {
                let release = |entries: &mut [Entry]| self.release_small(entries);
                huge.release_freed(&self.surface, &mut entry, release);
            }
            None => self.release_small(std::slice::from_mut(&mut entry)),
        }
        Ok(entry.result?)
    }

    /// Releases pages that the caller holds, and that lie in no huge page, or with all of one.
    fn release_small(&self, entries: &mut [Entry]) {
        if !entries.is_empty() {
            self.release_batches.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the caller holds the pages exclusively, so only optimistic readers look at
            // them, and what those read is discarded.
            unsafe { self.surface.release(entries) };
        }
    }

    /// A read into an evicted page has ended: checks the page and admits it.
    ///
    /// The caller holds the page exclusively and has taken its frames out of the budget; after an
    /// error the memory is gone again, and both are still the caller's to give back.
    pub(crate) fn finish_read(
        &self,
        page: PageRef,
        result: io::Result<()>,
    ) -> Result<(), PoolError> {
        let outcome = result.map_err(|source| PoolError::Read { page, source }).and_then(|()| {
            // SAFETY: the page was just read and is held exclusively.
            let bytes = unsafe { self.bytes(page) };
            Ok(self.format.verify(page, bytes)?)
        });
        match outcome {
            Ok(()) => self.admit(page),
            Err(_) => self.release_unadmitted(page),
        }
        outcome
    }

    /// Refuses changes after a failed write or sync.
    pub(crate) fn check_poison(&self) -> Result<(), PoolError> {
        self.poison.get().map_or(Ok(()), |first| Err(PoolError::Poisoned(first.clone())))
    }

    /// Remembers the first failure after which the file's contents are unknown.
    ///
    /// A full disk is none: the page stays dirty in memory, and can be written once there is room.
    pub(crate) fn poison(&self, error: &PoolError) {
        let full = match error {
            PoolError::Write { source, .. } | PoolError::WriteAhead(source) => is_disk_full(source),
            _ => false,
        };
        if !full && self.poison.set(error.to_string().into()).is_ok() {
            tracing::error!("{error}; changes are refused from now on");
        }
    }
}

/// No space on the disk, in the quota, or under the file size limit.
pub(crate) fn is_disk_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
    )
}

impl Residents for Core {
    fn second_chance(&self, page: PageRef) -> Chance {
        let Some(state) = self.states.get(page.id) else { return Chance::InUse };
        let seen = state.load();
        match seen.state() {
            State::Marked => Chance::Spent,
            State::Unlocked if state.try_mark(seen) => Chance::Given,
            _ => Chance::InUse,
        }
    }
}
