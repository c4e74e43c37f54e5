//! How many pages of a cache may be dirty, where no fault writes (`writers.rs`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use vellum_aquila_core::Taken;

use crate::write_requests::lock;

/// Frames are counted at most so often by those who wait for room.
const PAUSE: Duration = Duration::from_millis(1);

/// How many pages may become dirty.
#[derive(Debug)]
pub(crate) struct DirtyRoom {
    places: Mutex<Places>,
    /// Places that were taken by threads that have not used them yet.
    promised: AtomicU32,
    /// Frames that the cache may be about to have.
    size: AtomicU32,
}

#[derive(Debug)]
struct Places {
    /// Never more than there are.
    left: i64,
    /// Those of a cache without dirty pages.
    all: i64,
    counted: Option<Instant>,
}

/// A place for one dirty page, which the thread is about to use.
pub(crate) struct Promise<'r> {
    room: &'r DirtyRoom,
    is_used: bool,
}

impl Promise<'_> {
    /// The page may be dirty now.
    pub(crate) fn used(mut self) {
        self.is_used = true;
    }
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        if self.is_used {
            // What the thread has done is seen by one that counts without this promise.
            self.room.promised.fetch_sub(1, Ordering::AcqRel);
        } else {
            let mut places = lock(&self.room.places);
            self.room.promised.fetch_sub(1, Ordering::AcqRel);
            places.left += 1;
        }
    }
}

/// How many of so many frames may be dirty: three quarters, and in a small cache all but one. Of a
/// single frame no part can be kept for reads.
fn most_dirty(frames: u32) -> u32 {
    if frames <= 1 { frames } else { frames - (frames / 4).max(1) }
}

impl DirtyRoom {
    pub(crate) fn new(size: u32) -> Self {
        Self {
            places: Mutex::new(Places { left: 0, all: 0, counted: None }),
            promised: AtomicU32::new(0),
            size: AtomicU32::new(size),
        }
    }

    /// From now on for a cache of so many frames. [`DirtyRoom::count`] does the rest.
    pub(crate) fn set_size(&self, frames: u32) {
        self.size.store(frames, Ordering::Release);
    }

    /// Counts the places that are left. Returns whether half of them are.
    pub(crate) fn count(&self, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        self.count_in(&mut lock(&self.places), taken)
    }

    fn count_in(&self, places: &mut Places, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        // First, so that what is promised and used meanwhile counts twice and not never. No more is
        // promised while the places are locked.
        let promised = self.promised.load(Ordering::Acquire);
        let (size, taken) = taken();
        let size = size.min(self.size.load(Ordering::Acquire));
        places.all = most_dirty(size.saturating_sub(taken.held)).into();
        let used = i64::from(taken.dirty) + i64::from(promised);
        // If there is nothing to write, there is nothing to wait for.
        places.left = if used == 0 { places.all.max(1) } else { places.all - used };
        places.counted = Some(Instant::now());
        2 * places.left >= places.all
    }

    /// Counts, and returns whether no more places are taken than there are.
    pub(crate) fn is_kept(&self, taken: impl FnOnce() -> (u32, Taken)) -> bool {
        let mut places = lock(&self.places);
        self.count_in(&mut places, taken);
        places.left >= 0
    }

    /// Takes a place, if there is one. Returns also whether few are left.
    pub(crate) fn take(&self, taken: impl FnOnce() -> (u32, Taken)) -> (Option<Promise<'_>>, bool) {
        let mut places = lock(&self.places);
        let is_old = |counted: Instant| counted.elapsed() >= PAUSE;
        if places.left <= 0 && places.counted.is_none_or(is_old) {
            self.count_in(&mut places, taken);
        }
        if places.left <= 0 {
            return (None, true);
        }
        places.left -= 1;
        self.promised.fetch_add(1, Ordering::AcqRel);
        (Some(Promise { room: self, is_used: false }), 4 * places.left < places.all)
    }
}
