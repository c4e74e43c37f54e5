//! Pages that root declares damaged: their contents are lost, and nothing else.
#![allow(clippy::unwrap_used)]

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, Plan, morsel_turn, sys, turn};
use vellum_uapi::{exmap, morsel};

/// The page that is damaged.
const PAGE_NUMBER: u64 = 5;
/// The page is moved (soft), or lost (hard).
const KINDS: [i32; 2] = [libc::MADV_SOFT_OFFLINE, libc::MADV_HWPOISON];

/// Declares the page damaged. Returns whether the kernel has accepted that.
fn damage(mapping: &Mapping, kind: i32) -> bool {
    let damaged = sys::madvise(mapping.page(PAGE_NUMBER), PAGE, kind);
    println!("{kind}: {damaged:?}");
    // The kernel cannot move the page.
    assert_ne!(damaged, Err(Errno::INVAL), "a kernel without this call");
    damaged != Err(Errno::FAULT)
}

#[test]
fn a_morsel_loses_only_the_damaged_page() {
    let Some(_turn) = morsel_turn() else { return };
    for flags in [0, morsel::PINNABLE, morsel::HUGE] {
        for kind in KINDS {
            let morsel = Morsel::new(2, 4 << 20, flags);
            let mapping = morsel.mapped();
            (0..64).for_each(|page| mapping.stamp(page, page));
            let reached = damage(&mapping, kind);
            assert_eq!(reached, flags == morsel::PINNABLE, "flags {flags:#x}");
            let others = (0..64).filter(|page| *page != PAGE_NUMBER);
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
            let reached = damage(&surface.mapping, kind);
            assert_eq!(reached, flags == exmap::PINNABLE, "flags {flags:#x}");
            let others: Vec<u64> = (0..64).filter(|page| *page != PAGE_NUMBER).collect();
            others.iter().for_each(|page| surface.assert_stamped(*page, *page));
            let ranges: Vec<(u64, u64)> = others.iter().map(|page| (*page, 1)).collect();
            assert!(surface.free(0, &ranges).iter().all(|freed| *freed == (0, 1)));
            let freed = surface.free(0, &[(PAGE_NUMBER, 1)]);
            println!("flags {flags:#x}: the damaged page: {freed:?}");
            assert_eq!(surface.alloc(0, &[(100, 63)]), [(0, 63)]);
            (100..163).for_each(|page| surface.stamp(page, page));
            (100..163).for_each(|page| surface.assert_stamped(page, page));
            surface.assert_counted();
        }
    }
}
