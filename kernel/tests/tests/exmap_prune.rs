//! Page tables of a surface: they are charged to the user, and empty ones are freed.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_kernel_tests::child::{End, become_user, in_child};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::group::Group;
use vellum_kernel_tests::machine::Machine;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop, wait_until};
use vellum_kernel_tests::{Exmap, PAGE, Plan, Surface, TABLE_PAGES, turn};
use vellum_uapi::exmap::{self, Harvest};

/// Pages of a user's locked memory.
const LIMIT: u64 = 256;

/// 64 GiB, which have 65 upper tables.
const WIDE: u64 = 1 << 24;
const UPPER: u64 = 65;

/// The first pages of several tables, from one on.
fn firsts(from: u64, count: u64) -> Vec<(u64, u64)> {
    (from..from + count).map(|table| (table % (WIDE / TABLE_PAGES) * TABLE_PAGES, 1)).collect()
}

/// The charged memory of an exmap without its tables, with a pool of `frames` frames and one
/// interface.
fn charged(frames: u64) -> u64 {
    frames + 6
}

#[test]
fn a_users_tables_are_bounded() {
    let Some(_turn) = turn() else { return };
    let mut fresh: Vec<Exmap> = (0..70).map(|_| Exmap::open()).collect();
    in_child(move || {
        become_user(LIMIT * PAGE as u64);
        // The upper tables of 16 TiB alone take 64 MiB.
        let vast = fresh.pop().unwrap();
        vast.create(&plan(16, 1, 0)).unwrap();
        assert_eq!(vast.map(1 << 32).err(), Some(Errno::NOMEM));
        drop(vast);
        // A refused call is not charged.
        let surface = Plan::new(WIDE, 40).make_of(fresh.pop().unwrap());
        assert_eq!(surface.stat().tables, UPPER);
        let room = LIMIT - charged(40);
        surface.alloc(0, &[(3, 1)]);
        surface.stamp(3, 7);
        // One page in each table of the surface: many more tables than the user may have.
        let mut most = 0;
        for round in 0..200 {
            let ranges = firsts(round * 39 + 1, 39);
            assert_eq!(surface.alloc(0, &ranges), vec![(0, 1); 39], "round {round}");
            most = most.max(surface.stat().tables);
            surface.stamp(ranges[0].0, round);
            surface.assert_stamped(ranges[0].0, round);
            assert_eq!(surface.free(0, &ranges), vec![(0, 1); 39], "round {round}");
        }
        assert!(most <= room, "{most} tables, and the user may have {room}");
        surface.assert_stamped(3, 7);
        drop(surface);
        // All pages are freed.
        let last = fresh.pop().unwrap();
        wait_until(|| last.create(&plan(LIMIT - 6, 1, 0)).is_ok());
    });
}

/// A vector reaches the user's limit in the middle: some pages are populated, and the others have
/// an error.
#[test]
fn a_vector_beyond_the_limit_is_partly_populated() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::open();
    in_child(move || {
        become_user(LIMIT * PAGE as u64);
        let surface = Plan::new(WIDE, 100).make_of(exmap);
        let room = (LIMIT - charged(100) - UPPER) as usize;
        assert!(room < 100);
        let ranges = firsts(0, 100);
        let came = surface.alloc(0, &ranges);
        let enomem = -Errno::NOMEM.raw_os_error();
        assert!(came[..room].iter().all(|&outcome| outcome == (0, 1)), "{came:?}");
        assert!(came[room..].iter().all(|&outcome| outcome == (enomem, 0)), "{came:?}");
        for (page, _) in &ranges[..room] {
            surface.stamp(*page, *page);
        }
        for (page, _) in &ranges[..room] {
            surface.assert_stamped(*page, *page);
        }
        // A page in an existing table can still be populated.
        assert_eq!(surface.alloc(0, &[(1, 1)]), [(0, 1)]);
        surface.free(0, &ranges);
        assert_eq!(surface.alloc(0, &firsts(1000, 60)), vec![(0, 1); 60]);
    });
}

/// Also root's tables, which no limit bounds, are charged to the memory cgroup of the process that
/// brings the pages.
#[test]
fn tables_are_charged_to_the_group() {
    const TABLES: u64 = 4096;
    let Some(_turn) = turn() else { return };
    let Some(group) = Group::new("tables") else { return };
    let child = group.start(|| {
        let surface = Plan::new(WIDE, TABLES).make();
        let before = (group.charged(), surface.stat().tables);
        for first in (0..TABLES).step_by(512) {
            assert_eq!(surface.alloc(0, &firsts(first, 512)), vec![(0, 1); 512]);
        }
        let (charged, tables) = (group.charged() - before.0, surface.stat().tables - before.1);
        assert_eq!(tables, TABLES);
        // The kernel counts some pages in advance.
        assert!(charged >= tables * PAGE as u64 * 7 / 8, "{charged} bytes for {tables} tables");
        0
    });
    assert_eq!(child.wait(), End::Status(0));
}

