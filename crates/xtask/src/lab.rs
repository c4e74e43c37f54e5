//! `cargo xtask lab`: tests or measurements on Debian kernels in an emulator, with the module.

pub mod passed;
mod programs;

use std::path::{Path, PathBuf};
use std::process::Command;

use passed::Mark;
use programs::POWER_LOSS;

use crate::artifacts::{Artifacts, TestProgram};
use crate::jobs::{self, Job};
use crate::setup;
use crate::workspace::{Outcome, cargo};

/// The packages that run on every kernel if none is named. They test the kernel's interfaces.
const ON_ALL: [&str; 3] = ["vellum-lab/guest", "vellum-vm/", "vellum-kernel-tests/"];

/// The package that runs guests all the time. It has machines of its own, whose processors take
/// turns also if it is named: an emulator with a thread for each loses one of them now and then.
const RING_0: &str = "vellum-aquila-ring0";

/// The packages that run on one kernel, the newest if none is named: the layers above the surfaces,
/// which the other packages test; of the benchmarks a short TPC-C, with its consistency conditions.
/// Each list is a machine, because two that run side by side keep two processors busy.
const ON_ONE: [(&str, &[&str]); 2] = [
    ("stores", &["vellum/", POWER_LOSS, "vellum-aquila/", "vellum-bench/tpcc_beyond_memory"]),
    (
        "pools",
        &[
            "vellum-pool/",
            "vellum-morsel/",
            "vellum-dax/",
            "vellum-cli/dax",
            "vellum-preload/preload",
        ],
    ),
];

/// The programs whose threads really run at the same time, on a machine with a thread of the host
/// for each processor: they look for races, or run virtual machines. They have the host to
/// themselves. While the host does not run one processor of such a machine, the others wait for it
/// at every flush: three of these machines on two processors took twenty times as long as one after
/// the other. All other programs run on machines whose processors take turns.
const RACES: [&str; 12] = [
    "vellum-kernel-tests/dax_kept",
    "vellum-kernel-tests/dax_races",
    "vellum-kernel-tests/dax_stamps",
    "vellum-kernel-tests/exmap_huge_races",
    "vellum-kernel-tests/exmap_neighbours",
    "vellum-kernel-tests/exmap_huge_neighbours",
    "vellum-kernel-tests/exmap_machine",
    "vellum-kernel-tests/exmap_races",
    "vellum-kernel-tests/module_fuzz",
    "vellum-kernel-tests/morsel_machine",
    "vellum-kernel-tests/morsel_races",
    "vellum-kernel-tests/morsel_seals",
];

/// The same of the packages that run on one kernel.
const RACES_ON_ONE: [&str; 3] =
    ["vellum-pool/pool_concurrency", "vellum-pool/pool_huge", "vellum-pool/pool_memory_contract"];

/// The tests of the module.
const KERNEL_TESTS: &str = "vellum-kernel-tests";

/// Seconds that the fuzzer may take beyond its time.
const SLACK: u64 = 600;

/// Processors of a guest.
const PROCESSORS: &str = "2";

/// The kernel that all tests run on if none is named.
const NEWEST: &str = "6.12";

/// The other kernel that is tried if none is named.
const OLDER: &str = "6.1";

/// If no kernel is named, races last half of their time on the newest one...
const HALF: u32 = 2;

/// ...and a quarter of it on the other one.
const QUARTER: u32 = 4;

/// Machines at a time, in addition to one for each processor: tests wait for timers and devices,
/// and a processor would be idle meanwhile.
const WAITING: usize = 1;

/// Seconds for a program. The longest takes 80 if nothing else runs, and took 114 at a load of 5:
/// at a load of 15 that may be three times as long. With more patience a program that hangs would
/// not be named before the limit of the step.
const PATIENCE: &str = "600";

/// Seconds for a program of a package that is named: its long tests run, too.
const LONG_PATIENCE: &str = "2400";

