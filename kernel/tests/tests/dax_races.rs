//! A file loses blocks and gets others while threads read and write its mappings, and another file
//! takes the blocks that it has lost. No thread sees a byte of the other file, and none of its
//! stores gets there.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{DaxFile, Heap, KeptBound};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, READ_WRITE};
use vellum_kernel_tests::threads::{Barrier, Deadline, Stop, rounds};
use vellum_kernel_tests::{Mapping, PAGE, Table, access, dax_turn};
use vellum_uapi::dax::{DURABLE, MAX_EXTENT, READ_UNIT, UNIT};

const PAGES: u64 = 1_200;
const WORDS: usize = PAGE / 8;

/// The first byte of each word of a file.
const OURS: u64 = 0xaa << 56;
const OTHERS: u64 = 0xbb << 56;

/// Fails unless each word has the mark, or is zero, as words of new blocks are.
#[track_caller]
fn assert_marked(words: &[u64; WORDS], mark: u64, what: &str) {
    for word in words {
        assert!(*word == 0 || word >> 56 == mark >> 56, "{what}: {word:#x} has not {mark:#x}");
    }
}

fn page_of(word: u64) -> Vec<u8> {
    word.to_le_bytes().repeat(WORDS)
}

/// Takes blocks from a file. The file system gives them to another one after its next commit.
fn lose(file: &DaxFile, take: impl FnOnce(&File)) {
    take(file.file());
    file.file().sync_all().unwrap();
}

/// Leaves room for so many pages, so that files get the blocks that others lose.
fn filler(pages: u64) -> DaxFile {
    let file = DaxFile::new("filler");
    let free = || rustix::fs::statfs(file.path()).unwrap().f_bavail;
    let mut end = 0;
    while free() > pages {
        let more = (free() - pages) * PAGE as u64;
        let reserved = fallocate(file.file(), FallocateFlags::empty(), end, more);
        end += more;
        reserved.unwrap();
    }
    file
}

/// Writes and loses pages of a file until all stop. There are pauses: a mapping that led to lost
/// blocks would do so until the next change.
fn change(file: &DaxFile, mark: u64, stop: &Stop, mut random: Random) -> u64 {
    let mut steps = 0;
    while !stop.is_said() {
        let (page, count) = (random.below(PAGES), 1 + random.below(200));
        let (offset, length) = (page * PAGE as u64, count.min(PAGES - page) * PAGE as u64);
        match random.below(6) {
            0 => lose(file, |file| file.set_len(offset).unwrap()),
            1 => {
                let way = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                lose(file, |file| fallocate(file, way, offset, length).unwrap());
            }
            // The other file may have all that is free.
            2 => {
                let _ = fallocate(file.file(), FallocateFlags::empty(), offset, length);
            }
            _ => {
                let bytes = page_of(mark | steps).repeat(length as usize / PAGE);
                drop(file.file().write_all_at(&bytes, offset));
            }
        }
        steps += 1;
        if mark == OURS && random.one_in(4) {
            thread::sleep(Duration::from_millis(random.below(20)));
        }
    }
    steps
}

/// Fails unless a file's own `read` finds its own words.
fn check(file: &DaxFile, mark: u64) {
    let bytes = fs::read(file.path()).unwrap();
    for word in bytes.chunks_exact(8) {
        let word = u64::from_le_bytes(word.try_into().unwrap());
        assert!(word == 0 || word >> 56 == mark >> 56, "{word:#x} in the file of {mark:#x}");
    }
}

/// Maps the file, uses the mapping for a while, and so on, until all stop. Counts the pages of the
/// file that it has seen.
fn use_mappings(table: &Table, stop: &Stop, mut random: Random, seen: &AtomicU64) {
    while !stop.is_said() {
        let mapping = match random.below(3) {
            0 => table.mapped_for_reading(PAGES),
            1 => Mapping::new(table.request(READ_UNIT, READ_WRITE)).unwrap(),
            _ => table.mapped(PAGES),
        };
        for _ in 0..random.below(300) {
            let has_seen = use_once(table, &mapping, &mut random);
            seen.fetch_add(has_seen.into(), Ordering::Relaxed);
        }
    }
}

fn use_once(table: &Table, mapping: &Mapping, random: &mut Random) -> bool {
    let address = mapping.page(random.below(PAGES));
    match random.below(24) {
        0..10 => match access::load_page(address) {
            Ok(words) => {
                assert_marked(&words, OURS, "a mapping");
                return words[0] != 0;
            }
            Err(fault) => assert_eq!(fault.signal, libc::SIGBUS),
        },
        10..18 => drop(access::store_page(address, OURS | 1)),
        // Detaches the mount.
        20.. => sys::madvise(mapping.start(), mapping.length(), libc::MADV_DONTNEED).unwrap(),
        18 => table.refresh().or_else(busy).unwrap(),
        _ if random.one_in(4) => {
            let _ = sys::mprotect(mapping.start(), mapping.length(), READ_WRITE);
        }
        _ => table.sync().unwrap(),
    }
    false
}

