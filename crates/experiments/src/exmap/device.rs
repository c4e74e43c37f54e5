//! `/dev/exmap`: a surface with its pool, interfaces with their vectors, and the mapping of the
//! page tables.
//!
//! No more than the experiments need. Invariants: a mapping lives as long as any reference to it;
//! the surface's memory is only ever written a byte at a time by [`Exmap::touch`], or by the
//! kernel.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, ensure};
use vellum_uapi::exmap::{self as uapi, Create, Entry};
use vellum_uapi::exmap_published::OP_ALLOC;

/// The device.
const DEVICE: &str = "/dev/exmap";

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Entries of a vector.
pub const ENTRIES: usize = uapi::VECTOR_ENTRIES as usize;

/// Whether there is a device.
pub fn is_there() -> bool {
    Path::new(DEVICE).exists()
}

/// The properties of an exmap to create.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// Pages of the surface.
    pub pages: u64,
    /// Frames of the pool.
    pub frames: u64,
    /// Interfaces.
    pub interfaces: usize,
    /// Of CREATE.
    pub flags: u64,
    /// The source of reads.
    pub backing: Option<BorrowedFd<'a>>,
}

/// A surface and its descriptor.
#[derive(Debug)]
pub struct Exmap {
    file: OwnedFd,
    surface: Mapping,
    pages: u64,
}

impl Exmap {
    /// Makes one.
    ///
    /// # Errors
    /// If there is no device, or it refuses.
    pub fn new(plan: Plan<'_>) -> Result<Exmap> {
        let file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(DEVICE)
            .with_context(|| format!("cannot open {DEVICE}"))?;
        let file: OwnedFd = file.into();
        let create = Create {
            size: size_of::<Create>() as u32,
            interfaces: plan.interfaces as u32,
            flags: plan.flags,
            frames: plan.frames,
            backing: plan.backing.map_or(-1, |backing| backing.as_raw_fd()),
            blocks: 0,
        };
        pass(file.as_fd(), uapi::CREATE, (&raw const create).expose_provenance() as u64)
            .with_context(|| format!("creating an exmap: {plan:?}"))?;
        let surface = Mapping::new(
            file.as_fd(),
            uapi::OFFSET_SURFACE,
            plan.pages as usize * PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
        )
        .context("mapping the surface")?;
        Ok(Exmap { file, surface, pages: plan.pages })
    }

    /// Pages of the surface.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The address of a page.
    pub fn address(&self, page: u64) -> *mut u8 {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        self.surface.start.wrapping_add(page as usize * PAGE)
    }

    /// Writes to a page, which must be present; otherwise a signal ends the process.
    #[inline]
    pub fn touch(&self, page: u64) {
        // SAFETY: the page is part of the mapping, which lives, and no reference into it exists.
        unsafe { self.address(page).write_volatile(1) };
    }

    /// An interface, with its vector mapped, reached by the exmap's descriptor.
    ///
    /// # Errors
    /// If there is no such interface.
    pub fn interface(&self, interface: usize) -> Result<Interface<'_>> {
        let offset = uapi::offset_interface(interface as u64);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let vector = Mapping::new(self.file.as_fd(), offset, PAGE, protection)
            .with_context(|| format!("mapping the vector of interface {interface}"))?;
        Ok(Interface { exmap: self, private: None, vector, number: interface })
    }

    /// The last level of the surface's page tables.
    ///
    /// # Errors
    /// Without the privilege to see them.
    pub fn tables(&self) -> Result<Tables> {
        let bytes = (self.pages as usize * 8).next_multiple_of(PAGE);
        let tables = Mapping::new(self.file.as_fd(), uapi::OFFSET_TABLES, bytes, libc::PROT_READ)
            .context("mapping the page tables")?;
        Ok(Tables { tables, pages: self.pages })
    }
}

/// An interface of an exmap, for one thread.
#[derive(Debug)]
pub struct Interface<'a> {
    exmap: &'a Exmap,
    private: Option<OwnedFd>,
    vector: Mapping,
    number: usize,
}

