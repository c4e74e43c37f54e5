//! Reads through `io_uring`, several of them in flight at a time.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context as _, Result, bail};
use io_uring::{IoUring, opcode, squeue, types};

/// Bytes of a random read, and the alignment of all reads.
pub const PAGE: u64 = 4096;

/// A page in memory, aligned as direct reads need it.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(super) struct Page(pub(super) [u8; PAGE as usize]);

/// Reads `bytes` at the places that `place` returns, `depth` reads at a time, until `stop`. Counts
/// the reads.
///
/// # Errors
/// If a read fails or is short, or there is no `io_uring`.
pub(super) fn read(
    file: &File,
    bytes: u64,
    depth: u32,
    place: &mut dyn FnMut() -> u64,
    stop: &AtomicBool,
    count: &AtomicU64,
) -> Result<()> {
    let reads = Reads { pages: (bytes / PAGE) as usize, place };
    // The memory is declared before the ring, so the ring is dropped first.
    let mut memory = vec![Page([0; PAGE as usize]); reads.pages * depth as usize];
    let mut ring = IoUring::new(depth).context("no io_uring to measure the device with")?;
    ring.submitter().register_files(&[file.as_raw_fd()]).context("registering the file")?;
    let result = reads.go_on(&mut ring, memory.as_mut_ptr(), depth, stop, count);
    if let Err(error) = result {
        // The kernel may still be writing to this memory.
        std::mem::forget(memory);
        return Err(error);
    }
    Ok(())
}

struct Reads<'a> {
    pages: usize,
    place: &'a mut dyn FnMut() -> u64,
}

impl Reads<'_> {
    /// Returns without an error only when no read is in flight.
    fn go_on(
        mut self,
        ring: &mut IoUring,
        memory: *mut Page,
        depth: u32,
        stop: &AtomicBool,
        count: &AtomicU64,
    ) -> Result<()> {
        let bytes = self.pages * PAGE as usize;
        for slot in 0..depth {
            self.submit(ring, memory, slot)?;
        }
        let mut under_way = depth;
        let mut done = Vec::with_capacity(depth as usize);
        while under_way > 0 {
            ring.submit_and_wait(1).context("waiting for reads")?;
            done.extend(ring.completion().map(|entry| (entry.user_data() as u32, entry.result())));
            for (slot, result) in done.drain(..) {
                under_way -= 1;
                if result < 0 {
                    let error = std::io::Error::from_raw_os_error(-result);
                    return Err(error).context("a read of the device failed");
                }
                if result as usize != bytes {
                    bail!("a read of {bytes} bytes gave only {result}");
                }
                count.fetch_add(1, Ordering::Relaxed);
                if !stop.load(Ordering::Relaxed) {
                    self.submit(ring, memory, slot)?;
                    under_way += 1;
                }
            }
        }
        Ok(())
    }

    /// Reads into the part of `memory` that belongs to `slot`.
    fn submit(&mut self, ring: &mut IoUring, memory: *mut Page, slot: u32) -> Result<()> {
        let buffer = memory.wrapping_add(slot as usize * self.pages);
        let bytes = (self.pages * size_of::<Page>()) as u32;
        let entry: squeue::Entry = opcode::Read::new(types::Fixed(0), buffer.cast(), bytes)
            .offset((self.place)())
            .build()
            .user_data(u64::from(slot));
        // SAFETY: the slot's part of the memory has `bytes` bytes, has no other user (a slot is
        // used again only after its read ended) and outlives the read: `go_on` returns without an
        // error only after the last read, and after an error the memory is never freed.
        unsafe { ring.submission().push(&entry) }.context("the submission queue is full")
    }
}
