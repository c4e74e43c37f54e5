//! Returns the free space of a store's file to the file system ([`Store::compact`]).
//!
//! Pages move towards the front of the file, and the free tail is cut off. Holes in the file would
//! be quicker. But the file's space is allocated when the file grows, so that a full disk shows
//! then, and not when a page is written back. A hole would break that promise.
//!
//! *The goal* is the end that the file would have without free pages. As many pages are free before
//! the goal as are in use after it. A first pass over all trees moves what lies after the goal to
//! free places before it (`tree/move_pages.rs`): values first, because they need places that are
//! long enough, and then nodes, which fit everywhere. If all pages have the length of a node, that
//! is all.
//!
//! Otherwise values may be left for which no place was long enough. One of them keeps the whole
//! file long. So if too much is left, further passes slide all nodes to the front, which joins the
//! places between them, and then values: first those after the goal, then all. They end when
//! nothing moves any more.
//!
//! *The end of the file* is cut off by a checkpoint (`PageStore::shorten_with_log`,
//! `StoreCore::shorten_without_log`). In the cut, changes stand still, and the pages of the free
//! map move, too. The header says how short the file may be. When it is durable, the file gets
//! shorter, but not shorter than its used part is by then, or than the header says. A crash before
//! finds the longer file that the header before describes. A crash afterwards may find a file that
//! is too long, which does no harm.
//!
//! *Meanwhile* other threads read and change the store. Each move is a change of its own. New pages
//! prefer the part of the file that stays. What other threads hold only stays where it is: values
//! in pieces that are read; pages of values that are being written, of bulk loads that have not
//! ended, and of dropped trees that views still see; pages that were freed and that a reader holds.

use std::ops::ControlFlow;
use std::sync::TryLockError;
use std::thread;
use std::time::{Duration, Instant};

use vellum_pool::{PAGE_SIZE, PageRef, Pool, Space};

use crate::error::{Error, Result};
use crate::store::Store;
use crate::store::callback::refuse_in_callback;
use crate::store::core::StoreCore;
use crate::store::cut::end_of;
use crate::tree::{CATALOG, Limit, Moves, TreeRef};

/// The most passes.
const PASSES_MAX: u32 = 8;

/// No pass follows the first one if the file is longer than its goal by at most this part of it...
const SLACK_PART: u64 = 64;

/// ...or by so many pages.
const SLACK_PAGES: u64 = 64;

/// How often a root that another thread holds is tried.
const ROOT_TRIES: u32 = 16;

/// How long a pass waits for writes of pages that were freed.
const WRITES_WAIT: Duration = Duration::from_millis(200);

/// How long to wait before the next look whether a backup has ended.
const BACKUP_PAUSE: Duration = Duration::from_millis(10);

/// The progress of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactProgress {
    /// The number of the pass over the store, from 1 on. Most stores need one.
    pub pass: u32,
    /// Pages of 4 KiB that this pass has looked at or past.
    pub pages_seen: u64,
    /// Pages of 4 KiB that the store uses.
    pub pages_total: u64,
    /// Pages of 4 KiB that have moved, in all passes.
    pub pages_moved: u64,
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// Length of the file in bytes before.
    pub bytes_before: u64,
    /// Length of the file in bytes afterwards.
    pub bytes_after: u64,
    /// Pages of 4 KiB that have moved. A page counts each time that it moves.
    pub pages_moved: u64,
    /// Pages of 4 KiB that lie after the end that the file could have without free pages: they
    /// could not move, or came meanwhile. 0 if the file has no free page left.
    pub pages_left: u64,
    /// False if the caller's function has ended the compaction early.
    pub is_complete: bool,
    /// Time that it took.
    pub duration: Duration,
}

