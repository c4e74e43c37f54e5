//! Pages in memory: for tests, and for stores that need not outlive the process.
#![allow(unsafe_code)]

use std::io;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::io::Errno;
use vellum_vm::{Entry, PAGE_SIZE, Surface};

use super::workers::{Job, Workers};
use super::{Device, DeviceInfo, ReadDone, ReadRange, Write};

/// From this many pages on, one call that populates them is cheaper than their faults.
const POPULATE_FROM: u64 = 8;

/// Where the [`ReadDone`]s of a [`MemoryDevice`] are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Completion {
    /// On the thread that starts the reads, before `start_reads` returns.
    #[default]
    Inline,
    /// On a thread of the device.
    Thread,
}

/// Bytes in memory that behave like a file: writing past the end makes it longer, and addresses
/// and lengths must be aligned as for direct I/O.
#[derive(Debug)]
pub struct MemoryDevice {
    // Dropped first: finishes the reads in flight.
    workers: Option<Workers>,
    bytes: Arc<Bytes>,
    limit: u64,
}

#[derive(Debug, Default)]
struct Bytes(RwLock<Vec<u8>>);

impl Bytes {
    fn read(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryDevice {
    /// An empty device without a limit.
    pub fn new() -> Self {
        Self::from_snapshot(Vec::new())
    }

    /// A device with these contents, for example those that another had when its process "crashed".
    pub fn from_snapshot(bytes: Vec<u8>) -> Self {
        Self { workers: None, bytes: Arc::new(Bytes(RwLock::new(bytes))), limit: u64::MAX }
    }

    /// Limits the length to `pages` pages. At that length the disk is full.
    #[must_use]
    pub fn limited_to(mut self, pages: u64) -> Self {
        self.limit = pages;
        self
    }

    /// Chooses where reads complete.
    ///
    /// # Errors
    /// If the system has no more threads.
    pub fn completing(mut self, completion: Completion) -> io::Result<Self> {
        self.workers = match completion {
            Completion::Inline => None,
            Completion::Thread => Some(Workers::start(1)?),
        };
        Ok(self)
    }

    /// All writes so far, synced or not.
    pub fn snapshot(&self) -> Vec<u8> {
        self.bytes.read().clone()
    }

    /// Makes the bytes at least `len` long, with zeros.
    fn grow(&self, bytes: &mut Vec<u8>, len: usize) -> io::Result<()> {
        if (len / PAGE_SIZE) as u64 > self.limit {
            return Err(Errno::NOSPC.into());
        }
        if len > bytes.len() {
            bytes.try_reserve(len - bytes.len()).map_err(|_| Errno::NOSPC)?;
            bytes.resize(len, 0);
        }
        Ok(())
    }

    fn write_one(&self, write: &Write<'_>) -> io::Result<()> {
        let aligned = |part: &&[u8]| {
            part.is_empty() || (part.len() | part.as_ptr().addr()).is_multiple_of(PAGE_SIZE)
        };
        if !write.parts.iter().all(aligned) {
            return Err(Errno::INVAL.into());
        }
        let mut position = position(write.page)?;
        let mut bytes = self.bytes.write();
        let end = position.checked_add(write.len()).ok_or(Errno::FBIG)?;
        if end > bytes.len() {
            self.grow(&mut bytes, end)?;
        }
        for part in write.parts {
            bytes[position..position + part.len()].copy_from_slice(part);
            position += part.len();
        }
        Ok(())
    }

    /// The memory for a read. Populates it, unless the writes of this thread will do that as well.
    fn target(surface: &Surface, read: ReadRange, here: bool) -> io::Result<Target> {
        let range = read.target();
        if !range.is_within(surface.pages()) {
            return Err(Errno::INVAL.into());
        }
        // On a surface where a write populates a released page, a few pages need no call.
        let by_touching = !surface.must_be_populated();
        let is_worth_it = !(here && by_touching) || range.count >= POPULATE_FROM;
        if is_worth_it && !surface.is_claimed_by_owner() {
            let mut entry = [Entry::new(range)];
            surface.populate(&mut entry);
            entry[0].result?;
        }
        let address = surface.base().as_ptr().wrapping_add(position(range.start)?);
        Ok(Target { address, position: position(read.pages.start)?, len: range.bytes() })
    }
}

/// Where a page is in the bytes.
fn position(page: u64) -> io::Result<usize> {
    let page = usize::try_from(page).ok();
    page.and_then(|page| page.checked_mul(PAGE_SIZE)).ok_or_else(|| Errno::FBIG.into())
}

/// The caller's memory that a read fills.
struct Target {
    address: *mut u8,
    position: usize,
    len: usize,
}

// SAFETY: the caller of `read` or `start_reads` gave the memory to the read exclusively, until it
// is done, on whatever thread.
unsafe impl Send for Target {}

impl Target {
    fn fill(&self, bytes: &Bytes) -> io::Result<()> {
        let bytes = bytes.read();
        let source = self
            .position
            .checked_add(self.len)
            .and_then(|end| bytes.get(self.position..end))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        // SAFETY: the target is `len` bytes of the surface that no other code uses until the read
        // is done (contract of `Device`), and not part of the device's own bytes.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), self.address, self.len) };
        Ok(())
    }
}

impl Device for MemoryDevice {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        Self::target(surface, read, true)?.fill(&self.bytes)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        for (read, done) in reads {
            let target = match Self::target(surface, read, self.workers.is_none()) {
                Ok(target) => target,
                Err(error) => {
                    done.call(Err(error));
                    continue;
                }
            };
            match &self.workers {
                None => done.call(target.fill(&self.bytes)),
                Some(workers) => {
                    let bytes = Arc::clone(&self.bytes);
                    workers.run([Box::new(move || done.call(target.fill(&bytes))) as Job]);
                }
            }
        }
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        for write in writes {
            write.result = self.write_one(write);
        }
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        Ok((self.bytes.read().len() / PAGE_SIZE) as u64)
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        let len = position(pages)?;
        let mut bytes = self.bytes.write();
        self.grow(&mut bytes, len)?;
        bytes.truncate(len);
        Ok(())
    }

    fn answers_at_once(&self) -> bool {
        true
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo { path: None, direct: Ok(()), engine: "memory" }
    }
}
