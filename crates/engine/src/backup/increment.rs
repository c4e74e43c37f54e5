//! An increment: what has changed in a store since a backup. docs/format.md describes the file byte
//! by byte.
//!
//! It has the frames of the store's file that differ from those of its *base*, and the index of the
//! state that the base and these frames make. The base is a full backup or another increment. An
//! increment names the state of its base and its own, by their digests.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crc_fast::{CrcAlgorithm, Digest, checksum};

use vellum_pool::{PAGE_SIZE, PageCopy, PageRef};

use super::files::{Target, nameless_file, open_backup};
use super::index::{ENTRY, Index, IndexWriter, begins_with, entry, open_file, ranges_of, sum};
use super::overlay::Overlay;
use super::progress::BackupPace;
use crate::error::{Error, Result};
use crate::page::bytes::{get_u32, get_u64, put_u32, put_u64};
use crate::redo::recover::Recovered;
use crate::store::Store;
use crate::store::changes::BackupState;

const MAGIC: &[u8; 8] = b"VELLUMIN";
const VERSION: u32 = 1;

const AT_MAGIC: usize = 8;
const AT_VERSION: usize = 16;
const AT_STORE: usize = 24;
const AT_BASE: usize = 40;
const AT_STATE: usize = 64;
const AT_FILE_FRAMES: usize = 88;
const AT_FRAMES: usize = 96;
const AT_RUNS: usize = 104;
const AT_RANGES: usize = 112;
const AT_USED: usize = 120;
const AT_RUNS_SUM: usize = 128;

/// So many frames are written or read at once.
const CHUNK: usize = 64;
const FRAME: u64 = PAGE_SIZE as u64;

/// What is wrong with an increment whose counts do not fit together.
const CONTRADICTION: &str = "its numbers of pages contradict each other";

/// The first frame of an increment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    base: BackupState,
    state: BackupState,
    /// Length of the store's file in frames.
    file_frames: u64,
    /// The number of frames that the increment has.
    frames: u64,
    /// The number of runs of these frames.
    runs: u64,
    /// The number of ranges in the index.
    ranges: u64,
    /// The number of frames in the index.
    used: u64,
    /// The checksum of the runs.
    runs_sum: u64,
}

