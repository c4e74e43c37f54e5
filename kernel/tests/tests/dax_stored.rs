//! Stored tables: the kernel finds them after a restart, uses what the file system confirms, and
//! refuses the rest, whatever root has written there: no page of another file is ever shown.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_dax::{StoredTable, forget_table, store_table};
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{self, DaxFile, Heap, forget_kept, tables};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Errno, PAGE, Table, Turn, access, dax_turn, persistent, sys};
use vellum_uapi::dax::{DURABLE, STORED_FOLDER, checksum};

const BYTES: u64 = PAGE as u64;

/// The module's parameter.
const PARAMETER: &str = "/sys/module/vellum/parameters/dax_stored_kib";

/// A turn, with an empty file system, and without stored tables after it.
struct Clean {
    _turn: Turn,
}

impl Clean {
    fn turn() -> Option<Self> {
        let _turn = dax_turn()?;
        dax::begin_anew();
        forget_kept();
        Some(Self { _turn })
    }
}

impl Drop for Clean {
    fn drop(&mut self) {
        remove_folder();
    }
}

fn folder() -> PathBuf {
    Path::new(persistent::FOLDER).join(STORED_FOLDER)
}

fn remove_folder() {
    let removed = match fs::symlink_metadata(folder()) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(folder()),
        Ok(_) => fs::remove_file(folder()),
        Err(_) => Ok(()),
    };
    removed.unwrap();
}

/// Where the table of a file is stored.
fn path_of(file: &DaxFile) -> PathBuf {
    folder().join(file.file().metadata().unwrap().ino().to_string())
}

fn store(file: &DaxFile) -> StoredTable {
    store_table(file.file()).unwrap()
}

/// How many stored tables were used, and refused.
fn counts() -> (u64, u64) {
    let tables = tables();
    (tables.stored_used, tables.stored_refused)
}

/// Fails unless the file's table, which is made now, shows the file. Returns how many stored tables
/// were used for that, how many were refused, and for how many pages one was used.
#[track_caller]
fn made_anew(file: &DaxFile, what: &str) -> (u64, u64, u64) {
    forget_kept();
    let before = counts();
    let table = file.table();
    let after = counts();
    let length = file.file().metadata().unwrap().len();
    let mapping = table.mapped(length.div_ceil(BYTES).max(1));
    for page in 0..length / BYTES {
        let mut bytes = vec![0; PAGE];
        file.file().read_exact_at(&mut bytes, page * BYTES).unwrap();
        let seen = access::kernel_load(mapping.page(page), PAGE).unwrap();
        assert!(seen == bytes, "{what}: page {page}");
    }
    assert_file_tables_are_sound();
    (after.0 - before.0, after.1 - before.1, table.stat().stored)
}

const COLLAPSE: FallocateFlags = FallocateFlags::COLLAPSE_RANGE;
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// A file of so many stamped pages that is in several pieces. It stays when it is dropped.
fn in_pieces(name: &str, pages: u64) -> DaxFile {
    let file = DaxFile::kept(name);
    file.file().set_len(0).unwrap();
    (0..pages + 2).for_each(|page| file.stamp(page, 7 + page));
    for page in [pages / 2, 5] {
        fallocate(file.file(), COLLAPSE, page * BYTES, BYTES).unwrap();
    }
    file
}

fn remove(file: DaxFile) {
    fs::remove_file(file.path()).unwrap();
    drop(file);
}

fn restart() {
    persistent::unmount_when_unused();
    dax::mount();
}

/// What root may write into a stored table: its words, and then a checksum that is right again.
fn forge(file: &DaxFile, change: impl FnOnce(&mut Vec<u64>)) {
    let bytes = fs::read(path_of(file)).unwrap();
    let mut words: Vec<u64> =
        bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    change(&mut words);
    words[7] = 0;
    words[7] = checksum(words.iter().copied());
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    fs::write(path_of(file), bytes).unwrap();
}

