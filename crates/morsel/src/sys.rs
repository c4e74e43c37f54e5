//! The system calls on raw memory and on the module's file system. Each function is one call.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use rustix::io::{Errno, Result};
use rustix::ioctl::{self, IntegerSetter, NoArg, Opcode, Updater};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use vellum_uapi::morsel::{self, Create, Fill, Query, Stat};

/// The rights of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rights {
    Read,
    ReadAndWrite,
}

impl Rights {
    fn flags(self) -> ProtFlags {
        match self {
            Self::Read => ProtFlags::READ,
            Self::ReadAndWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// Maps `bytes` of a file where the kernel chooses.
pub(crate) fn map(
    file: BorrowedFd<'_>,
    bytes: usize,
    rights: Rights,
    flags: MapFlags,
) -> Result<*mut u8> {
    // SAFETY: without an address the kernel takes addresses that no mapping uses.
    let base = unsafe { mm::mmap(ptr::null_mut(), bytes, rights.flags(), flags, file, 0)? };
    Ok(base.cast())
}

/// Maps `bytes` of a file exactly at `address`; `EEXIST` if another mapping is there.
pub(crate) fn map_at(
    file: BorrowedFd<'_>,
    address: usize,
    bytes: usize,
    rights: Rights,
    flags: MapFlags,
) -> Result<*mut u8> {
    let wanted = ptr::without_provenance_mut(address);
    let flags = flags | MapFlags::FIXED_NOREPLACE;
    // SAFETY: NOREPLACE never replaces a mapping.
    let base = unsafe { mm::mmap(wanted, bytes, rights.flags(), flags, file, 0)? };
    if base.addr() != address {
        // Some tools treat the address as a hint, and put the mapping elsewhere. SAFETY: the
        // mapping was made by the call above and no other code knows it.
        unsafe { mm::munmap(base, bytes)? };
        return Err(Errno::EXIST);
    }
    Ok(base.cast())
}

/// Takes `bytes` of address space, which the caller replaces by another mapping or unmaps.
pub(crate) fn reserve(bytes: usize) -> Result<*mut u8> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: without an address the kernel takes addresses that no mapping uses.
    let base = unsafe { mm::mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::empty(), flags)? };
    Ok(base.cast())
}

/// Maps `bytes` of a file over the mapping at `address`.
///
/// # Safety
/// The caller owns the range and nothing points into it.
pub(crate) unsafe fn map_over(
    file: BorrowedFd<'_>,
    offset: u64,
    address: *mut u8,
    bytes: usize,
    rights: Rights,
    flags: MapFlags,
) -> Result<()> {
    let flags = flags | MapFlags::FIXED;
    // SAFETY: the caller's promise.
    unsafe { mm::mmap(address.cast(), bytes, rights.flags(), flags, file, offset) }.map(drop)
}

/// `munmap(2)`.
///
/// # Safety
/// The caller owns the range and nothing points into it any more.
pub(crate) unsafe fn unmap(address: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { mm::munmap(address.cast(), bytes) }
}

/// Advice that changes no contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harmless {
    /// A forked child does not have the range.
    DontFork,
    /// Huge pages may be used.
    HugePage,
    /// Faults pages in now, not when they are read.
    PopulateRead,
    /// Faults pages in now, not when they are written.
    PopulateWrite,
}

/// `madvise(2)` on a range of the caller's.
pub(crate) fn advise(address: *mut u8, bytes: usize, advice: Harmless) -> Result<()> {
    let advice = match advice {
        Harmless::DontFork => Advice::LinuxDontFork,
        Harmless::HugePage => Advice::LinuxHugepage,
        Harmless::PopulateRead => Advice::LinuxPopulateRead,
        Harmless::PopulateWrite => Advice::LinuxPopulateWrite,
    };
    // SAFETY: none of these changes contents, whichever code owns the range.
    unsafe { mm::madvise(address.cast(), bytes, advice) }
}

