//! Advice that a program gives the kernel about pages.

use crate::sys;

/// How the program expects to use pages. No advice alters contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Advice {
    /// Pages in swap are needed soon.
    WillNeed,
    /// Not needed soon: the kernel swaps these pages out first (Linux 5.4).
    Cold,
    /// Swap out now (Linux 5.4).
    PageOut,
    /// Let huge pages fill the range. Touching one page may then make 512 resident, so this is
    /// only for ranges that are never released page by page.
    HugePage,
    /// Undo [`Advice::HugePage`]; how every surface starts.
    NoHugePage,
    /// Put the pages of the range into huge pages now, as far as possible (Linux 6.1).
    Collapse,
}

impl Advice {
    /// The number of the advice in the kernel's interface.
    pub(crate) fn raw(self) -> i32 {
        match self {
            Self::WillNeed => libc::MADV_WILLNEED,
            Self::Cold => libc::MADV_COLD,
            Self::PageOut => libc::MADV_PAGEOUT,
            Self::HugePage => libc::MADV_HUGEPAGE,
            Self::NoHugePage => libc::MADV_NOHUGEPAGE,
            Self::Collapse => sys::MADV_COLLAPSE,
        }
    }
}
