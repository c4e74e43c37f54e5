//! Files that are no stores, damaged stores, stores in use, closed pipes, full devices.

mod support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::process::Stdio;

use support::{Folder, checked, command, failed, fails, noise, ok, run_with_input, succeeded};

/// Every command that opens a store, with arguments that would work.
fn commands(store: &str) -> Vec<Vec<String>> {
    let lines = [
        "get STORE k",
        "put STORE k v",
        "rm STORE k",
        "scan STORE",
        "trees STORE",
        "stat STORE",
        "check STORE",
        "dump STORE",
    ];
    let words = |line: &&str| {
        line.split(' ').map(|word| if word == "STORE" { store } else { word }.to_string()).collect()
    };
    lines.iter().map(words).collect()
}

#[test]
fn a_file_that_is_no_store_is_refused_and_unchanged() {
    let folder = Folder::new();
    for (name, bytes) in [
        ("text", b"hello, this is a text\n".to_vec()),
        ("zeros", vec![0; 1 << 20]),
        ("noise", noise(1 << 20, 1)),
        ("odd", noise(12_345, 2)),
    ] {
        fs::write(folder.path(name), &bytes).unwrap();
        for arguments in commands(&folder.name(name)) {
            let error = fails(&arguments);
            assert!(error.contains(name), "{arguments:?}: {error}");
        }
        assert!(fs::read(folder.path(name)).unwrap() == bytes, "{name} was changed");
    }
}

/// Reading an empty file is refused; the first change makes it a store.
#[test]
fn an_empty_file_becomes_a_store() {
    let folder = Folder::new();
    fs::write(folder.path("empty"), b"").unwrap();
    for arguments in commands(&folder.name("empty")) {
        if arguments[0] != "put" {
            let error = fails(&arguments);
            assert!(error.contains("empty"), "{arguments:?}: {error}");
            assert!(fs::read(folder.path("empty")).unwrap().is_empty(), "{arguments:?} changed it");
        }
    }
    for line in ["put STORE k v", "get STORE k", "check STORE"] {
        let arguments = line.replace("STORE", &folder.name("empty"));
        ok(&arguments.split(' ').collect::<Vec<_>>());
    }
}

#[test]
fn a_store_that_does_not_exist_is_an_error() {
    let folder = Folder::new();
    for arguments in commands(&folder.name("none")) {
        if arguments[0] != "put" {
            let error = fails(&arguments);
            assert!(error.contains("none"), "{arguments:?}: {error}");
        }
    }
    assert!(!folder.path("none").exists());
    for arguments in commands(&folder.name("no/such/folder")) {
        fails(&arguments);
    }
    // A directory is no store.
    for arguments in commands(&folder.name("")) {
        fails(&arguments);
    }
}

#[test]
fn a_truncated_store_is_an_error() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    for number in 0..50 {
        ok(&["put", &store, &format!("key{number}"), &"v".repeat(3000)]);
    }
    let whole = fs::read(&store).unwrap();
    for length in [whole.len() - 4096, whole.len() / 2, 4096, 100] {
        fs::write(&store, &whole[..length]).unwrap();
        for arguments in commands(&store) {
            fails(&arguments);
        }
    }
    fs::write(&store, &whole).unwrap();
    ok(&["check", &store]);
}

#[test]
fn a_store_in_use_is_not_opened_twice() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", &"v".repeat(100_000)]);
    ok(&["put", &store, "l", &"v".repeat(100_000)]);
    // The value is longer than a pipe's buffer, so the command has the store open until the test
    // reads.
    let mut scan = command(&["scan", &store, "--full"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 1];
    scan.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let error = fails(&["put", &store, "k", "new", "--wait", "0.1"]);
    assert!(error.contains("use"), "{error}");
    // Several readers may have the store open.
    assert_eq!(ok(&["get", &store, "k"]).len(), 100_000);
    let mut rest = Vec::new();
    scan.stdout.as_mut().unwrap().read_to_end(&mut rest).unwrap();
    assert!(scan.wait().unwrap().success());
    ok(&["put", &store, "k", "new"]);
}

