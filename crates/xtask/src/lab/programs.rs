//! Programs for a guest: built by cargo, and told apart from those that are not for one.

use std::path::{Path, PathBuf};

use crate::artifacts::Artifacts;
use crate::{Outcome, cargo};

/// Programs that are left out, each with the reason.
pub type LeftOut = [(&'static str, &'static str)];

/// Test programs that are for the host.
const NOT_FOR_GUESTS: [(&str, &str); 3] = [
    ("vellum-kernel-tests/frames_on_the_host", "it calls the compiler, and wants real threads"),
    ("vellum-pool/model", "its locks and threads are a model's: the kernel has no part in it"),
    ("vellum-pool/policy_contract", "it calls the policies alone, without a pool or any memory"),
];

/// Test programs that are only run when their package is named: each takes its time.
pub const LONG: &LeftOut = &[
    ("vellum-pool/device_suite", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum-pool/device_file", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum-pool/device_merging", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum/simulation", "ten minutes in an emulator; runs with PACKAGE=vellum"),
    ("vellum/bad_input", "two minutes in an emulator; runs with PACKAGE=vellum"),
];

/// Libraries that test programs look for beside themselves, each with the program.
const BESIDE: [(&str, &str); 1] = [("vellum-preload/preload", "libvellum_preload.so")];

/// The package whose tests are about what a process does with its memory: no other thread of theirs
/// shall map something meanwhile, not even its stack.
const BY_ONE_THREAD: &str = "vellum-kernel-tests";

/// A test program.
pub struct Program {
    /// The package and the test's own name: several packages may have one of a name.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

impl Program {
    /// The program, as the lab is told of it.
    pub fn told(&self) -> String {
        let told = format!("{}={}", self.name, self.path.display());
        match self.name.split('/').next() {
            Some(BY_ONE_THREAD) => told + " --test-threads=1",
            _ => told,
        }
    }
}

/// Builds the tests of a package that cargo selects by `selection`, without those that are not for
/// guests, of which it says so.
///
/// # Errors
/// When they do not build, or there are none.
pub fn of_tests(root: &Path, package: &str, selection: &[&str]) -> Outcome<Vec<Program>> {
    let mut command = cargo(root);
    command.args(["test", "--no-run", "--package", package]).args(selection);
    let output = command.output().map_err(|error| format!("cargo does not run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("the tests of {package} do not build:\n{text}"));
    }
    let paths = text.lines().filter_map(executable).map(|path| root.join(path));
    let program = |path: PathBuf| Program { name: format!("{package}/{}", name_of(&path)), path };
    let programs = without(paths.map(program).collect(), &NOT_FOR_GUESTS);
    if programs.is_empty() { Err(format!("no tests in {package}")) } else { Ok(programs) }
}

/// What has to lie beside a program: names there, and where that is here.
pub fn beside(program: &Program) -> impl Iterator<Item = (String, PathBuf)> {
    let libraries = BESIDE.iter().filter(|(name, _)| *name == program.name);
    libraries.map(|(name, library)| {
        let folder = name.rsplit_once('/').map_or("", |(folder, _)| folder);
        (format!("{folder}/{library}"), program.path.with_file_name(library))
    })
}

/// Programs without some of them, of which it says so.
pub fn without(mut programs: Vec<Program>, left_out: &LeftOut) -> Vec<Program> {
    programs.retain(|program| {
        let reason = left_out.iter().find(|(name, _)| *name == program.name);
        if let Some((name, reason)) = reason {
            println!("left out: {name}: {reason}");
        }
        reason.is_none()
    });
    programs
}

/// Builds the release binary, `vellum`.
///
/// # Errors
/// When it does not build.
pub fn release(root: &Path) -> Outcome<PathBuf> {
    let arguments = ["--release", "--package", "vellum-cli", "--bin", "vellum"];
    Artifacts::build(root, &arguments)?.find("vellum")
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

    #[test]
    fn the_kernels_tests_are_run_by_one_thread() {
        let told = |name: &str| Program { name: name.to_owned(), path: "/a".into() }.told();
        let expected = "vellum-kernel-tests/exmap_read=/a --test-threads=1";
        assert_eq!(told("vellum-kernel-tests/exmap_read"), expected);
        assert_eq!(told("vellum/store"), "vellum/store=/a");
        let manifest = std::fs::read_to_string(crate::root().join("kernel/tests/Cargo.toml"));
        assert!(manifest.unwrap().contains(&format!("name = \"{BY_ONE_THREAD}\"")));
    }

    #[test]
    fn programs_are_left_out_by_name() {
        let program = |name: &str| Program { name: name.to_owned(), path: PathBuf::new() };
        let programs = vec![program("vellum/store"), program("vellum/simulation")];
        let names: Vec<String> = without(programs, LONG).into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["vellum/store"]);
    }

    #[test]
    fn libraries_lie_beside_their_programs() {
        let program = |name: &str| Program { name: name.to_owned(), path: "/deps/a-0af1".into() };
        let library = "libvellum_preload.so";
        let expected = (format!("vellum-preload/{library}"), Path::new("/deps").join(library));
        assert_eq!(beside(&program("vellum-preload/preload")).collect::<Vec<_>>(), [expected]);
        assert_eq!(beside(&program("vellum/store")).count(), 0);
    }

    #[test]
    fn programs_that_are_left_out_are_there() {
        for (name, _) in NOT_FOR_GUESTS.iter().chain(LONG) {
            let (package, program) = name.split_once('/').unwrap();
            let folder = match package {
                "vellum-kernel-tests" => "kernel/tests",
                "vellum-pool" => "crates/pool",
                _ => "crates/engine",
            };
            let tests = crate::root().join(folder).join("tests");
            let is_there = tests.join(program).join("main.rs").exists();
            assert!(is_there || tests.join(format!("{program}.rs")).exists(), "{name}");
        }
    }
}
