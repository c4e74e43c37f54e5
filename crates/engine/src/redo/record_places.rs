//! Where in the log the records of pages are, in bounded memory.

use std::sync::Arc;

use vellum_log::{BLOCK_BYTES, Lsn};

use super::by_page::ByPage;

/// No log is longer than one stretch of 2 to the power of this.
const SHIFT_MAX: u32 = 50;

/// The lists may always have so many numbers for each page.
const NUMBERS_PER_PAGE: usize = 8;

/// Where the records of pages are. The log is divided into stretches of one length. A page has the
/// number of its first record in each stretch that has records of it.
#[derive(Debug)]
pub(super) struct PlaceIndex {
    pages: ByPage<Vec<Lsn>>,
    /// A stretch has 2 to the power of this many bytes.
    shift: u32,
    /// Numbers in all lists.
    numbers: usize,
    /// If there are more of them, and too many for the pages, stretches get longer.
    most: usize,
}

impl PlaceIndex {
    /// For lists that take so many bytes, or have a few numbers for each page.
    pub(super) fn new(bytes: usize) -> PlaceIndex {
        PlaceIndex {
            pages: ByPage::default(),
            shift: BLOCK_BYTES.ilog2(),
            numbers: 0,
            most: bytes / size_of::<Lsn>(),
        }
    }

    /// This record has an image of a page: the earlier ones are not needed.
    pub(super) fn begin(&mut self, page: u64, image: Lsn) {
        let places = self.pages.entry(page).or_default();
        self.numbers = self.numbers - places.len() + 1;
        places.clear();
        places.push(image);
        self.shorten();
    }

    /// This record has edits of a page, which has an image.
    pub(super) fn add(&mut self, page: u64, lsn: Lsn) {
        let (shift, places) = (self.shift, self.pages.get_mut(&page));
        let Some(places) = places else { return };
        if places.last().is_none_or(|last| last.0 >> shift < lsn.0 >> shift) {
            places.push(lsn);
            self.numbers += 1;
            self.shorten();
        }
    }

    fn shorten(&mut self) {
        let most = self.most.max(NUMBERS_PER_PAGE * self.pages.len());
        while self.numbers > most && self.shift < SHIFT_MAX {
            self.shift += 1;
            self.numbers = 0;
            for places in self.pages.values_mut() {
                places.dedup_by_key(|lsn| lsn.0 >> self.shift);
                places.shrink_to_fit();
                self.numbers += places.len();
            }
        }
    }

    /// Forgets all other pages.
    pub(super) fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        self.pages.retain(|page, _| keep(*page));
    }

    /// How many numbers the lists have.
    #[cfg(test)]
    pub(super) fn numbers(&self) -> usize {
        self.numbers
    }

    pub(super) fn into_places(self) -> impl Iterator<Item = (u64, Arc<Places>)> {
        let shift = self.shift;
        let places = move |first: Vec<Lsn>| Arc::new(Places { first: first.into(), shift });
        self.pages.into_iter().map(move |(page, first)| (page, places(first)))
    }
}

/// Where the records of a page are.
#[derive(Debug)]
pub(super) struct Places {
    /// The first record in each stretch that has any. The very first one has the page's newest
    /// image.
    first: Box<[Lsn]>,
    shift: u32,
}

impl Places {
    /// The record with the page's newest image.
    pub(super) fn image(&self) -> Lsn {
        self.first[0]
    }

    /// The parts of the log to read: each begins with a record.
    pub(super) fn parts(&self) -> impl Iterator<Item = (u64, u64)> {
        self.first.iter().map(|lsn| (lsn.0, ((lsn.0 >> self.shift) + 1) << self.shift))
    }
}
