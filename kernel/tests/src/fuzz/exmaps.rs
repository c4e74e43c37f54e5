//! An exmap and the model of its pages; the commands, and the result that each must have.

use std::cell::Cell;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;
use vellum_uapi::exmap::{self, Create, Entry};
use vellum_uapi::exmap_published::{self as published, Action, Setup};

use super::exmap_steps::undisturbed;
use super::files::Disk;
use super::holds::Hold;
use super::marks::{Content, Owner, page_of, some_range, words_of};
use super::ring::Ring;
use super::session::Session;
use crate::access::{self, Fault};
use crate::machine::Machine;
use crate::threads::wait_until;
use crate::{Exmap, Mapping, Outcome, PAGE, Vector, exmap as device};

/// Interfaces of each.
const INTERFACES: u32 = 2;
/// Pages whose contents are checked after a command.
const LOOKS: u64 = 3;

/// The contents of a page that has a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) content: Content,
    /// Whether a CPU has written it since its frame came to the surface, and since the last HARVEST
    /// that cleared the bits.
    pub(super) is_written: bool,
    /// Whether HARVEST may report that: the same, or something was about to write to the page that
    /// is no access of the process.
    pub(super) may_be_written: bool,
}

impl Held {
    pub(super) fn new(content: Content) -> Self {
        Self { content, is_written: false, may_be_written: false }
    }

    /// A page that was just filled with a mark.
    pub(super) fn marked(mark: u64) -> Self {
        Self { content: Content::Mark(mark), is_written: true, may_be_written: true }
    }
}

/// An exmap.
#[derive(Debug)]
pub(super) struct Subject {
    // The order of the fields drops the machine and the holds before the memory.
    pub(super) machine: Option<Machine>,
    pub(super) holds: Vec<Hold>,
    pub(super) ring: Option<Ring>,
    pub(super) owner: Owner,
    pub(super) flags: u64,
    pub(super) is_published: bool,
    blocks: u32,
    pub(super) frames: u64,
    pub(super) pages: u64,
    /// `None`: it has no frame.
    pub(super) model: Vec<Option<Held>>,
    pub(super) disk: Option<Disk>,
    /// I/O that has just ended may still hold pages for a moment.
    pub(super) had_io: bool,
    pub(super) vectors: Vec<Vector>,
    pub(super) mapping: Option<Mapping>,
    pub(super) private: Option<Exmap>,
    pub(super) exmap: Exmap,
}

/// Kinds of exmaps, by their flags.
const KINDS: [u64; 14] = [
    0,
    exmap::PINNABLE,
    exmap::PINNABLE,
    exmap::READS_ZEROS,
    exmap::READS_ZEROS | exmap::PINNABLE,
    exmap::TRACKS,
    exmap::TRACKS | exmap::PINNABLE,
    exmap::SHRINKS,
    exmap::HUGE,
    exmap::HUGE,
    exmap::HUGE | exmap::READS_ZEROS,
    exmap::STEALING,
    exmap::NO_POOL,
    exmap::FLUSH_EACH | exmap::LOCK_TABLES,
];

impl Subject {
    /// A new one, of a random kind.
    pub(super) fn new(session: &mut Session, number: u64) -> Self {
        let random = &mut session.random;
        let mut owner = Owner::new(number);
        let is_published = random.one_in(3);
        let flags = if is_published { exmap::PINNABLE } else { random.pick(&KINDS) };
        let blocks = if flags & exmap::HUGE != 0 { random.pick(&[1, 2, 3]) } else { 0 };
        let (pages, frames) = (random.pick(&[40, 512, 1100, 1536, 2000]), random.below(700) + 1);
        let has_disk = is_published || random.one_in(2);
        let disk = has_disk.then(|| Disk::new(&mut owner, pages, random.one_in(2)));
        session.note(format!(
            "exmap {number}: flags {flags:#x}, {pages} pages, {frames} frames, {blocks} blocks, \
             published {is_published}, disk {}",
            disk.is_some()
        ));
        let exmap = Exmap::open();
        let backing = disk.as_ref().map_or(-1, |disk| disk.file.as_raw_fd());
        let mapping = if is_published {
            let mapping = exmap.map(pages).expect("the surface");
            let setup = Setup {
                fd: backing,
                max_interfaces: INTERFACES as i32,
                buffer_size: frames,
                flags: 0,
            };
            let address = std::ptr::from_ref(&setup).expose_provenance();
            exmap.pass(published::SETUP, address).expect("SETUP");
            mapping
        } else {
            let create = device::plan(frames, INTERFACES, flags);
            exmap.create(&Create { backing, blocks, ..create }).expect("CREATE");
            exmap.map(pages).expect("the surface")
        };
        let vectors = (0..INTERFACES).map(|index| exmap.vector(index).expect("a vector")).collect();
        Self {
            machine: None,
            holds: Vec::new(),
            ring: None,
            owner,
            flags,
            is_published,
            blocks,
            frames,
            pages,
            model: vec![None; pages as usize],
            disk,
            had_io: false,
            vectors,
            mapping: Some(mapping),
            private: None,
            exmap,
        }
    }

