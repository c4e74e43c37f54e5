//! Histories of concurrent transactions, in memory, out of memory and over crashes, given to a
//! checker of dependency cycles (the crate `adya`, which works as Jepsen's Elle).
//!
//! Each value is a list, and a transaction appends a number that no other one appends. So each list
//! tells the order of all changes of its key. The checker is checked itself: it must find the
//! anomalies of histories that have them.
//!
//! A crash ends the transactions that are under way with an unknown outcome: the checker takes one
//! for committed if a later transaction has seen what it appended. A transaction that was
//! acknowledged as durable must be there.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use adya::{History, Opts, Valid, Workload, check};
use vellum::{
    Durability, Error, Isolation, MemoryDevice, Options, Store, Transaction, TransactionOptions,
    Tree,
};
use vellum_log::{SimulatedDevice, SimulatedOptions};
use vellum_sim::{Crash, End, Machine};
use vellum_testing::patience::SetWhenDropped;
use vellum_testing::random::Random;
use vellum_testing::rounds::{rounds, seed};

/// The number of threads.
const PROCESSES: u64 = 4;

/// What a transaction does with a key.
#[derive(Clone, Debug)]
enum Action {
    Append(u64, u64),
    Read(u64, Option<Vec<u64>>),
}

/// A history in the checker's notation.
#[derive(Debug, Default)]
struct Recorder(Mutex<Recorded>);

#[derive(Debug, Default)]
struct Recorded {
    lines: String,
    /// What each process has begun and not ended.
    under_way: BTreeMap<u64, Vec<Action>>,
    /// The number of crashes so far. After a crash other processes go on.
    life: u64,
}

impl Recorder {
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
        let mut text = format!("{{\"type\":\"{kind}\",\"process\":{process},\"value\":[");
        for (index, action) in actions.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match action {
                Action::Append(key, value) => {
                    write!(text, "{comma}[\"append\",{key},{value}]").unwrap();
                }
                Action::Read(key, None) => write!(text, "{comma}[\"r\",{key},null]").unwrap(),
                Action::Read(key, Some(list)) => {
                    write!(text, "{comma}[\"r\",{key},{list:?}]").unwrap();
                }
            }
        }
        text.push_str("]}\n");
        self.lines.push_str(&text);
    }
}

fn verdict(lines: &str, model: &str) -> (Valid, Vec<String>) {
    let options = Opts { models: vec![model.into()], ..Opts::default() };
    let report = check(&History::from_json(lines).unwrap(), Workload::ListAppend, &options);
    (report.valid, report.anomaly_types)
}

fn list_of(value: &[u8]) -> Vec<u64> {
    value.chunks(8).map(|number| u64::from_le_bytes(number.try_into().unwrap())).collect()
}

/// A store in memory with a pool of so many pages.
fn memory_store(pool_pages: u64) -> Store {
    let options = Options::new().pool_bytes(pool_pages * 4096);
    Store::create_on(Arc::new(MemoryDevice::new()), &options).unwrap()
}

/// A tree of lists. Lists of some length are on pages of their own.
fn run(
    transaction: &mut Transaction,
    tree: &Tree,
    actions: &mut [Action],
    scans: bool,
) -> vellum::Result<()> {
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
            Action::Read(key, list) if scans => {
                let from = key.to_be_bytes();
                let entry = transaction.range(tree, from..=from)?.next().transpose()?;
                *list = Some(entry.map_or(Vec::new(), |(_, value)| list_of(&value)));
            }
            Action::Read(key, list) => {
                let value = transaction.get(tree, &key.to_be_bytes())?;
                *list = Some(value.map_or(Vec::new(), |value| list_of(&value)));
            }
        }
    }
    Ok(())
}

