//! The io_uring engine: batches of writes, each on a ring of its own while it lasts.
//!
//! What holds: when a batch's `run` returns, nothing of the batch is in flight, so its buffers may
//! go. Reads are in `uring_reads.rs`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::Write;
use super::file::Engine;
use super::transfer::{
    Direction, ReadRequest, Step, Transfer, file_offset, vectors, write_blocking,
};
use super::uring_reads::ReadRing;
use super::workers::lock;

/// Writes that one ring keeps in flight; longer batches go through it in turns.
const WRITE_RING_ENTRIES: u32 = 64;

/// Rings kept for the next batch. More exist while more threads than this write at the same time.
const SPARE_RINGS: usize = 8;

/// How often, a millisecond apart, submitting is tried again when the kernel is short of memory.
pub(super) const SUBMIT_PATIENCE: u32 = 1000;

/// Reads and writes by io_uring.
#[derive(Debug)]
pub(super) struct UringEngine {
    file: Arc<File>,
    reads: ReadRing,
    write_rings: Mutex<Vec<WriteRing>>,
    /// Rings cannot be had any more: batches are written without.
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
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Writev::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut ring = WriteRing(ring);
        ring.try_out()?;
        Ok(Self {
            reads: ReadRing::start(Arc::clone(&file))?,
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

impl Engine for UringEngine {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn start_reads(&self, reads: Vec<ReadRequest>) {
        self.reads.start_reads(reads);
    }

    fn write(&self, batch: &mut [Write<'_>]) {
        if let Some(mut ring) = self.take_ring() {
            let mut run = Batch::new(&self.file, batch);
            if run.run(&mut ring.0) {
                self.give_ring_back(ring);
                return;
            }
            let unwritten = run.unwritten();
            // Entries that the kernel has not seen are still in the ring: never enter it again.
            drop(ring);
            self.no_more_rings.store(true, Ordering::Relaxed);
            for index in unwritten {
                batch[index].result = write_blocking(&self.file, &batch[index]);
            }
        } else {
            for write in batch {
                write.result = write_blocking(&self.file, write);
            }
        }
    }
}

/// A new ring; the kernel may make it smaller than asked.
pub(super) fn new_ring(entries: u32) -> io::Result<IoUring> {
    IoUring::builder().setup_clamp().build(entries)
}

/// Whether an error of submitting passes when tried again later.
pub(super) fn passes(error: &io::Error) -> bool {
    let passing = [libc::EINTR, libc::EAGAIN, libc::EBUSY, libc::ENOMEM];
    error.raw_os_error().is_some_and(|number| passing.contains(&number))
}

/// A ring that has nothing in flight.
struct WriteRing(IoUring);

impl std::fmt::Debug for WriteRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WriteRing")
    }
}

impl WriteRing {
    /// Sends an operation that does nothing through the ring: some sandboxes let rings be made
    /// but not used.
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

/// Counts operations in the kernel's hands. They use memory that the caller only lent.
struct InFlight(usize);

impl Drop for InFlight {
    fn drop(&mut self) {
        if self.0 > 0 {
            // Only a panic between submitting and reaping leads here. Unwinding further would free
            // buffers that the kernel is still reading.
            tracing::error!(writes = self.0, "a panic with writes in flight: aborting the process");
            std::process::abort();
        }
    }
}

/// One batch of writes on its way through one ring.
struct Batch<'a, 'b> {
    file: &'a File,
    entries: &'a mut [Write<'b>],
    transfers: Vec<Transfer>,
    /// What the operations in flight point to; kept in place until they are done.
    vectors: Vec<[libc::iovec; 2]>,
    finished: Vec<bool>,
    /// Indices of entries to submit, the next one last.
    waiting: Vec<usize>,
    in_flight: InFlight,
}

impl<'a, 'b> Batch<'a, 'b> {
    fn new(file: &'a File, entries: &'a mut [Write<'b>]) -> Self {
        let transfers =
            entries.iter().map(|write| Transfer::new(Direction::Write, write.len())).collect();
        let nowhere = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self {
            file,
            transfers,
            vectors: vec![[nowhere; 2]; entries.len()],
            finished: vec![false; entries.len()],
            waiting: (0..entries.len()).rev().collect(),
            in_flight: InFlight(0),
            entries,
        }
    }

    /// Writes everything. Returns whether the ring is fit for another batch; if it is not, some
    /// entries may be [`unwritten`](Self::unwritten).
    fn run(&mut self, ring: &mut IoUring) -> bool {
        let mut failures = 0;
        loop {
            self.push(ring);
            if self.in_flight.0 == 0 {
                return true;
            }
            let wanted = if self.waiting.is_empty() { self.in_flight.0 } else { 1 };
            match ring.submit_and_wait(wanted) {
                Ok(_) => failures = 0,
                Err(error) if passes(&error) && failures < SUBMIT_PATIENCE => {
                    if error.raw_os_error() != Some(libc::EINTR) {
                        failures += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "io_uring stopped working: going on without");
                    self.drain(ring);
                    return false;
                }
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
            let offset = match file_offset(self.entries[index].page) {
                Ok(offset) if !self.entries[index].is_empty() => offset,
                other => {
                    self.finish(index, other.map(drop));
                    continue;
                }
            };
            let operation = self.operation(index, offset);
            // SAFETY: the parts are borrowed for as long as this batch and the vectors stay in
            // place with it; `run` returns only when nothing is in flight, and `InFlight` sees to
            // it that a panic does not get past either.
            if unsafe { queue.push(&operation) }.is_err() {
                self.waiting.push(index);
                return;
            }
            self.in_flight.0 += 1;
        }
    }

    /// The operation that writes what is left of an entry.
    fn operation(&mut self, index: usize, offset: u64) -> squeue::Entry {
        let transfer = &self.transfers[index];
        let offset = offset + transfer.done() as u64;
        let file = types::Fd(self.file.as_raw_fd());
        let (vectors, count) = vectors(self.entries[index].parts, transfer.done());
        self.vectors[index] = vectors;
        let [first, _] = vectors;
        let entry = if count == 1 {
            let len = first.iov_len.min(transfer.next_len()) as u32;
            opcode::Write::new(file, first.iov_base.cast(), len).offset(offset).build()
        } else {
            let vectors = self.vectors[index].as_ptr();
            opcode::Writev::new(file, vectors, count as u32).offset(offset).build()
        };
        entry.user_data(index as u64)
    }

    /// Takes in what is done.
    fn reap(&mut self, ring: &mut IoUring) {
        for completion in ring.completion() {
            let index = completion.user_data() as usize;
            self.in_flight.0 -= 1;
            match self.transfers[index].advance(completion.result()) {
                Step::Done => self.finish(index, Ok(())),
                Step::Again => self.waiting.push(index),
                Step::Failed(error) => self.finish(index, Err(error)),
            }
        }
    }

    /// Waits, without the kernel's help, until it has nothing of this batch in its hands. What it
    /// did not take yet it will not take any more.
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

    fn finish(&mut self, index: usize, result: io::Result<()>) {
        self.entries[index].result = result;
        self.finished[index] = true;
    }

    /// The entries that got no result.
    fn unwritten(&self) -> Vec<usize> {
        (0..self.finished.len()).filter(|&index| !self.finished[index]).collect()
    }
}
