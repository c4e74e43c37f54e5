//! The surface: its mapping, and accesses to pages with a frame and without one.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::access::{self, kernel_load, kernel_store};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::threads::Barrier;
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, TABLE_PAGES, turn};
use vellum_uapi::exmap;

#[test]
fn pages_are_zeroed_keep_stores_and_are_freed() {
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
    assert_eq!(surface.free(0, &[(0, 1), (512, 1)]), [(0, 0), (0, 0)], "there is nothing to free");
    assert_eq!(surface.load(512), Ok(0));
}

/// Zeros are no page. A frame takes their place, for all threads.
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
                // The other thread's processor has cached the zeros.
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
            assert_eq!(surface.load(600), Ok(round), "the other thread's store");
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

/// A surface need not end at the end of a table or a directory.
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

/// A range may cross tables and directories.
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

#[test]
fn a_surface_is_shared_writable_and_not_executable() {
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
    // None of these has occupied the place of a valid mapping.
    let surface = Mapping::new(request(both, shared)).unwrap();
    assert_eq!(exmap.stat().unwrap().surface, 100);
    drop(surface);
}

#[test]
fn a_pool_is_created_once_and_before_the_surface() {
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
