//! The store's file as a whole: its newest header, and whether the pool may write pages to it.
//!
//! A clean header describes every page of the file. So before the pool writes the first page after
//! a clean header, the store makes a header durable that says "in use". The pool calls
//! [`StoreFile::before_pages`] before each write of pages for this. A change that stays in memory
//! leaves the file clean.
//!
//! From the cut of a checkpoint to its end the pool must write no page, because the checkpoint's
//! header describes the pages as of the cut. The checkpoint pauses writes
//! ([`StoreFile::pause_writes`]), and the pool keeps its dirty pages until the [`PausedWrites`] is
//! dropped.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use vellum_pool::device::Device;
use vellum_pool::{PageRef, PoolError, Space};

use crate::error::{CLOSED, Error, Result};
use crate::planted::{StoreBug, is_planted};
use crate::redo::log::RedoLog;
use crate::store::changes::ChangeTracker;
use crate::store::header::{Header, Listed};
use crate::sync::lock;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct StoreFile {
    /// Weak, because the pool's format refers to this file, and a thread of the device that has
    /// just completed a read still refers to the format. That thread must not drop the device,
    /// because dropping it unlocks the file. A thread that writes a header keeps the device alive
    /// by other means.
    device: Weak<dyn Device>,
    /// The newest header of the file. Only `version` and `next_tree` run ahead of the file: they
    /// are what the next header will say.
    header: Mutex<Header>,
    /// The version of the header in the other page, or a later one.
    older_version: AtomicU32,
    /// A thread holds this lock while it writes a header, and while it decides whether to write
    /// one.
    writing: Mutex<()>,
    /// The newest header durably says "in use": the pool may write pages.
    in_use: AtomicBool,
    paused: AtomicBool,
    /// The store is closed, and another process may have changed the file since.
    closed: AtomicBool,
    /// The first failure to write a header or the free map.
    poison: OnceLock<Arc<str>>,
    /// What was written to the file since a backup.
    pub changes: Arc<ChangeTracker>,
    /// The log, if the store has one. Then the file stays in use until the store is closed.
    log: OnceLock<Arc<RedoLog>>,
}

/// While this lives, the pool writes no page.
#[derive(Debug)]
pub(crate) struct PausedWrites<'a>(&'a StoreFile);

impl Drop for PausedWrites<'_> {
    fn drop(&mut self) {
        self.0.paused.store(false, Ordering::Release);
    }
}

