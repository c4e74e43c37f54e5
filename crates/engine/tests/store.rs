//! Stores as files: creating, closing, opening again, many trees, snapshots.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Random, assert_sound, memory_store, options};
use vellum::{Error, Options, Store};
use vellum_testing::patience::SetWhenDropped;

#[test]
fn a_closed_store_opens_with_everything_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = Options::new().pool_bytes(1 << 20).log(false);
    let large: Vec<u8> = (0..200_000u32).map(|n| (n % 251) as u8).collect();
    let store = Store::create(&path, &options).unwrap();
    let id = store.stat().unwrap().store_id;
    let tree = store.create_tree("files").unwrap();
    for n in 0..20_000u32 {
        tree.insert(format!("key {n}").as_bytes(), &n.to_le_bytes()).unwrap();
    }
    tree.insert(b"large", &large).unwrap();
    drop(tree);
    store.close().unwrap();

    let store = Store::open(&path, &options).unwrap();
    assert!(store.stat().unwrap().clean);
    assert_eq!(store.stat().unwrap().store_id, id);
    assert_sound(&store);
    let tree = store.tree("files").unwrap();
    for n in 0..20_000u32 {
        let value = tree.get(format!("key {n}").as_bytes()).unwrap();
        assert_eq!(value.as_deref(), Some(&n.to_le_bytes()[..]));
    }
    assert_eq!(tree.get(b"large").unwrap().as_deref(), Some(&large[..]));
    assert!(store.stat().unwrap().clean, "reading changes nothing");

    // Closing truncates the file's tail: the file of an emptied store is small.
    drop(tree);
    let before = std::fs::metadata(&path).unwrap().len();
    store.drop_tree("files").unwrap();
    assert!(!store.stat().unwrap().clean);
    assert_sound(&store);
    store.close().unwrap();
    let after = std::fs::metadata(&path).unwrap().len();
    assert!(after < 20 * 4096 && after < before / 10, "{before} bytes before, {after} after");
    let store = Store::open(&path, &options).unwrap();
    assert_eq!(store.trees().unwrap(), Vec::<String>::new());
    assert_sound(&store);
}

/// A guest of the lab has the kernel module, so all these tests use it there.
#[test]
fn a_store_is_on_exmap_where_that_is() {
    let (_, store) = memory_store(64, 1);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_mapped = maps.lines().any(|line| line.ends_with("/dev/exmap"));
    assert_eq!(is_mapped, std::path::Path::new("/sys/module/vellum").exists());
    assert_sound(&store);
}

#[test]
fn handles_that_are_dropped_close_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = Options::new().pool_bytes(1 << 20);
    let store = Store::create(&path, &options).unwrap();
    let tree = store.create_tree("t").unwrap();
    drop(store);
    tree.insert(b"key", b"value").unwrap();
    assert!(matches!(Store::open(&path, &options), Err(Error::InUse(_))));
    drop(tree);
    let store = Store::open(&path, &options).unwrap();
    assert!(store.tree("t").unwrap().contains(b"key").unwrap());
}

#[test]
fn a_closed_store_refuses_everything() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    tree.insert(b"key", b"value").unwrap();
    let other = store.clone();
    store.close().unwrap();
    assert!(matches!(tree.get(b"key"), Err(Error::Closed)));
    assert!(matches!(tree.get_into(b"key", &mut Vec::new()), Err(Error::Closed)));
    assert!(matches!(tree.insert(b"key", b""), Err(Error::Closed)));
    assert!(matches!(tree.cursor().first(), Err(Error::Closed)));
    assert!(matches!(tree.entries().next(), Some(Err(Error::Closed))));
    assert!(matches!(other.trees(), Err(Error::Closed)));
    assert!(matches!(other.sync(), Err(Error::Closed)));
    assert!(other.close().is_ok(), "closing twice is closing");
}

