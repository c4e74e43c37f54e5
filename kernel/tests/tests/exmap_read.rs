//! Reading pages from a backing: by vectors, and by calls on the descriptor. A page is present only
//! once its data is.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::child::Child;
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::threads::{Barrier, Stop};
use vellum_kernel_tests::{Exmap, PAGE, Plan, access, sys, turn_for};
use vellum_uapi::exmap::{self, Create};

#[test]
fn pages_are_read_from_files_and_devices() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS] {
        for backing in Backing::all(2000) {
            let surface = Plan::new(2000, 700).flags(flags).backing(&backing.file).make();
            let ranges = [(0, 1), (10, 5), (511, 2), (1999, 1), (1000, 600)];
            let read = [(0, 1), (0, 5), (0, 2), (0, 1), (0, 600)];
            for _ in 0..2 {
                assert_eq!(surface.read(0, &ranges), read, "{}", backing.name);
                for page in [0, 10, 14, 511, 512, 1999, 1000, 1255, 1256, 1599] {
                    surface.assert_stamped(page, page);
                }
                assert_eq!(surface.stat().resident, 609);
                assert_eq!(surface.free(0, &ranges), read);
            }
            assert_eq!(surface.stat().read, 2 * 609);
            assert!(!surface.is_there(10));
        }
    }
}

#[test]
fn present_pages_do_not_change() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let backing = Backing::direct(100);
    let surface = Plan::new(100, 50).backing(&backing.file).make();
    assert_eq!(surface.alloc(0, &[(11, 1)]), [(0, 1)]);
    surface.stamp(11, 999);
    assert_eq!(surface.read(0, &[(10, 3), (10, 3), (12, 2)]), [(0, 2), (0, 0), (0, 1)]);
    surface.assert_stamped(11, 999);
    for page in [10, 12, 13] {
        surface.assert_stamped(page, page);
    }
    assert_eq!(surface.stat().resident, 4);
}

#[test]
fn a_file_that_is_shorter_has_no_data() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in [Backing::cached(100), Backing::direct(100)] {
        let surface = Plan::new(200, 50).backing(&backing.file).make();
        let outcomes = surface.read(0, &[(150, 2), (98, 4), (5, 1)]);
        let none = -libc::ENODATA;
        assert_eq!(outcomes, [(none, 0), (none, 2), (0, 1)], "{}", backing.name);
        let there: Vec<u64> = (0..200).filter(|page| surface.is_there(*page)).collect();
        assert_eq!(there, [5, 98, 99], "{}", backing.name);
        there.iter().for_each(|page| surface.assert_stamped(*page, *page));
        assert_eq!(surface.stat().resident, 3);
        // Frames for pages beyond the end of the file are free again.
        assert_eq!(surface.alloc(0, &[(110, 47)]), [(0, 47)]);
    }
}

/// Calls on the descriptor return the bytes before the end of the file, and ENODATA only if there
/// are none.
#[test]
fn a_call_returns_the_bytes_before_the_end() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in Backing::all(600).into_iter().take(2) {
        let surface = Plan::new(1000, 900).backing(&backing.file).make();
        let (fd, at) = (surface.exmap.as_fd(), |page| surface.mapping.page(page));
        let bytes = |pages: usize| Ok((pages * PAGE) as u64);
        for offset in [0, u64::from(exmap::OP_REFRESH) << 8] {
            assert_eq!(sys::pread(fd, at(598), 4 * PAGE, offset), bytes(2), "{}", backing.name);
            assert_eq!(sys::pread(fd, at(600), PAGE, offset), Err(Errno::NODATA));
            // With several transfers.
            assert_eq!(surface.free(0, &[(598, 2)]), [(0, 2)]);
            assert_eq!(sys::pread(fd, at(1), 700 * PAGE, offset), bytes(599), "{}", backing.name);
            let parts = [(at(0), PAGE), (at(900), PAGE), (at(5), PAGE)];
            assert_eq!(sys::preadv(fd, &parts, offset), bytes(1), "{}", backing.name);
            [0, 1, 598, 599].iter().for_each(|page| surface.assert_stamped(*page, *page));
            assert!(!surface.is_there(600) && !surface.is_there(900));
            assert_eq!(surface.free(0, &[(0, 1000)]), [(0, 600)]);
        }
    }
}

