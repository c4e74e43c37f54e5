//! What the pool counts: everything but optimistic reads, which cost less than counting them.
//!
//! Each counter exists once per stripe, and a thread that owns a stripe adds to it with a load and
//! a store, no locked instruction. The first [`STRIPES`] living threads of the process own one;
//! further threads share the last one, with atomic additions. So counts are exact.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Threads that count without a locked instruction.
const STRIPES: usize = 64;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Event {
    /// A fix found its page resident.
    Hit,
    /// An optimistic read was made; reported by the reader.
    Optimistic,
    /// An optimistic read brought its page in; a `Miss`, too.
    OptimisticMiss,
    /// A page had to be read.
    Miss,
    /// A page was read ahead of need.
    Prefetch,
    /// A page left memory.
    Evict,
    /// ... because a thread that needed a frame found none, and evicted by itself.
    EvictInline,
    /// A dirty page was written.
    WriteBack,
    /// An optimistic read had to start again.
    Restart,
    /// An optimistic read gave up and took the shared lock.
    Starve,
    /// A thread or task waited for a page's lock.
    Wait,
    /// A thread or task waited for a frame.
    FrameWait,
    /// A page was allocated.
    Allocate,
    /// A page was freed.
    Free,
    /// A page that could not be read, or that was damaged, was made anew.
    Repair,
    /// A state word named a slot that was not the page's.
    DamagedWord,
}

const EVENTS: usize = Event::DamagedWord as usize + 1;

#[repr(align(128))]
#[derive(Debug, Default)]
struct Stripe([AtomicU64; EVENTS]);

/// One set of counters.
#[derive(Debug)]
pub(crate) struct Counters {
    stripes: Box<[Stripe; STRIPES + 1]>,
}

impl Counters {
    pub(crate) fn new() -> Counters {
        Counters { stripes: Box::new(std::array::from_fn(|_| Stripe::default())) }
    }

    /// Counts one event.
    #[inline(always)]
    pub(crate) fn count(&self, event: Event) {
        self.add(event, 1);
    }

    /// Counts several.
    #[inline(always)]
    pub(crate) fn add(&self, event: Event, by: u64) {
        let stripe = STRIPE.get();
        if stripe < STRIPES {
            let counter = &self.stripes[stripe].0[event as usize];
            counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        } else {
            self.add_shared(event, by);
        }
    }

    #[cold]
    #[inline(never)]
    fn add_shared(&self, event: Event, by: u64) {
        if STRIPE.get() == UNASSIGNED {
            // Without a lease, because the thread is ending, it stays unassigned.
            let _ = LEASE.try_with(|lease| STRIPE.set(lease.0));
        }
        let stripe = STRIPE.get().min(STRIPES);
        // A newly owned stripe may be counted atomically once; no other thread writes to it.
        self.stripes[stripe].0[event as usize].fetch_add(by, Ordering::Relaxed);
    }

    /// The sum over all threads.
    pub(crate) fn total(&self, event: Event) -> u64 {
        self.stripes.iter().map(|stripe| stripe.0[event as usize].load(Ordering::Relaxed)).sum()
    }

    /// The sum over all threads but this one. A thread without a stripe of its own counts, too.
    pub(crate) fn total_of_others(&self, event: Event) -> u64 {
        let own = self.stripes[..STRIPES].get(STRIPE.get());
        let own = own.map_or(0, |stripe| stripe.0[event as usize].load(Ordering::Relaxed));
        self.total(event).wrapping_sub(own)
    }
}

const UNASSIGNED: usize = usize::MAX;

/// A thread's right to a stripe, until the thread ends. [`STRIPES`] is the one that all others
/// share.
struct Lease(usize);

thread_local! {
    /// The stripe that this thread counts in. Beside its lease, because looking at a value that is
    /// dropped with its thread costs more.
    static STRIPE: Cell<usize> = const { Cell::new(UNASSIGNED) };
    static LEASE: Lease = Lease(acquire_stripe());
}

/// A bit for each stripe that a living thread owns.
static OWNED: AtomicU64 = AtomicU64::new(0);

fn acquire_stripe() -> usize {
    let mut owned = OWNED.load(Ordering::Relaxed);
    while owned != u64::MAX {
        let stripe = owned.trailing_ones();
        match OWNED.compare_exchange(
            owned,
            owned | (1 << stripe),
            Ordering::Acquire,
            Ordering::Relaxed,
        ) {
            Ok(_) => return stripe as usize,
            Err(now) => owned = now,
        }
    }
    STRIPES
}

impl Drop for Lease {
    fn drop(&mut self) {
        // What the thread still counts, in other destructors, it counts atomically.
        STRIPE.set(STRIPES);
        if self.0 < STRIPES {
            OWNED.fetch_and(!(1 << self.0), Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn exact_with_more_threads_than_stripes() {
        let counters = Arc::new(Counters::new());
        counters.add(Event::Hit, 7);
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for _ in 0..STRIPES + 10 {
                    scope.spawn(|| (0..1000).for_each(|_| counters.count(Event::Hit)));
                }
            });
        }
        let by_others = 3 * 1000 * (STRIPES as u64 + 10);
        assert_eq!(counters.total(Event::Hit), by_others + 7);
        assert_eq!(counters.total_of_others(Event::Hit), by_others);
        assert_eq!(counters.total(Event::Miss), 0);
    }
}
