//! Transactions and snapshots: what they see, what they leave, and what they do to each other.
//!
//! The anomalies have the names of Hermitage, Martin Kleppmann's tests of isolation levels.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use common::{Random, cold, memory_store, options};
use rustix::io::Errno;
use vellum::{
    Durability, Error, Isolation, MemoryDevice, Result, Snapshot, Store, Transaction,
    TransactionOptions, Tree, Value, ViewEntries,
};
use vellum_pool::device::{Fault, Operation};

const LEVELS: [Isolation; 2] = [Isolation::Serializable, Isolation::Snapshot];

fn begin(store: &Store, isolation: Isolation) -> Transaction {
    let options = TransactionOptions::new().isolation(isolation);
    store.begin_with(options.durability(Durability::None)).unwrap()
}

/// A store with a tree of two entries: 1 is 10, 2 is 20.
fn two_entries() -> (Arc<MemoryDevice>, Store, Tree) {
    let (device, store) = memory_store(64, 1);
    let tree = store.create_tree("test").unwrap();
    tree.extend([("1", "10"), ("2", "20")]).unwrap();
    (device, store, tree)
}

fn get(transaction: &Transaction, tree: &Tree, key: &str) -> Option<String> {
    let value = transaction.get(tree, key.as_bytes()).unwrap();
    value.map(|value| String::from_utf8(value.to_vec()).unwrap())
}

fn put(transaction: &mut Transaction, tree: &Tree, key: &str, value: &str) {
    transaction.put(tree, key.as_bytes(), value.as_bytes()).unwrap();
}

fn all(tree: &Tree) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let entries = tree.entries().map(Result::unwrap);
    entries.map(|(key, value)| (text(&key), text(&value))).collect()
}

fn entries<'v>(found: impl Iterator<Item = Result<(Vec<u8>, Value<'v>)>>) -> usize {
    found.map(Result::unwrap).count()
}

fn is_conflict(outcome: Result<()>) -> bool {
    match outcome {
        Ok(()) => false,
        Err(Error::Conflict) => true,
        Err(error) => panic!("{error}"),
    }
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

/// G0, a dirty write: of two transactions that change two keys, the values of one are left.
#[test]
fn no_write_cycles() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "11");
        put(&mut two, &tree, "1", "12");
        put(&mut one, &tree, "2", "21");
        one.commit().unwrap();
        assert_eq!(all(&tree), pairs(&[("1", "11"), ("2", "21")]));
        put(&mut two, &tree, "2", "22");
        // Serializable transactions that read nothing come one after the other.
        let lost = is_conflict(two.commit());
        assert_eq!(lost, level == Isolation::Snapshot);
        let left = if lost { [("1", "11"), ("2", "21")] } else { [("1", "12"), ("2", "22")] };
        assert_eq!(all(&tree), pairs(&left));
    }
}

/// G1a: a transaction reads what another one has changed and then gives up.
#[test]
fn no_aborted_reads() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "101");
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        one.abort();
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        two.commit().unwrap();
        assert_eq!(all(&tree), pairs(&[("1", "10"), ("2", "20")]));
    }
}

/// G1b: a transaction reads what another one has changed, and then changes again.
#[test]
fn no_intermediate_reads() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "101");
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        put(&mut one, &tree, "1", "11");
        one.commit().unwrap();
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        two.commit().unwrap();
        assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(&b"11"[..]));
    }
}

/// G1c: two transactions read what the other one has changed.
#[test]
fn no_circular_information_flow() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "11");
        put(&mut two, &tree, "2", "22");
        assert_eq!(get(&one, &tree, "2").unwrap(), "20");
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        one.commit().unwrap();
        assert_eq!(is_conflict(two.commit()), level == Isolation::Serializable);
    }
}

/// OTV: a transaction that another one has overwritten vanishes for a third one, in part.
#[test]
fn no_observed_transaction_vanishes() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "11");
        put(&mut one, &tree, "2", "19");
        put(&mut two, &tree, "1", "12");
        one.commit().unwrap();
        let three = begin(&store, level);
        assert_eq!(get(&three, &tree, "1").unwrap(), "11");
        put(&mut two, &tree, "2", "18");
        assert_eq!(is_conflict(two.commit()), level == Isolation::Snapshot);
        assert_eq!(get(&three, &tree, "2").unwrap(), "19");
        assert_eq!(get(&three, &tree, "1").unwrap(), "11");
        three.commit().unwrap();
    }
}

/// PMP: a transaction that reads a range twice finds an entry that another one has added.
#[test]
fn no_predicate_many_preceders() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (one, mut two) = (begin(&store, level), begin(&store, level));
        assert_eq!(entries(one.range(&tree, "3"..).unwrap()), 0);
        put(&mut two, &tree, "3", "30");
        two.commit().unwrap();
        assert_eq!(entries(one.range(&tree, "3"..).unwrap()), 0);
        assert_eq!(get(&one, &tree, "3"), None);
        // A transaction that has changed nothing is one that came before.
        one.commit().unwrap();
    }
}

/// PMP with a write: a transaction removes what it has found, and another one has added more.
#[test]
fn no_predicate_many_preceders_for_writes() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        put(&mut one, &tree, "1", "20");
        put(&mut one, &tree, "2", "30");
        let twenties: Vec<_> = two
            .entries(&tree)
            .unwrap()
            .map(Result::unwrap)
            .filter(|(_, value)| &**value == b"20")
            .map(|(key, _)| key)
            .collect();
        assert_eq!(twenties, [b"2"]);
        for key in twenties {
            assert!(two.remove(&tree, &key).unwrap());
        }
        one.commit().unwrap();
        assert!(is_conflict(two.commit()));
        assert_eq!(all(&tree), pairs(&[("1", "20"), ("2", "30")]));
    }
}

/// P4: a lost update.
#[test]
fn no_lost_updates() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        assert_eq!(get(&one, &tree, "1"), get(&two, &tree, "1"));
        put(&mut one, &tree, "1", "11");
        put(&mut two, &tree, "1", "12");
        one.commit().unwrap();
        assert!(is_conflict(two.commit()));
        assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(&b"11"[..]));
    }
}

