//! The public face of a store: [`Store`], its [`Snapshot`], and its pool to look at.

pub(crate) mod aside;
pub(crate) mod at_exit;
pub(crate) mod catalog;
pub(crate) mod check;
pub(crate) mod checkpoint;
pub(crate) mod core;
pub(crate) mod file;
pub(crate) mod free_map;
pub(crate) mod gate;
#[cfg(test)]
mod gate_tests;
pub(crate) mod group_commit;
pub(crate) mod header;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod pages;
pub(crate) mod within;

use std::path::Path;
use std::sync::Arc;

use vellum_pool::device::{Device, DeviceInfo};
use vellum_pool::{BackendKind, PAGE_SIZE, Pool, PoolError, PoolStats, Space};

use crate::error::{Error, Result};
use crate::page::blob::VALUE_MAX;
use crate::store::core::StoreCore;
use crate::store::gate::Hold;
use crate::store::options::Options;
use crate::tree::{Entries, Tree};

/// An open store: named trees in one file. A cheap handle; clone it, send it, share it.
///
/// [`close`](Store::close) it at the end. If all handles are dropped instead the same happens, also
/// while a panic unwinds the thread, and when the process exits with the store open; but errors
/// only go to the log. A store whose process was killed is refused when it is opened again, until
/// there is a log to recover it from. In the child of a `fork` nothing becomes of its parent's
/// stores.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) core: Arc<StoreCore>,
}

/// How long keys and values of a store may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Greatest length of a key in bytes; follows from the page size.
    pub max_key: usize,
    /// Greatest length in bytes of a value that is stored in one call: a quarter of the pool.
    pub max_value: u64,
    /// Greatest length in bytes of a value that is [streamed](crate::Tree::writer), whatever the
    /// pool: 2^48.
    pub max_streamed: u64,
    /// Key, value and bookkeeping of an entry up to this size are kept in a leaf; a longer value
    /// gets pages of its own.
    pub max_inline_entry: usize,
}

/// What a store is and has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStat {
    /// Tells stores apart.
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
    /// Nothing was changed since the file was made durable last.
    pub clean: bool,
}

impl Store {
    /// Creates a store in a new file, or in an empty one. The file gets its name when the store is
    /// complete and durable; until then it has another one in the same directory, `.NAME.*.new`,
    /// which stays behind if the process is killed.
    ///
    /// # Errors
    /// [`Exists`](Error::Exists), a full disk, options that make no sense. Then there is no file,
    /// or it is as it was.
    pub fn create(path: impl AsRef<Path>, options: &Options) -> Result<Store> {
        open::create_file(path.as_ref(), options).map(Store::from_core)
    }

