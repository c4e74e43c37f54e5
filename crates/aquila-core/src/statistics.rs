//! Counters of what a cache has done.
//!
//! Each processor has its own, in its own lines of the CPU's caches. They take no part in the
//! protocol, so the model checks do not explore them.

use core::sync::atomic::{AtomicU64, Ordering};

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    Faults,
    Hits,
    Misses,
    ReadAhead,
    ReadAheadHits,
    Evictions,
    WrittenBack,
    Writes,
    WriteErrors,
    Shootdowns,
}

const KINDS: usize = Count::Shootdowns as usize + 1;

/// The counters of one processor. They are nothing but 64-bit words, in an order that changes with
/// the version only; zeros are new counters.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct Counters([AtomicU64; KINDS]);

impl Counters {
    /// How many words have a meaning.
    pub const WORDS: usize = KINDS;

    /// Counters that were read as words.
    pub fn of_words(words: [u64; Self::WORDS]) -> Self {
        Self(words.map(AtomicU64::new))
    }

    #[inline]
    pub(crate) fn add(&self, count: Count, events: u64) {
        self.0[count as usize].fetch_add(events, Ordering::Relaxed);
    }
}

/// What a cache has done since it was made, and what is in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Faults that the cache handled.
    pub faults: u64,
    /// Faults, and other requests for a page, that found it in the cache.
    pub hits: u64,
    /// Those that read it from the file.
    pub misses: u64,
    /// Pages that were read because they follow a page that was asked for.
    pub read_ahead: u64,
    /// How many of these the program used, as far as the pattern of its faults tells.
    pub read_ahead_hits: u64,
    /// Pages that left.
    pub evictions: u64,
    /// Pages that were written to their files.
    pub written_back: u64,
    /// Calls that wrote them: runs of neighbouring pages.
    pub writes: u64,
    /// Such calls that failed.
    pub write_errors: u64,
    /// Times that processors were asked to forget translations, each for a batch of pages.
    pub shootdowns: u64,
    /// Pages that are known to be dirty now: without those of which only dirty bits tell.
    pub dirty: u64,
    /// Frames that the cache may use: its size.
    pub frames: u32,
}

impl Statistics {
    /// The sum of the counters of all processors, and what is in the cache now.
    pub fn of(counters: &[Counters], dirty: u64, frames: u32) -> Self {
        let sum = |count: Count| {
            let of = |one: &Counters| one.0[count as usize].load(Ordering::Relaxed);
            counters.iter().map(of).sum()
        };
        Self {
            faults: sum(Count::Faults),
            hits: sum(Count::Hits),
            misses: sum(Count::Misses),
            read_ahead: sum(Count::ReadAhead),
            read_ahead_hits: sum(Count::ReadAheadHits),
            evictions: sum(Count::Evictions),
            written_back: sum(Count::WrittenBack),
            writes: sum(Count::Writes),
            write_errors: sum(Count::WriteErrors),
            shootdowns: sum(Count::Shootdowns),
            dirty,
            frames,
        }
    }
}
