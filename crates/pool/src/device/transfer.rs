//! Reads and writes on their way: how far they got, and what to do about what the kernel answered.
//!
//! The kernel may move fewer bytes than asked, or none for reasons that pass. Both engines use the
//! rules here, and so does the plain blocking path that stands in for them.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::io::Errno;
use vellum_vm::PAGE_SIZE;

use super::{ReadDone, Write};

/// Most bytes asked of the kernel at once; it would not move 2 GiB in one go anyway.
const LARGEST_STEP: usize = 1 << 30;

/// How often a passing failure is tried again. They are rare; this only ends endless loops.
const PATIENCE: u32 = 1000;

/// How often an answer may bring nothing new before that is an error.
const FRUITLESS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// What to do after the kernel's answer.
#[derive(Debug)]
pub(super) enum Step {
    /// All bytes were moved.
    Done,
    /// Ask for the rest.
    Again,
    /// Give up.
    Failed(io::Error),
}

/// How far one read or write got.
#[derive(Debug)]
pub(super) struct Transfer {
    direction: Direction,
    len: usize,
    done: usize,
    retries: u32,
    fruitless: u32,
}

impl Transfer {
    /// Nothing of `len` bytes was moved so far.
    pub(super) fn new(direction: Direction, len: usize) -> Self {
        Self { direction, len, done: 0, retries: 0, fruitless: 0 }
    }

    /// Bytes that were moved: a multiple of the page size, so that direct I/O can go on there.
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// Bytes to ask for next.
    pub(super) fn next_len(&self) -> usize {
        (self.len - self.done).min(LARGEST_STEP)
    }

    /// Takes the kernel's answer: bytes moved, or a negative error number.
    pub(super) fn advance(&mut self, answer: i32) -> Step {
        if self.len == 0 {
            return Step::Done;
        }
        let Ok(moved) = usize::try_from(answer) else {
            return self.failed(Errno::from_raw_os_error(answer.wrapping_neg()));
        };
        let reached = self.done + moved.min(self.next_len());
        if reached == self.len {
            self.done = reached;
            return Step::Done;
        }
        let reached = reached / PAGE_SIZE * PAGE_SIZE;
        if moved > 0 && reached > self.done {
            self.done = reached;
            return Step::Again;
        }
        // Nothing at all, or a part of a page: the end of the file, unless asking again helps.
        self.fruitless += 1;
        if moved > 0 && self.fruitless < FRUITLESS {
            return Step::Again;
        }
        Step::Failed(match self.direction {
            Direction::Read => io::ErrorKind::UnexpectedEof.into(),
            Direction::Write => io::ErrorKind::WriteZero.into(),
        })
    }

    /// Some failures pass: interruptions, shortages, and what io_uring answers for operations
    /// whose submitting thread ended before they were done (`ECANCELED`, `EFAULT`).
    fn failed(&mut self, errno: Errno) -> Step {
        let passing = [Errno::INTR, Errno::AGAIN, Errno::CANCELED, Errno::FAULT, Errno::NOMEM];
        if passing.contains(&errno) && self.retries < PATIENCE {
            self.retries += 1;
            if errno != Errno::INTR && self.retries > 8 {
                std::thread::yield_now();
            }
            return Step::Again;
        }
        Step::Failed(errno.into())
    }
}

/// A read into memory that its owner keeps in place until `done` is called.
#[derive(Debug)]
pub(super) struct ReadRequest {
    pub(super) transfer: Transfer,
    address: *mut u8,
    offset: u64,
    pub(super) done: ReadDone,
}

// SAFETY: the memory behind the address is given to the request exclusively until `done` is called
// (see `ReadRequest::new`), so it may move to other threads with the request.
unsafe impl Send for ReadRequest {}

impl ReadRequest {
    /// A read of `len` bytes from byte `offset` of the file.
    ///
    /// # Safety
    /// `len` bytes at `address` stay mapped, and nobody else writes them or relies on their
    /// contents, until `done` is called.
    pub(super) unsafe fn new(address: *mut u8, len: usize, offset: u64, done: ReadDone) -> Self {
        Self { transfer: Transfer::new(Direction::Read, len), address, offset, done }
    }

    /// Where the next bytes go.
    pub(super) fn next_address(&self) -> *mut u8 {
        self.address.wrapping_add(self.transfer.done())
    }

    /// Where in the file the next bytes are.
    pub(super) fn next_offset(&self) -> u64 {
        self.offset + self.transfer.done() as u64
    }

    /// Reads all of it, blocking, and says so to its owner.
    pub(super) fn run(mut self, file: &File) {
        let result = loop {
            // SAFETY: the bytes from `next_address` on are the request's own (see `new`), and
            // `next_len` stays within them.
            let moved = unsafe {
                libc::pread(
                    file.as_raw_fd(),
                    self.next_address().cast(),
                    self.transfer.next_len(),
                    self.next_offset().cast_signed(),
                )
            };
            match self.transfer.advance(answer(moved)) {
                Step::Done => break Ok(()),
                Step::Again => {}
                Step::Failed(error) => break Err(error),
            }
        };
        self.done.call(result);
    }
}

