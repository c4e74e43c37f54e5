//! A virtual machine whose memory is a surface: it has translations of its own, and must lose them
//! with the frames. A free frame may hold the numbers of others, and another page's contents soon.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::machine::Machine;
use vellum_kernel_tests::threads::Stop;
use vellum_kernel_tests::{Plan, Surface, TABLE_PAGES, access, turn, turn_with};
use vellum_uapi::exmap::{self, Move};

/// What is the first word of a page for the program.
fn word(surface: &Surface, page: u64) -> u16 {
    let bytes = access::kernel_load(surface.mapping.page(page), 2).unwrap();
    u16::from_le_bytes(bytes.try_into().unwrap())
}

#[test]
fn it_loses_what_is_freed() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::PINNABLE, exmap::STEALING, exmap::NO_POOL, exmap::LOCK_TABLES] {
        let surface = Plan::new(1000, 700).flags(flags).make();
        let Some(mut machine) = Machine::new(&surface.mapping) else { return };
        // One page, a few, so many that everything is flushed, and all vectors of a lane.
        let vectors: [&[(u64, u64)]; 4] =
            [&[(3, 1)], &[(3, 1), (9, 2)], &[(1, 100), (200, 1)], &[(0, 600)]];
        for ranges in vectors {
            surface.alloc(0, ranges);
            machine.store(3, 0x1234).unwrap();
            assert_eq!((word(&surface, 3), machine.load(3).unwrap()), (0x1234, 0x1234));

            surface.free(0, ranges);
            assert!(machine.load(3).is_err(), "flags {flags:#x}, {ranges:?}: it is still read");
            assert!(machine.store(3, 0x4321).is_err(), "{ranges:?}: it is still written");
        }
        // All frames are elsewhere, whole and unharmed.
        assert_eq!(surface.alloc(0, &[(16, 700)]), [(0, 700)]);
        (16..716).for_each(|page| surface.stamp(page, page));
        assert!(machine.load(3).is_err());
        (16..716).for_each(|page| surface.assert_stamped(page, page));
        assert_eq!(surface.free(0, &[(16, 700)]), [(0, 700)]);
        assert_eq!(surface.exmap.command(exmap::RESIZE, 100), Ok(0));
        drop(machine);
        surface.assert_works();
        surface.assert_counted();
    }
}

#[test]
fn it_follows_what_is_moved() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 8).make();
    let Some(mut machine) = Machine::new(&surface.mapping) else { return };
    surface.alloc(0, &[(1, 1)]);
    machine.store(1, 0x1234).unwrap();
    let size = size_of::<Move>() as u32;
    let request = Move { size, interface: 0, from: 1, to: 9, count: 1 };
    let address = std::ptr::from_ref(&request).expose_provenance();
    assert_eq!(surface.exmap.pass(exmap::MOVE, address), Ok(1));
    assert!(machine.load(1).is_err(), "it is still at its old place");
    assert_eq!(machine.load(9).unwrap(), 0x1234);
}

#[test]
fn it_sees_frames_that_come_where_zeros_were() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 8).flags(exmap::READS_ZEROS).make();
    let Some(mut machine) = Machine::new(&surface.mapping) else { return };
    assert_eq!(machine.load(5).unwrap(), 0);
    assert!(machine.store(5, 1).is_err(), "zeros are not written");
    surface.alloc(0, &[(5, 1)]);
    surface.store(5, 7).unwrap();
    assert_eq!(machine.load(5).unwrap(), 7);
    machine.store(5, 0x1234).unwrap();
    assert_eq!(word(&surface, 5), 0x1234);
    surface.free(0, &[(5, 1)]);
    assert_eq!(machine.load(5).unwrap(), 0, "there are zeros again");
}

#[test]
fn it_loses_two_mebibytes() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let surface = Plan::new(4 * TABLE_PAGES, 600).blocks(2).make();
    let Some(mut machine) = Machine::new(&surface.mapping) else { return };
    surface.alloc(0, &[(0, TABLE_PAGES)]);
    if machine.store(3, 0x1234).is_err() {
        eprintln!("left out: this kernel gives virtual machines no such leaves of 2 MiB");
        return;
    }
    assert_eq!(word(&surface, 3), 0x1234);
    // A part of it, the rest, and all of it at once.
    surface.free(0, &[(3, 1)]);
    assert!(machine.load(3).is_err());
    machine.store(4, 0x1234).unwrap();
    surface.free(0, &[(0, TABLE_PAGES)]);
    assert!(machine.load(4).is_err());
    surface.alloc(0, &[(0, TABLE_PAGES)]);
    machine.store(3, 0x1234).unwrap();
    surface.free(0, &[(0, TABLE_PAGES)]);
    assert!(machine.load(3).is_err());
}

/// What machines are told begins and ends for the same ones: those that come in between hear
/// neither.
#[test]
fn machines_come_while_pages_go() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 8).interfaces(2).make();
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                surface.alloc(1, &[(1, 1)]);
                surface.free(1, &[(1, 1)]);
            }
        });
        surface.alloc(0, &[(2, 1)]);
        for _ in 0..100 {
            let Some(mut machine) = Machine::new(&surface.mapping) else { return };
            machine.store(2, 0x1234).unwrap();
            assert_eq!((word(&surface, 2), machine.load(2).unwrap()), (0x1234, 0x1234));
        }
    });
}
