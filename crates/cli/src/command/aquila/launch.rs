//! `vellum aquila run`: a program with a library preloaded, that maps its files through a cache, or
//! that moves it to ring 0.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::thread;

use rustix::fs::{MemfdFlags, fgetxattr, memfd_create};
use rustix::process::{Pid, PidfdFlags, Signal, getpgrp, pidfd_open, pidfd_send_signal};
use rustix::termios::tcgetpgrp;
use signal_hook::low_level::pipe;
use vellum_aquila::{Backend, BackendChoice, Faults, Options};

use crate::error::{Doing as _, Failure, Outcome};
use crate::interrupt::ignored_signals;
use crate::size;

/// The values of `--backend`.
const USERFAULTFD: &str = "userfaultfd";
const RING_0: &str = "ring0";

/// The library that is preloaded for a backend, its package, and what cargo builds it as.
fn library_of(backend: &str) -> (&'static str, &'static str) {
    match backend {
        RING_0 => ("libvellum_ring0.so", "vellum-aquila-ring0 --examples"),
        _ => ("libvellum_preload.so", "vellum-preload"),
    }
}

const HELP: &str = "\
Examples:
  vellum aquila run -- bfs graph.bin                     256 MiB for all files that it maps
  vellum aquila run --cache 4GiB --direct --statistics -- search index/
  vellum aquila run --files '*.sst' --policy clock -- db_bench --mmap_read=1 ...
  vellum aquila run --backend ring0 --statistics -- sort words

What the program maps for reading, through a descriptor that cannot write, goes through a cache of
the process' own. The cache has so many bytes and no more, its policy says which pages leave, and
with --direct the kernel keeps no second copy. Other mappings are the kernel's. A child that the
program forks has its files by the kernel; a program that it executes has a cache of its own.

A writer that opens such a file waits until the kernel maps it instead, so all see one file. That
takes a lease: of files of other users, without CAP_LEASE, and of NFS, the program does not see
changes; leave them out by --files. docs/aquila.md says what else is different from mmap.

The program must be linked dynamically. It needs Linux 6.6 and the right to handle page faults of
system calls: CAP_SYS_PTRACE (root has it), access to /dev/userfaultfd, or the setting
vm.unprivileged_userfaultfd = 1.

With --backend ring0 all threads of the program run in ring 0 of a guest of KVM, from 'main' on, and
handle the faults of the cache there. So do programs that it executes. A child that it forks goes on
as usual, and has its files by the kernel. No writer waits: leave files out that are written while
the program runs. If threads cannot go to ring 0 here ('vellum aquila doctor' says why), the program
is not run.";

/// Run a program; the files that it maps for reading go through a cache of its own
#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Arguments {
    /// What handles the page faults of the cache: userfaultfd, or the program in ring 0 of a guest
    #[arg(long, value_parser = [USERFAULTFD, RING_0], default_value = USERFAULTFD)]
    backend: String,
    /// Size of the cache
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256MiB")]
    cache: u64,
    /// Only files whose whole path matches: '*' is any bytes, '?' is one [default: all]
    #[arg(long, value_name = "PATTERN")]
    files: Vec<String>,
    /// Only files of this size and more, and those that match --files
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    at_least: Option<u64>,
    /// Which pages leave first
    #[arg(long, value_parser = ["s3-fifo", "clock", "lru"], default_value = "s3-fifo")]
    policy: String,
    /// Read past the kernel's page cache
    #[arg(long)]
    direct: bool,
    /// Say what the cache did when the program has ended
    #[arg(long)]
    statistics: bool,
    /// The library to preload [default: next to this program, or in ../lib/vellum]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    #[arg(allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Runs the command. Does not return if the program ran: this process becomes the program, or ends
