//! `vellum/exmap.h`: the interface of `/dev/exmap`. The header says what each item means.

use core::mem::offset_of;

use crate::ioctl;

/// The offset at which `mmap` shows the surface.
pub const OFFSET_SURFACE: u64 = 0;
/// The offset at which `mmap` shows the last level of the surface's page tables, read-only.
pub const OFFSET_TABLES: u64 = 0x1000_0000_0000_0000;

/// The offset at which `mmap` shows the vector of an interface.
pub const fn offset_interface(interface: u64) -> u64 {
    0xe000_0000_0000_0000 | (interface << 12)
}

/// Interfaces that an exmap has at most.
pub const MAX_INTERFACES: u32 = 256;
/// Entries of a vector.
pub const VECTOR_ENTRIES: u32 = 512;
/// Pages of an entry, at most.
pub const ENTRY_PAGES: u64 = 4095;

/// Bits of an entry that hold its page.
const PAGE_BITS: u32 = 52;

/// An entry of a vector: a range of pages going in; a result and a number of pages coming out.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Entry(u64);

impl Entry {
    /// The pages `page..page + count`; bits that do not fit are dropped, as by the header's macro.
    pub const fn new(page: u64, count: u64) -> Self {
        Self((count << PAGE_BITS) | (page & ((1 << PAGE_BITS) - 1)))
    }

    /// An entry from its bits in memory.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Its bits in memory.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Going in: the first page.
    pub const fn page(self) -> u64 {
        self.0 & ((1 << PAGE_BITS) - 1)
    }

    /// Going in: how many pages.
    pub const fn count(self) -> u64 {
        self.0 >> PAGE_BITS
    }

    /// Coming out: 0, or a negative error number.
    pub const fn result(self) -> i32 {
        self.0 as u32 as i32
    }

    /// Coming out: the number of pages for which the module carried out the command.
    pub const fn pages(self) -> u16 {
        (self.0 >> 32) as u16
    }
}

impl core::fmt::Debug for Entry {
    /// An entry does not know its direction, so this shows both readings.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let (page, count) = (self.page(), self.count());
        let (result, pages) = (self.result(), self.pages());
        write!(f, "Entry(in: {page}+{count}, out: {result} for {pages})")
    }
}

/// The argument of a vectored command: an interface, and how many of its entries.
pub const fn vector(interface: u64, entries: u64) -> u64 {
    interface | (entries << 16)
}

/// `struct vellum_exmap_query`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Query {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Of the interface.
    pub version: u32,
    /// `CAN_*`.
    pub features: u64,
    /// The flags that [`CREATE`] knows.
    pub flags: u64,
    /// See [`MAX_INTERFACES`].
    pub max_interfaces: u32,
    /// See [`VECTOR_ENTRIES`].
    pub vector_entries: u32,
}

/// The module has [`READ`], and `pread` and `readv` on the descriptor.
pub const CAN_READ: u64 = 1 << 0;
/// The module has [`WRITE`], and `pwrite` and `writev` on the descriptor.
pub const CAN_WRITE: u64 = 1 << 1;
/// The process can map the page tables.
pub const CAN_SHOW_TABLES: u64 = 1 << 2;

/// `struct vellum_exmap_create`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Create {
    /// Bytes of this structure.
    pub size: u32,
    /// From 1 to [`MAX_INTERFACES`].
    pub interfaces: u32,
    /// `PINNABLE` and so on.
    pub flags: u64,
    /// Frames of the pool.
    pub frames: u64,
    /// A descriptor to read from, or -1.
    pub backing: i32,
    /// Of 512 frames, with [`HUGE`]; otherwise 0.
    pub blocks: u32,
}

/// Pages may be the memory of direct I/O.
pub const PINNABLE: u64 = 1 << 0;
/// Reading an absent page gives zeros.
pub const READS_ZEROS: u64 = 1 << 1;
/// Interfaces have lists of frames and steal from each other.
pub const STEALING: u64 = 1 << 2;
/// [`HARVEST`] says which pages were accessed and written.
pub const TRACKS: u64 = 1 << 6;
/// The kernel may take free frames out of the pool when it is short of memory.
pub const SHRINKS: u64 = 1 << 7;
/// Pages may be mapped by entries of 2 MiB.
pub const HUGE: u64 = 1 << 8;
/// Frames come from the kernel and go back to it.
pub const NO_POOL: u64 = 1 << 3;
/// TLBs are flushed for every entry of a vector.
pub const FLUSH_EACH: u64 = 1 << 4;
/// Page-table entries change under a lock.
pub const LOCK_TABLES: u64 = 1 << 5;

