//! Devices: the storage of pages that are not in memory.
//!
//! A [`Device`] moves pages between a surface and storage. A page identifier is a position in the
//! storage. On a surface of the pool the page is at the same position, or in a slot.
//!
//! - [`FileDevice`]: a file or a block device, past the kernel's page cache where it allows that,
//!   with io_uring or a few threads below;
//! - [`MemoryDevice`]: bytes in memory, for tests and stores that need not last.
//!
//! Every device promises three things. It calls a [`ReadDone`] exactly once, and holds none of its
//! locks during the call. It does not touch the caller's memory after `read` or `write` has
//! returned or a `ReadDone` was called. Dropping it waits for the reads in flight and calls their
//! `ReadDone`s.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use vellum_vm::{PageRange, Surface};

mod error;
mod file;
mod file_new;
mod file_open;
mod memory;
mod promptness;
mod sync_memory;
#[cfg(any(test, feature = "testing"))]
mod testing;
mod threads;
mod transfer;
mod uring;
mod uring_prompt_reads;
mod uring_reads;
mod workers;

pub use error::DeviceError;
pub use file::FileDevice;
pub use file_new::UnpublishedFile;
pub use file_open::{Direct, FileOptions, IoEngineChoice};
pub use memory::{Completion, MemoryDevice};
pub use sync_memory::SyncMemory;
#[cfg(any(test, feature = "testing"))]
pub use testing::{Call, Fault, FaultPlan, FaultyDevice, HookedDevice, Operation, OperationCounts};
pub use uring_prompt_reads::{RegisteredMemory, registrable_memory};

/// Pages of the storage, and where a read puts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    /// The pages of the storage.
    pub pages: PageRange,
    /// The place of the first of them on the surface, in pages.
    pub place: u64,
}

impl ReadRange {
    /// The range of the surface.
    pub fn target(self) -> PageRange {
        PageRange::new(self.place, self.pages.count)
    }
}

/// A read to the same position on the surface.
impl From<PageRange> for ReadRange {
    fn from(pages: PageRange) -> ReadRange {
        ReadRange { pages, place: pages.start }
    }
}