/// A caller that must not wait gets EAGAIN, for every backing; allocating frames does not wait.
#[test]
fn a_call_that_must_not_wait_returns_at_once() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in Backing::all(100) {
        let surface = Plan::new(100, 50).backing(&backing.file).make();
        let read = |opcode: u64| {
            let parts = [(surface.mapping.page(7), PAGE)];
            sys::preadv2(surface.exmap.as_fd(), &parts, opcode << 8, libc::RWF_NOWAIT)
        };
        assert_eq!(read(0), Err(Errno::AGAIN), "{}", backing.name);
        assert_eq!(read(1), Ok(PAGE as u64));
        assert_eq!(surface.stat().resident, 1);
    }
}

/// Vectors of more parts than a vector of the interface has entries.
#[test]
fn a_call_may_have_many_parts() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in Backing::all(1024) {
        let surface = Plan::new(2048, 1100).backing(&backing.file).make();
        let fd = surface.exmap.as_fd();
        let part = |page: u64| (surface.mapping.page(page * 5 % 1024), PAGE);
        let mut parts: Vec<(usize, usize)> = (0..1024).map(part).collect();
        assert_eq!(sys::preadv(fd, &parts, 0), Ok(1024 * PAGE as u64), "{}", backing.name);
        (0..1024).for_each(|page| surface.assert_stamped(page, page));
        assert_eq!(surface.free(0, &[(0, 1024)]), [(0, 1024)]);
        // The module reads the parts before the wrong one, and none after it.
        (parts[700].0, parts[800].1) = (surface.mapping.page(9) + 1, 0);
        assert_eq!(sys::preadv(fd, &parts, 0), Ok(700 * PAGE as u64));
        assert_eq!(surface.stat().resident, 700);
        assert_eq!(surface.free(0, &[(0, 1024)]), [(0, 700)]);
    }
}

#[test]
fn generated_files_are_no_backing() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for path in [
        "/proc/self/maps",
        "/proc/cpuinfo",
        "/proc/meminfo",
        "/sys/kernel/notes",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/fs/cgroup/cgroup.procs",
    ] {
        let file = File::open(path).unwrap();
        let plan = Create { backing: file.as_raw_fd(), ..plan(10, 1, 0) };
        assert_eq!(Exmap::open().create(&plan), Err(Errno::BADF), "{path}");
    }
    // A file in memory is a backing, because it keeps its contents.
    std::fs::write("/tmp/backing", access::stamped(0)).unwrap();
    let file = File::open("/tmp/backing").unwrap();
    let surface = Plan::new(10, 5).backing(&file).make();
    assert_eq!(surface.read(0, &[(0, 1)]), [(0, 1)]);
    surface.assert_stamped(0, 0);
    std::fs::remove_file("/tmp/backing").unwrap();
}

#[test]
fn an_empty_pool_is_an_error() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let backing = Backing::direct(100);
    let surface = Plan::new(100, 10).backing(&backing.file).make();
    let outcomes = surface.read(0, &[(0, 4), (20, 10), (50, 1)]);
    assert_eq!(outcomes, [(0, 4), (-libc::ENOMEM, 6), (-libc::ENOMEM, 0)]);
    for page in [0, 3, 20, 25] {
        surface.assert_stamped(page, page);
    }
    assert_eq!(surface.stat().resident, 10);
    assert!(!surface.is_there(26));
}

