//! Mappings of real files, on every backend: contents, coherence, memory, errors.
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{
    BOTH_KINDS, Fixture, address, both_caches, cache, caches, load, memory_files, options,
    pages_in_memory, pattern, store, word_in,
};
use rustix::fs::{Advice as FileAdvice, fadvise};
use vellum_aquila::{
    Access, Advice, Backend, BackendChoice, Cache, DirtyTracking, Error, Frames, Mapping, Options,
    PAGE_SIZE, PolicyChoice,
};
use vellum_testing::patience::SetWhenDropped;
use vellum_testing::random::Random;
use vellum_testing::{own_process, small_disk::SmallDisk};

#[test]
fn a_mapping_shows_the_file_and_the_file_gets_the_stores() {
    for (name, cache) in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(64);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        for page in 0..64 {
            assert_eq!(load(&mapping, page, 0), pattern(page), "{name}");
            store(&mapping, page, 7, page as u64);
        }
        mapping.sync().unwrap();
        for page in 0..64 {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, (page * PAGE_SIZE + 56) as u64).unwrap();
            assert_eq!(u64::from_le_bytes(bytes), page as u64, "{name}");
            assert_eq!(word_in(&file, page), pattern(page), "{name}");
        }
    }
}

/// Four threads read and write words of their own in all pages, through one mapping or two, with a
/// cache of a quarter of the file. Every load sees the last store, and so does `read(2)` after a
/// sync. On a slow machine the threads stop after some time, if they have made enough rounds.
fn mixed(cache: &Cache, rounds: usize, count: usize) {
    const PAGES: usize = 256;
    const THREADS: usize = 4;
    let fixture = Fixture::new();
    let file = fixture.file(PAGES);
    let map = |_| cache.map(&fixture.open(), .., Access::ReadWrite).unwrap();
    let mappings: Vec<Mapping> = (0..count).map(map).collect();
    let (begin, patience) = (Instant::now(), Duration::from_micros(200 * rounds as u64));
    let enough = (rounds as u64 / 16).min(150);
    let last: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let mappings = &mappings;
                scope.spawn(move || {
                    let mut random = Random(thread as u64 + 1);
                    let mut values = vec![0; PAGES];
                    for step in 1..=rounds as u64 {
                        if step > enough && begin.elapsed() > patience {
                            break;
                        }
                        let page = random.index(PAGES);
                        let mapping = &mappings[random.index(count)];
                        let word = 8 + thread * 8;
                        assert_eq!(load(mapping, page, word), values[page], "a store was lost");
                        if random.below(3) == 0 {
                            store(mapping, page, word, step);
                            values[page] = step;
                        }
                        match random.below(1000) {
                            0 => mappings[0].sync().unwrap(),
                            1 => _ = mappings[count - 1].evict(..).unwrap(),
                            2 => _ = mappings[count - 1].prefetch(..).unwrap(),
                            _ => {}
                        }
                    }
                    values
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    mappings[0].sync().unwrap();
    let mut bytes = vec![0; PAGES * PAGE_SIZE];
    file.read_exact_at(&mut bytes, 0).unwrap();
    for page in 0..PAGES {
        assert_eq!(word_in(&file, page), pattern(page));
        for (thread, values) in last.iter().enumerate() {
            let at = page * PAGE_SIZE + 64 + thread * 64;
            let found = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            assert_eq!(found, values[page], "page {page} of thread {thread}");
        }
    }
}

#[test]
fn four_threads_mix_reads_and_writes() {
    for (name, cache) in caches(64) {
        for count in [1, 2] {
            println!("{name}, {count}");
            mixed(&cache, 6_000, count);
        }
    }
}

#[test]
fn every_policy_keeps_contents() {
    for policy in [PolicyChoice::S3Fifo, PolicyChoice::Clock, PolicyChoice::Lru] {
        for pages in [1, 3, 40] {
            println!("{policy:?}, {pages} pages");
            let cache = options(pages).policy(policy.clone()).build().unwrap();
            (1..3).for_each(|count| mixed(&cache, 750, count));
        }
    }
}

#[test]
fn mappings_of_one_file_are_coherent_whatever_descriptor_they_came_from() {
    for (name, cache) in caches(8) {
        let fixture = Fixture::new();
        let file = fixture.file(32);
        let whole = cache.map(&file, .., Access::ReadWrite).unwrap();
        let reader = cache.map(&fixture.open(), .., Access::Read).unwrap();
        let start = (16 * PAGE_SIZE) as u64;
        let part = cache.map(&fixture.open(), start.., Access::ReadWrite).unwrap();
        for page in 0..32 {
            store(&whole, page, 1, page as u64 + 500);
            assert_eq!(load(&reader, page, 1), page as u64 + 500, "{name}");
        }
        for page in 0..16 {
            assert_eq!(load(&part, page, 0), pattern(page + 16), "{name}");
            store(&part, page, 2, 9);
            assert_eq!(load(&whole, page + 16, 2), 9, "{name}");
        }
        // The copying interface sees the same.
        let mut bytes = [0; 16];
        reader.read_at(&mut bytes, 20 * PAGE_SIZE + 8).unwrap();
        assert_eq!(bytes[..8], 520_u64.to_le_bytes());
        whole.write_at(&77_u64.to_le_bytes(), 20 * PAGE_SIZE + 8).unwrap();
        assert_eq!(load(&part, 4, 1), 77, "{name}");
        // Across the border of pages.
        let text: Vec<u8> = (0..3 * PAGE_SIZE).map(|at| at as u8).collect();
        whole.write_at(&text, PAGE_SIZE / 2).unwrap();
        let mut read = vec![0; text.len()];
        reader.read_at(&mut read, PAGE_SIZE / 2).unwrap();
        assert_eq!(read, text);
    }
}

#[test]
fn dropping_the_last_mapping_writes_back() {
    for (name, cache) in caches(8) {
        let fixture = Fixture::new();
        let file = fixture.file(4);
        let first = cache.map(&file, .., Access::ReadWrite).unwrap();
        let second = cache.map(&file, .., Access::ReadWrite).unwrap();
        store(&first, 1, 0, 1);
        drop(first);
        store(&second, 2, 0, 2);
        assert_eq!(load(&second, 1, 0), 1);
        drop(second);
        assert_eq!((word_in(&file, 1), word_in(&file, 2)), (1, 2), "{name}");
        // The next mapping reads what the file has by then.
        file.write_all_at(&3_u64.to_le_bytes(), 0).unwrap();
        let mapping = cache.map(&file, .., Access::Read).unwrap();
        assert_eq!((load(&mapping, 0, 0), load(&mapping, 1, 0)), (3, 1), "{name}");
    }
}

#[test]
fn flags_of_the_descriptor_do_not_matter() {
    use std::os::unix::fs::OpenOptionsExt as _;
    for (name, cache) in caches(4) {
        for flags in [libc::O_APPEND, libc::O_DIRECT, libc::O_NONBLOCK | libc::O_DSYNC] {
            let fixture = Fixture::new();
            fixture.file(16).write_all_at(&[7; 10], (16 * PAGE_SIZE) as u64).unwrap();
            let mut options = std::fs::OpenOptions::new();
            options.read(true).write(true).custom_flags(flags);
            // Not every file system has direct I/O.
            let Ok(file) = options.open(fixture.path()) else { continue };
            let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
            for page in 0..17 {
                store(&mapping, page, 0, 5);
            }
            mapping.sync().unwrap();
            drop(mapping);
            let file = fixture.open();
            assert_eq!(file.metadata().unwrap().len(), 16 * PAGE_SIZE as u64 + 10, "{name}");
            (0..17).for_each(|page| assert_eq!(word_in(&file, page), 5, "{name}, {flags:#o}"));
        }
    }
}

#[test]
fn flags_that_are_set_after_mapping_do_not_matter() {
    for (name, cache) in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        // SAFETY: the call takes no memory.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) };
        store(&mapping, 0, 0, 9);
        mapping.sync().unwrap();
        assert_eq!(file.metadata().unwrap().len(), 2 * PAGE_SIZE as u64, "{name}");
        assert_eq!(word_in(&file, 0), 9, "{name}");
    }
}

#[test]
fn a_program_that_locks_a_mapping_loses_no_store() {
    for (name, cache) in caches(8) {
        let fixture = Fixture::new();
        let file = fixture.file(64);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        // The kernel cannot fault the pages in, but takes them for locked from now on.
        // SAFETY: the call changes no memory.
        let _ = unsafe { libc::mlock(mapping.as_ptr().cast(), mapping.len()) };
        for round in 1..4 {
            (0..64).for_each(|page| store(&mapping, page, 0, round));
            (0..64).for_each(|page| assert_eq!(load(&mapping, page, 0), round, "{name}"));
            mapping.sync().unwrap();
            (0..64).for_each(|page| assert_eq!(word_in(&file, page), round, "{name}"));
        }
    }
}

#[test]
fn only_changed_pages_are_written() {
    for frames in BOTH_KINDS {
        let cache = options(64).frames(frames).build().unwrap();
        if frames == Frames::MemoryFile && cache.write_protects() == Some(false) {
            println!("skipped: before Linux 6.4 all pages of a writable mapping are written");
            continue;
        }
        let fixture = Fixture::new();
        let file = fixture.file(32);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        (0..32).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
        [3, 4, 20].into_iter().for_each(|page| store(&mapping, page, 0, 1));
        assert_eq!(cache.statistics().unwrap().dirty, 3);
        mapping.sync().unwrap();
        let statistics = cache.statistics().unwrap();
        assert_eq!((statistics.dirty, statistics.written_back, statistics.writes), (0, 3, 2));
        // A store after the sync makes the page dirty once more.
        store(&mapping, 3, 0, 2);
        assert_eq!(cache.statistics().unwrap().dirty, 1);
        mapping.sync().unwrap();
        assert_eq!(word_in(&file, 3), 2);
        let read_only = cache.map(&file, .., Access::Read).unwrap();
        assert_eq!(load(&read_only, 3, 0), 2);
        assert_eq!(cache.statistics().unwrap().dirty, 0);
    }
}

#[test]
fn memory_stays_within_the_budget() {
    if !own_process::entered("memory_stays_within_the_budget") {
        return;
    }
    const PAGES: usize = 512;
    const CACHE: usize = 64;
    let variants = [
        (DirtyTracking::Auto, Frames::Anonymous),
        (DirtyTracking::WriteProtect, Frames::MemoryFile),
        (DirtyTracking::Mapped, Frames::MemoryFile),
    ];
    for (tracking, frames) in variants {
        let only = BackendChoice::Only(Backend::Userfaultfd);
        let cache = options(CACHE).capacity((256 * PAGE_SIZE) as u64).backend(only).frames(frames);
        let cache = match cache.dirty_tracking(tracking).build() {
            Err(error) if tracking == DirtyTracking::WriteProtect => {
                eprintln!("left out: {error}");
                continue;
            }
            cache => cache.unwrap(),
        };
        let fixture = Fixture::new();
        let mapping = cache.map(&fixture.file(PAGES), .., Access::ReadWrite).unwrap();
        let pages = || match frames {
            Frames::Anonymous => pages_in_memory(&mapping),
            _ => (memory_files().1 / PAGE_SIZE as u64) as usize,
        };
        mapping.advise(Advice::Sequential).unwrap();
        let mut most = 0;
        for page in 0..PAGES {
            store(&mapping, page, 1, 1);
            most = most.max(pages());
        }
        assert!(most <= CACHE, "{most} pages, and the cache has {CACHE}");
        assert!(most >= CACHE / 2, "{most} pages: nothing is cached");

        cache.resize((256 * PAGE_SIZE) as u64).unwrap();
        mapping.prefetch(..).unwrap();
        assert!(pages() > CACHE, "a larger cache has more");
        cache.resize((16 * PAGE_SIZE) as u64).unwrap();
        assert!(pages() <= 16, "a smaller cache has less at once");
        assert_eq!(cache.statistics().unwrap().frames, 16);
        mapping.evict(..).unwrap();
        assert_eq!(pages(), 0);
        (0..PAGES).for_each(|page| assert_eq!(load(&mapping, page, 1), 1));
    }
}

#[test]
fn prefetched_pages_cause_no_faults_and_evicted_ones_do() {
    for cache in both_caches(128) {
        let fixture = Fixture::new();
        let mapping = cache.map(&fixture.file(100), .., Access::Read).unwrap();
        assert_eq!(mapping.prefetch(..).unwrap(), 100);
        let before = cache.statistics().unwrap();
        (0..100).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
        assert_eq!(cache.statistics().unwrap().faults, before.faults);
        assert_eq!(mapping.evict(..10 * PAGE_SIZE).unwrap(), 10);
        mapping.advise(Advice::Random).unwrap();
        (0..100).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
        assert_eq!(cache.statistics().unwrap().faults, before.faults + 10);
    }
}

#[test]
fn a_sequential_reader_faults_rarely() {
    for cache in both_caches(256) {
        let fixture = Fixture::new();
        let mapping = cache.map(&fixture.file(1000), .., Access::Read).unwrap();
        (0..1000).for_each(|page| assert_eq!(load(&mapping, page, 0), pattern(page)));
        let statistics = cache.statistics().unwrap();
        assert!(statistics.faults < 40, "{statistics:?}");
        assert!(statistics.read_ahead_hits > 800, "{statistics:?}");
    }
}

#[test]
fn system_calls_need_pinned_pages() {
    for cache in both_caches(16) {
        let fixture = Fixture::new();
        let file = fixture.file(64);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let other = Fixture::new();
        let target = other.file(4);
        let write = |page: usize, bytes| {
            let start = address(&mapping, page, 0);
            // SAFETY: the kernel checks the range, and reads it only.
            unsafe { libc::pwrite(target.as_raw_fd(), start.cast(), bytes, 0) }
        };
        let read = |page: usize, bytes| {
            let start = address(&mapping, page, 0);
            // SAFETY: the range is within the mapping, to which no reference exists.
            unsafe { libc::pread(target.as_raw_fd(), start.cast(), bytes, 0) }
        };
        assert_eq!(write(0, 8), -1, "the kernel cannot fault pages in");
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));

        let pin = mapping.pin(..2 * PAGE_SIZE, Access::Read).unwrap();
        // The pages stay while everything else passes through the cache.
        (2..64).for_each(|page| store(&mapping, page, 1, 1));
        assert_eq!(write(0, 2 * PAGE_SIZE), 2 * PAGE_SIZE as isize);
        assert_eq!((word_in(&target, 0), word_in(&target, 1)), (pattern(0), pattern(1)));
        drop(pin);

        let pin = mapping.pin(5 * PAGE_SIZE..6 * PAGE_SIZE, Access::ReadWrite).unwrap();
        mapping.sync().unwrap();
        (8..64).for_each(|page| store(&mapping, page, 1, 2));
        target.write_all_at(&99_u64.to_le_bytes(), 0).unwrap();
        assert_eq!(read(5, 8), 8, "a sync does not take a pinned page's write access away");
        drop(pin);
        mapping.sync().unwrap();
        assert_eq!((load(&mapping, 5, 0), word_in(&file, 5)), (99, 99));
    }
}

