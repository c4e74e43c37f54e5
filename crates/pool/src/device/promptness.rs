//! Whether the storage answers at once, so that a read never makes its thread sleep.
//!
//! Block devices made of memory (zram, persistent memory), tmpfs and the page cache answer at once.
//! A blocking read on the calling thread then costs no more than the copy. A completion through a
//! ring wakes another thread as well, and costs nearly twice as much (measured on zram). So the
//! device does asynchronous reads on the calling thread as long as they do not sleep. The kernel
//! counts how often a thread slept, so the device observes this and does not guess.

use std::sync::atomic::{AtomicU32, Ordering};

use super::transfer::sleeps_of_this_thread;

/// The score is between zero and this.
const BEST: u32 = 16;
/// From this score on the storage counts as prompt.
const PROMPT: u32 = BEST / 2;
/// A trial without sleep adds so much: four in a row make the storage prompt.
const TRIAL: u32 = 2;
/// At the best score the device watches only one call in so many.
const WATCHED: u32 = 16;

/// The score of storage that always counts as prompt, in tests.
const ALWAYS: u32 = u32::MAX;

/// The observations of the storage so far. Threads may overwrite each other's observations; the
/// score then takes a few more to settle.
#[derive(Debug, Default)]
pub(super) struct Promptness {
    score: AtomicU32,
    /// The number of calls that read so far, and the call at which the next trial is due.
    calls: AtomicU32,
    next_trial: AtomicU32,
}

impl Promptness {
    /// Storage that counts as prompt, whatever it does.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn always() -> Self {
        Self { score: ALWAYS.into(), ..Self::default() }
    }

    /// Whether the calling thread should do reads itself.
    pub(super) fn is_prompt(&self) -> bool {
        self.score.load(Ordering::Relaxed) >= PROMPT
    }

    /// Whether the calling thread should do one read of this call, to see whether it sleeps. Each
    /// sleep makes the wait for the next trial four times as long, counted in calls.
    pub(super) fn trial_is_due(&self) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed) >= self.next_trial.load(Ordering::Relaxed)
    }

    /// Runs `count` reads on the calling thread and updates the score.
    pub(super) fn watch(&self, count: usize, reads: impl FnOnce()) {
        let is_watched = match self.score.load(Ordering::Relaxed) {
            ALWAYS => false,
            BEST => self.calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(WATCHED),
            _ => true,
        };
        if !is_watched {
            return reads();
        }
        let before = sleeps_of_this_thread();
        reads();
        self.conclude(count, sleeps_of_this_thread() - before);
    }

    fn conclude(&self, reads: usize, sleeps: i64) {
        // A few sleeps may have other causes, such as a lock or a shortage of memory.
        let slept = sleeps.unsigned_abs() > reads as u64 / 8;
        let score = self.score.load(Ordering::Relaxed);
        let now = match (score >= PROMPT, slept) {
            (true, false) => (score + 1).min(BEST),
            (false, false) => score + TRIAL,
            (true, true) => score - TRIAL,
            (false, true) => 0,
        };
        self.score.store(now, Ordering::Relaxed);
        if slept {
            let calls = self.calls.load(Ordering::Relaxed);
            self.next_trial.store(calls.saturating_mul(4), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Sleeps until the kernel counts it: on a busy CPU the sleep may be over before it begins.
    fn sleep() {
        let before = sleeps_of_this_thread();
        while sleeps_of_this_thread() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn reads_that_never_sleep_make_it_prompt_and_sleeps_end_that() {
        let promptness = Promptness::default();
        let mut trials = 0;
        while !promptness.is_prompt() {
            assert!(promptness.trial_is_due());
            promptness.watch(1, || {});
            trials += 1;
            assert!(trials < 20, "a thread that does nothing was seen sleeping");
        }
        assert!(trials >= 4);
        (0..1000).for_each(|_| promptness.watch(32, || {}));
        assert!(promptness.is_prompt());
        let mut calls = 0;
        while promptness.is_prompt() {
            promptness.watch(1, sleep);
            calls += 1;
        }
        assert!(calls <= WATCHED + BEST, "{calls} slow calls were waited for");
    }

    #[test]
    fn storage_that_sleeps_is_tried_less_and_less_often() {
        let promptness = Promptness::default();
        let mut trials = 0;
        for _ in 0..1000 {
            if promptness.trial_is_due() {
                trials += 1;
                promptness.watch(1, sleep);
            }
        }
        assert!((4..=7).contains(&trials), "{trials} trials in 1000 calls");
        assert!(!promptness.is_prompt());
    }
}
