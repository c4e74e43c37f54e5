//! Commits that return before they are durable, as futures of Python.
//!
//! No thread of the log waits for the interpreter's lock. It puts each future and its end on a
//! list, and a thread of Python (`package/vellum/_commits.py`) takes them from there. No thread of
//! the log drops an object of Python either: without the interpreter's lock that takes a lock of
//! PyO3's, which the child of a fork would find taken for ever.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use pyo3::prelude::*;
use vellum::Error;

use crate::call::lock;
use crate::error;

/// The ends of commits, on their way from the log to Python.
#[pyclass(name = "Ends", module = "vellum._native", frozen)]
#[derive(Debug, Default)]
pub(crate) struct PyEnds(Arc<Ends>);

#[derive(Debug, Default)]
pub(crate) struct Ends {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The futures whose end is known, each with its end.
    ended: Vec<(Py<PyAny>, Result<(), Error>)>,
    /// How many commits will still be put on the list.
    under_way: usize,
    closed: bool,
}

/// A commit that was begun, whose end will be put on the list. A commit that fails, or that a panic
/// ends, drops this, and has no end to wait for.
pub(crate) struct Begun(Arc<Ends>);

impl Begun {
    /// Puts the end on the list.
    pub(crate) fn put(self, future: Py<PyAny>, end: Result<(), Error>) {
        // The commit is under way until this is dropped.
        lock(&self.0.state).ended.push((future, end));
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.change(|state| state.under_way -= 1);
    }
}

impl Ends {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// Notes that the end of one more commit will come. `None` if the list is closed.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Begun> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        state.under_way += 1;
        drop(state);
        Some(Begun(self.clone()))
    }
}

impl PyEnds {
    /// The list, for threads without the interpreter's lock.
    pub(crate) fn list(&self) -> Arc<Ends> {
        self.0.clone()
    }
}

#[pymethods]
impl PyEnds {
    #[new]
    fn new() -> PyEnds {
        PyEnds::default()
    }

    /// Waits for ends. Returns each future with its exception, or None if it has none. Returns an
    /// empty list if the list is closed, and no commit is under way.
    fn wait(&self, py: Python<'_>) -> Vec<(Py<PyAny>, Option<PyErr>)> {
        let ended = py.detach(|| {
            let is_idle = |state: &mut State| {
                state.ended.is_empty() && !(state.closed && state.under_way == 0)
            };
            let state = self.0.changed.wait_while(lock(&self.0.state), is_idle);
            std::mem::take(&mut state.unwrap_or_else(PoisonError::into_inner).ended)
        });
        let ends = ended.into_iter();
        ends.map(|(future, end)| (future, end.err().map(|why| error::of_store(&why)))).collect()
    }

    /// Takes no more commits, and lets wait() return when none is under way.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.change(|state| state.closed = true));
    }
}
