//! Slots: memory for pages that stays mapped, in pools that translate by table.
//!
//! A *slot* is memory for one page. The state word of a resident page says in which slot the page
//! is (`page/state.rs`): that is the table. So a hit is the word, the page's bytes, and the word
//! again. A miss and an eviction only change the numbers in state words, and the kernel has no part
//! in them but the read: no page fault, no zeroing, no release, no flush of TLBs. The slots lie in
//! huge pages where the kernel has them, so that small pages have the reach of large ones in the
//! TLB, also in a full pool.
//!
//! This is the translation of Calico (arXiv 2604.00423), with two changes. The version in the word
//! never starts afresh, so that a reader cannot take a page that came back to its slot for the one
//! that it has read. And a page may lie at its own place on the surface instead: its word names no
//! slot then. Pages of other lengths than a slot's always lie there, contiguous as ever. If the
//! caller leaves the choice to the pool, all pages do until the file has *outgrown* the pool: until
//! it is longer than fifteen sixteenths of it. An address on the surface does not depend on the
//! word, so a hit waits for less.
//!
//! A slot is free, or one page is in it. A thread takes a slot together with the frames of the
//! budget, faults the page in while it holds the page exclusively, and writes the slot's number
//! into the word. The thread that evicts or frees the page first changes the word, then gives the
//! slot back, and then the frames. An optimistic reader with an older word may read the bytes of
//! another page. It finds that the version has changed.
//!
//! Slots and the surface share the pool's memory ([`Memory`]). A slot has memory from its first use
//! on, free or not. If pages on the surface need that memory, free slots lose theirs (`trim`), and
//! get new memory when they are needed again. A huge page is split before one of its slots loses
//! its memory, and stays split. So pages take the slots of split chunks last, and the surface takes
//! memory from these first.
//!
//! A huge page is registered with the device until it is split: reads into it cost less
//! (`device/uring_batch.rs`).

#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use vellum_vm::{Advice, BackendChoice, Entry, HUGE_PAGES, PAGE_SIZE, PageRange, Surface};

use crate::device::{Device, RegisteredMemory};
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::SlotMask;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// Lists of free slots, so that threads share few of them.
const LISTS: usize = if cfg!(feature = "model") { 1 } else { 16 };

/// A thread steals half of a list, but so many slots at most.
const STOLEN_MAX: usize = 16;

/// Slots in huge pages lose the memory of so many frames at once, if so many are free.
const TRIMMED_MIN: u64 = 64;

/// See the module's documentation. The number of a slot is that of its first frame, from 1 on.
#[derive(Debug)]
pub(crate) struct Slots {
    /// What the device knows: chunks that are huge. Dropped before the memory is unmapped.
    registered: RegisteredMemory,
    /// All slots, one after the other.
    surface: Surface,
    /// Frames of a slot.
    frames: u64,
    mask: SlotMask,
    use_when: UseSlots,
    /// Whether new pages lie in slots.
    are_used: AtomicBool,
    memory: Memory,
    /// Slots without memory. Locked before a list of free slots, of which a thread locks one at a
    /// time.
    absent: Mutex<Absent>,
    /// For each chunk of 512 frames: whether it is one huge page, or will be at the first touch.
    huge: Box<[AtomicBool]>,
    /// Held while a chunk is registered with the device, or is split.
    registering: Mutex<()>,
    /// Free slots with memory, but for those in chunks that are huge no more.
    free: [FreeList; LISTS],
    /// Free slots with memory in chunks that are huge no more.
    free_in_split: FreeList,
}

/// When pages lie in slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UseSlots {
    Always,
    /// Pages that become resident while the file is longer than fifteen sixteenths of the pool.
    WhenOutgrown,
}

/// Slots without memory.
#[derive(Debug)]
struct Absent {
    /// Slots that had memory once, or whose chunk has no huge page.
    slots: Vec<u64>,
    /// The frames before this one belong to slots that have memory, or are in `slots`.
    touched: u64,
    /// Frames of all slots.
    end: u64,
}

