//! Sizes that are too large for any machine, and sizes that are too small.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Folder, fails, ok, text};

/// The memory of the machine, or of its control group, in MiB.
fn memory_mib() -> u64 {
    vellum_vm::memory_limit::effective().unwrap().bytes >> 20
}

#[test]
fn a_pool_larger_than_the_machine_s_memory_is_refused() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v", "--pool", "1MiB"]);
    let most = format!("has {} MiB; choose at most that", memory_mib());
    for pool in ["10TiB", "1000TiB", "16777215TiB"] {
        for command in [&["get", &store, "k"][..], &["put", &store, "k", "w"], &["stat", &store]] {
            let error = fails(&[command, &["--pool", pool]].concat());
            assert!(error.ends_with(&most), "{error}");
        }
    }
    assert_eq!(ok(&["get", &store, "k"]), b"v");
}

#[test]
fn a_pool_larger_than_the_machine_s_memory_creates_no_store() {
    let folder = Folder::new();
    fails(&["put", &folder.name("a.vellum"), "k", "v", "--pool", "10TiB"]);
    assert!(!folder.path("a.vellum").exists());
}

#[test]
fn a_daemon_with_too_low_or_too_high_a_limit_does_not_start() {
    let folder = Folder::new();
    let socket = folder.name("socket");
    let error = fails(&["morseld", "--socket", &socket, "--limit", "0"]);
    assert_eq!(error, "vellum: a limit of 0 B keeps no file: choose at least 4.0 KiB");
    let error = fails(&["morseld", "--socket", &socket, "--limit", "1000TiB"]);
    let most = format!("has {} MiB; choose at most that", memory_mib());
    assert!(
        error.starts_with("vellum: a limit of 1000.0 TiB is more than") && error.ends_with(&most),
        "{error}"
    );
    assert!(!folder.path("socket").exists());
}

#[test]
fn commands_that_read_some_pages_take_a_small_pool() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v"]);
    let stat = text(&["stat", &store]);
    let pool = stat.lines().find(|line| line.starts_with("pool")).unwrap();
    assert!(pool.ends_with(" 64.0 MiB"), "{pool}");
}

#[test]
fn a_value_larger_than_the_small_pool_needs_no_option() {
    let folder = Folder::new();
    let (store, file) = (folder.name("a.vellum"), folder.name("value"));
    let value = vec![3; 80 << 20];
    std::fs::write(&file, &value).unwrap();
    ok(&["put", &store, "k", "--file", &file]);
    assert!(ok(&["get", &store, "k"]) == value);
    ok(&["check", &store]);
    ok(&["rm", &store, "k"]);
}
