//! Calls on the addresses of a mapped Morsel: each works, or is refused and changes nothing.
#![allow(clippy::unwrap_used, unsafe_code)]

use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::child::in_child;
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{highest_order, kinds, plan};
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Errno, Mapping, Morsel, PAGE, morsel_turn};
use vellum_uapi::morsel::{self, extent};

/// Its first page and its last one.
fn ends(order: u32) -> [u64; 2] {
    [0, extent(order) / PAGE as u64 - 1]
}

fn populated(kind: (u32, u64)) -> (Morsel, Mapping) {
    let morsel = Morsel::of(kind);
    let mapping = morsel.mapped();
    ends(kind.0).iter().for_each(|page| mapping.stamp(*page, page + 7));
    (morsel, mapping)
}

/// Checks that pages, rights and length are unchanged, and that the Morsel works.
#[track_caller]
fn assert_unchanged(morsel: &Morsel, mapping: &Mapping) {
    for page in ends(morsel.stat().order) {
        mapping.assert_stamped(page, page + 7);
        morsel.assert_stamped(page, page + 7);
        mapping.stamp(page, 1);
        morsel.assert_stamped(page, 1);
        mapping.stamp(page, page + 7);
    }
    assert_morsels_are_sound();
}

/// Free addresses: twice as many as asked for, so that an aligned part fits. No other mapping, such
/// as a thread's stack, gets them meanwhile, because the kernel looks for room from the top.
fn free_addresses(length: usize) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // A Morsel longer than order 3 needs five levels, with which there is room at higher addresses.
    let address = if length as u64 > 2 * extent(3) { 1 << 50 } else { 1 << 44 };
    let protection = libc::PROT_NONE;
    let place = Request { address, length: 2 * length, protection, flags, fd: None, offset: 0 };
    let found = Mapping::new(place).unwrap().start();
    assert_eq!(found, address, "another mapping is there");
    found.next_multiple_of(length)
}

#[test]
fn mapping_less_or_more_than_all_of_it_is_refused() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let right = morsel.request(sys::READ_WRITE);
        let length = right.length;
        let beside = free_addresses(length) + PAGE;
        let private = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        let exec = libc::PROT_READ | libc::PROT_EXEC;
        let mut wrong = vec![
            (Request { length: length + PAGE, ..right }, Errno::INVAL),
            (Request { length: 2 * length, ..right }, Errno::INVAL),
            (Request { offset: PAGE as u64, ..right }, Errno::INVAL),
            (Request { offset: length as u64, ..right }, Errno::INVAL),
            (Request { flags: private, ..right }, Errno::INVAL),
            (Request { flags: private, protection: libc::PROT_READ, ..right }, Errno::INVAL),
            (Request { protection: exec, ..right }, Errno::PERM),
            (Request { protection: 7, ..right }, Errno::PERM),
        ];
        if kind.0 > 0 {
            wrong.extend([
                (Request { length: PAGE, ..right }, Errno::INVAL),
                (Request { length: length - PAGE, ..right }, Errno::INVAL),
                (Request { length: length / 2, offset: length as u64 / 2, ..right }, Errno::INVAL),
                (Request { address: beside, flags: fixed, ..right }, Errno::INVAL),
                (Request { address: beside + length / 2, flags: fixed, ..right }, Errno::INVAL),
            ]);
        }
        for (request, error) in wrong {
            let mapped = Mapping::new(request);
            assert_eq!(mapped.unwrap_err(), error, "{kind:x?} {request:?}");
        }
        assert_eq!(morsel.stat().mounts, 1);
        assert_unchanged(&morsel, &mapping);
    }
}

