//! Checking a whole store: every page once, and what nobody refers to.

use vellum_pool::PageRef;

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::header::HeaderPage;
use crate::store::open;
use crate::store::within::{Within, refuse_within};
use crate::tree::{Access, Entries, TreeStat, Visitor};

/// How far a check has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckProgress {
    /// Pages of 4 KiB that were checked.
    pub pages_done: u64,
    /// Pages of 4 KiB that are in use.
    pub pages_total: u64,
}

/// What a check found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// The trees and what they have, as far as it could be read.
    pub trees: Vec<(String, TreeStat)>,
    /// Pages of 4 KiB that were checked.
    pub pages_checked: u64,
    /// Everything that is wrong.
    pub damage: Vec<Error>,
    /// Pages of 4 KiB that are allocated though nothing refers to them. They do no harm; a dump
    /// and a load give them back.
    pub lost_pages: u64,
}

impl CheckReport {
    /// Nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.damage.is_empty()
    }
}

/// Marks the pages that were visited and collects what is wrong.
struct Collect<'a> {
    seen: Vec<u64>,
    store: &'a Store,
    total: u64,
    report: CheckReport,
    progress: &'a mut dyn FnMut(CheckProgress),
}

impl Collect<'_> {
    /// Marks a frame; false if it was marked already, or is not in the file.
    fn mark(&mut self, frame: u64) -> bool {
        let (word, bit) = ((frame / 64) as usize, 1 << (frame % 64));
        match self.seen.get_mut(word) {
            Some(seen) if *seen & bit == 0 => {
                *seen |= bit;
                true
            }
            _ => false,
        }
    }
}

impl Visitor for Collect<'_> {
    fn page(&mut self, page: PageRef) -> Result<bool> {
        let range = page.range();
        let mut fresh = true;
        for frame in range.start..range.start.saturating_add(range.count) {
            fresh &= self.mark(frame);
        }
        if !fresh {
            let what = "it is referred to twice, or lies outside the file";
            self.report.damage.push(Error::damaged(page, what));
        }
        let is_free = self.store.core.pages.pool.with_space(|space| space.is_free(page.id.0));
        if is_free {
            self.report.damage.push(Error::damaged(page, "it is in use, but the free map has it"));
        }
        self.report.pages_checked += u64::from(page.frames);
        let (pages_done, pages_total) = (self.report.pages_checked, self.total);
        let _within = Within::of(&self.store.core.pages.gate);
        (self.progress)(CheckProgress { pages_done, pages_total });
        Ok(fresh)
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        self.report.damage.push(error);
        Ok(())
    }
}

impl Store {
    /// Checks every page in use: its checksum and place, every invariant of the trees, that each
    /// page is referred to once, and the free map. Changes wait meanwhile.
    ///
    /// Pages that are in memory are checked there; to check what the file has, open it anew.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), or no memory for the check itself. What is wrong with the store
    /// is no error but part of the report.
    pub fn check(&self, progress: &mut dyn FnMut(CheckProgress)) -> Result<CheckReport> {
        self.core.pages.check_open()?;
        refuse_within(&self.core.pages.gate)?;
        // In this order: changes go on while this waits for a checkpoint.
        let checkpoints = self.core.checkpoint_lock();
        let _still = self.core.pages.hold()?;
        let pool = &self.core.pages.pool;
        // Freed, but held by a reader or a write-back at that moment; or of a value that is being
        // written: not in use, and not lost.
        let to_free = pool.frames_to_free() + self.core.pages.aside.frames();
        let total = pool.with_space(|space| space.allocated_pages() + space.first());
        let words = pool.file_pages().max(pool.end()).div_ceil(64) as usize;
        let mut collect = Collect {
            seen: vec![0; words],
            store: self,
            total,
            report: CheckReport::default(),
            progress,
        };
        self.check_headers(&mut collect)?;
        for place in checkpoints.places() {
            collect.page(*place)?;
        }
        // While the file is in use, or changed pages are in memory, the map there means nothing.
        let header = self.core.pages.header();
        if header.clean
            && !self.core.pages.is_changed()
            && let Err(error) = open::read_free_map(&self.core.pages.device, &header)
        {
            collect.damage(error)?;
        }
        self.core.catalog().check(&mut collect)?;
        for entry in Entries::all(self.core.catalog()) {
            let tree = entry.and_then(|(name, value)| self.core.decode_tree(&name, &value));
            match tree {
                Err(error) => collect.damage(error)?,
                Ok(tree) => {
                    let access = Access { pages: &self.core.pages, tree: &tree };
                    let stat = access.check(&mut collect)?;
                    collect.report.trees.push((tree.name().to_string(), stat));
                }
            }
        }
        // Closed meanwhile, it is no damage that pages cannot be read.
        self.core.pages.check_open()?;
        let mut report = collect.report;
        report.lost_pages = total.saturating_sub(report.pages_checked + to_free);
        Ok(report)
    }

    fn check_headers(&self, collect: &mut Collect<'_>) -> Result<()> {
        let pages = open::header_pages(&self.core.pages.device, self.core.pages.pool.file_pages())?;
        for (number, page) in (0..).zip(pages) {
            let place = PageRef::new(number, 1);
            collect.page(place)?;
            match page {
                HeaderPage::Valid(_) => {}
                HeaderPage::Damaged(damage) => collect.damage(damage.into())?,
                _ => collect.damage(Error::damaged(place, "it is no header page"))?,
            }
        }
        Ok(())
    }
}
