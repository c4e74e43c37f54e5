//! The backends by name, and the guarantees of each.

use std::fmt;

/// A way of populating and releasing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// One `madvise` call per entry; works on every kernel.
    Madvise,
    /// `process_madvise` on the calling process, up to 1,024 entries per call. Allowed from Linux
    /// 6.13; from 6.16 on a call flushes the TLBs of the other processors once.
    ProcessMadvise,
    /// Vellum's kernel module, `/dev/exmap`: up to 512 entries per call, and frames of the
    /// surface's own, which the module allocates once and locks (`RLIMIT_MEMLOCK`).
    Exmap,
}

impl BackendKind {
    /// All kinds that this crate knows, the simplest first.
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
    /// The fastest that works on this machine; the crate tries them once per process.
    ///
    /// That is exmap only if the caller says how many frames a surface needs
    /// ([`Surface::reserve_with_frames`](crate::Surface::reserve_with_frames)), and the module can
    /// allocate and lock them: an exmap takes its memory at once, so the caller should have said
    /// how much.
    #[default]
    Auto,
    /// This one, or an error that says why it does not work on this machine.
    Only(BackendKind),
}

/// What happens when a program accesses a released page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultBehaviour {
    /// It reads as zeros, and a write puts a fresh zeroed page there. So optimistic readers are
    /// safe: they read zeros, and their validation fails.
    ReadsZeros,
    /// It reads as zeros, too, but a write is a segmentation fault (`EFAULT` if the kernel writes,
    /// for example when it reads from a file): populate a page before any code writes it.
    WritesFault,
}

impl FaultBehaviour {
    /// Whether a write to a released page populates it.
    pub const fn writing_populates(self) -> bool {
        matches!(self, Self::ReadsZeros)
    }
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
