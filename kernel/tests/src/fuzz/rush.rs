//! Rushes: threads use the same pages at the same moment.
//!
//! Threads that act at random seldom meet within a few instructions. In a rush they wait for each
//! other, and then each performs its announced operation on the same pages in the same order. The
//! announcements determine the state of the pages and the numbers that the commands report.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use vellum_uapi::exmap;
use vellum_uapi::morsel as uapi;

use super::marks::{Content, Owner};
use super::session::Session;
use super::together::{KINDS, OWNER, disturb};
use crate::random::Random;
use crate::threads::{Stop, processors};
use crate::{Mapping, Morsel, PAGE, Plan, Surface, TABLE_PAGES, access, counters, morsel};

/// A barrier at which all threads wait for each other, unless one has failed.
#[derive(Debug)]
struct Meeting<'a> {
    all: u64,
    arrived: AtomicU64,
    stop: &'a Stop,
}

impl<'a> Meeting<'a> {
    /// A barrier for so many threads.
    fn new(all: u64, stop: &'a Stop) -> Self {
        Self { all, arrived: AtomicU64::new(0), stop }
    }

    fn wait(&self) {
        let mine = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let all = mine.next_multiple_of(self.all);
        for round in 0.. {
            if self.arrived.load(Ordering::Acquire) >= all {
                return;
            }
            assert!(!self.stop.is_said(), "another thread has failed");
            // A slow thread needs the processor.
            match round {
                0..100 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// Sets a flag when the last thread is done, or one has failed.
#[derive(Debug)]
pub(super) struct LastOf<'a> {
    pub(super) left: &'a AtomicU64,
    pub(super) stop: &'a Stop,
}

impl Drop for LastOf<'_> {
    fn drop(&mut self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 || std::thread::panicking() {
            drop(self.stop.at_end());
        }
    }
}

/// A rush for a Morsel takes the time of so many steps.
const RUSHES: u64 = 10;
/// Threads of a rush for an exmap.
const THREADS: u64 = 3;
/// Pieces of 2 MiB in a field.
const PIECES: u64 = 32;
/// Pages of a field.
const FIELD: u64 = PIECES * TABLE_PAGES;

/// A surface whose pages all threads use at once.
#[derive(Debug)]
struct Field<'a> {
    surface: &'a Surface,
    meeting: Meeting<'a>,
    state: Mutex<State>,
}

/// The contents of a field, and the operations of its threads.
#[derive(Debug, Default)]
struct State {
    pages: Vec<Page>,
    resident: u64,
    came: u64,
    went: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Page {
    /// Before the rush.
    is_there: bool,
    /// A thread will populate it.
    comes: bool,
    /// A thread will free it.
    goes: bool,
}

/// The operation of a thread in a rush.
enum Part {
    Bring(Vec<(u64, u64)>),
    Free(Vec<(u64, u64)>),
    Use,
}

impl<'a> Field<'a> {
    fn new(surface: &'a Surface, stop: &'a Stop) -> Self {
        Self { surface, meeting: Meeting::new(THREADS, stop), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // After a failed thread the state is useless, but the other threads soon end.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pieces(&self) -> Vec<(u64, u64)> {
        (0..PIECES).map(|piece| (piece * TABLE_PAGES, TABLE_PAGES)).collect()
    }

    /// One thread's part in a rush, from the field's first page to its last. Afterwards all pages
    /// are free.
    fn rush(&self, number: u64, owner: &mut Owner, random: &mut Random) {
        if number == 0 {
            self.fill();
        }
        self.meeting.wait();
        let mut marks = self.mark_some(number, owner, random);
        let part = self.announce(number, random);
        if number == 0 {
            let resident = self.surface.stat().resident;
            self.state().resident = resident;
        }
        self.meeting.wait();
        // A thread that accesses pages only uses those that no thread frees.
        marks.retain(|(page, _)| !self.page(*page).goes);
        self.carry_out(number, &part, owner, &mut marks);
        self.meeting.wait();
        for (page, mark) in &marks {
            let found = access::load_page(self.surface.mapping.page(*page));
            owner.check(
                &found.expect("a page that no thread frees")[..],
                Content::Mark(*mark),
                *page,
            );
        }
        self.check_gone(&part, random);
        if number == 0 {
            self.check_numbers();
        }
        self.meeting.wait();
        if number == 0 {
            self.empty();
        }
    }

    /// Populates the field, as far as there are frames.
    fn fill(&self) {
        let mut pages = vec![Page::default(); FIELD as usize];
        let outcomes = self.surface.alloc(0, &self.pieces());
        for (piece, (error, came)) in pages.chunks_mut(TABLE_PAGES as usize).zip(outcomes) {
            let all = u64::from(came) == TABLE_PAGES;
            assert_eq!(error, if all { 0 } else { -libc::ENOMEM }, "{came} of 2 MiB");
            piece[..came.into()].iter_mut().for_each(|page| page.is_there = true);
        }
        *self.state() = State { pages, ..State::default() };
    }

    fn page(&self, page: u64) -> Page {
        self.state().pages[page as usize]
    }

    fn mark_some(&self, number: u64, owner: &mut Owner, random: &mut Random) -> Vec<(u64, u64)> {
        let mut marks = Vec::new();
        for _ in 0..4 {
            let page = random.below(FIELD / THREADS) * THREADS + number;
            if self.page(page).is_there && marks.iter().all(|(other, _)| *other != page) {
                let mark = owner.mark(page);
                access::store_page(self.surface.mapping.page(page), mark).expect("a page");
                marks.push((page, mark));
            }
        }
        marks
    }

    /// Ranges, one in each piece or across its end.
    fn ranges(&self, random: &mut Random) -> Vec<(u64, u64)> {
        let shape = random.below(8);
        let range = |(first, _): (u64, u64)| {
            let (page, count) = match if shape == 7 { random.below(7) } else { shape } {
                0..4 => (first + random.below(TABLE_PAGES), 1),
                4 => (first + random.below(TABLE_PAGES - 40), 1 + random.below(40)),
                5 => (first + TABLE_PAGES - 20 + random.below(20), 1 + random.below(40)),
                _ => (first, TABLE_PAGES),
            };
            (page, count.min(FIELD - page))
        };
        self.pieces().into_iter().map(range).collect()
    }

    fn announce(&self, number: u64, random: &mut Random) -> Part {
        let ranges = self.ranges(random);
        let part = match (number, random.below(8)) {
            (0, _) | (_, 0..5) => Part::Free(ranges),
            (_, 5 | 6) => Part::Bring(ranges),
            _ => Part::Use,
        };
        let pages = &mut self.state().pages;
        let (Part::Free(ranges) | Part::Bring(ranges)) = &part else { return part };
        for page in ranges.iter().flat_map(|(page, count)| *page..page + count) {
            let page = &mut pages[page as usize];
            match part {
                Part::Free(_) => page.goes = true,
                _ => page.comes = true,
            }
        }
        part
    }

    fn carry_out(&self, number: u64, part: &Part, owner: &mut Owner, marks: &mut [(u64, u64)]) {
        match part {
            Part::Free(ranges) => {
                let outcomes = self.surface.free(number as usize, ranges);
                let errors: Vec<i32> = outcomes.iter().map(|(error, _)| *error).collect();
                assert_eq!(errors, vec![0; ranges.len()], "FREE {ranges:?}");
                self.state().went += pages_of(&outcomes);
            }
            Part::Bring(ranges) => {
                let outcomes = self.surface.alloc(number as usize, ranges);
                let is_right = |(error, _): &(i32, u16)| [0, -libc::ENOMEM].contains(error);
                assert!(outcomes.iter().all(is_right), "ALLOC {ranges:?}: {outcomes:?}");
                self.state().came += pages_of(&outcomes);
            }
            Part::Use => {
                for _ in 0..20 {
                    for (page, mark) in marks.iter_mut() {
                        *mark = owner.mark(*page);
                        let at = self.surface.mapping.page(*page);
                        access::store_page(at, *mark).expect("a page that no thread frees");
                        let found = access::load_page(at).expect("a page that no thread frees");
                        owner.check(&found[..], Content::Mark(*mark), *page);
                    }
                }
            }
        }
    }

    /// Pages that were freed, and not populated again, are absent.
    fn check_gone(&self, part: &Part, random: &mut Random) {
        let Part::Free(ranges) = part else { return };
        for _ in 0..4 {
            let (first, count) = random.pick(ranges);
            let page = first + random.below(count);
            if !self.page(page).comes {
                let found = access::load_page(self.surface.mapping.page(page));
                let is_gone = found.map_or(true, |words| words.iter().all(|word| *word == 0));
                assert!(is_gone, "page {page} was freed and is present");
            }
        }
    }

    /// Each page that was present is freed at least once, by any thread.
    fn check_numbers(&self) {
        let (state, resident) = (self.state(), self.surface.stat().resident);
        let State { came, went, .. } = *state;
        assert_eq!(state.resident + came, resident + went, "{came} were populated, {went} freed");
        let going = state.pages.iter().filter(|page| page.is_there && page.goes).count() as u64;
        assert!(went >= going, "{went} pages were freed, of {going} present ones");
    }

    fn empty(&self) {
        let State { pages, came, went, .. } = &*self.state();
        let left = pages.iter().filter(|page| page.is_there).count() as u64 + came - went;
        let outcomes = self.surface.free(0, &self.pieces());
        assert_eq!(pages_of(&outcomes), left, "all that is left of the field");
    }
}

fn pages_of(outcomes: &[(i32, u16)]) -> u64 {
    outcomes.iter().map(|(_, pages)| u64::from(*pages)).sum()
}

/// Performs other operations until all threads are done.
fn disturb_until(stop: &Stop, random: &mut Random, mapping: &Mapping) {
    while !stop.is_said() {
        std::thread::sleep(Duration::from_millis(random.below(40)));
        disturb(random, mapping);
    }
}

/// Threads rush for the pages of an exmap of a random kind.
pub(super) fn with_exmap(session: &mut Session) {
    // These kinds have more ways to populate and to free than others.
    let is_huge = session.random.one_in(2);
    let flags = if is_huge { exmap::HUGE } else { session.random.pick(&KINDS) };
    let frames = session.random.pick(&[300, 2000]);
    session.note(format!("threads rush for an exmap, flags {flags:#x}, {frames} frames"));
    let plan = Plan::new(FIELD, frames).flags(flags).interfaces(THREADS as u32);
    let surface =
        if flags == exmap::HUGE { plan.blocks(PIECES as u32).make() } else { plan.make() };
    let (steps, stop) = (session.steps(), Stop::default());
    let (field, left) = (Field::new(&surface, &stop), AtomicU64::new(THREADS));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (field, stop, left) = (&field, &stop, &left);
            let mut random = Random::new(session.random.number());
            let mut owner = Owner::beginning(OWNER, number << 14);
            scope.spawn(move || {
                let _at_end = LastOf { left, stop };
                (0..steps).for_each(|_| field.rush(number, &mut owner, &mut random));
            });
        }
        let mut random = Random::new(session.random.number());
        disturb_until(&stop, &mut random, &surface.mapping);
    });
    counters::assert_exmaps_are_sound();
}

