//! Threads on processors of their own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How many processors the machine has. Those on which this thread may run are no answer: a thread
/// inherits the place of the one that starts it.
pub fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
    text.lines().filter(|line| line.starts_with("processor")).count()
}

/// Keeps this thread on a processor; they are counted from 0, and over again.
pub fn stay_on(processor: usize) {
    let mut allowed = CpuSet::new();
    allowed.set(processor % processors());
    sched_setaffinity(None, &allowed).expect("sched_setaffinity");
}

/// The processors of this thread, which drop restores with [`sched_setaffinity`].
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

/// Says to other threads that they are done, when this thread is, also if it is because of a panic.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Whether the others are done.
    pub fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Says so when what this returns is dropped.
    pub fn at_end(&self) -> impl Drop + '_ {
        struct AtEnd<'a>(&'a Stop);
        impl Drop for AtEnd<'_> {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
            }
        }
        AtEnd(self)
    }
}

/// How long a test waits for another thread.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until something that another thread does has come true.
#[track_caller]
pub fn wait_until(check: impl Fn() -> bool) {
    let deadline = Deadline(Instant::now() + PATIENCE);
    while !check() {
        assert!(!deadline.is_over(), "the other thread does not come that far");
        std::thread::yield_now();
    }
}

/// Time that a test has for something that races.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// So many milliseconds from now; a quarter of them where `VELLUM_SHORT` is set, but enough for
    /// a few rounds.
    pub fn after_ms(time: u64) -> Self {
        let time = match std::env::var_os("VELLUM_SHORT") {
            Some(_) => time.min((time / 4).max(300)),
            None => time,
        };
        Self(Instant::now() + Duration::from_millis(time))
    }

    /// Whether it has come.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}
