//! Checkpoints of a store without a log: from changed pages in memory to a clean file
//! (`Store::sync`, `Store::close`). Those of a store with a log are in `store/cut.rs`.
//!
//! The checkpoint freezes changes only for the *cut*. There it determines what it will write. It
//! writes that while changes go on.
//!
//! If few pages changed, and none of them was written since the last clean header, the cut copies
//! them. The checkpoint first writes a header with a list of these pages and their checksums. The
//! header says that the file is clean if each page matches the list. Then the checkpoint writes the
//! pages. After a crash, opening the store compares the pages with the list. This takes two syncs
//! of the device.
//!
//! Otherwise the checkpoint marks the file in use. It writes most pages before the cut, while
//! changes go on, and the rest in the cut. It writes the free map and a clean header last.
//!
//! From the cut to its end, the checkpoint pauses the pool's writes. It also writes the free map as
//! of the cut: a snapshot of the space, which shares chunks with the live one. In that map,
//! unlinked pages and pages that wait to be freed count as free. The map's pages lie in places that
//! the pool does not use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_pool::{PageCopy, PageRef};

use crate::error::{Error, Result};
use crate::page::checksum_of;
use crate::redo::log::MapPlaces;
use crate::store::at_exit;
use crate::store::callback::refuse_in_callback;
use crate::store::core::{StoreCore, Views};
use crate::store::cut::{BackupCut, decode_space};
use crate::store::file::{Checkpoints, PausedWrites};
use crate::store::free_map::{self, FileMap, FreeMap};
use crate::store::gate::Freeze;
use crate::store::header::{Header, LISTED_FRAMES_MAX, LISTED_MAX, Listed};
use crate::sync::lock;

/// The data that a checkpoint writes.
struct CheckpointData<'a> {
    paused: PausedWrites<'a>,
    header: Header,
    /// Copies of the changed pages; `None` if the checkpoint has written the pages in the cut.
    pages: Option<Vec<PageCopy>>,
    /// `None` if the file has this map already.
    map: Option<FreeMap>,
}

/// Marks the store changed again when it is dropped. A checkpoint that succeeds forgets it. An
/// error, or a panic of the device, drops it.
struct ChangedUnlessSaved<'a>(&'a AtomicBool);

