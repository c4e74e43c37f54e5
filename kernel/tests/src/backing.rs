//! Files and devices to read pages from, in which page n is full of the bytes of stamp n.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::{PAGE, access, sys};

/// A disk in memory.
const RAM_DISK: &str = "/dev/ram0";

/// A file, or a device.
#[derive(Debug)]
pub struct Backing {
    /// Its description.
    pub name: &'static str,
    /// The file, open for reading and writing.
    pub file: File,
    path: PathBuf,
}

/// The guest's disk.
pub fn scratch() -> PathBuf {
    fs::read_to_string("/scratch").map_or_else(|_| std::env::temp_dir(), |text| text.trim().into())
}

impl Backing {
    /// A file on the guest's disk, through the page cache.
    pub fn cached(pages: u64) -> Self {
        Self::file("a cached file", pages, 0)
    }

    /// A file on the guest's disk, by direct I/O.
    pub fn direct(pages: u64) -> Self {
        Self::file("a file for direct I/O", pages, libc::O_DIRECT)
    }

    /// A block device, by direct I/O.
    pub fn device(pages: u64) -> Self {
        let name = "a device";
        fill(&mut OpenOptions::new().write(true).open(RAM_DISK).expect(RAM_DISK), pages);
        Self { name, file: open(Path::new(RAM_DISK), libc::O_DIRECT), path: RAM_DISK.into() }
    }

    /// One of each kind.
    pub fn all(pages: u64) -> [Self; 3] {
        [Self::cached(pages), Self::direct(pages), Self::device(pages)]
    }

    fn file(name: &'static str, pages: u64, flags: i32) -> Self {
        let path = scratch().join(format!("backing-{}-{flags}", std::process::id()));
        fill(&mut File::create(&path).expect("a file on the disk"), pages);
        Self { name, file: open(&path, flags), path }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The contents of a page in the file.
    pub fn stored(&self, page: u64) -> Vec<u8> {
        let file = File::open(&self.path).expect("the backing");
        // Reads through the page cache: a direct write has dropped the page from it, and a buffered
        // write is in it.
        let mut bytes = vec![0; PAGE];
        let to = bytes.as_mut_ptr().expose_provenance();
        let read = sys::pread(file.as_fd(), to, PAGE, page * PAGE as u64);
        assert_eq!(read, Ok(PAGE as u64), "page {page} of {}", self.name);
        bytes
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.path != Path::new(RAM_DISK) {
            // The disk is removed with the guest.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn fill(file: &mut File, pages: u64) {
    for page in 0..pages {
        file.write_all(&access::stamped(page)).expect("room on the disk");
    }
    file.sync_all().expect("a sound disk");
}

fn open(path: &Path, flags: i32) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).expect("the backing")
}
