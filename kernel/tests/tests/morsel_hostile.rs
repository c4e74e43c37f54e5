//! Thousands of calls that no sound program makes. Each returns, and afterwards everything works.
//! `VELLUM_SEED` repeats a run.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::File;
use std::io::{Read as _, Write as _, pipe};
use std::os::fd::{AsFd as _, AsRawFd as _};

use vellum_kernel_tests::child::{Child, End, become_user};
use vellum_kernel_tests::counters::{Memory, assert_morsels_are_sound};
use vellum_kernel_tests::morsel::plan;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::threads::Deadline;
use vellum_kernel_tests::{Mapping, Morsel, Mounted, PAGE, access, morsel_turn};
use vellum_uapi::morsel::{self, Create, Fill, extent};

const MIB: u64 = 1 << 20;

/// Existing commands.
const KNOWN: [u32; 6] =
    [morsel::QUERY, morsel::CREATE, morsel::FILL, morsel::STAT, morsel::SEAL, morsel::REVOKE];

/// Numbers at the limits of fields and sizes.
const EDGES: [u64; 24] = [
    0,
    1,
    2,
    3,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    0x1f_ffff,
    0x20_0000,
    0x20_1000,
    0x4000_0000,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x80_0000_0000,
    0x7fff_ffff_f000,
    0xffff_8000_0000_0000,
    0x7fff_ffff_ffff_f000,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX,
];

/// Makes calls on descriptors that it opens and closes, with its own memory.
struct Caller<'a> {
    random: Random,
    mounted: &'a Mounted,
    morsels: Vec<Morsel>,
    mappings: Vec<Mapping>,
    memory: Mapping,
    source: File,
}

impl<'a> Caller<'a> {
    fn new(mounted: &'a Mounted, random: Random) -> Self {
        let memory = Mapping::anonymous(None, 4 * PAGE).unwrap();
        // The memory after the third page is not readable.
        sys::mprotect(memory.page(3), PAGE, libc::PROT_NONE).unwrap();
        let source = File::open("/proc/self/exe").unwrap();
        Self { random, mounted, morsels: Vec::new(), mappings: Vec::new(), memory, source }
    }

    fn edge(&mut self) -> u64 {
        match self.random.below(5) {
            0 => self.random.number(),
            1 => self.random.below(64),
            2 => self.random.below(4 * MIB),
            _ => self.random.pick(&EDGES),
        }
    }

    /// An offset within the smaller Morsels, so that some calls have an effect.
    fn place(&mut self) -> u64 {
        if self.random.one_in(3) { self.edge() } else { self.random.below(8 * MIB) }
    }

    /// Stores a structure at the end of memory, where its last byte may be missing, or unaligned.
    fn put(&mut self, words: &[u64]) -> u64 {
        let length = words.len() * 8;
        let at = match self.random.below(8) {
            0 => return self.edge(),
            1 => self.memory.page(3) - length + self.random.below(9) as usize,
            2 => self.memory.page(1) + self.random.below(9) as usize,
            _ => self.memory.page(self.random.below(2)),
        };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let room = (self.memory.page(3) - at).min(length);
        access::kernel_store(at, &bytes[..room]).unwrap();
        at as u64
    }

    fn create(&mut self) -> u64 {
        let order = self.random.below(5);
        let size = self.random.pick(&[size_of::<Create>() as u64; 6]);
        let size = if self.random.one_in(8) { self.edge() & 0xffff_ffff } else { size };
        let length = match self.random.below(3) {
            0 => self.edge(),
            1 => extent(order.min(3) as u32),
            _ => 1 + self.random.below(extent(order.min(3) as u32)),
        };
        let flags = if self.random.one_in(8) { self.edge() } else { self.random.below(8) };
        let address = match self.random.below(6) {
            0 => self.edge(),
            1 => extent(order.min(3) as u32) * (1 + self.random.below(100)),
            _ => 0,
        };
        self.put(&[size | order << 32, length, flags, address])
    }

    fn fill(&mut self) -> u64 {
        let known = [self.source.as_raw_fd(), self.morsels[0].file().as_raw_fd(), -1, 0, 999];
        let source = self.random.pick(&known).cast_unsigned();
        let (from, length) = (self.edge(), self.edge());
        let from = if self.random.one_in(2) { self.random.below(MIB) } else { from };
        let length = if self.random.one_in(2) { 1 + self.random.below(MIB) } else { length };
        let offset = self.place() & if self.random.one_in(4) { u64::MAX } else { !0xfff };
        let size = size_of::<Fill>() as u64;
        self.put(&[size | u64::from(source) << 32, from, offset, length, 0])
    }

