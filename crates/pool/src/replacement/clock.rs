//! Clock with second chance over the resident pages (SIGMOD'23, section 3.4).
//!
//! The hand goes round *places*: the slots of the resident set, which has the pages on the surface,
//! and then the slots of the pool, whose record has the pages in them. The hand marks each unlocked
//! page that it finds, and proposes each page that is still marked. Every access clears the mark.
//! Threads that evict at the same time share the hand: each thread looks at the places of its own
//! steps.
//!
//! What differs from the paper:
//!
//! - *New pages* do not wait for the hand to mark them (`newcomers.rs`). Those that were read ahead
//!   get their mark later, and the access for which they were read does not count.
//! - *Another round.* A page that has lost its mark was accessed since, or could not be written.
//!   When the hand finds it marked the next time, the page stays for one more round.
//! - *Pages that linger.* A page that comes takes a slot of the pool that another one has just
//!   left. So the hand comes to pages in slots in the order in which they came, and a loop over a
//!   few pages more than the pool has room for would find none of them. One in 16 stays for another
//!   round, by chance. In the resident set pages lie anywhere.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use zerocopy::FromZeros;

use super::newcomers::Newcomers;
use super::{Arrival, MarkOutcome, ReplacementPolicy, ResidentSet, Residents};
use crate::page::PageRef;

/// The search for a few candidates takes so many steps for each of them.
const FEW_STEPS: usize = 16;

/// One of so many pages in slots lingers.
const LINGERING: u64 = 16;

/// The default policy.
#[derive(Debug)]
pub struct Clock {
    resident: ResidentSet,
    newcomers: Newcomers,
    /// Whether the page in a place had a mark that told of accesses.
    was_marked: PlaceBits,
    /// Whether it was accessed since that mark. Of a page that had none, whether it was read ahead
    /// and got no mark.
    accessed: PlaceBits,
    hand: Hand,
}

/// In a line of its own: every search changes it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Hand(AtomicUsize);

/// A bit for each place. Each bit is a hint.
#[derive(Debug)]
struct PlaceBits(Box<[AtomicU64]>);

impl PlaceBits {
    fn new(places: usize) -> PlaceBits {
        let words = <[AtomicU64]>::new_box_zeroed_with_elems(places.div_ceil(64));
        PlaceBits(words.expect("address space for a bit for each place"))
    }

    fn is_set(&self, place: usize) -> bool {
        let word = self.0.get(place / 64);
        word.is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (place % 64)) != 0)
    }

    fn set(&self, place: usize) {
        if let Some(word) = self.0.get(place / 64)
            && !self.is_set(place)
        {
            word.fetch_or(1 << (place % 64), Ordering::Relaxed);
        }
    }

    /// Returns whether the bit was set.
    fn clear(&self, place: usize) -> bool {
        let Some(word) = self.0.get(place / 64) else { return false };
        let bit = 1 << (place % 64);
        word.load(Ordering::Relaxed) & bit != 0
            && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }
}

impl Clock {
    /// A clock for a pool of `frames` frames.
    pub fn new(frames: u64) -> Clock {
        let resident = ResidentSet::new(frames);
        // The numbers of slots begin with 1, and fill lines.
        let in_slots = usize::try_from(frames).unwrap_or(usize::MAX).saturating_add(8);
        let places = resident.slots().saturating_add(in_slots);
        Clock {
            was_marked: PlaceBits::new(places),
            accessed: PlaceBits::new(places),
            resident,
            newcomers: Newcomers::new(frames),
            hand: Hand::default(),
        }
    }

    /// The number of places.
    fn places(&self, residents: &dyn Residents) -> usize {
        self.resident.slots() + residents.slot_positions()
    }

    /// The place at a position of the hand's round.
    fn place_at(&self, position: usize) -> usize {
        match position < self.resident.slots() {
            true => self.resident.slot_at(position),
            false => position,
        }
    }

