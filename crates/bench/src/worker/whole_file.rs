//! All bytes of a file in a process: the process reads it, maps it, or gets it from the cache
//! daemon; and random accesses to the pages of a file that is longer than memory.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::{ptr, slice};

use anyhow::{Context as _, Result, ensure};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use serde::{Deserialize, Serialize};
use vellum_aquila::{Backend, BackendChoice, Faults, Options};
use vellum_morsel::{Access, Client, Mapping};

use crate::machine::kib;
use crate::workload::values::Random;
use crate::workload::{Measured, Plan, drive_threads};

/// Bytes of a page.
const PAGE: usize = 4096;

/// How a process gets a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadMethod {
    /// It reads the file into its own memory.
    Read,
    /// It maps the file and has the kernel populate all of it at once, like the paper's competitor.
    Map,
    /// It asks the daemon at this socket.
    Daemon(PathBuf),
    /// It maps the file, and tells the kernel that it will access pages at random.
    MapAtRandom,
    /// The same through a cache of its own (Aquila).
    Aquila {
        /// Bytes of the cache.
        cache: u64,
        /// Whether the cache reads past the kernel's page cache.
        direct: bool,
        /// Whether its own threads handle the faults.
        monitor: bool,
    },
}

/// The memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight {
    /// Bytes of its own memory, and of its share of shared memory.
    pub memory: u64,
    /// Bytes of its page tables.
    pub tables: u64,
}

impl Weight {
    /// Of this process.
    pub fn now() -> Weight {
        let bytes = |path, name| kib(path, name).unwrap_or(0) * 1024;
        Weight {
            memory: bytes("/proc/self/smaps_rollup", "Pss"),
            tables: bytes("/proc/self/status", "VmPTE"),
        }
    }
}

/// A file in memory.
#[derive(Debug)]
pub(super) enum Held {
    File(FileMapping),
    Morsel(Mapping),
    Aquila(vellum_aquila::Mapping),
}

impl Held {
    /// Gets a file.
    pub(super) fn get(method: &LoadMethod, path: &Path) -> Result<Held> {
        let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        Ok(match method {
            LoadMethod::Read => Held::File(FileMapping::copy_of(&file)?),
            LoadMethod::Map => Held::File(FileMapping::new(&file)?),
            LoadMethod::MapAtRandom => Held::File(FileMapping::at_random(&file)?),
            LoadMethod::Aquila { cache, direct, monitor } => {
                let only = BackendChoice::Only(Backend::Userfaultfd);
                let faults = if *monitor { Faults::Monitor } else { Faults::Signal };
                let options = Options::new(*cache).backend(only).faults(faults);
                let cache = options.direct_io(*direct).build()?;
                let mapping = cache.map(&file, .., vellum_aquila::Access::Read)?;
                mapping.advise(vellum_aquila::Advice::Random)?;
                Held::Aquila(mapping)
            }
            LoadMethod::Daemon(socket) => {
                let loaded = Client::new(socket).load(&file, |_| {})?;
                Held::Morsel(loaded.morsel.map(Access::Read)?)
            }
        })
    }

    /// The sum of each page's first word. Computing it accesses all pages.
    pub(super) fn sum(&self) -> Result<u64> {
        Ok(sum(self.bytes()?))
    }

    fn bytes(&self) -> Result<&[u8]> {
        Ok(match self {
            Held::File(mapping) => mapping.bytes(),
            Held::Morsel(mapping) => mapping.view()?,
            // SAFETY: mapped as long as `self`, and no process writes the file any more.
            Held::Aquila(mapping) => unsafe {
                slice::from_raw_parts(mapping.as_ptr(), mapping.len())
            },
        })
    }

    /// Accesses pages at random, and checks the first word of each.
    pub(super) fn access(&self, plan: &Plan) -> Result<Measured> {
        let bytes = self.bytes()?;
        let pages = bytes.len() as u64 / PAGE as u64;
        drive_threads(plan, |_| {
            Ok(|random: &mut Random| {
                let page = random.below(pages);
                let word = bytes[page as usize * PAGE..].first_chunk::<8>();
                let word = word.map(|word| u64::from_le_bytes(*word));
                ensure!(word == Some(first_word(page)), "page {page} begins with {word:?}");
                Ok(1)
            })
        })
    }
}

