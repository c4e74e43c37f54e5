//! Bad files, bad options and failing devices: each gives an error that names the cause, and no
//! data is lost.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Read;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Random, assert_sound, memory_store, options};
use rustix::io::Errno;
use vellum::{Device, Error, Options, Store, Tree};
use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};

fn small_store(directory: &Path) -> PathBuf {
    let path = directory.join("store");
    let store = Store::create(&path, &Options::new().pool_bytes(1 << 20)).unwrap();
    let tree = store.create_tree("t").unwrap();
    for n in 0..2000u32 {
        tree.insert(&n.to_be_bytes(), &[n as u8; 30]).unwrap();
    }
    tree.insert(b"blob", &[9; 20_000]).unwrap();
    drop(tree);
    store.close().unwrap();
    path
}

fn open(path: &Path) -> Result<Store, Error> {
    Store::open(path, &Options::new().pool_bytes(1 << 20))
}

fn salvage(path: &Path) -> Store {
    Store::open(path, &Options::new().pool_bytes(1 << 20).salvage(true)).unwrap()
}

#[test]
fn a_file_that_is_not_a_store_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    assert!(matches!(open(&path), Err(Error::NotFound(_))));
    let mut random = Random(3);
    let noise: Vec<u8> = (0..50_000).map(|_| random.next() as u8).collect();
    for contents in [&b""[..], b"short", &[0; 8192], &[b'x'; 100_000], &noise] {
        fs::write(&path, contents).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, Error::NotAStore(_)), "{error}");
        assert_eq!(fs::read(&path).unwrap(), contents, "and it is left alone");
    }
    assert!(open(directory.path()).is_err());
    // Creating a store does not overwrite the file either.
    let error = Store::create(&path, &Options::new()).unwrap_err();
    assert!(matches!(error, Error::Exists(_)), "{error}");
    assert_eq!(fs::read(&path).unwrap(), noise);
}

#[test]
fn a_store_of_another_format_version_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_store(directory.path());
    let mut bytes = fs::read(&path).unwrap();
    for page in 0..2 {
        let page = &mut bytes[page * 4096..][..4096];
        page[48] = 99;
        vellum::page::seal(page, &[]);
    }
    fs::write(&path, &bytes).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(error, Error::UnknownFormat { found: 99, .. }), "{error}");
}

#[test]
fn a_truncated_store_is_named_and_can_be_salvaged() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_store(directory.path());
    let whole = fs::read(&path).unwrap();
    for len in [whole.len() - 4096, whole.len() - 1, whole.len() / 2, 8192, 4096] {
        fs::write(&path, &whole[..len]).unwrap();
        let error = open(&path).unwrap_err();
        assert!(matches!(error, Error::Truncated { .. } | Error::Damaged { .. }), "{len}: {error}");
    }
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let store = salvage(&path);
    // The tree's root lies in the part that is left, and so do many leaves.
    let (mut found, mut damage) = (Vec::new(), 0);
    store.tree("t").unwrap().salvage(&mut |entry| {
        match entry {
            Ok((b"blob", value)) => assert_eq!(value, [9; 20_000]),
            Ok((key, value)) => {
                let number = u32::from_be_bytes(key.try_into().unwrap());
                assert_eq!(value, [number as u8; 30], "{number}");
                found.push(number);
            }
            Err(_) => damage += 1,
        }
        true
    });
    assert!(found.is_sorted_by(|one, next| one < next) && found.iter().all(|n| *n < 2000));
    assert!(found.len() > 200 && damage > 0, "{} entries, {damage} damages", found.len());
    drop(store);
    fs::write(&path, &whole).unwrap();
    assert_sound(&open(&path).unwrap());
}

