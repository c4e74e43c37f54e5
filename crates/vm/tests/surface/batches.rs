//! The contract of every backend, tested on each one that the kernel has.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Own, Refused, entries, smaps};
use vellum_testing::own_process::entered;
use vellum_testing::patience::SetWhenDropped;
use vellum_vm::{
    Advice, BackendChoice, BackendKind, Entry, Errno, FaultBehaviour, PAGE_SIZE, PageRange,
    Surface, SurfaceError, probe,
};

on_every_backend!(
    a_fresh_surface_is_empty_and_zero,
    populate_makes_resident_and_keeps_contents,
    release_frees_memory_and_leaves_zeros,
    the_zero_page_is_not_resident,
    residency_agrees_with_smaps,
    bad_entries_fail_alone,
    entries_that_the_kernel_refuses_fail_alone,
    populating_unwritable_pages_fails_alone,
    more_entries_than_a_vector_takes,
    many_refused_entries_among_thousands,
    one_entry_larger_than_a_call,
    adjacent_duplicate_and_overlapping_entries,
    empty_batches_and_empty_ranges,
    threads_use_their_own_pages,
    growing_while_in_use,
    growing_past_the_mapped_range,
    a_forked_child_has_no_surface,
    advice_keeps_contents,
);

fn a_fresh_surface_is_empty_and_zero(backend: BackendKind) {
    let own = Own::new(100, backend);
    assert_eq!(own.surface.pages(), 100);
    assert_eq!(own.surface.backend(), backend);
    let writes_fault = own.surface.fault_behaviour() == FaultBehaviour::WritesFault;
    assert_eq!(writes_fault, backend == BackendKind::Exmap);
    assert_eq!(own.resident(), 0);
    assert!(own.holds(0, 0) && own.holds(99, 0));
    assert_eq!(own.surface.address(0), own.surface.base());
    assert_eq!(own.surface.base().addr().get() % PAGE_SIZE, 0);
    let distance = own.surface.address(99).addr().get() - own.surface.base().addr().get();
    assert_eq!(distance, 99 * PAGE_SIZE);
}

fn populate_makes_resident_and_keeps_contents(backend: BackendKind) {
    let own = Own::new(100, backend);
    own.fill(10, 0xAA);
    let mut batch = entries([(10, 1), (20, 5), (40, 1)]);
    assert_eq!(own.surface.populate(&mut batch), 0);
    assert!(batch.iter().all(|entry| entry.result == Ok(())));
    let residency = own.surface.residency(PageRange::new(5, 95)).unwrap();
    assert_eq!(residency.iter().collect::<Vec<_>>(), [10, 20, 21, 22, 23, 24, 40]);
    assert_eq!(residency.resident(), 7);
    assert_eq!(residency.range(), PageRange::new(5, 95));
    assert!(!residency.is_resident(0) && !residency.is_resident(1000));
    assert!(own.holds(10, 0xAA) && own.is_fresh(20) && own.is_fresh(40));
    assert_eq!(own.surface.populate(&mut batch), 0);
    assert!(own.holds(10, 0xAA));
}

fn release_frees_memory_and_leaves_zeros(backend: BackendKind) {
    let own = Own::new(100, backend);
    (0..100).for_each(|page| own.fill(page, 1 + page as u8));
    assert_eq!(own.resident(), 100);
    assert_eq!(own.release(&mut entries([(3, 1), (50, 10), (99, 1)])), 0);
    assert_eq!(own.resident(), 88);
    for page in 0..100 {
        let released = page == 3 || (50..60).contains(&page) || page == 99;
        assert!(own.holds(page, if released { 0 } else { 1 + page as u8 }), "page {page}");
    }
    assert_eq!(own.release(&mut entries([(0, 100), (3, 1)])), 0);
    assert_eq!(own.resident(), 0);
}

fn the_zero_page_is_not_resident(backend: BackendKind) {
    let own = Own::new(8, backend);
    assert!(own.holds(2, 0) && own.holds(3, 0));
    assert_eq!(own.resident(), 0);
    own.fill(3, 0);
    assert_eq!(own.resident(), 1);
}

fn residency_agrees_with_smaps(backend: BackendKind) {
    let own = Own::new(70_000, backend);
    let mut batch: Vec<Entry> = (0..700).map(|index| Entry::page(index * 100)).collect();
    assert_eq!(own.surface.populate(&mut batch), 0);
    // Reading the other pages maps the zero page there.
    (0..700).for_each(|index| assert!(own.holds(index * 100 + 1, 0)));
    let base = own.surface.base().addr().get();
    let by_kernel = |field| smaps(base, 1 << 30, field) / 4;
    assert_eq!((own.resident(), by_kernel("Rss")), (700, 700));
    let frames_are_the_kernels_to_give = backend != BackendKind::Exmap;
    let anonymous = if frames_are_the_kernels_to_give { 700 } else { 0 };
    assert_eq!(by_kernel("Anonymous"), anonymous);
    assert_eq!(own.release(&mut batch[..350]), 0);
    assert_eq!((own.resident(), by_kernel("Rss")), (350, 350));
}

