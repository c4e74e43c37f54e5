//! Frames in anonymous memory, and how a file moves to a memory file.
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{
    BOTH_KINDS, Fixture, address, both_caches, load, memory_files, options, pages_in_memory,
    pattern, store, word_in,
};
use vellum_aquila::{
    Access, Advice, Backend, BackendChoice, Cache, DirtyTracking, Error, Frames, Mapping, PAGE_SIZE,
};
use vellum_testing::own_process;
use vellum_testing::random::Random;

fn cache(pages: usize) -> Cache {
    let only = BackendChoice::Only(Backend::Userfaultfd);
    options(pages).backend(only).frames(Frames::Anonymous).build().unwrap()
}

#[test]
fn a_file_has_a_memory_file_from_its_second_mapping_or_its_first_pin_on() {
    let test = "a_file_has_a_memory_file_from_its_second_mapping_or_its_first_pin_on";
    if !own_process::entered(test) {
        return;
    }
    for pins in [false, true] {
        let cache = cache(16);
        let fixture = Fixture::new();
        let file = fixture.file(64);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        (0..64).for_each(|page| store(&mapping, page, 1, 5));
        assert_eq!(memory_files(), (0, 0));
        assert!((8..=16).contains(&pages_in_memory(&mapping)));
        let (second, pin) = match pins {
            false => (Some(cache.map(&file, .., Access::ReadWrite).unwrap()), None),
            true => (None, Some(mapping.pin(..PAGE_SIZE, Access::Read).unwrap())),
        };
        assert_eq!((memory_files().0, pages_in_memory(&mapping)), (1, 0));
        for page in 0..64 {
            assert_eq!((load(&mapping, page, 0), load(&mapping, page, 1)), (pattern(page), 5));
            store(&mapping, page, 1, 6);
            let other = second.as_ref().unwrap_or(&mapping);
            assert_eq!(load(other, page, 1), 6);
        }
        assert!(memory_files().1 <= 16 * PAGE_SIZE as u64);
        drop((second, pin));
        assert_eq!(memory_files().0, 1, "it stays while the file has a mapping");
        mapping.sync().unwrap();
        let last = mapping.as_ptr();
        drop(mapping);
        assert_eq!(memory_files(), (0, 0));
        let mut bytes = vec![0; 64 * PAGE_SIZE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        (0..64).for_each(|page| assert_eq!(bytes[page * PAGE_SIZE + 8], 6));
        // The next mapping has anonymous memory once more.
        let mapping = cache.map(&file, .., Access::Read).unwrap();
        assert_eq!((load(&mapping, 3, 1), memory_files().0), (6, 0), "{last:?}");
    }
}

/// Threads load and store all the time, each its own words, while the file moves.
fn moves_while_it_is_used(work: impl Fn(&Cache, &File, &Mapping)) {
    const THREADS: usize = 3;
    const PAGES: usize = 48;
    let begin = Instant::now();
    // For some rounds, and on a slow machine for some time.
    for round in 0..40 {
        if round >= 3 && begin.elapsed() > Duration::from_secs(4) {
            break;
        }
        let cache = cache(16);
        let fixture = Fixture::new();
        let file = fixture.file(PAGES);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let (is_over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
        let last: Vec<Vec<u64>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let (mapping, is_over, steps) = (&mapping, &is_over, &steps);
                    scope.spawn(move || {
                        let mut random = Random((round * THREADS + thread) as u64 + 1);
                        let mut values = vec![0; PAGES];
                        while !is_over.load(Ordering::Relaxed) {
                            let page = random.index(PAGES);
                            let word = 8 + thread * 8;
                            assert_eq!(load(mapping, page, 0), pattern(page));
                            assert_eq!(load(mapping, page, word), values[page], "a store is lost");
                            if random.below(2) == 0 {
                                values[page] += 1;
                                store(mapping, page, word, values[page]);
                            }
                            steps.fetch_add(1, Ordering::Relaxed);
                        }
                        values
                    })
                })
                .collect();
            let some_steps = || {
                let from = steps.load(Ordering::Relaxed);
                vellum_testing::patience::eventually("the threads go on", || {
                    steps.load(Ordering::Relaxed) > from + 100
                        || threads.iter().any(std::thread::ScopedJoinHandle::is_finished)
                });
            };
            some_steps();
            work(&cache, &file, &mapping);
            some_steps();
            is_over.store(true, Ordering::Relaxed);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        mapping.close().unwrap();
        let mut bytes = vec![0; PAGES * PAGE_SIZE];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for (thread, values) in last.iter().enumerate() {
            for (page, value) in values.iter().enumerate() {
                let at = page * PAGE_SIZE + 64 + thread * 64;
                let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                assert_eq!(found, *value, "page {page} of thread {thread}");
            }
        }
    }
}