#[test]
fn it_can_be_mapped_at_any_aligned_address() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let right = morsel.request(sys::READ_WRITE);
        let address = free_addresses(right.length);
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        let second = Mapping::new(Request { address, flags, ..right }).unwrap();
        assert_eq!(second.start(), address);
        second.assert_stamped(0, 7);
        // Another mapping is at the address.
        let again = Mapping::new(Request { address, flags, ..right });
        assert_eq!(again.unwrap_err(), Errno::EXIST);
        assert_unchanged(&morsel, &second);
        // Where ordinary memory was.
        drop(second);
        let ordinary = Mapping::anonymous(Some(address), right.length).unwrap();
        access::store(ordinary.start(), 1).unwrap();
        access::store(ordinary.end() - 1, 1).unwrap();
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let third = Mapping::new(Request { address, flags, ..right }).unwrap();
        ordinary.leave();
        assert_unchanged(&morsel, &third);
        // At its own address.
        let fourth = Mapping::new(Request { address, flags, ..right }).unwrap();
        third.leave();
        assert_unchanged(&morsel, &fourth);
        assert_eq!(morsel.stat().mounts, 2);
        assert_unchanged(&morsel, &mapping);
    }
}

/// Another mapping may replace it.
#[test]
fn another_mapping_may_replace_it() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let other = Morsel::of(kind);
        other.stamp(0, 99);
        let (address, length) = (mapping.start(), mapping.length());
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let second = Mapping::new(Request { address, flags, ..other.request(3) }).unwrap();
        mapping.leave();
        second.assert_stamped(0, 99);
        assert_eq!((morsel.stat().mounts, other.stat().mounts), (0, 1));
        let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let third = Request { address, length, protection: 3, flags, fd: None, offset: 0 };
        let third = Mapping::new(third).unwrap();
        second.leave();
        assert_eq!(access::load(address), Ok(0));
        access::store(address, 5).unwrap();
        assert_eq!((morsel.stat().mounts, other.stat().mounts), (0, 0));
        drop(third);
        morsel.assert_stamped(0, 7);
        other.assert_stamped(0, 99);
        assert_morsels_are_sound();
    }
}

#[test]
fn calls_on_a_part_of_it_are_refused() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let (morsel, mapping) = populated(kind);
        let (start, length) = (mapping.start(), mapping.length());
        let (half, table) = (length / 2, (512 * PAGE).min(length / 2));
        for (from, to) in [
            (0, PAGE),
            (0, half),
            (0, table),
            (0, length - PAGE),
            (PAGE, length),
            (half, length),
            (table, table + PAGE),
            (length - PAGE, length),
        ] {
            let (address, length) = (start + from, to - from);
            assert_eq!(sys::munmap(address, length), Err(Errno::INVAL));
            for protection in [libc::PROT_READ, libc::PROT_NONE] {
                assert_eq!(sys::mprotect(address, length, protection), Err(Errno::INVAL));
            }
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let flags = flags | libc::MAP_NORESERVE;
            let over = Request { address, length, protection: 3, flags, fd: None, offset: 0 };
            // Some kernels return ENOMEM for every reason.
            assert!(matches!(sys::mmap(over), Err(Errno::INVAL | Errno::NOMEM)));
            assert_eq!(sys::madvise(address, length, libc::MADV_RANDOM), Err(Errno::INVAL));
            let moved = sys::mremap(address, length, length, libc::MREMAP_MAYMOVE);
            assert!(moved.is_err() || moved == Ok(address), "{moved:?}");
            assert!(sys::mremap(address, length, PAGE / 2, 0).is_err() || length == PAGE);
            assert_unchanged(&morsel, &mapping);
        }
        assert_eq!(morsel.stat().mounts, 1);
    }
}

/// A call on a range that covers a neighbour and a part of it changes both, or nothing.
#[test]
fn a_range_that_ends_inside_it_is_refused() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds().into_iter().filter(|(order, _)| *order > 0) {
        let (morsel, mapping) = populated(kind);
        // The kernel may have something there already.
        let below = Mapping::anonymous(Some(mapping.start() - PAGE), PAGE);
        assert!(matches!(below, Ok(_) | Err(Errno::EXIST)));
        assert_eq!(sys::munmap(mapping.start() - PAGE, 2 * PAGE), Err(Errno::INVAL));
        assert_unchanged(&morsel, &mapping);
        if below.is_ok() {
            assert_eq!(access::store(mapping.start() - 1, 1), Ok(()));
        }
        assert_eq!(sys::munmap(mapping.end() - PAGE, 2 * PAGE), Err(Errno::INVAL));
        assert_unchanged(&morsel, &mapping);
    }
}

