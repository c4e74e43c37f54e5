//! A Morsel in the address space of this process.
//!
//! Invariants: `base..base + mapped` is mapped as long as the value lives, and bytes `0..length` of
//! it may be accessed. Other code, in this process or another, may change them at any time unless
//! the content is sealed. So this module copies them by atomic accesses, and references exist only
//! if `is_steady`: no process can write the memory any more, and no page of it can be missing.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::MapFlags;
use rustix::process::Pid;
use zerocopy::{FromBytes, Immutable, KnownLayout, transmute};

use crate::PAGE_SIZE;
use crate::backend::BackendKind;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::huge::{self, HUGE_PAGE};
use crate::range;
use crate::seals::Seals;
use crate::shape::Shape;
use crate::stat::Stat;
use crate::sys::{self, Harmless, Rights};

/// Bytes that are copied by one access.
const WORD: usize = size_of::<u64>();

const DOING: &str = "mapping a Morsel";

/// How the program will use the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// To read it.
    Read,
    /// To read and to write it.
    ReadWrite,
}

/// The address of a mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Address {
    Anywhere,
    At(u64),
}

/// The Morsel that is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub descriptor: BorrowedFd<'a>,
    pub backend: BackendKind,
    pub shape: Shape,
}

/// All of a Morsel, mapped; unmapped when dropped (paper, section 2.3).
///
/// With the module its populated pages are present at once. The mapping of a memfd populates its
/// page tables when it is made, if it is for reading and the memfd has memory for all pages;
/// otherwise each access faults its page in.
///
/// If its owner revokes the Morsel, any access is SIGBUS.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// Bytes of address space.
    mapped: usize,
    length: u64,
    access: Access,
    unsteady: Option<Error>,
    /// The process that unmaps it: a forked child does not have it, or shares it with its parent's
    /// code.
    owner: Pid,
}

