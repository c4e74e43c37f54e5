//! The cache daemon and its commands.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use support::{Folder, fails, noise, ok, run, text};

/// A daemon at a socket. If a test fails before it ends the daemon, this kills it.
struct Daemon(Child);

impl Daemon {
    fn start(socket: &Path, limit: &str) -> Self {
        let socket = socket.to_str().unwrap();
        let mut command = support::command(&[
            "morseld",
            "--socket",
            socket,
            "--limit",
            limit,
            "--backend",
            "memfd",
        ]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("listening at ") && line.contains("memfd"), "{line}");
        Self(child)
    }

    /// Sends a signal and returns the exit code.
    fn end(mut self, signal: &str) -> Option<i32> {
        let number = self.0.id().to_string();
        assert!(Command::new("kill").args([signal, &number]).status().unwrap().success());
        self.0.wait().unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The daemon may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_file_is_loaded_listed_and_forgotten() {
    let folder = Folder::new();
    let (socket, file) = (folder.name("socket"), folder.name("model"));
    std::fs::write(&file, noise(3 << 20, 5)).unwrap();
    let daemon = Daemon::start(socket.as_ref(), "4MiB");
    let morsel = |words: &[&str]| text(&[&["morsel", "--socket", &socket], words].concat());
    let first = morsel(&["load", &file]);
    assert!(first.contains("model: loaded, 3.0 MiB"), "{first}");
    let second = morsel(&["load", &file]);
    assert!(second.contains("was there") && second.contains("memfd"), "{second}");
    let list = morsel(&["ls"]);
    let line = list.lines().nth(1).unwrap();
    assert!(line.starts_with(&file) && line.ends_with("3.0 MiB     2       ?"), "{list}");
    let stat = morsel(&["stat"]);
    for part in ["3.0 MiB of 4.0 MiB", "loads ", "backend memfd: "] {
        assert!(stat.contains(part), "{stat}");
    }
    assert_eq!(morsel(&["rm", &file]), "");
    assert_eq!(morsel(&["ls"]), "");
    let again = fails(&["morsel", "--socket", &socket, "rm", &file]);
    assert!(again.contains("does not have it"), "{again}");
    assert_eq!(daemon.end("-TERM"), Some(0));
    assert!(!Path::new(&socket).exists());
}

#[test]
fn errors_name_their_cause() {
    let folder = Folder::new();
    let (socket, file) = (folder.name("socket"), folder.name("large"));
    std::fs::write(&file, noise(10_000, 5)).unwrap();
    let nobody = fails(&["morsel", "--socket", &socket, "load", &file]);
    assert!(nobody.contains("vellum morseld"), "{nobody}");
    let stat = text(&["morsel", "--socket", &socket, "stat"]);
    assert!(stat.contains("no cache daemon answers"), "{stat}");
    let mut forced =
        support::command(&["morseld", "--socket", &socket, "--limit", "1M", "--backend", "kernel"]);
    let forced = support::failed(forced.env("VELLUM_MORSELS", folder.name("")).output().unwrap());
    assert!(
        forced.contains("no morselfs is mounted at") && forced.contains("mount -t"),
        "{forced}"
    );
    let daemon = Daemon::start(socket.as_ref(), "8KiB");
    let large = fails(&["morsel", "--socket", &socket, "load", &file]);
    assert!(large.contains("large: ") && large.contains("--limit"), "{large}");
    let missing = fails(&["morsel", "--socket", &socket, "load", &folder.name("none")]);
    assert!(missing.contains("none"), "{missing}");
    let second = fails(&["morseld", "--socket", &socket]);
    assert!(second.contains("already"), "{second}");
    // A killed daemon leaves its socket, which the next one takes over.
    assert_eq!(daemon.end("-KILL"), None);
    assert!(Path::new(&socket).exists());
    let next = Daemon::start(socket.as_ref(), "64KiB");
    ok(&["morsel", "--socket", &socket, "load", &file]);
    assert_eq!(next.end("-INT"), Some(0));
    assert_eq!(run(&["morseld", "--mode", "999"]).status.code(), Some(2));
}

#[test]
fn a_file_that_fails_does_not_stop_the_others() {
    let folder = Folder::new();
    let (socket, a, c) = (folder.name("socket"), folder.name("a"), folder.name("c"));
    let (missing, pipe) = (folder.name("missing"), folder.name("pipe"));
    for file in [&a, &c] {
        std::fs::write(file, noise(10_000, 5)).unwrap();
    }
    // Opening it would wait for a writer.
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let _daemon = Daemon::start(socket.as_ref(), "1MiB");
    let morsel = |words: &[&str]| run(&[&["morsel", "--socket", &socket], words].concat());
    for command in ["load", "rm"] {
        let done = morsel(&[command, &a, &missing, &pipe, &c]);
        assert_eq!(done.status.code(), Some(1));
        let said = String::from_utf8(done.stderr).unwrap();
        let said: Vec<&str> = said.lines().collect();
        assert!(said[0].contains("missing: No such file"), "{said:?}");
        assert!(said[1].contains("pipe: ") && said[1].contains("regular file"), "{said:?}");
        assert_eq!(said[2..], ["vellum: 2 of 4 files failed"]);
        let (left, lines) = if command == "load" { (3, 2) } else { (0, 0) };
        assert_eq!(String::from_utf8(done.stdout).unwrap().lines().count(), lines);
        assert_eq!(text(&["morsel", "--socket", &socket, "ls"]).lines().count(), left);
    }
    let last = morsel(&["load", &a, &missing]);
    assert_eq!(last.status.code(), Some(1));
    assert!(String::from_utf8(last.stdout).unwrap().contains("a: loaded"));
    assert_eq!(String::from_utf8(last.stderr).unwrap().lines().count(), 1);
}
