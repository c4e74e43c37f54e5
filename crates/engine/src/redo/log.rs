//! The log of a store.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

use vellum_log::{BLOCK_BYTES, Block, Log, LogDevice, LogError, Lsn, Written};
use vellum_pool::device::Device;
use vellum_pool::{PAGE_SIZE, PageId, PageRef};

use super::backup_records::CopiedRecords;
use super::files::LogFiles;
use super::pending::PendingPages;
use super::repair::ChangedSince;
use crate::error::{Error, Result as StoreResult};
use crate::page;
use crate::planted::{StoreBug, is_planted};
use crate::store::cut_signal::CutSignal;
use crate::store::gate::Freeze;
use crate::store::header::LogPoint;
use crate::sync::lock;

/// The most bytes of a record of ranges (`PageStore::log_freed`), and of those of a group that
/// drops leaves.
const RANGES_BYTES: u64 = 16 << 10;

/// A change has room for so many of the longest groups.
const GROUPS_PROMISED: u64 = 4;

/// The first log sequence number of a store: 0 is for pages without a record.
const FIRST_LSN: u64 = 4096;

/// The log of a store, with the place of its newest cut.
///
/// Numbers here are the store's: they grow on from one log of the store to its next.
#[derive(Debug)]
pub(crate) struct RedoLog {
    log: Log,
    identity: u64,
    /// The store's number at the number 0 of `log`, modulo 2^64.
    begin: u64,
    /// The records of this log begin here. Earlier ones are durable, and their pages are.
    first: u64,
    /// The records that recovery needs begin here. It moves while no change is under way.
    cut: AtomicU64,
    /// The newest cut whose checkpoint succeeded: the log may reuse the room of earlier records.
    trimmed: AtomicU64,
    /// The pages that recovery has left to be redone. Until there are none, the log is not trimmed.
    pub pending: PendingPages,
    repairs: Mutex<Repairs>,
    /// The number of the newest record, or one before `first`.
    newest: AtomicU64,
    /// A checkpoint is due when so many bytes follow the cut.
    bytes_per_cut: u64,
    /// See [`LogSetup`].
    pub pauses: u32,
    /// The room that is kept for each change.
    bytes_per_change: u64,
    /// The length of a tree's page.
    page_frames: u32,
    /// The bytes that the changes under way may append.
    promised: AtomicU64,
    values: Arc<ValuesFirst>,
    /// `None` if the caller has given the device of the log.
    files: Option<LogFiles>,
    maps: Mutex<MapPlaces>,
    /// How many threads wait for `maps`.
    waiting: AtomicU64,
    /// How many paced checkpoints have begun to write pages.
    paced: AtomicU64,
    /// The copy of the records for a backup that is under way, which a trim completes.
    copied: Mutex<Option<Arc<CopiedRecords>>>,
    /// Places that were freed after this record, or a later one, are not used again: a backup reads
    /// them. `u64::MAX` without a backup.
    places_held: AtomicU64,
    /// Asks for checkpoints.
    pub cut_signal: CutSignal,
}

/// The room that is kept for each change.
pub(crate) fn bytes_per_change(page_bytes: u64) -> u64 {
    // Three images, and ranges; the length of the record, and the rest of a block. The same of a
    // record of ranges.
    let group = 4 * page_bytes + 2 * BLOCK_BYTES as u64 + RANGES_BYTES;
    GROUPS_PROMISED * group
}

/// Room for the next groups of a change, which is kept until this is dropped.
#[derive(Debug)]
pub(crate) struct RoomPromise<'a> {
    log: &'a RedoLog,
    bytes: Cell<u64>,
}

impl RoomPromise<'_> {
    /// Whether a change that has appended so many bytes has room for another group.
    #[inline]
    pub(crate) fn is_enough_after(&self, appended: u64) -> bool {
        appended <= self.log.bytes_per_change / GROUPS_PROMISED * (GROUPS_PROMISED - 1)
    }

    /// Has room kept for a long record of a change that has appended so many bytes.
    ///
    /// # Errors
    /// If the log has no room.
    pub(crate) fn grow(&self, appended: u64, record: u64) -> Result<(), LogError> {
        if appended + record <= self.bytes.get() {
            return Ok(());
        }
        self.log.promised.fetch_add(record, Ordering::AcqRel);
        self.bytes.update(|bytes| bytes + record);
        self.renew()
    }

    /// Has as much room kept again.
    ///
    /// # Errors
    /// If the log has no room.
    pub(crate) fn renew(&self) -> Result<(), LogError> {
        // A record takes from the room that its change was promised. So what all changes were
        // promised fits after what they have appended.
        self.log.log.make_room(self.log.promised.load(Ordering::Acquire))
    }
}

