//! Arguments that name files and sockets: paths, numbers, objects with `fileno()`.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyTimeoutError};
use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;

/// A duplicate of an object's descriptor, so that no other thread can close it during the call.
pub(crate) fn descriptor(object: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number: i32 = match object.extract() {
        Ok(number) => number,
        Err(_) => object.call_method0("fileno")?.extract()?,
    };
    let copy: i32 = object.py().import("os")?.call_method1("dup", (number,))?.extract()?;
    // SAFETY: `os.dup` has just made it, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// How long a call waits between two checks for Ctrl-C.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Waits until a socket has something to receive, for as long as its timeout says. Does not wait
/// for a non-blocking socket.
///
/// # Errors
/// `TimeoutError`; the exception of a signal handler, such as `KeyboardInterrupt`.
pub(crate) fn wait(socket: &Bound<'_, PyAny>, descriptor: &OwnedFd) -> PyResult<()> {
    let py = socket.py();
    let timeout: Option<f64> = match socket.getattr_opt("gettimeout")? {
        Some(timeout) => timeout.call0()?.extract()?,
        None if is_non_blocking(descriptor)? => Some(0.0),
        None => None,
    };
    if timeout == Some(0.0) {
        return Ok(());
    }
    // A timeout that a clock cannot represent counts as none.
    let timeout = timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = deadline.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
        let look = Timespec::try_from(left.min(LOOK)).ok();
        let ready =
            py.detach(|| poll(&mut [PollFd::new(descriptor, PollFlags::IN)], look.as_ref()));
        match ready {
            Ok(0) if left.is_zero() => return Err(PyTimeoutError::new_err("timed out")),
            Ok(0) | Err(Errno::INTR) => py.check_signals()?,
            Ok(_) => return Ok(()),
            Err(errno) => return Err(std::io::Error::from(errno).into()),
        }
    }
}

fn is_non_blocking(descriptor: &OwnedFd) -> PyResult<bool> {
    let flags = fcntl_getfl(descriptor).map_err(std::io::Error::from)?;
    Ok(flags.contains(OFlags::NONBLOCK))
}

/// A file to read from. Opens a path.
pub(crate) fn file(object: &Bound<'_, PyAny>) -> PyResult<File> {
    match path(object) {
        Ok(path) => open(&path),
        Err(_) => descriptor(object).map(File::from),
    }
}

/// Opens a file for reading; the error has its name. Refuses files whose open would block.
pub(crate) fn open(path: &Path) -> PyResult<File> {
    vellum_morsel::open_source(path).map_err(|error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
        // The system's message. The exception adds the number and the name.
        let text = error.to_string();
        let text = text.split(" (os error").next().unwrap_or_default().to_owned();
        PyOSError::new_err((errno.raw_os_error(), text, path.as_os_str().to_owned()))
    })
}

/// A path in any form that Python takes: text, bytes, or an object with `__fspath__()`.
pub(crate) fn path(object: &Bound<'_, PyAny>) -> PyResult<PathBuf> {
    object.py().import("os")?.call_method1("fsdecode", (object,))?.extract()
}
