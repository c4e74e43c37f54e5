//! A full log and a full disk: records are refused before they are taken, and the log goes on.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use tempfile::tempdir;
use vellum_log::{FileLog, FileLogOptions, Log, LogError, LogOptions, Lsn, RecordRef, SyncMethod};
use vellum_testing::small_disk::SmallDisk;

const SEGMENT: u64 = 64 << 10;

fn open(folder: &Path, most: u64) -> (Log, usize) {
    let mut options = FileLogOptions::default();
    (options.segment_bytes, options.most_bytes) = (SEGMENT, most);
    options.sync_method = Some(SyncMethod::BufferedSync);
    let device = Arc::new(FileLog::open(folder, &options).unwrap());
    let mut found = 0;
    let opened = Log::open(device, &LogOptions::default(), None, |_| {
        found += 1;
        Ok::<_, LogError>(())
    });
    (opened.unwrap().0, found)
}

/// Appends until there is no room; returns the last two records, how many, and the error.
fn fill(log: &Log) -> ([Lsn; 2], usize, LogError) {
    let (mut last, mut count) = ([Lsn(0); 2], 0);
    loop {
        match log.append(&[9; 3000]) {
            Ok(lsn) => last = [last[1], lsn],
            Err(error) => return (last, count, error),
        }
        log.wait_durable(last[1]).unwrap();
        count += 1;
    }
}

fn is_refused_and_goes_on(folder: &Path, most: u64) {
    let (log, _) = open(folder, most);
    let (last, count, error) = fill(&log);
    let LogError::Full { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull, "{error}");
    assert!(count >= 30, "{count} records before: {error}");
    assert_eq!(log.read(last[1]).unwrap(), [9; 3000]);
    assert!(matches!(log.append(&[1]), Err(LogError::Full { .. })), "full is full");
    log.trim(last[0]).unwrap();
    let lsn = log.append(b"after").unwrap();
    log.wait_durable(lsn).unwrap();
    assert_eq!(log.read(lsn).unwrap(), b"after");
    let end = fill(&log).1;
    drop(log);
    let (log, found) = open(folder, most);
    assert!(found > end, "{found} of {end}");
    drop(log);
}

#[test]
fn the_bound_refuses_records() {
    let folder = tempdir().unwrap();
    is_refused_and_goes_on(folder.path(), 3 * SEGMENT);
    let bytes: u64 = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|f| f.unwrap().metadata().unwrap().len())
        .sum();
    assert!(bytes <= 3 * SEGMENT, "{bytes}");
}

#[test]
fn a_full_disk_refuses_records() {
    let place = tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(place.path(), 300) else { return };
    let folder = disk.path().join("log");
    is_refused_and_goes_on(&folder, 1 << 30);
    // Nor has the probe any room: what is there is read all the same.
    std::fs::write(disk.path().join("rest"), [1; 400_000]).unwrap_err();
    let mut options = FileLogOptions::default();
    options.segment_bytes = SEGMENT;
    let device = Arc::new(FileLog::open(&folder, &options).unwrap());
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (log, _) = Log::open(device, &LogOptions::default(), None, visit).unwrap();
    assert!(log.scan(None).unwrap().count() > 0);
}

#[test]
fn a_new_log_that_finds_no_room_leaves_nothing() {
    let place = tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(place.path(), 300) else { return };
    let folder = disk.path().join("log");
    let mut options = FileLogOptions::default();
    options.segment_bytes = 1 << 20;
    let refused = FileLog::create(&folder, 7, &options, || Ok(true)).unwrap_err();
    assert!(matches!(refused, LogError::Full { .. }), "{refused}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}
