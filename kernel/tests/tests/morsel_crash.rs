//! Morsels on persistent memory when the machine dies. One program changes them until it is killed,
//! the other one checks; `make lab` runs both. All steps that the first one has completed have
//! taken effect, no step that it had not begun has, and the device has nothing else.
//!
//! The program logs its steps in another Morsel: before it removes something, and after it has
//! added something.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use vellum_kernel_tests::counters::assert_morsels_are_sound;
use vellum_kernel_tests::morsel::plan;
use vellum_kernel_tests::persistent::{self, FOLDER, format};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Mapping, Morsel, PAGE, access};
use vellum_uapi::morsel;

const LOG: &str = "log";
const LOG_BYTES: u64 = 64 << 20;

/// The number of Morsels at a time.
const MOST: usize = 24;
/// The most used pages of each.
const PAGES: u64 = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Created,
    Stamped(u64),
    Punching(u64),
    Punched(u64),
    Removing,
    Removed,
}

impl Step {
    fn number(self) -> (u64, u64) {
        match self {
            Step::Created => (1, 0),
            Step::Stamped(page) => (2, page),
            Step::Punching(page) => (3, page),
            Step::Punched(page) => (4, page),
            Step::Removing => (5, 0),
            Step::Removed => (6, 0),
        }
    }

    fn from(number: u64, page: u64) -> Self {
        match number {
            1 => Step::Created,
            2 => Step::Stamped(page),
            3 => Step::Punching(page),
            4 => Step::Punched(page),
            5 => Step::Removing,
            6 => Step::Removed,
            _ => panic!("a step that does not exist: {number}"),
        }
    }
}

/// The expected state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Stamped,
    Punched,
    /// A step was in progress.
    Either,
}

/// The expected state of a Morsel.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Life {
    There(BTreeMap<u64, Page>),
    /// Its removal was in progress.
    Leaving,
    /// It was removed.
    Gone,
}

/// The contents of the log, by the Morsel's number.
type State = BTreeMap<u64, Life>;

struct Log {
    mapping: Mapping,
    next: u64,
}

impl Log {
    fn open() -> Self {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let morsel = match options.open(path(LOG)) {
            Ok(file) => Morsel::from_file(file),
            Err(_) => Morsel::from_file(options.create_new(true).open(path(LOG)).unwrap()),
        };
        if morsel.stat().length == 0 {
            morsel.create(&plan(2, LOG_BYTES, 0)).unwrap();
        }
        let mut log = Self { mapping: morsel.mapped(), next: 0 };
        while log.read(log.next).is_some() {
            log.next += 1;
        }
        log
    }

    fn address(&self, index: u64) -> usize {
        self.mapping.start() + usize::try_from(index * 8).unwrap()
    }

    fn read(&self, index: u64) -> Option<(u64, Step)> {
        let bytes = access::kernel_load(self.address(index), 8).unwrap();
        let word = u64::from_le_bytes(bytes.try_into().unwrap());
        let (number, id, page) = (word >> 56, (word >> 32) & 0xff_ffff, word & 0xffff_ffff);
        (word != 0).then(|| (id, Step::from(number, page)))
    }

    fn write(&mut self, id: u64, step: Step) {
        assert!(self.next < LOG_BYTES / 8, "the log is full");
        let (number, page) = step.number();
        let word = number << 56 | id << 32 | page;
        access::kernel_store(self.address(self.next), &word.to_le_bytes()).unwrap();
        self.next += 1;
    }

    fn state(&self) -> State {
        let mut state = State::new();
        for index in 0..self.next {
            let (id, step) = self.read(index).unwrap();
            // No step is logged before the Morsel was created, except for its removal.
            let life = state.entry(id).or_insert(Life::Leaving);
            match step {
                Step::Created => *life = Life::There(BTreeMap::new()),
                Step::Removing => *life = Life::Leaving,
                Step::Removed => *life = Life::Gone,
                Step::Stamped(page) => set(life, page, Page::Stamped),
                Step::Punching(page) => set(life, page, Page::Either),
                Step::Punched(page) => set(life, page, Page::Punched),
            }
        }
        state
    }
}

fn set(life: &mut Life, page: u64, what: Page) {
    let Life::There(pages) = life else { panic!("a step with a Morsel that is {life:?}") };
    pages.insert(page, what);
}

fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

fn name(id: u64) -> String {
    format!("{id}")
}

fn order(id: u64) -> u32 {
    (id % 4) as u32
}

fn length(id: u64) -> u64 {
    morsel::extent(order(id)) - id % 4096
}

/// The Morsel's page with this number, far from the others if there is room.
fn place(id: u64, page: u64) -> u64 {
    let pages = length(id).div_ceil(PAGE as u64);
    page.wrapping_mul(0x9e37_79b9) % pages
}

fn stamp(id: u64, place: u64) -> u64 {
    id << 40 | place | 1 << 63
}

/// Prepares the guest's persistent memory. Returns whether it had Morsels before.
fn prepare() -> bool {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let were_there = mounts.contains(&format!(" {FOLDER} morselfs "));
    if !were_there {
        format();
    }
    were_there
}

struct Worker {
    random: Random,
    log: Log,
    alive: Vec<(u64, Morsel)>,
    next: u64,
}

impl Worker {
    fn create(&mut self) {
        let id = self.next;
        self.next += 1;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let morsel = Morsel::from_file(options.open(path(&name(id))).unwrap());
        morsel.create(&plan(order(id), length(id), 0)).unwrap();
        self.log.write(id, Step::Created);
        self.alive.push((id, morsel));
    }

