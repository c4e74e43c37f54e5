//! Crashes by the ten thousand: the log, with its files, in a simulated folder, driven step by step
//! from a seed, with the flights in any order, and a reference that says what must and what may be
//! found afterwards.
//!
//! `VELLUM_SEED=N` runs one seed, `VELLUM_SIM_SEEDS=N` so many, `VELLUM_SOAK=1` a hundred times as
//! many.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::env;
use std::panic::catch_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::{BLOCK_BYTES, Block, Head, Lsn, Unsound};
use crate::device::{
    FileLog, FileLogOptions, LogDevice as _, Planted, SimulatedDisk, SyncMethod, Written, is_full,
};
use crate::error::LogError;
use crate::flights::Flight;
use crate::log::{Log, LogOptions};
use crate::reference::{Reference, content};
use crate::scan::{End, EndReason, Record};

const SEEDS: u64 = 2_000;

/// Lives of a log between two crashes, for each seed.
const LIVES: u64 = 12;

/// A log that is open, and its files.
struct Open {
    log: Log,
    device: Arc<FileLog>,
    end: End,
    found: Vec<Record>,
}

/// A flight and how far it is.
struct Under<'a> {
    flight: Flight<'a>,
    done: Stage,
}

#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Taken,
    Written,
    Failed,
    Durable,
}

/// A seed that runs.
struct Run {
    disk: SimulatedDisk,
    files: FileLogOptions,
    planted: Option<Planted>,
    reference: Reference,
    /// Faults before this opening.
    faults: u64,
}

impl Run {
    fn new(seed: u64, planted: Option<Planted>) -> Run {
        let disk = SimulatedDisk::new(seed, planted);
        let segment_bytes = (4 + disk.random_below(5)) * BLOCK_BYTES as u64;
        let most_bytes = segment_bytes * (2 + disk.random_below(6));
        let files = FileLogOptions { segment_bytes, most_bytes, sync_method: None };
        Run { disk, files, planted, reference: Reference::default(), faults: 0 }
    }

    fn random(&self, limit: u64) -> u64 {
        self.disk.random_below(limit)
    }

    /// All lives. Returns how often the log crashed.
    fn run(&mut self) -> u64 {
        let mut crashes = 0;
        for _ in 0..LIVES {
            match self.random(6) {
                0 => self.disk.fail_after(self.random(200)),
                1 => self.disk.end_after(self.random(40)),
                2 => self.disk.end_after(self.random(200)),
                _ => {}
            }
            if let Some(open) = self.open() {
                let has_landed = self.live(&open);
                if has_landed && self.random(3) == 0 {
                    self.close(open);
                }
            }
            // The folder is opened again as it is, or after a crash.
            let powered_off = self.random(3) > 0;
            if self.disk.has_ended() || self.random(4) > 0 {
                self.disk.restart(powered_off);
                crashes += 1;
            }
            if self.random(4) == 0 {
                self.damage();
            }
        }
        self.disk.restart(true);
        // A write-back that failed is told once.
        while self.open().is_none() {}
        self.is_as_before();
        crashes
    }

    /// A failure without a cause is one of the log's.
    fn excuse(&self, error: &LogError) {
        let has_cause = self.disk.has_ended() || self.disk.faults() > self.faults;
        assert!(has_cause, "nothing has failed: {error}");
    }

