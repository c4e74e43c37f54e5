//! Files on the guest's disk whose pages carry an owner's marks.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use super::marks::{Content, Owner, page_of, words_of};
use crate::{Mapping, PAGE, access, backing, sys};

/// A file, and the model of its pages. Drop removes the file.
#[derive(Debug)]
pub(super) struct Disk {
    /// To read and to write.
    pub(super) file: File,
    /// The contents of its pages.
    pub(super) pages: Vec<Content>,
    path: PathBuf,
    /// For direct I/O.
    buffer: Mapping,
}

impl Disk {
    /// A file of so many pages of an owner's.
    pub(super) fn new(owner: &mut Owner, pages: u64, is_direct: bool) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = backing::scratch().join(format!("fuzz-{}-{number}", std::process::id()));
        let marks: Vec<u64> = (0..pages).map(|page| owner.mark(page)).collect();
        let bytes: Vec<u8> = marks.iter().flat_map(|mark| page_of(*mark)).collect();
        let mut file = File::create(&path).expect("a file on the disk");
        file.write_all(&bytes).and_then(|()| file.sync_all()).expect("room on the disk");
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        if is_direct {
            options.custom_flags(libc::O_DIRECT);
        }
        let file = options.open(&path).expect("the file");
        let buffer = Mapping::anonymous(None, PAGE).expect("a page");
        Self { file, pages: marks.into_iter().map(Content::Mark).collect(), path, buffer }
    }

    /// Fails unless a page has the contents that the model has.
    #[track_caller]
    pub(super) fn check(&self, owner: &Owner, page: u64) {
        let (to, offset) = (self.buffer.start(), page * PAGE as u64);
        assert_eq!(sys::pread(self.file.as_fd(), to, PAGE, offset), Ok(PAGE as u64));
        let bytes = access::kernel_load(to, PAGE).expect("the buffer");
        owner.check(&words_of(&bytes), self.pages[page as usize], page);
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The disk is removed with the guest.
        let _ = fs::remove_file(&self.path);
    }
}