#[test]
fn a_flipped_bit_in_any_page_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_store(directory.path());
    let whole = fs::read(&path).unwrap();
    let store = open(&path).unwrap();
    let free: Vec<bool> = (0..whole.len() as u64 / 4096)
        .map(|page| store.pool().with_space(|space| space.has_free(page, 1) || page >= space.end()))
        .collect();
    drop(store);
    let mut random = Random(7);
    for page in (0..free.len()).filter(|page| !free[*page]) {
        let mut bytes = whole.clone();
        let bit = page * 4096 * 8 + random.below(4096 * 8) as usize;
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        match open(&path) {
            Err(Error::Damaged { page: found, .. }) => assert_eq!(found.id.0, page as u64),
            Err(error) => panic!("page {page}: {error}"),
            Ok(store) => {
                let report = store.check(&mut |_| {}).unwrap();
                assert!(!report.is_sound(), "a flipped bit in page {page} was not found");
                // The rest of the store can be read.
                let mut entries = 0;
                if let Ok(tree) = store.tree("t") {
                    tree.salvage(&mut |found| {
                        entries += u32::from(found.is_ok());
                        true
                    });
                    assert!(entries > 1500 || report.damage.len() == 1, "{entries} entries");
                }
            }
        }
    }
}

/// The next change would write over the value.
#[test]
fn a_check_finds_a_value_of_which_the_free_map_has_a_part() {
    let (device, store) = memory_store(64, 1);
    store.create_tree("t").unwrap().insert(b"long", &[9; 20_000]).unwrap();
    store.close().unwrap();
    let good = device.snapshot();
    let number = |file: &[u8], at: usize| u64::from_le_bytes(*file[at..].first_chunk().unwrap());
    let newest = [0, 4096].into_iter().max_by_key(|page| number(&good, page + 72)).unwrap();
    let map = number(&good, newest + 96) as usize * 4096;
    let is_value = |page: &usize| good[page * 4096 + 36] == 4;
    let value = (2..good.len() / 4096).find(is_value).unwrap() as u64;
    // The value has five frames. The map has all extents before them, and none after them.
    for (start, count) in [(0, 5), (0, 1), (1, 1), (2, 2), (4, 1)] {
        let mut file = good.clone();
        let extents = number(&file, map + 80);
        let last = map + 88 + 16 * (extents as usize);
        let mut put = |at: usize, number: u64| {
            file[at..at + 8].copy_from_slice(&number.to_le_bytes());
        };
        put(map + 48, 32 + 16 * (extents + 1));
        put(map + 80, extents + 1);
        put(last, value + start);
        put(last + 8, count);
        vellum::page::seal(&mut file[map..map + 4096], &[]);
        let device = Arc::new(MemoryDevice::from_snapshot(file));
        let store = Store::open_on(device, &options(64, 1).read_only(true)).unwrap();
        let report = store.check(&mut |_| {}).unwrap();
        assert!(!report.is_sound(), "frames {start} + {count}");
    }
}

#[test]
fn a_store_that_was_not_closed_is_refused_and_can_be_salvaged() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    for n in 0..3000u32 {
        tree.insert(&n.to_be_bytes(), b"value").unwrap();
    }
    store.sync().unwrap();
    let synced = device.snapshot();
    tree.insert(b"more", b"value").unwrap();
    let unwritten = device.snapshot();
    for n in 3000..30_000u32 {
        tree.insert(&n.to_be_bytes(), b"value").unwrap();
    }
    let in_use = device.snapshot();

    // After a sync the file is a valid store, until the next page is written.
    for image in [synced, unwritten] {
        let copy = Arc::new(MemoryDevice::from_snapshot(image));
        let opened = Store::open_on(copy, &options(64, 1)).unwrap();
        assert_eq!(opened.tree("t").unwrap().entries().count(), 3000);
        assert_sound(&opened);
    }
    let copy = Arc::new(MemoryDevice::from_snapshot(in_use));
    let error = Store::open_on(copy.clone(), &options(64, 1)).unwrap_err();
    assert!(matches!(error, Error::UncleanShutdown), "{error}");
    assert!(error.to_string().contains("salvage"), "{error}");
    let opened = Store::open_on(copy, &options(64, 1).salvage(true)).unwrap();
    let mut salvaged = Vec::new();
    opened.tree("t").unwrap().salvage(&mut |found| {
        if let Ok((key, value)) = found {
            assert_eq!(value, b"value");
            salvaged.push(key.to_vec());
        }
        true
    });
    let is_known =
        |key: &Vec<u8>| key == b"more" || u32::from_be_bytes(key[..].try_into().unwrap()) < 30_000;
    assert!(salvaged.is_sorted_by(|one, next| one < next) && salvaged.iter().all(is_known));
    assert!(salvaged.len() >= 1000, "{} entries", salvaged.len());
    assert!(matches!(opened.tree("t").unwrap().remove(b"x"), Err(Error::ReadOnly)));
}

