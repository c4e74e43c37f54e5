//! The backend on a kernel module: `/dev/exmap` (Leis et al., SIGMOD 2023, section 4).
//!
//! An exmap is a surface with a pool of frames of its own. The module allocates them when the exmap
//! is made and moves them between pool and surface from then on. Populating and releasing allocate,
//! zero and charge nothing. Populating changes page-table entries without locks. A batch of 512
//! costs one call. A batch that is released flushes TLBs once; a batch that is populated does not
//! flush. The price is that the memory is allocated, and locked (`RLIMIT_MEMLOCK`), whether pages
//! are resident or not. So the caller says how many frames a surface needs
//! ([`Surface::reserve_with_frames`](crate::Surface::reserve_with_frames)).
//!
//! Differences from the other backends, and the code that deals with each:
//!
//! - *A write to a released page is a segmentation fault*; reading one gives zeros, as everywhere.
//!   So a program populates pages before it writes them ([`FaultBehaviour::WritesFault`]). This
//!   holds for the kernel, too: a read from a file into an absent page fails with `EFAULT`.
//! - *A page that was just populated has arbitrary contents*, of this process' other pages of the
//!   surface, or zeros. A read overwrites them; a caller that needs zeros writes them
//!   ([`Surface::fresh_pages_are_zeroed`](crate::Surface::fresh_pages_are_zeroed)).
//! - *Frames run out* (`ENOMEM`) when the program populates more pages than there are frames.
//! - *A page that the kernel is using is not released* (`EBUSY`): direct I/O into or out of it is
//!   in flight, or ended a moment ago: the kernel reports that I/O is done a little before it
//!   unpins the pages. So release retries for [`PATIENCE`], and reports the pages that are still
//!   busy. The other backends would release the page and leave the I/O with memory that no process
//!   sees.
//! - *It grows within what was mapped* at first: see `memory.rs`.
//! - *No advice*: frames are not the kernel's to swap, and not parts of huge pages.
//! - *A forked child* has neither surface nor vectors and must not touch them, as with every
//!   surface. Nor can it change the parent's through the descriptor: commands act on the process
//!   that mapped the surface, and answer `EPERM` to others.
//!
//! `ALLOC` and `FREE` of one page by two threads have one winner: an entry of a page table changes
//! by one compare-and-exchange, and the thread whose exchange succeeds has the frame.
#![allow(unsafe_code)]

mod device;
mod interfaces;
mod memory;
mod tables;

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vellum_uapi::exmap::{ALLOC, ENTRY_PAGES, FREE};

use self::device::Device;
pub(crate) use self::device::PATH;
use self::interfaces::{Found, Interfaces};
pub(crate) use self::memory::ExmapMemory;
pub use self::tables::PageTables;
use super::{Backend, BackendKind, FaultBehaviour};
use crate::error::{ReserveError, SurfaceError};
use crate::limits;
use crate::memory::{Memory, bytes_of};
use crate::range::Entry;

/// How long release retries for busy pages. The kernel unpins the pages of reported I/O within
/// microseconds, unless the thread that ends it was just preempted.
const PATIENCE: Duration = Duration::from_millis(20);
/// Rounds that yield to other threads, before rounds of sleep.
const YIELDS: u32 = 32;
/// The shortest time of a round of sleep.
const NAP: Duration = Duration::from_micros(100);

/// An exmap.
#[derive(Debug)]
pub(crate) struct Exmap {
    device: Device,
    interfaces: Interfaces,
}

