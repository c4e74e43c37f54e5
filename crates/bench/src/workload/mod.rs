//! Workloads: data to load and operations to run, the same for every engine.
//!
//! A [`Workload`] is plain data, so that it can be sent to the process of the engine. Keys, values
//! and choices follow from the seed alone, so two engines with the same workload get the same data
//! and the same operations.

pub mod blob;
pub mod bulk_readers;
mod drive;
pub mod graph;
pub mod lookup;
pub mod scan;
pub mod tpcc;
pub mod values;
pub mod ycsb;
pub mod zipf;

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

pub use blob::Blob;
pub use bulk_readers::{Beside, BulkReaders};
pub use drive::{Operation, drive, drive_threads};
pub use lookup::Lookup;
pub use scan::Scan;
pub use tpcc::Tpcc;
pub use ycsb::Ycsb;

use crate::engine::Engine;

/// The data to load, and the operations to run on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Workload {
    /// Random point lookups.
    Lookup(Lookup),
    /// YCSB A to F.
    Ycsb(Ycsb),
    /// Range scans.
    Scan(Scan),
    /// Large values.
    Blob(Blob),
    /// TPC-C.
    Tpcc(Tpcc),
    /// Random lookups beside a load.
    BulkReaders(BulkReaders),
}

/// How a workload is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Threads, each with a session of its own.
    pub threads: usize,
    /// How long.
    pub seconds: f64,
    /// The seed of the random numbers.
    pub seed: u64,
}

#[cfg(test)]
impl Plan {
    /// Carries it out, and then for ever longer times, until there were more operations than so
    /// many: a busy machine, or disk, may need more time.
    ///
    /// # Panics
    /// If there never are.
    pub(crate) fn until_more_than(
        &self,
        operations: u64,
        run: impl Fn(&Plan) -> Measured,
    ) -> Measured {
        let plans = (0..4).map(|times| Plan {
            seconds: self.seconds * f64::from(4_u32.pow(times)),
            ..self.clone()
        });
        let mut all = plans.map(|plan| run(&plan));
        all.find(|measured| measured.operations > operations).expect("too few operations")
    }
}

/// The result of a run of a workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Operations of all threads.
    pub operations: u64,
    /// From the first operation to the last.
    pub seconds: f64,
    /// Latencies of a sample of the operations, in nanoseconds.
    pub latency: Latency,
    /// Operations in each tenth of a second.
    pub over_time: Vec<u64>,
    /// Counts of the workload itself, such as transactions by kind.
    pub counts: BTreeMap<String, u64>,
}

impl Measured {
    /// Operations a second.
    pub fn rate(&self) -> f64 {
        self.operations as f64 / self.seconds
    }
}

/// Latencies in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Half of the operations took no longer.
    pub p50: u64,
    /// 99 of 100.
    pub p99: u64,
    /// 999 of 1,000.
    pub p999: u64,
    /// All.
    pub max: u64,
}

/// The operations of every kind of workload.
pub trait Work {
    /// The tables that it needs, in the order of their index.
    fn tables(&self) -> Vec<String>;

    /// Bytes of keys and values that [`load`](Work::load) stores.
    fn bytes(&self) -> u64;

    /// Fills an empty engine.
    ///
    /// # Errors
    /// Errors of the engine.
    fn load(&self, engine: &dyn Engine) -> Result<()>;

    /// Runs operations as planned.
    ///
    /// # Errors
    /// Errors of the engine, and any answer that differs from the loaded data.
    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured>;

    /// Checks the conditions that must hold after runs; returns their names.
    ///
    /// # Errors
    /// The condition that does not hold.
    fn check(&self, _engine: &dyn Engine) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
}

impl Workload {
    /// The operations of this kind.
    pub fn work(&self) -> &dyn Work {
        match self {
            Workload::Lookup(lookup) => lookup,
            Workload::Ycsb(ycsb) => ycsb,
            Workload::Scan(scan) => scan,
            Workload::Blob(blob) => blob,
            Workload::Tpcc(tpcc) => tpcc,
            Workload::BulkReaders(readers) => readers,
        }
    }
}
