//! The machine of a cache in ring 0: frames, entries of page tables, and files.
//!
//! A frame is a page of one memory slot. The guest's entries say which page of which file is where,
//! and the processor sets their bits when the program accesses a page or stores to it. So neither
//! causes a fault, and eviction and write-back read the bits. Entries that are not present keep the
//! dirty bit until the frame is released.
//!
//! Storage is reached by system calls, which ring 0 makes by exits.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use vellum_aquila_core::{Advice, MOST_PAGES, Machine, Page, Pattern};

use crate::current;
use crate::entry::PAGE;
use crate::memory::{Mapped, Memory, pointer};
use crate::shootdown::Shootdown;
use crate::sys::raw_system_call;

/// Managed ranges that a machine can have.
pub(crate) const RANGES: usize = 16;

/// How often a waiting thread looks before it gives its processor away.
const LOOKS: u32 = 100;

/// A file that is mapped in a managed range.
#[derive(Debug)]
pub(crate) struct MappedFile {
    pub(crate) descriptor: OwnedFd,
    /// The device and the inode.
    pub(crate) identity: (u64, u64),
    /// The first address of the range.
    pub(crate) start: u64,
    /// Bytes of the file when it was mapped.
    pub(crate) length: u64,
    pub(crate) writable: bool,
    pub(crate) advice: AtomicU64,
    pub(crate) pattern: Pattern,
    /// Whether the program still has the mapping.
    pub(crate) is_open: AtomicBool,
    /// Whether the system has failed to make what was written durable.
    pub(crate) sync_failed: AtomicBool,
}

impl MappedFile {
    pub(crate) fn pages(&self) -> u64 {
        self.length.div_ceil(PAGE as u64)
    }

    pub(crate) fn advice(&self) -> Advice {
        match self.advice.load(Ordering::Relaxed) {
            RANDOM => Advice::Random,
            SEQUENTIAL => Advice::Sequential,
            _ => Advice::Normal,
        }
    }

    pub(crate) fn advise(&self, advice: Advice) {
        let word = match advice {
            Advice::Normal => NORMAL,
            Advice::Random => RANDOM,
            Advice::Sequential => SEQUENTIAL,
        };
        self.advice.store(word, Ordering::Relaxed);
    }

    /// Makes what was written durable.
    pub(crate) fn make_durable(&self) -> Result<(), Errno> {
        loop {
            let arguments = [self.descriptor.as_raw_fd() as u64, 0, 0, 0, 0, 0];
            // SAFETY: the call changes no memory.
            let result = unsafe { raw_system_call(libc::SYS_fdatasync as u64, arguments) };
            if result == 0 {
                return Ok(());
            }
            match Errno::from_raw_os_error(-result as i32) {
                Errno::INTR => {}
                errno => return Err(errno),
            }
        }
    }

    /// Bytes of a run that the file has.
    fn bytes(&self, run: &[Page]) -> usize {
        let left = self.length.saturating_sub(offset(&run[0]));
        left.min((run.len() * PAGE) as u64) as usize
    }

    /// Has the system read or write the first bytes of a run, from place `done` on. Returns how
    /// many it has.
    fn call(&self, number: i64, run: &[Page], frames: &Mapped, part: (usize, usize)) -> i64 {
        let (done, end) = part;
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = [empty; MOST_PAGES as usize];
        let (mut count, mut at) = (0, done);
        while count < vectors.len() && at < end {
            let inside = at % PAGE;
            let length = (PAGE - inside).min(end - at);
            let start = frames.start() + u64::from(run[at / PAGE].frame) * PAGE as u64;
            vectors[count] =
                libc::iovec { iov_base: pointer(start + inside as u64), iov_len: length };
            (count, at) = (count + 1, at + length);
        }
        let arguments = [
            self.descriptor.as_raw_fd() as u64,
            vectors.as_ptr().expose_provenance() as u64,
            count as u64,
            offset(&run[0]) + done as u64,
            0,
            0,
        ];
        // SAFETY: the vectors are those of frames that this thread has, and that no reference leads
        // to. The calls change nothing else.
        unsafe { raw_system_call(number as u64, arguments) }
    }

    /// Repeats a call until all bytes are done, or it does none. Returns how many are done.
    fn all(
        &self,
        number: i64,
        run: &[Page],
        frames: &Mapped,
        bytes: usize,
    ) -> Result<usize, Errno> {
        let mut done = 0;
        while done < bytes {
            match self.call(number, run, frames, (done, bytes)) {
                0 => break,
                result if result > 0 => done += result as usize,
                result => match Errno::from_raw_os_error(-result as i32) {
                    Errno::INTR | Errno::AGAIN => {}
                    errno => return Err(errno),
                },
            }
        }
        Ok(done)
    }
}

const NORMAL: u64 = 0;
const RANDOM: u64 = 1;
const SEQUENTIAL: u64 = 2;

/// Where a page is in its file.
fn offset(page: &Page) -> u64 {
    page.key.page() * PAGE as u64
}

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

impl Machine for Pages {
    type Place = MappedFile;
    type Error = Errno;

    /// The virtual processor: to ask for the machine's would take an exit.
    fn processor(&self) -> usize {
        current::number()
    }

    fn read(&self, run: &[Page], _: Option<&MappedFile>) -> Result<bool, Errno> {
        let file = self.file_of(&run[0])?;
        let done = file.all(libc::SYS_preadv, run, &self.frames, file.bytes(run))?;
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
        let file = self.file_of(&run[0])?;
        let bytes = file.bytes(run);
        let done = file.all(libc::SYS_pwritev, run, &self.frames, bytes)?;
        if done < bytes { Err(Errno::IO) } else { Ok(()) }
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
        if attempt < LOOKS {
            return std::hint::spin_loop();
        }
        // SAFETY: the call has no arguments.
        unsafe { raw_system_call(libc::SYS_sched_yield as u64, [0; 6]) };
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
