//! Every word of a file says which file it is of, which page, and of which time. Threads and
//! processes load and store by tables, heaps and ordinary mappings, while the file loses blocks, or
//! its name, and another file takes the blocks at once. No load finds a word of another file, of
//! another page, or of a time before the page was lost for the last time.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::child::{Child, End};
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{DaxFile, Heap, KeptBound};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, READ_WRITE, Request};
use vellum_kernel_tests::threads::{Deadline, wait_until};
use vellum_kernel_tests::{Mapping, PAGE, Table, access, dax_turn, persistent};
use vellum_uapi::dax::{DURABLE, READ_UNIT};

/// Pages of the file, at most: beyond one table of level 1.
const PAGES: u64 = 600;
/// Blocks that are free beside those of the file. So the other file gets what it loses.
const ROOM: u64 = 200;
/// Pages of the other file, at most.
const OTHERS: u64 = 150;
/// Pages that are lost or taken at a time, at most.
const FEW: u64 = 40;
const WORDS: usize = PAGE / 8;
/// The number of the file that takes blocks.
const OTHER: u32 = 0xff;
/// A test goes on, also beyond its time, until so many pages were seen and stored, and so on.
const ENOUGH: u64 = 5;
/// Numbers of the file, before they begin anew.
const NUMBERS: u32 = 100;
/// Threads or processes that use mappings.
const USERS: usize = 3;

/// What a page of a file has in each of its words.
fn word(file: u32, time: u32, page: u64) -> u64 {
    u64::from(file) << 56 | u64::from(time & 0xff_ffff) << 32 | page
}

/// What threads and processes know of each other. It is in memory that they share.
struct Board {
    stop: AtomicU32,
    /// The number of the file, which changes when another file takes its place.
    file: AtomicU32,
    /// Rises before each loss of blocks.
    time: AtomicU32,
    /// Pages move in the file, so that words do not say theirs.
    moves: AtomicU32,
    /// The time of the store that each user has begun and not ended; 0: there is none.
    storing: [AtomicU32; USERS],
    /// Of each page, the time of its last loss.
    lost: [AtomicU32; PAGES as usize],
    /// Pages that users have seen, and have stored to; losses; pages that the other file got.
    seen: AtomicU64,
    stored: AtomicU64,
    losses: AtomicU64,
    taken: AtomicU64,
}

impl Board {
    /// Memory for one, with zeros.
    fn memory() -> Mapping {
        Mapping::new(Request {
            address: 0,
            length: size_of::<Self>(),
            protection: READ_WRITE,
            flags: libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            fd: None,
            offset: 0,
        })
        .unwrap()
    }

    fn of(memory: &Mapping) -> &Self {
        let board = std::ptr::with_exposed_provenance::<Self>(memory.start());
        // SAFETY: the memory is long enough and aligned, zeros are a board, and it lasts as long as
        // the mapping. Everything in it is atomic.
        let board = unsafe { &*board };
        board.file.store(1, SeqCst);
        board.time.store(1, SeqCst);
        board
    }

    fn is_over(&self) -> bool {
        self.stop.load(SeqCst) != 0
    }