impl Head {
    fn encode(&self, bytes: &mut [u8]) {
        bytes.fill(0);
        bytes[AT_MAGIC..AT_VERSION].copy_from_slice(MAGIC);
        put_u32(bytes, AT_VERSION, VERSION);
        bytes[AT_STORE..AT_BASE].copy_from_slice(&self.state.store.to_le_bytes());
        for (at, state) in [(AT_BASE, self.base), (AT_STATE, self.state)] {
            put_u64(bytes, at, state.sequence);
            put_u64(bytes, at + 8, state.lsn);
            put_u64(bytes, at + 16, state.digest);
        }
        put_u64(bytes, AT_FILE_FRAMES, self.file_frames);
        put_u64(bytes, AT_FRAMES, self.frames);
        put_u64(bytes, AT_RUNS, self.runs);
        put_u64(bytes, AT_RANGES, self.ranges);
        put_u64(bytes, AT_USED, self.used);
        put_u64(bytes, AT_RUNS_SUM, self.runs_sum);
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[AT_MAGIC..]);
        put_u64(bytes, 0, sum);
    }

    /// # Errors
    /// What is wrong.
    fn decode(bytes: &[u8], file_bytes: u64) -> std::result::Result<Head, String> {
        if &bytes[AT_MAGIC..AT_VERSION] != MAGIC {
            return Err("it is not an increment of a backup".into());
        }
        if get_u64(bytes, 0) != checksum(CrcAlgorithm::Crc64Nvme, &bytes[AT_MAGIC..]) {
            return Err("its first page is damaged: the checksum is wrong".into());
        }
        let version = get_u32(bytes, AT_VERSION);
        if version != VERSION {
            return Err(format!("it has version {version}; this program reads {VERSION}"));
        }
        let mut store = [0; 16];
        store.copy_from_slice(&bytes[AT_STORE..AT_BASE]);
        let state_at = |at: usize| BackupState {
            store: u128::from_le_bytes(store),
            sequence: get_u64(bytes, at),
            lsn: get_u64(bytes, at + 8),
            digest: get_u64(bytes, at + 16),
        };
        let head = Head {
            base: state_at(AT_BASE),
            state: state_at(AT_STATE),
            file_frames: get_u64(bytes, AT_FILE_FRAMES),
            frames: get_u64(bytes, AT_FRAMES),
            runs: get_u64(bytes, AT_RUNS),
            ranges: get_u64(bytes, AT_RANGES),
            used: get_u64(bytes, AT_USED),
            runs_sum: get_u64(bytes, AT_RUNS_SUM),
        };
        let counts = [head.file_frames, head.frames, head.runs, head.ranges, head.used];
        if counts.iter().any(|count| *count > 1 << 50) {
            return Err("its first page is damaged: no file has so many frames".into());
        }
        if head.file_bytes() != file_bytes {
            return Err(format!(
                "it has {file_bytes} bytes, but its first page says {}: it was cut off, or is \
                 damaged",
                head.file_bytes()
            ));
        }
        // A run and a range have a frame at least, and only frames in use are in an increment.
        if head.runs > head.frames
            || head.frames.max(head.ranges) > head.used
            || head.used > head.file_frames
        {
            return Err(CONTRADICTION.into());
        }
        Ok(head)
    }

    /// Reads the runs, and checks that they are in order and that no frame is there twice. What
    /// they need of memory grows as they are read: a file may have a hole of any length there.
    ///
    /// # Errors
    /// What the system said; `InvalidData` with what is wrong.
    fn read_runs(&self, file: &File) -> io::Result<Vec<(u64, u64)>> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut buffer = vec![0; CHUNK * PAGE_SIZE];
        let (mut runs, mut next) = (Vec::new(), 0);
        let (mut at, end) = (self.tables(), self.tables() + self.runs * ENTRY);
        while at < end {
            let len = (buffer.len() as u64).min(end - at);
            let bytes = &mut buffer[..len as usize];
            file.read_exact_at(bytes, at)?;
            digest.update(bytes);
            for run in bytes.chunks_exact(ENTRY as usize) {
                let (first, count) = (get_u64(run, 0), get_u64(run, 8));
                let after = first.checked_add(count).filter(|_| first >= next && count > 0);
                next = after.ok_or_else(|| wrong("its list of pages is not in order"))?;
                runs.push((first, count));
            }
            at += len;
        }
        match digest.finalize() == self.runs_sum {
            true => Ok(runs),
            false => Err(wrong("its list of pages is damaged: the checksum is wrong")),
        }
    }

    /// Where the runs begin.
    fn tables(&self) -> u64 {
        FRAME.saturating_mul(1 + self.frames)
    }

    fn file_bytes(&self) -> u64 {
        let tables = ENTRY.saturating_mul(self.runs + self.ranges + self.used);
        self.tables().saturating_add(tables.next_multiple_of(FRAME))
    }
}

/// Writes a file from its beginning to its end, aligned as its device needs it.
struct Appender<'a> {
    to: Target<'a>,
    buffer: PageCopy,
    len: usize,
    /// The frame that the buffer goes to.
    next: u64,
}

