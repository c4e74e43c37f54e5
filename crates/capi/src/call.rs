//! The frame of every function: it turns failures into numbers and messages, and stops panics.
#![allow(unsafe_code)] // exported names

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use vellum_morsel::{ClientError, Errno, Error};

/// The failure of a function, in the form that C gets.
#[derive(Clone, Debug)]
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

    /// The same failure, for calls that come after it.
    pub(crate) fn as_earlier(&self) -> Self {
        Self { errno: self.errno, message: format!("an earlier call failed: {}", self.message) }
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

impl From<vellum_dax::Error> for Failure {
    fn from(error: vellum_dax::Error) -> Self {
        Self { errno: error.errno(), message: error.to_string() }
    }
}

impl From<vellum_aquila::Error> for Failure {
    fn from(error: vellum_aquila::Error) -> Self {
        Self { errno: error.errno(), message: error.to_string() }
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

/// Runs a function's body. Returns 0, or a negative error number, and then keeps the message for
/// [`vellum_last_error`].
pub(crate) fn call(body: impl FnOnce() -> Outcome) -> c_int {
    // A panic leaves at most a system call unfinished, and the kernel completes that.
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
    // This cannot fail without NUL bytes, which a name in the message may have had.
    let message = CString::new(failure.message.replace('\0', "?")).unwrap_or_default();
    // A thread that is ending can no longer read the message.
    let _ = LAST.try_with(|last| last.replace(message));
    -errno
}

/// The referent of an argument that must not be NULL.
pub(crate) fn given<T>(argument: Option<T>, what: &str) -> Outcome<T> {
    argument.ok_or_else(|| Failure::argument(&format!("{what} is NULL")))
}

/// The caller's variable for a function's result. The function checks it first, so that it creates
/// nothing that the caller cannot get.
pub(crate) struct OutParameter<'a, T>(&'a mut MaybeUninit<T>);

impl<'a, T> OutParameter<'a, T> {
    pub(crate) fn new(out: Option<&'a mut MaybeUninit<T>>) -> Outcome<Self> {
        given(out, "the place for the result").map(Self)
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
