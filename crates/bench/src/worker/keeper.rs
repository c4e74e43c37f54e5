//! Somebody who cleans up after this process, whatever becomes of it.

use std::os::unix::process::CommandExt as _;

use anyhow::Result;

use super::{Launcher, Worker};

/// A process that waits until this one ends, by a signal too, and then removes the RAM disks and
/// memory cgroups that it left behind. To be started before they are made, so that it is dropped
/// after them: there is nothing to remove then, and it just goes.
#[derive(Debug)]
pub struct Keeper {
    _process: Worker,
}

impl Keeper {
    /// Starts one, in a process group of its own: what a terminal sends to this one does not reach
    /// it.
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(launcher: &Launcher) -> Result<Keeper> {
        let mut command = launcher.command();
        command.process_group(0);
        let mut process = Worker::of(command, "keeper", None)?;
        process.keep()?;
        Ok(Keeper { _process: process })
    }
}
