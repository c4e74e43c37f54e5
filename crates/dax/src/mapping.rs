//! A file in the address space of this process.
//!
//! Invariants: `base..base + mapped` is mapped as long as the value lives. Other processes may
//! change the bytes, and may shorten the file: so this module copies by instructions of which the
//! compiler assumes nothing.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::process::Pid;

use crate::error::{Error, Result};
use crate::persist::{self, Flush};
use crate::sys;

/// How the program will use a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// To read it.
    Read,
    /// To read and to write it.
    ReadWrite,
}

/// All of a file, mapped; unmapped when dropped.
///
/// It shows the file as it is, with what is appended later, up to
/// [`capacity`](Self::capacity) bytes.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// Bytes of address space.
    mapped: usize,
    file: Arc<File>,
    access: Access,
    /// Whether written-back cache lines are durable.
    flushes: bool,
    /// The process that unmaps it: a forked child does not have it.
    owner: Pid,
}

// SAFETY: the memory belongs to no thread. All threads access it by copies of which the compiler
// assumes nothing, or by references for which the caller promises that nothing is written.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps so many bytes of a file from its beginning: of its table, or of the file itself. If
    /// stores are to be `flushed` by the program, and the storage allows that, it may.
    pub(crate) fn new(
        file: &Arc<File>,
        table: Option<BorrowedFd<'_>>,
        bytes: usize,
        access: Access,
        flushed: bool,
    ) -> Result<Self, Errno> {
        let target = table.unwrap_or(file.as_fd());
        let map = |flags| sys::map(target, 0, bytes, access == Access::ReadWrite, flags);
        let synchronous = match flushed {
            true => map(MapFlags::SHARED_VALIDATE | MapFlags::SYNC),
            false => Err(Errno::OPNOTSUPP),
        };
        let (base, flushes) = match synchronous {
            // It need not be, or the file is on no byte-addressable storage.
            Err(Errno::OPNOTSUPP | Errno::INVAL) => (map(MapFlags::SHARED)?, false),
            mapped => (mapped?, true),
        };
        Ok(Self {
            base: NonNull::new(base).ok_or(Errno::NOMEM)?,
            mapped: bytes,
            file: Arc::clone(file),
            access,
            flushes,
            owner: rustix::process::getpid(),
        })
    }

    /// Its first address: the same for its whole life.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes of the file that it shows now. A system call.
    ///
    /// # Errors
    /// What the system said.
    pub fn length(&self) -> Result<u64> {
        Ok(length_of(self.file.as_fd())?.min(self.capacity()))
    }

    /// Bytes that it can show: of address space.
    pub fn capacity(&self) -> u64 {
        self.mapped as u64
    }

    /// The rights of the mapping.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Copies bytes out of it. The copy may have parts of a concurrent write.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.within(offset, bytes.len())?;
        // SAFETY: the range is mapped, and the bytes are the caller's.
        unsafe { sys::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes into it. Concurrent readers may see a part of them. They survive a loss of
    /// power after [`DaxFile::sync`](crate::DaxFile::sync) or [`persist`](Self::persist).
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::ReadOnly`].
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.writable(offset, bytes.len())?;
        // SAFETY: the range is mapped for writing.
        unsafe { sys::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Copies bytes into it, past the CPU's caches, so that they survive a loss of power when this
    /// returns.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at); what the system said, where the CPU alone cannot make them
    /// durable.
    pub fn write_durably(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        if !self.is_flushed_by_the_cpu() {
            self.write_at(offset, bytes)?;
            return self.persist(offset, bytes.len());
        }
        let to = self.writable(offset, bytes.len())?;
        // SAFETY: the range is mapped for writing.
        unsafe { persist::copy_past_caches(bytes, to) };
        Ok(())
    }

    /// Makes a range survive a loss of power: writes back the CPU's caches where that is enough
    /// ([`Durability::Flushed`](crate::Durability::Flushed) on byte-addressable storage), and calls
    /// `msync` elsewhere.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; what the system said.
    pub fn persist(&self, offset: u64, bytes: usize) -> Result<()> {
        let start = self.within(offset, bytes)?;
        if self.is_flushed_by_the_cpu() {
            // SAFETY: the range is mapped.
            unsafe { persist::flush(start, bytes) };
            return Ok(());
        }
        sys::sync_range(start, bytes)
            .map_err(|errno| Error::of("making bytes of a mapping durable", errno))
    }

    fn is_flushed_by_the_cpu(&self) -> bool {
        self.flushes && Flush::of_this_cpu() != Flush::None
    }

    /// The first `length` bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    ///
    /// # Safety
    /// For as long as the reference lives no process writes these bytes or shortens the file.
    pub unsafe fn bytes(&self, length: u64) -> Result<&[u8]> {
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        let start = self.within(0, bytes)?;
        // SAFETY: the range is mapped; the caller's promise.
        Ok(unsafe { slice::from_raw_parts(start, bytes) })
    }

    /// The address of a range that the mapping shows.
    fn within(&self, offset: u64, bytes: usize) -> Result<*mut u8> {
        let length = self.length()?;
        let end = offset.saturating_add(bytes as u64);
        if end > length {
            return Err(Error::OutOfRange { start: offset, end, length });
        }
        Ok(self.base.as_ptr().wrapping_add(offset as usize))
    }

    fn writable(&self, offset: u64, bytes: usize) -> Result<*mut u8> {
        match self.access {
            Access::ReadWrite => self.within(offset, bytes),
            Access::Read => Err(Error::ReadOnly { doing: "writing to a mapping" }),
        }
    }
}

/// Bytes of a file.
pub(crate) fn length_of(file: BorrowedFd<'_>) -> Result<u64> {
    sys::length(file).map_err(|errno| Error::of("asking for the file's length", errno))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if rustix::process::getpid() != self.owner {
            return;
        }
        // SAFETY: the range is ours, and every reference into it borrows the value. A failure would
        // leak addresses; drop cannot report it.
        let _ = unsafe { sys::unmap(self.base.as_ptr(), self.mapped) };
    }
}
