//! A surface with its exmap and vectors, for tests of other things.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;
use vellum_uapi::exmap::{self, Create, Entry, Stat};

use crate::access::{self, Fault};
use crate::exmap::plan;
use crate::{Exmap, Mapping, PAGE, Vector, counters};

/// The outcome of an entry: an error, which is 0 or negative, and a number of pages.
pub type Outcome = (i32, u16);

/// The properties of a surface.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Pages of the surface.
    pub pages: u64,
    /// Frames of the pool.
    pub frames: u64,
    /// Interfaces.
    pub interfaces: u32,
    /// The flags of CREATE.
    pub flags: u64,
    /// A descriptor to read from, or -1.
    pub backing: i32,
    /// Blocks of 512 frames.
    pub blocks: u32,
}

impl Plan {
    /// With one interface and no flags.
    pub fn new(pages: u64, frames: u64) -> Self {
        Self { pages, frames, interfaces: 1, flags: 0, backing: -1, blocks: 0 }
    }

    /// With so many interfaces.
    pub fn interfaces(self, interfaces: u32) -> Self {
        Self { interfaces, ..self }
    }

    /// With these flags.
    pub fn flags(self, flags: u64) -> Self {
        Self { flags, ..self }
    }

    /// With blocks, which are mapped by entries of 2 MiB.
    pub fn blocks(self, blocks: u32) -> Self {
        Self { blocks, flags: self.flags | exmap::HUGE, ..self }
    }

    /// With a backing.
    pub fn backing(self, file: &File) -> Self {
        Self { backing: file.as_raw_fd(), ..self }
    }

    /// Makes one.
    #[track_caller]
    pub fn make(self) -> Surface {
        self.make_of(Exmap::open())
    }

    /// Makes one of a descriptor that has no pool yet.
    #[track_caller]
    pub fn make_of(self, exmap: Exmap) -> Surface {
        let create = plan(self.frames, self.interfaces, self.flags);
        let create = Create { backing: self.backing, blocks: self.blocks, ..create };
        exmap.create(&create).expect("CREATE");
        let mapping = exmap.map(self.pages).expect("the surface");
        let vector = |interface| exmap.vector(interface).expect("a vector");
        let vectors = (0..self.interfaces).map(vector).collect();
        Surface { vectors, mapping, exmap }
    }
}

/// An exmap whose surface and vectors are mapped.
#[derive(Debug)]
pub struct Surface {
    /// The vectors of all interfaces.
    pub vectors: Vec<Vector>,
    /// Its addresses.
    pub mapping: Mapping,
    /// The descriptor.
    pub exmap: Exmap,
}

impl Surface {
    /// Runs a command for ranges, given by first page and count, in one vector.
    #[track_caller]
    pub fn run(&self, command: u32, interface: usize, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        let vector = &self.vectors[interface];
        for (index, &(page, count)) in ranges.iter().enumerate() {
            vector.set(index, Entry::new(page, count));
        }
        let failed = vector.run(&self.exmap, command, ranges.len()).expect("a vectored command");
        let outcome = |entry: Entry| (entry.result(), entry.pages());
        let outcomes: Vec<Outcome> =
            (0..ranges.len()).map(|index| outcome(vector.get(index))).collect();
        let errors = outcomes.iter().filter(|(error, _)| *error != 0).count();
        assert_eq!(failed, errors as u64, "what the command returned, {outcomes:?}");
        outcomes
    }

    /// Populates ranges of pages.
    #[track_caller]
    pub fn alloc(&self, interface: usize, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        self.run(exmap::ALLOC, interface, ranges)
    }

    /// Frees ranges of pages.
    #[track_caller]
    pub fn free(&self, interface: usize, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        self.run(exmap::FREE, interface, ranges)
    }

    /// Reads absent pages.
    #[track_caller]
    pub fn read(&self, interface: usize, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        self.run(exmap::READ, interface, ranges)
    }

    /// Writes present pages.
    #[track_caller]
    pub fn write(&self, interface: usize, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        self.run(exmap::WRITE, interface, ranges)
    }

    /// The counters.
    #[track_caller]
    pub fn stat(&self) -> Stat {
        self.exmap.stat().expect("STAT")
    }

    /// Loads the first byte of a page.
    pub fn load(&self, page: u64) -> Result<u8, Fault> {
        access::load(self.mapping.page(page))
    }

    /// Stores the first byte of a page.
    pub fn store(&self, page: u64, value: u8) -> Result<(), Fault> {
        access::store(self.mapping.page(page), value)
    }

    /// The fault of an access to an absent page.
    pub fn fault(&self, page: u64) -> Fault {
        Fault { signal: libc::SIGSEGV, address: self.mapping.page(page) }
    }

    /// Whether a page has a frame. No other thread may store to it meanwhile.
    pub fn is_there(&self, page: u64) -> bool {
        self.load(page).is_ok_and(|byte| self.store(page, byte).is_ok())
    }

    /// Fills a page with the bytes of a stamp.
    #[track_caller]
    pub fn stamp(&self, page: u64, stamp: u64) {
        let stored = access::kernel_store(self.mapping.page(page), &access::stamped(stamp));
        assert_eq!(stored, Ok(()), "page {page}");
    }

    /// Fails unless a page is full of the bytes of a stamp.
    #[track_caller]
    pub fn assert_stamped(&self, page: u64, stamp: u64) {
        let found = self.contents(page).expect("a page that is there");
        let wanted = access::stamped(stamp);
        let differs = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
        assert_eq!(differs, None, "page {page} does not have stamp {stamp:#x}");
    }

    /// All bytes of a page.
    pub fn contents(&self, page: u64) -> Result<Vec<u8>, Errno> {
        access::kernel_load(self.mapping.page(page), PAGE)
    }

    /// The pages that have a frame. Fails if two of them share a frame, or if their number differs
    /// from the counter. Overwrites their contents.
    #[track_caller]
    pub fn assert_counted(&self) -> Vec<u64> {
        counters::assert_exmaps_are_sound();
        let stat = self.stat();
        let there: Vec<u64> = (0..stat.surface).filter(|page| self.is_there(*page)).collect();
        let address = |page: u64| self.mapping.page(page);
        for page in &there {
            assert_eq!(access::kernel_store(address(*page), &page.to_le_bytes()), Ok(()));
        }
        for page in &there {
            let found = access::kernel_load(address(*page), 8).expect("a page that is there");
            assert_eq!(found, page.to_le_bytes(), "page {page} has the frame of another page");
        }
        assert_eq!(there.len() as u64, stat.resident, "pages that are there; {stat:?}");
        assert_eq!(stat.allocated - stat.freed, stat.resident, "{stat:?}");
        there
    }

    /// Fails unless everything works: pages are allocated, keep stores, and are freed.
    #[track_caller]
    pub fn assert_works(&self) {
        let before = self.stat().resident;
        let page = (0..).find(|page| !self.is_there(*page)).expect("a page without a frame");
        assert_eq!(self.alloc(0, &[(page, 1)]), [(0, 1)]);
        self.stamp(page, page ^ 0x55);
        self.assert_stamped(page, page ^ 0x55);
        assert_eq!(self.free(0, &[(page, 1)]), [(0, 1)]);
        assert_eq!(self.store(page, 1), Err(self.fault(page)));
        assert_eq!(self.stat().resident, before);
    }
}