#[test]
fn a_file_moves_under_threads_that_use_it() {
    moves_while_it_is_used(|cache, file, mapping| {
        let second = cache.map(file, .., Access::ReadWrite).unwrap();
        (0..48).for_each(|page| assert_eq!(load(&second, page, 0), pattern(page)));
        (0..48).for_each(|page| store(&second, page, 1, 9));
        (0..48).for_each(|page| assert_eq!(load(mapping, page, 1), 9));
    });
}

#[test]
fn pins_of_several_threads_move_a_file_once() {
    moves_while_it_is_used(|_, _, mapping| {
        std::thread::scope(|scope| {
            for page in 0..4 {
                scope.spawn(move || {
                    let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
                    let pin = mapping.pin(range, Access::ReadWrite).unwrap();
                    store(mapping, page, 1, 9);
                    drop(pin);
                    assert_eq!(load(mapping, page, 1), 9);
                });
            }
        });
    });
}

#[test]
fn calls_of_the_interface_and_a_move_do_not_disturb_each_other() {
    moves_while_it_is_used(|cache, file, mapping| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..8 {
                    mapping.write_at(&[round; 16], 5 * PAGE_SIZE + 16).unwrap();
                    let mut bytes = [0; 16];
                    mapping.read_at(&mut bytes, 5 * PAGE_SIZE + 16).unwrap();
                    assert_eq!(bytes, [round; 16]);
                    mapping.write_back(..).unwrap();
                    mapping.prefetch(..8 * PAGE_SIZE).unwrap();
                    mapping.evict(4 * PAGE_SIZE..).unwrap();
                    cache.set_length(file, 48 * PAGE_SIZE as u64).unwrap();
                }
            });
            let second = cache.map(file, .., Access::Read).unwrap();
            (0..48).for_each(|page| assert_eq!(load(&second, page, 0), pattern(page)));
        });
    });
}

#[test]
fn mappings_of_several_files_come_and_go_in_one_cache() {
    let cache = cache(16);
    let fixtures: Vec<Fixture> = (0..3).map(|_| Fixture::new()).collect();
    let files: Vec<File> = fixtures.iter().map(|fixture| fixture.file(24)).collect();
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (cache, files) = (&cache, &files);
            scope.spawn(move || {
                let mut random = Random(thread as u64 + 7);
                // Each stores words of its own, in a file that others may have mapped or not.
                let mut values = vec![[0; 24]; files.len()];
                for round in 1..200 {
                    if round > 20 && begin.elapsed() > Duration::from_secs(4) {
                        break;
                    }
                    let number = random.index(files.len());
                    let mapping = cache.map(&files[number], .., Access::ReadWrite).unwrap();
                    for (page, value) in values[number].iter_mut().enumerate() {
                        assert_eq!(load(&mapping, page, 0), pattern(page));
                        assert_eq!(load(&mapping, page, 8 + thread), *value, "a store is lost");
                        *value = round;
                        store(&mapping, page, 8 + thread, round);
                    }
                }
            });
        }
    });
    assert_eq!(cache.statistics().unwrap().dirty, 0, "the last mappings have written all back");
}

#[test]
fn a_file_that_cannot_be_written_does_not_move_and_loses_nothing() {
    let cache = cache(64);
    // SAFETY: the call makes a descriptor, which the file owns.
    let file =
        unsafe { File::from_raw_fd(libc::memfd_create(c"file".as_ptr(), libc::MFD_ALLOW_SEALING)) };
    file.set_len(32 * PAGE_SIZE as u64).unwrap();
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    (0..20).for_each(|page| store(&mapping, page, 0, 7));
    let seal = libc::F_SEAL_FUTURE_WRITE;
    // SAFETY: the call takes no memory.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seal) }, 0);
    for _ in 0..2 {
        assert!(cache.map(&file, .., Access::Read).is_err());
        assert!(mapping.pin(.., Access::Read).is_err());
        (0..20).for_each(|page| assert_eq!(load(&mapping, page, 0), 7));
        store(&mapping, 3, 1, 8);
        assert_eq!(load(&mapping, 3, 1), 8);
    }
    assert_eq!(cache.statistics().unwrap().dirty, 20);
}