#[test]
fn it_cannot_be_moved_or_resized() {
    let Some(_turn) = morsel_turn() else { return };
    let (may_move, fixed) = (libc::MREMAP_MAYMOVE, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let (start, length) = (mapping.start(), mapping.length());
        assert!(sys::mremap(start, length, 2 * length, 0).is_err());
        assert!(sys::mremap(start, length, 2 * length, may_move).is_err());
        assert!(sys::mremap(start, length, length + PAGE, may_move).is_err());
        assert!(sys::mremap(start, 0, length, may_move).is_err(), "a second mapping of it");
        if kind.0 > 0 {
            assert!(sys::mremap(start, length, length / 2, 0).is_err());
            assert!(sys::mremap(start, length, PAGE, may_move).is_err());
        }
        assert_unchanged(&morsel, &mapping);
        for (flags, offset) in [(fixed, 0), (fixed, PAGE), (fixed | libc::MREMAP_DONTUNMAP, 0)] {
            let target = free_addresses(2 * length) + offset;
            let at = std::ptr::with_exposed_provenance_mut::<libc::c_void>(start);
            // SAFETY: the addresses of the target are free.
            let moved = unsafe { libc::mremap(at, length, length, flags, target) };
            assert_eq!(moved, libc::MAP_FAILED, "{kind:x?} {flags}");
            assert!(access::load(target).is_err(), "a mapping was left there");
            assert_unchanged(&morsel, &mapping);
        }
        let flags = may_move | libc::MREMAP_DONTUNMAP;
        assert!(sys::mremap(start, length, length, flags).is_err());
        assert_unchanged(&morsel, &mapping);
        assert_eq!(morsel.stat().mounts, 1);
    }
}

/// The advice that the kernel accepts for ordinary memory.
#[test]
fn advice_does_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    // Without removal, which punches pages, and poisoning, which takes memory from the machine.
    let advices = (0..26).chain([101, 102]).filter(|advice| ![9, 100, 101].contains(advice));
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        for advice in advices.clone() {
            for (from, length) in [(0, PAGE), (0, mapping.length().min(1 << 30))] {
                // Without a pinnable order 3, all of which would be populated.
                let _ = sys::madvise(mapping.start() + from, length.min(64 << 20), advice);
                assert_unchanged(&morsel, &mapping);
            }
        }
    }
}

/// MADV_REMOVE punches pages that other processes have, too.
#[test]
fn removal_punches_pages() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let pages = morsel.stat().pages;
        sys::madvise(mapping.start(), PAGE, libc::MADV_REMOVE).unwrap();
        assert_eq!(morsel.stat().pages, pages - 1);
        assert_eq!(access::load(mapping.start()), Ok(0));
        assert_morsels_are_sound();
    }
}

#[test]
fn mappings_of_one_process_show_the_same() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let morsel = Morsel::of(kind);
        let mappings: Vec<Mapping> = (0..4).map(|_| morsel.mapped()).collect();
        let reader = morsel.map(libc::PROT_READ).unwrap();
        for (stamp, writer) in mappings.iter().enumerate() {
            for page in ends(kind.0) {
                writer.stamp(page, stamp as u64);
                mappings.iter().chain([&reader]).for_each(|mapping| {
                    mapping.assert_stamped(page, stamp as u64);
                });
                morsel.assert_stamped(page, stamp as u64);
            }
        }
        assert_eq!(morsel.stat().mounts, 5);
        morsel.punch(0, extent(kind.0)).unwrap();
        for mapping in mappings.iter().chain([&reader]) {
            assert_eq!(access::load(mapping.page(ends(kind.0)[1])), Ok(0));
        }
        assert_morsels_are_sound();
    }
}

