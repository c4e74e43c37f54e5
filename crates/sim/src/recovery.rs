//! Recovery of a crashed machine, through crashes and failures of the recovery itself.

use std::ops::ControlFlow::Continue;
use std::sync::Arc;

use vellum::{Error, Options, Store};
use vellum_log::{LogError, SimulatedDevice, SimulatedOptions};
use vellum_testing::random::Random;

use crate::failure::{Failure, Outcome, ensure};
use crate::machine::{Crash, End, Fault, Machine};
use crate::report::Report;
use crate::story::tell;

/// How a recovery that crashes ends.
const ENDS: &[End] = &[End::PowerLoss, End::PowerLoss, End::Kill];

/// A tree that a store gets after a recovery that is looked at twice.
const AFTERWARDS: &str = "afterwards";

/// Blocks of a segment of the log.
const SEGMENT_BLOCKS: u64 = 8;

/// The sizes of a store and of its log.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Blocks that the log has room for.
    pub log_blocks: u64,
    /// The bytes of the log by which the store plans its checkpoints.
    pub log_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Frames of a tree page.
    pub page_frames: u32,
    /// Memory that a recovery has for pages. Those that do not fit are redone later.
    pub recovery_bytes: usize,
    /// Flights of the log at once.
    pub in_flight: usize,
    /// Whether a recovery makes a clean file, as for a store that does not go on with its log.
    pub recovers_to_file: bool,
}

impl Sizes {
    /// Sizes at random: small logs and pools, so that the store writes checkpoints and evicts.
    pub fn random(random: &mut Random) -> Sizes {
        let page_frames = random.pick(&[1, 1, 2]);
        let log_bytes = random.pick(&[16 << 10, 64 << 10, 100 << 10, 400 << 10]);
        // Less than the store plans with: then the log is full before a checkpoint is due.
        let log_blocks = match random.below(3) {
            0 => 96 * u64::from(page_frames),
            _ => 128 * u64::from(page_frames) + log_bytes / 2048,
        };
        let log_blocks = log_blocks.next_multiple_of(SEGMENT_BLOCKS);
        let pool_bytes = random.pick(&[192 << 10, 192 << 10, 1 << 20]);
        let recovery_bytes = random.pick(&[16 << 10, 64 << 10, pool_bytes as usize / 2]);
        // Not at random: so the other sizes of each seed stay as they were.
        let recovers_to_file =
            recovery_bytes < pool_bytes as usize / 2 && matches!(log_bytes >> 10, 16 | 100);
        Sizes {
            log_blocks,
            log_bytes,
            pool_bytes,
            page_frames,
            recovery_bytes,
            in_flight: 1,
            recovers_to_file,
        }
    }

    /// Has tree pages of so many frames, and a pool and a log in proportion.
    pub(crate) fn have_pages_of(&mut self, frames: u32) {
        let times = frames.div_ceil(self.page_frames);
        self.page_frames *= times;
        self.pool_bytes *= u64::from(times);
        self.log_bytes *= u64::from(times);
        self.log_blocks *= u64::from(times);
        self.recovery_bytes *= times as usize;
    }

    /// A new log.
    pub fn new_log(&self, seed: u64) -> SimulatedDevice {
        SimulatedDevice::new(SimulatedOptions {
            seed,
            segment_blocks: SEGMENT_BLOCKS,
            segments: self.log_blocks / SEGMENT_BLOCKS,
            in_flight: self.in_flight,
            ..SimulatedOptions::default()
        })
    }

    /// The options of the store on a machine.
    pub fn options(&self, machine: &Arc<Machine>) -> Options {
        let options = Options::new().pool_bytes(self.pool_bytes).log_bytes(self.log_bytes);
        options
            .log_device(machine.log_device())
            .recovery_bytes(self.recovery_bytes)
            .recovers_to_clean_file(self.recovers_to_file)
            .single_threaded()
    }
}

/// A store that was recovered, on its machine.
#[derive(Debug)]
pub struct Recovered {
    /// The store.
    pub store: Store,
    /// Its machine.
    pub machine: Arc<Machine>,
}

/// What a recovery must lead to.
pub(crate) struct Recovery<'a> {
    pub sizes: Sizes,
    /// Whether there may be pages that nothing refers to.
    pub may_lose_pages: bool,
    /// Judges what the store has, after the counts that were noted before the crash.
    pub judge: &'a dyn Fn(&Store, (usize, usize)) -> Outcome,
    /// Looks at a store that does not go on.
    pub look: &'a mut dyn FnMut(&Store) -> Outcome,
    pub report: &'a mut Report,
    pub random: &'a mut Random,
}

