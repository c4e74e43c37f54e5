//! Which pages hold memory, from `/proc/self/pagemap`.
//!
//! The file has eight bytes per page of address space. A page holds memory of its own when it is
//! present (bit 63) and mapped by this process alone (bit 56): a page that was only read maps the
//! kernel's shared zero page, which is present but not exclusive. The frames of an exmap have no
//! exclusive bit, but count as pages of a file (bit 61), which no other page of a surface does; the
//! zero page that an exmap shows has neither bit. The kernel shows all three bits to unprivileged
//! processes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use rustix::io::Errno;

use crate::PAGE_SIZE;
use crate::range::PageRange;

const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;
/// Bytes of an entry of the file.
const ENTRY: usize = size_of::<u64>();
/// Pages looked up per read of the file.
const CHUNK: u64 = 32 * 1024;

/// Which pages of a range hold memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residency {
    range: PageRange,
    bits: Vec<u64>,
    resident: u64,
}

impl Residency {
    /// A range of which these pages hold memory.
    pub fn of_pages(range: PageRange, pages: impl IntoIterator<Item = u64>) -> Residency {
        let bits = vec![0_u64; range.count.div_ceil(64) as usize];
        let mut residency = Residency { range, bits, resident: 0 };
        for page in pages {
            if let Some(index) = page.checked_sub(range.start).filter(|index| *index < range.count)
                && !residency.is_resident(page)
            {
                residency.bits[(index / 64) as usize] |= 1 << (index % 64);
                residency.resident += 1;
            }
        }
        residency
    }

    /// The range that the caller asked for.
    pub fn range(&self) -> PageRange {
        self.range
    }

    /// How many pages hold memory.
    pub fn resident(&self) -> u64 {
        self.resident
    }

    /// Whether a page, numbered as on the surface, holds memory; false outside of the range.
    pub fn is_resident(&self, page: u64) -> bool {
        let Some(index) = page.checked_sub(self.range.start) else {
            return false;
        };
        let word = self.bits.get((index / 64) as usize);
        word.is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// The resident pages in ascending order, numbered as on the surface.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let Range { start, end } = self.range.start..self.range.start + self.range.count;
        (start..end).filter(|page| self.is_resident(*page))
    }
}

/// Looks every page of a range up.
pub(crate) fn of(base: NonNull<u8>, range: PageRange) -> Result<Residency, Errno> {
    let mut bits = vec![0_u64; range.count.div_ceil(64) as usize];
    let mut resident = 0;
    each_resident(base, range, |index| {
        bits[(index / 64) as usize] |= 1 << (index % 64);
        resident += 1;
    })?;
    Ok(Residency { range, bits, resident })
}

/// Counts the resident pages of a range, in constant memory.
pub(crate) fn count(base: NonNull<u8>, range: PageRange) -> Result<u64, Errno> {
    let mut resident = 0;
    each_resident(base, range, |_| resident += 1)?;
    Ok(resident)
}

/// Calls `found` with the index within the range of every resident page.
fn each_resident(
    base: NonNull<u8>,
    range: PageRange,
    mut found: impl FnMut(u64),
) -> Result<(), Errno> {
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let pagemap = File::open("/proc/self/pagemap").map_err(errno)?;
    let first = (base.addr().get() / PAGE_SIZE) as u64 + range.start;
    let mut buffer = vec![0_u8; CHUNK.min(range.count) as usize * ENTRY];
    let mut done = 0;
    while done < range.count {
        let pages = CHUNK.min(range.count - done);
        let chunk = &mut buffer[..pages as usize * ENTRY];
        pagemap.read_exact_at(chunk, (first + done) * ENTRY as u64).map_err(errno)?;
        let (words, _) = chunk.as_chunks::<ENTRY>();
        for (index, word) in (done..).zip(words) {
            // The file holds the kernel's own words.
            #[allow(clippy::host_endian_bytes)]
            let flags = u64::from_ne_bytes(*word);
            if flags & PRESENT != 0 && flags & (EXCLUSIVE | OF_FILE) != 0 {
                found(index);
            }
        }
        done += pages;
    }
    Ok(())
}
