//! The pages of a store, and the right to change them. Trees see nothing else of the store.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;
use vellum_log::{BLOCK_BYTES, LogError, OpeningProcess};
use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageId, PageRef, Pool};

use crate::error::{Error, Result};
use crate::node::NodeLimits;
use crate::page::blob::{BLOB_REST, BlobRef};
use crate::redo::log::{RedoLog, RoomPromise};
use crate::redo::record::{RecordWriter, RemovedValue};
use crate::store::callback::{CallbackScope, refuse_in_callback};
use crate::store::file::StoreFile;
use crate::store::gate::{ChangePermit, Exclusive, Freeze, Gate};
use crate::store::header::Header;
use crate::store::options::min_pool_frames;
use crate::store::unlinked::UnlinkedPages;
use crate::sync::lock;
use crate::versions::{Conflicting, Replaced, Time, Validation, Versions, VersionsFull};

/// A pool of fewer tree pages is too small for two structure changes at a time.
const SMALL_POOL_PAGES: u64 = 64;

/// Old values may take so many bytes, and an eighth of a larger pool.
const VERSIONS_MIN: u64 = 16 << 20;

/// What old values may take in a pool of so many frames, in bytes.
fn versions_max(pool_frames: u64) -> u64 {
    (pool_frames * PAGE_SIZE as u64 / 8).max(VERSIONS_MIN)
}

/// The most ranges in a record, of their own or of a group.
pub(crate) const RANGES_MAX: usize = 1000;

/// Ranges (start, count) of pages, as records have them.
pub(crate) fn record_ranges(ranges: impl Iterator<Item = (u64, u64)>) -> Vec<PageRef> {
    let mut pages = Vec::new();
    for (mut first, mut count) in ranges {
        while count > 0 {
            let frames = count.min(1 << 31);
            pages.push(PageRef::new(first, frames as u32));
            (first, count) = (first + frames, count - frames);
        }
    }
    pages
}

/// The first frame after a range.
fn end_of(range: PageRef) -> u64 {
    range.id.0.saturating_add(range.frames.into())
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct PageStore {
    pub pool: Pool,
    pub device: Arc<dyn Device>,
    /// Length of tree pages in units of 4 KiB. The length of every page but the headers is a
    /// multiple of it.
    pub page_frames: u32,
    pub limits: NodeLimits,
    pub gate: Gate,
    /// Pages that are allocated although no tree refers to them.
    pub unlinked: UnlinkedPages,
    /// The old values of entries that have changed, for views.
    pub versions: Versions,
    /// Shared with the pool's format.
    pub file: Arc<StoreFile>,
    /// The log, if the store has one.
    pub redo_log: Option<Arc<RedoLog>>,
    /// Whether the store has changed since the last cut.
    pub changed: AtomicBool,
    /// The process that opened the store.
    process: OpeningProcess,
    /// See [`structure_lock`](Self::structure_lock).
    structure_changes: Mutex<()>,
    /// Held while the pool changes its size, and the bounds that follow it.
    resizing: Mutex<()>,
    /// The number of bulk loads that have ended.
    loads: AtomicU64,
}

/// The right to change pages of a store.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    _permit: Option<ChangePermit<'a>>,
    /// Room in the log, if the store has one.
    room: Option<RoomPromise<'a>>,
    /// Bytes that the change has appended since it got room.
    appended: Cell<u64>,
    wanted: Cell<u64>,
    pages: &'a PageStore,
    /// A destructor began the change during a panic, and that panic does not unwind the change.
    began_in_panic: bool,
    in_callback: Cell<bool>,
}

impl Change<'_> {
    /// Whether the change has room in the log for one more group. A change of one entry always has.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.room.as_ref().is_none_or(|room| room.is_enough_after(self.appended.get()))
    }

    /// Has room in the log for one more group, before the thread takes a lock.
    ///
    /// # Errors
    /// If the log has no room.
    #[inline]
    pub(crate) fn next_group(&self) -> Result<()> {
        if let (Some(room), false) = (&self.room, self.has_room()) {
            room.renew()?;
            self.appended.set(0);
        }
        Ok(())
    }

    /// Has room in the log for a record of this length.
    ///
    /// # Errors
    /// If the log has no room. A change that [begins](PageStore::change_for) with this length may
    /// get it, because a checkpoint can come first.
    pub(crate) fn room_for(&self, record: u64) -> Result<()> {
        self.wanted.set(record);
        Ok(self.room.as_ref().map_or(Ok(()), |room| room.grow(self.appended.get(), record))?)
    }

    /// The length of the longest record for which the change has asked for room.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted.get()
    }

    /// A group of the change has appended a record of this length.
    pub(crate) fn note_record(&self, len: usize) {
        // A flush may leave the rest of a block empty.
        self.appended.update(|before| before + (len + BLOCK_BYTES) as u64);
    }

    /// Runs a callback. The callback sees copies, or a page that nothing refers to yet and that is
    /// freed if the callback panics. So its panic leaves no change half done.
    pub(crate) fn run_callback<T>(&self, run: impl FnOnce() -> T) -> T {
        self.in_callback.set(true);
        let within = CallbackScope::of(&self.pages.gate);
        let result = run();
        drop(within);
        self.in_callback.set(false);
        result
    }
}

