//! The behaviour that all engines must share, on real files: Vellum and the peers of this build.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::Path;
use std::thread;

use vellum_bench::engine::{
    Access, Conflict, DURABILITY, Direction, Engine, Factory, Pair, Session, Setting, TRANSACTIONS,
    VELLUM,
};
use vellum_bench::workload::tpcc::Scale;
use vellum_bench::workload::values::Random;
use vellum_bench::workload::ycsb::Kind;
use vellum_bench::workload::{Lookup, Plan, Scan, Tpcc, Work, Ycsb};
use vellum_bench_peers::ALL;

const CACHE: u64 = 16 << 20;

/// An engine and its options.
#[derive(Clone, Copy, Debug)]
struct Variant {
    factory: Factory,
    options: &'static [(&'static str, &'static str)],
}

/// Every engine with the options of its kinds of transactions and logs.
fn variants() -> impl Iterator<Item = Variant> {
    const SERIALIZABLE: (&str, &str) = (TRANSACTIONS, "serializable");
    const BUFFERED: (&str, &str) = (DURABILITY, "buffered");
    const SYNCED: (&str, &str) = (DURABILITY, "synced");
    std::iter::once(VELLUM).chain(ALL.iter().copied()).flat_map(|factory| {
        let all: &[&'static [(&'static str, &'static str)]] = match factory.name {
            "vellum" => &[
                &[],
                &[BUFFERED],
                &[SYNCED],
                &[SERIALIZABLE],
                &[SERIALIZABLE, BUFFERED],
                &[SERIALIZABLE, SYNCED],
            ],
            "rocksdb" => &[&[], &[SYNCED], &[SERIALIZABLE], &[SERIALIZABLE, BUFFERED]],
            "lmdb" | "redb" | "fjall" => &[&[], &[SYNCED]],
            _ => &[&[]],
        };
        all.iter().map(move |options| Variant { factory, options })
    })
}

impl Variant {
    fn setting(&self, directory: &Path, tables: Vec<String>) -> Setting {
        println!("{} {:?}", self.factory.name, self.options);
        let mut setting = Setting { tables, ..Setting::new(directory, CACHE) };
        let options = self.options.iter();
        let options = options.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        setting.options.extend(options);
        setting
    }

    /// Opens it with tables `a` and `b`.
    fn open(&self, directory: &Path) -> Box<dyn Engine> {
        let setting = self.setting(directory, vec!["a".to_owned(), "b".to_owned()]);
        let opened = (self.factory.open)(&setting);
        opened.unwrap_or_else(|error| panic!("{self:?}: {error:#}"))
    }
}

/// Runs a test with every variant, in an empty directory.
fn with_each(test: impl Fn(&dyn Engine)) {
    for variant in variants() {
        let directory = tempfile::tempdir().unwrap();
        test(&*variant.open(directory.path()));
    }
}

/// Runs a test with those variants whose transactions are isolated.
fn with_each_isolating(test: impl Fn(&dyn Engine)) {
    with_each(|engine| {
        let isolates = engine.session().unwrap().isolates();
        if isolates {
            test(engine);
        }
    });
}

fn get(session: &mut dyn Session, table: usize, key: &[u8]) -> Option<Vec<u8>> {
    let mut found = None;
    let there = session.get(table, key, &mut |value| found = Some(value.to_vec())).unwrap();
    assert_eq!(there, found.is_some());
    found
}

fn multi_get(session: &mut dyn Session, keys: &[&[u8]]) -> Vec<Option<Vec<u8>>> {
    let mut found = vec![None; keys.len()];
    let mut seen = vec![0; keys.len()];
    let mut read = |index: usize, value: Option<&[u8]>| {
        seen[index] += 1;
        found[index] = value.map(<[u8]>::to_vec);
    };
    session.multi_get(0, keys, &mut read).unwrap();
    assert!(seen.iter().all(|&times| times == 1), "shown that often: {seen:?}");
    found
}

fn scan(session: &mut dyn Session, from: &[u8], direction: Direction, most: usize) -> Vec<Pair> {
    let mut found = Vec::new();
    let mut visit = |key: &[u8], value: &[u8]| {
        found.push((key.to_vec(), value.to_vec()));
        found.len() < most
    };
    session.scan(0, from, direction, &mut visit).unwrap();
    found
}

