//! The record of a file: the value of the tree `meta`.
//!
//! ```text
//! byte  0      kind: 0 regular file, 1 symbolic link
//!       1..4   zero
//!       4..8   mode bits
//!       8..16  size in bytes
//!      16..24  time of the last change, seconds since 1970 (signed)
//!      24..28  ... and nanoseconds
//!      28..32  bytes of a chunk (the last one of a file is shorter)
//!      32..36  number of chunks
//!      36..    target of a symbolic link
//! ```
//! Numbers are little endian.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use crate::key_text;

const FIXED: usize = 36;

/// The kind of a file. The store has no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A symbolic link, kept as its target.
    Link,
}

/// Size and time of a file: a file with another stamp has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub size: u64,
    /// Seconds and nanoseconds.
    pub modified: (i64, u32),
}

impl Stamp {
    /// The stamp of an existing file.
    pub fn of(metadata: &Metadata) -> Self {
        // The kernel keeps nanoseconds below 10^9, which is a u32.
        let nanoseconds = u32::try_from(metadata.mtime_nsec()).unwrap_or(0);
        Self { size: metadata.len(), modified: (metadata.mtime(), nanoseconds) }
    }
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    pub kind: Kind,
    pub mode: u32,
    pub stamp: Stamp,
    pub chunk_bytes: u32,
    pub chunks: u32,
    /// Where a symbolic link points.
    pub target: Vec<u8>,
}

impl FileRecord {
    /// The record as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED + self.target.len());
        bytes.extend_from_slice(&[u8::from(self.kind == Kind::Link), 0, 0, 0]);
        bytes.extend_from_slice(&self.mode.to_le_bytes());
        bytes.extend_from_slice(&self.stamp.size.to_le_bytes());
        bytes.extend_from_slice(&self.stamp.modified.0.to_le_bytes());
        bytes.extend_from_slice(&self.stamp.modified.1.to_le_bytes());
        bytes.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.chunks.to_le_bytes());
        bytes.extend_from_slice(&self.target);
        bytes
    }

    /// Reads what [`FileRecord::encode`] wrote; `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let kind = match bytes.get(..4)? {
            [0, 0, 0, 0] => Kind::File,
            [1, 0, 0, 0] => Kind::Link,
            _ => return None,
        };
        let u32_at = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let u64_at = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let stamp = Stamp { size: u64_at(8)?, modified: (u64_at(16)?.cast_signed(), u32_at(24)?) };
        Some(Self {
            kind,
            mode: u32_at(4)?,
            stamp,
            chunk_bytes: u32_at(28)?,
            chunks: u32_at(32)?,
            target: bytes[FIXED..].to_vec(),
        })
    }

    /// Length of a chunk in bytes; `None` past the last.
    pub fn chunk_len(&self, chunk: u32) -> Option<usize> {
        if chunk >= self.chunks {
            return None;
        }
        let start = u64::from(chunk) * u64::from(self.chunk_bytes);
        let left = self.stamp.size.checked_sub(start)?;
        usize::try_from(left.min(u64::from(self.chunk_bytes))).ok()
    }

    /// The record for programs. A target that is not UTF-8 is written with escapes.
    pub fn json(&self) -> serde_json::Value {
        let (seconds, nanoseconds) = self.stamp.modified;
        let target = match std::str::from_utf8(&self.target) {
            Ok(text) => text.to_string(),
            Err(_) => key_text::printable(&self.target),
        };
        serde_json::json!({
            "kind": if self.kind == Kind::File { "file" } else { "link" },
            "mode": self.mode & 0o7777,
            "bytes": self.stamp.size,
            "modified_seconds": seconds,
            "modified_nanoseconds": nanoseconds,
            "target": (self.kind == Kind::Link).then_some(target),
        })
    }

    /// The record as one line for people.
    pub fn describe(&self) -> String {
        let (seconds, nanoseconds) = self.stamp.modified;
        let mode = self.mode & 0o7777;
        let rest = match self.kind {
            Kind::File => format!("{} chunks", self.chunks),
            Kind::Link => format!("-> {}", key_text::printable(&self.target)),
        };
        let kind = if self.kind == Kind::File { "file" } else { "link" };
        let size = self.stamp.size;
        format!("{kind} {mode:04o} {size} bytes, modified {seconds}.{nanoseconds:09}, {rest}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> FileRecord {
        FileRecord {
            kind: Kind::Link,
            mode: 0o100_644,
            stamp: Stamp { size: 10_000, modified: (-5, 999_999_999) },
            chunk_bytes: 4096,
            chunks: 3,
            target: b"../else\xff".to_vec(),
        }
    }

    #[test]
    fn records_survive() {
        assert_eq!(FileRecord::decode(&record().encode()), Some(record()));
        let bytes = record().encode();
        for length in 0..FIXED {
            assert_eq!(FileRecord::decode(&bytes[..length]), None);
        }
        assert_eq!(FileRecord::decode(&[7; 40]), None);
    }

    #[test]
    fn the_last_chunk_is_shorter() {
        let lengths: Vec<_> = (0..4).map(|chunk| record().chunk_len(chunk)).collect();
        assert_eq!(lengths, [Some(4096), Some(4096), Some(1808), None]);
    }
}
