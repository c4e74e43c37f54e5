//! Increments: what has changed since a backup, and what a backup and its increments make together.
#![allow(clippy::unwrap_used)]

mod bank;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use tempfile::TempDir;
use vellum::{BackupOptions, BackupReport, Error, RestoreOptions, RestoreReport, Store};
use vellum_testing::random::Random;

use bank::{
    back_up, beside_writers, change_files, check, fill, folder, goes_on, has_all_before,
    only_files, options, stream, transfer, with_log,
};

fn increment(store: &Store, path: &Path, base: &Path) -> vellum::Result<BackupReport> {
    store.backup(path, &BackupOptions::new().since(base), &mut goes_on)
}

fn restore(to: &Path, base: &Path, increments: &[PathBuf]) -> vellum::Result<RestoreReport> {
    vellum::restore(to, base, increments, &RestoreOptions::new(), &mut goes_on)
}

/// A folder, the path of a backup there, and the store in `a.vellum`. The increment `one` has what
/// changed since the backup.
fn with_one_increment() -> (TempDir, PathBuf, Store) {
    let (folder, path, base) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    back_up(&store, &base).unwrap();
    transfer(&store, 0, &mut Random(1));
    increment(&store, &folder.path().join("one"), &base).unwrap();
    (folder, base, store)
}

/// Asserts that two files have the same trees with the same entries.
#[track_caller]
fn equal(one: &Path, two: &Path) {
    let open = |path| Store::open(path, &options().read_only(true)).unwrap();
    let (one, two) = (open(one), open(two));
    let trees = one.trees().unwrap();
    assert_eq!(trees, two.trees().unwrap());
    for name in trees {
        let (one, two) = (one.tree(&name).unwrap(), two.tree(&name).unwrap());
        let (mut left, mut right) = (one.cursor(), two.cursor());
        while left.forward().unwrap() {
            assert!(right.forward().unwrap() && left.key() == right.key(), "{name}");
            let (mut a, mut b) = (Vec::new(), Vec::new());
            one.get_into(left.key(), &mut a).unwrap();
            two.get_into(right.key(), &mut b).unwrap();
            assert!(a == b, "{name}: {:?}", left.key());
        }
        assert!(!right.forward().unwrap(), "{name}");
    }
}

/// A chain of increments, with a full backup after each to compare with. The store is closed and
/// opened on the way, with a log and without.
#[test]
fn a_backup_and_its_increments_are_the_store() {
    let (folder, path, base) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    drop(store.create_tree("still").unwrap());
    let still = store.tree("still").unwrap();
    (0..20_000_u64).for_each(|key| still.insert(&key.to_be_bytes(), &[7; 100]).unwrap());
    back_up(&store, &base).unwrap();
    drop(still);
    store.close().unwrap();
    let (mut increments, mut last, mut number) = (Vec::new(), base.clone(), 0);
    for round in 0..6_u64 {
        let options = if round % 3 == 1 { options() } else { with_log() };
        let store = Store::open(&path, &options).unwrap();
        let mut random = Random(round);
        for step in 0..30 {
            transfer(&store, number, &mut random);
            change_files(&store, step % 3, number, &mut random);
            number += 1;
        }
        let path = folder.path().join(format!("increment {round}"));
        let report = increment(&store, &path, &last).unwrap();
        assert_eq!(report.file_bytes, path.metadata().unwrap().len());
        // It does not have the tree that stays as it is.
        assert!(report.file_bytes + (2 << 20) < report.used_bytes, "{report:?}");
        let whole = folder.path().join("whole");
        back_up(&store, &whole).unwrap();
        if round % 2 == 0 {
            store.close().unwrap();
        }
        increments.push(path.clone());
        last = path;
        let restored = folder.path().join("restored");
        let report = restore(&restored, &base, &increments).unwrap();
        assert_eq!(report.file_bytes, restored.metadata().unwrap().len());
        assert_eq!(check(&restored).len() as u64, number);
        equal(&restored, &whole);
        fs::remove_file(&restored).unwrap();
        fs::remove_file(&whole).unwrap();
    }
    // Not one of them can be left out.
    let restored = folder.path().join("restored");
    for left_out in 0..increments.len() - 1 {
        let mut some = increments.clone();
        some.remove(left_out);
        let error = restore(&restored, &base, &some).unwrap_err().to_string();
        assert!(error.contains(&format!("increment {}", left_out + 1)), "{error}");
        assert!(error.contains("does not follow"), "{error}");
    }
    let mut swapped = increments.clone();
    swapped.swap(2, 3);
    let error = restore(&restored, &base, &swapped).unwrap_err().to_string();
    assert!(error.contains("increment 3") && error.contains("does not follow"), "{error}");
    let error = restore(&restored, &increments[0], &increments[1..]).unwrap_err().to_string();
    assert!(error.contains("name the backup that it follows first"), "{error}");
    assert!(!restored.exists());
}

