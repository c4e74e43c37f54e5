//! The page tables of an exmap's surface, as the process may read them (refined exmap, "PtMap",
//! section III-C). One load says whether a page is present, and in which frame.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_uapi::exmap::OFFSET_TABLES;

use super::device::Device;
use super::memory::{ExmapMemory, Mapped};
use crate::PAGE_SIZE;
use crate::sys::Rights;

/// Entries of a table.
const ENTRIES: u64 = 512;
/// The processor's bits of an entry: there is a page, and it may be written.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
/// Bits of an entry that hold the frame's address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The last level of a surface's page tables, read-only. See
/// [`Surface::page_tables`](crate::Surface::page_tables).
///
/// An answer was true at the moment of the load; a caller that needs it to last must keep other
/// threads from populating or releasing the page.
#[derive(Debug)]
pub struct PageTables {
    mapped: Mapped,
    pages: u64,
    frames: u64,
}

impl PageTables {
    pub(super) fn map(device: &Device, memory: &ExmapMemory) -> Result<Self, String> {
        let pages = (memory.mapped_bytes() / PAGE_SIZE) as u64;
        let bytes = pages.div_ceil(ENTRIES) as usize * PAGE_SIZE;
        let mapped =
            Mapped::new(device.as_fd(), bytes, OFFSET_TABLES, Rights::Read).map_err(why_not)?;
        let frames = fs::read_to_string("/proc/zoneinfo")
            .and_then(|text| frames_of(&text).ok_or_else(|| io::ErrorKind::InvalidData.into()))
            .map_err(|error| format!("/proc/zoneinfo does not say how much memory is: {error}"))?;
        Ok(Self { mapped, pages, frames })
    }

    /// Pages that have an entry: the length to which the surface can grow.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Numbers of frames are below this.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// The number of the frame that holds the page, if it is populated. If the process writes after
    /// it has seen a page populated or released, other threads that see the write see the page so,
    /// too.
    ///
    /// # Panics
    /// If the page has no entry.
    #[inline(always)]
    pub fn frame(&self, page: u64) -> Option<u64> {
        assert!(page < self.pages);
        // SAFETY: just checked.
        unsafe { self.frame_unchecked(page) }
    }

    /// As [`frame`](Self::frame), for callers that know that the page has an entry.
    ///
    /// # Safety
    /// `page` is below [`pages`](Self::pages).
    #[inline(always)]
    pub unsafe fn frame_unchecked(&self, page: u64) -> Option<u64> {
        // SAFETY: the caller's promise.
        let entry = unsafe { self.entry_unchecked(page) }.load(Ordering::Acquire);
        // A read-only entry refers to the zero page, which readers of a released page get.
        let populated = entry & (PRESENT | WRITABLE) == PRESENT | WRITABLE;
        populated.then_some((entry & ADDRESS) / PAGE_SIZE as u64)
    }

    /// The entry of a page, for prefetching: see [`frame`](Self::frame).
    #[inline(always)]
    pub fn entry(&self, page: u64) -> &AtomicU64 {
        assert!(page < self.pages);
        // SAFETY: just checked.
        unsafe { self.entry_unchecked(page) }
    }

    /// # Safety
    /// `page` is below `self.pages`.
    #[inline(always)]
    unsafe fn entry_unchecked(&self, page: u64) -> &AtomicU64 {
        debug_assert!(page < self.pages);
        // SAFETY: within the mapping, which lives as long as `self`, aligned; no code stores
        // through a reference, because the mapping refuses that, and the kernel changes entries by
        // whole words.
        unsafe { self.mapped.base().cast::<AtomicU64>().add(page as usize).as_ref() }
    }
}

fn why_not(errno: Errno) -> String {
    match errno {
        Errno::PERM => "page tables show physical addresses, so reading them needs CAP_SYS_ADMIN; \
                        without it, keep page states in an array"
            .to_owned(),
        errno => format!("the page tables of the surface cannot be mapped: {errno}"),
    }
}

/// One more than the highest frame number of all zones in `/proc/zoneinfo`.
fn frames_of(zoneinfo: &str) -> Option<u64> {
    let mut spanned = 0;
    let mut highest = None;
    for line in zoneinfo.lines() {
        let mut words = line.split_whitespace();
        match (words.next(), words.next().and_then(|word| word.parse::<u64>().ok())) {
            (Some("spanned"), Some(frames)) => spanned = frames,
            (Some("start_pfn:"), Some(first)) => {
                highest = highest.max(Some(first + std::mem::take(&mut spanned)));
            }
            _ => {}
        }
    }
    highest.filter(|frames| *frames > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_frame_is_that_of_the_highest_zone() {
        let text = "Node 0, zone DMA\n  pages free 3\n  spanned  4095\n  start_pfn: 1\n\
                    Node 0, zone Normal\n  spanned  1000\n  managed 9\n  start_pfn: 1048576\n\
                    Node 0, zone Movable\n  spanned  0\n  start_pfn: 0\n";
        assert_eq!(frames_of(text), Some(1_049_576));
        assert_eq!(frames_of(""), None);
        let here = fs::read_to_string("/proc/zoneinfo").unwrap();
        assert!(frames_of(&here).unwrap() >= 1 << 15, "{here}");
    }
}