    /// Opens the store in a file.
    ///
    /// # Errors
    /// [`NotFound`](Error::NotFound), [`InUse`](Error::InUse); whatever is wrong with the file:
    /// [`NotAStore`](Error::NotAStore), [`Truncated`](Error::Truncated),
    /// [`Damaged`](Error::Damaged), [`UncleanShutdown`](Error::UncleanShutdown).
    pub fn open(path: impl AsRef<Path>, options: &Options) -> Result<Store> {
        Store::open_on(open::open_file(path.as_ref(), options)?, options)
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
            // Another process was faster.
            Err(Error::Exists(_)) => Store::open(path, options),
            other => other,
        }
    }

    /// Creates a store on a device, whatever that holds.
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

    fn from_core(core: StoreCore) -> Store {
        let core = Arc::new(core);
        at_exit::enter(&core);
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

    /// The tree of this name; an empty one if there was none.
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
                // Another thread was faster.
                Err(Error::TreeExists(_)) => {}
                other => return other,
            }
        }
    }

    /// Gives a tree another name, as one step: those who open trees, or list them, find one of the
    /// two names. Its handles stay good, and have the new name. A tree may be given the name that
    /// it has. The name is as durable as other changes: by the next [`sync`](Store::sync).
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree); [`TreeExists`](Error::TreeExists) if another tree has the
    /// new name; [`KeyTooLong`](Error::KeyTooLong), as when a tree is created; a full disk or pool.
    /// Then the tree has its old name.
    pub fn rename_tree(&self, old: &str, new: &str) -> Result<()> {
        self.core.rename_tree(old, new)
    }

    /// Removes a tree and all of its entries, once no snapshot is left. Its handles fail with
    /// [`NoSuchTree`](Error::NoSuchTree) from then on.
    ///
    /// # Errors
    /// [`NoSuchTree`](Error::NoSuchTree). Damage on the way: then the tree is gone all the same,
    /// but what could not be read stays unused space.
    pub fn drop_tree(&self, name: &str) -> Result<()> {
        let alone = self.core.pages.alone()?;
        self.core.drop_tree(&alone, name)
    }

    /// The names of all trees, sorted.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn trees(&self) -> Result<Vec<String>> {
        self.core.pages.check_open()?;
        // While a tree is renamed the catalog has both names, or so it may look from here.
        let _names_stay = self.core.trees();
        Entries::all(self.core.catalog())
            .map(|entry| {
                let (name, value) = entry?;
                Ok(self.core.decode_tree(&name, &value)?.name().to_string())
            })
            .collect()
    }

    /// Makes everything durable that was changed before. Changes stand still only while few changed
    /// pages are copied, or the last of many are written. They go on while the rest is written and
    /// made durable. Threads that call this at the same time are served by one checkpoint.
    ///
    /// Afterwards the file opens as it was when changes stood still, until the first page of a
    /// later change is written: by the next call, or when its memory is needed.
    ///
    /// # Errors
    /// A failed write or sync, which poisons the store; a full disk, which does not.
    pub fn sync(&self) -> Result<()> {
        self.core.sync()
    }

    /// Makes everything durable, gives the unused tail of the file back, ends the use of all
    /// handles and unlocks the file: it can be opened again. What trees, iterators, cursors and
    /// readers that still live are asked for then is [`Closed`](Error::Closed); values that were
    /// handed out stay. The memory of the pool comes back when the last handle is dropped, and so
    /// does the claim that the kernel has on a block device. A blob that was replaced or
    /// removed but is still held as a [`Value`](crate::Value) stays in the file, unused; what a
    /// [`ValueWriter`](crate::ValueWriter) that has not finished wrote does not.
    ///
    /// # Errors
    /// As [`sync`](Store::sync). Unless the store is poisoned it stays open then: its other handles
    /// go on and may close it again, and dropping the last of them tries once more.
    pub fn close(self) -> Result<()> {
        self.core.close()
    }

    /// What the store is and has.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn stat(&self) -> Result<StoreStat> {
        let trees = self.trees()?.len() as u64;
        let (core, header) = (&self.core, self.core.pages.header());
        let file_pages = core.pages.pool.file_pages();
        let used = core.pages.pool.with_space(|space| space.allocated_pages() + space.first());
        Ok(StoreStat {
            store_id: header.store_id,
            format_version: header.version,
            page_bytes: header.page_frames * PAGE_SIZE as u32,
            file_pages,
            used_pages: used,
            free_pages: file_pages.saturating_sub(used),
            pool_bytes: core.pages.pool.capacity() * PAGE_SIZE as u64,
            trees,
            clean: header.clean && !core.pages.is_changed(),
        })
    }

    /// How long keys and values may be.
    pub fn limits(&self) -> Limits {
        Limits {
            max_key: self.core.pages.limits.max_key,
            max_value: self.core.pages.max_blob,
            max_streamed: VALUE_MAX,
            max_inline_entry: self.core.pages.limits.max_cell,
        }
    }

    /// The counters of the buffer manager.
    pub fn pool_stats(&self) -> PoolStats {
        self.core.pages.pool.stats()
    }

    /// The buffer manager, to look at.
    pub fn pool(&self) -> PoolView<'_> {
        PoolView(&self.core.pages.pool)
    }
}

/// While this lives the store does not change: whatever is read fits together.
///
/// For now changes simply wait, those of other threads until the snapshot is dropped; the thread
/// that has it must not change the store itself, for that would wait for ever. Reading is not
/// affected, and several snapshots may live at once.
#[derive(Debug)]
pub struct Snapshot<'a> {
    store: &'a Store,
    _still: Hold<'a>,
}

impl Store {
    /// A view of the store that stands still. Changes wait while it lives.
    ///
    /// # Errors
    /// [`Closed`](crate::Error::Closed), [`CalledFromWithin`](crate::Error::CalledFromWithin).
    pub fn snapshot(&self) -> Result<Snapshot<'_>> {
        self.core.pages.check_open()?;
        Ok(Snapshot { store: self, _still: self.core.pages.hold()? })
    }
}

impl Snapshot<'_> {
    /// The tree of this name, as it is.
    ///
    /// # Errors
    /// [`NoSuchTree`](crate::Error::NoSuchTree), damage, a failed read.
    pub fn tree(&self, name: &str) -> Result<Tree> {
        self.store.tree(name)
    }

    /// The names of all trees, sorted.
    ///
    /// # Errors
    /// Damage or a failed read.
    pub fn trees(&self) -> Result<Vec<String>> {
        self.store.trees()
    }
}

/// What can be asked of the buffer manager of a store. It changes no page.
///
/// ```compile_fail
/// fn pages_of_a_store_cannot_be_freed(store: &vellum::Store) {
///     let _ = store.pool().free_page(vellum::PageRef::new(2, 1));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a>(pub(crate) &'a Pool);

impl PoolView<'_> {
    /// How pages are populated and released.
    pub fn backend(self) -> BackendKind {
        self.0.backend()
    }

    /// What the device says of itself.
    pub fn device_info(self) -> DeviceInfo {
        self.0.device_info()
    }

    /// How many pages of 4 KiB hold memory, by the kernel's own page tables. Slow: it reads
    /// `/proc/self/pagemap`.
    ///
    /// # Errors
    /// `/proc/self/pagemap` cannot be read.
    pub fn kernel_resident_pages(self) -> Result<u64, PoolError> {
        self.0.kernel_resident_pages()
    }

    /// Pages of 4 KiB that were freed while a reader or a write-back held them, and still are held.
    pub fn frames_to_free(self) -> u64 {
        self.0.frames_to_free()
    }

    /// Reads the map of allocated pages.
    pub fn with_space<R>(self, read: impl FnOnce(&Space) -> R) -> R {
        self.0.with_space(read)
    }
}
