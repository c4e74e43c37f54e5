//! How far two processors are from each other.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// So many times a line goes to the other processor and back.
const TURNS: u64 = 5000;

/// Measurements, of which the shortest counts.
const SAMPLES: usize = 5;

/// The nanoseconds in which a line of the cache goes from one processor to another; `None` on a
/// machine with one processor.
///
/// Virtual processors may move while an experiment runs: from two that share a cache to two that do
/// not. Then all figures of several threads change.
pub fn distance() -> Option<f64> {
    (super::processors() > 1)
        .then(|| (0..SAMPLES).map(|_| take_turns()).fold(f64::INFINITY, f64::min))
}

fn take_turns() -> f64 {
    let turn = AtomicU64::new(0);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let turn = &turn;
            scope.spawn(move || {
                for own in (thread..2 * TURNS).step_by(2) {
                    while turn.load(Ordering::Acquire) != own {
                        spin_loop();
                    }
                    turn.store(own + 1, Ordering::Release);
                }
            });
        }
    });
    began.elapsed().as_nanos() as f64 / (2 * TURNS) as f64
}
