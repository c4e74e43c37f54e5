//! The backend for kernels that take vectors: `process_madvise` on the calling process.
//!
//! A vector of scattered pages costs one call and, from Linux 6.16 on, one flush of the other
//! processors' TLBs, where `madvise` costs one of each per range. The kernel works through a
//! vector in order, stops at the first element that fails and returns the bytes it finished, or
//! the errno where that was the first element. So an errno always belongs to the first element:
//! after a partial result the next call starts with the element that stopped the last one, gets its
//! errno, and the backend continues after it.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use libc::MADV_POPULATE_WRITE;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::madvise::{AGAIN_LIMIT, Madvise, address};
use super::{Backend, BackendKind};
use crate::range::{Entry, PageRange};
use crate::{PAGE_SIZE, sys};

/// Elements that the kernel takes per call (UIO_MAXIOV).
const VECTOR_LIMIT: usize = 1024;
/// Pages per call. The kernel silently cuts a vector off at 2 GiB; staying below keeps the byte
/// count meaningful, and bounds how long one call holds the address space.
const CALL_PAGES: u64 = (1 << 30) / PAGE_SIZE as u64;

/// Names the calling process to `process_madvise`.
#[derive(Debug)]
pub(crate) struct OwnProcess {
    raw: RawFd,
    /// None if the kernel knows the constant for "this process" (Linux 6.14).
    _pidfd: Option<OwnedFd>,
}

impl OwnProcess {
    /// A name for this process that the kernel takes.
    ///
    /// The constant is preferred: it costs no descriptor, and after a fork it means the child,
    /// where a pidfd would still mean the parent.
    ///
    /// # Errors
    /// The errno of `process_madvise` or `pidfd_open`, e.g. `ENOSYS`, or `EPERM` in a sandbox.
    pub(crate) fn open() -> Result<Self, Errno> {
        // SAFETY: an empty vector gives advice on nothing.
        let constant =
            unsafe { sys::process_madvise(sys::PIDFD_SELF_PROCESS, &[], libc::MADV_COLD) };
        match constant {
            Ok(_) => Ok(Self { raw: sys::PIDFD_SELF_PROCESS, _pidfd: None }),
            Err(Errno::NOSYS) => Err(Errno::NOSYS),
            Err(_) => Self::by_pidfd(),
        }
    }

    /// Names the process by a descriptor, as kernels before 6.14 need it.
    fn by_pidfd() -> Result<Self, Errno> {
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty())?;
        Ok(Self { raw: pidfd.as_raw_fd(), _pidfd: Some(pidfd) })
    }

    /// Gives advice on all entries whose result is `Ok`, with as few calls as the kernel allows.
    ///
    /// # Safety
    /// Those entries lie within a live mapping at `base`, and no code relies on contents that the
    /// advice drops.
    pub(crate) unsafe fn advise(&self, base: NonNull<u8>, entries: &mut [Entry], advice: i32) {
        let mut at = Position::default();
        let mut vector = Vec::with_capacity(entries.len().min(VECTOR_LIMIT));
        let mut again = 0;
        loop {
            fill(&mut vector, base, entries, at);
            if vector.is_empty() {
                return;
            }
            // SAFETY: the elements are parts of entries (caller's promise), and a call may repeat
            // one: both kinds of advice may be given twice.
            match unsafe { sys::process_madvise(self.raw, &vector, advice) } {
                Ok(bytes) if bytes >= PAGE_SIZE => {
                    again = 0;
                    at = at.advanced(entries, (bytes / PAGE_SIZE) as u64);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if again < AGAIN_LIMIT => {
                    again += 1;
                    std::thread::yield_now();
                }
                // The kernel never finishes less than a page of a vector that is not empty; were
                // it to, repeating the call would never end.
                stopped => at = at.failed(entries, stopped.err().unwrap_or(Errno::IO)),
            }
        }
    }
}

