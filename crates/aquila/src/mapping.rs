//! A part of a file in the address space of this process.

use std::fs::File;
use std::ops::{Bound, Range, RangeBounds, RangeInclusive};
use std::os::fd::AsFd as _;
use std::ptr;
use std::sync::Arc;

use vellum_aquila_core::{Access as CoreAccess, Advice, Frame, Key};

use crate::error::{Error, Result};
use crate::host::{read_fully, write_fully};
use crate::kernel::KernelMapping;
use crate::mapped_places::MappedPlace;
use crate::shared::{Shared, number_of_advice};
use crate::{PAGE_SIZE, sys, writers};

/// Bytes that a mapping can have: half of the addresses of a process on x86-64.
const MOST_BYTES: u64 = 64 << 40;

/// Where mappings end at the latest: the cache has numbers for so many pages of a file.
const MOST_END: u64 = Key::PAGES * PAGE_SIZE as u64;

/// How a program uses a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// To read it. A store is SIGSEGV.
    Read,
    /// To read and to write it.
    ReadWrite,
}

/// A part of a file, mapped; unmapped when dropped, after its changes were written back.
///
/// The addresses from [`as_ptr`](Self::as_ptr) on may be loaded from and, with
/// [`Access::ReadWrite`], stored to, by any thread at any time: other threads and other mappings of
/// the file see stores at once. So references into it need the program's own promise that nothing
/// changes the bytes meanwhile.
#[derive(Debug)]
pub struct Mapping {
    /// Bytes of the file that it shows, from the first one on. The last page may have more.
    bytes: usize,
    access: Access,
    /// The first byte of the file.
    offset: u64,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Own(OwnMapping),
    Kernel(KernelMapping),
}

/// A mapping whose faults the cache handles.
#[derive(Debug)]
struct OwnMapping {
    shared: Arc<Shared>,
    place: &'static MappedPlace,
    number: u32,
    mapped: sys::OwnedMapping,
    /// The addresses are no longer its own.
    is_detached: bool,
}

impl OwnMapping {
    fn new(
        shared: &Arc<Shared>,
        file: &File,
        first: u64,
        bytes: usize,
        writable: bool,
    ) -> Result<Self> {
        if writable && !shared.is_forked() {
            writers::start(shared)?;
        }
        let number = shared.open(file, writable)?;
        match shared.map(number, (first, bytes), writable) {
            Ok((mapped, place)) => {
                let shared = Arc::clone(shared);
                Ok(Self { shared, place, number, mapped, is_detached: false })
            }
            Err(error) => {
                shared.close(number);
                Err(error)
            }
        }
    }

    /// The pages of the file that a range of the mapping's bytes touches.
    fn pages(&self, range: &Range<usize>) -> RangeInclusive<u64> {
        let first = self.place.mapped().first;
        let last = range.end.max(range.start + 1) - 1;
        first + (range.start / PAGE_SIZE) as u64..=first + (last / PAGE_SIZE) as u64
    }
}

impl Drop for OwnMapping {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // The addresses are not this process', and the place belongs to its parent's copy.
            self.mapped.forget();
            return;
        }
        if self.is_detached {
            self.mapped.forget();
            self.place.forget();
        } else {
            let _blocked = sys::BlockedSignals::new();
            self.shared.leave(self.number, self.place);
            self.place.close();
            // No thread of the cache uses the addresses any more.
            self.mapped.unmap();
            self.place.forget();
        }
        self.shared.close(self.number);
    }
}

impl Mapping {
    /// Checks a range of a file and maps it: through a cache, or by the kernel.
    pub(crate) fn new(
        cache: Option<&Arc<Shared>>,
        file: &File,
        range: impl RangeBounds<u64>,
        access: Access,
    ) -> Result<Self> {
        let start = match range.start_bound() {
            Bound::Unbounded => 0,
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
        };
        let end = match range.end_bound() {
            Bound::Unbounded => length_of(file)?,
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
        };
        let is_good = start < end
            && start.is_multiple_of(PAGE_SIZE as u64)
            && end - start <= MOST_BYTES
            && end <= MOST_END;
        if !is_good {
            return Err(Error::BadRange { start, end });
        }
        let bytes = (end - start) as usize;
        let whole = bytes.next_multiple_of(PAGE_SIZE);
        let writable = access == Access::ReadWrite;
        let backend = match cache {
            Some(shared) => {
                let first = start / PAGE_SIZE as u64;
                Backend::Own(OwnMapping::new(shared, file, first, whole, writable)?)
            }
            None => Backend::Kernel(KernelMapping::new(file, start, whole, writable)?),
        };
        Ok(Self { bytes, access, offset: start, backend })
    }

