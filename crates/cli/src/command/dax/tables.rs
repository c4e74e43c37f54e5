//! `vellum dax tables`: all tables in the kernel, from the module's self-check.

use std::fs;

use crate::error::{Failure, Outcome};
use crate::output::Output;

/// The module's self-check.
const CHECK: &str = "/sys/kernel/debug/vellum/file-tables";

const HELP: &str = "\
Each line is a table, with all that does not add up: 'wrong leaves' and 'wrong entries' must be 0.
Only root may read it.";

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
    output.finish()
}
