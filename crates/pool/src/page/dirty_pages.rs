//! Which pages are dirty, so that a write-back of all of them looks at no others.
//!
//! A bit for each page of the file says what the dirty bit of its state word says. A second bitmap
//! has a bit for each group of 4,096 pages (16 MiB of the file), which is set if one of them is
//! dirty; it may be set for longer. To find all dirty pages takes a look at the bits of all groups
//! (for a file of 1 TiB 8 KiB), and at 512 bytes for each group that is marked. Memory comes only
//! where bits were set. The bitmap is by page number and not by frame, so that it is the same
//! wherever the state words are, and so that it yields pages in the order of the file.
//!
//! What holds:
//! - A page's bit changes only under the page's lock, with the dirty bit of its state word: it is
//!   set before the exclusive lock is released, and cleared while the page is held, shared or
//!   exclusively. So a thread that finds the bit clear knows that all changes whose guards were
//!   dropped before are in the file, or on their way to it and held there.
//! - A group's bit is set after that of its page. Only [`DirtyPages::collect`] clears it, under a
//!   lock, where it finds no dirty page: it clears the bit, looks at the group's pages once more,
//!   and sets the bit again if one of them is dirty by now. The thread that sets a page's bit then
//!   looks at the group's. Both write, then read, in one total order (`SeqCst`), so at least one of
//!   the two sees the other.
//!
//! [`DirtyPages::insert`] is called at the one moment at which a clean page becomes dirty, under
//! its exclusive lock. That is also the place to record other facts of that moment, such as the
//! position in a log.

use vellum_vm::ReserveError;

use crate::page::PageId;
use crate::page::page_bits::{PageBits, WORD_BITS};
use crate::sync::{Mutex, lock};

/// Pages of a group: as many as 64 words have bits, which are eight cache lines.
const GROUP: u64 = if cfg!(feature = "model") { WORD_BITS } else { 64 * WORD_BITS };

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct DirtyPages {
    pages: PageBits,
    groups: PageBits,
    /// How many pages have a bit. Held by the thread that clears bits of groups.
    len: Mutex<u64>,
}

impl DirtyPages {
    /// For `pages` pages, all of them clean.
    pub(crate) fn new(pages: u64) -> Result<DirtyPages, ReserveError> {
        Ok(DirtyPages {
            pages: PageBits::new(pages.next_multiple_of(GROUP), "dirty pages")?,
            groups: PageBits::new(pages.div_ceil(GROUP), "groups of dirty pages")?,
            len: Mutex::new(pages),
        })
    }

    /// Makes room for `pages` pages; never shrinks.
    pub(crate) fn grow(&self, pages: u64) -> Result<(), ReserveError> {
        let mut len = lock(&self.len);
        if pages > *len {
            self.pages.grow(pages.next_multiple_of(GROUP))?;
            self.groups.grow(pages.div_ceil(GROUP))?;
            *len = pages;
        }
        Ok(())
    }

    /// Notes that a page becomes dirty. The caller holds it exclusively.
    pub(crate) fn insert(&self, page: PageId) {
        self.pages.set(page.0);
        // Another page has usually marked the group; then threads do not contend for its word.
        if !self.groups.contains(page.0 / GROUP) {
            self.groups.set(page.0 / GROUP);
        }
    }

    /// Notes that a page is clean or freed. The caller holds it.
    pub(crate) fn remove(&self, page: PageId) {
        if self.pages.contains(page.0) {
            self.pages.clear(page.0);
        }
    }

    /// All pages that are dirty during the whole call, in the order of the file; others may or may
    /// not be among them.
    pub(crate) fn collect(&self) -> Vec<PageId> {
        let mut found = Vec::new();
        let len = lock(&self.len);
        let groups = len.div_ceil(GROUP).div_ceil(WORD_BITS);
        self.groups.for_each_in(0..groups, |group| {
            if !self.collect_group(group, &mut found) {
                self.groups.clear(group);
                if self.collect_group(group, &mut found) {
                    self.groups.set(group);
                }
            }
        });
        found
    }

    /// The number of dirty pages, which other threads change meanwhile.
    pub(crate) fn count(&self) -> usize {
        let (words, mut count) = (GROUP / WORD_BITS, 0);
        let len = lock(&self.len);
        let groups = len.div_ceil(GROUP).div_ceil(WORD_BITS);
        self.groups.for_each_in(0..groups, |group| {
            self.pages.for_each_in(group * words..(group + 1) * words, |_| count += 1);
        });
        count
    }

    /// Adds the dirty pages of a group; false if there are none.
    fn collect_group(&self, group: u64, found: &mut Vec<PageId>) -> bool {
        let (words, before) = (GROUP / WORD_BITS, found.len());
        let range = group * words..(group + 1) * words;
        self.pages.for_each_in(range, |page| found.push(PageId(page)));
        found.len() > before
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set(steps in prop::collection::vec((0u64..9, 0u64..40, 0u8..8), 1..300)) {
            let (dirty, mut model) = (DirtyPages::new(1).unwrap(), BTreeSet::new());
            for (group, page, what) in steps {
                let page = PageId(group * (GROUP - 7) + page * 100);
                dirty.grow(page.0 + 1).unwrap();
                match what {
                    0 => {
                        prop_assert_eq!(dirty.count(), model.len());
                        prop_assert_eq!(
                            dirty.collect(), model.iter().copied().collect::<Vec<_>>()
                        );
                    }
                    1..4 => {
                        dirty.remove(page);
                        model.remove(&page);
                    }
                    _ => {
                        dirty.insert(page);
                        model.insert(page);
                    }
                }
            }
            prop_assert_eq!(dirty.collect(), model.into_iter().collect::<Vec<_>>());
        }
    }

    /// 64 TiB of pages, a few of them dirty.
    #[test]
    fn a_large_file_takes_memory_only_where_pages_are_dirty() {
        let pages = (64 << 40) / 4096;
        let dirty = DirtyPages::new(pages).unwrap();
        let few: Vec<PageId> = (0..16).map(|n| PageId(n * (pages / 16) + n)).collect();
        few.iter().for_each(|page| dirty.insert(*page));
        assert_eq!(dirty.collect(), few);
        let bytes =
            || dirty.pages.resident_bytes().unwrap() + dirty.groups.resident_bytes().unwrap();
        // `collect` reads the bits of all groups, which are 512 KiB; reading takes no memory.
        assert!(bytes() <= 16 * 2 * 4096, "{} bytes", bytes());
        few.iter().for_each(|page| dirty.remove(*page));
        assert!(dirty.collect().is_empty() && dirty.collect().is_empty());
    }
}
