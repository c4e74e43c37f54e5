//! How pages come onto a surface and leave it: one file per way, behind one sealed trait.
//!
//! | file | needs | release |
//! |---|---|---|
//! | [`madvise`] | any kernel | one call and one TLB flush per entry |
//! | [`process_madvise`] | 6.13, or a permissive older one | one call per 1,024 entries; from 6.16 one flush |
//! | [`exmap`] | Vellum's kernel module | one call and one flush per 512 entries; no memory comes or goes |
//!
//! The surface of an exmap is not a `Reservation` but a mapping of a device, its pages must be
//! populated before they are written, and they are not zeroed then: that is why these are answers
//! of the backend. Nothing outside this folder, `memory.rs` and the probe asks which backend is in
//! use.
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

pub(crate) mod exmap;
pub(crate) mod madvise;
pub(crate) mod process_madvise;

/// A way of populating and releasing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// One `madvise` call per entry; works on every kernel.
    Madvise,
    /// `process_madvise` on the own process, up to 1,024 entries per call. Allowed from Linux
    /// 6.13; from 6.16 on a call flushes the TLBs of the other processors once.
    ProcessMadvise,
    /// Vellum's kernel module, `/dev/exmap`: up to 512 entries per call, and frames of the
    /// surface's own, which are taken from the kernel once and locked (`RLIMIT_MEMLOCK`).
    Exmap,
}

impl BackendKind {
    /// All kinds that this crate knows, the plainest first.
    pub const ALL: [Self; 3] = [Self::Madvise, Self::ProcessMadvise, Self::Exmap];

    /// The kind of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Madvise => "madvise",
            Self::ProcessMadvise => "process_madvise",
            Self::Exmap => "exmap",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which backend a surface is to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendChoice {
    /// The fastest that works here, found by trying them once per process.
    ///
    /// That is exmap only where a surface says how many frames it needs
    /// ([`Surface::reserve_with_frames`](crate::Surface::reserve_with_frames)) and they can be had
    /// and locked: an exmap takes its memory at once, which nobody wants who did not say how much.
    #[default]
    Auto,
    /// This one, or an error that says why it does not work here.
    Only(BackendKind),
}

/// What happens when a program touches a released page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultBehaviour {
    /// It reads as zeros, and a write puts a fresh zeroed page there. Optimistic readers are
    /// therefore safe: they read zeros and find out when they validate.
    ReadsZeros,
    /// It reads as zeros, too, but a write is a segmentation fault (`EFAULT` where the kernel
    /// writes, as when it reads from a file): populate a page before anybody writes it.
    WritesFault,
}

impl FaultBehaviour {
    /// Whether a write to a released page puts memory there.
    pub const fn writing_populates(self) -> bool {
        matches!(self, Self::ReadsZeros)
    }
}

/// A way of populating and releasing the pages of a range of addresses.
///
/// Methods get the address of page 0 and entries that the surface has checked: those whose
/// `result` is `Ok` lie within the mapping and are to be worked on; the others are left alone.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Which one this is.
    fn kind(&self) -> BackendKind;

    /// What touching a released page does.
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

    /// Puts memory behind the pages, without altering the contents of those that have some.
    ///
    /// # Safety
    /// Entries whose result is `Ok` lie within a live mapping at `base`.
    unsafe fn populate(&self, base: NonNull<u8>, entries: &mut [Entry]);

    /// As [`Self::populate`] for entries of one page each, which fail with `EXIST` if it held
    /// memory before; of several threads one succeeds. `OPNOTSUPP` where that cannot be told.
    ///
    /// # Safety
    /// As [`Self::populate`].
    unsafe fn claim(&self, _base: NonNull<u8>, entries: &mut [Entry]) {
        entries.iter_mut().for_each(|entry| entry.result = Err(Errno::OPNOTSUPP));
    }

    /// The page tables of the surface, which lies in that memory; or in one line why not.
    fn page_tables(&self, _memory: &Memory) -> Result<PageTables, String> {
        Err("only an exmap shows the page tables of its surface".to_owned())
    }

    /// The longest range of which a failed release has taken nothing away.
    fn released_whole(&self) -> u64 {
        u64::MAX
    }

    /// Takes the memory away; the pages read as zeros afterwards.
    ///
    /// # Safety
    /// As [`Self::populate`], and nobody relies on the contents of the pages.
    unsafe fn release(&self, base: NonNull<u8>, entries: &mut [Entry]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_found_by_their_names() {
        for kind in BackendKind::ALL {
            assert_eq!(BackendKind::named(kind.name()), Some(kind));
        }
        assert_eq!(BackendKind::named("auto"), None);
    }
}
