//! Stores with a log in a folder: where it is, when it goes, and what the next opening does.
#![allow(clippy::unwrap_used)]

use std::env;
use std::fs::{self, DirEntry};
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::{TempDir, tempdir};
use vellum::{BackupOptions, Durability, Error, MemoryDevice, Options, Store, TransactionOptions};
use vellum_testing::small_disk::SmallDisk;

fn plain() -> Options {
    Options::new().pool_bytes(4 << 20)
}

fn logged() -> Options {
    plain().log(true).log_bytes(1 << 20)
}

/// A log so long that no checkpoint is due while the files of an open store are copied.
fn long() -> Options {
    logged().log_bytes(64 << 20)
}

fn key(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

fn put(store: &Store, numbers: std::ops::Range<u32>) {
    let tree = store.tree_or_create("tree").unwrap();
    for number in numbers {
        let len = if number % 50 == 7 { 9000 } else { 60 };
        tree.upsert(&key(number), &vec![number as u8; len]).unwrap();
    }
}

/// Asserts that the store is sound and has the entries that [`put`] made, and no others.
fn expect(store: &Store, count: u32) {
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    assert_eq!(report.lost_pages, 0);
    let tree = store.tree("tree").unwrap();
    assert_eq!(tree.stat().unwrap().entries, u64::from(count));
    for number in 0..count {
        let value = tree.get(&key(number)).unwrap().unwrap();
        assert!(value.iter().all(|byte| *byte == number as u8));
    }
}

/// A folder with a store that was not closed: copies of the files of one that is open and synced.
fn crashed(count: u32) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("open");
    let store = Store::create(&path, &long()).unwrap();
    put(&store, 0..count);
    store.sync().unwrap();
    let copy = folder.path().join("crashed");
    copy_open(&path, &copy);
    store.close().unwrap();
    fs::remove_file(&path).unwrap();
    (folder, copy)
}

/// Copies the files of an open store, as a loss of power would leave them.
fn copy_open(path: &Path, copy: &Path) {
    fs::copy(path, copy).unwrap();
    copy_folder(&beside(path), &beside(copy));
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        // The log may be making a file.
        if entry.path().extension().is_some_and(|extension| extension == "tmp") {
            continue;
        }
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// The folder of the log.
fn beside(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(".log");
    name.into()
}

fn bytes_in(folder: &Path) -> u64 {
    let length = |entry: DirEntry| match entry.metadata() {
        // The log has just given it its name.
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        data => data.unwrap().len(),
    };
    fs::read_dir(folder).unwrap().map(|entry| length(entry.unwrap())).sum()
}

#[test]
fn a_closed_store_is_one_file_and_an_open_one_has_a_log_beside_it() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    for round in 0..3 {
        let store = Store::open_or_create(&path, &logged()).unwrap();
        assert!(store.recovery().is_none());
        assert!(bytes_in(&beside(&path)) > 0);
        put(&store, 0..2000 * (round + 1));
        assert!(bytes_in(&beside(&path)) <= 1 << 20, "the log is bounded");
        store.sync().unwrap();
        assert!(!store.stat().unwrap().clean);
        let tree = store.tree("tree").unwrap();
        store.close().unwrap();
        // Whatever handles live.
        let names: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        let plain = Store::open(&path, &plain().read_only(true)).unwrap();
        expect(&plain, 2000 * (round + 1));
        drop(tree);
    }
}

/// The versions of the two headers.
fn versions(path: &Path) -> [u32; 2] {
    let bytes = fs::read(path).unwrap();
    [48, 4096 + 48].map(|at| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap()))
}

