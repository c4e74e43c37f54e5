//! Waiting for other threads and processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for an event that takes a moment on an idle machine. The machine may be
/// busy.
pub const PATIENCE: Duration = Duration::from_secs(200);

/// Waits until something holds, or fails.
#[track_caller]
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Sets a flag when it is dropped, so that threads that run until the flag is set also end when the
/// test fails. Otherwise the failed test would wait for them forever, and report nothing.
#[derive(Debug)]
pub struct SetWhenDropped<'a>(pub &'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
