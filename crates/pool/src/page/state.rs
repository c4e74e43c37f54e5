//! The state word of a page: lock, clock mark, dirtiness, version and slot in 64 bits.
//!
//! ```text
//!  63      56  55        54      53       52                    0
//! +----------+---------+-------+--------+-----------+------------+
//! |  state   | waiters | dirty | urgent |  version  |    slot    |
//! +----------+---------+-------+--------+-----------+------------+
//! ```
//!
//! In a pool that has slots (`slots.rs`), a part of the word says in which slot the page is, or
//! that it is in none. That part is as wide as the number of the pool's frames ([`SlotMask`]), and
//! the version takes the rest. In other pools the version takes all of it.
//!
//! From SIGMOD'23, sections 3.2 and 3.3, with four changes. Evicted is zero, so that a fresh,
//! lazily backed array of words means "nothing is resident". The word has a dirty bit,
//! so that eviction need not touch a page to learn whether it was written to. A page that is not
//! allocated is `Free`: an optimistic reader that follows a stale reference cannot bring it back,
//! which makes reuse of page ranges safe without epochs. And the words of the inner frames of a
//! resident page say `Inner`: no thread can make another page of these frames, and the pool detects
//! a reference of another length.
//!
//! What holds:
//! - Only the holder of the exclusive lock leaves `Locked`; only it changes the version.
//! - Every exclusive unlock, eviction and free adds one to the version, so a reader whose version
//!   still matches saw one state of the page, and it was resident throughout. The version never
//!   starts afresh: a page that leaves its slot and comes back to the same slot has another one.
//! - Only the holder of the exclusive lock changes the slot.
//! - The dirty bit changes only under the shared or the exclusive lock.
//! - A thread that is about to park sets the waiters bit. The thread that makes the page lockable
//!   clears the bit and wakes the waiters.
//! - A thread that has waited too long for shared holders to unlock the page sets the urgent bit.
//!   Then no new holder joins them. The end of the next exclusive hold clears the bit.

use crate::sync::{AtomicU64, Ordering, fence};

const STATE_SHIFT: u32 = 56;
const WAITERS: u64 = 1 << 55;
const DIRTY: u64 = 1 << 54;
const URGENT: u64 = 1 << 53;
/// The version and the slot.
const VERSION: u64 = URGENT - 1;

const EVICTED: u64 = 0;
const UNLOCKED: u64 = 1;
const SHARED_MAX: u64 = 251;
const FREE: u64 = 252;
const LOCKED: u64 = 253;
const MARKED: u64 = 254;
const INNER: u64 = 255;

#[cfg(feature = "model")]
std::thread_local! {
    /// A planted bug, which the model has to find: the version of an evicted page is zero.
    pub static VERSIONS_START_AFRESH: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The state in a state word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Allocated and not resident: only the file has the page.
    Evicted,
    /// Resident, and no thread holds it.
    Unlocked,
    /// Resident, and this many threads hold it shared (1 to 250).
    Shared(u8),
    /// Not allocated.
    Free,
    /// Held exclusively, or in transit between file and memory.
    Locked,
    /// Resident, and not accessed since the clock's hand passed.
    Marked,
    /// An inner frame of a resident page, and so no page of its own.
    Inner,
}

/// The most holders of one page's shared lock.
pub const SHARED_HOLDERS_MAX: u8 = (SHARED_MAX - UNLOCKED) as u8;

/// The bits of a word that say in which slot a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotMask(u64);

impl SlotMask {
    /// Of a pool without slots.
    pub(crate) const NONE: SlotMask = SlotMask(0);

    /// The most frames of slots that words can name. With so many, the version has 26 bits.
    pub(crate) const FRAMES_MAX: u64 = (1 << 27) - 1;

    /// For slots that have so many frames in all. The number of a slot is that of its first frame,
    /// from 1 on; 0 means that the page is in none.
    pub(crate) const fn for_frames(frames: u64) -> SlotMask {
        assert!(frames <= Self::FRAMES_MAX);
        SlotMask((frames + 1).next_power_of_two() - 1)
    }

    /// As much of a number as words have room for.
    #[cfg(feature = "testing")]
    pub(crate) const fn cut(self, slot: u64) -> u64 {
        slot & self.0
    }

    /// The largest number that a word may have for a slot, though the pool may have fewer.
    pub(crate) const fn largest(self) -> u64 {
        self.0
    }