/// A build that does not know the version of a file in use opens it after a close.
#[test]
fn no_header_of_a_closed_store_has_the_version_of_one_in_use() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &logged()).unwrap();
    put(&store, 0..100);
    assert!(versions(&path).contains(&8));
    store.close().unwrap();
    assert!(versions(&path).iter().all(|version| *version <= 5), "{:?}", versions(&path));
    // A backup, after which the free map says what has changed since, and a change or none.
    for changes in [100..100, 100..200] {
        let store = Store::open(&path, &logged()).unwrap();
        put(&store, 0..100);
        let backup = folder.path().join(format!("backup-{}", changes.end));
        store.backup(&backup, &BackupOptions::new(), &mut |_| ControlFlow::Continue(())).unwrap();
        put(&store, changes);
        assert!(versions(&path).contains(&8));
        store.close().unwrap();
        let versions = versions(&path);
        assert!(versions.contains(&7), "{versions:?}");
        assert!(versions.iter().all(|version| *version <= 7), "{versions:?}");
    }
    // The recovery of a store, and no change.
    let (_folder, path) = crashed(100);
    let store = Store::open(&path, &plain().log(false)).unwrap();
    assert!(versions(&path).contains(&8));
    drop(store);
    assert!(versions(&path).iter().all(|version| *version <= 5), "{:?}", versions(&path));
    expect(&Store::open(&path, &plain().log(false).read_only(true)).unwrap(), 100);
}

#[test]
fn a_store_recovers_whatever_the_options_are() {
    for options in [plain(), logged(), plain().page_frames(1)] {
        let (_folder, path) = crashed(3000);
        let told = Arc::new(AtomicU64::new(0));
        let progress = told.clone();
        let options = options.on_recovery(move |progress_now| {
            assert!(progress_now.bytes_done <= progress_now.bytes_total);
            progress.store(progress_now.bytes_done, Ordering::SeqCst);
        });
        let store = Store::open(&path, &options).unwrap();
        let report = store.recovery().unwrap();
        assert!(report.records > 0 && report.pages > 0, "{report:?}");
        assert_eq!(told.load(Ordering::SeqCst), report.log_bytes);
        expect(&store, 3000);
        put(&store, 3000..4000);
        store.close().unwrap();
        assert!(!beside(&path).exists());
        let store = Store::open(&path, &plain()).unwrap();
        assert!(store.recovery().is_none());
        expect(&store, 4000);
    }
}

#[test]
fn a_log_is_read_again_for_pages_that_do_not_fit_in_memory_unless_it_goes_on() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("open");
    let store = Store::create(&path, &long()).unwrap();
    let tree = store.create_tree("tree").unwrap();
    for round in 0..2_u32 {
        for number in 0..60_000_u32 {
            let place = number.wrapping_mul(40_507) % 60_000;
            tree.upsert(&key(place), &[(place + round) as u8; 100]).unwrap();
        }
    }
    store.sync().unwrap();
    for goes_on in [true, false] {
        let copy = folder.path().join(format!("crashed-{goes_on}"));
        copy_open(&path, &copy);
        let told = Arc::new(AtomicU64::new(0));
        let progress = told.clone();
        let options = long().log(goes_on).on_recovery(move |now| {
            progress.store(now.bytes_done, Ordering::SeqCst);
        });
        let store = Store::open(&copy, &options).unwrap();
        let report = store.recovery().unwrap();
        // The pool has 4 MiB.
        assert!(report.pages > 1500, "{report:?}");
        let times = told.load(Ordering::SeqCst) / report.log_bytes;
        let expected = if goes_on { 1..=1 } else { 3..=8 };
        assert!(expected.contains(&times), "{times}");
        assert!(store.check(&mut |_| ()).unwrap().is_sound());
        let tree = store.tree("tree").unwrap();
        for number in 0..60_000_u32 {
            assert_eq!(*tree.get(&key(number)).unwrap().unwrap(), [(number + 1) as u8; 100]);
        }
        store.close().unwrap();
        assert!(Store::open(&copy, &long()).unwrap().recovery().is_none());
    }
}

