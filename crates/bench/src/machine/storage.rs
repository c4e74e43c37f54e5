//! The storage of an experiment that asks for a fast device.

use std::path::{Path, PathBuf};

use super::ram_disk::RamDisk;

/// The storage of an experiment's files, and its description.
#[derive(Debug)]
pub struct Storage {
    directory: PathBuf,
    about: String,
    /// Removed when this is dropped.
    _disk: Option<RamDisk>,
}

impl Storage {
    /// The disk of `directory`.
    pub fn disk(directory: &Path) -> Storage {
        Storage {
            directory: directory.to_owned(),
            about: format!("the disk of {}", directory.display()),
            _disk: None,
        }
    }

    /// A RAM disk for `bytes` of files, or the disk of `directory` if no RAM disk is possible.
    pub fn fast(bytes: u64, directory: &Path) -> Storage {
        // Room for the file system's own data.
        match RamDisk::set_up(bytes + bytes / 16 + (64 << 20)) {
            Ok(disk) => Storage {
                directory: disk.path(),
                about: format!(
                    "zram (RAM), ext4 on a device of {} MiB; incompressible data",
                    disk.bytes() >> 20
                ),
                _disk: Some(disk),
            },
            Err(error) => {
                let disk = Storage::disk(directory);
                Storage { about: format!("{}, because: {error:#}", disk.about), ..disk }
            }
        }
    }

    /// The folder for files.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Its description, for a note.
    pub fn about(&self) -> &str {
        &self.about
    }
}
