//! Allocating and freeing pages of the file.

use std::sync::atomic::Ordering;

use vellum_vm::PageRange;

use crate::core::is_disk_full;
use crate::error::PoolError;
use crate::page::PageRef;
use crate::page::state::{Leave, State};
use crate::pool::Pool;
use crate::pool::fix::ExclusiveGuard;
use crate::replacement::Arrival;
use crate::space::SpaceSnapshot;
use crate::statistics::counters::Event;
use crate::sync::lock;

/// The file grows by an eighth: at most by this many pages (64 MiB), and at least by that many.
const GROWTH_MAX: u64 = 16_384;
const GROWTH_MIN: u64 = 16;

/// The file grows by at most so many pages, or an eighth, for freed places that wait for the log.
const WAITING_MIN: u64 = 4096;

/// How often a thread that frees a range looks at a frame in transit, a moment apart.
const TRANSIT_TRIES: u32 = 10_000;

/// What lay at a frame of a range that is freed.
enum Cleared {
    /// A frame without memory, in no page now.
    Absent,
    /// A page of so many frames. It is free, or a later call frees it.
    Page(u32),
}

impl Pool {
    /// Allocates a page of `frames` frames, zeroed, held exclusively and dirty.
    ///
    /// # Errors
    /// [`PoolError::DiskFull`] and [`PoolError::Exhausted`], among others. Nothing changed.
    pub fn allocate(&self, frames: u32) -> Result<ExclusiveGuard<'_>, PoolError> {
        let allocated = self.allocate_in(frames, |pool| pool.take_place(frames).map(Some))?;
        Ok(allocated.unwrap_or_else(|| unreachable!("a place beyond the end is always free")))
    }

    /// As [`allocate`](Pool::allocate), in the lowest free place that ends at or below page `end`.
    /// `None` if there is none. Never makes the file longer.
    ///
    /// # Errors
    /// As `allocate`, but for a full disk.
    pub fn allocate_below(
        &self,
        frames: u32,
        end: u64,
    ) -> Result<Option<ExclusiveGuard<'_>>, PoolError> {
        // Without a place, no frame need be made free.
        if !self.with_space(|space| space.has_room_below(u64::from(frames), end)) {
            return self.check_writable().map(|()| None);
        }
        self.allocate_in(frames, |pool| Ok(pool.take_place_below(frames, end)))
    }

    /// Allocates a page at the place that `take` finds.
    fn allocate_in(
        &self,
        frames: u32,
        take: impl FnOnce(&Pool) -> Result<Option<PageRef>, PoolError>,
    ) -> Result<Option<ExclusiveGuard<'_>>, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        let capacity = self.core.budget.size();
        if frames == 0 || u64::from(frames) > capacity || frames > PageRef::MAX_FRAMES {
            return Err(PoolError::PageTooLarge { page: PageRef::new(0, frames), capacity });
        }
        let mut reserved = self.eviction.reserve(PageRef::new(0, frames))?;
        let Some(page) = take(self)? else { return Ok(None) };
        let placed = match self.core.claim_unallocated(page, &mut reserved) {
            Err(error @ (PoolError::Populate { .. } | PoolError::DamagedWord { .. })) => {
                self.give_place_up(page)?;
                return Err(error);
            }
            // No valid reference leads to the new page or into it. If one of its frames is in use
            // all the same, the file is damaged. The range then stays allocated, so that no data
            // is overwritten.
            claimed => claimed?,
        };
        reserved.keep();
        self.core.admit(placed, Arrival::Needed);
        // A word that was damaged since is right again, and the caller gets the page.
        let _ = self.core.check_word(page);
        self.core.counters.count(Event::Allocate);
        ExclusiveGuard::new(&self.core, self.core.held(page), page, true).map(Some)
    }

    /// Makes a page resident and dirty, with these bytes in the place of those that the file has.
    /// The page is allocated, lies in the file, and is not in memory.
    ///
    /// # Errors
    /// [`PoolError::InUse`] if it, or a part of it, is in memory; [`PoolError::Exhausted`] and
    /// [`PoolError::Populate`], among others.
    ///
    /// # Panics
    /// If there are not as many bytes as the page has.
    pub fn insert(&self, page: PageRef, bytes: &[u8]) -> Result<(), PoolError> {
        assert_eq!(bytes.len(), page.bytes(), "the bytes of {page}");
        self.check_writable()?;
        self.core.look(page)?;
        let mut reserved = self.eviction.reserve(page)?;
        let placed = self.core.claim_unallocated(page, &mut reserved)?;
        reserved.keep();
        self.core.admit(placed, Arrival::Needed);
        // As in `allocate_in`: otherwise a page of zeros would stay.
        let _ = self.core.check_word(page);
        let mut guard = ExclusiveGuard::new(&self.core, self.core.held(page), page, true)?;
        guard.copy_from_slice(bytes);
        Ok(())
    }

    /// Allocates the place of a page that the caller writes past the pool; see
    /// [`write_copies`](Pool::write_copies). The pool itself never reads or writes the page.
    ///
    /// # Errors
    /// [`PoolError::DiskFull`], among others. Nothing changed.
    pub fn allocate_place(&self, frames: u32) -> Result<PageRef, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        self.take_place(frames)
    }

    /// As [`allocate_place`](Pool::allocate_place), for the lowest free place that ends at or below
    /// page `end`. `None` if there is none.
    pub fn allocate_place_below(
        &self,
        frames: u32,
        end: u64,
    ) -> Result<Option<PageRef>, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        Ok(self.take_place_below(frames, end))
    }

    /// From now on, allocations take free places below page `end` first, the lowest one of them;
    /// 0 for no preference. So new pages do not lie in the end of the file that a caller is about
    /// to cut off.
    pub fn prefer_below(&self, end: u64) {
        self.preferred_end.store(end, Ordering::Relaxed);
    }

    /// Frees a place from [`allocate_place`](Pool::allocate_place), of this pool or of the pool
    /// that wrote the file.
    pub fn free_place(&self, page: PageRef) -> Result<(), PoolError> {
        self.check_writable()?;
        Ok(lock(&self.space).free(page.id.0, u64::from(page.frames))?)
    }

    /// Takes a place from the space. If many places wait for the log, or the disk is full, this
    /// waits for the log first.
    fn take_place(&self, frames: u32) -> Result<PageRef, PoolError> {
        let waiting = lock(&self.waiting).frames();
        if waiting > WAITING_MIN.max(self.file_pages.load(Ordering::Relaxed) / 8) {
            self.wait_for_places()?;
        }
        match self.try_take_place(frames) {
            Err(PoolError::DiskFull { .. }) if self.wait_for_places()? => {
                self.try_take_place(frames)
            }
            taken => taken,
        }
    }

    /// Waits for the log so that freed places can be allocated again. False if that changed
    /// nothing.
    fn wait_for_places(&self) -> Result<bool, PoolError> {
        let Some(newest) = lock(&self.waiting).newest() else { return Ok(false) };
        // If the log has failed, the caller goes on without these places.
        let is_durable = self.core.format.write_ahead(newest, &|| true).is_ok();
        if is_durable {
            self.return_waiting()?;
        }
        Ok(is_durable)
    }

    fn try_take_place(&self, frames: u32) -> Result<PageRef, PoolError> {
        let preferred = match self.preferred_end.load(Ordering::Relaxed) {
            0 => None,
            end => self.take_place_below(frames, end),
        };
        if let Some(page) = preferred {
            return Ok(page);
        }
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

    /// Takes a free place below page `end`. The file is longer than that already.
    fn take_place_below(&self, frames: u32, end: u64) -> Option<PageRef> {
        let start = lock(&self.space).allocate_below(u64::from(frames), end)?;
        Some(PageRef::new(start, frames))
    }

    /// Frees the place of a page whose allocation failed.
    fn give_place_up(&self, page: PageRef) -> Result<(), PoolError> {
        let mut space = lock(&self.space);
        space.free(page.id.0, u64::from(page.frames))?;
        space.trim();
        Ok(())
    }

    /// Grows the file, the surface and the page states up to page `end`.
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
        self.core.note_file_pages(pages);
        Ok(())
    }

    fn grow_to(&self, pages: u64) -> Result<u64, PoolError> {
        self.core.surface.grow(pages)?;
        self.core.slots.as_ref().map_or(Ok(()), |slots| slots.grow_record(pages))?;
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
    /// Never waits for a holder, but up to 50 ms for a huge page to split. While a thread holds the
    /// page (a reader of a blob, a write-back), the page stays, and a later call of this pool frees
    /// it.
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

    /// Frees a range of allocated frames to which nothing refers, whatever pages lie in it, without
    /// reading them. It begins and ends where pages do. Returns the number of its frames that are
    /// free now, or will be: a page that a thread holds stays, and a later call of this pool frees
    /// it. The rest stays allocated, with a warning.
    ///
    /// A caller that knows the pages calls [`free_page`](Pool::free_page), which refuses references
    /// of a wrong length.
    pub fn free_range(&self, range: PageRange) -> u64 {
        if let Err(error) = self.check_writable() {
            tracing::warn!("{} frames stay allocated: {error}", range.count);
            return 0;
        }
        self.free_deferred();
        let end = range.start + range.count;
        let (mut freed, mut next) = (0, range.start);
        // The absent frames before the next one, whose places are returned together.
        let mut absent = PageRef::new(next, 0);
        while next < end {
            let cleared = self.clear_frame(PageRef::new(next, 1), end);
            if let Ok(Cleared::Absent) = cleared {
                absent.frames += 1;
                next += 1;
                if absent.frames < PageRef::MAX_FRAMES {
                    continue;
                }
            }
            freed += self.return_absent(absent);
            match cleared {
                Ok(Cleared::Absent) => {}
                Ok(Cleared::Page(frames)) => {
                    freed += u64::from(frames);
                    next += u64::from(frames);
                }
                Err(error) => {
                    tracing::warn!("page {next} could not be freed and stays allocated: {error}");
                    next += 1;
                }
            }
            absent = PageRef::new(next, 0);
        }
        freed + self.return_absent(absent)
    }

    /// Returns the places of frames that are in no page any more. Returns their number.
    fn return_absent(&self, frames: PageRef) -> u64 {
        if frames.frames == 0 {
            return 0;
        }
        match self.return_place(frames) {
            Ok(()) => u64::from(frames.frames),
            Err(error) => {
                tracing::warn!("{frames} could not be freed and stays allocated: {error}");
                0
            }
        }
    }

    /// Frees the page that begins with a frame and ends by `end`, or has it freed later if a thread
    /// holds it. No page can begin with a frame that is absent afterwards, and its place stays
    /// allocated.
    fn clear_frame(&self, frame: PageRef, end: u64) -> Result<Cleared, PoolError> {
        let fits = |page: PageRef| match page.id.0 + u64::from(page.frames) <= end {
            true => Ok(page),
            false => Err(PoolError::WrongSize(page)),
        };
        for _ in 0..TRANSIT_TRIES {
            let (state, seen) = self.core.look(frame)?;
            match seen.state() {
                // An inner frame of a page that was resident.
                State::Free => return Ok(Cleared::Absent),
                State::Evicted => {
                    if let Some(true) = self.core.free_evicted(frame, state, seen)? {
                        return Ok(Cleared::Absent);
                    }
                }
                State::Inner => return Err(PoolError::WrongSize(frame)),
                State::Unlocked | State::Marked => {
                    if state.try_lock(seen) {
                        let page = self.core.whole(frame.id);
                        if let Err(error) = fits(page) {
                            self.core.unlock(page, Leave::Unlocked, false);
                            return Err(error);
                        }
                        return self.free_locked(page).map(|()| Cleared::Page(page.frames));
                    }
                }
                State::Shared(_) => {
                    let page = self.core.whole(frame.id);
                    // If the word is the same, the page was resident all the time.
                    if self.core.look(frame)?.1 == seen {
                        lock(&self.deferred).push(fits(page)?);
                        return Ok(Cleared::Page(page.frames));
                    }
                }
                // It is read in, or evicted.
                State::Locked => {}
            }
            self.core.budget.wait_briefly();
        }
        Err(PoolError::InUse(frame))
    }

    /// Frees a page unless a thread holds it. True if it is free now.
    fn try_free(&self, page: PageRef) -> Result<bool, PoolError> {
        loop {
            let (state, seen) = match self.core.look(page) {
                // The page lies in the file, and was never resident in a pool of this size.
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

    /// Frees pages of earlier calls that a thread held then and that no thread holds now. Makes
    /// places available for which the log is durable by now.
    pub(crate) fn free_deferred(&self) {
        if let Err(error) = self.return_waiting() {
            tracing::warn!("freed pages are lost until the file is opened again: {error}");
        }
        // The lock is held to the end, so that `snapshot_space` finds each page here or free.
        lock(&self.deferred).retain(|page| match self.try_free(*page) {
            Ok(is_free) => !is_free,
            Err(PoolError::Release { .. } | PoolError::DamagedWord { .. }) => true,
            Err(error) => {
                // A retry might hit the page that gets this place next.
                tracing::warn!("{page} could not be freed: {error}");
                false
            }
        });
    }

    /// Frames of the pages that callers freed, and that a thread still holds or whose places wait
    /// for the log. Retries those first.
    pub fn frames_to_free(&self) -> u64 {
        if self.check_writable().is_ok() {
            self.free_deferred();
        }
        let (deferred, waiting) = (lock(&self.deferred), lock(&self.waiting));
        let pages = deferred.iter().chain(waiting.pages());
        pages.map(|page| u64::from(page.frames)).sum()
    }

    /// Frees a resident page that the caller has locked.
    fn free_locked(&self, page: PageRef) -> Result<(), PoolError> {
        if !self.core.is_of_this_length(page) {
            self.core.unlock(page, Leave::Unlocked, false);
            return Err(PoolError::WrongSize(page));
        }
        let Some(placed) = self.core.placed(page) else {
            return Err(self.core.refuse_exclusive(page, false));
        };
        let released = self.core.release_freed(placed);
        released.map_err(|source| PoolError::Release { page, source })?;
        self.core.budget.put_back(u64::from(page.frames));
        self.return_place(page)
    }

    /// Makes the place of a freed page available to allocations, at once or when the log is
    /// durable.
    fn return_place(&self, page: PageRef) -> Result<(), PoolError> {
        self.core.counters.count(Event::Free);
        match self.core.format.free_lsn(page) {
            0 => Ok(lock(&self.space).free(page.id.0, u64::from(page.frames))?),
            lsn => {
                lock(&self.waiting).push(lsn, page);
                Ok(())
            }
        }
    }

    /// Makes the places available for which the log is durable by now.
    fn return_waiting(&self) -> Result<(), PoolError> {
        let mut waiting = lock(&self.waiting);
        if waiting.frames() == 0 {
            return Ok(());
        }
        let durable = self.core.format.durable_lsn();
        let mut space = lock(&self.space);
        while let Some(page) = waiting.pop(durable) {
            space.free(page.id.0, u64::from(page.frames))?;
        }
        Ok(())
    }

    /// Cuts the unused end off the map of allocated pages, and leaves the file as it is.
    ///
    /// # Errors
    /// On a read-only or poisoned pool.
    pub fn trim_space(&self) -> Result<(), PoolError> {
        self.check_writable()?;
        self.free_deferred();
        lock(&self.space).trim();
        Ok(())
    }

    /// Gives the end of the file that no page uses back to the file system.
    ///
    /// Returns the file's new length in pages of 4 KiB.
    pub fn trim(&self) -> Result<u64, PoolError> {
        self.trim_to(0)
    }

    /// As [`trim`](Pool::trim), but leaves at least the first `least` pages, whether they are used
    /// or not. Other threads may allocate and free meanwhile.
    ///
    /// What other threads may still do in the part that goes: read through a reference that they
    /// have not found stale yet. Such a read fails, or waits until the reader finds the reference
    /// stale. No thread writes there: a page is free only when its write has ended.
    pub fn trim_to(&self, least: u64) -> Result<u64, PoolError> {
        self.check_writable()?;
        self.free_deferred();
        // The space stays locked, so that no thread allocates from the end that is cut off.
        let mut space = lock(&self.space);
        let _growing = lock(&self.growing);
        space.trim();
        let end = space.end().max(least);
        if end < self.file_pages.load(Ordering::Acquire) {
            self.device.resize(end).map_err(PoolError::Resize)?;
            self.file_pages.store(end, Ordering::Release);
            self.core.note_file_pages(end);
        }
        Ok(end)
    }

    /// The map of allocated pages at this moment, and the ranges (start, count) in it of pages that
    /// callers freed: a thread holds them, or their places wait for the log. The two fit together
    /// even while other threads free deferred pages, but not while other threads allocate and free.
    pub fn snapshot_space(&self) -> (SpaceSnapshot, Vec<(u64, u64)>) {
        let (deferred, waiting) = (lock(&self.deferred), lock(&self.waiting));
        let pages = deferred.iter().chain(waiting.pages());
        let ranges = pages.map(|page| (page.id.0, u64::from(page.frames))).collect();
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
