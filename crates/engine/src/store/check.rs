//! Checks a whole store: every page once, and the pages that nothing refers to, which it can free.

use std::ops::ControlFlow;

use vellum_pool::{PageId, PageRef};

use crate::error::{Error, Result};
use crate::page::runs::PageRuns;
use crate::store::Store;
use crate::store::callback::{CallbackScope, refuse_in_callback};
use crate::store::gate::Freeze;
use crate::store::header::HeaderPage;
use crate::store::open;
use crate::sync::lock;
use crate::tree::{Entries, TreeRef, TreeStat, Visitor};

/// The progress of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckProgress {
    /// Pages of 4 KiB that were checked.
    pub pages_done: u64,
    /// Pages of 4 KiB that are in use.
    pub pages_total: u64,
}

/// The result of a check.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct CheckReport {
    /// The trees with their statistics, as far as the check could read them.
    pub trees: Vec<(String, TreeStat)>,
    /// Pages of 4 KiB that were checked.
    pub pages_checked: u64,
    /// All damage that the check found.
    pub damage: Vec<Error>,
    /// Pages of 4 KiB that are allocated though nothing refers to them. They do no harm;
    /// [`Store::free_lost_pages`] frees them.
    pub lost_pages: u64,
}

impl CheckReport {
    /// Whether the check found no damage.
    pub fn is_sound(&self) -> bool {
        self.damage.is_empty()
    }
}

/// Marks the visited pages and collects the damage.
struct Collector<'a> {
    seen: Vec<u64>,
    store: &'a Store,
    total: u64,
    report: CheckReport,
    progress: &'a mut dyn FnMut(CheckProgress) -> Result<()>,
}

impl Collector<'_> {
    /// Marks a frame. Returns false if it was marked already, or is not in the file.
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

    fn has_seen(&self, frame: u64) -> bool {
        let word = self.seen.get((frame / 64) as usize);
        word.is_some_and(|seen| seen & 1 << (frame % 64) != 0)
    }
}

impl Visitor for Collector<'_> {
    fn page(&mut self, page: PageRef) -> Result<bool> {
        let range = page.range();
        let mut first_visit = true;
        for frame in range.start..range.start.saturating_add(range.count) {
            first_visit &= self.mark(frame);
        }
        if !first_visit {
            let what = "it is referred to twice, or lies outside the file";
            self.report.damage.push(Error::damaged(page, what));
        }
        let pool = &self.store.core.pages.pool;
        if pool.with_space(|space| space.has_free(range.start, range.count)) {
            let what = "it is in use, but the free map has it, or a part of it";
            self.report.damage.push(Error::damaged(page, what));
        }
        self.report.pages_checked += u64::from(page.frames);
        let (pages_done, pages_total) = (self.report.pages_checked, self.total);
        let _scope = CallbackScope::of(&self.store.core.pages.gate);
        (self.progress)(CheckProgress { pages_done, pages_total })?;
        Ok(first_visit)
    }

    fn damage(&mut self, error: Error) -> Result<()> {
        self.report.damage.push(error);
        Ok(())
    }
}

impl Store {
    /// Checks every page in use: its checksum and place, every invariant of the trees, that each
    /// page is referred to once, and the free map. Changes wait until the check ends.
    ///
    /// A resident page is checked in memory. To check the pages in the file, close the store and
    /// open it again.
    ///
    /// # Errors
    /// [`Closed`](Error::Closed), or too little memory for the check. Damage of the store is not an
    /// error but part of the report.
    pub fn check(&self, progress: &mut dyn FnMut(CheckProgress)) -> Result<CheckReport> {
        self.check_while(&mut |state| {
            progress(state);
            Ok(())
        })
    }

    /// As [`check`](Store::check). Ends early if `progress` returns [`Break`](ControlFlow::Break).
    ///
    /// # Errors
    /// [`Cancelled`](Error::Cancelled), if `progress` has ended it, too.
    pub fn check_until(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> ControlFlow<()>,
    ) -> Result<CheckReport> {
        self.check_while(&mut |state| or_cancelled(progress(state)))
    }

