//! Values as streams: any length, any pool, any changes by other threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Random, all_freed, assert_sound, bytes, memory_store, options};
use vellum::{Error, Store, Tree, ValueReader};
use vellum_pool::device::MemoryDevice;
use vellum_testing::patience::SetWhenDropped;

/// The data bytes of a piece of one frame, and of the longest piece.
const SMALL_PIECE: usize = 4096 - 56;
const PIECE: usize = 64 * 4096 - 56;

/// Writes a value as a stream, `step` bytes at a time.
fn stream(tree: &Tree, key: &[u8], value: &[u8], step: usize) -> bool {
    let mut writer = tree.writer(key).unwrap();
    value.chunks(step).for_each(|bit| writer.write_all(bit).unwrap());
    assert_eq!(writer.len(), value.len() as u64);
    writer.finish().unwrap()
}

fn read_all(mut reader: ValueReader<'_>) -> Vec<u8> {
    let mut value = Vec::new();
    reader.read_to_end(&mut value).unwrap();
    assert_eq!(value.len() as u64, reader.len());
    value
}

fn read(tree: &Tree, key: &[u8]) -> Vec<u8> {
    read_all(tree.reader(key).unwrap().unwrap())
}

/// The store's error inside the error of a reader or writer.
fn inner(error: &std::io::Error) -> &Error {
    error.get_ref().unwrap().downcast_ref().unwrap()
}

fn used_pages(store: &Store) -> u64 {
    store.stat().unwrap().used_pages
}

#[test]
fn round_trips_around_the_borders_of_pages_and_pieces() {
    // Pools whose pieces have one frame, several frames, the most frames, and pools with larger
    // tree pages.
    for (pool_pages, page_frames) in [(8, 1), (256, 1), (2048, 1), (8, 3), (64, 16)] {
        let (device, store) = memory_store(pool_pages, page_frames);
        let tree = store.create_tree("t").unwrap();
        let frames = (pool_pages * u64::from(page_frames) / 32).min(64) as u32;
        let frames = (frames / page_frames).max(1) * page_frames;
        let piece = frames as usize * 4096 - 56;
        let inline = store.limits().max_inline_entry;
        let mut lens = vec![0, 1, inline - 30, inline, inline + 1];
        for border in [4048, 4096, piece, 2 * piece, 3 * piece, 502 * piece] {
            if border <= 4 << 20 {
                lens.extend([border - 1, border, border + 1]);
            }
        }
        for (number, len) in lens.iter().copied().enumerate() {
            let value = bytes(len, number as u64);
            let step = [len.max(1), 1000, piece, piece + 1, 2 * piece + 7][number % 5];
            assert!(!stream(&tree, &number.to_be_bytes(), &value, step));
        }
        for (number, len) in lens.iter().copied().enumerate() {
            let (key, value) = (number.to_be_bytes(), bytes(len, number as u64));
            assert!(read(&tree, &key) == value, "{len} bytes");
            let mut copied = b"before".to_vec();
            assert!(tree.get_into(&key, &mut copied).unwrap());
            assert!(copied == value, "{len} bytes");
            assert!(tree.contains(&key).unwrap());
            match tree.get(&key) {
                Ok(found) => assert!(found.as_deref() == Some(&value[..]), "{len} bytes"),
                Err(Error::NeedsReader { len: found, max }) => {
                    assert!(found == len as u64 && found > max && max == store.limits().max_value);
                }
                Err(error) => panic!("{error}"),
            }
        }
        let total: usize = lens.iter().sum();
        assert_eq!(tree.stat().unwrap().value_bytes, total as u64);
        assert_eq!(tree.check().unwrap(), tree.stat().unwrap());
        assert_sound(&store);
        store.close().unwrap();
        let store = Store::open_on(device, &options(8, page_frames)).unwrap();
        assert_sound(&store);
        let tree = store.tree("t").unwrap();
        for (number, len) in lens.iter().copied().enumerate() {
            assert!(read(&tree, &number.to_be_bytes()) == bytes(len, number as u64));
            assert!(tree.remove(&number.to_be_bytes()).unwrap());
        }
        assert_sound(&store);
        all_freed(&store);
        // The headers, the catalog, the tree and the free map.
        assert!(used_pages(&store) <= 2 + 4 * u64::from(page_frames), "{}", used_pages(&store));
    }
}

