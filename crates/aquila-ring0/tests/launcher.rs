//! Programs as they are, which the launcher's library moves to ring 0: they must print what they
//! print alone, and end as they end alone.
//!
//! The library and the programs are those next to the test, where the lab puts them, or those of
//! cargo's build and of this machine. `VELLUM_RING0` says that the library, a shell, filters and a
//! database must be there; without it, and for other programs, what is missing is left out.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)] // of what the tests share
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

fn say(text: &str) {
    // Not by a macro, whose output a test that passes does not show.
    std::io::stderr().write_all(text.as_bytes()).unwrap();
}

/// Fails if this is a machine where nothing may be missing.
#[track_caller]
fn missing(what: &str) {
    assert!(std::env::var_os("VELLUM_RING0").is_none(), "no {what}");
    say(&format!("left out: no {what}\n"));
}

/// The lab does not bring it along: it has too many files.
const PYTHON: &str = "python3";

fn folder() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// The library, if there is one, and a machine can be had here.
fn library() -> Option<PathBuf> {
    common::machine()?;
    let candidates = ["libvellum_ring0.so", "../examples/libvellum_ring0.so"];
    let found = candidates.map(|name| folder().join(name)).into_iter().find(|path| path.exists());
    if found.is_none() {
        missing("libvellum_ring0.so (cargo build -p vellum-aquila-ring0 --examples)");
    }
    found
}

/// The program that was written for these tests: in a guest it is next to them.
fn own_program() -> PathBuf {
    let name = "ring0_program";
    let here = folder().join(name);
    if here.exists() {
        return here;
    }
    let built = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let is_program = |path: &PathBuf| {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        file.starts_with(&format!("{name}-")) && !file.contains('.')
    };
    let time = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    built.filter(is_program).max_by_key(time).expect("the program is built with the test")
}

/// A program of this machine, which the lab may have brought along.
fn program(name: &str) -> Option<PathBuf> {
    let beside = folder().join(name);
    let usual = ["/usr/bin", "/bin"].map(|folder| Path::new(folder).join(name));
    let is_there = |path: &PathBuf| path.exists() && is_dynamic(path);
    let found = [beside].into_iter().chain(usual).find(is_there);
    if found.is_none() {
        let what = format!("{name} that is linked dynamically");
        if name == PYTHON { say(&format!("left out: no {what}\n")) } else { missing(&what) }
    }
    found
}

/// Whether a program has the C library's beginning.
fn is_dynamic(path: &Path) -> bool {
    let name = b"__libc_start_main\0";
    fs::read(path).unwrap().windows(name.len()).any(|window| window == name)
}

/// Runs a program until it ends.
fn output(mut command: Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("VELLUM_RING0_PROGRAM", "1");
    let mut child = command.spawn().unwrap();
    let mut to_child = child.stdin.take().unwrap();
    thread::scope(|scope| {
        // It may end without having read all.
        scope.spawn(move || _ = to_child.write_all(input));
        child.wait_with_output().unwrap()
    })
}

/// A command that runs in ring 0, and the file that gets its figures.
fn preloaded(library: &Path, program: &Path, arguments: &[&str]) -> (Command, PathBuf) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("ring0-figures-{}-{number}", std::process::id());
    let figures = std::env::temp_dir().join(name);
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", library);
    command.env("VELLUM_AQUILA_STATISTICS", &figures);
    (command, figures)
}

/// The figures that processes have left, a line for each.
fn take_figures(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let _ = fs::remove_file(path);
    text
}

/// Runs a program in ring 0 and alone, and fails unless both are the same. Returns what the one in
/// ring 0 printed.
#[track_caller]
fn is_the_same(library: &Path, program: &Path, arguments: &[&str], input: &[u8]) -> String {
    is_the_same_with(&CACHED, library, program, (arguments, input)).0
}

/// Files through a cache of so few pages that most leave again.
const CACHED: [(&str, &str); 2] = [("VELLUM_AQUILA_MIN", "1"), ("VELLUM_AQUILA_CACHE", "262144")];

