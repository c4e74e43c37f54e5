//! The text of errors, word by word: the cause, and what to do.
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;

use support::{Folder, checked, command, failed, fails, ok, run_with_input};

#[test]
fn a_missing_store() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    assert_eq!(fails(&["get", &store, "k"]), format!("vellum: {store} does not exist"));
}

#[test]
fn a_missing_folder() {
    let folder = Folder::new();
    let (store, parent) = (folder.name("no/such/a.vellum"), folder.name("no/such"));
    let text = format!("vellum: {store} cannot be created: the folder {parent} does not exist");
    assert_eq!(fails(&["put", &store, "k", "v"]), text);
}

#[test]
fn a_pool_that_is_too_small() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v"]);
    let text = "a pool of 1 bytes is too small for this store: it needs at least 32768 (32 KiB)";
    assert_eq!(fails(&["get", &store, "k", "--pool", "1"]), format!("vellum: {store}: {text}"));
}

#[test]
fn a_backslash_in_a_dump() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    let dump = b"VERSION=3\nformat=print\nHEADER=END\n a\n \\zz\nDATA=END\n";
    let error = failed(run_with_input(&["load", &store], dump));
    let text = "line 5: a backslash must be followed by another one, or by two hexadecimal digits";
    assert!(error.starts_with(&format!("vellum: standard input: {text}; nothing of")), "{error}");
}

#[test]
fn a_demonstration_without_files() {
    let folder = Folder::new();
    let dir = folder.name("");
    fs::write(folder.path("file"), "content").unwrap();
    let none = format!("vellum: no file in {dir} fits the limit of 1 B; raise --limit");
    assert_eq!(fails(&["demo", "--dir", &dir, "--limit", "1"]), none);
    fs::write(folder.path("file"), "").unwrap();
    let empty = "has no files with anything in them; choose another with --dir";
    assert_eq!(fails(&["demo", "--dir", &dir]), format!("vellum: {dir} {empty}"));
}

#[test]
fn a_backend_that_does_not_work_here() {
    if fs::exists("/dev/exmap").unwrap() {
        return;
    }
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", "v"]);
    let text = "the exmap backend does not work here: there is no /dev/exmap: load the kernel \
                module (vellum.ko); auto takes one that does";
    let error = fails(&["get", &store, "k", "--backend", "exmap"]);
    assert_eq!(error, format!("vellum: {store}: {text}"));
}

#[test]
fn a_daemon_that_this_user_may_not_connect_to() {
    let folder = Folder::new();
    let socket = folder.name("socket");
    let _daemon = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(folder.path("socket"), fs::Permissions::from_mode(0o0)).unwrap();
    let program = folder.path("vellum");
    fs::copy(env!("CARGO_BIN_EXE_vellum"), &program).unwrap();
    fs::set_permissions(folder.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut list = std::process::Command::new(&program);
    list.args(["morsel", "--socket", &socket, "ls"]);
    if rustix::process::geteuid().is_root() {
        // Root may connect to any socket.
        list.uid(65534);
    }
    let text = "have the daemon started with a --mode that lets you, or name another socket in \
                VELLUM_MORSELD";
    // Another test may fork while the copy is open for writing. Its child has the copy open until
    // it runs its own program.
    let output = loop {
        match list.output() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => std::thread::yield_now(),
            output => break output.unwrap(),
        }
    };
    let error = failed(checked(output));
    assert_eq!(error, format!("vellum: this user may not connect to the socket {socket}: {text}"));
}

#[test]
fn a_store_in_use() {
    let folder = Folder::new();
    let store = folder.name("a.vellum");
    ok(&["put", &store, "k", &"v".repeat(100_000)]);
    ok(&["put", &store, "l", &"v".repeat(100_000)]);
    let mut scan = command(&["scan", &store, "--full"]);
    let mut reader = scan.stdout(std::process::Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(reader.stdout.as_mut().unwrap(), &mut [0; 1]).unwrap();
    let text = "close it there first; one writer may have a file open, or several readers";
    let holder = reader.id();
    let error = fails(&["put", &store, "k", "new", "--wait", "0"]);
    assert_eq!(error, format!("vellum: {store} is in use by process {holder}: {text}"));
    drop(reader.stdout.take());
    reader.wait().unwrap();
}
