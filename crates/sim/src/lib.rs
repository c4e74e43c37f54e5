//! A deterministic simulator: stores that lose power at any operation, from one seed.
//!
//! One thread runs a workload on a store whose file and log are a [machine](machine::Machine) in
//! memory. The machine loses power or its process is killed at any operation, also of a recovery.
//! It fails reads, writes and syncs, and its disk and its log run full. After each recovery the
//! store must be sound, and a workload's model says what it must have and what it may have. The
//! seed alone decides what happens, so a failure is replayed by its seed.
//!
//! There are two [workloads](Workload), which know nothing of each other. [`PLANTS`] are bugs that
//! the simulator must find: [`run`] switches one on, and a test counts the seeds that it takes.
//!
//! ```
//! use vellum_sim::{Settings, Workload, run, run_with_story};
//!
//! let settings = Settings { workload: Some(Workload::Shop), plant: None };
//! let report = run(7, &settings)?;
//! assert!(report.crashes > 0 && report.commits > 0);
//!
//! // The seed decides everything: the same one does the same, step by step.
//! let (again, story) = run_with_story(7, &settings);
//! assert_eq!(again?.trace, report.trace);
//! assert!(!story.is_empty());
//! # Ok::<(), vellum_sim::Failure>(())
//! ```

mod backups;
mod compactions;
mod failure;
mod keys;
mod machine;
mod mixed;
mod model;
mod plants;
mod recovery;
mod report;
mod seed;
mod shop;
mod slow;
mod story;
mod transactions;
mod variety;

pub use failure::Failure;
pub use machine::{Crash, End, Fault, Machine};
pub use plants::{PLANTS, Plant, SEEDS};
pub use recovery::{Recovered, Sizes};
pub use report::Report;
pub use seed::{Settings, Workload, run, run_with_story};
