//! The memory side of a pool: the surface, the page states, the frame budget, and the steps on them
//! that every operation needs.
//!
//! Nothing here knows the device. So a device's own thread may hold this part of the pool while it
//! completes a read, and the device never waits for its own end.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use vellum_vm::{PAGE_SIZE, Surface};

use crate::error::PoolError;
use crate::eviction::frame_budget::FrameBudget;
use crate::huge::{HugeChunks, HugePages};
use crate::page::dirty_pages::DirtyPages;
use crate::page::format::PageFormat;
use crate::page::parking::ParkingLot;
use crate::page::state::{Leave, PageState, SlotMask, State, Word};
use crate::page::states::StateArray;
use crate::page::states::States;
use crate::page::{PageId, PageRef};
use crate::replacement::ReplacementPolicy;
use crate::slots::Slots;
use crate::statistics::counters::{Counters, Event};
use crate::statistics::histogram::Histogram;
use crate::sync::spin_until;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) surface: Surface,
    /// None in a pool without: then all pages lie at their own places on the surface.
    pub(crate) slots: Option<Slots>,
    /// The part of the state words that names slots.
    pub(crate) slot_mask: SlotMask,
    pub(crate) states: States,
    pub(crate) dirty: DirtyPages,
    pub(crate) parking: ParkingLot,
    pub(crate) budget: FrameBudget,
    pub(crate) policy: Box<dyn ReplacementPolicy>,
    /// What [`ReplacementPolicy::looks_into_slots`] says.
    pub(crate) policy_looks_into_slots: bool,
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

/// The frames of a page, taken out of the budget, and its slot if it is to lie in one. Put back
/// when dropped unless [`kept`](ReservedPage::keep).
#[derive(Debug)]
#[must_use]
pub(crate) struct ReservedPage<'a> {
    core: &'a Core,
    frames: u32,
    memory: ReservedMemory,
}

/// The memory of a reserved page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReservedMemory {
    OnSurface,
    Slot(u64),
    /// The page's word has the slot.
    SlotOfPage,
}

/// Why there are no frames for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreserved {
    /// Other pages have to leave first: there are no frames, or no slot.
    NoFrames,
    /// The surface gets no memory from free slots at this moment. Evicting more does not help.
    NoMemory,
}

impl ReservedPage<'_> {
    /// Whether the page lies in a slot.
    pub(crate) fn is_in_slot(&self) -> bool {
        self.memory != ReservedMemory::OnSurface
    }

    /// The slot that the page is to lie in, if it is to lie in one. From now on the page's word has
    /// it.
    pub(crate) fn take_slot(&mut self) -> Option<u64> {
        let ReservedMemory::Slot(slot) = self.memory else { return None };
        self.memory = ReservedMemory::SlotOfPage;
        Some(slot)
    }

    /// The page is resident now: its frames are put back when it is evicted or freed.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for ReservedPage<'_> {
    fn drop(&mut self) {
        if let (Some(slots), ReservedMemory::Slot(slot)) = (&self.core.slots, self.memory) {
            slots.give_back(slot);
        }
        self.core.put_reserved_back(self.frames, self.is_in_slot());
    }
}

/// Rounds, of about a millisecond each, in which readers let an urgent writer go first.
const URGENT_ROUNDS: u32 = if cfg!(feature = "model") { 3 } else { 100 };

/// The event for which a thread waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// The end of the exclusive lock.
    NotLocked,
    /// A place among the shared holders.
    SharedPlace,
    /// The end of all locks.
    Alone,
}

