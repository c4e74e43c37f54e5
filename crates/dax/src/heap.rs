//! Ephemeral mappings: files that a program maps, reads or writes once, and unmaps.
//!
//! Invariants: an [`Ephemeral`]'s range is mapped as long as the value lives, and it is this
//! value's alone: the module gives no other attachment the addresses before this one is detached.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;

use rustix::io::Errno;
use rustix::mm::MapFlags;
use vellum_uapi::dax::{MAX_BATCH, MAX_EXTENT, READ_UNIT};

use crate::PAGE_SIZE;
use crate::backend::{self, Backend, BackendChoice};
use crate::error::{Error, Result};
use crate::mapping::{Access, length_of};
use crate::sys;

const DOING: &str = "mapping a file for a short time";

/// How a heap is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapOptions {
    /// The rights of all of its mappings.
    pub access: Access,
    /// Bytes of address space: rounded up to a GiB, and 512 GiB at most. Each mapping takes a
    /// multiple of 2 MiB.
    pub capacity: u64,
    /// Whether the module's heap is used. If it is, a file that it cannot map is still mapped by
    /// `mmap`: [`Ephemeral::backend`] says so.
    pub backend: BackendChoice,
    /// Unmappings whose TLB flushes are made together, 1 to 512; `None` for 33, as in the paper
    /// (section IV.C).
    pub batch: Option<u32>,
}

impl HeapOptions {
    /// The usual ones: 64 GiB.
    pub fn new(access: Access) -> Self {
        Self { access, capacity: 64 << 30, backend: BackendChoice::Auto, batch: None }
    }
}

/// The figures of a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapStat {
    /// Mappings that were made.
    pub mapped: u64,
    /// Those that have ended.
    pub unmapped: u64,
    /// Of these, those that wait for a flush.
    pub waiting: u64,
    /// Flushes of all CPUs' TLBs for unmappings.
    pub flushes: u64,
    /// Faults that the file system has handled.
    pub served_faults: u64,
}

/// Addresses in which a process maps files for a short time, without the costs of `mmap` and
/// `munmap` for each ("DaxVM", sections IV.B and IV.C). Threads share it.
///
/// Where a file cannot be mapped so (no module, other storage, longer than a GiB, no room left) the
/// same calls use `mmap`. So does a forked child, which does not have the heap.
#[derive(Debug)]
pub struct Heap {
    /// The module's heap, mapped; or why there is none.
    slots: Result<Slots, String>,
    access: Access,
}

#[derive(Debug)]
struct Slots {
    descriptor: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the addresses belong to no thread; the module's calls may be made by any.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(options: &HeapOptions) -> Result<Self, String> {
        let writes = options.access == Access::ReadWrite;
        let descriptor = backend::open_heap(writes, options.batch.unwrap_or(0))?;
        let bytes = options.capacity.clamp(1, MAX_EXTENT).next_multiple_of(READ_UNIT) as usize;
        let base = sys::map(descriptor.as_fd(), 0, bytes, writes, MapFlags::SHARED);
        let base = base.map_err(|errno| format!("its addresses cannot be mapped: {errno}"))?;
        let base = NonNull::new(base).ok_or("its addresses begin at 0")?;
        Ok(Self { descriptor, base, bytes })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and every mapping in it borrows the heap. In a forked child
        // nothing is there, and nothing else was mapped there before the child inherited the value.
        let _ = unsafe { sys::unmap(self.base.as_ptr(), self.bytes) };
    }
}

impl Heap {
    /// Makes a heap.
    ///
    /// # Errors
    /// [`Error::System`] (`EINVAL`) for a batch that is not 1 to 512; [`Error::NoTable`] if the
    /// options ask for tables, and this machine has none. Otherwise that is no error: see
    /// [`backend`](Self::backend).
    pub fn new(options: &HeapOptions) -> Result<Self> {
        if options.batch.is_some_and(|batch| !(1..=MAX_BATCH).contains(&batch)) {
            let doing = "making a heap: a batch is 1 to 512 unmappings";
            return Err(Error::System { doing, errno: Errno::INVAL });
        }
        let slots = match options.backend {
            BackendChoice::Only(Backend::Mmap) => Err("the program has chosen mmap".to_owned()),
            _ => Slots::new(options),
        };
        match slots {
            Err(reason) if options.backend == BackendChoice::Only(Backend::Table) => {
                Err(Error::NoTable { reason })
            }
            slots => Ok(Self { slots, access: options.access }),
        }
    }