#[test]
fn forgotten_pins_end_with_the_last_mapping() {
    for (name, cache) in caches(8) {
        let (fixture, other) = (Fixture::new(), Fixture::new());
        let file = fixture.file(8);
        for access in [Access::ReadWrite, Access::Read] {
            let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
            std::mem::forget(mapping.pin(.., access).unwrap());
            (0..8).for_each(|page| store(&mapping, page, 1, 11));
            drop(mapping);
            let mut bytes = [0; 16];
            file.read_exact_at(&mut bytes, 7 * PAGE_SIZE as u64).unwrap();
            assert_eq!(bytes[8..], 11_u64.to_le_bytes(), "{name}");
        }
        // Another file, which may get the first one's number, shows nothing of it.
        let file = common::create(&other.path());
        file.write_all_at(&[2; 16 * PAGE_SIZE], 0).unwrap();
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        (0..16).for_each(|page| assert_eq!(load(&mapping, page, 1), 0x0202_0202_0202_0202));
        mapping.sync().unwrap();
        (0..16).for_each(|page| assert_eq!(word_in(&file, page), 0x0202_0202_0202_0202));
    }
}

#[test]
fn too_many_pins_of_a_page_are_an_error() {
    let cache = cache(8);
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(8), .., Access::ReadWrite).unwrap();
    let pin = |access| mapping.pin(..8, access);
    let pins: Vec<_> = (0..1 << 15).map(|_| pin(Access::Read).unwrap()).collect();
    for access in [Access::Read, Access::ReadWrite] {
        let error = pin(access).unwrap_err();
        assert!(matches!(error, Error::TooManyPins { .. }), "{error}");
    }
    // Everything else goes on.
    store(&mapping, 0, 0, 5);
    mapping.read_at(&mut [0; 8], 0).unwrap();
    mapping.sync().unwrap();
    drop(pins);
    drop(pin(Access::ReadWrite).unwrap());
}

