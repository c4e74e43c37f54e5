//! Tests the promise of `lab crash`: a killed machine leaves the stores of its programs in its
//! persistent memory, in their order, and the next machine continues from there. One program counts
//! until it is killed, the other one checks; `make lab` runs both.
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Two counters, one page apart. The first is equal to the second or one more.
const FILE: &str = "/pmem/counters";
const SECOND: u64 = 4096;

fn open() -> Option<File> {
    if !Path::new("/modules/order").exists() || !Path::new("/pmem").exists() {
        eprintln!("skipped: not in a guest of the lab with persistent memory");
        return None;
    }
    let mut options = OpenOptions::new();
    Some(options.read(true).write(true).create(true).truncate(false).open(FILE).unwrap())
}

fn counter(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_le_bytes(bytes)
}

fn set(file: &File, at: u64, count: u64) {
    file.write_all_at(&count.to_le_bytes(), at).unwrap();
    file.sync_data().unwrap();
}

#[test]
#[ignore = "counts until it is killed"]
fn count() {
    let Some(file) = open() else { return };
    // An existing file has both counters. Counting continues where another machine stopped.
    let mut count = match file.metadata().unwrap().len() {
        0 => 0,
        _ => counter(&file, SECOND),
    };
    // So there is progress, however soon the machine dies.
    count += 1;
    set(&file, 0, count);
    set(&file, SECOND, count);
    file.sync_all().unwrap();
    // From now on the lab may kill the machine.
    std::io::stdout().write_all(b"\nlab: ready\n").unwrap();
    loop {
        count += 1;
        set(&file, 0, count);
        set(&file, SECOND, count);
    }
}

#[test]
#[ignore = "checks what was counted"]
fn look() {
    let Some(file) = open() else { return };
    let (first, second) = (counter(&file, 0), counter(&file, SECOND));
    let line = format!("\nthe counters are at {first} and {second}\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    assert!(first > 0, "the counters have not advanced");
    assert!(first == second || first == second + 1, "{first} and {second}");
    // The next round must find higher counters.
    let seen = Path::new("/pmem/seen");
    let before: u64 = std::fs::read_to_string(seen).map_or(0, |text| text.parse().unwrap());
    assert!(second > before, "{before} before, {second} now");
    std::fs::write(seen, second.to_string()).unwrap();
}
