//! Descriptors of the machine's own, out of the program's way.
//!
//! They have high numbers, so that the program's have those that they would have without a machine:
//! scripts choose numbers from 3 on. And a program in ring 0 cannot close them: it does not know
//! that they are open, and often closes all that it does not know.

use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{Errno, fcntl_dupfd_cloexec};

/// The first number that the machine takes, if the limit of the process allows that.
const FIRST: RawFd = 768;

/// Numbers that can be kept from the program.
const MOST: usize = 4096;

/// A bit for each number that is the machine's.
static OWN: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// A number that is the machine's as long as this lives, which is to end before the descriptor.
#[derive(Debug)]
pub(crate) struct Kept(RawFd);

impl Kept {
    /// The number of a descriptor that the machine has.
    pub(crate) fn new(descriptor: &OwnedFd) -> Self {
        let number = descriptor.as_raw_fd();
        if let Some((word, bit)) = place(number) {
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Self(number)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if let Some((word, bit)) = place(self.0) {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

fn place(number: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(number).ok()?;
    Some((OWN.get(number / 64)?, 1 << (number % 64)))
}

/// Makes a duplicate that is the machine's, and that is closed by `exec`.
///
/// # Errors
/// When the process has no more descriptors.
pub(crate) fn keep(descriptor: BorrowedFd<'_>) -> Result<(OwnedFd, Kept), Errno> {
    let above = |first| fcntl_dupfd_cloexec(descriptor, first);
    let copy: OwnedFd = above(FIRST).or_else(|_| above(0))?;
    let kept = Kept::new(&copy);
    Ok((copy, kept))
}

/// Whether a number is the machine's.
pub(crate) fn is_own(number: u64) -> bool {
    // The kernel, too, looks at 32 bits.
    let found = place(number as RawFd);
    found.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// The first number of the machine's in a range.
pub(crate) fn first_own(first: u64, last: u64) -> Option<u64> {
    (first..=last.min(MOST as u64 - 1)).find(|number| is_own(*number))
}
