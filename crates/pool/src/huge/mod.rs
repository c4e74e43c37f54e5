//! Huge pages. A *chunk* is 512 pages in an aligned 2 MiB of the surface. If all of them are
//! resident and stay so, the collapser moves their memory into one huge page, and random accesses
//! to them miss the TLB less.
//!
//! Each page keeps its own state, latch and eviction: only the memory is one piece. So the evictor
//! splits a collapsed chunk before it releases a page of it; otherwise the release would give
//! addresses back and no memory (see [`Surface::split`]).
//!
//! Costs (measured on Linux 6.18): a collapse takes the collapser 0.6 to 1 ms, most of it to copy
//! 2 MiB, and five times as long if a hypervisor has yet to back the new page. A thread that
//! accesses the chunk during the copy waits for its end. A split takes the evictor 0.2 ms. Gain:
//! random reads of 2.7 GiB took 112 ns instead of 180, 1.5 to 1.6 times as fast
//! (`examples/huge_reads.rs`). So a collapse pays if the chunk stays for some 30,000 reads, 60 for
//! each page. The pool does not count reads, because hits have no bookkeeping. Instead it expects a
//! chunk to last as long as it did before:
//!
//! - If the pool has free frames, the collapser collapses a chunk as soon as it is whole. If the
//!   pool evicts, the chunk has to stay whole for a second first.
//! - A chunk that was split within a minute, or that the kernel declined to collapse, has to stay
//!   whole for half a second the next time, then for one, two, ... up to 17 minutes. A chunk that
//!   lasted starts afresh. So a pool under steady pressure does not thrash.
//! - One thread collapses one chunk after the other, and rests in between. It takes 512 frames out
//!   of the budget for the new page while the old ones still exist. So the resident frames stay
//!   within the pool's size, and a pool without so many free frames collapses nothing.
//!
//! Invariants: a chunk's word counts the frames of its admitted pages, in the same order as the
//! budget does: down before their release, up after they were populated. Pages are released only
//! from small chunks, or with the whole of a huge one.

pub(crate) mod candidates;
mod chunk;
pub(crate) mod collapser;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vellum_vm::{Asked, Entry, Errno, HUGE_PAGES, PageRange, Surface};

use crate::eviction::frame_budget::FrameBudget;
use candidates::Candidates;
use chunk::{Chunk, ChunkTable, Leaving, Phase, Seen};

/// Whether a pool puts its memory into huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HugePages {
    /// Yes, in pools of 32 MiB and more, if the kernel can collapse and split huge pages (Linux
    /// 6.7; the pool tries it), and if `/sys/kernel/mm/transparent_hugepage/enabled` is not
    /// `never`. Pages at their own places need a background thread for that, slots do not.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// Counts of a pool's huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HugePageStats {
    /// Chunks of 512 frames that are collapsed now, and those of slots that were never split. The
    /// kernel may have split some of them, to swap pages out or because memory ran short, or may
    /// have had no huge page for one of slots.
    pub collapsed: u64,
    /// Chunks that were collapsed.
    pub collapses: u64,
    /// Chunks that were split, or released as a whole; not those of slots.
    pub splits: u64,
    /// Collapses and splits that the kernel declined, because of I/O on one of the pages or because
    /// memory ran short.
    pub declined: u64,
}

/// A chunk that stayed huge for this long was worth its collapse, in milliseconds.
const LASTED: u32 = 60_000;
/// A chunk with one failure has to stay whole this long, in milliseconds; with two, twice as long.
const FIRST_WAIT: u32 = 500;
/// In a pool that evicts, the collapser adds this number to a chunk's failures.
const PRESSED: u32 = 2;
/// The most neighbours that one call collapses. The kernel drains the other CPUs' page caches once
/// per call; if these CPUs are busy, that takes longer than all the copying.
const RUN: u64 = 16;
/// How long the free of a page waits for the split of its chunk, before it goes on without.
const SPLIT_PATIENCE: Duration = Duration::from_millis(50);

