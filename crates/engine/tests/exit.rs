//! A process with an open store ends: by a panic, by `exit` from anywhere, with the store in a
//! static, as the child of a fork. Afterwards the store opens and has all changes.
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, ExitStatus, exit};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use common::PATIENCE;
use vellum::{Error, MemoryDevice, Options, Store};
use vellum_pool::device::{Call, HookedDevice};

/// An exit that waits for what never ends gives up after 60 s.
const EXIT_PATIENCE: Duration = Duration::from_secs(55);

/// The environment variables of a child: how it ends, and in which directory.
const CASE: &str = "VELLUM_TEST_EXIT_CASE";
const PLACE: &str = "VELLUM_TEST_EXIT_PLACE";

fn small() -> Options {
    Options::new().pool_bytes(8 << 20)
}

fn key(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Runs a case of [`child`] in a process of its own. Returns its exit status and its directory.
fn run(case: &str) -> (ExitStatus, tempfile::TempDir) {
    let place = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture", "--test-threads=1"]);
    let output = command.env(CASE, case).env(PLACE, place.path()).output().unwrap();
    print!("{}", String::from_utf8_lossy(&output.stdout));
    print!("{}", String::from_utf8_lossy(&output.stderr));
    (output.status, place)
}

/// Opens a child's store, and asserts that it is sound and that its tree "t" has these entries.
fn expect(store: &Path, entries: impl IntoIterator<Item = u64>) {
    let store = Store::open(store, &small()).unwrap();
    assert!(store.check(&mut |_| ()).unwrap().is_sound());
    let tree = store.tree("t").unwrap();
    for number in entries {
        assert!(tree.contains(&key(number)).unwrap(), "{number} is gone");
    }
    store.close().unwrap();
}

/// Creates a store with some entries that are not in the file yet.
fn begin(path: &Path) -> (Store, vellum::Tree) {
    let store = Store::create(path, &small()).unwrap();
    let tree = store.create_tree("t").unwrap();
    for number in 0..1000 {
        tree.upsert(&key(number), &[7; 100]).unwrap();
    }
    (store, tree)
}

static STORE: OnceLock<Store> = OnceLock::new();

/// Runs in the child: the case that the parent has chosen.
#[test]
#[ignore = "other tests run it in processes of their own"]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let place = std::env::var_os(PLACE).unwrap();
    let path = Path::new(&place).join("store");
    let (store, tree) = begin(&path);
    match &case[..] {
        "static" => drop(STORE.set(store)),
        "panic" => panic!("the last handles go"),
        "writers" => write_until_exit(&store, Path::new(&place)),
        "in a change" => {
            let other = begin(&Path::new(&place).join("other"));
            // More than the pool has: pages go to the file, which is in use from then on.
            for number in 1000..50_000 {
                tree.upsert(&key(number), &[7; 400]).unwrap();
            }
            let _ = tree.update(&key(1), |_| exit(3));
            drop(other);
        }
        "in a callback of a commit" => {
            let other = begin(&Path::new(&place).join("other"));
            let mut transaction = store.begin().unwrap();
            transaction.put(&tree, &key(1000), b"committed").unwrap();
            transaction.commit_then(|_| exit(3)).unwrap();
            std::thread::sleep(PATIENCE);
            drop(other);
        }
        "in a callback while another drops" => exit_while_another_drops(store, tree, true),
        "in a callback as another begins to drop" => exit_while_another_drops(store, tree, false),
        "in a snapshot" => {
            let _snapshot = store.snapshot().unwrap();
            exit(3);
        }
        "while another drops" => {
            let (dropping, begun) = channel();
            std::thread::spawn(move || {
                drop(tree);
                dropping.send(()).unwrap();
                drop(store);
            });
            begun.recv().unwrap();
            exit(3);
        }
        "fork" => {
            // A guard of a page, and unlinked pages.
            tree.upsert(&key(0), &[7; 9000]).unwrap();
            let reader = tree.clone().into_reader(&key(0)).unwrap().unwrap();
            let mut writer = tree.clone().into_writer(&key(1001)).unwrap();
            writer.write_all(&[7; 1 << 20]).unwrap();
            // A view that has a long value to itself.
            let snapshot = store.snapshot().unwrap();
            tree.upsert(&key(0), &[8; 9000]).unwrap();
            for how in ["exit", "drop", "own"] {
                in_child(|| match how {
                    "exit" => {}
                    "drop" => {
                        // SAFETY: the copies are the child's own, and its parent's are not used.
                        let streams = unsafe { (std::ptr::read(&reader), std::ptr::read(&writer)) };
                        // SAFETY: as above.
                        let handles = unsafe { (std::ptr::read(&store), std::ptr::read(&tree)) };
                        let (mut reader, mut writer) = streams;
                        // SAFETY: as above.
                        drop(unsafe { std::ptr::read(&snapshot) });
                        assert!(reader.read(&mut [0]).is_err() && writer.write(&[7]).is_err());
                        assert!(matches!(handles.0.sync(), Err(Error::InUse(_))));
                        drop((reader, writer, handles));
                    }
                    _ => {
                        let own = begin(&Path::new(&place).join("own"));
                        std::mem::forget(own);
                    }
                });
            }
            assert!(*snapshot.get(&tree, &key(0)).unwrap().unwrap() == [7; 9000]);
            tree.upsert(&key(1000), b"after the children").unwrap();
            drop((reader, writer, snapshot));
            std::mem::forget((store, tree));
        }
        other => panic!("{other}"),
    }
}