impl Drop for Change<'_> {
    /// A change that was ended by a panic may have changed only one of two pages that belong
    /// together.
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() && !self.began_in_panic && !self.in_callback.get() {
            self.pages.file.poison_for("a panic interrupted a change");
        }
    }
}

/// Exclusive use of the store, and room in the log for a change.
#[derive(Debug)]
pub(crate) struct ExclusiveUse<'a> {
    _gate: Exclusive<'a>,
    room: RefCell<Option<RoomPromise<'a>>>,
}

/// Pins a value that is being read. Its pages stay allocated even if its key is removed.
#[derive(Debug)]
pub(crate) struct ValuePin<'a> {
    pages: &'a PageStore,
    first: PageId,
}

impl Drop for ValuePin<'_> {
    fn drop(&mut self) {
        if self.pages.unlinked.unpin(self.first) {
            self.pages.try_reclaim_unlinked();
        }
    }
}

impl PageStore {
    pub(crate) fn new(
        pool: Pool,
        device: Arc<dyn Device>,
        file: Arc<StoreFile>,
        salvage: bool,
    ) -> PageStore {
        let header = file.header();
        let page_frames = header.page_frames;
        PageStore {
            page_frames,
            limits: NodeLimits::for_page_size(page_frames as usize * PAGE_SIZE),
            gate: Gate::default(),
            unlinked: UnlinkedPages::default(),
            versions: Versions::new(versions_max(pool.capacity())),
            redo_log: None,
            changed: AtomicBool::new(!header.clean && !salvage),
            process: OpeningProcess::new(),
            file,
            pool,
            device,
            structure_changes: Mutex::default(),
            resizing: Mutex::default(),
            loads: AtomicU64::new(0),
        }
    }

    /// The number of frames of the page for a value of `len` bytes: a multiple of the tree page
    /// size.
    pub(crate) fn blob_frames(&self, len: u64) -> u32 {
        let frames = (len + BLOB_REST as u64).div_ceil(PAGE_SIZE as u64);
        frames.next_multiple_of(u64::from(self.page_frames)) as u32
    }

    /// Greatest length of a value in bytes.
    pub(crate) fn max_blob(&self) -> u64 {
        // A multiple of the tree page size, as every page of the file.
        let page_frames = u64::from(self.page_frames);
        let frames = (self.pool.capacity() / 4).min(u64::from(PageRef::MAX_FRAMES));
        frames / page_frames * page_frames * PAGE_SIZE as u64 - BLOB_REST as u64
    }

