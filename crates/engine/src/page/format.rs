//! What the pool is told about pages: how they are sealed and checked, and when they may be
//! written.

use std::io;
use std::sync::Arc;

use vellum_pool::{PageDamage, PageFormat, PageRef};

use crate::error::CLOSED;
use crate::node::check_bounds;
use crate::page::{self, PageKind};
use crate::page::{blob, pieces};
use crate::store::file::StoreFile;

/// The format of a store's pages, for the pool.
#[derive(Debug)]
pub(crate) struct StoreFormat(Option<Arc<StoreFile>>);

impl StoreFormat {
    /// For the pool of a store, which writes to this file.
    pub(crate) fn of(file: Arc<StoreFile>) -> Arc<StoreFormat> {
        Arc::new(StoreFormat(Some(file)))
    }

    /// For pools that only read.
    pub(crate) fn to_read() -> Arc<StoreFormat> {
        Arc::new(StoreFormat(None))
    }
}

impl PageFormat for StoreFormat {
    fn seal(&self, _page: PageRef, head: &mut [u8], body: &[u8]) -> u64 {
        page::seal(head, body)
    }

    /// Admits only pages that code under a lock can use as they are: the header is right, and
    /// whatever a node refers to lies inside it.
    fn verify(&self, page: PageRef, bytes: &[u8]) -> Result<(), PageDamage> {
        let damage = |what: String| Err(PageDamage { page, what });
        // Behind the read: the mark was set before the file was unlocked.
        if self.0.as_ref().is_some_and(|file| file.is_closed()) {
            return damage(CLOSED.into());
        }
        let header = page::verify(page, bytes)?;
        match header.kind {
            PageKind::Inner | PageKind::Leaf => {
                check_bounds(bytes).or_else(|found| damage(found.to_string()))
            }
            PageKind::Blob if blob::len(bytes) > (bytes.len() - blob::BLOB_DATA) as u64 => {
                damage(format!("it says that its value has {} bytes", blob::len(bytes)))
            }
            PageKind::PieceIndex => pieces::check_bounds(bytes).or_else(damage),
            _ => Ok(()),
        }
    }

    /// There is no log yet; but the file has to say that it is in use.
    fn write_ahead(&self, _lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |file| file.before_pages(still_dirty))
    }
}