/// A list of free slots.
#[repr(align(128))]
#[derive(Debug, Default)]
struct FreeList(Mutex<Vec<u64>>);

/// The frames that have memory: those of slots, and those of pages on the surface.
#[repr(align(128))]
#[derive(Debug)]
struct Memory {
    capacity: u64,
    /// Upper 32 bits: frames of slots, free or not. Lower 32 bits: frames on the surface.
    used: AtomicU64,
}

/// A frame of a slot, and one on the surface, in [`Memory::used`].
const OF_SLOT: u64 = 1 << 32;
const ON_SURFACE: u64 = 1;

impl Memory {
    /// How many frames too many there would be with `more`.
    fn missing(&self, more: u64) -> u64 {
        let used = self.used.load(Ordering::Relaxed);
        (used / OF_SLOT + used % OF_SLOT + more).saturating_sub(self.capacity)
    }

    /// Counts `frames` more, in one of the halves, if there is room for them.
    fn try_add(&self, frames: u64, unit: u64) -> bool {
        let mut used = self.used.load(Ordering::Relaxed);
        while used / OF_SLOT + used % OF_SLOT + frames <= self.capacity {
            let more = used + frames * unit;
            let (done, failed) = (Ordering::AcqRel, Ordering::Relaxed);
            match self.used.compare_exchange_weak(used, more, done, failed) {
                Ok(_) => return true,
                Err(now) => used = now,
            }
        }
        false
    }

    fn remove(&self, frames: u64, unit: u64) {
        self.used.fetch_sub(frames * unit, Ordering::AcqRel);
    }
}

std::thread_local! {
    /// The list at which this thread begins; `LISTS` before its first look.
    static OWN_LIST: Cell<usize> = const { Cell::new(LISTS) };
}

/// The list of the next thread that asks for one.
static NEXT_LIST: AtomicUsize = AtomicUsize::new(0);

fn own_list() -> usize {
    if OWN_LIST.get() == LISTS {
        OWN_LIST.set(NEXT_LIST.fetch_add(1, Ordering::Relaxed) % LISTS);
    }
    OWN_LIST.get()
}

impl Slots {
    /// Slots of `frames` frames each, as many as a pool of `capacity` frames has room for, for
    /// pages of a device. `huge` asks the kernel for huge pages.
    ///
    /// # Errors
    /// [`PoolError::TooManySlots`], or no address space.
    pub(crate) fn new(
        frames: u32,
        capacity: u64,
        use_when: UseSlots,
        huge: bool,
        device: &dyn Device,
    ) -> Result<Slots, PoolError> {
        if capacity > SlotMask::FRAMES_MAX {
            return Err(PoolError::TooManySlots { frames: capacity, max: SlotMask::FRAMES_MAX });
        }
        let frames = u64::from(frames.max(1));
        let end = capacity - capacity % frames;
        let surface = Surface::reserve(end, BackendChoice::Auto)?;
        // No read needs to populate a slot: it has memory, or gets it by the read.
        surface.claimed_by_owner();
        let chunks = match huge && HUGE_PAGES.is_multiple_of(frames) && surface.can_collapse() {
            true => end / HUGE_PAGES,
            false => 0,
        };
        let in_chunks = PageRange::new(0, chunks * HUGE_PAGES);
        let advised = surface.advise(in_chunks, Advice::HugePage);
        let chunks = if advised.is_ok() { chunks } else { 0 };
        Ok(Slots {
            registered: device.registered_memory(&surface),
            surface,
            frames,
            mask: SlotMask::for_frames(end),
            use_when,
            are_used: AtomicBool::new(use_when == UseSlots::Always),
            memory: Memory { capacity, used: AtomicU64::new(0) },
            absent: Mutex::new(Absent { slots: Vec::new(), touched: 0, end }),
            huge: (0..chunks).map(|_| AtomicBool::new(true)).collect(),
            registering: Mutex::new(()),
            free: std::array::from_fn(|_| FreeList::default()),
            free_in_split: FreeList::default(),
        })
    }

