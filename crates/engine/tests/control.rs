//! Control sockets: another process has the owner of a store back it up.
#![allow(clippy::unwrap_used)]

use std::ffi::OsStr;
use std::io::{ErrorKind, Read as _, Write as _};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vellum::{
    BackupOptions, BackupReport, Error, MemoryDevice, Options, RestoreOptions, Store, StoreStat,
    request_backup, request_compact, request_resize_pool, request_stat, restore,
};
use vellum_testing::patience::eventually;

fn options() -> Options {
    Options::new().pool_bytes(4 << 20).log(true)
}

/// A store with as many entries as are said.
fn store_of(entries: u32) -> (TempDir, PathBuf, Store) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.vellum");
    let store = Store::create(&path, &options()).unwrap();
    fill(&store, 0..entries);
    (folder, path, store)
}

fn fill(store: &Store, keys: std::ops::Range<u32>) {
    let tree = store.tree_or_create("numbers").unwrap();
    for key in keys {
        tree.upsert(&key.to_be_bytes(), &[7; 1000]).unwrap();
    }
}

/// Entries of a store that is not open.
fn entries(path: &Path) -> usize {
    let store = Store::open(path, &options()).unwrap();
    let report = store.check(&mut |_| ()).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
    let entries = store.tree("numbers").unwrap().entries().count();
    store.close().unwrap();
    entries
}

fn request(store: &Path, to: &Path, options: &BackupOptions) -> Result<BackupReport, Error> {
    request_backup(store, to, options, &mut |_| ControlFlow::Continue(()))
}

/// A backup takes minutes with these, if nothing ends it.
fn slow() -> BackupOptions {
    BackupOptions::new().bytes_per_second(20_000)
}

/// Asks for a backup, and notes that it has begun.
fn slow_request(store: &Path, to: &Path, begun: &AtomicBool) -> Result<BackupReport, Error> {
    request_backup(store, to, &slow(), &mut |progress| {
        begun.fetch_or(progress.bytes_done > 0, Ordering::AcqRel);
        ControlFlow::Continue(())
    })
}

#[test]
fn the_owner_tells_the_state_of_the_store() {
    let (_folder, path, store) = store_of(6000);
    assert_eq!(kind(&request_stat(&path).unwrap_err()), Some(ErrorKind::NotFound));
    let _control = store.control_socket(&path).unwrap();
    let view = store.snapshot().unwrap();
    fill(&store, 0..10);
    let told = request_stat(&path).unwrap();
    assert_eq!(told.process, std::process::id());
    let (here, pool) = (store.stat().unwrap(), store.pool_stats());
    let age = |stat: &StoreStat| stat.oldest_view.unwrap();
    assert!(age(&told.store) <= age(&here));
    // Only the age goes on.
    let mut same = told.store;
    same.oldest_view = here.oldest_view;
    assert_eq!(same, here);
    assert!(here.views == 1 && here.version_bytes > 0 && !here.clean, "{here:?}");
    assert!(told.pool.hits > 0 && told.pool.hits <= pool.hits, "{told:?}");
    assert!(told.pool.evictions > 0 && told.pool.write_latency.count > 0, "{told:?}");
    assert_eq!(told.translation, store.pool().translation());
    drop(view);
    let told = request_stat(&path).unwrap().store;
    assert_eq!((told.views, told.oldest_view), (0, None));
}

#[test]
fn the_owner_changes_the_size_of_its_pool() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.vellum");
    let store = Store::create(&path, &options().max_pool_bytes(16 << 20)).unwrap();
    let error = request_resize_pool(&path, 8 << 20).unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::NotFound));
    let _control = store.control_socket(&path).unwrap();
    fill(&store, 0..10_000);
    for bytes in [8 << 20, 1 << 20, 4 << 20] {
        // Whole pages.
        assert_eq!(request_resize_pool(&path, bytes + 1).unwrap(), bytes);
        assert_eq!(store.stat().unwrap().pool_bytes, bytes);
    }
    for bytes in [0, 1, 17 << 20, 1 << 60, u64::MAX] {
        let error = request_resize_pool(&path, bytes).unwrap_err();
        assert!(matches!(&error, Error::Owner(_)), "{error}");
        assert_eq!(store.stat().unwrap().pool_bytes, 4 << 20);
    }
    store.close().unwrap();
    assert_eq!(entries(&path), 10_000);
}

