//! The Rust view of `kernel/include/uapi`: numbers, layouts, and how entries of a vector are
//! packed. It makes no system call and needs no `std`.
//!
//! The headers are the contract. A test compiles them and compares every constant, size and offset
//! with what is here, in both directions, so that the two cannot drift apart.
#![no_std]

pub mod dax;
pub mod exmap;
pub mod exmap_published;
mod ioctl;
pub mod morsel;