/// After a checkpoint the log needs the image of each leaf, and all of them are longer than the
/// longest record.
#[test]
fn a_commit_of_very_many_leaves_is_logged_and_recovered() {
    let folder = tempdir().unwrap();
    let (path, copy) = (folder.path().join("open"), folder.path().join("crashed"));
    let options = long().pool_bytes(64 << 20);
    let store = Store::create(&path, &options).unwrap();
    let tree = store.create_tree("tree").unwrap();
    tree.extend((0..60_000_u32).map(|number| (key(number), [1; 100]))).unwrap();
    store.close().unwrap();
    let store = Store::open(&path, &options).unwrap();
    let tree = store.tree("tree").unwrap();
    store
        .transact(|transaction| {
            (0..60_000)
                .step_by(40)
                .try_for_each(|number| transaction.put(&tree, &key(number), &[2; 100]))
        })
        .unwrap();
    copy_open(&path, &copy);
    let store = Store::open(&copy, &options).unwrap();
    assert!(store.recovery().unwrap().log_bytes > 4 << 20);
    assert!(store.check(&mut |_| ()).unwrap().is_sound());
    let tree = store.tree("tree").unwrap();
    for number in 0..60_000_u32 {
        let expected = if number % 40 == 0 { 2 } else { 1 };
        assert_eq!(*tree.get(&key(number)).unwrap().unwrap(), [expected; 100]);
    }
}

#[test]
fn a_store_that_was_dropped_open_is_recovered_again_and_again() {
    let (folder, path) = crashed(500);
    for round in 1..4 {
        let store = Store::open(&path, &long()).unwrap();
        assert!(store.recovery().is_some());
        expect(&store, 500 * round);
        put(&store, 500 * round..500 * (round + 1));
        store.sync().unwrap();
        let copy = folder.path().join("next");
        copy_open(&path, &copy);
        store.close().unwrap();
        fs::rename(&copy, &path).unwrap();
        fs::rename(beside(&copy), beside(&path)).unwrap();
    }
}

#[test]
fn a_log_that_is_not_there_is_named_and_nothing_is_changed() {
    let (folder, path) = crashed(500);
    let moved = folder.path().join("moved");
    fs::rename(beside(&path), &moved).unwrap();
    let before = fs::read(&path).unwrap();
    for options in [plain(), logged()] {
        let error = Store::open(&path, &options).unwrap_err();
        assert!(matches!(error, Error::NoLog { .. }), "{error}");
        assert!(error.to_string().contains("crashed.log"), "{error}");
        assert!(!beside(&path).exists());
    }
    fs::create_dir(beside(&path)).unwrap();
    assert!(matches!(Store::open(&path, &plain()), Err(Error::NoLog { .. })));
    let other = folder.path().join("other");
    let (_other_folder, other_path) = crashed(5);
    fs::rename(beside(&other_path), &other).unwrap();
    let error = Store::open(&path, &plain().log_folder(&other)).unwrap_err();
    assert!(matches!(error, Error::OtherLog { .. }), "{error}");
    assert!(error.to_string().contains("other"), "{error}");
    assert!(fs::read(&path).unwrap() == before);

    // Without a log, the entries can be read as they are.
    drop(Store::open(&path, &plain().salvage(true)).unwrap());
    let store = Store::open(&path, &plain().log_folder(&moved)).unwrap();
    expect(&store, 500);
    store.close().unwrap();
    // A folder that the caller has named stays.
    assert_eq!(fs::read_dir(&moved).unwrap().count(), 0);
}

#[test]
fn a_store_that_needs_to_recover_is_not_read_before() {
    let (_folder, path) = crashed(500);
    let error = Store::open(&path, &plain().read_only(true)).unwrap_err();
    assert!(matches!(error, Error::NeedsRecovery), "{error}");
    Store::open(&path, &plain()).unwrap().close().unwrap();
    expect(&Store::open(&path, &plain().read_only(true)).unwrap(), 500);
}

#[test]
fn the_log_of_a_store_is_not_overwritten_by_that_of_another() {
    let (folder, path) = crashed(500);
    let moved = folder.path().join("moved");
    fs::rename(&path, &moved).unwrap();
    let error = Store::create(&path, &logged()).unwrap_err();
    assert!(error.to_string().contains("another store"), "{error}");
    assert!(!path.exists(), "after an error there is no new file");
    let named = plain().log_folder(beside(&path));
    assert!(Store::create(&path, &named).is_err() && !path.exists());
    let store = Store::open(&moved, &named).unwrap();
    expect(&store, 500);
    drop(store);
    Store::create(&path, &logged()).unwrap().close().unwrap();
}