/// A handle keeps the memory of the store, and the file may be open elsewhere by now.
#[test]
fn a_store_that_was_closed_has_no_owner() {
    let (_folder, path, store) = store_of(10);
    let _control = store.control_socket(&path).unwrap();
    let tree = store.tree("numbers").unwrap();
    store.close().unwrap();
    assert_eq!(kind(&request_stat(&path).unwrap_err()), Some(ErrorKind::ConnectionRefused));
    drop(tree);
    assert_eq!(kind(&request_stat(&path).unwrap_err()), Some(ErrorKind::ConnectionRefused));
}

/// What the owner of the store in this file says first.
fn greeting(path: &Path) -> String {
    let file = path.metadata().unwrap();
    format!("vellum 1 {} {}\n", file.dev(), file.ino())
}

/// The owner of a file that was moved does not answer for another one that has its name.
#[test]
fn another_file_by_the_name_has_another_owner() {
    let (folder, path, store) = store_of(10);
    let _control = store.control_socket(&path).unwrap();
    let moved = folder.path().join("b.vellum");
    std::fs::rename(&path, &moved).unwrap();
    let newer = Store::create(&path, &options().log_folder(folder.path().join("newer"))).unwrap();
    let error = request_stat(&path).unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::ConnectionRefused), "{error}");
    let _control = newer.control_socket(&path).unwrap();
    assert_eq!(request_stat(&path).unwrap().store.store_id, newer.stat().unwrap().store_id);
    let error = request_stat(&moved).unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::NotFound), "{error}");
}

/// Why a process could not be asked.
fn kind(error: &Error) -> Option<ErrorKind> {
    match error {
        Error::Control { source, .. } => Some(source.kind()),
        _ => None,
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !name.contains("log")).collect();
    names.sort();
    names
}

#[test]
fn the_owner_makes_backups_and_increments() {
    let (folder, path, store) = store_of(2000);
    let at = |name: &str| folder.path().join(name);
    let control = store.control_socket(&path).unwrap();
    assert_eq!(control.path(), at("a.vellum.control").canonicalize().unwrap());
    assert_eq!(control.path().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let options = BackupOptions::new();
    let full = request(&path, &at("full"), &options).unwrap();
    assert_eq!(full.store_id, store.stat().unwrap().store_id);
    assert!(full.used_bytes > 2_000_000 && full.file_bytes >= full.used_bytes, "{full:?}");
    fill(&store, 2000..2010);
    let since = request(&path, &at("increment"), &options.clone().since(at("full"))).unwrap();
    assert!(since.read_bytes < 200_000 && since.lsn > full.lsn, "{since:?}");
    let exists = request(&path, &at("full"), &options).unwrap_err();
    assert!(matches!(&exists, Error::Owner(what) if what.contains("exists already")), "{exists}");
    // A name that is no text, and a link to the store.
    std::os::unix::fs::symlink(&path, at("link")).unwrap();
    let odd = folder.path().join(OsStr::from_bytes(b"\xff\n"));
    let again = request(&at("link"), &odd, &options.check(false)).unwrap();
    assert_eq!(odd.metadata().unwrap().size(), again.file_bytes);
    drop(control);
    let gone = request(&path, &at("other"), &BackupOptions::new()).unwrap_err();
    assert_eq!(kind(&gone), Some(ErrorKind::NotFound), "{gone}");
    store.close().unwrap();
    let (restored, increments) = (at("restored"), [at("increment")]);
    let go_on = &mut |_| ControlFlow::Continue(());
    restore(&restored, at("full"), &increments, &RestoreOptions::new(), go_on).unwrap();
    assert_eq!([&restored, &odd, &path].map(|path| entries(path)), [2010; 3]);
}

#[test]
fn the_owner_compacts_the_store() {
    let (folder, path, store) = store_of(3000);
    let _control = store.control_socket(&path).unwrap();
    let tree = store.tree("numbers").unwrap();
    tree.remove_range(..2900_u32.to_be_bytes()).unwrap();
    store.sync().unwrap();
    let before = path.metadata().unwrap().len();
    let mut calls = 0;
    let report = request_compact(&path, &mut |_| {
        calls += 1;
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert!(report.is_complete && report.pages_moved > 0 && calls > 0, "{report:?}");
    assert!(report.bytes_after < before / 4, "{report:?}, {before} before");
    assert_eq!(path.metadata().unwrap().len(), report.bytes_after);
    fill(&store, 100..3000);
    tree.remove_range(..2900_u32.to_be_bytes()).unwrap();
    // It reports how far it came, unless it ends before it sees that it shall.
    let some = request_compact(&path, &mut |_| ControlFlow::Break(()));
    assert!(matches!(some, Ok(_) | Err(Error::Cancelled)), "{some:?}");
    store.close().unwrap();
    assert_eq!(entries(&path), 100);
    drop(folder);
}

#[test]
fn the_client_sees_the_progress_and_may_cancel() {
    let (folder, path, store) = store_of(3000);
    let _control = store.control_socket(&path).unwrap();
    let to = folder.path().join("backup");
    let mut calls = 0;
    let error = request_backup(&path, &to, &slow(), &mut |progress| {
        calls += u32::from(progress.bytes_done > 0);
        assert!(progress.bytes_done <= progress.bytes_total);
        if calls < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
    eventually("the end of the backup", || {
        names(folder.path()) == ["a.vellum", "a.vellum.control"]
    });
    request(&path, &to, &BackupOptions::new()).unwrap();
    store.close().unwrap();
    assert_eq!(entries(&to), 3000);
}

#[test]
fn requests_end_with_their_socket_and_with_their_store() {
    let (folder, path, store) = store_of(3000);
    let control = store.control_socket(&path).unwrap();
    let to = folder.path().join("backup");
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        let request = scope.spawn(|| slow_request(&path, &to, &begun));
        eventually("a backup", || begun.load(Ordering::Acquire));
        drop(control);
        let error = request.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Owner(what) if what.contains("cancelled")), "{error}");
    });
    assert_eq!(names(folder.path()), ["a.vellum"]);
    let control = store.control_socket(&path).unwrap();
    begun.store(false, Ordering::Release);
    thread::scope(|scope| {
        let request = scope.spawn(|| slow_request(&path, &to, &begun));
        eventually("a backup", || begun.load(Ordering::Acquire));
        store.close().unwrap();
        let error = request.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Owner(what) if what.contains("is closed")), "{error}");
    });
    let error = request(&path, &to, &BackupOptions::new()).unwrap_err();
    assert_eq!(kind(&error), Some(ErrorKind::ConnectionRefused), "{error}");
    // The next owner has a socket of its own by this name, which stays.
    let store = Store::open(&path, &options()).unwrap();
    let newer = store.control_socket(&path).unwrap();
    drop(control);
    request(&path, &to, &BackupOptions::new()).unwrap();
    drop(newer);
    assert_eq!(names(folder.path()), ["a.vellum", "backup"]);
}