    /// Stops all when the result is dropped, also by a panic.
    fn at_end(&self) -> impl Drop + '_ {
        struct AtEnd<'a>(&'a Board);
        impl Drop for AtEnd<'_> {
            fn drop(&mut self) {
                self.0.stop.store(1, SeqCst);
            }
        }
        AtEnd(self)
    }

    /// Has the file lose pages. Stores that begin from now on have a later time, and those of
    /// before have ended. A call that fails, as no block is free, may leave pages as they are.
    fn lose<E>(&self, pages: &Range<u64>, take: impl FnOnce() -> Result<(), E>) {
        let time = self.time.fetch_add(1, SeqCst) + 1;
        let is_done = |storing: &AtomicU32| !(1..time).contains(&storing.load(SeqCst));
        wait_until(|| self.storing.iter().all(is_done));
        if take().is_ok() {
            pages.clone().for_each(|page| self.lost[page as usize].store(time, SeqCst));
            self.losses.fetch_add(1, SeqCst);
        }
    }

    /// Stores a page of the file with a number.
    fn store(&self, user: usize, file: u32, page: u64, address: usize) {
        loop {
            let time = self.time.load(SeqCst);
            self.storing[user].store(time, SeqCst);
            if self.time.load(SeqCst) == time {
                let done = access::store_page(address, word(file, time, page));
                self.storing[user].store(0, SeqCst);
                self.stored.fetch_add(done.is_ok().into(), SeqCst);
                return;
            }
        }
    }

    /// Loads a page of the file with a number, and checks it. An error if there was a signal.
    fn load(&self, file: u32, page: u64, address: usize, what: &str) -> Result<(), i32> {
        let lost = self.lost[page as usize].load(SeqCst);
        // Once another file has this one's place, its losses are another's.
        let lost = if self.file.load(SeqCst) == file { lost } else { 0 };
        let words = access::load_page(address).map_err(|fault| fault.signal)?;
        let moves = self.moves.load(SeqCst) != 0;
        words.iter().for_each(|word| check(*word, file, (!moves).then_some((page, lost)), what));
        self.seen.fetch_add((words[0] != 0).into(), SeqCst);
        Ok(())
    }
}

/// Fails unless a word is zero, or one of the file, and of this page, and not older than this time.
#[track_caller]
fn check(word: u64, file: u32, of: Option<(u64, u32)>, what: &str) {
    let (of_file, time, page) = (word >> 56, word >> 32 & 0xff_ffff, word & 0xffff_ffff);
    if word == 0 {
        return;
    }
    assert_eq!(of_file, u64::from(file), "{what} of file {file}: the word {word:#x}");
    if let Some((wanted, lost)) = of {
        assert_eq!(page, wanted, "{what}: page {wanted} of file {file} has {word:#x}");
        assert!(time >= lost.into(), "{what}: page {page}, lost at {lost:#x}, has {word:#x}");
    }
}

fn path(file: u32) -> PathBuf {
    Path::new(persistent::FOLDER).join(format!("stamps-{file}"))
}

fn pages_of(file: u32, time: u32, first: u64, count: u64) -> Vec<u8> {
    let page = |page| word(file, time, page).to_le_bytes().repeat(WORDS);
    (first..first + count).flat_map(page).collect()
}

fn at(pages: u64) -> u64 {
    pages * PAGE as u64
}

/// Fails unless a file has nothing but its own words, by `read`.
fn check_file(path: &Path, file: u32, moves: bool) {
    let bytes = fs::read(path).unwrap();
    for (index, bytes) in bytes.chunks_exact(8).enumerate() {
        let of = (!moves).then_some(((index / WORDS) as u64, 0));
        check(u64::from_le_bytes(bytes.try_into().unwrap()), file, of, "read");
    }
}

/// Has the file lose pages and get others until all stop. Most of the time it has all pages: then
/// tables serve accesses, and not the file system alone.
fn change(board: &Board, mut random: Random) {
    let mut number = board.file.load(SeqCst);
    let mut file = OpenOptions::new().read(true).write(true).open(path(number)).unwrap();
    while !board.is_over() {
        let first = random.below(PAGES);
        let count = (1 + random.below(FEW)).min(PAGES - first);
        let moves = board.moves.load(SeqCst) != 0;
        let take = |how| fallocate(&file, how, at(first), at(count));
        let mut lost = first..first + count;
        match random.below(8) {
            0 | 1 => {
                lost = PAGES - count..PAGES;
                board.lose(&lost, || file.set_len(at(lost.start)));
            }
            2 if moves => {
                let _ = take(FallocateFlags::COLLAPSE_RANGE);
                let _ = file.set_len(at(PAGES));
                lost = PAGES - count..PAGES;
            }
            3 if moves => {
                let _ = take(FallocateFlags::INSERT_RANGE);
                let _ = file.set_len(at(PAGES));
            }
            4 => board.lose(&lost, || take(FallocateFlags::ZERO_RANGE)),
            5 if random.one_in(3) => {
                let former = path(number);
                number = number % NUMBERS + 1;
                file = filled(board, number);
                board.file.store(number, SeqCst);
                fs::remove_file(former).unwrap();
                continue;
            }
            _ => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                board.lose(&lost, || take(how));
            }
        }
        // What was freed may be another file's after the next commit.
        file.sync_all().unwrap();
        thread::sleep(Duration::from_millis(random.below(10)));
        match random.below(10) {
            0 => {}
            1 => fill(board, number, &file, 0..PAGES),
            _ => fill(board, number, &file, lost),
        }
    }
}

