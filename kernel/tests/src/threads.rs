//! Threads on processors of their own.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How many processors there are.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Keeps this thread on a processor; they are counted from 0, and over again.
pub fn stay_on(processor: usize) {
    let mut allowed = CpuSet::new();
    allowed.set(processor % processors());
    sched_setaffinity(None, &allowed).expect("sched_setaffinity");
}

/// Where this thread may run, to be given back to [`sched_setaffinity`] by dropping it.
#[derive(Debug)]
pub struct Place(CpuSet);

impl Place {
    /// Keeps this thread on a processor for as long as this lives.
    pub fn on(processor: usize) -> Self {
        let before = sched_getaffinity(None).expect("sched_getaffinity");
        stay_on(processor);
        Self(before)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The thread ends with its test; a place that cannot be left does no harm.
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// Time that a test has for something that races.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// So many milliseconds from now.
    pub fn after_ms(time: u64) -> Self {
        Self(Instant::now() + Duration::from_millis(time))
    }

    /// Whether it has come.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}
