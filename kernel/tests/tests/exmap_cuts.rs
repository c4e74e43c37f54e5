//! Commands and faults that stand still in the midst while another thread uses the same pages.
#![allow(clippy::unwrap_used)]

use std::fs::OpenOptions;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;

use vellum_kernel_tests::backing::Backing;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::threads::cut_in;
use vellum_kernel_tests::{PAGE, Plan, Surface, sys, turn_for, turn_with};
use vellum_uapi::exmap::{self, Harvest, Move};

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
        4 * ROUNDS,
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

/// Pages that one thread brings by a long vector.
const MANY: u64 = 200;
/// A page that no other thread uses.
const OTHER: u64 = 900;

/// A command that finds a page and leaves it there. Returns whether it has found one.
type Finds = fn(&Surface, u64) -> bool;

const FINDERS: [(&str, Finds); 6] = [
    ("ALLOC", |surface, page| surface.alloc(1, &[(page, 1)]) == [(0, 0)]),
    ("READ", |surface, page| surface.read(1, &[(page, 1)]) == [(0, 0)]),
    ("WRITE", |surface, page| surface.write(1, &[(page, 1)]) == [(0, 1)]),
    ("pread", |surface, page| {
        sys::pread(surface.exmap.as_fd(), surface.mapping.page(page), PAGE, 1) == Ok(0)
    }),
    ("HARVEST", |surface, page| {
        let size = size_of::<Harvest>() as u32;
        let harvest = Harvest { size, flags: 0, page, count: 1, accessed: 0, written: 0 };
        surface.exmap.pass(exmap::HARVEST, (&raw const harvest).expose_provenance()) == Ok(1)
    }),
    ("MOVE", |surface, page| {
        let size = size_of::<Move>() as u32;
        let request = Move { size, interface: 1, from: OTHER, to: page, count: 1 };
        surface.exmap.pass(exmap::MOVE, (&raw const request).expose_provenance()) == Ok(0)
    }),
];

/// A thread that brings many pages stands still before it has flushed. This processor may have in
/// its TLB that the pages show zeros, but no longer when another thread's command has found a page.
#[test]
fn a_page_that_a_command_has_found_shows_zeros_no_more() {
    let Some(_turn) = turn_for(exmap::CAN_READ | exmap::CAN_WRITE) else { return };
    let memory = OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    let backing = Backing::device(PAGES);
    let plan = Plan::new(PAGES, 300).interfaces(2).flags(exmap::READS_ZEROS);
    let surface = plan.backing(&backing.file).make();
    let singly: Vec<(u64, u64)> = (0..MANY).map(|page| (page, 1)).collect();
    let read_all = || (0..MANY).for_each(|page| assert!(surface.load(page).is_ok()));
    let mut random = Random::of_this_run();
    let (mut value, mut found) = (0, [0; FINDERS.len()]);
    for (at, (name, find)) in FINDERS.iter().enumerate() {
        read_all();
        let bring = || drop(surface.alloc(0, &singly));
        let look_for_one = || {
            let page = random.below(MANY);
            assert!(surface.load(page).is_ok());
            if !find(&surface, page) {
                return;
            }
            found[at] += 1;
            // The kernel writes to the frame, and does not ask the TLB where that is.
            value = value % 250 + 1;
            memory.write_all_at(&[value], surface.mapping.page(page) as u64).unwrap();
            assert_eq!(surface.load(page), Ok(value), "page {page}, found by {name}");
        };
        cut_in(ROUNDS, bring, look_for_one, || {
            surface.free(0, &[(0, MANY)]);
            surface.alloc(0, &[(OTHER, 1)]);
            read_all();
        });
    }
    println!("found: {found:?}");
}
