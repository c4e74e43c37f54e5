//! Surfaces: ranges of addresses as large as the storage, whose pages the program populates and
//! releases in batches.
//!
//! Invariants: the base never moves; `pages()` only grows; a released page holds no memory and
//! reads as zeros; populating never alters the contents of a page that holds memory; one entry's
//! failure never stops the others.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use crate::advice::Advice;
use crate::backend::exmap::PageTables;
use crate::backend::{Backend, BackendChoice, BackendKind, FaultBehaviour, choice};
use crate::error::SurfaceError;
use crate::memory::{Memory, bytes_of};
use crate::range::{Entry, PageRange, failures};
use crate::residency::{self, Residency};
use crate::{PAGE_SIZE, sys};

/// The error of an entry of [`Surface::read`] whose range goes past the end of the file.
pub const END_OF_FILE: Errno = Errno::NODATA;

/// A private range of addresses whose pages the program populates and releases itself.
///
/// Many threads may call all methods at once. The caller decides which thread may access which page
/// when: the surface hands out addresses, not references. Reading a released page is not an error;
/// writing one may be: see [`FaultBehaviour`].
#[derive(Debug)]
pub struct Surface {
    base: Base,
    memory: Memory,
    backend: Box<dyn Backend>,
    /// `/proc/self/pagemap`, opened by the first call that reads it.
    pagemap: OnceLock<File>,
    /// The owner populates each page before any read into it.
    claimed: AtomicBool,
}

impl Surface {
    /// Reserves a surface of `pages` pages, none of them populated.
    ///
    /// A backend that has frames of its own gets as many as there are pages, but at least
    /// [`MIN_FRAMES`](Self::MIN_FRAMES) and at most [`MAX_FRAMES`](Self::MAX_FRAMES); callers that
    /// know how many they need use [`reserve_with_frames`](Self::reserve_with_frames).
    ///
    /// # Errors
    /// [`SurfaceError::Reserve`] names the limit in the way;
    /// [`SurfaceError::BackendUnavailable`] is possible with [`BackendChoice::Only`].
    pub fn reserve(pages: u64, backend: BackendChoice) -> Result<Self, SurfaceError> {
        let (memory, backend) = choice::open(backend, pages, None)?;
        Ok(Self::on(memory, backend))
    }

