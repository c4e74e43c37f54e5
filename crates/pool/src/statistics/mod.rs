//! What a pool has done so far, as numbers: [`PoolStats`].

pub(crate) mod counters;
pub(crate) mod histogram;

use std::sync::atomic::Ordering;

use crate::huge::{HugeChunks, HugePageStats};
use crate::pool::Pool;
use crate::slots::Slots;
use crate::statistics::counters::Event;
use crate::statistics::histogram::Latency;

/// A reading of a pool's counters. They only grow, except for what is resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// The pool's size in frames of 4 KiB.
    pub capacity_frames: u64,
    /// Frames in use, or taken for a page on its way in.
    pub resident_frames: u64,
    /// The most frames that were ever in use.
    pub resident_frames_peak: u64,
    /// Accesses that found their page in memory: fixes, and those optimistic reads that were
    /// reported with [`Pool::count_optimistic`]. One that is not reported leaves no trace here,
    /// because counting costs more than reading.
    pub hits: u64,
    /// Accesses that had to read their page, optimistic ones too.
    pub misses: u64,
    /// Pages read ahead of need.
    pub prefetches: u64,
    /// Pages that left memory.
    pub evictions: u64,
    /// ... of these, by the thread that needed the frame.
    pub evictions_inline: u64,
    /// Calls that released memory; `evictions / release_batches` is the mean batch.
    pub release_batches: u64,
    /// Dirty pages written.
    pub write_backs: u64,
    /// Optimistic reads that started again.
    pub restarts: u64,
    /// Optimistic reads that took a lock after too many restarts.
    pub starvations: u64,
    /// Waits for a page's lock.
    pub lock_waits: u64,
    /// Waits for a free frame.
    pub frame_waits: u64,
    /// Pages allocated.
    pub allocations: u64,
    /// Pages freed.
    pub frees: u64,
    /// Pages that could not be read, or were damaged, and that the format repaired
    /// ([`PageFormat::repair`](crate::PageFormat::repair)).
    pub repairs: u64,
    /// How often a page's state word was found that named another page's slot
    /// ([`PoolError::DamagedWord`](crate::PoolError::DamagedWord)). More than 0 says that the
    /// memory of the process is damaged.
    pub damaged_words: u64,
    /// Time from the start of a read to its end.
    pub read_latency: Latency,
    /// Time that a page's write took, as part of its batch.
    pub write_latency: Latency,
}

impl PoolStats {
    /// The share of accesses that found their page in memory, 0 to 1. Of all accesses only if the
    /// optimistic ones are reported, as a store's trees do.
    pub fn hit_rate(&self) -> f64 {
        let accesses = self.hits.saturating_add(self.misses);
        if accesses == 0 { 1.0 } else { self.hits as f64 / accesses as f64 }
    }
}

impl Pool {
    /// Reads all counters. Not a snapshot: threads go on counting meanwhile.
    pub fn stats(&self) -> PoolStats {
        let core = &*self.core;
        let total = |event| core.counters.total(event);
        // Misses first: a read that is under way was counted in neither, or in both.
        let missed = total(Event::OptimisticMiss);
        let reported_hits = total(Event::Optimistic).saturating_sub(missed);
        PoolStats {
            capacity_frames: core.budget.size(),
            resident_frames: core.budget.used(),
            resident_frames_peak: core.budget.peak(),
            hits: total(Event::Hit) + reported_hits,
            misses: total(Event::Miss),
            prefetches: total(Event::Prefetch),
            evictions: total(Event::Evict),
            evictions_inline: total(Event::EvictInline),
            release_batches: core.release_batches.load(Ordering::Relaxed),
            write_backs: total(Event::WriteBack),
            restarts: total(Event::Restart),
            starvations: total(Event::Starve),
            lock_waits: total(Event::Wait),
            frame_waits: total(Event::FrameWait),
            allocations: total(Event::Allocate),
            frees: total(Event::Free),
            repairs: total(Event::Repair),
            damaged_words: total(Event::DamagedWord),
            read_latency: core.read_latency.summary(),
            write_latency: core.write_latency.summary(),
        }
    }

    /// [`misses`](PoolStats::misses) of all threads but the one that calls. Only the difference of
    /// two calls by the same thread means anything, because a thread takes over the counters of one
    /// that has ended.
    pub fn misses_of_others(&self) -> u64 {
        self.core.counters.total_of_others(Event::Miss)
    }

    /// What the pool's huge pages did so far; all zero where it has none. Of a pool with slots: how
    /// many chunks of these are huge now.
    pub fn huge_page_stats(&self) -> HugePageStats {
        let mut stats =
            self.core.huge.as_ref().map_or_else(HugePageStats::default, HugeChunks::stats);
        stats.collapsed += self.core.slots.as_ref().map_or(0, Slots::huge_chunks);
        stats
    }
}
