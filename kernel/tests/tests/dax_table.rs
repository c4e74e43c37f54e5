//! File tables: a mapping shows the file as it is, whatever happens to the file meanwhile.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, StatxAttributes, StatxFlags, fallocate, statx};
use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::counters::{Extents, Memory, PATIENCE, assert_file_tables_are_sound};
use vellum_kernel_tests::dax::{self, DaxFile, Heap, KeptBound};
use vellum_kernel_tests::sys::{READ_WRITE, Request};
use vellum_kernel_tests::{Errno, Mapping, PAGE, TABLE_PAGES, Table, dax_turn, persistent, sys};
use vellum_uapi::dax::{MAX_EXTENT, READ_UNIT};

/// Loads a byte of each page, and returns the faults that it took.
fn touch(mapping: &Mapping, pages: u64) -> i64 {
    // The program's own code and stack have faults, too, the first time.
    let own = Mapping::anonymous(None, PAGE).unwrap();
    access::store(own.start(), 1).unwrap();
    sys::faults();
    load_each(&own, 1);
    let before = sys::faults();
    load_each(mapping, pages);
    sys::faults() - before
}

fn load_each(mapping: &Mapping, pages: u64) {
    (0..pages).for_each(|page| assert!(access::load(mapping.page(page)).is_ok(), "page {page}"));
}

/// The lengths around which tables come and go, in pages.
const LENGTHS: [u64; 5] = [1, TABLE_PAGES - 1, TABLE_PAGES, TABLE_PAGES + 1, 3 * TABLE_PAGES + 7];

#[test]
fn a_mapping_shows_the_file_after_one_fault() {
    let Some(_turn) = dax_turn() else { return };
    for pages in LENGTHS {
        let file = DaxFile::stamped("whole", pages, 7);
        let table = file.table();
        let stat = table.stat();
        assert_eq!((stat.pages, stat.leaves, stat.stale), (pages, pages, 0));
        for mapping in [table.mapped(pages), table.mapped_for_reading(pages)] {
            assert_eq!(touch(&mapping, pages), 1);
            (0..pages).for_each(|page| mapping.assert_stamped(page, page + 7));
            let end = mapping.page(pages);
            if end < mapping.end() {
                assert_eq!(access::load(end), Err(Fault { signal: libc::SIGBUS, address: end }));
                table.refresh().unwrap();
                assert_eq!(touch(&mapping, pages), 1);
            }
        }
        assert_eq!(table.stat().barred, 0);
        assert_file_tables_are_sound();
    }
}

/// How often ext4 looks a block of the file up meanwhile: its tracepoint tells. The kernel writes
/// other files back at any time, and looks their blocks up.
fn lookups(file: &DaxFile, work: impl FnOnce()) -> usize {
    let folder = Path::new("/sys/kernel/tracing");
    let event = folder.join("events/ext4/ext4_es_lookup_extent_enter/enable");
    if !event.exists() {
        let mut mount = Command::new("mount");
        let status = mount.args(["-t", "tracefs", "none"]).arg(folder).status().unwrap();
        assert!(status.success(), "{status}");
    }
    fs::write(folder.join("trace"), "").unwrap();
    fs::write(&event, "1").unwrap();
    work();
    fs::write(&event, "0").unwrap();
    let trace = fs::read_to_string(folder.join("trace")).unwrap();
    let meta = file.file().metadata().unwrap();
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let event =
        format!("ext4_es_lookup_extent_enter: dev {major},{minor} ino {} lblk ", meta.ino());
    trace.lines().filter(|line| line.contains(&event)).count()
}

