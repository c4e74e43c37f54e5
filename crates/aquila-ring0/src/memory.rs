//! The guest's memory: it has the process' addresses.
//!
//! Ordinary memory is visible in *windows* of 1 GiB. A window is a memory slot of KVM and one entry
//! of the guest's page tables (or 512 entries, for processors without pages of that size), and it
//! is made when the guest first touches it. So the guest's tables say nothing about what is mapped:
//! `mmap`, `munmap`, `mprotect`, copies on write and huge pages stay the kernel's business, and KVM
//! follows. What the kernel forbids ends `KVM_RUN` with `EFAULT`. The exception is `PROT_EXEC`:
//! windows are executable.
//!
//! Guest-physical addresses are given out from 1 GiB upwards, so that what counts is the memory in
//! use, and not the addresses in use: processors have 39 to 52 bits of the former. The range from 3
//! to 4 GiB is left out: it has the APIC's page, and pages that KVM needs on Intel.
//!
//! The tables themselves are in an [`Arena`], which is a slot of its own, so that a table's
//! guest-physical address tells where the process sees it. Those with the entries of managed pages
//! are another slot, one after the other in the order of the addresses: an entry is found without a
//! walk.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::entry::PAGE;
use crate::error::{Error, Result};
use crate::sys::{BlockedSignals, keeping_errno};

const GIB: u64 = 1 << 30;
const WINDOW: u64 = GIB;

/// Addresses that a program can have: below half of the address space, without the last page.
/// KVM refuses slots that end beyond. (A program gets others only if it asks for 57-bit addresses.)
pub(crate) const END: u64 = 0x7fff_ffff_f000;

/// The first addresses are never mapped, in no table and no slot, so that an access by a null
/// pointer is a fault, and not one to a device that the guest does not have. The kernel does not
/// map them either.
const START: u64 = 0x1_0000;

/// The arena's guest-physical address, and its size. It takes memory only where it is used.
const ARENA_PLACE: u64 = GIB;
const ARENA: u64 = GIB;

/// Bytes of managed addresses, which begin at a multiple of that: one entry of the highest table.
pub(crate) const MANAGED: u64 = 512 << 30;

/// Bytes of their entries, which take memory only where pages are.
const LEAVES: u64 = MANAGED / PAGE as u64 * 8;

/// Bytes of addresses that a table of level 1 has entries for.
const LEAF: u64 = 1 << 21;

/// What KVM keeps for itself on Intel processors, between 3 and 4 GiB.
pub(crate) const KVM_PAGES: u64 = 0xfffb_c000;

/// Bits of an entry in a page table.
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// In an entry that is not present: a thread is filling the page.
const FILLING: u64 = 1 << 9;

/// Memory of the process that is unmapped at the end.
#[derive(Debug)]
pub(crate) struct Mapped {
    start: u64,
    length: u64,
}

impl Mapped {
    /// Maps memory at a multiple of `alignment`, which reserves nothing.
    pub(crate) fn new(length: u64, alignment: u64, access: ProtFlags) -> Result<Self> {
        let doing = "mapping memory for a guest";
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let whole = length + alignment;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), whole as usize, access, flags) };
        let start = start.map_err(|errno| Error::of(doing, errno))?.addr() as u64;
        let aligned = start.next_multiple_of(alignment.max(PAGE as u64));
        unmap(start, aligned - start);
        unmap(aligned + length, start + whole - aligned - length);
        Ok(Self { start: aligned, length })
    }

    /// Maps a file's first bytes, shared with others.
    pub(crate) fn of_file(file: BorrowedFd<'_>, length: u64, writable: bool) -> Result<Self> {
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (access, flags) = (ProtFlags::READ | write, MapFlags::SHARED);
        let length = length.next_multiple_of(PAGE as u64);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), length as usize, access, flags, file, 0) };
        let start = start.map_err(|errno| Error::of("mapping a file for a cache", errno))?;
        Ok(Self { start: start.addr() as u64, length })
    }

    /// Maps a part of a file for reading in the place of reserved addresses. Returns whether that
    /// worked.
    pub(crate) fn file_over(
        range: &std::ops::Range<u64>,
        file: BorrowedFd<'_>,
        offset: u64,
        is_shared: bool,
    ) -> bool {
        let flags = if is_shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
        let (start, length) = (pointer(range.start), (range.end - range.start) as usize);
        let flags = flags | MapFlags::FIXED;
        // SAFETY: nothing but a reservation of the machine's is there.
        unsafe { rustix::mm::mmap(start, length, ProtFlags::READ, flags, file, offset) }.is_ok()
    }

    /// Reserves addresses again, in the place of [a file](Self::file_over). If the kernel has no
    /// memory for that, the file stays there.
    pub(crate) fn reserve_over(range: std::ops::Range<u64>) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let (start, length) = (pointer(range.start), (range.end - range.start) as usize);
        // SAFETY: nothing but a mapping that the program gives up is there.
        let _ = unsafe { rustix::mm::mmap_anonymous(start, length, ProtFlags::empty(), flags) };
    }

    /// The first address.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// The address after the last.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.length
    }

    /// Keeps the memory from forked children, which do not use it: they would copy what the process
    /// changes, as long as they live.
    pub(crate) fn keep_from_children(&self) -> Result<()> {
        keep_from_children(self.start, self.length)
    }

    /// Has the memory in small pages alone. Where the system has no large ones, that is so.
    pub(crate) fn use_small_pages(&self) {
        let advice = rustix::mm::Advice::LinuxNoHugepage;
        // SAFETY: the range is this mapping, whose bytes do not change.
        let _ = unsafe { rustix::mm::madvise(pointer(self.start), self.length as usize, advice) };
    }

    /// Takes access to the first page away.
    pub(crate) fn guard(&self) -> Result<()> {
        protect_page(self.start)
    }
}

