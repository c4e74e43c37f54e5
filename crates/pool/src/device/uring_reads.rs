//! The io_uring engine: asynchronous reads, all on one ring.
//!
//! Whoever starts reads submits them; one thread, the reactor, takes in completions, starts what
//! had to wait, and calls the [`ReadDone`]s. A read that answers short, or that the kernel cancels
//! because the thread that started it ended, is submitted again by the reactor.
//!
//! What holds: at most [`IN_FLIGHT`] operations are with the kernel, so the completion queue never
//! overflows; between two holders of the lock the submission queue is empty; no lock is held while
//! a `ReadDone` runs; the reactor ends when the ring was dropped and nothing is in flight.
//!
//! [`ReadDone`]: super::ReadDone
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, opcode, squeue, types};

use super::ReadDone;
use super::transfer::{ReadRequest, Step};
use super::uring::{SUBMIT_PATIENCE, new_ring, passes};
use super::workers::{join, lock, run_foreign};

/// Reads with the kernel at a time. The completion queue is twice as long.
const IN_FLIGHT: u32 = 256;

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
        let ring = new_ring(IN_FLIGHT)?;
        let limit = ring.params().sq_entries() as usize;
        let shared = Arc::new(Shared { ring, file, limit, state: Mutex::default() });
        let for_reactor = Arc::clone(&shared);
        let reactor = thread::Builder::new()
            .name("vellum-io".into())
            .spawn(move || for_reactor.react_until_closed())?;
        Ok(Self { shared, reactor: Some(reactor) })
    }

    /// Starts reads; those beyond the limit wait their turn.
    pub(super) fn start_reads(&self, reads: Vec<ReadRequest>) {
        let mut state = lock(&self.shared.state);
        state.backlog.extend(reads);
        let failed = self.shared.submit(&mut state);
        drop(state);
        call(failed);
    }
}

impl Drop for ReadRing {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        state.closing = true;
        let failed = self.shared.submit(&mut state);
        let unwakeable = state.broken.is_some() && state.in_flight == 0;
        drop(state);
        call(failed);
        // A reactor asleep on a broken ring with nothing in flight never wakes; leave it there.
        if !unwakeable {
            join(self.reactor.take());
        }
    }
}

struct Shared {
    ring: IoUring,
    file: Arc<File>,
    limit: usize,
    /// Guards the submission queue too.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What is with the kernel, by the number it was submitted under.
    slots: Vec<Option<ReadRequest>>,
    free_slots: Vec<usize>,
    backlog: VecDeque<ReadRequest>,
    /// Operations with the kernel, the waking one too.
    in_flight: usize,
    closing: bool,
    woken: bool,
    /// Why the ring is not used any more: the number of the error.
    broken: Option<i32>,
}

type Finished = Vec<(ReadDone, io::Result<()>)>;

/// Tells the owners of reads, without a lock.
fn call(finished: Finished) {
    for (done, result) in finished {
        done.call(result);
    }
}

impl Shared {
    /// Gives as much of the backlog to the kernel as allowed; returns what failed for good.
    fn submit(&self, state: &mut State) -> Finished {
        if state.broken.is_none() {
            let pushed = self.push(state);
            if let Err(error) = self.enter(pushed.len()) {
                tracing::error!(%error, "io_uring stopped working: reads will fail");
                state.broken = Some(error.raw_os_error().unwrap_or(libc::EIO));
                self.take_back(state, &pushed);
            }
        }
        let Some(number) = state.broken else { return Finished::new() };
        let backlog = state.backlog.drain(..);
        backlog.map(|read| (read.done, Err(io::Error::from_raw_os_error(number)))).collect()
    }

