//! A process that cleans up after this process, however it ends.

use std::os::unix::process::CommandExt as _;

use anyhow::Result;

use super::{Launcher, Worker};

/// A process that waits until this one ends, even by a signal, and then removes the RAM disks and
/// memory cgroups that this one has left. It must be started before they are created, so that it is
/// dropped after them. Then there is nothing to remove, and it just ends.
#[derive(Debug)]
pub struct Cleaner {
    _process: Worker,
}

impl Cleaner {
    /// Starts a cleaner in its own process group, so that a terminal's signals to this process do
    /// not reach it.
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
