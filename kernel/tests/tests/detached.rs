//! The module unlinks a subtree from a process' page tables when the kernel has to walk them. The
//! next access links it again, even an access that may not wait for the mmap lock: a device's or a
//! debugger's.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use vellum_kernel_tests::access;
use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::{ends, highest_order, stamped};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::{Deadline, Stop};
use vellum_kernel_tests::vfio::{Access, Device};
use vellum_kernel_tests::{Mapping, PAGE, Plan, Surface, morsel_turn, sys, turn};
use vellum_uapi::{exmap, morsel};

/// Where the device sees a page.
const SEEN_AT: u64 = 1 << 32;

/// Surfaces that end inside a table and at its end, with one level and with several.
const SURFACES: [u64; 5] = [300, 512, 1000, 512 * 512, 512 * 512 + 512 + 77];

/// The first page of a surface and its last one.
fn surface_ends(pages: u64) -> [u64; 2] {
    [0, pages - 1]
}

fn pinnable_surface(pages: u64) -> Surface {
    let surface = Plan::new(pages, 8).flags(exmap::PINNABLE).make();
    for page in surface_ends(pages) {
        surface.alloc(0, &[(page, 1)]);
        surface.stamp(page, page + 7);
    }
    surface
}

fn clear_refs() {
    fs::write("/proc/self/clear_refs", "4").unwrap();
}

/// The next access is a device's, not the program's.
#[track_caller]
fn assert_device_gets(device: &Device, mapping: &Mapping, page: u64, access: Access) {
    let registered = device.register(mapping.page(page), PAGE, SEEN_AT, access);
    assert_eq!(registered, Ok(()), "page {page} of {:#x} bytes", mapping.length());
    assert_eq!(device.unregister(SEEN_AT, PAGE), Ok(PAGE as u64));
}

#[track_caller]
fn assert_debugger_reads(memory: &File, mapping: &Mapping, page: u64) {
    let mut bytes = vec![0; PAGE];
    memory.read_exact_at(&mut bytes, mapping.page(page) as u64).unwrap();
    assert!(bytes == access::stamped(page + 7), "page {page}");
}

#[test]
fn a_device_gets_a_morsels_pages() {
    let Some(_turn) = morsel_turn() else { return };
    let Some(device) = Device::open() else { return };
    for order in 0..=highest_order() {
        let morsel = stamped((order, morsel::PINNABLE));
        let mapping = morsel.mapped();
        for page in ends(order) {
            assert_device_gets(&device, &mapping, page, Access::ReadWrite);
            let (start, length) = (mapping.start(), mapping.length());
            sys::mprotect(start, length, libc::PROT_READ).unwrap();
            sys::mprotect(start, length, sys::READ_WRITE).unwrap();
            assert_device_gets(&device, &mapping, page, Access::ReadWrite);
            clear_refs();
            assert_device_gets(&device, &mapping, page, Access::ReadWrite);
            // The access populates an absent page.
            clear_refs();
            assert_device_gets(&device, &mapping, page / 2, Access::ReadWrite);
            mapping.assert_stamped(page, page + 7);
        }
        assert_morsels_are_sound();
    }
}

#[test]
fn a_device_gets_a_surfaces_pages() {
    let Some(_turn) = turn() else { return };
    let Some(device) = Device::open() else { return };
    for pages in SURFACES {
        let surface = pinnable_surface(pages);
        for page in surface_ends(pages) {
            clear_refs();
            assert_device_gets(&device, &surface.mapping, page, Access::Read);
            surface.assert_stamped(page, page + 7);
        }
        surface.assert_works();
    }
}

#[test]
fn a_debugger_reads_a_detached_subtree() {
    let Some(_turn) = turn() else { return };
    let memory = File::open("/proc/self/mem").unwrap();
    for pages in SURFACES {
        let surface = pinnable_surface(pages);
        for page in surface_ends(pages) {
            let before = surface.stat().attached;
            clear_refs();
            assert_debugger_reads(&memory, &surface.mapping, page);
            assert_eq!(surface.stat().attached, before + 1);
            surface.assert_stamped(page, page + 7);
        }
        surface.assert_works();
    }
}

/// Threads access it, and one reads it as a debugger does, while it is detached again and again.
/// Each of them finds its contents.
#[test]
fn the_first_access_attaches_it() {
    let Some(_turn) = morsel_turn() else { return };
    let memory = File::open("/proc/self/mem").unwrap();
    let mut mappings = Vec::new();
    let morsels: Vec<_> =
        (1..=highest_order()).map(|order| stamped((order, morsel::PINNABLE))).collect();
    let surfaces: Vec<_> = SURFACES.into_iter().map(pinnable_surface).collect();
    for (morsel, order) in morsels.iter().zip(1..) {
        mappings.push((morsel.mapped(), ends(order)));
    }
    let surfaces_mappings = surfaces
        .iter()
        .zip(SURFACES)
        .map(|(surface, pages)| (&surface.mapping, surface_ends(pages)));
    let all: Vec<_> = mappings.iter().map(|(mapping, ends)| (mapping, *ends)).collect();
    let all: Vec<_> = all.into_iter().chain(surfaces_mappings).collect();
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(4000));
    std::thread::scope(|scope| {
        let _at_end = stop.at_end();
        for seed in 0..3 {
            let (all, memory, stop) = (&all, &memory, &stop);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stop.is_said() {
                    let (mapping, ends) = all[random.below(all.len() as u64) as usize];
                    let page = ends[random.below(2) as usize];
                    match seed {
                        0 => assert_debugger_reads(memory, mapping, page),
                        _ => mapping.assert_stamped(page, page + 7),
                    }
                }
            });
        }
        for _ in deadline.rounds() {
            clear_refs();
        }
    });
    assert_morsels_are_sound();
    surfaces.iter().for_each(Surface::assert_works);
}
