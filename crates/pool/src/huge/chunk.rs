//! One word for every chunk (512 pages that can be a huge page): how many of its pages are
//! resident, and the outcomes of the attempts to collapse it.
//!
//! ```text
//!  63                  32      24         16      12         10       9        0
//! +----------------------+-------+----------+-------+----------+--------------+
//! |  milliseconds        |   -   | failures | queued|  phase   |   resident   |
//! +----------------------+-------+----------+-------+----------+--------------+
//! ```
//!
//! Invariants: the collapser collapses a chunk only while all of its pages are resident, and no
//! thread releases one of them during the collapse. At most one thread collapses or splits a chunk.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_vm::HUGE_PAGES;

const PHASE_SHIFT: u32 = 10;
const RESIDENT: u64 = (1 << PHASE_SHIFT) - 1;
const PHASE: u64 = 3 << PHASE_SHIFT;
const QUEUED: u64 = 1 << 12;
const FAILURES_SHIFT: u32 = 16;
const FAILURES: u64 = 0xff << FAILURES_SHIFT;
const SINCE_SHIFT: u32 = 32;

/// The kind of memory of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Pages of 4 KiB, as far as they are resident.
    Small,
    /// The collapser is making it huge. Its pages stay resident until that ends.
    Collapsing,
    /// A huge page, or the rest of one that a thread could not split in time.
    Huge,
    /// A thread is splitting it.
    Splitting,
}

/// One reading of a chunk's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen(u64);

impl Seen {
    /// Pages of the chunk that hold memory.
    pub(super) fn resident(self) -> u64 {
        self.0 & RESIDENT
    }

    pub(super) fn is_whole(self) -> bool {
        self.resident() == HUGE_PAGES
    }

    pub(super) fn phase(self) -> Phase {
        match (self.0 & PHASE) >> PHASE_SHIFT {
            0 => Phase::Small,
            1 => Phase::Collapsing,
            2 => Phase::Huge,
            _ => Phase::Splitting,
        }
    }

    /// Whether it is in the queue of candidates.
    pub(super) fn is_queued(self) -> bool {
        self.0 & QUEUED != 0
    }

    /// Collapses that failed or did not last, since the last one that lasted.
    pub(super) fn failures(self) -> u32 {
        ((self.0 & FAILURES) >> FAILURES_SHIFT) as u32
    }

    /// When a small chunk became whole, or a huge one huge, in milliseconds (wrapping).
    pub(super) fn since(self) -> u32 {
        (self.0 >> SINCE_SHIFT) as u32
    }

    fn with_resident(self, resident: u64) -> Seen {
        debug_assert!(resident <= HUGE_PAGES, "{resident} of the pages of {self:?} are resident");
        Seen((self.0 & !RESIDENT) | resident)
    }

    fn with_phase(self, phase: Phase) -> Seen {
        Seen((self.0 & !PHASE) | (phase as u64) << PHASE_SHIFT)
    }

    fn with_queued(self, queued: bool) -> Seen {
        Seen(if queued { self.0 | QUEUED } else { self.0 & !QUEUED })
    }

    fn with_failures(self, failures: u32) -> Seen {
        Seen((self.0 & !FAILURES) | u64::from(failures.min(FAILURES_MAX)) << FAILURES_SHIFT)
    }

    fn with_since(self, since: u32) -> Seen {
        Seen((self.0 & !(u64::from(u32::MAX) << SINCE_SHIFT)) | u64::from(since) << SINCE_SHIFT)
    }
}

/// The count of failures stops here.
const FAILURES_MAX: u32 = 12;

/// The word of a chunk.
#[derive(Debug, Default)]
pub(super) struct Chunk(AtomicU64);

/// The next step of a thread that releases pages of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// The pages are counted as released: release them.
    Go,
    /// The same, and they are the whole of this huge page.
    GoWhole(Seen),
    /// The caller has to split this huge page, and to end that with [`Chunk::finish_split`].
    Split(Seen),
    /// Another thread collapses or splits it just now.
    Busy,
}

impl Chunk {
    pub(super) fn load(&self) -> Seen {
        Seen(self.0.load(Ordering::Acquire))
    }

    /// Changes the word. Returns the word before, or the word that `change` refused.
    fn update(&self, change: impl Fn(Seen) -> Option<Seen>) -> Result<Seen, Seen> {
        let change = |word| change(Seen(word)).map(|new| new.0);
        let done = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        done.map(Seen).map_err(Seen)
    }

