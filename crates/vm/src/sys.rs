//! The system calls that rustix does not offer, or offers only for slices of Rust memory.
//!
//! No `&mut [u8]` may refer to a page that other threads may read at the same time, so everything
//! here takes raw addresses. Each function is one call and turns `-1` into an [`Errno`]; nothing
//! retries.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use rustix::io::Errno;

/// Collapse a range into huge pages (Linux 6.1). Named here because not every libc has it.
pub(crate) const MADV_COLLAPSE: i32 = 25;

/// The calling process instead of a pidfd (Linux 6.14), see `pidfd_open(2)`.
pub(crate) const PIDFD_SELF_PROCESS: RawFd = -10_001;

/// The last errno as an [`Errno`].
fn last_errno() -> Errno {
    let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Errno::from_raw_os_error(raw)
}

/// Bytes of a system page. (rustix finds it in the auxiliary vector, which crashes under valgrind.)
pub(crate) fn page_size() -> usize {
    // SAFETY: the call takes no pointer.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(0)
}

/// `madvise(2)`.
///
/// # Safety
/// The caller owns the range, and no code relies on contents that the advice drops.
pub(crate) unsafe fn madvise(address: *mut u8, bytes: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: the caller's promise; the kernel checks the range itself.
    match unsafe { libc::madvise(address.cast(), bytes, advice) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// `process_madvise(2)` on the process that `target` names; returns the bytes advised.
///
/// # Safety
/// As [`madvise`], for every element of the vector; `target` names the calling process.
pub(crate) unsafe fn process_madvise(
    target: RawFd,
    vector: &[libc::iovec],
    advice: i32,
) -> Result<usize, Errno> {
    // SAFETY: the vector outlives the call and is only read; the ranges are the caller's promise.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            libc::c_long::from(target),
            vector.as_ptr(),
            vector.len(),
            libc::c_long::from(advice),
            0_usize,
        )
    };
    usize::try_from(done).map_err(|_| last_errno())
}

/// `pread(2)` to a raw address; returns the bytes read, 0 at the end of the file.
///
/// # Safety
/// `address..address + bytes` is writable memory that no other code writes or relies on.
pub(crate) unsafe fn pread(
    file: BorrowedFd<'_>,
    address: *mut u8,
    bytes: usize,
    offset: u64,
) -> Result<usize, Errno> {
    let offset = libc::off64_t::try_from(offset).map_err(|_| Errno::OVERFLOW)?;
    // SAFETY: the caller's promise; the descriptor is borrowed for the call.
    let read = unsafe { libc::pread64(file.as_raw_fd(), address.cast(), bytes, offset) };
    usize::try_from(read).map_err(|_| last_errno())
}

/// Reserves nothing and maps `bytes` of private anonymous memory at or near `address`.
///
/// # Safety
/// With `MAP_FIXED` in `extra_flags` the range must be the caller's; without it the call can only
/// take addresses that no mapping uses.
pub(crate) unsafe fn map_anonymous(
    address: *mut u8,
    bytes: usize,
    extra_flags: i32,
) -> Result<NonNull<u8>, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | extra_flags;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller's promise.
    let found = unsafe { libc::mmap(address.cast(), bytes, protection, flags, -1, 0) };
    if found == libc::MAP_FAILED {
        return Err(last_errno());
    }
    NonNull::new(found.cast()).ok_or(Errno::NOMEM)
}

/// The rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rights {
    Read,
    ReadAndWrite,
}

/// Maps `bytes` of a device from `offset` on, shared, where the kernel chooses.
pub(crate) fn map_device(
    device: BorrowedFd<'_>,
    bytes: usize,
    offset: u64,
    rights: Rights,
) -> Result<NonNull<u8>, Errno> {
    let protection = match rights {
        Rights::Read => libc::PROT_READ,
        Rights::ReadAndWrite => libc::PROT_READ | libc::PROT_WRITE,
    };
    let offset = offset.cast_signed();
    // SAFETY: without MAP_FIXED the kernel takes addresses that no mapping uses.
    let found = unsafe {
        libc::mmap64(
            std::ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            device.as_raw_fd(),
            offset,
        )
    };
    if found == libc::MAP_FAILED {
        return Err(last_errno());
    }
    NonNull::new(found.cast()).ok_or(Errno::NOMEM)
}