/// as it does.
///
/// # Errors
/// When the program cannot be run, or would have no cache.
pub fn run(arguments: &Arguments) -> Outcome {
    match arguments.backend.as_str() {
        RING_0 => check_ring_0(arguments)?,
        _ => check_cache(arguments)?,
    }
    let library = library(arguments)?;
    let [name, rest @ ..] = &arguments.program[..] else {
        return Err(Failure::message("name the program to run"));
    };
    let program = find(name)?;
    check_program(&program, &arguments.backend)?;
    let mut command = Command::new(&program);
    command.arg0(name).args(rest);
    set_environment(&mut command, arguments, &library)?;
    if !arguments.statistics {
        return Err(command.exec()).doing(|| format!("running {}", program.display()));
    }
    let figures = memfd_create("vellum-statistics", MemfdFlags::CLOEXEC).map_err(io::Error::from);
    let mut figures = File::from(figures.doing(|| "making a file in memory".to_owned())?);
    let path = format!("/proc/{}/fd/{}", std::process::id(), figures.as_raw_fd());
    command.env("VELLUM_AQUILA_STATISTICS", path);
    let ended = status(&mut command).doing(|| format!("running {}", program.display()))?;
    let mut text = String::new();
    figures.read_to_string(&mut text).doing(|| "reading statistics".to_owned())?;
    // If standard error is closed, the program's exit code is what is left.
    let _ = io::stderr().write_all(about(&text, &arguments.backend).as_bytes());
    std::process::exit(code_of(ended));
}

/// Runs a program until it ends, and passes signals on to it. A terminal sends its own to the
/// program, too.
fn status(command: &mut Command) -> io::Result<ExitStatus> {
    const PASSED: [Signal; 5] =
        [Signal::TERM, Signal::HUP, Signal::USR1, Signal::USR2, Signal::WINCH];
    const OF_TERMINALS: [Signal; 2] = [Signal::INT, Signal::QUIT];
    let ignored = ignored_signals();
    let mut received = Vec::new();
    for signal in PASSED.into_iter().chain(OF_TERMINALS) {
        // What is switched off stays so, for the program, too.
        if ignored & 1 << (signal.as_raw() - 1) == 0 {
            let (reader, writer) = UnixStream::pair()?;
            pipe::register(signal.as_raw(), writer)?;
            received.push((signal, reader));
        }
    }
    let mut child = command.spawn()?;
    let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    let process = Arc::new(process);
    for (signal, mut reader) in received {
        let process = Arc::clone(&process);
        thread::spawn(move || {
            while reader.read_exact(&mut [0]).is_ok() {
                if PASSED.contains(&signal) || !has_terminal() {
                    // It may have ended.
                    let _ = pidfd_send_signal(&*process, signal);
                }
            }
        });
    }
    child.wait()
}

/// Whether the processes of this group get the signals of a terminal.
fn has_terminal() -> bool {
    let terminal = File::open("/dev/tty");
    terminal.is_ok_and(|terminal| tcgetpgrp(terminal).ok() == Some(getpgrp()))
}

/// Finds out now whether the program will have a cache: there it could not say so.
fn check_cache(arguments: &Arguments) -> Outcome {
    let only = BackendChoice::Only(Backend::Userfaultfd);
    let options = Options::new(arguments.cache).backend(only).faults(Faults::Monitor);
    match options.build() {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::message(error.to_string())),
    }
}

/// Finds out now whether threads can go to ring 0. If they cannot, the program does not run: in
/// ring 3 it would be what the user did not ask for.
fn check_ring_0(arguments: &Arguments) -> Outcome {
    if arguments.direct {
        return Err(Failure::message("--direct is for the backend userfaultfd alone"));
    }
    let ring_0 = vellum_aquila_ring0::doctor();
    if ring_0.works {
        return Ok(());
    }
    Err(Failure::message(format!(
        "the program was not run: ring 0 does not work here, as 'vellum aquila doctor' says: {}",
        ring_0.about
    )))
}

