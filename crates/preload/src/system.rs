//! The system calls that the C library's calls make. Addresses are numbers here: no code in this
//! module accesses the memory at them.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;

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

/// Reserves a range that nothing is mapped in; false if something is.
///
/// # Safety
/// The caller replaces or unmaps what is reserved.
pub(crate) unsafe fn reserve(range: &Range<usize>) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let flags = flags | libc::MAP_FIXED_NOREPLACE;
    let length = range.end - range.start;
    let request = Request { length, rights: libc::PROT_NONE, flags, file: -1, offset: 0 };
    // SAFETY: the flag keeps what is there.
    unsafe { map(range.start, &request) == Some(range.start) }
}

/// Ends the process with a message.
pub(crate) fn end(message: &str) -> ! {
    // SAFETY: the kernel reads the bytes; the process ends.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::write(libc::STDERR_FILENO, c"\n".as_ptr().cast(), 1);
        libc::abort()
    }
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

/// Whether a process has a file open for writing, as far as this process can find out by a lease:
/// it must be the file's owner, or have `CAP_LEASE`. The descriptor is the program's. Opening the
/// file once more would end locks that the program has on it, when that is closed.
pub(crate) fn is_open_for_writing(file: &File) -> bool {
    const F_SETSIG: c_int = 10;
    const F_GETSIG: c_int = 11;
    let set = |command: c_int, value: c_int| {
        // SAFETY: these commands take a number, and touch no memory of the process.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
            -1 => Err(io::Error::last_os_error().raw_os_error()),
            _ => Ok(()),
        }
    };
    let has = |command: c_int| {
        // SAFETY: as above.
        unsafe { libc::fcntl(file.as_raw_fd(), command) }
    };
    // What the program has asked for by this descriptor must stay.
    let is_used = has(libc::F_GETLEASE) != libc::F_UNLCK || has(F_GETSIG) != 0;
    if is_used || has(libc::F_GETOWN) != 0 {
        return true;
    }
    // A writer that opens the file during the lease waits until it ends. The kernel would send
    // another signal, which ends the process; this one is ignored unless the program handles it.
    let _ = set(F_SETSIG, libc::SIGURG);
    let leased = set(libc::F_SETLEASE, libc::F_RDLCK);
    if leased.is_ok() {
        let _ = set(libc::F_SETLEASE, libc::F_UNLCK);
    }
    let _ = set(F_SETSIG, 0);
    let _ = set(libc::F_SETOWN, 0);
    leased == Err(Some(libc::EAGAIN))
}

/// For [`set_cancelling`]: calls of the C library do not end the thread.
pub(crate) const NOT_CANCELLED: c_int = 1;

/// Says whether `pthread_cancel` ends this thread within calls of the C library; returns what was
/// so before.
pub(crate) fn set_cancelling(state: c_int) -> c_int {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    }
    let mut before = 0;
    // SAFETY: the call writes one number.
    unsafe { pthread_setcancelstate(state, &raw mut before) };
    before
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
