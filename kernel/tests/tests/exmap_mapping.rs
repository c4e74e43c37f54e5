//! Calls on the addresses of a surface: unmap, map over, move, protect, advise. Each works, or is
//! refused and changes nothing.
#![allow(clippy::unwrap_used)]

use rustix::io::Errno;
use vellum_kernel_tests::access;
use vellum_kernel_tests::child::in_child;
use vellum_kernel_tests::counters::Memory;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Mapping, PAGE, Plan, Surface, turn};
use vellum_uapi::exmap::{self, Entry};

const PAGES: u64 = 3000;
const THERE: [u64; 6] = [0, 1, 511, 512, 1700, 2999];

/// A surface with some pages.
fn populated() -> Surface {
    let surface = Plan::new(PAGES, 256).make();
    let ranges = THERE.map(|page| (page, 1));
    assert_eq!(surface.alloc(0, &ranges), [(0, 1); 6]);
    THERE.iter().for_each(|page| surface.stamp(*page, *page));
    surface
}

/// Checks that the surface is unchanged.
#[track_caller]
fn assert_unchanged(surface: &Surface) {
    THERE.iter().for_each(|page| surface.assert_stamped(*page, *page));
    assert_eq!(surface.load(2), Err(surface.fault(2)));
    assert_eq!(surface.stat().resident, 6);
    surface.assert_works();
}

#[test]
fn a_surface_that_is_unmapped_is_gone() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    let (start, fault) = (surface.mapping.start(), surface.fault(0));
    let Surface { vectors, mapping, exmap } = surface;
    mapping.unmap().unwrap();
    assert_eq!(access::load(start), Err(fault));
    vectors[0].set(0, Entry::new(0, 1));
    assert_eq!(vectors[0].run(&exmap, exmap::ALLOC, 1), Err(Errno::NODEV));
    assert_eq!(vectors[0].run(&exmap, exmap::FREE, 1), Err(Errno::NODEV));
    let stat = exmap.stat().unwrap();
    assert_eq!(stat.allocated - stat.freed, stat.resident);
}

/// The pages belong to the exmap, so they are present when the surface is mapped again.
#[test]
fn a_surface_may_be_mapped_again() {
    let Some(_turn) = turn() else { return };
    let mut surface = populated();
    for _ in 0..3 {
        let Surface { vectors, mapping, exmap } = surface;
        mapping.unmap().unwrap();
        // A mapping of a part, or of more, is refused.
        for pages in [1, PAGES - 1, PAGES + 1, PAGES + 512, 10 * PAGES] {
            assert!(exmap.map(pages).is_err(), "{pages} pages");
        }
        let mapping = exmap.map(PAGES).unwrap();
        surface = Surface { vectors, mapping, exmap };
        assert_unchanged(&surface);
    }
}

#[test]
fn a_part_is_not_unmapped() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    let table = 512 * PAGE;
    let (start, length) = (surface.mapping.start(), surface.mapping.length());
    for (from, to) in [
        (0, PAGE),
        (0, table),
        (0, length - PAGE),
        (PAGE, length),
        (table, 2 * table),
        (table, length),
        (length - PAGE, length),
        (5 * PAGE, 6 * PAGE),
    ] {
        assert_eq!(sys::munmap(start + from, to - from), Err(Errno::INVAL), "{from:#x}..{to:#x}");
        assert_unchanged(&surface);
    }
}

#[test]
fn another_mapping_may_replace_all_of_it() {
    let Some(_turn) = turn() else { return };
    let Surface { vectors, mapping, exmap } = populated();
    let over = |address, length| Request {
        address,
        length,
        protection: sys::READ_WRITE,
        flags: libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
        fd: None,
        offset: 0,
    };
    let part = sys::mmap(over(mapping.page(512), 10 * PAGE));
    assert!(part.is_err(), "over a part: {part:?}");
    assert_unchanged(&Surface { vectors, mapping, exmap });

    let Surface { vectors, mapping, exmap } = populated();
    let new = Mapping::new(over(mapping.start(), mapping.length())).unwrap();
    mapping.leave();
    vectors[0].set(0, Entry::new(3, 1));
    assert_eq!(vectors[0].run(&exmap, exmap::ALLOC, 1), Err(Errno::NODEV));
    for page in THERE {
        assert_eq!(access::load(new.page(page)), Ok(0));
        assert_eq!(access::store(new.page(page), 1), Ok(()));
    }
}