/// Threads run random transactions on few keys. Some of the keys change all the time, so that lists
/// stay short.
fn history(store: &Store, isolation: Isolation, transactions: u64, seed: u64) -> (String, u64) {
    let tree = store.tree_or_create("lists").unwrap();
    let options = TransactionOptions::new().isolation(isolation).durability(Durability::None);
    let (recorder, next, conflicts) = (Recorder::default(), AtomicU64::new(1), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for process in 0..PROCESSES {
            let (recorder, next, conflicts, tree) = (&recorder, &next, &conflicts, &tree);
            scope.spawn(move || {
                let random = &mut Random(seed * 16 + process);
                for number in 0..transactions {
                    let actions = random_actions(random, number / 40 * 4, next);
                    recorder.note("invoke", process, &actions);
                    let mut transaction = store.begin_with(options).unwrap();
                    let mut done = actions.clone();
                    run(&mut transaction, tree, &mut done, random.once_in(3)).unwrap();
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
            let store = memory_store(pool_pages);
            let filler = store.create_tree("filler").unwrap();
            filler.extend((0..3000_u32).map(|key| (key.to_be_bytes(), [7; 100]))).unwrap();
            let seed = first + round * 10 + number as u64;
            let (lines, conflicts) = history(&store, Isolation::Serializable, 400, seed);
            assert!(conflicts > 0, "transactions must meet");
            let (valid, anomalies) = verdict(&lines, "strict-serializable");
            assert_eq!(valid, Valid::True, "seed {seed}: {anomalies:?}");
        }
    }
}

#[test]
fn snapshot_isolation_has_only_what_it_may_have() {
    let first = seed(1);
    for (number, pool_pages) in [2000, 16].into_iter().enumerate() {
        for round in 0..u64::from(rounds(50)) {
            let store = memory_store(pool_pages);
            let seed = first + round * 10 + number as u64;
            let (lines, _) = history(&store, Isolation::Snapshot, 400, seed);
            let (valid, anomalies) = verdict(&lines, "strong-snapshot-isolation");
            assert_eq!(valid, Valid::True, "seed {seed}: {anomalies:?}");
        }
    }
}

/// What is to be done, at random: appends and reads of six keys from `first` on.
fn random_actions(random: &mut Random, first: u64, next: &AtomicU64) -> Vec<Action> {
    (0..1 + random.below(5))
        .map(|_| {
            let key = first + random.below(6);
            match random.below(2) {
                0 => Action::Append(key, next.fetch_add(1, Ordering::Relaxed)),
                _ => Action::Read(key, None),
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
        let actions = random_actions(random, first, &self.next);
        self.recorder.note("invoke", process, &actions);
        let reads = actions.iter().all(|action| matches!(action, Action::Read(..)));
        let durability = match reads || random.once_in(2) {
            true => Durability::Synced,
            false => random.pick(&[Durability::Buffered, Durability::None]),
        };
        let options = TransactionOptions::new().durability(durability);
        let mut transaction = store.begin_with(options).unwrap();
        let mut done = actions.clone();
        run(&mut transaction, tree, &mut done, random.once_in(4)).unwrap();
        match transaction.commit() {
            Ok(()) => {}
            Err(Error::Conflict) => return self.recorder.note("fail", process, &actions),
            Err(error) => panic!("{error}"),
        }
        if durability != Durability::Synced {
            // Meanwhile others see the changes, and a crash may take them.
            std::thread::sleep(Duration::from_micros(random.below(500)));
            store.sync().unwrap();
        }
        self.recorder.note("ok", process, &done);
    }
}

/// The store loses power, or its process is killed, several times. Each time other processes go on
/// with what is left.
fn history_over_crashes(seed: u64, lives: u64) -> String {
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
        recorder: Recorder::default(),
        next: AtomicU64::new(1),
        count: AtomicU64::new(0),
        seed,
    };
    for life in 0..lives {
        let end = if (seed + life).is_multiple_of(3) { End::Kill } else { End::PowerLoss };
        let crash = of_history.live(&machine, &store, life, end);
        drop(store);
        machine = Machine::restarted(crash, seed * 1000 + life);
        store = Store::open_on(machine.clone(), &options(&machine)).unwrap();
    }
    // All lists as they are in the end.
    let process = PROCESSES * lives;
    let keys = of_history.count.load(Ordering::Relaxed) / 150 * 4 + 6;
    let mut reads: Vec<_> = (0..keys).map(|key| Action::Read(key, None)).collect();
    of_history.recorder.note("invoke", process, &reads);
    let mut transaction = store.begin().unwrap();
    run(&mut transaction, &store.tree("lists").unwrap(), &mut reads, false).unwrap();
    transaction.commit().unwrap();
    of_history.recorder.note("ok", process, &reads);
    of_history.recorder.into_lines()
}

#[test]
fn transactions_have_an_order_over_crashes() {
    let first = seed(1);
    let mut unknown = 0;
    for seed in first..first + 12 * u64::from(rounds(50)) {
        let lines = history_over_crashes(seed, 4);
        unknown += lines.matches(r#""type":"info""#).count();
        let (valid, anomalies) = verdict(&lines, "strict-serializable");
        assert_eq!(valid, Valid::True, "seed {seed}: {anomalies:?}");
    }
    assert!(unknown > 0, "crashes must meet transactions");
}

/// Write skew, which snapshot isolation permits, is found if it is looked for.
#[test]
fn snapshot_isolation_has_write_skew() {
    let found = (1..200).any(|seed| {
        let store = memory_store(200);
        let (lines, _) = history(&store, Isolation::Snapshot, 300, seed);
        let (valid, anomalies) = verdict(&lines, "serializable");
        valid == Valid::False && anomalies.iter().all(|kind| kind.starts_with("G2"))
    });
    assert!(found, "no history has shown write skew");
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
            assert_eq!(verdict(history, model).0, Valid::False, "{name}, {model}");
        }
    }
    // G2: write skew.
    let write_skew = pair(
        r#"[["r",1,[]],["r",2,[]],["append",1,1]]"#,
        r#"[["r",1,[]],["r",2,[]],["append",2,1]]"#,
    );
    assert_eq!(verdict(&write_skew, "serializable").0, Valid::False);
    assert_eq!(verdict(&write_skew, "snapshot-isolation").0, Valid::True);
}
