//! What the pool asks of the code that gives pages a meaning: [`PageFormat`].

use std::fmt;
use std::io;

use crate::page::PageRef;

/// Seals pages before they are written and checks them when they were read.
///
/// The pool moves pages; what their bytes say is the format's business. The hooks run on any
/// thread, background threads included, and must not call the pool. If one panics, the page stays
/// as it was: dirty, or not read.
pub trait PageFormat: Send + Sync + fmt::Debug + 'static {
    /// Completes a page that is about to be written (checksum and the like) and returns its log
    /// sequence number, or 0.
    ///
    /// `head` is a private copy of the first 4 KiB, `body` the rest of the page as it is in
    /// memory; what is changed in `head` goes to the file but not back into memory.
    fn seal(&self, page: PageRef, head: &mut [u8], body: &[u8]) -> u64;

    /// Checks a page that was just read. Nobody sees it before.
    fn verify(&self, page: PageRef, bytes: &[u8]) -> Result<(), PageDamage>;

    /// The write-ahead rule: returns once the log is durable up to `lsn`, the greatest number in
    /// a batch of pages that is about to be written. An error keeps the pages in memory, dirty.
    ///
    /// `still_dirty` says whether a page of the batch is dirty at this moment. A checkpoint that
    /// writes copies makes pages clean while the pool holds them to write them
    /// ([`Pool::settle_copies`](crate::Pool::settle_copies)). The pool does not write a batch
    /// without a dirty page. So a format that changes something before a write asks where no
    /// checkpoint can come between the answer and the change.
    ///
    /// An error of the kind [`WouldBlock`](io::ErrorKind::WouldBlock) says "not now": the pages
    /// must not be written for a while. It poisons nothing. Eviction takes other pages then, and a
    /// thread that finds no frame waits until pages may be written again, however long that takes.
    fn write_ahead(&self, lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()>;
}

/// A page is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{page} is damaged: {what}")]
pub struct PageDamage {
    /// The page that was asked for.
    pub page: PageRef,
    /// What differs from what was expected.
    pub what: String,
}

/// Pages without any structure: nothing is added, nothing is checked.
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
