//! Thousands of calls that no sound program makes. Each returns, and afterwards everything works.
//! `VELLUM_SEED` repeats a run.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd as _, AsRawFd as _};

use vellum_kernel_tests::child::{Child, End, become_user};
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::threads::Deadline;
use vellum_kernel_tests::{Exmap, Mapping, PAGE, Plan, Surface, turn};
use vellum_uapi::{exmap, exmap_published};

/// Existing commands, which the test uses more often than random numbers.
const KNOWN: [u32; 12] = [
    exmap::QUERY,
    exmap::CREATE,
    exmap::STAT,
    exmap::CLONE,
    exmap::ALLOC,
    exmap::FREE,
    exmap::READ,
    exmap::WRITE,
    exmap_published::SETUP,
    exmap_published::ACTION,
    exmap_published::CLONE,
    exmap_published::STATS,
];

/// Numbers at the limits of fields and sizes.
const EDGES: [u64; 20] = [
    0,
    1,
    2,
    7,
    255,
    256,
    257,
    511,
    512,
    513,
    4095,
    4096,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_f000,
    0xffff_8000_0000_0000,
    (1 << 52) - 1,
    1 << 63,
    u64::MAX,
];

/// Makes calls on descriptors that it opens and closes, with its own memory.
struct Caller {
    random: Random,
    /// Opened in advance, because an ordinary user cannot open it.
    fresh: Vec<Exmap>,
    exmaps: Vec<Exmap>,
    mappings: Vec<Mapping>,
    memory: Mapping,
}

impl Caller {
    fn new(random: Random) -> Self {
        let memory = Mapping::anonymous(None, 4 * PAGE).unwrap();
        // The memory after the third page is not readable.
        sys::mprotect(memory.page(3), PAGE, libc::PROT_NONE).unwrap();
        let fresh = (0..300).map(|_| Exmap::open()).collect();
        Self { random, fresh, exmaps: Vec::new(), mappings: Vec::new(), memory }
    }

    fn edge(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.number(),
            1 => self.random.below(64),
            _ => self.random.pick(&EDGES),
        }
    }

    /// An address of a structure of such numbers, of a structure at the end of memory, or of no
    /// memory.
    fn address(&mut self) -> u64 {
        let at = match self.random.below(8) {
            0 => return self.edge(),
            1 => self.memory.page(3) - self.random.pick(&[4, 8, 16, 24, 31]),
            2 => self.memory.page(1) + self.random.below(9) as usize,
            _ => self.memory.page(self.random.below(3)),
        };
        let room = (self.memory.page(3) - at).min(128);
        let size = self.random.pick(&[0, 8, 24, 32, 33, 120, 152, 4096]);
        let mut bytes = Vec::new();
        while bytes.len() < room {
            // In halves, because most fields have 4 bytes.
            let (low, high) = (self.edge() as u32, self.edge() as u32);
            bytes.extend((u64::from(low) | u64::from(high) << 32).to_le_bytes());
        }
        if !self.random.one_in(4) {
            // A valid size, few interfaces, few frames, no flags or blocks, because such calls get
            // further.
            let flags = self.random.pick(&[0, 0, exmap::HUGE]);
            let blocks = if flags == 0 { 0 } else { self.random.below(3) };
            let right =
                [size | (2 << 32), flags, self.random.below(64), 0xffff_ffff | (blocks << 32)];
            let words = right.into_iter().flat_map(u64::to_le_bytes);
            bytes.iter_mut().zip(words).for_each(|(byte, word)| *byte = word);
        }
        vellum_kernel_tests::access::kernel_store(at, &bytes[..room]).unwrap();
        at as u64
    }

    fn argument(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.edge(),
            1 => exmap::vector(self.random.below(4), self.random.pick(&[0, 1, 5, 512, 513])),
            2 => self.exmaps.last().map_or(0, |exmap| exmap.as_fd().as_raw_fd() as u64),
            _ => self.address(),
        }
    }

    fn command(&mut self) -> u32 {
        let (letter, number) = (self.random.pick(&[0xe9, 0x6b, 0]), self.random.below(64) as u32);
        match self.random.below(3) {
            0 => {
                let size = self.random.pick(&[0, 1, 4, 8, 16, 24, 32, 33, 152, 0x3fff]);
                (self.random.below(4) as u32) << 30 | size << 16 | letter << 8 | number
            }
            _ => self.random.pick(&KNOWN),
        }
    }

    /// An exmap of those that are in use, or a fresh one.
    fn exmap(&mut self) -> usize {
        if self.exmaps.is_empty() || (self.exmaps.len() < 8 && self.random.one_in(20)) {
            self.exmaps.extend(self.fresh.pop());
        }
        self.random.below(self.exmaps.len() as u64) as usize
    }

    fn map(&mut self) {
        let index = self.exmap();
        let kinds = [
            exmap::OFFSET_SURFACE,
            exmap::OFFSET_TABLES,
            exmap::offset_interface(self.random.below(4)),
            exmap::offset_interface(self.random.pick(&[255, 256, 257, 1 << 36])),
            self.random.number() & !0xfff,
            1 << 63,
            PAGE as u64,
        ];
        let length = self.random.pick(&[1, 1, 2, 5, 512, 513, 100_000]) * PAGE;
        let shared = [libc::MAP_SHARED, libc::MAP_SHARED, libc::MAP_PRIVATE];
        let protection = match self.random.one_in(3) {
            true => self.random.below(8) as i32,
            false => sys::READ_WRITE,
        };
        let offset = self.random.pick(&kinds);
        let flags = self.random.pick(&shared);
        let fd = Some(self.exmaps[index].as_fd());
        let request = Request { address: 0, length, protection, flags, fd, offset };
        if let Ok(mapping) = Mapping::new(request) {
            self.mappings.push(mapping);
        }
    }

    /// Accesses mappings, and removes some again.
    fn use_mappings(&mut self) {
        use vellum_kernel_tests::access;
        for mapping in &self.mappings {
            let at = mapping.start() + self.random.below(mapping.length() as u64) as usize;
            let _ = access::load(at);
            let _ = access::store(at, self.random.below(256) as u8);
            let _ = access::kernel_store(at & !7, &self.random.number().to_le_bytes());
        }
        if self.mappings.len() > 12 || self.random.one_in(30) {
            let count = self.mappings.len() as u64;
            if count > 0 {
                drop(self.mappings.swap_remove(self.random.below(count) as usize));
            }
        }
        if self.random.one_in(20) && !self.exmaps.is_empty() {
            let count = self.exmaps.len() as u64;
            drop(self.exmaps.swap_remove(self.random.below(count) as usize));
        }
    }

    fn transfer(&mut self) {
        let index = self.exmap();
        let (address, length) = (self.argument() as usize, self.edge() as usize);
        let address = match self.mappings.last() {
            Some(mapping) if self.random.one_in(2) => mapping.start(),
            // No call may write to this program's own memory.
            _ if self.random.one_in(2) => self.memory.page(2),
            _ => address | 1 << 63,
        };
        let length = length.min(PAGE * 4);
        let offset = self.edge();
        let fd = self.exmaps[index].as_fd();
        let part = [(address, length.min(PAGE))];
        let _ = match self.random.below(4) {
            0 => sys::pread(fd, address, length.min(PAGE), offset),
            1 => sys::pwrite(fd, address, length, offset),
            2 => sys::preadv(fd, &part, offset),
            _ => sys::pwritev(fd, &part, offset),
        };
    }

    fn call(&mut self) {
        match self.random.below(10) {
            0 => self.map(),
            1 => self.use_mappings(),
            2 => self.transfer(),
            _ => {
                let (command, index) = (self.command(), self.exmap());
                let argument = self.argument();
                let answer = self.exmaps[index].command(command, argument);
                if command == exmap::CLONE
                    && let Ok(number) = answer
                {
                    close(number);
                }
            }
        }
    }
}

