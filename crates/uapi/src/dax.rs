//! `vellum/dax.h`: the interface of file tables. The header says what each item means.

use core::mem::offset_of;

use crate::ioctl;

/// Bytes: the unit of a mapping that may be written.
pub const UNIT: u64 = 1 << 21;
/// Bytes: the unit of any mapping.
pub const READ_UNIT: u64 = 1 << 30;
/// Bytes of the longest mapping.
pub const MAX_EXTENT: u64 = 1 << 39;

/// The length of a mapping, with any rights, that shows so many bytes.
pub const fn extent(length: u64) -> u64 {
    length.wrapping_add(READ_UNIT - 1) & !(READ_UNIT - 1)
}

/// `struct vellum_dax_query`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Query {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Of the interface.
    pub version: u32,
    /// [`HAS_HEAPS`] and so on.
    pub features: u64,
    /// The flags that [`OPEN`] knows.
    pub flags: u64,
}

/// `struct vellum_dax_open`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Open {
    /// Bytes of this structure.
    pub size: u32,
    /// A descriptor.
    pub file: i32,
    /// `DURABLE` and so on.
    pub flags: u64,
}

/// The file system's record of a block is durable before the table shows the block.
pub const DURABLE: u64 = 1 << 0;
/// The program flushes what it stores.
pub const NOSYNC: u64 = 1 << 1;

/// `struct vellum_dax_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stat {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Levels of tables.
    pub order: u32,
    /// `DURABLE` or none.
    pub flags: u64,
    /// Pages of the file that were looked up.
    pub pages: u64,
    /// Pages that have a leaf.
    pub leaves: u64,
    /// Pages that page tables take.
    pub tables: u64,
    /// Mappings, of all processes.
    pub mounts: u64,
    /// Mappings that the file system serves.
    pub barred: u64,
    /// 1: the table has to be refreshed.
    pub stale: u64,
    /// Attachments, of all processes, with those that wait for a flush.
    pub attachments: u64,
    /// Pages whose blocks a stored table has named.
    pub stored: u64,
}

/// A feature: there are heaps.
pub const HAS_HEAPS: u64 = 1 << 0;
/// A feature: tables outlive their last user.
pub const KEEPS_TABLES: u64 = 1 << 1;
/// A feature: tables that root has stored are looked for.
pub const READS_STORED: u64 = 1 << 2;

/// `struct vellum_dax_tables`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tables {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// All tables now.
    pub tables: u64,
    /// Those that nothing uses.
    pub kept: u64,
    /// Bytes of memory that these take.
    pub kept_bytes: u64,
    /// The bound for that.
    pub kept_most: u64,
    /// How often a kept table was used again, since the module was loaded.
    pub resumed: u64,
    /// Kept tables that have gone with their inodes.
    pub evicted: u64,
    /// Kept tables whose memory was wanted back.
    pub reclaimed: u64,
    /// Stored tables that tables were made from.
    pub stored_used: u64,
    /// Stored tables that were not right, or not root's.
    pub stored_refused: u64,
}

/// `struct vellum_dax_stored`: the header of a stored table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stored {
    /// [`STORED_MAGIC`].
    pub magic: u64,
    /// [`STORED_VERSION`].
    pub version: u32,
    /// How many [`Run`]s follow.
    pub runs: u32,
    /// The number of the file's inode.
    pub inode: u64,
    /// Of the inode.
    pub generation: u32,
    /// 0.
    pub reserved: u32,
    /// Of the file, in bytes.
    pub length: u64,
    /// Of the file system's UUID, the first 8 bytes.
    pub uuid_first: u64,
    /// The last 8 bytes.
    pub uuid_last: u64,
    /// See [`checksum`].
    pub checksum: u64,
}

/// `struct vellum_dax_run`: pages in a row in blocks in a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Run {
    /// The first block.
    pub block: u64,
    /// The first page.
    pub page: u32,
    /// How many.
    pub pages: u32,
}

/// Where a file system has its stored tables, from its root. The name of each is the number of its
/// file's inode.
pub const STORED_FOLDER: &str = ".vellum-tables";
/// The first word of a stored table.
pub const STORED_MAGIC: u64 = 0x656c_6261_5478_6144;
/// The format of stored tables.
pub const STORED_VERSION: u32 = 1;
/// What the checksum is multiplied with.
pub const STORED_PRIME: u64 = 0x0100_0000_01b3;
/// The most runs of a stored table.
pub const STORED_RUNS: u32 = 1 << 20;

