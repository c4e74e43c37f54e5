//! Backups of stores that run: each opens, is sound, and is the store of one moment.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use tempfile::{TempDir, tempdir};
use vellum::{
    BackupOptions, BackupProgress, BackupReport, Error, MemoryDevice, Options, Store, Tree,
};
use vellum_pool::device::{Fault, FaultyDevice, Operation};
use vellum_testing::random::Random;

const ACCOUNTS: u64 = 400;
const BALANCE: u64 = 1000;
/// The number of trees in which the writers put long values.
const FILES: u64 = 3;

fn options() -> Options {
    Options::new().pool_bytes(4 << 20)
}

fn with_log() -> Options {
    options().log(true).log_bytes(4 << 20)
}

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn back_up(store: &Store, path: &Path) -> vellum::Result<BackupReport> {
    store.backup(path, &BackupOptions::new(), &mut goes_on)
}

fn account(number: u64) -> Vec<u8> {
    format!("account {number:05}").into_bytes()
}

/// A long value that tells its own length and seed.
fn long_value(seed: u64, len: usize) -> Vec<u8> {
    let mut value = seed.to_le_bytes().to_vec();
    value.extend(vellum_testing::random::bytes(len, seed));
    value
}

/// The accounts, and the trees of the writers.
fn fill(store: &Store) {
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
fn transfer(store: &Store, number: u64, random: &mut Random) {
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
fn change_files(store: &Store, writer: u64, step: u64, random: &mut Random) {
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
            let passing = store.create_tree(&format!("passing {writer} {step}")).unwrap();
            (0..50_u8).for_each(|key| passing.insert(&[key], &[key; 500]).unwrap());
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
fn check(path: &Path) -> Vec<u64> {
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
fn only_files(folder: &Path, expected: &[&str]) {
    let names = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, expected);
}

fn folder() -> (TempDir, PathBuf, PathBuf) {
    let folder = tempdir().unwrap();
    let (store, backup) = (folder.path().join("a.vellum"), folder.path().join("b.vellum"));
    (folder, store, backup)
}

/// Runs writers, and `backups` beside them. Each transfer that was committed is counted in the
/// number that `backups` gets.
fn beside_writers(store: &Store, backups: impl FnOnce(&AtomicU64)) {
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
fn has_all_before(found: &[u64], committed_before: u64) {
    assert!(found.iter().copied().eq(0..found.len() as u64), "a transfer is missing in the midst");
    assert!(found.len() as u64 >= committed_before, "{} of {committed_before}", found.len());
}

#[test]
fn a_backup_beside_writers_is_the_store_of_one_moment() {
    for options in [with_log(), options()] {
        let (folder, path, _) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        beside_writers(&store, |committed| {
            for round in 0..6 {
                let before = committed.load(Ordering::Acquire);
                let backup = folder.path().join(format!("backup {round}"));
                back_up(&store, &backup).unwrap();
                has_all_before(&check(&backup), before);
                std::fs::remove_file(&backup).unwrap();
                while committed.load(Ordering::Acquire) < before + 20 {
                    thread::yield_now();
                }
            }
        });
        store.close().unwrap();
        only_files(folder.path(), &["a.vellum"]);
        check(&path);
    }
}

fn stream(tree: &Tree, key: &[u8], seed: u64, len: usize) {
    let mut writer = tree.writer(key).unwrap();
    writer.write_all(&long_value(seed, len)).unwrap();
    writer.finish().unwrap();
}

#[track_caller]
fn has_value(tree: &Tree, key: &[u8], seed: u64, len: usize) {
    let mut found = Vec::new();
    assert!(tree.get_into(key, &mut found).unwrap(), "{key:?} is missing");
    assert!(found == long_value(seed, len), "{key:?} has another value");
}

/// A store of a few pages, which is copied in one part. The parts after that are values that came
/// meanwhile: first those before the end was sought, then those since.
fn small_store(path: &Path, log_bytes: u64) -> (Store, Tree) {
    let store = Store::create(path, &options().log(true).log_bytes(log_bytes)).unwrap();
    let tree = store.create_tree("values").unwrap();
    (store, tree)
}

#[test]
fn values_that_come_while_a_store_is_copied_are_in_the_backup() {
    const LEN: usize = 3 << 20;
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 4 << 20);
    let mut calls = 0;
    let report = store.backup(&backup, &BackupOptions::new().check(false), &mut |_| {
        calls += 1;
        match calls {
            // The store is copied, in two small parts.
            1 => stream(&tree, b"one", 1, LEN),
            // The first part of that value was copied.
            3 => ["two", "three"].iter().for_each(|key| stream(&tree, key.as_bytes(), 2, LEN)),
            // The value was copied, the end was found, and a part of the next two was copied.
            20 => {
                for key in ["one", "two", "three"] {
                    assert!(tree.remove(key.as_bytes()).unwrap());
                    store.sync().unwrap();
                }
                // These take the places of the others, if they may.
                (4..8).for_each(|seed: u64| stream(&tree, &seed.to_le_bytes(), seed, LEN));
                tree.upsert(b"later", b"").unwrap();
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    report.unwrap();
    assert!(calls > 30, "{calls} parts");
    has_value(&tree, &7_u64.to_le_bytes(), 7, LEN);
    let copy = Store::open(&backup, &options().read_only(true)).unwrap();
    let report = copy.check(&mut |_| {}).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
    let tree = copy.tree("values").unwrap();
    has_value(&tree, b"one", 1, LEN);
    has_value(&tree, b"two", 2, LEN);
    has_value(&tree, b"three", 2, LEN);
    assert!(!tree.contains(b"later").unwrap());
    store.close().unwrap();
}

/// The log has room for a part of the changes only, so checkpoints trim it.
#[test]
fn a_log_that_is_trimmed_meanwhile_is_in_the_backup() {
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 1 << 20);
    (0..2000_u64).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 400]).unwrap());
    let mut calls = 0;
    let report = store.backup(&backup, &BackupOptions::new(), &mut |_| {
        calls += 1;
        if calls == 1 {
            (0..2000_u64)
                .rev()
                .filter(|key| key % 3 > 0)
                .for_each(|key| assert!(tree.upsert(&key.to_be_bytes(), &[2; 1000]).unwrap()));
        }
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert!(report.changes >= 1300, "{report:?}");
    let copy = Store::open(&backup, &options()).unwrap();
    let tree = copy.tree("values").unwrap();
    for key in 0..2000_u64 {
        let expected = if key % 3 > 0 { vec![2; 1000] } else { vec![1; 400] };
        assert_eq!(tree.get(&key.to_be_bytes()).unwrap().unwrap().to_vec(), expected);
    }
    copy.close().unwrap();
    store.close().unwrap();
}

/// A value that a writer has not finished, and one that a reader still has, are no part of it.
#[test]
fn pages_to_which_no_tree_refers_are_free_in_the_backup() {
    for options in [with_log(), options()] {
        let (_folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        let tree = store.create_tree("values").unwrap();
        stream(&tree, b"read", 1, 3 << 20);
        let reader = tree.reader(b"read").unwrap().unwrap();
        let mut writer = tree.writer(b"written").unwrap();
        writer.write_all(&long_value(2, 2 << 20)).unwrap();
        let mut calls = 0;
        let report = store.backup(&backup, &BackupOptions::new(), &mut |_| {
            calls += 1;
            // Without a log the state is that of the beginning.
            if calls == 1 && store.recovery().is_none() && is_logged(&options) {
                assert!(tree.remove(b"read").unwrap());
            }
            ControlFlow::Continue(())
        });
        report.unwrap();
        writer.finish().unwrap();
        drop(reader);
        let copy = Store::open(&backup, &options.clone().read_only(true)).unwrap();
        let report = copy.check(&mut |_| {}).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
        let copied = copy.tree("values").unwrap();
        assert!(!copied.contains(b"written").unwrap());
        assert_eq!(copied.contains(b"read").unwrap(), !is_logged(&options));
        store.close().unwrap();
    }
}

fn is_logged(options: &Options) -> bool {
    format!("{options:?}").contains("has_log: true")
}

#[test]
fn a_store_that_is_open_to_read_is_copied_as_it_is() {
    let (folder, path, backup) = folder();
    for options in [options(), with_log()] {
        let store = Store::open_or_create(&path, &options).unwrap();
        if store.trees().unwrap().is_empty() {
            fill(&store);
        }
        stream(&store.tree("files 0").unwrap(), b"one", 1, 1 << 20);
        store.close().unwrap();
        let before = std::fs::read(&path).unwrap();
        let store = Store::open(&path, &options.read_only(true)).unwrap();
        let twin = Store::open(&path, &self::options().read_only(true)).unwrap();
        back_up(&store, &backup).unwrap();
        drop((store, twin));
        assert!(std::fs::read(&path).unwrap() == before, "the store has changed");
        check(&backup);
        std::fs::remove_file(&backup).unwrap();
    }
    only_files(folder.path(), &["a.vellum"]);
}

/// A backup has the store's numbers: what comes after it in the store's log comes after it in its
/// own, too.
#[test]
fn a_backup_goes_on_as_a_store_with_a_log() {
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 4 << 20);
    (0..500_u64).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 100]).unwrap());
    let report = back_up(&store, &backup).unwrap();
    assert_eq!(report.store_id, store.stat().unwrap().store_id);
    assert!(report.lsn > 0 && report.file_bytes >= report.used_bytes, "{report:?}");
    let copy = Store::open(&backup, &options().log(true)).unwrap();
    let copied = copy.tree("values").unwrap();
    (0..500_u64).for_each(|key| assert!(copied.upsert(&key.to_be_bytes(), &[2; 90]).unwrap()));
    copy.sync().unwrap();
    let report = back_up(&copy, &backup.with_extension("second")).unwrap();
    assert!(copy.check(&mut |_| {}).unwrap().is_sound());
    copy.close().unwrap();
    store.close().unwrap();
    assert!(report.lsn > 0);
}

#[test]
fn what_is_there_is_not_replaced_unless_it_is_asked_for() {
    let (folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    std::fs::write(&backup, "other").unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::Exists(_)), "{error}");
    assert_eq!(std::fs::read(&backup).unwrap(), b"other");
    let replace = BackupOptions::new().replace(true);
    // Nor is the store itself.
    let error = store.backup(&path, &replace, &mut goes_on).unwrap_err();
    assert!(matches!(error, Error::InUse(_)), "{error}");
    store.backup(&backup, &replace, &mut goes_on).unwrap();
    check(&backup);
    let nowhere = folder.path().join("no folder").join("b.vellum");
    let error = back_up(&store, &nowhere).unwrap_err().to_string();
    assert!(error.contains("no folder"), "{error}");
    let error = back_up(&store, Path::new("/dev/null")).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    store.close().unwrap();
    only_files(folder.path(), &["a.vellum", "b.vellum"]);
}

#[test]
fn a_backup_that_is_cancelled_leaves_nothing() {
    for options in [with_log(), options()] {
        let (folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        for after in [0, 1, 3] {
            let mut calls = 0;
            let error = store.backup(&backup, &BackupOptions::new(), &mut |_| {
                calls += 1;
                match calls > after {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
            transfer(&store, after, &mut Random(after));
        }
        // Another one is not in the way of it.
        back_up(&store, &backup).unwrap();
        assert_eq!(check(&backup).len(), 3);
        store.close().unwrap();
        only_files(folder.path(), &["a.vellum", "b.vellum"]);
    }
}

/// What a progress function must not do fails, and what it may do succeeds.
#[test]
fn a_progress_function_that_calls_the_store_does_not_wait_for_itself() {
    for options in [with_log(), options()] {
        let (_folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        let is_logged = is_logged(&options);
        let report = store.backup(&backup, &BackupOptions::new().check(false), &mut |_| {
            match (is_logged, store.sync()) {
                (true, Ok(())) | (false, Err(Error::CalledFromWithin)) => {}
                other => panic!("{other:?}"),
            }
            let second = back_up(&store, &backup.with_extension("second"));
            match (is_logged, second) {
                (true, Err(Error::InUse(_))) | (false, Err(Error::CalledFromWithin)) => {}
                (_, other) => panic!("{other:?}"),
            }
            ControlFlow::Continue(())
        });
        report.unwrap();
        check(&backup);
        store.close().unwrap();
    }
}

#[test]
fn a_limit_makes_a_backup_slower() {
    let (_folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    let options = BackupOptions::new().bytes_per_second(512 << 10);
    let began = std::time::Instant::now();
    let mut calls = 0;
    let report = store.backup(&backup, &options, &mut |progress| {
        calls += 1;
        assert!(progress.bytes_done <= progress.bytes_total);
        ControlFlow::Continue(())
    });
    let least = report.unwrap().used_bytes.min(200 << 10) as f64 / f64::from(512 << 10);
    assert!(began.elapsed().as_secs_f64() >= least && calls > 5, "{calls} calls");
    check(&backup);
}

#[test]
fn closing_a_store_with_a_log_ends_its_backup() {
    let (folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    let mut handle = Some(store.clone());
    let outcome = store.backup(&backup, &BackupOptions::new(), &mut |_| {
        if let Some(handle) = handle.take() {
            handle.close().unwrap();
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(Error::Closed)), "{outcome:?}");
    assert!(matches!(back_up(&store, &backup), Err(Error::Closed)));
    check(&path);
    only_files(folder.path(), &["a.vellum"]);
}

#[test]
fn a_store_that_cannot_be_read_has_no_backup_and_goes_on() {
    let (folder, _, backup) = folder();
    let memory = Arc::new(MemoryDevice::new());
    let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
    let plan = device.plan();
    let store = Store::create_on(device, &options().pool_bytes(1 << 20)).unwrap();
    fill(&store);
    stream(&store.tree("files 0").unwrap(), b"one", 1, 4 << 20);
    store.sync().unwrap();
    plan.fail_always(Operation::Read, Fault::Error(rustix::io::Errno::IO));
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::Io(_)), "{error:?}");
    plan.clear();
    only_files(folder.path(), &[]);
    transfer(&store, 0, &mut Random(1));
    back_up(&store, &backup).unwrap();
    assert_eq!(check(&backup), [0]);
}

/// Damage of the store is not carried into its backups unseen.
#[test]
fn a_damaged_store_has_no_backup() {
    use std::os::unix::fs::FileExt as _;

    let (folder, path, backup) = folder();
    let store = Store::create(&path, &options()).unwrap();
    fill(&store);
    store.close().unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let pages = file.metadata().unwrap().len() / 4096;
    let (mut page, mut at) = ([0; 4096], 0);
    // A leaf of the accounts.
    for number in 3..pages {
        file.read_exact_at(&mut page, number * 4096).unwrap();
        if page[36] == 3 && page.windows(7).any(|bytes| bytes == b"account") {
            at = number * 4096 + 3000;
        }
    }
    file.write_all_at(&[0xee; 8], at).unwrap();
    let store = Store::open(&path, &options().read_only(true)).unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::BadBackup { .. }), "{error:?}");
    assert!(error.to_string().contains("checksum"), "{error}");
    only_files(folder.path(), &["a.vellum"]);
    let store = Store::open(&path, &options().salvage(true)).unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(error.to_string().contains("dump"), "{error}");
}
