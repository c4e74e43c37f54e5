//! Which variant of userfaultfd works here, found out by using it.

use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::sys::FaultsOf;
use crate::{PAGE_SIZE, sys};

/// The backend's name, which commands print.
pub(crate) const USERFAULTFD: &str = "userfaultfd";

/// What the backend needs in any case.
const NEEDED: u64 = sys::FEATURE_MISSING_SHMEM | sys::FEATURE_MINOR_SHMEM;

/// Whether clean pages are write-protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DirtyTracking {
    /// By write protection where the kernel has it for memory files.
    #[default]
    Auto,
    /// By write protection: the first store to a clean page faults (Linux 6.4).
    WriteProtect,
    /// Every page that is mapped in a writable mapping counts as dirty (Linux 5.14).
    Mapped,
}

/// Which threads handle faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Faults {
    /// The thread that faults, in a handler of SIGBUS. System calls that are given addresses of a
    /// mapping fail with `EFAULT` unless the page is mapped.
    #[default]
    Signal,
    /// Threads of the cache, up to 8, which handle the faults of system calls, too. Each fault is
    /// slower by two switches between threads. Frames are in memory files, as with
    /// [`Frames::MemoryFile`]. It needs Linux 6.6, and the right to handle faults
    /// of the kernel: `CAP_SYS_PTRACE`, access to `/dev/userfaultfd`, or
    /// `vm.unprivileged_userfaultfd` = 1. No handler of SIGBUS is installed.
    Monitor,
}

impl Faults {
    /// Whose faults these are.
    fn of(self) -> FaultsOf {
        match self {
            Self::Signal => FaultsOf::Program,
            Self::Monitor => FaultsOf::ProgramAndKernel,
        }
    }

    /// What the kernel must have for that.
    fn needed(self) -> u64 {
        match self {
            Self::Signal => sys::FEATURE_SIGBUS,
            Self::Monitor => sys::FEATURE_POISON,
        }
    }
}

/// Which memory has the pages of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Frames {
    /// Anonymous memory while a file has one mapping and no pin, where that works; otherwise
    /// memory files.
    #[default]
    Auto,
    /// The same; to map a file is an error where anonymous memory does not work.
    Anonymous,
    /// Memory files, always.
    MemoryFile,
}

/// A userfaultfd, and what it can.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    pub(crate) descriptor: OwnedFd,
    /// Whether stores to clean pages of memory files fault.
    pub(crate) protects_memory_files: bool,
    /// The same for anonymous memory.
    pub(crate) protects_anonymous: bool,
}

/// Opens a userfaultfd, and says whether stores to clean pages will fault.
///
/// # Errors
/// [`Error::NoBackend`], with the reason.
pub(crate) fn open(tracking: DirtyTracking, faults: Faults) -> Result<Userfaultfd> {
    let failed = |reason: String| Error::NoBackend { backend: USERFAULTFD, reason };
    let open = |features| {
        let opened = sys::userfaultfd(faults.of(), features);
        opened.map_err(|errno| failed(refused(errno, faults)))
    };
    let (query, features) = open(0)?;
    drop(query);
    if features & NEEDED != NEEDED {
        let reason = "the kernel has no minor faults for memory files: it needs Linux 5.14";
        return Err(failed(reason.to_owned()));
    }
    if features & faults.needed() == 0 {
        let reason = "it cannot have an access of a system call fail: it needs Linux 6.6";
        return Err(failed(reason.to_owned()));
    }
    let found = |descriptor, protects_memory_files| {
        let protects_anonymous =
            tracking != DirtyTracking::Mapped && protects_anonymous(&descriptor).is_ok();
        Userfaultfd { descriptor, protects_memory_files, protects_anonymous }
    };
    let needed = NEEDED | faults.needed() | features & sys::FEATURE_WP;
    if tracking != DirtyTracking::Mapped && features & sys::FEATURE_WP_SHMEM != 0 {
        let (uffd, _) = open(needed | sys::FEATURE_WP_SHMEM)?;
        match maps_a_page(&uffd, true) {
            Ok(()) => return Ok(found(uffd, true)),
            Err(Errno::INVAL) => {} // Linux before 6.4
            Err(errno) => return Err(failed(format!("it does not map a page: {errno}"))),
        }
    }
    if tracking == DirtyTracking::WriteProtect {
        let reason = "it cannot map write-protected pages of memory files: it needs Linux 6.4";
        return Err(failed(reason.to_owned()));
    }
    let (uffd, _) = open(needed)?;
    match maps_a_page(&uffd, false) {
        Ok(()) => Ok(found(uffd, false)),
        Err(errno) => Err(failed(format!("it does not map a page: {errno}"))),
    }
}

/// Why the kernel gives no userfaultfd.
fn refused(errno: Errno, faults: Faults) -> String {
    match errno {
        Errno::NOSYS => "the kernel is built without userfaultfd".to_owned(),
        Errno::PERM | Errno::ACCESS if faults == Faults::Monitor => {
            "this process may not handle faults of system calls: it needs CAP_SYS_PTRACE, access \
             to /dev/userfaultfd, or vm.unprivileged_userfaultfd = 1"
                .to_owned()
        }
        Errno::PERM | Errno::ACCESS => {
            "the system call userfaultfd is forbidden here, perhaps by a seccomp filter".to_owned()
        }
        Errno::INVAL => "the kernel is too old: it needs Linux 5.14".to_owned(),
        errno => format!("the kernel refuses it: {errno}"),
    }
}

/// Maps a page of a memory file with a userfaultfd.
fn maps_a_page(uffd: &OwnedFd, protected: bool) -> Result<(), Errno> {
    let memory = memfd_create("vellum-aquila-probe", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, PAGE_SIZE as u64)?;
    rustix::io::pwrite(&memory, &[1], 0)?;
    let mode = sys::MISSING | sys::MINOR | if protected { sys::WRITE_PROTECT } else { 0 };
    let memory = Some((memory.as_fd(), 0));
    let range = sys::OwnedMapping::registered(memory, PAGE_SIZE, true, (uffd, mode))?;
    sys::map_present(uffd, range.start(), PAGE_SIZE, protected).1
}

/// Makes a write-protected page of anonymous memory with a userfaultfd.
fn protects_anonymous(uffd: &OwnedFd) -> Result<(), Errno> {
    let mode = sys::MISSING | sys::WRITE_PROTECT;
    let range = sys::OwnedMapping::registered(None, PAGE_SIZE, true, (uffd, mode))?;
    sys::copy_and_map(uffd, range.start(), &[1; PAGE_SIZE], true).1?;
    sys::write_protect(uffd, range.start(), PAGE_SIZE, false)
}
