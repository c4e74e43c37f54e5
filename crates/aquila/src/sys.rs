//! The system calls on raw memory, userfaultfd, and signals. Each function is one call.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};
use rustix::ioctl::{self, Opcode, Updater, opcode};
use rustix::mm::{self, Advice, MapFlags, MprotectFlags, MremapFlags, MsyncFlags, ProtFlags};

use crate::PAGE_SIZE;

/// The group of userfaultfd's commands.
const GROUP: u8 = 0xaa;
/// The version of its interface.
const API: u64 = 0xaa;
/// Only faults of the program are handled, not those of the kernel: so no privilege is needed.
const USER_MODE_ONLY: libc::c_int = 1;
/// The device that gives descriptors to those who may open it, since Linux 6.1.
const DEVICE: &str = "/dev/userfaultfd";

/// Register for pages that the memory file has not.
pub(crate) const MISSING: u64 = 1 << 0;
/// Register for stores to write-protected pages.
pub(crate) const WRITE_PROTECT: u64 = 1 << 1;
/// Register for pages that the memory file has and that are not mapped.
pub(crate) const MINOR: u64 = 1 << 2;

/// Write-protected pages of anonymous memory.
pub(crate) const FEATURE_WP: u64 = 1 << 0;
/// A fault that is not resolved is SIGBUS for the faulting thread.
pub(crate) const FEATURE_SIGBUS: u64 = 1 << 7;
/// Missing pages of memory files.
pub(crate) const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Pages of memory files that are not mapped.
pub(crate) const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
/// Write-protected pages of memory files.
pub(crate) const FEATURE_WP_SHMEM: u64 = 1 << 12;
/// Pages whose access fails.
pub(crate) const FEATURE_POISON: u64 = 1 << 14;

const PROTECT: u64 = 1 << 0;
/// Names the calling thread, and so its process' memory, where a pidfd is asked for
/// (`PIDFD_SELF_THREAD`).
const THIS_THREAD: i32 = -10_000;
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

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Poison {
    range: Range,
    mode: u64,
    changed: i64,
}

/// Bytes of what the kernel says of a fault that waits (`struct uffd_msg`).
const MESSAGE: usize = 32;
/// The event of a message: a page fault.
const PAGE_FAULT: u8 = 0x12;
/// The access was a store.
const FAULT_IS_STORE: u64 = 1 << 0;

const API_COMMAND: Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const NEW_COMMAND: Opcode = opcode::none(GROUP, 0);
const REGISTER_COMMAND: Opcode = opcode::read_write::<Register>(GROUP, 0);
const WAKE_COMMAND: Opcode = opcode::read::<Range>(GROUP, 2);
const COPY_COMMAND: Opcode = opcode::read_write::<CopyIn>(GROUP, 3);
const PROTECT_COMMAND: Opcode = opcode::read_write::<WriteProtect>(GROUP, 6);
const CONTINUE_COMMAND: Opcode = opcode::read_write::<Continue>(GROUP, 7);
const POISON_COMMAND: Opcode = opcode::read_write::<Poison>(GROUP, 8);

/// Whose faults a userfaultfd handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultsOf {
    /// Those of the program.
    Program,
    /// Those of the kernel, too, which takes a privilege.
    ProgramAndKernel,
}

/// Opens a userfaultfd with features. Returns it, and all features that the kernel has if none was
/// asked for.
pub(crate) fn userfaultfd(of: FaultsOf, features: u64) -> Result<(OwnedFd, u64)> {
    let uffd = match of {
        FaultsOf::Program => descriptor(USER_MODE_ONLY)?,
        FaultsOf::ProgramAndKernel => {
            descriptor(0).or_else(|errno| from_device().or(Err(errno)))?
        }
    };
    let mut api = Api { api: API, features, ioctls: 0 };
    // SAFETY: the command's number has the structure's size in it, and the kernel fills it.
    unsafe { ioctl::ioctl(&uffd, Updater::<API_COMMAND, Api>::new(&mut api))? };
    Ok((uffd, api.features))
}

/// Opens a userfaultfd by the system call.
fn descriptor(flags: libc::c_int) -> Result<OwnedFd> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | flags;
    // SAFETY: the call takes no memory.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if descriptor < 0 {
        return Err(last_error());
    }
    // SAFETY: the kernel has just made the descriptor, and no other code knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// Opens a userfaultfd by the device.
