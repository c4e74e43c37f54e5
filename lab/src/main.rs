//! `lab`: boots Debian kernels in an emulator and runs test programs inside.
//!
//! The machines on which Vellum is developed and checked do not let anyone change their kernel. In
//! the lab each run has its own machine: a kernel, a busybox, modules and the programs to run.
//! Nothing of it is left afterwards.

mod archive;
mod build;
mod cleaner;
mod crash;
mod debug;
mod disk;
mod guest;
mod kernel;
mod lock;
mod machine;
mod mirror;
mod modules;
mod monitor;
mod options;
mod packages;
mod run;
mod stock;
mod style;
mod suite;
mod verdict;
mod xen;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;

use crate::guest::Work;
use crate::kernel::Kernel;
use crate::machine::{GDB_PORT, Machine};
use crate::options::{Arguments, Chore};
use crate::run::Run;

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
    // Programs that run in another folder need absolute paths.
    let cache = arguments.cache.canonicalize()?;
    let mut kernels = kernel::chosen(&arguments.kernels, &cache)?;
    if arguments.xen {
        let xen = xen::fetch(&cache)?;
        kernels.iter_mut().for_each(|kernel| kernel.hypervisor = Some(xen.clone()));
    }
    match &arguments.chore {
        Chore::Fetch => Ok(true),
        Chore::Build { folder } => build_all(&kernels, folder),
        Chore::Style { folder } => look_at_style(&cache, &kernels, folder),
        Chore::Run { patience, tests, arguments: given } => {
            let work = Work::Tests(options::tests(tests, given)?);
            suite::run_all(arguments, &kernels, &work, *patience)
        }
        Chore::Crash(crash) => crash::run_all(arguments, &kernels, crash),
        Chore::Shell => shell(arguments, &kernels[0], false),
        Chore::Gdb => shell(arguments, &kernels[0], true),
    }
}

fn build_all(kernels: &[Kernel], folder: &Path) -> Result<bool> {
    for kernel in kernels {
        for module in build::build(kernel, folder)? {
            println!("{} for {}: {}", module.name, kernel.name, module.path.display());
        }
    }
    Ok(true)
}

fn look_at_style(cache: &Path, kernels: &[Kernel], folder: &Path) -> Result<bool> {
    let findings = style::findings(cache, kernels, folder)?;
    for finding in &findings {
        println!("{finding}");
    }
    println!("checkpatch and sparse on {}: {} findings", folder.display(), findings.len());
    Ok(findings.is_empty())
}

/// A shell in the guest; with gdb the kernel waits for it before its first instruction.
fn shell(arguments: &Arguments, kernel: &Kernel, waits_for_gdb: bool) -> Result<bool> {
    let processors = arguments.processors[0];
    let machine = Machine { waits_for_gdb, ..arguments.machine(processors) };
    let run = Run::prepare(kernel, &Work::Shell, &arguments.equipment(), arguments.kept())?;
    if waits_for_gdb {
        let symbols = match kernel.symbols() {
            Some(path) => path.display().to_string(),
            None => "(a stock kernel has no symbols; --kernel debug has)".to_owned(),
        };
        println!("in another terminal: gdb -ex 'target remote :{GDB_PORT}' {symbols}");
        println!("and there 'continue', then for a module, with what the guest has in");
        println!("/sys/module/NAME/sections/.text: add-symbol-file NAME.ko ADDRESS");
    }
    Ok(run.attend(&machine)?.success())
}
