//! The daemon loads a file once, unchanged, and gives it to every client that may read it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::sync::Barrier;
use std::thread;

use vellum_morsel::{Access, ClientError, Error, Seals};

use crate::common::{client_process, load, on_each, pattern};

#[test]
fn a_file_is_loaded_once_and_handed_out_again() {
    on_each(64 << 20, |daemon| {
        // More than one piece, and not a whole number of pages.
        let bytes = pattern((33 << 20) + 123);
        let (path, file) = daemon.file("file", &bytes);
        for (round, was_there) in [false, true, true].into_iter().enumerate() {
            let (found, there) = load(&daemon.client, &file);
            assert!(found == bytes);
            assert_eq!(there, was_there, "round {round}");
        }
        let stat = daemon.client.stat().unwrap();
        assert_eq!((stat.loads, stat.hits, stat.objects), (1, 2, 1));
        assert_eq!(stat.used, (bytes.len() as u64).next_multiple_of(4096));
        assert_eq!(stat.backend, daemon.backend.name());
        let list = daemon.client.list().unwrap();
        assert_eq!((list[0].name.as_str(), list[0].uses), (path.to_str().unwrap(), 3));
        assert_eq!(list[0].length, bytes.len() as u64);
    });
}

#[test]
fn a_sparse_file_comes_with_memory_for_its_holes() {
    on_each(64 << 20, |daemon| {
        // Holes before, within and after the data, and at a huge page's boundaries.
        let length = (36 << 20) + 99;
        let path = daemon.folder.path().join("sparse");
        let file = File::create(&path).unwrap();
        file.set_len(length).unwrap();
        let mut bytes = vec![0; length as usize];
        for at in [5_000, (2 << 20) - 1, 33 << 20] {
            bytes[at..at + 3].copy_from_slice(b"abc");
            file.write_all_at(b"abc", at as u64).unwrap();
        }
        let morsel = daemon.client.load(&File::open(&path).unwrap(), |_| {}).unwrap().morsel;
        // The holes have memory, so that an access never needs new memory, which may be short by
        // then.
        assert_eq!(morsel.stat().unwrap().missing(), 0);
        assert!(morsel.map(Access::Read).unwrap().view().unwrap() == bytes);
    });
}

#[test]
fn a_loaded_file_cannot_be_changed() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", &pattern(5_000));
        let morsel = daemon.client.load(&file, |_| {}).unwrap().morsel;
        assert!(morsel.stat().unwrap().seals.has(Seals::CONTENT));
        let refused = |result: Result<(), Error>| {
            matches!(result, Err(Error::Sealed { .. } | Error::ReadOnly { .. }))
        };
        assert!(refused(morsel.map(Access::ReadWrite).map(drop)));
        assert!(refused(morsel.punch(0..4096)));
        assert!(refused(morsel.fill(&file, 0, 0, 1).map(drop)));
    });
}

#[test]
fn clients_that_ask_at_the_same_time_wait_for_one_load() {
    on_each(256 << 20, |daemon| {
        const CLIENTS: usize = 12;
        let (_, file) = daemon.file("file", &pattern(70 << 20));
        let barrier = Barrier::new(CLIENTS);
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    barrier.wait();
                    let loaded = daemon.client.load(&file, |_| {}).unwrap();
                    assert_eq!(loaded.morsel.length(), 70 << 20);
                });
            }
        });
        let stat = daemon.client.stat().unwrap();
        assert_eq!((stat.loads, stat.objects), (1, 1));
        assert_eq!(daemon.client.list().unwrap()[0].uses, CLIENTS as u64);
    });
}

#[test]
fn processes_share_a_loaded_file() {
    on_each(16 << 20, |daemon| {
        let bytes = pattern(3 << 20);
        let (path, _) = daemon.file("file", &bytes);
        let sum: u64 = bytes.iter().map(|byte| u64::from(*byte)).sum();
        let children: Vec<_> = (0..3)
            .map(|_| client_process("load", &daemon.socket(), &path).spawn().unwrap())
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(text.contains(&format!("loaded sum={sum}")), "{text}");
        }
        assert_eq!(daemon.client.stat().unwrap().loads, 1);
    });
}

#[test]
fn users_see_only_what_they_have_asked_for() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can run a process as another user");
    }
    on_each(1 << 20, |daemon| {
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(daemon.folder.path(), everyone).unwrap();
        let (path, file) = daemon.file("file", b"for everyone");
        load(&daemon.client, &file);
        let as_other = |does| {
            let mut command = client_process(does, &daemon.socket(), &path);
            command.uid(65_534).gid(65_534);
            command.output().map(|output| String::from_utf8(output.stdout).unwrap())
        };
        let Ok(before) = as_other("list") else {
            return println!("skipped: another user cannot start this program");
        };
        assert!(before.contains("1 passed") && !before.contains("listed"), "{before}");
        let loaded = as_other("load").unwrap();
        assert!(loaded.contains("was_there=true"), "{loaded}");
        let after = as_other("list").unwrap();
        assert!(after.contains(&format!("listed {}", path.display())), "{after}");
        assert_eq!(daemon.client.list().unwrap().len(), 1);
    });
}

#[test]
fn a_morsel_outlives_the_daemon() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", b"still here");
        let loaded = daemon.client.load(&file, |_| {}).unwrap();
        daemon.stop();
        let gone = daemon.client.load(&file, |_| {}).unwrap_err();
        assert!(matches!(gone, ClientError::NoDaemon { .. }), "{gone:?}");
        assert!(gone.to_string().contains("vellum morseld"), "{gone}");
        assert_eq!(loaded.morsel.map(Access::Read).unwrap().view().unwrap(), b"still here");
        drop(File::open(daemon.socket()).unwrap_err());
    });
}
