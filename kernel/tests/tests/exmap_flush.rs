//! TLB flushes: once for a vector that frees pages, never for one that populates them, and always
//! before a frame gets another page.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_kernel_tests::counters::Interrupts;
use vellum_kernel_tests::threads::{Place, Stop, processors, stay_on, wait_until};
use vellum_kernel_tests::{Plan, Surface, knows, turn, turn_with};
use vellum_uapi::exmap::{self, Entry};

/// Pages of the surface; those of the second half belong to the other thread.
const PAGES: u64 = 1 << 16;
const FRAMES: u64 = 20_000;
const VECTORS: u64 = 30;
const ROUNDS: usize = 20;

/// The cost of a number of vectors while another processor is busy with the surface.
struct Cost {
    interrupts: Interrupts,
    flushes: u64,
}

/// Runs `work` on one processor while a thread on another one accesses the surface all the time, so
/// that a flush must interrupt that processor.
fn beside_a_busy_processor(surface: &Surface, work: impl FnOnce() -> Cost) -> Cost {
    let (stop, rounds) = (Stop::default(), AtomicU64::new(0));
    let _place = Place::on(0);
    assert_eq!(surface.alloc(1, &[(PAGES / 2, 8)]), [(0, 8)]);
    let cost = std::thread::scope(|scope| {
        scope.spawn(|| {
            stay_on(1);
            while !stop.is_said() {
                for page in PAGES / 2..PAGES / 2 + 8 {
                    surface.store(page, 3).unwrap();
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _at_end = stop.at_end();
        wait_until(|| rounds.load(Ordering::Relaxed) > 10);
        let cost = work();
        let now = rounds.load(Ordering::Relaxed);
        wait_until(|| rounds.load(Ordering::Relaxed) > now);
        cost
    });
    assert_eq!(surface.free(1, &[(PAGES / 2, 8)]), [(0, 8)]);
    cost
}

/// `VECTORS` vectors of one command, each of 512 pages that are far from each other.
fn carry_out(surface: &Surface, command: u32) -> Cost {
    let vector = &surface.vectors[0];
    let flushes = surface.stat().flushes;
    let before = Interrupts::now();
    for round in 0..VECTORS {
        for index in 0..512 {
            vector.set(index as usize, Entry::new(index * 61 % 32_768 + round, 1));
        }
        assert_eq!(vector.run(&surface.exmap, command, 512), Ok(0));
    }
    let interrupts = before.since();
    Cost { interrupts, flushes: surface.stat().flushes - flushes }
}

/// The kernel also interrupts for other reasons, the more often the longer a round takes, so one of
/// several rounds must succeed.
#[track_caller]
fn within_some_rounds(what: &str, mut round: impl FnMut() -> Result<(), String>) {
    let outcomes: Vec<String> = (0..ROUNDS).map_while(|_| round().err()).collect();
    assert!(outcomes.len() < ROUNDS, "{what}: {outcomes:?}");
}

#[test]
fn populating_flushes_nothing_and_freeing_once_a_vector() {
    let Some(_turn) = turn() else { return };
    if processors() < 2 {
        eprintln!("skipped: one processor");
        return;
    }
    let surface = Plan::new(PAGES, FRAMES).interfaces(2).make();
    within_some_rounds("ALLOC and FREE with a busy processor", || {
        let placed = beside_a_busy_processor(&surface, || carry_out(&surface, exmap::ALLOC));
        let taken = beside_a_busy_processor(&surface, || carry_out(&surface, exmap::FREE));
        println!("{VECTORS} ALLOC: {:?}, {} flushes", placed.interrupts, placed.flushes);
        println!("{VECTORS} FREE: {:?}, {} flushes", taken.interrupts, taken.flushes);
        assert_eq!(placed.flushes, 0);
        assert!(taken.flushes <= VECTORS, "{} flushes", taken.flushes);
        let placing = placed.interrupts.shootdowns.iter().sum::<u64>();
        let taking = taken.interrupts.shootdowns.into_iter().max().unwrap_or(0);
        // A flush may be a function call, too. Other code also calls functions, but less often.
        let calls_placing = placed.interrupts.calls.into_iter().max().unwrap_or(0);
        let calls_taking = taken.interrupts.calls.into_iter().max().unwrap_or(0);
        let few = VECTORS / 2;
        let is_good = placing == 0 && taking <= VECTORS;
        let is_quiet = calls_placing < few && calls_taking <= VECTORS + few;
        if is_good && is_quiet {
            Ok(())
        } else {
            Err(format!("{placing} and {taking} shootdowns, {calls_placing} and {calls_taking}"))
        }
    });
}

#[test]
fn flushing_for_every_entry_is_possible() {
    let Some(_turn) = turn_with(exmap::FLUSH_EACH) else { return };
    let surface = Plan::new(100, 64).flags(exmap::FLUSH_EACH).make();
    let ranges: Vec<(u64, u64)> = (0..8).map(|index| (index * 10, 3)).collect();
    surface.alloc(0, &ranges);
    assert_eq!(surface.stat().flushes, 0);
    assert_eq!(surface.free(0, &ranges), vec![(0, 3); 8]);
    assert_eq!(surface.stat().flushes, 8);
}

/// The two places of a single frame.
const HERE: u64 = 3;
const THERE: u64 = 700;

/// The frame moves back and forth while another thread stores to the first place as long as it can.
/// No such store may appear at the other place.
#[test]
fn stores_do_not_follow_a_frame() {
    let Some(_turn) = turn() else { return };
    let kinds = [0, exmap::READS_ZEROS, exmap::PINNABLE, exmap::LOCK_TABLES];
    for flags in kinds.into_iter().filter(|flags| knows(*flags)) {
        let surface = Plan::new(1000, 1).flags(flags).make();
        let (stop, stores) = (Stop::default(), AtomicU64::new(0));
        let _place = Place::on(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                stay_on(1);
                while !stop.is_said() {
                    if surface.store(HERE, 0xbb).is_ok() {
                        stores.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            let _at_end = stop.at_end();
            let wait = || {
                let now = stores.load(Ordering::Relaxed);
                wait_until(|| stores.load(Ordering::Relaxed) > now + 20);
            };
            for round in 0..300 {
                assert_eq!(surface.alloc(0, &[(HERE, 1)]), [(0, 1)]);
                wait();
                assert_eq!(surface.free(0, &[(HERE, 1)]), [(0, 1)]);
                assert_eq!(surface.alloc(0, &[(THERE, 1)]), [(0, 1)]);
                surface.store(THERE, 0xaa).unwrap();
                for _ in 0..200 {
                    assert_eq!(surface.load(THERE), Ok(0xaa), "round {round}, flags {flags:#x}");
                }
                assert_eq!(surface.free(0, &[(THERE, 1)]), [(0, 1)]);
            }
        });
    }
}

/// The same for loads: a store at one place is never loaded at the other.
#[test]
fn loads_do_not_follow_a_frame() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::READS_ZEROS, exmap::PINNABLE] {
        let surface = Plan::new(1000, 1).flags(flags).make();
        let (stop, loads) = (Stop::default(), AtomicU64::new(0));
        let is_elsewhere = AtomicBool::new(false);
        let _place = Place::on(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                stay_on(1);
                while !stop.is_said() {
                    let before = is_elsewhere.load(Ordering::SeqCst);
                    let found = surface.load(HERE);
                    let after = is_elsewhere.load(Ordering::SeqCst);
                    // While the frame is at the other place, the page is absent, or reads as zeros.
                    if before && after {
                        assert!(matches!(found, Err(_) | Ok(0)), "{found:?}, flags {flags:#x}");
                    } else if found == Ok(0x11) {
                        loads.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            let _at_end = stop.at_end();
            for _ in 0..300 {
                assert_eq!(surface.alloc(0, &[(HERE, 1)]), [(0, 1)]);
                surface.store(HERE, 0x11).unwrap();
                let now = loads.load(Ordering::Relaxed);
                wait_until(|| loads.load(Ordering::Relaxed) > now + 20);
                assert_eq!(surface.free(0, &[(HERE, 1)]), [(0, 1)]);
                is_elsewhere.store(true, Ordering::SeqCst);
                assert_eq!(surface.alloc(0, &[(THERE, 1)]), [(0, 1)]);
                for value in 1..100 {
                    surface.store(THERE, value | 0x80).unwrap();
                }
                is_elsewhere.store(false, Ordering::SeqCst);
                assert_eq!(surface.free(0, &[(THERE, 1)]), [(0, 1)]);
            }
        });
    }
}
