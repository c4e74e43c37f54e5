//! A process that cleans up after this one, however this one ends.

use std::os::unix::process::CommandExt as _;

use anyhow::Result;

use super::{Launcher, Worker};

/// A process that waits until this one ends, by a signal too, and then removes the RAM disks and
/// memory cgroups that this one left. Start it before they are made, so that it is dropped after
/// them: then there is nothing to remove, and it only ends.
#[derive(Debug)]
pub struct Cleaner {
    _process: Worker,
}

impl Cleaner {
    /// Starts one, in a process group of its own: signals of a terminal to this process do not
    /// reach it.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(launcher: &Launcher) -> Result<Cleaner> {
        let mut command = launcher.command();
        command.process_group(0);
        let mut process = Worker::of(command, "cleaner", None)?;
        process.keep()?;
        Ok(Cleaner { _process: process })
    }
}
