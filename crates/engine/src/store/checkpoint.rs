//! Checkpoints: from changed pages in memory to a clean file (`Store::sync`, `Store::close`).
//!
//! Changes stand still only for the *cut*: what the checkpoint writes is fixed there. It is written
//! while changes go on.
//!
//! Of few changed pages, none of which was written since the last clean header, the cut is a copy.
//! The header goes first, with a list of these pages and their checksums; it says that the file is
//! clean once each of them is as the list says. Then the pages follow. Whatever a crash leaves,
//! opening compares the pages with the list. That takes two syncs of the device.
//!
//! Otherwise the file is marked in use, most pages are written before the cut, while changes go on,
//! and the rest in the cut. The free map and a clean header follow.
//!
//! From the cut to the end the file is barred: the pool writes no page. The free map is that of
//! the cut, too: the space then (a snapshot that shares chunks with the live one), without the
//! pages that are set aside or wait to be freed. It goes to places that the pool does not use.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_pool::{PageCopy, PageRef, SpaceSnapshot};

use crate::error::{Error, Result};
use crate::page::checksum_of;
use crate::store::at_exit;
use crate::store::core::StoreCore;
use crate::store::file::{Bar, Checkpoints};
use crate::store::free_map;
use crate::store::gate::Hold;
use crate::store::header::{Header, LISTED_FRAMES_MAX, LISTED_MAX, Listed};
use crate::store::within::refuse_within;

/// The free map to be written.
struct Map {
    space: SpaceSnapshot,
    /// Ranges that are free in the file, though not yet in memory.
    given_back: Vec<(u64, u64)>,
}

/// What a checkpoint writes.
struct Cut<'a> {
    bar: Bar<'a>,
    header: Header,
    /// The changed pages; none if they are written already.
    pages: Option<Vec<PageCopy>>,
    /// None if the one in the file is right.
    map: Option<Map>,
}

/// Unless it is forgotten, what was cut counts as changed again: an error, or a panic of the
/// device, has ended its checkpoint.
struct Unsaved<'a>(&'a AtomicBool);

impl Drop for Unsaved<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl StoreCore {
    /// No checkpoint is under way while the result lives.
    pub(crate) fn checkpoint_lock(&self) -> MutexGuard<'_, Checkpoints> {
        self.checkpoints.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Makes everything durable that was changed before the call. One checkpoint serves all threads
    /// that came before its cut.
    pub(crate) fn sync(&self) -> Result<()> {
        self.pages.check_process()?;
        self.pages.check_writable()?;
        // Before the lock: a checkpoint that has it may be waiting for this thread's change.
        refuse_within(&self.pages.gate)?;
        let Some(_leader) = self.commits.lead(self.commits.next_cut()) else { return Ok(()) };
        let mut checkpoints = self.checkpoint_lock();
        self.pages.check_writable()?;
        if !self.pages.is_changed() {
            return Ok(());
        }
        if self.pages.pool.dirty_pages() > LISTED_MAX {
            self.pages.file.mark_in_use()?;
            self.pages.pool.write_dirty()?;
        }
        let hold = self.pages.hold()?;
        self.pages.free_ended();
        let number = self.commits.cut();
        let cut = self.cut(&hold, &mut checkpoints)?;
        drop(hold);
        self.write_cut(cut, &mut checkpoints)?;
        self.commits.save(number);
        Ok(())
    }