    /// How files are mapped, if they can be.
    pub fn backend(&self) -> Backend {
        if self.slots.is_ok() { Backend::Table } else { Backend::Mmap }
    }

    /// Why files are mapped by `mmap`, and what to do; `None` if they are not.
    pub fn why_no_heap(&self) -> Option<&str> {
        self.slots.as_ref().err().map(String::as_str)
    }

    /// Maps all of a file, as long as it is now.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] the heap is for writing, and the file is open for reading only;
    /// [`Error::NoMemory`]; what the system said.
    pub fn map(&self, file: &impl AsFd) -> Result<Ephemeral<'_>> {
        self.map_by(file.as_fd(), file.as_fd())
    }

    /// Maps all of a file by its table's descriptor, or its own.
    pub(crate) fn map_by(
        &self,
        table: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
    ) -> Result<Ephemeral<'_>> {
        if let Ok(attached) = self.attach(table, 0, 0) {
            return Ok(attached);
        }
        // An empty file has nothing to map. Or there is no heap, or no room in it.
        self.map_range_by(table, file, 0, length_of(file)?)
    }

    /// Maps a range of a file, which may end after it: an access there is SIGBUS.
    ///
    /// # Errors
    /// As [`map`](Self::map); [`Error::TooLong`].
    pub fn map_range(&self, file: &impl AsFd, offset: u64, length: u64) -> Result<Ephemeral<'_>> {
        self.map_range_by(file.as_fd(), file.as_fd(), offset, length)
    }

    fn map_range_by(
        &self,
        table: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
    ) -> Result<Ephemeral<'_>> {
        let end = offset.saturating_add(length);
        if end > MAX_EXTENT {
            return Err(Error::TooLong { length: end, most: MAX_EXTENT });
        }
        if length == 0 {
            return Ok(self.of(NonNull::dangling(), 0, Held::Nothing));
        }
        match self.attach(table, offset, length) {
            // No file for a heap, no room in it, or this is a forked child, which does not have it.
            Err(Errno::OPNOTSUPP | Errno::FBIG | Errno::NOSPC | Errno::NXIO) => {
                self.map_by_mmap(file, offset, length as usize)
            }
            attached => attached,
        }
        .map_err(|errno| Error::of(DOING, errno))
    }

    fn attach(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: u64,
    ) -> Result<Ephemeral<'_>, Errno> {
        let Ok(slots) = &self.slots else { return Err(Errno::OPNOTSUPP) };
        let (address, length) = sys::attach(slots.descriptor.as_fd(), file, offset, length)?;
        let base = NonNull::new(address).ok_or(Errno::NOMEM)?;
        Ok(self.of(base, length as usize, Held::Attached))
    }

    fn map_by_mmap(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> Result<Ephemeral<'_>, Errno> {
        let inside = (offset % PAGE_SIZE) as usize;
        let writes = self.access == Access::ReadWrite;
        let (from, bytes) = (offset - inside as u64, inside + length);
        let start = sys::map(file, from, bytes, writes, MapFlags::SHARED)?;
        let base = NonNull::new(start.wrapping_add(inside)).ok_or(Errno::NOMEM)?;
        Ok(self.of(base, length, Held::Mapped { inside }))
    }

    fn of(&self, base: NonNull<u8>, length: usize, held: Held) -> Ephemeral<'_> {
        Ephemeral { base, length, held, heap: self }
    }

    /// Flushes at once for what was unmapped, so that its files count as closed. Without this that
    /// happens by itself, after a batch of unmappings, or after 50 ms.
    ///
    /// # Errors
    /// What the system said.
    pub fn flush(&self) -> Result<()> {
        let Ok(slots) = &self.slots else { return Ok(()) };
        sys::reap(slots.descriptor.as_fd()).map_err(|errno| Error::of("flushing a heap", errno))
    }

    /// The heap's figures; `None` where files are mapped by `mmap`.
    ///
    /// # Errors
    /// What the system said.
    pub fn stat(&self) -> Result<Option<HeapStat>> {
        let Ok(slots) = &self.slots else { return Ok(None) };
        let stat = sys::heap_stat(slots.descriptor.as_fd())
            .map_err(|errno| Error::of("asking for a heap's figures", errno))?;
        Ok(Some(HeapStat {
            mapped: stat.attaches,
            unmapped: stat.detaches,
            waiting: stat.zombies,
            flushes: stat.flushes,
            served_faults: stat.served_faults,
        }))
    }
}

