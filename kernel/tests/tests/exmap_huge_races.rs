//! Threads set, clear and split entries of 2 MiB while others use their pages, or allocate the same
//! ones.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::counters::assert_exmaps_are_sound;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Barrier, Deadline, Stop};
use vellum_kernel_tests::{Plan, Surface, TABLE_PAGES, access, turn_with};
use vellum_uapi::exmap::{self, Entry};

/// Pages of 2 MiB.
const HUGE: u64 = TABLE_PAGES;
const ALL: u16 = HUGE as u16;

/// The number of huge pages that are split one after the other.
const SPLITS: u64 = 64;

/// Surfaces whose tables are mounted one by one, and as one.
const SHAPES: [u64; 2] = [8 * HUGE + 30, HUGE * HUGE];

/// Stores to pages, and loads from them, until a flag stops it. The pages must always be present.
fn use_pages(surface: &Surface, pages: &[u64], stop: &Stop) -> u64 {
    let mut rounds = 0;
    // At least once, however late the thread runs.
    while rounds == 0 || !stop.is_said() {
        for page in pages {
            assert_eq!(surface.store(*page, rounds as u8), Ok(()), "page {page}");
            assert_eq!(surface.load(*page), Ok(rounds as u8), "page {page}");
            let at = surface.mapping.page(*page) + 8;
            assert_eq!(access::kernel_store(at, &[rounds as u8; 8]), Ok(()), "page {page}");
        }
        rounds += 1;
    }
    rounds
}

/// A thread that accesses some pages of a huge page does not notice that others are freed, although
/// the entries change.
#[test]
fn huge_pages_are_split_while_threads_use_them() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = Plan::new(pages, 64).blocks(1).interfaces(2).make();
        let (first, deadline) = (pages / HUGE * HUGE - HUGE, Deadline::after_ms(3000));
        let (mut rounds, mut accesses) = (0, 0);
        for _ in deadline.rounds() {
            assert_eq!(surface.alloc(0, &[(first, HUGE)]), [(0, ALL)]);
            assert_eq!(surface.stat().huge, 1);
            let stop = Stop::default();
            std::thread::scope(|scope| {
                let users: Vec<_> = [[0, 3], [100, 511], [255, 256]]
                    .map(|pages| {
                        let (surface, stop) = (&surface, &stop);
                        scope.spawn(move || {
                            use_pages(surface, &pages.map(|page| first + page), stop)
                        })
                    })
                    .into_iter()
                    .collect();
                // Two threads at a time, of which one splits.
                for (interface, page) in [(0, first + 1), (1, first + 50)] {
                    let (surface, at_end) = (&surface, stop.at_end());
                    scope.spawn(move || {
                        std::thread::yield_now();
                        assert_eq!(surface.free(interface, &[(page, 1)]), [(0, 1)]);
                        assert_eq!(surface.free(interface, &[(page + 20, 3)]), [(0, 3)]);
                        drop(at_end);
                    });
                }
                accesses += users.into_iter().map(|user| user.join().unwrap()).sum::<u64>();
            });
            let stat = surface.stat();
            assert_eq!((stat.huge, stat.splits, stat.resident), (0, rounds + 1, HUGE - 8));
            assert_eq!(surface.free(0, &[(first, HUGE)]), [(0, ALL - 8)]);
            assert_eq!(surface.stat().blocks_free, 1);
            rounds += 1;
        }
        assert_exmaps_are_sound();
        println!("{pages} pages: {rounds} rounds, {accesses} times all pages");
    }
}

/// Several threads split the same 2 MiB. A thread that comes too late still finds its page.
#[test]
fn several_threads_split_huge_pages() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let surface = Plan::new(SPLITS * HUGE, 64).blocks(SPLITS as u32).interfaces(3).make();
    let all: Vec<(u64, u64)> = (0..SPLITS).map(|n| (n * HUGE, HUGE)).collect();
    let (deadline, mut rounds) = (Deadline::after_ms(6000), 0);
    for _ in deadline.rounds() {
        surface.alloc(0, &all);
        assert_eq!(surface.stat().huge, SPLITS);
        let start = Barrier::new(3);
        std::thread::scope(|scope| {
            for interface in 0..3_usize {
                let (surface, start, all) = (&surface, &start, &all);
                scope.spawn(move || {
                    let page = |(first, _): &(u64, u64)| (first + interface as u64, 1);
                    let pages: Vec<(u64, u64)> = all.iter().map(page).collect();
                    start.wait();
                    let outcomes = surface.free(interface, &pages);
                    assert_eq!(outcomes, vec![(0, 1); pages.len()], "interface {interface}");
                });
            }
        });
        assert_eq!(surface.free(0, &all), vec![(0, ALL - 3); all.len()]);
        rounds += 1;
    }
    println!("{rounds} rounds, {:?}", surface.stat());
    assert_exmaps_are_sound();
}