fn pair(number: u32) -> Pair {
    (number.to_be_bytes().to_vec(), format!("value {number}").into_bytes())
}

#[test]
fn loaded_entries_are_found() {
    with_each(|engine| {
        engine.load(0, &mut (0..5000).map(|number| pair(number * 2))).unwrap();
        engine.load(1, &mut std::iter::empty()).unwrap();
        engine.settle().unwrap();
        let mut session = engine.session().unwrap();
        for number in (0..10_000).step_by(7) {
            let (key, value) = pair(number);
            assert_eq!(get(&mut *session, 0, &key), (number % 2 == 0).then_some(value));
            assert_eq!(get(&mut *session, 1, &key), None);
        }
        let keys: Vec<Vec<u8>> = (0..100).rev().map(|number| pair(number * 101).0).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        for (key, value) in keys.iter().zip(multi_get(&mut *session, &keys)) {
            assert_eq!(value, get(&mut *session, 0, key));
        }
        assert_eq!(multi_get(&mut *session, &[]), []);
        assert_eq!(scan(&mut *session, &[], Direction::Forward, usize::MAX).len(), 5000);
    });
}

#[test]
fn entries_come_change_and_go() {
    with_each(|engine| {
        let mut session = engine.session().unwrap();
        let long = vec![7; 100_000];
        let values: [(&[u8], &[u8]); 6] =
            [(b"a", b""), (b"ab", b"x"), (b"abc", b"y"), (b"b", b""), (b"\0", b"0"), (b"z", &long)];
        for (key, value) in values {
            session.put(0, key, value).unwrap();
        }
        for (key, value) in values {
            assert_eq!(get(&mut *session, 0, key).as_deref(), Some(value));
            assert_eq!(get(&mut *session, 1, key), None);
        }
        session.put(0, b"a", b"longer").unwrap();
        session.put(0, b"z", b"short").unwrap();
        assert_eq!(get(&mut *session, 0, b"a").unwrap(), b"longer");
        assert_eq!(get(&mut *session, 0, b"z").unwrap(), b"short");

        assert!(session.update(0, b"a", &mut |value| value.reverse()).unwrap());
        assert!(session.update(0, b"b", &mut |value| assert!(value.is_empty())).unwrap());
        assert!(!session.update(0, b"nobody", &mut |_| unreachable!()).unwrap());
        assert_eq!(get(&mut *session, 0, b"a").unwrap(), b"regnol");
        assert_eq!(get(&mut *session, 0, b"nobody"), None);

        assert!(session.remove(0, b"ab").unwrap());
        assert!(!session.remove(0, b"ab").unwrap());
        assert!(!session.remove(1, b"a").unwrap());
        let keys = scan(&mut *session, b"\0", Direction::Forward, usize::MAX);
        let keys: Vec<&[u8]> = keys.iter().map(|(key, _)| &key[..]).collect();
        let left: [&[u8]; 5] = [b"\0", b"a", b"abc", b"b", b"z"];
        assert_eq!(keys, left);
    });
}

#[test]
fn scans_begin_at_any_key_and_go_both_ways() {
    with_each(|engine| {
        let mut session = engine.session().unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            assert_eq!(scan(&mut *session, b"any", direction, 9), []);
        }
        let entries: Vec<Pair> = (1..=1000).map(|number| pair(number * 10)).collect();
        engine.load(0, &mut entries.clone().into_iter()).unwrap();
        engine.load(1, &mut (0..2000).map(pair)).unwrap();
        for from in [0, 1, 9, 10, 11, 5000, 5005, 9999, 10_000, 10_001, u32::MAX] {
            let key = from.to_be_bytes();
            let first = (from as usize).div_ceil(10).saturating_sub(1).min(1000);
            let expected = &entries[first..];
            assert_eq!(scan(&mut *session, &key, Direction::Forward, usize::MAX), expected);
            let few = &expected[..expected.len().min(3)];
            assert_eq!(scan(&mut *session, &key, Direction::Forward, 3), few);

            let last = (from as usize / 10).min(1000);
            let expected: Vec<Pair> = entries[..last].iter().rev().cloned().collect();
            assert_eq!(scan(&mut *session, &key, Direction::Backward, usize::MAX), expected);
            let few = &expected[..expected.len().min(3)];
            assert_eq!(scan(&mut *session, &key, Direction::Backward, 3), few);
        }
    });
}

