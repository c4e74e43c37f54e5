//! The faults of a [`FaultyDevice`](super::FaultyDevice). Deterministic from a seed as long as the
//! operations come in the same order.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vellum_vm::{Errno, PageRange};

use super::super::workers::{Job, lock, run_foreign, wait};

/// The operations that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// One range, blocking or not.
    Read,
    /// One of the writes of a call.
    Write,
    /// Making things durable.
    Sync,
    /// Changing the length.
    Resize,
}

const OPERATIONS: usize = 4;

/// The ways in which an operation fails. A way that makes no sense for an operation is an `EIO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing happens and this is the error.
    Error(Errno),
    /// Only the first `bytes` bytes move, then `EIO`. Writes leave the rest as it was on the
    /// device; reads leave it undefined.
    Torn {
        /// Bytes that still move; any number, also in the middle of a page.
        bytes: usize,
    },
    /// One bit arrives flipped, and the device says that all is well.
    FlippedBit,
    /// The range before is read or written instead (for the first one: the range after), and the
    /// device says that all is well.
    Misdirected,
    /// Nothing happens, and the device says that all is well.
    Lost,
}

impl Fault {
    /// The plain error that this is for operations without data.
    pub(super) fn error(self) -> io::Error {
        match self {
            Self::Error(errno) => errno.into(),
            _ => Errno::IO.into(),
        }
    }
}

/// How many operations a device has had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationCounts {
    /// Ranges read, blocking or not.
    pub reads: u64,
    /// The same, but neighbours among ranges that were started together count as one, because a
    /// file device merges them into one read, up to its limit of bytes.
    pub read_runs: u64,
    /// Entries written.
    pub writes: u64,
    /// Calls that write.
    pub write_calls: u64,
    /// Syncs.
    pub syncs: u64,
    /// Changes of the length.
    pub resizes: u64,
    /// Operations that went wrong by plan.
    pub faults: u64,
}

/// The plan of the faults. A test may change it at any time; clones share one plan.
///
/// The device checks the rules in the order in which the test made them; the first that applies
/// decides.
#[derive(Clone)]
pub struct FaultPlan {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    random: u64,
    rules: Vec<Rule>,
    longest_delay: Duration,
    gates: [Gate; OPERATIONS],
    /// The device is going away: nothing is held any more.
    closed_down: bool,
    counts: OperationCounts,
}

struct Rule {
    operation: Operation,
    when: When,
    fault: Fault,
}

enum When {
    /// So many operations from now; 1 is the next.
    In(u64),
    /// With this probability.
    Chance(f64),
}

#[derive(Default)]
struct Gate {
    shut: bool,
    /// The next held operation may go on although the gate is shut.
    lets_one: bool,
    waiting: usize,
    parked: Vec<Job>,
}

