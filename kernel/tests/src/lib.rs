//! Helpers for the tests of the kernel module: an exmap and its parts, accesses that may fault,
//! children that may die, and the kernel's counters.
//!
//! The tests run in a guest of the lab. Without `/dev/exmap`, or without morselfs, each test prints
//! a line and is skipped. A failure of a helper panics, unless a test checks the error: then the
//! helper returns an [`Errno`].
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

pub mod access;
pub mod backing;
pub mod child;
pub mod counters;
pub mod dax;
pub mod exmap;
pub mod fsx;
pub mod fuzz;
pub mod group;
pub mod kernel_log;
pub mod machine;
pub mod mapping;
pub mod morsel;
pub mod mounted;
pub mod nvme;
pub mod persistent;
pub mod random;
pub mod slow;
pub mod surface;
pub mod sys;
pub mod threads;
mod turn;
pub mod uring;
pub mod userfault;
pub mod vfio;

pub use dax::{Table, dax_turn};
pub use exmap::{DEVICE, Exmap, Vector, knows};
pub use mapping::Mapping;
pub use morsel::Morsel;
pub use mounted::Mounted;
pub use rustix::io::Errno;
pub use surface::{Outcome, Plan, Surface};
pub use turn::{Turn, morsel_turn, turn, turn_for, turn_with};

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of a last-level page table.
pub const TABLE_PAGES: u64 = 512;