#[test]
fn transactions_see_what_they_wrote_and_others_see_it_afterwards() {
    with_each(|engine| {
        engine.load(0, &mut (0..100).map(pair)).unwrap();
        let mut session = engine.session().unwrap();
        session.begin(Access::Write).unwrap();
        session.put(0, b"new", b"1").unwrap();
        assert!(session.update(0, b"new", &mut |value| value[0] += 1).unwrap());
        assert!(session.remove(0, &pair(5).0).unwrap());
        session.put(1, b"other table", b"3").unwrap();
        assert_eq!(get(&mut *session, 0, b"new").unwrap(), b"2");
        assert_eq!(get(&mut *session, 0, &pair(5).0), None);
        assert_eq!(multi_get(&mut *session, &[b"new", &pair(5).0]), [Some(b"2".to_vec()), None]);
        assert_eq!(scan(&mut *session, b"", Direction::Forward, usize::MAX).len(), 100);
        assert_eq!(scan(&mut *session, b"z", Direction::Backward, 1)[0].0, b"new");
        session.commit().unwrap();

        let mut other = engine.session().unwrap();
        other.begin(Access::Read).unwrap();
        assert_eq!(get(&mut *other, 0, b"new").unwrap(), b"2");
        assert_eq!(get(&mut *other, 0, &pair(5).0), None);
        assert_eq!(get(&mut *other, 1, b"other table").unwrap(), b"3");
        assert_eq!(scan(&mut *other, b"", Direction::Forward, usize::MAX).len(), 100);
        other.commit().unwrap();

        session.begin(Access::Write).unwrap();
        session.commit().unwrap();
        other.begin(Access::Write).unwrap();
        assert!(other.remove(0, b"new").unwrap());
        other.commit().unwrap();
        assert_eq!(get(&mut *session, 0, b"new"), None);
    });
}

#[test]
fn what_a_session_wrote_the_others_read_next() {
    with_each(|engine| {
        let mut writer = engine.session().unwrap();
        let mut reader = engine.session().unwrap();
        for number in 0..3000u32 {
            // Every other time the reader has made many reads of an older state before.
            for _ in 0..if number % 1000 == 0 { 2500 } else { number % 3 } {
                get(&mut *reader, 0, b"key");
            }
            writer.put(0, b"key", &number.to_be_bytes()).unwrap();
            assert_eq!(get(&mut *reader, 0, b"key").unwrap(), number.to_be_bytes());
        }
        assert!(writer.remove(0, b"key").unwrap());
        assert_eq!(scan(&mut *reader, b"", Direction::Forward, 1), []);
    });
}

#[test]
fn a_dropped_transaction_stops_nobody() {
    with_each_isolating(|engine| {
        let mut session = engine.session().unwrap();
        session.put(0, b"key", b"old").unwrap();
        session.begin(Access::Write).unwrap();
        session.put(0, b"key", b"new").unwrap();
        drop(session);
        let mut session = engine.session().unwrap();
        assert_eq!(get(&mut *session, 0, b"key").unwrap(), b"old");
        session.put(0, b"key", b"newer").unwrap();
        assert_eq!(get(&mut *session, 0, b"key").unwrap(), b"newer");
        session.begin(Access::Read).unwrap();
        let error = session.put(0, b"key", b"not now").unwrap_err().to_string();
        assert!(error.contains("only reads"), "{error}");
    });
}

/// Runs a transaction until it wins.
fn transact(session: &mut dyn Session, mut work: impl FnMut(&mut dyn Session)) {
    loop {
        session.begin(Access::Write).unwrap();
        work(session);
        match session.commit() {
            Err(error) if error.is::<Conflict>() => {}
            other => return other.unwrap(),
        }
    }
}

fn increment(value: &mut [u8]) {
    let number = u64::from_le_bytes(value.try_into().unwrap());
    value.copy_from_slice(&(number + 1).to_le_bytes());
}

