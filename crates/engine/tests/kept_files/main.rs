//! Files that builds of each format have written are opened by every later build, with each of
//! their entries, and changed.
//!
//! The files lie in `crates/engine/tests/files`, in a folder for each version of the format. They
//! are never made again: `make.rs` says how files of a later format come to them. The name of a
//! file says what it has.
#![allow(clippy::unwrap_used)]

mod contents;
mod make;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use tempfile::{TempDir, tempdir};
use vellum::{BackupOptions, BackupProgress, Error, Options, RestoreOptions, Store};
use vellum_pool::device::{Fault, FaultyDevice, MemoryDevice, Operation};

use contents::{Entries, Step, Trees, apply};

/// The greatest version that this build writes.
const FORMAT: u32 = 8;

fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files")
}

fn options() -> Options {
    Options::new().pool_bytes(1 << 20)
}

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The folder of a store's log.
fn log_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".log");
    name.into()
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name();
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}

/// A folder of files that are kept, and the version of the format that its name has.
fn kept_folders() -> Vec<(u32, PathBuf)> {
    let version = |path: PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let number = name.strip_prefix("format-").expect("folders are named format-N").split('-');
        (number.into_iter().next().unwrap().parse().unwrap(), path)
    };
    let folders = fs::read_dir(files()).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.map(version).collect();
    folders.sort();
    folders
}

/// The files of a folder that end in this.
fn named(folder: &Path, end: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        paths.filter(|path| path.is_file() && path.to_str().unwrap().ends_with(end)).collect();
    paths.sort();
    paths
}

/// What a file of this name must have.
fn expected(version: u32, path: &Path) -> Trees {
    let mut trees = Trees::new();
    apply(&contents::base(version), &mut trees);
    match path.file_stem().unwrap().to_str().unwrap() {
        "closed-1" | "closed-2" | "full" => {}
        "ended" | "left" | "backed-up" => apply(&contents::more(), &mut trees),
        "altered" => apply(&contents::altered(), &mut trees),
        "splits" => apply(&contents::splits(), &mut trees),
        "listed" => apply(&contents::few(), &mut trees),
        "crashed-1" | "crashed-2" | "crashed-3" | "one" => apply(&contents::more(), &mut trees),
        "transactions" => {
            contents::transactions().iter().for_each(|steps| apply(steps, &mut trees));
        }
        other => panic!("no file of this name is known: {other}"),
    }
    trees
}

/// Whether a store was not closed. A process was killed when it had closed `left.store`, and before
/// it had removed the log.
fn needs_recovery(path: &Path) -> bool {
    log_of(path).is_dir() && path.file_stem().unwrap() != "left"
}

/// A copy of a store, with its log.
fn copy(path: &Path) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let to = folder.path().join(path.file_name().unwrap());
    fs::copy(path, &to).unwrap();
    if log_of(path).is_dir() {
        copy_folder(&log_of(path), &log_of(&to));
    }
    (folder, to)
}

/// Asserts that a store is sound and has these entries and no others.
#[track_caller]
fn assert_has(store: &Store, trees: &Trees) {
    let names: Vec<String> = trees.keys().cloned().collect();
    assert_eq!(store.trees().unwrap(), names);
    for (name, entries) in trees {
        let tree = store.tree(name).unwrap();
        let found = tree.entries().map(|entry| {
            let (key, value) = entry.unwrap();
            (key, value.to_vec())
        });
        assert!(found.collect::<Entries>() == *entries, "the entries of {name}");
        for (key, value) in entries {
            let mut found = Vec::new();
            std::io::copy(&mut tree.reader(key).unwrap().unwrap(), &mut found).unwrap();
            assert!(found == *value, "{name}, {}", key.escape_ascii());
        }
    }
    let report = store.check(&mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.damage);
    assert_eq!(report.lost_pages, 0);
}

