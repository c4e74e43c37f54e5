//! `vellum aquila`.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{fails, ok, text};
use vellum_testing::patience::eventually;

#[test]
fn the_doctor_says_what_works() {
    let said = text(&["aquila", "doctor"]);
    assert!(said.contains("kernel: works (mmap: "), "{said}");
    let value: Value = serde_json::from_slice(&ok(&["aquila", "doctor", "--json"])).unwrap();
    let backends = value["backends"].as_array().unwrap();
    assert_eq!(backends.len(), 5);
    let best = backends.iter().find(|backend| backend["works"] == true).unwrap();
    assert_eq!(&value["best"], best);
    let backend = best["backend"].as_str().unwrap();
    assert!(said.contains(&format!("programs get: {backend}")), "{said}");
    // Ring 0 is no backend, and so never what programs get.
    let works = value["ring_0"]["works"].as_bool().unwrap();
    let expected = if works { "ring 0: works (" } else { "ring 0: does not work (" };
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("; for 'run --backend ring0'"), "{said}");
    assert!(!value["ring_0"]["about"].as_str().unwrap().is_empty());
}

/// The library that is preloaded, where cargo builds it.
fn library() -> Option<PathBuf> {
    let library = std::env::current_exe().unwrap().with_file_name("libvellum_preload.so");
    match library.exists() {
        true => Some(library),
        false => {
            println!("skipped: the library is not built: cargo build -p vellum-preload --tests");
            None
        }
    }
}

/// Runs `vellum aquila run` with the library.
fn run(arguments: &[&str]) -> Option<(Output, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(["aquila", "run", "--library"]).arg(library()?).args(arguments);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("Linux 6.6") || said.contains("CAP_SYS_PTRACE") {
        println!("skipped: {said}");
        return None;
    }
    Some((output, said))
}

#[test]
fn a_program_runs_with_a_cache_and_ends_as_it_does_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    let path = path.to_str().unwrap();
    if Path::new("/usr/bin/python3").exists() {
        let script = "import mmap, sys; f = open(sys.argv[1], 'rb'); \
                      m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); \
                      sys.stdout.buffer.write(m)";
        let python = ["--", "/usr/bin/python3", "-c", script, path];
        for options in [&["--statistics"][..], &["--cache", "512K", "--direct", "--statistics"]] {
            let Some((output, said)) = run(&[options, &python].concat()) else { return };
            assert!(output.status.success() && output.stdout == bytes, "{said}");
            assert!(said.starts_with("vellum: python3 ") && said.contains(" faults, "), "{said}");
        }
        let (output, said) = run(&[&["--files", "*.gguf"][..], &python].concat()).unwrap();
        assert!(output.stdout == bytes && said.is_empty(), "{said}");
    }
    for options in [&[][..], &["--statistics"]] {
        let shell = ["--", "sh", "-c", "echo out; exit 7"];
        let Some((output, _)) = run(&[options, &shell].concat()) else { return };
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"out\n"[..]));
    }
    let (output, said) = run(&["--statistics", "--", "sh", "-c", "kill -9 $$"]).unwrap();
    assert_eq!(output.status.code(), Some(128 + 9));
    assert!(said.contains("no process left statistics"), "{said}");
}