#[test]
fn a_request_does_not_keep_the_store_open() {
    let (folder, path, store) = store_of(3000);
    let _control = store.control_socket(&path).unwrap();
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        let requests = ["one", "two"].map(|name| {
            let (path, to, begun) = (&path, folder.path().join(name), &begun);
            scope.spawn(move || slow_request(path, &to, begun))
        });
        eventually("a backup", || begun.load(Ordering::Acquire));
        drop(store);
        for request in requests {
            assert!(request.join().unwrap().is_err());
        }
        eventually("the end of the store", || Store::open(&path, &options()).is_ok());
    });
}

/// Of a store without a log, too, whose checkpoints a backup keeps waiting.
#[test]
fn closing_does_not_wait_for_a_backup_that_another_process_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.vellum");
    let store = Store::create(&path, &options().log(false)).unwrap();
    fill(&store, 0..3000);
    let _control = store.control_socket(&path).unwrap();
    let begun = AtomicBool::new(false);
    thread::scope(|scope| {
        let backup = scope.spawn(|| slow_request(&path, &folder.path().join("backup"), &begun));
        eventually("a backup", || begun.load(Ordering::Acquire));
        store.close().unwrap();
        let error = backup.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::Owner(what) if what.contains("is closed")), "{error}");
    });
    assert_eq!(names(folder.path()), ["a.vellum", "a.vellum.control"]);
    assert_eq!(
        Store::open(&path, &options()).unwrap().tree("numbers").unwrap().stat().unwrap().entries,
        3000
    );
}

/// Backups go on although requests begin and end beside them.
#[test]
fn requests_do_not_take_each_other_for_the_end_of_the_store() {
    let (folder, path, store) = store_of(1000);
    let _control = store.control_socket(&path).unwrap();
    let (ended, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let look = || {
            while !ended.load(Ordering::Acquire) {
                // An owner without processor time may answer too late. It must not count requests
                // that it has answered, and refuse another one for them.
                match request_stat(&path) {
                    Ok(_) => drop(answers.fetch_add(1, Ordering::AcqRel)),
                    Err(error) => assert!(matches!(error, Error::Control { .. }), "{error}"),
                }
            }
        };
        let looks = [scope.spawn(look), scope.spawn(look)];
        for number in 0..10 {
            let to = folder.path().join(number.to_string());
            let options = BackupOptions::new().bytes_per_second(20 << 20);
            request(&path, &to, &options).unwrap();
        }
        ended.store(true, Ordering::Release);
        looks.into_iter().for_each(|look| look.join().unwrap());
    });
    assert!(answers.into_inner() > 0, "no request beside the backups was answered");
}