    /// Moves operations from the backlog to the submission queue; returns their numbers.
    fn push(&self, state: &mut State) -> Vec<u64> {
        let mut pushed = Vec::new();
        // SAFETY: the caller holds the lock on the state, so this is the only submission queue.
        let mut queue = unsafe { self.ring.submission_shared() };
        while state.in_flight < self.limit {
            let Some(read) = state.backlog.pop_front() else { break };
            let slot = state.free_slots.pop().unwrap_or(state.slots.len());
            if slot == state.slots.len() {
                state.slots.push(None);
            }
            // SAFETY: the request owns its memory until its `done` is called, which happens only
            // after the completion; the file stays open as long as `self`, and the reactor keeps
            // `self` until nothing is in flight.
            if unsafe { queue.push(&self.operation(&read).user_data(slot as u64)) }.is_err() {
                state.backlog.push_front(read);
                state.free_slots.push(slot);
                break;
            }
            state.slots[slot] = Some(read);
            state.in_flight += 1;
            pushed.push(slot as u64);
        }
        if state.closing && !state.woken {
            let wake = opcode::Nop::new().build().user_data(WAKE);
            // SAFETY: the operation refers to no memory.
            if unsafe { queue.push(&wake) }.is_ok() {
                state.woken = true;
                state.in_flight += 1;
                pushed.push(WAKE);
            }
        }
        pushed
    }

    /// The operation that reads what is left of a request.
    fn operation(&self, read: &ReadRequest) -> squeue::Entry {
        let len = read.transfer.next_len() as u32;
        opcode::Read::new(types::Fd(self.file.as_raw_fd()), read.next_address(), len)
            .offset(read.next_offset())
            .build()
    }

    /// Makes the kernel take all of the submission queue, which holds `count` operations.
    fn enter(&self, count: usize) -> io::Result<()> {
        let mut left = count;
        let mut failures = 0;
        while left > 0 {
            match self.ring.submit() {
                Ok(taken) => left -= taken.min(left),
                Err(error) if passes(&error) && failures < SUBMIT_PATIENCE => {
                    if error.raw_os_error() != Some(libc::EINTR) {
                        failures += 1;
                        thread::sleep(Duration::from_millis(1));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Puts operations that the kernel did not take back into the backlog. As the ring is never
    /// entered to submit again, it will not take them later either.
    fn take_back(&self, state: &mut State, pushed: &[u64]) {
        // SAFETY: the caller holds the lock on the state, so this is the only submission queue.
        let not_taken = unsafe { self.ring.submission_shared() }.len();
        for &number in pushed.iter().rev().take(not_taken) {
            state.in_flight -= 1;
            if number != WAKE {
                let slot = number as usize;
                state.backlog.extend(state.slots[slot].take());
                state.free_slots.push(slot);
            }
        }
    }

    /// The reactor.
    fn react_until_closed(&self) {
        loop {
            self.wait_for_completions();
            let (finished, closed) = self.react();
            for (done, result) in finished {
                run_foreign(|| done.call(result));
            }
            if closed {
                return;
            }
        }
    }

    /// Takes in what is done and starts what waited; returns whose `done` to call, and whether
    /// that was all there will ever be.
    fn react(&self) -> (Finished, bool) {
        // SAFETY: only the reactor looks at the completion queue.
        let answers: Vec<(u64, i32)> = unsafe { self.ring.completion_shared() }
            .map(|completion| (completion.user_data(), completion.result()))
            .collect();
        let mut finished = Finished::with_capacity(answers.len());
        let mut state = lock(&self.state);
        for (number, answer) in answers {
            state.in_flight -= 1;
            if number == WAKE {
                continue;
            }
            let slot = number as usize;
            let Some(mut read) = state.slots[slot].take() else { continue };
            state.free_slots.push(slot);
            match read.transfer.advance(answer) {
                Step::Done => finished.push((read.done, Ok(()))),
                Step::Failed(error) => finished.push((read.done, Err(error))),
                Step::Again => state.backlog.push_front(read),
            }
        }
        finished.extend(self.submit(&mut state));
        (finished, state.closing && state.in_flight == 0 && state.backlog.is_empty())
    }

    /// Sleeps until there is a completion, or for a moment.
    fn wait_for_completions(&self) {
        if lock(&self.state).broken.is_some() {
            thread::sleep(Duration::from_millis(5));
            return;
        }
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: waits only: no operation is submitted, and there is no signal mask.
        let waited = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, flags, None) };
        if let Err(error) = waited
            && error.raw_os_error() != Some(libc::EINTR)
        {
            // Nothing else can be done than to look again later: reads may be in flight.
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadRing").field("limit", &self.limit).finish_non_exhaustive()
    }
}