    /// In a small pool, structure changes take turns. Together they might hold all of its pages.
    pub(crate) fn structure_lock(&self) -> Option<MutexGuard<'_, ()>> {
        let small = min_pool_frames(self.page_frames) / 8 * SMALL_POOL_PAGES;
        (self.pool.capacity() < small).then(|| lock(&self.structure_changes))
    }

    /// Gives the pool another size, in bytes.
    pub(crate) fn resize_pool(&self, bytes: u64) -> Result<()> {
        self.check_process()?;
        self.check_open()?;
        refuse_in_callback(&self.gate)?;
        let min = min_pool_frames(self.page_frames) * PAGE_SIZE as u64;
        if bytes < min {
            return Err(Error::PoolTooSmall { bytes, min });
        }
        let _resizing = lock(&self.resizing);
        self.pool.resize(bytes)?;
        self.versions.set_bytes_max(versions_max(self.pool.capacity()));
        Ok(())
    }

    pub(crate) fn header(&self) -> Header {
        self.file.header()
    }

    /// Pins the value that begins with this page. The caller has locked the leaf that refers to it.
    pub(crate) fn pin(&self, first: PageId) -> ValuePin<'_> {
        self.unlinked.pin(first);
        ValuePin { pages: self, first }
    }

    /// The number of bulk loads whose records are in the log.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Ordering::SeqCst)
    }

    /// The record of a bulk load is in the log.
    pub(crate) fn note_load(&self, _change: &Change<'_>) {
        self.loads.fetch_add(1, Ordering::SeqCst);
    }

    /// The next header will say that a reader of the store needs this version of the format.
    pub(crate) fn require_version(&self, _change: &Change<'_>, version: u32) {
        self.file.update(|header| header.version = header.version.max(version));
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        match self.file.is_closed() {
            false => Ok(()),
            true => Err(Error::Closed),
        }
    }

    /// The size of the pool in bytes.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.pool.capacity() * PAGE_SIZE as u64
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.check_open()?;
        self.pool.check_writable()?;
        self.file.check_poison()
    }

    /// Begins a change. Waits while the gate is frozen.
    #[inline]
    pub(crate) fn change(&self) -> Result<Change<'_>> {
        self.change_for(0)
    }

    /// As [`change`](Self::change), with room in the log for a record of this length.
    #[inline]
    pub(crate) fn change_for(&self, record: u64) -> Result<Change<'_>> {
        if self.versions.are_kept() {
            self.check_versions(0)?;
        }
        self.change_to_free(record)
    }

    /// As [`change_for`](Self::change_for), for a change that frees pages to which nothing refers:
    /// it keeps no old values.
    pub(crate) fn change_to_free(&self, record: u64) -> Result<Change<'_>> {
        refuse_in_callback(&self.gate)?;
        let room = match &self.redo_log {
            None => None,
            Some(log) => Some(self.room_unless_closed(log, record)?),
        };
        let permit = self.gate.begin_change();
        // After the gate: the store may have been closed while this thread waited.
        self.check_writable()?;
        Ok(self.begin(Some(permit), room))
    }

    /// As [`room_for_change`](Self::room_for_change). A close that comes meanwhile ends the log.
    fn room_unless_closed<'a>(&self, log: &'a RedoLog, record: u64) -> Result<RoomPromise<'a>> {
        let room = self.room_for_change(log, record);
        room.map_err(|error| self.check_open().err().unwrap_or(error))
    }

    /// Keeps room in the log for a change. If a checkpoint is due, has it written, or writes it.
    fn room_for_change<'a>(&self, log: &'a RedoLog, record: u64) -> Result<RoomPromise<'a>> {
        if log.is_cut_due() && !log.cut_signal.ask() {
            self.cut_log(log)?;
        }
        match log.promise_room(record) {
            Err(LogError::Full { .. }) => self.wait_for_room(log, record),
            promised => Ok(promised?),
        }
    }

    /// Refuses a change if old values take more memory than they may, or would with `more` bytes.
    #[cold]
    pub(crate) fn check_versions(&self, more: u64) -> Result<()> {
        if self.versions.check_room(more).is_ok() {
            return Ok(());
        }
        let mut unpinned = Vec::new();
        self.versions.drop_unseen(&mut unpinned);
        self.unpin(&unpinned);
        self.versions.check_room(more).map_err(|VersionsFull| {
            let (views, oldest) = self.versions.views();
            Error::VersionsFull {
                bytes: self.versions.bytes(),
                views,
                oldest: oldest.unwrap_or_default(),
            }
        })
    }

    /// Keeps the old values of entries for the views that see them. The caller has begun a change,
    /// and holds the locks of the leaves.
    pub(crate) fn keep_versions(&self, replaced: &[Replaced<'_>]) {
        let mut unpinned = Vec::new();
        let pin = |blob: BlobRef| self.unlinked.pin(blob.page.id);
        self.versions.keep(replaced, pin, &mut unpinned);
        self.unpin(&unpinned);
    }

    /// As [`keep_versions`](Self::keep_versions), for a transaction. Ends its view.
    ///
    /// # Errors
    /// [`Conflicting`] if what the transaction has read has changed. Then nothing is kept.
    ///
    /// The caller calls [`reclaim_versions`](Self::reclaim_versions) when it has released the
    /// leaves: other threads want them.
    pub(crate) fn keep_versions_unless_conflicting(
        &self,
        validation: Validation<'_>,
        replaced: &[Replaced<'_>],
    ) -> std::result::Result<(), Conflicting> {
        let mut unpinned = Vec::new();
        let pin = |blob: BlobRef| self.unlinked.pin(blob.page.id);
        let kept = self.versions.keep_unless_conflicting(validation, replaced, pin, &mut unpinned);
        self.unpin(&unpinned);
        kept
    }

    /// Drops some of the old values that no view needs any more, after a change of so many entries.
    pub(crate) fn reclaim_versions(&self, changed: usize) {
        let mut unpinned = Vec::new();
        self.versions.reclaim_some(changed, &mut unpinned);
        self.unpin(&unpinned);
    }

    /// No version has these values any more. Returns whether pages can be freed.
    pub(crate) fn unpin(&self, blobs: &[BlobRef]) -> bool {
        blobs.iter().filter(|blob| self.unlinked.unpin(blob.page.id)).count() > 0
    }

    /// Begins a view of the store as it is now. The caller ends it.
    pub(crate) fn begin_view(&self) -> Result<Time> {
        self.check_process()?;
        self.check_open()?;
        refuse_in_callback(&self.gate)?;
        match self.versions.try_begin_view() {
            Some(time) => Ok(time),
            None => Ok(self.versions.begin_view(&self.freeze()?)),
        }
    }

    /// Ends a view, unless it has ended in a commit.
    pub(crate) fn end_view(&self, time: Time, has_ended: bool) {
        let mut unpinned = Vec::new();
        self.versions.end_view(time, has_ended, &mut unpinned);
        if self.unpin(&unpinned) {
            self.try_reclaim_unlinked();
        }
    }

    /// The memory, in bytes, that old values take which a view needs.
    pub(crate) fn version_bytes(&self) -> u64 {
        let mut unpinned = Vec::new();
        self.versions.reclaim(&mut unpinned);
        self.unpin(&unpinned);
        self.versions.bytes()
    }

    /// Begins a change with exclusive use of the store.
    pub(crate) fn change_exclusively<'a>(
        &'a self,
        exclusive: &'a ExclusiveUse<'_>,
    ) -> Result<Change<'a>> {
        self.check_writable()?;
        Ok(self.begin(None, exclusive.room.take()))
    }

    /// Begins a change while the caller has frozen the gate.
    pub(crate) fn change_frozen<'a>(&'a self, _freeze: &'a Freeze<'_>) -> Result<Change<'a>> {
        self.check_writable()?;
        Ok(self.begin(None, None))
    }

    #[inline]
    fn begin<'a>(
        &'a self,
        permit: Option<ChangePermit<'a>>,
        room: Option<RoomPromise<'a>>,
    ) -> Change<'a> {
        // A cut clears the flag while no change is under way.
        if !self.changed.load(Ordering::Relaxed) {
            self.changed.store(true, Ordering::Relaxed);
        }
        Change {
            _permit: permit,
            room,
            appended: Cell::new(0),
            wanted: Cell::new(0),
            pages: self,
            began_in_panic: std::thread::panicking(),
            in_callback: Cell::new(false),
        }
    }

    /// Writes the pages of a value or of a bulk load, which are not in the log, so that a record
    /// may refer to them. Does nothing without a log.
    pub(crate) fn write_unlogged(&self, pages: impl Iterator<Item = PageRef>) -> Result<()> {
        if let Some(log) = &self.redo_log {
            let pages: Vec<PageId> = pages.map(|page| page.id).collect();
            self.pool.write_pages(&pages)?;
            // An evictor may be writing some of them, too. If that failed after a sync of the file,
            // it could spoil what a durable record refers to.
            self.pool.wait_for_writes();
            self.pool.check_writable()?;
            log.sync_file_first();
        }
        Ok(())
    }

    /// Logs that ranges of pages are in use, in the room of a change and apart from its groups.
    /// Returns the ranges that the next group of the change says are in use: all, unless they are
    /// more than a record has. A crash after the records of the others, and before that of the
    /// group, loses the others' pages. Does nothing without a log.
    ///
    /// # Errors
    /// If the log has no room for all of them, or has failed; if the store refuses changes.
    pub(crate) fn log_most_taken<'r>(
        &self,
        change: &Change<'_>,
        ranges: &'r [PageRef],
    ) -> Result<&'r [PageRef]> {
        let (before, with) = ranges.split_at(ranges.len().saturating_sub(RANGES_MAX));
        let Some(log) = &self.redo_log else { return Ok(with) };
        let mut record = Vec::new();
        for some in before.chunks(RANGES_MAX) {
            change.next_group()?;
            self.file.check_poison()?;
            RecordWriter::new(&mut record, some, &[]);
            log.append(&record)?;
            change.note_record(record.len());
        }
        change.next_group()?;
        Ok(with)
    }

    /// Checks the ranges that the record of a group names, before the log takes it: a recovery
    /// refuses a log that frees pages outside of the file, and loses what a record frees and uses.
    /// Each range is allocated, and so are the roots of removed values. No part of a range is taken
    /// twice, freed twice, or freed and taken or changed by the same group.
    ///
    /// # Errors
    /// [`Error::Damaged`] if a range that the group frees is otherwise: the tree refers to it.
    ///
    /// # Panics
    /// If a range that the group takes is not allocated, or is taken twice.
    pub(crate) fn check_ranges(
        &self,
        taken: &[PageRef],
        freed: &[PageRef],
        values: &[RemovedValue],
        changed: impl Iterator<Item = PageRef>,
    ) -> Result<()> {
        if taken.is_empty() && freed.is_empty() && values.is_empty() {
            return Ok(());
        }
        let damaged = |page: PageRef, what: &str| {
            Err(Error::damaged(page, format!("a change frees it, and {what}")))
        };
        let unused = self.pool.with_space(|space| {
            let is_unused = |page: &PageRef| {
                let (start, count) = (page.id.0, u64::from(page.frames));
                count == 0
                    || start < space.first()
                    || end_of(*page) > space.end()
                    || space.has_free(start, count)
            };
            let new = taken.iter().copied().find(is_unused);
            assert!(new.is_none(), "a group takes {new:?}, which is not allocated");
            let roots = values.iter().map(|(_, value)| value.page);
            freed.iter().copied().chain(roots).find(is_unused)
        });
        if let Some(page) = unused {
            return damaged(page, "it is not in use");
        }
        let sorted = |pages: &[PageRef]| {
            let mut pages: SmallVec<[PageRef; 4]> = pages.into();
            pages.sort_unstable_by_key(|page| page.id);
            pages
        };
        let meet = |pages: &[PageRef]| {
            let meet = pages.windows(2).find(|two| end_of(two[0]) > two[1].id.0);
            meet.map(|two| two[1])
        };
        let (freed, taken_twice) = (sorted(freed), meet(&sorted(taken)));
        assert!(taken_twice.is_none(), "a group takes {taken_twice:?} twice");
        if let Some(page) = meet(&freed) {
            return damaged(page, "frees it twice");
        }
        for used in taken.iter().copied().chain(changed) {
            let next = freed.partition_point(|page| end_of(*page) <= used.id.0);
            if let Some(page) = freed.get(next).filter(|page| page.id.0 < end_of(used)) {
                return damaged(*page, "uses it");
            }
        }
        Ok(())
    }

    /// Logs that ranges of pages are free, apart from a group. Does nothing without a log.
    ///
    /// # Errors
    /// If the log has no room besides what changes were promised, or has failed; if the store
    /// refuses changes.
    pub(crate) fn log_freed(&self, ranges: &[PageRef]) -> Result<()> {
        let Some(log) = &self.redo_log else { return Ok(()) };
        let mut record = Vec::new();
        for some in ranges.chunks(RANGES_MAX) {
            self.file.check_poison()?;
            RecordWriter::new(&mut record, &[], some);
            log.append_unpromised(&record)?;
        }
        Ok(())
    }

    /// Freezes the gate: no change is under way while the result lives.
    pub(crate) fn freeze(&self) -> Result<Freeze<'_>> {
        refuse_in_callback(&self.gate)?;
        Ok(self.gate.freeze())
    }

    /// As [`freeze`](Self::freeze), for a checkpoint: a change that ended just now may have left
    /// pages that must not be saved.
    ///
    /// # Errors
    /// If the store refuses changes.
    pub(crate) fn freeze_to_save(&self) -> Result<Freeze<'_>> {
        let freeze = self.freeze()?;
        self.check_writable()?;
        Ok(freeze)
    }

    /// Takes the gate exclusively: while the result lives there are no changes, snapshots or cuts.
    pub(crate) fn exclusive(&self) -> Result<ExclusiveUse<'_>> {
        refuse_in_callback(&self.gate)?;
        // With the gate taken, no checkpoint could make room. A background checkpoint that is due
        // may not have begun.
        let room = match &self.redo_log {
            None => None,
            Some(log) => {
                if log.is_half_due() {
                    self.cut_log_if(log, RedoLog::is_half_due)?;
                }
                Some(self.room_unless_closed(log, 0)?)
            }
        };
        Ok(ExclusiveUse { _gate: self.gate.exclusive(), room: RefCell::new(room) })
    }

    /// The child of a `fork` has neither the memory of the pool nor its threads.
    pub(crate) fn check_process(&self) -> Result<()> {
        match self.process.is_here() {
            true => Ok(()),
            false => Err(Error::InUse(format!(
                "process {} opened the store: after a fork, only that process can use it",
                self.process.id()
            ))),
        }
    }

    /// Whether there are changes that no checkpoint has saved.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed.load(Ordering::Acquire) || self.file.is_in_use() || self.redo_log.is_some()
    }
}