/// `struct vellum_exmap_harvest`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Harvest {
    /// Bytes of this structure.
    pub size: u32,
    /// `CLEAR_*`.
    pub flags: u32,
    /// The first page.
    pub page: u64,
    /// How many pages.
    pub count: u64,
    /// The address of `(count + 63) / 64` words, or 0: pages that were accessed.
    pub accessed: u64,
    /// The same: pages that were written.
    pub written: u64,
}

/// Clears the accessed bits.
pub const CLEAR_ACCESSED: u32 = 1 << 0;
/// Clears the dirty bits.
pub const CLEAR_WRITTEN: u32 = 1 << 1;

/// `struct vellum_exmap_move`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Move {
    /// Bytes of this structure.
    pub size: u32,
    /// Whose lane is used.
    pub interface: u32,
    /// The first page from which frames move.
    pub from: u64,
    /// The first page to which they move.
    pub to: u64,
    /// How many pages.
    pub count: u64,
}

/// `struct vellum_exmap_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stat {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Interfaces of the exmap.
    pub interfaces: u32,
    /// Frames of the pool.
    pub frames: u64,
    /// Frames on the surface.
    pub resident: u64,
    /// Pages of the surface.
    pub surface: u64,
    /// Page tables of the surface.
    pub tables: u64,
    /// Pages that were allocated.
    pub allocated: u64,
    /// Pages that were freed.
    pub freed: u64,
    /// Pages that were to be allocated, and were present.
    pub conflicts: u64,
    /// Pages that were to be freed, and were pinned.
    pub busy: u64,
    /// Pages that were read.
    pub read: u64,
    /// Pages that were written.
    pub written: u64,
    /// Flushes of TLBs for vectors.
    pub flushes: u64,
    /// Accesses of an interface to the shared part of the pool.
    pub refills: u64,
    /// Times that the surface was linked into the process' page tables.
    pub attached: u64,
    /// Times that it was unlinked from them.
    pub detached: u64,
    /// Blocks of the pool.
    pub blocks: u64,
    /// Blocks of which all frames are free.
    pub blocks_free: u64,
    /// Entries of 2 MiB on the surface.
    pub huge: u64,
    /// Entries of 2 MiB that became 512.
    pub splits: u64,
}

/// The letter of the commands.
pub const IOC: u8 = 0xe9;
/// The features of this module; takes a [`Query`].
pub const QUERY: u32 = ioctl::read_write::<Query>(IOC, 0x00);
/// Gives the exmap its pool and interfaces; takes a [`Create`].
pub const CREATE: u32 = ioctl::write::<Create>(IOC, 0x01);
/// Counters; takes a [`Stat`].
pub const STAT: u32 = ioctl::read_write::<Stat>(IOC, 0x02);
/// Another descriptor for the same exmap; takes 0.
pub const CLONE: u32 = ioctl::none(IOC, 0x03);
/// Which pages were accessed and written; takes a [`Harvest`].
pub const HARVEST: u32 = ioctl::write::<Harvest>(IOC, 0x04);
/// Moves frames to other pages; takes a [`Move`].
pub const MOVE: u32 = ioctl::write::<Move>(IOC, 0x05);
/// How many frames the pool is to have; takes the number.
pub const RESIZE: u32 = ioctl::none(IOC, 0x06);
/// Populates pages; takes a [`vector`].
pub const ALLOC: u32 = ioctl::none(IOC, 0x10);
/// Frees pages; takes a [`vector`].
pub const FREE: u32 = ioctl::none(IOC, 0x11);
/// Reads absent pages; takes a [`vector`].
pub const READ: u32 = ioctl::none(IOC, 0x12);
/// Opcode of `pread` and `preadv`: present pages are read again.
pub const OP_REFRESH: u16 = 4;
/// Writes present pages; takes a [`vector`].
pub const WRITE: u32 = ioctl::none(IOC, 0x13);

const _: () = {
    assert!(size_of::<Entry>() == 8);
    assert!(size_of::<Query>() == 32 && offset_of!(Query, max_interfaces) == 24);
    assert!(size_of::<Create>() == 32 && offset_of!(Create, frames) == 16);
    assert!(offset_of!(Create, backing) == 24 && offset_of!(Create, blocks) == 28);
    assert!(size_of::<Harvest>() == 40 && offset_of!(Harvest, accessed) == 24);
    assert!(size_of::<Move>() == 32 && offset_of!(Move, count) == 24);
    assert!(size_of::<Stat>() == 152 && offset_of!(Stat, splits) == 144);
};