#[test]
fn a_stored_table_is_used_after_a_restart() {
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("again", 700);
    let stored = store(&file);
    let pages = stored.pages;
    assert!((690..=700).contains(&pages) && stored.runs >= 3, "{stored:?}");
    assert_eq!(made_anew(&file, "in the same mount"), (1, 0, pages));
    // A table that was kept needs nothing of it.
    let before = counts();
    assert_eq!((file.table().stat().stored, counts()), (pages, before));
    drop(file);
    for round in 0..2 {
        restart();
        let file = DaxFile::kept("again");
        assert_eq!(made_anew(&file, "after a restart"), (1, 0, pages), "round {round}");
        forget_kept();
        let (heap, before) = (Heap::for_reading(0), counts());
        let address = heap.attach(file.file(), 0, 700).unwrap();
        for page in 0..700 {
            let mut bytes = vec![0; PAGE];
            file.file().read_exact_at(&mut bytes, page * BYTES).unwrap();
            let seen = access::kernel_load(address + page as usize * PAGE, PAGE).unwrap();
            assert!(seen == bytes, "page {page}");
        }
        assert_eq!((counts().0, heap.stat().served_faults), (before.0 + 1, 0));
    }
    let file = DaxFile::kept("again");
    forget_kept();
    assert_eq!(Table::open(file.file(), DURABLE).unwrap().stat().stored, pages);
    assert_eq!(forget_table(file.file()), Ok(true));
    assert_eq!(forget_table(file.file()), Ok(false));
    assert_eq!(made_anew(&file, "forgotten"), (0, 0, 0));
    remove(file);
}

#[test]
fn holes_and_reserved_blocks_are_in_no_run() {
    let Some(_clean) = Clean::turn() else { return };
    let file = DaxFile::stamped("sparse", 30, 7);
    fallocate(file.file(), FallocateFlags::empty(), 30 * BYTES, 20 * BYTES).unwrap();
    file.file().set_len(1_100 * BYTES).unwrap();
    file.stamp(1_050, 1_050);
    fallocate(file.file(), PUNCH, 4 * BYTES, BYTES).unwrap();
    // A piece of one page is not stored.
    assert_eq!(store(&file).pages, 29);
    assert_eq!(made_anew(&file, "as it was"), (1, 0, 29));
    // Nothing has moved, and more is there.
    [4, 33, 500].into_iter().for_each(|page| file.stamp(page, page));
    assert_eq!(made_anew(&file, "what was filled"), (1, 0, 29));
    assert!(file.table().stat().leaves >= 33);
}

#[test]
fn short_files_have_none() {
    let Some(_clean) = Clean::turn() else { return };
    let files = [7, 8].map(|pages| DaxFile::stamped(&format!("short-{pages}"), pages, 7));
    files.iter().for_each(|file| assert_eq!(store(file).runs, 1));
    assert_eq!(made_anew(&files[0], "28 KiB"), (0, 0, 0));
    assert_eq!(made_anew(&files[1], "32 KiB"), (1, 0, 8));
    let before = fs::read_to_string(PARAMETER).unwrap();
    assert_eq!(before.trim(), "32");
    fs::write(PARAMETER, "0").unwrap();
    let all = made_anew(&files[0], "with another bound");
    fs::write(PARAMETER, "33").unwrap();
    let none = made_anew(&files[1], "with another bound");
    fs::write(PARAMETER, before).unwrap();
    assert_eq!((all, none), ((1, 0, 7), (0, 0, 0)));
}

type Change = fn(&DaxFile);
type Forgery = fn(&mut Vec<u64>);

/// Ways to change where the blocks of 64 pages are, or which there are.
fn changes() -> Vec<(&'static str, Change)> {
    fn range(file: &DaxFile, flags: FallocateFlags) {
        fallocate(file.file(), flags, 16 * BYTES, 16 * BYTES).unwrap();
    }
    fn cut(file: &DaxFile) {
        file.file().set_len(16 * BYTES).unwrap();
        file.file().set_len(64 * BYTES).unwrap();
    }
    vec![
        ("truncated", |file| file.file().set_len(63 * BYTES).unwrap()),
        ("truncated within a page", |file| file.file().set_len(64 * BYTES - 1).unwrap()),
        ("truncated, and as long again", cut),
        ("truncated, and written again behind a hole", |file| {
            cut(file);
            file.stamp(40, 40);
        }),
        ("punched", |file| range(file, PUNCH)),
        ("punched, one page of a run", |file| {
            fallocate(file.file(), PUNCH, 20 * BYTES, BYTES).unwrap();
        }),
        ("zeroed", |file| range(file, FallocateFlags::ZERO_RANGE)),
        ("collapsed", |file| range(file, COLLAPSE)),
        ("inserted into", |file| range(file, FallocateFlags::INSERT_RANGE)),
        ("collapsed, and as long again", |file| {
            range(file, COLLAPSE);
            (48..64).for_each(|page| file.stamp(page, page));
        }),
        ("appended to", |file| file.stamp(64, 64)),
    ]
}

