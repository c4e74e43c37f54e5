//! The io_uring engine: asynchronous reads, all on one ring, which one thread serves.
//!
//! A thread that starts reads queues them and wakes that thread, the reactor, if it sleeps. The
//! reactor submits the queued reads and takes completions with the same system call, and calls the
//! [`ReadDone`]s. No other thread submits, because the kernel hands a completion to the thread that
//! submitted the operation: it would interrupt or wake any other thread for each completion, which
//! that thread would only pass on. The reactor submits a short read again.
//!
//! Invariants: the kernel works on at most [`IN_FLIGHT`] operations, so the completion queue never
//! overflows. The reactor holds no lock while a `ReadDone` runs. It ends when nothing is in flight
//! and the ring was dropped or broke.
//!
//! [`ReadDone`]: super::ReadDone
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};

use super::transfer::{Finished, ReadRequest, Step, call, submit_and_wait};
use super::workers::{join, lock};

/// The most operations that the kernel works on. The completion queue is twice as long.
const IN_FLIGHT: u32 = 256;

/// The most reads that the reactor submits before it looks at completions again.
const SUBMIT_MAX: usize = 32;

/// Marks the operation that wakes the reactor.
const WAKE: u64 = u64::MAX;

/// The reads of one device.
#[derive(Debug)]
pub(super) struct ReadRing {
    shared: Arc<Shared>,
    reactor: Option<JoinHandle<()>>,
}

impl ReadRing {
    /// Sets up the ring and starts the reactor.
    pub(super) fn start(file: Arc<File>) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared { event, queue: Mutex::default() });
        let mut reactor = Reactor::new(Arc::clone(&shared), file, new_read_ring()?);
        let thread = thread::Builder::new().name("vellum-io".into());
        let reactor = thread.spawn(move || reactor.run())?;
        Ok(Self { shared, reactor: Some(reactor) })
    }

    /// Starts reads. Those beyond the limit wait in the queue.
    pub(super) fn start_reads(&self, reads: Vec<ReadRequest>) {
        if reads.is_empty() {
            return;
        }
        let mut queue = lock(&self.shared.queue);
        if let Some(number) = queue.broken {
            drop(queue);
            return call(refuse(reads, number));
        }
        queue.reads.extend(reads);
        let wake = std::mem::take(&mut queue.asleep);
        drop(queue);
        if wake {
            self.shared.wake();
        }
    }
}

/// A ring for which the kernel does not interrupt the reactor: the reactor polls for completions.
fn new_read_ring() -> io::Result<IoUring> {
    let quiet = IoUring::builder().setup_clamp().setup_coop_taskrun().build(IN_FLIGHT);
    quiet.or_else(|_| IoUring::builder().setup_clamp().build(IN_FLIGHT)) // before Linux 5.19
}

impl Drop for ReadRing {
    fn drop(&mut self) {
        lock(&self.shared.queue).closing = true;
        self.shared.wake();
        join(self.reactor.take());
    }
}

/// The state that the reactor shares with threads that start reads.
#[derive(Debug)]
struct Shared {
    /// Wakes the reactor when written to.
    event: OwnedFd,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    reads: VecDeque<ReadRequest>,
    /// The reactor sleeps, or is about to, and no thread has woken it yet.
    asleep: bool,
    closing: bool,
    /// Why the ring is not used any more: the number of the error.
    broken: Option<i32>,
}

impl Shared {
    fn wake(&self) {
        // A number that is not zero in any byte order. The counter cannot overflow: the reactor
        // reads it whenever it wakes.
        if let Err(error) = rustix::io::write(&self.event, &[1, 0, 0, 0, 0, 0, 0, 0]) {
            tracing::error!(%error, "the thread that reads cannot be woken");
        }
    }
}

/// Fails reads that the kernel has not taken, or has completed.
fn refuse(reads: impl IntoIterator<Item = ReadRequest>, number: i32) -> Finished {
    let mut finished = Finished::new();
    for read in reads {
        read.give_up(|| io::Error::from_raw_os_error(number), &mut finished);
    }
    finished
}

/// The thread that serves the ring, and its private state.
struct Reactor {
    ring: IoUring,
    file: Arc<File>,
    shared: Arc<Shared>,
    limit: usize,
    /// The reads in the ring, by the number of the operation.
    slots: Vec<Option<ReadRequest>>,
    free_slots: Vec<usize>,
    /// The reads to submit, or to submit again.
    waiting: VecDeque<ReadRequest>,
    /// Numbers of the operations that the kernel has not taken yet, in order.
    unsubmitted: VecDeque<u64>,
    /// Operations in the ring, the waking one too.
    in_flight: usize,
    /// The waking operation is in the ring: it reads the event's counter to `counter`.
    armed: bool,
    counter: Box<[u8; 8]>,
}

impl Reactor {
    fn new(shared: Arc<Shared>, file: Arc<File>, ring: IoUring) -> Self {
        Self {
            limit: ring.params().sq_entries() as usize,
            ring,
            file,
            shared,
            slots: Vec::new(),
            free_slots: Vec::new(),
            waiting: VecDeque::new(),
            unsubmitted: VecDeque::new(),
            in_flight: 0,
            armed: false,
            counter: Box::default(),
        }
    }

