//! Files in managed ranges, whose faults the cache handles in ring 0. The tests need a KVM that
//! runs guests, as those in `ring0.rs` do.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]
// In tests, unwrap is the assertion.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use common::{PAGE, SEGV, is_refused_on, machine, timed};
use vellum_aquila_ring0::{Advice, Counts, Error, Io, Mapping, Replacement, VirtualMachine};
use vellum_testing::own_process;
use vellum_testing::patience::{SetWhenDropped, eventually};

/// A file that is removed at the end.
struct TemporaryFile {
    path: PathBuf,
    file: File,
}

impl TemporaryFile {
    /// Pages with stamps of version 0, and perhaps some bytes more.
    fn new(name: &str, pages: usize, rest: usize) -> Self {
        let path = std::env::temp_dir().join(format!("cached-{name}-{}", std::process::id()));
        let mut bytes = Vec::new();
        for page in 0..pages {
            let mut words = [0_u64; PAGE / 8];
            [words[0], words[WORDS - 1]] = stamps(page, 0);
            bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        bytes.extend(std::iter::repeat_n(7, rest));
        std::fs::write(&path, bytes).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        Self { path, file }
    }

    /// The stamps of a page in the file.
    fn stamps(&self, page: usize) -> [u64; 2] {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            self.file.read_exact_at(&mut bytes, (page * PAGE + at * 8) as u64).unwrap();
            u64::from_le_bytes(bytes)
        };
        [word(0), word(WORDS - 1)]
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Words of a page.
const WORDS: usize = PAGE / 8;

/// The first and the last word of a version of a page.
fn stamps(page: usize, version: u64) -> [u64; 2] {
    let stamp = (page as u64) << 32 | version << 1;
    [stamp | 1, stamp.rotate_left(17)]
}

/// A word of a mapping. Ring 0 only.
fn word(mapping: &Mapping<'_>, page: usize, at: usize) -> *mut u64 {
    mapping.as_ptr().wrapping_add(page * PAGE + at * 8).cast()
}

fn load(mapping: &Mapping<'_>, page: usize) -> [u64; 2] {
    // SAFETY: the words are in the mapping.
    unsafe {
        [word(mapping, page, 0).read_volatile(), word(mapping, page, WORDS - 1).read_volatile()]
    }
}

fn store(mapping: &Mapping<'_>, page: usize, version: u64) {
    let [first, last] = stamps(page, version);
    // SAFETY: the words are in the mapping.
    unsafe {
        word(mapping, page, 0).write_volatile(first);
        word(mapping, page, WORDS - 1).write_volatile(last);
    }
}

/// Exits that were not for signals, and managed faults, since an earlier count.
fn since(before: Counts, machine: &VirtualMachine) -> (u64, u64) {
    let after = machine.counts();
    let exits = |counts: Counts| counts.exits - counts.interrupted;
    (exits(after) - exits(before), after.managed_faults - before.managed_faults)
}

#[test]
fn a_file_larger_than_the_cache_is_read_and_written() {
    const PAGES: usize = 1500;
    const FRAMES: u32 = 256;
    const STEPS: usize = 6000;
    let replacements = [Replacement::Clock, Replacement::Lru, Replacement::S3Fifo];
    for (seed, replacement) in replacements.into_iter().enumerate() {
        let Some(machine) = machine() else { return };
        let file = TemporaryFile::new("model", PAGES, 100);
        let cache = machine.cache(FRAMES, replacement).unwrap();
        let mapping = cache.map(&file.file).unwrap();
        assert_eq!(mapping.length(), (PAGES * PAGE + 100) as u64);
        let mut versions = vec![0_u64; PAGES];
        let mut random = seed as u64 + 1;
        let mut next = |below: usize| {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (random >> 33) as usize % below
        };
        machine
            .run(|| {
                for step in 0..STEPS {
                    // Some pages are used far more often than others, and some are in order.
                    let page = match next(4) {
                        0 => next(PAGES),
                        1 => next(PAGES / 20),
                        _ => step % PAGES,
                    };
                    assert_eq!(load(&mapping, page), stamps(page, versions[page]), "page {page}");
                    if next(3) == 0 {
                        versions[page] += 1;
                        store(&mapping, page, versions[page]);
                    }
                    if step % 500 == 499 {
                        assert!(mapping.mapped_pages() <= FRAMES.into());
                    }
                    if step == STEPS / 2 {
                        mapping.sync().unwrap();
                        let dirty =
                            |page: &usize| file.stamps(*page) != stamps(*page, versions[*page]);
                        assert_eq!((0..PAGES).find(dirty), None, "a sync covers all stores");
                    }
                }
                // The last page has bytes of the file and then zeros, whatever was in its frame.
                // SAFETY: the page is in the mapping.
                let last =
                    |at: usize| unsafe { mapping.as_ptr().add(PAGES * PAGE + at).read_volatile() };
                assert_eq!([last(0), last(99), last(100), last(PAGE - 1)], [7, 7, 0, 0]);
                // SAFETY: as above.
                unsafe { mapping.as_ptr().add(PAGES * PAGE + 99).write_volatile(9) };
            })
            .unwrap();
        let statistics = cache.statistics();
        assert!(statistics.evictions > 2 * PAGES as u64, "{statistics:?}");
        assert!(statistics.written_back > 500 && statistics.write_errors == 0, "{statistics:?}");
        assert_eq!(statistics.shootdowns, cache.flushes());
        mapping.close().unwrap();
        drop(machine);
        for (page, version) in versions.iter().enumerate() {
            assert_eq!(file.stamps(page), stamps(page, *version), "page {page} of the file");
        }
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut &file.file, &mut rest).unwrap();
        assert_eq!(rest.len(), PAGES * PAGE + 100);
        assert_eq!(rest[PAGES * PAGE + 99], 9);
    }
}

#[test]
fn hits_make_no_exit_and_no_fault() {
    const PAGES: usize = 300;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("hits", PAGES, 0);
    let cache = machine.cache(PAGES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    let all = || assert!((0..PAGES).all(|page| load(&mapping, page) == stamps(page, 0)));
    let (hits, faults) = machine
        .run(|| {
            all();
            let before = machine.counts();
            (0..10).for_each(|_| all());
            let hits = since(before, &machine);
            // Pages that are in the cache, and not in the tables.
            mapping.unmap_pages().unwrap();
            let before = machine.counts();
            all();
            (hits, since(before, &machine))
        })
        .unwrap();
    assert_eq!(hits, (0, 0), "exits and faults of hits");
    assert_eq!(faults.0, 0, "exits of faults on cached pages");
    // The pattern of the faults has some map the pages after them.
    assert!(faults.1 > 0 && faults.1 <= PAGES as u64, "{faults:?}");
    let statistics = cache.statistics();
    assert_eq!(statistics.misses + statistics.read_ahead, PAGES as u64, "{statistics:?}");
    assert_eq!(statistics.hits, faults.1);
}

#[test]
fn one_flush_serves_a_batch() {
    const FRAMES: usize = 4096;
    const BATCH: u64 = 512;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("batch", FRAMES + 1, 0);
    let cache = machine.cache(FRAMES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    machine
        .run(|| {
            (0..FRAMES).for_each(|page| _ = load(&mapping, page));
            // Pages that leave are clean and dirty ones.
            (0..FRAMES).step_by(3).for_each(|page| store(&mapping, page, 1));
            assert_eq!((cache.statistics().evictions, cache.flushes()), (0, 0));
            assert_eq!(load(&mapping, FRAMES), stamps(FRAMES, 0));
        })
        .unwrap();
    let statistics = cache.statistics();
    assert_eq!((statistics.evictions, statistics.shootdowns), (BATCH, 1), "{statistics:?}");
    assert_eq!(cache.flushes(), 1);
    assert_eq!(mapping.mapped_pages(), FRAMES as u64 - BATCH + 1);
    let written = (0..FRAMES).filter(|page| file.stamps(*page) == stamps(*page, 1)).count() as u64;
    assert_eq!(statistics.written_back, written);
    assert!((BATCH / 3 - 8..BATCH / 3 + 8).contains(&written), "{statistics:?}");
}

#[test]
fn an_evicted_page_is_reached_by_no_old_translation() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("old", 8, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    mapping.advise(Advice::Random);
    machine
        .run(|| {
            for _ in 0..20 {
                (0..8).for_each(|page| _ = load(&mapping, page));
                let before = machine.counts();
                // No exit, which would flush in its turn, comes between these: the pages are clean.
                (0..8).for_each(|page| _ = load(&mapping, page));
                mapping.evict().unwrap();
                assert_eq!(since(before, &machine), (0, 0));
                assert_eq!(load(&mapping, 3), stamps(3, 0));
                let (_, faults) = since(before, &machine);
                assert_eq!(faults, 1, "the access used a translation of a page that has left");
            }
        })
        .unwrap();
    // Ring 3 changes the file behind the cache's back; the next stay in ring 0 sees it.
    mapping.evict().unwrap();
    let [first, last] = stamps(3, 5).map(u64::to_le_bytes);
    file.file.write_all_at(&first, 3 * PAGE as u64).unwrap();
    file.file.write_all_at(&last, 4 * PAGE as u64 - 8).unwrap();
    assert_eq!(machine.run(|| load(&mapping, 3)).unwrap(), stamps(3, 5));
}

#[test]
fn stores_are_found_without_faults_and_written_in_order() {
    const PAGES: usize = 64;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("bits", PAGES, 0);
    let cache = machine.cache(PAGES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    machine
        .run(|| {
            (0..PAGES).for_each(|page| _ = load(&mapping, page));
            let before = machine.counts();
            // Two runs and a page alone.
            for page in [22, 5, 20, 7, 6, 40, 21, 8] {
                store(&mapping, page, 1);
            }
            assert_eq!(since(before, &machine), (0, 0), "a store needs no fault");
            mapping.sync().unwrap();
            let first = cache.statistics();
            assert_eq!((first.written_back, first.writes, first.shootdowns), (8, 3, 1));
            assert_eq!(since(before, &machine).1, 0);
            // A page is clean after that, until the next store, which needs no fault either.
            mapping.sync().unwrap();
            assert_eq!(cache.statistics(), first);
            store(&mapping, 7, 2);
            assert_eq!(since(before, &machine).1, 0);
            mapping.sync().unwrap();
            assert_eq!(cache.statistics().written_back, 9);
        })
        .unwrap();
    let version = |page| match page {
        7 => 2,
        5 | 6 | 8 | 20..=22 | 40 => 1,
        _ => 0,
    };
    assert!((0..PAGES).all(|page| file.stamps(page) == stamps(page, version(page))));
}

#[test]
fn pages_that_are_used_stay() {
    const HOT: usize = 64;
    const FRAMES: usize = 256;
    const PAGES: usize = 2000;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("hot", PAGES, 0);
    let cache = machine.cache(FRAMES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    mapping.advise(Advice::Random);
    let misses = machine
        .run(|| {
            let before = machine.counts();
            for page in HOT..PAGES {
                _ = load(&mapping, page);
                (0..HOT).for_each(|page| assert_eq!(load(&mapping, page), stamps(page, 0)));
            }
            since(before, &machine).1
        })
        .unwrap();
    // Each page once. The first pages that leave may be hot, because until then all were accessed.
    assert!(misses < (PAGES + 2 * HOT) as u64, "{misses} misses");
}

#[test]
fn a_store_to_a_file_that_is_read_only_is_a_signal() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("read-only", 2, 0);
    let reader = File::open(&file.path).unwrap();
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&reader).unwrap();
    is_refused_on(&machine, "a_store_to_a_file_that_is_read_only_is_a_signal", || {
        assert_eq!(load(&mapping, 1), stamps(1, 0));
        store(&mapping, 1, 1);
    });
}

/// Limits the length of files, beyond which writes fail. SIGXFSZ would end the process.
fn limit_files(bytes: u64) {
    // SAFETY: the calls take plain data.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit), 0);
        limit.rlim_cur = bytes.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}

#[test]
fn errors_of_write_back_are_reported_and_lose_nothing() {
    const PAGES: usize = 64;
    const FRAMES: usize = 16;
    if !own_process::entered("errors_of_write_back_are_reported_and_lose_nothing") {
        return;
    }
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("errors", PAGES, 0);
    let cache = machine.cache(FRAMES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    mapping.advise(Advice::Random);
    machine
        .run(|| {
            limit_files(32 * PAGE as u64);
            // These can be written, and those cannot.
            (0..4).for_each(|page| store(&mapping, page, 1));
            (40..44).for_each(|page| store(&mapping, page, 1));
            let said = mapping.sync().unwrap_err();
            assert!(said.to_string().contains("writing pages back"), "{said}");
            let statistics = cache.statistics();
            assert_eq!((statistics.written_back, statistics.write_errors), (4, 1));
            // Eviction takes others, and the pages keep what was stored.
            for page in 0..PAGES {
                let version = u64::from(page < 4 || (40..44).contains(&page));
                assert_eq!(load(&mapping, page), stamps(page, version), "page {page}");
            }
            assert!(mapping.evict().is_err());
            assert!((40..44).all(|page| load(&mapping, page) == stamps(page, 1)));
            limit_files(u64::MAX);
            mapping.sync().unwrap();
        })
        .unwrap();
    assert!((40..44).all(|page| file.stamps(page) == stamps(page, 1)));
    // A mapping that ends with pages that cannot be written says so.
    machine.run(|| store(&mapping, 50, 1)).unwrap();
    limit_files(32 * PAGE as u64);
    assert!(mapping.close().is_err());
    limit_files(u64::MAX);
    assert_eq!(file.stamps(50), stamps(50, 0));
}

#[test]
fn an_access_that_needs_a_frame_and_gets_none_is_a_signal() {
    const FRAMES: usize = 8;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("none", 64, 0);
    let cache = machine.cache(FRAMES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    is_refused_on(&machine, "an_access_that_needs_a_frame_and_gets_none_is_a_signal", || {
        limit_files(32 * PAGE as u64);
        (40..40 + FRAMES).for_each(|page| store(&mapping, page, 1));
        load(&mapping, 0);
    });
}

/// What the parent of a process asks it to write to.
const FILE: &str = "VELLUM_CACHED_FILE";

#[test]
fn a_program_that_exits_in_ring_0_has_its_stores_written() {
    const PAGES: usize = 100;
    let test = "a_program_that_exits_in_ring_0_has_its_stores_written";
    if let Some(path) = std::env::var_os(FILE) {
        let machine = machine().unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let cache = machine.cache(32, Replacement::Clock).unwrap();
        let mapping = cache.map(&file).unwrap();
        let _ = machine.run(|| {
            (0..PAGES).for_each(|page| store(&mapping, page, 3));
            // SAFETY: it ends the process.
            unsafe { libc::_exit(SEGV + 1) };
        });
        unreachable!("the process has ended");
    }
    if machine().is_none() {
        return;
    }
    let file = TemporaryFile::new("exit", PAGES, 0);
    let program = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(program);
    let output = command.args([test, "--exact"]).env(FILE, &file.path).output().unwrap();
    assert_eq!(output.status.code(), Some(SEGV + 1), "{output:?}");
    assert!((0..PAGES).all(|page| file.stamps(page) == stamps(page, 3)));
}

#[test]
fn a_mapping_that_is_dropped_is_written() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("dropped", 8, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    assert!(matches!(cache.map(&file.file), Err(Error::AlreadyMapped)));
    machine.run(|| (0..8).for_each(|page| store(&mapping, page, 1))).unwrap();
    drop(mapping);
    assert!((0..8).all(|page| file.stamps(page) == stamps(page, 1)));
    // Once more: another range, and no old page.
    let again = cache.map(&file.file).unwrap();
    let is_same = || (0..8).all(|page| load(&again, page) == stamps(page, 1));
    assert!(machine.run(is_same).unwrap());
}

/// Calls a function while another thread is in ring 0 and repeats an act there, without exits.
fn beside<T>(
    machine: &VirtualMachine,
    act: impl Fn() + Sync,
    main: impl FnOnce(&Rounds) -> T,
) -> T {
    let rounds = Rounds { count: AtomicU64::new(0), may_end: AtomicBool::new(false) };
    thread::scope(|scope| {
        scope.spawn(|| {
            let ended = machine.run(|| {
                while !rounds.may_end.load(Ordering::Acquire) {
                    act();
                    rounds.count.fetch_add(1, Ordering::AcqRel);
                }
            });
            ended.unwrap();
        });
        let _end = SetWhenDropped(&rounds.may_end);
        rounds.wait();
        main(&rounds)
    })
}

/// How often the other thread has acted.
struct Rounds {
    count: AtomicU64,
    may_end: AtomicBool,
}

impl Rounds {
    /// Waits until an act has ended that began after the call.
    fn wait(&self) {
        let before = self.count.load(Ordering::Acquire);
        eventually("the other thread acts", || self.count.load(Ordering::Acquire) >= before + 2);
    }
}

/// An instruction for which six pages must be there at the same time, but that of its code.
fn push_from(from: *const u64, stack: *mut u64) {
    // SAFETY: both are words of mappings, and nothing else uses the stack meanwhile.
    unsafe {
        std::arch::asm!(
            "xchg {stack}, rsp",
            "push qword ptr [{from}]",
            "mov rsp, {stack}",
            stack = inout(reg) stack.wrapping_byte_add(8) => _,
            from = in(reg) from,
        );
    }
}

#[test]
fn the_smallest_cache_has_the_pages_of_any_instruction() {
    const PAGES: usize = 64;
    for replacement in [Replacement::Clock, Replacement::Lru, Replacement::S3Fifo] {
        let Some(machine) = machine() else { return };
        let file = TemporaryFile::new("small", PAGES, 0);
        let refused = machine.cache(7, replacement).unwrap_err();
        assert_eq!(refused, Error::CacheTooSmall { pages: 7, least: 8 });
        assert_eq!(
            refused.to_string(),
            "a cache of 7 pages is too small; have 8 or more, which are 32768 bytes"
        );
        let cache = machine.cache(8, replacement).unwrap();
        let mapping = cache.map(&file.file).unwrap();
        let across = |page: usize| word(&mapping, page, 0).wrapping_byte_sub(3);
        let read = |place: *mut u64| {
            // SAFETY: the words are in the mapping.
            unsafe { place.read_unaligned() }
        };
        machine
            .run(|| {
                for round in 0..200 {
                    let (from, to) = (1 + round % 31, 33 + round * 7 % 30);
                    let expected = read(across(from));
                    push_from(across(from), across(to));
                    assert_eq!(read(across(to)), expected, "{round}");
                }
            })
            .unwrap();
    }
}

/// Bytes of a process' own memory.
fn own_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_child_does_not_keep_the_cache_s_memory() {
    const PAGES: usize = 2048;
    if !own_process::entered("a_child_does_not_keep_the_cache_s_memory") {
        return;
    }
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("children", PAGES, 0);
    let cache = machine.cache(PAGES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    machine
        .run(|| (0..PAGES).for_each(|page| assert_eq!(load(&mapping, page), stamps(page, 0))))
        .unwrap();
    let before = own_memory();
    // SAFETY: the child only looks, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_less = own_memory() + (PAGES * PAGE) as u64 * 3 / 4 < before;
        // SAFETY: it ends the child.
        unsafe { libc::_exit(if is_less { 9 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the call fills the number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 9);
}

#[test]
fn a_mapping_ends_while_a_thread_is_in_ring_0() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("early", 4, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    assert!(matches!(machine.cache(8, Replacement::Clock), Err(Error::HasCache)));
    let mapping = cache.map(&file.file).unwrap();
    machine.run(|| store(&mapping, 2, 1)).unwrap();
    beside(&machine, || (), |_| mapping.close().unwrap());
    assert_eq!(file.stamps(2), stamps(2, 1));
}

#[test]
fn a_thread_in_ring_0_forgets_what_another_one_evicts() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("kicks", 8, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    for blocks_signals in [false, true] {
        let (is_prepared, found) = (AtomicBool::new(false), AtomicU64::new(0));
        let act = || {
            if blocks_signals && !is_prepared.swap(true, Ordering::Relaxed) {
                // SAFETY: the calls take plain data.
                unsafe {
                    let mut all: libc::sigset_t = std::mem::zeroed();
                    libc::sigfillset(&raw mut all);
                    libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
                }
            }
            found.store(load(&mapping, 3)[0], Ordering::Release);
        };
        let before = machine.counts();
        beside(&machine, act, |rounds| {
            for version in 1..20 {
                // The file changes behind the cache's back.
                let [first, _] = stamps(3, version).map(u64::to_le_bytes);
                file.file.write_all_at(&first, 3 * PAGE as u64).unwrap();
                mapping.evict().unwrap();
                rounds.wait();
                let expected = stamps(3, version)[0];
                assert_eq!(found.load(Ordering::Acquire), expected, "an old translation was used");
            }
        });
        let after = machine.counts();
        // The thread may leave ring 0 for other reasons when a page leaves, and then needs no kick.
        assert!(after.kicks > before.kicks, "{before:?}, {after:?}");
    }
}

#[test]
fn a_sync_finds_the_stores_of_a_thread_that_stays_in_ring_0() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("syncs", 4, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    let version = AtomicU64::new(0);
    let act = || store(&mapping, 1, version.load(Ordering::Acquire));
    beside(&machine, act, |rounds| {
        for next in 1..20 {
            version.store(next, Ordering::Release);
            rounds.wait();
            // The thread stores all the time, and its processor knows the page as dirty.
            mapping.sync().unwrap();
            assert_eq!(file.stamps(1), stamps(1, next), "a store was not found");
        }
    });
}

#[test]
fn a_file_that_is_open_for_appending_keeps_its_length() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("append", 4, 0);
    let appending = File::options().read(true).append(true).open(&file.path).unwrap();
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    for io in [Io::Calls, Io::Ring] {
        let mapping = cache.map_with(&appending, io).unwrap();
        machine.run(|| store(&mapping, 1, 3)).unwrap();
        mapping.close().unwrap();
        assert_eq!(file.stamps(1), stamps(1, 3));
        assert_eq!(file.file.metadata().unwrap().len(), 4 * PAGE as u64);
    }
}

/// Whether the handler below has begun, and may end.
static HANDLER: (AtomicBool, AtomicBool) = (AtomicBool::new(false), AtomicBool::new(false));

extern "C" fn wait_in_handler(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    HANDLER.0.store(true, Ordering::Release);
    while !HANDLER.1.load(Ordering::Acquire) {
        thread::yield_now();
    }
}

/// The thread that evicts must not wait for a handler: it may be the one that has to let it go on.
#[test]
fn an_eviction_waits_for_no_handler_of_another_thread() {
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("handlers", 4, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    common::handle(libc::SIGUSR2, wait_in_handler as *const () as usize);
    let (thread, found) = (AtomicU64::new(0), AtomicU64::new(0));
    let act = || {
        if thread.load(Ordering::Relaxed) == 0 {
            // SAFETY: the call has no arguments.
            thread.store(unsafe { libc::pthread_self() }, Ordering::Release);
        }
        found.store(load(&mapping, 3)[0], Ordering::Release);
    };
    beside(&machine, act, |rounds| {
        let end = SetWhenDropped(&HANDLER.1);
        // SAFETY: the thread runs until `beside` lets it end.
        let sent = unsafe { libc::pthread_kill(thread.load(Ordering::Acquire), libc::SIGUSR2) };
        assert_eq!(sent, 0);
        eventually("the handler runs", || HANDLER.0.load(Ordering::Acquire));
        let [first, _] = stamps(3, 1).map(u64::to_le_bytes);
        file.file.write_all_at(&first, 3 * PAGE as u64).unwrap();
        mapping.evict().unwrap();
        drop(end);
        rounds.wait();
        assert_eq!(found.load(Ordering::Acquire), stamps(3, 1)[0]);
    });
}

/// How often the handler below has run.
static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn note_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn kicks_are_no_business_of_the_program_s_handler() {
    if !own_process::entered("kicks_are_no_business_of_the_program_s_handler") {
        return;
    }
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("handler", 4, 0);
    let cache = machine.cache(8, Replacement::Clock).unwrap();
    let mapping = cache.map(&file.file).unwrap();
    let raises = AtomicBool::new(false);
    let act = || {
        _ = load(&mapping, 1);
        if raises.swap(false, Ordering::AcqRel) {
            // SAFETY: the signal has a handler.
            assert_eq!(unsafe { libc::raise(libc::SIGTRAP) }, 0);
        }
    };
    beside(&machine, act, |rounds| {
        common::handle(libc::SIGTRAP, note_signal as *const () as usize);
        for _ in 0..10 {
            mapping.evict().unwrap();
            rounds.wait();
        }
        assert_eq!(HANDLED.load(Ordering::Relaxed), 0);
        raises.store(true, Ordering::Release);
        eventually("the program has its own", || HANDLED.load(Ordering::Relaxed) == 1);
    });
    assert!(machine.counts().kicks > 0);
}

/// Threads load and store at random in a file that is larger than the cache. Each has words of its
/// own in each page. A thread in ring 3 syncs and evicts meanwhile.
#[test]
fn threads_share_a_cache() {
    const THREADS: usize = 4;
    const PAGES: usize = 100;
    const FRAMES: u32 = 32;
    const STEPS: usize = 1000;
    let replacements = [Replacement::Clock, Replacement::Lru, Replacement::S3Fifo];
    for replacement in replacements {
        let Some(machine) = machine() else { return };
        let file = TemporaryFile::new("threads", PAGES, 0);
        let cache = machine.cache(FRAMES, replacement).unwrap();
        let mapping = cache.map(&file.file).unwrap();
        let own = |page: usize, thread: usize| word(&mapping, page, 8 + thread);
        let stamp = |page: usize, thread: usize, version: u64| {
            (page as u64) << 40 | (thread as u64) << 32 | version
        };
        let work = |thread: usize| {
            let mut versions = [0_u64; PAGES];
            let mut random = thread as u64 + 1;
            for step in 0..STEPS {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767);
                let at = (random >> 33) as usize;
                let page = if at.is_multiple_of(3) { step % PAGES } else { at / 3 % PAGES };
                let own = own(page, thread);
                let expected = match versions[page] {
                    0 => 0,
                    version => stamp(page, thread, version),
                };
                // SAFETY: the word is in the mapping, and is this thread's.
                assert_eq!(unsafe { own.read_volatile() }, expected, "{thread}, page {page}");
                assert_eq!(load(&mapping, page), stamps(page, 0), "page {page}");
                if at.is_multiple_of(2) {
                    versions[page] += 1;
                    // SAFETY: as above.
                    unsafe { own.write_volatile(stamp(page, thread, versions[page])) };
                }
            }
            versions
        };
        let may_end = AtomicBool::new(false);
        let versions: Vec<_> = thread::scope(|scope| {
            let (machine, mapping, may_end, work) = (&machine, &mapping, &may_end, &work);
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| scope.spawn(move || machine.run(|| work(thread)).unwrap()))
                .collect();
            scope.spawn(move || {
                while !may_end.load(Ordering::Acquire) {
                    mapping.sync().unwrap();
                    thread::yield_now();
                    mapping.evict().unwrap();
                }
            });
            let _end = SetWhenDropped(may_end);
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(mapping.mapped_pages() <= FRAMES.into());
        let statistics = cache.statistics();
        assert!(statistics.evictions > PAGES as u64, "{statistics:?}");
        assert!(machine.counts().kicks > 0, "{:?}", machine.counts());
        mapping.close().unwrap();
        for (page, thread) in (0..PAGES).flat_map(|page| (0..THREADS).map(move |t| (page, t))) {
            let mut bytes = [0; 8];
            file.file.read_exact_at(&mut bytes, (page * PAGE + (8 + thread) * 8) as u64).unwrap();
            let expected = match versions[thread][page] {
                0 => 0,
                version => stamp(page, thread, version),
            };
            assert_eq!(u64::from_le_bytes(bytes), expected, "{thread}, page {page} of the file");
        }
    }
}

/// How files are reached, with words for messages.
const WAYS: [(Io, &str); 3] = [(Io::Calls, "calls"), (Io::Ring, "a ring"), (Io::Copies, "copies")];

/// Pages come and go by each way, with one thread and with two.
#[test]
fn files_are_reached_by_each_way() {
    const PAGES: usize = 100;
    const FRAMES: u32 = 32;
    for (io, way) in WAYS {
        let Some(machine) = machine() else { return };
        let file = TemporaryFile::new("ways", PAGES, 100);
        let cache = machine.cache(FRAMES, Replacement::Clock).unwrap();
        let mapping = cache.map_with(&file.file, io).unwrap();
        let go_round = |version: u64, first: usize| {
            for page in (first..PAGES).step_by(2) {
                assert_eq!(load(&mapping, page), stamps(page, version - 1), "{way}, page {page}");
                store(&mapping, page, version);
            }
        };
        for version in 1..4 {
            thread::scope(|scope| {
                let (machine, go_round) = (&machine, &go_round);
                scope.spawn(move || machine.run(|| go_round(version, 0)).unwrap());
                machine.run(|| go_round(version, 1)).unwrap();
            });
            mapping.sync().unwrap();
            let is_old = |page: &usize| file.stamps(*page) != stamps(*page, version);
            assert_eq!((0..PAGES).find(is_old), None, "{way}: a page in the file");
        }
        let statistics = cache.statistics();
        assert!(statistics.evictions > 2 * PAGES as u64, "{way}: {statistics:?}");
        // The rest of the last page is the file's, and the file keeps its length.
        // SAFETY: the bytes are in the mapping.
        let last = |at: usize| unsafe { mapping.as_ptr().add(PAGES * PAGE + at).read_volatile() };
        let found = machine.run(|| [last(0), last(99), last(100), last(PAGE - 1)]).unwrap();
        assert_eq!(found, [7, 7, 0, 0], "{way}");
        // SAFETY: as above.
        machine
            .run(|| unsafe { mapping.as_ptr().add(PAGES * PAGE + 99).write_volatile(9) })
            .unwrap();
        mapping.close().unwrap();
        let mut bytes = [0; 100];
        file.file.read_exact_at(&mut bytes, (PAGES * PAGE) as u64).unwrap();
        assert_eq!((bytes[98], bytes[99]), (7, 9), "{way}");
        assert_eq!(file.file.metadata().unwrap().len(), (PAGES * PAGE + 100) as u64, "{way}");
    }
}

/// Misses and evictions of dirty pages, once the ring's thread is awake and windows are there.
#[test]
fn misses_by_a_ring_or_by_copies_make_no_exit() {
    const PAGES: usize = 192;
    const FRAMES: u32 = 64;
    for (io, way) in [WAYS[1], WAYS[2]] {
        let Some(machine) = machine() else { return };
        let file = TemporaryFile::new("no-exit", PAGES, 0);
        let cache = machine.cache(FRAMES, Replacement::Clock).unwrap();
        let mapping = cache.map_with(&file.file, io).unwrap();
        mapping.advise(Advice::Random);
        let (exits, faults) = machine
            .run(|| {
                let go_round = || (0..PAGES).for_each(|page| store(&mapping, page, 1));
                go_round();
                let before = machine.counts();
                go_round();
                since(before, &machine)
            })
            .unwrap();
        assert!(faults >= (PAGES - FRAMES as usize) as u64, "{way}: {faults}");
        let said = format!("{way}: {exits} exits of {faults} faults\n");
        std::io::stdout().write_all(said.as_bytes()).unwrap();
        // A ring's thread that had no processor for long has the program make calls.
        let most = if io == Io::Ring { faults / 4 } else { 0 };
        assert!(exits <= most, "{way}: {exits} exits of {faults} faults");
    }
}

/// Prints what faults cost: see `costs` in `ring0.rs`.
#[test]
fn cached_costs() {
    // With a ring another thread has a part of the cost: see the test of its exits.
    for (io, way) in [WAYS[0], WAYS[2]] {
        // Not by a macro, whose output a test that passes does not show.
        std::io::stdout().write_all(format!("by {way}:\n").as_bytes()).unwrap();
        costs_of(io);
    }
}

fn costs_of(io: Io) {
    const FRAMES: usize = 4096;
    const ROUNDS: usize = 2048;
    let Some(machine) = machine() else { return };
    let file = TemporaryFile::new("costs", 3 * FRAMES, 0);
    let cache = machine.cache(FRAMES as u32, Replacement::Clock).unwrap();
    let mapping = cache.map_with(&file.file, io).unwrap();
    mapping.advise(Advice::Random);
    // SAFETY: the byte is in the mapping.
    let touch = |page: usize| unsafe { _ = mapping.as_ptr().add(page * PAGE).read_volatile() };
    // SAFETY: as above.
    let change = |page: usize| unsafe { mapping.as_ptr().add(page * PAGE).write_volatile(1) };
    machine
        .run(|| {
            (0..FRAMES).for_each(touch);
            mapping.unmap_pages().unwrap();
            timed("a fault on a cached page", ROUNDS, touch);
            mapping.evict().unwrap();
            timed("a miss with a free frame", FRAMES - 1, touch);
            let before = cache.statistics();
            timed("a miss with eviction of clean pages", ROUNDS - 1, |page| touch(FRAMES + page));
            let after = cache.statistics();
            assert_eq!(after.evictions - before.evictions, ROUNDS as u64);
            assert_eq!(after.shootdowns - before.shootdowns, ROUNDS as u64 / 512);
            mapping.evict().unwrap();
            (0..FRAMES).for_each(change);
            timed("a miss with eviction of dirty pages", ROUNDS - 1, |page| change(FRAMES + page));
        })
        .unwrap();
}