fn bad_entries_fail_alone(backend: BackendKind) {
    let own = Own::new(16, backend);
    own.fill(0, 7);
    let ranges = [(1, 2), (15, 2), (16, 1), (u64::MAX, 2), (4, 1), (0, u64::MAX), (9, 0)];
    let bad = [1, 2, 3, 5];
    let mut batch = entries(ranges);
    assert_eq!(own.surface.populate(&mut batch), 4);
    for (index, entry) in batch.iter().enumerate() {
        let expected = if bad.contains(&index) { Err(Errno::INVAL) } else { Ok(()) };
        assert_eq!(entry.result, expected, "entry {index}");
    }
    assert_eq!(own.resident(), 4);
    assert_eq!(own.release(&mut batch), 4);
    assert_eq!(own.resident(), 1);
    assert!(own.holds(0, 7), "an entry out of range had an effect");
    // Each call sets all results.
    assert_eq!(own.release(&mut batch[..1]), 0);
}

fn entries_that_the_kernel_refuses_fail_alone(backend: BackendKind) {
    let own = Own::new(64, backend);
    (0..64).for_each(|page| own.fill(page, 5));
    let mut refused = Refused::default();
    refused.add(&own, 20);
    let mut batch: Vec<Entry> = (10..30).map(Entry::page).collect();
    assert_eq!(own.release(&mut batch), 1);
    for entry in &batch {
        let page = entry.range.start;
        let expected = if page == 20 { Err(Refused::errno(backend)) } else { Ok(()) };
        assert_eq!(entry.result, expected, "page {page}");
        assert!(own.holds(page, if page == 20 { 5 } else { 0 }), "page {page}");
    }
    for first_or_last in [&mut entries([(20, 1), (31, 1)]), &mut entries([(32, 1), (20, 1)])] {
        assert_eq!(own.release(first_or_last), 1);
        assert_eq!(first_or_last.iter().filter(|entry| entry.range.start == 20).count(), 1);
    }
    assert_eq!(own.release(&mut entries([(20, 1)])), 1);
    assert_eq!(own.resident(), 64 - 21);
}

fn populating_unwritable_pages_fails_alone(backend: BackendKind) {
    if probe::facilities().get("MADV_POPULATE_WRITE").is_none_or(|facility| !facility.found) {
        eprintln!("skipped: pages are populated by touching, which cannot report errors");
        return;
    }
    if backend == BackendKind::Exmap {
        // The rights of an exmap's pages cannot be changed. `exmap.rs` tests the failures there.
        return;
    }
    let own = Own::new(32, backend);
    let address = own.surface.address(8).as_ptr().cast();
    // SAFETY: nothing writes the page from here on.
    assert_eq!(unsafe { libc::mprotect(address, PAGE_SIZE, libc::PROT_READ) }, 0);
    let mut batch = entries([(1, 1), (8, 1), (3, 1), (7, 3), (12, 1)]);
    assert_eq!(own.surface.populate(&mut batch), 2);
    let failed: Vec<bool> = batch.iter().map(|entry| entry.result.is_err()).collect();
    assert_eq!(failed, [false, true, false, true, false]);
    let residency = own.surface.residency(PageRange::new(0, 32)).unwrap();
    assert!([1, 3, 12].iter().all(|page| residency.is_resident(*page)));
    assert!(!residency.is_resident(8));
}

fn more_entries_than_a_vector_takes(backend: BackendKind) {
    let own = Own::new(10_000, backend);
    let mut batch: Vec<Entry> = (0..3_000).map(|index| Entry::page(index * 3)).collect();
    batch.insert(1_023, Entry::page(10_000));
    batch.insert(2_048, Entry::page(20_000));
    assert_eq!(own.surface.populate(&mut batch), 2);
    assert_eq!(own.resident(), 3_000);
    own.fill(1, 1);
    assert_eq!(own.release(&mut batch), 2);
    assert_eq!(batch[1_023].result, Err(Errno::INVAL));
    assert_eq!(own.resident(), 1);
}

fn many_refused_entries_among_thousands(backend: BackendKind) {
    let own = Own::new(2_600, backend);
    let mut batch: Vec<Entry> = (0..2_600).map(Entry::page).collect();
    assert_eq!(own.surface.populate(&mut batch), 0);
    let refused = |page: u64| page.is_multiple_of(101) || page == 1_023 || page == 1_024;
    let mut pages = Refused::default();
    (0..2_600).filter(|page| refused(*page)).for_each(|page| pages.add(&own, page));
    let expected = (0..2_600).filter(|page| refused(*page)).count();
    assert_eq!(own.release(&mut batch), expected);
    assert!(batch.iter().all(|entry| entry.result.is_err() == refused(entry.range.start)));
    assert_eq!(own.resident(), expected as u64);
}