/// The index has one level, then two.
#[test]
fn values_of_many_times_the_pool() {
    let (device, store) = memory_store(8, 1);
    let tree = store.create_tree("t").unwrap();
    for len in [502 * SMALL_PIECE, 502 * SMALL_PIECE + 1, 4 * 502 * SMALL_PIECE + 77] {
        let value = bytes(len, len as u64);
        stream(&tree, b"key", &value, 100_000);
        assert!(read(&tree, b"key") == value);
        assert!(store.pool_stats().resident_frames <= 8);
    }
    assert_sound(&store);
    store.close().unwrap();
    let store = Store::open_on(device, &options(8, 1)).unwrap();
    assert_sound(&store);
}

/// The smallest pool can read a value that any pool has written.
#[test]
fn what_a_large_pool_has_stored_a_small_one_reads() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(8192, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let lens = [5000, 8 * 4096 - 56, 200_000, 64 * 4096 - 57, 64 * 4096 - 55, 3_000_000, 8_000_000];
    for (number, len) in lens.into_iter().enumerate() {
        let value = bytes(len, number as u64);
        tree.upsert(&[0, number as u8], &value).unwrap();
        stream(&tree, &[1, number as u8], &value, 77_777);
    }
    store.close().unwrap();
    let store = Store::open_on(device.clone(), &options(8, 1).read_only(true)).unwrap();
    let tree = store.tree("t").unwrap();
    for (number, len) in lens.into_iter().enumerate() {
        for kind in [0, 1] {
            let (key, value) = ([kind, number as u8], bytes(len, number as u64));
            assert!(read(&tree, &key) == value, "{len} bytes, {kind}");
            let mut copied = Vec::new();
            assert!(tree.get_into(&key, &mut copied).unwrap());
            assert!(copied == value, "{len} bytes, {kind}");
            if len > 8 * 4096 {
                let error = tree.get(&key).unwrap_err();
                assert!(matches!(error, Error::NeedsReader { .. }), "{error}");
                assert!(error.to_string().contains("Tree::reader"), "{error}");
            }
        }
    }
    assert_sound(&store);
    drop((tree, store));
    // The small pool can also remove the value.
    let store = Store::open_on(device, &options(8, 1)).unwrap();
    let tree = store.tree("t").unwrap();
    for number in 0..lens.len() as u8 {
        assert!(tree.remove(&[0, number]).unwrap() && tree.remove(&[1, number]).unwrap());
    }
    assert_sound(&store);
    assert!(used_pages(&store) < 10);
}

