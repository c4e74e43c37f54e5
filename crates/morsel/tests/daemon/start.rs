//! Which daemon may listen at a path, and the files that a daemon leaves when it ends.

use std::os::unix::net::UnixListener;

use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonError, Provider};

use crate::common::{Running, eventually, options};

fn provider() -> Provider {
    Provider::new(BackendChoice::Only(BackendKind::Memfd)).unwrap()
}

#[test]
fn a_daemon_that_ends_removes_its_socket() {
    let mut daemon = Running::start(provider(), 1 << 20);
    assert!(daemon.socket().exists());
    daemon.stop();
    assert!(!daemon.socket().exists());
    // Another daemon takes its place, and has no files.
    let again = Daemon::bind(provider(), &options(&daemon.socket(), 1 << 20)).unwrap();
    assert_eq!(again.backend(), BackendKind::Memfd);
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = Running::start(provider(), 1 << 20);
    let second = Daemon::bind(provider(), &options(&daemon.socket(), 1 << 20)).unwrap_err();
    assert!(matches!(second, DaemonError::Running { .. }), "{second:?}");
    assert!(daemon.client.stat().is_ok());
}

#[test]
fn another_program_s_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let other = UnixListener::bind(&path).unwrap();
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(matches!(refused, DaemonError::Running { .. }), "{refused:?}");
    // Once no process listens, as after a kill, a new daemon replaces the socket.
    drop(other);
    assert!(path.exists());
    let mut daemon = None;
    // A process that another test is starting has a copy of the listener for a moment.
    eventually("no process listens", || {
        daemon = Daemon::bind(provider(), &options(&path, 1)).ok();
        daemon.is_some()
    });
    drop(daemon);
    assert!(!path.exists());
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes");
    std::fs::write(&path, b"mine").unwrap();
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(refused.to_string().contains("no socket"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
}

#[test]
fn a_daemon_creates_only_its_socket_and_lock() {
    let folder = tempfile::tempdir().unwrap();
    let names = || std::fs::read_dir(folder.path()).unwrap().count();
    let path = folder.path().join("run/socket");
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(refused.to_string().ends_with("run/socket cannot be made: its folder is missing"));
    assert_eq!(names(), 0);
    let nobody = Client::new(&path).stat().unwrap_err();
    assert!(nobody.to_string().contains("run/socket"), "{nobody}");
    let daemon = Daemon::bind(provider(), &options(&folder.path().join("socket"), 1)).unwrap();
    assert_eq!(names(), 2);
    drop(daemon);
    assert_eq!(names(), 0);
}

#[test]
fn a_daemon_that_could_not_start_leaves_no_lock() {
    let folder = tempfile::tempdir().unwrap();
    // A path that is too long for a socket's address.
    let path = folder.path().join("s".repeat(120));
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(matches!(refused, DaemonError::Socket { .. }), "{refused:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
