//! The system calls on raw memory, userfaultfd, and signals. Each function is one call.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU64;

use rustix::io::{Errno, Result};
use rustix::ioctl::{self, Opcode, Updater, opcode};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MsyncFlags, ProtFlags};

use crate::PAGE_SIZE;

/// The group of userfaultfd's commands.
const GROUP: u8 = 0xaa;
/// The version of its interface.
const API: u64 = 0xaa;
/// Only faults of the program are handled, not those of the kernel: so no privilege is needed.
const USER_MODE_ONLY: libc::c_int = 1;

/// Register for pages that the memory file has not.
pub(crate) const MISSING: u64 = 1 << 0;
/// Register for stores to write-protected pages.
pub(crate) const WRITE_PROTECT: u64 = 1 << 1;
/// Register for pages that the memory file has and that are not mapped.
pub(crate) const MINOR: u64 = 1 << 2;

/// A fault that is not resolved is SIGBUS for the faulting thread.
pub(crate) const FEATURE_SIGBUS: u64 = 1 << 7;
/// Missing pages of memory files.
pub(crate) const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Pages of memory files that are not mapped.
pub(crate) const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Write-protected pages of memory files.
pub(crate) const FEATURE_WP_SHMEM: u64 = 1 << 12;

const PROTECT: u64 = 1 << 0;
/// Names the calling process where a pidfd is asked for (`PIDFD_SELF_PROCESS`).
const THIS_PROCESS: i32 = -10001;
const CONTINUE_PROTECTED: u64 = 1 << 1;
const COPY_PROTECTED: u64 = 1 << 1;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Range {
    start: u64,
    bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Continue {
    range: Range,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CopyIn {
    target: u64,
    source: u64,
    bytes: u64,
    mode: u64,
    copied: i64,
}

const API_COMMAND: Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const REGISTER_COMMAND: Opcode = opcode::read_write::<Register>(GROUP, 0);
const COPY_COMMAND: Opcode = opcode::read_write::<CopyIn>(GROUP, 3);
const PROTECT_COMMAND: Opcode = opcode::read_write::<WriteProtect>(GROUP, 6);
const CONTINUE_COMMAND: Opcode = opcode::read_write::<Continue>(GROUP, 7);

/// Opens a userfaultfd with features. Returns it, and all features that the kernel has if none was
/// asked for.
pub(crate) fn userfaultfd(features: u64) -> Result<(OwnedFd, u64)> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
    // SAFETY: the call takes no memory.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if descriptor < 0 {
        return Err(last_error());
    }
    // SAFETY: the kernel has just made the descriptor, and no other code knows it.
    let uffd = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
    let mut api = Api { api: API, features, ioctls: 0 };
    // SAFETY: the command's number has the structure's size in it, and the kernel fills it.
    unsafe { ioctl::ioctl(&uffd, Updater::<API_COMMAND, Api>::new(&mut api))? };
    Ok((uffd, api.features))
}

/// Asks for the faults of a range.
pub(crate) fn register(uffd: impl AsFd, start: usize, bytes: usize, mode: u64) -> Result<()> {
    let range = Range { start: start as u64, bytes: bytes as u64 };
    let mut register = Register { range, mode, ioctls: 0 };
    // SAFETY: the kernel reads and fills the structure; memory does not change.
    unsafe {
        ioctl::ioctl(uffd, Updater::<REGISTER_COMMAND, Register>::new(&mut register))?;
    }
    Ok(())
}

/// Maps pages that a memory file has, for reading only if `protected`. Returns the bytes that it
/// mapped, and the error that ended it.
pub(crate) fn map_present(
    uffd: impl AsFd,
    start: usize,
    bytes: usize,
    protected: bool,
) -> (usize, Result<()>) {
    let mode = if protected { CONTINUE_PROTECTED } else { 0 };
    let range = Range { start: start as u64, bytes: bytes as u64 };
    let mut command = Continue { range, mode, mapped: 0 };
    // SAFETY: the kernel reads and fills the structure. It maps pages of the file that is mapped
    // there anyway, in ranges that are registered with this descriptor.
    let result =
        unsafe { ioctl::ioctl(uffd, Updater::<CONTINUE_COMMAND, Continue>::new(&mut command)) };
    (usize::try_from(command.mapped).unwrap_or(0), result)
}

