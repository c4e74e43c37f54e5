//! A device that generates its pages: each is full of the number of the page to read next, except
//! for its first word.
//!
//! It needs no storage, so the pool above it can be as large as memory. Its pages come in by the
//! pool's usual path: a miss, a read, a page fault.

#![allow(unsafe_code)]

use std::io;

use vellum_pool::device::{Device, DeviceInfo, ReadDone, ReadRange, Surface, Write};
use vellum_vm::Entry;

use super::Chain;

/// Words of a page.
const WORDS: usize = 512;

/// The first word of a page, in which a design with state in the page keeps it. It says "unlocked,
/// version 1", see [`forms`](super::forms).
pub const HEADER: u64 = (1 << 56) | 1;

/// See the module's documentation. It cannot be written to.
#[derive(Debug)]
pub struct PatternDevice(pub Chain);

impl Device for PatternDevice {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        let (pages, target) = (read.pages, read.target());
        if !pages.is_within(self.0.range()) || !target.is_within(surface.pages()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut entry = [Entry::new(target)];
        if surface.must_be_populated() {
            surface.populate(&mut entry);
        }
        entry[0].result?;
        for index in 0..pages.count {
            let next = self.0.next(pages.start + index);
            let words = surface.address(read.place + index).cast::<u64>();
            // SAFETY: within the page, which lies on the surface (checked above) and which the
            // caller of a device holds exclusively.
            unsafe {
                words.write(HEADER);
                (1..WORDS).for_each(|word| words.add(word).write(next));
            }
        }
        Ok(())
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        reads.into_iter().for_each(|(read, done)| done.call(self.read(surface, read)));
    }

    fn write(&self, batch: &mut [Write<'_>]) {
        batch.iter_mut().for_each(|write| write.result = Err(io::ErrorKind::Unsupported.into()));
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        Ok(self.0.range())
    }

    fn resize(&self, _pages: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::new(None, Ok(()), "pattern")
    }
}
