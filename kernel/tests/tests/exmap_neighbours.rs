//! Mappings next to a surface. Page tables have slots of 2 MiB and 1 GiB. A mapping that shares a
//! slot with a surface does not change, or the surface is refused.
#![allow(clippy::unwrap_used)]

use std::os::fd::AsFd as _;

use rustix::io::Errno;
use vellum_kernel_tests::access::{self, kernel_load, kernel_store};
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, Surface, TABLE_PAGES, turn};
use vellum_uapi::exmap::{self, Entry};

const TABLE: usize = TABLE_PAGES as usize * PAGE;
const GIB: usize = 1 << 30;

/// A surface at an address of the test's choice.
fn map_at(exmap: &Exmap, address: usize, length: usize, more: i32) -> Result<Mapping, Errno> {
    Mapping::new(Request {
        address,
        length,
        protection: sys::READ_WRITE,
        flags: libc::MAP_SHARED | more,
        fd: Some(exmap.as_fd()),
        offset: exmap::OFFSET_SURFACE,
    })
}

/// Room for a test, and the first address in it that is a multiple of 1 GiB.
fn room(length: usize) -> (Mapping, usize) {
    let room = Mapping::anonymous(None, length + 2 * GIB).unwrap();
    let aligned = (room.start() + TABLE).next_multiple_of(GIB);
    (room, aligned)
}

#[track_caller]
fn assert_holds(address: usize, stamp: u64) {
    assert!(kernel_load(address, PAGE).unwrap() == access::stamped(stamp), "at {address:#x}");
}

#[test]
fn a_fixed_address_must_be_aligned_to_tables() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(10, 1, 0);
    let (_room, aligned) = room(GIB);
    for wrong in [PAGE, TABLE / 2, TABLE - PAGE, TABLE + PAGE] {
        let refused = map_at(&exmap, aligned + wrong, 700 * PAGE, libc::MAP_FIXED).map(drop);
        assert_eq!(refused, Err(Errno::INVAL), "{wrong:#x}");
    }
    let mapping = map_at(&exmap, aligned + TABLE, 700 * PAGE, libc::MAP_FIXED).unwrap();
    assert_eq!(mapping.start(), aligned + TABLE);
    let surface = Surface { vectors: vec![exmap.vector(0).unwrap()], mapping, exmap };
    surface.assert_works();
}

/// Without MAP_FIXED, an unaligned address is only a hint.
#[test]
fn a_hint_for_an_address_is_rounded() {
    let Some(_turn) = turn() else { return };
    for wish in [PAGE, 0x10_0000_1000, 0x7000_0000_1000] {
        let exmap = Exmap::with(10, 1, 0);
        let mapping = map_at(&exmap, wish, 700 * PAGE, 0).unwrap();
        assert_eq!(mapping.start() % TABLE, 0, "{:#x}", mapping.start());
    }
}

#[test]
fn memory_after_a_surface_is_not_part_of_it() {
    let Some(_turn) = turn() else { return };
    let exmap = Exmap::with(700, 1, 0);
    let (room, aligned) = room(GIB);
    room.unmap().unwrap();
    let mapping = map_at(&exmap, aligned, 700 * PAGE, libc::MAP_FIXED_NOREPLACE).unwrap();
    let surface = Surface { vectors: vec![exmap.vector(0).unwrap()], mapping, exmap };
    let end = surface.mapping.end();
    let beside = match Mapping::anonymous(Some(end), 8 * PAGE) {
        Ok(beside) => beside,
        Err(error) => {
            println!("the rest of the table is kept free: {error}");
            return;
        }
    };
    kernel_store(end, &access::stamped(1)).unwrap();
    assert_eq!(surface.alloc(0, &[(0, 700)]), [(0, 700)]);
    surface.stamp(699, 2);
    assert_holds(end, 1);
    assert_eq!(surface.free(0, &[(0, 700)]), [(0, 700)]);
    assert_holds(end, 1);
    assert_eq!(surface.alloc(0, &[(699, 1)]), [(0, 1)]);
    sys::madvise(end, PAGE, libc::MADV_DONTNEED).unwrap();
    assert_eq!(kernel_load(end, PAGE).unwrap(), vec![0; PAGE]);
    surface.stamp(699, 3);
    kernel_store(end, &access::stamped(4)).unwrap();
    surface.assert_stamped(699, 3);
    drop(surface);
    assert_holds(end, 4);
    beside.unmap().unwrap();
}

