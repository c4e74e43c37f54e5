//! Waiting for what others do.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for what takes a moment on an idle machine. Others have work, too.
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

/// Sets a flag when it goes: threads that work beside a test until the flag is set end when the
/// test fails, too. Otherwise the failed test waits for them for ever, and says nothing.
#[derive(Debug)]
pub struct SetWhenDropped<'a>(pub &'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