/// G-single: read skew. A transaction reads one entry before and one after another transaction.
#[test]
fn no_read_skew() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (one, mut two) = (begin(&store, level), begin(&store, level));
        assert_eq!(get(&one, &tree, "1").unwrap(), "10");
        assert_eq!(get(&two, &tree, "1").unwrap(), "10");
        put(&mut two, &tree, "1", "12");
        put(&mut two, &tree, "2", "18");
        two.commit().unwrap();
        assert_eq!(get(&one, &tree, "2").unwrap(), "20");
        one.commit().unwrap();
    }
}

/// G-single with a predicate: the second read of the transaction has a predicate.
#[test]
fn no_read_skew_with_a_predicate() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (one, mut two) = (begin(&store, level), begin(&store, level));
        assert_eq!(entries(one.entries(&tree).unwrap()), 2);
        put(&mut two, &tree, "1", "12");
        two.commit().unwrap();
        let twelves =
            one.entries(&tree).unwrap().filter(|entry| *entry.as_ref().unwrap().1 == *b"12");
        assert_eq!(twelves.count(), 0);
    }
}

/// G-single with a write: the transaction removes what has changed since its first read.
#[test]
fn no_read_skew_for_writes() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        assert_eq!(get(&one, &tree, "1").unwrap(), "10");
        put(&mut two, &tree, "1", "12");
        put(&mut two, &tree, "2", "18");
        two.commit().unwrap();
        assert!(one.remove(&tree, b"2").unwrap());
        assert!(is_conflict(one.commit()));
        assert_eq!(all(&tree), pairs(&[("1", "12"), ("2", "18")]));
    }
}

/// G2-item: write skew. Serializable transactions do not have it; with snapshot isolation, two
/// transactions may each change what the other one has read.
#[test]
fn no_write_skew_if_serializable() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        for transaction in [&one, &two] {
            assert_eq!(get(transaction, &tree, "1").unwrap(), "10");
            assert_eq!(get(transaction, &tree, "2").unwrap(), "20");
        }
        put(&mut one, &tree, "1", "11");
        put(&mut two, &tree, "2", "21");
        one.commit().unwrap();
        assert_eq!(is_conflict(two.commit()), level == Isolation::Serializable);
    }
}

/// G2: a phantom. As write skew, but the transactions have read a range, not an entry.
#[test]
fn no_phantoms_if_serializable() {
    for level in LEVELS {
        let (_, store, tree) = two_entries();
        let (mut one, mut two) = (begin(&store, level), begin(&store, level));
        for transaction in [&one, &two] {
            assert_eq!(entries(transaction.range(&tree, "3".."9").unwrap()), 0);
        }
        put(&mut one, &tree, "3", "30");
        put(&mut two, &tree, "4", "42");
        one.commit().unwrap();
        assert_eq!(is_conflict(two.commit()), level == Isolation::Serializable);
    }
}

/// Fekete's anomaly of a read-only transaction: it sees one of two others, whose order must be the
/// opposite.
#[test]
fn a_transaction_that_only_reads_sees_an_order_that_others_keep() {
    let (_, store, tree) = two_entries();
    let mut one = begin(&store, Isolation::Serializable);
    assert_eq!(get(&one, &tree, "1").unwrap(), "10");
    assert_eq!(get(&one, &tree, "2").unwrap(), "20");
    let mut two = begin(&store, Isolation::Serializable);
    assert_eq!(get(&two, &tree, "2").unwrap(), "20");
    put(&mut two, &tree, "2", "25");
    two.commit().unwrap();
    let three = begin(&store, Isolation::Serializable);
    assert_eq!(get(&three, &tree, "1").unwrap(), "10");
    assert_eq!(get(&three, &tree, "2").unwrap(), "25");
    three.commit().unwrap();
    put(&mut one, &tree, "1", "0");
    assert!(is_conflict(one.commit()));
}

/// Changes that are made on a tree are transactions, too.
#[test]
fn single_changes_conflict_with_transactions() {
    for level in LEVELS {
        type Single = fn(&Tree);
        let changes: [Single; 9] = [
            |tree| assert!(tree.upsert(b"1", b"x").unwrap()),
            |tree| assert!(tree.remove(b"1").unwrap()),
            |tree| drop(tree.take(b"1").unwrap()),
            |tree| assert!(tree.update(b"1", |value| value.fill(b'x')).unwrap()),
            |tree| drop(tree.pop_first().unwrap()),
            |tree| assert_ne!(tree.retain(|key, _| key != b"1").unwrap(), 0),
            |tree| assert_ne!(tree.remove_range("0".."2").unwrap(), 0),
            |tree| tree.clear().unwrap(),
            |tree| assert_ne!(tree.extend([("1", "x")]).unwrap(), 0),
        ];
        for change in changes {
            let (_, store, tree) = two_entries();
            let mut one = begin(&store, level);
            let snapshot = store.snapshot().unwrap();
            assert_eq!(get(&one, &tree, "1").unwrap(), "10");
            put(&mut one, &tree, "1", "11");
            change(&tree);
            let after = all(&tree);
            assert_eq!(get(&one, &tree, "1").unwrap(), "11");
            assert_eq!(snapshot.get(&tree, b"1").unwrap().as_deref(), Some(&b"10"[..]));
            assert_eq!(entries(snapshot.entries(&tree).unwrap()), 2);
            assert!(is_conflict(one.commit()));
            assert_eq!(all(&tree), after);
        }
    }
}