/// Zeros need tables, too.
#[test]
fn reads_of_zeros_are_bounded() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::open();
    in_child(move || {
        become_user(LIMIT * PAGE as u64);
        let surface = Plan::new(WIDE, 16).flags(exmap::READS_ZEROS).make_of(exmap);
        surface.alloc(0, &[(5, 1)]);
        surface.stamp(5, 9);
        let mut refused = 0;
        for table in 1..2000 {
            match surface.load(table * TABLE_PAGES) {
                Ok(byte) => assert_eq!(byte, 0),
                // There is no room for its table before a command has freed the empty ones.
                Err(fault) => {
                    assert_eq!(fault.signal, libc::SIGBUS);
                    refused += 1;
                    surface.alloc(0, &[(5, 1)]);
                    assert_eq!(surface.load(table * TABLE_PAGES), Ok(0));
                }
            }
        }
        assert!(refused > 0, "the limit was never reached");
        assert!(surface.stat().tables <= LIMIT);
        surface.assert_stamped(5, 9);
    });
}

/// Rounds of the following test, of 16 tables each: several times the tables that its user may
/// have.
const ENOUGH: u64 = 200;

fn harvest(surface: &Surface, page: u64, count: u64) {
    let size = size_of::<Harvest>() as u32;
    let request = Harvest { size, flags: 0, page, count, accessed: 0, written: 0 };
    let address = std::ptr::from_ref(&request).expose_provenance();
    surface.exmap.pass(exmap::HARVEST, address).unwrap();
}

/// Threads populate, use, move and free pages all over the surface, while the module frees tables
/// again and again.
#[test]
fn no_page_is_lost_while_tables_are_freed() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::READS_ZEROS, exmap::PINNABLE, exmap::HUGE] {
        if !vellum_kernel_tests::exmap::knows(flags) {
            continue;
        }
        let exmap = Exmap::open();
        in_child(move || {
            become_user(700 * PAGE as u64);
            let surface = Plan::new(WIDE, 64).interfaces(2).flags(flags).make_of(exmap);
            let (stop, rounds) = (Stop::default(), AtomicU64::new(0));
            std::thread::scope(|scope| {
                for interface in 0..2 {
                    let (surface, stop, rounds) = (&surface, &stop, &rounds);
                    scope.spawn(move || {
                        let _at_end = stop.at_end();
                        let mut random = Random::new(interface as u64 + 1);
                        let deadline = Deadline::after_ms(5000);
                        let is_enough = || rounds.load(Ordering::Relaxed) >= ENOUGH;
                        for _ in deadline.rounds_until(is_enough) {
                            if stop.is_said() {
                                break;
                            }
                            // The first thread uses even tables, the second one odd tables.
                            let mut pages = Vec::new();
                            while pages.len() < 16 {
                                let table = random.below(WIDE / TABLE_PAGES / 2) * 2;
                                let page = (table + interface as u64) * TABLE_PAGES
                                    + random.below(TABLE_PAGES);
                                if pages.iter().all(|&(other, _)| other != page) {
                                    pages.push((page, 1));
                                }
                            }
                            assert_eq!(surface.alloc(interface, &pages), vec![(0, 1); 16]);
                            for (page, _) in &pages {
                                surface.stamp(*page, *page);
                            }
                            for (page, _) in &pages {
                                surface.assert_stamped(*page, *page);
                            }
                            assert_eq!(surface.free(interface, &pages), vec![(0, 1); 16]);
                            rounds.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                let mut random = Random::new(99);
                while !stop.is_said() {
                    harvest(&surface, random.below(WIDE - 4096), 4096);
                    let _ = surface.load(random.below(WIDE));
                }
            });
            let stat = surface.stat();
            println!("flags {flags:#x}: {rounds:?} rounds, {stat:?}");
            assert_eq!(stat.resident, 0);
            assert!(stat.detached > 0, "no table was ever freed");
            assert_eq!(surface.alloc(0, &[(0, 64)]), [(0, 64)]);
        });
    }
}

/// A virtual machine has read zeros, and loses its translation with the page's table. Afterwards it
/// sees the frame that is allocated there.
#[test]
fn a_machine_loses_zeros_with_their_table() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(WIDE, 64).flags(exmap::READS_ZEROS).make();
    let Some(mut machine) = Machine::new(&surface.mapping) else { return };
    assert_eq!(machine.load(5).unwrap(), 0);
    let (mut rounds, mut tables) = (0, 0);
    while surface.stat().tables >= tables {
        tables = surface.stat().tables;
        // One by one, because a vector of distant pages flushes all translations of machines.
        rounds += 1;
        surface.alloc(0, &firsts(rounds, 1));
        surface.free(0, &firsts(rounds, 1));
        assert!(rounds < 5000, "no table was ever freed");
    }
    surface.alloc(0, &[(5, 1)]);
    surface.store(5, 7).unwrap();
    assert_eq!(machine.load(5).unwrap(), 7);
}
