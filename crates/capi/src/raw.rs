//! What C gives as plain pointers and numbers: strings and descriptors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{FromRawFd, OwnedFd};

use vellum_morsel::Errno;

use crate::call::{Failure, Outcome};

/// A string that must be there and be UTF-8.
pub(crate) fn text<'a>(string: *const c_char, what: &str) -> Outcome<&'a str> {
    if string.is_null() {
        return Err(Failure::argument(&format!("{what} is NULL")));
    }
    // SAFETY: the header asks for a string that ends with a NUL and stays as it is during the call;
    // nothing keeps it longer.
    let string = unsafe { CStr::from_ptr(string) };
    string.to_str().map_err(|_| Failure::argument(&format!("{what} is not UTF-8")))
}

/// A descriptor of our own for the same file: the caller keeps its own, whatever that is.
pub(crate) fn duplicate(descriptor: c_int) -> Outcome<OwnedFd> {
    // SAFETY: the call takes any number, and says whether that is a descriptor.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        let error = std::io::Error::last_os_error();
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::BADF);
        return Err(Failure::system("taking a descriptor", errno));
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
