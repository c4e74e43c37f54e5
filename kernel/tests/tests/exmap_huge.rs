//! Entries of 2 MiB: when the module sets them, and the effect of each command on them.
#![allow(clippy::unwrap_used)]

use std::fs;

use rustix::io::Errno;
use vellum_kernel_tests::child::{become_user, in_child};
use vellum_kernel_tests::counters::{Memory, assert_exmaps_are_sound};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::{Exmap, PAGE, Plan, Surface, TABLE_PAGES, turn_with};
use vellum_uapi::exmap::{self, Create, Move};

/// Pages of 2 MiB.
const HUGE: u64 = TABLE_PAGES;
const ALL: u16 = HUGE as u16;
const NO_MEMORY: i32 = -libc::ENOMEM;

/// Surfaces whose tables are mounted one by one, with a tail; as one; and in both ways.
const SHAPES: [u64; 3] = [4 * HUGE + 100, HUGE * HUGE, HUGE * HUGE + 2 * HUGE + 7];

fn last(pages: u64) -> u64 {
    pages / HUGE * HUGE - HUGE
}

/// Entries of 2 MiB, and blocks that are whole.
fn huge_and_free(surface: &Surface) -> (u64, u64) {
    assert_exmaps_are_sound();
    let stat = surface.stat();
    (stat.huge, stat.blocks_free)
}

/// Some pages of 2 MiB, the outermost among them.
fn some(first: u64) -> impl Iterator<Item = u64> {
    [0, 1, 7, 63, 255, 256, 510, 511].into_iter().map(move |page| first + page)
}

#[test]
fn a_huge_page_is_one_entry() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = Plan::new(pages, 600).blocks(3).make();
        let end = last(pages);
        assert_eq!(
            surface.stat().blocks,
            3,
            "a guest that has just started has 6 MiB of contiguous memory"
        );
        assert_eq!(huge_and_free(&surface), (0, 3));
        assert_eq!(surface.alloc(0, &[(0, 2 * HUGE), (end, HUGE)]), [(0, 2 * ALL), (0, ALL)]);
        assert_eq!(huge_and_free(&surface), (3, 0));
        assert_eq!(surface.stat().resident, 3 * HUGE);
        for first in [0, HUGE, end] {
            assert!(some(first).all(|page| surface.contents(page).unwrap() == [0; PAGE]));
            some(first).for_each(|page| surface.stamp(page, page));
        }
        for first in [0, HUGE, end] {
            some(first).for_each(|page| surface.assert_stamped(page, page));
        }
        // They are present already.
        assert_eq!(surface.alloc(0, &[(0, 2 * HUGE), (9, 1), (5, 600)]), [(0, 0); 3]);
        assert_eq!(huge_and_free(&surface), (3, 0));
        let flushes = surface.stat().flushes;
        assert_eq!(surface.free(0, &[(0, 2 * HUGE), (end, HUGE)]), [(0, 2 * ALL), (0, ALL)]);
        assert_eq!(surface.stat().flushes, flushes + 1, "for all of a vector");
        assert_eq!(huge_and_free(&surface), (0, 3));
        assert_eq!(surface.stat().splits, 0);
        for page in [0, HUGE, end].into_iter().flat_map(some) {
            assert_eq!(surface.store(page, 1), Err(surface.fault(page)));
        }
        assert_eq!(surface.free(0, &[(0, 2 * HUGE)]), [(0, 0)]);
        surface.assert_works();
    }
}

/// Used blocks can be used again, as often as asked for.
#[test]
fn huge_pages_come_and_go() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let surface = Plan::new(41 * HUGE, 10).blocks(20).make();
    let blocks = surface.stat().blocks;
    let all = (blocks * HUGE) as u16;
    let ranges: Vec<(u64, u64)> = (0..blocks).map(|block| (2 * block * HUGE, HUGE)).collect();
    for round in 0..5 {
        let first = (round % 2) * HUGE;
        let ranges: Vec<(u64, u64)> = ranges.iter().map(|(page, n)| (page + first, *n)).collect();
        assert_eq!(surface.alloc(0, &ranges), vec![(0, ALL); ranges.len()]);
        assert_eq!(huge_and_free(&surface), (blocks, 0));
        ranges.iter().for_each(|(page, _)| surface.stamp(page + 77, page + round));
        ranges.iter().for_each(|(page, _)| surface.assert_stamped(page + 77, page + round));
        // Frames of blocks have no other use.
        assert_eq!(surface.alloc(0, &[(40 * HUGE, 12)]), [(NO_MEMORY, 10)]);
        assert_eq!(surface.free(0, &[(40 * HUGE, 12)]), [(0, 10)]);
        let there: u16 = surface.free(0, &ranges).iter().map(|(_, pages)| pages).sum();
        assert_eq!(there, all);
        assert_eq!(huge_and_free(&surface), (0, blocks));
    }
}

