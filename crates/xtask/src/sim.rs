//! `cargo xtask sim`: the simulator, in a build of its own.

use std::path::Path;
use std::process::Command;

use crate::setup;
use crate::workspace::{Outcome, cargo};

/// Builds the release binary with the simulator and runs `vellum sim` with `arguments`.
///
/// # Errors
/// When something is missing, the build fails or a seed does.
pub fn run(root: &Path, arguments: &[String]) -> Outcome {
    setup::ensure(setup::Need::Build)?;
    let mut command = command(root);
    command.args(arguments);
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("vellum sim: {status}")) }
}

/// The command without its arguments. The build has a folder of its own: what lies in the usual one
/// has no planted bugs.
pub fn command(root: &Path) -> Command {
    let mut command = cargo(root);
    command.args(["run", "--release", "--package", "vellum-cli", "--bin", "vellum"]);
    command.args(["--features", "sim", "--target-dir", "target/sim", "--", "sim"]);
    command
}