/// Storage for pages of 4 KiB.
///
/// # Contract of the callers
///
/// `read` and `start_reads` write into the surface's memory. The caller holds the target of a read
/// exclusively (no other thread reads it but optimistically, none writes it) from the call until it
/// returns or, for `start_reads`, until the read's [`ReadDone`] is called; and keeps the surface
/// mapped and the target populated or free to be populated for as long. The pool owns its surfaces
/// and holds the page's latch in the state Locked, which is what makes these safe functions sound.
///
/// # Contract of the devices
///
/// The device populates a target before it, or the kernel for it, writes to it: on some
/// surfaces a write to a released page is an error
/// ([`Surface::fault_behaviour`](vellum_vm::FaultBehaviour)). The former contents do not matter.
pub trait Device: Send + Sync + fmt::Debug + 'static {
    /// Reads pages into the surface and populates their target. Blocks.
    ///
    /// # Errors
    /// If the device could not read all of them; the contents of the target are then undefined.
    /// `UnexpectedEof` if the pages do not lie wholly within the storage.
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()>;

    /// Starts reading each range into the surface and returns. The device calls each [`ReadDone`]
    /// exactly once with what [`read`](Device::read) would have returned, on any thread; it may
    /// call it on the calling thread before this returns. A `ReadDone` may call the device again;
    /// it should not block. The start does not block either, except on storage that answers without
    /// making a thread sleep: the calling thread does such reads itself, which is cheapest.
    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>);

    /// A handle by which the owner of a surface registers its memory with the device, so that reads
    /// into it cost less. By default the handle does nothing.
    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        let _ = surface;
        RegisteredMemory::none()
    }

    /// Makes all writes, in flight together, and blocks until all are done. Each write gets its own
    /// result. Writes must not overlap. What is written need not be durable: see
    /// [`sync`](Device::sync).
    fn write(&self, writes: &mut [Write<'_>]);

    /// Makes durable all writes, and all changes of the length, that ended before the call.
    ///
    /// # Errors
    /// After a failure the caller cannot know what is durable, and a retry does not help: the
    /// kernel may have dropped the data that it could not write.
    fn sync(&self) -> io::Result<()>;

    /// The length of the storage in pages, rounded down.
    ///
    /// # Errors
    /// The error of the kernel.
    fn pages(&self) -> io::Result<u64>;

    /// Makes the storage exactly `pages` pages long. Growing allocates the space, so that a full
    /// disk shows here and not when a page is written back. Shrinking frees the space at the end.
    /// New pages read as zeros. A block device keeps its length, and accepts any `pages` within it.
    ///
    /// # Errors
    /// `StorageFull` if there is no space; the length has not changed.
    fn resize(&self, pages: u64) -> io::Result<()>;

    /// Unlocks the storage for other processes, and for other devices of this process. From now on
    /// the caller does not write to it, and does not trust what it reads. A device without locks
    /// does nothing.
    fn unlock(&self) {}

    /// Whether the storage answers reads without making a thread sleep, as far as the device has
    /// seen. Reads ahead of need then save calls, and hide no wait. By default it does not.
    fn answers_at_once(&self) -> bool {
        false
    }

    /// The kind of this device, and how it moves bytes.
    fn info(&self) -> DeviceInfo;
}

/// One of the writes that a device makes together: both `parts`, in order, go to the place of
/// `page`.
#[derive(Debug)]
pub struct Write<'a> {
    /// The first page written.
    pub page: u64,
    /// The bytes: the second part follows the first in the file and may be empty. Lengths are
    /// multiples of 4096 bytes, addresses of parts that are not empty are aligned to 4096.
    pub parts: [&'a [u8]; 2],
    /// The result, after [`Device::write`]; `Ok` before.
    pub result: io::Result<()>,
}

impl<'a> Write<'a> {
    /// An entry to be written.
    pub fn new(page: u64, parts: [&'a [u8]; 2]) -> Self {
        Self { page, parts, result: Ok(()) }
    }

    /// Length of all parts, in bytes.
    pub fn len(&self) -> usize {
        self.parts[0].len() + self.parts[1].len()
    }

    /// Whether there is nothing to write.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The callback of a read: the device calls it exactly once, on any thread. A callback that is
/// dropped uncalled calls itself with an error, so that no thread waits forever.
pub struct ReadDone(Option<Box<dyn FnOnce(io::Result<()>) + Send>>);

impl ReadDone {
    /// Wraps a function.
    pub fn new(done: impl FnOnce(io::Result<()>) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Calls the function with the result of the read.
    pub fn call(mut self, result: io::Result<()>) {
        if let Some(done) = self.0.take() {
            done(result);
        }
    }
}

impl Drop for ReadDone {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(io::Error::other("the device dropped the read without a result")));
        }
    }
}

impl fmt::Debug for ReadDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadDone")
    }
}

/// The kind of a device, and how it moves bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The file, if there is one.
    pub path: Option<PathBuf>,
    /// `Ok` if I/O bypasses the kernel's page cache; otherwise the reason why it does not.
    pub direct: Result<(), String>,
    /// The engine that moves the bytes: `io_uring`, `threads`, `memory`, ...
    pub engine: &'static str,
}

impl DeviceInfo {
    /// Makes one, for devices outside this crate.
    pub fn new(
        path: Option<PathBuf>,
        direct: Result<(), String>,
        engine: &'static str,
    ) -> DeviceInfo {
        DeviceInfo { path, direct, engine }
    }
}

/// A shared device is a device, so that a test can keep a handle on the device of a pool.
impl<D: Device + ?Sized> Device for Arc<D> {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        (**self).read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        (**self).start_reads(surface, reads);
    }

    fn registered_memory(&self, surface: &Surface) -> RegisteredMemory {
        (**self).registered_memory(surface)
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        (**self).write(writes);
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }

    fn pages(&self) -> io::Result<u64> {
        (**self).pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        (**self).resize(pages)
    }

    fn unlock(&self) {
        (**self).unlock();
    }

    fn answers_at_once(&self) -> bool {
        (**self).answers_at_once()
    }

    fn info(&self) -> DeviceInfo {
        (**self).info()
    }
}