#[test]
fn seeks_lead_anywhere() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(4096, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let value = bytes(3 * PIECE + 1234, 5);
    tree.upsert(b"whole", &value).unwrap();
    stream(&tree, b"pieces", &value, PIECE);
    tree.upsert(b"inline", &value[..100]).unwrap();
    store.close().unwrap();
    for pool in [8, 100, 4096] {
        let store = Store::open_on(device.clone(), &options(pool, 1)).unwrap();
        let tree = store.tree("t").unwrap();
        let mut random = Random(pool);
        for key in [&b"whole"[..], b"pieces", b"inline"] {
            let value = if key == b"inline" { &value[..100] } else { &value[..] };
            let mut reader = tree.reader(key).unwrap().unwrap();
            assert_eq!(reader.len(), value.len() as u64);
            assert!(!reader.is_empty());
            for round in 0..200 {
                let at = match round % 4 {
                    0 => (PIECE * (random.below(4) as usize)).saturating_sub(random.index(3)),
                    _ => random.index(value.len() + 1),
                };
                let at = at.min(value.len());
                let to = match round % 3 {
                    0 => SeekFrom::Start(at as u64),
                    1 => SeekFrom::End(at as i64 - value.len() as i64),
                    _ => SeekFrom::Current(at as i64 - reader.stream_position().unwrap() as i64),
                };
                assert_eq!(reader.seek(to).unwrap(), at as u64);
                let mut bit = vec![0; random.index(3000).min(value.len() - at)];
                reader.read_exact(&mut bit).unwrap();
                assert!(bit == value[at..at + bit.len()], "at {at}");
            }
            assert_eq!(reader.seek(SeekFrom::Start(u64::MAX)).unwrap(), u64::MAX);
            assert_eq!(reader.read(&mut [0; 9]).unwrap(), 0);
            let error = reader.seek(SeekFrom::End(i64::MIN)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            reader.rewind().unwrap();
            assert!(read_all(reader) == value);
        }
        assert!(tree.reader(b"none").unwrap().is_none());
    }
}

/// A reader reads the old value, even if the key is changed or removed. Afterwards the space is
/// freed.
#[test]
fn a_reader_keeps_its_value() {
    for (pool, len) in [(8, 100_000), (8, 9000), (64, 2000), (512, 900_000)] {
        for streamed in [false, true] {
            let device = Arc::new(MemoryDevice::new());
            let store = Store::create_on(device.clone(), &options(4096, 1)).unwrap();
            let tree = store.create_tree("t").unwrap();
            let value = bytes(len, 1);
            match streamed {
                true => _ = stream(&tree, b"key", &value, 5000),
                false => _ = tree.upsert(b"key", &value).unwrap(),
            }
            store.close().unwrap();
            let store = Store::open_on(device.clone(), &options(pool, 1)).unwrap();
            let tree = store.tree("t").unwrap();
            let mut reader = tree.reader(b"key").unwrap().unwrap();
            let second = tree.reader(b"key").unwrap().unwrap();
            let mut begin = vec![0; 1000];
            reader.read_exact(&mut begin).unwrap();
            stream(&tree, b"key", &bytes(len, 2), 5000);
            tree.remove(b"key").unwrap();
            // These values would take the pages of the old value if they were free.
            for round in 0..3 {
                stream(&tree, b"key", &bytes(len, 3 + round), 5000);
            }
            store.sync().unwrap();
            assert_sound(&store);
            let other = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
            store.drop_tree("t").unwrap();
            drop(second);
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            assert!([begin, rest].concat() == value, "{pool} {len} {streamed}");
            assert_sound(&store);
            drop(reader);
            assert_sound(&store);
            all_freed(&store);
            assert!(used_pages(&store) < 10, "{}", used_pages(&store));
            // After a crash right after the sync no page is lost, although a reader had pinned the
            // value.
            let store = Store::open_on(other, &options(64, 1)).unwrap();
            assert_sound(&store);
            assert!(read(&store.tree("t").unwrap(), b"key") == bytes(len, 5));
        }
    }
}

/// Readers and writers end while a snapshot lives, on the thread that has the snapshot.
#[test]
fn readers_and_writers_end_under_a_snapshot() {
    let (_, store) = memory_store(64, 1);
    let tree = store.create_tree("t").unwrap();
    let value = bytes(300_000, 1);
    stream(&tree, b"key", &value, 5000);
    let reader = tree.reader(b"key").unwrap().unwrap();
    let mut writer = tree.writer(b"other").unwrap();
    writer.write_all(&value).unwrap();
    tree.remove(b"key").unwrap();
    let snapshot = store.snapshot().unwrap();
    drop((reader, writer));
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
    drop(snapshot);
    assert_sound(&store);
    assert!(used_pages(&store) < 10);
}

/// Lookups see a value only after its writer has finished. A writer that is dropped leaves nothing.
#[test]
fn a_value_is_there_when_it_is_finished() {
    for len in [10, 3000, 100_000] {
        let (device, store) = memory_store(16, 1);
        let tree = store.create_tree("t").unwrap();
        tree.upsert(b"key", b"old").unwrap();
        store.sync().unwrap();
        let used = used_pages(&store);
        let mut writer = tree.writer(b"key").unwrap();
        writer.write_all(&bytes(len, 1)).unwrap();
        assert_eq!(tree.get(b"key").unwrap().as_deref(), Some(&b"old"[..]));
        assert_eq!(tree.entries().count(), 1);
        store.sync().unwrap();
        let crashed = Arc::new(MemoryDevice::from_snapshot(device.snapshot()));
        let report = store.check(&mut |_| {}).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
        drop(writer);
        assert_sound(&store);
        all_freed(&store);
        assert_eq!(used_pages(&store), used);
        assert!(!stream(&tree, b"new", &bytes(len, 2), 999));
        assert!(stream(&tree, b"key", &bytes(len, 3), 999));
        assert!(read(&tree, b"key") == bytes(len, 3) && read(&tree, b"new") == bytes(len, 2));
        // The state at the sync opens, and no page is lost.
        let store = Store::open_on(crashed, &options(16, 1)).unwrap();
        assert_sound(&store);
        let report = store.check(&mut |_| {}).unwrap();
        assert_eq!(report.pages_checked, used, "the crash lost pages");
        assert_eq!(store.tree("t").unwrap().get(b"key").unwrap().as_deref(), Some(&b"old"[..]));
    }
}

/// A store that is closed while a writer writes a value has none of it.
#[test]
fn closing_ends_writers_and_readers() {
    let (device, store) = memory_store(16, 1);
    let tree = store.create_tree("t").unwrap();
    stream(&tree, b"key", &bytes(100_000, 1), 999);
    let used = used_pages(&store);
    let mut reader = tree.reader(b"key").unwrap().unwrap();
    let mut writer = tree.writer(b"other").unwrap();
    writer.write_all(&bytes(100_000, 2)).unwrap();
    store.clone().close().unwrap();
    let error = reader.read(&mut [0; 10]).unwrap_err();
    assert!(matches!(inner(&error), Error::Closed), "{error}");
    let error = writer.write_all(&bytes(10_000, 3)).unwrap_err();
    assert!(matches!(inner(&error), Error::Closed), "{error}");
    assert!(writer.finish().is_err());
    drop(reader);
    assert!(matches!(tree.reader(b"key"), Err(Error::Closed)));
    assert!(matches!(tree.writer(b"key"), Err(Error::Closed)));
    drop((tree, store));
    let store = Store::open_on(device, &options(16, 1)).unwrap();
    assert_sound(&store);
    assert!(used_pages(&store) <= used + 1);
}

#[test]
fn a_tree_that_is_dropped_takes_no_value() {
    let (_, store) = memory_store(16, 1);
    let tree = store.create_tree("t").unwrap();
    let mut writer = tree.writer(b"key").unwrap();
    writer.write_all(&bytes(50_000, 1)).unwrap();
    store.drop_tree("t").unwrap();
    assert!(matches!(writer.finish(), Err(Error::NoSuchTree(_))));
    assert!(matches!(tree.writer(b"key"), Err(Error::NoSuchTree(_))));
    assert_sound(&store);
    assert!(used_pages(&store) < 8);
}

#[test]
fn limits_are_errors() {
    let (_, store) = memory_store(16, 1);
    let tree = store.create_tree("t").unwrap();
    let too_long = vec![0; store.limits().max_key + 1];
    assert!(matches!(tree.writer(&too_long), Err(Error::KeyTooLong { .. })));
    let error = tree.upsert(b"key", &bytes(100_000, 1)).unwrap_err();
    assert!(matches!(error, Error::ValueTooLong { .. }), "{error}");
    assert!(error.to_string().contains("Tree::writer"), "{error}");
    assert_eq!(store.limits().max_streamed, 1 << 48);
    // An update in place of a value that is in pieces and too long for that.
    stream(&tree, b"key", &bytes(4500, 1), 999);
    assert!(tree.update(b"key", |value| value[0] ^= 1).unwrap());
    let mut expected = bytes(4500, 1);
    expected[0] ^= 1;
    assert!(tree.get(b"key").unwrap().as_deref() == Some(&expected[..]));
    stream(&tree, b"key", &bytes(200_000, 1), 999);
    let error = tree.update(b"key", |value| value[0] ^= 1).unwrap_err();
    assert!(matches!(error, Error::NeedsReader { .. }), "{error}");
    assert!(read(&tree, b"key") == bytes(200_000, 1));
    assert_sound(&store);
}

/// The format version says whether the store has, or had, values in pieces.
#[test]
fn the_version_of_the_format_goes_up_with_the_first_value_in_pieces() {
    let (device, store) = memory_store(16, 1);
    let tree = store.create_tree("t").unwrap();
    stream(&tree, b"short", &bytes(3000, 1), 999);
    let version = |store: &Store| store.stat().unwrap().format_version;
    assert_eq!(version(&store), 1);
    stream(&tree, b"long", &bytes(10_000, 1), 999);
    assert_eq!(version(&store), 2);
    tree.remove(b"long").unwrap();
    store.close().unwrap();
    assert_eq!(version(&Store::open_on(device, &options(16, 1)).unwrap()), 2);
}

/// A flipped bit anywhere in a value is an error before the reader returns a byte of that piece.
#[test]
fn damage_is_noticed_before_bytes_are_handed_out() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(4096, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let value = bytes(PIECE * 2 + 500, 1);
    tree.upsert(b"whole", &value).unwrap();
    stream(&tree, b"pieces", &value, 5000);
    store.close().unwrap();
    let image = device.snapshot();
    let mut random = Random(7);
    let mut met = [0, 0];
    for round in 0..60 {
        let mut image = image.clone();
        let at = 5 * 4096 + random.index(image.len() - 5 * 4096);
        image[at] ^= 1 << random.below(8);
        let device = Arc::new(MemoryDevice::from_snapshot(image));
        let pool = [8, 64, 4096][round % 3];
        let Ok(store) = Store::open_on(device, &options(pool, 1).read_only(true)) else { continue };
        let Ok(tree) = store.tree("t") else { continue };
        for (kind, key) in [&b"whole"[..], b"pieces"].into_iter().enumerate() {
            let mut found = Vec::new();
            let error = match tree.reader(key) {
                Ok(None) => panic!("{key:?} is gone"),
                Ok(Some(mut reader)) => match reader.read_to_end(&mut found) {
                    Ok(_) => {
                        assert!(found == value);
                        continue;
                    }
                    Err(error) => {
                        assert!(kind == 1, "a whole value is checked at first");
                        inner(&error).to_string()
                    }
                },
                Err(error) => error.to_string(),
            };
            assert!(error.contains("damaged"), "{error}");
            assert!(value.starts_with(&found));
            assert!(!store.check(&mut |_| {}).unwrap().is_sound());
            met[kind] += 1;
        }
    }
    assert!(met.iter().all(|met| *met > 5), "{met:?}");
}

/// Readers, writers and other changes use the same keys at the same time, in a small pool.
#[test]
fn streams_of_many_threads() {
    let device = Arc::new(MemoryDevice::new());
    let store = Store::create_on(device.clone(), &options(96, 1)).unwrap();
    let tree = store.create_tree("t").unwrap();
    let rounds = 40 * u64::from(common::rounds(20));
    let len_of = |seed: u64| [100, 5000, 30_000, 90_000][(seed % 4) as usize];
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (tree, store) = (&tree, &store);
            scope.spawn(move || {
                let mut random = Random(thread);
                for round in 0..rounds {
                    let key = [random.below(3) as u8];
                    let seed = thread * rounds + round;
                    match random.below(6) {
                        0 => drop(tree.remove(&key).unwrap()),
                        1 => {
                            let mut writer = tree.writer(&key).unwrap();
                            writer.write_all(&bytes(len_of(seed), seed)).unwrap();
                        }
                        2 if round % 7 == 0 => store.sync().unwrap(),
                        2 | 3 => {
                            let value = [&seed.to_le_bytes()[..], &bytes(len_of(seed), seed)];
                            stream(tree, &key, &value.concat(), 3000);
                        }
                        _ => {
                            let Some(reader) = tree.reader(&key).unwrap() else { continue };
                            let value = read_all(reader);
                            let (head, value) = value.split_first_chunk().unwrap();
                            let seed = u64::from_le_bytes(*head);
                            assert!(*value == bytes(len_of(seed), seed));
                        }
                    }
                }
            });
        }
    });
    assert_sound(&store);
    store.close().unwrap();
    let store = Store::open_on(device, &options(8, 1)).unwrap();
    assert_sound(&store);
}

/// A reader that has found a leaf reads its values. So a value in pieces goes after its leaf.
#[test]
fn readers_see_a_value_in_pieces_or_none_while_the_tree_is_cleared() {
    let (_, store) = memory_store(256, 1);
    let tree = store.create_tree("t").unwrap();
    let value = bytes(3 * SMALL_PIECE, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stopping = SetWhenDropped(&stop);
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Some(reader) = tree.reader(b"key").unwrap() {
                        assert!(read_all(reader) == value);
                    }
                }
            });
        }
        let (began, mut rounds) = (Instant::now(), 0);
        // For some time, and some rounds, however rarely this thread runs.
        while rounds < 50 || began.elapsed() < Duration::from_secs(1) {
            rounds += 1;
            stream(&tree, b"key", &value, 4096);
            // The tree has a leaf below the root.
            for number in 0..60_u8 {
                tree.upsert(&[number; 40], &[number; 100]).unwrap();
            }
            tree.clear().unwrap();
        }
    });
    assert_sound(&store);
}
