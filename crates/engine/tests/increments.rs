//! Increments: what has changed since a backup, and what a backup and its increments make together.
#![allow(clippy::unwrap_used)]

mod bank;

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
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

/// A copy of a store and its log, as a process that is killed now would leave them.
fn killed(path: &Path, to: &Path) {
    let log = |path: &Path| path.with_extension("vellum.log");
    let copy = || {
        fs::copy(path, to).unwrap();
        let _ = fs::remove_dir_all(log(to));
        fs::create_dir(log(to)).unwrap();
        for entry in fs::read_dir(log(path)).unwrap() {
            let name = entry.unwrap().file_name();
            fs::copy(log(path).join(&name), log(to).join(&name)).unwrap();
        }
    };
    let state = || {
        let logs = fs::read_dir(log(to)).unwrap().map(|entry| entry.unwrap().path());
        let mut logs: Vec<_> = logs.map(|path| (fs::read(&path).unwrap(), path)).collect();
        logs.sort_by(|one, other| one.1.cmp(&other.1));
        (fs::read(to).unwrap(), logs)
    };
    // The store's threads may still write pages, or a checkpoint.
    copy();
    let mut before = state();
    loop {
        copy();
        let now = state();
        if now == before {
            return;
        }
        before = now;
    }
}

fn keep_still(store: &Store, entries: u64) {
    let still = store.create_tree("still").unwrap();
    (0..entries).for_each(|key| still.insert(&key.to_be_bytes(), &[7; 100]).unwrap());
}

/// How a store comes to its next increment.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Stays,
    IsKilled,
    IsClosed,
    HasNoLogMeanwhile,
    AnotherBackupCameBetween,
    AnotherBackupFailed,
}

/// An increment reads what was written since its base, whatever became of the process, and all
/// pages when the store cannot know that.
#[test]
fn an_increment_reads_what_was_written_since_its_base() {
    for way in [
        Way::Stays,
        Way::IsKilled,
        Way::IsClosed,
        Way::HasNoLogMeanwhile,
        Way::AnotherBackupCameBetween,
        Way::AnotherBackupFailed,
    ] {
        let (folder, path, base) = folder();
        let at = |name: &str| folder.path().join(name);
        let mut path = path;
        let mut store = Store::create(&path, &with_log()).unwrap();
        fill(&store);
        keep_still(&store, 50_000);
        let report = back_up(&store, &base).unwrap();
        assert!(report.read_bytes >= report.used_bytes - (64 << 10), "{report:?}");
        let (mut last, mut number, mut increments) = (base.clone(), 0, Vec::new());
        for round in 0..3 {
            let mut change = |store: &Store| {
                transfer(store, number, &mut Random(number));
                number += 1;
            };
            change(&store);
            match way {
                Way::Stays => {}
                Way::IsKilled => {
                    let copy = at(&format!("copy {round}.vellum"));
                    killed(&path, &copy);
                    drop(store);
                    store = Store::open(&copy, &with_log()).unwrap();
                    path = copy;
                    assert!(store.recovery().is_some());
                }
                Way::IsClosed => {
                    store.close().unwrap();
                    store = Store::open(&path, &with_log()).unwrap();
                }
                Way::HasNoLogMeanwhile => {
                    store.close().unwrap();
                    store = Store::open(&path, &options()).unwrap();
                    change(&store);
                    store.close().unwrap();
                    store = Store::open(&path, &with_log()).unwrap();
                }
                Way::AnotherBackupCameBetween => {
                    back_up(&store, &at(&format!("between {round}"))).unwrap();
                }
                Way::AnotherBackupFailed => {
                    let cancel = &mut |_: vellum::BackupProgress| ControlFlow::Break(());
                    let options = BackupOptions::new();
                    let failed = store.backup(at("failed"), &options, cancel).unwrap_err();
                    assert!(matches!(failed, Error::Cancelled), "{failed}");
                }
            }
            change(&store);
            let next = at(&format!("increment {round}"));
            let report = increment(&store, &next, &last).unwrap();
            let reads_all = report.read_bytes + (64 << 10) >= report.used_bytes;
            let reads_little = report.read_bytes < report.used_bytes / 4;
            let is_unknown = [Way::HasNoLogMeanwhile, Way::AnotherBackupCameBetween];
            let expected = if is_unknown.contains(&way) { reads_all } else { reads_little };
            assert!(expected, "{way:?}, {round}: {report:?}");
            increments.push(next.clone());
            last = next;
        }
        let all = BackupOptions::new().since(&last).read_all(true);
        let report = store.backup(at("all"), &all, &mut goes_on).unwrap();
        assert!(report.read_bytes + (64 << 10) >= report.used_bytes, "{way:?}: {report:?}");
        increments.push(at("all"));
        restore(&at("restored"), &base, &increments).unwrap();
        assert_eq!(check(&at("restored")).len() as u64, number);
    }
}