/// Threads of a rush for a Morsel.
const RUNNERS: u64 = 4;
/// Where a runner's own pages begin, and the distance from one runner's pages to the next one's.
const OWN: u64 = 4096;
/// The most pages of a runner.
const OWNS: u64 = 32;

/// A thread of a rush for a Morsel.
struct Runner<'a> {
    morsel: &'a Morsel,
    view: &'a Mapping,
    meeting: &'a Meeting<'a>,
    number: u64,
    owner: Owner,
    random: Random,
}

impl Runner<'_> {
    /// One thread punches pages that another one writes all the time. Meanwhile a third one
    /// populates its own pages, which no other thread's view may show.
    fn rush(&mut self, round: &Round, step: u64) {
        let mut place = CpuSet::new();
        place.set(self.random.below(round.processors) as usize);
        // The processor may be offline.
        let _ = sched_setaffinity(None, &place);
        let part = (self.number + step) % RUNNERS;
        if part == 0 {
            self.write(round.pages);
        }
        self.meeting.wait();
        match part {
            0 => self.until(round, step, |runner| runner.write(round.pages)),
            1 => {
                let taken = self.morsel.punch(0, round.pages * PAGE as u64);
                assert_eq!(taken, Ok(()));
                round.done.store(step, Ordering::Release);
            }
            2 => self.until(round, step, Self::bring_own),
            _ if self.random.one_in(2) => self.until(round, step, Self::map_again),
            _ => self.until(round, step, Self::bring_own),
        }
        self.meeting.wait();
    }

    /// Repeats an operation until the thread that punches is done, at least once.
    fn until(&mut self, round: &Round, step: u64, mut action: impl FnMut(&mut Self)) {
        loop {
            action(self);
            if round.done.load(Ordering::Acquire) == step || self.meeting.stop.is_said() {
                return;
            }
        }
    }

    fn write(&mut self, pages: u64) {
        for page in 0..pages {
            let mark = self.owner.mark(page);
            access::store_page(self.view.page(page), mark).expect("a page");
        }
    }

    /// This thread allocates pages, finds zeros, stores to them, finds its stores, and frees them.
    fn bring_own(&mut self) {
        let first = OWN + self.number * TABLE_PAGES;
        let count = 1 + self.random.below(OWNS);
        let (offset, length) = (first * PAGE as u64, count * PAGE as u64);
        if self.random.one_in(2) {
            self.morsel.populate(offset, length).expect("fallocate");
        }
        let pages = first..first + count;
        let mut marks = Vec::new();
        for page in pages.clone() {
            self.check(page, Content::Zeros);
            marks.push(self.owner.mark(page));
            access::store_page(self.view.page(page), marks[marks.len() - 1]).expect("a page");
        }
        for (page, mark) in pages.zip(marks) {
            self.check(page, Content::Mark(mark));
        }
        self.morsel.punch(offset, length).expect("fallocate");
    }

    fn check(&self, page: u64, content: Content) {
        let found = access::load_page(self.view.page(page)).expect("a page");
        self.owner.check(&found[..], content, page);
    }

    /// Through another mapping the pages have the stores of some thread, or zeros.
    fn map_again(&mut self) {
        let other = self.morsel.mapped();
        let page = self.random.below(64);
        let found = access::load_page(other.page(page)).expect("a page");
        let is_right = |word: &u64| self.owner.has_made_for(*word, page);
        assert!(found.iter().all(is_right), "page {page} has bytes that no thread has stored");
    }
}

