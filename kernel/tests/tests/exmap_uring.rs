//! Commands through `io_uring`, carried out at once or by a worker, and pages of a surface as its
//! registered buffers.
#![allow(clippy::unwrap_used)]

use io_uring::opcode::Nop;
use io_uring::squeue::Flags;
use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::threads::{Stop, wait_until};
use vellum_kernel_tests::uring::{Ring, by_worker, command, fixed, read};
use vellum_kernel_tests::{Mapping, PAGE, Plan, Surface, access, turn};
use vellum_uapi::exmap::{self, Entry};
use vellum_uapi::exmap_published::{OP_ALLOC, OP_FREE};

/// A part of the surface: a number of pages from this one on.
fn part(surface: &Surface, page: u64, pages: usize) -> (usize, usize) {
    (surface.mapping.page(page), pages * PAGE)
}

/// Commands with a range return bytes, also if a worker runs them.
#[test]
fn a_range_command_ends_with_bytes() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    let mut ring = Ring::new();
    for is_for_worker in [false, true] {
        let mut run = |interface, operation, part| {
            let entry = command(&surface.exmap, (interface, operation), part, false);
            ring.run(&if is_for_worker { by_worker(entry) } else { entry })
        };
        let bytes = |pages: i32| pages * PAGE as i32;
        let at = |page, pages| part(&surface, page, pages);
        assert_eq!(run(0, OP_ALLOC, at(0, 8)), bytes(8), "by a worker: {is_for_worker}");
        assert_eq!(run(0, OP_ALLOC, at(0, 8)), 0, "they are there");
        assert_eq!(run(0, OP_ALLOC, at(6, 4)), bytes(2));
        assert_eq!(run(0, OP_ALLOC, at(3, 0)), 0);
        assert_eq!(run(0, OP_ALLOC, at(20, 200)), -libc::ENOMEM);
        assert_eq!(run(0, OP_ALLOC, at(999, 2)), -libc::EFAULT, "it ends outside");
        assert_eq!(run(0, OP_ALLOC, at(1000, 1)), -libc::EINVAL, "it begins outside");
        assert_eq!(run(0, OP_ALLOC, (surface.mapping.page(9) + 1, PAGE)), -libc::EINVAL);
        assert_eq!(run(1, OP_ALLOC, at(0, 1)), -libc::EINVAL, "no such interface");
        assert_eq!(run(0, 9, at(0, 1)), -libc::EINVAL, "no such command");
        assert_eq!(run(0, OP_FREE, at(0, 10)), bytes(10));
        assert_eq!(run(0, OP_FREE, at(20, 200)), bytes(90));
        assert_eq!(surface.stat().resident, 0);
    }
}

/// A ring that polls is refused or served. It neither waits forever nor harms the kernel.
#[test]
fn a_ring_that_polls_does_no_harm() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    let mut ring = Ring::polled();
    for is_for_worker in [false, true] {
        for operation in [OP_ALLOC, OP_FREE] {
            let entry = command(&surface.exmap, (0, operation), part(&surface, 0, 8), false);
            let end = ring.run(&if is_for_worker { by_worker(entry) } else { entry });
            println!("by a worker: {is_for_worker}, {operation}: {end}");
            assert!([8 * PAGE as i32, -libc::EOPNOTSUPP].contains(&end), "{end}");
        }
    }
    drop(ring);
    surface.assert_works();
}

/// If a command returns a number of bytes, the commands linked to it still run.
#[test]
fn commands_linked_to_a_command_run() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    let mut ring = Ring::new();
    for is_for_worker in [false, true] {
        let entry = command(&surface.exmap, (0, OP_ALLOC), part(&surface, 0, 8), false);
        let flags = if is_for_worker { Flags::IO_LINK | Flags::ASYNC } else { Flags::IO_LINK };
        ring.start_linked(&[entry.flags(flags).user_data(1), Nop::new().build().user_data(2)]);
        let ends = ring.ends(2);
        assert_eq!(ends, [(1, 8 * PAGE as i32), (2, 0)], "by a worker: {is_for_worker}");
        assert_eq!(surface.free(0, &[(0, 8)]), [(0, 8)]);
    }
}

/// Entries in a registered buffer: the command returns how many have failed, and writes the results
/// into the entries.
#[test]
fn a_buffer_command_ends_with_a_count() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    let mut ring = Ring::new();
    let buffer = Mapping::anonymous(None, PAGE).unwrap();
    ring.register((buffer.start(), PAGE)).unwrap();
    for is_for_worker in [false, true] {
        let mut run = |operation, entries: &[(u64, u64)]| {
            for (index, &(page, count)) in entries.iter().enumerate() {
                let bytes = Entry::new(page, count).bits().to_le_bytes();
                access::kernel_store(buffer.start() + index * 8, &bytes).unwrap();
            }
            let part = (buffer.start(), entries.len() * 8);
            let entry = command(&surface.exmap, (0, operation), part, true);
            let failed = ring.run(&if is_for_worker { by_worker(entry) } else { entry });
            let result = |index: usize| {
                let bytes = access::kernel_load(buffer.start() + index * 8, 8).unwrap();
                let entry = Entry::from_bits(u64::from_le_bytes(bytes.try_into().unwrap()));
                (entry.result(), entry.pages())
            };
            (failed, (0..entries.len()).map(result).collect::<Vec<_>>())
        };
        assert_eq!(run(OP_ALLOC, &[(0, 3), (9, 1)]), (0, vec![(0, 3), (0, 1)]));
        let outside = (-libc::EFAULT, 0);
        let outcome = run(OP_ALLOC, &[(999, 2), (0, 3), (7, 0), (5000, 1)]);
        assert_eq!(outcome, (2, vec![outside, (0, 0), (0, 0), outside]));
        assert_eq!(run(OP_FREE, &[(0, 10)]), (0, vec![(0, 4)]));
    }
}