#[test]
fn increments_beside_writers_are_stores_of_one_moment() {
    for options in [with_log(), options()] {
        let (folder, path, base) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        beside_writers(&store, |committed| {
            back_up(&store, &base).unwrap();
            let (mut last, mut increments) = (base.clone(), Vec::new());
            for round in 0..4 {
                let before = committed.load(Ordering::Acquire);
                let next = folder.path().join(format!("increment {round}"));
                increment(&store, &next, &last).unwrap();
                increments.push(next.clone());
                last = next;
                let restored = folder.path().join("restored");
                restore(&restored, &base, &increments).unwrap();
                has_all_before(&check(&restored), before);
                fs::remove_file(&restored).unwrap();
            }
        });
        store.close().unwrap();
    }
}

/// A restored store goes on as a store, and has backups and increments again.
#[test]
fn a_restored_store_has_increments_of_its_own() {
    let (folder, base, store) = with_one_increment();
    let at = |name: &str| folder.path().join(name);
    store.close().unwrap();
    restore(&at("restored"), &base, &[at("one")]).unwrap();
    let store = Store::open(at("restored"), &with_log()).unwrap();
    transfer(&store, 1, &mut Random(2));
    increment(&store, &at("two"), &at("one")).unwrap();
    store.close().unwrap();
    restore(&at("again"), &base, &[at("one"), at("two")]).unwrap();
    assert_eq!(check(&at("again")), [0, 1]);
    equal(&at("again"), &at("restored"));
}

#[test]
fn a_base_must_be_a_backup_of_the_store_as_it_was() {
    let (folder, base, store) = with_one_increment();
    let at = |name: &str| folder.path().join(name);
    let error = increment(&store, &at("two"), &at("nothing")).unwrap_err();
    assert!(matches!(error, Error::NotFound(_)), "{error}");
    fs::write(at("text"), [b'x'; 9000]).unwrap();
    let error = increment(&store, &at("two"), &at("text")).unwrap_err().to_string();
    assert!(error.contains("text") && error.contains("not a Vellum store"), "{error}");
    let other = Store::create(at("other"), &options()).unwrap();
    fill(&other);
    other.close().unwrap();
    let error = increment(&store, &at("two"), &at("other")).unwrap_err().to_string();
    assert!(error.contains("of another store"), "{error}");
    let error = restore(&at("new"), &at("other"), &[at("one")]).unwrap_err().to_string();
    assert!(error.contains("of another store"), "{error}");
    let error = restore(&at("new"), &at("a.vellum"), &[]).unwrap_err();
    assert!(matches!(error, Error::InUse(_)), "{error}");
    store.close().unwrap();
    // The base goes on as a store: now it is another state.
    let changed = Store::open(&base, &options()).unwrap();
    transfer(&changed, 7, &mut Random(3));
    changed.close().unwrap();
    let error = restore(&at("new"), &base, &[at("one")]).unwrap_err().to_string();
    assert!(error.contains("does not follow"), "{error}");
    assert!(!at("new").exists() && !at("two").exists());
    only_files(folder.path(), &["a.vellum", "b.vellum", "one", "other", "text"]);
}

