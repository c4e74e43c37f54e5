//! `vellum dax`, also where there are no file tables.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use support::{fails, ok, text};

#[test]
fn a_file_without_a_table_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"bytes").unwrap();
    let path = path.to_str().unwrap();
    let probe = text(&["dax", "probe", path]);
    assert!(probe.contains("files are mapped by: ") && probe.contains(": mmap, as "), "{probe}");
    assert!(probe.contains("ephemeral mappings are made by: "), "{probe}");
    let value: Value = serde_json::from_slice(&ok(&["dax", "probe", path, "--json"])).unwrap();
    assert_eq!(value["file"]["backend"], "mmap");
    let why = fails(&["dax", "stat", path]);
    assert!(why.contains("has no file table: "), "{why}");
    let why = fails(&["dax", "stat", "/nowhere/at/all"]);
    assert!(why.contains("/nowhere/at/all: opening a file: "), "{why}");
}

#[test]
fn a_file_with_a_table_shows_it() {
    if !Path::new("/dev/vellum-dax").exists() || !Path::new("/pmem/lost+found").exists() {
        eprintln!("skipped: no file tables here");
        return;
    }
    let folder = tempfile::TempDir::new_in("/pmem").unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; 10 << 20]).unwrap();
    let path = path.to_str().unwrap();
    let stat = text(&["dax", "stat", path]);
    assert!(stat.contains("2560, of which 2560 need no fault"), "{stat}");
    let value: Value = serde_json::from_slice(&ok(&["dax", "stat", path, "--json"])).unwrap();
    assert_eq!((&value["present_pages"], &value["mappings"]), (&2_560.into(), &0.into()));
    assert_eq!(value["ephemeral_mappings"], 0);
    let probe: Value = serde_json::from_slice(&ok(&["dax", "probe", "--json"])).unwrap();
    assert_eq!((&probe["machine"]["ephemeral"], &probe["file"]), (&"table".into(), &Value::Null));
    // The command above has used the table, and it was the last.
    let tables = text(&["dax", "tables"]);
    assert!(tables.contains(" pages 2560 ") && tables.contains(" kept 1 "), "{tables}");
    let last = tables.lines().last().unwrap();
    assert!(last.contains(" used again") && !last.contains(" 0 are kept"), "{last}");
}
