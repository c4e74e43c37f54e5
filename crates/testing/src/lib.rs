//! What the tests of several crates share: processes of their own, the kernel's count of their
//! memory, waiting for others, and witnesses of what code does not do.
//!
//! Only tests depend on this crate, and it depends on none of the others. What fails, panics.

pub mod allocations;
pub mod memory_group;
pub mod own_process;
pub mod patience;
pub mod system_calls;
