//! The setup of a team: the storage under test, how workers are started, and the process that
//! cleans up.

use std::path::Path;

use anyhow::Result;

use super::{Cleaner, Launcher};
use crate::machine::Storage;

/// The storage, and the arguments of workers.
#[derive(Debug)]
pub struct Setup {
    launcher: Launcher,
    storage: Storage,
    /// Dropped after the storage, because it has nothing to do once the storage is removed.
    _cleaner: Cleaner,
}

impl Setup {
    /// Room for `bytes` of files in memory, or on the disk of `directory` if memory is not
    /// possible.
    ///
    /// # Errors
    /// If this program cannot be started again.
    pub fn fast(bytes: u64, directory: &Path) -> Result<Setup> {
        let launcher = Launcher::this_program()?;
        Setup::with(launcher, || Storage::fast(bytes, directory))
    }

    /// On the disk of `directory`.
    ///
    /// # Errors
    /// If this program cannot be started again.
    pub fn disk(directory: &Path) -> Result<Setup> {
        Setup::with(Launcher::this_program()?, || Storage::disk(directory))
    }

    /// With another launcher of workers.
    ///
    /// # Errors
    /// If they cannot be started.
    pub fn with(launcher: Launcher, storage: impl FnOnce() -> Storage) -> Result<Setup> {
        let cleaner = Cleaner::start(&launcher)?;
        Ok(Setup { launcher, storage: storage(), _cleaner: cleaner })
    }

    /// The folder for files.
    pub fn directory(&self) -> &Path {
        self.storage.directory()
    }

    /// The storage, for a note.
    pub fn about(&self) -> String {
        format!("Storage: {}.", self.storage.about())
    }

    pub(super) fn launcher(&self) -> &Launcher {
        &self.launcher
    }
}
