//! A cache, and how it is made.

use std::fmt;
use std::fs::File;
use std::ops::RangeBounds;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, ftruncate};
use vellum_aquila_core::{Layout, Statistics};

use crate::error::{Error, Result};
use crate::mapping::{Access, Mapping};
use crate::monitor::Monitor;
use crate::probe::{self, DirtyTracking, Faults, Frames};
use crate::shared::{DOING_LENGTH, PolicyChoice, Shared, Threads};
use crate::{PAGE_SIZE, signal};

/// Pages that a cache has at least. One instruction may access several pages at once (both operands
/// of a move may lie across a border), and so may each thread: with too few pages the threads would
/// take them from one another for ever.
const LEAST_PAGES: u32 = 64;

/// How a cache handles faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// In a signal handler, by userfaultfd: the cache is the program's own.
    Userfaultfd,
    /// In the kernel: `mmap`, and the page cache of the machine.
    Kernel,
}

impl Backend {
    /// Its name, which commands print.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Userfaultfd => probe::USERFAULTFD,
            Self::Kernel => "kernel",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Which backend to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The best that works here.
    #[default]
    Auto,
    /// This one, or an error.
    Only(Backend),
}

/// How a cache is made.
#[derive(Clone, Debug)]
pub struct Options {
    size: u64,
    capacity: u64,
    policy: PolicyChoice,
    backend: BackendChoice,
    dirty_tracking: DirtyTracking,
    frames: Frames,
    faults: Faults,
    direct_io: bool,
    least: u32,
}

impl Options {
    /// A cache of so many bytes: at least 256 KiB.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            capacity: size,
            policy: PolicyChoice::default(),
            backend: BackendChoice::default(),
            dirty_tracking: DirtyTracking::default(),
            frames: Frames::default(),
            faults: Faults::default(),
            direct_io: false,
            least: LEAST_PAGES,
        }
    }

    /// Allows caches of a page and more, which evict all the time: for tests that access one page
    /// at a time.
    #[doc(hidden)]
    #[must_use]
    pub fn without_minimum(mut self) -> Self {
        self.least = 1;
        self
    }

    /// Bytes to which the cache can grow ([`Cache::resize`]): 1.5 to 2 % of them are taken for its
    /// structures at once.
    #[must_use]
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// Which pages leave first.
    #[must_use]
    pub fn policy(mut self, policy: PolicyChoice) -> Self {
        self.policy = policy;
        self
    }

    /// How faults are handled.
    #[must_use]
    pub fn backend(mut self, backend: BackendChoice) -> Self {
        self.backend = backend;
        self
    }

    /// How the cache knows which pages are dirty.
    #[must_use]
    pub fn dirty_tracking(mut self, tracking: DirtyTracking) -> Self {
        self.dirty_tracking = tracking;
        self
    }

    /// Which memory has the pages of files. The default suits all programs. One that will map its
    /// files more than once, or pin pages, may ask for [`Frames::MemoryFile`], which spares it the
    /// move that [`Cache::map`] describes. The backend *kernel* does not use it.
    #[must_use]
    pub fn frames(mut self, frames: Frames) -> Self {
        self.frames = frames;
        self
    }

    /// Which threads handle faults. The backend *kernel* does not use it.
    #[must_use]
    pub fn faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// Reads and writes whole pages of files past the kernel's page cache (`O_DIRECT`), so that the
    /// kernel keeps no second copy of them. Where a file system cannot, the cache goes through the
    /// page cache as it does by default. The backend *kernel* does not use it.
    ///
    /// The default suits files that are in the page cache, and storage that profits from the
    /// kernel's own read-ahead and delayed writes. Direct I/O suits files larger than memory: the
    /// cache's budget is then all the memory that they take.
    #[must_use]
    pub fn direct_io(mut self, direct: bool) -> Self {
        self.direct_io = direct;
        self
    }

    /// Makes the cache.
    ///
    /// # Errors
    /// [`Error::BadSize`]; [`Error::NoBackend`] if the one that was asked for does not work here.
    pub fn build(self) -> Result<Cache> {
        let pages = |bytes: u64| {
            u32::try_from(bytes / PAGE_SIZE as u64)
                .ok()
                .filter(|pages| (self.least..=Layout::MOST_FRAMES).contains(pages))
                .ok_or(Error::BadSize { bytes })
        };
        let size = pages(self.size)?;
        let capacity = pages(self.capacity.max(self.size))?;
        if self.backend == BackendChoice::Only(Backend::Kernel) {
            let why_kernel = "it was asked for".to_owned();
            return Ok(Cache { shared: None, why_kernel, least: self.least });
        }
        match (probe::open(self.dirty_tracking, self.faults), self.backend) {
            (Ok(uffd), _) => {
                let threads = match self.faults {
                    Faults::Signal => {
                        signal::install()?;
                        None
                    }
                    Faults::Monitor => Some(Monitor::start(&uffd.descriptor)?),
                };
                let threads = threads.map(|monitor| Box::new(monitor) as Box<dyn Threads>);
                // While a file moves to a memory file, accesses may fail as beyond its end. A
                // handler of the signal tries again; the monitor does not hear of it.
                let frames = match self.faults {
                    Faults::Signal => self.frames,
                    Faults::Monitor => Frames::MemoryFile,
                };
                let choices = (frames, self.direct_io);
                let shared = Shared::new(size, capacity, self.policy, choices, uffd, threads)?;
                Ok(Cache { shared: Some(shared), why_kernel: String::new(), least: self.least })
            }
            (Err(error), BackendChoice::Auto) => {
                Ok(Cache { shared: None, why_kernel: error.to_string(), least: self.least })
            }
            (Err(error), BackendChoice::Only(_)) => Err(error),
        }
    }
}