// SAFETY: the memory belongs to no thread; all threads access it by atomic operations, or no thread
// writes it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(
        source: &Source<'_>,
        stat: &Stat,
        access: Access,
        address: Address,
    ) -> Result<Self> {
        let shape = source.shape;
        if access == Access::ReadWrite && stat.seals.has(Seals::CONTENT) {
            return Err(Error::Sealed { doing: DOING });
        }
        let bytes = match source.backend {
            BackendKind::Kernel => shape.extent(),
            BackendKind::Memfd => shape.length().next_multiple_of(PAGE_SIZE),
        };
        let mapped = usize::try_from(bytes).map_err(|_| Error::NoMemory { doing: DOING })?;
        let base =
            map(source, mapped, access, address).map_err(|errno| match (errno, address) {
                (Errno::EXIST | Errno::BUSY, Address::At(address)) => {
                    Error::AddressBusy { address, extent: shape.extent() }
                }
                (errno, _) => Error::of(DOING, errno),
            })?;
        let mapping = Self {
            base,
            mapped,
            length: shape.length(),
            access,
            unsteady: why_unsteady(stat),
            owner: rustix::process::getpid(),
        };
        if source.backend == BackendKind::Memfd {
            mapping.set_up(shape, stat).map_err(|errno| Error::of(DOING, errno))?;
        }
        Ok(mapping)
    }

    /// Gives a mapping of a memfd the properties that those of the module always have.
    fn set_up(&self, shape: Shape, stat: &Stat) -> Result<(), Errno> {
        let base = self.base.as_ptr();
        if !shape.is_inherited() {
            sys::advise(base, self.mapped, Harmless::DontFork)?;
        }
        // The rest makes it faster if the kernel supports it; correctness does not depend on it.
        if shape.is_huge() {
            let _ = sys::advise(base, self.mapped, Harmless::HugePage);
        }
        if self.access == Access::Read && stat.missing() == 0 {
            let _ = sys::advise(base, self.mapped, Harmless::PopulateRead);
        }
        Ok(())
    }

    /// Its first address: the same for its whole life.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes that may be accessed.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of address space that it takes: the extent with the module, otherwise whole pages.
    pub fn mapped(&self) -> usize {
        self.mapped
    }

    /// The rights of the mapping.
    pub fn access(&self) -> Access {
        self.access
    }

    /// All bytes, of a Morsel whose content was sealed when it was mapped. They never change.
    ///
    /// # Errors
    /// [`Error::NotSealed`]; [`Error::Holes`] if pages are missing and will never come.
    pub fn view(&self) -> Result<&[u8]> {
        if let Some(why) = &self.unsteady {
            return Err(why.clone());
        }
        // SAFETY: the bytes are mapped for as long as `self` is borrowed, and steady: no code can
        // write them, in this process or another. `mapped` bounds the length, so it fits.
        Ok(unsafe { slice::from_raw_parts(self.base.as_ptr(), self.length as usize) })
    }

    /// Bytes of a range as a value, or a slice of values, of a type for which all bytes are valid.
    ///
    /// # Errors
    /// As [`view`](Self::view); [`Error::OutOfRange`]; [`Error::Type`] if the range has not the
    /// type's size or alignment.
    pub fn view_as<T>(&self, range: Range<u64>) -> Result<&T>
    where
        T: FromBytes + Immutable + KnownLayout + ?Sized,
    {
        range::within(&range, self.length)?;
        let bytes = &self.view()?[range.start as usize..range.end as usize];
        T::ref_from_bytes(bytes).map_err(|error| Error::Type { reason: error.to_string() })
    }

    /// Copies bytes out of it. The copy may have parts of a concurrent write.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let range = range::from(offset, bytes.len() as u64, self.length)?;
        let mut rest = bytes;
        for (word, part) in self.words(&range) {
            let bytes: [u8; WORD] = transmute!(word.load(Ordering::Relaxed));
            let (now, later) = rest.split_at_mut(part.len());
            now.copy_from_slice(&bytes[part]);
            rest = later;
        }
        Ok(())
    }

    /// Copies bytes into it. Concurrent readers may see a part of them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::ReadOnly`].
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        if self.access != Access::ReadWrite {
            return Err(Error::ReadOnly { doing: "writing to a mapping" });
        }
        let range = range::from(offset, bytes.len() as u64, self.length)?;
        let mut rest = bytes;
        for (word, part) in self.words(&range) {
            let (now, later) = rest.split_at(part.len());
            if let Ok(whole) = now.try_into() {
                let whole: [u8; WORD] = whole;
                word.store(transmute!(whole), Ordering::Relaxed);
            } else {
                // A concurrent write to the rest of the word must not get lost.
                let mut old = word.load(Ordering::Relaxed);
                loop {
                    let mut bytes: [u8; WORD] = transmute!(old);
                    bytes[part.clone()].copy_from_slice(now);
                    let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
                    match word.compare_exchange_weak(old, transmute!(bytes), set, get) {
                        Ok(_) => break,
                        Err(found) => old = found,
                    }
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// The words of a range that was checked, and which of their bytes are in it. Words only: two
    /// threads may not access the same memory by atomics of two sizes.
    fn words(&self, range: &Range<u64>) -> impl Iterator<Item = (&AtomicU64, Range<usize>)> {
        let Range { start, end } = *range;
        let first = start as usize / WORD;
        let count = (end as usize).div_ceil(WORD) - first;
        // SAFETY: the words lie within what is mapped, which is whole pages, and are aligned as
        // those are. Atomics may be shared with all other users of the memory, and only `write_at`
        // stores to them, which a mapping for reading refuses.
        let words: &[AtomicU64] =
            unsafe { slice::from_raw_parts(self.base.cast().as_ptr(), first + count) };
        words[first..].iter().enumerate().map(move |(index, word)| {
            let at = ((first + index) * WORD) as u64;
            let part = start.saturating_sub(at)..(end - at).min(WORD as u64);
            (word, part.start as usize..part.end as usize)
        })
    }
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

/// Why there may be no references into a Morsel.
fn why_unsteady(stat: &Stat) -> Option<Error> {
    if !stat.seals.has(Seals::CONTENT) {
        return Some(Error::NotSealed);
    }
    let missing = stat.missing();
    (stat.seals.has(Seals::POPULATION) && missing > 0).then_some(Error::Holes { missing })
}

fn map(
    source: &Source<'_>,
    bytes: usize,
    access: Access,
    address: Address,
) -> Result<NonNull<u8>, Errno> {
    let rights = match access {
        Access::Read => Rights::Read,
        Access::ReadWrite => Rights::ReadAndWrite,
    };
    // Each shared mapping through a descriptor for writing counts as one that may be written, and
    // sealing fails while it exists. Without /proc there is no other descriptor.
    let is_memfd = source.backend == BackendKind::Memfd;
    let is_reader = access == Access::Read;
    let reader = is_reader.then(|| descriptor::read_only(source.descriptor).ok()).flatten();
    let file = reader.as_ref().map_or(source.descriptor, AsFd::as_fd);
    let base = match map_shared(file, is_memfd, bytes, rights, address, MapFlags::SHARED) {
        // Before Linux 6.7 no process may share a sealed memfd through a descriptor for writing. A
        // private mapping shows the same bytes, because they cannot change.
        Err(Errno::PERM) if is_reader && is_memfd => {
            map_shared(file, is_memfd, bytes, rights, address, MapFlags::PRIVATE)
        }
        result => result,
    };
    NonNull::new(base?).ok_or(Errno::NOMEM)
}

fn map_shared(
    file: BorrowedFd<'_>,
    is_memfd: bool,
    bytes: usize,
    rights: Rights,
    address: Address,
    flags: MapFlags,
) -> Result<*mut u8, Errno> {
    match address {
        Address::At(address) => {
            let address = usize::try_from(address).map_err(|_| Errno::NOMEM)?;
            sys::map_at(file, address, bytes, rights, flags)
        }
        Address::Anywhere if is_memfd && bytes >= HUGE_PAGE => {
            huge::map_aligned(file, 0, bytes, rights, flags)
        }
        Address::Anywhere => sys::map(file, bytes, rights, flags),
    }
}