#[test]
fn mappings_come_and_go() {
    let Some(_turn) = morsel_turn() else { return };
    for kind in kinds() {
        let (morsel, mapping) = populated(kind);
        let before = Memory::now();
        // The address space has room for 255 of the largest.
        for (rounds, at_once) in [(400, 1), (4, 100)] {
            for round in 0..rounds {
                let rights = [sys::READ_WRITE, libc::PROT_READ][round % 2];
                let mappings: Vec<Mapping> =
                    (0..at_once).map(|_| morsel.map(rights).unwrap()).collect();
                mappings.iter().step_by(7).for_each(|mapping| mapping.assert_stamped(0, 7));
                assert_eq!(morsel.stat().mounts, 1 + at_once as u64);
            }
        }
        assert_unchanged(&morsel, &mapping);
        before.assert_back();
    }
}

/// A Morsel that is bound to an address.
fn bound(order: u32, address: usize) -> Morsel {
    let morsel = Morsel::nameless();
    let create = morsel::Create { address: address as u64, ..plan(order, extent(order), 0) };
    morsel.create(&create).unwrap();
    assert_eq!(morsel.stat().address, address as u64);
    morsel
}

#[test]
fn it_may_be_bound_to_an_address() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 0..=highest_order() {
        let address = free_addresses(extent(order) as usize);
        let morsel = bound(order, address);
        let right = morsel.request(sys::READ_WRITE);
        let fixed = libc::MAP_SHARED | libc::MAP_FIXED;
        let elsewhere = address + 2 * right.length;
        for _ in 0..2 {
            let mapping = morsel.mapped();
            assert_eq!(mapping.start(), address);
            mapping.stamp(0, 7);
            // The first mapping has the address, and it cannot be mapped elsewhere.
            assert_eq!(morsel.map(sys::READ_WRITE).unwrap_err(), Errno::EXIST);
            let other = Mapping::new(Request { address: elsewhere, flags: fixed, ..right });
            assert_eq!(other.unwrap_err(), Errno::INVAL);
            mapping.assert_stamped(0, 7);
            in_child(|| {
                // A child has no mapping there, and may map it there.
                let mapping = morsel.mapped();
                assert_eq!(mapping.start(), address);
                mapping.assert_stamped(0, 7);
            });
        }
        // Another address as a hint is ignored. The same address as a hint works.
        let mapping = Mapping::new(Request { address: elsewhere, ..right }).unwrap();
        assert_eq!(mapping.start(), address);
        let again = Mapping::new(Request { address, flags: fixed, ..right }).unwrap();
        mapping.leave();
        again.assert_stamped(0, 7);
        assert_eq!(morsel.stat().mounts, 1);
    }
}

#[test]
fn a_mapping_in_the_way_is_unchanged() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 0..=highest_order() {
        let length = extent(order) as usize;
        let address = free_addresses(length);
        let morsel = bound(order, address);
        let last = address + length - PAGE;
        for (at, size) in [(address, PAGE), (last, PAGE), (address, length)] {
            let ordinary = Mapping::anonymous(Some(at), size).unwrap();
            ordinary.stamp(0, 5);
            assert_eq!(morsel.map(sys::READ_WRITE).unwrap_err(), Errno::EXIST);
            assert_eq!(morsel.map(libc::PROT_READ).unwrap_err(), Errno::EXIST);
            ordinary.assert_stamped(0, 5);
        }
        // Next to it there is room.
        let below = Mapping::anonymous(Some(address - PAGE), PAGE);
        let above = Mapping::anonymous(Some(address + length), PAGE);
        let mapping = morsel.mapped();
        assert_eq!(mapping.start(), address);
        for beside in [&below, &above].into_iter().flatten() {
            beside.stamp(0, 6);
            beside.assert_stamped(0, 6);
        }
        let fault = Fault { signal: libc::SIGSEGV, address };
        drop(mapping);
        assert_eq!(access::load(address), Err(fault));
    }
}
