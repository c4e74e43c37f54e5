//! Calling the functions that wait for records.
//!
//! A thread of the log calls them, one after the other, and does nothing else. No other thread
//! waits for it but one that ends the log or [waits for them](Calls::wait). So such a function may
//! use the log, and what is above it, and a slow one delays no flush.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::LogError;
use crate::sync::{Condvar, Mutex, ThreadId, lock, thread, wait};

/// What is called when a record is durable, or never will be: once, with no lock held, on a thread
/// of the log that makes such calls, one after the other. A log that has no threads, or has ended,
/// calls it on any thread.
pub type Durable = Box<dyn FnOnce(Result<(), LogError>) + Send>;

/// A function to be called, with what it is told.
pub(crate) type Call = (Durable, Result<(), LogError>);

/// The calls of a log. They know nothing else of it, so their thread keeps nothing of it in place.
#[derive(Default)]
pub(crate) struct Calls {
    state: Mutex<State>,
    /// There is something to call, or no more will come.
    work: Condvar,
    /// Functions have returned.
    returned: Condvar,
}

#[derive(Default)]
struct State {
    due: Vec<Call>,
    /// How many there were.
    taken: u64,
    /// How many of these have returned.
    returned: u64,
    /// The thread that calls them.
    thread: Option<ThreadId>,
    /// The thread takes no more.
    ended: bool,
}

impl Calls {
    /// Has the thread call these. Returns them if no thread does: the caller calls them once it
    /// holds no lock.
    #[must_use]
    pub(crate) fn take(&self, calls: Vec<Call>) -> Vec<Call> {
        if calls.is_empty() {
            return calls;
        }
        let mut state = lock(&self.state);
        if state.thread.is_none() || state.ended {
            return calls;
        }
        state.taken += calls.len() as u64;
        state.due.extend(calls);
        drop(state);
        self.work.notify_one();
        Vec::new()
    }

    /// The thread that is about to [run](Self::run) takes calls from now on.
    pub(crate) fn begin(&self, thread: ThreadId) {
        lock(&self.state).thread = Some(thread);
    }

    /// What the thread does.
    pub(crate) fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            let due = std::mem::take(&mut state.due);
            if !due.is_empty() {
                drop(state);
                for one in due {
                    call(one);
                    lock(&self.state).returned += 1;
                    self.returned.notify_all();
                }
                state = lock(&self.state);
            } else if state.ended {
                return;
            } else {
                state = wait(&self.work, state);
            }
        }
    }

    /// The thread takes no more calls, and ends after those that it has.
    pub(crate) fn end(&self) {
        lock(&self.state).ended = true;
        self.work.notify_one();
    }

    /// Waits until the calls have returned that were taken by now. A call itself waits for none.
    pub(crate) fn wait(&self) {
        let mut state = lock(&self.state);
        let newest = state.taken;
        while state.returned < newest && state.thread != Some(thread::current().id()) {
            state = wait(&self.returned, state);
        }
    }
}

/// Calls a function of the caller's, which must not take a thread of the log down with it.
pub(crate) fn call((function, result): Call) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| function(result))) {
        tracing::error!("a callback of the log panicked");
        // Dropping what it panicked with may panic, too.
        if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(another);
        }
    }
}
