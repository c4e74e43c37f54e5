//! Compactions: how short the file gets, and that nothing else changes, whatever happens meanwhile.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use common::{Random, assert_same, assert_sound, bytes, memory_store, options, read, rounds};
use rustix::io::Errno;
use tempfile::tempdir;
use vellum::{BackupOptions, CompactReport, Durability, Error, Options, Store, Tree};
use vellum::{FileDevice, FileOptions, Isolation, MemoryDevice, TransactionOptions};
use vellum_pool::device::{Device, Fault, FaultyDevice, Operation};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn on(_: vellum::CompactProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn compact(store: &Store) -> CompactReport {
    let report = store.compact(&mut on).unwrap();
    assert!(report.is_complete);
    assert_eq!(report.bytes_after, store.stat().unwrap().file_pages * 4096);
    report
}

/// Asserts that the file is at most so many percent longer than what the store uses.
#[track_caller]
fn assert_short(store: &Store, percent: u64) {
    let stat = store.stat().unwrap();
    let (file, used) = (stat.file_pages, stat.used_pages);
    // A few pages more are no reason to move others.
    let few = if percent > 1 { 64 } else { 0 };
    assert!(file <= used + used * percent / 100 + few, "{file} pages for {used}");
}

/// Puts entries with values of lengths up to `most`, in random order.
fn fill(tree: &Tree, count: u64, most: u64, random: &mut Random) -> Model {
    let mut model = Model::new();
    for number in 0..count {
        let key = random.below(1 << 40).to_be_bytes().to_vec();
        let value = bytes(random.below(most) as usize, number);
        tree.upsert(&key, &value).unwrap();
        model.insert(key, value);
    }
    model
}

/// Removes all but `left` percent of the entries, in random order.
fn thin_out(tree: &Tree, model: &mut Model, left: u64, random: &mut Random) {
    let mut keys: Vec<_> = model.keys().cloned().collect();
    for at in (1..keys.len()).rev() {
        keys.swap(at, random.index(at + 1));
    }
    keys.truncate((keys.len() as u64 * (100 - left) / 100) as usize);
    for key in keys {
        assert!(tree.remove(&key).unwrap());
        model.remove(&key);
    }
}

#[test]
fn the_file_of_a_store_that_became_small_becomes_short() {
    for page_frames in [1, 4] {
        let (device, store) = memory_store(600, page_frames);
        let tree = store.create_tree("t").unwrap();
        let mut random = Random(7);
        let mut model = fill(&tree, 20_000 * u64::from(page_frames), 400, &mut random);
        thin_out(&tree, &mut model, 30, &mut random);
        let report = compact(&store);
        assert!(report.bytes_after < report.bytes_before / 2, "{report:?}");
        assert!(report.pages_moved > 0 && report.pages_left == 0, "{report:?}");
        assert_short(&store, 1);
        assert_same(&tree, &model);
        assert_sound(&store);
        // Nothing is left to do.
        let again = compact(&store);
        assert_eq!((again.pages_moved, again.bytes_before), (0, again.bytes_after), "{again:?}");
        assert_eq!(again.bytes_after, device.pages().unwrap() * 4096);
        store.close().unwrap();
        let store = Store::open_on(device, &options(600, page_frames)).unwrap();
        assert_same(&store.tree("t").unwrap(), &model);
        assert_sound(&store);
    }
}

#[test]
fn the_root_of_a_tree_that_came_last_moves() {
    let (_, store) = memory_store(600, 1);
    let large = store.create_tree("large").unwrap();
    let mut random = Random(8);
    fill(&large, 30_000, 300, &mut random);
    let (small, empty) = (store.create_tree("small").unwrap(), store.create_tree("empty").unwrap());
    let model = fill(&small, 500, 300, &mut random);
    let (snapshot, reader) = (store.snapshot().unwrap(), store.tree("small").unwrap());
    let mut cursor = reader.cursor();
    cursor.first().unwrap();
    store.drop_tree("large").unwrap();
    // The snapshot still sees the tree.
    let report = compact(&store);
    assert!(report.bytes_after > report.bytes_before / 2, "{report:?}");
    drop(snapshot);
    let report = compact(&store);
    assert!(report.bytes_after < report.bytes_before / 10, "{report:?}");
    assert_eq!(report.pages_left, 0);
    assert_short(&store, 0);
    for tree in [&small, &reader, &store.tree("small").unwrap()] {
        assert_same(tree, &model);
    }
    let mut entries = 1;
    while cursor.forward().unwrap() {
        entries += 1;
    }
    assert_eq!(entries, model.len());
    assert_eq!(empty.stat().unwrap().entries, 0);
    empty.bulk_load(model.iter()).unwrap();
    assert_same(&empty, &model);
    store.rename_tree("small", "renamed").unwrap();
    small.clear().unwrap();
    assert_eq!(store.tree("renamed").unwrap().stat().unwrap().entries, 0);
    store.drop_tree("renamed").unwrap();
    assert_sound(&store);
}

#[test]
fn long_values_move() {
    for (seed, most) in [(1, 20_000), (2, 60_000), (3, 9_000)] {
        let (_, store) = memory_store(1200, 1);
        let tree = store.create_tree("t").unwrap();
        let mut random = Random(seed);
        let mut model = fill(&tree, 1500, most, &mut random);
        thin_out(&tree, &mut model, 30, &mut random);
        let report = compact(&store);
        assert!(report.bytes_after < report.bytes_before / 2, "{report:?}");
        assert_short(&store, 3);
        assert_same(&tree, &model);
        assert_sound(&store);
        assert_eq!(compact(&store).pages_moved, 0);
    }
}

/// Small entries between which no place is long enough for the value at the end of the file.
#[test]
fn one_long_value_does_not_keep_the_file_long() {
    let (_, store) = memory_store(1200, 1);
    let tree = store.create_tree("t").unwrap();
    let mut random = Random(9);
    let mut model = fill(&tree, 40_000, 300, &mut random);
    tree.upsert(b"long", &[3; 700_000]).unwrap();
    model.insert(b"long".to_vec(), vec![3; 700_000]);
    let long = model.remove(&b"long"[..]).unwrap();
    thin_out(&tree, &mut model, 40, &mut random);
    model.insert(b"long".to_vec(), long);
    let report = compact(&store);
    assert!(report.bytes_after < report.bytes_before * 2 / 3, "{report:?}");
    assert_short(&store, 3);
    assert_same(&tree, &model);
    assert_sound(&store);
}

fn stream(tree: &Tree, key: &[u8], value: &[u8]) {
    let mut writer = tree.writer(key).unwrap();
    writer.write_all(value).unwrap();
    writer.finish().unwrap();
}

#[test]
fn values_in_pieces_move_unless_they_are_read() {
    let (_, store) = memory_store(2000, 1);
    let tree = store.create_tree("t").unwrap();
    let mut model = Model::new();
    for number in 0..12_u8 {
        let value = bytes(4_000_000 + usize::from(number) * 300_000, number.into());
        stream(&tree, &[number], &value);
        if number % 3 == 2 {
            model.insert(vec![number], value);
        }
    }
    (0..12).filter(|number| number % 3 != 2).for_each(|number| {
        tree.remove(&[number]).unwrap();
    });
    let mut reader = tree.reader(&[11]).unwrap().unwrap();
    let mut first = vec![0; 100_000];
    reader.read_exact(&mut first).unwrap();
    let snapshot = store.snapshot().unwrap();
    let report = compact(&store);
    assert!(report.pages_left > 1000, "a reader keeps a value: {report:?}");
    let mut rest = Vec::new();
    reader.read_to_end(&mut rest).unwrap();
    assert!([first, rest].concat() == model[&vec![11]]);
    drop(reader);
    let report = compact(&store);
    assert!(report.bytes_after < report.bytes_before, "{report:?}");
    assert_short(&store, 2);
    for (key, value) in &model {
        assert!(read(&tree, key) == *value);
    }
    assert!(matches!(snapshot.get(&tree, &[2]), Err(Error::NeedsReader { .. })));
    drop(snapshot);
    assert_sound(&store);
    // The moved values are freed as others are.
    store.drop_tree("t").unwrap();
    compact(&store);
    assert!(store.stat().unwrap().file_pages < 12);
    assert_sound(&store);
}

#[test]
fn moves_are_no_changes_to_snapshots_and_transactions() {
    let (_, store) = memory_store(1200, 1);
    let [first, other] = ["first", "other"].map(|name| store.create_tree(name).unwrap());
    let tree = store.create_tree("t").unwrap();
    let mut random = Random(11);
    fill(&first, 2000, 9_000, &mut random);
    fill(&other, 100, 9_000, &mut random);
    let model = fill(&tree, 2000, 9_000, &mut random);
    first.clear().unwrap();
    let snapshot = store.snapshot().unwrap();
    let serializable = TransactionOptions::new().isolation(Isolation::Serializable);
    let mut transaction = store.begin_with(serializable).unwrap();
    let keys: Vec<_> = model.keys().cloned().collect();
    for key in &keys[..500] {
        assert!(*transaction.get(&tree, key).unwrap().unwrap() == model[key][..]);
    }
    let before = store.stat().unwrap().version_bytes;
    other.clear().unwrap();
    let kept = store.stat().unwrap().version_bytes;
    assert!(kept > before);
    let report = compact(&store);
    assert!(report.pages_moved > 1000, "{report:?}");
    assert_eq!(store.stat().unwrap().version_bytes, kept, "moves keep no versions");
    for key in &keys[500..] {
        assert!(*transaction.get(&tree, key).unwrap().unwrap() == model[key][..]);
    }
    transaction.put(&tree, &keys[3], b"changed").unwrap();
    transaction.commit().unwrap();
    for (key, value) in &model {
        assert!(*snapshot.get(&tree, key).unwrap().unwrap() == value[..]);
    }
    assert_eq!(snapshot.entries(&other).unwrap().count(), 100);
    drop(snapshot);
    assert!(*tree.get(&keys[3]).unwrap().unwrap() == b"changed"[..]);
    assert_sound(&store);
}

#[test]
fn who_may_not_compact_is_told_why() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &options(256, 1)).unwrap();
    store.create_tree("t").unwrap().upsert(b"a", &[1; 9000]).unwrap();
    let (other, mut refused) = (store.clone(), None);
    let tree = store.create_tree("u").unwrap();
    fill(&tree, 3000, 300, &mut Random(1));
    store.drop_tree("t").unwrap();
    tree.remove_range([0]..[200]).unwrap();
    store
        .compact(&mut |_| {
            refused = Some(other.compact(&mut on));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(matches!(refused, Some(Err(Error::InUse(_)))), "{refused:?}");
    store.close().unwrap();
    assert!(matches!(other.compact(&mut on), Err(Error::Closed)));
    for options in [options(256, 1).read_only(true), options(256, 1).salvage(true)] {
        let store = Store::open(&path, &options).unwrap();
        let refused = store.compact(&mut on);
        assert!(matches!(refused, Err(Error::ReadOnly)), "{refused:?}");
    }
}

#[test]
fn the_callers_function_is_told_how_far_it_is_and_ends_it() {
    let (_, store) = memory_store(600, 1);
    let tree = store.create_tree("t").unwrap();
    let mut random = Random(12);
    let mut model = fill(&tree, 20_000, 400, &mut random);
    thin_out(&tree, &mut model, 30, &mut random);
    let (mut last, mut calls) = (None, 0);
    let report = store
        .compact(&mut |progress| {
            calls += 1;
            assert!(progress.pages_seen <= progress.pages_total);
            // The function may use the store.
            tree.upsert(b"calls", &u32::to_be_bytes(calls)).unwrap();
            last = Some(progress);
            if calls == 300 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
    assert_eq!(calls, 300);
    assert!(!report.is_complete && report.pages_left > 0, "{report:?}");
    model.insert(b"calls".to_vec(), u32::to_be_bytes(calls).to_vec());
    assert_same(&tree, &model);
    let before = last.unwrap();
    let mut seen = 0;
    let report = store
        .compact(&mut |progress| {
            assert!(progress.pass > 1 || progress.pages_seen >= seen);
            seen = progress.pages_seen;
            ControlFlow::Continue(())
        })
        .unwrap();
    assert!(report.is_complete && seen > before.pages_total / 2, "{report:?}");
    assert_short(&store, 2);
    assert_same(&tree, &model);
    assert_sound(&store);
}

/// The changes of one thread. The store grows and shrinks.
fn change(store: &Store, tree: &Tree, thread: u8) -> Model {
    let (random, mut model) = (&mut Random(100 + u64::from(thread)), Model::new());
    for step in 0..6_000_u64 {
        let most = if step / 1000 % 2 == 0 { 900 } else { 60 };
        let key = [thread, 0, random.below(9) as u8, random.below(100) as u8];
        let len = random.pick(&[5, 60, 700, 5_000, 40_000]);
        match random.below(1000) {
            step if step < most / 2 => {
                let value = bytes(random.below(len) as usize, step);
                tree.upsert(&key, &value).unwrap();
                model.insert(key.to_vec(), value);
            }
            990..995 => {
                let value = bytes(90_000, step);
                stream(tree, &key, &value);
                model.insert(key.to_vec(), value);
            }
            995.. => drop(store.snapshot().unwrap().get(tree, &key).unwrap()),
            _ => assert_eq!(tree.remove(&key).unwrap(), model.remove(&key[..]).is_some()),
        }
        if random.once_in(20) {
            let mut found = Vec::new();
            let is_there = tree.get_into(&key, &mut found).unwrap();
            assert_eq!(is_there.then_some(&found), model.get(&key[..]));
        }
    }
    model
}

/// Scans a tree, and looks at it through a snapshot twice. Makes a transaction that reads and
/// changes what no other thread does: it must not conflict.
fn look(store: &Store, tree: &Tree, thread: u8) {
    let snapshot = store.snapshot().unwrap();
    let entries = || {
        let entries = snapshot.range(tree, [thread]..[thread + 1]).unwrap();
        entries.map(|entry| entry.map(|(key, value)| (key, value.to_vec())).unwrap())
    };
    let one: Vec<_> = entries().collect();
    let mut last = None;
    for entry in tree.entries() {
        let (key, _) = entry.unwrap();
        assert!(last.is_none_or(|last| last < key), "a scan is in order");
        last = Some(key);
    }
    assert!(one == entries().collect::<Vec<_>>(), "a snapshot does not change");
    let key = [200 + thread];
    let options = TransactionOptions::new().durability(Durability::None);
    let mut transaction = store.begin_with(options).unwrap();
    let old = transaction.get(tree, &key).unwrap().map_or(0, |value| value.len());
    transaction.put(tree, &key, &vec![7; (old + 700) % 30_000]).unwrap();
    transaction.commit().unwrap();
}

/// Threads change, read and scan while the store is compacted again and again.
fn work_while_compacting(store: &Store, path: Option<&Path>) {
    let is_done = AtomicBool::new(false);
    let done = || is_done.load(Ordering::SeqCst);
    let trees = ["a", "b"].map(|name| store.create_tree(name).unwrap());
    let tree_of = |thread: u8| &trees[usize::from(thread % 2)];
    let (mut models, mut compactions) = ([Model::new(), Model::new()], 0);
    thread::scope(|scope| {
        let changing = [0, 1, 2, 3].map(|thread| {
            let tree = tree_of(thread);
            scope.spawn(move || change(store, tree, thread))
        });
        for thread in [0, 1] {
            let (tree, done) = (tree_of(thread), &done);
            scope.spawn(move || {
                while !done() {
                    look(store, tree, thread);
                }
            });
        }
        scope.spawn(|| {
            // On a busy machine the others may be done after the first.
            while !done() || compactions < 4 {
                store.compact(&mut on).unwrap();
                compactions += 1;
                if let Some(path) = path.filter(|_| compactions % 8 == 4) {
                    let options = BackupOptions::new().replace(true);
                    store.backup(path, &options, &mut |_| ControlFlow::Continue(())).unwrap();
                }
            }
        });
        for (thread, changed) in changing.into_iter().enumerate() {
            let changed = changed.join();
            is_done.store(thread == 3 || changed.is_err(), Ordering::SeqCst);
            models[thread % 2].extend(changed.unwrap());
        }
    });
    println!("{compactions} compactions");
    assert!(compactions > 3);
    for (tree, model) in trees.iter().zip(&mut models) {
        let mut others = tree.prefix(&[200]).chain(tree.prefix(&[201]));
        let other = others.next().unwrap().unwrap();
        model.insert(other.0, other.1.to_vec());
        assert!(others.next().is_none());
        assert_same(tree, model);
    }
    assert_sound(store);
    compact(store);
    // The longest values, and pieces, are as long as a hundredth of the store. Between two values
    // gaps are left that are shorter than each of the others.
    assert_short(store, 40);
    for (tree, model) in trees.iter().zip(&models) {
        assert_same(tree, model);
    }
    assert_sound(store);
}

#[test]
fn threads_work_on_while_a_store_is_compacted() {
    let (device, store) = memory_store(700, 1);
    work_while_compacting(&store, None);
    store.close().unwrap();
    let store = Store::open_on(device, &options(700, 1)).unwrap();
    assert_sound(&store);
}

#[test]
fn threads_work_on_while_a_store_with_a_log_is_compacted_and_backed_up() {
    let folder = tempdir().unwrap();
    let (path, backup) = (folder.path().join("store"), folder.path().join("backup"));
    let logged = options(700, 1).log(true).log_bytes(2 << 20);
    let store = Store::create(&path, &logged).unwrap();
    work_while_compacting(&store, Some(&backup));
    store.close().unwrap();
    for path in [path, backup] {
        let store = Store::open(&path, &options(700, 1)).unwrap();
        assert_sound(&store);
    }
}

/// A crash after a compaction finds a shorter file, and with a log what came afterwards.
#[test]
fn a_crash_after_a_compaction_loses_nothing() {
    for has_log in [false, true] {
        let folder = tempdir().unwrap();
        let path = folder.path().join("store");
        let options = options(600, 1).log(has_log).log_bytes(64 << 20);
        let store = Store::create(&path, &options).unwrap();
        let tree = store.create_tree("t").unwrap();
        let mut random = Random(13);
        let mut model = fill(&tree, 8_000, 700, &mut random);
        thin_out(&tree, &mut model, 30, &mut random);
        let report = compact(&store);
        assert_eq!(fs::metadata(&path).unwrap().len(), report.bytes_after);
        if has_log {
            model.extend(fill(&tree, 500, 3000, &mut random));
            store.sync().unwrap();
        }
        // The files as the end of the process would leave them.
        let copy = folder.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        if has_log {
            fs::create_dir(folder.path().join("copy.log")).unwrap();
            for file in fs::read_dir(folder.path().join("store.log")).unwrap() {
                let file = file.unwrap();
                let to = folder.path().join("copy.log").join(file.file_name());
                fs::copy(file.path(), to).unwrap();
            }
        }
        let crashed = Store::open(&copy, &options).unwrap();
        assert_same(&crashed.tree("t").unwrap(), &model);
        assert_sound(&crashed);
        compact(&crashed);
        crashed.close().unwrap();
        store.close().unwrap();
        let store = Store::open(&path, &options).unwrap();
        assert_same(&store.tree("t").unwrap(), &model);
    }
}

/// Each operation of the device fails once: the store has all entries, in memory and, if it can be
/// closed, in the file.
#[test]
fn a_failing_device_takes_no_entry() {
    for operation in [Operation::Read, Operation::Write, Operation::Sync, Operation::Resize] {
        for nth in [1, 2, 3, 5, 9, 40, 150] {
            let memory = Arc::new(MemoryDevice::new());
            let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
            let store = Store::create_on(device.clone(), &options(200, 1)).unwrap();
            let tree = store.create_tree("t").unwrap();
            let mut random = Random(nth);
            let mut model = fill(&tree, 3000, 700, &mut random);
            model.extend(fill(&tree, 60, 20_000, &mut random));
            stream(&tree, b"pieces", &[9; 200_000]);
            model.insert(b"pieces".to_vec(), vec![9; 200_000]);
            let pieces = model.remove(&b"pieces"[..]).unwrap();
            thin_out(&tree, &mut model, 30, &mut random);
            model.insert(b"pieces".to_vec(), pieces);
            store.sync().unwrap();
            device.plan().fail_nth(operation, nth, Fault::Error(Errno::IO));
            let compacted = store.compact(&mut on);
            let faults = device.plan().counts().faults;
            device.plan().clear();
            // A compaction has at least so many of each.
            let least = match operation {
                Operation::Read | Operation::Write => 5,
                Operation::Sync => 3,
                _ => 1,
            };
            assert!(nth > least || faults == 1, "{operation:?} {nth}: {faults} faults");
            let is_poisoned = store.sync().is_err();
            if compacted.is_ok() {
                assert!(!is_poisoned, "{operation:?} {nth}");
            }
            if is_poisoned {
                // Reads go on. What is in the file is unknown.
                let found =
                    tree.entries().map(|entry| entry.map(|(key, value)| (key, value.to_vec())));
                assert!(found.collect::<Result<Model, _>>().unwrap() == model);
                drop((tree, store, device));
                // A file that says that it is whole has all of them.
                match Store::open_on(memory, &options(200, 1)) {
                    Ok(store) => {
                        assert_same(&store.tree("t").unwrap(), &model);
                        assert_sound(&store);
                    }
                    Err(Error::UncleanShutdown) => {}
                    Err(error) => panic!("{operation:?} {nth}: {error}"),
                }
                continue;
            }
            assert_same(&tree, &model);
            assert_sound(&store);
            compact(&store);
            assert_short(&store, 3);
            store.close().unwrap();
            let store = Store::open_on(memory, &options(200, 1)).unwrap();
            assert_same(&store.tree("t").unwrap(), &model);
            assert_sound(&store);
        }
    }
}

/// A full disk refuses nothing: a compaction needs no space.
#[test]
fn a_full_disk_is_no_hindrance() {
    let device = MemoryDevice::new().limited_to(2500);
    let store = Store::create_on(Arc::new(device), &options(400, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let mut model = Model::new();
    for number in 0..u32::MAX {
        match tree.upsert(&number.to_be_bytes(), &[number as u8; 700]) {
            Ok(_) => _ = model.insert(number.to_be_bytes().to_vec(), vec![number as u8; 700]),
            Err(Error::DiskFull(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let mut random = Random(3);
    thin_out(&tree, &mut model, 20, &mut random);
    let report = compact(&store);
    assert!(report.bytes_after < report.bytes_before * 3 / 4, "{report:?}");
    assert_same(&tree, &model);
    assert_sound(&store);
}

/// The file itself gets shorter, also with values of several megabytes and a small pool.
#[test]
fn a_file_of_long_values_gets_shorter_with_a_small_pool() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &Options::new().pool_bytes(64 << 20)).unwrap();
    let tree = store.create_tree("t").unwrap();
    for number in 0..20_u8 {
        tree.upsert(&[number], &vec![number; 2 << 20]).unwrap();
    }
    (0..20).filter(|number| number % 4 > 0).for_each(|number| {
        tree.remove(&[number]).unwrap();
    });
    store.close().unwrap();
    // With this pool the values can be neither stored nor moved.
    let device = FileDevice::open(&path, FileOptions::default()).unwrap();
    let store = Store::open_on(Arc::new(device), &options(256, 1)).unwrap();
    assert!(compact(&store).pages_left > 0);
    store.close().unwrap();
    let store = Store::open(&path, &Options::new().pool_bytes(64 << 20)).unwrap();
    compact(&store);
    store.close().unwrap();
    let len = fs::metadata(&path).unwrap().len();
    assert!(len < 11 << 20, "{len}");
    let store = Store::open(&path, &options(256, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    for number in [0, 4, 8, 12, 16] {
        assert!(read(&tree, &[number]) == vec![number; 2 << 20]);
    }
}

/// Of 16 MiB, or of 1 GiB with `VELLUM_SOAK=1`: short and long values, of which 70 percent go.
#[test]
fn a_large_store_becomes_small() {
    for (has_log, most) in [(false, 400), (true, 400), (false, 40_000), (true, 40_000)] {
        let folder = tempdir().unwrap();
        let path = folder.path().join("store");
        let options = |pages| options(pages, 1).log(has_log).log_bytes(64 << 20);
        // The whole store is in memory while it is made. The pool of the compaction is smaller.
        let store = Store::create(&path, &options(u64::from(rounds(64)) * 8192)).unwrap();
        let tree = store.create_tree("t").unwrap();
        let (mut random, mut keys, mut sum) = (Random(5), Vec::new(), 0);
        let bytes_in_all = u64::from(rounds(64)) << 24;
        for number in 0_u64.. {
            let len = if random.once_in(4) { random.below(most) } else { random.below(400) };
            let key = random.next().to_be_bytes();
            tree.upsert(&key, &bytes(len as usize, number)).unwrap();
            keys.push((key, len, number));
            sum += len + 20;
            if sum > bytes_in_all {
                break;
            }
        }
        // Keys are random already.
        let left = keys.split_off(keys.len() * 7 / 10);
        for (key, ..) in keys {
            assert!(tree.remove(&key).unwrap());
        }
        store.close().unwrap();
        let store = Store::open(&path, &options(8192)).unwrap();
        let tree = store.tree("t").unwrap();
        let began = Instant::now();
        let report = compact(&store);
        let seconds = began.elapsed().as_secs_f64();
        println!("log: {has_log}, values up to {most}: {report:?}, {seconds:.2} s");
        assert!(report.bytes_after < report.bytes_before / 2, "{report:?}");
        assert_short(&store, 3);
        for (key, len, number) in left {
            assert!(*tree.get(&key).unwrap().unwrap() == bytes(len as usize, number));
        }
        assert_sound(&store);
        store.close().unwrap();
    }
}
