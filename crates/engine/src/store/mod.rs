//! The public interface of a store: [`Store`], and a view of its pool.

pub(crate) mod at_exit;
pub(crate) mod callback;
pub(crate) mod catalog;
pub(crate) mod changes;
pub(crate) mod check;
pub(crate) mod checkpoint;
pub(crate) mod compact;
pub(crate) mod core;
pub(crate) mod cut;
pub(crate) mod cut_signal;
pub(crate) mod cutter;
pub(crate) mod file;
pub(crate) mod free_map;
pub(crate) mod gate;
#[cfg(test)]
mod gate_tests;
pub(crate) mod group_commit;
pub(crate) mod header;
pub(crate) mod late_redo;
pub(crate) mod open;
pub(crate) mod open_log;
pub(crate) mod options;
pub(crate) mod orphans;
pub(crate) mod pages;
pub(crate) mod salvage;
pub(crate) mod unlinked;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vellum_pool::device::{Device, DeviceInfo};
use vellum_pool::{BackendKind, PAGE_SIZE, Pool, PoolError, PoolStats, Space, Translation};

use crate::error::{Error, Result};
use crate::page::blob::VALUE_MAX;
use crate::redo::progress::RecoveryReport;
use crate::store::core::StoreCore;
use crate::store::options::Options;
use crate::tree::{Entries, Tree};

/// An open store: named trees in one file. This is a cheap handle: clone it, send it, share it.
///
/// [`close`](Store::close) the store at the end. The store also closes when its last handle is
/// dropped, even while a panic unwinds the thread, and when the process exits with the store open.
/// In these cases errors go only to `tracing`. If the process was killed after a change was written
/// to the file, opening the store again recovers it from its log
/// ([`Options::log`](crate::Options::log)), or fails if it had none. The child of a `fork` neither
/// uses nor closes the stores of its parent.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) core: Arc<StoreCore>,
}

/// How long keys and values of a store may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Greatest length of a key in bytes. It depends on the page size.
    pub max_key: usize,
    /// Greatest length in bytes of a value that is stored in one call: a quarter of the pool.
    pub max_value: u64,
    /// Greatest length in bytes of a value that is [streamed](crate::Tree::writer), whatever the
    /// size of the pool: 2^48.
    pub max_streamed: u64,
    /// An entry whose key, value and bookkeeping take at most this many bytes is stored in a leaf.
    /// The value of a longer entry gets pages of its own.
    pub max_inline_entry: usize,
}

/// Properties and statistics of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStat {
    /// A random number that identifies the store.
    pub store_id: u128,
    /// Version of the file's format.
    pub format_version: u32,
    /// Size of tree pages in bytes.
    pub page_bytes: u32,
    /// Length of the file in pages of 4 KiB.
    pub file_pages: u64,
    /// Pages of 4 KiB that are in use, headers included.
    pub used_pages: u64,
    /// Pages of 4 KiB that can be allocated without a longer file.
    pub free_pages: u64,
    /// Memory for pages, in bytes.
    pub pool_bytes: u64,
    /// Number of trees.
    pub trees: u64,
    /// Nothing has changed since the last checkpoint.
    pub clean: bool,
    /// The number of snapshots and transactions.
    pub views: u64,
    /// The age of the oldest snapshot or transaction.
    pub oldest_view: Option<Duration>,
    /// The memory, in bytes, that old values take for snapshots and transactions.
    pub version_bytes: u64,
}

impl Store {
    /// Creates a store in a new file, or in an empty one. The file gets its name when the store is
    /// complete and durable. Until then it has another name in the same directory, `.NAME.*.new`. A
    /// process that is killed leaves that file in the directory.
    ///
    /// # Errors
    /// [`Exists`](Error::Exists), a full disk, invalid options. After an error there is no new
    /// file, or the old one is unchanged.
    pub fn create(path: impl AsRef<Path>, options: &Options) -> Result<Store> {
        open::create_file(path.as_ref(), options).map(Store::from_core)
    }