impl StoreFile {
    /// The file has this header, durably, and in the other page one of the version `older`.
    /// `changes` notes what is written to the device.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        changes: Arc<ChangeTracker>,
        header: Header,
        older: u32,
    ) -> StoreFile {
        StoreFile {
            device: Arc::downgrade(device),
            in_use: AtomicBool::new(!header.clean),
            header: Mutex::new(header),
            older_version: AtomicU32::new(older),
            writing: Mutex::default(),
            paused: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            poison: OnceLock::new(),
            changes,
            log: OnceLock::new(),
        }
    }

    /// Makes a header durable that names the log of the store. From then on the pool may write
    /// pages as soon as their records are durable.
    pub(crate) fn begin_log(&self, log: &Arc<RedoLog>, header: Header) -> Result<()> {
        self.write_cut(header)?;
        self.set_log(log);
        Ok(())
    }

    /// The newest header, which is durable, names this log.
    pub(crate) fn set_log(&self, log: &Arc<RedoLog>) {
        let _ = self.log.set(log.clone());
    }

    pub(crate) fn log(&self) -> Option<&RedoLog> {
        self.log.get().map(|log| &**log)
    }

    fn lock(&self) -> MutexGuard<'_, Header> {
        lock(&self.header)
    }

    fn writing(&self) -> MutexGuard<'_, ()> {
        lock(&self.writing)
    }

    /// Whether the store is closed. Another process may have written what is read from the file
    /// afterwards.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// After this the store reads and writes nothing, except for writes that the pool has begun.
    pub(crate) fn close(&self) {
        // Under the lock: another thread has marked the file before this, or will find it closed.
        let _writing = self.writing();
        self.closed.store(true, Ordering::Release);
    }

    /// Whether the pool may have written a page since the last clean header.
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

    /// After a failed write of a header, or a failed sync, the contents of the file are unknown.
    /// After a panic in a change its pages may be inconsistent.
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

    /// The pool calls this before it writes pages, of which `lsn` is the greatest log sequence
    /// number. With a log, waits until the log is durable up to there.
    ///
    /// Without a log, marks the file in use. Fails with `WouldBlock` while writes are paused. A
    /// checkpoint may have written the pages in the meantime, so this marks the file only if one of
    /// them is `still_dirty`.
    pub(crate) fn before_pages(&self, lsn: u64, still_dirty: &dyn Fn() -> bool) -> io::Result<()> {
        if let Some(log) = self.log() {
            if is_planted(StoreBug::NoWriteRule) {
                return Ok(());
            }
            // A change that ended in its midst has poisoned the file before it let go of its pages.
            // No record describes them, and the file must not have them.
            self.check_poison().map_err(io::Error::other)?;
            if self.is_closed() {
                return Err(io::Error::other(CLOSED));
            }
            return log.wait_durable(lsn).map_err(io::Error::other);
        }
        if self.paused.load(Ordering::Acquire) {
            return Err(writes_are_paused());
        }
        if self.in_use.load(Ordering::Acquire) {
            return Ok(());
        }
        self.mark(still_dirty).map_err(|error| match error {
            PoolError::WriteAhead(said) => said,
            error => io::Error::other(format!("{UNMARKED}: {error}")),
        })
    }

    /// Marks the file in use, if it is not. Only the checkpoint that pauses writes calls this.
    pub(crate) fn mark_in_use(&self) -> Result<()> {
        Ok(self.mark(&|| true)?)
    }

    #[cold]
    fn mark(&self, is_needed: &dyn Fn() -> bool) -> std::result::Result<(), PoolError> {
        let writing = self.writing();
        if self.paused.load(Ordering::Acquire) {
            return Err(PoolError::WriteAhead(writes_are_paused()));
        }
        if self.in_use.load(Ordering::Acquire) {
            return Ok(());
        }
        // No checkpoint can pause writes between this check and the mark, because it would need the
        // lock. An earlier checkpoint has marked its pages clean before it resumed writes.
        if !is_needed() {
            return Ok(());
        }
        if self.is_closed() {
            return Err(PoolError::WriteAhead(io::Error::other(CLOSED)));
        }
        let last = self.header();
        let log = last.log.without_log();
        let next = Header { clean: false, free_map: 0, changes: false, log, ..last };
        self.write(&writing, next, &[]).inspect_err(|error| {
            // Other threads may meet the poison before the thread that writes pages returns the
            // error.
            self.poison_for(&format!("{UNMARKED}: {error}"));
        })?;
        self.in_use.store(true, Ordering::Release);
        Ok(())
    }

    /// Pauses the pool's writes. Only one checkpoint at a time does that.
    pub(crate) fn pause_writes(&self) -> PausedWrites<'_> {
        // Under the lock: another thread has marked the file before this, or will find writes
        // paused.
        let _writing = self.writing();
        self.paused.store(true, Ordering::Release);
        PausedWrites(self)
    }

    /// Makes a clean header durable. The header is valid once all listed pages match the list.
    pub(crate) fn write_clean(
        &self,
        _paused: &PausedWrites<'_>,
        header: Header,
        listed: &[Listed],
    ) -> Result<()> {
        let written = self.write(&self.writing(), Header { clean: true, ..header }, listed);
        Ok(written.inspect_err(|error| self.poison_for(&error.to_string()))?)
    }

    /// Whether the header in the other page has a later version than the newest one, which is clean
    /// and lists no pages. A program that does not know that version refuses the file.
    pub(crate) fn has_later_version(&self) -> bool {
        let newest = self.header();
        let older = self.older_version.load(Ordering::Relaxed);
        newest.clean && newest.listed == 0 && older > newest.encoded_version()
    }

    /// Has no header page say a later version than the newest one, if that is clean and lists no
    /// pages: makes it durable in the other page as well.
    ///
    /// The newest header is durable, and the file is as it says. So a crash leaves a clean file,
    /// whichever of the two headers it has.
    pub(crate) fn replace_later_version(&self, paused: &PausedWrites<'_>) -> Result<()> {
        match self.has_later_version() {
            true => self.write_clean(paused, self.header(), &[]),
            false => Ok(()),
        }
    }

    /// Makes a header durable for a store with a log.
    pub(crate) fn write_cut(&self, header: Header) -> Result<()> {
        self.check_poison()?;
        let written = self.write(&self.writing(), header, &[]);
        Ok(written.inspect_err(|error| self.poison_for(&error.to_string()))?)
    }

    /// Makes `next` durable as the header after the last one. If that fails, the caller poisons the
    /// file.
    fn write(
        &self,
        _writing: &MutexGuard<'_, ()>,
        next: Header,
        listed: &[Listed],
    ) -> std::result::Result<(), PoolError> {
        let Some(device) = self.device.upgrade() else {
            return Err(PoolError::WriteAhead(io::Error::other(CLOSED)));
        };
        let last = self.header();
        let sequence = last.sequence + 1;
        let next = Header { sequence, listed: listed.len() as u32, ..next };
        let page = next.page();
        // Until this header is durable, either of the two headers may be the newest one after a
        // crash. If an error, or a panic of the device, prevents that, the next write of a page
        // must first write a header that says "in use" in the place of this one.
        self.in_use.store(false, Ordering::Release);
        let written = next.write(&*device, listed);
        let written = written.map_err(|source| PoolError::Write { page, source });
        written.and_then(|()| device.sync().map_err(PoolError::Sync))?;
        self.older_version.store(last.encoded_version(), Ordering::Relaxed);
        self.update(|last| {
            *last = Header { version: last.version, next_tree: last.next_tree, ..next };
        });
        Ok(())
    }
}

