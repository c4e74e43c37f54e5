//! Files of every backend that works here: in a guest of the lab with its persistent memory, with
//! file tables; elsewhere with `mmap`.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use vellum_dax::{
    Access, Backend, BackendChoice, DaxFile, Durability, Errno, Error, Heap, HeapOptions, Options,
    probe, tables,
};

/// Each backend with a folder for its files.
fn backends() -> Vec<(Backend, TempDir)> {
    let mut found = vec![(Backend::Mmap, tempfile::tempdir().unwrap())];
    if let Some(folder) = folder_for_tables() {
        found.push((Backend::Mmap, TempDir::new_in(&folder).unwrap()));
        found.push((Backend::Table, TempDir::new_in(&folder).unwrap()));
    }
    found
}

/// A folder whose files can have tables.
fn folder_for_tables() -> Option<PathBuf> {
    let folder = Path::new("/pmem");
    if probe().backend != Backend::Table {
        eprintln!("without file tables: {}", probe().about);
        return None;
    }
    let file = tempfile::NamedTempFile::new_in(folder).ok()?;
    let found = DaxFile::open(file.path(), &only(Backend::Table));
    found.inspect_err(|error| eprintln!("without file tables in {folder:?}: {error}")).ok()?;
    Some(folder.to_owned())
}

fn only(backend: Backend) -> Options {
    Options { backend: BackendChoice::Only(backend), ..Options::default() }
}

/// Calls the function for a new file of each backend, with each durability.
fn each(work: impl Fn(&Path, &Options)) {
    for (backend, folder) in backends() {
        for durability in [Durability::Synced, Durability::Flushed] {
            println!("{backend}, {durability:?}");
            let path = folder.path().join(format!("{durability:?}"));
            work(&path, &Options { durability, ..only(backend) });
        }
    }
}

#[test]
fn a_mapping_shows_the_file_and_what_is_appended() {
    each(|path, options| {
        fs::write(path, vec![7; 10_000]).unwrap();
        let file = DaxFile::open_to_write(path, options).unwrap();
        assert_eq!(BackendChoice::Only(file.backend()), options.backend);
        let (mapping, reader) =
            (file.map(Access::ReadWrite).unwrap(), file.map(Access::Read).unwrap());
        let mut bytes = [0; 3];
        mapping.read_at(9_997, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 3]);
        assert_eq!(file.append(&[8; 5_000]).unwrap(), 10_000);
        reader.read_at(9_999, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 8, 8]);
        mapping.write_at(14_000, &[9; 1_000]).unwrap();
        mapping.write_durably(0, &[1; 100]).unwrap();
        mapping.persist(14_000, 1_000).unwrap();
        file.sync().unwrap();
        let mut wanted = vec![1; 100];
        for (byte, count) in [(7, 9_900), (8, 4_000), (9, 1_000)] {
            wanted.extend(vec![byte; count]);
        }
        assert!(fs::read(path).unwrap() == wanted);
        // SAFETY: no process changes the file.
        #[allow(unsafe_code)]
        let seen = unsafe { reader.bytes(15_000).unwrap() };
        assert!(seen == wanted);
    });
}

#[test]
fn ranges_and_rights_are_checked() {
    each(|path, options| {
        fs::write(path, [7; 100]).unwrap();
        let file = DaxFile::open(path, options).unwrap();
        assert!(matches!(file.map(Access::ReadWrite), Err(Error::ReadOnly { .. })));
        assert!(matches!(file.append(b"more"), Err(Error::ReadOnly { .. })));
        assert!(file.extend(200).is_err());
        let mapping = file.map(Access::Read).unwrap();
        assert!(matches!(mapping.write_at(0, b"x"), Err(Error::ReadOnly { .. })));
        assert!(matches!(mapping.write_durably(0, b"x"), Err(Error::ReadOnly { .. })));
        for (offset, bytes) in [(100, 1), (99, 2), (u64::MAX, 1), (1 << 60, 1)] {
            let error = mapping.read_at(offset, &mut vec![0; bytes]).unwrap_err();
            assert!(matches!(error, Error::OutOfRange { length: 100, .. }), "{error}");
            assert!(mapping.persist(offset, bytes).is_err());
        }
        mapping.read_at(100, &mut []).unwrap();
        // The file becomes shorter.
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(10).unwrap();
        assert_eq!(mapping.length().unwrap(), 10);
        assert!(mapping.read_at(9, &mut [0; 2]).is_err());
        assert_eq!(fs::read(path).unwrap(), [7; 10]);
    });
}