    /// Whether pages that become resident now lie in slots, if they have the length of these.
    pub(crate) fn are_used(&self) -> bool {
        self.are_used.load(Ordering::Relaxed)
    }

    /// Whether a page that becomes resident now lies in a slot.
    pub(crate) fn suit(&self, page: PageRef) -> bool {
        u64::from(page.frames) == self.frames && self.are_used()
    }

    /// Whether pages lie in slots only once the file has outgrown the pool.
    pub(crate) fn are_optional(&self) -> bool {
        self.use_when == UseSlots::WhenOutgrown
    }

    /// Notes the length of the file.
    pub(crate) fn note_file_pages(&self, pages: u64) {
        let outgrown = pages > self.memory.capacity - self.memory.capacity / 16;
        self.are_used.store(!self.are_optional() || outgrown, Ordering::Relaxed);
    }

    /// Frames of a slot.
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// The part of the state words that names slots.
    pub(crate) fn mask(&self) -> SlotMask {
        self.mask
    }

    /// The memory of all slots.
    pub(crate) fn surface(&self) -> &Surface {
        &self.surface
    }

    /// The place of a slot's first page on [`surface`](Self::surface).
    pub(crate) fn place(&self, slot: u64) -> u64 {
        slot - 1
    }

    /// The address of a slot.
    #[inline(always)]
    pub(crate) fn address(&self, slot: u64) -> *mut u8 {
        self.surface.base().as_ptr().wrapping_add((slot as usize).wrapping_sub(1) * PAGE_SIZE)
    }

    /// How many chunks of 512 frames were touched and not split since: huge pages, if the kernel
    /// had some.
    pub(crate) fn huge_chunks(&self) -> u64 {
        let touched = lock(&self.absent).touched / HUGE_PAGES;
        let touched = self.huge.iter().take(touched as usize);
        touched.filter(|huge| huge.load(Ordering::Relaxed)).count() as u64
    }

    /// Takes a free slot, for a thread that has taken its frames out of the budget. None if there
    /// is none: then other threads hold the frames, or the surface has their memory. If
    /// `may_break`, a chunk that has no room for a huge page is used in small pages rather than
    /// that.
    pub(crate) fn take(&self, may_break: bool) -> Option<u64> {
        let own = own_list();
        let taken = lock(&self.free[own].0).pop();
        taken
            .or_else(|| self.steal(own))
            .or_else(|| lock(&self.free_in_split.0).pop())
            .or_else(|| self.take_absent(own, may_break))
    }

    /// Takes free slots from another thread's list: one for the caller, and some for its list.
    fn steal(&self, own: usize) -> Option<u64> {
        for other in 1..LISTS {
            let mut other = lock(&self.free[(own + other) % LISTS].0);
            let rest = other.len() - (other.len().div_ceil(2)).min(STOLEN_MAX);
            let mut stolen = other.split_off(rest);
            drop(other);
            if let Some(slot) = stolen.pop() {
                lock(&self.free[own].0).append(&mut stolen);
                return Some(slot);
            }
        }
        None
    }

    /// Takes a slot that has no memory, which it gets at its first touch.
    fn take_absent(&self, own: usize, may_break: bool) -> Option<u64> {
        if self.memory.missing(self.frames) > 0 {
            return None;
        }
        let mut absent = lock(&self.absent);
        let place = absent.touched;
        let first = place + 1;
        let others = 1..HUGE_PAGES / self.frames;
        let others = others.rev().map(|number| first + number * self.frames);
        let huge = match self.huge.get((place / HUGE_PAGES) as usize) {
            Some(huge) => huge,
            None if absent.slots.is_empty() && place < absent.end => {
                return self.memory.try_add(self.frames, OF_SLOT).then(|| {
                    absent.touched += self.frames;
                    first
                });
            }
            None => return self.pop_absent(&mut absent),
        };
        if self.memory.try_add(HUGE_PAGES, OF_SLOT) {
            absent.touched += HUGE_PAGES;
            lock(&self.free[own].0).extend(others);
            drop(absent);
            self.register(first);
            return Some(first);
        }
        if absent.slots.is_empty() && may_break {
            let range = PageRange::new(place, HUGE_PAGES);
            if let Err(error) = self.surface.advise(range, Advice::NoHugePage) {
                tracing::warn!("the pool may take 2 MiB more than its size: {error}");
            }
            huge.store(false, Ordering::Relaxed);
            absent.touched += HUGE_PAGES;
            absent.slots.extend(others.chain([first]));
        }
        self.pop_absent(&mut absent)
    }

