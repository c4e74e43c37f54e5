//! A small file system, for tests of full disks.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file system in memory, mounted while this lives.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts a file system of so many KiB at a folder, which is created if its parent is there.
    /// `None`, with a printed line, if the test may not mount one.
    ///
    /// # Panics
    /// If the folder cannot be created.
    pub fn mount(place: impl Into<PathBuf>, kib: u64) -> Option<SmallDisk> {
        let place = place.into();
        if !place.is_dir() {
            std::fs::create_dir(&place).expect("a folder for a small disk");
        }
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"]).arg(&place);
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        if !mounted {
            eprintln!("left out: this test needs the right to mount a file system");
            return None;
        }
        Some(SmallDisk(place))
    }

    /// The root folder of the file system.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether the file system has no files.
    ///
    /// # Panics
    /// If it cannot be read.
    pub fn is_empty(&self) -> bool {
        std::fs::read_dir(&self.0).expect("the small disk").next().is_none()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a failed test may still have files open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
