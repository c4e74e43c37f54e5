//! Repair of damaged pages from a backup: what the store knows to be unchanged, and nothing else.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use vellum::{BackupOptions, BackupProgress, Error, Options, RestoreOptions, Store};
use vellum_testing::random::Random;

const FRAME: usize = 4096;
const STILL: u64 = 5000;
const MOVED: u64 = 20_000;

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn options(page_frames: u32) -> Options {
    Options::new().pool_bytes(2 << 20).page_frames(page_frames).log(true).log_bytes(4 << 20)
}

/// A store, its backup with increments, and what became of it.
struct Setup {
    folder: TempDir,
    store: PathBuf,
    page_frames: u32,
    increments: Vec<PathBuf>,
}

impl Setup {
    /// The store of the newest increment was changed since. It was closed, or its process killed.
    fn new(page_frames: u32, increments: u64, is_killed: bool) -> Setup {
        let folder = TempDir::new().unwrap();
        let at = |name: String| folder.path().join(name);
        let path = at("first".into());
        let store = Store::create(&path, &options(page_frames)).unwrap();
        let still = store.create_tree("still").unwrap();
        (0..STILL).for_each(|key| still.insert(&key.to_be_bytes(), &[7; 150]).unwrap());
        let long = store.create_tree("long").unwrap();
        (0..20_u8).for_each(|key| {
            long.upsert(&[key], &vec![key; 30_000]).unwrap();
        });
        store.create_tree("moved").unwrap();
        let mut random = Random(3);
        change(&store, &mut random, 4000);
        store.backup(at("full".into()), &BackupOptions::new(), &mut goes_on).unwrap();
        let mut setup = Setup { store: path, page_frames, increments: Vec::new(), folder };
        for number in 0..increments {
            change(&store, &mut random, 300);
            long.upsert(&[number as u8], &vec![99; 20_000]).unwrap();
            let (last, next) = (setup.last(), setup.at(&format!("increment {number}")));
            let since = BackupOptions::new().since(last);
            store.backup(&next, &since, &mut goes_on).unwrap();
            setup.increments.push(next);
        }
        change(&store, &mut random, 300);
        long.upsert(&[15], &vec![98; 25_000]).unwrap();
        drop((still, long));
        match is_killed {
            false => store.close().unwrap(),
            true => {
                store.sync().unwrap();
                let killed = setup.at("killed");
                copy(&setup.store, &killed);
                setup.store = killed;
            }
        }
        setup
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn full(&self) -> PathBuf {
        self.at("full")
    }

    fn last(&self) -> PathBuf {
        self.increments.last().cloned().unwrap_or_else(|| self.full())
    }

    fn options(&self) -> Options {
        options(self.page_frames)
    }

    /// All entries, read from a copy.
    fn entries(&self) -> Entries {
        let path = self.at("copy");
        copy(&self.store, &path);
        entries(&Store::open(&path, &self.options()).unwrap())
    }

    /// Damages those frames in use of the store's file that are, or are not, as in the backup.
    /// Returns their number.
    fn damage(&self, unchanged: bool) -> usize {
        let restored = self.at("restored");
        let options = RestoreOptions::new().replace(true);
        vellum::restore(&restored, self.full(), &self.increments, &options, &mut goes_on).unwrap();
        let backup = fs::read(restored).unwrap();
        let mut store = fs::read(&self.store).unwrap();
        let spared = free_map(&store, self.page_frames);
        let mut damaged = 0;
        for (number, frame) in store.chunks_exact_mut(FRAME).enumerate().skip(2) {
            let before = backup.get(number * FRAME..(number + 1) * FRAME);
            let is_used = frame.iter().any(|byte| *byte != 0);
            if is_used && !spared.contains(&number) && (before == Some(frame)) == unchanged {
                frame[2000] ^= 4;
                damaged += 1;
            }
        }
        fs::write(&self.store, store).unwrap();
        damaged
    }

    fn open(&self) -> Store {
        Store::open(&self.store, &self.options()).unwrap()
    }

    fn repair(&self, store: &Store) -> vellum::Result<()> {
        store.repair_from(self.full(), &self.increments, &mut goes_on)
    }
}

/// Copies a store, with its log if it is open.
fn copy(from: &Path, to: &Path) {
    let log = |path: &Path| PathBuf::from(format!("{}.log", path.display()));
    fs::copy(from, to).unwrap();
    let _ = fs::remove_dir_all(log(to));
    if log(from).is_dir() {
        fs::create_dir(log(to)).unwrap();
        for entry in fs::read_dir(log(from)).unwrap() {
            let name = entry.unwrap().file_name();
            let _ = fs::copy(log(from).join(&name), log(to).join(&name));
        }
    }
}

/// The frames of the free map: a store whose map is damaged does not open.
fn free_map(file: &[u8], page_frames: u32) -> Vec<usize> {
    let number = |at: usize| u64::from_le_bytes(*file[at..].first_chunk().unwrap()) as usize;
    let newest = [0, FRAME].into_iter().max_by_key(|at| number(at + 72)).unwrap();
    let (mut page, mut frames) = (number(newest + 96), Vec::new());
    while page != 0 {
        frames.extend(page..page + page_frames as usize);
        page = number(page * FRAME + 40);
    }
    frames
}

/// Changes part of one tree.
fn change(store: &Store, random: &mut Random, count: u64) {
    let moved = store.tree("moved").unwrap();
    let start = random.below(MOVED - count);
    for key in start..start + count {
        moved.upsert(&key.to_be_bytes(), &random.below(1 << 40).to_le_bytes().repeat(9)).unwrap();
    }
}

type Entries = BTreeMap<(String, Vec<u8>), Vec<u8>>;

fn entries(store: &Store) -> Entries {
    let mut entries = Entries::new();
    for name in store.trees().unwrap() {
        let tree = store.tree(&name).unwrap();
        for entry in tree.entries() {
            let (key, value) = entry.unwrap();
            entries.insert((name.clone(), key), value.to_vec());
        }
    }
    entries
}

fn get(store: &Store, tree: &str, key: &[u8]) -> vellum::Result<Option<Vec<u8>>> {
    Ok(store.tree(tree)?.get(key)?.map(|value| value.to_vec()))
}

#[test]
fn damaged_pages_that_were_not_written_since_are_repaired() {
    for (page_frames, increments, is_killed) in
        [(1, 0, false), (1, 2, true), (2, 1, false), (2, 0, true)]
    {
        let what = format!("{page_frames} frames, {increments} increments, killed: {is_killed}");
        let setup = Setup::new(page_frames, increments, is_killed);
        let expected = setup.entries();
        let damaged = setup.damage(true);
        assert!(damaged > 300, "{what}: {damaged}");
        let store = setup.open();
        assert!(!store.check(&mut |_| {}).unwrap().is_sound(), "{what}");
        drop(store);

        let store = setup.open();
        setup.repair(&store).unwrap();
        assert!(entries(&store) == expected, "{what}");
        let report = store.check(&mut |_| {}).unwrap();
        assert!(report.is_sound(), "{what}: {:?}", report.damage);
        let repairs = store.pool_stats().repairs;
        assert!(repairs > damaged as u64 / 20, "{what}: {repairs}");
        store.close().unwrap();
        // The file has them again.
        let store = Store::open(&setup.store, &setup.options().read_only(true)).unwrap();
        assert!(store.check(&mut |_| {}).unwrap().is_sound(), "{what}");
        assert!(entries(&store) == expected, "{what}");
    }
}

/// The backup has older states of them, and a reader must not get these.
#[test]
fn damaged_pages_that_were_written_since_stay_damaged() {
    for (page_frames, increments) in [(1, 0), (1, 2), (2, 1)] {
        let setup = Setup::new(page_frames, increments, false);
        let expected = setup.entries();
        assert!(setup.damage(false) > 10);
        let store = setup.open();
        setup.repair(&store).unwrap();
        assert!(!store.check(&mut |_| {}).unwrap().is_sound());
        let (mut right, mut damaged) = (0, 0);
        for ((name, key), value) in &expected {
            let found = get(&store, name, key);
            match found {
                Ok(found) => {
                    assert_eq!(found.as_deref(), Some(&value[..]), "{name}");
                    right += 1;
                }
                Err(Error::Damaged { .. }) => damaged += 1,
                Err(error) => panic!("{name}: {error}"),
            }
        }
        assert!(damaged > 200, "{right} right, {damaged} damaged");
        assert_eq!(store.pool_stats().repairs, 0);
    }
}

#[test]
fn a_damaged_backup_repairs_nothing() {
    for increments in [0, 1] {
        let setup = Setup::new(1, increments, false);
        setup.damage(true);
        let mut backup = fs::read(setup.full()).unwrap();
        let spared = free_map(&backup, 1);
        for (number, frame) in backup.chunks_exact_mut(FRAME).enumerate().skip(2) {
            if !spared.contains(&number) {
                frame[1000] ^= 1;
            }
        }
        fs::write(setup.full(), backup).unwrap();
        let store = setup.open();
        match (increments, setup.repair(&store)) {
            (0, Err(Error::BadBackup { what, .. })) => assert!(what.contains("changed"), "{what}"),
            (1, Ok(())) => {}
            (_, other) => panic!("{other:?}"),
        }
        let before = store.pool_stats().repairs;
        let still = get(&store, "still", &1_u64.to_be_bytes());
        assert!(matches!(still, Err(Error::Damaged { .. })), "{still:?}");
        assert_eq!(store.pool_stats().repairs, before);
    }
}

/// An increment does not have damaged pages that were not written, and its base repairs them.
#[test]
fn an_increment_leaves_damaged_pages_to_its_base() {
    let setup = Setup::new(1, 0, false);
    let expected = setup.entries();
    let damaged = setup.damage(true);
    let store = setup.open();
    let one = setup.at("one");
    store.backup(&one, &BackupOptions::new().since(setup.full()), &mut goes_on).unwrap();
    store.repair_from(setup.full(), std::slice::from_ref(&one), &mut goes_on).unwrap();
    assert!(entries(&store) == expected);
    assert!(store.pool_stats().repairs > damaged as u64 / 20);
    drop(store);
    let restored = setup.at("restored");
    let options = RestoreOptions::new().replace(true);
    vellum::restore(&restored, setup.full(), &[one], &options, &mut goes_on).unwrap();
    assert!(entries(&Store::open(&restored, &setup.options()).unwrap()) == expected);
}

/// A log that cannot be read is no reason to leave pages damaged that the backup has.
#[test]
fn a_damaged_log_does_not_keep_a_backup_from_repairs() {
    let setup = Setup::new(1, 0, false);
    setup.damage(true);
    let store = setup.open();
    setup.repair(&store).unwrap();
    change(&store, &mut Random(5), 900);
    store.sync().unwrap();
    for entry in fs::read_dir(format!("{}.log", setup.store.display())).unwrap() {
        let path = entry.unwrap().path();
        let len = fs::metadata(&path).unwrap().len() as usize;
        fs::write(path, vec![0x55; len]).unwrap();
    }
    let still = store.tree("still").unwrap();
    for key in 0..STILL {
        let value = still.get(&key.to_be_bytes()).unwrap();
        assert_eq!(value.as_deref(), Some(&[7; 150][..]), "{key}");
    }
    assert!(store.pool_stats().repairs > 50);
}

#[test]
fn only_the_newest_backup_of_a_store_with_a_log_repairs_it() {
    let setup = Setup::new(1, 2, false);
    let store = setup.open();
    let bad = |full: &Path, increments: &[PathBuf]| match store.repair_from(
        full,
        increments,
        &mut goes_on,
    ) {
        Err(Error::BadBackup { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let [one, two] = [0, 1].map(|number| setup.increments[number].clone());
    let unknown = "does not know what was written since";
    assert!(bad(&setup.full(), &[]).contains(unknown));
    assert!(bad(&setup.full(), std::slice::from_ref(&one)).contains(unknown));
    let order = bad(&setup.full(), &[two.clone(), one.clone()]);
    assert!(order.contains("does not follow"), "{order}");
    assert!(bad(&one, &[two]).contains("it is an increment"));
    let other = Setup::new(1, 0, false);
    assert!(bad(&other.full(), &[]).contains(unknown));
    assert!(bad(&other.full(), &[one]).contains("of another store"));
    setup.repair(&store).unwrap();
    setup.repair(&store).unwrap();

    let newer = setup.at("newer");
    store.backup(&newer, &BackupOptions::new(), &mut goes_on).unwrap();
    let error = setup.repair(&store).unwrap_err().to_string();
    assert!(error.contains(unknown), "{error}");
    let mut calls = 0;
    let stop = &mut |_: BackupProgress| {
        calls += 1;
        ControlFlow::Break(())
    };
    assert!(matches!(store.repair_from(&newer, &[], stop), Err(Error::Cancelled)));
    assert_eq!(calls, 1);
    store.repair_from(&newer, &[], &mut goes_on).unwrap();
    // Another backup may take its place.
    store.backup(&newer, &BackupOptions::new().replace(true), &mut goes_on).unwrap();
    store.repair_from(&newer, &[], &mut goes_on).unwrap();
    store.close().unwrap();

    let read_only = Store::open(&setup.store, &setup.options().read_only(true)).unwrap();
    let refused = read_only.repair_from(&newer, &[], &mut goes_on);
    assert!(matches!(refused, Err(Error::ReadOnly)), "{refused:?}");
    drop(read_only);
    let without = Store::open(&setup.store, &setup.options().log(false)).unwrap();
    let refused = without.repair_from(&newer, &[], &mut goes_on);
    assert!(matches!(refused, Err(Error::BadOption(_))), "{refused:?}");
    without.tree("moved").unwrap().upsert(b"k", b"v").unwrap();
    without.close().unwrap();
    let error = setup.open().repair_from(&newer, &[], &mut goes_on).unwrap_err().to_string();
    assert!(error.contains(unknown), "{error}");
}
