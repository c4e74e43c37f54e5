//! The surface: how it is mapped, what a page is with a frame and without one, and where the frames
//! come from.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd as _;
use std::sync::Barrier;

use rustix::io::Errno;
use vellum_kernel_tests::access::{self, kernel_load, kernel_store};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, TABLE_PAGES, turn};
use vellum_uapi::exmap::{self, Entry};

const ENOMEM: i32 = -libc::ENOMEM;

#[test]
fn pages_come_zeroed_hold_what_is_stored_and_go() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(1000, 100).make();
    assert_eq!(surface.alloc(0, &[(7, 1), (500, 20)]), [(0, 1), (0, 20)]);
    for page in [7, 500, 511, 512, 519] {
        assert_eq!(surface.contents(page).unwrap(), vec![0; PAGE], "page {page}");
        surface.stamp(page, page);
    }
    for page in [7, 500, 511, 512, 519] {
        surface.assert_stamped(page, page);
    }
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.allocated, stat.freed), (21, 21, 0));
    assert_eq!((stat.frames, stat.surface, stat.interfaces), (100, 1000, 1));
    assert_eq!(surface.free(0, &[(500, 20), (7, 1)]), [(0, 20), (0, 1)]);
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.freed), (0, 21));
    surface.assert_works();
}

#[test]
fn a_page_without_a_frame_is_a_fault_for_program_and_kernel() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(600, 4).make();
    for page in [0, 1, 511, 512, 599] {
        for _ in 0..2 {
            assert_eq!(surface.load(page), Err(surface.fault(page)));
            assert_eq!(surface.store(page, 1), Err(surface.fault(page)));
            assert_eq!(kernel_load(surface.mapping.page(page), 8), Err(Errno::FAULT));
            assert_eq!(kernel_store(surface.mapping.page(page), b"8"), Err(Errno::FAULT));
        }
    }
    assert_eq!(surface.stat().resident, 0);
    assert_eq!(surface.alloc(0, &[(1, 1)]), [(0, 1)]);
    assert_eq!((surface.load(1), surface.store(1, 9), surface.load(1)), (Ok(0), Ok(()), Ok(9)));
    assert_eq!(surface.load(0), Err(surface.fault(0)));
    assert_eq!(surface.load(2), Err(surface.fault(2)));
}

#[test]
fn reads_of_missing_pages_give_zeros_if_asked_for() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(2000, 8).flags(exmap::READS_ZEROS).make();
    for page in [0, 512, 1999] {
        assert_eq!(surface.load(page), Ok(0));
        assert_eq!(surface.contents(page).unwrap(), vec![0; PAGE]);
        assert_eq!(surface.store(page, 1), Err(surface.fault(page)), "a store to page {page}");
        assert_eq!(kernel_store(surface.mapping.page(page), b"x"), Err(Errno::FAULT));
        assert_eq!(surface.load(page), Ok(0));
        assert!(!surface.is_there(page));
    }
    let stat = surface.stat();
    assert_eq!((stat.resident, stat.allocated), (0, 0), "zeros are no frames");
    assert_eq!(surface.free(0, &[(0, 1), (512, 1)]), [(0, 0), (0, 0)], "nothing to be freed");
    assert_eq!(surface.load(512), Ok(0));
}

/// Zeros that were read are no page: a frame takes their place, for all threads.
#[test]
fn a_frame_takes_the_place_of_zeros() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(2000, 8).flags(exmap::READS_ZEROS).make();
    let ready = Barrier::new(2);
    for round in 1..=50_u8 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(surface.load(600), Ok(0));
                ready.wait();
                ready.wait();
                // Its processor has seen zeros there.
                assert_eq!(surface.store(600, round), Ok(()));
                ready.wait();
                ready.wait();
                assert_eq!(surface.load(600), Ok(0));
            });
            assert_eq!(surface.load(600), Ok(0));
            ready.wait();
            assert_eq!(surface.alloc(0, &[(600, 1)]), [(0, 1)]);
            ready.wait();
            ready.wait();
            assert_eq!(surface.load(600), Ok(round), "what the other thread stored");
            assert_eq!(surface.free(0, &[(600, 1)]), [(0, 1)]);
            ready.wait();
        });
    }
    assert_eq!(surface.stat().resident, 0);
}

#[test]
fn there_is_one_surface_at_a_time() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(100, 10).make();
    assert_eq!(surface.exmap.map(100).unwrap_err(), Errno::BUSY);
    assert_eq!(surface.exmap.map(1).unwrap_err(), Errno::BUSY);
    surface.assert_works();
}

