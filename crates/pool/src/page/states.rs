//! The places of the state words: an array with one for each page of the file, or one for each
//! frame of the pool.
//!
//! The array is as long as the file has pages, but memory comes only for words that were written:
//! 8 bytes for each page that was ever resident (in whole pages of 512 neighbours), none for the
//! rest of the file. It grows with the file and never moves.
//!
//! A *group* is the pages whose words lie in one page of memory. If all of them are evicted, the
//! memory goes back to the kernel, and the words are zero, as if no thread had ever used them. No
//! version starts afresh: the group notes one that is newer than all of its versions, and a thread
//! that locks a word of zero begins with that. The evictor looks for such groups, a few at a time.
//! It locks all words of a group before it gives the memory back.
//!
//! Random accesses to a large file miss the TLB for the state as well as for the page. So in pools
//! with huge pages the first part of the array, up to a 64th of the pool's size, comes 2 MiB at a
//! time: states of 1 GiB of the file. That holds all states of a file up to eight times as large
//! as its pool, and costs at most 1.6 % of the pool where few of them are used. The array's last
//! 2 MiB count only once half of them are in use, so a file below 512 MiB has none. It brings
//! nothing at 2 GiB of pages, where the TLB holds the states' 1,000 small pages as well; 2 to 6 %
//! of a random read at 8 GiB and 5 to 10 % at 32 GiB (the more if the pages are huge too).
//!
//! Up to Linux 6.12 that is so only where states were in use when the array grew over them. A part
//! that is read first, as states are, is a huge page of zeros then, which the first write takes
//! apart into small pages; they stay small until the kernel's own search for huge pages finds them.

#![allow(unsafe_code)]

use std::mem::size_of;
use std::ops::Range;
use std::sync::atomic::AtomicU64 as Statistic;

use vellum_vm::{Errno, ReserveError, Surface};
#[cfg(not(feature = "model"))]
use vellum_vm::{HUGE_PAGE_SIZE, Reservation};

use crate::error::PoolError;
use crate::page::PageId;
use crate::page::frame_states::FrameStates;
use crate::page::page_bits::{PageBits, WORD_BITS};
use crate::page::parking::ParkingLot;
use crate::page::state::{Leave, PageState, SlotMask, State, Word};
use crate::sync::{AtomicU64, Ordering};

/// Where a pool keeps the state words of its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StatePlace {
    /// In an array: 8 bytes for each page of the file that was ever used.
    #[default]
    Pages,
    /// With the frames: 8 bytes for each frame of the pool, however large the file. For pools on
    /// exmap, by processes that may see their page tables (`CAP_SYS_ADMIN`).
    Frames,
}

/// The state words of a pool.
#[derive(Debug)]
pub(crate) struct States {
    /// Has no page if words are with the frames. So a hit that finds its page here need not ask
    /// where words are.
    array: StateArray,
    /// None if words are in the array.
    frames: Option<FrameStates>,
    /// Stands for the words of pages that the file does not have.
    nowhere: PageState,
}

impl States {
    /// For the pages of a surface that has so many frames.
    ///
    /// # Errors
    /// No address space, or no look into the page tables.
    pub(crate) fn new(
        place: StatePlace,
        surface: &Surface,
        frames: u64,
        pages: u64,
    ) -> Result<States, PoolError> {
        let (in_array, frames) = match place {
            StatePlace::Pages => (pages, None),
            StatePlace::Frames => (0, Some(FrameStates::new(surface, frames, pages)?)),
        };
        Ok(States { array: StateArray::new(in_array)?, frames, nowhere: PageState::nowhere() })
    }

    /// The array that has them; None if they are with the frames.
    pub(crate) fn in_array(&self) -> Option<&StateArray> {
        self.frames.is_none().then_some(&self.array)
    }

    /// Those with the frames; None if an array has them.
    pub(crate) fn with_frames(&self) -> Option<&FrameStates> {
        self.frames.as_ref()
    }

