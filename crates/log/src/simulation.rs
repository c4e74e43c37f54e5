//! Crashes by the ten thousand: a log on the simulated device, driven step by step from a seed,
//! with
//! the flights in any order, and a reference that says what must and what may be found afterwards.
//!
//! `VELLUM_SEED=N` runs one seed, `VELLUM_SOAK=1` a hundred times as many.
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::Lsn;
use crate::device::{SimulatedDevice, SimulatedFault, SimulatedOptions, Written};
use crate::error::LogError;
use crate::flights::Flight;
use crate::log::{Log, LogOptions};
use crate::scan::{EndReason, Record};

const SEEDS: u64 = 4_000;

/// Lives of a log between two crashes, for each seed.
const LIVES: u64 = 8;

/// What was appended, in order, and is not known to be lost.
#[derive(Default)]
struct Reference {
    appended: Vec<(Lsn, u64)>,
    /// The greatest number that was acknowledged.
    acknowledged: Option<Lsn>,
    /// Records before this may be gone.
    trimmed: Option<Lsn>,
    next: u64,
}

/// The bytes of a record: anything that differs from all others.
fn content(number: u64) -> Vec<u8> {
    let longest = [3, 100, 1000, 5000, 12000][(number % 5) as usize];
    let len = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend((0..len % longest).map(|at| (number.wrapping_mul(31) + at) as u8));
    bytes
}

impl Reference {
    /// Compares what an opening found.
    fn check(&mut self, from: Option<Lsn>, found: &[Record]) {
        let needed = from.or(self.trimmed).unwrap_or(Lsn(0));
        let first = found.first().map_or(needed, |record| record.lsn);
        let begin = self.appended.partition_point(|(lsn, _)| *lsn < first);
        let missing = self.appended[..begin].iter().find(|(lsn, _)| *lsn >= needed);
        let unacknowledged = |lsn| self.acknowledged.is_none_or(|last| lsn > last);
        if let Some((lsn, number)) = missing {
            assert!(unacknowledged(*lsn), "the first ones are lost: {number} at {lsn}");
        }
        let expected = &self.appended[begin..];
        assert!(found.len() <= expected.len(), "invented: {:?}", found[expected.len()].lsn);
        for (record, (lsn, number)) in found.iter().zip(expected) {
            assert_eq!(record.lsn, *lsn, "record {number} was appended elsewhere");
            assert!(record.bytes == content(*number), "record {number} at {lsn} is another");
        }
        if let Some((lsn, number)) = expected.get(found.len()) {
            assert!(unacknowledged(*lsn), "acknowledged and lost: {number} at {lsn}");
        }
        self.appended.truncate(begin + found.len());
    }