impl Recovery<'_> {
    /// Recovers the store and checks it, and does the same for crashes of the recovery, up to so
    /// many in a row.
    pub(crate) fn run(&mut self, crash: Crash, depth: u32) -> Outcome<Option<Recovered>> {
        self.report.crashes += 1;
        let (end, noted) = (crash.end, crash.noted);
        tell(|| format!("{end:?}; of {} changes, {} are durable", noted.1, noted.0));
        let machine = Machine::restarted(crash, self.random.next());
        machine.note(noted);
        if depth > 0 {
            machine.crash_once_in(self.random.pick(&[6, 30]), ENDS);
            if self.random.once_in(8) {
                let fault = self.random.pick(&[Fault::Read, Fault::Write, Fault::Sync]);
                machine.fail(fault, 1 + self.random.below(12));
            }
        }
        let opened = Store::open_on(machine.clone(), &self.sizes.options(&machine));
        let store = match opened {
            Ok(store) => store,
            Err(Error::Io(_) | Error::Pool(_)) if depth > 0 && machine.had_fault() => {
                machine.take_crashes();
                self.report.failed_recoveries += 1;
                let crash = machine.crash_now(self.random.pick(ENDS));
                return self.run(inherited(crash, end), depth - 1);
            }
            Err(error) if is_misdirected(end) && is_damage(&error) => {
                self.report.damaged += 1;
                return Ok(None);
            }
            Err(error) => {
                return Err(Failure::new(format!(
                    "the store does not open after {end:?}: {error}"
                )));
            }
        };
        machine.clear_faults();
        // The pages that are left are redone when they are read.
        if self.random.once_in(2) {
            machine.crash_once_in(u64::MAX, ENDS);
        }
        let recovered = Recovered { store, machine };
        let judged = self.judge(&recovered.store, end, noted);
        recovered.machine.crash_once_in(u64::MAX, ENDS);
        for crash in recovered.machine.take_crashes() {
            if let Some(Recovered { store, machine }) =
                self.run(inherited(crash, end), depth - 1)?
            {
                machine.kill();
                drop(store);
            }
        }
        Ok(judged?.then_some(recovered))
    }

    /// Looks at what a crash leaves, beside a store that goes on: recovers the store, and sometimes
    /// has it change a little and crash again.
    pub(crate) fn look_at(&mut self, crash: Crash) -> Outcome {
        let (end, noted) = (crash.end, crash.noted);
        let Some(Recovered { store, machine }) = self.run(crash, 2)? else { return Ok(()) };
        if !is_misdirected(end) {
            (self.look)(&store)?;
        }
        if !is_misdirected(end) && self.random.once_in(3) {
            let create = || store.create_tree(AFTERWARDS).and_then(|_| store.sync());
            create().map_err(Failure::of("a new tree after a recovery"))?;
            let crash = machine.crash_now(End::PowerLoss);
            machine.kill();
            drop(store);
            tell(|| "a second crash, after a new tree".into());
            self.look_again(crash, noted)?;
        }
        machine.kill();
        Ok(())
    }

    /// Looks at a store that had a tree more after its last recovery.
    fn look_again(&mut self, crash: Crash, noted: (usize, usize)) -> Outcome {
        self.report.crashes += 1;
        let machine = Machine::restarted(crash, self.random.next());
        let opened = Store::open_on(machine.clone(), &self.sizes.options(&machine));
        let store = opened.map_err(Failure::of("the store does not open a second time"))?;
        self.check(&store, End::PowerLoss)?;
        let removed = store.drop_tree(AFTERWARDS);
        removed.map_err(Failure::of("a tree of after the recovery"))?;
        (self.judge)(&store, noted)?;
        machine.kill();
        Ok(())
    }

    /// Checks that the store is sound.
    fn check(&self, store: &Store, end: End) -> Outcome {
        let report = store.check(&mut |_| ()).map_err(Failure::of("a check"))?;
        ensure!(report.damage.is_empty(), "damage after {end:?}: {:?}", report.damage);
        if !self.may_lose_pages {
            ensure!(report.lost_pages == 0, "{} pages are lost after {end:?}", report.lost_pages);
        } else if report.lost_pages > 0 {
            let freed =
                store.free_lost_pages(&mut |_| Continue(())).map_err(Failure::of("lost pages"))?;
            ensure!(freed.lost_pages == report.lost_pages, "{freed:?} differs from {report:?}");
            let report = store.check(&mut |_| ()).map_err(Failure::of("a second check"))?;
            ensure!(report.is_sound() && report.lost_pages == 0, "{report:?} after {end:?}");
        }
        Ok(())
    }

    /// Whether the store is sound, rather than damaged by a write that went elsewhere.
    fn judge(&mut self, store: &Store, end: End, noted: (usize, usize)) -> Outcome<bool> {
        let checked = self.check(store, end);
        if is_misdirected(end) && checked.is_err() {
            self.report.damaged += 1;
            return Ok(false);
        }
        checked?;
        match (self.judge)(store, noted) {
            // A block over the last ones of the log looks like its end (docs/log.md).
            Err(_) if end == End::MisdirectedBlock => {
                self.report.cut_off += 1;
                Ok(false)
            }
            judged => judged.map(|()| true),
        }
    }
}

/// A crash of a recovery from a crash that ended in this way: the damage stays.
fn inherited(mut crash: Crash, end: End) -> Crash {
    if is_misdirected(end) {
        crash.end = end;
    }
    crash
}

fn is_misdirected(end: End) -> bool {
    matches!(end, End::MisdirectedWrite | End::MisdirectedBlock)
}

/// Whether the error says that the file or the log is damaged.
fn is_damage(error: &Error) -> bool {
    matches!(
        error,
        Error::Damaged { .. }
            | Error::Truncated { .. }
            | Error::NotAStore(_)
            | Error::Log(LogError::Damaged { .. } | LogError::NotAppended { .. })
    )
}
