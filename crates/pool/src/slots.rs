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
//! A word that was damaged may name a slot of another page, or one that there is not. The slots
//! have a record of their own of the pages in them (`slot_owners.rs`), which every thread asks that
//! locks a page (`residence/slot_check.rs`). Optimistic readers do not ask it. So there are
//! addresses for every number that fits the word. Beyond the last slot these readers find zeros.
//!
//! Slots and the surface share the pool's memory ([`Memory`]). A slot has memory from its first use
//! on, free or not. If pages on the surface need that memory, free slots lose theirs (`trim`), and
//! get new memory when they are needed again. A huge page is split before one of its slots loses
//! its memory, and stays split. So pages take the slots of split chunks last, and the surface takes
//! memory from these first.
//!
//! A huge page is registered with the device until it is split: reads into it cost less
//! (`device/uring_prompt_reads.rs`).
//!
//! A pool that becomes smaller *vacates* chunks (`pool/resize.rs`): it keeps slots of theirs apart
//! that are free, or become free, and moves the pages from the others to slots of other chunks.
//! Then it returns the memory to the kernel. A chunk without memory is one huge page again at its
//! next touch.

#![allow(unsafe_code)]
#![cfg_attr(
    feature = "model",
    expect(clippy::modulo_one, clippy::reversed_empty_ranges, reason = "the model has one list")
)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64 as Setting, AtomicUsize};

use vellum_vm::{
    Advice, BackendChoice, Entry, HUGE_PAGES, PAGE_SIZE, PageRange, ReserveError, Surface,
};

use crate::device::{Device, RegisteredMemory};
use crate::error::PoolError;
use crate::page::state::SlotMask;
use crate::page::{PageId, PageRef};
use crate::slot_owners::SlotOwners;
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
    /// The number of slots.
    count: u64,
    owners: SlotOwners,
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
    /// For each chunk: whether the pool vacates it.
    vacating: Box<[AtomicBool]>,
    /// Free slots of chunks that the pool vacates.
    free_in_vacating: FreeList,
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
    /// Chunks that had memory once, and whose slots are in no list.
    chunks: Vec<usize>,
    /// The frames before this one belong to slots that have memory, or are in `slots`, or to
    /// `chunks`.
    touched: u64,
    /// Frames of all slots.
    end: u64,
}

impl Absent {
    /// The slots of the next chunk without memory go to lists.
    fn take_chunk(&mut self) {
        if self.chunks.pop().is_none() {
            self.touched += HUGE_PAGES;
        }
    }
}

/// A list of free slots.
#[repr(align(128))]
#[derive(Debug, Default)]
struct FreeList(Mutex<Vec<u64>>);

/// The frames that have memory: those of slots, and those of pages on the surface.
#[repr(align(128))]
#[derive(Debug)]
struct Memory {
    capacity: Setting,
    /// Upper 32 bits: frames of slots, free or not. Lower 32 bits: frames on the surface.
    used: AtomicU64,
}

/// A frame of a slot, and one on the surface, in [`Memory::used`].
const OF_SLOT: u64 = 1 << 32;
const ON_SURFACE: u64 = 1;

impl Memory {
    fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    fn used(&self) -> u64 {
        let used = self.used.load(Ordering::Relaxed);
        used / OF_SLOT + used % OF_SLOT
    }

    /// How many frames too many there would be with `more`.
    fn missing(&self, more: u64) -> u64 {
        (self.used() + more).saturating_sub(self.capacity())
    }

