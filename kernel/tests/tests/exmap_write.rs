//! Writing pages to a backing: by vectors, and by calls on the descriptor.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::Deadline;
use vellum_kernel_tests::{PAGE, Plan, Surface, access, sys, turn_for};
use vellum_uapi::exmap::{self, Entry};

const CAN: u64 = exmap::CAN_READ | exmap::CAN_WRITE;

#[test]
fn written_pages_are_read_again() {
    let Some(_turn) = turn_for(CAN) else { return };
    for flags in [0, exmap::PINNABLE] {
        for backing in Backing::all(2000) {
            let surface = Plan::new(2000, 800).flags(flags).backing(&backing.file).make();
            let ranges = [(1999, 1), (3, 1), (510, 4), (1000, 700)];
            let done = [(0, 1), (0, 1), (0, 4), (0, 700)];
            assert_eq!(surface.alloc(0, &ranges), done);
            let pages = || ranges.iter().flat_map(|(page, count)| *page..page + count);
            pages().for_each(|page| surface.stamp(page, page + 5000));
            assert_eq!(surface.write(0, &ranges), done, "{}", backing.name);
            assert_eq!(surface.stat().written, 706);
            // The pages stay, and can be freed.
            surface.assert_stamped(3, 5003);
            assert_eq!(surface.free(0, &ranges), done);
            for page in [1999, 3, 510, 513, 1000, 1699] {
                assert!(backing.stored(page) == access::stamped(page + 5000), "{page}");
            }
            assert!(backing.stored(514) == access::stamped(514), "{}", backing.name);
            assert_eq!(surface.read(0, &ranges), done);
            pages().for_each(|page| surface.assert_stamped(page, page + 5000));
        }
    }
}

/// Freezing waits for all writes that have begun. Completed writes must not count.
#[test]
fn a_file_system_can_be_frozen_after_writes() {
    const FREEZE: u32 = 0xc004_5877;
    const THAW: u32 = 0xc004_5878;
    let Some(_turn) = turn_for(CAN) else { return };
    for backing in [Backing::cached(100), Backing::direct(100)] {
        let surface = Plan::new(100, 50).backing(&backing.file).make();
        assert_eq!(surface.alloc(0, &[(3, 1), (7, 4)]), [(0, 1), (0, 4)]);
        assert_eq!(surface.write(0, &[(3, 1), (7, 4)]), [(0, 1), (0, 4)]);
        match sys::ioctl(backing.file.as_fd(), FREEZE, 0) {
            Err(Errno::OPNOTSUPP) => return println!("skipped: this file system does not freeze"),
            frozen => assert_eq!(frozen, Ok(0), "{}", backing.name),
        }
        assert_eq!(sys::ioctl(backing.file.as_fd(), THAW, 0), Ok(0));
    }
}

#[test]
fn an_entry_with_an_absent_page_is_not_written() {
    let Some(_turn) = turn_for(CAN) else { return };
    for backing in Backing::all(600) {
        let surface = Plan::new(600, 50).backing(&backing.file).make();
        assert_eq!(surface.alloc(0, &[(0, 4), (5, 4), (20, 1)]), [(0, 4), (0, 4), (0, 1)]);
        for page in [0, 1, 2, 3, 5, 6, 7, 8, 20] {
            surface.stamp(page, page + 5000);
        }
        let none = (-libc::ENOENT, 0);
        let outcomes = surface.write(0, &[(0, 9), (20, 1), (100, 1), (8, 2), (5, 2)]);
        assert_eq!(outcomes, [none, (0, 1), none, none, (0, 2)], "{}", backing.name);
        for page in [20, 5, 6] {
            assert!(backing.stored(page) == access::stamped(page + 5000), "{page}");
        }
        for page in [0, 3, 4, 7, 8, 9, 100] {
            assert!(backing.stored(page) == access::stamped(page), "{page}");
        }
        assert_eq!(surface.stat().resident, 9);
    }
}