#[test]
fn without_a_backing_there_is_nothing_to_read() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let surface = Plan::new(100, 10).make();
    let (vector, read) = (&surface.vectors[0], exmap::READ);
    vector.set(0, exmap::Entry::new(5, 1));
    assert!(vector.run(&surface.exmap, read, 1) != Ok(0), "a page was populated without a backing");
    assert_eq!(surface.stat().resident, 0);
    // Only a file with pages can be a backing.
    let (mut ends, folder) = (std::io::pipe().unwrap(), File::open("/tmp").unwrap());
    let null = File::open("/dev/null").unwrap();
    std::io::Write::write_all(&mut ends.1, b"x").unwrap();
    let wrong = [ends.0.as_raw_fd(), folder.as_raw_fd(), null.as_raw_fd()];
    for backing in [&wrong[..], &[surface.exmap.as_fd().as_raw_fd()]].concat() {
        let created = Exmap::open().create(&Create { backing, ..plan(10, 1, 0) });
        assert!(created.is_err(), "descriptor {backing}");
    }
}

/// Another thread waits for the pages, and never finds one with incomplete data.
#[test]
fn a_page_is_present_only_once_its_data_is() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in Backing::all(600) {
        let surface = Plan::new(600, 100).backing(&backing.file).make();
        let (stop, found) = (Stop::default(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.is_said() {
                    for page in 505..520 {
                        if let Ok(bytes) = surface.contents(page) {
                            assert!(
                                bytes == access::stamped(page),
                                "page {page} was present early"
                            );
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
            let _at_end = stop.at_end();
            for _ in 0..150 {
                assert_eq!(surface.read(0, &[(505, 15)]), [(0, 15)]);
                surface.assert_stamped(510, 510);
                assert_eq!(surface.free(0, &[(505, 15)]), [(0, 15)]);
            }
        });
        println!("{}: {} pages were found", backing.name, found.load(Ordering::Relaxed));
    }
}

/// Each page is read once, however many threads ask for it.
#[test]
fn threads_may_read_the_same_pages() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for backing in Backing::all(600) {
        let surface = Plan::new(600, 4000).interfaces(2).backing(&backing.file).make();
        for round in 0..40 {
            let start = Barrier::new(2);
            let read = |interface| {
                start.wait();
                let ranges: Vec<(u64, u64)> = (0..100).map(|index| (index * 2, 2)).collect();
                let outcomes = surface.read(interface, &ranges);
                assert!(outcomes.iter().all(|(error, _)| *error == 0), "{outcomes:?}");
                outcomes.iter().map(|(_, pages)| u64::from(*pages)).sum::<u64>()
            };
            let total = std::thread::scope(|scope| {
                let other = scope.spawn(|| read(1));
                read(0) + other.join().unwrap()
            });
            assert_eq!((total, surface.stat().resident), (200, 200), "round {round}");
            (0..200).step_by(23).for_each(|page| surface.assert_stamped(page, page));
            assert_eq!(surface.free(0, &[(0, 200)]), [(0, 200)]);
        }
    }
}

/// The offset names the interface, and the buffer's place on the surface names the pages to read.
#[test]
fn calls_on_the_descriptor_read() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let backing = Backing::direct(1000);
    let surface = Plan::new(1000, 100).interfaces(2).backing(&backing.file).make();
    let (fd, at) = (surface.exmap.as_fd(), |page| surface.mapping.page(page));
    assert_eq!(sys::pread(fd, at(7), 3 * PAGE, 0), Ok(3 * PAGE as u64));
    let parts = [(at(999), PAGE), (at(510), 4 * PAGE), (at(0), PAGE)];
    assert_eq!(sys::preadv(fd, &parts, 1), Ok(6 * PAGE as u64));
    for page in [7, 9, 999, 510, 513, 0] {
        surface.assert_stamped(page, page);
    }
    assert_eq!(surface.stat().resident, 9);
    let own = vec![0_u8; 2 * PAGE];
    let own = own.as_ptr().expose_provenance();
    for (address, length, offset) in [
        (own, PAGE, 0),
        (at(20) + 1, PAGE, 0),
        (at(20) + 8, PAGE, 0),
        (at(20), PAGE - 8, 0),
        (at(999), 2 * PAGE, 0),
        (at(0) - PAGE, 2 * PAGE, 0),
        (at(20), PAGE, 2),
        (at(20), PAGE, 9 << 8),
        (at(20), PAGE, 1 << 40),
        (0, PAGE, 0),
    ] {
        let read = sys::pread(fd, address, length, offset);
        assert!(read.is_err(), "{length:#x} bytes at {address:#x} by {offset:#x}: {read:?}");
    }
    assert_eq!(surface.stat().resident, 9);
    assert_eq!(sys::pread(fd, at(20), 0, 0), Ok(0));
    let none = Plan::new(100, 10).make();
    let read = sys::pread(none.exmap.as_fd(), none.mapping.page(0), PAGE, 0);
    assert_eq!(read, Err(Errno::BADF));
}

