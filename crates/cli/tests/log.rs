//! `vellum log`: the files and records of a log, its damage, its end.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use support::{Folder, fails, ok, run, text};
use vellum_log::{FileLog, FileLogOptions, Log, LogError, LogOptions, RecordRef, SyncMethod};

/// A log with seven blocks in a file; each record has a block. The records of a test fit one file,
/// because a log that needs its next file for the closing block may close without it.
fn log(folder: &Folder, records: &[&[u8]]) -> Log {
    let mut files = FileLogOptions::default();
    (files.segment_bytes, files.most_bytes, files.sync_method) =
        (32768, 1 << 20, Some(SyncMethod::BufferedSync));
    let device = Arc::new(FileLog::open(folder.path("wal"), &files).unwrap());
    let visit = |_: RecordRef<'_>| Ok::<_, LogError>(());
    let (log, _) = Log::open(device, &LogOptions::default(), None, visit).unwrap();
    for record in records {
        log.wait_durable(log.append(record).unwrap()).unwrap();
    }
    log
}

#[test]
fn files_records_and_the_end_are_listed_while_the_log_is_open() {
    let folder = Folder::new();
    let open = log(&folder, &[b"first", b"\x00second one, which is longer"]);
    let wal = folder.name("wal");
    let shown = text(&["log", &wal]);
    let lines: Vec<_> = shown.lines().collect();
    assert!(lines[0].contains("begins at 0, files of 32.0 KiB"), "{shown}");
    assert_eq!(lines[1], "segment-0000: segment 0");
    let records = lines.iter().filter(|line| line.contains("opening")).collect::<Vec<_>>();
    assert_eq!(records.len(), 2, "{shown}");
    for part in ["48", "5 bytes", "block 0", "opening 1", "6669727374", "first"] {
        assert!(records[0].contains(part), "{part}: {shown}");
    }
    assert!(records[1].ends_with(".second one, whi..."), "{shown}");
    assert!(lines.last().unwrap().starts_with("ends at 8192: the next block"), "{shown}");
    open.close().unwrap();
    assert!(text(&["log", &wal]).ends_with("ends at 12288: the log was closed there\n"));
    let from = text(&["log", &wal, "--from", "4144"]);
    assert_eq!(from.lines().filter(|line| line.contains("opening")).count(), 1);
    assert!(fails(&["log", &wal, "--from", "99999999"]).contains("the log ends at"));
}

#[test]
fn json_has_an_object_for_each_line() {
    let folder = Folder::new();
    log(&folder, &[b"first", b"second"]).close().unwrap();
    let lines = ok(&["log", &folder.name("wal"), "--json"]);
    let lines = String::from_utf8(lines).unwrap();
    let objects =
        lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let objects: Vec<_> = objects.collect();
    let types: Vec<_> = objects.iter().map(|object| object["type"].as_str().unwrap()).collect();
    assert_eq!(types[0], "log");
    assert!(types.ends_with(&["file", "record", "record", "end"]), "{lines}");
    let record = &objects[types.len() - 3];
    assert_eq!((&record["lsn"], &record["len"]), (&48.into(), &5.into()));
    assert_eq!((&record["opening"], &record["begins_hex"]), (&1.into(), &"6669727374".into()));
    let end = objects.last().unwrap();
    assert_eq!((&end["lsn"], &end["blocks_left"]), (&12288.into(), &0.into()));
}

#[test]
fn damage_is_listed_in_its_place_and_the_command_fails() {
    let folder = Folder::new();
    log(&folder, &[b"first", b"second", b"third"]).close().unwrap();
    let file = folder.path("wal/segment-0000");
    let opened = fs::OpenOptions::new().write(true).open(&file).unwrap();
    opened.write_all_at(b"damage", 2 * 4096 + 100).unwrap();
    let before = fs::read(&file).unwrap();
    let output = run(&["log", &folder.name("wal")]);
    assert_eq!(output.status.code(), Some(1));
    let shown = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = shown.lines().collect();
    let at = lines.iter().position(|line| line.starts_with("damage: ")).unwrap();
    assert!(lines[at].contains("at 4096"), "{shown}");
    assert!(lines[at - 1].contains("first") && lines[at + 1].contains("third"), "{shown}");
    assert!(lines.last().unwrap().starts_with("ends at 16384"), "{shown}");
    assert!(fs::read(&file).unwrap() == before, "the log was changed");
    // A folder without a log, and one that does not exist.
    fs::create_dir(folder.path("other")).unwrap();
    assert!(fails(&["log", &folder.name("other")]).contains("no file of a log"));
    assert!(fails(&["log", &folder.name("none")]).contains("none"));
    assert!(!folder.path("none").exists());
}
