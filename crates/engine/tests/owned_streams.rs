//! Readers, writers and bulk loads that own a handle of their tree; writers for new keys; errors as
//! numbers.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Seek, SeekFrom, Write};

use common::{all_freed, assert_sound, bytes, memory_store, options, read};
use vellum::{Error, OwnedBulkLoader, OwnedValueReader, OwnedValueWriter, Store};

/// Unscoped threads use the streams after all other handles were dropped.
#[test]
fn streams_that_keep_their_tree_go_anywhere() {
    fn is_send<T: Send + Sync + 'static>() {}
    is_send::<OwnedValueReader>();
    is_send::<OwnedValueWriter>();
    is_send::<OwnedBulkLoader>();
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let value = bytes(1 << 20, 1);
    let (mut writer, text) = (tree.clone().into_writer(b"k").unwrap(), value.clone());
    let written = std::thread::spawn(move || {
        writer.write_all(&text).unwrap();
        assert_eq!(writer.len(), text.len() as u64);
        writer.finish().unwrap()
    });
    assert!(!written.join().unwrap());
    assert!(tree.clone().into_reader(b"none").unwrap().is_none());
    let mut reader = tree.clone().into_reader(b"k").unwrap().unwrap();
    assert!(tree.remove(b"k").unwrap());
    drop((tree, store));
    let found = std::thread::spawn(move || {
        let mut found = Vec::new();
        reader.seek(SeekFrom::End(-1000)).unwrap();
        reader.read_to_end(&mut found).unwrap();
        reader.rewind().unwrap();
        reader.read_to_end(&mut found).unwrap();
        (reader.len(), found)
    });
    let (len, found) = found.join().unwrap();
    assert!(len == value.len() as u64 && found == [&value[value.len() - 1000..], &value].concat());
}

#[test]
fn a_closed_store_has_streams_that_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    for (key, len) in [(b"short", 10), (b"whole", 5000), (b"parts", 1 << 20)] {
        let mut writer = tree.clone().into_writer(key).unwrap();
        writer.write_all(&bytes(len, 1)).unwrap();
        writer.finish_new().unwrap();
    }
    let mut readers: Vec<_> = [b"short", b"whole", b"parts"]
        .iter()
        .map(|key| tree.clone().into_reader(*key).unwrap().unwrap())
        .collect();
    let mut writer = tree.clone().into_writer(b"other").unwrap();
    writer.write_all(&bytes(1 << 20, 2)).unwrap();
    store.close().unwrap();
    // Another store has opened the file meanwhile.
    let again = Store::open(&path, &options(64, 1)).unwrap();
    let inner = |error: std::io::Error| error.downcast::<Error>().unwrap();
    for reader in &mut readers {
        assert!(matches!(inner(reader.read(&mut [0; 10]).unwrap_err()), Error::Closed));
    }
    let error = inner(writer.write_all(&bytes(1 << 20, 3)).unwrap_err());
    assert!(matches!(error, Error::Closed), "{error:?}");
    assert!(writer.finish().is_err());
    assert!(matches!(tree.clone().into_writer(b"k"), Err(Error::Closed)));
    assert!(matches!(tree.into_reader(b"k"), Err(Error::Closed)));
    drop(readers);
    assert_eq!(again.tree("t").unwrap().stat().unwrap().entries, 3);
    assert_sound(&again);
}

/// A thread without a scope loads after all other handles were dropped.
#[test]
fn a_load_that_keeps_its_tree_goes_anywhere() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let mut loader = tree.clone().into_bulk_loader().unwrap();
    drop(tree);
    let value = bytes(1 << 20, 1);
    let text = value.clone();
    let loaded = std::thread::spawn(move || {
        loader.push(b"a", b"1").unwrap();
        assert!(matches!(loader.push(b"a", b"2"), Err(Error::NotSorted { entry: 1, .. })));
        // Longer than the pool.
        loader.push(b"b", &text).unwrap();
        loader.push_from(b"c", &text[..]).unwrap();
        loader.finish().unwrap()
    });
    assert_eq!(loaded.join().unwrap(), 3);
    let tree = store.tree("t").unwrap();
    assert!(read(&tree, b"a") == b"1" && read(&tree, b"b") == value && read(&tree, b"c") == value);
    assert!(matches!(tree.into_bulk_loader(), Err(Error::NotEmpty)));
    assert_sound(&store);
}

#[test]
fn a_closed_store_has_loads_that_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &options(64, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let load = || {
        let mut loader = tree.clone().into_bulk_loader().unwrap();
        loader.push(b"a", b"1").unwrap();
        loader.push_from(b"b", &bytes(1 << 20, 1)[..]).unwrap();
        loader
    };
    let (mut late, finished, _dropped) = (load(), load(), load());
    store.close().unwrap();
    let again = Store::open(&path, &options(64, 1)).unwrap();
    assert!(matches!(late.push(b"c", b"3"), Err(Error::Closed)));
    assert!(matches!(late.push_from(b"c", &b"3"[..]), Err(Error::Closed)));
    let error = finished.finish().unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
    assert!(matches!(tree.into_bulk_loader(), Err(Error::Closed)));
    drop(late);
    assert_eq!(again.tree("t").unwrap().stat().unwrap().entries, 0);
    assert_sound(&again);
}

#[test]
fn errors_have_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create(&path, &options(64, 1)).unwrap();
    let number = |error: Error| error.errno();
    assert_eq!(number(Store::open(&path, &options(64, 1)).unwrap_err()), libc::EBUSY);
    assert_eq!(number(Store::create(&path, &options(64, 1)).unwrap_err()), libc::EEXIST);
    assert_eq!(number(store.tree("none").unwrap_err()), libc::ENOENT);
    let nowhere = folder.path().join("none");
    assert_eq!(number(Store::open(&nowhere, &options(64, 1)).unwrap_err()), libc::ENOENT);
    assert_eq!(number(Store::open(folder.path(), &options(64, 1)).unwrap_err()), libc::EIO);
    std::fs::write(&nowhere, b"no store").unwrap();
    assert_eq!(number(Store::open(&nowhere, &options(64, 1)).unwrap_err()), libc::EMEDIUMTYPE);
    // The error number of the system call, however deep it is nested.
    let refused = std::io::Error::from_raw_os_error(libc::EDQUOT);
    assert_eq!(number(Error::Input(std::io::Error::other(refused))), libc::EDQUOT);
}

#[test]
fn a_stream_for_a_new_key_is_refused_where_there_is_one() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    for len in [10, 5000, 1 << 20] {
        let (value, other) = (bytes(len, 1), bytes(len, 2));
        for (value, is_new) in [(&value, true), (&other, false)] {
            let mut writer = tree.writer(b"k").unwrap();
            writer.write_all(value).unwrap();
            match writer.finish_new() {
                Ok(()) => assert!(is_new),
                Err(error) => assert!(!is_new && matches!(error, Error::KeyExists), "{error}"),
            }
        }
        assert!(read(&tree, b"k") == value);
        all_freed(&store);
        assert_sound(&store);
        assert!(tree.remove(b"k").unwrap());
    }
}