/// A single page takes a shorter path from a device than from a file, with the same result.
#[test]
fn a_call_reads_a_single_page() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS, exmap::LOCK_TABLES] {
        for backing in Backing::all(64) {
            let end = (&backing.file).seek(SeekFrom::End(0)).unwrap() / PAGE as u64;
            let plan = Plan::new(end + 8, 4).flags(flags);
            let surface = plan.backing(&backing.file).make();
            let (fd, at) = (surface.exmap.as_fd(), |page| surface.mapping.page(page));
            let read = |page| sys::pread(fd, at(page), PAGE, 0);
            for page in [3, 0, 63] {
                assert_eq!(surface.load(page).is_ok(), flags == exmap::READS_ZEROS);
                assert_eq!(read(page), Ok(PAGE as u64), "{}", backing.name);
                surface.assert_stamped(page, page);
            }
            surface.stamp(3, 999);
            assert_eq!(read(3), Ok(0));
            surface.assert_stamped(3, 999);
            // The frame comes back each time.
            for _ in 0..10 {
                assert_eq!(read(end + 2), Err(Errno::NODATA), "{}", backing.name);
            }
            assert_eq!(surface.stat().resident, 3);
            assert_eq!(read(5), Ok(PAGE as u64));
            assert_eq!(read(6), Err(Errno::NOMEM));
            assert_eq!(surface.free(0, &[(3, 1)]), [(0, 1)]);
            assert_eq!(read(6), Ok(PAGE as u64));
            surface.assert_stamped(6, 6);
            assert_eq!(surface.stat().read, 5);
            assert_eq!(surface.stat().resident, 4);
            surface.assert_counted();
        }
    }
}

/// Several threads read the same pages at the same time. Each page is populated by one of them.
#[test]
fn exactly_one_thread_has_read_a_page() {
    const THREADS: u64 = 4;
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let backing = Backing::device(64);
    let plan = Plan::new(64, 80).interfaces(THREADS as u32);
    let surface = plan.backing(&backing.file).make();
    for _ in 0..30 {
        let brought = |thread| {
            let (fd, at) = (surface.exmap.as_fd(), |page| surface.mapping.page(page));
            let read = |page| sys::pread(fd, at(page), PAGE, thread).unwrap();
            (0..64).map(read).sum::<u64>()
        };
        let sum = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|thread| scope.spawn(move || brought(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u64>()
        });
        assert_eq!(sum, 64 * PAGE as u64);
        assert_eq!(surface.stat().resident, 64);
        (0..64).for_each(|page| surface.assert_stamped(page, page));
        assert_eq!(surface.free(0, &[(0, 64)]), [(0, 64)]);
    }
}

#[test]
fn a_process_may_be_killed_while_it_reads() {
    let Some(_turn) = turn_for(exmap::CAN_READ) else { return };
    let backing = Backing::direct(2000);
    let round = |wait| {
        let child = Child::start(|| {
            let surface = Plan::new(2000, 1500).backing(&backing.file).make();
            loop {
                surface.read(0, &[(0, 700), (800, 700)]);
                surface.free(0, &[(0, 2000)]);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(wait));
        child.kill();
    };
    round(100);
    let before = Memory::now();
    (0..10).for_each(|index| round(20 + index * 13));
    before.assert_back();
}