    /// As [`check`](Store::check). Ends early if `progress` fails.
    ///
    /// # Errors
    /// That of `progress`, too.
    pub(crate) fn check_while(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> Result<()>,
    ) -> Result<CheckReport> {
        self.check_and(progress, |_, _| Ok(()))
    }

    /// Checks the store as [`check`](Store::check) does, and frees the pages that are allocated
    /// though nothing refers to them: [`CheckReport::lost_pages`] of them. After damage it frees
    /// nothing, because a damaged page may be all that refers to others. Changes wait until this
    /// ends. If `progress` returns [`Break`](ControlFlow::Break), it ends early.
    ///
    /// A store loses pages when a crash comes while it drops a tree, or removes a long value, and
    /// when pages of a dropped tree cannot be read.
    ///
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("films");
    /// # vellum::Store::create(&path, &vellum::Options::new())?.close()?;
    /// use std::ops::ControlFlow;
    ///
    /// let store = vellum::Store::open(&path, &vellum::Options::new())?;
    /// let report = store.free_lost_pages(&mut |_| ControlFlow::Continue(()))?;
    /// println!("{} pages were lost, and are free now", report.lost_pages);
    /// assert_eq!(store.check(&mut |_| ())?.lost_pages, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`check`](Store::check); [`ReadOnly`](Error::ReadOnly), [`Poisoned`](Error::Poisoned);
    /// [`InUse`](Error::InUse), if a snapshot or a reader still reads a removed value whose pages
    /// cannot be found because of failed reads;
    /// [`Cancelled`](Error::Cancelled), if `progress` has ended it.
    pub fn free_lost_pages(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> ControlFlow<()>,
    ) -> Result<CheckReport> {
        self.core.pages.check_writable()?;
        self.check_and(&mut |state| or_cancelled(progress(state)), |collector, freeze| {
            match collector.report.is_sound() {
                true => self.free_unseen(collector, freeze),
                false => Ok(()),
            }
        })
    }

    /// Checks the store, and calls `end` while changes still wait.
    fn check_and(
        &self,
        progress: &mut dyn FnMut(CheckProgress) -> Result<()>,
        end: impl FnOnce(&mut Collector<'_>, &Freeze<'_>) -> Result<()>,
    ) -> Result<CheckReport> {
        self.core.pages.check_open()?;
        refuse_in_callback(&self.core.pages.gate)?;
        // In this order, changes go on while this thread waits for a checkpoint.
        let checkpoints = self.core.checkpoint_lock();
        let log = self.core.pages.redo_log.as_ref();
        let maps = log.map(|log| log.lock_maps());
        let freeze = self.core.pages.freeze()?;
        let pool = &self.core.pages.pool;
        // These pages are neither in use nor lost: pages that were freed while a reader or a
        // write-back held them, and unlinked pages.
        let to_free = pool.frames_to_free() + self.core.pages.unlinked.frames();
        let total = pool.with_space(|space| space.allocated_pages() + space.first());
        let words = pool.file_pages().max(pool.end()).div_ceil(64) as usize;
        let mut collector = Collector {
            seen: vec![0; words],
            store: self,
            total,
            report: CheckReport::default(),
            progress,
        };
        self.check_headers(&mut collector)?;
        let of_log = maps.iter().flat_map(|maps| maps.newest.iter().chain(&maps.next));
        for place in checkpoints.places().iter().chain(of_log) {
            collector.page(*place)?;
        }
        // The map in the file is valid only if the file is clean and the store has not changed
        // since.
        let header = self.core.pages.header();
        if header.clean
            && !self.core.pages.is_changed()
            && let Err(error) = open::read_free_map(&self.core.pages.device, &header)
        {
            collector.damage(error)?;
        }
        self.core.catalog().check(&mut collector)?;
        for tree in lock(&self.core.dropped_trees).iter() {
            if let Some((_, twin)) = tree.before_drop.get() {
                TreeRef { pages: &self.core.pages, state: twin }.check(&mut collector)?;
            }
        }
        for entry in Entries::all(self.core.catalog()) {
            let tree = entry.and_then(|(name, value)| self.core.decode_tree(&name, &value));
            match tree {
                Err(error) => collector.damage(error)?,
                Ok(tree) => {
                    let tree = TreeRef { pages: &self.core.pages, state: &tree };
                    let stat = tree.check(&mut collector)?;
                    collector.report.trees.push((tree.state.name().to_string(), stat));
                }
            }
        }
        // If the store was closed meanwhile, unreadable pages are not damage.
        self.core.pages.check_open()?;
        let checked = collector.report.pages_checked;
        collector.report.lost_pages = total.saturating_sub(checked + to_free);
        end(&mut collector, &freeze)?;
        Ok(collector.report)
    }

