//! A Morsel: a descriptor whose kind and shape were checked.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, FallocateFlags};
use rustix::io::Errno;

use crate::backend::{BackendKind, kernel, memfd};
use crate::descriptor::{self, Use};
use crate::error::{Error, Result};
use crate::mapping::{Access, Address, Mapping, Source};
use crate::range;
use crate::seals::Seals;
use crate::shape::Shape;
use crate::stat::Stat;
use crate::sys::OfModule;

/// Bytes that one call populates: a call that a signal interrupts starts again.
const POPULATED_AT_ONCE: u64 = 64 << 20;

/// Memory that processes share by its descriptor (paper, section 2.2).
///
/// It lives as long as a descriptor, a mapping or a name of it. The kernel said its shape and
/// backend when it was made or received.
#[derive(Debug)]
pub struct Morsel {
    descriptor: OwnedFd,
    backend: BackendKind,
    shape: Shape,
}

impl Morsel {
    pub(crate) fn made(descriptor: OwnedFd, backend: BackendKind, shape: Shape) -> Self {
        Self { descriptor, backend, shape }
    }

    /// The Morsel of a descriptor, which may come from a process that is not trusted.
    ///
    /// # Errors
    /// [`Error::NotMorsel`] if the descriptor is not that of a Morsel, or is that of memory that
    /// could be truncated; [`Error::Shape`] or [`Error::Address`] if it claims an impossible shape.
    pub fn from_descriptor(descriptor: OwnedFd) -> Result<Self> {
        const DOING: &str = "asking a descriptor";
        let failed = |errno| Error::System { doing: DOING, errno };
        if descriptor::usage(&descriptor).map_err(failed)? == Use::NameOnly {
            return Err(Error::NotMorsel { reason: "it was opened with O_PATH".into() });
        }
        let is_of_module = OfModule::new(descriptor.as_fd()).map_err(failed)?.is_some();
        let (backend, shape) = if is_of_module {
            (BackendKind::Kernel, kernel::shape(descriptor.as_fd())?)
        } else {
            (BackendKind::Memfd, memfd::shape(descriptor.as_fd())?)
        };
        Ok(Self { descriptor, backend, shape })
    }

    /// The backend that it is of.
    pub fn backend(&self) -> BackendKind {
        self.backend
    }