#[test]
fn a_cache_full_of_pins_is_an_error() {
    for cache in both_caches(4) {
        let fixture = Fixture::new();
        let mapping = cache.map(&fixture.file(8), .., Access::ReadWrite).unwrap();
        let pin = mapping.pin(..4 * PAGE_SIZE, Access::Read).unwrap();
        let error = mapping.pin(4 * PAGE_SIZE..5 * PAGE_SIZE, Access::Read).unwrap_err();
        assert!(matches!(error, Error::Full { .. }), "{error}");
        assert!(matches!(cache.resize(PAGE_SIZE as u64), Err(Error::Full { .. })));
        let mut byte = [0];
        assert!(matches!(mapping.read_at(&mut byte, 5 * PAGE_SIZE), Err(Error::Full { .. })));
        drop(pin);
        let error = mapping.pin(.., Access::Read).unwrap_err();
        assert!(matches!(error, Error::Full { .. }), "{error}");
        assert_eq!(load(&mapping, 7, 0), pattern(7), "the pins of a failed call are gone");
        cache.resize(PAGE_SIZE as u64).unwrap();
    }
}

#[test]
fn a_full_disk_is_reported_and_loses_nothing() {
    for cache in both_caches(64) {
        let folder = tempfile::tempdir().unwrap();
        let Some(disk) = SmallDisk::mount(folder.path().join("disk"), 128) else { return };
        let file = common::create(&disk.path().join("file"));
        // A file with holes: writing needs space only when pages are written back.
        file.set_len((64 * PAGE_SIZE) as u64).unwrap();
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        store(&mapping, 0, 0, 11);
        mapping.sync().unwrap();
        let filler = common::create(&disk.path().join("filler"));
        let mut filled = 0;
        while filler.write_all_at(&[1; PAGE_SIZE], filled).is_ok() {
            filled += PAGE_SIZE as u64;
        }
        (0..40).for_each(|page| store(&mapping, page, 1, 5));
        let error = mapping.sync().unwrap_err();
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(cache.statistics().unwrap().dirty >= 8, "what was not written is still dirty");
        assert_eq!(word_in(&file, 0), 11, "what was synced is there");
        (0..40).for_each(|page| assert_eq!(load(&mapping, page, 1), 5));
        filler.set_len(0).unwrap();
        mapping.evict(20 * PAGE_SIZE..).unwrap();
        // 128 KiB have room for 32 pages.
        let error = mapping.sync().err();
        assert!(error.is_none() || matches!(error, Some(Error::NoSpace { .. })));
        drop(mapping);
        drop(disk);
    }
}

