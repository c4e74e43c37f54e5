//! Backups of the stores of a quarter of the seeds, all of the workload `mixed`. Some of these
//! stores are compacted, or have a slow log. The random numbers of backups are their own, so the
//! other seeds do what they did before there were backups, and find the planted bugs that they
//! found.
//!
//! A chain of a backup and its increments outlives crashes of the store. The files are real ones:
//! only the store's file and its log are simulated.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use vellum::{BackupOptions, BackupProgress, Options, RestoreOptions, Store};
use vellum_testing::random::Random;

use crate::failure::{Failure, Outcome, ensure};
use crate::model::contents;

/// The longest chain: a backup and its increments.
const CHAIN_MAX: usize = 6;

/// When a store is backed up, and what there is of it.
#[derive(Debug)]
pub(crate) struct Backups {
    random: Random,
    /// Once in so many steps, if at all.
    once_in: Option<u64>,
    /// The store has pages repaired from the chain.
    repairs: bool,
    folder: Option<Folder>,
    /// The backup and its increments.
    chain: Vec<PathBuf>,
    /// The number of the next file.
    next: u64,
}

impl Backups {
    /// Those of a seed.
    pub(crate) fn random(seed: u64) -> Backups {
        let mut random = Random(seed.rotate_left(48));
        let once_in = matches!(seed % 16, 0 | 4 | 6 | 8).then(|| random.pick(&[15, 60]));
        Backups { random, once_in, repairs: false, folder: None, chain: Vec::new(), next: 0 }
    }

    /// A life of the store begins.
    pub(crate) fn begin(&mut self) {
        self.repairs = false;
    }

    /// Whether the next step is a backup.
    pub(crate) fn is_due(&mut self) -> bool {
        self.once_in.is_some_and(|times| self.random.once_in(times))
    }

    /// Whether a page cannot be read soon.
    pub(crate) fn fails_a_read(&mut self) -> bool {
        self.repairs && self.random.once_in(3)
    }

    /// Whether the next step is a look at pages none of which can be read.
    pub(crate) fn looks_at_unreadable(&mut self) -> bool {
        self.repairs && self.random.once_in(12)
    }

    /// A name for a file that there is not.
    fn new_path(&mut self) -> PathBuf {
        self.next += 1;
        self.folder.get_or_insert_with(Folder::new).0.join(self.next.to_string())
    }

    /// Makes an increment, or a backup that begins a chain.
    pub(crate) fn run(&mut self, store: &Store) -> vellum::Result<()> {
        if self.chain.len() == CHAIN_MAX || self.random.once_in(8) {
            for path in self.chain.drain(..) {
                let _ = fs::remove_file(path);
            }
        }
        let path = self.new_path();
        let options = BackupOptions::new().check(false);
        let options = match self.chain.last() {
            Some(last) => options.since(last).read_all(self.random.once_in(8)),
            None => options,
        };
        store.backup(&path, &options, &mut goes_on)?;
        self.chain.push(path);
        Ok(())
    }

    /// Sometimes has pages that cannot be read repaired from the chain.
    pub(crate) fn repair(&mut self, store: &Store) -> vellum::Result<()> {
        self.repairs = self.random.once_in(2);
        match self.chain.split_first().filter(|_| self.repairs) {
            Some((full, increments)) => store.repair_from(full, increments, &mut goes_on),
            None => Ok(()),
        }
    }

    /// Sometimes makes an increment of a store that was recovered, and compares what it leads to.
    /// The store does not go on.
    pub(crate) fn look_at(&mut self, store: &Store) -> Outcome {
        let Some(last) = self.chain.last().filter(|_| self.random.once_in(2)) else {
            return Ok(());
        };
        let options = BackupOptions::new().check(false).since(last);
        let path = self.new_path();
        let increment = store.backup(&path, &options, &mut goes_on);
        increment.map_err(Failure::of("an increment after a recovery"))?;
        self.chain.push(path);
        let found = self.restore(contents).map_err(Failure::of("a restored backup"));
        let _ = self.chain.pop().map(fs::remove_file);
        let is_same = found? == contents(store).map_err(Failure::of("reading"))?;
        ensure!(is_same, "an increment after a recovery leads to another store");
        Ok(())
    }

    /// Calls `look` with the store that the chain leads to.
    pub(crate) fn restore<T>(
        &mut self,
        look: impl FnOnce(&Store) -> vellum::Result<T>,
    ) -> vellum::Result<T> {
        let path = self.new_path();
        let Some((full, increments)) = self.chain.split_first() else {
            unreachable!("there is a backup")
        };
        vellum::restore(&path, full, increments, &RestoreOptions::new(), &mut goes_on)?;
        let options = Options::new().pool_bytes(1 << 20).read_only(true).single_threaded();
        let seen = look(&Store::open(&path, &options)?);
        let _ = fs::remove_file(path);
        seen
    }
}

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A folder for the files, which goes with them.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vellum-sim-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        make(&path);
        Folder(path)
    }
}

fn make(path: &Path) {
    if let Err(error) = fs::create_dir(path) {
        panic!("cannot make {} for backups: {error}", path.display());
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