/// The tests that run again on the machine of `strictest`: those that depend most on flushes,
/// processors and concurrency.
const STRICTEST: [&str; 3] = [
    "vellum-kernel-tests/module_fuzz",
    "vellum-kernel-tests/exmap_huge_races",
    "vellum-kernel-tests/morsel_races",
];

/// Which tests run where.
#[derive(Clone, clap::Args)]
pub struct Options {
    /// Packages, with all of their tests [default: those that concern the kernel]
    #[arg(long = "package", value_name = "PACKAGE")]
    packages: Vec<String>,
    /// Kernels by series, such as 6.1, or 'debug'; if none is named 6.12 and 6.1, with shortened
    /// races
    #[arg(long = "kernel", value_name = "SERIES")]
    kernels: Vec<String>,
    /// Processors of the guest; several numbers, such as 1,2,4, are several runs
    #[arg(long, default_value = PROCESSORS)]
    processors: String,
    /// Memory of the guest in MiB
    #[arg(long)]
    memory: Option<String>,
    /// Levels of the guest's page tables: 4 or 5
    #[arg(long)]
    levels: Option<String>,
    /// More for the guest's kernel command line, such as 'pti=on'
    #[arg(long, allow_hyphen_values = true)]
    boot: Option<String>,
    /// Parameters of the module, such as 'flush=exported'
    #[arg(long, allow_hyphen_values = true)]
    module: Option<String>,
    /// Only the module and its surfaces, on 6.12 if no kernel is named, with shortened races
    #[arg(long, conflicts_with = "packages")]
    short: bool,
    /// Only the fuzzer of the module, for this many seconds, on 6.12 if no kernel is named
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["packages", "filter"])]
    fuzz: Option<u64>,
    /// Only machines that are killed over their disks while threads change a store there, so many,
    /// on 6.12 if no kernel is named
    #[arg(long, value_name = "MACHINES", conflicts_with_all = ["packages", "filter", "fuzz"])]
    kills: Option<u32>,
    /// No tests: `vellum bench NAME --quick`, on 6.12 if no kernel is named
    #[arg(long, value_name = "NAME", conflicts_with_all = ["packages", "filter"])]
    bench: Option<String>,
    /// No tests: a shell in a guest, with the module, on 6.12 if no kernel is named
    #[arg(long, conflicts_with_all = ["packages", "filter", "fuzz", "bench"])]
    shell: bool,
    /// A program for the shell, with the libraries that it needs
    #[arg(long = "file", value_name = "FILE", requires = "shell")]
    files: Vec<PathBuf>,
    /// No tests: the module's sources by `checkpatch.pl --strict`, and by sparse for every kernel
    #[arg(long, conflicts_with_all = ["packages", "filter", "short", "fuzz", "bench", "shell"])]
    style: bool,
    /// Instruction by instruction: a nanosecond of the guest's clock is an instruction; slow
    #[arg(long)]
    count_instructions: bool,
    /// Only tests whose names contain this
    filter: Option<String>,
    /// Passed on to `vellum bench`
    #[arg(last = true, requires = "bench", allow_hyphen_values = true)]
    arguments: Vec<String>,
    /// The machines' processors take turns
    #[arg(skip)]
    in_turn: bool,
    /// Races last one part in so many of their time
    #[arg(skip = 1u32)]
    part: u32,
    /// The module's tests have passed on every kernel
    #[arg(skip)]
    is_tested: bool,
    /// The lab, if it has been built with the tests
    #[arg(skip)]
    program: Option<PathBuf>,
}

impl Options {
    /// Whether these are all tests, on the usual machines.
    fn is_whole(&self) -> bool {
        let others = [&self.memory, &self.levels, &self.boot, &self.module, &self.filter];
        let is_usual = self.processors == PROCESSORS && !self.count_instructions;
        is_usual && self.kernels.is_empty() && others.iter().all(|other| other.is_none())
    }
}