#[test]
fn pages_that_left_or_were_never_read_have_no_memory() {
    let cache = cache(64);
    let fixture = Fixture::new();
    let file = fixture.file(40);
    // Beyond the end, and with a hole.
    file.set_len(60 * PAGE_SIZE as u64).unwrap();
    let mapping = cache.map(&file, ..100 * PAGE_SIZE as u64, Access::ReadWrite).unwrap();
    mapping.advise(Advice::Random).unwrap();
    assert_eq!(pages_in_memory(&mapping), 0);
    for page in (0..60).step_by(3) {
        let expected = if page < 40 { pattern(page) } else { 0 };
        assert_eq!(load(&mapping, page, 0), expected);
    }
    assert_eq!(pages_in_memory(&mapping), 20);
    let mut byte = [0];
    assert!(mapping.read_at(&mut byte, 60 * PAGE_SIZE).is_err());
    assert!(mapping.prefetch(60 * PAGE_SIZE..).is_ok_and(|pages| pages == 0));
    assert_eq!(pages_in_memory(&mapping), 20, "pages that cannot be read have none");
    assert_eq!(mapping.evict(..30 * PAGE_SIZE).unwrap(), 10);
    assert_eq!(pages_in_memory(&mapping), 10);
    cache.set_length(&file, PAGE_SIZE as u64).unwrap();
    assert_eq!(pages_in_memory(&mapping), 0);
}

#[test]
fn only_a_mapping_for_reading_needs_no_write_protection() {
    let only = BackendChoice::Only(Backend::Userfaultfd);
    let options = options(8).backend(only).dirty_tracking(DirtyTracking::Mapped);
    let cache = options.clone().frames(Frames::Anonymous).build().unwrap();
    let fixture = Fixture::new();
    let file = fixture.file(32);
    let error = cache.map(&file, .., Access::ReadWrite).unwrap_err();
    assert!(matches!(error, Error::NoBackend { .. }), "{error}");
    let cache = options.frames(Frames::Auto).build().unwrap();
    let mapping = cache.map(&file, .., Access::Read).unwrap();
    (0..32).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
    assert!(pages_in_memory(&mapping) > 0);
    // The file moves, and its mapping for writing is as others without write protection.
    let writable = cache.map(&file, .., Access::ReadWrite).unwrap();
    assert_eq!(pages_in_memory(&mapping), 0);
    (0..32).for_each(|page| store(&writable, page, 0, 5));
    (0..32).for_each(|page| assert_eq!(load(&mapping, page, 0), 5));
    writable.sync().unwrap();
    (0..32).for_each(|page| assert_eq!(word_in(&file, page), 5));
}

#[test]
fn a_length_that_ends_outside_of_the_mapping_changes_the_file() {
    let cache = cache(16);
    let fixture = Fixture::new();
    let file = fixture.file(16);
    let mapping =
        cache.map(&file, 8 * PAGE_SIZE as u64..16 * PAGE_SIZE as u64, Access::ReadWrite).unwrap();
    (0..8).for_each(|page| store(&mapping, page, 1, 5));
    // It ends in a page that the mapping has not.
    cache.set_length(&file, 4 * PAGE_SIZE as u64 + 8).unwrap();
    assert_eq!(pages_in_memory(&mapping), 0);
    cache.set_length(&file, 16 * PAGE_SIZE as u64).unwrap();
    (0..8).for_each(|page| assert_eq!((load(&mapping, page, 0), load(&mapping, page, 1)), (0, 0)));
    let mut bytes = [7; 16];
    file.read_exact_at(&mut bytes, 4 * PAGE_SIZE as u64).unwrap();
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), pattern(4));
    assert_eq!(bytes[8..], [0; 8]);
    // And within one that it has, read or not.
    for page in [9, 12] {
        store(&mapping, 1, 2, 6);
        cache.set_length(&file, page * PAGE_SIZE as u64 + 16).unwrap();
        cache.set_length(&file, 16 * PAGE_SIZE as u64).unwrap();
        assert_eq!(load(&mapping, page as usize - 8, 2), 0);
    }
}

