//! Random point lookups: keys of 8 bytes, values of 120 (SIGMOD'23, section 5.1), uniformly chosen.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::values::{Random, fill, is_of, key};
use super::{Measured, Operation, Plan, Work, drive};
use crate::engine::{Access, Engine, Session};

/// Bytes of a value.
pub const VALUE: usize = 120;

/// Bytes of an entry.
pub const ENTRY: u64 = 8 + VALUE as u64;

/// Random lookups over keys 0, 1, 2, ...
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lookup {
    /// Entries in the table.
    pub entries: u64,
    /// Keys looked up by one call; 1 is a single lookup.
    pub batch: usize,
}

impl Work for Lookup {
    fn tables(&self) -> Vec<String> {
        vec!["data".to_owned()]
    }

    fn bytes(&self) -> u64 {
        self.entries * ENTRY
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        let mut entries = (0..self.entries).map(|number| {
            let mut value = vec![0; VALUE];
            fill(number, &mut value);
            (key(number).to_vec(), value)
        });
        engine.load(0, &mut entries)
    }

    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        drive(engine, plan, |_| self.operation())
    }
}

impl Lookup {
    /// Looks up every key once, in order. Afterwards memory has as much data as fits.
    ///
    /// # Errors
    /// Errors of the engine; a wrong or missing value.
    pub fn visit_all(&self, engine: &dyn Engine) -> Result<()> {
        let mut session = engine.session()?;
        session.begin(Access::Read)?;
        (0..self.entries).try_for_each(|number| single(&mut *session, number))?;
        session.commit()
    }

    /// One lookup, or one batch. A transaction spans many of them, because it is costly for some
    /// engines.
    fn operation(&self) -> Box<Operation<'static>> {
        let Lookup { entries, batch } = *self;
        let mut begun = false;
        let mut numbers = vec![0; batch];
        let mut keys = vec![[0; 8]; batch];
        Box::new(move |session, random| {
            if !std::mem::replace(&mut begun, true) {
                session.begin(Access::Read)?;
            }
            if batch == 1 {
                let number = random.below(entries);
                return single(session, number).map(|()| 1);
            }
            choose(random, entries, &mut numbers, &mut keys);
            let references: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
            let mut right = 0;
            session.multi_get(0, &references, &mut |index, value| {
                right += usize::from(value.is_some_and(|value| is_of(numbers[index], value)));
            })?;
            if right != batch {
                bail!("{} of {batch} lookups gave a wrong value or none", batch - right);
            }
            Ok(batch as u64)
        })
    }
}

#[inline]
fn single(session: &mut dyn Session, number: u64) -> Result<()> {
    let mut right = false;
    session.get(0, &key(number), &mut |value| right = is_of(number, value))?;
    if !right {
        bail!("the lookup of key {number} gave a wrong value or none");
    }
    Ok(())
}

fn choose(random: &mut Random, entries: u64, numbers: &mut [u64], keys: &mut [[u8; 8]]) {
    for (number, bytes) in numbers.iter_mut().zip(keys) {
        *number = random.below(entries);
        *bytes = key(*number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Setting, VELLUM};

    #[test]
    fn lookups_find_what_was_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let engine = (VELLUM.open)(&Setting::new(directory.path(), 2 << 20)).unwrap();
        let lookup = Lookup { entries: 50_000, batch: 1 };
        lookup.load(&*engine).unwrap();
        engine.settle().unwrap();
        lookup.visit_all(&*engine).unwrap();
        let plan = Plan { threads: 2, seconds: 0.3, seed: 1 };
        for batch in [1, 32] {
            let lookup = Lookup { batch, ..lookup };
            let measured = plan.until_more_than(1000, |plan| lookup.run(&*engine, plan).unwrap());
            assert!(measured.latency.p50 > 0, "{measured:?}");
            assert!(measured.over_time.len() >= 3);
        }
        let beyond = Lookup { entries: 60_000, batch: 1 };
        assert!(beyond.visit_all(&*engine).is_err());
        let error = beyond.run(&*engine, &plan).unwrap_err().to_string();
        assert!(error.contains("gave a wrong value or none"), "{error}");
    }
}