#[test]
fn a_file_that_cannot_be_written_keeps_no_other_from_being_read() {
    // Policies that propose pages of the file that cannot be written, again and again.
    for policy in [PolicyChoice::S3Fifo, PolicyChoice::Clock, PolicyChoice::Lru] {
        let cache = options(64).policy(policy.clone()).build().unwrap();
        // SAFETY: the call makes a descriptor, which the file owns.
        let bad = unsafe {
            use std::os::fd::FromRawFd as _;
            let flags = libc::MFD_ALLOW_SEALING;
            File::from_raw_fd(libc::memfd_create(c"bad".as_ptr(), flags))
        };
        bad.set_len(64 * PAGE_SIZE as u64).unwrap();
        let stores = cache.map(&bad, .., Access::ReadWrite).unwrap();
        let fixture = Fixture::new();
        let file = fixture.file(512);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        mapping.advise(Advice::Random).unwrap();
        (0..40).for_each(|page| store(&stores, page, 0, 1));
        let seal = libc::F_SEAL_FUTURE_WRITE;
        // SAFETY: the call takes no memory.
        assert_eq!(unsafe { libc::fcntl(bad.as_raw_fd(), libc::F_ADD_SEALS, seal) }, 0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let mapping = &mapping;
                scope.spawn(move || {
                    let access = |step: usize, stores: bool| {
                        let page = (thread * 31 + step * 37) % 512;
                        let mut bytes = [0; 8];
                        mapping.read_at(&mut bytes, page * PAGE_SIZE).unwrap();
                        assert_eq!(u64::from_le_bytes(bytes), pattern(page));
                        if stores {
                            mapping.write_at(&[5; 8], page * PAGE_SIZE + 8).unwrap();
                        }
                    };
                    // In the second half all pages are dirty.
                    for stores in [false, true] {
                        let begin = Instant::now();
                        for step in 0..1500 {
                            // A slow machine makes fewer accesses.
                            if step >= 100 && begin.elapsed() > Duration::from_millis(500) {
                                break;
                            }
                            access(step, stores);
                        }
                    }
                });
            }
        });
        mapping.sync().unwrap();
        assert!(stores.sync().is_err());
        assert_eq!(cache.statistics().unwrap().dirty, 40, "{policy:?}");
    }
}

