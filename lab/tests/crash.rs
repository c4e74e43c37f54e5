//! Tests the promises of `lab crash`. A killed machine leaves the stores of its programs in its
//! persistent memory, in their order; on a disk it leaves what it has flushed, at least. The next
//! machine continues from there. One program counts until it is killed, the other one checks; `make
//! lab` runs both.
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use vellum_testing::patience::eventually;

/// Two counters, one page apart. The first is equal to the second or one more.
const FILE: &str = "/pmem/counters";
const DISK: &str = "/dev/vda";
const SECOND: u64 = 4096;

/// Guests of the lab that have the disk have this file.
const DRIVER: &str = "/modules/virtio_blk.ko";

/// Guests of the lab have this file.
const GUEST: &str = "/modules/order";

/// The name of the note that says how far the second counter was.
const NOTE: &str = "counted";

fn open(path: &str) -> Option<File> {
    let folder = Path::new(path).parent().unwrap();
    if !Path::new(GUEST).exists() || !folder.exists() {
        eprintln!("skipped: not in a guest of the lab with persistent memory, or a disk");
        return None;
    }
    let mut options = OpenOptions::new();
    Some(options.read(true).write(true).create(true).truncate(false).open(path).unwrap())
}

fn open_disk() -> Option<File> {
    if !Path::new(DRIVER).exists() {
        eprintln!("skipped: not in a guest of the lab with a virtio disk");
        return None;
    }
    // The driver looks for disks in its own time.
    eventually("a virtio disk is there", || Path::new(DISK).exists());
    open(DISK)
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

fn say(line: &str) {
    std::io::stdout().write_all(format!("\n{line}\n").as_bytes()).unwrap();
}

/// Counts until the machine is killed, and tells `note` how far the second counter is.
fn count_in(file: &File, mut count: u64, note: impl Fn(u64)) {
    // So there is progress, however soon the machine dies.
    count += 1;
    set(file, 0, count);
    set(file, SECOND, count);
    file.sync_all().unwrap();
    note(count);
    // From now on the lab may kill the machine.
    say("lab: ready");
    loop {
        count += 1;
        set(file, 0, count);
        set(file, SECOND, count);
        note(count);
    }
}

#[test]
#[ignore = "counts until it is killed"]
fn count() {
    let Some(file) = open(FILE) else { return };
    // An existing file has both counters. Counting continues where another machine stopped.
    let count = match file.metadata().unwrap().len() {
        0 => 0,
        _ => counter(&file, SECOND),
    };
    count_in(&file, count, |_| ());
}

#[test]
#[ignore = "counts until it is killed"]
fn disk_count() {
    let Some(disk) = open_disk() else { return };
    count_in(&disk, counter(&disk, SECOND), |count| say(&format!("lab: note {NOTE} {count}")));
}

fn counters(file: &File) -> (u64, u64) {
    let (first, second) = (counter(file, 0), counter(file, SECOND));
    say(&format!("the counters are at {first} and {second}"));
    assert!(first > 0, "the counters have not advanced");
    assert!(first == second || first == second + 1, "{first} and {second}");
    (first, second)
}

#[test]
#[ignore = "checks what was counted"]
fn look() {
    let Some(file) = open(FILE) else { return };
    let (_, second) = counters(&file);
    // The next round must find higher counters.
    let seen = Path::new("/pmem/seen");
    let before: u64 = std::fs::read_to_string(seen).map_or(0, |text| text.parse().unwrap());
    assert!(second > before, "{before} before, {second} now");
    std::fs::write(seen, second.to_string()).unwrap();
}

#[test]
#[ignore = "checks what was counted"]
fn disk_look() {
    let Some(disk) = open_disk() else { return };
    let (_, second) = counters(&disk);
    let notes = std::fs::read_to_string("/notes").unwrap();
    let noted = notes.lines().find_map(|line| line.strip_prefix(&format!("{NOTE} ")));
    let noted: u64 = noted.unwrap().parse().unwrap();
    assert!(second >= noted, "{noted} were flushed, {second} are there");
}
