//! YCSB's core workloads A to F (Cooper et al., SoCC'10) with the standard constants: records of
//! ten fields of 100 bytes, scrambled Zipf with 0.99, scans of 1 to 100 records.
//!
//! Keys are hashed numbers, so inserts are at random places. Each run inserts its own numbers; the
//! newest records are those of the run.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use super::values::{Random, fill, key, mix};
use super::zipf::{THETA, Zipf};
use super::{Measured, Operation, Plan, Work, drive};
use crate::engine::{Direction, Engine, Session};

/// Fields of a record, and bytes of each.
const FIELDS: usize = 10;
const FIELD: usize = 100;
const RECORD: usize = FIELDS * FIELD;

/// The longest scan, in records.
const SCAN_MAX: u64 = 100;

/// One of the six.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Half reads, half updates of a field.
    A,
    /// 95 % reads, 5 % updates.
    B,
    /// Reads.
    C,
    /// 95 % reads of the newest, 5 % inserts.
    D,
    /// 95 % scans, 5 % inserts.
    E,
    /// Half reads, half read-modify-writes.
    F,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 6] = [Kind::A, Kind::B, Kind::C, Kind::D, Kind::E, Kind::F];

    /// The number of every 100 operations that are not reads (scans in E).
    fn writes_percent(self) -> u64 {
        match self {
            Kind::A | Kind::F => 50,
            Kind::B | Kind::D | Kind::E => 5,
            Kind::C => 0,
        }
    }
}

/// A YCSB workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ycsb {
    /// Which one.
    pub kind: Kind,
    /// Records that are loaded.
    pub records: u64,
}

/// The state that the threads of a run share.
struct Run {
    kind: Kind,
    records: u64,
    zipf: Zipf,
    /// Numbers of this run's inserts begin here.
    first_insert: u64,
    inserted: Acknowledged,
}

impl Work for Ycsb {
    fn tables(&self) -> Vec<String> {
        vec!["usertable".to_owned()]
    }

    fn bytes(&self) -> u64 {
        self.records * (8 + RECORD as u64)
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        // In little memory, because it counts towards the engine's limit.
        let records = u32::try_from(self.records).context("too many records")?;
        let mut numbers: Vec<u32> = (0..records).collect();
        numbers.sort_unstable_by_key(|number| mix(u64::from(*number)));
        let mut entries = numbers.into_iter().map(u64::from).map(|number| {
            let key = key(mix(number));
            (key.to_vec(), record(number))
        });
        engine.load(0, &mut entries)
    }

    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        let run = Run {
            kind: self.kind,
            records: self.records,
            zipf: Zipf::new(self.records, THETA),
            // No two runs insert the same keys, unless they have the same seed.
            first_insert: (mix(plan.seed) | 1 << 63) & !0xffff_ffff,
            inserted: Acknowledged::default(),
        };
        drive(engine, plan, |_| run.operation())
    }
}

fn record(number: u64) -> Vec<u8> {
    let mut record = vec![0; RECORD];
    fill(number, &mut record);
    record
}