impl Wanted {
    /// Whether `word` makes the waiter wait.
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
        states: States,
        dirty: DirtyPages,
        capacity: u64,
        policy: Box<dyn ReplacementPolicy>,
        format: Arc<dyn PageFormat>,
    ) -> Core {
        Core {
            surface,
            slots: None,
            slot_mask: SlotMask::NONE,
            states,
            dirty,
            parking: ParkingLot::new(),
            budget: FrameBudget::new(capacity),
            policy_looks_into_slots: policy.looks_into_slots(),
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

    /// Has pages of the slots' length lie in slots, always or when the file has outgrown the pool.
    pub(crate) fn with_slots(mut self, slots: Option<Slots>) -> Core {
        self.slot_mask = slots.as_ref().map_or(SlotMask::NONE, Slots::mask);
        self.slots = slots;
        self
    }

    /// Turns on huge pages, for pages that stay resident and for the states, where the caller wants
    /// them and the kernel has them. `most` is how many frames the pool may have, and `threads` how
    /// many background threads.
    pub(crate) fn with_huge_pages(mut self, wanted: HugePages, most: u64, threads: u64) -> Core {
        let frames = self.budget.capacity();
        let large = !cfg!(feature = "model") && most >= HugeChunks::MIN_FRAMES;
        if wanted == HugePages::Auto && large && vellum_vm::probe::huge_pages().is_ok() {
            if let Some(states) = self.states.in_array() {
                states.use_huge_pages(frames * PAGE_SIZE as u64 / StateArray::HUGE_SHARE);
            }
            let collapses = self.slots.as_ref().is_none_or(Slots::are_optional);
            let collapses = collapses && threads > 0 && self.surface.can_collapse();
            self.huge = collapses.then(HugeChunks::new);
        }
        self
    }

    /// Tells the collapser thread to end, if there is one; the thread returns soon after.
    pub(crate) fn end_huge_pages(&self) {
        if let Some(huge) = &self.huge {
            huge.candidates.end();
        }
    }

    /// The state word of a page that lies in the file and fits the pool, and its value; see
    /// [`States::look`].
    #[inline(always)]
    pub(crate) fn look(&self, page: PageRef) -> Result<(&PageState, Word), PoolError> {
        match self.states.look(page.id) {
            Some(sight) if page.frames == 1 => Ok(sight),
            sight => self.look_at_large(page, sight),
        }
    }

    #[cold]
    fn look_at_large<'a>(
        &self,
        page: PageRef,
        sight: Option<(&'a PageState, Word)>,
    ) -> Result<(&'a PageState, Word), PoolError> {
        let pages = self.states.pages();
        let end = page.id.0.checked_add(u64::from(page.frames));
        let sight = sight
            .filter(|_| page.frames > 0 && end.is_some_and(|end| end <= pages))
            .ok_or(PoolError::OutOfRange { page, pages })?;
        let capacity = self.budget.size();
        if u64::from(page.frames) > capacity || page.frames > PageRef::MAX_FRAMES {
            return Err(PoolError::PageTooLarge { page, capacity });
        }
        Ok(sight)
    }

    /// As [`look`](Core::look), for a page that is known to lie in the file.
    #[inline]
    pub(crate) fn look_at_known(&self, page: PageRef) -> (&PageState, Word) {
        self.states.look(page.id).expect("a page that is known lies in the file")
    }

    /// Whether all frames of the reference belong to this page, so that its length is right. Always
    /// true of one frame. The caller holds the head, or validates it afterwards.
    #[inline]
    pub(crate) fn is_whole(&self, page: PageRef) -> bool {
        page.frames == 1 || self.inner(page).all(|(_, _, word)| word.state() == State::Inner)
    }

    /// The whole page whose head the caller holds.
    pub(crate) fn whole(&self, head: PageId) -> PageRef {
        let is_inner = |id| {
            let sight = self.states.look(PageId(id));
            sight.is_some_and(|(_, word)| word.state() == State::Inner)
        };
        let inner = (head.0 + 1..).take_while(|id| is_inner(*id)).count();
        PageRef { id: head, frames: inner as u32 + 1 }
    }

    /// So many pages were evicted: the memory of state words may go.
    pub(crate) fn note_evicted(&self, pages: u64) {
        if let Some(states) = self.states.in_array() {
            states.note_evicted(pages, self.slot_mask, &self.parking);
        }
    }

    /// Gives the memory of the words of a group of pages back. False if they are in use.
    #[cfg(feature = "model")]
    pub(crate) fn give_words_back(&self, group: u64) -> bool {
        let Some(states) = self.states.in_array() else { return false };
        states.give_back(group, self.slot_mask, &self.parking)
    }

    /// The state word of a page that the caller holds.
    #[inline]
    pub(crate) fn held(&self, page: PageRef) -> &PageState {
        self.states.held(page.id)
    }

    /// Notes the length of the file, which decides whether pages that become resident lie in slots.
    pub(crate) fn note_file_pages(&self, pages: u64) {
        if let Some(slots) = &self.slots {
            slots.note_file_pages(pages);
        }
    }

    /// Takes the frames of a page out of the budget, if there are as many, and a slot if new pages
    /// of this length lie in slots now. For `may_break` see [`Slots::take`].
    pub(crate) fn try_reserve(
        &self,
        page: PageRef,
        may_break: bool,
    ) -> Result<ReservedPage<'_>, Unreserved> {
        let Some(slots) = self.slots.as_ref().filter(|slots| slots.suit(page)) else {
            return self.try_reserve_on_surface(page.frames);
        };
        let reserved = self.budget.try_reserve(page.frames).ok_or(Unreserved::NoFrames)?;
        let Some(slot) = slots.take(may_break) else {
            reserved.cancel();
            return Err(Unreserved::NoFrames);
        };
        reserved.keep();
        Ok(ReservedPage { core: self, frames: page.frames, memory: ReservedMemory::Slot(slot) })
    }

    /// Takes frames for the surface out of the budget, if there are as many.
    pub(crate) fn try_reserve_on_surface(
        &self,
        frames: u32,
    ) -> Result<ReservedPage<'_>, Unreserved> {
        let reserved = self.budget.try_reserve(frames).ok_or(Unreserved::NoFrames)?;
        if self.slots.as_ref().is_some_and(|slots| !slots.lend(frames)) {
            reserved.cancel();
            return Err(Unreserved::NoMemory);
        }
        reserved.keep();
        Ok(ReservedPage { core: self, frames, memory: ReservedMemory::OnSurface })
    }

    /// Puts frames back that were taken for a page which did not become resident. Its slot was
    /// given back, if it had one.
    pub(crate) fn put_reserved_back(&self, frames: u32, in_slot: bool) {
        if let (Some(slots), false) = (&self.slots, in_slot) {
            slots.end_loan(u64::from(frames));
        }
        self.budget.put_back(u64::from(frames));
    }

    /// The slot of a page that the caller holds; 0 if it is in none.
    #[inline(always)]
    pub(crate) fn held_slot(&self, page: PageRef) -> u64 {
        self.slots.as_ref().map_or(0, |_| self.held(page).held_slot(self.slot_mask))
    }

    /// The slot that a page is in at this moment; 0 if it is in none.
    pub(crate) fn slot_of(&self, page: PageId) -> u64 {
        self.states.look(page).map_or(0, |(_, word)| word.slot(self.slot_mask))
    }

    /// Where a page that the caller holds is in memory.
    ///
    /// # Errors
    /// [`PoolError::DamagedWord`].
    pub(crate) fn address(&self, page: PageRef) -> Result<*mut u8, PoolError> {
        self.address_of(page, self.held(page)).ok_or_else(|| self.damaged_word(page))
    }

    /// As [`address`](Core::address), for a caller that has the state. None if the page is
    /// not where the word says.
    #[inline(always)]
    pub(crate) fn address_of(&self, page: PageRef, state: &PageState) -> Option<*mut u8> {
        let Some(slots) = &self.slots else { return Some(self.own_address(page.id)) };
        let slot = state.held_slot(self.slot_mask);
        slots.is_of(slot, page.id).then(|| self.address_in(slots, page.id, slot))
    }

    /// Where a page was in memory when its word was `seen`. Mapped in any case, also if the word is
    /// damaged: there are addresses for all numbers of slots that fit a word.
    #[inline(always)]
    pub(crate) fn address_seen(&self, page: PageRef, seen: Word) -> *mut u8 {
        // 0 in a pool that has no slots, because its mask has no bits.
        let slot = seen.slot(self.slot_mask);
        if slot == 0 { self.own_address(page.id) } else { self.address_of_slot(page, slot) }
    }

    /// As [`address_seen`](Core::address_seen), whatever the length of the caller's reference.
    #[inline(always)]
    pub(crate) fn address_to_prefetch(&self, page: PageId, seen: Word) -> *mut u8 {
        let slot = seen.slot(self.slot_mask);
        let slots = self.slots.as_ref();
        slots.map_or(self.own_address(page), |slots| self.address_in(slots, page, slot))
    }

    #[inline(always)]
    fn address_of_slot(&self, page: PageRef, slot: u64) -> *mut u8 {
        let slots = self.slots.as_ref().expect("a pool without slots has no mask of them");
        if cfg!(any(debug_assertions, feature = "model")) {
            assert!(u64::from(page.frames) <= slots.frames(), "{page}");
        }
        slots.address(slot)
    }

    #[inline(always)]
    fn address_in(&self, slots: &Slots, page: PageId, slot: u64) -> *mut u8 {
        if slot == 0 { self.own_address(page) } else { slots.address(slot) }
    }

    /// The page's own place on the surface.
    #[inline(always)]
    pub(crate) fn own_address(&self, page: PageId) -> *mut u8 {
        // Within the surface, which is as long as the state array that `page` was found in.
        self.surface.base().as_ptr().wrapping_add((page.0 as usize).wrapping_mul(PAGE_SIZE))
    }

    /// The bytes of a page that the caller holds, shared or exclusively.
    ///
    /// # Errors
    /// [`PoolError::DamagedWord`].
    ///
    /// # Safety
    /// The page is resident, and held for as long as `'a`.
    pub(crate) unsafe fn bytes<'a>(&self, page: PageRef) -> Result<&'a [u8], PoolError> {
        let address = self.address(page)?;
        // SAFETY: `page` lies in its slot or on the surface (it passed `look`), its memory is
        // resident, and the caller's lock excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(address, page.bytes()) })
    }

    /// Waits until `wanted` may be possible. `seen` is the word that made the caller wait.
    ///
    /// Most threads hold a page for less than it takes to wake another one. So the thread looks
    /// again for a while before it sleeps.
    #[cold]
    pub(crate) fn wait(&self, page: PageRef, state: &PageState, seen: Word, wanted: Wanted) {
        if !spin_until(|| !wanted.is_blocked(state.load())) && state.try_announce_waiter(seen) {
            self.counters.count(Event::Wait);
            self.parking.park(page.id, || self.is_blocked(page, wanted));
        }
    }

    /// Waits a little for the shared holders of a page to unlock it. `seen` is the word that counts
    /// them. From the second of its `rounds` on, the caller is urgent: no new holder joins before
    /// it.
    #[cold]
    pub(crate) fn wait_for_holders(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
        rounds: &mut u32,
    ) {
        *rounds += 1;
        let announced = match *rounds {
            1 if spin_until(|| !Wanted::Alone.is_blocked(state.load())) => false,
            1 => state.try_announce_waiter(seen),
            _ => state.try_urge(seen),
        };
        if announced {
            self.counters.count(Event::Wait);
            self.parking.park_briefly(page.id, || self.is_blocked(page, Wanted::Alone));
        }
    }

    /// Joins the shared holders of a readable page whose word was `seen`. False if the word has
    /// changed, or after a wait for the caller's turn.
    ///
    /// An urgent writer goes first, for a limited number of the caller's `rounds`: a holder of the
    /// page may itself wait for the caller, and would otherwise never unlock it.
    pub(crate) fn join_in_turn(
        &self,
        page: PageRef,
        state: &PageState,
        seen: Word,
        rounds: &mut u32,
    ) -> bool {
        if state.try_lock_shared(seen) {
            return true;
        }
        if Wanted::SharedPlace.is_blocked(seen) {
            self.wait(page, state, seen, Wanted::SharedPlace);
        } else if seen.is_urgent() {
            if *rounds >= URGENT_ROUNDS {
                return state.try_join(seen);
            }
            *rounds += 1;
            if state.try_announce_waiter(seen) {
                let unchanged = || self.look_at_known(page).1.is_urgent();
                self.parking.park_briefly(page.id, unchanged);
            }
        }
        false
    }

    /// As [`wait`](Core::wait), for a task. False if the task need not wait any more.
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
        self.parking.park_task(page.id, waker, || self.is_blocked(page, wanted))
    }

    /// Whether the page still blocks `wanted`. If so, the thread that unlocks or releases the page
    /// wakes its waiters.
    fn is_blocked(&self, page: PageRef, wanted: Wanted) -> bool {
        let (_, now) = self.look_at_known(page);
        now.has_waiters() && wanted.is_blocked(now)
    }

    /// Ends an exclusive hold and wakes the waiters.
    pub(crate) fn unlock(&self, page: PageRef, leave: Leave, dirty: bool) {
        self.unlock_state(page, self.held(page), leave, dirty);
    }

    /// As [`unlock`](Core::unlock), for a caller that has loaded the word.
    #[inline]
    pub(crate) fn unlock_state(&self, page: PageRef, state: &PageState, leave: Leave, dirty: bool) {
        if dirty && !state.is_dirty_held() {
            self.note_dirty(page.id);
        }
        if state.unlock(leave, dirty, self.slot_mask) {
            self.parking.wake(page.id);
        }
    }

    /// Frees an inner frame of a page that the caller has locked and whose memory is gone.
    pub(crate) fn free_inner(&self, inner: PageRef) {
        self.held(inner).free_inner(self.slot_mask);
    }

    #[cold]
    #[inline(never)]
    pub(crate) fn note_dirty(&self, page: PageId) {
        self.dirty.insert(page);
    }

    /// Makes a page clean that the caller holds: the file has what memory has.
    pub(crate) fn clear_dirty(&self, page: PageRef) {
        self.held(page).clear_dirty();
        self.dirty.remove(page.id);
    }

    /// Ends a shared hold and wakes the waiters.
    pub(crate) fn unlock_shared(&self, page: PageRef) {
        self.unlock_shared_state(page, self.held(page));
    }

    /// As [`unlock_shared`](Core::unlock_shared), for a caller that has loaded the word.
    #[inline]
    pub(crate) fn unlock_shared_state(&self, page: PageRef, state: &PageState) {
        if state.unlock_shared() {
            self.parking.wake(page.id);
        }
    }

    /// Ends a shared hold that was no access, of a page that had the clock's mark.
    pub(crate) fn unlock_shared_marked(&self, page: PageRef) {
        if self.held(page).unlock_shared_marked() {
            self.parking.wake(page.id);
        }
    }

    /// Refuses changes after a failed write or sync.
    pub(crate) fn check_poison(&self) -> Result<(), PoolError> {
        self.poison.get().map_or(Ok(()), |first| Err(PoolError::Poisoned(first.clone())))
    }

    /// Remembers the first failure after which the file's contents are unknown.
    ///
    /// A full disk does not count: the page stays dirty in memory, and a later write succeeds once
    /// there is room. A write that the format has put off does not count either.
    pub(crate) fn poison(&self, error: &PoolError) {
        let harmless = match error {
            PoolError::Write { source, .. } => is_disk_full(source),
            PoolError::WriteAhead(source) => is_disk_full(source) || error.is_put_off(),
            _ => false,
        };
        if !harmless {
            self.poison_for(&error.to_string());
        }
    }

    /// Refuses changes from now on.
    #[cold]
    pub(crate) fn poison_for(&self, what: &str) {
        if self.poison.set(what.into()).is_ok() {
            tracing::error!("{what}; changes are refused from now on");
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