    /// Its first address: the same for its whole life.
    pub fn as_ptr(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.mapped().start())
    }

    /// The addresses.
    pub(crate) fn mapped(&self) -> &sys::OwnedMapping {
        match &self.backend {
            Backend::Own(own) => &own.mapped,
            Backend::Kernel(kernel) => kernel.mapped(),
        }
    }

    /// Its length in bytes. An access beyond the end of the file is SIGBUS, except that the rest of
    /// the file's last page reads as zeros.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no byte: never.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What it may be used for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Says how the program will access it, which decides how much a fault reads.
    ///
    /// # Errors
    /// What the system said; never with the backend userfaultfd.
    pub fn advise(&self, advice: Advice) -> Result<()> {
        match &self.backend {
            Backend::Own(own) => {
                let _blocked = own.shared.enter()?;
                own.place.set_advice(number_of_advice(advice));
                Ok(())
            }
            Backend::Kernel(kernel) => kernel.advise(advice),
        }
    }

    /// Reads a range into the cache and maps it, in few calls. Reads no more pages than the cache
    /// has frames. Returns how many pages it mapped.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; what the storage said.
    pub fn prefetch(&self, range: impl RangeBounds<usize>) -> Result<u64> {
        let range = self.within(range)?;
        match &self.backend {
            _ if range.is_empty() => Ok(0),
            Backend::Own(own) => own.shared.populate(own.place, own.pages(&range)),
            Backend::Kernel(kernel) => kernel.populate(whole_pages(&range)),
        }
    }

    /// Evicts a range: writes it back if it is dirty, and frees its frames. Pinned pages stay.
    /// Returns how many pages have left; zero if the backend does not tell.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; what the storage said, and then the pages are still there.
    pub fn evict(&self, range: impl RangeBounds<usize>) -> Result<u64> {
        let range = self.within(range)?;
        match &self.backend {
            _ if range.is_empty() => Ok(0),
            Backend::Own(own) => own.shared.evict(own.number, own.pages(&range)),
            Backend::Kernel(kernel) => kernel.evict(whole_pages(&range)).map(|()| 0),
        }
    }

    /// Pins the pages of a range: they stay in memory and mapped until the guard is dropped. System
    /// calls may then use the range. Without [`Faults::Monitor`](crate::Faults::Monitor) they fail
    /// with `EFAULT` for other pages, because the kernel's own accesses do not reach the cache. For
    /// a call that stores (`read(2)`), pin with [`Access::ReadWrite`].
    ///
    /// The first pin moves a file whose frames are in anonymous memory to a memory file: all its
    /// pages leave the cache, and dirty ones are written back before.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Access`] if the mapping is for reading only;
    /// [`Error::Full`]; [`Error::TooManyPins`]; [`Error::BeyondEnd`]; of a move also
    /// [`Error::FileSizeLimit`], and what the storage or the system said.
    pub fn pin(&self, range: impl RangeBounds<usize>, access: Access) -> Result<Pin<'_>> {
        let range = self.within(range)?;
        let writes = access == Access::ReadWrite;
        if writes && self.access == Access::Read {
            return Err(Error::Access { doing: "pinning pages for writing" });
        }
        let mut pin = Pin { mapping: self, frames: Vec::new(), range: 0..0 };
        match &self.backend {
            _ if range.is_empty() => {}
            Backend::Own(own) => {
                for page in own.pages(&range) {
                    // If one fails, the guard ends the pins before it.
                    let pinned = own.shared.pin(own.place, page, writes)?;
                    pin.frames.push(pinned);
                }
            }
            Backend::Kernel(kernel) => {
                let pages = whole_pages(&range);
                kernel.pin(&pages)?;
                pin.range = pages;
            }
        }
        Ok(pin)
    }

    /// Writes the dirty pages of a range to the file, in the order of their places.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; what the storage said: pages that could not be written are still
    /// dirty in the cache, and the next call tries again.
    pub fn write_back(&self, range: impl RangeBounds<usize>) -> Result<()> {
        self.write(range, false)
    }

    /// Makes all stores to the mapping that happened before the call durable.
    ///
    /// # Errors
    /// As [`write_back`](Self::write_back). If the pages were written and the storage then failed
    /// to make them durable, all later calls for the file are [`Error::SyncFailed`].
    pub fn sync(&self) -> Result<()> {
        self.write(.., true)
    }

    fn write(&self, range: impl RangeBounds<usize>, durable: bool) -> Result<()> {
        let range = self.within(range)?;
        match &self.backend {
            _ if range.is_empty() => Ok(()),
            Backend::Own(own) => own.shared.write_back(own.number, own.pages(&range), durable),
            Backend::Kernel(kernel) => kernel.write_back(whole_pages(&range), durable),
        }
    }

    /// Copies bytes out of it, from so many bytes after its beginning.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::BeyondEnd`]; what the storage said.
    pub fn read_at(&self, bytes: &mut [u8], at: usize) -> Result<()> {
        let range = self.within(at..at.saturating_add(bytes.len()))?;
        let offset = self.offset + range.start as u64;
        let doing = "reading a mapped file";
        match &self.backend {
            Backend::Own(own) => own.shared.read_at(own.number, bytes, offset),
            Backend::Kernel(kernel) => match read_fully(kernel.file()?.as_fd(), bytes, offset) {
                Ok(read) if read == bytes.len() => Ok(()),
                Ok(_) => Err(Error::BeyondEnd { doing }),
                Err(errno) => Err(Error::of(doing, errno)),
            },
        }
    }

    /// Copies bytes into it, to so many bytes after its beginning.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); [`Error::Access`].
    pub fn write_at(&self, bytes: &[u8], at: usize) -> Result<()> {
        let doing = "writing a mapped file";
        let range = self.within(at..at.saturating_add(bytes.len()))?;
        if self.access == Access::Read {
            return Err(Error::Access { doing });
        }
        let offset = self.offset + range.start as u64;
        match &self.backend {
            Backend::Own(own) => own.shared.write_at(own.number, bytes, offset),
            Backend::Kernel(kernel) => {
                let length = length_of(kernel.file()?)?;
                if offset + bytes.len() as u64 > length {
                    return Err(Error::BeyondEnd { doing });
                }
                write_fully(kernel.file()?.as_fd(), bytes, offset)
                    .map_err(|errno| Error::of(doing, errno))
            }
        }
    }

    /// Syncs it and unmaps it, and says whether that worked. Drop writes changes back and unmaps.
    /// It does not make them durable, and it ignores errors.
    ///
    /// # Errors
    /// As [`sync`](Self::sync). Then what was not written is lost if this was the file's last
    /// mapping.
    pub fn close(self) -> Result<()> {
        self.sync()
    }

    /// Lets go of the addresses, so that the caller can have another mapping there, or none: from
    /// now on the cache changes nothing at these addresses. An access to a page that is not mapped
    /// there waits until the caller has done that, and then drops the mapping; or until
    /// [`reattach`](Self::reattach). For caches with [`Faults::Monitor`](crate::Faults::Monitor),
    /// and mappings for reading.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the mapping is another one.
    pub fn detach(&mut self) -> Result<()> {
        match &mut self.backend {
            Backend::Own(own) if own.shared.has_threads() && self.access == Access::Read => {
                if !own.is_detached {
                    let _blocked = sys::BlockedSignals::new();
                    own.place.close();
                    own.is_detached = true;
                }
                Ok(())
            }
            _ => Err(Error::Unsupported { doing: "letting go of a mapping's addresses" }),
        }
    }

    /// Ends what [`detach`](Self::detach) began: the addresses are the mapping's still.
    pub fn reattach(&mut self) {
        if let Backend::Own(own) = &mut self.backend
            && std::mem::take(&mut own.is_detached)
            && !own.shared.is_forked()
        {
            let _blocked = sys::BlockedSignals::new();
            own.shared.end_all_poison(own.place);
            own.place.reopen();
        }
    }

    /// A range of the mapping's bytes.
    fn within(&self, range: impl RangeBounds<usize>) -> Result<Range<usize>> {
        let start = match range.start_bound() {
            Bound::Unbounded => 0,
            Bound::Included(start) => *start,
            Bound::Excluded(before) => before.saturating_add(1),
        };
        let end = match range.end_bound() {
            Bound::Unbounded => self.bytes,
            Bound::Included(last) => last.saturating_add(1),
            Bound::Excluded(end) => *end,
        };
        if start <= end && end <= self.bytes {
            return Ok(start..end);
        }
        Err(Error::OutOfRange { start: start as u64, end: end as u64, length: self.bytes as u64 })
    }
}

/// Pages that stay in memory and mapped while this lives.
#[derive(Debug)]
#[must_use = "the pages are pinned as long as this lives"]
pub struct Pin<'m> {
    mapping: &'m Mapping,
    frames: Vec<(Frame, CoreAccess)>,
    /// Bytes that the kernel has locked.
    range: Range<usize>,
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        match &self.mapping.backend {
            Backend::Own(own) => {
                for (frame, access) in self.frames.drain(..) {
                    own.shared.unpin(frame, access);
                }
            }
            Backend::Kernel(kernel) => {
                if !self.range.is_empty() {
                    kernel.unpin(&self.range);
                }
            }
        }
    }
}

/// The whole pages that a range touches.
fn whole_pages(range: &Range<usize>) -> Range<usize> {
    range.start / PAGE_SIZE * PAGE_SIZE..range.end.next_multiple_of(PAGE_SIZE)
}

fn length_of(file: &File) -> Result<u64> {
    let stat = rustix::fs::fstat(file).map_err(|errno| Error::of("looking at a file", errno))?;
    Ok(stat.st_size.cast_unsigned())
}
