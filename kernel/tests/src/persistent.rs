//! Persistent memory with Morsels on it, mounted and unmounted.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::counters::PATIENCE;
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

/// Unmounts it once no file there is open. The module's worker may have refreshed a table of a file
/// that all have closed, and the kernel closes the worker's files in its own time.
#[track_caller]
pub fn unmount_when_unused() {
    unmounted().expect("umount");
}

/// Unmounts it until nothing is mounted there.
#[track_caller]
pub fn unmount_all() {
    while unmounted().is_ok() {}
}

#[track_caller]
fn unmounted() -> Result<(), Errno> {
    let start = Instant::now();
    loop {
        match unmount() {
            Err(Errno::BUSY) => assert!(start.elapsed() < PATIENCE, "umount: it is in use"),
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Formats and mounts it; earlier contents are lost.
pub fn format() {
    unmount_all();
    mount("format").expect("persistent memory in mode fsdax");
}

/// Unmounts it and mounts it again, as a restart does.
pub fn again() {
    unmount().expect("umount");
    mount("").expect("the file system as before");
}