    /// Where they are.
    pub(crate) fn place(&self) -> StatePlace {
        match self.frames {
            None => StatePlace::Pages,
            Some(_) => StatePlace::Frames,
        }
    }

    /// Makes room for `pages` pages; never shrinks. The surface has them already.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        match &self.frames {
            None => self.array.grow(pages),
            Some(states) => states.grow(pages),
        }
    }

    /// Bytes of memory that they take at this moment.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Errno> {
        match &self.frames {
            None => self.array.resident_bytes(),
            Some(states) => states.resident_bytes(),
        }
    }

    /// How many pages have a state.
    pub(crate) fn pages(&self) -> u64 {
        match &self.frames {
            None => self.array.pages(),
            Some(states) => states.pages(),
        }
    }

    /// The word of a page, if the file is that long, and what it said when the page had it.
    ///
    /// Where words are with the frames, a page that is not resident has none: what is returned for
    /// it tells evicted pages from free ones, and every attempt to change it fails. And a page may
    /// leave its frame, and the word, at any time. Exchanging the word for what was seen then
    /// fails, and its version is another one; so look again after every failure.
    #[inline(always)]
    pub(crate) fn look(&self, page: PageId) -> Option<(&PageState, Word)> {
        match self.array.get(page) {
            Some(state) => Some((state, state.load())),
            None => self.frames.as_ref()?.look(page),
        }
    }

    /// As [`look`](States::look), for a hit. A page that the file does not have seems to be free.
    #[inline(always)]
    pub(crate) fn look_for_hit(&self, page: PageId) -> (&PageState, Word) {
        match self.array.get(page) {
            Some(state) => (state, state.load()),
            None => self.look_for_hit_with_frames(page),
        }
    }

    #[cold]
    #[inline(never)]
    fn look_for_hit_with_frames(&self, page: PageId) -> (&PageState, Word) {
        let found = self.frames.as_ref().and_then(|states| states.look(page));
        found.unwrap_or((&self.nowhere, Word::FREE))
    }

    /// The word of a page that the caller holds.
    #[inline(always)]
    pub(crate) fn held(&self, page: PageId) -> &PageState {
        match self.array.get(page) {
            Some(state) => state,
            None => self.held_with_frame(page),
        }
    }

    #[cold]
    #[inline(never)]
    fn held_with_frame(&self, page: PageId) -> &PageState {
        self.frames.as_ref().expect("a page that is held lies in the file").held(page)
    }

    /// The cache line that the next access to the page's state reads first.
    #[inline(always)]
    pub(crate) fn line(&self, page: PageId) -> Option<*const u8> {
        match self.array.get(page) {
            Some(state) => Some(std::ptr::from_ref(state).cast()),
            None => self.frames.as_ref()?.entry(page),
        }
    }
}

/// The groups of so many pages.
fn groups(pages: u64) -> u64 {
    pages.div_ceil(GROUP)
}

/// The state words of all pages.
#[derive(Debug)]
pub(crate) struct StateArray {
    words: Words,
    pages: AtomicU64,
    /// How many bytes of the array may be in huge pages.
    huge: AtomicU64,
    /// The groups of which a word has been used.
    used: PageBits,
    /// For each group, the version with which its words begin.
    first_versions: FirstVersions,
    /// The pages that were evicted, and the next groups to look at.
    evicted: Statistic,
    hand: Statistic,
}

/// The pages of a group.
const GROUP: u64 = if cfg!(feature = "model") { 4 } else { 512 };

/// The evictor looks at some groups whenever so many pages were evicted.
const EVICTED_PER_LOOK: u64 = 512;

#[cfg(feature = "model")]
std::thread_local! {
    /// A planted bug, which the model has to find: words begin with version zero.
    pub static WORDS_START_AFRESH: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(not(feature = "model"))]
type Words = Reservation;
#[cfg(not(feature = "model"))]
type FirstVersions = Reservation;
#[cfg(feature = "model")]
type FirstVersions = Vec<AtomicU64>;