impl Store {
    /// Returns the free space of the store's file to the file system: moves pages to the front of
    /// the file, and cuts the end off. Other threads read and change the store meanwhile.
    ///
    /// `progress` is told how far it is. If it returns [`Break`](ControlFlow::Break), nothing moves
    /// any more; the free end of the file is still cut off, and the report says that the compaction
    /// is not complete. What has moved stays where it is, and a later call goes on.
    ///
    /// Removed entries leave free pages, which the store uses again. So a compaction helps where a
    /// store has become much smaller and will stay so. It reads all trees, and writes what it
    /// moves: at most the pages in use, most often those in the end of the file, and in a store
    /// with a log about twice as much. If the free pages are in the end of the file already, it
    /// reads nothing. It does not join half-full pages: a dump and a load do that.
    ///
    /// Moves are changes without an effect: no snapshot sees them, and no transaction conflicts
    /// with them. With a log ([`Options::log`](crate::Options::log)), a crash at any moment loses
    /// nothing. Without one, a crash meanwhile is one in the midst of changes: the file may be
    /// refused. When this returns, all changes from before the call are durable.
    ///
    /// What stays where it is, and keeps the file longer: values for which no free place is long
    /// enough, or for which the pool is too small; values in pieces that have readers; pages of
    /// writers, of bulk loads and of views of dropped trees. [`CompactReport::pages_left`] counts
    /// them. A backup that is under way delays the end of the compaction.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use vellum::{Options, Store};
    ///
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("store");
    /// let store = Store::create(&path, &Options::new().pool_bytes(4 << 20))?;
    /// let tree = store.create_tree("measurements")?;
    /// for hour in 0..5000_u32 {
    ///     tree.upsert(&hour.to_be_bytes(), &[20; 500])?;
    /// }
    /// tree.remove_range(100_u32.to_be_bytes()..)?;
    /// let report = store.compact(&mut |_| ControlFlow::Continue(()))?;
    /// assert!(report.bytes_after < report.bytes_before / 10);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ReadOnly`](Error::ReadOnly), also for a store that is open for salvage;
    /// [`InUse`](Error::InUse) if another compaction is under way; damage, a failed read, write or
    /// sync, a full log. After an error the store has all of its entries, and what has moved
    /// stays where it is.
    pub fn compact(
        &self,
        progress: &mut dyn FnMut(CompactProgress) -> ControlFlow<()>,
    ) -> Result<CompactReport> {
        let pages = &self.core.pages;
        pages.check_process()?;
        pages.check_writable()?;
        refuse_in_callback(&pages.gate)?;
        let _alone = match self.core.compacting.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(alone)) => alone.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let what = "another compaction of this store is under way: wait until it has ended";
                return Err(Error::InUse(what.into()));
            }
        };
        let compaction =
            Compaction { store: self, progress, pass: 0, seen: 0, moved: 0, is_ended: false };
        compaction.run()
    }
}

/// A compaction that is under way.
struct Compaction<'a, 'p> {
    store: &'a Store,
    progress: &'p mut dyn FnMut(CompactProgress) -> ControlFlow<()>,
    pass: u32,
    /// Of this pass.
    seen: u64,
    moved: u64,
    /// The caller's function has ended it.
    is_ended: bool,
}

/// While this lives, new pages prefer places below the goal.
struct LowPages<'a>(&'a Pool);

impl Drop for LowPages<'_> {
    fn drop(&mut self) {
        self.0.prefer_below(0);
    }
}

impl Compaction<'_, '_> {
    fn run(mut self) -> Result<CompactReport> {
        let (began, pages) = (Instant::now(), &self.store.core.pages);
        let bytes_before = pages.pool.file_pages() * PAGE_SIZE as u64;
        let low = LowPages(&pages.pool);
        self.move_all()?;
        while !self.shorten()? {
            thread::sleep(BACKUP_PAUSE);
            if self.tell(0, self.moved).is_err() {
                self.is_ended = true;
                break;
            }
        }
        drop(low);
        let goal = pages.goal();
        Ok(CompactReport {
            bytes_before,
            bytes_after: pages.pool.file_pages() * PAGE_SIZE as u64,
            pages_moved: self.moved,
            pages_left: pages.pool.with_space(|space| space.allocated_from(goal)),
            is_complete: !self.is_ended,
            duration: began.elapsed(),
        })
    }

    /// Moves pages until the rest is not worth it, or does not move.
    fn move_all(&mut self) -> Result<()> {
        let pages = &self.store.core.pages;
        while self.pass < PASSES_MAX && !self.is_ended {
            self.free_waiting()?;
            let goal = pages.goal();
            let (left, end) = self.in_the_way(goal);
            let slack = (goal / SLACK_PART).max(SLACK_PAGES);
            if left == 0 || self.pass > 0 && end <= goal + slack {
                break;
            }
            pages.pool.prefer_below(goal);
            (self.pass, self.seen) = (self.pass + 1, 0);
            let before = self.moved;
            match self.run_pass(goal) {
                Err(Error::Cancelled) => self.is_ended = true,
                done => done?,
            }
            if self.pass > 1 && self.moved == before {
                break;
            }
        }
        Ok(())
    }

