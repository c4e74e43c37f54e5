//! A surface whose pages only the test touches, so that its operations are safe to call.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use vellum_vm::{BackendChoice, BackendKind, Entry, Errno, PAGE_SIZE, PageRange, Surface, probe};

/// A surface under test. Only one thread at a time touches a page: tests give each thread its own
/// pages.
#[derive(Debug)]
pub struct Own {
    pub surface: Surface,
}

impl Own {
    pub fn new(pages: u64, backend: BackendKind) -> Self {
        Self { surface: Surface::reserve(pages, BackendChoice::Only(backend)).unwrap() }
    }

    /// As [`new`](Self::new), with `frames` frames if the backend has frames of its own.
    pub fn with_frames(pages: u64, frames: u64, backend: BackendKind) -> Self {
        let backend = BackendChoice::Only(backend);
        Self { surface: Surface::reserve_with_frames(pages, frames, backend).unwrap() }
    }

    /// Fills a page with bytes that depend on the value. Populates it first if a write does not do
    /// that.
    pub fn fill(&self, page: u64, value: u8) {
        if !self.surface.fault_behaviour().writing_populates() {
            assert_eq!(self.surface.populate(&mut [Entry::page(page)]), 0, "page {page}");
        }
        // SAFETY: the page is within the surface, and no other thread touches it (see `Own`).
        unsafe { self.surface.address(page).write_bytes(value, PAGE_SIZE) };
    }

    /// A copy of a page.
    pub fn copy(&self, page: u64) -> Vec<u8> {
        let mut bytes = vec![0_u8; PAGE_SIZE];
        let from = self.surface.address(page).as_ptr();
        // SAFETY: as above.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), PAGE_SIZE) };
        bytes
    }

    /// Whether all bytes of a page have the value.
    pub fn holds(&self, page: u64, value: u8) -> bool {
        self.copy(page).iter().all(|byte| *byte == value)
    }

    pub fn release(&self, entries: &mut [Entry]) -> usize {
        // SAFETY: `Own` hands out no references into pages.
        unsafe { self.surface.release(entries) }
    }

    pub fn read(&self, file: impl AsFd, offset: u64, entries: &mut [Entry]) -> usize {
        // SAFETY: as above.
        unsafe { self.surface.read(file.as_fd(), offset, entries) }
    }

    /// Whether a page that was just populated has the contents that the backend promises: zeros, or
    /// any bytes.
    pub fn is_fresh(&self, page: u64) -> bool {
        !self.surface.fresh_pages_are_zeroed() || self.holds(page, 0)
    }

    /// Resident pages of the whole surface.
    pub fn resident(&self) -> u64 {
        self.surface.resident_pages(PageRange::new(0, self.surface.pages())).unwrap()
    }
}

/// Pages that the kernel refuses to release while this value lives: they are locked in memory or,
/// on an exmap, pinned by a pipe.
#[derive(Debug, Default)]
pub struct Refused {
    ends: Vec<OwnedFd>,
}

impl Refused {
    /// The error with which the kernel refuses to release a page of the backend.
    pub fn errno(backend: BackendKind) -> Errno {
        if backend == BackendKind::Exmap { Errno::BUSY } else { Errno::INVAL }
    }

    /// One more page.
    pub fn add(&mut self, own: &Own, page: u64) {
        let address = own.surface.address(page).as_ptr().cast();
        if own.surface.backend() != BackendKind::Exmap {
            // SAFETY: a page of the surface; locking alters nothing.
            let locked = unsafe { libc::mlock(address, PAGE_SIZE) };
            assert_eq!(locked, 0, "mlock: {}", std::io::Error::last_os_error());
            return;
        }
        let (reader, writer) = std::io::pipe().unwrap();
        let part = libc::iovec { iov_base: address, iov_len: PAGE_SIZE };
        // SAFETY: the page is the test's, and is only read.
        let held = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
        assert_eq!(held, PAGE_SIZE as isize, "vmsplice: {}", std::io::Error::last_os_error());
        self.ends.extend([reader.into(), writer.into()]);
    }
}

/// Entries from `(start, count)` pairs.
pub fn entries<const N: usize>(ranges: [(u64, u64); N]) -> [Entry; N] {
    ranges.map(|(start, count)| Entry::new(PageRange::new(start, count)))
}

/// Runs a test if the kernel has the backend. Prints a line if not.
pub fn on(backend: BackendKind, test: fn(BackendKind)) {
    match probe::works(backend) {
        Ok(()) => test(backend),
        Err(reason) => eprintln!("skipped: {backend} does not work here: {reason}"),
    }
}

/// Kilobytes of a field of `/proc/self/smaps`, summed over the mappings that begin in an address
/// range.
pub fn smaps(from: usize, bytes: usize, field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    let mut sum = 0;
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        let parse = |text: &str| usize::from_str_radix(text, 16).ok();
        if let Some((start, end)) = first.split_once('-')
            && let (Some(start), Some(_)) = (parse(start), parse(end))
        {
            inside = (from..from + bytes).contains(&start);
        } else if inside && first.strip_suffix(':') == Some(field) {
            sum += words.next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

/// Declares each test once for each backend.
macro_rules! on_every_backend {
    ($($test:ident),* $(,)?) => {
        mod madvise {
            $(#[test] fn $test() { crate::common::on(
                vellum_vm::BackendKind::Madvise,
                super::$test,
            ) })*
        }
        mod process_madvise {
            $(#[test] fn $test() {
                crate::common::on(vellum_vm::BackendKind::ProcessMadvise, super::$test)
            })*
        }
        mod exmap {
            $(#[test] fn $test() { crate::common::on(
                vellum_vm::BackendKind::Exmap,
                super::$test,
            ) })*
        }
    };
}