#[test]
fn an_extended_file_is_zeros_in_place() {
    each(|path, options| {
        let file = DaxFile::create(path, options).unwrap();
        file.extend(5_000).unwrap();
        let mapping = file.map(Access::ReadWrite).unwrap();
        file.extend(1 << 20).unwrap();
        file.extend(10).unwrap();
        assert_eq!(mapping.length().unwrap(), 1 << 20);
        mapping.write_at((1 << 20) - 5, b"Hello").unwrap();
        if let Some(stat) = file.stat().unwrap() {
            assert_eq!((stat.pages, stat.present, stat.served_by_file), (256, 256, 0));
            assert_eq!((stat.mappings, stat.is_stale), (1, false));
        }
        let mut wanted = vec![0; (1 << 20) - 5];
        wanted.extend(b"Hello");
        assert!(fs::read(path).unwrap() == wanted);
    });
}

#[test]
fn what_cannot_have_a_table_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plain");
    fs::write(&path, b"plain").unwrap();
    let error = DaxFile::open(&path, &only(Backend::Table)).unwrap_err();
    let Error::NoTable { reason } = error else { panic!("{error}") };
    let file = DaxFile::open(&path, &Options::default()).unwrap();
    assert_eq!((file.backend(), file.why_no_table()), (Backend::Mmap, Some(&reason[..])));
    assert_eq!(file.stat().unwrap(), None);
    let wanted = if probe().backend == Backend::Table { "-o dax" } else { "vellum.ko" };
    assert!(reason.contains(wanted), "{reason}");
    let error = DaxFile::open(folder.path().join("nowhere"), &Options::default()).unwrap_err();
    assert!(error.to_string().starts_with("opening a file: "), "{error}");
}

/// Folders for files that heaps map in each way.
fn folders_for_heaps() -> Vec<(Backend, TempDir)> {
    let mut found = vec![(Backend::Mmap, tempfile::tempdir().unwrap())];
    if let Some(folder) = folder_for_tables() {
        found.push((Backend::Table, TempDir::new_in(folder).unwrap()));
    }
    found
}

fn heap(access: Access) -> Heap {
    Heap::new(&HeapOptions { capacity: 1, ..HeapOptions::new(access) }).unwrap()
}

