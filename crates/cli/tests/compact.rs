//! `compact`: what it says, and what is left of a file.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::{Folder, fails, noise, ok, run_with_input, succeeded, text};
use vellum::{Options, Store};

/// A dump of a tree.
fn dump(tree: &str, entries: u64) -> String {
    let mut dump = format!("VERSION=3\nformat=print\ndatabase={tree}\nHEADER=END\n");
    for number in 0..entries {
        write!(dump, " {number:08}\n {number:0300}\n").unwrap();
    }
    dump + "DATA=END\n"
}

/// A store whose first tree was large and is gone, and that has some other entries.
fn store(folder: &Folder, entries: u64) -> String {
    let store = folder.name("a.vellum");
    succeeded(run_with_input(&["load", &store], dump("large", entries).as_bytes()));
    succeeded(run_with_input(&["load", &store], dump("small", 100).as_bytes()));
    fs::write(folder.path("value"), noise(60_000, 1)).unwrap();
    ok(&["put", &store, "--tree", "small", "value", "--file", &folder.name("value")]);
    ok(&["rm", &store, "--tree", "large", "--all"]);
    store
}

#[test]
fn a_store_gets_shorter_and_keeps_its_entries() {
    for log in [&[][..], &["--no-log"]] {
        let folder = Folder::new();
        let store = store(&folder, 20_000);
        let (before, dumped) = (fs::metadata(&store).unwrap().len(), text(&["dump", &store]));
        let said = text(&[&["compact", &store], log].concat());
        let after = fs::metadata(&store).unwrap().len();
        assert!(after < before / 10, "{before}, {after}");
        assert!(said.starts_with(&format!("{store}: ")) && said.lines().count() == 1, "{said}");
        assert!(said.contains("MiB before") && said.contains("now; moved "), "{said}");
        assert!(said.ends_with(" pages\n"), "{said}");
        assert_eq!(text(&["dump", &store]), dumped);
        assert!(text(&["check", &store]).contains("sound"));
        let said = text(&[&["compact", &store, "--json"], log].concat());
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(report["pages_moved"], 0, "{report}");
        assert_eq!(report["bytes_after"], after, "{report}");
        assert_eq!(report["complete"], true, "{report}");
        assert!(!folder.path("a.vellum.log").exists());
    }
}

/// The pages of a removed tree that are damaged stay in use, and nothing refers to them.
#[test]
fn lost_pages_are_free_again() {
    let folder = Folder::new();
    let name = folder.name("a.vellum");
    succeeded(run_with_input(&["load", &name], dump("large", 2000).as_bytes()));
    succeeded(run_with_input(&["load", &name], dump("small", 100).as_bytes()));
    let mut bytes = fs::read(&name).unwrap();
    let key = |number: u64| format!("{number:0300}").into_bytes();
    let damaged = (0..bytes.len() - 300).find(|at| bytes[*at..*at + 300] == key(1000)).unwrap();
    bytes[damaged + 10] ^= 1;
    fs::write(&name, &bytes).unwrap();
    let said = fails(&["check", "--free-lost", &name]);
    assert!(said.contains("damaged in 1 places"), "{said}");
    ok(&["rm", &name, "--tree", "large", "--all"]);
    let said = text(&["check", &name]);
    assert!(said.contains("\n1 pages are lost") && said.contains("sound"), "{said}");
    let dumped = text(&["dump", &name]);
    let said = text(&["check", "--free-lost", "--json", &name]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&report["lost_pages"], &report["freed_pages"]), (&1.into(), &1.into()), "{report}");
    let said = text(&["check", "--free-lost", &name]);
    assert!(!said.contains("lost") && said.contains("sound"), "{said}");
    assert_eq!(text(&["dump", &name]), dumped);
}

#[test]
fn what_is_no_store_is_refused() {
    let folder = Folder::new();
    let error = fails(&["compact", &folder.name("none")]);
    assert!(error.contains("does not exist"), "{error}");
    fs::write(folder.path("other"), noise(10_000, 2)).unwrap();
    let error = fails(&["compact", &folder.name("other")]);
    assert!(error.contains("not a Vellum store"), "{error}");
    let help = text(&["compact", "--help"]);
    assert!(help.contains("Store::control_socket") && help.contains("--no-log"), "{help}");
}

/// A signal ends a compaction after its current step, and the store opens.
#[test]
fn a_signal_ends_a_compaction_and_keeps_all_entries() {
    let folder = Folder::new();
    let (full, copy) = (folder.name("full"), folder.name("copy"));
    succeeded(run_with_input(&["load", &full], dump("large", 60_000).as_bytes()));
    // Nodes and free places take turns, so that many nodes move.
    let thin = Store::open(&full, &Options::new().pool_bytes(32 << 20)).unwrap();
    thin.tree("large").unwrap().retain(|key, _| key[6] == b'0').unwrap();
    thin.close().unwrap();
    let dumped = text(&["dump", &full]);
    let mut ended = 0;
    for round in 0..60 {
        fs::copy(&full, &copy).unwrap();
        let mut child = Command::new("env");
        child.args(["--default-signal=INT,TERM,HUP", env!("CARGO_BIN_EXE_vellum")]);
        child.args(["compact", &copy]).stderr(Stdio::null()).stdout(Stdio::null());
        let mut child = child.spawn().unwrap();
        // Before it makes the log, it watches for signals.
        while !folder.path("copy.log").exists() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_millis(round % 4));
        if child.try_wait().unwrap().is_none() {
            kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        }
        let status = child.wait().unwrap();
        assert!(matches!(status.code(), Some(0 | 130)), "{status}");
        assert_eq!(text(&["dump", &copy]), dumped);
        ended += u32::from(status.code() == Some(130));
        if ended == 5 {
            break;
        }
    }
    assert!(ended > 0, "all signals came after the end");
    ok(&["compact", &copy]);
    assert_eq!(text(&["dump", &copy]), dumped);
    ok(&["check", &copy]);
}
