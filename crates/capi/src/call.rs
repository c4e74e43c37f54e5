//! What every function has in common: its errors, and that no panic leaves it.
#![allow(unsafe_code)] // exported names

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use vellum_morsel::{ClientError, Errno, Error};

/// Why a function failed: what C gets of it.
pub(crate) struct Failure {
    errno: Errno,
    message: String,
}

impl Failure {
    /// An argument that no call can take.
    pub(crate) fn argument(message: &str) -> Self {
        Self { errno: Errno::INVAL, message: message.into() }
    }

    pub(crate) fn new(errno: Errno, message: String) -> Self {
        Self { errno, message }
    }

    pub(crate) fn system(doing: &str, errno: Errno) -> Self {
        Self { errno, message: format!("{doing}: {errno}") }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { errno: error.errno(), message: error.to_string() }
    }
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Self {
        let errno = Errno::from_raw_os_error(error.errno());
        Self { errno, message: error.to_string() }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self { errno: error.errno(), message: error.to_string() }
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a function's body. Zero, or a negative error number with its message left for
/// [`vellum_last_error`].
pub(crate) fn call(body: impl FnOnce() -> Outcome) -> c_int {
    // What a body may leave half done is the kernel's, and that does not unwind.
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let failure = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(_) => Failure {
            errno: Errno::NOTRECOVERABLE,
            message: "a defect of libvellum: it panicked; please report it".into(),
        },
    };
    let errno = failure.errno.raw_os_error();
    // Without NUL bytes, which a name in it may have had, this cannot fail.
    let message = CString::new(failure.message.replace('\0', "?")).unwrap_or_default();
    // A thread that ends has nobody left to read it.
    let _ = LAST.try_with(|last| last.replace(message));
    -errno
}

/// What an argument that must be there refers to.
pub(crate) fn given<T>(argument: Option<T>, what: &str) -> Outcome<T> {
    argument.ok_or_else(|| Failure::argument(&format!("{what} is NULL")))
}

/// Where a function leaves its result. It is looked at before anything is done, so that nothing is
/// made that the caller cannot get.
pub(crate) struct Place<'a, T>(&'a mut MaybeUninit<T>);

impl<'a, T> Place<'a, T> {
    pub(crate) fn new(place: Option<&'a mut MaybeUninit<T>>) -> Outcome<Self> {
        given(place, "the place for the result").map(Self)
    }

    pub(crate) fn set(self, value: T) {
        self.0.write(value);
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_last_error() -> *const c_char {
    const NONE: &CStr = c"";
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(NONE.as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn vellum_morsel_last_error() -> *const c_char {
    vellum_last_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_error() -> String {
        // SAFETY: a string that ends with a NUL, and this thread makes no other call meanwhile.
        let last = unsafe { CStr::from_ptr(vellum_morsel_last_error()) };
        last.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_is_an_error_number() {
        assert_eq!(call(|| panic!("a defect")), -libc::ENOTRECOVERABLE);
        assert!(last_error().contains("defect"));
        assert_eq!(call(|| Ok(())), 0);
    }

    #[test]
    fn errors_are_a_threads_own() {
        assert_eq!(call(|| Err(Failure::argument("a\0b"))), -libc::EINVAL);
        assert_eq!(last_error(), "a?b");
        std::thread::spawn(|| assert_eq!(last_error(), "")).join().unwrap();
    }
}