impl Drop for RoomPromise<'_> {
    fn drop(&mut self) {
        self.log.promised.fetch_sub(self.bytes.get(), Ordering::AcqRel);
    }
}

/// A log that is open, and has no store yet.
#[derive(Debug)]
pub(crate) struct OpenLog {
    pub log: Log,
    pub values: Arc<ValuesFirst>,
    pub files: Option<LogFiles>,
}

impl OpenLog {
    /// The store needs no log.
    pub(crate) fn remove(self) {
        self.log.stop();
        self.files.iter().for_each(LogFiles::remove);
    }
}

/// The places of free maps. A checkpoint writes one while the newest header needs the other.
#[derive(Debug, Default)]
pub(crate) struct MapPlaces {
    /// Those of the newest header's map.
    pub newest: Vec<PageRef>,
    /// Those that the next checkpoint writes to. They are free in the map of the newest header.
    pub next: Vec<PageRef>,
}

/// The repairs of pages from the log.
#[derive(Debug, Default)]
struct Repairs {
    /// What they know of the records.
    changed: Option<ChangedSince>,
    /// The pages that were repaired since a checkpoint has begun to write pages, if it still does.
    noted: Option<Vec<PageId>>,
}

/// What a log has to know of its store.
#[derive(Debug)]
pub(crate) struct LogSetup {
    /// A checkpoint is due when the log has so many bytes.
    pub bytes_per_cut: u64,
    /// How often a paced checkpoint waits for changes before it writes its next pages.
    pub pauses: u32,
    /// The length of a tree's page.
    pub page_frames: u32,
    pub maps: MapPlaces,
}

impl RedoLog {
    /// A log without records that recovery needs. Its next record follows all that the header
    /// describes.
    pub(crate) fn new(open: OpenLog, header: LogPoint, setup: LogSetup) -> RedoLog {
        let first = header.lsn.max(FIRST_LSN);
        let begin = first.wrapping_sub(open.log.end().0);
        RedoLog::with_cut(open, begin, first, PendingPages::none(), setup)
    }

    /// The log that the header of a store in use names, with the records from its cut on. These
    /// pages are pending.
    pub(crate) fn resume(
        open: OpenLog,
        header: LogPoint,
        pending: PendingPages,
        setup: LogSetup,
    ) -> RedoLog {
        RedoLog::with_cut(open, header.begin, header.lsn, pending, setup)
    }

    fn with_cut(
        OpenLog { log, values, files }: OpenLog,
        begin: u64,
        cut: u64,
        pending: PendingPages,
        LogSetup { bytes_per_cut, pauses, page_frames, maps }: LogSetup,
    ) -> RedoLog {
        let first = log.end().0.wrapping_add(begin);
        RedoLog {
            begin,
            identity: values.identity(),
            values,
            files,
            first,
            cut: AtomicU64::new(cut),
            trimmed: AtomicU64::new(cut),
            pending,
            repairs: Mutex::default(),
            newest: AtomicU64::new(first - 1),
            bytes_per_cut,
            pauses,
            bytes_per_change: bytes_per_change(u64::from(page_frames) * PAGE_SIZE as u64),
            page_frames,
            promised: AtomicU64::new(0),
            maps: Mutex::new(maps),
            waiting: AtomicU64::new(0),
            paced: AtomicU64::new(0),
            copied: Mutex::default(),
            places_held: AtomicU64::new(u64::MAX),
            cut_signal: CutSignal::default(),
            log,
        }
    }

    /// What a header in use says of the log: recovery needs the records from `cut` on.
    pub(crate) fn point(&self, cut: u64) -> LogPoint {
        LogPoint { identity: self.identity, begin: self.begin, lsn: cut }
    }

