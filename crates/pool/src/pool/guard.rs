//! Access to pages: exclusive, shared and optimistic, as guards that release themselves.

#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};

use crate::core::Core;
use crate::error::Restart;
use crate::page::PageRef;
use crate::page::bytes::RacyBytes;
use crate::page::state::{Leave, PageState, State, Word};
use crate::statistics::counters::Event;

/// An exclusive lock on a page: no other thread can change the page, lock it, or evict it.
///
/// Writing through it (`DerefMut`) marks the page dirty. Dropping it unlocks the page.
#[must_use]
pub struct ExclusiveGuard<'a> {
    core: &'a Core,
    state: &'a PageState,
    page: PageRef,
    dirty: bool,
}

impl<'a> ExclusiveGuard<'a> {
    /// For a resident page that the caller has locked exclusively.
    #[inline]
    pub(crate) fn new(
        core: &'a Core,
        state: &'a PageState,
        page: PageRef,
        dirty: bool,
    ) -> ExclusiveGuard<'a> {
        ExclusiveGuard { core, state, page, dirty }
    }

    /// The page.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// Turns the exclusive lock into a shared one. No other thread can change the page in between.
    pub fn downgrade(self) -> SharedGuard<'a> {
        let (core, state, page, dirty) = (self.core, self.state, self.page, self.dirty);
        std::mem::forget(self);
        core.unlock_state(page, state, Leave::Shared, dirty);
        SharedGuard { core, state, page }
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
        unsafe { self.core.bytes(self.page) }
    }
}

impl DerefMut for ExclusiveGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.dirty = true;
        // SAFETY: the page is resident and held exclusively, so there is no other reference to it;
        // optimistic readers read it through `RacyBytes` alone.
        unsafe { std::slice::from_raw_parts_mut(self.core.address(self.page), self.page.bytes()) }
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
}

impl<'a> SharedGuard<'a> {
    /// For a resident page that the caller has locked shared.
    #[inline]
    pub(crate) fn new(core: &'a Core, state: &'a PageState, page: PageRef) -> SharedGuard<'a> {
        SharedGuard { core, state, page }
    }

    /// The page.
    pub fn page(&self) -> PageRef {
        self.page
    }

    /// The bytes in the form that code for optimistic readers takes.
    pub fn bytes(&self) -> RacyBytes<'_> {
        // SAFETY: the page lies on the surface, which is mapped as long as the pool lives.
        unsafe { RacyBytes::new(self.core.address(self.page), self.page.bytes()) }
    }

    /// Turns the shared lock into an exclusive one if no other thread holds the page. Otherwise
    /// returns the guard: drop it before you lock the page another way, or two upgrades wait for
    /// each other.
    pub fn try_upgrade(self) -> Result<ExclusiveGuard<'a>, SharedGuard<'a>> {
        if !self.state.try_upgrade() {
            return Err(self);
        }
        let (core, state, page) = (self.core, self.state, self.page);
        std::mem::forget(self);
        Ok(ExclusiveGuard { core, state, page, dirty: false })
    }
}

impl Deref for SharedGuard<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the page is resident and held shared as long as the guard lives.
        unsafe { self.core.bytes(self.page) }
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
        // SAFETY: the page lies on the surface, which is mapped as long as the pool lives; released
        // memory reads as zeros.
        unsafe { RacyBytes::new(self.core.address(self.page), self.page.bytes()) }
    }

    /// Checks that the page has been resident and unchanged since the guard was taken.
    #[inline(always)]
    pub fn validate(&self) -> Result<(), Restart> {
        let now = self.state.load_after_reads();
        // The whole word is usually unchanged, and then its parts need no look.
        if now == self.seen { Ok(()) } else { validate_changed(self.core, self.seen, now) }
    }

    /// Locks the page exclusively if it is unchanged.
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
                    return Ok(ExclusiveGuard::new(self.core, state, self.page, false));
                }
                _ => {}
            }
        }
    }

    /// Locks the page shared if it is unchanged. Never waits for a writer that holds the page, but
    /// lets a writer go first that has waited for a millisecond.
    pub fn upgrade_shared(self) -> Result<SharedGuard<'a>, Restart> {
        let (state, mut rounds) = (self.state, 0);
        loop {
            let seen = state.load();
            if !self.seen.validates(seen) {
                return Err(restart(self.core));
            }
            if self.core.join_in_turn(self.page, state, seen, &mut rounds) {
                return Ok(SharedGuard::new(self.core, state, self.page));
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