#[test]
fn a_file_in_few_pieces_is_asked_for_few_times() {
    let Some(_turn) = dax_turn() else { return };
    dax::begin_anew();
    let pages = 4 * TABLE_PAGES;
    let file = DaxFile::stamped("pieces", pages, 7);
    let made = |leaves| {
        drop(KeptBound::none());
        lookups(&file, || assert_eq!(file.table().stat().leaves, leaves))
    };
    let whole = made(pages);
    // Five for each of the tables, and what the file system does of its own accord.
    assert!((4..50).contains(&whole), "{whole} for a whole file");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for page in [300, TABLE_PAGES, 3 * TABLE_PAGES + 9] {
        fallocate(file.file(), punch, page * PAGE as u64, PAGE as u64).unwrap();
    }
    let holed = made(pages - 3);
    assert!((whole..300).contains(&holed), "{holed} for one with holes");
    assert_file_tables_are_sound();
}

#[test]
fn what_is_stored_is_the_file_s() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("stored", 600, 7);
    let table = file.table();
    let mapping = table.mapped(600);
    let reader = table.mapped_for_reading(600);
    for page in [0, 1, 511, 512, 599] {
        mapping.stamp(page, 1_000 + page);
        file.assert_stamped(page, 1_000 + page);
        reader.assert_stamped(page, 1_000 + page);
        file.stamp(page, 2_000 + page);
        mapping.assert_stamped(page, 2_000 + page);
    }
    assert_eq!(table.stat().barred, 0);
}

#[test]
fn the_file_system_serves_holes_and_reserved_blocks() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("holes");
    file.file().set_len(1_000 * PAGE as u64).unwrap();
    fallocate(file.file(), FallocateFlags::empty(), 600 * PAGE as u64, 100 * PAGE as u64).unwrap();
    file.stamp(3, 3);
    file.stamp(900, 900);
    let table = file.table();
    assert_eq!((table.stat().pages, table.stat().leaves), (1_000, 2));
    let mapping = table.mapped(1_000);
    mapping.assert_stamped(3, 3);
    assert_eq!(table.stat().barred, 0);
    // One hole is read, another and a reserved block are written.
    assert_eq!(access::load(mapping.page(10)), Ok(0));
    for page in [20, 620, 999] {
        assert_eq!(access::load(mapping.page(page)), Ok(0));
        mapping.stamp(page, page);
        file.assert_stamped(page, page);
    }
    mapping.assert_stamped(900, 900);
    table.refresh().unwrap();
    assert_eq!((table.stat().leaves, table.stat().barred), (5, 0));
    for page in [3, 20, 620, 900, 999] {
        mapping.assert_stamped(page, page);
    }
    assert_eq!(table.stat().barred, 0);
    assert_file_tables_are_sound();
}

#[test]
fn a_mapping_gets_its_entries_back_by_itself() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("back", 10, 7);
    let table = file.table();
    let mapping = table.mapped(20);
    mapping.assert_stamped(9, 16);
    file.stamp(10, 17);
    // The table does not know the new page yet.
    mapping.assert_stamped(10, 17);
    let start = Instant::now();
    while table.stat().barred != 0 || table.stat().pages != 11 {
        assert!(start.elapsed() < PATIENCE, "{:?}", table.stat());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(touch(&mapping, 11), 1);
    (0..11).for_each(|page| mapping.assert_stamped(page, page + 7));
}

#[test]
fn appended_pages_need_no_fault_after_a_refresh() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("append", 500, 7);
    let table = file.table();
    let mapping = table.mapped(3 * TABLE_PAGES);
    assert_eq!(touch(&mapping, 500), 1);
    for end in [501, 512, 513, 1_300] {
        (table.stat().pages..end).for_each(|page| file.stamp(page, page + 7));
        table.refresh().unwrap();
        assert_eq!((table.stat().pages, touch(&mapping, end)), (end, 0));
        mapping.assert_stamped(end - 1, end + 6);
    }
    assert_file_tables_are_sound();
}

