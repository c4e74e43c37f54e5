//! What one client does, or suffers, concerns no other.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::thread;

use vellum_morsel::{ClientError, Refusal};

use crate::common::{eventually, load, loading_process, on_each};

#[test]
fn a_load_ends_when_the_only_one_who_waits_is_killed() {
    on_each(4 << 30, |daemon| {
        let (path, _) = daemon.slow_file();
        let mut child = loading_process(&daemon.socket(), &path);
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("the memory is given back", || daemon.client.stat().unwrap().used == 0);
        assert_eq!(daemon.client.stat().unwrap().objects, 0);
        let (_, other) = daemon.file("other", b"other");
        assert_eq!(load(&daemon.client, &other).0, b"other");
    });
}

#[test]
fn a_load_goes_on_for_those_who_are_left() {
    on_each(4 << 30, |daemon| {
        let (path, file) = daemon.slow_file();
        let loads = daemon.client.stat().unwrap().loads;
        thread::scope(|scope| {
            let waiting = scope.spawn(|| daemon.client.load(&file, |_| {}).unwrap());
            eventually("a load begins", || daemon.client.stat().unwrap().loads > loads);
            let mut child = loading_process(&daemon.socket(), &path);
            child.kill().unwrap();
            child.wait().unwrap();
            let loaded = waiting.join().unwrap();
            assert_eq!(loaded.morsel.length(), file.metadata().unwrap().len());
        });
        assert_eq!(daemon.client.stat().unwrap().loads, loads + 1);
    });
}

#[test]
fn those_who_say_nothing_do_not_keep_others_waiting() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", b"bytes");
        let connect = || UnixStream::connect(daemon.socket()).unwrap();
        let mut idle: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
        for stream in &mut idle[..50] {
            stream.write_all(&[6, 0]).unwrap();
        }
        load(&daemon.client, &file);
        // A user has a most number of connections, and hears of it.
        idle.extend((0..28).map(|_| connect()));
        let full = || matches!(daemon.client.stat(), Err(ClientError::Refused(Refusal::Busy)));
        eventually("the user has too many connections", full);
        drop(idle);
        eventually("there is room again", || daemon.client.stat().is_ok());
    });
}