impl<'a> Appender<'a> {
    fn new(to: Target<'a>) -> Appender<'a> {
        let buffer = PageCopy::zeroed(PageRef::new(0, CHUNK as u32));
        Appender { to, buffer, len: 0, next: 0 }
    }

    fn flush_frames(&mut self) -> Result<()> {
        let len = self.len.next_multiple_of(PAGE_SIZE);
        self.buffer.bytes_mut()[self.len..len].fill(0);
        if len > 0 {
            self.to.write(self.next, &self.buffer.bytes()[..len])?;
        }
        self.next += (len / PAGE_SIZE) as u64;
        self.len = 0;
        Ok(())
    }
}

impl io::Write for Appender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.len == CHUNK * PAGE_SIZE {
            self.flush_frames()?;
        }
        let count = bytes.len().min(CHUNK * PAGE_SIZE - self.len);
        self.buffer.bytes_mut()[self.len..self.len + count].copy_from_slice(&bytes[..count]);
        self.len += count;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the increment that leads from `base` to a state that was written to `overlay`. Returns
/// that state, and the length of the increment in bytes. The caller's function may end the
/// writing by `pace`.
pub(super) fn write(
    to: Target<'_>,
    base: BackupState,
    overlay: &Overlay,
    recovered: &Recovered,
    pace: &mut BackupPace<'_>,
) -> Result<(BackupState, u64)> {
    // An error of the store comes as one of the system, and goes back.
    let failed = |error: io::Error| error.downcast().unwrap_or_else(|error| to.failed_with(error));
    let ranges = ranges_of(&recovered.space);
    let mut file = Appender::new(to);
    let mut frame = vec![0; PAGE_SIZE];
    file.write_all(&frame).map_err(failed)?;
    let (mut runs, mut frames, mut used) = (Vec::<(u64, u64)>::new(), 0, 0);
    for number in ranges.iter().flat_map(|(start, count)| *start..start + count) {
        used += 1;
        if used % CHUNK as u64 == 0 {
            pace.advance(0)?;
        }
        if overlay.unchanged(number).map_err(failed)?.is_some() {
            continue;
        }
        overlay.read_frame(number, &mut frame).map_err(failed)?;
        file.write_all(&frame).map_err(failed)?;
        frames += 1;
        match runs.last_mut() {
            Some((first, count)) if *first + *count == number => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    let table: Vec<u8> = runs.iter().flat_map(|(first, count)| entry(*first, *count)).collect();
    file.write_all(&table).map_err(failed)?;
    let mut index = IndexWriter::new(file, &ranges).map_err(failed)?;
    for (seen, number) in
        (0_u64..).zip(ranges.iter().flat_map(|(start, count)| *start..start + count))
    {
        let sum = match overlay.unchanged(number).map_err(failed)? {
            Some(sum) => sum,
            None => {
                overlay.read_frame(number, &mut frame).map_err(failed)?;
                sum(&frame)
            }
        };
        index.add(&sum).map_err(failed)?;
        if seen % CHUNK as u64 == 0 {
            pace.advance(0)?;
        }
    }
    let (digest, mut file) = index.finish();
    file.flush_frames()?;
    let head = Head {
        base,
        state: BackupState::of(&recovered.header, digest),
        file_frames: recovered.header.file_pages,
        frames,
        runs: runs.len() as u64,
        ranges: ranges.len() as u64,
        used,
        runs_sum: checksum(CrcAlgorithm::Crc64Nvme, &table),
    };
    let mut first = PageCopy::zeroed(PageRef::new(0, 1));
    head.encode(first.bytes_mut());
    to.write(0, first.bytes())?;
    // A device may have grown by more.
    to.device.resize(head.file_bytes() / FRAME).map_err(failed)?;
    Ok((head.state, head.file_bytes()))
}

/// An increment that was opened.
#[derive(Debug)]
pub(super) struct Increment {
    path: PathBuf,
    file: File,
    head: Head,
    /// Runs (first, count) of the frames that it has.
    runs: Vec<(u64, u64)>,
    index: Index,
}

impl Increment {
    /// Opens an increment, and checks all of it but its frames.
    ///
    /// # Errors
    /// [`Error::BadBackup`] if it is none or is damaged; what the system said.
    pub(super) fn open(path: &Path) -> Result<Increment> {
        let failed = |source| Error::of_backup(format!("reading {}", path.display()))(source);
        let file = open_file(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound(path.into()),
            _ => failed(error),
        })?;
        let bad = |what: String| Error::BadBackup { path: path.into(), what };
        let bytes = file.metadata().map_err(failed)?.len();
        let mut first = vec![0; PAGE_SIZE];
        if bytes < FRAME {
            return Err(bad("it is not an increment of a backup: it is too short".into()));
        }
        file.read_exact_at(&mut first, 0).map_err(failed)?;
        let head = Head::decode(&first, bytes).map_err(bad)?;
        let runs = head.read_runs(&file).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => bad(error.to_string()),
            _ => failed(error),
        })?;
        let at = head.tables() + head.runs * ENTRY;
        let index = Index::read(file.try_clone().map_err(failed)?, at, head.ranges, head.used);
        let (index, digest) = index.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => bad(format!("its index is damaged: {error}")),
            _ => failed(error),
        })?;
        if digest != head.state.digest {
            return Err(bad("its index is damaged: the checksum is wrong".into()));
        }
        let count: u64 = runs.iter().map(|(_, count)| count).sum();
        let after = runs.last().map_or(0, |(start, count)| start + count);
        let last = index.ranges().last().map_or(0, |(start, count)| start + count);
        if count != head.frames || after > head.file_frames || last > head.file_frames {
            return Err(bad(CONTRADICTION.into()));
        }
        Ok(Increment { path: path.into(), file, head, runs, index })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The state that it leads to.
    pub(super) fn state(&self) -> BackupState {
        self.head.state
    }

    /// The state that it begins with.
    pub(super) fn base(&self) -> BackupState {
        self.head.base
    }

    /// Length of the store's file in frames.
    pub(super) fn file_frames(&self) -> u64 {
        self.head.file_frames
    }

    pub(super) fn into_index(self) -> Index {
        self.index
    }

    pub(super) fn index(&self) -> &Index {
        &self.index
    }

    /// The number of bytes of its frames.
    pub(super) fn bytes(&self) -> u64 {
        self.head.frames * FRAME
    }

    /// Reads a frame that it has. Returns false if it has none of this number.
    ///
    /// # Errors
    /// What the system said.
    pub(super) fn read_frame(&self, frame: u64, bytes: &mut [u8]) -> Result<bool> {
        let mut at = FRAME;
        for (first, count) in &self.runs {
            if (*first..first + count).contains(&frame) {
                let failed = Error::of_backup(format!("reading {}", self.path.display()));
                let at = at + (frame - first) * FRAME;
                self.file.read_exact_at(bytes, at).map_err(failed)?;
                return Ok(true);
            }
            at += count * FRAME;
        }
        Ok(false)
    }

    /// Reads and checks all of its frames. Calls `visit` with them: the number of the first one,
    /// and the bytes of it and the ones after it.
    ///
    /// # Errors
    /// [`Error::BadBackup`] at the first damage; what the system said; the error of `visit`.
    pub(super) fn each(&self, visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let failed = |source| Error::of_backup(format!("reading {}", self.path.display()))(source);
        let mut buffer = PageCopy::zeroed(PageRef::new(0, CHUNK as u32));
        let mut at = FRAME;
        for (first, count) in &self.runs {
            for chunk in (0..*count).step_by(CHUNK) {
                let frames = (*count - chunk).min(CHUNK as u64);
                let bytes = &mut buffer.bytes_mut()[..(frames * FRAME) as usize];
                self.file.read_exact_at(bytes, at).map_err(failed)?;
                at += bytes.len() as u64;
                let start = first.checked_add(chunk).unwrap_or(u64::MAX);
                for (number, frame) in (start..u64::MAX).zip(bytes.chunks_exact(PAGE_SIZE)) {
                    if self.index.sum_of(number).map_err(failed)? != Some(sum(frame)) {
                        let what = format!("what it has of page {number} is damaged");
                        return Err(Error::BadBackup { path: self.path.clone(), what });
                    }
                }
                visit(start, bytes)?;
            }
        }
        Ok(())
    }
}

