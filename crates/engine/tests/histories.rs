//! Histories of concurrent transactions, given to a checker of dependency cycles (the crate `adya`,
//! which works as Jepsen's Elle).
//!
//! Each value is a list, and a transaction appends a number that no other one appends. So each list
//! tells the order of all changes of its key. The checker is checked itself: it must find the
//! anomalies of histories that have them.
#![allow(clippy::unwrap_used)]

mod common;

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use adya::{History, Opts, Valid, Workload, check};
use common::{Random, memory_store, rounds, seed};
use vellum::{Durability, Error, Isolation, Store, Transaction, TransactionOptions, Tree};

/// What a transaction does with a key.
#[derive(Clone, Debug)]
enum Action {
    Append(u64, u64),
    Read(u64, Option<Vec<u64>>),
}

/// A history in the checker's notation.
#[derive(Debug, Default)]
struct Recorder {
    lines: Mutex<String>,
}

impl Recorder {
    fn note(&self, kind: &str, process: u64, actions: &[Action]) {
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
        self.lines.lock().unwrap().push_str(&text);
    }
}

fn options(model: &str) -> Opts {
    Opts { models: vec![model.into()], ..Opts::default() }
}

fn verdict(lines: &str, model: &str) -> (Valid, Vec<String>) {
    let report = check(&History::from_json(lines).unwrap(), Workload::ListAppend, &options(model));
    (report.valid, report.anomaly_types)
}

fn list_of(value: &[u8]) -> Vec<u64> {
    value.chunks(8).map(|number| u64::from_le_bytes(number.try_into().unwrap())).collect()
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
        for process in 0..4 {
            let (recorder, next, conflicts, tree) = (&recorder, &next, &conflicts, &tree);
            scope.spawn(move || {
                let random = &mut Random(seed * 16 + process);
                for number in 0..transactions {
                    let first = number / 40 * 4;
                    let actions: Vec<_> = (0..1 + random.below(5))
                        .map(|_| {
                            let key = first + random.below(6);
                            match random.below(2) {
                                0 => Action::Append(key, next.fetch_add(1, Ordering::Relaxed)),
                                _ => Action::Read(key, None),
                            }
                        })
                        .collect();
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
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    (recorder.lines.into_inner().unwrap(), conflicts.into_inner())
}

#[test]
fn serializable_transactions_have_an_order_that_agrees_with_time() {
    let first = seed(1);
    // In memory, and with most leaves and long lists out of memory.
    for (number, pool_pages) in [2000, 24, 16].into_iter().enumerate() {
        for round in 0..u64::from(rounds(50)) {
            let (_, store) = memory_store(pool_pages, 1);
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
            let (_, store) = memory_store(pool_pages, 1);
            let seed = first + round * 10 + number as u64;
            let (lines, _) = history(&store, Isolation::Snapshot, 400, seed);
            let (valid, anomalies) = verdict(&lines, "strong-snapshot-isolation");
            assert_eq!(valid, Valid::True, "seed {seed}: {anomalies:?}");
        }
    }
}

/// Write skew, which snapshot isolation permits, is found if it is looked for.
#[test]
fn snapshot_isolation_has_write_skew() {
    let found = (1..200).any(|seed| {
        let (_, store) = memory_store(200, 1);
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
