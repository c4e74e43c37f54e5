//! The pool: when it is empty, which thread gets a page, and how frames move between interfaces.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::threads::{Barrier, Deadline};
use vellum_kernel_tests::{Plan, knows, turn};
use vellum_uapi::exmap;

const ENOMEM: i32 = -libc::ENOMEM;

#[test]
fn an_empty_pool_is_an_error_and_populated_pages_stay() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(5000, 10).make();
    assert_eq!(surface.alloc(0, &[(0, 4), (1000, 20), (8, 1)]), [(0, 4), (ENOMEM, 6), (ENOMEM, 0)]);
    for page in [0, 3, 1000, 1005] {
        surface.stamp(page, page);
    }
    assert_eq!(surface.load(1006), Err(surface.fault(1006)));
    assert_eq!(surface.stat().resident, 10);
    // A present page needs no frame.
    assert_eq!(surface.alloc(0, &[(0, 4), (1000, 6), (4, 1)]), [(0, 0), (0, 0), (ENOMEM, 0)]);
    assert_eq!(surface.free(0, &[(1000, 2), (3, 1)]), [(0, 2), (0, 1)]);
    assert_eq!(surface.alloc(0, &[(4000, 4)]), [(ENOMEM, 3)]);
    for page in [0, 1005] {
        surface.assert_stamped(page, page);
    }
    assert_eq!(surface.free(0, &[(0, 4000), (4000, 10)]), [(0, 7), (0, 3)]);
    assert_eq!(surface.stat().resident, 0);
    assert_eq!(surface.alloc(0, &[(0, 10)]), [(0, 10)]);
}

#[test]
fn an_interface_may_take_frames_that_another_has_freed() {
    let Some(_turn) = turn() else { return };
    let frames = 8 * 512;
    for flags in [0, exmap::STEALING].into_iter().filter(|flags| knows(*flags)) {
        let surface = Plan::new(10_000, frames).interfaces(2).flags(flags).make();
        for round in 0..4 {
            assert_eq!(surface.alloc(0, &[(0, 4000)]), [(0, 4000)], "round {round}");
            assert_eq!(surface.free(1, &[(0, 4000)]), [(0, 4000)]);
        }
        // The interface that has freed frames last may keep a few of them.
        let (_, pages) = surface.alloc(0, &[(0, 4095)])[0];
        assert!(u64::from(pages) >= frames - 1024, "{pages} of {frames}, flags {flags:#x}");
        assert_eq!(surface.stat().resident, pages.into());
    }
}

#[test]
fn a_process_may_have_several_exmaps() {
    let Some(_turn) = turn() else { return };
    let surfaces = [(); 5].map(|()| Plan::new(3000, 600).interfaces(2).make());
    for (index, surface) in surfaces.iter().enumerate() {
        assert_eq!(surface.alloc(index % 2, &[(511, 2), (2000, 500)]), [(0, 2), (0, 500)]);
        surface.stamp(511, index as u64);
        surface.stamp(2499, index as u64 + 100);
    }
    for (index, surface) in surfaces.iter().enumerate() {
        surface.assert_stamped(511, index as u64);
        surface.assert_stamped(2499, index as u64 + 100);
        assert_eq!(surface.stat().resident, 502);
    }
    let [first, second, third, ..] = surfaces;
    drop(second);
    first.assert_works();
    third.assert_stamped(511, 2);
}

/// Two threads allocate the same pages. Each page goes to one of them.
#[test]
fn a_page_has_one_winner() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(4096, 2048).interfaces(2).make();
    let start = Barrier::new(2);
    for round in 0..40_u64 {
        // Single pages and runs, which take another path.
        let run = [1, 1, 2, 16][round as usize % 4];
        let ranges: Vec<(u64, u64)> = (0..512 / run).map(|at| (100 + at * run, run)).collect();
        let won = std::thread::scope(|scope| {
            let thread = |interface: usize| {
                let (surface, start, mut ranges) = (&surface, &start, ranges.clone());
                scope.spawn(move || {
                    if round % 2 == 1 && interface == 1 {
                        ranges.reverse();
                    }
                    start.wait();
                    let outcomes = surface.alloc(interface, &ranges);
                    assert!(outcomes.iter().all(|(error, _)| *error == 0), "{outcomes:?}");
                    outcomes.iter().map(|(_, pages)| u64::from(*pages)).sum::<u64>()
                })
            };
            let threads = [thread(0), thread(1)];
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(won[0] + won[1], 512, "{won:?} in round {round}");
        let stat = surface.stat();
        assert_eq!(stat.resident, 512);
        assert_eq!((stat.conflicts, stat.allocated), (512 * (round + 1), 512 * (round + 1)));
        let freed = surface.free(0, &[(100, 512)]);
        assert_eq!(freed, [(0, 512)]);
    }
    assert_eq!(surface.stat().resident, 0);
}

/// A thread that allocates or frees may have free frames for a moment. The pool is not empty for
/// another thread then.
#[test]
fn every_thread_finds_a_free_frame() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::STEALING].into_iter().filter(|flags| knows(*flags)) {
        // Each thread has one page at a time, and there is a frame for each.
        let surface = Plan::new(1 << 20, 4).interfaces(4).flags(flags).make();
        let deadline = Deadline::after_ms(2000);
        std::thread::scope(|scope| {
            for interface in 0..4 {
                let surface = &surface;
                scope.spawn(move || {
                    let mut page = interface as u64;
                    for _ in deadline.rounds() {
                        let placed = surface.alloc(interface, &[(page, 1)]);
                        assert_eq!(placed, [(0, 1)], "flags {flags:#x}");
                        assert_eq!(surface.free(interface, &[(page, 1)]), [(0, 1)]);
                        // The first rounds also allocate tables, which takes time.
                        page = (page + 512) % (1 << 20);
                    }
                });
            }
        });
        assert_eq!(surface.stat().resident, 0);
    }
}