#[test]
fn closing_unlocks_the_file_under_live_handles() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    // Most pages of the tree are not in memory.
    let options = Options::new().pool_bytes(64 << 12);
    let store = Store::create(&path, &options).unwrap();
    let tree = store.create_tree("t").unwrap();
    tree.extend((0..5000u32).map(|n| (n.to_be_bytes(), [1; 200]))).unwrap();
    tree.upsert(b"blob", &[1; 20_000]).unwrap();
    let mut writer = tree.writer(b"long").unwrap();
    writer.write_all(&vec![1; 1 << 20]).unwrap();
    writer.finish().unwrap();

    let blob = tree.get(b"blob").unwrap().unwrap();
    let (mut entries, mut cursor) = (tree.range(.."a"), tree.cursor());
    assert!(entries.next().unwrap().is_ok() && entries.next_back().unwrap().is_ok());
    assert!(cursor.first().unwrap());
    let mut reader = tree.reader(b"long").unwrap().unwrap();
    reader.read_exact(&mut [0; 100]).unwrap();
    let mut taken = tree.extract_if([0, 0, 15, 0]..[0, 1, 0, 0], |_, _| true);
    assert!(taken.next().unwrap().is_ok());
    store.clone().close().unwrap();

    // Another store opens the file and changes all of it.
    let other = Store::open(&path, &options).unwrap();
    let changed = other.tree("t").unwrap();
    changed.clear().unwrap();
    changed.extend((0..9000u32).map(|n| (n.to_be_bytes(), [2; 150]))).unwrap();
    other.sync().unwrap();

    assert!(matches!(entries.next(), Some(Err(Error::Closed))));
    assert!(entries.next().is_none());
    for moved in [cursor.forward(), cursor.backward(), cursor.seek(b"x"), cursor.last()] {
        assert!(matches!(moved, Err(Error::Closed)), "{moved:?}");
    }
    let error = reader.read(&mut [0; 100]).unwrap_err();
    assert!(error.to_string().contains("is closed: open it again"), "{error}");
    assert!(matches!(taken.next(), Some(Err(Error::Closed))));
    assert!(matches!(tree.get(&[0; 4]), Err(Error::Closed)));
    assert!(matches!(tree.first(), Err(Error::Closed)));
    assert!(matches!(tree.multi_get(&[b"blob"]), Err(Error::Closed)));
    assert!(matches!(tree.upsert(b"a", b"b"), Err(Error::Closed)));
    assert!(matches!(tree.clear(), Err(Error::Closed)));
    assert!(matches!(tree.stat(), Err(Error::Closed)));
    assert!(matches!(store.stat(), Err(Error::Closed)));
    assert!(matches!(store.snapshot(), Err(Error::Closed)));
    let mut met = Vec::new();
    tree.salvage(&mut |found| {
        met.push(found.is_ok());
        true
    });
    assert_eq!(met, [false]);
    // A value that the caller holds stays.
    assert_eq!(&*blob, [1; 20_000]);
    drop((blob, taken, cursor, reader));
    drop((tree, store));
    assert_sound(&other);
    assert_eq!(changed.entries().count(), 9000);
    other.close().unwrap();
}

