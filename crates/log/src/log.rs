//! The log as callers see it: opening, appending, waiting, reading, trimming, closing.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use crate::block::{BLOCK_BYTES, INCARNATIONS, Lsn, PAYLOAD_U64};
use crate::calls::Durable;
use crate::device::LogDevice;
use crate::error::LogError;
#[cfg(feature = "testing")]
use crate::flight_control::Pilot;
use crate::flights::{Hold, Shared};
use crate::planted::{LogBug, is_planted};
use crate::ring::Ring;
use crate::scan::{End, EndReason, RecordRef, Scan, check_reaches};
#[cfg(feature = "testing")]
use crate::slow_flights::Choose;
use crate::sync::{Mutex, ThreadId, lock, thread};

/// How a log is opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LogOptions {
    /// Memory for records that are not durable yet, rounded up to a power of two of blocks, at
    /// least four and at most [`MOST_RING_BYTES`](LogOptions::MOST_RING_BYTES). The longest record
    /// has a little less than half of it.
    pub ring_bytes: usize,
    /// Flights at once; `None` for as many as the device thinks worth it.
    pub in_flight: Option<usize>,
}

impl LogOptions {
    /// The largest ring, 4 GiB: half of it is a record whose length a `u32` says.
    pub const MOST_RING_BYTES: u64 = 4 << 30;
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { ring_bytes: 4 << 20, in_flight: None }
    }
}

/// A write-ahead log.
///
/// In the child of a `fork` it is its parent's: calls fail with `Forked`, [`begin`](Log::begin)
/// says 0, a drop does nothing. The child may open another folder.
pub struct Log {
    shared: Arc<Shared>,
    /// The thread that flushes.
    background: Mutex<Option<thread::JoinHandle<()>>>,
    /// The thread that calls the functions of [`on_durable`](Log::on_durable).
    caller: Option<thread::JoinHandle<()>>,
}