/// Whether the kernel's printout of this process' page tables has an entry of 2 MiB at a page;
/// `None` if the kernel does not print them.
fn is_printed_as_huge(surface: &Surface, page: u64) -> Option<bool> {
    let text = fs::read_to_string("/sys/kernel/debug/page_tables/current_kernel").ok()?;
    let address = surface.mapping.page(page);
    let number = |text: &str| usize::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let covers = |line: &&str| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let range = range.and_then(|(from, to)| Some(number(from)?..number(to)?));
        range.is_some_and(|range| range.contains(&address))
    };
    let line = text.lines().find(covers);
    println!("page {page}: {line:?}");
    Some(line.is_some_and(|line| line.split_whitespace().any(|word| word == "PSE")))
}

/// The counters agree with the page tables that the processor walks, as the kernel prints them.
#[test]
fn the_kernel_prints_huge_pages_as_such() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = Plan::new(pages, 64).blocks(1).make();
        let first = last(pages);
        surface.alloc(0, &[(first, HUGE), (first - 9, 3)]);
        surface.stamp(first + 99, 99);
        let Some(is_huge) = is_printed_as_huge(&surface, first + 99) else {
            eprintln!("skipped: the kernel does not print page tables");
            return;
        };
        assert!(is_huge);
        assert_eq!(is_printed_as_huge(&surface, first - 8), Some(false));
        surface.free(0, &[(first, 1)]);
        assert_eq!(is_printed_as_huge(&surface, first + 99), Some(false));
        surface.assert_stamped(first + 99, 99);
    }
}

/// If a page is present, or no block is free, or the range is not all of 2 MiB, ALLOC goes page by
/// page.
#[test]
fn other_ranges_are_populated_page_by_page() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = Plan::new(pages, 3 * HUGE).blocks(2).make();
        // Not a whole range of 2 MiB.
        assert_eq!(surface.alloc(0, &[(0, HUGE - 1), (HUGE + 1, HUGE - 1)]), [(0, ALL - 1); 2]);
        assert_eq!(huge_and_free(&surface), (0, 2));
        // One range has an absent page, the other becomes a huge page.
        assert_eq!(surface.alloc(0, &[(0, HUGE)]), [(0, 1)]);
        assert_eq!(huge_and_free(&surface), (0, 2));
        assert_eq!(surface.free(0, &[(0, 2 * HUGE)]), [(0, 2 * ALL - 1)]);
        // Inside a longer range.
        assert_eq!(surface.alloc(0, &[(HUGE - 3, 2 * HUGE + 6)]), [(0, 2 * ALL + 6)]);
        assert_eq!(huge_and_free(&surface), (2, 0));
        // No block is left.
        assert_eq!(surface.alloc(0, &[(0, HUGE)]), [(0, ALL - 3)]);
        assert_eq!(huge_and_free(&surface), (2, 0));
        let count = 3 * HUGE + 3;
        (0..count).step_by(61).for_each(|page| surface.stamp(page, page));
        (0..count).step_by(61).for_each(|page| surface.assert_stamped(page, page));
        assert_eq!(surface.free(0, &[(0, count)]), [(0, count as u16)]);
        assert_eq!(huge_and_free(&surface), (0, 2));
        // The pages after the last multiple have a table of their own.
        let tail = pages / HUGE * HUGE;
        let behind = (pages - tail) as u16;
        assert_eq!(
            surface.alloc(0, &[(tail - HUGE, HUGE + u64::from(behind))]),
            [(0, ALL + behind)]
        );
        assert_eq!(huge_and_free(&surface), (1, 1));
    }
    // Surfaces of less than 2 MiB, and of exactly 2 MiB, have only one table.
    for pages in [100, HUGE] {
        let surface = Plan::new(pages, HUGE).blocks(1).make();
        assert_eq!(surface.alloc(0, &[(0, pages)]), [(0, pages as u16)]);
        assert_eq!(huge_and_free(&surface), (0, 1));
        assert_eq!(surface.assert_counted().len() as u64, pages);
    }
}

