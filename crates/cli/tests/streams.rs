//! Values that are larger than the pool, and larger than the memory that a command may use.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::process::{Child, Stdio};

use support::{Folder, command, noise, ok, run_with_input, succeeded};

const MIB: usize = 1 << 20;

/// The most memory that a command may use with a pool of 4 MiB.
const MOST_KIB: u64 = 64 << 10;

/// Of a value that none of these commands may hold as a whole, so many MiB.
const LONG: usize = 96;

/// The peak memory of a running child, in KiB.
fn peak_kib(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn put_and_get_stream_a_value() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let value = noise(LONG * MIB, 7);
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

/// The beginning of a dump with one entry, up to its value.
fn dump_head(format: &str) -> String {
    format!("VERSION=3\nformat={format}\ntype=btree\nHEADER=END\n 6b\n ")
}

/// Bytes as the text of a dump, some of them as escapes.
fn as_text(format: &str, bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for byte in bytes {
        match format {
            "bytevalue" => text.extend(format!("{byte:02x}").into_bytes()),
            _ if *byte == b'\\' => text.extend(b"\\\\"),
            _ if (b' '..=b'~').contains(byte) => text.push(*byte),
            _ => text.extend(format!("\\{byte:02x}").into_bytes()),
        }
    }
    text
}

/// With a pool that is large enough to store the value in one call, and with one that is not.
#[test]
fn dump_and_load_stream_a_value() {
    for (format, pool) in [("bytevalue", "4MiB"), ("bytevalue", "1GiB"), ("print", "4MiB")] {
        let folder = Folder::new();
        let store = folder.name("a.vellum");
        let part = noise(MIB, 7);
        let text = as_text(format, &part);
        let mut load = command(&["load", &store, "--pool", pool]);
        let mut child = load.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(dump_head(format).as_bytes()).unwrap();
        (1..LONG).for_each(|_| input.write_all(&text).unwrap());
        // The pool may have as much of the value in memory as it has room for.
        let most = if pool == "4MiB" { MOST_KIB } else { MOST_KIB + LONG as u64 * 1024 };
        let peak = peak_kib(&child);
        assert!(peak < most, "load had {peak} KiB with a pool of {pool}");
        input.write_all(&text).unwrap();
        input.write_all(b"\nDATA=END\n").unwrap();
        drop(input);
        assert!(child.wait().unwrap().success());
        let key = if format == "print" { "6b" } else { "k" };
        let found = ok(&["get", &store, key, "--pool", "4MiB"]);
        assert!(found.len() == LONG * MIB && found.chunks(MIB).all(|found| found == part));

        let mut dump = command(&["dump", &store, "--pool", "4MiB"]);
        let mut child = dump.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut first = vec![0; (LONG - 1) * 2 * MIB];
        output.read_exact(&mut first).unwrap();
        let peak = peak_kib(&child);
        assert!(peak < MOST_KIB, "dump had {peak} KiB");
        output.read_to_end(&mut first).unwrap();
        assert!(child.wait().unwrap().success());
    }
}

/// Long values, in the order of their keys and out of order; one of them is cut off.
#[test]
fn a_load_that_fails_inside_a_long_value_says_where() {
    let folder = Folder::new();
    let (whole, broken) = (noise(3 * MIB, 1), b"zz".to_vec());
    let entry = |key: &str, text: &[u8]| [b" ", key.as_bytes(), b"\n ", text, b"\n"].concat();
    let long = as_text("bytevalue", &whole);
    let dump = |last: &[u8]| {
        let head = b"VERSION=3\nHEADER=END\n".to_vec();
        let end = b"DATA=END\n".to_vec();
        [head, entry("61", &long), entry("63", &long), entry("62", &long), entry("64", last), end]
            .concat()
    };
    for (place, existing) in [("new", false), ("old", true)] {
        let store = folder.name(place);
        if existing {
            ok(&["put", &store, "z", "before", "--tree", "main"]);
            ok(&["rm", &store, "z"]);
        }
        let cut_off = dump(&[&long[..], &broken].concat());
        let load = ["load", &store, "--pool", "4MiB"];
        let error = support::failed(run_with_input(&load, &cut_off));
        let left =
            if existing { "got 3 entries before" } else { "nothing of tree 'main' was kept" };
        assert!(
            error.contains("line 10: each byte must be two") && error.contains(left),
            "{error}"
        );
        let counted = String::from_utf8(ok(&["check", &store])).unwrap();
        succeeded(run_with_input(&load, &dump(&long)));
        for key in ["a", "b", "c", "d"] {
            assert!(ok(&["get", &store, key, "--pool", "4MiB"]) == whole, "{key} {counted}");
        }
        ok(&["check", &store]);
    }
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
    // The command checks for signals between two parts of its input.
    let _ = input.write_all(&noise(4 * MIB, 6));
    drop(input);
    assert!(!child.wait().unwrap().success());
    assert_eq!(ok(&["get", &store, "k"]), b"before");
    ok(&["check", &store]);
}