    /// Makes everything durable and gives the file's unused tail back. Afterwards the file has a
    /// header without a list, which programs read that know no lists.
    fn sync_and_trim(&self, hold: &Hold<'_>, checkpoints: &mut Checkpoints) -> Result<()> {
        self.pages.check_writable()?;
        self.pages.free_ended();
        if !self.pages.is_changed() && !self.has_free_tail() {
            let header = self.pages.file.header();
            return match header.listed {
                0 => Ok(()),
                _ => self.pages.file.write_clean(&self.pages.file.bar(), header, &[]),
            };
        }
        // From here on a failure leaves a file in use.
        self.pages.changed.store(true, Ordering::Release);
        self.pages.file.mark_in_use()?;
        // Pages that were being written back when they were freed are free after this.
        self.pages.pool.sync()?;
        // The map may be in the way of the file's new end.
        checkpoints.map_of = None;
        while let Some(place) = checkpoints.places.pop() {
            self.pages.pool.free_place(place)?;
        }
        self.allocate_places(&mut checkpoints.places)?;
        self.pages.pool.trim()?;
        // After the trimming: that may free pages which a reader held until now.
        let number = self.commits.cut();
        let cut = self.cut(hold, checkpoints)?;
        self.write_cut(cut, checkpoints)?;
        self.commits.save(number);
        Ok(())
    }

    /// The file ends with pages that are not in use.
    fn has_free_tail(&self) -> bool {
        let file_pages = self.pages.pool.file_pages();
        self.pages.pool.with_space(|space| {
            let last = space.last_free();
            file_pages > space.end()
                || last.is_some_and(|(start, count)| start + count == space.end())
        })
    }

