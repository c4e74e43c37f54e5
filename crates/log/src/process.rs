//! Whether this is still the process that opened a log, or the child of its `fork`.
//!
//! A child has a copy of the memory, but none of the threads: a lock that one of them held is held
//! for ever, and no thread carries records. It shares the files and their lock with its parent.

use std::process::id;

/// The process that made this.
#[derive(Debug)]
pub(crate) struct Home(u32);

impl Home {
    /// This process.
    pub(crate) fn new() -> Home {
        Home(id())
    }

    /// Whether this process is that one.
    pub(crate) fn is_here(&self) -> bool {
        self.0 == id()
    }
}
