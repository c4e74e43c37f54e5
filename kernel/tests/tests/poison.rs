//! Pages that root declares damaged: their contents are lost, and nothing else.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::counters::{self, assert_morsels_are_sound};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, Plan, morsel_turn, sys, turn};
use vellum_uapi::{exmap, morsel};

/// The page that is damaged.
const PAGE_NUMBER: u64 = 5;
/// The page is moved (soft), or lost (hard).
const KINDS: [i32; 2] = [libc::MADV_SOFT_OFFLINE, libc::MADV_HWPOISON];

/// KiB of memory that the kernel counts as damaged.
fn corrupted() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    assert!(text.contains("HardwareCorrupted:"), "a kernel that does not count damaged memory");
    counters::field("/proc/meminfo", "HardwareCorrupted")
}

/// Declares the page damaged, and checks what the kernel says to that. Only pages that may be
/// pinned can be reached. Returns whether the page's frame is lost.
#[track_caller]
fn damage(mapping: &Mapping, kind: i32, is_pinnable: bool) -> bool {
    let before = corrupted();
    let damaged = sys::madvise(mapping.page(PAGE_NUMBER), PAGE, kind);
    println!("pinnable {is_pinnable}, {kind}: {damaged:?}");
    let expected = match (is_pinnable, kind) {
        (false, _) => Errno::FAULT,
        // The kernel cannot move the page, and leaves it alone.
        (true, libc::MADV_SOFT_OFFLINE) => Errno::IO,
        // The frame is marked, and the kernel keeps a reference to it. It cannot take the page off.
        (true, _) => Errno::BUSY,
    };
    assert_eq!(damaged, Err(expected), "pinnable {is_pinnable}, kind {kind}");
    let is_lost = expected == Errno::BUSY;
    assert_eq!(corrupted() - before, if is_lost { PAGE as u64 >> 10 } else { 0 }, "KiB");
    is_lost
}

#[test]
fn a_morsel_loses_only_the_damaged_page() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        for kind in KINDS {
            let morsel = Morsel::new(2, 4 << 20, flags);
            let mapping = morsel.mapped();
            (0..64).for_each(|page| mapping.stamp(page, page));
            let is_lost = damage(&mapping, kind, flags == morsel::PINNABLE);
            let others = (0..64).filter(|page| !is_lost || *page != PAGE_NUMBER);
            others.for_each(|page| mapping.assert_stamped(page, page));
            morsel.punch(0, 4 << 20).unwrap();
            (0..64).for_each(|page| mapping.stamp(page, page + 1));
            (0..64).for_each(|page| mapping.assert_stamped(page, page + 1));
            assert_morsels_are_sound();
        }
    }
}

#[test]
fn a_surface_loses_only_the_damaged_frame() {
    let Some(_turn) = turn() else { return };
    for flags in [0, exmap::PINNABLE] {
        for kind in KINDS {
            let surface = Plan::new(200, 64).flags(flags).make();
            assert_eq!(surface.alloc(0, &[(0, 64)]), [(0, 64)]);
            (0..64).for_each(|page| surface.stamp(page, page));
            let is_lost = damage(&surface.mapping, kind, flags == exmap::PINNABLE);
            if !is_lost {
                surface.assert_stamped(PAGE_NUMBER, PAGE_NUMBER);
            }
            let others: Vec<u64> = (0..64).filter(|page| *page != PAGE_NUMBER).collect();
            others.iter().for_each(|page| surface.assert_stamped(*page, *page));
            let ranges: Vec<(u64, u64)> = others.iter().map(|page| (*page, 1)).collect();
            assert!(surface.free(0, &ranges).iter().all(|freed| *freed == (0, 1)));
            let freed = surface.free(0, &[(PAGE_NUMBER, 1)]);
            let expected = if is_lost { (-libc::EBUSY, 0) } else { (0, 1) };
            assert_eq!(freed, [expected], "flags {flags:#x}: the damaged page");
            assert_eq!(surface.alloc(0, &[(100, 63)]), [(0, 63)]);
            (100..163).for_each(|page| surface.stamp(page, page));
            (100..163).for_each(|page| surface.assert_stamped(page, page));
            surface.assert_counted();
        }
    }
}
