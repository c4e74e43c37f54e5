//! RESIZE: a pool grows and shrinks.
#![allow(clippy::unwrap_used)]

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::Stop;
use vellum_kernel_tests::{Exmap, Plan, Surface, Turn, knows, turn};
use vellum_uapi::exmap;

/// A turn, if pools can be resized, which came to the module together with a flag.
fn resize_turn() -> Option<Turn> {
    turn().filter(|_| knows(exmap::SHRINKS))
}

fn resize(exmap: &Exmap, frames: u64) -> Result<u64, Errno> {
    exmap.command(exmap::RESIZE, frames)
}

#[test]
fn a_pool_grows_and_shrinks() {
    let Some(_turn) = resize_turn() else { return };
    grow_and_shrink();
    let before = Memory::now();
    grow_and_shrink();
    before.assert_back();
}

fn grow_and_shrink() {
    for flags in [0, exmap::PINNABLE, exmap::STEALING, exmap::NO_POOL] {
        let surface = Plan::new(10_000, 10).flags(flags).make();
        // More frames than a bundle, fewer, hardly any, and more again.
        for (frames, range) in [(1100, (0, 1101)), (100, (0, 101)), (3, (50, 4)), (600, (0, 601))] {
            assert_eq!(resize(&surface.exmap, frames), Ok(0), "to {frames}, flags {flags:#x}");
            assert_eq!(surface.stat().frames, frames);
            let full = (-libc::ENOMEM, frames as u16);
            let before = surface.stat().refills;
            assert_eq!(surface.alloc(0, &[range]), [full], "{frames}, flags {flags:#x}");
            // The pool has all of them, so the call does not wait.
            let visits = surface.stat().refills - before;
            assert!(visits <= frames + 2, "{visits} visits for {frames} frames, flags {flags:#x}");
            let there = (range.0..range.0 + range.1).filter(|page| surface.is_there(*page));
            assert_eq!(there.count() as u64, frames);
            assert_eq!(surface.free(0, &[range]), [(0, frames as u16)]);
        }
    }
}

#[test]
fn pages_on_the_surface_stay() {
    let Some(_turn) = resize_turn() else { return };
    let surface = Plan::new(10_000, 1000).make();
    assert_eq!(surface.alloc(0, &[(0, 600)]), [(0, 600)]);
    (0..600).for_each(|page| surface.stamp(page, page));
    assert_eq!(resize(&surface.exmap, 100), Err(Errno::BUSY));
    let frames = surface.stat().frames;
    assert!((600..=1000).contains(&frames), "{frames} frames");
    (0..600).for_each(|page| surface.assert_stamped(page, page));
    assert_eq!(surface.free(0, &[(0, 600)]), [(0, 600)]);
    assert_eq!(resize(&surface.exmap, 100), Ok(0));
    assert_eq!(surface.alloc(0, &[(0, 200)]), [(-libc::ENOMEM, 100)]);
}

#[test]
fn impossible_sizes_are_refused() {
    let Some(_turn) = resize_turn() else { return };
    let surface = Plan::new(1000, 100).make();
    assert_eq!(resize(&surface.exmap, 0), Err(Errno::INVAL));
    for frames in [u64::MAX, 1 << 63, 1 << 52, 1 << 40, 1 << 24] {
        let refused = resize(&surface.exmap, frames).unwrap_err();
        assert!([Errno::NOMEM, Errno::INVAL].contains(&refused), "{refused}");
        assert_eq!(surface.stat().frames, 100);
    }
    assert_eq!(resize(&Exmap::open(), 10), Err(Errno::NODEV));
    surface.assert_works();
}

#[test]
fn a_user_gets_as_much_memory_as_may_be_locked() {
    let Some(_turn) = resize_turn() else { return };
    let (first, second) = (Exmap::open(), Exmap::open());
    in_child(move || {
        become_user(1 << 20);
        first.create(&plan(50, 1, 0)).unwrap();
        second.create(&plan(50, 1, 0)).unwrap();
        // An interface counts as 6 pages, so there are 244 for frames.
        for _ in 0..3 {
            assert_eq!(resize(&first, 190), Ok(0));
            assert_eq!(resize(&second, 60), Err(Errno::PERM));
            assert_eq!(resize(&first, 300), Err(Errno::PERM));
            assert_eq!(resize(&first, 10), Ok(0));
            assert_eq!(resize(&second, 234), Ok(0));
            assert_eq!(resize(&second, 50), Ok(0));
        }
    });
}

#[test]
fn a_pool_is_resized_while_it_is_used() {
    let Some(_turn) = resize_turn() else { return };
    let mut random = Random::of_this_run();
    for flags in [0, exmap::STEALING, exmap::SHRINKS] {
        let surface = Plan::new(5000, 1000).interfaces(2).flags(flags).make();
        let stop = Stop::default();
        std::thread::scope(|scope| {
            for interface in 0..2 {
                let (surface, stop, random) = (&surface, &stop, Random::new(random.number()));
                scope.spawn(move || allocate_and_free(surface, interface, stop, random));
            }
            let _at_end = stop.at_end();
            for _ in 0..50 {
                let outcome = resize(&surface.exmap, 1 + random.below(3000));
                assert!(matches!(outcome, Ok(0) | Err(Errno::BUSY)), "{outcome:?}");
                if flags & exmap::SHRINKS != 0 {
                    // The test has the kernel ask for all frames that the pool can free.
                    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
                }
            }
        });
        let there = surface.assert_counted().len();
        assert_eq!(surface.free(0, &[(0, 4000), (4000, 1000)]).len(), 2);
        let frames = surface.stat().frames;
        assert!(there as u64 <= frames);
        let (_, pages) = surface.alloc(0, &[(0, 4095)])[0];
        assert_eq!(u64::from(pages), frames, "flags {flags:#x}");
    }
}

fn allocate_and_free(surface: &Surface, interface: usize, stop: &Stop, mut random: Random) {
    while !stop.is_said() {
        let ranges: Vec<(u64, u64)> =
            (0..100).map(|_| (random.below(4990), 1 + random.below(9))).collect();
        surface.alloc(interface, &ranges);
        ranges.iter().for_each(|(page, _)| drop(surface.contents(*page)));
        surface.free(interface, &ranges);
    }
}
