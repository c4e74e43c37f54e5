//! A file, and its table if it has one.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;
use vellum_uapi::dax::{self, DURABLE, MAX_EXTENT, NOSYNC};

use crate::PAGE_SIZE;
use crate::backend::{self, Backend, BackendChoice};
use crate::error::{Error, Result};
use crate::heap::{Ephemeral, Heap};
use crate::mapping::{self, Access, Mapping};
use crate::sys;

/// Who makes stores through a mapping durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// [`DaxFile::sync`] does, as `fsync` would: it writes back what was stored since the last one.
    #[default]
    Synced,
    /// The program does, by [`Mapping::persist`] or [`Mapping::write_durably`], and
    /// [`DaxFile::sync`] of this file does nothing with a table (the paper's *nosync*, section
    /// IV.D). On storage that is not byte-addressable the two call `msync`.
    Flushed,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// How it is mapped.
    pub backend: BackendChoice,
    /// Who makes stores durable.
    pub durability: Durability,
}

/// A table's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Pages of the file that the table was made for.
    pub pages: u64,
    /// Pages that no access faults in.
    pub present: u64,
    /// Bytes that page tables take, once for all processes.
    pub table_bytes: u64,
    /// Mappings, of all processes.
    pub mappings: u64,
    /// Mappings that the file system serves for now, page by page.
    pub served_by_file: u64,
    /// Ephemeral mappings, of all processes, with those that wait for a flush.
    pub ephemeral: u64,
    /// The file has lost blocks since the table was made or refreshed.
    pub is_stale: bool,
}

/// A file on storage that programs address by bytes. See the crate's front page.
#[derive(Debug)]
pub struct DaxFile {
    file: Arc<File>,
    table: Option<OwnedFd>,
    durability: Durability,
    why_no_table: Option<String>,
}

impl DaxFile {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::NotAFile`] it is no regular file; what the system said; [`Error::NoTable`] if the
    /// options ask for a table, and the file cannot have one.
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        Self::open_with(path.as_ref(), OpenOptions::new().read(true), options)
    }

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_write(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        Self::open_with(path.as_ref(), OpenOptions::new().read(true).write(true), options)
    }

    /// Makes a file, or opens the one that is there, for reading and writing.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn create(path: impl AsRef<Path>, options: &Options) -> Result<Self> {
        let mut how = OpenOptions::new();
        Self::open_with(path.as_ref(), how.read(true).write(true).create(true), options)
    }

    fn open_with(path: &Path, how: &OpenOptions, options: &Options) -> Result<Self> {
        Self::from_file(open_regular(path, how)?, options)
    }

    /// Takes over a file that is open for reading, and perhaps for writing.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_file(file: File, options: &Options) -> Result<Self> {
        let flags = match options.durability {
            Durability::Synced => 0,
            Durability::Flushed => DURABLE | NOSYNC,
        };
        let table = match options.backend {
            BackendChoice::Only(Backend::Mmap) => Err("the program has chosen mmap".to_owned()),
            _ => backend::open_table(&file, flags),
        };
        let (table, why_no_table) = match table {
            Ok(table) => (Some(table), None),
            Err(reason) if options.backend == BackendChoice::Only(Backend::Table) => {
                return Err(Error::NoTable { reason });
            }
            Err(reason) => (None, Some(reason)),
        };
        Ok(Self { file: Arc::new(file), table, durability: options.durability, why_no_table })
    }

    /// How it is mapped.
    pub fn backend(&self) -> Backend {
        if self.table.is_some() { Backend::Table } else { Backend::Mmap }
    }

    /// Why it has no table, and what to do; `None` if it has one.
    pub fn why_no_table(&self) -> Option<&str> {
        self.why_no_table.as_deref()
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes of the file.
    ///
    /// # Errors
    /// What the system said.
    pub fn length(&self) -> Result<u64> {
        mapping::length_of(self.file.as_fd())
    }

    /// Maps all of the file, and room for as much again, so that the mapping shows what is
    /// appended. With a table that is a GiB at least, which costs address space and no memory.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] the file is open for reading only; [`Error::TooLong`];
    /// [`Error::NoMemory`]; what the system said.
    pub fn map(&self, access: Access) -> Result<Mapping> {
        let length = self.length()?;
        if length > MAX_EXTENT {
            return Err(Error::TooLong { length, most: MAX_EXTENT });
        }
        let room = (2 * length).max(1);
        let bytes = match self.backend() {
            Backend::Table => dax::extent(room),
            // The kernel makes page tables for what is used, of each mapping.
            Backend::Mmap => room.next_multiple_of(dax::UNIT),
        };
        let bytes = bytes.min(MAX_EXTENT) as usize;
        let table = self.table.as_ref().map(AsFd::as_fd);
        let flushed = self.durability == Durability::Flushed;
        Mapping::new(&self.file, table, bytes, access, flushed)
            .map_err(|errno| Error::of("mapping a file", errno))
    }

    /// Maps all of the file, as long as it is now, for a short time, with the rights of the heap.
    /// With [`Durability::Flushed`] its [`sync`](Ephemeral::sync) does nothing.
    ///
    /// # Errors
    /// As [`Heap::map`].
    pub fn map_ephemeral<'heap>(&self, heap: &'heap Heap) -> Result<Ephemeral<'heap>> {
        let file = self.file.as_fd();
        heap.map_by(self.table.as_ref().map_or(file, AsFd::as_fd), file)
    }

    /// Appends bytes, and returns where they begin. Mappings of the file show them at once, without
    /// a fault. Other threads and processes must not append at the same time.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::NoSpace`]; what the system said.
    pub fn append(&self, bytes: &[u8]) -> Result<u64> {
        let end = self.length()?;
        let written = self.file.write_all_at(bytes, end);
        written.map_err(|error| Error::of_io("appending to a file", &error))?;
        self.refresh()?;
        Ok(end)
    }

    /// Makes the file longer, by zeros whose blocks exist already: a store to them needs no fault.
    /// Does nothing if the file is as long.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::NoSpace`]; what the system said.
    pub fn extend(&self, length: u64) -> Result<()> {
        const DOING: &str = "extending a file";
        let before = self.length()?;
        if length <= before {
            return Ok(());
        }
        self.file.set_len(length).map_err(|error| Error::of_io(DOING, &error))?;
        let filled = write_zeros(&self.file, before, length, |_| ControlFlow::Continue(()));
        if let Err(error) = filled {
            // Without room for its blocks it is as it was.
            let _ = self.file.set_len(before);
            return Err(Error::of_io(DOING, &error));
        }
        self.refresh()
    }

    /// Brings the table up to date with a file that other programs change, so that no access to a
    /// mapping faults. Needed for speed alone: a mapping shows the file as it is in any case.
    ///
    /// # Errors
    /// What the system said.
    pub fn refresh(&self) -> Result<()> {
        let Some(table) = &self.table else { return Ok(()) };
        match sys::refresh(table.as_fd()) {
            // The file system serves a file that changes all the time.
            Err(Errno::BUSY) => Ok(()),
            done => done.map_err(|errno| Error::of("refreshing a file table", errno)),
        }
    }

    /// Makes durable what was stored through mappings, by any process, and written by calls. Does
    /// nothing for a table with [`Durability::Flushed`].
    ///
    /// # Errors
    /// What the system said. After an error of the device what was stored may be lost.
    pub fn sync(&self) -> Result<()> {
        let target = self.table.as_ref().map_or(self.file.as_fd(), AsFd::as_fd);
        rustix::fs::fsync(target).map_err(|errno| Error::of("making a file durable", errno))
    }

    /// The table's figures; `None` without a table.
    ///
    /// # Errors
    /// What the system said.
    pub fn stat(&self) -> Result<Option<Stat>> {
        let Some(table) = &self.table else { return Ok(None) };
        let stat = sys::stat(table.as_fd());
        let stat = stat.map_err(|errno| Error::of("asking for a table's figures", errno))?;
        Ok(Some(Stat {
            pages: stat.pages,
            present: stat.leaves,
            table_bytes: stat.tables * PAGE_SIZE,
            mappings: stat.mounts,
            served_by_file: stat.barred,
            ephemeral: stat.attachments,
            is_stale: stat.stale != 0,
        }))
    }
}