/// The same for whatever a store does: nothing that changed is missing in an increment.
#[test]
fn increments_that_read_what_was_written_miss_nothing() {
    let rounds = if std::env::var_os("VELLUM_SOAK").is_some() { 400 } else { 12 };
    let (folder, first, base) = folder();
    let at = |name: &str| folder.path().join(name);
    let mut random = Random(7);
    let mut path = first;
    let mut store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    keep_still(&store, 10_000);
    back_up(&store, &base).unwrap();
    let (mut last, mut increments, mut number) = (base.clone(), Vec::new(), 0);
    let mut little = 0;
    for round in 0..rounds {
        for _ in 0..random.below(3) {
            for _ in 0..random.below(40) {
                transfer(&store, number, &mut random);
                change_files(&store, number % 3, number, &mut random);
                number += 1;
            }
            match random.below(8) {
                0 => {
                    let name = format!("loaded {round}");
                    let tree = store.tree_or_create(&name).unwrap();
                    tree.clear().unwrap();
                    let mut load = tree.bulk_loader().unwrap();
                    for key in 0..random.below(5_000) {
                        load.push(&key.to_be_bytes(), &number.to_le_bytes()).unwrap();
                    }
                    load.finish().unwrap();
                }
                1 => {
                    let still = store.tree("still").unwrap();
                    let from = random.below(10_000);
                    let (from, to) = (from.to_be_bytes(), (from + 500).to_be_bytes());
                    still.remove_range(&from[..]..&to[..]).unwrap();
                }
                2 => drop(store.compact(&mut |_| ControlFlow::Continue(())).unwrap()),
                3 => store.sync().unwrap(),
                4 => {
                    store.close().unwrap();
                    store = Store::open(&path, &with_log()).unwrap();
                }
                5 => {
                    // New pages leave memory after the last checkpoint.
                    let tall = store.tree_or_create("tall").unwrap();
                    for _ in 0..random.below(2000) {
                        let key = random.below(20_000).to_be_bytes();
                        tall.upsert(&key, &[number as u8; 700]).unwrap();
                    }
                    let still = store.tree("still").unwrap();
                    assert!(still.entries().all(|entry| entry.is_ok()));
                    drop((tall, still));
                    store.sync().unwrap();
                    let copy = at(&format!("store {round}.vellum"));
                    killed(&path, &copy);
                    drop(store);
                    store = Store::open(&copy, &with_log()).unwrap();
                    path = copy;
                }
                _ => {}
            }
        }
        let next = at(&format!("increment {round}"));
        let report = increment(&store, &next, &last).unwrap();
        little += usize::from(report.read_bytes < report.used_bytes / 2);
        increments.push(next.clone());
        last = next;
        // The store as it is now.
        let whole = at("whole.vellum");
        killed(&path, &whole);
        Store::open(&whole, &with_log()).unwrap().close().unwrap();
        let restored = at("restored");
        restore(&restored, &base, &increments).unwrap();
        assert_eq!(check(&restored).len() as u64, number, "{round}");
        equal(&restored, &whole);
        fs::remove_file(&restored).unwrap();
        fs::remove_file(&whole).unwrap();
    }
    assert!(little > rounds as usize / 4, "{little} of {rounds} increments did not read all");
}

/// A backup may begin while the one before is checked, and fail. What was written between their
/// beginnings is not missing in an increment of the first one.
#[test]
fn a_backup_that_begins_while_another_one_is_checked_takes_nothing_from_it() {
    let (folder, path, base) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    keep_still(&store, 2000);
    let (second_began, begun) = std::sync::mpsc::channel();
    let (first_ended, ended) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let second = &store;
        let failed = folder.path().join("failed");
        let mut run_second = Some(move || {
            transfer(second, 0, &mut Random(1));
            // It is under way when the first one ends.
            let stop = &mut |_: vellum::BackupProgress| {
                let _ = second_began.send(());
                ended.recv().unwrap();
                ControlFlow::Break(())
            };
            let result = second.backup(failed, &BackupOptions::new(), stop);
            assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        });
        let used = store.stat().unwrap().used_pages * 4096;
        let began = &mut |progress: vellum::BackupProgress| {
            if progress.bytes_done > used + used / 2
                && let Some(run) = run_second.take()
            {
                scope.spawn(run);
                begun.recv().unwrap();
            }
            ControlFlow::Continue(())
        };
        store.backup(&base, &BackupOptions::new(), began).unwrap();
        first_ended.send(()).unwrap();
        assert!(run_second.is_none());
    });
    let one = folder.path().join("one");
    increment(&store, &one, &base).unwrap();
    store.close().unwrap();
    let restored = folder.path().join("restored");
    restore(&restored, &base, &[one]).unwrap();
    equal(&restored, &path);
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

