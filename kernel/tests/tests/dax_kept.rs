//! File tables that outlive their last user: found again by the next one, right whatever has
//! happened to the file meanwhile, and gone with the inode, or when memory is wanted back.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File, OpenOptions};
use std::io::{Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{OnceLock, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, inotify};
use vellum_dax::store_table;
use vellum_kernel_tests::child::End;
use vellum_kernel_tests::counters::{self, assert_file_tables_are_sound};
use vellum_kernel_tests::dax::{self, DaxFile, Heap, KeptBound, forget_kept, tables};
use vellum_kernel_tests::group::Group;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop, wait_until};
use vellum_kernel_tests::{Errno, PAGE, Table, access, dax_turn, persistent, sys};
use vellum_uapi::dax::{DURABLE, STORED_FOLDER, Tables, UNIT};

const SLOT: u64 = UNIT / PAGE as u64;

/// Fails unless the file's pages are at these addresses.
#[track_caller]
fn assert_shows(file: &DaxFile, what: &str, at: impl Fn(u64) -> usize) {
    let pages = file.file().metadata().unwrap().len() / PAGE as u64;
    for page in 0..pages {
        let mut bytes = vec![0; PAGE];
        file.file().read_exact_at(&mut bytes, page * PAGE as u64).unwrap();
        let seen = access::kernel_load(at(page), PAGE).unwrap();
        assert!(seen == bytes, "{what}: page {page}");
    }
}

#[test]
fn a_table_is_found_again_after_its_last_user() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let file = DaxFile::stamped("again", 700, 7);
    let heap = Heap::for_reading(0);
    let before = tables();
    let stat = file.table().stat();
    let kept = tables();
    assert_eq!((kept.kept, kept.tables), (1, before.tables + 1));
    // Its page tables, and what is not one.
    assert_eq!(kept.kept_bytes, (stat.tables + 1) * PAGE as u64);
    assert!(kept.kept_most >= kept.kept_bytes);
    let table = file.table();
    assert_eq!((tables().kept, tables().kept_bytes), (0, 0));
    assert_eq!(table.stat(), stat);
    let mapping = table.mapped(700);
    assert_shows(&file, "a mapping", |page| mapping.page(page));
    drop((mapping, table));
    let address = heap.attach(file.file(), 0, 700).unwrap();
    assert_eq!((tables().kept, heap.stat().attached), (0, 2));
    assert_shows(&file, "an attachment", |page| address + page as usize * PAGE);
    heap.detach(address).unwrap();
    heap.reap();
    let after = tables();
    assert_eq!((after.kept, after.resumed), (1, before.resumed + 2));
    assert_eq!((after.evicted, after.reclaimed), (before.evicted, before.reclaimed));
    assert_file_tables_are_sound();
}

#[test]
fn the_caller_s_descriptor_stays_where_it_is() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("position", 700, 7);
    file.file().set_len(3_000 * PAGE as u64).unwrap();
    file.stamp(2_900, 7);
    let heap = Heap::for_reading(0);
    let mut descriptor = file.file();
    descriptor.seek(SeekFrom::Start(12_345)).unwrap();
    let table = file.table();
    file.stamp(3_000, 7);
    table.refresh().unwrap();
    file.stamp(3_001, 7);
    heap.attach(file.file(), 0, 3_002).unwrap();
    assert_eq!(descriptor.stream_position().unwrap(), 12_345);
}

/// Ways to lose blocks, of pages 16 to 31.
const WAYS: [FallocateFlags; 4] = [
    FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE),
    FallocateFlags::ZERO_RANGE,
    FallocateFlags::COLLAPSE_RANGE,
    FallocateFlags::INSERT_RANGE,
];

fn lose(file: &File, way: Option<FallocateFlags>) {
    let page = PAGE as u64;
    match way {
        Some(way) => fallocate(file, way, 16 * page, 16 * page).unwrap(),
        None => {
            file.set_len(16 * page).unwrap();
            file.set_len(64 * page).unwrap();
        }
    }
    // Another file may have the blocks after the next commit.
    file.sync_all().unwrap();
}

