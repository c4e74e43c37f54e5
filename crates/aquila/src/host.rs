//! Linux as the environment of a cache: userfaultfd.
//!
//! The frames of a file are in one of two kinds of memory (its [`Home`]):
//!
//! - *Anonymous memory*, where the file is mapped, while it has one mapping and no pin: see
//!   `anonymous.rs`.
//! - A *memory file* (memfd) with the same offsets. The frame of a page is the page of the memory
//!   file at the page's own offset: so all mappings of a file are mappings of its memory file, they
//!   share frames without further ado, and a mapping is one VMA however its pages come and go.
//!
//! A frame's number stands for the right to have one page in such memory, which is how the cache
//! keeps its budget.
//!
//! (The alternative is one memory file with frame *n* at offset *n*. But userfaultfd maps a page
//! only where the VMA has it, so each page would need a VMA of its own.)
//!
//! Mappings of memory files are registered for missing, minor and write-protect faults, those of
//! anonymous memory for missing and write-protect faults. Pages come into a memory file by
//! `UFFDIO_COPY`, which maps them at once, or by `pwrite`, and then they are mapped by
//! `UFFDIO_CONTINUE`. So nothing is accessible before it was read. Without write protection for
//! memory files (Linux before 5.19, or `CONTINUE` that cannot map protected pages, before 6.4)
//! every page that is mapped in a writable mapping counts as dirty.
#![allow(unsafe_code)]

use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, fallocate, fdatasync, fstat, ftruncate};
use rustix::io::Errno;
use rustix::thread::{Timespec, nanosleep, sched_getcpu, sched_yield};
use vellum_aquila_core::{Environment, MOST_PAGES, Page, Pattern};

use crate::anonymous::{Anonymous, Leaving, drop_translations};
use crate::descriptor::Descriptor;
use crate::generation::{self, Generation};
use crate::mapped_places::{self, Mapped, MappedPlace, of_file, runs};
use crate::probe::{Frames, Userfaultfd};
use crate::write_requests::{PageError, WRITERS, WriteRequests};
use crate::{PAGE_SIZE, sys};

/// Files that a cache can have at one time.
pub(crate) const MOST_FILES: usize = 4096;

/// Bytes that one call reads or writes.
const BUFFER: usize = MOST_PAGES as usize * PAGE_SIZE;

/// Not on the stack: a thread that faults may have little of it.
static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// No descriptor.
const NONE: i32 = -1;

/// Where the frames of a file are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Home {
    /// The file has no mapping, and no page.
    None,
    /// In its memory file.
    MemoryFile,
    /// In anonymous memory, at the place where it is mapped.
    Anonymous(&'static MappedPlace),
}

/// [`Home::None`] and [`Home::MemoryFile`] as numbers; those after them are places.
const HOME_NONE: usize = 0;
const HOME_MEMORY_FILE: usize = 1;
const HOME_PLACES: usize = 2;

/// Descriptors of a file that the cache has opened once more.
#[derive(Debug)]
pub(crate) struct Copies {
    /// Through the kernel's page cache.
    pub(crate) buffered: OwnedFd,
    /// Past it, if the cache is to do that and the file system can.
    pub(crate) direct: Option<OwnedFd>,
}

/// A file of a cache, by its number.
#[derive(Debug)]
pub(crate) struct HostFile {
    reader: AtomicI32,
    /// Open for writing, or none.
    writer: AtomicI32,
    /// The same by direct I/O, or none: whole pages go between the storage and the cache's buffers
    /// and leave no copy in the kernel's page cache.
    direct_reader: AtomicI32,
    direct_writer: AtomicI32,
    /// The memory file, or none.
    memory: AtomicI32,
    /// Where the frames are. It changes only while the file has no page in the cache.
    home: AtomicUsize,
    /// Held by threads that bring pages in or use them, and by one that changes the home. Threads
    /// that only have pages leave, for the frames, do not hold it: a page that leaves is there
    /// until its frame is free, so the home stays until then. All signals of these threads are
    /// blocked.
    ///
    /// The threads of a cache do not hold it when they handle faults: one that has it may wait for
    /// the lock of the file's inode, and a call to the file has that while its fault waits. Their
    /// files have memory files only, as long as they have a mapping.
    moving: RwLock<()>,
    /// Pages of the file when it was last looked at: a bound for read-ahead.
    pages: AtomicU64,
    pub(crate) pattern: Pattern,
    /// Held by threads that write to the file within its length, and by one that changes the
    /// length. All signals of these threads are blocked.
    length: RwLock<()>,
    /// Held by a thread that looks at the length and poisons a page that the file has not, and by
    /// one that ends the poison of pages that the file has got. All signals of these threads are
    /// blocked. Neither waits for anything that a call to the file may have locked.
    poisoning: Mutex<()>,
    /// Whether a thread with the lock above is looking whether a page is in the cache, and poisons
    /// it if not.
    is_poisoning: AtomicBool,
    /// Whether a sync has failed. One thread syncs at a time, because the system reports an error
    /// of its own write-back to one of them only.
    sync_failed: Mutex<bool>,
    /// Whether a thread of the cache that writes pages writes those of this file, and the frame at
    /// which the next one begins.
    is_writing: AtomicBool,
    next_to_write: AtomicU32,
}

