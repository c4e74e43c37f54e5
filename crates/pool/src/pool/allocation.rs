//! Allocating and freeing pages of the file.

use std::sync::atomic::Ordering;

use crate::core::is_disk_full;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, State};
use crate::pool::Pool;
use crate::pool::guard::ExclusiveGuard;
use crate::space::SpaceSnapshot;
use crate::statistics::counters::Event;
use crate::sync::lock;

/// The file grows by an eighth, by at most so many pages at once (64 MiB), at least by so many.
const GROWTH_MAX: u64 = 16_384;
const GROWTH_MIN: u64 = 16;

impl Pool {
    /// Allocates a page of `frames` frames, zeroed, held exclusively and dirty.
    ///
    /// # Errors
    /// [`PoolError::DiskFull`] and [`PoolError::Exhausted`] among others; then nothing changed.
    pub fn allocate(&self, frames: u32) -> Result<ExclusiveGuard<'_>, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        let capacity = self.core.budget.capacity();
        if frames == 0 || u64::from(frames) > capacity || frames > PageRef::MAX_FRAMES {
            return Err(PoolError::PageTooLarge { page: PageRef::new(0, frames), capacity });
        }
        let reserved = self.eviction.reserve(PageRef::new(0, frames))?;
        let start = lock(&self.space).allocate(u64::from(frames));
        let page = PageRef::new(start, frames);
        if let Err(error) = self.make_room(start + u64::from(frames), frames) {
            self.give_place_up(page)?;
            return Err(error);
        }
        match self.core.claim_unallocated(page) {
            Err(error @ PoolError::Populate { .. }) => {
                self.give_place_up(page)?;
                return Err(error);
            }
            // No valid reference leads to it or into it. If any of its frames is in use all the
            // same, the file is damaged, and the range stays allocated so that nothing is
            // overwritten.
            claimed => claimed?,
        }
        reserved.keep();
        self.core.admit(page);
        self.core.counters.count(Event::Allocate);
        Ok(ExclusiveGuard::new(&self.core, self.core.held(page), page, true))
    }

    /// Allocates the place of a page that the caller writes past the pool; see
    /// [`write_copies`](Pool::write_copies). The pool never reads or writes it.
    ///
    /// # Errors
    /// [`PoolError::DiskFull`] among others; then nothing changed.
    pub fn allocate_place(&self, frames: u32) -> Result<PageRef, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        let start = lock(&self.space).allocate(u64::from(frames));
        let page = PageRef::new(start, frames);
        match self.make_room(start + u64::from(frames), frames) {
            Ok(()) => Ok(page),
            Err(error) => {
                self.give_place_up(page)?;
                Err(error)
            }
        }
    }

    /// Frees a place from [`allocate_place`](Pool::allocate_place), or one that was such a place
    /// when the file was written.
    pub fn free_place(&self, page: PageRef) -> Result<(), PoolError> {
        self.check_writable()?;
        Ok(lock(&self.space).free(page.id.0, u64::from(page.frames))?)
    }

    /// Gives the place of a page back that did not come to be.
    fn give_place_up(&self, page: PageRef) -> Result<(), PoolError> {
        let mut space = lock(&self.space);
        space.free(page.id.0, u64::from(page.frames))?;
        space.trim();
        Ok(())
    }

    /// Makes file, surface and page states reach to page `end`.
    fn make_room(&self, end: u64, frames: u32) -> Result<(), PoolError> {
        if end <= self.file_pages.load(Ordering::Acquire) {
            return Ok(());
        }
        let _growing = lock(&self.growing);
        let pages = self.file_pages.load(Ordering::Acquire);
        if end <= pages {
            return Ok(());
        }
        let generous = end.max(pages + (pages / 8).clamp(GROWTH_MIN, GROWTH_MAX));
        let grown = self.grow_to(generous).or_else(|_| self.grow_to(end));
        let pages = grown.map_err(|error| match error {
            PoolError::Resize(source) if is_disk_full(&source) => {
                PoolError::DiskFull { frames, source }
            }
            other => other,
        })?;
        self.file_pages.store(pages, Ordering::Release);
        Ok(())
    }

    fn grow_to(&self, pages: u64) -> Result<u64, PoolError> {
        self.core.surface.grow(pages)?;
        self.core.states.grow(pages)?;
        self.core.dirty.grow(pages)?;
        self.device.resize(pages).map_err(PoolError::Resize)?;
        Ok(pages)
    }

    /// Frees a page that the caller holds. Its place in the file can be allocated again.
    pub fn free(&self, guard: ExclusiveGuard<'_>) -> Result<(), PoolError> {
        self.check_writable()?;
        let page = guard.into_held();
        self.free_locked(page)
    }

    /// Frees a page that the caller does not hold, without reading it.
    ///
    /// Waits for no holder, but up to 50 ms for a huge page to split: while a thread holds the page
    /// (a reader of a blob, a write-back), it stays, and is freed by a later call of this pool.
    pub fn free_page(&self, page: PageRef) -> Result<(), PoolError> {
        self.check_writable()?;
        self.free_deferred();
        if !self.try_free(page)? {
            let mut deferred = lock(&self.deferred);
            if deferred.iter().any(|waiting| waiting.id == page.id) {
                return Err(PoolError::PageFree(page.id));
            }
            deferred.push(page);
        }
        Ok(())
    }

    /// Frees a page unless a thread holds it; true if it is free.
    fn try_free(&self, page: PageRef) -> Result<bool, PoolError> {
        loop {
            let (state, seen) = match self.core.look(page) {
                // It lies in the file, and was never resident in a pool of this size.
                Err(PoolError::PageTooLarge { .. }) => self.core.look_at_known(page),
                sight => sight?,
            };
            match seen.state() {
                State::Locked | State::Shared(_) => return Ok(false),
                State::Free => return Err(PoolError::PageFree(page.id)),
                State::Inner => return Err(PoolError::WrongSize(page)),
                State::Evicted => {
                    if let Some(free) = self.core.free_evicted(page, state, seen)? {
                        return if free {
                            self.return_place(page).map(|()| true)
                        } else {
                            Ok(false)
                        };
                    }
                }
                State::Unlocked | State::Marked => {
                    if state.try_lock(seen) {
                        return self.free_locked(page).map(|()| true);
                    }
                }
            }
        }
    }

    /// Frees what could not be freed before, as far as nobody holds it now.
    pub(crate) fn free_deferred(&self) {
        // Locked to the end: `snapshot_space` finds each page either here or free.
        lock(&self.deferred).retain(|page| match self.try_free(*page) {
            Ok(is_free) => !is_free,
            Err(PoolError::Release { .. }) => true,
            Err(error) => {
                // Tried again, it might hit the page that gets this place next.
                tracing::warn!("{page} could not be freed: {error}");
                false
            }
        });
    }

    /// Frames of pages that were freed while a thread held them, and still are: after another try.
    pub fn frames_to_free(&self) -> u64 {
        if self.check_writable().is_ok() {
            self.free_deferred();
        }
        lock(&self.deferred).iter().map(|page| u64::from(page.frames)).sum()
    }

    /// Ends the life of a resident page that the caller has locked.
    fn free_locked(&self, page: PageRef) -> Result<(), PoolError> {
        if !self.core.policy.contains(page) {
            self.core.unlock(page, Leave::Unlocked, false);
            return Err(PoolError::WrongSize(page));
        }
        let released = self.core.release_freed(page);
        released.map_err(|source| PoolError::Release { page, source })?;
        self.core.budget.put_back(u64::from(page.frames));
        self.return_place(page)
    }

    /// A page is free, and its memory gone: its place can be allocated again.
    fn return_place(&self, page: PageRef) -> Result<(), PoolError> {
        self.core.counters.count(Event::Free);
        lock(&self.space).free(page.id.0, u64::from(page.frames))?;
        Ok(())
    }

    /// Gives the file's tail back to the file system, as far as it is not allocated.
    ///
    /// Returns the file's new length in pages of 4 KiB.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        // The space stays locked: nobody allocates what is being cut off.
        let mut space = lock(&self.space);
        let _growing = lock(&self.growing);
        space.trim();
        let end = space.end();
        if end < self.file_pages.load(Ordering::Acquire) {
            self.device.resize(end).map_err(PoolError::Resize)?;
            self.file_pages.store(end, Ordering::Release);
        }
        Ok(end)
    }

    /// The map of allocated pages as it is now; and the ranges (start, count) in it of pages that
    /// were freed while a thread held them, which that thread keeps for a while. The two fit
    /// together, also while other threads look for pages that can be freed by now; but not beside
    /// calls that allocate and free.
    pub fn snapshot_space(&self) -> (SpaceSnapshot, Vec<(u64, u64)>) {
        let deferred = lock(&self.deferred);
        let ranges = deferred.iter().map(|page| (page.id.0, u64::from(page.frames))).collect();
        (lock(&self.space).snapshot(), ranges)
    }

    /// The map of allocated pages as bytes, for [`Space::decode`](crate::Space::decode).
    pub fn encode_space(&self) -> Vec<u8> {
        lock(&self.space).encode()
    }

    /// Reads the map of allocated pages.
    pub fn with_space<R>(&self, read: impl FnOnce(&crate::Space) -> R) -> R {
        read(&lock(&self.space))
    }
}
