//! Threads of a cache that handle faults: system calls use mappings as they use other memory.
#![allow(unsafe_code, clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::{IoSlice, Write as _};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{BOTH_KINDS, Fixture, create, load, monitored, pattern, store};
use rustix::io::Errno;
use vellum_aquila::{
    Access, Backend, BackendChoice, Cache, Error, Faults, Frames, Mapping, Options, PAGE_SIZE,
};
use vellum_testing::own_process;
use vellum_testing::patience::{PATIENCE, eventually};
use vellum_testing::random;

/// A cache of each kind of frames; none if this kernel cannot, or this process may not.
fn caches(pages: usize) -> Vec<Cache> {
    BOTH_KINDS.into_iter().filter_map(|frames| cache_with(pages, frames)).collect()
}

fn cache_with(pages: usize, frames: Frames) -> Option<Cache> {
    match monitored(pages).frames(frames).build() {
        Ok(cache) => Some(cache),
        Err(error @ Error::NoBackend { .. }) => {
            eprintln!("left out: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The bytes of a mapping, which no thread changes meanwhile.
fn bytes(mapping: &Mapping) -> &[u8] {
    // SAFETY: the mapping lives, and the tests store to it by these functions alone.
    unsafe { std::slice::from_raw_parts(mapping.as_ptr(), mapping.len()) }
}

fn bytes_mut(mapping: &mut Mapping) -> &mut [u8] {
    // SAFETY: as above; the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(mapping.as_ptr(), mapping.len()) }
}

/// One call has a buffer that is many times the cache.
#[test]
fn one_system_call_reads_and_writes_more_than_the_cache_has() {
    const PAGES: usize = 256;
    for cache in caches(8) {
        let fixture = Fixture::new();
        let mut mapping = cache.map(&fixture.file(PAGES), .., Access::ReadWrite).unwrap();
        let other = create(&fixture.path().with_extension("other"));
        assert_eq!(other.write_at(bytes(&mapping), 0).unwrap(), PAGES * PAGE_SIZE);
        for page in 0..PAGES {
            assert_eq!(common::word_in(&other, page), pattern(page));
        }
        let new = random::bytes(PAGES * PAGE_SIZE, 7);
        other.write_all_at(&new, 0).unwrap();
        assert_eq!(other.read_at(bytes_mut(&mut mapping), 0).unwrap(), PAGES * PAGE_SIZE);
        assert!(bytes(&mapping) == new);
        mapping.sync().unwrap();
        let mut found = vec![0; PAGES * PAGE_SIZE];
        fixture.open().read_exact_at(&mut found, 0).unwrap();
        assert!(found == new);
        let statistics = cache.statistics().unwrap();
        assert!(statistics.evictions as usize >= 2 * PAGES - 8, "{statistics:?}");
    }
}

/// Calls that take addresses in other ways than a buffer of bytes.
#[test]
fn other_calls_take_addresses_of_a_mapping() {
    for cache in caches(4) {
        let fixture = Fixture::new();
        let mut mapping = cache.map(&fixture.file(16), .., Access::ReadWrite).unwrap();
        // A path, and where a call writes a structure.
        let path = fixture.path().to_str().unwrap().as_bytes().to_owned();
        bytes_mut(&mut mapping)[5 * PAGE_SIZE..][..path.len()].copy_from_slice(&path);
        bytes_mut(&mut mapping)[5 * PAGE_SIZE + path.len()] = 0;
        mapping.evict(..).unwrap();
        let at = |page: usize| mapping.as_ptr().wrapping_add(page * PAGE_SIZE);
        // SAFETY: the path ends with a zero, and the structure has room.
        let result = unsafe { libc::stat(at(5).cast(), at(9).cast()) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the call has filled it.
        let size = unsafe { (*at(9).cast::<libc::stat>()).st_size };
        assert_eq!(size, 16 * PAGE_SIZE as i64);
        // Several buffers of one call.
        mapping.evict(..).unwrap();
        let mut other = create(&fixture.path().with_extension("other"));
        let parts = [2, 11, 3].map(|page| IoSlice::new(&bytes(&mapping)[page * PAGE_SIZE..][..8]));
        assert_eq!(other.write_vectored(&parts).unwrap(), 24);
        let words = [0, 1, 2].map(|word| {
            let mut bytes = [0; 8];
            other.read_exact_at(&mut bytes, word * 8).unwrap();
            u64::from_le_bytes(bytes)
        });
        assert_eq!(words, [2, 11, 3].map(pattern));
        // A futex: its word is not what the caller believes.
        mapping.evict(..).unwrap();
        // SAFETY: the word is within the mapping, and is aligned.
        let word = unsafe { AtomicU32::from_ptr(at(12).cast()) };
        let waited =
            rustix::thread::futex::wait(word, rustix::thread::futex::Flags::empty(), 1, None);
        assert_eq!(waited, Err(Errno::AGAIN));
    }
}

#[test]
fn a_call_fails_beyond_the_end_and_works_once_the_file_has_the_page() {
    for cache in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let mapping = cache.map(&file, ..8 * PAGE_SIZE as u64, Access::ReadWrite).unwrap();
        let other = create(&fixture.path().with_extension("other"));
        let try_write = |page| try_call(&mapping, page, &other);
        for round in 0..3 {
            assert_eq!(try_write(1), Ok(8), "round {round}");
            assert_eq!(try_write(2), Err(Errno::FAULT), "round {round}");
            assert_eq!(try_write(7), Err(Errno::FAULT), "round {round}");
        }
        // A part of the buffer is there.
        let part = &bytes(&mapping)[PAGE_SIZE..][..2 * PAGE_SIZE];
        assert_eq!(rustix::io::pwrite(other.as_fd(), part, 0), Ok(PAGE_SIZE));
        file.set_len(8 * PAGE_SIZE as u64).unwrap();
        file.write_all_at(&9_u64.to_le_bytes(), 7 * PAGE_SIZE as u64).unwrap();
        // Each page has its own poison, which ends at its own time.
        for page in [2, 7] {
            eventually("the page is there", || try_write(page) == Ok(8));
        }
        assert_eq!(try_write(7), Ok(8));
        assert_eq!(common::word_in(&other, 0), 9);
        // A store is not lost with the poison of the page.
        for round in 0..50 {
            let page = 2 + round % 5;
            store(&mapping, page, 1, round as u64);
            assert_eq!(load(&mapping, page, 1), round as u64);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A file that becomes longer by the cache has its new pages at once.
#[test]
fn no_page_is_poisoned_any_more_once_the_cache_has_made_the_file_longer() {
    for cache in caches(4) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let all = ..8 * PAGE_SIZE as u64;
        let mappings =
            [Access::ReadWrite, Access::Read].map(|access| cache.map(&file, all, access));
        let [mapping, second] = mappings.map(Result::unwrap);
        let other = create(&fixture.path().with_extension("other"));
        let try_call = |mapping, page| try_call(mapping, page, &other);
        for round in 0..20 {
            for page in 2..8 {
                assert_eq!(try_call(&mapping, page), Err(Errno::FAULT), "round {round}");
                assert_eq!(try_call(&second, page), Err(Errno::FAULT), "round {round}");
            }
            cache.set_length(&file, 7 * PAGE_SIZE as u64).unwrap();
            for page in 2..7 {
                store(&mapping, page, 1, round);
                assert_eq!(load(&second, page, 1), round);
            }
            assert_eq!(try_call(&mapping, 7), Err(Errno::FAULT), "round {round}");
            cache.set_length(&file, 2 * PAGE_SIZE as u64).unwrap();
        }
    }
}

/// No frame is free for a page that cannot be had.
#[test]
fn a_call_fails_while_all_frames_are_pinned() {
    for cache in caches(8) {
        let fixture = Fixture::new();
        let mapping = cache.map(&fixture.file(16), .., Access::ReadWrite).unwrap();
        let other = create(&fixture.path().with_extension("other"));
        let pin = mapping.pin(..8 * PAGE_SIZE, Access::ReadWrite).unwrap();
        assert_eq!(try_call(&mapping, 12, &other), Err(Errno::FAULT));
        drop(pin);
        eventually("the page is there", || try_call(&mapping, 12, &other) == Ok(8));
    }
}

/// A page that cannot leave the cache, because another mapping has it pinned, may be poisoned here.
#[test]
fn poison_ends_while_another_mapping_has_the_page_pinned() {
    for cache in caches(64) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let map = || cache.map(&file, ..8 * PAGE_SIZE as u64, Access::ReadWrite).unwrap();
        let (mapping, second) = (map(), map());
        let other = create(&fixture.path().with_extension("other"));
        assert_eq!(try_call(&mapping, 3, &other), Err(Errno::FAULT));
        file.set_len(8 * PAGE_SIZE as u64).unwrap();
        let pin = second.pin(3 * PAGE_SIZE..4 * PAGE_SIZE, Access::ReadWrite).unwrap();
        store(&second, 3, 1, 5);
        eventually("the page is there", || try_call(&mapping, 3, &other) == Ok(8));
        assert_eq!(load(&mapping, 3, 1), 5);
        drop(pin);
    }
}

#[test]
fn poison_ends_although_the_mapping_is_detached_meanwhile() {
    for cache in caches(64) {
        let fixture = Fixture::new();
        let file = fixture.file(2);
        let mut mapping = cache.map(&file, ..8 * PAGE_SIZE as u64, Access::Read).unwrap();
        let other = create(&fixture.path().with_extension("other"));
        assert_eq!(try_call(&mapping, 3, &other), Err(Errno::FAULT));
        mapping.detach().unwrap();
        // Poison lasts for 20 ms.
        std::thread::sleep(Duration::from_millis(100));
        mapping.reattach();
        file.set_len(8 * PAGE_SIZE as u64).unwrap();
        eventually("the page is there", || try_call(&mapping, 3, &other) == Ok(8));
        assert_eq!(load(&mapping, 1, 0), pattern(1));
    }
}

/// Calls write to the file from its mapping, within it and beyond its end, while other threads
/// write its pages back, map it once more and change its length: all want the lock of the file's
/// inode, which such a call has while its faults wait.
#[test]
fn calls_write_to_the_file_from_its_mapping_beside_write_back() {
    const PAGES: usize = 256;
    let test = "calls_write_to_the_file_from_its_mapping_beside_write_back";
    if !own_process::entered(test) {
        return;
    }
    let Some(cache) = cache_with(1024, Frames::MemoryFile) else { return };
    let fixture = Fixture::new();
    let file = create(&fixture.path());
    let bytes_of = |pages: usize| (pages * PAGE_SIZE) as u64;
    file.set_len(bytes_of(PAGES)).unwrap();
    let mapping = cache.map(&file, ..bytes_of(2 * PAGES), Access::ReadWrite).unwrap();
    let counts = [const { AtomicU32::new(0) }; 4];
    let is_over = AtomicBool::new(false);
    let repeat = |number: usize, f: &dyn Fn()| {
        while !is_over.load(Ordering::Relaxed) {
            f();
            counts[number].fetch_add(1, Ordering::Relaxed);
        }
    };
    let write_from = |pages: Range<usize>| {
        let at = (100 * PAGE_SIZE) as i64;
        let from = mapping.as_ptr().wrapping_add(pages.start * PAGE_SIZE).cast();
        // SAFETY: the call reads mapped memory only, or fails.
        unsafe { libc::pwrite(file.as_raw_fd(), from, pages.len() * PAGE_SIZE, at) };
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            repeat(0, &|| {
                (0..64).for_each(|page| store(&mapping, page, 0, 7));
                mapping.write_back(..).unwrap();
            });
        });
        scope.spawn(|| {
            repeat(1, &|| {
                mapping.evict(100 * PAGE_SIZE..200 * PAGE_SIZE).unwrap();
                write_from(100..140);
                write_from(PAGES - 1..PAGES + 1);
            });
        });
        scope.spawn(|| {
            repeat(2, &|| {
                cache.set_length(&file, bytes_of(PAGES - 1)).unwrap();
                cache.set_length(&file, bytes_of(PAGES)).unwrap();
            });
        });
        scope.spawn(|| repeat(3, &|| drop(cache.map(&file, .., Access::Read).unwrap())));
        see_all_go_on(&counts);
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Waits until each count has grown several times; ends the process with a message if one does not.
fn see_all_go_on(counts: &[AtomicU32]) {
    let numbers = || counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
    for _ in 0..4 {
        let before = numbers();
        let went_on = || numbers().iter().zip(&before).all(|(now, before)| *now > before + 1);
        let begin = Instant::now();
        while !went_on() {
            // To panic would wait for the threads.
            if begin.elapsed() > PATIENCE {
                eprintln!("a thread does not go on: {before:?}, {:?}", numbers());
                std::process::abort();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

/// Calls write to files from mappings of the same files, while threads dirty more pages than the
/// cache has frames. Such a call has the lock of the file's inode while its faults wait, and every
/// write-back to the file wants that lock.
fn calls_between_files(test: &str, pages_of_cache: usize) {
    const PAGES: usize = 256;
    const PART: usize = 8;
    if !own_process::entered(test) {
        return;
    }
    let Some(cache) = cache_with(pages_of_cache, Frames::MemoryFile) else { return };
    let fixture = Fixture::new();
    let second = create(&fixture.path().with_extension("second"));
    second.set_len((PAGES * PAGE_SIZE) as u64).unwrap();
    let files = [fixture.file(PAGES), second];
    let mappings = files.each_ref().map(|file| cache.map(file, .., Access::ReadWrite).unwrap());
    let counts = [const { AtomicU32::new(0) }; 10];
    let is_over = AtomicBool::new(false);
    let repeat = |number: usize, f: &dyn Fn(usize)| {
        for round in 0.. {
            if is_over.load(Ordering::Relaxed) {
                return;
            }
            f(round * 37 % (PAGES / PART - 1) * PART);
            counts[number].fetch_add(1, Ordering::Relaxed);
        }
    };
    let at = |file: usize, page: usize| mappings[file].as_ptr().wrapping_add(page * PAGE_SIZE);
    let bytes = PART * PAGE_SIZE;
    let write = |from: usize, to: usize, page: usize| {
        let (offset, to) = (((PAGES - PART - page) * PAGE_SIZE) as i64, files[to].as_raw_fd());
        // SAFETY: the call reads mapped memory only, or fails.
        let written = unsafe { libc::pwrite(to, at(from, page).cast(), bytes, offset) };
        assert_eq!(written, bytes as isize, "{}", std::io::Error::last_os_error());
    };
    let read = |from: usize, to: usize, page: usize| {
        let (offset, from) = (((PAGES - PART - page) * PAGE_SIZE) as i64, files[from].as_raw_fd());
        // SAFETY: the call writes to mapped memory only, to which no reference exists.
        let read = unsafe { libc::pread(from, at(to, page).cast(), bytes, offset) };
        assert_eq!(read, bytes as isize, "{}", std::io::Error::last_os_error());
    };
    let dirty = |file: usize, page: usize| {
        (page..page + PART).for_each(|page| store(&mappings[file], page, 1, page as u64));
    };
    std::thread::scope(|scope| {
        scope.spawn(|| repeat(0, &|page| dirty(0, page)));
        scope.spawn(|| repeat(1, &|page| dirty(0, PAGES - PART - page)));
        scope.spawn(|| repeat(2, &|page| dirty(1, page)));
        scope.spawn(|| repeat(3, &|page| write(0, 0, page)));
        scope.spawn(|| repeat(4, &|page| write(0, 1, page)));
        scope.spawn(|| repeat(5, &|page| write(1, 0, page)));
        scope.spawn(|| repeat(6, &|page| read(0, 1, page)));
        scope.spawn(|| repeat(7, &|page| read(1, 0, page)));
        scope.spawn(|| {
            repeat(8, &|page| {
                mappings[0].evict(page * PAGE_SIZE..(page + PART) * PAGE_SIZE).unwrap();
            });
        });
        scope.spawn(|| repeat(9, &|_| mappings[0].write_back(..).unwrap()));
        see_all_go_on(&counts);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn calls_between_files_of_a_small_cache_wait_for_no_write_back() {
    calls_between_files("calls_between_files_of_a_small_cache_wait_for_no_write_back", 64);
}

#[test]
fn calls_between_files_of_a_larger_cache_wait_for_no_write_back() {
    calls_between_files("calls_between_files_of_a_larger_cache_wait_for_no_write_back", 300);
}

/// A program that closes the cache's descriptors would find zeros in the place of its pages.
#[test]
fn a_process_that_closes_the_descriptors_ends_with_a_message() {
    let test = "a_process_that_closes_the_descriptors_ends_with_a_message";
    if let Some(output) = own_process::run(test) {
        let text = String::from_utf8_lossy(&output.stderr);
        let is_left_out = text.contains("left out");
        let is_said = text.contains("the program has closed descriptors of a cache");
        let has_ended = output.status.signal() == Some(libc::SIGABRT);
        assert!(is_left_out || (is_said && has_ended), "{output:?}");
        return;
    }
    let Some(cache) = cache_with(64, Frames::MemoryFile) else { return };
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(128), .., Access::ReadWrite).unwrap();
    assert_eq!(load(&mapping, 0, 0), pattern(0));
    // SAFETY: nothing uses the descriptors any more but the cache.
    unsafe { libc::close_range(3, u32::MAX, 0) };
    println!("page 50 has {:#x}", load(&mapping, 50, 0));
    std::thread::sleep(Duration::from_secs(1));
    // SAFETY: it ends the process at once.
    unsafe { libc::_exit(3) };
}

/// The poison of a mapping falls due when another cache has a mapping at its addresses.
#[test]
fn no_poison_ends_in_a_mapping_of_another_cache() {
    let Some(cache) = cache_with(64, Frames::Auto) else { return };
    let other = Options::new(64 * PAGE_SIZE as u64).frames(Frames::Anonymous).build().unwrap();
    let fixture = Fixture::new();
    let (file, range) = (fixture.file(8), ..64 * PAGE_SIZE as u64);
    let second = create(&fixture.path().with_extension("second"));
    second.set_len(64 * PAGE_SIZE as u64).unwrap();
    let mut met = 0;
    for _ in 0..200 {
        let poisoned = cache.map(&file, range, Access::ReadWrite).unwrap();
        let null = create(&fixture.path().with_extension("null"));
        assert_eq!(try_call(&poisoned, 20, &null), Err(Errno::FAULT));
        let start = poisoned.as_ptr();
        drop(poisoned);
        let mapping = other.map(&second, range, Access::ReadWrite).unwrap();
        store(&mapping, 20, 1, 7);
        if mapping.as_ptr() == start {
            met += 1;
            std::thread::sleep(Duration::from_millis(30));
        }
        assert_eq!(load(&mapping, 20, 1), 7);
        if met == 3 {
            return;
        }
    }
    eprintln!("left out: the kernel gave the addresses to another mapping {met} times");
}

/// Whether accesses beyond the end are SIGBUS, also again and again.
#[test]
fn an_access_beyond_the_end_is_sigbus() {
    let test = "an_access_beyond_the_end_is_sigbus";
    if let Some(output) = own_process::run(test) {
        let is_left_out = String::from_utf8_lossy(&output.stderr).contains("left out");
        assert!(is_left_out || output.status.signal() == Some(libc::SIGBUS), "{output:?}");
        return;
    }
    // SAFETY: the call takes no memory. Rust's own handler would have the access repeated.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    let caches = caches(4);
    let Some(cache) = caches.first() else { return };
    let fixture = Fixture::new();
    let mapping = cache.map(&fixture.file(1), ..1 << 20, Access::ReadWrite).unwrap();
    assert_eq!(load(&mapping, 0, 0), pattern(0));
    load(&mapping, 7, 0);
}

/// Threads access the same few pages, by loads, by stores and by calls, and evict them. With a
/// memory file they do so by two mappings.
#[test]
fn no_access_waits_for_ever() {
    const THREADS: usize = 4;
    const PAGES: usize = 6;
    const ROUNDS: usize = 300;
    let page_of = |round: usize, thread: usize| (round / 4 + thread) % PAGES;
    for frames in BOTH_KINDS {
        let Some(cache) = cache_with(2, frames) else { continue };
        let fixture = Fixture::new();
        let file = fixture.file(PAGES);
        let mapping = cache.map(&file, .., Access::ReadWrite).unwrap();
        let has_two = frames == Frames::MemoryFile;
        let second = has_two.then(|| cache.map(&file, .., Access::Read).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (mapping, second) = (&mapping, second.as_ref());
                let other = create(&fixture.path().with_extension(thread.to_string()));
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let page = page_of(round, thread);
                        match round % 4 {
                            0 => store(mapping, page, 8 + thread, round as u64),
                            1 => assert_eq!(load(mapping, page, 0), pattern(page)),
                            2 => {
                                let called = try_call(second.unwrap_or(mapping), page, &other);
                                assert_eq!(called, Ok(8));
                            }
                            _ => drop(mapping.evict(page * PAGE_SIZE..(page + 1) * PAGE_SIZE)),
                        }
                    }
                });
            }
        });
        for (thread, page) in (0..THREADS).flat_map(|thread| (0..PAGES).map(move |p| (thread, p))) {
            let stored = |round: &usize| round.is_multiple_of(4) && page_of(*round, thread) == page;
            let last = (0..ROUNDS).rev().find(stored).unwrap();
            assert_eq!(load(&mapping, page, 8 + thread), last as u64, "{thread}, page {page}");
        }
    }
}

/// Has the kernel read the first word of a page. A device like `/dev/null` would not.
fn try_call(mapping: &Mapping, page: usize, to: &File) -> Result<usize, Errno> {
    rustix::io::pwrite(to, &bytes(mapping)[page * PAGE_SIZE..][..8], 0)
}

/// Threads of caches in this process.
fn monitors() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "vellum-faults").count()
}

#[test]
fn the_threads_end_with_the_cache_and_a_child_waits_for_none() {
    if !own_process::entered("the_threads_end_with_the_cache_and_a_child_waits_for_none") {
        return;
    }
    let caches = caches(4);
    let count = caches.len();
    if count > 0 {
        // A thread names itself once it runs.
        eventually("the threads run", || monitors() >= count);
    }
    let fixture = Fixture::new();
    let file = fixture.file(4);
    let mappings: Vec<_> =
        caches.iter().map(|cache| cache.map(&file, .., Access::Read).unwrap()).collect();
    // SAFETY: the child drops what it has, and ends.
    match unsafe { libc::fork() } {
        0 => {
            drop((mappings, caches));
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(7) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the call fills the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(std::process::ExitStatus::from_raw(status).code(), Some(7));
        }
    }
    mappings.iter().for_each(|mapping| assert_eq!(load(mapping, 3, 0), pattern(3)));
    drop(caches);
    mappings.iter().for_each(|mapping| assert_eq!(load(mapping, 2, 0), pattern(2)));
    drop(mappings);
    eventually("the threads are gone", || monitors() == 0);
}

#[test]
fn without_the_right_it_is_an_error_that_says_what_is_missing() {
    if !own_process::entered("without_the_right_it_is_an_error_that_says_what_is_missing") {
        return;
    }
    let allowed = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if !rustix::process::geteuid().is_root() || allowed.is_ok_and(|text| text.trim() == "1") {
        eprintln!("left out: the test takes a right away that this process does not have");
        return;
    }
    // SAFETY: the call takes no memory.
    assert_eq!(unsafe { libc::setresuid(65_534, 65_534, 65_534) }, 0);
    let options = Options::new(1 << 20).faults(Faults::Monitor);
    let only = options.clone().backend(BackendChoice::Only(Backend::Userfaultfd));
    let error = only.build().unwrap_err().to_string();
    assert!(error.contains("CAP_SYS_PTRACE") || error.contains("Linux 6.6"), "{error}");
    let cache = options.build().unwrap();
    assert_eq!((cache.backend(), cache.why_not_better()), (Backend::Kernel, Some(&error[..])));
}
