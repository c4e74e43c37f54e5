//! Counters of caches, for other processes to read while the caches work.
//!
//! Each cache has its counters in a memory file. Another process of the same user finds the file
//! among the descriptors of the process, and reads it: the cache notices nothing of that.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use vellum_aquila_core::{Counters, Statistics};

use crate::descriptor::Descriptor;
use crate::sys::OwnedMapping;

/// Threads with this name have the descriptors of a cache, which may not be the process' own.
pub(crate) const THREADS: &str = "vellum-faults";

/// What the names of the memory files have.
const NAME: &str = "vellum-aquila-counters";

/// The first word. It changes with the meaning of the others.
const MAGIC: u64 = 0x5645_4c4c_4143_0001;

/// Bytes of the counters of a processor, and of what is before those of the first: the magic
/// number, how many processors there are, and the frames of the cache.
const STEP: usize = size_of::<Counters>();

/// What opens a file that another process could have replaced.
const NOT_WAITING: i32 = libc::O_NONBLOCK | libc::O_NOCTTY;

/// More processors are not believed.
const MOST_PROCESSORS: u64 = 1 << 16;

/// The counters of a cache, in its memory file.
pub(crate) struct LiveCounters {
    mapped: OwnedMapping,
    processors: usize,
    /// Others read it as long as it is open.
    _file: Descriptor,
}

impl LiveCounters {
    /// Counters of a cache with so many frames.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn new(processors: usize, frames: u32) -> Result<Self, Errno> {
        let file = memfd_create(NAME, MemfdFlags::CLOEXEC)?;
        let bytes = (processors + 1) * STEP;
        ftruncate(&file, bytes as u64)?;
        let mapped = OwnedMapping::new(&file, 0, bytes, true)?;
        let counters = Self { mapped, processors, _file: Descriptor::new(file) };
        counters.set_frames(frames);
        counters.head()[1].store(processors as u64, Ordering::Relaxed);
        counters.head()[0].store(MAGIC, Ordering::Release);
        Ok(counters)
    }

    /// Those of all processors.
    pub(crate) fn get(&self) -> &[Counters] {
        let first = std::ptr::with_exposed_provenance(self.mapped.start() + STEP);
        // SAFETY: the mapping lives as long as this, begins with a page, and has so many. Counters
        // are atomic words, and the file is zero at first.
        unsafe { slice::from_raw_parts(first, self.processors) }
    }

    /// The cache has so many frames now.
    pub(crate) fn set_frames(&self, frames: u32) {
        self.head()[2].store(frames.into(), Ordering::Relaxed);
    }

    fn head(&self) -> &[AtomicU64; 3] {
        // SAFETY: as above; these words are before the counters.
        unsafe { &*std::ptr::with_exposed_provenance(self.mapped.start()) }
    }
}

/// A cache of any process.
#[derive(Debug)]
pub struct LiveCache {
    file: File,
    inode: u64,
}

impl LiveCache {
    /// A number that no other cache of the machine has now.
    pub fn number(&self) -> u64 {
        self.inode
    }

    /// What the cache has done so far. Dirty pages are not counted: it is zero.
    ///
    /// # Errors
    /// `InvalidData`: it is of another version of the library; what the system said.
    pub fn statistics(&self) -> io::Result<Statistics> {
        let step = |number: u64| {
            let mut words = [0; STEP / size_of::<u64>()];
            let mut bytes = [0; STEP];
            self.file.read_exact_at(&mut bytes, number * STEP as u64)?;
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes).to_le();
            }
            Ok::<_, io::Error>(words)
        };
        let head = step(0)?;
        if head[0] != MAGIC || head[1] > MOST_PROCESSORS {
            let what = "a cache of another version of the library";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let of = |number| {
            let words = step(number)?;
            Ok(Counters::of_words(std::array::from_fn(|at| words[at])))
        };
        let counters = (1..=head[1]).map(of).collect::<io::Result<Vec<_>>>()?;
        Ok(Statistics::of(&counters, 0, head[2] as u32))
    }
}

/// The caches of a process that handle faults. They stay readable when the process has ended.
///
/// # Errors
/// `NotFound`: there is no such process; `PermissionDenied`: it is another user's.
pub fn live_caches(process: u32) -> io::Result<Vec<LiveCache>> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let mut caches = Vec::new();
    find_in(&folder.join("fd"), &mut caches)?;
    for thread in fs::read_dir(folder.join("task"))? {
        let thread = thread?.path();
        let mut name = String::new();
        // A thread may end meanwhile.
        let _ = File::open(thread.join("comm")).and_then(|mut file| file.read_to_string(&mut name));
        if name.trim_end() == THREADS {
            let _ = find_in(&thread.join("fd"), &mut caches);
        }
    }
    Ok(caches)
}

/// Adds the caches whose files are among these descriptors, and which are new.
fn find_in(descriptors: &Path, caches: &mut Vec<LiveCache>) -> io::Result<()> {
    let own = format!("/memfd:{NAME} ");
    for descriptor in fs::read_dir(descriptors)? {
        let path = descriptor?.path();
        // It may be closed meanwhile.
        let is_own =
            |target: PathBuf| target.as_os_str().as_encoded_bytes().starts_with(own.as_bytes());
        // A name says nothing of the kind: to open a device or a pipe could take for ever.
        if fs::read_link(&path).is_ok_and(is_own)
            && fs::metadata(&path).is_ok_and(|data| data.is_file())
            && let Ok(file) = File::options().read(true).custom_flags(NOT_WAITING).open(&path)
            && let Ok(data) = file.metadata()
            && data.is_file()
        {
            let inode = data.ino();
            if caches.iter().all(|cache| cache.inode != inode) {
                caches.push(LiveCache { file, inode });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_could_read_the_counters() {
        let before = live_caches(std::process::id()).unwrap().len();
        let counters = LiveCounters::new(3, 77).unwrap();
        assert_eq!(counters.get().len(), 3);
        let caches = live_caches(std::process::id()).unwrap();
        assert!(caches.len() > before);
        let inode = rustix::fs::fstat(&counters._file).unwrap().st_ino;
        let found = caches.iter().find(|cache| cache.number() == inode).unwrap();
        let frames = || found.statistics().unwrap().frames;
        assert_eq!(found.statistics().unwrap(), Statistics { frames: 77, ..Statistics::default() });
        counters.set_frames(5);
        assert_eq!(frames(), 5);
        counters.head()[0].store(1, Ordering::Relaxed);
        assert_eq!(found.statistics().unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(live_caches(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
