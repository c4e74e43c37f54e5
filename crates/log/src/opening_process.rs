//! Whether this is still the process that opened a log, or the child of its `fork`.
//!
//! A child has a copy of the memory, but none of the threads: a lock that one of them held is held
//! for ever, and no thread carries records. It shares the files and their lock with its parent.
//!
//! Each append asks, and so does each view of a store. So the answer takes no system call: the
//! kernel zeroes a page in every child.
#![allow(unsafe_code)]

use std::process::id;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The process that made this. A `fork` makes a child, which is another process.
#[derive(Debug)]
pub struct OpeningProcess {
    id: u32,
    /// `None` where the kernel does not zero pages in children: Linux before 4.14.
    mark: Option<Mark>,
}

impl OpeningProcess {
    /// This process.
    #[expect(clippy::new_without_default, reason = "it is of the moment at which it is made")]
    pub fn new() -> OpeningProcess {
        OpeningProcess { id: id(), mark: Mark::new().ok() }
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether this process is that one.
    pub fn is_here(&self) -> bool {
        match &self.mark {
            Some(mark) => mark.is_there(),
            None => self.id == id(),
        }
    }
}

/// A page that is zero in the children of this process.
#[derive(Debug)]
struct Mark(NonNull<AtomicU8>);

/// The kernel maps whole pages.
const BYTES: usize = 1;

// SAFETY: the page is mapped for as long as the mark lives, and its first byte is atomic.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Mark {
    fn new() -> Result<Mark, Errno> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses addresses that no mapping has.
        let page = unsafe { mmap_anonymous(null_mut(), BYTES, access, flags)? };
        let mark = Mark(NonNull::new(page.cast()).ok_or(Errno::NOMEM)?);
        // SAFETY: the page is this function's, and is zero in this process, too.
        unsafe { madvise(page, BYTES, Advice::LinuxWipeOnFork)? };
        mark.byte().store(1, Ordering::Relaxed);
        Ok(mark)
    }

    fn byte(&self) -> &AtomicU8 {
        // SAFETY: the page is mapped, readable and writable, and no code takes a plain reference.
        unsafe { self.0.as_ref() }
    }

    fn is_there(&self) -> bool {
        self.byte().load(Ordering::Relaxed) == 1
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A child has the page, too. SAFETY: no other code knows the address.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use super::*;

    /// Runs `look` in the child of a fork, and returns what it says.
    fn in_child(look: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child calls nothing that allocates, and exits.
        match unsafe { libc::fork() } {
            // SAFETY: the child ends here.
            0 => unsafe { libc::_exit(i32::from(look())) },
            child => {
                let mut status = 0;
                // SAFETY: it is this function's child.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert!(libc::WIFEXITED(status));
                libc::WEXITSTATUS(status) == 1
            }
        }
    }

    #[test]
    fn a_child_is_another_process() {
        let here = OpeningProcess::new();
        assert!(here.mark.is_some(), "this kernel zeroes the page in children");
        let by_number = OpeningProcess { id: id(), mark: None };
        for process in [&here, &by_number] {
            assert!(process.is_here());
            assert!(!in_child(|| process.is_here()));
            assert!(in_child(|| !in_child(|| process.is_here())), "nor is a child's child");
            assert!(process.is_here());
        }
    }
}