    /// What the version grows by.
    const fn version_step(self) -> u64 {
        self.0 + 1
    }
}

/// One reading of a state word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    /// The slot that the page is in; 0 if it is in none.
    #[inline(always)]
    pub(crate) const fn slot(self, mask: SlotMask) -> u64 {
        self.0 & mask.0
    }

    /// Of a page that is in no slot.
    pub(crate) const fn without_slot(self, mask: SlotMask) -> Word {
        Word(self.0 & !mask.0)
    }

    /// Of a page that is not resident and has no word of its own.
    pub(crate) const EVICTED: Word = Word(EVICTED << STATE_SHIFT);
    /// Of a page that is not allocated and has no word of its own.
    pub(crate) const FREE: Word = Word(FREE << STATE_SHIFT);

    /// The one of two words whose version has gone further from that of `first`.
    pub(crate) fn later(self, other: Word, first: Word) -> Word {
        let age = |word: Word| word.0.wrapping_sub(first.0) & VERSION;
        if age(other) > age(self) { other } else { self }
    }

    /// With this version.
    pub(crate) const fn of_version(version: u64) -> Word {
        Word(version)
    }

    /// Whether no thread has written the word, since its memory was last given back.
    pub(crate) const fn is_untouched(self) -> bool {
        self.0 == 0
    }

    /// As [`is_untouched`](Self::is_untouched), but for the slot that a damaged word names.
    pub(crate) const fn has_no_version(self, mask: SlotMask) -> bool {
        self.without_slot(mask).is_untouched()
    }

    /// As it will be when the thread that just claims the frame has locked it.
    pub(crate) const fn as_locked(self) -> Word {
        self.with_raw_state(LOCKED)
    }

    const fn raw_state(self) -> u64 {
        self.0 >> STATE_SHIFT
    }

    const fn with_raw_state(self, state: u64) -> Word {
        Word((self.0 & !(0xff << STATE_SHIFT)) | (state << STATE_SHIFT))
    }

    /// The state of the page.
    pub const fn state(self) -> State {
        match self.raw_state() {
            EVICTED => State::Evicted,
            UNLOCKED => State::Unlocked,
            FREE => State::Free,
            LOCKED => State::Locked,
            MARKED => State::Marked,
            shared if shared <= SHARED_MAX => State::Shared((shared - UNLOCKED) as u8),
            _ => State::Inner,
        }
    }

    /// Memory differs from the file.
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// A thread is parked, or about to park, until this page's lock is released.
    pub const fn has_waiters(self) -> bool {
        self.0 & WAITERS != 0
    }

    /// A thread has waited for shared holders to leave, and no new holder should join them.
    pub const fn is_urgent(self) -> bool {
        self.0 & URGENT != 0
    }

    /// Differs from one exclusive hold to the next. With slots it has the slot in its low bits.
    pub const fn version(self) -> u64 {
        self.0 & VERSION
    }

    /// No thread writes to the page at this moment and it is not marked: the common case of an
    /// optimistic read, in one comparison.
    #[inline(always)]
    pub const fn is_readable_unmarked(self) -> bool {
        self.raw_state().wrapping_sub(UNLOCKED) <= SHARED_MAX - UNLOCKED
    }

    /// Resident, and no thread writes to the page at this moment.
    #[inline(always)]
    pub const fn is_readable(self) -> bool {
        self.is_readable_unmarked() || self.raw_state() == MARKED
    }

    /// Resident, and no thread holds the page at this moment.
    #[inline(always)]
    pub const fn is_resident_unheld(self) -> bool {
        matches!(self.raw_state(), UNLOCKED | MARKED)
    }

    /// The page was readable with this version from the one reading to the other.
    #[inline(always)]
    pub const fn validates(self, later: Word) -> bool {
        self.version() == later.version() && later.is_readable()
    }

    /// With the same slot.
    pub(crate) const fn next_version(self, mask: SlotMask) -> Word {
        Word((self.0 & !VERSION) | (self.0.wrapping_add(mask.version_step()) & VERSION))
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} v{}", self.state(), self.version())?;
        write!(f, "{}", if self.is_dirty() { " dirty" } else { "" })?;
        write!(f, "{}", if self.is_urgent() { " urgent" } else { "" })?;
        write!(f, "{}", if self.has_waiters() { " waiters" } else { "" })
    }
}

