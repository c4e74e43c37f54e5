//! Logs with owners: a log that a store may need is not made anew by another.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustix::fs::{CWD, Mode, mkfifoat};
use tempfile::tempdir;
use vellum_log::{FileLog, FileLogOptions, Log, LogDevice as _, LogError, LogOptions, SyncMethod};

fn options() -> FileLogOptions {
    let mut options = FileLogOptions::default();
    (options.segment_bytes, options.most_bytes) = (16384, 8 * 16384);
    options.sync_method = Some(SyncMethod::BufferedSync);
    options
}

/// The owner needs no older log of its own.
fn over() -> Result<bool, LogError> {
    Ok(true)
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn open(log: FileLog) -> (Arc<FileLog>, Log) {
    let files = Arc::new(log);
    let opened = Log::open(files.clone(), &LogOptions::default(), None, |_| Ok::<_, LogError>(()));
    (files, opened.unwrap().0)
}

#[test]
fn a_log_without_an_owner_gives_way_and_an_owned_one_does_not() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("log");
    drop(FileLog::create(&path, 7, &options(), over).unwrap());
    let (files, log) = open(FileLog::create(&path, 8, &options(), over).unwrap());
    files.own(8).unwrap();
    log.wait_durable(log.append(b"record").unwrap()).unwrap();
    drop((log, files));
    let before = names(&path);

    let refused = FileLog::create(&path, 7, &options(), over).unwrap_err();
    assert!(matches!(refused, LogError::Unfit { .. }), "{refused}");
    assert!(refused.to_string().contains("another store"), "{refused}");
    assert_eq!(names(&path), before);
    assert!(before[0].starts_with("owner-") && before.len() > 1, "{before:?}");

    let (files, log) = open(FileLog::create(&path, 8, &options(), over).unwrap());
    let mut scan = log.scan(None).unwrap();
    assert!(scan.next_record().unwrap().is_none(), "the log is new");
    files.own(8).unwrap();
    files.remove().unwrap();
    assert_eq!(names(&path), [""; 0]);
    assert!(log.append(&[7; 100_000]).is_err());
    // The folder is free, whatever handles live.
    drop(FileLog::create(&path, 7, &options(), over).unwrap());
    drop((log, files));
}

#[test]
fn a_log_goes_only_if_its_owner_says_so() {
    let folder = tempdir().unwrap();
    let path = folder.path();
    // No log, and one without an owner, need no answer.
    let asked = || -> Result<bool, LogError> { panic!("the owner was asked") };
    drop(FileLog::create(path, 7, &options(), asked).unwrap());
    let (files, log) = open(FileLog::create(path, 7, &options(), asked).unwrap());
    files.own(7).unwrap();
    log.wait_durable(log.append(b"record").unwrap()).unwrap();
    drop((log, files));
    let before = names(path);

    let needed = FileLog::create(path, 7, &options(), || Ok(false)).unwrap_err();
    assert!(needed.to_string().contains("another copy"), "{needed}");
    let failed = FileLog::create(path, 7, &options(), || Err(LogError::Closed)).unwrap_err();
    assert!(matches!(failed, LogError::Closed), "{failed}");
    assert_eq!(names(path), before);
    // The folder is locked, and free again afterwards.
    let locked = || Ok(matches!(FileLog::open(path, &options()), Err(LogError::InUse { .. })));
    drop(FileLog::create(path, 7, &options(), locked).unwrap());
}

#[test]
fn a_log_of_another_program_is_left_alone() {
    let folder = tempdir().unwrap();
    let (_, log) = open(FileLog::open(folder.path(), &options()).unwrap());
    log.wait_durable(log.append(b"record").unwrap()).unwrap();
    drop(log);
    let refused = FileLog::create(folder.path(), 7, &options(), over).unwrap_err();
    assert!(refused.to_string().contains("another program"), "{refused}");
    let files = FileLog::open(folder.path(), &options()).unwrap();
    assert!(!files.scan().is_empty());
}

#[test]
fn a_log_that_is_stopped_gives_its_device_back_under_live_handles() {
    let folder = tempdir().unwrap();
    let (files, log) = open(FileLog::create(folder.path(), 7, &options(), over).unwrap());
    let durable = log.append(b"durable").unwrap();
    log.wait_durable(durable).unwrap();
    let lost = log.append(b"lost").unwrap();
    log.stop();
    assert!(matches!(log.append(b"late"), Err(LogError::Closed)));
    assert!(matches!(log.wait_durable(lost), Err(LogError::Closed)));
    log.wait_durable(durable).unwrap();
    let options = LogOptions::default();
    let (second, _) = Log::open(files.clone(), &options, None, |_| Ok::<_, LogError>(())).unwrap();
    // The first one has given the device back already, and does not do so again.
    drop(log);
    let third = Log::open(files, &options, None, |_| Ok::<_, LogError>(()));
    assert!(matches!(third, Err(LogError::Taken)));
    second.wait_durable(second.append(b"more").unwrap()).unwrap();
}

/// Handles that make a log, and remove it with its folder, meet each other at any moment. Each gets
/// the folder, or is told that another one has it.
#[test]
fn handles_that_race_for_a_folder_have_it_or_find_it_in_use() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("log");
    let race = || {
        let mut made = 0;
        for _ in 0..100 {
            match FileLog::create(&path, 7, &options(), over) {
                Ok(log) => {
                    log.remove().unwrap();
                    made += 1;
                }
                Err(error) => assert!(matches!(error, LogError::InUse { .. }), "{error}"),
            }
            FileLog::remove_empty_folder(&path).unwrap();
        }
        made
    };
    let made: Vec<i32> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(made.iter().sum::<i32>() > 0);
    assert!(!path.exists());
}

#[test]
fn only_a_folder_becomes_a_log() {
    let folder = tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    mkfifoat(CWD, &pipe, Mode::RWXU).unwrap();
    let error = FileLog::create(&pipe, 7, &options(), over).unwrap_err();
    assert!(error.to_string().contains("Not a directory"), "{error}");
}
