//! The system calls on raw memory and on the module's descriptors. Each function is one call.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;

use rustix::io::{Errno, Result};
use rustix::ioctl::{self, NoArg, Opcode, Updater};
use rustix::mm::{self, MapFlags, ProtFlags};
use vellum_uapi::dax::{self, Attach, HEAP_WRITES, Heap, HeapStat, Open, Query, Stat, Tables};

use crate::PAGE_SIZE;

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

/// All tables in the kernel.
pub(crate) fn tables(device: BorrowedFd<'_>) -> Result<Tables> {
    let mut tables = Tables { size: size_of::<Tables>() as u32, ..Tables::default() };
    // SAFETY: the command's number has the structure's size in it, and the kernel fills it.
    unsafe {
        let command = Updater::<{ dax::TABLES as Opcode }, Tables>::new(&mut tables);
        ioctl::ioctl(device, command)?;
    }
    Ok(tables)
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
    new_descriptor(table)
}

/// Opens a heap of ephemeral mappings.
pub(crate) fn open_heap(device: BorrowedFd<'_>, writes: bool, batch: u32) -> Result<OwnedFd> {
    let flags = if writes { HEAP_WRITES } else { 0 };
    let open = Heap { size: size_of::<Heap>() as u32, batch, flags };
    // SAFETY: `query` has told that the device is the module's, which reads this structure.
    let heap = unsafe { libc::ioctl(device.as_raw_fd(), dax::HEAP.into(), &raw const open) };
    new_descriptor(heap)
}

/// The descriptor that a command of the device has returned.
fn new_descriptor(returned: i32) -> Result<OwnedFd> {
    match returned {
        // SAFETY: the kernel has just made the descriptor, and no other code knows it.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(returned) }),
        _ => Err(last_error()),
    }
}

/// Attaches a part of a file to a heap. Returns its address and its length.
pub(crate) fn attach(
    heap: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    offset: u64,
    length: u64,
) -> Result<(*mut u8, u64)> {
    let size = size_of::<Attach>() as u32;
    let mut attach = Attach { size, file: file.as_raw_fd(), offset, length, address: 0 };
    // SAFETY: the descriptor is a heap's, and the kernel fills the structure.
    unsafe { ioctl::ioctl(heap, Updater::<{ dax::ATTACH as Opcode }, Attach>::new(&mut attach))? };
    Ok((ptr::with_exposed_provenance_mut(attach.address as usize), attach.length))
}

/// Ends the attachment at an address.
pub(crate) fn detach(heap: BorrowedFd<'_>, address: *mut u8) -> Result<()> {
    // SAFETY: the descriptor is a heap's; the command changes nothing but what is attached there,
    // which the caller owns.
    match unsafe { libc::ioctl(heap.as_raw_fd(), dax::DETACH.into(), address) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

/// Flushes for what was detached.
pub(crate) fn reap(heap: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: the descriptor is a heap's, and the command takes no argument.
    unsafe { ioctl::ioctl(heap, NoArg::<{ dax::REAP as Opcode }>::new()) }
}

/// What is in a heap.
pub(crate) fn heap_stat(heap: BorrowedFd<'_>) -> Result<HeapStat> {
    let mut stat = HeapStat { size: size_of::<HeapStat>() as u32, ..HeapStat::default() };
    // SAFETY: the descriptor is a heap's, and the kernel fills the structure.
    unsafe {
        let command = Updater::<{ dax::HEAP_STAT as Opcode }, HeapStat>::new(&mut stat);
        ioctl::ioctl(heap, command)?;
    }
    Ok(stat)
}

/// Bytes of a file.
pub(crate) fn length(file: BorrowedFd<'_>) -> Result<u64> {
    Ok(rustix::fs::fstat(file)?.st_size.cast_unsigned())
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

/// Maps `bytes` of a file from an offset, where the kernel chooses.
pub(crate) fn map(
    file: BorrowedFd<'_>,
    offset: u64,
    bytes: usize,
    writes: bool,
    flags: MapFlags,
) -> Result<*mut u8> {
    let rights = if writes { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
    // SAFETY: without an address the kernel takes addresses that no mapping uses.
    let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights, flags, file, offset)? };
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

/// `msync(2)` of the pages that a range touches.
pub(crate) fn sync_range(address: *mut u8, bytes: usize) -> Result<()> {
    let inside = address.addr() % PAGE_SIZE as usize;
    let pages = (inside + bytes).next_multiple_of(PAGE_SIZE as usize);
    // SAFETY: the call changes no memory.
    unsafe { mm::msync(address.wrapping_sub(inside).cast(), pages, mm::MsyncFlags::SYNC) }
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

/// Blocks all signals in this thread. A write beyond a limit of file lengths is an error then, and
/// does not end the process.
pub(crate) fn block_signals() {
    // SAFETY: the set is initialised before it is used, and the mask is this thread's own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
    }
}

/// What the file system tells of a file's blocks at once: the head of `struct fiemap`, and room.
#[repr(C)]
struct Asked {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; 64],
}

/// `struct fiemap_extent`: a part of a file that is in one piece. All numbers are in bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    /// From the beginning of the file system.
    pub(crate) place: u64,
    pub(crate) length: u64,
    reserved: [u64; 2],
    pub(crate) flags: u32,
    more: [u32; 3],
}

/// No extent follows.
pub(crate) const EXTENT_LAST: u32 = 1;

/// Some extents of a file from an offset on; none where no more follow.
pub(crate) fn extents(file: BorrowedFd<'_>, start: u64) -> Result<Vec<Extent>> {
    const FIEMAP: Opcode = 0xc020_660b;
    const SYNC: u32 = 1;
    let extents = [Extent::default(); 64];
    let length = u64::MAX - start;
    let mut asked =
        Asked { start, length, flags: SYNC, mapped: 0, count: 64, reserved: 0, extents };
    // SAFETY: the kernel fills as many extents as `count` says there is room for.
    unsafe { ioctl::ioctl(file, Updater::<FIEMAP, Asked>::new(&mut asked))? };
    Ok(asked.extents[..asked.mapped as usize].to_vec())
}

/// The generation of a file's inode: another file of the same number has another one.
pub(crate) fn generation(file: BorrowedFd<'_>) -> Result<u32> {
    const GETVERSION: Opcode = 0x8008_7601;
    let mut generation = 0_u64;
    // SAFETY: the kernel writes 4 bytes, or 8.
    unsafe { ioctl::ioctl(file, Updater::<GETVERSION, u64>::new(&mut generation))? };
    Ok(generation as u32)
}

/// The UUID of an ext4 that a file is on.
pub(crate) fn file_system_uuid(file: BorrowedFd<'_>) -> Result<[u64; 2]> {
    /// `struct fsuuid` with its UUID.
    #[repr(C)]
    struct Named {
        length: u32,
        flags: u32,
        uuid: [u64; 2],
    }
    const GETFSUUID: Opcode = 0x8008_662c;
    let mut named = Named { length: 16, flags: 0, uuid: [0; 2] };
    // SAFETY: the kernel writes as many bytes of the UUID as `length` says there is room for.
    unsafe { ioctl::ioctl(file, Updater::<GETFSUUID, Named>::new(&mut named))? };
    Ok(named.uuid)
}
