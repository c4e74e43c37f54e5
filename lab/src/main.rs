//! `lab`: boots stock Debian kernels in an emulator and runs test programs inside.
//!
//! Where Vellum is developed and checked no kernel can be changed. Here kernels can: each run is a
//! machine of its own, made of a Debian kernel, a busybox and the programs that are to be run, and
//! nothing of it is left afterwards.

mod archive;
mod guest;
mod kernel;
mod machine;
mod modules;
mod packages;
mod verdict;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};

use crate::guest::{Equipment, Test, Work};
use crate::kernel::{Kernel, STOCK, Stock};
use crate::machine::{Files, Machine};
use crate::packages::finish;
use crate::verdict::Verdict;

#[derive(Parser)]
#[command(name = "lab", about = "Boots stock Debian kernels in an emulator and runs tests inside")]
struct Arguments {
    /// Where kernels are kept between runs
    #[arg(long, default_value = "target/lab", global = true)]
    cache: PathBuf,
    /// Kernels by series, such as 6.1; all of them if none is named
    #[arg(long = "kernel", value_name = "SERIES", global = true)]
    kernels: Vec<String>,
    /// Processors of the machine
    #[arg(long, default_value_t = 2, global = true)]
    processors: u32,
    /// Memory of the machine in MiB
    #[arg(long, default_value_t = 3072, global = true)]
    memory: u32,
    /// Run instruction by instruction: a nanosecond of the guest's clock is an instruction; slow
    #[arg(long, global = true)]
    count_instructions: bool,
    /// Persistent memory of 256 MiB, mounted for DAX at /pmem; with a file, that has its contents
    /// and keeps the changes
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, global = true)]
    pmem: Option<Option<PathBuf>>,
    /// More of the kernel's modules to load, such as kvm-amd
    #[arg(long = "module", value_name = "NAME", global = true)]
    modules: Vec<String>,
    /// Where the guest's disk is mounted
    #[arg(long, default_value = "/mnt", global = true)]
    scratch: PathBuf,
    #[command(subcommand)]
    work: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Run test programs, each given as NAME=PROGRAM, and say 'N passed, N failed'
    Run {
        /// Give up after so many seconds, for each kernel
        #[arg(long, default_value_t = 600)]
        patience: u64,
        /// Arguments for every program, such as the names of tests
        #[arg(long, allow_hyphen_values = true)]
        arguments: Vec<String>,
        /// The programs
        #[arg(required = true, value_name = "NAME=PROGRAM")]
        tests: Vec<String>,
    },
    /// A shell in the guest
    Shell,
    /// Fetch the kernels and do no more
    Fetch,
}