#[test]
fn one_file_is_open_once_for_writing() {
    let directory = tempfile::tempdir().unwrap();
    let path = small_store(directory.path());
    let read_only = Options::new().pool_bytes(1 << 20).read_only(true);
    let store = open(&path).unwrap();
    assert!(matches!(open(&path), Err(Error::InUse(_))));
    assert!(matches!(Store::open(&path, &read_only), Err(Error::InUse(_))));
    drop(store);
    let one = Store::open(&path, &read_only).unwrap();
    let two = Store::open(&path, &read_only).unwrap();
    assert!(matches!(open(&path), Err(Error::InUse(_))));
    for store in [one, two] {
        let tree = store.tree("t").unwrap();
        assert_eq!(tree.entries().count(), 2001);
        assert!(matches!(tree.insert(b"x", b"y"), Err(Error::ReadOnly)));
        assert!(matches!(store.create_tree("u"), Err(Error::ReadOnly)));
        assert!(matches!(store.drop_tree("t"), Err(Error::ReadOnly)));
        assert!(matches!(store.sync(), Err(Error::ReadOnly)));
        assert_sound(&store);
        store.close().unwrap();
    }
    open(&path).unwrap();
}

#[test]
fn invalid_options_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let small = Options::new().pool_bytes(7 * 4096);
    let error = Store::create(&path, &small).unwrap_err();
    assert!(matches!(error, Error::PoolTooSmall { min: 32_768, .. }), "{error}");
    for frames in [0, 17] {
        let error = Store::create(&path, &Options::new().page_frames(frames)).unwrap_err();
        assert!(matches!(error, Error::BadOption(_)), "{error}");
    }
    assert!(matches!(Store::create(&path, &Options::new().read_only(true)), Err(Error::ReadOnly)));
    assert!(!path.exists(), "nothing is left of a store that was not created");
    Store::create(&path, &options(64, 4)).unwrap().close().unwrap();
    let small = Options::new().pool_bytes(31 * 4096);
    let error = Store::open(&path, &small).unwrap_err();
    assert!(matches!(error, Error::PoolTooSmall { min: 131_072, .. }), "{error}");
}

#[test]
fn a_full_disk_is_an_error_that_loses_nothing() {
    for frames in [1, 2] {
        let device = Arc::new(MemoryDevice::new().limited_to(200));
        let store = Store::create_on(device.clone(), &options(32, frames)).unwrap();
        let tree = store.create_tree("t").unwrap();
        let mut stored = 0u32;
        let error = loop {
            match tree.insert(&(stored ^ 0x5555).to_be_bytes(), &[1; 200]) {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::DiskFull(_)), "{error}");
        assert!(stored > 1000, "{stored} entries");
        assert!(matches!(tree.upsert(b"blob", &[0; 30_000]), Err(Error::DiskFull(_))));
        assert_eq!(tree.check().unwrap().entries, u64::from(stored));
        assert_sound(&store);
        // The disk has room again as soon as an entry is removed.
        for n in 0..stored / 2 {
            assert!(tree.remove(&(n ^ 0x5555).to_be_bytes()).unwrap());
        }
        tree.upsert(b"blob", &[0; 30_000]).unwrap();
        drop(tree);
        store.close().unwrap();
        let store = Store::open_on(device, &options(32, frames)).unwrap();
        assert_eq!(store.tree("t").unwrap().entries().count() as u32, stored - stored / 2 + 1);
        assert_sound(&store);
    }
}

#[test]
fn a_store_on_a_full_disk_is_not_created() {
    let device = Arc::new(MemoryDevice::new().limited_to(3));
    let error = Store::create_on(device, &options(32, 4)).unwrap_err();
    assert!(matches!(error, Error::DiskFull(_)), "{error}");
}