/// Builds the test programs of the packages and runs them, or a measurement, on the kernels, with
/// the module loaded.
///
/// # Errors
/// When something is missing, the build fails or a test does.
pub fn run(root: &Path, options: &Options) -> Outcome {
    setup::ensure(setup::Need::Lab)?;
    let is_debug = options.kernels.iter().any(|kernel| kernel == "debug");
    if is_debug {
        setup::ensure(setup::Need::KernelBuild)?;
    }
    if let Some(name) = &options.bench {
        return bench(root, options, name);
    }
    if let Some(seconds) = options.fuzz {
        return fuzz(root, options, seconds);
    }
    if let Some(kills) = options.kills {
        let programs = programs::of_package(root, "vellum-sim", &["--test", "power_loss"])?;
        let kernel = one_of(&options.kernels);
        return jobs::run(vec![kill_over_disk(root, options, kernel, &programs[0], kills)], 1);
    }
    if options.short {
        return short(root, options);
    }
    if options.style {
        finish(style(root, options, &options.kernels))?;
        return if options.kernels.is_empty() { Mark::of_style(root)?.set() } else { Ok(()) };
    }
    if options.shell {
        return shell(root, options);
    }
    if !options.packages.is_empty() {
        let mut programs = programs::of_package(root, "vellum-lab", &["--test", "guest"])?;
        for package in &options.packages {
            if package == RING_0 {
                // The library that its tests preload. `cargo test` would build a test of it.
                Artifacts::build(root, &["build", "--quiet", "--package", RING_0, "--examples"])?;
            }
            programs.extend(programs::of_package(root, package, &["--tests"])?);
        }
        let in_turn = options.packages.iter().any(|package| package == RING_0);
        let options = &Options { in_turn, ..options.clone() };
        return jobs::run(on_each(root, options, "all", &programs), 1);
    }
    all(root, options, is_debug)
}

/// All tests. If the module and its tests have not changed since they passed on every kernel, the
/// older one runs only what does not need the module, and there are no races of the module.
fn all(root: &Path, options: &Options, is_debug: bool) -> Outcome {
    let module = Mark::of_module_everywhere(root)?;
    let is_whole = options.is_whole();
    let is_tested = is_whole && module.is_current();
    if is_tested {
        println!(
            "the module and its tests have not changed since they passed on every kernel: only \
             {NEWEST}, without its races (all of them: KERNEL={NEWEST} and KERNEL={OLDER})"
        );
    }
    let (built, program) = programs::of_workspace(root)?;
    let options = &Options { program: Some(program), is_tested, ..options.clone() };
    let in_turn = &Options { in_turn: true, ..options.clone() };
    let kernel = one_of(&options.kernels);
    let mut races = Vec::new();
    // The longest first, so that no processor waits for the last one alone.
    let rest = programs::except(programs::named(&built, &ON_ALL)?, &RACES);
    let mut jobs = on_each(root, in_turn, "all", &rest);
    if !is_tested {
        races.extend(on_each(root, options, "races", &programs::named(&built, &RACES)?));
    }
    let ring_0 = programs::named(&built, &[&format!("{RING_0}/")])?;
    // It does not need the module, and the kernels' virtual machines differ.
    jobs.extend(on_each(root, &Options { is_tested: false, ..in_turn.clone() }, "ring-0", &ring_0));
    if !is_debug {
        // There they take several times as long: on demand.
        for (name, packages) in ON_ONE {
            let programs = programs::without(programs::named(&built, packages)?, programs::LONG);
            let programs = programs::except(programs, &RACES_ON_ONE);
            jobs.extend(tests(root, in_turn, name, kernel.clone(), &programs));
        }
        let programs = programs::named(&built, &RACES_ON_ONE)?;
        races.extend(tests(root, options, "pool-races", kernel.clone(), &programs));
        if options.filter.is_none() && !is_tested {
            jobs.extend(strictest(root, in_turn, &built)?);
            jobs.extend(alone(root, in_turn, &built)?);
        }
    }
    if options.filter.is_some() {
        return run_all(races, jobs);
    }
    let power_loss = &programs::named(&built, &[POWER_LOSS])?[0];
    jobs.push(kill_over_disk(root, in_turn, kernel, power_loss, KILLS));
    if !is_tested {
        jobs.extend(crash(root, in_turn, &built)?);
    }
    let promised = Mark::of_lab(root)?;
    if !is_debug && promised.is_current() {
        println!("the lab has not changed since it kept its promises: not tested again");
        run_all(races, jobs)?;
    } else {
        jobs.push(promises(&built, is_debug)?);
        run_all(races, jobs)?;
        if !is_debug {
            promised.set()?;
        }
    }
    if is_whole { module.set() } else { Ok(()) }
}

