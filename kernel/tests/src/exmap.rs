//! `/dev/exmap`: a descriptor and its commands.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_uapi::exmap::{self, Create, Entry, Query, Stat};

use crate::{Mapping, PAGE, sys};

/// The device.
pub const DEVICE: &str = "/dev/exmap";

/// One descriptor of an exmap.
#[derive(Debug)]
pub struct Exmap {
    file: OwnedFd,
}

impl Exmap {
    /// A new one, without a pool.
    pub fn open() -> Self {
        let file: File = OpenOptions::new().read(true).write(true).open(DEVICE).expect(DEVICE);
        Self { file: file.into() }
    }

    /// A new one with a pool.
    pub fn with(frames: u64, interfaces: u32, flags: u64) -> Self {
        let exmap = Self::open();
        exmap.create(&plan(frames, interfaces, flags)).expect("CREATE");
        exmap
    }

    /// Gives it a pool.
    pub fn create(&self, create: &Create) -> Result<(), Errno> {
        self.pass(exmap::CREATE, std::ptr::from_ref(create).expose_provenance()).map(drop)
    }

    /// The module's features.
    pub fn query(&self) -> Query {
        let mut query = Query { size: size_of::<Query>() as u32, ..Query::default() };
        let address = (&raw mut query).expose_provenance();
        self.pass(exmap::QUERY, address).expect("QUERY");
        query
    }

    /// Its counters.
    pub fn stat(&self) -> Result<Stat, Errno> {
        let mut stat = Stat { size: size_of::<Stat>() as u32, ..Stat::default() };
        let address = (&raw mut stat).expose_provenance();
        self.pass(exmap::STAT, address)?;
        Ok(stat)
    }

    /// A command with an address.
    pub fn pass(&self, command: u32, address: usize) -> Result<u64, Errno> {
        self.command(command, address as u64)
    }

    /// Any command with any argument.
    pub fn command(&self, command: u32, argument: u64) -> Result<u64, Errno> {
        sys::ioctl(self.as_fd(), command, argument)
    }

    /// Another descriptor for it.
    #[allow(unsafe_code)]
    pub fn private(&self) -> Result<Self, Errno> {
        let number = self.command(exmap::CLONE, 0)?;
        let number = i32::try_from(number).expect("a descriptor");
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self { file: unsafe { OwnedFd::from_raw_fd(number) } })
    }

    /// Maps the surface, wherever there is room.
    pub fn map(&self, pages: u64) -> Result<Mapping, Errno> {
        let length = usize::try_from(pages).expect("pages fit the address space") * PAGE;
        Mapping::of_device(self.as_fd(), exmap::OFFSET_SURFACE, length)
    }

    /// Maps an interface.
    pub fn vector(&self, interface: u32) -> Result<Vector, Errno> {
        let offset = exmap::offset_interface(interface.into());
        let page = Mapping::of_device(self.as_fd(), offset, PAGE)?;
        Ok(Vector { interface, page })
    }
}

impl AsFd for Exmap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<OwnedFd> for Exmap {
    fn from(file: OwnedFd) -> Self {
        Self { file }
    }
}

impl From<Exmap> for OwnedFd {
    fn from(exmap: Exmap) -> Self {
        exmap.file
    }
}

/// Whether CREATE knows these flags. Prints a line if not.
pub fn knows(flags: u64) -> bool {
    let unknown = flags & !Exmap::open().query().flags;
    if unknown != 0 {
        eprintln!("skipped: the module does not know the flags {unknown:#x}");
    }
    unknown == 0
}

/// The argument of CREATE for an exmap without a backing.
pub fn plan(frames: u64, interfaces: u32, flags: u64) -> Create {
    let size = size_of::<Create>() as u32;
    Create { size, interfaces, flags, frames, backing: -1, blocks: 0 }
}

/// The mapped vector of an interface.
#[derive(Debug)]
pub struct Vector {
    interface: u32,
    page: Mapping,
}

impl Vector {
    /// The number of the interface.
    pub fn interface(&self) -> u32 {
        self.interface
    }

    /// The address of its first entry.
    pub fn start(&self) -> usize {
        self.page.start()
    }

    #[allow(unsafe_code)]
    fn slot(&self, index: usize) -> &AtomicU64 {
        assert!(index < exmap::VECTOR_ENTRIES as usize);
        let start: *const AtomicU64 = std::ptr::with_exposed_provenance(self.page.start());
        // SAFETY: the page is mapped for as long as `self` lives, aligned, and all bits are valid.
        unsafe { &*start.add(index) }
    }

    /// Writes an entry.
    pub fn set(&self, index: usize, entry: Entry) {
        self.slot(index).store(entry.bits(), Ordering::Relaxed);
    }

    /// Reads an entry.
    pub fn get(&self, index: usize) -> Entry {
        Entry::from_bits(self.slot(index).load(Ordering::Relaxed))
    }

    /// Has the module carry out a command for the first `entries` entries; returns how many have an
    /// error.
    pub fn run(&self, exmap: &Exmap, command: u32, entries: usize) -> Result<u64, Errno> {
        exmap.command(command, exmap::vector(self.interface.into(), entries as u64))
    }

    /// Unmaps it.
    pub fn unmap(self) -> Result<(), Errno> {
        self.page.unmap()
    }
}