impl Run {
    fn operation(&self) -> Box<Operation<'_>> {
        let mut field = [0; FIELD];
        Box::new(move |session, random| {
            if random.below(100) >= self.kind.writes_percent() {
                match self.kind {
                    Kind::E => self.scan(session, random)?,
                    _ => self.read(session, random)?,
                }
                return Ok(1);
            }
            match self.kind {
                Kind::D | Kind::E => self.insert(session)?,
                Kind::F => {
                    self.read_and_update(session, random)?;
                }
                _ => {
                    fill(random.bits(), &mut field);
                    self.update(session, random, &field)?;
                }
            }
            Ok(1)
        })
    }

    /// The number of an existing record.
    fn choose(&self, random: &mut Random) -> u64 {
        if self.kind != Kind::D {
            return self.zipf.scrambled(random);
        }
        let (age, inserted) = (self.zipf.rank(random), self.inserted.count());
        match age < inserted {
            true => self.first_insert + (inserted - 1 - age),
            false => self.records - 1 - (age - inserted).min(self.records - 1),
        }
    }

    fn read(&self, session: &mut dyn Session, random: &mut Random) -> Result<()> {
        let number = self.choose(random);
        let mut length = 0;
        session.get(0, &key(mix(number)), &mut |value| length = value.len())?;
        expect(number, length)
    }

    fn update(&self, session: &mut dyn Session, random: &mut Random, field: &[u8]) -> Result<()> {
        let number = self.choose(random);
        let at = random.below(FIELDS as u64) as usize * FIELD;
        let mut change = |value: &mut [u8]| value[at..at + FIELD].copy_from_slice(field);
        match session.update(0, &key(mix(number)), &mut change)? {
            true => Ok(()),
            false => expect(number, 0),
        }
    }

    /// Reads a record, then sets a field of it to a value that follows from the read.
    fn read_and_update(&self, session: &mut dyn Session, random: &mut Random) -> Result<()> {
        let number = self.choose(random);
        let at = random.below(FIELDS as u64) as usize * FIELD;
        let (mut field, mut length) = ([0; FIELD], 0);
        session.get(0, &key(mix(number)), &mut |value| {
            length = value.len();
            field.copy_from_slice(&value[at..at + FIELD]);
        })?;
        expect(number, length)?;
        field.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
        let mut change = |value: &mut [u8]| value[at..at + FIELD].copy_from_slice(&field);
        session.update(0, &key(mix(number)), &mut change)?;
        Ok(())
    }

    fn insert(&self, session: &mut dyn Session) -> Result<()> {
        let index = self.inserted.begin();
        let number = self.first_insert + index;
        session.put(0, &key(mix(number)), &record(number))?;
        self.inserted.acknowledge(index);
        Ok(())
    }

    fn scan(&self, session: &mut dyn Session, random: &mut Random) -> Result<()> {
        let from = key(mix(self.choose(random)));
        let mut left = 1 + random.below(SCAN_MAX);
        let mut first = None;
        session.scan(0, &from, Direction::Forward, &mut |key, value| {
            first.get_or_insert_with(|| key == from && value.len() == RECORD);
            left -= 1;
            left > 0
        })?;
        match first {
            Some(true) => Ok(()),
            _ => bail!("a scan from a record that is there did not begin with it"),
        }
    }
}

fn expect(number: u64, length: usize) -> Result<()> {
    match length {
        RECORD => Ok(()),
        _ => bail!("record {number} has {length} bytes instead of {RECORD}"),
    }
}

/// Counts inserts, because readers of the newest records must not ask for one that is still being
/// inserted.
#[derive(Debug, Default)]
struct Acknowledged {
    begun: AtomicU64,
    /// All records before this one exist.
    count: AtomicU64,
    /// Whether each record from `count` on exists.
    window: Mutex<VecDeque<bool>>,
}

impl Acknowledged {
    fn begin(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed)
    }

    fn acknowledge(&self, index: u64) {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let mut count = self.count.load(Ordering::Relaxed);
        let place = (index - count) as usize;
        if window.len() <= place {
            window.resize(place + 1, false);
        }
        window[place] = true;
        while window.front() == Some(&true) {
            window.pop_front();
            count += 1;
        }
        self.count.store(count, Ordering::Release);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Setting, VELLUM};
    use crate::workload::values::is_of;

    #[test]
    fn all_kinds_run() {
        for kind in Kind::ALL {
            let directory = tempfile::tempdir().unwrap();
            let engine = (VELLUM.open)(&Setting::new(directory.path(), 2 << 20)).unwrap();
            let ycsb = Ycsb { kind, records: 5_000 };
            ycsb.load(&*engine).unwrap();
            let plan = Plan { threads: 2, seconds: 0.2, seed: 9 };
            let measured = ycsb.run(&*engine, &plan).unwrap();
            assert!(measured.operations > 0, "{kind:?}: {measured:?}");
            ycsb.run(&*engine, &Plan { seed: 10, ..plan }).unwrap();
        }
    }

    #[test]
    fn records_are_recognised() {
        assert!(is_of(5, &record(5)) && record(5).len() == RECORD);
    }

    #[test]
    fn inserts_count_once_all_before_them_are_there() {
        let inserted = Acknowledged::default();
        let begun: Vec<u64> = (0..4).map(|_| inserted.begin()).collect();
        assert_eq!(begun, [0, 1, 2, 3]);
        for (index, count) in [(1, 0), (0, 2), (3, 2), (2, 4)] {
            inserted.acknowledge(index);
            assert_eq!(inserted.count(), count);
        }
    }
}