/// The same with variables for the one in ring 0. Returns the sum of the faults that ring 0 has
/// handled, too.
#[track_caller]
fn is_the_same_with(
    variables: &[(&str, &str)],
    library: &Path,
    program: &Path,
    (arguments, input): (&[&str], &[u8]),
) -> (String, u64) {
    let (mut command, path) = preloaded(library, program, arguments);
    command.envs(variables.iter().copied());
    let inside = output(command, input);
    let mut alone = Command::new(program);
    alone.args(arguments);
    let alone = output(alone, input);
    let what = format!("{} {arguments:?}", program.display());
    let said = String::from_utf8_lossy(&inside.stderr).into_owned();
    assert_eq!(inside.status, alone.status, "{what}: {said}");
    assert!(inside.stdout == alone.stdout, "{what}: {inside:?} {alone:?}");
    // A program may name its process or its thread, as a panic does.
    assert_eq!(
        said.lines().count(),
        String::from_utf8_lossy(&alone.stderr).lines().count(),
        "{said}"
    );
    let figures = take_figures(&path);
    // A signal ends a process without figures.
    let is_counted = figures.lines().any(|line| line.contains(" system calls, "));
    assert!(is_counted || alone.status.signal().is_some(), "{what}: {figures}");
    let faults = figures.lines().filter_map(|line| {
        line.split(", ").find_map(|part| part.strip_suffix(" managed faults"))?.parse::<u64>().ok()
    });
    (String::from_utf8_lossy(&inside.stdout).into_owned(), faults.sum())
}

/// The same for the program of these tests.
#[track_caller]
fn own_is_the_same(arguments: &[&str], input: &[u8]) -> Option<String> {
    let library = library()?;
    Some(is_the_same(&library, &own_program(), arguments, input))
}

#[test]
fn main_and_threads_run_in_ring_0() {
    let Some(library) = library() else { return };
    let (command, path) = preloaded(&library, &own_program(), &["where"]);
    let inside = output(command, b"");
    let printed = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert_eq!(printed, "main: ring 0, threads: (0, 0)\n", "{inside:?}");
    assert!(take_figures(&path).starts_with("ring0_program"), "the name of the process");
}

#[test]
fn a_program_ends_as_it_does_alone() {
    let ends: [&[&str]; 9] = [
        &["return", "0"],
        &["return", "9"],
        &["exit", "3"],
        &["panic"],
        &["raise", "15"],
        &["raise", "9"],
        &["raise", "6"],
        &["raise", "5"],
        &["null"],
    ];
    for arguments in ends {
        own_is_the_same(arguments, b"");
    }
}

#[test]
fn input_and_output_are_those_of_the_program() {
    let input: String = (0..5000).map(|line| format!("line {line}\n")).collect();
    own_is_the_same(&["lines"], input.as_bytes());
    own_is_the_same(&["lines"], b"");
}

#[test]
fn threads_come_and_go() {
    own_is_the_same(&["threads", "30"], b"");
    own_is_the_same(&["many-threads", "40"], b"");
}

#[test]
fn a_constructor_waits_for_a_thread_that_makes_another() {
    let printed = own_is_the_same(&["constructor"], b"");
    assert!(printed.is_none_or(|printed| printed == "42\nloaded\n"));
}

#[test]
fn threads_end_by_pthread_exit() {
    own_is_the_same(&["thread-exits"], b"");
    let printed = own_is_the_same(&["first-thread-exits"], b"");
    assert!(printed.is_none_or(|printed| printed == "the other thread goes on\n"));
}

#[test]
fn a_thread_is_cancelled_while_it_computes_and_while_it_waits() {
    for how in ["cancelled", "cancelled-asleep"] {
        let printed = own_is_the_same(&[how], b"");
        assert!(printed.is_none_or(|printed| printed == "true\n"), "{how}");
    }
}

/// Cancellation while a thread computes, `pthread_exit`, a jump and the end, each in a handler.
#[test]
fn no_thread_waits_for_those_that_handlers_took_away() {
    let Some(library) = library() else { return };
    let file = TemporaryFile::new("lost");
    for how in ["cancel", "exit", "jump", "call"] {
        let arguments = (&["lost", how, file.path()][..], &b""[..]);
        let (_, faults) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
        assert!(faults > 500, "{how}: {faults} faults");
    }
    for how in ["exit", "jump", "call"] {
        let arguments = (&["first-thread-lost", how, file.path()][..], &b""[..]);
        let (printed, _) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
        assert!(printed.contains(' '), "{how}: {printed}");
    }
}