/// Keeps a mapping of the process from forked children.
pub(crate) fn keep_from_children(start: u64, length: u64) -> Result<()> {
    let advice = rustix::mm::Advice::LinuxDontFork;
    // SAFETY: the range is a mapping of this process, whose bytes do not change.
    unsafe { rustix::mm::madvise(pointer(start), length as usize, advice) }
        .map_err(|errno| Error::of("keeping memory from children", errno))
}

/// Takes access to a page away that nothing uses yet.
pub(crate) fn protect_page(start: u64) -> Result<()> {
    // SAFETY: the page is the machine's own.
    let done =
        unsafe { rustix::mm::mprotect(pointer(start), PAGE, rustix::mm::MprotectFlags::empty()) };
    done.map_err(|errno| Error::of("guarding a stack", errno))
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(self.start, self.length);
    }
}

/// Unmaps a part of a mapping that its owner gives up.
fn unmap(start: u64, length: u64) {
    if length > 0 {
        // SAFETY: the owner no longer uses it.
        let _ = unsafe { rustix::mm::munmap(pointer(start), length as usize) };
    }
}

/// The memory at an address that the process has mapped.
pub(crate) fn pointer<T>(address: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Memory that the guest's own structures are made of: tables, segments, stacks. It is given out
/// page by page, and freed with the machine.
#[derive(Debug)]
struct Arena {
    memory: Mapped,
    next: AtomicU64,
}

impl Arena {
    /// Zeroed pages.
    fn pages(&self, count: usize) -> Result<u64> {
        let length = (count * PAGE) as u64;
        let start = self.next.fetch_add(length, Ordering::Relaxed);
        if start + length > self.memory.end() {
            return Err(Error::NoMemory { doing: "making a guest's page tables" });
        }
        Ok(start)
    }

    fn place(&self, address: u64) -> u64 {
        address - self.memory.start() + ARENA_PLACE
    }

    fn entry(&self, table: u64, index: u64) -> &AtomicU64 {
        let address = table - ARENA_PLACE + self.memory.start() + index * 8;
        // SAFETY: the tables are in this arena, which the process and the guest change by atomic
        // operations alone.
        unsafe { &*pointer::<AtomicU64>(address) }
    }
}

/// Memory slots and guest-physical addresses.
#[derive(Debug)]
struct Slots {
    next_slot: u32,
    slots: u32,
    next_place: u64,
    end: u64,
}

impl Slots {
    /// Guest-physical addresses, as many as asked for, from a multiple of 1 GiB on.
    fn place(&mut self, length: u64) -> Result<u64> {
        let hole = 3 * GIB..4 * GIB;
        let mut place = self.next_place;
        if place < hole.end && place + length > hole.start {
            place = hole.end;
        }
        if place + length > self.end || self.next_slot == self.slots {
            return Err(Error::NoMemory { doing: "giving a guest memory" });
        }
        self.next_place = (place + length).next_multiple_of(GIB);
        Ok(place)
    }

    /// Makes memory of the process a slot.
    fn add(&mut self, vm: &VmFd, place: u64, address: u64, length: u64) -> Result<()> {
        let region = kvm_userspace_memory_region {
            slot: self.next_slot,
            flags: 0,
            guest_phys_addr: place,
            memory_size: length,
            userspace_addr: address,
        };
        // SAFETY: the guest runs the process' own code, which may do with the process' memory what
        // it may do without a guest.
        unsafe { vm.set_user_memory_region(region) }
            .map_err(Error::kvm("giving a guest memory"))?;
        self.next_slot += 1;
        Ok(())
    }
}

/// What has become of a fault outside of managed ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// The address is in a new window.
    Made,
    /// It is in a window that is there already.
    There,
    /// No window can have it.
    None,
}

