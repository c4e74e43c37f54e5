//! PAGEMAP_SCAN walks page tables, and may write-protect pages that are registered with
//! userfaultfd. In a Morsel and in a surface it may report any pages, but changes nothing.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsFd as _;

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::{ends, kinds, stamped};
use vellum_kernel_tests::{Errno, Mapping, PAGE, Plan, access, morsel_turn, sys, turn};
use vellum_uapi::exmap;

/// `struct pm_scan_arg`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_count: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

const PAGEMAP_SCAN: u32 = 3 << 30 | (size_of::<Scan>() as u32) << 16 | (b'f' as u32) << 8 | 16;
const WRITE_PROTECT: u64 = 1 << 0;
const CHECK_ASYNC: u64 = 1 << 1;
/// The categories of pages.
const WRITTEN: u64 = 1 << 1;
const ALL: u64 = 0xff;

/// Scans around a page with all combinations of flags. False if this kernel has no such call.
#[track_caller]
fn scan(pagemap: &File, mapping: &Mapping, page: u64) -> bool {
    let part = 1 << 30;
    let start = (mapping.page(page) / part * part).max(mapping.start());
    let end = (start + part).min(mapping.end());
    let mut regions = vec![[0_u64; 3]; 64];
    for flags in [0, WRITE_PROTECT, CHECK_ASYNC, WRITE_PROTECT | CHECK_ASYNC] {
        for (mask, inverted) in [(0, 0), (WRITTEN, 0), (WRITTEN, WRITTEN)] {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags,
                start: start as u64,
                end: end as u64,
                regions: regions.as_mut_ptr().expose_provenance() as u64,
                regions_count: regions.len() as u64,
                inverted,
                mask,
                returned: ALL,
                ..Scan::default()
            };
            let argument = (&raw mut scan).expose_provenance() as u64;
            let answer = sys::ioctl(pagemap.as_fd(), PAGEMAP_SCAN, argument);
            if answer == Err(Errno::NOTTY) {
                eprintln!("skipped: no PAGEMAP_SCAN");
                return false;
            }
            // None of it is registered with userfaultfd.
            let is_refused = flags & CHECK_ASYNC != 0;
            assert_eq!(answer == Err(Errno::PERM), is_refused, "{flags}: {answer:?}");
        }
    }
    true
}

#[test]
fn morsels_are_scanned() {
    let Some(_turn) = morsel_turn() else { return };
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    for kind in kinds() {
        let morsel = stamped(kind);
        let mappings = [morsel.mapped(), morsel.map(libc::PROT_READ).unwrap()];
        for mapping in &mappings {
            for page in ends(kind.0) {
                if !scan(&pagemap, mapping, page) {
                    return;
                }
                mapping.assert_stamped(page, page + 7);
                if !scan(&pagemap, mapping, page) {
                    return;
                }
                mappings[0].stamp(page, page + 7);
                mapping.assert_stamped(page, page + 7);
            }
        }
        assert!(access::store(mappings[1].start(), 1).is_err());
        assert_morsels_are_sound();
    }
}

#[test]
fn surfaces_are_scanned() {
    let Some(_turn) = turn() else { return };
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    for flags in [0, exmap::PINNABLE, exmap::READS_ZEROS] {
        let surface = Plan::new(2000, 8).flags(flags).make();
        for page in [0, 1999] {
            surface.alloc(0, &[(page, 1)]);
            for round in 0..2 {
                surface.stamp(page, round);
                if !scan(&pagemap, &surface.mapping, page) {
                    return;
                }
                surface.assert_stamped(page, round);
            }
        }
        // A part of it, and its neighbours.
        let (start, end) = (surface.mapping.start() as u64, surface.mapping.end() as u64);
        for (start, end) in [(start + PAGE as u64, end - PAGE as u64), (0, end + (1 << 21))] {
            let mut scan = Scan { size: size_of::<Scan>() as u64, start, end, ..Scan::default() };
            scan.flags = WRITE_PROTECT;
            (scan.mask, scan.returned) = (WRITTEN, ALL);
            let argument = (&raw mut scan).expose_provenance() as u64;
            println!("{:?}", sys::ioctl(pagemap.as_fd(), PAGEMAP_SCAN, argument));
            surface.assert_stamped(0, 1);
            surface.stamp(0, 1);
        }
        surface.assert_works();
    }
}