#[test]
fn signals_reach_the_program() {
    let Some((_, _)) = run(&["--", "true"]) else { return };
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(["aquila", "run", "--statistics", "--library"]).arg(library().unwrap());
    let script = "trap 'echo int' INT; trap 'echo usr1' USR1; trap 'exit 7' TERM; echo begun; \
                  while :; do sleep 0.01; done";
    command.args(["--", "sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::null());
    // No terminal sends signals to such a group.
    let mut child = command.process_group(0).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut says = |what: &str| assert_eq!(lines.next().unwrap().unwrap(), what);
    let send = |signal| kill_process(Pid::from_child(&child), signal).unwrap();
    says("begun");
    // A shell has switched it off for a job in the background: then it stays so.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    send(Signal::INT);
    if ignored & 1 << (Signal::INT.as_raw() - 1) == 0 {
        says("int");
    }
    send(Signal::USR1);
    says("usr1");
    send(Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn top_shows_what_caches_do() {
    if !Path::new("/usr/bin/python3").exists() {
        return println!("skipped: no Python");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, vec![7; 2 << 20]).unwrap();
    let Some(_) = run(&["--", "true"]) else { return };
    let script = "import mmap, sys\n\
                  f = open(sys.argv[1], 'rb')\n\
                  m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n\
                  print('begun', flush=True)\n\
                  while True: m.find(b'x')\n";
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(["aquila", "run", "--cache", "1MiB", "--library"]).arg(library().unwrap());
    command.args(["--", "/usr/bin/python3", "-c", script]).arg(&path).stdout(Stdio::piped());
    let mut running = Running(command.spawn().unwrap());
    let child = &mut running.0;
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "begun");
    // This process has become the program.
    let process = child.id().to_string();
    let top = ["aquila", "top", "--interval", "0.2", "--count", "2"];
    // On a busy machine the program may not run during a sample.
    eventually("a sample has faults and evictions", || {
        let said = text(&[&top[..], &[&process]].concat());
        let rows: Vec<Vec<&str>> =
            said.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((rows.len(), rows[0][3], rows[0][7]), (4, "faults/s", "evicted/s"), "{said}");
        assert_eq!(rows[1][1..4], [&*process, "1.0", "MiB"], "{said}");
        rows[3][4] != "0" && rows[3][8] != "0"
    });
    eventually("a sample has misses", || {
        let said = text(&["aquila", "top", "--interval", "0.1", "--count", "1", "--json"]);
        let values = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let value = values.into_iter().find(|value| value["pid"] == child.id()).unwrap();
        assert!(value["cache_bytes"] == 1 << 20 && value["process"] == "python3", "{value}");
        let number = |key: &str| value[key].as_f64().unwrap();
        number("misses") > 256.0 && number("misses_per_second") > 0.0
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let said = fails(&["aquila", "top", &process]);
    assert!(said.contains(&format!("there is no process {process}")), "{said}");
}

#[test]
fn what_cannot_have_a_cache_is_not_run() {
    let refused = |arguments: &[&str], why: &str| {
        let Some((output, said)) = run(arguments) else { return };
        assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
        assert!(said.contains(why), "{arguments:?}: {said}");
    };
    refused(&["--", "no-such-program"], "no program no-such-program in PATH");
    refused(&["--", "/no/such/program"], "opening /no/such/program: ");
    refused(&["--cache", "1K", "--", "echo"], "a cache of 1024 bytes is not possible");
    refused(&["--files", "a:b", "--", "echo"], "has a colon");
    refused(&["--policy", "random", "--", "echo"], "[possible values: s3-fifo, clock, lru]");
    refused(&[], "<PROGRAM>");
    // Debian links this one statically.
    if Path::new("/sbin/ldconfig").exists() {
        refused(&["--", "/sbin/ldconfig", "-p"], "/sbin/ldconfig is linked statically");
    }
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("echo");
    fs::copy("/bin/echo", &copy).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
    fs::set_permissions(&copy, mode).unwrap();
    refused(&["--", copy.to_str().unwrap()], "runs with another user's rights");
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.args(["aquila", "run", "--library", "/no/such/library.so", "--", "echo"]);
    let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(said.contains("/no/such/library.so is no file") || said.contains("6.6"), "{said}");
}

/// Where threads cannot go to ring 0, the program does not run in ring 3 instead.
#[test]
fn a_program_for_ring_0_runs_there_or_not_at_all() {
    let value: Value = serde_json::from_slice(&ok(&["aquila", "doctor", "--json"])).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
        command.args(["aquila", "run", "--backend", "ring0"]).args(arguments).output().unwrap()
    };
    let direct = run(&["--direct", "--", "echo", "ran"]);
    assert!(!direct.status.success() && direct.stdout.is_empty(), "{direct:?}");
    let output = run(&["--", "echo", "ran"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if value["ring_0"]["works"] == true {
        let has_library = !said.contains("libvellum_ring0.so is neither");
        assert!(!has_library || output.stdout == b"ran\n", "{said}");
        return;
    }
    let about = value["ring_0"]["about"].as_str().unwrap();
    // What the test of the loop has measured differs from run to run.
    let about = about.split(':').next().unwrap();
    assert!(said.contains("'vellum aquila doctor'") && said.contains(about), "{said}");
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
}