    /// Whether the record of a group must have the image of this page, because no record after the
    /// newest cut has it. The caller has begun a change, and holds the page as it was before the
    /// group.
    pub(crate) fn needs_image(&self, page: &[u8]) -> bool {
        !self.has_image(page) && !is_planted(StoreBug::NoImage)
    }

    /// Whether a record after the newest cut has the image of this page, which the caller holds: a
    /// node that has changed since the cut.
    pub(crate) fn has_image(&self, page: &[u8]) -> bool {
        let lsn = page::lsn(page);
        // No record has a later number. If the page has one, its file is put together from parts of
        // different times.
        let is_of_log = lsn <= self.newest.load(Ordering::Relaxed);
        lsn >= self.cut.load(Ordering::Relaxed) && is_of_log
    }

    /// Has room kept for the next groups of a change, and for one record of this length.
    ///
    /// # Errors
    /// If the log has no room.
    pub(crate) fn promise_room(&self, record: u64) -> Result<RoomPromise<'_>, LogError> {
        self.promise_bytes(self.bytes_per_change + record)
    }

    fn promise_bytes(&self, bytes: u64) -> Result<RoomPromise<'_>, LogError> {
        self.promised.fetch_add(bytes, Ordering::AcqRel);
        let promise = RoomPromise { log: self, bytes: Cell::new(bytes) };
        promise.renew()?;
        Ok(promise)
    }

    /// Appends a record for which no change has room.
    ///
    /// # Errors
    /// If the log has no room besides what changes were promised, or has failed.
    pub(crate) fn append_unpromised(&self, record: &[u8]) -> Result<u64, LogError> {
        // A flush may leave the rest of a block empty.
        let _room = self.promise_bytes((record.len() + BLOCK_BYTES) as u64)?;
        self.append(record)
    }

    /// Whether so many bytes are for more than one change.
    pub(crate) fn is_shared(&self, bytes: u64, record: u64) -> bool {
        bytes > self.bytes_per_change + record
    }

    /// Appends a record and returns its number.
    ///
    /// # Errors
    /// If the log has no room, or has failed.
    pub(crate) fn append(&self, record: &[u8]) -> Result<u64, LogError> {
        let lsn = self.log.append(record)?.0.wrapping_add(self.begin);
        self.newest.fetch_max(lsn, Ordering::AcqRel);
        Ok(lsn)
    }

    /// The caller has written pages that are not in the log, and is about to append a record that
    /// refers to them.
    pub(crate) fn sync_file_first(&self) {
        *lock(&self.values.unsynced) = true;
    }

    /// The number of the newest record, 0 if this log has none.
    pub(crate) fn newest(&self) -> u64 {
        let newest = self.newest.load(Ordering::Acquire);
        if newest < self.first { 0 } else { newest }
    }

    /// Waits until the record of this number, and all before it, are durable.
    ///
    /// # Errors
    /// If it is unknown whether they are.
    pub(crate) fn wait_durable(&self, lsn: u64) -> Result<(), LogError> {
        match lsn < self.first {
            true => Ok(()),
            false => self.log.wait_durable(Lsn(lsn.wrapping_sub(self.begin))),
        }
    }

    /// Asks the log to make the record of this number durable soon.
    pub(crate) fn request_flush(&self, lsn: u64) {
        if lsn >= self.first {
            self.log.request_flush(Lsn(lsn.wrapping_sub(self.begin)));
        }
    }

    /// Calls `durable` when the record of this number is durable, or when it is unknown whether it
    /// will be.
    pub(crate) fn on_durable(
        &self,
        lsn: u64,
        durable: impl FnOnce(Result<(), LogError>) + Send + 'static,
    ) {
        if lsn < self.first {
            return durable(Ok(()));
        }
        self.log.on_durable(Lsn(lsn.wrapping_sub(self.begin)), Box::new(durable));
    }

    /// Makes all records durable, if the log still can. Then the callbacks of all commits are due.
    pub(crate) fn settle(&self, _freeze: &Freeze<'_>) {
        // If that fails, no record will become durable, and the callbacks are told so.
        drop(self.wait_durable(self.newest()));
    }

    /// Waits until the callbacks of commits have returned that are due now. They may use the store:
    /// the caller holds nothing of it. A callback itself waits for none.
    pub(crate) fn wait_callers(&self) {
        self.log.wait_callers();
    }

    /// The thread that runs the callbacks of commits.
    pub(crate) fn calls_thread(&self) -> Option<ThreadId> {
        self.log.calls_thread()
    }

    /// The longest record that the log takes, in bytes.
    pub(crate) fn longest_record(&self) -> usize {
        self.log.longest_record()
    }

    /// Records before this number are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.log.durable().0.wrapping_add(self.begin)
    }

    /// The next record begins here or later.
    pub(crate) fn end(&self) -> u64 {
        self.log.end().0.wrapping_add(self.begin)
    }

    /// Whether a checkpoint would give room back.
    pub(crate) fn can_trim(&self) -> bool {
        // Not the cut: a checkpoint that failed has noted one, and has given nothing back.
        self.bytes_since_trim() > 0
    }

    /// Whether the log is so long that a checkpoint is due.
    pub(crate) fn is_cut_due(&self) -> bool {
        self.bytes_since_cut() > self.bytes_per_cut
    }

    /// Whether the log has used half of what it has when a checkpoint is due. It has used more
    /// while a checkpoint is under way.
    pub(crate) fn is_half_due(&self) -> bool {
        self.bytes_since_trim() > self.bytes_per_cut / 2
    }

    /// The bytes that changes may append while a checkpoint in the background writes its pages:
    /// half of what they have until the next one is due, or until the log is full. There is less
    /// if this checkpoint begins late, because one has failed or the store has been recovered.
    pub(crate) fn room_of_paced_cut(&self) -> u64 {
        let full = 2 * self.bytes_per_cut;
        let used = self.bytes_since_trim() + self.promised.load(Ordering::Acquire);
        // A segment is reused as a whole.
        let left = full.saturating_sub(used + full / 16);
        left.min(self.bytes_per_cut) / 2
    }

    /// Whether the paced checkpoint that begins now leaves out nodes that have changed since its
    /// cut. Each fourth one does not: salvage reads the file alone.
    pub(crate) fn leaves_nodes_out(&self) -> bool {
        self.paced.fetch_add(1, Ordering::Relaxed) % 4 != 3
    }

    /// Locks the places of free maps, which a checkpoint holds from its cut to its end. A
    /// checkpoint that this thread waits for writes as fast as it can.
    pub(crate) fn lock_maps(&self) -> MutexGuard<'_, MapPlaces> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let maps = lock(&self.maps);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        maps
    }

    /// Whether a checkpoint has noted its cut, and has not ended or has failed.
    #[cfg(test)]
    pub(crate) fn is_cut_under_way(&self) -> bool {
        self.newest_cut() > self.trimmed.load(Ordering::Acquire)
    }

    /// Whether threads wait for the checkpoint that is under way.
    pub(crate) fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The bytes that the log has from the newest cut on.
    pub(crate) fn bytes_since_cut(&self) -> u64 {
        // The cut first: another thread may make the end of now the cut.
        let cut = self.cut.load(Ordering::Acquire);
        self.end() - cut
    }

    /// The bytes that the log may not reuse yet.
    fn bytes_since_trim(&self) -> u64 {
        let trimmed = self.trimmed.load(Ordering::Acquire);
        self.end() - trimmed
    }

    /// The records that recovery needs begin here.
    pub(crate) fn newest_cut(&self) -> u64 {
        self.cut.load(Ordering::Acquire)
    }

    /// Makes the end of the log the newest cut, while no change is under way.
    pub(crate) fn cut_at_end(&self) -> u64 {
        let end = self.end();
        self.cut.store(end, Ordering::Release);
        end
    }

    /// Lets the log reuse the room of the records before a cut whose header is durable.
    ///
    /// # Errors
    /// What the storage said.
    pub(crate) fn trim(&self, cut: u64) -> Result<(), LogError> {
        let before = Lsn(cut.wrapping_sub(self.begin));
        let copied = lock(&self.copied).clone();
        copied.iter().for_each(|copied| copied.copy_before_trim(&self.log, before));
        self.log.trim(before)?;
        self.trimmed.fetch_max(cut, Ordering::Release);
        Ok(())
    }

    /// From now on the log notes which pages are repaired. The caller is about to write the pages
    /// of a checkpoint; those that were repaired before are dirty.
    pub(crate) fn note_repairs(&self) {
        lock(&self.repairs).noted = Some(Vec::new());
    }

    /// The caller has written the pages of the checkpoint of this cut. From now on repairs need no
    /// record before the cut: the log may trim those, and a crash must find the image of each page
    /// that may be written. Returns the pages that were repaired meanwhile, which the checkpoint
    /// has to write as well. Waits for repairs that are under way, whose pages are dirty then.
    pub(crate) fn repair_from(&self, cut: u64) -> Vec<PageId> {
        let cut = Lsn(cut.wrapping_sub(self.begin));
        let mut repairs = lock(&self.repairs);
        repairs.changed = Some(ChangedSince::new(self.page_frames, cut));
        repairs.noted.take().unwrap_or_default()
    }

    /// Whether a page is pending: the file does not have it as it is.
    pub(crate) fn is_pending(&self, page: PageRef) -> bool {
        self.pending.has(page) && !is_planted(StoreBug::UnredonePage)
    }

    /// Makes the next pages that are pending, for which the pool will ask next. Returns them.
    ///
    /// # Errors
    /// What the log said; a record that does not fit its page.
    pub(crate) fn make_some(&self, turn: &MutexGuard<'_, ()>) -> StoreResult<Vec<PageRef>> {
        self.pending.make_some(turn, &self.log, self.begin)
    }

    /// Makes a page that is pending, or makes a page anew that is not in memory, and that the file
    /// does not have as it was written (`redo/repair.rs`). Returns false if the log has no image of
    /// the page.
    ///
    /// # Errors
    /// What the log said; a record that does not fit the page.
    pub(crate) fn repair(&self, page: PageRef, bytes: &mut [u8]) -> StoreResult<bool> {
        if page.frames != self.page_frames {
            return Ok(false);
        }
        if self.pending.has(page) {
            return self.pending.make(&self.log, self.begin, page, bytes);
        }
        let mut repairs = lock(&self.repairs);
        let cut = Lsn(self.trimmed.load(Ordering::Acquire).wrapping_sub(self.begin));
        let new = || ChangedSince::new(self.page_frames, cut);
        let changed = repairs.changed.get_or_insert_with(new);
        let is_repaired = changed.repair(&self.log, self.begin, page, bytes)?;
        if let (true, Some(noted)) = (is_repaired, &mut repairs.noted) {
            noted.push(page.id);
        }
        Ok(is_repaired)
    }

    /// Whether a backup is under way. The caller has [locked the maps](Self::lock_maps), so none
    /// begins meanwhile.
    pub(crate) fn is_held(&self, _maps: &MapPlaces) -> bool {
        lock(&self.copied).is_some()
    }

    /// Begins to copy the records from the cut `from` on to a file, before they are trimmed. The
    /// caller has [locked the maps](Self::lock_maps), so no checkpoint trims meanwhile.
    ///
    /// # Errors
    /// [`Error::InUse`] if another backup is under way.
    pub(crate) fn begin_hold(self: &Arc<Self>, from: u64, file: File) -> StoreResult<Held> {
        let mut copied = lock(&self.copied);
        if copied.is_some() {
            let what = "another backup of this store is under way: wait until it has ended";
            return Err(Error::InUse(what.into()));
        }
        let new = Arc::new(CopiedRecords::new(Lsn(from.wrapping_sub(self.begin)), file));
        *copied = Some(new.clone());
        Ok(Held { log: self.clone(), records: new })
    }

    /// Places that were freed by records before this number may be used again.
    pub(crate) fn reusable(&self) -> u64 {
        self.durable().min(self.places_held.load(Ordering::Acquire))
    }

    /// Whether a backup has its end, and still copies.
    #[cfg(test)]
    pub(crate) fn has_backup_ended(&self) -> bool {
        self.places_held.load(Ordering::Acquire) < u64::MAX
    }

    /// Notes durably that the store may need the log to recover.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn own(&self, store: u128) -> Result<(), LogError> {
        self.files.iter().try_for_each(|files| files.own(store))
    }

    /// Ends the log, and gives its place to the next one. Nothing is removed. Callbacks of commits
    /// may come afterwards, until [`wait_callers`](Self::wait_callers) has returned.
    pub(crate) fn stop(&self) {
        self.log.stop();
        self.files.iter().for_each(LogFiles::unlock);
    }

    /// As [`stop`](Self::stop), for a store that needs the log no more: its files go.
    pub(crate) fn remove(&self) {
        self.log.stop();
        self.files.iter().for_each(LogFiles::remove);
    }

    /// Does what the thread of a log does that has one.
    #[cfg(feature = "testing")]
    pub(crate) fn work_now(&self) {
        self.log.work_now();
    }

    /// As `Log::slow_down`.
    #[cfg(feature = "testing")]
    pub(crate) fn slow_down(&self, choose: vellum_log::Choose) -> vellum_log::Pilot {
        self.log.slow_down(choose)
    }

    /// Reads the durable records from `from` on.
    ///
    /// # Errors
    /// If the log begins later.
    #[cfg(test)]
    pub(crate) fn scan(&self, from: u64) -> Result<vellum_log::Scan<'_>, LogError> {
        self.log.scan(Some(Lsn(from.wrapping_sub(self.begin))))
    }
}