#[test]
fn a_file_loses_blocks_while_nobody_uses_its_table() {
    let Some(_turn) = dax_turn() else { return };
    for way in WAYS.map(Some).into_iter().chain([None]) {
        for is_mapped in [false, true] {
            let file = DaxFile::stamped("loses", 64, 7);
            drop(file.table());
            let before = tables();
            lose(file.file(), way);
            let other = DaxFile::stamped("taker", 64, 9_000);
            let what = format!("{way:?}, mapped: {is_mapped}");
            if is_mapped {
                let table = file.table();
                let mapping = table.mapped(128);
                assert_shows(&file, &what, |page| mapping.page(page));
                mapping.stamp(20, 20);
            } else {
                let heap = Heap::for_writing(0);
                let address = heap.attach(file.file(), 0, 64).unwrap();
                assert_shows(&file, &what, |page| address + page as usize * PAGE);
                access::store_page(address + 20 * PAGE, 20).unwrap();
            }
            assert_eq!(tables().resumed, before.resumed + 1, "{what}");
            (0..64).for_each(|page| other.assert_stamped(page, 9_000 + page));
            assert_file_tables_are_sound();
        }
    }
}

/// Two files exchange their blocks, and nothing is unmapped.
#[test]
fn a_file_becomes_the_boot_loader_while_nobody_uses_its_table() {
    let Some(_turn) = dax_turn() else { return };
    dax::begin_anew();
    const SWAP_BOOT: u32 = 0x6611;
    let file = DaxFile::stamped("boot", 8, 7);
    let exchange = || {
        file.file().sync_all().unwrap();
        drop(file.table());
        sys::ioctl(file.file().as_fd(), SWAP_BOOT, 0).unwrap();
    };
    let resumed = tables().resumed;
    exchange();
    file.file().set_len(8 * PAGE as u64).unwrap();
    let heap = Heap::for_reading(0);
    let address = heap.attach(file.file(), 0, 8).unwrap();
    (0..8).for_each(|page| assert_eq!(access::load(address + page * PAGE), Ok(0)));
    heap.detach(address).unwrap();
    heap.reap();
    exchange();
    let address = heap.attach(file.file(), 0, 8).unwrap();
    assert_shows(&file, "exchanged back", |page| address + page as usize * PAGE);
    assert_eq!(tables().resumed, resumed + 3);
}

/// Nothing tells the module when a hole is filled.
#[test]
fn a_file_gets_blocks_while_nobody_uses_its_table() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("gets");
    // A hole without tables in it, one page that is missing, and reserved blocks.
    file.file().set_len(3 * UNIT).unwrap();
    (0..SLOT).filter(|page| *page != 9).for_each(|page| file.stamp(page, page));
    fallocate(file.file(), FallocateFlags::empty(), 2 * UNIT, 8 * PAGE as u64).unwrap();
    let heap = Heap::for_reading(0);
    let resumed = tables().resumed;
    let steps: [&[u64]; 4] = [&[9], &[SLOT + 3], &[2 * SLOT, 2 * SLOT + 7], &[3 * SLOT + 1]];
    let mut there: Vec<u64> = (0..SLOT).filter(|page| *page != 9).collect();
    for step in steps {
        drop(file.table());
        step.iter().for_each(|page| file.stamp(*page, *page));
        there.extend(step);
        let address = heap.attach(file.file(), 0, 4 * SLOT).unwrap();
        for page in &there {
            let seen = access::kernel_load(address + *page as usize * PAGE, PAGE).unwrap();
            assert!(seen == access::stamped(*page), "page {page}");
        }
        assert_eq!(heap.stat().served_faults, 0, "{step:?}");
        heap.detach(address).unwrap();
        heap.reap();
    }
    assert_eq!(tables().resumed, resumed + 7);
    assert_file_tables_are_sound();
}

/// A refresh opens the file for as long as it looks. Whether it was closed since this was asked.
fn was_opened(watch: &OwnedFd) -> bool {
    let mut events = [0_u8; 4096];
    match rustix::io::read(watch, &mut events) {
        Err(Errno::AGAIN) => false,
        length => length.unwrap() > 0,
    }
}

