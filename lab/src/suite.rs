//! Runs the same work on several kernels with several numbers of processors, and adds up the
//! results.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::guest::Work;
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::options::Arguments;
use crate::run::{Kept, Limits, perform};
use crate::verdict::Verdict;

/// Runs programs on each kernel with each number of processors; true if nothing failed.
///
/// # Errors
/// If a machine cannot be put together or started.
pub fn run_all(
    arguments: &Arguments,
    kernels: &[Kernel],
    work: &Work,
    patience: u64,
) -> Result<bool> {
    everywhere(arguments, kernels, |kernel, machine| {
        let patience = patience_for(kernel, machine, patience);
        let how = (machine, Limits { patience, kill_after: None });
        perform(kernel, work, &arguments.equipment(), Kept::memory(arguments.kept()), how)
    })
}

/// Performs a step on each kernel with each number of processors, and prints the failures and the
/// sums; true if nothing failed.
///
/// # Errors
/// The sums of the steps.
pub fn everywhere(
    arguments: &Arguments,
    kernels: &[Kernel],
    perform: impl Fn(&Kernel, &Machine) -> Result<Verdict>,
) -> Result<bool> {
    let (mut passed, mut failed) = (0, 0);
    let pairs =
        kernels.iter().flat_map(|kernel| arguments.processors.iter().map(move |n| (kernel, *n)));
    for (kernel, processors) in pairs {
        let name = kernel.name;
        println!("kernel {name}: {}, {processors} processors", kernel.release);
        let start = Instant::now();
        let verdict = perform(kernel, &arguments.machine(processors))?;
        for trouble in &verdict.troubles {
            println!("failed: {trouble}");
        }
        let (ours, theirs) = (verdict.passed, verdict.failed);
        let seconds = start.elapsed().as_secs_f64();
        println!("longest: kernel {name}: {}", verdict.longest());
        println!("kernel {name}: {ours} passed, {theirs} failed, {seconds:.0} s");
        passed += ours;
        failed += theirs;
    }
    println!("{passed} passed, {failed} failed");
    Ok(failed == 0)
}

/// How long to wait for one program, given the time for it on a stock kernel.
pub fn patience_for(kernel: &Kernel, machine: &Machine, seconds: u64) -> Duration {
    Duration::from_secs(seconds) * kernel.slowness() * machine.slowness()
}