#[test]
fn a_handler_has_the_stack_that_it_would_have() {
    own_is_the_same(&["deep-handler"], b"");
}

#[test]
fn there_are_no_restartable_sequences() {
    let Some(library) = library() else { return };
    let (command, path) = preloaded(&library, &own_program(), &["rseq"]);
    let inside = output(command, b"");
    let printed = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert_eq!(printed, format!("{}\n", libc::ENOSYS), "{inside:?}");
    take_figures(&path);
}

#[test]
fn a_cache_that_is_too_small_is_an_error() {
    let Some(library) = library() else { return };
    let (mut command, _) = preloaded(&library, &own_program(), &["where"]);
    command.envs([("VELLUM_AQUILA_MIN", "1"), ("VELLUM_AQUILA_CACHE", "262143")]);
    let inside = output(command, b"");
    let said = String::from_utf8_lossy(&inside.stderr).into_owned();
    assert_eq!((inside.status.code(), &inside.stdout[..]), (Some(126), &b""[..]), "{said}");
    let least = "a cache of 63 pages is too small; have 64 or more, which are 262144 bytes";
    assert!(said.contains(least), "{said}");
}

/// Handlers of the library must not ask the loader for their thread's data, which may allocate: so
/// it tells the loader that its data has a fixed place.
#[test]
fn the_library_has_its_threads_data_at_a_fixed_place() {
    const DYNAMIC: u32 = 2;
    const FLAGS: u64 = 30;
    const STATIC_TLS: u64 = 0x10;
    let Some(library) = library() else { return };
    let bytes = fs::read(library).unwrap();
    let word = |at: usize| u64::from_le_bytes(bytes[at..][..8].try_into().unwrap());
    let short = |at: usize| usize::from(u16::from_le_bytes(bytes[at..][..2].try_into().unwrap()));
    let headers = (0..short(56)).map(|number| word(32) as usize + number * short(54));
    let is_dynamic = |at: &usize| bytes[*at..][..4] == DYNAMIC.to_le_bytes();
    let dynamic = headers.into_iter().find(is_dynamic).unwrap();
    let start = word(dynamic + 8) as usize;
    let entries = (0..word(dynamic + 32) as usize).step_by(16).map(|at| start + at);
    let flags = entries.into_iter().find(|at| word(*at) == FLAGS).map_or(0, |at| word(at + 8));
    assert!(flags & STATIC_TLS != 0, "{flags:#x}");
}

#[test]
fn what_runs_at_exit_runs_in_ring_0() {
    let printed = own_is_the_same(&["at-exit"], b"");
    assert!(printed.is_none_or(|printed| printed.ends_with(": true\n")));
}

#[test]
fn children_go_on_and_programs_begin_in_ring_0() {
    own_is_the_same(&["fork"], b"");
    own_is_the_same(&["spawn"], b"");
    let Some(library) = library() else { return };
    let (command, path) = preloaded(&library, &own_program(), &["exec"]);
    let inside = output(command, b"");
    let printed = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert_eq!(printed, "main: ring 0, threads: (0, 0)\n", "{inside:?}");
    take_figures(&path);
}

#[test]
fn descriptors_have_their_numbers_and_stay_open() {
    own_is_the_same(&["descriptors"], b"");
}

#[test]
fn signals_are_handled_meanwhile() {
    own_is_the_same(&["signals"], b"");
}

#[test]
fn the_stack_of_the_first_thread_grows() {
    own_is_the_same(&["deep"], b"");
}

/// Numbers that are not in order, a line each.
fn numbers(lines: u32) -> Vec<u8> {
    let number = |at: u32| format!("{} {at}\n", at.wrapping_mul(2_654_435_761) >> 12);
    (0..lines).map(number).collect::<String>().into_bytes()
}

