//! `cargo xtask lab`: the tests of a package on stock Debian kernels, in an emulator.

use std::path::{Path, PathBuf};

use crate::{Outcome, cargo, setup};

/// Builds the test programs of `package` and runs them on the kernels named, all of them if none
/// is; of the tests only those whose names contain `filter`.
///
/// # Errors
/// When something is missing, the build fails or a test does.
pub fn run(root: &Path, package: &str, kernels: &[String], filter: Option<&str>) -> Outcome {
    setup::ensure(setup::Need::Lab)?;
    let mut command = cargo(root);
    command.args(["run", "--quiet", "--package", "vellum-lab", "--"]);
    for kernel in kernels {
        command.args(["--kernel", kernel]);
    }
    // What the lab itself promises is looked at first.
    let mut programs = test_programs(root, &["--package", "vellum-lab", "--test", "guest"])?;
    programs.extend(test_programs(root, &["--package", package, "--lib", "--tests"])?);
    // Integration tests make their files where cargo says: beside what was built.
    let target = programs[0].ancestors().nth(3).unwrap_or(root);
    command.arg("--scratch").arg(target.join("tmp"));
    command.args(["--pmem", "--module", "kvm-amd", "run"]);
    if let Some(filter) = filter {
        command.args(["--arguments", filter]);
    }
    for program in programs {
        command.arg(format!("{}={}", name_of(&program), program.display()));
    }
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("lab: {status}")) }
}

/// Builds the tests that cargo selects by `selection`; returns the programs.
fn test_programs(root: &Path, selection: &[&str]) -> Outcome<Vec<PathBuf>> {
    let mut command = cargo(root);
    command.args(["test", "--no-run"]).args(selection);
    let output = command.output().map_err(|error| format!("cargo does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let selected = selection.join(" ");
    if !output.status.success() {
        return Err(format!("the tests of {selected} do not build:\n{text}"));
    }
    let paths = text.lines().filter_map(executable);
    let programs: Vec<PathBuf> = paths.map(|path| root.join(path)).collect();
    if programs.is_empty() { Err(format!("no tests in {selected}")) } else { Ok(programs) }
}

/// The path in a line such as `  Executable tests/a.rs (target/debug/deps/a-0123456789abcdef)`.
fn executable(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("Executable ")?;
    Some(rest.rsplit_once('(')?.1.trim_end_matches(')'))
}

/// A program's name without what cargo adds to it.
fn name_of(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    name.rsplit_once('-').map_or(&*name, |(name, _)| name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let line = "  Executable tests/surface/main.rs (target/debug/deps/surface-0af1)";
        assert_eq!(executable(line), Some("target/debug/deps/surface-0af1"));
        assert_eq!(executable("   Compiling vellum-vm v0.1.0 (/somewhere)"), None);
        assert_eq!(name_of(Path::new("target/debug/deps/vellum_vm-0af1")), "vellum_vm");
    }
}
