//! Whether the storage answers at once, so that a read never makes its thread sleep.
//!
//! Memory that plays the block device (zram, persistent memory), tmpfs and what lies in the page
//! cache are like that. Then a blocking read on the spot costs what the copying costs, while a
//! completion through a ring costs another thread's wake-up on top: nearly twice as much, measured
//! on zram. So reads that may be asynchronous are done on the spot as long as they do not sleep.
//! The kernel counts how often a thread slept, so this is observed and not guessed.

use std::sync::atomic::{AtomicU32, Ordering};

use super::transfer::sleeps_of_this_thread;

/// The score is between zero and this.
const BEST: u32 = 16;
/// From this score on the storage counts as prompt.
const PROMPT: u32 = BEST / 2;
/// What a trial without sleep adds: four in a row make the storage prompt.
const TRIAL: u32 = 2;
/// At the best score only one batch in so many is watched.
const WATCHED: u32 = 16;

/// What was seen of the storage so far. Threads may overwrite each other's observations: then it
/// takes a few more.
#[derive(Debug, Default)]
pub(super) struct Promptness {
    score: AtomicU32,
    /// Batches so far, and the one that the next trial is due at.
    batches: AtomicU32,
    next_trial: AtomicU32,
}

impl Promptness {
    /// Reads had better be done on the spot.
    pub(super) fn is_prompt(&self) -> bool {
        self.score.load(Ordering::Relaxed) >= PROMPT
    }

    /// Whether one read of this batch should be done on the spot to see how long it takes. After a
    /// sleep that is four times as many batches later as the time before.
    pub(super) fn trial_is_due(&self) -> bool {
        self.batches.fetch_add(1, Ordering::Relaxed) >= self.next_trial.load(Ordering::Relaxed)
    }

    /// Runs `count` reads on the spot and draws conclusions.
    pub(super) fn watch(&self, count: usize, reads: impl FnOnce()) {
        if self.score.load(Ordering::Relaxed) == BEST
            && !self.batches.fetch_add(1, Ordering::Relaxed).is_multiple_of(WATCHED)
        {
            return reads();
        }
        let before = sleeps_of_this_thread();
        reads();
        self.conclude(count, sleeps_of_this_thread() - before);
    }

    fn conclude(&self, reads: usize, sleeps: i64) {
        // A few may be of other causes: a lock, or memory that was short.
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
            let batches = self.batches.load(Ordering::Relaxed);
            self.next_trial.store(batches.saturating_mul(4), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Sleeps, by the kernel's count: where the thread is kept from running, its time may be over
    /// before it falls asleep.
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
        let mut batches = 0;
        while promptness.is_prompt() {
            promptness.watch(1, sleep);
            batches += 1;
        }
        assert!(batches <= WATCHED + BEST, "{batches} slow batches were waited for");
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
        assert!((4..=7).contains(&trials), "{trials} trials in 1000 batches");
        assert!(!promptness.is_prompt());
    }
}
