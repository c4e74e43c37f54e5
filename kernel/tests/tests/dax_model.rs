//! A file, its mappings and a model of its bytes: whatever is done to the file, and by whichever
//! way, all show the same bytes. `VELLUM_STEPS` sets the number of steps.
#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt as _;

use rustix::fs::{FallocateFlags, fallocate};
use vellum_kernel_tests::access::{self, Fault};
use vellum_kernel_tests::counters::assert_file_tables_are_sound;
use vellum_kernel_tests::dax::{DaxFile, Heap};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, READ_WRITE};
use vellum_kernel_tests::threads::rounds;
use vellum_kernel_tests::{Errno, Mapping, PAGE, Table, dax_turn};
use vellum_uapi::dax::{DURABLE, READ_UNIT, UNIT};

/// The most bytes of the file: beyond two tables.
const MOST: u64 = 1_100 * PAGE as u64;

struct Model {
    file: DaxFile,
    bytes: Vec<u8>,
    table: Table,
    mappings: Vec<Mapping>,
    heap: Heap,
    /// Addresses of attachments, each of all of the file.
    attached: Vec<usize>,
    random: Random,
}

impl Model {
    fn new(seed: u64) -> Self {
        let file = DaxFile::new("model");
        let table = file.table();
        let heap = Heap::for_writing(5);
        let (mappings, attached, random) = (Vec::new(), Vec::new(), Random::new(seed));
        Self { file, bytes: Vec::new(), table, mappings, heap, attached, random }
    }