/// Makes new pages of a memory file with these bytes, and maps them where the file is mapped, for
/// reading only if `protected`. Returns the bytes of these pages, and the error that ended it.
pub(crate) fn copy_and_map(
    uffd: impl AsFd,
    start: usize,
    bytes: &[u8],
    protected: bool,
) -> (usize, Result<()>) {
    let mut command = CopyIn {
        target: start as u64,
        source: bytes.as_ptr().addr() as u64,
        bytes: bytes.len() as u64,
        mode: if protected { COPY_PROTECTED } else { 0 },
        copied: 0,
    };
    // SAFETY: the kernel reads the bytes, and reads and fills the structure. It changes only pages
    // that are not there, in ranges that are registered with this descriptor.
    let result = unsafe { ioctl::ioctl(uffd, Updater::<COPY_COMMAND, CopyIn>::new(&mut command)) };
    (usize::try_from(command.copied).unwrap_or(0), result)
}

/// Takes write access to the pages of a range away, or gives it back.
pub(crate) fn write_protect(
    uffd: impl AsFd,
    start: usize,
    bytes: usize,
    protect: bool,
) -> Result<()> {
    let range = Range { start: start as u64, bytes: bytes as u64 };
    let mut command = WriteProtect { range, mode: if protect { PROTECT } else { 0 } };
    // SAFETY: the kernel reads the structure; the range is registered with this descriptor.
    unsafe { ioctl::ioctl(uffd, Updater::<PROTECT_COMMAND, WriteProtect>::new(&mut command)) }
}

/// A shared mapping of a file, unmapped when it is dropped.
#[derive(Debug)]
pub(crate) struct Mapped {
    start: usize,
    bytes: usize,
}

impl Mapped {
    /// Maps a part of a file where the kernel chooses.
    pub(crate) fn new(file: impl AsFd, offset: u64, bytes: usize, writable: bool) -> Result<Self> {
        let rights = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights, flags, file, offset)? };
        Ok(Self { start: base.expose_provenance(), bytes })
    }

    /// Maps a part of a memory file, whose faults userfaultfd reports from the first access on.
    ///
    /// Until then there is no access: a program that locks all its memory (`mlockall`) has the
    /// kernel fault the pages of each new mapping in, which would make empty pages.
    pub(crate) fn registered(
        file: impl AsFd,
        offset: u64,
        bytes: usize,
        writable: bool,
        (uffd, mode): (impl AsFd, u64),
    ) -> Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let (none, null) = (ProtFlags::empty(), ptr::null_mut());
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mm::mmap(null, bytes, none, flags, file, offset)? };
        let mapped = Self { start: base.expose_provenance(), bytes };
        // A kernel without huge pages does not know the advice.
        // SAFETY: the range is this mapping, and no contents change.
        let _ = unsafe { advise(mapped.start, bytes, Advice::LinuxNoHugepage) };
        // What is locked would be faulted in as soon as it is accessible.
        let _ = lock(mapped.start, bytes, false);
        register(uffd, mapped.start, bytes, mode)?;
        let read = MprotectFlags::READ;
        let rights = if writable { read | MprotectFlags::WRITE } else { read };
        // SAFETY: the mapping is new, and no reference to it exists.
        unsafe { mm::mprotect(base, bytes, rights)? };
        Ok(mapped)
    }

    /// Its first address.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Loads a byte, as a program does.
    pub(crate) fn load(&self, at: usize) -> u8 {
        assert!(at < self.bytes, "a load outside of a mapping");
        // SAFETY: the byte is mapped, and a volatile load assumes nothing of it.
        unsafe { ptr::with_exposed_provenance::<u8>(self.start + at).read_volatile() }
    }

    /// Stores a byte, as a program does. The mapping is writable.
    pub(crate) fn store(&self, at: usize, byte: u8) {
        assert!(at < self.bytes, "a store outside of a mapping");
        // SAFETY: the byte is mapped, and this crate makes no references to it.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(self.start + at).write_volatile(byte) };
    }

    /// Keeps the children of this process from having it.
    pub(crate) fn is_not_inherited(&self) -> Result<()> {
        // SAFETY: the range is this mapping, and no contents change.
        unsafe { advise(self.start, self.bytes, Advice::LinuxDontFork) }
    }

    /// Unmaps it now.
    pub(crate) fn unmap(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if bytes > 0 {
            // SAFETY: the value owns the range, and its users are gone when it is dropped.
            let _ = unsafe { mm::munmap(ptr::with_exposed_provenance_mut(self.start), bytes) };
        }
    }

    /// Leaves the addresses as they are: this process is a child that does not have the mapping.
    pub(crate) fn forget(&mut self) {
        self.bytes = 0;
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// Drops the translations of a range that maps a file: the next access faults.
///
/// # Safety
/// The range is a shared mapping of a file, which the caller owns: so no contents are lost.
pub(crate) unsafe fn drop_translations(start: usize, bytes: usize) -> Result<()> {
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the caller's promise.
    unsafe { mm::madvise(start, bytes, Advice::LinuxDontNeed) }
}

/// Ranges whose translations one call drops at most.
pub(crate) const MOST_RANGES: usize = 64;

/// Ranges of addresses, collected so that one call with one flush of the processors' translations
/// serves all.
#[derive(Debug)]
pub(crate) struct Ranges {
    ranges: [libc::iovec; MOST_RANGES],
    count: usize,
}

impl Ranges {
    pub(crate) fn new() -> Self {
        let none = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Self { ranges: [none; MOST_RANGES], count: 0 }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.count == MOST_RANGES
    }

    /// Adds a range. There is room for it.
    pub(crate) fn push(&mut self, start: usize, bytes: usize) {
        let start = ptr::with_exposed_provenance_mut(start);
        self.ranges[self.count] = libc::iovec { iov_base: start, iov_len: bytes };
        self.count += 1;
    }

    /// Drops the translations of all, and forgets the ranges. Returns whether it did: before Linux
    /// 6.13 a process may not do that to itself.
    ///
    /// # Safety
    /// The ranges are in shared mappings of files, which the caller owns: no contents are lost.
    pub(crate) unsafe fn drop_translations(&mut self) -> bool {
        let count = std::mem::take(&mut self.count);
        let bytes: usize = self.ranges[..count].iter().map(|range| range.iov_len).sum();
        if count == 0 {
            return true;
        }
        let (process, ranges) = (THIS_PROCESS, self.ranges.as_ptr());
        let advice = libc::MADV_DONTNEED;
        // SAFETY: the kernel reads the array, and the caller promises the rest.
        let done =
            unsafe { libc::syscall(libc::SYS_process_madvise, process, ranges, count, advice, 0) };
        done == bytes as i64
    }
}

/// Advice that changes no contents of a shared mapping of a file.
///
/// # Safety
/// The caller owns the range, which is a shared mapping of a file.
pub(crate) unsafe fn advise(start: usize, bytes: usize, advice: Advice) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::madvise(ptr::with_exposed_provenance_mut(start), bytes, advice) }
}