    /// All before `durable` was acknowledged.
    fn acknowledge(&mut self, durable: Lsn) {
        let count = self.appended.partition_point(|(lsn, _)| *lsn < durable);
        if let Some((lsn, _)) = self.appended[..count].last() {
            self.acknowledged = self.acknowledged.max(Some(*lsn));
        }
    }
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

/// One seed. Returns how often the log crashed.
fn run(seed: u64) -> u64 {
    let device = SimulatedDevice::new(SimulatedOptions {
        seed,
        segment_blocks: 4 + seed % 9,
        segments: 4 + seed / 9 % 3,
        durable_appends: seed.is_multiple_of(4),
        in_flight: 1 + (seed / 2 % 4) as usize,
    });
    let mut device = Arc::new(device);
    let mut reference = Reference::default();
    let mut crashes = 0;
    for _ in 0..LIVES {
        let opened = open(&device, &mut reference);
        if let Some(log) = opened {
            live(&log, &device, &mut reference);
            if device.random_below(8) == 0 {
                close(log, &mut reference);
            }
        }
        let powered = device.random_below(4) > 0;
        device = Arc::new(if powered { device.crash() } else { device.kill() });
        crashes += 1;
    }
    open(&device, &mut reference);
    crashes
}

/// Opens the log; now and then the device fails meanwhile.
fn open(device: &Arc<SimulatedDevice>, reference: &mut Reference) -> Option<Log> {
    let random = |limit| device.random_below(limit);
    if random(20) == 0 {
        let fault = [SimulatedFault::Sync, SimulatedFault::Append][random(2) as usize];
        device.fail(fault, 1 + random(3));
    }
    let from = reference.acknowledged.filter(|_| random(2) == 0);
    let mut found = Vec::new();
    let options = LogOptions { ring_bytes: (4 << random(3)) * 4096, in_flight: None };
    let opened = Log::recover(device.clone(), &options, from, |record| {
        found.push(record);
        Ok(())
    });
    match opened {
        Ok((log, end)) => {
            reference.check(from, &found);
            assert!(end.why != EndReason::Limit);
            Some(log)
        }
        Err(LogError::Io { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn close(log: Log, reference: &mut Reference) {
    let end = log.end();
    match log.close() {
        Ok(()) => reference.acknowledge(end),
        Err(LogError::Poisoned { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

/// What happens between an opening and a crash.
fn live(log: &Log, device: &SimulatedDevice, reference: &mut Reference) {
    let random = |limit| device.random_below(limit);
    let mut flights: Vec<Under<'_>> = Vec::new();
    let called = Arc::new(AtomicU64::new(0));
    for _ in 0..random(120) {
        match random(16) {
            0..=5 => append(log, reference, &called),
            6..=7 => {
                let taken = log.take_flight().map(|flight| Under { flight, done: Stage::Taken });
                flights.extend(taken);
            }
            8..=12 if !flights.is_empty() => {
                let index = random(flights.len() as u64) as usize;
                step(&mut flights, index);
            }
            13 => {
                device.set_full(random(2) == 0);
                // What is durable is no longer needed, but for the last of it.
                let last = reference.acknowledged.filter(|_| random(2) == 0);
                if let Some(last) = last {
                    log.trim(last).unwrap();
                    reference.trimmed = Some(last);
                }
            }
            14 if random(10) == 0 => {
                let fault = [SimulatedFault::Sync, SimulatedFault::Append][random(2) as usize];
                device.fail(fault, 1 + random(4));
            }
            15 if random(4) == 0 => read_back(log, reference),
            _ => {}
        }
        reference.acknowledge(log.durable());
        let called = Lsn(called.load(Ordering::Relaxed));
        assert!(called == Lsn(0) || Some(called) <= reference.acknowledged, "called too early");
    }
    // The crash comes with flights in the air.
    if random(3) == 0 {
        while !flights.is_empty() {
            step(&mut flights, 0);
        }
        reference.acknowledge(log.durable());
    }
}

fn append(log: &Log, reference: &mut Reference, called: &Arc<AtomicU64>) {
    let number = reference.next;
    let bytes = content(number);
    let (head, tail) = bytes.split_at(bytes.len() / 3);
    match log.try_append(&[head, tail]) {
        Ok(lsn) => {
            assert!(reference.appended.last().is_none_or(|(last, _)| *last < lsn));
            reference.appended.push((lsn, number));
            reference.next += 1;
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
        Err(LogError::TooLong { .. }) => reference.next += 1,
        Err(LogError::Full { .. } | LogError::Busy { .. } | LogError::Poisoned { .. }) => {}
        Err(error) => panic!("{error}"),
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

/// What is durable can be read while the log is open.
fn read_back(log: &Log, reference: &Reference) {
    let count = reference.appended.partition_point(|(lsn, _)| *lsn < log.durable());
    let found: Vec<_> = log.scan(None).unwrap().map(Result::unwrap).collect();
    let expected = &reference.appended[count - found.len().min(count)..count];
    assert!(found.len() <= expected.len(), "more than was appended is read");
    for (record, (lsn, number)) in found.iter().zip(expected) {
        assert!(record.lsn == *lsn && record.bytes == content(*number), "{number} is another");
    }
    if let Some((lsn, number)) = expected.last() {
        assert_eq!(log.read(*lsn).unwrap(), content(*number));
    }
}

thread_local! {
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// Says which seed it was if it fails.
struct Named;

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("replay with VELLUM_SEED={}", SEED.get());
        }
    }
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_is_invented() {
    let _named = Named;
    let seeds = match env::var("VELLUM_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..SEEDS * if env::var_os("VELLUM_SOAK").is_some() { 100 } else { 1 },
    };
    let mut crashes = 0;
    for seed in seeds {
        SEED.set(seed);
        crashes += run(seed);
    }
    println!("{crashes} crashes");
}