/// A table that lacks something is looked up once, and not again.
#[test]
fn nothing_is_looked_up_again_that_was_found() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::new("whole");
    file.file().set_len(8 * PAGE as u64).unwrap();
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, file.path(), inotify::WatchFlags::CLOSE_NOWRITE).unwrap();
    let heap = Heap::for_reading(0);
    let attaching_opens = || {
        let address = heap.attach(file.file(), 0, 8).unwrap();
        heap.detach(address).unwrap();
        heap.reap();
        was_opened(&watch)
    };
    let resumed = tables().resumed;
    assert!(attaching_opens(), "it is made");
    assert!(attaching_opens(), "the hole may be filled");
    (0..8).for_each(|page| file.stamp(page, page));
    assert!(attaching_opens(), "the hole is filled");
    assert!(!attaching_opens(), "it lacks nothing");
    fallocate(file.file(), WAYS[0], 0, PAGE as u64).unwrap();
    assert!(attaching_opens(), "it is stale");
    assert_eq!(file.table().stat().leaves, 7);
    assert_eq!(tables().resumed, resumed + 5);
}

fn forget_times(file: &DaxFile) {
    let times = [libc::timespec { tv_sec: 0, tv_nsec: 0 }; 2];
    // SAFETY: the call reads the two times.
    #[allow(unsafe_code)]
    let done = unsafe { libc::futimens(file.file().as_raw_fd(), times.as_ptr()) };
    assert_eq!(done, 0);
}

/// Each last user writes back what was stored, and notes it in the file's times.
#[test]
fn every_last_user_updates_the_times() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("times", 8, 7);
    let resumed = tables().resumed;
    for (round, stores) in [true, false, true, false, true].into_iter().enumerate() {
        forget_times(&file);
        let table = file.table();
        let mapping = table.mapped(8);
        mapping.assert_stamped(3, 10);
        if stores {
            mapping.stamp(3, 10);
        }
        drop(table);
        drop(mapping);
        let has_changed = file.file().metadata().unwrap().mtime() != 0;
        assert_eq!(has_changed, stores, "round {round}");
    }
    assert_eq!(tables().resumed, resumed + 4);
}

#[test]
fn durability_ends_with_the_last_user() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("durable", 8, 7);
    let resumed = tables().resumed;
    assert_eq!(Table::open(file.file(), DURABLE).unwrap().stat().flags, DURABLE);
    assert_eq!(file.table().stat().flags, 0);
    assert_eq!(Table::open(file.file(), DURABLE).unwrap().stat().flags, DURABLE);
    assert_eq!(tables().resumed, resumed + 2);
}

#[test]
fn a_table_goes_with_the_last_link() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let before = tables();
    let free = || rustix::fs::statfs("/pmem").unwrap().f_bfree;
    // The folder has its blocks.
    drop(DaxFile::stamped("gone", 700, 7));
    let blocks = free();
    for round in 1..=50 {
        // The memory of an inode is used again after a while.
        let file = DaxFile::stamped("gone", 700, round << 20);
        let (table, heap) = (file.table(), Heap::for_reading(0));
        let address = heap.attach(file.file(), 0, 700).unwrap();
        let mapping = table.mapped(700);
        assert_shows(&file, "an attachment", |page| address + page as usize * PAGE);
        assert_shows(&file, "a mapping", |page| mapping.page(page));
        heap.detach(address).unwrap();
        drop((heap, mapping, table));
        assert_eq!(tables().kept, 1);
        drop(file);
        assert_eq!(tables(), Tables { evicted: before.evicted + round, ..before });
    }
    rustix::fs::sync();
    assert!(free() >= blocks, "{} of {blocks} are free", free());
}