/// `ioctl(2)`; returns what the device answers, which is not negative.
///
/// # Safety
/// The argument is the one that the device expects with this command. If it is an address, the call
/// may read and write the memory there. No code relies on memory that the command takes.
pub(crate) unsafe fn ioctl(
    device: BorrowedFd<'_>,
    command: u32,
    argument: u64,
) -> Result<u32, Errno> {
    #[allow(clippy::cast_lossless)] // how long the number is depends on the C library
    let command = command as libc::Ioctl;
    // SAFETY: the caller's promise.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), command, argument) };
    u32::try_from(answer).map_err(|_| last_errno())
}

/// `munmap(2)`.
///
/// # Safety
/// The caller owns the range and no pointer into it is left.
pub(crate) unsafe fn unmap(address: *mut u8, bytes: usize) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    match unsafe { libc::munmap(address.cast(), bytes) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// Tries `io_uring_setup(2)` with one entry and closes the ring again.
pub(crate) fn try_io_uring() -> Result<(), Errno> {
    // struct io_uring_params is 120 bytes; all zero asks for the defaults.
    let mut parameters = [0_u64; 15];
    // SAFETY: the kernel writes at most the 120 bytes of the parameters.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1_usize, parameters.as_mut_ptr()) };
    close_new(ring)
}

/// Tries `userfaultfd(2)`, for faults from user mode only, and closes the descriptor again.
pub(crate) fn try_userfaultfd() -> Result<(), Errno> {
    const UFFD_USER_MODE_ONLY: i32 = 1;
    let flags = libc::O_CLOEXEC | UFFD_USER_MODE_ONLY;
    // SAFETY: the call takes no pointer.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::c_long::from(flags)) };
    close_new(descriptor)
}

/// Closes a descriptor that a system call has just returned, or returns the call's error.
fn close_new(returned: libc::c_long) -> Result<(), Errno> {
    match RawFd::try_from(returned) {
        // SAFETY: the descriptor is fresh and no other code knows it.
        Ok(raw) if raw >= 0 => drop(unsafe { OwnedFd::from_raw_fd(raw) }),
        _ => return Err(last_errno()),
    }
    Ok(())
}

/// A category of `PAGEMAP_SCAN`: pages that are mapped.
pub(crate) const PAGE_IS_PRESENT: u64 = 1 << 3;
/// A category of `PAGEMAP_SCAN`: pages that are mapped as a part of a huge page.
pub(crate) const PAGE_IS_HUGE: u64 = 1 << 6;

/// The `PAGEMAP_SCAN` ioctl (Linux 6.7) on one range; returns how many regions of pages of the
/// category it reported, at most 16.
pub(crate) fn pagemap_scan(
    pagemap: BorrowedFd<'_>,
    address: usize,
    bytes: usize,
    category: u64,
) -> Result<usize, Errno> {
    // _IOWR('f', 16, struct pm_scan_arg), 96 bytes.
    const PAGEMAP_SCAN: u64 = 0xC060_6610;
    let mut regions = [[0_u64; 3]; 16];
    let start = address as u64;
    // size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
    // category_mask, category_anyof_mask, return_mask
    let mut argument: [u64; 12] = [0; 12];
    argument[0] = size_of_val(&argument) as u64;
    argument[2] = start;
    argument[3] = start + bytes as u64;
    argument[5] = regions.as_mut_ptr() as u64;
    argument[6] = regions.len() as u64;
    argument[9] = category;
    argument[11] = category;
    // SAFETY: the kernel reads and writes the argument and writes at most vec_len regions.
    let found = unsafe {
        libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN as libc::Ioctl, argument.as_mut_ptr())
    };
    usize::try_from(found).map_err(|_| last_errno())
}
