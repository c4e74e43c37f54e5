//! Huge pages of a memfd.
//!
//! `MADV_COLLAPSE` (Linux 6.1) makes them whatever the settings say, where at least one page is
//! present. So before this module fills a range, it populates one page of 4 KiB in each huge page
//! and collapses the range: the kernel has nothing to copy, and zeroes 2 MiB at a time. A huge page
//! also takes a single fault, so the kernel can read a file straight into a [`Window`]. That is
//! several times faster than filling single pages. If the kernel has no huge pages, pages stay
//! small.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::sys::{self, Harmless, Rights};

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Whole huge pages of a memfd, mapped for as long as this process fills them.
#[derive(Debug)]
pub(crate) struct Window {
    base: *mut u8,
    bytes: usize,
}

impl Window {
    /// Populates a range of a memfd with huge pages, from its first multiple of 2 MiB up to the
    /// first populated page of the file; `None` if no whole huge page fits.
    ///
    /// One call for many of them: each call waits for the other processors.
    pub(crate) fn open(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<Option<Self>, Errno> {
        let size = HUGE_PAGE as u64;
        let start = range.start.next_multiple_of(size);
        // The kernel would have to copy pages that are present.
        let data = match seek(file, SeekFrom::Data(start)) {
            Err(Errno::NXIO) => u64::MAX,
            found => found?,
        };
        let end = range.end.min(data) / size * size;
        if start >= end {
            return Ok(None);
        }
        let bytes = usize::try_from(end - start).map_err(|_| Errno::NOMEM)?;
        let base = map_aligned(file, start, bytes, Rights::ReadAndWrite, MapFlags::SHARED)?;
        let window = Self { base, bytes };
        // The memfd cannot be sealed while a child has the mapping.
        sys::advise(base, bytes, Harmless::DontFork)?;
        sys::advise(base, bytes, Harmless::HugePage)?;
        for offset in (0..bytes).step_by(HUGE_PAGE) {
            // The access populates a huge page if the settings allow it, and else a small one.
            let first = base.wrapping_add(offset);
            sys::advise(first, crate::PAGE_SIZE as usize, Harmless::PopulateWrite)?;
        }
        sys::collapse(base, bytes)?;
        Ok(Some(window))
    }

    /// Reads the source, from its byte `from` on, until the window is full or the source ends.
    /// Returns the bytes read. If an error follows some bytes, the next call meets it again.
    pub(crate) fn fill(&self, source: BorrowedFd<'_>, from: u64) -> Result<usize, Errno> {
        let mut filled = 0;
        while filled < self.bytes {
            let (rest, left) = (self.base.wrapping_add(filled), self.bytes - filled);
            // SAFETY: the window's own mapping, of which there are no references.
            match unsafe { sys::read_at(source, from + filled as u64, rest, left) } {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(Errno::INTR) => {}
                Err(errno) if filled == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(filled)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the window was mapped by `open`, and no other code knows its addresses. A failure
        // would leave addresses taken, and no caller could do anything about it.
        let _ = unsafe { sys::unmap(self.base, self.bytes) };
    }
}

/// Maps `bytes` of a file at an address that is a multiple of 2 MiB, so that huge pages fit.
pub(crate) fn map_aligned(
    file: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
    rights: Rights,
    flags: MapFlags,
) -> Result<*mut u8, Errno> {
    let reserved = bytes.checked_add(HUGE_PAGE).ok_or(Errno::NOMEM)?;
    let start = sys::reserve(reserved)?;
    let before = start.align_offset(HUGE_PAGE);
    let base = start.wrapping_add(before);
    // SAFETY: within the range that was reserved, which no other code knows.
    let mapped = unsafe { sys::map_over(file, offset, base, bytes, rights, flags) };
    let (kept, after) = match mapped {
        Ok(()) => (bytes, HUGE_PAGE - before),
        Err(_) => (0, reserved - before),
    };
    for (piece, bytes) in [(start, before), (base.wrapping_add(kept), after)] {
        if bytes > 0 {
            // SAFETY: as above, and outside of what was mapped.
            unsafe { sys::unmap(piece, bytes)? };
        }
    }
    mapped.map(|()| base)
}