/// A worker waits for an interface that another thread is using.
#[test]
fn commands_for_a_busy_interface_complete() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(200_000, 60_000).make();
    let (stop, rounds) = (Stop::default(), 40);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let all: Vec<(u64, u64)> = (0..12).map(|index| (index * 4095, 4095)).collect();
            while !stop.is_said() {
                surface.alloc(0, &all);
                surface.free(0, &all);
            }
        });
        let _at_end = stop.at_end();
        let mut ring = Ring::new();
        for round in 0..rounds {
            // Some return bytes, some 0, some an error.
            let parts = [(100_000, 8), (100_000, 8), (199_999, 2), (100_008, 1), (100_003, 0)];
            for (index, (page, pages)) in parts.into_iter().enumerate() {
                let part = part(&surface, page, pages);
                let entry = command(&surface.exmap, (0, OP_ALLOC), part, false);
                ring.start(&entry.user_data(index as u64));
            }
            let mut ends = ring.ends(parts.len());
            ends.sort_unstable();
            let results: Vec<i32> = ends.into_iter().map(|(_, result)| result).collect();
            let bytes = 8 * PAGE as i32;
            // Workers complete in any order.
            assert!([[bytes, 0], [0, bytes]].contains(&[results[0], results[1]]), "round {round}");
            assert_eq!(results[2..], [-libc::EFAULT, PAGE as i32, 0], "round {round}");
            let entry = command(&surface.exmap, (0, OP_FREE), part(&surface, 100_000, 9), false);
            assert_eq!(ring.run(&by_worker(entry)), 9 * PAGE as i32);
        }
    });
}

/// Reads through the proxy, also by workers.
#[test]
fn reads_complete_inline_and_by_workers() {
    let Some(_turn) = turn() else { return };
    for backing in Backing::all(600) {
        let surface = Plan::new(600, 300).backing(&backing.file).make();
        let mut ring = Ring::new();
        for flags in [Flags::empty(), Flags::ASYNC] {
            for page in 0..40_u64 {
                let entry = read(&surface.exmap, part(&surface, page * 13, 1), 0);
                ring.start(&entry.clone().flags(flags).user_data(page));
                // Of two equal reads, one populates the pages, and the other does not change them.
                if page % 8 == 7 {
                    ring.start(&entry.user_data(1000 + page));
                }
            }
            let ends = ring.ends(45);
            let both: i32 = ends.iter().map(|(_, result)| *result).sum();
            assert!(ends.iter().all(|(_, result)| *result >= 0), "{ends:?}");
            assert_eq!(both, 40 * PAGE as i32, "{}: {ends:?}", backing.name);
            (0..40).for_each(|page| surface.assert_stamped(page * 13, page * 13));
            assert_eq!(surface.free(0, &[(0, 600)]), [(0, 40)]);
        }
    }
}

/// A pinnable surface may be a registered buffer if the kernel registers pages of files (6.12 does,
/// 6.1 does not).
#[test]
fn a_pinnable_surface_is_a_registered_buffer() {
    let Some(_turn) = turn() else { return };
    let backing = Backing::direct(100);
    let surface = Plan::new(1000, 100).flags(exmap::PINNABLE).make();
    assert_eq!(surface.alloc(0, &[(508, 8)]), [(0, 8)]);
    let mut ring = Ring::new();
    let buffer = part(&surface, 508, 8);
    match ring.register(buffer) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
            eprintln!("skipped: this kernel registers no pages of files");
            return;
        }
        Err(error) => panic!("{error}"),
    }
    let bytes = buffer.1 as i32;
    assert_eq!(ring.run(&fixed(&backing.file, buffer, 20 * PAGE as u64, false)), bytes);
    (0..8).for_each(|page| surface.assert_stamped(508 + page, 20 + page));
    // The process and the device see the same memory, even after the module has unlinked the
    // tables.
    std::fs::write("/proc/self/clear_refs", "4").unwrap();
    (0..8).for_each(|page| surface.stamp(508 + page, 900 + page));
    assert_eq!(ring.run(&fixed(&backing.file, buffer, 40 * PAGE as u64, true)), bytes);
    (0..8).for_each(|page| assert!(backing.stored(40 + page) == access::stamped(900 + page)));
    // Registered pages are not freed.
    assert_eq!(surface.free(0, &[(508, 8)]), [(-libc::EBUSY, 0)]);
    drop(ring);
    wait_until(|| surface.free(0, &[(508, 8)]) == [(0, 8)]);
    surface.assert_works();
}

#[test]
fn a_surface_that_is_not_pinnable_cannot_be_registered() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    surface.alloc(0, &[(0, 8)]);
    assert!(Ring::new().register(part(&surface, 0, 8)).is_err());
    assert_eq!(surface.free(0, &[(0, 8)]), [(0, 8)]);
}
