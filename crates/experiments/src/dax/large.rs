//! A large file on persistent memory that a program keeps open, and the interfaces by which it
//! copies parts of it out and in.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::ptr;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, madvise};
use vellum_bench::report::Outcome;
use vellum_bench::workload::values::{fill, is_of, mix};
use vellum_dax::{
    Access, Backend, BackendChoice, DaxFile, Durability, Ephemeral, Heap, Mapping, Options,
    copy_past_caches,
};

/// A part of a file that begins with a word that follows from its number.
pub(super) const UNIT: u64 = 1 << 10;

/// Bytes of a huge page.
pub(super) const HUGE: u64 = 2 << 20;

/// Bytes of a piece of a file in pieces, and the bytes after each that the file loses.
const PIECE: u64 = 64 << 10;
const LOST: u64 = 4 << 10;

/// Where the blocks of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// As a new file system chooses them for a file whose length it knows.
    Row,
    /// In pieces of 64 KiB, as in an aged file system.
    Pieces,
}

impl Layout {
    /// In words.
    pub(super) fn name(self) -> &'static str {
        match self {
            Layout::Row => "in a row",
            Layout::Pieces => "in pieces",
        }
    }

    /// Makes a file of so many bytes, a multiple of 64 KiB, in which all units differ.
    pub(super) fn make(self, path: &Path, length: u64) -> Result<()> {
        self.make_of(path, length, |start, piece| {
            for (unit, bytes) in piece.chunks_mut(UNIT as usize).enumerate() {
                fill(start / UNIT + unit as u64, bytes);
            }
        })
    }

    /// The same with other contents. `contents` gets the place of 64 KiB, and fills them.
    pub(super) fn make_of(
        self,
        path: &Path,
        length: u64,
        contents: impl Fn(u64, &mut [u8]),
    ) -> Result<()> {
        let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
        if self == Layout::Row {
            // Pieces of that size begin at multiples of it, and then `mmap` takes huge pages.
            for start in (0..length).step_by(HUGE as usize) {
                let bytes = HUGE.min(length - start);
                fallocate(&file, FallocateFlags::empty(), start, bytes)?;
            }
        }
        let mut piece = vec![0; PIECE as usize];
        for start in (0..length).step_by(PIECE as usize) {
            contents(start, &mut piece);
            file.write_all(&piece)?;
            if self == Layout::Pieces {
                file.write_all(&piece[..LOST as usize])?;
            }
        }
        if self == Layout::Pieces {
            // The last piece is at the end of the file, which is cut and not collapsed.
            let pieces = length / PIECE;
            file.set_len(pieces * (PIECE + LOST) - LOST)?;
            // From the end, where fewer pieces have to move.
            for piece in (0..pieces - 1).rev() {
                let lost = piece * (PIECE + LOST) + PIECE;
                fallocate(&file, FallocateFlags::COLLAPSE_RANGE, lost, LOST)
                    .context("taking blocks out of a file")?;
            }
        }
        // Blocks that are reserved and not yet written have no leaf in a table.
        Ok(file.sync_all()?)
    }
}

/// Makes a file in each layout, measures with it, and removes it. The outcome says which layout the
/// file system cannot make.
pub(super) fn in_each_layout(
    path: &Path,
    outcome: &mut Outcome,
    make: impl Fn(Layout) -> Result<()>,
    measure: impl Fn(Layout, &mut Outcome) -> Result<()>,
) -> Result<()> {
    for layout in [Layout::Row, Layout::Pieces] {
        if let Err(error) = make(layout) {
            outcome.notes.push(format!("Without files {}: {error:#}.", layout.name()));
            continue;
        }
        measure(layout, outcome)?;
        fs::remove_file(path)?;
    }
    Ok(())
}

/// How a program copies parts of a file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Interface<'a> {
    /// By `pread` and `pwrite`.
    Calls,
    /// In a mapping, which `mmap` or the file's table makes.
    Mapped(Backend),
    /// In a mapping by `mmap`, after all pages were brought in as `MAP_POPULATE` does it.
    Populated,
    /// In a heap, for reading and writing.
    Heap(&'a Heap),
}

/// How a program stores bytes to a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stores {
    /// They are in the CPU's caches until something writes them back.
    Cached,
    /// They survive a loss of power where the file's blocks do.
    PastCaches,
}

/// A file that is open for reading and writing, with its table if the interface needs one.
#[derive(Debug)]
pub(super) struct Large<'a> {
    file: DaxFile,
    interface: Interface<'a>,
}

impl<'a> Large<'a> {
    /// Opens a file.
    pub(super) fn open(
        path: &Path,
        interface: Interface<'a>,
        durability: Durability,
    ) -> Result<Self> {
        let backend = match interface {
            Interface::Mapped(backend) => backend,
            Interface::Heap(heap) => heap.backend(),
            Interface::Calls | Interface::Populated => Backend::Mmap,
        };
        let options = Options { backend: BackendChoice::Only(backend), durability };
        Ok(Self { file: DaxFile::open_to_write(path, &options)?, interface })
    }