/// Attaches parts of a file to a heap, uses them, also after they were detached, and so on, until
/// all stop. A CPU may have what was detached; it never has another file's blocks. Counts the pages
/// of the file that it has seen.
fn use_heap(file: &DaxFile, heap: &Heap, stop: &Stop, mut random: Random, seen: &AtomicU64) {
    let mut attached = Vec::new();
    while !stop.is_said() {
        let (page, count) = (random.below(PAGES), 1 + random.below(PAGES));
        if attached.len() < 5 {
            let address = heap.attach(file.file(), page, count).unwrap();
            attached.push((address, count, true));
        }
        let at = random.below(attached.len() as u64) as usize;
        let (address, count, is_there) = attached[at];
        for _ in 0..random.below(40) {
            let address = address + random.below(count) as usize * PAGE;
            match random.below(24) {
                0..12 => match access::load_page(address) {
                    Ok(words) => {
                        assert_marked(&words, OURS, "an attachment");
                        seen.fetch_add((words[0] != 0).into(), Ordering::Relaxed);
                    }
                    Err(fault) => assert!(fault.signal == libc::SIGBUS || !is_there),
                },
                12..20 => drop(access::store_page(address, OURS | 1)),
                20 => heap.sync().unwrap(),
                _ => sys::madvise(address, PAGE, libc::MADV_DONTNEED).unwrap(),
            }
        }
        match is_there {
            true => {
                heap.detach(address).unwrap();
                attached[at].2 = false;
            }
            // From here on another attachment may be there.
            false => drop(attached.swap_remove(at)),
        }
    }
}

/// The file may change faster than its table.
fn busy(errno: vellum_kernel_tests::Errno) -> Result<(), vellum_kernel_tests::Errno> {
    if errno == vellum_kernel_tests::Errno::BUSY { Ok(()) } else { Err(errno) }
}

#[test]
fn no_mapping_leads_to_another_file_s_blocks() {
    let Some(_turn) = dax_turn() else { return };
    let random = Random::of_this_run().number();
    let (file, other) = (DaxFile::new("ours"), DaxFile::new("others"));
    let _filler = filler(PAGES + 200);
    let plain = file.table();
    let durable = Table::open(file.file(), DURABLE).unwrap();
    // Alone in its heap, the thread finds nothing else at the addresses of what it has detached.
    let heap = Heap::for_writing(64);
    let (stop, seen) = (Stop::default(), AtomicU64::new(0));
    let deadline = Deadline::after_ms(6_000);
    let numbers = |thread: u64| Random::new(random.wrapping_add(thread));
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| change(&file, OURS, &stop, numbers(1)));
        scope.spawn(|| change(&other, OTHERS, &stop, numbers(2)));
        for (thread, table) in [(3, &plain), (4, &durable)] {
            let (stop, seen, numbers) = (&stop, &seen, numbers(thread));
            scope.spawn(move || use_mappings(table, stop, numbers, seen));
        }
        let (file, heap, stop, seen) = (&file, &heap, &stop, &seen);
        scope.spawn(move || use_heap(file, heap, stop, numbers(5), seen));
        for _ in deadline.rounds_until(|| seen.load(Ordering::Relaxed) > 0) {
            check(&other, OTHERS);
            assert_file_tables_are_sound();
        }
    });
    check(&other, OTHERS);
    check(&file, OURS);
    assert!(seen.into_inner() > 0, "no thread saw a page");
    plain.refresh().unwrap();
    assert_file_tables_are_sound();
}

/// A fault attaches a mount while the file loses all of its blocks.
#[test]
fn a_mapping_is_attached_before_blocks_are_lost_or_not_at_all() {
    let Some(_turn) = dax_turn() else { return };
    const FEW: u64 = 64;
    let _filler = filler(FEW + 16);
    let file = DaxFile::new("ours");
    let table = file.table();
    let mapping = table.mapped(FEW);
    let mut random = Random::of_this_run();
    let barrier = Barrier::new(2);
    for _ in 0..rounds(200) {
        file.file().write_all_at(&page_of(OURS).repeat(FEW as usize), 0).unwrap();
        table.refresh().unwrap();
        sys::madvise(mapping.start(), mapping.length(), libc::MADV_DONTNEED).unwrap();
        let (page, pause) = (random.below(FEW), Duration::from_micros(random.below(300)));
        thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                access::load(mapping.page(page)).unwrap();
            });
            barrier.wait();
            thread::sleep(pause);
            let way = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            lose(&file, |file| fallocate(file, way, 0, FEW * PAGE as u64).unwrap());
        });
        let other = DaxFile::new("others");
        other.file().write_all_at(&page_of(OTHERS).repeat(FEW as usize), 0).unwrap();
        for page in 0..FEW {
            let words = access::load_page(mapping.page(page)).unwrap();
            assert!(words.iter().all(|word| *word == 0), "page {page}: {:#x}", words[0]);
        }
    }
}

