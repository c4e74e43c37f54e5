//! A machine in memory: a file and a log that lose power, or whose process is killed, at any
//! operation, and that fail as a seed plans it.
//!
//! A write reaches the cache at once and the storage at the next sync. A loss of power leaves some
//! of what was not synced, some of it torn into sectors: each sector has any of the contents that
//! it had since the last sync. The end of the process leaves the cache as it is.
//!
//! A log may be slow: then its flights go on now and then, while the machine does other things.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use vellum::{Device, DeviceInfo, MemoryDevice, Store};
use vellum_log::{Block, LogDevice, Pilot, SimulatedDevice, SimulatedFault, Written};
use vellum_pool::device::{ReadDone, ReadRange, Surface, Write};
use vellum_pool::{PAGE_SIZE, PageCopy, PageRef};
use vellum_testing::random::Random;

use crate::failure::{Failure, Outcome};
use crate::story::tell;

/// The part of a write that the storage writes as a whole.
const SECTOR: usize = 512;

/// The most crashes that are noted before the caller takes them.
const CRASHES_MAX: usize = 3;

/// A slow log is idle long before it has had so many turns.
const TURNS_MAX: u32 = 100_000;

/// How a machine ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// What was not synced may be lost, or torn.
    PowerLoss,
    /// The process ends. The cache stays.
    Kill,
    /// As a loss of power, and one write goes to another place of the file.
    MisdirectedWrite,
    /// As a loss of power, and one block of the log goes to the place of another one.
    MisdirectedBlock,
}

/// What is left of a machine after its end.
pub struct Crash {
    /// How the machine ended.
    pub end: End,
    /// The counts that the workload had [noted](Machine::note) by then.
    pub noted: (usize, usize),
    storage: Storage,
    cache: Vec<u8>,
    log: SimulatedDevice,
}

impl Crash {
    /// Whether a store goes on after it.
    pub fn can_go_on(&self) -> bool {
        matches!(self.end, End::PowerLoss | End::Kill)
    }
}

impl fmt::Debug for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Crash { end, noted, .. } = self;
        f.debug_struct("Crash").field("end", end).field("noted", noted).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default)]
struct Storage {
    durable: Vec<u8>,
    unsynced: Vec<Unsynced>,
}

#[derive(Clone, Debug)]
enum Unsynced {
    Write(usize, Vec<u8>),
    Resize(usize),
}

/// An operation of the file or of the log that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A read of the file.
    Read,
    /// A write to the file.
    Write,
    /// A sync of the file.
    Sync,
    /// A write to the log.
    LogAppend,
    /// A sync of the log.
    LogSync,
}

struct State {
    random: Random,
    storage: Storage,
    noted: (usize, usize),
    crashes: Vec<Crash>,
    /// Once in so many operations a crash is noted.
    crash_once_in: u64,
    /// How the noted crashes end, one of these.
    ends: &'static [End],
    fault: Option<(Fault, u64)>,
    had_fault: bool,
    /// Every read of the file fails.
    is_unreadable: bool,
    /// The length of a full disk in pages.
    pages_max: u64,
    /// The process has ended: its threads do nothing any more.
    is_dead: bool,
    /// Of all operations: equal for equal runs.
    trace: u64,
    slow: Option<Slow>,
    /// So many changes are durable, as callbacks of the store have said.
    acknowledged: usize,
    /// Callbacks that the store has, less those that it has called.
    unanswered: i64,
}

/// A log whose device takes its time.
struct Slow {
    pilot: Pilot,
    random: Random,
    /// Once in so many operations something goes on.
    turn_once_in: u64,
}

/// See the module's documentation.
pub struct Machine {
    memory: MemoryDevice,
    log: Arc<SimulatedDevice>,
    state: Mutex<State>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").finish_non_exhaustive()
    }
}

impl Machine {
    /// A machine with an empty file.
    pub fn new(log: SimulatedDevice, seed: u64) -> Arc<Machine> {
        Machine::with(Vec::new(), Storage::default(), log, seed)
    }

