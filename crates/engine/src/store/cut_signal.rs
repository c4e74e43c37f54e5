//! How a change that finds a checkpoint due has another thread write it (`store/cutter.rs`).

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, Ordering, lock, wait};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct CutSignal {
    /// A checkpoint was asked for, and has not ended.
    is_asked: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    has_thread: bool,
    ends: bool,
}

impl CutSignal {
    /// Asks for a checkpoint. Returns false if there is no thread that writes it.
    #[cold]
    pub(crate) fn ask(&self) -> bool {
        if self.is_asked.load(Ordering::Acquire) {
            return true;
        }
        let state = lock(&self.state);
        let is_heard = state.has_thread && !state.ends;
        if is_heard {
            self.is_asked.store(true, Ordering::Release);
            self.changed.notify_all();
        }
        is_heard
    }

    /// There is a thread that writes checkpoints.
    pub(crate) fn begin(&self) {
        lock(&self.state).has_thread = true;
    }

    /// Waits until a checkpoint is asked for. Returns false when the thread shall end.
    pub(crate) fn next(&self) -> bool {
        let mut state = lock(&self.state);
        while !state.ends && !self.is_asked.load(Ordering::Acquire) {
            state = wait(&self.changed, state);
        }
        !state.ends
    }

    /// The checkpoint has ended.
    pub(crate) fn end_cut(&self) {
        self.is_asked.store(false, Ordering::Release);
    }

    /// Waits for so long, or until the thread shall end. Returns false if it shall.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let state = lock(&self.state);
        if state.ends {
            return false;
        }
        drop(self.changed.wait_timeout(state, time));
        true
    }

    /// Has the thread end.
    pub(crate) fn end(&self) {
        lock(&self.state).ends = true;
        self.changed.notify_all();
    }
}
