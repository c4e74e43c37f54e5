//! Userfaultfd, by which a program gets the faults in its memory, and has the kernel put marks into
//! its page tables.
#![allow(unsafe_code)]

use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};

use rustix::io::Errno;

use crate::sys;

/// The features that a descriptor requests.
pub mod feature {
    /// Reports which faults are stores.
    pub const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    /// Marks absent pages, too.
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    /// The kernel resolves stores itself. With this it accepts memory of any kind.
    pub const WP_ASYNC: u64 = 1 << 15;
}

/// The modes that it registers.
pub mod mode {
    /// Pages that are missing.
    pub const MISSING: u64 = 1;
    /// Stores to pages with a mark.
    pub const WP: u64 = 2;
    /// Pages that are present, but not mapped.
    pub const MINOR: u64 = 4;
}

/// Faults of the program's own instructions only.
const USER_MODE_ONLY: i32 = 1;

/// `UFFDIO_API`, and its argument.
const API: u32 = 0xc018_aa3f;
const VERSION: u64 = 0xaa;

#[repr(C)]
struct Api {
    version: u64,
    features: u64,
    _ioctls: u64,
}

/// `UFFDIO_REGISTER`, and its argument.
const REGISTER: u32 = 0xc020_aa00;

#[repr(C)]
struct Register {
    start: u64,
    length: u64,
    mode: u64,
    _ioctls: u64,
}

/// A descriptor. Memory stays registered with it for as long as it lives.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// A descriptor with these features; `None` if this kernel does not know them.
    pub fn new(features: u64) -> Option<Self> {
        let flags = libc::O_CLOEXEC | USER_MODE_ONLY;
        // SAFETY: the call takes a number.
        let made = sys::checked(unsafe { libc::syscall(libc::SYS_userfaultfd, flags) });
        // SAFETY: the descriptor is new and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(made.expect("userfaultfd") as i32) };
        let mut api = Api { version: VERSION, features, _ioctls: 0 };
        match sys::ioctl(fd.as_fd(), API, (&raw mut api).expose_provenance() as u64) {
            Ok(_) => Some(Self(fd)),
            Err(error) => {
                assert_eq!(error, Errno::INVAL, "UFFDIO_API");
                None
            }
        }
    }

    /// Registers memory.
    pub fn register(&self, start: usize, length: usize, mode: u64) -> Result<(), Errno> {
        let (start, length) = (start as u64, length as u64);
        let mut register = Register { start, length, mode, _ioctls: 0 };
        let argument = (&raw mut register).expose_provenance() as u64;
        sys::ioctl(self.0.as_fd(), REGISTER, argument).map(drop)
    }
}
