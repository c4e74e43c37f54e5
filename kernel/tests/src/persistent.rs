//! Persistent memory with Morsels on it, mounted and unmounted.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::path::Path;

use rustix::io::Errno;

use crate::{morsel, sys};

/// The guest's persistent memory, if it was given some.
pub const DEVICE: &str = "/dev/pmem0";
/// Where the guest has mounted it.
pub const FOLDER: &str = "/pmem";

/// Whether there is some, and Morsels can be there.
pub fn is_there() -> bool {
    let is_there = Path::new(DEVICE).exists() && morsel::is_mounted();
    if !is_there {
        eprintln!("skipped: no {DEVICE}, or no morselfs");
    }
    is_there
}

fn text(text: &str) -> CString {
    CString::new(text).expect("no zeros")
}

/// Mounts a file system of Morsels.
pub fn mount(source: &str, folder: &str, options: &str) -> Result<(), Errno> {
    let (source, folder, options) = (text(source), text(folder), text(options));
    // SAFETY: all are strings that end with a zero.
    let outcome = unsafe {
        let (name, options) = (c"morselfs".as_ptr(), options.as_ptr().cast());
        libc::mount(source.as_ptr(), folder.as_ptr(), name, 0, options)
    };
    sys::checked(outcome.into()).map(drop)
}

/// Unmounts what is mounted there.
pub fn unmount(folder: &str) -> Result<(), Errno> {
    let folder = text(folder);
    // SAFETY: the string ends with a zero.
    sys::checked(unsafe { libc::umount2(folder.as_ptr(), 0) }.into()).map(drop)
}

/// Mounts the persistent memory, empty, in place of what was there.
pub fn format() {
    while unmount(FOLDER).is_ok() {}
    mount(DEVICE, FOLDER, "format").expect("persistent memory in mode fsdax");
}

/// Unmounts it and mounts it again: what a restart does.
pub fn again() {
    unmount(FOLDER).expect("umount");
    mount(DEVICE, FOLDER, "").expect("what was there before");
}