/// Writes pages, as far as there are blocks for them.
fn fill(board: &Board, number: u32, file: &File, pages: Range<u64>) {
    let (time, count) = (board.time.load(SeqCst), pages.end - pages.start);
    let bytes = pages_of(number, time, pages.start, count);
    drop(file.write_all_at(&bytes, at(pages.start)));
}

/// A new file with all pages.
fn filled(board: &Board, number: u32) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let file = options.open(path(number)).unwrap();
    fill(board, number, &file, 0..PAGES);
    file
}

/// Takes what blocks are free, gives them back, and looks whether they have other words than its
/// own.
fn take_blocks(board: &Board, mut random: Random) {
    let path = path(OTHER);
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    let table = Table::open(&file, 0).unwrap();
    let mapping = table.mapped(OTHERS);
    while !board.is_over() {
        let first = random.below(OTHERS);
        let count = (1 + random.below(FEW)).min(OTHERS - first);
        match random.below(6) {
            0 => file.set_len(at(first)).unwrap(),
            1 => {
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&file, how, at(first), at(count)).unwrap();
            }
            2 => drop(access::store_page(mapping.page(first), word(OTHER, 1, first))),
            _ => {
                let written = file.write_all_at(&pages_of(OTHER, 1, first, count), at(first));
                board.taken.fetch_add(if written.is_ok() { count } else { 0 }, SeqCst);
            }
        }
        if random.one_in(4) {
            file.sync_all().unwrap();
            check_file(&path, OTHER, false);
        }
        thread::sleep(Duration::from_millis(random.below(4)));
    }
    check_file(&path, OTHER, false);
    fs::remove_file(&path).unwrap();
}

/// Where a user has pages of the file.
enum Place<'a> {
    Mapped(Mapping),
    Attached(&'a Heap, usize),
}

impl<'a> Place<'a> {
    /// Of a file that is to be durable each refresh commits the file system's log, which is slow.
    fn new(file: &File, number: u32, heaps: &'a [Heap; 2], random: &mut Random) -> Self {
        let flags = if number.is_multiple_of(4) { DURABLE } else { 0 };
        let table = || Table::open(file, flags).unwrap();
        match random.below(7) {
            0 | 1 => Self::Mapped(table().mapped(PAGES)),
            2 => Self::Mapped(table().mapped_for_reading(PAGES)),
            3 => Self::Mapped(Mapping::new(table().request(READ_UNIT, READ_WRITE)).unwrap()),
            4 => {
                let length = at(PAGES) as usize;
                Self::Mapped(Mapping::of_device(file.as_fd(), 0, length).unwrap())
            }
            _ => {
                let heap = random.pick(&[&heaps[0], &heaps[1]]);
                Self::Attached(heap, heap.attach(file, 0, PAGES).unwrap())
            }
        }
    }

    fn page(&self, page: u64) -> usize {
        match self {
            Self::Mapped(mapping) => mapping.page(page),
            Self::Attached(_, address) => address + page as usize * PAGE,
        }
    }
}