#[test]
fn a_transaction_sees_its_own_changes() {
    let (_, store, tree) = two_entries();
    let mut one = store.begin().unwrap();
    one.put(&tree, b"3", b"30").unwrap();
    assert!(matches!(one.insert(&tree, b"3", b"31"), Err(Error::KeyExists)));
    assert!(one.remove(&tree, b"1").unwrap());
    assert!(!one.remove(&tree, b"1").unwrap());
    one.insert(&tree, b"0", b"0").unwrap();
    assert!(one.update(&tree, b"2", |old| old.map(|old| [old, b"!"].concat())).unwrap());
    assert!(!one.update(&tree, b"9", |old| old.map(<[u8]>::to_vec)).unwrap());
    let found: Vec<_> = one.entries(&tree).unwrap().map(Result::unwrap).collect();
    let keys: Vec<_> = found.iter().map(|(key, value)| (&key[..], &**value)).collect();
    let expected: [(&[u8], &[u8]); 3] = [(b"0", b"0"), (b"2", b"20!"), (b"3", b"30")];
    assert_eq!(keys, expected);
    let backward: Vec<_> =
        one.entries(&tree).unwrap().rev().map(|entry| entry.unwrap().0).collect();
    assert_eq!(backward, [b"3", b"2", b"0"]);
    let many = one.multi_get(&tree, &[b"0", b"1", b"2"]).unwrap();
    assert_eq!(many[0].as_deref(), Some(&b"0"[..]));
    assert!(many[1].is_none() && many[2].as_deref() == Some(&b"20!"[..]));
    drop((found, many));
    // No other thread sees them.
    assert_eq!(all(&tree), pairs(&[("1", "10"), ("2", "20")]));
    one.commit().unwrap();
    assert_eq!(all(&tree), pairs(&[("0", "0"), ("2", "20!"), ("3", "30")]));
}

#[test]
fn an_iterator_from_both_ends_returns_each_entry_once() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.extend((0..2000_u32).map(|number| (number.to_be_bytes(), [7; 40]))).unwrap();
    let mut one = store.begin().unwrap();
    for number in (0..2000_u32).step_by(7) {
        one.remove(&tree, &number.to_be_bytes()).unwrap();
    }
    for number in [2_u32, 502, 1002, 1502] {
        one.put(&tree, &number.to_be_bytes(), &[9; 9000]).unwrap();
    }
    tree.upsert(&900_u32.to_be_bytes(), b"new").unwrap();
    tree.remove(&901_u32.to_be_bytes()).unwrap();
    let random = &mut Random(3);
    for _ in 0..20 {
        let (mut front, mut back) = (Vec::new(), Vec::new());
        let mut entries = one.range(&tree, 10_u32.to_be_bytes()..1990_u32.to_be_bytes()).unwrap();
        loop {
            let copied = |entry: Option<Result<(Vec<u8>, Value<'_>)>>| {
                entry.map(|entry| entry.map(|(key, value)| (key, value.to_vec())).unwrap())
            };
            let lent = |entry: Option<(&[u8], Value<'_>)>| {
                entry.map(|(key, value)| (key.to_vec(), value.to_vec()))
            };
            let (end, next) = match random.below(4) {
                0 => (&mut front, copied(entries.next())),
                1 => (&mut front, lent(entries.next_entry().unwrap())),
                2 => (&mut back, copied(entries.next_back())),
                _ => (&mut back, lent(entries.next_entry_back().unwrap())),
            };
            let Some((key, value)) = next else { break };
            let number = u32::from_be_bytes(key.try_into().unwrap());
            assert_eq!(value, if number % 500 == 2 { vec![9; 9000] } else { vec![7; 40] });
            end.push(number);
        }
        assert!(entries.next_entry().unwrap().is_none());
        assert!(entries.next().is_none() && entries.next_back().is_none());
        front.extend(back.into_iter().rev());
        assert!(front.into_iter().eq((10..1990).filter(|number| number % 7 != 0)));
    }
}

#[test]
fn savepoints_undo_what_came_after_them() {
    let (_, store, tree) = two_entries();
    let mut one = store.begin().unwrap();
    put(&mut one, &tree, "1", "11");
    let first = one.savepoint();
    put(&mut one, &tree, "1", "12");
    put(&mut one, &tree, "3", "30");
    let second = one.savepoint();
    one.remove(&tree, b"2").unwrap();
    one.rollback_to(second).unwrap();
    assert_eq!(get(&one, &tree, "2").unwrap(), "20");
    one.remove(&tree, b"2").unwrap();
    one.rollback_to(first).unwrap();
    assert!(matches!(one.rollback_to(second), Err(Error::NoSuchSavepoint)));
    let other = store.begin().unwrap().savepoint();
    assert!(matches!(one.rollback_to(other), Err(Error::NoSuchSavepoint)));
    assert_eq!(get(&one, &tree, "1").unwrap(), "11");
    assert_eq!(get(&one, &tree, "3"), None);
    one.rollback_to(first).unwrap();
    one.commit().unwrap();
    assert_eq!(all(&tree), pairs(&[("1", "11"), ("2", "20")]));
}

#[test]
fn long_values_are_versions_too() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let long = |byte: u8| vec![byte; 20_000];
    tree.upsert(b"whole", &long(1)).unwrap();
    let mut writer = tree.writer(b"pieces").unwrap();
    std::io::Write::write_all(&mut writer, &vec![2; 700_000]).unwrap();
    writer.finish().unwrap();
    let snapshot = store.snapshot().unwrap();
    let used = store.stat().unwrap().used_pages;
    for round in 3..20 {
        let mut one = store.begin().unwrap();
        one.put(&tree, b"whole", &long(round)).unwrap();
        one.put(&tree, b"new", &long(round + 100)).unwrap();
        one.remove(&tree, b"pieces").unwrap();
        assert_eq!(one.get(&tree, b"whole").unwrap().as_deref(), Some(&long(round)[..]));
        one.commit().unwrap();
        assert_eq!(tree.get(b"whole").unwrap().as_deref(), Some(&long(round)[..]));
        assert_eq!(snapshot.get(&tree, b"whole").unwrap().as_deref(), Some(&long(1)[..]));
        let mut reader = snapshot.reader(&tree, b"pieces").unwrap().unwrap();
        let mut found = Vec::new();
        std::io::Read::read_to_end(&mut reader, &mut found).unwrap();
        assert!(found == vec![2; 700_000]);
        let entries: Vec<_> = snapshot.range(&tree, .."w").unwrap().map(|e| e.unwrap().0).collect();
        assert_eq!(entries, [b"pieces"]);
    }
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
    drop(snapshot);
    store.sync().unwrap();
    // The pieces are gone, and a new value is there.
    assert!(store.stat().unwrap().used_pages < used);
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
}

