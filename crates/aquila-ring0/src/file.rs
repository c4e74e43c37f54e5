//! A file that is mapped in a managed range, and how ring 0 reads and writes it.
#![allow(unsafe_code)]

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_aquila_core::{Advice, MOST_PAGES, Page, Pattern};

use crate::descriptors::Kept;
use crate::entry::PAGE;
use crate::error::Result as MachineResult;
use crate::memory::{Mapped, pointer};
use crate::ring::{Operation, Ring};
use crate::sys::{quiet_system_call, raw_system_call};

/// How a cache reads and writes a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// By system calls: one exit for each run of pages.
    #[default]
    Calls,
    /// By an io_uring that a thread of the kernel polls (`IORING_SETUP_SQPOLL`), which all files of
    /// the cache share. There is no exit while that thread is awake: it sleeps when there was
    /// nothing to do for 50 ms, and the next read or write wakes it by a system call. The thread
    /// that faults waits actively, so each takes a processor.
    Ring,
    /// By copying from and to a mapping of the file by the kernel: for files on persistent memory
    /// (a file system that is mounted with `dax`), whose storage that mapping is. There is no exit.
    /// For other files it works, and the kernel's page cache has the pages, too. Stores of the
    /// program are durable after a sync, as with the others. What cannot be read or written is
    /// SIGBUS: a part that the file has lost, and a hole for which the disk has no room.
    Copies,
}

/// What is needed for that.
#[derive(Debug)]
enum Transfer {
    Calls,
    Ring(Arc<Ring>),
    Copies(Mapped),
}

/// A file that is mapped in a managed range.
#[derive(Debug)]
pub(crate) struct MappedFile {
    _kept: Kept,
    descriptor: OwnedFd,
    transfer: Transfer,
    /// The device and the inode.
    pub(crate) identity: (u64, u64),
    /// The first address of the range.
    pub(crate) start: u64,
    /// Bytes of the file when it was mapped.
    pub(crate) length: u64,
    pub(crate) writable: bool,
    advice: AtomicU64,
    pub(crate) pattern: Pattern,
    /// Whether the program still has the mapping.
    pub(crate) is_open: AtomicBool,
    /// Whether it has not, and no page is left in the cache.
    pub(crate) has_ended: AtomicBool,
    /// Whether the system has failed to make what was written durable.
    pub(crate) sync_failed: AtomicBool,
}

/// What tells one file from another, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About {
    pub(crate) identity: (u64, u64),
    pub(crate) length: u64,
    pub(crate) writable: bool,
}

impl MappedFile {
    /// A file, which is at no address yet.
    ///
    /// # Errors
    /// When the file cannot be mapped.
    pub(crate) fn new(
        (descriptor, kept): (OwnedFd, Kept),
        about: About,
        io: Io,
        ring: impl FnOnce() -> MachineResult<Arc<Ring>>,
    ) -> MachineResult<Self> {
        let About { identity, length, writable } = about;
        let transfer = match io {
            Io::Calls => Transfer::Calls,
            Io::Ring => Transfer::Ring(ring()?),
            Io::Copies => Transfer::Copies(Mapped::of_file(descriptor.as_fd(), length, writable)?),
        };
        Ok(Self {
            _kept: kept,
            descriptor,
            transfer,
            identity,
            start: 0,
            length,
            writable,
            advice: AtomicU64::new(NORMAL),
            pattern: Pattern::default(),
            is_open: AtomicBool::new(true),
            has_ended: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
        })
    }

    /// The same file, at an address.
    pub(crate) fn at(self, start: u64) -> Self {
        Self { start, ..self }
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

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

    /// Reads a run into its frames. Returns the bytes: fewer than the run has if the file ends.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn read(&self, run: &[Page], frames: &Mapped) -> Result<usize, Errno> {
        let bytes = self.bytes(run);
        match &self.transfer {
            Transfer::Copies(view) => {
                self.for_each_part(run, frames, (0, bytes), |frame, at, length| {
                    // SAFETY: the frame is this thread's, and no reference leads to it. The view
                    // has the bytes, unless the file has become shorter.
                    unsafe {
                        std::ptr::copy_nonoverlapping(pointer(view.start() + at), frame, length);
                    }
                });
                Ok(bytes)
            }
            _ => self.all(Operation::Read, run, frames, bytes),
        }
    }

