//! Vectors: the module handles each entry by itself, and no entry makes it read or write other
//! memory.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop};
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, turn};
use vellum_uapi::exmap::{self, Entry};

const EINVAL: (i32, u16) = (-libc::EINVAL, 0);

#[test]
fn a_vector_may_be_full() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1 << 20, 1024).make();
    let ranges: Vec<(u64, u64)> = (0..512).map(|index| (index * 2039 % (1 << 20), 2)).collect();
    assert_eq!(surface.alloc(0, &ranges), vec![(0, 2); 512]);
    ranges.iter().for_each(|(page, _)| surface.store(*page, 1).unwrap());
    assert_eq!(surface.stat().resident, 1024);
    assert_eq!(surface.free(0, &ranges), vec![(0, 2); 512]);
    assert_eq!(surface.stat().resident, 0);
}

#[test]
fn the_longest_entry_works() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(10_000, 8190).make();
    let longest = exmap::ENTRY_PAGES;
    assert_eq!(surface.alloc(0, &[(1, longest), (5000, longest)]), [(0, 4095); 2]);
    assert_eq!(surface.stat().resident, 8190);
    assert_eq!(surface.free(0, &[(5000, longest), (1, longest)]), [(0, 4095); 2]);
}

#[test]
fn an_entry_may_come_twice_in_a_vector() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(100, 10).make();
    let ranges = [(5, 1), (5, 1), (4, 3), (5, 1)];
    assert_eq!(surface.alloc(0, &ranges), [(0, 1), (0, 0), (0, 2), (0, 0)]);
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.allocated, stat.conflicts), (3, 3, 3));
    assert_eq!(surface.free(0, &ranges), [(0, 1), (0, 0), (0, 2), (0, 0)]);
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.freed), (0, 3));
    // No frame is lost, and none is on the list twice.
    assert_eq!(surface.alloc(0, &[(20, 11)]), [(-libc::ENOMEM, 10)]);
    for page in 20..30 {
        surface.stamp(page, page);
    }
    (20..30).for_each(|page| surface.assert_stamped(page, page));
}

#[test]
fn ranges_that_are_not_within_the_surface_are_refused() {
    let Some(_turn) = turn() else { return };
    let pages = 1000;
    let surface = Plan::new(pages, 1000).make();
    let last = (1 << 52) - 1;
    // Pages whose addresses wrap around, to zero or into the kernel's half.
    let start = surface.mapping.start() as u64 >> 12;
    let (zero, kernel) = ((1 << 52) - start, (0xffff_ffff_8000_0000 >> 12) - start);
    let wrong = [
        (0, 0),
        (pages, 0),
        (pages, 1),
        (pages - 1, 2),
        (0, pages + 1),
        (1, pages),
        (last, 1),
        (last, 2),
        (last, 4095),
        (last - 4093, 4095),
        (1 << 51, 1),
        (1 << 36, 1),
        (zero, 1),
        (zero - 1, 2),
        (kernel, 1),
    ];
    for command in [exmap::ALLOC, exmap::FREE] {
        assert_eq!(surface.run(command, 0, &wrong), vec![EINVAL; wrong.len()]);
    }
    // The module still executes the other entries.
    for range in wrong {
        for command in [exmap::ALLOC, exmap::FREE] {
            let outcomes = surface.run(command, 0, &[(3, 1), range, (7, 2)]);
            assert_eq!(outcomes, [(0, 1), EINVAL, (0, 2)], "{range:?}");
        }
    }
    assert_eq!(surface.stat().resident, 0);
    surface.assert_works();
}

