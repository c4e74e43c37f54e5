//! Huge pages of a memfd.
//!
//! `MADV_COLLAPSE` (Linux 6.1) puts them together whatever the settings say, where there is at
//! least one page. So a stretch that is to be filled gets one page of 4 KiB, is collapsed, and then
//! filled: nothing has to be copied, and 2 MiB are zeroed at a time. That is several times faster
//! than filling single pages. Where the kernel has none to give, pages stay small.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::mm::MapFlags;

use crate::sys::{self, Harmless, Rights};

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Has whole huge pages of a range come in one piece, up to where something is there already.
///
/// One call for many of them: each call waits for the other processors.
pub(crate) fn populate(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<(), Errno> {
    let size = HUGE_PAGE as u64;
    let start = range.start.next_multiple_of(size);
    // What is there already would have to be copied.
    let data = match seek(file, SeekFrom::Data(start)) {
        Err(Errno::NXIO) => u64::MAX,
        found => found?,
    };
    let end = range.end.min(data) / size * size;
    if start >= end {
        return Ok(());
    }
    for piece in (start..end).step_by(HUGE_PAGE) {
        fallocate(file, FallocateFlags::empty(), piece, crate::PAGE_SIZE)?;
    }
    let bytes = usize::try_from(end - start).map_err(|_| Errno::NOMEM)?;
    let window = map_aligned(file, start, bytes, Rights::Read, MapFlags::SHARED)?;
    let collapsed =
        sys::advise(window, bytes, Harmless::HugePage).and_then(|()| sys::collapse(window, bytes));
    // SAFETY: the window was mapped above, and nobody else knows it.
    let unmapped = unsafe { sys::unmap(window, bytes) };
    collapsed.and(unmapped)
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
    // SAFETY: within the range that was reserved, which nobody else knows.
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