/// Whatever byte of an increment, or of a backup, is another one: the restore fails and says which
/// file it is, or the result is the same as before.
#[test]
fn flipped_bits_are_noticed() {
    let (folder, path, base) = folder();
    let at = |name: &str| folder.path().join(name);
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    back_up(&store, &base).unwrap();
    transfer(&store, 0, &mut Random(1));
    stream(&store.tree("files 0").unwrap(), b"a", 1, 300_000);
    increment(&store, &at("one"), &base).unwrap();
    store.close().unwrap();
    restore(&at("good"), &base, &[at("one")]).unwrap();
    let mut random = Random(5);
    let (increment, full) = (fs::read(at("one")).unwrap(), fs::read(&base).unwrap());
    let tables = increment.len() - 4096;
    no_base_with_flipped_bits(&path, &at("one"), &mut random);
    for round in 0..300 {
        let (name, good) = if round % 4 == 0 { ("bad base", &full) } else { ("bad", &increment) };
        let mut bad = good.clone();
        let byte = match round {
            0..80 => random.index(144),
            80..160 => tables + random.index(4096),
            _ => random.index(bad.len()),
        };
        bad[byte.min(good.len() - 1)] ^= 1 << random.below(8);
        fs::write(at(name), &bad).unwrap();
        let restored = match round % 4 {
            0 => restore(&at("new"), &at("bad base"), &[at("one")]),
            _ => restore(&at("new"), &base, &[at("bad")]),
        };
        match restored {
            Ok(_) => {
                equal(&at("new"), &at("good"));
                fs::remove_file(at("new")).unwrap();
            }
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains(name) || error.contains("one"), "{error}");
            }
        }
    }
    for len in [0, 100, 4096, 8192, increment.len() - 4096, increment.len() - 1] {
        fs::write(at("bad"), &increment[..len]).unwrap();
        let error = restore(&at("new"), &base, &[at("bad")]).unwrap_err().to_string();
        assert!(error.contains("bad: "), "{error}");
    }
    assert!(!at("new").exists());
}

/// An increment is refused as a base if what the next one needs of it has another bit.
fn no_base_with_flipped_bits(store: &Path, base: &Path, random: &mut Random) {
    let store = Store::open(store, &options().read_only(true)).unwrap();
    let (bad, next) = (base.with_file_name("bad"), base.with_file_name("next"));
    let good = fs::read(base).unwrap();
    let last = good.iter().rposition(|byte| *byte != 0).unwrap();
    for round in 0..100 {
        let mut bytes = good.clone();
        let byte = if round % 2 == 0 { random.index(4096) } else { last - random.index(2000) };
        bytes[byte] ^= 1 << random.below(8);
        fs::write(&bad, &bytes).unwrap();
        let error = increment(&store, &next, &bad).unwrap_err();
        assert!(matches!(&error, Error::BadBackup { path, .. } if *path == bad), "{error}");
    }
    increment(&store, &next, base).unwrap();
    fs::remove_file(next).unwrap();
}

/// Numbers that no file has are refused, also if their checksums are right.
#[test]
fn numbers_that_no_increment_has_are_refused() {
    let (folder, base, store) = with_one_increment();
    drop(store);
    let at = |name: &str| folder.path().join(name);
    let good = fs::read(at("one")).unwrap();
    let number = |at: usize| u64::from_le_bytes(*good[at..].first_chunk().unwrap());
    let runs = 4096 * (1 + number(96) as usize);
    let end = runs + 16 * number(104) as usize;
    // The counts of the first page; the first run, and its length.
    for place in [88, 96, 104, 112, 120, runs, runs + 8] {
        let edges = [0, 1 << 50, 1 << 51, 1 << 60, u64::MAX - 1, u64::MAX];
        for new in edges.into_iter().filter(|new| *new != number(place)) {
            let mut bytes = good.clone();
            bytes[place..place + 8].copy_from_slice(&new.to_le_bytes());
            let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &bytes[runs..end]);
            bytes[128..136].copy_from_slice(&sum.to_le_bytes());
            vellum::page::seal(&mut bytes[..4096], &[]);
            fs::write(at("bad"), &bytes).unwrap();
            let error = restore(&at("new"), &base, &[at("bad")]).unwrap_err();
            // No disk has room for the longest files.
            let is_known = matches!(&error, Error::BadBackup { .. })
                || place == 88 && matches!(&error, Error::BackupIo { .. });
            assert!(is_known, "{place}, {new}: {error}");
            assert!(!at("new").exists());
        }
    }
}

#[test]
fn a_restore_that_is_cancelled_leaves_nothing_and_replaces_nothing() {
    let (folder, base, store) = with_one_increment();
    let at = |name: &str| folder.path().join(name);
    store.close().unwrap();
    let options = RestoreOptions::new();
    for after in 0..4 {
        let mut calls = 0;
        let cancelled = vellum::restore(at("new"), &base, &[at("one")], &options, &mut |_| {
            calls += 1;
            if calls > after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
        only_files(folder.path(), &["a.vellum", "b.vellum", "one"]);
    }
    let error = restore(&at("a.vellum"), &base, &[]).unwrap_err();
    assert!(matches!(error, Error::Exists(_)), "{error}");
    let replace = options.replace(true);
    vellum::restore(at("a.vellum"), &base, &[], &replace, &mut goes_on).unwrap();
    assert!(check(&at("a.vellum")).is_empty());
}
