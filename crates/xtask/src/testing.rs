//! The steps of `cargo xtask check`, `cargo xtask test` and `cargo xtask soak`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::artifacts::BUILT;
use crate::steps::{self, How, Step};
use crate::workspace::{Outcome, cargo, target};
use crate::{deb, install, lab, packages, setup, sim, tidy};

/// The time for a step of `cargo xtask check` and `cargo xtask test`: a program that hangs shall
/// not take the time that the others need for a verdict. The whole lab takes up to 50 minutes.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Schedules of each scenario in the model check of `cargo xtask check`.
const FEW_SCHEDULES: &str = "200";

/// Seeds of the simulator in `cargo xtask soak`: more than 100,000 crashes.
const SIMULATED_SEEDS: &str = "4000";

/// The chore that a developer runs after each change, in minutes: format, rules, lints, tests
/// without those of other engines, a short model check, and, if the module or its users have
/// changed since this passed, its style, and its tests in one boot of one kernel.
///
/// # Errors
/// Names the steps that failed; their output has been printed.
pub fn check(root: &Path, verbose: bool) -> Outcome {
    setup::ensure(setup::Need::Tests)?;
    let mut list = rules(root);
    list.push(clippy(root));
    list.push(Step::program("tests", xtask(root, "programs")));
    let mut model = model_check(root);
    model.env("VELLUM_MODEL_SCHEDULES", FEW_SCHEDULES);
    list.push(Step::program("short model check", model));
    let passed = lab::passed::Mark::of_module(root)?;
    if passed.is_current() {
        println!("the module and its users have not changed since its tests passed: not run again");
    } else {
        list.push(Step::program("module", xtask(root, "lab --short")));
    }
    run_all(root, list, verbose, LIMIT)?;
    passed.set()
}

/// Everything a change must pass: format, rules, lints, tests, the package for Python, that of the
/// module, its tests on the kernels that it is for, model check and documentation; after a change
/// of the module its style.
///
/// # Errors
/// Names the steps that failed; their output has been printed.
pub fn test(root: &Path, verbose: bool) -> Outcome {
    setup::ensure(setup::Need::Tests)?;
    let mut list = rules(root);
    list.push(clippy(root));
    // Tests run programs with features that only tests need: without them these compile, too.
    let mut installed = command(root, "check --quiet");
    installed.args(install::PACKAGES.iter().flat_map(|name| ["--package", *name]));
    list.push(Step::program("what is installed", installed));
    list.push(Step::program("tests", xtask(root, "programs --all")));
    let mut python = xtask(root, "python");
    // The step with the tests has built the program that these run.
    python.env(BUILT, target(root).join("debug"));
    list.push(Step::program("Python", python));
    let folder = root.to_path_buf();
    list.push(Step::function("kernel package", move || deb::run(&folder).map(drop)));
    if lab::passed::Mark::of_style(root)?.is_current() {
        println!("the module has not changed since its style was checked: not checked again");
    } else {
        // Before the lab: both fetch and build parts of its cache, for which the other waits.
        list.push(Step::program("module's style", xtask(root, STYLE)));
    }
    // Its machines that look for races run one at a time, and leave a processor idle.
    let lab = Step::program("kernel lab", xtask(root, "lab"))
        .meanwhile("model check", &model_check(root))
        .meanwhile("documentation", &documentation(root));
    list.push(lab);
    run_all(root, list, verbose, LIMIT)
}

/// The same tests for longer: `VELLUM_SOAK=1` lengthens them, and ignored tests run as well.
///
/// # Errors
/// Names the steps that failed; their output has been printed.
pub fn soak(root: &Path, verbose: bool) -> Outcome {
    setup::ensure(setup::Need::Build)?;
    setup::ensure(setup::Need::RocksDb)?;
    // Documentation examples marked `ignore` are not meant to run: libraries, binaries and tests.
    let targets = "test --workspace --release --no-fail-fast --lib --bins --tests";
    let mut long_tests = command(root, targets);
    // Another test runs these in a process in which it has forbidden system calls.
    long_tests.args(["--", "--include-ignored", "--skip", "with_a_filter"]);
    long_tests.env("VELLUM_SOAK", "1");
    let mut list = vec![Step::program("long tests", long_tests)];
    let mut model = model_check(root);
    model.args(["--", "--include-ignored"]);
    model.env("VELLUM_SOAK", "1").env("VELLUM_MODEL_SCHEDULES", "50000");
    list.push(Step::program("long model check", model));
    if packages::succeeds(Command::new("cargo").args(["+nightly", "--version"])) {
        list.push(Step::program("address sanitizer", address_sanitizer(root)));
    } else {
        println!("no nightly compiler: skipping the step with the address sanitizer");
    }
    list.push(Step::program("RocksDB's adapter", rocksdb_adapter(root)));
    let mut simulator = sim::command(root);
    simulator.args(["--seeds", SIMULATED_SEEDS, "--jobs", "2"]);
    list.push(Step::program("simulator", simulator));
    for (name, test) in FILE_TABLES {
        list.push(Step::program(name, file_tables(root, test)));
    }
    for (name, test) in LOSSES_OF_POWER {
        list.push(Step::program(name, losses_of_power(root, test)));
    }
    list.push(Step::program("killed machines", xtask(root, KILLED)));
    // The kernels may be newer than the module.
    list.push(Step::program("module's style", xtask(root, STYLE)));
    list.push(Step::program("module on every kernel", xtask(root, ON_EVERY_KERNEL)));
    list.push(Step::program("module fuzzer", fuzzer(root)));
    run_all(root, list, verbose, Duration::MAX)
}

