//! Frames in anonymous memory: the frame of a page is the page of memory where the file is mapped.
//!
//! A file has them while it has one mapping and no pin. A page comes by one `UFFDIO_COPY`, and a
//! batch of pages leaves by calls for many ranges, for which the kernel needs no file: that is
//! what makes them faster than a memory file. A page that the cache has is mapped, always: for
//! reading until the first store, and write-protected while it is written to the file, which is
//! done from where it is.
//!
//! A second mapping, or a pin, moves the file to a memory file: all its pages leave, and a mapping
//! of an empty memory file takes the addresses over. (To move pages that are pinned would take them
//! away from system calls for a moment.)
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::thread::sched_yield;
use vellum_aquila_core::Page;

use crate::mapped_places::{MappedPlace, runs};
use crate::{PAGE_SIZE, sys};

/// How often a page is made anew where memory is that should not be there.
const ATTEMPTS: u32 = 64;

/// Changes frames in anonymous memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Anonymous<'h> {
    pub(crate) uffd: BorrowedFd<'h>,
    /// Whether stores to clean pages fault.
    pub(crate) protects: bool,
}

impl Anonymous<'_> {
    /// Fills the frames of a run with bytes.
    pub(crate) fn copy_in(
        &self,
        run: &[Page],
        bytes: &[u8],
        home: &MappedPlace,
    ) -> Result<(), Errno> {
        let mapped = home.mapped();
        let (start, length) = mapped.addresses(run).ok_or(Errno::FAULT)?;
        if length < bytes.len() {
            return Err(Errno::FAULT);
        }
        let protected = self.protects;
        let (mut done, mut failed, mut step) = (0, 0, bytes.len());
        while done < bytes.len() {
            let rest = &bytes[done..bytes.len().min(done + step)];
            let (copied, result) = sys::copy_and_map(self.uffd, start + done, rest, protected);
            done += copied;
            match result {
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if copied > 0 => {}
                Err(Errno::AGAIN) => sched_yield(),
                // A page whose release failed. No thread needs what it has.
                Err(Errno::EXIST) if failed < ATTEMPTS => {
                    failed += 1;
                    drop_translations(start + done, PAGE_SIZE);
                }
                // The run crosses the border of two VMAs: the program has locked one of them.
                Err(Errno::NOENT) if step > PAGE_SIZE => step = PAGE_SIZE,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Maps pages of a run that are in the cache: so they are mapped for reading already.
    pub(crate) fn map(
        &self,
        run: &[Page],
        home: &MappedPlace,
        writable: bool,
    ) -> Result<(), Errno> {
        match home.mapped().addresses(run).filter(|_| writable) {
            Some((start, bytes)) => self.set_protection(start, bytes, false),
            None => Ok(()),
        }
    }

    /// Takes write access to pages away. Their contents stay.
    pub(crate) fn protect(&self, pages: &[Page], home: &MappedPlace) {
        for run in runs(pages) {
            if let Some((start, bytes)) = home.mapped().addresses(run) {
                // It fails if the program has unmapped them.
                let _ = self.set_protection(start, bytes, true);
            }
        }
    }

    /// Takes write access to a range away, or gives it back.
    pub(crate) fn set_protection(
        &self,
        start: usize,
        bytes: usize,
        protect: bool,
    ) -> Result<(), Errno> {
        if !self.protects {
            return Ok(());
        }
        let mut step = bytes;
        let mut at = start;
        while at < start + bytes {
            match sys::write_protect(self.uffd, at, step, protect) {
                Ok(()) => at += step,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => sched_yield(),
                // The range crosses the border of two VMAs, which Linux 6.1 refuses.
                Err(Errno::NOENT) if step > PAGE_SIZE => step = PAGE_SIZE,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Copies bytes out of a page that the thread has pinned.
    pub(crate) fn load(
        &self,
        page: &Page,
        home: &MappedPlace,
        inside: usize,
        bytes: &mut [u8],
    ) -> Result<(), Errno> {
        let start = home.mapped().address(page.key.page()).ok_or(Errno::FAULT)?;
        // SAFETY: the page is resident, so it is mapped.
        unsafe { sys::load_bytes(start + inside, bytes) };
        Ok(())
    }

    /// Copies bytes into a page that is dirty, and that the thread has pinned and locked.
    pub(crate) fn store(
        &self,
        page: &Page,
        home: &MappedPlace,
        inside: usize,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let start = home.mapped().address(page.key.page()).ok_or(Errno::FAULT)?;
        self.set_protection(start, PAGE_SIZE, false)?;
        // SAFETY: the page is resident, so it is mapped. Only pages in writable mappings are dirty,
        // and no other thread protects it while this one has the lock.
        unsafe { sys::store_bytes(start + inside, bytes) };
        Ok(())
    }
}

/// Unmaps a range of a place in use: the next access faults. Pages of anonymous memory are gone.
pub(crate) fn drop_translations(start: usize, bytes: usize) {
    // SAFETY: the place is in use, so the range is a mapping of a memory file, or the frames of
    // pages that leave.
    if let Err(Errno::INVAL) = unsafe { sys::drop_translations(start, bytes) } {
        // The program has locked the range in memory, which the cache cannot honour.
        let _ = sys::lock(start, bytes, false);
        // SAFETY: as above.
        let _ = unsafe { sys::drop_translations(start, bytes) };
    }
}

/// Pages of anonymous memory that leave together.
pub(crate) struct Leaving<'h> {
    /// Whether one call drops the pages of many ranges.
    together: &'h AtomicBool,
    ranges: sys::Ranges,
}

impl<'h> Leaving<'h> {
    pub(crate) fn new(together: &'h AtomicBool) -> Self {
        Self { together, ranges: sys::Ranges::new() }
    }

    /// Adds pages of one file.
    pub(crate) fn add(&mut self, pages: &[Page], home: &MappedPlace) {
        for run in runs(pages) {
            if let Some((start, bytes)) = home.mapped().addresses(run) {
                if self.ranges.is_full() {
                    self.drop_all();
                }
                self.ranges.push(start, bytes);
            }
        }
    }

    /// Frees the pages, by one call where the kernel takes it.
    pub(crate) fn drop_all(&mut self) {
        if self.ranges.has_several() && self.together.load(Ordering::Relaxed) {
            // SAFETY: the pages are leaving, so no thread needs them.
            if unsafe { self.ranges.drop_translations() } {
                return self.ranges.clear();
            }
            self.together.store(false, Ordering::Relaxed);
        }
        for (start, bytes) in self.ranges.iter() {
            drop_translations(start, bytes);
        }
        self.ranges.clear();
    }
}