/// A guest's page tables and memory slots.
#[derive(Debug)]
pub(crate) struct Memory {
    arena: Arena,
    root: u64,
    /// The tables of managed pages, and their guest-physical address.
    leaves: Mapped,
    leaves_place: u64,
    has_large_pages: bool,
    slots: Mutex<Slots>,
    windows: AtomicU64,
}

impl Memory {
    /// Empty tables. `bits` is the number of bits of a guest-physical address; `slots` is how many
    /// slots KVM offers.
    pub(crate) fn new(vm: &VmFd, bits: u32, slots: u32, has_large_pages: bool) -> Result<Self> {
        // Aligned, so that it is in one window.
        let memory = Mapped::new(ARENA, GIB, ProtFlags::READ | ProtFlags::WRITE)?;
        let arena = Arena { next: AtomicU64::new(memory.start()), memory };
        let root = arena.place(arena.pages(1)?);
        let end = 1_u64 << bits.clamp(36, 52);
        let next_place = ARENA_PLACE + ARENA;
        let mut state = Slots { next_slot: 0, slots, next_place, end };
        state.add(vm, ARENA_PLACE, arena.memory.start(), ARENA)?;
        let leaves = Mapped::new(LEAVES, GIB, ProtFlags::READ | ProtFlags::WRITE)?;
        let leaves_place = state.place(LEAVES)?;
        state.add(vm, leaves_place, leaves.start(), LEAVES)?;
        let (slots, windows) = (Mutex::new(state), AtomicU64::new(0));
        Ok(Self { arena, root, leaves, leaves_place, has_large_pages, slots, windows })
    }

    /// The value of CR3.
    pub(crate) fn root(&self) -> u64 {
        self.root
    }

    /// The first address of the tables of managed pages, which are in one window.
    pub(crate) fn leaves(&self) -> u64 {
        self.leaves.start()
    }

    /// Zeroed pages for the guest's structures.
    ///
    /// # Errors
    /// When the arena is used up.
    pub(crate) fn pages(&self, count: usize) -> Result<u64> {
        self.arena.pages(count)
    }

    /// How many windows there are.
    pub(crate) fn windows(&self) -> u64 {
        self.windows.load(Ordering::Relaxed)
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Makes the window around an address, if a window can have the address. Allocates nothing and
    /// keeps the program's `errno`, as the program is in the middle of something.
    pub(crate) fn make_window(&self, vm: &VmFd, address: u64) -> Window {
        if !(START..END).contains(&address) {
            return Window::None;
        }
        let _blocked = BlockedSignals::new();
        let mut slots = self.slots();
        let Ok(entry) = self.entry(address, 3) else { return Window::None };
        if entry.load(Ordering::Acquire) & PRESENT != 0 {
            return Window::There;
        }
        let start = address & !(WINDOW - 1);
        let made = keeping_errno(|| {
            let place = slots.place(WINDOW)?;
            let (from, to) = (start.max(START), (start + WINDOW).min(END));
            slots.add(vm, place + (from - start), from, to - from)?;
            self.map_window(start, place, from..to)
        });
        match made {
            Ok(()) => {
                self.windows.fetch_add(1, Ordering::Relaxed);
                Window::Made
            }
            Err(_) => Window::None,
        }
    }

    /// Enters a window into the tables, by entries as large as possible: only what the slot has,
    /// because an access to what it has not would be one to a device.
    fn map_window(&self, start: u64, place: u64, range: std::ops::Range<u64>) -> Result<()> {
        const BITS: u64 = PRESENT | WRITABLE | ACCESSED | DIRTY;
        let is_whole = |from: u64, length: u64| range.start <= from && from + length <= range.end;
        if self.has_large_pages && is_whole(start, WINDOW) {
            self.entry(start, 3)?.store(place | BITS | LARGE, Ordering::Release);
            return Ok(());
        }
        for at in (0..WINDOW).step_by(1 << 21) {
            if is_whole(start + at, 1 << 21) {
                let bits = (place + at) | BITS | LARGE;
                self.entry(start + at, 2)?.store(bits, Ordering::Release);
                continue;
            }
            for at in (at..at + (1 << 21)).step_by(PAGE) {
                if is_whole(start + at, PAGE as u64) {
                    self.entry(start + at, 1)?.store((place + at) | BITS, Ordering::Release);
                }
            }
        }
        Ok(())
    }

    /// Makes memory of the process a slot, for managed pages, and returns its guest-physical
    /// address.
    ///
    /// # Errors
    /// When there are no slots or addresses left, or KVM refuses.
    pub(crate) fn add_frames(&self, vm: &VmFd, memory: &Mapped) -> Result<u64> {
        let mut slots = self.slots();
        let place = slots.place(memory.length)?;
        slots.add(vm, place, memory.start, memory.length)?;
        Ok(place)
    }

    /// Has processors find the tables of managed pages.
    ///
    /// # Errors
    /// When the arena is used up.
    pub(crate) fn link_managed(&self, range: std::ops::Range<u64>) -> Result<()> {
        for address in (range.start & !(LEAF - 1)..range.end).step_by(LEAF as usize) {
            let leaf = self.leaves_place + address % MANAGED / LEAF * PAGE as u64;
            let entry = self.entry(address, 2)?;
            entry.store(leaf | PRESENT | WRITABLE | ACCESSED, Ordering::Release);
        }
        Ok(())
    }

    /// The entry of a managed page.
    fn managed_entry(&self, address: u64) -> &AtomicU64 {
        let page = address % MANAGED / PAGE as u64;
        // SAFETY: there is a word for each page, which the process and the guest change by atomic
        // operations alone.
        unsafe { &*pointer::<AtomicU64>(self.leaves.start() + page * 8) }
    }

    /// Enters a page at a managed address, once: of several threads, one calls `fill`, which
    /// returns the guest-physical address, and the others wait. Runs in ring 0.
    pub(crate) fn map_page(&self, address: u64, fill: impl FnOnce() -> Option<u64>) -> bool {
        let entry = self.managed_entry(address);
        loop {
            match entry.compare_exchange(0, FILLING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(found) if found & PRESENT != 0 => return true,
                Err(_) => std::hint::spin_loop(),
            }
        }
        let filled = fill().map_or(0, |place| place | PRESENT | WRITABLE);
        entry.store(filled, Ordering::Release);
        filled != 0
    }

    // Pages of caches, by the addresses where they are mapped. Runs in both rings.

    /// Enters a page, with the bits that the entry has kept.
    pub(crate) fn map_frame(&self, address: u64, place: u64, writable: bool) {
        let entry = self.managed_entry(address);
        let access = PRESENT | if writable { WRITABLE } else { 0 };
        let mut found = entry.load(Ordering::Acquire);
        loop {
            let new = found & (ACCESSED | DIRTY) | place | access;
            match entry.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                // The processor has set a bit.
                Err(newer) => found = newer,
            }
        }
    }