fn from_device() -> Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = rustix::fs::open(DEVICE, flags, Mode::empty())?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the command takes flags, and returns a descriptor.
    let descriptor = unsafe { libc::ioctl(device.as_raw_fd(), u64::from(NEW_COMMAND), flags) };
    if descriptor < 0 {
        return Err(last_error());
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
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

/// Makes new pages with these bytes, of the memory file that is mapped there or of anonymous
/// memory, and maps them, for reading only if `protected`. Returns the bytes of these pages, and
/// the error that ended it.
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

/// A fault that waits for the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitingFault {
    pub(crate) address: usize,
    pub(crate) is_store: bool,
}

/// The next fault that waits; `Errno::AGAIN` if none does, `Errno::BADF` if this is no userfaultfd.
/// No two threads get the same.
pub(crate) fn next_fault(uffd: impl AsFd) -> Result<WaitingFault> {
    loop {
        let mut message = [0; MESSAGE];
        if rustix::io::read(&uffd, &mut message)? < MESSAGE {
            return Err(Errno::BADF);
        }
        let word =
            |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| message[at + byte])).to_le();
        // No other event was asked for.
        if message[0] == PAGE_FAULT {
            let is_store = word(8) & FAULT_IS_STORE != 0;
            return Ok(WaitingFault { address: word(16) as usize, is_store });
        }
    }
}

/// Wakes the threads whose faults in a range wait. They repeat their accesses.
pub(crate) fn wake(uffd: impl AsFd, start: usize, bytes: usize) -> Result<()> {
    let mut range = Range { start: start as u64, bytes: bytes as u64 };
    // SAFETY: the kernel reads the structure; memory does not change.
    unsafe { ioctl::ioctl(uffd, Updater::<WAKE_COMMAND, Range>::new(&mut range)) }
}

/// Has accesses to a page that is not there fail, until its translation is dropped: SIGBUS for the
/// program, `EFAULT` for a system call. Wakes those that wait.
pub(crate) fn poison(uffd: impl AsFd, start: usize, bytes: usize) -> Result<()> {
    let range = Range { start: start as u64, bytes: bytes as u64 };
    let mut poison = Poison { range, mode: 0, changed: 0 };
    // SAFETY: the kernel reads and fills the structure. It changes only pages that are not there,
    // in ranges that are registered with this descriptor.
    unsafe { ioctl::ioctl(uffd, Updater::<POISON_COMMAND, Poison>::new(&mut poison)) }
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

/// Memory for which no swap space is reserved.
const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::NORESERVE);
const PRIVATE: MapFlags = MapFlags::PRIVATE.union(MapFlags::NORESERVE);

/// A shared mapping of a file, or anonymous memory, unmapped when it is dropped.
#[derive(Debug)]
pub(crate) struct OwnedMapping {
    start: usize,
    bytes: usize,
}