/// Parts of 2 MiB are freed, the others stay unchanged, and freed pages can be allocated again.
#[test]
fn parts_of_huge_pages_may_be_freed() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface = Plan::new(pages, 64).blocks(1).make();
        let first = last(pages);
        assert_eq!(surface.alloc(0, &[(first, HUGE)]), [(0, ALL)]);
        some(first).for_each(|page| surface.stamp(page, page));
        assert_eq!(surface.free(0, &[(first + 5, 1)]), [(0, 1)]);
        assert_eq!((huge_and_free(&surface), surface.stat().splits), ((0, 0), 1));
        assert_eq!(surface.store(first + 5, 1), Err(surface.fault(first + 5)));
        some(first).for_each(|page| surface.assert_stamped(page, page));
        // Its frame waits for the others of its block; the page gets another frame.
        assert_eq!(surface.alloc(0, &[(first + 5, 1)]), [(0, 1)]);
        surface.stamp(first + 5, 1);
        assert_eq!(surface.free(0, &[(first + 5, 3)]), [(0, 3)]);
        assert_eq!(surface.alloc(0, &[(first, HUGE)]), [(0, 3)]);
        assert_eq!(surface.stat().resident, HUGE);
        let there = surface.free(0, &[(first + 8, HUGE - 8)]);
        assert_eq!((there, huge_and_free(&surface)), (vec![(0, ALL - 8)], (0, 0)));
        assert_eq!(surface.free(0, &[(first, HUGE)]), [(0, 8)]);
        assert_eq!(huge_and_free(&surface), (0, 1));
        // The block is whole again, and works as before.
        assert_eq!(surface.alloc(0, &[(first, HUGE)]), [(0, ALL)]);
        assert_eq!(huge_and_free(&surface), (1, 0));
        some(first).for_each(|page| surface.stamp(page, page ^ 1));
        some(first).for_each(|page| surface.assert_stamped(page, page ^ 1));
        // A range that ends inside a huge page.
        assert_eq!(surface.free(0, &[(first - 4, HUGE)]), [(0, ALL - 4)]);
        some(first).skip(6).for_each(|page| surface.assert_stamped(page, page ^ 1));
        assert_eq!(surface.free(0, &[(first, HUGE)]), [(0, 4)]);
        assert_eq!(huge_and_free(&surface), (0, 1));
        assert_eq!(surface.stat().splits, 2);
    }
}

#[test]
fn parts_of_huge_pages_may_be_moved() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let surface = Plan::new(SHAPES[0], 64).blocks(2).make();
    surface.alloc(0, &[(0, 2 * HUGE)]);
    some(0).chain(some(HUGE)).for_each(|page| surface.stamp(page, page));
    let go = |from, to, count| {
        let size = size_of::<Move>() as u32;
        let request = Move { size, interface: 0, from, to, count };
        surface.exmap.pass(exmap::MOVE, (&raw const request).expose_provenance())
    };
    // To a present page: nothing moves, and nothing is split.
    assert_eq!(go(0, HUGE, HUGE), Ok(0));
    assert_eq!(huge_and_free(&surface), (2, 0));
    // The frames of a block move to other pages, and back.
    assert_eq!(go(250, 2 * HUGE + 3, 10), Ok(10));
    assert_eq!((huge_and_free(&surface), surface.stat().splits), ((1, 0), 1));
    surface.assert_stamped(2 * HUGE + 3 + 5, 255);
    surface.assert_stamped(2 * HUGE + 3 + 6, 256);
    assert_eq!(surface.store(255, 1), Err(surface.fault(255)));
    assert_eq!(surface.free(0, &[(0, HUGE)]), [(0, ALL - 10)]);
    assert_eq!(huge_and_free(&surface), (1, 0));
    assert_eq!(surface.free(0, &[(2 * HUGE, HUGE)]), [(0, 10)]);
    assert_eq!(huge_and_free(&surface), (1, 1));
    some(HUGE).for_each(|page| surface.assert_stamped(page, page));
}

/// A surface that shows zeros shows them at absent pages. A page that showed zeros can become a
/// part of a huge page.
#[test]
fn zeros_are_shown_next_to_huge_pages() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    for pages in SHAPES {
        let surface =
            Plan::new(pages, HUGE).blocks(2).flags(exmap::READS_ZEROS | exmap::HUGE).make();
        assert_eq!(surface.load(9), Ok(0));
        assert_eq!(surface.alloc(0, &[(0, 2 * HUGE)]), [(0, 2 * ALL)]);
        assert_eq!(huge_and_free(&surface), (1, 1));
        some(HUGE).for_each(|page| surface.stamp(page, page));
        assert_eq!(surface.free(0, &[(0, HUGE + 100)]), [(0, ALL + 100)]);
        assert_eq!((surface.load(HUGE + 3), surface.load(9)), (Ok(0), Ok(0)));
        assert_eq!(surface.store(HUGE + 3, 1), Err(surface.fault(HUGE + 3)));
        surface.assert_stamped(HUGE + 255, HUGE + 255);
    }
}