/// Steps that change all that a store has.
fn changes(trees: &Trees) -> Vec<Step> {
    let mut steps = vec![Step::Create("new")];
    steps.extend(contents::few());
    for number in 0..200 {
        let key = format!("entry {number:04} and more").into_bytes();
        steps.push(Step::Put("short", key, vec![number as u8; number]));
    }
    let long = trees["long"].keys().map(|key| Step::Put("new", key.clone(), vec![1; 9000]));
    steps.extend(long);
    steps.push(Step::Stream("new", b"streamed".into(), vec![3; 60_000]));
    steps.push(Step::Stream("long", b"streamed".into(), vec![4; 60_000]));
    steps.push(Step::Drop("long"));
    if trees.contains_key("pieces") {
        steps.extend(trees["pieces"].keys().map(|key| Step::Remove("pieces", key.clone())));
    }
    steps
}

/// Opens a copy of a store, reads it, changes it, and opens it again: with a log and without.
#[track_caller]
fn open_read_and_change(version: u32, path: &Path, needs_recovery: bool) {
    println!("{}", path.display());
    for with_log in [false, true] {
        let (_folder, path) = copy(path);
        let options = options().log(with_log);
        let mut trees = expected(version, &path);
        let store = Store::open(&path, &options).unwrap();
        assert_eq!(store.recovery().is_some(), needs_recovery);
        assert_has(&store, &trees);
        let steps = changes(&trees);
        make::take(&store, &steps);
        apply(&steps, &mut trees);
        assert_has(&store, &trees);
        store.close().unwrap();
        let store = Store::open(&path, &options.read_only(true)).unwrap();
        assert_has(&store, &trees);
        store.close().unwrap();
    }
}

#[test]
fn stores_of_each_format_are_read_and_changed() {
    for (version, folder) in kept_folders() {
        for path in named(&folder, ".store") {
            let needs_recovery = needs_recovery(&path);
            open_read_and_change(version, &path, needs_recovery);
            let (_folder, path) = copy(&path);
            match Store::open(&path, &options().read_only(true)) {
                Ok(store) if !needs_recovery => assert_has(&store, &expected(version, &path)),
                Err(Error::NeedsRecovery) if needs_recovery => {}
                other => panic!("opened read-only: {other:?}"),
            }
        }
    }
}

#[test]
fn backups_of_each_format_are_restored() {
    for (version, folder) in kept_folders() {
        for base in named(&folder, ".backup") {
            open_read_and_change(version, &base, false);
            let to = tempdir().unwrap();
            let restore = |name, increments: &[PathBuf]| {
                let to = to.path().join(name);
                let options = RestoreOptions::new();
                vellum::restore(&to, &base, increments, &options, &mut goes_on).unwrap();
                to
            };
            open_read_and_change(version, &restore("full.store", &[]), false);
            for increment in named(&folder, ".increment") {
                let path = restore("one.store", &[increment]);
                open_read_and_change(version, &path, false);
            }
        }
    }
}

/// A backup of today follows one of an earlier format, and an increment of that.
#[test]
fn increments_follow_backups_of_each_format() {
    for (version, folder) in kept_folders() {
        for base in named(&folder, ".backup").into_iter().chain(named(&folder, ".increment")) {
            let (to, path) = copy(&folder.join("full.backup"));
            let before = named(&folder, ".increment");
            let is_increment = before.contains(&base);
            let restored = to.path().join("restored");
            let increments = if is_increment { before } else { Vec::new() };
            let options = RestoreOptions::new();
            vellum::restore(&restored, &path, &increments, &options, &mut goes_on).unwrap();
            let store = Store::open(&restored, &self::options()).unwrap();
            let mut trees = expected(version, &base);
            make::take(&store, &contents::few());
            apply(&contents::few(), &mut trees);
            let next = to.path().join("next");
            let since = BackupOptions::new().since(&base);
            store.backup(&next, &since, &mut goes_on).unwrap();
            let last = to.path().join("last");
            let increments = [increments, vec![next]].concat();
            vellum::restore(&last, &path, &increments, &options, &mut goes_on).unwrap();
            let store = Store::open(&last, &self::options()).unwrap();
            assert_has(&store, &trees);
        }
    }
}

