//! Backups of stores that run: each opens, is sound, and is the store of one moment.
#![allow(clippy::unwrap_used)]

mod bank;

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use vellum::{BackupOptions, Error, MemoryDevice, RestoreOptions, Store, Tree};
use vellum_pool::device::{Fault, FaultyDevice, Operation};
use vellum_testing::patience::{PATIENCE, eventually};
use vellum_testing::random::Random;
use vellum_testing::small_disk::SmallDisk;

use bank::{
    back_up, beside_writers, check, fill, folder, goes_on, has_all_before, has_value, is_logged,
    long_value, only_files, options, stream, transfer, with_log,
};

#[test]
fn a_backup_beside_writers_is_the_store_of_one_moment() {
    for options in [with_log(), options()] {
        let (folder, path, _) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        beside_writers(&store, |committed| {
            for round in 0..6 {
                let before = committed.load(Ordering::Acquire);
                let backup = folder.path().join(format!("backup {round}"));
                back_up(&store, &backup).unwrap();
                has_all_before(&check(&backup), before);
                std::fs::remove_file(&backup).unwrap();
                eventually("transfers", || committed.load(Ordering::Acquire) >= before + 20);
            }
        });
        store.close().unwrap();
        only_files(folder.path(), &["a.vellum"]);
        check(&path);
    }
}

/// A store of a few pages, which is copied in one part. The parts after that are values that came
/// meanwhile: first those before the end was sought, then those since.
fn small_store(path: &Path, log_bytes: u64) -> (Store, Tree) {
    let store = Store::create(path, &options().log(true).log_bytes(log_bytes)).unwrap();
    let tree = store.create_tree("values").unwrap();
    (store, tree)
}

