//! Reads and writes in progress: how many bytes were moved, and how to go on after each answer of
//! the kernel.
//!
//! The kernel may move fewer bytes than asked, or none because of a failure that passes. Both
//! engines follow these rules, and so does the blocking path that replaces them.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::IoUring;
use rustix::io::Errno;
use vellum_vm::PAGE_SIZE;

use super::workers::run_foreign;
use super::{ReadDone, Write};

/// The engine that moves bytes between memory and the file.
pub(super) trait IoEngine: Send + Sync + fmt::Debug {
    fn name(&self) -> &'static str;
    /// Starts reads, and calls each request's `done` once. Dropping the engine waits for all.
    fn start_reads(&self, reads: Vec<ReadRequest>);
    /// Writes, and gives every entry its result.
    fn write(&self, writes: &mut [Write<'_>]);
}

/// Most bytes asked of the kernel at once; it would not move 2 GiB in one go anyway.
const LARGEST_STEP: usize = 1 << 30;

/// How often to retry after a failure that passes. Those are rare; the limit ends endless loops.
const PATIENCE: u32 = 1000;

/// How often to retry a submission, a millisecond apart, when the kernel is short of memory.
const SUBMIT_PATIENCE: u32 = 1000;

/// How often an answer may bring nothing new before that is an error.
const FRUITLESS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

/// Whether a later retry of a submission can succeed after this error.
fn passes(error: &io::Error) -> bool {
    let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM];
    error.raw_os_error().is_some_and(|number| passing.contains(&number))
}

/// Submits what is queued, and waits for `wanted` completions. After a failure that passes, this
/// returns early, with fewer completions; `failures` counts those in a row.
///
/// # Errors
/// If the ring does not work. It may hold operations that the kernel has not taken.
pub(super) fn submit_and_wait(ring: &IoUring, wanted: usize, failures: &mut u32) -> io::Result<()> {
    match ring.submit_and_wait(wanted) {
        Ok(_) => *failures = 0,
        Err(error) if passes(&error) && *failures < SUBMIT_PATIENCE => {
            if error.raw_os_error() != Some(libc::EINTR) {
                *failures += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The next step after the kernel's answer.
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
    /// A transfer of `len` bytes, of which none was moved so far.
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
        // Nothing, or a part of a page: this is the end of the file, unless a retry brings more.
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

/// Most bytes of one transfer that neighbouring reads, or writes, are merged into.
pub(super) const MERGED_MAX: usize = 256 << 10;

/// The owners of finished reads, and the result for each.
pub(super) type Finished = Vec<(ReadDone, io::Result<()>)>;

/// Calls the `done`s of reads. The caller holds no lock.
pub(super) fn call(finished: Finished) {
    for (done, result) in finished {
        run_foreign(|| done.call(result));
    }
}

/// A read into memory that its owners keep in place until their `done`s are called.
#[derive(Debug)]
pub(super) struct ReadRequest {
    pub(super) transfer: Transfer,
    offset: u64,
    /// The first bytes.
    own: Part,
    /// The reads that were merged into this one. Each follows the one before it in the file, and
    /// lies anywhere in memory.
    merged: Vec<Part>,
    /// The memory for the next bytes, for the kernel.
    vectors: Vec<libc::iovec>,
}

/// The memory of one owner.
#[derive(Debug)]
struct Part {
    address: *mut u8,
    len: usize,
    done: ReadDone,
}

// SAFETY: the memory at the addresses belongs to the request exclusively until the `done`s are
// called (see `ReadRequest::new`), so it may move to other threads with the request. The vectors
// name the same memory.
unsafe impl Send for ReadRequest {}

impl ReadRequest {
    /// A read of `len` bytes from byte `offset` of the file.
    ///
    /// # Safety
    /// `len` bytes at `address` stay mapped, and no other code writes them or relies on their
    /// contents, until `done` is called.
    pub(super) unsafe fn new(address: *mut u8, len: usize, offset: u64, done: ReadDone) -> Self {
        let transfer = Transfer::new(Direction::Read, len);
        let own = Part { address, len, done };
        Self { transfer, offset, own, merged: Vec::new(), vectors: Vec::new() }
    }

    /// The offset in the file at which it begins.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The memory for the next bytes: neighbours in one vector, and no more than the kernel moves
    /// at once.
    pub(super) fn next_vectors(&mut self) -> &[libc::iovec] {
        let (mut skipped, mut left) = (self.transfer.done(), self.transfer.next_len());
        self.vectors.clear();
        for Part { address, len, .. } in std::iter::once(&self.own).chain(&self.merged) {
            let skip = skipped.min(*len);
            skipped -= skip;
            let (address, len) = (address.wrapping_add(skip), (len - skip).min(left));
            left -= len;
            match self.vectors.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.iov_base.wrapping_add(last.iov_len) == address.cast() => {
                    last.iov_len += len;
                }
                _ => self.vectors.push(libc::iovec { iov_base: address.cast(), iov_len: len }),
            }
        }
        &self.vectors
    }

    /// The offset in the file of the next bytes.
    pub(super) fn next_offset(&self) -> u64 {
        self.offset + self.transfer.done() as u64
    }

    /// Merges requests that are neighbours in the file.
    pub(super) fn merge(mut requests: Vec<ReadRequest>) -> Vec<ReadRequest> {
        if requests.len() < 2 {
            return requests;
        }
        requests.sort_unstable_by_key(ReadRequest::offset);
        let mut merged: Vec<ReadRequest> = Vec::with_capacity(requests.len());
        for request in requests {
            match merged.last_mut() {
                Some(last) if last.is_followed_by(&request) => last.append(request),
                _ => merged.push(request),
            }
        }
        merged
    }

    fn is_followed_by(&self, next: &ReadRequest) -> bool {
        let len = self.transfer.len;
        len + next.transfer.len <= MERGED_MAX && self.offset + len as u64 == next.offset
    }

    /// Appends a request that follows this one. Neither has begun.
    fn append(&mut self, next: ReadRequest) {
        self.merged.push(next.own);
        self.merged.extend(next.merged);
        let len = self.transfer.len + next.transfer.len;
        self.transfer = Transfer::new(Direction::Read, len);
    }

    /// Adds a read that has ended to `finished`.
    ///
    /// If a merged read failed, this adds nothing and returns its parts. The caller reads them one
    /// by one, so that each owner gets the result of its own bytes.
    pub(super) fn end(self, result: io::Result<()>, finished: &mut Finished) -> Vec<ReadRequest> {
        if result.is_err() && !self.merged.is_empty() {
            return self.split();
        }
        finished.push((self.own.done, result));
        finished.extend(self.merged.into_iter().map(|part| (part.done, Ok(()))));
        Vec::new()
    }

    /// Adds all owners of a read that will not happen to `finished`.
    pub(super) fn give_up(self, error: impl Fn() -> io::Error, finished: &mut Finished) {
        finished.push((self.own.done, Err(error())));
        finished.extend(self.merged.into_iter().map(|part| (part.done, Err(error()))));
    }

    fn split(self) -> Vec<ReadRequest> {
        let mut offset = self.offset;
        let parts = std::iter::once(self.own).chain(self.merged).map(|part| {
            let at = offset;
            offset += part.len as u64;
            // SAFETY: these bytes are what this owner gave to the request that was merged.
            unsafe { ReadRequest::new(part.address, part.len, at, part.done) }
        });
        parts.collect()
    }

    /// Reads all bytes, blocking, and calls the owners' `done`s.
    pub(super) fn run(mut self, file: &File) {
        let result = self.read_blocking(file);
        let mut finished = Finished::new();
        for part in self.end(result, &mut finished) {
            part.run(file);
        }
        call(finished);
    }

    fn read_blocking(&mut self, file: &File) -> io::Result<()> {
        loop {
            let (file, offset) = (file.as_raw_fd(), self.next_offset().cast_signed());
            let moved = match self.next_vectors() {
                // SAFETY: the vector names bytes that are the request's own (see `new`).
                [only] => unsafe { libc::pread(file, only.iov_base, only.iov_len, offset) },
                // SAFETY: as above; there are few vectors, because few reads are merged.
                many => unsafe { libc::preadv(file, many.as_ptr(), many.len() as i32, offset) },
            };
            match self.transfer.advance(answer(moved)) {
                Step::Done => return Ok(()),
                Step::Again => {}
                Step::Failed(error) => return Err(error),
            }
        }
    }
}

/// The runs among writes. The entries of a run follow one another in the
/// file, and one call writes them.
pub(super) fn write_runs(writes: &[Write<'_>]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::with_capacity(writes.len());
    let (mut bytes, mut end) = (0, None);
    for (index, write) in writes.iter().enumerate() {
        let follows = end == Some(write.page) && !write.is_empty();
        match runs.last_mut() {
            Some(run) if follows && bytes + write.len() <= MERGED_MAX => {
                run.end += 1;
                bytes += write.len();
            }
            _ => {
                runs.push(index..index + 1);
                bytes = write.len();
            }
        }
        end = write.page.checked_add((write.len() / PAGE_SIZE) as u64).filter(|_| bytes > 0);
    }
    runs
}

/// The vectors for the bytes of a run from `done` on.
pub(super) fn vectors(run: &[Write<'_>], mut done: usize) -> Vec<libc::iovec> {
    let mut vectors = Vec::with_capacity(run.len() * 2);
    for part in run.iter().flat_map(|write| write.parts) {
        let bytes = &part[done.min(part.len())..];
        done = done.saturating_sub(part.len());
        if !bytes.is_empty() {
            let iov_base = bytes.as_ptr().cast_mut().cast();
            vectors.push(libc::iovec { iov_base, iov_len: bytes.len() });
        }
    }
    vectors
}

/// Writes a run, blocking. After a failure any of its entries may be written, also in part.
pub(super) fn write_blocking(file: &File, run: &[Write<'_>]) -> io::Result<()> {
    let Some(first) = run.first() else { return Ok(()) };
    let mut transfer = Transfer::new(Direction::Write, run.iter().map(Write::len).sum());
    let offset = file_offset(first.page)?;
    loop {
        let vectors = vectors(run, transfer.done());
        // SAFETY: the vectors point into the borrowed parts, and writing only reads them.
        let moved = unsafe {
            libc::pwritev(
                file.as_raw_fd(),
                vectors.as_ptr(),
                vectors.len() as i32,
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

/// How often this thread gave up its processor to wait for something, so far.
pub(super) fn sleeps_of_this_thread() -> i64 {
    // SAFETY: numbers, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: fills in the structure. It cannot fail for the calling thread.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nvcsw
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
        let bytes = [7_u8; 5 * PAGE_SIZE];
        let parts = |from: usize, to: usize| &bytes[from * PAGE_SIZE..to * PAGE_SIZE];
        let run = [
            Write::new(0, [parts(0, 1), parts(1, 3)]),
            Write::new(3, [parts(3, 3), parts(3, 4)]),
            Write::new(4, [parts(4, 5), parts(5, 5)]),
        ];
        for (done, lens) in [
            (0, vec![1, 2, 1, 1]),
            (1, vec![2, 1, 1]),
            (2, vec![1, 1, 1]),
            (3, vec![1, 1]),
            (4, vec![1]),
        ] {
            let vectors = vectors(&run, done * PAGE_SIZE);
            let got: Vec<_> = vectors.iter().map(|vector| vector.iov_len / PAGE_SIZE).collect();
            assert_eq!(got, lens);
            let first = vectors[0].iov_base.cast_const();
            assert_eq!(first, bytes[done * PAGE_SIZE..].as_ptr().cast());
        }
        assert!(vectors(&run, bytes.len()).is_empty());
    }

    #[test]
    fn runs_are_neighbours_in_the_file_up_to_a_limit() {
        let page = [0_u8; PAGE_SIZE];
        let write = |number, pages| match pages {
            0 => Write::new(number, [&[], &[]]),
            1 => Write::new(number, [&page, &[]]),
            _ => Write::new(number, [&page, &page]),
        };
        let writes = [write(1, 1), write(2, 2), write(4, 1), write(6, 1), write(7, 0), write(7, 1)];
        assert_eq!(write_runs(&writes), [0..3, 3..4, 4..5, 5..6]);
        assert_eq!(write_runs(&[write(u64::MAX, 1), write(0, 1)]), [0..1, 1..2]);
        let many: Vec<_> = (0..200).map(|number| write(number, 1)).collect();
        assert_eq!(write_runs(&many), [0..64, 64..128, 128..192, 192..200]);
        assert!(write_runs(&[]).is_empty());
    }

    /// Requests for pages of a file; none of them is ever read, so the addresses are only numbers.
    fn requests(pages: &[(u64, usize)]) -> Vec<ReadRequest> {
        let request = |&(page, count): &(u64, usize)| {
            let (offset, len) = (page * PAGE_SIZE as u64, count * PAGE_SIZE);
            let address = std::ptr::without_provenance_mut(offset as usize + (1 << 30));
            // SAFETY: nothing is read.
            unsafe { ReadRequest::new(address, len, offset, ReadDone::new(|_| {})) }
        };
        pages.iter().map(request).collect()
    }

    fn places(requests: &[ReadRequest]) -> Vec<(u64, usize)> {
        let place = |request: &ReadRequest| {
            (request.offset / PAGE_SIZE as u64, request.transfer.len / PAGE_SIZE)
        };
        requests.iter().map(place).collect()
    }

    #[test]
    fn neighbouring_reads_are_merged_and_split_again() {
        let asked = [(9, 1), (3, 2), (5, 1), (8, 1), (6, 1), (20, 4)];
        let merged = ReadRequest::merge(requests(&asked));
        assert_eq!(places(&merged), [(3, 4), (8, 2), (20, 4)]);
        let mut finished = Finished::new();
        let [first, second, third] = <[ReadRequest; 3]>::try_from(merged).unwrap();
        let parts = first.end(Err(io::ErrorKind::Other.into()), &mut finished);
        assert_eq!(places(&parts), [(3, 2), (5, 1), (6, 1)]);
        assert!(second.end(Ok(()), &mut finished).is_empty());
        assert!(third.end(Err(io::ErrorKind::Other.into()), &mut finished).is_empty());
        let results: Vec<bool> = finished.iter().map(|(_, result)| result.is_ok()).collect();
        assert_eq!(results, [true, true, false]);

        let many: Vec<_> = (0..150).map(|page| (page, 1)).collect();
        let mut merged = ReadRequest::merge(requests(&many));
        assert_eq!(merged[0].next_vectors().len(), 1, "neighbours in memory, too");
        assert_eq!(places(&merged), [(0, 64), (64, 64), (128, 22)]);
    }

    #[test]
    fn a_merged_read_goes_on_in_the_middle_of_its_memory() {
        let part = |page: u64, count: usize, memory: usize| {
            let address = std::ptr::without_provenance_mut(memory * PAGE_SIZE);
            let offset = page * PAGE_SIZE as u64;
            // SAFETY: nothing is read.
            unsafe { ReadRequest::new(address, count * PAGE_SIZE, offset, ReadDone::new(|_| {})) }
        };
        let parts = vec![part(3, 2, 100), part(5, 1, 102), part(6, 2, 50), part(8, 1, 70)];
        let [mut merged] = <[ReadRequest; 1]>::try_from(ReadRequest::merge(parts)).unwrap();
        for (done, expected) in [
            (0, vec![(100, 3), (50, 2), (70, 1)]),
            (1, vec![(101, 2), (50, 2), (70, 1)]),
            (3, vec![(50, 2), (70, 1)]),
            (4, vec![(51, 1), (70, 1)]),
            (5, vec![(70, 1)]),
        ] {
            merged.transfer = Transfer::new(Direction::Read, 6 * PAGE_SIZE);
            if done > 0 {
                assert!(again(merged.transfer.advance((done * PAGE_SIZE) as i32)));
            }
            let vectors = merged.next_vectors().iter();
            let got: Vec<_> = vectors
                .map(|it| (it.iov_base.addr() / PAGE_SIZE, it.iov_len / PAGE_SIZE))
                .collect();
            assert_eq!(got, expected, "{done}");
        }
    }
}
