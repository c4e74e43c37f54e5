//! The system calls that the C library's calls make. Addresses are numbers here: no code in this
//! module accesses the memory at them.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_long, c_uint};
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::{io, ptr};

use vellum_interpose::Request;
use vellum_morsel::PAGE_SIZE;

/// Bytes of a page.
pub(crate) const PAGE: usize = PAGE_SIZE as usize;

/// The result of a call: -1 is an error, whose number is in `errno`.
pub(crate) type Answer = c_long;

/// The result of a call that fails for want of memory.
pub(crate) fn no_memory() -> Answer {
    // SAFETY: the place of this thread's error number.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    -1
}

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

/// What reserves addresses.
fn reservation(length: usize, flags: c_int) -> Request {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    Request { length, rights: libc::PROT_NONE, flags, file: -1, offset: 0 }
}

/// Reserves so many bytes of addresses.
///
/// # Safety
/// The caller replaces or unmaps what is reserved.
pub(crate) unsafe fn reserve_any(length: usize) -> Option<usize> {
    // SAFETY: nothing is replaced.
    unsafe { map(0, &reservation(length, 0)) }
}

/// Reserves a range that nothing is mapped in; false if something is.
///
/// # Safety
/// As [`reserve_any`].
pub(crate) unsafe fn reserve(range: &Range<usize>) -> bool {
    let request = reservation(range.end - range.start, libc::MAP_FIXED_NOREPLACE);
    // SAFETY: the flag keeps what is there.
    unsafe { map(range.start, &request) == Some(range.start) }
}

/// Reserves a range in the place of what is mapped there.
///
/// # Safety
/// As [`unmap`], and as [`reserve_any`].
pub(crate) unsafe fn reserve_over(range: &Range<usize>) -> bool {
    let request = reservation(range.end - range.start, libc::MAP_FIXED);
    // SAFETY: the caller's promise.
    unsafe { map(range.start, &request).is_some() }
}

/// Whether the environment has a variable.
pub(crate) fn has_variable(name: &CStr) -> bool {
    // SAFETY: the call reads the environment, and the name, which ends with a zero.
    !unsafe { libc::getenv(name.as_ptr()) }.is_null()
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

/// `fcntl(2)` with a command that takes a number; an error is its number.
pub(crate) fn file_control(file: RawFd, command: c_int, value: c_int) -> Result<c_int, c_int> {
    // SAFETY: such commands touch no memory of the process.
    match unsafe { libc::fcntl(file, command, value) } {
        -1 => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        answer => Ok(answer),
    }
}

/// Has the kernel send a signal to one thread when there is something to say of a file.
pub(crate) fn send_signals_to(file: RawFd, thread: c_int, signal: c_int) -> bool {
    const F_SETSIG: c_int = 10;
    const F_SETOWN_EX: c_int = 15;
    const F_OWNER_TID: c_int = 0;
    let owner = [F_OWNER_TID, thread];
    // SAFETY: the kernel reads a structure of these two numbers.
    let is_owned = unsafe { libc::fcntl(file, F_SETOWN_EX, owner.as_ptr()) } == 0;
    is_owned && file_control(file, F_SETSIG, signal).is_ok()
}

/// Gives this thread, and those that it starts, a table of descriptors of their own. It has nothing
/// but `/dev/null` where programs have input and output. Returns whether that worked.
pub(crate) fn have_own_descriptors() -> bool {
    let flags = libc::CLOSE_RANGE_UNSHARE;
    // SAFETY: takes no memory. The table that the other threads have stays as it is.
    let is_own = unsafe { libc::syscall(libc::SYS_close_range, 0, c_uint::MAX, flags) } == 0;
    is_own
        && (0..3).all(|number| {
            // SAFETY: the path ends with a zero.
            let opened = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) };
            opened == number
        })
}

/// Waits until a word may have another value than this.
pub(crate) fn wait_for_change(word: &AtomicU32, value: u32) {
    let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let no_end = ptr::null::<libc::timespec>();
    // SAFETY: the kernel reads the word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, no_end) };
}

/// Wakes all threads that wait for a word to change. The word may be gone by now.
pub(crate) fn wake(word: *const AtomicU32) {
    let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel takes the address as a name.
    unsafe { libc::syscall(libc::SYS_futex, word, operation, c_int::MAX) };
}

/// Waits for a signal that this thread blocks.
pub(crate) fn wait_for_signal(signal: c_int) {
    let (set, nothing) = (1_u64 << (signal - 1), ptr::null::<u64>());
    let wait = || {
        // SAFETY: the kernel reads a mask of eight bytes, and writes nothing.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigtimedwait,
                &raw const set,
                nothing,
                nothing,
                size_of::<u64>(),
            )
        }
    };
    while wait() != c_long::from(signal) {}
}

/// Sends a signal to a thread of this process.
pub(crate) fn send_signal(thread: c_int, signal: c_int) {
    // SAFETY: takes no memory.
    unsafe { libc::syscall(libc::SYS_tgkill, process(), thread, signal) };
}

/// Whether this is a thread of the library's, by its name.
pub(crate) fn is_own_thread() -> bool {
    let mut name = [0_u8; 16];
    // SAFETY: the call writes at most 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(b"vellum-")
}

/// Faults a range in, as far as that is possible.
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn populate(start: usize, length: usize) {
    // SAFETY: the caller's promise; no contents change.
    unsafe { libc::syscall(libc::SYS_madvise, start, length, libc::MADV_POPULATE_READ) };
}

/// The number of this thread.
pub(crate) fn thread() -> c_int {
    // SAFETY: takes no arguments. Numbers of threads are small.
    (unsafe { libc::syscall(libc::SYS_gettid) }) as c_int
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
