//! The bugs that the simulator must find.

use vellum::StoreBug;
use vellum_log::LogBug;

/// A bug that the simulator must find.
#[derive(Clone, Copy, Debug)]
pub struct Plant {
    /// The name on the command line.
    pub name: &'static str,
    /// What is wrong.
    pub what: &'static str,
    /// A seed that finds it. After a change of the simulator or the store another one may.
    pub seed: u64,
    bug: Bug,
}

#[derive(Clone, Copy, Debug)]
enum Bug {
    Log(LogBug),
    Store(StoreBug),
}

/// The simulator finds each planted bug within so many seeds, from 1 on.
pub const SEEDS: u64 = 400;

/// All bugs that can be planted.
pub const PLANTS: &[Plant] = &[
    log("skipped-checksum", LogBug::SkippedChecksum, 37, "checksums of log blocks are ignored"),
    log("believed-tail", LogBug::BelievedTail, 35, "the beginning of a record counts as one"),
    log("early-ack", LogBug::EarlyAcknowledgement, 1, "a record counts as durable unsynced"),
    log("believed-rest", LogBug::BelievedRest, 213, "blocks of a flush that failed come back"),
    log("unsynced-opening", LogBug::UnsyncedOpening, 1, "an opening relies on unsynced records"),
    log("submitted-ack", LogBug::SubmittedIsDurable, 5, "a record counts as durable in flight"),
    log("overtaken-ack", LogBug::OvertakenIsDurable, 101, "a flight acknowledges one it overtakes"),
    store("no-write-rule", StoreBug::NoWriteRule, 70, "a page leaves before its record"),
    store("early-reuse", StoreBug::EarlyReuse, 14, "a place is reused before its free is durable"),
    store("late-values", StoreBug::LateValues, 1, "values are not synced before their record"),
    store("no-image", StoreBug::NoImage, 1, "the first record after a cut has no image"),
    store("unnamed-pages", StoreBug::UnnamedPages, 1, "a record does not name its new pages"),
    store("lost-part", StoreBug::LostPart, 1, "a record leaves out a changed part of a value"),
    store("half-group", StoreBug::HalfGroup, 1, "a record leaves a page of its group out"),
    store("early-header", StoreBug::EarlyHeader, 1, "a checkpoint's header precedes its pages"),
    store("early-trim", StoreBug::EarlyTrim, 3, "the log is trimmed before a checkpoint"),
    store("wrong-order", StoreBug::WrongOrder, 1, "recovery applies records in another order"),
    store("lost-record", StoreBug::LostRecord, 1, "recovery leaves out the last record"),
    store("early-recovery-header", StoreBug::EarlyRecoveryHeader, 4, "recovery says clean early"),
    store("lost-redone", StoreBug::LostRedone, 1, "a recovered page in memory is missing"),
    store("unredone-page", StoreBug::UnredonePage, 1, "a pending page is read as the file has it"),
    store("half-repair", StoreBug::HalfRepair, 134, "a repaired page is as old as its image"),
    store("unchecked-keys", StoreBug::UncheckedKeys, 1, "keys are not validated"),
    store("unchecked-ranges", StoreBug::UncheckedRanges, 1, "ranges are not validated"),
    store("unchecked-writes", StoreBug::UncheckedWrites, 1, "snapshot isolation loses updates"),
    store("lost-version", StoreBug::LostVersion, 19, "an old value goes while a view sees it"),
    store("early-end", StoreBug::EarlyEnd, 3, "the file gets shorter before its header is durable"),
    store("lost-root", StoreBug::LostRoot, 20, "a root moves, and the catalog does not say so"),
    store("unnoted-write", StoreBug::UnnotedWrite, 4, "a write after a backup is not noted"),
    store("unnoted-record", StoreBug::UnnotedRecord, 56, "recovery notes no page of its records"),
    store("stale-repair", StoreBug::StaleRepair, 8, "a repaired page is as old as the backup"),
];

const fn log(name: &'static str, bug: LogBug, seed: u64, what: &'static str) -> Plant {
    Plant { name, what, seed, bug: Bug::Log(bug) }
}

const fn store(name: &'static str, bug: StoreBug, seed: u64, what: &'static str) -> Plant {
    Plant { name, what, seed, bug: Bug::Store(bug) }
}

impl Plant {
    /// The bug of this name.
    pub fn named(name: &str) -> Option<Plant> {
        PLANTS.iter().copied().find(|plant| plant.name == name)
    }
}

/// A bug that is switched on for this thread until this is dropped.
#[derive(Debug)]
pub(crate) struct Planted(());

impl Planted {
    pub(crate) fn new(plant: Option<Plant>) -> Planted {
        match plant.map(|plant| plant.bug) {
            Some(Bug::Log(bug)) => vellum_log::plant(Some(bug)),
            Some(Bug::Store(bug)) => vellum::plant(Some(bug)),
            None => {}
        }
        Planted(())
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        vellum_log::plant(None);
        vellum::plant(None);
    }
}