/// A store of an earlier build knows what was written since its backup.
#[test]
fn stores_know_what_was_written_since_their_backup() {
    let mut seen = 0;
    for (version, folder) in kept_folders() {
        for name in ["backed-up.store", "crashed-3.store"] {
            let path = folder.join(name);
            if !path.exists() {
                continue;
            }
            let (to, copied) = copy(&path);
            let store = Store::open(&copied, &options().log(true)).unwrap();
            make::take(&store, &contents::few());
            let base = folder.join("full.backup");
            let increment = to.path().join("increment");
            let since = BackupOptions::new().since(&base);
            let report = store.backup(&increment, &since, &mut goes_on).unwrap();
            // Recovery makes a clean file of a store that an earlier build has left in use, and
            // notes no pages.
            if name == "backed-up.store" || version == FORMAT {
                assert!(report.read_bytes < report.used_bytes, "{report:?}");
                seen += 1;
            }
            let restored = to.path().join("restored");
            let options = RestoreOptions::new();
            vellum::restore(&restored, &base, &[increment], &options, &mut goes_on).unwrap();
            let mut trees = expected(version, &path);
            apply(&contents::few(), &mut trees);
            assert_has(&Store::open(&restored, &self::options()).unwrap(), &trees);
        }
    }
    assert!(seen >= 3);
}

/// A recovery that fails leaves the store to the build that wrote it: that knows no later version.
#[test]
fn a_recovery_that_fails_leaves_the_header_as_it_was() {
    let (_folder, path) = copy(&files().join("format-5/crashed-1.store"));
    let bytes = fs::read(&path).unwrap();
    let memory = Arc::new(MemoryDevice::from_snapshot(bytes.clone()));
    let device = Arc::new(FaultyDevice::new(memory.clone(), 1).unwrap());
    let options = options().log_folder(log_of(&path));
    device.plan().fail_nth(Operation::Write, 2, Fault::Error(Errno::IO));
    let error = Store::open_on(device.clone(), &options).unwrap_err();
    assert!(matches!(error, Error::Io(_)), "{error}");
    assert!(device.plan().counts().writes >= 2);
    assert!(memory.snapshot()[..2 * 4096] == bytes[..2 * 4096]);
    let store = Store::open_on(device, &options).unwrap();
    assert!(store.recovery().is_some());
    assert_has(&store, &expected(5, &path));
}

/// A later format needs files of its own here.
#[test]
fn there_are_files_of_each_version() {
    let folder = tempdir().unwrap();
    let store = folder.path().join("store");
    let open = Store::create(&store, &options().log(true)).unwrap();
    open.backup(folder.path().join("backup"), &BackupOptions::new(), &mut goes_on).unwrap();
    let bytes = fs::read(&store).unwrap();
    drop(open);
    let versions =
        [0, 4096].map(|page| u32::from_le_bytes(*bytes[page + 48..].first_chunk().unwrap()));
    assert_eq!(versions.iter().max(), Some(&FORMAT), "FORMAT is the newest version");
    let mut kept: Vec<u32> = kept_folders().into_iter().map(|(version, _)| version).collect();
    kept.dedup();
    assert_eq!(kept, (1..=FORMAT).collect::<Vec<_>>());
    for (version, folder) in kept_folders() {
        let found = |end: &str| named(&folder, end).len();
        assert!(found(".store") > 0, "{}", folder.display());
        if folder.ends_with(format!("format-{FORMAT}")) {
            assert!(found(".backup") > 0 && found(".increment") > 0, "format {version}");
        }
    }
}

/// A store of a format that this build does not know names what to do.
#[test]
fn a_later_format_is_refused_with_what_to_do() {
    let (_folder, path) = copy(&files().join("format-4/closed-1.store"));
    let mut bytes = fs::read(&path).unwrap();
    for page in bytes.chunks_exact_mut(4096).take(2) {
        page[48..52].copy_from_slice(&99_u32.to_le_bytes());
        vellum::page::seal(page, &[]);
    }
    fs::write(&path, bytes).unwrap();
    let error = Store::open(&path, &options()).unwrap_err();
    assert!(matches!(error, Error::UnknownFormat { found: 99, known: FORMAT }));
    let message = error.to_string();
    assert!(message.contains("vellum dump") && message.contains("vellum load"), "{message}");
}
