//! Carrying what was appended to the device, and telling who waits for it.
//!
//! A *flight* carries sealed blocks of the ring to the device. The thread that waits for a record
//! leads the flight that takes it, if the device is free; all records that were appended until then
//! go along. While as many flights are under way as the device is good for, records gather for the
//! next one, which starts the moment a flight lands. There is no timer (arXiv 2606.18187). A thread
//! of the log's own leads the flights for records that no thread waits for. Records that are to
//! become durable *soon* gather for a millisecond first: otherwise each of them would wake that
//! thread, and take a block of its own.
//!
//! What holds: flights land in any order, and are released in order; what is acknowledged lies
//! before the oldest flight that has not landed. After the first failure nothing more is.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::block::{Block, CLOSES, LENGTH, Lsn, PAYLOAD_U64, STARTS};
use crate::calls::{Calls, Durable, call};
use crate::device::{LogDevice, Written, is_full};
use crate::error::LogError;
use crate::opening_process::OpeningProcess;
use crate::planted::{LogBug, is_planted};
use crate::ring::{Obstacle, Ring, SealedBlocks};
use crate::slow_flights::Stage;
#[cfg(feature = "testing")]
use crate::slow_flights::{Airspace, Aloft};
use crate::sync::{
    AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait, wait_until,
};

/// Groups of threads that wait for flights, by the number of the flight. More than flights that
/// there usually are at once.
const GROUPS: usize = 16;

/// So long the thread of the log waits for more records that are to become durable soon.
const GATHER: Duration = Duration::from_millis(1);

/// In a simulation with a slow device, each turn of those for which a caller waits takes so long.
#[cfg(feature = "testing")]
const TURN: Duration = Duration::from_micros(100);

/// What the threads of a log share.
pub(crate) struct Shared {
    pub(crate) device: Hold,
    pub(crate) ring: Ring,
    /// The first block that this handle writes.
    start: u64,
    /// The number of this opening, in each block that it writes.
    incarnation: u64,
    /// Whether the log was closed there, and is still as it was then.
    was_closed: bool,
    /// A part of an earlier opening's block may stand in the first block's place.
    torn: bool,
    /// Flights at once.
    most: usize,
    flow: Mutex<Flow>,
    /// As in `flow`: whether it is poisoned, or the log has ended.
    refuses: AtomicBool,
    /// Blocks before this shall become durable soon, when records have gathered.
    asked: AtomicU64,
    /// A flight has been released, or the device is free for the next one: by the number of the
    /// flight, so that a landing wakes those it is about, and one to lead the next flight.
    landed: [Condvar; GROUPS],
    /// There is work for the thread of the log.
    work: Condvar,
    /// A flight has landed after the log ended.
    ended: Condvar,
    /// The calls that are due.
    pub(crate) calls: Arc<Calls>,
    /// Held while the device makes room.
    supply: Mutex<()>,
    /// Threads that have the device make room now, or wait until it has.
    in_need: AtomicU64,
    process: OpeningProcess,
    #[cfg(feature = "testing")]
    pub(crate) airspace: Airspace,
}

/// A device, for one log alone until this is dropped or ends.
pub(crate) struct Hold {
    device: Arc<dyn LogDevice>,
    /// Another log may have the device.
    ended: AtomicBool,
}

impl Hold {
    pub(crate) fn new(device: Arc<dyn LogDevice>) -> Result<Hold, LogError> {
        match device.taken().swap(true, Ordering::AcqRel) {
            true => Err(LogError::Taken),
            false => Ok(Hold { device, ended: AtomicBool::new(false) }),
        }
    }

    /// Gives the device back.
    pub(crate) fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.device.taken().store(false, Ordering::Release);
        }
    }
}

impl Deref for Hold {
    type Target = dyn LogDevice;

    fn deref(&self) -> &Self::Target {
        &*self.device
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.end();
    }
}