#[test]
fn a_stale_table_is_refused() {
    let Some(_clean) = Clean::turn() else { return };
    for (what, change) in changes() {
        for restarts in [false, true] {
            let mut file = in_pieces("stale", 64);
            let pages = store(&file).pages;
            assert!(pages > 48, "{pages}");
            assert_eq!(made_anew(&file, what), (1, 0, pages), "before it was {what}");
            change(&file);
            // Another file may have the blocks after the next commit.
            file.file().sync_all().unwrap();
            let taker = DaxFile::stamped("taker", 64, 9_000);
            if restarts {
                drop((file, taker));
                restart();
                file = DaxFile::kept("stale");
            } else {
                drop(taker);
            }
            let taker = DaxFile::stamped("taker", 64, 9_000);
            assert_eq!(made_anew(&file, what), (0, 1, 0), "{what}, restarts: {restarts}");
            (0..64).for_each(|page| taker.assert_stamped(page, 9_000 + page));
            // What is stored then is right.
            let pages = store(&file).pages;
            assert_eq!(made_anew(&file, what), (1, 0, pages), "{what}, stored again");
            remove(file);
        }
    }
}

/// Two files exchange their blocks. Without a restart: ext4 may not read such a file again.
#[test]
fn a_table_of_what_became_the_boot_loader_is_refused() {
    const SWAP_BOOT: u32 = 0x6611;
    let Some(_clean) = Clean::turn() else { return };
    let file = DaxFile::stamped("boot", 64, 7);
    store(&file);
    let exchange = || {
        file.file().sync_all().unwrap();
        sys::ioctl(file.file().as_fd(), SWAP_BOOT, 0).unwrap();
    };
    exchange();
    file.file().set_len(64 * BYTES).unwrap();
    assert_eq!(made_anew(&file, "exchanged"), (0, 1, 0));
    exchange();
    assert_eq!(made_anew(&file, "exchanged back, with another generation"), (0, 1, 0));
}

/// A place in a stored table, in words: the header, and the first two runs.
const VERSION: usize = 1;
const INODE: usize = 2;
const GENERATION: usize = 3;
const LENGTH: usize = 4;
const UUID: usize = 5;
const FIRST: usize = 8;
const SECOND: usize = 10;

/// Forgeries, each with a checksum that is right.
fn forgeries() -> Vec<(&'static str, Forgery)> {
    const HIGH: u64 = 1 << 32;
    vec![
        ("another magic", |words| words[0] ^= 1),
        ("version 0", |words| words[VERSION] -= 1),
        ("version 2", |words| words[VERSION] += 1),
        ("a run too much", |words| words[VERSION] += HIGH),
        ("a run too few", |words| words[VERSION] -= HIGH),
        ("another inode", |words| words[INODE] += 1),
        ("another generation", |words| words[GENERATION] ^= 1),
        ("a reserved field", |words| words[GENERATION] ^= HIGH),
        ("shorter", |words| words[LENGTH] -= 1),
        ("longer", |words| words[LENGTH] += 1),
        ("another file system", |words| words[UUID] ^= 1),
        ("another file system's end", |words| words[UUID + 1] ^= HIGH),
        ("the next block", |words| words[FIRST] += 1),
        ("the block before", |words| words[SECOND] -= 1),
        ("block 0", |words| words[FIRST] = 0),
        ("no block at all", |words| words[FIRST] = u64::MAX),
        ("a block beyond all", |words| words[FIRST] = 1 << 52),
        ("a block beyond the device", |words| words[FIRST] |= 1 << 40),
        ("blocks exchanged", |words| words.swap(FIRST, SECOND)),
        ("runs exchanged", |words| {
            words.swap(FIRST, SECOND);
            words.swap(FIRST + 1, SECOND + 1);
        }),
        ("a run twice", |words| {
            words.extend_from_within(SECOND..SECOND + 2);
            words[VERSION] += HIGH;
        }),
        ("a run of nothing", |words| words[FIRST + 1] &= HIGH - 1),
        ("a run over the next one", |words| words[FIRST + 1] += HIGH),
        ("a run beyond the end", |words| *words.last_mut().unwrap() += HIGH),
        ("a run of everything", |words| *words.last_mut().unwrap() |= u64::MAX << 32),
        ("a page off", |words| words[SECOND + 1] += 1),
    ]
}

