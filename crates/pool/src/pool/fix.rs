//! Fixing pages, and the guards of fixed pages: exclusive, shared and optimistic.
//!
//! [`Pool::try_optimistic`], [`Pool::prefetch_state`] and [`Pool::prefetch_bytes`] are for code
//! that works on many pages in turn and switches to another page where it would wait (group
//! prefetching, Chen, Ailamaki, Gibbons and Mowry, ICDE'04; asynchronous memory access chaining,
//! Kocberber, Falsafi and Grot, VLDB'15).

#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::core::{Core, Wanted};
use crate::error::{PoolError, Restart};
use crate::page::PageRef;
use crate::page::bytes::{LINE, RacyBytes, prefetch_line};
use crate::page::state::{Leave, PageState, State, Word};
use crate::pool::Pool;
use crate::statistics::counters::Event;

/// Retries of one optimistic read before it takes the shared lock.
const RESTARTS_MAX: u32 = 16;

/// Waits of a brief attempt to lock a page, of about a millisecond each.
const BRIEF_ROUNDS: u32 = 3;

impl Pool {
    /// Reads a page without any lock. Faults it in if it is not in memory.
    ///
    /// A hit is a handful of instructions that write nothing (docs/hit-path.md). So it does not
    /// count itself either; see [`count_optimistic`](Pool::count_optimistic).
    #[inline(always)]
    pub fn optimistic(&self, page: PageRef) -> Result<OptimisticGuard<'_>, PoolError> {
        let core = &*self.core;
        let (state, seen) = match core.states.look_for_hit(page.id) {
            hit if page.frames == 1 && hit.1.is_readable_unmarked() => hit,
            _ => self.optimistic_slow(page)?,
        };
        Ok(OptimisticGuard::new(core, state, page, seen))
    }

    /// Checks the reference, waits until the page is readable, and returns its word. It returns no
    /// guard, because the compiler would then keep every guard in memory.
    #[cold]
    #[inline(never)]
    fn optimistic_slow(&self, page: PageRef) -> Result<(&PageState, Word), PoolError> {
        loop {
            let (state, seen) = self.core.look(page)?;
            match seen.state() {
                State::Unlocked | State::Shared(_) => {
                    // The frames and the word are of one page if the word is still the same.
                    let is_whole = self.core.is_whole(page);
                    if seen.validates(state.load_after_reads()) {
                        return match is_whole {
                            true => Ok((state, seen)),
                            false => Err(PoolError::WrongSize(page)),
                        };
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
        let (state, seen) = self.core.states.look_for_hit(page.id);
        if page.frames == 1 && seen.is_readable() && state.try_lock_shared(seen) {
            self.core.counters.count(Event::Hit);
            return SharedGuard::new(&self.core, state, page);
        }
        self.lock_shared(page)?;
        SharedGuard::new(&self.core, self.core.held(page), page)
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
        let (state, seen) = self.core.states.look_for_hit(page.id);
        if page.frames == 1 && seen.is_resident_unheld() && state.try_lock(seen) {
            self.core.counters.count(Event::Hit);
            return ExclusiveGuard::new(&self.core, state, page, false);
        }
        self.lock_exclusive(page, None)?;
        ExclusiveGuard::new(&self.core, self.core.held(page), page, false)
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
        let guard = || ExclusiveGuard::new(&self.core, self.core.held(page), page, false);
        locked.then(guard).transpose()
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

    /// As [`optimistic`](Pool::optimistic), but never waits and never reads. None if the page is
    /// not in memory, or if a thread holds it exclusively or is reading it
    /// ([`is_resident`](Pool::is_resident) tells the two apart), or if the reference is bad
    /// (`optimistic` says why).
    #[inline(always)]
    pub fn try_optimistic(&self, page: PageRef) -> Option<OptimisticGuard<'_>> {
        let core = &*self.core;
        let (state, seen) = match core.states.look_for_hit(page.id) {
            hit if page.frames == 1 && hit.1.is_readable_unmarked() => hit,
            _ => try_optimistic_slow(core, page)?,
        };
        Some(OptimisticGuard::new(core, state, page, seen))
    }

    /// Prefetches the page's state word, or the entry that leads to it, into the CPU's cache.
    #[inline(always)]
    pub fn prefetch_state(&self, page: PageRef) {
        if let Some(line) = self.core.states.line(page.id) {
            prefetch_line(line);
        }
    }

    /// Prefetches `len` bytes at `offset` of a page into the CPU's cache. Does nothing if the page
    /// is not in memory or the reference is bad. [`prefetch`](Pool::prefetch) reads pages.
    #[inline(always)]
    pub fn prefetch_bytes(&self, page: PageRef, offset: usize, len: usize) {
        let base: *const u8 = match &self.core.slots {
            // An optimistic reader may have read any number.
            None => self.core.own_address(page.id),
            Some(_) => match self.core.states.look(page.id) {
                Some((_, seen)) => self.core.address_to_prefetch(page.id, seen),
                None => return,
            },
        };
        let first = offset / LINE;
        for line in first..(offset + len).div_ceil(LINE) {
            prefetch_line(base.wrapping_add(line * LINE));
        }
    }
}

/// The slow path of [`Pool::try_optimistic`]: unmarks a marked page.
#[cold]
#[inline(never)]
fn try_optimistic_slow(core: &Core, page: PageRef) -> Option<(&PageState, Word)> {
    loop {
        let (state, seen) = core.look(page).ok()?;
        match seen.state() {
            State::Unlocked | State::Shared(_) => {
                let is_whole = core.is_whole(page);
                if seen.validates(state.load_after_reads()) {
                    return is_whole.then_some((state, seen));
                }
            }
            State::Marked => _ = state.try_unmark(seen),
            State::Locked | State::Evicted | State::Free | State::Inner => return None,
        }
    }
}

/// Prefetches the first line of a value into the CPU's cache.
#[inline(always)]
pub fn prefetch_value<T>(value: &T) {
    prefetch_line(std::ptr::from_ref(value).cast());
}

/// The address of a page that a guard holds.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: an address alone; what the guard that has it may do with the page, it may do on any
// thread.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// An exclusive lock on a page: no other thread can change the page, lock it, or evict it.
///
/// Writing through it (`DerefMut`) marks the page dirty. Dropping it unlocks the page.
#[must_use]
pub struct ExclusiveGuard<'a> {
    core: &'a Core,
    state: &'a PageState,
    page: PageRef,
    address: Address,
    dirty: bool,
}

impl<'a> ExclusiveGuard<'a> {
    /// For a resident page that the caller has locked exclusively.
    ///
    /// # Errors
    /// [`PoolError::DamagedWord`]. The page is unlocked then.
    #[inline(always)]
    pub(crate) fn new(
        core: &'a Core,
        state: &'a PageState,
        page: PageRef,
        dirty: bool,
    ) -> Result<ExclusiveGuard<'a>, PoolError> {
        match core.address_of(page, state) {
            Some(address) => {
                Ok(ExclusiveGuard { core, state, page, address: Address(address), dirty })
            }
            None => Err(core.refuse_exclusive(page, dirty)),
        }
    }

    /// The page.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// Turns the exclusive lock into a shared one. No other thread can change the page in between.
    pub fn downgrade(self) -> SharedGuard<'a> {
        let ExclusiveGuard { core, state, page, address, dirty } = self;
        std::mem::forget(self);
        core.unlock_state(page, state, Leave::Shared, dirty);
        SharedGuard { core, state, page, address }
    }

    /// Hands the lock over to the caller, without unlocking.
    pub(crate) fn into_held(self) -> PageRef {
        let page = self.page;
        std::mem::forget(self);
        page
    }
}

