//! The ways to populate and release pages: one file per backend. All implement one sealed trait.
//!
//! | file | needs | release |
//! |---|---|---|
//! | [`madvise`] | any kernel | one call and one TLB flush per entry |
//! | [`process_madvise`] | 6.13, or a permissive older one | one call per 1,024 entries; from 6.16 one flush |
//! | [`exmap`] | Vellum's kernel module | one call and one flush per 512 entries; frames stay |
//!
//! The surface of an exmap is not a `Reservation` but a mapping of a device, its pages must be
//! populated before they are written, and they are not zeroed then. So methods of the backend
//! answer these questions. No code outside this folder and `memory.rs` asks which backend is in
//! use. `choice.rs` picks one that the trials in `trial.rs` found to work.
//!
//! The trait is sealed: it is visible only inside the crate, because its methods trust that the
//! surface has checked every range.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use rustix::io::Errno;

use self::exmap::PageTables;
use crate::memory::Memory;
use crate::range::Entry;

pub(crate) mod choice;
pub(crate) mod exmap;
mod kind;
pub(crate) mod madvise;
pub(crate) mod process_madvise;
pub(crate) mod trial;

pub use self::kind::{BackendChoice, BackendKind, FaultBehaviour};

/// A way of populating and releasing the pages of a range of addresses.
///
/// Methods get the address of page 0 and entries that the surface has checked. Those whose `result`
/// is `Ok` lie within the mapping, and the method works on them; it skips the others.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Which one this is.
    fn kind(&self) -> BackendKind;

    /// What an access to a released page does.
    fn fault_behaviour(&self) -> FaultBehaviour {
        FaultBehaviour::ReadsZeros
    }

    /// Whether a page holds zeros after it was populated, if it held nothing before.
    fn fresh_pages_are_zeroed(&self) -> bool {
        true
    }

    /// Whether the kernel takes advice on the pages.
    fn takes_advice(&self) -> bool {
        true
    }

    /// Populates the pages, without altering the contents of those that hold memory.
    ///
    /// # Safety
    /// Entries whose result is `Ok` lie within a live mapping at `base`.
    unsafe fn populate(&self, base: NonNull<u8>, entries: &mut [Entry]);

    /// As [`Self::populate`] for entries of one page each, which fail with `EXIST` if the page held
    /// memory before; of several threads one succeeds. `OPNOTSUPP` if the backend cannot tell.
    ///
    /// # Safety
    /// As [`Self::populate`].
    unsafe fn claim(&self, _base: NonNull<u8>, entries: &mut [Entry]) {
        entries.iter_mut().for_each(|entry| entry.result = Err(Errno::OPNOTSUPP));
    }

    /// Gives a backend that has frames of its own so many.
    fn resize_frames(&self, _frames: u64) -> Result<(), Errno> {
        Ok(())
    }

    /// The page tables of the surface, which lies in that memory; or one line that says why not.
    fn page_tables(&self, _memory: &Memory) -> Result<PageTables, String> {
        Err("only an exmap shows the page tables of its surface".to_owned())
    }

    /// The longest range of which a failed release has released nothing.
    fn released_whole(&self) -> u64 {
        u64::MAX
    }

    /// Releases the memory; the pages read as zeros afterwards.
    ///
    /// # Safety
    /// As [`Self::populate`], and no code relies on the contents of the pages.
    unsafe fn release(&self, base: NonNull<u8>, entries: &mut [Entry]);
}