fn one_entry_larger_than_a_call(backend: BackendKind) {
    // 5 GiB of addresses, more than the kernel takes in one vector. Only a few pages are populated.
    let pages = 5 << 18;
    let own = Own::new(pages, backend);
    let touched = [0, 1, (1 << 18) - 1, 1 << 18, (2 << 18) - 1, 2 << 18, pages - 1];
    touched.into_iter().for_each(|page| own.fill(page, 3));
    let mut batch = entries([(1, pages - 2), (0, 1), (pages - 1, 1)]);
    assert_eq!(own.release(&mut batch[..2]), 0);
    assert!(own.holds(pages - 1, 3));
    assert_eq!(own.resident(), 1);
    assert_eq!(own.release(&mut batch), 0);
    assert_eq!(own.resident(), 0);
}

fn adjacent_duplicate_and_overlapping_entries(backend: BackendKind) {
    let own = Own::new(64, backend);
    let mut batch = entries([(10, 2), (12, 2), (11, 1), (11, 1), (8, 8), (13, 1)]);
    assert_eq!(own.surface.populate(&mut batch), 0);
    assert_eq!(own.resident(), 8);
    (8..16).for_each(|page| own.fill(page, 9));
    assert_eq!(own.release(&mut batch[..4]), 0);
    assert_eq!(own.resident(), 4);
    assert!(own.holds(9, 9) && own.holds(14, 9) && own.holds(10, 0) && own.holds(13, 0));
    assert_eq!(own.release(&mut batch), 0);
    assert_eq!(own.resident(), 0);
}

fn empty_batches_and_empty_ranges(backend: BackendKind) {
    let own = Own::new(4, backend);
    assert_eq!(own.surface.populate(&mut []), 0);
    assert_eq!(own.release(&mut []), 0);
    let mut batch = entries([(0, 0), (4, 0), (5, 0)]);
    assert_eq!(own.surface.populate(&mut batch), 1);
    assert_eq!(own.release(&mut batch), 1);
    assert_eq!(batch[2].result, Err(Errno::INVAL));
    assert_eq!(own.surface.resident_pages(PageRange::new(4, 0)), Ok(0));
    let empty = Own::new(0, backend);
    assert_eq!((empty.surface.pages(), empty.resident()), (0, 0));
    empty.surface.grow(1).unwrap();
    empty.fill(0, 1);
}

fn threads_use_their_own_pages(backend: BackendKind) {
    const THREADS: u64 = 4;
    let own = Own::new(4_096, backend);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let own = &own;
            scope.spawn(move || {
                for round in 0..12_u64 {
                    // Neighbouring pages belong to different threads.
                    let first = round * 37 * THREADS + thread;
                    let mut batch: Vec<Entry> =
                        (0..96).map(|index| Entry::page(first + index * THREADS)).collect();
                    let pages = || (0..96).map(|index| first + index * THREADS);
                    let value = |page: u64| (page % 251) as u8 + 1;
                    assert_eq!(own.surface.populate(&mut batch), 0);
                    pages().for_each(|page| own.fill(page, value(page)));
                    assert!(pages().all(|page| own.holds(page, value(page))));
                    assert_eq!(own.release(&mut batch), 0);
                    assert!(pages().all(|page| own.holds(page, 0)));
                }
            });
        }
    });
    assert_eq!(own.resident(), 0);
}

fn growing_while_in_use(backend: BackendKind) {
    let own = Own::new(64, backend);
    let base = own.surface.base();
    own.fill(63, 0x5A);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = SetWhenDropped(&done);
        let user = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) || rounds < 10 {
                let pages = own.surface.pages();
                let mut batch = entries([(0, 8), (pages - 1, 1)]);
                assert_eq!(own.surface.populate(&mut batch), 0);
                (0..8).for_each(|page| own.fill(page, 0x77));
                assert_eq!(own.release(&mut batch[..1]), 0);
                assert!((0..8).all(|page| own.holds(page, 0)));
                rounds += 1;
            }
        });
        let growers = [1_u64, 2].map(|step| {
            let own = &own;
            scope.spawn(move || {
                for round in 1..=60 {
                    own.surface.grow(64 + round * step * 8_192).unwrap();
                    assert!(own.surface.pages() >= 64 + round * step * 8_192);
                }
            })
        });
        growers.into_iter().for_each(|grower| grower.join().unwrap());
        drop(end);
        user.join().unwrap();
    });
    assert_eq!(own.surface.pages(), 64 + 60 * 2 * 8_192);
    assert_eq!(own.surface.base(), base);
    assert!(own.holds(63, 0x5A));
}