/// A file of some hundred pages and a part of one.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ring0-{name}-{}", std::process::id()));
        fs::write(&path, numbers(100_000)).unwrap();
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn mapped_files_have_the_same_bytes_through_the_cache() {
    let Some(library) = library() else { return };
    let file = TemporaryFile::new("mapped");
    let pages = fs::metadata(&file.0).unwrap().len().div_ceil(4096);
    let arguments = (&["map", file.path()][..], &b""[..]);
    let (_, faults) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
    assert!(faults > pages, "{faults} faults");
    // Other files are the kernel's.
    let others = [("VELLUM_AQUILA", "/no/*:*.other"), ("VELLUM_AQUILA_CACHE", "262144")];
    let (_, faults) = is_the_same_with(&others, &library, &own_program(), arguments);
    assert_eq!(faults, 0);
    // And so are those that are open for writing.
    let writer = fs::OpenOptions::new().append(true).open(&file.0).unwrap();
    let (_, faults) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
    assert_eq!(faults, 0);
    drop(writer);
    let like = format!("*/ring0-mapped-{}", std::process::id());
    let pattern = [("VELLUM_AQUILA", &like[..])];
    let (_, faults) = is_the_same_with(&pattern, &library, &own_program(), arguments);
    assert!(faults > 0);
}

#[test]
fn code_in_ring_3_and_system_calls_see_mapped_files() {
    let Some(library) = library() else { return };
    let file = TemporaryFile::new("ring-3");
    let arguments = (&["ring-3", file.path()][..], &b""[..]);
    let (printed, faults) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
    assert!(faults > 0);
    assert_eq!(printed, "handler true\nthread 1\n10000 10000 true\n");
}

#[test]
fn bad_accesses_to_mapped_files_are_the_signals_that_they_would_be() {
    let Some(library) = library() else { return };
    for how in ["store", "truncated"] {
        let file = TemporaryFile::new(how);
        let (mut command, path) = preloaded(&library, &own_program(), &["bad", how, file.path()]);
        command.envs(CACHED);
        let inside = output(command, b"");
        // The file is another one afterwards.
        let file = TemporaryFile::new(how);
        let mut alone = Command::new(own_program());
        alone.args(["bad", how, file.path()]);
        let alone = output(alone, b"");
        assert_eq!((&inside.stdout, inside.status), (&alone.stdout, alone.status), "{inside:?}");
        assert_eq!(alone.status.code(), Some(9));
        take_figures(&path);
    }
}

#[test]
fn threads_map_and_unmap_files_at_the_same_time() {
    let Some(library) = library() else { return };
    let file = TemporaryFile::new("in-threads");
    let arguments = (&["map-in-threads", file.path(), "8"][..], &b""[..]);
    let (_, faults) = is_the_same_with(&CACHED, &library, &own_program(), arguments);
    assert!(faults > 1000, "{faults} faults");
}

#[test]
fn what_the_cache_cannot_do_is_an_error() {
    let Some(library) = library() else { return };
    let file = TemporaryFile::new("refused");
    let (mut command, path) = preloaded(&library, &own_program(), &["refused", file.path()]);
    command.envs(CACHED);
    let inside = output(command, b"");
    let errors = [libc::ENOMEM, libc::EINVAL, libc::ENOMEM, libc::ENOMEM];
    let expected: String = errors.iter().map(|error| format!("{error}\n")).collect();
    let printed = String::from_utf8_lossy(&inside.stdout).into_owned();
    assert_eq!(printed, format!("{expected}true\n"), "{inside:?}");
    take_figures(&path);
}

