//! Mappings by the kernel: the last resort, and what the other backends are compared with.
//!
//! The kernel's page cache is shared by the whole machine: it has no budget for a program, no
//! policy of the program's, and no statistics. What can be done with `madvise`, `msync` and `mlock`
//! is here.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use rustix::fs::fdatasync;
use rustix::io::Errno;
use rustix::mm::Advice as Madvise;
use vellum_aquila_core::Advice;

use crate::PAGE_SIZE;
use crate::error::{Error, Result};
use crate::generation::{self, Generation};
use crate::sys::{self, OwnedMapping};

/// A mapping of the file itself.
#[derive(Debug)]
pub(crate) struct KernelMapping {
    mapped: OwnedMapping,
    file: File,
    /// The locked ranges of all pins.
    pins: Mutex<Vec<Range<usize>>>,
    /// The process that has it: a forked child has not.
    generation: Generation,
}

impl KernelMapping {
    /// Maps bytes from an offset, which begins a page.
    pub(crate) fn new(file: &File, offset: u64, bytes: usize, writable: bool) -> Result<Self> {
        let failed = |errno| Error::of("mapping a file", errno);
        let own = file.try_clone();
        let own = own.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        let mapped = OwnedMapping::new(file, offset, bytes, writable).map_err(failed)?;
        // As with the other backend, so that a program behaves the same on both.
        mapped.is_not_inherited().map_err(failed)?;
        let generation = generation::begin().map_err(failed)?;
        Ok(Self { mapped, file: own, pins: Mutex::default(), generation })
    }

    pub(crate) fn mapped(&self) -> &OwnedMapping {
        &self.mapped
    }

    fn start(&self) -> usize {
        self.mapped.start()
    }

    /// The file, unless the process is a forked child.
    pub(crate) fn file(&self) -> Result<&File> {
        self.check().map(|()| &self.file)
    }

    /// A forked child may have other memory at the addresses.
    fn check(&self) -> Result<()> {
        let is_own = generation::current() == self.generation;
        if is_own { Ok(()) } else { Err(Error::Forked) }
    }

    /// Gives the kernel advice for whole pages.
    fn madvise(&self, pages: &Range<usize>, advice: Madvise) -> Result<(), Errno> {
        // SAFETY: the range is within a shared mapping of a file.
        unsafe { sys::advise(self.start() + pages.start, pages.len(), advice) }
    }

    pub(crate) fn advise(&self, advice: Advice) -> Result<()> {
        self.check()?;
        let advice = match advice {
            Advice::Normal => Madvise::Normal,
            Advice::Random => Madvise::Random,
            Advice::Sequential => Madvise::Sequential,
        };
        let all = 0..self.mapped.bytes();
        self.madvise(&all, advice).map_err(|errno| Error::of("giving advice", errno))
    }

    /// Reads and maps pages. Returns how many.
    pub(crate) fn populate(&self, pages: Range<usize>) -> Result<u64> {
        self.check()?;
        let result = match self.madvise(&pages, Madvise::LinuxPopulateRead) {
            // Linux before 5.14.
            Err(Errno::INVAL) => self.madvise(&pages, Madvise::WillNeed),
            result => result,
        };
        match result {
            Ok(()) => Ok((pages.len() / PAGE_SIZE) as u64),
            Err(Errno::FAULT) => Err(Error::BeyondEnd { doing: "prefetching pages" }),
            Err(errno) => Err(Error::of("prefetching pages", errno)),
        }
    }

    /// Asks the kernel to reclaim pages. It reclaims those that nothing else uses.
    pub(crate) fn evict(&self, pages: Range<usize>) -> Result<()> {
        self.write_back(pages.clone(), false)?;
        let result = self.madvise(&pages, Madvise::LinuxPageOut);
        result.map_err(|errno| Error::of("evicting pages", errno))
    }

    pub(crate) fn write_back(&self, pages: Range<usize>, durable: bool) -> Result<()> {
        let failed = |errno| Error::of("syncing a file", errno);
        self.check()?;
        sys::sync(self.start() + pages.start, pages.len()).map_err(failed)?;
        if durable { fdatasync(&self.file).map_err(failed) } else { Ok(()) }
    }

    /// Locks pages in memory.
    pub(crate) fn pin(&self, pages: &Range<usize>) -> Result<()> {
        self.check()?;
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        sys::lock(self.start() + pages.start, pages.len(), true)
            .map_err(|errno| Error::of("pinning pages", errno))?;
        pins.push(pages.clone());
        Ok(())
    }

    /// Ends a pin: unlocks the pages that have no other one.
    pub(crate) fn unpin(&self, pages: &Range<usize>) {
        if self.check().is_err() {
            return;
        }
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = pins.iter().position(|pin| pin == pages) {
            pins.swap_remove(at);
        }
        let overlaps = |pin: &Range<usize>| pin.start < pages.end && pages.start < pin.end;
        if !pins.iter().any(overlaps) {
            let _ = sys::lock(self.start() + pages.start, pages.len(), false);
            return;
        }
        for page in pages.clone().step_by(PAGE_SIZE) {
            if !pins.iter().any(|pin| pin.contains(&page)) {
                let _ = sys::lock(self.start() + page, PAGE_SIZE, false);
            }
        }
    }
}

impl Drop for KernelMapping {
    fn drop(&mut self) {
        if self.check().is_err() {
            self.mapped.forget();
        }
    }
}