#[test]
fn a_backing_opened_for_reading_is_not_written() {
    let Some(_turn) = turn_for(CAN) else { return };
    let backing = Backing::cached(100);
    let file = File::open(backing.path()).unwrap();
    let surface = Plan::new(100, 10).backing(&file).make();
    assert_eq!(surface.read(0, &[(5, 1)]), [(0, 1)]);
    surface.vectors[0].set(0, Entry::new(5, 1));
    let written = surface.vectors[0].run(&surface.exmap, exmap::WRITE, 1);
    assert_eq!(written, Err(Errno::BADF));
    let at = surface.mapping.page(5);
    assert_eq!(sys::pwrite(surface.exmap.as_fd(), at, PAGE, 0), Err(Errno::BADF));
}

#[test]
fn calls_on_the_descriptor_write() {
    let Some(_turn) = turn_for(CAN) else { return };
    let backing = Backing::direct(1000);
    let surface = Plan::new(1000, 100).interfaces(2).backing(&backing.file).make();
    let (fd, at) = (surface.exmap.as_fd(), |page| surface.mapping.page(page));
    assert_eq!(surface.alloc(0, &[(7, 3), (999, 1), (510, 4)]), [(0, 3), (0, 1), (0, 4)]);
    for page in [7, 8, 9, 999, 510, 511, 512, 513] {
        surface.stamp(page, page + 5000);
    }
    assert_eq!(sys::pwrite(fd, at(7), 3 * PAGE, 0), Ok(3 * PAGE as u64));
    let parts = [(at(999), PAGE), (at(510), 4 * PAGE)];
    assert_eq!(sys::pwritev(fd, &parts, 1), Ok(5 * PAGE as u64));
    for page in [7, 8, 9, 999, 510, 513] {
        assert!(backing.stored(page) == access::stamped(page + 5000), "{page}");
    }
    assert_eq!(sys::pwrite(fd, at(20), PAGE, 0), Err(Errno::NOENT));
    for (address, length) in [(at(7) + 8, PAGE), (at(7), 100), (at(999), 2 * PAGE), (0, PAGE)] {
        let written = sys::pwrite(fd, address, length, 0);
        assert!(written.is_err(), "{length:#x} bytes at {address:#x}: {written:?}");
    }
    assert!(backing.stored(20) == access::stamped(20));
}

/// All commands at once, on few pages and frames. A page without an owner may hold any bytes. The
/// counters are right.
#[test]
fn threads_may_run_all_commands_at_once() {
    let Some(_turn) = turn_for(CAN) else { return };
    let mut random = Random::of_this_run();
    for backing in Backing::all(600) {
        for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS] {
            let plan = Plan::new(600, 150).interfaces(3).flags(flags);
            let surface = plan.backing(&backing.file).make();
            std::thread::scope(|scope| {
                for interface in 0..3 {
                    let (surface, random) = (&surface, Random::new(random.number()));
                    scope.spawn(move || anything(surface, interface, random));
                }
            });
            let there = surface.assert_counted();
            println!("{}, flags {flags:#x}: {:?}", backing.name, surface.stat());
            assert_eq!(surface.free(0, &[(0, 600)]), [(0, there.len() as u16)]);
            assert_eq!(surface.alloc(0, &[(0, 200)]), [(-libc::ENOMEM, 150)]);
        }
    }
}

fn anything(surface: &Surface, interface: usize, mut random: Random) {
    let deadline = Deadline::after_ms(700);
    let commands = [exmap::ALLOC, exmap::FREE, exmap::READ, exmap::WRITE];
    let allowed = [0, -libc::ENOMEM, -libc::EBUSY, -libc::ENOENT];
    for _ in deadline.rounds() {
        let ranges: Vec<(u64, u64)> = (0..1 + random.below(30))
            .map(|_| (450 + random.below(120), 1 + random.below(6)))
            .collect();
        let command = random.pick(&commands);
        let outcomes = surface.run(command, interface, &ranges);
        let is_allowed = |(error, _): &(i32, u16)| allowed.contains(error);
        assert!(outcomes.iter().all(is_allowed), "{command:#x}: {outcomes:?}");
        let at = surface.mapping.page(450 + random.below(120));
        let _ = access::kernel_store(at, &[1; 16]);
    }
}