impl OwnedMapping {
    /// Maps a part of a file where the kernel chooses.
    pub(crate) fn new(file: impl AsFd, offset: u64, bytes: usize, writable: bool) -> Result<Self> {
        let rights = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights, SHARED, file, offset)? };
        Ok(Self { start: base.expose_provenance(), bytes })
    }

    /// Maps a part of a memory file, or anonymous memory, whose faults userfaultfd reports from the
    /// first access on. The children of this process do not have it.
    ///
    /// Until then there is no access: a program that locks all its memory (`mlockall`) has the
    /// kernel fault the pages of each new mapping in, which would make empty pages.
    pub(crate) fn registered(
        memory: Option<(BorrowedFd<'_>, u64)>,
        bytes: usize,
        writable: bool,
        (uffd, mode): (impl AsFd, u64),
    ) -> Result<Self> {
        let (none, null) = (ProtFlags::empty(), ptr::null_mut());
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe {
            match memory {
                Some((file, offset)) => mm::mmap(null, bytes, none, SHARED, file, offset)?,
                None => mm::mmap_anonymous(null, bytes, none, PRIVATE)?,
            }
        };
        let mapped = Self { start: base.expose_provenance(), bytes };
        mapped.prepare()?;
        register(uffd, mapped.start, bytes, mode)?;
        let read = MprotectFlags::READ;
        let rights = if writable { read | MprotectFlags::WRITE } else { read };
        // SAFETY: the mapping is new, and no reference to it exists.
        unsafe { mm::mprotect(base, bytes, rights)? };
        Ok(mapped)
    }

    /// Says what a new mapping is not.
    fn prepare(&self) -> Result<()> {
        self.is_not_inherited()?;
        // Kernels may be built without huge pages, and without merged pages. A merged page forgets
        // that it is write-protected.
        // SAFETY: the range is this mapping, and no contents change.
        unsafe {
            let _ = advise(self.start, self.bytes, Advice::LinuxNoHugepage);
            let _ = advise(self.start, self.bytes, Advice::LinuxUnmergeable);
        }
        // What is locked would be faulted in as soon as it is accessible.
        let _ = lock(self.start, self.bytes, false);
        Ok(())
    }

    /// Puts a mapping of a memory file, which has no bytes yet, at the addresses of a mapping, in
    /// one step: a thread that accesses them has SIGBUS before, at and after that. What was there
    /// is gone. If it fails, the former mapping is in its place. If that is gone, too, ends the
    /// process: another mapping could get the addresses, to which the program has pointers.
    ///
    /// # Safety
    /// The caller owns the addresses, and no byte there is needed any more.
    pub(crate) unsafe fn put_at(
        start: usize,
        bytes: usize,
        (file, offset): (BorrowedFd<'_>, u64),
        writable: bool,
        (uffd, mode): (impl AsFd, u64),
    ) -> Result<()> {
        let rights = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights, SHARED, file, offset)? };
        let mut mapped = Self { start: base.expose_provenance(), bytes };
        // A child that is forked from now on must not have it either.
        mapped.prepare()?;
        let target = ptr::with_exposed_provenance_mut(start);
        // SAFETY: the mapping that moves is new, and the caller promises the rest.
        let moved = unsafe { mm::mremap_fixed(base, bytes, bytes, MremapFlags::MAYMOVE, target) };
        if let Err(errno) = moved {
            // The kernel may fail before it unmaps what is there, or after that.
            // SAFETY: the call changes no memory.
            return match unsafe { mm::msync(target, bytes, MsyncFlags::ASYNC) } {
                Ok(()) => Err(errno),
                Err(_) => end_without_mapping(start, errno),
            };
        }
        mapped.forget();
        // A mapping that moves is no longer registered.
        match register(uffd, start, bytes, mode) {
            Ok(()) => Ok(()),
            Err(errno) => end_without_mapping(start, errno),
        }
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

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// Drops the translations of a range that maps a file: the next access faults. Drops the pages of a
/// range of anonymous memory.
///
/// # Safety
/// The caller owns the range, and needs no byte of anonymous memory there any more.
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

    /// The ranges: the first address and the bytes of each.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, usize)> {
        let ranges = &self.ranges[..self.count];
        ranges.iter().map(|range| (range.iov_base.addr(), range.iov_len))
    }

    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    pub(crate) fn has_several(&self) -> bool {
        self.count > 1
    }

    /// Drops the translations of all. Returns whether it did: earlier kernels than 6.14 do not let
    /// a process do that to itself, or know no such name for it.
    ///
    /// # Safety
    /// As for [`drop_translations`], of all ranges.
    pub(crate) unsafe fn drop_translations(&self) -> bool {
        let count = self.count;
        let bytes: usize = self.ranges[..count].iter().map(|range| range.iov_len).sum();
        if count == 0 {
            return true;
        }
        let (process, ranges) = (THIS_THREAD, self.ranges.as_ptr());
        let advice = libc::MADV_DONTNEED;
        // SAFETY: the kernel reads the array, and the caller promises the rest.
        let done =
            unsafe { libc::syscall(libc::SYS_process_madvise, process, ranges, count, advice, 0) };
        done == bytes as i64
    }
}

/// Ends the process, because a mapping that the program has is gone.
fn end_without_mapping(start: usize, errno: Errno) -> ! {
    eprintln!("aquila: the mapping at {start:#x} was lost while its file moved: {errno}");
    std::process::abort();
}

/// Advice that changes no contents of a mapping.
///
/// # Safety
/// The caller owns the range, and with this advice the kernel leaves contents as they are.
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

/// Copies bytes out of mapped memory, to which other threads may store meanwhile.
///
/// # Safety
/// The range is mapped, and an access causes no fault that the cache would have to handle.
pub(crate) unsafe fn load_bytes(from: usize, to: &mut [u8]) {
    for (at, bytes) in pieces(from, to.len()) {
        let address = from + at;
        // SAFETY: the caller's promise; words are aligned, and all accesses are atomic.
        unsafe {
            match bytes {
                WORD => {
                    let word = AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address));
                    let word = u64::from_le(word.load(Ordering::Relaxed));
                    to[at..at + WORD].copy_from_slice(&word.to_le_bytes());
                }
                _ => {
                    let byte = AtomicU8::from_ptr(ptr::with_exposed_provenance_mut(address));
                    to[at] = byte.load(Ordering::Relaxed);
                }
            }
        }
    }
}