/// A part of a mapping that the program locks, and one for which it gives the kernel advice. The
/// kernel splits the mapping there: it has the pages of a run in several parts.
fn split(mapping: &Mapping) {
    let at = |page| address(mapping, page, 0).cast();
    // SAFETY: the calls change no memory.
    unsafe {
        let _ = libc::mlock(at(5), 3 * PAGE_SIZE);
        assert_eq!(libc::madvise(at(20), 3 * PAGE_SIZE, libc::MADV_DONTDUMP), 0);
    }
}

#[test]
fn a_run_of_pages_may_cross_a_border_of_what_is_locked() {
    for (frames, cache) in BOTH_KINDS.into_iter().zip(both_caches(64)) {
        let fixture = Fixture::new();
        let file = fixture.file(64);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        split(&mapping);
        assert_eq!(mapping.prefetch(..).unwrap(), 64);
        for round in 1..4 {
            (0..64).for_each(|page| store(&mapping, page, 1, round));
            mapping.sync().unwrap();
            (0..64).for_each(|page| assert_eq!(load(&mapping, page, 1), round));
            let mut bytes = vec![0; 64 * PAGE_SIZE];
            file.read_exact_at(&mut bytes, 0).unwrap();
            (0..64).for_each(|page| assert_eq!(bytes[page * PAGE_SIZE + 8], round as u8));
        }
        assert_eq!(mapping.evict(..).unwrap(), 64);
        // With a memory file the kernel keeps marks of pages that were protected.
        assert!(frames == Frames::MemoryFile || pages_in_memory(&mapping) == 0);
    }
}

/// Pages that are in the memory file are mapped in runs, too: where another mapping has brought
/// them in and keeps them there.
#[test]
fn pages_of_another_mapping_are_mapped_across_a_border() {
    let cache = cache(64);
    let fixture = Fixture::new();
    let file = fixture.file(64);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    let second = cache.map(&file, .., Access::Read).unwrap();
    split(&mapping);
    mapping.advise(Advice::Sequential).unwrap();
    let pin = second.pin(.., Access::Read).unwrap();
    for page in [4, 0, 19, 30] {
        assert_eq!(load(&mapping, page, 0), pattern(page));
    }
    (0..64).for_each(|page| store(&mapping, page, 1, 3));
    (0..64).for_each(|page| assert_eq!(load(&second, page, 1), 3));
    drop(pin);
}

/// A page of a locked mapping that leaves is unlocked, which splits the mapping.
#[test]
fn a_locked_mapping_may_be_read_in_order_after_pages_have_left() {
    for cache in both_caches(64) {
        let fixture = Fixture::new();
        let file = fixture.file(512);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        // SAFETY: the call changes no memory. It may fail, as it has no right to so much.
        let _ = unsafe { libc::mlock(mapping.as_ptr().cast(), mapping.len()) };
        (0..512).step_by(7).for_each(|page| store(&mapping, page, 1, 5));
        mapping.evict(..).unwrap();
        mapping.advise(Advice::Sequential).unwrap();
        (0..512).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
    }
}

#[test]
fn pages_that_the_kernel_swaps_out_are_still_protected() {
    let cache = cache(64);
    let fixture = Fixture::new();
    let file = fixture.file(64);
    let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
    (0..64).for_each(|page| store(&mapping, page, 1, 1));
    mapping.sync().unwrap();
    (0..32).for_each(|page| store(&mapping, page, 1, 2));
    // Without swap space they stay where they are.
    let start = mapping.as_ptr().cast();
    // SAFETY: the kernel keeps what the pages have.
    unsafe { libc::madvise(start, mapping.len(), libc::MADV_PAGEOUT) };
    assert_eq!((pages_in_memory(&mapping), cache.statistics().unwrap().dirty), (64, 32));
    (16..48).for_each(|page| store(&mapping, page, 2, 3));
    assert_eq!(cache.statistics().unwrap().dirty, 48, "stores to clean pages were seen");
    mapping.sync().unwrap();
    let mut bytes = vec![0; 64 * PAGE_SIZE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    for page in 0..64 {
        let expected = [if page < 32 { 2 } else { 1 }, u8::from((16..48).contains(&page)) * 3];
        let at = page * PAGE_SIZE;
        assert_eq!([bytes[at + 8], bytes[at + 16]], expected, "page {page}");
    }
    assert_eq!(mapping.evict(..).unwrap(), 64);
    assert_eq!(pages_in_memory(&mapping), 0);
}
