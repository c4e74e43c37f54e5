//! Freed places that may not be allocated again yet: [`WaitingPlaces`].

use std::collections::VecDeque;

use crate::page::PageRef;

/// Freed places, each with the log sequence number that must be durable before it is allocated
/// again. The numbers grow.
#[derive(Debug, Default)]
pub(crate) struct WaitingPlaces {
    places: VecDeque<(u64, PageRef)>,
    /// The length of all of them.
    frames: u64,
}

impl WaitingPlaces {
    pub(crate) fn push(&mut self, lsn: u64, page: PageRef) {
        self.places.push_back((lsn, page));
        self.frames += u64::from(page.frames);
    }

    /// The length of all places.
    pub(crate) fn frames(&self) -> u64 {
        self.frames
    }

    /// The next place for which the log is durable.
    pub(crate) fn pop(&mut self, durable: u64) -> Option<PageRef> {
        let (_, page) = *self.places.front().filter(|(lsn, _)| *lsn < durable)?;
        self.places.pop_front();
        self.frames -= u64::from(page.frames);
        Some(page)
    }

    pub(crate) fn newest(&self) -> Option<u64> {
        self.places.back().map(|(lsn, _)| *lsn)
    }

    pub(crate) fn pages(&self) -> impl Iterator<Item = &PageRef> {
        self.places.iter().map(|(_, page)| page)
    }
}
