//! Memory is bounded: the daemon evicts the file that was used longest ago.

use std::fs::File;

use vellum_morsel::{Access, BackendKind, ClientError, Refusal};

use crate::common::{eventually, load, on_each, pattern};

const FILE: usize = 64 << 10;

#[test]
fn the_file_used_longest_ago_is_evicted() {
    on_each(3 * FILE as u64, |daemon| {
        let files: Vec<File> =
            (0..4).map(|at| daemon.file(&format!("file{at}"), &pattern(FILE)).1).collect();
        for file in &files[..3] {
            load(&daemon.client, file);
        }
        // The first file is used again, so the second is the oldest.
        assert!(load(&daemon.client, &files[0]).1);
        assert!(!load(&daemon.client, &files[3]).1);
        let names: Vec<String> =
            daemon.client.list().unwrap().into_iter().map(|object| object.name).collect();
        let ends = ["file3", "file0", "file2"];
        assert!(names.iter().zip(ends).all(|(name, end)| name.ends_with(end)), "{names:?}");
        let stat = daemon.client.stat().unwrap();
        assert_eq!((stat.used, stat.evictions), (3 * FILE as u64, 1));
        assert!(!load(&daemon.client, &files[1]).1);
    });
}

#[test]
fn a_file_beyond_the_limit_is_refused_and_evicts_nothing() {
    on_each(FILE as u64, |daemon| {
        let (_, small) = daemon.file("small", &pattern(FILE));
        let (_, large) = daemon.file("large", &pattern(FILE + 1));
        load(&daemon.client, &small);
        let refused = daemon.client.load(&large, |_| {}).unwrap_err();
        let (bytes, limit) = (FILE as u64 + 4096, FILE as u64);
        let expected = Refusal::TooLarge { bytes, limit };
        assert!(matches!(&refused, ClientError::Refused(found) if *found == expected), "{refused}");
        assert!(refused.to_string().contains("--limit"), "{refused}");
        assert!(load(&daemon.client, &small).1);
    });
}

#[test]
fn mapped_files_stay_if_the_daemon_can_see_mappings() {
    on_each(FILE as u64, |daemon| {
        let (_, first) = daemon.file("first", &pattern(FILE));
        let (_, second) = daemon.file("second", &pattern(FILE));
        let loaded = daemon.client.load(&first, |_| {}).unwrap();
        let mapping = loaded.morsel.map(Access::Read).unwrap();
        let answer = daemon.client.load(&second, |_| {});
        match daemon.backend {
            BackendKind::Kernel => {
                let full = matches!(answer, Err(ClientError::Refused(Refusal::Full { .. })));
                assert!(full, "{answer:?}");
                drop(mapping);
                // Children of other tests have the mapping, too, until they run their programs.
                let loads = || daemon.client.load(&second, |_| {}).is_ok();
                eventually("the other file takes its place", loads);
            }
            // The daemon cannot see which processes map a memfd. It evicts the file; the processes
            // keep their mappings.
            _ => {
                answer.unwrap();
                assert!(mapping.view().unwrap() == pattern(FILE));
            }
        }
    });
}

#[test]
fn a_removed_file_is_forgotten_but_clients_keep_it() {
    on_each(1 << 20, |daemon| {
        let (_, file) = daemon.file("file", b"bytes");
        assert_eq!(daemon.client.remove(&file).unwrap(), 0);
        let loaded = daemon.client.load(&file, |_| {}).unwrap();
        assert_eq!(daemon.client.remove(&file).unwrap(), 1);
        assert_eq!(daemon.client.stat().unwrap().used, 0);
        assert_eq!(loaded.morsel.map(Access::Read).unwrap().view().unwrap(), b"bytes");
        assert!(!load(&daemon.client, &file).1);
    });
}