/// A value that is too long for the pool to return it as one slice.
#[test]
fn transactions_read_and_remove_values_of_any_length() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.upsert(b"a", b"short").unwrap();
    let mut writer = tree.writer(b"long").unwrap();
    std::io::Write::write_all(&mut writer, &vec![2; 700_000]).unwrap();
    writer.finish().unwrap();
    let read = |reader: Option<vellum::ValueReader<'_>>| {
        let mut found = Vec::new();
        std::io::Read::read_to_end(&mut reader.unwrap(), &mut found).unwrap();
        found
    };
    let mut one = store.begin().unwrap();
    assert!(matches!(one.get(&tree, b"long"), Err(Error::NeedsReader { .. })));
    assert!(read(one.reader(&tree, b"long").unwrap()) == vec![2; 700_000]);
    one.put(&tree, b"b", b"own").unwrap();
    assert_eq!(read(one.reader(&tree, b"b").unwrap()), b"own");
    assert_eq!(one.remove_range(&tree, ..).unwrap(), 3);
    assert!(one.reader(&tree, b"long").unwrap().is_none());
    let snapshot = store.snapshot().unwrap();
    one.commit().unwrap();
    assert_eq!(tree.entries().count(), 0);
    assert!(read(snapshot.reader(&tree, b"long").unwrap()) == vec![2; 700_000]);
    // What a transaction has only read counts, too.
    let mut two = store.begin().unwrap();
    assert!(two.reader(&tree, b"long").unwrap().is_none());
    two.put(&tree, b"c", b"2").unwrap();
    tree.upsert(b"long", b"1").unwrap();
    assert!(is_conflict(two.commit()));
    drop(snapshot);
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
}

#[test]
fn transactions_of_many_leaves_and_trees_are_atomic() {
    let (device, store) = memory_store(2000, 1);
    let trees = ["a", "b", "c"].map(|name| store.create_tree(name).unwrap());
    let random = &mut Random(1);
    let mut models = [(); 3].map(|()| std::collections::BTreeMap::new());
    for round in 0..60 {
        let mut one =
            store.begin_with(TransactionOptions::new().durability(Durability::None)).unwrap();
        let mut changed = models.clone();
        for _ in 0..random.below(400) {
            let at = random.index(3);
            let key = (random.below(3000) as u32).to_be_bytes().to_vec();
            let is_there = changed[at].contains_key(&key);
            match random.below(3) {
                0 => {
                    assert_eq!(one.remove(&trees[at], &key).unwrap(), is_there);
                    changed[at].remove(&key);
                }
                _ => {
                    let len = random.pick(&[0, 10, 300, 900, 3000]);
                    let value = vec![round as u8; len];
                    one.put(&trees[at], &key, &value).unwrap();
                    changed[at].insert(key, value);
                }
            }
        }
        if random.once_in(10) {
            let key = (random.below(3000) as u32).to_be_bytes();
            let removed = one.remove_range(&trees[0], key..).unwrap();
            let kept = changed[0].len() as u64 - removed;
            changed[0].retain(|found, _| found[..] < key[..]);
            assert_eq!(changed[0].len() as u64, kept);
        }
        match random.below(4) {
            0 => one.abort(),
            _ => {
                one.commit().unwrap();
                models = changed;
            }
        }
        for (tree, model) in trees.iter().zip(&models) {
            let found: Vec<_> = tree.entries().map(Result::unwrap).collect();
            let same = found.iter().map(|(key, value)| (key, &value[..]));
            assert!(same.eq(model.iter().map(|(key, value)| (key, &value[..]))), "round {round}");
        }
    }
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
    store.close().unwrap();
    let store = Store::open_on(device, &options(2000, 1)).unwrap();
    for (name, model) in ["a", "b", "c"].into_iter().zip(&models) {
        assert_eq!(store.tree(name).unwrap().entries().count(), model.len());
    }
}

/// Whatever changes a snapshot outlives, it returns the entries of its own time.
#[test]
fn snapshots_do_not_change() {
    let (_, store) = memory_store(400, 1);
    let tree = store.create_tree("t").unwrap();
    let random = &mut Random(9);
    let mut model = std::collections::BTreeMap::<Vec<u8>, Vec<u8>>::new();
    let mut snapshots: Vec<(Snapshot, std::collections::BTreeMap<_, _>)> = Vec::new();
    for _ in 0..3000 {
        let key = (random.below(500) as u16).to_be_bytes().to_vec();
        match random.below(12) {
            0 => {
                let from = random.below(500) as u16;
                let range = from.to_be_bytes()..(from + 20).to_be_bytes();
                tree.remove_range(range.clone()).unwrap();
                model.retain(|key, _| key[..] < range.start[..] || key[..] >= range.end[..]);
            }
            1 => {
                let popped = tree.pop_last().unwrap().map(|(key, _)| key);
                assert_eq!(popped, model.pop_last().map(|(key, _)| key));
            }
            2 if random.once_in(60) => {
                tree.clear().unwrap();
                model.clear();
                let load = (0..300_u16).map(|number| (number.to_be_bytes(), [1; 50]));
                tree.bulk_load(load.clone()).unwrap();
                model.extend(load.map(|(key, value)| (key.to_vec(), value.to_vec())));
            }
            3..6 => {
                assert_eq!(tree.remove(&key).unwrap(), model.remove(&key).is_some());
            }
            _ => {
                let value = vec![random.next() as u8; random.pick(&[3, 100, 900, 2000])];
                tree.upsert(&key, &value).unwrap();
                model.insert(key, value);
            }
        }
        if random.once_in(40) && snapshots.len() < 5 {
            snapshots.push((store.snapshot().unwrap(), model.clone()));
        }
        if random.once_in(30) && !snapshots.is_empty() {
            let at = random.index(snapshots.len());
            let (snapshot, model) = &snapshots[at];
            let found: Vec<_> = snapshot.entries(&tree).unwrap().map(Result::unwrap).collect();
            let same = found.iter().map(|(key, value)| (key, &value[..]));
            assert!(same.eq(model.iter().map(|(key, value)| (key, &value[..]))));
            let keys = snapshot.entries(&tree).unwrap().rev().map(|entry| entry.unwrap().0);
            assert!(keys.eq(model.keys().rev().cloned()));
            for _ in 0..20 {
                let key = (random.below(500) as u16).to_be_bytes();
                let value = snapshot.get(&tree, &key).unwrap();
                assert_eq!(value.as_deref(), model.get(&key[..]).map(|value| &value[..]));
            }
            drop(found);
            if random.once_in(3) {
                drop(snapshots.swap_remove(at));
            }
        }
    }
    drop(snapshots);
    let stat = store.stat().unwrap();
    assert_eq!((stat.views, stat.oldest_view, stat.version_bytes), (0, None, 0));
}