    /// Counts pages that became resident at the time `now`. True if the chunk is whole and small
    /// now, and was not queued; its word then says that it is, and the caller queues it.
    pub(super) fn admit(&self, pages: u64, now: u32) -> bool {
        let becomes_candidate = |seen: Seen| {
            seen.resident() + pages == HUGE_PAGES
                && seen.phase() == Phase::Small
                && !seen.is_queued()
        };
        let before = self.update(|seen| {
            let new = seen.with_resident(seen.resident() + pages);
            Some(match (new.is_whole() && new.phase() == Phase::Small, becomes_candidate(seen)) {
                (true, queue) => new.with_since(now).with_queued(queue || seen.is_queued()),
                _ => new,
            })
        });
        before.is_ok_and(becomes_candidate)
    }

    /// Counts pages as released before their release. Changes nothing if they may not leave now.
    pub(super) fn leave(&self, pages: u64) -> Leaving {
        let before = self.update(|seen| {
            let left = seen.with_resident(seen.resident().checked_sub(pages)?);
            match seen.phase() {
                Phase::Small => Some(left),
                Phase::Huge if pages == HUGE_PAGES => Some(left.with_phase(Phase::Small)),
                Phase::Huge => Some(seen.with_phase(Phase::Splitting)),
                Phase::Collapsing | Phase::Splitting => None,
            }
        });
        match before {
            Ok(seen) if seen.phase() == Phase::Small => Leaving::Go,
            Ok(seen) if pages == HUGE_PAGES => Leaving::GoWhole(seen),
            Ok(seen) => Leaving::Split(seen),
            Err(seen) => {
                debug_assert!(seen.resident() >= pages, "{pages} pages leave {seen:?}");
                Leaving::Busy
            }
        }
    }

    /// Takes back what [`leave`](Chunk::leave) did for a huge page that was not released.
    pub(super) fn stay_huge(&self) {
        let _ = self.update(|seen| Some(seen.with_resident(HUGE_PAGES).with_phase(Phase::Huge)));
    }

    /// Sets the failures, on which the delay before the next collapse depends.
    pub(super) fn set_failures(&self, failures: u32) {
        let _ = self.update(|seen| Some(seen.with_failures(failures)));
    }

    /// Counts pages as released whose huge page could not be split in time. It stays in its phase.
    pub(super) fn leave_unsplit(&self, pages: u64) {
        let _ = self.update(|seen| Some(seen.with_resident(seen.resident() - pages)));
    }

    /// Ends a split that succeeded or failed.
    pub(super) fn finish_split(&self, split: bool) {
        let phase = if split { Phase::Small } else { Phase::Huge };
        let _ = self.update(|seen| Some(seen.with_phase(phase)));
    }

    /// Starts to collapse a candidate that is `ripe`. Otherwise returns its word.
    pub(super) fn try_claim(&self, ripe: impl Fn(Seen) -> bool) -> Result<(), Seen> {
        let claim = |seen: Seen| {
            let ready = seen.is_whole() && seen.phase() == Phase::Small && ripe(seen);
            ready.then(|| seen.with_phase(Phase::Collapsing))
        };
        self.update(claim).map(|_| ())
    }

    /// Takes a chunk that is not whole, or not small, out of the queue of candidates. False if it
    /// is whole and small again: then it stays in the queue.
    pub(super) fn try_dismiss(&self) -> bool {
        self.update(|seen| {
            let candidate = seen.is_whole() && seen.phase() == Phase::Small;
            (!candidate).then(|| seen.with_queued(false))
        })
        .is_ok()
    }

    /// Ends a collapse that succeeded at the time `now`. `popped` says that the chunk is no longer
    /// in the queue of candidates.
    pub(super) fn finish_collapse(&self, now: u32, popped: bool) {
        let _ = self.update(|seen| {
            let queued = seen.is_queued() && !popped;
            Some(seen.with_phase(Phase::Huge).with_queued(queued).with_since(now))
        });
    }

    /// Ends a collapse that the kernel declined at the time `now`; the chunk stays a candidate.
    pub(super) fn abandon_collapse(&self, now: u32) -> Seen {
        let failed = |seen: Seen| {
            let failures = seen.failures() + 1;
            seen.with_phase(Phase::Small).with_since(now).with_failures(failures)
        };
        self.update(|seen| Some(failed(seen))).map_or_else(failed, failed)
    }
}

/// The first part of the table has so many words: 1 GiB of the file.
const FIRST: u64 = 512;
/// Each part has twice the words of the one before it: enough for any page number.
const PARTS: usize = 24;

/// The words of all chunks: 8 bytes for 2 MiB of the file, up to the farthest page that was ever
/// resident (rounded up to at most twice that). The table never moves and needs no growing.
#[derive(Debug)]
pub(super) struct ChunkTable {
    parts: [OnceLock<Box<[Chunk]>>; PARTS],
}

