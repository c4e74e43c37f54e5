//! Threads that run operations for some time: their rate, latencies, and progress over time.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use hdrhistogram::Histogram;

use super::values::Random;
use super::{Latency, Measured, Plan};
use crate::engine::{Engine, Session};

/// One of this many operations is timed, because reading the clock costs as much as a short
/// operation.
const TIMED: u64 = 16;

/// The longest latency that the histogram resolves, in nanoseconds.
const LONGEST: u64 = 100_000_000_000;

/// The interval of [`Measured::over_time`].
const TICK: Duration = Duration::from_millis(100);

/// The work that one thread repeats; returns the number of operations.
pub type Operation<'a> = dyn FnMut(&mut dyn Session, &mut Random) -> Result<u64> + 'a;

/// Runs `threads` threads for `seconds`, each with a session and the operation that `make` makes
/// for its number. Every thread does at least one.
///
/// # Errors
/// The first error of any thread. Then all threads stop.
pub fn drive<'a>(
    engine: &dyn Engine,
    plan: &Plan,
    make: impl Fn(usize) -> Box<Operation<'a>> + Sync,
) -> Result<Measured> {
    drive_threads(plan, |thread| {
        let mut operation = make(thread);
        let mut session = engine.session()?;
        Ok(move |random: &mut Random| operation(&mut *session, random))
    })
}

/// As [`drive`], for operations that need no engine.
///
/// # Errors
/// The first error of any thread. Then all threads stop.
pub fn drive_threads<O: FnMut(&mut Random) -> Result<u64>>(
    plan: &Plan,
    make: impl Fn(usize) -> Result<O> + Sync,
) -> Result<Measured> {
    let begin = Barrier::new(plan.threads + 1);
    let stop = AtomicBool::new(false);
    let counters: Vec<Counter> = (0..plan.threads).map(|_| Counter::default()).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.threads)
            .map(|thread| {
                let (begin, stop, count) = (&begin, &stop, &counters[thread].0);
                let make = &make;
                scope.spawn(move || {
                    let seed = plan.seed.wrapping_mul(1_000_003).wrapping_add(thread as u64);
                    let operation = make(thread);
                    begin.wait();
                    let result = operation
                        .and_then(|operation| repeat(operation, Random::new(seed), stop, count));
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        begin.wait();
        let start = Instant::now();
        let over_time = watch(plan, &stop, &counters);
        stop.store(true, Ordering::Relaxed);
        let mut latencies = histogram()?;
        for thread in threads {
            let of_thread = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            latencies.add(of_thread).context("adding latencies")?;
        }
        Ok(Measured {
            operations: counters.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum(),
            seconds: start.elapsed().as_secs_f64(),
            latency: Latency {
                p50: latencies.value_at_quantile(0.5),
                p99: latencies.value_at_quantile(0.99),
                p999: latencies.value_at_quantile(0.999),
                max: latencies.max(),
            },
            over_time,
            counts: Default::default(),
        })
    })
}

/// A counter on its own cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

fn histogram() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, LONGEST, 2).context("making a histogram")
}

fn repeat(
    mut operation: impl FnMut(&mut Random) -> Result<u64>,
    mut random: Random,
    stop: &AtomicBool,
    count: &AtomicU64,
) -> Result<Histogram<u64>> {
    let mut latencies = histogram()?;
    let mut done = 0;
    for number in 0.. {
        if number % TIMED == 0 {
            let start = Instant::now();
            done += operation(&mut random)?;
            latencies.saturating_record(start.elapsed().as_nanos() as u64);
        } else {
            done += operation(&mut random)?;
        }
        count.store(done, Ordering::Relaxed);
        // Checked after the operation, so that there is at least one.
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    Ok(latencies)
}

/// Waits until the time is over or a thread has failed. Returns the operations of each interval.
fn watch(plan: &Plan, stop: &AtomicBool, counters: &[Counter]) -> Vec<u64> {
    let start = Instant::now();
    let end = Duration::from_secs_f64(plan.seconds);
    let (mut over_time, mut before) = (Vec::new(), 0);
    for tick in 1.. {
        let due = (TICK * tick).min(end);
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        let now: u64 = counters.iter().map(|counter| counter.0.load(Ordering::Relaxed)).sum();
        over_time.push(now - before);
        before = now;
        if due >= end || stop.load(Ordering::Relaxed) {
            break;
        }
    }
    over_time
}
