//! The ways in which all bytes of a file come to a program that uses them once.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::Result;
use vellum_bench::report::Outcome;
use vellum_bench::worker::FileMapping;
use vellum_dax::{Access, Backend, BackendChoice, DaxFile, Ephemeral, Heap, HeapOptions, Options};

/// How the bytes come to the program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way<'a> {
    /// By `read`, into a buffer that is used again.
    Read,
    /// By `mmap`, with all pages at once.
    Populated,
    /// In a heap, of the module or of `mmap`.
    Heap(&'a Heap),
    /// In an ordinary mapping of the file's table.
    Table,
}

impl Way<'_> {
    /// Has `take` use all bytes of a file, and gives up the mapping and the file.
    pub(super) fn use_once<T>(
        self,
        mut file: File,
        buffer: &mut Vec<u8>,
        take: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        Ok(match self {
            Way::Read => {
                let length = usize::try_from(file.metadata()?.len())?;
                if buffer.len() < length {
                    buffer.resize(length, 0);
                }
                file.read_exact(&mut buffer[..length])?;
                take(&buffer[..length])
            }
            Way::Populated => take(FileMapping::new(&file)?.bytes()),
            Way::Heap(heap) => take(bytes_of(&heap.map(&file)?)),
            Way::Table => {
                let backend = BackendChoice::Only(Backend::Table);
                let file = DaxFile::from_file(file, &Options { backend, ..Options::default() })?;
                let mapping = file.map(Access::Read)?;
                // SAFETY: nothing changes the file while the experiment runs.
                #[allow(unsafe_code)]
                take(unsafe { mapping.bytes(file.length()?)? })
            }
        })
    }
}

/// A heap for reading.
pub(super) fn heap(backend: Backend, batch: Option<u32>) -> vellum_dax::Result<Heap> {
    heap_for(Access::Read, backend, batch)
}

/// A heap with these rights.
pub(super) fn heap_for(
    access: Access,
    backend: Backend,
    batch: Option<u32>,
) -> vellum_dax::Result<Heap> {
    let backend = BackendChoice::Only(backend);
    Heap::new(&HeapOptions { backend, batch, ..HeapOptions::new(access) })
}

/// A heap of the module for reading and writing, if files of this folder can have tables. If not,
/// the outcome says why.
pub(super) fn table_and_heap(folder: &Path, outcome: &mut Outcome) -> Result<Option<Heap>> {
    let probe = folder.join("probe");
    let backend = BackendChoice::Only(Backend::Table);
    let table = DaxFile::create(&probe, &Options { backend, ..Options::default() });
    let heap = table.and_then(|_| heap_for(Access::ReadWrite, Backend::Table, None));
    fs::remove_file(&probe)?;
    Ok(heap.map_err(|error| outcome.notes.push(format!("Without file tables: {error}."))).ok())
}

/// Heaps of the module for reading, one for each number of unmapped ranges that it flushes at once.
/// Without the module there are none, and the outcome says why.
pub(super) fn heaps_by_table<const N: usize>(
    batches: [Option<u32>; N],
    outcome: &mut Outcome,
) -> Option<[Heap; N]> {
    let heaps = batches.into_iter().map(|batch| heap(Backend::Table, batch));
    match heaps.collect::<vellum_dax::Result<Vec<_>>>() {
        Ok(heaps) => Some(heaps.try_into().expect("a heap for each batch")),
        Err(error) => {
            outcome.notes.push(format!("Without file tables: {error}."));
            None
        }
    }
}

/// The bytes of a file of an experiment.
pub(super) fn bytes_of<'a>(mapped: &'a Ephemeral<'_>) -> &'a [u8] {
    // SAFETY: nothing changes the files while an experiment runs.
    #[allow(unsafe_code)]
    unsafe {
        mapped.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_shows_the_whole_file() {
        let folder = tempfile::tempdir().unwrap();
        let by_mmap = heap(Backend::Mmap, None).unwrap();
        let mut buffer = Vec::new();
        // A buffer that has seen a longer file shows no more than the file.
        for bytes in [vec![7; 70_000], vec![8; 5]] {
            let path = folder.path().join("file");
            fs::write(&path, &bytes).unwrap();
            for way in [Way::Read, Way::Populated, Way::Heap(&by_mmap)] {
                let file = File::open(&path).unwrap();
                let seen = way.use_once(file, &mut buffer, <[u8]>::to_vec).unwrap();
                assert_eq!(seen, bytes, "{way:?}");
            }
        }
    }
}
