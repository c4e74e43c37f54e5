//! Threads bound to processors.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::counters::PATIENCE;
use crate::random::Random;
use crate::sys;

/// The number of processors of the machine. The affinity of this thread does not tell, because a
/// thread inherits that of the thread that starts it.
pub fn processors() -> usize {
    let text = fs::read_to_string("/proc/cpuinfo").expect("/proc/cpuinfo");
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

/// The kernel may preempt a thread within the kernel, too, for as long as this lives.
#[derive(Debug)]
pub struct Preemptible(String);

impl Preemptible {
    /// How the kernel preempts threads, if it can change that.
    const SWITCH: &str = "/sys/kernel/debug/sched/preempt";

    /// Has the kernel do so, where that can be changed.
    #[expect(clippy::new_without_default, reason = "it changes the machine")]
    pub fn new() -> Self {
        let ways = fs::read_to_string(Self::SWITCH).unwrap_or_default();
        // The one that is chosen is in brackets.
        let chosen = ways.split(['(', ')']).nth(1).unwrap_or_default().to_owned();
        if fs::write(Self::SWITCH, "full").is_err() {
            eprintln!("this kernel always preempts, or never");
        }
        Self(chosen)
    }
}

impl Drop for Preemptible {
    fn drop(&mut self) {
        let _ = fs::write(Self::SWITCH, &self.0);
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

/// Waits until a condition holds that another thread brings about.
#[track_caller]
pub fn wait_until(check: impl Fn() -> bool) {
    let deadline = Deadline(Instant::now() + PATIENCE);
    while !check() {
        assert!(!deadline.is_over(), "the other thread does not get so far");
        std::thread::yield_now();
    }
}

/// A place where threads wait for each other, again and again. Unlike the standard library's, a
/// thread that waits in vain, because another one has panicked, panics, too.
#[derive(Debug)]
pub struct Barrier {
    threads: u64,
    arrivals: Mutex<u64>,
    all_came: Condvar,
}

impl Barrier {
    /// A place for so many threads.
    pub fn new(threads: u64) -> Self {
        Self { threads, arrivals: Mutex::new(0), all_came: Condvar::new() }
    }

    /// Waits until all threads wait.
    #[track_caller]
    pub fn wait(&self) {
        let mut arrivals = self.arrivals.lock().expect("no thread panics under the lock");
        *arrivals += 1;
        let all = arrivals.next_multiple_of(self.threads);
        if *arrivals == all {
            self.all_came.notify_all();
            return;
        }
        let waited = self.all_came.wait_timeout_while(arrivals, PATIENCE, |now| *now < all);
        let (arrivals, outcome) = waited.expect("no thread panics under the lock");
        drop(arrivals);
        assert!(!outcome.timed_out(), "another thread does not come");
    }
}

/// Races are to last one part in so many of their time: `VELLUM_SHORT`.
///
/// # Panics
/// If that is set, and is no number from 1 on.
#[must_use]
pub fn race_part() -> u32 {
    let Ok(part) = std::env::var("VELLUM_SHORT") else { return 1 };
    let part = part.parse().ok().filter(|part| *part > 0);
    part.expect("VELLUM_SHORT is a number from 1 on")
}

/// How often something is repeated that does not end by time: so often, or a part of that where
/// `VELLUM_SHORT` is set.
#[must_use]
pub fn rounds(count: u32) -> u32 {
    count.div_ceil(race_part())
}

/// Runs `slow` on a thread that has to give way, and `quick` on this one at random moments of it,
/// on the same processor, for a number of rounds: so `slow` stands still wherever it is until
/// `quick` is over. After each round, when both are over, runs `look`.
///
/// # Panics
/// If the other thread does not come to an end.
pub fn cut_in(count: u32, slow: impl Fn() + Sync, mut quick: impl FnMut(), mut look: impl FnMut()) {
    let (begun, ended) = (AtomicU64::new(0), AtomicU64::new(0));
    // The time that `slow` takes, in nanoseconds.
    let time = AtomicU64::new(1);
    let stop = Stop::default();
    let mut random = Random::of_this_run();
    let _preemptible = Preemptible::new();
    let _place = Place::on(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sys::give_way();
            while !stop.is_said() {
                if begun.load(Ordering::Acquire) > ended.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    slow();
                    time.store(start.elapsed().as_nanos() as u64 + 1, Ordering::Relaxed);
                    ended.fetch_add(1, Ordering::Release);
                }
                std::thread::yield_now();
            }
        });
        let _at_end = stop.at_end();
        sys::wake_in_time();
        for round in 1..=u64::from(rounds(count)) {
            begun.store(round, Ordering::Release);
            std::thread::sleep(Duration::from_nanos(random.below(time.load(Ordering::Relaxed))));
            quick();
            let deadline = Deadline(Instant::now() + PATIENCE);
            while ended.load(Ordering::Acquire) < round {
                assert!(!deadline.is_over(), "the other thread does not get so far");
                std::thread::sleep(Duration::from_micros(50));
            }
            look();
        }
    });
}

/// Time that a test has for something that races.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Instant);

impl Deadline {
    /// So many milliseconds from now; a part of them where `VELLUM_SHORT` is set, but enough for a
    /// few rounds.
    pub fn after_ms(time: u64) -> Self {
        let time = time.min((time / u64::from(race_part())).max(300));
        Self(Instant::now() + Duration::from_millis(time))
    }

    /// Whether the time is over.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.0
    }

    /// The numbers of rounds until the time is over: at least one round, however late the thread
    /// begins.
    pub fn rounds(self) -> impl Iterator<Item = u64> {
        (0..).take_while(move |round| *round == 0 || !self.is_over())
    }

    /// The same until something holds as well, which other threads bring about. If they have
    /// failed, it never will: then it ends in the end.
    pub fn rounds_until(self, holds: impl Fn() -> bool) -> impl Iterator<Item = u64> {
        let patience = Self(self.0 + PATIENCE);
        let is_done = move || self.is_over() && (holds() || patience.is_over());
        (0..).take_while(move |round| *round == 0 || !is_done())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn a_time_that_is_over_has_a_round() {
        let over = Deadline(Instant::now());
        assert_eq!(over.rounds().count(), 1);
        assert_eq!(over.rounds_until(|| true).count(), 1);
        let looks = Cell::new(0);
        let is_third = || {
            looks.set(looks.get() + 1);
            looks.get() == 3
        };
        assert_eq!(over.rounds_until(is_third).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(Deadline::after_ms(3_600_000).rounds().take(5).count(), 5);
    }

    #[test]
    fn threads_meet_at_a_barrier_again_and_again() {
        let (barrier, arrived) = (Barrier::new(3), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=50 {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        barrier.wait();
                        assert_eq!(arrived.load(Ordering::SeqCst), 3 * round);
                        barrier.wait();
                    }
                });
            }
        });
    }
}