/// Whether the kernel has the first page of a file in its page cache.
fn is_in_page_cache(file: &File) -> bool {
    let mut is_there = 0;
    // SAFETY: a mapping of its own, which nothing accesses, and a byte for its page.
    unsafe {
        let (null, file) = (std::ptr::null_mut(), file.as_raw_fd());
        let start = libc::mmap(null, PAGE_SIZE, libc::PROT_READ, libc::MAP_SHARED, file, 0);
        assert_ne!(start, libc::MAP_FAILED);
        assert_eq!(libc::mincore(start, PAGE_SIZE, &raw mut is_there), 0);
        libc::munmap(start, PAGE_SIZE);
    }
    is_there & 1 != 0
}

#[test]
fn direct_io_leaves_no_copies_in_the_page_cache() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    // The last page has a part of the file only.
    std::fs::write(&path, vec![7; 100 * PAGE_SIZE + 5]).unwrap();
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let forget = || {
        open().sync_all().unwrap();
        fadvise(open(), 0, None, FileAdvice::DontNeed).unwrap();
    };
    forget();
    if direct.is_err() || is_in_page_cache(&open()) {
        return println!("skipped: this file system has no direct I/O, or no other");
    }
    for is_direct in [true, false] {
        let options = options(16).backend(BackendChoice::Only(Backend::Userfaultfd));
        let cache = options.direct_io(is_direct).build().unwrap();
        let mapping = cache.map(&open(), .., Access::ReadWrite).unwrap();
        let sevens = 0x0707_0707_0707_0707;
        (0..100).for_each(|page| assert_eq!(load(&mapping, page, 3), sevens));
        assert_eq!(load(&mapping, 100, 0), 0x07_0707_0707);
        assert_eq!(load(&mapping, 100, 1), 0);
        [0, 50, 100].into_iter().for_each(|page| store(&mapping, page, 0, sevens));
        mapping.sync().unwrap();
        assert_eq!(is_in_page_cache(&open()), !is_direct);
        drop(mapping);
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 100 * PAGE_SIZE + 5]);
        forget();
    }
}

#[test]
fn a_shorter_file_keeps_its_length() {
    for cache in both_caches(16) {
        let fixture = Fixture::new();
        let file = fixture.file(8);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        (0..8).for_each(|page| store(&mapping, page, 3, 1));
        // Another program cuts the file off: write-back does not make it longer again.
        file.set_len(2 * PAGE_SIZE as u64 + 100).unwrap();
        mapping.sync().unwrap();
        assert_eq!(file.metadata().unwrap().len(), 2 * PAGE_SIZE as u64 + 100);
        // The same by the cache: the pages are gone at once, and the last one's rest is zero. Its
        // beginning keeps what was stored and not yet written.
        store(&mapping, 1, 1, 9);
        cache.set_length(&file, PAGE_SIZE as u64 + 16).unwrap();
        cache.set_length(&file, 8 * PAGE_SIZE as u64).unwrap();
        assert_eq!((load(&mapping, 0, 3), load(&mapping, 1, 0)), (1, pattern(1)));
        assert_eq!((load(&mapping, 1, 1), load(&mapping, 1, 3)), (9, 0));
        assert_eq!((load(&mapping, 2, 0), load(&mapping, 7, 3)), (0, 0));
        mapping.sync().unwrap();
        let mut bytes = [7; 16];
        file.read_exact_at(&mut bytes, PAGE_SIZE as u64 + 8).unwrap();
        assert_eq!(bytes[..8], 9_u64.to_le_bytes());
        assert_eq!(bytes[8..], [0; 8]);
    }
}

#[test]
fn the_length_of_a_file_is_changed_by_a_descriptor_for_writing() {
    for (name, cache) in caches(8) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let read_only = File::open(fixture.path()).unwrap();
        let error = cache.set_length(&read_only, 100).unwrap_err();
        assert!(matches!(error, Error::Access { .. }), "{name}: {error}");
        assert_eq!(file.metadata().unwrap().len(), 2 * PAGE_SIZE as u64);
        drop(mapping);
        // How it is mapped does not matter.
        let mapping = cache.map(&file, .., Access::Read).unwrap();
        assert_eq!(load(&mapping, 0, 0), pattern(0));
        cache.set_length(&file, 2).unwrap();
        cache.set_length(&file, 100).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 100);
        assert_eq!(load(&mapping, 0, 0), pattern(0) & 0xffff, "{name}");
    }
}

