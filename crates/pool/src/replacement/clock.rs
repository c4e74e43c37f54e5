//! Clock with second chance over the resident set (SIGMOD'23, section 3.4).
//!
//! The hand goes round the set's slots. The hand marks each unlocked page that it finds, and
//! proposes each page that is still marked. Every access clears the mark. Threads that evict at the
//! same time share the hand: each thread looks at the slots of its own steps.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{MarkOutcome, ReplacementPolicy, ResidentSet, Residents};
use crate::page::PageRef;

/// In the search for a few candidates the hand passes so many slots for each of them.
const FEW_LOOKS: usize = 16;

/// The default policy.
#[derive(Debug)]
pub struct Clock {
    resident: ResidentSet,
    hand: AtomicUsize,
}

impl Clock {
    /// A clock for a pool of `frames` frames.
    pub fn new(frames: u64) -> Clock {
        Clock { resident: ResidentSet::new(frames), hand: AtomicUsize::new(0) }
    }

    /// Moves the hand by one slot, or over all slots up to the next one that may have a page.
    /// Returns where the hand was, and how many slots it has jumped over from there.
    fn step(&self) -> (usize, usize) {
        let step = self.hand.fetch_add(1, Ordering::Relaxed);
        let position = step % self.resident.slots();
        let empty = self.resident.empty_from(position).saturating_sub(1);
        // If another thread has moved the hand meanwhile, that thread finds out by itself.
        let (now, beyond) = (step.wrapping_add(1), step.wrapping_add(1 + empty));
        let moved = empty > 0
            && self
                .hand
                .compare_exchange(now, beyond, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        (step, if moved { empty } else { 0 })
    }

    /// Moves the hand until it has found candidates with so many frames, or so many of them, or has
    /// passed so many slots.
    fn search(
        &self,
        residents: &dyn Residents,
        most: usize,
        (frames, pages): (u64, usize),
        candidates: &mut Vec<PageRef>,
    ) {
        let slots = self.resident.slots();
        let mut found_frames = 0;
        let mut first = None;
        let mut passed = 0;
        while passed < most {
            let (step, empty) = self.step();
            passed += 1 + empty;
            // The hand, moved by all threads, can reach a page that is a candidate already only
            // from its second round on.
            let is_second_round = step.wrapping_sub(*first.get_or_insert(step)) >= slots;
            let Some(page) = self.resident.at(step % slots) else { continue };
            if residents.try_mark(page) == MarkOutcome::AlreadyMarked
                && !(is_second_round && candidates.contains(&page))
            {
                found_frames += u64::from(page.frames);
                candidates.push(page);
                if candidates.len() >= pages || found_frames >= frames {
                    return;
                }
            }
        }
    }
}

impl ReplacementPolicy for Clock {
    fn admit(&self, page: PageRef) {
        self.resident.insert(page);
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
        let looks = 2 * self.resident.slots();
        self.search(residents, looks, (frames, pages), candidates);
    }

    fn few_candidates(
        &self,
        residents: &dyn Residents,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    ) {
        self.search(residents, FEW_LOOKS * pages, (u64::MAX, pages), candidates);
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
        (0..10).for_each(|id| clock.admit(page(id)));
        let marks = Marks::default();
        let mut candidates = Vec::new();
        clock.candidates(&marks, 3, 64, &mut candidates);
        assert_eq!(candidates.len(), 3);
        assert_eq!(marks.marked.borrow().len(), 10, "the first round marked all pages");
    }

    #[test]
    fn used_pages_stay_and_the_search_ends() {
        let clock = Clock::new(10);
        (0..10).for_each(|id| clock.admit(page(id)));
        let marks = Marks { in_use: (0..9).map(page).collect(), ..Marks::default() };
        let mut candidates = Vec::new();
        clock.candidates(&marks, 10, 64, &mut candidates);
        assert_eq!(candidates, [page(9)]);
    }

    #[test]
    fn the_hand_goes_on_where_it_stopped() {
        let clock = Clock::new(10);
        (0..10).for_each(|id| clock.admit(page(id)));
        let marks = Marks::default();
        let mut left = Vec::new();
        for _ in 0..10 {
            clock.candidates(&marks, 1, 1, &mut left);
        }
        let distinct: HashSet<PageRef> = left.iter().copied().collect();
        assert_eq!(distinct.len(), 10, "each page was proposed once: {left:?}");
    }

    #[test]
    fn the_search_for_a_few_candidates_is_short() {
        let clock = Clock::new(1_000);
        (0..1_000).for_each(|id| clock.admit(page(id)));
        let marks = Marks::default();
        let mut candidates = Vec::new();
        clock.few_candidates(&marks, 4, &mut candidates);
        assert!(candidates.is_empty());
        let marked = marks.marked.borrow().len();
        assert!((1..=4 * FEW_LOOKS).contains(&marked), "{marked} pages are marked");
        (0..1_000).for_each(|id| _ = marks.try_mark(page(id)));
        clock.few_candidates(&marks, 4, &mut candidates);
        assert_eq!(candidates.len(), 4);
    }

    #[test]
    fn frames_are_counted_not_pages() {
        let clock = Clock::new(100);
        (0..10).for_each(|id| clock.admit(PageRef::new(id * 10, 10)));
        let mut candidates = Vec::new();
        clock.candidates(&Marks::default(), 25, 64, &mut candidates);
        assert_eq!(candidates.len(), 3);
    }
}