impl ChunkTable {
    pub(super) fn new() -> ChunkTable {
        ChunkTable { parts: [const { OnceLock::new() }; PARTS] }
    }

    /// The word of a chunk, by its place on the surface in units of 512 pages.
    pub(super) fn get(&self, chunk: u64) -> &Chunk {
        let place = chunk + FIRST;
        let part = place.ilog2() - FIRST.ilog2();
        let words = FIRST << part;
        let part = self.parts[part as usize]
            .get_or_init(|| (0..words).map(|_| Chunk::default()).collect());
        &part[(place - words) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Chunk {
        let chunk = Chunk::default();
        assert!(!chunk.admit(HUGE_PAGES - 1, 5));
        assert!(chunk.admit(1, 7));
        chunk
    }

    #[test]
    fn a_chunk_becomes_a_candidate_once() {
        let chunk = whole();
        assert_eq!((chunk.load().since(), chunk.load().is_queued()), (7, true));
        assert_eq!(chunk.leave(3), Leaving::Go);
        assert_eq!(chunk.try_claim(|_| true), Err(chunk.load()));
        assert!(!chunk.admit(3, 9), "it is on the list");
        assert_eq!(chunk.load().since(), 9);
        assert!(!chunk.try_dismiss(), "it is a candidate");
        assert_eq!(chunk.leave(1), Leaving::Go);
        assert!(chunk.try_dismiss() && !chunk.load().is_queued());
        assert!(chunk.admit(1, 10));
    }

    #[test]
    fn a_huge_chunk_is_split_before_a_part_of_it_leaves() {
        let chunk = whole();
        assert!(chunk.try_claim(|seen| seen.since() == 8).is_err());
        chunk.try_claim(|seen| seen.since() == 7).unwrap();
        assert_eq!(chunk.leave(1), Leaving::Busy);
        chunk.finish_collapse(20, true);
        assert_eq!((chunk.load().phase(), chunk.load().since()), (Phase::Huge, 20));
        let huge = chunk.load();
        assert_eq!(chunk.leave(4), Leaving::Split(huge));
        assert_eq!((chunk.leave(4), chunk.load().resident()), (Leaving::Busy, HUGE_PAGES));
        chunk.finish_split(false);
        assert_eq!(chunk.load(), huge);
        chunk.leave_unsplit(2);
        assert_eq!((chunk.load().phase(), chunk.load().resident()), (Phase::Huge, 510));
        assert!(!chunk.admit(2, 30) && chunk.load() == huge, "it is huge, or was");
        assert_eq!(chunk.leave(4), Leaving::Split(huge));
        chunk.finish_split(true);
        chunk.set_failures(1);
        assert_eq!(chunk.leave(4), Leaving::Go);
        assert_eq!((chunk.load().resident(), chunk.load().failures()), (HUGE_PAGES - 4, 1));
    }

    #[test]
    fn a_huge_chunk_leaves_as_a_whole() {
        let chunk = whole();
        chunk.try_claim(|_| true).unwrap();
        chunk.finish_collapse(1, true);
        let huge = chunk.load();
        assert_eq!(chunk.leave(HUGE_PAGES), Leaving::GoWhole(huge));
        assert_eq!((chunk.load().phase(), chunk.load().resident()), (Phase::Small, 0));
        chunk.stay_huge();
        assert_eq!(chunk.load(), huge);
    }

    #[test]
    fn failures_are_counted_up_to_a_limit() {
        let chunk = whole();
        for failures in 1..40 {
            chunk.try_claim(|_| true).unwrap();
            let seen = chunk.abandon_collapse(failures);
            assert_eq!(seen, chunk.load());
            assert_eq!(seen.failures(), failures.min(FAILURES_MAX));
            assert_eq!((seen.since(), seen.is_queued()), (failures, true));
        }
    }

    #[test]
    fn the_table_has_a_word_for_every_chunk() {
        let table = ChunkTable::new();
        let chunks = [0, 1, FIRST - 1, FIRST, 3 * FIRST - 1, 3 * FIRST, 100_000];
        chunks.iter().for_each(|chunk| _ = table.get(*chunk).admit(*chunk % 500, 0));
        for chunk in chunks {
            assert_eq!(table.get(chunk).load().resident(), chunk % 500, "{chunk}");
        }
        let farthest = crate::PageRef::MAX_ID / HUGE_PAGES + FIRST;
        assert!(((farthest.ilog2() - FIRST.ilog2()) as usize) < PARTS);
    }
}