/// Maps the file, uses the mapping, and so on, until all stop.
fn use_mappings(board: &Board, user: usize, mut random: Random) {
    let heaps = [Heap::for_reading(5), Heap::for_writing(5)];
    while !board.is_over() {
        let number = board.file.load(SeqCst);
        let Ok(file) = OpenOptions::new().read(true).write(true).open(path(number)) else {
            continue;
        };
        // The numbers begin anew: this must be the file that has this one.
        if board.file.load(SeqCst) != number {
            continue;
        }
        let place = Place::new(&file, number, &heaps, &mut random);
        for _ in 0..random.below(400) {
            let page = random.below(PAGES);
            match random.below(80) {
                0..48 => match board.load(number, page, place.page(page), "a mapping") {
                    Ok(()) => {}
                    Err(signal) => assert_eq!(signal, libc::SIGBUS),
                },
                48..76 => board.store(user, number, page, place.page(page)),
                76 | 77 => match Table::open(&file, 0).unwrap().refresh() {
                    Ok(()) | Err(vellum_kernel_tests::Errno::BUSY) => {}
                    Err(errno) => panic!("REFRESH: {errno}"),
                },
                78 => Table::open(&file, 0).unwrap().sync().unwrap(),
                _ => sys::madvise(place.page(0), PAGE, libc::MADV_DONTNEED).unwrap(),
            }
        }
        if let Place::Attached(heap, address) = place {
            heap.detach(address).unwrap();
            // This processor may have translations.
            for _ in 0..random.below(20) {
                let page = random.below(PAGES);
                let _ = board.load(number, page, address + page as usize * PAGE, "a zombie");
            }
        }
    }
}

/// Everything at the same time, for a while: each is a thread, or a process.
fn all_together(milliseconds: u64, moves: bool, are_processes: bool) {
    let Some(_turn) = dax_turn() else { return };
    let seed = Random::of_this_run().number();
    let memory = Board::memory();
    let board = Board::of(&memory);
    board.moves.store(moves.into(), SeqCst);
    let _filler = filler(PAGES + ROOM);
    // The file of an earlier run that has failed may be there.
    (1..=NUMBERS).for_each(|number| drop(fs::remove_file(path(number))));
    drop(filled(board, 1));
    let longer = if std::env::var_os("VELLUM_SOAK").is_some() { 60 } else { 1 };
    let deadline = Deadline::after_ms(milliseconds * longer);
    let work = |number: usize| {
        let random = Random::new(seed.wrapping_add(number as u64));
        match number {
            0 => change(board, random),
            1 => take_blocks(board, random),
            _ => use_mappings(board, number - 2, random),
        }
    };
    let all = 0..2 + USERS;
    let counters = [&board.seen, &board.stored, &board.losses, &board.taken];
    let is_enough = || counters.iter().all(|counter| counter.load(SeqCst) >= ENOUGH);
    let watch = || {
        let _end = board.at_end();
        let mut random = Random::new(seed);
        for _ in deadline.rounds_until(is_enough) {
            assert_file_tables_are_sound();
            drop(random.one_in(3).then(KeptBound::none));
            thread::sleep(Duration::from_millis(100));
        }
    };
    if are_processes {
        let begin = |number| {
            Child::start(|| {
                work(number);
                0
            })
        };
        let children: Vec<Child> = all.map(begin).collect();
        watch();
        let ends: Vec<End> = children.into_iter().map(Child::wait).collect();
        assert!(ends.iter().all(|end| *end == End::Status(0)), "{ends:?}");
    } else {
        thread::scope(|scope| {
            all.for_each(|number| drop(scope.spawn(move || work(number))));
            watch();
        });
    }
    let number = board.file.load(SeqCst);
    check_file(&path(number), number, moves);
    fs::remove_file(path(number)).unwrap();
    let count = |counter: &AtomicU64| counter.load(SeqCst);
    let (seen, stored) = (count(&board.seen), count(&board.stored));
    println!("{seen} pages seen, {stored} stored, {} losses", count(&board.losses));
    assert!(is_enough());
    assert_file_tables_are_sound();
}

/// Leaves room for so many pages.
fn filler(pages: u64) -> DaxFile {
    let file = DaxFile::new("filler");
    let free = || rustix::fs::statfs(file.path()).unwrap().f_bavail;
    let mut end = 0;
    while free() > pages {
        let more = at(free() - pages);
        let reserved = fallocate(file.file(), FallocateFlags::empty(), end, more);
        end += more;
        reserved.unwrap();
    }
    file
}

#[test]
fn threads_see_their_file_s_words_alone() {
    all_together(4_000, false, false);
}

#[test]
fn threads_see_their_file_s_words_alone_while_pages_move() {
    all_together(2_500, true, false);
}

#[test]
fn processes_see_their_file_s_words_alone() {
    all_together(4_000, false, true);
}