/// The huge pages of one pool.
#[derive(Debug)]
pub(crate) struct HugeChunks {
    chunks: ChunkTable,
    pub(crate) candidates: Candidates,
    opened: Instant,
    /// Notified when a collapse or a split has ended.
    in_transit: Mutex<()>,
    arrived: Condvar,
    collapses: AtomicU64,
    splits: AtomicU64,
    declined: AtomicU64,
}

/// The part of a page range that lies in one chunk.
#[derive(Clone, Copy, Debug)]
struct Part {
    chunk: u64,
    first: u64,
    pages: u64,
}

/// The parts of a range, chunk by chunk.
fn parts(range: PageRange) -> impl DoubleEndedIterator<Item = Part> {
    let end = range.start + range.count;
    let chunks = range.start / HUGE_PAGES..end.div_ceil(HUGE_PAGES);
    chunks.map(move |chunk| {
        let first = range.start.max(chunk * HUGE_PAGES);
        Part { chunk, first, pages: end.min((chunk + 1) * HUGE_PAGES) - first }
    })
}

impl HugeChunks {
    /// A pool of fewer frames than this (32 MiB) has no huge pages: one collapse would take too
    /// large a part of its frames.
    pub(crate) const MIN_FRAMES: u64 = 16 * HUGE_PAGES;

    pub(crate) fn new() -> HugeChunks {
        HugeChunks {
            chunks: ChunkTable::new(),
            candidates: Candidates::default(),
            opened: Instant::now(),
            in_transit: Mutex::new(()),
            arrived: Condvar::new(),
            collapses: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            declined: AtomicU64::new(0),
        }
    }

    /// Milliseconds since the pool was opened. Wraps after 49 days; all uses allow for that.
    fn now(&self) -> u32 {
        self.opened.elapsed().as_millis() as u32
    }

    pub(crate) fn stats(&self) -> HugePageStats {
        let splits = self.splits.load(Ordering::Acquire);
        let collapses = self.collapses.load(Ordering::Acquire);
        HugePageStats {
            collapsed: collapses.saturating_sub(splits),
            collapses,
            splits,
            declined: self.declined.load(Ordering::Relaxed),
        }
    }

    /// Counts pages that became resident. The caller holds their locks.
    pub(crate) fn admit(&self, range: PageRange) {
        parts(range).for_each(|part| self.admit_part(part));
    }

    fn admit_part(&self, part: Part) {
        if self.chunks.get(part.chunk).admit(part.pages, self.now()) {
            self.candidates.add(part.chunk);
        }
    }

    /// Releases pages that the caller holds exclusively. An entry whose pages lie in a huge page
    /// that cannot be split at once fails with EBUSY; its pages stay, as they do after any error.
    /// `release` releases pages outside of huge pages, or a whole huge page.
    pub(crate) fn release(
        &self,
        surface: &Surface,
        entries: &mut [Entry],
        release: impl Fn(&mut [Entry]),
    ) {
        for entry in entries.iter_mut() {
            entry.result = self.leave(surface, entry.range);
        }
        if entries.iter().all(|entry| entry.result.is_ok()) {
            self.release_left(entries, release);
            return;
        }
        let may_go = entries.iter().filter(|entry| entry.result.is_ok());
        let mut left: Vec<Entry> = may_go.cloned().collect();
        self.release_left(&mut left, release);
        let going = entries.iter_mut().filter(|entry| entry.result.is_ok());
        going.zip(left).for_each(|(entry, left)| entry.result = left.result);
    }

    /// Releases the pages of one entry, which no thread will need again. Waits a little for the
    /// splits of their chunks. If I/O on another page of a chunk takes longer, releases the pages
    /// all the same; the kernel then keeps their memory until another page of the chunk leaves.
    pub(crate) fn release_freed(
        &self,
        surface: &Surface,
        entry: &mut Entry,
        release: impl Fn(&mut [Entry]),
    ) {
        let deadline = Instant::now() + SPLIT_PATIENCE;
        entry.result = self.leave(surface, entry.range);
        while entry.result.is_err() && Instant::now() < deadline {
            self.wait_for_arrival();
            entry.result = self.leave(surface, entry.range);
        }
        if entry.result.is_err() {
            tracing::debug!("{:?} leaves a huge page that is in use by I/O", entry.range);
            parts(entry.range).for_each(|part| self.leave_unsplit(part));
            entry.result = Ok(());
        }
        self.release_left(std::slice::from_mut(entry), release);
    }

