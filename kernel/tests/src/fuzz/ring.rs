//! An io_uring for one entry at a time.
#![allow(unsafe_code)]

use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use crate::PAGE;
use crate::counters::PATIENCE;

/// A ring, without buffers at first.
pub(super) struct Ring(IoUring);

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ring")
    }
}

impl Ring {
    /// A new one.
    pub(super) fn new() -> Self {
        Self(IoUring::new(4).expect("io_uring"))
    }

    fn carry_out(&mut self, entry: squeue::Entry) -> Result<u64, Errno> {
        // SAFETY: the memory of the entry lives until the entry completes, for which this waits.
        unsafe { self.0.submission().push(&entry) }.expect("room for an entry");
        self.0.submit().expect("io_uring_enter");
        let start = Instant::now();
        loop {
            if let Some(done) = self.0.completion().next() {
                return match u64::try_from(done.result()) {
                    Ok(result) => Ok(result),
                    Err(_) => Err(Errno::from_raw_os_error(-done.result())),
                };
            }
            assert!(start.elapsed() < PATIENCE, "an entry of io_uring is never completed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A command of an exmap for bytes of its surface.
    pub(super) fn command(
        &mut self,
        exmap: BorrowedFd<'_>,
        (interface, opcode): (u16, u16),
        (start, length): (usize, usize),
        by_a_worker: bool,
    ) -> Result<u64, Errno> {
        let mut given = [0; 16];
        given[..8].copy_from_slice(&start.to_le_bytes());
        given[8..].copy_from_slice(&length.to_le_bytes());
        let operation = u32::from(interface) | u32::from(opcode) << 8;
        let exmap = types::Fd(exmap.as_raw_fd());
        let entry = opcode::UringCmd16::new(exmap, operation).cmd(given).build();
        let flags = if by_a_worker { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        self.carry_out(entry.flags(flags))
    }

    /// Registers pages as the only buffer.
    pub(super) fn register(&self, start: usize, pages: u64) -> Result<(), Errno> {
        let start = std::ptr::with_exposed_provenance_mut(start);
        let buffer = libc::iovec { iov_base: start, iov_len: pages as usize * PAGE };
        // SAFETY: the pages are a test's own, which nothing refers to.
        let registered = unsafe { self.0.submitter().register_buffers(&[buffer]) };
        registered.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// Gives the buffer up.
    pub(super) fn unregister(&self) {
        self.0.submitter().unregister_buffers().expect("a registered buffer");
    }

    /// Reads a file's first bytes into the registered memory, or writes them from there.
    pub(super) fn transfer(
        &mut self,
        file: BorrowedFd<'_>,
        (start, length): (usize, usize),
        write: bool,
    ) -> Result<u64, Errno> {
        let (file, length) = (types::Fd(file.as_raw_fd()), length as u32);
        let entry = match write {
            true => {
                opcode::WriteFixed::new(file, std::ptr::with_exposed_provenance(start), length, 0)
                    .build()
            }
            false => opcode::ReadFixed::new(
                file,
                std::ptr::with_exposed_provenance_mut(start),
                length,
                0,
            )
            .build(),
        };
        self.carry_out(entry)
    }
}
