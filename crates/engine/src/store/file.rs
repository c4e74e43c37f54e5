//! The store's file as a whole: which header it has, and whether pages may be written to it.
//!
//! A clean header says what every page of the file is. So before the first page is written after
//! it, a header that says "in use" is made durable ([`StoreFile::before_pages`], which the pool
//! calls before each write of pages). A change that stays in memory leaves the file clean.
//!
//! While a checkpoint is between its last page and its header no page may be written at all: the
//! header is about the pages as they were then. The checkpoint bars the file ([`StoreFile::bar`]),
//! and the pool keeps its dirty pages until the [`Bar`] is dropped.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use vellum_pool::device::Device;
use vellum_pool::{PageRef, PoolError, Space};

use crate::error::{CLOSED, Error, Result};
use crate::store::header::{Header, Listed};

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct StoreFile {
    /// Weak, because the pool's format has this file, and a thread of the device that has just
    /// completed a read still has the format: it must not be the one that drops the device, which
    /// unlocks the file. Who writes a header has the device.
    device: Weak<dyn Device>,
    /// What the file's newest header says, but that the numbers which the store hands out
    /// (`version`, `next_tree`) go on.
    header: Mutex<Header>,
    /// Held while a header is written, and while it is settled whether one has to be.
    writing: Mutex<()>,
    /// The newest header says "in use", durably: pages may be written.
    in_use: AtomicBool,
    barred: AtomicBool,
    /// The store is closed, and others may have changed the file since.
    closed: AtomicBool,
    /// The first failure to write a header or the free map.
    poison: OnceLock<Arc<str>>,
}

/// While this lives no page is written by the pool.
#[derive(Debug)]
pub(crate) struct Bar<'a>(&'a StoreFile);

impl Drop for Bar<'_> {
    fn drop(&mut self) {
        self.0.barred.store(false, Ordering::Release);
    }
}

impl StoreFile {
    /// A file that has this header, durably.
    pub(crate) fn new(device: &Arc<dyn Device>, header: Header) -> StoreFile {
        StoreFile {
            device: Arc::downgrade(device),
            in_use: AtomicBool::new(!header.clean),
            header: Mutex::new(header),
            writing: Mutex::default(),
            barred: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            poison: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Header> {
        self.header.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is read from the file may be another process's.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Nothing of this store is read or written after this, but what the pool is writing just now.
    pub(crate) fn close(&self) {
        // Under the lock: a thread that is about to mark the file has done so, or finds it closed.
        let _writing = self.writing();
        self.closed.store(true, Ordering::Release);
    }

    /// A page may have been written since the last clean header.
    pub(crate) fn is_in_use(&self) -> bool {
        self.in_use.load(Ordering::Acquire)
    }

    pub(crate) fn header(&self) -> Header {
        *self.lock()
    }

    /// Changes what the next header will say.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut Header) -> R) -> R {
        change(&mut self.lock())
    }

    /// After a failed write of a header or a sync nothing is known of the file, and after a panic
    /// in a change its pages may not fit together.
    pub(crate) fn check_poison(&self) -> Result<()> {
        self.poison.get().map_or(Ok(()), |first| Err(Error::Poisoned(first.clone())))
    }

    /// Refuses changes from now on.
    #[cold]
    pub(crate) fn poison_for(&self, what: &str) {
        if self.poison.set(what.into()).is_ok() {
            tracing::error!("{what}; changes are refused from now on");
        }
    }

    /// Pages are about to be written: makes the file say that it is in use. "Not now" while the
    /// file is barred. A checkpoint may have made the pages clean in the meantime: the file is
    /// marked only if one of them is `still_dirty`.
    pub(crate) fn before_pages(&self, still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        if self.barred.load(Ordering::Acquire) {
            return Err(put_off());
        }
        if self.in_use.load(Ordering::Acquire) {
            return Ok(());
        }
        self.mark(still_dirty).map_err(|error| match error {
            PoolError::WriteAhead(said) => said,
            error => io::Error::other(format!("{UNMARKED}: {error}")),
        })
    }

    /// Makes the file say that it is in use, unless it does. The caller is the one that bars it.
    pub(crate) fn mark_in_use(&self) -> Result<()> {
        Ok(self.mark(&|| true)?)
    }

    #[cold]
    fn mark(&self, is_needed: &dyn Fn() -> bool) -> std::result::Result<(), PoolError> {
        let writing = self.writing();
        if self.barred.load(Ordering::Acquire) {
            return Err(PoolError::WriteAhead(put_off()));
        }
        if self.in_use.load(Ordering::Acquire) {
            return Ok(());
        }
        // No checkpoint comes between this look and the mark: it bars the file under the lock. One
        // that was before has called its pages clean before it lifted the bar.
        if !is_needed() {
            return Ok(());
        }
        if self.is_closed() {
            return Err(PoolError::WriteAhead(io::Error::other(CLOSED)));
        }
        let next = Header { clean: false, free_map: 0, ..self.header() };
        self.write(&writing, next, &[]).inspect_err(|error| {
            // Other threads may meet this before the one that writes pages meets the error.
            self.poison_for(&format!("{UNMARKED}: {error}"));
        })?;
        self.in_use.store(true, Ordering::Release);
        Ok(())
    }

    /// Bars the file. One checkpoint at a time does that.
    pub(crate) fn bar(&self) -> Bar<'_> {
        // Under the lock: a thread that is about to mark the file has done so, or finds it barred.
        let _writing = self.writing();
        self.barred.store(true, Ordering::Release);
        Bar(self)
    }

    /// Makes a clean header durable. It holds once all listed pages are as the list says.
    pub(crate) fn write_clean(
        &self,
        _bar: &Bar<'_>,
        header: Header,
        listed: &[Listed],
    ) -> Result<()> {
        let written = self.write(&self.writing(), Header { clean: true, ..header }, listed);
        Ok(written.inspect_err(|error| self.poison_for(&error.to_string()))?)
    }

    /// Makes a header durable, as the one that follows the last. If that fails the caller poisons
    /// the file.
    fn write(
        &self,
        _writing: &MutexGuard<'_, ()>,
        next: Header,
        listed: &[Listed],
    ) -> std::result::Result<(), PoolError> {
        let Some(device) = self.device.upgrade() else {
            return Err(PoolError::WriteAhead(io::Error::other(CLOSED)));
        };
        let sequence = self.header().sequence + 1;
        let next = Header { sequence, listed: listed.len() as u32, ..next };
        let page = next.page();
        // Until this one is durable either of the two may be the newest one after a crash. If it
        // never becomes so, be it for an error or for a panic of the device, the next page that is
        // to be written waits for a header that says "in use", in the place of this one.
        self.in_use.store(false, Ordering::Release);
        let written = next.write(&*device, listed);
        let written = written.map_err(|source| PoolError::Write { page, source });
        written.and_then(|()| device.sync().map_err(PoolError::Sync))?;
        self.update(|last| {
            *last = Header { version: last.version, next_tree: last.next_tree, ..next };
        });
        Ok(())
    }
}

/// What checkpoints know of those before them.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// The places of the free map. They stay its own while the file is in use, so that the next
    /// checkpoint needs no space of a full disk.
    pub places: Vec<PageRef>,
    /// The map there is that of this generation of the space.
    pub map_of: Option<u64>,
}