#[test]
fn values_that_come_while_a_store_is_copied_are_in_the_backup() {
    const LEN: usize = 3 << 20;
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 4 << 20);
    let mut calls = 0;
    let report = store.backup(&backup, &BackupOptions::new().check(false), &mut |_| {
        calls += 1;
        match calls {
            // The store is copied, in two small parts.
            1 => stream(&tree, b"one", 1, LEN),
            // The first part of that value was copied.
            3 => ["two", "three"].iter().for_each(|key| stream(&tree, key.as_bytes(), 2, LEN)),
            // The value was copied, the end was found, and a part of the next two was copied.
            20 => {
                for key in ["one", "two", "three"] {
                    assert!(tree.remove(key.as_bytes()).unwrap());
                    store.sync().unwrap();
                }
                // These take the places of the others, if they may.
                (4..8).for_each(|seed: u64| stream(&tree, &seed.to_le_bytes(), seed, LEN));
                tree.upsert(b"later", b"").unwrap();
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    report.unwrap();
    assert!(calls > 30, "{calls} parts");
    has_value(&tree, &7_u64.to_le_bytes(), 7, LEN);
    let copy = Store::open(&backup, &options().read_only(true)).unwrap();
    let report = copy.check(&mut |_| {}).unwrap();
    assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
    let tree = copy.tree("values").unwrap();
    has_value(&tree, b"one", 1, LEN);
    has_value(&tree, b"two", 2, LEN);
    has_value(&tree, b"three", 2, LEN);
    assert!(!tree.contains(b"later").unwrap());
    store.close().unwrap();
}

/// The log has room for a part of the changes only, so checkpoints trim it.
#[test]
fn a_log_that_is_trimmed_meanwhile_is_in_the_backup() {
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 1 << 20);
    (0..2000_u64).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 400]).unwrap());
    let mut calls = 0;
    let report = store.backup(&backup, &BackupOptions::new(), &mut |_| {
        calls += 1;
        if calls == 1 {
            (0..2000_u64)
                .rev()
                .filter(|key| key % 3 > 0)
                .for_each(|key| assert!(tree.upsert(&key.to_be_bytes(), &[2; 1000]).unwrap()));
        }
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert!(report.changes >= 1300, "{report:?}");
    let copy = Store::open(&backup, &options()).unwrap();
    let tree = copy.tree("values").unwrap();
    for key in 0..2000_u64 {
        let expected = if key % 3 > 0 { vec![2; 1000] } else { vec![1; 400] };
        assert_eq!(tree.get(&key.to_be_bytes()).unwrap().unwrap().to_vec(), expected);
    }
    copy.close().unwrap();
    store.close().unwrap();
}

/// A value that a writer has not finished, and one that a reader still has, are no part of it.
#[test]
fn pages_to_which_no_tree_refers_are_free_in_the_backup() {
    for options in [with_log(), options()] {
        let (_folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        let tree = store.create_tree("values").unwrap();
        stream(&tree, b"read", 1, 3 << 20);
        let reader = tree.reader(b"read").unwrap().unwrap();
        let mut writer = tree.writer(b"written").unwrap();
        writer.write_all(&long_value(2, 2 << 20)).unwrap();
        let mut calls = 0;
        let report = store.backup(&backup, &BackupOptions::new(), &mut |_| {
            calls += 1;
            // Without a log the state is that of the beginning.
            if calls == 1 && store.recovery().is_none() && is_logged(&options) {
                assert!(tree.remove(b"read").unwrap());
            }
            ControlFlow::Continue(())
        });
        report.unwrap();
        writer.finish().unwrap();
        drop(reader);
        let copy = Store::open(&backup, &options.clone().read_only(true)).unwrap();
        let report = copy.check(&mut |_| {}).unwrap();
        assert!(report.is_sound() && report.lost_pages == 0, "{report:?}");
        let copied = copy.tree("values").unwrap();
        assert!(!copied.contains(b"written").unwrap());
        assert_eq!(copied.contains(b"read").unwrap(), !is_logged(&options));
        store.close().unwrap();
    }
}

#[test]
fn a_store_that_is_open_to_read_is_copied_as_it_is() {
    let (folder, path, backup) = folder();
    for options in [options(), with_log()] {
        let store = Store::open_or_create(&path, &options).unwrap();
        if store.trees().unwrap().is_empty() {
            fill(&store);
        }
        stream(&store.tree("files 0").unwrap(), b"one", 1, 1 << 20);
        store.close().unwrap();
        let before = std::fs::read(&path).unwrap();
        let store = Store::open(&path, &options.read_only(true)).unwrap();
        let twin = Store::open(&path, &self::options().read_only(true)).unwrap();
        back_up(&store, &backup).unwrap();
        drop((store, twin));
        assert!(std::fs::read(&path).unwrap() == before, "the store has changed");
        check(&backup);
        std::fs::remove_file(&backup).unwrap();
    }
    only_files(folder.path(), &["a.vellum"]);
}

/// A backup has the store's numbers: what comes after it in the store's log comes after it in its
/// own, too.
#[test]
fn a_backup_goes_on_as_a_store_with_a_log() {
    let (_folder, path, backup) = folder();
    let (store, tree) = small_store(&path, 4 << 20);
    (0..500_u64).for_each(|key| tree.insert(&key.to_be_bytes(), &[1; 100]).unwrap());
    let report = back_up(&store, &backup).unwrap();
    assert_eq!(report.store_id, store.stat().unwrap().store_id);
    assert!(report.lsn > 0 && report.file_bytes >= report.used_bytes, "{report:?}");
    let copy = Store::open(&backup, &options().log(true)).unwrap();
    let copied = copy.tree("values").unwrap();
    (0..500_u64).for_each(|key| assert!(copied.upsert(&key.to_be_bytes(), &[2; 90]).unwrap()));
    copy.sync().unwrap();
    let report = back_up(&copy, &backup.with_extension("second")).unwrap();
    assert!(copy.check(&mut |_| {}).unwrap().is_sound());
    copy.close().unwrap();
    store.close().unwrap();
    assert!(report.lsn > 0);
}

#[test]
fn what_is_there_is_not_replaced_unless_it_is_asked_for() {
    let (folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    std::fs::write(&backup, "other").unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::Exists(_)), "{error}");
    assert_eq!(std::fs::read(&backup).unwrap(), b"other");
    let replace = BackupOptions::new().replace(true);
    // Nor is the store itself.
    let error = store.backup(&path, &replace, &mut goes_on).unwrap_err();
    assert!(matches!(error, Error::InUse(_)), "{error}");
    store.backup(&backup, &replace, &mut goes_on).unwrap();
    check(&backup);
    let nowhere = folder.path().join("no folder").join("b.vellum");
    let error = back_up(&store, &nowhere).unwrap_err().to_string();
    assert!(error.contains("no folder"), "{error}");
    let error = back_up(&store, Path::new("/dev/null")).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    store.close().unwrap();
    only_files(folder.path(), &["a.vellum", "b.vellum"]);
}

/// The pages of a bulk load are in no log: a backup has them from the file. Some of the loads end
/// during the backup, and their trees are changed afterwards.
#[test]
fn a_backup_has_whole_loads() {
    let (_folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    let entry = |number: u32| (number.to_be_bytes(), long_value(number.into(), 90));
    let load = |name: &str| {
        let tree = store.create_tree(name).unwrap();
        tree.bulk_load((0..3000).map(entry)).unwrap();
        (0..3000).step_by(100).for_each(|number: u32| {
            tree.remove(&number.to_be_bytes()).unwrap();
        });
    };
    load("load before");
    let mut loads = 0;
    store
        .backup(&backup, &BackupOptions::new(), &mut |_| {
            if loads < 20 {
                load(&format!("load {loads}"));
                loads += 1;
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    let copy = Store::open(&backup, &options().read_only(true)).unwrap();
    assert!(copy.check(&mut |_| ()).unwrap().is_sound());
    let names = copy.trees().unwrap().into_iter().filter(|name| name.starts_with("load"));
    let mut whole = 0;
    for name in names {
        let tree = copy.tree(&name).unwrap();
        let left: Vec<u32> = tree
            .entries()
            .map(|found| {
                let (key, value) = found.unwrap();
                let number = u32::from_be_bytes(key[..].try_into().unwrap());
                assert_eq!(&value[..], entry(number).1, "{name}, {number}");
                number
            })
            .collect();
        // The backup may be of a moment between the changes, or before the load.
        let removed = 3000 - left.len() as u32;
        let expected = (0..3000).filter(|number| number % 100 > 0 || *number >= removed * 100);
        let is_whole = !left.is_empty();
        assert!(!is_whole || left.into_iter().eq(expected), "{name}");
        // The changes after these loads came before the end of the state, too.
        let is_before = ["load before", "load 0"].contains(&&name[..]);
        assert!(!is_before || removed == 30, "{name} has {removed} less");
        whole += u32::from(is_whole);
    }
    println!("{whole} of {loads} loads");
    assert!(loads > 2 && whole > 1, "{whole} of {loads} loads");
}

#[test]
fn a_backup_that_is_cancelled_leaves_nothing() {
    for options in [with_log(), options()] {
        let (folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        for after in [0, 1, 3] {
            let mut calls = 0;
            let error = store.backup(&backup, &BackupOptions::new(), &mut |_| {
                calls += 1;
                match calls > after {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            });
            assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
            transfer(&store, after, &mut Random(after));
        }
        // Another one is not in the way of it.
        back_up(&store, &backup).unwrap();
        assert_eq!(check(&backup).len(), 3);
        store.close().unwrap();
        only_files(folder.path(), &["a.vellum", "b.vellum"]);
    }
}

/// What a progress function must not do fails, and what it may do succeeds.
#[test]
fn a_progress_function_that_calls_the_store_does_not_wait_for_itself() {
    for options in [with_log(), options()] {
        let (_folder, path, backup) = folder();
        let store = Store::create(&path, &options).unwrap();
        fill(&store);
        let is_logged = is_logged(&options);
        let mut calls = 0;
        let report = store.backup(&backup, &BackupOptions::new().check(false), &mut |_| {
            calls += 1;
            if calls > 1 {
                // The store may be copied already.
                return ControlFlow::Continue(());
            }
            match (is_logged, store.sync()) {
                (true, Ok(())) | (false, Err(Error::CalledFromWithin)) => {}
                other => panic!("{other:?}"),
            }
            let second = back_up(&store, &backup.with_extension("second"));
            match (is_logged, second) {
                (true, Err(Error::InUse(_))) | (false, Err(Error::CalledFromWithin)) => {}
                (_, other) => panic!("{other:?}"),
            }
            ControlFlow::Continue(())
        });
        report.unwrap();
        check(&backup);
        store.close().unwrap();
    }
}

#[test]
fn a_limit_makes_a_backup_slower() {
    let (_folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    let options = BackupOptions::new().bytes_per_second(512 << 10);
    let began = std::time::Instant::now();
    let mut calls = 0;
    let report = store.backup(&backup, &options, &mut |progress| {
        calls += 1;
        assert!(progress.bytes_done <= progress.bytes_total);
        ControlFlow::Continue(())
    });
    let least = report.unwrap().used_bytes.min(200 << 10) as f64 / f64::from(512 << 10);
    assert!(began.elapsed().as_secs_f64() >= least && calls > 5, "{calls} calls");
    check(&backup);
}

#[test]
fn closing_a_store_with_a_log_ends_its_backup() {
    let (folder, path, backup) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    let mut handle = Some(store.clone());
    let outcome = store.backup(&backup, &BackupOptions::new(), &mut |_| {
        if let Some(handle) = handle.take() {
            handle.close().unwrap();
        }
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(Error::Closed)), "{outcome:?}");
    assert!(matches!(back_up(&store, &backup), Err(Error::Closed)));
    check(&path);
    only_files(folder.path(), &["a.vellum"]);
}

#[test]
fn a_store_that_cannot_be_read_has_no_backup_and_goes_on() {
    let (folder, _, backup) = folder();
    let memory = Arc::new(MemoryDevice::new());
    let device = Arc::new(FaultyDevice::new(memory, 1).unwrap());
    let plan = device.plan();
    let store = Store::create_on(device, &options().pool_bytes(1 << 20)).unwrap();
    fill(&store);
    stream(&store.tree("files 0").unwrap(), b"one", 1, 4 << 20);
    store.sync().unwrap();
    plan.fail_always(Operation::Read, Fault::Error(rustix::io::Errno::IO));
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::Io(_)), "{error:?}");
    plan.clear();
    only_files(folder.path(), &[]);
    transfer(&store, 0, &mut Random(1));
    back_up(&store, &backup).unwrap();
    assert_eq!(check(&backup), [0]);
}

/// Damage of the store is not carried into its backups unseen.
#[test]
fn a_damaged_store_has_no_backup() {
    use std::os::unix::fs::FileExt as _;

    let (folder, path, backup) = folder();
    let store = Store::create(&path, &options()).unwrap();
    fill(&store);
    store.close().unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let pages = file.metadata().unwrap().len() / 4096;
    let (mut page, mut at) = ([0; 4096], 0);
    // A leaf of the accounts.
    for number in 3..pages {
        file.read_exact_at(&mut page, number * 4096).unwrap();
        if page[36] == 3 && page.windows(7).any(|bytes| bytes == b"account") {
            at = number * 4096 + 3000;
        }
    }
    file.write_all_at(&[0xee; 8], at).unwrap();
    let store = Store::open(&path, &options().read_only(true)).unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(matches!(error, Error::BadBackup { .. }), "{error:?}");
    assert!(error.to_string().contains("checksum"), "{error}");
    only_files(folder.path(), &["a.vellum"]);
    let store = Store::open(&path, &options().salvage(true)).unwrap();
    let error = back_up(&store, &backup).unwrap_err();
    assert!(error.to_string().contains("dump"), "{error}");
}

/// There is room for the store, but not for the records that come while it is copied.
#[test]
fn a_full_disk_of_the_backup_is_no_failure_of_the_store() {
    let (folder, path, _) = folder();
    let (store, tree) = small_store(&path, 1 << 20);
    let Some(disk) = SmallDisk::mount(folder.path().join("disk"), 1 << 10) else { return };
    let mut calls = 0;
    let outcome = store.backup(disk.path().join("b.vellum"), &BackupOptions::new(), &mut |_| {
        calls += 1;
        // Several times the log: checkpoints copy what they trim, as long as that goes.
        (0..8000_u64).filter(|_| calls == 1).for_each(|key| {
            tree.insert(&key.to_be_bytes(), &[1; 500]).unwrap();
        });
        ControlFlow::Continue(())
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("copying the log") && error.contains("No space left"), "{error}");
    only_files(disk.path(), &[]);
    tree.insert(b"after", b"").unwrap();
    let backup = folder.path().join("b.vellum");
    back_up(&store, &backup).unwrap();
    let copy = Store::open(&backup, &options().read_only(true)).unwrap();
    assert_eq!(copy.tree("values").unwrap().entries().count(), 8001);
    store.close().unwrap();
}

/// Where the child has its store and its backups.
const FOLDER: &str = "VELLUM_TEST_BACKUPS";

/// What the child writes to its output for each part of a backup, and for each full backup that it
/// has. The harness writes neither.
const PART: u8 = b'+';
const FULL: u8 = b'=';

fn say(what: u8) {
    let mut output = std::io::stdout().lock();
    output.write_all(&[what]).and_then(|()| output.flush()).unwrap();
}

/// Not a test of its own: the process that is killed. It makes backups and increments beside
/// writers.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    // Its other threads would go on, and the parent would see nothing.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    // The parent waits for it.
    thread::spawn(|| {
        thread::sleep(PATIENCE);
        std::process::abort();
    });
    let folder = Path::new(&folder);
    let store = Store::open(folder.join("a.vellum"), &with_log()).unwrap();
    let mut goes_on = |_| {
        say(PART);
        ControlFlow::Continue(())
    };
    beside_writers(&store, |_| {
        for number in 0.. {
            let full = folder.join(format!("full {number}"));
            store.backup(&full, &BackupOptions::new(), &mut goes_on).unwrap();
            say(FULL);
            let increment = folder.join(format!("increment {number}"));
            let options = BackupOptions::new().since(&full);
            store.backup(&increment, &options, &mut goes_on).unwrap();
        }
    });
}

/// Waits until a child has so many full backups, and has then made so many parts of others.
fn wait_for(child: &mut impl BufRead, full: u64, parts: u64) {
    let mut said = child.bytes().map(Result::unwrap);
    for (what, count) in [(FULL, full), (PART, parts)] {
        for _ in 0..count {
            assert!(said.any(|byte| byte == what), "the child has ended");
        }
    }
}

#[test]
fn a_process_that_is_killed_in_a_backup_leaves_whole_files_and_a_sound_store() {
    let (folder, path, _) = folder();
    let store = Store::create(&path, &with_log()).unwrap();
    fill(&store);
    store.close().unwrap();
    let mut random = Random(9);
    for round in 0..8 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture"]).env(FOLDER, folder.path());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        // Now and then before the first backup has ended.
        let full = round % 4;
        let mut output = BufReader::new(child.stdout.take().unwrap());
        wait_for(&mut output, full, random.below(40));
        let mut whole = 0;
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        // The kernel may use the file for the killed process for a moment.
        let mut opened = Store::open(&path, &options());
        while matches!(opened, Err(Error::InUse(_))) {
            thread::yield_now();
            opened = Store::open(&path, &options());
        }
        opened.unwrap().close().unwrap();
        check(&path);
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let file = entry.unwrap().path();
            let name = file.file_name().unwrap().to_str().unwrap();
            if let Some(number) = name.strip_prefix("increment ") {
                let (full, new) =
                    (folder.path().join(format!("full {number}")), file.with_extension("new"));
                vellum::restore(
                    &new,
                    full,
                    std::slice::from_ref(&file),
                    &RestoreOptions::new(),
                    &mut goes_on,
                )
                .unwrap();
                check(&new);
                std::fs::remove_file(&new).unwrap();
            } else if name.starts_with("full ") {
                check(&file);
                whole += 1;
            }
        }
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let file = entry.unwrap().path();
            if file != path {
                std::fs::remove_file(file).unwrap();
            }
        }
        assert!(whole >= full, "{whole} full backups, and the child had {full}");
    }
}