    /// Touches a chunk, of which the caller has the first slot, and registers it with the device if
    /// the kernel had a huge page for it. The memory of a huge page stays until it is split.
    fn register(&self, first: u64) {
        // SAFETY: the slot is mapped, and the caller's; what optimistic readers read is discarded.
        unsafe { self.address(first).write_volatile(0) };
        if !self.surface.is_huge(self.place(first)).unwrap_or(false) {
            return;
        }
        let _registering = lock(&self.registering);
        if self.is_huge(first) {
            self.registered.add(self.range_of(self.chunk(first)));
        }
    }

    fn range_of(&self, chunk: usize) -> PageRange {
        PageRange::new(chunk as u64 * HUGE_PAGES, HUGE_PAGES)
    }

    fn pop_absent(&self, absent: &mut Absent) -> Option<u64> {
        let has_room = !absent.slots.is_empty() && self.memory.try_add(self.frames, OF_SLOT);
        has_room.then(|| absent.slots.pop())?
    }

    /// Gives a slot back that no page is in any more. The caller puts its frames back into the
    /// budget afterwards.
    pub(crate) fn give_back(&self, slot: u64) {
        let is_in_split = !self.huge.is_empty() && !self.is_huge(slot);
        let list = if is_in_split { &self.free_in_split } else { &self.free[own_list()] };
        lock(&list.0).push(slot);
    }

    /// Counts the memory of a page on the surface. The caller has taken its frames out of the
    /// budget. If no memory is left, free slots have at least as much, and give it up. False if
    /// the kernel does not take it from them now, or if other threads have just taken these slots.
    pub(crate) fn lend(&self, frames: u32) -> bool {
        let frames = u64::from(frames);
        while !self.memory.try_add(frames, ON_SURFACE) {
            let missing = self.memory.missing(frames);
            if missing > 0 && !self.trim(missing) {
                return false;
            }
        }
        true
    }

    /// The memory of pages on the surface was released.
    pub(crate) fn end_loan(&self, frames: u64) {
        self.memory.remove(frames, ON_SURFACE);
    }

    /// Takes the memory of free slots that have `missing` frames, and of some more. False if the
    /// kernel does not take it now.
    fn trim(&self, missing: u64) -> bool {
        let mut absent = lock(&self.absent);
        let few = missing.div_ceil(self.frames) as usize;
        let least = if self.huge.is_empty() { 0 } else { TRIMMED_MIN / self.frames };
        let wanted = few.max(least as usize);
        let mut victims = self.pop_small(wanted);
        while victims.len() < few && self.split_one() {
            victims.append(&mut self.pop_small(wanted - victims.len()));
        }
        let range = |slot: &u64| PageRange::new(self.place(*slot), self.frames);
        let mut entries: Vec<Entry> = victims.iter().map(|slot| Entry::new(range(slot))).collect();
        // SAFETY: the slots are free and in no list, so that only optimistic readers look at them,
        // and those discard what they read.
        unsafe { self.surface.release(&mut entries) };
        let mut taken = 0;
        for (slot, entry) in victims.into_iter().zip(entries) {
            match entry.result {
                Ok(()) => {
                    absent.slots.push(slot);
                    taken += self.frames;
                }
                Err(_) => self.give_back(slot),
            }
        }
        self.memory.remove(taken, OF_SLOT);
        taken > 0
    }

