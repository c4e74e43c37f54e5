//! `io_uring`: commands of the device, reads and writes with registered buffers.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd as _};
use std::time::{Duration, Instant};

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types};

use crate::counters::PATIENCE;

/// A ring.
pub struct Ring {
    ring: IoUring,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Ring")
    }
}

impl Ring {
    /// An empty one.
    pub fn new() -> Self {
        Self { ring: IoUring::new(512).expect("io_uring") }
    }

    /// A ring that polls for completions, which the device does not support.
    pub fn polled() -> Self {
        Self { ring: IoUring::builder().setup_iopoll().build(512).expect("io_uring") }
    }

    /// Registers memory of the test, address and length, as the only buffer.
    pub fn register(&self, (address, length): (usize, usize)) -> std::io::Result<()> {
        let iov_base = std::ptr::with_exposed_provenance_mut(address);
        let buffer = libc::iovec { iov_base, iov_len: length };
        // SAFETY: the memory is the test's, which keeps it for as long as the ring.
        unsafe { self.ring.submitter().register_buffers(&[buffer]) }
    }

    /// Starts something.
    pub fn start(&mut self, entry: &Entry) {
        self.start_linked(std::slice::from_ref(entry));
    }

    /// Starts several in one call, as links of a chain need it.
    pub fn start_linked(&mut self, entries: &[Entry]) {
        // SAFETY: the memory that they name is the test's own for as long as the ring.
        unsafe { self.ring.submission().push_multiple(entries) }.expect("room in the queue");
        self.ring.submit().expect("io_uring_enter");
    }

    /// Waits for `count` completions; returns the user data and the result of each.
    #[track_caller]
    pub fn ends(&mut self, count: usize) -> Vec<(u64, i32)> {
        let (start, mut ends) = (Instant::now(), Vec::new());
        while ends.len() < count {
            // This thread posts the completions of workers, in a system call.
            self.ring.submit().expect("io_uring_enter");
            ends.extend(self.ring.completion().map(|end| (end.user_data(), end.result())));
            assert!(
                start.elapsed() < PATIENCE,
                "{} of {count} have not completed",
                count - ends.len()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        ends
    }

    /// Runs an entry, and returns its result.
    #[track_caller]
    pub fn run(&mut self, entry: &Entry) -> i32 {
        self.start(entry);
        self.ends(1)[0].1
    }
}

impl Default for Ring {
    fn default() -> Self {
        Self::new()
    }
}

/// A command of the published interface for a part of memory, address and length: a part of the
/// surface, or of the registered buffer.
pub fn command(
    exmap: impl AsFd,
    (interface, operation): (u32, u16),
    (address, length): (usize, usize),
    is_buffer: bool,
) -> Entry {
    let part = ((length as u128) << 64) | address as u128;
    let number = interface | u32::from(operation) << 8;
    opcode::UringCmd16::new(types::Fd(exmap.as_fd().as_raw_fd()), number)
        .buf_index(is_buffer.then_some(0))
        .cmd(part.to_le_bytes())
        .build()
}

/// The same by a worker, which may wait.
pub fn by_worker(entry: Entry) -> Entry {
    entry.flags(Flags::ASYNC)
}

/// A read through the proxy into a part of the surface, like `pread`.
pub fn read(exmap: impl AsFd, (address, length): (usize, usize), offset: u64) -> Entry {
    let fd = types::Fd(exmap.as_fd().as_raw_fd());
    let at = std::ptr::with_exposed_provenance_mut(address);
    let length = u32::try_from(length).expect("a length");
    opcode::Read::new(fd, at, length).offset(offset).build()
}

/// A read into the registered buffer, or a write from it.
pub fn fixed(
    file: impl AsFd,
    (address, length): (usize, usize),
    offset: u64,
    writes: bool,
) -> Entry {
    let fd = types::Fd(file.as_fd().as_raw_fd());
    let length = u32::try_from(length).expect("a length");
    let at = std::ptr::with_exposed_provenance_mut(address);
    match writes {
        true => opcode::WriteFixed::new(fd, at, length, 0).offset(offset).build(),
        false => opcode::ReadFixed::new(fd, at, length, 0).offset(offset).build(),
    }
}
