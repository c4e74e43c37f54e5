//! Where the store and its log are on a disk.

use std::path::{Path, PathBuf};

use vellum::Options;

use crate::disk::{Mapped, Mounted, make_file_system};

/// Bytes of a disk.
pub const DISK_BYTES: u64 = 32 << 20;

/// How the store lies on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Store and log are files of one file system.
    FileSystem,
    /// The store is the disk's first half, and its log in a file system on the second.
    Raw,
}

/// The places of a store that is on a disk, while they are mounted. Fields are dropped in order.
#[derive(Debug)]
pub struct MountedStore {
    mounted: Mounted,
    parts: Vec<Mapped>,
}

impl Layout {
    /// Mounts what is on a disk; makes it first if `is_new`.
    pub fn mount(self, disk: &Path, folder: &Path, is_new: bool) -> MountedStore {
        let parts = match self {
            Layout::FileSystem => Vec::new(),
            Layout::Raw => {
                let name = disk.file_name().unwrap().to_str().unwrap();
                let half = DISK_BYTES / 2;
                let part =
                    |part: &str, start| Mapped::part(&format!("{name}-{part}"), disk, start, half);
                vec![part("store", 0), part("log", half)]
            }
        };
        let file_system = parts.last().map_or(disk.to_owned(), Mapped::device);
        if is_new {
            make_file_system(&file_system);
        }
        MountedStore { mounted: Mounted::new(&file_system, folder), parts }
    }
}

impl MountedStore {
    pub fn store(&self) -> PathBuf {
        self.parts.first().map_or_else(|| self.mounted.folder.join("store"), Mapped::device)
    }

    pub fn log(&self) -> PathBuf {
        self.mounted.folder.join("log")
    }
}

/// A small pool, so that pages leave it before their time, and a short log, so that checkpoints
/// begin and its files are used again.
pub fn options(log: PathBuf) -> Options {
    Options::new().pool_bytes(1 << 20).log_bytes(2 << 20).log_folder(log)
}
