//! Threads and processes that use the same exmap or Morsel at the same time.
//!
//! Each has its own pages, in stripes, and knows their contents. The others load these pages, and
//! must find the mark of their owner. All share a few pages.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use rustix::io::Errno;
use vellum_uapi::exmap::{self, Harvest, Move};
use vellum_uapi::morsel as uapi;

use super::marks::{Content, Owner, page_of};
use super::rush::LastOf;
use super::session::Session;
use super::walks;
use crate::child::{Child, End, interrupt_constantly};
use crate::random::Random;
use crate::threads::{Stop, processors, wait_until};
use crate::{Exmap, Mapping, Morsel, PAGE, Plan, Surface, access, morsel, sys};

/// Threads and processes that act, each on stripes of its own.
const ACTORS: u64 = 3;
/// The stripes of processes that are killed.
const VICTIM: u64 = ACTORS;
/// Pages of a stripe.
const STRIPE: u64 = 16;
/// The first of the pages that all share.
const COMMON: u64 = 1024;
/// The number of shared pages.
const COMMONS: u64 = 24;
/// Pages of a surface. The last ones are in a table of the process' own.
const PAGES: u64 = COMMON + 100;

/// The owner of the marks in a round, and the owner of the other exmap.
pub(super) const OWNER: u64 = 1;
const OTHER: u64 = 2;

/// Kinds of exmaps.
pub(super) const KINDS: [u64; 9] = [
    0,
    exmap::PINNABLE,
    exmap::READS_ZEROS,
    exmap::TRACKS,
    exmap::HUGE,
    exmap::HUGE,
    exmap::STEALING,
    exmap::NO_POOL,
    exmap::SHRINKS,
];

/// A page of an actor's own below a bound.
fn own_page(random: &mut Random, actor: u64, bound: u64) -> u64 {
    let all = ACTORS + 1;
    let stripe = random.below(bound / STRIPE / all) * all + actor;
    stripe * STRIPE + random.below(STRIPE)
}

/// The number of pages from this one on that are in the same stripe, at most `count`.
fn in_stripe(random: &mut Random, page: u64) -> u64 {
    1 + random.below(STRIPE - page % STRIPE)
}

/// One thread's part with an exmap.
struct Actor<'a> {
    surface: &'a Surface,
    number: u64,
    owner: Owner,
    random: Random,
    /// The contents of its present pages.
    pages: BTreeMap<u64, Content>,
}