    /// As [`reserve`](Self::reserve), for a surface that never has more than `frames` pages
    /// populated at a time: further pages fail with `ENOMEM` if the backend has frames of its own.
    /// Other backends do not count.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn reserve_with_frames(
        pages: u64,
        frames: u64,
        backend: BackendChoice,
    ) -> Result<Self, SurfaceError> {
        let (memory, backend) = choice::open(backend, pages, Some(frames))?;
        Ok(Self::on(memory, backend))
    }

    /// Frames of a short surface if the caller does not say how many it needs: 1 MiB.
    pub const MIN_FRAMES: u64 = choice::MIN_FRAMES;
    /// Frames of a long surface if the caller does not say how many it needs: 64 MiB.
    pub const MAX_FRAMES: u64 = choice::MAX_FRAMES;

    /// A surface on a backend that uses ordinary memory.
    #[cfg(test)]
    pub(crate) fn with_backend(
        pages: u64,
        backend: Box<dyn Backend>,
    ) -> Result<Self, SurfaceError> {
        Ok(Self::on(Memory::reserve(pages)?, backend))
    }

    /// A surface in memory of the kind that its backend needs.
    pub(crate) fn on(memory: Memory, backend: Box<dyn Backend>) -> Self {
        Self {
            base: Base(memory.base()),
            memory,
            backend,
            pagemap: OnceLock::new(),
            claimed: AtomicBool::new(false),
        }
    }

    /// Makes the surface at least `pages` pages in all. The base does not move, pages in use are
    /// not disturbed, and a surface that is long enough is left as it is.
    ///
    /// # Errors
    /// [`SurfaceError::Reserve`]; the surface then has the length it had.
    pub fn grow(&self, pages: u64) -> Result<(), SurfaceError> {
        Ok(self.memory.grow(bytes_of(pages)?)?)
    }

    /// Gives the surface's backend more frames or fewer, if it has frames of its own: as many as
    /// [`reserve_with_frames`](Self::reserve_with_frames) would give. Other backends do not count.
    ///
    /// # Errors
    /// [`SurfaceError::Frames`] if there is no memory, or if too many pages are populated. The
    /// backend then has as many frames as it could get, or as few as it needs.
    pub fn resize_frames(&self, frames: u64) -> Result<(), SurfaceError> {
        self.backend.resize_frames(frames).map_err(|errno| SurfaceError::Frames { frames, errno })
    }

    /// Pages of the surface.
    pub fn pages(&self) -> u64 {
        (self.memory.len() / PAGE_SIZE) as u64
    }

    /// The address of page 0; the same for the whole life of the surface.
    #[inline(always)]
    pub fn base(&self) -> NonNull<u8> {
        self.base.0
    }

    /// The address of a page.
    ///
    /// # Panics
    /// If the page is not within the surface: a programming error.
    pub fn address(&self, page: u64) -> NonNull<u8> {
        assert!(page < self.pages(), "page {page} is not within {} pages", self.pages());
        // SAFETY: within the mapping, which is one allocation.
        unsafe { self.base().add(page as usize * PAGE_SIZE) }
    }

    /// Populates all pages of the entries; returns how many entries failed.
    ///
    /// The contents of a page that was populated before are never altered, so this may run while
    /// other threads read and write. A fresh page holds zeros or arbitrary bytes: see
    /// [`fresh_pages_are_zeroed`](Self::fresh_pages_are_zeroed). `ENOMEM` after a failed
    /// allocation, `EINVAL` for a range that is not within the surface.
    pub fn populate(&self, entries: &mut [Entry]) -> usize {
        self.check(entries);
        // SAFETY: checked; the mapping lives as long as `self`.
        unsafe { self.backend.populate(self.base(), entries) };
        failures(entries)
    }

    /// Populates pages that hold no memory; returns how many entries failed.
    ///
    /// Each entry has one page, and fails with `EXIST` if that page held memory. Of several threads
    /// that claim a page at the same time one succeeds. Contents are as after
    /// [`populate`](Self::populate). Only an exmap can do this; other backends answer `OPNOTSUPP`.
    ///
    /// # Panics
    /// If an entry is not of one page.
    pub fn claim(&self, entries: &mut [Entry]) -> usize {
        assert!(entries.iter().all(|entry| entry.range.count == 1), "pages are claimed one by one");
        self.check(entries);
        // SAFETY: checked; the mapping lives as long as `self`.
        unsafe { self.backend.claim(self.base(), entries) };
        failures(entries)
    }

    /// The page tables that the processor uses for this surface, to be read by this process.
    ///
    /// # Errors
    /// [`SurfaceError::NoPageTables`]: the surface is not on an exmap, or the process may not read
    /// them (`CAP_SYS_ADMIN`).
    pub fn page_tables(&self) -> Result<PageTables, SurfaceError> {
        let tables = self.backend.page_tables(&self.memory);
        tables.map_err(|reason| SurfaceError::NoPageTables { reason })
    }

    /// Releases the memory of all pages of the entries; returns how many entries failed.
    ///
    /// Afterwards they hold no memory and read as zeros. Releasing a released page is allowed.
    /// The kernel's order is: clear the page-table entries, flush the TLBs, free the memory.
    /// `EBUSY` if the kernel still uses a page, on backends that check (exmap): all of the entry
    /// stays, up to a [length](Self::released_whole).
    ///
    /// # Safety
    /// No code relies on the contents of the pages: no reference into them is alive, and no I/O
    /// into or out of them is in flight. Racy readers that validate afterwards are fine.
    pub unsafe fn release(&self, entries: &mut [Entry]) -> usize {
        self.check(entries);
        // SAFETY: checked; the rest is the caller's promise.
        unsafe { self.backend.release(self.base(), entries) };
        failures(entries)
    }

    /// The longest range, in pages, of which a release that answers `EBUSY` has released nothing. A
    /// part of a longer one may be released.
    pub fn released_whole(&self) -> u64 {
        self.backend.released_whole()
    }

    /// Populates the ranges and reads each from the file, page `n` from byte
    /// `offset_of_page_zero + n * 4096`; returns how many entries failed.
    ///
    /// Reads whole ranges: an entry that ends past the end of the file fails with [`END_OF_FILE`],
    /// after the bytes up to the end were read. A failed entry may leave pages populated, and
    /// arbitrary contents in bytes that were not read. Works with `O_DIRECT` files when
    /// `offset_of_page_zero` is aligned as the file needs.
    ///
    /// # Safety
    /// No other code writes the pages or relies on their contents until the call returns, and no
    /// reference into them is alive.
    pub unsafe fn read(
        &self,
        file: BorrowedFd<'_>,
        offset_of_page_zero: u64,
        entries: &mut [Entry],
    ) -> usize {
        self.populate_for_read(entries);
        for entry in entries.iter_mut().filter(|entry| entry.result.is_ok()) {
            let position = entry
                .range
                .start
                .checked_mul(PAGE_SIZE as u64)
                .and_then(|offset| offset.checked_add(offset_of_page_zero));
            entry.result = match position {
                // SAFETY: the range was checked above; the rest is the caller's promise.
                Some(offset) => unsafe { self.read_range(file, offset, entry.range) },
                None => Err(Errno::OVERFLOW),
            };
        }
        failures(entries)
    }

    /// Populates a range and reads it from byte `offset` of the file on.
    ///
    /// # Errors
    /// As an entry of [`read`](Self::read).
    ///
    /// # Safety
    /// As [`read`](Self::read).
    pub unsafe fn read_at(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        range: PageRange,
    ) -> Result<(), Errno> {
        let mut entry = [Entry::new(range)];
        self.populate_for_read(&mut entry);
        entry[0].result?;
        // SAFETY: the range was checked; the rest is the caller's promise.
        unsafe { self.read_range(file, offset, range) }
    }

    /// Populates ranges that are about to be read, unless the kernel's own faults are cheaper.
    fn populate_for_read(&self, entries: &mut [Entry]) {
        let pages: u64 = entries.iter().map(|entry| entry.range.count).fold(0, u64::saturating_add);
        match self.fault_behaviour() {
            _ if self.is_claimed_by_owner() => self.check(entries),
            FaultBehaviour::ReadsZeros if pages < POPULATE_FROM => self.check(entries),
            FaultBehaviour::WritesFault if !self.must_be_populated() => self.check(entries),
            FaultBehaviour::ReadsZeros | FaultBehaviour::WritesFault => _ = self.populate(entries),
        }
    }

    /// Reads one range from `offset` on.
    ///
    /// # Safety
    /// As [`Self::read`], and the range is within the surface.
    unsafe fn read_range(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        range: PageRange,
    ) -> Result<(), Errno> {
        let start = self.base().as_ptr().wrapping_add(range.start as usize * PAGE_SIZE);
        let mut done = 0;
        while done < range.bytes() {
            let left = range.bytes() - done;
            // SAFETY: within the range (caller).
            match unsafe { sys::pread(file, start.wrapping_add(done), left, offset + done as u64) }
            {
                Ok(0) => return Err(END_OF_FILE),
                Ok(bytes) => done += bytes,
                Err(Errno::INTR) => {}
                // A direct read that stopped at an unaligned end of file cannot be continued.
                Err(Errno::INVAL) if done % PAGE_SIZE != 0 => return Err(END_OF_FILE),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Advises the kernel how the program will use a range.
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`]; [`SurfaceError::NoAdvice`] on an exmap, or
    /// [`SurfaceError::AdviceRefused`] where the kernel does not know the advice or cannot follow
    /// it.
    pub fn advise(&self, range: PageRange, advice: Advice) -> Result<(), SurfaceError> {
        self.check_range(range)?;
        self.check_advice(advice)?;
        // SAFETY: within the mapping; no kind of `Advice` alters contents.
        unsafe { crate::backend::madvise::advise(self.base(), range, advice.raw()) }
            .map_err(|errno| SurfaceError::AdviceRefused { advice, errno })
    }

    /// Refuses advice if the backend takes none.
    pub(crate) fn check_advice(&self, advice: Advice) -> Result<(), SurfaceError> {
        let backend = self.backend();
        if self.takes_advice() { Ok(()) } else { Err(SurfaceError::NoAdvice { advice, backend }) }
    }

    /// Whether [`advise`](Self::advise) and huge pages make sense at all.
    pub(crate) fn takes_advice(&self) -> bool {
        self.backend.takes_advice()
    }

    /// As [`Self::advise`], on a range that is known to lie within the surface and a backend that
    /// takes advice, and with EAGAIN for an answer.
    pub(crate) fn ask_once(&self, range: PageRange, advice: Advice) -> Result<(), Errno> {
        let start = self.address(range.start).as_ptr();
        debug_assert!(range.is_within(self.pages()));
        // SAFETY: within the mapping; no kind of `Advice` alters contents.
        unsafe { sys::madvise(start, range.bytes(), advice.raw()) }
    }

    /// `/proc/self/pagemap`. A forked child must not use it: it shows the parent's page tables.
    pub(crate) fn pagemap(&self) -> Result<&File, SurfaceError> {
        if let Some(pagemap) = self.pagemap.get() {
            return Ok(pagemap);
        }
        let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let opened = File::open("/proc/self/pagemap")
            .map_err(|error| SurfaceError::Pagemap { errno: errno(error) })?;
        Ok(self.pagemap.get_or_init(|| opened))
    }

    /// Which pages of a range hold memory of their own. Pages that were read but never written map
    /// the shared zero page and do not count; neither do pages in swap.
    ///
    /// # Errors
    /// [`SurfaceError::OutOfRange`] or [`SurfaceError::Pagemap`].
    pub fn residency(&self, range: PageRange) -> Result<Residency, SurfaceError> {
        self.check_range(range)?;
        residency::of(self.base(), range).map_err(|errno| SurfaceError::Pagemap { errno })
    }

    /// How many pages of a range hold memory of their own.
    ///
    /// # Errors
    /// As [`Self::residency`].
    pub fn resident_pages(&self, range: PageRange) -> Result<u64, SurfaceError> {
        self.check_range(range)?;
        residency::count(self.base(), range).map_err(|errno| SurfaceError::Pagemap { errno })
    }

    /// The backend in use.
    pub fn backend(&self) -> BackendKind {
        self.backend.kind()
    }

    /// What an access to a released page does.
    pub fn fault_behaviour(&self) -> FaultBehaviour {
        self.backend.fault_behaviour()
    }

    /// Whether a caller must populate a page before it writes the page, or has the kernel write it:
    /// not if writing populates, nor if the owner has [claimed](Self::claim) it.
    pub fn must_be_populated(&self) -> bool {
        !self.fault_behaviour().writing_populates() && !self.claimed.load(Ordering::Relaxed)
    }

    /// The owner promises that no read has to populate a page before it writes it: it claims each
    /// page before any read into it, or keeps pages populated.
    pub fn claimed_by_owner(&self) {
        self.claimed.store(true, Ordering::Relaxed);
    }

    /// Whether the owner has [promised](Self::claimed_by_owner) that no read has to populate.
    pub fn is_claimed_by_owner(&self) -> bool {
        self.claimed.load(Ordering::Relaxed)
    }

    /// Whether a page that held no memory holds zeros once it is populated. If not, it holds the
    /// bytes of another page that this surface had, or zeros.
    pub fn fresh_pages_are_zeroed(&self) -> bool {
        self.backend.fresh_pages_are_zeroed()
    }

    /// Gives every entry its first result: EINVAL if it is not within the surface.
    fn check(&self, entries: &mut [Entry]) {
        let pages = self.pages();
        for entry in entries {
            entry.result = if entry.range.is_within(pages) { Ok(()) } else { Err(Errno::INVAL) };
        }
    }

    pub(crate) fn check_range(&self, range: PageRange) -> Result<(), SurfaceError> {
        let pages = self.pages();
        if range.is_within(pages) { Ok(()) } else { Err(SurfaceError::OutOfRange { range, pages }) }
    }
}

/// The address of page 0, stored here for every kind of memory: every access to a page begins with
/// it.
#[derive(Clone, Copy, Debug)]
struct Base(NonNull<u8>);

// SAFETY: an address alone, through which nothing is read or written here.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

/// Batches of at least this many pages are populated by a separate call before they are read. For
/// fewer the kernel's own faults during the read are cheaper than another call (measured on 6.18).
const POPULATE_FROM: u64 = 8;