/// Collapses a range into huge pages (Linux 6.1), which changes no contents.
pub(crate) fn collapse(address: *mut u8, bytes: usize) -> Result<()> {
    const MADV_COLLAPSE: i32 = 25; // not every libc has it
    // SAFETY: the call changes no contents, whichever code owns them.
    match unsafe { libc::madvise(address.cast(), bytes, MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

/// `pread(2)` to memory that other processes may have, too.
///
/// # Safety
/// The caller may write the memory, and there are no references to it.
pub(crate) unsafe fn read_at(
    file: BorrowedFd<'_>,
    from: u64,
    address: *mut u8,
    bytes: usize,
) -> Result<usize> {
    let from = from.try_into().map_err(|_| Errno::INVAL)?;
    // SAFETY: the caller's promise; the kernel checks that the addresses are mapped.
    let read = unsafe { libc::pread(file.as_raw_fd(), address.cast(), bytes, from) };
    // Only an error is negative.
    usize::try_from(read).map_err(|_| last_error())
}

/// The effective user of the process at the other side of a socket, when it connected.
/// (`socket_peercred` of rustix 1.1 takes the number of a process of another namespace, which is 0,
/// for an error.)
pub(crate) fn peer_user(socket: BorrowedFd<'_>) -> Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    let place = (&raw mut peer).cast();
    // SAFETY: the kernel writes at most `bytes` bytes to `peer`, whose fields are integers.
    match unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, place, &raw mut bytes) } {
        0 => Ok(peer.uid),
        _ => Err(last_error()),
    }
}

/// The error of the last call that failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Whether a process has a file open for writing, or maps it for writing. The file's owner may ask,
/// and a process with `CAP_LEASE`. The descriptor must be for reading, and no other process may
/// have its description: the description carries the signal of the lease, and each process that has
/// it may choose which signal.
pub(crate) fn is_open_for_writing(file: BorrowedFd<'_>) -> Result<bool> {
    const F_SETSIG: i32 = 10; // not every libc has it
    let set = |command, value: i32| {
        // SAFETY: these commands take a number and touch no memory of the process.
        match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
            -1 => Err(last_error()),
            _ => Ok(()),
        }
    };
    // If a writer opens the file during the lease, the kernel sends this signal, which is ignored
    // by default; the writer waits until the lease ends.
    set(F_SETSIG, libc::SIGURG)?;
    match set(libc::F_SETLEASE, libc::F_RDLCK) {
        Err(Errno::AGAIN) => Ok(true),
        result => result.and_then(|()| set(libc::F_SETLEASE, libc::F_UNLCK)).map(|()| false),
    }
}

/// A file that is the module's, as `fstatfs` says: so the meaning of its commands is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfModule<'a>(BorrowedFd<'a>);

impl<'a> OfModule<'a> {
    /// `None`: the file is not the module's.
    pub(crate) fn new(file: BorrowedFd<'a>) -> Result<Option<Self>> {
        let is = rustix::fs::fstatfs(file)?.f_type as u64 == u64::from(morsel::MAGIC);
        Ok(is.then_some(Self(file)))
    }

    pub(crate) fn query(self) -> Result<Query> {
        let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
        self.update::<{ morsel::QUERY as Opcode }, Query>(&mut query).map(|()| query)
    }

    pub(crate) fn create(self, mut create: Create) -> Result<()> {
        self.update::<{ morsel::CREATE as Opcode }, Create>(&mut create)
    }

    /// `filled` has the bytes that were read before an error.
    pub(crate) fn fill(self, fill: &mut Fill) -> Result<()> {
        self.update::<{ morsel::FILL as Opcode }, Fill>(fill)
    }

    pub(crate) fn stat(self) -> Result<Stat> {
        let mut stat = Stat { size: size_of::<Stat>() as u32, ..Stat::default() };
        self.update::<{ morsel::STAT as Opcode }, Stat>(&mut stat).map(|()| stat)
    }

    pub(crate) fn seal(self, seals: u64) -> Result<()> {
        let seals = usize::try_from(seals).map_err(|_| Errno::INVAL)?;
        // SAFETY: the command takes a number and touches no memory of the process.
        unsafe {
            let command = IntegerSetter::<{ morsel::SEAL as Opcode }>::new_usize(seals);
            ioctl::ioctl(self.0, command)
        }
    }

    pub(crate) fn revoke(self) -> Result<()> {
        // SAFETY: the command takes no argument. Threads that access the Morsel get SIGBUS, never
        // other bytes.
        unsafe { ioctl::ioctl(self.0, NoArg::<{ morsel::REVOKE as Opcode }>::new()) }
    }

    fn update<const COMMAND: Opcode, T>(self, value: &mut T) -> Result<()> {
        // SAFETY: the file is the module's, whose commands take the structures that they are
        // called with above: sizes are a part of a command's number.
        unsafe { ioctl::ioctl(self.0, Updater::<COMMAND, T>::new(value)) }
    }
}