#[test]
fn a_heap_maps_files_and_ranges() {
    let (reader, writer) = (heap(Access::Read), heap(Access::ReadWrite));
    for (backend, folder) in folders_for_heaps() {
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 4096 + at) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        let mapped = reader.map(&file).unwrap();
        assert_eq!((mapped.backend(), mapped.length()), (backend, bytes.len()));
        // SAFETY: nothing changes the file before the reference ends.
        #[allow(unsafe_code)]
        let seen = unsafe { mapped.bytes() };
        assert!(seen == bytes);
        let mut some = [0; 300];
        for (offset, length) in [(0, 300), (5_000, 4_096), ((2 << 20) - 100, 300), (100, 3 << 20)] {
            let range = reader.map_range(&file, offset, length).unwrap();
            assert_eq!((range.backend(), range.length() as u64), (backend, length));
            range.read_at(0, &mut some).unwrap();
            assert!(some == bytes[offset as usize..][..300]);
        }
        let range = writer.map_range(&file, 7_000, 100).unwrap();
        range.write_at(50, b"hello").unwrap();
        range.sync().unwrap();
        mapped.read_at(7_050, &mut some[..5]).unwrap();
        assert_eq!(&some[..5], b"hello");
        assert_eq!(
            range.read_at(90, &mut some[..11]),
            Err(Error::OutOfRange { start: 90, end: 101, length: 100 })
        );
        assert!(matches!(mapped.write_at(0, b"x"), Err(Error::ReadOnly { .. })));
        let only_read = fs::File::open(&path).unwrap();
        assert!(matches!(writer.map(&only_read), Err(Error::ReadOnly { .. })));
        // Tables that the program has open, with their durability.
        for durability in [Durability::Synced, Durability::Flushed] {
            let options = Options { durability, ..Options::default() };
            let opened = DaxFile::open_to_write(&path, &options).unwrap();
            let mapped = opened.map_ephemeral(&writer).unwrap();
            assert_eq!((mapped.backend(), mapped.length()), (backend, bytes.len()));
            mapped.write_at(0, b"again").unwrap();
            mapped.sync().unwrap();
        }
        let empty = fs::File::create_new(folder.path().join("empty")).unwrap();
        let empty_read = fs::File::open(folder.path().join("empty")).unwrap();
        assert_eq!(reader.map(&empty_read).unwrap().length(), 0);
        assert_eq!(reader.map(&empty).unwrap().read_at(0, &mut []), Ok(()));
        // A hole longer than a region of the heap.
        file.set_len(5 << 30).unwrap();
        let long = reader.map(&file).unwrap();
        assert_eq!((long.backend(), long.length()), (Backend::Mmap, 5 << 30));
        long.read_at(4 << 30, &mut some).unwrap();
        assert_eq!(some, [0; 300]);
    }
}

#[test]
fn a_heap_without_room_maps_all_the_same() {
    let heap = heap(Access::Read);
    for (_, folder) in folders_for_heaps() {
        let path = folder.path().join("file");
        fs::write(&path, b"bytes").unwrap();
        let file = fs::File::open(&path).unwrap();
        let all: Vec<_> = (0..600).map(|_| heap.map(&file).unwrap()).collect();
        let mut bytes = [0; 5];
        for mapped in &all {
            mapped.read_at(0, &mut bytes).unwrap();
            assert_eq!(&bytes, b"bytes");
        }
        let by_table = all.iter().filter(|mapped| mapped.backend() == Backend::Table).count();
        assert!(by_table == 0 || by_table == 512, "{by_table}");
    }
    heap.flush().unwrap();
    if let Some(stat) = heap.stat().unwrap() {
        assert_eq!((stat.mapped, stat.waiting), (stat.unmapped, 0), "{stat:?}");
    } else {
        assert!(heap.why_no_heap().is_some() && heap.backend() == Backend::Mmap);
    }
}

#[test]
fn a_batch_has_bounds() {
    for batch in [0, 513, u32::MAX] {
        let options = HeapOptions { batch: Some(batch), ..HeapOptions::new(Access::Read) };
        let error = Heap::new(&options).unwrap_err();
        assert!(matches!(error, Error::System { errno: Errno::INVAL, .. }), "{error}");
    }
}

#[test]
fn tables_outlive_their_last_user() {
    let Some(folder) = folder_for_tables() else {
        // Where another folder has tables, the module counts those.
        assert_eq!(tables().unwrap().is_some(), probe().backend == Backend::Table);
        return;
    };
    let folder = TempDir::new_in(folder).unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; 10_000]).unwrap();
    let open = || DaxFile::open(&path, &only(Backend::Table)).unwrap();
    let before = open().stat().unwrap();
    let kept = tables().unwrap().unwrap();
    assert!(kept.kept > 0 && kept.kept_bytes >= kept.kept * 4_096);
    assert!(kept.kept_most >= kept.kept_bytes && kept.tables >= kept.kept);
    assert_eq!(open().stat().unwrap(), before);
    // Other tests may use kept tables at the same time.
    assert!(tables().unwrap().unwrap().resumed > kept.resumed);
}
