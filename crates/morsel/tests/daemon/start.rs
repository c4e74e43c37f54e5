//! Which daemon may listen at a path, and what an ended daemon leaves.

use std::os::unix::net::UnixListener;

use vellum_morsel::{BackendChoice, BackendKind, Client, Daemon, DaemonError, Provider};

use crate::common::{Running, eventually, options};

fn provider() -> Provider {
    Provider::new(BackendChoice::Only(BackendKind::Memfd)).unwrap()
}

#[test]
fn the_socket_goes_with_the_daemon() {
    let mut daemon = Running::start(provider(), 1 << 20);
    assert!(daemon.socket().exists());
    daemon.stop();
    assert!(!daemon.socket().exists());
    // Another one takes its place, and finds nothing loaded.
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
fn somebody_elses_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let other = UnixListener::bind(&path).unwrap();
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(matches!(refused, DaemonError::Running { .. }), "{refused:?}");
    // Once no daemon listens any more, as after a kill, a new one replaces the socket.
    drop(other);
    assert!(path.exists());
    let mut daemon = None;
    // A process that another test is just starting has a copy of the listener for a moment.
    eventually("no daemon listens", || {
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
fn nothing_is_made_but_the_socket_and_its_lock() {
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
    // A path that a socket's address has no room for.
    let path = folder.path().join("s".repeat(120));
    let refused = Daemon::bind(provider(), &options(&path, 1)).unwrap_err();
    assert!(matches!(refused, DaemonError::Socket { .. }), "{refused:?}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