#[test]
fn impossible_huge_pages_are_refused() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let (pool, lock) = (exmap::NO_POOL, exmap::LOCK_TABLES);
    for other in [exmap::PINNABLE, exmap::TRACKS, exmap::STEALING, pool, lock, u64::MAX >> 1] {
        let create = Create { blocks: 1, ..plan(16, 1, exmap::HUGE | other) };
        assert_eq!(Exmap::open().create(&create), Err(Errno::INVAL), "{other:#x}");
    }
    for blocks in [1, 1 << 16, u32::MAX] {
        let create = Create { blocks, ..plan(16, 1, 0) };
        assert_eq!(Exmap::open().create(&create), Err(Errno::INVAL));
    }
    for (frames, blocks) in [(16, u32::MAX), (16, 1 << 30), (1 << 51, 1), (u64::MAX, u32::MAX)] {
        let create = Create { blocks, ..plan(frames, 1, exmap::HUGE) };
        assert_eq!(Exmap::open().create(&create), Err(Errno::NOMEM), "{blocks}");
    }
    let surface = Plan::new(2 * HUGE, 16).blocks(1).make();
    let fd = std::os::fd::AsFd::as_fd(&surface.exmap);
    let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
    let request = vellum_kernel_tests::sys::Request {
        address: 0,
        length: 2 * PAGE,
        protection,
        flags,
        fd: Some(fd),
        offset: exmap::OFFSET_TABLES,
    };
    let tables = vellum_kernel_tests::Mapping::new(request).map(drop);
    assert_eq!(tables, Err(Errno::OPNOTSUPP));
}

/// Blocks are charged like other frames, and everything comes back.
#[test]
fn memory_of_huge_pages_is_charged_and_comes_back() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let exmap = Exmap::open();
    let (create, bytes) = (Create { blocks: 2, ..plan(100, 1, exmap::HUGE) }, PAGE as u64);
    // An interface counts as 6 pages.
    for (limit, answer) in [(2 * HUGE + 105, Err(Errno::PERM)), (2 * HUGE + 106, Ok(()))] {
        // Twice, which shows that the first one's charge was returned.
        for _ in 0..2 {
            in_child(|| {
                let others = [Exmap::open(), Exmap::open()];
                become_user(limit * bytes);
                assert_eq!(others[0].create(&create), answer);
                let second = if answer.is_ok() { Err(Errno::PERM) } else { answer };
                assert_eq!(others[1].create(&create), second);
            });
        }
    }
    drop(exmap);
    let before = Memory::now();
    for round in 0..6 {
        let surface = Plan::new(SHAPES[round % 3], 100).blocks(8).make();
        surface.alloc(0, &[(0, 3 * HUGE)]);
        surface.free(0, &[(HUGE / 2, HUGE)]);
        surface.stamp(3, 3);
        drop(surface);
    }
    before.assert_back();
}

/// Resizing only changes the other frames.
#[test]
fn huge_pages_stay_when_the_pool_is_resized() {
    let Some(_turn) = turn_with(exmap::HUGE) else { return };
    let surface = Plan::new(SHAPES[0], 600).blocks(2).make();
    surface.alloc(0, &[(0, HUGE), (HUGE, 1)]);
    surface.free(0, &[(0, 5)]);
    for frames in [1, 700, 10] {
        assert_eq!(surface.exmap.command(exmap::RESIZE, frames), Ok(0), "{frames}");
        assert_eq!((surface.stat().frames, huge_and_free(&surface)), (frames, (0, 1)));
    }
    assert_eq!(surface.alloc(0, &[(2 * HUGE, HUGE)]), [(0, ALL)]);
    assert_eq!(huge_and_free(&surface), (1, 0));
    assert_eq!(surface.alloc(0, &[(3 * HUGE, 20)]), [(NO_MEMORY, 9)]);
    assert_eq!(surface.free(0, &[(0, 4 * HUGE - 1)]), [(0, 2 * ALL - 5 + 10)]);
    assert_eq!(huge_and_free(&surface), (0, 2));
}