#[test]
fn kept_tables_do_not_keep_their_file_system() {
    let Some(_turn) = dax_turn() else { return };
    // No table was stored that would be refused.
    dax::begin_anew();
    forget_kept();
    for (round, is_new) in [(1_u64, false), (2, true), (3, false)] {
        let file = |number: u64| DaxFile::kept(&format!("stays-{number}"));
        let stamp = |number: u64, page| (round << 20) + (number << 10) + page;
        let before = tables();
        for number in 0..5 {
            let file = file(number);
            file.file().set_len(0).unwrap();
            (0..20).for_each(|page| file.stamp(page, stamp(number, page)));
            drop(file.table());
        }
        assert_eq!(tables().kept, 5);
        persistent::unmount_when_unused();
        let evicted = before.evicted + 5;
        assert_eq!(tables(), Tables { evicted, ..before });
        if is_new {
            dax::format();
        }
        dax::mount();
        for number in (0..5).filter(|_| !is_new) {
            let file = file(number);
            let mapping = file.table().mapped(20);
            (0..20).for_each(|page| mapping.assert_stamped(page, stamp(number, page)));
            drop(mapping);
            fs::remove_file(file.path()).unwrap();
        }
        assert_eq!(tables().resumed, before.resumed);
    }
}

/// The self-check looks at a table, and at its inode, that nothing else keeps.
#[test]
fn a_file_system_is_unmounted_while_kept_tables_are_checked() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(3_000));
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                assert_file_tables_are_sound();
            }
        });
        while !deadline.is_over() {
            for number in 0..4 {
                let file = DaxFile::kept(&format!("checked-{number}"));
                file.file().write_all_at(&[7; PAGE].repeat(300), 0).unwrap();
                drop(file.table());
            }
            persistent::unmount_when_unused();
            dax::mount();
            for number in 0..4 {
                fs::remove_file(format!("/pmem/checked-{number}")).unwrap();
            }
        }
    });
    assert_eq!(tables().tables, 0);
}

/// The self-check looks at a table for a while, which is to go meanwhile.
#[test]
fn a_kept_table_goes_while_it_is_checked() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let file = DaxFile::new("long");
    (0..48).for_each(|at| file.file().write_all_at(&[7; 1 << 20], at << 20).unwrap());
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(3_000));
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                assert_file_tables_are_sound();
            }
        });
        while !deadline.is_over() {
            drop(file.table());
            // Memory of tables is used again by others.
            forget_kept();
            thread::sleep(Duration::from_millis(2));
        }
    });
}

#[test]
fn memory_that_is_short_frees_them() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    // Their inodes stay: there are descriptors.
    let files: Vec<_> = (0..5).map(|at| DaxFile::stamped(&format!("short-{at}"), 20, 7)).collect();
    let used = files[0].table();
    files.iter().for_each(|file| drop(file.table()));
    let before = tables();
    assert_eq!(before.kept, 4);
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    let after = tables();
    assert_eq!((after.kept, after.kept_bytes, after.tables), (0, 0, before.tables - 4));
    assert_eq!((after.reclaimed, after.evicted), (before.reclaimed + 4, before.evicted));
    for (file, table) in [(&files[0], used), (&files[1], files[1].table())] {
        let mapping = table.mapped(20);
        assert_shows(file, "a table in use, and a new one", |page| mapping.page(page));
    }
}

#[test]
fn the_bound_holds_and_the_oldest_go_first() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let files: Vec<_> = (0..4).map(|at| DaxFile::stamped(&format!("bound-{at}"), 1, 7)).collect();
    let use_table = |at: usize| drop(files[at].table());
    use_table(0);
    let each = tables().kept_bytes;
    let bound = KeptBound::kib((3 * each) >> 10);
    assert_eq!(tables().kept_most, 3 * each);
    let before = tables();
    [1, 2, 0, 3].into_iter().for_each(use_table);
    let now = tables();
    assert_eq!((now.kept, now.kept_bytes), (3, 3 * each));
    // One was resumed, and one had to go: the second.
    assert_eq!((now.resumed, now.reclaimed), (before.resumed + 1, before.reclaimed + 1));
    [0, 2, 3].into_iter().for_each(use_table);
    assert_eq!(tables().resumed, now.resumed + 3);
    use_table(1);
    assert_eq!(tables().resumed, now.resumed + 3);
    drop(bound);
    let _none = KeptBound::none();
    assert_eq!(tables().kept, 0);
    use_table(1);
    assert_eq!((tables().kept, tables().tables), (0, 0));
}

