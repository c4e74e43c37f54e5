//! A buffer manager as textbooks have it, to compare the pool with: a fixed array of frames, and a
//! hash table from the number of a page to its frame.
//!
//! It is as good as we can make it. Its frames are in huge pages and stay mapped. A lookup reads
//! one line of the [table] and takes no latch of it. A frame has a [latch] with a version,
//! so a reader can do without a pin, as it can in the pool. A clock chooses the pages that leave;
//! dirty ones are written first; reads and writes bypass the page cache. A thread that misses makes
//! room for its page itself: it evicts one page, since no call to the kernel needs a batch.
//!
//! It is a benchmark's contestant and no more: pages of one length, no checksums, no asynchronous
//! reads, a thread that may wait for another one by looking again and again.

pub mod latch;
pub mod manager;
pub mod memory;
pub mod storage;
pub mod table;

#[cfg(test)]
mod tests;

pub use manager::{Error, Textbook};
pub use storage::{FileStorage, Storage};
