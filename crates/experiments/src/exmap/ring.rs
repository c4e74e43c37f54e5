//! `io_uring`: commands of the device, one at a time, and reads, many at a time.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use vellum_uapi::exmap::Entry;
use vellum_uapi::exmap_published::OP_ALLOC;

use super::device::{ENTRIES, Interface, PAGE};

/// Commands with a registered buffer for entries and results, by a registered descriptor.
pub struct CommandRing<'a> {
    /// Goes before what the kernel knows of.
    ring: IoUring,
    buffer: Vec<AtomicU64>,
    interface: Interface<'a>,
}

impl<'a> CommandRing<'a> {
    /// For an interface.
    ///
    /// # Errors
    /// If there is no `io_uring`, or it takes no buffers.
    pub fn new(interface: Interface<'a>) -> Result<CommandRing<'a>> {
        let ring = IoUring::new(4).context("no io_uring")?;
        let buffer: Vec<AtomicU64> = (0..ENTRIES).map(|_| AtomicU64::new(0)).collect();
        let part = libc::iovec {
            iov_base: buffer.as_ptr().cast_mut().cast(),
            iov_len: ENTRIES * size_of::<u64>(),
        };
        let submitter = ring.submitter();
        submitter.register_files(&[interface.descriptor().as_raw_fd()])?;
        // SAFETY: the buffer is only ever used as atomic words, is never moved, and lives longer
        // than the ring.
        unsafe { submitter.register_buffers(&[part]) }.context("registering a buffer")?;
        Ok(CommandRing { ring, buffer, interface })
    }

    /// The interface.
    pub fn interface(&self) -> &Interface<'a> {
        &self.interface
    }

    /// Populates pages; each one must succeed.
    ///
    /// # Errors
    /// If one does not.
    pub fn alloc(&mut self, pages: &[u64]) -> Result<()> {
        for (slot, page) in self.buffer.iter().zip(pages) {
            slot.store(Entry::new(*page, 1).bits(), Ordering::Relaxed);
        }
        let failed = self.command(OP_ALLOC, pages.len())?;
        ensure!(failed == 0, "a command of {} pages through io_uring: {failed}", pages.len());
        let entries = self.buffer.iter().take(pages.len());
        for (entry, page) in entries.map(|slot| slot.load(Ordering::Relaxed)).zip(pages) {
            let entry = Entry::from_bits(entry);
            ensure!((entry.result(), entry.pages()) == (0, 1), "page {page} did not come");
        }
        Ok(())
    }

    /// Has the module carry out a command for the first entries of the buffer; returns its result.
    fn command(&mut self, operation: u16, entries: usize) -> Result<i32> {
        let start = self.buffer.as_ptr().addr() as u64;
        let bytes = (entries * size_of::<u64>()) as u64;
        let part = (u128::from(bytes) << 64) | u128::from(start);
        let number = self.interface.number() as u32 | u32::from(operation) << 8;
        // An address and a length, as the processor has them in memory.
        let command = opcode::UringCmd16::new(types::Fixed(0), number)
            .buf_index(Some(0))
            .cmd(part.to_le_bytes())
            .build();
        // SAFETY: the command is for the part of the registered buffer that has the entries.
        unsafe { self.ring.submission().push(&command) }.context("the submission queue is full")?;
        self.ring.submit_and_wait(1).context("waiting for a command")?;
        let done = self.ring.completion().next().context("no command has ended")?;
        Ok(done.result())
    }
}

/// Reads of a page, many at a time, each known by its slot.
pub struct ReadRing {
    ring: IoUring,
    under_way: usize,
}

impl ReadRing {
    /// From a file, or a proxy; so many at a time.
    ///
    /// # Errors
    /// If there is no `io_uring`.
    pub fn new(file: BorrowedFd<'_>, depth: usize) -> Result<ReadRing> {
        let ring = IoUring::new(depth as u32).context("no io_uring")?;
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(ReadRing { ring, under_way: 0 })
    }

    /// Reads that have not ended.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// Adds a read, which starts with the next [`wait`](ReadRing::wait).
    ///
    /// # Errors
    /// If there are too many.
    ///
    /// # Safety
    /// The page is memory that the kernel may write until the slot comes back, or the ring is gone.
    pub unsafe fn add(&mut self, slot: usize, address: *mut u8, offset: u64) -> Result<()> {
        let entry: squeue::Entry = opcode::Read::new(types::Fixed(0), address, PAGE as u32)
            .offset(offset)
            .build()
            .user_data(slot as u64);
        // SAFETY: the caller's promise.
        unsafe { self.ring.submission().push(&entry) }.context("the submission queue is full")?;
        self.under_way += 1;
        Ok(())
    }

    /// Starts what was added and waits until one has ended, at least; adds the slots of those.
    ///
    /// # Errors
    /// If a read failed or is short.
    pub fn wait(&mut self, slots: &mut Vec<usize>) -> Result<()> {
        self.ring.submit_and_wait(1).context("waiting for reads")?;
        let mut failed = None;
        for entry in self.ring.completion() {
            self.under_way -= 1;
            match whole(&entry) {
                Ok(slot) => slots.push(slot),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

fn whole(entry: &cqueue::Entry) -> Result<usize> {
    if entry.result() < 0 {
        return Err(std::io::Error::from_raw_os_error(-entry.result())).context("a read failed");
    }
    if entry.result() as usize != PAGE {
        bail!("a read of a page gave only {} bytes", entry.result());
    }
    Ok(entry.user_data() as usize)
}

impl Drop for ReadRing {
    /// Nothing is under way afterwards.
    fn drop(&mut self) {
        while self.under_way > 0 {
            if self.ring.submit_and_wait(1).is_err() {
                // The kernel may still write to memory that is about to get another owner.
                std::process::abort();
            }
            self.under_way -= self.ring.completion().count();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn reads_come_back_by_slot_and_none_outlives_the_ring() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pages");
        let pages: Vec<u8> = (0..8 * PAGE).map(|byte| (byte / PAGE) as u8).collect();
        std::fs::write(&path, &pages).unwrap();
        let file = File::open(&path).unwrap();
        let mut memory = vec![0_u8; 8 * PAGE];
        let start = memory.as_mut_ptr();
        let mut ring = ReadRing::new(file.as_fd(), 8).unwrap();
        for slot in 0..8 {
            let (address, offset) = (start.wrapping_add(slot * PAGE), (slot * PAGE) as u64);
            // SAFETY: the memory lives longer than the ring, and no code reads it before.
            unsafe { ring.add(slot, address, offset) }.unwrap();
        }
        let mut slots = Vec::new();
        while slots.len() < 8 {
            ring.wait(&mut slots).unwrap();
        }
        slots.sort_unstable();
        assert_eq!((slots, ring.under_way()), ((0..8).collect(), 0));
        // SAFETY: as above.
        unsafe { ring.add(3, start, 7 * PAGE as u64) }.unwrap();
        drop(ring);
        assert_eq!(memory[0], 7);
        assert_eq!(memory[PAGE..], pages[PAGE..]);
    }

    #[test]
    fn a_read_behind_the_end_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("page");
        std::fs::write(&path, [1; PAGE]).unwrap();
        let file = File::open(&path).unwrap();
        let mut memory = vec![0_u8; PAGE];
        let mut ring = ReadRing::new(file.as_fd(), 2).unwrap();
        // SAFETY: the memory lives longer than the ring.
        unsafe { ring.add(0, memory.as_mut_ptr(), PAGE as u64) }.unwrap();
        let error = ring.wait(&mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("only 0 bytes"), "{error}");
    }
}