/// A snapshot keeps trees that are dropped, and their names.
#[test]
fn a_snapshot_keeps_the_trees_of_its_time() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.extend((0..500_u32).map(|number| (number.to_be_bytes(), [7; 40]))).unwrap();
    store.create_tree("u").unwrap().upsert(b"a", b"1").unwrap();
    let snapshot = store.snapshot().unwrap();
    let used = store.stat().unwrap().used_pages;
    store.drop_tree("t").unwrap();
    store.rename_tree("u", "v").unwrap();
    store.create_tree("t").unwrap().upsert(b"other", b"1").unwrap();
    assert_eq!(snapshot.trees().unwrap(), ["t", "u"]);
    assert_eq!(store.trees().unwrap(), ["t", "v"]);
    assert!(matches!(tree.get(b"a"), Err(Error::NoSuchTree(_))));
    assert!(matches!(tree.upsert(b"a", b"a"), Err(Error::NoSuchTree(_))));
    assert_eq!(entries(snapshot.entries(&tree).unwrap()), 500);
    let found = snapshot.tree("t").unwrap();
    assert_eq!(entries(snapshot.entries(&found).unwrap()), 500);
    assert_eq!(snapshot.get(&found, b"other").unwrap().as_deref(), None);
    assert_eq!(&*snapshot.tree("u").unwrap().name(), "v");
    assert!(matches!(snapshot.tree("v"), Err(Error::NoSuchTree(_))));
    let later = store.snapshot().unwrap();
    assert!(matches!(later.entries(&tree).unwrap().next(), Some(Err(Error::NoSuchTree(_)))));
    drop(snapshot);
    // The pages of the tree are free once no snapshot sees it.
    assert!(store.stat().unwrap().used_pages < used);
    drop(later);
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
    // A store that closes frees them, too.
    let snapshot = store.snapshot().unwrap();
    store.drop_tree("t").unwrap();
    store.clone().close().unwrap();
    assert!(matches!(snapshot.trees(), Err(Error::Closed)));
}

#[test]
fn errors_of_transactions_name_their_cause() {
    let (_, store, tree) = two_entries();
    let (_, other_store, other) = two_entries();
    let mut one = store.begin().unwrap();
    assert!(matches!(one.get(&other, b"1"), Err(Error::OtherStore(_))));
    assert!(matches!(one.put(&other, b"1", b"1"), Err(Error::OtherStore(_))));
    let long = vec![0; store.limits().max_key + 1];
    assert!(matches!(one.put(&tree, &long, b"1"), Err(Error::KeyTooLong { .. })));
    let value = vec![0; store.limits().max_value as usize + 1];
    assert!(matches!(one.put(&tree, b"1", &value), Err(Error::ValueTooLong { .. })));
    // The pool has 256 KiB: a quarter is the most.
    let large =
        (0..2000_u32).try_for_each(|number| one.put(&tree, &number.to_be_bytes(), &[0; 60]));
    assert!(matches!(large, Err(Error::TransactionTooLarge(_))), "{large:?}");
    drop(one);
    // Leaves of other transactions.
    let wide = store.create_tree("wide").unwrap();
    wide.extend((0..200_u32).map(|number| (number.to_be_bytes(), [7; 900]))).unwrap();
    let mut one = store.begin().unwrap();
    (0..200_u32).for_each(|number| one.put(&wide, &number.to_be_bytes(), b"1").unwrap());
    let error = one.commit().unwrap_err();
    assert!(matches!(error, Error::TransactionTooLarge(_)), "{error}");
    assert!(wide.entries().all(|entry| *entry.unwrap().1 == [7; 900]));
    // The store is closed under a transaction.
    let mut one = store.begin().unwrap();
    put(&mut one, &tree, "1", "11");
    store.clone().close().unwrap();
    assert!(matches!(one.get(&tree, b"2"), Err(Error::Closed)));
    assert!(matches!(one.commit(), Err(Error::Closed)));
    assert!(matches!(store.begin(), Err(Error::Closed)));
    other_store.close().unwrap();
}

/// Ends other threads also if the test fails.
struct StopWhenDropped<'a>(&'a AtomicBool);

impl Drop for StopWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each of two threads changes two entries in turn, without transactions. A snapshot has the second
/// change only with the first, and stays as it is while others begin and end.
#[test]
fn snapshots_among_single_changes_stay_as_they_are() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let key = |thread: u8, second: u8| [thread, second];
    tree.extend((0..4).map(|n| (key(n / 2, n % 2), 0_u64.to_be_bytes()))).unwrap();
    let stop = AtomicBool::new(false);
    let write = |thread: u8| {
        for number in 1_u64.. {
            for second in 0..2 {
                if number % 7 == 0 {
                    tree.remove(&key(thread, second)).unwrap();
                }
                tree.upsert(&key(thread, second), &number.to_be_bytes()).unwrap();
            }
            if stop.load(Ordering::Relaxed) {
                return;
            }
        }
    };
    let read = |snapshot: &Snapshot| -> Vec<Option<u64>> {
        let number = |value: Value<'_>| u64::from_be_bytes((*value).try_into().unwrap());
        let keys = (0..4).map(|n| key(n / 2, n % 2));
        keys.map(|key| snapshot.get(&tree, &key).unwrap().map(number)).collect()
    };
    thread::scope(|scope| {
        let _stop = StopWhenDropped(&stop);
        scope.spawn(|| write(0));
        scope.spawn(|| write(1));
        let mut held = VecDeque::new();
        for round in 0..4000 {
            let snapshot = store.snapshot().unwrap();
            let seen = read(&snapshot);
            for pair in seen.chunks(2) {
                if let [Some(first), Some(second)] = pair {
                    assert!(*second <= *first && *first <= *second + 1, "{seen:?}");
                }
            }
            held.push_back((snapshot, seen));
            let again = &held[round % held.len()];
            assert_eq!(read(&again.0), again.1);
            if held.len() > round % 5 {
                held.pop_front();
            }
        }
    });
    assert_eq!(store.stat().unwrap().views, 0);
}

