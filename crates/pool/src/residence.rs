//! How pages become resident and how they leave: the order of the steps on state words, memory and
//! the replacement policy.
//!
//! The thread that faults a page in claims the page (it locks all of its frames), fills it, admits
//! it and unlocks it. The thread that evicts or frees a page locks it, releases its memory, and
//! then calls it evicted or free. With states in the frames ([`States::Frames`]) the lock ends when
//! the memory goes, and the thread that brings new memory holds the new lock. So the thread that
//! releases a page updates the policy and the page's bits before the release.
//!
//! In a pool with slots (`slots.rs`) a page may lie in one, and no memory comes or goes. The thread
//! that faults the page in takes the slot together with the frames of the budget; the thread that
//! evicts or frees the page changes the word first, and gives the slot back afterwards.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::Ordering;

use vellum_vm::{Entry, Errno, PAGE_SIZE, PageRange, Surface};

use crate::core::{Core, ReservedPage};
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::frame_states::Claim;
use crate::page::state::{Leave, PageState, State, Word};
use crate::page::states::States;
use crate::slots::Slots;
use crate::sync::interleave;

/// From so many frames on, a new page's memory is populated by one call instead of by faults.
const POPULATE_FROM: u32 = 4;

/// Retries, a millisecond or so apart, for a frame that another thread has locked through a stale
/// reference. That thread unlocks the frame when its read has ended, if not before.
pub(crate) const RETRIES: u32 = 1_000;

/// The outcome of an attempt to claim a page.
#[derive(Debug)]
pub(crate) enum ClaimOutcome {
    /// The caller holds the page exclusively.
    Ours(InnerBefore),
    /// Another thread was first: retry.
    Lost,
    /// Another page is taking or releasing one of the inner frames.
    Blocked,
}

/// The states that the inner frames of a claimed page had before the claim.
#[derive(Debug, Default)]
pub(crate) struct InnerBefore(Vec<Leave>);

impl Core {
    /// Whether a claim brings the page's memory. If so, the caller takes the frames out of the
    /// budget before the claim, and otherwise after it.
    pub(crate) fn claim_brings_memory(&self) -> bool {
        matches!(self.states, States::Frames(_))
    }

    /// Locks an evicted page whose word was `seen`, and its inner frames. Never waits.
    ///
    /// # Errors
    /// If one of the frames is a page of its own, or there is no memory. Nothing changed.
    pub(crate) fn claim(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
    ) -> Result<ClaimOutcome, PoolError> {
        let blocked = match &self.states {
            States::Pages(_) => {
                if !self.try_lock_absent(page, state, seen) {
                    return Ok(ClaimOutcome::Lost);
                }
                if let Some(before) = self.lock_inner(page) {
                    return Ok(ClaimOutcome::Ours(before));
                }
                self.unlock(page, Leave::Evicted, false);
                ClaimOutcome::Blocked
            }
            States::Frames(states) => match states.claim(&self.surface, &self.parking, page) {
                Claim::Ours => return Ok(ClaimOutcome::Ours(InnerBefore::default())),
                Claim::Lost => return Ok(ClaimOutcome::Lost),
                Claim::Blocked => ClaimOutcome::Blocked,
                Claim::Failed(errno) => {
                    return Err(PoolError::Populate { page, source: errno.into() });
                }
            },
        };
        let overlaps = inner_pages(page).any(|inner| self.is_resident_head(inner));
        if overlaps { Err(PoolError::WrongSize(page)) } else { Ok(blocked) }
    }