/// Closes a descriptor that CLONE has returned.
#[allow(unsafe_code)]
fn close(number: u64) {
    // SAFETY: it is new, and has no other owner.
    unsafe { libc::close(number as i32) };
}

/// A child makes calls for some seconds, so that none writes to this process' memory.
fn hostile(random: Random, bystander: &Surface, prepare: impl FnOnce()) -> u64 {
    let (mut counts, mut count) = std::io::pipe().unwrap();
    let child = Child::start(|| {
        use std::io::Write as _;
        let mut caller = Caller::new(random);
        // Otherwise a call could clone one of the caller's exmaps by its number, and shrink its
        // pool.
        close(bystander.exmap.as_fd().as_raw_fd() as u64);
        prepare();
        let deadline = Deadline::after_ms(6000);
        let mut calls = 0_u64;
        while !deadline.is_over() && !caller.fresh.is_empty() {
            caller.call();
            calls += 1;
        }
        count.write_all(&calls.to_le_bytes()).unwrap();
        0
    });
    assert_eq!(child.wait(), End::Status(0));
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut counts, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn malformed_calls_do_no_harm() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let bystander = Plan::new(1000, 100).make();
    bystander.alloc(0, &[(5, 10)]);
    bystander.stamp(7, 7);
    let calls = hostile(Random::new(random.number()), &bystander, || ());
    println!("{calls} calls of root");
    bystander.assert_stamped(7, 7);
    bystander.assert_works();
    Plan::new(1000, 1000).make().assert_works();
}

#[test]
fn malformed_calls_of_a_user_do_no_harm() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let bystander = Plan::new(1000, 100).make();
    bystander.alloc(0, &[(5, 10)]);
    bystander.stamp(7, 7);
    let calls = hostile(Random::new(random.number()), &bystander, || become_user(4 << 20));
    println!("{calls} calls of a user");
    bystander.assert_stamped(7, 7);
    bystander.assert_works();
}

/// No number of the two letters has an effect with a wrong size of its argument.
#[test]
fn every_command_number_returns() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(100, 10).make();
    for letter in [u32::from(exmap::IOC), u32::from(b'k')] {
        for number in 0..64 {
            for size in [0, 1, 3, 5, 48, 1000] {
                for direction in 0..4 {
                    let command = direction << 30 | size << 16 | letter << 8 | number;
                    if !KNOWN.contains(&command) {
                        let answer = surface.exmap.command(command, 0);
                        assert!(answer.is_err(), "{command:#x}: {answer:?}");
                    }
                }
            }
        }
    }
    for command in KNOWN {
        for argument in [1, 8, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, u64::MAX - 4095] {
            let answer = surface.exmap.command(command, argument);
            assert!(answer.is_err(), "{command:#x} of {argument:#x}: {answer:?}");
        }
    }
    surface.assert_works();
}