/// Exits in a callback, for which a drop waits.
fn exit_while_another_drops(store: Store, tree: vellum::Tree, waits: bool) {
    let (dropping, begun) = channel();
    let mut transaction = store.begin().unwrap();
    transaction.put(&tree, &key(1000), b"committed").unwrap();
    let exits = move |_| {
        begun.recv().unwrap();
        if waits {
            // By then the drop has closed the store, and waits for this.
            std::thread::sleep(Duration::from_millis(200));
        }
        exit(3);
    };
    transaction.commit_then(exits).unwrap();
    // No thread has made these durable.
    (1001..3000).for_each(|number| _ = tree.upsert(&key(number), b"returned").unwrap());
    drop(tree);
    dropping.send(()).unwrap();
    drop(store);
}

/// Runs `work` in a child of a fork, which then calls `exit`.
fn in_child(work: impl FnOnce()) {
    // SAFETY: the threads of this process that the child lacks are the store's and the harness's,
    // which hold no lock now.
    let child = unsafe { libc::fork() };
    if child == 0 {
        work();
        // SAFETY: the child of a process whose other threads are not there has one thread.
        unsafe { libc::exit(0) };
    }
    let (mut status, since) = (0, Instant::now());
    // SAFETY: the number is the caller's own.
    while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
        assert!(since.elapsed() < PATIENCE, "the child does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status}");
}

/// Four threads write, and each records its finished changes, until the process exits.
fn write_until_exit(store: &Store, place: &Path) {
    let all_have_written = Arc::new(Barrier::new(5));
    for thread in 0..4u64 {
        let all_have_written = all_have_written.clone();
        let (tree, mut done) =
            (store.tree("t").unwrap(), File::create(place.join(thread.to_string())).unwrap());
        std::thread::spawn(move || {
            let first = (thread << 32) + 5000;
            for number in first.. {
                match tree.upsert(&key(number), &[1; 300]) {
                    Ok(_) => {
                        done.write_all(&key(number)).unwrap();
                        if number == first {
                            all_have_written.wait();
                        }
                    }
                    Err(error) => {
                        assert!(matches!(error, Error::Closed), "{error}");
                        return;
                    }
                }
            }
        });
    }
    all_have_written.wait();
    std::thread::sleep(Duration::from_millis(100));
    exit(3);
}

#[test]
fn a_store_in_a_static_is_closed_at_the_end() {
    let (status, place) = run("static");
    assert!(status.success());
    expect(&place.path().join("store"), 0..1000);
}

#[test]
fn a_panic_that_drops_the_last_handle_closes_the_store() {
    let (status, place) = run("panic");
    assert!(!status.success());
    expect(&place.path().join("store"), 0..1000);
    // The same without an exit.
    let path = place.path().join("again");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let (_store, _tree) = begin(&path);
        panic!("the last handles go");
    }));
    assert!(unwound.is_err());
    expect(&path, 0..1000);
}

#[test]
fn an_exit_closes_a_store_that_other_threads_write_to() {
    let (status, place) = run("writers");
    assert_eq!(status.code(), Some(3));
    for thread in 0..4 {
        let done = std::fs::read(place.path().join(thread.to_string())).unwrap();
        let done: Vec<_> =
            done.chunks_exact(8).map(|key| u64::from_be_bytes(key.try_into().unwrap())).collect();
        assert!(!done.is_empty());
        expect(&place.path().join("store"), done);
    }
}

