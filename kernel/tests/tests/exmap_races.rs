//! Threads use one surface in different ways at the same time. In every order the counters are
//! right, and a page belongs to the thread that has allocated it.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop};
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, Surface, access, knows, turn};
use vellum_uapi::exmap::{self, Entry};

/// Pages for which threads compete; few, so that they often meet.
const PAGES: u64 = 1500;

/// The part of one thread: it tries to allocate random pages, stamps those that it gets, checks the
/// stamps, and frees the pages.
fn own_and_check(surface: &Surface, interface: usize, mut random: Random, deadline: Deadline) {
    let mut owned: Vec<(u64, u64)> = Vec::new();
    // At least once, however late the thread runs.
    loop {
        let ranges: Vec<(u64, u64)> =
            (0..1 + random.below(40)).map(|_| (random.below(PAGES), 1)).collect();
        let outcomes = surface.alloc(interface, &ranges);
        for ((page, _), (error, pages)) in ranges.iter().zip(outcomes) {
            assert!([0, -libc::ENOMEM].contains(&error), "{error}");
            if pages == 1 {
                let stamp = random.number();
                surface.stamp(*page, stamp);
                owned.push((*page, stamp));
            }
        }
        while owned.len() > 200 || (!owned.is_empty() && random.one_in(2)) {
            let leaving: Vec<(u64, u64)> =
                owned.drain(..owned.len().min(1 + random.below(60) as usize)).collect();
            leaving.iter().for_each(|(page, stamp)| surface.assert_stamped(*page, *stamp));
            let ranges: Vec<(u64, u64)> = leaving.iter().map(|(page, _)| (*page, 1)).collect();
            assert_eq!(surface.free(interface, &ranges), vec![(0, 1); ranges.len()]);
        }
        if deadline.is_over() {
            break;
        }
    }
    for (page, stamp) in owned {
        surface.assert_stamped(page, stamp);
        assert_eq!(surface.free(interface, &[(page, 1)]), [(0, 1)]);
    }
}

fn assert_owners_are_alone(flags: u64, threads: u32, random: &mut Random) {
    let surface = Plan::new(PAGES, 700).interfaces(threads).flags(flags).make();
    let deadline = Deadline::after_ms(900);
    std::thread::scope(|scope| {
        for interface in 0..threads as usize {
            let (surface, random) = (&surface, Random::new(random.number()));
            scope.spawn(move || own_and_check(surface, interface, random, deadline));
        }
    });
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.allocated), (0, stat.freed), "{stat:?}");
    assert!(stat.allocated > 0);
    println!("flags {flags:#x}, {threads} threads: {stat:?}");
}

/// For every kind of surface, and every path of frames and entries.
#[test]
fn an_allocated_page_belongs_to_one_thread() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let (pool, each, lock) = (exmap::NO_POOL, exmap::FLUSH_EACH, exmap::LOCK_TABLES);
    let (pinnable, zeros, stealing) = (exmap::PINNABLE, exmap::READS_ZEROS, exmap::STEALING);
    for flags in [0, pinnable, zeros, stealing, pool, each, lock, pool | each | lock, 0x7] {
        if !knows(flags) {
            continue;
        }
        assert_owners_are_alone(flags, 2, &mut random);
        assert_owners_are_alone(flags, 4, &mut random);
    }
}

/// Pages that threads store to while others allocate and free them.
const FEW: u64 = 48;

/// When a thread stores to a page that is just being allocated, the kernel reads the entry, and
/// writes it back unchanged. That write must not restore a page that was freed meanwhile.
#[test]
fn faults_do_not_restore_freed_pages() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS] {
        // In a table that the surface fills, and in one that it does not.
        for first in [500, 1900] {
            let surface = Plan::new(2000, FEW).interfaces(2).flags(flags).make();
            let stop = Stop::default();
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let (surface, stop) = (&surface, &stop);
                    let mut random = Random::new(thread);
                    scope.spawn(move || {
                        while !stop.is_said() {
                            let at = surface.mapping.page(first + random.below(FEW));
                            let _ = access::kernel_store(at, &[0xff; 8]);
                        }
                    });
                }
                let _at_end = stop.at_end();
                come_and_go(&surface, first);
            });
            assert!(surface.assert_counted().is_empty());
        }
    }
}

fn come_and_go(surface: &Surface, first: u64) {
    let deadline = Deadline::after_ms(1500);
    let pages: Vec<(u64, u64)> = (first..first + FEW).map(|page| (page, 1)).collect();
    let (all, mut rounds) = (vec![(0, 1); pages.len()], 0);
    for _ in deadline.rounds() {
        assert!(surface.alloc(0, &pages) == all, "a page was present in round {rounds}");
        assert!(surface.free(0, &pages) == all, "a page was absent in round {rounds}");
        rounds += 1;
        if rounds % 8 == 0 {
            // For a moment other pages have all frames. No store may reach them.
            assert_eq!(surface.alloc(1, &[(0, FEW)]), [(0, FEW as u16)]);
            (0..FEW).for_each(|page| surface.stamp(page, page));
            (0..FEW).for_each(|page| surface.assert_stamped(page, page));
            assert_eq!(surface.free(1, &[(0, FEW)]), [(0, FEW as u16)]);
        }
    }
    println!("{rounds} rounds");
}