/// Runs the machines that need all of the host one after the other, and then the others side by
/// side.
fn run_all(races: Vec<Job>, jobs: Vec<Job>) -> Outcome {
    let races = jobs::run(races, 1);
    let others = jobs::run(jobs, jobs::for_each_processor(WAITING));
    let names: Vec<String> = [races, others].into_iter().filter_map(Result::err).collect();
    if names.is_empty() { Ok(()) } else { Err(format!("lab: {}", names.join(", "))) }
}

/// The kernels that are asked for, or all.
fn each(options: &Options) -> Vec<String> {
    match &options.kernels[..] {
        [] => [NEWEST, OLDER].map(str::to_owned).to_vec(),
        named => named.to_vec(),
    }
}

/// The programs on every kernel that is asked for.
fn on_each(root: &Path, options: &Options, name: &str, programs: &[TestProgram]) -> Vec<Job> {
    let job =
        |options: &Options, kernel: &str| tests(root, options, name, kernel.to_owned(), programs);
    match &options.kernels[..] {
        [] => {
            let part = |part| Options { part, ..options.clone() };
            let older = (!options.is_tested).then(|| job(&part(QUARTER), OLDER));
            job(&part(HALF), NEWEST).into_iter().chain(older.flatten()).collect()
        }
        named => named.iter().filter_map(|kernel| job(options, kernel)).collect(),
    }
}

/// A machine with unusual settings: separate page tables for user space, flushes by exported
/// functions, and more processors, which take turns, because the host may have fewer. Its races are
/// short.
fn strictest(root: &Path, options: &Options, built: &[TestProgram]) -> Outcome<Option<Job>> {
    let options = Options {
        processors: "4".to_owned(),
        boot: Some("pti=on".to_owned()),
        module: Some("flush=exported".to_owned()),
        part: QUARTER,
        ..options.clone()
    };
    let programs = programs::named(built, &STRICTEST)?;
    Ok(tests(root, &options, "strictest", one_of(&options.kernels), &programs))
}

