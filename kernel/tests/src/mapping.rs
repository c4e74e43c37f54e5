//! A range of addresses that a test has mapped.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use crate::sys::{self, Request};
use crate::{PAGE, access};

/// A mapping, unmapped when it is dropped.
#[derive(Debug)]
pub struct Mapping {
    start: usize,
    length: usize,
}

impl Mapping {
    /// Maps as requested.
    pub fn new(request: Request<'_>) -> Result<Self, Errno> {
        let start = sys::mmap(request)?;
        Ok(Self { start, length: request.length })
    }

    /// `length` bytes of a device, shared, readable and writable, wherever there is room.
    pub fn of_device(fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<Self, Errno> {
        let (protection, flags) = (sys::READ_WRITE, libc::MAP_SHARED);
        Self::new(Request { address: 0, length, protection, flags, fd: Some(fd), offset })
    }

    /// Ordinary memory, wherever there is room, or at an address that must be free.
    pub fn anonymous(address: Option<usize>, length: usize) -> Result<Self, Errno> {
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        if address.is_some() {
            flags |= libc::MAP_FIXED_NOREPLACE;
        }
        let (address, protection) = (address.unwrap_or(0), sys::READ_WRITE);
        Self::new(Request { address, length, protection, flags, fd: None, offset: 0 })
    }

    /// Its first address.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Its bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The address after it.
    pub fn end(&self) -> usize {
        self.start + self.length
    }

    /// The address of a page, which may be outside of the mapping.
    pub fn page(&self, page: u64) -> usize {
        self.start + usize::try_from(page).expect("pages fit the address space") * PAGE
    }

    /// Fills a page with the bytes of a stamp.
    #[track_caller]
    pub fn stamp(&self, page: u64, stamp: u64) {
        let stored = access::kernel_store(self.page(page), &access::stamped(stamp));
        assert_eq!(stored, Ok(()), "page {page}");
    }

    /// Fails unless a page is full of the bytes of a stamp.
    #[track_caller]
    pub fn assert_stamped(&self, page: u64, stamp: u64) {
        let found = access::kernel_load(self.page(page), PAGE).expect("a present page");
        assert!(found == access::stamped(stamp), "page {page} is not that of stamp {stamp:#x}");
    }

    /// Unmaps it now.
    pub fn unmap(self) -> Result<(), Errno> {
        let (start, length) = (self.start, self.length);
        self.leave();
        sys::munmap(start, length)
    }

    /// Leaves it mapped until the process ends, or until other code maps over it.
    pub fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a failing test, munmap may fail.
        let unmapped = sys::munmap(self.start, self.length);
        assert!(unmapped.is_ok() || std::thread::panicking(), "munmap of {self:?}: {unmapped:?}");
    }
}
