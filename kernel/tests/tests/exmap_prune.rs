//! Page tables of a surface: the user is charged for them, and those that become empty go.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::machine::Machine;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop, wait_until};
use vellum_kernel_tests::{Exmap, PAGE, Plan, Surface, TABLE_PAGES, turn};
use vellum_uapi::exmap::{self, Harvest};

/// Pages of a user's locked memory.
const LIMIT: u64 = 256;

/// 64 GiB, whose upper tables are 65.
const WIDE: u64 = 1 << 24;
const UPPER: u64 = 65;

/// The first pages of several tables, from a table on.
fn firsts(from: u64, count: u64) -> Vec<(u64, u64)> {
    (from..from + count).map(|table| (table % (WIDE / TABLE_PAGES) * TABLE_PAGES, 1)).collect()
}

/// The memory of an exmap without its tables, for a pool of `frames` frames with one interface.
fn charged(frames: u64) -> u64 {
    frames + 6
}

#[test]
fn a_users_tables_are_bounded() {
    let Some(_turn) = turn() else { return };
    let mut fresh: Vec<Exmap> = (0..70).map(|_| Exmap::open()).collect();
    in_child(move || {
        become_user(LIMIT * PAGE as u64);
        // The upper tables of 16 TiB alone are 64 MiB.
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
        // One page of each table, all over the surface: many more tables than the user may have.
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
        // All of it is freed.
        let last = fresh.pop().unwrap();
        wait_until(|| last.create(&plan(LIMIT - 6, 1, 0)).is_ok());
    });
}

/// The user's limit is met in the middle of a vector: some pages come, the others say why not.
#[test]
fn a_vector_beyond_the_limit_comes_as_far_as_it_can() {
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
        // A page in a table that is there comes as ever.
        assert_eq!(surface.alloc(0, &[(1, 1)]), [(0, 1)]);
        surface.free(0, &ranges);
        assert_eq!(surface.alloc(0, &firsts(1000, 60)), vec![(0, 1); 60]);
    });
}

/// Zeros that are only read have tables, too.
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
                // There is no room for its table before a command has freed those without a page.
                Err(fault) => {
                    assert_eq!(fault.signal, libc::SIGBUS);
                    refused += 1;
                    surface.alloc(0, &[(5, 1)]);
                    assert_eq!(surface.load(table * TABLE_PAGES), Ok(0));
                }
            }
        }
        assert!(refused > 0, "the limit was never met");
        assert!(surface.stat().tables <= LIMIT);
        surface.assert_stamped(5, 9);
    });
}

fn harvest(surface: &Surface, page: u64, count: u64) {
    let size = size_of::<Harvest>() as u32;
    let request = Harvest { size, flags: 0, page, count, accessed: 0, written: 0 };
    let address = std::ptr::from_ref(&request).expose_provenance();
    surface.exmap.pass(exmap::HARVEST, address).unwrap();
}

/// Threads bring, use, move and free pages all over the surface, while tables go again and again.
#[test]
fn nothing_is_lost_while_tables_go() {
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
                        while !deadline.is_over() && !stop.is_said() {
                            // Even tables are the first thread's, odd ones the second's.
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

/// A virtual machine has read zeros. After the page's table was freed it sees the frame that is
/// allocated there: it loses its translation with the table.
#[test]
fn a_machine_loses_zeros_with_their_table() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(WIDE, 64).flags(exmap::READS_ZEROS).make();
    let Some(mut machine) = Machine::new(&surface.mapping) else { return };
    assert_eq!(machine.load(5).unwrap(), 0);
    let (mut rounds, mut tables) = (0, 0);
    while surface.stat().tables >= tables {
        tables = surface.stat().tables;
        // One by one: a vector of pages far from each other has machines forget all of them.
        rounds += 1;
        surface.alloc(0, &firsts(rounds, 1));
        surface.free(0, &firsts(rounds, 1));
        assert!(rounds < 5000, "no table was ever freed");
    }
    surface.alloc(0, &[(5, 1)]);
    surface.store(5, 7).unwrap();
    assert_eq!(machine.load(5).unwrap(), 7);
}