/// A test that needs a machine of its own: the machine's name, its options, the program, the test.
type Alone = (&'static str, &'static [&'static str], &'static str, &'static str);

/// These tests: in a PV domain of Xen, and with a device whose bitmaps take more than 4 MiB.
const ALONE: [Alone; 2] = [
    ("xen", &["--xen", "--unloaded"], "vellum-kernel-tests/xen", "a_pv_domain_is_refused"),
    (
        "large-device",
        &["--pmem", "--pmem-gib", "131"],
        "vellum-kernel-tests/morsel_persistent",
        "a_device_may_have_more_than_128_gib",
    ),
];

/// The tests that need machines of their own, on every kernel that is asked for.
fn alone(root: &Path, options: &Options, built: &[TestProgram]) -> Outcome<Vec<Job>> {
    let mut jobs = Vec::new();
    for kernel in each(options) {
        for (name, machine, program, test) in ALONE {
            let programs = programs::named(built, &[program])?;
            let mut command = lab(root, options, std::slice::from_ref(&kernel));
            command.args(["--name", name]).args(machine).arg("run");
            command.arg(format!("{test}={} --ignored {test}", programs[0].path.display()));
            jobs.push(Job::new(format!("{kernel}, {name}"), command));
        }
    }
    Ok(jobs)
}

/// The module and its surfaces on one kernel, and the style of the module: what a developer waits
/// for.
fn short(root: &Path, options: &Options) -> Outcome {
    let (built, program) = programs::of_workspace(root)?;
    let options = &Options { program: Some(program), part: QUARTER, ..options.clone() };
    let in_turn = &Options { in_turn: true, ..options.clone() };
    let programs = programs::except(programs::named(&built, &ON_ALL)?, &RACES);
    let (morsels, others): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| program.name.contains("/morsel_"));
    let kernel = one_of(&options.kernels);
    let kernels = std::slice::from_ref(&kernel);
    let style = Job::new("style of the module", style(root, options, kernels));
    let machine = |options, name, programs: &[TestProgram]| {
        tests(root, options, name, kernel.clone(), programs)
    };
    let races = machine(options, "short-races", &programs::named(&built, &RACES)?);
    let ring_0 = programs::named(&built, &[&format!("{RING_0}/")])?;
    let parts = [("short", &others), ("short-morsels", &morsels), ("short-ring-0", &ring_0)];
    let jobs = parts.into_iter().filter_map(|(name, programs)| machine(in_turn, name, programs));
    run_all(races.into_iter().collect(), jobs.chain([style]).collect())
}

/// The module's sources as the kernel's maintainers would look at them, by the headers of these
/// kernels, or of every stock one.
fn style(root: &Path, options: &Options, kernels: &[String]) -> Command {
    let mut command = program(root, options);
    for kernel in kernels {
        command.args(["--kernel", kernel]);
    }
    command.args(["style", "kernel"]);
    command
}

/// The fuzzer: half of the time with one thread, half of it with several. The kernel is
/// preemptible, so that more happens between two steps of the module.
fn fuzz(root: &Path, options: &Options, seconds: u64) -> Outcome {
    let fuzzer = programs::of_package(root, KERNEL_TESTS, &["--test", "module_fuzz"])?.remove(0);
    let boot = options.boot.clone().unwrap_or_else(|| "preempt=full".to_owned());
    let options = Options { boot: Some(boot), ..options.clone() };
    let mut command = lab(root, &options, &[one_of(&options.kernels)]);
    command.args(["--variable", &format!("VELLUM_SECONDS={}", seconds.div_ceil(2))]);
    command.args(["--pmem", "--module", "kvm-amd", "run"]);
    // Shows at once how to repeat a failure, and at the end the number of rounds.
    command.args(["--arguments", "--nocapture"]);
    command.args(["--patience", &(seconds + SLACK).to_string(), &programs::told(&fuzzer)]);
    finish(command)
}

/// How long an experiment may take, in seconds, in an emulator.
const BENCH_PATIENCE: &str = "3600";

/// Runs `vellum bench NAME --quick --no-progress` with the caller's arguments.
///
/// # Errors
/// When the build fails or the experiment does.
fn bench(root: &Path, options: &Options, name: &str) -> Outcome {
    let path = programs::release(root)?;
    let kernels = match &options.kernels[..] {
        [] => vec![NEWEST.to_owned()],
        named => named.to_vec(),
    };
    let mut command = lab(root, options, &kernels);
    if let Some(model) = model(&options.arguments) {
        command.arg("--file").arg(format!("model={model}"));
    }
    if is_on_persistent_memory(name) {
        command.args(["--pmem", "--pmem-gib", "1"]);
    }
    command.args(["run", "--patience", BENCH_PATIENCE]);
    command.arg(format!("vellum={} {}", path.display(), words(name, &options.arguments)));
    finish(command)
}

/// Whether the experiment's files are on the guest's persistent memory.
fn is_on_persistent_memory(name: &str) -> bool {
    name.starts_with("dax-")
}

/// The path of the model in the guest.
const MODEL: &str = "/tests/model";

/// The file that an argument names, which the guest needs, too.
fn model(arguments: &[String]) -> Option<&str> {
    let at = arguments.iter().position(|argument| argument == "--model")?;
    arguments.get(at + 1).map(String::as_str)
}

/// The arguments of `vellum`.
fn words(name: &str, arguments: &[String]) -> String {
    let mut words = format!("bench {name} --quick --no-progress");
    if !arguments.iter().any(|argument| argument.starts_with("--dir")) {
        // The files are on the guest's disk, because `/tmp` is in memory.
        let folder = if is_on_persistent_memory(name) { "/pmem" } else { "/mnt/bench" };
        words.push_str(&format!(" --dir {folder}"));
    }
    let model = model(arguments);
    for argument in arguments {
        words.push(' ');
        words.push_str(if Some(&argument[..]) == model { MODEL } else { argument });
    }
    words
}

/// A shell in a guest.
fn shell(root: &Path, options: &Options) -> Outcome {
    let mut command = lab(root, options, &[one_of(&options.kernels)]);
    command.args(["--name", "shell", "--pmem", "--module", "kvm-amd"]);
    for file in &options.files {
        let name = file.file_name().ok_or_else(|| format!("{} is no file", file.display()))?;
        command.arg(format!("--file={}={}", name.to_string_lossy(), file.display()));
    }
    command.arg("shell");
    finish(command)
}

/// The kernel for packages that run on one.
fn one_of(kernels: &[String]) -> String {
    kernels.first().map_or(NEWEST, String::as_str).to_owned()
}

/// The lab, which cargo builds unless it has been built with the tests.
fn program(root: &Path, options: &Options) -> Command {
    let Some(program) = &options.program else {
        let mut command = cargo(root);
        command.args(["run", "--quiet", "--package", "vellum-lab", "--"]);
        return command;
    };
    let mut command = Command::new(program);
    command.current_dir(root);
    command
}

/// The lab, with the machine and the module that are asked for.
fn lab(root: &Path, options: &Options, kernels: &[String]) -> Command {
    let mut command = program(root, options);
    command.args(["--processors", &options.processors]);
    for kernel in kernels {
        command.args(["--kernel", kernel]);
    }
    let given = [
        ("--levels", &options.levels),
        ("--memory", &options.memory),
        ("--boot", &options.boot),
        ("--module-parameters", &options.module),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            command.args([name, value]);
        }
    }
    for variable in passed_on(std::env::vars()) {
        command.args(["--variable", &variable]);
    }
    if options.part > 1 {
        command.args(["--variable", &format!("VELLUM_SHORT={}", options.part)]);
    }
    if options.in_turn {
        command.arg("--in-turn");
    }
    if options.count_instructions {
        command.arg("--count-instructions");
    }
    if root.join("kernel/Kbuild").exists() {
        command.args(["--build", "kernel"]);
    }
    command
}

