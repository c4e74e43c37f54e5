//! Huge pages on a surface, collapsed and split, on every backend. The tests check the kernel's
//! counts: `/proc/self/smaps`, and the memory control group where the tests may create one.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::common::{Own, entries, smaps};
use vellum_testing::memory_group::MemoryGroup;
use vellum_testing::patience::{PATIENCE, SetWhenDropped, eventually};
use vellum_vm::{
    Asked, BackendKind, Entry, HUGE_PAGE_SIZE, HUGE_PAGES, PAGE_SIZE, PageRange, Reservation,
    SurfaceError, probe,
};

on_every_backend!(
    collapsed_pages_keep_their_contents_and_split_again,
    a_range_that_is_not_aligned_is_refused,
    a_part_released_without_a_split_is_still_huge_elsewhere,
    collapsing_fills_holes,
    pages_populated_afterwards_are_small,
    the_mapping_is_in_one_piece_afterwards,
    pages_under_direct_io_stay_as_they_are,
    readers_writers_and_neighbours_go_on,
);

/// A surface of `count` huge pages, each filled with its own value; `None` if the kernel lacks a
/// facility for it.
fn filled(count: u64, backend: BackendKind) -> Option<Own> {
    let own = Own::new(count * HUGE_PAGES, backend);
    if !own.surface.can_collapse() {
        eprintln!("skipped: no huge pages here: {:?}", probe::huge_pages());
        return None;
    }
    (0..own.surface.pages()).for_each(|page| own.fill(page, value(page)));
    Some(own)
}

fn value(page: u64) -> u8 {
    (page % 251) as u8 + 1
}

fn huge(index: u64) -> PageRange {
    PageRange::new(index * HUGE_PAGES, HUGE_PAGES)
}

/// KiB in huge pages, by the kernel's count.
fn huge_kib(own: &Own) -> u64 {
    let bytes = own.surface.pages() as usize * PAGE_SIZE;
    // Mappings that reach beyond the surface's end belong to the surface, too.
    smaps(own.surface.base().addr().get(), bytes.max(64 << 20), "AnonHugePages")
}

/// Retries until the kernel collapses the range, because a busy machine may hold a page for a
/// moment.
#[track_caller]
fn collapse(own: &Own, range: PageRange) {
    eventually("it collapses", || own.surface.collapse(range).unwrap().is_done());
}

#[track_caller]
fn split(own: &Own, page: u64) {
    eventually("it is split", || own.surface.split(page).unwrap().is_done());
}

fn collapsed_pages_keep_their_contents_and_split_again(backend: BackendKind) {
    let Some(own) = filled(4, backend) else { return };
    assert_eq!(huge_kib(&own), 0);
    collapse(&own, PageRange::new(0, 3 * HUGE_PAGES));
    assert_eq!(huge_kib(&own), 3 * 2048);
    assert!(own.surface.is_huge(700).unwrap() && !own.surface.is_huge(3 * HUGE_PAGES).unwrap());
    assert_eq!(own.resident(), 4 * HUGE_PAGES);

    split(&own, 700);
    assert_eq!(huge_kib(&own), 2 * 2048);
    assert!(own.surface.is_huge(511).unwrap() && !own.surface.is_huge(512).unwrap());
    assert_eq!(own.resident(), 4 * HUGE_PAGES);
    assert!((0..own.surface.pages()).all(|page| own.holds(page, value(page))));

    assert_eq!(own.release(&mut entries([(700, 1), (1000, 24)])), 0);
    assert_eq!(own.resident(), 4 * HUGE_PAGES - 25);
    assert!(own.holds(700, 0) && own.holds(699, value(699)) && own.holds(1000, 0));
    // A whole huge page can be released without a split, and splitting a small page succeeds.
    assert_eq!(own.release(&mut entries([(0, 512)])), 0);
    assert_eq!((own.resident(), huge_kib(&own)), (3 * HUGE_PAGES - 25, 2048));
    assert_eq!(own.surface.split(5), Ok(Asked::Done));
    assert_eq!(own.surface.split(701), Ok(Asked::Done));
    assert!((1024..own.surface.pages()).all(|page| own.holds(page, value(page))));
}

fn a_range_that_is_not_aligned_is_refused(backend: BackendKind) {
    let own = Own::new(4 * HUGE_PAGES, backend);
    for (start, count) in [(1, 512), (0, 511), (512, 1)] {
        let range = PageRange::new(start, count);
        assert_eq!(own.surface.collapse(range), Err(SurfaceError::Unaligned { range }));
    }
    let outside = PageRange::new(3 * HUGE_PAGES, 2 * HUGE_PAGES);
    assert!(matches!(own.surface.collapse(outside), Err(SurfaceError::OutOfRange { .. })));
    assert!(own.surface.split(4 * HUGE_PAGES).is_err());
    assert!(own.surface.is_huge(4 * HUGE_PAGES).is_err());
}