fn library(arguments: &Arguments) -> Outcome<PathBuf> {
    let (name, package) = library_of(&arguments.backend);
    let own = std::env::current_exe()
        .and_then(std::fs::canonicalize)
        .doing(|| "finding this program".to_owned())?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    // The second is where cargo builds one of them.
    let usual = ["", "examples", "../lib/vellum"].map(|below| folder.join(below).join(name));
    let candidates = arguments.library.as_slice().iter().chain(&usual);
    // If it is named, no other will do.
    let mut candidates = candidates.take(if arguments.library.is_some() { 1 } else { usual.len() });
    let found = candidates.find(|path| path.is_file()).and_then(|path| path.canonicalize().ok());
    let found = found.ok_or_else(|| match &arguments.library {
        Some(library) => Failure::message(format!("{} is no file", library.display())),
        None => Failure::message(format!(
            "{name} is neither next to {} nor in ../lib/vellum: install it, build it by \
             'cargo build --release -p {package}', or name it by --library",
            own.display()
        )),
    })?;
    // The loader separates the names of libraries by them.
    match found.to_str().is_some_and(|path| !path.contains([':', ' '])) {
        true => Ok(found),
        false => Err(Failure::message(format!(
            "{}: the loader takes no library whose path has a space or a colon",
            found.display()
        ))),
    }
}

/// The path of a program, which is looked for as a shell does.
fn find(name: &OsStr) -> Outcome<PathBuf> {
    if name.as_encoded_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
    let is_program = |path: &PathBuf| {
        path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    let found = std::env::split_paths(&folders).map(|folder| folder.join(name)).find(is_program);
    found.ok_or_else(|| Failure::message(format!("no program {} in PATH", name.display())))
}

/// Refuses what would ignore the library without a word. Of a script that is its interpreter.
fn check_program(path: &Path, backend: &str) -> Outcome {
    let script = path.display();
    let (mut name, mut path) = (script.to_string(), path.to_owned());
    for _ in 0..=MOST_INTERPRETERS {
        let about = path.metadata().doing(|| format!("opening {name}"))?;
        // To open a pipe would wait for its other end.
        if !about.is_file() {
            return Err(Failure::message(format!("{name} is not a file that can be run")));
        }
        let file = File::open(&path).doing(|| format!("opening {name}"))?;
        match interpreter_of(&file).doing(|| format!("reading {name}"))? {
            Some(interpreter) => {
                name = format!("{} (the interpreter of {script})", interpreter.display());
                path = interpreter;
            }
            None => return check_binary(&name, &file, backend),
        }
    }
    Err(Failure::message(format!(
        "{name} is a script again: the kernel goes through at most {MOST_INTERPRETERS} of them"
    )))
}

/// Scripts that are interpreters of others before a program that is no script, which the kernel
/// runs.
const MOST_INTERPRETERS: usize = 5;

/// The interpreter of a script, found as the kernel finds it.
fn interpreter_of(file: &File) -> io::Result<Option<PathBuf>> {
    /// Bytes that the kernel looks at.
    const MOST: u64 = 256;
    let mut begin = Vec::new();
    file.take(MOST).read_to_end(&mut begin)?;
    let Some(line) = begin.strip_prefix(b"#!") else { return Ok(None) };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| b" \t\0".contains(byte));
    let word = words.find(|word| !word.is_empty());
    // The kernel takes no path that may go on after what it looks at.
    let is_cut = begin.len() as u64 == MOST && !begin.contains(&b'\n') && words.next().is_none();
    let word = word.filter(|_| !is_cut);
    Ok(word.map(|word| PathBuf::from(OsStr::from_bytes(word))))
}

/// Refuses a program that is no script.
fn check_binary(name: &str, file: &File, backend: &str) -> Outcome {
    let refuse = |why: &str| Err(Failure::message(format!("{name} {why}")));
    if file.metadata().is_ok_and(|data| data.permissions().mode() & 0o6000 != 0) {
        return refuse("runs with another user's rights: the loader preloads no library for that");
    }
    if fgetxattr(file, "security.capability", &mut [0; 64][..]).is_ok() {
        return refuse(
            "has rights of its own (file capabilities, as 'getcap' shows them): the loader \
             preloads no library for that",
        );
    }
    let header = header_of(file).doing(|| format!("reading {name}"))?;
    if header.is_some_and(|header| header.class != CLASS_64) {
        return refuse("is a program for 32 bits: it cannot load the library, which is for 64");
    }
    if header.is_some_and(|header| header.machine != OWN_MACHINE) {
        return refuse("is a program for another kind of processor: it cannot load the library");
    }
    if let Some(header) = header
        && is_static(file, header).unwrap_or(false)
    {
        return refuse(
            "is linked statically: it loads no library, so its calls cannot be answered",
        );
    }
    if backend == RING_0 && begins_otherwise(file).unwrap_or(false) {
        return refuse(
            "does not begin as programs with the C library do (__libc_start_main): the library \
             could not move it to ring 0",
        );
    }
    Ok(())
}

