//! Experiments with `/dev/exmap`: figures 9 to 11 of the first paper (SIGMOD'23), 5 to 11 of the
//! second (IEEE Access 2023), and 12 of that.
//!
//! All but reads and lookups are one benchmark, that of the second paper: [`threads`] work on a
//! [`memory`] by a [`pattern`]. Without the module, an experiment says so and has no figures.

mod ablation;
mod affinity;
mod allocation;
mod contest;
mod cost;
mod device;
mod interfaces;
mod lookup;
mod memory;
mod pattern;
mod pool;
mod queue;
mod read;
mod ring;
mod shootdowns;
mod tables;
mod threads;
mod transfer;

use std::time::Duration;

use anyhow::Result;
use vellum_vm::BackendKind;

pub use ablation::ABLATION;
pub use allocation::ALLOCATION;
pub use cost::COST;
pub use interfaces::INTERFACES;
pub use lookup::LOOKUP;
pub use pool::POOL;
pub use read::READ;
pub use tables::TABLES;

use super::Context;
use super::fig4::thread_counts;
use device::{Exmap, Plan};
use memory::{OfExmap, OfKernel, make_tables, shuffle};
use vellum_bench::machine::processors;
use vellum_bench::report::Outcome;

/// Threads that allocate, at most.
const MOST_THREADS: usize = 16;

/// The sizes of an experiment.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Pages of a surface.
    pages: u64,
    /// Frames of a pool.
    frames: u64,
    /// Threads that allocate, at most.
    threads: usize,
    /// How long a sample takes.
    time: Duration,
}

impl Size {
    fn of(context: &Context<'_>) -> Size {
        let threads = processors().min(MOST_THREADS);
        Size {
            pages: context.pick(1 << 21, 1 << 24),
            frames: context.pick(1 << 13, 1 << 14) * threads as u64,
            threads,
            time: Duration::from_millis(context.pick(40, 500)),
        }
    }

    /// Numbers of threads to be measured.
    fn thread_counts(&self) -> Vec<usize> {
        thread_counts(self.threads)
    }

    /// An exmap with these flags.
    fn exmap(&self, flags: u64) -> Result<Exmap> {
        let interfaces = threads::Plan::interfaces(self.threads);
        let (pages, frames) = (self.pages, self.frames);
        Exmap::new(Plan { pages, frames, interfaces, flags, backing: None })
    }

    /// The same as a memory after long use.
    fn memory(&self, flags: u64) -> Result<OfExmap> {
        let memory = OfExmap::new(self.exmap(flags)?);
        make_tables(&memory, self.pages)?;
        shuffle(&memory, self.frames, self.pages, threads::Plan::interfaces(self.threads))?;
        Ok(memory)
    }

    /// A surface of ordinary memory after long use.
    fn kernel_ground(&self, backend: BackendKind) -> Result<OfKernel> {
        let memory = OfKernel::new(self.pages, backend)?;
        make_tables(&memory, self.pages)?;
        Ok(memory)
    }

    fn note(&self) -> String {
        format!(
            "Surface of {} GiB, pool of {} MiB; batches of {} pages.",
            self.pages >> 18,
            self.frames >> 8,
            pattern::BATCH
        )
    }
}

/// The outcome of an experiment on a machine without the module.
fn without_module() -> Outcome {
    let note = "Needs Vellum's kernel module: there is no /dev/exmap, so there are no figures.";
    Outcome { notes: vec![note.to_owned()], ..Outcome::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ALL;
    use vellum_bench::engine::Engines;
    use vellum_bench::progress::Progress;

    #[test]
    fn without_the_module_an_experiment_says_so_and_does_not_fail() {
        if device::is_there() {
            return;
        }
        let engines = Engines::new(&[]);
        let directory = tempfile::tempdir().unwrap();
        let context = Context {
            quick: true,
            directory: directory.path().to_owned(),
            engines: &engines,
            device: None,
            model: None,
            progress: Progress::hidden(),
        };
        let ours = ALL.iter().filter(|experiment| experiment.name.starts_with("exmap-"));
        let mut count = 0;
        for experiment in ours {
            let outcome = (experiment.run)(&context).unwrap();
            assert!(outcome.rows.is_empty() && outcome.charts.is_empty(), "{}", experiment.name);
            assert!(outcome.notes.len() == 1 && outcome.notes[0].contains("module"));
            count += 1;
        }
        assert_eq!(count, 8);
    }
}