/// Why a split is needed. Without one the release looks fine in this page table. The count of the
/// memory control group shows the difference: see `a_split_gives_memory_back_to_the_group`.
fn a_part_released_without_a_split_is_still_huge_elsewhere(backend: BackendKind) {
    let Some(own) = filled(2, backend) else { return };
    collapse(&own, huge(1));
    assert_eq!(own.release(&mut entries([(600, 1)])), 0);
    assert_eq!(own.resident(), 2 * HUGE_PAGES - 1);
    split(&own, 601);
    assert!((512..1024).all(|page| own.holds(page, if page == 600 { 0 } else { value(page) })));
}

fn collapsing_fills_holes(backend: BackendKind) {
    let Some(own) = filled(2, backend) else { return };
    assert_eq!(own.release(&mut entries([(3, 2), (511, 1)])), 0);
    collapse(&own, huge(0));
    assert_eq!(own.resident(), 2 * HUGE_PAGES);
    for page in 0..512 {
        let released = matches!(page, 3 | 4 | 511);
        assert!(own.holds(page, if released { 0 } else { value(page) }));
    }
}

/// After the collapse the mapping refuses huge pages again: populating a page of an empty range
/// populates one page.
fn pages_populated_afterwards_are_small(backend: BackendKind) {
    let Some(own) = filled(2, backend) else { return };
    collapse(&own, huge(0));
    assert_eq!(own.release(&mut [Entry::new(huge(0))]), 0);
    assert_eq!(own.resident(), HUGE_PAGES);
    own.fill(7, 1);
    assert_eq!(own.surface.populate(&mut [Entry::page(9)]), 0);
    assert_eq!((own.resident(), huge_kib(&own)), (HUGE_PAGES + 2, 0));
}

fn the_mapping_is_in_one_piece_afterwards(backend: BackendKind) {
    let Some(own) = filled(8, backend) else { return };
    [5, 1, 6, 0, 7].into_iter().for_each(|index| collapse(&own, huge(index)));
    let first = own.surface.base().addr().get();
    let inside = first..first + own.surface.pages() as usize * PAGE_SIZE;
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts =
        text.lines().filter_map(|line| usize::from_str_radix(line.split_once('-')?.0, 16).ok());
    assert_eq!(starts.filter(|start| inside.contains(start)).count(), 1, "{text}");
}

/// Pins a page by a slow direct write from it: into a pipe, by `vmsplice`.
fn pages_under_direct_io_stay_as_they_are(backend: BackendKind) {
    let Some(own) = filled(2, backend) else { return };
    collapse(&own, huge(1));
    // Closed on exec, because programs of other tests would hold the pages as long as they run.
    let ends = std::io::pipe().unwrap();
    for page in [5, 512 + 5] {
        let part =
            libc::iovec { iov_base: own.surface.address(page).as_ptr().cast(), iov_len: PAGE_SIZE };
        // SAFETY: the page is the test's, and does not change until the pipe is closed.
        let held = unsafe { libc::vmsplice(ends.1.as_raw_fd(), &raw const part, 1, 0) };
        assert_eq!(held, PAGE_SIZE as isize);
    }
    let Asked::NotNow(errno) = own.surface.collapse(huge(0)).unwrap() else {
        panic!("the kernel moved a page that a pin holds");
    };
    assert!(matches!(errno, vellum_vm::Errno::AGAIN | vellum_vm::Errno::INVAL), "{errno}");
    assert_eq!(own.surface.split(600), Ok(Asked::NotNow(vellum_vm::Errno::BUSY)));
    assert!(own.surface.is_huge(600).unwrap() && !own.surface.is_huge(5).unwrap());
    assert!((0..1024).all(|page| own.holds(page, value(page))));
    drop(ends);
    collapse(&own, huge(0));
    split(&own, 600);
    assert!((0..1024).all(|page| own.holds(page, value(page))));
}