/// The file system serves a page of a heap while the file loses the block.
#[test]
fn a_page_is_served_before_blocks_are_lost_or_not_at_all() {
    let Some(_turn) = dax_turn() else { return };
    const FEW: u64 = 400;
    let _filler = filler(FEW + 16);
    let file = DaxFile::new("ours");
    let heap = Heap::for_writing(0);
    let mut random = Random::of_this_run();
    let barrier = Barrier::new(2);
    for _ in 0..rounds(120) {
        file.file().set_len(UNIT).unwrap();
        file.file().write_all_at(&page_of(OURS).repeat(FEW as usize), 0).unwrap();
        let address = heap.attach(file.file(), 0, UNIT / PAGE as u64).unwrap();
        let at = |page| address + page as usize * PAGE;
        // From here on the file system serves all pages.
        assert_eq!(access::load(at(FEW)), Ok(0));
        let (page, pause) = (random.below(8), Duration::from_micros(random.below(5_000)));
        thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                for page in page..FEW {
                    access::load(at(page)).unwrap();
                }
            });
            barrier.wait();
            thread::sleep(pause);
            let way = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            lose(&file, |file| fallocate(file, way, 0, FEW * PAGE as u64).unwrap());
        });
        let other = DaxFile::new("others");
        other.file().write_all_at(&page_of(OTHERS).repeat(FEW as usize), 0).unwrap();
        for page in 0..FEW {
            let words = access::load_page(at(page)).unwrap();
            assert!(words.iter().all(|word| *word == 0), "page {page}: {:#x}", words[0]);
        }
        heap.detach(address).unwrap();
    }
}

/// A refresh begins while the file collapses: its pages are unmapped, and its length is the former
/// one. The next refresh finds what is appended afterwards.
#[test]
fn what_is_appended_after_a_collapse_is_looked_up() {
    let Some(_turn) = dax_turn() else { return };
    const FEW: u64 = 64;
    let file = DaxFile::new("collapses");
    let (table, stop) = (file.table(), Stop::default());
    let mut random = Random::of_this_run();
    let all = page_of(OURS).repeat(FEW as usize);
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                table.refresh().or_else(busy).unwrap();
            }
        });
        for round in 0..rounds(600) {
            file.file().write_all_at(&all, 0).unwrap();
            (0..random.below(2_000)).for_each(|_| std::hint::spin_loop());
            let way = FallocateFlags::COLLAPSE_RANGE;
            fallocate(file.file(), way, 0, FEW / 2 * PAGE as u64).unwrap();
            table.refresh().unwrap();
            file.file().write_all_at(&all, 0).unwrap();
            table.refresh().unwrap();
            assert_eq!(table.stat().leaves, FEW, "round {round}");
            file.file().set_len(0).unwrap();
        }
    });
}

/// Tables are opened and closed, mapped and refreshed by threads that know nothing of each other.
#[test]
fn tables_come_and_go_while_files_change() {
    let Some(_turn) = dax_turn() else { return };
    let random = Random::of_this_run().number();
    let files: Vec<_> = (0..3).map(|at| DaxFile::new(&format!("file-{at}"))).collect();
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(4_000));
    thread::scope(|scope| {
        let _end = stop.at_end();
        for thread in 0..3 {
            let (files, stop) = (&files, &stop);
            let mut numbers = Random::new(random.wrapping_add(thread));
            scope.spawn(move || {
                while !stop.is_said() {
                    let file = &files[numbers.below(3) as usize];
                    let table = file.table();
                    let mapping = table.mapped(PAGES);
                    for _ in 0..numbers.below(20) {
                        use_once(&table, &mapping, &mut numbers);
                    }
                    if numbers.one_in(2) {
                        drop(table);
                    }
                }
            });
        }
        let (files, stop, mut numbers) = (&files, &stop, Random::new(random.wrapping_add(9)));
        scope.spawn(move || {
            while !stop.is_said() {
                let file = &files[numbers.below(3) as usize];
                file.file().set_len(numbers.below(PAGES) * PAGE as u64).unwrap();
                let page = numbers.below(PAGES) * PAGE as u64;
                file.file().write_all_at(&page_of(OURS | 2), page).unwrap();
            }
        });
        for _ in deadline.rounds() {
            fs::read_to_string("/sys/kernel/debug/vellum/file-tables").unwrap();
            // Those without a user go, too.
            drop(KeptBound::none());
        }
    });
}