fn main() -> ExitCode {
    match perform(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// True if nothing failed.
fn perform(arguments: &Arguments) -> Result<bool> {
    fs::create_dir_all(&arguments.cache)
        .with_context(|| format!("creating {}", arguments.cache.display()))?;
    // Programs that are started elsewhere are told where things are.
    let cache = arguments.cache.canonicalize()?;
    let kernels = chosen(&arguments.kernels)?;
    let fetched = kernels.iter().map(|stock| stock.fetch(&cache));
    let kernels: Vec<Kernel> = fetched.collect::<Result<_>>()?;
    let machine = Machine {
        processors: arguments.processors,
        memory_mib: arguments.memory,
        counts_instructions: arguments.count_instructions,
    };
    let equipment = Equipment {
        scratch: arguments.scratch.clone(),
        pmem: arguments.pmem.is_some(),
        modules: arguments.modules.iter().map(|name| name.replace('-', "_")).collect(),
    };
    let kept = arguments.pmem.clone().flatten();
    let prepare =
        |kernel, work: &Work| Run::prepare(&cache, kernel, work, &equipment, kept.as_deref());
    match &arguments.work {
        Chore::Fetch => Ok(true),
        Chore::Shell => {
            let run = prepare(&kernels[0], &Work::Shell)?;
            Ok(run.start(&machine, true)?.wait()?.success())
        }
        Chore::Run { patience, arguments: given, tests } => {
            let tests = tests.iter().map(|test| parse(test, given)).collect::<Result<_>>()?;
            let (work, patience) = (Work::Tests(tests), Duration::from_secs(*patience));
            run_all(&kernels, &machine, patience, |kernel| prepare(kernel, &work))
        }
    }
}

fn chosen(names: &[String]) -> Result<Vec<Stock>> {
    if names.is_empty() {
        return Ok(STOCK.to_vec());
    }
    let find = |name: &String| {
        let found = STOCK.into_iter().find(|stock| stock.name == name);
        let known = STOCK.map(|stock| stock.name).join(" and ");
        found.with_context(|| format!("no kernel '{name}'; there are {known}"))
    };
    names.iter().map(find).collect()
}

fn parse(test: &str, arguments: &[String]) -> Result<Test> {
    let Some((name, program)) = test.split_once('=') else {
        bail!("'{test}' is not NAME=PROGRAM");
    };
    ensure!(Path::new(program).is_file(), "no program {program}");
    Ok(Test { name: name.to_owned(), program: program.into(), arguments: arguments.to_vec() })
}

/// Runs the work on one kernel after the other and prints the sum.
fn run_all<'a>(
    kernels: &'a [Kernel],
    machine: &Machine,
    patience: Duration,
    prepare: impl Fn(&'a Kernel) -> Result<Run<'a>>,
) -> Result<bool> {
    let (mut passed, mut failed) = (0, 0);
    for kernel in kernels {
        println!("kernel {}: {}, {} processors", kernel.name, kernel.release, machine.processors);
        let start = Instant::now();
        let verdict = prepare(kernel)?.watch(machine, patience)?;
        for trouble in &verdict.troubles {
            println!("{trouble}");
        }
        let seconds = start.elapsed().as_secs_f64();
        let (ours, theirs) = (verdict.passed, verdict.failed);
        println!("kernel {}: {ours} passed, {theirs} failed, {seconds:.0} s", kernel.name);
        passed += ours;
        failed += theirs;
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

/// One start of a machine.
struct Run<'a> {
    kernel: &'a Kernel,
    folder: tempfile::TempDir,
    pmem: Option<PathBuf>,
}

/// Bytes of the guest's disk.
const DISK: u64 = 1 << 30;

/// Bytes of its persistent memory.
const PMEM: u64 = 256 << 20;

impl<'a> Run<'a> {
    fn prepare(
        cache: &Path,
        kernel: &'a Kernel,
        work: &Work,
        equipment: &Equipment,
        kept: Option<&Path>,
    ) -> Result<Run<'a>> {
        let folder = tempfile::Builder::new().prefix("run-").tempdir_in(cache)?;
        fs::write(folder.path().join("archive"), guest::archive(kernel, work, equipment)?)?;
        let disk = folder.path().join("disk");
        fs::File::create(&disk)?.set_len(DISK)?;
        let mut format = Command::new("/sbin/mke2fs");
        finish(format.args(["-q", "-F", "-t", "ext4"]).arg(&disk))
            .context("formatting the disk")?;
        let own = folder.path().join("pmem");
        let pmem = equipment.pmem.then(|| kept.map_or(own, Path::to_path_buf));
        if let Some(path) = pmem.as_ref().filter(|path| !path.exists()) {
            fs::File::create(path)
                .and_then(|file| file.set_len(PMEM))
                .with_context(|| format!("creating {}", path.display()))?;
        }
        Ok(Run { kernel, folder, pmem })
    }

    fn start(&self, machine: &Machine, interactive: bool) -> Result<std::process::Child> {
        let file = |name: &str| self.folder.path().join(name);
        let (archive, disk, messages) = (file("archive"), file("disk"), file("messages"));
        let pmem = self.pmem.as_deref();
        let files = Files { archive: &archive, disk: &disk, pmem, messages: &messages };
        machine.start(self.kernel, files, interactive)
    }

    /// Shows what the guest says until it is off, or for as long as there is patience.
    fn watch(&self, machine: &Machine, patience: Duration) -> Result<Verdict> {
        let mut child = self.start(machine, false)?;
        let output = child.stdout.take().context("the emulator has no output")?;
        let (sender, lines) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        let mut verdict = Verdict::default();
        let deadline = Instant::now() + patience;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    println!("    {}", line.trim_end());
                    verdict.line(&line);
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    verdict.fail(format!("not done after {} s", patience.as_secs()));
                    child.kill()?;
                    break;
                }
            }
        }
        child.wait()?;
        drop(lines);
        if reader.join().is_err() {
            bail!("reading the emulator's output failed");
        }
        let messages = fs::read(self.folder.path().join("messages")).unwrap_or_default();
        let messages = String::from_utf8_lossy(&messages);
        verdict.end(&messages);
        if !verdict.troubles.is_empty() {
            let kept = self.folder.path().with_file_name(format!("messages-{}", self.kernel.name));
            fs::write(&kept, messages.as_bytes())?;
            println!("the kernel's messages are in {}", kept.display());
        }
        Ok(verdict)
    }
}
