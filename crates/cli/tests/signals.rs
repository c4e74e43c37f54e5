//! Signals to commands that change a store: the store opens afterwards.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use support::{Folder, command, noise, ok, text};
use vellum_testing::patience::eventually;

const HEAD: &str = "VERSION=3\nformat=print\n";

fn signal(child: &Child, name: &str) {
    let number = child.id().to_string();
    assert!(Command::new("kill").args(["-s", name, &number]).status().unwrap().success());
}

/// A `load` that has loaded one tree, and waits for input in the second.
fn load(store: &str) -> (Child, ChildStdin) {
    // A shell lets jobs in the background ignore SIGINT, and their children inherit that.
    let mut load = Command::new("env");
    load.args(["--default-signal=INT,TERM,HUP", env!("CARGO_BIN_EXE_vellum"), "load", store]);
    let mut child = load.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    write!(input, "{HEAD}database=a\nHEADER=END\n key\n value\nDATA=END\n").unwrap();
    let mut said = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "tree 'a': 1 entries\n");
    write!(input, "{HEAD}database=b\nHEADER=END\n 1\n one\n 2\n two\n").unwrap();
    // Once the command has read this from the pipe, it is in the middle of the tree.
    eventually("it reads its input", || rustix::io::ioctl_fionread(&input).unwrap() == 0);
    (child, input)
}

#[test]
fn a_signal_ends_a_load_that_waits_for_its_input() {
    for name in ["INT", "TERM", "HUP"] {
        let folder = Folder::new();
        let store = folder.name("a.vellum");
        let (child, input) = load(&store);
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        drop(input);
        assert_eq!(output.status.code(), Some(130), "{name}: {:?}", output.status);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("interrupted by a signal; nothing of tree 'b' was kept"), "{said}");
        ok(&["check", &store]);
        assert_eq!(text(&["trees", &store]), "a\n");
        assert_eq!(ok(&["get", &store, "--tree", "a", "key"]), b"value");
    }
}

#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let script = "trap '' INT; exec \"$0\" load \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_vellum"), &store]);
    let mut child = shell.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    write!(input, "{HEAD}database=a\nHEADER=END\n key\n value\nDATA=END\n").unwrap();
    let mut said = [0; 1];
    child.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
    signal(&child, "INT");
    write!(input, "{HEAD}database=b\nHEADER=END\n key\n value\nDATA=END\n").unwrap();
    drop(input);
    assert!(child.wait().unwrap().success());
    assert_eq!(text(&["trees", &store]), "a\nb\n");
}

#[test]
fn a_second_signal_ends_at_once() {
    let folder = Folder::new();
    let mut load = command(&["load", &folder.name("a.vellum")]);
    let mut child = load.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // The command prints a line for each section. That is more than a pipe's buffer takes, so it
    // waits for a reader.
    let feeder = std::thread::spawn(move || {
        for number in 0..10_000 {
            if write!(input, "{HEAD}database=t\nHEADER=END\n {number}\n v\nDATA=END\n").is_err() {
                break;
            }
        }
    });
    let waits = |child: &Child| {
        let place = format!("/proc/{}/syscall", child.id());
        std::fs::read_to_string(place).unwrap_or_default().split(' ').nth(1) == Some("0x2")
    };
    for _ in 0..2 {
        while !waits(&child) {
            assert!(child.try_wait().unwrap().is_none(), "it ended at the first signal");
            std::thread::sleep(Duration::from_millis(10));
        }
        signal(&child, "TERM");
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    feeder.join().unwrap();
}

/// Waits until a process handles SIGTERM, or has ended.
fn wait_for_handlers(child: &mut Child) {
    let place = format!("/proc/{}/status", child.id());
    let handles_term = || {
        let status = std::fs::read_to_string(&place).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap() & 1 << 14 != 0
    };
    while !handles_term() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
}

/// Sends SIGTERM to a command after ever longer times, until the command ends before the signal: in
/// even rounds from its start on, in odd ones from the moment on from which it handles the signal,
/// which may come late. The store must open each time. `renew` restores the store before each run.
fn interrupt_at_ever_later_times(store: &str, arguments: &[&str], renew: impl Fn()) {
    let mut asked = 0;
    for round in 0..50 {
        renew();
        let mut child = command(arguments).stderr(Stdio::piped()).spawn().unwrap();
        if round % 2 == 1 {
            wait_for_handlers(&mut child);
        }
        // In the first odd round at once.
        std::thread::sleep(Duration::from_millis(3 * (round - round % 2)));
        if child.try_wait().unwrap().is_none() {
            signal(&child, "TERM");
        }
        let status: ExitStatus = child.wait().unwrap();
        if status.success() && asked > 0 {
            break;
        }
        if status.success() {
            // This process was paused for as long as the command took.
            continue;
        }
        // The signal killed the command before it had handlers, or asked it to end.
        assert!(status.signal() == Some(15) || status.code() == Some(130), "{status}");
        asked += usize::from(status.code() == Some(130));
        ok(&["check", store]);
    }
    assert!(asked > 0, "no signal came at the right time");
}

#[test]
fn a_store_opens_after_a_signal_during_put() {
    let folder = Folder::new();
    let (store, file) = (folder.name("a.vellum"), folder.name("value"));
    std::fs::write(&file, noise(24 << 20, 3)).unwrap();
    ok(&["put", &store, "k", "v"]);
    interrupt_at_ever_later_times(&store, &["put", &store, "large", "--file", &file], || ());
}

#[test]
fn a_store_opens_after_a_signal_during_rm() {
    let folder = Folder::new();
    let (store, whole) = (folder.name("a.vellum"), folder.name("whole"));
    let line = |number: u32| format!(" {number:06}\n {number:0400}\n");
    let lines: String = (0..5_000).map(line).collect();
    let dump = folder.name("dump");
    std::fs::write(&dump, format!("{HEAD}database=t\nHEADER=END\n{lines}DATA=END\n")).unwrap();
    ok(&["load", &whole, &dump]);
    interrupt_at_ever_later_times(&store, &["rm", &store, "--tree", "t", "--all"], || {
        std::fs::copy(&whole, &store).unwrap();
    });
}
