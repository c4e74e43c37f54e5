//! Histories of concurrent transactions, in memory, out of memory and over crashes, given to a
//! checker of dependency cycles (the crate `adya`, which works as Jepsen's Elle).
//!
//! Most histories are of lists: a transaction appends a number that no other one appends. So each
//! list tells the order of all changes of its key. Others are of registers, which transactions
//! write without reading them. A scan counts as a read of each key that it has passed, also of the
//! absent ones, so a phantom is a cycle. The checker is checked itself: it must find the anomalies
//! of histories that have them, also those of stores with planted bugs.
//!
//! A crash ends the transactions that are under way with an unknown outcome: the checker takes one
//! for committed if a later transaction has seen what it appended. A transaction that was
//! acknowledged as durable must be there.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use adya::{History, Opts, Valid, Workload, check};
use vellum::{
    Durability, Error, Isolation, MemoryDevice, Options, Store, StoreBug, Transaction,
    TransactionOptions, Tree, plant,
};
use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_sim::{Crash, End, Machine};
use vellum_testing::patience::SetWhenDropped;
use vellum_testing::random::Random;
use vellum_testing::rounds::{rounds, seed};

/// The number of threads.
const PROCESSES: u64 = 4;

/// What a transaction does.
#[derive(Clone, Debug)]
enum Action {
    /// Puts a number at the end of a key's list.
    Append(u64, u64),
    /// Gives a register a number, without reading it.
    Write(u64, u64),
    Read(u64, Option<Vec<u64>>),
    Scan(Scan),
}

/// A read of the keys of a range, also of those that are not there.
#[derive(Clone, Debug)]
struct Scan {
    keys: Range<u64>,
    way: Way,
    /// After so many entries the scan stops.
    most: usize,
    /// The keys that the scan has passed, with what they had.
    passed: Option<Vec<(u64, Vec<u64>)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Forward,
    Backward,
    /// With `multi_get`.
    Together,
}

/// A history in the checker's notation.
#[derive(Debug)]
struct Recorder(Mutex<Recorded>);

#[derive(Debug)]
struct Recorded {
    workload: Workload,
    lines: String,
    /// What each process has begun and not ended.
    under_way: BTreeMap<u64, Vec<Action>>,
    /// The number of crashes so far. After a crash other processes go on.
    life: u64,
}

impl Recorder {
    fn new(workload: Workload) -> Recorder {
        let (lines, under_way) = (String::new(), BTreeMap::new());
        Recorder(Mutex::new(Recorded { workload, lines, under_way, life: 0 }))
    }

    fn note(&self, kind: &str, process: u64, actions: &[Action]) {
        self.0.lock().unwrap().note(kind, process, actions);
    }

    fn into_lines(self) -> String {
        self.0.into_inner().unwrap().lines
    }
}