fn counter(session: &mut dyn Session) -> u64 {
    u64::from_le_bytes(get(session, 0, b"counter").unwrap().try_into().unwrap())
}

#[test]
fn no_update_is_lost_between_threads() {
    with_each(|engine| {
        engine.session().unwrap().put(0, b"counter", &0u64.to_le_bytes()).unwrap();
        thread::scope(|scope| {
            for thread in 0..2u8 {
                scope.spawn(move || {
                    let mut session = engine.session().unwrap();
                    let mut last = 0;
                    for number in 0..1000u32 {
                        assert!(session.update(0, b"counter", &mut increment).unwrap());
                        let key = [&[thread], &number.to_be_bytes()[..]].concat();
                        session.put(0, &key, b"").unwrap();
                        let seen = counter(&mut *session);
                        assert!(seen > last, "{seen} after {last}");
                        last = seen;
                    }
                });
            }
        });
        let mut session = engine.session().unwrap();
        assert_eq!(counter(&mut *session), 2000);
        assert_eq!(scan(&mut *session, b"", Direction::Forward, usize::MAX).len(), 2001);
    });
}

#[test]
fn transactions_of_threads_are_single_steps() {
    with_each_isolating(|engine| {
        let step = || {
            let mut session = engine.session().unwrap();
            for _ in 0..500 {
                transact(&mut *session, |session| {
                    let mut count = counter(session).to_le_bytes();
                    increment(&mut count);
                    session.put(0, b"counter", &count).unwrap();
                    session.put(1, b"copy", &count).unwrap();
                });
                session.begin(Access::Read).unwrap();
                let copy = get(&mut *session, 1, b"copy").unwrap();
                assert_eq!(counter(&mut *session).to_le_bytes(), copy[..]);
                session.commit().unwrap();
            }
        };
        let mut session = engine.session().unwrap();
        session.put(0, b"counter", &0u64.to_le_bytes()).unwrap();
        session.put(1, b"copy", &0u64.to_le_bytes()).unwrap();
        thread::scope(|scope| {
            scope.spawn(step);
            scope.spawn(step);
        });
        assert_eq!(counter(&mut *session), 1000);
    });
}

#[test]
fn what_was_settled_is_there_after_reopening() {
    for variant in variants() {
        let directory = tempfile::tempdir().unwrap();
        let engine = variant.open(directory.path());
        engine.load(0, &mut (0..2000).map(pair)).unwrap();
        let mut session = engine.session().unwrap();
        session.put(0, b"put", b"1").unwrap();
        session.put(1, b"second", b"").unwrap();
        session.remove(0, &pair(3).0).unwrap();
        drop(session);
        engine.settle().unwrap();
        drop(engine);

        let engine = variant.open(directory.path());
        let mut session = engine.session().unwrap();
        assert_eq!(scan(&mut *session, b"", Direction::Forward, usize::MAX).len(), 2000);
        assert_eq!(get(&mut *session, 0, b"put").unwrap(), b"1");
        assert_eq!(get(&mut *session, 0, &pair(3).0), None);
        assert_eq!(get(&mut *session, 1, b"second").unwrap(), b"");
        session.put(0, b"put", b"2").unwrap();
        assert_eq!(get(&mut *session, 0, b"put").unwrap(), b"2");
    }
}

#[test]
fn workloads_run() {
    let plan = Plan { threads: 2, seconds: 0.15, seed: 3 };
    with_each(|engine| {
        let lookup = Lookup { entries: 20_000, batch: 1 };
        lookup.load(engine).unwrap();
        engine.settle().unwrap();
        for batch in [1, 32] {
            let measured = Lookup { batch, ..lookup }.run(engine, &plan).unwrap();
            assert!(measured.operations > 100, "{measured:?}");
        }
        for backward in [false, true] {
            Scan { entries: 20_000, length: 500, backward }.run(engine, &plan).unwrap();
        }
    });
    for kind in [Kind::A, Kind::D, Kind::E] {
        with_each(|engine| {
            let ycsb = Ycsb { kind, records: 2000 };
            ycsb.load(engine).unwrap();
            engine.settle().unwrap();
            assert!(ycsb.run(engine, &plan).unwrap().operations > 10);
        });
    }
}

