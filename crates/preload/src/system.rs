//! The system calls that the C library's calls make. Addresses are numbers here: no code in this
//! module accesses the memory at them.
#![allow(unsafe_code)]

use std::ffi::c_long;
use std::ops::Range;

use vellum_morsel::PAGE_SIZE;

use crate::request::Request;

/// Bytes of a page.
pub(crate) const PAGE: usize = PAGE_SIZE as usize;

/// The result of a call: -1 is an error, whose number is in `errno`.
pub(crate) type Answer = c_long;

/// `mmap(2)`; `None` is an error.
///
/// # Safety
/// As that: what `MAP_FIXED` replaces must be the caller's.
pub(crate) unsafe fn map(address: usize, request: &Request) -> Option<usize> {
    let Request { length, rights, flags, file, offset } = *request;
    // SAFETY: the caller's promise; the numbers are the kernel's to check.
    let base =
        unsafe { libc::syscall(libc::SYS_mmap, address, length, rights, flags, file, offset) };
    (base != -1).then_some(base.cast_unsigned() as usize)
}

/// `munmap(2)`.
///
/// # Safety
/// As that: the range must be the caller's, and no pointer into it may be left.
pub(crate) unsafe fn unmap(range: &Range<usize>) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_munmap, range.start, range.end - range.start) }
}

/// Moves the mapping of a file's first page to the beginning of a range and makes it as long as
/// that. The same step unmaps the old memory of the range: a thread that reads it meanwhile sees
/// the one or the other.
///
/// # Safety
/// As [`unmap`], for the page and the range; the new mapping must serve all pointers into the
/// range.
pub(crate) unsafe fn stretch(page: usize, range: &Range<usize>) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let length = range.end - range.start;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::syscall(libc::SYS_mremap, page, PAGE, length, flags, range.start) };
    moved != -1
}

/// Blocks all signals in this thread; returns those that were blocked already.
pub(crate) fn block_signals() -> u64 {
    set_signals(u64::MAX)
}

/// Blocks these signals in this thread, and no others; returns the previous mask.
pub(crate) fn set_signals(signals: u64) -> u64 {
    let mut before = 0_u64;
    let how = libc::SIG_SETMASK;
    // SAFETY: the kernel reads one mask and writes the other, of eight bytes each.
    unsafe {
        let (new, old) = (&raw const signals, &raw mut before);
        libc::syscall(libc::SYS_rt_sigprocmask, how, new, old, size_of::<u64>());
    }
    before
}

/// The number of this process.
pub(crate) fn process() -> u32 {
    // SAFETY: takes no arguments. The number is positive.
    (unsafe { libc::syscall(libc::SYS_getpid) }) as u32
}

/// Yields the processor to other threads.
pub(crate) fn give_way() {
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_sched_yield) };
}
