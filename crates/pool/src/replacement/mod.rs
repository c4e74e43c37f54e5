//! Policies that choose the page to evict next: the trait, its default, and the set of resident
//! pages.
//!
//! A policy never touches pages or their states. It tracks the resident pages and proposes some for
//! eviction. Through [`Residents`] it looks at a page's state.

mod clock;
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
    /// more, and it takes 26 bytes for each frame of the pool in place of 12.
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

/// The outcome of a policy's look at a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chance {
    /// It was unused since the last look, or new: it is marked now, and goes at the next look
    /// unless a thread uses it before.
    Given,
    /// No thread has used it since it was marked: it can be evicted.
    Spent,
    /// A thread holds it.
    InUse,
}

/// The pool, as policies see it.
pub trait Residents {
    /// Looks at a page, as a clock's hand does.
    fn second_chance(&self, page: PageRef) -> Chance;
}

/// A replacement policy. Many threads call its methods at the same time.
///
/// The pool guarantees: between `admit` and `forget` of a page there is no second `admit` of it;
/// `forget` is called only for admitted pages, with the same `PageRef`; there are never more
/// admitted frames than the capacity that the policy was made for. The policy must not panic.
pub trait ReplacementPolicy: Send + Sync + fmt::Debug + 'static {
    /// A page became resident.
    fn admit(&self, page: PageRef);

    /// A page is no longer resident.
    fn forget(&self, page: PageRef);

    /// Whether the page is admitted, and with this size. The pool asks while it holds the page, to
    /// find out whether a reference that it got some time ago still fits.
    fn contains(&self, page: PageRef) -> bool;

    /// Proposes pages whose chance is spent, adding up to `frames` frames or a little more, at
    /// most `pages` pages; fewer if a bounded search does not find them. No page twice.
    fn candidates(
        &self,
        residents: &dyn Residents,
        frames: u64,
        pages: usize,
        candidates: &mut Vec<PageRef>,
    );

    /// Visits every page that is resident during the whole call; others may or may not be visited.
    fn for_each(&self, visit: &mut dyn FnMut(PageRef));
}