#[test]
fn a_closed_pipe_is_no_error() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    succeeded(run_with_input(&["put", &store, "k"], &[b'v'; 500_000]));
    for arguments in [
        &["get", &store, "k"][..],
        &["scan", &store, "--full"],
        &["dump", &store],
        &["dump", &store, "--print"],
        &["stat", &store],
        &["bench", "list"],
        &["--help"],
        &["probe", "--pages", "64", "--rounds", "1"],
    ] {
        let mut command = command(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        let output = checked(child.wait_with_output().unwrap());
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
    ok(&["check", &store]);
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    succeeded(run_with_input(&["put", &store, "k"], &[b'v'; 500_000]));
    for arguments in
        [&["get", &store, "k"][..], &["dump", &store], &["stat", &store], &["bench", "list"]]
    {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = command(arguments).stdout(full).output().unwrap();
        let error = failed(checked(output));
        assert!(error.contains("writing the output"), "{error}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_an_error() {
    // Not even root can create files there.
    let error = fails(&["put", "/proc/self/store.vellum", "k", "v"]);
    assert!(error.contains("/proc/self/store.vellum"), "{error}");
    let error = fails(&["put", "/dev/null", "k", "v"]);
    assert!(error.contains("/dev/null"), "{error}");
}

#[test]
fn a_missing_value_file_creates_no_store() {
    let folder = Folder::new();
    fails(&["put", &folder.name("a"), "k", "--file", &folder.name("none")]);
    assert!(!folder.path("a").exists());
}

#[test]
fn a_key_that_is_too_long_changes_nothing() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v"]);
    let error = fails(&["put", &store, &"k".repeat(5000), "v"]);
    assert!(error.contains("5000"), "{error}");
    succeeded(run_with_input(&["put", &store, "empty"], b""));
    ok(&["check", &store]);
}

#[test]
fn a_store_that_was_not_closed_is_refused_and_can_be_salvaged() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    // Entries of a checkpoint, on several pages, and a value on pages of its own.
    let kept = |number: u32| (format!("key {number:04}"), format!("value {number} of the first"));
    let lines: String = (0..1000)
        .map(kept)
        .chain([("long".to_string(), "l".repeat(20_000))])
        .map(|(key, value)| format!(" {key}\n {value}\n"))
        .collect();
    let head = "VERSION=3\nformat=print\nHEADER=END\n";
    succeeded(run_with_input(&["load", &store], format!("{head}{lines}DATA=END\n").as_bytes()));
    let trees = ok(&["trees", &store]);
    let dumped = ok(&["dump", &store]);
    let mut load = command(&["load", &store]);
    load.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = load.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    write!(input, "{head} key\n value\nDATA=END\n{head}").unwrap();
    // The command reports the first section when it is loaded. Then it waits for the second.
    let mut said = [0; 1];
    child.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The command has written no page of the first section: the store is still as it was closed.
    assert_eq!(ok(&["trees", &store]), trees);
    // The header that the command writes before the first page.
    let mut bytes = fs::read(&store).unwrap();
    let sequence =
        |page: usize| u64::from_le_bytes(*bytes[page * 4096 + 72..].first_chunk().unwrap());
    let newest = usize::from(sequence(1) > sequence(0)) * 4096;
    let header = &mut bytes[newest..newest + 4096];
    header[80..88].fill(0);
    // Without the log that ended when the store was closed.
    header[48..52].copy_from_slice(&4_u32.to_le_bytes());
    header[128..136].fill(0);
    vellum::page::seal(header, &[]);
    fs::write(&store, bytes).unwrap();
    for arguments in commands(&store) {
        let error = fails(&arguments);
        let all = ["not closed cleanly", "vellum salvage"].map(|words| error.contains(words));
        assert_eq!(all, [true; 2], "{error}");
    }
    assert!(ok(&["dump", &store, "--salvage"]) == dumped, "salvage lost entries");
}