/// The steps without a build: the format and the project's own rules.
fn rules(root: &Path) -> Vec<Step> {
    let folder = root.to_path_buf();
    vec![
        Step::program("format", command(root, "fmt --all --check")),
        Step::function("tidy", move || tidy::run(&folder)),
    ]
}

fn clippy(root: &Path) -> Step {
    let words = "clippy --workspace --all-targets --quiet -- -D warnings";
    Step::program("clippy", command(root, words))
}

/// Compiles the adapter for RocksDB, which only `cargo xtask bench --rocksdb` links. RocksDB itself
/// takes half an hour to compile: given a folder of a library, its crate does not compile it.
fn rocksdb_adapter(root: &Path) -> Command {
    let mut command =
        command(root, "check --quiet --package vellum-bench-peers --features rocksdb");
    command.env("ROCKSDB_LIB_DIR", root);
    command
}

/// The long tests of file tables: the steps' names, and the words that their tests have in their
/// names.
const FILE_TABLES: [(&str, &str); 2] =
    [("fsx of file tables", "every_way_shows"), ("stamps of file tables", "words_alone")];

/// One of these, on both kernels, which are named, so that the lab does not shorten it: the tests
/// need a guest.
fn file_tables(root: &Path, test: &str) -> Command {
    let kernels = "--kernel 6.12 --kernel 6.1";
    let words = format!("lab --package vellum-kernel-tests {kernels} {test}");
    let mut command = xtask(root, &words);
    command.env("VELLUM_SOAK", "1");
    command
}

/// Losses of power at every flush that a kernel has recorded, of a sound store and of planted bugs:
/// the steps' names, and the words that their tests have in their names.
const LOSSES_OF_POWER: [(&str, &str); 2] =
    [("losses of power", "loses_nothing"), ("planted losses", "noticed")];

/// One of these, on both kernels.
fn losses_of_power(root: &Path, test: &str) -> Command {
    let words = format!("lab --package vellum-sim --kernel 6.12 --kernel 6.1 {test}");
    let mut command = xtask(root, &words);
    command.env("VELLUM_SOAK", "1");
    command
}

/// The module's sources as the kernel's maintainers would look at them.
const STYLE: &str = "lab --style";

/// All tests of the lab, with races of full length, whether or not they have passed before.
const ON_EVERY_KERNEL: &str = "lab --kernel 6.12 --kernel 6.1";

/// Machines that are killed over their disks.
const KILLED: &str = "lab --kills 50 --kernel 6.12";

/// The fuzzer of the module, for an hour, on the debug kernel if it has been built.
fn fuzzer(root: &Path) -> Command {
    let mut command = xtask(root, "lab --fuzz 3600");
    if root.join("target/lab/debug/release").exists() {
        command.args(["--kernel", "debug"]);
    }
    command
}

/// Runs the steps. The whole output of those that fail is in a folder of the build.
fn run_all(root: &Path, list: Vec<Step>, verbose: bool, limit: Duration) -> Outcome {
    steps::run(list, How { verbose, limit, kept: &target(root).join("failed") })
}

/// A cargo command from its words.
fn command(root: &Path, words: &str) -> Command {
    let mut command = cargo(root);
    command.args(words.split(' '));
    command
}

/// Another call of this program, whose output is that of a step.
fn xtask(root: &Path, words: &str) -> Command {
    let mut command = command(root, "run --quiet --package xtask --");
    command.args(words.split(' '));
    command
}

/// The page-state protocol, the log's ring and Aquila's cache under shuttle, which replaces their
/// synchronisation primitives.
fn model_check(root: &Path) -> Command {
    let packages = "-p vellum-pool -p vellum-log -p vellum-aquila-core";
    let mut command = command(root, &format!("test {packages} --release --test model"));
    let features = "vellum-pool/model,vellum-log/model,vellum-aquila-core/model";
    command.args(["--features", features]);
    command
}

/// The tests of the pool, the log and the store under the address sanitizer, which also finds
/// leaks. The tests of surfaces are left out, because the sanitizer's mappings exceed the limits
/// that they set.
fn address_sanitizer(root: &Path) -> Command {
    let mut command = Command::new("cargo");
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    command.current_dir(root).args(["+nightly", "test", "--no-fail-fast", "--target", &target]);
    command.args(["-p", "vellum-pool", "-p", "vellum-log", "-p", "vellum"]);
    command.args(["--lib", "--tests"]);
    command.args(["--target-dir", "target/sanitizer"]).env("RUSTFLAGS", "-Zsanitizer=address");
    command
}

fn documentation(root: &Path) -> Command {
    let mut command = command(root, "doc --workspace --no-deps --quiet");
    command.env("RUSTDOCFLAGS", "-D warnings");
    command
}