/// A client that does not read, and a pipe in the place of a base, keep no thread.
#[test]
fn a_socket_ends_beside_a_pipe_and_a_client_that_does_not_read() {
    let (folder, path, store) = store_of(3000);
    let control = store.control_socket(&path).unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    let to = folder.path().join("backup");
    let error = request(&path, &to, &BackupOptions::new().since(&pipe)).unwrap_err();
    assert!(error.to_string().contains("no regular file"), "{error}");
    let mut client = UnixStream::connect(control.path()).unwrap();
    let words = [b"backup", to.as_os_str().as_bytes(), b"", b"", b"20000", b""].join(&0);
    client.write_all(&words).unwrap();
    eventually("a backup", || names(folder.path()).iter().any(|name| name.starts_with(".backup")));
    // The backup would take minutes.
    drop(control);
}

/// A compaction waits for the backup, at the socket that came after that of the backup.
#[test]
fn requests_at_two_sockets_do_not_keep_the_store_open() {
    let (folder, path, store) = store_of(3000);
    let _older = store.control_socket(&path).unwrap();
    let (begun, asked) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let backup = scope.spawn(|| slow_request(&path, &folder.path().join("backup"), &begun));
        eventually("a backup", || begun.load(Ordering::Acquire));
        let _newer = store.control_socket(&path).unwrap();
        let compaction = scope.spawn(|| {
            request_compact(&path, &mut |_| {
                asked.store(true, Ordering::Release);
                ControlFlow::Continue(())
            })
        });
        eventually("a compaction", || asked.load(Ordering::Acquire));
        thread::sleep(Duration::from_millis(100));
        drop(store);
        assert!(backup.join().unwrap().is_err());
        let _ = compaction.join().unwrap();
        eventually("the end of the store", || Store::open(&path, &options()).is_ok());
    });
}

#[test]
fn a_socket_that_a_killed_process_left_is_replaced() {
    let (folder, path, store) = store_of(10);
    let place = folder.path().join("a.vellum.control");
    drop(UnixListener::bind(&place).unwrap());
    let to = folder.path().join("backup");
    let left = request(&path, &to, &BackupOptions::new()).unwrap_err();
    assert_eq!(kind(&left), Some(ErrorKind::ConnectionRefused), "{left}");
    let _control = store.control_socket(&path).unwrap();
    request(&path, &to, &BackupOptions::new()).unwrap();
}

#[test]
fn only_the_file_of_the_store_has_its_socket() {
    let (folder, path, store) = store_of(10);
    let other = folder.path().join("other");
    drop(Store::create(&other, &options()).unwrap());
    std::fs::write(folder.path().join("short"), "short").unwrap();
    let (twin, go_on) = (folder.path().join("twin"), &mut |_| ControlFlow::Continue(()));
    store.backup(twin, &BackupOptions::new(), go_on).unwrap();
    let pipe = folder.path().join("pipe");
    let (kind_of_file, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind_of_file, mode, 0).unwrap();
    for name in ["other", "short", "pipe", "twin"] {
        let error = store.control_socket(folder.path().join(name)).unwrap_err();
        assert!(matches!(&error, Error::BadOption(what) if what.contains(name)), "{error}");
    }
    let error = store.control_socket(folder.path().join("none")).unwrap_err();
    assert!(matches!(error, Error::Control { .. }), "{error}");
    let in_memory = Store::create_on(Arc::new(MemoryDevice::new()), &options().log(false)).unwrap();
    assert!(matches!(in_memory.control_socket(&path), Err(Error::BadOption(_))));
    // What is no socket is not removed.
    let place = folder.path().join("a.vellum.control");
    std::fs::write(&place, "another store's").unwrap();
    assert_eq!(kind(&store.control_socket(&path).unwrap_err()), Some(ErrorKind::AlreadyExists));
    assert_eq!(std::fs::read(&place).unwrap(), b"another store's");
    store.close().unwrap();
    let readers = Store::open(&path, &options().read_only(true)).unwrap();
    assert!(matches!(readers.control_socket(&path), Err(Error::ReadOnly)));
}