/// The checksum of a stored table's words, of which that of the checksum is 0.
pub fn checksum(words: impl IntoIterator<Item = u64>) -> u64 {
    words.into_iter().fold(0, |sum, word| (sum ^ word).wrapping_mul(STORED_PRIME))
}

/// `struct vellum_dax_heap`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Heap {
    /// Bytes of this structure.
    pub size: u32,
    /// Detachments that are flushed together; 0 for the usual number.
    pub batch: u32,
    /// [`HEAP_WRITES`] or none.
    pub flags: u64,
}

/// The heap is for reading and writing.
pub const HEAP_WRITES: u64 = 1 << 0;
/// The largest batch.
pub const MAX_BATCH: u32 = 512;

/// `struct vellum_dax_attach`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Attach {
    /// Bytes of this structure.
    pub size: u32,
    /// A descriptor of the file, or of its table.
    pub file: i32,
    /// Bytes in the file.
    pub offset: u64,
    /// Bytes; 0: up to the file's end, and out: that length.
    pub length: u64,
    /// Out: of the byte at the offset.
    pub address: u64,
}

/// `struct vellum_dax_heap_stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct HeapStat {
    /// Bytes of this structure as the caller knows it.
    pub size: u32,
    /// Detachments that are flushed together.
    pub batch: u32,
    /// Of 1 GiB, used so far.
    pub regions: u64,
    /// Slots that are attached, or wait for a flush.
    pub taken: u64,
    /// Slots in which a file's table is now.
    pub attached: u64,
    /// Slots that the file system serves.
    pub served: u64,
    /// Detachments that wait for a flush.
    pub zombies: u64,
    /// Since the beginning, as the rest.
    pub attaches: u64,
    /// Those that have ended.
    pub detaches: u64,
    /// Flushes for detachments.
    pub flushes: u64,
    /// Faults that the file system has handled.
    pub served_faults: u64,
}

/// The features of this module; takes a [`Query`]. On the device.
pub const QUERY: u32 = ioctl::read_write::<Query>(b'D', 1);
/// Opens a file's table; takes an [`Open`]. On the device.
pub const OPEN: u32 = ioctl::write::<Open>(b'D', 2);
/// Brings a table up to date.
pub const REFRESH: u32 = ioctl::none(b'D', 3);
/// A table's properties and memory; takes a [`Stat`].
pub const STAT: u32 = ioctl::read_write::<Stat>(b'D', 4);
/// Opens a heap; takes a [`Heap`]. On the device.
pub const HEAP: u32 = ioctl::write::<Heap>(b'D', 5);
/// Attaches a part of a file; takes an [`Attach`]. On a heap.
pub const ATTACH: u32 = ioctl::read_write::<Attach>(b'D', 6);
/// Detaches; takes an address. On a heap.
pub const DETACH: u32 = ioctl::none(b'D', 7);
/// Flushes for what was detached. On a heap.
pub const REAP: u32 = ioctl::none(b'D', 8);
/// What is in a heap; takes a [`HeapStat`]. On a heap.
pub const HEAP_STAT: u32 = ioctl::read_write::<HeapStat>(b'D', 9);
/// All tables in this kernel; takes a [`Tables`]. On the device.
pub const TABLES: u32 = ioctl::read_write::<Tables>(b'D', 10);

const _: () = {
    assert!(size_of::<Query>() == 24 && offset_of!(Query, flags) == 16);
    assert!(size_of::<Open>() == 16 && offset_of!(Open, flags) == 8);
    assert!(size_of::<Stat>() == 80 && offset_of!(Stat, stored) == 72);
    assert!(size_of::<Heap>() == 16 && offset_of!(Heap, flags) == 8);
    assert!(size_of::<Attach>() == 32 && offset_of!(Attach, address) == 24);
    assert!(size_of::<HeapStat>() == 80 && offset_of!(HeapStat, served_faults) == 72);
    assert!(size_of::<Tables>() == 80 && offset_of!(Tables, stored_refused) == 72);
    assert!(size_of::<Stored>() == 64 && offset_of!(Stored, checksum) == 56);
    assert!(size_of::<Run>() == 16 && offset_of!(Run, pages) == 12);
};