/// The specification's consistency conditions test more than any artificial test of transactions.
#[test]
fn tpcc_leaves_consistent_tables() {
    let tpcc = Tpcc { warehouses: 2, scale: Scale::off_spec(500, 30), seed: 4 };
    for variant in variants() {
        let directory = tempfile::tempdir().unwrap();
        let setting = variant.setting(directory.path(), tpcc.tables());
        let engine = (variant.factory.open)(&setting).unwrap();
        tpcc.load(&*engine).unwrap();
        engine.settle().unwrap();
        let measured = tpcc.run(&*engine, &Plan { threads: 2, seconds: 0.3, seed: 5 }).unwrap();
        assert!(measured.operations > 1, "{measured:?}");
        assert!(tpcc.check(&*engine).unwrap().len() >= 4);
    }
}

#[test]
fn unknown_options_are_refused() {
    for variant in variants() {
        let directory = tempfile::tempdir().unwrap();
        let mut setting = variant.setting(directory.path(), vec!["data".to_owned()]);
        setting.options.insert("warp".to_owned(), "9".to_owned());
        let error = (variant.factory.open)(&setting).err().unwrap().to_string();
        assert!(error.contains("no option 'warp'"), "{variant:?}: {error}");
    }
}

/// A key of one to six letters of three.
fn some_key(random: &mut Random) -> Vec<u8> {
    (0..1 + random.below(6)).map(|_| b"abc"[random.below(3) as usize]).collect()
}

/// One random operation on the engine and on the model, which must agree.
fn step(session: &mut dyn Session, model: &mut BTreeMap<Vec<u8>, Vec<u8>>, random: &mut Random) {
    let key = some_key(random);
    match random.below(6) {
        0 | 1 => {
            let value = vec![random.below(256) as u8; random.below(300) as usize];
            session.put(0, &key, &value).unwrap();
            model.insert(key, value);
        }
        2 => {
            let mut change = |value: &mut [u8]| value.iter_mut().for_each(|byte| *byte ^= 0x55);
            let there = session.update(0, &key, &mut change).unwrap();
            assert_eq!(there, model.contains_key(&key));
            model.get_mut(&key).into_iter().for_each(|value| change(value));
        }
        3 => assert_eq!(session.remove(0, &key).unwrap(), model.remove(&key).is_some()),
        4 => assert_eq!(get(session, 0, &key), model.get(&key).cloned()),
        _ => {
            let most = 1 + random.below(20) as usize;
            let owned = |(key, value): (&Vec<u8>, &Vec<u8>)| (key.clone(), value.clone());
            let up = model.range::<Vec<u8>, _>(&key..).take(most).map(owned);
            assert_eq!(scan(session, &key, Direction::Forward, most), up.collect::<Vec<_>>());
            let range = (Bound::Unbounded, Bound::Included(&key));
            let down = model.range::<Vec<u8>, _>(range).rev().take(most).map(owned);
            assert_eq!(scan(session, &key, Direction::Backward, most), down.collect::<Vec<_>>());
        }
    }
}

#[test]
fn random_operations_agree_with_a_model() {
    for variant in variants() {
        let directory = tempfile::tempdir().unwrap();
        let (mut random, mut model) = (Random::new(20), BTreeMap::new());
        for _ in 0..3 {
            let engine = variant.open(directory.path());
            let mut session = engine.session().unwrap();
            for _ in 0..40 {
                let access = match random.below(3) {
                    0 => Some(Access::Write),
                    _ => None,
                };
                access.into_iter().for_each(|access| session.begin(access).unwrap());
                (0..random.below(30)).for_each(|_| step(&mut *session, &mut model, &mut random));
                access.into_iter().for_each(|_| session.commit().unwrap());
            }
            drop(session);
            engine.settle().unwrap();
        }
        let engine = variant.open(directory.path());
        let all = scan(&mut *engine.session().unwrap(), b"", Direction::Forward, usize::MAX);
        assert_eq!(all, model.into_iter().collect::<Vec<_>>(), "{variant:?}");
    }
}