    /// The machine after a crash.
    pub fn restarted(crash: Crash, seed: u64) -> Arc<Machine> {
        Machine::with(crash.cache, crash.storage, crash.log, seed)
    }

    fn with(cache: Vec<u8>, storage: Storage, log: SimulatedDevice, seed: u64) -> Arc<Machine> {
        let state = State {
            random: Random(seed),
            storage,
            noted: (0, 0),
            crashes: Vec::new(),
            crash_once_in: u64::MAX,
            ends: &[End::PowerLoss],
            fault: None,
            had_fault: false,
            is_unreadable: false,
            pages_max: u64::MAX,
            is_dead: false,
            trace: 0,
            slow: None,
            acknowledged: 0,
            unanswered: 0,
        };
        let memory = MemoryDevice::from_snapshot(cache);
        Arc::new(Machine { memory, log: Arc::new(log), state: Mutex::new(state) })
    }

    /// The device of the log.
    pub fn log_device(self: &Arc<Machine>) -> Arc<dyn LogDevice> {
        Arc::new(MachineLog(self.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on about one in so many operations notes a crash, with one of these ends.
    pub fn crash_once_in(&self, operations: u64, ends: &'static [End]) {
        let mut state = self.lock();
        (state.crash_once_in, state.ends) = (operations, ends);
    }

    /// Crashes from now on have these counts.
    pub fn note(&self, (durable, all): (usize, usize)) {
        let mut state = self.lock();
        state.noted = (durable.max(state.acknowledged), all);
    }

    /// From now on the log of this store takes its time: once in so many operations of the machine
    /// something of it goes on. No changes are acknowledged yet.
    pub fn slow_down(&self, store: &Store, turn_once_in: u64, seed: u64) {
        let mut random = Random(seed);
        let mut of_log = Random(random.next());
        // The last one is the flight that has gone on last, or a new one: it overtakes the others.
        let rush_once_in = of_log.pick(&[2, 4, u64::MAX]);
        let pilot =
            store.slow_log_down(Box::new(move |count| match of_log.once_in(rush_once_in) {
                true => count.saturating_sub(2),
                false => of_log.index(count),
            }));
        let mut state = self.lock();
        state.acknowledged = 0;
        state.slow = pilot.map(|pilot| Slow { pilot, random, turn_once_in });
    }

    /// A callback for the store, which is called once so many changes are durable.
    pub fn acknowledgement(
        self: &Arc<Machine>,
        changes: usize,
    ) -> impl FnOnce(vellum::Result<()>) + Send + 'static {
        let machine = self.clone();
        move |durable| {
            tell(|| format!("  {changes} changes are acknowledged: {durable:?}"));
            let mut state = machine.lock();
            state.unanswered -= 1;
            if durable.is_ok() {
                state.acknowledged = state.acknowledged.max(changes);
                state.noted.0 = state.noted.0.max(changes);
            }
        }
    }

    /// The store has taken a callback.
    pub fn asked(&self) {
        self.lock().unanswered += 1;
    }

    /// The callbacks that the store has taken and has not called. Fewer than none, if it has called
    /// some twice.
    pub fn unanswered(&self) -> i64 {
        self.lock().unanswered
    }

    /// Time passes, and perhaps something of a slow log goes on.
    pub fn pass(&self) {
        let mut state = self.lock();
        let is_dead = state.is_dead;
        let Some(Slow { pilot, random, turn_once_in }) = &mut state.slow else { return };
        if is_dead || !random.once_in(*turn_once_in) {
            return;
        }
        let (pilot, time) = (pilot.clone(), Duration::from_micros(random.below(500)));
        drop(state);
        pilot.pass(time);
    }

    /// Time passes until nothing of a slow log is in flight or due. Returns whether the log is
    /// still sound: then all that was to become durable soon is durable. `None` without a slow log.
    pub fn calm(&self) -> Option<Outcome<bool>> {
        let pilot = self.lock().slow.as_ref()?.pilot.clone();
        let mut turns = 0..TURNS_MAX;
        while pilot.is_busy() && turns.next().is_some() {
            pilot.pass(Duration::from_millis(1));
        }
        let is_calm = !pilot.is_busy();
        let never = || Failure::new("the log still has something to do after a long time");
        Some(is_calm.then(|| pilot.takes_records()).ok_or_else(never))
    }

    /// The crashes that were noted.
    pub fn take_crashes(&self) -> Vec<Crash> {
        std::mem::take(&mut self.lock().crashes)
    }

    /// A crash now.
    pub fn crash_now(&self, end: End) -> Crash {
        let mut state = self.lock();
        self.crash(&mut state, end)
    }

    /// The `nth` operation of this kind from now on fails; 1 is the next.
    pub fn fail(&self, fault: Fault, nth: u64) {
        match fault {
            Fault::LogAppend => self.log.fail(SimulatedFault::Append, nth),
            Fault::LogSync => self.log.fail(SimulatedFault::Sync, nth),
            _ => self.lock().fault = Some((fault, nth)),
        }
    }

    /// Whether an operation of the file has failed as planned.
    pub fn had_fault(&self) -> bool {
        self.lock().had_fault
    }

    /// Every read of the file fails, or none does any more.
    pub fn set_unreadable(&self, is_unreadable: bool) {
        self.lock().is_unreadable = is_unreadable;
    }

    /// No fault of the file is planned any more.
    pub fn clear_faults(&self) {
        self.lock().fault = None;
    }

    /// No fault of the log is planned any more. What has failed before still fails.
    pub fn clear_log_fault(&self) {
        self.log.clear_fault();
    }

    /// The disk is full as it is now, or has room again.
    pub fn set_disk_full(&self, is_full: bool) {
        let pages = self.memory.pages().unwrap_or(0);
        self.lock().pages_max = if is_full { pages } else { u64::MAX };
    }

    /// The log gets no more room, or gets it again.
    pub fn set_log_full(&self, is_full: bool) {
        self.log.set_full(is_full);
    }

    /// The process ends: what it does from now on fails.
    pub fn kill(&self) {
        self.lock().is_dead = true;
    }

    /// A number that is the same for equal runs.
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    fn crash(&self, state: &mut State, end: End) -> Crash {
        let noted = state.noted;
        if end == End::Kill {
            let (storage, cache) = (state.storage.clone(), self.memory.snapshot());
            return Crash { end, noted, storage, cache, log: self.log.kill() };
        }
        let mut bytes = state.image();
        if end == End::MisdirectedWrite {
            state.misdirect(&mut bytes);
        }
        let misdirected = (end == End::MisdirectedBlock).then(|| self.log.crash_misdirected());
        let log = misdirected.flatten().unwrap_or_else(|| self.log.crash());
        let storage = Storage { durable: bytes.clone(), unsynced: Vec::new() };
        Crash { end, noted, storage, cache: bytes, log }
    }

    /// An operation begins or has ended: perhaps the power fails here.
    fn perhaps_crash(&self) {
        let mut state = self.lock();
        if state.is_dead || state.crashes.len() >= CRASHES_MAX {
            return;
        }
        // Headers are few, and a crash is likeliest to find something before one is durable.
        let is_at_header = state.storage.ends_with_header();
        let once_in = state.crash_once_in / if is_at_header { 4 } else { 1 };
        if state.random.once_in(once_in.max(2)) {
            let ends = state.ends;
            let is_killed = is_at_header && ends.contains(&End::Kill) && state.random.once_in(2);
            let end = if is_killed { End::Kill } else { state.random.pick(ends) };
            tell(|| format!("  ({end:?} is noted)"));
            let crash = self.crash(&mut state, end);
            state.crashes.push(crash);
        }
    }

    /// Counts an operation. Fails if it is the one to fail, or if the process has ended.
    fn begin(&self, kind: Fault, what: u64) -> io::Result<()> {
        let mut state = self.lock();
        if state.is_dead {
            return Err(io::Error::other("the process has ended"));
        }
        state.trace = Random(state.trace ^ what.rotate_left(kind as u32 * 8)).next();
        if state.is_unreadable && kind == Fault::Read {
            return Err(Errno::IO.into());
        }
        match &mut state.fault {
            Some((fault, nth)) if *fault == kind => {
                *nth -= 1;
                if *nth == 0 {
                    (state.fault, state.had_fault) = (None, true);
                    return Err(Errno::IO.into());
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Machine {
    /// Writes the part of a failed write that arrives, so that reads find what is there.
    fn write_part(&self, at: usize, data: &[u8]) {
        let frames = data.len().div_ceil(PAGE_SIZE);
        if frames == 0 {
            return;
        }
        let page = PageRef::new((at / PAGE_SIZE) as u64, frames as u32);
        let mut copy = PageCopy::zeroed(page);
        let cache = self.memory.snapshot();
        let before = cache.get(at..).unwrap_or_default();
        let len = before.len().min(frames * PAGE_SIZE);
        copy.bytes_mut()[..len].copy_from_slice(&before[..len]);
        copy.bytes_mut()[..data.len()].copy_from_slice(data);
        let (head, body) = copy.bytes().split_at(PAGE_SIZE);
        self.memory.write(&mut [Write::new(page.id.0, [head, body])]);
    }
}

impl State {
    /// What the storage has after a loss of power.
    fn image(&mut self) -> Vec<u8> {
        let State { random, storage, .. } = self;
        let mut bytes = storage.durable.clone();
        let (kept, torn_once_in) = (random.below(5), random.pick(&[2, 8]));
        for unsynced in &storage.unsynced {
            if random.below(4) >= kept {
                continue;
            }
            match unsynced {
                Unsynced::Resize(len) => bytes.resize(*len, 0),
                Unsynced::Write(at, data) => {
                    let is_torn = random.once_in(torn_once_in);
                    write_some(&mut bytes, *at, data, |_| !is_torn || random.once_in(2));
                }
            }
        }
        bytes
    }

    /// One write that was not synced goes elsewhere.
    fn misdirect(&mut self, bytes: &mut [u8]) {
        let State { random, storage, .. } = self;
        let writes = storage.unsynced.iter().filter_map(|unsynced| match unsynced {
            Unsynced::Write(_, data) => Some(data),
            Unsynced::Resize(_) => None,
        });
        let writes: Vec<_> = writes.collect();
        let pages = bytes.len() / PAGE_SIZE;
        if writes.is_empty() || pages == 0 {
            return;
        }
        let data = writes[random.index(writes.len())];
        let at = random.index(pages) * PAGE_SIZE;
        let len = data.len().min(bytes.len() - at);
        bytes[at..at + len].copy_from_slice(&data[..len]);
    }

    /// Some of what was not synced reaches the storage, the rest never does.
    fn sync_some(&mut self) {
        let mut unsynced = std::mem::take(&mut self.storage.unsynced);
        unsynced.retain(|_| self.random.once_in(2));
        self.storage.unsynced = unsynced;
        self.storage.sync();
    }
}

impl Storage {
    /// Whether the newest write is one of a header, and not durable.
    fn ends_with_header(&self) -> bool {
        let last = self.unsynced.last();
        last.is_some_and(|last| matches!(last, Unsynced::Write(at, _) if *at < 2 * PAGE_SIZE))
    }

    fn sync(&mut self) {
        for unsynced in std::mem::take(&mut self.unsynced) {
            match unsynced {
                Unsynced::Resize(len) => self.durable.resize(len, 0),
                Unsynced::Write(at, data) => write_some(&mut self.durable, at, &data, |_| true),
            }
        }
    }
}

/// Writes those sectors that `arrives` names.
fn write_some(bytes: &mut Vec<u8>, at: usize, data: &[u8], mut arrives: impl FnMut(usize) -> bool) {
    bytes.resize(bytes.len().max(at + data.len()), 0);
    for (number, sector) in data.chunks(SECTOR).enumerate() {
        if arrives(number) {
            bytes[at + number * SECTOR..][..sector.len()].copy_from_slice(sector);
        }
    }
}

impl Device for Machine {
    fn read(&self, surface: &Surface, read: ReadRange) -> io::Result<()> {
        self.pass();
        self.begin(Fault::Read, read.pages.start)?;
        self.memory.read(surface, read)
    }

    fn start_reads(&self, surface: &Surface, reads: Vec<(ReadRange, ReadDone)>) {
        for (read, done) in reads {
            self.pass();
            match self.begin(Fault::Read, read.pages.start) {
                Ok(()) => self.memory.start_reads(surface, vec![(read, done)]),
                Err(error) => done.call(Err(error)),
            }
        }
    }

    fn write(&self, writes: &mut [Write<'_>]) {
        self.perhaps_crash();
        for write in &mut *writes {
            self.pass();
            let at = write.page as usize * PAGE_SIZE;
            let begun = self.begin(Fault::Write, write.page);
            tell(|| format!("  write of page {}, {} bytes: {begun:?}", write.page, write.len()));
            let mut data = write.parts.concat();
            if begun.is_err() && self.lock().is_dead {
                write.result = begun;
                continue;
            }
            if begun.is_err() {
                // Some of it arrives.
                let mut state = self.lock();
                let len = state.random.index(data.len() / SECTOR + 1) * SECTOR;
                data.truncate(len);
                self.write_part(at, &data);
                state.storage.unsynced.push(Unsynced::Write(at, data));
                write.result = begun;
                continue;
            }
            self.lock().storage.unsynced.push(Unsynced::Write(at, data));
            self.memory.write(std::slice::from_mut(write));
        }
        self.pass();
        self.perhaps_crash();
    }

    fn sync(&self) -> io::Result<()> {
        self.pass();
        self.perhaps_crash();
        if let Err(error) = self.begin(Fault::Sync, 0) {
            let mut state = self.lock();
            if !state.is_dead {
                state.sync_some();
            }
            return Err(error);
        }
        tell(|| "  sync".into());
        self.lock().storage.sync();
        self.pass();
        self.perhaps_crash();
        Ok(())
    }

    fn pages(&self) -> io::Result<u64> {
        self.memory.pages()
    }

    fn resize(&self, pages: u64) -> io::Result<()> {
        let mut state = self.lock();
        let is_longer = pages > self.memory.pages()?;
        if state.is_dead {
            return Err(io::Error::other("the process has ended"));
        }
        if is_longer && pages > state.pages_max {
            return Err(Errno::NOSPC.into());
        }
        self.memory.resize(pages)?;
        state.storage.unsynced.push(Unsynced::Resize(pages as usize * PAGE_SIZE));
        Ok(())
    }

    fn info(&self) -> DeviceInfo {
        self.memory.info()
    }
}

/// The log of a machine, which loses power between any two operations.
#[derive(Debug)]
struct MachineLog(Arc<Machine>);

impl LogDevice for MachineLog {
    fn identity(&self) -> u64 {
        self.0.log.identity()
    }

    fn scan(&self) -> Range<u64> {
        self.0.log.scan()
    }

    fn extend(&self) -> io::Result<u64> {
        self.0.begin(Fault::LogAppend, u64::MAX)?;
        self.0.log.extend()
    }

    fn append(&self, first: u64, parts: [&[Block]; 2]) -> io::Result<Written> {
        self.0.perhaps_crash();
        self.0.begin(Fault::LogAppend, first)?;
        let count = parts[0].len() + parts[1].len();
        tell(|| format!("  write of {count} blocks of the log from {first} on"));
        let written = self.0.log.append(first, parts);
        self.0.perhaps_crash();
        written
    }

    fn sync(&self) -> io::Result<()> {
        self.0.perhaps_crash();
        self.0.begin(Fault::LogSync, 0)?;
        tell(|| "  sync of the log".into());
        let synced = self.0.log.sync();
        self.0.perhaps_crash();
        synced
    }

    fn read(&self, first: u64, blocks: &mut [Block]) -> io::Result<()> {
        self.0.log.read(first, blocks)
    }

    fn trim(&self, before: u64) -> io::Result<()> {
        self.0.log.trim(before)
    }

    fn taken(&self) -> &AtomicBool {
        self.0.log.taken()
    }

    fn in_flight(&self) -> usize {
        self.0.log.in_flight()
    }
}
