//! Thousands of calls that no sound program makes. Each returns, and afterwards everything works.
//! `VELLUM_SEED` repeats a run.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd as _, AsRawFd as _};

use vellum_kernel_tests::access;
use vellum_kernel_tests::child::{Child, End, become_user};
use vellum_kernel_tests::exmap::plan;
use vellum_kernel_tests::random::Random;
use vellum_kernel_tests::sys::{self, Request};
use vellum_kernel_tests::threads::Deadline;
use vellum_kernel_tests::{Errno, Exmap, Mapping, PAGE, Plan, Surface, turn};
use vellum_uapi::exmap::{self, Entry, Harvest, Move};
use vellum_uapi::exmap_published;

/// Existing commands, which the test uses more often than random numbers.
const KNOWN: [u32; 15] = [
    exmap::QUERY,
    exmap::CREATE,
    exmap::STAT,
    exmap::CLONE,
    exmap::HARVEST,
    exmap::MOVE,
    exmap::RESIZE,
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
    /// Zeros.
    read_only: Mapping,
    /// How often each command of `COUNTED` has had an effect.
    carried_out: [u64; COUNTED.len()],
}

/// Commands that get so far only if the exmap has a pool, and most of them a surface.
const COUNTED: [u32; 4] = [exmap::ALLOC, exmap::HARVEST, exmap::MOVE, exmap::RESIZE];

impl Caller {
    fn new(random: Random) -> Self {
        let memory = Mapping::anonymous(None, 4 * PAGE).unwrap();
        // The memory after the third page is not readable.
        sys::mprotect(memory.page(3), PAGE, libc::PROT_NONE).unwrap();
        let read_only = Mapping::anonymous(None, PAGE).unwrap();
        sys::mprotect(read_only.start(), PAGE, libc::PROT_READ).unwrap();
        let fresh = (0..300).map(|_| Exmap::open()).collect();
        let (exmaps, mappings, carried_out) = (Vec::new(), Vec::new(), [0; COUNTED.len()]);
        Self { random, fresh, exmaps, mappings, memory, read_only, carried_out }
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
        access::kernel_store(at, &bytes[..room]).unwrap();
        at as u64
    }

    /// An address for an answer: of this test's memory, of a mapping of the device, of memory that
    /// cannot be written, of no memory.
    fn target(&mut self) -> u64 {
        let at = match self.random.below(12) {
            0 | 8 => return 0,
            9.. => self.memory.page(1),
            1 => return self.edge() | 1 << 63,
            2 => self.memory.page(3) - 8,
            3 => self.memory.page(3),
            4 => self.read_only.start(),
            5 => self.memory.page(1) + self.random.below(9) as usize,
            _ => match self.mappings.last() {
                // At most 4096 pages are harvested, so all of the answer is in a page.
                Some(mapping) => {
                    let page = self.random.below(8) as usize * PAGE;
                    mapping.start() + page.min(mapping.length() - PAGE)
                }
                None => self.memory.page(0),
            },
        };
        at as u64
    }

    /// A page, or a number of pages.
    fn pages(&mut self) -> u64 {
        if self.random.one_in(8) { self.edge() } else { self.random.below(70) }
    }

    /// The structure of a HARVEST, of which each field is likely to be valid.
    fn harvest(&mut self) -> u64 {
        let harvest = Harvest {
            size: size_of::<Harvest>() as u32,
            flags: self.random.pick(&[0, 1, 2, 3, 3, 4]),
            page: self.pages(),
            count: self.pages(),
            accessed: self.target(),
            written: self.target(),
        };
        let first = u64::from(harvest.size) | u64::from(harvest.flags) << 32;
        let Harvest { page, count, accessed, written, .. } = harvest;
        self.store(&[first, page, count, accessed, written])
    }

    /// The same of a MOVE.
    fn transport(&mut self) -> u64 {
        let interface = self.random.pick(&[0, 0, 0, 1, 2]);
        let first = size_of::<Move>() as u64 | interface << 32;
        let words = [first, self.pages(), self.pages(), self.pages()];
        self.store(&words)
    }

    /// The address of these words.
    fn store(&self, words: &[u64]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        access::kernel_store(self.memory.page(0), &bytes).unwrap();
        self.memory.page(0) as u64
    }

