//! How a page is named: [`PageId`] and [`PageRef`].

pub mod bytes;
pub(crate) mod dirty_pages;
pub mod format;
pub(crate) mod frame_states;
mod frame_tables;
pub(crate) mod page_bits;
pub(crate) mod parking;
pub mod state;
pub(crate) mod states;

use std::fmt;

use vellum_vm::{PAGE_SIZE, PageRange};

/// Position of a page on the surface and in the file, in units of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u64);

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A page of any multiple of 4 KiB (SIGMOD'23, section 3.5): contiguous in the file and in virtual
/// memory, with one state word, that of its first frame.
///
/// A reference carries the page's size along with its place: the pool keeps no table of sizes.
/// [`PageFormat::verify`](crate::PageFormat::verify) can check the size that a page itself records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef {
    /// The first frame's position.
    pub id: PageId,
    /// Length in frames of 4 KiB, 1 to [`PageRef::MAX_FRAMES`].
    pub frames: u32,
}

impl PageRef {
    /// The longest page: 2^24 - 1 frames, just under 64 GiB.
    pub const MAX_FRAMES: u32 = (1 << 24) - 1;
    /// Every page ends at or below this: 2^40 frames, 4 PiB of storage.
    pub const MAX_ID: u64 = 1 << 40;

    /// A page of `frames` frames that begins at `id`.
    pub const fn new(id: u64, frames: u32) -> PageRef {
        PageRef { id: PageId(id), frames }
    }

    /// Its place on the surface and in the file.
    pub const fn range(self) -> PageRange {
        PageRange { start: self.id.0, count: self.frames as u64 }
    }

    /// Its length in bytes.
    pub const fn bytes(self) -> usize {
        self.frames as usize * PAGE_SIZE
    }
}

impl fmt::Display for PageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.frames {
            1 => write!(f, "page {}", self.id),
            n => write!(f, "page {} ({n} frames)", self.id),
        }
    }
}
