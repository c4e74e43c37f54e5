//! What populating and releasing a page costs on each backend.
//!
//! Releasing must flush the page from the TLBs of the other processors, so its cost depends on how
//! many threads of the process are running: each processor that runs one gets an interrupt per
//! flush. So the number of threads is part of the setting. The backends take turns round by round,
//! so that a disturbance of the machine hits all of them; compare medians, and mind the spread.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::backend::{BackendChoice, BackendKind, choice};
use crate::error::SurfaceError;
use crate::range::Entry;
use crate::scratch::ScratchSurface;

/// How the cost is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Threads that run at once, each on pages of its own and, if the process may choose, on a
    /// processor of its own.
    pub threads: usize,
    /// Pages that each thread populates and releases per round.
    pub pages: u64,
    /// Pages per call, scattered over the thread's pages.
    pub batch: usize,
    /// Rounds that are counted; one more goes before them.
    pub rounds: usize,
}

impl Default for Setting {
    /// One thread, 2,048 pages in batches of 64, nine rounds: well under a second.
    fn default() -> Self {
        Self { threads: 1, pages: 2048, batch: 64, rounds: 9 }
    }
}

/// The values of all rounds, in nanoseconds per page.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// The middle value.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or_default();
        Self {
            median: f64::midpoint(at(values.len().saturating_sub(1) / 2), at(values.len() / 2)),
            min: at(0),
            max: at(values.len().saturating_sub(1)),
        }
    }
}

/// What a page costs on one backend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The backend.
    pub backend: BackendKind,
    /// How it was measured.
    pub setting: Setting,
    /// Nanoseconds per page populated. This includes zeroing, except on exmap, which does not zero.
    pub populate_ns: Spread,
    /// Nanoseconds per page released.
    pub release_ns: Spread,
}

/// Measures the backends in turns; the result has their order.
///
/// Numbers below 1 in `setting` count as 1. Populates at most `threads * batch` pages at a time.
///
/// # Errors
/// [`SurfaceError`] if the kernel refuses a surface, a backend does not work on this machine, or a
/// call failed.
pub fn measure(backends: &[BackendKind], setting: Setting) -> Result<Vec<Cost>, SurfaceError> {
    let setting = Setting {
        threads: setting.threads.max(1),
        pages: setting.pages.max(1),
        batch: setting.batch.max(1),
        rounds: setting.rounds.max(1),
    };
    let mut lanes = Vec::new();
    for backend in backends {
        let threads = setting.threads as u64;
        let frames = (setting.batch as u64).min(setting.pages) * threads;
        let surface = ScratchSurface::new(choice::open(
            BackendChoice::Only(*backend),
            setting.pages * threads,
            Some(frames),
        )?);
        lanes.push((*backend, surface, Vec::new(), Vec::new()));
    }
    for round in 0..=setting.rounds {
        for turn in 0..lanes.len() {
            let lane = (round + turn) % lanes.len();
            let (backend, surface, populate, release) = &mut lanes[lane];
            let (populated, released) =
                run_round(surface, setting).ok_or(SurfaceError::BackendUnavailable {
                    backend: *backend,
                    reason: "a call failed while its cost was measured".to_owned(),
                })?;
            if round > 0 {
                populate.push(populated);
                release.push(released);
            }
        }
    }
    let cost = |(backend, _, populate, release)| Cost {
        backend,
        setting,
        populate_ns: Spread::of(populate),
        release_ns: Spread::of(release),
    };
    Ok(lanes.into_iter().map(cost).collect())
}

/// One round with all threads; nanoseconds per page to populate and to release, None on a failure.
fn run_round(surface: &ScratchSurface, setting: Setting) -> Option<(f64, f64)> {
    let start = Barrier::new(setting.threads);
    let measured = AtomicUsize::new(0);
    let times = std::thread::scope(|scope| {
        let run = |thread: usize| {
            let (start, measured) = (&start, &measured);
            scope.spawn(move || {
                pin(thread);
                let mut entries = scattered(thread as u64 * setting.pages, setting.pages);
                start.wait();
                let times = work(surface, &mut entries, setting.batch);
                measured.fetch_add(1, Ordering::Relaxed);
                // Stay running until the others have their numbers too.
                while measured.load(Ordering::Relaxed) < setting.threads {
                    black_box(work(surface, &mut entries[..1], 1));
                }
                times
            })
        };
        let threads: Vec<_> = (0..setting.threads).map(run).collect();
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect::<Option<Vec<_>>>()
    })?;
    let pages = (setting.pages * setting.threads as u64) as f64;
    let mean = |part: fn(&(Duration, Duration)) -> Duration| {
        times.iter().map(part).sum::<Duration>().as_nanos() as f64 / pages
    };
    Some((mean(|times| times.0), mean(|times| times.1)))
}

/// Populates and releases batch by batch; the times of both, or None if an entry failed.
fn work(
    surface: &ScratchSurface,
    entries: &mut [Entry],
    batch: usize,
) -> Option<(Duration, Duration)> {
    let (mut populate, mut release) = (Duration::ZERO, Duration::ZERO);
    let mut failed = 0;
    for entries in entries.chunks_mut(batch) {
        let start = Instant::now();
        failed += surface.populate(entries);
        let between = Instant::now();
        failed += surface.release(entries);
        populate += between - start;
        release += between.elapsed();
    }
    (failed == 0).then_some((populate, release))
}

/// Entries of one page each, in an order without pattern.
fn scattered(first: u64, pages: u64) -> Vec<Entry> {
    let mut entries: Vec<Entry> = (first..first + pages).map(Entry::page).collect();
    let mut state = first | 1;
    for index in (1..entries.len()).rev() {
        // Knuth's multiplicative generator; only the order has to look scattered.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        entries.swap(index, (state >> 33) as usize % (index + 1));
    }
    entries
}

/// Puts the calling thread on one of the processors it may use, in turn; stays where it is if
/// that is not allowed.
fn pin(thread: usize) {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    if let Some(cpu) = processors.get(thread % processors.len().max(1)) {
        let mut one = CpuSet::new();
        one.set(*cpu);
        let _ = sched_setaffinity(None, &one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe;

    #[test]
    fn spreads_have_median_and_ends() {
        let odd = Spread::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((odd.median, odd.min, odd.max), (2.0, 1.0, 3.0));
        assert_eq!(Spread::of(vec![1.0, 2.0]).median, 1.5);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn the_order_is_a_permutation_of_the_threads_own_pages() {
        let mut pages: Vec<u64> =
            scattered(100, 50).iter().map(|entry| entry.range.start).collect();
        assert_ne!(pages, (100..150).collect::<Vec<_>>());
        pages.sort_unstable();
        assert_eq!(pages, (100..150).collect::<Vec<_>>());
    }

    #[test]
    fn every_backend_has_a_cost_with_one_and_two_threads() {
        for threads in [1, 2] {
            let setting = Setting { threads, pages: 130, batch: 64, rounds: 2 };
            let backends = probe::backends();
            let costs = measure(&backends, setting).unwrap();
            assert_eq!(costs.iter().map(|cost| cost.backend).collect::<Vec<_>>(), backends);
            for cost in costs {
                assert!(cost.populate_ns.min > 0.0 && cost.release_ns.min > 0.0, "{cost:?}");
                assert!(cost.release_ns.min <= cost.release_ns.median);
                assert!(cost.release_ns.median <= cost.release_ns.max);
            }
        }
    }
}
