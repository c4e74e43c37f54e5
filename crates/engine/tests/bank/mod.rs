//! A store that writers change in ways of which a backup can tell whether it has all: money moves
//! between accounts, and each long value says what it must be.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part of this")]

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use tempfile::{TempDir, tempdir};
use vellum::{BackupOptions, BackupProgress, BackupReport, Options, Store, Tree};
use vellum_testing::random::Random;

pub const ACCOUNTS: u64 = 400;
pub const BALANCE: u64 = 1000;
/// The number of trees in which the writers put long values.
pub const FILES: u64 = 3;

pub fn options() -> Options {
    Options::new().pool_bytes(4 << 20).log(false)
}

pub fn with_log() -> Options {
    options().log(true).log_bytes(4 << 20)
}

pub fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub fn back_up(store: &Store, path: &Path) -> vellum::Result<BackupReport> {
    store.backup(path, &BackupOptions::new(), &mut goes_on)
}

pub fn account(number: u64) -> Vec<u8> {
    format!("account {number:05}").into_bytes()
}

/// A long value that tells its own length and seed.
pub fn long_value(seed: u64, len: usize) -> Vec<u8> {
    let mut value = seed.to_le_bytes().to_vec();
    value.extend(vellum_testing::random::bytes(len, seed));
    value
}

/// The accounts, and the trees of the writers.
pub fn fill(store: &Store) {
    let accounts = store.create_tree("accounts").unwrap();
    for number in 0..ACCOUNTS {
        // Other bytes beside the balance, so that the accounts take many pages.
        let mut value = BALANCE.to_le_bytes().to_vec();
        value.resize(300, number as u8);
        accounts.insert(&account(number), &value).unwrap();
    }
    store.create_tree("log").unwrap();
    (0..FILES).for_each(|number| drop(store.create_tree(&format!("files {number}")).unwrap()));
}

/// Moves some money from one account to another, and notes that in the tree `log`.
pub fn transfer(store: &Store, number: u64, random: &mut Random) {
    let (accounts, log) = (store.tree("accounts").unwrap(), store.tree("log").unwrap());
    let (from, to) = (account(random.below(ACCOUNTS)), account(random.below(ACCOUNTS)));
    let amount = random.below(10);
    let moved = store.transact(|txn| {
        let mut take = txn.get(&accounts, &from)?.unwrap().to_vec();
        let left = u64::from_le_bytes(take[..8].try_into().unwrap());
        if from != to && left >= amount {
            take[..8].copy_from_slice(&(left - amount).to_le_bytes());
            txn.put(&accounts, &from, &take)?;
            let mut give = txn.get(&accounts, &to)?.unwrap().to_vec();
            let has = u64::from_le_bytes(give[..8].try_into().unwrap());
            give[..8].copy_from_slice(&(has + amount).to_le_bytes());
            txn.put(&accounts, &to, &give)?;
        }
        txn.put(&log, &number.to_be_bytes(), &amount.to_le_bytes())
    });
    moved.unwrap();
}

/// Replaces, removes and streams long values of a tree, and creates and drops others.
pub fn change_files(store: &Store, writer: u64, step: u64, random: &mut Random) {
    let name = format!("files {writer}");
    let files = store.tree(&name).unwrap();
    let key = [random.below(12) as u8];
    match random.below(10) {
        0 => assert!(files.remove(&key).is_ok()),
        1..4 => {
            let mut writer = files.writer(&key).unwrap();
            let len = 300_000 + random.below(400_000) as usize;
            writer.write_all(&long_value(step, len)).unwrap();
            writer.finish().unwrap();
        }
        4 => {
            // A process that was killed may have left a tree of that name.
            let passing = store.tree_or_create(&format!("passing {writer} {step}")).unwrap();
            (0..50_u8).for_each(|key| _ = passing.upsert(&[key], &[key; 500]).unwrap());
            drop(passing);
            store.drop_tree(&format!("passing {writer} {step}")).unwrap();
        }
        _ => {
            let len = 5000 + random.below(60_000) as usize;
            files.upsert(&key, &long_value(step, len)).unwrap();
        }
    }
}