impl Drop for ChangedUnlessSaved<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl StoreCore {
    /// While the result lives, no checkpoint is under way.
    pub(crate) fn checkpoint_lock(&self) -> MutexGuard<'_, Checkpoints> {
        lock(&self.checkpoints)
    }

    /// Makes all earlier changes durable. One checkpoint serves all threads that called this before
    /// its cut.
    pub(crate) fn sync(&self) -> Result<()> {
        self.pages.check_process()?;
        self.pages.check_writable()?;
        // Before taking the lock: a checkpoint that holds it may be waiting for this thread's
        // change.
        refuse_in_callback(&self.pages.gate)?;
        if let Some(log) = &self.pages.redo_log {
            return self.pages.sync_log(log);
        }
        let Some(_leader) = self.commits.lead(self.commits.next_cut()) else { return Ok(()) };
        let mut checkpoints = self.checkpoint_lock();
        self.pages.check_writable()?;
        if !self.pages.is_changed() {
            return Ok(());
        }
        self.write_most()?;
        let freeze = self.pages.freeze_to_save()?;
        self.pages.reclaim_unlinked();
        let number = self.commits.cut();
        let cut = self.cut(&freeze, &mut checkpoints)?;
        drop(freeze);
        drop(self.write_cut(cut, &mut checkpoints)?);
        self.commits.save(number);
        Ok(())
    }

    /// Makes everything durable and truncates the file's unused tail. Afterwards the file has a
    /// header without a list, and no page has a header of a later version: older programs can read
    /// the file.
    fn sync_and_trim(
        &self,
        freeze: &Freeze<'_>,
        checkpoints: &mut Checkpoints,
        maps: Option<&mut MapPlaces>,
    ) -> Result<()> {
        let file = &self.pages.file;
        if let (Some(log), Some(maps)) = (&self.pages.redo_log, maps) {
            self.pages.end_log(log, freeze, maps)?;
            return file.replace_later_version(&file.pause_writes());
        }
        self.pages.check_writable()?;
        self.pages.reclaim_unlinked();
        if !self.pages.is_changed() && !self.has_free_tail() {
            let (paused, header) = (file.pause_writes(), file.header());
            if header.listed > 0 {
                file.write_clean(&paused, header, &[])?;
            }
            return file.replace_later_version(&paused);
        }
        // From here on a failure leaves a file in use.
        self.pages.changed.store(true, Ordering::Release);
        file.mark_in_use()?;
        // After this, the pages that were freed during their write-back are free.
        self.pages.pool.sync()?;
        // The old map may lie in the tail.
        checkpoints.map_of = None;
        while let Some(place) = checkpoints.places.pop() {
            self.pages.pool.free_place(place)?;
        }
        self.allocate_places(&mut checkpoints.places)?;
        self.pages.pool.trim()?;
        // After trimming, which may free pages that a reader held until now.
        let number = self.commits.cut();
        let cut = self.cut(freeze, checkpoints)?;
        let paused = self.write_cut(cut, checkpoints)?;
        self.commits.save(number);
        file.replace_later_version(&paused)
    }

    /// Whether the file ends with unused pages.
    fn has_free_tail(&self) -> bool {
        let file_pages = self.pages.pool.file_pages();
        self.pages.pool.with_space(|space| {
            let last = space.last_free();
            file_pages > space.end()
                || last.is_some_and(|(start, count)| start + count == space.end())
        })
    }

    /// Determines what the checkpoint writes.
    fn cut(
        &self,
        _freeze: &Freeze<'_>,
        checkpoints: &mut Checkpoints,
    ) -> Result<CheckpointData<'_>> {
        let map = self.cut_map(checkpoints)?;
        let places = map.as_ref().map_or(&[][..], |_| &checkpoints.places);
        let frames = places.len() as u64 * u64::from(self.pages.page_frames);
        let mut paused = self.pages.file.pause_writes();
        let room = (LISTED_MAX.checked_sub(places.len()), LISTED_FRAMES_MAX.checked_sub(frames));
        let pages = match room {
            (Some(pages), Some(frames)) if !self.pages.file.is_in_use() => {
                self.pages.pool.copy_dirty(pages, frames)?
            }
            _ => None,
        };
        if pages.is_none() {
            drop(paused);
            self.pages.file.mark_in_use()?;
            self.pages.pool.write_dirty()?;
            paused = self.pages.file.pause_writes();
        }
        let header = Header {
            free_map: checkpoints.places.first().map_or(0, |page| page.id.0),
            changes: false,
            file_pages: self.pages.pool.file_pages(),
            ..self.pages.file.header()
        };
        self.pages.changed.store(false, Ordering::Release);
        Ok(CheckpointData { paused, header, pages, map })
    }

    /// The current free map, with places for it. `None` if the file has this map already.
    fn cut_map(&self, checkpoints: &mut Checkpoints) -> Result<Option<FreeMap>> {
        let map = self.pages.free_map(&[]);
        if map.given_back.is_empty() && checkpoints.map_of == Some(map.space.generation()) {
            return Ok(None);
        }
        Ok(Some(self.allocate_places(&mut checkpoints.places)?))
    }

    /// Allocates more places until the free map fits into all of them. Returns that map.
    fn allocate_places(&self, places: &mut Vec<PageRef>) -> Result<FreeMap> {
        loop {
            // An allocation takes pages from the free ranges, so the map does not grow.
            let map = self.pages.free_map(&[]);
            if map.pages(self.pages.page_frames) <= places.len() {
                return Ok(map);
            }
            places.push(self.pages.pool.allocate_place(self.pages.page_frames)?);
        }
    }

    /// Writes the data of a cut, while changes go on. The pool writes no page as long as the result
    /// lives.
    fn write_cut<'a>(
        &'a self,
        cut: CheckpointData<'a>,
        checkpoints: &mut Checkpoints,
    ) -> Result<PausedWrites<'a>> {
        let guard = ChangedUnlessSaved(&self.pages.changed);
        let paused = self.try_write_cut(cut, checkpoints)?;
        std::mem::forget(guard);
        Ok(paused)
    }

    fn try_write_cut<'a>(
        &'a self,
        cut: CheckpointData<'a>,
        checkpoints: &mut Checkpoints,
    ) -> Result<PausedWrites<'a>> {
        let CheckpointData { paused, header, pages, map } = cut;
        let mut map_of = checkpoints.map_of;
        let map = map.map_or_else(Vec::new, |map| {
            checkpoints.map_of = None;
            map_of = map.given_back.is_empty().then(|| map.space.generation());
            free_map::pages(&map.encode(), &checkpoints.places)
        });
        match pages {
            Some(pages) => {
                let listed: Vec<_> = pages.iter().chain(&map).map(listed).collect();
                self.pages.file.write_clean(&paused, header, &listed)?;
                self.pages.pool.write_copies(&pages)?;
                self.pages.pool.write_copies(&map)?;
                if !listed.is_empty() {
                    self.pages.pool.sync_device()?;
                }
                self.pages.pool.clear_dirty_if_unchanged(&pages);
            }
            None => {
                self.pages.pool.write_copies(&map)?;
                self.pages.pool.sync_device()?;
                self.pages.file.write_clean(&paused, header, &[])?;
            }
        }
        checkpoints.map_of = map_of;
        Ok(paused)
    }

    /// Writes a checkpoint of a store without a log, from which a backup begins: the file is the
    /// store as of the cut as long as the pool's writes are paused.
    pub(crate) fn cut_to_copy(
        &self,
        checkpoints: &mut Checkpoints,
    ) -> Result<(BackupCut, PausedWrites<'_>)> {
        self.pages.check_writable()?;
        self.write_most()?;
        let freeze = self.pages.freeze_to_save()?;
        self.pages.reclaim_unlinked();
        let number = self.commits.cut();
        let cut = self.cut(&freeze, checkpoints)?;
        let space = decode_space(self.pages.free_map(&[]))?;
        drop(freeze);
        let paused = self.write_cut(cut, checkpoints)?;
        self.commits.save(number);
        let header = self.pages.file.header();
        let map = FileMap { places: checkpoints.places.clone(), ..FileMap::of_space(space) };
        Ok((BackupCut { header, map, held: None, under_way: None }, paused))
    }

    /// Writes a checkpoint of a store without a log after which the file may be as short as its
    /// used part, and cuts the rest off, while changes go on.
    pub(crate) fn shorten_without_log(&self) -> Result<()> {
        let mut checkpoints = self.checkpoint_lock();
        self.pages.check_writable()?;
        self.write_most()?;
        let freeze = self.pages.freeze_to_save()?;
        self.pages.reclaim_unlinked();
        // The newest header may describe the map in these places. No page is written to them before
        // a newer header is durable: before the cut changes stand still, and from the cut on the
        // pool's writes are paused.
        checkpoints.map_of = None;
        while let Some(place) = checkpoints.places.pop() {
            self.pages.pool.free_place(place)?;
        }
        while self.pages.free_map(&[]).pages(self.pages.page_frames) > checkpoints.places.len() {
            checkpoints.places.push(self.pages.allocate_low_place()?);
        }
        self.pages.pool.trim_space()?;
        let number = self.commits.cut();
        let mut cut = self.cut(&freeze, &mut checkpoints)?;
        // The file gets shorter only when this header is durable.
        cut.header.file_pages = self.pages.pool.end();
        let file_pages = cut.header.file_pages;
        drop(freeze);
        drop(self.write_cut(cut, &mut checkpoints)?);
        self.commits.save(number);
        // While this thread holds the lock, no checkpoint notes the length of the file.
        self.pages.pool.trim_to(file_pages)?;
        Ok(())
    }

    /// If many pages are dirty, writes them before the cut, while changes go on.
    fn write_most(&self) -> Result<()> {
        if self.pages.pool.dirty_pages() > LISTED_MAX {
            self.pages.file.mark_in_use()?;
            self.pages.pool.write_dirty()?;
        }
        Ok(())
    }

    /// Writes a checkpoint, refuses all later operations, and unlocks the file.
    pub(crate) fn close(&self) -> Result<()> {
        self.close_for(Views::GoOn)
    }

    fn close_for(&self, views: Views) -> Result<()> {
        self.pages.check_process()?;
        refuse_in_callback(&self.pages.gate)?;
        // A request of another process that holds the lock looks at this, and ends.
        self.closing.store(true, Ordering::Release);
        let mut checkpoints = self.checkpoint_lock();
        let freeze = self.pages.freeze();
        let closed = freeze.and_then(|freeze| self.close_frozen(&freeze, &mut checkpoints, views));
        self.closing.store(false, Ordering::Release);
        drop(checkpoints);
        self.wait_callbacks();
        closed
    }

    /// Waits until the callbacks of commits have returned that are due now. They may use the store,
    /// so the caller holds no lock of it.
    pub(crate) fn wait_callbacks(&self) {
        self.waits_for_callbacks.store(true, Ordering::Release);
        self.pages.redo_log.iter().for_each(|log| log.wait_callers());
        self.waits_for_callbacks.store(false, Ordering::Release);
    }

    /// As [`close`](Self::close), for a caller that has frozen the gate, and
    /// [waits for the callbacks](Self::wait_callbacks) of commits afterwards. All are due then.
    pub(crate) fn close_frozen(
        &self,
        freeze: &Freeze<'_>,
        checkpoints: &mut Checkpoints,
        views: Views,
    ) -> Result<()> {
        if self.pages.file.is_closed() {
            return Ok(());
        }
        let outcome = match self.pages.check_writable() {
            Err(Error::ReadOnly) => Ok(()),
            _ => self.save_and_free_dropped_trees(freeze, checkpoints, views),
        };
        if let (Err(_), Some(log)) = (&outcome, &self.pages.redo_log) {
            log.settle(freeze);
        }
        // If space or memory ran out, the caller can still save the changes. So the store stays
        // open, unless it is poisoned.
        if outcome.is_ok() || self.pages.check_writable().is_err() {
            self.pages.file.close();
        }
        match &outcome {
            Ok(()) => {
                // All pages are saved and no change can begin. `StoreFormat::verify` looks at the
                // mark of `close` after each read, and refuses pages that are read from now on. No
                // write is under way: the checkpoint's sync waited for those, and found none that
                // failed.
                // First: the next process to open the file finds it without a log.
                self.pages.redo_log.iter().for_each(|log| log.remove());
                self.pages.device.unlock();
            }
            // The log stays for the recovery.
            Err(_) if self.pages.file.is_closed() => {
                self.pages.redo_log.iter().for_each(|log| log.stop());
            }
            Err(_) => {}
        }
        outcome
    }

    /// Writes the last checkpoint, without the pages of dropped trees that views still see.
    fn save_and_free_dropped_trees(
        &self,
        freeze: &Freeze<'_>,
        checkpoints: &mut Checkpoints,
        views: Views,
    ) -> Result<()> {
        // Ends a checkpoint of the log that is under way. Its cut must not come amid the frees: the
        // free map and the records from the cut on would not fit together. The checkpoint can
        // freeze the gate as well, so it does not wait for this thread.
        let log = self.pages.redo_log.as_ref();
        let mut maps = log.map(|log| log.lock_maps());
        // If this fails, the store stays open, and the views go on.
        if views == Views::GoOn && self.has_dropped_trees() {
            self.save_frozen(freeze, checkpoints, maps.as_deref_mut())?;
        }
        // Also without dropped trees: the change has the checkpoint write the free map again, and
        // the map may be what keeps the file long.
        if let Ok(change) = self.pages.change_frozen(freeze) {
            self.free_dropped_trees_in(&change, true);
        }
        self.sync_and_trim(freeze, checkpoints, maps.as_deref_mut())
    }

    /// Writes a checkpoint with the pages of dropped trees that views still see.
    fn save_frozen(
        &self,
        freeze: &Freeze<'_>,
        checkpoints: &mut Checkpoints,
        maps: Option<&mut MapPlaces>,
    ) -> Result<()> {
        if let (Some(log), Some(maps)) = (&self.pages.redo_log, maps) {
            return self.pages.write_cut_frozen(log, freeze, maps);
        }
        self.pages.check_writable()?;
        self.pages.reclaim_unlinked();
        let number = self.commits.cut();
        let cut = self.cut(freeze, checkpoints)?;
        drop(self.write_cut(cut, checkpoints)?);
        self.commits.save(number);
        Ok(())
    }

    /// Whether the store can be dropped without writing anything.
    pub(crate) fn is_saved(&self) -> bool {
        let file = &self.pages.file;
        let is_changed =
            self.pages.is_changed() || file.header().listed > 0 || file.has_later_version();
        file.is_closed() || !is_changed
    }
}