    /// Takes a page out. The entry still tells whether it was stored to.
    pub(crate) fn unmap_frame(&self, address: u64) {
        self.managed_entry(address).fetch_and(DIRTY, Ordering::AcqRel);
    }

    /// Forgets a page that is not mapped any more, or has never been.
    pub(crate) fn forget(&self, address: u64) {
        self.managed_entry(address).store(0, Ordering::Release);
    }

    /// Clears the dirty bit. Processors set it again only after they have forgotten the entry.
    pub(crate) fn clean(&self, address: u64) {
        self.managed_entry(address).fetch_and(!DIRTY, Ordering::AcqRel);
    }

    /// Whether the program has stored to the page since it was entered or cleaned.
    pub(crate) fn is_dirty(&self, address: u64) -> bool {
        self.managed_entry(address).load(Ordering::Acquire) & DIRTY != 0
    }

    /// Whether the program has accessed the page since the last call. A processor that knows the
    /// entry does not set the bit again until it forgets it, with the next batch: until then the
    /// page looks unused.
    pub(crate) fn take_accessed(&self, address: u64) -> bool {
        let entry = self.managed_entry(address);
        entry.load(Ordering::Relaxed) & ACCESSED != 0
            && entry.fetch_and(!ACCESSED, Ordering::AcqRel) & ACCESSED != 0
    }

    /// Whether a page is entered.
    pub(crate) fn is_mapped(&self, address: u64) -> bool {
        self.managed_entry(address).load(Ordering::Acquire) & PRESENT != 0
    }

    /// The entry of a level (1 for pages of 4 KiB, 3 for 1 GiB) for an address, with the tables
    /// above it. Several threads may call it, in the process and in the guest.
    fn entry(&self, address: u64, level: u32) -> Result<&AtomicU64> {
        let index = |level: u32| address >> (3 + 9 * level) & 511;
        let mut table = self.root;
        for above in (level + 1..=4).rev() {
            let entry = self.arena.entry(table, index(above));
            let mut found = entry.load(Ordering::Acquire);
            if found & PRESENT == 0 {
                let new = self.arena.place(self.arena.pages(1)?);
                let new = new | PRESENT | WRITABLE | ACCESSED;
                // Another thread may have been faster; then the page is not used.
                let exchanged = entry.compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
                found = exchanged.err().unwrap_or(new);
            }
            if found & LARGE != 0 {
                return Err(Error::System { doing: "looking up an address", errno: Errno::FAULT });
            }
            table = found & ADDRESS;
        }
        Ok(self.arena.entry(table, index(level)))
    }
}