/// Where the counts of an increment are in its head: of the store's file, of the frames that the
/// increment has, of their runs, of the ranges of the index, and of its sums.
const FILE_FRAMES: usize = 88;
const FRAMES: usize = 96;
const RUNS: usize = 104;
const RANGES: usize = 112;
const USED: usize = 120;
/// No file of more bytes than this is made.
const LONGEST: u64 = 2 << 40;

/// The parts of an increment, to be put together with other numbers.
#[derive(Clone)]
struct Parts {
    head: Vec<u8>,
    frames: Vec<u8>,
    runs: Vec<u8>,
    ranges: Vec<u8>,
    sums: Vec<u8>,
}

impl Parts {
    fn of(path: &Path) -> Parts {
        let bytes = fs::read(path).unwrap();
        let mut rest = &bytes[4096..];
        let mut next = |at: usize, size: u64| {
            let count = u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
            rest.split_off(..(count * size) as usize).unwrap().to_vec()
        };
        let [frames, runs, ranges, sums] =
            [(FRAMES, 4096), (RUNS, 16), (RANGES, 16), (USED, 16)].map(|(at, size)| next(at, size));
        Parts { head: bytes[..4096].to_vec(), frames, runs, ranges, sums }
    }

    fn number(&self, at: usize) -> u64 {
        u64::from_le_bytes(*self.head[at..].first_chunk().unwrap())
    }

    fn set(&mut self, at: usize, new: u64) {
        self.head[at..at + 8].copy_from_slice(&new.to_le_bytes());
    }

    /// Writes an increment of the length that its numbers say, with the right checksums: each part
    /// is cut off, or is zeros after its end. If no file can be so long, the parts have the lengths
    /// that they had.
    fn write(&self, path: &Path) {
        let mut made = self.clone();
        let parts = [
            (FRAMES, 4096, &mut made.frames),
            (RUNS, 16, &mut made.runs),
            (RANGES, 16, &mut made.ranges),
            (USED, 16, &mut made.sums),
        ];
        let lens = parts.each_ref().map(|(at, size, _)| self.number(*at).saturating_mul(*size));
        let is_short = lens.iter().all(|len| *len < LONGEST);
        let (mut at, mut writes, mut tables_end) = (4096, Vec::new(), 0);
        for ((number, _, part), len) in parts.into_iter().zip(lens) {
            let len = if is_short { len } else { part.len() as u64 };
            part.truncate(len as usize);
            if number != FRAMES && len < 1 << 20 {
                part.resize(len as usize, 0);
            }
            writes.push((at, part.clone()));
            at += len;
            tables_end = at;
        }
        let sum = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes);
        let runs_sum = sum(&made.runs);
        made.set(128, runs_sum);
        // The digest of the index that the increment leads to.
        let digest = sum(&[&made.ranges[..], &made.sums].concat());
        made.set(80, digest);
        vellum::page::seal(&mut made.head, &[]);
        writes.push((0, made.head));
        let file = File::create(path).unwrap();
        for (at, bytes) in writes {
            file.write_all_at(&bytes, at).unwrap();
        }
        file.set_len(tables_end.next_multiple_of(4096)).unwrap();
    }
}

fn is_contradiction(error: &Error) -> bool {
    let what = ["contradict each other", "not in order"];
    matches!(error, Error::BadBackup { .. })
        && what.iter().any(|what| error.to_string().contains(what))
}

