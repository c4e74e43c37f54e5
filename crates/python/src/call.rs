//! The frame of the calls on stores: they work without the interpreter's lock, in the process that
//! opened the store.
//!
//! A call locks an object only while it does not hold the interpreter's lock, so that no two
//! threads wait for each other, and other Python threads go on meanwhile.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use vellum::Error;

use crate::error;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a call on a store failed.
#[derive(Debug)]
pub(crate) enum Failure {
    Store(Error),
    /// An object was used after its end.
    Ended(&'static str),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Store(error)
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        match failure {
            Failure::Store(error) => error::of_store(&error),
            Failure::Ended(what) => PyValueError::new_err(what),
        }
    }
}

/// Runs a function on the store while other Python threads go on.
pub(crate) fn work<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|failure| failure.into().into())
}

/// The store's error inside an error of a reader or writer.
pub(crate) fn of_stream(error: io::Error) -> Error {
    error.downcast().unwrap_or_else(Error::Input)
}

/// Whether this process opened the store. The child of a fork does not have the pool's memory, and
/// would crash if it touched it.
pub(crate) fn check_process(process: u32) -> PyResult<()> {
    match process == std::process::id() {
        true => Ok(()),
        false => Err(PyValueError::new_err(
            "the store was opened by the parent of this process: open it after the fork",
        )),
    }
}
