//! Persistent memory with Morsels on it, mounted and unmounted.

use std::path::Path;

use rustix::io::Errno;

use crate::{morsel, mounted};

/// The guest's persistent memory, if it has some.
pub const DEVICE: &str = "/dev/pmem0";
/// Where the guest has mounted it.
pub const FOLDER: &str = "/pmem";

/// Whether the guest has persistent memory that can have Morsels. Prints a line if not.
pub fn is_there() -> bool {
    let is_there = Path::new(DEVICE).exists() && morsel::is_mounted();
    if !is_there {
        eprintln!("skipped: no {DEVICE}, or no morselfs");
    }
    is_there
}

/// Mounts the device at the guest's mount point.
pub fn mount(options: &str) -> Result<(), Errno> {
    mounted::mount(DEVICE, Path::new(FOLDER), options, 0)
}

/// Unmounts it.
pub fn unmount() -> Result<(), Errno> {
    mounted::unmount(Path::new(FOLDER), 0)
}

/// Formats and mounts it; earlier contents are lost.
pub fn format() {
    while unmount().is_ok() {}
    mount("format").expect("persistent memory in mode fsdax");
}

/// Unmounts it and mounts it again, as a restart does.
pub fn again() {
    unmount().expect("umount");
    mount("").expect("the file system as before");
}