    fn page_in(&self, place: usize, residents: &dyn Residents) -> Option<PageRef> {
        match place.checked_sub(self.resident.slots()) {
            None => self.resident.in_slot(place),
            Some(in_slots) => residents.page_in_slot_at(in_slots),
        }
    }

    /// Moves the hand by one place, or over all places up to the next one that may have a page.
    /// Returns where the hand was, and how many places it has jumped over from there.
    fn step(&self, residents: &dyn Residents, places: usize) -> (usize, usize) {
        let step = self.hand.0.fetch_add(1, Ordering::Relaxed);
        let position = step % places;
        let empty = match position.checked_sub(self.resident.slots()) {
            None => self.resident.empty_from(position),
            Some(in_slots) => residents.empty_slots_from(in_slots),
        };
        let empty = empty.saturating_sub(1);
        if empty > 0 {
            self.jump(step + 1 + empty);
        }
        (step, empty)
    }

    /// Moves the hand on to this step. Other threads, which have moved the hand meanwhile, look at
    /// places in between.
    fn jump(&self, step: usize) {
        self.hand.0.fetch_max(step, Ordering::Relaxed);
    }

    /// Marks new pages whose time has come, so many at most.
    fn mark_newcomers(&self, residents: &dyn Residents, most: usize) {
        for place in std::iter::from_fn(|| self.newcomers.take_due()).take(most) {
            if let Some(page) = self.page_in(place, residents) {
                self.try_mark(page, place, residents);
            }
        }
    }

    fn try_mark(&self, page: PageRef, place: usize, residents: &dyn Residents) -> MarkOutcome {
        let outcome = residents.try_mark(page);
        if outcome == MarkOutcome::Marked {
            if self.was_marked.is_set(place) {
                self.accessed.set(place);
            } else if !self.accessed.clear(place) {
                // The first mark tells nothing of accesses. Of a page that was read ahead neither
                // does the second: a thread has needed it meanwhile.
                self.was_marked.set(place);
            }
        }
        outcome
    }

    /// A page was put into this place.
    fn note_newcomer(&self, place: usize, arrival: Arrival) {
        self.was_marked.clear(place);
        match arrival {
            Arrival::Needed => _ = self.accessed.clear(place),
            Arrival::Ahead => self.accessed.set(place),
        }
        self.newcomers.note(place, arrival);
    }

    /// Whether a marked page in this place stays for another round.
    fn stays(&self, place: usize, step: usize) -> bool {
        let in_slot = place >= self.resident.slots();
        self.accessed.clear(place) || in_slot && lingers(step)
    }

    /// Moves the hand until it has found candidates with so many frames, or so many of them, or has
    /// passed so many places, or has made so many steps.
    fn search(
        &self,
        residents: &dyn Residents,
        (most_places, most_steps): (usize, usize),
        (frames, pages): (u64, usize),
        candidates: &mut Vec<PageRef>,
    ) {
        self.mark_newcomers(residents, most_steps);
        let places = self.places(residents);
        let mut found_frames = 0;
        let mut first = None;
        let (mut passed, mut steps) = (0, 0);
        while passed < most_places && steps < most_steps {
            let (step, empty) = self.step(residents, places);
            passed += 1 + empty;
            steps += 1;
            // The hand, moved by all threads, can reach a page that is a candidate already only
            // from its second round on. Then no page stays that could leave.
            let is_second_round = step.wrapping_sub(*first.get_or_insert(step)) >= places;
            let place = self.place_at(step % places);
            let Some(page) = self.page_in(place, residents) else { continue };
            let leaves = match self.try_mark(page, place, residents) {
                MarkOutcome::Marked | MarkOutcome::InUse => false,
                MarkOutcome::AlreadyMarked => match self.stays(place, step) {
                    _ if is_second_round => !candidates.contains(&page),
                    stays => !stays,
                },
            };
            if leaves {
                found_frames += u64::from(page.frames);
                candidates.push(page);
                if candidates.len() >= pages || found_frames >= frames {
                    return;
                }
            }
        }
    }
}

