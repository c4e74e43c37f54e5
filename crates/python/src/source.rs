//! What users name files and sockets by: paths, numbers, objects with `fileno()`.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::io::Errno;

/// A descriptor of our own for what an object stands for, so that nobody closes it meanwhile.
pub(crate) fn descriptor(object: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number: i32 = match object.extract() {
        Ok(number) => number,
        Err(_) => object.call_method0("fileno")?.extract()?,
    };
    let copy: i32 = object.py().import("os")?.call_method1("dup", (number,))?.extract()?;
    // SAFETY: `os.dup` has made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// A file to read from: a path is opened.
pub(crate) fn file(object: &Bound<'_, PyAny>) -> PyResult<File> {
    match object.extract::<PathBuf>() {
        Ok(path) => open(&path),
        Err(_) => descriptor(object).map(File::from),
    }
}

/// Opens a file for reading; the error has its name.
pub(crate) fn open(path: &Path) -> PyResult<File> {
    File::open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(errno) => {
            // The system's words; the number and the name stand beside them.
            let text = error.to_string();
            let text = text.split(" (os error").next().unwrap_or_default().to_owned();
            PyOSError::new_err((errno.raw_os_error(), text, path.as_os_str().to_owned()))
        }
        None => error.into(),
    })
}