#[test]
fn programs_read_databases_and_files_through_the_cache() {
    let Some(library) = library() else { return };
    if let Some(sqlite) = program("sqlite3") {
        let file = std::env::temp_dir().join(format!("ring0-read-{}.db", std::process::id()));
        let script = "create table t (a integer primary key, b text);\n\
                      with recursive n(i) as (select 1 union all select i + 1 from n limit 20000)\n\
                      insert into t select i, hex(i * i) from n; create index of_b on t (b);\n";
        let mut made = Command::new(&sqlite);
        made.arg(&file);
        assert!(output(made, script.as_bytes()).status.success());
        let script = "pragma mmap_size=100000000; pragma integrity_check;\n\
                      select count(*), sum(length(b)), sum(a) from t where b > '33';\n\
                      select * from t order by b desc limit 50;\n";
        let arguments = (&["-readonly", file.to_str().unwrap()][..], script.as_bytes());
        let (_, faults) = is_the_same_with(&CACHED, &library, &sqlite, arguments);
        assert!(faults > 100, "{faults} faults");
        fs::remove_file(file).unwrap();
    }
    if let Some(python) = program(PYTHON) {
        let script = "import mmap, os, sys\n\
                      f = open(sys.argv[1], 'rb')\n\
                      m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n\
                      whole = f.read()\n\
                      def check():\n\
                      \x20   out = os.memfd_create('out')\n\
                      \x20   assert os.write(out, m) == len(m)\n\
                      \x20   assert os.pread(out, len(m) + 1, 0) == whole\n\
                      \x20   assert m[-3000:] == whole[-3000:] and m.find(b'none') == -1\n\
                      check()\n\
                      child = os.fork()\n\
                      if child == 0:\n\
                      \x20   check()\n\
                      \x20   os._exit(7)\n\
                      assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n\
                      check()\n\
                      print(m.find(b'4321 77'))\n";
        let file = TemporaryFile::new("python");
        let arguments = (&["-c", script, file.path()][..], &b""[..]);
        let (_, faults) = is_the_same_with(&CACHED, &library, &python, arguments);
        assert!(faults > 100, "{faults} faults");
    }
}

#[test]
fn shells_run_as_they_do_alone() {
    let script = "x=0; for i in 1 2 3 4 5; do x=$((x + i)); done; echo $x; exec 3>&1; echo a >&3; \
                  echo b | (read y; echo \"got $y\"); (exit 4); echo $?; kill -TERM $$; echo no";
    let Some(library) = library() else { return };
    for name in ["dash", "bash"] {
        let Some(shell) = program(name) else { continue };
        is_the_same(&library, &shell, &["-c", script], b"");
        is_the_same(&library, &shell, &["-s"], b"trap 'echo bye' EXIT\ncd /\npwd\nexit 5\n");
    }
}

#[test]
fn filters_print_what_they_print_alone() {
    let Some(library) = library() else { return };
    let input = numbers(20_000);
    let filters: [(&str, &[&str]); 8] = [
        ("sort", &["-n", "--parallel=4", "-S", "1M"]),
        ("sha256sum", &[]),
        ("grep", &["-c", "7.*7"]),
        ("wc", &[]),
        ("xz", &["-c", "-T2", "-3", "--block-size=65536"]),
        ("gzip", &["-c", "-n"]),
        ("sed", &["-n", "s/\\(.\\)\\1/<&>/gp"]),
        ("mawk", &["{ s += $1 } END { print s }"]),
    ];
    for (name, arguments) in filters {
        let Some(path) = program(name) else { continue };
        is_the_same(&library, &path, arguments, &input);
    }
}

#[test]
fn databases_and_interpreters_print_what_they_print_alone() {
    let Some(library) = library() else { return };
    if let Some(sqlite) = program("sqlite3") {
        let script = "pragma mmap_size=100000000; create table t (a integer primary key, b text);\n\
                      with recursive n(i) as (select 1 union all select i + 1 from n limit 3000)\n\
                      insert into t select i, hex(i * i) from n;\n\
                      create index of_b on t (b); pragma integrity_check;\n\
                      select count(*), sum(length(b)) from t where b > '33';\n";
        let file = std::env::temp_dir().join(format!("ring0-{}.db", std::process::id()));
        // Each run begins without the file.
        let script = format!("drop table if exists t;\n{script}");
        is_the_same(&library, &sqlite, &[file.to_str().unwrap()], script.as_bytes());
        fs::remove_file(file).unwrap();
    }
    if let Some(python) = program(PYTHON) {
        let script = "import threading, subprocess, sys, zlib\n\
                      found = []\n\
                      def work(n): found.append(zlib.crc32(bytes(range(256)) * n))\n\
                      threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]\n\
                      [t.start() for t in threads]; [t.join() for t in threads]\n\
                      print(sorted(found))\n\
                      print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], \
                            capture_output=True).stdout)\n\
                      sys.exit(11)\n";
        is_the_same(&library, &python, &["-c", script], b"");
    }
}
