//! The io_uring engine: writes, each call with a ring of its own until it ends.
//!
//! Invariant: when `RingWrites::run` returns, none of its writes is in flight, so the caller may
//! free their buffers. Reads are in `uring_reads.rs`, and in `uring_prompt_reads.rs`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::Write;
use super::transfer::{
    Direction, IoEngine, ReadRequest, Step, Transfer, file_offset, submit_and_wait, vectors,
    write_blocking, write_runs,
};
use super::uring_reads::ReadRing;
use super::workers::lock;

/// Writes that one ring keeps in flight; more go through it in turns.
const WRITE_RING_ENTRIES: u32 = 64;

/// The most rings for reads, each with a thread of its own.
const READ_RINGS: usize = 4;

/// Reads of one call that go to the same ring.
const READS_PER_RING: usize = 32;

/// Idle rings that the engine keeps. More exist while more threads than this write at a time.
const SPARE_RINGS: usize = 8;

/// Reads and writes by io_uring.
#[derive(Debug)]
pub(super) struct UringEngine {
    file: Arc<File>,
    /// Several, because submission to fast storage keeps a CPU busy.
    reads: Vec<ReadRing>,
    write_rings: Mutex<Vec<WriteRing>>,
    /// The kernel gives no more rings: threads write by blocking calls.
    no_more_rings: AtomicBool,
}

