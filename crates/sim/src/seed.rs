//! One seed: its workload, and what came of it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::Failure;
use crate::plants::{Plant, Planted};
use crate::report::Report;
use crate::story::with_story;
use crate::{mixed, shop};

/// What a simulation does with a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Any operations, compared with a model of the whole store.
    Mixed,
    /// Transactions of clients of a shop, whose books must balance.
    Shop,
}

impl Workload {
    /// All workloads.
    pub const ALL: [Workload; 2] = [Workload::Mixed, Workload::Shop];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Mixed => "mixed",
            Workload::Shop => "shop",
        }
    }
}

/// What is the same for all seeds of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// The workload; `None` if the seed chooses.
    pub workload: Option<Workload>,
    /// A bug that is switched on.
    pub plant: Option<Plant>,
}

impl Settings {
    /// The workload of a seed.
    pub fn workload_of(&self, seed: u64) -> Workload {
        self.workload.unwrap_or(Workload::ALL[(seed % 2) as usize])
    }
}

/// Runs one seed, and returns its steps as well, a line each.
pub fn run_with_story(seed: u64, settings: &Settings) -> (Result<Report, Failure>, Vec<String>) {
    with_story(|| run(seed, settings))
}

/// Runs one seed.
///
/// # Errors
/// What is wrong. A panic counts as wrong, too.
pub fn run(seed: u64, settings: &Settings) -> Result<Report, Failure> {
    let _planted = Planted::new(settings.plant);
    let simulate = || match settings.workload_of(seed) {
        Workload::Mixed => mixed::run(seed),
        Workload::Shop => shop::run(seed),
    };
    catch_unwind(AssertUnwindSafe(simulate)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Failure::new(format!("a panic: {}", text.unwrap_or("without a message"))))
    })
}