/// Dropping the socket does not wait until they have said something.
#[test]
fn a_socket_ends_with_clients_that_say_nothing() {
    let (_folder, path, store) = store_of(10);
    // The owner's patience with a client. On a busy machine a round may take longer.
    let patience = Duration::from_secs(10);
    eventually("a round within the owner's patience", || {
        let start = Instant::now();
        let control = store.control_socket(&path).unwrap();
        let silent: Vec<UnixStream> =
            (0..5).map(|_| UnixStream::connect(control.path()).unwrap()).collect();
        for mut client in &silent {
            let mut said = vec![0; greeting(&path).len()];
            client.read_exact(&mut said).unwrap();
            assert_eq!(said, greeting(&path).as_bytes());
        }
        drop(control);
        let is_short = start.elapsed() < patience;
        for mut client in &silent {
            let mut rest = String::new();
            // All has been said.
            client.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            client.read_to_string(&mut rest).unwrap();
            assert!(!is_short || rest == "closed\n", "{rest}");
        }
        is_short
    });
}

#[test]
fn clients_that_say_nonsense_or_nothing_disturb_nobody() {
    let (folder, path, store) = store_of(100);
    let control = store.control_socket(&path).unwrap();
    let connect = || UnixStream::connect(control.path()).unwrap();
    let answer = |bytes: &[u8]| {
        let mut stream = connect();
        // It may have answered before it has read all.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    let said = answer(b"GET / HTTP/1.1\r\n\r\n");
    assert!(said.starts_with(&(greeting(&path) + "failed the request is cut off")), "{said}");
    assert!(answer(b"open\0").contains("failed it knows no request 'open'"));
    assert!(answer(b"backup\0relative\0\0\0\0").contains("no absolute path"));
    answer(&vec![0xff; 1 << 20]);
    answer(b"");
    // Silent clients delay no other one, until there are too many.
    let silent: Vec<UnixStream> = (0..7).map(|_| connect()).collect();
    let to = folder.path().join("backup");
    eventually("a turn", || request(&path, &to, &BackupOptions::new()).is_ok());
    drop(silent);
    eventually("too many", || {
        // The owner has lost patience with those of an earlier try.
        let _silent: Vec<UnixStream> = (0..8).map(|_| connect()).collect();
        answer(b"").contains("failed too many requests")
    });
    let again = folder.path().join("again");
    eventually("a turn", || request(&path, &again, &BackupOptions::new()).is_ok());
    store.close().unwrap();
    assert_eq!(entries(&to), 100);
}

#[test]
fn an_impostor_s_answers_are_errors() {
    /// More bytes than the kernel keeps for a client that does not read.
    const SOCKET_HOLDS: usize = 1 << 20;
    let (folder, path, _store) = store_of(10);
    let to = folder.path().join("backup");
    let listener = UnixListener::bind(folder.path().join("a.vellum.control")).unwrap();
    let against = |said: &str| {
        thread::scope(|scope| {
            let client = scope.spawn(|| request(&path, &to, &BackupOptions::new()).unwrap_err());
            let (mut stream, _) = listener.accept().unwrap();
            // What does not fit into the socket is not all said: the client hangs up before.
            let told = stream.write_all(said.as_bytes()).map_err(|error| error.kind());
            if said.len() > SOCKET_HOLDS {
                let hung_up = [Err(ErrorKind::BrokenPipe), Err(ErrorKind::ConnectionReset)];
                assert!(hung_up.contains(&told), "{told:?}");
            } else {
                told.unwrap();
            }
            if said.starts_with(&greeting(&path)) {
                assert!(stream.read(&mut [0; 100]).unwrap() > 0);
            }
            drop(stream);
            client.join().unwrap().to_string()
        })
    };
    assert!(against("").contains("has ended"));
    assert!(against("220 ready\n").contains("it says '220'"));
    assert!(against("done 1 2 3 4 5 6 7\n").contains("it says 'done'"));
    let greeting = greeting(&path);
    let done = "done 1 2 3 4 5 6 7 8 9 10\n";
    assert!(against(&format!("{greeting}{done}")).contains("does not find it"));
    assert!(against(&format!("{greeting}done 1 2\n")).contains("its report is '1 2'"));
    assert!(against(&format!("{greeting}{}", "x".repeat(10 * SOCKET_HOLDS))).contains("too much"));
    assert!(against(&format!("{greeting}failed \x1b[2J\n")).ends_with("says:  [2J"));
    assert!(against("denied to all\n").ends_with("to all"));
    assert!(against(&format!("{greeting}progress x\nfailed so\n")).ends_with("says: so"));
    assert!(against(&format!("{greeting}{greeting}")).contains("it says 'vellum'"));
    assert!(against("vellum 1 2 3\n").contains("another file"));
    assert!(against("vellum 2 2 3\n").contains("another version"));
    assert!(against("vellum\n").contains("another version"));
}