/// The state of a thread, whose folder in /proc this is; D: it waits for a lock.
fn state(thread: &Path) -> char {
    let line = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    line.rsplit(") ").next().and_then(|rest| rest.chars().next()).unwrap_or_default()
}

/// Waits until the one table has no user, the module's worker included.
#[track_caller]
fn wait_until_kept(patience: Duration) {
    let start = Instant::now();
    while tables().kept != 1 {
        assert!(start.elapsed() < patience, "the table has a user: {:?}", tables());
        thread::sleep(Duration::from_millis(10));
    }
}

/// A fault waits for the file's lock while its attachment ends. Whether that has happened.
fn fault_late(file: &DaxFile, heap: &Heap, pages: u64) -> bool {
    (1..pages).step_by(2).for_each(|page| file.stamp(page, page));
    let address = heap.attach(file.file(), 0, SLOT).unwrap();
    let (begins, ends) = (AtomicBool::new(false), AtomicBool::new(false));
    let thread = OnceLock::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            begins.store(true, Ordering::SeqCst);
            // So many extents take a while.
            fallocate(file.file(), WAYS[0], 0, pages * PAGE as u64).unwrap();
            ends.store(true, Ordering::SeqCst);
        });
        scope.spawn(|| {
            let own = fs::read_link("/proc/thread-self").unwrap();
            wait_until(|| begins.load(Ordering::SeqCst));
            thread.set(Path::new("/proc").join(own)).unwrap();
            thread::sleep(Duration::from_millis(1));
            // A hole, which has no leaf.
            let _ = access::load(address);
        });
        wait_until(|| thread.get().is_some());
        let waits = || state(thread.get().unwrap()) == 'D';
        wait_until(|| waits() || ends.load(Ordering::SeqCst));
        heap.detach(address).unwrap();
        heap.reap();
        waits() && !ends.load(Ordering::SeqCst)
    })
}

/// A fault that waits while its attachment ends does not have the table refreshed later: that would
/// keep the file for seconds, and then use a module that may be gone.
#[test]
fn a_late_fault_leaves_no_refresh_behind() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    const PAGES: u64 = 8_192;
    let file = DaxFile::new("late");
    file.file().set_len(PAGES * PAGE as u64).unwrap();
    let heap = Heap::for_reading(0);
    // Once is enough. On a busy machine the fault may come too early or too late again and again.
    for _ in 0..100 {
        let table = file.table();
        // Each time the pause before the refresh doubles, up to ten seconds.
        for _ in 0..12 {
            let address = heap.attach(file.file(), 0, SLOT).unwrap();
            assert_eq!(access::load(address), Ok(0));
            heap.detach(address).unwrap();
            heap.reap();
        }
        let was_late = fault_late(&file, &heap, PAGES);
        drop(table);
        wait_until_kept(Duration::from_secs(4));
        if was_late {
            return;
        }
    }
    panic!("no fault has waited");
}

/// A program that has a lease of its file lets others that open it wait: 45 seconds, or until it
/// gives the lease up. The module's worker does not wait.
#[test]
fn a_lease_holds_no_worker() {
    const F_SETSIG: i32 = 10;
    let Some(_turn) = dax_turn() else { return };
    for gives_up in [true, false] {
        forget_kept();
        let file = DaxFile::new("leased");
        file.file().set_len(8 * PAGE as u64).unwrap();
        let table = file.table();
        let mapping = table.mapped(8);
        // The signal that asks for the lease is ignored.
        sys::fcntl(file.file(), F_SETSIG, libc::SIGURG);
        sys::fcntl(file.file(), libc::F_SETLEASE, libc::F_WRLCK);
        assert_eq!(access::load(mapping.page(0)), Ok(0));
        assert_eq!(table.stat().barred, 1);
        wait_until(|| sys::fcntl(file.file(), libc::F_GETLEASE, 0) != libc::F_WRLCK);
        if gives_up {
            sys::fcntl(file.file(), libc::F_SETLEASE, libc::F_UNLCK);
            wait_until(|| table.stat().barred == 0);
        }
        drop((mapping, table));
        wait_until_kept(Duration::from_secs(20));
    }
}

