//! What it costs to change the size of a pool that is in use: the time of the call, and what it
//! does to lookups of another thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use vellum::{Options, Store, Tree};
use vellum_pool::PAGE_SIZE;

use crate::{Context, Experiment};
use vellum_bench::machine::Storage;
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::Random;

/// The experiment.
pub const RESIZE: Experiment = Experiment {
    name: "resize",
    shows: "a pool becomes a quarter, and large again: the time, and lookups of another thread",
    source: "whether a running program can give memory back",
    run,
};

/// Entries of 8 + 120 bytes in a page.
const ENTRIES_OF_PAGE: u64 = 28;

/// Pages of the data are less than those of the large pool by this part: all of them fit.
const SPARE: u64 = 8;

const VALUE: [u8; 120] = [7; 120];

/// What a round finds.
struct Figures {
    /// Milliseconds of the calls: a shrink with clean pages, one with changed pages, growth.
    clean: Samples,
    changed: Samples,
    grown: Samples,
    /// The 99th percentile of lookups in microseconds: before, and during both shrinks.
    before: Samples,
    during_clean: Samples,
    during_changed: Samples,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let large: u64 = context.pick(64 << 20, 1 << 30);
    let small = large / 4;
    let pages = large / PAGE_SIZE as u64;
    let entries = (pages - pages / SPARE) * ENTRIES_OF_PAGE;
    let storage = Storage::fast(2 * large, &context.directory);
    let options = Options::new().pool_bytes(large).log(false);
    let store = Store::create(storage.directory().join("store"), &options)?;
    let tree = store.create_tree("entries")?;
    tree.bulk_load((0..entries).map(|number| (number.to_be_bytes(), VALUE)))?;
    let (from, to) = (large >> 20, small >> 20);
    let mut figures = Figures {
        clean: Samples::new(format!("{from} to {to} MiB, clean pages")),
        changed: Samples::new(format!("{from} to {to} MiB, changed pages")),
        grown: Samples::new(format!("{to} to {from} MiB")),
        before: Samples::new("99th percentile of lookups before"),
        during_clean: Samples::new("during a shrink with clean pages"),
        during_changed: Samples::new("during a shrink with changed pages"),
    };
    let rounds = context.rounds();
    for round in 0..=rounds {
        context.progress.at(round, rounds + 1, "resize");
        let of_round = one_round(&store, &tree, entries, (large, small))?;
        // The first round does not count.
        if round > 0 {
            for (samples, value) in figures.all_mut().into_iter().zip(of_round) {
                samples.values.push(value);
            }
        }
    }
    let mut outcome = Outcome::default();
    for samples in [&figures.clean, &figures.changed, &figures.grown] {
        outcome.rows.push(Row::of(samples, "ms"));
    }
    outcome.rows.push(Row::of(&figures.before, "us"));
    for samples in [&figures.during_clean, &figures.during_changed] {
        outcome.rows.push(Row::of(samples, "us").against(samples, &figures.before));
    }
    outcome.notes.push(format!(
        "A store without a log, {entries} entries of 8 + 120 bytes: all are in memory at {from} \
         MiB. One thread resizes, another one looks random entries up; after a shrink most \
         lookups miss. Storage: {}.",
        storage.about()
    ));
    store.close()?;
    Ok(outcome)
}

impl Figures {
    fn all_mut(&mut self) -> [&mut Samples; 6] {
        [
            &mut self.clean,
            &mut self.changed,
            &mut self.grown,
            &mut self.before,
            &mut self.during_clean,
            &mut self.during_changed,
        ]
    }
}

/// The values of a round, in the order of [`Figures`].
fn one_round(store: &Store, tree: &Tree, entries: u64, sizes: (u64, u64)) -> Result<[f64; 6]> {
    let (large, small) = sizes;
    let read_all = || -> Result<()> {
        for number in (0..entries).step_by(ENTRIES_OF_PAGE as usize / 2) {
            ensure!(tree.contains(&number.to_be_bytes())?, "entry {number} is missing");
        }
        Ok(())
    };
    read_all()?;
    store.sync()?;
    let (_, before) = with_lookups(tree, entries, || {
        thread::sleep(Duration::from_millis(100));
        Ok(())
    })?;
    let (clean, during_clean) = with_lookups(tree, entries, || Ok(store.resize_pool(small)?))?;
    let start = Instant::now();
    store.resize_pool(large)?;
    let grown = start.elapsed().as_secs_f64();
    read_all()?;
    let all = (0..entries).step_by(ENTRIES_OF_PAGE as usize / 2);
    tree.extend(all.map(|number| (number.to_be_bytes(), VALUE)))?;
    let (changed, during_changed) = with_lookups(tree, entries, || Ok(store.resize_pool(small)?))?;
    store.resize_pool(large)?;
    let milliseconds = [clean, changed, grown].map(|seconds| seconds * 1e3);
    let [clean, changed, grown] = milliseconds;
    Ok([clean, changed, grown, before, during_clean, during_changed])
}

/// Runs something while another thread looks entries up. Returns its seconds, and the 99th
/// percentile of these lookups in microseconds.
fn with_lookups(
    tree: &Tree,
    entries: u64,
    work: impl FnOnce() -> Result<()>,
) -> Result<(f64, f64)> {
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let ended = &ended;
        let lookups = scope.spawn(move || -> Result<Vec<u64>> {
            let mut random = Random::new(1);
            let mut times = Vec::new();
            while !ended.load(Ordering::Relaxed) || times.is_empty() {
                let key = random.below(entries).to_be_bytes();
                let start = Instant::now();
                ensure!(tree.contains(&key)?, "an entry is missing");
                times.push(start.elapsed().as_nanos() as u64);
            }
            times.sort_unstable();
            Ok(times)
        });
        let start = Instant::now();
        let done = work();
        let seconds = start.elapsed().as_secs_f64();
        ended.store(true, Ordering::Relaxed);
        let times = lookups.join().map_err(|_| anyhow!("the thread of lookups panicked"))??;
        done?;
        Ok((seconds, times[times.len() * 99 / 100] as f64 / 1e3))
    })
}
