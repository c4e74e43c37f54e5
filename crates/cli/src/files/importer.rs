//! Puts files into a store.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::file_store::{FileStore, chunk_key};
use super::listing::Found;
use super::record::{FileRecord, Kind, Stamp};

/// How the attempt to store a file ended.
#[derive(Debug)]
pub enum Stored {
    /// It is in the store.
    Yes,
    /// It was in the store already, with the same size and time.
    Unchanged,
    /// It changed while it was read, twice; nothing of it is in the store.
    Changing,
    /// It could not be read; nothing of it is in the store.
    Unreadable,
}

/// Puts files into a store; threads may share it.
pub struct Importer<'a> {
    pub files: &'a FileStore,
    /// The directory that paths are relative to.
    pub root: &'a Path,
    pub chunk_bytes: u32,
}

/// Why a file could not be stored.
enum ImportError {
    /// The file system refused: the import leaves the file out.
    Read,
    /// The store refused: the whole import fails.
    Store(vellum::Error),
}

impl From<vellum::Error> for ImportError {
    fn from(error: vellum::Error) -> Self {
        Self::Store(error)
    }
}

impl Importer<'_> {
    /// Stores one file, and calls `seen` with each chunk's number and bytes.
    ///
    /// # Errors
    /// Only errors of the store. Refusals of the file system are in the result.
    pub fn store(&self, found: &Found, seen: &mut dyn FnMut(u32, &[u8])) -> vellum::Result<Stored> {
        let before = self.files.record(&found.path)?;
        if before.as_ref().is_some_and(|record| {
            record.kind == found.kind && record.stamp == found.stamp && record.mode == found.mode
        }) {
            return Ok(Stored::Unchanged);
        }
        let stored_before = before.map_or(0, |record| record.chunks);
        let attempt = match found.kind {
            Kind::Link => self.link(found),
            Kind::File => self.file(found, seen),
        };
        let (record, result) = match attempt {
            Ok(Some(record)) => (Some(record), Stored::Yes),
            Ok(None) => (None, Stored::Changing),
            Err(ImportError::Read) => (None, Stored::Unreadable),
            Err(ImportError::Store(error)) => return Err(error),
        };
        match record {
            Some(record) => {
                self.files.meta.upsert(&found.path, &record.encode())?;
                self.files.remove_chunks(&found.path, record.chunks, stored_before)?;
            }
            None => {
                let chunks = chunk_count(found.stamp.size, self.chunk_bytes).max(stored_before);
                self.files.meta.remove(&found.path)?;
                self.files.remove_chunks(&found.path, 0, chunks)?;
            }
        }
        Ok(result)
    }

    fn link(&self, found: &Found) -> Result<Option<FileRecord>, ImportError> {
        let target = fs::read_link(found.place(self.root)).map_err(|_| ImportError::Read)?;
        Ok(Some(FileRecord {
            kind: Kind::Link,
            mode: found.mode,
            stamp: found.stamp,
            chunk_bytes: self.chunk_bytes,
            chunks: 0,
            target: target.as_os_str().as_bytes().to_vec(),
        }))
    }

    /// Stores the content. `None` if the file has changed since the listing: a file that has grown
    /// could break the limit.
    fn file(
        &self,
        found: &Found,
        seen: &mut dyn FnMut(u32, &[u8]),
    ) -> Result<Option<FileRecord>, ImportError> {
        let file = open(&found.place(self.root)).map_err(|_| ImportError::Read)?;
        if !is_unchanged(&file, found.stamp)? {
            return Ok(None);
        }
        let record = FileRecord {
            kind: Kind::File,
            mode: found.mode,
            stamp: found.stamp,
            chunk_bytes: self.chunk_bytes,
            chunks: chunk_count(found.stamp.size, self.chunk_bytes),
            target: Vec::new(),
        };
        for chunk in 0..record.chunks {
            let length = record.chunk_len(chunk).unwrap_or(0);
            let offset = u64::from(chunk) * u64::from(self.chunk_bytes);
            let mut failed = false;
            let key = chunk_key(&found.path, chunk);
            // Reads the bytes from the file straight into the pool, without a buffer in between.
            let result = self.files.content.upsert_with(&key, length, |bytes| {
                file.read_exact_at(bytes, offset).inspect_err(|_| failed = true)?;
                seen(chunk, bytes);
                Ok(())
            });
            match result {
                Ok(_) => {}
                Err(_) if failed && !is_unchanged(&file, found.stamp)? => return Ok(None),
                Err(_) if failed => return Err(ImportError::Read),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(is_unchanged(&file, found.stamp)?.then_some(record))
    }
}

fn is_unchanged(file: &File, stamp: Stamp) -> Result<bool, ImportError> {
    let metadata = file.metadata().map_err(|_| ImportError::Read)?;
    Ok(Stamp::of(&metadata) == stamp)
}

/// Opens a file that the listing found to be regular. Does not block if it is a pipe by now.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOFOLLOW;
    let mut options = File::options();
    options.read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

fn chunk_count(size: u64, chunk_bytes: u32) -> u32 {
    // 2^32 chunks of 4 KiB are 16 TiB, more than a file of ext4 can have.
    u32::try_from(size.div_ceil(u64::from(chunk_bytes))).unwrap_or(u32::MAX)
}
