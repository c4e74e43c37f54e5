//! Recovery after a crash, compared with the load that wrote the log.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, ensure};
use vellum::{Durability, Options, Store, TransactionOptions, Tree};

use super::{Context, Experiment};
use vellum_bench::machine::page_cache;
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::{Random, fill, is_of, key};

/// The experiment.
pub const RECOVERY: Experiment = Experiment {
    name: "recovery",
    shows: "the time to recover a store after a crash, against the load that wrote the log",
    source: "how long a crash keeps a store from its users",
    run,
};

const VALUE: usize = 120;
/// Threads of the load.
const THREADS: u64 = 2;
/// Entries that a transaction of the load changes.
const CHANGES: u64 = 10;
/// The log is never so long, so no checkpoint shortens what there is to recover.
const LOG_BYTES: u64 = 8 << 30;

/// What the load does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Load {
    /// Replaces random values, each by a put on its own.
    Puts,
    /// Replaces random values in transactions, buffered.
    Transactions,
    /// Stores new entries in the order of their keys, each by a put on its own.
    Inserts,
}

const LOADS: [(&str, Load); 3] = [
    ("random puts", Load::Puts),
    ("transactions of 10 puts", Load::Transactions),
    ("ascending inserts", Load::Inserts),
];

struct Scale {
    entries: u64,
    /// Entries that the load changes.
    changes: u64,
}

fn run(context: &Context<'_>) -> Result<Outcome> {
    let scale = Scale {
        entries: context.pick(50_000, 1_000_000),
        changes: context.pick(50_000, 2_000_000),
    };
    let mut outcome = Outcome::default();
    for (at, (name, load)) in LOADS.into_iter().enumerate() {
        let series = |what: &str| Samples::new(format!("{name}, {what}"));
        let (mut loads, mut recoveries) = (series("load"), series("recovery"));
        let mut log_mib = series("log");
        for round in 0..=context.rounds() {
            let steps = LOADS.len() * (context.rounds() + 1);
            context.progress.at(at * (context.rounds() + 1) + round, steps, name);
            let sample = sample(&context.make_directory("recovery")?, load, &scale)?;
            // The first round does not count.
            if round > 0 {
                loads.values.push(sample.load);
                recoveries.values.push(sample.recovery);
                log_mib.values.push(sample.log_bytes as f64 / f64::from(1 << 20));
            }
        }
        outcome.rows.push(Row::of(&loads, "s"));
        outcome.rows.push(Row::of(&recoveries, "s"));
        outcome.rows.push(Row::of(&loads.ratio_to(&recoveries), "x"));
        outcome.rows.push(Row::of(&log_mib, "MiB"));
    }
    outcome.notes.push(format!(
        "{THREADS} threads make {} changes in a store of {} entries with values of {VALUE} bytes \
         and a log, all in memory; then the log is synced. The file and the log are copied, as a \
         crash would leave them, and the copy is opened with nothing in the page cache. No \
         checkpoint shortens the log. The time of a recovery is that of the whole opening. The \
         store has all changes then. It goes on with the pages that recovery made in memory, so \
         its file needs the log until the next checkpoint.",
        scale.changes, scale.entries
    ));
    Ok(outcome)
}

/// Seconds, and the length of the log that was recovered.
struct Sample {
    load: f64,
    recovery: f64,
    log_bytes: u64,
}

fn sample(directory: &Path, load: Load, scale: &Scale) -> Result<Sample> {
    let (live, crashed) = (directory.join("live"), directory.join("crashed"));
    for folder in [&live, &crashed] {
        std::fs::create_dir_all(folder)?;
    }
    let pool = (scale.entries + scale.changes) * 400;
    let options = Options::new().pool_bytes(pool.max(64 << 20)).log(false);
    let store = Store::create(live.join("store"), &options)?;
    let tree = store.create_tree("data")?;
    tree.bulk_load((0..scale.entries).map(|number| (key(number).to_vec(), value(number))))?;
    drop(tree);
    store.close()?;

    let options = options.log(true).log_bytes(LOG_BYTES);
    let store = Store::open(live.join("store"), &options)?;
    let tree = store.tree("data")?;
    let began = Instant::now();
    change(&store, &tree, load, scale)?;
    store.sync()?;
    let load_seconds = began.elapsed().as_secs_f64();

    copy(&live, &crashed)?;
    drop(tree);
    store.close()?;
    page_cache::drop_cached(&crashed)?;
    let began = Instant::now();
    let store = Store::open(crashed.join("store"), &options)?;
    let recovery = began.elapsed().as_secs_f64();
    let report = store.recovery().context("the copy needed no recovery")?;
    expect_all(&store.tree("data")?, load, scale)?;
    store.close()?;
    std::fs::remove_dir_all(directory)?;
    Ok(Sample { load: load_seconds, recovery, log_bytes: report.log_bytes })
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    value
}

/// Makes the changes, by several threads.
fn change(store: &Store, tree: &Tree, load: Load, scale: &Scale) -> Result<()> {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (next, random) = (&next, Random::new(thread));
                scope.spawn(move || change_by_one(store, tree, load, scale, next, random))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| anyhow!("a thread of the load panicked"))?
        })
    })
}

fn change_by_one(
    store: &Store,
    tree: &Tree,
    load: Load,
    scale: &Scale,
    next: &AtomicU64,
    mut random: Random,
) -> Result<()> {
    let buffered = TransactionOptions::new().durability(Durability::Buffered);
    loop {
        let first = next.fetch_add(CHANGES, Ordering::Relaxed);
        if first >= scale.changes {
            return Ok(());
        }
        match load {
            Load::Puts => (0..CHANGES).try_for_each(|_| {
                let number = random.below(scale.entries);
                tree.upsert(&key(number), &value(number)).map(drop)
            })?,
            Load::Inserts => (first..first + CHANGES).try_for_each(|number| {
                let number = scale.entries + number;
                tree.upsert(&key(number), &value(number)).map(drop)
            })?,
            Load::Transactions => {
                let numbers: Vec<u64> = (0..CHANGES).map(|_| random.below(scale.entries)).collect();
                store.transact_with(buffered, |transaction| {
                    numbers
                        .iter()
                        .try_for_each(|&number| transaction.put(tree, &key(number), &value(number)))
                })?;
            }
        }
    }
}

/// Copies a folder with its files and folders.
fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)
                .with_context(|| format!("cannot copy {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// Asserts that the entries are there, and sound.
fn expect_all(tree: &Tree, load: Load, scale: &Scale) -> Result<()> {
    let inserted = if load == Load::Inserts { scale.changes } else { 0 };
    for number in 0..scale.entries + inserted {
        let value = tree.get(&key(number))?;
        let value = value.with_context(|| format!("entry {number} is lost"))?;
        ensure!(is_of(number, &value), "entry {number} has a wrong value");
    }
    Ok(())
}