/// One thread maps and unmaps the surface while other threads use it.
#[test]
fn a_surface_may_be_unmapped_while_it_is_used() {
    let Some(_turn) = turn() else { return };
    let Surface { vectors, mapping, exmap } = Plan::new(3000, 600).interfaces(2).make();
    mapping.unmap().unwrap();
    let (deadline, commands) = (Deadline::after_ms(4000), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for vector in &vectors {
            let (exmap, commands) = (&exmap, &commands);
            let mut random = Random::new(vector.interface().into());
            scope.spawn(move || {
                for _ in deadline.rounds() {
                    for index in 0..64 {
                        vector.set(index, Entry::new(random.below(3000), 1 + random.below(8)));
                    }
                    let command = random.pick(&[exmap::ALLOC, exmap::FREE]);
                    match vector.run(exmap, command, 64) {
                        Ok(_) => _ = commands.fetch_add(1, Ordering::Relaxed),
                        Err(error) => assert_eq!(error, Errno::NODEV),
                    }
                }
            });
        }
        let mut random = Random::new(7);
        for _ in deadline.rounds() {
            match exmap.map(3000) {
                Ok(mapping) => {
                    for _ in 0..random.below(40) {
                        let _ = access::store(mapping.page(random.below(3000)), 1);
                    }
                    mapping.unmap().unwrap();
                }
                // A command is still running.
                Err(error) => assert!([Errno::BUSY, Errno::NODEV].contains(&error), "{error}"),
            }
        }
    });
    let commands = commands.into_inner();
    println!("{commands} commands were carried out");
    assert!(commands > 0, "no command has met the surface");
    let mapping = exmap.map(3000).expect("a surface that nothing uses");
    let surface = Surface { vectors, mapping, exmap };
    let there = surface.assert_counted();
    assert_eq!(surface.free(0, &[(0, 3000)]), [(0, there.len() as u16)]);
    assert_eq!(surface.alloc(0, &[(0, 700)]), [(-libc::ENOMEM, 600)]);
}

/// Maps the surface and unmaps it again, as often as another process leaves it free.
fn map_and_unmap(exmap: &Exmap, deadline: Deadline) {
    for _ in deadline.rounds() {
        match exmap.map(PAGES) {
            Ok(mapping) => mapping.unmap().unwrap(),
            Err(error) => assert!([Errno::BUSY, Errno::NODEV].contains(&error), "{error}"),
        }
    }
}

/// A process unmaps the surface while its commands tell listeners, and another process maps it at
/// once.
#[test]
fn processes_may_take_turns_with_a_surface_in_use() {
    let Some(_turn) = turn() else { return };
    let Surface { vectors, mapping, exmap } = Plan::new(PAGES, 600).make();
    mapping.unmap().unwrap();
    drop(vectors);
    let deadline = Deadline::after_ms(4000);
    let user = || {
        // A process with two mounts may have other listeners, so commands tell them.
        let _other = Plan::new(PAGES, 10).make();
        let vector = exmap.vector(0).unwrap();
        std::thread::scope(|threads| {
            threads.spawn(|| map_and_unmap(&exmap, deadline));
            for command in [exmap::ALLOC, exmap::FREE].into_iter().cycle() {
                if deadline.is_over() {
                    break;
                }
                (0..64).for_each(|at| vector.set(at, Entry::new(8 * at as u64, 1)));
                if let Err(error) = vector.run(&exmap, command, 64) {
                    // No process has the surface, or the other one does.
                    assert!([Errno::NODEV, Errno::PERM].contains(&error), "{error}");
                }
            }
        });
        0
    };
    let rival = || {
        map_and_unmap(&exmap, deadline);
        0
    };
    // Its mappings keep listeners waiting for the lock of the file.
    let stranger = || {
        let Surface { mapping, exmap, .. } = Plan::new(PAGES, 10).make();
        mapping.unmap().unwrap();
        map_and_unmap(&exmap, deadline);
        0
    };
    let children = [Child::start(user), Child::start(rival), Child::start(stranger)];
    children.into_iter().for_each(|child| assert_eq!(child.wait(), End::Status(0)));
}

/// Other changes of the process' memory meanwhile: mappings next to the surface, and children.
#[test]
fn a_process_may_fork_and_map_while_pages_come_and_go() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(PAGES, 700).interfaces(2).make();
    let deadline = Deadline::after_ms(5000);
    let stop = Stop::default();
    std::thread::scope(|scope| {
        for interface in 0..2 {
            let surface = &surface;
            scope.spawn(move || {
                own_and_check(surface, interface, Random::new(interface as u64), deadline);
            });
        }
        scope.spawn(|| {
            while !stop.is_said() {
                let beside = Mapping::anonymous(None, 600 * PAGE).unwrap();
                access::store(beside.start(), 1).unwrap();
                access::store(beside.end() - 1, 1).unwrap();
            }
        });
        let _at_end = stop.at_end();
        for _ in deadline.rounds() {
            let child = Child::start(|| i32::from(surface.load(0).is_ok()));
            assert_eq!(child.wait(), End::Status(0), "a child has the surface");
        }
    });
    assert_eq!(surface.stat().resident, 0);
}

/// Several threads of a process create and close exmaps at once.
#[test]
fn exmaps_may_come_and_go_in_parallel() {
    let Some(_turn) = turn() else { return };
    let deadline = Deadline::after_ms(3000);
    let rounds = Mutex::new([0; 3]);
    std::thread::scope(|scope| {
        for index in 0..3 {
            let rounds = &rounds;
            scope.spawn(move || {
                for _ in deadline.rounds() {
                    let surface = Plan::new(600 + index as u64, 64).make();
                    surface.alloc(0, &[(0, 5), (590, 10)]);
                    surface.stamp(599, index as u64);
                    surface.assert_stamped(599, index as u64);
                    drop(surface);
                    rounds.lock().unwrap()[index] += 1;
                }
            });
        }
    });
    println!("rounds: {:?}", rounds.lock().unwrap());
}