    /// Opens the store in a file. If the store had a log and was not closed, recovers it first,
    /// whatever the options are ([`recovery`](Store::recovery)).
    ///
    /// # Errors
    /// [`NotFound`](Error::NotFound), [`InUse`](Error::InUse); if the file is invalid,
    /// [`NotAStore`](Error::NotAStore), [`Truncated`](Error::Truncated),
    /// [`Damaged`](Error::Damaged), [`UncleanShutdown`](Error::UncleanShutdown); if the store has
    /// to recover, [`NoLog`](Error::NoLog), [`OtherLog`](Error::OtherLog),
    /// [`NeedsRecovery`](Error::NeedsRecovery).
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Store> {
        open::open_at(path.as_ref(), options).map(Store::from_core)
    }

    /// Opens the store in a file, or creates it if there is none or the file is empty.
    ///
    /// # Errors
    /// As [`open`](Store::open) and [`create`](Store::create).
    pub fn open_or_create(path: impl AsRef<Path>, options: &Options) -> Result<Store> {
        let path = path.as_ref();
        let is_empty = || path.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
        match Store::open(path, options) {
            Err(Error::NotFound(_)) => {}
            Err(Error::NotAStore(_)) if is_empty() => {}
            other => return other,
        }
        match Store::create(path, options) {
            // Another process has created the file meanwhile.
            Err(Error::Exists(_)) => Store::open(path, options),
            other => other,
        }
    }

    /// Creates a store on a device, and overwrites what the device holds.
    ///
    /// # Errors
    /// As [`create`](Store::create).
    pub fn create_on(device: Arc<dyn Device>, options: &Options) -> Result<Store> {
        open::create(device, options).map(Store::from_core)
    }

    /// Opens the store on a device.
    ///
    /// # Errors
    /// As [`open`](Store::open).
    pub fn open_on(device: Arc<dyn Device>, options: &Options) -> Result<Store> {
        open::open(device, options).map(Store::from_core)
    }

    pub(crate) fn from_core(core: StoreCore) -> Store {
        let core = Arc::new(core);
        at_exit::register(&core);
        Store { core }
    }

