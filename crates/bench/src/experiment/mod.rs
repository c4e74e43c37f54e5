//! The experiments by name, and what they get to run with.
//!
//! One file each. An experiment measures and returns an [`Outcome`]; it prints nothing.

mod blob;
mod disk;
mod exmap;
mod fig10;
mod fig4;
mod fig8;
mod graph;
mod hero;
mod in_memory;
mod in_memory_scaling;
mod memory;
mod morsel;
mod out_of_memory;
mod page_access;
mod policy;
mod progress;
mod states;
mod table2;
mod tpcc;
mod writers;
mod ycsb;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use progress::Progress;

use crate::engine::Engines;
use crate::report::Outcome;

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it shows, in a line.
    pub shows: &'static str,
    /// The paper's table or figure, or what else it answers to.
    pub source: &'static str,
    /// Runs it.
    pub run: fn(&Context<'_>) -> Result<Outcome>,
}

/// All experiments, in the order of `vellum bench list`.
pub const ALL: &[Experiment] = &[
    table2::TABLE2,
    states::STATES,
    fig4::FIG4,
    fig10::FIG10,
    graph::GRAPH,
    ycsb::YCSB,
    blob::BLOB,
    memory::MEMORY,
    policy::POLICY,
    in_memory_scaling::FIG7,
    fig8::FIG8,
    in_memory::IN_MEMORY,
    out_of_memory::OUT_OF_MEMORY,
    disk::DISK,
    writers::WRITERS,
    tpcc::TPCC,
    hero::HERO,
    exmap::ALLOCATION,
    exmap::INTERFACES,
    exmap::TABLES,
    exmap::POOL,
    exmap::ABLATION,
    exmap::READ,
    exmap::LOOKUP,
    exmap::COST,
    morsel::MORSEL_LOAD,
    morsel::MORSEL_START,
    morsel::MORSEL_MAP,
    morsel::MORSEL_PIPELINE,
];

/// What an experiment runs with.
#[derive(Debug)]
pub struct Context<'a> {
    /// The short form: under 40 seconds, smaller data, fewer rounds.
    pub quick: bool,
    /// Where files may be made, on the storage under test. Removed afterwards.
    pub directory: PathBuf,
    /// The block device to read from, for experiments that take one.
    pub device: Option<PathBuf>,
    /// The file that processes load, for experiments that take one.
    pub model: Option<PathBuf>,
    /// Vellum and the peers that were built in.
    pub engines: &'a Engines,
    /// Where it stands.
    pub progress: Progress,
}

impl Context<'_> {
    /// `long`, or `short` in the short form.
    pub fn pick<T>(&self, short: T, long: T) -> T {
        if self.quick { short } else { long }
    }

    /// Rounds of alternation.
    pub fn rounds(&self) -> usize {
        self.pick(3, 5)
    }

    /// A directory of its own for `what`, made now.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn make_directory(&self, what: &str) -> Result<PathBuf> {
        let path = self.directory.join(what);
        make(&path)?;
        Ok(path)
    }
}

fn make(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path)
        .map_err(|error| anyhow::anyhow!("cannot make {}: {error}", path.display()))
}

/// `1 thread`, `2 threads`.
fn count(number: usize, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}