/// While this lives, the records from a cut on are copied before the log trims them.
#[derive(Debug)]
pub(crate) struct Held {
    log: Arc<RedoLog>,
    records: Arc<CopiedRecords>,
}

impl Held {
    /// The records that were copied.
    pub(crate) fn records(&self) -> &CopiedRecords {
        &self.records
    }

    /// Copies the durable records before this number.
    ///
    /// # Errors
    /// A failed read of the log or write of the copy, also by a trim.
    pub(crate) fn copy(&self, end: u64) -> StoreResult<()> {
        self.records.copy(&self.log.log, self.number_in_log(end))
    }

    /// The number in the log of a number of the store.
    pub(crate) fn number_in_log(&self, lsn: u64) -> Lsn {
        Lsn(lsn.wrapping_sub(self.log.begin))
    }

    /// The end of the log now is the end of the backup: no later record is copied. Places that are
    /// freed from now on are kept until [`release_places`](Self::release_places). No change is
    /// under way, nor a checkpoint, which may log that pages are free. Returns the end of the log.
    pub(crate) fn end_at_now(&self, _freeze: &Freeze<'_>, _maps: &MapPlaces) -> u64 {
        let end = self.log.end();
        self.records.end_at(self.number_in_log(end));
        self.log.places_held.store(end, Ordering::Release);
        end
    }