impl Exmap {
    /// Makes an exmap of `frames` frames (at least one) with a surface of `pages` pages.
    ///
    /// # Errors
    /// [`SurfaceError::BackendUnavailable`] or [`SurfaceError::Reserve`].
    pub(crate) fn open(pages: u64, frames: u64) -> Result<(Self, ExmapMemory), SurfaceError> {
        let backend = BackendKind::Exmap;
        let unavailable = |reason| SurfaceError::BackendUnavailable { backend, reason };
        let frames = frames.max(1);
        let device = Device::open().map_err(unavailable)?;
        let count = interfaces::count();
        device.create(frames, count).map_err(unavailable)?;
        let memory = ExmapMemory::new(device.as_fd(), bytes_of(pages)?, frames)
            .map_err(|error| no_tables(&error).map_or(SurfaceError::Reserve(error), unavailable))?;
        let interfaces = Interfaces::new(&device, count)
            .map_err(|errno| unavailable(format!("its vectors cannot be mapped: {errno}")))?;
        Ok((Self { device, interfaces }, memory))
    }

    /// Has the module carry out a command; true if no entry failed.
    ///
    /// # Safety
    /// Entries whose result is `Ok` lie within the surface, and no code relies on memory that the
    /// command takes.
    unsafe fn run(&self, command: u32, found: Found, entries: &mut [Entry]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.interfaces.take().run(&self.device, command, found, entries) }
    }

    /// Retries the entries whose pages are busy.
    ///
    /// # Safety
    /// As for [`Backend::release`].
    #[cold]
    unsafe fn release_busy(&self, entries: &mut [Entry]) {
        let is_busy = |entry: &Entry| entry.result == Err(Errno::BUSY);
        let start = Instant::now();
        let mut rounds = 0;
        while entries.iter().any(is_busy) && start.elapsed() < PATIENCE {
            if rounds < YIELDS {
                thread::yield_now();
            } else {
                thread::sleep(NAP);
            }
            rounds += 1;
            let busy = entries.iter().filter(|entry| is_busy(entry));
            let mut again: Vec<Entry> = busy.map(|entry| Entry::new(entry.range)).collect();
            // SAFETY: the caller's promise.
            unsafe { self.run(FREE, Found::Fine, &mut again) };
            let busy = entries.iter_mut().filter(|entry| is_busy(entry));
            busy.zip(again).for_each(|(entry, again)| entry.result = again.result);
        }
    }
}

/// Why there is no surface, if the cause is that its page tables are locked memory of the user.
fn no_tables(error: &ReserveError) -> Option<String> {
    let ReserveError::Refused { errno: Errno::NOMEM, .. } = error else { return None };
    limits::lock_limit()?;
    Some(format!(
        "the page tables of its surface, the frames and the interfaces are together more than this \
         user may lock, {}: raise that with `ulimit -l`, or ask for fewer frames",
        limits::lockable()
    ))
}

impl Backend for Exmap {
    fn kind(&self) -> BackendKind {
        BackendKind::Exmap
    }

    fn fault_behaviour(&self) -> FaultBehaviour {
        FaultBehaviour::WritesFault
    }

    fn fresh_pages_are_zeroed(&self) -> bool {
        false
    }

    fn takes_advice(&self) -> bool {
        false
    }

    unsafe fn populate(&self, _base: NonNull<u8>, entries: &mut [Entry]) {
        // SAFETY: the caller's promise; nothing is taken away.
        unsafe { self.run(ALLOC, Found::Fine, entries) };
    }

    fn released_whole(&self) -> u64 {
        ENTRY_PAGES
    }

    unsafe fn claim(&self, _base: NonNull<u8>, entries: &mut [Entry]) {
        // SAFETY: the caller's promise; nothing is taken away.
        unsafe { self.run(ALLOC, Found::Fails, entries) };
    }

    fn resize_frames(&self, frames: u64) -> Result<(), Errno> {
        self.device.resize(frames)
    }

    fn page_tables(&self, memory: &Memory) -> Result<PageTables, String> {
        match memory {
            Memory::Exmap(memory) => PageTables::map(&self.device, memory),
            Memory::Reserved(_) => Err("this surface is not the exmap's".to_owned()),
        }
    }

    unsafe fn release(&self, _base: NonNull<u8>, entries: &mut [Entry]) {
        // SAFETY: the caller's promise.
        if !unsafe { self.run(FREE, Found::Fine, entries) } {
            // SAFETY: as above.
            unsafe { self.release_busy(entries) };
        }
    }
}