/// The state that the backup or increment at `path` leads to, and its index.
///
/// # Errors
/// [`Error::BadBackup`] if it is neither; what the system said.
pub(super) fn read_base(
    path: &Path,
    folder_of: &Path,
    pace: &mut BackupPace<'_>,
) -> Result<(BackupState, Index)> {
    if is_increment(path)? {
        let increment = Increment::open(path)?;
        return Ok((increment.state(), increment.into_index()));
    }
    index_of(&open_backup(path)?, nameless_file(folder_of)?, pace)
}

/// The state of a full backup, all of which is read, and its index, which goes to a file.
///
/// # Errors
/// What the system said; [`Error::Cancelled`].
pub(super) fn index_of(
    full: &Store,
    to: File,
    pace: &mut BackupPace<'_>,
) -> Result<(BackupState, Index)> {
    let pages = &full.core.pages;
    let space = pages.pool.with_space(vellum_pool::Space::clone);
    pace.expect(space.allocated_pages() * FRAME);
    let read = &mut |bytes| pace.advance(bytes);
    let (index, digest) = Index::of_store(&pages.device, &space, to, read)?;
    Ok((BackupState::of(&pages.header(), digest), index))
}

/// Opens a backup that others follow, to read it, and locks it meanwhile.
///
/// # Errors
/// [`Error::BadBackup`] if it is an increment, or none.
pub(super) fn open_full(path: &Path) -> Result<Store> {
    if is_increment(path)? {
        let what = "it is an increment: name the backup that it follows first".into();
        return Err(Error::BadBackup { path: path.into(), what });
    }
    open_backup(path)
}

/// Whether a file says that it is an increment.
///
/// # Errors
/// What the system said.
pub(super) fn is_increment(path: &Path) -> Result<bool> {
    begins_with(path, AT_MAGIC as u64, MAGIC).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::NotFound(path.into()),
        _ => Error::of_backup(format!("reading {}", path.display()))(error),
    })
}
