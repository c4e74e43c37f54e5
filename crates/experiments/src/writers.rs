//! A writer, and threads that could make it wait forever: readers of blobs of its leaf, snapshots
//! that overlap, counts of its tree.

use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use hdrhistogram::Histogram;
use vellum::{Options, Store, Tree};
use vellum_pool::device::MemoryDevice;

use super::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::{fill, is_of, key};

/// The experiment.
pub const WRITERS: Experiment = Experiment {
    name: "writers",
    shows: "a writer's updates and their latency, during blob reads, snapshots and counts",
    source: "whether locks and the change gate are fair",
    run,
};

/// Threads that read blobs.
const READERS: usize = 16;
/// Blobs of a tree; their references lie in its first leaf.
const BLOBS: u64 = 10;
const BLOB_BYTES: usize = 20_000;
/// The key that the writer updates, in the same leaf.
const COUNTER: u64 = BLOBS;
/// Threads that take snapshots, and how long they keep each.
const SNAPSHOTS: u32 = 2;
const SNAPSHOT: Duration = Duration::from_millis(5);
/// The pause between updates whose latency counts: a writer without pauses waits once for thousands
/// of updates that do not wait.
const PAUSE: Duration = Duration::from_millis(1);
/// The longest latency that the histogram resolves, in nanoseconds.
const LONGEST: u64 = 100_000_000_000;

/// The work of the other threads.
#[derive(Clone, Copy)]
enum Load {
    Nothing,
    /// The same number of threads on another leaf. This shows their cost as load on the processors.
    BlobsElsewhere,
    BlobsHere,
    Snapshots,
    Counts,
}

const LOADS: [(&str, Load); 5] = [
    ("alone", Load::Nothing),
    ("16 readers of blobs elsewhere", Load::BlobsElsewhere),
    ("16 readers of blobs of its leaf", Load::BlobsHere),
    ("two overlapping snapshots of 5 ms", Load::Snapshots),
    ("stat of its tree in a loop", Load::Counts),
];

/// Latencies of the writer's updates in one sample, in nanoseconds.
#[derive(Clone, Copy)]
struct Latency {
    p99: u64,
    longest: u64,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries = context.pick(50_000, 200_000);
    let setup = Setup::new(entries)?;
    let duration = Duration::from_secs_f64(context.pick(0.5, 3.0));
    let latencies = LOADS.map(|_| RefCell::new(Vec::new()));
    let contestants = LOADS.iter().zip(&latencies).map(|((name, load), latencies)| {
        let setup = &setup;
        Contestant::new(*name, move || {
            let (rate, latency) = setup.sample(*load, duration)?;
            latencies.borrow_mut().push(latency);
            Ok(rate)
        })
    });
    let rates = alternate(context.rounds(), &context.progress, contestants.collect())?;
    let mut outcome = Outcome::default();
    outcome.rows.extend(rates.iter().map(|of| Row::of(of, "updates/s").against(of, &rates[0])));
    for (what, of) in [("p99", (|l| l.p99) as fn(&Latency) -> u64), ("longest", |l| l.longest)] {
        let all: Vec<Samples> = LOADS
            .iter()
            .zip(&latencies)
            .map(|((name, _), latencies)| Samples {
                name: format!("{what}, {name}"),
                // The first round does not count.
                values: latencies.borrow()[1..].iter().map(|l| of(l) as f64 / 1000.0).collect(),
            })
            .collect();
        outcome.rows.extend(all.iter().map(|of| Row::of(of, "us").against(of, &all[0])));
    }
    outcome.notes.push(format!(
        "One thread updates a value of 8 bytes in place: for half of the time as fast as it can, \
         which gives its rate, then with pauses of a millisecond, which gives its latency. Blobs \
         are of {BLOB_BYTES} bytes, {BLOBS} in a leaf; the tree that is counted has {entries} \
         entries of 8 + 100 bytes. All is in memory. With more threads than processors, the \
         latency is also the wait for a processor: compare both rows of readers."
    ));
    Ok(outcome)
}

/// A store with two equal trees; the writer updates the first.
struct Setup {
    store: Store,
    here: Tree,
    elsewhere: Tree,
}

impl Setup {
    fn new(entries: u64) -> Result<Setup> {
        let options = Options::new().pool_bytes(256 << 20);
        let store = Store::create_on(Arc::new(MemoryDevice::new()), &options)?;
        let tree = |name: &str| {
            let tree = store.create_tree(name)?;
            tree.bulk_load((0..entries).map(|number| {
                let len = match number {
                    COUNTER => 8,
                    _ if number < BLOBS => BLOB_BYTES,
                    _ => 100,
                };
                let mut value = vec![0; len];
                if number != COUNTER {
                    fill(number, &mut value);
                }
                (key(number), value)
            }))?;
            anyhow::Ok(tree)
        };
        let (here, elsewhere) = (tree("here")?, tree("elsewhere")?);
        Ok(Setup { store, here, elsewhere })
    }

