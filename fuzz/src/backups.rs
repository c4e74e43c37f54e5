//! The body of the fuzz target of backups: two states of a store with changed pages, as a backup
//! and an increment whose checksums are all right.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use crc_fast::{CrcAlgorithm, checksum};
use vellum::{BackupOptions, BackupProgress, MemoryDevice, Options, RestoreOptions, Store};
use vellum_pool::PAGE_SIZE;

use crate::entry::{TemporaryFolder, change_page, exercise, newest_header, sound_store};
use crate::source::Source;

/// Two states of a store, each as a file that was closed.
struct States {
    before: State,
    after: State,
}

#[derive(Clone)]
struct State {
    file: Vec<u8>,
    /// The frames (first one and count) that are in use.
    ranges: Vec<(u64, u64)>,
}

/// Restores a backup with changed pages, alone or with an increment that leads to another state
/// with changed pages. Pages and tables have right checksums.
///
/// The first byte chooses the length of pages, whether there is an increment, and whether restore
/// checks the store. A store that was checked must be sound; of another one all is read.
pub fn backup_reader(bytes: &[u8]) {
    let Some((choice, rest)) = bytes.split_first() else { return };
    let page_frames = 1 + u32::from(choice & 1);
    let sound = sound_states(page_frames);
    let (mut before, mut after) = (sound.before.clone(), sound.after.clone());
    let mut source = Source(rest);
    let mut tables = Vec::new();
    while source.has_more() {
        let choice = source.number();
        if choice & 0xf == 2 {
            tables.push((choice >> 4, source.number(), source.number()));
            continue;
        }
        let state = if choice & 1 == 0 { &mut after } else { &mut before };
        change_page(&mut state.file, choice >> 1, &mut source);
    }
    before.find_ranges();
    after.find_ranges();
    let mut runs = runs(&before, &after);
    for (choice, at, number) in tables {
        let table = if choice & 1 == 0 { &mut runs } else { &mut after.ranges };
        change_table(table, choice >> 1, at, number);
    }
    let folder = TemporaryFolder::new();
    let [base, increment, to] =
        ["base", "increment", "restored"].map(|name| folder.path().join(name));
    std::fs::write(&base, &before.file).unwrap();
    let mut increments = Vec::new();
    if choice & 2 == 0 {
        std::fs::write(&increment, encode(&before, &after, &runs)).unwrap();
        increments.push(increment);
    }
    let checks = choice & 4 == 0;
    let options = RestoreOptions::new().check(checks);
    if vellum::restore(&to, &base, &increments, &options, &mut goes_on).is_err() {
        assert!(!to.exists(), "a failed restore has left a file");
        return;
    }
    if checks {
        let store = Store::open(&to, &self::options(page_frames).read_only(true)).unwrap();
        assert!(store.check(&mut |_| {}).unwrap().is_sound());
    } else {
        exercise(std::fs::read(&to).unwrap(), page_frames);
    }
}

impl State {
    /// Finds the ranges, if the file can be opened.
    fn find_ranges(&mut self) {
        let device = Arc::new(MemoryDevice::from_snapshot(self.file.clone()));
        let Ok(store) = Store::open_on(device, &options(1).read_only(true)) else { return };
        let frames = self.file.len() as u64 / PAGE_SIZE as u64;
        self.ranges.clear();
        store.pool().with_space(|space| {
            let mut next = 0;
            for (start, count) in space.free_extents().chain([(space.end().min(frames), 0)]) {
                if start > next {
                    self.ranges.push((next, start - next));
                }
                next = start + count;
            }
        });
    }

    fn frame(&self, number: u64) -> Option<&[u8]> {
        let start = usize::try_from(number).ok()?.checked_mul(PAGE_SIZE)?;
        self.file.get(start..start.checked_add(PAGE_SIZE)?)
    }

    /// The ranges of frames, and the sum of each frame.
    fn index(&self) -> Vec<u8> {
        let mut index: Vec<u8> = self.ranges.iter().flat_map(entry).collect();
        for number in self.numbers() {
            let frame = self.frame(number).unwrap_or_default();
            index.extend(entry(&(nvme(frame), checksum(CrcAlgorithm::Crc64Xz, frame))));
        }
        index
    }

    /// The frames. Of ranges that no file has, only some.
    fn numbers(&self) -> impl Iterator<Item = u64> {
        let end = |start: u64, count: u64| start.saturating_add(count.min(4096));
        self.ranges.iter().flat_map(move |(start, count)| *start..end(*start, *count))
    }

    /// Sequence number, log sequence number and digest.
    fn name(&self) -> [u64; 3] {
        let header = &self.file[newest_header(&self.file)..];
        let number = |at: usize| u64::from_le_bytes(*header[at..].first_chunk().unwrap());
        let lsn = if header[48] == 4 { number(144) } else { 0 };
        [number(72), lsn, nvme(&self.index())]
    }
}

