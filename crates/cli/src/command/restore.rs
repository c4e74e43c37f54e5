//! `vellum restore`: makes a store of a backup and its increments.

use std::path::PathBuf;

use serde_json::json;
use vellum::RestoreOptions;

use crate::command::backup::with_progress;
use crate::error::{AtStore, Outcome};
use crate::output::Output;
use crate::{interrupt, size};

const HELP: &str = "\
Examples:
  vellum restore --to notes.vellum sunday.vellum
  vellum restore --to notes.vellum sunday.vellum monday.vinc tuesday.vinc

Give the full backup first, and then all increments up to the wanted one, in the order in which
they were made. A file that is damaged, or that does not follow the one before it, is refused.
STORE gets its name when it is complete, durable and checked; after an error, or Ctrl-C, there is no
new file. A STORE that exists is replaced with --force only. If its process crashed, move it and the
folder STORE.log away together first: they may be worth recovering, and the restored store cannot be
changed while the log of the other one lies beside it.";

/// Make a store of a backup and its increments
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// The store file to make
    #[arg(long, value_name = "STORE")]
    to: PathBuf,

    /// The full backup
    backup: PathBuf,

    /// The increments that follow it, in their order
    #[arg(value_name = "INCREMENT")]
    increments: Vec<PathBuf>,

    /// Replace STORE if it exists
    #[arg(long)]
    force: bool,

    /// Do not read STORE again to check every page
    #[arg(long)]
    no_check: bool,

    /// Machine-readable output
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// When a backup is damaged or does not follow the one before, or the store cannot be written.
pub fn run(arguments: &Arguments) -> Outcome {
    interrupt::watch()?;
    let Arguments { to, backup, increments, force, no_check, json } = arguments;
    let options = RestoreOptions::new().replace(*force).check(!no_check);
    let restored = with_progress("restore", |progress| {
        vellum::restore(to, backup, increments, &options, progress)
    });
    if restored.is_err() {
        // A signal, and not the function that it cancelled, is the cause.
        interrupt::check()?;
    }
    let report = restored.at(to)?;
    let mut output = Output::new();
    if *json {
        let report = json!({
            "store_id": format!("{:032x}", report.store_id),
            "lsn": report.lsn,
            "file_bytes": report.file_bytes,
            "increments": increments.len(),
            "checked": !no_check,
            "seconds": report.duration.as_secs_f64(),
        });
        output.line(&report.to_string())?;
        return output.finish();
    }
    let (shown, bytes) = (to.display(), size::show(report.file_bytes));
    let checked = if *no_check { "not checked" } else { "checked: sound" };
    output.line(&format!("{shown}: {bytes}; {checked}"))?;
    output.finish()
}
