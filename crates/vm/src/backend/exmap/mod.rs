//! The backend on a kernel module: `/dev/exmap` (Leis et al., SIGMOD 2023, section 4).
//!
//! An exmap is a surface with a pool of frames of its own. They are taken from the kernel when it
//! is made and change hands between pool and surface from then on: nothing is allocated, zeroed or
//! accounted for when a page comes or goes, entries of page tables change without locks, a batch of
//! 512 costs one call, and TLBs are flushed once for a batch that is released and not at all for
//! one that is populated. The price is that the memory is taken, and locked (`RLIMIT_MEMLOCK`),
//! whether pages are resident or not: hence a surface is told how many frames it needs
//! ([`Surface::reserve_with_frames`](crate::Surface::reserve_with_frames)).
//!
//! What differs from the other backends, and who deals with it:
//!
//! - *A write to a released page is a segmentation fault*; reading one gives zeros, as everywhere.
//!   So pages are populated before they are written ([`FaultBehaviour::WritesFault`]). The kernel
//!   writes too: a read from a file into a page that is not there fails with `EFAULT`.
//! - *A page that was just populated has arbitrary contents*, of this process' other pages of the
//!   surface, or zeros. A read overwrites them; who wants zeros writes them
//!   ([`Surface::fresh_pages_are_zeroed`](crate::Surface::fresh_pages_are_zeroed)).
//! - *Frames run out* (`ENOMEM`) when more pages are populated than there are frames.
//! - *A page that the kernel is using is not released* (`EBUSY`): direct I/O into or out of it is
//!   under way, or was until a moment ago, as the kernel says that I/O is done a little before it
//!   lets go of the pages. So release asks again for [`PATIENCE`], and reports what is still busy.
//!   The other backends would take the page away and leave the I/O with memory that nobody sees.
//! - *It grows within what was mapped* at first: see `memory.rs`.
//! - *No advice*: frames are not the kernel's to swap, and not parts of huge pages.
//! - *A forked child* has neither surface nor vectors and must not touch them, as with every
//!   surface. Nor can it change the parent's through the descriptor: commands act on the process
//!   that mapped the surface, and say `EPERM` to others.
//!
//! `ALLOC` and `FREE` of one page by two threads have one winner: an entry of a page table changes
//! by one compare-and-exchange, and whoever did it has the frame.
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

/// How long release asks again for pages that are busy. I/O that has been reported as done lets go
/// within microseconds, unless the thread that ends it was just preempted.
const PATIENCE: Duration = Duration::from_millis(20);
/// Rounds in which others may run, before rounds of sleep.
const YIELDS: u32 = 32;
/// What a round of sleep takes, at least.
const NAP: Duration = Duration::from_micros(100);

/// An exmap.
#[derive(Debug)]
pub(crate) struct Exmap {
    device: Device,
    interfaces: Interfaces,
}

impl Exmap {
    /// Makes an exmap of so many frames (at least one) with a surface of so many pages.
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

    /// Has a command carried out; true if no entry failed.
    ///
    /// # Safety
    /// Entries whose result is `Ok` lie within the surface, and nobody relies on what the command
    /// takes away.
    unsafe fn run(&self, command: u32, found: Found, entries: &mut [Entry]) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.interfaces.take().run(&self.device, command, found, entries) }
    }

    /// Asks again for the pages of those entries that are busy.
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