    /// The tree of this name.
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree), damage, a failed read.
    pub fn tree(&self, name: &str) -> Result<Tree> {
        Ok(Tree::new(self.core.clone(), self.core.open_tree(name)?))
    }

    /// Creates an empty tree.
    ///
    /// # Errors
    /// [`TreeExists`](Error::TreeExists), a full disk or pool.
    pub fn create_tree(&self, name: &str) -> Result<Tree> {
        Ok(Tree::new(self.core.clone(), self.core.create_tree(name)?))
    }

    /// The tree of this name. Creates an empty tree if there is none.
    ///
    /// # Errors
    /// As [`tree`](Store::tree) and [`create_tree`](Store::create_tree).
    pub fn tree_or_create(&self, name: &str) -> Result<Tree> {
        loop {
            match self.tree(name) {
                Err(Error::NoSuchTree(_)) => {}
                other => return other,
            }
            match self.create_tree(name) {
                // Another thread has created the tree meanwhile.
                Err(Error::TreeExists(_)) => {}
                other => return other,
            }
        }
    }

    /// Renames a tree atomically: a thread that opens or lists trees finds one of the two names.
    /// Handles of the tree stay valid and have the new name. The old and the new name may be the
    /// same. The next [`sync`](Store::sync) makes the name durable, as any other change.
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree); [`TreeExists`](Error::TreeExists) if another tree has the
    /// new name; [`KeyTooLong`](Error::KeyTooLong), as when a tree is created; a full disk or pool.
    /// After an error the tree has its old name.
    pub fn rename_tree(&self, old: &str, new: &str) -> Result<()> {
        self.core.rename_tree(old, new)
    }

    /// Removes a tree and all of its entries. The handles of the tree fail with
    /// [`NoSuchTree`](Error::NoSuchTree) from then on. Snapshots and transactions that began before
    /// still read it; its pages are freed when the last of them ends.
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree); a full log; damage of the catalog, or a failed read
    /// there. After an error the tree is still there.
    ///
    /// Pages of the tree that are damaged or cannot be read are no error: they stay allocated and
    /// unused, and [`check`](Store::check) counts them.
    pub fn drop_tree(&self, name: &str) -> Result<()> {
        let exclusive = self.core.pages.exclusive()?;
        self.core.drop_tree(&exclusive, name)
    }

    /// The names of all trees, sorted.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn trees(&self) -> Result<Vec<String>> {
        self.core.pages.check_open()?;
        // A thread that renames a tree holds this lock while the catalog has both names.
        let _names_stay = self.core.trees();
        Entries::all(self.core.catalog())
            .map(|entry| {
                let (name, value) = entry?;
                Ok(self.core.decode_tree(&name, &value)?.name().to_string())
            })
            .collect()
    }

    /// Makes all earlier changes durable. New changes wait only while the checkpoint copies the
    /// changed pages, if they are few, or writes the last of them, if they are many. Changes go on
    /// while the checkpoint writes the rest and makes it durable. One checkpoint serves all threads
    /// that call this at the same time.
    ///
    /// Afterwards the file opens with the state at the cut of that checkpoint. This holds until the
    /// store writes the first page of a later change, at the next call or when it evicts a page.
    ///
    /// A store with a log ([`Options::log`](crate::Options::log)) makes its log durable instead,
    /// and changes wait for nothing. Afterwards the changes survive a crash, whatever comes later.
    ///
    /// # Errors
    /// A failed write or sync, which poisons the store; a full disk, which does not.
    pub fn sync(&self) -> Result<()> {
        self.core.sync()
    }

    /// Asks that all earlier changes become durable soon, and does not wait for that: within about
    /// a millisecond the log begins to write them, with those that follow until then. So a crash
    /// takes no more than what was changed within some milliseconds, the newest changes only. A
    /// store without a log ignores this.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed).
    pub fn request_sync(&self) -> Result<()> {
        self.core.pages.check_open()?;
        if let Some(log) = &self.core.pages.redo_log {
            log.request_flush(log.newest());
        }
        Ok(())
    }

    /// Makes all changes durable, truncates the unused tail of the file and unlocks the file, which
    /// can then be opened again. From then on, trees, iterators, cursors and readers return
    /// [`Closed`](Error::Closed). Values that the caller still has stay valid. Dropping the last
    /// handle frees the memory of the pool and ends the exclusive claim on a block device. A blob
    /// that was replaced or removed but that the caller still has as a [`Value`](crate::Value)
    /// keeps its place in the file until the next opening. The pages of a
    /// [`ValueWriter`](crate::ValueWriter) that has not finished do not stay.
    ///
    /// # Errors
    /// As [`sync`](Store::sync). After an error the store stays open, unless it is poisoned: the
    /// other handles go on and may close it again, and dropping the last one tries once more.
    ///
    /// Whatever this returns, the callbacks of all commits before it
    /// ([`commit_then`](crate::Transaction::commit_then)) have returned, unless one of them, or
    /// another function that the store runs, has called this.
    pub fn close(self) -> Result<()> {
        self.core.close()
    }

    /// Does what the thread of the store's log would do by now, if the store
    /// [has no threads](Options::single_threaded).
    #[cfg(feature = "testing")]
    pub fn work_for_log(&self) {
        self.core.pages.redo_log.iter().for_each(|log| log.work_now());
    }

    /// Has the device of the store's log take its time, if the store has a log and
    /// [no threads](Options::single_threaded); see `Log::slow_down`.
    #[cfg(feature = "testing")]
    pub fn slow_log_down(&self, choose: vellum_log::Choose) -> Option<vellum_log::Pilot> {
        self.core.pages.redo_log.as_ref().map(|log| log.slow_down(choose))
    }

    /// What the opening of the store did to recover it. `None` if it was closed before.
    pub fn recovery(&self) -> Option<RecoveryReport> {
        self.core.recovery
    }

    /// Properties and statistics of the store. If it is open for salvage, only the trees that the
    /// catalog can name count.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn stat(&self) -> Result<StoreStat> {
        let trees = match self.core.salvage {
            true => self.core.salvage_catalog(None).0.len() as u64,
            false => self.trees()?.len() as u64,
        };
        let (core, header) = (&self.core, self.core.pages.header());
        let file_pages = core.pages.pool.file_pages();
        let (views, oldest_view) = core.pages.versions.views();
        let used = core.pages.pool.with_space(|space| space.allocated_pages() + space.first());
        Ok(StoreStat {
            store_id: header.store_id,
            format_version: header.version,
            page_bytes: header.page_frames * PAGE_SIZE as u32,
            file_pages,
            used_pages: used,
            free_pages: file_pages.saturating_sub(used),
            pool_bytes: core.pages.pool_bytes(),
            trees,
            clean: header.clean && !core.pages.is_changed(),
            views,
            oldest_view,
            version_bytes: core.pages.version_bytes(),
        })
    }

    /// The greatest lengths of keys and values.
    pub fn limits(&self) -> Limits {
        Limits {
            max_key: self.core.pages.limits.max_key,
            max_value: self.core.pages.max_blob(),
            max_streamed: VALUE_MAX,
            max_inline_entry: self.core.pages.limits.max_cell,
        }
    }

    /// Changes the size of the store's pool, in bytes, while threads use the store. Returns when
    /// the pages fit into that memory, and the rest is back with the kernel. The size holds until
    /// the next call or until the store closes; the file does not record it.
    ///
    /// A pool that shrinks evicts pages, and writes those that have changed. Reads and changes of
    /// other threads that need memory wait until enough pages have left. The caller must not hold
    /// values, iterators or readers that need more memory than the smaller pool has. A smaller pool
    /// bounds more than memory: the length of values that are read as a whole
    /// ([`limits`](Self::limits)), and what a transaction may change, also one that is under way.
    ///
    /// A pool never grows beyond [`Options::max_pool_bytes`], or its first size without that.
    ///
    /// # Examples
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// use vellum::{Options, Store};
    ///
    /// let options = Options::new().pool_bytes(64 << 20).max_pool_bytes(256 << 20);
    /// let store = Store::create(folder.path().join("films"), &options)?;
    /// // Another part of the program needs memory, and does not need it any more.
    /// store.resize_pool(16 << 20)?;
    /// store.resize_pool(256 << 20)?;
    /// assert_eq!(store.stat()?.pool_bytes, 256 << 20);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PoolTooSmall`](Error::PoolTooSmall) for fewer than eight tree pages;
    /// [`Pool`](Error::Pool) beyond the maximum or the memory of the process;
    /// [`PoolExhausted`](Error::PoolExhausted) if values that are being read hold more memory than
    /// the pool is to have, or changed pages cannot be written; [`Pool`](Error::Pool) if the kernel
    /// does not take memory back, because the process has locked it for example. After an error
    /// the pool keeps its old size.
    pub fn resize_pool(&self, bytes: u64) -> Result<()> {
        self.core.pages.resize_pool(bytes)
    }

    /// The counters of the buffer manager.
    pub fn pool_stats(&self) -> PoolStats {
        self.core.pages.pool.stats()
    }

    /// A read-only view of the buffer manager.
    pub fn pool(&self) -> PoolView<'_> {
        PoolView(&self.core.pages.pool)
    }
}