/// Copies bytes into mapped memory, to which other threads may store meanwhile.
///
/// # Safety
/// As for [`load_bytes`]; the range is mapped for writing.
pub(crate) unsafe fn store_bytes(to: usize, from: &[u8]) {
    for (at, bytes) in pieces(to, from.len()) {
        let address = to + at;
        // SAFETY: as above.
        unsafe {
            match from[at..at + bytes].try_into().map(u64::from_le_bytes) {
                Ok(word) => AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address))
                    .store(word.to_le(), Ordering::Relaxed),
                Err(_) => AtomicU8::from_ptr(ptr::with_exposed_provenance_mut(address))
                    .store(from[at], Ordering::Relaxed),
            }
        }
    }
}

/// Stores those bytes to mapped memory that are zero there, in one step for each.
///
/// # Safety
/// As for [`store_bytes`].
pub(crate) unsafe fn fill_zeros(to: usize, from: &[u8]) {
    for (at, new) in from.iter().enumerate() {
        // SAFETY: as above.
        let byte = unsafe { AtomicU8::from_ptr(ptr::with_exposed_provenance_mut(to + at)) };
        let _ = byte.compare_exchange(0, *new, Ordering::Relaxed, Ordering::Relaxed);
    }
}

const WORD: usize = size_of::<u64>();

/// The aligned words of a range of addresses, and its other bytes: the distance of each from the
/// beginning, and how many bytes it has.
fn pieces(start: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let is_word = (start + at).is_multiple_of(WORD) && bytes - at >= WORD;
        let piece = (at, if is_word { WORD } else { 1 });
        let is_left = at < bytes;
        at += piece.1;
        is_left.then_some(piece)
    })
}

/// The bytes at addresses.
///
/// # Safety
/// The range is mapped for reading as long as the result is used, and no thread changes it.
pub(crate) unsafe fn bytes_at<'a>(start: usize, bytes: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(ptr::with_exposed_provenance(start), bytes) }
}

/// Signals of this thread, blocked until this is dropped.
///
/// In the handler of SIGBUS they are blocked already, as a rule: then there is nothing to undo,
/// which saves a call for each fault.
pub(crate) struct BlockedSignals {
    /// The signals that were blocked before, if they have to come back: a bit for each.
    before: Option<u64>,
}

impl BlockedSignals {
    pub(crate) fn new() -> Self {
        let before = Self::set(u64::MAX);
        let is_changed = Self::CAN_BE_BLOCKED & !before != 0;
        Self { before: is_changed.then_some(before) }
    }

    /// The same for code that changes the mask itself meanwhile.
    pub(crate) fn for_changes() -> Self {
        Self { before: Some(Self::set(u64::MAX)) }
    }

    /// All signals but the two that the kernel delivers always, and the two that the C library
    /// keeps for itself (32 and 33).
    const CAN_BE_BLOCKED: u64 =
        !(1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 1 << 31 | 1 << 32);

    /// Blocks these signals and no others. Returns those that were.
    fn set(signals: u64) -> u64 {
        let mut new = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut old = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: a set is a bit for each signal, and longer than the word that has the 64 of
        // Linux; the call reads and fills sets.
        unsafe {
            new.as_mut_ptr().cast::<u64>().write(signals);
            libc::pthread_sigmask(libc::SIG_SETMASK, new.as_ptr(), old.as_mut_ptr());
            old.as_ptr().cast::<u64>().read()
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            Self::set(before);
        }
    }
}

/// `pwrite(2)` by a thread whose signals are blocked. A write beyond the limit of file sizes
/// (`RLIMIT_FSIZE`) is an error, and no signal that would end the process when they are open again.
pub(crate) fn write_at(file: BorrowedFd<'_>, bytes: &[u8], at: u64) -> Result<usize> {
    let was_pending = is_limit_signal_pending();
    let written = rustix::io::pwrite(file, bytes, at);
    if written == Err(Errno::FBIG) && !was_pending && is_limit_signal_pending() {
        let set = limit_signal();
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call reads the set and the time. It takes a signal that is blocked, and is
        // pending.
        unsafe { libc::sigtimedwait(set.as_ptr(), ptr::null_mut(), &raw const none) };
    }
    written
}

/// SIGXFSZ as a set.
fn limit_signal() -> MaybeUninit<libc::sigset_t> {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: both calls fill the set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGXFSZ);
    }
    set
}

/// Whether SIGXFSZ waits for this thread.
fn is_limit_signal_pending() -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: the first call fills the set, and the second reads it.
    unsafe {
        libc::sigpending(set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), libc::SIGXFSZ) == 1
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