/// What the header of a program (ELF) says.
#[derive(Clone, Copy)]
struct Header {
    class: u8,
    machine: u16,
    /// Where the headers of segments are in the file, their bytes, and how many there are.
    segments: (u64, u64, u64),
}

const CLASS_64: u8 = 2;

/// The number of this processor's kind.
const OWN_MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// The header of a program. Other files have none.
fn header_of(file: &File) -> io::Result<Option<Header>> {
    let mut bytes = [0; 64];
    let count = file.read_at(&mut bytes, 0)?;
    if count < bytes.len() || !bytes.starts_with(b"\x7fELF") {
        return Ok(None);
    }
    let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let start = u64::from_le_bytes(std::array::from_fn(|byte| bytes[32 + byte]));
    let segments = (start, short(54).into(), short(56).into());
    Ok(Some(Header { class: bytes[4], machine: short(18), segments }))
}

/// Whether a file is a program that does not name the function by which those of the C library
/// begin.
fn begins_otherwise(mut file: &File) -> io::Result<bool> {
    const BEGIN: &[u8] = b"\0__libc_start_main\0";
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    let is_program = bytes.starts_with(b"\x7fELF");
    Ok(is_program && !bytes.windows(BEGIN.len()).any(|window| window == BEGIN))
}

/// Whether a program for 64 bits asks for no loader.
fn is_static(file: &File, header: Header) -> io::Result<bool> {
    const LOADER: u32 = 3;
    let (start, bytes, count) = header.segments;
    for entry in 0..count {
        let mut kind = [0; 4];
        file.read_exact_at(&mut kind, start.saturating_add(entry * bytes))?;
        if u32::from_le_bytes(kind) == LOADER {
            return Ok(false);
        }
    }
    Ok(true)
}

fn set_environment(command: &mut Command, arguments: &Arguments, library: &Path) -> Outcome {
    if let Some(pattern) = arguments.files.iter().find(|pattern| pattern.contains(':')) {
        return Err(Failure::message(format!(
            "the pattern '{pattern}' has a colon: write '?' in its place"
        )));
    }
    let mut libraries = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        libraries.push(":");
        libraries.push(others);
    }
    let at_least = match (arguments.at_least, &arguments.files[..]) {
        (Some(bytes), _) => Some(bytes),
        (None, []) => Some(1),
        (None, _) => None,
    };
    command.env("LD_PRELOAD", libraries);
    command.env("VELLUM_AQUILA", arguments.files.join(":"));
    command.env("VELLUM_AQUILA_MIN", at_least.map(|bytes| bytes.to_string()).unwrap_or_default());
    command.env("VELLUM_AQUILA_CACHE", arguments.cache.to_string());
    command.env("VELLUM_AQUILA_POLICY", &arguments.policy);
    command.env("VELLUM_AQUILA_DIRECT", if arguments.direct { "1" } else { "0" });
    command.env_remove("VELLUM_AQUILA_STATISTICS");
    if arguments.backend == RING_0 {
        let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
        command.env("GLIBC_TUNABLES", without_rseq(tunables));
    }
    Ok(())
}

/// Settings of the C library, by which it registers no restartable sequences: the kernel does not
/// abort them in ring 0. The last one of a name counts.
fn without_rseq(mut tunables: OsString) -> OsString {
    if !tunables.is_empty() {
        tunables.push(":");
    }
    tunables.push("glibc.pthread.rseq=0");
    tunables
}