fn growing_past_the_mapped_range(backend: BackendKind) {
    // Runs alone, because each surface of another test would take half of the room that this one
    // has to grow.
    if !entered(&format!("batches::{backend}::growing_past_the_mapped_range")) {
        return;
    }
    let own = Own::new(1, backend);
    own.fill(0, 1);
    let mut pages = 1;
    // The surface of an exmap is mapped once, with room to grow: see `exmap.rs`.
    let end = if backend == BackendKind::Exmap { 1 << 20 } else { 1 << 28 };
    while pages < end {
        pages *= 8;
        own.surface.grow(pages).unwrap();
        own.surface.grow(pages / 2).unwrap();
        assert_eq!(own.surface.pages(), pages);
        own.fill(pages - 1, 2);
    }
    assert_eq!(own.release(&mut [Entry::new(PageRange::new(1, pages - 1))]), 0);
    assert!(own.holds(0, 1) && own.holds(pages - 1, 0));
    let error = own.surface.grow(u64::MAX).unwrap_err();
    assert!(matches!(error, SurfaceError::Reserve(_)), "{error:?}");
    assert_eq!(own.surface.pages(), pages);
}

fn a_forked_child_has_no_surface(backend: BackendKind) {
    let own = Own::new(1 << 15, backend);
    own.surface.grow(1 << 16).unwrap();
    own.fill(0, 1);
    own.fill(40_000, 1);
    let pages = [0, 1, 40_000, (1 << 16) - 1].map(|page| own.surface.address(page).as_ptr());
    // SAFETY: the child of a process with threads only makes system calls before it exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mapped = pages.iter().any(|page| {
            let mut residency = 0_u8;
            // SAFETY: `mincore` writes one byte; it says ENOMEM for addresses that are not mapped.
            0 == unsafe { libc::mincore(page.cast(), PAGE_SIZE, &raw mut residency) }
        });
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(i32::from(mapped)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child sees the surface");
    assert!(own.holds(0, 1));
}

fn advice_keeps_contents(backend: BackendKind) {
    // The size of two huge pages, so that one lies inside, whatever the alignment of the base.
    let own = Own::new(1024, backend);
    (0..1024).for_each(|page| own.fill(page, (page % 250) as u8 + 1));
    let all = PageRange::new(0, 1024);
    if backend == BackendKind::Exmap {
        let error = own.surface.advise(all, Advice::Cold).unwrap_err();
        assert_eq!(error, SurfaceError::NoAdvice { advice: Advice::Cold, backend });
        assert!(!own.surface.can_collapse());
        assert!(own.surface.collapse(all).is_err() && own.surface.split(5).is_err());
        assert!((0..1024).all(|page| own.holds(page, (page % 250) as u8 + 1)));
        return;
    }
    for advice in [Advice::Cold, Advice::WillNeed, Advice::PageOut, Advice::NoHugePage] {
        own.surface.advise(all, advice).unwrap();
    }
    if probe::facilities().get("MADV_COLLAPSE").is_some_and(|facility| facility.found) {
        own.surface.advise(all, Advice::HugePage).unwrap();
        own.surface.advise(all, Advice::Collapse).unwrap();
        own.surface.advise(all, Advice::NoHugePage).unwrap();
    }
    assert!((0..1024).all(|page| own.holds(page, (page % 250) as u8 + 1)));
    let error = own.surface.advise(PageRange::new(1000, 25), Advice::Cold).unwrap_err();
    assert_eq!(error, SurfaceError::OutOfRange { range: PageRange::new(1000, 25), pages: 1024 });
    assert!(own.surface.residency(PageRange::new(1024, 1)).is_err());
    // Single pages can be released, whatever size the pages had.
    assert_eq!(own.release(&mut [Entry::page(700)]), 0);
    assert!(own.holds(700, 0) && own.holds(699, 200) && own.holds(701, 202));
}

#[test]
fn auto_is_the_choice_of_the_probe() {
    let surface = Surface::reserve_with_frames(1, 1, BackendChoice::Auto).unwrap();
    assert_eq!(surface.backend(), probe::choice().backend);
    assert!(probe::backends().contains(&surface.backend()));
    // An exmap takes all of its memory at once, so auto takes one only if the caller sets the size.
    let surface = Surface::reserve(1, BackendChoice::Auto).unwrap();
    assert_eq!(surface.backend(), probe::choice_without_exmap().backend);
    assert_ne!(surface.backend(), BackendKind::Exmap);
}

#[test]
#[should_panic(expected = "page 4 is not within 4 pages")]
fn the_address_of_a_page_outside_is_a_programming_error() {
    Surface::reserve(4, BackendChoice::Auto).unwrap().address(4);
}
