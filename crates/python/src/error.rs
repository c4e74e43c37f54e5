//! Errors as Python exceptions: `OSError` with its number, `ValueError` for invalid arguments.

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;
use vellum_morsel::Error;

create_exception!(
    vellum.morsel,
    FormatError,
    PyValueError,
    "A file is not what its format demands, or was cut off."
);

create_exception!(
    vellum.store,
    Conflict,
    PyException,
    "Another transaction has changed what this one has read or changes. Nothing was changed."
);

/// The exception of an error. Python chooses the class of an `OSError` by its number.
pub(crate) fn of(error: &Error) -> PyErr {
    match error {
        Error::Shape { .. }
        | Error::OutOfRange { .. }
        | Error::Unaligned { .. }
        | Error::Address { .. }
        | Error::BadName { .. } => PyValueError::new_err(error.to_string()),
        error => PyOSError::new_err((error.errno().raw_os_error(), error.to_string())),
    }
}

/// The exception of an error of a store.
pub(crate) fn of_store(error: &vellum::Error) -> PyErr {
    use vellum::Error;
    match error {
        Error::Conflict => Conflict::new_err(
            "another transaction has changed what this one has read or changes: nothing was \
             changed; begin a new transaction and try again, as Store.transact() does",
        ),
        Error::Closed
        | Error::NoSuchSavepoint
        | Error::OtherStore(_)
        | Error::KeyTooLong { .. }
        | Error::NotSorted { .. }
        | Error::BadOption(_)
        | Error::PoolTooSmall { .. } => PyValueError::new_err(error.to_string()),
        Error::Pool(cause) if cause.is_bad_size() => PyValueError::new_err(error.to_string()),
        error => PyOSError::new_err((error.errno(), error.to_string())),
    }
}

pub(crate) fn format(error: &vellum_tensors::Error) -> PyErr {
    FormatError::new_err(error.to_string())
}
