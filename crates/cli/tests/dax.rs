//! `vellum dax`, also where there are no file tables.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode};
use serde_json::Value;
use support::{command, failed, fails, ok, run, text};
use vellum_dax::{Options, ZeroPool};
use vellum_testing::patience::eventually;

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
    let why = fails(&["dax", "store", "/proc/version"]);
    assert!(why.contains("/proc/version: asking the file system"), "{why}");
    let why = fails(&["dax", "stat", "/nowhere/at/all"]);
    assert!(why.contains("/nowhere/at/all: opening a file: "), "{why}");
}

/// The opening of a FIFO would wait for ever for another process.
#[test]
fn what_is_no_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let (fifo, folder) = (fifo.to_str().unwrap(), folder.path().to_str().unwrap());
    for ways in [&["probe"][..], &["stat"], &["store"], &["store", "--forget"]] {
        for (path, kind) in [(fifo, "a FIFO"), (folder, "a folder"), ("/dev/null", "a device")] {
            let mut command = command(&[&["dax"], ways, &[path]].concat());
            let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let start = Instant::now();
            while child.try_wait().unwrap().is_none() {
                if start.elapsed() > Duration::from_secs(60) {
                    child.kill().unwrap();
                    panic!("{ways:?} waits for {path}");
                }
                thread::sleep(Duration::from_millis(2));
            }
            let said = failed(child.wait_with_output().unwrap());
            assert!(said.contains(&format!("{path}: it is {kind}, not a regular file")), "{said}");
        }
    }
    let why = fails(&["dax", "prezero", fifo, "--once"]);
    assert!(why.contains(fifo), "{why}");
}

#[test]
fn zeroed_files_are_kept_ready() {
    let folder = tempfile::tempdir().unwrap();
    let pool = folder.path().join("pool");
    let pool = pool.to_str().unwrap();
    let ways =
        ["dax", "prezero", pool, "--files", "64KiB:3", "--files", "1MiB:1", "--rate", "1GiB"];
    let stat: Value =
        serde_json::from_slice(&ok(&[&ways[..], &["--once", "--json"]].concat())).unwrap();
    assert_eq!((&stat["ready_files"], &stat["zeroed_files"]), (&4.into(), &4.into()));
    assert_eq!((&stat["ready_bytes"], &stat["failure"]), (&1_245_184.into(), &Value::Null));
    // The second time nothing is left to do.
    let shown = text(&[&ways[..], &["--once"]].concat());
    assert!(
        shown.contains(": 4 files are ready, 1.2 MiB; 0 zeroed by this command, 0 B"),
        "{shown}"
    );
    for (wrong, why) in [
        (["dax", "prezero", "/", "--once"], "cannot be a pool of zeroed files"),
        (["dax", "prezero", pool, "--files=0:1"], "no file can have 0 bytes"),
        (["dax", "prezero", pool, "--rate=0"], "fills nothing"),
    ] {
        let said = fails(&wrong);
        assert!(said.contains(why), "{said}");
    }
    let wrong = run(&["dax", "prezero", pool, "--files=2MiB"]);
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("is not LENGTH:COUNT"), "{wrong:?}");
}

/// Without `--once` the command works until a signal, and then says what it did.
#[test]
fn a_signal_ends_the_filling() {
    let folder = tempfile::tempdir().unwrap();
    let pool = folder.path().join("pool");
    let mut command = command(&["dax", "prezero", "--files", "64KiB:2", "--json"]);
    let command = command.arg(&pool);
    let mut filler = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(filler.stderr.take().unwrap()).lines();
    while !told.next().expect("a line that says so").unwrap().contains("Ctrl-C ends this") {}
    let taker = ZeroPool::open(&pool).unwrap();
    let path = folder.path().join("file");
    let file = taker.create(&path, 64 << 10, &Options::default()).unwrap();
    assert_eq!(taker.stat().unwrap().taken, 1);
    drop(file);
    // The command makes another one ready. A second command does not.
    let said = fails(&["dax", "prezero", pool.to_str().unwrap(), "--files=4KiB:1", "--once"]);
    assert!(said.contains("another process fills this pool"), "{said}");
    eventually("two files are ready", || taker.stat().unwrap().ready_files == 2);
    let id = rustix::process::Pid::from_child(&filler);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    let ended = filler.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{ended:?}");
    let stat: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!((&stat["ready_files"], &stat["filler"]), (&2.into(), &true.into()));
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
    let last: Vec<&str> = tables.lines().rev().take(2).collect();
    assert!(last[0].starts_with("stored tables so far: "), "{tables}");
    assert!(last[1].contains(" used again") && !last[1].contains(" 0 are kept"), "{tables}");
    let stored = text(&["dax", "store", path]);
    assert!(stored.contains("file: 2560 pages in "), "{stored}");
    assert!(text(&["dax", "store", path, "--forget"]).contains("file: forgotten"));
    assert!(text(&["dax", "store", path, "--forget"]).contains("file: nothing was stored"));
}