impl Deref for ExclusiveGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the page is resident and held exclusively as long as the guard lives.
        unsafe { std::slice::from_raw_parts(self.address.0, self.page.bytes()) }
    }
}

impl DerefMut for ExclusiveGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.dirty = true;
        // SAFETY: the page is resident and held exclusively, so there is no other reference to it;
        // optimistic readers read it through `RacyBytes` alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.0, self.page.bytes()) }
    }
}

impl Drop for ExclusiveGuard<'_> {
    fn drop(&mut self) {
        self.core.unlock_state(self.page, self.state, Leave::Unlocked, self.dirty);
    }
}

/// A shared lock on a page: no thread can change or evict the page. Others may hold it shared, too.
#[must_use]
pub struct SharedGuard<'a> {
    core: &'a Core,
    state: &'a PageState,
    page: PageRef,
    address: Address,
}

impl<'a> SharedGuard<'a> {
    /// For a resident page that the caller has locked shared.
    ///
    /// # Errors
    /// [`PoolError::DamagedWord`]. The page is unlocked then.
    #[inline(always)]
    pub(crate) fn new(
        core: &'a Core,
        state: &'a PageState,
        page: PageRef,
    ) -> Result<SharedGuard<'a>, PoolError> {
        match core.address_of(page, state) {
            Some(address) => Ok(SharedGuard { core, state, page, address: Address(address) }),
            None => Err(core.refuse_shared(page, state)),
        }
    }

    /// The page.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// The bytes in the form that code for optimistic readers takes.
    pub fn bytes(&self) -> RacyBytes<'_> {
        // SAFETY: the page lies in a slot or on the surface, which are mapped as long as the pool
        // lives.
        unsafe { RacyBytes::new(self.address.0, self.page.bytes()) }
    }

    /// Turns the shared lock into an exclusive one if no other thread holds the page. Otherwise
    /// returns the guard: drop it before you lock the page another way, or two upgrades wait for
    /// each other.
    pub fn try_upgrade(self) -> Result<ExclusiveGuard<'a>, SharedGuard<'a>> {
        if !self.state.try_upgrade() {
            return Err(self);
        }
        let SharedGuard { core, state, page, address } = self;
        std::mem::forget(self);
        Ok(ExclusiveGuard { core, state, page, address, dirty: false })
    }
}