/// The first word of a page of a file that [`make`] has made.
fn first_word(page: u64) -> u64 {
    (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The sum of each page's first word.
pub fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks(PAGE).filter_map(|page| page.first_chunk::<8>());
    words.fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

/// Creates a file of `bytes` bytes in which all pages differ. Returns its sum.
///
/// # Errors
/// If it cannot be written.
pub fn make(path: &Path, bytes: u64) -> Result<u64> {
    const CHUNK: usize = 1 << 20;
    ensure!(bytes.is_multiple_of(CHUNK as u64), "whole chunks of 1 MiB");
    let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    let mut whole = 0_u64;
    // Storage that compresses pages shall find nothing in them.
    let mut random = Random::new(1);
    let words = (0..CHUNK / 8).flat_map(|_| random.bits().to_le_bytes());
    let mut chunk: Vec<u8> = words.collect();
    for start in (0..bytes).step_by(CHUNK) {
        for (at, page) in chunk.chunks_mut(PAGE).enumerate() {
            let word = first_word(start / PAGE as u64 + at as u64);
            page[..8].copy_from_slice(&word.to_le_bytes());
        }
        whole = whole.wrapping_add(sum(&chunk));
        std::io::Write::write_all(&mut file, &chunk)?;
    }
    file.sync_all()?;
    Ok(whole)
}

/// Has the kernel cache a file.
///
/// # Errors
/// If it cannot be read.
pub fn warm(path: &Path) -> Result<()> {
    fs::read(path).map(drop).with_context(|| format!("reading {}", path.display()))
}

/// A whole file of the experiment, which no process changes: mapped, or read into memory.
#[derive(Debug)]
pub struct FileMapping {
    base: *mut u8,
    length: usize,
}

impl FileMapping {
    /// With all its pages.
    ///
    /// # Errors
    /// If it cannot be mapped.
    pub fn new(file: &File) -> Result<FileMapping> {
        FileMapping::of(file, MapFlags::SHARED | MapFlags::POPULATE)
    }

    /// For accesses at random: the kernel reads nothing ahead.
    fn at_random(file: &File) -> Result<FileMapping> {
        let mapping = FileMapping::of(file, MapFlags::SHARED)?;
        // SAFETY: the range is the mapping's, and this advice changes no contents.
        unsafe { madvise(mapping.base.cast(), mapping.length, Advice::Random)? };
        Ok(mapping)
    }

    fn of(file: &File, flags: MapFlags) -> Result<FileMapping> {
        let length = usize::try_from(file.metadata()?.len())?;
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, flags, file, 0)? };
        Ok(FileMapping { base: base.cast(), length })
    }

    /// Reads the file into a mapping, which drop returns to the kernel; an allocator might keep the
    /// memory.
    ///
    /// # Errors
    /// If there is no memory, or it cannot be read.
    pub fn copy_of(mut file: &File) -> Result<FileMapping> {
        let length = usize::try_from(file.metadata()?.len())?;
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: without an address the kernel takes addresses that no mapping uses.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), length, rights, flags)? };
        let copy = FileMapping { base: base.cast(), length };
        // SAFETY: just mapped, zeroed, and no other thread has it yet.
        file.read_exact(unsafe { slice::from_raw_parts_mut(copy.base, length) })?;
        Ok(copy)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as `self`, and no process writes it, or the file, any more.
        unsafe { slice::from_raw_parts(self.base, self.length) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and every reference into it borrows the value. There is
        // nothing to be done about a failure.
        let _ = unsafe { munmap(self.base.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_gives_the_same_bytes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let expected = make(&path, 2 << 20).unwrap();
        warm(&path).unwrap();
        for method in [LoadMethod::Read, LoadMethod::Map] {
            let held = Held::get(&method, &path).unwrap();
            assert_eq!(held.sum().unwrap(), expected, "{method:?}");
            // Other tests run at the same time, so the process has at least this test's memory.
            assert!(Weight::now().memory >= 2 << 20, "{method:?}");
        }
        let plan = Plan { threads: 2, seconds: 0.05, seed: 1 };
        let cache = 1 << 20;
        let kinds = [(false, false), (true, false), (true, true)];
        let aquila = kinds.map(|(direct, monitor)| LoadMethod::Aquila { cache, direct, monitor });
        for method in [LoadMethod::MapAtRandom].iter().chain(&aquila) {
            let held = match Held::get(method, &path) {
                Ok(held) => held,
                Err(error) => {
                    println!("left out: {error}");
                    continue;
                }
            };
            assert_eq!(held.sum().unwrap(), expected, "{method:?}");
            plan.until_more_than(100, |plan| held.access(plan).unwrap());
        }
        let no_daemon = LoadMethod::Daemon(directory.path().join("socket"));
        assert!(Held::get(&no_daemon, &path).is_err());
        assert!(make(&path, 5).is_err());
    }
}