    fn length(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// A range, often at the ends of pages and tables, up to `end`.
    fn range(&mut self, end: u64, most: u64) -> (u64, u64) {
        let near = self.random.pick(&[0, 4096, 512 * 4096, 1024 * 4096, end]);
        let from = match self.random.one_in(3) {
            true => (near + self.random.below(200)).saturating_sub(100),
            false => self.random.below(end.max(1)),
        };
        let from = from.min(end.saturating_sub(1));
        (from, (1 + self.random.below(most)).min(end - from))
    }

    fn fresh(&mut self, length: u64) -> Vec<u8> {
        let (first, step) = (self.random.number() as u8, self.random.number() as u8 | 1);
        (0..length).map(|at| first.wrapping_add((at as u8).wrapping_mul(step))).collect()
    }

    /// Where one of the mappings is, or of the attachments, and its bytes.
    fn mapping(&mut self) -> Option<(usize, usize)> {
        let mapped = self.mappings.len();
        let count = (mapped + self.attached.len()) as u64;
        let at = (count > 0).then(|| self.random.below(count) as usize)?;
        match self.mappings.get(at) {
            Some(mapping) => Some((mapping.start(), mapping.length())),
            None => Some((self.attached[at - mapped], MOST.next_multiple_of(UNIT) as usize)),
        }
    }

    fn step(&mut self) {
        match self.random.below(18) {
            0 | 1 => self.write(),
            2..5 => self.store(),
            5..9 => self.load(),
            9 => self.resize(),
            10 => self.punch(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            11 => self.punch(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE),
            12 => self.reserve(),
            13 => self.table.refresh().unwrap(),
            14 => self.remap(),
            15 | 16 => self.reattach(),
            _ => self.disturb(),
        }
    }

    fn write(&mut self) {
        let (from, length) = self.range(MOST, 20_000);
        let bytes = self.fresh(length);
        self.file.file().write_all_at(&bytes, from).unwrap();
        let end = (from + length) as usize;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[from as usize..end].copy_from_slice(&bytes);
    }

    fn store(&mut self) {
        if self.bytes.is_empty() {
            return;
        }
        let (from, length) = self.range(self.length(), 20_000);
        let bytes = self.fresh(length);
        let Some((start, _)) = self.mapping() else { return };
        access::kernel_store(start + from as usize, &bytes).unwrap();
        self.bytes[from as usize..][..length as usize].copy_from_slice(&bytes);
    }

    fn load(&mut self) {
        let length = self.length();
        let end = length.next_multiple_of(PAGE as u64);
        if self.bytes.is_empty() {
            let Some((address, _)) = self.mapping() else { return };
            assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
            return;
        }
        let (from, count) = self.range(length, 20_000);
        let Some((start, mapped)) = self.mapping() else { return };
        let seen = access::kernel_load(start + from as usize, count as usize).unwrap();
        let wanted = &self.bytes[from as usize..][..count as usize];
        if seen != wanted {
            let at = seen.iter().zip(wanted).position(|(seen, wanted)| seen != wanted).unwrap();
            panic!("byte {} is {}, not {}", from + at as u64, seen[at], wanted[at]);
        }
        if end < mapped as u64 {
            let address = start + end as usize;
            assert_eq!(access::load(address), Err(Fault { signal: libc::SIGBUS, address }));
        }
    }

    fn resize(&mut self) {
        let length = self.random.below(MOST);
        self.file.file().set_len(length).unwrap();
        self.bytes.resize(length as usize, 0);
    }

    fn punch(&mut self, how: FallocateFlags) {
        if self.bytes.is_empty() {
            return;
        }
        let (from, length) = self.range(self.length(), 200_000);
        fallocate(self.file.file(), how, from, length).unwrap();
        self.bytes[from as usize..][..length as usize].fill(0);
    }

    fn reserve(&mut self) {
        let (from, length) = self.range(MOST, 200_000);
        fallocate(self.file.file(), FallocateFlags::empty(), from, length).unwrap();
        if self.length() < from + length {
            self.bytes.resize((from + length) as usize, 0);
        }
    }

    fn remap(&mut self) {
        if self.mappings.len() >= 3 || self.random.one_in(3) {
            if !self.mappings.is_empty() {
                let at = self.random.below(self.mappings.len() as u64) as usize;
                self.mappings.swap_remove(at);
            }
            return;
        }
        if self.random.one_in(4) {
            self.table = Table::open(self.file.file(), self.random.below(2) * DURABLE).unwrap();
        }
        let length = self.random.pick(&[READ_UNIT, MOST.next_multiple_of(UNIT)]);
        let mapping = Mapping::new(self.table.request(length, READ_WRITE)).unwrap();
        self.mappings.push(mapping);
    }

    fn reattach(&mut self) {
        if self.attached.len() >= 3 || self.random.one_in(3) {
            if !self.attached.is_empty() {
                let at = self.random.below(self.attached.len() as u64) as usize;
                self.heap.detach(self.attached.swap_remove(at)).unwrap();
            }
            return;
        }
        let pages = MOST / PAGE as u64;
        let attached = match self.random.one_in(3) {
            true => self.heap.attach(&self.table, 0, pages),
            false => self.heap.attach(self.file.file(), 0, pages),
        };
        self.attached.push(attached.unwrap());
    }

    /// Detaches a mapping, or has its stores noted and written back.
    fn disturb(&mut self) {
        let kind = self.random.below(5);
        match kind {
            0 => return self.table.sync().unwrap(),
            1 => return self.heap.sync().unwrap(),
            2 => return self.heap.reap(),
            _ => {}
        }
        let Some((start, length)) = self.mapping() else { return };
        match kind {
            3 => sys::madvise(start, length, libc::MADV_DONTNEED).unwrap(),
            _ if self.attached.contains(&start) => {
                assert_eq!(sys::mprotect(start, length, READ_WRITE), Err(Errno::INVAL));
            }
            _ => sys::mprotect(start, length, READ_WRITE).unwrap(),
        }
    }

    /// The file's own bytes, in the end.
    fn finish(mut self) {
        self.mappings.clear();
        for address in std::mem::take(&mut self.attached) {
            self.heap.detach(address).unwrap();
        }
        assert!(std::fs::read(self.file.path()).unwrap() == self.bytes);
        assert_file_tables_are_sound();
    }
}

#[test]
fn all_ways_show_the_same_bytes() {
    let Some(_turn) = dax_turn() else { return };
    let mut random = Random::of_this_run();
    let steps = std::env::var("VELLUM_STEPS").ok().and_then(|text| text.parse().ok());
    let steps = steps.unwrap_or_else(|| u64::from(rounds(8_000)));
    let each = 2_000.min(steps);
    for round in 0..steps / each {
        let mut model = Model::new(random.number());
        for step in 0..each {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.step()));
            assert!(done.is_ok(), "step {step} of round {round}");
        }
        model.finish();
    }
}