    /// Makes all places free that only wait for the log, or for a thread that has let go by now.
    fn free_waiting(&self) -> Result<()> {
        let pages = &self.store.core.pages;
        pages.try_reclaim_unlinked();
        if let Some(log) = &pages.redo_log {
            pages.sync_log(log)?;
        }
        // The pool may be writing some of them just now. Readers may hold others for long.
        let until = Instant::now() + WRITES_WAIT;
        while pages.pool.frames_to_free() > 0 && Instant::now() < until {
            pages.pool.wait_for_writes();
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// How many pages are in use after the goal, and the end of the last page in use. The pages of
    /// the free map do not count: the checkpoint at the end moves them.
    fn in_the_way(&self, goal: u64) -> (u64, u64) {
        let maps = self.map_places();
        let after = |place: &PageRef| (end_of(&[*place])).saturating_sub(goal.max(place.id.0));
        let of_maps: u64 = maps.iter().map(after).sum();
        self.store.core.pages.pool.with_space(|space| {
            let tail = space.last_free().filter(|(start, count)| start + count == space.end());
            let end = tail.map_or(space.end(), |(start, _)| start);
            (space.allocated_from(goal).saturating_sub(of_maps), end)
        })
    }

    fn map_places(&self) -> Vec<PageRef> {
        match &self.store.core.pages.redo_log {
            Some(log) => {
                let maps = log.lock_maps();
                [&maps.newest[..], &maps.next].concat()
            }
            None => self.store.core.checkpoint_lock().places().to_vec(),
        }
    }

    fn run_pass(&mut self, goal: u64) -> Result<()> {
        match self.pass {
            1 => {
                self.each_tree(Limit::Below(goal), |_, tree, moves| tree.move_values(moves))?;
                self.move_nodes(Limit::Below(goal))
            }
            pass => {
                self.move_nodes(Limit::Forward(0))?;
                self.free_waiting()?;
                let limit = Limit::Forward(if pass == 2 { goal } else { 0 });
                self.each_tree(limit, |_, tree, moves| tree.move_values(moves))
            }
        }
    }

    fn move_nodes(&mut self, limit: Limit) -> Result<()> {
        self.each_tree(limit, |core, tree, moves| {
            tree.move_nodes(moves)?;
            move_root(core, tree, moves)
        })
    }

    /// Calls `work` with each tree, the catalog first.
    fn each_tree(
        &mut self,
        limit: Limit,
        work: impl Fn(&StoreCore, TreeRef<'_>, &mut Moves<'_>) -> Result<()>,
    ) -> Result<()> {
        let core = &self.store.core;
        let mut trees = vec![core.catalog.clone()];
        for name in self.store.trees()? {
            match core.open_tree(&name) {
                Err(Error::NoSuchTree(_)) => {}
                tree => trees.push(tree?),
            }
        }
        for tree in trees {
            let before = self.moved;
            let mut on_seen = |frames, moved| self.tell(frames, before + moved);
            let mut moves = Moves { limit, moved: 0, on_seen: &mut on_seen };
            let done = work(core, TreeRef { pages: &core.pages, state: &tree }, &mut moves);
            self.moved = before + moves.moved;
            match done {
                // It was dropped meanwhile.
                Err(Error::NoSuchTree(_)) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// Tells the caller's function that the pass has seen so many more frames.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the function ends the compaction.
    fn tell(&mut self, frames: u64, moved: u64) -> Result<()> {
        let space = |space: &Space| space.first() + space.allocated_pages();
        let total = self.store.core.pages.pool.with_space(space);
        self.seen += frames;
        let progress = CompactProgress {
            pass: self.pass,
            // Other threads may free what was seen.
            pages_seen: self.seen.min(total),
            pages_total: total,
            pages_moved: moved,
        };
        match (self.progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Cancelled),
        }
    }

    /// Cuts the free end of the file off, if there is one, and makes all changes durable. Returns
    /// false while a backup is in the way.
    fn shorten(&self) -> Result<bool> {
        let (core, goal) = (&self.store.core, self.store.core.pages.goal());
        let pool = &core.pages.pool;
        let (_, end) = self.in_the_way(goal);
        if pool.file_pages() <= end && end_of(&self.map_places()) <= goal {
            return core.sync().map(|()| true);
        }
        match &core.pages.redo_log {
            Some(log) => core.pages.shorten_with_log(log),
            None => core.shorten_without_log().map(|()| true),
        }
    }
}

/// Moves the root of a tree, unless that is the catalog: its root is the first page of the file.
fn move_root(core: &StoreCore, tree: TreeRef<'_>, moves: &mut Moves<'_>) -> Result<()> {
    if tree.state.id == CATALOG {
        return Ok(());
    }
    for _ in 0..ROOT_TRIES {
        let Some(bound) = moves.limit.bound(tree.root_page()) else { break };
        if core.move_root(tree.state, bound)? {
            moves.moved += u64::from(core.pages.page_frames);
            break;
        }
    }
    Ok(())
}
