//! Files in a store: a record for each path, and the content in chunks.
//!
//! Tree `meta`: path -> [`FileRecord`]. Tree `content`: path, a zero byte (which no path has), the
//! number of the chunk in four bytes, big endian -> the bytes of the chunk. So the chunks of a file
//! follow one another, and files are in the order of their paths.

use std::path::Path;

use vellum::{Store, Tree, Value};

use super::record::FileRecord;
use crate::error::{AtStore, Failure, Outcome};

/// Name of the tree with the records.
pub const META_TREE: &str = "meta";

/// Name of the tree with the content.
pub const CONTENT_TREE: &str = "content";

/// Largest chunk, in bytes.
const CHUNK_MAX: u64 = 4 << 20;

/// Bytes that a chunk leaves free in its last page, for the page's header and for the bytes that an
/// update appends.
const CHUNK_SLACK: u64 = 256;

/// The two trees.
#[derive(Clone, Debug)]
pub struct FileStore {
    pub meta: Tree,
    pub content: Tree,
}

impl FileStore {
    /// The trees of `store`, created if they do not exist.
    ///
    /// # Errors
    /// When they cannot be created.
    pub fn create(store: &Store) -> vellum::Result<Self> {
        let meta = store.tree_or_create(META_TREE)?;
        let content = store.tree_or_create(CONTENT_TREE)?;
        Ok(Self { meta, content })
    }

    /// The trees of `store`, if both exist.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn find(store: &Store) -> vellum::Result<Option<Self>> {
        let names = store.trees()?;
        let has = |name: &str| names.iter().any(|known| known == name);
        if !has(META_TREE) || !has(CONTENT_TREE) {
            return Ok(None);
        }
        Ok(Some(Self { meta: store.tree(META_TREE)?, content: store.tree(CONTENT_TREE)? }))
    }

    /// The record of a path; `None` also if the value is not a record.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn record(&self, path: &[u8]) -> vellum::Result<Option<FileRecord>> {
        Ok(self.meta.with(path, FileRecord::decode)?.flatten())
    }

    /// One chunk.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn chunk(&self, path: &[u8], chunk: u32) -> vellum::Result<Option<Value<'_>>> {
        self.content.get(&chunk_key(path, chunk))
    }

    /// Hands the content of a file to `sink`, chunk by chunk.
    ///
    /// # Errors
    /// When the store cannot be read, a chunk is missing, or `sink` fails.
    pub fn read(
        &self,
        path: &[u8],
        record: &FileRecord,
        store: &Path,
        sink: &mut dyn FnMut(&[u8]) -> Outcome,
    ) -> Outcome {
        let mut bytes = Vec::new();
        for chunk in 0..record.chunks {
            // A copy, because the pool may be smaller than the one that stored the chunk.
            if !self.content.get_into(&chunk_key(path, chunk), &mut bytes).at(store)? {
                let shown = store.display();
                return Err(Failure::message(format!("{shown}: chunk {chunk} is missing")));
            }
            sink(&bytes)?;
        }
        Ok(())
    }

    /// Removes the chunks from `first` up to, not with, `end`.
    ///
    /// # Errors
    /// When the store refuses.
    pub fn remove_chunks(&self, path: &[u8], first: u32, end: u32) -> vellum::Result<()> {
        for chunk in first..end {
            self.content.remove(&chunk_key(path, chunk))?;
        }
        Ok(())
    }
}

/// The key of a chunk.
pub fn chunk_key(path: &[u8], chunk: u32) -> Vec<u8> {
    let mut key = Vec::with_capacity(path.len() + 5);
    key.extend_from_slice(path);
    key.push(0);
    key.extend_from_slice(&chunk.to_be_bytes());
    key
}

/// The longest path whose chunks have keys within `max_key` bytes.
pub fn max_path(max_key: usize) -> usize {
    max_key.saturating_sub(5)
}

/// Bytes of a chunk: at most a sixteenth of the pool, so that several threads can each hold one.
pub fn chunk_bytes(pool_bytes: u64) -> u32 {
    let frames = (pool_bytes / 16).min(CHUNK_MAX) / 4096;
    // At most 4 MiB.
    u32::try_from(frames.max(1) * 4096 - CHUNK_SLACK).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_lie_in_the_order_of_paths() {
        let keys = [chunk_key(b"a", 0), chunk_key(b"a", 1), chunk_key(b"a", 256)];
        assert!(keys.is_sorted());
        assert!(chunk_key(b"a", u32::MAX) < chunk_key(b"a!", 0));
        assert_eq!(chunk_key(b"a", 1), b"a\0\0\0\0\x01");
    }

    #[test]
    fn chunks_fit_the_pool() {
        assert_eq!(chunk_bytes(1 << 30), (4 << 20) - 256);
        assert_eq!(chunk_bytes(1 << 20), (64 << 10) - 256);
        assert_eq!(chunk_bytes(0), 4096 - 256);
    }
}
