//! A device that writes to another one, and keeps the sum of each frame: of a full backup these
//! make the digest by which later increments know it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use vellum_pool::PAGE_SIZE;
use vellum_pool::device::{Device, DeviceInfo, ReadDone, ReadRange, Surface, Write};

use super::index::{ENTRY, IndexWriter, Sum, ranges_of, sum};
use vellum_pool::Space;

/// So many sums are read at once.
const SUMS: u64 = 4096;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct SummedFile {
    to: Arc<dyn Device>,
    /// The sum of each frame, in the frame's place. Zeros for a frame that was not written.
    sums: File,
}

impl SummedFile {
    /// `sums` is empty.
    pub(super) fn new(to: &Arc<dyn Device>, sums: File) -> SummedFile {
        SummedFile { to: to.clone(), sums }
    }

    fn note(&self, first: u64, bytes: &[u8]) -> io::Result<()> {
        let sums: Vec<u8> = bytes.chunks_exact(PAGE_SIZE).flat_map(sum).collect();
        self.sums.write_all_at(&sums, first * ENTRY)
    }

    /// The digest of a state that was written, which has this space.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn digest(&self, space: &Space) -> io::Result<u64> {
        let ranges = ranges_of(space);
        let end = ranges.last().map_or(0, |(start, count)| start + count);
        // Places at the end that hold nothing yet have no sums.
        self.sums.set_len(end * ENTRY)?;
        let zeros = sum(&[0; PAGE_SIZE]);
        let mut index = IndexWriter::new(io::sink(), &ranges)?;
        let mut buffer = vec![0; (SUMS * ENTRY) as usize];
        for (start, count) in &ranges {
            for first in (*start..start + count).step_by(SUMS as usize) {
                let sums = SUMS.min(start + count - first);
                let bytes = &mut buffer[..(sums * ENTRY) as usize];
                self.sums.read_exact_at(bytes, first * ENTRY)?;
                let (sums, _) = bytes.as_chunks::<{ ENTRY as usize }>();
                for sum in sums {
                    index.add(if *sum == Sum::default() { &zeros } else { sum })?;
                }
            }
        }
        Ok(index.finish().0)
    }
}

impl Device for SummedFile {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.to.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        self.to.start_reads(surface, reads);
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.to.write(writes);
        for write in writes {
            if write.result.is_ok() {
                let [one, two] = write.parts;
                let second = write.page + (one.len() / PAGE_SIZE) as u64;
                let noted = self.note(write.page, one);
                write.result = noted.and_then(|()| self.note(second, two));
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.to.sync()
    }

    fn pages(&self) -> io::Result<u64> {
        self.to.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        self.to.resize(pages)
    }

    fn info(&self) -> DeviceInfo {
        self.to.info()
    }
}
