//! How pages come onto a surface and leave it: one file per way, behind one sealed trait.
//!
//! | file | needs | release |
//! |---|---|---|
//! | [`madvise`] | any kernel | one call and one TLB flush per entry |
//! | [`process_madvise`] | 6.13, or a permissive older one | one call per 1,024 entries; from 6.16 one flush |
//!
//! **The place of exmap.** A backend on a kernel module gets a file `exmap.rs` here, a variant in
//! [`BackendKind`], and cases in `probe::works` and `probe::open`. Its surface is not a
//! `Reservation` but a mapping of a device, and touching a released page raises a signal instead of
//! reading zeros: that is why [`Backend::fault_behaviour`] belongs to the backend. Nothing outside
//! this folder and `surface.rs` asks which backend is in use.
//!
//! The trait is sealed: it is visible only inside the crate, because its methods trust that the
//! surface has checked every range.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use crate::range::Entry;

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
}

impl BackendKind {
    /// All kinds that this crate knows, the plainest first.
    pub const ALL: [Self; 2] = [Self::Madvise, Self::ProcessMadvise];

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Madvise => "madvise",
            Self::ProcessMadvise => "process_madvise",
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

    /// Puts memory behind the pages, without altering their contents.
    ///
    /// # Safety
    /// Entries whose result is `Ok` lie within a live mapping at `base`.
    unsafe fn populate(&self, base: NonNull<u8>, entries: &mut [Entry]);

    /// Takes the memory away; the pages read as zeros afterwards.
    ///
    /// # Safety
    /// As [`Self::populate`], and nobody relies on the contents of the pages.
    unsafe fn release(&self, base: NonNull<u8>, entries: &mut [Entry]);
}
