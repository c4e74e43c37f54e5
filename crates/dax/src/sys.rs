//! The system calls on raw memory and on the module's descriptors. Each function is one call.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::io::{Errno, Result};
use rustix::ioctl::{self, NoArg, Opcode, Updater};
use rustix::mm::{self, MapFlags, ProtFlags};
use vellum_uapi::dax::{self, Open, Query, Stat};

/// What the device can do. Fails on other files than the module's device: the number of the command
/// is its own.
pub(crate) fn query(device: BorrowedFd<'_>) -> Result<Query> {
    let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
    // SAFETY: the command's number has the structure's size in it, and the kernel fills it.
    unsafe {
        let command = Updater::<{ dax::QUERY as Opcode }, Query>::new(&mut query);
        ioctl::ioctl(device, command)?;
    }
    Ok(query)
}

/// Opens the table of a file.
pub(crate) fn open_table(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    flags: u64,
) -> Result<OwnedFd> {
    let size = size_of::<Open>() as u32;
    let open = Open { size, file: file.as_raw_fd(), flags };
    // SAFETY: `query` has told that the device is the module's, which reads this structure.
    let table = unsafe { libc::ioctl(device.as_raw_fd(), dax::OPEN.into(), &raw const open) };
    match table {
        // SAFETY: the kernel has just made the descriptor, and no other code knows it.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(table) }),
        _ => Err(last_error()),
    }
}

/// Brings a table up to date.
pub(crate) fn refresh(table: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the descriptor is a table's, and the command takes no argument.
    unsafe { ioctl::ioctl(table, NoArg::<{ dax::REFRESH as Opcode }>::new()) }
}

/// A table's properties.
pub(crate) fn stat(table: BorrowedFd<'_>) -> Result<Stat> {
    let mut stat = Stat { size: size_of::<Stat>() as u32, ..Stat::default() };
    // SAFETY: the descriptor is a table's, and the kernel fills the structure.
    unsafe { ioctl::ioctl(table, Updater::<{ dax::STAT as Opcode }, Stat>::new(&mut stat))? };
    Ok(stat)
}

/// Maps `bytes` of a file from its beginning, where the kernel chooses.
pub(crate) fn map(
    file: BorrowedFd<'_>,
    bytes: usize,
    writes: bool,
    flags: MapFlags,
) -> Result<*mut u8> {
    let rights = if writes { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: without an address the kernel takes addresses that no mapping uses.
    let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights, flags, file, 0)? };
    Ok(base.cast())
}

/// `munmap(2)`.
///
/// # Safety
/// The caller owns the range and nothing points into it any more.
pub(crate) unsafe fn unmap(address: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::munmap(address.cast(), bytes) }
}

/// `msync(2)` of whole pages.
pub(crate) fn sync_pages(address: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the call changes no memory.
    unsafe { mm::msync(address.cast(), bytes, mm::MsyncFlags::SYNC) }
}

/// The error of the last call that failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Copies to or from memory that other processes may change meanwhile.
///
/// # Safety
/// `from` may be read and `to` may be written for so many bytes, and they do not overlap. A
/// reference to the bytes of the mapping does not exist in this process.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise. The compiler assumes nothing of what an instruction reads, so
    // other processes may store meanwhile.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..bytes {
        // SAFETY: the caller's promise.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
}