impl Checkpoints {
    /// Of a file whose free map lies there, and is that of the space.
    pub(crate) fn of_file(places: Vec<PageRef>, space: &Space) -> Checkpoints {
        let map_of = (!places.is_empty()).then(|| space.generation());
        Checkpoints { places, map_of }
    }

    /// The places of the free map.
    pub(crate) fn places(&self) -> &[PageRef] {
        &self.places
    }
}

const UNMARKED: &str = "the file could not be marked in use";

fn put_off() -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, "a checkpoint is about to write its header")
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};

    use super::*;

    fn clean_file() -> (Arc<MemoryDevice>, StoreFile) {
        let header = Header {
            version: 1,
            page_frames: 1,
            store_id: 1,
            sequence: 2,
            clean: true,
            catalog: 2,
            free_map: 0,
            file_pages: 3,
            next_tree: 2,
            listed: 0,
        };
        let device = Arc::new(MemoryDevice::new());
        let file = StoreFile::new(&(device.clone() as Arc<dyn Device>), header);
        (device, file)
    }

    /// A thread of the pool may come late: the file may be another process's by then.
    #[test]
    fn a_closed_file_is_not_marked() {
        let (device, file) = clean_file();
        file.close();
        assert!(file.before_pages(&|| true).is_err());
        assert_eq!(device.pages().unwrap(), 0);
        assert!(file.check_poison().is_ok());
    }

    #[test]
    fn a_mark_that_fails_is_named_to_all() {
        let (memory, file) = clean_file();
        let device = FaultyDevice::new(memory, 1).unwrap();
        device.plan().fail_always(Operation::Sync, Fault::Error(Errno::IO));
        let device: Arc<dyn Device> = Arc::new(device);
        let file = StoreFile::new(&device, file.header());
        let error = file.before_pages(&|| true).unwrap_err().to_string();
        let poison = file.check_poison().unwrap_err().to_string();
        assert!(error.contains(UNMARKED) && poison.contains(UNMARKED), "{error}; {poison}");
    }

    /// A thread of the pool has seen a dirty page, and comes to the mark after the checkpoint that
    /// wrote the page has ended.
    #[test]
    fn a_file_is_not_marked_for_pages_that_a_checkpoint_made_clean() {
        let (_device, file) = clean_file();
        let dirty = AtomicBool::new(true);
        let still_dirty = || dirty.load(Ordering::SeqCst);
        std::thread::scope(|scope| {
            let writing = file.writing();
            assert!(still_dirty());
            let late = scope.spawn(|| file.before_pages(&still_dirty));
            // It waits for the lock, or comes for it later.
            std::thread::sleep(std::time::Duration::from_millis(50));
            dirty.store(false, Ordering::SeqCst);
            drop(writing);
            late.join().unwrap().unwrap();
        });
        assert!(!file.is_in_use());
        assert!(file.header().clean);
        dirty.store(true, Ordering::SeqCst);
        file.before_pages(&still_dirty).unwrap();
        assert!(file.is_in_use());
    }
}
