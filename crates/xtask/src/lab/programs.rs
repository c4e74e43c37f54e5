//! Programs for a guest: cargo builds them, and this module leaves out those that cannot run in a
//! guest.

use std::path::{Path, PathBuf};

use crate::artifacts::{Artifacts, TestProgram};
use crate::workspace::Outcome;

/// Programs that are left out, each with the reason.
pub type LeftOut = [(&'static str, &'static str)];

/// Test programs that are for the host.
const NOT_FOR_GUESTS: [(&str, &str); 7] = [
    ("vellum-kernel-tests/frames_on_the_host", "it calls the compiler, and wants real threads"),
    ("vellum-pool/model", "its locks and threads are a model's: the kernel has no part in it"),
    ("vellum-pool/policy_contract", "it calls the policies alone, without a pool or any memory"),
    ("vellum-pool/space", "it asks the map of free pages alone, without a pool or any memory"),
    ("vellum/kept_files", "it opens files of the repository, which a guest does not have"),
    ("vellum/gate_model", "its locks and threads are a model's: the kernel has no part in it"),
    ("vellum/versions_model", "its locks and threads are a model's: the kernel has no part in it"),
];

/// Slow test programs, which run only if their package is named.
pub const LONG: &LeftOut = &[
    ("vellum-pool/device_suite", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum-pool/device_file", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum-pool/device_merging", "storage without a pool; runs with PACKAGE=vellum-pool"),
    ("vellum/simulation", "ten minutes in an emulator; runs with PACKAGE=vellum"),
    ("vellum/bad_input", "two minutes in an emulator; runs with PACKAGE=vellum"),
    ("vellum/alter", "calls of a tree alone, a minute or two; runs with PACKAGE=vellum"),
    ("vellum/bulk", "calls of a tree alone, a minute or two; runs with PACKAGE=vellum"),
    ("vellum/bulk_streams", "calls of a tree alone, a minute; runs with PACKAGE=vellum"),
    ("vellum/tree_model", "calls of a tree alone, a minute; runs with PACKAGE=vellum"),
    ("vellum/splits", "it asks how full a tree's pages are; runs with PACKAGE=vellum"),
    ("vellum/edges", "calls of a damaged tree alone; runs with PACKAGE=vellum"),
    ("vellum/compact", "pages that move, a minute or two; runs with PACKAGE=vellum"),
    ("vellum/kills", "processes that are killed, on a real disk; runs with PACKAGE=vellum"),
    ("vellum/log", "the log's files, on a real disk; runs with PACKAGE=vellum"),
    ("vellum/backup", "copies of files, on a real disk; runs with PACKAGE=vellum"),
    ("vellum/increments", "copies of files, on a real disk; runs with PACKAGE=vellum"),
    ("vellum/drop_memory", "it counts what the heap holds, two minutes; runs with PACKAGE=vellum"),
];

/// Tests of programs that are otherwise for a guest, by a part of their names, each with the reason
/// for which they are left out unless their package is named.
pub const LONG_TESTS: [(&str, &str, &str); 1] = [(
    "vellum/vellum",
    "redo::",
    "storage and log in memory, some minutes in an emulator; runs with PACKAGE=vellum",
)];

/// What test programs look for in their own folder, each with the program, and where cargo puts it:
/// a library, and the command.
const BESIDE: [(&str, &str); 3] = [
    ("vellum-preload/preload", "libvellum_preload.so"),
    ("vellum-cli/dax", "../vellum"),
    (LAUNCHER, "../examples/libvellum_ring0.so"),
];

/// Programs of this machine that test programs look for in their own folder.
const TOOLS: [(&str, &[&str]); 2] = [
    (POWER_LOSS, &["/usr/sbin/dmsetup", "/usr/sbin/mke2fs"]),
    (
        LAUNCHER,
        &[
            "/bin/bash",
            "/bin/dash",
            "/bin/grep",
            "/bin/gzip",
            "/bin/sed",
            "/usr/bin/mawk",
            "/usr/bin/sha256sum",
            "/usr/bin/sort",
            "/usr/bin/sqlite3",
            "/usr/bin/wc",
            "/usr/bin/xz",
        ],
    ),
];

/// The program that moves programs as they are to ring 0.
const LAUNCHER: &str = "vellum-aquila-ring0/launcher";

