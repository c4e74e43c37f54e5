//! A few pages of memory for trials: safe, because no other code knows their addresses.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;

use crate::PAGE_SIZE;
use crate::backend::Backend;
use crate::backend::process_madvise::OwnProcess;
use crate::mapping::Reservation;
use crate::memory::Memory;
use crate::range::{Entry, PageRange, failures};
use crate::residency;

/// A small mapping of its own; every operation is safe, whatever it does to the contents.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: Reservation,
}

impl Scratch {
    /// Maps `pages` zero pages.
    pub(crate) fn new(pages: u64) -> Result<Self, Errno> {
        let memory = Reservation::new(pages as usize * PAGE_SIZE, "scratch memory of a probe")
            .map_err(|_| Errno::NOMEM)?;
        Ok(Self { memory })
    }

    /// The address of a page, as a number.
    pub(crate) fn address(&self, page: u64) -> usize {
        self.memory.base().addr().get() + page as usize * PAGE_SIZE
    }

    fn byte(&self, page: u64) -> &AtomicU8 {
        let offset = page as usize * PAGE_SIZE;
        assert!(offset < self.memory.len(), "page {page} of a smaller scratch");
        // SAFETY: within the live mapping, and only ever accessed atomically.
        unsafe { AtomicU8::from_ptr(self.memory.base().as_ptr().add(offset)) }
    }

    /// Writes the first byte of a page.
    pub(crate) fn write(&self, page: u64, value: u8) {
        self.byte(page).store(value, Ordering::Relaxed);
    }

    /// Reads the first byte of a page.
    pub(crate) fn read(&self, page: u64) -> u8 {
        self.byte(page).load(Ordering::Relaxed)
    }

    /// Gives any advice on a range.
    pub(crate) fn advise(&self, range: PageRange, advice: i32) -> Result<(), Errno> {
        assert!(range.is_within((self.memory.len() / PAGE_SIZE) as u64));
        // SAFETY: within the mapping, on whose contents no code relies.
        unsafe { crate::backend::madvise::advise(self.memory.base(), range, advice) }
    }

    /// Gives any advice on many ranges through `process_madvise`.
    pub(crate) fn advise_vector(&self, process: &OwnProcess, entries: &mut [Entry], advice: i32) {
        let pages = (self.memory.len() / PAGE_SIZE) as u64;
        assert!(entries.iter().all(|entry| entry.range.is_within(pages)));
        // SAFETY: within the mapping, on whose contents no code relies.
        unsafe { process.advise(self.memory.base(), entries, advice) };
    }

    /// How many pages of a range hold memory; None if that cannot be read.
    pub(crate) fn resident(&self, range: PageRange) -> Option<u64> {
        residency::count(self.memory.base(), range).ok()
    }
}

/// The memory of a surface on whose pages no code relies, which makes releasing safe.
#[derive(Debug)]
pub(crate) struct ScratchSurface {
    memory: Memory,
    backend: Box<dyn Backend>,
}

impl ScratchSurface {
    /// Takes the memory and the backend that [`choice::open`](crate::backend::choice::open) made.
    pub(crate) fn new((memory, backend): (Memory, Box<dyn Backend>)) -> Self {
        Self { memory, backend }
    }

    fn pages(&self) -> u64 {
        (self.memory.len() / PAGE_SIZE) as u64
    }

    fn byte(&self, page: u64) -> &AtomicU8 {
        assert!(page < self.pages(), "page {page} of a smaller scratch");
        // SAFETY: within the live mapping, and only ever accessed atomically.
        unsafe { AtomicU8::from_ptr(self.memory.base().as_ptr().add(page as usize * PAGE_SIZE)) }
    }

    /// Writes the first byte of a page, which must be populated if the backend requires that.
    pub(crate) fn write(&self, page: u64, value: u8) {
        self.byte(page).store(value, Ordering::Relaxed);
    }

    /// Reads the first byte of a page.
    pub(crate) fn read(&self, page: u64) -> u8 {
        self.byte(page).load(Ordering::Relaxed)
    }

    /// How many pages hold memory; None if that cannot be read.
    pub(crate) fn resident(&self) -> Option<u64> {
        residency::count(self.memory.base(), PageRange::new(0, self.pages())).ok()
    }

    /// Populates the pages of the entries; returns how many entries failed.
    pub(crate) fn populate(&self, entries: &mut [Entry]) -> usize {
        self.begin(entries);
        // SAFETY: within the mapping, which lives as long as `self`.
        unsafe { self.backend.populate(self.memory.base(), entries) };
        failures(entries)
    }

    /// Releases the pages of the entries; returns how many entries failed.
    pub(crate) fn release(&self, entries: &mut [Entry]) -> usize {
        self.begin(entries);
        // SAFETY: as above; no reference to the contents of a page is ever given out.
        unsafe { self.backend.release(self.memory.base(), entries) };
        failures(entries)
    }

    fn begin(&self, entries: &mut [Entry]) {
        assert!(entries.iter().all(|entry| entry.range.is_within(self.pages())));
        entries.iter_mut().for_each(|entry| entry.result = Ok(()));
    }
}