    /// Fixes what a checkpoint writes.
    fn cut(&self, _hold: &Hold<'_>, checkpoints: &mut Checkpoints) -> Result<Cut<'_>> {
        let map = self.cut_map(checkpoints)?;
        let places = map.as_ref().map_or(&[][..], |_| &checkpoints.places);
        let frames = places.len() as u64 * u64::from(self.pages.page_frames);
        let mut bar = self.pages.file.bar();
        let room = (LISTED_MAX.checked_sub(places.len()), LISTED_FRAMES_MAX.checked_sub(frames));
        let pages = match room {
            (Some(pages), Some(frames)) if !self.pages.file.is_in_use() => {
                self.pages.pool.copy_dirty(pages, frames)?
            }
            _ => None,
        };
        if pages.is_none() {
            drop(bar);
            self.pages.file.mark_in_use()?;
            self.pages.pool.write_dirty()?;
            bar = self.pages.file.bar();
        }
        let header = Header {
            free_map: checkpoints.places.first().map_or(0, |page| page.id.0),
            file_pages: self.pages.pool.file_pages(),
            ..self.pages.file.header()
        };
        self.pages.changed.store(false, Ordering::Release);
        Ok(Cut { bar, header, pages, map })
    }

    /// The free map as it is, and places for it. None if the file has it.
    fn cut_map(&self, checkpoints: &mut Checkpoints) -> Result<Option<Map>> {
        let map = self.map();
        if map.given_back.is_empty() && checkpoints.map_of == Some(map.space.generation()) {
            return Ok(None);
        }
        Ok(Some(self.allocate_places(&mut checkpoints.places)?))
    }

    /// The free map as it is.
    fn map(&self) -> Map {
        let (space, mut given_back) = self.pages.pool.snapshot_space();
        given_back.extend(self.pages.aside.ranges());
        Map { space, given_back }
    }

    /// Allocates places besides those that there are, for the free map as it will be then. That
    /// map fits them.
    fn allocate_places(&self, places: &mut Vec<PageRef>) -> Result<Map> {
        loop {
            // Allocating takes from the ranges, so the map does not grow by it.
            let map = self.map();
            let len = map.space.encoded_len_max(map.given_back.len());
            if free_map::pages_for(len, self.pages.page_frames) <= places.len() {
                return Ok(map);
            }
            places.push(self.pages.pool.allocate_place(self.pages.page_frames)?);
        }
    }

    /// Writes what was cut, while changes go on.
    fn write_cut(&self, cut: Cut<'_>, checkpoints: &mut Checkpoints) -> Result<()> {
        let unsaved = Unsaved(&self.pages.changed);
        self.try_write_cut(cut, checkpoints)?;
        std::mem::forget(unsaved);
        Ok(())
    }

    fn try_write_cut(&self, cut: Cut<'_>, checkpoints: &mut Checkpoints) -> Result<()> {
        let Cut { bar, header, pages, map } = cut;
        let mut map_of = checkpoints.map_of;
        let map = map.map_or_else(Vec::new, |Map { space, given_back }| {
            checkpoints.map_of = None;
            map_of = given_back.is_empty().then(|| space.generation());
            free_map::pages(&space.encode(given_back), &checkpoints.places)
        });
        match pages {
            Some(pages) => {
                let listed: Vec<_> = pages.iter().chain(&map).map(listed).collect();
                self.pages.file.write_clean(&bar, header, &listed)?;
                self.pages.pool.write_copies(&pages)?;
                self.pages.pool.write_copies(&map)?;
                if !listed.is_empty() {
                    self.pages.pool.sync_device()?;
                }
                self.pages.pool.settle_copies(&pages);
            }
            None => {
                self.pages.pool.write_copies(&map)?;
                self.pages.pool.sync_device()?;
                self.pages.file.write_clean(&bar, header, &[])?;
            }
        }
        checkpoints.map_of = map_of;
        Ok(())
    }

    /// Checkpoints, refuses everything afterwards, and lets others have the file.
    pub(crate) fn close(&self) -> Result<()> {
        self.pages.check_process()?;
        refuse_within(&self.pages.gate)?;
        let mut checkpoints = self.checkpoint_lock();
        let hold = self.pages.hold()?;
        self.close_held(&hold, &mut checkpoints)
    }

    /// As [`close`](Self::close), by a holder of the gate.
    pub(crate) fn close_held(&self, hold: &Hold<'_>, checkpoints: &mut Checkpoints) -> Result<()> {
        if self.pages.file.is_closed() {
            return Ok(());
        }
        let outcome = match self.pages.check_writable() {
            Err(Error::ReadOnly) => Ok(()),
            _ => self.sync_and_trim(hold, checkpoints),
        };
        // What could not be saved for want of space or memory can be saved yet: the store stays
        // open, unless it is poisoned.
        if outcome.is_ok() || self.pages.check_writable().is_err() {
            self.pages.file.close();
        }
        if outcome.is_ok() {
            // All pages are as the file has them, no change comes any more, and what is read from
            // the file after this is refused: the mark is set, and looked at after each read. A
            // page that the checkpoint wrote may be on its way to the file once more.
            self.pages.pool.wait_for_writes();
            self.pages.device.unlock();
        }
        outcome
    }

    /// Nothing has to be written before the store can go.
    pub(crate) fn is_settled(&self) -> bool {
        let is_changed = self.pages.is_changed() || self.pages.file.header().listed > 0;
        self.pages.file.is_closed() || !is_changed
    }
}

impl Drop for StoreCore {
    /// Dropping the last handle closes the store, also while a panic unwinds the thread.
    ///
    /// That is sound: pages change within a `Change` alone, and each operation is one, or several
    /// that are whole for themselves. If the panic came from the engine's own code within a change,
    /// or from that of a pool or device below it, the store is poisoned, and stays as the file has
    /// it. If it came from the caller's code, that saw copies, and the change has undone itself. In
    /// any other case all changes that began have ended, so the pages fit together.
    fn drop(&mut self) {
        if !self.is_settled() && !self.salvage {
            // A panic within a panic would end the process if it left a destructor.
            match catch_unwind(AssertUnwindSafe(|| self.close())) {
                Ok(Ok(()) | Err(Error::ReadOnly)) => {}
                Ok(Err(error)) => tracing::error!("closing the store failed: {error}"),
                Err(_) => tracing::error!("closing the store panicked"),
            }
        }
        at_exit::leave(self);
    }
}

fn listed(copy: &PageCopy) -> Listed {
    Listed { page: copy.page(), checksum: checksum_of(copy.bytes()) }
}