    /// Counts pages as released if they can be now: their chunks are small, or leave as a whole.
    fn leave(&self, surface: &Surface, range: PageRange) -> Result<(), Errno> {
        for part in parts(range) {
            if let Err(errno) = self.leave_part(surface, part) {
                let before = parts(range).take_while(|earlier| earlier.chunk < part.chunk);
                before.for_each(|earlier| self.stay(earlier));
                return Err(errno);
            }
        }
        Ok(())
    }

    fn leave_part(&self, surface: &Surface, part: Part) -> Result<(), Errno> {
        let chunk = self.chunks.get(part.chunk);
        loop {
            match chunk.leave(part.pages) {
                Leaving::Go => return Ok(()),
                Leaving::GoWhole(huge) => {
                    self.splits.fetch_add(1, Ordering::AcqRel);
                    chunk.set_failures(self.judge(huge));
                    return Ok(());
                }
                Leaving::Split(huge) => self.split(surface, part, chunk, huge)?,
                Leaving::Busy => return Err(Errno::BUSY),
            }
        }
    }

    /// Splits a chunk. Its word says already that this thread does so.
    fn split(&self, surface: &Surface, part: Part, chunk: &Chunk, huge: Seen) -> Result<(), Errno> {
        let asked = surface.split(part.first);
        let done = matches!(asked, Ok(Asked::Done));
        if done {
            chunk.set_failures(self.judge(huge));
            self.splits.fetch_add(1, Ordering::AcqRel);
        } else {
            self.declined.fetch_add(1, Ordering::Relaxed);
        }
        chunk.finish_split(done);
        self.arrive();
        if done { Ok(()) } else { Err(Errno::BUSY) }
    }

    /// The failures of a chunk whose huge page ends now: none if it lasted, otherwise one more.
    fn judge(&self, huge: Seen) -> u32 {
        let lasted = self.now().wrapping_sub(huge.since()) >= LASTED;
        if lasted { 0 } else { huge.failures() + 1 }
    }

    /// Counts pages as released, in any phase of their chunk.
    fn leave_unsplit(&self, part: Part) {
        let chunk = self.chunks.get(part.chunk);
        loop {
            match chunk.leave(part.pages) {
                Leaving::Go => return,
                Leaving::GoWhole(_) => {
                    self.splits.fetch_add(1, Ordering::AcqRel);
                    return;
                }
                Leaving::Split(_) => {
                    chunk.leave_unsplit(part.pages);
                    chunk.finish_split(false);
                    self.arrive();
                    return;
                }
                // The other thread's collapse or split ends also while I/O is in flight.
                Leaving::Busy => self.wait_for_arrival(),
            }
        }
    }

    /// Releases pages that were counted as released. Counts those again that could not be.
    fn release_left(&self, entries: &mut [Entry], release: impl Fn(&mut [Entry])) {
        release(entries);
        for entry in entries.iter().filter(|entry| entry.result.is_err()) {
            parts(entry.range).for_each(|part| self.stay(part));
        }
    }

    /// Counts pages again that were not released. The kernel may have split a huge page that was to
    /// be released as a whole. Its chunk still counts as huge, so the pool splits it, which then
    /// costs nothing, before it releases a part of it.
    fn stay(&self, part: Part) {
        if part.pages == HUGE_PAGES {
            self.collapses.fetch_add(1, Ordering::AcqRel);
            self.chunks.get(part.chunk).stay_huge();
        } else {
            self.admit_part(part);
        }
    }

