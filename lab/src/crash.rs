//! Kills a machine during its work, and has another one check the persistent memory.
//!
//! When the machine is dead, the file has all of the guest's stores, flushed or not. So this tests
//! the death of all programs and of the kernel at any instruction, but not a loss of power.

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use crate::guest::{Equipment, Work};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::options::{self, Arguments};
use crate::run::{Limits, perform};
use crate::suite;
use crate::verdict::Verdict;

/// The range of random times, in milliseconds.
const MOMENTS: std::ops::Range<u64> = 200..3000;

/// The programs to kill, the time, and the program that checks.
#[derive(Args, Debug)]
pub struct Crash {
    /// Milliseconds from the line 'lab: ready' of a program to the kill [default: another random
    /// time in each round]
    #[arg(long, value_name = "MILLISECONDS")]
    after: Option<u64>,
    /// Number of kills, each followed by a check, all on the same memory
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Seconds for the start and for each program that checks
    #[arg(long, default_value_t = 600)]
    patience: u64,
    /// Programs that check the memory afterwards
    #[arg(long = "then", required = true, value_name = "NAME=PROGRAM")]
    then: Vec<String>,
    /// Programs that are killed; one of them prints 'lab: ready', and they should not end by
    /// themselves
    #[arg(required = true, value_name = "NAME=PROGRAM")]
    tests: Vec<String>,
}

/// Performs the crashes on every kernel; true if nothing failed.
///
/// # Errors
/// If a machine cannot be put together or started.
pub fn run_all(arguments: &Arguments, kernels: &[Kernel], crash: &Crash) -> Result<bool> {
    let equipment = arguments.equipment();
    ensure!(
        equipment.pmem.is_some(),
        "nothing outlives the machine without persistent memory; add --pmem"
    );
    let work = Work::Tests(options::tests(&crash.tests, &[])?);
    let then = Work::Tests(options::tests(&crash.then, &[])?);
    suite::everywhere(arguments, kernels, |kernel, machine| {
        let own = tempfile::tempdir_in(&kernel.folder)?;
        let own = own.path().join("pmem");
        let scene = Scene {
            kernel,
            machine,
            equipment: &equipment,
            pmem: arguments.kept().unwrap_or(&own),
            patience: suite::patience_for(kernel, machine, crash.patience),
        };
        let mut sum = Verdict::default();
        for _ in 0..crash.rounds {
            scene.round(crash.after, &work, &then, &mut sum)?;
        }
        Ok(sum)
    })
}

/// The place of a crash: the kernel, the machine and the folder.
#[derive(Debug)]
struct Scene<'a> {
    kernel: &'a Kernel,
    machine: &'a Machine,
    equipment: &'a Equipment,
    pmem: &'a Path,
    patience: Duration,
}

impl Scene<'_> {
    fn round(&self, after: Option<u64>, work: &Work, then: &Work, sum: &mut Verdict) -> Result<()> {
        let after = after.unwrap_or_else(moment);
        println!("killed after {after} ms:");
        let mut killed = self.start(work, Some(Duration::from_millis(after)))?;
        if !killed.was_killed() {
            killed.fail(format!("the machine ended before it was killed after {after} ms"));
        }
        // Tests that passed before the kill do not count.
        killed.passed = 0;
        sum.add(killed);
        println!("checking the memory:");
        sum.add(self.start(then, None)?);
        Ok(())
    }

    fn start(&self, work: &Work, kill_after: Option<Duration>) -> Result<Verdict> {
        let how = (self.machine, Limits { patience: self.patience, kill_after });
        perform(self.kernel, work, self.equipment, Some(self.pmem), how)
    }
}

/// A random time to die.
fn moment() -> u64 {
    // Each such state has other random keys, which are random enough here.
    MOMENTS.start + RandomState::new().hash_one(0) % (MOMENTS.end - MOMENTS.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_differ_and_stay_in_their_range() {
        let found: std::collections::BTreeSet<u64> = (0..100).map(|_| moment()).collect();
        assert!(found.len() > 1 && found.iter().all(|moment| MOMENTS.contains(moment)));
    }
}
