//! A file system that has seen many files come and go: what is free is in small pieces.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use rustix::io::Errno;
use vellum_bench::progress::Progress;
use vellum_bench::report::Outcome;
use vellum_bench::workload::values::Random;

use crate::Context;

/// Files have 4 KiB to 256 KiB, each power of two as often as the others.
const SMALLEST: u64 = 4 << 10;
const SIZES: u64 = 7;

/// How often half of the files go, and others take their place.
const ROUNDS: usize = 3;

/// Files of a folder.
const FOLDER: usize = 256;

/// A larger file system is not filled.
const MOST: u64 = 8 << 30;

/// Runs an experiment in a folder of this name, in a file system that was made old before.
pub(super) fn run_aged(
    context: &Context<'_>,
    name: &str,
    run: impl FnOnce(&Context<'_>, &Path) -> Result<Outcome>,
) -> Result<Outcome> {
    let folder = context.make_directory(name)?;
    let aged = Aged::make(&folder, &context.progress)?;
    let mut outcome = run(context, &folder)?;
    outcome.notes.push(aged.note());
    Ok(outcome)
}

/// The files that have made a file system old, which they share with those of an experiment.
#[derive(Debug)]
struct Aged {
    folder: PathBuf,
    files: Vec<PathBuf>,
    made: usize,
    random: Random,
}

impl Aged {
    /// Fills the file system of a folder, has half of the files go and others come, again and
    /// again, and leaves three tenths of it free.
    fn make(parent: &Path, progress: &Progress) -> Result<Self> {
        let whole = statvfs(parent)?;
        let whole = whole.f_blocks * whole.f_frsize;
        let free = whole * 3 / 10;
        ensure!(whole <= MOST, "the file system has {} GiB, and is not aged", whole >> 30);
        let folder = parent.join("aged");
        let mut aged = Self { folder, files: Vec::new(), made: 0, random: Random::new(7) };
        for round in 0..=ROUNDS {
            progress.at(round, ROUNDS + 1, "making the file system old");
            aged.fill()?;
            let leave = aged.files.len() / 2;
            match round {
                ROUNDS => aged.remove(|aged| Ok(!aged.files.is_empty() && aged.free()? < free))?,
                _ => aged.remove(|aged| Ok(aged.files.len() > leave))?,
            }
        }
        Ok(aged)
    }

    /// What was done, in words.
    fn note(&self) -> String {
        format!(
            "The file system was filled with {} files of 4 to 256 KiB, of which half went each \
             time, at random. {} were left.",
            self.made,
            self.files.len()
        )
    }

    fn free(&self) -> Result<u64> {
        let now = statvfs(&self.folder)?;
        Ok(now.f_bavail * now.f_frsize)
    }

    /// Makes files until there is no room.
    fn fill(&mut self) -> Result<()> {
        loop {
            match self.add() {
                Err(Errno::NOSPC) => return Ok(()),
                added => added.context("filling the file system")?,
            }
        }
    }

    /// Makes a file, and reserves its blocks.
    fn add(&mut self) -> rustix::io::Result<()> {
        let said = |error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        let folder = self.folder.join((self.made / FOLDER).to_string());
        if self.made.is_multiple_of(FOLDER) {
            fs::create_dir_all(&folder).map_err(said)?;
        }
        let path = folder.join(self.made.to_string());
        let file = File::create(&path).map_err(said)?;
        self.made += 1;
        self.files.push(path);
        fallocate(&file, FallocateFlags::empty(), 0, SMALLEST << self.random.below(SIZES))
    }

    /// Removes files at random for as long as `goes_on` says so.
    fn remove(&mut self, goes_on: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        while goes_on(self)? {
            let at = self.random.below(self.files.len() as u64) as usize;
            fs::remove_file(self.files.swap_remove(at))?;
        }
        // Blocks are free once the log has it.
        rustix::fs::sync();
        Ok(())
    }
}

impl Drop for Aged {
    fn drop(&mut self) {
        // The experiment's folder is removed in any case.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_system_is_not_filled() {
        let folder = tempfile::tempdir().unwrap();
        let place = statvfs(folder.path()).unwrap();
        if place.f_blocks * place.f_frsize <= MOST {
            println!("left out: the file system of {} is small", folder.path().display());
            return;
        }
        let error = Aged::make(folder.path(), &Progress::hidden()).unwrap_err();
        assert!(error.to_string().contains("is not aged"), "{error}");
        assert!(!folder.path().join("aged").exists());
    }
}