impl Recorded {
    fn note(&mut self, kind: &str, process: u64, actions: &[Action]) {
        // What a process does after its crash has not happened.
        if process / PROCESSES < self.life {
            return;
        }
        match kind {
            "invoke" => drop(self.under_way.insert(process, actions.to_vec())),
            _ => drop(self.under_way.remove(&process)),
        }
        let steps: Vec<_> = actions.iter().flat_map(|action| self.steps(action)).collect();
        let steps = steps.join(",");
        let line = format!(r#"{{"type":"{kind}","process":{process},"value":[{steps}]}}"#);
        self.lines.push_str(&line);
        self.lines.push('\n');
    }

    fn steps(&self, action: &Action) -> Vec<String> {
        match action {
            Action::Append(key, value) => vec![format!(r#"["append",{key},{value}]"#)],
            Action::Write(key, value) => vec![format!(r#"["w",{key},{value}]"#)],
            Action::Read(key, found) => vec![self.read(*key, found.as_deref())],
            Action::Scan(Scan { keys, passed: None, .. }) => {
                keys.clone().map(|key| self.read(key, None)).collect()
            }
            Action::Scan(Scan { passed: Some(passed), .. }) => {
                passed.iter().map(|(key, found)| self.read(*key, Some(found))).collect()
            }
        }
    }

    /// A key that is not there has an empty list, or a register without a value.
    fn read(&self, key: u64, found: Option<&[u64]>) -> String {
        match (self.workload, found) {
            (Workload::ListAppend, Some(list)) => format!(r#"["r",{key},{list:?}]"#),
            (Workload::RwRegister, Some([value, ..])) => format!(r#"["r",{key},{value}]"#),
            _ => format!(r#"["r",{key},null]"#),
        }
    }
}

fn verdict(lines: &str, workload: Workload, model: &str) -> (Valid, Vec<String>) {
    // A transaction that reads a register and writes it has written the later value. Of two that
    // do not overlap in time, the later one has the later value.
    let (wfr_keys, linearizable_keys) = (true, true);
    let models = vec![model.into()];
    let options = Opts { models, wfr_keys, linearizable_keys, ..Opts::default() };
    let report = check(&History::from_json(lines).unwrap(), workload, &options);
    (report.valid, report.anomaly_types)
}

fn list_of(value: &[u8]) -> Vec<u64> {
    value.chunks(8).map(|number| u64::from_le_bytes(number.try_into().unwrap())).collect()
}

/// The value of a register: its number, and as much else as the number says.
fn register(number: u64) -> Vec<u8> {
    let mut value = number.to_le_bytes().to_vec();
    value.resize([8, 16, 200, 1_504][(number % 4) as usize], 0);
    value
}

/// A store in memory with a pool of so many pages.
fn memory_store(pool_pages: u64) -> Store {
    let options = Options::new().pool_bytes(pool_pages * 4096);
    Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap()
}

/// Lists of some length are on pages of their own.
fn run(transaction: &mut Transaction, tree: &Tree, actions: &mut [Action]) -> vellum::Result<()> {
    for action in actions {
        match action {
            Action::Append(key, value) => {
                let mut list = match transaction.get(tree, &key.to_be_bytes())? {
                    Some(list) => list.to_vec(),
                    None => Vec::new(),
                };
                list.extend(value.to_le_bytes());
                transaction.put(tree, &key.to_be_bytes(), &list)?;
            }
            Action::Write(key, value) => {
                transaction.put(tree, &key.to_be_bytes(), &register(*value))?;
            }
            Action::Read(key, found) => {
                let value = transaction.get(tree, &key.to_be_bytes())?;
                *found = Some(value.map_or(Vec::new(), |value| list_of(&value)));
            }
            Action::Scan(scan) => pass(transaction, tree, scan)?,
        }
    }
    Ok(())
}

/// Passes the keys of a scan. What it has not come to, the transaction has not read.
fn pass(transaction: &Transaction, tree: &Tree, scan: &mut Scan) -> vellum::Result<()> {
    let mut passed = scan.keys.clone();
    let mut found = BTreeMap::new();
    if scan.way == Way::Together {
        let keys: Vec<_> = scan.keys.clone().map(u64::to_be_bytes).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        let values = transaction.multi_get(tree, &keys)?;
        let values = values.into_iter().map(|value| value.map(|value| list_of(&value)));
        let read = scan.keys.clone().zip(values);
        found.extend(read.filter_map(|(key, value)| Some((key, value?))));
    } else {
        let mut entries =
            transaction.range(tree, passed.start.to_be_bytes()..passed.end.to_be_bytes())?;
        while found.len() < scan.most {
            let entry = match scan.way {
                Way::Backward => entries.next_back(),
                _ => entries.next(),
            };
            let Some((key, value)) = entry.transpose()? else { break };
            let key = u64::from_be_bytes(key[..].try_into().unwrap());
            assert!(found.insert(key, list_of(&value)).is_none(), "a scan has passed {key} twice");
            match scan.way {
                _ if found.len() < scan.most => {}
                Way::Backward => passed.start = key,
                _ => passed.end = key + 1,
            }
        }
    }
    scan.passed = Some(passed.map(|key| (key, found.remove(&key).unwrap_or_default())).collect());
    assert!(found.is_empty(), "a scan of {:?} has found {found:?}", scan.keys);
    Ok(())
}

/// How the transactions of a history are.
#[derive(Clone, Copy)]
struct Kind {
    workload: Workload,
    isolation: Isolation,
    /// Transactions scan, and put new keys where others scan: only phantoms have them depend on
    /// what others change.
    phantoms: bool,
    /// A bug of the store that is switched on.
    plant: Option<StoreBug>,
}

const LISTS: Kind = Kind {
    workload: Workload::ListAppend,
    isolation: Isolation::Serializable,
    phantoms: false,
    plant: None,
};
const REGISTERS: Kind = Kind { workload: Workload::RwRegister, ..LISTS };
const PHANTOMS: Kind = Kind { phantoms: true, ..LISTS };
const SNAPSHOT_LISTS: Kind = Kind { isolation: Isolation::Snapshot, ..LISTS };
const SNAPSHOT_REGISTERS: Kind = Kind { isolation: Isolation::Snapshot, ..REGISTERS };
const SNAPSHOT_PHANTOMS: Kind = Kind { isolation: Isolation::Snapshot, ..PHANTOMS };

/// Threads run random transactions on few keys. Some of the keys change all the time, so that lists
/// stay short.
fn history(store: &Store, kind: Kind, transactions: u64, seed: u64) -> (String, u64) {
    let tree = store.tree_or_create("lists").unwrap();
    let options = TransactionOptions::new().isolation(kind.isolation).durability(Durability::None);
    let recorder = Recorder::new(kind.workload);
    let (next, conflicts) = (AtomicU64::new(1), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for process in 0..PROCESSES {
            let (recorder, next, conflicts, tree) = (&recorder, &next, &conflicts, &tree);
            scope.spawn(move || {
                plant(kind.plant);
                let random = &mut Random(seed * 16 + process);
                for number in 0..transactions {
                    let actions = random_actions(random, kind, number / 40 * 4, next);
                    recorder.note("invoke", process, &actions);
                    let mut transaction = store.begin_with(options).unwrap();
                    let mut done = actions.clone();
                    run(&mut transaction, tree, &mut done).unwrap();
                    if random.once_in(4) {
                        std::thread::yield_now();
                    }
                    if random.once_in(20) {
                        transaction.abort();
                        recorder.note("fail", process, &actions);
                        continue;
                    }
                    match transaction.commit() {
                        Ok(()) => recorder.note("ok", process, &done),
                        Err(Error::Conflict) => {
                            conflicts.fetch_add(1, Ordering::Relaxed);
                            recorder.note("fail", process, &actions);
                        }
                        // In a tiny pool, if its lists are in several leaves.
                        Err(Error::TransactionTooLarge(_)) => {
                            recorder.note("fail", process, &actions);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    (recorder.into_lines(), conflicts.into_inner())
}

#[test]
fn serializable_transactions_have_an_order_that_agrees_with_time() {
    let first = seed(1);
    // In memory, and with most leaves and long lists out of memory.
    for (number, pool_pages) in [2000, 24, 16].into_iter().enumerate() {
        for round in 0..u64::from(rounds(50)) {
            for kind in [LISTS, REGISTERS, PHANTOMS] {
                let store = memory_store(pool_pages);
                let filler = store.create_tree("filler").unwrap();
                filler.extend((0..3000_u32).map(|key| (key.to_be_bytes(), [7; 100]))).unwrap();
                let seed = first + round * 10 + number as u64;
                let (lines, conflicts) = history(&store, kind, 400, seed);
                assert!(conflicts > 0, "transactions must meet");
                let (valid, anomalies) = verdict(&lines, kind.workload, "strict-serializable");
                assert_eq!(valid, Valid::True, "seed {seed}, {:?}: {anomalies:?}", kind.workload);
            }
        }
    }
}

#[test]
fn snapshot_isolation_has_only_what_it_may_have() {
    let first = seed(1);
    for (number, pool_pages) in [2000, 16].into_iter().enumerate() {
        for round in 0..u64::from(rounds(50)) {
            for kind in [SNAPSHOT_LISTS, SNAPSHOT_REGISTERS, SNAPSHOT_PHANTOMS] {
                let store = memory_store(pool_pages);
                let seed = first + round * 10 + number as u64;
                let (lines, _) = history(&store, kind, 400, seed);
                let model = "strong-snapshot-isolation";
                let (valid, anomalies) = verdict(&lines, kind.workload, model);
                assert_eq!(valid, Valid::True, "seed {seed}, {:?}: {anomalies:?}", kind.workload);
            }
        }
    }
}

/// The keys from a first one on that transactions use at a time. Of the last ten few are there.
const KEYS: u64 = 16;
const BUSY_KEYS: u64 = 6;

/// What is to be done, at random, with the keys from `first` on.
fn random_actions(random: &mut Random, kind: Kind, first: u64, next: &AtomicU64) -> Vec<Action> {
    let scan = |random: &mut Random, keys| {
        let way = random.pick(&[Way::Forward, Way::Backward, Way::Together]);
        let most = random.pick(&[1, 2, 5, usize::MAX]);
        Action::Scan(Scan { keys, way, most, passed: None })
    };
    if kind.phantoms {
        // The scan has passed some keys that others have put, and some that they are about to put.
        let new = next.fetch_add(1, Ordering::Relaxed);
        let keys = new.saturating_sub(random.below(KEYS))..new + 1 + random.below(KEYS);
        return vec![scan(random, keys), Action::Append(new, new)];
    }
    (0..1 + random.below(5))
        .map(|_| {
            let key = match random.below(5) {
                0 => first + random.below(KEYS),
                _ => first + random.below(BUSY_KEYS),
            };
            let number = || next.fetch_add(1, Ordering::Relaxed);
            match (random.below(8), kind.workload) {
                (0, _) => {
                    let keys = first + random.below(KEYS)..first + KEYS;
                    scan(random, keys)
                }
                (1..4, _) => Action::Read(key, None),
                (_, Workload::ListAppend) => Action::Append(key, number()),
                (_, Workload::RwRegister) => Action::Write(key, number()),
            }
        })
        .collect()
}

/// A history over several lives of a store.
struct Lives {
    recorder: Recorder,
    /// The next number to append.
    next: AtomicU64,
    /// The number of transactions so far. It decides which keys change, so that lists stay short.
    count: AtomicU64,
    kind: Kind,
    seed: u64,
}

impl Lives {
    /// Has threads run transactions until the crash, which comes at any moment.
    fn live(&self, machine: &Machine, store: &Store, life: u64, end: End) -> Crash {
        let tree = store.tree("lists").unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stopping = SetWhenDropped(&stop);
            for process in PROCESSES * life..PROCESSES * (life + 1) {
                let (tree, stop) = (&tree, &stop);
                scope.spawn(move || {
                    let random = &mut Random(self.seed * 1000 + process);
                    while !stop.load(Ordering::Relaxed) {
                        self.transact(store, tree, process, random);
                    }
                });
            }
            let pause = Random(self.seed * 1000 + life).below(30_000);
            std::thread::sleep(Duration::from_micros(2_000 + pause));
            // No transaction is acknowledged between the crash and its record.
            let mut recorded = self.recorder.0.lock().unwrap();
            let crash = machine.crash_now(end);
            for (process, actions) in recorded.under_way.clone() {
                recorded.note("info", process, &actions);
            }
            recorded.life += 1;
            drop(recorded);
            crash
        })
    }

    /// Runs a transaction. It is acknowledged when it is durable, or when what it has read is.
    fn transact(&self, store: &Store, tree: &Tree, process: u64, random: &mut Random) {
        let first = self.count.fetch_add(1, Ordering::Relaxed) / 150 * 4;
        let actions = random_actions(random, self.kind, first, &self.next);
        self.recorder.note("invoke", process, &actions);
        let is_read = |action| matches!(action, &Action::Read(..) | &Action::Scan(_));
        let reads = actions.iter().all(is_read);
        let durability = match reads || random.once_in(2) {
            true => Durability::Synced,
            false => random.pick(&[Durability::Buffered, Durability::None]),
        };
        let isolation = self.kind.isolation;
        let options = TransactionOptions::new().isolation(isolation).durability(durability);
        let mut transaction = store.begin_with(options).unwrap();
        let mut done = actions.clone();
        run(&mut transaction, tree, &mut done).unwrap();
        match transaction.commit() {
            Ok(()) => {}
            Err(Error::Conflict) => return self.recorder.note("fail", process, &actions),
            Err(error) => panic!("{error}"),
        }
        if durability != Durability::Synced {
            // Meanwhile others see the changes, and a crash may take them.
            std::thread::sleep(Duration::from_micros(random.below(500)));
        }
        // With snapshot isolation, a transaction that only reads does not wait for what it saw.
        if durability != Durability::Synced || (reads && isolation == Isolation::Snapshot) {
            store.sync().unwrap();
        }
        self.recorder.note("ok", process, &done);
    }
}

/// The store loses power, or its process is killed, several times. Each time other processes go on
/// with what is left.
fn history_over_crashes(kind: Kind, seed: u64, lives: u64) -> String {
    let segments =
        SimulatedOptions { seed, segments: 256, segment_blocks: 16, ..Default::default() };
    let mut machine = Machine::new(SimulatedDevice::new(segments), seed);
    let options = |machine: &Arc<Machine>| {
        // In so small a pool, most nodes leave memory between two changes.
        let options = Options::new().pool_bytes(384 << 10).log_bytes(64 << 10);
        options.log_device(machine.log_device()).recovery_bytes(64 << 10)
    };
    let mut store = Store::create_on(machine.clone(), &options(&machine)).unwrap();
    store.create_tree("lists").unwrap();
    store.sync().unwrap();
    let of_history = Lives {
        recorder: Recorder::new(kind.workload),
        next: AtomicU64::new(1),
        count: AtomicU64::new(0),
        kind,
        seed,
    };
    for life in 0..lives {
        let end = if (seed + life).is_multiple_of(3) { End::Kill } else { End::PowerLoss };
        let crash = of_history.live(&machine, &store, life, end);
        drop(store);
        machine = Machine::restarted(crash, seed * 1000 + life);
        store = Store::open_on(machine.clone(), &options(&machine)).unwrap();
    }
    // All keys as they are in the end.
    let process = PROCESSES * lives;
    let keys = of_history.count.load(Ordering::Relaxed) / 150 * 4 + KEYS;
    let mut reads: Vec<_> = (0..keys).map(|key| Action::Read(key, None)).collect();
    of_history.recorder.note("invoke", process, &reads);
    let mut transaction = store.begin().unwrap();
    run(&mut transaction, &store.tree("lists").unwrap(), &mut reads).unwrap();
    transaction.commit().unwrap();
    of_history.recorder.note("ok", process, &reads);
    of_history.recorder.into_lines()
}

/// The histories of so many seeds over crashes.
fn over_crashes(kind: Kind, seeds: u64, mut judge: impl FnMut(u64, &str)) {
    let first = seed(1);
    let mut unknown = 0;
    for seed in first..first + seeds * u64::from(rounds(50)) {
        let lines = history_over_crashes(kind, seed, 4);
        unknown += lines.matches(r#""type":"info""#).count();
        judge(seed, &lines);
    }
    assert!(unknown > 0, "crashes must meet transactions");
}

#[test]
fn transactions_have_an_order_over_crashes() {
    for (kind, seeds) in [(LISTS, 12), (REGISTERS, 4)] {
        over_crashes(kind, seeds, |seed, lines| {
            let (valid, anomalies) = verdict(lines, kind.workload, "strict-serializable");
            assert_eq!(valid, Valid::True, "seed {seed}, {:?}: {anomalies:?}", kind.workload);
        });
    }
}

/// Whether all of these are write skew, which snapshot isolation permits.
fn are_write_skew(anomalies: &[String]) -> bool {
    anomalies.iter().all(|kind| kind.starts_with("G2"))
}

#[test]
fn snapshot_isolation_has_only_what_it_may_have_over_crashes() {
    let mut skewed = 0;
    for (kind, seeds) in [(SNAPSHOT_LISTS, 8), (SNAPSHOT_REGISTERS, 4)] {
        over_crashes(kind, seeds, |seed, lines| {
            let (valid, anomalies) = verdict(lines, kind.workload, "strong-snapshot-isolation");
            assert_eq!(valid, Valid::True, "seed {seed}, {:?}: {anomalies:?}", kind.workload);
            let (valid, anomalies) = verdict(lines, kind.workload, "strict-serializable");
            assert!(are_write_skew(&anomalies), "seed {seed}: {anomalies:?}");
            skewed += u32::from(valid == Valid::False);
        });
    }
    assert!(skewed > 0, "no history has shown write skew");
}

/// Write skew, which snapshot isolation permits, is found if it is looked for.
#[test]
fn snapshot_isolation_has_write_skew() {
    for kind in [SNAPSHOT_LISTS, SNAPSHOT_REGISTERS, SNAPSHOT_PHANTOMS] {
        let found = (1..200).any(|seed| {
            let store = memory_store(200);
            let (lines, _) = history(&store, kind, 300, seed);
            let (valid, anomalies) = verdict(&lines, kind.workload, "serializable");
            valid == Valid::False && are_write_skew(&anomalies)
        });
        assert!(found, "no history of {:?} has shown write skew", kind.workload);
    }
}

/// Histories of stores with bugs are not taken for good ones.
#[test]
fn the_checker_finds_planted_bugs() {
    for (bug, kind, model) in [
        (StoreBug::UncheckedKeys, LISTS, "serializable"),
        (StoreBug::UncheckedKeys, REGISTERS, "serializable"),
        (StoreBug::UncheckedRanges, LISTS, "serializable"),
        (StoreBug::UncheckedRanges, REGISTERS, "serializable"),
        (StoreBug::UncheckedRanges, PHANTOMS, "serializable"),
        (StoreBug::UncheckedWrites, SNAPSHOT_LISTS, "snapshot-isolation"),
        (StoreBug::UncheckedWrites, SNAPSHOT_REGISTERS, "snapshot-isolation"),
    ] {
        let kind = Kind { plant: Some(bug), ..kind };
        let found = (1..200).any(|seed| {
            let store = memory_store(200);
            let (lines, _) = history(&store, kind, 300, seed);
            verdict(&lines, kind.workload, model).0 == Valid::False
        });
        assert!(found, "{bug:?} of {:?} was not found", kind.workload);
    }
}

/// A history of two transactions at the same time, and of one behind them.
fn made_by_hand(workload: Workload, pair: [&[Action]; 2], behind: &[Action]) -> String {
    let recorder = Recorder::new(workload);
    for kind in ["invoke", "ok"] {
        (0..).zip(pair).for_each(|(process, actions)| recorder.note(kind, process, actions));
    }
    ["invoke", "ok"].iter().for_each(|kind| recorder.note(kind, 2, behind));
    recorder.into_lines()
}

/// A scan of the keys 1 to 3 that has found these lists.
fn scan_of(found: [&[u64]; 3]) -> Action {
    let passed = (1..4).zip(found).map(|(key, list)| (key, list.to_vec())).collect();
    let (way, most) = (Way::Forward, usize::MAX);
    Action::Scan(Scan { keys: 1..4, way, most, passed: Some(passed) })
}

#[test]
fn the_checker_tells_phantoms_from_what_may_be() {
    let none: [&[u64]; 3] = [&[]; 3];
    let read = |key, list: &[u64]| Action::Read(key, Some(list.to_vec()));
    let judge = |lines: &str, model| verdict(lines, Workload::ListAppend, model).0;
    let history =
        |pair: [&[Action]; 2], behind: &[Action]| made_by_hand(Workload::ListAppend, pair, behind);

    // Each has found nothing in the range, and has put a key there.
    let insert = |key| [scan_of(none), Action::Append(key, key)];
    let both = history([&insert(1), &insert(3)], &[scan_of([&[1], &[], &[3]])]);
    assert_eq!(judge(&both, "serializable"), Valid::False);
    assert_eq!(judge(&both, "strong-snapshot-isolation"), Valid::True);

    // A key has come into the range, and what came with it elsewhere was seen.
    let comes = [Action::Append(2, 2), Action::Append(9, 2)];
    let torn = history([&comes, &[scan_of(none), read(9, &[2])]], &[]);
    // The same range has another key the second time.
    let second = [scan_of(none), scan_of([&[], &[2], &[]])];
    let twice = history([&comes, &second], &[]);
    for model in ["serializable", "snapshot-isolation"] {
        assert_eq!(judge(&torn, model), Valid::False, "{model}");
        assert_eq!(judge(&twice, model), Valid::False, "{model}");
    }

    // The one that has found nothing comes first; or a scan has stopped before the new key.
    let first = [scan_of(none), read(9, &[]), Action::Append(8, 1)];
    let accepted = history([&comes, &first], &[scan_of([&[], &[2], &[]]), read(8, &[1])]);
    let keys = 1..4;
    let passed = Some(vec![(1, vec![])]);
    let stopped = Action::Scan(Scan { keys, way: Way::Forward, most: 1, passed });
    let stopped = history([&comes, &[stopped, read(9, &[2])]], &[]);
    for lines in [accepted, stopped] {
        assert_eq!(judge(&lines, "strict-serializable"), Valid::True, "{lines}");
    }

    // The key was there before the scan began.
    let late = history([&comes, &[]], &[scan_of(none)]);
    assert_eq!(judge(&late, "serializable"), Valid::True);
    for model in ["strict-serializable", "strong-snapshot-isolation"] {
        assert_eq!(judge(&late, model), Valid::False, "{model}");
    }
}

#[test]
fn the_checker_finds_anomalies_of_registers() {
    use Action::{Read, Write};
    let judge = |lines: &str, model| verdict(lines, Workload::RwRegister, model).0;
    let history =
        |pair: [&[Action]; 2], behind: &[Action]| made_by_hand(Workload::RwRegister, pair, behind);
    let (none, is) = (Some(vec![]), |value| Some(vec![value]));
    let models = ["strict-serializable", "strong-snapshot-isolation"];
    // Two that write without reading have an order.
    let both = [Write(1, 2), Write(2, 2)];
    let blind = history([&[Write(1, 1), Write(2, 1)], &both], &[Read(1, is(2)), Read(2, is(2))]);
    models.iter().for_each(|model| assert_eq!(judge(&blind, model), Valid::True));
    // Half of a transaction; a register that was written and is as before; a lost update.
    let half = history([&both, &[Read(1, is(2)), Read(2, none.clone())]], &[]);
    let stale = history([&both, &[]], &[Read(1, none.clone())]);
    let update = |value| [Read(1, none.clone()), Write(1, value)];
    let lost = history([&update(1), &update(2)], &[]);
    for lines in [half, stale, lost] {
        models.iter().for_each(|model| assert_eq!(judge(&lines, model), Valid::False, "{lines}"));
    }
}

/// The checker finds what it is trusted to find.
#[test]
fn the_checker_finds_anomalies_that_were_made_by_hand() {
    let pair = |one: &str, two: &str| {
        format!(
            "{{\"type\":\"invoke\",\"process\":0,\"value\":{one}}}\n\
             {{\"type\":\"invoke\",\"process\":1,\"value\":{two}}}\n\
             {{\"type\":\"ok\",\"process\":0,\"value\":{one}}}\n\
             {{\"type\":\"ok\",\"process\":1,\"value\":{two}}}\n"
        )
    };
    let reader = |history: String, reads: &str| {
        format!(
            "{history}{{\"type\":\"invoke\",\"process\":2,\"value\":{reads}}}\n\
             {{\"type\":\"ok\",\"process\":2,\"value\":{reads}}}\n"
        )
    };
    // G0: the appends of two transactions come in different orders.
    let writes = pair(r#"[["append",1,1],["append",2,1]]"#, r#"[["append",1,2],["append",2,2]]"#);
    let g0 = reader(writes, r#"[["r",1,[1,2]],["r",2,[2,1]]]"#);
    // G1a: what was read was never committed.
    let g1a = "{\"type\":\"invoke\",\"process\":0,\"value\":[[\"append\",1,1]]}\n\
               {\"type\":\"fail\",\"process\":0,\"value\":[[\"append\",1,1]]}\n\
               {\"type\":\"invoke\",\"process\":1,\"value\":[[\"r\",1,null]]}\n\
               {\"type\":\"ok\",\"process\":1,\"value\":[[\"r\",1,[1]]]}\n";
    // G1b: half of a transaction was read.
    let g1b = pair(r#"[["append",1,1],["append",1,2]]"#, r#"[["r",1,[1]]]"#);
    // G1c: each has read what the other one has appended.
    let g1c = pair(r#"[["append",1,1],["r",2,[1]]]"#, r#"[["append",2,1],["r",1,[1]]]"#);
    // G-single: a lost update and a read skew.
    let lost = pair(r#"[["r",1,[]],["append",1,1]]"#, r#"[["r",1,[]],["append",1,2]]"#);
    let lost = reader(lost, r#"[["r",1,[1,2]]]"#);
    let skew = pair(r#"[["append",1,1],["append",2,1]]"#, r#"[["r",1,[]],["r",2,[1]]]"#);
    for (name, history) in [
        ("G0", &g0[..]),
        ("G1a", g1a),
        ("G1b", &g1b),
        ("G1c", &g1c),
        ("lost update", &lost),
        ("read skew", &skew),
    ] {
        for model in ["serializable", "snapshot-isolation"] {
            assert_eq!(verdict(history, LISTS.workload, model).0, Valid::False, "{name}, {model}");
        }
    }
    // G2: write skew.
    let write_skew = pair(
        r#"[["r",1,[]],["r",2,[]],["append",1,1]]"#,
        r#"[["r",1,[]],["r",2,[]],["append",2,1]]"#,
    );
    assert_eq!(verdict(&write_skew, LISTS.workload, "serializable").0, Valid::False);
    assert_eq!(verdict(&write_skew, LISTS.workload, "snapshot-isolation").0, Valid::True);
}