/// Shuttle's atomics are no plain words, so the model has a small array of them.
#[cfg(feature = "model")]
type Words = Vec<PageState>;

const _: () = assert!(cfg!(feature = "model") || size_of::<PageState>() == size_of::<u64>());

impl StateArray {
    /// One part in so many of a pool's bytes is what its states may take in huge pages.
    pub(crate) const HUGE_SHARE: u64 = 64;

    #[cfg(not(feature = "model"))]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = Reservation::new(Self::bytes(pages), "page states")?;
        let first_versions = Reservation::new(Self::bytes(groups(pages)), "versions of states")?;
        Self::with(words, first_versions, pages)
    }

    #[cfg(feature = "model")]
    pub(crate) fn new(pages: u64) -> Result<StateArray, ReserveError> {
        let words = (0..256).map(|_| PageState::evicted()).collect();
        let first_versions = (0..256 / GROUP).map(|_| AtomicU64::new(0)).collect();
        Self::with(words, first_versions, pages)
    }

    fn with(
        words: Words,
        first_versions: FirstVersions,
        pages: u64,
    ) -> Result<StateArray, ReserveError> {
        Ok(StateArray {
            words,
            pages: AtomicU64::new(pages),
            huge: AtomicU64::new(0),
            used: PageBits::new(groups(pages), "groups of states")?,
            first_versions,
            evicted: Statistic::new(0),
            hand: Statistic::new(0),
        })
    }

    #[cfg(not(feature = "model"))]
    fn bytes(pages: u64) -> usize {
        usize::try_from(pages.max(1)).unwrap_or(usize::MAX).saturating_mul(size_of::<PageState>())
    }

    /// Makes room for `pages` words; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        self.used.grow(groups(pages))?;
        #[cfg(not(feature = "model"))]
        self.first_versions.grow(Self::bytes(groups(pages)))?;
        #[cfg(not(feature = "model"))]
        self.words.grow(Self::bytes(pages))?;
        self.pages.fetch_max(pages, Ordering::AcqRel);
        self.apply_huge_pages();
        Ok(())
    }

    /// Lets huge pages fill the array from now on, as far as it is in use and up to `limit` bytes.
    pub(crate) fn use_huge_pages(&self, limit: u64) {
        self.huge.store(limit, Ordering::Relaxed);
        self.apply_huge_pages();
    }

    fn apply_huge_pages(&self) {
        #[cfg(not(feature = "model"))]
        {
            let limit = usize::try_from(self.huge.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            let used = Self::bytes(self.pages()).saturating_add(HUGE_PAGE_SIZE / 2);
            // Rounded down to whole huge pages, without the part of an earlier call.
            self.words.use_huge_pages(used.min(limit));
        }
    }

    /// Bytes of memory that the words take at this moment, with what their groups note.
    pub(crate) fn resident_bytes(&self) -> Result<u64, Errno> {
        #[cfg(not(feature = "model"))]
        return Ok(self.words.resident_bytes()?
            + self.first_versions.resident_bytes()?
            + self.used.resident_bytes()?);
        #[cfg(feature = "model")]
        Ok(0)
    }

    /// Gives a word that was zero the version with which it begins. The caller has locked it.
    #[cold]
    pub(crate) fn begin_version(&self, page: PageId, state: &PageState) {
        let group = page.0 / GROUP;
        if !self.used.contains(group) {
            self.used.set(group);
        }
        #[cfg(feature = "model")]
        if WORDS_START_AFRESH.get() {
            return;
        }
        // The thread that noted it has given the word's memory back since, or no thread ever has.
        state.set_first_version(self.first_version(group).load(Ordering::Acquire));
    }

    /// So many more pages were evicted. Now and then looks at some groups, and gives the memory of
    /// those back whose pages are all evicted.
    pub(crate) fn note_evicted(&self, pages: u64, mask: SlotMask, parking: &ParkingLot) {
        let before = self.evicted.fetch_add(pages, Ordering::Relaxed);
        let looks = (before + pages) / EVICTED_PER_LOOK - before / EVICTED_PER_LOOK;
        // In the model the test does that.
        if cfg!(feature = "model") || looks == 0 {
            return;
        }
        let words = (self.pages() / GROUP).div_ceil(WORD_BITS);
        if words > 0 {
            let word = self.hand.fetch_add(1, Ordering::Relaxed) % words;
            self.used.for_each_in(word..word + 1, |group| _ = self.give_back(group, mask, parking));
        }
    }

    /// Gives the memory of a group's words back, if all of its pages are evicted. False if they are
    /// not, or if the kernel does not take it.
    pub(crate) fn give_back(&self, group: u64, mask: SlotMask, parking: &ParkingLot) -> bool {
        let pages = group * GROUP..(group + 1) * GROUP;
        // Words of pages beyond the file's end could not be locked. A part of a huge page stays.
        if pages.end > self.pages() || pages.start * 8 < self.huge_bytes() {
            return false;
        }
        let word = |page| self.get(PageId(page)).expect("the file has the page");
        if !pages.clone().all(|page| word(page).load().state() == State::Evicted) {
            return false;
        }
        let first = Word::of_version(self.first_version(group).load(Ordering::Acquire));
        let (mut end, mut newest) = (pages.start, first);
        for page in pages.clone() {
            let (state, seen) = (word(page), word(page).load());
            if seen.state() != State::Evicted || !state.try_lock(seen) {
                break;
            }
            if seen.has_no_version(mask) {
                self.begin_version(PageId(page), state);
            }
            newest = newest.later(state.load(), first);
            end += 1;
        }
        let all = end == pages.end;
        if all {
            // Without a slot, which a damaged word may name: all words would begin with it.
            let next = newest.next_version(mask).without_slot(mask).version();
            self.first_version(group).store(next, Ordering::Release);
            // Before the memory goes: from then on threads begin with words, and set it.
            self.used.clear(group);
        }
        if all && self.discard(&pages) {
            // A thread may have announced itself in a word that is gone.
            pages.for_each(|page| parking.wake(PageId(page)));
            return true;
        }
        if all {
            self.used.set(group);
        }
        for page in pages.start..end {
            if word(page).unlock(Leave::Evicted, false, mask) {
                parking.wake(PageId(page));
            }
        }
        false
    }

    /// Makes the words zero, and returns their memory to the kernel. False if it does not take it.
    fn discard(&self, pages: &Range<u64>) -> bool {
        #[cfg(not(feature = "model"))]
        let is_taken = {
            let (start, end) = (pages.start as usize * 8, pages.end as usize * 8);
            // SAFETY: the caller has locked all words. Other threads can only announce themselves
            // there, and the caller wakes them all.
            unsafe { self.words.discard(start, end - start) }.is_ok()
        };
        #[cfg(feature = "model")]
        let is_taken = {
            pages.clone().for_each(|page| self.words[page as usize].vanish());
            true
        };
        is_taken
    }

    /// How many bytes of the array are in huge pages, or will be.
    fn huge_bytes(&self) -> u64 {
        #[cfg(not(feature = "model"))]
        return self.words.huge_bytes() as u64;
        #[cfg(feature = "model")]
        0
    }

    fn first_version(&self, group: u64) -> &AtomicU64 {
        #[cfg(not(feature = "model"))]
        {
            assert!((group as usize + 1) * 8 <= self.first_versions.len());
            // SAFETY: within the reservation, aligned, and any bit pattern is a valid number.
            unsafe { &*self.first_versions.base().as_ptr().cast::<AtomicU64>().add(group as usize) }
        }
        #[cfg(feature = "model")]
        &self.first_versions[group as usize]
    }

    /// How many pages have a word.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    /// The word of `page`, if the file is that long.
    #[inline(always)]
    pub(crate) fn get(&self, page: PageId) -> Option<&PageState> {
        if page.0 >= self.pages.load(Ordering::Acquire) {
            return None;
        }
        #[cfg(not(feature = "model"))]
        // SAFETY: the reservation holds at least `pages` words (it grows before the count does),
        // it is aligned to 4 KiB, lives as long as `self`, and any bit pattern is a valid word.
        unsafe {
            Some(&*self.words.base().as_ptr().cast::<PageState>().add(page.0 as usize))
        }
        #[cfg(feature = "model")]
        self.words.get(page.0 as usize)
    }
}