/// Asserts that a backup is sound, that no money came or went, and that every long value is whole.
/// Returns the numbers of the transfers that it has.
#[track_caller]
pub fn check(path: &Path) -> Vec<u64> {
    let store = Store::open(path, &options().read_only(true)).unwrap();
    assert!(store.stat().unwrap().clean && store.recovery().is_none());
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    let balance = |entry: vellum::Result<(Vec<u8>, vellum::Value<'_>)>| {
        u64::from_le_bytes(entry.unwrap().1[..8].try_into().unwrap())
    };
    let accounts = store.tree("accounts").unwrap();
    let balances: Vec<u64> = accounts.range(..).map(balance).collect();
    assert_eq!(balances.len() as u64, ACCOUNTS);
    assert_eq!(balances.iter().sum::<u64>(), ACCOUNTS * BALANCE);
    for number in 0..FILES {
        let files = store.tree(&format!("files {number}")).unwrap();
        let mut cursor = files.cursor();
        while cursor.forward().unwrap() {
            let mut found = Vec::new();
            files.get_into(cursor.key(), &mut found).unwrap();
            let seed = u64::from_le_bytes(found[..8].try_into().unwrap());
            assert!(found == long_value(seed, found.len() - 8), "file {:?}", cursor.key());
        }
    }
    let log = store.tree("log").unwrap();
    log.range(..)
        .map(|entry| u64::from_be_bytes(entry.unwrap().0[..].try_into().unwrap()))
        .collect()
}

/// No name of a temporary file is left in the folder.
#[track_caller]
pub fn only_files(folder: &Path, expected: &[&str]) {
    let names = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, expected);
}

pub fn folder() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempdir().unwrap();
    let (store, backup) = (folder.path().join("a.vellum"), folder.path().join("b.vellum"));
    (folder, store, backup)
}

/// Runs writers, and `backups` beside them. Each transfer that was committed is counted in the
/// number that `backups` gets.
pub fn beside_writers(store: &Store, backups: impl FnOnce(&AtomicU64)) {
    let (ends, committed) = (AtomicBool::new(false), AtomicU64::new(0));
    let numbers = AtomicU64::new(0);
    thread::scope(|scope| {
        let ends = &ends;
        // Every number below `committed` is committed: one thread makes the transfers.
        let (committed, numbers) = (&committed, &numbers);
        let mover = scope.spawn(move || {
            let mut random = Random(1);
            while !ends.load(Ordering::Acquire) {
                let number = numbers.fetch_add(1, Ordering::AcqRel);
                transfer(store, number, &mut random);
                committed.store(number + 1, Ordering::Release);
            }
        });
        let writers: Vec<_> = (0..FILES)
            .map(|writer| {
                scope.spawn(move || {
                    let mut random = Random(100 + writer);
                    for step in 0.. {
                        if ends.load(Ordering::Acquire) {
                            break;
                        }
                        change_files(store, writer, step, &mut random);
                    }
                })
            })
            .collect();
        let end = EndOnDrop(ends);
        backups(committed);
        drop(end);
        mover.join().unwrap();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Everything committed before a backup's call is in it, and what it has is the beginning of what
/// was done.
#[track_caller]
pub fn has_all_before(found: &[u64], committed_before: u64) {
    assert!(found.iter().copied().eq(0..found.len() as u64), "a transfer is missing in the midst");
    assert!(found.len() as u64 >= committed_before, "{} of {committed_before}", found.len());
}

pub fn stream(tree: &Tree, key: &[u8], seed: u64, len: usize) {
    let mut writer = tree.writer(key).unwrap();
    writer.write_all(&long_value(seed, len)).unwrap();
    writer.finish().unwrap();
}

#[track_caller]
pub fn has_value(tree: &Tree, key: &[u8], seed: u64, len: usize) {
    let mut found = Vec::new();
    assert!(tree.get_into(key, &mut found).unwrap(), "{key:?} is missing");
    assert!(found == long_value(seed, len), "{key:?} has another value");
}

pub fn is_logged(options: &Options) -> bool {
    format!("{options:?}").contains("has_log: Some(true)")
}