#[test]
fn a_forged_table_is_refused() {
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("forged", 64);
    let pages = store(&file).pages;
    let whole = fs::read(path_of(&file)).unwrap();
    let accepted = |what: &str| match made_anew(&file, what) {
        (0, 1, 0) => None,
        other => Some(format!("{what}: {other:?}")),
    };
    let mut all: Vec<String> = forgeries()
        .into_iter()
        .filter_map(|(what, change)| {
            fs::write(path_of(&file), &whole).unwrap();
            forge(&file, change);
            accepted(what)
        })
        .collect();
    let mut longer = whole.clone();
    longer.extend([0; 16]);
    let some: [&[u8]; 6] =
        [&[], &whole[..8], &whole[..64], &whole[..whole.len() - 1], &longer, &[0xff; 4096]];
    all.extend(some.into_iter().enumerate().filter_map(|(number, bytes)| {
        fs::write(path_of(&file), bytes).unwrap();
        accepted(&format!("file {number}"))
    }));
    assert!(all.is_empty(), "accepted: {all:#?}");
    fs::write(path_of(&file), whole).unwrap();
    assert_eq!(made_anew(&file, "as it was"), (1, 0, pages));
    remove(file);
}

#[test]
fn no_bit_may_be_wrong() {
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("bits", 16);
    store(&file);
    let whole = fs::read(path_of(&file)).unwrap();
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(path_of(&file), &bytes).unwrap();
        forget_kept();
        let before = counts();
        let stored = file.table().stat().stored;
        assert_eq!((counts(), stored), ((before.0, before.1 + 1), 0), "bit {bit}");
    }
    remove(file);
}

/// Takes all space but that of so many pages, so that files get the blocks that others lose.
fn fill(room: u64) -> DaxFile {
    let filler = DaxFile::new("filler");
    let (mut end, mut step) = (0, 1 << 18);
    while step > 0 {
        let more = fallocate(filler.file(), FallocateFlags::empty(), end, step * BYTES);
        match more {
            Ok(()) => end += step * BYTES,
            Err(errno) => {
                assert_eq!(errno, Errno::NOSPC);
                step /= 2;
            }
        }
    }
    filler.file().set_len(end - room * BYTES).unwrap();
    rustix::fs::sync();
    filler
}

/// Pages of another file, in the place that this file had. Both ends of the run are still there.
#[test]
fn a_run_with_another_file_s_block_is_refused() {
    let Some(_clean) = Clean::turn() else { return };
    let path = |name: &str| Path::new(persistent::FOLDER).join(name);
    fs::create_dir_all(folder()).unwrap();
    fs::set_permissions(folder(), Permissions::from_mode(0o700)).unwrap();
    // While there is much room, all pages are in a few runs.
    let file = DaxFile::stamped("holed", 64, 7);
    let stored = store(&file);
    let _filler = fill(100);
    assert!(stored.runs < 4 && stored.pages == 64, "{stored:?}");
    assert_eq!(made_anew(&file, "whole"), (1, 0, 64));
    let whole = fs::read(path_of(&file)).unwrap();
    for page in [9, 31, 32, 60] {
        fallocate(file.file(), PUNCH, page * BYTES, BYTES).unwrap();
    }
    file.file().sync_all().unwrap();
    // Takes all that is left.
    let taker = File::create(path("taker")).unwrap();
    let bytes = access::stamped(9_000);
    let taken = (0..).take_while(|at| taker.write_all_at(&bytes, at * BYTES).is_ok()).count();
    assert!(taken >= 4, "{taken}");
    fs::write(path_of(&file), whole).unwrap();
    assert_eq!(made_anew(&file, "with holes"), (0, 1, 0));
    let table = file.table();
    let mapping = table.mapped(64);
    for page in [9, 31, 32, 60] {
        assert_eq!(access::load(mapping.page(page)), Ok(0), "page {page}");
    }
    fs::remove_file(path("taker")).unwrap();
}