    pub(super) fn has(&self, flags: u64) -> bool {
        self.flags & flags != 0
    }

    pub(super) fn at(&self, page: u64) -> usize {
        self.mapping.as_ref().expect("a mapped surface").page(page)
    }

    pub(super) fn is_there(&self, page: u64) -> bool {
        self.model[page as usize].is_some()
    }

    pub(super) fn resident(&self) -> u64 {
        self.model.iter().flatten().count() as u64
    }

    /// Whether the model knows the number of free frames.
    pub(super) fn counts_frames(&self) -> bool {
        let others = exmap::SHRINKS | exmap::STEALING | exmap::NO_POOL;
        self.blocks == 0 && !self.has(others)
    }

    pub(super) fn absent(&self, (page, count): (u64, u64)) -> Vec<u64> {
        (page..page + count).filter(|page| !self.is_there(*page)).collect()
    }

    pub(super) fn fault(&self, page: u64) -> Fault {
        Fault { signal: libc::SIGSEGV, address: self.at(page) }
    }

    /// A page, most often a present one.
    pub(super) fn some_page(&self, session: &mut Session) -> u64 {
        for _ in 0..3 {
            let (page, _) = some_range(&mut session.random, self.pages);
            if self.is_there(page) {
                return page;
            }
        }
        some_range(&mut session.random, self.pages).0
    }

    /// Loads a page and checks its contents.
    #[track_caller]
    pub(super) fn check(&self, page: u64) {
        let found = access::load_page(self.at(page));
        match self.model[page as usize] {
            Some(held) => self.owner.check(&found.expect("a page")[..], held.content, page),
            None if self.has(exmap::READS_ZEROS) => {
                self.owner.check(&found.expect("zeros")[..], Content::Zeros, page);
            }
            None => assert_eq!(found.map(|words| words[0]), Err(self.fault(page)), "page {page}"),
        }
    }

    /// Some of the pages of a range.
    #[track_caller]
    pub(super) fn check_some(&self, session: &mut Session, (page, count): (u64, u64)) {
        for _ in 0..LOOKS.min(count) {
            self.check(page + session.random.below(count));
        }
    }

    /// Accesses a page, by an instruction or by the kernel.
    pub(super) fn touch(&mut self, session: &mut Session) {
        let page = self.some_page(session);
        let how = session.random.below(4);
        session.note(format!("touch {page} way {how}"));
        let (at, is_there) = (self.at(page), self.is_there(page));
        let mark = self.owner.mark(page);
        let stored = match how {
            0 => return self.check(page),
            1 => {
                let loaded = access::kernel_load(at, PAGE);
                match self.model[page as usize] {
                    Some(held) => {
                        let words = words_of(&loaded.expect("a page"));
                        self.owner.check(&words, held.content, page);
                    }
                    None if self.has(exmap::READS_ZEROS) => {
                        assert_eq!(loaded.map(|bytes| bytes[0]), Ok(0));
                    }
                    None => assert_eq!(loaded, Err(Errno::FAULT), "page {page}"),
                }
                return;
            }
            2 => access::store_page(at, mark).map_err(|fault| {
                assert_eq!(fault, self.fault(page));
            }),
            _ => access::kernel_store(at, &page_of(mark)).map_err(|error| {
                assert_eq!(error, Errno::FAULT);
            }),
        };
        assert_eq!(stored.is_ok(), is_there, "page {page}: a store");
        if is_there {
            self.model[page as usize] = Some(Held::marked(mark));
        }
    }