#[test]
fn one_handle_has_a_store_and_its_log() {
    let (folder, path) = crashed(5);
    let store = Store::open(&path, &logged()).unwrap();
    assert!(matches!(Store::open(&path, &plain()), Err(Error::InUse(_))));
    let beside = plain().log_folder(beside(&path));
    let other = Store::create(folder.path().join("other"), &beside).unwrap_err();
    assert_eq!(other.errno(), libc::EBUSY, "{other}");
    drop(store);
    Store::create(folder.path().join("other"), &beside).unwrap().close().unwrap();
}

/// A thread writes checkpoints. A change waits for it only if the log is full, and finds room then.
#[test]
fn threads_go_on_while_checkpoints_are_written() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &logged()).unwrap();
    let tree = store.create_tree("tree").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (tree, store) = (&tree, &store);
            scope.spawn(move || {
                for number in 0..600 {
                    let number = 8 * number + thread;
                    tree.upsert(&key(number), &[number as u8; 400]).unwrap();
                    if number % 100 == 0 {
                        store.sync().unwrap();
                    }
                    // Has the store for itself, while others wait with room kept for them.
                    if number % 50 == thread {
                        let name = number.to_string();
                        let other = store.create_tree(&name).unwrap();
                        other.insert(b"key", &[7; 900]).unwrap();
                        other.clear().unwrap();
                        store.drop_tree(&name).unwrap();
                    }
                }
            });
        }
    });
    assert!(bytes_in(&beside(&path)) <= 1 << 20, "the log is bounded");
    expect(&store, 4800);
    store.close().unwrap();
    assert!(!beside(&path).exists());
    expect(&Store::open(&path, &plain()).unwrap(), 4800);
}

/// The disk of the log has less room than the log may take: checkpoints give room back there, too.
#[test]
fn a_log_longer_than_its_disk_goes_on() {
    let folder = tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path().join("disk"), 20 << 10) else { return };
    let path = folder.path().join("store");
    let store = Store::create(&path, &plain().log_folder(disk.path())).unwrap();
    let tree = store.create_tree("values").unwrap();
    for number in 0..25_000 {
        tree.upsert(&key(number % 5000), &[number as u8; 1800]).unwrap();
        if number % 1000 == 0 {
            store.sync().unwrap();
        }
    }
    store.close().unwrap();
    assert!(disk.is_empty(), "closing removes the log");
    let store = Store::open(&path, &plain()).unwrap();
    assert!(store.check(&mut |_| ()).unwrap().is_sound());
    assert_eq!(store.tree("values").unwrap().stat().unwrap().entries, 5000);
}

/// No checkpoint gives room back while a tree is dropped or cleared.
#[test]
fn a_tree_far_longer_than_the_log_is_dropped_and_cleared() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &logged()).unwrap();
    let names = ["dropped", "cleared"];
    let trees = names.map(|name| store.create_tree(name).unwrap());
    // Both in turns, and in no order: the pages of a tree lie apart from each other.
    for number in 0..15_000_u32 {
        let key = number.wrapping_mul(2_654_435_761).to_be_bytes();
        let len = if number % 10 == 7 { 5000 } else { 1500 };
        for tree in &trees {
            tree.upsert(&key, &vec![7; len]).unwrap();
        }
    }
    assert!(store.stat().unwrap().used_pages > 10_000);
    store.drop_tree(names[0]).unwrap();
    trees[1].clear().unwrap();
    store.sync().unwrap();
    let copy = folder.path().join("crashed");
    copy_open(&path, &copy);
    for store in [store, Store::open(&copy, &logged()).unwrap()] {
        let report = store.check(&mut |_| ()).unwrap();
        assert!(report.is_sound(), "{:?}", report.damage);
        assert_eq!(report.lost_pages, 0);
        store.close().unwrap();
    }
}

