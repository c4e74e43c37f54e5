//! The interface to the code that knows what is in the pages: [`PageFormat`].

use std::fmt;
use std::io;

use crate::page::PageRef;

/// Seals pages before the pool writes them, and checks pages after the pool has read them.
///
/// The pool moves pages; the format knows what their bytes mean. The hooks run on any thread,
/// background threads included, and must not call the pool. If a hook panics, the page stays as it
/// was: dirty, or evicted.
pub trait PageFormat: Send + Sync + fmt::Debug + 'static {
    /// Completes a page that the pool is about to write (with a checksum, for example) and returns
    /// its log sequence number, or 0.
    ///
    /// `head` is a private copy of the first 4 KiB, `body` the rest of the page in memory. Changes
    /// of `head` go to the file, and not to memory.
    fn seal(&self, page: PageRef, head: &mut [u8], body: &[u8]) -> u64;

    /// Checks a page that the pool has just read. No other thread can reach the page before.
    fn verify(&self, page: PageRef, bytes: &[u8]) -> Result<(), PageDamage>;

    /// Makes a page anew that could not be read, or that [`verify`](Self::verify) has refused, and
    /// returns whether it could. `bytes` may be anything. The pool verifies the page again, and
    /// writes it later. No other thread can reach the page before.
    fn repair(&self, page: PageRef, bytes: &mut [u8]) -> bool {
        let _ = (page, bytes);
        false
    }

    /// Whether the file does not have a page yet as it is: whatever a read finds there,
    /// [`repair`](Self::repair) makes the page.
    fn is_pending(&self, page: PageRef) -> bool {
        let _ = page;
        false
    }

    /// A page that was [pending](Self::is_pending) is in memory now, and the pool writes it later.
    /// No other thread can reach the page before.
    fn note_made(&self, page: PageRef) {
        let _ = page;
    }

    /// The write-ahead rule: returns once the log is durable up to `lsn`, the greatest number of
    /// the pages that the pool is about to write together. After an error the pages stay in memory,
    /// dirty.
    ///
    /// `still_dirty` says whether one of these pages is dirty at this moment. A checkpoint that
    /// writes copies may make pages clean while the pool holds them to write them
    /// ([`Pool::clear_dirty_if_unchanged`](crate::Pool::clear_dirty_if_unchanged)). The pool
    /// writes nothing if none of them is dirty. So a format that changes something before a write
    /// calls `still_dirty` where no checkpoint can run between the answer and the change.
    ///
    /// An error of the kind [`WouldBlock`](io::ErrorKind::WouldBlock) says "not now": the pool must
    /// not write the pages for a while. It poisons nothing. Eviction then takes other pages, and a
    /// thread that finds no frame waits until the pool may write pages again, however long that
    /// takes.
    fn write_ahead(&self, lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()>;

    /// A page, or a range of pages, is freed now, and is not pending any more. Returns the log
    /// sequence number that must be durable before its place may be allocated again; 0 if it may be
    /// at once. After a crash the page may be in use again, if the log has lost the record that
    /// frees it. So a page that is not logged must not be written there before.
    fn free_lsn(&self, page: PageRef) -> u64 {
        let _ = page;
        0
    }

    /// Records before this log sequence number are durable.
    fn durable_lsn(&self) -> u64 {
        u64::MAX
    }
}

/// A page whose contents are wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{page} is damaged: {what}")]
pub struct PageDamage {
    /// The page that was asked for.
    pub page: PageRef,
    /// What is wrong.
    pub what: String,
}

/// Pages without any structure: `seal` adds nothing, and `verify` checks nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawPages;

impl PageFormat for RawPages {
    fn seal(&self, _page: PageRef, _head: &mut [u8], _body: &[u8]) -> u64 {
        0
    }

    fn verify(&self, _page: PageRef, _bytes: &[u8]) -> Result<(), PageDamage> {
        Ok(())
    }

    fn write_ahead(&self, _lsn: u64, _still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        Ok(())
    }
}