    /// Wakes the threads that wait for the end of a collapse or a split.
    fn arrive(&self) {
        drop(self.in_transit.lock().unwrap_or_else(PoisonError::into_inner));
        self.arrived.notify_all();
    }

    /// Waits until a collapse or a split ends, for a millisecond at most.
    fn wait_for_arrival(&self) {
        let waiting = self.in_transit.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.arrived.wait_timeout(waiting, Duration::from_millis(1)));
    }

    /// Collapses a candidate if its time has come, and its neighbours if theirs has too.
    /// `take_frames` takes the 512 frames out of the budget that the new huge page needs at first.
    fn try_collapse<R>(
        &self,
        surface: &Surface,
        budget: &FrameBudget,
        take_frames: impl FnOnce() -> Option<R>,
        place: u64,
    ) -> Attempt {
        let chunk = self.chunks.get(place);
        let seen = chunk.load();
        if !(seen.is_whole() && seen.phase() == Phase::Small) {
            return if chunk.try_dismiss() { Attempt::Dismissed } else { Attempt::Later(0) };
        }
        let (now, pressed) = (self.now(), is_pressed(budget));
        let left = time_left(seen, now, pressed);
        if left > 0 {
            return Attempt::Later(left);
        }
        let Some(_frames) = take_frames() else {
            return Attempt::Later(FIRST_WAIT << PRESSED);
        };
        let ripe = |seen: Seen| seen.is_queued() && time_left(seen, now, pressed) == 0;
        let run = place..place + RUN;
        let claimed = run.take_while(|place| self.chunks.get(*place).try_claim(ripe).is_ok());
        let chunks = claimed.count() as u64;
        if chunks == 0 {
            return Attempt::Later(0);
        }
        let asked = surface.collapse(PageRange::new(place * HUGE_PAGES, chunks * HUGE_PAGES));
        let all = matches!(asked, Ok(Asked::Done));
        let mut first = None;
        for place in place..place + chunks {
            let done = all || surface.is_huge(place * HUGE_PAGES).unwrap_or(false);
            let wait = self.finish_collapse(place, done, first.is_none(), pressed);
            first.get_or_insert(wait);
        }
        self.arrive();
        if let Err(error) = asked {
            tracing::warn!("no more huge pages from now on: {error}");
            self.candidates.end();
        }
        first.flatten().map_or(Attempt::Collapsed(chunks), Attempt::Declined)
    }

    /// Ends the collapse of a chunk. If it failed, returns in how many milliseconds to look at the
    /// chunk again. `popped` says whether the chunk was taken out of the queue.
    fn finish_collapse(&self, place: u64, done: bool, popped: bool, pressed: bool) -> Option<u32> {
        let chunk = self.chunks.get(place);
        if done {
            self.collapses.fetch_add(1, Ordering::AcqRel);
            chunk.finish_collapse(self.now(), popped);
            return None;
        }
        self.declined.fetch_add(1, Ordering::Relaxed);
        let seen = chunk.abandon_collapse(self.now());
        Some(time_left(seen, seen.since(), pressed))
    }
}

/// The outcome for a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// The collapser tried this number of chunks: the candidate, which is collapsed, and the
    /// neighbours after it, of which the kernel may have declined some.
    Collapsed(u64),
    /// It is no longer a candidate.
    Dismissed,
    /// The milliseconds until its time comes.
    Later(u32),
    /// The kernel declined. The collapser looks at it again in this number of milliseconds.
    Declined(u32),
}

/// How long a candidate still has to stay whole before it is collapsed, in milliseconds.
fn time_left(seen: Seen, now: u32, pressed: bool) -> u32 {
    let wait = match seen.failures() + if pressed { PRESSED } else { 0 } {
        0 => 0,
        failures => FIRST_WAIT << (failures - 1),
    };
    wait.saturating_sub(now.wrapping_sub(seen.since()))
}

/// Whether the pool evicts, or will soon: it has fewer free frames than eviction keeps free.
fn is_pressed(budget: &FrameBudget) -> bool {
    budget.available() < budget.capacity() / 16 + HUGE_PAGES
}
