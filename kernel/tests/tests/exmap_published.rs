//! Programs for the published exmap module run unchanged. `programs/published.c` is one, in C, with
//! its own definitions of that module's interface. Each of its parts is a test.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use vellum_kernel_tests::{turn, turn_for};
use vellum_uapi::exmap;

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/published"));

/// Runs a part of the program.
#[track_caller]
fn run(arguments: &[&str]) {
    let path = PathBuf::from(format!("/tmp/published-{}-{}", std::process::id(), arguments[0]));
    fs::write(&path, PROGRAM).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(&path).args(arguments).output().unwrap();
    fs::remove_file(&path).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{arguments:?}: {}, {said}", output.status);
}

#[test]
fn a_program_without_storage_runs() {
    let Some(_turn) = turn() else { return };
    run(&["anonymous"]);
}

#[test]
fn calls_that_allocate_work() {
    let Some(_turn) = turn() else { return };
    run(&["calls"]);
}

#[test]
fn private_descriptors_work() {
    let Some(_turn) = turn() else { return };
    run(&["clones"]);
}

#[test]
fn former_security_holes_are_errors() {
    let Some(_turn) = turn() else { return };
    run(&["errors"]);
}

#[test]
fn a_program_reads_and_writes_back() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    run(&["storage", "/dev/ram0"]);
    // The published module refused direct I/O to a file.
    let folder = fs::read_to_string("/scratch").unwrap();
    let file = PathBuf::from(folder.trim()).join("published");
    fs::write(&file, vec![0; 2000 * 4096]).unwrap();
    run(&["storage", file.to_str().unwrap()]);
    fs::remove_file(file).unwrap();
}