/// Whether a test that looks for a race makes another round: for some time, and some rounds,
/// however rarely its thread runs; on a slow machine for a longer time, but not for all rounds.
fn goes_on(rounds: u32, begin: Instant) -> bool {
    let elapsed = begin.elapsed().as_secs();
    rounds < 20 || elapsed < 2 || (rounds < 100 && elapsed < 5)
}

#[test]
fn a_change_of_a_files_length_changes_no_other_file() {
    for cache in both_caches(64) {
        let (fixture, other) = (Fixture::new(), Fixture::new());
        let (file, kept) = (fixture.file(8), other.file(8));
        let is_over = AtomicBool::new(false);
        let until_over = |work: &dyn Fn()| {
            while !is_over.load(Ordering::Relaxed) {
                work();
            }
        };
        std::thread::scope(|scope| {
            let _over = SetWhenDropped(&is_over);
            // The two files take turns in having the first number.
            scope.spawn(|| until_over(&|| cache.set_length(&file, PAGE_SIZE as u64).unwrap()));
            scope.spawn(|| {
                until_over(&|| drop(cache.map(&file, ..4096, Access::ReadWrite).unwrap()));
            });
            let begin = Instant::now();
            let (mut length, mut rounds) = (8 * PAGE_SIZE as u64, 0);
            while goes_on(rounds, begin) && length == 8 * PAGE_SIZE as u64 {
                rounds += 1;
                drop(cache.map(&kept, .., Access::ReadWrite).unwrap());
                length = kept.metadata().unwrap().len();
            }
            assert_eq!(length, 8 * PAGE_SIZE as u64);
        });
    }
}

#[test]
fn write_back_makes_no_file_longer_that_the_cache_has_cut_off() {
    for cache in both_caches(64) {
        let fixture = Fixture::new();
        let file = fixture.file(32);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _over = SetWhenDropped(&is_over);
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    mapping.write_back(..).unwrap();
                }
            });
            let begin = Instant::now();
            let (mut length, mut rounds) = (PAGE_SIZE as u64, 0);
            while goes_on(rounds, begin) && length == PAGE_SIZE as u64 {
                rounds += 1;
                cache.set_length(&file, (32 * PAGE_SIZE) as u64).unwrap();
                (0..32).for_each(|page| mapping.write_at(&[5], page * PAGE_SIZE).unwrap());
                cache.set_length(&file, PAGE_SIZE as u64).unwrap();
                for _ in 0..3 {
                    length = length.max(file.metadata().unwrap().len());
                    std::thread::yield_now();
                }
            }
            assert_eq!(length, PAGE_SIZE as u64);
        });
    }
}

#[test]
fn write_back_keeps_what_was_appended_to_the_last_page() {
    for (name, cache) in caches(8) {
        let fixture = Fixture::new();
        let file = common::create(&fixture.path());
        file.write_all_at(&[1; 100], 0).unwrap();
        let mapping = cache.map(&file, ..PAGE_SIZE as u64 * 4, Access::ReadWrite).unwrap();
        store(&mapping, 0, 0, 9);
        file.write_all_at(&[7; 5000], 100).unwrap();
        // Beyond the length that the page was read with.
        store(&mapping, 0, 20, 11);
        mapping.sync().unwrap();
        let expected = |at: usize| match at {
            0 => 9,
            160 => 11,
            1..8 => 0,
            8..100 => 1,
            _ if name == "kernel" && (161..168).contains(&at) => 0,
            _ => 7,
        };
        let mut bytes = [0; 5100];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, expected(at), "{name}: byte {at}");
        }
        // The mapping shows it now, and the next write-back writes the same.
        assert_eq!(load(&mapping, 0, 500), 0x0707_0707_0707_0707, "{name}");
        store(&mapping, 0, 0, 10);
        mapping.sync().unwrap();
        file.read_exact_at(&mut bytes[..1], 0).unwrap();
        let mut after = [0; 5100];
        file.read_exact_at(&mut after, 0).unwrap();
        assert_eq!(after, bytes, "{name}");
        // A file that became longer is written to its new end.
        file.set_len(2 * PAGE_SIZE as u64).unwrap();
        store(&mapping, 1, 511, 12);
        mapping.sync().unwrap();
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 2 * PAGE_SIZE as u64 - 8).unwrap();
        assert_eq!(u64::from_le_bytes(word), 12, "{name}");
    }
}