impl FaultPlan {
    /// A plan without faults. `seed` determines all random choices.
    pub(super) fn new(seed: u64) -> Self {
        let state = State {
            random: seed,
            rules: Vec::new(),
            longest_delay: Duration::ZERO,
            gates: Default::default(),
            closed_down: false,
            counts: OperationCounts::default(),
        };
        Self { shared: Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }) }
    }

    /// The `nth` operation of the kind from now on (1 is the next) goes wrong, once.
    pub fn fail_nth(&self, operation: Operation, nth: u64, fault: Fault) {
        let rule = Rule { operation, when: When::In(nth.max(1)), fault };
        lock(&self.shared.state).rules.push(rule);
    }

    /// From now on each operation of the kind goes wrong with this probability (0 to 1).
    pub fn fail_randomly(&self, operation: Operation, probability: f64, fault: Fault) {
        let rule = Rule { operation, when: When::Chance(probability), fault };
        lock(&self.shared.state).rules.push(rule);
    }

    /// From now on all operations of the kind go wrong.
    pub fn fail_always(&self, operation: Operation, fault: Fault) {
        self.fail_randomly(operation, 1.0, fault);
    }

    /// From now on each read takes longer by a random time up to `longest`, so that asynchronous
    /// reads complete out of order.
    pub fn delay_reads(&self, longest: Duration) {
        lock(&self.shared.state).longest_delay = longest;
    }

    /// Forgets all rules and delays. Gates stay as they are.
    pub fn clear(&self) {
        let mut state = lock(&self.shared.state);
        state.rules.clear();
        state.longest_delay = Duration::ZERO;
    }

    /// Holds all operations of the kind from now on, until [`release`](Self::release).
    /// Asynchronous reads are started, but their `ReadDone` waits.
    pub fn hold(&self, operation: Operation) {
        lock(&self.shared.state).gates[operation as usize].shut = true;
    }

    /// Lets operations of the kind go on. The `ReadDone`s that waited are called by this.
    pub fn release(&self, operation: Operation) {
        let mut state = lock(&self.shared.state);
        let gate = &mut state.gates[operation as usize];
        gate.shut = false;
        let parked = std::mem::take(&mut gate.parked);
        drop(state);
        self.shared.changed.notify_all();
        for job in parked {
            run_foreign(job);
        }
    }

    /// Lets one operation of the kind go on that is being held, and waits until it does. All others
    /// stay held, and so does the next one. Does nothing if none is held.
    pub fn release_one(&self, operation: Operation) {
        let mut state = lock(&self.shared.state);
        if state.gates[operation as usize].waiting == 0 {
            return;
        }
        state.gates[operation as usize].lets_one = true;
        self.shared.changed.notify_all();
        while state.gates[operation as usize].lets_one {
            state = wait(&self.shared.changed, state);
        }
    }

    /// How many operations of the kind are being held.
    pub fn held(&self, operation: Operation) -> usize {
        let gate = &lock(&self.shared.state).gates[operation as usize];
        gate.waiting + gate.parked.len()
    }

    /// Waits until at least `count` operations of the kind are being held; false if that takes
    /// longer than `patience`.
    pub fn wait_until_held(&self, operation: Operation, count: usize, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut state = lock(&self.shared.state);
        loop {
            let gate = &state.gates[operation as usize];
            if gate.waiting + gate.parked.len() >= count {
                return true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
    }

    /// The operations of the device so far.
    pub fn counts(&self) -> OperationCounts {
        lock(&self.shared.state).counts
    }

    /// Counts an operation, and returns its fault, if it has one.
    pub(super) fn decide(&self, operation: Operation) -> Option<Fault> {
        let mut state = lock(&self.shared.state);
        let State { random, rules, counts, .. } = &mut *state;
        match operation {
            Operation::Read => counts.reads += 1,
            Operation::Write => counts.writes += 1,
            Operation::Sync => counts.syncs += 1,
            Operation::Resize => counts.resizes += 1,
        }
        let mut decision = None;
        rules.retain_mut(|rule| {
            if rule.operation != operation {
                return true;
            }
            let (applies, keep) = match &mut rule.when {
                When::In(left) => {
                    *left -= 1;
                    (*left == 0, *left > 0)
                }
                When::Chance(probability) => (next_fraction(random) < *probability, true),
            };
            if applies && decision.is_none() {
                decision = Some(rule.fault);
            }
            keep
        });
        counts.faults += u64::from(decision.is_some());
        decision
    }

    /// Counts the runs of neighbours among ranges that are read together.
    pub(super) fn count_read_runs(&self, mut ranges: Vec<PageRange>) {
        ranges.sort_unstable_by_key(|range| range.start);
        let runs = ranges.chunk_by(|one, next| one.end() == Some(next.start)).count();
        lock(&self.shared.state).counts.read_runs += runs as u64;
    }

    /// Counts a call that writes.
    pub(super) fn count_write_call(&self) {
        lock(&self.shared.state).counts.write_calls += 1;
    }

    /// Whether reads take longer.
    pub(super) fn has_delays(&self) -> bool {
        !lock(&self.shared.state).longest_delay.is_zero()
    }

    /// How much longer a read takes.
    pub(super) fn delay(&self) -> Duration {
        let mut state = lock(&self.shared.state);
        if state.longest_delay.is_zero() {
            return Duration::ZERO;
        }
        let part = next_fraction(&mut state.random);
        state.longest_delay.mul_f64(part)
    }

    /// A random number below `bound`, which is not 0.
    pub(super) fn random_below(&self, bound: usize) -> usize {
        (next_random(&mut lock(&self.shared.state).random) % bound as u64) as usize
    }

    /// Waits while the gate is shut.
    pub(super) fn pass(&self, operation: Operation) {
        let mut state = lock(&self.shared.state);
        if !state.gates[operation as usize].shut || state.closed_down {
            return;
        }
        state.gates[operation as usize].waiting += 1;
        self.shared.changed.notify_all();
        loop {
            let gate = &state.gates[operation as usize];
            if !gate.shut || gate.lets_one || state.closed_down {
                break;
            }
            state = wait(&self.shared.changed, state);
        }
        let gate = &mut state.gates[operation as usize];
        gate.waiting -= 1;
        if std::mem::take(&mut gate.lets_one) {
            self.shared.changed.notify_all();
        }
    }

    /// Runs a job, or parks it while the gate is shut.
    pub(super) fn pass_later(&self, operation: Operation, job: Job) {
        let mut state = lock(&self.shared.state);
        if state.gates[operation as usize].shut && !state.closed_down {
            state.gates[operation as usize].parked.push(job);
            drop(state);
            self.shared.changed.notify_all();
        } else {
            drop(state);
            job();
        }
    }

    /// Lets everything go that is held, for good.
    pub(super) fn close_down(&self) {
        lock(&self.shared.state).closed_down = true;
        for operation in [Operation::Read, Operation::Write, Operation::Sync, Operation::Resize] {
            self.release(operation);
        }
    }
}

impl fmt::Debug for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultPlan").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

/// Splitmix64 (Steele, Lea, Flood, OOPSLA'14): small, and good enough for tests.
fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// A number from 0 to below 1.
fn next_fraction(state: &mut u64) -> f64 {
    (next_random(state) >> 11) as f64 / (1_u64 << 53) as f64
}