/// The file's pages are the thread's to write while this lives.
pub(crate) struct Turn<'f>(&'f HostFile);

impl Turn<'_> {
    /// The frame to begin at.
    pub(crate) fn next(&self) -> u32 {
        self.0.next_to_write.load(Ordering::Relaxed)
    }

    /// The next thread begins at this frame.
    pub(crate) fn end_at(self, frame: u32) {
        self.0.next_to_write.store(frame, Ordering::Relaxed);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.is_writing.store(false, Ordering::Release);
    }
}

impl HostFile {
    fn new() -> Self {
        Self {
            reader: AtomicI32::new(NONE),
            writer: AtomicI32::new(NONE),
            direct_reader: AtomicI32::new(NONE),
            direct_writer: AtomicI32::new(NONE),
            memory: AtomicI32::new(NONE),
            home: AtomicUsize::new(HOME_NONE),
            moving: RwLock::new(()),
            pages: AtomicU64::new(0),
            pattern: Pattern::default(),
            length: RwLock::new(()),
            poisoning: Mutex::new(()),
            is_poisoning: AtomicBool::new(false),
            sync_failed: Mutex::new(false),
            is_writing: AtomicBool::new(false),
            next_to_write: AtomicU32::new(0),
        }
    }

    /// A descriptor of the file. `Errno::BADF` if there is none.
    fn descriptor(&self, of: &AtomicI32) -> Result<BorrowedFd<'_>, Errno> {
        match of.load(Ordering::Acquire) {
            NONE => Err(Errno::BADF),
            // SAFETY: a file is closed only after its last mapping and its last page are gone, and
            // a descriptor of an open file is never replaced.
            descriptor => Ok(unsafe { sys::borrow(descriptor) }),
        }
    }

    pub(crate) fn memory(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.descriptor(&self.memory)
    }

    pub(crate) fn reader(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.descriptor(&self.reader)
    }

    pub(crate) fn writer(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.descriptor(&self.writer)
    }

    /// Reads until the buffer is full or the file ends. Returns the bytes. The buffer has whole
    /// pages, and its address and the place in the file are multiples of a page.
    fn read_pages(&self, bytes: &mut [u8], at: u64) -> Result<usize, Errno> {
        let mut done = 0;
        if let Ok(direct) = self.descriptor(&self.direct_reader) {
            // The file's end, and what the file system refuses to do directly, is left.
            while done < bytes.len() && done.is_multiple_of(PAGE_SIZE) {
                match rustix::io::pread(direct, &mut bytes[done..], at + done as u64) {
                    Ok(0) | Err(Errno::INVAL) => break,
                    Ok(read) => done += read,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
        let rest = read_fully(self.reader()?, &mut bytes[done..], at + done as u64)?;
        Ok(done + rest)
    }

    /// Writes a buffer whose address and place in the file are multiples of a page.
    fn write_pages(&self, bytes: &[u8], at: u64) -> Result<(), Errno> {
        let mut done = 0;
        if let Ok(direct) = self.descriptor(&self.direct_writer) {
            let whole = bytes.len() / PAGE_SIZE * PAGE_SIZE;
            while done < whole && done.is_multiple_of(PAGE_SIZE) {
                match sys::write_at(direct, &bytes[done..whole], at + done as u64) {
                    Ok(0) => return Err(Errno::IO),
                    Ok(written) => done += written,
                    Err(Errno::INVAL) => break,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
        write_fully(self.writer()?, &bytes[done..], at + done as u64)
    }

    /// Pages of the file when it was last looked at.
    pub(crate) fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }

    /// Looks at the file's length.
    pub(crate) fn look(&self) -> Result<u64, Errno> {
        let length = fstat(self.reader()?)?.st_size.cast_unsigned();
        self.pages.store(pages_of(length), Ordering::Relaxed);
        Ok(length)
    }

    /// Changes the length, by a descriptor for writing, while no thread writes to the file.
    pub(crate) fn set_length(&self, descriptor: BorrowedFd<'_>, length: u64) -> Result<(), Errno> {
        let _alone = self.length.write().unwrap_or_else(PoisonError::into_inner);
        ftruncate(descriptor, length)
    }

    /// Makes what was written durable. `Ok(false)` if an earlier call has failed: the system may
    /// have dropped what was written then, and says so once.
    pub(crate) fn sync(&self) -> Result<bool, Errno> {
        let mut failed = self.sync_failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *failed {
            return Ok(false);
        }
        let synced = fdatasync(self.writer()?);
        *failed = synced.is_err();
        synced.map(|()| true)
    }

    /// Lets the thread write pages of the file, if no other thread that does nothing else does.
    pub(crate) fn begin_writing(&self) -> Option<Turn<'_>> {
        let was_writing = self.is_writing.swap(true, Ordering::Acquire);
        (!was_writing).then(|| Turn(self))
    }

    /// Where the frames are. It stays so while the thread has a frame with a page of the file for
    /// itself, or a lock of the home.
    pub(crate) fn home(&self) -> Home {
        match self.home.load(Ordering::Acquire) {
            HOME_NONE => Home::None,
            HOME_MEMORY_FILE => Home::MemoryFile,
            number => Home::Anonymous(mapped_places::numbered(number - HOME_PLACES)),
        }
    }

    /// Keeps the home as it is.
    pub(crate) fn stay(&self) -> RwLockReadGuard<'_, ()> {
        self.moving.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps all threads from bringing pages of the file in, so that the caller can change the
    /// home.
    pub(crate) fn stop(&self) -> RwLockWriteGuard<'_, ()> {
        self.moving.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps other threads from poisoning pages, or from ending the poison of new ones.
    pub(crate) fn begin_poisoning(&self) -> MutexGuard<'_, ()> {
        self.poisoning.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function that looks whether a page is in the cache, and poisons it if not. No thread
    /// brings a page in meanwhile that the function has not seen.
    pub(crate) fn poisoning<T>(&self, f: impl FnOnce() -> T) -> T {
        let _alone = self.begin_poisoning();
        self.is_poisoning.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let result = f();
        self.is_poisoning.store(false, Ordering::Release);
        result
    }

    /// Waits for a thread that poisons a page and has not seen those that this one brings in. They
    /// are in the index of the cache.
    fn wait_for_poisoning(&self) {
        fence(Ordering::SeqCst);
        if self.is_poisoning.load(Ordering::Acquire) {
            drop(self.begin_poisoning());
        }
    }

    /// The frames are in anonymous memory from now on. The caller has stopped the file.
    pub(crate) fn live_at(&self, place: &MappedPlace) {
        self.home.store(HOME_PLACES + place.number(), Ordering::Release);
    }

    /// The frames are in a memory file from now on. The caller has stopped the file.
    pub(crate) fn live_in(&self, memory: OwnedFd) {
        self.memory.store(memory.into_raw_fd(), Ordering::Release);
        self.home.store(HOME_MEMORY_FILE, Ordering::Release);
    }

    /// There are no frames. The caller has stopped the file, or alone knows it.
    pub(crate) fn live_nowhere(&self) {
        self.home.store(HOME_NONE, Ordering::Release);
    }

    /// Gives a number to a file.
    pub(crate) fn open(&self, reader: Copies) {
        *self.sync_failed.lock().unwrap_or_else(PoisonError::into_inner) = false;
        let direct = reader.direct.map_or(NONE, OwnedFd::into_raw_fd);
        self.direct_reader.store(direct, Ordering::Release);
        self.reader.store(reader.buffered.into_raw_fd(), Ordering::Release);
    }

    /// Adds descriptors for writing, of which there are none.
    pub(crate) fn open_for_writing(&self, writer: Copies) {
        let direct = writer.direct.map_or(NONE, OwnedFd::into_raw_fd);
        self.direct_writer.store(direct, Ordering::Release);
        self.writer.store(writer.buffered.into_raw_fd(), Ordering::Release);
    }

    /// Closes a file that has neither mappings nor pages.
    pub(crate) fn close(&self) {
        self.live_nowhere();
        let direct = [&self.direct_reader, &self.direct_writer];
        for of in [&self.reader, &self.writer, &self.memory].into_iter().chain(direct) {
            let descriptor = of.swap(NONE, Ordering::AcqRel);
            if descriptor != NONE {
                // SAFETY: the file owned it, and nothing refers to it any more.
                drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
        self.pattern.forget();
    }
}

/// The environment of one cache.
#[derive(Debug)]
pub(crate) struct Host {
    /// The number of the cache in this process.
    pub(crate) cache: u64,
    pub(crate) uffd: Descriptor,
    /// The process whose descriptors the files have.
    generation: Generation,
    /// Whether stores to clean pages of memory files fault.
    pub(crate) write_protect: bool,
    /// The same for frames in anonymous memory.
    pub(crate) protects_anonymous: bool,
    /// Which memory the program wants.
    pub(crate) choice: Frames,
    /// Whether one call drops the translations of many ranges.
    drops_together: AtomicBool,
    pub(crate) files: Box<[HostFile]>,
    /// Bytes of each frame's page that its file had when it was read. Less than a page only for the
    /// page in which the file ended then.
    lengths: Box<[AtomicU16]>,
    /// What is between a file and its memory file. A thread takes one that no other thread has.
    /// Those that write have buffers of their own, because they may wait for faults.
    buffers: Buffers,
    buffers_for_writing: Buffers,
    /// Where to ask for pages to be written, if threads of the cache do that.
    pub(crate) requests: Option<Arc<WriteRequests>>,
}

type Buffers = Box<[Mutex<Box<[u8]>>]>;

impl Host {
    pub(crate) fn new(
        cache: u64,
        uffd: Userfaultfd,
        choice: Frames,
        processors: usize,
        frames: u32,
        requests: Option<Arc<WriteRequests>>,
    ) -> Self {
        // A buffer that no thread has used takes no memory.
        let buffer = || Mutex::new(vec![0; BUFFER + PAGE_SIZE].into_boxed_slice());
        Self {
            cache,
            uffd: Descriptor::new(uffd.descriptor),
            generation: generation::current(),
            write_protect: uffd.protects_memory_files,
            protects_anonymous: uffd.protects_anonymous,
            choice,
            drops_together: AtomicBool::new(true),
            files: (0..MOST_FILES).map(|_| HostFile::new()).collect(),
            lengths: (0..frames).map(|_| AtomicU16::new(0)).collect(),
            buffers: (0..2 * processors).map(|_| buffer()).collect(),
            // A thread may keep one for as long as a file is locked.
            buffers_for_writing: (0..2 * processors + WRITERS).map(|_| buffer()).collect(),
            requests,
        }
    }

    fn file(&self, page: &Page) -> &HostFile {
        &self.files[page.key.file() as usize]
    }

    fn anonymous(&self) -> Anonymous<'_> {
        Anonymous { uffd: self.uffd.as_fd(), protects: self.protects_anonymous }
    }

    /// Whether stores to clean pages of a file fault.
    pub(crate) fn protects(&self, file: &HostFile) -> bool {
        match file.home() {
            Home::Anonymous(_) => self.protects_anonymous,
            Home::MemoryFile | Home::None => self.write_protect,
        }
    }

    /// The page has so many bytes that its file has, too.
    pub(crate) fn set_length_of(&self, page: &Page, bytes: usize) {
        self.lengths[page.frame as usize].store(bytes as u16, Ordering::Relaxed);
    }

    fn length_of(&self, page: &Page) -> usize {
        usize::from(self.lengths[page.frame as usize].load(Ordering::Relaxed))
    }

    /// Puts a mapping of a memory file, which has no bytes yet, where a file's frames were in
    /// anonymous memory. None is left there.
    pub(crate) fn replace(
        &self,
        from: &Mapped,
        memory: BorrowedFd<'_>,
        faults: u64,
    ) -> Result<(), Errno> {
        let part = (memory, from.first * PAGE_SIZE as u64);
        let (bytes, faults) = (from.pages as usize * PAGE_SIZE, (&self.uffd, faults));
        // SAFETY: the addresses are the place's, whose mapping lives, and there are no frames.
        unsafe { sys::OwnedMapping::put_at(from.start, bytes, part, from.writable, faults) }
    }

    /// Has accesses fail to a page that is not in the cache, until its translation is dropped.
    pub(crate) fn poison(&self, address: usize) -> Result<(), Errno> {
        if self.write_protect {
            // Where the kernel unmaps a protected page of a file it leaves a mark, which no poison
            // replaces, and which only this takes away.
            let _ = sys::write_protect(&self.uffd, address, PAGE_SIZE, false);
        }
        sys::poison(&self.uffd, address, PAGE_SIZE)
    }

    /// Copies bytes out of a frame that the thread has pinned.
    pub(crate) fn load(&self, page: &Page, inside: usize, bytes: &mut [u8]) -> Result<(), Errno> {
        let file = self.file(page);
        match file.home() {
            Home::Anonymous(place) => self.anonymous().load(page, place, inside, bytes),
            _ => read_fully(file.memory()?, bytes, offset(page) + inside as u64).map(drop),
        }
    }

    /// Copies bytes into a frame that the thread has pinned and locked, and whose page is dirty.
    pub(crate) fn store(&self, page: &Page, inside: usize, bytes: &[u8]) -> Result<(), Errno> {
        let file = self.file(page);
        match file.home() {
            Home::Anonymous(place) => self.anonymous().store(page, place, inside, bytes),
            _ => write_fully(file.memory()?, bytes, offset(page) + inside as u64),
        }
    }

    /// Makes a page in a buffer what its file should have. The file has `end` bytes of the page
    /// now, and may have had less when the page was read. Then another program, or this one by
    /// `write(2)`, has filled the rest since. The page gets what it has filled in, except where the
    /// page has stores of its own, which are not zero.
    fn finish(&self, page: &Page, bytes: &mut [u8], end: usize) -> Result<(), Errno> {
        let file = self.file(page);
        let length = self.length_of(page);
        let mut at = length;
        while at < end {
            let mut appended = [0; 512];
            let part = appended.len().min(end - at);
            let read = read_fully(file.reader()?, &mut appended[..part], offset(page) + at as u64)?;
            for (byte, appended) in bytes[at..at + read].iter_mut().zip(&appended) {
                if *byte == 0 {
                    *byte = *appended;
                }
            }
            at += part;
        }
        bytes[end..].fill(0);
        // Pages with pins for writing may change at any time.
        let changes = length < end || end < PAGE_SIZE;
        if page.dirty && changes {
            let from = length.min(end);
            write_fully(file.memory()?, &bytes[from..], offset(page) + from as u64)?;
            self.set_length_of(page, end);
        }
        Ok(())
    }

    /// Writes a run, to which no thread can store now, to its file, which has `end` bytes.
    fn write_anonymous(&self, run: &[Page], home: &MappedPlace, end: u64) -> Result<(), Errno> {
        let (start, bytes) = home.mapped().addresses(run).ok_or(Errno::FAULT)?;
        for (step, page) in run.iter().enumerate() {
            let inside = end.saturating_sub(offset(page)).min(PAGE_SIZE as u64) as usize;
            self.finish_in_place(page, start + step * PAGE_SIZE, inside)?;
        }
        // They are protected already, unless that failed: then no store may be missed.
        self.anonymous().set_protection(start, bytes, true)?;
        let bytes = end.saturating_sub(offset(&run[0])).min(bytes as u64) as usize;
        // SAFETY: the pages are resident, so they are mapped, and they are write-protected.
        let bytes = unsafe { sys::bytes_at(start, bytes) };
        self.file(&run[0]).write_pages(bytes, offset(&run[0]))
    }

    /// Makes a dirty page what its file should have, as `Host::finish` does in a buffer. The page
    /// is at an address, and the file has `end` bytes of it now.
    ///
    /// The program may store to the page meanwhile, as it may to any dirty page: what it stores
    /// stays, and is written, because the page is protected again before that.
    fn finish_in_place(&self, page: &Page, address: usize, end: usize) -> Result<(), Errno> {
        let length = self.length_of(page);
        if length >= end && end == PAGE_SIZE {
            return Ok(());
        }
        self.anonymous().set_protection(address, PAGE_SIZE, false)?;
        let mut at = length;
        while at < end {
            let mut appended = [0; 512];
            let part = appended.len().min(end - at);
            let reader = self.file(page).reader()?;
            let read = read_fully(reader, &mut appended[..part], offset(page) + at as u64)?;
            // SAFETY: a dirty page is in a writable mapping, and is mapped for writing now.
            unsafe { sys::fill_zeros(address + at, &appended[..read]) };
            at += part;
        }
        // SAFETY: as above.
        unsafe { sys::store_bytes(address + end, &ZEROS[end..]) };
        self.anonymous().set_protection(address, PAGE_SIZE, true)?;
        self.set_length_of(page, end);
        Ok(())
    }

    /// Calls a function with a buffer, whose address is a multiple of a page. Threads that have one
    /// do I/O and wait for nothing else.
    fn with_buffer<T>(&self, of: &Buffers, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let first = sched_getcpu();
        let mut attempt = 0;
        loop {
            for step in 0..of.len() {
                let buffer = &of[(first + step) % of.len()];
                // It is not poisoned, because nothing panics that has it.
                if let Ok(mut buffer) = buffer.try_lock() {
                    let start = buffer.as_ptr().align_offset(PAGE_SIZE);
                    return f(&mut buffer[start..start + BUFFER]);
                }
            }
            self.wait(attempt);
            attempt += 1;
        }
    }

    /// Calls a function for the addresses of runs of pages, wherever they are mapped.
    fn for_each_range(&self, pages: &[Page], mut f: impl FnMut(&MappedPlace, usize, usize)) {
        for run in runs(pages) {
            for used in of_file(self.cache, run[0].key.file()) {
                if let Some((start, bytes)) = used.place().mapped().addresses(run) {
                    f(used.place(), start, bytes);
                }
            }
        }
    }

    /// Unmaps pages wherever they are mapped, with one flush of all processors for many. What it
    /// leaves mapped, the release of its memory unmaps, with a flush for each run.
    fn drop_together(&self, pages: &[Page]) {
        if pages.len() == 1 || !self.drops_together.load(Ordering::Relaxed) {
            return;
        }
        let mut works = true;
        for of_one in by_file(pages) {
            for used in of_file(self.cache, of_one[0].key.file()) {
                let mut ranges = sys::Ranges::new();
                for run in runs(of_one) {
                    let Some((start, bytes)) = used.place().mapped().addresses(run) else {
                        continue;
                    };
                    if ranges.is_full() {
                        // SAFETY: the place is in use, so its ranges are a memory file's mapping.
                        works &= unsafe { ranges.drop_translations() };
                        ranges.clear();
                    }
                    ranges.push(start, bytes);
                }
                // SAFETY: as above.
                works &= unsafe { ranges.drop_translations() };
            }
        }
        if !works {
            self.drops_together.store(false, Ordering::Relaxed);
        }
    }

    /// Brings the bytes of a run into the memory file by mapping them at a place, for reading. That
    /// is one call, and takes no lock of the whole file as `pwrite` does. Returns the bytes for
    /// which it succeeded.
    fn copy_and_map(&self, run: &[Page], bytes: &[u8], place: &MappedPlace) -> usize {
        let mapped = place.mapped();
        let first = run[0].key.page();
        // What is mapped for writing would have to be dirty.
        let may_map = self.write_protect || !mapped.writable;
        let is_inside = first + run.len() as u64 <= mapped.first + mapped.pages;
        let Some(start) = mapped.address(first).filter(|_| may_map && is_inside) else { return 0 };
        let (mut done, mut step) = (0, bytes.len());
        while done < bytes.len() {
            let rest = &bytes[done..bytes.len().min(done + step)];
            let (copied, result) =
                sys::copy_and_map(&self.uffd, start + done, rest, self.write_protect);
            done += copied;
            match result {
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if copied > 0 => {}
                Err(Errno::AGAIN) => sched_yield(),
                // The run crosses the border of two VMAs, as in `Host::map`.
                Err(Errno::NOENT) if step > PAGE_SIZE => step = PAGE_SIZE,
                // `pwrite` will say what is wrong, if anything is.
                Err(_) => break,
            }
        }
        done
    }

    /// Takes write access to pages of one file away.
    fn protect_in_memory_file(&self, pages: &[Page]) {
        self.for_each_range(pages, |place, start, bytes| {
            if !self.write_protect {
                if place.mapped().writable {
                    drop_translations(start, bytes);
                }
                return;
            }
            while let Err(errno) = sys::write_protect(&self.uffd, start, bytes, true) {
                if !matches!(errno, Errno::AGAIN | Errno::INTR) {
                    // The next access faults, and its fault knows what the page is.
                    drop_translations(start, bytes);
                    return;
                }
            }
        });
    }

    /// Frees the memory of pages of one file.
    fn release_in_memory_file(&self, pages: &[Page]) {
        let Ok(memory) = self.file(&pages[0]).memory() else { return };
        self.drop_together(pages);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for run in runs(pages) {
            let bytes = (run.len() * PAGE_SIZE) as u64;
            // This unmaps the pages from all mappings, and flushes, before it frees them.
            while let Err(Errno::INTR | Errno::AGAIN) =
                fallocate(memory, flags, offset(&run[0]), bytes)
            {}
        }
    }
}

/// Pages in order, those of each file together.
fn by_file(pages: &[Page]) -> impl Iterator<Item = &[Page]> {
    pages.chunk_by(|one, next| one.key.file() == next.key.file())
}

/// Pages of a file with so many bytes, the last of which may be a part of one.
pub(crate) fn pages_of(length: u64) -> u64 {
    length.div_ceil(PAGE_SIZE as u64)
}

fn offset(page: &Page) -> u64 {
    page.key.page() * PAGE_SIZE as u64
}

/// Reads until the buffer is full or the file ends. Returns the bytes.
pub(crate) fn read_fully(file: BorrowedFd<'_>, bytes: &mut [u8], at: u64) -> Result<usize, Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pread(file, &mut bytes[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

pub(crate) fn write_fully(file: BorrowedFd<'_>, bytes: &[u8], at: u64) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match sys::write_at(file, &bytes[done..], at + done as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => done += written,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

impl Environment for Host {
    type Mapping = MappedPlace;
    type Error = PageError;

    fn processor(&self) -> usize {
        sched_getcpu()
    }

    fn read(&self, run: &[Page], place: Option<&MappedPlace>) -> Result<bool, PageError> {
        let file = self.file(&run[0]);
        let home = file.home();
        if let Home::None = home {
            // The mapping is going.
            return Err(Errno::BADF.into());
        }
        file.wait_for_poisoning();
        self.with_buffer(&self.buffers, |buffer| {
            let bytes = &mut buffer[..run.len() * PAGE_SIZE];
            let length = file.read_pages(bytes, offset(&run[0]))?;
            if length <= bytes.len() - PAGE_SIZE {
                return Err(PageError::BeyondEnd);
            }
            bytes[length..].fill(0);
            for (step, page) in run.iter().enumerate() {
                self.set_length_of(page, (length - step * PAGE_SIZE).min(PAGE_SIZE));
            }
            if let Home::Anonymous(home) = home {
                self.anonymous().copy_in(run, bytes, home)?;
                return Ok(place.is_some());
            }
            let done = place.map_or(0, |place| self.copy_and_map(run, bytes, place));
            write_fully(file.memory()?, &bytes[done..], offset(&run[0]) + done as u64)?;
            Ok(done == bytes.len())
        })
    }

    fn write(&self, run: &[Page]) -> Result<(), PageError> {
        let file = self.file(&run[0]);
        let writer = file.writer()?;
        // Writing back never makes a file longer: what a truncation cut off stays cut off.
        let _length = file.length.read().unwrap_or_else(PoisonError::into_inner);
        let end = fstat(writer)?.st_size.cast_unsigned();
        if let Home::Anonymous(place) = file.home() {
            return Ok(self.write_anonymous(run, place, end)?);
        }
        let memory = file.memory()?;
        for part in run.chunks(MOST_PAGES as usize) {
            let start = offset(&part[0]);
            let length = (part.len() * PAGE_SIZE).min(end.saturating_sub(start) as usize);
            self.with_buffer(&self.buffers_for_writing, |buffer| {
                let bytes = &mut buffer[..part.len() * PAGE_SIZE];
                read_fully(memory, bytes, start)?;
                for (page, bytes) in part.iter().zip(bytes.chunks_mut(PAGE_SIZE)) {
                    let before = (offset(page) - start) as usize;
                    self.finish(page, bytes, length.saturating_sub(before).min(PAGE_SIZE))?;
                }
                file.write_pages(&bytes[..length], start)
            })?;
        }
        Ok(())
    }

    fn map(&self, run: &[Page], place: &MappedPlace, writable: bool) -> Result<(), PageError> {
        if let Home::Anonymous(home) = self.file(&run[0]).home() {
            return Ok(self.anonymous().map(run, home, writable)?);
        }
        let mapped = place.mapped();
        if mapped.writable && !writable && !self.write_protect {
            // It would be mapped for writing without being dirty. It is in the cache, which is what
            // matters to read-ahead; the fault of the first access maps it.
            return Ok(());
        }
        let first = run[0].key.page();
        let Some(start) = mapped.address(first) else {
            return Ok(());
        };
        let pages = (run.len() as u64).min(mapped.first + mapped.pages - first);
        let end = start + pages as usize * PAGE_SIZE;
        let protected = self.write_protect && !writable;
        let (mut at, mut step) = (start, end - start);
        while at < end {
            let (done, result) = sys::map_present(&self.uffd, at, step.min(end - at), protected);
            at += done;
            match result {
                Ok(()) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if done > 0 => {}
                Err(Errno::AGAIN) => sched_yield(),
                Err(Errno::EXIST) => {
                    if writable && self.write_protect {
                        sys::write_protect(&self.uffd, at, PAGE_SIZE, false)?;
                    }
                    at += PAGE_SIZE;
                }
                // The run crosses the border of two VMAs: the program has given one of them advice,
                // or has locked it.
                Err(Errno::NOENT) if step > PAGE_SIZE => step = PAGE_SIZE,
                // The page of the access is there. Those after it are mapped by their own faults.
                Err(_) if at > start => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn protect(&self, pages: &[Page]) {
        for of_one in by_file(pages) {
            match self.file(&of_one[0]).home() {
                Home::Anonymous(place) => self.anonymous().protect(of_one, place),
                _ => self.protect_in_memory_file(of_one),
            }
        }
    }

    fn unmap(&self, pages: &[Page]) {
        // Clean pages are mapped for reading at most. They may stay until their memory is released.
        for dirty in pages.chunk_by(|one, next| one.dirty == next.dirty) {
            if !dirty[0].dirty {
                continue;
            }
            for of_one in by_file(dirty) {
                match self.file(&of_one[0]).home() {
                    // The frame is where the page is mapped: loads find it until it is released.
                    Home::Anonymous(place) => self.anonymous().protect(of_one, place),
                    _ => self.for_each_range(of_one, |_, start, bytes| {
                        drop_translations(start, bytes);
                    }),
                }
            }
        }
    }

    fn release(&self, pages: &[Page]) {
        let mut leaving = Leaving::new(&self.drops_together);
        for of_one in by_file(pages) {
            match self.file(&of_one[0]).home() {
                Home::Anonymous(place) => leaving.add(of_one, place),
                _ => self.release_in_memory_file(of_one),
            }
        }
        leaving.drop_all();
    }

    fn writes_apart(&self) -> bool {
        self.requests.is_some()
    }

    fn ask_to_write(&self, asked: &mut u64) -> Result<(), PageError> {
        self.requests.as_ref().map_or(Ok(()), |requests| requests.ask(asked))
    }

    fn wait(&self, attempt: u32) {
        match attempt {
            0..16 => std::hint::spin_loop(),
            16..64 => sched_yield(),
            _ => {
                let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: 50_000 });
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A forked child may have closed them, and have files of its own by these numbers.
        if generation::current() == self.generation {
            self.files.iter().for_each(HostFile::close);
        }
    }
}
