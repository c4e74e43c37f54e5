//! File tables when the machine dies. One program stores through mappings, appends and truncates
//! until it is killed, the other one checks; `make lab` runs both. Whatever a program had made
//! durable is there, and each file shows its own bytes alone, by its table as by `read`, whatever
//! table was stored of it or was about to be stored.
//!
//! The program notes its steps in a file of its own, through a mapping: before it begins one, and
//! after the step is durable.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

use vellum_dax::store_table;
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{DaxFile, tables};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::{Mapping, PAGE, Table, access, dax_turn};
use vellum_uapi::dax::{DURABLE, NOSYNC, Tables};

const FILES: u64 = 6;
/// The most pages of a file: beyond a table.
const MOST: u64 = 700;
const STEPS: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A page gets a version.
    Storing(u64, u64),
    Stored(u64, u64),
    /// The file gets another length in pages; new ones have version 0.
    Resizing(u64),
    Resized(u64),
}

impl Step {
    /// Never 0.
    fn word(self, file: u64) -> u64 {
        let (kind, page, version) = match self {
            Step::Storing(page, version) => (1, page, version),
            Step::Stored(page, version) => (2, page, version),
            Step::Resizing(pages) => (3, pages, 0),
            Step::Resized(pages) => (4, pages, 0),
        };
        kind << 60 | file << 52 | page << 32 | version
    }

    fn of_word(word: u64) -> (u64, Self) {
        let (page, version) = (word >> 32 & 0xf_ffff, word & 0xffff_ffff);
        let step = match word >> 60 {
            1 => Step::Storing(page, version),
            2 => Step::Stored(page, version),
            3 => Step::Resizing(page),
            4 => Step::Resized(page),
            other => panic!("a step of kind {other}"),
        };
        (word >> 52 & 0xff, step)
    }
}

fn stamp(file: u64, page: u64, version: u64) -> u64 {
    1 << 63 | file << 48 | page << 32 | version
}

/// The log of steps: a file whose blocks are all written, so that no store to it faults.
struct Log {
    file: DaxFile,
    mapping: Mapping,
    next: u64,
}

impl Log {
    fn open() -> Self {
        let file = DaxFile::kept("crash-log");
        if file.file().metadata().unwrap().len() == 0 {
            file.file().write_all_at(&vec![0; STEPS as usize * 8], 0).unwrap();
        }
        let table = Table::open(file.file(), DURABLE | NOSYNC).unwrap();
        let mapping = table.mapped(STEPS * 8 / PAGE as u64);
        let next = steps(&file).count() as u64;
        Self { file, mapping, next }
    }

    fn note(&mut self, file: u64, step: Step) {
        assert!(self.next < STEPS, "the log is full");
        let address = self.mapping.start() + self.next as usize * 8;
        access::kernel_store(address, &step.word(file).to_le_bytes()).unwrap();
        self.next += 1;
    }
}

/// The steps, as `read` finds them.
fn steps(log: &DaxFile) -> impl Iterator<Item = (u64, Step)> + use<> {
    let bytes = fs::read(log.path()).unwrap();
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    words.into_iter().take_while(|word| *word != 0).map(Step::of_word)
}

/// What may be in a file.
#[derive(Default)]
struct Known {
    /// The least and the most pages.
    pages: (u64, u64),
    /// The versions of pages that have had another one than 0.
    versions: BTreeMap<u64, (u64, u64)>,
}

impl Known {
    fn add(&mut self, step: Step) {
        match step {
            Step::Storing(page, version) => {
                self.versions.entry(page).or_insert((0, 0)).1 = version;
            }
            Step::Stored(page, version) => drop(self.versions.insert(page, (version, version))),
            Step::Resizing(pages) => {
                self.pages = (self.pages.0.min(pages), self.pages.1.max(pages));
            }
            Step::Resized(pages) => {
                self.pages = (pages, pages);
                self.versions.retain(|page, _| *page < pages);
            }
        }
    }
}

fn known(log: &DaxFile) -> BTreeMap<u64, Known> {
    let mut files: BTreeMap<u64, Known> = BTreeMap::new();
    for (file, step) in steps(log) {
        files.entry(file).or_default().add(step);
    }
    files
}

struct Worked {
    number: u64,
    file: DaxFile,
    table: Table,
    mapping: Mapping,
    pages: u64,
    version: u64,
}

