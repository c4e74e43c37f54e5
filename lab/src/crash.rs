//! Kills a machine during its work, and has another one check the persistent memory, or a disk.
//!
//! When the machine is dead, the file of the persistent memory has all of the guest's stores,
//! flushed or not. So this tests the death of all programs and of the kernel at any instruction,
//! but not a loss of power. The disk loses what was not flushed ([`crate::disk`]).

use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;

use crate::disk::Disk;
use crate::guest::{Equipment, Work};
use crate::kernel::Kernel;
use crate::machine::Machine;
use crate::options::{self, Arguments};
use crate::run::{Kept, Limits, perform};
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
    /// A virtio disk of so many MiB instead of the memory, /dev/vda: it is empty at first, and each
    /// kill takes some of what was not flushed
    #[arg(long, value_name = "MIB")]
    disk: Option<u64>,
    /// Decides what the kills take from the disk [default: a random number]
    #[arg(long, value_name = "NUMBER", requires = "disk")]
    seed: Option<u64>,
    /// The disk says that it has flushed, and has not
    #[arg(long, requires = "disk")]
    lies: bool,
    /// Have the other programs check after the last kill alone
    #[arg(long)]
    check_last: bool,
    /// Seconds for the start and for each program that checks
    #[arg(long, default_value_t = 600)]
    patience: u64,
    /// Programs that check the memory, or the disk, afterwards
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
    let bytes = crash.disk.map(|mib| mib << 20);
    let equipment = Equipment { disk: bytes, ..arguments.equipment() };
    ensure!(
        equipment.pmem.is_some() || bytes.is_some(),
        "nothing outlives the machine without persistent memory, or a disk; add --pmem or --disk"
    );
    let work = Work::Tests(options::tests(&crash.tests, &[])?);
    let then = Work::Tests(options::tests(&crash.then, &[])?);
    suite::everywhere(arguments, kernels, |kernel, machine| {
        let own = tempfile::tempdir_in(&kernel.folder)?;
        let own = own.path();
        let disk = bytes.map(|bytes| Disk::new(&own.join("disk"), bytes, crash.lies));
        let pmem = own.join("pmem");
        let mut scene = Scene {
            kernel,
            machine,
            equipment: equipment.clone(),
            pmem: arguments.kept().unwrap_or(&pmem),
            disk: disk.transpose()?,
            patience: suite::patience_for(kernel, machine, crash.patience),
            sum: Verdict::default(),
        };
        let first = crash.seed.unwrap_or_else(|| random() >> 32);
        for round in 0..u64::from(crash.rounds) {
            scene.kill(crash.after, first + round, &work)?;
            if scene.sum.failed > 0 && bytes.is_some() {
                break;
            }
            if !crash.check_last || round + 1 == crash.rounds.into() {
                println!("checking what is left:");
                scene.start(&then, None)?;
            }
        }
        Ok(scene.sum)
    })
}

/// The place of a crash: the kernel, the machine and what outlives it.
#[derive(Debug)]
struct Scene<'a> {
    kernel: &'a Kernel,
    machine: &'a Machine,
    equipment: Equipment,
    pmem: &'a Path,
    disk: Option<Disk>,
    patience: Duration,
    sum: Verdict,
}

impl Scene<'_> {
    fn kill(&mut self, after: Option<u64>, seed: u64, work: &Work) -> Result<()> {
        let after = after.unwrap_or_else(moment);
        println!("killed after {after} ms:");
        let was_killed = self.start(work, Some(Duration::from_millis(after)))?;
        if !was_killed {
            self.sum.fail(format!("the machine ended before it was killed after {after} ms"));
        } else if let Some(disk) = &mut self.disk {
            let (sectors, lost) = disk.crash(seed)?;
            println!("{sectors} sectors were not flushed, {lost} have lost a write; seed {seed}");
        }
        Ok(())
    }

    /// Starts a machine; true if it was killed.
    fn start(&mut self, work: &Work, kill_after: Option<Duration>) -> Result<bool> {
        let how = (self.machine, Limits { patience: self.patience, kill_after });
        self.equipment.notes.clone_from(&self.sum.notes);
        let kept = Kept { pmem: Some(self.pmem), disk: Some(&mut self.disk) };
        let mut verdict = perform(self.kernel, work, &self.equipment, kept, how)?;
        let was_killed = verdict.was_killed();
        match (was_killed, &mut self.disk) {
            // Tests that passed before the kill do not count.
            (true, _) => verdict.passed = 0,
            (false, Some(disk)) => disk.settle(),
            (false, None) => {}
        }
        self.sum.add(verdict);
        Ok(was_killed)
    }
}

/// A random time to die.
fn moment() -> u64 {
    MOMENTS.start + random() % (MOMENTS.end - MOMENTS.start)
}

/// A random number.
fn random() -> u64 {
    // Each such state has other random keys, which are random enough here.
    RandomState::new().hash_one(0)
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
