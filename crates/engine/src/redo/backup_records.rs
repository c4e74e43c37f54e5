//! What a backup needs of the log while the store runs: a copy of its records.
//!
//! A backup needs all records from its cut on. The log must not wait for it: the checkpoints of the
//! store trim the log as always. So records are copied to a file of the backup before they go. The
//! backup copies them from time to time, and a trim copies those that are left. If that fails, the
//! backup fails, and the store goes on.

use std::fs::File;
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use crc_fast::{CrcAlgorithm, checksum};
use vellum_log::{Log, Lsn, RecordRef};

use super::records::Records;
use crate::error::{Error, Result};
use crate::sync::lock;

/// Length, checksum and number come before each record in the file.
const HEAD: usize = 4 + 8 + 8;
/// Records are written when they have so many bytes together.
const BUFFER: usize = 1 << 20;

/// The records that were copied for a backup, in a file.
#[derive(Debug)]
pub(crate) struct CopiedRecords {
    copied: Mutex<Copied>,
    file: File,
}

#[derive(Debug)]
struct Copied {
    /// Records before this are in the file.
    next: Lsn,
    /// Records from here on are not copied.
    limit: Lsn,
    /// Length of the file in bytes.
    len: u64,
    /// Why the copy is not complete.
    failed: Option<Error>,
}

impl CopiedRecords {
    /// Records from `from` on go to the end of `file`, which is empty.
    pub(crate) fn new(from: Lsn, file: File) -> CopiedRecords {
        let copied = Copied { next: from, limit: Lsn(u64::MAX), len: 0, failed: None };
        CopiedRecords { copied: Mutex::new(copied), file }
    }

    /// Copies no records from `end` on. There are none yet.
    pub(crate) fn end_at(&self, end: Lsn) {
        lock(&self.copied).limit = end;
    }

    /// Copies the records before `end`, which are durable.
    ///
    /// # Errors
    /// The first failure, also of a copy that a trim has made.
    pub(crate) fn copy(&self, log: &Log, end: Lsn) -> Result<()> {
        let mut copied = lock(&self.copied);
        match copied.failed.take() {
            Some(error) => Err(error),
            None => self.copy_to(&mut copied, log, end),
        }
    }

    /// As [`copy`](Self::copy), for a trim, which goes on whatever happens.
    pub(crate) fn copy_before_trim(&self, log: &Log, end: Lsn) {
        let mut copied = lock(&self.copied);
        if copied.failed.is_none()
            && let Err(error) = self.copy_to(&mut copied, log, end)
        {
            tracing::warn!("a backup fails, because it could not copy the log: {error}");
            copied.failed = Some(error);
        }
    }

    fn copy_to(&self, copied: &mut Copied, log: &Log, end: Lsn) -> Result<()> {
        let end = end.min(copied.limit);
        if copied.next >= end {
            return Ok(());
        }
        let mut scan = log.scan(Some(copied.next))?;
        let mut buffer = Vec::new();
        while let Some(RecordRef { lsn, bytes }) = scan.next_ref()? {
            if lsn >= end {
                break;
            }
            buffer.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            buffer.extend_from_slice(&sum(lsn, bytes).to_le_bytes());
            buffer.extend_from_slice(&lsn.0.to_le_bytes());
            buffer.extend_from_slice(bytes);
            if buffer.len() >= BUFFER {
                self.write(copied, &mut buffer)?;
            }
        }
        self.write(copied, &mut buffer)?;
        // Not the last record's number: a trim up to `end` takes its block.
        copied.next = end;
        Ok(())
    }

    fn write(&self, copied: &mut Copied, buffer: &mut Vec<u8>) -> Result<()> {
        self.file.write_all_at(buffer, copied.len).map_err(Error::of_backup("copying the log"))?;
        copied.len += buffer.len() as u64;
        buffer.clear();
        Ok(())
    }

    /// The number of bytes that records take in the file.
    pub(crate) fn len(&self) -> u64 {
        lock(&self.copied).len
    }

    /// Calls `visit` with each record from the byte `from` of the file on. Returns the byte behind
    /// the last one.
    ///
    /// # Errors
    /// A failed read, damage, the error of `visit`.
    pub(crate) fn read(
        &self,
        from: u64,
        visit: &mut dyn FnMut(RecordRef<'_>) -> Result<()>,
    ) -> Result<u64> {
        let end = self.len();
        let failed =
            |source| Error::BackupIo { doing: "reading the copy of the log".into(), source };
        let mut file = self.file.try_clone().map_err(failed)?;
        file.seek(SeekFrom::Start(from)).map_err(failed)?;
        let mut reader = BufReader::with_capacity(BUFFER, file);
        let (mut at, mut bytes) = (from, Vec::new());
        while at < end {
            let mut head = [0; HEAD];
            reader.read_exact(&mut head).map_err(failed)?;
            let [len, found, lsn] = [&head[..4], &head[4..12], &head[12..]].map(number);
            bytes.resize(len as usize, 0);
            reader.read_exact(&mut bytes).map_err(failed)?;
            let lsn = Lsn(lsn);
            if sum(lsn, &bytes) != found {
                return Err(failed(io::Error::other("it has other bytes than were written")));
            }
            at += HEAD as u64 + len;
            visit(RecordRef { lsn, bytes: &bytes })?;
        }
        Ok(at)
    }
}

impl Records for CopiedRecords {
    fn each(&self, from: Lsn, visit: &mut dyn FnMut(RecordRef<'_>) -> Result<()>) -> Result<()> {
        let mut visit_from = |record: RecordRef<'_>| match record.lsn < from {
            true => Ok(()),
            false => visit(record),
        };
        self.read(0, &mut visit_from).map(drop)
    }
}

fn number(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

fn sum(lsn: Lsn, bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes) ^ lsn.0
}
