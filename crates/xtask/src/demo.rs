//! `cargo xtask demo`: the release binary's demonstration.

use std::path::Path;

use crate::setup;
use crate::workspace::{Outcome, cargo};

/// Builds the release binary and runs `vellum demo` with `arguments`.
///
/// # Errors
/// When something is missing, the build fails or the demonstration finds a difference.
pub fn run(root: &Path, arguments: &[String]) -> Outcome {
    setup::ensure(setup::Need::Build)?;
    let mut command = cargo(root);
    command.args(["run", "--release", "--package", "vellum-cli", "--bin", "vellum"]);
    command.args(["--", "demo"]).args(arguments);
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("vellum demo: {status}")) }
}