#[test]
fn a_command_names_an_interface_and_its_entries() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(100, 10).interfaces(3).make();
    for command in [exmap::ALLOC, exmap::FREE] {
        for argument in [
            exmap::vector(0, 513),
            exmap::vector(0, 0xffff),
            exmap::vector(0, 1 << 16),
            exmap::vector(0, 1 << 32),
            exmap::vector(0, (1 << 47) + 1),
            exmap::vector(3, 1),
            exmap::vector(3, 0),
            exmap::vector(255, 1),
            exmap::vector(256, 1),
            exmap::vector(0xffff, 512),
            u64::MAX,
        ] {
            let refused = surface.exmap.command(command, argument);
            assert_eq!(refused, Err(Errno::INVAL), "{command:#x} of {argument:#x}");
        }
        assert_eq!(surface.exmap.command(command, exmap::vector(2, 0)), Ok(0));
    }
    assert_eq!(surface.stat().resident, 0);
}

#[test]
fn each_interface_has_its_own_vector() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(10_000, 1024).interfaces(256).make();
    for interface in 0..256 {
        surface.vectors[interface].set(0, Entry::new(interface as u64 * 3, 1));
    }
    for vector in &surface.vectors {
        assert_eq!(vector.get(0).page(), u64::from(vector.interface()) * 3);
        assert_eq!(vector.run(&surface.exmap, exmap::ALLOC, 1), Ok(0));
        assert_eq!((vector.get(0).result(), vector.get(0).pages()), (0, 1));
    }
    assert_eq!(surface.stat().resident, 256);
    for interface in [256, 257, 1 << 20, (1 << 48) - 1] {
        let offset = exmap::offset_interface(interface);
        let mapped = Mapping::of_device(surface.exmap.as_fd(), offset, PAGE);
        assert!(mapped.is_err(), "interface {interface:#x}");
    }
}

/// An unmapped vector is full of zeros, which are ranges without pages.
#[test]
fn a_vector_need_not_be_mapped() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(10, 2, 0);
    let surface = exmap.map(100).unwrap();
    assert_eq!(exmap.command(exmap::ALLOC, exmap::vector(1, 512)), Ok(512));
    let vector = exmap.vector(1).unwrap();
    assert_eq!((vector.get(0).result(), vector.get(511).pages()), EINVAL);
    // The vector is the same wherever it is mapped, and outlives its mappings.
    let second = exmap.vector(1).unwrap();
    vector.set(3, Entry::new(5, 1));
    assert_eq!(second.get(3), Entry::new(5, 1));
    vector.unmap().unwrap();
    second.set(0, Entry::new(6, 1));
    second.unmap().unwrap();
    assert_eq!(exmap.command(exmap::ALLOC, exmap::vector(1, 1)), Ok(0));
    assert_eq!(exmap.stat().unwrap().resident, 1);
    drop(surface);
}

/// A thread writes into the vector while the kernel works through it. The kernel reads each entry
/// once, checks it and then uses it; it does not read it again after the check.
#[test]
fn a_vector_may_change_while_it_is_read() {
    let Some(_turn) = turn() else { return };
    let pages = 5000;
    let surface = Plan::new(pages, 2000).make();
    let (vector, stop) = (&surface.vectors[0], Stop::default());
    let mut random = Random::of_this_run();
    let mut other = Random::new(random.number());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.is_said() {
                let entry = match other.one_in(4) {
                    true => Entry::from_bits(other.number()),
                    false => Entry::new(other.below(pages + 10), other.below(30)),
                };
                vector.set(other.below(512) as usize, entry);
            }
        });
        let _at_end = stop.at_end();
        let deadline = Deadline::after_ms(4000);
        for _ in deadline.rounds() {
            let command = random.pick(&[exmap::ALLOC, exmap::FREE]);
            let failed = vector.run(&surface.exmap, command, 512).unwrap();
            assert!(failed <= 512);
        }
    });
    let stat = surface.stat();
    assert_eq!(stat.allocated - stat.freed, stat.resident, "{stat:?}");
    let whole = [(0, 4000), (4000, 1000)];
    let freed: u64 = surface.free(0, &whole).iter().map(|(_, pages)| u64::from(*pages)).sum();
    assert_eq!(freed, stat.resident);
    assert_eq!(surface.alloc(0, &[(0, 2001)]), [(-libc::ENOMEM, 2000)]);
    assert_eq!(surface.free(0, &[(0, 2001)]), [(0, 2000)]);
}