    /// Frees what is allocated, and was not seen by a check that has just found no damage.
    fn free_unseen(&self, collector: &mut Collector<'_>, freeze: &Freeze<'_>) -> Result<()> {
        let pages = &self.core.pages;
        if collector.report.lost_pages == 0 && !pages.unlinked.has_unreadable() {
            return Ok(());
        }
        let _change = pages.change_frozen(freeze)?;
        // The pages of removed values may be found now.
        pages.reclaim_unlinked();
        // Those of the rest are among those that were not seen. So are those of a value whose leaf
        // could not be read when its tree was dropped.
        let is_seen = |first: PageId| collector.has_seen(first.0);
        let has_unknown = pages.unlinked.has_unknown_readers(is_seen);
        let roots = if has_unknown { None } else { pages.unlinked.forget_unreadable() };
        let Some(roots) = roots else {
            let what = "a removed value is still read, and its pages cannot be found: end the \
                        snapshots and readers, and try again";
            return Err(Error::InUse(what.into()));
        };
        let (_, mut known) = pages.pool.snapshot_space();
        known.extend(pages.unlinked.ranges());
        let (first, end) = pages.pool.with_space(|space| {
            known.extend(space.free_extents());
            (space.first(), space.end())
        });
        for (start, count) in known {
            for frame in start..start + count {
                collector.mark(frame);
            }
        }
        let unit = u64::from(pages.page_frames);
        let mut lost = PageRuns::default();
        // The first record has them: recovery frees a removed value until one says that its root is
        // free, and so no page of it may be free before.
        for root in roots {
            let frames = root.id.0..root.id.0 + u64::from(root.frames);
            let unseen = frames.filter(|frame| collector.mark(*frame)).count();
            if unseen == root.frames as usize {
                lost.push(root);
            }
        }
        // The length of every page is a multiple of that of nodes, and so are the lengths of gaps.
        for frame in (first..end).step_by(pages.page_frames as usize) {
            if (frame..frame + unit).all(|frame| collector.mark(frame)) {
                lost.push(PageRef::new(frame, pages.page_frames));
            }
        }
        collector.report.lost_pages = pages.free_lost(lost);
        Ok(())
    }

    fn check_headers(&self, collector: &mut Collector<'_>) -> Result<()> {
        let pages = open::header_pages(&self.core.pages.device, self.core.pages.pool.file_pages())?;
        for (number, page) in (0..).zip(pages) {
            let place = PageRef::new(number, 1);
            collector.page(place)?;
            match page {
                HeaderPage::Valid(_) => {}
                HeaderPage::Damaged(damage) => collector.damage(damage.into())?,
                _ => collector.damage(Error::damaged(place, "it is not a header page"))?,
            }
        }
        Ok(())
    }
}

fn or_cancelled(told: ControlFlow<()>) -> Result<()> {
    match told {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(Error::Cancelled),
    }
}