/// A cache of file pages, and the mappings that show them.
///
/// It lives as long as the last of its mappings.
#[derive(Clone, Debug)]
pub struct Cache {
    /// `None`: the kernel's page cache is used.
    shared: Option<Arc<Shared>>,
    why_kernel: String,
    /// Pages that it has at least.
    least: u32,
}

impl Cache {
    /// A cache of so many bytes, on the best backend that works here.
    ///
    /// # Errors
    /// [`Error::BadSize`].
    pub fn new(bytes: u64) -> Result<Self> {
        Options::new(bytes).build()
    }

    /// The backend.
    pub fn backend(&self) -> Backend {
        if self.shared.is_some() { Backend::Userfaultfd } else { Backend::Kernel }
    }

    /// Why it is not a better backend; `None` if it is the best.
    pub fn why_not_better(&self) -> Option<&str> {
        self.shared.is_none().then_some(&self.why_kernel[..])
    }

    /// Whether the first store to a clean page faults, however the file is mapped, so that only
    /// pages that were changed are written back. Before Linux 6.4 that is so only while a file has
    /// one mapping and no pin, and the answer is no. `None` if the kernel keeps that.
    pub fn write_protects(&self) -> Option<bool> {
        self.shared.as_ref().map(|shared| shared.write_protects())
    }

    /// Maps a range of a file's bytes, which begins at a page. It may go beyond the file's end: the
    /// pages there are accessible as soon as the file has them.
    ///
    /// The file must be open for reading, and for writing if it is mapped for that. All mappings of
    /// a file through one cache show the same pages, whichever descriptor they were made with. What
    /// the program does to the file by other ways (`write(2)`) is not seen in pages that are in the
    /// cache.
    ///
    /// The second mapping of a file, and the first pin, move the file's pages to a memory file, for
    /// as long as the file has a mapping: all its pages leave the cache, after they were written
    /// back, and accesses to them wait meanwhile ([`Frames`]).
    ///
    /// # Errors
    /// [`Error::BadRange`], [`Error::Access`], [`Error::NotAFile`], [`Error::TooMany`]; what the
    /// system said. What the storage said if pages could not be written back for a second mapping;
    /// then they are still in the cache.
    pub fn map(
        &self,
        file: &File,
        range: impl RangeBounds<u64>,
        access: Access,
    ) -> Result<Mapping> {
        Mapping::new(self.shared.as_ref(), file, range, access)
    }

    /// Changes the length of a file, mapped or not. An access to pages beyond it is SIGBUS
    /// afterwards, as it is for `mmap`. The descriptor must be open for writing.
    ///
    /// # Errors
    /// [`Error::Access`]; [`Error::Full`] if pages beyond the new end are pinned; what the system
    /// said.
    pub fn set_length(&self, file: &File, length: u64) -> Result<()> {
        let failed = |errno| Error::of(DOING_LENGTH, errno);
        if fcntl_getfl(file).map_err(failed)? & OFlags::RWMODE == OFlags::RDONLY {
            return Err(Error::Access { doing: DOING_LENGTH });
        }
        match &self.shared {
            Some(shared) => shared.set_length(file, length),
            None => ftruncate(file, length).map_err(failed),
        }
    }

    /// Makes the cache larger, up to its capacity, or smaller, by evicting pages.
    ///
    /// # Errors
    /// [`Error::BadSize`] if it is less than 256 KiB or more than the capacity; [`Error::Full`] if
    /// too many pages are pinned; what the storage said of a write. [`Error::Unsupported`] if the
    /// kernel has the cache.
    pub fn resize(&self, bytes: u64) -> Result<()> {
        let doing = "resizing the cache";
        let shared = self.shared.as_ref().ok_or(Error::Unsupported { doing })?;
        let pages = bytes / PAGE_SIZE as u64;
        if pages < self.least.into() || pages > shared.capacity().into() {
            return Err(Error::BadSize { bytes });
        }
        shared.resize(pages as u32)
    }

    /// What the cache has done. `None` if the kernel has the cache, and counts for the whole
    /// machine only.
    pub fn statistics(&self) -> Option<Statistics> {
        self.shared.as_ref().map(|shared| shared.statistics())
    }
}