impl Log {
    /// Opens a log: makes durable what is there, gives `visit` every record from `from` on (from
    /// the oldest one, if that is `None`), in order, and goes on where the log ends. `from` is the
    /// number of a record that was durable once, or an earlier [`End::lsn`], or an
    /// [`end`](Log::end) up to which all was durable. An opening writes no block.
    ///
    /// # Errors
    /// `RingTooLarge`; `Taken` if another log has the device; `Damaged` if a block is missing that
    /// was durable; `Trimmed` if the log begins later; what the storage or `visit` said.
    pub fn open<E: From<LogError>>(
        device: Arc<dyn LogDevice>,
        options: &LogOptions,
        from: Option<Lsn>,
        visit: impl FnMut(RecordRef<'_>) -> Result<(), E>,
    ) -> Result<(Log, End), E> {
        // The scheduler of a model knows no thread of the scan.
        let reads_ahead = cfg!(not(feature = "model"));
        let (mut log, end) = Log::recover(device, options, from, reads_ahead, visit)?;
        let calls = Arc::clone(&log.shared.calls);
        let caller = start("vellum-calls", move || calls.run())?;
        log.shared.calls.begin(caller.thread().id());
        log.caller = Some(caller);
        let shared = Arc::clone(&log.shared);
        *lock(&log.background) = Some(start("vellum-log", move || shared.work())?);
        Ok((log, end))
    }

    /// As [`open`](Log::open), but the log has no thread of its own. Threads that wait for a record
    /// make it durable; what no thread waits for, [`work_now`](Log::work_now) does. The thread that
    /// makes a record durable calls its function.
    ///
    /// # Errors
    /// As `open`.
    #[cfg(feature = "testing")]
    pub fn open_without_thread<E: From<LogError>>(
        device: Arc<dyn LogDevice>,
        options: &LogOptions,
        from: Option<Lsn>,
        visit: impl FnMut(RecordRef<'_>) -> Result<(), E>,
    ) -> Result<(Log, End), E> {
        Log::recover(device, options, from, false, visit)
    }

    /// Does what the thread of a log does that has one: makes durable what was asked for, and has
    /// the device make room ahead.
    #[cfg(feature = "testing")]
    pub fn work_now(&self) {
        self.shared.work_now();
    }

    /// From now on the device takes its time: what is in flight goes on when the [`Pilot`] lets
    /// time pass, or when a call waits for it. `choose` decides what goes on first. For a log
    /// without a thread.
    #[cfg(feature = "testing")]
    pub fn slow_down(&self, choose: Choose) -> Pilot {
        self.shared.airspace.open(choose);
        Pilot(Arc::downgrade(&self.shared))
    }

    /// A log without a thread of its own. A thread may read ahead of the scan.
    pub(crate) fn recover<E: From<LogError>>(
        device: Arc<dyn LogDevice>,
        options: &LogOptions,
        from: Option<Lsn>,
        reads_ahead: bool,
        mut visit: impl FnMut(RecordRef<'_>) -> Result<(), E>,
    ) -> Result<(Log, End), E> {
        let (bytes, most) = (options.ring_bytes, LogOptions::MOST_RING_BYTES);
        if bytes as u64 > most {
            return Err(LogError::RingTooLarge { bytes, most }.into());
        }
        let ahead = reads_ahead.then(|| device.clone());
        let device = Hold::new(device)?;
        // A process that was killed may have written what it did not sync: no caller shall act on
        // records that a loss of power could still take.
        if !is_planted(LogBug::UnsyncedOpening) {
            device.sync().map_err(LogError::io("syncing the log before it is read"))?;
        }
        let before = from.map_or(Ok(None), |from| check_reaches(&*device, from))?;
        let mut scan = Scan::new(&*device, from, None, before)?;
        ahead.into_iter().for_each(|device| scan.read_ahead(device));
        while let Some(record) = scan.next_ref()? {
            visit(record)?;
        }
        let end = scan.end().unwrap_or_else(|| unreachable!("the scan has ended"));
        // Two openings have the same number only if the first of them wrote nothing that is left.
        // What could not be read may be readable again later: such numbers are passed over.
        let hidden = match scan.has_hidden() {
            true => RandomState::new().hash_one(scan.newest()) >> 32,
            false => 0,
        };
        let incarnation = scan.newest() + 1 + hidden;
        if !INCARNATIONS.contains(&incarnation) {
            // No opening would believe the blocks of this one.
            let what = format!("a block is of opening {}, the last one", scan.newest());
            let witness = "the block's checksum is right".into();
            return Err(LogError::Damaged { lsn: end.lsn, what, witness }.into());
        }
        let blocks = options.ring_bytes.div_ceil(BLOCK_BYTES).next_power_of_two().max(4);
        let (start, room) = (end.lsn.block(), device.scan().end);
        let ring = Ring::new(blocks, start, room);
        let most = options.in_flight.unwrap_or_else(|| device.in_flight()).max(1);
        let was_closed = end.why == EndReason::Closed;
        let torn = scan.ends_torn();
        let shared = Shared::new(device, ring, most, incarnation, was_closed, torn);
        tracing::debug!(end = %end.lsn, why = %end.why, incarnation, "opened a log");
        let log = Log { shared: Arc::new(shared), background: Mutex::new(None), caller: None };
        Ok((log, end))
    }

    /// Appends a record and returns its number, which is greater than those of all records appended
    /// before. The record is durable when [`wait_durable`](Log::wait_durable) says so. Waits while
    /// the ring is full, and while the device makes room.
    ///
    /// # Errors
    /// `TooLong`, `Full`, `Poisoned`; the record was not taken then.
    pub fn append(&self, record: &[u8]) -> Result<Lsn, LogError> {
        self.append_parts(&[record])
    }

    /// The same for a record in parts, which become one.
    ///
    /// # Errors
    /// As [`append`](Log::append).
    pub fn append_parts(&self, parts: &[&[u8]]) -> Result<Lsn, LogError> {
        loop {
            match self.shared.try_append(parts)? {
                Ok(lsn) => return Ok(lsn),
                Err(blocks) => self.shared.wait_until(blocks)?,
            }
        }
    }

    /// The same, but does not wait for the ring.
    ///
    /// # Errors
    /// `Busy`, or as [`append`](Log::append).
    pub fn try_append(&self, parts: &[&[u8]]) -> Result<Lsn, LogError> {
        let taken = self.shared.try_append(parts)?;
        let bytes = self.shared.ring.len() * BLOCK_BYTES as u64;
        taken.map_err(|blocks| {
            self.shared.want(blocks);
            LogError::Busy { bytes }
        })
    }

    /// Waits until a record is durable, and with it all before it.
    ///
    /// # Errors
    /// `Poisoned` if it is unknown whether the record is durable.
    pub fn wait_durable(&self, lsn: Lsn) -> Result<(), LogError> {
        self.shared.wait_until(lsn.block() + 1)
    }

    /// Has a function called when a record is durable, or is known never to be acknowledged. One
    /// thread can so have thousands of records under way. A thread of the log calls these
    /// functions, one after the other. They may use the log. A slow one delays the others, and no
    /// flush.
    pub fn on_durable(&self, lsn: Lsn, durable: Durable) {
        self.shared.on_durable(lsn.block() + 1, durable);
    }

    /// Waits until the functions have returned that [`on_durable`](Log::on_durable) was given for
    /// records that are durable now, or that never will be. In such a function it waits for none.
    /// In the child of a fork, too.
    pub fn wait_callers(&self) {
        self.shared.wait_callers();
    }

    /// The thread that calls the functions of [`on_durable`](Log::on_durable). None if the log has
    /// no threads.
    pub fn calls_thread(&self) -> Option<ThreadId> {
        self.caller.as_ref().map(|caller| caller.thread().id())
    }

    /// Has a record made durable soon, though no thread waits for it: with all records of the next
    /// millisecond, unless a flush for another reason takes it along before.
    pub fn request_flush(&self, lsn: Lsn) {
        self.shared.want_soon(lsn.block() + 1);
    }

    /// Records before this number are durable.
    pub fn durable(&self) -> Lsn {
        Lsn::of_block(self.shared.ring.durable())
    }

    /// The next record will begin here, or a little later.
    pub fn end(&self) -> Lsn {
        Lsn::of_position(self.shared.ring.reserved())
    }

    /// Where the log begins: an earlier record can not be read.
    pub fn begin(&self) -> Lsn {
        Lsn::of_block(self.shared.device.scan().start)
    }

    /// Has the device make room for `bytes` after all that was appended until now: of records with
    /// 4 bytes more each, and of the rest of a block for each flush. Appends of other threads may
    /// take the room.
    ///
    /// # Errors
    /// `Full`, `Poisoned`; what the storage said.
    pub fn make_room(&self, bytes: u64) -> Result<(), LogError> {
        self.shared.make_room_after(bytes)
    }

    /// The longest record that is taken, in bytes.
    pub fn longest_record(&self) -> usize {
        self.shared.longest()
    }

    /// Reads the durable records from one on, or from the oldest one.
    ///
    /// # Errors
    /// `Trimmed` if the log begins later.
    pub fn scan(&self, from: Option<Lsn>) -> Result<Scan<'_>, LogError> {
        self.shared.check_process()?;
        let durable = self.shared.ring.durable();
        Ok(Scan::new(&*self.shared.device, from, Some(durable), None)?.begin_small())
    }

    /// Reads one durable record.
    ///
    /// # Errors
    /// `NotAppended` if there is none, or it is not durable; `Trimmed`, `Damaged`, what the storage
    /// said.
    pub fn read(&self, lsn: Lsn) -> Result<Vec<u8>, LogError> {
        let record = self.scan(Some(lsn))?.next_record()?;
        let end = self.durable();
        let record = record.filter(|record| record.lsn == lsn);
        record.map(|record| record.bytes).ok_or(LogError::NotAppended { lsn, end })
    }

    /// Gives up records before this number, so that their room can be reused. The device gives up
    /// whole segments; an opening may find some of the records again.
    ///
    /// # Errors
    /// What the storage said.
    pub fn trim(&self, before: Lsn) -> Result<(), LogError> {
        self.shared.check_process()?;
        // The last durable block stays: from it an opening knows whether what follows is the log,
        // or left from an earlier opening's flush.
        let block = before.block().min(self.shared.ring.durable().saturating_sub(1));
        self.shared.device.trim(block).map_err(LogError::io("trimming the log"))?;
        self.shared.ask_anew();
        Ok(())
    }

    /// Makes all records durable, notes that the log ends here, and closes it. A log that is
    /// dropped instead makes nothing durable.
    ///
    /// # Errors
    /// `Poisoned`.
    pub fn close(self) -> Result<(), LogError> {
        self.shared.wait_until(self.shared.ring.reserved().div_ceil(PAYLOAD_U64))?;
        self.shared.note_close()
    }

    /// Ends the log as a drop does, under live handles: makes nothing durable, and gives the device
    /// back. Calls of other threads fail with `Closed` from then on, unless what they wait for is
    /// durable. [`wait_callers`](Log::wait_callers) then waits for all functions that the log was
    /// given; a drop does that, too.
    pub fn stop(&self) {
        if self.shared.check_process().is_err() {
            // The child of a fork: the thread is its parent's.
            return;
        }
        self.shared.end_work();
        if let Some(background) = lock(&self.background).take() {
            // Its panics were reported.
            drop(background.join());
        }
        self.shared.abandon_callbacks();
        self.shared.calls.end();
        self.shared.device.end();
    }

    /// The next flight, for tests that steer flights themselves.
    #[cfg(all(test, not(feature = "model")))]
    pub(crate) fn take_flight(&self) -> Option<crate::flights::Flight<'_>> {
        self.shared.take_next()
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if self.shared.check_process().is_err() {
            // The child of a fork: the thread and the callbacks are the parent's. The thread's
            // part of `shared` keeps all that the child has of the log in place.
            let background = self.background.get_mut().map(Option::take);
            std::mem::forget((background, self.caller.take()));
            return;
        }
        self.stop();
        if let Some(caller) = self.caller.take()
            // A function may drop the last handle: the thread does not wait for itself, and ends.
            && caller.thread().id() != thread::current().id()
        {
            drop(caller.join());
        }
    }
}

/// Starts a thread of the log.
fn start(
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> Result<thread::JoinHandle<()>, LogError> {
    let started = thread::Builder::new().name(name.into()).spawn(work);
    started.map_err(LogError::io("starting a thread for the log"))
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Log");
        text.field("device", &&*self.shared.device).field("durable", &self.durable());
        text.field("end", &self.end()).finish_non_exhaustive()
    }
}
