//! A compact list of pages: runs of adjacent pages of equal length.

use vellum_pool::{PageId, PageRef};

/// Pages in the order in which they were added. Adjacent pages, such as those of a file that grows,
/// take the memory of one. A plain list would need 16 bytes for each page, and the pool's size
/// would not bound it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageRuns(Vec<Run>);

#[derive(Clone, Copy, Debug)]
struct Run {
    first: PageId,
    /// Length of each page.
    frames: u32,
    pages: u32,
}

impl From<PageRef> for PageRuns {
    fn from(page: PageRef) -> PageRuns {
        let mut pages = PageRuns::default();
        pages.push(page);
        pages
    }
}

impl PageRuns {
    pub(crate) fn push(&mut self, page: PageRef) {
        if let Some(last) = self.0.last_mut()
            && last.nth(last.pages) == page
            && last.pages < u32::MAX
        {
            last.pages += 1;
            return;
        }
        self.0.push(Run { first: page.id, frames: page.frames, pages: 1 });
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = PageRef> {
        self.0.iter().flat_map(|run| (0..run.pages).map(|number| run.nth(number)))
    }

    /// The runs, as (first frame, number of frames).
    pub(crate) fn ranges(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.0.iter().map(|run| (run.first.0, u64::from(run.frames) * u64::from(run.pages)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Run {
    fn nth(&self, number: u32) -> PageRef {
        PageRef::new(self.first.0 + u64::from(number) * u64::from(self.frames), self.frames)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_went_in_comes_out(pages in prop::collection::vec((0u64..30, 1u32..4), 0..200)) {
            let pages: Vec<_> = pages.iter().map(|(id, len)| PageRef::new(*id, *len)).collect();
            let mut runs = PageRuns::default();
            pages.iter().for_each(|page| runs.push(*page));
            prop_assert_eq!(runs.iter().collect::<Vec<_>>(), pages);
        }
    }

    #[test]
    fn pages_of_a_growing_file_are_few_runs() {
        let mut runs = PageRuns::default();
        (7..100_007).for_each(|id| runs.push(PageRef::new(id, 1)));
        (0..100_000).for_each(|number| runs.push(PageRef::new(100_007 + 4 * number, 4)));
        assert_eq!(runs.0.len(), 2);
        assert_eq!(runs.iter().last(), Some(PageRef::new(100_007 + 4 * 99_999, 4)));
    }
}