/// Memory that is mapped before the surface, on both sides of it, in the same slots.
#[test]
fn a_surface_may_be_mapped_between_mappings() {
    let Some(_turn) = turn() else { return };
    for (offset, length) in [
        (0, 700 * PAGE),
        (TABLE, 700 * PAGE),
        (TABLE, TABLE),
        (0, GIB),
        (0, GIB + 5 * PAGE),
        (TABLE, 2 * GIB),
        (GIB - TABLE, GIB + 2 * TABLE + 5 * PAGE),
    ] {
        let (room, aligned) = room(3 * GIB);
        let start = aligned + offset;
        let (before, behind) = (start - PAGE, start + length);
        kernel_store(before, &access::stamped(1)).unwrap();
        kernel_store(behind, &access::stamped(2)).unwrap();
        let exmap = Exmap::with(64, 1, 0);
        match map_at(&exmap, start, length, libc::MAP_FIXED) {
            Ok(mapping) => {
                let surface = Surface { vectors: vec![exmap.vector(0).unwrap()], mapping, exmap };
                surface.assert_works();
                let last = (length / PAGE) as u64 - 1;
                assert_eq!(surface.alloc(0, &[(last, 1), (0, 1)]), [(0, 1); 2]);
                surface.stamp(last, 3);
                assert_holds(before, 1);
                assert_holds(behind, 2);
                surface.assert_stamped(last, 3);
                // The mapping of the whole room unmaps it.
                surface.mapping.leave();
            }
            Err(error) => println!("{length:#x} bytes at {offset:#x}: {error}"),
        }
        assert_holds(before, 1);
        assert_holds(behind, 2);
        room.unmap().unwrap();
    }
}

#[test]
fn it_may_be_unmapped_together_with_its_neighbours() {
    let Some(_turn) = turn() else { return };
    let (room, aligned) = room(GIB);
    let exmap = Exmap::with(64, 1, 0);
    let mapping = map_at(&exmap, aligned + TABLE, 2 * TABLE, libc::MAP_FIXED).unwrap();
    let surface = Surface { vectors: vec![exmap.vector(0).unwrap()], mapping, exmap };
    assert_eq!(surface.alloc(0, &[(0, 1), (1023, 1)]), [(0, 1); 2]);
    kernel_store(surface.mapping.end(), &access::stamped(1)).unwrap();
    let Surface { vectors, mapping, exmap } = surface;
    room.unmap().unwrap();
    mapping.leave();
    vectors[0].set(0, Entry::new(5, 1));
    assert_eq!(vectors[0].run(&exmap, exmap::ALLOC, 1), Err(Errno::NODEV));
    // A new mapping there is not the surface.
    let new = Mapping::anonymous(None, 3 * GIB).unwrap();
    assert_eq!(access::load(new.start()), Ok(0));
    drop((vectors, exmap));
}

/// Neighbouring surfaces share slots, too.
#[test]
fn surfaces_may_be_neighbours() {
    let Some(_turn) = turn() else { return };
    let surfaces = [(); 12].map(|()| Plan::new(520, 20).make());
    for (stamp, surface) in surfaces.iter().enumerate() {
        assert_eq!(surface.alloc(0, &[(0, 1), (510, 10)]), [(0, 1), (0, 10)]);
        surface.stamp(0, stamp as u64);
        surface.stamp(519, stamp as u64 + 100);
    }
    let mut left: Vec<Option<Surface>> = surfaces.into_iter().map(Some).collect();
    for goes in [3, 0, 11, 5, 6, 4] {
        left[goes] = None;
        for (stamp, surface) in left.iter().enumerate() {
            let Some(surface) = surface else { continue };
            surface.assert_stamped(0, stamp as u64);
            surface.assert_stamped(519, stamp as u64 + 100);
            surface.assert_works();
        }
    }
}