/// A table that is larger than all that may be kept goes alone, and others stay.
#[test]
fn a_table_beyond_the_bound_replaces_no_other() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let large = DaxFile::new("large");
    (0..24).for_each(|at| large.file().write_all_at(&[7; 1 << 20], at << 20).unwrap());
    let small = DaxFile::stamped("small", 1, 7);
    drop(small.table());
    let each = tables().kept_bytes;
    let _bound = KeptBound::kib((2 * each) >> 10);
    let before = tables();
    drop(large.table());
    assert_eq!(tables(), before);
    drop(small.table());
    assert_eq!(tables().resumed, before.resumed + 1);
}

/// No path leads to such a file any more.
#[test]
fn a_table_of_a_removed_file_is_not_kept() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    let (file, other) = (DaxFile::stamped("removed", 20, 7), DaxFile::stamped("linked", 20, 7));
    fs::remove_file(file.path()).unwrap();
    let before = tables();
    for file in [&file, &other] {
        let mapping = file.table().mapped(20);
        assert_shows(file, "a mapping", |page| mapping.page(page));
    }
    assert_eq!(tables(), Tables { kept: 1, tables: 1, kept_bytes: tables().kept_bytes, ..before });
}

/// In a group of processes the kept tables take no more than a 64th of the group's limit.
#[test]
fn a_group_keeps_a_part_of_its_limit() {
    const LIMIT: u64 = 64 << 20;
    let Some(_turn) = dax_turn() else { return };
    let Some(group) = Group::new("kept") else { return };
    forget_kept();
    let files: Vec<_> =
        (0..200).map(|at| DaxFile::stamped(&format!("limited-{at}"), 1, 7)).collect();
    let use_tables = || files.iter().for_each(|file| drop(file.table()));
    group.set("memory.max", &LIMIT.to_string());
    let child = group.start(|| {
        use_tables();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
    let before = tables();
    assert_eq!((before.kept, before.kept_bytes), (128, LIMIT / 64));
    // Those that were used last are there.
    files[72..].iter().for_each(|file| drop(file.table()));
    assert_eq!(tables().resumed, before.resumed + 128);
    drop(files[71].table());
    assert_eq!(tables().resumed, before.resumed + 128);
    forget_kept();
    use_tables();
    assert_eq!(tables().kept, 200);
}

/// The process that has a table made is charged for what the module's worker adds to it.
#[test]
fn a_group_is_charged_for_what_the_worker_adds() {
    const TABLES: u64 = 1024;
    let Some(_turn) = dax_turn() else { return };
    let Some(group) = Group::new("added") else { return };
    let file = DaxFile::new("added");
    let pages = TABLES * SLOT;
    file.file().set_len(pages * PAGE as u64).unwrap();
    let child = group.start(|| {
        let table = file.table();
        let mapping = table.mapped(pages);
        (0..TABLES).for_each(|at| file.stamp(at * SLOT, at));
        let (charged, before) = (group.charged(), table.stat());
        assert_eq!(before.leaves, 0);
        mapping.assert_stamped(0, 0);
        wait_until(|| table.stat().leaves == TABLES);
        let (charged, added) = (group.charged() - charged, table.stat().tables - before.tables);
        // The root was there.
        assert_eq!(added, TABLES - 1);
        // The kernel counts some pages in advance.
        assert!(charged >= added * PAGE as u64 * 7 / 8, "{charged} bytes for {added} tables");
        0
    });
    assert_eq!(child.wait(), End::Status(0));
}

/// The module frees them when it is unloaded.
#[test]
fn an_unloaded_module_keeps_none() {
    let Some(_turn) = dax_turn() else { return };
    const FOLDER: &str = "/run/vellum/morsels";
    const MODULE: &str = "/modules/vellum.ko";
    const MANY: u64 = 600;
    let parameters = fs::read_to_string("/modules/parameters").unwrap_or_default();
    if !fs::exists(MODULE).unwrap() || !parameters.trim().is_empty() {
        eprintln!("skipped: no {MODULE}, or it has parameters");
        return;
    }
    forget_kept();
    let run = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).status().expect(program);
        assert!(status.success(), "{program} {arguments:?}: {status}");
    };
    // Each table of a page of the file has a page table.
    let files: Vec<_> =
        (0..MANY).map(|at| DaxFile::stamped(&format!("unloaded-{at}"), 1, 7)).collect();
    // Without tables that belong to other programs' memory.
    let page_tables = || counters::field("/proc/vmstat", "nr_page_table_pages");
    let before = page_tables();
    files.iter().for_each(|file| drop(file.table()));
    assert_eq!(tables().kept, MANY);
    assert!(page_tables() > before + MANY / 2);
    run("umount", &[FOLDER]);
    run("rmmod", &["vellum"]);
    let left = page_tables();
    run("insmod", &[MODULE]);
    run("mount", &["-t", "morselfs", "-o", "mode=1777", "none", FOLDER]);
    assert!(left < before + MANY / 2, "{before} page tables, and then {left}");
    assert_eq!((tables().tables, tables().resumed), (0, 0));
    drop(files);
    assert_eq!((tables().tables, tables().evicted), (0, 0));
}

