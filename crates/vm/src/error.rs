//! Errors of address space and of surfaces. Each says what to do about it.

use rustix::io::Errno;

use crate::advice::Advice;
use crate::backend::BackendKind;
use crate::range::PageRange;

/// Why the kernel did not make or grow a mapping.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The system's pages are not 4 KiB.
    #[error(
        "this system has pages of {found} bytes, but 4096 are needed; use a kernel built with \
         4 KiB pages"
    )]
    PageSize {
        /// Bytes of a page here.
        found: usize,
    },
    /// More bytes than an address space can hold.
    #[error("{purpose}: {bytes} bytes do not fit into the address space; ask for less")]
    TooLarge {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
    },
    /// RLIMIT_AS is too low.
    #[error(
        "{purpose}: mapping {bytes} bytes would exceed the address-space limit of {limit} bytes \
         (RLIMIT_AS); raise it with `ulimit -v unlimited` (no memory is used by the mapping itself)"
    )]
    AddressSpaceLimit {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
        /// The limit in bytes.
        limit: u64,
    },
    /// RLIMIT_DATA is too low; Linux counts private writable mappings against it.
    #[error(
        "{purpose}: mapping {bytes} bytes would exceed the data limit of {limit} bytes \
         (RLIMIT_DATA); raise it with `ulimit -d unlimited` (no memory is used by the mapping \
         itself)"
    )]
    DataLimit {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
        /// The limit in bytes.
        limit: u64,
    },
    /// `vm.overcommit_memory` is 2 and the commit limit is reached.
    #[error(
        "{purpose}: mapping {bytes} bytes was refused because vm.overcommit_memory is 2, which \
         charges address space as if it were memory; set it to 0 (sysctl vm.overcommit_memory=0) \
         or raise vm.overcommit_ratio"
    )]
    Overcommit {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
    },
    /// Another mapping lies where this one would have to grow.
    #[error(
        "{purpose}: cannot grow to {bytes} bytes in place, because the addresses from {address:#x} \
         on are used by another mapping; close and open it again, which places it elsewhere"
    )]
    AddressTaken {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
        /// The first address that would have been needed.
        address: usize,
    },
    /// The mapping was made once, with room to grow, and no room is left.
    #[error(
        "{purpose}: cannot grow to {bytes} bytes in place, because it was mapped once, with room \
         for {mapped}; close and open it again, which maps more"
    )]
    RoomUsedUp {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
        /// Bytes that are mapped.
        mapped: usize,
    },
    /// The kernel refused for another reason.
    #[error(
        "{purpose}: the kernel refused to map {bytes} bytes: {errno}; with ENOMEM look at \
         vm.max_map_count and the process's limits"
    )]
    Refused {
        /// The purpose of the mapping.
        purpose: &'static str,
        /// Bytes asked for in all.
        bytes: usize,
        /// The error of the kernel.
        errno: Errno,
    },
}

/// Why an operation on a surface failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SurfaceError {
    /// The kernel refused the address space.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The backend did not get or give back frames.
    #[error(
        "the backend cannot have {frames} frames of 4 KiB: {errno}; ENOMEM means that the machine \
         or the memory cgroup has no more, EPERM that this user may not lock more (`ulimit -l`), \
         EBUSY that pages have more"
    )]
    Frames {
        /// The frames asked for.
        frames: u64,
        /// The error of the kernel.
        errno: Errno,
    },
    /// The chosen backend does not work here.
    #[error("the {backend} backend does not work here: {reason}; auto takes one that does")]
    BackendUnavailable {
        /// The backend asked for.
        backend: BackendKind,
        /// What happened when the program tried it.
        reason: String,
    },
    /// The range is not within the surface.
    #[error("pages {}+{} are not within a surface of {pages} pages", range.start, range.count)]
    OutOfRange {
        /// The range asked for.
        range: PageRange,
        /// Pages of the surface.
        pages: u64,
    },
    /// The range does not start and end at a multiple of [`HUGE_PAGES`](crate::HUGE_PAGES).
    #[error(
        "pages {}+{} are no whole huge pages; start and end at multiples of 512",
        range.start, range.count
    )]
    Unaligned {
        /// The range asked for.
        range: PageRange,
    },
    /// The kernel refused the advice.
    #[error("the kernel refused the advice {advice:?}: {errno}; it may be too old for it")]
    AdviceRefused {
        /// The advice.
        advice: Advice,
        /// The error of the kernel.
        errno: Errno,
    },
    /// The backend takes no advice: its pages are not the kernel's to swap or to put together.
    #[error("the {backend} backend takes no advice, so not {advice:?} either")]
    NoAdvice {
        /// The advice.
        advice: Advice,
        /// The backend in use.
        backend: BackendKind,
    },
    /// The process cannot read the surface's page tables.
    #[error("no look into the surface's page tables: {reason}")]
    NoPageTables {
        /// Why, and what to do.
        reason: String,
    },
    /// The residency of pages cannot be read.
    #[error("cannot read /proc/self/pagemap: {errno}; is /proc mounted?")]
    Pagemap {
        /// The error of the kernel.
        errno: Errno,
    },
}
