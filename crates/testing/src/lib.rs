//! Helpers for the tests of several crates: tests in their own processes, the kernel's count of
//! their memory, waiting for other threads, random numbers, small disks, and checks that code makes
//! no system calls and no allocations.
//!
//! Only tests depend on this crate, and it depends on none of the others. A failure panics.

pub mod allocations;
pub mod memory_group;
pub mod own_process;
pub mod patience;
pub mod random;
pub mod rounds;
pub mod small_disk;
pub mod system_calls;
