//! Faults that wait for no storage but to read, and the threads that write instead of them.
//!
//! On some machines a write to a file may wait for a fault: a call of the kernel's that writes to
//! the file has a lock of it while it reads its buffer, and the buffer is mapped memory of this
//! cache. If the fault, in turn, waited for a write to the file, the two would wait for ever. So on
//! an environment that [writes apart](Environment::writes_apart):
//!
//! - a fault ([`Cache::try_fault`]) waits for no other thread for long. It takes a free frame, or
//!   one of a clean page, and gives up if there is none or another thread has the page;
//! - a page is never away while it is written: it is locked, protected, written, and evicted only
//!   when it is clean. A load finds it meanwhile;
//! - threads of the environment's own write dirty pages ([`Cache::write_some`]), each those of
//!   one file at a time, and wait for nothing but that file;
//! - the environment bounds the dirty pages ([`Cache::taken`]), so that there are clean ones.

use core::ops::RangeInclusive;

use super::{Access, BATCH_PAGES, Cache, Error, Evicted, Fault, Key, NO_PAGE, Page, Refused, Run};
use crate::environment::Environment;
use crate::frame::{Frame, Pin};
use crate::policy::Policy;
use crate::statistics::Count;

/// How often a fault looks whether another thread has finished, before it gives up.
const GLANCES: u32 = 66;

/// How often an eviction writes pages that threads store to again before they leave.
const PASSES: u32 = 8;

/// What keeps frames from being given to another page at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Frames with dirty pages that no caller has pinned.
    pub dirty: u32,
    /// Frames with pages that callers have pinned.
    pub held: u32,
}

/// What became of a fault that waits for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// So many pages are mapped.
    Mapped(u32),
    /// Another thread has the page for a moment.
    Busy,
    /// Other threads have the last frames with clean pages, or write those of the last dirty ones.
    FramesBusy,
    /// No frame is free or has a clean page: dirty ones must be written.
    NoFrame,
}

/// What became of an attempt to take a frame.
enum TriedFrame {
    Taken(Frame),
    Not(Tried),
}