impl Deref for SharedGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the page is resident and held shared as long as the guard lives.
        unsafe { std::slice::from_raw_parts(self.address.0, self.page.bytes()) }
    }
}

impl SharedGuard<'_> {
    /// Ends a hold that was no access: the page gets the clock's mark again if it had one.
    pub(super) fn unlock_as_found(self, was_marked: bool) {
        if was_marked {
            let (core, page) = (self.core, self.page);
            std::mem::forget(self);
            core.unlock_shared_marked(page);
        }
    }
}

impl Drop for SharedGuard<'_> {
    fn drop(&mut self) {
        self.core.unlock_shared_state(self.page, self.state);
    }
}

/// A page that is read without any lock (SIGMOD'23, section 3.3).
///
/// Other threads may change or evict the page meanwhile. So the reader trusts nothing that it read
/// before [`validate`](OptimisticGuard::validate) has succeeded. The guard holds nothing: it costs
/// nothing to copy or drop.
#[derive(Clone, Copy)]
#[must_use]
pub struct OptimisticGuard<'a> {
    core: &'a Core,
    state: &'a PageState,
    page: PageRef,
    seen: Word,
}

impl<'a> OptimisticGuard<'a> {
    /// For a page whose word `state` was `seen`: resident and not locked.
    #[inline(always)]
    pub(crate) fn new(
        core: &'a Core,
        state: &'a PageState,
        page: PageRef,
        seen: Word,
    ) -> OptimisticGuard<'a> {
        OptimisticGuard { core, state, page, seen }
    }

    /// The page.
    #[inline(always)]
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// The bytes, as they are now.
    #[inline(always)]
    pub fn bytes(&self) -> RacyBytes<'a> {
        let address = self.core.address_seen(self.page, self.seen);
        // SAFETY: the page was in a slot or on the surface, which are mapped as long as the pool
        // lives; released memory reads as zeros, and a slot may have another page by now.
        unsafe { RacyBytes::new(address, self.page.bytes()) }
    }

    /// Checks that the page has been resident and unchanged since the guard was taken.
    #[inline(always)]
    pub fn validate(&self) -> Result<(), Restart> {
        let now = self.state.load_after_reads();
        // The whole word is usually unchanged, and then its parts need no look.
        if now == self.seen { Ok(()) } else { validate_changed(self.core, self.seen, now) }
    }

    /// Locks the page exclusively if it is unchanged. Not if its state word is damaged: a fix says
    /// so.
    ///
    /// Waits for shared holders (write-back is one), never for another writer. Callers that take
    /// locks from the root downwards and from left to right never wait for each other.
    pub fn upgrade(self) -> Result<ExclusiveGuard<'a>, Restart> {
        let (state, mut rounds) = (self.state, 0);
        loop {
            let seen = state.load();
            if !self.seen.validates(seen) {
                return Err(restart(self.core));
            }
            match seen.state() {
                State::Shared(_) => {
                    self.core.wait_for_holders(self.page, state, seen, &mut rounds);
                }
                _ if state.try_lock(seen) => {
                    let Some(address) = self.core.address_of(self.page, state) else {
                        self.core.unlock_state(self.page, state, Leave::Unlocked, false);
                        return Err(restart(self.core));
                    };
                    let OptimisticGuard { core, state, page, .. } = self;
                    let address = Address(address);
                    return Ok(ExclusiveGuard { core, state, page, address, dirty: false });
                }
                _ => {}
            }
        }
    }

    /// Locks the page shared if it is unchanged. Never waits for a writer that holds the page, but
    /// lets a writer go first that has waited for a millisecond. Not if its state word is damaged:
    /// a fix says so.
    pub fn upgrade_shared(self) -> Result<SharedGuard<'a>, Restart> {
        let (state, mut rounds) = (self.state, 0);
        loop {
            let seen = state.load();
            if !self.seen.validates(seen) {
                return Err(restart(self.core));
            }
            if self.core.join_in_turn(self.page, state, seen, &mut rounds) {
                let Some(address) = self.core.address_of(self.page, state) else {
                    self.core.unlock_shared_state(self.page, state);
                    return Err(restart(self.core));
                };
                let OptimisticGuard { core, state, page, .. } = self;
                return Ok(SharedGuard { core, state, page, address: Address(address) });
            }
        }
    }
}

/// Validates a word that has changed. The page may be the same still: a shared lock, a mark, or a
/// dirty bit that was cleared changes the word alone.
///
/// It takes words by value, so that no guard has an address and all of it stays in registers.
#[cold]
#[inline(never)]
fn validate_changed(core: &Core, seen: Word, now: Word) -> Result<(), Restart> {
    if seen.validates(now) { Ok(()) } else { Err(restart(core)) }
}

fn restart(core: &Core) -> Restart {
    core.counters.count(Event::Restart);
    Restart
}

impl fmt::Debug for ExclusiveGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExclusiveGuard({})", self.page)
    }
}

impl fmt::Debug for SharedGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedGuard({})", self.page)
    }
}

impl fmt::Debug for OptimisticGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OptimisticGuard({}, {:?})", self.page, self.seen)
    }
}
