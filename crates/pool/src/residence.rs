//! How pages become resident and cease to be: what is done with state words, memory and policy, in
//! which order.
//!
//! A page that comes is claimed (locked, all of its frames part of it), filled, admitted, unlocked.
//! One that goes is dismissed: its memory is taken away while it is locked, and then it is evicted
//! or free. Where states are with the frames ([`States::Frames`]), a page is no longer anybody's
//! from the moment at which its memory goes, and the thread that brings its memory has it locked;
//! all that is to be said of the page in between is said before.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::Ordering;

use vellum_vm::{Entry, Errno, PageRange};

use crate::core::Core;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::frame_states::Claim;
use crate::page::state::{Leave, PageState, State, Word};
use crate::page::states::States;

/// From so many frames on, a new page's memory is populated by one call instead of by faults.
const POPULATE_FROM: u32 = 4;

/// How often to look again, after a millisecond or so, at a frame to which an old reference has led
/// another thread. That one leaves it when its read has ended, if not before.
pub(crate) const LOOKS: u32 = 1_000;

/// How claiming a page went.
#[derive(Debug)]
pub(crate) enum Coming {
    /// The caller holds it exclusively.
    Ours(Enclosed),
    /// Another thread was first: look again.
    Lost,
    /// One of its inner frames is on its way to or from another page.
    Blocked,
}

/// What the frames behind the head of a claimed page were before.
#[derive(Debug, Default)]
pub(crate) struct Enclosed(Vec<Leave>);

impl Core {
    /// Whether the frames of a page are to be taken out of the budget before it is claimed, and not
    /// afterwards: claiming it brings its memory.
    pub(crate) fn claim_brings_memory(&self) -> bool {
        matches!(self.states, States::Frames(_))
    }

