//! What happened in a simulation.

use vellum_testing::random::Random;

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Crashes after which the store was recovered and looked at, those of recoveries among them.
    pub crashes: u64,
    /// Recoveries that failed with the storage, and were tried again.
    pub failed_recoveries: u64,
    /// Crashes with a write that went elsewhere, of which the store named the damage.
    pub damaged: u64,
    /// Crashes that cut off the log's end, because a block went there that belonged elsewhere.
    pub cut_off: u64,
    /// Changes that were made, commits among them.
    pub changes: u64,
    /// Commits of transactions.
    pub commits: u64,
    /// Commits that another transaction prevented.
    pub conflicts: u64,
    /// Backups and increments, each of which was restored.
    pub backups: u64,
    /// Changes that the store refused because a disk or a log was full, or an operation failed.
    pub refused: u64,
    /// A number that is the same for equal runs.
    pub trace: u64,
}

impl Report {
    /// Adds what happened with another seed.
    pub fn add(&mut self, other: &Report) {
        self.crashes += other.crashes;
        self.failed_recoveries += other.failed_recoveries;
        self.damaged += other.damaged;
        self.cut_off += other.cut_off;
        self.changes += other.changes;
        self.commits += other.commits;
        self.conflicts += other.conflicts;
        self.backups += other.backups;
        self.refused += other.refused;
        self.trace = Random(self.trace ^ other.trace).next();
    }
}
