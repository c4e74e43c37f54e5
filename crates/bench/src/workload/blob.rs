//! Values of one size, from 4 KiB to 64 MiB, that are read whole or written whole.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::values::{fill, is_of, key};
use super::{Measured, Operation, Plan, Work, drive};
use crate::engine::Engine;

/// Large values under keys 0, 1, 2, ... An operation is one value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Blob {
    /// Values in the table.
    pub values: u64,
    /// Bytes of each.
    pub bytes_each: usize,
    /// Overwrites values instead of reading them.
    pub write: bool,
}

impl Work for Blob {
    fn tables(&self) -> Vec<String> {
        vec!["blobs".to_owned()]
    }

    fn bytes(&self) -> u64 {
        self.values * (8 + self.bytes_each as u64)
    }

    fn load(&self, engine: &dyn Engine) -> Result<()> {
        let mut entries = (0..self.values).map(|number| {
            let mut value = vec![0; self.bytes_each];
            fill(number, &mut value);
            (key(number).to_vec(), value)
        });
        engine.load(0, &mut entries)
    }

    fn run(&self, engine: &dyn Engine, plan: &Plan) -> Result<Measured> {
        drive(engine, plan, |_| if self.write { self.writing() } else { self.reading() })
    }
}

impl Blob {
    /// Reads a value, every cache line of it, as users of blobs do.
    fn reading(&self) -> Box<Operation<'_>> {
        Box::new(move |session, random| {
            let number = random.below(self.values);
            let mut right = false;
            session.get(0, &key(number), &mut |value| {
                let touched = value.iter().step_by(64).fold(0u8, |sum, byte| sum ^ byte);
                std::hint::black_box(touched);
                right = value.len() == self.bytes_each && is_of(number, value);
            })?;
            match right {
                true => Ok(1),
                false => bail!("blob {number} is not what was stored"),
            }
        })
    }

    fn writing(&self) -> Box<Operation<'_>> {
        let mut value = vec![0; self.bytes_each];
        Box::new(move |session, random| {
            let number = random.below(self.values);
            // The beginning identifies the value. The rest may stay as it was.
            fill(number, &mut value[..8]);
            session.put(0, &key(number), &value)?;
            Ok(1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Setting, VELLUM};

    #[test]
    fn blobs_are_read_and_written() {
        for bytes_each in [4096, 1 << 20] {
            let directory = tempfile::tempdir().unwrap();
            let engine = (VELLUM.open)(&Setting::new(directory.path(), 16 << 20)).unwrap();
            let blob = Blob { values: 20, bytes_each, write: false };
            blob.load(&*engine).unwrap();
            let plan = Plan { threads: 2, seconds: 0.1, seed: 2 };
            for write in [false, true, false] {
                let measured = Blob { write, ..blob }.run(&*engine, &plan).unwrap();
                assert!(measured.operations > 0);
            }
        }
    }
}