impl Worked {
    /// With a table that is synced, or one that makes blocks durable before it shows them.
    fn open(number: u64, is_synced: bool) -> Self {
        let file = DaxFile::kept(&format!("crash-{number}"));
        let flags = if is_synced { 0 } else { DURABLE | NOSYNC };
        let table = Table::open(file.file(), flags).unwrap();
        let mapping = table.mapped(MOST);
        Self { number, file, table, mapping, pages: 0, version: 0 }
    }

    fn store(&mut self, log: &mut Log, page: u64) {
        self.version += 1;
        log.note(self.number, Step::Storing(page, self.version));
        self.mapping.stamp(page, stamp(self.number, page, self.version));
        self.table.sync().unwrap();
        log.note(self.number, Step::Stored(page, self.version));
    }

    fn resize(&mut self, log: &mut Log, pages: u64) {
        log.note(self.number, Step::Resizing(pages));
        if pages < self.pages {
            self.file.file().set_len(pages * PAGE as u64).unwrap();
            self.file.file().sync_all().unwrap();
        }
        (self.pages..pages).for_each(|page| self.file.stamp(page, stamp(self.number, page, 0)));
        self.table.refresh().unwrap();
        // A table that is DURABLE shows new blocks only once they are durably the file's.
        self.table.sync().unwrap();
        self.pages = pages;
        log.note(self.number, Step::Resized(pages));
    }
}

#[test]
#[ignore = "works until it is killed"]
fn work() {
    let Some(_turn) = dax_turn() else { return };
    let mut log = Log::open();
    if log.next > 0 {
        check(&log);
        // The next log begins with empty files.
        for number in 0..FILES {
            DaxFile::kept(&format!("crash-{number}")).file().set_len(0).unwrap();
        }
        drop(log.mapping);
        log.file.file().set_len(0).unwrap();
        log = Log::open();
    }
    let mut random = Random::of_this_run();
    // A sync commits the changes of all files, so half of the runs have none.
    let some_sync = random.one_in(2);
    let open = |number: u64| Worked::open(number, some_sync && number.is_multiple_of(2));
    let mut files: Vec<Worked> = (0..FILES).map(open).collect();
    files.iter_mut().for_each(|file| file.resize(&mut log, 20));
    std::io::stdout().write_all(b"\nlab: ready\n").unwrap();
    loop {
        let file = &mut files[random.below(FILES) as usize];
        match random.below(13) {
            0 if random.one_in(4) => file.resize(&mut log, 1 + random.below(file.pages)),
            3 if random.one_in(2) => drop(store_table(file.file.file()).unwrap()),
            1 | 2 => file.resize(&mut log, (file.pages + random.below(100)).min(MOST)),
            _ => file.store(&mut log, random.below(file.pages)),
        }
    }
}

#[test]
#[ignore = "checks what was done"]
fn look() {
    let Some(_turn) = dax_turn() else { return };
    let log = Log::open();
    assert!(log.next > 0, "there was no progress");
    check(&log);
}

fn check(log: &Log) {
    check_files(log);
    let Tables { stored_used, stored_refused, .. } = tables();
    let steps = log.next;
    let line =
        format!("\n{steps} steps; stored tables: {stored_used} used, {stored_refused} refused\n");
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

fn check_files(log: &Log) {
    for (number, known) in known(&log.file) {
        let file = DaxFile::kept(&format!("crash-{number}"));
        let bytes = fs::read(file.path()).unwrap();
        let pages = bytes.len() as u64 / PAGE as u64;
        let (least, most) = known.pages;
        assert!(
            (least..=most).contains(&pages),
            "file {number} has {pages}, not {least} to {most}"
        );
        let table = file.table();
        let mapping = table.mapped(MOST);
        for (page, found) in (0..).zip(bytes.chunks(PAGE)) {
            assert!(access::kernel_load(mapping.page(page), found.len()).unwrap() == found);
            let (one, other) = known.versions.get(&page).copied().unwrap_or_default();
            let wanted = [one, other].map(|version| access::stamped(stamp(number, page, version)));
            for (at, word) in found.chunks(8).enumerate() {
                let at = at * 8;
                let is_one = wanted.iter().any(|wanted| wanted[at..at + 8] == *word);
                // Of pages that were coming or going zeros may be left.
                let may_be_zero = page >= least && word.iter().all(|byte| *byte == 0);
                assert!(
                    is_one || may_be_zero,
                    "file {number}, page {page}, byte {at}: {word:x?} is of no version from {one} \
                     to {other}"
                );
            }
        }
        assert_eq!(table.stat().barred, 0);
    }
    assert_file_tables_are_sound();
}