/// Threads read while their store is closed and another store changes the file. Each read returns
/// an entry of the closed store, or `Closed`.
#[test]
fn what_is_read_while_a_store_is_closed_is_of_that_store() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let options = Options::new().pool_bytes(64 << 12);
    drop(Store::create(&path, &options).unwrap().create_tree("t").unwrap());
    let all = |value: u8| (0..8000u32).map(move |n| (n.to_be_bytes(), [value; 100]));
    for round in 1..=5u8 {
        let store = Store::open(&path, &options).unwrap();
        let tree = store.tree("t").unwrap();
        tree.extend(all(round)).unwrap();
        store.sync().unwrap();
        std::thread::scope(|scope| {
            for seed in 0..3 {
                let tree = &tree;
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let mut keys = || (random.below(8000) as u32).to_be_bytes();
                    loop {
                        // Long enough for another store to change the rest of the file.
                        let keys: Vec<_> = (0..20_000).map(|_| keys()).collect();
                        let found = tree.multi_get_with(&keys, |_, value| {
                            assert_eq!(value, Some(&[round; 100][..]));
                        });
                        match found {
                            Ok(()) => {}
                            Err(Error::Closed) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            store.close().unwrap();
            let other = Store::open(&path, &options).unwrap();
            other.tree("t").unwrap().extend(all(0)).unwrap();
            other.close().unwrap();
        });
    }
}

#[test]
fn trees_come_and_go_by_name() {
    let (device, store) = memory_store(64, 2);
    for name in ["b", "a", "", "größe"] {
        store.create_tree(name).unwrap().insert(b"name", name.as_bytes()).unwrap();
    }
    assert_eq!(store.trees().unwrap(), ["", "a", "b", "größe"]);
    assert!(matches!(store.create_tree("a"), Err(Error::TreeExists(name)) if name == "a"));
    assert!(matches!(store.tree("c"), Err(Error::NoSuchTree(name)) if name == "c"));
    assert!(matches!(store.drop_tree("c"), Err(Error::NoSuchTree(_))));
    assert!(matches!(store.create_tree(&"x".repeat(9000)), Err(Error::KeyTooLong { .. })));

    let dropped = store.tree("a").unwrap();
    store.drop_tree("a").unwrap();
    assert!(matches!(dropped.get(b"name"), Err(Error::NoSuchTree(_))));
    assert!(matches!(dropped.insert(b"x", b"y"), Err(Error::NoSuchTree(_))));
    assert!(matches!(dropped.cursor().first(), Err(Error::NoSuchTree(_))));
    // A new tree of the same name is a different tree.
    assert!(store.tree_or_create("a").unwrap().get(b"name").unwrap().is_none());
    assert!(matches!(dropped.get(b"name"), Err(Error::NoSuchTree(_))));
    drop(dropped);
    store.close().unwrap();

    let store = Store::open_on(device, &options(64, 2)).unwrap();
    assert_eq!(store.trees().unwrap(), ["", "a", "b", "größe"]);
    let value = store.tree("größe").unwrap().get(b"name").unwrap().unwrap().into_vec();
    assert_eq!(value, "größe".as_bytes());
    assert_sound(&store);
}

#[test]
fn freed_pages_are_used_again_across_restarts() {
    let (device, mut store) = memory_store(32, 1);
    let mut sizes = Vec::new();
    for round in 0..6u32 {
        let tree = store.tree_or_create("t").unwrap();
        for n in 0..3000u32 {
            tree.upsert(&(n * 7).to_be_bytes(), &[round as u8; 100]).unwrap();
        }
        for n in 0..3000u32 {
            assert!(tree.remove(&(n * 7).to_be_bytes()).unwrap());
        }
        drop(tree);
        store.sync().unwrap();
        assert_sound(&store);
        sizes.push(store.stat().unwrap().file_pages);
        store.close().unwrap();
        store = Store::open_on(device.clone(), &options(32, 1)).unwrap();
    }
    assert!(sizes.iter().all(|size| *size <= sizes[0] + 32), "{sizes:?}");
}

#[test]
fn blobs_have_the_length_they_were_given() {
    for page_frames in [1, 3, 16] {
        let (_, store) = memory_store(64, page_frames);
        let tree = store.create_tree("t").unwrap();
        let max = store.limits().max_value;
        let around = [4000, 4048, 4049, 4096, 8143, 8144, 8145, 65_000, max - 1, max];
        for len in around {
            let value: Vec<u8> = (0..len).map(|at| (at % 253) as u8).collect();
            tree.upsert(&len.to_be_bytes(), &value).unwrap();
            assert_eq!(tree.get(&len.to_be_bytes()).unwrap().as_deref(), Some(&value[..]));
        }
        let error = tree.upsert(b"x", &vec![0; max as usize + 1]).unwrap_err();
        assert!(matches!(error, Error::ValueTooLong { max: limit, .. } if limit == max), "{error}");
        let max_key = store.limits().max_key;
        assert!(tree.upsert(&vec![1; max_key], &[1; 5000]).is_ok());
        let error = tree.upsert(&vec![1; max_key + 1], b"").unwrap_err();
        assert!(matches!(error, Error::KeyTooLong { max, .. } if max == max_key), "{error}");
        // A lookup of a key over the limit finds nothing, and is no error.
        assert!(tree.get(&vec![1; max_key + 1]).unwrap().is_none());
        assert!(!tree.remove(&vec![1; max_key + 1]).unwrap());
        assert_sound(&store);
    }
}

#[test]
fn many_threads_may_sync_check_and_change_at_once() {
    let (device, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (store, tree) = (&store, &tree);
            scope.spawn(move || {
                for n in 0..50u32 {
                    tree.upsert(&(n * 4 + thread).to_be_bytes(), &[1; 700]).unwrap();
                    match (n + thread) % 5 {
                        0 => assert!(store.check(&mut |_| {}).unwrap().is_sound()),
                        1..=3 => store.sync().unwrap(),
                        _ => {
                            store.create_tree(&format!("{thread}")).unwrap();
                            store.drop_tree(&format!("{thread}")).unwrap();
                        }
                    }
                }
            });
        }
    });
    drop(tree);
    assert_sound(&store);
    store.close().unwrap();
    let store = Store::open_on(device, &options(64, 1)).unwrap();
    assert_sound(&store);
    assert_eq!(store.tree("t").unwrap().entries().count(), 200);
}

