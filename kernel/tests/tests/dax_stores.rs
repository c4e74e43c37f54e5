//! Stores through file tables: each is noted, written back, and seen in the file's times, whatever
//! else happens meanwhile.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::access;
use vellum_kernel_tests::counters::assert_no_file_tables;
use vellum_kernel_tests::dax::{DaxFile, KeptBound};
use vellum_kernel_tests::sys::{self, READ_WRITE, Request};
use vellum_kernel_tests::threads::{Place, Stop, rounds, stay_on};
use vellum_kernel_tests::{Mapping, PAGE, Table, dax_turn};
use vellum_uapi::dax::{DURABLE, UNIT};

/// Sets the file's times to 1970, so that the next change shows.
fn forget_times(file: &DaxFile) {
    let times = [libc::timespec { tv_sec: 0, tv_nsec: 0 }; 2];
    // SAFETY: the call reads the two times.
    assert_eq!(unsafe { libc::futimens(file.file().as_raw_fd(), times.as_ptr()) }, 0);
}

fn has_changed(file: &DaxFile) -> bool {
    file.file().metadata().unwrap().mtime() != 0
}

fn sync_page(mapping: &Mapping, page: u64) {
    let address = std::ptr::with_exposed_provenance_mut(mapping.page(page));
    // SAFETY: the call changes no memory.
    assert_eq!(unsafe { libc::msync(address, PAGE, libc::MS_SYNC) }, 0);
}

#[test]
fn a_part_is_synced_alone() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("part", 600, 7);
    let table = file.table();
    let mapping = table.mapped(600);
    mapping.stamp(599, 1);
    forget_times(&file);
    sync_page(&mapping, 3);
    assert!(!has_changed(&file));
    sync_page(&mapping, 599);
    assert!(has_changed(&file));
}

/// The kernel brings pages in while a processor stores to them for the first time.
#[test]
fn no_store_is_forgotten_while_pages_are_populated() {
    let Some(_turn) = dax_turn() else { return };
    const POPULATE_READ: i32 = 22;
    const MANY: u64 = 1_024;
    let file = DaxFile::stamped("populated", MANY, 7);
    file.file().sync_all().unwrap();
    let _place = Place::on(1);
    for round in 0..u64::from(rounds(6)) {
        // New leaves, which no processor has noted anything in.
        drop(KeptBound::none());
        let table = file.table();
        let mapping = table.mapped(MANY);
        access::load(mapping.page(MANY - 1)).unwrap();
        let (step, ready) = (AtomicU64::new(0), AtomicU64::new(0));
        // Neither thread waits for the other one once that has failed.
        let stop = Stop::default();
        thread::scope(|scope| {
            let _at_end = stop.at_end();
            scope.spawn(|| {
                let _at_end = stop.at_end();
                stay_on(0);
                for page in 0..MANY - 1 {
                    ready.fetch_add(1, Ordering::SeqCst);
                    while step.load(Ordering::SeqCst) <= page && !stop.is_said() {
                        std::hint::spin_loop();
                    }
                    sys::madvise(mapping.page(page), PAGE, POPULATE_READ).unwrap();
                }
            });
            for page in 0..MANY - 1 {
                while ready.load(Ordering::SeqCst) <= page && !stop.is_said() {
                    std::hint::spin_loop();
                }
                step.store(page + 1, Ordering::SeqCst);
                (0..(page * 7 + round) % 160).for_each(|_| std::hint::spin_loop());
                access::store(mapping.page(page) + 8, 1).unwrap();
            }
        });
        for page in 0..MANY - 1 {
            forget_times(&file);
            sync_page(&mapping, page);
            assert!(has_changed(&file), "round {round}: the store to page {page} is forgotten");
        }
    }
}

#[test]
fn a_sync_waits_for_what_another_one_has_begun() {
    let Some(_turn) = dax_turn() else { return };
    const MANY: u64 = 16_000;
    let file = DaxFile::new("two-syncs");
    (0..MANY / 256).for_each(|at| file.file().write_all_at(&[7; 1 << 20], at << 20).unwrap());
    file.file().sync_all().unwrap();
    let table = file.table();
    let pages = table.stat().pages;
    let mapping = table.mapped(pages);
    let dirty = || (0..pages).for_each(|page| access::store(mapping.page(page), 1).unwrap());
    dirty();
    let start = Instant::now();
    table.sync().unwrap();
    let alone = start.elapsed();
    let (many, mut early) = (rounds(8), 0);
    for _ in 0..many {
        dirty();
        let start = Instant::now();
        let timed = || {
            let from = start.elapsed();
            table.sync().unwrap();
            (from, start.elapsed())
        };
        let (first, second) = thread::scope(|scope| {
            let first = scope.spawn(timed);
            thread::sleep(alone / 4);
            let second = timed();
            (first.join().unwrap(), second)
        });
        early += u32::from(second.0 > first.0 && second.1 + alone / 4 < first.1);
    }
    // A thread may lose its processor when it has written back all, and be overtaken then.
    assert!(early <= many / 2, "{early} of {many} returned before the stores were written back");
}

