//! What the tests of mappings share: files with a pattern, and accesses to mapped memory.
#![allow(dead_code)] // not every test uses all of it

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use vellum_aquila::{Backend, BackendChoice, Cache, DirtyTracking, Mapping, Options, PAGE_SIZE};

/// A folder with a file.
pub struct Fixture {
    folder: tempfile::TempDir,
}

/// What a page has at first.
pub fn pattern(page: usize) -> u64 {
    (page as u64 + 1) * 0x9e37_79b9
}

impl Fixture {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("file")
    }

    /// A file of so many pages; each begins with its pattern.
    pub fn file(&self, pages: usize) -> File {
        let file = create(&self.path());
        for page in 0..pages {
            let mut bytes = [0; PAGE_SIZE];
            bytes[..8].copy_from_slice(&pattern(page).to_le_bytes());
            file.write_all_at(&bytes, (page * PAGE_SIZE) as u64).unwrap();
        }
        file
    }

    /// The file once more, by a descriptor of its own.
    pub fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.path()).unwrap()
    }
}

pub fn create(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap()
}

/// The first word of a page of a file, by `read(2)`.
pub fn word_in(file: &File, page: usize) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, (page * PAGE_SIZE) as u64).unwrap();
    u64::from_le_bytes(bytes)
}

/// The address of a word of a mapping's page.
pub fn address(mapping: &Mapping, page: usize, word: usize) -> *mut u64 {
    assert!(page * PAGE_SIZE < mapping.len() && word < PAGE_SIZE / 8);
    mapping.as_ptr().wrapping_add(page * PAGE_SIZE + word * 8).cast()
}

/// Loads a word from a mapping.
pub fn load(mapping: &Mapping, page: usize, word: usize) -> u64 {
    // SAFETY: the word is within the mapping, and a volatile load assumes nothing of it.
    u64::from_le(unsafe { address(mapping, page, word).read_volatile() })
}

/// Stores a word to a mapping.
pub fn store(mapping: &Mapping, page: usize, word: usize, value: u64) {
    // SAFETY: the word is within the mapping, and no reference to it exists.
    unsafe { address(mapping, page, word).write_volatile(value.to_le()) }
}

pub fn options(pages: usize) -> Options {
    Options::new((pages * PAGE_SIZE) as u64).without_minimum()
}

/// A cache of so many pages that handles its own faults, with write protection where the kernel has
/// it.
pub fn cache(pages: usize) -> Cache {
    options(pages).backend(BackendChoice::Only(Backend::Userfaultfd)).build().unwrap()
}

/// Every backend and variant that works here. Those of userfaultfd work on all machines on which
/// the tests run, unless the kernel is old or forbids it.
pub fn caches(pages: usize) -> Vec<(String, Cache)> {
    let own = |tracking, direct| {
        let only = BackendChoice::Only(Backend::Userfaultfd);
        options(pages).backend(only).dirty_tracking(tracking).direct_io(direct).build()
    };
    let kernel = options(pages).backend(BackendChoice::Only(Backend::Kernel)).build();
    let all = [
        ("write-protect", own(DirtyTracking::WriteProtect, false)),
        ("mapped", own(DirtyTracking::Mapped, false)),
        ("direct", own(DirtyTracking::Auto, true)),
        ("kernel", kernel),
    ];
    all.into_iter()
        .filter_map(|(name, cache)| match cache {
            Ok(cache) => Some((name.to_owned(), cache)),
            Err(error) => {
                eprintln!("left out: {error}");
                None
            }
        })
        .collect()
}
