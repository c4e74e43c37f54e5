//! Errors as Python exceptions: `OSError` with its number, `ValueError` for invalid arguments.

use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use vellum_morsel::Error;

create_exception!(
    vellum.morsel,
    FormatError,
    PyValueError,
    "A file is not what its format demands, or was cut off."
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
        Error::Closed
        | Error::KeyTooLong { .. }
        | Error::BadOption(_)
        | Error::PoolTooSmall { .. } => PyValueError::new_err(error.to_string()),
        error => PyOSError::new_err((error.errno(), error.to_string())),
    }
}

pub(crate) fn format(error: &vellum_tensors::Error) -> PyErr {
    FormatError::new_err(error.to_string())
}
