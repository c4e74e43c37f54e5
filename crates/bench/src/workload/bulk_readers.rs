//! Random lookups, alone and while another thread loads sorted entries into the same store.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use serde::{Deserialize, Serialize};

use super::lookup::VALUE;
use super::values::{fill, key};
use super::{Lookup, Measured, Plan, Work};
use crate::engine::{BulkWork, Engine, Pair};

/// Entries that one call appends to the table that the readers use.
const CHUNK: u64 = 1000;

/// The table that the readers use.
const READ: usize = 0;

/// The table that the load fills. It is empty before each run.
const LOADED: usize = 1;

/// What another thread does while the readers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Beside {
    /// Nothing: there is no other thread.
    Nothing,
    /// It makes the entries of a load and stores none: what a busy processor costs.
    Entries,
    /// It fills another table, which is empty, by a bulk load.
    OtherTable,
    /// It appends sorted entries to the table that the readers use. A bulk load needs an empty one.
    SameTable,
}

/// Random lookups over keys 0, 1, 2, ..., beside a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BulkReaders {
    /// Entries in the table that the readers use.
    pub entries: u64,
    /// What goes on meanwhile.
    pub beside: Beside,
}

/// The name of the count of entries that the load took while the readers ran.
pub const COUNT: &str = "loaded";

impl Work for BulkReaders {
    fn tables(&self) -> Vec<String> {
        vec!["data".to_owned(), "loaded".to_owned()]
    }

    fn bytes(&self) -> u64 {
        self.lookup().bytes()
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        self.lookup().load(engine)
    }

    /// Runs the readers twice. The first run does not count: it brings back what the load of an
    /// earlier run has evicted.
    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        let lookup = self.lookup();
        lookup.run(engine, &Plan { seed: !plan.seed, ..plan.clone() })?;
        if self.beside == Beside::Nothing {
            return lookup.run(engine, plan);
        }
        let (stop, taken) = (AtomicBool::new(false), AtomicU64::new(0));
        let measured = thread::scope(|scope| {
            let loader = scope.spawn(|| self.work_beside(engine, &stop, &taken));
            while taken.load(Ordering::Relaxed) == 0 && !loader.is_finished() {
                thread::sleep(Duration::from_micros(100));
            }
            let before = taken.load(Ordering::Relaxed);
            let mut measured = lookup.run(engine, plan);
            let during = taken.load(Ordering::Relaxed) - before;
            stop.store(true, Ordering::Relaxed);
            loader.join().map_err(|_| anyhow!("the thread of the load panicked"))??;
            if let Ok(measured) = &mut measured {
                measured.counts.insert(COUNT.to_owned(), during);
            }
            measured
        })?;
        self.remove_loaded(engine)?;
        Ok(measured)
    }
}

impl BulkReaders {
    fn lookup(&self) -> Lookup {
        Lookup { entries: self.entries, batch: 1 }
    }

    /// Works until `stop` is set, and counts the entries that it has made.
    fn work_beside(&self, engine: &dyn Engine, stop: &AtomicBool, taken: &AtomicU64) -> Result<()> {
        let go_on = || !stop.load(Ordering::Relaxed);
        let numbers = (0..).take_while(|_| go_on()).inspect(|_| {
            taken.fetch_add(1, Ordering::Relaxed);
        });
        match self.beside {
            Beside::Nothing => Ok(()),
            Beside::Entries => {
                numbers.map(pair).for_each(|pair| drop(std::hint::black_box(pair)));
                Ok(())
            }
            Beside::OtherTable => engine.load(LOADED, &mut numbers.map(pair)),
            Beside::SameTable => {
                let mut first = self.entries;
                while go_on() {
                    let chunk: Vec<Pair> = (first..first + CHUNK).map(pair).collect();
                    engine.bulk(READ, &BulkWork::Append(&chunk))?.context("it cannot append")?;
                    first += CHUNK;
                    taken.fetch_add(CHUNK, Ordering::Relaxed);
                }
                Ok(())
            }
        }
    }

    /// Makes the tables what they were before the load.
    fn remove_loaded(&self, engine: &dyn Engine) -> Result<()> {
        let (table, first) = match self.beside {
            Beside::Nothing | Beside::Entries => return Ok(()),
            Beside::OtherTable => (LOADED, 0),
            Beside::SameTable => (READ, self.entries),
        };
        let range = BulkWork::RemoveRange(&key(first), &key(u64::MAX));
        engine.bulk(table, &range)?.context("it cannot remove a range")?;
        engine.settle()
    }
}

fn pair(number: u64) -> Pair {
    let mut value = vec![0; VALUE];
    fill(number, &mut value);
    (key(number).to_vec(), value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Setting, VELLUM};

    #[test]
    fn readers_find_everything_beside_each_load_and_the_load_goes_again() {
        for pool in [1 << 20, 64 << 20] {
            let directory = tempfile::tempdir().unwrap();
            let work = |beside| BulkReaders { entries: 30_000, beside };
            let tables = work(Beside::Nothing).tables();
            let setting = Setting { tables, ..Setting::new(directory.path(), pool) };
            let engine = (VELLUM.open)(&setting).unwrap();
            work(Beside::Nothing).load(&*engine).unwrap();
            let plan = Plan { threads: 1, seconds: 0.05, seed: 1 };
            let all =
                [Beside::Nothing, Beside::Entries, Beside::OtherTable, Beside::SameTable].repeat(2);
            for beside in all {
                let measured = work(beside).run(&*engine, &plan).unwrap();
                assert!(measured.operations > 0, "{beside:?}");
                assert_eq!(measured.counts.contains_key(COUNT), beside != Beside::Nothing);
                let count = |table| engine.bulk(table, &BulkWork::Count).unwrap();
                assert_eq!((count(READ), count(LOADED)), (Some(30_000), Some(0)), "{beside:?}");
            }
        }
    }
}