    /// Updates a second, and their latencies.
    fn sample(&self, load: Load, duration: Duration) -> Result<(f64, Latency)> {
        let stop = &AtomicBool::new(false);
        type Body<'a> = Box<dyn Fn() -> Result<()> + Send + 'a>;
        let reader = |tree| move |_| -> Body<'_> { Box::new(move || read(tree, stop)) };
        let others: Vec<Body<'_>> = match load {
            Load::Nothing => Vec::new(),
            Load::BlobsElsewhere => (0..READERS).map(reader(&self.elsewhere)).collect(),
            Load::BlobsHere => (0..READERS).map(reader(&self.here)).collect(),
            Load::Snapshots => (0..SNAPSHOTS)
                .map(|number| -> Body<'_> { Box::new(move || self.take_snapshots(number, stop)) })
                .collect(),
            Load::Counts => vec![Box::new(|| self.count(stop))],
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = others
                .into_iter()
                .map(|body| {
                    scope.spawn(move || {
                        let result = body();
                        stop.store(true, Ordering::Relaxed);
                        result
                    })
                })
                .collect();
            let writer = scope.spawn(|| {
                let result = self.write(duration, stop);
                stop.store(true, Ordering::Relaxed);
                result
            });
            let end = Instant::now() + duration;
            while !stop.load(Ordering::Relaxed) && Instant::now() < end {
                let left = end.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(Duration::from_millis(10)));
            }
            stop.store(true, Ordering::Relaxed);
            for other in others {
                other.join().map_err(|_| anyhow!("a thread panicked"))??;
            }
            writer.join().map_err(|_| anyhow!("the writer panicked"))?
        })
    }

    /// Updates the counter for half of the time as fast as it can, then with pauses until the end;
    /// and checks it.
    fn write(&self, duration: Duration, stop: &AtomicBool) -> Result<(f64, Latency)> {
        let counter = key(COUNTER);
        let value = || -> Result<u64> {
            let value = self.here.get(&counter)?.context("the counter is gone")?;
            Ok(u64::from_le_bytes(value[..].try_into().context("the counter is no number")?))
        };
        let update = || -> Result<()> {
            let updated = self.here.update(&counter, |value| {
                if let Some(bytes) = value.first_chunk_mut() {
                    *bytes = (u64::from_le_bytes(*bytes) + 1).to_le_bytes();
                }
            })?;
            ensure!(updated, "the counter is gone");
            Ok(())
        };
        let (before, begin, mut updates) = (value()?, Instant::now(), 0);
        // Checked after the update, here and below, so that there is at least one.
        while updates == 0 || begin.elapsed() < duration / 2 {
            update()?;
            updates += 1;
        }
        let rate = updates as f64 / begin.elapsed().as_secs_f64();
        let mut latencies = Histogram::<u64>::new_with_bounds(1, LONGEST, 2)?;
        loop {
            std::thread::sleep(PAUSE);
            let begin = Instant::now();
            update()?;
            latencies.saturating_record(begin.elapsed().as_nanos() as u64);
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        ensure!(value()? == before + updates + latencies.len(), "updates were lost");
        Ok((rate, Latency { p99: latencies.value_at_quantile(0.99), longest: latencies.max() }))
    }

    fn take_snapshots(&self, number: u32, stop: &AtomicBool) -> Result<()> {
        // Each snapshot begins in the middle of another one.
        std::thread::sleep(SNAPSHOT * number / SNAPSHOTS);
        while !stop.load(Ordering::Relaxed) {
            let snapshot = self.store.snapshot()?;
            std::thread::sleep(SNAPSHOT);
            drop(snapshot);
        }
        Ok(())
    }

    fn count(&self, stop: &AtomicBool) -> Result<()> {
        let entries = self.here.stat()?.entries;
        while !stop.load(Ordering::Relaxed) {
            ensure!(self.here.stat()?.entries == entries, "entries were missed");
        }
        Ok(())
    }
}

/// Reads the tree's blobs, every cache line of them, one after the other.
fn read(tree: &Tree, stop: &AtomicBool) -> Result<()> {
    for number in (0..BLOBS).cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let value = tree.get(&key(number))?.context("a blob is gone")?;
        ensure!(value.len() == BLOB_BYTES && is_of(number, &value), "blob {number} is another");
        black_box(value.iter().step_by(64).fold(0u8, |sum, byte| sum ^ byte));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_writer_updates_under_every_load() {
        let setup = Setup::new(2000).unwrap();
        for (name, load) in LOADS {
            let (rate, latency) = setup.sample(load, Duration::from_millis(50)).unwrap();
            assert!(rate > 0.0 && latency.longest >= latency.p99, "{name}");
        }
    }
}