/// How far a batch has come: everything before this is done or has failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Position {
    /// Index of the entry.
    entry: usize,
    /// Pages of that entry that are done.
    done: u64,
}

impl Position {
    /// The position after `pages` more pages of the remaining entries.
    fn advanced(mut self, entries: &[Entry], mut pages: u64) -> Self {
        while pages > 0 && self.entry < entries.len() {
            let left = remaining(&entries[self.entry], self.done);
            if pages < left {
                self.done += pages;
                return self;
            }
            pages -= left;
            self = Self { entry: self.entry + 1, done: 0 };
        }
        self
    }

    /// The position after the first entry that has pages left; that entry gets `errno`.
    fn failed(mut self, entries: &mut [Entry], errno: Errno) -> Self {
        while let Some(entry) = entries.get_mut(self.entry) {
            let left = remaining(entry, self.done);
            self = Self { entry: self.entry + 1, done: 0 };
            if left > 0 {
                entry.result = Err(errno);
                break;
            }
        }
        self
    }
}

/// Pages of an entry that are left: none if the check refused it or it has failed.
fn remaining(entry: &Entry, done: u64) -> u64 {
    if entry.result.is_ok() { entry.range.count - done } else { 0 }
}

/// Fills the vector with the next elements, up to the limits of one call.
fn fill(vector: &mut Vec<libc::iovec>, base: NonNull<u8>, entries: &[Entry], at: Position) {
    vector.clear();
    let mut budget = CALL_PAGES;
    let mut done = at.done;
    for entry in &entries[at.entry..] {
        let left = remaining(entry, done);
        if left > 0 {
            let part = PageRange::new(entry.range.start + done, left.min(budget));
            vector.push(libc::iovec {
                iov_base: address(base, part.start).cast(),
                iov_len: part.bytes(),
            });
            budget -= part.count;
            if budget == 0 || vector.len() == VECTOR_LIMIT {
                return;
            }
        }
        done = 0;
    }
}

/// Vectored release, and vectored populate if the kernel takes that too.
#[derive(Debug)]
pub(crate) struct ProcessMadvise {
    process: OwnProcess,
    /// Whether the kernel populates vectors; otherwise `single` populates one by one.
    populates: bool,
    /// For batches of one, and for populating if the kernel takes no vectors for it.
    single: Madvise,
}

impl ProcessMadvise {
    /// The backend; `populates` says whether vectored `MADV_POPULATE_WRITE` works, and `single` is
    /// for batches of one.
    ///
    /// # Errors
    /// As [`OwnProcess::open`].
    pub(crate) fn new(populates: bool, single: Madvise) -> Result<Self, Errno> {
        Ok(Self { process: OwnProcess::open()?, populates, single })
    }
}

impl Backend for ProcessMadvise {
    fn kind(&self) -> BackendKind {
        BackendKind::ProcessMadvise
    }