/// The variables of this program's environment that the programs in the guest get, such as seeds.
fn passed_on(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let ours = variables.filter(|(name, _)| name.starts_with("VELLUM_"));
    ours.map(|(name, value)| format!("{name}={value}")).collect()
}

/// The job that runs the programs on a kernel; none if there are no programs.
fn tests(
    root: &Path,
    options: &Options,
    name: &str,
    kernel: String,
    programs: &[TestProgram],
) -> Option<Job> {
    let first = programs.first()?;
    let title = format!("{kernel}, {name}");
    let mut command = lab(root, options, &[kernel]);
    command.args(["--name", name]);
    // Integration tests make their files where cargo says: next to the build.
    let target = first.path.ancestors().nth(3).unwrap_or(root);
    command.arg("--scratch").arg(target.join("tmp"));
    command.args(["--pmem", "--module", "kvm-amd", "--module", "dm-log-writes"]);
    // With the former the guest runs guests of its own: no test of ring 0 may be skipped for want
    // of them.
    let patience = if options.packages.is_empty() { PATIENCE } else { LONG_PATIENCE };
    command.args(["--variable", "VELLUM_RING0=1", "run", "--patience", patience]);
    if let Some(filter) = &options.filter {
        command.args(["--arguments", filter]);
    }
    for program in programs {
        command.arg(match options.packages.is_empty() {
            true => programs::told_without_long_tests(program),
            false => programs::told(program),
        });
        for (name, path) in programs::beside(program) {
            command.arg(format!("--file={name}={}", path.display()));
        }
    }
    Some(Job::new(title, command))
}