#[test]
fn a_file_that_outgrows_its_tables_keeps_its_mappings() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("grows", 5, 7);
    let table = file.table();
    assert_eq!(table.stat().order, 1);
    let small = table.mapped(5);
    assert_eq!((touch(&small, 5), table.stat().order), (1, 1));
    // The mapping needs two tables, and then a file beyond 1 GiB a third level.
    let large = table.mapped(TABLE_PAGES + 1);
    assert_eq!((touch(&large, 5), table.stat().order), (1, 2));
    let far = (1_u64 << 30) / PAGE as u64 + 3;
    file.stamp(far, far);
    table.refresh().unwrap();
    assert_eq!((table.stat().order, touch(&small, 5), touch(&large, 5)), (3, 0, 0));
    let huge = table.mapped(far + 1);
    huge.assert_stamped(far, far);
    huge.assert_stamped(4, 11);
    let reader = table.mapped_for_reading(far + 1);
    reader.assert_stamped(far, far);
    assert_file_tables_are_sound();
}

/// The longest mapping is one entry, with guards in the place of tables that are missing. Those
/// come later.
#[test]
fn the_longest_mapping_shows_what_is_appended() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("longest", 3, 7);
    let table = file.table();
    let mapping = Mapping::new(table.request(MAX_EXTENT, libc::PROT_READ)).unwrap();
    assert_eq!((touch(&mapping, 3), table.stat().order), (1, 3));
    for gib in [5, 100, 511] {
        let page = (gib << 30) / PAGE as u64;
        // The guard is cached by the time that the table comes.
        let address = mapping.page(page);
        assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
        file.stamp(page, gib);
        table.refresh().unwrap();
        mapping.assert_stamped(page, gib);
        assert_eq!(table.stat().barred, 0);
    }
    assert_file_tables_are_sound();
}

#[test]
fn lost_blocks_are_lost_to_every_mapping() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("lost", 1_500, 7);
    let table = file.table();
    let mappings = [table.mapped(1_500), table.mapped_for_reading(1_500)];
    mappings.iter().for_each(|mapping| assert_eq!(touch(mapping, 1_500), 1));
    file.file().set_len(700 * PAGE as u64).unwrap();
    // Another file takes the blocks.
    let other = DaxFile::stamped("taker", 800, 9_000);
    for mapping in &mappings {
        (0..700).for_each(|page| mapping.assert_stamped(page, page + 7));
        let address = mapping.page(700);
        assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file.file(), punch, 100 * PAGE as u64, 200 * PAGE as u64).unwrap();
    table.refresh().unwrap();
    assert_eq!((table.stat().pages, table.stat().leaves), (700, 500));
    for mapping in &mappings {
        mapping.assert_stamped(99, 106);
        assert_eq!(access::load(mapping.page(100)), Ok(0));
        mapping.assert_stamped(300, 307);
    }
    assert_file_tables_are_sound();
    drop(other);
}

/// Nothing maps the file while it loses its blocks.
#[test]
fn a_table_without_a_mapping_hears_of_lost_blocks() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("alone", 800, 7);
    let table = file.table();
    drop(table.mapped(800));
    for keep in [300, 0] {
        file.file().set_len(keep * PAGE as u64).unwrap();
        let other = DaxFile::stamped("taker", 500, 9_000);
        // The second time a refresh that an access has caused may be under way.
        assert!(keep == 0 || table.stat().stale == 1);
        file.file().set_len(800 * PAGE as u64).unwrap();
        let mapping = table.mapped(800);
        (0..keep).for_each(|page| mapping.assert_stamped(page, page + 7));
        (keep..800).step_by(50).for_each(|page| {
            assert_eq!(access::load(mapping.page(page)), Ok(0), "page {page}");
        });
        table.refresh().unwrap();
        assert_eq!((table.stat().stale, table.stat().leaves), (0, keep));
        drop(other);
    }
    assert_file_tables_are_sound();
}

