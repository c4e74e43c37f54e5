//! The calls that replace the C library's.
//!
//! Each calls the kernel, except for memory of a mount. There, a call that would make no difference
//! to a mapping of the file succeeds and does nothing; before any other call the file's own mapping
//! replaces the mount (`mounts`).
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ops::Range;

use vellum_interpose::Request;

use crate::substitute::substitute;
use crate::system::{self, PAGE};
use crate::{mounts, owner};

/// Advice that makes no difference to a mapping for reading whose pages stay in memory.
const HARMLESS: [c_int; 14] = [
    libc::MADV_NORMAL,
    libc::MADV_RANDOM,
    libc::MADV_SEQUENTIAL,
    libc::MADV_WILLNEED,
    libc::MADV_DONTNEED,
    libc::MADV_MERGEABLE,
    libc::MADV_UNMERGEABLE,
    libc::MADV_HUGEPAGE,
    libc::MADV_NOHUGEPAGE,
    libc::MADV_DONTDUMP,
    libc::MADV_DODUMP,
    libc::MADV_COLD,
    libc::MADV_PAGEOUT,
    libc::MADV_POPULATE_READ,
];

/// Flags that take the address for more than a hint.
const FIXED: c_int = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE;

/// The pages of a range; `None` if the kernel will refuse the range.
fn pages(address: *mut c_void, length: usize) -> Option<Range<usize>> {
    let start = address.addr();
    let end = start.checked_add(length)?.checked_next_multiple_of(PAGE)?;
    (start.is_multiple_of(PAGE) && length > 0).then_some(start..end)
}

/// Replaces all mounts in a range by mappings of their files. Returns false, with the error of the
/// call, if that is not possible.
fn give_up(range: Option<Range<usize>>) -> bool {
    let is_done = range.filter(mounts::touch).is_none_or(|range| mounts::give_up(&range));
    if !is_done {
        system::no_memory();
    }
    is_done
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
    let instead = request.is_for_reading().then(|| substitute(&request, address.addr())).flatten();
    if flags & FIXED != 0 && !give_up(pages(address, length)) {
        return libc::MAP_FAILED;
    }
    // SAFETY: the caller's promise.
    let base = instead.or_else(|| unsafe { system::map(address.addr(), &request) });
    base.map_or(libc::MAP_FAILED, std::ptr::with_exposed_provenance_mut)
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

/// `munmap(2)`.
///
/// # Safety
/// As that: the range must be the caller's, and nothing may point into it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: usize) -> c_int {
    let answer = match pages(address, length).filter(mounts::touch) {
        // SAFETY: the caller's promise.
        Some(range) => unsafe { mounts::unmap(&range) },
        // SAFETY: as above.
        None => unsafe { libc::syscall(libc::SYS_munmap, address, length) },
    };
    answer as c_int
}

/// `mremap(2)`. Callers pass the last argument only with `MREMAP_FIXED`, and it is not read
/// otherwise.
///
/// # Safety
/// As that: both ranges must be the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    address: *mut c_void,
    length: usize,
    new_length: usize,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    // Without a length it makes a second mapping of the same memory.
    let is_free = give_up(pages(address, length.max(1)));
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    if !is_free || (is_fixed && !give_up(pages(new_address, new_length))) {
        return libc::MAP_FAILED;
    }
    let number = libc::SYS_mremap;
    // SAFETY: the caller's promise.
    let base = unsafe { libc::syscall(number, address, length, new_length, flags, new_address) };
    std::ptr::with_exposed_provenance_mut(base.cast_unsigned() as usize)
}

/// `mprotect(2)`.
///
/// # Safety
/// As that: no code may need the rights that the call removes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, length: usize, rights: c_int) -> c_int {
    let range = pages(address, length);
    if rights == libc::PROT_READ && range.as_ref().is_some_and(mounts::have) {
        return 0;
    }
    if !give_up(range) {
        return -1;
    }
    // SAFETY: the caller's promise.
    (unsafe { libc::syscall(libc::SYS_mprotect, address, length, rights) }) as c_int
}

/// `madvise(2)`.
///
/// # Safety
/// As that: advice may drop contents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int {
    let range = pages(address, length);
    if HARMLESS.contains(&advice)
        && let Some(range) = range.as_ref().filter(|range| mounts::have(range))
    {
        // SAFETY: it is in the table, whose lock is held.
        mounts::with_owner(range, |number| unsafe { owner::advise(number, advice) });
        // Of a Morsel all pages are there. Those of a cache come, as far as they fit.
        if advice != libc::MADV_POPULATE_READ || mounts::have_for_good(range) {
            return 0;
        }
        // SAFETY: the caller's promise.
        return (unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) }) as c_int;
    }
    if !give_up(range) {
        return -1;
    }
    // SAFETY: the caller's promise.
    (unsafe { libc::syscall(libc::SYS_madvise, address, length, advice) }) as c_int
}

/// `posix_madvise(3)`: the advice has the same numbers, and the answer is the error's.
///
/// # Safety
/// None of its advice changes the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(
    address: *mut c_void,
    length: usize,
    advice: c_int,
) -> c_int {
    // The C library ignores this advice, because the kernel would drop contents.
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    // SAFETY: the place of this thread's error number.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above, and none of this advice changes contents.
    unsafe {
        let before = *errno;
        let answer = madvise(address, length, advice);
        let number = *errno;
        *errno = before;
        if answer == 0 { 0 } else { number }
    }
}

/// `mlock(2)`. A Morsel's pages are in memory as long as it is.
///
/// # Safety
/// It changes no contents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, length: usize) -> c_int {
    // SAFETY: as that.
    unsafe { lock(libc::SYS_mlock, address, length, 0) }
}

/// `mlock2(2)`.
///
/// # Safety
/// It changes no contents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, length: usize, flags: c_int) -> c_int {
    // SAFETY: as that.
    unsafe { lock(libc::SYS_mlock2, address, length, flags) }
}

/// `munlock(2)`.
///
/// # Safety
/// It changes no contents.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(address: *const c_void, length: usize) -> c_int {
    // SAFETY: as that.
    unsafe { lock(libc::SYS_munlock, address, length, 0) }
}

/// The calls above that take ranges which may begin within a page.
///
/// # Safety
/// The number must be that of one of these calls.
unsafe fn lock(number: i64, address: *const c_void, length: usize, flags: c_int) -> c_int {
    let into = address.addr() % PAGE;
    let range = length
        .checked_add(into)
        .and_then(|length| pages(address.wrapping_byte_sub(into).cast_mut(), length));
    if range.as_ref().is_some_and(mounts::have_for_good) {
        return 0;
    }
    if !give_up(range) {
        return -1;
    }
    // SAFETY: the caller's promise.
    (unsafe { libc::syscall(number, address, length, flags) }) as c_int
}
