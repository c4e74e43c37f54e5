//! `vellum/exmap_published.h`: the interface of the exmap module that was published with the
//! papers, which `/dev/exmap` also supports. New programs use [`exmap`](crate::exmap).

use core::mem::offset_of;

use crate::ioctl;

/// `struct exmap_published_setup`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Setup {
    /// A descriptor to read from, or -1.
    pub fd: i32,
    /// Interfaces.
    pub max_interfaces: i32,
    /// Frames of the pool.
    pub buffer_size: u64,
    /// 0.
    pub flags: u64,
}

/// `struct exmap_published_action`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    /// Whose vector.
    pub interface: u16,
    /// Its entries.
    pub iov_len: u16,
    /// `OP_*`.
    pub opcode: u16,
    /// Of no meaning.
    pub padding: u16,
    /// 0.
    pub flags: u64,
}

/// `struct exmap_published_stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    /// As set up.
    pub flags: u64,
    /// Frames of the pool.
    pub buffer_size: u64,
    /// Present pages.
    pub alloc_count: u64,
    /// Interfaces.
    pub max_interfaces: u32,
    /// Of no meaning.
    pub padding: u32,
}

/// Reads pages from the descriptor that [`SETUP`] got.
pub const OP_READ: u16 = 0;
/// Populates pages.
pub const OP_ALLOC: u16 = 1;
/// Frees pages.
pub const OP_FREE: u16 = 2;
/// Writes pages. The published module did not implement it.
pub const OP_WRITE: u16 = 3;

const LETTER: u8 = b'k';

/// Gives the exmap its pool and interfaces; takes a [`Setup`].
pub const SETUP: u32 = ioctl::write::<Setup>(LETTER, 1);
/// Carries a vector out; takes an [`Action`].
pub const ACTION: u32 = ioctl::write::<Action>(LETTER, 2);
/// Makes this descriptor a private one of another, whose number it takes.
pub const CLONE: u32 = ioctl::write::<i32>(LETTER, 3);
/// Counters; takes a [`Stats`].
pub const STATS: u32 = ioctl::write::<Stats>(LETTER, 4);

const _: () = {
    assert!(size_of::<Setup>() == 24 && offset_of!(Setup, buffer_size) == 8);
    assert!(size_of::<Action>() == 16 && offset_of!(Action, flags) == 8);
    assert!(size_of::<Stats>() == 32 && offset_of!(Stats, max_interfaces) == 24);
};