#[test]
fn old_values_have_a_bound() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    tree.extend((0..100_000_u32).map(|number| (number.to_be_bytes(), [7; 100]))).unwrap();
    let snapshot = store.snapshot().unwrap();
    let refused = (0..100_000_u32)
        .find_map(|number| tree.upsert(&number.to_be_bytes(), &[8; 100]).err())
        .expect("old values have a bound");
    let Error::VersionsFull { bytes, views: 1, .. } = refused else { panic!("{refused}") };
    assert!((16 << 20..17 << 20).contains(&bytes), "{bytes}");
    assert_eq!(entries(snapshot.entries(&tree).unwrap()), 100_000);
    assert!(snapshot.entries(&tree).unwrap().all(|entry| *entry.unwrap().1 == [7; 100]));
    drop(snapshot);
    tree.upsert(b"a", b"1").unwrap();
}

/// A key that is changed again and again while there are views keeps only what they see.
#[test]
fn versions_that_no_view_sees_are_not_kept() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let snapshot = store.snapshot().unwrap();
    for number in 0..50_000_u32 {
        tree.upsert(b"counter", &number.to_be_bytes()).unwrap();
        if number % 10 == 0 {
            store
                .transact_with(TransactionOptions::new().durability(Durability::None), |one| {
                    one.put(&tree, b"other", &number.to_be_bytes())
                })
                .unwrap();
        }
    }
    assert!(store.stat().unwrap().version_bytes < 10_000);
    assert!(snapshot.get(&tree, b"counter").unwrap().is_none());
}

#[test]
fn transact_tries_again_until_it_succeeds() {
    let (_, store, tree) = two_entries();
    let options = TransactionOptions::new().durability(Durability::None);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..300 {
                    store
                        .transact_with(options, |one| {
                            let old: u64 = get(one, &tree, "1").unwrap().parse().unwrap();
                            one.put(&tree, b"1", (old + 1).to_string().as_bytes())
                        })
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(&b"1210"[..]));
    let failed = store.transact(|_| -> Result<()> { Err(Error::NotEmpty) });
    assert!(matches!(failed, Err(Error::NotEmpty)));
}

#[test]
fn changes_go_on_when_the_view_that_kept_too_much_has_ended() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    tree.extend((0..100_000_u32).map(|number| (number.to_be_bytes(), [7; 100]))).unwrap();
    let load = store.create_tree("loaded").unwrap();
    let mut loader = load.bulk_loader().unwrap();
    (0..5000_u32).for_each(|number| loader.push(&number.to_be_bytes(), &[1; 100]).unwrap());
    let old = store.snapshot().unwrap();
    let options = TransactionOptions::new().durability(Durability::None);
    let full = (0..20_u32).find_map(|part| {
        let put =
            |one: &mut Transaction, number: u32| one.put(&tree, &number.to_be_bytes(), &[8; 100]);
        let numbers = part * 5000..(part + 1) * 5000;
        let outcome = store
            .transact_with(options, |one| numbers.clone().try_for_each(|number| put(one, number)));
        outcome.err()
    });
    assert!(matches!(full, Some(Error::VersionsFull { .. })), "{full:?}");
    // A load that fails now frees its pages all the same.
    drop(loader);
    let _young = store.snapshot().unwrap();
    drop(old);
    tree.upsert(b"x", b"1").unwrap();
    assert!(store.stat().unwrap().version_bytes < 1 << 20);
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
}

#[test]
fn a_tree_that_a_snapshot_keeps_is_not_lost() {
    let (_, store, tree) = two_entries();
    let snapshot = store.snapshot().unwrap();
    store.drop_tree("test").unwrap();
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.damage.is_empty() && report.lost_pages == 0, "{report:?}");
    assert_eq!(entries(snapshot.entries(&tree).unwrap()), 2);
    drop(snapshot);
    assert_eq!(store.check(&mut |_| ()).unwrap().lost_pages, 0);
}

/// The value that a snapshot does not see is too long for the pool.
#[test]
fn an_error_of_a_newer_value_is_none_of_a_snapshot() {
    let (_, store, tree) = two_entries();
    let snapshot = store.snapshot().unwrap();
    let mut writer = tree.writer(b"1").unwrap();
    std::io::Write::write_all(&mut writer, &[0; 200_000]).unwrap();
    writer.finish().unwrap();
    assert_eq!(snapshot.get(&tree, b"1").unwrap().as_deref(), Some(&b"10"[..]));
    let many = snapshot.multi_get(&tree, &[b"1", b"2"]).unwrap();
    assert_eq!(many[0].as_deref(), Some(&b"10"[..]));
    assert_eq!(many[1].as_deref(), Some(&b"20"[..]));
}

/// A transaction does not depend on a value that it has put itself.
#[test]
fn own_values_are_not_read() {
    let (_, store, tree) = two_entries();
    let mut one = begin(&store, Isolation::Serializable);
    put(&mut one, &tree, "1", "11");
    assert_eq!(one.multi_get(&tree, &[b"1", b"2", b"1"]).unwrap().len(), 3);
    tree.upsert(b"1", b"other").unwrap();
    one.commit().unwrap();
    assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(&b"11"[..]));
}