const PAGES: u64 = 200;

/// The first byte of each word of a file.
const OURS: u64 = 0xaa << 56;
const OTHERS: u64 = 0xbb << 56;

/// Where the file is. Without the persistent memory there is no such folder.
const FOLDER: &str = "/pmem/races";

fn path_of(mark: u64) -> PathBuf {
    Path::new(FOLDER).join(if mark == OURS { "ours" } else { "others" })
}

/// Fails unless each word has the mark, or is zero, as words of new blocks are.
#[track_caller]
fn assert_marked<'a>(words: impl IntoIterator<Item = &'a u64>, mark: u64) {
    for word in words {
        assert!(*word == 0 || word >> 56 == mark >> 56, "{word:#x} has not the mark {mark:#x}");
    }
}

fn check(mark: u64) {
    let bytes = fs::read(path_of(mark)).unwrap_or_default();
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    assert_marked(&words, mark);
}

/// Changes a file, or makes it anew.
fn change(mark: u64, random: &mut Random) {
    let path = path_of(mark);
    if random.one_in(6) {
        let _ = fs::remove_file(&path);
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&path).unwrap();
    let (page, count) = (random.below(PAGES), 1 + random.below(PAGES));
    let (offset, length) = (page * PAGE as u64, count.min(PAGES - page) * PAGE as u64);
    match random.below(5) {
        0 => file.set_len(offset).unwrap(),
        1 => fallocate(&file, WAYS[0], offset, length).unwrap(),
        // The other file may have all that is free.
        2 => drop(fallocate(&file, FallocateFlags::empty(), offset, length)),
        _ => {
            let bytes = (mark | 1).to_le_bytes().repeat(length as usize / 8);
            drop(file.write_all_at(&bytes, offset));
        }
    }
    if random.one_in(2) {
        file.sync_all().unwrap();
    }
}

fn is_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Opens the file, uses it for a moment, and closes it. Returns how many pages had something.
fn use_once(heap: &Heap, random: &mut Random) -> u64 {
    let Ok(file) = OpenOptions::new().read(true).write(true).open(path_of(OURS)) else { return 0 };
    let (attached, mapping);
    let start = if random.one_in(2) {
        mapping = Table::open(&file, 0).unwrap().mapped(PAGES);
        attached = None;
        mapping.start()
    } else {
        let address = heap.attach(&file, 0, PAGES).unwrap();
        attached = Some(address);
        address
    };
    let mut seen = 0;
    for _ in 0..random.below(12) {
        let address = start + random.below(PAGES) as usize * PAGE;
        if random.one_in(3) {
            let _ = access::store_page(address, OURS | 1);
        } else if let Ok(words) = access::load_page(address) {
            assert_marked(words.iter(), OURS);
            seen += u64::from(words[0] != 0);
        }
    }
    if let Some(address) = attached {
        heap.detach(address).unwrap();
        if random.one_in(4) {
            heap.reap();
        }
    }
    seen
}