/// All of 2 MiB belong to one thread at a time, while other threads try to allocate them.
#[test]
fn huge_pages_have_one_owner() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for (pages, threads) in [(SHAPES[0], 2), (SHAPES[1], 4)] {
        let surface = Plan::new(pages, 64).blocks(8).interfaces(threads).make();
        let (deadline, had) = (Deadline::after_ms(3000), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for interface in 0..threads as usize {
                let (surface, had) = (&surface, &had);
                let mut random = Random::new(interface as u64 + 1);
                scope.spawn(move || {
                    for _ in deadline.rounds() {
                        let first = random.below(4) * HUGE;
                        let [(0, count)] = surface.alloc(interface, &[(first, HUGE)])[..] else {
                            panic!("an error");
                        };
                        if count == 0 {
                            continue;
                        }
                        assert_eq!(count, ALL, "no thread allocates single pages there");
                        let (stamp, page) = (random.number(), first + random.below(HUGE));
                        surface.stamp(page, stamp);
                        std::thread::yield_now();
                        surface.assert_stamped(page, stamp);
                        assert_eq!(surface.free(interface, &[(first, HUGE)]), [(0, ALL)]);
                        had.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let stat = surface.stat();
        println!("{pages} pages: {had:?} times, {stat:?}");
        assert!(had.into_inner() > 0);
        assert_eq!((stat.resident, stat.huge, stat.splits), (0, 0, 0));
        assert_eq!(stat.blocks_free, 8);
        assert_exmaps_are_sound();
    }
}

/// Threads populate, free and move ranges of all kinds at once. In the end all counters are right.
#[test]
fn huge_pages_and_others_may_be_mixed() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for flags in [0, exmap::READS_ZEROS, exmap::FLUSH_EACH] {
        let pages = SHAPES[0];
        let plan = Plan::new(pages, 3 * HUGE).interfaces(3).flags(flags).blocks(3);
        let surface = plan.make();
        let (stop, deadline) = (Stop::default(), Deadline::after_ms(3000));
        std::thread::scope(|scope| {
            for interface in 0..3 {
                let surface = &surface;
                let mut random = Random::new(100 + interface as u64);
                scope.spawn(move || {
                    for _ in deadline.rounds() {
                        let ranges: Vec<(u64, u64)> = (0..1 + random.below(6))
                            .map(|_| match random.below(3) {
                                0 => (random.below(8) * HUGE, HUGE),
                                1 => (random.below(5) * HUGE, 1 + random.below(3 * HUGE)),
                                _ => (random.below(pages - 8), 1 + random.below(8)),
                            })
                            .collect();
                        let command = random.pick(&[exmap::ALLOC, exmap::FREE]);
                        for (error, _) in surface.run(command, interface, &ranges) {
                            assert!([0, -libc::ENOMEM].contains(&error), "{error}");
                        }
                    }
                });
            }
            let (surface, stop) = (&surface, &stop);
            scope.spawn(move || {
                let mut random = Random::new(7);
                while !stop.is_said() {
                    let at = surface.mapping.page(random.below(pages));
                    let _ = access::kernel_store(at, &[0xff; 8]);
                    let _ = access::store(at, 1);
                    let _ = access::load(at);
                }
            });
            let _at_end = stop.at_end();
            let mut random = Random::new(9);
            for _ in deadline.rounds() {
                let size = size_of::<exmap::Move>() as u32;
                let (from, to) = (random.below(4) * HUGE + 9, (4 + random.below(4)) * HUGE);
                let count = 1 + random.below(300);
                let request = exmap::Move { size, interface: 0, from, to, count };
                let at = (&raw const request).expose_provenance();
                assert!(surface.exmap.pass(exmap::MOVE, at).is_ok());
            }
        });
        println!("flags {flags:#x}: {:?}", surface.stat());
        let there = surface.assert_counted();
        let ranges: Vec<(u64, u64)> = (0..8).map(|n| (n * HUGE, HUGE)).collect();
        let freed =
            surface.free(0, &ranges).iter().map(|(_, count)| u64::from(*count)).sum::<u64>();
        let rest = surface.free(1, &[(8 * HUGE, 30)])[0].1;
        assert_eq!(freed + u64::from(rest), there.len() as u64);
        assert_exmaps_are_sound();
        let stat = surface.stat();
        assert_eq!((stat.resident, stat.huge, stat.blocks_free), (0, 0, 3));
        // None of the other frames is lost.
        assert_eq!(surface.alloc(0, &[(1, HUGE - 1)]), [(0, ALL - 1)]);
        let others = [(HUGE + 1, HUGE - 1), (2 * HUGE + 1, HUGE - 1), (3 * HUGE + 1, 4)];
        let others = surface.alloc(1, &others);
        assert_eq!(others, [(0, ALL - 1), (0, ALL - 1), (-libc::ENOMEM, 3)]);
    }
}

/// The process forks, clears references and unmaps while threads set and clear entries of 2 MiB.
#[test]
fn huge_pages_may_come_and_go_while_the_surface_does() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let Surface { vectors, mapping, exmap } =
            Plan::new(pages, 64).interfaces(2).blocks(3).make();
        mapping.unmap().unwrap();
        let (deadline, commands) = (Deadline::after_ms(4000), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for vector in &vectors {
                let (exmap, commands) = (&exmap, &commands);
                let mut random = Random::new(vector.interface().into());
                scope.spawn(move || {
                    for _ in deadline.rounds() {
                        for index in 0..8 {
                            let first = random.below(4) * HUGE;
                            let part =
                                Entry::new(first + random.below(HUGE - 8), 1 + random.below(8));
                            let all = Entry::new(first, HUGE);
                            vector.set(index, if random.one_in(4) { part } else { all });
                        }
                        let command = random.pick(&[exmap::ALLOC, exmap::FREE]);
                        match vector.run(exmap, command, 8) {
                            Ok(_) => _ = commands.fetch_add(1, Ordering::Relaxed),
                            Err(error) => assert_eq!(error, Errno::NODEV),
                        }
                    }
                });
            }
            let mut random = Random::new(7);
            for _ in deadline.rounds() {
                match exmap.map(pages) {
                    Ok(mapping) => {
                        for round in 0..random.below(40) {
                            let at = mapping.page(random.below(4 * HUGE));
                            let _ = (access::store(at, 1), access::load(at));
                            if round % 8 == 7 {
                                fs::write("/proc/self/clear_refs", "4").unwrap();
                            }
                        }
                        mapping.unmap().unwrap();
                    }
                    // A command is still running.
                    Err(error) => assert!([Errno::BUSY, Errno::NODEV].contains(&error), "{error}"),
                }
            }
        });
        println!("{pages} pages: {} commands", commands.load(Ordering::Relaxed));
        let Ok(mapping) = exmap.map(pages) else { panic!("the surface cannot be mapped") };
        let surface = Surface { vectors, mapping, exmap };
        assert_exmaps_are_sound();
        surface.free(0, &[(0, 4 * HUGE)]);
        let stat = surface.stat();
        assert_eq!((stat.resident, stat.huge, stat.blocks_free), (0, 0, 3), "{stat:?}");
        assert_eq!(surface.alloc(0, &[(0, 3 * HUGE)]), [(0, 3 * ALL)]);
        assert_eq!(surface.stat().huge, 3);
    }
}