/// Whether a page that the hand comes to in this step lingers: by chance, and not the same page in
/// each round.
fn lingers(step: usize) -> bool {
    // The multiplications of SplitMix64, which mix all bits.
    let mut mixed = (step as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 32).is_multiple_of(LINGERING)
}

impl ReplacementPolicy for Clock {
    fn admit(&self, page: PageRef, arrival: Arrival) {
        self.note_newcomer(self.resident.insert(page), arrival);
    }

    fn forget(&self, page: PageRef) {
        self.resident.remove(page);
    }

    fn contains(&self, page: PageRef) -> bool {
        self.resident.contains(page)
    }

    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        // The first round marks all pages, and the second finds those that no thread has accessed.
        let most = (2 * self.places(residents), usize::MAX);
        self.search(residents, most, (frames, pages), candidates);
    }

    fn few_candidates(
        &self,
        residents: &dyn Residents,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        // A jump costs hardly more than a step.
        let most = (usize::MAX, FEW_STEPS * pages);
        self.search(residents, most, (u64::MAX, pages), candidates);
    }

    fn looks_into_slots(&self) -> bool {
        true
    }

    fn admit_in_slot(&self, position: usize, arrival: Arrival) {
        self.note_newcomer(self.resident.slots() + position, arrival);
    }

    fn for_each(&self, visit: &mut dyn FnMut(PageRef)) {
        self.resident.for_each(visit);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashSet;

    use super::*;

    #[derive(Default)]
    struct Marks {
        marked: RefCell<HashSet<PageRef>>,
        in_use: HashSet<PageRef>,
    }

    impl Residents for Marks {
        fn try_mark(&self, page: PageRef) -> MarkOutcome {
            if self.in_use.contains(&page) {
                MarkOutcome::InUse
            } else if self.marked.borrow_mut().insert(page) {
                MarkOutcome::Marked
            } else {
                MarkOutcome::AlreadyMarked
            }
        }
    }

    fn page(id: u64) -> PageRef {
        PageRef::new(id, 1)
    }

    #[test]
    fn every_page_gets_a_second_chance() {
        let clock = Clock::new(10);
        (0..10).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let marks = Marks::default();
        let mut candidates = Vec::new();
        clock.candidates(&marks, 3, 64, &mut candidates);
        assert_eq!(candidates.len(), 3);
        assert_eq!(marks.marked.borrow().len(), 10, "the first round marked all pages");
    }

    #[test]
    fn used_pages_stay_and_the_search_ends() {
        let clock = Clock::new(10);
        (0..10).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let marks = Marks { in_use: (0..9).map(page).collect(), ..Marks::default() };
        let mut candidates = Vec::new();
        clock.candidates(&marks, 10, 64, &mut candidates);
        assert_eq!(candidates, [page(9)]);
    }

    #[test]
    fn the_hand_goes_on_where_it_stopped() {
        let clock = Clock::new(10);
        (0..10).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let marks = Marks::default();
        (0..10).for_each(|id| _ = marks.try_mark(page(id)));
        let mut left = Vec::new();
        for _ in 0..10 {
            clock.candidates(&marks, 1, 1, &mut left);
        }
        let distinct: HashSet<PageRef> = left.iter().copied().collect();
        assert_eq!(distinct.len(), 10, "each page was proposed once: {left:?}");
    }

    #[test]
    fn a_new_page_that_is_not_accessed_again_leaves_at_the_first_visit_of_the_hand() {
        for id in 0..100 {
            let (clock, marks) = (Clock::new(16), Marks::default());
            clock.admit(page(2 * id), Arrival::Needed);
            clock.admit(page(2 * id + 1), Arrival::Needed);
            let mut candidates = Vec::new();
            clock.candidates(&marks, 1, 1, &mut candidates);
            assert_eq!(candidates, [page(2 * id)], "wherever in the set it is");
        }
    }

    #[test]
    fn the_search_for_a_few_candidates_is_short() {
        let clock = Clock::new(1_000);
        (0..1_000).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let mut marks = Marks { in_use: (0..1_000).map(page).collect(), ..Marks::default() };
        let mut candidates = Vec::new();
        // The new pages that are due get no mark, because they are in use.
        for _ in 0..1_000 / FEW_STEPS {
            clock.few_candidates(&marks, 4, &mut candidates);
        }
        marks.in_use.clear();
        clock.few_candidates(&marks, 4, &mut candidates);
        assert!(candidates.is_empty());
        let marked = marks.marked.borrow().len();
        assert!((1..=4 * FEW_STEPS).contains(&marked), "{marked} pages are marked");
        (0..1_000).for_each(|id| _ = marks.try_mark(page(id)));
        clock.few_candidates(&marks, 4, &mut candidates);
        assert_eq!(candidates.len(), 4);
    }

    #[test]
    fn a_page_that_had_no_mark_gets_one_round_and_no_more() {
        let clock = Clock::new(64);
        let mut marks = Marks { in_use: (0..64).map(page).collect(), ..Marks::default() };
        (0..64).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let mut candidates = Vec::new();
        clock.few_candidates(&marks, 4, &mut candidates);
        clock.few_candidates(&marks, 4, &mut candidates);
        marks.in_use.clear();
        // One round marks all, and the next finds those that no thread has accessed: all of them.
        clock.candidates(&marks, 1, 1, &mut candidates);
        clock.forget(candidates[0]);
        let (before, places) = (clock.hand.0.load(Ordering::Relaxed), clock.resident.slots());
        clock.candidates(&marks, 64, 64, &mut candidates);
        assert_eq!(candidates.len(), 64);
        assert!(clock.hand.0.load(Ordering::Relaxed) - before <= places, "in one round");
    }

    /// A pool whose pages all lie in slots.
    struct InSlots {
        marks: Marks,
        pages: Vec<Option<PageRef>>,
    }

    impl Residents for InSlots {
        fn try_mark(&self, page: PageRef) -> MarkOutcome {
            self.marks.try_mark(page)
        }

        fn slot_positions(&self) -> usize {
            self.pages.len()
        }

        fn page_in_slot_at(&self, position: usize) -> Option<PageRef> {
            self.pages[position]
        }
    }

    fn in_slots(pages: u64) -> (Clock, InSlots) {
        let clock = Clock::new(pages);
        (0..pages as usize).for_each(|slot| clock.admit_in_slot(slot, Arrival::Needed));
        (
            clock,
            InSlots { marks: Marks::default(), pages: (0..pages).map(page).map(Some).collect() },
        )
    }

    fn one_round(clock: &Clock, pool: &InSlots) -> (usize, usize) {
        (clock.places(pool), usize::MAX)
    }

    #[test]
    fn the_hand_comes_to_the_surface_and_to_slots() {
        let (clock, pool) = in_slots(100);
        (100..110).for_each(|id| clock.admit(page(id), Arrival::Needed));
        let mut candidates = Vec::new();
        clock.candidates(&pool, u64::MAX, 1_000, &mut candidates);
        candidates.sort_unstable();
        assert_eq!(candidates, (0..110).map(page).collect::<Vec<_>>());
    }

    #[test]
    fn an_accessed_page_stays_for_one_more_round() {
        let (clock, pool) = in_slots(1_000);
        let round = || {
            let mut left = Vec::new();
            clock.search(&pool, one_round(&clock, &pool), (u64::MAX, usize::MAX), &mut left);
            left
        };
        // As if a thread had accessed all pages between the rounds.
        round();
        pool.marks.marked.borrow_mut().clear();
        round();
        assert_eq!(round(), [], "all were accessed before the last round");
        let left = round();
        assert!((900..1_000).contains(&left.len()), "{} leave, and others linger", left.len());
    }

    #[test]
    fn pages_that_were_read_ahead_get_their_mark_later() {
        for (arrival, marked) in [(Arrival::Needed, 28), (Arrival::Ahead, 16)] {
            let (clock, pool) = (Clock::new(64), in_slots(64).1);
            for slot in 0..32 {
                clock.admit_in_slot(slot, arrival);
                clock.mark_newcomers(&pool, usize::MAX);
            }
            let of_these = (0..32).filter(|id| pool.marks.marked.borrow().contains(&page(*id)));
            assert_eq!(of_these.count(), marked, "{arrival:?}");
        }
    }

    /// Two pages take the same place one after the other. The second one is accessed after its
    /// place got a mark for the first one.
    #[test]
    fn a_second_mark_from_the_newcomers_is_that_of_an_accessed_page() {
        let (clock, pool) = (Clock::new(64), in_slots(64).1);
        clock.admit_in_slot(7, Arrival::Needed);
        clock.admit_in_slot(7, Arrival::Needed);
        clock.mark_newcomers(&pool, usize::MAX);
        for place in 0..5 {
            clock.admit_in_slot(place, Arrival::Needed);
            clock.mark_newcomers(&pool, usize::MAX);
            pool.marks.marked.borrow_mut().remove(&page(7));
        }
        assert!(clock.accessed.clear(clock.resident.slots() + 7));
    }

    /// Its mark comes from the hand or the newcomers, before a thread needs it or after that.
    #[test]
    fn the_access_for_which_a_page_was_read_ahead_does_not_count() {
        let (clock, pool) = (Clock::new(64), in_slots(64).1);
        let place = clock.resident.slots() + 7;
        let mark = || clock.try_mark(page(7), place, &pool);
        for (arrival, is_accessed) in [(Arrival::Needed, true), (Arrival::Ahead, false)] {
            clock.admit_in_slot(7, arrival);
            assert_eq!(mark(), MarkOutcome::Marked);
            pool.marks.marked.borrow_mut().remove(&page(7));
            assert_eq!(mark(), MarkOutcome::Marked);
            assert_eq!(clock.accessed.is_set(place), is_accessed, "{arrival:?}");
            pool.marks.marked.borrow_mut().remove(&page(7));
            assert_eq!(mark(), MarkOutcome::Marked);
            assert!(clock.accessed.is_set(place), "the next access counts");
            pool.marks.marked.borrow_mut().remove(&page(7));
        }
    }

    #[test]
    fn pages_linger_by_chance() {
        let (clock, pool) = in_slots(1_000);
        (0..1_000).for_each(|id| _ = pool.try_mark(page(id)));
        let mut left = HashSet::new();
        for rounds in 1..=3 {
            let mut candidates = Vec::new();
            clock.search(&pool, one_round(&clock, &pool), (u64::MAX, usize::MAX), &mut candidates);
            assert!((910..970).contains(&candidates.len()), "{} of 1,000", candidates.len());
            left.extend(candidates);
            assert!(left.len() < 1_000 || rounds > 1);
        }
        assert!(left.len() > 995, "{} of 1,000 in three rounds", left.len());
    }

    /// Two threads come to the surface, where no page is.
    #[test]
    fn the_jump_over_what_is_empty_survives_another_thread() {
        let (clock, pool) = in_slots(1_000);
        let empty = clock.resident.empty_from(0);
        assert_eq!(empty, clock.resident.slots());
        let first = clock.hand.0.fetch_add(1, Ordering::Relaxed);
        clock.step(&pool, clock.places(&pool));
        clock.jump(first + empty);
        assert_eq!(clock.step(&pool, clock.places(&pool)), (empty, 0));
    }

    #[test]
    fn frames_are_counted_not_pages() {
        let clock = Clock::new(100);
        (0..10).for_each(|id| clock.admit(PageRef::new(id * 10, 10), Arrival::Needed));
        let mut candidates = Vec::new();
        clock.candidates(&Marks::default(), 25, 64, &mut candidates);
        assert_eq!(candidates.len(), 3);
    }
}
