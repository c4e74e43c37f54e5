//! Policies that choose the page to evict next: the trait, its default, and the set of resident
//! pages.
//!
//! A policy changes neither pages nor their states. It tracks the resident pages and proposes some
//! for eviction. Through [`Residents`] it asks the pool to mark a page, and learns whether a thread
//! has accessed the page since the last time.

mod clock;
mod newcomers;
mod resident_set;
mod s3_fifo;

use std::fmt;

pub use clock::Clock;
pub use resident_set::ResidentSet;
pub use s3_fifo::S3Fifo;

use crate::page::PageRef;

/// The policies that come with the pool. `vellum bench policy` compares their hit ratios and costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Replacement {
    /// [`Clock`]: the cheapest.
    #[default]
    Clock,
    /// [`S3Fifo`]: keeps pages that are used repeatedly while scans and loops pass. A miss costs it
    /// more, and it takes 26 bytes for each frame of the pool. Clock takes 12 for those of pages
    /// that lie in no slot.
    S3Fifo,
}

impl Replacement {
    /// The policy for a pool of `frames` frames.
    pub fn policy(self, frames: u64) -> Box<dyn ReplacementPolicy> {
        match self {
            Replacement::Clock => Box::new(Clock::new(frames)),
            Replacement::S3Fifo => Box::new(S3Fifo::new(frames)),
        }
    }
}

/// Why a page becomes resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A thread accesses it now.
    Needed,
    /// It was read ahead of need, and no thread has accessed it.
    Ahead,
}

/// The outcome of [`Residents::try_mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkOutcome {
    /// The page had no mark and has one now. The next access clears the mark.
    Marked,
    /// No thread has accessed the page since it was marked: it can be evicted.
    AlreadyMarked,
    /// A thread holds the page, or the page is not resident.
    InUse,
}

/// The pool, as policies see it.
pub trait Residents {
    /// Marks a page, as a clock's hand does, unless it is marked already or a thread holds it.
    fn try_mark(&self, page: PageRef) -> MarkOutcome;

    /// The positions of an iteration over the pages that lie in the pool's slots
    /// (docs/translation.md). Slots at neighbouring positions lie apart, so that all huge pages get
    /// free slots. 0 in a pool without slots, or for a policy that does not look into them
    /// ([`looks_into_slots`](ReplacementPolicy::looks_into_slots)).
    fn slot_positions(&self) -> usize {
        0
    }

    /// The resident page in the slot at a position, if there is one.
    fn page_in_slot_at(&self, _position: usize) -> Option<PageRef> {
        None
    }

    /// How many positions without a page there are from this one on, as far as the pool knows
    /// without a look at each.
    fn empty_slots_from(&self, _position: usize) -> usize {
        0
    }
}

/// A replacement policy. Many threads call its methods at the same time.
///
/// The pool guarantees: between `admit` and `forget` of a page there is no second `admit` of it;
/// `forget` is called only for admitted pages, with the same `PageRef`; there are never more
/// admitted frames than the capacity that the policy was made for. The policy must not panic.
pub trait ReplacementPolicy: Send + Sync + fmt::Debug + 'static {
    /// A page became resident.
    fn admit(&self, page: PageRef, arrival: Arrival);

    /// A page is no longer resident.
    fn forget(&self, page: PageRef);

    /// Whether the page is admitted, and with this size. The pool asks while it holds the page, to
    /// find out whether a reference that it got some time ago still fits.
    fn contains(&self, page: PageRef) -> bool;

    /// Proposes pages to evict: pages of `frames` frames in all, or a little more, and at most
    /// `pages` pages. Proposes fewer if a bounded search does not find as many, and no page twice.
    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    );

    /// As [`candidates`](Self::candidates), for a thread in the midst of a miss: proposes up to
    /// `pages` pages, or none, and looks at so few pages that the miss takes hardly longer. By
    /// default it proposes none, and another thread evicts.
    fn few_candidates(
        &self,
        _residents: &dyn Residents,
        _pages: usize,
        _candidates: &mut Vec<PageRef>,
    ) {
    }

    /// Whether the policy finds pages in the pool's slots by [`Residents::page_in_slot_at`], and
    /// needs no memory for them. If so, the pool calls [`admit_in_slot`](Self::admit_in_slot) for
    /// them and none of the other methods. The answer is always the same. A policy that passes the
    /// calls on to another one, and not this one, answers no, and gets every page.
    fn looks_into_slots(&self) -> bool {
        false
    }

    /// A page in the slot at this position became resident.
    fn admit_in_slot(&self, _position: usize, _arrival: Arrival) {}

    /// Visits every page that is resident during the whole call; others may or may not be visited.
    /// Pages that the policy finds in slots are not among them.
    fn for_each(&self, visit: &mut dyn FnMut(PageRef));
}