impl<E: Environment, P: Policy> Cache<'_, E, P> {
    /// Makes a page accessible, as [`fault`](Self::fault) does, if no dirty page has to be written
    /// for it and no other thread is in the way for long.
    ///
    /// # Errors
    /// [`Error::Full`]; what the environment said.
    pub fn try_fault(&self, fault: &Fault<'_, E::Mapping>) -> Result<Tried, Error<E::Error>> {
        let mut run = Run::new();
        let place = (fault.access == Access::Read).then_some(fault.place);
        if let Some(tried) = self.try_pin_run(fault.key, fault.ahead, place, &mut run)? {
            return Ok(tried);
        }
        let (first, rest) = run.pages().split_at(1);
        let mapped = match fault.access {
            Access::Read => Some(self.map_for_reading(&run, fault.place)),
            Access::Write => self.try_map_for_writing(first[0], fault.place),
        };
        if fault.access == Access::Write && matches!(mapped, Some(Ok(()))) && !rest.is_empty() {
            // The access needs none of these: they are mapped by their own faults.
            let _ = self.environment.map(rest, fault.place, false);
        }
        self.unpin_run(&run);
        let Some(mapped) = mapped else { return Ok(Tried::Busy) };
        // A fault that is tried several times is one fault.
        self.count(Count::Faults, 1);
        self.count(Count::ReadAheadHits, fault.used.into());
        mapped.map(|()| Tried::Mapped(run.count as u32)).map_err(Error::Environment)
    }

    /// Pins a run as [`pin_run`](Self::pin_run) does. Returns what is in the way, if it has not.
    fn try_pin_run(
        &self,
        key: Key,
        ahead: u32,
        place: Option<&E::Mapping>,
        run: &mut Run,
    ) -> Result<Option<Tried>, Error<E::Error>> {
        let ahead = ahead.min(crate::MOST_PAGES - 1);
        for attempt in 0..GLANCES {
            let Some(frame) = self.index.find(key) else {
                let frame = match self.try_take_frame()? {
                    TriedFrame::Taken(frame) => frame,
                    TriedFrame::Not(tried) => return Ok(Some(tried)),
                };
                if self.fill(frame, key, ahead, place, run)? {
                    return Ok(None);
                }
                continue;
            };
            match self.frames.pin(frame, key) {
                Pin::Pinned => {
                    self.note_hit(frame, self.own_counters());
                    run.push(key, frame);
                    self.pin_neighbours(key, ahead, run);
                    return Ok(None);
                }
                Pin::Gone => {}
                Pin::Busy => self.environment.wait(attempt),
            }
        }
        Ok(Some(Tried::Busy))
    }

    /// Takes a frame that is free, or that has a clean page.
    fn try_take_frame(&self) -> Result<TriedFrame, Error<E::Error>> {
        for any in [false, true] {
            let take = || self.free.take(self.environment.processor(), self.environment.node());
            if let Some(frame) = take() {
                return Ok(TriedFrame::Taken(frame));
            }
            self.evict_batch(Refused::Dirty, any);
            if let Some(frame) = take() {
                return Ok(TriedFrame::Taken(frame));
            }
        }
        if self.may_become_free(|frame| self.may_leave(frame, Refused::Dirty)) {
            return Ok(TriedFrame::Not(Tried::FramesBusy));
        }
        match self.may_become_free(|frame| !self.frames.word(frame).is_held()) {
            true => Ok(TriedFrame::Not(Tried::NoFrame)),
            false => Err(Error::Full),
        }
    }

    /// Marks a pinned page dirty, and maps it for writing, if no other thread has it locked for
    /// long: one that writes it.
    fn try_map_for_writing(&self, page: Page, place: &E::Mapping) -> Option<Result<(), E::Error>> {
        let mut glances = 0..GLANCES;
        while self.frames.try_lock(page.frame).is_err() {
            self.environment.wait(glances.next()?);
        }
        self.mark_dirty(page.frame);
        let mapped = self.environment.map(&[page], place, true);
        self.frames.unlock(page.frame);
        Some(mapped)
    }

    /// Evicts the pages of a range that no caller has pinned. Dirty ones are written before. A page
    /// to which threads go on to store may stay.
    pub(super) fn write_and_evict(
        &self,
        range: RangeInclusive<Key>,
    ) -> (Evicted, Result<(), E::Error>) {
        let (mut pages, mut result) = (0, Ok(()));
        for pass in 0.. {
            let (evicted, dirty, _) = self.evict_once(&range, false, true);
            pages += evicted.pages;
            if dirty == 0 || pass == PASSES || result.is_err() {
                let stay = evicted.stay + dirty;
                return (Evicted { pages, stay }, result);
            }
            result = self.write_back(range.clone()).map(drop);
        }
        unreachable!("the loop ends after some passes")
    }

    /// Counts the frames that cannot be given to another page at once.
    pub fn taken(&self) -> Taken {
        let mut taken = Taken::default();
        for frame in 0..self.frames.count() {
            let word = self.frames.word(frame);
            if word.is_held() {
                taken.held += 1;
            } else if word.is_dirty() {
                taken.dirty += 1;
            }
        }
        taken
    }

    /// The first file from this one on that has dirty pages which no caller has pinned.
    pub fn next_dirty_file(&self, from: u32) -> Option<u32> {
        let mut found = None;
        let mut next = 0;
        while let Some(frame) = self.dirty.next(next) {
            next = frame + 1;
            let file = self.frames.key(frame).map(Key::file).filter(|file| *file >= from);
            let is_first = file.is_some_and(|file| found.is_none_or(|found| file < found));
            if is_first && !self.frames.word(frame).is_held() {
                found = file;
            }
        }
        found
    }

    /// Writes dirty pages of a file whose frames no other thread has, and which no caller has
    /// pinned: some of them at a time, of the frames from `next` on. Returns how many were written,
    /// and the first error. Moves `next`, which is `None` after the last frame.
    pub fn write_some(&self, file: u32, next: &mut Option<Frame>) -> (u64, Option<E::Error>) {
        let (mut pages, mut count) = ([NO_PAGE; BATCH_PAGES], 0);
        while let Some(frame) = next.and_then(|from| self.dirty.next(from)) {
            if count == BATCH_PAGES {
                return self.write_locked(&mut pages);
            }
            *next = Some(frame + 1);
            let is_of_file = || self.frames.key(frame).filter(|key| key.file() == file);
            if is_of_file().is_none() {
                continue;
            }
            let Ok(word) = self.frames.try_lock(frame) else { continue };
            match is_of_file() {
                Some(key) if word.is_dirty() && !word.is_held() => {
                    pages[count] = Page { key, frame, dirty: true };
                    count += 1;
                }
                _ => self.frames.unlock(frame),
            }
        }
        *next = None;
        self.write_locked(&mut pages[..count])
    }
}
