//! `cargo xtask python`: the package for Python, built and tested in its own virtual environment.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::artifacts::BUILT;
use crate::setup;
use crate::workspace::{Outcome, cargo, target};

/// Debian's Python, even if the PATH has another one. It is the oldest that the package supports.
const PYTHON: &str = "/usr/bin/python3";

/// The packages that the tests and the build of the package need.
const REQUIREMENTS: &str = "crates/python/tests/requirements.txt";

/// Builds the package, installs it into `target/python/venv`, and runs its tests.
///
/// # Errors
/// When something is missing and cannot be fetched, the build fails, or a test does.
pub fn run(root: &Path, names: &[String]) -> Outcome {
    setup::ensure(setup::Need::Python)?;
    let target = target(root);
    let (environment, wheels) = (target.join("python/venv"), target.join("python/wheels"));
    let python = environment.join("bin/python");
    if !python.exists() {
        step("making an environment", Command::new(PYTHON).args(["-m", "venv"]).arg(&environment))?;
    }
    let pip = |what: &[&OsStr]| {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]).args(what);
        pip
    };
    let requirements = root.join(REQUIREMENTS);
    let fetch = &mut pip(&["--requirement".as_ref(), requirements.as_ref()]);
    step("fetching packages from PyPI", fetch)?;
    let wheel = build(root, &python, &wheels)?;
    let install = &mut pip(&["--force-reinstall".as_ref(), "--no-deps".as_ref(), wheel.as_ref()]);
    step("installing the package", install)?;
    // Its load() asks the cache daemon, which is a command of this.
    let built = std::env::var_os(BUILT).map(PathBuf::from);
    if built.is_none() {
        let mut daemon = cargo(root);
        step("building vellum", daemon.args(["build", "--quiet", "--package", "vellum-cli"]))?;
    }
    let built = built.unwrap_or_else(|| target.join("debug"));
    let mut tests = Command::new(&python);
    // Without bytecode, because the tests are in the source folder.
    tests.arg("-B").arg(root.join("crates/python/tests")).args(names);
    step("testing the package", tests.env("VELLUM", built.join("vellum")))
}

/// Builds the wheel. Removes old wheels first, so that none is taken for the new one.
fn build(root: &Path, python: &Path, wheels: &Path) -> Outcome<PathBuf> {
    if wheels.exists() {
        fs::remove_dir_all(wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    }
    let mut maturin = Command::new(python);
    maturin.current_dir(root).args(["-m", "maturin", "build", "--quiet", "--profile", "dev"]);
    maturin.args(["--manifest-path", "crates/python/Cargo.toml", "--interpreter"]).arg(python);
    step("building the package", maturin.arg("--out").arg(wheels))?;
    let entries = fs::read_dir(wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.next().ok_or_else(|| format!("no wheel in {}", wheels.display()))
}

/// Runs a program, whose output goes to this one's.
fn step(doing: &str, command: &mut Command) -> Outcome {
    let status = command.status().map_err(|error| format!("{doing}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{doing} failed: {status}")) }
}