    /// Counts `frames` more, in one of the halves, if there is room for them.
    fn try_add(&self, frames: u64, unit: u64) -> bool {
        let mut used = self.used.load(Ordering::Relaxed);
        while used / OF_SLOT + used % OF_SLOT + frames <= self.capacity() {
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

/// Chunks that the pool vacates, and their slots that are kept apart.
#[derive(Debug, Default)]
#[must_use = "the slots are kept apart until it ends"]
pub(crate) struct VacatingChunks(BTreeMap<usize, VacatingSlots>);

/// Slots of one of these chunks. The others have pages, or threads have taken them for some.
#[derive(Debug, Default)]
struct VacatingSlots {
    /// Free slots with memory.
    free: Vec<u64>,
    /// Slots without memory.
    absent: Vec<u64>,
    /// The number of slots whose memory is to be returned: of all that have some, or of a part.
    wanted: usize,
}

impl VacatingSlots {
    fn are_enough(&self) -> bool {
        self.free.len() >= self.wanted
    }
}

impl VacatingChunks {
    fn of(&mut self, slot: u64) -> &mut VacatingSlots {
        self.0.entry(chunk_of(slot)).or_default()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The chunk of a slot.
fn chunk_of(slot: u64) -> usize {
    ((slot - 1) / HUGE_PAGES) as usize
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
    /// Slots of `frames` frames each, for pages of a device, in a pool that has `capacity` frames
    /// and may have `most`. `huge` asks the kernel for huge pages.
    ///
    /// # Errors
    /// [`PoolError::TooManySlots`], or no address space.
    pub(crate) fn new(
        frames: u32,
        (capacity, most): (u64, u64),
        use_when: UseSlots,
        huge: bool,
        device: &dyn Device,
    ) -> Result<Slots, PoolError> {
        if most > SlotMask::FRAMES_MAX {
            return Err(PoolError::TooManySlots { frames: most, max: SlotMask::FRAMES_MAX });
        }
        let frames = u64::from(frames.max(1));
        let end = most - most % frames;
        let mask = SlotMask::for_frames(end);
        // Mapped memory for every number that fits the word, which may be damaged.
        let surface = Surface::reserve(mask.largest() + frames, BackendChoice::Auto)
            .map_err(|source| PoolError::NoSlots { slots: end / frames, source })?;
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
            mask,
            count: end / frames,
            owners: SlotOwners::new(end)?,
            use_when,
            are_used: AtomicBool::new(use_when == UseSlots::Always),
            memory: Memory { capacity: Setting::new(capacity), used: AtomicU64::new(0) },
            absent: Mutex::new(Absent { slots: Vec::new(), chunks: Vec::new(), touched: 0, end }),
            huge: (0..chunks).map(|_| AtomicBool::new(true)).collect(),
            vacating: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            free_in_vacating: FreeList::default(),
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
        let capacity = self.memory.capacity();
        let outgrown = pages > capacity - capacity / 16;
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

    /// The number of slots.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Whether a page is in the slot, or with 0 on the surface, by the record. False of a slot that
    /// there is not.
    #[inline(always)]
    pub(crate) fn is_of(&self, slot: u64, page: PageId) -> bool {
        self.owners.is_of(slot, page)
    }

    /// Makes room in the record for a file of so many pages; never shrinks.
    pub(crate) fn grow_record(&self, pages: u64) -> Result<(), ReserveError> {
        self.owners.grow(pages)
    }

    /// Notes that a page is in a slot which the caller has taken for it, or with 0 on the surface.
    pub(crate) fn assign(&self, slot: u64, page: PageId) {
        self.owners.set(slot, page);
    }

    /// Notes that the page, which the caller holds exclusively and which is in this slot, is
    /// resident.
    pub(crate) fn admit(&self, slot: u64, page: PageId) {
        self.owners.admit(slot, page);
    }

    /// Whether a page is in this slot and resident, by the record.
    pub(crate) fn is_admitted(&self, slot: u64, page: PageId) -> bool {
        self.owners.is_admitted(slot, page)
    }

    /// The positions of an iteration over the resident pages in slots. Not each has a slot.
    pub(crate) fn positions(&self) -> usize {
        self.owners.positions()
    }

    /// The position of a slot.
    pub(crate) fn position_of(&self, slot: u64) -> usize {
        self.owners.position_of(slot)
    }

    /// The resident page at a position of the iteration, if there is one.
    pub(crate) fn resident_at(&self, position: usize) -> Option<PageRef> {
        let page = self.owners.resident_at(position)?;
        Some(PageRef { id: page, frames: self.frames as u32 })
    }

    /// How many positions without a page there are from one on, as far as the record tells without
    /// a look at each.
    pub(crate) fn empty_from(&self, position: usize) -> usize {
        self.owners.empty_from(position)
    }

    /// The slot that a page is in by the record, which the caller holds exclusively; 0 if it is on
    /// the surface. Slow.
    pub(crate) fn find(&self, page: PageId) -> Option<u64> {
        self.owners.find(page)
    }

    /// Notes that a page leaves the slot that it is in, or with 0 the surface. The caller holds the
    /// page exclusively, and gives the slot back when it has changed the page's word.
    pub(crate) fn vacate(&self, slot: u64, page: PageId) {
        self.owners.clear(slot, page);
    }

    /// The memory of all slots, and addresses behind them for numbers that are none.
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
        let absent = lock(&self.absent);
        let touched = self.huge.iter().take((absent.touched / HUGE_PAGES) as usize);
        let huge = touched.filter(|huge| huge.load(Ordering::Relaxed)).count();
        (huge - absent.chunks.len()) as u64
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
        let place = match absent.chunks.last() {
            Some(chunk) => *chunk as u64 * HUGE_PAGES,
            None => absent.touched,
        };
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
            absent.take_chunk();
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
            absent.take_chunk();
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
            self.registered.add(self.range_of(chunk_of(first)));
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
        if self.is_vacating(slot) {
            let mut list = lock(&self.free_in_vacating.0);
            // Under the lock, so that no slot comes to the list after the end.
            if self.is_vacating(slot) {
                return list.push(slot);
            }
        }
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
    pub(crate) fn trim(&self, missing: u64) -> bool {
        let mut absent = lock(&self.absent);
        let few = missing.div_ceil(self.frames) as usize;
        let least = if self.huge.is_empty() { 0 } else { TRIMMED_MIN / self.frames };
        let wanted = few.max(least as usize);
        let mut victims = self.pop_small(wanted);
        if victims.len() < few {
            self.sort_free();
            victims.append(&mut self.pop_small(wanted - victims.len()));
        }
        while victims.len() < few && self.split_one() {
            victims.append(&mut self.pop_small(wanted - victims.len()));
        }
        self.release_slots(victims, &mut absent) > 0
    }

    /// Takes the memory of free slots in small pages that are in no list. Slots whose memory the
    /// kernel does not take go back to lists. Returns how many frames it has taken.
    fn release_slots(&self, victims: Vec<u64>, absent: &mut Absent) -> u64 {
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
        taken
    }

    /// Has each free slot in the list where it belongs. A thread that gives a slot back may have
    /// looked just before the chunk was split.
    fn sort_free(&self) {
        if self.huge.is_empty() {
            return;
        }
        for list in &self.free {
            let split: Vec<u64> =
                lock(&list.0).extract_if(.., |slot| !self.is_huge(*slot)).collect();
            lock(&self.free_in_split.0).extend(split);
        }
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
                *counts.entry(chunk_of(*slot)).or_default() += 1;
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
            let here = list.extract_if(.., |slot| chunk_of(*slot) == chunk).collect::<Vec<_>>();
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

    /// So many frames may have memory from now on. Those that have more keep it until
    /// [`trim`](Self::trim) takes it.
    pub(crate) fn set_capacity(&self, frames: u64) {
        self.memory.capacity.store(frames, Ordering::Relaxed);
    }

    /// How many frames more than `frames` have memory.
    pub(crate) fn excess(&self, frames: u64) -> u64 {
        self.memory.used().saturating_sub(frames)
    }

    /// Begins to vacate chunks, so that only `frames` frames have memory: whole ones, as long as
    /// there is at least so much too much, and a part of one for the rest. Takes those from which
    /// the fewest pages have to move, and for the rest one that is split already, if there is one.
    pub(crate) fn begin_vacating(&self, frames: u64) -> VacatingChunks {
        let mut absent = lock(&self.absent);
        let chunks = ((absent.touched / HUGE_PAGES) as usize).min(self.huge.len());
        // Of each chunk: the slots that have pages, and those that have memory.
        let (mut pages, mut with_memory) =
            (vec![self.chunk_slots(); chunks], vec![self.chunk_slots(); chunks]);
        for slot in absent.slots.iter().filter(|slot| chunk_of(**slot) < chunks) {
            pages[chunk_of(*slot)] -= 1;
            with_memory[chunk_of(*slot)] -= 1;
        }
        absent.chunks.iter().for_each(|chunk| with_memory[*chunk] = 0);
        for list in self.lists() {
            for slot in lock(&list.0).iter().filter(|slot| chunk_of(**slot) < chunks) {
                pages[chunk_of(*slot)] = pages[chunk_of(*slot)].saturating_sub(1);
            }
        }
        let mut order: Vec<usize> = (0..chunks).filter(|chunk| with_memory[*chunk] > 0).collect();
        order.sort_by_key(|chunk| pages[*chunk]);

        let mut begun = VacatingChunks::default();
        let mut begin = |chunk: usize, wanted| {
            self.vacating[chunk].store(true, Ordering::Relaxed);
            begun.0.insert(chunk, VacatingSlots { wanted, ..VacatingSlots::default() });
        };
        let mut excess = self.excess(frames).div_ceil(self.frames) as usize;
        order.retain(|&chunk| {
            let is_whole = with_memory[chunk] <= excess;
            if is_whole {
                excess -= with_memory[chunk];
                begin(chunk, with_memory[chunk]);
            }
            !is_whole
        });
        let is_split = |chunk: &&usize| !self.huge[**chunk].load(Ordering::Relaxed);
        let rest = order.iter().find(is_split).or(order.first()).filter(|_| excess > 0);
        rest.into_iter().for_each(|chunk| begin(*chunk, excess));

        for slot in absent.slots.extract_if(.., |slot| self.is_vacating(*slot)) {
            begun.of(slot).absent.push(slot);
        }
        begun
    }

    /// Takes a free slot of a chunk that stays, for a page that moves there from one that goes. The
    /// page keeps its frames of the budget. None if there is none at this moment.
    pub(crate) fn take_elsewhere(&self) -> Option<u64> {
        loop {
            match self.take(false)? {
                slot if self.is_vacating(slot) => self.give_back(slot),
                slot => return Some(slot),
            }
        }
    }

    /// Keeps those slots apart that are free now. Returns whether they are enough.
    pub(crate) fn keep_apart(&self, vacating: &mut VacatingChunks) -> bool {
        for list in self.lists() {
            let free: Vec<u64> =
                lock(&list.0).extract_if(.., |slot| self.is_vacating(*slot)).collect();
            free.into_iter().for_each(|slot| vacating.of(slot).free.push(slot));
        }
        vacating.0.values().all(VacatingSlots::are_enough)
    }

    /// Returns the memory of the slots to the kernel that were kept apart, where they are enough.
    /// The others are in use again.
    pub(crate) fn end_vacating(&self, vacating: VacatingChunks) {
        let mut absent = lock(&self.absent);
        for (chunk, mut slots) in vacating.0 {
            let is_vacant = slots.free.len() + slots.absent.len() == self.chunk_slots();
            if is_vacant && self.release_chunk(chunk, slots.free.len()) {
                match self.is_huge_chunk(chunk) {
                    true => {
                        absent.chunks.push(chunk);
                        slots = VacatingSlots::default();
                    }
                    false => slots.absent.append(&mut slots.free),
                }
            } else if slots.are_enough() && (!self.is_huge_chunk(chunk) || self.split(chunk)) {
                let victims = slots.free.split_off(slots.free.len() - slots.wanted);
                self.release_slots(victims, &mut absent);
            }
            self.vacating[chunk].store(false, Ordering::Relaxed);
            absent.slots.append(&mut slots.absent);
            slots.free.into_iter().for_each(|slot| self.give_back(slot));
        }
        let late = std::mem::take(&mut *lock(&self.free_in_vacating.0));
        late.into_iter().for_each(|slot| self.give_back(slot));
    }

    /// Returns the memory of a chunk, of which `count` slots have some, to the kernel. False if the
    /// kernel does not take it. Afterwards the chunk is a huge page at its next touch, unless the
    /// kernel refuses that.
    fn release_chunk(&self, chunk: usize, count: usize) -> bool {
        let range = self.range_of(chunk);
        let _registering = lock(&self.registering);
        self.registered.remove(range);
        let mut entry = [Entry::new(range)];
        // SAFETY: the slots of the chunk are free and in no list, so that only optimistic readers
        // look at them, and those discard what they read.
        unsafe { self.surface.release(&mut entry) };
        let was_huge = self.huge[chunk].load(Ordering::Relaxed);
        if entry[0].result.is_err() {
            if was_huge {
                self.registered.add(range);
            }
            return false;
        }
        self.memory.remove(count as u64 * self.frames, OF_SLOT);
        let is_huge = was_huge || self.surface.advise(range, Advice::HugePage).is_ok();
        self.huge[chunk].store(is_huge, Ordering::Relaxed);
        true
    }

    /// All lists of free slots.
    fn lists(&self) -> impl Iterator<Item = &FreeList> {
        self.free.iter().chain([&self.free_in_split, &self.free_in_vacating])
    }

    /// Slots of a chunk.
    fn chunk_slots(&self) -> usize {
        (HUGE_PAGES / self.frames) as usize
    }

    /// Whether the pool vacates the chunk of a slot.
    pub(crate) fn is_vacating(&self, slot: u64) -> bool {
        slot > 0 && self.vacating.get(chunk_of(slot)).is_some_and(|it| it.load(Ordering::Relaxed))
    }

    fn is_huge(&self, slot: u64) -> bool {
        self.is_huge_chunk(chunk_of(slot))
    }

    fn is_huge_chunk(&self, chunk: usize) -> bool {
        self.huge.get(chunk).is_some_and(|huge| huge.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(feature = "model")))]
#[allow(clippy::unwrap_used)] // helpers of tests may, as tests may
mod tests {
    use super::*;
    use crate::device::MemoryDevice;

    fn slots(frames: u32, capacity: u64, when: UseSlots, huge: bool) -> Result<Slots, PoolError> {
        Slots::new(frames, (capacity, capacity), when, huge, &MemoryDevice::new())
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

    /// As if the chunk had been split while a thread gave one of its slots back.
    #[test]
    fn a_free_slot_in_the_wrong_list_gives_up_its_memory() {
        let slots = slots(1, 2 * HUGE_PAGES, UseSlots::Always, true).unwrap();
        if slots.huge.is_empty() {
            return println!("skipped: no huge pages here");
        }
        let taken: Vec<u64> = (0..2 * HUGE_PAGES).map(|_| take_and_fill(&slots)).collect();
        let late = taken[0];
        taken[1..100].iter().for_each(|slot| slots.give_back(*slot));
        assert!(slots.lend(99) && !slots.is_huge(late));
        assert!(!slots.lend(1), "nothing is free");
        lock(&slots.free[0].0).push(late);
        assert!(slots.lend(1));
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