#[derive(Default)]
struct Flow {
    /// Those that are not released, oldest first: the first block, and the sealed blocks once
    /// they have landed.
    flights: VecDeque<(u64, Option<SealedBlocks>)>,
    /// How many have not landed.
    flying: usize,
    /// How many there were: the number of the next one.
    taken: u64,
    poison: Option<String>,
    /// By the block that has to be durable, and a serial number.
    callbacks: BTreeMap<(u64, u64), Durable>,
    serial: u64,
    /// Blocks before this shall become durable though no thread waits for them.
    wanted: u64,
    /// Then the records that have gathered shall become durable.
    due: Option<Instant>,
    /// The thread of the log waits for work.
    rests: bool,
    /// The thread of the log shall have the device make more room than this, its end.
    wants_more_than: Option<u64>,
    /// The end of the room when it was asked for last.
    asked_at: u64,
    closing: bool,
}

impl Shared {
    /// For a log that goes on where the ring does.
    pub(crate) fn new(
        device: Hold,
        ring: Ring,
        most: usize,
        incarnation: u64,
        was_closed: bool,
        torn: bool,
    ) -> Shared {
        let start = ring.durable();
        let flow = Flow { wanted: start, asked_at: u64::MAX, ..Flow::default() };
        Shared {
            device,
            ring,
            start,
            incarnation,
            was_closed,
            torn,
            most,
            flow: Mutex::new(flow),
            refuses: AtomicBool::new(false),
            asked: AtomicU64::new(start),
            landed: std::array::from_fn(|_| Condvar::new()),
            work: Condvar::new(),
            ended: Condvar::new(),
            calls: Arc::default(),
            supply: Mutex::new(()),
            in_need: AtomicU64::new(0),
            process: OpeningProcess::new(),
            #[cfg(feature = "testing")]
            airspace: Airspace::default(),
        }
    }

    /// Fails in the child of a fork, before any lock is waited for.
    pub(crate) fn check_process(&self) -> Result<(), LogError> {
        if self.process.is_here() { Ok(()) } else { Err(LogError::Forked) }
    }

    /// The longest record that is taken: two of them, each begun in the midst of a block, fit into
    /// the ring.
    pub(crate) fn longest(&self) -> usize {
        ((self.ring.len() / 2 - 1) * PAYLOAD_U64) as usize - LENGTH
    }

    /// Appends a record; or names the blocks that have to become durable first.
    pub(crate) fn try_append(&self, parts: &[&[u8]]) -> Result<Result<Lsn, u64>, LogError> {
        self.check_process()?;
        let len = parts.iter().map(|part| part.len()).sum();
        if len > self.longest() {
            return Err(LogError::TooLong { len, most: self.longest() });
        }
        loop {
            if self.refuses.load(Ordering::Acquire) {
                return Err(lock(&self.flow).failure());
            }
            match self.ring.append(parts, len as u32) {
                Ok(position) => {
                    self.relieve(position, position + (LENGTH + len) as u64);
                    return Ok(Ok(Lsn::of_position(position)));
                }
                Err(Obstacle::Ring(blocks)) => return Ok(Err(blocks)),
                Err(Obstacle::Room(blocks)) => {
                    self.make_room(blocks).map_err(no_room((LENGTH + len) as u64))?;
                }
            }
        }
    }

    /// Has the device make room for so many bytes after what was appended.
    pub(crate) fn make_room_after(&self, bytes: u64) -> Result<(), LogError> {
        if self.refuses.load(Ordering::Acquire) {
            return Err(lock(&self.flow).failure());
        }
        let blocks = (self.ring.reserved() + bytes).div_ceil(PAYLOAD_U64);
        if self.ring.room() >= blocks {
            return Ok(());
        }
        self.check_process()?;
        self.make_room(blocks).map_err(no_room(bytes))
    }

    /// Has each quarter of the ring made durable once it is full, so that appends that no thread
    /// waits for do not come to a halt.
    fn relieve(&self, from: u64, to: u64) {
        let quarter = (self.ring.len() / 4) * PAYLOAD_U64;
        if from / quarter != to / quarter {
            self.want(to / PAYLOAD_U64);
        }
    }