#[test]
fn what_is_not_root_s_is_refused() {
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("owned", 64);
    let pages = store(&file).pages;
    let (table, folder) = (path_of(&file), folder());
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    for (path, usual) in [(&table, 0o600), (&folder, 0o700)] {
        for (what, change) in [
            ("another user's", &(|| chown(path, Some(1_000), None).unwrap()) as &dyn Fn()),
            ("the group may write", &|| mode(path, 0o620)),
            ("others may write", &|| mode(path, 0o602)),
        ] {
            change();
            assert_eq!(made_anew(&file, what), (0, 1, 0), "{}: {what}", path.display());
            chown(path, Some(0), None).unwrap();
            mode(path, usual);
            assert_eq!(made_anew(&file, what), (1, 0, pages), "{}: {what}", path.display());
        }
        // Others may read it. What it says is no secret of those who may read the file.
        mode(path, 0o755);
        assert_eq!(made_anew(&file, "others may read"), (1, 0, pages));
        mode(path, usual);
        let moved = path.with_extension("moved");
        fs::rename(path, &moved).unwrap();
        symlink(&moved, path).unwrap();
        assert_eq!(made_anew(&file, "a link"), (0, 1, 0), "{}", path.display());
        fs::remove_file(path).unwrap();
        fs::write(path, "").unwrap();
        assert_eq!(made_anew(&file, "an empty file"), (0, 1, 0), "{}", path.display());
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
        let refused = u64::from(path == &table);
        assert_eq!(made_anew(&file, "an empty folder"), (0, refused, 0), "{}", path.display());
        fs::remove_dir(path).unwrap();
        assert_eq!(made_anew(&file, "nothing"), (0, 0, 0), "{}", path.display());
        fs::rename(&moved, path).unwrap();
    }
    assert_eq!(made_anew(&file, "as it was"), (1, 0, pages));
    remove(file);
}

/// The file system uses numbers of inodes again.
#[test]
fn a_removed_file_leaves_nothing_to_the_next() {
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("removed", 64);
    store(&file);
    let (inode, table) = (file.file().metadata().unwrap().ino(), path_of(&file));
    remove(file);
    rustix::fs::sync();
    let files: Vec<_> = (0..64).map(|at| DaxFile::new(&format!("next-{at}"))).collect();
    let next = files.iter().find(|file| file.file().metadata().unwrap().ino() == inode);
    let next = next.expect("a file with the same number");
    (0..64).for_each(|page| next.stamp(page, 500 + page));
    assert!(table.exists());
    assert_eq!(made_anew(next, "another file"), (0, 1, 0));
    let pages = store(next).pages;
    assert_eq!(made_anew(next, "its own"), (1, 0, pages));
    assert_eq!(fs::read_dir(folder()).unwrap().count(), 1);
}

#[test]
fn a_full_disk_keeps_what_was_stored() {
    let Some(_clean) = Clean::turn() else { return };
    let (one, other) = (in_pieces("full-one", 64), in_pieces("full-other", 64));
    let pages = store(&one).pages;
    let before = fs::read(path_of(&one)).unwrap();
    let filler = fill(0);
    for file in [&one, &other] {
        let error = store_table(file.file()).unwrap_err();
        assert!(matches!(error, vellum_dax::Error::NoSpace { .. }), "{error}");
    }
    let names: Vec<_> =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(names, [path_of(&one)]);
    assert_eq!(fs::read(path_of(&one)).unwrap(), before);
    assert_eq!(made_anew(&one, "on a full disk"), (1, 0, pages));
    assert_eq!(made_anew(&other, "on a full disk"), (0, 0, 0));
    drop(filler);
    // The blocks of a file that was removed are free after the next commit.
    rustix::fs::sync();
    let pages = store(&other).pages;
    assert_eq!(made_anew(&other, "with space"), (1, 0, pages));
    remove(one);
    remove(other);
}

#[test]
fn it_takes_little_space() {
    let Some(_clean) = Clean::turn() else { return };
    let large = DaxFile::new("large");
    (0..64).for_each(|at| large.file().write_all_at(&[7; 1 << 20], at << 20).unwrap());
    let stored = store(&large);
    println!("64 MiB: {stored:?}");
    assert!(stored.bytes * 500 <= 64 << 20, "{stored:?}");
    forget_kept();
    assert_eq!(large.table().stat().stored, stored.pages);
    // Every fifth page is missing, and then all but three of five, which are not worth it.
    let holed = DaxFile::stamped("holed", 2_500, 7);
    for (hole, most) in [(4, 500), (0, 0)] {
        let holes = (0..500).map(|at| (5 * at + hole) * BYTES);
        holes.for_each(|at| fallocate(holed.file(), PUNCH, at, BYTES).unwrap());
        let stored = store(&holed);
        println!("{most} pieces: {stored:?}");
        // Some may be in two places themselves.
        assert!((most - most / 20..=most).contains(&stored.runs), "{stored:?}");
        assert_eq!(stored.pages, 4 * stored.runs);
        assert_eq!(stored.bytes, (64 + 16 * stored.runs).next_multiple_of(BYTES));
        assert_eq!(made_anew(&holed, "holed"), (1, 0, stored.pages));
    }
}

