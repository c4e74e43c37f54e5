//! Shared parts of the experiments on single page accesses: pages that are all in memory, each of
//! which names the next one to read, so that a chain of accesses takes as long as they take one by
//! one.
//!
//! The reads are dependent, as the paper's are: its 219 ns for a read of 128 GiB are the latency of
//! one access, TLB miss included. Meanwhile the processor does the work that does not depend on the
//! page that was read (the page's state and its check); the claim is that this costs next to
//! nothing. The word within the page changes from read to read and depends on nothing, so that all
//! of a page's cache lines are used.

pub mod chain;
pub mod clock;
pub mod forms;
pub mod hash_table;
pub mod memory;
pub mod page_pool;
pub mod pattern_device;
pub mod resident;
pub mod rows;
pub mod size;
pub mod sparse;
pub mod textbook;
pub mod textbook_pages;
pub mod walk;
pub mod ways;

pub use chain::Chain;
pub use hash_table::HashTable;
pub use resident::Resident;