#[test]
fn stores_beyond_the_end_do_not_show_when_the_file_becomes_longer() {
    // The kernel's own mappings do as the file system does: some clear the rest of a page when they
    // write it, some when the file becomes longer, and memory file systems of Linux 6.12 never.
    for (name, cache) in caches(8).into_iter().filter(|(name, _)| name != "kernel") {
        for syncs_before in [true, false] {
            let fixture = Fixture::new();
            let file = common::create(&fixture.path());
            file.write_all_at(&[1; 100], 0).unwrap();
            let mapping = cache.map(&file, ..PAGE_SIZE as u64, Access::ReadWrite).unwrap();
            store(&mapping, 0, 25, 66);
            if syncs_before {
                mapping.sync().unwrap();
            }
            cache.set_length(&file, PAGE_SIZE as u64).unwrap();
            mapping.sync().unwrap();
            assert_eq!(load(&mapping, 0, 25), 0, "{name}");
            store(&mapping, 0, 30, 0);
            store(&mapping, 0, 26, 67);
            mapping.sync().unwrap();
            let mut bytes = [9; 16];
            file.read_exact_at(&mut bytes, 200).unwrap();
            assert_eq!((bytes[0], bytes[8]), (0, 67), "{name}");
        }
    }
}

#[test]
fn a_mapping_may_be_longer_than_the_file_is_yet() {
    for (name, cache) in caches(16) {
        let fixture = Fixture::new();
        let file = fixture.file(1);
        let mapping = cache.map(&file, ..1 << 30, Access::ReadWrite).unwrap();
        assert_eq!(load(&mapping, 0, 0), pattern(0), "{name}");
        file.set_len(100 * PAGE_SIZE as u64).unwrap();
        store(&mapping, 99, 0, 4);
        mapping.sync().unwrap();
        assert_eq!(word_in(&file, 99), 4, "{name}");
        let error = mapping.read_at(&mut [0; 8], 100 * PAGE_SIZE).unwrap_err();
        assert!(matches!(error, Error::BeyondEnd { .. }), "{name}: {error}");
    }
}

#[test]
fn the_last_page_of_a_file_ends_with_zeros() {
    for (name, cache) in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(1);
        file.write_all_at(&[7; PAGE_SIZE + 10], 0).unwrap();
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        assert_eq!(mapping.len(), PAGE_SIZE + 10);
        for _ in 0..10 {
            // Whatever was read before does not show.
            assert_eq!(load(&mapping, 0, 500), 0x0707_0707_0707_0707, "{name}");
            assert_eq!(load(&mapping, 1, 1), 0x0707, "{name}");
            (2..PAGE_SIZE / 8).for_each(|word| assert_eq!(load(&mapping, 1, word), 0, "{name}"));
            mapping.evict(..).unwrap();
        }
        store(&mapping, 1, 0, u64::MAX);
        mapping.sync().unwrap();
        assert_eq!(file.metadata().unwrap().len(), PAGE_SIZE as u64 + 10, "{name}");
        assert_eq!(word_in(&file, 1), u64::MAX, "{name}");
    }
}

#[test]
fn senseless_arguments_are_errors() {
    let least = 64 * PAGE_SIZE as u64;
    let small = Options::new(least).capacity(2 * least).build().unwrap();
    let error = small.resize(least - 1).unwrap_err();
    assert!(matches!(error, Error::BadSize { .. } | Error::Unsupported { .. }), "{error}");
    let bad_sizes = [0, 4095, least - 1, u64::MAX, 1 << 50];
    for bytes in bad_sizes {
        assert!(matches!(Cache::new(bytes), Err(Error::BadSize { .. })), "{bytes}");
    }
    for (name, cache) in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(4);
        let end = (4 * PAGE_SIZE) as u64;
        let map = |start: u64, end: u64| cache.map(&file, start..end, Access::Read).map(drop);
        let far = 1 << 52;
        let bad = [(0, 0), (1, end), (end, 0), (0, u64::MAX), (1 << 63, u64::MAX), (far, far + 1)];
        for (start, end) in bad {
            let error = map(start, end).unwrap_err();
            assert!(matches!(error, Error::BadRange { .. }), "{name}: {start}..{end}: {error}");
        }
        assert!(map(far - PAGE_SIZE as u64, far).is_ok() || name == "kernel");
        let empty = common::create(&fixture.path().with_extension("empty"));
        assert!(matches!(cache.map(&empty, .., Access::Read), Err(Error::BadRange { .. })));

        let read_only = File::open(fixture.path()).unwrap();
        let error = cache.map(&read_only, .., Access::ReadWrite).unwrap_err();
        assert!(matches!(error, Error::Access { .. }), "{name}: {error}");
        let write_only = std::fs::OpenOptions::new().write(true).open(fixture.path()).unwrap();
        let error = cache.map(&write_only, .., Access::Read).unwrap_err();
        assert!(matches!(error, Error::Access { .. }), "{name}: {error}");
        let folder = File::open(fixture.path().parent().unwrap()).unwrap();
        assert!(cache.map(&folder, ..4096, Access::Read).is_err(), "{name}");
        let zero = File::open("/dev/zero").unwrap();
        if name != "kernel" {
            assert!(matches!(cache.map(&zero, ..4096, Access::Read), Err(Error::NotAFile)));
        }

        for path in ["/proc/self/maps", "/sys/kernel/mm/transparent_hugepage/enabled"] {
            let Ok(file) = File::open(path) else { continue };
            let error = cache.map(&file, ..4096, Access::Read).unwrap_err();
            assert!(error == Error::NotAFile || name == "kernel", "{name}: {path}: {error}");
        }

        let mapping = cache.map(&read_only, .., Access::Read).unwrap();
        let reversed = std::ops::Range { start: 3, end: 2 };
        for range in [0..5 * PAGE_SIZE, reversed, usize::MAX - 1..usize::MAX] {
            assert!(matches!(mapping.prefetch(range.clone()), Err(Error::OutOfRange { .. })));
            assert!(matches!(mapping.evict(range.clone()), Err(Error::OutOfRange { .. })));
            assert!(mapping.pin(range.clone(), Access::Read).is_err());
            assert!(mapping.write_back(range).is_err());
        }
        assert!(mapping.read_at(&mut [0; 9], 4 * PAGE_SIZE - 8).is_err());
        assert!(mapping.read_at(&mut [0; 9], usize::MAX).is_err());
        assert!(matches!(mapping.write_at(&[1], 0), Err(Error::Access { .. })), "{name}");
        assert!(matches!(mapping.pin(.., Access::ReadWrite), Err(Error::Access { .. })), "{name}");
        assert_eq!((mapping.prefetch(7..7).unwrap(), mapping.evict(7..7).unwrap()), (0, 0));
        drop(mapping.pin(7..7, Access::Read).unwrap());
        mapping.read_at(&mut [], 4 * PAGE_SIZE).unwrap();
        let error = cache.resize(1 << 40).unwrap_err();
        assert!(matches!(error, Error::BadSize { .. } | Error::Unsupported { .. }), "{error}");
    }
}

