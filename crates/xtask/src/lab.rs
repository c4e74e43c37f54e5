//! `cargo xtask lab`: the tests of packages on Debian kernels, in an emulator, with the module.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Outcome, cargo, setup};

/// Packages whose tests run if none is named; those that are not there are left out.
const PACKAGES: [(&str, &str); 2] =
    [("vellum-vm", "crates/vm"), ("vellum-kernel-tests", "kernel/tests")];

/// What is run where.
#[derive(clap::Args)]
pub struct Options {
    /// Packages; what concerns the kernel if none is named
    #[arg(long = "package", value_name = "PACKAGE")]
    packages: Vec<String>,
    /// Kernels by series, such as 6.1, or 'debug'; both stock ones if none is named
    #[arg(long = "kernel", value_name = "SERIES")]
    kernels: Vec<String>,
    /// Processors of the guest; several numbers, such as 1,2,4, are several runs
    #[arg(long, default_value = "2")]
    processors: String,
    /// Only tests whose names contain this
    filter: Option<String>,
}

/// Builds the test programs of the packages and runs them on the kernels, with the module loaded
/// where there is one.
///
/// # Errors
/// When something is missing, the build fails or a test does.
pub fn run(root: &Path, options: &Options) -> Outcome {
    setup::ensure(setup::Need::Lab)?;
    if options.kernels.iter().any(|kernel| kernel == "debug") {
        setup::ensure(setup::Need::KernelBuild)?;
    }
    let mut command = cargo(root);
    command.args(["run", "--quiet", "--package", "vellum-lab", "--"]);
    command.args(["--processors", &options.processors]);
    for kernel in &options.kernels {
        command.args(["--kernel", kernel]);
    }
    if root.join("kernel/Kbuild").exists() {
        command.args(["--build", "kernel"]);
    }
    // What the lab itself promises is looked at first.
    let mut programs = test_programs(root, "vellum-lab", &["--test", "guest"])?;
    for package in packages(root, &options.packages) {
        programs.extend(test_programs(root, &package, &["--tests"])?);
    }
    // Integration tests make their files where cargo says: beside what was built.
    let target = programs[0].path.ancestors().nth(3).unwrap_or(root);
    command.arg("--scratch").arg(target.join("tmp"));
    command.args(["--pmem", "--module", "kvm-amd", "run"]);
    if let Some(filter) = &options.filter {
        command.args(["--arguments", filter]);
    }
    for program in programs {
        command.arg(format!("{}={}", program.name, program.path.display()));
    }
    if options.filter.is_none() && options.packages.is_empty() {
        promises(root, &options.kernels)?;
        crash(root, options)?;
    }
    finish(command)
}

/// What the lab promises to whoever calls it: it must find what is wrong before it says of others
/// that they are right.
fn promises(root: &Path, kernels: &[String]) -> Outcome {
    let mut command = cargo(root);
    command.args(["test", "--quiet", "--package", "vellum-lab", "--test", "host"]);
    // Each starts a machine.
    command.args(["--", "--ignored", "--test-threads", "1"]);
    match kernels.iter().any(|kernel| kernel == "debug") {
        true => command.arg("debug"),
        false => command.args(["--skip", "debug"]),
    };
    finish(command)
}

/// Kills a machine that counts, twice, and has another one look at what it has counted.
fn crash(root: &Path, options: &Options) -> Outcome {
    let program = test_programs(root, "vellum-lab", &["--test", "crash"])?.remove(0);
    let path = program.path.display();
    let mut command = cargo(root);
    command.args(["run", "--quiet", "--package", "vellum-lab", "--"]);
    // Of one kernel: it is the emulator that is looked at.
    let kernel = options.kernels.first().map_or("6.12", String::as_str);
    command.args(["--kernel", kernel, "--pmem", "crash", "--rounds", "2", "--then"]);
    command.arg(format!("look={path} --ignored look")).arg(format!("count={path} --ignored count"));
    finish(command)
}

fn finish(mut command: Command) -> Outcome {
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("lab: {status}")) }
}

fn packages(root: &Path, named: &[String]) -> Vec<String> {
    if !named.is_empty() {
        return named.to_vec();
    }
    let there = |(_, folder): &&(&str, &str)| root.join(folder).join("Cargo.toml").exists();
    PACKAGES.iter().filter(there).map(|(name, _)| (*name).to_owned()).collect()
}

/// A test program.
struct Program {
    /// The package and the test's own name: several packages may have one of a name.
    name: String,
    path: PathBuf,
}

/// Builds the tests of a package that cargo selects by `selection`.
fn test_programs(root: &Path, package: &str, selection: &[&str]) -> Outcome<Vec<Program>> {
    let mut command = cargo(root);
    command.args(["test", "--no-run", "--package", package]).args(selection);
    let output = command.output().map_err(|error| format!("cargo does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the tests of {package} do not build:\n{text}"));
    }
    let paths = text.lines().filter_map(executable).map(|path| root.join(path));
    let program = |path: PathBuf| Program { name: format!("{package}/{}", name_of(&path)), path };
    let programs: Vec<Program> = paths.map(program).collect();
    if programs.is_empty() { Err(format!("no tests in {package}")) } else { Ok(programs) }
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
    fn packages_that_are_not_there_are_left_out() {
        let nowhere = Path::new("/nowhere");
        assert!(packages(nowhere, &[]).is_empty());
        assert_eq!(packages(nowhere, &["a".to_owned()]), ["a"]);
        assert!(packages(&crate::root(), &[]).contains(&"vellum-vm".to_owned()));
    }

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let line = "  Executable tests/surface/main.rs (target/debug/deps/surface-0af1)";
        assert_eq!(executable(line), Some("target/debug/deps/surface-0af1"));
        assert_eq!(executable("   Compiling vellum-vm v0.1.0 (/somewhere)"), None);
        assert_eq!(name_of(Path::new("target/debug/deps/vellum_vm-0af1")), "vellum_vm");
    }
}
