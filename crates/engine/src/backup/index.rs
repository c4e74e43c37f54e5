//! What tells one state of a store from another: the sums of all frames that are in use.
//!
//! Two frames with the same sum have the same bytes. So an increment needs no numbers in pages, of
//! which pages of values have none, and which no change sets in a store without a log.
//!
//! An index lies in a file: first the ranges of frames that are in use, then the sum of each of
//! these frames. Its digest tells the state apart (docs/format.md, "Increment").

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crc_fast::{CrcAlgorithm, Digest, checksum};
use rustix::fs::{Mode, OFlags};
use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, Space};

use super::copy::{read_frames, used};
use crate::error::{Error, Result};
use crate::page::bytes::{get_u64, put_u64};
use crate::store::header::HEADER_PAGES;
use crate::sync::lock;

/// Bytes of an entry of an index: a range, or a sum.
pub(super) const ENTRY: u64 = 16;
/// So many bytes of sums are in memory.
const PART: u64 = 64 << 10;

/// The sum of a frame.
pub(super) type Sum = [u8; ENTRY as usize];

/// The checksums of two kinds. The page checksum at the beginning of most frames is the first one
/// of the rest of the page; the second one has nothing to do with it.
pub(super) fn sum(frame: &[u8]) -> Sum {
    let mut sum = Sum::default();
    put_u64(&mut sum, 0, checksum(CrcAlgorithm::Crc64Nvme, frame));
    put_u64(&mut sum, 8, checksum(CrcAlgorithm::Crc64Xz, frame));
    sum
}

/// The ranges (start, count) of frames that a state has: the headers, and what is in use.
pub(super) fn ranges_of(space: &Space) -> Vec<(u64, u64)> {
    let mut ranges = used(space);
    match ranges.first_mut() {
        Some((start, count)) if *start == HEADER_PAGES => {
            (*start, *count) = (0, *count + HEADER_PAGES);
        }
        _ => ranges.insert(0, (0, HEADER_PAGES)),
    }
    ranges
}

/// Writes an index, and computes its digest.
pub(super) struct IndexWriter<W> {
    to: W,
    digest: Digest,
}

impl<W: Write> IndexWriter<W> {
    /// Begins the index of a state that has these ranges.
    pub(super) fn new(to: W, ranges: &[(u64, u64)]) -> io::Result<IndexWriter<W>> {
        let mut writer = IndexWriter { to, digest: Digest::new(CrcAlgorithm::Crc64Nvme) };
        for (start, count) in ranges {
            writer.add(&entry(*start, *count))?;
        }
        Ok(writer)
    }

    /// Adds the sum of the next frame.
    pub(super) fn add(&mut self, sum: &Sum) -> io::Result<()> {
        self.digest.update(sum);
        self.to.write_all(sum)
    }

    /// The digest, and what the index was written to.
    pub(super) fn finish(self) -> (u64, W) {
        (self.digest.finalize(), self.to)
    }
}

/// Two numbers as bytes.
pub(super) fn entry(one: u64, two: u64) -> Sum {
    let mut bytes = Sum::default();
    put_u64(&mut bytes, 0, one);
    put_u64(&mut bytes, 8, two);
    bytes
}

/// A range of an index.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: u64,
    count: u64,
    /// The number of frames in the ranges before.
    before: u64,
}

/// An index in a file.
#[derive(Debug)]
pub(super) struct Index {
    file: File,
    /// Where the sums begin.
    sums: u64,
    ranges: Vec<Range>,
    frames: u64,
    /// Some sums: the number of the first one, and their bytes.
    part: Mutex<(u64, Vec<u8>)>,
}