    /// Waits until all blocks before this one are durable, and helps.
    pub(crate) fn wait_until(&self, blocks: u64) -> Result<(), LogError> {
        self.check_process()?;
        if self.ring.durable() >= blocks {
            return Ok(());
        }
        let mut flow = lock(&self.flow);
        loop {
            if let Some(result) = self.known(&flow, blocks) {
                return result;
            }
            let flight = (self.ring.sealed() < blocks).then(|| self.take(&mut flow)).flatten();
            flow = match flight {
                Some(flight) => {
                    drop(flow);
                    self.carry(flight);
                    lock(&self.flow)
                }
                None => self.wait_for_landing(flow, blocks),
            };
        }
    }

    /// Waits until a flight may have landed that carries the last of these blocks, or until the
    /// caller may lead one.
    fn wait_for_landing<'a>(
        &'a self,
        flow: MutexGuard<'a, Flow>,
        blocks: u64,
    ) -> MutexGuard<'a, Flow> {
        #[cfg(feature = "testing")]
        if self.airspace.is_open() {
            drop(flow);
            self.wait_a_turn();
            return lock(&self.flow);
        }
        let flight = self.flight_of(&flow, blocks);
        wait(self.landed(flight), flow)
    }

    /// Carries a flight to the device, unless it stays aloft in a simulation.
    fn carry(&self, flight: Flight<'_>) {
        #[cfg(feature = "testing")]
        let Some(flight) = self.keep_aloft(flight, Stage::Taken) else { return };
        flight.run();
    }

    /// What is known already about blocks becoming durable.
    fn known(&self, flow: &Flow, blocks: u64) -> Option<Result<(), LogError>> {
        let reserved = self.ring.reserved();
        if self.ring.durable() >= blocks {
            Some(Ok(()))
        } else if flow.poison.is_some() || flow.closing {
            Some(Err(flow.failure()))
        } else if is_planted(LogBug::SubmittedIsDurable) && self.ring.sealed() >= blocks
            || flow.believed() >= blocks
        {
            Some(Ok(()))
        } else if reserved.div_ceil(PAYLOAD_U64) < blocks {
            let (lsn, end) = (Lsn::of_block(blocks - 1), Lsn::of_position(reserved));
            Some(Err(LogError::NotAppended { lsn, end }))
        } else {
            None
        }
    }

    /// Has a function called when the blocks before this one are durable, or never will be known to
    /// be.
    pub(crate) fn on_durable(&self, blocks: u64, durable: Durable) {
        if let Err(forked) = self.check_process() {
            return call((durable, Err(forked)));
        }
        let mut flow = lock(&self.flow);
        if let Some(result) = self.known(&flow, blocks) {
            let left = self.calls.take(vec![(durable, result)]);
            drop(flow);
            return left.into_iter().for_each(call);
        }
        flow.serial += 1;
        let key = (blocks, flow.serial);
        flow.callbacks.insert(key, durable);
        self.want_locked(&mut flow, blocks);
    }

    /// Tells all who still wait to be called that they wait in vain.
    pub(crate) fn abandon_callbacks(&self) {
        let mut flow = lock(&self.flow);
        let callbacks = std::mem::take(&mut flow.callbacks);
        let calls = callbacks.into_values().map(|callback| (callback, Err(LogError::Closed)));
        let left = self.calls.take(calls.collect());
        // Not before: another thread that ends the log would end the calls meanwhile.
        drop(flow);
        left.into_iter().for_each(call);
    }

    /// For tests that steer flights themselves.
    #[cfg(all(test, not(feature = "model")))]
    pub(crate) fn take_next(&self) -> Option<Flight<'_>> {
        self.take(&mut lock(&self.flow))
    }

    /// The next flight, if the device is free and there is something to carry.
    fn take(&self, flow: &mut Flow) -> Option<Flight<'_>> {
        if flow.flying >= self.most || flow.poison.is_some() || flow.closing {
            return None;
        }
        let sealed = self.ring.seal()?;
        Some(self.fly(flow, sealed, 0))
    }

    fn fly(&self, flow: &mut Flow, sealed: SealedBlocks, flags: u8) -> Flight<'_> {
        let blocks = &sealed.numbers;
        flow.flights.push_back((blocks.start, None));
        flow.flying += 1;
        flow.taken += 1;
        // Room is made ahead, so that no append waits for it: as much as the log has used since it
        // was opened, up to a ring. Many logs are closed after a few records.
        let (room, ahead) = (self.ring.room(), self.ring.len().min(blocks.end - self.start));
        if room < blocks.end + ahead && flow.asked_at != room {
            (flow.wants_more_than, flow.asked_at) = (Some(room), room);
            self.call_thread(flow);
        }
        let flags = if blocks.start == self.start { flags | STARTS } else { flags };
        Flight { shared: self, sealed: Some(sealed), flags }
    }

    /// The number of the flight that carries the last of these blocks, which are not durable.
    fn flight_of(&self, flow: &Flow, blocks: u64) -> u64 {
        let later = flow.flights.iter().rev().take_while(|(first, _)| *first >= blocks).count();
        let is_sealed = self.ring.sealed() >= blocks;
        flow.taken - (later + usize::from(is_sealed)) as u64
    }

    fn landed(&self, flight: u64) -> &Condvar {
        &self.landed[flight as usize % GROUPS]
    }

    /// Wakes those whose flight was released, and one to lead the next.
    fn wake(&self, flow: &Flow, released: usize) {
        let oldest = flow.taken - flow.flights.len() as u64;
        for flight in oldest - released as u64..oldest {
            self.landed(flight).notify_all();
        }
        if flow.poison.is_some() {
            self.landed.iter().for_each(Condvar::notify_all);
        } else if flow.flights.len() + 1 < GROUPS {
            self.landed(flow.taken).notify_one();
        } else {
            // Others may wait in the same group: one of them could be the one that is woken.
            self.landed(flow.taken).notify_all();
        }
    }

    /// A flight has landed.
    fn land(&self, sealed: SealedBlocks, result: Result<(), String>) {
        let mut flow = lock(&self.flow);
        flow.flying -= 1;
        if flow.closing {
            self.ended.notify_all();
        }
        let mut released = 0;
        match result {
            Err(cause) => {
                tracing::error!(%cause, "the log takes no more records");
                self.refuses.store(true, Ordering::Release);
                flow.poison.get_or_insert(cause);
            }
            // What failed first may have been told to another flight's sync.
            Ok(()) if flow.poison.is_some() => {}
            Ok(()) => {
                let first = sealed.numbers.start;
                if let Some(flight) = flow.flights.iter_mut().find(|flight| flight.0 == first) {
                    flight.1 = Some(sealed);
                }
                while let Some((_, landed)) = flow.flights.front_mut() {
                    let Some(sealed) = landed.take() else { break };
                    flow.flights.pop_front();
                    self.ring.release(sealed);
                    released += 1;
                }
            }
        }
        if flow.wanted > self.ring.sealed() {
            self.call_thread(&mut flow);
        }
        self.wake(&flow, released);
        self.call_back(flow);
    }

    /// Has those called that have waited long enough.
    fn call_back(&self, mut flow: MutexGuard<'_, Flow>) {
        let durable = self.ring.durable().max(flow.believed());
        let later = flow.callbacks.split_off(&(durable + 1, 0));
        let ready = std::mem::replace(&mut flow.callbacks, later);
        let failed = match flow.poison {
            Some(_) => std::mem::take(&mut flow.callbacks),
            None => BTreeMap::new(),
        };
        let ready = ready.into_values().map(|callback| (callback, Ok(())));
        let failed = failed.into_values().map(|callback| (callback, Err(flow.failure())));
        let left = self.calls.take(ready.chain(failed).collect());
        drop(flow);
        left.into_iter().for_each(call);
    }

    /// Waits until the functions have returned that are due now. Each record that is durable by
    /// now, or never will be, has had its function called by then.
    pub(crate) fn wait_callers(&self) {
        // The threads of a parent never return in the child of a fork.
        if self.process.is_here() {
            // A flight that has released its blocks may be about to say what is due.
            drop(lock(&self.flow));
            self.calls.wait();
        }
    }

    /// Has the blocks before this one made durable by the thread of the log.
    pub(crate) fn want(&self, blocks: u64) {
        if self.process.is_here() {
            self.want_locked(&mut lock(&self.flow), blocks);
        }
    }

    fn want_locked(&self, flow: &mut Flow, blocks: u64) {
        // Only what was appended can be carried: a larger number would hide later wishes.
        let appended = self.ring.reserved().div_ceil(PAYLOAD_U64);
        flow.wanted = flow.wanted.max(blocks.min(appended));
        if flow.wanted > self.ring.sealed() {
            self.call_thread(flow);
        }
    }

    /// Has the blocks before this one made durable by the thread of the log, with all that is
    /// appended in a millisecond from now. Takes the lock for the first record of a block only:
    /// what carries one of them carries all.
    pub(crate) fn want_soon(&self, blocks: u64) {
        if self.asked.load(Ordering::Acquire) >= blocks || !self.process.is_here() {
            return;
        }
        // As in `want_locked`.
        let blocks = blocks.min(self.ring.reserved().div_ceil(PAYLOAD_U64));
        self.asked.fetch_max(blocks, Ordering::AcqRel);
        let mut flow = lock(&self.flow);
        if blocks > self.ring.sealed() && flow.due.is_none() {
            flow.due = Some(self.now() + GATHER);
            self.call_thread(&mut flow);
        }
    }

    /// Wants all for which threads have asked. A thread that asks from now on finds that none is
    /// due.
    fn end_gathering(&self, flow: &mut Flow) {
        flow.due = None;
        flow.wanted = flow.wanted.max(self.asked.load(Ordering::Acquire));
    }

    fn call_thread(&self, flow: &mut Flow) {
        if std::mem::take(&mut flow.rests) {
            self.work.notify_one();
        }
    }

    /// Has the device make room for all blocks before this one.
    fn make_room(&self, blocks: u64) -> io::Result<()> {
        self.in_need.fetch_add(1, Ordering::AcqRel);
        let supply = lock(&self.supply);
        let made = self.extend_to(blocks);
        drop(supply);
        self.in_need.fetch_sub(1, Ordering::AcqRel);
        made
    }

    fn extend_to(&self, blocks: u64) -> io::Result<()> {
        while self.ring.room() < blocks {
            self.ring.set_room(self.device.extend()?);
        }
        Ok(())
    }

    /// Has the device do a step of making room, unless it has more than `room` already, or another
    /// thread has it make room. Returns whether a step is left.
    fn make_room_ahead(&self, room: u64) -> bool {
        let _supply = lock(&self.supply);
        if self.ring.room() > room || self.in_need.load(Ordering::Acquire) > 0 {
            return false;
        }
        let step = self.device.prepare();
        let done = step.and_then(|is_left| {
            if !is_left {
                self.extend_to(room + 1)?;
            }
            Ok(is_left)
        });
        done.unwrap_or_else(|error| {
            tracing::debug!(%error, "no room ahead in the log");
            false
        })
    }

    /// Room may have come free: the thread of the log may ask for it again.
    pub(crate) fn ask_anew(&self) {
        lock(&self.flow).asked_at = u64::MAX;
    }

    /// Has the thread of the log end. Nothing more is taken, and no flight begins; threads that
    /// wait are told so.
    pub(crate) fn end_work(&self) {
        let mut flow = lock(&self.flow);
        flow.closing = true;
        self.refuses.store(true, Ordering::Release);
        self.work.notify_all();
        self.landed.iter().for_each(Condvar::notify_all);
        while flow.flying > 0 {
            flow = self.wait_for_end(flow);
        }
    }

    /// Waits until a flight may have landed after the log ended.
    fn wait_for_end<'a>(&'a self, flow: MutexGuard<'a, Flow>) -> MutexGuard<'a, Flow> {
        #[cfg(feature = "testing")]
        if self.airspace.is_open() {
            drop(flow);
            self.wait_a_turn();
            return lock(&self.flow);
        }
        wait(&self.ended, flow)
    }

    /// The time by which the log measures milliseconds.
    fn now(&self) -> Instant {
        #[cfg(feature = "testing")]
        if let Some(now) = self.airspace.now() {
            return now;
        }
        Instant::now()
    }

    /// What the thread of the log does.
    pub(crate) fn work(&self) {
        let mut flow = lock(&self.flow);
        while !flow.closing {
            flow = match self.work_once(flow) {
                Ok(flow) => flow,
                Err(flow) => self.rest(flow),
            };
        }
    }

    /// Waits until there may be something to do.
    fn rest<'a>(&'a self, mut flow: MutexGuard<'a, Flow>) -> MutexGuard<'a, Flow> {
        flow.rests = true;
        let mut flow = match flow.due {
            Some(due) => wait_until(&self.work, flow, due),
            None => wait(&self.work, flow),
        };
        flow.rests = false;
        flow
    }

    /// Does what the thread of the log has to do, if there is something. Otherwise returns an error
    /// with the flow.
    fn work_once<'a>(
        &'a self,
        mut flow: MutexGuard<'a, Flow>,
    ) -> Result<MutexGuard<'a, Flow>, MutexGuard<'a, Flow>> {
        // The scheduler of a model has no time.
        if flow.due.is_some_and(|due| cfg!(feature = "model") || due <= self.now()) {
            self.end_gathering(&mut flow);
        }
        let is_wanted = flow.wanted > self.ring.sealed();
        if let Some(flight) = is_wanted.then(|| self.take(&mut flow)).flatten() {
            drop(flow);
            self.carry(flight);
        } else if let Some(room) = flow.wants_more_than.take() {
            drop(flow);
            let is_left = self.make_room_ahead(room);
            flow = lock(&self.flow);
            if is_left {
                // After the flights that are wanted by now.
                flow.wants_more_than.get_or_insert(room);
            }
            return Ok(flow);
        } else {
            return Err(flow);
        }
        Ok(lock(&self.flow))
    }

    /// Does what the thread of the log would do within the next milliseconds.
    #[cfg(feature = "testing")]
    pub(crate) fn work_now(&self) {
        let mut flow = lock(&self.flow);
        while !flow.closing {
            if flow.due.is_some() {
                self.end_gathering(&mut flow);
            }
            match self.work_once(flow) {
                Ok(more) => flow = more,
                Err(_) => return,
            }
        }
    }

    /// Keeps a flight aloft that is so far. Gives it back if flights do not stay aloft.
    #[cfg(feature = "testing")]
    fn keep_aloft<'a>(&'a self, mut flight: Flight<'a>, stage: Stage) -> Option<Flight<'a>> {
        let (sealed, flags) = (flight.sealed.take()?, flight.flags);
        let Aloft { sealed, flags, .. } = self.airspace.keep(Aloft { sealed, flags, stage })?;
        Some(Flight { shared: self, sealed: Some(sealed), flags })
    }

    /// The caller waits for a flight that is aloft: the next turn comes.
    #[cfg(feature = "testing")]
    fn wait_a_turn(&self) {
        assert!(self.pass(TURN), "a flight waits for another one");
    }

    /// So much time passes, and a flight or the log's thread has a turn. Returns false if another
    /// turn is under way.
    #[cfg(feature = "testing")]
    pub(crate) fn pass(&self, time: Duration) -> bool {
        let Some((_turn, aloft)) = self.airspace.begin_turn(time) else { return false };
        match aloft {
            Some(aloft) => self.go_on(aloft),
            None => {
                let flow = lock(&self.flow);
                if !flow.closing {
                    drop(self.work_once(flow));
                }
            }
        }
        true
    }

    /// A flight does its next step.
    #[cfg(feature = "testing")]
    fn go_on(&self, Aloft { sealed, flags, stage }: Aloft) {
        let flight = Flight { shared: self, sealed: Some(sealed), flags };
        match stage {
            Stage::Ended(result) => flight.land(result),
            stage => {
                let stage = flight.go_on(stage);
                self.keep_aloft(flight, stage);
            }
        }
    }

    /// Whether records are to become durable that no flight carries yet, and a flight will.
    #[cfg(feature = "testing")]
    pub(crate) fn has_work(&self) -> bool {
        let flow = lock(&self.flow);
        let is_wanted = flow.due.is_some() || flow.wanted > self.ring.sealed();
        is_wanted && flow.poison.is_none() && !flow.closing
    }

    /// Whether the log takes no more records.
    #[cfg(feature = "testing")]
    pub(crate) fn refuses(&self) -> bool {
        self.refuses.load(Ordering::Acquire)
    }

    /// Notes that the log ends here, if that is not noted already and there is room for it.
    pub(crate) fn note_close(&self) -> Result<(), LogError> {
        if self.was_closed && self.ring.durable() == self.start {
            return Ok(());
        }
        let mut flow = lock(&self.flow);
        let Some(sealed) = self.ring.seal_empty() else { return Ok(()) };
        let end = sealed.numbers.end;
        let flight = self.fly(&mut flow, sealed, CLOSES);
        drop(flow);
        self.carry(flight);
        self.wait_until(end)
    }
}