    fn argument(&mut self, command: u32) -> u64 {
        match command {
            exmap::HARVEST if !self.random.one_in(4) => return self.harvest(),
            exmap::MOVE if !self.random.one_in(4) => return self.transport(),
            // A pool of most other numbers would take all memory.
            exmap::RESIZE => return self.edge(),
            _ => {}
        }
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
            let fresh = self.fresh.pop();
            if let Some(exmap) = &fresh
                && !self.random.one_in(3)
            {
                self.prepare(exmap);
            }
            self.exmaps.extend(fresh);
        }
        self.random.below(self.exmaps.len() as u64) as usize
    }

    /// Gives an exmap a pool, a surface with some pages, and ranges in its first vector. A user may
    /// have too many locked pages for that.
    fn prepare(&mut self, exmap: &Exmap) {
        let flags = self.random.pick(&[0, exmap::TRACKS, exmap::TRACKS, exmap::PINNABLE]);
        if exmap.create(&plan(64, 2, flags)).is_err() {
            return;
        }
        let (Ok(surface), Ok(vector)) = (exmap.map(100), exmap.vector(0)) else { return };
        for index in 0..5 {
            vector.set(index, Entry::new(self.random.below(100), 1 + self.random.below(12)));
        }
        let _ = vector.run(exmap, exmap::ALLOC, 5);
        self.mappings.push(surface);
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
        let (address, length) = (self.argument(0) as usize, self.edge() as usize);
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
                let argument = self.argument(command);
                let answer = self.exmaps[index].command(command, argument);
                let counted = COUNTED.iter().position(|counted| *counted == command);
                if let Some(counted) = counted {
                    self.carried_out[counted] += u64::from(answer.is_ok());
                }
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

/// A child makes calls for some seconds, or until it has carried out each command, so that none
/// writes to this process' memory. Returns the number of calls, and how often each command of
/// `COUNTED` was carried out.
fn hostile(random: Random, bystander: &Surface, prepare: impl FnOnce()) -> [u64; 5] {
    let (mut counts, mut count) = std::io::pipe().unwrap();
    let child = Child::start(|| {
        use std::io::Write as _;
        let mut caller = Caller::new(random);
        // Otherwise a call could clone one of the caller's exmaps by its number, and shrink its
        // pool.
        close(bystander.exmap.as_fd().as_raw_fd() as u64);
        prepare();
        let (deadline, patience) = (Deadline::after_ms(6000), Deadline::after_ms(60_000));
        let mut calls = 0_u64;
        while !caller.fresh.is_empty()
            && (!deadline.is_over() || (caller.carried_out.contains(&0) && !patience.is_over()))
        {
            caller.call();
            calls += 1;
        }
        let zeros = access::load_page(caller.read_only.start()).unwrap();
        assert!(zeros.iter().all(|word| *word == 0), "memory that is for reading was written");
        for number in [&[calls][..], &caller.carried_out].concat() {
            count.write_all(&number.to_le_bytes()).unwrap();
        }
        0
    });
    assert_eq!(child.wait(), End::Status(0));
    [(); 5].map(|()| {
        let mut bytes = [0; 8];
        std::io::Read::read_exact(&mut counts, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    })
}

#[test]
fn malformed_calls_do_no_harm() {
    let Some(_turn) = turn() else { return };
    let mut random = Random::of_this_run();
    let bystander = Plan::new(1000, 100).make();
    bystander.alloc(0, &[(5, 10)]);
    bystander.stamp(7, 7);
    let calls = hostile(Random::new(random.number()), &bystander, || ());
    println!("calls of root, ALLOC, HARVEST, MOVE, RESIZE: {calls:?}");
    assert!(!calls.contains(&0), "no such command was carried out");
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
    println!("calls of a user, ALLOC, HARVEST, MOVE, RESIZE: {calls:?}");
    assert!(!calls.contains(&0), "no such command was carried out");
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
    // A small number is a correct argument of RESIZE.
    for command in KNOWN.into_iter().filter(|command| *command != exmap::RESIZE) {
        for argument in [1, 8, 0x7fff_ffff_f000, 0xffff_8000_0000_0000, u64::MAX - 4095] {
            let answer = surface.exmap.command(command, argument);
            assert!(answer.is_err(), "{command:#x} of {argument:#x}: {answer:?}");
        }
    }
    let resize = |frames| surface.exmap.command(exmap::RESIZE, frames);
    assert_eq!(resize(0), Err(Errno::INVAL));
    for frames in [1 << 31, 0x7fff_ffff_f000, 1 << 52, 1 << 63, u64::MAX] {
        assert_eq!(resize(frames), Err(Errno::NOMEM), "{frames:#x} frames");
        assert_eq!(surface.stat().frames, 10);
    }
    surface.assert_works();
}

/// Pages of the surface below: three words of a harvest.
const HARVESTED: u64 = 130;

/// Has a harvest answer to these two addresses.
fn harvest_to(surface: &Surface, accessed: usize, written: usize) -> Result<u64, Errno> {
    let (accessed, written) = (accessed as u64, written as u64);
    let (size, flags) = (size_of::<Harvest>() as u32, exmap::CLEAR_ACCESSED);
    let harvest = Harvest { size, flags, page: 0, count: HARVESTED, accessed, written };
    surface.exmap.pass(exmap::HARVEST, (&raw const harvest).expose_provenance())
}

/// HARVEST writes through both pointers as the caller could, or the command fails.
#[test]
fn a_harvest_writes_only_where_the_caller_may() {
    let Some(_turn) = turn() else { return };
    let surface = Plan::new(HARVESTED, 10).flags(exmap::TRACKS).make();
    assert_eq!(surface.alloc(0, &[(5, 2)]), [(0, 2)]);
    let [memory, closed, read_only, gone] =
        [(); 4].map(|()| Mapping::anonymous(None, 2 * PAGE).unwrap());
    let tables = Mapping::new(Request {
        address: 0,
        length: PAGE,
        protection: libc::PROT_READ,
        flags: libc::MAP_SHARED,
        fd: Some(surface.exmap.as_fd()),
        offset: exmap::OFFSET_TABLES,
    })
    .unwrap();
    let before = access::kernel_load(tables.start(), PAGE).unwrap();
    sys::mprotect(closed.start(), 2 * PAGE, libc::PROT_NONE).unwrap();
    sys::mprotect(read_only.start(), 2 * PAGE, libc::PROT_READ).unwrap();
    // Two of the three words have room.
    sys::mprotect(memory.page(1), PAGE, libc::PROT_READ).unwrap();
    let lost = gone.start();
    gone.unmap().unwrap();
    let bad = [
        8,
        lost,
        closed.start(),
        read_only.start(),
        memory.page(1) - 16,
        memory.page(1) - 4,
        tables.start(),
        surface.mapping.page(9),
        surface.mapping.page(HARVESTED - 1),
        (1 << 47) - PAGE,
        1 << 63,
        0xffff_8880_0000_0000,
        0xffff_ffff_8100_0000,
        usize::MAX - 7,
        usize::MAX - 23,
    ];
    let (first, second) = (memory.start(), memory.start() + 256);
    for at in bad {
        assert_eq!(harvest_to(&surface, at, 0), Err(Errno::FAULT), "accessed to {at:#x}");
        assert_eq!(harvest_to(&surface, 0, at), Err(Errno::FAULT), "written to {at:#x}");
        assert_eq!(harvest_to(&surface, first, at), Err(Errno::FAULT), "written to {at:#x}");
    }
    assert!(access::load_page(read_only.start()).unwrap().iter().all(|word| *word == 0));
    assert_eq!(access::kernel_load(tables.start(), PAGE).unwrap(), before);
    assert_eq!(harvest_to(&surface, 0, 0), Ok(2), "nothing is asked for");
    // To present pages of the surface itself, and to its vector.
    for at in [surface.mapping.page(5), surface.mapping.page(6) + 8, surface.vectors[0].start()] {
        let rest = [0x5a; 40];
        access::kernel_store(at, &rest).unwrap();
        assert_eq!(harvest_to(&surface, at, 0), Ok(2), "to {at:#x}");
        assert_eq!(access::kernel_load(at + 24, 16).unwrap(), rest[24..]);
    }
    // Not accessed since then but by the test's own look.
    access::kernel_store(first, &[0x5a; 512]).unwrap();
    assert_eq!(harvest_to(&surface, first, second), Ok(2));
    assert_eq!(harvest_to(&surface, first, second), Ok(2));
    let mut expected = [0; 32];
    expected[24..].fill(0x5a);
    assert_eq!(access::kernel_load(first, 32).unwrap(), expected);
    expected[0] = 3 << 5;
    assert_eq!(access::kernel_load(second, 32).unwrap(), expected);
    surface.assert_works();
}
