//! No client affects another, whatever it does.

use std::io::Write;
use std::os::unix::net::UnixStream;

use vellum_morsel::{ClientError, Refusal};

use crate::common::{Loading, eventually, load, on_each};

#[test]
fn a_load_ends_when_its_only_client_is_killed() {
    on_each(1 << 40, |daemon| {
        let (path, _) = daemon.endless_file();
        Loading::start(&daemon.socket(), &path).kill();
        eventually("the memory is given back", || daemon.client.stat().unwrap().used == 0);
        assert_eq!(daemon.client.stat().unwrap().objects, 0);
        let (_, other) = daemon.file("other", b"other");
        assert_eq!(load(&daemon.client, &other).0, b"other");
    });
}

#[test]
fn a_load_goes_on_for_the_remaining_clients() {
    on_each(1 << 40, |daemon| {
        let (path, _) = daemon.endless_file();
        let first = Loading::start(&daemon.socket(), &path);
        let mut second = Loading::start(&daemon.socket(), &path);
        first.kill();
        let before = second.done();
        while second.done() <= before {}
        assert_eq!(daemon.client.stat().unwrap().loads, 1);
        second.kill();
        eventually("the memory is given back", || daemon.client.stat().unwrap().used == 0);
    });
}

#[test]
fn silent_clients_do_not_delay_others() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", b"bytes");
        let connect = || UnixStream::connect(daemon.socket()).unwrap();
        // On a busy machine the daemon may close a connection before this writes to it.
        let begin_request = || {
            let streams = std::iter::repeat_with(connect).take(100);
            streams.into_iter().find(|mut stream| stream.write_all(&[6, 0]).is_ok())
        };
        let mut idle: Vec<UnixStream> = (0..50).map(|_| begin_request().unwrap()).collect();
        idle.extend((0..50).map(|_| connect()));
        load(&daemon.client, &file);
        // A user may have only so many connections. The daemon refuses further ones.
        idle.extend((0..28).map(|_| connect()));
        // The daemon closes connections that are silent for too long, so other clients can connect.
        eventually("the user has too many connections", || {
            let stat = daemon.client.stat();
            let is_full = matches!(stat, Err(ClientError::Refused(Refusal::Busy)));
            if !is_full {
                idle.push(connect());
            }
            is_full
        });
        drop(idle);
        eventually("there is room again", || daemon.client.stat().is_ok());
    });
}