/// What a transaction has replaced or undone does not count.
#[test]
fn the_size_of_a_transaction_is_that_of_its_changes() {
    let (_, store, tree) = two_entries();
    let mut one = store.begin().unwrap();
    (0..5000).for_each(|_| one.put(&tree, b"1", &[0; 60]).unwrap());
    let point = one.savepoint();
    for _ in 0..5000 {
        one.put(&tree, b"1", &[0; 60]).unwrap();
        one.remove(&tree, b"2").unwrap();
        one.rollback_to(point).unwrap();
    }
    one.commit().unwrap();
    assert_eq!(tree.get(b"2").unwrap().as_deref(), Some(&b"20"[..]));
}

#[test]
fn a_clear_keeps_old_values_within_their_bound() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    tree.bulk_load((0..400_000_u32).map(|number| (number.to_be_bytes(), []))).unwrap();
    let snapshot = store.snapshot().unwrap();
    assert!(matches!(tree.clear(), Err(Error::VersionsFull { .. })));
    assert_eq!(tree.entries().count(), 400_000);
    drop(snapshot);
    tree.clear().unwrap();
}

/// A transaction that fails has changed nothing, also for those that began before it failed.
#[test]
fn what_a_failed_transaction_would_have_changed_conflicts_with_nothing() {
    let (_, store, tree) = two_entries();
    let reader = |key| {
        let mut reader = begin(&store, Isolation::Serializable);
        assert!(get(&reader, &tree, key).is_some());
        put(&mut reader, &tree, "3", "30");
        reader
    };
    let (of_one, of_two) = (reader("1"), reader("2"));
    let mut failing = begin(&store, Isolation::Serializable);
    assert!(get(&failing, &tree, "1").is_some());
    put(&mut failing, &tree, "2", "21");
    put(&mut failing, &tree, "4", "40");
    tree.upsert(b"1", b"11").unwrap();
    assert!(is_conflict(failing.commit()));
    assert!(is_conflict(of_one.commit()));
    assert!(!is_conflict(of_two.commit()));
    assert_eq!(all(&tree), pairs(&[("1", "11"), ("2", "20"), ("3", "30")]));
}

/// Scans of views name a value that is too long for the pool, and go on after it.
#[test]
fn scans_of_views_pass_values_of_any_length() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    for (key, len) in [("a", 1), ("b", 700_000), ("c", 2), ("d", 700_000), ("e", 600_000)] {
        let mut writer = tree.writer(key.as_bytes()).unwrap();
        std::io::Write::write_all(&mut writer, &vec![2; len]).unwrap();
        writer.finish().unwrap();
    }
    let all = |mut entries: ViewEntries<'_>, backward: bool| {
        let mut found = String::new();
        loop {
            let next = match backward {
                false => entries.next_entry(),
                true => entries.next_entry_back(),
            };
            let next = next.map(|entry| {
                let (key, value) = entry?;
                assert!(value.len() < 3);
                Some(String::from_utf8(key.to_vec()).unwrap())
            });
            let error = match next {
                Ok(None) => return found,
                Ok(Some(key)) => {
                    found.push_str(&key);
                    continue;
                }
                Err(error) => error,
            };
            assert!(matches!(error, Error::NeedsReader { .. }), "{error}");
            found.push_str(&String::from_utf8_lossy(entries.key()).to_uppercase());
        }
    };
    let (snapshot, mut one) = (store.snapshot().unwrap(), store.begin().unwrap());
    let two = store.begin().unwrap();
    for round in 0..2 {
        assert_eq!(all(snapshot.entries(&tree).unwrap(), false), "aBcDE");
        assert_eq!(all(snapshot.range(&tree, "b"..="d").unwrap(), true), "DcB");
        assert_eq!(all(one.range(&tree, "b"..="d").unwrap(), false), "BcD");
        assert_eq!(all(two.range(&tree, "d"..).unwrap(), true), "ED");
        // The iterator of the standard library's trait goes on, too.
        let (good, bad): (Vec<_>, Vec<_>) =
            snapshot.entries(&tree).unwrap().partition(|entry| entry.is_ok());
        assert_eq!((good.len(), bad.len()), (2, 3));
        if round == 0 {
            // Old values in the second round.
            tree.upsert(b"b", b"new").unwrap();
            tree.remove(b"e").unwrap();
        }
    }
    // They depend on what they have passed: `one` on b, `two` on e.
    put(&mut one, &tree, "f", "1");
    assert!(is_conflict(one.commit()));
    assert!(is_conflict({
        let mut two = two;
        put(&mut two, &tree, "f", "2");
        two.commit()
    }));
}

/// Without a savepoint, a transaction keeps none of the values that it replaces.
#[test]
fn a_released_savepoint_gives_its_memory_back() {
    let (_, store, tree) = two_entries();
    let mut one = store.begin().unwrap();
    for _ in 0..5000 {
        let point = one.savepoint();
        one.put(&tree, b"1", &[0; 60]).unwrap();
        one.release(point).unwrap();
        assert!(matches!(one.rollback_to(point), Err(Error::NoSuchSavepoint)));
        assert!(matches!(one.release(point), Err(Error::NoSuchSavepoint)));
    }
    // An outer savepoint undoes what was done between a released one and now.
    let outer = one.savepoint();
    let inner = one.savepoint();
    put(&mut one, &tree, "2", "21");
    one.release(inner).unwrap();
    put(&mut one, &tree, "3", "30");
    one.rollback_to(outer).unwrap();
    assert_eq!((get(&one, &tree, "2"), get(&one, &tree, "3")), (Some("20".into()), None));
    one.release(outer).unwrap();
    put(&mut one, &tree, "1", "11");
    one.commit().unwrap();
    assert_eq!(all(&tree), pairs(&[("1", "11"), ("2", "20")]));
}