/// The two vectors for the bytes of `parts` from `done` on, and how many of them are in use.
pub(super) fn vectors(parts: [&[u8]; 2], done: usize) -> ([libc::iovec; 2], usize) {
    let first = parts[0].get(done..).unwrap_or_default();
    let second = &parts[1][done.saturating_sub(parts[0].len())..];
    let vector = |bytes: &[u8]| libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    if first.is_empty() {
        ([vector(second), vector(&[])], 1)
    } else if second.is_empty() {
        ([vector(first), vector(&[])], 1)
    } else {
        ([vector(first), vector(second)], 2)
    }
}

/// Writes one entry, blocking.
pub(super) fn write_blocking(file: &File, write: &Write<'_>) -> io::Result<()> {
    let mut transfer = Transfer::new(Direction::Write, write.len());
    let offset = file_offset(write.page)?;
    loop {
        let (vectors, count) = vectors(write.parts, transfer.done());
        // SAFETY: the vectors point into the borrowed parts, and writing only reads them.
        let moved = unsafe {
            libc::pwritev(
                file.as_raw_fd(),
                vectors.as_ptr(),
                count as i32,
                (offset + transfer.done() as u64).cast_signed(),
            )
        };
        match transfer.advance(answer(moved)) {
            Step::Done => return Ok(()),
            Step::Again => {}
            Step::Failed(error) => return Err(error),
        }
    }
}

/// The byte offset of a page, if a file can be that long.
pub(super) fn file_offset(page: u64) -> io::Result<u64> {
    page.checked_mul(PAGE_SIZE as u64)
        .filter(|offset| i64::try_from(*offset).is_ok())
        .ok_or_else(|| Errno::FBIG.into())
}

/// A system call's return value as io_uring would put it.
fn answer(moved: isize) -> i32 {
    if moved < 0 {
        -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        // The kernel moves less than 2 GiB at a time.
        moved.try_into().unwrap_or(i32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(step: Step) -> bool {
        matches!(step, Step::Done)
    }

    fn again(step: Step) -> bool {
        matches!(step, Step::Again)
    }

    #[test]
    fn short_answers_go_on_at_a_page() {
        let mut transfer = Transfer::new(Direction::Write, 4 * PAGE_SIZE);
        assert!(again(transfer.advance(PAGE_SIZE as i32 + 512)));
        assert_eq!((transfer.done(), transfer.next_len()), (PAGE_SIZE, 3 * PAGE_SIZE));
        assert!(done(transfer.advance(3 * PAGE_SIZE as i32)));
        assert!(done(Transfer::new(Direction::Read, 0).advance(0)));
    }

    #[test]
    fn an_end_in_the_middle_of_a_page_is_an_end() {
        let mut transfer = Transfer::new(Direction::Read, 2 * PAGE_SIZE);
        assert!(again(transfer.advance(PAGE_SIZE as i32 + 100)));
        assert!(again(transfer.advance(100)));
        assert!(again(transfer.advance(100)));
        let Step::Failed(error) = transfer.advance(100) else { panic!("not failed") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn passing_failures_are_tried_again_but_not_for_ever() {
        let mut transfer = Transfer::new(Direction::Read, PAGE_SIZE);
        for _ in 0..PATIENCE {
            assert!(again(transfer.advance(-libc::EAGAIN)));
        }
        assert!(matches!(transfer.advance(-libc::EAGAIN), Step::Failed(_)));
        let mut transfer = Transfer::new(Direction::Write, PAGE_SIZE);
        let Step::Failed(error) = transfer.advance(-libc::EIO) else { panic!("not failed") };
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let Step::Failed(error) = transfer.advance(0) else { panic!("not failed") };
        assert_eq!(error.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn vectors_start_where_the_transfer_is() {
        let bytes = [7_u8; 3 * PAGE_SIZE];
        let (head, body) = bytes.split_at(PAGE_SIZE);
        for (done, lens) in [
            (0, vec![PAGE_SIZE, 2 * PAGE_SIZE]),
            (PAGE_SIZE, vec![2 * PAGE_SIZE]),
            (2 * PAGE_SIZE, vec![PAGE_SIZE]),
        ] {
            let (vectors, count) = vectors([head, body], done);
            let got: Vec<_> = vectors[..count].iter().map(|vector| vector.iov_len).collect();
            assert_eq!(got, lens);
            assert_eq!(vectors[0].iov_base.cast_const(), bytes[done..].as_ptr().cast());
        }
        assert_eq!(vectors([head, &[]], 0).1, 1);
    }
}
