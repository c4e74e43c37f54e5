//! Creating a Morsel, its sizes, and its end.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;

use rustix::io::Errno;
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::{Name, highest_order, path, plan};
use vellum_kernel_tests::{Morsel, PAGE, access, morsel_turn, sys};
use vellum_uapi::morsel::{self, extent};

const MIB: u64 = 1 << 20;

#[test]
fn each_order_covers_its_extent() {
    let Some(_turn) = morsel_turn() else { return };
    for order in 0..=highest_order() {
        let before = Memory::now();
        let morsel = Morsel::whole(order);
        let stat = morsel.stat();
        assert_eq!((stat.order, stat.length), (order, extent(order)));
        assert_eq!((stat.pages, stat.tables, stat.mounts), (0, 1, 0), "creation costs one table");

        let mapping = morsel.mapped();
        assert_eq!(mapping.start() as u64 % extent(order), 0);
        let last = extent(order) / PAGE as u64 - 1;
        let pages: BTreeSet<u64> = [0, last / 2, last].into();
        for page in pages.iter().copied() {
            assert_eq!(access::load(mapping.page(page)), Ok(0));
            assert_eq!(access::store(mapping.page(page), page as u8 | 1), Ok(()));
            assert_eq!(access::load(mapping.page(page)), Ok(page as u8 | 1));
        }
        let stat = morsel.stat();
        assert_eq!((stat.pages, stat.mounts), (pages.len() as u64, 1));
        assert!(stat.tables <= 1 + 3 * u64::from(order), "{stat:?}");
        assert_morsels_are_sound();
        drop(mapping);
        assert_eq!(morsel.stat().mounts, 0);
        drop(morsel);
        before.assert_back();
    }
}

#[test]
fn page_tables_take_one_512th() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::whole(2);
    morsel.populate(0, 256 * MIB).unwrap();
    let stat = morsel.stat();
    assert_eq!(stat.pages, 256 * MIB / PAGE as u64);
    assert_eq!(stat.tables, 1 + 128, "a table for 2 MiB, and the root");
    assert_morsels_are_sound();
}

#[test]
fn a_wrong_shape_is_refused() {
    let Some(_turn) = morsel_turn() else { return };
    let wrong = [
        plan(highest_order() + 1, 1, 0),
        plan(u32::MAX, 1, 0),
        plan(1, 0, 0),
        plan(1, extent(1) + 1, 0),
        plan(0, 4097, 0),
        plan(2, 4096, 1 << 63),
        plan(1, 4096, morsel::HUGE),
        plan(2, 4096, morsel::HUGE | morsel::PINNABLE),
        morsel::Create { address: 4096, ..plan(1, 4096, 0) },
        morsel::Create { address: 1 << 57, ..plan(1, 4096, 0) },
        morsel::Create { address: !(extent(2) - 1), ..plan(2, 4096, 0) },
        morsel::Create { size: 8, ..plan(1, 4096, 0) },
    ];
    let morsel = Morsel::nameless();
    for create in wrong {
        assert_eq!(morsel.create(&create), Err(Errno::INVAL), "{create:?}");
    }
    assert_eq!(morsel.map(sys::READ_WRITE).unwrap_err(), Errno::INVAL, "no shape yet");
    assert_eq!(morsel.populate(0, 4096), Err(Errno::FBIG));
    assert_eq!(morsel.for_reading().create(&plan(1, 4096, 0)), Err(Errno::BADF));
    morsel.create(&plan(1, 4096, 0)).unwrap();
    assert_eq!(morsel.create(&plan(1, 4096, 0)), Err(Errno::BUSY));
}

#[test]
fn a_length_gets_the_smallest_order() {
    let Some(_turn) = morsel_turn() else { return };
    let shapes = [(1, 0), (4096, 0), (4097, 1), (2 * MIB + 1, 2), ((1 << 30) + 1, 3)];
    for (length, order) in shapes {
        let morsel = Morsel::nameless();
        morsel.file().set_len(length).unwrap();
        let stat = morsel.stat();
        assert_eq!((stat.order, stat.length), (order, length));
        assert_eq!(morsel.file().metadata().unwrap().len(), length);
        morsel.file().set_len(length).unwrap();
        assert!(morsel.file().set_len(length + 1).is_err(), "its length does not change");
    }
    assert!(Morsel::nameless().file().set_len(extent(highest_order()) + 1).is_err());
}

#[test]
fn it_lives_as_long_as_a_name_or_a_descriptor_or_a_mapping() {
    let Some(_turn) = morsel_turn() else { return };
    let before = Memory::now();
    {
        let _name = Name("lives");
        let morsel = Morsel::named("lives");
        morsel.create(&plan(2, 64 * MIB, 0)).unwrap();
        morsel.stamp(7, 7);
        drop(morsel);
        let morsel = Morsel::open("lives", true).unwrap();
        morsel.assert_stamped(7, 7);
        fs::remove_file(path("lives")).unwrap();
        assert!(Morsel::open("lives", true).is_err());
        morsel.assert_stamped(7, 7);
        let mapping = morsel.mapped();
        drop(morsel);
        let bytes = access::kernel_load(mapping.page(7), PAGE).unwrap();
        assert_eq!(bytes, access::stamped(7));
    }
    before.assert_back();
}

#[test]
fn there_are_no_pages_beyond_its_length() {
    let Some(_turn) = morsel_turn() else { return };
    for order in [1, 2, 3] {
        let morsel = Morsel::new(order, 3 * PAGE as u64 + 5, 0);
        let mapping = morsel.mapped();
        assert_eq!(access::store(mapping.page(3) + 5, 9), Ok(()), "the whole page is present");
        for page in [4, 511, extent(order) / PAGE as u64 - 1] {
            let address = mapping.page(page);
            let fault = access::Fault { signal: libc::SIGBUS, address };
            assert_eq!(access::load(address), Err(fault));
            assert_eq!(access::store(address, 1), Err(fault));
            assert_eq!(access::kernel_load(address, 1), Err(Errno::FAULT));
        }
        assert_eq!(morsel.stat().pages, 1);
        assert_eq!(morsel.populate(0, 3 * PAGE as u64 + 6), Err(Errno::FBIG));
        morsel.populate(0, 3 * PAGE as u64 + 5).unwrap();
        assert_eq!(morsel.stat().pages, 4);
    }
}