    /// Maps it, unless the interface is that of calls.
    pub(super) fn view(&self, access: Access) -> Result<View<'_>> {
        let length = self.file.length()?;
        let shown = match self.interface {
            Interface::Calls => Shown::Called(self.file.file()),
            Interface::Mapped(_) => Shown::Mapped(self.file.map(access)?),
            Interface::Populated => {
                let mapping = self.file.map(access)?;
                let base = mapping.base().as_ptr().cast();
                // SAFETY: the range is the mapping's, and its bytes stay as they are.
                #[allow(unsafe_code)]
                unsafe {
                    madvise(base, usize::try_from(length)?, Advice::LinuxPopulateRead)?;
                }
                Shown::Mapped(mapping)
            }
            Interface::Heap(heap) => Shown::Attached(self.file.map_ephemeral(heap)?),
        };
        Ok(View { shown, length, access })
    }

    /// The file and its table.
    pub(super) fn file(&self) -> &DaxFile {
        &self.file
    }

    /// Looks whether a version of the contents came to these places of the file.
    pub(super) fn check(&self, version: u64, places: &[u64]) -> Result<()> {
        let mut bytes = [0; 8];
        for at in places {
            self.file.file().read_exact_at(&mut bytes, *at)?;
            ensure!(is_stamped(at / UNIT, version, &bytes), "a write to {at} was lost");
        }
        Ok(())
    }
}

/// A file as an interface shows it to a program.
#[derive(Debug)]
pub(super) struct View<'a> {
    shown: Shown<'a>,
    length: u64,
    access: Access,
}

#[derive(Debug)]
enum Shown<'a> {
    Called(&'a File),
    Mapped(Mapping),
    Attached(Ephemeral<'a>),
}

impl View<'_> {
    /// Copies bytes out of the file.
    pub(super) fn copy_out(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let Some(from) = self.place(at, bytes.len()) else {
            return Ok(self.called().read_exact_at(bytes, at)?);
        };
        // SAFETY: the view shows these bytes, and nothing writes them meanwhile.
        #[allow(unsafe_code)]
        unsafe {
            ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    /// Copies bytes into the file: through the CPU's caches, or past them where the program itself
    /// copies.
    pub(super) fn copy_in(&self, at: u64, bytes: &[u8], stores: Stores) -> Result<()> {
        let Some(to) = self.place(at, bytes.len()) else {
            return Ok(self.called().write_all_at(bytes, at)?);
        };
        ensure!(self.access == Access::ReadWrite, "the view is for reading");
        // SAFETY: the view shows these bytes for writing, and this thread alone uses them.
        #[allow(unsafe_code)]
        unsafe {
            match stores {
                Stores::Cached => ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()),
                Stores::PastCaches => copy_past_caches(bytes, to),
            }
        }
        Ok(())
    }

    /// Makes a range of a mapping durable by `msync`, or by the file's descriptor where there is
    /// none.
    pub(super) fn sync_range(&self, at: u64, bytes: usize) -> Result<()> {
        match &self.shown {
            Shown::Called(file) => file.sync_data()?,
            Shown::Mapped(mapping) => mapping.persist(at, bytes)?,
            Shown::Attached(attached) => attached.sync()?,
        }
        Ok(())
    }

    /// Where a range of the file is in memory, unless calls copy it.
    fn place(&self, at: u64, bytes: usize) -> Option<*mut u8> {
        assert!(at + bytes as u64 <= self.length, "the file is shorter");
        let base = match &self.shown {
            Shown::Called(_) => return None,
            Shown::Mapped(mapping) => mapping.base(),
            Shown::Attached(attached) => attached.base(),
        };
        Some(base.as_ptr().wrapping_add(at as usize))
    }

    fn called(&self) -> &File {
        let Shown::Called(file) = &self.shown else { unreachable!("mapped files have a place") };
        file
    }
}

/// Has bytes begin as those of a unit of the file, in a version of its contents.
pub(super) fn stamp(unit: u64, version: u64, bytes: &mut [u8]) {
    bytes[..8].copy_from_slice(&mix(number(unit, version)).to_le_bytes());
}

/// Whether bytes begin as those of a unit. A new file is of version 0.
pub(super) fn is_stamped(unit: u64, version: u64, bytes: &[u8]) -> bool {
    is_of(number(unit, version), bytes)
}

fn number(unit: u64, version: u64) -> u64 {
    unit | version << 40
}

#[cfg(test)]
mod tests {
    use super::super::read_method::heap_for;
    use super::*;

    #[test]
    fn every_interface_shows_what_another_has_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        Layout::Row.make(&path, 256 << 10).unwrap();
        let heap = heap_for(Access::ReadWrite, Backend::Mmap, None).unwrap();
        let mapped = Interface::Mapped(Backend::Mmap);
        let all = [Interface::Calls, mapped, Interface::Populated, Interface::Heap(&heap)];
        let mut bytes = vec![0; 4_096];
        for (version, writer) in all.into_iter().enumerate() {
            let version = version as u64;
            for reader in all {
                let large = Large::open(&path, reader, Durability::Synced).unwrap();
                let view = large.view(Access::Read).unwrap();
                view.copy_out(100 * UNIT, &mut bytes).unwrap();
                assert!(is_stamped(100, version, &bytes), "{reader:?}");
                view.copy_out(104 * UNIT, &mut bytes).unwrap();
                assert!(is_stamped(104, 0, &bytes), "{reader:?}");
            }
            let large = Large::open(&path, writer, Durability::Synced).unwrap();
            let view = large.view(Access::ReadWrite).unwrap();
            stamp(100, version + 1, &mut bytes);
            view.copy_in(100 * UNIT, &bytes, Stores::Cached).unwrap();
            view.sync_range(100 * UNIT, bytes.len()).unwrap();
        }
    }

    #[test]
    fn a_file_in_pieces_has_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let [row, pieces] = ["row", "pieces"].map(|name| folder.path().join(name));
        Layout::Row.make(&row, 256 << 10).unwrap();
        match Layout::Pieces.make(&pieces, 256 << 10) {
            Ok(()) => assert_eq!(fs::read(row).unwrap(), fs::read(pieces).unwrap()),
            Err(error) => println!("left out: {error:#}"),
        }
    }
}