/// Neither a table's end nor a directory's need be the surface's end.
#[test]
fn a_surface_may_have_any_length() {
    let Some(_turn) = turn() else { return };
    let gib = 1 << 18;
    for pages in [1, 2, 511, 512, 513, 1023, gib - 1, gib, gib + 1, 16 * gib + 16, 300 * gib + 5] {
        let surface = Plan::new(pages, 64).make();
        assert_eq!(surface.stat().surface, pages);
        let around = |page: u64| [page.saturating_sub(1), page, page + 1];
        let edges = [0, TABLE_PAGES, gib, pages / 2, pages - 1];
        let mut chosen: Vec<u64> = edges.into_iter().flat_map(around).collect();
        chosen.retain(|page| *page < pages);
        chosen.sort_unstable();
        chosen.dedup();
        let ranges: Vec<(u64, u64)> = chosen.iter().map(|page| (*page, 1)).collect();
        assert_eq!(surface.alloc(0, &ranges), vec![(0, 1); ranges.len()], "{pages} pages");
        chosen.iter().for_each(|page| surface.stamp(*page, *page));
        chosen.iter().for_each(|page| surface.assert_stamped(*page, *page));
        assert_eq!(surface.stat().resident, chosen.len() as u64);
        assert_eq!(surface.free(0, &ranges), vec![(0, 1); ranges.len()], "{pages} pages");
        assert_eq!(surface.alloc(0, &[(pages, 1), (pages - 1, 2)]), [(-libc::EINVAL, 0); 2]);
        let fault = access::load(surface.mapping.page(pages - 1)).unwrap_err();
        assert_eq!(fault, surface.fault(pages - 1));
        assert_eq!(surface.stat().resident, 0);
    }
}

/// A range that crosses tables and directories is as good as one that does not.
#[test]
fn a_range_may_cross_tables() {
    let Some(_turn) = turn() else { return };
    let gib = 1 << 18;
    let surface = Plan::new(2 * gib, 4095).make();
    for start in [0, 511, 100, gib - 1, gib - 2048] {
        assert_eq!(surface.alloc(0, &[(start, 4095)]), [(0, 4095)], "from {start}");
        for page in [start, start + 511, start + 512, start + 4094] {
            assert_eq!(surface.store(page, 1), Ok(()));
        }
        assert_eq!(surface.free(0, &[(start, 4095)]), [(0, 4095)], "from {start}");
    }
    assert_eq!(surface.stat().resident, 0);
}

/// Whatever is mapped behind a surface that ends in the middle of a table stays what it is.
#[test]
fn memory_right_beside_a_surface_is_not_the_surfaces() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(700, 700).make();
    let end = surface.mapping.end();
    let Ok(beside) = Mapping::anonymous(Some(end), 8 * PAGE) else {
        println!("the rest of the table is kept free");
        return;
    };
    kernel_store(beside.start(), &access::stamped(1)).unwrap();
    assert_eq!(surface.alloc(0, &[(0, 700)]), [(0, 700)]);
    surface.stamp(699, 2);
    assert_eq!(kernel_load(end, PAGE).unwrap(), access::stamped(1));
    assert_eq!(surface.free(0, &[(0, 700)]), [(0, 700)]);
    assert_eq!(kernel_load(end, PAGE).unwrap(), access::stamped(1));
    assert_eq!(surface.alloc(0, &[(699, 1)]), [(0, 1)]);
    sys::madvise(beside.start(), PAGE, libc::MADV_DONTNEED).unwrap();
    assert_eq!(kernel_load(end, PAGE).unwrap(), vec![0; PAGE]);
    surface.stamp(699, 3);
    let (vectors, mapping, exmap) = (surface.vectors, surface.mapping, surface.exmap);
    kernel_store(beside.start(), &access::stamped(4)).unwrap();
    mapping.unmap().unwrap();
    drop((vectors, exmap));
    assert_eq!(kernel_load(end, PAGE).unwrap(), access::stamped(4));
}