    /// Takes up to `most` free slots in small pages.
    fn pop_small(&self, most: usize) -> Vec<u64> {
        let lists = match self.huge.is_empty() {
            true => &self.free[..],
            false => std::slice::from_ref(&self.free_in_split),
        };
        let mut popped = Vec::new();
        for list in lists {
            let mut list = lock(&list.0);
            let rest = list.len().saturating_sub(most - popped.len());
            popped.append(&mut list.split_off(rest));
        }
        popped
    }

    /// Splits the huge page with the most free slots. False if there is none, or if the kernel
    /// splits none of them now, because of I/O.
    fn split_one(&self) -> bool {
        let mut counts: BTreeMap<usize, u64> = BTreeMap::new();
        for list in &self.free {
            for slot in lock(&list.0).iter().filter(|slot| self.is_huge(**slot)) {
                *counts.entry(self.chunk(*slot)).or_default() += 1;
            }
        }
        let mut chunks: Vec<(u64, usize)> =
            counts.into_iter().map(|(chunk, count)| (count, chunk)).collect();
        chunks.sort_unstable();
        let Some((_, chunk)) = chunks.into_iter().rev().find(|(_, chunk)| self.split(*chunk))
        else {
            return false;
        };
        for list in &self.free {
            let mut list = lock(&list.0);
            let here = list.extract_if(.., |slot| self.chunk(*slot) == chunk).collect::<Vec<_>>();
            drop(list);
            lock(&self.free_in_split.0).extend(here);
        }
        true
    }

    fn split(&self, chunk: usize) -> bool {
        let range = self.range_of(chunk);
        let _registering = lock(&self.registering);
        // The kernel splits no page that it has pinned.
        self.registered.remove(range);
        let split = self.surface.advise(range, Advice::NoHugePage).is_ok()
            && self.surface.split(range.start).is_ok_and(|asked| asked.is_done());
        match split {
            true => self.huge[chunk].store(false, Ordering::Relaxed),
            false => self.registered.add(range),
        }
        split
    }

    fn chunk(&self, slot: u64) -> usize {
        (self.place(slot) / HUGE_PAGES) as usize
    }

