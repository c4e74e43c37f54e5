//! The store's page format for the pool: how the pool seals and checks a page, and when it may
//! write one.

use std::io;
use std::sync::Arc;

use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageDamage, PageFormat, PageRef, Pool, PoolOptions, PoolSize, Space};

use crate::error::{CLOSED, Result};
use crate::node::check_bounds;
use crate::page::{self, PageKind};
use crate::page::{blob, pieces};
use crate::planted::{StoreBug, is_planted};
use crate::redo::log::RedoLog;
use crate::store::file::StoreFile;

/// The format of a store's pages, for the pool.
#[derive(Debug)]
pub(crate) struct StoreFormat(Option<Arc<StoreFile>>);

impl StoreFormat {
    /// The format for the pool of a store, which writes to this file.
    pub(crate) fn of(file: Arc<StoreFile>) -> Arc<StoreFormat> {
        Arc::new(StoreFormat(Some(file)))
    }

    /// The format for a pool that only reads.
    pub(crate) fn to_read() -> Arc<StoreFormat> {
        Arc::new(StoreFormat(None))
    }
}

/// A pool apart from the store's own, for reading what the file has.
pub(crate) fn scratch_pool(
    device: &Arc<dyn Device>,
    format: Arc<dyn PageFormat>,
    frames: u64,
) -> Result<Pool> {
    let options = PoolOptions {
        size: PoolSize::Bytes(frames * PAGE_SIZE as u64),
        evictors: 0,
        read_only: true,
        ..PoolOptions::default()
    };
    Ok(Pool::open(device.clone(), format, Space::new(0), options)?)
}

impl StoreFormat {
    fn log(&self) -> Option<&RedoLog> {
        self.0.as_ref().and_then(|file| file.log())
    }
}

impl PageFormat for StoreFormat {
    fn seal(&self, _page: PageRef, head: &mut [u8], body: &[u8]) -> u64 {
        page::seal(head, body)
    }

    /// Accepts a page only if code that holds a lock on it can use it without further checks of
    /// bounds: the header is valid, and every offset in a node is inside the node.
    fn verify(&self, page: PageRef, bytes: &[u8]) -> std::result::Result<(), PageDamage> {
        let damage = |what: String| Err(PageDamage { page, what });
        // After the read: `close` sets the mark before it unlocks the file.
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

    /// From the log, if it has the page's image, or from a backup, if the page was not written
    /// since.
    fn repair(&self, page: PageRef, bytes: &mut [u8]) -> bool {
        let Some(file) = self.0.as_ref().filter(|file| !file.is_closed()) else { return false };
        let failed = |whence: &str, error| {
            tracing::warn!("{whence} cannot repair {page}: {error}");
            false
        };
        let from_log = file.log().map_or(Ok(false), |log| log.repair(page, bytes));
        // A page that the log should have made counts as written: the backup is not asked for it.
        from_log.unwrap_or_else(|error| failed("the log", error))
            || file.changes.repair(page, bytes).unwrap_or_else(|error| failed("the backup", error))
    }

    fn is_pending(&self, page: PageRef) -> bool {
        self.log().is_some_and(|log| log.is_pending(page))
    }

    fn note_made(&self, page: PageRef) {
        self.log().into_iter().for_each(|log| log.pending.forget(page));
    }

    fn write_ahead(&self, lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        self.0.as_ref().map_or(Ok(()), |file| file.before_pages(lsn, still_dirty))
    }

    fn free_lsn(&self, page: PageRef) -> u64 {
        self.log().into_iter().for_each(|log| log.pending.forget(page));
        if is_planted(StoreBug::EarlyReuse) {
            return 0;
        }
        self.log().map_or(0, RedoLog::newest)
    }

    fn durable_lsn(&self) -> u64 {
        self.log().map_or(u64::MAX, RedoLog::reusable)
    }
}
