//! The machine of a cache in ring 0: frames, entries of page tables, and files.
//!
//! A frame is a page of one memory slot. The guest's entries say which page of which file is where,
//! and the processor sets their bits when the program accesses a page or stores to it. So neither
//! causes a fault, and eviction and write-back read the bits. Entries that are not present keep the
//! dirty bit until the frame is released.
//!
//! `file.rs` has how the storage is reached.
#![allow(unsafe_code)]

use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use vellum_aquila_core::{Environment, Page};

use crate::current_processor;
use crate::entry::PAGE;
use crate::file::{MappedFile, offset};
use crate::memory::{Mapped, Memory, pointer};
use crate::shootdown::Shootdown;
use crate::sys::rest;

/// Managed ranges that a machine can have.
pub(crate) const RANGES: usize = 64;

/// The machine.
#[derive(Debug)]
pub(crate) struct Pages {
    memory: Arc<Memory>,
    shootdown: Arc<Shootdown>,
    frames: Mapped,
    /// The guest-physical address of the first frame.
    place: u64,
    /// The files by number, which is that of the range.
    files: [OnceLock<MappedFile>; RANGES],
}

impl Pages {
    /// Frames at a guest-physical address.
    pub(crate) fn new(
        memory: Arc<Memory>,
        shootdown: Arc<Shootdown>,
        frames: Mapped,
        place: u64,
    ) -> Self {
        let files = [const { OnceLock::new() }; RANGES];
        Self { memory, shootdown, frames, place, files }
    }

    /// Enters a file. False if the number has been used.
    pub(crate) fn open(&self, number: usize, file: MappedFile) -> bool {
        self.files.get(number).is_some_and(|place| place.set(file).is_ok())
    }

    /// A file by its number.
    pub(crate) fn file(&self, number: u32) -> Option<&MappedFile> {
        self.files.get(number as usize)?.get()
    }

    /// All files that have ever been mapped.
    pub(crate) fn files(&self) -> impl Iterator<Item = &MappedFile> {
        self.files.iter().filter_map(OnceLock::get)
    }

    fn file_of(&self, page: &Page) -> Result<&MappedFile, Errno> {
        self.file(page.key.file()).ok_or(Errno::BADF)
    }

    /// The address of a page. The core knows pages of mapped files only.
    fn address(&self, page: &Page) -> Option<u64> {
        Some(self.file(page.key.file())?.start + offset(page))
    }

    /// Takes pages out of the tables and leaves them in their frames, so that the next accesses
    /// fault: for tests and measurements.
    pub(crate) fn unmap_all_of(&self, file: &MappedFile) {
        for page in 0..file.pages() {
            self.memory.unmap_frame(file.start + page * PAGE as u64);
        }
        self.shootdown.shoot_down();
    }

    /// Pages of a file that are mapped now.
    pub(crate) fn mapped(&self, file: &MappedFile) -> u64 {
        let address = |page| file.start + page * PAGE as u64;
        (0..file.pages()).filter(|page| self.memory.is_mapped(address(*page))).count() as u64
    }
}

impl Environment for Pages {
    type Mapping = MappedFile;
    type Error = Errno;

    /// The virtual processor: to ask for the machine's would take an exit.
    #[inline]
    fn processor(&self) -> usize {
        current_processor::number()
    }

    fn read(&self, run: &[Page], _: Option<&MappedFile>) -> Result<bool, Errno> {
        let done = self.file_of(&run[0])?.read(run, &self.frames)?;
        // The file has become shorter, and a whole page of the run is not there any more.
        if done <= (run.len() - 1) * PAGE {
            return Err(Errno::NXIO);
        }
        let rest = run.len() * PAGE - done;
        if rest > 0 {
            let last = self.frames.start() + u64::from(run[run.len() - 1].frame) * PAGE as u64;
            // SAFETY: the bytes are the last ones of a frame that this thread has, and that no
            // reference leads to.
            unsafe { pointer::<u8>(last + (PAGE - rest) as u64).write_bytes(0, rest) };
        }
        Ok(false)
    }

    fn write(&self, run: &[Page]) -> Result<(), Errno> {
        self.file_of(&run[0])?.write(run, &self.frames)
    }

    /// For writing wherever the program may write: the dirty bit tells of stores.
    fn map(&self, run: &[Page], place: &MappedFile, _: bool) -> Result<(), Errno> {
        for page in run {
            let frame = self.place + u64::from(page.frame) * PAGE as u64;
            self.memory.map_frame(place.start + offset(page), frame, place.writable);
        }
        Ok(())
    }

    fn protect(&self, pages: &[Page]) {
        let addresses = pages.iter().filter_map(|page| self.address(page));
        addresses.for_each(|address| self.memory.clean(address));
        self.shootdown.shoot_down();
    }

    fn unmap(&self, pages: &[Page]) {
        let addresses = pages.iter().filter_map(|page| self.address(page));
        addresses.for_each(|address| self.memory.unmap_frame(address));
        self.shootdown.shoot_down();
    }

    fn release(&self, pages: &[Page]) {
        let addresses = pages.iter().filter_map(|page| self.address(page));
        addresses.for_each(|address| self.memory.forget(address));
    }

    fn wait(&self, attempt: u32) {
        rest(attempt);
    }

    fn was_accessed(&self, page: Page) -> bool {
        self.address(&page).is_some_and(|address| self.memory.take_accessed(address))
    }

    fn tells_stores(&self) -> bool {
        true
    }

    fn was_stored_to(&self, page: Page) -> bool {
        self.address(&page).is_some_and(|address| self.memory.is_dirty(address))
    }
}