/// Leaves room for so many pages, so that files get the blocks that others lose.
fn fill(room: u64) {
    let file = File::create(Path::new(FOLDER).join("filler")).unwrap();
    let free = || rustix::fs::statfs(FOLDER).unwrap().f_bavail;
    let mut end = 0;
    while free() > room {
        let more = (free() - room) * PAGE as u64;
        fallocate(&file, FallocateFlags::empty(), end, more).unwrap();
        end += more;
    }
}

#[test]
fn tables_are_used_again_while_files_change_and_go() {
    let Some(_turn) = dax_turn() else { return };
    forget_kept();
    fs::create_dir(FOLDER).unwrap();
    fill(PAGES + 64);
    let seed = Random::of_this_run().number();
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(8_000));
    let heaps = [0, 1].map(|_| Heap::for_writing(0));
    // All but the thread that unmounts are in while they have a file open.
    let (gate, seen, before) = (RwLock::new(()), AtomicU64::new(0), tables());
    let repeat = |number: u64, pause_us: u64, work: &(dyn Fn(&mut Random) + Sync)| {
        let mut random = Random::new(seed.wrapping_add(number));
        while !stop.is_said() {
            let inside = gate.read().unwrap();
            work(&mut random);
            drop(inside);
            thread::sleep(Duration::from_micros(random.below(pause_us)));
        }
    };
    let mut unmounts = 0;
    thread::scope(|scope| {
        let _end = stop.at_end();
        let (repeat, seen) = (&repeat, &seen);
        for (number, heap) in (1..).zip(&heaps) {
            let work = move |random: &mut Random| {
                seen.fetch_add(use_once(heap, random), Ordering::Relaxed);
            };
            scope.spawn(move || repeat(number, 300, &work));
        }
        scope.spawn(move || repeat(11, 10_000, &|random| change(OURS, random)));
        scope.spawn(move || repeat(12, 10_000, &|random| change(OTHERS, random)));
        scope.spawn(move || {
            repeat(13, 50_000, &|random| match random.below(4) {
                3 => drop(File::open(path_of(OURS)).map(|file| store_table(&file))),
                0 => fs::write("/proc/sys/vm/drop_caches", "2").unwrap(),
                1 => drop(KeptBound::none()),
                _ => assert_file_tables_are_sound(),
            });
        });
        // On a busy machine the threads may hardly have run by then.
        for _ in deadline.rounds_until(|| seen.load(Ordering::Relaxed) > 0) {
            thread::sleep(Duration::from_millis(300));
            let _alone = gate.write().unwrap();
            check(OTHERS);
            heaps.iter().for_each(Heap::reap);
            // Whatever the other threads have done, a table is kept now, and was used again.
            let file = DaxFile::kept("races/ours");
            (0..2).for_each(|_| drop(file.table()));
            drop(file);
            persistent::unmount_when_unused();
            assert_eq!(tables().tables, 0);
            dax::mount();
            unmounts += 1;
        }
    });
    check(OTHERS);
    check(OURS);
    let after = tables();
    println!("{unmounts} unmounts, {} pages, {before:?}, {after:?}", seen.load(Ordering::Relaxed));
    assert!(seen.into_inner() > 0 && unmounts > 0);
    assert!(after.resumed > before.resumed && after.evicted > before.evicted);
    drop(heaps);
    fs::remove_dir_all(FOLDER).unwrap();
    // Stored tables stay, and would be refused for files that get the numbers of these inodes.
    let stored = Path::new(persistent::FOLDER).join(STORED_FOLDER);
    fs::remove_dir_all(stored).or_else(is_missing).unwrap();
}