    /// A vectored command; returns the outcome of each range. The ranges name the interface and the
    /// descriptor.
    #[track_caller]
    pub(super) fn vector(&self, command: u32, ranges: &[(u64, u64)]) -> Vec<Outcome> {
        let chosen: u64 = ranges.iter().map(|(page, count)| page + count).sum();
        let vector = &self.vectors[chosen as usize % INTERFACES as usize];
        for (index, (page, count)) in ranges.iter().enumerate() {
            vector.set(index, Entry::new(*page, *count));
        }
        let through =
            self.private.as_ref().filter(|_| chosen.is_multiple_of(3)).unwrap_or(&self.exmap);
        let failed = if self.is_published && matches!(command, exmap::ALLOC | exmap::FREE) {
            let opcode = match command {
                exmap::ALLOC => published::OP_ALLOC,
                _ => published::OP_FREE,
            };
            let (interface, iov_len) = (vector.interface() as u16, ranges.len() as u16);
            let action = Action { interface, iov_len, opcode, padding: 0, flags: 0 };
            through.pass(published::ACTION, std::ptr::from_ref(&action).expose_provenance())
        } else {
            vector.run(through, command, ranges.len())
        };
        let outcome = |index| (vector.get(index).result(), vector.get(index).pages());
        let outcomes: Vec<Outcome> = (0..ranges.len()).map(outcome).collect();
        let errors = outcomes.iter().filter(|(error, _)| *error != 0).count();
        assert_eq!(failed, Ok(errors as u64), "{outcomes:?} of {ranges:?}");
        outcomes
    }

    fn ranges(&self, session: &mut Session) -> Vec<(u64, u64)> {
        let count = session.random.pick(&[1, 1, 2, 3, 40]);
        (0..count).map(|_| some_range(&mut session.random, self.pages)).collect()
    }

    /// ALLOC has populated this many of the absent pages of a range.
    #[track_caller]
    pub(super) fn came(&mut self, range: (u64, u64), (error, count): Outcome, from_disk: bool) {
        let absent = self.absent(range);
        let room = self.frames.saturating_sub(self.resident());
        let wanted = absent.len() as u64;
        assert!(
            u64::from(count) <= wanted,
            "{range:?}: {count} were populated, {wanted} were absent"
        );
        if self.counts_frames() {
            assert_eq!(u64::from(count), wanted.min(room), "{range:?}: {error}, {room} are free");
        }
        let expected = if u64::from(count) < wanted { -libc::ENOMEM } else { 0 };
        assert_eq!(error, expected, "{range:?}: {count} of {wanted} were populated");
        for page in &absent[..count.into()] {
            let content = match &self.disk {
                Some(disk) if from_disk => disk.pages[*page as usize],
                _ => Content::Own,
            };
            self.model[*page as usize] = Some(Held::new(content));
        }
    }

    pub(super) fn alloc(&mut self, session: &mut Session) {
        let ranges = self.ranges(session);
        session.note(format!("ALLOC {ranges:?}"));
        let outcomes = self.vector(exmap::ALLOC, &ranges);
        ranges.iter().zip(outcomes).for_each(|(range, outcome)| self.came(*range, outcome, false));
        for range in ranges {
            self.check_some(session, range);
        }
    }

    pub(super) fn is_pinned(&self, (page, count): (u64, u64)) -> bool {
        self.holds.iter().any(|hold| hold.is_within(page, count))
    }

    pub(super) fn free(&mut self, session: &mut Session) {
        let ranges = self.ranges(session);
        session.note(format!("FREE {ranges:?}"));
        if self.had_io {
            ranges.iter().for_each(|range| self.free_after_io(*range));
        } else {
            let outcomes = self.vector(exmap::FREE, &ranges);
            ranges.iter().zip(outcomes).for_each(|(range, outcome)| self.went(*range, outcome));
        }
        self.had_io = false;
        for range in ranges {
            self.check_some(session, range);
        }
    }

    /// Frees a page that the machine has just loaded. The machine must lose it.
    #[track_caller]
    pub(super) fn take_from_machine(&mut self, page: u64) {
        self.free_after_io((page, 1));
        let Some(machine) = &mut self.machine else { return };
        let found = undisturbed(|| machine.load(page as usize));
        let is_gone = found.is_err() || (self.flags & exmap::READS_ZEROS != 0 && found == Ok(0));
        assert!(is_gone, "page {page} is absent, and the machine still has it");
    }

    /// I/O that has ended just now unpins its pages a moment later.
    #[track_caller]
    fn free_after_io(&mut self, range: (u64, u64)) {
        let outcome = Cell::new((0, 0));
        wait_until(|| {
            outcome.set(self.vector(exmap::FREE, &[range])[0]);
            outcome.get().0 != -libc::EBUSY || self.is_pinned(range)
        });
        self.went(range, outcome.get());
    }

    /// The pages of a range are freed, unless one of them is pinned.
    #[track_caller]
    pub(super) fn went(&mut self, range: (u64, u64), outcome: Outcome) {
        let there = range.1 - self.absent(range).len() as u64;
        if self.is_pinned(range) {
            assert_eq!(outcome, (-libc::EBUSY, 0), "{range:?} with a pinned page");
            return;
        }
        assert_eq!(outcome, (0, there as u16), "{range:?}");
        (range.0..range.0 + range.1).for_each(|page| self.model[page as usize] = None);
    }
}