/// The file system is about to put an entry for a hole into the process' own tables, while another
/// thread has the table attached again. The entry must not get into the table, which others share,
/// nor into the guard, which all tables share.
#[test]
fn what_the_file_system_maps_stays_with_the_process() {
    let Some(_turn) = dax_turn() else { return };
    for (length, extent) in [(READ_UNIT, READ_UNIT), (500 << 30, MAX_EXTENT)] {
        let (file, other) = (DaxFile::stamped("ours", 4, 7), DaxFile::stamped("other", 4, 7));
        file.file().set_len(length).unwrap();
        file.file().sync_all().unwrap();
        other.file().set_len(length).unwrap();
        let table = Table::open(file.file(), DURABLE).unwrap();
        let watching = other.table();
        let mapping = Mapping::new(table.request(extent, READ_WRITE)).unwrap();
        let spy = Mapping::new(watching.request(extent, libc::PROT_READ)).unwrap();
        spy.assert_stamped(0, 7);
        let (stop, deadline) = (Stop::default(), Deadline::after_ms(3_000));
        let place = |step: u64| match extent {
            MAX_EXTENT => (step << 18) + 512 * step,
            _ => 512 + 7 * step,
        };
        let steps = thread::scope(|scope| {
            let _end = stop.at_end();
            scope.spawn(|| {
                while !stop.is_said() {
                    let _ = table.refresh();
                }
            });
            scope.spawn(|| {
                while !stop.is_said() {
                    sys::madvise(mapping.start(), UNIT as usize, libc::MADV_DONTNEED).unwrap();
                    access::load(mapping.page(0)).unwrap();
                }
            });
            let steps = deadline.rounds().map(|round| round + 1).take_while(|step| *step < 499);
            let store = |step| access::store_page(mapping.page(place(step)), OURS | step).unwrap();
            steps.inspect(|step| store(*step)).count() as u64
        });
        for step in 1..=steps {
            sys::madvise(spy.start(), UNIT as usize, libc::MADV_DONTNEED).unwrap();
            watching.refresh().unwrap();
            spy.assert_stamped(0, 7);
            let words = access::load_page(spy.page(place(step))).unwrap();
            assert!(words.iter().all(|word| *word == 0), "step {step}: {:#x}", words[0]);
        }
        table.refresh().unwrap();
        assert_eq!(table.stat().leaves, 4 + steps);
        assert_file_tables_are_sound();
    }
}

/// The core reads an entry of level 3 to see that it is there, and once more to walk on. A thread
/// detaches the mount in between.
#[test]
fn a_walk_finds_a_table_where_it_has_seen_one() {
    let Some(_turn) = dax_turn() else { return };
    let file = DaxFile::stamped("walked", 4, 7);
    file.file().set_len(3 * READ_UNIT).unwrap();
    let table = file.table();
    let mapping = Mapping::new(table.request(2 * READ_UNIT, READ_WRITE)).unwrap();
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(4_000));
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            let mut state = [0_u8; 1];
            let second = mapping.start() + READ_UNIT as usize;
            let second = std::ptr::with_exposed_provenance_mut(second);
            while !stop.is_said() {
                // SAFETY: the vector has a byte for the page.
                unsafe { libc::mincore(second, PAGE, state.as_mut_ptr()) };
            }
        });
        for _ in deadline.rounds() {
            sys::madvise(mapping.start(), PAGE, libc::MADV_DONTNEED).unwrap();
            access::load(mapping.page(0)).unwrap();
        }
    });
    // A wrong walk is in the kernel's log.
}

/// The self-check walks a tree while it gets a new root.
#[test]
fn a_tree_grows_while_it_is_checked() {
    let Some(_turn) = dax_turn() else { return };
    let _bound = KeptBound::none();
    let file = DaxFile::stamped("checked", 4, 7);
    let (stop, deadline) = (Stop::default(), Deadline::after_ms(2_000));
    thread::scope(|scope| {
        let _end = stop.at_end();
        scope.spawn(|| {
            while !stop.is_said() {
                assert_file_tables_are_sound();
            }
        });
        for _ in deadline.rounds() {
            let table = file.table();
            let mapping = Mapping::new(table.request(MAX_EXTENT, libc::PROT_READ)).unwrap();
            assert_eq!((table.stat().order, table.stat().leaves), (3, 4));
            drop(mapping);
        }
    });
}