    fn run(&mut self) {
        let mut failures = 0;
        loop {
            let Some(wanted) = self.fill() else { return };
            if let Err(error) = submit_and_wait(&self.ring, wanted, &mut failures) {
                return self.end_broken(&error);
            }
            let left = self.ring.submission().len();
            self.unsubmitted.drain(..self.unsubmitted.len().saturating_sub(left));
            let finished = self.reap();
            call(finished);
        }
    }

    /// Fills the submission queue. Returns for how many completions to wait, or none when the
    /// reactor can end.
    fn fill(&mut self) -> Option<usize> {
        let closing = self.take_queued();
        // One place stays free for the waking operation.
        let places = self.limit.saturating_sub(self.in_flight + 1);
        for _ in 0..places.min(SUBMIT_MAX) {
            let Some(read) = self.waiting.pop_front() else { break };
            if let Err(read) = self.push_read(read) {
                self.waiting.push_front(read);
                break;
            }
        }
        if closing && self.waiting.is_empty() && self.in_flight == usize::from(self.armed) {
            // The thread that closed has written to the event, so the waking operation ends by
            // itself.
            return self.armed.then_some(1);
        }
        if !self.armed && !closing {
            let event = types::Fd(self.shared.event.as_raw_fd());
            let read = opcode::Read::new(event, self.counter.as_mut_ptr(), 8).build();
            self.armed = self.push(&read.user_data(WAKE));
        }
        if self.in_flight + 1 >= self.limit {
            return Some(1);
        }
        let idle = self.waiting.is_empty() && (closing || self.may_sleep());
        Some(usize::from(idle))
    }

    /// Takes the queued reads. Returns whether the queue is closed.
    fn take_queued(&mut self) -> bool {
        let mut queue = lock(&self.shared.queue);
        queue.asleep = false;
        self.waiting.append(&mut queue.reads);
        queue.closing
    }

    /// Whether the reactor may sleep: nothing was queued since it last looked. If so, a thread
    /// that queues a read from now on wakes it.
    fn may_sleep(&self) -> bool {
        let mut queue = lock(&self.shared.queue);
        queue.asleep = self.armed && queue.reads.is_empty() && !queue.closing;
        queue.asleep
    }

    /// Puts a read into the submission queue, unless that is full.
    fn push_read(&mut self, mut read: ReadRequest) -> Result<(), ReadRequest> {
        let slot = self.free_slots.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        let file = types::Fd(self.file.as_raw_fd());
        let offset = read.next_offset();
        // The kernel reads the vectors when it takes the operation. They stay where they are when
        // the request moves.
        let operation = match read.next_vectors() {
            [only] => {
                let len = only.iov_len as u32;
                opcode::Read::new(file, only.iov_base.cast(), len).offset(offset).build()
            }
            many => {
                let count = many.len() as u32;
                opcode::Readv::new(file, many.as_ptr(), count).offset(offset).build()
            }
        };
        let operation = operation.user_data(slot as u64);
        if !self.push(&operation) {
            self.free_slots.push(slot);
            return Err(read);
        }
        self.slots[slot] = Some(read);
        Ok(())
    }

    /// False if the submission queue is full.
    fn push(&mut self, operation: &squeue::Entry) -> bool {
        // SAFETY: a request owns its memory and its vectors until its `done` is called, which
        // happens only after the completion; the counter and both files live as long as `self`, and
        // `run` does not return before nothing is in flight.
        let pushed = unsafe { self.ring.submission().push(operation) }.is_ok();
        if pushed {
            self.unsubmitted.push_back(operation.get_user_data());
            self.in_flight += 1;
        }
        pushed
    }

    /// Takes the reads that have ended out of the ring, and returns those to be completed.
    fn reap(&mut self) -> Finished {
        let mut finished = Finished::new();
        for completion in self.ring.completion() {
            self.in_flight -= 1;
            let number = completion.user_data();
            if number == WAKE {
                self.armed = false;
                continue;
            }
            let slot = number as usize;
            let Some(mut read) = self.slots[slot].take() else { continue };
            self.free_slots.push(slot);
            match read.transfer.advance(completion.result()) {
                Step::Done => drop(read.end(Ok(()), &mut finished)),
                Step::Failed(error) => self.waiting.extend(read.end(Err(error), &mut finished)),
                Step::Again => self.waiting.push_front(read),
            }
        }
        finished
    }

    /// Ends the ring when the kernel refuses to work: polls until the kernel works on nothing, and
    /// fails all other reads. The kernel takes no operation that it has not taken before.
    fn end_broken(&mut self, error: &io::Error) {
        tracing::error!(%error, "io_uring stopped working: reads will fail");
        let number = error.raw_os_error().unwrap_or(libc::EIO);
        lock(&self.shared.queue).broken = Some(number);
        let not_taken = self.ring.submission().len();
        let taken = self.unsubmitted.len().saturating_sub(not_taken);
        for number in self.unsubmitted.drain(..).skip(taken) {
            self.in_flight -= 1;
            match number {
                WAKE => self.armed = false,
                slot => self.waiting.extend(self.slots[slot as usize].take()),
            }
        }
        self.shared.wake();
        loop {
            let finished = self.reap();
            let queued = std::mem::take(&mut lock(&self.shared.queue).reads);
            call(finished);
            call(refuse(queued.into_iter().chain(self.waiting.drain(..)), number));
            if self.in_flight == 0 {
                return;
            }
            // The kernel delivers completions whenever the thread makes a system call.
            thread::sleep(Duration::from_millis(1));
        }
    }
}