    /// Opens the log.
    fn open(&mut self) -> Option<Open> {
        self.faults = self.disk.faults();
        let acknowledged = self.reference.appended.iter().map(|(lsn, _)| *lsn);
        let acknowledged = acknowledged.filter(|lsn| {
            Some(*lsn) <= self.reference.acknowledged && Some(*lsn) >= self.reference.trimmed
        });
        let acknowledged: Vec<_> = acknowledged.collect();
        let nth = self.random(2 * acknowledged.len() as u64);
        let from = acknowledged.get(nth as usize).copied();
        match self.try_open(&self.disk, from) {
            Ok(open) => {
                self.reference.check(from, &open.found);
                assert!(open.end.why != EndReason::Limit);
                Some(open)
            }
            Err(error @ LogError::Io { .. }) => {
                self.excuse(&error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn try_open(&self, disk: &SimulatedDisk, from: Option<Lsn>) -> Result<Open, LogError> {
        let mut files = self.files.clone();
        files.sync_method = Some(SyncMethod::ALL[self.random(4) as usize]);
        let device = FileLog::open_in(Path::new("log"), &files, || disk.folder())?;
        let (device, mut found) = (Arc::new(device), Vec::new());
        let options = LogOptions {
            ring_bytes: (4 << self.random(3)) * BLOCK_BYTES,
            in_flight: Some(1 + self.random(4) as usize),
        };
        let (log, end) = Log::recover(device.clone(), &options, from, false, |record| {
            found.push(record.to_record());
            Ok::<_, LogError>(())
        })?;
        Ok(Open { log, device, end, found })
    }

    /// Openings that write nothing change nothing, crash or not. Returns where the log ends.
    fn is_as_before(&mut self) -> End {
        let open = |run: &Run| run.try_open(&run.disk, None).unwrap();
        let first = open(self);
        let (end, found) = (first.end, first.found);
        drop((first.log, first.device));
        self.reference.check(None, &found);
        let before = self.disk.contents();
        for _ in 0..2 {
            let again = open(self);
            assert!(again.end == end && again.found == found, "{:?} {end:?}", again.end);
            drop((again.log, again.device));
            self.disk.restart(true);
            assert!(self.disk.contents() == before, "an opening has changed something");
        }
        end
    }

    fn close(&mut self, open: Open) {
        let end = open.log.end();
        match open.log.close() {
            Ok(()) => self.reference.acknowledge(end),
            Err(error @ LogError::Poisoned { .. }) => self.excuse(&error),
            Err(error) => panic!("{error}"),
        }
    }

    /// What happens between an opening and a crash, which may come with flights in the air. Returns
    /// whether it does not.
    fn live(&mut self, open: &Open) -> bool {
        let log = &open.log;
        let mut flights: Vec<Under<'_>> = Vec::new();
        let called = Arc::new(AtomicU64::new(0));
        for _ in 0..self.random(4) * 30 {
            match self.random(16) {
                0..=5 => self.append(log, &called),
                6..=7 => {
                    let taken = log.take_flight();
                    flights.extend(taken.map(|flight| Under { flight, done: Stage::Taken }));
                }
                8..=12 if !flights.is_empty() => {
                    let index = self.random(flights.len() as u64) as usize;
                    step(&mut flights, index);
                }
                13 => self.trim(open),
                14 if self.random(3) == 0 => {
                    let room = [u64::MAX, 0, 5 * BLOCK_BYTES as u64, 60_000];
                    self.disk.set_room(room[self.random(4) as usize]);
                }
                15 if self.random(4) == 0 && !self.disk.has_ended() => self.read_back(log),
                15 => self.prepare(open),
                _ => {}
            }
            self.reference.acknowledge(log.durable());
            let called = Lsn(called.load(Ordering::Relaxed));
            let is_known = called == Lsn(0) || Some(called) <= self.reference.acknowledged;
            assert!(is_known, "called too early");
        }
        if self.random(3) == 0 {
            while !flights.is_empty() {
                step(&mut flights, 0);
            }
            self.reference.acknowledge(log.durable());
        }
        flights.is_empty()
    }

    /// Has the device do a step of the next segment.
    fn prepare(&self, open: &Open) {
        let faults = self.disk.faults();
        match open.device.prepare() {
            Ok(_) => {}
            Err(error) if is_full(&error) => assert_eq!(self.disk.faults(), faults, "{error}"),
            Err(source) => self.excuse(&LogError::io("a step of a segment")(source)),
        }
    }

    /// Gives up what is durable, all of it now and then.
    fn trim(&mut self, open: &Open) {
        let to = match self.random(4) {
            0 => open.log.end(),
            1 => open.log.durable(),
            2 => self.reference.acknowledged.unwrap_or(Lsn(0)),
            _ => {
                let nth = self.random(self.reference.appended.len() as u64) as usize;
                self.reference.appended.get(nth).map_or(Lsn(0), |(lsn, _)| *lsn)
            }
        };
        if self.planted == Some(Planted::TrimTakesAll) {
            open.device.trim(to.min(open.log.durable()).block()).unwrap();
        } else {
            open.log.trim(to).unwrap();
        }
        let durable = to.min(open.log.durable());
        self.reference.trimmed = self.reference.trimmed.max(Some(durable));
    }

    fn append(&mut self, log: &Log, called: &Arc<AtomicU64>) {
        let number = self.reference.next;
        let bytes = content(number);
        let (head, tail) = bytes.split_at(bytes.len() / 3);
        let faults = self.disk.faults();
        match log.try_append(&[head, tail]) {
            Ok(lsn) => {
                let appended = &mut self.reference.appended;
                assert!(appended.last().is_none_or(|(last, _)| *last < lsn));
                appended.push((lsn, number));
                self.reference.next += 1;
                let called = Arc::clone(called);
                log.on_durable(
                    lsn,
                    Box::new(move |result| {
                        if result.is_ok() {
                            called.fetch_max(lsn.0, Ordering::Relaxed);
                        }
                    }),
                );
            }
            Err(LogError::TooLong { .. }) => self.reference.next += 1,
            Err(LogError::Busy { .. }) => {}
            Err(LogError::Full { source, .. }) => {
                assert_eq!(self.disk.faults(), faults, "full, and failed for good: {source}");
            }
            Err(error @ (LogError::Poisoned { .. } | LogError::Io { .. })) => self.excuse(&error),
            Err(error) => panic!("{error}"),
        }
    }

    /// What is durable can be read while the log is open.
    fn read_back(&self, log: &Log) {
        let appended = &self.reference.appended;
        let count = appended.partition_point(|(lsn, _)| *lsn < log.durable());
        let Ok(found) = log.scan(None).unwrap().collect::<Result<Vec<_>, _>>() else {
            return assert!(self.disk.has_ended());
        };
        let expected = &appended[count - found.len().min(count)..count];
        assert!(found.len() <= expected.len(), "more than was appended is read");
        for (record, (lsn, number)) in found.iter().zip(expected) {
            assert!(record.lsn == *lsn && record.bytes == content(*number), "{number} is another");
        }
    }
}

/// A flight goes on.
fn step(flights: &mut Vec<Under<'_>>, index: usize) {
    let under = &mut flights[index];
    under.done = match under.done {
        Stage::Taken => match under.flight.write() {
            Ok(Written::Durable) => Stage::Durable,
            Ok(Written::Cached) => Stage::Written,
            Err(_) => Stage::Failed,
        },
        Stage::Written => match under.flight.sync() {
            Ok(()) => Stage::Durable,
            Err(_) => Stage::Failed,
        },
        done => {
            let result = if done == Stage::Durable { Ok(()) } else { Err("planned".into()) };
            return flights.swap_remove(index).flight.land(result);
        }
    };
}

/// A file of the log as it is on the disk.
struct Segment {
    name: String,
    number: u64,
    /// The oldest segment when it was made.
    oldest: u64,
    /// The heads of its blocks that are sound: of this log, and of a place in this segment.
    sound: Vec<Head>,
    /// A block was written in part.
    is_torn: bool,
}

impl Run {
    /// The segments of the log, in order.
    fn segments(&self) -> Vec<Segment> {
        let blocks = self.files.segment_bytes / BLOCK_BYTES as u64 - 1;
        let segment = |(name, bytes): (String, Vec<u8>)| {
            let [log, number, oldest] =
                [16, 24, 40].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
            let places = number * blocks..(number + 1) * blocks;
            let read = |(place, bytes): (u64, &[u8])| {
                Head::expect(&Block(bytes.try_into().unwrap()), log, place)
            };
            let heads = places.zip(bytes.chunks(BLOCK_BYTES).skip(1)).map(read);
            let heads: Vec<_> = heads.collect();
            let torn = [Err(Unsound::Checksum), Err(Unsound::NoBlock)];
            let is_torn = heads.iter().any(|head| torn.contains(head));
            let sound = heads.into_iter().flatten().collect();
            Segment { name, number, oldest, sound, is_torn }
        };
        let files = self.disk.contents().into_iter();
        let mut all: Vec<_> =
            files.filter(|(name, _)| !name.ends_with("tmp")).map(segment).collect();
        all.sort_by_key(|segment| segment.number);
        all
    }

    /// Damages copies of the disk: what cannot be told from an end is known, and no more.
    fn damage(&mut self) {
        self.disk.restart(false);
        // A write-back that failed is told once.
        while self.open().is_none() {}
        let end = self.is_as_before();
        let blocks = self.files.segment_bytes / BLOCK_BYTES as u64 - 1;
        let segments = self.segments();
        let Some(newest) = segments.last() else { return };
        let live: Vec<_> = segments.iter().filter(|one| one.number >= newest.oldest).collect();
        let numbers: BTreeSet<_> = live.iter().map(|one| one.number).collect();
        assert!(numbers.iter().copied().eq(newest.oldest..=newest.number), "{numbers:?}");

        // A file that is gone.
        if live.len() > 1 {
            let gone = live[self.random(live.len() as u64 - 1) as usize];
            let disk = self.disk.copy();
            disk.remove(&gone.name);
            self.is_damage(&disk, gone.number * blocks);
        }
        // A block that was durable, as a later block says.
        let durable = live.iter().flat_map(|one| &one.sound).map(|head| head.durable).max();
        let begin = newest.oldest * blocks;
        if let Some(blocks_known) = durable.unwrap_or(0).checked_sub(begin).filter(|all| *all > 0) {
            let block = begin + self.random(blocks_known);
            let name = &live[(block / blocks - newest.oldest) as usize].name;
            let disk = self.disk.copy();
            let sector = (block % blocks + 1) as usize * 8 + self.random(8) as usize;
            let kind = self.random(3);
            disk.damage(name, sector, [None, Some([0x5a; 512]), Some([0; 512])][kind as usize]);
            if disk.contents() != self.disk.contents() || kind == 0 {
                self.is_damage(&disk, block);
            }
        }
        // A head.
        let lost = &segments[self.random(segments.len() as u64) as usize];
        let disk = self.disk.copy();
        disk.damage(&lost.name, 0, [None, Some([0x5a; 512])][self.random(2) as usize]);
        let faults = disk.faults();
        let mut opened = self.try_open(&disk, None);
        while matches!(opened, Err(LogError::Io { .. })) && disk.faults() > faults {
            // The write-back of the new head failed, and that is told once.
            opened = self.try_open(&disk, None);
        }
        match opened {
            Ok(open) => {
                assert_eq!(open.end.lsn, end.lsn, "the head of {}", lost.name);
                self.reference.clone().check(None, &open.found);
            }
            // No block tells which segment it was: made ahead, of a new file or of a recycled one.
            Err(LogError::Unfit { .. } | LogError::Damaged { .. }) if lost.sound.is_empty() => {}
            // Or one does that may be older than the one that is torn.
            Err(LogError::Damaged { .. }) if lost.is_torn => {}
            Err(error) => panic!("the head of {}: {error}", lost.name),
        }
    }

    fn is_damage(&self, disk: &SimulatedDisk, block: u64) {
        let error = self.try_open(disk, None).err();
        let at = match &error {
            Some(LogError::Damaged { lsn, .. }) => lsn.block(),
            _ => panic!("block {block} is damaged, and the opening says {error:?}"),
        };
        assert_eq!(at, block, "{error:?}");
    }
}

/// Says which seed it was if it fails.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("replay with VELLUM_SEED={}", self.0);
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().and_then(|number| number.parse().ok())
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_is_invented() {
    let soak = if env::var_os("VELLUM_SOAK").is_some() { 100 } else { 1 };
    let seeds = match number("VELLUM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("VELLUM_SIM_SEEDS").unwrap_or(SEEDS * soak),
    };
    let mut crashes = 0;
    for seed in seeds {
        let _named = Named(seed);
        crashes += Run::new(seed, None).run();
    }
    println!("{crashes} crashes");
}

/// The simulation finds what it is there to find.
#[test]
fn planted_mistakes_are_found() {
    use Planted::*;
    let planted = [
        FolderNotSynced,
        AboveNotSynced,
        HeadNotSynced,
        OldHead,
        BlocksNotSynced,
        WritesNotDurable,
        FailedSyncIgnored,
        OpeningNotSynced,
        CacheBelieved,
        ChecksumNotChecked,
        IncarnationNotChecked,
        TrimTakesAll,
    ];
    for planted in planted {
        let finds = |seed: &u64| catch_unwind(|| Run::new(*seed, Some(planted)).run()).is_err();
        let found = (0..SEEDS).find(finds);
        println!("{planted:?} is found with seed {found:?}");
        assert!(found.is_some(), "{planted:?} is not found by {SEEDS} seeds");
    }
}