/// A thread reads the file all the time, as a process would find it if the creator were killed at
/// that moment. It finds a whole store or no file.
#[test]
fn a_file_has_its_name_only_when_it_is_a_store() {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let done = AtomicBool::new(false);
    let options = Options::new().pool_bytes(1 << 20).log(false);
    std::thread::scope(|scope| {
        let _done = SetWhenDropped(&done);
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                let Ok(mut file) = std::fs::File::open(&path) else { continue };
                let mut found = Vec::new();
                file.read_to_end(&mut found).unwrap();
                if file.metadata().unwrap().nlink() == 0 {
                    // The file was removed, so it may have changed during the read.
                    continue;
                }
                let copy = Arc::new(vellum_pool::device::MemoryDevice::from_snapshot(found));
                Store::open_on(copy, &options).unwrap();
            }
        });
        for _ in 0..100 {
            let store = Store::create(&path, &options).unwrap();
            std::fs::remove_file(&path).unwrap();
            store.close().unwrap();
        }
    });
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing stays behind");
}

#[test]
fn an_empty_file_is_a_store_to_be() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let directory = tempfile::tempdir().unwrap();
    let (path, link) = (directory.path().join("store"), directory.path().join("link"));
    let options = Options::new().pool_bytes(1 << 20);
    symlink(&path, &link).unwrap();
    for create in [Store::create, Store::open_or_create] {
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let error = Store::open(&link, &options).unwrap_err().to_string();
        assert!(error.contains("empty"), "{error}");
        let store = create(link.clone(), &options).unwrap();
        store.create_tree("t").unwrap();
        assert!(matches!(Store::create(&path, &options), Err(Error::Exists(_))));
        store.close().unwrap();
        assert_eq!(Store::open(&path, &options).unwrap().trees().unwrap(), ["t"]);
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(link.is_symlink());
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "nothing stays behind");
    // A file that has bytes is not replaced. Of several creators one succeeds.
    std::fs::write(&path, "text").unwrap();
    assert!(matches!(Store::create(&path, &options), Err(Error::Exists(_))));
    assert!(matches!(Store::open_or_create(&path, &options), Err(Error::NotAStore(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"text");
    for begin in [None, Some("")] {
        std::fs::remove_file(&path).unwrap();
        if let Some(begin) = begin {
            std::fs::write(&path, begin).unwrap();
        }
        let created = std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(|| Store::create(&path, &options)));
            threads.map(|thread| thread.join().unwrap())
        });
        for created in &created {
            let refused = matches!(created, Err(Error::Exists(_) | Error::InUse(_)));
            assert!(created.is_ok() || refused, "{created:?}");
        }
        assert_eq!(created.iter().filter(|created| created.is_ok()).count(), 1);
    }
}

#[test]
fn another_page_size_than_the_files_is_refused() {
    let device = Arc::new(vellum::MemoryDevice::new());
    Store::create_on(device.clone(), &options(64, 4)).unwrap().close().unwrap();
    let error = Store::open_on(device.clone(), &options(64, 2)).unwrap_err();
    assert!(matches!(&error, Error::BadOption(what) if what.contains("have 4 frames")), "{error}");
    // The file's own page size, or none.
    Store::open_on(device.clone(), &options(64, 4)).unwrap().close().unwrap();
    let store = Store::open_on(device, &Options::new().pool_bytes(1 << 20)).unwrap();
    assert_eq!(store.stat().unwrap().page_bytes, 4 * 4096);
}