    /// The shape with which it was made.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.shape.length()
    }

    /// Maps all of it: at the address to which it is bound, or where the kernel has room.
    ///
    /// # Errors
    /// [`Error::AddressBusy`] if this process has another mapping there; [`Error::Sealed`] or
    /// [`Error::ReadOnly`] if `access` asks for writing and that is not allowed;
    /// [`Error::NoMemory`] without addresses to spare; [`Error::Revoked`].
    pub fn map(&self, access: Access) -> Result<Mapping> {
        let address = self.shape.address().map_or(Address::Anywhere, Address::At);
        self.map_in(access, address)
    }

    /// Maps all of it at an address, a multiple of its extent. A bound Morsel has its own address.
    ///
    /// # Errors
    /// As [`map`](Self::map), and [`Error::Address`] if it cannot lie there.
    pub fn map_at(&self, access: Access, address: u64) -> Result<Mapping> {
        self.shape.check_address(address)?;
        if self.shape.address().is_some_and(|bound| bound != address) {
            return Err(Error::Address { address, extent: self.shape.extent() });
        }
        self.map_in(access, Address::At(address))
    }

    fn map_in(&self, access: Access, address: Address) -> Result<Mapping> {
        let descriptor = self.descriptor.as_fd();
        let source = Source { descriptor, backend: self.backend, shape: self.shape };
        Mapping::new(&source, &self.stat()?, access, address)
    }

    /// Populates whole pages that have no memory; they then read as zeros (section 2.4).
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Unaligned`], [`Error::NoSpace`], [`Error::NoMemory`],
    /// [`Error::ReadOnly`]; [`Error::Sealed`] if the population is sealed; [`Error::Revoked`].
    pub fn populate(&self, range: Range<u64>) -> Result<()> {
        range::whole_pages(&range, self.length())?;
        if self.backend == BackendKind::Memfd && self.shape.is_huge() {
            memfd::populate_huge(self.descriptor.as_fd(), &range);
        }
        let mut start = range.start;
        while start < range.end {
            let bytes = POPULATED_AT_ONCE.min(range.end - start);
            self.allocate("populating", FallocateFlags::empty(), start, bytes)?;
            start += bytes;
        }
        Ok(())
    }

    /// Frees the memory of whole pages, which read as zeros from then on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Unaligned`], [`Error::ReadOnly`]; [`Error::Sealed`] if the
    /// content is sealed; [`Error::Revoked`].
    pub fn punch(&self, range: Range<u64>) -> Result<()> {
        range::whole_pages(&range, self.length())?;
        if range.is_empty() {
            return Ok(());
        }
        // The last page goes as a whole, although the Morsel may end within it.
        let bytes = (range.end - range.start).next_multiple_of(crate::PAGE_SIZE);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.allocate("punching", mode, range.start, bytes)
    }

    fn allocate(
        &self,
        doing: &'static str,
        mode: FallocateFlags,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        loop {
            match fs::fallocate(&self.descriptor, mode, offset, bytes) {
                Err(Errno::INTR) => {}
                result => return result.map_err(|errno| Error::of(doing, errno)),
            }
        }
    }

    /// Reads `length` bytes of a file, `from` its byte on, to `offset`, a multiple of 4,096.
    /// Returns how many bytes that were: fewer where the source ends.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Unaligned`], [`Error::SourceEnded`], [`Error::BadSource`],
    /// [`Error::Sealed`], [`Error::ReadOnly`], [`Error::NoSpace`], [`Error::NoMemory`],
    /// [`Error::Revoked`], and [`Error::System`] with the error of reading the source. Bytes that
    /// were read before an error stay.
    pub fn fill(&self, source: impl AsFd, from: u64, offset: u64, length: u64) -> Result<u64> {
        let range = range::from(offset, length, self.length())?;
        if !offset.is_multiple_of(crate::PAGE_SIZE) {
            return Err(Error::Unaligned { start: range.start, end: range.end });
        }
        if from.checked_add(length).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(Error::SourceEnded { from });
        }
        let (morsel, source) = (self.descriptor.as_fd(), source.as_fd());
        match self.backend {
            BackendKind::Kernel => kernel::fill(morsel, source, from, offset, length),
            BackendKind::Memfd => {
                let is_huge = self.shape.is_huge();
                memfd::fill(morsel, source, from, offset, length, is_huge)
            }
        }
    }

    /// Puts seals on it, which never come off.
    ///
    /// # Errors
    /// [`Error::MappedForWriting`], [`Error::ReadOnly`], [`Error::Revoked`];
    /// [`Error::Unsupported`] for [`Seals::POPULATION`] without the module.
    pub fn seal(&self, seals: Seals) -> Result<()> {
        match self.backend {
            BackendKind::Kernel => kernel::seal(self.descriptor.as_fd(), seals),
            BackendKind::Memfd => memfd::seal(self.descriptor.as_fd(), seals),
        }
    }

    /// Takes it from all processes at once: an access gets SIGBUS, an operation [`Error::Revoked`],
    /// and all its memory is freed.
    ///
    /// # Errors
    /// [`Error::NotOwner`]; [`Error::Unsupported`] without the module.
    pub fn revoke(&self) -> Result<()> {
        match self.backend {
            BackendKind::Kernel => kernel::revoke(self.descriptor.as_fd()),
            BackendKind::Memfd => Err(Error::Unsupported {
                backend: BackendKind::Memfd,
                what: "way to take memory from processes that map it",
            }),
        }
    }

    /// Its properties and its memory at the moment.
    ///
    /// # Errors
    /// [`Error::Revoked`], or the system's error.
    pub fn stat(&self) -> Result<Stat> {
        match self.backend {
            BackendKind::Kernel => kernel::stat(self.descriptor.as_fd()),
            BackendKind::Memfd => memfd::stat(self.descriptor.as_fd(), self.shape),
        }
    }

    /// The same Morsel by another descriptor, which cannot change it. Needs `/proc`.
    ///
    /// # Errors
    /// [`Error::Permission`] if its mode forbids this user to read it; the system's error.
    pub fn read_only(&self) -> Result<Self> {
        const DOING: &str = "opening a Morsel for reading";
        let descriptor = descriptor::read_only(&self.descriptor).map_err(|errno| match errno {
            Errno::ACCESS => Error::Permission { doing: DOING },
            errno => Error::System { doing: DOING, errno },
        })?;
        Ok(Self { descriptor, ..*self })
    }
}

impl AsFd for Morsel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl From<Morsel> for OwnedFd {
    fn from(morsel: Morsel) -> Self {
        morsel.descriptor
    }
}

impl TryFrom<OwnedFd> for Morsel {
    type Error = Error;

    fn try_from(descriptor: OwnedFd) -> Result<Self> {
        Self::from_descriptor(descriptor)
    }
}
