//! A device that keeps the frames that differ from those of an earlier state.
//!
//! An increment is a backup that is written to this device. The device does not keep frames that
//! the earlier state has already. The others lie in a sparse file, each in its own place.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_pool::PAGE_SIZE;
use vellum_pool::device::{Device, DeviceInfo, ReadDone, ReadRange, Surface, Write};

use super::index::{Index, Sum, sum};
use crate::sync::lock;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Overlay {
    base: Index,
    file: File,
    frames: AtomicU64,
    /// The frames that the file has, one bit for each.
    changed: Mutex<Vec<u64>>,
}

impl Overlay {
    /// `file` is empty.
    pub(super) fn new(base: Index, file: File) -> Overlay {
        Overlay { base, file, frames: AtomicU64::new(0), changed: Mutex::default() }
    }

    /// The ranges (start, count) of the earlier state, in order.
    pub(super) fn base_ranges(&self) -> Vec<(u64, u64)> {
        self.base.ranges()
    }

    fn write_frames(&self, first: u64, bytes: &[u8]) -> io::Result<()> {
        for (frame, bytes) in (first..).zip(bytes.chunks_exact(PAGE_SIZE)) {
            let differs = self.base.sum_of(frame)? != Some(sum(bytes));
            if differs {
                self.file.write_all_at(bytes, frame * PAGE_SIZE as u64)?;
            }
            let mut changed = lock(&self.changed);
            let (word, bit) = ((frame / 64) as usize, 1 << (frame % 64));
            if changed.len() <= word {
                changed.resize(word + 1, 0);
            }
            // An earlier write may have set it.
            changed[word] = if differs { changed[word] | bit } else { changed[word] & !bit };
        }
        Ok(())
    }

    /// The sum that a frame has in the earlier state. `None` if it differs, or was not there.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn unchanged(&self, frame: u64) -> io::Result<Option<Sum>> {
        let word = lock(&self.changed).get((frame / 64) as usize).copied().unwrap_or(0);
        match word & 1 << (frame % 64) {
            0 => self.base.sum_of(frame),
            _ => Ok(None),
        }
    }

    /// Reads a frame that differs.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn read_frame(&self, frame: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, frame * PAGE_SIZE as u64)
    }
}

fn unreadable() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "an increment has no pages to read")
}

impl Device for Overlay {
    fn read(&self, _surface: &Surface, _read: ReadRange) -> io::Result<()> {
        Err(unreadable())
    }

    fn start_reads(&self, _surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        reads.into_iter().for_each(|(_, done)| done.call(Err(unreadable())));
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        for write in writes {
            let [one, two] = write.parts;
            let second = write.page + (one.len() / PAGE_SIZE) as u64;
            let written = self.write_frames(write.page, one);
            write.result = written.and_then(|()| self.write_frames(second, two));
        }
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        Ok(self.frames.load(Ordering::Acquire))
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.file.set_len(pages * PAGE_SIZE as u64)?;
        self.frames.store(pages, Ordering::Release);
        Ok(())
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo::new(None, Err("it is a sparse file".into()), "increment")
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use vellum_pool::{PageCopy, PageRef};

    use super::*;
    use crate::backup::index::IndexWriter;

    #[test]
    fn a_frame_that_becomes_again_what_it_was_is_not_kept() {
        let frame = |byte: u8| {
            let mut copy = PageCopy::zeroed(PageRef::new(0, 1));
            copy.bytes_mut().fill(byte);
            copy
        };
        // The earlier state has frames 2 to 4.
        let mut file = tempfile::tempfile().unwrap();
        let mut index = IndexWriter::new(&mut file, &[(2, 3)]).unwrap();
        (2..5).for_each(|byte| index.add(&sum(frame(byte).bytes())).unwrap());
        index.finish().1.flush().unwrap();
        let (index, _) = Index::read(file, 0, 1, 3).unwrap();
        let overlay = Overlay::new(index, tempfile::tempfile().unwrap());
        overlay.resize(100).unwrap();
        let write = |number: u64, byte: u8| {
            let copy = frame(byte);
            let mut writes = [Write::new(number, [copy.bytes(), &[]])];
            overlay.write(&mut writes);
            let [write] = writes;
            write.result.unwrap();
        };
        let is_kept = |number: u64| overlay.unchanged(number).unwrap().is_none();
        assert_eq!([2, 3, 4].map(is_kept), [false; 3]);
        write(3, 3);
        assert!(!is_kept(3));
        write(3, 9);
        assert!(is_kept(3));
        let mut found = [0; PAGE_SIZE];
        overlay.read_frame(3, &mut found).unwrap();
        assert_eq!(found, [9; PAGE_SIZE]);
        write(3, 3);
        assert!(!is_kept(3));
        assert!(is_kept(1) && is_kept(5) && is_kept(99), "the earlier state does not have them");
        write(99, 0);
        assert!(is_kept(99));
    }
}