impl Drop for StoreCore {
    /// Dropping the last handle closes the store, even while a panic unwinds the thread.
    ///
    /// This is sound. Pages change only within a `Change`, and an operation is one change or
    /// several independent ones. If the code of the engine, the pool or the device panicked within
    /// a change, the store is poisoned and the file stays as it is. If a callback panicked, it saw
    /// only copies, and the change has undone itself. In all other cases the changes have ended, so
    /// the pages are consistent.
    fn drop(&mut self) {
        if self.pages.check_process().is_ok() {
            // Waits for the threads, which a child of this process does not have.
            drop((self.late_redo.take(), self.cutter.take()));
        } else {
            std::mem::forget((self.late_redo.take(), self.cutter.take()));
        }
        if !self.is_saved() && !self.salvage {
            // A panic that left this destructor during another panic would abort the process.
            // Views hold the store, so there is none.
            match catch_unwind(AssertUnwindSafe(|| self.close_for(Views::End))) {
                Ok(Ok(()) | Err(Error::ReadOnly)) => {}
                Ok(Err(error)) => tracing::error!("closing the store failed: {error}"),
                Err(_) => tracing::error!("closing the store panicked"),
            }
        }
        // The pool's threads may keep the log for a moment longer. The next opening of the store
        // shall have it.
        if self.pages.check_process().is_ok() {
            self.pages.redo_log.iter().for_each(|log| log.stop());
            self.wait_callbacks();
        }
        at_exit::unregister(self);
    }
}

fn listed(copy: &PageCopy) -> Listed {
    Listed { page: copy.page(), checksum: checksum_of(copy.bytes()) }
}