#[test]
fn every_way_to_lose_blocks_is_noticed() {
    let Some(_turn) = dax_turn() else { return };
    let ways = [
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        FallocateFlags::ZERO_RANGE,
        FallocateFlags::COLLAPSE_RANGE,
        FallocateFlags::INSERT_RANGE,
    ];
    for way in ways {
        let file = DaxFile::stamped("ways", 64, 7);
        let table = file.table();
        let mapping = table.mapped(128);
        assert_eq!(touch(&mapping, 64), 1);
        fallocate(file.file(), way, 16 * PAGE as u64, 16 * PAGE as u64).unwrap();
        let other = DaxFile::stamped("taker", 64, 9_000);
        let pages = file.file().metadata().unwrap().len() / PAGE as u64;
        for again in [false, true] {
            for page in 0..pages {
                let mut bytes = vec![0; PAGE];
                file.file().read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
                let seen = access::kernel_load(mapping.page(page), PAGE).unwrap();
                assert!(seen == bytes, "{way:?}: page {page}, refreshed: {again}");
            }
            table.refresh().unwrap();
        }
        assert_file_tables_are_sound();
        drop(other);
    }
}

#[test]
fn a_file_without_a_name_lives_as_long_as_its_mapping() {
    let Some(_turn) = dax_turn() else { return };
    let free = || rustix::fs::statfs("/pmem").unwrap().f_bfree;
    drop(DaxFile::stamped("warm", 600, 7));
    let before = free();
    let file = DaxFile::stamped("nameless", 600, 7);
    let mapping = file.table().mapped(600);
    fs::remove_file(file.path()).unwrap();
    drop(file);
    let other = DaxFile::stamped("taker", 600, 9_000);
    (0..600).for_each(|page| mapping.assert_stamped(page, page + 7));
    drop(other);
    drop(mapping);
    let start = Instant::now();
    while free() < before {
        assert!(start.elapsed() < PATIENCE, "{} of {before} are free", free());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Nothing tells the module when a hole is filled, or a reserved block is written.
#[test]
fn blocks_come_after_the_table_was_made() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("filled");
    fallocate(file.file(), FallocateFlags::empty(), 0, 64 * PAGE as u64).unwrap();
    let table = file.table();
    (0..10).for_each(|page| file.stamp(page, page));
    let mapping = table.mapped(64);
    (10..20).for_each(|page| mapping.stamp(page, page));
    table.refresh().unwrap();
    assert_eq!(table.stat().leaves, 20);
    assert!(touch(&mapping, 20) <= 1);
    assert_eq!(table.stat().barred, 0);
    assert_file_tables_are_sound();
}

#[test]
fn a_file_that_was_too_long_for_a_while_keeps_its_table() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("long", 256, 7);
    let table = file.table();
    let mapping = table.mapped(512);
    mapping.stamp(3, 10);
    file.file().set_len(600 << 30).unwrap();
    assert_eq!(table.refresh(), Err(Errno::FBIG));
    file.file().set_len(256 * PAGE as u64).unwrap();
    table.refresh().unwrap();
    assert_eq!((table.stat().pages, table.stat().leaves), (256, 256));
    mapping.assert_stamped(3, 10);
    assert_file_tables_are_sound();
}

/// There it has an entry for each GiB.
#[test]
fn the_longest_mapping_may_begin_at_any_gib() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("anywhere", 3, 7);
    let table = file.table();
    let address = (3 << 44) + READ_UNIT as usize;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
    let request = table.request(MAX_EXTENT, READ_WRITE);
    let mapping = Mapping::new(Request { address, flags, ..request }).unwrap();
    mapping.assert_stamped(0, 7);
    let far = (9 << 30) / PAGE as u64;
    file.stamp(far, 9);
    table.refresh().unwrap();
    mapping.assert_stamped(far, 9);
    assert_eq!(table.stat().barred, 0);
    assert_file_tables_are_sound();
}

#[test]
fn processes_share_the_tables() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("shared", 2_000, 7);
    let tables = [file.table(), Table::open(&file.for_reading(), 0).unwrap()];
    let alone = tables[0].stat().tables;
    let mapping = tables[0].mapped_for_reading(2_000);
    vellum_kernel_tests::child::in_child(|| {
        let own = tables[1].mapped_for_reading(2_000);
        // The child's own memory has faults, too.
        touch(&own, 1);
        assert_eq!(touch(&own, 2_000), 0);
        let stat = tables[1].stat();
        assert_eq!((stat.mounts, stat.tables), (2, alone));
        file.stamp(5, 5_000);
        own.assert_stamped(5, 5_000);
    });
    mapping.assert_stamped(5, 5_000);
    assert_eq!(tables[0].stat().mounts, 1);
}