/// A read-only view of the buffer manager of a store.
///
/// ```compile_fail
/// fn pages_of_a_store_cannot_be_freed(store: &vellum::Store) {
///     let _ = store.pool().free_page(vellum::PageRef::new(2, 1));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a>(pub(crate) &'a Pool);

impl PoolView<'_> {
    /// The backend that populates and releases pages.
    pub fn backend(self) -> BackendKind {
        self.0.backend()
    }

    /// How the pool finds the memory of a tree page that becomes resident now: never `Auto`.
    pub fn translation(self) -> Translation {
        self.0.translation()
    }

    /// The properties of the device.
    pub fn device_info(self) -> DeviceInfo {
        self.0.device_info()
    }

    /// The number of resident pages of 4 KiB according to the kernel's page tables. Slow: it reads
    /// `/proc/self/pagemap`.
    ///
    /// # Errors
    /// `/proc/self/pagemap` cannot be read.
    pub fn kernel_resident_pages(self) -> Result<u64, PoolError> {
        self.0.kernel_resident_pages()
    }

    /// The number of pages of 4 KiB that were freed but that a reader or a write-back still holds.
    pub fn frames_to_free(self) -> u64 {
        self.0.frames_to_free()
    }

    /// Reads the map of allocated pages.
    pub fn with_space<R>(self, read: impl FnOnce(&Space) -> R) -> R {
        self.0.with_space(read)
    }
}
