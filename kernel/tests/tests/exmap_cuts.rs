//! Commands and faults that stand still in the midst while another thread uses the same pages.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use vellum_kernel_tests::threads::cut_in;
use vellum_kernel_tests::{Plan, Surface, sys, turn_with};
use vellum_uapi::exmap::{self, Harvest};

const PAGES: u64 = 1200;
/// The pages of these are in a table of the process' own.
const TAIL: u64 = 1024;
const ROUNDS: u32 = 120;

/// The pages of the tail that were written since the last harvest.
fn written(surface: &Surface) -> Vec<u64> {
    let mut words = [0_u64; 3];
    let harvest = Harvest {
        size: size_of::<Harvest>() as u32,
        flags: exmap::CLEAR_ACCESSED | exmap::CLEAR_WRITTEN,
        page: TAIL,
        count: PAGES - TAIL,
        accessed: 0,
        written: words.as_mut_ptr().expose_provenance() as u64,
    };
    surface.exmap.pass(exmap::HARVEST, (&raw const harvest).expose_provenance()).unwrap();
    let is_written = |page: &u64| words[(page - TAIL) as usize / 64] >> ((page - TAIL) % 64) & 1;
    (TAIL..PAGES).filter(|page| is_written(page) == 1).collect()
}

fn alloc_tail(surface: &Surface) {
    surface.alloc(0, &[(TAIL, PAGES - TAIL)]);
}

fn free_tail(surface: &Surface) {
    let count = (PAGES - TAIL) as u16;
    assert_eq!(surface.free(0, &[(TAIL, PAGES - TAIL)]), [(0, count)]);
}

/// Has the kernel announce that it walks the page tables, before which the surface is detached.
fn detach(surface: &Surface) {
    let (start, length) = (surface.mapping.start(), surface.mapping.length());
    sys::madvise(start, length, libc::MADV_DONTNEED).unwrap();
}

/// Stores to the pages of the tail that are there, and returns them.
fn store_tail(surface: &Surface) -> Vec<u64> {
    (TAIL..PAGES).filter(|page| surface.store(*page, 1).is_ok()).collect()
}

#[track_caller]
fn assert_same(found: &[u64], expected: &[u64]) {
    let without = |pages: &[u64], others: &[u64]| -> Vec<u64> {
        pages.iter().copied().filter(|page| !others.contains(page)).collect()
    };
    let (lost, invented) = (without(expected, found), without(found, expected));
    assert!(lost.is_empty() && invented.is_empty(), "lost {lost:?}, invented {invented:?}");
}

#[test]
fn a_write_is_noted_while_another_thread_reads_zeros_there() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(PAGES, 300).flags(exmap::TRACKS | exmap::READS_ZEROS).make();
    let read = || (TAIL..PAGES).for_each(|page| assert!(surface.load(page).is_ok()));
    let write = || {
        alloc_tail(&surface);
        assert_eq!(store_tail(&surface).len() as u64, PAGES - TAIL);
    };
    cut_in(ROUNDS, read, write, || {
        assert_same(&written(&surface), &(TAIL..PAGES).collect::<Vec<u64>>());
        free_tail(&surface);
    });
}

#[test]
fn a_write_is_noted_while_another_thread_brings_the_page() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(PAGES, 300).flags(exmap::TRACKS | exmap::PINNABLE).make();
    let stored = Mutex::new(Vec::new());
    let store = || {
        // A page may be in the surface's tables, and not yet in the process' own. The fault of a
        // store copies all of them there.
        detach(&surface);
        *stored.lock().unwrap() = store_tail(&surface);
    };
    cut_in(
        ROUNDS,
        || alloc_tail(&surface),
        store,
        || {
            assert_same(&written(&surface), &stored.lock().unwrap());
            free_tail(&surface);
        },
    );
}

#[test]
fn a_harvest_has_what_was_written_before_it_and_the_next_one_has_not() {
    let Some(_turn) = turn_with(exmap::TRACKS) else { return };
    let surface = Plan::new(PAGES, 300).flags(exmap::TRACKS | exmap::PINNABLE).make();
    alloc_tail(&surface);
    let all = store_tail(&surface);
    assert_eq!(all.len() as u64, PAGES - TAIL);
    let found = Mutex::new(Vec::new());
    let harvest = || *found.lock().unwrap() = written(&surface);
    let detach_and_attach = || {
        detach(&surface);
        surface.load(TAIL).unwrap();
    };
    for again in [false, true] {
        let disturb = || if again { detach_and_attach() } else { detach(&surface) };
        cut_in(ROUNDS, harvest, disturb, || {
            assert_same(&found.lock().unwrap(), &all);
            assert_same(&written(&surface), &[]);
            assert_eq!(store_tail(&surface), all);
        });
    }
}