impl Actor<'_> {
    fn act(&mut self) {
        let page = own_page(&mut self.random, self.number, COMMON);
        let count = in_stripe(&mut self.random, page);
        match self.random.below(12) {
            0..3 => self.alloc(page, count),
            3..5 => self.free(page, count),
            5..8 => self.store(page),
            8 => self.check(page),
            9 => self.move_page(page),
            _ => self.use_common(),
        }
    }

    fn there(&self, page: u64, count: u64) -> u64 {
        self.pages.range(page..page + count).count() as u64
    }

    fn alloc(&mut self, page: u64, count: u64) {
        let (error, came) = self.surface.alloc(self.number as usize, &[(page, count)])[0];
        let absent: Vec<u64> =
            (page..page + count).filter(|page| !self.pages.contains_key(page)).collect();
        let all = absent.len() == usize::from(came);
        assert_eq!(error, if all { 0 } else { -libc::ENOMEM }, "{page}, {count}: {came} came");
        for page in &absent[..came.into()] {
            self.pages.insert(*page, Content::Own);
            self.check(*page);
        }
    }

    fn free(&mut self, page: u64, count: u64) {
        let there = self.there(page, count);
        let outcome = self.surface.free(self.number as usize, &[(page, count)])[0];
        assert_eq!(outcome, (0, there as u16), "FREE {page}, {count}");
        self.pages.retain(|at, _| !(page..page + count).contains(at));
        self.check(page);
    }

    fn store(&mut self, page: u64) {
        let mark = self.owner.mark(page);
        let stored = access::store_page(self.surface.mapping.page(page), mark);
        assert_eq!(stored.is_ok(), self.pages.contains_key(&page), "a store to page {page}");
        if stored.is_ok() {
            self.pages.insert(page, Content::Mark(mark));
        }
    }

    #[track_caller]
    fn check(&self, page: u64) {
        let found = access::load_page(self.surface.mapping.page(page));
        match self.pages.get(&page) {
            Some(content) => self.owner.check(&found.expect("a page")[..], *content, page),
            None => {
                let is_right = found.map_or(true, |words| words.iter().all(|word| *word == 0));
                assert!(is_right, "page {page} should be absent");
            }
        }
    }

    fn move_page(&mut self, from: u64) {
        let to = own_page(&mut self.random, self.number, COMMON);
        if from == to {
            return;
        }
        let (size, interface) = (size_of::<Move>() as u32, self.number as u32);
        let request = Move { size, interface, from, to, count: 1 };
        let address = std::ptr::from_ref(&request).expose_provenance();
        let goes = self.pages.contains_key(&from) && !self.pages.contains_key(&to);
        let moved = self.surface.exmap.pass(exmap::MOVE, address);
        assert_eq!(moved, Ok(goes.into()), "MOVE {from} to {to}");
        if let (true, Some(content)) = (goes, self.pages.get(&from).copied()) {
            self.pages.remove(&from);
            self.pages.insert(to, content);
        }
        self.check(from);
        self.check(to);
    }

    /// Populates and frees shared pages while other threads access them.
    fn use_common(&mut self) {
        let page = COMMON + self.random.below(COMMONS);
        let at = self.surface.mapping.page(page);
        match self.random.below(5) {
            0 => _ = self.surface.alloc(self.number as usize, &[(COMMON, COMMONS)]),
            1 => _ = self.surface.free(self.number as usize, &[(COMMON, COMMONS)]),
            2 => _ = self.surface.free(self.number as usize, &[(page, 1)]),
            3 => {
                let mark = self.owner.mark(page);
                // The page may be absent.
                let _ = access::kernel_store(at, &page_of(mark));
            }
            _ => {
                if let Ok(words) = access::load_page(at) {
                    self.owner.check(&words[..], Content::Own, page);
                }
            }
        }
    }
}

/// Other events in the process, its processors and its memory.
pub(super) fn disturb(random: &mut Random, mapping: &Mapping) {
    let (at, length) = (mapping.start(), mapping.length().min(PAGES as usize * PAGE));
    match random.below(12) {
        0 => assert!(sys::munmap(at, PAGE).is_err(), "a part of it"),
        1 => assert!(sys::mremap(at, length, length + PAGE, libc::MREMAP_MAYMOVE).is_err()),
        2 => {
            let child = Child::start(|| i32::from(random.one_in(1)));
            assert_eq!(child.wait(), End::Status(1));
        }
        3 => drop(std::fs::write("/proc/sys/vm/drop_caches", "3")),
        4 => drop(std::fs::write("/proc/sys/vm/compact_memory", "1")),
        5 if random.one_in(8) => switch_processors(random),
        6..9 => walks::look(random, at, length),
        _ => {
            let other = Mapping::anonymous(None, 64 * PAGE).expect("memory");
            let _ = access::store_page(other.page(random.below(64)), 1);
        }
    }
}

/// A processor goes offline, and comes online again.
fn switch_processors(random: &mut Random) {
    let last = processors() - 1;
    if last == 0 {
        return;
    }
    let path = format!("/sys/devices/system/cpu/cpu{last}/online");
    // Not every kernel can.
    if std::fs::write(&path, "0").is_ok() {
        std::thread::sleep(Duration::from_millis(random.below(20)));
        std::fs::write(&path, "1").expect("the processor again");
    }
}

/// Another exmap gives frames to the kernel and gets some from it, all the time.
fn exchange(owner: Owner, random: &mut Random) {
    let (mut owner, other) = (owner, Plan::new(64, 64).make());
    for _ in 0..4 {
        other.alloc(0, &[(0, 64)]);
        for page in 0..64 {
            let found = access::load_page(other.mapping.page(page)).expect("a page");
            owner.check(&found[..], Content::Own, page);
            let mark = owner.mark(page);
            access::store_page(other.mapping.page(page), mark).expect("a page");
        }
        other.free(0, &[(0, 64)]);
        for frames in [1, 64 + random.below(64)] {
            assert_eq!(other.exmap.command(exmap::RESIZE, frames), Ok(0));
        }
    }
}