/// One thread collapses and splits a huge page all the time. Others write its bytes, write it to a
/// file by direct I/O, and populate and release its neighbours.
fn readers_writers_and_neighbours_go_on(backend: BackendKind) {
    let Some(own) = filled(3, backend) else { return };
    let done = AtomicBool::new(false);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(dir.path().join("pages"));
    std::thread::scope(|scope| {
        let _done = SetWhenDropped(&done);
        let own = &own;
        let running = || !done.load(Ordering::Relaxed);
        for thread in 0..2_u64 {
            scope.spawn(move || {
                let mut round = 0_u8;
                while running() {
                    round = round.wrapping_add(1);
                    for page in (0..64).map(|index| 512 + index * 8 + thread) {
                        own.fill(page, round);
                        assert!(own.holds(page, round), "a write to page {page} is lost");
                    }
                }
            });
        }
        scope.spawn(move || {
            while running() {
                let mut around = entries([(500, 12), (1024, 8), (1500, 3)]);
                assert_eq!(own.surface.populate(&mut around), 0);
                own.fill(511, 7);
                own.fill(1024, 8);
                assert_eq!(own.release(&mut around), 0);
                assert!(own.holds(511, 0) && own.holds(1024, 0));
            }
        });
        if let Ok(file) = file {
            scope.spawn(move || {
                while running() {
                    let from = own.surface.address(512 + 6).as_ptr();
                    // SAFETY: two pages of the surface that no thread writes to.
                    let done =
                        unsafe { libc::pwrite(file.as_raw_fd(), from.cast(), 2 * PAGE_SIZE, 0) };
                    assert_eq!(done, 2 * PAGE_SIZE as isize);
                }
            });
        }
        // A direct write to a slow disk holds its pages for many rounds.
        let (start, mut round, mut collapsed) = (Instant::now(), 0, 0);
        while round < 60 || collapsed == 0 && start.elapsed() < PATIENCE {
            collapsed += u32::from(own.surface.collapse(huge(1)).unwrap().is_done());
            let _ = own.surface.split(512 + 4).unwrap();
            round += 1;
        }
        assert!(collapsed > 0, "never collapsed");
    });
    // Of each eight neighbours, the threads have written the first two.
    let untouched = (512..1024).filter(|page| page % 8 >= 2);
    untouched.for_each(|page| assert!(own.holds(page, value(page)), "page {page}"));
}

/// All other tests skip themselves where this does not hold.
#[test]
fn a_kernel_that_can_see_huge_pages_can_make_them() {
    let facilities = probe::facilities();
    let found = |name| facilities.get(name).is_some_and(|facility| facility.found);
    if found("PAGEMAP_SCAN") {
        assert_eq!(found("MADV_COLLAPSE"), found("transparent huge pages"), "{facilities}");
    }
}

#[test]
fn a_split_gives_memory_back_to_the_group() {
    let test = "huge_pages::a_split_gives_memory_back_to_the_group";
    let Some(group) = MemoryGroup::entered(test) else { return };
    let usage = || group.bytes("memory.usage_in_bytes") as i64 / PAGE_SIZE as i64;
    const COUNT: u64 = 32;
    for backend in probe::backends() {
        let Some(own) = filled(COUNT, backend) else { return };
        let small = usage();
        collapse(&own, PageRange::new(0, COUNT * HUGE_PAGES));
        // The kernel charges some memory in advance for each processor, or returns it late.
        let slack = 1024;
        assert!((usage() - small).abs() < slack, "collapsing changed the usage");
        let all = usage();
        let mut halves: Vec<Entry> =
            (0..COUNT).map(|index| Entry::new(PageRange::new(index * HUGE_PAGES, 256))).collect();
        // Releases half of each huge page; the first ones without a split.
        assert_eq!(own.release(&mut halves[..16]), 0);
        assert!((all - usage()).abs() < slack, "the kernel splits them itself now: good news");
        halves[16..].iter().for_each(|entry| split(&own, entry.range.start));
        assert_eq!(own.release(&mut halves[16..]), 0);
        let released = all - usage();
        assert!((released - 16 * 256).abs() < slack, "{released} pages left the group");
        // A later split frees the memory of the pages that were released before.
        halves[..16].iter().for_each(|entry| split(&own, entry.range.start + 256));
        let released = all - usage();
        assert!((released - 32 * 256).abs() < slack, "{released} pages left the group");
    }
}

#[test]
fn a_reservation_has_huge_pages_where_it_asks_for_them() {
    // For a moment, the kernel may have no free huge page, or may hold a page.
    eventually("all of it is in huge pages", || {
        let kib = filled_where_it_asked();
        probe::huge_pages().is_err() || kib == (2 * 2048, 2 * 2048 + 4)
    });
}

/// Touches a reservation inside and outside the range that asks for huge pages. Returns how many
/// KiB it has in huge pages then, and in all.
fn filled_where_it_asked() -> (u64, u64) {
    let reservation = Reservation::new(64 << 20, "test").unwrap();
    let start = reservation.base().addr().get();
    let touch = |offset: usize| {
        // SAFETY: within the reservation, which no other thread uses.
        unsafe { reservation.base().add(offset).write(3) };
    };
    touch(0);
    touch(HUGE_PAGE_SIZE - 1);
    reservation.use_huge_pages(2 * HUGE_PAGE_SIZE + HUGE_PAGE_SIZE / 2);
    reservation.use_huge_pages(HUGE_PAGE_SIZE);
    touch(HUGE_PAGE_SIZE + 5);
    touch(2 * HUGE_PAGE_SIZE);
    // SAFETY: as above.
    assert_eq!(unsafe { reservation.base().add(HUGE_PAGE_SIZE - 1).read() }, 3);
    let kib = (smaps(start, 64 << 20, "AnonHugePages"), smaps(start, 64 << 20, "Rss"));
    reservation.use_huge_pages(usize::MAX);
    reservation.grow(65 << 20).unwrap();
    touch(64 << 20);
    kib
}