/// The results of earlier checkpoints.
#[derive(Debug, Default)]
pub(crate) struct Checkpoints {
    /// The places of the free map. They stay reserved while the file is in use, so that the next
    /// checkpoint needs no space on a full disk.
    pub places: Vec<PageRef>,
    /// The generation of the space that the map in these places describes.
    pub map_of: Option<u64>,
}

impl Checkpoints {
    /// For a file that was just opened: its free map lies in `places` and describes `space`.
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

fn writes_are_paused() -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, "a checkpoint is about to write its header")
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};

    use super::*;
    use crate::store::header::LogPoint;

    fn clean_file() -> (Arc<MemoryDevice>, StoreFile) {
        let header = Header {
            version: 1,
            page_frames: 1,
            store_id: 1,
            sequence: 2,
            clean: true,
            catalog: 2,
            free_map: 0,
            changes: false,
            file_pages: 3,
            next_tree: 2,
            listed: 0,
            log: LogPoint::default(),
        };
        let device = Arc::new(MemoryDevice::new());
        let file = StoreFile::new(&(device.clone() as Arc<dyn Device>), Arc::default(), header, 1);
        (device, file)
    }

    /// A thread of the pool may call `before_pages` late, when another process may have opened the
    /// file.
    #[test]
    fn a_closed_file_is_not_marked() {
        let (device, file) = clean_file();
        file.close();
        assert!(file.before_pages(0, &|| true).is_err());
        assert_eq!(device.pages().unwrap(), 0);
        assert!(file.check_poison().is_ok());
    }

    #[test]
    fn a_failed_mark_is_reported_to_the_writer_and_as_poison() {
        let (memory, file) = clean_file();
        let device = FaultyDevice::new(memory, 1).unwrap();
        device.plan().fail_always(Operation::Sync, Fault::Error(Errno::IO));
        let device: Arc<dyn Device> = Arc::new(device);
        let file = StoreFile::new(&device, Arc::default(), file.header(), 1);
        let error = file.before_pages(0, &|| true).unwrap_err().to_string();
        let poison = file.check_poison().unwrap_err().to_string();
        assert!(error.contains(UNMARKED) && poison.contains(UNMARKED), "{error}; {poison}");
    }

    /// A thread of the pool has seen a dirty page. It calls `before_pages` after the checkpoint
    /// that wrote the page has ended.
    #[test]
    fn a_file_is_not_marked_for_pages_that_a_checkpoint_made_clean() {
        let (_device, file) = clean_file();
        let dirty = AtomicBool::new(true);
        let still_dirty = || dirty.load(Ordering::SeqCst);
        std::thread::scope(|scope| {
            let writing = file.writing();
            assert!(still_dirty());
            let late = scope.spawn(|| file.before_pages(0, &still_dirty));
            // The thread waits for the lock, or takes it later.
            std::thread::sleep(std::time::Duration::from_millis(50));
            dirty.store(false, Ordering::SeqCst);
            drop(writing);
            late.join().unwrap().unwrap();
        });
        assert!(!file.is_in_use());
        assert!(file.header().clean);
        dirty.store(true, Ordering::SeqCst);
        file.before_pages(0, &still_dirty).unwrap();
        assert!(file.is_in_use());
    }
}