#[test]
fn an_exit_in_a_callback_ends_and_closes_other_stores() {
    let begun = Instant::now();
    let (status, place) = run("in a change");
    assert_eq!(status.code(), Some(3));
    assert!(begun.elapsed() < PATIENCE);
    expect(&place.path().join("other"), 0..1000);
    // The change of this store never ended.
    let store = Store::open(place.path().join("store"), &small()).unwrap();
    assert!(store.recovery().is_some());
    common::assert_sound(&store);
}

#[test]
fn an_exit_in_a_callback_of_a_commit_closes_the_stores() {
    let begun = Instant::now();
    let (status, place) = run("in a callback of a commit");
    assert_eq!(status.code(), Some(3));
    assert!(begun.elapsed() < EXIT_PATIENCE, "the exit waits for the callback");
    expect(&place.path().join("other"), 0..1000);
    let store = Store::open(place.path().join("store"), &small()).unwrap();
    assert!(store.recovery().is_none(), "the store was closed");
    drop(store);
    expect(&place.path().join("store"), 0..=1000);
}

/// The exit waits until the drop has saved the store, and not until it ends.
#[test]
fn an_exit_in_a_callback_does_not_wait_for_a_drop_that_waits_for_it() {
    for case in ["in a callback while another drops", "in a callback as another begins to drop"] {
        let begun = Instant::now();
        let (status, place) = run(case);
        assert_eq!(status.code(), Some(3));
        assert!(begun.elapsed() < EXIT_PATIENCE, "the exit waits for the drop");
        expect(&place.path().join("store"), 0..3000);
    }
}

#[test]
fn an_exit_under_a_snapshot_closes_the_store() {
    let (status, place) = run("in a snapshot");
    assert_eq!(status.code(), Some(3));
    expect(&place.path().join("store"), 0..1000);
}

#[test]
fn an_exit_waits_for_a_store_that_another_thread_drops() {
    for _ in 0..5 {
        let (status, place) = run("while another drops");
        assert_eq!(status.code(), Some(3));
        expect(&place.path().join("store"), 0..1000);
    }
}

#[test]
fn the_child_of_a_fork_leaves_its_parents_store_alone_and_closes_its_own() {
    let (status, place) = run("fork");
    assert!(status.success());
    expect(&place.path().join("store"), 0..=1000);
    expect(&place.path().join("own"), 0..1000);
}

#[test]
fn a_panic_of_the_caller_in_a_change_closes_the_store_without_it() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("store");
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let (_store, tree) = begin(&path);
        let _ = tree.update(&key(5), |value| {
            value.fill(0);
            panic!("half way");
        });
    }));
    assert!(unwound.is_err());
    expect(&path, 0..1000);
    let store = Store::open(&path, &small()).unwrap();
    assert_eq!(&*store.tree("t").unwrap().get(&key(5)).unwrap().unwrap(), [7; 100]);
}

#[test]
fn a_panic_during_a_change_leaves_the_file_as_it_is() {
    let device = Arc::new(HookedDevice::new(MemoryDevice::new()));
    let mut refused = None;
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let store = Store::create_on(device.clone(), &small()).unwrap();
        let tree = store.create_tree("t").unwrap();
        tree.upsert(b"a", b"b").unwrap();
        let long = vec![1; 100 << 10];
        // More than the pool has: pages go to the file, which is in use from then on.
        for number in 0..200 {
            tree.upsert(&[1, number], &long).unwrap();
        }
        device.set_hook(|call| assert!(call != Call::Resize, "a fault of the device"));
        let change =
            catch_unwind(AssertUnwindSafe(|| (0..50u8).all(|n| tree.upsert(&[n], &long).is_ok())));
        assert!(change.is_err());
        device.clear_hook();
        refused = tree.upsert(b"c", b"d").err();
        assert_eq!(&*tree.get(b"a").unwrap().unwrap(), b"b");
        panic!("the last handles go");
    }));
    assert!(unwound.is_err());
    assert!(matches!(refused, Some(Error::Poisoned(_))), "{refused:?}");
    let error = Store::open_on(device, &small()).unwrap_err();
    assert!(matches!(error, Error::UncleanShutdown), "{error}");
    assert!(error.to_string().contains("brings back the entries"), "{error}");
}