/// What holds the addresses of a mapping.
#[derive(Debug)]
enum Held {
    /// An attachment to the heap.
    Attached,
    /// A mapping that begins so many bytes before.
    Mapped { inside: usize },
    /// An empty one has none.
    Nothing,
}

/// A file, or a range of it, in a [`Heap`]; unmapped when dropped.
///
/// A file of up to 2 MiB costs one entry of page tables, and no access to it faults if it has no
/// holes.
#[derive(Debug)]
pub struct Ephemeral<'heap> {
    base: NonNull<u8>,
    length: usize,
    held: Held,
    heap: &'heap Heap,
}

// SAFETY: as for a `Mapping`: the memory belongs to no thread.
unsafe impl Send for Ephemeral<'_> {}
// SAFETY: as above.
unsafe impl Sync for Ephemeral<'_> {}

impl Ephemeral<'_> {
    /// The address of its first byte: dangling if it is empty.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// How it is mapped.
    pub fn backend(&self) -> Backend {
        if matches!(self.held, Held::Attached) { Backend::Table } else { Backend::Mmap }
    }

    /// Copies bytes out of it. The copy may have parts of a concurrent write. If another process
    /// shortens the file, the access is SIGBUS.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let from = self.within(offset, bytes.len())?;
        // SAFETY: the range is mapped, and the bytes are the caller's.
        unsafe { sys::copy(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes into it. They survive a loss of power after [`sync`](Self::sync).
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::ReadOnly`].
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        if self.heap.access == Access::Read {
            return Err(Error::ReadOnly { doing: "writing to a mapping" });
        }
        let to = self.within(offset, bytes.len())?;
        // SAFETY: the range is mapped for writing.
        unsafe { sys::copy(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Makes durable what was stored to the file, through it and by other ways.
    ///
    /// # Errors
    /// What the system said.
    pub fn sync(&self) -> Result<()> {
        if self.length == 0 {
            return Ok(());
        }
        sys::sync_range(self.base.as_ptr(), self.length)
            .map_err(|errno| Error::of("making bytes of a mapping durable", errno))
    }

    /// Its bytes.
    ///
    /// # Safety
    /// For as long as the reference lives no process writes these bytes or shortens the file.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped; the caller's promise.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.length) }
    }

    fn within(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        let end = offset.saturating_add(bytes);
        if end > self.length {
            let (start, length) = (offset as u64, self.length as u64);
            return Err(Error::OutOfRange { start, end: end as u64, length });
        }
        Ok(self.base.as_ptr().wrapping_add(offset))
    }
}

impl Drop for Ephemeral<'_> {
    fn drop(&mut self) {
        match (&self.held, &self.heap.slots) {
            (Held::Attached, Ok(slots)) => {
                // In a forked child there is nothing to detach, and the call fails.
                let _ = sys::detach(slots.descriptor.as_fd(), self.base.as_ptr());
            }
            (Held::Mapped { inside }, _) => {
                let start = self.base.as_ptr().wrapping_sub(*inside);
                // SAFETY: the range is ours, and every reference into it borrows the value. A
                // forked child has a mapping of its own.
                let _ = unsafe { sys::unmap(start, inside + self.length) };
            }
            _ => {}
        }
    }
}