/// The program that loses the power of disks, and runs while machines are killed over theirs.
pub const POWER_LOSS: &str = "vellum-sim/power_loss";

/// The package whose tests check the memory of a process. No other thread may map memory meanwhile,
/// not even its stack.
const BY_ONE_THREAD: &str = "vellum-kernel-tests";

/// The program, as an argument of the lab.
pub fn told(program: &TestProgram) -> String {
    let mut told = format!("{}={}", program.name, program.path.display());
    program.arguments().iter().for_each(|argument| told.push_str(&format!(" {argument}")));
    match program.name.split('/').next() {
        Some(BY_ONE_THREAD) => told + " --test-threads=1",
        _ => told,
    }
}

/// The program, as an argument of the lab, without those of its tests that take long, which this
/// names.
pub fn told_without_long_tests(program: &TestProgram) -> String {
    let mut told = told(program);
    for (name, part, reason) in LONG_TESTS.iter().filter(|(name, ..)| *name == program.name) {
        println!("left out: {name}, {part}*: {reason}");
        told.push_str(&format!(" --skip={part}"));
    }
    told
}

/// Builds the tests of a package that cargo selects by `selection`, without those that are not for
/// guests, and names the latter.
///
/// # Errors
/// When they do not build, or there are none.
pub fn of_package(root: &Path, package: &str, selection: &[&str]) -> Outcome<Vec<TestProgram>> {
    let mut arguments = vec!["test", "--quiet", "--no-run", "--package", package];
    arguments.extend(selection);
    let built = Artifacts::build(root, &arguments)?.test_programs();
    let programs = without(built, &NOT_FOR_GUESTS);
    if programs.is_empty() { Err(format!("no tests in {package}")) } else { Ok(programs) }
}

/// Builds the tests of all packages, as `cargo xtask programs` does, and returns them without those
/// that are not for guests, and the lab.
///
/// # Errors
/// When they do not build.
pub fn of_workspace(root: &Path) -> Outcome<(Vec<TestProgram>, PathBuf)> {
    let built = Artifacts::whole(root)?;
    Ok((without(built.test_programs(), &NOT_FOR_GUESTS), built.find("lab")?))
}

/// The programs with the given names; a name that ends in `/` stands for all programs of a package.
///
/// # Errors
/// Names the programs that do not exist.
pub fn named(built: &[TestProgram], names: &[&str]) -> Outcome<Vec<TestProgram>> {
    let is_meant = |program: &TestProgram, name: &str| match name.ends_with('/') {
        true => program.name.starts_with(name),
        false => program.name == name,
    };
    let mut programs = Vec::new();
    for name in names {
        let before = programs.len();
        programs.extend(built.iter().filter(|program| is_meant(program, name)).cloned());
        if programs.len() == before {
            return Err(format!("there are no tests {name}"));
        }
    }
    Ok(programs)
}

/// The files that a program needs in its folder: their names in the guest, and their paths on this
/// machine.
pub fn beside(program: &TestProgram) -> impl Iterator<Item = (String, PathBuf)> {
    let folder = program.name.rsplit_once('/').map_or("", |(folder, _)| folder);
    let libraries = BESIDE.iter().filter(|(name, _)| *name == program.name);
    let libraries = libraries.map(|(_, library)| program.path.with_file_name(library));
    let tools = TOOLS.iter().filter(|(name, _)| *name == program.name);
    let tools = tools.flat_map(|(_, tools)| tools.iter().map(PathBuf::from));
    libraries.chain(tools).map(move |path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        (format!("{folder}/{name}"), path)
    })
}

/// The files that a program needs, as arguments of the lab, if it runs in no folder of its own.
pub fn tools(program: &TestProgram) -> impl Iterator<Item = String> {
    beside(program).map(|(name, path)| {
        let name = name.rsplit('/').next().unwrap_or(&name).to_owned();
        format!("--file={name}={}", path.display())
    })
}

/// The programs without those that are left out, which it names.
pub fn without(mut programs: Vec<TestProgram>, left_out: &LeftOut) -> Vec<TestProgram> {
    programs.retain(|program| {
        let reason = left_out.iter().find(|(name, _)| *name == program.name);
        if let Some((name, reason)) = reason {
            println!("left out: {name}: {reason}");
        }
        reason.is_none()
    });
    programs
}