/// How an exclusive hold ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The page stays, resident and unlocked.
    Unlocked,
    /// The page stays, held shared by the caller alone.
    Shared,
    /// The page is no longer resident.
    Evicted,
    /// The page is no longer allocated.
    Free,
}

/// The state word of one page. Every operation makes one attempt and never waits.
#[repr(transparent)]
#[derive(Debug)]
pub struct PageState(AtomicU64);

impl PageState {
    /// An evicted page of version zero: what zeroed memory holds.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn evicted() -> PageState {
        PageState(AtomicU64::new(0))
    }

    /// The memory of the word goes back to the kernel.
    #[cfg(feature = "model")]
    pub(crate) fn vanish(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// A word that no page has: it never equals a word that a thread has read, so every attempt
    /// fails.
    pub(crate) fn nowhere() -> PageState {
        PageState(AtomicU64::new((INNER << STATE_SHIFT) | WAITERS | DIRTY | URGENT | VERSION))
    }

    /// Reads the word; what was published before it was written is visible afterwards.
    #[inline(always)]
    pub fn load(&self) -> Word {
        Word(self.0.load(Ordering::Acquire))
    }

    /// Reads the word after everything that this thread read before (the reader's half of a
    /// sequence lock).
    #[inline(always)]
    pub fn load_after_reads(&self) -> Word {
        fence(Ordering::Acquire);
        Word(self.0.load(Ordering::Relaxed))
    }

    #[inline]
    fn swap_if(&self, seen: Word, new: Word) -> bool {
        self.0.compare_exchange(seen.0, new.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Locks exclusively if the word is still `seen`, which must be of a page that no thread holds:
    /// unlocked, marked, evicted or free.
    #[inline]
    pub fn try_lock(&self, seen: Word) -> bool {
        debug_assert!(!matches!(seen.state(), State::Locked | State::Shared(_) | State::Inner));
        let locked = self.swap_if(seen, seen.with_raw_state(LOCKED));
        // The writer's half of the sequence lock: no write to the page may overtake the lock.
        fence(Ordering::Release);
        locked
    }

    /// Locks shared if the word is still `seen`, a resident page with room for one more holder,
    /// for which no writer is urgent. Clears the clock's mark.
    #[inline]
    pub fn try_lock_shared(&self, seen: Word) -> bool {
        !seen.is_urgent() && self.try_join(seen)
    }

    /// As [`try_lock_shared`](PageState::try_lock_shared), even before an urgent writer.
    #[inline]
    pub fn try_join(&self, seen: Word) -> bool {
        let new = match seen.raw_state() {
            UNLOCKED | MARKED => UNLOCKED + 1,
            shared if seen.is_readable_unmarked() && shared < SHARED_MAX => shared + 1,
            _ => return false,
        };
        self.swap_if(seen, seen.with_raw_state(new))
    }

    /// Turns the lock of the only shared holder into the exclusive lock.
    pub fn try_upgrade(&self) -> bool {
        let seen = self.load();
        let upgraded =
            seen.raw_state() == UNLOCKED + 1 && self.swap_if(seen, seen.with_raw_state(LOCKED));
        fence(Ordering::Release);
        upgraded
    }

    /// Memory differs from the file. The caller holds the page exclusively.
    #[inline(always)]
    pub(crate) fn is_dirty_held(&self) -> bool {
        Word(self.0.load(Ordering::Relaxed)).is_dirty()
    }

    /// The slot of a page that the caller holds; 0 if it is in none.
    #[inline(always)]
    pub(crate) fn held_slot(&self, mask: SlotMask) -> u64 {
        Word(self.0.load(Ordering::Relaxed)).slot(mask)
    }

    /// Gives the word its first version. The caller has locked it, and it was zero before.
    pub(crate) fn set_first_version(&self, version: u64) {
        self.0.fetch_or(version, Ordering::AcqRel);
    }

    /// Puts a page into a slot. The caller holds the page exclusively, and has just taken the slot;
    /// the page was in none.
    pub(crate) fn set_slot(&self, slot: u64) {
        // Readers that find bytes of the new page in the slot find the old page's new version, too.
        self.0.fetch_or(slot, Ordering::AcqRel);
        fence(Ordering::Release);
    }

    /// Moves a page from the slot `from` to the slot `to`, which the caller has just taken. The
    /// caller holds the page exclusively, and copies the page's bytes afterwards.
    pub(crate) fn move_slot(&self, from: u64, to: u64) {
        // As in `set_slot`: before the bytes are in the slot.
        self.0.fetch_xor(from ^ to, Ordering::AcqRel);
        fence(Ordering::Release);
    }

    /// Ends an exclusive hold. A page that leaves memory leaves its slot. True if there are waiters
    /// to wake.
    #[must_use = "waiters sleep until they are woken"]
    #[inline]
    pub(crate) fn unlock(&self, leave: Leave, dirty: bool, mask: SlotMask) -> bool {
        let held = Word(self.0.load(Ordering::Relaxed));
        debug_assert_eq!(held.state(), State::Locked);
        let state = match leave {
            Leave::Unlocked => UNLOCKED,
            Leave::Shared => UNLOCKED + 1,
            Leave::Evicted => EVICTED,
            Leave::Free => FREE,
        };
        let mut new = held.next_version(mask).with_raw_state(state).0 & !(WAITERS | URGENT);
        if dirty {
            new |= DIRTY;
        }
        if matches!(leave, Leave::Evicted | Leave::Free) {
            new &= !(DIRTY | mask.0);
        }
        #[cfg(feature = "model")]
        if leave == Leave::Evicted && VERSIONS_START_AFRESH.get() {
            new = 0;
        }
        // Under the exclusive lock other threads can change only the waiters bit.
        Word(self.0.swap(new, Ordering::Release)).has_waiters()
    }

    /// Ends one shared hold. True if there are waiters to wake.
    #[must_use = "waiters sleep until they are woken"]
    #[inline]
    pub fn unlock_shared(&self) -> bool {
        self.leave_shared(UNLOCKED)
    }

    /// As [`unlock_shared`](PageState::unlock_shared), by a holder that found the clock's mark and
    /// does not count as an access. If it is the last holder, and no thread waits, it marks the
    /// page again. Accesses by others meanwhile are forgotten.
    #[must_use = "waiters sleep until they are woken"]
    pub fn unlock_shared_marked(&self) -> bool {
        self.leave_shared(MARKED)
    }

    /// Ends one shared hold. The last one leaves the page in the state `last`.
    #[inline]
    fn leave_shared(&self, last: u64) -> bool {
        loop {
            let seen = Word(self.0.load(Ordering::Relaxed));
            let State::Shared(holders) = seen.state() else {
                unreachable!("a shared hold ends on a page that is {seen:?}");
            };
            let left = match holders {
                // A thread that waits is about to access the page.
                1 if seen.has_waiters() || seen.is_urgent() => UNLOCKED,
                1 => last,
                _ => seen.raw_state() - 1,
            };
            let mut new = seen.with_raw_state(left);
            // The last holder wakes writers; a holder that leaves a full word wakes readers.
            let wake = seen.has_waiters() && (holders == 1 || holders == SHARED_HOLDERS_MAX);
            if wake {
                new = Word(new.0 & !WAITERS);
            }
            let released = Ordering::Release;
            if self.0.compare_exchange(seen.0, new.0, released, Ordering::Relaxed).is_ok() {
                return wake;
            }
        }
    }

    /// Marks an unlocked page: this takes its second chance away.
    pub fn try_mark(&self, seen: Word) -> bool {
        seen.raw_state() == UNLOCKED && self.swap_if(seen, seen.with_raw_state(MARKED))
    }

    /// Clears the mark of a page: this gives the page its second chance back.
    pub fn try_unmark(&self, seen: Word) -> bool {
        seen.raw_state() == MARKED && self.swap_if(seen, seen.with_raw_state(UNLOCKED))
    }

    /// Announces a waiter, if the word is still `seen`. Then it may park.
    pub fn try_announce_waiter(&self, seen: Word) -> bool {
        seen.has_waiters() || self.swap_if(seen, Word(seen.0 | WAITERS))
    }

    /// Sets the urgent bit if the word is still `seen`. Then the caller may park.
    pub fn try_urge(&self, seen: Word) -> bool {
        let urgent = Word(seen.0 | WAITERS | URGENT);
        seen == urgent || self.swap_if(seen, urgent)
    }

    /// Frees an inner frame of a page whose memory is released and whose head is still locked.
    pub(crate) fn free_inner(&self, mask: SlotMask) {
        let held = Word(self.0.load(Ordering::Relaxed));
        debug_assert_eq!(held.state(), State::Inner);
        // No other thread changes an inner word.
        let free = held.next_version(mask).without_slot(mask).with_raw_state(FREE);
        self.0.store(free.0, Ordering::Release);
    }

    /// Makes a word locked, or with `inner` part of the page before it, whatever it was: the caller
    /// owns it, and only threads that announce waiters change it. True if there are waiters to
    /// wake, which a word that stays locked keeps.
    #[must_use = "waiters sleep until they are woken"]
    pub(crate) fn take_over(&self, inner: bool) -> bool {
        loop {
            let seen = Word(self.0.load(Ordering::Relaxed));
            let state = if inner { INNER } else { LOCKED };
            let mut new = seen.with_raw_state(state).0 & !(DIRTY | URGENT);
            if inner {
                new &= !WAITERS;
            }
            // The writer's half of the sequence lock, as in `try_lock`.
            let (done, failed) = (Ordering::AcqRel, Ordering::Relaxed);
            if self.0.compare_exchange(seen.0, new, done, failed).is_ok() {
                fence(Ordering::Release);
                return inner && seen.has_waiters();
            }
        }
    }

    /// Memory has what the file does not have. The caller holds the page exclusively.
    pub fn set_dirty(&self) {
        self.0.fetch_or(DIRTY, Ordering::Relaxed);
    }

    /// The file has what memory has. The caller holds the page, shared or exclusively.
    pub fn clear_dirty(&self) {
        self.0.fetch_and(!DIRTY, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    fn resident() -> PageState {
        let page = PageState::evicted();
        assert!(page.try_lock(page.load()));
        assert!(!page.unlock(Leave::Unlocked, false, SlotMask::NONE));
        page
    }

    #[test]
    fn zeroed_memory_is_an_evicted_page() {
        assert_eq!(Word(0).state(), State::Evicted);
        assert!(!Word(0).is_dirty() && !Word(0).has_waiters());
    }

    #[test]
    fn the_quick_questions_agree_with_the_state() {
        for raw in 0..=255 {
            let word = Word((raw << STATE_SHIFT) | DIRTY | 7);
            let state = word.state();
            let unmarked = matches!(state, State::Unlocked | State::Shared(_));
            assert_eq!(word.is_readable_unmarked(), unmarked, "{word:?}");
            assert_eq!(word.is_readable(), unmarked || state == State::Marked, "{word:?}");
            let unheld = matches!(state, State::Unlocked | State::Marked);
            assert_eq!(word.is_resident_unheld(), unheld, "{word:?}");
        }
    }

    #[test]
    fn every_exclusive_hold_ends_with_another_version() {
        for leave in [Leave::Unlocked, Leave::Shared, Leave::Evicted, Leave::Free] {
            let page = resident();
            let before = page.load();
            assert!(page.try_lock(before));
            assert!(!before.validates(page.load_after_reads()));
            let _ = page.unlock(leave, false, SlotMask::NONE);
            assert!(!before.validates(page.load_after_reads()), "{leave:?}");
            assert_eq!(page.load().version(), before.version() + 1);
        }
    }

    #[test]
    fn the_version_wraps_without_touching_its_neighbours() {
        let page = PageState(AtomicU64::new((LOCKED << STATE_SHIFT) | DIRTY | VERSION));
        assert!(!page.unlock(Leave::Unlocked, false, SlotMask::NONE));
        assert_eq!(page.load().version(), 0);
        assert!(page.load().is_dirty());
        assert_eq!(page.load().state(), State::Unlocked);
    }

    #[test]
    fn a_slot_stays_with_its_page_and_the_version_goes_on_without_it() {
        for frames in [1, 2, 3, 1 << 18, SlotMask::FRAMES_MAX] {
            let mask = SlotMask::for_frames(frames);
            let page = PageState(AtomicU64::new((LOCKED << STATE_SHIFT) | DIRTY | VERSION));
            let _ = page.unlock(Leave::Evicted, false, mask);
            let mut seen = vec![page.load()];
            for leave in [Leave::Unlocked, Leave::Unlocked, Leave::Evicted, Leave::Free] {
                let before = page.load();
                assert!(page.try_lock(before));
                if before.slot(mask) == 0 {
                    page.set_slot(frames);
                }
                assert_eq!(page.held_slot(mask), frames);
                let _ = page.unlock(leave, false, mask);
                let stays = leave == Leave::Unlocked;
                assert_eq!(page.load().slot(mask), if stays { frames } else { 0 });
                assert!(!page.load().is_dirty() && !page.load().has_waiters());
                let is_new = seen.iter().all(|word| !word.validates(page.load()));
                assert!(is_new, "{frames}: {:?} after {seen:?}", page.load());
                seen.push(page.load());
            }
        }
    }

    #[test]
    fn shared_holders_are_counted_to_the_limit_and_back() {
        let page = resident();
        let before = page.load();
        for held in 1..=SHARED_HOLDERS_MAX {
            assert!(page.try_lock_shared(page.load()));
            assert_eq!(page.load().state(), State::Shared(held));
            assert!(before.validates(page.load_after_reads()), "shared locks change nothing");
        }
        assert!(!page.try_lock_shared(page.load()));
        assert!(page.try_announce_waiter(page.load()));
        assert!(page.unlock_shared(), "a place became free");
        for _ in 1..SHARED_HOLDERS_MAX {
            assert!(!page.unlock_shared());
        }
        assert_eq!(page.load().state(), State::Unlocked);
    }

    #[test]
    fn only_a_lone_shared_holder_upgrades() {
        let page = resident();
        assert!(!page.try_upgrade());
        assert!(page.try_lock_shared(page.load()) && page.try_lock_shared(page.load()));
        assert!(!page.try_upgrade());
        assert!(!page.unlock_shared());
        assert!(page.try_upgrade());
        assert_eq!(page.load().state(), State::Locked);
    }

    #[test]
    fn the_dirty_bit_survives_locks_and_goes_with_the_page() {
        let page = resident();
        assert!(page.try_lock(page.load()));
        assert!(!page.unlock(Leave::Unlocked, true, SlotMask::NONE));
        assert!(page.try_lock(page.load()));
        assert!(
            !page.unlock(Leave::Unlocked, false, SlotMask::NONE),
            "not dirtied again, but still dirty"
        );
        assert!(page.load().is_dirty());
        assert!(page.try_lock(page.load()));
        assert!(!page.unlock(Leave::Free, true, SlotMask::NONE));
        assert!(!page.load().is_dirty());
    }

    #[test]
    fn waiters_are_reported_once_to_the_one_who_unlocks() {
        let page = resident();
        assert!(page.try_lock(page.load()));
        assert!(page.try_announce_waiter(page.load()));
        assert!(page.unlock(Leave::Unlocked, false, SlotMask::NONE));
        assert!(!page.load().has_waiters());
    }

    #[test]
    fn the_newest_version_is_found_though_versions_wrap() {
        let (first, last) = (Word::of_version(VERSION - 3), Word::of_version(VERSION));
        let wrapped = last.next_version(SlotMask::NONE);
        assert_eq!(wrapped.version(), 0);
        assert_eq!(first.later(last, first), last);
        assert_eq!(last.later(wrapped, first), wrapped);
        assert_eq!(wrapped.later(last, first), wrapped);
    }

    #[test]
    fn a_mark_is_cleared_by_every_kind_of_access() {
        let page = resident();
        let read = page.load();
        assert!(page.try_mark(page.load()));
        assert!(read.validates(page.load_after_reads()), "marking moves nothing");
        assert!(page.try_lock_shared(page.load()));
        assert!(!page.unlock_shared());
        assert_eq!(page.load().state(), State::Unlocked);
        assert!(page.try_mark(page.load()) && page.try_unmark(page.load()));
        assert_eq!(page.load().state(), State::Unlocked);
    }

    #[test]
    fn the_last_holder_can_leave_a_mark() {
        let page = resident();
        assert!(page.try_join(page.load()) && page.try_join(page.load()));
        assert!(!page.unlock_shared_marked());
        assert_eq!(page.load().state(), State::Shared(1));
        assert!(!page.unlock_shared_marked());
        assert_eq!(page.load().state(), State::Marked);
        assert!(page.try_join(page.load()) && page.try_announce_waiter(page.load()));
        assert!(page.unlock_shared_marked(), "a writer waits");
        assert_eq!(page.load().state(), State::Unlocked);
        assert!(!page.load().has_waiters());
    }
}
