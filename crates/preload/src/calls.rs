//! The calls that take the place of the C library's, and the kernel's behind them.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::request::Request;
use crate::substitute;

thread_local! {
    /// Whether this thread is in here: what it calls from here is passed through.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// `mmap(2)`.
///
/// # Safety
/// As that: what `MAP_FIXED` replaces must be the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: usize,
    rights: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let request = Request { length, rights, flags, file, offset };
    if request.is_for_reading()
        && let Some(base) = try_substitute(&request, address)
    {
        return base;
    }
    // SAFETY: the caller's promise.
    unsafe { kernel(address, &request) }
}

/// `mmap64(2)`, which is the same where offsets have 64 bits.
///
/// # Safety
/// As [`mmap`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: usize,
    rights: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(address, length, rights, flags, file, offset) }
}

/// Maps a Morsel instead of the file; `None` if that is not to be or does not work.
fn try_substitute(request: &Request, address: *mut c_void) -> Option<*mut c_void> {
    // A thread that ends has no such word any more.
    if INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(true) {
        return None;
    }
    // SAFETY: the place of this thread's error number, which the caller expects to be left alone.
    let errno = unsafe { *libc::__errno_location() };
    let mapped = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the descriptor is the caller's, who gave it for the time of the call. If there is
        // none of this number, what is done with it fails.
        let file = ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(request.file) });
        let morsel = substitute::find(&file, request)?;
        let instead = Request { file: morsel.as_fd().as_raw_fd(), ..*request };
        // SAFETY: without MAP_FIXED, which the request does not have, nothing is replaced.
        let base = unsafe { kernel(address, &instead) };
        (base != libc::MAP_FAILED).then_some(base)
    }));
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    let _ = INSIDE.try_with(|inside| inside.set(false));
    mapped.ok().flatten()
}

/// The system call.
///
/// # Safety
/// As [`mmap`].
unsafe fn kernel(address: *mut c_void, request: &Request) -> *mut c_void {
    let Request { length, rights, flags, file, offset } = *request;
    // SAFETY: the caller's promise; the numbers are the kernel's to check.
    let base =
        unsafe { libc::syscall(libc::SYS_mmap, address, length, rights, flags, file, offset) };
    // -1 is MAP_FAILED, and the error number is set.
    std::ptr::with_exposed_provenance_mut(base.cast_unsigned() as usize)
}
