//! Backups of a store in use: how long increments take, and what a backup costs those who commit.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use vellum::{BackupOptions, BackupReport, Error, Options, Store, Tree};

use super::durable::{self, Commit, rates_and_latencies};
use super::{Context, Experiment};
use vellum_bench::measure::Samples;
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::{Random, fill, key};

/// The experiment.
pub const BACKUPS: Experiment = Experiment {
    name: "backups",
    shows: "increments that read all or what was written, and commits beside a backup",
    source: "what a backup costs, and those who use the store meanwhile",
    run,
};

const VALUE: usize = 120;
const WRITERS: u64 = 2;
/// The limit of a backup that is to spare others.
const RATE: u64 = 64 << 20;
/// One of so many entries changes before an increment.
const CHANGED: [(u64, &str); 3] = [(10_000, "0.01 %"), (1000, "0.1 %"), (100, "1 %")];

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries = context.pick(50_000, 5_000_000);
    let setup = Setup::new(context, entries)?;
    let mut outcome = Outcome::default();
    for (at, (share, name)) in CHANGED.into_iter().enumerate() {
        outcome.rows.extend(setup.increments(context, at, share, name)?);
    }
    let duration = Duration::from_secs_f64(context.pick(0.3, 4.0));
    let ways = [
        ("alone", None),
        ("beside full backups", Some(BackupOptions::new())),
        ("beside full backups at 64 MiB/s", Some(BackupOptions::new().bytes_per_second(RATE))),
    ];
    let setup = &setup;
    let ways = ways.map(|(name, backups)| durable::Way {
        name: format!("commits, {name}"),
        threads: WRITERS,
        commit: Box::new(move |thread| setup.commit(thread, backups.clone())),
    });
    outcome.rows.extend(rates_and_latencies(context, &ways, "commits/s", duration)?);
    outcome.notes.push(format!(
        "A store of {entries} entries with values of {VALUE} bytes and a log, all in memory; the \
         file was just written or read, so that the kernel may have it. An increment follows the \
         one before, after random entries were replaced; it is not checked. {WRITERS} threads \
         replace a random value each in a synced transaction, alone, and while full backups, which \
         are checked, follow one another on the same disk. Ratios are to the first row of each \
         group."
    ));
    Ok(outcome)
}

struct Setup {
    store: Arc<Store>,
    tree: Tree,
    entries: u64,
    directory: PathBuf,
}

impl Setup {
    fn new(context: &Context<'_>, entries: u64) -> Result<Setup> {
        let directory = context.make_directory("backups")?;
        let options = Options::new().pool_bytes((entries * 400).max(64 << 20)).log(true);
        let store = Store::create(directory.join("store"), &options)?;
        let tree = store.create_tree("data")?;
        tree.bulk_load((0..entries).map(|number| (key(number).to_vec(), value(number))))?;
        store.sync()?;
        Ok(Setup { store: Arc::new(store), tree, entries, directory })
    }

    /// Increments after one of `share` entries was replaced, which read all pages, and which do
    /// not, in turn.
    fn increments(
        &self,
        context: &Context<'_>,
        at: usize,
        share: u64,
        name: &str,
    ) -> Result<Vec<Row>> {
        let series = |what: &str| Samples::new(format!("increment, {name} changed, {what}"));
        let mut seconds = [series("reads all"), series("reads what was written")];
        let mut read = [series("all"), series("what was written")];
        let full = self.directory.join(format!("full {share}"));
        let mut last = full.clone();
        self.store.backup(&full, &BackupOptions::new().check(false), &mut goes_on)?;
        let mut random = Random::new(share);
        for round in 0..=context.rounds() {
            let steps = context.rounds() + 1;
            context.progress.at(at * steps + round, CHANGED.len() * steps, name);
            for (way, read_all) in [true, false].into_iter().enumerate() {
                for _ in 0..(self.entries / share).max(1) {
                    let number = random.below(self.entries);
                    self.tree.upsert(&key(number), &value(number + 1))?;
                }
                self.store.sync()?;
                let next = self.directory.join(format!("increment {share} {round} {way}"));
                let options = BackupOptions::new().since(&last).read_all(read_all).check(false);
                let report = self.store.backup(&next, &options, &mut goes_on)?;
                // The first round does not count: it reads the full backup.
                if round > 0 {
                    let BackupReport { duration, read_bytes, .. } = report;
                    seconds[way].values.push(duration.as_secs_f64());
                    read[way].values.push(read_bytes as f64 / f64::from(1 << 20));
                    std::fs::remove_file(&last)?;
                }
                last = next;
            }
        }
        std::fs::remove_file(&last)?;
        let ratios = seconds[0].ratio_to(&seconds[1]);
        let rows = seconds.iter().map(|of| Row::of(of, "s"));
        let rows = rows.chain([Row::of(&ratios, "x")]);
        Ok(rows.chain(read.iter().map(|of| Row::of(of, "MiB read"))).collect())
    }

    /// The transaction that the thread of this number repeats. While the first thread has it,
    /// backups are made.
    fn commit(&self, thread: u64, backups: Option<BackupOptions>) -> Result<Commit<'_>> {
        let mut random = Random::new(thread);
        let backups = backups.filter(|_| thread == 0);
        let backups = backups.map(|options| Backups::start(&self.store, &self.directory, options));
        Ok(Box::new(move || {
            backups.iter().try_for_each(Backups::expect_running)?;
            let number = random.below(self.entries);
            let (key, value) = (key(number), value(number + 1));
            Ok(self.store.transact(|transaction| transaction.put(&self.tree, &key, &value))?)
        }))
    }
}

/// A thread that makes full backups, one after the other. Dropped, it ends.
struct Backups {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

impl Backups {
    fn start(store: &Arc<Store>, directory: &Path, options: BackupOptions) -> Backups {
        let (stop, store) = (Arc::new(AtomicBool::new(false)), store.clone());
        let (asked, path) = (stop.clone(), directory.join("beside"));
        let options = options.replace(true);
        let thread = thread::spawn(move || {
            loop {
                let backup =
                    store.backup(&path, &options, &mut |_| match asked.load(Ordering::Relaxed) {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    });
                match backup {
                    Err(Error::Cancelled) => return Ok(()),
                    Err(error) => return Err(error),
                    Ok(_) => {}
                }
            }
        });
        Backups { stop, thread: Some(thread) }
    }

    fn expect_running(&self) -> Result<()> {
        match self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            true => Ok(()),
            false => Err(anyhow!("the backup beside the commits has failed")),
        }
    }
}

impl Drop for Backups {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn goes_on(_: vellum::BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    value
}