/// `msync(2)` of whole pages.
pub(crate) fn sync(start: usize, bytes: usize) -> Result<()> {
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the call changes no memory.
    unsafe { mm::msync(start, bytes, MsyncFlags::SYNC) }
}

/// `mlock(2)`, or `munlock(2)`.
pub(crate) fn lock(start: usize, bytes: usize, locked: bool) -> Result<()> {
    let start = ptr::with_exposed_provenance_mut(start);
    // SAFETY: the calls change no memory.
    unsafe {
        match locked {
            true => mm::mlock(start, bytes),
            false => mm::munlock(start, bytes),
        }
    }
}

/// A word in memory of its own, which is zero in a child that this process forks.
pub(crate) fn word_wiped_on_fork() -> Result<*mut AtomicU64> {
    let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: without an address the kernel takes addresses that no mapping uses; the advice is for
    // this mapping.
    unsafe {
        let word = mm::mmap_anonymous(ptr::null_mut(), PAGE_SIZE, rights, flags)?;
        match mm::madvise(word, PAGE_SIZE, Advice::LinuxWipeOnFork) {
            Ok(()) => Ok(word.cast()),
            Err(errno) => {
                let _ = mm::munmap(word, PAGE_SIZE);
                Err(errno)
            }
        }
    }
}

/// The word at an address of [`word_wiped_on_fork`], or none at null.
pub(crate) fn shared_word(word: *mut AtomicU64) -> Option<&'static AtomicU64> {
    // SAFETY: the mapping is never unmapped, and holds a word that is aligned.
    unsafe { word.as_ref() }
}

/// Signals of this thread, blocked until this is dropped.
pub(crate) struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    pub(crate) fn new() -> Self {
        // SAFETY: the sets are plain data, which the calls fill.
        unsafe {
            let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
            Self(old)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the call filled.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// Runs a function, and keeps the thread's error number as it was.
pub(crate) fn keeping_errno<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: the pointer is to a variable of this thread.
    let errno = unsafe { *libc::__errno_location() };
    let result = f();
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    result
}

/// Borrows a descriptor by its number.
///
/// # Safety
/// The descriptor stays open while the result is used.
pub(crate) unsafe fn borrow<'a>(descriptor: i32) -> BorrowedFd<'a> {
    // SAFETY: the caller's promise.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

/// The error of the last call that failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
