//! Files that a client may name, and files that change.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::thread;

use rustix::fs::{Mode, OFlags};
use vellum_morsel::{ClientError, Refusal};

use crate::common::{Running, eventually, load, on_each, pattern};

fn refusal(daemon: &Running, file: &File) -> Refusal {
    match daemon.client.load(file, |_| {}).unwrap_err() {
        ClientError::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_descriptor_that_does_not_prove_the_right_to_read_is_refused() {
    on_each(1 << 20, |daemon| {
        let (path, file) = daemon.file("file", b"secret");
        // The daemon refuses it even if it already has the file.
        load(&daemon.client, &file);
        let path_only = rustix::fs::open(&path, OFlags::PATH, Mode::empty()).unwrap();
        let write_only = OpenOptions::new().write(true).open(&path).unwrap();
        for bad in [File::from(path_only), write_only] {
            assert_eq!(refusal(daemon, &bad), Refusal::NotReadable);
            let removed = daemon.client.remove(&bad).unwrap_err();
            assert!(matches!(removed, ClientError::Refused(Refusal::NotReadable)));
        }
        let both = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        assert!(daemon.client.load(&both, |_| {}).unwrap().was_there);
    });
}

#[test]
fn only_regular_files_that_are_not_empty_are_loaded() {
    on_each(1 << 20, |daemon| {
        let (_, empty) = daemon.file("empty", b"");
        assert_eq!(refusal(daemon, &empty), Refusal::Empty);
        let folder = File::open(daemon.folder.path()).unwrap();
        assert_eq!(refusal(daemon, &folder), Refusal::NotRegular);
        assert_eq!(refusal(daemon, &File::open("/dev/zero").unwrap()), Refusal::NotRegular);
        assert_eq!(daemon.client.stat().unwrap().loads, 0);
    });
}

#[test]
fn a_changed_file_is_loaded_again() {
    on_each(1 << 20, |daemon| {
        let (path, file) = daemon.file("file", &pattern(10_000));
        load(&daemon.client, &file);
        // Changes without a change of length, in quick succession.
        for round in 0..5_u8 {
            let writer = OpenOptions::new().write(true).open(&path).unwrap();
            writer.write_all_at(&[round; 7], 100).unwrap();
            let (found, was_there) = load(&daemon.client, &file);
            assert!(!was_there && found[100..107] == [round; 7], "round {round}");
        }
        let stat = daemon.client.stat().unwrap();
        assert_eq!((stat.objects, stat.used), (1, 12_288));
        // A copy of the same bytes is another file.
        let (_, copy) = daemon.file("copy", &std::fs::read(&path).unwrap());
        assert!(!load(&daemon.client, &copy).1);
    });
}

#[test]
fn a_file_that_changes_while_it_is_loaded_is_not_kept() {
    for truncate in [false, true] {
        on_each(1 << 40, |daemon| {
            let (path, file) = daemon.endless_file();
            let found = thread::scope(|scope| {
                let load = scope.spawn(|| refusal(daemon, &file));
                eventually("a load begins", || daemon.client.stat().unwrap().loads > 0);
                let writer = OpenOptions::new().write(true).open(&path).unwrap();
                match truncate {
                    true => writer.set_len(5_000).unwrap(),
                    false => writer.write_all_at(b"late", 0).unwrap(),
                }
                load.join().unwrap()
            });
            assert_eq!(found, Refusal::Changed);
            let stat = daemon.client.stat().unwrap();
            assert_eq!((stat.objects, stat.used), (0, 0));
        });
    }
}