#[test]
fn stores_to_blocks_that_move_are_not_forgotten() {
    let Some(_turn) = dax_turn() else { return };
    for way in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        for is_refreshed in [false, true] {
            let file = DaxFile::stamped("moved", 64, 7);
            file.file().sync_all().unwrap();
            let table = file.table();
            let mapping = table.mapped(128);
            table.sync().unwrap();
            mapping.stamp(40, 4_000);
            fallocate(file.file(), way, 16 * PAGE as u64, 16 * PAGE as u64).unwrap();
            if is_refreshed {
                table.refresh().unwrap();
            }
            let page = if way == FallocateFlags::COLLAPSE_RANGE { 24 } else { 56 };
            file.assert_stamped(page, 4_000);
            forget_times(&file);
            sync_page(&mapping, page);
            assert!(has_changed(&file), "{way:?}, refreshed: {is_refreshed}");
        }
    }
}

/// The number of commits that the file system has counted. It counts a commit a moment after it has
/// told the threads that wait for it.
fn commits() -> u64 {
    let journals = std::fs::read_dir("/proc/fs/jbd2").unwrap().flatten();
    let ours = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("pmem0");
    let journal = journals.into_iter().find(|journal| ours(&journal.file_name())).unwrap();
    let text = std::fs::read_to_string(journal.path().join("info")).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Looks for a commit, 10 ms apart. Together they take less than the five seconds after which the
/// file system commits by itself.
const LOOKS: u32 = 200;

const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// Also where the file system serves the store.
#[test]
fn a_durable_table_shows_no_block_before_it_is_durable() {
    let Some(_turn) = dax_turn() else { return };
    for flag in [0, libc::MAP_SYNC] {
        let file = DaxFile::new("durable");
        file.file().set_len(64 * PAGE as u64).unwrap();
        file.file().sync_all().unwrap();
        let table = Table::open(file.file(), DURABLE).unwrap();
        let flags = libc::MAP_SHARED_VALIDATE | flag;
        let mapping = Mapping::new(Request { flags, ..table.request(UNIT, READ_WRITE) }).unwrap();
        // The commit of the sync has been counted by then.
        thread::sleep(10 * BETWEEN_LOOKS);
        let before = commits();
        access::store(mapping.page(5), 1).unwrap();
        let is_durable = (0..LOOKS).any(|_| {
            thread::sleep(BETWEEN_LOOKS);
            commits() > before
        });
        assert!(is_durable, "the block is not durably the file's");
    }
}

#[test]
fn a_file_that_nobody_syncs_has_the_times_of_its_stores() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("times", 8, 7);
    let table = file.table();
    let mapping = table.mapped(8);
    mapping.assert_stamped(1, 8);
    forget_times(&file);
    mapping.stamp(1, 9);
    drop(mapping);
    drop(table);
    assert_no_file_tables();
    assert!(has_changed(&file));
}

#[test]
fn a_sync_does_not_wait_for_a_frozen_file_system() {
    let Some(_turn) = dax_turn() else { return };
    const FREEZE: u32 = 0xc004_5877;
    const THAW: u32 = 0xc004_5878;
    let file = DaxFile::stamped("frozen", 8, 7);
    let table = file.table();
    let mapping = table.mapped(8);
    mapping.stamp(2, 3);
    forget_times(&file);
    sys::ioctl(file.file().as_fd(), FREEZE, 0).unwrap();
    let has_ended = thread::scope(|scope| {
        let syncer = scope.spawn(|| table.sync().unwrap());
        let start = Instant::now();
        while !syncer.is_finished() && start.elapsed() < Duration::from_secs(100) {
            thread::sleep(Duration::from_millis(5));
        }
        let has_ended = syncer.is_finished();
        sys::ioctl(file.file().as_fd(), THAW, 0).unwrap();
        has_ended
    });
    assert!(has_ended, "the sync waits for the thaw");
    table.sync().unwrap();
    assert!(has_changed(&file), "the times were to be updated by a later sync");
}
