//! Threads bound to processors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The number of processors of the machine. The affinity of this thread does not tell, because a
/// thread inherits that of the thread that starts it.
pub fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
    text.lines().filter(|line| line.starts_with("processor")).count()
}

/// Binds this thread to a processor, by its number modulo the number of processors.
pub fn stay_on(processor: usize) {
    let mut allowed = CpuSet::new();
    allowed.set(processor % processors());
    sched_setaffinity(None, &allowed).expect("sched_setaffinity");
}

/// The affinity of this thread, which drop restores with [`sched_setaffinity`].
#[derive(Debug)]
pub struct Place(CpuSet);

impl Place {
    /// Binds this thread to a processor until the result is dropped.
    pub fn on(processor: usize) -> Self {
        let before = sched_getaffinity(None).expect("sched_getaffinity");
        stay_on(processor);
        Self(before)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The thread ends with its test, so a failure does no harm.
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// Tells other threads to stop when this thread ends, even by a panic.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Whether the thread should stop.
    pub fn is_said(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Tells the threads to stop when the result is dropped.
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

/// Waits until a condition holds that another thread brings about.
#[track_caller]
pub fn wait_until(check: impl Fn() -> bool) {
    let deadline = Deadline(Instant::now() + PATIENCE);
    while !check() {
        assert!(!deadline.is_over(), "the other thread does not get so far");
        std::thread::yield_now();
    }
}

/// Whether races are to be short: `VELLUM_SHORT` is set.
#[must_use]
pub fn is_short() -> bool {
    std::env::var_os("VELLUM_SHORT").is_some()
}

/// How often something is repeated that does not end by time: so often, or a quarter of that where
/// `VELLUM_SHORT` is set.
#[must_use]
pub fn rounds(count: u32) -> u32 {
    if is_short() { count.div_ceil(4) } else { count }
}

/// Time that a test has for something that races.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// So many milliseconds from now; a quarter of them where `VELLUM_SHORT` is set, but enough for
    /// a few rounds.
    pub fn after_ms(time: u64) -> Self {
        let time = if is_short() { time.min((time / 4).max(300)) } else { time };
        Self(Instant::now() + Duration::from_millis(time))
    }

    /// Whether the time is over.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }
}
