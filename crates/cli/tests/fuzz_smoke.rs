//! Damaged stores and dumps for the real binary. It may refuse them or report damage, but never
//! crash or hang.
//!
//! `VELLUM_SEED=N` replays a failure (the seed is in its message), `VELLUM_SOAK=1` runs 50 times as
//! many rounds. The fuzzer of the page decoder goes deeper; this one tests the whole program.
// In tests, and in their helper functions, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::time::{Duration, Instant};

use support::{Folder, checked, command, noise, ok, run_with_input};

const ROUNDS: u64 = 120;

/// No command on a file this small takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(200);

fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    match number("VELLUM_SEED") {
        Some(seed) => seed..seed + 1,
        None if number("VELLUM_SOAK") == Some(1) => 0..50 * ROUNDS,
        None => 0..ROUNDS,
    }
}

/// Flips bits, copies pages over others, zeroes, truncates. At least one byte changes.
fn damage(bytes: &mut Vec<u8>, seed: u64) {
    let random: Vec<usize> = noise(64, seed.wrapping_add(1000))
        .chunks(8)
        .map(|chunk| chunk.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
        .collect();
    let (at, pages) = (random[0] % bytes.len(), bytes.len() / 4096);
    let (from, to) = (random[1] % pages * 4096, random[2] % pages * 4096);
    match seed % 5 {
        0 => bytes[at] ^= 1 << (random[3] % 8),
        1 => random.iter().for_each(|number| {
            let at = number % bytes.len();
            bytes[at] = bytes[at].wrapping_add((number >> 40) as u8 | 1);
        }),
        2 => bytes.copy_within(from..from + 4096, to),
        3 => bytes[to..to + 4096].fill(0),
        _ => bytes.truncate(at),
    }
}

fn run_in_time(arguments: &[&str], seed: u64) {
    let start = Instant::now();
    let mut child = command(arguments)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("VELLUM_SEED={seed}: {arguments:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("VELLUM_SEED={seed}: {arguments:?}");
    checked(child.wait_with_output().unwrap());
}

#[test]
fn damaged_stores_crash_no_command() {
    let folder = Folder::new();
    let (whole, store) = (folder.name("whole.vellum"), folder.name("damaged.vellum"));
    let rescued = folder.name("rescued.vellum");
    let mut dump = String::from("VERSION=3\nformat=print\ndatabase=t\nHEADER=END\n");
    for number in 0..400 {
        let value = "v".repeat(if number % 50 == 0 { 20_000 } else { number });
        dump.push_str(&format!(" key{number:05}\n {value}\n"));
    }
    dump.push_str("DATA=END\n");
    support::succeeded(run_with_input(&["load", &whole, "--pool", "1MiB"], dump.as_bytes()));
    ok(&["rm", &whole, "key00007"]);
    let bytes = fs::read(&whole).unwrap();
    for seed in seeds() {
        let mut damaged = bytes.clone();
        damage(&mut damaged, seed);
        fs::write(&store, &damaged).unwrap();
        let pool = ["--pool", "1MiB"];
        for arguments in [
            &["check", &store][..],
            &["dump", &store, "--salvage"],
            &["salvage", &store, &rescued],
            &["scan", &store, "--full", "--reverse"],
            &["put", &store, "key00100x", "new", "--tree", "t"],
            &["rm", &store, "key00200", "--tree", "t"],
        ] {
            run_in_time(&[arguments, &pool].concat(), seed);
        }
        if fs::exists(&rescued).unwrap() {
            ok(&["check", &rescued]);
            fs::remove_file(&rescued).unwrap();
        }
    }
}

#[test]
fn damaged_dumps_do_not_crash_load() {
    let folder = Folder::new();
    let (whole, store) = (folder.name("whole.vellum"), folder.name("copy.vellum"));
    for tree in ["a", "b"] {
        for key in ["one", "two", "three"] {
            ok(&["put", &whole, key, &"value ".repeat(300), "--tree", tree]);
        }
    }
    let dump = ok(&["dump", &whole, "--print"]);
    for seed in seeds() {
        let mut damaged = dump.clone();
        damage(&mut damaged, seed);
        let _ = fs::remove_file(&store);
        println!("VELLUM_SEED={seed}");
        run_with_input(&["load", &store, "--pool", "1MiB"], &damaged);
        if fs::exists(&store).unwrap() {
            // Whatever the command has loaded, the store is sound and closed.
            ok(&["check", &store]);
        }
    }
}
