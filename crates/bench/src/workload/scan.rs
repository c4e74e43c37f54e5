//! Range scans over the entries of [`Lookup`]: a fixed number of entries from a random key on.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::lookup::{ENTRY, Lookup};
use super::values::{is_of, key};
use super::{Measured, Operation, Plan, Work, drive};
use crate::engine::{Access, Direction, Engine};

/// Scans of a fixed length. An operation is one entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scan {
    /// Entries in the table.
    pub entries: u64,
    /// Entries of one scan. If it has all entries, it begins at the first key.
    pub length: u64,
    /// Whether it goes to smaller keys.
    pub backward: bool,
}

impl Work for Scan {
    fn tables(&self) -> Vec<String> {
        vec!["data".to_owned()]
    }

    fn bytes(&self) -> u64 {
        self.entries * ENTRY
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        Lookup { entries: self.entries, batch: 1 }.load(engine)
    }

    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        drive(engine, plan, |_| self.operation())
    }
}

impl Scan {
    fn operation(&self) -> Box<Operation<'_>> {
        let mut begun = false;
        Box::new(move |session, random| {
            if !std::mem::replace(&mut begun, true) {
                session.begin(Access::Read)?;
            }
            let length = self.length.min(self.entries);
            let first = random.below(self.entries - length + 1);
            let (from, direction) = match self.backward {
                true => (first + length - 1, Direction::Backward),
                false => (first, Direction::Forward),
            };
            let (mut seen, mut wrong) = (0, None);
            session.scan(0, &key(from), direction, &mut |found, value| {
                let number = if self.backward { from - seen } else { from + seen };
                if found != key(number) || !is_of(number, value) {
                    wrong = Some(number);
                }
                seen += 1;
                seen < length && wrong.is_none()
            })?;
            match wrong {
                None if seen == length => Ok(seen),
                None => bail!("a scan of {length} entries from {from} ended after {seen}"),
                Some(number) => bail!("a scan from {from} has a wrong entry at {number}"),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Setting, VELLUM};

    #[test]
    fn scans_see_every_entry_in_both_directions() {
        let directory = tempfile::tempdir().unwrap();
        let engine = (VELLUM.open)(&Setting::new(directory.path(), 1 << 20)).unwrap();
        let scan = Scan { entries: 30_000, length: 1000, backward: false };
        scan.load(&*engine).unwrap();
        let plan = Plan { threads: 2, seconds: 0.2, seed: 2 };
        for backward in [false, true] {
            let measured = Scan { backward, ..scan }.run(&*engine, &plan).unwrap();
            assert!(measured.operations >= 1000);
        }
        let full = Scan { length: 50_000, ..scan.clone() };
        assert_eq!(full.run(&*engine, &plan).unwrap().operations % 30_000, 0);
        let beyond = Scan { entries: 30_001, length: 30_001, backward: false };
        assert!(beyond.run(&*engine, &plan).is_err());
    }
}