fn harvest(exmap: &Exmap) {
    let mut written = [0_u64; PAGES.div_ceil(64) as usize];
    let written = written.as_mut_ptr().expose_provenance() as u64;
    let size = size_of::<Harvest>() as u32;
    let request = Harvest { size, flags: 0, page: 0, count: PAGES, accessed: 0, written };
    let there = exmap.pass(exmap::HARVEST, std::ptr::from_ref(&request).expose_provenance());
    assert!(there.is_ok_and(|there| there <= PAGES), "{there:?}");
}

/// A child repeats an operation until it is killed.
fn killed_amid(random: &mut Random, mut work: impl FnMut()) {
    let child = Child::start(|| {
        loop {
            work();
        }
    });
    std::thread::sleep(Duration::from_millis(random.below(40)));
    child.kill();
}

/// Threads use an exmap of a random kind.
pub(super) fn with_exmap(session: &mut Session) {
    let flags = session.random.pick(&KINDS);
    let frames = session.random.pick(&[60, 300, 2000]);
    session.note(format!("threads with an exmap, flags {flags:#x}, {frames} frames"));
    let plan = Plan::new(PAGES, frames).flags(flags).interfaces(ACTORS as u32);
    let surface = if flags == exmap::HUGE { plan.blocks(2).make() } else { plan.make() };
    let (steps, stop) = (session.steps(), Stop::default());
    let left = AtomicU64::new(ACTORS);
    std::thread::scope(|scope| {
        for number in 0..ACTORS {
            let (surface, stop, left) = (&surface, &stop, &left);
            let random = Random::new(session.random.number());
            let owner = Owner::beginning(OWNER, number << 14);
            let mut actor = Actor { surface, number, owner, random, pages: BTreeMap::new() };
            scope.spawn(move || {
                let _at_end = LastOf { left, stop };
                (0..steps).for_each(|_| actor.act());
                let pages: Vec<u64> = actor.pages.keys().copied().collect();
                pages.into_iter().for_each(|page| actor.check(page));
            });
        }
        let mut random = Random::new(session.random.number());
        while !stop.is_said() {
            match random.below(7) {
                0 => harvest(&surface.exmap),
                1 => exchange(Owner::new(OTHER), &mut random),
                2 => killed_amid(&mut random.clone(), || {
                    exchange(Owner::new(OTHER), &mut random);
                }),
                _ => disturb(&mut random, &surface.mapping),
            }
        }
    });
    surface.free(0, &[(0, PAGES)]);
    assert_eq!(surface.assert_counted(), [], "the remaining pages");
}

/// One thread's or process' part with a Morsel.
struct Sharer<'a> {
    morsel: &'a Morsel,
    view: Mapping,
    reader: Mapping,
    number: u64,
    owner: Owner,
    random: Random,
    bound: u64,
    pages: BTreeMap<u64, u64>,
}

impl<'a> Sharer<'a> {
    fn new(morsel: &'a Morsel, number: u64, owner: Owner, random: Random) -> Self {
        let bound = (morsel.stat().length / PAGE as u64).min(1 << 11);
        let reader = morsel.map(libc::PROT_READ).expect("mmap");
        let (view, pages) = (morsel.mapped(), BTreeMap::new());
        Self { morsel, view, reader, number, owner, random, bound, pages }
    }

    fn act(&mut self) {
        let page = own_page(&mut self.random, self.number, self.bound);
        let count = in_stripe(&mut self.random, page);
        let (offset, length) = (page * PAGE as u64, count * PAGE as u64);
        match self.random.below(10) {
            0..3 => {
                let mark = self.owner.mark(page);
                access::store_page(self.view.page(page), mark).expect("a page");
                self.pages.insert(page, mark);
            }
            3 => {
                let mark = self.owner.mark(page);
                let written = rustix::io::pwrite(self.morsel.file(), &page_of(mark), offset);
                assert_eq!(written, Ok(PAGE));
                self.pages.insert(page, mark);
            }
            4..6 => {
                assert_eq!(self.morsel.punch(offset, length), Ok(()));
                self.pages.retain(|at, _| !(page..page + count).contains(at));
            }
            6 => assert!(matches!(self.morsel.populate(offset, length), Ok(()) | Err(Errno::INTR))),
            7 if self.random.one_in(4) => self.view = self.morsel.mapped(),
            _ => self.look_around(),
        }
        self.check(page);
    }

