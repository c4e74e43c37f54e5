//! `cargo xtask bench`: the release binary's measurements, with the peers built in.

use std::path::Path;

use crate::setup;
use crate::workspace::{Outcome, cargo};

/// Builds the release binary with the peers and runs `vellum bench` with `arguments`; with none,
/// the list of experiments.
///
/// # Errors
/// When something is missing, the build fails or an experiment does.
pub fn run(root: &Path, arguments: &[String], rocksdb: bool) -> Outcome {
    setup::ensure(if rocksdb { setup::Need::RocksDb } else { setup::Need::Build })?;
    let features = if rocksdb { "rocksdb" } else { "peers" };
    let mut command = cargo(root);
    command.args(["run", "--release", "--package", "vellum-cli", "--bin", "vellum"]);
    command.args(["--features", features, "--", "bench"]);
    match arguments {
        [] => command.arg("list"),
        _ => command.args(arguments),
    };
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("vellum bench: {status}")) }
}
