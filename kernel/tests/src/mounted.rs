//! A test's own file system for Morsels.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use crate::{Morsel, sys};

/// A mounted file system, unmounted when this is dropped.
#[derive(Debug)]
pub struct Mounted {
    folder: PathBuf,
}

impl Mounted {
    /// Mounts one with these options.
    pub fn new(options: &str) -> Result<Self, Errno> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = PathBuf::from(format!("/run/vellum/own-{}-{number}", std::process::id()));
        fs::create_dir(&folder).expect("a folder to mount it on");
        let mounted = mount("none", &folder, options, 0);
        if mounted.is_err() {
            let _ = fs::remove_dir(&folder);
        }
        mounted.map(|()| Self { folder })
    }

    /// Remounts it with other options.
    pub fn change(&self, options: &str) -> Result<(), Errno> {
        mount("none", &self.folder, options, libc::MS_REMOUNT)
    }

    /// Its path.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path of a name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A new Morsel without a name and a shape.
    pub fn nameless(&self) -> Morsel {
        Morsel::nameless_in(&self.folder).expect("O_TMPFILE")
    }

    /// Used pages, by `statfs`.
    pub fn used(&self) -> u64 {
        let stat = rustix::fs::statfs(&self.folder).expect("statfs");
        assert_eq!(stat.f_bfree, stat.f_bavail);
        stat.f_blocks - stat.f_bfree
    }

    /// Used inodes.
    pub fn inodes(&self) -> u64 {
        let stat = rustix::fs::statfs(&self.folder).expect("statfs");
        stat.f_files - stat.f_ffree
    }

    /// Unmounts it, unless it is in use.
    pub fn unmount(&self) -> Result<(), Errno> {
        unmount(&self.folder, 0)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A test may have unmounted it; a file system in use is removed later.
        let _ = unmount(&self.folder, libc::MNT_DETACH);
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Mounts a file system for Morsels: on a device, if the source is the path of one.
pub fn mount(source: &str, folder: &Path, options: &str, flags: u64) -> Result<(), Errno> {
    let source = CString::new(source).expect("no zeros");
    let path = CString::new(folder.as_os_str().as_bytes()).expect("no zeros");
    let options = CString::new(options).expect("no zeros");
    let (from, kind) = (source.as_ptr(), c"morselfs".as_ptr());
    // SAFETY: the strings end with zeros.
    let done = unsafe { libc::mount(from, path.as_ptr(), kind, flags, options.as_ptr().cast()) };
    sys::checked(done.into()).map(drop)
}

/// Unmounts the file system there.
pub fn unmount(folder: &Path, flags: i32) -> Result<(), Errno> {
    let path = CString::new(folder.as_os_str().as_bytes()).expect("no zeros");
    // SAFETY: the string ends with a zero.
    sys::checked(unsafe { libc::umount2(path.as_ptr(), flags) }.into()).map(drop)
}
