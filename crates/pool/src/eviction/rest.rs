//! When a background thread rests: while it has to wait for a processor.
//!
//! If the threads that miss use all processors, a thread that evicts for them takes one of them
//! away for as long as it evicts. A miss that finds no free frame evicts a batch itself, which
//! costs no more, and no change of threads. So the background thread looks how long it was ready
//! to run and did not run (the kernel calls that the run delay), and rests if that is a large part
//! of its time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// The thread looks when it has run, and waited to run, for so long.
const LOOK: Duration = Duration::from_millis(20);
/// It rests if it has waited for one part in so many of that time.
const SHARE: u32 = 8;
/// The first rest is the shortest. Each one that follows at the next look is twice as long.
const SHORTEST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_millis(3200);

/// Says when a thread rests, and for how long.
#[derive(Debug)]
pub(crate) struct Rests {
    /// What the kernel counts of the thread. None if it does not count, and in the model, which has
    /// no clock.
    counts: Option<File>,
    last: Times,
    next: Duration,
}

/// How long a thread has run, and how long it has waited to run.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    ran: Duration,
    waited: Duration,
}

impl Rests {
    /// Those of the calling thread.
    pub(crate) fn of_this_thread() -> Rests {
        Rests {
            counts: match cfg!(feature = "model") {
                true => None,
                false => File::open("/proc/thread-self/schedstat").ok(),
            },
            last: Times::default(),
            next: SHORTEST,
        }
    }

    /// Those of a thread of which a file has the counts.
    #[cfg(all(test, not(feature = "model")))]
    pub(crate) fn of_file(counts: File) -> Rests {
        Rests { counts: Some(counts), last: Times::default(), next: SHORTEST }
    }

    /// How long the thread should rest now, if it may and should.
    pub(crate) fn due(&mut self, may_rest: bool) -> Option<Duration> {
        let mut text = [0; 64];
        let length = self.counts.as_ref()?.read_at(&mut text, 0).ok()?;
        self.due_at(Times::of(str::from_utf8(&text[..length]).ok()?)?, may_rest)
    }

    fn due_at(&mut self, now: Times, may_rest: bool) -> Option<Duration> {
        let ran = now.ran.saturating_sub(self.last.ran);
        let waited = now.waited.saturating_sub(self.last.waited);
        if ran + waited < LOOK {
            return None;
        }
        self.last = now;
        if waited * SHARE < ran + waited {
            self.next = SHORTEST;
            return None;
        }
        if !may_rest {
            return None;
        }
        let rest = self.next;
        self.next = (2 * rest).min(LONGEST);
        Some(rest)
    }
}

impl Times {
    /// By the kernel's text: nanoseconds that the thread ran, nanoseconds that it waited, and a
    /// count of times.
    fn of(text: &str) -> Option<Times> {
        let mut numbers = text.split_ascii_whitespace();
        let mut next = || numbers.next()?.parse().ok().map(Duration::from_nanos);
        Some(Times { ran: next()?, waited: next()? })
    }
}

#[cfg(all(test, not(feature = "model")))]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_waits_rests_longer_each_time() {
        let mut rests = Rests::of_this_thread();
        let mut now = Times::default();
        let mut after = |rests: &mut Rests, ran, waited| {
            now.ran += Duration::from_millis(ran);
            now.waited += Duration::from_millis(waited);
            rests.due_at(now, true).map(|rest| rest.as_millis())
        };
        assert_eq!(after(&mut rests, 19, 0), None, "no look");
        assert_eq!(after(&mut rests, 41, 5), None, "a look, and a thirteenth");
        assert_eq!(after(&mut rests, 16, 3), None, "no look");
        assert_eq!(after(&mut rests, 1, 0), Some(200));
        assert_eq!(after(&mut rests, 0, 20), Some(400));
        for rest in [800, 1600, 3200, 3200] {
            assert_eq!(after(&mut rests, 42, 8), Some(rest));
        }
        assert_eq!(after(&mut rests, 100, 10), None);
        assert_eq!(after(&mut rests, 100, 20), Some(200));
        // What it has waited while it may not rest counts for no later rest.
        now.waited += Duration::from_millis(500);
        assert_eq!(rests.due_at(now, false), None);
        now.ran += Duration::from_millis(20);
        assert_eq!(rests.due_at(now, true), None);
    }

    #[test]
    fn the_kernel_counts_what_this_thread_runs() {
        let times = || {
            let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
            Times::of(&text).unwrap()
        };
        let before = times();
        let begin = Instant::now();
        while times().ran < before.ran + Duration::from_millis(2) {
            assert!(begin.elapsed() < Duration::from_secs(60), "the kernel does not count");
        }
        assert!(times().waited >= before.waited);
        for text in ["", "5", "5 x 1", "5,6"] {
            assert!(Times::of(text).is_none(), "{text:?}");
        }
    }
}