impl<'a> Interface<'a> {
    /// The same by a descriptor of its own.
    ///
    /// # Errors
    /// If the process has no room for another descriptor.
    pub fn private(mut self) -> Result<Interface<'a>> {
        let number = pass(self.exmap.file.as_fd(), uapi::CLONE, 0)?;
        // SAFETY: the descriptor is new and has no other owner.
        self.private = Some(unsafe { OwnedFd::from_raw_fd(number as RawFd) });
        Ok(self)
    }

    /// Its exmap.
    pub fn exmap(&self) -> &'a Exmap {
        self.exmap
    }

    /// Its number.
    pub fn number(&self) -> usize {
        self.number
    }

    /// The descriptor that it uses.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.private.as_ref().unwrap_or(&self.exmap.file).as_fd()
    }

    fn slot(&self, index: usize) -> &AtomicU64 {
        assert!(index < ENTRIES);
        // SAFETY: the page is mapped for as long as `self` lives, aligned, and all bits are valid.
        unsafe { &*self.vector.start.cast::<AtomicU64>().add(index) }
    }

    /// Puts an entry into the vector.
    #[inline]
    pub fn set(&self, index: usize, entry: Entry) {
        self.slot(index).store(entry.bits(), Ordering::Relaxed);
    }

    /// An entry of the vector.
    #[inline]
    pub fn get(&self, index: usize) -> Entry {
        Entry::from_bits(self.slot(index).load(Ordering::Relaxed))
    }

    /// Runs a command for the first entries; returns how many of them have an error.
    ///
    /// # Errors
    /// If it was not carried out at all.
    #[inline]
    pub fn run(&self, command: u32, entries: usize) -> Result<usize> {
        let vector = uapi::vector(self.number as u64, entries as u64);
        Ok(pass(self.descriptor(), command, vector)? as usize)
    }

    /// The same for single pages.
    ///
    /// # Errors
    /// As [`run`](Interface::run).
    #[inline]
    pub fn run_pages(&self, command: u32, pages: &[u64]) -> Result<usize> {
        for (index, page) in pages.iter().enumerate() {
            self.set(index, Entry::new(*page, 1));
        }
        self.run(command, pages.len())
    }

    /// The same, but each entry must succeed.
    ///
    /// # Errors
    /// With the first page for which it was not.
    pub fn run_all(&self, command: u32, pages: &[u64]) -> Result<()> {
        self.run_pages(command, pages)?;
        for (index, page) in pages.iter().enumerate() {
            let entry = self.get(index);
            ensure!(
                (entry.result(), entry.pages()) == (0, 1),
                "command {command:#x} for page {page}: error {}, {} pages",
                entry.result(),
                entry.pages()
            );
        }
        Ok(())
    }

    /// A page of the surface as an argument of system calls.
    pub fn part(&self, page: u64) -> libc::iovec {
        libc::iovec { iov_base: self.exmap.address(page).cast(), iov_len: PAGE }
    }

    /// Runs an operation of the proxy by `preadv`. Every part must succeed.
    ///
    /// # Errors
    /// If one is not.
    #[inline]
    pub fn preadv(&self, operation: u16, parts: &[libc::iovec]) -> Result<()> {
        let offset = self.number as i64 | i64::from(operation) << 8;
        let (fd, count) = (self.descriptor().as_raw_fd(), parts.len() as i32);
        // SAFETY: the parts are pages of the surface, into which no reference exists.
        let bytes = unsafe { libc::preadv(fd, parts.as_ptr(), count, offset) };
        if bytes < 0 {
            return Err(std::io::Error::last_os_error()).context("preadv of the exmap");
        }
        ensure!(bytes as usize == parts.len() * PAGE, "preadv of the exmap gave {bytes} bytes");
        Ok(())
    }

    /// Populates pages by `preadv`.
    ///
    /// # Errors
    /// If one does not come.
    #[inline]
    pub fn alloc_by_iovec(&self, parts: &[libc::iovec]) -> Result<()> {
        self.preadv(OP_ALLOC, parts)
    }
}

/// The page tables of a surface, as the process sees them.
#[derive(Debug)]
pub struct Tables {
    tables: Mapping,
    pages: u64,
}

// SAFETY: the mapping is only ever read, by atomic loads.
unsafe impl Sync for Tables {}

impl Tables {
    /// Whether a page is present.
    #[inline]
    pub fn has(&self, page: u64) -> bool {
        assert!(page < self.pages);
        // SAFETY: an entry for each page is mapped for as long as `self` lives; processors and
        // the kernel change entries as a whole.
        let entry = unsafe { &*self.tables.start.cast::<AtomicU64>().add(page as usize) };
        entry.load(Ordering::Relaxed) & 1 == 1
    }
}

/// A part of the address space that shows something of a device.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is a range of addresses; code that accesses them says why it may.
unsafe impl Send for Mapping {}

// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: BorrowedFd<'_>, offset: u64, bytes: usize, protection: i32) -> Result<Mapping> {
        let (fd, offset) = (file.as_raw_fd(), offset.cast_signed());
        let (anywhere, flags) = (std::ptr::null_mut(), libc::MAP_SHARED);
        // SAFETY: without MAP_FIXED the kernel takes addresses that no mapping uses.
        let start = unsafe { libc::mmap64(anywhere, bytes, protection, flags, fd, offset) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        Ok(Mapping { start: start.cast(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping's, and no reference to it is left.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// A command of the device with a number, or the address of the structure that it takes.
fn pass(device: BorrowedFd<'_>, command: u32, argument: u64) -> Result<u32> {
    #[allow(clippy::cast_lossless)] // how long the number is depends on the C library
    let command = command as libc::Ioctl;
    // SAFETY: the callers here pass the address of the structure that the command takes, or none;
    // pages that are freed have no references into them.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), command, argument) };
    u32::try_from(answer).map_err(|_| std::io::Error::last_os_error().into())
}
