//! `vellum dax tables`: all tables in the kernel, from the module's self-check.

use std::fs;

use crate::error::{Failure, Outcome};
use crate::output::Output;
use crate::size::show;

/// The module's self-check.
const CHECK: &str = "/sys/kernel/debug/vellum/file-tables";

const HELP: &str = "\
Each line is a table, with all that does not add up: 'wrong leaves' and 'wrong entries' must be 0.
A table that nothing uses is kept for the next use of its file, until the kernel needs the memory or
has the file cached no longer. The last line but one counts these; the module's parameter
dax_kept_kib is their bound, and 0 frees them. The last line counts what 'vellum dax store' has
written and the kernel has found. Only root may run the command.";

/// Check and list all file tables in this kernel
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {}

pub fn run(_: &Arguments) -> Outcome {
    let text = fs::read_to_string(CHECK).map_err(|error| {
        let advice = "load the kernel module (vellum.ko), mount debugfs, and be root";
        Failure::message(format!("{CHECK} cannot be read ({error}): {advice}"))
    })?;
    let mut output = Output::new();
    for line in text.lines() {
        output.line(line)?;
    }
    let tables = vellum_dax::tables().map_err(|error| Failure::message(error.to_string()))?;
    if let Some(tables) = tables {
        output.line(&format!(
            "{} tables, of which {} are kept, in {} of {}; kept ones so far: {} used again, {} \
             gone with their files, {} with the memory",
            tables.tables,
            tables.kept,
            show(tables.kept_bytes),
            show(tables.kept_most),
            tables.resumed,
            tables.evicted,
            tables.reclaimed,
        ))?;
        output.line(&format!(
            "stored tables so far: {} used, {} refused",
            tables.stored_used, tables.stored_refused
        ))?;
    }
    output.finish()
}