#[cfg(all(test, not(feature = "model")))]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use super::*;

    const GIB: u64 = (1 << 30) / 4096;

    /// Writes every word, and returns the KiB of the array that are in huge pages.
    fn filled(states: &StateArray) -> u64 {
        (0..states.pages()).for_each(|page| {
            let state = states.get(PageId(page)).unwrap();
            let seen = state.load();
            assert!(state.try_lock(seen), "the word of page {page} was changed: {seen:?}");
            let _ = state.unlock(Leave::Evicted, false, SlotMask::NONE);
        });
        huge_kib(&states.words)
    }

    /// KiB in huge pages at these addresses, by the kernel's count.
    fn huge_kib(words: &Reservation) -> u64 {
        let start = words.base().addr().get();
        let array = start..start + words.len();
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        let (mut inside, mut sum) = (false, 0);
        // Ranges that were advised at different times may be several mappings.
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap_or("");
            if let Some((from, to)) = first.split_once('-')
                && let (Some(from), Some(to)) = (hex(from), hex(to))
            {
                inside = from < array.end && array.start < to;
            } else if inside && first == "AnonHugePages:" {
                sum += words.next().unwrap().parse::<u64>().unwrap();
            }
        }
        sum
    }

    /// Whether memory that may be huge becomes so when it is written to after it was read.
    fn reading_first_is_fine() -> bool {
        let words = Reservation::new(2 << 20, "a trial").unwrap();
        words.use_huge_pages(2 << 20);
        // SAFETY: the reservation holds the word, and no other thread has it; zeros are a number.
        let word = unsafe { &*words.base().as_ptr().cast::<AtomicU64>() };
        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        huge_kib(&words) > 0
    }

    /// Nothing can be said where the kernel does not give huge pages.
    fn found(kib: u64) -> Option<u64> {
        vellum_vm::probe::huge_pages().is_ok().then_some(kib)
    }

    #[test]
    fn states_of_a_small_file_or_a_small_pool_are_small() {
        let half = StateArray::new(GIB / 2 - 1).unwrap();
        half.use_huge_pages(u64::MAX);
        assert_eq!(filled(&half), 0);
        let large = StateArray::new(2 * GIB).unwrap();
        large.use_huge_pages((2 << 20) - 1);
        assert_eq!(filled(&large), 0);
        large.use_huge_pages(2 << 20);
        assert_eq!(found(filled(&large)), found(2 << 10));
    }

    #[test]
    fn states_become_huge_as_the_file_grows() {
        let states = StateArray::new(1).unwrap();
        states.use_huge_pages(4 << 20);
        for pages in [GIB / 4, GIB / 2 - 1] {
            states.grow(pages).unwrap();
            assert_eq!(filled(&states), 0);
        }
        for pages in [GIB / 2, GIB] {
            states.grow(pages).unwrap();
            assert_eq!(found(filled(&states)), found(2 << 10), "{pages}");
        }
        // The first 2 MiB held memory when they were let be huge; the others were read first.
        let both = if reading_first_is_fine() {
            4 << 10..=4 << 10
        } else {
            // The kernel's own thread may have made it huge later (khugepaged).
            println!("here a huge page is none any more when it is written to after it was read");
            2 << 10..=4 << 10
        };
        for pages in [GIB * 3 / 2, 3 * GIB] {
            states.grow(pages).unwrap();
            let kib = found(filled(&states));
            assert!(kib.is_none_or(|kib| both.contains(&kib)), "{pages}: {kib:?}");
        }
        let first = states.get(PageId(7)).unwrap().load();
        assert_eq!(first.version(), 6, "the words were kept");
    }
}