    fn command(&mut self, index: usize) {
        let (mut command, argument) = match self.random.below(12) {
            0..4 => (morsel::CREATE, self.create()),
            4..7 => (morsel::FILL, self.fill()),
            7 => (morsel::STAT, self.put(&[80, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            8 => (morsel::QUERY, self.put(&[32, 0, 0, 0])),
            9 if self.random.one_in(6) => (morsel::SEAL, self.edge()),
            10 if self.random.one_in(20) => (morsel::REVOKE, self.random.below(2)),
            _ => {
                let words = [self.edge(), self.edge(), self.edge(), self.edge(), self.edge()];
                (self.random.pick(&KNOWN), self.put(&words))
            }
        };
        if self.random.one_in(20) {
            command ^= 1 << self.random.below(32);
        }
        let _ = self.morsels[index].command(command, argument);
    }

    fn allocate(&mut self, index: usize) {
        let modes = [0, 0, 1, 3, 3, 3, 2, 8, 16, 32, 64];
        let (mode, offset, length) = (self.random.pick(&modes), self.place(), self.place());
        let fd = self.morsels[index].file().as_raw_fd();
        // SAFETY: the calls take numbers.
        unsafe {
            match self.random.below(6) {
                0 => drop(libc::ftruncate(fd, length.cast_signed())),
                1 => drop(libc::lseek(fd, offset.cast_signed(), self.random.below(6) as i32)),
                _ => drop(libc::fallocate(fd, mode, offset.cast_signed(), length.cast_signed())),
            }
        }
    }

    fn transfer(&mut self, index: usize) {
        let offset = self.place();
        // No call may write to this program's own memory.
        let (mut address, mut room) = (self.memory.page(1), PAGE);
        if let Some(mapping) = self.mappings.last()
            && self.random.one_in(2)
        {
            address = mapping.start() + self.random.below(mapping.length() as u64) as usize;
            room = mapping.end() - address;
        }
        let length = self.random.pick(&[1, 7, 4096, 8192, 12_288]).min(room);
        let (fd, part) = (self.morsels[index].as_fd(), [(address, length)]);
        let _ = match self.random.below(4) {
            0 => sys::pread(fd, address, length, offset),
            1 => sys::pwrite(fd, address, length, offset),
            2 => sys::preadv(fd, &part, offset),
            _ => sys::pwritev(fd, &part, offset),
        };
    }

    fn map(&mut self, index: usize) {
        // A revoked Morsel refuses STAT.
        let stat = self.morsels[index].try_stat().unwrap_or_default();
        let right = extent(stat.order) as usize;
        let length = match self.random.below(8) {
            0 => (1 + self.edge() as usize % (1 << 40)).next_multiple_of(PAGE),
            1 => (right / 2).next_multiple_of(PAGE),
            _ => right,
        };
        let protection = self.random.pick(&[3, 3, 3, 1, 1, 0, 2, 7, 5]);
        let flags = self.random.pick(&[1, 1, 1, 3, 2, 1 | libc::MAP_NORESERVE]);
        let offset = if self.random.one_in(8) { self.edge() & !0xfff } else { 0 };
        let fd = self.morsels[index].as_fd().try_clone_to_owned().unwrap();
        let request =
            Request { address: 0, length, protection, flags, fd: Some(fd.as_fd()), offset };
        if let Ok(mapping) = Mapping::new(request) {
            self.mappings.push(mapping);
        }
    }

    /// Accesses, moves, advises and unmaps all or a part of a mapping.
    fn use_mappings(&mut self) {
        let Some(mapping) = self.mappings.pop() else { return };
        let (start, length) = (mapping.start(), mapping.length() as u64);
        let page = self.random.below(length / PAGE as u64);
        let from = start + self.random.pick(&[0, 0, page as usize]) * PAGE;
        let whole = mapping.end() - from;
        let part = self.random.pick(&[whole, whole, whole.min(PAGE), whole.min(2 << 20)]);
        let at = start + self.random.below(length) as usize;
        let mut is_there = true;
        match self.random.below(9) {
            0 => drop(access::load(at)),
            1 => drop(access::store(at, 1)),
            2 => drop(access::kernel_store(at, &[1])),
            3 => drop(sys::mprotect(from, part, self.random.below(8) as i32)),
            4 => is_there = sys::munmap(from, part).is_err(),
            5 => {
                // No poisoning, which takes memory from the machine. Few pages at once, because
                // some advice populates all of them.
                let advice = self.random.below(26) as i32;
                let _ = sys::madvise(from, part.min(4 << 20), advice);
            }
            6 => {
                let to = self.random.pick(&[PAGE, part, 2 * part, part / 2]);
                let flags = self.random.below(2) as i32;
                // The call keeps the place and the length, or is refused.
                if let Ok(moved) = sys::mremap(from, part, to, flags) {
                    assert_eq!((moved, to.next_multiple_of(PAGE)), (from, part));
                }
            }
            7 => drop(Child::start(|| i32::from(access::load(at).is_ok()) * 2).wait()),
            _ => {
                // SAFETY: no memory changes its contents.
                unsafe { libc::msync(std::ptr::with_exposed_provenance_mut(from), part, 4) };
            }
        }
        if is_there {
            self.mappings.insert(0, mapping);
        } else {
            assert_eq!((from, part), (start, length as usize), "a part was unmapped");
            mapping.leave();
        }
    }

    fn call(&mut self) {
        if self.morsels.is_empty() || (self.morsels.len() < 8 && self.random.one_in(20)) {
            self.morsels.push(self.mounted.nameless());
        }
        if self.morsels.len() > 1 && self.random.one_in(40) {
            let index = self.random.below(self.morsels.len() as u64) as usize;
            drop(self.morsels.swap_remove(index));
        }
        if self.mappings.len() > 12 {
            drop(self.mappings.pop());
        }
        let index = self.random.below(self.morsels.len() as u64) as usize;
        match self.random.below(10) {
            0 => self.map(index),
            1..4 => self.use_mappings(),
            4 => self.transfer(index),
            5 | 6 => self.allocate(index),
            _ => self.command(index),
        }
    }
}

/// A child makes calls for some seconds, so that none writes to this process' memory.
fn hostile(random: Random, prepare: impl FnOnce()) -> u64 {
    let (mut counts, mut count) = pipe().unwrap();
    let mounted = Mounted::new("size=64m,inodes=200,mode=1777").unwrap();
    let child = Child::start(|| {
        let mut caller = Caller::new(&mounted, random);
        prepare();
        let deadline = Deadline::after_ms(8000);
        let mut calls = 0_u64;
        for _ in deadline.rounds() {
            caller.call();
            calls += 1;
        }
        count.write_all(&calls.to_le_bytes()).unwrap();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
    let mut bytes = [0; 8];
    counts.read_exact(&mut bytes).unwrap();
    assert_eq!((mounted.used(), mounted.inodes()), (0, 1), "all memory is free again");
    mounted.unmount().unwrap();
    u64::from_le_bytes(bytes)
}

fn assert_no_harm(who: &str, prepare: impl FnOnce()) {
    let mut random = Random::of_this_run();
    let bystander = Morsel::whole(2);
    let mapping = bystander.mapped();
    mapping.stamp(7, 7);
    let calls = hostile(Random::new(random.number()), prepare);
    println!("{calls} calls of {who}");
    mapping.assert_stamped(7, 7);
    assert_morsels_are_sound();
    let before = Memory::now();
    let fresh = Morsel::nameless();
    fresh.create(&plan(2, 8 * MIB, morsel::HUGE)).unwrap();
    fresh.populate(0, 8 * MIB).unwrap();
    fresh.mapped().stamp(2047, 9);
    fresh.assert_stamped(2047, 9);
    drop(fresh);
    before.assert_back();
}

#[test]
fn malformed_calls_do_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    assert_no_harm("root", || ());
}

#[test]
fn malformed_calls_of_a_user_do_no_harm() {
    let Some(_turn) = morsel_turn() else { return };
    assert_no_harm("a user", || become_user(4 << 20));
}

/// No number has an effect with a wrong size of its argument.
#[test]
fn every_command_number_returns() {
    let Some(_turn) = morsel_turn() else { return };
    let morsel = Morsel::whole(1);
    morsel.stamp(0, 7);
    for letter in [u32::from(b'M'), u32::from(b'V'), 0, 0xe9] {
        for number in 0..64 {
            for size in [0, 1, 3, 5, 24, 33, 1000] {
                for direction in 0..4 {
                    let command = direction << 30 | size << 16 | letter << 8 | number;
                    if !KNOWN.contains(&command) {
                        let answer = morsel.command(command, 0);
                        assert!(answer.is_err(), "{command:#x}: {answer:?}");
                    }
                }
            }
        }
    }
    for command in KNOWN {
        for argument in [8, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, u64::MAX - 4095] {
            let answer = morsel.command(command, argument);
            assert!(answer.is_err(), "{command:#x} of {argument:#x}: {answer:?}");
        }
    }
    morsel.assert_stamped(0, 7);
}