impl Flow {
    /// The end of what counts as durable besides: nothing, but for a planted bug.
    fn believed(&self) -> u64 {
        if !is_planted(LogBug::OvertakenIsDurable) {
            return 0;
        }
        let landed = self.flights.iter().filter_map(|(_, sealed)| sealed.as_ref());
        landed.map(|sealed| sealed.numbers.end).max().unwrap_or(0)
    }

    /// Why nothing more is taken.
    fn failure(&self) -> LogError {
        self.poison.clone().map_or(LogError::Closed, |cause| LogError::Poisoned { cause })
    }
}

/// There is no room for so many bytes.
fn no_room(bytes: u64) -> impl FnOnce(io::Error) -> LogError {
    move |source| match is_full(&source) {
        true => LogError::Full { bytes, source },
        false => LogError::io("making room in the log")(source),
    }
}

/// Sealed blocks on their way to the device.
pub(crate) struct Flight<'a> {
    shared: &'a Shared,
    sealed: Option<SealedBlocks>,
    flags: u8,
}

impl Flight<'_> {
    /// Carries the blocks, and lands.
    fn run(self) {
        let mut stage = Stage::Taken;
        loop {
            match self.go_on(stage) {
                Stage::Ended(result) => return self.land(result),
                next => stage = next,
            }
        }
    }

    /// Has the device do its next part. Returns how far the flight is then.
    fn go_on(&self, stage: Stage) -> Stage {
        match stage {
            Stage::Taken => match self.write() {
                Ok(Written::Durable) => Stage::Ended(Ok(())),
                Ok(Written::Cached) if is_planted(LogBug::EarlyAcknowledgement) => {
                    Stage::Ended(Ok(()))
                }
                Ok(Written::Cached) => Stage::Written,
                Err(cause) => Stage::Ended(Err(cause)),
            },
            Stage::Written => Stage::Ended(self.sync()),
            ended @ Stage::Ended(_) => ended,
        }
    }

    /// Writes the blocks.
    pub(crate) fn write(&self) -> Result<Written, String> {
        let Shared { device, ring, incarnation, .. } = self.shared;
        let Some(sealed) = &self.sealed else { return Ok(Written::Durable) };
        ring.finish(sealed, device.identity(), *incarnation, self.flags);
        let first = sealed.numbers.start;
        let is_over_torn = self.shared.torn && first == self.shared.start;
        let blotted = if is_over_torn { self.blot() } else { Ok(()) };
        let written = blotted.and_then(|()| device.append(first, ring.parts(sealed)));
        written.map_err(|error| format!("writing at {} failed ({error})", Lsn::of_block(first)))
    }

    /// Writes over what an earlier opening left in part in the first block's place: a first block
    /// that is torn, too, could complete it, and what an opening did not find would come back.
    #[cold]
    #[inline(never)]
    fn blot(&self) -> io::Result<()> {
        let Shared { device, start, .. } = self.shared;
        if device.append(*start, [&[Block::noise()], &[]])? == Written::Cached {
            device.sync()?;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) -> Result<(), String> {
        let synced = self.shared.device.sync();
        synced.map_err(|error| format!("a sync failed ({error})"))
    }

    pub(crate) fn land(mut self, result: Result<(), String>) {
        if let Some(sealed) = self.sealed.take() {
            self.shared.land(sealed, result);
        }
    }
}

impl Drop for Flight<'_> {
    /// A device that panics leaves its blocks unwritten.
    fn drop(&mut self) {
        if let Some(sealed) = self.sealed.take() {
            self.shared.land(sealed, Err("a write was abandoned".into()));
        }
    }
}
