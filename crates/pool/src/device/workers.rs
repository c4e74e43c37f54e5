//! A few threads that run jobs in the order in which they were added.
//!
//! Invariant: every accepted job runs, also one that waits when the workers are dropped.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Locks, also after a thread panicked while it held the lock: the data in the devices' mutexes is
/// valid between any two statements that change it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits for a notification. May return without one.
pub(super) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Runs a function of the caller. A panic in it does not end the device's thread.
pub(super) fn run_foreign(job: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a callback of the storage device panicked");
    }
}

/// Joins threads, except the current one: one of the device's own callbacks may drop the last
/// handle of the device. The thread that runs the callback then ends by itself.
pub(super) fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for handle in threads {
        if handle.thread().id() != thread::current().id() {
            // The threads catch panics. The standard library reports one that gets through.
            drop(handle.join());
        }
    }
}

/// The threads. Dropping runs all waiting jobs first.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closing: bool,
}

impl Workers {
    /// Starts `count` threads.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub(super) fn start(count: usize) -> io::Result<Self> {
        let mut workers = Self { shared: Arc::default(), threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let shared = Arc::clone(&workers.shared);
            let thread = thread::Builder::new().name("vellum-io".into());
            workers.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(workers)
    }

    /// How many threads there are.
    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// Gives jobs to the threads.
    pub(super) fn run(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut queue = lock(&self.shared.queue);
        let before = queue.jobs.len();
        queue.jobs.extend(jobs);
        let added = queue.jobs.len() - before;
        drop(queue);
        for _ in 0..added.min(self.threads.len()) {
            self.shared.wake.notify_one();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                drop(queue);
                run_foreign(job);
                queue = lock(&self.queue);
            } else if queue.closing {
                return;
            } else {
                queue = wait(&self.wake, queue);
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        lock(&self.shared.queue).closing = true;
        self.shared.wake.notify_all();
        join(self.threads.drain(..));
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workers").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn all_jobs_run_even_those_waiting_at_the_end_and_after_panics() {
        let ran = Arc::new(AtomicU32::new(0));
        let workers = Workers::start(3).unwrap();
        workers.run((0..500).map(|number| {
            let ran = Arc::clone(&ran);
            Box::new(move || {
                ran.fetch_add(1, Ordering::Relaxed);
                assert!(number % 100 != 7, "expected by the test");
            }) as Job
        }));
        drop(workers);
        assert_eq!(ran.load(Ordering::Relaxed), 500);
    }

    #[test]
    fn a_job_may_be_the_one_that_drops_the_workers() {
        let (send, receive) = std::sync::mpsc::channel();
        let workers = Arc::new(Workers::start(2).unwrap());
        let last = Arc::clone(&workers);
        workers.run([Box::new(move || {
            while Arc::strong_count(&last) > 1 {
                thread::yield_now();
            }
            drop(last);
            send.send(()).unwrap();
        }) as Job]);
        drop(workers);
        receive.recv().unwrap();
    }
}