/// Opens a regular file for reading.
///
/// # Errors
/// [`Error::NotAFile`] it is no regular file; what the system said.
pub fn open_file(path: impl AsRef<Path>) -> Result<File> {
    open_regular(path.as_ref(), OpenOptions::new().read(true))
}

/// Opens a file, and nothing else: the opening of a FIFO waits for a process at its other end, and
/// that of a device may have an effect.
fn open_regular(path: &Path, how: &OpenOptions) -> Result<File> {
    // If it cannot be looked at, the opening says why.
    let kind = path.metadata().ok().and_then(|about| kind_of(about.file_type()));
    match kind {
        Some(kind) => Err(Error::NotAFile { kind }),
        None => how.open(path).map_err(|error| Error::of_io("opening a file", &error)),
    }
}

/// What it is, unless it is a regular file.
fn kind_of(kind: FileType) -> Option<&'static str> {
    match kind {
        kind if kind.is_file() => None,
        kind if kind.is_dir() => Some("a folder"),
        kind if kind.is_fifo() => Some("a FIFO"),
        kind if kind.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}

/// Writes zeros in pieces, and calls a function with the bytes of each, which may end that. The
/// file system zeroes blocks for a mapping, too, and then the program writes them again (section
/// III.B); written here they are zeroed once.
pub(crate) fn write_zeros(
    file: &File,
    from: u64,
    to: u64,
    mut written: impl FnMut(u64) -> ControlFlow<()>,
) -> io::Result<ControlFlow<()>> {
    const PIECE: u64 = 1 << 20;
    let zeros = vec![0; PIECE.min(to.saturating_sub(from)) as usize];
    let mut at = from;
    while at < to {
        let bytes = (to - at).min(PIECE - at % PAGE_SIZE).min(zeros.len() as u64);
        file.write_all_at(&zeros[..bytes as usize], at)?;
        at += bytes;
        if written(bytes).is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}