#[test]
fn failing_reads_are_errors_and_pass() {
    let (memory, store) = memory_store(32, 1);
    let tree = store.create_tree("t").unwrap();
    tree.bulk_load((0..20_000u32).map(|n| (n.to_be_bytes(), [5; 40]))).unwrap();
    drop(tree);
    store.close().unwrap();
    let memory = Arc::into_inner(memory).unwrap();
    let device = Arc::new(FaultyDevice::new(memory, 5).unwrap());
    let store = Store::open_on(device.clone(), &options(32, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    for fault in [Fault::Error(Errno::IO), Fault::FlippedBit, Fault::Misdirected] {
        device.plan().fail_randomly(Operation::Read, 0.2, fault);
        let mut random = Random(11);
        let (mut good, mut bad) = (0, 0);
        for _ in 0..500 {
            let n = random.below(20_000) as u32;
            match tree.get(&n.to_be_bytes()) {
                Ok(value) => {
                    assert_eq!(value.as_deref(), Some(&[5; 40][..]));
                    good += 1;
                }
                Err(Error::Io(_) | Error::Damaged { .. }) => bad += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(good > 50 && bad > 20, "{good} good, {bad} bad");
        device.plan().clear();
    }
    // The changes that met a failed read are not in the tree. The others are, and the store works
    // on.
    device.plan().fail_randomly(Operation::Read, 0.1, Fault::Error(Errno::IO));
    let mut random = Random(12);
    let mut entries = 20_000;
    for _ in 0..2000 {
        let key = random.below(40_000) as u32;
        match tree.remove(&key.to_be_bytes()) {
            Ok(true) => entries -= 1,
            Ok(false) | Err(Error::Io(_)) => {}
            Err(error) => panic!("{error}"),
        }
        match tree.upsert(&key.to_le_bytes(), &[1; 100]) {
            Ok(false) => entries += 1,
            Ok(true) | Err(Error::Io(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    device.plan().clear();
    assert_eq!(tree.check().unwrap().entries, entries);
    assert_sound(&store);
}

/// A tree is gone, or empty, before its pages are freed. Pages that cannot be read stay unused.
#[test]
fn a_tree_goes_though_some_of_its_pages_cannot_be_read() {
    let memory = Arc::new(MemoryDevice::new());
    let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
    let store = Store::create_on(device.clone(), &options(32, 1)).unwrap();
    let entry = |n: u32| (n.to_be_bytes(), [5; 40]);
    for name in ["cleared", "dropped", "kept"] {
        let tree = store.create_tree(name).unwrap();
        tree.bulk_load((0..20_000).map(entry)).unwrap();
    }
    store.sync().unwrap();
    let (cleared, dropped) = (store.tree("cleared").unwrap(), store.tree("dropped").unwrap());
    let reads_fail_sometimes = |gone: &Tree, change: &dyn Fn()| {
        // The root, and the catalog, are in memory.
        assert!(gone.get(&[0; 4]).unwrap().is_some());
        assert_eq!(store.trees().unwrap().len(), 3);
        device.plan().fail_randomly(Operation::Read, 0.3, Fault::Error(Errno::IO));
        change();
        device.plan().clear();
    };
    reads_fail_sometimes(&cleared, &|| cleared.clear().unwrap());
    reads_fail_sometimes(&dropped, &|| store.drop_tree("dropped").unwrap());
    assert_eq!(cleared.entries().count(), 0);
    assert!(matches!(dropped.get(&[0; 4]), Err(Error::NoSuchTree(_))));
    assert_eq!(store.trees().unwrap(), ["cleared", "kept"]);
    cleared.bulk_load((0..20_000).map(entry)).unwrap();
    for tree in [&cleared, &store.tree("kept").unwrap()] {
        assert_eq!(tree.check().unwrap().entries, 20_000);
    }
    let lost = store.check(&mut |_| ()).unwrap().lost_pages;
    let freed = store.free_lost_pages(&mut |_| Continue(())).unwrap();
    assert!(freed.is_sound() && lost > 0 && freed.lost_pages == lost, "{lost} {freed:?}");
    assert_eq!(store.check(&mut |_| ()).unwrap().lost_pages, 0);
    cleared.clear().unwrap();
    cleared.bulk_load((0..20_000).map(entry)).unwrap();
    for tree in [&cleared, &store.tree("kept").unwrap()] {
        assert_eq!(tree.check().unwrap().entries, 20_000);
    }
}

/// The pool may know lost pages: long values that are in memory, or were.
#[test]
fn lost_values_come_free_though_the_pool_has_had_them() {
    let device = Arc::new(FaultyDevice::new(MemoryDevice::new(), 1).unwrap());
    let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
    for name in ["lost", "kept"] {
        let tree = store.create_tree(name).unwrap();
        tree.bulk_load((0..2000_u32).map(|n| (n.to_be_bytes(), [5; 6000]))).unwrap();
    }
    store.sync().unwrap();
    let (lost, kept) = (store.tree("lost").unwrap(), store.tree("kept").unwrap());
    // Evicts all values and leaves, and brings some values back.
    kept.entries().for_each(|entry| drop(entry.unwrap()));
    for n in 0..20_u32 {
        assert!(lost.get(&n.to_be_bytes()).unwrap().is_some());
    }
    let mut stat = store.stat().unwrap();
    device.plan().fail_always(Operation::Read, Fault::Error(Errno::IO));
    lost.clear().unwrap();
    device.plan().clear();
    let before = store.check(&mut |_| ()).unwrap().lost_pages;
    assert!(before > 3000, "{before}");
    let freed = store.free_lost_pages(&mut |_| Continue(())).unwrap();
    assert!(freed.is_sound() && freed.lost_pages == before, "{before} {freed:?}");
    assert_eq!(store.check(&mut |_| ()).unwrap().lost_pages, 0);
    stat.used_pages -= before;
    assert!(store.stat().unwrap().used_pages <= stat.used_pages);
    lost.bulk_load((0..2000_u32).map(|n| (n.to_be_bytes(), [6; 6000]))).unwrap();
    for (tree, byte) in [(&lost, 6), (&kept, 5)] {
        let count = tree.entries().filter(|entry| entry.as_ref().unwrap().1[..] == [byte; 6000]);
        assert_eq!(count.count(), 2000);
    }
    assert_sound(&store);
}

/// A tree that is cleared forgets the leaf of which it popped entries, though it cannot read it.
#[test]
fn a_pop_takes_nothing_out_of_a_bulk_load_that_has_not_ended() {
    let device = Arc::new(FaultyDevice::new(MemoryDevice::new(), 1).unwrap());
    let store = Store::create_on(device.clone(), &options(256, 1).evictors(0)).unwrap();
    store.create_tree("first").unwrap();
    let (tree, other) = (store.create_tree("tree").unwrap(), store.create_tree("other").unwrap());
    let key = |n: u32| n.to_be_bytes();
    for n in 1000..20_000 {
        tree.insert(&key(n), &[1; 100]).unwrap();
        other.insert(&key(n), &[2; 100]).unwrap();
    }
    // The first leaf of the tree gets the lowest place in the file, between pages that stay. Later
    // that is the place of the first leaf of the load.
    store.drop_tree("first").unwrap();
    let leaves = tree.stat().unwrap().leaf_pages;
    let first = (0..1000).rev().find(|n| {
        tree.insert(&key(*n), &[1; 100]).unwrap();
        tree.stat().unwrap().leaf_pages > leaves
    });
    let first = first.unwrap();
    (first - 10..first).for_each(|n| assert!(!tree.upsert(&key(n), &[1; 100]).unwrap()));
    assert_eq!(&*tree.pop_first().unwrap().unwrap().0, &key(first - 10));
    store.sync().unwrap();
    // The leaf is evicted, and the root is not.
    for n in 1000..20_000 {
        assert!(other.get(&key(n)).unwrap().is_some());
        assert!(n % 10 > 0 || tree.get(&key(19_999)).unwrap().is_some());
    }
    device.plan().fail_always(Operation::Read, Fault::Error(Errno::IO));
    tree.clear().unwrap();
    device.plan().clear();
    let freed = store.free_lost_pages(&mut |_| Continue(())).unwrap();
    assert!(freed.is_sound() && freed.lost_pages > 100, "{freed:?}");
    let mut loader = tree.bulk_loader().unwrap();
    // Few enough for the first leaf to be in memory still.
    (0..300).for_each(|n| loader.push(&key(n), &[3; 100]).unwrap());
    assert!(tree.pop_first().unwrap().is_none());
    assert_eq!(loader.finish().unwrap(), 300);
    assert_eq!(&*tree.pop_first().unwrap().unwrap().0, &key(0));
    assert_eq!(tree.check().unwrap().entries, 299);
}

/// A value is read while its tree is dropped, and nothing says which pages it has.
#[test]
fn pages_of_a_lost_value_stay_while_it_is_read() {
    let memory = Arc::new(MemoryDevice::new());
    let store = Store::create_on(memory.clone(), &options(4000, 1)).unwrap();
    let value: Vec<u8> = (0..400_000_u32).map(|n| (n / 7) as u8).collect();
    store.create_tree("value").unwrap().insert(b"key", &value).unwrap();
    let sorted = (0..20_000_u32).map(|n| (n.to_be_bytes(), [5; 100]));
    store.create_tree("other").unwrap().bulk_load(sorted).unwrap();
    store.close().unwrap();
    let device =
        Arc::new(FaultyDevice::new(MemoryDevice::from_snapshot(memory.snapshot()), 1).unwrap());
    let store = Store::open_on(device.clone(), &options(256, 1)).unwrap();
    let (tree, other) = (store.tree("value").unwrap(), store.tree("other").unwrap());
    let mut reader = tree.reader(b"key").unwrap().unwrap();
    let mut found = vec![0; 10];
    reader.read_exact(&mut found).unwrap();
    // The leaf is evicted, and the catalog is not.
    for n in 0..20_000_u32 {
        assert!(other.get(&n.to_be_bytes()).unwrap().is_some());
        assert!(n % 10 > 0 || store.trees().unwrap().len() == 2);
    }
    device.plan().fail_always(Operation::Read, Fault::Error(Errno::IO));
    store.drop_tree("value").unwrap();
    device.plan().clear();
    let lost = store.check(&mut |_| ()).unwrap().lost_pages;
    assert!(lost > 90, "{lost}");
    let freed = store.free_lost_pages(&mut |_| Continue(()));
    assert!(matches!(freed, Err(Error::InUse(_))), "{freed:?}");
    other.upsert(b"more", &[7; 200_000]).unwrap();
    store.sync().unwrap();
    reader.read_to_end(&mut found).unwrap();
    assert!(found == value);
    drop(reader);
    assert_eq!(store.free_lost_pages(&mut |_| Continue(())).unwrap().lost_pages, lost);
    assert_eq!(store.check(&mut |_| ()).unwrap().lost_pages, 0);
}

#[test]
fn a_failed_write_stops_changes_and_not_reading() {
    // The first write calls the file unclean. If that one fails, the file is what it was: see the
    // next test.
    for (operation, nth) in [(Operation::Write, 2), (Operation::Sync, 1)] {
        let device = Arc::new(FaultyDevice::new(MemoryDevice::new(), 5).unwrap());
        // The sync's write must fail, not an earlier write of the evictor.
        let options = options(32, 1).evictors(0);
        let store = Store::create_on(device.clone(), &options).unwrap();
        let tree = store.create_tree("t").unwrap();
        for n in 0..5000u32 {
            tree.insert(&n.to_be_bytes(), &[3; 20]).unwrap();
        }
        store.sync().unwrap();
        tree.insert(b"more", b"").unwrap();
        device.plan().fail_nth(operation, nth, Fault::Error(Errno::IO));
        let error = store.sync().unwrap_err();
        assert!(matches!(error, Error::Io(_)), "{operation:?}: {error}");
        let error = tree.insert(b"another", b"").unwrap_err();
        assert!(matches!(error, Error::Poisoned(_)), "{operation:?}: {error}");
        assert!(matches!(store.sync(), Err(Error::Poisoned(_))));
        assert_eq!(tree.entries().filter(Result::is_ok).count(), 5001);
        // The file must not open as a clean store, whatever it has now.
        assert!(store.close().is_err());
        drop(tree);
        let copy: Arc<dyn Device> = device;
        assert!(Store::open_on(copy, &options).is_err());
    }
}

#[test]
fn a_header_that_cannot_be_written_leaves_the_file_as_it_was() {
    let device = Arc::new(FaultyDevice::new(MemoryDevice::new(), 5).unwrap());
    let store = Store::create_on(device.clone(), &options(32, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    store.sync().unwrap();
    let clean = device.inner().snapshot();
    device.plan().fail_nth(Operation::Write, 1, Fault::Error(Errno::IO));
    tree.insert(b"key", b"").unwrap();
    let error = store.sync().unwrap_err();
    assert!(matches!(error, Error::Io(_)), "{error}");
    assert!(matches!(store.create_tree("u"), Err(Error::Poisoned(_))));
    assert!(tree.get(b"key").unwrap().is_some());
    assert!(device.inner().snapshot() == clean, "the file is what it was");
}

#[test]
fn a_pool_full_of_guards_is_an_error() {
    let (_, store) = memory_store(16, 1);
    let tree = store.create_tree("t").unwrap();
    for n in 0..10u8 {
        tree.insert(&[n], &[n; 12_000]).unwrap();
    }
    let mut held = Vec::new();
    let error = loop {
        match tree.get(&[held.len() as u8 % 10]) {
            Ok(value) => held.push(value),
            Err(error) => break error,
        }
        assert!(held.len() < 10);
    };
    assert!(matches!(error, Error::PoolExhausted(_)), "{error}");
    held.clear();
    assert_eq!(tree.get(&[5]).unwrap().as_deref(), Some(&[5; 12_000][..]));
}

/// The offset of a byte that the code interprets: kind, level, the node header, slots.
fn interesting_byte(random: &mut Random) -> usize {
    match random.below(4) {
        0 => 28 + random.below(12) as usize,
        1 => 40 + random.below(32) as usize,
        2 => 136 + random.below(120) as usize,
        _ => 40 + random.below(4056) as usize,
    }
}

#[test]
fn pages_that_lie_under_a_right_checksum_cause_no_panic_and_no_endless_loop() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    for n in 0..12_000u32 {
        tree.upsert(&n.wrapping_mul(2_654_435_761).to_be_bytes(), &[n as u8; 30]).unwrap();
    }
    tree.upsert(b"blob", &[1; 10_000]).unwrap();
    drop(tree);
    store.close().unwrap();
    let whole = device.snapshot();
    let pages = whole.len() / 4096;
    let mut random = Random(21);
    let (mut opened, mut found) = (0, 0);
    for round in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.below(4) {
            // There are few inner pages and many leaves. Choose an inner page half of the time.
            let inner = (2..pages).filter(|page| whole[page * 4096 + 36] == 2);
            let inner: Vec<usize> = inner.collect();
            let page = match random.below(2) {
                0 => inner[random.below(inner.len() as u64) as usize],
                _ => 2 + random.below(pages as u64 - 2) as usize,
            };
            let page = &mut bytes[page * 4096..][..4096];
            for _ in 0..1 + random.below(3) {
                page[interesting_byte(&mut random)] = random.next() as u8;
            }
            // Only pages of 4 KiB. The first 4 KiB of a blob do not verify by themselves.
            vellum::page::seal(page, &[]);
        }
        let device = Arc::new(MemoryDevice::from_snapshot(bytes));
        let Ok(store) = Store::open_on(device, &options(64, 1)) else { continue };
        opened += 1;
        found += u32::from(!store.check(&mut |_| {}).unwrap().is_sound());
        let Ok(tree) = store.tree("t") else { continue };
        let _ = tree.stat();
        let _ = tree.entries().take(20_000).filter(Result::is_ok).count();
        let mut cursor = tree.cursor();
        for _ in 0..20_000 {
            if !matches!(cursor.backward(), Ok(true)) {
                break;
            }
        }
        let mut visited = 0;
        tree.salvage(&mut |_| {
            visited += 1;
            visited < 50_000
        });
        for n in 0..1500u32 {
            let key = (n * 13).wrapping_mul(2_654_435_761).to_be_bytes();
            let _ = tree.get(&key);
            let _ = match (n + round) % 3 {
                0 => tree.remove(&key),
                _ => tree.upsert(&key, &[2; 60]),
            };
        }
        let _ = store.drop_tree("t");
        let _ = store.close();
    }
    assert!(opened > 300 && found > 200, "{opened} opened, {found} found");
}
