//! Makes the files of the present format, to be kept.
//!
//! `VELLUM_KEEP=format-N cargo test -p vellum --test kept_files make -- --ignored` writes them to
//! `crates/engine/tests/files/format-N`, which must be a new folder. N is the greatest version that
//! this build writes; what follows it in the name, as in `format-4-first`, is free.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use tempfile::tempdir;
use vellum::{BackupOptions, Options, Store};

use crate::contents::{self, Step};
use crate::{FORMAT, files, goes_on, log_of};

/// Little memory, so that the pieces of values are short; no log.
fn options(page_frames: u32) -> Options {
    let pool_bytes = 64 * 4096 * u64::from(page_frames);
    Options::new().pool_bytes(pool_bytes).page_frames(page_frames).log(false)
}

/// Takes steps on a store.
pub fn take(store: &Store, steps: &[Step]) {
    let tree = |name: &str| store.tree(name).unwrap();
    for step in steps {
        match step {
            Step::Create(name) => drop(store.create_tree(name).unwrap()),
            Step::Drop(name) => store.drop_tree(name).unwrap(),
            Step::Put(name, key, value) => drop(tree(name).upsert(key, value).unwrap()),
            Step::Stream(name, key, value) => {
                let tree = tree(name);
                let mut writer = tree.writer(key).unwrap();
                writer.write_all(value).unwrap();
                writer.finish().unwrap();
            }
            Step::Remove(name, key) => drop(tree(name).remove(key).unwrap()),
        }
    }
}

/// Takes each list of steps in a transaction.
pub fn transact(store: &Store, transactions: &[Vec<Step>]) {
    for steps in transactions {
        let done = store.transact(|txn| {
            for step in steps {
                match step {
                    Step::Put(name, key, value) => txn.put(&store.tree(name)?, key, value)?,
                    Step::Remove(name, key) => drop(txn.remove(&store.tree(name)?, key)?),
                    other => panic!("not a step of a transaction: {other:?}"),
                }
            }
            Ok(())
        });
        done.unwrap();
    }
}

/// Copies the files of a store that is open, and those of its log: they are what a killed process
/// leaves.
fn copy_open(from: &Path, to: &Path) {
    fs::copy(from, to).unwrap();
    let (from, to) = (log_of(from), log_of(to));
    if !from.is_dir() {
        return;
    }
    fs::create_dir(&to).unwrap();
    for entry in fs::read_dir(&from).unwrap() {
        let name = entry.unwrap().file_name();
        // The log has made some files ahead, and has written nothing to them. A process that was
        // killed a little earlier leaves none.
        let Ok(bytes) = fs::read(from.join(&name)) else { continue };
        let has_blocks = bytes.iter().skip(4096).any(|byte| *byte != 0);
        if has_blocks || bytes.is_empty() {
            fs::write(to.join(&name), bytes).unwrap();
        }
    }
}

fn closed(to: &Path, page_frames: u32) {
    let store = Store::create(to, &options(page_frames)).unwrap();
    take(&store, &contents::base(FORMAT));
    store.close().unwrap();
}

/// A store without a log whose newest header lists pages.
fn listed(to: &Path) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    closed(&path, 1);
    let store = Store::open(&path, &options(1)).unwrap();
    take(&store, &contents::few());
    store.sync().unwrap();
    copy_open(&path, to);
}

/// A store with a log that was not closed after `changes`.
fn crashed(to: &Path, page_frames: u32, changes: impl Fn(&Store)) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    closed(&path, page_frames);
    let store = Store::open(&path, &options(page_frames).log(true).log_bytes(1 << 20)).unwrap();
    changes(&store);
    store.sync().unwrap();
    copy_open(&path, to);
}

/// A store that was closed after it had a log, and the same with the log that it had.
fn ended(to: &Path, left: &Path) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    closed(&path, 1);
    let store = Store::open(&path, &options(1).log(true).log_bytes(1 << 20)).unwrap();
    take(&store, &contents::more());
    store.sync().unwrap();
    copy_open(&path, left);
    store.close().unwrap();
    fs::copy(&path, to).unwrap();
    fs::copy(&path, left).unwrap();
}

/// A backup, and an increment that follows it. The store of the backup after changes: closed, and
/// as a killed process leaves it.
fn backups(base: &Path, increment: &Path, ended: &Path, killed: &Path) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("store");
    closed(&path, 1);
    let store = Store::open(&path, &options(1).log(true).log_bytes(1 << 20)).unwrap();
    store.backup(base, &BackupOptions::new(), &mut goes_on).unwrap();
    take(&store, &contents::more());
    store.sync().unwrap();
    copy_open(&path, killed);
    let copy = folder.path().join("copy");
    copy_open(&path, &copy);
    let options = options(1).log(true).log_bytes(1 << 20);
    Store::open(&copy, &options).unwrap().close().unwrap();
    fs::copy(&copy, ended).unwrap();
    store.backup(increment, &BackupOptions::new().since(base), &mut goes_on).unwrap();
}

#[test]
#[ignore = "makes files to be kept"]
fn make() {
    let name = std::env::var("VELLUM_KEEP").expect("VELLUM_KEEP names the folder: format-N");
    assert!(name.starts_with(&format!("format-{FORMAT}")), "the present format is {FORMAT}");
    let folder = files().join(&name);
    fs::create_dir(&folder).expect("files that are kept are never made again");
    closed(&folder.join("closed-1.store"), 1);
    closed(&folder.join("closed-2.store"), 2);
    listed(&folder.join("listed.store"));
    let more = |store: &Store| take(store, &contents::more());
    crashed(&folder.join("crashed-1.store"), 1, more);
    crashed(&folder.join("crashed-2.store"), 2, more);
    crashed(&folder.join("altered.store"), 1, |store| take(store, &contents::altered()));
    crashed(&folder.join("splits.store"), 1, |store| take(store, &contents::splits()));
    let transactions = |store: &Store| transact(store, &contents::transactions());
    crashed(&folder.join("transactions.store"), 1, transactions);
    let [base, increment, ended_store, killed] =
        ["full.backup", "one.increment", "backed-up.store", "crashed-3.store"]
            .map(|name| folder.join(name));
    backups(&base, &increment, &ended_store, &killed);
    ended(&folder.join("ended.store"), &folder.join("left.store"));
    println!("made {}", folder.display());
}