/// Numbers that no file has are refused, also if their checksums and the file's length are right.
#[test]
fn numbers_that_no_increment_has_are_refused() {
    let (folder, base, store) = with_one_increment();
    drop(store);
    let at = |name: &str| folder.path().join(name);
    let good = Parts::of(&at("one"));
    good.write(&at("same"));
    assert!(fs::read(at("same")).unwrap() == fs::read(at("one")).unwrap());
    let refused = || {
        let error = restore(&at("new"), &base, &[at("bad")]).unwrap_err();
        assert!(!at("new").exists());
        error
    };
    for place in [FILE_FRAMES, FRAMES, RUNS, RANGES, USED] {
        let old = good.number(place);
        // A file of 1 TiB might fill the disk before the disk has no room for more.
        let long = (place != FILE_FRAMES).then_some(1 << 28);
        let edges = [0, 1 << 50, 1 << 51, 1 << 60, u64::MAX - 1, u64::MAX];
        for new in edges.into_iter().chain(long) {
            let mut bad = good.clone();
            bad.set(place, new);
            bad.write(&at("bad"));
            let error = refused();
            // No disk has room for the longest files.
            let is_known = matches!(&error, Error::BadBackup { .. })
                || place == FILE_FRAMES && matches!(&error, Error::BackupIo { .. });
            assert!(is_known, "{place}, {new}: {error}");
        }
        // The longest range ends where the file does, or before.
        let (start, count) = last_of(&good.ranges);
        let near = match place {
            FILE_FRAMES => vec![start + count - 1, good.number(USED) - 1],
            _ => vec![old - 1, old + 1],
        };
        for new in near {
            let mut bad = good.clone();
            bad.set(place, new);
            bad.write(&at("bad"));
            let error = refused();
            assert!(is_contradiction(&error), "{place}, {old}, {new}: {error}");
        }
    }
}

/// The last run, or the last range.
fn last_of(table: &[u8]) -> (u64, u64) {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let last = table.last_chunk::<16>().unwrap();
    (number(&last[..8]), number(&last[8..]))
}

/// Runs and ranges that are out of order, have no frames, or other ones than the counts say, are
/// refused, also if their checksums are right.
#[test]
fn runs_and_ranges_that_no_increment_has_are_refused() {
    let (folder, base, store) = with_one_increment();
    drop(store);
    let at = |name: &str| folder.path().join(name);
    let good = Parts::of(&at("one"));
    assert!(good.number(RUNS) > 1 && good.number(RANGES) > 0);
    let tables: [fn(&mut Parts) -> &mut Vec<u8>; 2] =
        [|parts| &mut parts.runs, |parts| &mut parts.ranges];
    for (table, of) in tables.into_iter().enumerate() {
        let len = of(&mut good.clone()).len();
        // The first ones and the last ones: where they begin, and their lengths.
        for place in [0, 8, len - 16, len - 8] {
            let old = u64::from_le_bytes(*of(&mut good.clone())[place..].first_chunk().unwrap());
            let edges = [0, 1 << 50, 1 << 51, 1 << 60, u64::MAX - 1, u64::MAX];
            let near = [old.wrapping_sub(1), old + 1];
            for new in edges.into_iter().chain(near).filter(|new| *new != old) {
                let mut bad = good.clone();
                of(&mut bad)[place..place + 8].copy_from_slice(&new.to_le_bytes());
                bad.write(&at("bad"));
                let error = restore(&at("new"), &base, &[at("bad")]).unwrap_err();
                assert!(matches!(&error, Error::BadBackup { .. }), "{table}, {place}: {error}");
                // Another length makes the count wrong; another place may be one of the file.
                let is_clear = place % 16 == 0 || is_contradiction(&error);
                assert!(is_clear, "{table}, {place}, {old}, {new}: {error}");
                assert!(!at("new").exists());
            }
        }
    }
}

/// A file with a hole may be very long. What it says of its runs takes no memory.
#[test]
fn a_hole_for_runs_takes_no_memory() {
    let (folder, base, store) = with_one_increment();
    drop(store);
    let at = |name: &str| folder.path().join(name);
    let good = Parts::of(&at("one"));
    // The runs would need 4 GiB.
    let many = 1 << 28;
    for agreeing in [&[RUNS][..], &[FRAMES, RUNS], &[FILE_FRAMES, FRAMES, RUNS, USED]] {
        let mut bad = good.clone();
        agreeing.iter().for_each(|place| bad.set(*place, many));
        bad.write(&at("bad"));
        let error = restore(&at("new"), &base, &[at("bad")]).unwrap_err();
        assert!(is_contradiction(&error), "{agreeing:?}: {error}");
        assert!(!at("new").exists());
    }
    // In KiB.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let most: u64 = most.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(most < 3 << 20, "the process had {most} KiB");
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
