//! Threads that repeat a durable operation: its rate and latency.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use hdrhistogram::Histogram;

use super::Context;
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::Row;

/// One durable operation, by the thread with this number.
pub(super) type Commit<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// The longest latency that the histogram resolves, in nanoseconds.
const LONGEST: u64 = 100_000_000_000;

/// A way of making data durable: its name, and the operation of each thread.
pub(super) struct Way<'a> {
    pub(super) name: String,
    pub(super) threads: u64,
    pub(super) commit: Box<dyn Fn(u64) -> Result<Commit<'a>> + Sync + 'a>,
}

/// Latencies of one sample in nanoseconds.
#[derive(Clone, Copy)]
struct Latency {
    p50: u64,
    p99: u64,
    p999: u64,
}

/// One of the latencies.
type Quantile = fn(&Latency) -> u64;

/// Measures all ways in turn: rates and latencies, in ratios to the first one's.
pub(super) fn rates_and_latencies(
    context: &Context<'_>,
    ways: &[Way<'_>],
    unit: &str,
    duration: Duration,
) -> Result<Vec<Row>> {
    let latencies: Vec<_> = ways.iter().map(|_| RefCell::new(Vec::new())).collect();
    let contestants = ways.iter().zip(&latencies).map(|(way, latencies)| {
        Contestant::new(&way.name, move || {
            let (rate, latency) = way.sample(duration)?;
            latencies.borrow_mut().push(latency);
            Ok(rate)
        })
    });
    let rates = alternate(context.rounds(), &context.progress, contestants.collect())?;
    let mut rows: Vec<_> =
        rates.iter().map(|of| Row::of(of, unit).against(of, &rates[0])).collect();
    let quantiles: [(&str, Quantile); 3] =
        [("p50", |l| l.p50), ("p99", |l| l.p99), ("p99.9", |l| l.p999)];
    for (what, of) in quantiles {
        let samples = |(rate, latencies): (&Samples, &RefCell<Vec<Latency>>)| Samples {
            name: format!("{what}, {}", rate.name),
            // The first round does not count.
            values: latencies.borrow()[1..].iter().map(|l| of(l) as f64 / 1000.0).collect(),
        };
        let all: Vec<_> = rates.iter().zip(&latencies).map(samples).collect();
        rows.extend(all.iter().map(|of| Row::of(of, "us").against(of, &all[0])));
    }
    Ok(rows)
}

impl Way<'_> {
    /// Commits a second of all threads together, and their latencies.
    fn sample(&self, duration: Duration) -> Result<(f64, Latency)> {
        let (begin, commits) = (Instant::now(), AtomicU64::new(0));
        let histograms = std::thread::scope(|scope| {
            let body = |thread| {
                let commits = &commits;
                move || {
                    let mut commit = (self.commit)(thread)?;
                    let mut histogram = Histogram::<u64>::new_with_bounds(1, LONGEST, 3)?;
                    while begin.elapsed() < duration {
                        let started = Instant::now();
                        commit()?;
                        histogram.saturating_record(started.elapsed().as_nanos() as u64);
                        commits.fetch_add(1, Ordering::Relaxed);
                    }
                    anyhow::Ok(histogram)
                }
            };
            let threads: Vec<_> =
                (0..self.threads).map(|thread| scope.spawn(body(thread))).collect();
            let joined = threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| anyhow!("a writer panicked"))?);
            joined.collect::<Result<Vec<_>>>()
        })?;
        let rate = commits.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
        let mut all = Histogram::<u64>::new_with_bounds(1, LONGEST, 3)?;
        histograms.iter().try_for_each(|histogram| all.add(histogram))?;
        let of = |quantile| all.value_at_quantile(quantile);
        Ok((rate, Latency { p50: of(0.5), p99: of(0.99), p999: of(0.999) }))
    }
}