/// Changes a table of ranges.
fn change_table(table: &mut Vec<(u64, u64)>, choice: usize, at: usize, number: usize) {
    let at = at % table.len().max(1);
    let Some((start, count)) = table.get_mut(at) else { return };
    let edge = (1_u64 << (number % 64)).wrapping_sub(number as u64 >> 6 & 1);
    match choice % 8 {
        0 => *start = edge,
        1 => *count = edge,
        2 => *start = start.wrapping_add(1),
        3 => *count = count.wrapping_sub(1),
        4 => drop(table.remove(at)),
        5 => table.insert(at, (number as u64 % 64, 1)),
        6 => (*start, *count) = (start.wrapping_sub(1), count.wrapping_add(1)),
        _ => *start = number as u64 % 64,
    }
}

/// The frames that an increment from one state to another one has.
fn runs(before: &State, after: &State) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let known: BTreeSet<u64> = before.numbers().collect();
    for number in after.numbers() {
        if known.contains(&number) && before.frame(number) == after.frame(number) {
            continue;
        }
        match runs.last_mut() {
            Some((start, count)) if *start + *count == number => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

/// The increment from one state to another with these frames (docs/format.md).
fn encode(before: &State, after: &State, runs: &[(u64, u64)]) -> Vec<u8> {
    let mut file = vec![0; PAGE_SIZE];
    for (start, count) in runs {
        for number in 0..(*count).min(64) {
            let frame = start.checked_add(number).and_then(|number| after.frame(number));
            file.extend_from_slice(frame.unwrap_or(&[0; PAGE_SIZE]));
        }
    }
    let frames = file.len() / PAGE_SIZE - 1;
    let runs_bytes: Vec<u8> = runs.iter().flat_map(entry).collect();
    file.extend_from_slice(&runs_bytes);
    file.extend(after.index());
    file.resize(file.len().next_multiple_of(PAGE_SIZE), 0);
    let mut put = |at: usize, number: u64| {
        file[at..at + 8].copy_from_slice(&number.to_le_bytes());
    };
    put(8, u64::from_le_bytes(*b"VELLUMIN"));
    put(16, 1);
    for (at, state) in [(40, before), (64, after)] {
        (at..).step_by(8).zip(state.name()).for_each(|(at, number)| put(at, number));
    }
    put(88, (after.file.len() / PAGE_SIZE) as u64);
    put(96, frames as u64);
    put(104, runs.len() as u64);
    put(112, after.ranges.len() as u64);
    put(120, after.numbers().count() as u64);
    put(128, nvme(&runs_bytes));
    let id = newest_header(&after.file) + 56;
    file[24..40].copy_from_slice(&after.file[id..id + 16]);
    let sum = nvme(&file[8..PAGE_SIZE]);
    file[..8].copy_from_slice(&sum.to_le_bytes());
    file
}

fn entry((one, two): &(u64, u64)) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&one.to_le_bytes());
    bytes[8..].copy_from_slice(&two.to_le_bytes());
    bytes
}

fn nvme(bytes: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

fn options(page_frames: u32) -> Options {
    Options::new().pool_bytes(256 * 4096 * u64::from(page_frames)).evictors(0)
}

fn goes_on(_: BackupProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A backup of a small store, and what it and an increment make.
fn sound_states(page_frames: u32) -> &'static States {
    static STATES: [OnceLock<States>; 2] = [OnceLock::new(), OnceLock::new()];
    STATES[page_frames as usize - 1].get_or_init(|| {
        let folder = TemporaryFolder::new();
        let at = |name: &str| folder.path().join(name);
        let device = Arc::new(MemoryDevice::from_snapshot(sound_store(page_frames).to_vec()));
        let store = Store::open_on(device, &options(page_frames)).unwrap();
        store.backup(at("base"), &BackupOptions::new(), &mut goes_on).unwrap();
        let tree = store.tree("t").unwrap();
        tree.upsert(b"new", &[9; 5000]).unwrap();
        let mut writer = tree.writer(b"pieces").unwrap();
        std::io::Write::write_all(&mut writer, &[7; 40_000]).unwrap();
        writer.finish().unwrap();
        let since = BackupOptions::new().since(at("base"));
        store.backup(at("increment"), &since, &mut goes_on).unwrap();
        let (options, increments) = (RestoreOptions::new(), [at("increment")]);
        vellum::restore(at("to"), at("base"), &increments, &options, &mut goes_on).unwrap();
        let state = |name: &str| {
            let file = std::fs::read(at(name)).unwrap();
            let mut state = State { file, ranges: Vec::new() };
            state.find_ranges();
            state
        };
        let states = States { before: state("base"), after: state("to") };
        // What is encoded here is what the store has encoded, but for the header that each of the
        // two was given.
        let runs = runs(&states.before, &states.after);
        std::fs::write(at("again"), encode(&states.before, &states.after, &runs)).unwrap();
        vellum::restore(at("to again"), at("base"), &[at("again")], &options, &mut goes_on)
            .unwrap();
        assert!(std::fs::read(at("to again")).unwrap() == states.after.file);
        states
    })
}