/// The lab's promises to its callers: it must find planted errors, or its verdicts on other
/// programs are worthless.
fn promises(built: &[TestProgram], is_debug: bool) -> Outcome<Job> {
    let program = &programs::named(built, &["vellum-lab/host"])?[0];
    let mut command = Command::new(&program.path);
    // Each starts a machine.
    command.current_dir(&program.folder).args(["--ignored", "--test-threads", "1"]);
    match is_debug {
        true => command.arg("debug"),
        false => command.args(["--skip", "debug"]),
    };
    Ok(Job::new("promises of the lab", command))
}

/// Machines that are killed over their disks.
const KILLS: u32 = 3;

/// Kills machines while a program works, and has another program check the memory afterwards:
/// counters, which test the lab itself, Morsels, and file tables.
fn crash(root: &Path, options: &Options, built: &[TestProgram]) -> Outcome<[Job; 3]> {
    let killed = |program| kill(root, options, built, program);
    Ok([
        killed(("vellum-lab/crash", "count"))?,
        killed(("vellum-kernel-tests/morsel_crash", "work"))?,
        killed(("vellum-kernel-tests/dax_crash", "work"))?,
    ])
}

fn kill(
    root: &Path,
    options: &Options,
    built: &[TestProgram],
    (name, test): (&str, &str),
) -> Outcome<Job> {
    let programs = programs::named(built, &[name])?;
    let path = programs[0].path.display();
    let kernel = one_of(&options.kernels);
    let program = name.rsplit('/').next().unwrap_or(name);
    let title = format!("{kernel}, killed: {program}");
    let mut command = lab(root, options, &[kernel]);
    command.args(["--name", program, "--pmem", "crash", "--rounds", "2", "--then"]);
    command.arg(format!("look={path} --ignored look"));
    command.arg(format!("{test}={path} --ignored {test}"));
    Ok(Job::new(title, command))
}

/// Kills so many machines while threads change stores on their disk: one in a file system, one on
/// the raw disk.
fn kill_over_disk(
    root: &Path,
    options: &Options,
    kernel: String,
    program: &TestProgram,
    kills: u32,
) -> Job {
    let title = format!("{kernel}, killed: stores");
    let mut command = lab(root, options, &[kernel]);
    let path = program.path.display();
    command.args(["--name", "killed-stores", "--module", "dm-mod"]).args(programs::tools(program));
    command.args(["crash", "--disk", "64", "--check-last", "--rounds", &kills.to_string()]);
    if let Ok(seed) = std::env::var("VELLUM_SEED") {
        command.args(["--seed", &seed]);
    }
    command.args(["--then", &format!("look={path} --ignored killed::look")]);
    command.arg(format!("work={path} --ignored killed::work"));
    Job::new(title, command)
}

fn finish(mut command: Command) -> Outcome {
    let status = command.status().map_err(|error| format!("cargo does not run: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("lab: {status}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vellum_s_variables_are_passed_on() {
        let variable = |name: &str| (name.to_owned(), "1".to_owned());
        let given = [variable("PATH"), variable("VELLUM_SEED")];
        assert_eq!(passed_on(given.into_iter()), ["VELLUM_SEED=1"]);
    }

    #[test]
    fn packages_for_one_kernel_run_on_a_named_one() {
        assert_eq!(one_of(&[]), NEWEST);
        assert_eq!(one_of(&["6.1".to_owned(), "6.12".to_owned()]), "6.1");
    }

    #[test]
    fn arguments_follow_the_name() {
        let given = ["--engines".to_owned(), "vellum".to_owned()];
        let expected = "bench tpcc --quick --no-progress --dir /mnt/bench --engines vellum";
        assert_eq!(words("tpcc", &given), expected);
        let given = ["--model".to_owned(), "/home/model".to_owned()];
        let expected = "bench tpcc --quick --no-progress --dir /mnt/bench --model /tests/model";
        assert_eq!(words("tpcc", &given), expected);
        let given = ["--dir=/pmem".to_owned()];
        assert_eq!(words("tpcc", &given), "bench tpcc --quick --no-progress --dir=/pmem");
    }
}