#[test]
fn it_neither_moves_nor_grows() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    let (start, length) = (surface.mapping.start(), surface.mapping.length());
    let (grow, may_move) = (length + 512 * PAGE, libc::MREMAP_MAYMOVE);
    let keep_old = may_move | libc::MREMAP_DONTUNMAP;
    for (from, to, flags) in [
        (length, grow, 0),
        (length, grow, may_move),
        (length, length - PAGE, 0),
        (length, PAGE, may_move),
        (length, length, keep_old),
        (PAGE, 2 * PAGE, may_move),
        (0, length, may_move),
    ] {
        let moved = sys::mremap(start, from, to, flags);
        assert!(moved.is_err(), "{from:#x} to {to:#x}, flags {flags}: {moved:?}");
        assert_unchanged(&surface);
    }
}

#[test]
fn its_protection_cannot_change() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    let (start, length) = (surface.mapping.start(), surface.mapping.length());
    for protection in [libc::PROT_READ, libc::PROT_NONE, libc::PROT_EXEC | sys::READ_WRITE] {
        for (from, bytes) in [(start, length), (start, PAGE), (start + 512 * PAGE, 512 * PAGE)] {
            let changed = sys::mprotect(from, bytes, protection);
            assert!(changed.is_err(), "protection {protection} of {bytes:#x} bytes");
            assert_unchanged(&surface);
        }
    }
    // The protection that it has may be accepted or refused.
    let same = sys::mprotect(start, length, sys::READ_WRITE);
    println!("the protection that it has: {same:?}");
    assert_unchanged(&surface);
}

/// Advice by number, because some is newer than the C library. Advice that poisons memory is left
/// out.
const ADVICE: [i32; 24] =
    [0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 102];

#[test]
fn advice_changes_no_page() {
    let Some(_turn) = turn() else { return };
    let surface = populated();
    let (start, length) = (surface.mapping.start(), surface.mapping.length());
    for advice in ADVICE {
        for (from, bytes) in [(0, length), (PAGE, PAGE), (512 * PAGE, 512 * PAGE)] {
            let taken = sys::madvise(start + from, bytes, advice);
            println!("advice {advice} of {bytes:#x} bytes: {taken:?}");
            assert_unchanged(&surface);
        }
    }
    // Some of the advice concerned children.
    in_child(|| println!("a child finds {:?}", surface.load(0)));
    assert_unchanged(&surface);
}

#[test]
fn frames_and_tables_come_back() {
    let Some(_turn) = turn() else { return };
    let cycle = |round: u64| {
        let surface = Plan::new(1 << 22, 4096).interfaces(2).make();
        let ranges: Vec<(u64, u64)> = (0..400).map(|index| (index * 10_007, 10)).collect();
        assert_eq!(surface.alloc(0, &ranges), vec![(0, 10); 400]);
        let Surface { vectors, mapping, exmap } = surface;
        // The parts are closed in any order.
        match round % 3 {
            0 => drop((mapping, exmap, vectors)),
            1 => drop((exmap, vectors, mapping)),
            _ => drop((vectors, mapping, exmap)),
        }
    };
    (0..3).for_each(cycle);
    let before = Memory::now();
    (0..24).for_each(cycle);
    before.assert_back();
}

/// A mapping keeps its surface.
#[test]
fn the_descriptor_may_be_closed_first() {
    let Some(_turn) = turn() else { return };
    let Surface { vectors, mapping, exmap } = populated();
    drop(exmap);
    for page in THERE {
        let found = access::kernel_load(mapping.page(page), PAGE).unwrap();
        assert!(found == access::stamped(page), "page {page}");
    }
    assert!(access::load(mapping.page(2)).is_err());
    drop(vectors);
    mapping.unmap().unwrap();
}