#[test]
fn tables_and_their_memory_are_given_back() {
    let Some(_turn) = dax_turn() else { return };
    let _bound = KeptBound::none();
    let file = DaxFile::stamped("memory", 4_000, 7);
    drop(file.table().mapped(4_000));
    let before = Memory::now();
    for _ in 0..200 {
        let table = file.table();
        let mapping = table.mapped(4_000);
        assert_eq!(touch(&mapping, 1), 1);
    }
    before.assert_back();
}

/// Gives a file the flag that asks for DAX where each file decides, or takes it away.
fn set_dax_flag(file: &File, is_set: bool) {
    const SET_ATTRIBUTES: u32 = 0x401c_5820;
    const DAX: u32 = 0x8000;
    let attributes = [if is_set { DAX } else { 0 }, 0, 0, 0, 0, 0, 0];
    let argument = (&raw const attributes).expose_provenance() as u64;
    sys::ioctl(file.as_fd(), SET_ATTRIBUTES, argument).unwrap();
}

fn has_dax(file: &File) -> bool {
    let found = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).unwrap();
    found.stx_attributes.contains(StatxAttributes::DAX)
}

/// Where each file decides whether it has DAX, a file without DAX can take the blocks of one that
/// has it (EXT4_IOC_MOVE_EXT), and nothing is unmapped.
#[test]
fn a_file_that_has_dax_by_its_flag_is_refused() {
    let Some(_turn) = dax_turn() else { return };
    persistent::unmount_all();
    dax::mount_with("dax=inode");
    let heap = Heap::for_reading(0);
    let file = DaxFile::kept("flagged");
    set_dax_flag(file.file(), true);
    (0..8).for_each(|page| file.stamp(page, page));
    let assert_refused = |file: &DaxFile| {
        assert_eq!(Table::open(file.file(), 0).err(), Some(Errno::OPNOTSUPP));
        assert_eq!(heap.attach(file.file(), 0, 8), Err(Errno::OPNOTSUPP));
    };
    assert!(!has_dax(file.file()));
    assert_refused(&file);
    drop(file);
    let file = DaxFile::kept("flagged");
    assert!(has_dax(file.file()));
    assert_refused(&file);
    // It has DAX for as long as it is open.
    set_dax_flag(file.file(), false);
    assert!(has_dax(file.file()));
    assert_refused(&file);
    fs::remove_file(file.path()).unwrap();
    drop(file);
    persistent::unmount_when_unused();
    dax::mount();
}

/// ext4 counts extents without the inode's lock, in the kernels that the lab has, so the module
/// takes it. A kernel where this fails has the fix (docs/dax.md), and the module must not take it.
#[test]
fn extents_are_counted_under_the_lock_of_the_inode() {
    let Some(_turn) = dax_turn() else { return };
    if Extents::now().is_none() {
        eprintln!("skipped: no debugfs");
        return;
    }
    drop(KeptBound::none());
    let file = DaxFile::stamped("counted", 1_100, 7);
    let opened = || {
        drop(KeptBound::none());
        let before = Extents::now().unwrap();
        let table = file.table();
        assert_eq!(table.stat().leaves, 1_100);
        (before, Extents::now().unwrap())
    };
    // A worker that had no processor for a second has found out nothing.
    let probed = (0..10).map(|_| opened().1).find(|extents| extents.is_probed);
    assert!(probed.is_some_and(|extents| extents.lacks_lock), "{probed:?}");
    let (before, after) = opened();
    assert!(after.lacks_lock && after.counted > before.counted, "{before:?} {after:?}");
    let table = file.table();
    let mapping = table.mapped(1_100);
    for page in 0..1_100 {
        let seen = access::kernel_load(mapping.page(page), PAGE).unwrap();
        assert!(seen == access::stamped(7 + page), "page {page}");
    }
    assert_file_tables_are_sound();
}
