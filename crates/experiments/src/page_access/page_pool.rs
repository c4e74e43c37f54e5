//! Another buffer manager as a shared library, for `page-reads`. `crates/bench-peers/caliby` has
//! one, and says how to build it.
//!
//! The library has four functions, and one pool at a time:
//!
//! ```c
//! const char *page_pool_name(void);
//! int page_pool_open(const char *path, uint64_t pool_bytes, uint64_t data_bytes);
//! int page_pool_read(const uint64_t *pages, const uint64_t *offsets, uint64_t *words,
//!                    size_t count);
//! int page_pool_close(void);
//! ```
//!
//! All but the first return 0, or anything else after a failure. Pages have 4 KiB. Threads call
//! `page_pool_read` at the same time.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, bail, ensure};

/// The environment variable that names the library.
pub const VARIABLE: &str = "VELLUM_PAGE_POOL";

type Name = unsafe extern "C" fn() -> *const c_char;
type Open = unsafe extern "C" fn(*const c_char, u64, u64) -> c_int;
type Read = unsafe extern "C" fn(*const u64, *const u64, *mut u64, usize) -> c_int;
type Close = unsafe extern "C" fn() -> c_int;

/// A library that was loaded. It stays loaded as long as the process lives.
#[derive(Debug)]
pub struct Library {
    name: String,
    open: Open,
    read: Read,
    close: Close,
    /// Whether it has a pool now.
    is_open: AtomicBool,
}

impl Library {
    /// Loads the library that the environment names, if it names one.
    ///
    /// # Errors
    /// If that is not such a library.
    pub fn from_environment() -> Result<Option<Library>> {
        std::env::var_os(VARIABLE).map(|path| Library::load(Path::new(&path))).transpose()
    }

    /// Loads a library.
    ///
    /// # Errors
    /// If that is not one with these functions.
    pub fn load(path: &Path) -> Result<Library> {
        let c_path = CString::new(path.as_os_str().as_bytes())?;
        // Lazily: the library may have code that it does not use here, and that needs others.
        // SAFETY: a C string. The user answers for what the library does when it is loaded.
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
        if handle.is_null() {
            bail!("cannot load {}: {}", path.display(), last_error());
        }
        let function = |name: &CStr| -> Result<*mut c_void> {
            // SAFETY: an open library, and a C string.
            let function = unsafe { libc::dlsym(handle, name.as_ptr()) };
            ensure!(!function.is_null(), "{} has no {}", path.display(), name.to_string_lossy());
            Ok(function)
        };
        let name = function(c"page_pool_name")?;
        let (open, read) = (function(c"page_pool_open")?, function(c"page_pool_read")?);
        let close = function(c"page_pool_close")?;
        // SAFETY: functions of these types, as the module's documentation asks for. The name is a
        // string that stays.
        unsafe {
            let name = CStr::from_ptr(std::mem::transmute::<*mut c_void, Name>(name)());
            Ok(Library {
                name: name.to_string_lossy().into_owned(),
                open: std::mem::transmute::<*mut c_void, Open>(open),
                read: std::mem::transmute::<*mut c_void, Read>(read),
                close: std::mem::transmute::<*mut c_void, Close>(close),
                is_open: AtomicBool::new(false),
            })
        }
    }

    /// Its name in rows.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a pool of so many bytes over a file with so many bytes of pages.
    ///
    /// # Errors
    /// If the library cannot do that, or has a pool already.
    pub fn open(&self, path: &Path, pool_bytes: u64, data_bytes: u64) -> Result<PagePool<'_>> {
        ensure!(!self.is_open.swap(true, Ordering::Acquire), "{} has a pool already", self.name);
        let pool = PagePool(self);
        let path = CString::new(path.as_os_str().as_bytes()).context("a path with a zero")?;
        // SAFETY: as the module's documentation says.
        let result = unsafe { (self.open)(path.as_ptr(), pool_bytes, data_bytes) };
        if result != 0 {
            std::mem::forget(pool);
            bail!("{} cannot open a pool", self.name);
        }
        Ok(pool)
    }
}

/// What the dynamic linker says.
fn last_error() -> String {
    // SAFETY: a C string of this thread, or none.
    unsafe {
        let text = libc::dlerror();
        match text.is_null() {
            true => "no reason".to_owned(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

/// A library's pool.
#[derive(Debug)]
pub struct PagePool<'a>(&'a Library);

impl PagePool<'_> {
    /// Reads eight bytes of each page, at an offset of each.
    ///
    /// # Errors
    /// Those of the library.
    pub fn read(&self, pages: &[u64], offsets: &[u64], words: &mut [u64]) -> Result<()> {
        let count = words.len();
        ensure!(pages.len() == count && offsets.len() == count, "as many pages as words");
        // SAFETY: so many pages, offsets and words; the pool is open as long as this lives.
        let result =
            unsafe { (self.0.read)(pages.as_ptr(), offsets.as_ptr(), words.as_mut_ptr(), count) };
        ensure!(result == 0, "{} cannot read a page", self.0.name);
        Ok(())
    }
}

impl Drop for PagePool<'_> {
    fn drop(&mut self) {
        // SAFETY: no thread reads, since each would have a reference to this.
        if unsafe { (self.0.close)() } != 0 {
            eprintln!("vellum bench: {} cannot close its pool", self.0.name);
        }
        self.0.is_open.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_functions_is_refused() {
        let missing = Library::load(Path::new("no-such-library.so")).unwrap_err();
        assert!(missing.to_string().contains("cannot load no-such-library.so"), "{missing}");
        let other = Library::load(Path::new("libc.so.6")).unwrap_err();
        assert!(other.to_string().contains("libc.so.6 has no page_pool_name"), "{other}");
    }
}
