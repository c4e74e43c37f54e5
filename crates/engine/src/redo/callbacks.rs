//! The callbacks of commits that wait for the log. A close that fails waits for them.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};

use crate::sync::{lock, wait};

/// The callbacks that have not returned.
#[derive(Debug, Default)]
pub(super) struct Callbacks(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    left: Mutex<Left>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Left {
    count: usize,
    /// The threads that run one.
    running: Vec<ThreadId>,
}

/// A callback that the log has, or that runs. It counts until this is dropped.
pub(super) struct Callback(Arc<Shared>);

impl Callbacks {
    /// The log gets one more.
    pub(super) fn begin(&self) -> Callback {
        lock(&self.0.left).count += 1;
        Callback(self.0.clone())
    }

    /// Waits until all have returned. A thread that runs one itself waits for none: the others may
    /// come after it.
    pub(super) fn wait(&self) {
        let this = thread::current().id();
        let mut left = lock(&self.0.left);
        while left.count > 0 && !left.running.contains(&this) {
            left = wait(&self.0.returned, left);
        }
    }
}

impl Callback {
    /// Runs it.
    pub(super) fn run(self, callback: impl FnOnce()) {
        lock(&self.0.left).running.push(thread::current().id());
        let running = Running(&self);
        callback();
        drop(running);
    }
}

impl Drop for Callback {
    fn drop(&mut self) {
        lock(&self.0.left).count -= 1;
        self.0.returned.notify_all();
    }
}

/// While this lives, the thread runs a callback.
struct Running<'c>(&'c Callback);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let this = thread::current().id();
        let mut left = lock(&self.0.0.left);
        let at = left.running.iter().rposition(|thread| *thread == this);
        at.map(|at| left.running.swap_remove(at));
    }
}