impl UringEngine {
    /// Sets up rings and tries them.
    ///
    /// # Errors
    /// `EPERM` or `ENOSYS` where io_uring is switched off or too old, `ENOMEM` where the limit of
    /// locked memory is in the way; any other limit of the system.
    pub(super) fn new(file: Arc<File>) -> io::Result<Self> {
        let ring = new_ring(WRITE_RING_ENTRIES)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed =
            [opcode::Read::CODE, opcode::Readv::CODE, opcode::Write::CODE, opcode::Writev::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut ring = WriteRing(ring);
        ring.try_out()?;
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let reads = (0..processors.min(READ_RINGS)).map(|_| ReadRing::start(Arc::clone(&file)));
        Ok(Self {
            reads: reads.collect::<io::Result<_>>()?,
            file,
            write_rings: Mutex::new(vec![ring]),
            no_more_rings: AtomicBool::new(false),
        })
    }

    /// A ring for this thread alone.
    fn take_ring(&self) -> Option<WriteRing> {
        let spare = lock(&self.write_rings).pop();
        if spare.is_some() || self.no_more_rings.load(Ordering::Relaxed) {
            return spare;
        }
        match new_ring(WRITE_RING_ENTRIES) {
            Ok(ring) => Some(WriteRing(ring)),
            Err(error) => {
                tracing::warn!(%error, "no more io_uring instances: writing one page at a time");
                self.no_more_rings.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    fn give_ring_back(&self, ring: WriteRing) {
        let mut rings = lock(&self.write_rings);
        if rings.len() < SPARE_RINGS {
            rings.push(ring);
        }
    }
}

impl IoEngine for UringEngine {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn start_reads(&self, mut reads: Vec<ReadRequest>) {
        // Each thread keeps to one ring, so that it does not wake another thread's reactor. The
        // rest of many reads goes to the next ring.
        let mut ring = number_of_this_thread();
        while reads.len() > READS_PER_RING {
            let rest = reads.split_off(READS_PER_RING);
            self.reads[ring % self.reads.len()].start_reads(reads);
            reads = rest;
            ring = ring.wrapping_add(1);
        }
        self.reads[ring % self.reads.len()].start_reads(reads);
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        if let Some(mut ring) = self.take_ring() {
            let mut run = RingWrites::new(&self.file, writes);
            if run.run(&mut ring.0) {
                self.give_ring_back(ring);
                return;
            }
            let unwritten = run.unwritten();
            // The ring has entries that the kernel has not seen: no thread may enter it again.
            drop(ring);
            self.no_more_rings.store(true, Ordering::Relaxed);
            for index in unwritten {
                writes[index].result = write_blocking(&self.file, &writes[index..=index]);
            }
        } else {
            for write in writes {
                write.result = write_blocking(&self.file, std::slice::from_ref(write));
            }
        }
    }
}

/// Numbers of threads, in the order in which they first read.
fn number_of_this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.try_with(|number| *number).unwrap_or(0) // the thread is ending
}

/// A new ring. The kernel may make it smaller than asked.
pub(super) fn new_ring(entries: u32) -> io::Result<IoUring> {
    IoUring::builder().setup_clamp().build(entries)
}

/// A ring that has nothing in flight.
struct WriteRing(IoUring);

impl std::fmt::Debug for WriteRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WriteRing")
    }
}

impl WriteRing {
    /// Sends an operation that does nothing through the ring: some sandboxes allow a program to
    /// make rings but not to use them.
    fn try_out(&mut self) -> io::Result<()> {
        let nop = opcode::Nop::new().build();
        // SAFETY: the operation refers to no memory.
        unsafe { self.0.submission().push(&nop) }.map_err(io::Error::other)?;
        loop {
            match self.0.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
            if let Some(completion) = self.0.completion().next() {
                return match completion.result() {
                    0 => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }
}

/// Counts the operations that the kernel works on. They use memory that the caller only lent.
pub(super) struct InFlight(pub(super) usize);

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0 > 0 {
            // A panic between submission and completion. To unwind further would free buffers that
            // the kernel still reads.
            tracing::error!(
                operations = self.0,
                "a panic with I/O in flight: aborting the process"
            );
            std::process::abort();
        }
    }
}

/// The writes of one call, which go through one ring. Each operation writes a run of neighbours.
struct RingWrites<'a, 'b> {
    file: &'a File,
    entries: &'a mut [Write<'b>],
    runs: Vec<Run>,
    finished: Vec<bool>,
    /// Indices of runs to submit, the next one last.
    waiting: Vec<usize>,
    in_flight: InFlight,
}

/// Entries that one operation writes.
struct Run {
    entries: Range<usize>,
    transfer: Transfer,
    /// The vectors of the operation in flight. They stay in place until the operation is done.
    vectors: Vec<libc::iovec>,
}

impl Run {
    fn new(all: &[Write<'_>], entries: Range<usize>) -> Run {
        let len = all[entries.clone()].iter().map(Write::len).sum();
        Run { entries, transfer: Transfer::new(Direction::Write, len), vectors: Vec::new() }
    }
}

impl<'a, 'b> RingWrites<'a, 'b> {
    fn new(file: &'a File, entries: &'a mut [Write<'b>]) -> Self {
        let runs: Vec<Run> =
            write_runs(entries).into_iter().map(|run| Run::new(entries, run)).collect();
        Self {
            file,
            waiting: (0..runs.len()).rev().collect(),
            runs,
            finished: vec![false; entries.len()],
            in_flight: InFlight(0),
            entries,
        }
    }

    /// Writes everything. Returns whether the ring can take more writes; if it cannot, some
    /// entries may be [`unwritten`](Self::unwritten).
    fn run(&mut self, ring: &mut IoUring) -> bool {
        let mut failures = 0;
        loop {
            self.push(ring);
            if self.in_flight.0 == 0 {
                return true;
            }
            let wanted = if self.waiting.is_empty() { self.in_flight.0 } else { 1 };
            if let Err(error) = submit_and_wait(ring, wanted, &mut failures) {
                tracing::warn!(%error, "io_uring stopped working: going on without");
                self.drain(ring);
                return false;
            }
            self.reap(ring);
        }
    }

    /// Fills the submission queue.
    fn push(&mut self, ring: &mut IoUring) {
        let limit = ring.params().sq_entries() as usize;
        let mut queue = ring.submission();
        while self.in_flight.0 < limit && !queue.is_full() {
            let Some(index) = self.waiting.pop() else { return };
            let entries = self.runs[index].entries.clone();
            let first = &self.entries[entries.start];
            let offset = match file_offset(first.page) {
                Ok(offset) if !first.is_empty() => offset,
                other => {
                    self.finish(index, other.map(drop));
                    continue;
                }
            };
            let operation = self.operation(index, offset);
            // SAFETY: the parts are borrowed as long as `self` lives, and the vectors stay in
            // place in it. `run` returns only when nothing is in flight, and `InFlight` aborts a
            // panic before that.
            if unsafe { queue.push(&operation) }.is_err() {
                self.waiting.push(index);
                return;
            }
            self.in_flight.0 += 1;
        }
    }

    /// The operation that writes the rest of a run.
    fn operation(&mut self, index: usize, offset: u64) -> squeue::Entry {
        let Run { entries, transfer, vectors: kept } = &mut self.runs[index];
        let offset = offset + transfer.done() as u64;
        let file = types::Fd(self.file.as_raw_fd());
        *kept = vectors(&self.entries[entries.clone()], transfer.done());
        let entry = match kept[..] {
            [only] => {
                let len = only.iov_len.min(transfer.next_len()) as u32;
                opcode::Write::new(file, only.iov_base.cast(), len).offset(offset).build()
            }
            _ => opcode::Writev::new(file, kept.as_ptr(), kept.len() as u32).offset(offset).build(),
        };
        entry.user_data(index as u64)
    }

    /// Handles the completions that are there.
    fn reap(&mut self, ring: &mut IoUring) {
        for completion in ring.completion() {
            let index = completion.user_data() as usize;
            self.in_flight.0 -= 1;
            match self.runs[index].transfer.advance(completion.result()) {
                Step::Done => self.finish(index, Ok(())),
                Step::Again => self.waiting.push(index),
                Step::Failed(error) => self.finish(index, Err(error)),
            }
        }
    }

    /// Polls for completions until the kernel works on none of these writes. The kernel takes no
    /// operation that it has not taken before.
    fn drain(&mut self, ring: &mut IoUring) {
        loop {
            self.reap(ring);
            let not_taken = ring.submission().len();
            if self.in_flight.0 <= not_taken {
                self.in_flight.0 = 0;
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Handles the end of a run. If it failed, queues its entries one by one, so that each gets its
    /// own result.
    fn finish(&mut self, index: usize, result: io::Result<()>) {
        let entries = self.runs[index].entries.clone();
        if result.is_err() && entries.len() > 1 {
            for entry in entries {
                self.waiting.push(self.runs.len());
                self.runs.push(Run::new(self.entries, entry..entry + 1));
            }
            return;
        }
        self.finished[entries.clone()].fill(true);
        // A failed run has one entry.
        let mut result = Some(result);
        for entry in &mut self.entries[entries] {
            entry.result = result.take().unwrap_or(Ok(()));
        }
    }

    /// The entries that got no result.
    fn unwritten(&self) -> Vec<usize> {
        (0..self.finished.len()).filter(|&index| !self.finished[index]).collect()
    }
}
