//! Arguments that C passes as plain pointers and numbers: strings, bytes and descriptors.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use vellum_morsel::Errno;

use crate::call::{Failure, Outcome};

/// `struct vellum_entry`.
#[repr(C)]
#[derive(Debug)]
pub struct CEntry {
    pub(crate) key: *const c_void,
    pub(crate) key_length: usize,
    pub(crate) value: *const c_void,
    pub(crate) value_length: usize,
}

/// A string that must not be NULL.
fn string<'a>(string: *const c_char, what: &str) -> Outcome<&'a CStr> {
    if string.is_null() {
        return Err(Failure::argument(&format!("{what} is NULL")));
    }
    // SAFETY: the header asks for a string that ends with a NUL and that no thread changes during
    // the call; nothing keeps it longer.
    Ok(unsafe { CStr::from_ptr(string) })
}

/// Pointers to strings that the call reads.
pub(crate) fn strings<'a>(
    begin: *const *const c_char,
    count: usize,
    what: &str,
) -> Outcome<&'a [*const c_char]> {
    if count == 0 {
        return Ok(&[]);
    }
    if begin.is_null() || count > isize::MAX as usize / size_of::<*const c_char>() {
        return Err(Failure::argument(&format!("{what} are NULL, or too many")));
    }
    // SAFETY: the pointer is not NULL, and the header asks for this many strings that no thread
    // changes during the call; nothing keeps them longer.
    Ok(unsafe { std::slice::from_raw_parts(begin, count) })
}

/// A string that must not be NULL and must be UTF-8.
pub(crate) fn text<'a>(given: *const c_char, what: &str) -> Outcome<&'a str> {
    let text = string(given, what)?.to_str();
    text.map_err(|_| Failure::argument(&format!("{what} is not UTF-8")))
}

/// The name of a file, which may have any bytes.
pub(crate) fn path<'a>(given: *const c_char, what: &str) -> Outcome<&'a Path> {
    Ok(Path::new(OsStr::from_bytes(string(given, what)?.to_bytes())))
}

/// Bytes that the call reads.
pub(crate) fn bytes<'a>(begin: *const c_void, length: usize) -> Outcome<&'a [u8]> {
    if length == 0 {
        return Ok(&[]);
    }
    check(begin, length)?;
    // SAFETY: the pointer is not NULL, and the header asks for this many bytes that no thread
    // changes during the call; nothing keeps them longer.
    Ok(unsafe { std::slice::from_raw_parts(begin.cast(), length) })
}

/// The keys of entries whose values the call will write.
pub(crate) fn keys<'a>(begin: *const CEntry, count: usize) -> Outcome<Vec<&'a [u8]>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if begin.is_null() || count > isize::MAX as usize / size_of::<CEntry>() {
        return Err(Failure::argument("the entries are NULL, or too many"));
    }
    let keys = (0..count).map(|at| {
        // SAFETY: the pointer is not NULL, and the header asks for this many entries with keys. The
        // caller may have left their values as they were, so no reference to an entry may exist.
        let (key, length) = unsafe { ((*begin.add(at)).key, (*begin.add(at)).key_length) };
        bytes(key, length)
    });
    keys.collect()
}

/// Writes the values of as many entries as [`keys`] has read.
pub(crate) fn set_values(
    begin: *mut CEntry,
    values: impl ExactSizeIterator<Item = (*const c_void, usize)>,
) {
    for (at, (value, length)) in values.enumerate() {
        // SAFETY: `keys` has read the entry there, and only this call uses it.
        unsafe {
            (*begin.add(at)).value = value;
            (*begin.add(at)).value_length = length;
        }
    }
}

/// Bytes that the call writes.
pub(crate) fn buffer<'a>(begin: *mut c_void, length: usize) -> Outcome<&'a mut [u8]> {
    if length == 0 {
        return Ok(&mut []);
    }
    check(begin, length)?;
    // SAFETY: as for `bytes`, and only this call uses them. It does not read them.
    Ok(unsafe { std::slice::from_raw_parts_mut(begin.cast(), length) })
}

fn check(begin: *const c_void, length: usize) -> Outcome {
    if begin.is_null() {
        return Err(Failure::argument("bytes are NULL, and their length is not 0"));
    }
    match begin.addr().checked_add(length) {
        Some(_) if isize::try_from(length).is_ok() => Ok(()),
        _ => Err(Failure::argument("a length beyond all addresses")),
    }
}

/// A duplicate of the caller's descriptor; the caller keeps its own.
pub(crate) fn duplicate(descriptor: c_int) -> Outcome<OwnedFd> {
    // SAFETY: the system call accepts any number, and fails if that is not a descriptor.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        let error = std::io::Error::last_os_error();
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::BADF);
        return Err(Failure::system("taking a descriptor", errno));
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
