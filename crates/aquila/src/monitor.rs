//! Threads of a cache that handle faults, also those of system calls.
//!
//! Without them a fault is SIGBUS for the thread that made it (`signal.rs`), and a system call
//! that is given an address of a page that is not mapped fails. With them the kernel has the thread
//! wait, whether the program or a system call made the access, and one of these threads hears of
//! it, handles the fault, and wakes the one that waits. That is slower by two switches between
//! threads.
//!
//! A page that cannot be had is *poisoned*: the access that waits fails as it would in a mapping of
//! the kernel's, by SIGBUS or with `EFAULT`. The poison is taken away soon, because the page may be
//! had later: the file may become longer, or the storage work again. An access that has not seen
//! the poison by then faults once more. [`crate::Cache::set_length`] takes it away at once.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::descriptor::Descriptor;
use crate::error::{Error, Result};
use crate::generation::{self, Generation};
use crate::live_counters::THREADS;
use crate::shared::{Outcome, Threads};
use crate::sys::{self, WaitingFault};
use crate::{PAGE_SIZE, fault};

/// Threads of a cache at most.
const MOST_THREADS: usize = 8;

/// How long a poisoned page stays so. A thread that waits for it is woken at once, as a rule.
const POISON: Duration = Duration::from_millis(20);

const CLOSED: &str =
    "vellum-aquila: the program has closed descriptors of a cache: the process ends\n";

/// Faults that one of the threads defers at a time.
const MOST_DEFERRED: usize = 1024;

/// How long a fault waits that cannot be handled now.
const PAUSE: Duration = Duration::from_millis(1);

/// When the threads are to end.
#[derive(Debug)]
struct End {
    is_due: AtomicBool,
    /// Readable then.
    event: Descriptor,
}

/// The threads. They end when this is dropped.
#[derive(Debug)]
pub(crate) struct Monitor {
    threads: Vec<JoinHandle<()>>,
    end: Arc<End>,
    /// The process that has the threads: a forked child does not.
    generation: Generation,
}

impl Monitor {
    /// Starts the threads of a cache with this userfaultfd.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn start(uffd: &OwnedFd) -> Result<Self> {
        Self::try_start(uffd).map_err(|errno| Error::of("starting threads of a cache", errno))
    }

    fn try_start(uffd: &OwnedFd) -> Result<Self, Errno> {
        let generation = generation::begin()?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let end = Arc::new(End { is_due: AtomicBool::new(false), event: Descriptor::new(event) });
        let mut monitor = Self { threads: Vec::new(), end, generation };
        let count = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        // The program's handlers do not run on these threads.
        let _blocked = sys::BlockedSignals::for_changes();
        for _ in 0..count {
            let uffd = uffd.try_clone().map_err(|error| errno_of(&error))?;
            let end = Arc::clone(&monitor.end);
            let thread = thread::Builder::new().name(THREADS.to_owned());
            let thread = thread.spawn(move || Handler::new(uffd).run(&end));
            monitor.threads.push(thread.map_err(|error| errno_of(&error))?);
        }
        Ok(monitor)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let threads = std::mem::take(&mut self.threads);
        if generation::current() != self.generation {
            // A child has none of the threads, and would wait for ever.
            return std::mem::forget(threads);
        }
        self.end.is_due.store(true, Ordering::Release);
        if rustix::io::write(&self.end.event, &[1; 8]).is_err() {
            // The threads would not hear of it.
            end_without_descriptors();
        }
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Threads for Monitor {}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::NOMEM)
}

/// Ends the process: it would find zeros where pages of files are to be.
fn end_without_descriptors() -> ! {
    // A thread that waits for one of these pages may have the lock of Rust's own standard error.
    let _ = rustix::io::write(std::io::stderr(), CLOSED.as_bytes());
    std::process::abort();
}

/// A fault that could not be handled yet.
struct Deferred {
    when: Instant,
    fault: WaitingFault,
    /// What the thread that writes was asked for.
    asked: u64,
}

/// One of the threads. It waits for no other thread, but for moments: another fault may be the one
/// of a call for which, in turn, all other threads wait.
struct Handler {
    uffd: OwnedFd,
    /// Faults to be tried once more. Those who wait for them sleep meanwhile. It has room for as
    /// many as it ever has, because a thread that waits may have a lock of the program's allocator.
    deferred: VecDeque<Deferred>,
    /// Addresses of poisoned pages, and when each ceases to be so.
    poisoned: VecDeque<(Instant, usize)>,
}

impl Handler {
    fn new(uffd: OwnedFd) -> Self {
        let deferred = VecDeque::with_capacity(MOST_DEFERRED);
        Self { uffd, deferred, poisoned: VecDeque::new() }
    }

    fn run(mut self, end: &End) {
        loop {
            let poisoned = self.poisoned.front().map(|(when, _)| *when);
            let deferred = self.deferred.front().map(|deferred| deferred.when);
            let next = poisoned.into_iter().chain(deferred).min();
            let left = next.map(|when| when.saturating_duration_since(Instant::now()));
            // Not before it is over.
            let timeout = left.map(|left| Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            });
            let mut both =
                [PollFd::new(&end.event, PollFlags::IN), PollFd::new(&self.uffd, PollFlags::IN)];
            let polled = poll(&mut both, timeout.as_ref());
            let is_closed = both.iter().any(|one| one.revents().contains(PollFlags::NVAL));
            let is_over = polled.is_ok() && both[0].revents().contains(PollFlags::IN);
            if is_closed || (is_over && !end.is_due.load(Ordering::Acquire)) {
                end_without_descriptors();
            }
            if is_over {
                return;
            }
            // One fault, so that poison ends in time however many come.
            match sys::next_fault(&self.uffd) {
                Ok(fault) => self.handle(fault, 0),
                Err(Errno::BADF) => end_without_descriptors(),
                Err(_) => {}
            }
            self.end_poison();
            self.handle_deferred();
        }
    }

    /// Tries those faults again that are due.
    fn handle_deferred(&mut self) {
        let now = Instant::now();
        let is_due = |deferred: &&Deferred| deferred.when <= now;
        // A fault that is deferred once more is due later.
        while self.deferred.front().filter(is_due).is_some() {
            if let Some(Deferred { fault, asked, .. }) = self.deferred.pop_front() {
                self.handle(fault, asked);
            }
        }
    }

    /// Handles a fault, and wakes the thread that waits for it; or defers it.
    fn handle(&mut self, fault: WaitingFault, mut asked: u64) {
        let start = fault.address / PAGE_SIZE * PAGE_SIZE;
        let handled = fault::at(start, |shared, place, page| {
            shared.fault_of_another(place, page, fault.is_store, &mut asked)
        });
        match handled.unwrap_or(Outcome::NotNow) {
            Outcome::Handled => {}
            Outcome::Poisoned => self.poisoned.push_back((Instant::now() + POISON, start)),
            Outcome::Later if self.deferred.len() < MOST_DEFERRED => {
                let when = Instant::now() + PAUSE;
                return self.deferred.push_back(Deferred { when, fault, asked });
            }
            // The access repeats.
            Outcome::Later | Outcome::NotNow => thread::sleep(PAUSE),
        }
        // As a rule the call that mapped the page has woken it.
        let _ = sys::wake(&self.uffd, start, PAGE_SIZE);
    }

    /// Takes the poison away that has been there for long enough.
    fn end_poison(&mut self) {
        let now = Instant::now();
        while let Some((_, start)) = self.poisoned.front().copied().filter(|(when, _)| *when <= now)
        {
            self.poisoned.pop_front();
            fault::at(start, |shared, place, page| shared.end_poison(place, page));
        }
    }
}
