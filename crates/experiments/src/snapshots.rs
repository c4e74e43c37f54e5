//! Writers while a snapshot is held: for a moment, and for ten minutes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use vellum::{Durability, Options, Snapshot, Store, TransactionOptions, Tree};

use super::{Context, Experiment};
use vellum_bench::measure::{Contestant, Samples, alternate};
use vellum_bench::report::{Outcome, Row};
use vellum_bench::workload::values::{Random, fill, is_of, key};

/// The experiment.
pub const SNAPSHOTS: Experiment = Experiment {
    name: "snapshots",
    shows: "what a snapshot that is held costs writers, for a moment and for ten minutes",
    source: "whether views of the past slow the present down",
    run,
};

const VALUE: usize = 120;
/// Threads that write.
const WRITERS: u64 = 2;

/// What the writers repeat.
#[derive(Clone, Copy)]
enum Work {
    /// A put on its own.
    Put,
    /// A transaction that reads and replaces five values, not logged.
    Transaction,
}

const WORKS: [(&str, Work); 2] = [("puts", Work::Put), ("transactions", Work::Transaction)];

/// Who has a snapshot meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    No,
    Yes,
    /// A thread reads all of it, again and again, with a pause as long as each scan.
    Read,
}

const HELD: [(&str, Held); 3] =
    [("no snapshot", Held::No), ("a snapshot", Held::Yes), ("a snapshot that is read", Held::Read)];

fn run(context: &Context<'_>) -> Result<Outcome> {
    let entries = context.pick(20_000, 200_000);
    let duration = Duration::from_secs_f64(context.pick(0.3, 3.0));
    let setup = Setup::new(context, entries)?;
    let mut outcome = Outcome::default();
    for (work_name, work) in WORKS {
        let contestants = HELD.map(|(name, held)| {
            let setup = &setup;
            Contestant::new(format!("{work_name}, {name}"), move || {
                setup.with(held, || setup.rate(work, duration))
            })
        });
        let rates = alternate(context.rounds(), &context.progress, contestants.into())?;
        let unit = format!("{work_name}/s");
        outcome.rows.extend(rates.iter().map(|of| Row::of(of, &unit).against(of, &rates[0])));
    }
    for (work_name, work) in WORKS {
        outcome.rows.extend(setup.hold_long(context, work_name, work)?);
    }
    outcome.notes.push(format!(
        "{WRITERS} threads replace random values among {entries} of {VALUE} bytes, all in memory, \
         no log: by a put each, or in serializable transactions that read and replace five. The \
         old value of each entry that is replaced while a snapshot is held stays in memory once."
    ));
    Ok(outcome)
}

struct Setup {
    store: Store,
    tree: Tree,
    entries: u64,
}

impl Setup {
    fn new(context: &Context<'_>, entries: u64) -> Result<Setup> {
        let options = Options::new().pool_bytes(1 << 30).log(false);
        let store = Store::create(context.make_directory("snapshots")?.join("store"), &options)?;
        let tree = store.create_tree("data")?;
        tree.bulk_load((0..entries).map(|number| (key(number).to_vec(), value(number))))?;
        Ok(Setup { store, tree, entries })
    }

    /// Runs `work` while a snapshot is held, or not.
    fn with<T>(&self, held: Held, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if held == Held::No {
            return work();
        }
        let snapshot = self.store.snapshot()?;
        if held == Held::Yes {
            return work();
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    self.read_all(&snapshot)?;
                    std::thread::sleep(began.elapsed());
                }
                anyhow::Ok(())
            });
            let done = work();
            stop.store(true, Ordering::Relaxed);
            reader.join().map_err(|_| anyhow!("the reader of the snapshot panicked"))??;
            done
        })
    }

    /// Asserts that the snapshot still has every entry.
    fn read_all(&self, snapshot: &Snapshot) -> Result<()> {
        let mut count = 0;
        for entry in snapshot.entries(&self.tree)? {
            let (key, value) = entry?;
            let number = key.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
            let number = number.context("a key of another length")?;
            ensure!(is_of(number, &value), "entry {number} has a wrong value");
            count += 1;
        }
        ensure!(count == self.entries, "a snapshot has {count} of {} entries", self.entries);
        Ok(())
    }

    /// Operations a second of all writers.
    fn rate(&self, work: Work, duration: Duration) -> Result<f64> {
        let (began, done) = (Instant::now(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS)
                .map(|thread| {
                    let (done, random) = (&done, Random::new(thread));
                    scope.spawn(move || {
                        let count = self.write(work, random, || began.elapsed() < duration)?;
                        done.fetch_add(count, Ordering::Relaxed);
                        anyhow::Ok(())
                    })
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a writer panicked"))?)
        })?;
        Ok(done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64())
    }

    /// The work of one thread. Returns the number of operations.
    fn write(
        &self,
        work: Work,
        mut random: Random,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<u64> {
        let options = TransactionOptions::new().durability(Durability::None);
        let mut count = 0;
        while go_on() {
            match work {
                Work::Put => {
                    let number = random.below(self.entries);
                    self.tree.upsert(&key(number), &value(number))?;
                }
                Work::Transaction => {
                    let numbers = [(); 5].map(|()| random.below(self.entries));
                    self.store.transact_with(options, |transaction| {
                        numbers.iter().try_for_each(|&number| {
                            transaction
                                .update(&self.tree, &key(number), |value| Some(value?.to_vec()))
                                .map(drop)
                        })
                    })?;
                }
            }
            count += 1;
        }
        Ok(count)
    }

    /// Holds one snapshot for long: the rates at its beginning and at its end, and after it.
    fn hold_long(&self, context: &Context<'_>, work_name: &str, work: Work) -> Result<Vec<Row>> {
        let (minutes, parts) = context.pick((0.01, 3), (10.0, 20));
        let part = Duration::from_secs_f64(minutes * 60.0 / f64::from(parts));
        let before = self.rate(work, part)?;
        let mut rates = Samples::new(format!("{work_name}, a snapshot of {minutes} minutes"));
        self.with(Held::Yes, || {
            for number in 0..parts {
                context.progress.note_distance();
                context.progress.at(number as usize, parts as usize, &rates.name);
                rates.values.push(self.rate(work, part)?);
            }
            Ok(())
        })?;
        let after = self.rate(work, part)?;
        let without = f64::midpoint(before, after);
        let unit = format!("{work_name}/s");
        let last = rates.values.last().copied().unwrap_or(f64::NAN);
        let name = |what: &str| format!("{}, {what}", rates.name);
        Ok(vec![
            Row::of(&rates, &unit).with_ratio(rates.median() / without, "before and after it"),
            Row::count(name("its last part"), last, &unit)
                .with_ratio(last / without, "before and after it"),
            Row::count(name("before it"), before, &unit),
            Row::count(name("after it"), after, &unit),
        ])
    }
}

fn value(number: u64) -> Vec<u8> {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    value
}