    /// Locks an evicted page, whose word was `seen`, and the frames behind its head. Never waits.
    ///
    /// # Errors
    /// If one of the frames is a page of its own, or there is no memory. Nothing has changed then.
    pub(crate) fn claim(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Coming, PoolError> {
        let blocked = match &self.states {
            States::Pages(_) => {
                if !state.try_lock(seen) {
                    return Ok(Coming::Lost);
                }
                if let Some(enclosed) = self.lock_inner(page) {
                    return Ok(Coming::Ours(enclosed));
                }
                self.unlock(page, Leave::Evicted, false);
                Coming::Blocked
            }
            States::Frames(states) => match states.claim(&self.surface, &self.parking, page) {
                Claim::Ours => return Ok(Coming::Ours(Enclosed::default())),
                Claim::Lost => return Ok(Coming::Lost),
                Claim::Blocked => Coming::Blocked,
                Claim::Failed(errno) => {
                    return Err(PoolError::Populate { page, source: errno.into() });
                }
            },
        };
        let overlaps = inner_pages(page).any(|inner| self.is_resident_head(inner));
        if overlaps { Err(PoolError::WrongSize(page)) } else { Ok(blocked) }
    }

    /// Locks a page that was not allocated until now, and gives it zeroed memory or leaves that to
    /// its first writer. The caller has taken its frames out of the budget.
    ///
    /// A thread with an old reference may be there, which finds out soon that it leads nowhere.
    ///
    /// # Errors
    /// [`PoolError::InUse`] or [`PoolError::Populate`]. Nothing has changed then.
    pub(crate) fn claim_unallocated(&self, page: PageRef) -> Result<(), PoolError> {
        for _ in 0..LOOKS {
            let claim = match &self.states {
                States::Pages(_) => self.lock_unallocated(page),
                States::Frames(states) => states.claim_free(&self.surface, &self.parking, page),
            };
            match claim {
                Claim::Ours => return self.fill_unallocated(page),
                Claim::Failed(errno) => {
                    return Err(PoolError::Populate { page, source: errno.into() });
                }
                Claim::Lost | Claim::Blocked => {}
            }
            if is_settled(self.look_at_known(page)) || self.inner(page).any(is_settled) {
                break;
            }
            self.budget.wait_briefly();
        }
        Err(PoolError::InUse(page))
    }

    /// Whether a resident page begins at a frame. A thread may hold that page, for as long as it
    /// likes: another page cannot wait for the frame.
    fn is_resident_head(&self, frame: PageRef) -> bool {
        let sight = self.look_at_known(frame);
        let is_held = sight.1.state() == State::Locked;
        is_settled(sight) || is_held && self.policy.contains(self.whole(frame.id))
    }

    fn lock_unallocated(&self, page: PageRef) -> Claim {
        let (state, seen) = self.look_at_known(page);
        let leave = match seen.state() {
            State::Evicted => Leave::Evicted,
            State::Free => Leave::Free,
            _ => return Claim::Lost,
        };
        if !state.try_lock(seen) {
            return Claim::Lost;
        }
        if self.lock_inner(page).is_none() {
            self.unlock(page, leave, false);
            return Claim::Blocked;
        }
        Claim::Ours
    }

    /// Gives a page its memory that was locked to be allocated, and joins its frames.
    fn fill_unallocated(&self, page: PageRef) -> Result<(), PoolError> {
        match self.states {
            // SAFETY: the page lies on the surface, its memory is resident and it is held
            // exclusively; what optimistic readers read of it is discarded.
            States::Frames(_) => unsafe { self.address(page).write_bytes(0, page.bytes()) },
            States::Pages(_) => self.populate_zeroed(page).map_err(|source| {
                self.release_small(&mut [Entry::new(page.range())]);
                self.unlock_inner(page, std::iter::repeat(Leave::Free));
                self.unlock(page, Leave::Free, false);
                PoolError::Populate { page, source }
            })?,
        }
        self.join(page);
        Ok(())
    }

    /// Puts zeroed memory behind a page that has none, or leaves that to its first writer.
    /// The caller holds it exclusively and has taken its frames out of the budget.
    ///
    /// # Errors
    /// What the kernel said; a part of the page may have memory then.
    fn populate_zeroed(&self, page: PageRef) -> io::Result<()> {
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

    /// Locks the frames behind the head, whose lock the caller has. None, and nothing has changed,
    /// if one of them is resident or on its way.
    fn lock_inner(&self, page: PageRef) -> Option<Enclosed> {
        let mut enclosed = Vec::with_capacity(page.frames as usize - 1);
        for (inner, seen) in self.inner(page) {
            let leave = match seen.state() {
                State::Evicted => Some(Leave::Evicted),
                State::Free => Some(Leave::Free),
                _ => None,
            };
            match leave.filter(|_| inner.try_lock(seen)) {
                Some(leave) => enclosed.push(leave),
                None => {
                    self.unlock_inner(page, enclosed);
                    return None;
                }
            }
        }
        Some(Enclosed(enclosed))
    }

    /// Ends the lock of frames behind the head, from the first on.
    fn unlock_inner(&self, page: PageRef, leaves: impl IntoIterator<Item = Leave>) {
        for (inner, leave) in inner_pages(page).zip(leaves) {
            self.unlock(inner, leave, false);
        }
    }

    /// Makes the locked frames behind the head part of the page, which is there now.
    fn join(&self, page: PageRef) {
        for inner in inner_pages(page) {
            if self.held(inner).take_over(true) {
                self.parking.wake(inner.id);
            }
        }
    }

    /// What the words of a page's frames behind its head say.
    pub(crate) fn inner(&self, page: PageRef) -> impl Iterator<Item = (&PageState, Word)> {
        inner_pages(page).filter_map(|inner| self.states.look(inner.id))
    }

    /// A frame behind the head that is on its way to or from another page, or back to this one.
    pub(crate) fn inner_in_transit(&self, page: PageRef) -> Option<(PageRef, &PageState, Word)> {
        inner_pages(page).find_map(|inner| {
            let (state, seen) = self.states.look(inner.id)?;
            (seen.state() == State::Locked).then_some((inner, state, seen))
        })
    }

    /// A read into a claimed page has ended: checks the page and admits it. After an error it is
    /// the caller's to [`unclaim`](Core::unclaim).
    pub(crate) fn finish_read(
        &self,
        page: PageRef,
        result: io::Result<()>,
    ) -> Result<(), PoolError> {
        result.map_err(|source| PoolError::Read { page, source })?;
        // SAFETY: the page was just read and is held exclusively.
        let bytes = unsafe { self.bytes(page) };
        self.format.verify(page, bytes)?;
        self.join(page);
        self.admit(page);
        Ok(())
    }

    /// A page became resident: its memory is there, or comes as it is written. The caller holds it
    /// exclusively and has taken its frames out of the budget.
    pub(crate) fn admit(&self, page: PageRef) {
        self.policy.admit(page);
        if let Some(huge) = &self.huge {
            huge.come(page.range());
        }
    }

    /// Gives a claimed page up that was not admitted: it is evicted, without memory and unlocked.
    /// The reference to it may be wrong, so the frames behind the head are again what they were.
    /// Where the kernel does not take the memory, it is found there when the page comes next.
    pub(crate) fn unclaim(&self, page: PageRef, enclosed: Enclosed) {
        if let States::Frames(states) = &self.states {
            states.unclaim(&self.surface, &self.parking, page);
            return;
        }
        self.release_small(&mut [Entry::new(page.range())]);
        self.unlock_inner(page, enclosed.0);
        self.unlock(page, Leave::Evicted, false);
    }

    /// Takes the memory of admitted pages away, with one call for all of them, and evicts them; a
    /// result for each. The caller holds them exclusively, and no reference to their bytes is left.
    ///
    /// EBUSY is an ordinary answer: the page lies in a huge page on which others have I/O under
    /// way, or which is just put together; or, on exmap, its own I/O has not let go of it yet.
    /// Like any page that fails to be released, it stays, unlocked.
    pub(crate) fn evict(&self, pages: &[PageRef]) -> Vec<Result<(), Errno>> {
        pages.iter().for_each(|page| self.begin_release(*page, Leave::Evicted));
        let mut entries: Vec<Entry> = pages.iter().map(|page| self.entry(*page)).collect();
        match &self.huge {
            Some(huge) => {
                huge.release(&self.surface, &mut entries, |entries| self.release_small(entries));
            }
            None => self.release_small(&mut entries),
        }
        let gone = |(page, entry): (&PageRef, Entry)| {
            self.end_release(*page, Leave::Evicted, entry.result)
        };
        pages.iter().zip(entries).map(gone).collect()
    }

    /// As [`evict`](Core::evict), for one page that is freed, and cannot stay for another try:
    /// waits a little where that would say EBUSY. If it stays all the same, it is unlocked.
    pub(crate) fn release_freed(&self, page: PageRef) -> io::Result<()> {
        self.begin_release(page, Leave::Free);
        let mut entry = self.entry(page);
        match &self.huge {
            Some(huge) => {
                let release = |entries: &mut [Entry]| self.release_small(entries);
                huge.release_freed(&self.surface, &mut entry, release);
            }
            None => self.release_small(std::slice::from_mut(&mut entry)),
        }
        Ok(self.end_release(page, Leave::Free, entry.result)?)
    }

    /// Frees an evicted page, whose word was `seen`. None if that has changed; false if a thread
    /// reads the page in just now.
    ///
    /// # Errors
    /// If it is free already.
    pub(crate) fn free_evicted(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<Option<bool>, PoolError> {
        if let States::Frames(states) = &self.states {
            return states.free_absent(&self.surface, &self.parking, page.id).map(Some);
        }
        if !state.try_lock(seen) {
            return Ok(None);
        }
        self.unlock(page, Leave::Free, false);
        Ok(Some(true))
    }

    fn begin_release(&self, page: PageRef, leave: Leave) {
        if let States::Frames(states) = &self.states {
            self.policy.forget(page);
            states.begin_release(page, leave);
        }
    }

    /// What is to be released of a page with one call. If that fails, all of it is still there;
    /// what is too long for that is taken away in pieces when the page goes, or has holes then.
    fn entry(&self, page: PageRef) -> Entry {
        match &self.states {
            States::Frames(_) if self.is_long(page) => Entry::new(PageRange::new(page.id.0, 0)),
            _ => Entry::new(page.range()),
        }
    }

    fn is_long(&self, page: PageRef) -> bool {
        u64::from(page.frames) > self.surface.released_whole()
    }

    /// Ends the exclusive hold of a page whose memory is gone, or is not.
    ///
    /// The frames behind the head are free then, evicted page or not: none of them is a page, and
    /// a stale reader that knew one when it was must not bring it in.
    fn end_release(
        &self,
        page: PageRef,
        leave: Leave,
        released: Result<(), Errno>,
    ) -> Result<(), Errno> {
        // What may have holes is no page any more. What is left of it is found when it comes back.
        if released.is_err() && !self.is_long(page) {
            if let States::Frames(states) = &self.states {
                self.policy.admit(page);
                states.cancel_release(&self.parking, page, leave);
            }
            self.unlock(page, Leave::Unlocked, false);
            return released;
        }
        // Only a page that is freed may still be dirty, and no thread can bring that one back. One
        // that is evicted may be here again, and dirty, as soon as its memory was released.
        if leave == Leave::Free {
            self.dirty.remove(page.id);
        }
        match &self.states {
            States::Frames(states) if self.is_long(page) => {
                states.unclaim(&self.surface, &self.parking, page);
            }
            States::Frames(states) => states.end_release(&self.parking, page),
            States::Pages(_) => {
                self.policy.forget(page);
                inner_pages(page).for_each(|inner| self.held(inner).free_inner());
                self.unlock(page, leave, false);
            }
        }
        Ok(())
    }

    /// Releases pages that the caller holds, and that lie in no huge page, or with all of one.
    fn release_small(&self, entries: &mut [Entry]) {
        if entries.is_empty() {
            return;
        }
        self.release_batches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller holds the pages exclusively, so only optimistic readers look at
        // them, and what those read is discarded.
        unsafe { self.surface.release(entries) };
        if let States::Frames(states) = &self.states {
            states.released(entries);
        }
    }
}

/// A page of its own, which is resident and stays so for now.
fn is_settled((_, word): (&PageState, Word)) -> bool {
    matches!(word.state(), State::Unlocked | State::Marked | State::Shared(_))
}

/// The frames behind a page's head, as if they were pages.
fn inner_pages(page: PageRef) -> impl Iterator<Item = PageRef> {
    (page.id.0 + 1..page.id.0 + u64::from(page.frames)).map(|id| PageRef::new(id, 1))
}

#[cfg(all(test, not(feature = "model")))]
mod tests;