/// A transaction that has read very many keys depends on what lies between them.
#[test]
fn what_a_transaction_has_read_takes_little_memory() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.bulk_load((100..10_000_u32).step_by(2).map(|key| (key.to_be_bytes(), [1]))).unwrap();
    let outcome = |count: u32, changed: u32| {
        let mut one = begin(&store, Isolation::Serializable);
        for key in (100..).step_by(2).take(count as usize) {
            assert!(one.get(&tree, &u32::to_be_bytes(key)).unwrap().is_some());
        }
        one.put(&tree, b"own", b"1").unwrap();
        tree.upsert(&changed.to_be_bytes(), b"2").unwrap();
        is_conflict(one.commit())
    };
    // A key that was read, one between such keys, one after them.
    assert_eq!([110, 111, 9_000].map(|changed| outcome(100, changed)), [true, false, false]);
    assert_eq!([110, 113, 9_002].map(|changed| outcome(4000, changed)), [true, true, false]);
    assert_eq!([99, 101].map(|changed| outcome(4000, changed)), [false, true]);
}

/// A scan that fails depends on what it has returned, and not on the rest of its range.
#[test]
fn a_failed_scan_depends_on_what_it_has_passed() {
    let (device, store, tree) = cold(20_000, 64);
    for (changed, conflicts) in [(19_999_u64, false), (3, true)] {
        let mut one = begin(&store, Isolation::Serializable);
        let mut entries = one.entries(&tree).unwrap();
        for _ in 0..10 {
            entries.next_entry().unwrap().unwrap();
        }
        device.plan().fail_randomly(Operation::Read, 1.0, Fault::Error(Errno::IO));
        while entries.next_entry().is_ok() {}
        assert!(entries.next_entry().unwrap().is_none(), "it goes on after an error");
        device.plan().clear();
        drop(entries);
        tree.upsert(&changed.to_be_bytes(), b"new").unwrap();
        put(&mut one, &tree, "own", "1");
        assert_eq!(is_conflict(one.commit()), conflicts, "{changed}");
    }
}

/// A transaction that takes its time commits among threads that change what it reads all the time.
#[test]
fn a_slow_transaction_has_its_turn() {
    for isolation in LEVELS {
        let (_, store, tree) = two_entries();
        let options = TransactionOptions::new().isolation(isolation);
        let options = options.durability(Durability::None);
        let (stop, quick) = (AtomicBool::new(false), AtomicU64::new(0));
        let count = |one: &mut Transaction| {
            one.update(&tree, b"1", |old| {
                let old: u64 = std::str::from_utf8(old.unwrap()).unwrap().parse().unwrap();
                Some((old + 1).to_string())
            })
        };
        thread::scope(|scope| {
            let _stop = StopWhenDropped(&stop);
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        store.transact_with(options, count).unwrap();
                        quick.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            for _ in 0..5 {
                let mut attempts = 0;
                let slow = store.transact_with(options, |one| {
                    attempts += 1;
                    count(one)?;
                    // Nested ones do not wait for their own thread.
                    store.transact_with(options, |two| two.put(&tree, b"2", b"21"))?;
                    thread::sleep(Duration::from_millis(5));
                    Ok(())
                });
                slow.unwrap();
                assert!(attempts < 30, "{attempts} attempts");
            }
        });
        let counted = 10 + 5 + quick.load(Ordering::Relaxed);
        assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(counted.to_string().as_bytes()));
    }
}

/// A function that runs for long holds others up for a moment only.
#[test]
fn a_turn_ends_also_if_the_function_does_not() {
    let (_, store, tree) = two_entries();
    let options = TransactionOptions::new().durability(Durability::None);
    let change = |one: &mut Transaction, value: &str| {
        one.get(&tree, b"1")?;
        one.put(&tree, b"1", value.as_bytes())
    };
    let (others, has_turn) = (Barrier::new(3), AtomicBool::new(false));
    thread::scope(|scope| {
        for name in ["20", "30"] {
            let (others, store) = (&others, &store);
            scope.spawn(move || {
                others.wait();
                store.transact_with(options, |one| change(one, name)).unwrap();
                others.wait();
            });
        }
        let mut attempts = 0;
        store
            .transact_with(options, |one| {
                change(one, "10")?;
                attempts += 1;
                match attempts {
                    ..4 => tree.upsert(b"1", b"0").map(drop),
                    // This attempt has reserved the entry. It ends after the others do.
                    4 => {
                        has_turn.store(true, Ordering::Relaxed);
                        others.wait();
                        others.wait();
                        Ok(())
                    }
                    _ => Ok(()),
                }
            })
            .unwrap();
        assert!(attempts > 4 && has_turn.load(Ordering::Relaxed));
    });
    assert_eq!(tree.get(b"1").unwrap().as_deref(), Some(&b"10"[..]));
}

/// Iterators and readers of a snapshot, also such as have begun, go on when their tree is dropped.
#[test]
fn a_snapshot_reads_on_when_its_tree_is_dropped() {
    let (_, store) = memory_store(2048, 1);
    let tree = store.create_tree("tree").unwrap();
    let keys: Vec<[u8; 4]> = (0..3000_u32).map(u32::to_be_bytes).collect();
    keys.iter().for_each(|key| _ = tree.upsert(key, &[5; 100]).unwrap());
    let snapshot = store.snapshot().unwrap();
    let mut transaction = store.begin().unwrap();
    transaction.put(&tree, &keys[7], b"own").unwrap();
    let mut entries = snapshot.entries(&tree).unwrap();
    let mut own = transaction.entries(&tree).unwrap();
    let first = |entries: &mut ViewEntries<'_>| {
        let ends = (entries.next().unwrap().unwrap().0, entries.next_back().unwrap().unwrap().0);
        assert_eq!(ends, (keys[0].to_vec(), keys[2999].to_vec()));
    };
    first(&mut entries);
    first(&mut own);
    store.drop_tree("tree").unwrap();
    for entries in [&mut entries, &mut own] {
        assert_eq!(entries.next_back().unwrap().unwrap().0, keys[2998]);
        let rest: Result<Vec<_>, Error> = entries.collect();
        assert_eq!(rest.unwrap().len(), 2997);
    }
    assert_eq!(&snapshot.get(&tree, &keys[5]).unwrap().unwrap()[..], [5; 100]);
    assert_eq!(&transaction.get(&tree, &keys[7]).unwrap().unwrap()[..], b"own");
}
