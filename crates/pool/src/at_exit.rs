//! Calls that the C library makes when the process exits or forks: [`at_exit`], [`after_fork`].
#![allow(unsafe_code)]

use std::io;

/// Has the C library call `run` when the process exits: when `main` returns and when
/// [`std::process::exit`] is called. It runs on that thread, while other threads go on. A signal
/// that kills the process, `abort` and `_exit` skip the call. A child of `fork` inherits it.
///
/// # Errors
/// The C library has no memory for it.
pub fn at_exit(run: extern "C" fn()) -> io::Result<()> {
    // SAFETY: a function of the program is there for as long as the process; the C library drops
    // the call when it unloads a shared object. A panic in `run` ends the process, as in any
    // `extern "C"` function.
    match unsafe { libc::atexit(run) } {
        0 => Ok(()),
        _ => Err(io::ErrorKind::OutOfMemory.into()),
    }
}

/// Has the C library call `run` in each child that `fork` makes of this process, before the child
/// goes on. Other threads of the parent may have held any lock, so `run` waits for none, and
/// neither allocates nor frees.
///
/// # Errors
/// The C library has no memory for it.
pub fn after_fork(run: extern "C" fn()) -> io::Result<()> {
    // SAFETY: as for `at_exit`.
    match unsafe { libc::pthread_atfork(None, None, Some(run)) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