    /// Performs an operation on pages whose contents no actor knows.
    fn act_carelessly(&mut self) {
        let page = own_page(&mut self.random, VICTIM, self.bound);
        let count = in_stripe(&mut self.random, page);
        let (offset, length) = (page * PAGE as u64, count * PAGE as u64);
        let mark = self.owner.mark(page);
        match self.random.below(4) {
            0 => access::store_page(self.view.page(page), mark).expect("a page"),
            1 => {
                let written = rustix::io::pwrite(self.morsel.file(), &page_of(mark), offset);
                assert_eq!(written, Ok(PAGE));
            }
            2 => assert_eq!(self.morsel.punch(offset, length), Ok(())),
            _ => self.look_around(),
        }
    }

    /// Through both mappings a page has the stores of this actor, or zeros.
    #[track_caller]
    fn check(&self, page: u64) {
        let content = self.pages.get(&page).map_or(Content::Zeros, |mark| Content::Mark(*mark));
        for mapping in [&self.view, &self.reader] {
            let found = access::load_page(mapping.page(page)).expect("a page");
            self.owner.check(&found[..], content, page);
        }
    }

    /// Others' pages have marks for that page, or zeros.
    fn look_around(&mut self) {
        let page = self.random.below(self.bound);
        // An incomplete word will soon be complete.
        wait_until(|| {
            let found = access::load_page(self.reader.page(page)).expect("a page");
            let strange = found.iter().find(|word| !self.owner.is_making_for(**word, page));
            assert_eq!(strange, None, "page {page} has bytes that no actor has stored");
            found.iter().all(|word| self.owner.has_made_for(*word, page))
        });
    }
}

/// Threads and a process use a Morsel of a random kind.
pub(super) fn with_morsel(session: &mut Session) {
    let kinds: Vec<(u32, u64)> =
        morsel::kinds().into_iter().filter(|(order, _)| *order > 0).collect();
    let kind = session.random.pick(&kinds);
    session.note(format!("threads and a process with a Morsel, order and flags {kind:x?}"));
    let (morsel, steps) = (Morsel::of(kind), session.steps());
    let stop = Stop::default();
    let left = AtomicU64::new(ACTORS - 1);
    let mut randoms = (0..ACTORS).map(|_| Random::new(session.random.number()));
    let first = Owner::beginning(OWNER, (ACTORS - 1) << 14);
    let mut random = randoms.next().expect("one for each");
    let child = Child::start(|| {
        if random.clone().one_in(2) {
            interrupt_constantly();
        }
        let mut sharer = Sharer::new(&morsel, ACTORS - 1, first, random.clone());
        (0..steps).for_each(|_| sharer.act());
        0
    });
    std::thread::scope(|scope| {
        for (actor, random) in (0..ACTORS - 1).zip(randoms) {
            let (morsel, stop, left) = (&morsel, &stop, &left);
            let owner = Owner::beginning(OWNER, actor << 14);
            scope.spawn(move || {
                let _at_end = LastOf { left, stop };
                let mut sharer = Sharer::new(morsel, actor, owner, random);
                (0..steps).for_each(|_| sharer.act());
            });
        }
        let mapping = morsel.mapped();
        while !stop.is_said() {
            if random.one_in(4) {
                let seed = random.number();
                let mut victim = None;
                killed_amid(&mut random, || {
                    // By a mapping of its own.
                    let begin = || {
                        let owner = Owner::beginning(OWNER, VICTIM << 14);
                        Sharer::new(&morsel, VICTIM, owner, Random::new(seed))
                    };
                    victim.get_or_insert_with(begin).act_carelessly();
                });
            } else {
                disturb(&mut random, &mapping);
            }
        }
    });
    assert_eq!(child.wait(), End::Status(0), "the other process");
    let stat = morsel.stat();
    assert_eq!((stat.mounts, stat.flags), (0, kind.1 & !uapi::INHERIT), "{stat:?}");
    crate::counters::assert_morsels_are_sound();
}