/// Random changes of a file while its table is in use, and stored at random moments.
#[test]
fn whatever_was_stored_the_file_is_shown() {
    const MOST: u64 = 600;
    let Some(_clean) = Clean::turn() else { return };
    let mut random = Random::of_this_run();
    let (file, other) = (DaxFile::new("random"), DaxFile::new("random-other"));
    let (mut used, mut refused) = (0, 0);
    for step in 0..400 {
        let pages = file.file().metadata().unwrap().len() / BYTES;
        let first = random.below(MOST - 1);
        let count = 1 + random.below((MOST - first).min(64));
        match random.below(8) {
            0 => file.file().set_len(first * BYTES).unwrap(),
            1 => fallocate(file.file(), PUNCH, first * BYTES, count * BYTES).unwrap(),
            2 if first + count < pages => {
                fallocate(file.file(), COLLAPSE, first * BYTES, count * BYTES).unwrap();
            }
            3 => drop(store(&file)),
            4 => (0..count).for_each(|page| other.stamp((first + page) % MOST, 1 << 40)),
            5 => other.file().set_len(random.below(MOST) * BYTES).unwrap(),
            _ => (first..first + count).for_each(|page| file.stamp(page, step << 16 | page)),
        }
        if random.one_in(3) {
            file.file().sync_all().unwrap();
        }
        let (more, less, _) = made_anew(&file, &format!("step {step}"));
        (used, refused) = (used + more, refused + less);
    }
    println!("{used} used, {refused} refused");
    assert!(used > 0 && refused > 0);
}

/// Makes the module look at the file's last page, a hole, again.
fn punch_last(file: &DaxFile, pages: u64) {
    fallocate(file.file(), PUNCH, (pages - 1) * BYTES, BYTES).unwrap();
}

/// Another program has a lease of the stored table when it is looked for. The next refresh has it.
#[test]
fn what_cannot_be_opened_now_is_looked_for_again() {
    const F_SETSIG: i32 = 10;
    let Some(_clean) = Clean::turn() else { return };
    let file = in_pieces("leased", 64);
    file.file().set_len(80 * BYTES).unwrap();
    let pages = store(&file).pages;
    assert_eq!(made_anew(&file, "without a lease"), (1, 0, pages));
    let leased = File::options().read(true).write(true).open(path_of(&file)).unwrap();
    // The signal that asks for the lease is ignored.
    sys::fcntl(&leased, F_SETSIG, libc::SIGURG);
    sys::fcntl(&leased, libc::F_SETLEASE, libc::F_WRLCK);
    forget_kept();
    let before = counts();
    let table = file.table();
    assert_eq!((counts(), table.stat().stored), (before, 0), "leased");
    sys::fcntl(&leased, libc::F_SETLEASE, libc::F_UNLCK);
    drop(leased);
    for (used, what) in [(1, "the first time"), (1, "once is enough")] {
        punch_last(&file, 80);
        assert_eq!(table.stat().stale, 1);
        table.refresh().unwrap();
        assert_eq!(counts(), (before.0 + used, before.1), "{what}");
    }
    let mapping = table.mapped(80);
    for page in 0..80 {
        let mut bytes = vec![0; PAGE];
        file.file().read_exact_at(&mut bytes, page * BYTES).unwrap();
        assert!(access::kernel_load(mapping.page(page), PAGE).unwrap() == bytes, "page {page}");
    }
    drop((mapping, table));
    remove(file);
}

/// The module, where the lab puts it in a guest.
const MODULE: &str = "/modules/vellum.ko";

#[test]
fn the_module_finds_them_when_it_is_loaded_again() {
    const MORSELS: &str = vellum_kernel_tests::morsel::FOLDER;
    let Some(_clean) = Clean::turn() else { return };
    let parameters = fs::read_to_string("/modules/parameters").unwrap_or_default();
    if !fs::exists(MODULE).unwrap() || !parameters.trim().is_empty() {
        eprintln!("skipped: no {MODULE}, or it has parameters");
        return;
    }
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).status().expect(program);
        assert!(status.success(), "{program} {arguments:?}: {status}");
    };
    let file = in_pieces("loaded", 64);
    let pages = store(&file).pages;
    assert_eq!(made_anew(&file, "before"), (1, 0, pages));
    run("umount", &[MORSELS]);
    run("rmmod", &["vellum"]);
    run("insmod", &[MODULE]);
    run("mount", &["-t", "morselfs", "-o", "mode=1777", "none", MORSELS]);
    assert_eq!(counts(), (0, 0));
    assert_eq!(made_anew(&file, "after"), (1, 0, pages));
    remove(file);
}