    fn stamp(&mut self) {
        let (id, morsel) = &self.alive[self.random.below(self.alive.len() as u64) as usize];
        let place = place(*id, self.random.below(PAGES));
        let bytes = access::stamped(stamp(*id, place));
        // The Morsel may end inside its last page.
        let at = place * PAGE as u64;
        let end = bytes.len().min((length(*id) - at) as usize);
        rustix::io::pwrite(morsel.file(), &bytes[..end], at).unwrap();
        self.log.write(*id, Step::Stamped(place));
    }

    fn punch(&mut self) {
        let (id, morsel) = &self.alive[self.random.below(self.alive.len() as u64) as usize];
        let place = place(*id, self.random.below(PAGES));
        let at = place * PAGE as u64;
        self.log.write(*id, Step::Punching(place));
        morsel.punch(at, (PAGE as u64).min(length(*id) - at)).unwrap();
        self.log.write(*id, Step::Punched(place));
    }

    fn remove(&mut self) {
        let which = self.random.below(self.alive.len() as u64) as usize;
        let (id, morsel) = self.alive.swap_remove(which);
        self.log.write(id, Step::Removing);
        fs::remove_file(path(&name(id))).unwrap();
        drop(morsel);
        self.log.write(id, Step::Removed);
    }
}

#[test]
#[ignore = "works until it is killed"]
fn work() {
    if !persistent::is_there() {
        return;
    }
    let were_there = prepare();
    let log = Log::open();
    let mut worker = Worker { random: Random::of_this_run(), log, alive: Vec::new(), next: 1 };
    if were_there {
        look();
    }
    // Also removes those whose step was in progress when the machine died.
    worker.next = worker.log.state().keys().max().map_or(1, |id| id + 2);
    for entry in fs::read_dir(FOLDER).unwrap() {
        let entry = entry.unwrap().file_name().into_string().unwrap();
        if entry != LOG {
            worker.next = worker.next.max(entry.parse::<u64>().unwrap() + 1);
            let id = entry.parse().unwrap();
            worker.log.write(id, Step::Removing);
            fs::remove_file(path(&entry)).unwrap();
            worker.log.write(id, Step::Removed);
        }
    }
    // From now on there is progress, however soon the machine dies.
    worker.create();
    std::io::stdout().write_all(b"\nlab: ready\n").unwrap();
    loop {
        match worker.random.below(100) {
            _ if worker.alive.is_empty() => worker.create(),
            0..4 if worker.alive.len() < MOST => worker.create(),
            4..6 => worker.remove(),
            6..30 => worker.punch(),
            _ => worker.stamp(),
        }
    }
}

#[test]
#[ignore = "checks what was done"]
fn look() {
    if !persistent::is_there() {
        return;
    }
    let log = Log::open();
    let state = log.state();
    let there = state.values().filter(|life| matches!(life, Life::There(_))).count();
    let gone = state.values().filter(|life| **life == Life::Gone).count();
    let line = format!("\n{} steps, {there} Morsels, {gone} removed\n", log.next);
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    assert!(log.next > 0, "there was no progress");
    assert_morsels_are_sound();
    for (id, life) in &state {
        match (File::open(path(&name(*id))), life) {
            (Ok(file), Life::There(pages)) => look_at(*id, &Morsel::from_file(file), pages),
            (Err(error), Life::There(_)) => panic!("Morsel {id} is missing: {error}"),
            (Ok(_), Life::Gone) => panic!("Morsel {id} was removed, and is there again"),
            (Ok(_), Life::Leaving) => {}
            // A removed Morsel whose name is left would fail in another way.
            (Err(error), _) => assert_eq!(error.kind(), ErrorKind::NotFound, "Morsel {id}"),
        }
    }
    look_at_all();
}

/// Completed steps have taken effect.
fn look_at(id: u64, morsel: &Morsel, pages: &BTreeMap<u64, Page>) {
    let stat = morsel.stat();
    assert_eq!((stat.order, stat.length), (order(id), length(id)));
    let mapping = morsel.map(libc::PROT_READ).unwrap();
    for (page, what) in pages {
        let valid = PAGE.min((length(id) - page * PAGE as u64) as usize);
        let found = access::kernel_load(mapping.page(*page), PAGE).unwrap();
        let stamped = found[..valid] == access::stamped(stamp(id, *page))[..valid];
        let zero = found[..valid].iter().all(|byte| *byte == 0);
        let right = match what {
            Page::Stamped => stamped,
            Page::Punched => zero,
            Page::Either => stamped || zero,
        };
        assert!(right, "Morsel {id}, page {page}: it should be {what:?}");
    }
}

/// The device has nothing else: each word of each page is zero or the expected one, and the number
/// of used pages is that of the Morsels.
fn look_at_all() {
    let mut used = 0;
    for entry in fs::read_dir(FOLDER).unwrap() {
        let entry = entry.unwrap();
        let morsel = Morsel::from_file(File::open(entry.path()).unwrap());
        let stat = morsel.stat();
        used += stat.pages + stat.tables;
        let entry = entry.file_name().into_string().unwrap();
        if entry == LOG || stat.length == 0 {
            continue;
        }
        let id: u64 = entry.parse().unwrap();
        for page in (0..PAGES).map(|page| place(id, page)) {
            let mut found = vec![0; PAGE];
            rustix::io::pread(morsel.file(), &mut found[..], page * PAGE as u64).unwrap();
            let expected = access::stamped(stamp(id, page));
            let words = found.chunks(8).zip(expected.chunks(8));
            let strange = words.filter(|(a, b)| a.iter().any(|byte| *byte != 0) && a != b).count();
            // The last word may be incomplete at the Morsel's end.
            assert!(strange <= 1, "Morsel {id}, page {page}: {strange} unexpected words");
        }
    }
    let stat = rustix::fs::statfs(FOLDER).unwrap();
    assert_eq!(stat.f_blocks - stat.f_bfree, used, "pages of no Morsel");
}