/// The state that all runners share.
struct Round {
    processors: u64,
    /// The number of pages that are punched at a time.
    pages: u64,
    /// The last step in which they were punched.
    done: AtomicU64,
}

/// Threads rush for the pages of a Morsel of a random kind.
pub(super) fn with_morsel(session: &mut Session) {
    let kinds: Vec<(u32, u64)> =
        morsel::kinds().into_iter().filter(|(order, _)| *order > 1).collect();
    let kind = session.random.pick(&kinds);
    let pages = session.random.pick(&[40, 512, 600]);
    session.note(format!("threads rush for a Morsel, order and flags {kind:x?}, {pages} pages"));
    let (morsel, steps) = (Morsel::of(kind), session.steps().div_ceil(RUSHES));
    let (view, stop) = (morsel.mapped(), Stop::default());
    let meeting = Meeting::new(RUNNERS, &stop);
    let left = AtomicU64::new(RUNNERS);
    let processors = processors() as u64;
    let round = Round { processors, pages, done: AtomicU64::new(u64::MAX) };
    std::thread::scope(|scope| {
        for runner in 0..RUNNERS {
            let (round, stop, left) = (&round, &stop, &left);
            let random = Random::new(session.random.number());
            let owner = Owner::beginning(OWNER, runner << 14);
            let (morsel, view, meeting) = (&morsel, &view, &meeting);
            let mut runner = Runner { morsel, view, meeting, number: runner, owner, random };
            scope.spawn(move || {
                let _at_end = LastOf { left, stop };
                (0..steps).for_each(|step| runner.rush(round, step));
            });
        }
        let mut random = Random::new(session.random.number());
        disturb_until(&stop, &mut random, &view);
    });
    let stat = morsel.stat();
    assert_eq!((stat.mounts, stat.flags), (1, kind.1 & !uapi::INHERIT), "{stat:?}");
    counters::assert_morsels_are_sound();
}