    fn is_huge(&self, slot: u64) -> bool {
        self.huge.get(self.chunk(slot)).is_some_and(|huge| huge.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(feature = "model")))]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use super::*;
    use crate::device::MemoryDevice;

    fn slots(frames: u32, capacity: u64, when: UseSlots, huge: bool) -> Result<Slots, PoolError> {
        Slots::new(frames, capacity, when, huge, &MemoryDevice::new())
    }

    #[test]
    fn every_slot_is_taken_once_and_lies_within_the_memory() {
        let slots = slots(3, 32, UseSlots::Always, false).unwrap();
        let taken: Vec<u64> = (0..10).map(|_| slots.take(true).unwrap()).collect();
        assert_eq!(taken, (0..10).map(|slot| 1 + 3 * slot).collect::<Vec<_>>());
        let last = slots.place(taken[9]) + 3;
        assert!(last <= slots.surface().pages());
        assert_eq!(slots.address(taken[1]).addr() - slots.address(taken[0]).addr(), 3 * PAGE_SIZE);
        taken[3..5].iter().for_each(|slot| slots.give_back(*slot));
        let mut again = [slots.take(true).unwrap(), slots.take(true).unwrap()];
        again.sort_unstable();
        assert_eq!(again, [10, 13]);
    }

    #[test]
    fn a_thread_finds_what_others_have_given_back() {
        let slots = slots(1, 8, UseSlots::Always, false).unwrap();
        let taken: Vec<u64> = (0..8).map(|_| slots.take(true).unwrap()).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| taken.iter().for_each(|slot| slots.give_back(*slot)));
        });
        let mut again: Vec<u64> = (0..8).map(|_| slots.take(true).unwrap()).collect();
        again.sort_unstable();
        assert_eq!(again, taken);
    }

    #[test]
    fn a_pool_with_more_frames_than_words_can_name_is_refused() {
        let error = slots(1, SlotMask::FRAMES_MAX + 1, UseSlots::Always, false).unwrap_err();
        assert!(matches!(error, PoolError::TooManySlots { .. }), "{error}");
    }

    /// Frames that have memory, by the kernel's page tables.
    fn resident(slots: &Slots) -> u64 {
        let all = PageRange::new(0, slots.surface().pages());
        slots.surface().resident_pages(all).unwrap()
    }

    /// Takes a slot and touches it.
    fn take_and_fill(slots: &Slots) -> u64 {
        let slot = slots.take(true).unwrap();
        let bytes = slots.frames as usize * PAGE_SIZE;
        // SAFETY: the slot is the caller's, and it is mapped.
        unsafe { slots.address(slot).write_bytes(content(slot), bytes) };
        slot
    }

    /// Not zero: a split gives pages of zeros no memory of their own.
    fn content(slot: u64) -> u8 {
        (slot % 255) as u8 + 1
    }

    fn holds(slots: &Slots, slot: u64) -> bool {
        // SAFETY: as above.
        unsafe { slots.address(slot).read() == content(slot) }
    }

    #[test]
    fn free_slots_lose_their_memory_to_pages_on_the_surface() {
        let slots = slots(2, 32, UseSlots::Always, false).unwrap();
        let taken: Vec<u64> = (0..16).map(|_| take_and_fill(&slots)).collect();
        assert_eq!(resident(&slots), 32);
        taken[4..10].iter().for_each(|slot| slots.give_back(*slot));
        assert!(slots.lend(5), "six frames of slots go");
        assert_eq!(resident(&slots), 26);
        assert!(slots.lend(6));
        assert_eq!(resident(&slots), 20);
        assert!(!slots.lend(5), "no slot is free, and one frame is left");
        assert!(taken[..4].iter().chain(&taken[10..]).all(|slot| holds(&slots, *slot)));
        slots.end_loan(11);
        (0..6).for_each(|_| _ = take_and_fill(&slots));
        assert_eq!(resident(&slots), 32);
    }

    #[test]
    fn huge_pages_are_split_before_their_memory_goes() {
        // Three huge pages, and a rest.
        let capacity = 3 * HUGE_PAGES + 100;
        let slots = slots(1, capacity, UseSlots::Always, true).unwrap();
        if slots.huge.is_empty() {
            return println!("skipped: no huge pages here");
        }
        let first = take_and_fill(&slots);
        assert_eq!(resident(&slots), HUGE_PAGES, "one touch brings a huge page");
        assert!(slots.surface().is_huge(slots.place(first)).unwrap());
        let taken: Vec<u64> = (1..capacity).map(|_| take_and_fill(&slots)).collect();
        assert_eq!(resident(&slots), capacity);
        taken[..300].iter().for_each(|slot| slots.give_back(*slot));
        assert!(slots.lend(200));
        assert!(resident(&slots) <= capacity - 200);
        assert_eq!(slots.huge_chunks(), 2);
        assert!(taken[300..].iter().chain([&first]).all(|slot| holds(&slots, *slot)));
        (0..100).for_each(|_| _ = take_and_fill(&slots));
        assert!(!slots.lend(1), "nothing is free");
        assert!(resident(&slots) <= capacity - 200);
        slots.end_loan(200);
        (0..200).for_each(|_| _ = take_and_fill(&slots));
        assert_eq!(resident(&slots), capacity);
    }

    #[test]
    fn a_chunk_that_finds_no_room_for_a_huge_page_is_filled_slot_by_slot() {
        let slots = slots(1, 2 * HUGE_PAGES, UseSlots::Always, true).unwrap();
        if slots.huge.is_empty() {
            return println!("skipped: no huge pages here");
        }
        assert!(slots.lend(HUGE_PAGES as u32 + 12));
        (0..HUGE_PAGES - 12).for_each(|_| _ = take_and_fill(&slots));
        assert_eq!(resident(&slots), HUGE_PAGES - 12);
        assert_eq!(slots.huge_chunks(), 0);
    }
}
