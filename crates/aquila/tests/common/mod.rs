//! What the tests of mappings share: files with a pattern, and accesses to mapped memory.
#![allow(dead_code)] // not every test uses all of it

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use vellum_aquila::{
    Backend, BackendChoice, Cache, DirtyTracking, Faults, Frames, Mapping, Options, PAGE_SIZE,
};

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

/// Set in processes that run tests with memory files only.
pub const MEMORY_FILES: &str = "VELLUM_AQUILA_TEST_MEMORY_FILES";

pub fn options(pages: usize) -> Options {
    let frames = match std::env::var_os(MEMORY_FILES) {
        Some(_) => Frames::MemoryFile,
        None => Frames::Auto,
    };
    Options::new((pages * PAGE_SIZE) as u64).without_minimum().frames(frames)
}

fn own_options(pages: usize) -> Options {
    options(pages).backend(BackendChoice::Only(Backend::Userfaultfd))
}

/// A cache of so many pages that handles its own faults, with write protection where the kernel has
/// it.
pub fn cache(pages: usize) -> Cache {
    own_options(pages).build().unwrap()
}

/// A cache whose own threads handle faults, also those of system calls.
pub fn monitored(pages: usize) -> Options {
    own_options(pages).faults(Faults::Monitor)
}

pub const BOTH_KINDS: [Frames; 2] = [Frames::Anonymous, Frames::MemoryFile];

/// Such a cache with each kind of frames, one after the other.
pub fn both_caches(pages: usize) -> impl Iterator<Item = Cache> {
    BOTH_KINDS.into_iter().map(move |frames| {
        println!("{frames:?}");
        own_options(pages).frames(frames).build().unwrap()
    })
}

/// Every backend and variant that works here. Those of userfaultfd work on all machines on which
/// the tests run, unless the kernel is old or forbids it.
pub fn caches(pages: usize) -> Vec<(String, Cache)> {
    let own = |tracking, frames, direct| {
        own_options(pages).dirty_tracking(tracking).frames(frames).direct_io(direct).build()
    };
    let kernel = options(pages).backend(BackendChoice::Only(Backend::Kernel)).build();
    let all = [
        ("anonymous", own(DirtyTracking::Auto, Frames::Anonymous, false)),
        ("write-protect", own(DirtyTracking::WriteProtect, Frames::MemoryFile, false)),
        ("mapped", own(DirtyTracking::Mapped, Frames::Auto, false)),
        ("direct, anonymous", own(DirtyTracking::Auto, Frames::Anonymous, true)),
        ("direct", own(DirtyTracking::Auto, Frames::MemoryFile, true)),
        ("monitor, anonymous", monitored(pages).frames(Frames::Anonymous).build()),
        ("monitor", monitored(pages).frames(Frames::MemoryFile).build()),
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

/// Pages of anonymous memory that a mapping has, in memory or in the swap space, by the kernel's
/// own tables.
pub fn pages_in_memory(mapping: &Mapping) -> usize {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const OF_A_FILE: u64 = 1 << 61;
    let table = File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0; mapping.len().div_ceil(PAGE_SIZE) * 8];
    let first = (mapping.as_ptr().addr() / PAGE_SIZE * 8) as u64;
    table.read_exact_at(&mut entries, first).unwrap();
    let has_page = |entry: &&[u8]| {
        let entry = u64::from_le_bytes((*entry).try_into().unwrap()).to_le();
        entry & (PRESENT | SWAPPED) != 0 && entry & OF_A_FILE == 0
    };
    entries.chunks(8).filter(has_page).count()
}

/// How many memory files the caches of this process have, and their bytes, by the kernel's count.
pub fn memory_files() -> (usize, u64) {
    let folder = std::fs::read_dir("/proc/self/fd").unwrap();
    let descriptors = folder.map(|entry| entry.unwrap().path());
    let is_memory = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.starts_with("/memfd:vellum-aquila (deleted)"))
    };
    let blocks = |path: PathBuf| std::fs::metadata(path).map_or(0, |data| data.blocks());
    let sizes: Vec<u64> = descriptors.filter(is_memory).map(blocks).collect();
    (sizes.len(), sizes.iter().sum::<u64>() * 512)
}