    unsafe fn populate(&self, base: NonNull<u8>, entries: &mut [Entry]) {
        // One range is a little cheaper through `madvise`, which need not look the process up.
        if self.populates && entries.len() > 1 {
            // SAFETY: the caller's promise; populating drops no contents.
            unsafe { self.process.advise(base, entries, MADV_POPULATE_WRITE) };
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.single.populate(base, entries) };
        }
    }

    unsafe fn release(&self, base: NonNull<u8>, entries: &mut [Entry]) {
        if entries.len() > 1 {
            // SAFETY: the caller's promise.
            unsafe { self.process.advise(base, entries, libc::MADV_DONTNEED) };
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.single.release(base, entries) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Surface, probe};

    fn entries<const N: usize>(ranges: [(u64, u64); N]) -> [Entry; N] {
        ranges.map(|(start, count)| Entry::new(PageRange::new(start, count)))
    }

    #[test]
    fn a_position_steps_over_what_is_done_or_bad() {
        let mut batch = entries([(0, 3), (9, 1), (20, 0), (30, 2)]);
        batch[1].result = Err(Errno::INVAL);
        let start = Position::default();
        assert_eq!(start.advanced(&batch, 0), start);
        assert_eq!(start.advanced(&batch, 2), Position { entry: 0, done: 2 });
        assert_eq!(start.advanced(&batch, 3), Position { entry: 1, done: 0 });
        assert_eq!(start.advanced(&batch, 4), Position { entry: 3, done: 1 });
        assert_eq!(start.advanced(&batch, 5), Position { entry: 4, done: 0 });
        let failed = Position { entry: 1, done: 0 }.failed(&mut batch, Errno::NOMEM);
        assert_eq!(failed, Position { entry: 4, done: 0 });
        assert_eq!(batch[3].result, Err(Errno::NOMEM));
        assert_eq!(batch[1].result, Err(Errno::INVAL));
        assert_eq!((batch[0].result, batch[2].result), (Ok(()), Ok(())));
    }

    #[test]
    fn a_vector_is_cut_at_the_limits_of_a_call_and_continued() {
        let base = NonNull::dangling();
        let batch = entries([(0, 3), (100, CALL_PAGES), (7, 1)]);
        let mut vector = Vec::new();
        fill(&mut vector, base, &batch, Position { entry: 0, done: 1 });
        let lengths = |vector: &[libc::iovec]| -> Vec<usize> {
            vector.iter().map(|part| part.iov_len / PAGE_SIZE).collect()
        };
        assert_eq!(lengths(&vector), [2, CALL_PAGES as usize - 2]);
        fill(&mut vector, base, &batch, Position { entry: 1, done: CALL_PAGES - 2 });
        assert_eq!(lengths(&vector), [2, 1]);
        let first = vector[0].iov_base.addr() - base.addr().get();
        assert_eq!(first / PAGE_SIZE, 100 + CALL_PAGES as usize - 2);
        let many: Vec<Entry> = (0..2_000).map(Entry::page).collect();
        fill(&mut vector, base, &many, Position::default());
        assert_eq!(vector.len(), VECTOR_LIMIT);
        fill(&mut vector, base, &many, Position { entry: 2_000, done: 0 });
        assert!(vector.is_empty());
    }

    /// Populates and releases scattered pages on a backend for kernels between 6.13 and this one.
    fn scattered_pages_come_and_go(process: OwnProcess, populates: bool) {
        let backend = ProcessMadvise { process, populates, single: Madvise::new(true) };
        let surface = Surface::with_backend(64, Box::new(backend)).unwrap();
        let mut batch = entries([(1, 1), (5, 3), (70, 1), (9, 1)]);
        let all = PageRange::new(0, 64);
        assert_eq!(surface.populate(&mut batch), 1);
        assert_eq!(surface.resident_pages(all), Ok(5));
        // SAFETY: no other thread uses the pages.
        assert_eq!(unsafe { surface.release(&mut batch) }, 1);
        assert_eq!(surface.resident_pages(all), Ok(0));
    }

    #[test]
    fn works_by_pidfd_and_without_vectored_populate() {
        if let Err(reason) = probe::works(BackendKind::ProcessMadvise) {
            eprintln!("skipped: process_madvise does not work here: {reason}");
            return;
        }
        scattered_pages_come_and_go(OwnProcess::by_pidfd().unwrap(), true);
        scattered_pages_come_and_go(OwnProcess::open().unwrap(), false);
    }

    #[test]
    fn an_errno_of_the_whole_call_is_given_to_every_entry() {
        let process = OwnProcess { raw: -1, _pidfd: None };
        let backend = ProcessMadvise { process, populates: true, single: Madvise::new(true) };
        let surface = Surface::with_backend(64, Box::new(backend)).unwrap();
        let mut batch = entries([(1, 1), (5, 3), (9, 1)]);
        assert_eq!(surface.populate(&mut batch), 3);
        assert!(batch.iter().all(|entry| entry.result.is_err()), "{batch:?}");
    }
}