impl Index {
    /// The index at `at` of a file, with so many ranges and frames, and its digest.
    ///
    /// # Errors
    /// What the system said. `InvalidData` if the ranges are not in order, or do not have so many
    /// frames.
    pub(super) fn read(file: File, at: u64, ranges: u64, frames: u64) -> io::Result<(Index, u64)> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "its ranges are not in order");
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let (mut found, mut before, mut next) = (Vec::new(), 0_u64, 0);
        let sums = at + ranges * ENTRY;
        let mut buffer = vec![0; PART as usize];
        let end = sums + frames * ENTRY;
        let mut position = at;
        while position < end {
            let len = PART.min(end - position) as usize;
            let bytes = &mut buffer[..len];
            file.read_exact_at(bytes, position)?;
            digest.update(bytes);
            let in_ranges = sums.saturating_sub(position).min(len as u64) as usize;
            for bytes in bytes[..in_ranges].chunks_exact(ENTRY as usize) {
                let (start, count) = (get_u64(bytes, 0), get_u64(bytes, 8));
                let after = start.checked_add(count).filter(|_| start >= next && count > 0);
                next = after.filter(|after| *after < 1 << 51).ok_or_else(wrong)?;
                found.push(Range { start, count, before });
                before += count;
            }
            position += len as u64;
        }
        if before != frames {
            return Err(wrong());
        }
        let part = Mutex::new((0, Vec::new()));
        Ok((Index { file, sums, ranges: found, frames, part }, digest.finalize()))
    }

    /// The index of a store in a file, and its digest. It goes to `to`, an empty file. `read` is
    /// told how many bytes were read.
    ///
    /// # Errors
    /// What the system said, the error of `read`.
    pub(super) fn of_store(
        device: &Arc<dyn Device>,
        space: &Space,
        to: File,
        read: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<(Index, u64)> {
        let failed = || Error::of_backup("writing a temporary file");
        let ranges = ranges_of(space);
        let mut writer = IndexWriter::new(BufWriter::new(to), &ranges).map_err(failed())?;
        let mut frames = 0;
        read_frames(device, &ranges, &mut |_, bytes| {
            for frame in bytes.chunks_exact(PAGE_SIZE) {
                writer.add(&sum(frame)).map_err(failed())?;
                frames += 1;
            }
            read(bytes.len() as u64)
        })?;
        let (_, file) = writer.finish();
        let file = file.into_inner().map_err(|error| failed()(error.into_error()))?;
        Index::read(file, 0, ranges.len() as u64, frames).map_err(failed())
    }

    /// The sum of a frame; `None` if the state does not have it.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn sum_of(&self, frame: u64) -> io::Result<Option<Sum>> {
        let after = self.ranges.partition_point(|range| range.start <= frame);
        let Some(range) = after.checked_sub(1).map(|at| self.ranges[at]) else { return Ok(None) };
        if frame - range.start >= range.count {
            return Ok(None);
        }
        let number = range.before + (frame - range.start);
        let each = PART / ENTRY;
        let mut part = lock(&self.part);
        let (first, bytes) = &mut *part;
        if bytes.is_empty() || *first != number / each {
            *first = number / each;
            let count = each.min(self.frames - *first * each);
            bytes.resize((count * ENTRY) as usize, 0);
            let read = self.file.read_exact_at(bytes, self.sums + *first * each * ENTRY);
            read.inspect_err(|_| bytes.clear())?;
        }
        let at = ((number % each) * ENTRY) as usize;
        let mut sum = Sum::default();
        sum.copy_from_slice(&bytes[at..at + ENTRY as usize]);
        Ok(Some(sum))
    }

    /// The ranges (start, count) of the state.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        self.ranges.iter().map(|range| (range.start, range.count)).collect()
    }

    /// The number of frames that the state has.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }
}

/// Opens a file for reading. A pipe of that name does not keep the caller waiting.
///
/// # Errors
/// It is neither a regular file nor a block device; what the system said.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    Ok(file)
}

/// Whether a file begins with these bytes.
///
/// # Errors
/// What the system said.
pub(super) fn begins_with(path: &Path, at: u64, magic: &[u8]) -> io::Result<bool> {
    let mut found = vec![0; magic.len()];
    match open_file(path)?.read_exact_at(&mut found, at) {
        Ok(()) => Ok(found == magic),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