    /// Locks a page that is being allocated. It gives the page zeroed memory, or leaves that to the
    /// first write fault. The caller has taken the frames out of the budget.
    ///
    /// A thread with a stale reference may hold one of the frames; it soon finds the reference
    /// stale and unlocks the frame.
    ///
    /// # Errors
    /// [`PoolError::InUse`] or [`PoolError::Populate`]. Nothing changed.
    pub(crate) fn claim_unallocated(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
    ) -> Result<(), PoolError> {
        for _ in 0..RETRIES {
            let claim = match &self.states {
                States::Pages(_) => self.lock_unallocated(page),
                States::Frames(states) => states.claim_free(&self.surface, &self.parking, page),
            };
            match claim {
                Claim::Ours => return self.fill_unallocated(page, reserved),
                Claim::Failed(errno) => {
                    return Err(PoolError::Populate { page, source: errno.into() });
                }
                Claim::Lost | Claim::Blocked => {}
            }
            if is_settled(self.look_at_known(page))
                || self.inner(page).any(|(_, state, seen)| is_settled((state, seen)))
            {
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

    /// Locks a page that is not resident, and whose word was `seen`. A word that was zero gets the
    /// version with which it begins.
    fn try_lock_absent(&self, page: PageRef, state: &PageState, seen: Word) -> bool {
        let locked = state.try_lock(seen);
        if let (true, true, States::Pages(states)) = (locked, seen.is_untouched(), &self.states) {
            states.begin_version(page.id, state);
        }
        locked
    }

    fn lock_unallocated(&self, page: PageRef) -> Claim {
        let (state, seen) = self.look_at_known(page);
        let leave = match seen.state() {
            State::Evicted => Leave::Evicted,
            State::Free => Leave::Free,
            _ => return Claim::Lost,
        };
        if !self.try_lock_absent(page, state, seen) {
            return Claim::Lost;
        }
        if self.lock_inner(page).is_none() {
            self.unlock(page, leave, false);
            return Claim::Blocked;
        }
        Claim::Ours
    }

    /// Gives a claimed page the slot that was reserved for it, if it lies in one. Returns the
    /// surface and the place on it for the page's bytes.
    pub(crate) fn place_claimed(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
    ) -> (&Surface, u64) {
        match (&self.slots, reserved.take_slot()) {
            (Some(slots), Some(slot)) => {
                self.held(page).set_slot(slot);
                (slots.surface(), slots.place(slot))
            }
            _ => (&self.surface, page.id.0),
        }
    }

    /// Gives a locked page that is being allocated its memory, and joins its frames.
    fn fill_unallocated(
        &self,
        page: PageRef,
        reserved: &mut ReservedPage<'_>,
    ) -> Result<(), PoolError> {
        if reserved.is_in_slot() {
            self.place_claimed(page, reserved);
            // SAFETY: the page lies in its slot, which is mapped, and is held exclusively; what
            // optimistic readers read of it is discarded.
            unsafe { self.address(page).write_bytes(0, page.bytes()) };
            self.join(page);
            return Ok(());
        }
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

    /// Populates a page with zeroed memory, or leaves that to the first write fault. The caller
    /// holds the page exclusively and has taken its frames out of the budget.
    ///
    /// # Errors
    /// What the kernel said; a part of the page may have memory.
    fn populate_zeroed(&self, page: PageRef) -> io::Result<()> {
        let by_writing = self.surface.fault_behaviour().writing_populates();
        if by_writing && page.frames < POPULATE_FROM {
            return Ok(());
        }
        let mut entry = [Entry::new(page.range())];
        self.surface.populate(&mut entry);
        if by_writing {
            // A failure to populate ahead is harmless: the first write populates.
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

    /// Locks the inner frames of a page; the caller holds the head. None if one of the inner frames
    /// is resident or in transit; then nothing changed.
    fn lock_inner(&self, page: PageRef) -> Option<InnerBefore> {
        let mut before = Vec::with_capacity(page.frames as usize - 1);
        for (inner, state, seen) in self.inner(page) {
            let leave = match seen.state() {
                State::Evicted => Some(Leave::Evicted),
                State::Free => Some(Leave::Free),
                _ => None,
            };
            match leave.filter(|_| self.try_lock_absent(inner, state, seen)) {
                Some(leave) => before.push(leave),
                None => {
                    self.unlock_inner(page, before);
                    return None;
                }
            }
        }
        Some(InnerBefore(before))
    }

    /// Unlocks inner frames, from the first on, one for each of `leaves`.
    fn unlock_inner(&self, page: PageRef, leaves: impl IntoIterator<Item = Leave>) {
        for (inner, leave) in inner_pages(page).zip(leaves) {
            self.unlock(inner, leave, false);
        }
    }

    /// Makes the locked inner frames part of the page, whose contents are complete.
    fn join(&self, page: PageRef) {
        for inner in inner_pages(page) {
            if self.held(inner).take_over(true) {
                self.parking.wake(inner.id);
            }
        }
    }

    /// The inner frames of a page, with their state words.
    pub(crate) fn inner(&self, page: PageRef) -> impl Iterator<Item = (PageRef, &PageState, Word)> {
        inner_pages(page).filter_map(|inner| {
            let (state, seen) = self.states.look(inner.id)?;
            Some((inner, state, seen))
        })
    }

    /// An inner frame that is in transit: another page, or this one, is taking or releasing it.
    pub(crate) fn inner_in_transit(&self, page: PageRef) -> Option<(PageRef, &PageState, Word)> {
        self.inner(page).find(|(_, _, seen)| seen.state() == State::Locked)
    }

    /// Checks and admits a claimed page whose read has ended. After an error the caller must
    /// [`unclaim`](Core::unclaim) the page.
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

    /// Tells the policy that a page is resident: it has its memory, or gets it by write faults. The
    /// caller holds the page exclusively and has taken its frames out of the budget.
    pub(crate) fn admit(&self, page: PageRef) {
        self.policy.admit(page);
        if let (Some(huge), 0) = (&self.huge, self.held_slot(page)) {
            huge.admit(page.range());
        }
    }

    /// Undoes the claim of a page that was not admitted: the page is evicted, without memory and
    /// unlocked. The reference to it may be wrong, so the inner frames get back their states. If
    /// the kernel refuses to release the memory, the next claim of the page finds it there.
    pub(crate) fn unclaim(&self, page: PageRef, before: InnerBefore) {
        if let States::Frames(states) = &self.states {
            states.unclaim(&self.surface, &self.parking, page);
            return;
        }
        let slot = self.held_slot(page);
        if slot == 0 {
            self.release_small(&mut [Entry::new(page.range())]);
        }
        self.unlock_inner(page, before.0);
        self.unlock(page, Leave::Evicted, false);
        if let (Some(slots), 1..) = (&self.slots, slot) {
            slots.give_back(slot);
        }
    }

    /// Gives the frames of a page back that has left: its slot, or those of the surface. The caller
    /// puts them back into the budget afterwards.
    fn give_back_frames(&self, page: PageRef, slot: u64) {
        match &self.slots {
            None => {}
            Some(slots) if slot == 0 => slots.end_loan(u64::from(page.frames)),
            Some(slots) => slots.give_back(slot),
        }
    }

    /// Releases the memory of admitted pages, with one call for all, and evicts the pages; one
    /// result for each. The caller holds the pages exclusively, and no reference to their bytes is
    /// left.
    ///
    /// EBUSY is an ordinary answer: the page lies in a huge page that is pinned for I/O or that the
    /// collapser is building, or, on exmap, the page's own I/O still pins it. A page whose release
    /// fails stays resident, unlocked.
    pub(crate) fn evict(&self, pages: &[PageRef]) -> Vec<Result<(), Errno>> {
        pages.iter().for_each(|page| self.begin_release(*page, Leave::Evicted));
        let slots: Vec<u64> = pages.iter().map(|page| self.held_slot(*page)).collect();
        let on_surface = pages.iter().zip(&slots).filter(|(_, slot)| **slot == 0);
        let mut entries: Vec<Entry> = on_surface.map(|(page, _)| self.entry(*page)).collect();
        match &self.huge {
            Some(huge) => {
                huge.release(&self.surface, &mut entries, |entries| self.release_small(entries));
            }
            None => self.release_small(&mut entries),
        }
        let mut released = entries.into_iter().map(|entry| entry.result);
        let results = pages.iter().zip(&slots).map(|(page, slot)| {
            let result = match slot {
                0 => released.next().expect("each page on the surface has an entry"),
                _ => Ok(()),
            };
            self.end_release(*page, Leave::Evicted, result)
                .inspect(|()| self.give_back_frames(*page, *slot))
        });
        results.collect()
    }

    /// As [`evict`](Core::evict), for one page that is freed. Where `evict` would say EBUSY, this
    /// waits a little, because no later eviction retries. If the release fails all the same, the
    /// page stays resident, unlocked.
    pub(crate) fn release_freed(&self, page: PageRef) -> io::Result<()> {
        let slot = self.held_slot(page);
        self.begin_release(page, Leave::Free);
        let mut entry = self.entry(page);
        match &self.huge {
            _ if slot > 0 => {}
            Some(huge) => {
                let release = |entries: &mut [Entry]| self.release_small(entries);
                huge.release_freed(&self.surface, &mut entry, release);
            }
            None => self.release_small(std::slice::from_mut(&mut entry)),
        }
        self.end_release(page, Leave::Free, entry.result)?;
        self.give_back_frames(page, slot);
        Ok(())
    }

    /// Frees an evicted page whose word was `seen`. None if the word has changed; false if a thread
    /// is reading the page in.
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
        if !self.try_lock_absent(page, state, seen) {
            return Ok(None);
        }
        self.unlock(page, Leave::Free, false);
        Ok(Some(true))
    }

    /// Moves a page from its slot to one of a chunk that stays when the pool shrinks. False if it
    /// is in none, if a thread holds it, or if no slot is free.
    ///
    /// The thread holds the page exclusively while it copies the bytes. An optimistic reader with
    /// an older word reads the old slot, and finds that the version has changed.
    pub(crate) fn move_page(&self, slots: &Slots, page: PageRef) -> bool {
        let (state, seen) = self.look_at_known(page);
        if !matches!(seen.state(), State::Unlocked | State::Marked) {
            return false;
        }
        let Some(to) = slots.take_elsewhere() else { return false };
        if !state.try_lock(seen) {
            slots.give_back(to);
            return false;
        }
        let from = self.held_slot(page);
        // Another page may be in its place since. If that is in a slot, too, it has this length.
        if from == 0 {
            self.unlock(page, Leave::Unlocked, false);
            slots.give_back(to);
            return false;
        }
        state.move_slot(from, to);
        interleave();
        let bytes = slots.frames() as usize * PAGE_SIZE;
        // SAFETY: both slots are mapped. No thread writes to the page, which is held exclusively,
        // and the other slot is this thread's; what optimistic readers read of it is discarded.
        unsafe { slots.address(from).copy_to_nonoverlapping(slots.address(to), bytes) };
        interleave();
        self.unlock(page, Leave::Unlocked, false);
        slots.give_back(from);
        true
    }

    fn begin_release(&self, page: PageRef, leave: Leave) {
        if let States::Frames(states) = &self.states {
            self.policy.forget(page);
            states.begin_release(page, leave);
        }
    }

    /// The part of a page that one call releases. If the call fails, the whole page is still
    /// resident. The entry of a page too long for that is empty: the kernel releases such a page in
    /// pieces.
    fn entry(&self, page: PageRef) -> Entry {
        match &self.states {
            States::Frames(_) if self.is_long(page) => Entry::new(PageRange::new(page.id.0, 0)),
            _ => Entry::new(page.range()),
        }
    }

    fn is_long(&self, page: PageRef) -> bool {
        u64::from(page.frames) > self.surface.released_whole()
    }

    /// Ends the exclusive hold of a page after its release, which may have failed.
    ///
    /// After a release the inner frames are free, even if the page itself is only evicted: none of
    /// them is a page, and a reader with a stale reference to one must not fault it in.
    fn end_release(
        &self,
        page: PageRef,
        leave: Leave,
        released: Result<(), Errno>,
    ) -> Result<(), Errno> {
        // A page that may have holes is no longer resident. The next claim finds what is left.
        if released.is_err() && !self.is_long(page) {
            if let States::Frames(states) = &self.states {
                self.policy.admit(page);
                states.cancel_release(&self.parking, page, leave);
            }
            self.unlock(page, Leave::Unlocked, false);
            return released;
        }
        // Only a freed page may still be dirty, and no thread can fault that one in. An evicted
        // page may be resident again, and dirty, as soon as its memory was released.
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
                inner_pages(page).for_each(|inner| self.free_inner(inner));
                self.unlock(page, leave, false);
            }
        }
        Ok(())
    }

    /// Releases pages that the caller holds. Each lies outside of huge pages, or the entries cover
    /// the whole huge page.
    fn release_small(&self, entries: &mut [Entry]) {
        if entries.is_empty() {
            return;
        }
        self.release_batches.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller holds the pages exclusively, so only optimistic readers look at them,
        // and those discard what they read.
        unsafe { self.surface.release(entries) };
        if let States::Frames(states) = &self.states {
            states.released(entries);
        }
    }
}

/// The word is that of a page's head, and the page is resident.
fn is_settled((_, word): (&PageState, Word)) -> bool {
    matches!(word.state(), State::Unlocked | State::Marked | State::Shared(_))
}

/// The inner frames of a page, each as if it were a page.
fn inner_pages(page: PageRef) -> impl Iterator<Item = PageRef> {
    (page.id.0 + 1..page.id.0 + u64::from(page.frames)).map(|id| PageRef::new(id, 1))
}

#[cfg(all(test, not(feature = "model")))]
mod tests;
