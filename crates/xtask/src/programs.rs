//! `cargo xtask programs`: the tests of all packages, several programs at a time.
//!
//! `cargo test` runs one program after the other. Many tests wait for a timer, a disk or another
//! process, so several programs at a time end sooner.

use std::path::Path;
use std::process::Command;

use crate::artifacts::{Artifacts, BUILT, TestProgram};
use crate::jobs::{self, Job};
use crate::workspace::{Outcome, cargo, target};

/// Programs at a time, in addition to one for each processor: they wait for disks.
const WAITING: usize = 1;

/// Programs that take longest, first: one that begins last would keep a processor waiting.
const LONGEST: [&str; 4] = [
    "vellum-bench-peers/conformance",
    "vellum-preload/preload",
    "vellum/simulation",
    "vellum/vellum",
];

/// Packages whose tests only `cargo xtask test` runs: those of other engines.
const OTHER_ENGINES: &str = "vellum-bench-peers/";

/// What `VELLUM_TRANSLATION` may say, and the packages whose tests run with it, and not only with
/// the translation that a pool chooses. The small stores of most tests choose the MMU.
const TRANSLATIONS: [(&str, &[&str]); 2] =
    [("mmu", &["vellum-pool/"]), ("table", &["vellum-pool/", "vellum/"])];

/// Programs of these packages that run only once: they read no page through a pool, or they name
/// each translation themselves, or what they test is the files of a store and not its pages.
const TRANSLATED_ONCE: [&str; 19] = [
    "vellum-pool/device_faulty",
    "vellum-pool/device_file",
    "vellum-pool/device_merging",
    "vellum-pool/device_sandbox",
    "vellum-pool/device_suite",
    "vellum-pool/model",
    "vellum-pool/policy_contract",
    "vellum-pool/pool_address_space",
    "vellum-pool/pool_resize",
    "vellum-pool/pool_translation",
    "vellum-pool/space",
    "vellum/backup",
    "vellum/bad_input",
    "vellum/control",
    "vellum/gate_model",
    "vellum/increments",
    "vellum/kept_files",
    "vellum/log",
    "vellum/versions_model",
];

/// Which programs.
#[derive(Clone, Copy, clap::Args)]
pub struct Options {
    /// Also the programs that run other engines, and those of pool and store with each translation
    #[arg(long)]
    all: bool,
}

/// Builds the tests, runs every program in its package's folder, and the examples of the
/// documentation. It builds all packages even if some do not run.
///
/// # Errors
/// When the build fails. Otherwise names the programs whose tests failed; the other programs ran,
/// too.
pub fn run(root: &Path, options: Options) -> Outcome {
    let mut programs = Artifacts::whole(root)?.test_programs();
    let is_there = |name: &str| programs.iter().any(|program| program.name == name);
    if let Some(name) = LONGEST.iter().chain(&TRANSLATED_ONCE).find(|name| !is_there(name)) {
        return Err(format!("there are no tests {name}"));
    }
    programs.retain(|program| options.all || !program.name.starts_with(OTHER_ENGINES));
    programs.sort_by_key(|program| !LONGEST.contains(&program.name.as_str()));
    let built = target(root).join("debug");
    let mut jobs: Vec<Job> = programs.iter().map(|program| job(program, &built, None)).collect();
    let mut examples = cargo(root);
    examples.args(["test", "--quiet", "--doc", "--workspace", "--no-fail-fast"]);
    jobs.insert(LONGEST.len(), Job::new("examples of the documentation", examples));
    for (translation, packages) in TRANSLATIONS.iter().filter(|_| options.all) {
        let is_one = |name: &str| {
            let is_of = |package: &&str| name.starts_with(package);
            packages.iter().any(is_of) && !TRANSLATED_ONCE.contains(&name)
        };
        let translated = programs.iter().filter(|program| is_one(&program.name));
        jobs.extend(translated.map(|program| job(program, &built, Some(translation))));
    }
    jobs::run(jobs, jobs::for_each_processor(WAITING))
}

fn job(program: &TestProgram, built: &Path, translation: Option<&str>) -> Job {
    let mut command = Command::new(&program.path);
    // As cargo sets it.
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    command.env(BUILT, built).args(program.arguments());
    let mut name = program.name.clone();
    if let Some(translation) = translation {
        command.env("VELLUM_TRANSLATION", translation);
        name = format!("{name} ({translation})");
    }
    Job::new(name, command)
}