/// The programs without those of these names.
pub fn except(mut programs: Vec<TestProgram>, names: &[&str]) -> Vec<TestProgram> {
    programs.retain(|program| !names.contains(&program.name.as_str()));
    programs
}

/// Builds the release binary, `vellum`.
///
/// # Errors
/// When it does not build.
pub fn release(root: &Path) -> Outcome<PathBuf> {
    let arguments = ["build", "--release", "--package", "vellum-cli", "--bin", "vellum"];
    Artifacts::build(root, &arguments)?.find("vellum")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, path: &str) -> TestProgram {
        TestProgram { name: name.to_owned(), path: path.into(), folder: "/".into() }
    }

    #[test]
    fn the_kernels_tests_are_run_by_one_thread() {
        let told = |name: &str| told(&program(name, "/a"));
        let expected = "vellum-kernel-tests/exmap_read=/a --test-threads=1";
        assert_eq!(told("vellum-kernel-tests/exmap_read"), expected);
        assert_eq!(told("vellum/store"), "vellum/store=/a");
        let manifest =
            std::fs::read_to_string(crate::workspace::root().join("kernel/tests/Cargo.toml"));
        assert!(manifest.unwrap().contains(&format!("name = \"{BY_ONE_THREAD}\"")));
    }

    #[test]
    fn long_tests_are_skipped() {
        let told = told_without_long_tests(&program("vellum/vellum", "/a"));
        assert_eq!(told, "vellum/vellum=/a --skip=redo::");
        assert_eq!(told_without_long_tests(&program("vellum/store", "/a")), "vellum/store=/a");
    }

    #[test]
    fn programs_are_selected_by_their_names() {
        let built = ["vellum/store", "vellum/simulation", "vellum-vm/surface"];
        let built = built.map(|name| program(name, ""));
        let names = |named: &[&str]| -> Vec<String> {
            super::named(&built, named).unwrap().into_iter().map(|program| program.name).collect()
        };
        assert_eq!(names(&["vellum/"]), ["vellum/store", "vellum/simulation"]);
        assert_eq!(
            names(&["vellum-vm/surface", "vellum/store"]),
            ["vellum-vm/surface", "vellum/store"]
        );
        let missing = named(&built, &["vellum/", "vellum"]).unwrap_err();
        assert_eq!(missing, "there are no tests vellum");
    }

    #[test]
    fn programs_are_left_out_by_name() {
        let programs = vec![program("vellum/store", ""), program("vellum/simulation", "")];
        let names: Vec<String> = without(programs, LONG).into_iter().map(|it| it.name).collect();
        assert_eq!(names, ["vellum/store"]);
    }

    #[test]
    fn libraries_are_in_the_folder_of_their_programs() {
        let program = |name: &str| program(name, "/deps/a-0af1");
        let library = "libvellum_preload.so";
        let expected = (format!("vellum-preload/{library}"), Path::new("/deps").join(library));
        assert_eq!(beside(&program("vellum-preload/preload")).collect::<Vec<_>>(), [expected]);
        let command = ("vellum-cli/vellum".to_owned(), Path::new("/deps/../vellum").to_owned());
        assert_eq!(beside(&program("vellum-cli/dax")).collect::<Vec<_>>(), [command]);
        assert_eq!(beside(&program("vellum/store")).count(), 0);
    }

    #[test]
    fn programs_that_are_left_out_exist() {
        for (name, _) in NOT_FOR_GUESTS.iter().chain(LONG) {
            let (package, program) = name.split_once('/').unwrap();
            let folder = match package {
                "vellum-kernel-tests" => "kernel/tests",
                "vellum-pool" => "crates/pool",
                _ => "crates/engine",
            };
            let tests = crate::workspace::root().join(folder).join("tests");
            let is_there = tests.join(program).join("main.rs").exists();
            assert!(is_there || tests.join(format!("{program}.rs")).exists(), "{name}");
        }
        let sources = crate::workspace::root().join("crates/engine/src");
        for (name, part, _) in LONG_TESTS {
            assert_eq!(name, "vellum/vellum");
            let module = sources.join(part.trim_end_matches("::").replace("::", "/"));
            assert!(module.is_dir() || module.with_extension("rs").exists(), "{part}");
        }
    }
}
