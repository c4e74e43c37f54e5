//! How far two processors are from each other.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Measurements, of which the shortest counts.
const SAMPLES: usize = 5;

/// How long each takes. On a busy machine the threads wait for their processors meanwhile.
const SAMPLE: Duration = Duration::from_millis(2);

/// The nanoseconds in which a line of the cache goes from one processor to another; `None` on a
/// machine with one processor, or if two threads did not run at the same time.
///
/// Virtual processors may move while an experiment runs: from two that share a cache to two that do
/// not. Then all figures of several threads change.
pub fn processor_distance() -> Option<f64> {
    if super::processors() < 2 {
        return None;
    }
    let samples = (0..SAMPLES).filter_map(|_| take_turns());
    samples.min_by(f64::total_cmp)
}

/// Two threads take turns in writing a line. Returns how long a turn takes.
fn take_turns() -> Option<f64> {
    let (turn, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let write = |first: u64| {
        for own in (first..).step_by(2) {
            while turn.load(Ordering::Acquire) != own {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                spin_loop();
            }
            turn.store(own + 1, Ordering::Release);
        }
    };
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| write(0));
        scope.spawn(|| write(1));
        thread::sleep(SAMPLE);
        stop.store(true, Ordering::Relaxed);
    });
    let (elapsed, turns) = (began.elapsed(), turn.into_inner());
    (turns > 0).then(|| elapsed.as_nanos() as f64 / turns as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_takes_time() {
        if let Some(nanoseconds) = processor_distance() {
            assert!(nanoseconds > 1.0, "{nanoseconds}");
        }
    }
}