/// Pages that are being written are not freed, and neither are their entries of 2 MiB. In the end
/// all are free.
#[test]
fn huge_pages_are_held_while_they_are_written() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let file = Backing::direct(2 * HUGE);
    let surface = Plan::new(SHAPES[0], HUGE).blocks(1).interfaces(3).backing(&file.file).make();
    let (deadline, stop, busy) = (Deadline::after_ms(4000), Stop::default(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for interface in 1..3 {
            let (surface, stop) = (&surface, &stop);
            scope.spawn(move || {
                let first = interface as u64 * 100;
                while !stop.is_said() {
                    for (error, _) in surface.write(interface, &[(first, 40), (first + 200, 9)]) {
                        assert!([0, -libc::ENOENT].contains(&error), "{error}");
                    }
                }
            });
        }
        let _at_end = stop.at_end();
        for _ in deadline.rounds() {
            let (error, _) = surface.alloc(0, &[(0, HUGE)])[0];
            assert_eq!(error, 0);
            std::thread::yield_now();
            let mut left = HUGE;
            while left > 0 {
                let (error, pages) = surface.free(0, &[(0, HUGE)])[0];
                assert!([0, -libc::EBUSY].contains(&error), "{error}");
                busy.fetch_add(u64::from(error != 0), Ordering::Relaxed);
                left -= u64::from(pages);
            }
        }
    });
    println!("busy: {busy:?}; {:?}", surface.stat());
    assert_eq!(surface.alloc(0, &[(HUGE, HUGE)]), [(0, ALL)]);
    assert_eq!(surface.stat().huge, 1, "a block that was held comes back");
    assert_exmaps_are_sound();
}
