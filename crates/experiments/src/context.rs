//! An experiment, and the context in which it runs.

use std::path::{Path, PathBuf};

use anyhow::Result;

use vellum_bench::engine::Engines;
use vellum_bench::progress::Progress;
use vellum_bench::report::Outcome;

/// An experiment.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// Its name on the command line.
    pub name: &'static str,
    /// One line that says what it shows.
    pub shows: &'static str,
    /// The paper's table or figure, or another question that it answers.
    pub source: &'static str,
    /// Runs it.
    pub run: fn(&Context<'_>) -> Result<Outcome>,
}

/// The context of an experiment.
#[derive(Debug)]
pub struct Context<'a> {
    /// The short form: under 40 seconds, smaller data, fewer rounds.
    pub quick: bool,
    /// The folder for files, on the storage under test. It is removed afterwards.
    pub directory: PathBuf,
    /// The block device to read from, for experiments that take one.
    pub device: Option<PathBuf>,
    /// The file that processes load, for experiments that take one.
    pub model: Option<PathBuf>,
    /// Vellum and the peers that were built in.
    pub engines: &'a Engines,
    /// Its progress.
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

    /// A new directory for `what`.
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
pub(crate) fn count(number: usize, of: &str) -> String {
    format!("{number} {of}{}", if number == 1 { "" } else { "s" })
}