#[test]
fn a_fixed_address_has_to_suit_the_tables() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(10, 1, 0);
    let table = TABLE_PAGES as usize * PAGE;
    let room = Mapping::anonymous(None, 8 << 30).unwrap();
    let aligned = room.start().next_multiple_of(1 << 30);
    let request = |address| Request {
        address,
        length: 700 * PAGE,
        protection: sys::READ_WRITE,
        flags: libc::MAP_SHARED | libc::MAP_FIXED,
        fd: Some(exmap.as_fd()),
        offset: exmap::OFFSET_SURFACE,
    };
    for wrong in [PAGE, table / 2, table - PAGE, table + PAGE] {
        assert_eq!(sys::mmap(request(aligned + wrong)), Err(Errno::INVAL), "{wrong:#x}");
    }
    let surface = Mapping::new(request(aligned + table)).unwrap();
    assert_eq!(surface.start(), aligned + table);
    let vector = exmap.vector(0).unwrap();
    vector.set(0, Entry::new(600, 1));
    assert_eq!(vector.run(&exmap, exmap::ALLOC, 1), Ok(0));
    assert_eq!(access::store(surface.page(600), 1), Ok(()));
    surface.leave();
}

#[test]
fn a_surface_is_shared_writable_and_holds_no_code() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(10, 1, 0);
    let request = |protection, flags| Request {
        address: 0,
        length: 100 * PAGE,
        protection,
        flags,
        fd: Some(exmap.as_fd()),
        offset: exmap::OFFSET_SURFACE,
    };
    let (both, shared) = (sys::READ_WRITE, libc::MAP_SHARED);
    for (protection, flags) in [
        (both, libc::MAP_PRIVATE),
        (both | libc::PROT_EXEC, shared),
        (libc::PROT_READ, shared),
        (libc::PROT_READ, libc::MAP_PRIVATE),
        (libc::PROT_EXEC, shared),
        (both, shared | libc::MAP_HUGETLB),
    ] {
        let mapped = sys::mmap(request(protection, flags));
        assert!(mapped.is_err(), "protection {protection}, flags {flags:#x}");
    }
    // None of them has taken the place of a right one.
    let surface = Mapping::new(request(both, shared)).unwrap();
    assert_eq!(exmap.stat().unwrap().surface, 100);
    drop(surface);
}

#[test]
fn a_pool_comes_before_the_surface_and_once() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::open();
    assert_eq!(exmap.command(exmap::ALLOC, exmap::vector(0, 1)), Err(Errno::NODEV));
    assert!(exmap.vector(0).is_err(), "there are no interfaces yet");
    exmap.create(&plan(10, 2, 0)).unwrap();
    assert_eq!(exmap.create(&plan(10, 2, 0)), Err(Errno::BUSY));
    assert_eq!(exmap.command(exmap::ALLOC, exmap::vector(0, 1)), Err(Errno::NODEV));
    let surface = exmap.map(5).unwrap();
    assert_eq!(exmap.create(&plan(10, 2, 0)), Err(Errno::BUSY));
    assert_eq!(exmap.command(exmap::ALLOC, exmap::vector(0, 0)), Ok(0));
    drop(surface);
}

#[test]
fn an_empty_pool_is_said_and_what_was_placed_stays() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(5000, 10).make();
    assert_eq!(surface.alloc(0, &[(0, 4), (1000, 20), (8, 1)]), [(0, 4), (ENOMEM, 6), (ENOMEM, 0)]);
    for page in [0, 3, 1000, 1005] {
        surface.stamp(page, page);
    }
    assert_eq!(surface.load(1006), Err(surface.fault(1006)));
    assert_eq!(surface.stat().resident, 10);
    // What is there needs no frame.
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
fn what_one_interface_frees_another_may_take() {
    let Some(_turn) = turn() else { return };
    let frames = 8 * 512;
    for flags in [0, exmap::STEALING] {
        let surface = Plan::new(10_000, frames).interfaces(2).flags(flags).make();
        for round in 0..4 {
            assert_eq!(surface.alloc(0, &[(0, 4000)]), [(0, 4000)], "round {round}");
            assert_eq!(surface.free(1, &[(0, 4000)]), [(0, 4000)]);
        }
        // A few frames may be kept by the interface that has freed them last.
        let (_, pages) = surface.alloc(0, &[(0, 4095)])[0];
        assert!(u64::from(pages) >= frames - 1024, "{pages} of {frames}, flags {flags:#x}");
        assert_eq!(surface.stat().resident, pages.into());
    }
}

#[test]
fn one_process_may_have_several() {
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

/// Two threads go for the same pages; each page is given to one of them.
#[test]
fn a_page_has_one_winner() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(4096, 2048).interfaces(2).make();
    let start = Barrier::new(2);
    for round in 0..40_u64 {
        // Single pages, and runs, which go another way.
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