    /// Lets freed places be used again.
    pub(crate) fn release_places(&self) {
        self.log.places_held.store(u64::MAX, Ordering::Release);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release_places();
        *lock(&self.log.copied) = None;
    }
}

/// The place of the log, which syncs the store's file before it writes a record that refers to
/// pages that are not in the log.
#[derive(Debug)]
pub(crate) struct ValuesFirst {
    log: Arc<dyn LogDevice>,
    file: Arc<dyn Device>,
    /// Whether such pages were written since the last sync began. A thread that syncs the file
    /// holds the lock to the end, so no other append passes it.
    unsynced: Mutex<bool>,
}

impl ValuesFirst {
    pub(crate) fn new(log: Arc<dyn LogDevice>, file: Arc<dyn Device>) -> ValuesFirst {
        ValuesFirst { log, file, unsynced: Mutex::default() }
    }
}

impl LogDevice for ValuesFirst {
    fn identity(&self) -> u64 {
        self.log.identity()
    }

    fn scan(&self) -> Range<u64> {
        self.log.scan()
    }

    fn prepare(&self) -> io::Result<bool> {
        self.log.prepare()
    }

    fn extend(&self) -> io::Result<u64> {
        self.log.extend()
    }

    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written> {
        let mut unsynced = lock(&self.unsynced);
        if *unsynced && !is_planted(StoreBug::LateValues) {
            self.file.sync()?;
            *unsynced = false;
        }
        drop(unsynced);
        self.log.append(first, parts)
    }

    fn sync(&self) -> io::Result<()> {
        self.log.sync()
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        self.log.read(first, blocks)
    }

    fn trim(&self, before: u64) -> io::Result<()> {
        self.log.trim(before)
    }

    fn taken(&self) -> &AtomicBool {
        self.log.taken()
    }

    fn in_flight(&self) -> usize {
        self.log.in_flight()
    }
}