#[test]
fn the_last_pages_that_can_be_mapped_are_pages_as_others() {
    const END: u64 = 1 << 52;
    // Of the usual file systems only those in memory have files of that length.
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let file = common::create(&folder.path().join("file"));
    if file.set_len(2 * END).is_err() {
        eprintln!("left out: no file is that long here");
        return;
    }
    let start = END - 2 * PAGE_SIZE as u64;
    for cache in both_caches(8) {
        file.write_all_at(&[7; 2 * PAGE_SIZE], start).unwrap();
        file.set_len(2 * END).unwrap();
        let error = cache.map(&file, END..END + 4096, Access::Read).unwrap_err();
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
        let mapping = cache.map(&file, start..END, Access::ReadWrite).unwrap();
        assert_eq!(load(&mapping, 1, 511), 0x0707_0707_0707_0707);
        mapping.write_at(&[5; PAGE_SIZE], PAGE_SIZE).unwrap();
        // A length beyond the last page takes none away.
        cache.set_length(&file, END + 100).unwrap();
        cache.set_length(&file, END).unwrap();
        mapping.sync().unwrap();
        let mut bytes = [0; 2 * PAGE_SIZE];
        file.read_exact_at(&mut bytes, start).unwrap();
        assert!(bytes[..PAGE_SIZE] == [7; PAGE_SIZE] && bytes[PAGE_SIZE..] == [5; PAGE_SIZE]);
    }
}

#[test]
fn the_number_of_mappings_is_limited_and_they_can_be_made_again() {
    // The limit is the process'.
    if !own_process::entered("the_number_of_mappings_is_limited_and_they_can_be_made_again") {
        return;
    }
    let cache = cache(4);
    let fixture = Fixture::new();
    let file = fixture.file(1);
    let mut mappings = Vec::new();
    let error = loop {
        match cache.map(&file, .., Access::Read) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::TooMany { .. }), "{error}");
    let last = mappings.pop().unwrap();
    assert_eq!(load(&last, 0, 0), pattern(0));
    mappings.clear();
    assert_eq!(load(&last, 0, 0), pattern(0));
    drop(last);
    assert_eq!(load(&cache.map(&file, .., Access::Read).unwrap(), 0, 0), pattern(0));
}

#[test]
fn mappings_come_and_go_while_others_are_used() {
    let cache = Arc::new(cache(8));
    let fixture = Fixture::new();
    let file = fixture.file(32);
    let kept = cache.map(&file, .., Access::ReadWrite).unwrap();
    let begin = Instant::now();
    // For some rounds, and on a slow machine for some time.
    let is_over = |round: u64| round >= 10 && begin.elapsed() > Duration::from_secs(2);
    let last = std::thread::scope(|scope| {
        let threads = [0, 1, 2].map(|thread| {
            let (cache, file) = (&cache, &file);
            scope.spawn(move || {
                let mut last = 0;
                for round in (0..150).take_while(|round| !is_over(*round)) {
                    last = round;
                    let mapping = cache.map(file, .., Access::ReadWrite).unwrap();
                    for page in 0..32 {
                        store(&mapping, page, 8 + thread, round);
                    }
                    drop(mapping);
                }
                last
            })
        });
        for _ in (0..40).take_while(|round| !is_over(*round)) {
            (0..32).for_each(|page| assert_eq!(load(&kept, page, 0), pattern(page)));
        }
        threads.map(|thread| thread.join().unwrap())
    });
    for page in 0..32 {
        (0..3).for_each(|thread| assert_eq!(load(&kept, page, 8 + thread), last[thread]));
    }
}

#[test]
fn a_cache_without_a_backend_of_its_own_says_why() {
    let kernel = BackendChoice::Only(Backend::Kernel);
    let cache = options(4).backend(kernel).build().unwrap();
    assert_eq!(cache.why_not_better(), Some("it was asked for"));
    assert_eq!(cache.statistics(), None);
    assert!(matches!(cache.resize(8192), Err(Error::Unsupported { .. })));
    assert_eq!(common::cache(4).why_not_better(), None);
}
