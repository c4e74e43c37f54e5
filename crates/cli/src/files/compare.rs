//! Compares stored files with the files of the file system, byte by byte.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::file_store::FileStore;
use super::importer::open;
use super::listing::Found;
use super::record::{FileRecord, Kind, Stamp};

/// The result of a comparison.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte is the same.
    Same,
    /// The file has changed since it was stored, so there is nothing to compare with.
    Changed,
    /// The store has something else than the file; says what and where.
    Different(String),
}

/// Compares files; threads may share it.
pub struct Comparer<'a> {
    pub files: &'a FileStore,
    pub root: &'a Path,
}

impl Comparer<'_> {
    /// Compares one file. `expected` gets the number of a chunk and its bytes from the file system,
    /// and changes them to what the store should have.
    ///
    /// # Errors
    /// Those of the store.
    pub fn compare(
        &self,
        found: &Found,
        expected: &dyn Fn(u32, &mut Vec<u8>),
    ) -> vellum::Result<Verdict> {
        let verdict = self.content(found, expected)?;
        // If the file changed during the comparison, a difference says nothing about the store.
        if matches!(verdict, Verdict::Different(_)) && !self.is_unchanged(found) {
            return Ok(Verdict::Changed);
        }
        Ok(verdict)
    }

    fn content(
        &self,
        found: &Found,
        expected: &dyn Fn(u32, &mut Vec<u8>),
    ) -> vellum::Result<Verdict> {
        if !self.is_unchanged(found) {
            return Ok(Verdict::Changed);
        }
        let Some(record) = self.files.record(&found.path)? else {
            return Ok(Verdict::Different("it has no record".into()));
        };
        if (record.kind, record.mode, record.stamp) != (found.kind, found.mode, found.stamp) {
            return Ok(Verdict::Different(format!("its record says {}", record.describe())));
        }
        let place = found.place(self.root);
        if found.kind == Kind::Link {
            return Ok(match fs::read_link(place) {
                Ok(target) if target.as_os_str().as_bytes() == record.target => Verdict::Same,
                Ok(_) => Verdict::Different("it has another target".into()),
                Err(_) => Verdict::Changed,
            });
        }
        match open(&place) {
            Ok(file) => self.chunks(found, &record, &file, expected),
            Err(_) => Ok(Verdict::Changed),
        }
    }

    fn chunks(
        &self,
        found: &Found,
        record: &FileRecord,
        file: &File,
        expected: &dyn Fn(u32, &mut Vec<u8>),
    ) -> vellum::Result<Verdict> {
        let mut buffer = Vec::new();
        for chunk in 0..record.chunks {
            let length = record.chunk_len(chunk).unwrap_or(0);
            let offset = u64::from(chunk) * u64::from(record.chunk_bytes);
            buffer.clear();
            buffer.resize(length, 0);
            if file.read_exact_at(&mut buffer, offset).is_err() {
                return Ok(Verdict::Changed);
            }
            expected(chunk, &mut buffer);
            let Some(stored) = self.files.chunk(&found.path, chunk)? else {
                return Ok(Verdict::Different(format!("chunk {chunk} is missing")));
            };
            if *stored != *buffer {
                let at = stored.iter().zip(&buffer).take_while(|(a, b)| a == b).count();
                let at = offset + at as u64;
                return Ok(Verdict::Different(format!("chunk {chunk} differs from byte {at} on")));
            }
        }
        Ok(Verdict::Same)
    }

    fn is_unchanged(&self, found: &Found) -> bool {
        fs::symlink_metadata(found.place(self.root))
            .is_ok_and(|metadata| Stamp::of(&metadata) == found.stamp)
    }
}

#[cfg(test)]
mod tests {
    use vellum::{Options, Store};

    use super::*;
    use crate::files::file_store::chunk_key;
    use crate::files::importer::{Importer, Stored};
    use crate::files::listing;

    const CHUNK: u32 = 5000;

    /// Stores a folder with a file and a link, lets `change` change either side, and compares.
    fn verdicts(change: impl FnOnce(&FileStore, &Path)) -> Vec<Verdict> {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("file"), vec![7; 12_000]).unwrap();
        std::os::unix::fs::symlink("file", root.path().join("link")).unwrap();
        let listing = listing::list(root.path(), 1 << 20, &[]).unwrap();
        let place = tempfile::tempdir().unwrap();
        let options = Options::new().pool_bytes(1 << 20);
        let store = Store::create(place.path().join("store"), &options).unwrap();
        let files = FileStore::create(&store).unwrap();
        let importer = Importer { files: &files, root: root.path(), chunk_bytes: CHUNK };
        for found in &listing.files {
            assert!(matches!(importer.store(found, &mut |_, _| {}), Ok(Stored::Yes)));
        }
        change(&files, root.path());
        let comparer = Comparer { files: &files, root: root.path() };
        let compare = |found| comparer.compare(found, &|_, _| {}).unwrap();
        listing.files.iter().map(compare).collect()
    }

    #[test]
    fn what_was_stored_is_the_same() {
        assert_eq!(verdicts(|_, _| {}), [Verdict::Same, Verdict::Same]);
    }

    #[test]
    fn a_wrong_byte_in_the_store_is_found() {
        let verdicts = verdicts(|files, _| {
            let mut chunk = vec![7; 5000];
            chunk[123] = 8;
            files.content.upsert(&chunk_key(b"file", 1), &chunk).unwrap();
        });
        let what = "chunk 1 differs from byte 5123 on".to_string();
        assert_eq!(verdicts, [Verdict::Different(what), Verdict::Same]);
    }

    #[test]
    fn missing_and_short_chunks_and_records_are_found() {
        let first = |change: &dyn Fn(&FileStore)| verdicts(|files, _| change(files)).remove(0);
        let different = |what: &str| Verdict::Different(what.to_string());
        let missing = first(&|files| files.remove_chunks(b"file", 2, 3).unwrap());
        assert_eq!(missing, different("chunk 2 is missing"));
        let short = first(&|files| {
            files.content.upsert(&chunk_key(b"file", 0), &[7; 4999]).unwrap();
        });
        assert_eq!(short, different("chunk 0 differs from byte 4999 on"));
        let no_record = first(&|files| _ = files.meta.remove(b"file").unwrap());
        assert_eq!(no_record, different("it has no record"));
    }

    #[test]
    fn a_file_that_changed_is_no_witness() {
        let changed = verdicts(|_, root| fs::write(root.join("file"), vec![8; 12_001]).unwrap());
        assert_eq!(changed, [Verdict::Changed, Verdict::Same]);
        let gone = verdicts(|_, root| {
            fs::remove_file(root.join("file")).unwrap();
            fs::remove_file(root.join("link")).unwrap();
        });
        assert_eq!(gone, [Verdict::Changed, Verdict::Changed]);
    }
}