    /// Writes a run from its frames.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn write(&self, run: &[Page], frames: &Mapped) -> Result<(), Errno> {
        let bytes = self.bytes(run);
        match &self.transfer {
            Transfer::Copies(view) => {
                self.for_each_part(run, frames, (0, bytes), |frame, at, length| {
                    // SAFETY: as above.
                    unsafe { stream(frame, pointer(view.start() + at), length) };
                });
                Ok(())
            }
            _ if self.all(Operation::Write, run, frames, bytes)? < bytes => Err(Errno::IO),
            _ => Ok(()),
        }
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// What the system said; `BADF` if the program has closed the descriptor, and the number is
    /// another file's.
    pub(crate) fn make_durable(&self) -> Result<(), Errno> {
        let status = rustix::fs::fstat(&self.descriptor)?;
        if (status.st_dev, status.st_ino) != self.identity {
            return Err(Errno::BADF);
        }
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

    /// Calls a function for each part of a run's bytes, from the first place to the second, that
    /// lies in one frame: with the frame's address, the place in the file, and the length.
    fn for_each_part(
        &self,
        run: &[Page],
        frames: &Mapped,
        (mut at, end): (usize, usize),
        mut act: impl FnMut(*mut u8, u64, usize),
    ) {
        while at < end {
            let inside = at % PAGE;
            let length = (PAGE - inside).min(end - at);
            let start = frames.start() + u64::from(run[at / PAGE].frame) * PAGE as u64;
            act(pointer(start + inside as u64), offset(&run[0]) + at as u64, length);
            at += length;
        }
    }

    /// Has the system read or write the bytes of a run between two places. Returns how many it has.
    fn call(
        &self,
        operation: Operation,
        run: &[Page],
        frames: &Mapped,
        (done, end): (usize, usize),
    ) -> i64 {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut vectors = [empty; MOST_PAGES as usize];
        let mut count = 0;
        let most = done - done % PAGE + vectors.len() * PAGE;
        self.for_each_part(run, frames, (done, end.min(most)), |frame, _, length| {
            vectors[count] = libc::iovec { iov_base: frame.cast(), iov_len: length };
            count += 1;
        });
        let (file, place) = (self.descriptor.as_raw_fd(), offset(&run[0]) + done as u64);
        if let Transfer::Ring(ring) = &self.transfer {
            // SAFETY: the vectors are those of frames that this thread has, and that no reference
            // leads to. They are there until the call returns.
            return unsafe { ring.call(operation, file, &vectors[..count], place) };
        }
        let vectors = vectors.as_ptr().expose_provenance() as u64;
        let arguments = [file as u64, vectors, count as u64, place, 0, 0];
        // SAFETY: as above. The calls change nothing else.
        unsafe {
            match operation {
                Operation::Read => raw_system_call(libc::SYS_preadv as u64, arguments),
                Operation::Write => quiet_system_call(libc::SYS_pwritev as u64, arguments),
            }
        }
    }

    /// Repeats a call until all bytes are done, or it does none. Returns how many are done.
    fn all(
        &self,
        operation: Operation,
        run: &[Page],
        frames: &Mapped,
        bytes: usize,
    ) -> Result<usize, Errno> {
        let mut done = 0;
        while done < bytes {
            match self.call(operation, run, frames, (done, bytes)) {
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
pub(crate) fn offset(page: &Page) -> u64 {
    page.key.page() * PAGE as u64
}

/// Copies bytes past the processor's caches, which the storage does not read.
///
/// # Safety
/// Both have the bytes, and no reference leads to them. The program may store to the first
/// meanwhile: then dirty bits tell of that, and the page is written again.
unsafe fn stream(from: *const u8, to: *mut u8, length: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
    const WORD: usize = size_of::<i64>();
    let words = length / WORD;
    // SAFETY: the caller's. Frames and views begin with a page, and so do parts of them, but for
    // the end.
    unsafe {
        for word in 0..words {
            _mm_stream_si64(
                to.cast::<i64>().add(word),
                from.cast::<i64>().add(word).read_volatile(),
            );
        }
        let done = words * WORD;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), length - done);
        _mm_sfence();
    }
}
