//! Messages that Vellum's client never sends.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::common::{Running, load, on_each};

/// Sends bytes and returns the daemon's answer, until it closes the connection.
fn answer(daemon: &Running, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    // The daemon may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn message(version: u32, body: &str) -> Vec<u8> {
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(body.as_bytes());
    bytes
}

#[test]
fn bad_messages_are_refused_with_a_reason() {
    on_each(1 << 20, |daemon| {
        let bad = [
            (message(1, "\"Load\""), "NoFile"),
            (message(1, "\"Remove\""), "NoFile"),
            (message(2, "\"List\""), "version 2"),
            (message(1, "\"Format\""), "unknown variant"),
            (message(1, "{}"), "BadMessage"),
            (message(1, ""), "BadMessage"),
            (message(1, "\"List\"")[..9].to_vec(), "its end is missing"),
            ([0xff; 8].to_vec(), "BadMessage"),
            (vec![0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0], "too many"),
        ];
        for (bytes, expected) in bad {
            let found = answer(daemon, &bytes);
            assert!(found.contains(expected), "{bytes:?}: {found}");
        }
        assert!(answer(daemon, &message(1, "\"List\"")).contains("EndOfList"));
    });
}

#[test]
fn no_bytes_break_the_daemon() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", b"bytes");
        let body = prop_oneof![".{0,40}", "\"(Load|List|Stat|Remove)\".{0,3}", "[\\[{\"]{0,400}"];
        let framed = (0..3_u32, body).prop_map(|(version, body)| message(version, &body));
        let bytes = prop_oneof![prop::collection::vec(any::<u8>(), 0..100), framed];
        TestRunner::new(ProptestConfig::with_cases(200))
            .run(&bytes, |bytes| {
                let found = answer(daemon, &bytes);
                prop_assert!(!found.contains("Loaded"), "{found}");
                Ok(())
            })
            .unwrap();
        load(&daemon.client, &file);
        assert_eq!(daemon.client.stat().unwrap().loads, 1);
    });
}