/// Transactions with long records, in a log that has room for few of them, while others change the
/// store: each finds room, or waits for a checkpoint.
#[test]
fn long_transactions_find_room_in_a_small_log() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &logged()).unwrap();
    let trees = ["one", "two"].map(|name| store.create_tree(name).unwrap());
    let options = TransactionOptions::new().durability(Durability::Buffered);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (trees, store) = (&trees, &store);
            scope.spawn(move || {
                for round in 0..20 {
                    let value = [round as u8; 300];
                    store
                        .transact_with(options, |one| {
                            (0..250).try_for_each(|number| {
                                let tree = &trees[number as usize % 2];
                                one.put(tree, &key(thread * 1000 + number * 3), &value)
                            })
                        })
                        .unwrap();
                    trees[0].upsert(&key(10_000 + thread), &value).unwrap();
                }
            });
        }
    });
    // One that the log can never take.
    let mut large = store.begin().unwrap();
    (0..3000).for_each(|number| large.put(&trees[0], &key(number), &[9; 300]).unwrap());
    let refused = large.commit().unwrap_err();
    assert!(matches!(refused, Error::TransactionTooLarge(_) | Error::Log(_)), "{refused}");
    store.sync().unwrap();
    let whole = |store: &Store| {
        let report = store.check(&mut |_| ()).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
        let entries = ["one", "two"].map(|name| store.tree(name).unwrap().entries().count());
        assert_eq!(entries, [3 * 125 + 3, 3 * 125]);
        for entry in store.tree("two").unwrap().entries() {
            assert_eq!(*entry.unwrap().1, [19; 300]);
        }
    };
    whole(&store);
    store.close().unwrap();
    whole(&Store::open(&path, &plain()).unwrap());
}

/// A process that is killed when the store is closed and its log is not removed yet.
#[test]
fn what_is_left_of_a_log_that_no_store_needs_goes() {
    for options in [logged(), plain()] {
        let folder = tempdir().unwrap();
        let path = folder.path().join("store");
        let left = folder.path().join("left");
        let store = Store::create(&path, &long()).unwrap();
        put(&store, 0..500);
        copy_folder(&beside(&path), &left);
        store.close().unwrap();
        fs::rename(&left, beside(&path)).unwrap();
        drop(Store::open(&path, &plain().read_only(true)).unwrap());
        assert!(beside(&path).exists());
        let store = Store::open(&path, &options).unwrap();
        assert!(store.recovery().is_none());
        expect(&store, 500);
        store.close().unwrap();
        assert!(!beside(&path).exists());
    }
}

#[test]
fn a_log_that_has_no_place_is_refused_with_what_to_do() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    drop(Store::create(&path, &plain().log(false)).unwrap());
    fs::write(beside(&path), "a file").unwrap();
    let error = Store::open(&path, &plain()).unwrap_err();
    assert!(matches!(error, Error::NoPlaceForLog(_)), "{error}");
    assert_eq!(error.errno(), rustix::io::Errno::NOTDIR.raw_os_error());
    for word in ["store.log", "Not a directory", "--log-folder", "--no-log"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    drop(Store::open(&path, &plain().log(false)).unwrap());
    assert_eq!(fs::read(beside(&path)).unwrap(), b"a file");

    let Some(disk) = SmallDisk::mount(folder.path().join("disk"), 2 << 10) else { return };
    let full = plain().log_bytes(64 << 20).log_folder(disk.path().join("log"));
    let error = Store::open(&path, &full).unwrap_err();
    assert!(matches!(error, Error::NoPlaceForLog(_)), "{error}");
    assert_eq!(error.errno(), rustix::io::Errno::NOSPC.raw_os_error());
}

