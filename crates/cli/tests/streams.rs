//! Values that are larger than the pool, and larger than what a command may have in memory.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::process::{Child, Stdio};

use support::{Folder, command, noise, ok, run_with_input, succeeded};

const MIB: usize = 1 << 20;

/// What a command may have in memory at most, with a pool of 4 MiB.
const MOST_KIB: u64 = 64 << 10;

/// The most memory that a child has had, in KiB; it is still running.
fn peak_kib(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_value_goes_in_and_out_in_little_memory() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let value = noise(192 * MIB, 7);
    let mut put = command(&["put", &store, "k", "--pool", "4MiB"]);
    let mut child = put.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let (most, rest) = value.split_at(value.len() - MIB);
    input.write_all(most).unwrap();
    let peak = peak_kib(&child);
    assert!(peak < MOST_KIB, "put had {peak} KiB");
    input.write_all(rest).unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());

    let mut get = command(&["get", &store, "k", "--pool", "4MiB"]);
    let mut child = get.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut found = vec![0; most.len()];
    output.read_exact(&mut found).unwrap();
    let peak = peak_kib(&child);
    assert!(peak < MOST_KIB, "get had {peak} KiB");
    output.read_to_end(&mut found).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(found == value);
    ok(&["check", &store, "--pool", "4MiB"]);
}

#[test]
fn a_value_that_was_put_with_a_large_pool_is_read_with_a_small_one() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let value = noise(20 * MIB, 3);
    succeeded(run_with_input(&["put", &store, "k", "--pool", "128MiB"], &value));
    assert!(ok(&["get", &store, "k", "--pool", "1MiB"]) == value);
    let dump = ok(&["dump", &store, "--pool", "4MiB"]);
    let copy = folder.name("copy.vellum");
    succeeded(run_with_input(&["load", &copy, "--pool", "4MiB"], &dump));
    assert!(ok(&["get", &copy, "k", "--pool", "1MiB"]) == value);
}

#[test]
fn a_put_that_is_interrupted_leaves_nothing() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "before"]);
    let mut put = command(&["put", &store, "k", "--pool", "4MiB"]);
    put.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = put.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&noise(16 * MIB, 5)).unwrap();
    let signalled = std::process::Command::new("kill").arg(child.id().to_string()).status();
    assert!(signalled.unwrap().success());
    // The command looks for signals between two parts of its input.
    let _ = input.write_all(&noise(4 * MIB, 6));
    drop(input);
    assert!(!child.wait().unwrap().success());
    assert_eq!(ok(&["get", &store, "k"]), b"before");
    ok(&["check", &store]);
}