/// What the processes say that have left figures: a line for each.
fn about(text: &str, backend: &str) -> String {
    if text.is_empty() {
        let reason = match backend {
            RING_0 => "it was killed, or ended without 'exit'",
            _ => "none mapped a file through a cache, or it was killed",
        };
        return format!("vellum: no process left statistics: {reason}\n");
    }
    text.lines().map(|line| format!("vellum: {line}\n")).collect()
}

/// The exit code that a shell would show.
fn code_of(ended: ExitStatus) -> i32 {
    ended.code().or(ended.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    // In tests, unwrap is the assertion.
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use rustix::fs::{XattrFlags, setxattr};

    use super::*;

    /// What is said of a program that is refused.
    #[track_caller]
    fn refused(path: &Path) -> String {
        check_program(path, USERFAULTFD).unwrap_err().to_string()
    }

    /// This program, which may be run.
    fn own(folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        path
    }

    #[test]
    fn programs_that_load_no_library_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = own(folder.path(), "program");
        check_program(&path, USERFAULTFD).unwrap();
        let change = |at: u64, byte: u8| {
            File::options().write(true).open(&path).unwrap().write_all_at(&[byte], at).unwrap();
        };
        change(4, 1);
        assert!(refused(&path).contains("is a program for 32 bits"));
        change(4, 2);
        change(18, 3);
        assert!(refused(&path).contains("for another kind of processor"));
        // No segments.
        change(18, OWN_MACHINE as u8);
        change(56, 0);
        assert!(refused(&path).contains("is linked statically"));
    }

    #[test]
    fn what_the_kernel_runs_not_is_neither_waited_for_nor_guessed() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o700);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        assert!(refused(&pipe).contains("is not a file that can be run"));
        assert!(refused(folder.path()).contains("is not a file that can be run"));
        // An interpreter whose path goes on after what the kernel looks at.
        let script = folder.path().join("script");
        fs::write(&script, format!("#!/{}\n", "long/".repeat(60))).unwrap();
        check_program(&script, USERFAULTFD).unwrap();
    }

    #[test]
    fn programs_with_rights_of_their_own_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = own(folder.path(), "program");
        // Version 2: the right to open any port, permitted and in force.
        let rights: Vec<u8> =
            [0x0200_0001_u32, 1 << 10, 0, 0, 0].into_iter().flat_map(u32::to_le_bytes).collect();
        match setxattr(&path, "security.capability", &rights, XattrFlags::empty()) {
            Ok(()) => assert!(refused(&path).contains("file capabilities")),
            Err(errno) => println!("skipped: no right to give rights: {errno}"),
        }
        let path = own(folder.path(), "other");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(refused(&path).contains("another user's rights"));
    }

    #[test]
    fn scripts_are_what_their_interpreters_are() {
        let folder = tempfile::tempdir().unwrap();
        let program = own(folder.path(), "program");
        let script = |name: &str, line: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!{line}\nexit 1\n")).unwrap();
            path
        };
        let mut last = script("0", &format!(" \t{} -x", program.display()));
        // The kernel takes no rights from a script.
        fs::set_permissions(&last, fs::Permissions::from_mode(0o4755)).unwrap();
        for name in 1..5 {
            check_program(&last, USERFAULTFD).unwrap();
            last = script(&name.to_string(), &last.display().to_string());
        }
        check_program(&last, USERFAULTFD).unwrap();
        let longer = script("5", &last.display().to_string());
        assert!(refused(&longer).contains("is a script again"), "{}", refused(&longer));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
        let said = refused(&last);
        assert!(said.contains("the interpreter of") && said.contains("user's rights"), "{said}");
        assert!(refused(&script("none", "/no/such")).contains("opening /no/such (the interpreter"));
        // The kernel runs neither: the shell says so.
        check_program(&script("empty", " "), USERFAULTFD).unwrap();
    }

    #[test]
    fn settings_of_the_c_library_stay() {
        assert_eq!(without_rseq(OsString::new()), "glibc.pthread.rseq=0");
        let own = OsString::from("glibc.malloc.check=1:glibc.pthread.rseq=1");
        let expected = "glibc.malloc.check=1:glibc.pthread.rseq=1:glibc.pthread.rseq=0";
        assert_eq!(without_rseq(own), expected);
    }
}