/// A store and its copies have one id: the log beside a file may be that of another copy.
#[test]
fn the_log_of_a_crashed_store_survives_its_copies() {
    let refused = |path: &Path, options: &Options| {
        let error = Store::open(path, options).unwrap_err();
        assert!(matches!(error, Error::Log(_)), "{error}");
        assert!(error.to_string().contains("another copy of this store"), "{error}");
    };
    let take = |name: &Path, from: &Path| {
        fs::copy(from, name).unwrap();
        let before = bytes_in(&beside(name));
        refused(name, &logged());
        // A handle without a log leaves it alone.
        let store = Store::open(name, &plain().log(false)).unwrap();
        put(&store, 0..1);
        store.close().unwrap();
        refused(name, &logged());
        assert_eq!(bytes_in(&beside(name)), before);
    };
    let goes_on = |_| ControlFlow::Continue(());
    let folder = tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (path, moved) = (at("store"), at("moved"));
    let store = Store::create(&path, &long()).unwrap();
    put(&store, 0..100);
    store.close().unwrap();
    // The log that ended with the first copy's header is another one.
    fs::copy(&path, at("first")).unwrap();
    let store = Store::open(&path, &long()).unwrap();
    put(&store, 100..200);
    store.backup(at("backup"), &BackupOptions::new(), &mut { goes_on }).unwrap();
    store.sync().unwrap();
    copy_open(&path, &at("second-open"));
    put(&store, 200..300);
    store.sync().unwrap();
    copy_open(&path, &at("crashed"));
    store.close().unwrap();
    // The log that ended with the second copy's header has the name of the crashed one's, and fewer
    // records.
    let store = Store::open(at("second-open"), &plain().log(false)).unwrap();
    expect(&store, 200);
    store.close().unwrap();

    let (crashed, log) = (at("crashed"), beside(&at("crashed")));
    for other in ["first", "backup", "second-open"] {
        fs::rename(&crashed, &moved).unwrap();
        take(&crashed, &at(other));
        fs::rename(&moved, &crashed).unwrap();
    }
    assert!(bytes_in(&log) > 0);
    let store = Store::open(&crashed, &logged()).unwrap();
    expect(&store, 300);
    store.close().unwrap();
    assert!(!log.exists());
}

/// A process that is killed when the log is marked and no header names it yet.
#[test]
fn a_log_without_records_that_no_header_names_goes() {
    for options in [logged(), plain().log(false)] {
        let folder = tempdir().unwrap();
        let (path, left) = (folder.path().join("store"), folder.path().join("left"));
        drop(Store::create(&path, &plain().log(false)).unwrap().close());
        let clean = fs::read(&path).unwrap();
        let store = Store::open(&path, &long()).unwrap();
        copy_folder(&beside(&path), &left);
        store.close().unwrap();
        fs::rename(&left, beside(&path)).unwrap();
        fs::write(&path, clean).unwrap();
        let store = Store::open(&path, &options).unwrap();
        put(&store, 0..100);
        store.close().unwrap();
        assert!(!beside(&path).exists());
    }
}

#[test]
fn options_that_make_no_log_are_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let short = plain().log(true).log_bytes(1000);
    assert!(matches!(Store::create(&path, &short), Err(Error::BadOption(_))));
    assert!(!path.exists() && !beside(&path).exists());
    let device = Arc::new(MemoryDevice::new());
    assert!(matches!(Store::create_on(device.clone(), &logged()), Err(Error::BadOption(_))));
    let named = plain().log_folder(folder.path().join("log"));
    let store = Store::create_on(device.clone(), &named).unwrap();
    put(&store, 0..50);
    store.close().unwrap();
    expect(&Store::open_on(device, &plain()).unwrap(), 50);
    let no_folder = plain().log_folder(folder.path().join("no/log"));
    assert!(Store::create(&path, &no_folder).is_err() && !path.exists());
}

/// Where the child of the next test has its store.
const PLACE: &str = "VELLUM_TEST_PLACE";

#[test]
#[ignore = "the next test runs it in a process of its own"]
fn child() {
    let Some(place) = env::var_os(PLACE) else { return };
    let gone = Path::new(&place).join("gone");
    fs::create_dir(&gone).unwrap();
    env::set_current_dir(&gone).unwrap();
    fs::remove_dir(&gone).unwrap();
    let store = Store::create("../store", &plain()).unwrap();
    assert!(Path::new("../store.log").is_dir());
    store.close().unwrap();
    assert!(!Path::new("../store.log").exists());
}

/// The process cannot learn where it is, and so not the whole path of the store.
#[test]
fn a_store_has_a_log_though_its_path_is_not_known() {
    let place = tempdir().unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", "child", "--ignored"]).env(PLACE, place.path()).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(place.path().join("store").exists());
}
