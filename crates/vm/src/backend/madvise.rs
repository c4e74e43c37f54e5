//! The backend that works on every kernel: one `madvise` call per entry.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::Errno;

use super::{Backend, BackendKind};
use crate::range::{Entry, PageRange};
use crate::{PAGE_SIZE, sys};

/// How often a call is retried when the kernel answers EAGAIN, before the entry fails with it.
pub(super) const AGAIN_LIMIT: u32 = 1_000;

/// How pages are populated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Populate {
    /// `MADV_POPULATE_WRITE` (Linux 5.14).
    Advise,
    /// A write to each page that changes nothing.
    Touch,
}

/// One `madvise(MADV_DONTNEED)` per entry; populates by `MADV_POPULATE_WRITE` or by touching.
#[derive(Debug)]
pub(crate) struct Madvise {
    populate: Populate,
}

impl Madvise {
    /// The backend; `populates` says whether `MADV_POPULATE_WRITE` works here.
    pub(crate) fn new(populates: bool) -> Self {
        Self { populate: if populates { Populate::Advise } else { Populate::Touch } }
    }

    /// The backend with a given way of populating, for tests of the way that is not used here.
    #[cfg(test)]
    pub(crate) fn with(populate: Populate) -> Self {
        Self { populate }
    }
}

impl Backend for Madvise {
    fn kind(&self) -> BackendKind {
        BackendKind::Madvise
    }

    unsafe fn populate(&self, base: NonNull<u8>, entries: &mut [Entry]) {
        for entry in entries.iter_mut().filter(|entry| entry.result.is_ok()) {
            entry.result = match self.populate {
                // SAFETY: within the mapping (caller); populating alters nothing.
                Populate::Advise => unsafe { advise(base, entry.range, libc::MADV_POPULATE_WRITE) },
                Populate::Touch => {
                    // SAFETY: within the mapping (caller).
                    unsafe { touch(base, entry.range) };
                    Ok(())
                }
            };
        }
    }

    unsafe fn release(&self, base: NonNull<u8>, entries: &mut [Entry]) {
        for entry in entries.iter_mut().filter(|entry| entry.result.is_ok()) {
            // SAFETY: the caller's promise.
            entry.result = unsafe { advise(base, entry.range, libc::MADV_DONTNEED) };
        }
    }
}

/// The address of a page.
pub(super) fn address(base: NonNull<u8>, page: u64) -> *mut u8 {
    base.as_ptr().wrapping_add(page as usize * PAGE_SIZE)
}

/// Gives advice on one range, and retries if the kernel asks for that.
///
/// # Safety
/// The range lies within a live mapping at `base`, and no code relies on contents that the advice
/// drops.
pub(crate) unsafe fn advise(base: NonNull<u8>, range: PageRange, advice: i32) -> Result<(), Errno> {
    if range.count == 0 {
        return Ok(());
    }
    let start = address(base, range.start);
    let mut again = 0;
    loop {
        // SAFETY: the caller's promise.
        match unsafe { sys::madvise(start, range.bytes(), advice) } {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if again < AGAIN_LIMIT => {
                again += 1;
                std::thread::yield_now();
            }
            result => return result,
        }
    }
}

/// Populates by a write to each page that changes nothing, also while other threads write to the
/// page.
///
/// # Safety
/// The range lies within a live mapping at `base`.
unsafe fn touch(base: NonNull<u8>, range: PageRange) {
    for page in range.start..range.start + range.count {
        // SAFETY: a byte of a live mapping that is only accessed atomically here.
        let byte = unsafe { AtomicU8::from_ptr(address(base, page)) };
        // The zero is hidden, because compilers turn `x |= 0` into a load, and a load only maps
        // the shared zero page.
        byte.fetch_or(black_box(0), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Surface;

    #[test]
    fn touching_populates_and_keeps_contents() {
        let surface = Surface::with_backend(64, Box::new(Madvise::with(Populate::Touch))).unwrap();
        // SAFETY: page 3 is within the surface and no one else has it.
        unsafe { surface.address(3).write(7) };
        let all = PageRange::new(0, 64);
        assert_eq!(surface.populate(&mut [Entry::new(all)]), 0);
        assert_eq!(surface.resident_pages(all), Ok(64));
        // SAFETY: as above.
        assert_eq!(unsafe { surface.address(3).read() }, 7);
        // SAFETY: the contents are not needed any more.
        assert_eq!(unsafe { surface.release(&mut [Entry::new(all)]) }, 0);
        assert_eq!(surface.resident_pages(all), Ok(0));
    }
}
